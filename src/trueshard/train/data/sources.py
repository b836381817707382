"""Data sources and their records, in an order that does not depend on the machine.

- A text file is one record, read in chunks if it is long. JSONL has one a line, CSV one a row below a header, JSON an
  array of them (or an object with one array), Parquet one a row, WebDataset one for the members of a tar file whose
  names differ in their extension. Files are read where they lie, so that an error names the line.
- Reading begins at any record's `Place`: JSONL, WebDataset and text are sought by byte, Parquet by its groups of rows.
- A folder is read in the sorted order of relative paths. Nothing is left out or skipped silently.
- "stdlib" is the source code of the running interpreter's standard library, without tests and installed packages.
- A data set on the hub is pinned to its revision at the time it is found.
"""

from __future__ import annotations

import codecs
import contextlib
import copy
import csv
import fnmatch
import functools
import hashlib
import io
import json
import os
import re
import sys
import sysconfig
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

from trueshard.errors import UserError, cut_line, explained, one_line
from trueshard.text import load_json
from trueshard.train.data.addresses import (
    CHUNK,
    base_name,
    has_pattern,
    is_address,
    kind,
    listed,
    opened,
    size_of,
    state_of,
)
from trueshard.train.data.config import TEXT_FILES, DataSection
from trueshard.train.models.config import is_hub_name
from trueshard.train.own_code import Wrong, blamed, own

Fields = dict[str, Any]

NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
TABLE = 256
"""Rows of a data set that are read together."""
SPLITS = {"train": "train", "training": "train", "test": "test", "testing": "test"} | dict.fromkeys(
    ("validation", "valid", "val", "dev", "eval", "evaluation"), "validation"
)
"""Words in file names → the split that they mean."""


class Place(NamedTuple):
    """The position of a record, or of a piece of its text, from which reading begins. JSON values."""

    file: int = 0  # index into the files of its source
    line: int = 1  # line, row or entry of the file
    offset: Any = 0  # byte of the file where that begins, if it is known; of a stream from the hub, the stream's state
    begin: int = 0  # of its text, what is before: bytes of a text file, characters of a record's
    skip: int = 0  # of what is made from there on: tokens, or samples, that are before this place


START = Place()


class Record(NamedTuple):
    """One entry of a source."""

    fields: Fields
    file: int  # index into the files of its source
    line: int  # line, row or entry of the file, from 1; 0: the whole file
    where: str  # file and line, for error messages
    folder: Path  # base of relative paths in the fields
    offset: Any = 0  # as in ``Place``
    begin: int = 0  # as in ``Place``
    more: bool = False  # a piece of a text that goes on in the next record

    def of(self, fields: Fields, begin: int = 0, more: bool = False) -> Record:
        """Return a record of the same place with other fields."""
        return Record(fields, *self[1:-2], begin, more)

    def place(self, skip: int = 0) -> Place:
        """Return where reading begins to yield this record first."""
        return Place(self.file, self.line, self.offset, self.begin, skip)


@dataclass(frozen=True)
class DataSource:
    """Files of records."""

    key: str  # the setting that names it: "data.path"
    name: str  # the value of that setting
    weight: float
    files: tuple[str, ...]  # paths; for a data set on the hub, its name
    text_field: str = "text"
    transform: str | None = field(default=None, kw_only=True)  # `data.transform`
    read: list[int] = field(default_factory=lambda: [0], compare=False, kw_only=True)  # bytes, by ``records``

    def records(self, start: Place = START) -> Iterator[Record]:
        """Iterate over all records from a place on, in order. Raises `UserError` for damaged input."""
        return self._stored(start) if self.transform is None else _transformed(self._stored(start), self.transform)

    def _stored(self, start: Place) -> Iterator[Record]:
        self.read[0] += sum(size_of(file) or 0 for file in self.files[: start.file] if not is_address(file))
        for number, file in enumerate(self.files[start.file :], start=start.file):
            place, folder = start if number == start.file else Place(number), Path(file).parent
            for fields, line, offset in _read(file, self.text_field, self.read, place):
                begin = place.begin if line == place.line or not line else 0
                yield Record(fields, number, line, where(file, line), folder, offset, begin)

    def size(self) -> int | None:
        """Return the bytes of all files, or None if unknown."""
        sizes = [size_of(file) for file in self.files]
        return None if None in sizes else sum(size or 0 for size in sizes)

    def fingerprint(self) -> str:
        """Hash names, sizes and modification times: equal means that nothing has to be read again."""
        return hash_of(list(map(state_of, (*self.files, *self._code()))))

    def _code(self) -> tuple[str, ...]:
        return () if self.transform is None else (str(Path(self.transform.rpartition(":")[0]).expanduser()),)


