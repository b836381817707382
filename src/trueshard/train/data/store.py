"""The prepared data of a run on disk: documents in memory-mapped arrays, built from sources in one pass.

- `tokens.bin`: the tokens of all documents (`records.bin`: JSON, for data that become tokens with their batch);
  `counted.bin`: which of them are targets, unless all are; `documents.npy`: end and origin of each document;
  `members.npy`, `sequences.npy`: the documents of each sequence, unless documents are joined; `data.json`: the rest.
- Tokens stream to disk, so memory stays small.
- The held-out part is drawn with a fixed seed, by whole records, so no other setting of a run changes it. Of joined
  text, the drawn documents come last and the end of the whole is held out: exactly the fraction asked for, even of a
  single long document.
- Conversations longer than a sequence are cut at their end; their number is printed once.
"""

from __future__ import annotations

import json
import pickle
import tempfile
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import numpy.typing as npt

from trueshard.errors import UserError
from trueshard.train.data.formats import Format
from trueshard.train.data.order import sequence_indices
from trueshard.train.data.samples import Document, Ids, Sample, Samples, pack, sequence, truncate, whole
from trueshard.train.data.sources import DataSource, Record, place

RECORDS_AT_ONCE = 256
"""Records that are tokenised together."""
TOKENS_AT_ONCE = 2**20
"""Tokens that are written or counted together."""
HELD_OUT_SEED = 20_000
Item = TypeVar("Item")


@dataclass(frozen=True)
class Summary:
    """The contents of `data.json`."""

    tokens: int | None
    """None: unknown, as data are streamed, or become tokens with their batch."""
    documents: int | None
    """None: unknown, as data are streamed."""
    unigram_entropy: float | None
    """Nats a target: the loss of a model that knows only the frequency of each token."""
    crc32: int
    """CRC-32 of all bytes that samples are made of; for streamed data, of the fingerprint."""
    fingerprint: str
    """Hash of the state of sources and tokenizer."""
    identity: dict[str, Any]
    """The settings that determine the data."""
    dtype: str = "uint8"
    files: list[list[str]] = field(default_factory=list)
    """Files of each source."""
    ranges: list[dict[str, tuple[int, int]]] = field(default_factory=list)
    """For each source, the half-open range of its "train" and "evaluation" parts: in sequences or, if documents are
    joined, in tokens."""


def write_summary(folder: Path, summary: Summary) -> None:
    """Write `data.json`."""
    (folder / "data.json").write_text(json.dumps(asdict(summary), indent=1), encoding="utf-8")


