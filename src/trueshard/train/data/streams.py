"""Samples of data that are read during training instead of being prepared first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path

import numpy as np

from trueshard.errors import UserError
from trueshard.train.data.batches import Document, Sample, pack, sequence, span, truncate
from trueshard.train.data.data_format import Format, batched
from trueshard.train.data.order import draws
from trueshard.train.data.sources import DataSource

BUFFER = 1024
"""Samples from which the next one is drawn."""
TOGETHER = 512
"""Documents that are packed together."""
Placed = tuple[Sample, str]
"""A sample and its origin."""


class SourceStream:
    """The samples of one source, read during training, without end, in sequences of ``length`` inputs.

    The order is that of the source, shuffled through a buffer by seed: the same on every rank and at every world size.
    At its end a stream starts again, in another order. Every rank reads everything and keeps its own samples; a resume
    reads again up to where the run stood.
    """

    def __init__(self, source: DataSource, form: Format, length: int) -> None:
        self._source, self._form, self._length = source, form, length

    def begin(self, seed: int) -> Iterator[Placed]:
        """Iterate from the first sample. Raises `UserError` for a damaged record, or a source without a sample."""
        self.check()
        for number in count():
            yield from shuffled(self._once(), seed + number)

    def check(self) -> None:
        """Read the first sample. Raises `UserError` as ``begin`` does."""
        if next(self._once(), None) is None:
            raise UserError(
                f"{self._source.key}: {self._source.name} does not fill one sequence of train.sequence_length = "
                f"{self._length}; give it more, or lower train.sequence_length"
            )

    def _once(self) -> Iterator[Placed]:
        if self._form.live is not None:
            for record in self._source.records():
                yield self._form.live(record), record.where
        elif self._form.layout == "joined":
            yield from self._joined()
        elif self._form.layout == "packed":
            for group in batched(self._documents(), TOGETHER):
                for members in pack([len(document.ids) - 1 for (document,), _ in group], self._length):
                    parts = [group[number] for number in members]
                    together = [document for (document,), _ in parts]
                    yield self._form.sample(together), span([each for _, each in parts])
        else:
            for documents, where in self._documents():
                yield self._form.sample(documents), where

    def _documents(self) -> Iterator[tuple[tuple[Document, ...], str]]:
        """Iterate over the documents of each record that has any, and its origin."""
        for record, found in self._form.documents(self._source, Path()):  # streamed formats put no files beside them
            if documents := truncate(found, self._length) if self._form.cut else found:
                yield documents, record.where

    def _joined(self) -> Iterator[Placed]:
        tokens, places = np.empty(0, dtype=np.int64), []
        for (document,), where in self._documents():
            tokens = np.concatenate([tokens, document.ids])
            places.append(where)
            full = max(0, len(tokens) - 1) // self._length * self._length
            for start in range(0, full, self._length):
                yield sequence(tokens, start, self._length), span(places)
            if full:
                tokens, places = tokens[full:], [where]


def shuffled(placed: Iterable[Placed], seed: int) -> Iterator[Placed]:
    """Yield the samples, each drawn from the next ``BUFFER`` ones."""
    buffer: list[Placed] = []
    chances = draws(seed, BUFFER)
    for sample in placed:
        if len(buffer) < BUFFER:
            buffer.append(sample)
            continue
        place = next(chances)
        yield buffer[place]
        buffer[place] = sample
    while buffer:
        place = next(chances) % len(buffer)
        buffer[place], buffer[-1] = buffer[-1], buffer[place]
        yield buffer.pop()
