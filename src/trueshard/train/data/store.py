"""What the data became, kept in the run's folder: documents one after the other in memory-mapped arrays.

- `tokens.bin`: the tokens (`records.bin`: the records, for data that become tokens with their batch); `counted.bin`:
  which of them are targets, where not all are; `documents.npy`: where each document ends, and where it came from;
  `members.npy`, `sequences.npy`: which documents make a sequence, where that was decided; `data.json`: all else.
- Memory stays small: tokens stream to disk.
"""

from __future__ import annotations

import json
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from trueshard.train.data.records import place
from trueshard.train.data.samples import Document, Ids

AT_ONCE = 2**20
"""Tokens that are counted together: to count those of a short document alone would take as long."""


@dataclass(frozen=True)
class Summary:
    """What `data.json` says of the data beside it."""

    tokens: int | None
    """None: not known, as the data are streamed, or become tokens with their batch."""
    documents: int | None
    """None: not known, as the data are streamed."""
    unigram_entropy: float | None
    """Nats a target: the loss of a model that knows how often each token occurs and nothing else."""
    crc32: int
    """Of all that the samples are made of; of data that are streamed, of the fingerprint."""
    fingerprint: str
    """Of what was read."""
    identity: dict[str, Any]
    """The settings that it was made with."""
    dtype: str = "uint8"
    files: list[list[str]] = field(default_factory=list)
    """Of each source."""
    ranges: list[dict[str, tuple[int, int]]] = field(default_factory=list)
    """Of each source: where its "train" and "evaluation" parts are, in sequences, or in tokens where these are cut as
    they are needed."""


def write_summary(folder: Path, summary: Summary) -> None:
    """Write `data.json`."""
    (folder / "data.json").write_text(json.dumps(asdict(summary), indent=1), encoding="utf-8")


def read_summary(folder: Path) -> Summary | None:
    """What stands in `data.json`, or None where there is none (or one of another make)."""
    try:
        return Summary(**json.loads((folder / "data.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


class Writer:
    """Writes documents into a folder.

    Args:
        folder: empty.
        vocabulary: how many ids there are; None: the documents are bytes of records.
    """

    def __init__(self, folder: Path, vocabulary: int | None) -> None:
        self.folder = folder
        self.dtype = "uint8" if vocabulary is None else "uint16" if vocabulary <= 2**16 else "uint32"
        self.counts = None if vocabulary is None else np.zeros(vocabulary, dtype=np.int64)
        self.crc32 = 0
        self.places = array("q")
        """For each document: its source, file, line and end."""
        self.tokens = 0
        self._out = (folder / ("records.bin" if vocabulary is None else "tokens.bin")).open("wb")
        self._masks: IO[bytes] | None = None
        self._uncounted: list[Ids] = []
        self._waiting = 0

    @property
    def documents(self) -> int:
        """How many were written."""
        return len(self.places) // 4

    def add(self, document: Document, source: int, file: int, line: int) -> None:
        """Write one more; where it came from."""
        ids = document.ids.astype(self.dtype).tobytes()
        self._out.write(ids)
        self.crc32 = zlib.crc32(ids, self.crc32)
        if self._masks is None and not document.counted.all():
            self._masks = (self.folder / "counted.bin").open("wb")
            for first in range(0, self.tokens, AT_ONCE):
                self._masks.write(b"\x01" * min(AT_ONCE, self.tokens - first))
        if self._masks is not None:
            mask = document.counted.tobytes()
            self._masks.write(mask)
            self.crc32 = zlib.crc32(mask, self.crc32)
        self._uncounted.append(document.ids[document.counted])
        self._waiting += len(document.ids)
        if self._waiting >= AT_ONCE:
            self._count()
        self.tokens += len(document.ids)
        self.places.extend((source, file, line, self.tokens))

    def close(self) -> None:
        """End the files."""
        self._count()
        self._out.close()
        if self._masks is not None:
            self._masks.close()
        np.save(self.folder / "documents.npy", np.array(self.places, dtype=np.int64).reshape(-1, 4))

    def _count(self) -> None:
        if self.counts is not None and self._uncounted:
            self.counts += np.bincount(np.concatenate(self._uncounted), minlength=len(self.counts))
        self._uncounted, self._waiting = [], 0

    def sequences(self, members: Sequence[Sequence[int]]) -> None:
        """Write which documents make each sequence."""
        flat = np.array([number for each in members for number in each], dtype=np.int64)
        ends = np.cumsum([len(each) for each in members], dtype=np.int64)
        np.save(self.folder / "members.npy", flat)
        np.save(self.folder / "sequences.npy", ends)
        self.crc32 = zlib.crc32(ends.tobytes(), zlib.crc32(flat.tobytes(), self.crc32))

    def entropy(self) -> float | None:
        """Of the targets, nats."""
        if self.counts is None:
            return None
        share = self.counts[self.counts > 0] / max(1, self.counts.sum())
        return float(-(share * np.log(share)).sum())


class Store:
    """Reads what a ``Writer`` wrote."""

    def __init__(self, folder: Path, summary: Summary) -> None:
        self.folder, self.summary = folder, summary
        name = "records.bin" if (folder / "records.bin").exists() else "tokens.bin"
        self.tokens: Ids = np.memmap(folder / name, mode="r", dtype=summary.dtype)
        counted = folder / "counted.bin"
        self._counted = np.memmap(counted, mode="r", dtype=np.bool_) if counted.exists() else None
        self._places: npt.NDArray[np.int64] = np.load(folder / "documents.npy", mmap_mode="r")
        self._members = self._ends = np.empty(0, dtype=np.int64)
        if (folder / "members.npy").exists():
            self._members = np.load(folder / "members.npy", mmap_mode="r")
            self._ends = np.load(folder / "sequences.npy", mmap_mode="r")

    def document(self, number: int) -> Document:
        """One document."""
        first, last = int(self._places[number - 1, 3]) if number else 0, int(self._places[number, 3])
        ids = self.tokens[first:last]
        return Document(ids, np.ones(len(ids), np.bool_) if self._counted is None else self._counted[first:last])

    def members(self, sequence: int) -> list[int]:
        """The documents that make a sequence."""
        first = int(self._ends[sequence - 1]) if sequence else 0
        found: list[int] = self._members[first : int(self._ends[sequence])].tolist()
        return found

    def containing(self, first: int, last: int) -> range:
        """The documents that the tokens ``first`` … ``last - 1`` belong to."""
        begin, end = np.searchsorted(self._places[:, 3], [first, last - 1], side="right").tolist()
        return range(begin, end + 1)

    def where(self, documents: Sequence[int]) -> str:
        """Where documents come from, in words."""
        found = []
        for number in documents:
            source, file, line, _ = self._places[number].tolist()
            found.append(place(self.summary.files[source][file], line))
        found = list(dict.fromkeys(found))
        return found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}" if len(found) > 4 else " and ".join(found)