def read_summary(folder: Path) -> Summary | None:
    """Read `data.json`; return None if it is missing or has other fields."""
    try:
        return Summary(**json.loads((folder / "data.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def build(
    sources: list[DataSource],
    form: Format,
    folder: Path,
    *,
    length: int,
    fraction: float,
    fingerprint: str,
    identity: dict[str, Any],
) -> Summary:
    """Read all records, write their documents into an empty folder, and return its summary.

    Args:
        length: inputs of a sequence.
        fraction: held-out part of each source.

    Raises:
        UserError: a record cannot be read, or a source has none with a target.
    """
    writer = DocumentWriter(folder, form.vocabulary)
    reading = _Reading(form, form.encoder(folder), writer, length, fraction)
    ranges: list[dict[str, tuple[int, int]]] = []
    members: list[list[int]] = []
    for number, source in enumerate(sources):
        first_token, first_document = writer.tokens, writer.documents
        reading.read(source, number)
        if writer.documents == first_document:
            raise UserError(f"{source.key}: {source.name} holds no record with anything to learn; give it some")
        if form.layout == "joined":
            middle = writer.tokens - round(fraction * (writer.tokens - first_token))
            ranges.append({"train": (first_token, middle), "evaluation": (middle, writer.tokens)})
        else:
            train, held = reading.sequences(first_document)
            begin, middle, end = np.cumsum([len(members), len(train), len(held)]).tolist()
            ranges.append({"train": (begin, middle), "evaluation": (middle, end)})
            members += train + held
    writer.close(None if form.layout == "joined" else members)
    reading.tell_cuts()
    return Summary(
        tokens=None if form.vocabulary is None else writer.tokens,
        documents=writer.documents,
        unigram_entropy=None if form.vocabulary is None else _unigram_entropy(folder, writer.dtype, form.vocabulary),
        crc32=writer.crc32,
        fingerprint=fingerprint,
        identity=identity,
        dtype=writer.dtype,
        files=[list(source.files) for source in sources],
        ranges=ranges,
    )


@dataclass
class _Reading:
    """Reads sources into a writer, and counts the records that had to be cut."""

    form: Format
    encode: Callable[[Sequence[Record]], list[tuple[Document, ...]]]
    writer: DocumentWriter
    length: int
    fraction: float
    sizes: list[int] = field(default_factory=list)
    """Number of documents of each record of the source read last; records without any left out."""
    records: int = 0
    cut: int = 0
    left_out: int = 0

    def read(self, source: DataSource, number: int) -> None:
        """Write the documents of a source; of joined text, those drawn for evaluation last."""
        self.sizes = []
        with tempfile.TemporaryFile(dir=self.writer.folder) as later:
            for group in batched(source.records(), RECORDS_AT_ONCE):
                for record, found in zip(group, self.encode(group), strict=True):
                    documents = self._fit(found) if self.form.cut else found
                    if self.form.layout == "joined" and _drawn(record, self.fraction):
                        for document in documents:
                            pickle.dump((document.ids, record.file, record.line), later)
                        continue
                    for document in documents:
                        self.writer.add(document, number, record.file, record.line)
                    self.sizes += [len(documents)] if documents else []
            end = later.tell()
            later.seek(0)
            while later.tell() < end:
                ids, file, line = pickle.load(later)
                self.writer.add(whole(ids), number, file, line)

    def _fit(self, found: tuple[Document, ...]) -> tuple[Document, ...]:
        documents = truncate(found, self.length)
        self.records += 1
        self.left_out += not documents
        self.cut += bool(documents) and any(len(each.ids) > self.length + 1 for each in found)
        return documents

    def tell_cuts(self) -> None:
        """Print the number of cut records, if there are any."""
        if self.cut or self.left_out:
            left = f", {self.left_out} left out as no answer is within that" if self.left_out else ""
            print(
                f"{self.cut} of {self.records} records cut at train.sequence_length = {self.length}{left}", flush=True
            )

    def sequences(self, first: int) -> tuple[list[list[int]], list[list[int]]]:
        """Return (train, held out): documents of each sequence of the last source, which begins at ``first``."""
        begins = np.cumsum([first, *self.sizes]).tolist()
        records = [list(range(begin, begin + size)) for begin, size in zip(begins, self.sizes, strict=False)]
        count = round(self.fraction * len(records))
        held = set(sequence_indices(HELD_OUT_SEED, 0, count, len(records)).tolist()) if count else set()
        parts = [[record for number, record in enumerate(records) if (number in held) is out] for out in (False, True)]
        if self.form.layout == "packed":
            inputs = self.writer.lengths() - 1
            parts = [
                [
                    [part[each][0] for each in together]
                    for together in pack(inputs[[record[0] for record in part]].tolist(), self.length)
                ]
                for part in parts
            ]
        return parts[0], parts[1]


def _drawn(record: Record, fraction: float) -> bool:
    """True if a record is held out: a function of its file and line."""
    chance = sequence_indices(HELD_OUT_SEED + record.file, record.line, 1, 2**20)[0] if fraction else 2**20
    return bool(chance < fraction * 2**20)


def batched(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Yield consecutive items, ``size`` at a time."""
    remaining = iter(items)
    while group := list(islice(remaining, size)):
        yield group


class DocumentWriter:
    """Writes documents into an empty folder; without a ``vocabulary`` (number of token ids), bytes of JSON."""

    def __init__(self, folder: Path, vocabulary: int | None) -> None:
        self.folder = folder
        self.dtype = "uint8" if vocabulary is None else "uint16" if vocabulary <= 2**16 else "uint32"
        self.crc32 = 0
        self.tokens = 0
        self._places = array("q")  # of each document: source, file, line, end
        self._out = (folder / ("records.bin" if vocabulary is None else "tokens.bin")).open("wb")
        self._masks: IO[bytes] | None = None

    @property
    def documents(self) -> int:
        """Number of documents written."""
        return len(self._places) // 4

    def lengths(self) -> npt.NDArray[np.int64]:
        """Return the number of tokens of each document, int64 [documents]."""
        ends = np.array([0, *self._places[3::4]], dtype=np.int64)
        return ends[1:] - ends[:-1]

    def add(self, document: Document, source: int, file: int, line: int) -> None:
        """Write a document and its origin."""
        ids = document.ids.astype(self.dtype).tobytes()
        self._out.write(ids)
        self.crc32 = zlib.crc32(ids, self.crc32)
        if self._masks is None and not document.counted.all():
            self._masks = (self.folder / "counted.bin").open("wb")
            for first in range(0, self.tokens, TOKENS_AT_ONCE):
                self._masks.write(b"\x01" * min(TOKENS_AT_ONCE, self.tokens - first))
        if self._masks is not None:
            mask = document.counted.tobytes()
            self._masks.write(mask)
            self.crc32 = zlib.crc32(mask, self.crc32)
        self.tokens += len(document.ids)
        self._places.extend((source, file, line, self.tokens))

    def close(self, members: Sequence[Sequence[int]] | None) -> None:
        """Complete the files. ``members``: the documents of each sequence; None: documents are joined."""
        self._out.close()
        if self._masks is not None:
            self._masks.close()
        np.save(self.folder / "documents.npy", np.array(self._places, dtype=np.int64).reshape(-1, 4))
        if members is not None:
            flat = np.array([number for each in members for number in each], dtype=np.int64)
            ends = np.cumsum([len(each) for each in members], dtype=np.int64)
            np.save(self.folder / "members.npy", flat)
            np.save(self.folder / "sequences.npy", ends)
            self.crc32 = zlib.crc32(ends.tobytes(), zlib.crc32(flat.tobytes(), self.crc32))


def _unigram_entropy(folder: Path, dtype: str, vocabulary: int) -> float:
    """Return the entropy of the targets in `tokens.bin`, in nats."""
    tokens: Ids = np.memmap(folder / "tokens.bin", mode="r", dtype=dtype)
    masks = folder / "counted.bin"
    counted = np.memmap(masks, mode="r", dtype=np.bool_) if masks.exists() else None
    counts = np.zeros(vocabulary, dtype=np.int64)
    for first in range(0, len(tokens), TOKENS_AT_ONCE):
        chunk = tokens[first : first + TOKENS_AT_ONCE]
        kept = chunk if counted is None else chunk[counted[first : first + TOKENS_AT_ONCE]]
        counts += np.bincount(kept, minlength=vocabulary)
    share = counts[counts > 0] / max(1, counts.sum())
    return float(-(share * np.log(share)).sum())


class DocumentStore:
    """Reads the files of a ``DocumentWriter``."""

    def __init__(self, folder: Path, summary: Summary) -> None:
        self.folder, self._files = folder, summary.files
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
        """Return one document."""
        first, last = int(self._places[number - 1, 3]) if number else 0, int(self._places[number, 3])
        ids = self.tokens[first:last]
        return whole(ids) if self._counted is None else Document(ids, self._counted[first:last])

    def members(self, sequence: int) -> list[int]:
        """Return the documents of a sequence."""
        first = int(self._ends[sequence - 1]) if sequence else 0
        found: list[int] = self._members[first : int(self._ends[sequence])].tolist()
        return found

    def containing(self, first: int, last: int) -> range:
        """Return the documents of the tokens ``first`` … ``last - 1``."""
        begin, end = np.searchsorted(self._places[:, 3], [first, last - 1], side="right").tolist()
        return range(begin, end + 1)

    def where(self, documents: Sequence[int]) -> str:
        """Describe the origins of documents."""
        found = []
        for number in documents:
            source, file, line, _ = self._places[number].tolist()
            found.append(place(self._files[source][file], line))
        found = list(dict.fromkeys(found))
        return found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}" if len(found) > 4 else " and ".join(found)

    def samples(self, form: Format, first: int, last: int, length: int) -> Samples:
        """Return the samples of a range of sequences or, if documents are joined, of tokens."""
        if form.layout == "joined":
            return JoinedSamples(self, first, last, length)
        return StoredSamples(self, first, last, form)


class StoredSamples:
    """Samples of the stored sequences ``first`` … ``last - 1``."""

    def __init__(self, store: DocumentStore, first: int, last: int, form: Format) -> None:
        self._store, self._first, self._count, self._form = store, first, last - first, form

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Sample:
        documents = [self._store.document(number) for number in self._members(index)]
        return self._kept(index, *documents) if self._form.layout == "kept" else self._form.sample(documents)

    def where(self, index: int) -> str:
        return self._store.where(self._members(index))

    def _members(self, index: int) -> list[int]:
        if not 0 <= index < self._count:
            raise IndexError(f"sample {index} of {self._count}")
        return self._store.members(self._first + index)

    def _kept(self, index: int, document: Document) -> Sample:
        """Return ``messages``, with images as absolute paths, and ``where``."""
        found = json.loads(document.ids.tobytes())
        for message in found:
            for part in message["content"]:
                if part["type"] == "image":  # relative to the store, or absolute, which stays as it is
                    part["image"] = str(self._store.folder / part["image"])
        return {"messages": found, "where": self.where(index)}


class JoinedSamples:
    """Sequences of ``length`` inputs, cut from the tokens ``first`` … ``last - 1``."""

    def __init__(self, store: DocumentStore, first: int, last: int, length: int) -> None:
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
