"""Data sources and their records, in an order that does not depend on the machine.

- A text file is one record, read in chunks if it is long. JSONL has one a line, CSV one a row below a header, JSON an
  array of them (or an object with one array), Parquet one a row. Files are read where they lie, so that an error names
  the line.
- A folder is read in the sorted order of relative paths. Nothing is left out or skipped silently.
- "stdlib" is the source code of the running interpreter's standard library, without tests and installed packages.
- A data set on the hub is pinned to its revision at the time it is found.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import fnmatch
import functools
import gzip
import hashlib
import io
import json
import os
import re
import sys
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from trueshard.errors import UserError, cut_line, explained, one_line
from trueshard.text import load_json
from trueshard.train.config import TEXT_FILES, DataSection
from trueshard.train.models.config import is_hub_name

Fields = dict[str, Any]

NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
CHUNK = 2**20
"""Bytes of a text file that are read together; a longer file is never held whole."""
SPLITS = {"train": "train", "training": "train", "test": "test", "testing": "test"} | dict.fromkeys(
    ("validation", "valid", "val", "dev", "eval", "evaluation"), "validation"
)
"""Words in file names → the split that they mean."""


class Record(NamedTuple):
    """One entry of a source."""

    fields: Fields
    file: int  # index into the files of its source
    line: int  # line, row or entry of the file, from 1; 0: the whole file
    where: str  # file and line, for error messages
    folder: Path  # base of relative paths in the fields
    more: bool = False  # a piece of a text that goes on in the next record


@dataclass(frozen=True)
class DataSource:
    """Files of records."""

    key: str  # the setting that names it: "data.path"
    name: str  # the value of that setting
    weight: float
    files: tuple[str, ...]  # paths; for a data set on the hub, its name
    text_field: str = "text"
    read: list[int] = field(default_factory=lambda: [0], compare=False, kw_only=True)  # bytes, by ``records``

    def records(self) -> Iterator[Record]:
        """Iterate over all records, in order. Raises `UserError` for damaged input."""
        for number, file in enumerate(self.files):
            path = Path(file)
            for fields, line in _read(path, self.text_field, self.read):
                yield Record(fields, number, line, place(file, line), path.parent)

    def size(self) -> int | None:
        """Return the bytes of all files, or None if unknown."""
        return sum(Path(file).stat().st_size for file in self.files)

    def fingerprint(self) -> str:
        """Hash names, sizes and modification times: equal means that nothing has to be read again."""
        return hash_of(states(map(Path, self.files)))


@dataclass(frozen=True)
class HubSource(DataSource):
    """A data set on the hub, or a folder that the `datasets` library reads."""

    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    streaming: bool = False
    saved: bool = False  # a folder written by `Dataset.save_to_disk`, or one split of a saved `DatasetDict`

    def records(self) -> Iterator[Record]:
        import datasets

        (file,), options = self.files, {"split": self.split, "revision": self.revision, "streaming": self.streaming}
        remedy = "correct data.path, data.subset or data.split, or see that there is a network"
        with explained(f"{self.key}: {self.name!r} cannot be read", remedy, (OSError, ValueError, RuntimeError)):
            load: Any = datasets.load_dataset
            data = datasets.load_from_disk(file) if self.saved else load(self.name, self.subset, **options)
            # As plain values: images stay the stored bytes.
            tables = data.with_format("arrow").iter(batch_size=256)
            for row, fields in enumerate((fields for table in tables for fields in table.to_pylist()), start=1):
                yield Record(fields, 0, row, place(file, row), Path(file).parent)

    def size(self) -> int | None:
        return None

    def fingerprint(self) -> str:
        return hash_of([self.name, self.subset, self.split, self.revision])


def find(section: DataSection, path: str | None = None) -> list[DataSource]:
    """Return the sources of `[data]`, or with ``path`` that of `evaluation.path`; `UserError` if one is empty."""
    if path or section.path:
        return [_find(section, path or section.path or "", "evaluation.path" if path else "data.path", 1.0)]
    named = [(source, f"data.sources[{number}].path") for number, source in enumerate(section.sources)]
    return [_find(section, source.path, key, source.weight) for source, key in named]


def _find(section: DataSection, name: str, key: str, weight: float) -> DataSource:
    if name == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        files = tuple(str(file) for file in _walk(root, NOT_LIBRARY.__contains__) if file.suffix == ".py")
        if not files:
            raise UserError(f'{key}: "stdlib": this Python carries no source under {root}; give a folder of text')
        return DataSource(key, name, weight, files, section.field)
    path = Path(name).expanduser()
    saved = path / section.split if (path / "dataset_dict.json").is_file() else path
    if (saved / "dataset_info.json").is_file() and (saved / "state.json").is_file():
        revision = hash_of(states(sorted(file for file in saved.iterdir() if file.is_file())))
        return HubSource(key, name, weight, (str(saved),), section.field, revision=revision, saved=True)
    if path.is_dir():
        return DataSource(key, name, weight, _folder(section, path, key), section.field)
    if is_hub_name(name) and kind(path) not in READERS:
        hub = (section.subset, section.split, _revision(name, key), section.streaming)
        return HubSource(key, name, weight, (name,), section.field, *hub)
    if not path.exists():
        raise UserError(
            f"{key}: {path} does not exist; give a folder or a file of text, JSONL, JSON, CSV or Parquet, "
            'owner/name of a data set on the hub, or "stdlib"'
        )
    if not path.stat().st_size:
        raise UserError(f"{key}: {path} is empty; give one that is not")
    if section.format != "text" and kind(path) not in READERS:
        raise UserError(
            f'{key}: {path} is no file of records, which data.format = "{section.format}" reads; '
            f"give one of {', '.join(READERS)}"
        )
    return DataSource(key, name, weight, (str(path),), section.field)


def _folder(section: DataSection, root: Path, key: str) -> tuple[str, ...]:
    """Return the files in a folder that `data.include` or, without it, their kinds select."""
    listed = _walk(root)
    explicit = "include" in section.model_fields_set
    if explicit:
        patterns: Sequence[str] = section.include
        groups = [[file for file in listed if _matches(file, patterns)]]
    else:
        patterns = TEXT_FILES if section.format == "text" else [f"*{suffix}" for suffix in READERS]
        lines, arrays = ([file for file in listed if kind(file) in suffixes] for suffixes in (LINES, ARRAYS))
        text = [file for file in listed if _matches(file, TEXT_FILES)] if section.format == "text" else []
        # Code often lies beside .json and .csv files that are no data, so next to text these do not count.
        groups = [group for group in ([text, lines] if text else [lines, arrays]) if group] or [[]]
    if len(groups) > 1:
        counted = " and ".join(f"{len(group)} such as {group[0].relative_to(root)}" for group in groups)
        raise UserError(f"{key}: {root} holds files of different kinds ({counted}); choose with data.include")
    (files,) = groups
    if not any(file.stat().st_size for file in files):
        state = "holds only empty files that match" if files else "holds no file that matches"
        shown = ", ".join(patterns[:6]) + (", …" if len(patterns) > 6 else "")
        raise UserError(f"{key}: {root} {state} data.include ({shown}); add files, or change data.include")
    if section.format != "text" and (other := [file for file in files if kind(file) not in READERS]):
        raise UserError(f"{key}: {other[0]} is no file of records ({', '.join(READERS)}); change data.include")
    if not explicit and kind(files[0]) in READERS:
        _check_one_split(key, root, files)
    return tuple(map(str, files))


def _check_one_split(key: str, root: Path, files: Sequence[Path]) -> None:
    """Raise `UserError` if file names tell of several splits: a run must not train on its test data."""
    splits: dict[str, Path] = {}
    for file in files:
        for word in re.split(r"[^a-z]+", file.relative_to(root).as_posix().lower()):
            if word in SPLITS:
                splits.setdefault(SPLITS[word], file.relative_to(root))
    if len(splits) > 1:
        named = ", ".join(f"{split} ({file})" for split, file in splits.items())
        raise UserError(
            f"{key}: {root} holds more than one split: {named}; choose with data.include, or name its folder"
        )


def _walk(root: Path, without: Callable[[str], bool] = lambda name: name.startswith(".")) -> list[Path]:
    paths: list[Path] = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if not without(name)]
        paths += [Path(folder, name) for name in files if not without(name)]
    return sorted(paths, key=lambda file: file.relative_to(root).as_posix())


def _matches(file: Path, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(file.name, pattern) for pattern in patterns)


def _revision(name: str, key: str) -> str | None:
    """Return the current revision on the hub, or None in offline mode, where the cached one is read."""
    from huggingface_hub import HfApi
    from huggingface_hub.constants import is_offline_mode

    if is_offline_mode():
        return None
    remedy = "correct it, or see that there is a network (HF_HUB_OFFLINE=1 reads what was fetched before)"
    with explained(f"{key}: {name!r} is no folder or file here, and not to be had from the hub", remedy):
        return HfApi().dataset_info(name, timeout=20).sha


def states(files: Iterable[Path]) -> list[list[Any]]:
    """Return names, sizes and modification times: equal means unchanged."""
    return [[str(file), status.st_size, status.st_mtime_ns] for file in files for status in [file.stat()]]


def hash_of(value: Any) -> str:
    """Return the SHA-256 of JSON values."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def place(file: str, line: int) -> str:
    """Describe a place: "chat.jsonl, line 17"."""
    return f"{file}, {_entry(file)} {line}" if line else file


