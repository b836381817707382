"""Samples while the data are read, for what is too large to prepare.

- The order is that of the sources, through a buffer from which samples are drawn by seed: the same on every rank and at
  every world size. At its end a stream begins again, in another order.
- What is longer than a sequence is cut as in data that are prepared, without a count of it.
- Every rank reads all of it and keeps its own samples; a resume reads again up to where the run stood.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from trueshard.errors import UserError
from trueshard.train.data.build import AT_ONCE, Cuts, batched
from trueshard.train.data.formats import Format
from trueshard.train.data.order import draws
from trueshard.train.data.packing import pack, packed
from trueshard.train.data.records import Located
from trueshard.train.data.samples import Document, Sample
from trueshard.train.data.sources import Source
from trueshard.train.data.text import sequence
from trueshard.train.data.vision import vision_messages

BUFFER = 1024
"""Samples among which the next is drawn."""
TOGETHER = 512
"""Documents that are packed together."""
Placed = tuple[Sample, str]


class SourceStream:
    """The samples of one source, without end.

    Args:
        source: where records come from.
        form: what becomes of them.
        length: inputs of a sequence.
    """

    def __init__(self, source: Source, form: Format, length: int) -> None:
        self._source, self._form, self._length = source, form, length

    def begin(self, seed: int) -> Iterator[Placed]:
        """From the first sample on. Raises `UserError` for a record that cannot be read, or a source without any."""
        number = 0
        while True:
            empty = True
            for sample in shuffled(self._once(), seed + number):
                empty = False
                yield sample
            if empty:
                raise self._empty()
            number += 1

    def check(self) -> None:
        """Read the first sample. Raises `UserError` as ``begin`` does."""
        if next(self._once(), None) is None:
            raise self._empty()

    def _empty(self) -> UserError:
        return UserError(
            f"{self._source.key}: {self._source.name} does not fill one sequence of train.sequence_length = "
            f"{self._length}; give it more, or lower train.sequence_length"
        )

    def _once(self) -> Iterator[Placed]:
        located = (self._source.located(record) for record in self._source.records())
        if self._form.kept:
            return self._kept(located)
        documents = self._documents(located)
        if self._form.joined:
            return self._cut(documents)
        return self._packed(documents) if self._form.packed else self._single(documents)

    def _kept(self, located: Iterable[Located]) -> Iterator[Placed]:
        for record in located:
            yield {"messages": vision_messages(record), "where": record.where}, record.where

    def _documents(self, located: Iterable[Located]) -> Iterator[tuple[tuple[Document, ...], str]]:
        encoder, cuts = self._form.encoder(Path()), Cuts()
        for group in batched(located, AT_ONCE):
            for record, documents in zip(group, encoder.encode(group), strict=True):
                if kept := cuts.fit(documents, self._length) if self._form.cut else documents:
                    yield kept, record.where

    def _cut(self, documents: Iterable[tuple[tuple[Document, ...], str]]) -> Iterator[Placed]:
        tokens, places = np.empty(0, dtype=np.int64), []
        for (document,), where in documents:
            tokens = np.concatenate([tokens, document.ids])
            places.append(where)
            count = max(0, len(tokens) - 1) // self._length
            for start in range(0, count * self._length, self._length):
                yield sequence(tokens, start, self._length), _span(places)
            if count:
                tokens, places = tokens[count * self._length :], [where]

    def _packed(self, documents: Iterable[tuple[tuple[Document, ...], str]]) -> Iterator[Placed]:
        for group in batched(documents, TOGETHER):
            sizes = [len(document.ids) - 1 for (document,), _ in group]
            for members in pack(sizes, self._length):
                chosen = [group[number][0][0] for number in members]
                yield packed(chosen, self._length, self._form.pad), _span([group[number][1] for number in members])

    @staticmethod
    def _single(documents: Iterable[tuple[tuple[Document, ...], str]]) -> Iterator[Placed]:
        for found, where in documents:
            if len(found) == 1:
                yield found[0].sample(), where
            else:
                yield {"chosen": found[0].sample(), "rejected": found[1].sample()}, where


def shuffled(samples: Iterable[Placed], seed: int) -> Iterator[Placed]:
    """The samples, each drawn from the `BUFFER` that come next."""
    buffer: list[Placed] = []
    chances = draws(seed, BUFFER)
    for sample in samples:
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


def _span(places: list[str]) -> str:
    return places[0] if places[0] == places[-1] else f"{places[0]} to {places[-1]}"
