"""Every example trains on two processes as it stands, and learns; stopped anywhere, it goes on bit for bit."""

from __future__ import annotations

import io
import json
import os
import shutil
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import trueshard
from parity import Ranks

ROOT = Path(__file__).parents[1]
SHORT = ("evaluation.every=3", "train.checkpoint_every=3", "schedule.warmup_steps=2", "sample.tokens=4")
#: Of each recipe: what is set to make it short, and the least part of the loss that is to be learnt.
RECIPES: dict[str, tuple[tuple[str, ...], float]] = {
    "pretrain": (("data.path=tests/models", "tokenizer.vocab_size=512", "train.sequence_length=64"), 0.05),
    "tensor": (("data.path=tests/models", "tokenizer.vocab_size=512", "train.sequence_length=64"), 0.05),
    "mixture": (("data.path=tests/models", "tokenizer.vocab_size=512", "train.sequence_length=64"), 0.05),
    "sft": (("train.steps=6",), 0.1),
    "lora": (("train.steps=6",), 0.1),
    "frozen_vision": (("train.steps=6",), 0.1),
    "dpo": (("train.steps=6",), 0.01),
}


def trained(rank: int, world_size: int, name: str, folder: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    """One rank of a run of examples/<name>.toml: what it said, its metrics, and what is trainable."""
    from trueshard.train.parse import load_config
    from trueshard.train.run.checks import check, newest_steps
    from trueshard.train.run.session import train

    os.chdir(ROOT)
    torch.set_num_threads(1)
    config = load_config(ROOT / "examples" / f"{name}.toml", [f"run.dir={folder}", *overrides])
    said = io.StringIO()
    with redirect_stdout(said):
        ready = check(config, world_size) if rank == 0 else None
        dist.barrier()
        ready = ready or check(config, world_size, make=False)
        ready = replace(ready, goes_on=bool(newest_steps(config)[1]))  # as after a loss
        code = train(ready, torch.device("cpu"), lambda: False)
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return {"code": code, "said": said.getvalue(), "metrics": [json.loads(line) for line in lines]}


def losses(found: dict[str, Any]) -> list[float]:
    return [record["loss"] for record in found["metrics"]]


def overrides_of(name: str) -> tuple[str, ...]:
    own, _ = RECIPES[name]
    short = SHORT if name != "frozen_vision" else SHORT[1:]
    return (*short, *([] if any("train.steps" in each for each in own) else ["train.steps=6"]), *own)


@pytest.mark.rest
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_and_goes_on_bit_for_bit(name: str, ranks2: Ranks, tmp_path: Path) -> None:
    whole = ranks2.run(trained, name, str(tmp_path / "run"), overrides_of(name), timeout=240)[0]
    assert whole["code"] == 0
    assert [record["step"] for record in whole["metrics"]] == list(range(1, 7))
    first, last = sum(losses(whole)[:3]) / 3, sum(losses(whole)[-3:]) / 3
    assert last < first * (1 - RECIPES[name][1]), losses(whole)
    if name != "frozen_vision":
        assert whole["metrics"][2]["evaluation_loss"] > 0

    end = tmp_path / "run" / "checkpoints" / "step-00000006"
    shutil.move(end, tmp_path / "whole")
    again = ranks2.run(trained, name, str(tmp_path / "run"), overrides_of(name), timeout=240)[0]
    assert "Resumed after step 3" in again["said"]
    for key in ("loss", "grad_norm", "lr"):
        assert [record[key] for record in again["metrics"]] == [record[key] for record in whole["metrics"]]
    assert not (compared := trueshard.inspect(tmp_path / "whole", end)), str(compared)


@pytest.mark.rest
@pytest.mark.parametrize(
    "overrides",
    [
        ("shard.replicate=2",),
        (
            "shard.mixed_precision=bf16",
            "shard.activation_checkpointing=full",
            "train.accumulate=2",
            "shard.offload=cpu",
        ),
        (
            "shard.mixed_precision=fp16",
            "train.whole_logits=true",
            "data.streaming=true",
            "evaluation.path=src/trueshard/train",
            "train.keep=1",
        ),
    ],
    ids=["copies", "low precision", "float16, streamed"],
)
def test_words_of_the_configuration_train(
    overrides: tuple[str, ...], ranks2: Ranks, ranks4: Ranks, tmp_path: Path
) -> None:
    words = (*overrides_of("pretrain"), "train.steps=4", "evaluation.samples=8", *overrides)
    copies = "shard.replicate=2" in overrides
    found = (ranks4 if copies else ranks2).run(trained, "pretrain", str(tmp_path), words, timeout=240)[0]
    assert found["code"] == 0
    assert [record["step"] for record in found["metrics"]] == [1, 2, 3, 4]
    if copies:
        alone = ranks4.run(trained, "pretrain", str(tmp_path / "alone"), words[:-1], timeout=240)[0]
        assert losses(found) == pytest.approx(losses(alone), rel=1e-5)


@pytest.mark.rest
@pytest.mark.parametrize("exact", [False, True])
def test_a_run_of_preferences_writes_their_rewards_at_any_number_of_ranks(
    exact: bool, alone: Ranks, ranks2: Ranks, tmp_path: Path
) -> None:
    words = (*overrides_of("dpo"), *(("train.exact=true", "train.microbatch=1") if exact else ()))
    runs = [
        ranks.run(trained, "dpo", str(tmp_path / str(ranks.count)), words, timeout=240)[0]["metrics"]
        for ranks in (alone, ranks2)
    ]
    keys = [f"rewards_{key}" for key in ("chosen", "rejected", "margins", "accuracies")]
    one, two = ([[record[key] for key in keys] for record in run] for run in runs)
    assert one[0] == [0.0] * 4  # the model is its own reference
    for (chosen, rejected, margin, accuracy), record in zip(one[1:], runs[0][1:], strict=True):
        assert margin == pytest.approx(chosen - rejected, abs=1e-9)
        assert 0 <= accuracy <= 1
        assert record["loss"] > 0
    assert one[-1][2] > 0
    if exact:
        assert one == two
    else:
        assert [record[:3] for record in two] == [pytest.approx(record[:3], abs=1e-4) for record in one]


@pytest.mark.rest
def test_what_latest_stands_for_stays_the_same_in_a_run(ranks2: Ranks, tmp_path: Path) -> None:
    """Else preference tuning would go on with another reference when the model it began with is trained on."""
    from trueshard.train.parse import load_config
    from trueshard.train.run.resuming import located, write_settings

    begin = (*overrides_of("pretrain"), "train.steps=2")
    ranks2.run(trained, "pretrain", str(tmp_path / "first"), begin, timeout=240)
    given = [f"run.dir={tmp_path / 'second'}", f"model.path={tmp_path / 'first' / 'checkpoints' / 'latest'}"]

    def config() -> Any:
        return located(load_config(ROOT / "examples" / "continue.toml", given))

    assert Path(config().model.path).name == "step-00000002"
    (tmp_path / "second").mkdir()
    write_settings(config(), {})
    more = (*begin, "train.steps=3", "train.batch_size=8")
    again = ranks2.run(trained, "pretrain", str(tmp_path / "first"), more, timeout=240)[0]
    assert [record["samples"] for record in again["metrics"]] == [16, 32, 40]
    assert Path(config().model.path).name == "step-00000002"


@pytest.mark.rest
def test_an_adapter_over_a_quantized_base_is_exported_and_no_model_to_begin_with(
    ranks2: Ranks, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import peft
    from safetensors.torch import load_file

    from trueshard.cli import main

    words = (*overrides_of("lora"), "train.steps=2")
    ranks2.run(trained, "lora", str(tmp_path / "run"), words, timeout=240)
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000002"
    assert main(["export", str(checkpoint), str(tmp_path / "adapter"), "--to", "adapter"]) == 0
    assert peft.PeftConfig.from_pretrained(str(tmp_path / "adapter")).r == 8
    exported = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    saved = load_file(checkpoint / "adapter_model.safetensors")
    assert exported.keys() == saved.keys()
    assert all(torch.equal(exported[name], saved[name]) for name in saved)
    capfd.readouterr()
    assert main(["export", str(checkpoint), str(tmp_path / "merged"), "--to", "merged"]) == 2
    assert "quantized" in capfd.readouterr().err
    config = str(ROOT / "examples" / "sft.toml")
    assert main(["train", config, "--set", f"model.path={checkpoint}", "--set", f"run.dir={tmp_path / 'next'}"]) == 2
    assert "--to merged" in capfd.readouterr().err


def trained_in_float64(rank: int, world_size: int, folder: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    """`trained` of examples/long_context.toml in float64, which no key of [model] gives, norms too."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    from trueshard.train import parse
    from trueshard.train.config import Config

    def norm(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        return self.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    def in_float64(path: Path, given: Any = ()) -> Config:
        config = load(path, given)
        return config.model_copy(update={"model": config.model.model_copy(update={"dtype": "float64"})})

    load, forward = parse.load_config, LlamaRMSNorm.forward
    parse.load_config, LlamaRMSNorm.forward = in_float64, norm
    try:
        return trained(rank, world_size, "long_context", folder, overrides)
    finally:
        parse.load_config, LlamaRMSNorm.forward = load, forward


@pytest.mark.rest
def test_a_run_goes_on_on_other_axes_with_the_same_samples(alone: Ranks, ranks4: Ranks, tmp_path: Path) -> None:
    short = ("data.path=tests/models", "data.format=text", "tokenizer.vocab_size=512", "train.sequence_length=93")
    short += ("train.steps=6",)
    short += ("train.checkpoint_every=3", "schedule.warmup_steps=2", "sample.tokens=4")
    short += ("evaluation.every=3", "evaluation.samples=5")
    runs = {name: str(tmp_path / name) for name in ("alone", "shared")}
    (whole,) = alone.run(trained_in_float64, runs["alone"], (*short, "shard.context=1"), timeout=240)
    first = ranks4.run(trained_in_float64, runs["shared"], (*short, "shard.replicate=2"), timeout=240)[0]
    shutil.rmtree(Path(runs["shared"]) / "checkpoints" / "step-00000006")
    both = ("shard.context=2", "shard.tensor.ranks=2", "shard.tensor.sequence=true")
    again = ranks4.run(trained_in_float64, runs["shared"], (*short, *both), timeout=240)[0]
    assert "Resumed after step 3" in again["said"]
    for found in (first, again):
        assert [record["step"] for record in found["metrics"]] == [1, 2, 3, 4, 5, 6]
        for one, other in zip(found["metrics"], whole["metrics"], strict=True):
            assert (one["samples"], one["tokens"]) == (other["samples"], other["tokens"])
            keys = [key for key in other if key in ("loss", "grad_norm", "evaluation_loss", "evaluation_count")]
            assert [one[key] for key in keys] == pytest.approx([other[key] for key in keys], rel=1e-12, abs=0)