@functools.cache
def _entry(file: str) -> str:
    return {".parquet": "row", ".json": "entry"}.get(kind(Path(file)), "line") if Path(file).suffix else "row"


def kind(file: Path) -> str:
    """Return the suffix that selects the reader: ".jsonl" for `a.jsonl` and `a.jsonl.gz`."""
    return Path(file.stem).suffix.lower() if file.suffix == ".gz" else file.suffix.lower()


class TextFile:
    """The text of a file in chunks, as often as it is iterated. Raises `UserError` for damage."""

    def __init__(self, file: Path, read: list[int]) -> None:
        self._file, self._read = file, read

    def __iter__(self) -> Iterator[str]:
        rest, done, data = b"", 0, b" "  # bytes of a character that is not complete; those before it; the last ones
        with _damage_named(self._file), _open(self._file, self._read) as stream:
            while data:
                data = stream.read(CHUNK)
                try:
                    text, used = codecs.utf_8_decode(rest + data, "strict", not data)
                except UnicodeDecodeError as error:
                    error.start += done
                    raise
                rest, done = (rest + data)[used:], done + used
                yield text


def _read(file: Path, text_field: str, read: list[int]) -> Iterator[tuple[Fields, int]]:
    """Iterate over (record, line) of a file, with the text of a text file under ``text_field``. Name damage by line."""
    with _damage_named(file):
        if reader := READERS.get(kind(file)):
            with _open(file, read) as stream:
                yield from reader(file, stream)
        else:
            text, is_long = TextFile(file, read), file.stat().st_size > CHUNK or file.suffix == ".gz"
            yield {text_field: text if is_long else "".join(text)}, 0


