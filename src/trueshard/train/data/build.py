"""From sources to a store on disk: every record read once, in order.

- What is held out is drawn by a fixed seed, whole records at a time, so it is the same whatever else a run changes.
  Of text that is joined, the drawn documents come last, and the end of all is held out: the part asked for exactly,
  also of a single long document.
- A conversation that is longer than a sequence is cut at its end; how many are is said once.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from trueshard.errors import UserError
from trueshard.train.data.formats import Encoder, Format
from trueshard.train.data.order import sequence_indices
from trueshard.train.data.packing import pack
from trueshard.train.data.records import Located, Record
from trueshard.train.data.samples import Document
from trueshard.train.data.sources import Source
from trueshard.train.data.store import Summary, Writer

AT_ONCE = 256
"""Records that are made into tokens together."""
HELD_OUT_SEED = 20_000
Item = TypeVar("Item")
Ranges = list[dict[str, tuple[int, int]]]


class Cuts:
    """How many documents were longer than a sequence."""

    def __init__(self) -> None:
        self.records = self.cut = self.left_out = 0

    def fit(self, documents: tuple[Document, ...], length: int) -> tuple[Document, ...]:
        """The documents of a record, each as much of it as a sequence takes; none if one has no target left."""
        self.records += 1
        short = [document.cut(length) for document in documents]
        kept = tuple(document for document in short if document is not None)
        if len(kept) < len(documents):
            self.left_out += 1
            return ()
        self.cut += any(len(document.ids) > length + 1 for document in documents)
        return kept

    def say(self, length: int) -> None:
        """One line about them, if there are any."""
        if self.cut or self.left_out:
            left = f", {self.left_out} left out as no answer is within that" if self.left_out else ""
            print(f"{self.cut} of {self.records} records cut at train.sequence_length = {length}{left}", flush=True)


def build(
    sources: list[Source],
    form: Format,
    folder: Path,
    *,
    vocabulary: int | None,
    length: int,
    fraction: float,
    fingerprint: str,
    identity: dict[str, Any],
) -> Summary:
    """Read all records into `folder`.

    `vocabulary`: how many ids there are; None: documents are bytes. `length`: inputs of a sequence. `fraction`: what is
    held out of each source. Raises `UserError` for a record that cannot be read, or a source without any.
    """
    writer, cuts = Writer(folder, vocabulary), Cuts()
    encoder = form.encoder(folder)
    ranges: Ranges = []
    members: list[list[int]] = []
    for number, source in enumerate(sources):
        first_token, first_document = writer.tokens, writer.documents
        sizes = _read(source, number, form, encoder, writer, cuts, length=length, fraction=fraction)
        if writer.documents == first_document:
            raise UserError(f"{source.key}: {source.name} holds no record with anything to learn; give it some")
        if form.joined:
            middle = writer.tokens - round(fraction * (writer.tokens - first_token))
            ranges.append({"train": (first_token, middle), "evaluation": (middle, writer.tokens)})
        else:
            train, held = _arrange(writer, first_document, sizes, form.packed, length, fraction)
            begin, middle, end = np.cumsum([len(members), len(train), len(held)]).tolist()
            ranges.append({"train": (begin, middle), "evaluation": (middle, end)})
            members += train + held
    writer.close()
    if not form.joined:
        writer.sequences(members)
    cuts.say(length)
    return Summary(
        tokens=None if vocabulary is None else writer.tokens,
        documents=writer.documents,
        unigram_entropy=writer.entropy(),
        crc32=writer.crc32,
        fingerprint=fingerprint,
        identity=identity,
        dtype=writer.dtype,
        files=[list(source.files) for source in sources],
        ranges=ranges,
    )


def _read(
    source: Source,
    number: int,
    form: Format,
    encoder: Encoder,
    writer: Writer,
    cuts: Cuts,
    *,
    length: int,
    fraction: float,
) -> list[int]:
    """Write the documents of a source; returns how many each record has."""
    sizes = []
    with _Later(writer.folder) as later:
        for group in batched(source.records(), AT_ONCE):
            located = [source.located(record) for record in group]
            for record, found in zip(group, encoder.encode(located), strict=True):
                documents = cuts.fit(found, length) if form.cut else found
                if fraction and form.joined and _drawn(record, fraction):
                    later.put(documents, record)
                    continue
                for document in documents:
                    writer.add(document, number, record.file, record.line)
                sizes += [len(documents)] if documents else []
        for document, file, line in later.all():
            writer.add(document, number, file, line)
    return sizes


def _arrange(
    writer: Writer, first: int, sizes: list[int], packed: bool, length: int, fraction: float
) -> tuple[list[list[int]], list[list[int]]]:
    """Which documents make a sequence, of what is trained on and of what is held out.

    `first`: the first document of the source. `sizes`: how many documents each of its records has.
    """
    begins = np.cumsum([first, *sizes]).tolist()
    records = [list(range(begin, begin + size)) for begin, size in zip(begins, sizes, strict=False)]
    count = round(fraction * len(records))
    held = set(sequence_indices(HELD_OUT_SEED, 0, count, len(records)).tolist()) if count else set()
    parts = [[record for number, record in enumerate(records) if (number in held) is out] for out in (False, True)]
    if packed:
        ends = np.array(writer.places[3::4], dtype=np.int64)
        inputs = (np.diff(ends, prepend=0) - 1).tolist()
        parts = [
            [[part[each][0] for each in together] for together in pack([inputs[record[0]] for record in part], length)]
            for part in parts
        ]
    return parts[0], parts[1]


def _drawn(record: Record, fraction: float) -> bool:
    """Whether a record is among what is held out: by its place alone."""
    chance = sequence_indices(HELD_OUT_SEED + record.file, record.line, 1, 2**20)[0]
    return bool(chance < fraction * 2**20)


class _Later:
    """Documents put aside on disk, in a file of `folder` that is gone after."""

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (closed by __exit__)

    def __enter__(self) -> _Later:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def put(self, documents: tuple[Document, ...], record: Record) -> None:
        """Put the documents of a record aside."""
        for document in documents:
            head = {"count": len(document.ids), "file": record.file, "line": record.line}
            self._file.write(json.dumps(head).encode() + b"\n" + document.ids.astype(np.int64).tobytes())

    def all(self) -> Iterator[tuple[Document, int, int]]:
        """What was put aside, in order."""
        self._file.seek(0)
        while line := self._file.readline():
            head = json.loads(line)
            ids = np.frombuffer(self._file.read(8 * head["count"]), dtype=np.int64)
            yield Document(ids, np.ones(len(ids), dtype=np.bool_)), head["file"], head["line"]


def batched(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Consecutive items, `size` at a time."""
    remaining = iter(items)
    while group := list(islice(remaining, size)):
        yield group


def first_texts(sources: list[Source], texts: Callable[[Located], Iterator[str]]) -> Iterator[str]:
    """What the records say, in order; `texts`: from a record with its place."""
    for source in sources:
        for record in source.records():
            yield from texts(source.located(record))
