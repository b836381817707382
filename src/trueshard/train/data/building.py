"""Make the prepared data of a run: read sources in one pass, and write their documents.

- Memory is bounded, whatever the length of a document: threads tokenise, on all cores, while one reads and writes. A
  record takes some 40 bytes, when sequences are made of all.
- `progress.json` says every few seconds how far it has come. After a stop, reading goes on from there.
- The held-out part is drawn with a fixed seed, by whole records, so no other setting of a run changes it. Of joined
  text, the drawn documents come last and the end of the whole is held out: exactly the fraction asked for, even of a
  single long document.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
import zlib
from collections import deque
from collections.abc import Generator, Iterator
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from trueshard.errors import UserError
from trueshard.files import replace_text
from trueshard.machine import earlier_objects_frozen
from trueshard.train.data.batches import Document, Documents, all_targets, pack
from trueshard.train.data.formats import Format
from trueshard.train.data.loader import Prefetcher
from trueshard.train.data.order import sequence_indices
from trueshard.train.data.sources import START, DataSource, Place, Record
from trueshard.train.data.store import Summary

HELD_OUT_SEED = 20_000
SAVE_EVERY = 10.0
"""Seconds between two states on disk."""
SHOW_EVERY = 30.0
"""Seconds between two lines of progress; on a terminal it is one line."""
PACKED_TOGETHER = 2**18
"""Documents that are packed together."""
COPIED_TOGETHER = 2**20
"""Tokens that are copied together."""
Numbers = npt.NDArray[np.int64]
Group = list[tuple[Record, Documents]]
Origin = tuple[int, int, int]
"""Source, file and line of a document."""


def build(
    sources: list[DataSource], form: Format, folder: Path, fraction: float, fingerprint: str, identity: dict[str, Any]
) -> Summary:
    """Read all records, write their documents into a folder, and return its summary; go on from the state in it.

    What is longer than a sequence is treated as `data.long` says, and its number is printed. Raises `UserError` if a
    record cannot be read, or a source has none with a target.
    """
    making = _Making(folder, form, fraction)
    state, writer, progress = making.state, making.writer, _Progress(sources)
    for number in range(len(state["ends"]) - 1, len(sources)):
        source, (_, documents, records) = sources[number], state["ends"][-1]
        making.write(source, number, progress)
        if writer.documents == documents and state["records"] > records and form.layout == "kept":
            raise UserError(
                f"{source.key}: all prompts of {source.name} are longer than {form.limit} = {form.length} tokens; "
                "raise the former, or lower the latter"
            )
        if writer.documents == documents:
            done = f" ({making.done()})" if state["done"] else ""
            raise UserError(f"{source.key}: {source.name} holds no record with anything to learn{done}; give it some")
    ranges = making.end()
    progress.close()
    if state["done"]:
        print(making.done(), flush=True)
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
        ranges=[{"train": (begin, middle), "evaluation": (middle, end)} for begin, middle, end in ranges],
        records=state["records"],
        done=state["done"],
    )


class _Making:
    """A preparation: how far it has come, and its writers.

    ``state``: place of the last record of the current source that is written, and 1, or its beginning and 0; tokens,
    documents and records up to the end of each source; the number of records; of what was done to some, their number
    and the place of the first; the states of the writers, and what a format has noted.
    """

    def __init__(self, folder: Path, form: Format, fraction: float) -> None:
        self._form, self._folder, self._fraction, self._file = form, folder, fraction, folder / "progress.json"
        self.state: dict[str, Any] = {"place": [START, 0], "ends": [(0, 0, 0)], "records": 0, "done": {}}
        if self._file.is_file():
            self.state = json.loads(self._file.read_text(encoding="utf-8"))
        form.cuts = self.state.get("cuts")
        if self.state.get("conversational"):
            form.conversational = True
            form.template.notes.update(self.state["notes"])
        self.writer = DocumentWriter(folder, form, self.state.get("writer"))
        # Text that is drawn is held back, as it comes last.
        holds_back = form.layout == "joined" and fraction
        self._later = DocumentWriter(folder / "later", form, self.state.get("later")) if holds_back else None
        self._saved = time.monotonic()

    def write(self, source: DataSource, number: int, progress: _Progress) -> None:
        """Write the documents of a source, from where the state is."""
        state, writer, (start, skip) = self.state, self.writer, self.state["place"]
        encoded = self._encoded(self._form.groups(source, Place(*start), skip))
        with earlier_objects_frozen(), contextlib.closing(encoded) as groups:
            for group in groups:
                self._add(group, number)
                state["place"] = [group[-1][0].place(), 1]
                progress.show(writer.tokens + (self._later.tokens if self._later is not None else 0))
                if time.monotonic() > self._saved + SAVE_EVERY:
                    self._save()
        if self._later is not None:
            for pair in self._later.read():
                writer.add([pair])
            self._later = DocumentWriter(self._later.folder, self._form)
        state["place"] = [START, 0]
        state["ends"].append((writer.tokens, writer.documents, state["records"]))
        self._save()

    def _encoded(self, groups: Iterator[list[Record]]) -> Generator[Group]:
        """Encode groups of records in threads, on all cores, while the next ones are read and earlier ones written."""
        form, running = self._form, deque[Prefetcher[Group]]()
        try:
            for group in groups:
                done = [next(running.popleft())] if len(running) == form.at_once else []
                running.append(Prefetcher(map(form.encoded, [group], [self._folder]), 1))
                yield from done
            yield from map(next, running)
        finally:
            for encoding in running:
                encoding.close()

    def _add(self, group: Group, number: int) -> None:
        form, state = self._form, self.state
        kept, later = list[tuple[Document, Origin]](), list[tuple[Document, Origin]]()
        for record, encoded in group:
            pieces, done = form.fitted(record, encoded)
            origin = (number, record.file, record.line)
            state["records"] += not record.more
            if done:
                state["done"].setdefault(done, [0, record.where])[0] += 1
            drawn = self._later is not None and _drawn(record, self._fraction)
            (later if drawn else kept).extend((document, origin) for documents in pieces for document in documents)
        self.writer.add(kept)
        if self._later is not None:
            self._later.add(later)

    def done(self) -> str:
        """Return how many records were cut or left out, and why, in a line."""
        form, total = self._form, self.state["records"]
        of = f" of {total} {form.noun if form.layout == 'kept' else 'records'}"
        parts = [f"{count}{of} {word} (first: {place})" for word, (count, place) in self.state["done"].items()]
        rest = (part.replace(of, "", 1) for part in parts[1:])
        return f"{', '.join([*parts[:1], *rest])}; {form.limit} = {form.length} tokens"

    def _save(self) -> None:
        """Write the state, once what it speaks of is on disk."""
        conversational = self._form.conversational
        self.state |= {"writer": self.writer.state(), "later": self._later and self._later.state()}
        self.state |= {"conversational": conversational, "notes": self._form.template.notes if conversational else {}}
        self.state["cuts"] = self._form.cuts
        replace_text(self._file, json.dumps(self.state))
        self._saved = time.monotonic()

    def end(self) -> list[tuple[int, int, int]]:
        """Complete the files; return of each source its begin, the end of what to train on, and its end."""
        self.writer.close()
        spans, fraction = list(pairwise(self.state["ends"])), self._fraction
        if self._form.layout == "joined":
            tokens = [(begin, end) for (begin, *_), (end, *_) in spans]
            ranges = [(begin, end - round(fraction * (end - begin)), end) for begin, end in tokens]
        else:
            documents = [(first, last) for (_, first, _), (_, last, _) in spans]
            ranges = _write_sequences(documents, self.writer, fraction)
        self._file.unlink()  # before what it speaks of
        (self._folder / "documents.bin").unlink()
        shutil.rmtree(self._folder / "later", ignore_errors=True)
        return ranges


def _drawn(record: Record, fraction: float) -> bool:
    """Return True if a record is held out: a function of its file and line."""
    chance = sequence_indices(HELD_OUT_SEED + record.file, record.line, 1, 2**20)[0]
    return bool(chance < fraction * 2**20)


def _write_sequences(
    spans: list[tuple[int, int]], writer: DocumentWriter, fraction: float
) -> list[tuple[int, int, int]]:
    """Write the documents of each sequence; ``spans``: the documents of each source. Returns what ``end`` does."""
    members, sizes, bounds = list[Numbers](), list[Numbers](), [0]
    for first, last in spans:
        record = writer.records(first, last)
        is_drawn = np.zeros(record[-1] + 1, dtype=np.bool_)
        is_drawn[sequence_indices(HELD_OUT_SEED, 0, round(fraction * len(is_drawn)), len(is_drawn))] = True
        for numbers in (first + np.flatnonzero(~is_drawn[record]), first + np.flatnonzero(is_drawn[record])):
            before = len(sizes)
            for low in range(0, len(numbers), PACKED_TOGETHER):
                documents, counts = _sequences(numbers[low : low + PACKED_TOGETHER], writer)
                members.append(documents)
                sizes.append(counts)
            bounds.append(bounds[-1] + sum(map(len, sizes[before:])))
    flat, ends = np.concatenate(members), np.cumsum(np.concatenate(sizes), dtype=np.int64)
    for name, values in (("members", flat), ("sequences", ends)):
        np.save(writer.folder / f"{name}.npy", values)
        writer.crc32 = zlib.crc32(values.tobytes(), writer.crc32)
    return list(zip(bounds[:-1:2], bounds[1::2], bounds[2::2], strict=True))


def _sequences(documents: Numbers, writer: DocumentWriter) -> tuple[Numbers, Numbers]:
    """Return the documents in the order of their sequences, and how many each has."""
    rows = writer.form.rows
    if writer.form.layout != "packed":
        return documents, np.full(len(documents) // rows, rows)
    groups = pack((writer.lengths(documents) - 1).tolist(), writer.form.length)
    return documents[np.concatenate(groups)], np.array([len(group) for group in groups])


class DocumentWriter:
    """Writes the documents of a format into a folder; ``state``: of an earlier writer there, which it continues."""

    def __init__(self, folder: Path, form: Format, state: dict[str, Any] | None = None) -> None:
        folder.mkdir(exist_ok=True)
        state = state or {"crc32": 0, "tokens": 0, "documents": 0, "counts": [0] * (form.vocabulary or 256)}
        self.folder, self.form = folder, form
        self.dtype = "uint8" if form.vocabulary is None else "uint16" if form.vocabulary <= 2**16 else "uint32"
        self.crc32, self.tokens, self.documents = state["crc32"], state["tokens"], state["documents"]
        self._counts = np.array(state["counts"], dtype=np.int64)  # of each token among the targets
        name, size = "records.bin" if form.vocabulary is None else "tokens.bin", np.dtype(self.dtype).itemsize
        self._out = _grown(folder / name, self.tokens * size)
        self._places = _grown(folder / "documents.bin", self.documents * 32)  # int64: source, file, line, end
        self._masks = _grown(folder / "counted.bin", self.tokens) if form.masked else None

    def state(self) -> dict[str, Any]:
        """Return the state, when everything before it is on disk."""
        for stream in filter(None, (self._out, self._places, self._masks)):
            stream.flush()
            os.fsync(stream.fileno())
        state = {"crc32": self.crc32, "tokens": self.tokens, "documents": self.documents}
        return state | {"counts": self._counts.tolist()}

    def lengths(self, documents: Numbers) -> Numbers:
        """Return the number of tokens of some documents, int64 [documents], once they are complete."""
        ends = np.load(self.folder / "documents.npy", mmap_mode="r")[:, 3]
        return np.asarray(ends[documents] - np.where(documents > 0, ends[documents - 1], 0))

    def records(self, first: int, last: int) -> Numbers:
        """Return for each document of a range the number of its record, from 0: those of one have one origin."""
        places = np.load(self.folder / "documents.npy", mmap_mode="r")
        begins = np.ones(last - first, dtype=np.bool_)
        begins[1:] = False
        for column in range(3):
            begins[1:] |= places[first + 1 : last, column] != places[first : last - 1, column]
        return np.cumsum(begins) - 1

    def entropy(self) -> float:
        """Return the entropy of the targets, in nats."""
        share = self._counts[self._counts > 0] / max(1, self._counts.sum())
        return float(-(share * np.log(share)).sum())

    def add(self, pairs: list[tuple[Document, Origin]]) -> None:
        """Write documents, or pieces of them, together, and the origin of each."""
        if not pairs:
            return
        ids = targets = np.concatenate([document.ids for document, _ in pairs])
        ends = np.cumsum([len(document.ids) for document, _ in pairs]).tolist()
        tokens = ids.astype(self.dtype)
        parts = [tokens]
        self._out.write(tokens.data)
        if self._masks is not None:
            counted = np.concatenate([document.counted for document, _ in pairs])
            self._masks.write(counted.data)
            spans = pairwise((0, *ends))
            parts = [values[first:last] for first, last in spans for values in (tokens, counted)]
            targets = ids[counted]
        for part in parts:
            self.crc32 = zlib.crc32(part.data, self.crc32)
        self._counts += np.bincount(targets, minlength=len(self._counts))
        places = [
            (*origin, self.tokens + end)
            for (document, origin), end in zip(pairs, ends, strict=True)
            if not document.more
        ]
        self._places.write(np.array(places, dtype=np.int64).tobytes())
        self.documents += len(places)
        self.tokens += len(ids)

    def read(self) -> Iterator[tuple[Document, Origin]]:
        """Complete the files; yield what was given to ``add``, where all tokens are targets."""
        self.close()
        tokens: Any = np.memmap(self._out.name, self.dtype, "r") if self.documents else None
        first = 0
        for place in np.load(self.folder / "documents.npy", mmap_mode="r"):
            source, file, line, end = place.tolist()
            for begin in range(first, end, COPIED_TOGETHER):
                last = min(end, begin + COPIED_TOGETHER)
                yield all_targets(tokens[begin:last], last < end), (source, file, line)
            first = end

    def close(self) -> None:
        """Complete the files."""
        for stream in filter(None, (self._out, self._places, self._masks)):
            stream.close()
        places = np.memmap(self._places.name, np.int64, "r") if self.documents else np.empty(0, np.int64)
        np.save(self.folder / "documents.npy", places.reshape(-1, 4))


def _grown(file: Path, size: int) -> IO[bytes]:
    """Open a file to append to its first ``size`` bytes."""
    file.touch()
    stream = file.open("r+b")
    stream.truncate(size)
    stream.seek(size)
    return stream


class _Progress:
    """Shows how much is read: on a terminal in one line that changes, else in a line from time to time."""

    def __init__(self, sources: list[DataSource]) -> None:
        sizes = [source.size() or 0 for source in sources]
        self._read, self._total = [source.read for source in sources], sum(sizes) if all(sizes) else None
        for count in self._read:  # of what was read before, to train a tokenizer
            count[0] = 0
        self._live, self._next = sys.stdout.isatty(), 0.0
        self._begin: tuple[float, int, int] | None = None  # time, bytes and tokens of the first call

    def show(self, tokens: int) -> None:
        now, done = time.monotonic(), sum(read[0] for read in self._read)
        if self._begin is None:  # what an earlier start has written is only read
            self._begin, self._next = (now, done, tokens), now + 1
        if now < self._next:
            return
        self._next = now + (1.0 if self._live else SHOW_EVERY)
        seconds, read, made = (new - old for new, old in zip((now, done, tokens), self._begin, strict=True))
        line = f"{tokens:,} tokens, {made / seconds:,.0f} a second"
        if self._total and read:
            left = seconds * (self._total - done) / read
            line = f"{done / self._total:.0%} of {self._total / 1e6:.0f} MB, {read / seconds / 1e6:.1f} MB/s"
            line = f"{line}, {left:.0f} s left"
        print(f"\r\x1b[K{line}" if self._live else line, end="" if self._live else "\n", flush=True)

    def close(self) -> None:
        if self._live:
            print("\r\x1b[K", end="", flush=True)
