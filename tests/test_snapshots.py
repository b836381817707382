"""Snapshots: what a start finds in the memory of the hosts is the state that was there, to the last bit.

Setups are those of checkpoints. They are saved by processes that are gone when others load.
"""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import trueshard
from checkpointing import LAYOUTS, SETUPS, draw, everything, go_on, scribble, seed, started
from parity import Pool, Ranks, assert_same
from trueshard.checkpoint.snapshot_parts import ROOT, folder_of, parts_in

FEW = ("by owner and by element", "dropout")
"""Setups that are not of the rest."""
WAYS = (("2", "3"), ("3", "2"), ("2 × 2", "2"), ("1", "2"), ("offload", "3"))
"""Layouts that the others are saved and loaded in, in turn."""
PROGRESS = {"step": 3, "rate": 0.1, "seen": {7: [1, None, "two"], "pair": (1, 2.5)}}


def _snapshots(folder: Path, name: str, **options: Any) -> trueshard.Snapshots:
    os.environ[ROOT] = str(folder)
    return trueshard.Snapshots(name, **options)


def save_all(rank: int, world_size: int, folder: str, layout: str, names: list[str]) -> dict[str, str]:
    """Each setup trained for two steps, each kept, and trained for two more; the traceback of each that failed."""
    return {name: _attempt(_save_one, rank, world_size, Path(folder), layout, name) for name in names}


def _attempt(function: Any, *args: Any) -> str:
    try:
        function(*args)
    except Exception:
        return traceback.format_exc(limit=-6)
    return ""


def _save_one(rank: int, world_size: int, folder: Path, layout: str, name: str) -> None:
    setup = SETUPS[name]
    model, optimizer = started(setup, LAYOUTS[layout])
    seed(rank)
    snapshots = _snapshots(folder, name)
    for step in range(2):
        go_on(setup, model, optimizer, rank, world_size, [step])
        weights = torch.arange(10.0) + step
        snapshots.save(step + 1, model=model, optimizer=optimizer, progress=PROGRESS, weights=weights)
    expected = {"saved": everything(model, optimizer)}
    go_on(setup, model, optimizer, rank, world_size, [2, 3])
    expected["later"] = everything(model, optimizer) | {"random": draw()}
    snapshots.wait()
    torch.save(expected, folder / f"{name}.rank{rank}.pt")


def load_all(rank: int, world_size: int, folder: str, source: str, layout: str, names: list[str]) -> dict[str, str]:
    """Each setup loaded from the layout that it was saved in."""
    return {name: _attempt(_load_one, rank, world_size, Path(folder), source, layout, name) for name in names}


def _load_one(rank: int, world_size: int, folder: Path, source: str, layout: str, name: str) -> None:
    setup = SETUPS[name]
    expected = torch.load(folder / f"{name}.rank{rank if layout == source else 0}.pt", weights_only=False)
    model, optimizer = started(setup, LAYOUTS[layout])
    scribble(model, optimizer)
    seed(rank + 100)
    snapshots = _snapshots(folder, name)
    assert snapshots.load(model=model, optimizer=optimizer, after=2) is None
    result = snapshots.load(model=model, optimizer=optimizer)
    assert result is not None
    assert snapshots.step == 2
    assert_same(dict(result), {"progress": PROGRESS, "weights": torch.arange(10.0) + 1})
    assert_same(everything(model, optimizer), expected["saved"])
    if layout == source:
        go_on(setup, model, optimizer, rank, world_size, [2, 3])
        assert_same(everything(model, optimizer) | {"random": draw()}, expected["later"])
    snapshots.save(3, model=model, optimizer=optimizer)
    snapshots.wait()
    dist.barrier()
    kept = {(part.step, part.ranks) for part in parts_in(folder_of(name)) if part.step == 3}
    assert kept == {(3, world_size)}
    dist.barrier()
    snapshots.close()
    assert not folder_of(name).exists()


def _hold(pool: Pool, folder: Path, names: list[str], source: str, layout: str) -> None:
    saved = Ranks(LAYOUTS[source].ranks, pool).run(save_all, str(folder), source, names, timeout=300)
    assert [text for one in saved for text in one.values() if text] == []
    pool.drop(list(pool.workers.values()))
    loaded = Ranks(LAYOUTS[layout].ranks, pool).run(load_all, str(folder), source, layout, names, timeout=300)
    assert [f"{name}: {text}" for one in loaded for name, text in one.items() if text] == []


@pytest.mark.parametrize("layout", ["2", "3"])
def test_processes_that_start_later_go_on_with_the_same_bits(layout: str, pool: Pool, tmp_path: Path) -> None:
    _hold(pool, tmp_path, list(FEW), "2", layout)


@pytest.mark.rest
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("source", "layout"), [*WAYS, ("3", "3"), ("2 × 2", "2 × 2")])
def test_every_setup_goes_on_at_any_number_of_ranks(source: str, layout: str, pool: Pool, tmp_path: Path) -> None:
    turn = [*WAYS, ("3", "3"), ("2 × 2", "2 × 2")].index((source, layout))
    names = [name for at, name in enumerate(SETUPS) if at % 3 == turn % 3 and name not in FEW]
    _hold(pool, tmp_path, names, source, layout)
