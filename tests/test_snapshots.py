"""Snapshots: what a start finds in the memory of the hosts is the state that was there, to the last bit.

Setups are those of checkpoints. They are saved by processes that are gone when others load.
"""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import trueshard
from checkpointing import LAYOUTS, SETUPS, attempted, draw, everything, go_on, scribble, seed, started
from parity import Pool, RankFailure, Ranks, assert_same
from trueshard import _torch
from trueshard.checkpoint.snapshot_parts import ROOT, folder_of, parts_in, view_of

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
    return {name: attempted(_save_one, rank, world_size, Path(folder), layout, name) for name in names}


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
    return {name: attempted(_load_one, rank, world_size, Path(folder), source, layout, name) for name in names}


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


@pytest.mark.parametrize("layout", [pytest.param("2", marks=pytest.mark.rest), "3"])
def test_processes_that_start_later_go_on_with_the_same_bits(layout: str, pool: Pool, tmp_path: Path) -> None:
    _hold(pool, tmp_path, list(FEW), "2", layout)


@pytest.mark.rest
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("source", "layout"), [*WAYS, ("3", "3"), ("2 × 2", "2 × 2")])
def test_every_setup_goes_on_at_any_number_of_ranks(source: str, layout: str, pool: Pool, tmp_path: Path) -> None:
    turn = [*WAYS, ("3", "3"), ("2 × 2", "2 × 2")].index((source, layout))
    names = [name for at, name in enumerate(SETUPS) if at % 3 == turn % 3 and name not in FEW]
    _hold(pool, tmp_path, names, source, layout)


# Hosts, damage, room


def _trained(rank: int, world_size: int, steps: int = 2) -> tuple[Any, Any, Any]:
    setup = SETUPS["by owner and by element"]
    model, optimizer = started(setup, LAYOUTS["2"])
    seed(rank)
    go_on(setup, model, optimizer, rank, world_size, range(steps))
    return setup, model, optimizer


def save_on_hosts(rank: int, world_size: int, folder: str, copies: int) -> list[Any]:
    """Two steps, on a host for every two ranks; what was there after each."""
    setup, model, optimizer = _trained(rank, world_size)
    snapshots = _snapshots(Path(folder, f"host{rank // 2}"), "hosts", copies=copies)
    expected = []
    for step in (1, 2):
        go_on(setup, model, optimizer, rank, world_size, [step])
        snapshots.save(step, model=model, optimizer=optimizer)
        expected.append(everything(model, optimizer))
    snapshots.wait()
    return expected


def load_on_hosts(rank: int, world_size: int, folder: str) -> tuple[int | None, Any]:
    """What is found by new processes."""
    _, model, optimizer = _trained(rank, world_size)
    scribble(model, optimizer)
    snapshots = _snapshots(Path(folder, f"host{rank // 2}"), "hosts", copies=1)
    result = snapshots.load(model=model, optimizer=optimizer)
    return snapshots.step, None if result is None else everything(model, optimizer)


@pytest.mark.rest
@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("after", [3, 4])
def test_a_lost_host_loses_nothing_that_the_next_one_has(ranks: int, after: int, pool: Pool, tmp_path: Path) -> None:
    saved = Ranks(ranks, pool).run(save_on_hosts, str(tmp_path), 1)
    pool.drop(list(pool.workers.values()))
    for file in (tmp_path / "host1").rglob("rank-*"):
        file.unlink()
    for rank, (step, state) in enumerate(Ranks(after, pool).run(load_on_hosts, str(tmp_path))):
        assert step == 2
        assert_same(state, saved[min(rank, ranks - 1) if ranks == after else 0][1])


@pytest.mark.rest
def test_a_host_without_copies_is_lost_and_every_host_has_its_own(pool: Pool, tmp_path: Path) -> None:
    saved = Ranks(4, pool).run(save_on_hosts, str(tmp_path), 0)
    for step, state in Ranks(2, pool).run(load_on_hosts, str(tmp_path)):  # on one host: the other's is not there
        assert (step, state) == (None, None)
    for rank, (step, state) in enumerate(Ranks(4, pool).run(load_on_hosts, str(tmp_path))):
        assert step == 2
        assert_same(state, saved[rank][1])


def _damaged(part: Path) -> None:
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)


