"""Samples of one source, read during training, without end.

- The order is that of the source, shuffled by seed within blocks of samples: the same on every rank and at any number
  of ranks. At its end a stream begins again, in another order.
- A resume reads from where the block that it stood in begins, and nothing before it; no token is kept on disk.
- Every rank reads and tokenises everything, and keeps its own samples.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from trueshard.errors import UserError
from trueshard.train.data.batches import Documents, Ids, Sample, batched, pack, sequence, span
from trueshard.train.data.formats.base import Format, text_length
from trueshard.train.data.order import GOLDEN, sequence_indices
from trueshard.train.data.sources import START, DataSource, Place, Record

BLOCK, BLOCK_BYTES = 1024, 2**25
"""Samples that are shuffled together, and their bytes from which on they are no more."""
TOGETHER = 512
"""Records whose documents are packed together."""
Placed = tuple[Sample, str, Place]
"""A sample, its origin, and where reading begins to make it again."""


class SourceStream:
    """A ``Stream`` of one source."""

    def __init__(self, source: DataSource, form: Format) -> None:
        self._source, self._form, self._length = source, form, form.length

    def begin(self, seed: int, first: int = 0, blocks: Any = None) -> Iterator[tuple[Sample, str, Any]]:
        """Iterate from the sample ``first``. Raises `UserError` for a damaged record, or a source without a sample.

        ``blocks``: of the block with that sample or an earlier one, the number of samples before it, its pass over the
        source, its number in this pass, the place of its first sample in the source, and ``Format.cuts`` there.
        """
        before, begun, number, start, self._form.cuts = blocks or (0, 0, 0, START, None)
        for passes in count(begun):
            is_empty = True
            for samples, place, cuts in self._blocks(Place(*start)):
                size, is_empty = len(samples), False
                block = [before, passes, number, list(place), cuts]
                order = sequence_indices((seed + passes * GOLDEN) % 2**64, number * size, size, size)
                for index in order[max(0, first - before) :].tolist():
                    yield *samples[index], block
                before, number = before + size, number + 1
            if is_empty:
                self._raise_empty()
            number, start = 0, START

    def check(self) -> None:
        """Read the first sample. Raises `UserError` as ``begin`` does."""
        if next(self._once(START), None) is None:
            self._raise_empty()

    def _raise_empty(self) -> None:
        raise UserError(
            f"{self._source.key}: {self._source.name} does not fill one sequence of train.sequence_length = "
            f"{self._length}; give it more, or lower train.sequence_length"
        )

    def _blocks(self, start: Place) -> Iterator[tuple[list[tuple[Sample, str]], Place, bool | None]]:
        """Iterate over the blocks of a pass: samples, the place of the first one, and ``cuts`` before it is read."""
        samples, size, begin, cuts = list[tuple[Sample, str]](), 0, start, self._form.cuts
        for sample, where, place in self._once(start):
            if len(samples) == BLOCK or size >= BLOCK_BYTES:
                yield samples, begin, cuts
                samples, size, begin, cuts = [], 0, place, self._form.cuts
            samples.append((sample, where))
            values = sample.values()
            size += sum(value.nbytes if isinstance(value, np.ndarray) else text_length(value) for value in values)
        if samples:
            yield samples, begin, cuts

    def _once(self, start: Place) -> Iterator[Placed]:
        """Iterate over the samples of a pass from a place on."""
        form = self._form
        if form.layout == "kept":
            for record in self._source.records(start):
                (turns,) = form.parts(form.section, record)
                yield {"messages": turns, "where": record.where}, record.where, record.place()
        elif form.layout == "joined":
            yield from self._joined(start)
        elif form.layout == "packed":
            yield from self._packed(start)
        else:
            skip = start.skip  # pieces of the first record
            for record, pieces in self._documents(start):
                for number, documents in enumerate(pieces[skip:], start=skip):
                    yield form.sample(documents), record.where, record.place(number)
                skip = 0

    def _documents(self, start: Place) -> Iterator[tuple[Record, list[Documents]]]:
        """Iterate over the records that have documents, and these, by sequence; of the records only their places."""
        groups = self._form.documents(self._source, Path(), start)  # these formats put no files beside them
        for record, encoded in (pair for group in groups for pair in group):
            if pieces := self._form.fitted(record, encoded)[0]:
                yield record.of({}, record.begin), pieces

    def _packed(self, start: Place) -> Iterator[Placed]:
        skip = start.skip  # samples of the first group
        for records in batched(self._documents(start), TOGETHER):
            group = [(record, document) for record, pieces in records for (document,) in pieces]
            packs = pack([len(document.ids) - 1 for _, document in group], self._length)
            for number, members in enumerate(packs[skip:], start=skip):
                documents = tuple(group[member][1] for member in members)
                where = span([group[member][0].where for member in members])
                yield self._form.sample(documents), where, records[0][0].place(number)
            skip = 0

    def _joined(self, start: Place) -> Iterator[Placed]:
        parts, total, at = list[Ids](), 0, start.skip  # tokens that wait, their number, and those before the sample
        records, firsts = list[Record](), list[int]()  # of the tokens that wait, and the first token of each
        for record, ((document,),) in self._documents(start):
            records.append(record)
            firsts.append(total)
            parts.append(document.ids)
            total += len(document.ids)
            if total <= at + self._length:
                continue
            tokens = np.concatenate(parts)
            while at + self._length < total:
                low, high = (bisect_right(firsts, token) for token in (at, at + self._length))
                where = span([record.where for record in records[low - 1 : high]])
                yield sequence(tokens, at, self._length), where, records[low - 1].place(at - firsts[low - 1])
                at += self._length
            low = bisect_right(firsts, at) - 1
            records, firsts = records[low:], [token - at for token in firsts[low:]]
            parts, total, at = [tokens[at:]], total - at, 0
