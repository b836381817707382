"""``train.exact`` with ``[rl]``: the same answers, figures and weights, bit for bit, at any number of ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from messages import naming
from parity import Ranks
from running import end, start
from test_recipes import trained
from test_rl_run import CONFIG, command, project
from trueshard.rl import Rollouts

EXACT = (
    "train.exact=true",
    "train.microbatch=2",
    "train.batch_size=24",
    "train.steps=3",
    "train.checkpoint_every=2",
    "train.max_grad_norm=0.05",
    "log.hash_every=1",
    "rl.samples=4",
    "rl.clip=[0.01, 0.01]",
    "rollout.batch=10",
    "evaluation.every=2",
    "evaluation.samples=5",
    "schedule.warmup_steps=0",
    "optimizer.lr=1e-3",
)
OF_RANKS = ("batches", "data_wait", "checkpoint_stall", "memory", "tokens_per_second")
"""Figures that follow from the ranks or the clock, besides those that begin with "seconds"."""


def left(folder: Path, step: int = 3) -> tuple[list[dict[str, Any]], bytes, bytes]:
    """The figures of each step, the answers, and the weights after the last step."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    figures = [
        {key: value for key, value in record.items() if not key.startswith(("seconds", *OF_RANKS))}
        for record in records
    ]
    weights = next((folder / "checkpoints" / f"step-{step:08d}").glob("*model.safetensors"))
    return figures, (folder / "samples.jsonl").read_bytes(), weights.read_bytes()


def ran(
    ranks: Ranks, folder: Path, *words: str, recipe: str = "grpo", steps: int = 3
) -> tuple[list[dict[str, Any]], bytes, bytes]:
    found = ranks.run(trained, recipe, str(folder), (*EXACT, *words), timeout=240)[0]
    assert found["code"] == 0
    return left(folder, steps)


@pytest.fixture(scope="module")
def whole(alone: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return ran(alone, tmp_path_factory.mktemp("exact") / "run")


@pytest.mark.rest
def test_a_run_on_two_ranks_that_is_resumed_on_three_is_that_of_one(
    whole: Any, ranks2: Ranks, ranks3: Ranks, tmp_path: Path
) -> None:
    figures = whole[0]
    assert {"loss", "grad_norm", "state_hash", "reward", "entropy", "mismatch_mean"} <= figures[1].keys()
    assert "evaluation_reward" in figures[0]
    assert len({record.get("state_hash") for record in figures}) == 4
    assert all(record["mismatch_mean"] > 0 for record in figures[1:])

    folder = tmp_path / "run"
    assert ran(ranks2, folder) == whole
    shutil.rmtree(folder / "checkpoints" / "step-00000003")
    again = ranks3.run(trained, "grpo", str(folder), EXACT, timeout=240)[0]
    assert "Resumed after step 2" in again["said"]
    assert left(folder) == whole


def test_a_batch_that_microbatches_do_not_divide_is_refused() -> None:
    given = {"batch_size": 16, "rl": {"samples": 4}, "accumulate": 2, "microbatch": 3}
    with pytest.raises(ValueError, match=naming("batch_size", 16, "accumulate 2", "microbatch 3", 6)):
        Rollouts(nn.Identity(), None, [], lambda *_: 0.0, **given)


@pytest.mark.rest
@pytest.mark.parametrize("copy", ["gathered", "kept", "sharded"])
def test_each_form_of_the_engine_gives_the_same_bits(whole: Any, copy: str, ranks4: Ranks, tmp_path: Path) -> None:
    assert ran(ranks4, tmp_path, f"rollout.copy={copy}", "shard.replicate=2") == whole


@pytest.mark.rest
@pytest.mark.parametrize("copy", ["kept", "sharded"])
def test_each_form_of_the_engine_gives_the_same_bits_on_one_rank(
    whole: Any, copy: str, alone: Ranks, tmp_path: Path
) -> None:
    assert ran(alone, tmp_path, f"rollout.copy={copy}") == whole


NOISE = """
import torch

def noisy(logs, old, advantages, mask):
    return -advantages * (logs - old).exp() * (1 + torch.rand_like(logs))
"""
FURTHER = {
    "updates": ("gspo", "rollout.ahead=1"),
    "adapter": ("grpo_lora", "rl.kl=0.1", "rl.average=sequence", "train.microbatch=1"),
    "reference": ("grpo", "rl.kl=0.1", "rl.kl_estimator=k1", "rl.updates=2", "rl.average=length"),
    "frozen": ("dapo", 'model.freeze=["model.embed_tokens.weight", "model.layers.0.*"]', "shard.mixed_precision=bf16"),
    "images": ("grpo_vision", "rl.updates=2"),
    "greedy": ("rloo", "rl.advantage=greedy", "rl.loss=soft", "shard.activation_checkpointing=full"),
    "batch": ("grpo", "rl.advantage=batch", "rl.loss=weight", "rl.refill=0", "shard.reshard_after_forward=never"),
    "noise": (
        "grpo",
        "rl.loss={folder}/noise.py:noisy",
        "rollout.correction=truncate",
        "optimizer.class=torch.optim.SGD",
    ),
}


@pytest.mark.rest
@pytest.mark.parametrize("case", FURTHER)
def test_other_losses_advantages_and_models_are_as_exact(
    case: str, alone: Ranks, ranks2: Ranks, ranks3: Ranks, tmp_path: Path
) -> None:
    """Two steps on three ranks, and the last on two."""
    (tmp_path / "noise.py").write_text(NOISE)
    recipe, *words = FURTHER[case]
    words = [word.format(folder=tmp_path) for word in words]
    wanted = ran(alone, tmp_path / "alone", *words, recipe=recipe)
    assert len({record.get("state_hash") for record in wanted[0]}) == 4
    ran(ranks3, tmp_path / "resumed", *words, "train.steps=2", recipe=recipe, steps=2)
    assert ran(ranks2, tmp_path / "resumed", *words, recipe=recipe) == wanted


@pytest.mark.rest
def test_a_step_of_an_exact_run_is_made_again(tmp_path: Path) -> None:
    folder = project(tmp_path / "exact")
    text = CONFIG.replace("accumulate = 2", "exact = true\nmicrobatch = 2").replace("steps = 12", "steps = 5")
    (folder / "train.toml").write_text(text)
    code, out, err = end(start(folder, "--nproc", "1"))
    assert code == 0, out + err
    code, out, err = command(folder, "replay", "run", "--step", "5")
    assert code == 0, out + err
    assert out.endswith("samples: same\n")
