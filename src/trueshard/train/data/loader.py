"""Microbatches for a rank, without end, and the one integer from which a resumed run goes on.

- What stands at a global sample index does not depend on the number of ranks: a rank takes its slice of each step's
  global batch, and its slice is split into ``accumulate`` microbatches.
- ``state_dict()`` counts samples of steps that were taken whole, never what was prefetched.
- Batches are read, made and (for a CUDA device) pinned by a thread, so that the loop finds them ready.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from trueshard.errors import UserError
from trueshard.train.data.mixture import Mixture
from trueshard.train.data.order import Order
from trueshard.train.data.prefetch import Prefetcher
from trueshard.train.data.samples import Batch, Collate, Sample, Samples, Stream

SHOWN = 8
"""Places that ``describe_last`` names at most."""


class _Made(NamedTuple):
    """A microbatch and where its samples come from."""

    batch: Batch
    places: Callable[[], list[str]]


Fetch = Callable[[int, int], tuple[Sequence[Sample], Callable[[], list[str]]]]
"""(first, count) → the global samples from ``first`` on, and where they come from. ``first`` never falls."""


class Loader:
    """This rank's microbatches: ``accumulate`` of them a step, in an order that ``seed`` decides.

    Args:
        samples: what is learnt from; of a ``Mixture``, sources take turns by weight.
        collate: makes a microbatch of samples.
        batch_size: samples a step over all ranks and microbatches; a multiple of ``ranks * accumulate``.
        accumulate: microbatches of this rank in a step.
        seed: from 0 up to 2**64 - 1; the same on every rank.
        rank, ranks: which part is this process's.
        prefetch: steps whose microbatches are made ahead; 0: each is made when it is asked for.
        device: where batches will go; for a CUDA device they are made in pinned memory.

    Raises:
        ValueError: ``batch_size`` does not divide, or there are no samples.
    """

    def __init__(
        self,
        samples: Samples | Stream,
        collate: Collate,
        *,
        batch_size: int,
        accumulate: int = 1,
        seed: int = 0,
        rank: int = 0,
        ranks: int = 1,
        prefetch: int = 2,
        device: torch.device | None = None,
    ) -> None:
        if batch_size < 1 or batch_size % (ranks * accumulate):
            raise ValueError(f"batch_size is {batch_size}; it is a multiple of {ranks} ranks × accumulate {accumulate}")
        if isinstance(samples, Samples) and not len(samples):
            raise ValueError("there are no samples; a loader needs at least one")
        self._data, self._collate, self._seed = samples, collate, seed
        self._batch_size, self._accumulate, self._rank = batch_size, accumulate, rank
        self._own = batch_size // (ranks * accumulate)
        self._prefetch, self._device = prefetch, device
        self._first = 0  # the global sample that the present step begins with
        self._taken = 0  # its microbatches that were given
        self._places: list[Callable[[], list[str]]] = []
        self._made: Prefetcher[_Made] | Iterator[_Made] | None = None

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Batch:
        if self._made is None:
            made = _make(
                _fetcher(self._data, self._seed),
                self._collate,
                self._first,
                self._batch_size,
                self._rank * self._own * self._accumulate,
                self._own,
                self._accumulate,
                _pins(self._device),
            )
            self._made = (
                Prefetcher(made, self._prefetch * self._accumulate, partial(_choose, self._device))
                if self._prefetch
                else made
            )
        batch, places = next(self._made)
        if self._taken == self._accumulate:
            self._first, self._taken, self._places = self._first + self._batch_size, 0, []
        self._taken += 1
        self._places.append(places)
        return batch

    def ready(self) -> int:
        """Microbatches that wait to be taken."""
        return self._made.waiting() if isinstance(self._made, Prefetcher) else 0

    def close(self) -> None:
        """End the thread; the next microbatch begins another."""
        if isinstance(self._made, Prefetcher):
            self._made.close()
        self._made = None

    def state_dict(self) -> dict[str, int]:
        """``samples``: global samples of the steps that were taken whole."""
        return {"samples": self._first + (self._batch_size if self._taken == self._accumulate else 0)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on after ``state["samples"]`` global samples, whatever the batch size and number of ranks were."""
        self.close()
        self._first, self._taken, self._places = int(state["samples"]), 0, []

    def describe_last(self, microbatches: int) -> str:
        """The global samples of the last step and where they come from, in a line.

        Of a stream, the places of this rank's samples only.
        """
        last = self._first + self._batch_size - 1
        if isinstance(self._data, Samples):
            _, places = _fetcher(self._data, self._seed)(self._first, self._batch_size)
            found, whose = places(), ""
        else:
            found = [place for places in self._places[-microbatches:] for place in places()]
            whose = "of this rank: "
        shown = "; ".join(dict.fromkeys(found[:SHOWN]))
        more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        return f"samples {self._first} to {last} ({whose}{shown}{more})"


