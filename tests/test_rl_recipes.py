"""Every example of reinforcement learning runs, resumes and learns; frozen towers, adapters, references, tied heads."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist

import trueshard
from parity import RankFailure, Ranks
from test_recipes import trained

ROOT = Path(__file__).parents[1]
RECIPES = ["grpo", "dapo", "dr_grpo", "gspo", "rloo", "grpo_lora", "grpo_vision"]
SMALL = ("train.steps=4", "train.checkpoint_every=2", "evaluation.every=2", "evaluation.samples=4")
TEXT = (*SMALL, "train.batch_size=32", "train.accumulate=2")
VISION = (*SMALL, "train.batch_size=16", "rl.samples=4")
FIGURES = ("loss", "grad_norm", "reward", "reward_std", "entropy", "length_mean", "prompts", "evaluation_reward")


def small(name: str) -> tuple[str, ...]:
    return VISION if name == "grpo_vision" else TEXT


def lines(folder: Path) -> list[dict[str, Any]]:
    """Each answer of a run, without what its number of ranks may round."""
    keys = ("step", "prompt", "sample", "tokens", "reward", "used")
    found = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    return [{key: each[key] for key in keys} for each in found]


@pytest.mark.rest
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs_and_goes_on_bit_for_bit(name: str, ranks2: Ranks, tmp_path: Path) -> None:
    run = tmp_path / "run"
    whole = ranks2.run(trained, name, str(run), small(name), timeout=240)[0]
    assert whole["code"] == 0
    assert [record["step"] for record in whole["metrics"]] == [0, 1, 2, 3, 4]
    assert "evaluation_reward" in whole["metrics"][0]
    answers = lines(run)
    assert {each["step"] for each in answers} == ({1, 3} if name == "gspo" else {1, 2, 3, 4})
    assert (run / "reward.png").exists()

    end = run / "checkpoints" / "step-00000004"
    shutil.move(end, tmp_path / "whole")
    again = ranks2.run(trained, name, str(run), small(name), timeout=240)[0]
    assert "Resumed after step 2" in again["said"]
    for key in FIGURES:
        assert [each.get(key) for each in again["metrics"]] == [each.get(key) for each in whole["metrics"]], key
    assert lines(run) == answers
    assert not (compared := trueshard.inspect(tmp_path / "whole", end)), str(compared)


@pytest.mark.rest
@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_a_recipe_learns(name: str, ranks2: Ranks, tmp_path: Path) -> None:
    """The mean reward of the last sixth of the steps is above that of the first."""
    steps, gain = 36, 0.08
    words = (f"train.steps={steps}", f"evaluation.every={steps}", f"train.checkpoint_every={steps}")
    found = ranks2.run(trained, name, str(tmp_path), words, timeout=280)[0]
    rewards = [record["reward"] for record in found["metrics"] if "reward" in record]
    count = len(rewards) // 6
    assert sum(rewards[-count:]) > sum(rewards[:count]) + gain * count, rewards


@pytest.mark.rest
def test_answers_do_not_depend_on_the_number_of_ranks(ranks2: Ranks, ranks3: Ranks, tmp_path: Path) -> None:
    words = (*TEXT, "train.steps=2", "rl.samples=4", "train.batch_size=16", "train.accumulate=1")
    ranks2.run(trained, "dapo", str(tmp_path / "2"), words)
    ranks3.run(trained, "dapo", str(tmp_path / "3"), words)
    assert lines(tmp_path / "2") == lines(tmp_path / "3")


# What is in a rank


def inside(rank: int, world_size: int, name: str, folder: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Train, and return what a rank holds then: gradients, state, reference, log-probabilities, batches."""
    from trueshard.train.parse import load_config
    from trueshard.train.run.checks import check
    from trueshard.train.run.session import build_trainer

    os.chdir(ROOT)
    torch.set_num_threads(1)
    config = load_config(ROOT / "examples" / f"{name}.toml", [f"run.dir={folder}", *overrides])
    ready = check(config, world_size) if rank == 0 else None
    dist.barrier()
    ready = ready or check(config, world_size, make=False)
    trainer, _ = build_trainer(ready, lambda: False, device=torch.device("cpu"))
    rollouts: Any = trainer.loader
    begin = whole(trainer.model.state_dict())
    batches: list[Mapping[str, torch.Tensor]] = []
    make = rollouts._batch
    rollouts._batch = lambda *given: batches.append(make(*given)) or batches[-1]
    gradients: set[str] = set()
    step = trainer.optimizer.step

    def stepping(*given: Any, **named: Any) -> Any:
        gradients.update(name for name, each in trainer.model.named_parameters() if each.grad is not None)
        return step(*given, **named)

    trainer.optimizer.step = stepping  # type: ignore[method-assign]
    trainer.fit()
    frozen = [name for name, each in trainer.model.named_parameters() if not each.requires_grad]
    stateful = {id(each) for each in trainer.optimizer.state}
    records = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return {
        "metrics": [record for record in records if record["step"]],
        "begin": begin,
        "end": whole(trainer.model.state_dict()),
        "frozen": frozen,
        "gradients": gradients,
        "state": [name for name, each in trainer.model.named_parameters() if id(each) in stateful],
        "reference": rollouts.reference is not None,
        "keys": {key for batch in batches for key in batch},
        "samples": [vars(sample) for sample in rollouts.current.samples],
        "targets": [batch["targets"].ne(-100).sum().item() for batch in batches],
    }


