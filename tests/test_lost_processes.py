"""Processes are lost at random moments, and the run is the one that nobody touched: to the last byte.

Ranks are forks that run what `trueshard train` runs. Moments, ranks and signals are drawn by seed; what a launcher does
is done by the test: start all ranks again. How the launcher does it stands in ``test_lost_launched.py``.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import pytest
import torch

import trueshard
from checkpointing import SETUPS
from parity import Pool, RankFailure, Ranks
from test_recipes import overrides_of, trained
from trueshard.checkpoint.snapshot_parts import ROOT
from trueshard.checkpoint.snapshots import newest_parts
from trueshard.train.metrics.step_metrics import MetricsWriter
from trueshard.train.run.worker import _lost_peer as lost_peer

EACH_STEP = ("train.memory_every=1", "train.checkpoint_every=1000")
PRETRAIN = (*overrides_of("pretrain"), "evaluation.every=50", "train.batch_size=8", "model.fields.hidden_size=32")
#: What makes two hundred steps of a recipe take a minute or two; its undisturbed run saves to disk now and then.
TINY = ("model.fields.hidden_size=32", "model.fields.intermediate_size=64", "model.fields.num_hidden_layers=2")
LONG = ("train.batch_size=4", "train.checkpoint_every=80", "evaluation.every=80")
SMALL = "dropout"
#: Recipe, settings, steps, losses of a process; or a model that a loop of one's own trains.
WAYS: dict[str, tuple[str, tuple[str, ...], int, int]] = {
    "own loop": (SMALL, (), 60, 10),
}
REST: dict[str, tuple[str, tuple[str, ...], int, int]] = {
    "text": ("pretrain", PRETRAIN, 40, 10),
    "text, for long": ("pretrain", PRETRAIN, 200, 50),
    "exact, for long": (
        "pretrain",
        (*PRETRAIN, *TINY, *LONG, "train.exact=true", "train.batch_size=6", "train.accumulate=1"),
        200,
        50,
    ),
    "tensor, for long": ("tensor", (*overrides_of("tensor"), *TINY, *LONG, "train.accumulate=2"), 200, 50),
    "chats, for long": ("sft", (*overrides_of("sft"), *TINY, *LONG), 200, 50),
    "LoRA, for long": ("lora", (*overrides_of("lora"), *TINY, *LONG), 200, 50),
    "preferences, for long": ("dpo", (*overrides_of("dpo"), *TINY, *LONG), 200, 50),
    "answers, for long": ("grpo", (*LONG, "train.batch_size=16", "rl.samples=4"), 200, 50),
    "exact": ("pretrain", (*PRETRAIN, "train.exact=true", "train.batch_size=12"), 30, 6),
    "tensor": ("tensor", overrides_of("tensor"), 12, 4),
    "chats": ("sft", overrides_of("sft"), 12, 4),
    "LoRA": ("lora", overrides_of("lora"), 12, 4),
    "preferences": ("dpo", overrides_of("dpo"), 12, 4),
    "images": ("frozen_vision", overrides_of("frozen_vision"), 8, 3),
    "answers": ("grpo", (), 6, 3),
}


def run_once(rank: int, world_size: int, root: str, name: str, folder: str, words: tuple[str, ...]) -> dict[str, Any]:
    os.environ[ROOT] = root
    if name != SMALL:
        return trained(rank, world_size, name, folder, words)
    setup, place = SETUPS[SMALL], Path(folder)
    model: Any = setup.build()
    optimizer: Any = setup.optimizer(model)
    trueshard.shard(model, optimizer)
    torch.manual_seed(rank)  # dropout draws from it

    def loss(model: Any, step: int) -> torch.Tensor:
        time.sleep(0.01)
        return setup.loss(model, step, rank, world_size)

    snapshots = trueshard.Snapshots(folder) if "train.memory_every=1" in words else None
    trainer = trueshard.Trainer(
        model,
        optimizer,
        range(10_000),
        loss=loss,
        steps=WAYS["own loop"][2],
        checkpoints=trueshard.Checkpoints(place / "checkpoints"),
        snapshots=snapshots,
        callbacks=[MetricsWriter(place)],
    )
    trainer.fit()
    if snapshots is not None:
        snapshots.close()
    return {"code": 0}


def steps_of(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def until_done(
    pool: Pool, folder: Path, name: str, words: tuple[str, ...], draws: random.Random, losses: list[int], others: bool
) -> int:
    """Run with a process lost whenever so many steps are reached; return the steps that were done twice.

    ``others``: each start is at another number of ranks.
    """
    again, counts = 0, itertools.cycle((3, 2) if others else (2,))
    ranks = Ranks(2, pool)
    while True:
        result: list[BaseException | None] = []

        def attempt(ranks: Ranks = ranks, result: list[BaseException | None] = result) -> None:
            try:
                ranks.run(run_once, os.environ[ROOT], name, str(folder), words, timeout=240)
                result.append(None)
            except (RankFailure, UnpicklingError) as error:  # killed while it sent its answer
                result.append(error)

        thread = threading.Thread(target=attempt)
        thread.start()
        due = losses[0] if losses and draws.random() > 0.2 else 0
        while losses and (steps_of(folder) < due or len(pool.workers) < ranks.count) and thread.is_alive():
            time.sleep(0.005)
        if losses and thread.is_alive():
            losses.pop(0)
            # Some as soon as the ranks are there: while they begin, or load.
            time.sleep(draws.random() * (0.1 if due else 1.0))
            victim, number = draws.randrange(ranks.count), draws.choice([signal.SIGKILL, signal.SIGSEGV])
            with suppress(ProcessLookupError):
                os.kill(pool.workers[victim].process.pid, number)
            thread.join()
            pool.drop(list(pool.workers.values()))
            ranks = Ranks(next(counts), pool)
            parts = newest_parts(folder, folder / "memory")
            saved = [int(path.name[5:]) for path in folder.glob("checkpoints/step-*")]
            again += steps_of(folder) - max([0, *saved, *(part.step for part in parts)])
        else:
            thread.join()
            if result[0] is None:
                return again
            raise result[0]


def hold_weights(folder: Path, steps: int) -> None:
    """Both runs end with the same bytes."""
    ends = [folder / run / "checkpoints" / f"step-{steps:08d}" for run in ("undisturbed", "run")]
    files = sorted(path.relative_to(ends[0]) for path in ends[0].rglob("*.safetensors"))
    assert files
    for file in files:
        assert (ends[0] / file).read_bytes() == (ends[1] / file).read_bytes(), file


def hold(way: tuple[str, tuple[str, ...], int, int], pool: Pool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, words, steps, count = way
    memory = folder / "memory"
    memory.mkdir()
    monkeypatch.setenv(ROOT, str(memory))
    ranks, draws = Ranks(2, pool), random.Random(name)
    words = (*words, f"train.steps={steps}")
    undisturbed = ranks.run(run_once, str(memory), name, str(folder / "undisturbed"), words, timeout=900)[0]
    assert undisturbed["code"] == 0
    losses = sorted(draws.randrange(1, steps) for _ in range(count))
    others = "train.exact=true" in words
    again = until_done(pool, folder / "run", name, (*words, *EACH_STEP), draws, losses, others)
    assert not losses
    assert again <= count
    hold_weights(folder, steps)
    assert list(memory.iterdir()) == []
    assert not (folder / "run" / "memory").exists()


RAISING = """
from pathlib import Path
from trueshard.train.callbacks import Callback
class Raising(Callback):
    def on_step(self, trainer, record):
        if trainer.step == 4 and not (Path(__file__).parent / "past").exists():
            raise ArithmeticError("a loss")