@dataclass(frozen=True)
class HubSource(DataSource):
    """A data set on the hub, or a folder that the `datasets` library reads."""

    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    streaming: bool = False
    saved: bool = False  # a folder written by `Dataset.save_to_disk`, or one split of a saved `DatasetDict`

    def _stored(self, start: Place) -> Iterator[Record]:
        import datasets

        (file,), options = self.files, {"split": self.split, "revision": self.revision, "streaming": self.streaming}
        remedy = "correct data.path, data.subset or data.split, or see that there is a network"
        with explained(f"{self.key}: {self.name!r} cannot be read", remedy, (OSError, ValueError, RuntimeError)):
            load: Any = datasets.load_dataset
            data = datasets.load_from_disk(file) if self.saved else load(self.name, self.subset, **options)
            data = data.with_format("arrow")  # plain values: images stay the stored bytes
            row, state = (start.offset or (1, None)) if self.streaming else (start.line, None)
            if state is not None:
                data.load_state_dict(copy.deepcopy(state))
            elif row > 1:
                data = data.skip(row - 1)
            for table in data.iter(batch_size=TABLE):
                for line, fields in enumerate(table.to_pylist(), start=row):
                    if line >= start.line:
                        begin = start.begin if line == start.line else 0
                        yield Record(fields, 0, line, where(file, line), Path(file).parent, (row, state), begin)
                row += len(table)
                state = copy.deepcopy(data.state_dict()) if self.streaming else None

    def size(self) -> int | None:
        return None

    def fingerprint(self) -> str:
        return hash_of([self.name, self.subset, self.split, self.revision, *map(state_of, self._code())])


def find(section: DataSection, path: str | None = None, key: str = "data.path") -> list[DataSource]:
    """Return the sources of `[data]`, or that of ``path``, the value of ``key``; `UserError` if one is empty."""
    named = [(one.path, f"data.sources[{number}].path", one.weight) for number, one in enumerate(section.sources)]
    if path or section.path:
        named = [(path or section.path or "", key, 1.0)]
    return [replace(_find(section, *source), transform=section.transform) for source in named]


def _transformed(records: Iterator[Record], words: str) -> Iterator[Record]:
    """Yield records as `data.transform` makes them. Raises `UserError` with the record's place."""
    function = own("data.transform", words, "record")
    for record in records:
        with blamed("data.transform", words, f" for {record.where}"):
            if not record.line:
                raise Wrong("it takes records, and this is a file of text (JSONL has a record a line)")
            if (changed := function(record.fields)) is None:
                continue
            if not isinstance(changed, dict):
                raise Wrong(f"it returned a {type(changed).__name__}, neither a dict nor None")
        yield record.of(changed, record.begin, record.more)


