"""Samples out of what the data became: for each format of the data a way to look at it."""

from __future__ import annotations

import json
from collections.abc import Iterator

from trueshard.train.data.packing import packed
from trueshard.train.data.samples import Document, Sample
from trueshard.train.data.store import Store
from trueshard.train.data.text import sequence


class Cut:
    """Consecutive tokens, cut into sequences.

    Args:
        store: holds them.
        first, last: from which token to which.
        length: inputs of a sequence.
    """

    def __init__(self, store: Store, first: int, last: int, length: int) -> None:
        self._store, self._first, self._length = store, first, length
        self._count = max(0, last - first - 1) // length

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Sample:
        return sequence(self._store.tokens, self._start(index), self._length)

    def where(self, index: int) -> str:
        start = self._start(index)
        return self._store.where(self._store.containing(start, start + self._length + 1))

    def _start(self, index: int) -> int:
        if not 0 <= index < self._count:
            raise IndexError(f"sample {index} of {self._count}")
        return self._first + index * self._length


class _Sequences:
    """Sequences of documents, as the store has them from ``first`` to ``last - 1``."""

    def __init__(self, store: Store, first: int, last: int) -> None:
        self._store, self._first, self._count = store, first, last - first

    def __len__(self) -> int:
        return self._count

    def where(self, index: int) -> str:
        return self._store.where(self._members(index))

    def _members(self, index: int) -> list[int]:
        if not 0 <= index < self._count:
            raise IndexError(f"sample {index} of {self._count}")
        return self._store.members(self._first + index)

    def _documents(self, index: int) -> Iterator[Document]:
        return map(self._store.document, self._members(index))


class Packed(_Sequences):
    """Several documents a sample, of ``length`` inputs; ``pad``: what stands where none is."""

    def __init__(self, store: Store, first: int, last: int, length: int, pad: int) -> None:
        super().__init__(store, first, last)
        self._length, self._pad = length, pad

    def __getitem__(self, index: int) -> Sample:
        return packed(list(self._documents(index)), self._length, self._pad)


class Single(_Sequences):
    """One document a sample, as long as it is."""

    def __getitem__(self, index: int) -> Sample:
        (document,) = self._documents(index)
        return document.sample()


class Pairs(_Sequences):
    """Two documents a sample, ``chosen`` and ``rejected``."""

    def __getitem__(self, index: int) -> Sample:
        chosen, rejected = self._documents(index)
        return {"chosen": chosen.sample(), "rejected": rejected.sample()}


class Kept(_Sequences):
    """A record a sample: its ``messages``, with images as paths, and ``where`` it comes from."""

    def __getitem__(self, index: int) -> Sample:
        (document,) = self._documents(index)
        found = json.loads(document.ids.tobytes())
        for message in found:
            for part in message["content"]:
                if part["type"] == "image":  # a path of the store's own, or an absolute one, which stays as it is
                    part["image"] = str(self._store.folder / part["image"])
        return {"messages": found, "where": self.where(index)}
