"""When ranks wait for one another in vain, each rank's place is said: unit or collective, phase, line."""

from __future__ import annotations

import logging
import threading
import time

import pytest
import torch
from torch import nn

import trueshard
from models.handmade import Stack
from parity import Ranks
from trueshard.runtime import waiting
from trueshard.runtime.waiting import Place, described


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def dawdle(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.01)


def waits(rank: int, world_size: int, late: int, where: str, seconds: float) -> tuple[list[str], str]:
    """What rank logs while rank `late` dawdles, and the error that it gets."""
    kept, patience, waiting.PATIENCE = Kept(), waiting.PATIENCE, 0.9
    logging.getLogger("trueshard").addHandler(kept)
    failed = ""
    try:
        torch.manual_seed(0)
        model = Stack(3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trueshard.shard(model, optimizer)
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
    finally:
        logging.getLogger("trueshard").removeHandler(kept)
        waiting.PATIENCE = patience
    return kept.texts, failed


@pytest.mark.parametrize("where", ["forward", "backward"])
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


@pytest.mark.rest
def test_before_the_time_limit_ends_the_run_each_place_is_told(ranks2: Ranks) -> None:
    (texts, failed), _ = ranks2.run(waits, 1, "forward", 9.5, timeout=10.0)
    assert "imed out" in failed
    assert ["time limit of 9 s" in text for text in texts] == [False, True]
    assert "rank 1 " in texts[1]


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