def _find(section: DataSection, name: str, key: str, weight: float) -> DataSource:
    if name == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        files = tuple(file for file in _walk(root, NOT_LIBRARY.__contains__).values() if file.endswith(".py"))
        if not files:
            raise UserError(f'{key}: "stdlib": this Python carries no source under {root}; give a folder of text')
        return DataSource(key, name, weight, files, section.field)
    if is_address(name) or (has_pattern(name) and not Path(name).expanduser().exists()):
        return DataSource(key, name, weight, _select(section, listed(name, key), name, key), section.field)
    path = Path(name).expanduser()
    saved = path / section.split if (path / "dataset_dict.json").is_file() else path
    if (saved / "dataset_info.json").is_file() and (saved / "state.json").is_file():
        revision = hash_of([state_of(str(file)) for file in sorted(saved.iterdir()) if file.is_file()])
        return HubSource(key, name, weight, (str(saved),), section.field, revision=revision, saved=True)
    if path.is_dir():
        return DataSource(key, name, weight, _select(section, _walk(path), str(path), key), section.field)
    if is_hub_name(name) and kind(name) not in READERS:
        hub = (section.subset, section.split, _revision(name, key), section.streaming)
        return HubSource(key, name, weight, (name,), section.field, *hub)
    if not path.exists():
        raise UserError(
            f"{key}: {path} does not exist; give a folder or a file of text, JSONL, JSON, CSV, Parquet or WebDataset, "
            'owner/name of a data set on the hub, or "stdlib"'
        )
    if not path.stat().st_size:
        raise UserError(f"{key}: {path} is empty; give one that is not")
    return DataSource(key, name, weight, _select(section, {path.name: str(path)}, str(path), key), section.field)


def _select(section: DataSection, names: dict[str, str], place: str, key: str) -> tuple[str, ...]:
    """Return the files that `data.include` or, without it, their kinds select; ``names``: of each, below ``place``.

    A single file, and what a pattern names, is chosen already.
    """
    explicit = "include" in section.model_fields_set
    if [base_name(file) for file in names.values()] == [base_name(place)] or has_pattern(place):
        groups, patterns = [list(names)], [place]
    elif explicit:
        groups, patterns = [[name for name in names if _matches(name, section.include)]], section.include
    else:
        patterns = TEXT_FILES if section.format == "text" else [f"*{suffix}" for suffix in READERS]
        lines, arrays = ([name for name in names if kind(name) in suffixes] for suffixes in (LINES, ARRAYS))
        text = [name for name in names if _matches(name, TEXT_FILES)] if section.format == "text" else []
        # Code often lies beside .json and .csv files that are no data, so next to text these do not count.
        groups = [group for group in ([text, lines] if text else [lines, arrays]) if group] or [[]]
    if len(groups) > 1:
        counted = " and ".join(f"{len(group)} such as {group[0]}" for group in groups)
        raise UserError(f"{key}: {place} holds files of different kinds ({counted}); choose with data.include")
    (chosen,) = groups
    files = tuple(names[name] for name in chosen)
    if not any(size_of(file) != 0 for file in files):
        state = "holds only empty files that match" if files else "holds no file that matches"
        shown = ", ".join(patterns[:6]) + (", …" if len(patterns) > 6 else "")
        raise UserError(f"{key}: {place} {state} data.include ({shown}); add files, or change data.include")
    if section.format != "text" and (other := [file for file in files if kind(file) not in READERS]):
        raise UserError(
            f'{key}: {other[0]} is no file of records, which data.format = "{section.format}" reads; '
            f"give one of {', '.join(READERS)}"
        )
    if not explicit and kind(files[0]) in READERS:
        _check_one_split(key, place, chosen)
    return files


def _check_one_split(key: str, place: str, names: Sequence[str]) -> None:
    """Raise `UserError` if file names tell of several splits: a run must not train on its test data."""
    splits: dict[str, str] = {}
    for name in names:
        for word in re.split(r"[^a-z]+", name.lower()):
            if word in SPLITS:
                splits.setdefault(SPLITS[word], name)
    if len(splits) > 1:
        named = ", ".join(f"{split} ({name})" for split, name in splits.items())
        raise UserError(
            f"{key}: {place} holds more than one split: {named}; choose with data.include, or name its folder"
        )


def _walk(root: Path, without: Callable[[str], bool] = lambda name: name.startswith(".")) -> dict[str, str]:
    """Return the files in a folder and its subfolders, in order: name below it → path."""
    paths: dict[str, str] = {}
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if not without(name)]
        kept = (Path(folder, name) for name in files if not without(name))
        paths |= {file.relative_to(root).as_posix(): str(file) for file in kept}
    return dict(sorted(paths.items()))


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(PurePosixPath(name).name, pattern) for pattern in patterns)


