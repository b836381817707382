"""Documents, samples and batches, and the steps from one to the next.

A sample maps names to arrays. A sequence to learn from has

- ``input_ids``: int64 [length], the input of the model;
- ``targets``: int64 [length], the next token at each position, or -100 where no loss is computed;
- ``position_ids``: int64 [length], only in packed sequences; it restarts at 0 with each document.

A batch maps names to tensors whose first dimension is the sample. Padded batches have ``attention_mask``, int64
[samples, length]: 1 on tokens, 0 on padding.

Packing puts several documents into a sequence, the longest first, each where it fits best. From ``position_ids``
transformers derives a block-diagonal attention mask; no loss crosses documents.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, islice
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.utils.rnn import pad_sequence

from trueshard.train.data.order import Order

Sample = Mapping[str, Any]
Batch = dict[str, torch.Tensor]
Collate = Callable[[Sequence[Sample]], Batch]
Ids = npt.NDArray[Any]
Item = TypeVar("Item")

IGNORED = -100  # target of a position without loss


@runtime_checkable
class Samples(Protocol):
    """Samples with random access."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...

    def where(self, index: int) -> str:
        """Return the origin of a sample, for error messages: "chat.jsonl, line 17"."""


@runtime_checkable
class Stream(Protocol):
    """An endless sequence of samples."""

    def begin(self, seed: int, first: int = 0, blocks: Any = None) -> Iterator[tuple[Sample, str, Any]]:
        """Iterate from the sample ``first``: (sample, its origin, blocks). Equal seeds give equal samples.

        ``blocks``, JSON values: where the blocks of samples lie that this one is of. Begun with them, at this sample or
        a later one, a stream reads nothing that is before.
        """


@dataclass(frozen=True)
class Document:
    """Consecutive tokens, and which of them are targets."""

    ids: Ids  # integers [tokens]
    counted: npt.NDArray[np.bool_]  # [tokens]: True for targets; the first has no effect, as nothing precedes it
    more: bool = False  # a piece of a document that goes on with the next one

    def piece(self, start: int, length: int) -> Document:
        """Return ``length`` inputs from a token on, with their targets, or as many as there are."""
        cut = slice(start, start + length + 1)
        return Document(self.ids[cut], self.counted[cut])

    def sample(self) -> dict[str, npt.NDArray[np.int64]]:
        """Return ``input_ids`` and ``targets``, [tokens - 1]."""
        ids = self.ids.astype(np.int64)
        return {"input_ids": ids[:-1], "targets": np.where(self.counted[1:], ids[1:], IGNORED)}


Documents = tuple[Document, ...]
"""The documents of a record: none if it has nothing to learn."""


def all_targets(ids: Ids, more: bool = False) -> Document:
    """Return a document, or a piece of one that has ``more``, whose tokens are all targets."""
    return Document(ids, np.ones(len(ids), dtype=np.bool_), more)


def json_document(value: Any) -> Document:
    """Return a document of the bytes of a JSON value, with null in place of what JSON cannot hold."""
    return all_targets(np.frombuffer(json.dumps(value, default=lambda _: None).encode(), dtype=np.uint8))


def sequence(tokens: Ids, start: int, length: int) -> dict[str, Ids]:
    """Return the sample of ``length`` inputs from ``tokens[start]`` on; every token is a target."""
    piece = np.asarray(tokens[start : start + length + 1], dtype=np.int64)
    return {"input_ids": piece[:-1], "targets": piece[1:]}


def span(places: Sequence[str]) -> str:
    """Join the origins of consecutive documents; of more than four, name the first and the last."""
    distinct = list(dict.fromkeys(places))
    return " and ".join(distinct) if len(distinct) < 5 else f"{distinct[0]} to {distinct[-1]}"