def whole(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    full = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}
    return {name: value.clone() for name, value in full.items()}


def changed(found: Mapping[str, Any]) -> set[str]:
    """The tensors that training has changed."""
    return {name for name, value in found["begin"].items() if not torch.equal(value, found["end"][name])}


@pytest.mark.rest
def test_a_frozen_tower_stays_and_costs_nothing(ranks2: Ranks, tmp_path: Path) -> None:
    words = (*VISION, "train.steps=2", "rl.skip_equal=false")
    found = ranks2.run(inside, "grpo_vision", str(tmp_path), words)[0]
    tower = {name for name in found["begin"] if "vision_tower" in name}
    assert tower
    assert not tower & changed(found)
    assert not tower & (found["gradients"] | set(found["state"]))
    assert set(found["frozen"]) <= tower
    assert any("language_model" in name for name in changed(found))
    assert any("multi_modal_projector" in name for name in changed(found))
    checkpoint = tmp_path / "checkpoints" / "step-00000002"
    trueshard.check(checkpoint)
    from transformers import AutoModelForImageTextToText

    loaded = AutoModelForImageTextToText.from_pretrained(checkpoint).state_dict()
    assert all(torch.equal(value, found["end"][name]) for name, value in loaded.items())


@pytest.mark.rest
def test_an_adapter_is_trained_alone_and_its_base_is_the_reference(ranks2: Ranks, tmp_path: Path) -> None:
    found = ranks2.run(inside, "grpo_lora", str(tmp_path), TEXT)[0]
    assert changed(found)
    assert all("lora_" in name for name in changed(found) | found["gradients"] | set(found["state"]))
    assert not found["reference"]
    divergence = [record["kl_reference"] for record in found["metrics"]]
    assert divergence[0] == 0.0
    assert divergence[-1] > 0
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "checkpoints" / "step-00000004" / "adapter_model.safetensors")
    assert saved
    assert all("lora_" in name for name in saved)


