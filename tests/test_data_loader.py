"""Microbatches for ranks: the same samples in the same order at every world size, one integer to resume from, and a
thread that has them ready."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator, Sequence
from itertools import count, islice
from typing import Any

import numpy as np
import pytest
import torch

import forks
from messages import lacking, naming
from trueshard.errors import UserError
from trueshard.train.data.batches import Batch, Mixture, Sample, StreamMixture, stack
from trueshard.train.data.loader import EvaluationLoader, Loader, Prefetcher

LIMIT = 20.0
"""Seconds after which what should have happened has not."""


class Numbers:
    """Samples that are their own numbers."""

    def __init__(self, length: int, first: int = 0) -> None:
        self.length, self.first = length, first

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Sample:
        return {"number": np.array(self.first + index)}

    def where(self, index: int) -> str:
        return f"numbers, line {self.first + index}"


class Counting:
    """A stream of numbers."""

    def begin(self, seed: int, first: int = 0, blocks: Any = None) -> Iterator[tuple[Sample, str, Any]]:
        for number in count(1000 * seed + first):
            yield {"number": np.array(number)}, f"line {number}", number


DATA = {
    "one source": Numbers(100),
    "mixture": Mixture([Numbers(30), Numbers(50, 100)], [2, 1]),
    "stream": Counting(),
    "mixed streams": StreamMixture([Counting(), Counting()], [1, 3]),
}


def numbers(batches: Sequence[Batch]) -> list[int]:
    return [number for batch in batches for number in batch["number"].tolist()]


def taken(data: str, ranks: int, accumulate: int, steps: range, prefetch: int = 1) -> list[list[int]]:
    """The samples of each step, in the order of ranks; begun at a step as a resumed run begins."""
    loaders = [
        Loader(
            DATA[data],
            stack,
            batch_size=12,
            accumulate=accumulate,
            seed=3,
            rank=rank,
            ranks=ranks,
            prefetch=prefetch,
        )
        for rank in range(ranks)
    ]
    for loader in loaders:
        loader.load_state_dict({"samples": 12 * steps.start})
    found = [[number for loader in loaders for number in numbers(list(islice(loader, accumulate)))] for _ in steps]
    for loader in loaders:
        loader.close()
    return found


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize(("ranks", "accumulate"), [(2, 1), (3, 1), (2, 3), (1, 4)])
def test_every_world_size_takes_the_same_samples_in_the_same_order(data: str, ranks: int, accumulate: int) -> None:
    assert taken(data, ranks, accumulate, range(12)) == taken(data, 1, 1, range(12))


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("step", [0, 1, 5, 9])
def test_resume_at_any_step_with_another_world_size_goes_on(data: str, step: int) -> None:
    whole = taken(data, 2, 1, range(10))
    assert taken(data, 3, 2, range(step, 10)) == whole[step:]


def test_resume_goes_on_after_what_another_batch_size_took() -> None:
    order = [number for step in taken("one source", 1, 1, range(4)) for number in step]
    loader = Loader(Numbers(100), stack, batch_size=5, seed=3)
    loader.load_state_dict({"samples": 12})
    assert numbers(list(islice(loader, 3))) == order[12:27]


def test_prefetch_changes_no_sample() -> None:
    for prefetch in (0, 1, 7):
        assert taken("mixture", 2, 2, range(5), prefetch) == taken("mixture", 1, 1, range(5))


def test_state_counts_what_was_taken_and_not_what_is_ready() -> None:
    collated: list[Batch] = []
    ahead = threading.Event()

    def collate(samples: Sequence[Sample]) -> Batch:
        collated.append(stack(samples))
        if len(collated) == 6:
            ahead.set()
        return collated[-1]

    loader = Loader(Numbers(100), collate, batch_size=4, accumulate=2, prefetch=2)
    assert loader.state_dict() == {"samples": 0}
    next(loader)
    assert loader.state_dict() == {"samples": 0}
    next(loader)
    assert ahead.wait(LIMIT)
    assert loader.state_dict() == {"samples": 4}
    loader.close()


def test_state_taken_while_batches_wait_resumes_at_the_next_sample() -> None:
    loader = Loader(Numbers(100), stack, batch_size=4, seed=1)
    first = numbers(list(islice(loader, 3)))
    again = Loader(Numbers(100), stack, batch_size=4, seed=1)
    again.load_state_dict(loader.state_dict())
    loader_next, again_next = numbers([next(loader)]), numbers([next(again)])
    assert again_next == loader_next
    assert not set(first) & set(again_next)


def test_batches_are_ready_before_they_are_asked_for() -> None:
    """The loop waits for nothing when the thread keeps up: what it takes was made before, and not by itself."""
    makers: list[str] = []
    two_steps_ready = threading.Event()

    def collate(samples: Sequence[Sample]) -> Batch:
        makers.append(threading.current_thread().name)
        if len(makers) == 6:  # one taken, four ready, one at work: it is only begun once the others wait
            two_steps_ready.set()
        return stack(samples)

    loader = Loader(Numbers(100), collate, batch_size=4, accumulate=2, prefetch=2)
    next(loader)
    assert two_steps_ready.wait(LIMIT)
    next(loader)
    assert set(makers) == {"trueshard-prefetch"}
    loader.close()


def test_error_of_the_thread_is_raised_where_its_batch_would_be() -> None:
    def collate(samples: Sequence[Sample]) -> Batch:
        if samples[0]["number"] == bad:
            raise UserError("numbers, line 7: damaged; correct it")
        return stack(samples)

    bad = numbers(list(islice(Loader(Numbers(100), stack, batch_size=1), 4)))[3]
    loader = Loader(Numbers(100), collate, batch_size=1)
    assert len(list(islice(loader, 3))) == 3
    for _ in range(2):
        with pytest.raises(UserError, match="line 7"):
            next(loader)


def test_last_step_is_described_by_its_samples_and_their_places() -> None:
    loaders = [Loader(Numbers(100), stack, batch_size=4, accumulate=2, rank=rank, ranks=2) for rank in range(2)]
    steps = [[numbers(list(islice(loader, 2))) for loader in loaders] for _ in range(3)]
    places = "; ".join(f"numbers, line {number}" for own in steps[-1] for number in own)
    assert {loader.describe_last(2) for loader in loaders} == {f"samples 8 to 11 ({places})"}


def test_last_step_of_a_stream_is_described_by_the_ranks_own_samples() -> None:
    loader = Loader(Counting(), stack, batch_size=4, rank=1, ranks=2)
    list(islice(loader, 2))
    assert lacking(loader.describe_last(1), 4, 7, "line 6; line 7") == []


def test_long_steps_are_described_in_part() -> None:
    loader = Loader(Numbers(100), stack, batch_size=20)
    next(loader)
    assert loader.describe_last(1).endswith("; and 12 more)")


def test_batch_size_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match=naming("multiple", "3 ranks", "accumulate 2")):
        Loader(Numbers(100), stack, batch_size=8, accumulate=2, ranks=3)


def test_no_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="no samples"):
        Loader(Numbers(0), stack, batch_size=8)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("limit", [None, 8, 100])
def test_evaluation_takes_each_sample_once_over_all_ranks(ranks: int, limit: int | None) -> None:
    loaders = [
        EvaluationLoader(Numbers(17), stack, batch_size=4, rank=rank, ranks=ranks, limit=limit) for rank in range(ranks)
    ]
    for _ in range(2):
        batches = [list(loader) for loader in loaders]
        assert numbers([batch for own in batches for batch in own]) == list(range(8 if limit == 8 else 17))


def test_evaluation_with_fewer_samples_than_ranks_leaves_ranks_without() -> None:
    loaders = [EvaluationLoader(Numbers(17), stack, batch_size=4, rank=rank, ranks=3, limit=2) for rank in range(3)]
    assert [numbers(list(loader)) for loader in loaders] == [[], [0], [1]]


def prefetchers() -> int:
    return sum(thread.name == "trueshard-prefetch" for thread in threading.enumerate())


def test_thread_ends_when_its_reader_is_forgotten() -> None:
    before = prefetchers()
    ready = Prefetcher(iter(range(10**9)), 2)
    assert next(ready) == 0
    assert prefetchers() == before + 1
    del ready
    gc.collect()
    assert prefetchers() == before


def test_items_end_where_the_iterator_ends() -> None:
    assert list(Prefetcher(iter("abc"), 1)) == ["a", "b", "c"]


@pytest.mark.rest
def test_process_ends_while_batches_are_made() -> None:
    """Neither a thread at work nor one that waits for its reader keeps a program from its end."""
    program = """
import itertools, time
from trueshard.train.data.loader import Prefetcher
waiting = Prefetcher(itertools.count(), 1)
def slow():
    while True:
        yield 1
        time.sleep(1000)
working = Prefetcher(slow(), 3)
next(waiting), next(working)
print("done")
"""
    found = forks.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert (found.stdout, found.stderr) == ("done\n", "")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device to pin memory for")
def test_batches_for_a_device_are_pinned() -> None:
    loader = Loader(Numbers(100), stack, batch_size=4, device=torch.device("cuda", 0))
    assert next(loader)["number"].is_pinned()
    loader.close()