def batched(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Yield consecutive items, ``size`` at a time; the last list may be shorter."""
    remaining = iter(items)
    while group := list(islice(remaining, size)):
        yield group


def stack(samples: Sequence[Sample]) -> Batch:
    """Stack the arrays of samples of equal length."""
    return {key: torch.from_numpy(np.stack([sample[key] for sample in samples])) for key in samples[0]}


def pad_ends(pad_id: int, samples: Sequence[Sample]) -> Batch:
    """Pad ``input_ids`` (with ``pad_id``) and ``targets`` at their ends to the longest sample."""
    inputs, targets = ([torch.from_numpy(sample[key]) for sample in samples] for key in ("input_ids", "targets"))
    return {
        "input_ids": pad_sequence(inputs, batch_first=True, padding_value=pad_id),
        "targets": pad_sequence(targets, batch_first=True, padding_value=IGNORED),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in inputs], batch_first=True),
    }


def pack(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Distribute documents of ``lengths`` inputs, 1 to ``room`` each, over sequences of ``room`` inputs.

    Returns the numbers of the documents of each sequence, ascending; each document once.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    sequences: list[list[int]] = []
    by_room: list[list[list[int]]] = [[] for _ in range(room + 1)]  # the sequences that have so much room left
    has_any = np.zeros(room + 1, dtype=np.bool_)
    for number in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[number])
        left = size + int(has_any[size:].argmax())
        if has_any[left]:
            members = by_room[left].pop()
            has_any[left] = bool(by_room[left])
        else:
            left, members = room, []
            sequences.append(members)
        members.append(number)
        by_room[left - size].append(members)
        has_any[left - size] = True
    return [sorted(members) for members in sequences]


def packed(documents: Sequence[Document], length: int, pad: int) -> dict[str, npt.NDArray[np.int64]]:
    """Return a sample of exactly ``length`` inputs from documents that fit; padding is a document without targets."""
    inputs, targets = np.full(length, pad, dtype=np.int64), np.full(length, IGNORED, dtype=np.int64)
    positions, first = np.empty(length, dtype=np.int64), 0
    for document in documents:
        sample = document.sample()
        last = first + len(sample["input_ids"])
        inputs[first:last], targets[first:last] = sample["input_ids"], sample["targets"]
        positions[first:last] = np.arange(last - first)
        first = last
    positions[first:] = np.arange(length - first)
    return {"input_ids": inputs, "targets": targets, "position_ids": positions}


class Mixture:
    """``Samples`` of several sources, numbered one after the other; each has a weight, and at least one sample."""

    def __init__(self, sources: Sequence[Samples], weights: Sequence[float]) -> None:
        self.sources, self._weights = list(sources), list(weights)
        self._ends = list(accumulate(len(source) for source in sources))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Sample:
        source, inside = self._find(index)
        return source[inside]

    def where(self, index: int) -> str:
        source, inside = self._find(index)
        return source.where(inside)

    def order(self, seed: int) -> Order:
        """Return the order in which a run takes the samples."""
        return Order(seed, [len(source) for source in self.sources], self._weights)

    def _find(self, index: int) -> tuple[Samples, int]:
        source = bisect.bisect_right(self._ends, index)
        return self.sources[source], index - (self._ends[source - 1] if source else 0)


class StreamMixture:
    """A ``Stream`` of several streams, which take turns by weight, seed and global sample index."""

    def __init__(self, streams: Sequence[Stream], weights: Sequence[float]) -> None:
        self._streams, self._weights = list(streams), list(weights)

    def begin(self, seed: int, first: int = 0, blocks: Any = None) -> Iterator[tuple[Sample, str, Any]]:
        order, sources = Order(seed, [1] * len(self._streams), self._weights), range(len(self._streams))
        blocks, before = list(blocks or [None for _ in sources]), order.given(first)
        begun = [self._streams[number].begin(seed, before[number], blocks[number]) for number in sources]
        for index in count(first):
            source, _ = order.turn(index)
            sample, where, block = next(begun[source])
            if block is not blocks[source]:
                blocks = [*blocks[:source], block, *blocks[source + 1 :]]
            yield sample, where, blocks
