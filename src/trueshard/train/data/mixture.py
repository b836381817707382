"""Several sources as one: their samples are numbered one source after the other, and mixed by weight."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from itertools import accumulate

from trueshard.train.data.order import Order
from trueshard.train.data.samples import Sample, Samples, Stream


class Mixture:
    """``Samples`` of several sources.

    Args:
        sources: each with at least one sample.
        weights: each source's share of a run; each is passed through in permutations of its own.
    """

    def __init__(self, sources: Sequence[Samples], weights: Sequence[float]) -> None:
        self._sources, self._weights = list(sources), list(weights)
        self._ends = list(accumulate(len(source) for source in sources))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Sample:
        source, inside = self._find(index)
        return self._sources[source][inside]

    def where(self, index: int) -> str:
        source, inside = self._find(index)
        return self._sources[source].where(inside)

    def order(self, seed: int) -> Order:
        """Which samples stand where in a run."""
        return Order(seed, [len(source) for source in self._sources], self._weights)

    def _find(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        source = bisect.bisect_right(self._ends, index)
        return source, index - (self._ends[source - 1] if source else 0)


class StreamMixture:
    """A ``Stream`` of several: whose turn it is follows from weights, seed and the global sample index."""

    def __init__(self, streams: Sequence[Stream], weights: Sequence[float]) -> None:
        self._streams, self._weights = list(streams), list(weights)

    def begin(self, seed: int) -> Iterator[tuple[Sample, str]]:
        order = Order(seed, [1] * len(self._streams), self._weights)
        begun = [stream.begin(seed) for stream in self._streams]
        sample = 0
        while True:
            source, _ = order.turn(sample)
            yield next(begun[source])
            sample += 1
