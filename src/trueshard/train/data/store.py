"""The prepared data of a run on disk: documents in memory-mapped arrays, built from sources in one pass.

- `tokens.bin`: the tokens of all documents (`records.bin`: JSON, for data that become tokens with their batch);
  `counted.bin`: which of them are targets, unless all are; `documents.npy`: origin and end of each document;
  `members.npy`, `sequences.npy`: the documents of each sequence, unless documents are joined; `data.json`: the rest.
- Tokens stream to disk, so memory stays small.
- The held-out part is drawn with a fixed seed, by whole records, so no other setting of a run changes it. Of joined
  text, the drawn documents come last and the end of the whole is held out: exactly the fraction asked for, even of a
  single long document.
"""

from __future__ import annotations

import json
import pickle
import tempfile
import zlib
from array import array
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, Field, TypeAdapter

from trueshard.errors import UserError, explained
from trueshard.train.data.batches import Document, Ids, Sample, all_targets, pack, sequence, span, truncate
from trueshard.train.data.formats import Format
from trueshard.train.data.order import sequence_indices
from trueshard.train.data.sources import DataSource, Record, place

HELD_OUT_SEED = 20_000
TOO_LONG = "longer than train.sequence_length - rollout.tokens"
Members = list[list[int]]
"""The documents of each sequence."""


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


def build(
    sources: list[DataSource], form: Format, folder: Path, fraction: float, fingerprint: str, identity: dict[str, Any]
) -> Summary:
    """Read all records, write their documents into an empty folder, and return its summary.

    Documents longer than a sequence are cut at their end, and their number is printed. Raises `UserError` if a record
    cannot be read, or a source has none with a target.
    """
    writer, counts = DocumentWriter(folder, form), Counter[str]()
    ranges: list[dict[str, tuple[int, int]]] = []
    members: Members = []
    for number, source in enumerate(sources):
        first_token, first_document = writer.tokens, writer.documents
        records_before = counts["records"]
        sizes = _write(source, number, writer, fraction, counts)
        if writer.documents == first_document and counts["records"] > records_before and form.layout == "kept":
            raise UserError(
                f"{source.key}: all prompts of {source.name} are {TOO_LONG} = {form.length} tokens; raise the former, "
                "or lower the latter"
            )
        if writer.documents == first_document:
            raise UserError(f"{source.key}: {source.name} holds no record with anything to learn; give it some")
        if form.layout == "joined":
            begin, end = first_token, writer.tokens
            middle = end - round(fraction * (end - begin))
        else:
            train, held_out = _sequences(first_document, sizes, writer, fraction)
            begin, middle, end = accumulate([len(members), len(train), len(held_out)])
            members += train + held_out
        ranges.append({"train": (begin, middle), "evaluation": (middle, end)})
    writer.close(members)
    left_out, total = counts["left out"], counts["records"]
    if left_out and form.layout == "kept":
        print(f"{left_out} of {total} prompts left out: {TOO_LONG} = {form.length} tokens", flush=True)
    elif counts["cut"] or left_out:
        omitted = f", {left_out} left out as no answer is within that" if left_out else ""
        print(f"{counts['cut']} of {total} records cut at train.sequence_length = {form.length}{omitted}", flush=True)
    has_tokens = form.vocabulary is not None
    return Summary(
        tokens=writer.tokens if has_tokens else None,
        documents=writer.documents,
        unigram_entropy=writer.entropy() if has_tokens else None,
        crc32=writer.crc32,
        fingerprint=fingerprint,
        identity=identity,
        dtype=writer.dtype,
        files=[list(source.files) for source in sources],
        ranges=ranges,
    )


def _write(source: DataSource, number: int, writer: DocumentWriter, fraction: float, counts: Counter[str]) -> list[int]:
    """Write the documents of a source; return the number of documents of each record that has any."""
    form, sizes = writer.form, []
    with tempfile.TemporaryFile(dir=writer.folder) as later:
        for record, encoded in form.documents(source, writer.folder):
            documents = truncate(encoded, form.length) if form.cut else encoded
            counts["records"] += 1
            counts["left out"] += not documents and form.layout != "joined"
            counts["cut"] += any(len(new.ids) < len(old.ids) for new, old in zip(documents, encoded, strict=False))
            if form.layout == "joined" and fraction and _drawn(record, fraction):
                for document in documents:
                    pickle.dump((document, number, record.file, record.line), later)
                continue
            for document in documents:
                writer.add(document, number, record.file, record.line)
            sizes += [len(documents)] if documents else []
        end = later.tell()
        later.seek(0)
        while later.tell() < end:
            writer.add(*pickle.load(later))
    return sizes


def _drawn(record: Record, fraction: float) -> bool:
    """Return True if a record is held out: a function of its file and line."""
    chance = sequence_indices(HELD_OUT_SEED + record.file, record.line, 1, 2**20)[0]
    return bool(chance < fraction * 2**20)


