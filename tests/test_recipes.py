"""Every example trains on two processes as it stands, and learns; stopped anywhere, it goes on bit for bit."""

from __future__ import annotations

import io
import json
import os
import shutil
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parity import Ranks

ROOT = Path(__file__).parents[1]
SHORT = ("evaluation.every=4", "train.checkpoint_every=4", "schedule.warmup_steps=2", "sample.tokens=4")
#: Of each recipe: what is set to make it short, and the least part of the loss that is to be learnt.
RECIPES: dict[str, tuple[tuple[str, ...], float]] = {
    "pretrain": (("data.path=tests/models", "tokenizer.vocab_size=512", "train.sequence_length=64"), 0.05),
    "sft": (("train.steps=12",), 0.1),
    "lora": (("train.steps=12",), 0.1),
    "frozen_vision": (("train.steps=12",), 0.1),
    "dpo": (("train.steps=12",), 0.01),
}


def trained(rank: int, world_size: int, name: str, folder: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    """One rank of a run of examples/<name>.toml: what it said, its metrics, and what is trainable."""
    from trueshard.train.parse import load_config
    from trueshard.train.running.launch import Ranks as Place
    from trueshard.train.running.preflight import check
    from trueshard.train.running.session import train

    class Never:
        requested = False

    os.chdir(ROOT)
    torch.set_num_threads(1)
    config = load_config(ROOT / "examples" / f"{name}.toml", [f"run.dir={folder}", *overrides])
    said = io.StringIO()
    with redirect_stdout(said):
        ready = check(config, world_size) if rank == 0 else None
        dist.barrier()
        ready = ready or check(config, world_size, make=False)
        place = Place(rank, world_size, rank, world_size, torch.device("cpu"))
        code = train(config, ready, place, Never())  # type: ignore[arg-type]
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return {"code": code, "said": said.getvalue(), "metrics": [json.loads(line) for line in lines]}


def losses(found: dict[str, Any]) -> list[float]:
    return [record["loss"] for record in found["metrics"]]


def overrides_of(name: str) -> tuple[str, ...]:
    own, _ = RECIPES[name]
    short = SHORT if name != "frozen_vision" else SHORT[1:]
    return (*short, *([] if any("train.steps" in each for each in own) else ["train.steps=12"]), *own)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_and_goes_on_bit_for_bit(name: str, ranks2: Ranks, tmp_path: Path) -> None:
    whole = ranks2.run(trained, name, str(tmp_path / "run"), overrides_of(name), timeout=240)[0]
    assert whole["code"] == 0
    assert [record["step"] for record in whole["metrics"]] == list(range(1, 13))
    first, last = sum(losses(whole)[:3]) / 3, sum(losses(whole)[-3:]) / 3
    assert last < first * (1 - RECIPES[name][1]), losses(whole)
    if name != "frozen_vision":
        assert whole["metrics"][3]["evaluation_loss"] > 0

    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000012")
    again = ranks2.run(trained, name, str(tmp_path / "run"), overrides_of(name), timeout=240)[0]
    assert "Resumed after step 8" in again["said"]
    for key in ("loss", "grad_norm", "lr"):
        assert [record[key] for record in again["metrics"]] == [record[key] for record in whole["metrics"]]


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
        ("shard.mixed_precision=fp16", "train.whole_logits=true"),
        ("data.streaming=true", "evaluation.path=src/trueshard/train", "train.keep=1"),
    ],
    ids=["copies", "low precision", "float16", "streamed"],
)
def test_words_of_the_configuration_train(overrides: tuple[str, ...], ranks4: Ranks, tmp_path: Path) -> None:
    words = (*overrides_of("pretrain"), "train.steps=4", "evaluation.samples=8", *overrides)
    found = ranks4.run(trained, "pretrain", str(tmp_path), words, timeout=240)[0]
    assert found["code"] == 0
    assert [record["step"] for record in found["metrics"]] == [1, 2, 3, 4]
    if "shard.replicate=2" in overrides:
        alone = ranks4.run(trained, "pretrain", str(tmp_path / "alone"), words[:-1], timeout=240)[0]
        assert losses(found) == pytest.approx(losses(alone), rel=1e-5)
