"""Records: what a file holds, one at a time, each with the place it comes from.

- A text file is one record with its whole text. JSONL is one a line, CSV one a row under a head line, JSON an array of
  them (or an object with one array), Parquet one a row.
- Files are read as they are, without a copy in a cache, so that an error can name the line.
- A line that is no record is an error, not skipped.
"""

from __future__ import annotations

import csv
import gzip
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from trueshard import names
from trueshard.errors import UserError, one_line

Fields = dict[str, Any]


class Record(NamedTuple):
    """What stands at one place of the data."""

    fields: Fields
    file: int
    """Which of its source's files."""
    line: int
    """Line, row or entry of the file, from 1; 0: the whole file."""


class Located(NamedTuple):
    """What a record says, and where it stands."""

    fields: Fields
    where: str
    """In words, for errors."""
    folder: Path
    """What paths in it are relative to."""


def place(file: str, line: int) -> str:
    """A place in words: "chat.jsonl, line 17"."""
    word = {".parquet": "row", ".json": "entry"}.get(kind(Path(file)), "line") if Path(file).suffix else "row"
    return f"{file}, {word} {line}" if line else file


def kind(file: Path) -> str:
    """The suffix that decides how a file is read: ".jsonl" for `a.jsonl` and `a.jsonl.gz`."""
    return Path(file.stem).suffix.lower() if file.suffix == ".gz" else file.suffix.lower()


def read(file: Path, text_field: str) -> Iterator[tuple[Fields, int]]:
    """The records of a file and their lines, in order.

    `text_field`: the key under which the text of a file that is no file of records stands.
    Raises `UserError` where something cannot be read.
    """
    try:
        yield from READERS.get(kind(file), _text)(file, text_field)
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file}: not UTF-8 at byte {error.start}; convert it, or leave it out with data.include"
        ) from None
    except EOFError:
        raise UserError(f"{file}: ends in the middle; fetch it again") from None
    except OSError as error:
        reason = error.strerror or one_line(error)
        raise UserError(f"{file}: cannot be read ({reason}); correct its permissions, or fetch it again") from None


def string(fields: Fields, key: str, where: str, setting: str = "") -> str:
    """The string under a key. Raises `UserError` with what is there instead."""
    value = fields.get(key)
    if not isinstance(value, str):
        found = f"{type(value).__name__} under it" if key in fields else f"keys {sorted(fields)}"
        remedy = f"correct it, or set {setting}" if setting else "correct it"
        raise UserError(
            f"{where}: wanted an object with a string under {key!r}, found {found}; {remedy}."
            f"{'' if key in fields else names.nearest(key, fields)}".removesuffix(".")
        )
    return value


def _text(file: Path, text_field: str) -> Iterator[tuple[Fields, int]]:
    with _open(file) as stream:
        yield {text_field: stream.read().decode("utf-8")}, 0


def _lines(file: Path, _: str) -> Iterator[tuple[Fields, int]]:
    with _open(file) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                detail = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
                raise UserError(
                    f"{file}, line {number}: not valid JSON ({' '.join(detail.split())}); correct that line"
                ) from None
            yield _object(entry, place(str(file), number)), number


def _array(file: Path, _: str) -> Iterator[tuple[Fields, int]]:
    with _open(file) as stream:
        try:
            entries = json.load(stream)
        except json.JSONDecodeError as error:
            raise UserError(
                f"{file}, line {error.lineno}: not valid JSON ({one_line(error)}); correct that line"
            ) from None
    if isinstance(entries, dict) and len(arrays := [value for value in entries.values() if _is_array(value)]) == 1:
        entries = arrays[0]
    if not isinstance(entries, list):
        raise UserError(
            f"{file}: wanted an array of objects, found {_kind(entries)}; write it so, or as JSONL, one object a line"
        )
    for number, entry in enumerate(entries, start=1):
        yield _object(entry, place(str(file), number)), number


def _rows(file: Path, _: str) -> Iterator[tuple[Fields, int]]:
    csv.field_size_limit(sys.maxsize)
    with _open(file) as stream:
        # A mark of byte order is written before the head by some spreadsheets.
        lines = (line.decode("utf-8").removeprefix("\ufeff") for line in stream)
        rows = csv.reader(lines, strict=True)
        head = next(rows, [])
        try:
            for row in rows:
                if not row:
                    continue
                if len(row) != len(head):
                    raise UserError(
                        f"{file}, line {rows.line_num}: {len(row)} fields under a head of {len(head)}; correct it"
                    )
                yield dict(zip(head, row, strict=True)), rows.line_num
        except csv.Error as error:
            raise UserError(f"{file}, line {rows.line_num}: not valid CSV ({error}); correct that line") from None


def _table(file: Path, _: str) -> Iterator[tuple[Fields, int]]:
    from pyarrow import ArrowInvalid
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(file) as table:
            number = 0
            for batch in table.iter_batches(batch_size=256):
                for row in batch.to_pylist():
                    number += 1
                    yield row, number
    except ArrowInvalid as error:
        detail = one_line(error, 200)
        raise UserError(f"{file}: not a Parquet file ({detail}); fetch it again") from None


Reader = Callable[[Path, str], Iterator[tuple[Fields, int]]]
READERS: dict[str, Reader] = {".jsonl": _lines, ".json": _array, ".csv": _rows, ".parquet": _table}
"""How files of records are read; any other is text."""


def _open(file: Path) -> IO[bytes]:
    return gzip.open(file) if file.suffix == ".gz" else file.open("rb")  # type: ignore[return-value]


def _object(entry: Any, where: str) -> Fields:
    if not isinstance(entry, dict):
        raise UserError(f"{where}: wanted an object, found {_kind(entry)}; correct it")
    return entry


def _is_array(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, dict) for entry in value)


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"