def _sequences(first: int, sizes: list[int], writer: DocumentWriter, fraction: float) -> tuple[Members, Members]:
    """Return (train, held out): the documents of each sequence of the last source, which begins at ``first``."""
    begins = accumulate(sizes, initial=first)
    records = [list(range(begin, begin + size)) for begin, size in zip(begins, sizes, strict=False)]
    count = round(fraction * len(records))
    drawn = set(sequence_indices(HELD_OUT_SEED, 0, count, len(records)).tolist()) if count else set()
    train = [record for number, record in enumerate(records) if number not in drawn]
    held_out = [records[number] for number in sorted(drawn)]
    if writer.form.layout == "packed":  # a record is one document
        return _packed(train, writer), _packed(held_out, writer)
    return train, held_out


def _packed(records: Members, writer: DocumentWriter) -> Members:
    documents = [document for (document,) in records]
    inputs = (writer.lengths()[documents] - 1).tolist()
    return [[documents[number] for number in group] for group in pack(inputs, writer.form.length)]


class DocumentWriter:
    """Writes the documents of a format into an empty folder."""

    def __init__(self, folder: Path, form: Format) -> None:
        self.folder, self.form = folder, form
        self.dtype = "uint8" if form.vocabulary is None else "uint16" if form.vocabulary <= 2**16 else "uint32"
        self.crc32 = 0
        self.tokens = 0
        self._counts = np.zeros(form.vocabulary or 256, dtype=np.int64)  # of each token among the targets
        self._places = array("q")  # of each document: source, file, line, end
        self._out = (folder / ("records.bin" if form.vocabulary is None else "tokens.bin")).open("wb")
        self._masks = (folder / "counted.bin").open("wb") if form.cut else None

    @property
    def documents(self) -> int:
        """Number of documents written."""
        return len(self._places) // 4

    def lengths(self) -> npt.NDArray[np.int64]:
        """Return the number of tokens of each document, int64 [documents]."""
        return np.diff(self._places[3::4], prepend=0)

    def entropy(self) -> float:
        """Return the entropy of the targets, in nats."""
        share = self._counts[self._counts > 0] / max(1, self._counts.sum())
        return float(-(share * np.log(share)).sum())

    def add(self, document: Document, source: int, file: int, line: int) -> None:
        """Write a document and its origin."""
        parts = [(self._out, document.ids.astype(self.dtype))]
        if self._masks is not None:
            parts.append((self._masks, document.counted))
        for stream, values in parts:
            stream.write(data := values.tobytes())
            self.crc32 = zlib.crc32(data, self.crc32)
        np.add.at(self._counts, document.ids[document.counted], 1)
        self.tokens += len(document.ids)
        self._places.extend((source, file, line, self.tokens))

    def close(self, members: Members) -> None:
        """Complete the files; ``members`` are unused if documents are joined."""
        self._out.close()
        if self._masks is not None:
            self._masks.close()
        np.save(self.folder / "documents.npy", np.array(self._places, dtype=np.int64).reshape(-1, 4))
        if self.form.layout != "joined":
            flat = np.array([document for group in members for document in group], dtype=np.int64)
            ends = np.cumsum([len(group) for group in members], dtype=np.int64)
            np.save(self.folder / "members.npy", flat)
            np.save(self.folder / "sequences.npy", ends)
            self.crc32 = zlib.crc32(ends.tobytes(), zlib.crc32(flat.tobytes(), self.crc32))


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
        self._tokens: Ids = _mapped(folder / name, summary.dtype)
        self._counted = _mapped(folder / "counted.bin", "bool") if form.cut else None
        self._places = _array(folder / "documents.npy", (-1, 4))
        ends = {"documents.npy": (self._places[-1, 3], len(self._tokens)), "data.json": (first, min(first, last))}
        if self._counted is not None:
            ends["counted.bin"] = (len(self._counted), len(self._tokens))
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
                return sequence(self._tokens, start, self._length)
            documents = tuple(self._document(number) for number in self._documents(index))
        return self._kept(index, *documents) if self._form.layout == "kept" else self._form.sample(documents)

    def where(self, index: int) -> str:
        with damage_named(self._folder):
            origins = (self._places[number].tolist() for number in self._documents(index))
            return span([place(self._files[source][file], line) for source, file, line, _ in origins])

    def _documents(self, index: int) -> Sequence[int]:
        if self._joined:
            start = self._first + index * self._length
            begin, end = np.searchsorted(self._places[:, 3], [start, start + self._length], side="right").tolist()
            return range(begin, end + 1)
        first, last = _between(self._ends, self._first + index)
        result: list[int] = self._members[first:last].tolist()
        return result

    def _document(self, number: int) -> Document:
        first, last = _between(self._places[:, 3], number)
        ids = self._check(first, last)
        return all_targets(ids) if self._counted is None else Document(ids, self._counted[first:last])

    def _check(self, first: int, last: int) -> Ids:
        """Return the tokens of a range. Raises ValueError if they are not there, or not all of the tokenizer."""
        ids, size = self._tokens[first:last], self._form.vocabulary
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