@contextlib.contextmanager
def _damage_named(file: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file}: not UTF-8 at byte {error.start}; convert it, or leave it out with data.include"
        ) from None
    except EOFError:
        raise UserError(f"{file}: ends in the middle; fetch it again") from None
    except (OSError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        raise UserError(f"{file}: cannot be read ({reason}); correct its permissions, or fetch it again") from None


def _lines(file: Path, stream: IO[bytes]) -> Iterator[tuple[Fields, int]]:
    for number, line in enumerate(stream, start=1):
        if line.strip():
            yield _object(_json(line.strip(), file, number), file, number), number


def _array(file: Path, stream: IO[bytes]) -> Iterator[tuple[Fields, int]]:
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
    for number, entry in enumerate(entries, start=1):
        yield _object(entry, file, number), number


def _json(text: bytes, file: Path, first_line: int = 1) -> Any:
    try:
        value = load_json(text)
        if b"\\ud" in text or b"\\uD" in text:  # half of a surrogate pair is no character, and no tokenizer takes it
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except ValueError as error:  # also for what is not UTF-8
        line = first_line + getattr(error, "lineno", 1) - 1
        raise UserError(f"{file}, line {line}: not valid JSON ({one_line(error)}); correct that line") from None


def _rows(file: Path, stream: IO[bytes]) -> Iterator[tuple[Fields, int]]:
    csv.field_size_limit(sys.maxsize)
    # Some spreadsheets write a byte order mark before the header.
    with io.TextIOWrapper(stream, "utf-8-sig", newline="") as text:
        rows = csv.reader(text, strict=True)
        head = next(rows, [])
        try:
            for row in rows:
                if not row:
                    continue
                if len(row) != len(head):
                    problem = f"{len(row)} fields under a head of {len(head)}"
                    raise UserError(f"{file}, line {rows.line_num}: {problem}; correct it")
                yield dict(zip(head, row, strict=True)), rows.line_num
        except csv.Error as error:
            raise UserError(f"{file}, line {rows.line_num}: not valid CSV ({error}); correct that line") from None


def _table(file: Path, stream: IO[bytes]) -> Iterator[tuple[Fields, int]]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    refused = explained(f"{file}: not a Parquet file", "fetch it again", ArrowException, cut_line)
    # Buffered: otherwise a group of rows is read whole, which may be a file.
    with refused, ParquetFile(stream, buffer_size=CHUNK) as table:
        rows = (row for batch in table.iter_batches(batch_size=64) for row in batch.to_pylist())
        for number, row in enumerate(rows, start=1):
            yield row, number


READERS: dict[str, Callable[[Path, IO[bytes]], Iterator[tuple[Fields, int]]]] = {
    ".jsonl": _lines,
    ".json": _array,
    ".csv": _rows,
    ".parquet": _table,
}
"""Readers of files of records; every other file is text."""
LINES, ARRAYS = (".jsonl", ".parquet"), (".json", ".csv")


class _CountedFile(io.FileIO):
    """A file that adds the bytes that are read of it to a count."""

    def __init__(self, file: Path, read: list[int]) -> None:
        super().__init__(file)
        self._count = read

    def readinto(self, buffer: Any) -> int | None:
        size = super().readinto(buffer)
        self._count[0] += size or 0
        return size


@contextlib.contextmanager
def _open(file: Path, read: list[int]) -> Iterator[IO[bytes]]:
    with io.BufferedReader(_CountedFile(file, read), CHUNK) as stream:
        yield gzip.GzipFile(fileobj=stream) if file.suffix == ".gz" else stream  # type: ignore[misc]


def _object(entry: Any, file: Path, number: int) -> Fields:
    if not isinstance(entry, dict):
        raise UserError(f"{place(str(file), number)}: wanted an object, found a {type(entry).__name__}; correct it")
    return entry
