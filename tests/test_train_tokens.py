"""`tokenizer.add_tokens`: embedding and head grow as transformers grows them, on any number of ranks, and stay so."""

from __future__ import annotations

import json
import sys
import sysconfig
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import forks
import trueshard
from gathering import whole
from messages import naming
from parity import Ranks, assert_same
from resting import all_but
from running import environment
from trueshard.errors import UserError
from trueshard.train.config import Config
from trueshard.train.data.tokenizer import load_tokenizer, train_tokenizer
from trueshard.train.models.build import architecture, build
from trueshard.train.models.parameters import seeded
from trueshard.train.models.values import fill
from trueshard.train.run import forecast
from trueshard.train.run.checks import check_settings

TOKENS = ["<tool>", "</tool>", "<think>"]
ROWS = 280
SEED = 7


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def start(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its tokenizer, on disk."""
    folder = tmp_path_factory.mktemp("start")
    texts = [file.read_text() for file in sorted((Path(sysconfig.get_path("stdlib")) / "json").glob("*.py"))]
    tokenizer = train_tokenizer(texts, ROWS, "text")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=ROWS, **sizes, tie_word_embeddings=request.param))
    for part in (model, tokenizer):
        part.save_pretrained(folder)
    (folder / "text").mkdir()
    for number, text in enumerate(texts):
        (folder / "text" / f"{number}.txt").write_text(text.replace("return", "<tool>").replace("raise", "<think>"))
    return folder


def config(start: Path, **tables: Any) -> Config:
    tree: dict[str, Any] = {
        "run": {"dir": str(start / "run")},
        "model": {"path": str(start)},
        "tokenizer": {"add_tokens": TOKENS},
        "data": {"path": str(start / "text")},
        "train": {"steps": 1, "seed": SEED, "sequence_length": 32, "batch_size": 12},
    }
    return Config.model_validate(tree | tables)


def grown(start: Path) -> dict[str, torch.Tensor]:
    """What transformers makes of it."""
    model = AutoModelForCausalLM.from_pretrained(start)
    with seeded(SEED, "tokenizer.add_tokens", torch.device("cpu")):
        model.resize_token_embeddings(ROWS + len(TOKENS))
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def values(rank: int, world: int, given: Config) -> dict[str, torch.Tensor]:
    model = build(given, check_settings(given, world))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trueshard.shard(model)
    fill(given, model)
    return whole(dict(model.named_parameters()))


def test_the_model_grows_as_transformers_grows_it(start: Path, alone: Ranks, ranks3: Ranks) -> None:
    expected = grown(start)
    read = AutoModelForCausalLM.from_pretrained(start).get_input_embeddings().weight
    name = "model.embed_tokens.weight"
    assert expected[name].shape[0] == 283, "an odd number, which no number of ranks divides"
    for found in (*alone.run(values, config(start)), *ranks3.run(values, config(start))):
        assert_same(found, expected, rtol=0, atol=0)
        assert torch.equal(found[name][:ROWS], read)
        torch.testing.assert_close(found[name][ROWS:], read.mean(0).expand(3, -1), rtol=0, atol=1e-4)


ADAPTERS: dict[str, dict[str, Any]] = {
    "whole modules": {"save_modules": ["embed_tokens", "lm_head"]},
    "single rows": {"arguments": {"trainable_token_indices": {"embed_tokens": [280, 281], "lm_head": [280, 281]}}},
}


@pytest.mark.parametrize("kind", all_but(["whole modules"], ADAPTERS))
def test_an_adapter_begins_with_the_new_rows(start: Path, kind: str, alone: Ranks, ranks2: Ranks) -> None:
    words = ADAPTERS[kind]
    if kind == "single rows" and json.loads((start / "config.json").read_text())["tie_word_embeddings"]:
        words = {"arguments": {"trainable_token_indices": [280, 281]}}
    given = config(start, adapter={"rank": 2} | words)
    (expected,) = alone.run(values, given)
    rows = grown(start)["model.embed_tokens.weight"]
    for found in ranks2.run(values, given):
        assert_same(found, expected, rtol=0, atol=0)
        held = {name: value for name, value in found.items() if "embed_tokens" in name}
        for name, value in held.items():
            assert torch.equal(value, {283: rows, 2: rows[280:282]}[len(value)]), name


@pytest.mark.rest
def test_weights_in_pickles_grow_likewise(start: Path, tmp_path: Path, alone: Ranks, ranks2: Ranks) -> None:
    model = AutoModelForCausalLM.from_pretrained(start)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((start / name).read_bytes())
    given = config(start, model={"path": str(tmp_path)})
    for found in ranks2.run(values, given):
        assert_same(found, grown(start), rtol=0, atol=0)


def test_rows_that_nothing_would_train_are_refused(start: Path) -> None:
    with pytest.raises(UserError, match=naming("tokenizer.add_tokens", "embed_tokens", "adapter.save_modules")):
        check_settings(config(start, adapter={"rank": 2}), 1)
    frozen = {"path": str(start), "freeze": ["*embed_tokens*"]}
    with pytest.raises(UserError, match=naming("tokenizer.add_tokens", "model.freeze")):
        check_settings(config(start, model=frozen), 1)


def test_tokens_are_one_each_and_known_ones_stay(start: Path) -> None:
    given = config(start, tokenizer={"add_tokens": [*TOKENS, "<|endoftext|>"]})
    tokenizer = load_tokenizer(given.tokenizer, given.model, "text")
    assert tokenizer("a<tool>b", add_special_tokens=False)["input_ids"][1] == ROWS
    assert [tokenizer.convert_tokens_to_ids(text) for text in given.tokenizer.add_tokens or ()] == [280, 281, 282, 0]
    assert tokenizer.decode([ROWS, ROWS + 1], skip_special_tokens=True) == "<tool></tool>"
    assert architecture(given, len(tokenizer)).vocab_size == 283


@pytest.mark.rest
def test_forecasts_have_the_new_rows(start: Path) -> None:
    counts = []
    for tokens in (TOKENS, None):
        study = forecast.plan(config(start, tokenizer={"add_tokens": tokens}), "h100", 2)
        counts.append(sum(unit.parameters for unit in study.plan.units))
    tied = json.loads((start / "config.json").read_text())["tie_word_embeddings"]
    assert counts[0] - counts[1] == len(TOKENS) * 32 * (1 if tied else 2)


def own_model(vocab_size: int) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, hidden_size=8, num_attention_heads=2))


def test_a_model_of_ones_own_is_given_the_size_with_them() -> None:
    tree: dict[str, Any] = {
        "run": {"dir": "run"},
        "model": {"build": f"{__file__}:own_model"},
        "tokenizer": {"vocab_size": 300, "add_tokens": TOKENS},
        "data": {"path": "text"},
        "train": {"steps": 1},
    }
    given = Config.model_validate(tree)
    model: Any = build(given, check_settings(given, 1))
    assert model.get_input_embeddings().weight.shape[0] == 303


def test_tokens_of_the_chat_template_end_turns(start: Path) -> None:
    given = config(start, tokenizer={"add_tokens": ["<|im_start|>", "<|im_end|>", "<tool>"]})
    tokenizer = load_tokenizer(given.tokenizer, given.model, "chat")
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    assert {"<|im_start|>", "<|im_end|>"} <= special
    assert "<tool>" not in special
    assert tokenizer.decode(tokenizer("a<|im_end|><tool>")["input_ids"], skip_special_tokens=True) == "a<tool>"


def train(start: Path, run: Path, *words: str) -> str:
    """What a run prints."""
    tables = {
        "run": {"dir": str(run)},
        "model": {"path": str(start)},
        "tokenizer": {"add_tokens": TOKENS},
        "data": {"path": str(start / "text")},
        "train": {"steps": 4, "seed": SEED, "sequence_length": 32, "batch_size": 12},
        "sample": {"tokens": 0},
    }
    file, lines = run.with_suffix(".toml"), []
    for name, table in tables.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    file.write_text("\n".join(lines))
    command = [sys.executable, "-m", "trueshard", "train", str(file), *words]
    done = forks.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


@pytest.mark.rest
def test_a_run_with_new_tokens_resumes_and_is_exported(start: Path, tmp_path: Path) -> None:
    said = train(start, tmp_path / "run", "--nproc=2")
    assert "'<tool>' is row 280, '</tool>' is row 281, '<think>' is row 282 of the embedding" in said
    assert "Resumed after step 4" in train(start, tmp_path / "run", "--nproc=1", "--set=train.steps=6")
    latest = tmp_path / "run" / "checkpoints" / "latest"
    trueshard.export(latest, tmp_path / "out")
    model, tokenizer = (kind.from_pretrained(tmp_path / "out") for kind in (AutoModelForCausalLM, AutoTokenizer))
    assert model.get_input_embeddings().weight.shape[0] == len(tokenizer) == 283
    before = grown(start)["model.embed_tokens.weight"]
    moved = (model.get_input_embeddings().weight - before).abs().amax(1)
    assert moved[280] > 1e-4, "it is in the text"
    again = train(latest, tmp_path / "again", f"--set=data.path={start / 'text'}", "--nproc=2")  # none is new
    assert "'<tool>' is row 280" in again


@pytest.mark.rest
def test_an_adapter_with_new_tokens_is_merged(start: Path, tmp_path: Path) -> None:
    given = tmp_path / "run"
    train(start, given, "--nproc=2", '--set=adapter.save_modules=["embed_tokens", "lm_head"]', "--set=adapter.rank=2")
    trueshard.export(given / "checkpoints" / "latest", tmp_path / "out", "merged")
    model, tokenizer = (kind.from_pretrained(tmp_path / "out") for kind in (AutoModelForCausalLM, AutoTokenizer))
    assert model.get_input_embeddings().weight.shape[0] == model.config.vocab_size == len(tokenizer) == 283