def tied(folder: Path) -> Path:
    """A Llama of the sorting task, whose head is its embedding."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=14, max_position_embeddings=64, tie_word_embeddings=True, **sizes))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(ROOT / "examples" / "models" / "sort").save_pretrained(folder)
    return folder


@pytest.mark.rest
def test_a_tied_head_stays_tied(ranks2: Ranks, tmp_path: Path) -> None:
    words = (*TEXT, f"model.path={tied(tmp_path / 'model')}", "rl.kl=0.1")
    found = ranks2.run(inside, "grpo", str(tmp_path / "run"), words)[0]
    assert "lm_head.weight" in changed(found) or "lm_head.weight" not in found["end"]
    if "lm_head.weight" in found["end"]:
        assert torch.equal(found["end"]["lm_head.weight"], found["end"]["model.embed_tokens.weight"])
    assert found["metrics"][0]["kl_reference"] == 0.0
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoints" / "step-00000004")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


@pytest.mark.rest
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_sharded_reference_has_no_divergence_at_first_and_some_later(
    estimator: str, ranks2: Ranks, tmp_path: Path
) -> None:
    words = (*TEXT, "train.steps=3", "rl.kl=0.1", f"rl.kl_estimator={estimator}", "train.accumulate=1")
    found = ranks2.run(inside, "grpo", str(tmp_path), words)[0]
    assert found["reference"]
    records = found["metrics"]
    assert records[0]["kl_reference"] == 0.0
    assert records[-1]["kl_reference"] != 0.0
    if estimator == "k1":
        assert records[0]["reward_kl"] == 0.0
        assert records[-1]["reward_kl"] != 0.0
    else:
        assert records[-1]["kl_reference"] > 0.0


@pytest.mark.rest
def test_several_updates_compare_with_log_probabilities_before_them(ranks2: Ranks, tmp_path: Path) -> None:
    found = ranks2.run(inside, "grpo", str(tmp_path), (*TEXT, "rl.updates=2"))[0]
    records = found["metrics"]
    assert "old_logprobs" in found["keys"]
    assert [record["ratio_max"] == 1.0 for record in records] == [True, False, True, False]
    assert ["reward" in record for record in records] == [True, False, True, False]
    assert len(found["samples"]) >= 64


OWN_LOSS = """
import torch

def reinforce(logs, old, advantages, mask):
    return -advantages * logs
"""


@pytest.mark.rest
def test_a_loss_of_one_s_own_has_the_gradient_of_clip_at_a_ratio_of_one(ranks2: Ranks, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_LOSS)
    words = (*TEXT, "train.steps=2")
    wanted = ranks2.run(inside, "grpo", str(tmp_path / "clip"), words)[0]["metrics"]
    found = ranks2.run(inside, "grpo", str(tmp_path / "own"), (*words, f"rl.loss={tmp_path}/own.py:reinforce"))[0]
    for mine, theirs in zip(found["metrics"], wanted, strict=True):
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
        assert mine["reward"] == theirs["reward"]


@pytest.mark.rest
def test_the_guide_names_figures_and_keys_that_a_run_has(ranks2: Ranks, tmp_path: Path) -> None:
    from trueshard.train.config import Config

    page = (ROOT / "docs" / "how-to" / "reinforcement-learning.md").read_text(encoding="utf-8")
    section = page.partition("## When the reward does not rise")[2].partition("\n## ")[0]
    words = re.findall(r"`([a-z_]+(?:\.[a-z_]+)?|reward_<part>)[` ]", section.partition("|---")[2])
    figures, keys = ({word for word in words if ("." in word) == dotted} for dotted in (False, True))
    assert len(figures) > 20
    assert len(keys) > 15
    more = ("train.steps=3", "rl.updates=2", "rl.kl=0.04", "evaluation.every=3")
    logged: set[str] = {"reward_<part>"}
    for place in ("loss", "reward"):
        found = ranks2.run(inside, "grpo", str(tmp_path / place), (*TEXT, *more, f"rl.kl_in={place}"))[0]
        logged |= {key for record in found["metrics"] for key in record}
    assert figures <= logged, figures - logged
    for key in keys:
        table, _, name = key.partition(".")
        field = Config.model_fields[table].annotation
        sections = [each for each in (field, *get_args(field)) if hasattr(each, "model_fields")]
        assert any(name in each.model_fields for each in sections), key


OWN_ADVANTAGE = """
import numpy as np

def centred(rewards, lengths):
    assert rewards.dtype == np.float64 and lengths.dtype == np.int64 and rewards.shape == lengths.shape
    assert (lengths >= 1).all() and lengths.max() <= 8 or len(rewards) <= 3
    result = rewards - rewards.mean(1, keepdims=True)
    rewards[:] = lengths[:] = 0  # what is its own
    return result

def drawn(rewards, lengths):
    import torch
    return torch.rand(rewards.shape)  # others on each rank, but that rank 0's count