def _revision(name: str, key: str) -> str | None:
    """Return the current revision on the hub, or None in offline mode, where the cached one is read."""
    from huggingface_hub import HfApi
    from huggingface_hub.constants import is_offline_mode

    if is_offline_mode():
        return None
    remedy = "correct it, or see that there is a network (HF_HUB_OFFLINE=1 reads what was fetched before)"
    with explained(f"{key}: {name!r} is no folder or file here, and not to be had from the hub", remedy):
        return HfApi().dataset_info(name, timeout=20).sha


def hash_of(value: Any) -> str:
    """Return the SHA-256 of JSON values."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def where(file: str, line: int) -> str:
    """Describe a place: "chat.jsonl, line 17"."""
    return f"{file}, {_entry(file)} {line}" if line else file


@functools.cache
def _entry(file: str) -> str:
    words = {".parquet": "row", ".json": "entry", ".tar": "sample"}
    return words.get(kind(file), "line") if base_name(file).suffix else "row"


class TextFile:
    """The text of a file in chunks, as often as it is iterated. Raises `UserError` for damage."""

    def __init__(self, file: str, read: list[int], begin: int = 0) -> None:
        self._file, self._read, self._begin = file, read, begin  # begin: bytes that are left out

    def __iter__(self) -> Iterator[str]:
        # Bytes of a character that is not complete; those before it; the last ones.
        rest, done, data = b"", self._begin, b" "
        with _damage_named(self._file), opened(self._file, self._read, self._begin) as stream:
            while data:
                data = stream.read(CHUNK)
                try:
                    text, used = codecs.utf_8_decode(rest + data, "strict", not data)
                except UnicodeDecodeError as error:
                    error.start += done
                    raise
                rest, done = (rest + data)[used:], done + used
                yield text


Entries = Iterator[tuple[Fields, int, int]]
"""Records: fields, line (or row, or entry), and the byte where that begins (0: unknown)."""


def _read(file: str, text_field: str, read: list[int], place: Place) -> Entries:
    """Iterate over the records of a file, with the text of a text file under ``text_field``. Name damage by line."""
    with _damage_named(file):
        if reader := READERS.get(kind(file)):
            with opened(file, read, place.offset) as stream:
                yield from reader(file, stream, place)
        else:
            size, text = size_of(file), TextFile(file, read, place.begin)
            is_long = size is None or size > CHUNK or base_name(file).suffix == ".gz"
            yield {text_field: text if is_long else "".join(text)}, 0, 0


@contextlib.contextmanager
def _damage_named(file: str) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file}: not UTF-8 at byte {error.start}; convert it, or leave it out with data.include"
        ) from None
    except EOFError:
        raise UserError(f"{file}: ends in the middle; fetch it again") from None
    except Exception as error:  # at an address, of any library
        if isinstance(error, UserError) or not (is_address(file) or isinstance(error, OSError | zlib.error)):
            raise
        reason = getattr(error, "strerror", None) or one_line(error)
        raise UserError(f"{file}: cannot be read ({reason}); correct its permissions, or fetch it again") from None


def _lines(file: str, stream: IO[bytes], place: Place) -> Entries:
    offset = place.offset
    for number, line in enumerate(stream, start=place.line):
        if text := line.strip():
            yield _object(_json(text, file, number), file, number), number, offset
        offset += len(line)


def _array(file: str, stream: IO[bytes], place: Place) -> Entries:
    entries = _json(stream.read(), file)
    if isinstance(entries, dict):
        lists = [value for value in entries.values() if isinstance(value, list)]
        arrays = [values for values in lists if all(isinstance(entry, dict) for entry in values)]
        entries = arrays[0] if len(arrays) == 1 else entries
    if not isinstance(entries, list):
        raise UserError(
            f"{file}: wanted an array of objects, found a {type(entries).__name__}; write it so, or as JSONL, one "
            "object a line"
        )
    for number, entry in enumerate(islice(entries, place.line - 1, None), start=place.line):
        yield _object(entry, file, number), number, 0


def _json(text: bytes, file: str, first_line: int = 1) -> Any:
    try:
        value = load_json(text)
        if b"\\ud" in text or b"\\uD" in text:  # half of a surrogate pair is no character, and no tokenizer takes it
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except ValueError as error:  # also for what is not UTF-8
        line = first_line + getattr(error, "lineno", 1) - 1
        raise UserError(f"{file}, line {line}: not valid JSON ({one_line(error)}); correct that line") from None


def _rows(file: str, stream: IO[bytes], place: Place) -> Entries:
    csv.field_size_limit(sys.maxsize)
    # Some spreadsheets write a byte order mark before the header.
    with io.TextIOWrapper(stream, "utf-8-sig", newline="") as text:
        rows = csv.reader(text, strict=True)
        head = next(rows, [])
        try:
            for row in rows:
                if not row or rows.line_num < place.line:
                    continue
                if len(row) != len(head):
                    problem = f"{len(row)} fields under a head of {len(head)}"
                    raise UserError(f"{file}, line {rows.line_num}: {problem}; correct it")
                yield dict(zip(head, row, strict=True)), rows.line_num, 0
        except csv.Error as error:
            raise UserError(f"{file}, line {rows.line_num}: not valid CSV ({error}); correct that line") from None


def _table(file: str, stream: IO[bytes], place: Place) -> Entries:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    refused = explained(f"{file}: not a Parquet file", "fetch it again", ArrowException, cut_line)
    # Buffered: otherwise a group of rows is read whole, which may be a file.
    with refused, ParquetFile(stream, buffer_size=CHUNK) as table:
        groups, first = range(table.num_row_groups), 1
        while groups and first + (size := table.metadata.row_group(groups[0]).num_rows) <= place.line:
            groups, first = groups[1:], first + size
        batches = table.iter_batches(batch_size=64, row_groups=list(groups))
        for number, row in enumerate((row for batch in batches for row in batch.to_pylist()), start=first):
            if number >= place.line:
                yield row, number, 0


def _members(file: str, stream: IO[bytes], place: Place) -> Entries:
    """Yield the samples of a WebDataset: the fields of their .json, and members by extension; pictures as `images`."""
    refused = explained(f"{file}: not a tar file", "fetch it again", tarfile.TarError, cut_line)
    with refused, tarfile.open(fileobj=stream, mode="r|", bufsize=2**16) as archive:
        key, members, number, offset = "", dict[str, bytes](), place.line, 0
        while (member := archive.next()) is not None:
            archive.members.clear()  # type: ignore[attr-defined]  # else it keeps all
            if not member.isfile():
                continue
            folder, _, name = member.name.rpartition("/")
            stem, _, extension = name.partition(".")
            if not stem or not extension:
                raise UserError(f"{file}: {member.name} has no extension, which names a field; leave it out")
            if members and key != f"{folder}/{stem}":
                yield _sample(members, file, number), number, offset
                members, number = {}, number + 1
            if not members:
                key, offset = f"{folder}/{stem}", place.offset + member.offset
            content = archive.extractfile(member)
            assert content is not None
            members[extension.lower()] = content.read()
        if members:
            yield _sample(members, file, number), number, offset


def _sample(members: dict[str, bytes], file: str, number: int) -> Fields:
    fields, pictures = Fields(members), list[bytes]()
    for extension, data in members.items():
        match extension.rpartition(".")[2]:
            case "json":
                fields |= _object(_json(data, file, number), file, number)
            case "txt" | "text" | "md" | "html":
                problem = f"{where(file, number)}: its .{extension} is not UTF-8"
                with explained(problem, "convert it, or leave it out", UnicodeDecodeError, cut_line):
                    fields[extension] = data.decode()
            case "jpg" | "jpeg" | "png" | "webp" | "gif":
                pictures.append(data)
    return {"images": pictures, **fields} if pictures else fields


READERS: dict[str, Callable[[str, IO[bytes], Place], Entries]] = {
    ".jsonl": _lines,
    ".json": _array,
    ".csv": _rows,
    ".parquet": _table,
    ".tar": _members,
}
"""Readers of files of records; every other file is text."""
LINES, ARRAYS = (".jsonl", ".parquet", ".tar"), (".json", ".csv")


def _object(entry: Any, file: str, number: int) -> Fields:
    if not isinstance(entry, dict):
        raise UserError(f"{where(file, number)}: wanted an object, found a {type(entry).__name__}; correct it")
    return entry