"""


@pytest.mark.rest
@pytest.mark.parametrize("name", ["pretrain", "lora"])
def test_a_run_of_which_memory_has_damaged_steps_alone_begins_again(
    name: str, pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setenv(ROOT, str(memory))
    (tmp_path / "raising.py").write_text(RAISING)
    recipe = PRETRAIN if name == "pretrain" else overrides_of(name)
    words = (*recipe, *EACH_STEP, "train.steps=6", f"train.callbacks=['{tmp_path / 'raising.py'}:Raising']")
    ranks = Ranks(2, pool)
    with pytest.raises(RankFailure, match="a loss"):
        ranks.run(run_once, str(memory), name, str(tmp_path / "run"), words, timeout=240)
    pool.drop(list(pool.workers.values()))
    (tmp_path / "past").touch()
    files = [file for file in memory.rglob("rank-*") if file.suffix != ".json"]
    assert len(files) == 4
    for file in files:
        data = file.read_bytes()
        file.write_bytes(data[:100] + bytes(byte ^ 1 for byte in data[100:200]) + data[200:])
    said = ranks.run(run_once, str(memory), name, str(tmp_path / "run"), words, timeout=240)[0]["said"]
    assert "Resumed" not in said
    ranks.run(run_once, str(memory), name, str(tmp_path / "undisturbed"), words, timeout=240)
    hold_weights(tmp_path, 6)


def save_alone(rank: int, world_size: int, folder: str) -> None:
    model = SETUPS["tied"].build()
    trueshard.shard(model)
    trueshard.save(Path(folder, "first"), model=model)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError, match="not every rank came") as caught:
        trueshard.save(Path(folder, "second"), model=model)
    Path(folder, "known").write_text(str(lost_peer(caught.value)))


def test_a_rank_that_is_lost_while_others_save_is_no_fault_of_theirs(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(RankFailure):
        Ranks(2, pool).run(save_alone, str(tmp_path))
    assert (tmp_path / "known").read_text() == "True"


@pytest.mark.parametrize("way", WAYS)
def test_a_run_whose_processes_are_lost_is_the_undisturbed_one(
    way: str, pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold(WAYS[way], pool, tmp_path, monkeypatch)


@pytest.mark.rest
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("way", REST)
def test_every_recipe_whose_processes_are_lost_is_the_undisturbed_one(
    way: str, pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold(REST[way], pool, tmp_path, monkeypatch)
