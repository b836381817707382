"""When ranks wait for one another in vain, each rank's place is said: unit or collective, phase, line."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import trueshard
from models.handmade import Stack
from parity import Ranks
from resting import all_but
from trueshard import _torch
from trueshard.distributed import replicated_mesh
from trueshard.sharding import stall_watch
from trueshard.sharding.stall_watch import Place, described


@contextlib.contextmanager
def watched() -> Iterator[list[str]]:
    """What the library logs inside, where it waits 0.9 s before it says anything."""
    texts: list[str] = []
    handler, patience, stall_watch.PATIENCE = logging.Handler(), stall_watch.PATIENCE, 0.9
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("trueshard").addHandler(handler)
    try:
        yield texts
    finally:
        logging.getLogger("trueshard").removeHandler(handler)
        stall_watch.PATIENCE = patience


def dawdle(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.01)


def waits(rank: int, world_size: int, late: int, where: str, seconds: float) -> tuple[list[str], str]:
    """What rank logs while rank `late` dawdles, and the error that it gets."""
    failed = ""
    with watched() as texts:
        torch.manual_seed(0)
        model = Stack(3)
        trueshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loss = model(torch.ones(2, 8)).sum() if where == "backward" else None
        if rank == late:
            dawdle(seconds)
        try:
            if loss is not None:
                loss.backward()
            else:
                model(torch.ones(2, 8)).sum()
        except RuntimeError as error:
            failed = str(error)
    return texts, failed


@pytest.mark.parametrize("where", all_but(["backward"], ["forward", "backward"]))
def test_the_slowest_rank_is_named_once(sizes: list[Ranks], where: str) -> None:
    for ranks in sizes:
        late = ranks.count - 1
        found = ranks.run(waits, late, where, 2.0)
        assert [failed for _, failed in found] == [""] * ranks.count
        (line,) = [text for texts, _ in found for text in texts]
        slow, wait = line.partition(": ")[2].split("; ")
        assert slow.startswith(f"rank {late} ")
        assert slow.endswith("(slowest)")
        assert "test_waiting.py:" in slow
        others = "rank 0" if late == 1 else "ranks 0-1"
        assert wait.startswith(f"{others} in all_gather")
        assert f", {where}, test_waiting.py:" in wait
        assert "of unit 'blocks." in wait or "of unit '(root)'" in wait


def loads_late(rank: int, world_size: int, folder: str) -> list[str]:
    """What rank logs while the last rank comes late to ``load()``."""
    with watched() as texts:
        model = Stack()
        trueshard.shard(model)
        trueshard.save(folder, model=model)
        if rank == world_size - 1:
            dawdle(2.0)
        trueshard.load(folder, model=model)
    return texts


@pytest.mark.rest
def test_who_comes_late_to_a_load_is_named(ranks3: Ranks, tmp_path: Path) -> None:
    found = ranks3.run(loads_late, str(tmp_path / "saved"))
    (line,) = [text for texts in found for text in texts]
    slow, wait = line.partition(": ")[2].split("; ")
    assert slow.startswith("rank 2 ")
    assert slow.endswith("(slowest)")
    assert wait.startswith("ranks 0-1 in all_gather_object, load(), test_waiting.py:")


@pytest.mark.rest
def test_before_the_time_limit_ends_the_run_each_place_is_told(ranks2: Ranks) -> None:
    (texts, failed), _ = ranks2.run(waits, 1, "forward", 9.5, timeout=10.0)
    assert "imed out" in failed
    assert ["time limit of 9 s" in text for text in texts] == [False, True]
    assert "rank 1 " in texts[1]


def limits(rank: int, world_size: int, folder: str) -> list[list[float]]:
    """Seconds that ranks wait for one another in the default process group, and in those that are made for them."""
    before = set(dist.distributed_c10d._world.pg_map)
    for number, words in enumerate(({}, {"reshard_after_forward": 2}, {"mesh": replicated_mesh(2)})):
        model = Stack()
        trueshard.shard(model, **words)
        model(torch.ones(2, 8)).sum().backward()
        trueshard.save(Path(folder, str(number)), model=model)
    made = [group for group in dist.distributed_c10d._world.pg_map if group not in before]
    return [[_torch.timeout_of(each).total_seconds() for each in groups] for groups in ([dist.group.WORLD], made)]


@pytest.mark.rest
def test_every_group_has_the_time_limit_of_the_first(ranks4: Ranks, tmp_path: Path) -> None:
    for (limit,), others in ranks4.run(limits, str(tmp_path), timeout=50.0):
        assert limit < 50
        assert others == [limit] * 5


def test_ranks_at_one_place_are_told_together_and_the_slowest_first() -> None:
    gathering = Place(7, "all_gather_single", "layers.1", "forward", "train.py:3")
    places = dict.fromkeys(range(8), gathering) | {5: Place(7, "", None, "save()", "train.py:9"), 6: None}
    assert described(places) == (
        "rank 6 has not called shard() (slowest); rank 5 save(), train.py:9; "
        "ranks 0-4, 7 in all_gather_single of unit 'layers.1', forward, train.py:3"
    )
    assert described({0: gathering, 1: gathering}).endswith("train.py:3")


def test_one_process_is_not_watched() -> None:
    trueshard.shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    assert not any(thread.name == "trueshard-waiting" for thread in threading.enumerate())


def test_nothing_is_said_where_all_go_on(ranks2: Ranks) -> None:
    assert ranks2.run(waits, 1, "forward", 0.3) == [([], "")] * 2
