"""The prepared data of a run on disk: documents in memory-mapped arrays.

- `tokens.bin`: the tokens of all documents (`records.bin`: JSON, for data that become tokens with their batch);
  `counted.bin`: which of them are targets, unless all are; `documents.npy`: origin and end of each document;
  `members.npy`, `sequences.npy`: the documents of each sequence, unless documents are joined; `data.json`: the rest.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, Field, TypeAdapter

from trueshard.errors import explained
from trueshard.train.data.batches import Document, Ids, Sample, all_targets, sequence, span
from trueshard.train.data.formats import Format
from trueshard.train.data.sources import where


@dataclass(frozen=True)
class Summary:
    """The contents of `data.json`."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    tokens: int | None  # to train on; None: unknown, as data are streamed, or become tokens with their batch
    documents: int | None  # to train on; None: unknown, as data are streamed
    unigram_entropy: float | None  # nats a target: the loss of a model that knows only the frequency of each token
    crc32: int  # of all bytes that samples are made of; for streamed data, of the fingerprint
    fingerprint: str  # hash of the state of sources and tokenizer
    identity: dict[str, Any]  # the settings that determine the data
    dtype: Annotated[str, Field(pattern="^uint(8|16|32)$")] = "uint8"
    conversational: bool = False  # texts of these data are messages, which a chat template writes
    files: list[list[str]] = field(default_factory=list)  # of each source
    # Half-open range of each source's "train" and "evaluation" parts: in sequences or, if documents are joined, tokens.
    ranges: list[dict[str, tuple[int, int]]] = field(default_factory=list)
    records: int | None = None  # that were read
    done: dict[str, tuple[int, str]] = field(default_factory=dict)  # to records → their number, place of the first
    notes: list[str] = field(default_factory=list)  # what is wrong with targets

    def write(self, folder: Path) -> None:
        """Write `data.json`."""
        (folder / "data.json").write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")


def read_summary(folder: Path) -> Summary | None:
    """Read `data.json`; return None if it is missing or has other fields."""
    try:
        return TypeAdapter(Summary).validate_json((folder / "data.json").read_bytes())
    except (OSError, ValueError):
        return None


def damage_named(folder: Path) -> AbstractContextManager[None]:
    """Turn errors inside into a `UserError`: what was written into a folder of prepared data cannot be read."""
    remedy = "delete that folder, and the same command makes it again from the files of the data"
    return explained(f"run.dir: the data in {folder} are damaged", remedy)


class StoredSamples:
    """The samples of a part, "train" or "evaluation", of a source in a folder that a ``DocumentWriter`` has filled."""

    def __init__(self, folder: Path, summary: Summary, form: Format, source: int, part: str) -> None:
        self._folder, self._files, self._form, self._length = folder, summary.files, form, form.length
        with damage_named(folder):
            self._map(summary, *summary.ranges[source][part])

    def _map(self, summary: Summary, first: int, last: int) -> None:
        """Map the arrays into memory. Raises ValueError if one is not as data.json says."""
        form, folder, self._first = self._form, self._folder, first
        self._joined = form.layout == "joined"
        self._count = max(0, last - first - 1) // form.length if self._joined else last - first
        name = "records.bin" if form.vocabulary is None else "tokens.bin"
        self.tokens: Ids = _mapped(folder / name, summary.dtype)
        self.counted = _mapped(folder / "counted.bin", "bool") if form.masked else None
        self.places = _array(folder / "documents.npy", (-1, 4))
        ends = {"documents.npy": (self.places[-1, 3], len(self.tokens)), "data.json": (first, min(first, last))}
        if self.counted is not None:
            ends["counted.bin"] = (len(self.counted), len(self.tokens))
        if not self._joined:
            self._members, self._ends = (_array(folder / f"{stem}.npy", (-1,)) for stem in ("members", "sequences"))
            ends["sequences.npy"] = (self._ends[-1], len(self._members))
        if wrong := [file for file, (end, expected) in ends.items() if end != expected]:
            raise ValueError(f"{wrong[0]} does not fit the other files")

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Sample:
        with damage_named(self._folder):
            if self._joined:
                start = self._first + index * self._length
                self._check(start, start + self._length + 1)
                return sequence(self.tokens, start, self._length)
            documents = tuple(self._document(number) for number in self._documents(index))
        return self._kept(index, *documents) if self._form.layout == "kept" else self._form.sample(documents)

    def where(self, index: int) -> str:
        with damage_named(self._folder):
            return span([self.origin(number) for number in self._documents(index)])

    def origin(self, document: int) -> str:
        """Return the place of a document's record."""
        source, file, line, _ = self.places[document].tolist()
        return where(self._files[source][file], line)

    def _documents(self, index: int) -> Sequence[int]:
        if self._joined:
            start = self._first + index * self._length
            begin, end = np.searchsorted(self.places[:, 3], [start, start + self._length], side="right").tolist()
            return range(begin, end + 1)
        first, last = _between(self._ends, self._first + index)
        result: list[int] = self._members[first:last].tolist()
        return result

    def _document(self, number: int) -> Document:
        first, last = _between(self.places[:, 3], number)
        ids = self._check(first, last)
        return all_targets(ids) if self.counted is None else Document(ids, self.counted[first:last])

    def _check(self, first: int, last: int) -> Ids:
        """Return the tokens of a range. Raises ValueError if they are not there, or not all of the tokenizer."""
        ids, size = self.tokens[first:last], self._form.vocabulary
        if not 0 <= first < last == first + len(ids) or (size is not None and ids.max() >= size):
            raise ValueError(f"tokens.bin does not have tokens of the tokenizer at {first} to {last}")
        return ids

    def _kept(self, index: int, document: Document) -> Sample:
        """Return ``messages``, or ``prompt`` and ``record``, with images as absolute paths, and ``where``."""
        value = json.loads(document.ids.tobytes())
        sample = value if isinstance(value, dict) else {"messages": value}
        for message in sample.get("messages") or sample["prompt"]:
            for part in message["content"] if isinstance(message, dict) else ():
                if isinstance(part, dict) and part["type"] == "image":  # relative to the store, or absolute
                    part["image"] = str(self._folder / part["image"])
        return {**sample, "where": self.where(index)}


def _mapped(file: Path, dtype: str) -> Any:
    """Map a file into memory: an array as numpy saves it, which is no pickle, or of values of ``dtype`` alone."""
    try:
        return np.load(file, mmap_mode="r") if file.suffix == ".npy" else np.memmap(file, mode="r", dtype=dtype)
    except (OSError, EOFError, ValueError):
        raise ValueError(f"{file.name} is missing, cut short, or no array of numbers") from None


def _array(file: Path, shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Map an array whose first dimension is any."""
    values: npt.NDArray[np.int64] = _mapped(file, "int64")
    if values.dtype != np.int64 or values.ndim != len(shape) or not len(values) or values.shape[1:] != shape[1:]:
        raise ValueError(f"{file.name} holds {values.dtype} {values.shape}")
    return values


def _between(ends: npt.NDArray[np.int64], number: int) -> tuple[int, int]:
    """Return the half-open range of an item, from the ends of all. Raises IndexError if there is none."""
    if number < 0:
        raise IndexError(f"there is no item {number}")
    return int(ends[number - 1]) if number else 0, int(ends[number])