"""


@pytest.mark.rest
def test_an_advantage_of_one_s_own_is_taken_and_is_the_same_on_every_rank(ranks2: Ranks, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_ADVANTAGE)
    words = (*TEXT, "train.steps=2")
    wanted = ranks2.run(inside, "grpo", str(tmp_path / "word"), (*words, "rl.advantage=centred"))[0]["metrics"]
    own = f"rl.advantage={tmp_path}/own.py:"
    found = ranks2.run(inside, "grpo", str(tmp_path / "own"), (*words, f"{own}centred"))[0]["metrics"]
    keys = ("loss", "grad_norm", "reward", "reward_std", "entropy")
    assert [[each[key] for key in keys] for each in found] == [[each[key] for key in keys] for each in wanted]
    one, two = ranks2.run(inside, "grpo", str(tmp_path / "drawn"), (*words, f"{own}drawn"))
    drawn = [[sample["advantage"] for sample in each["samples"] if sample["used"]] for each in (one, two)]
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) > 8


@pytest.mark.rest
def test_an_advantage_that_goes_wrong_in_a_run_is_one_line_on_every_rank(ranks2: Ranks, tmp_path: Path) -> None:
    text = "def late(rewards, lengths):\n    return rewards / (1 if len(rewards) < 4 else 0 * rewards)\n"
    (tmp_path / "own.py").write_text(text)
    with pytest.raises(RankFailure) as caught:
        ranks2.run(inside, "grpo", str(tmp_path / "run"), (*TEXT, f"rl.advantage={tmp_path}/own.py:late"))
    assert str(caught.value).count("UserError: rl.advantage: ") >= 2


@pytest.mark.rest
def test_answers_that_are_too_long_are_masked_or_lose_reward(ranks2: Ranks, tmp_path: Path) -> None:
    words = (*TEXT, "train.steps=1", "rollout.tokens=5", "rl.skip_equal=false", "train.accumulate=1")
    counted, masked, falling = (
        ranks2.run(inside, "grpo", str(tmp_path / str(number)), (*words, f"rl.overlong={word}"))
        for number, word in enumerate(("count", "mask", "{from = 3}"))
    )
    samples = counted[0]["samples"]
    short = [each for each in samples if each["finished"]]
    assert len(short) < len(samples)
    assert sum(sum(found["targets"]) for found in counted) == sum(len(each["tokens"]) for each in samples)
    assert sum(sum(found["targets"]) for found in masked) == sum(len(each["tokens"]) for each in short)
    for plain, each in zip(samples, falling[0]["samples"], strict=True):
        fall = -min(1.0, max(0.0, (len(each["tokens"]) - 3) / 2))
        assert each["parts"]["overlong"] == fall
        assert each["reward"] == pytest.approx(plain["reward"] + fall)


@pytest.mark.rest
def test_the_likeliest_answer_is_the_baseline(ranks2: Ranks, tmp_path: Path) -> None:
    words = (*TEXT, "train.steps=2", "rl.advantage=greedy", "rl.skip_equal=false")
    found = ranks2.run(trained, "grpo", str(tmp_path), words)[0]
    assert found["code"] == 0
    groups: dict[tuple[int, int], set[float]] = {}
    for each in map(json.loads, (tmp_path / "samples.jsonl").read_text().splitlines()):
        groups.setdefault((each["step"], each["prompt"]), set()).add(round(each["reward"] - each["advantage"], 9))
    assert all(len(baselines) == 1 for baselines in groups.values())
    assert all(0 <= baseline <= 1 for (baseline,) in groups.values())


@pytest.mark.rest
def test_a_text_at_which_answers_stop(ranks2: Ranks, tmp_path: Path) -> None:
    found = ranks2.run(inside, "grpo", str(tmp_path), (*TEXT, "train.steps=2", 'rollout.stop=["3 ", "7"]'))[0]
    for sample in found["samples"]:
        assert "7" not in sample["text"][:-1]
        if sample["text"].endswith("7"):
            assert sample["finished"]
    assert any(sample["text"].endswith("7") for sample in found["samples"])


@pytest.mark.rest
def test_a_run_that_is_complete_says_so(tmp_path: Path, ranks2: Ranks, capfd: pytest.CaptureFixture[str]) -> None:
    from trueshard.cli import main

    words = [f"run.dir={tmp_path / 'run'}", *TEXT, "train.steps=1"]
    ranks2.run(trained, "grpo", str(tmp_path / "run"), tuple(words[1:]))
    config = str(ROOT / "examples" / "grpo.toml")
    given = [part for word in words for part in ("--set", word)]
    assert main(["train", config, "--nproc", "2", *given]) == 0
    assert "is complete" in capfd.readouterr().out
