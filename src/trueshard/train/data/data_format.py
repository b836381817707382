"""Declaration of a format of data: how records become documents, and documents samples and batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from trueshard.train.config import DataSection
from trueshard.train.data.batches import Collate, Document, Sample
from trueshard.train.data.sources import DataSource, Record

Encode = Callable[[Sequence[Record], Path], list[tuple[Document, ...]]]
"""(records, folder for files beside the documents) → the documents of each. Raises `UserError` that names the record.
"""
Layout = Literal["joined", "packed", "single", "kept"]
"""joined: documents follow each other without a gap, and are cut into sequences on reading. packed: several documents
share a sequence. single: a sample is one record. kept: the same, as JSON that becomes tokens with its batch."""
Item = TypeVar("Item")

RECORDS_AT_ONCE = 256
"""Records that are tokenised together: a fast tokenizer spreads one call over threads."""


class FormatInputs(NamedTuple):
    """Everything that a format is opened with."""

    section: DataSection
    length: int
    """Maximum tokens of a sequence, or of a prompt."""
    tokenizer: Any
    """Has its chat template."""
    processor: Any
    """Turns images and text into tensors; None for text alone."""
    pad: int
    """Token that stands where a row has ended."""
    vocabulary: int
    """Number of token ids."""


@dataclass(frozen=True)
class DataFormat:
    """One value of `data.format`."""

    noun: str
    """Name of such data, in messages."""
    layout: Callable[[DataSection], Layout]
    """Known before a tokenizer is, so that a forecast can make batches of the same form."""
    open: Callable[[FormatInputs], Format]
    texts: Callable[[DataSection, Record], Iterator[str]]
    """Yields the texts of a record, to train a tokenizer on."""
    rows: int = 1
    """Rows of a batch that a record becomes."""


@dataclass(frozen=True)
class Format:
    """A format with the tokenizer and the settings of a run."""

    layout: Layout
    encode: Encode
    sample: Callable[[Sequence[Document]], Sample]
    """Makes a sample of the documents of a sequence; unused for the layouts "joined" and "kept"."""
    collate: Collate
    vocabulary: int | None
    """Number of token ids; None: documents are bytes of JSON."""
    live: Callable[[Record], Sample] | None = None
    """Makes a sample of a record when data are streamed; only for the layout "kept", which stores records otherwise."""

    @property
    def cut(self) -> bool:
        """True if a document longer than a sequence is cut when it is read, and only some tokens may be targets."""
        return self.layout in ("packed", "single")

    def documents(self, source: DataSource, folder: Path) -> Iterator[tuple[Record, tuple[Document, ...]]]:
        """Iterate over the records of a source and the documents of each, before any is cut."""
        for group in batched(source.records(), RECORDS_AT_ONCE):
            yield from zip(group, self.encode(group, folder), strict=True)


def batched(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Yield consecutive items, ``size`` at a time."""
    remaining = iter(items)
    while group := list(islice(remaining, size)):
        yield group


def single(documents: Sequence[Document]) -> Sample:
    """Return the sample of one document."""
    (document,) = documents
    return document.sample()