class EvaluationLoader:
    """Each sample once, in order: this rank's part of them, in microbatches. Ranks may have different numbers.

    Args:
        samples: what is evaluated on.
        collate: makes a microbatch of samples.
        batch_size: samples in a microbatch of this rank; the last may be smaller.
        rank, ranks: which part is this process's.
        limit: at most so many samples over all ranks, the first ones; None: all.
        device: where batches will go; for a CUDA device they are made in pinned memory.

    Raises:
        UserError: there are fewer samples than ranks. On every rank.
    """

    def __init__(
        self,
        samples: Samples,
        collate: Collate,
        *,
        batch_size: int,
        rank: int = 0,
        ranks: int = 1,
        limit: int | None = None,
        device: torch.device | None = None,
    ) -> None:
        count = len(samples) if limit is None else min(limit, len(samples))
        if count < ranks:
            raise UserError(
                f"[evaluation] has {count} samples for {ranks} ranks; raise evaluation.fraction or evaluation.samples, "
                "or use fewer ranks"
            )
        self._samples, self._collate, self._batch_size, self._device = samples, collate, batch_size, device
        self._first, self._last = rank * count // ranks, (rank + 1) * count // ranks

    def __len__(self) -> int:
        """Microbatches of this rank."""
        return -(-(self._last - self._first) // self._batch_size)

    def __iter__(self) -> Iterator[Batch]:
        made = _evaluate(self._samples, self._collate, self._first, self._last, self._batch_size, _pins(self._device))
        ready = Prefetcher(made, 2, partial(_choose, self._device))
        try:
            yield from ready
        finally:
            ready.close()


def _make(
    fetch: Fetch, collate: Collate, first: int, step: int, offset: int, own: int, accumulate: int, pin: bool
) -> Iterator[_Made]:
    """The microbatches of a rank from global sample `first` on; `offset`: where its slice of a step begins."""
    while True:
        for number in range(accumulate):
            samples, places = fetch(first + offset + number * own, own)
            yield _Made(_pinned(collate(samples), pin), places)
        first += step


def _evaluate(samples: Samples, collate: Collate, first: int, last: int, batch_size: int, pin: bool) -> Iterator[Batch]:
    for start in range(first, last, batch_size):
        yield _pinned(collate([samples[index] for index in range(start, min(start + batch_size, last))]), pin)


def _fetcher(data: Samples | Stream, seed: int) -> Fetch:
    return _by_index(data, seed) if isinstance(data, Samples) else _by_stream(data, seed)


def _by_index(samples: Samples, seed: int) -> Fetch:
    order = samples.order(seed) if isinstance(samples, Mixture) else Order(seed, [len(samples)], [1])

    def fetch(first: int, count: int) -> tuple[list[Sample], Callable[[], list[str]]]:
        indices = order.indices(first, count).tolist()
        return [samples[index] for index in indices], lambda: [samples.where(index) for index in indices]

    return fetch


def _by_stream(stream: Stream, seed: int) -> Fetch:
    samples, at = stream.begin(seed), 0

    def fetch(first: int, count: int) -> tuple[list[Sample], Callable[[], list[str]]]:
        nonlocal at
        for _ in range(first - at):
            next(samples)
        at = first + count
        taken = [next(samples) for _ in range(count)]
        return [sample for sample, _ in taken], lambda: [place for _, place in taken]

    return fetch


def _pins(device: torch.device | None) -> bool:
    return device is not None and device.type == "cuda"


def _pinned(batch: Batch, pin: bool) -> Batch:
    return {key: value.pin_memory() for key, value in batch.items()} if pin else batch


def _choose(device: torch.device | None) -> None:
    """In the thread: without this it would pin through the first device, and hold memory there for every rank."""
    if device is not None and device.type == "cuda":
        torch.cuda.set_device(device)