DAMAGE = {
    "a bit": _damaged,
    "the end": lambda part: os.truncate(part, part.stat().st_size // 2),
    "the record": lambda part: part.with_suffix(".json").unlink(),
    "half of the record": lambda part: os.truncate(part.with_suffix(".json"), 99),
}


@pytest.mark.parametrize("what", ["a bit", *(pytest.param(name, marks=pytest.mark.rest) for name in [*DAMAGE][1:])])
def test_a_part_that_is_not_whole_leaves_the_step_before(what: str, pool: Pool, tmp_path: Path) -> None:
    saved = Ranks(2, pool).run(save_on_hosts, str(tmp_path), 0)
    (part,) = (tmp_path / "host0").glob("*/slot-1/rank-00001")
    DAMAGE[what](part)
    for rank, (step, state) in enumerate(Ranks(2, pool).run(load_on_hosts, str(tmp_path))):
        assert step == 1
        assert_same(state, saved[rank][0])


@pytest.mark.rest
def test_no_other_user_can_read_a_snapshot_or_put_one_there(pool: Pool, tmp_path: Path) -> None:
    Ranks(2, pool).run(save_on_hosts, str(tmp_path), 0)
    (folder,) = (tmp_path / "host0").iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o777)
    with pytest.raises(RankFailure, match="not a folder of this user alone"):
        Ranks(2, pool).run(save_on_hosts, str(tmp_path), 0)


def save_twice(rank: int, world_size: int, folder: str) -> None:
    """A save whose other rank is killed while it is under way."""
    setup, model, optimizer = _trained(rank, world_size)
    snapshots = _snapshots(Path(folder, "host0"), "hosts")
    for step in range(1, 100):
        go_on(setup, model, optimizer, rank, world_size, [step])
        snapshots.save(step, model=model, optimizer=optimizer)
        if step == 7 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_is_killed_while_it_saves_loses_one_step_at_most(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(RankFailure):
        Ranks(2, pool).run(save_twice, str(tmp_path))
    steps = {step for step, _ in Ranks(2, pool).run(load_on_hosts, str(tmp_path))}
    assert steps in ({6}, {7})


def keep_frozen(rank: int, world_size: int, folder: str) -> list[bool]:
    """Whether what is kept is what was saved, around writes to frozen parameters; and whether they are copied anew."""
    setup, model, optimizer = _trained(rank, world_size)
    first, second, *_ = model.parameters()
    for parameter in (first, second):
        parameter.requires_grad_(False)
    snapshots, equal = _snapshots(Path(folder), "frozen"), []

    def write() -> None:
        with torch.no_grad():
            first.mul_(2)

    def write_data() -> None:  # which counts in no version
        second.data.mul_(2)

    def train() -> None:
        second.requires_grad_(True)
        go_on(setup, model, optimizer, rank, world_size, [7])
        second.requires_grad_(False)

    changes = (lambda: None, lambda: None, write, lambda: None, train, lambda: None, write_data, lambda: None)
    for step, change in enumerate(changes, start=1):
        change()
        snapshots.save(step, model=model, optimizer=optimizer)
        snapshots.wait()
        (part,) = (each for each in parts_in(folder_of("frozen")) if (each.step, each.rank) == (step, rank))
        held = part.mapped()
        tensors = model.state_dict(keep_vars=True).items()
        equal.append(
            all(
                torch.equal(view_of(held, part.tensors[f"model/{name}"]), _torch.local(tensor).detach())
                for name, tensor in tensors
            )
        )
    key = next(iter(part.tensors))
    path = folder_of("frozen") / "slot-0" / part.name
    data = bytearray(path.read_bytes())
    data[part.tensors[key].begin] ^= 1
    with path.open("r+b") as file:  # in the map of the process that saves
        file.write(data)
    snapshots.save(9, model=model, optimizer=optimizer)
    snapshots.wait()
    (part,) = (each for each in parts_in(folder_of("frozen")) if (each.step, each.rank) == (9, rank))
    return [*equal, part.is_intact()]


def test_frozen_parameters_are_copied_once_and_again_when_they_were_written_to(ranks2: Ranks, tmp_path: Path) -> None:
    assert ranks2.run(keep_frozen, str(tmp_path)) == [[True] * 8 + [False]] * 2


def fit(rank: int, world_size: int, folder: str, checkpoints: str) -> tuple[int, list[str]]:
    """A run of four steps whose end is on disk, as it should be however it began."""
    model = SETUPS["tied"].build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trueshard.shard(model, optimizer)
    trainer = trueshard.Trainer(
        model,
        optimizer,
        range(100),
        loss=lambda model, step: SETUPS["tied"].loss(model, step, rank, world_size),
        steps=4,
        checkpoints=trueshard.Checkpoints(checkpoints),
        snapshots=_snapshots(Path(folder), "fit"),
    )
    assert trainer.fit()
    return trainer.batches, sorted(path.name for path in Path(checkpoints).iterdir())


def test_a_checkpoint_that_was_lost_while_it_was_written_is_written_by_the_next_start(
    ranks2: Ranks, tmp_path: Path
) -> None:
    expected = [(4, ["latest", "step-00000004"])] * 2
    assert ranks2.run(fit, str(tmp_path), str(tmp_path / "lost")) == expected
    assert ranks2.run(fit, str(tmp_path), str(tmp_path / "found")) == expected
