"""Documents: where the text of a run comes from, in an order that does not depend on the machine.

- A folder is read in the sorted order of its relative paths, one document a file.
- A `.jsonl` file is one document a line; a line that is not an object with the text is an error, not skipped.
- "stdlib" is the source of the running interpreter's standard library, without tests and installed packages:
  text of some ten megabytes that every Python carries.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trueshard.errors import UserError
from trueshard.train.config import DataSection

NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Source:
    """The files of a run's text, and how to read documents from them."""

    root: Path
    files: tuple[Path, ...]
    field: str
    """Key of the text in a `.jsonl` line."""

    def documents(self) -> Iterator[str]:
        """The documents that have text, in order. Raises `UserError` for a line or a file that cannot be read."""
        for file in self.files:
            documents = self._lines(file) if file.suffix == ".jsonl" else iter([self._read(file)])
            yield from (document for document in documents if document.strip())

    def size(self) -> int:
        """Bytes in all files."""
        return sum(file.stat().st_size for file in self.files)

    def fingerprint(self) -> str:
        """A hash of names, sizes and times of change: equal means that nothing has to be read again."""
        entries = []
        for file in self.files:
            status = file.stat()
            entries.append([file.relative_to(self.root).as_posix(), status.st_size, status.st_mtime_ns])
        return hashlib.sha256(json.dumps(entries).encode()).hexdigest()

    def _read(self, file: Path) -> str:
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{file}: not UTF-8 at byte {error.start}; convert it, or leave it out with data.include"
            ) from None
        except OSError as error:
            raise UserError(f"{file}: cannot be read ({error.strerror}); correct its permissions") from None

    def _lines(self, file: Path) -> Iterator[str]:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    entry = json.loads(line)
                except (json.JSONDecodeError, UnicodeDecodeError) as error:
                    raise UserError(
                        f"{file}, line {number}: not valid JSON ({' '.join(str(error).split())}); correct that line"
                    ) from None
                if not isinstance(entry, dict) or not isinstance(entry.get(self.field), str):
                    found = f"keys {sorted(entry)}" if isinstance(entry, dict) else f"a {type(entry).__name__}"
                    raise UserError(
                        f"{file}, line {number}: wanted an object with a string under {self.field!r}, found {found}; "
                        "correct that line, or set data.field"
                    )
                yield entry[self.field]


def find(section: DataSection) -> Source:
    """The source that `[data]` names. Raises `UserError` if there is none, or no text file in it."""
    if section.path == "stdlib":
        return _standard_library()
    path = Path(section.path).expanduser()
    if path.is_dir():
        files = tuple(sorted(_matching(path, section.include), key=lambda file: file.relative_to(path).as_posix()))
        if not any(file.stat().st_size for file in files):
            state = "holds only empty files that match" if files else "holds no file that matches"
            shown = ", ".join(section.include[:6]) + (", …" if len(section.include) > 6 else "")
            raise UserError(f"data.path: {path} {state} data.include ({shown}); add text or change data.include")
        return Source(path, files, section.field)
    if not path.exists():
        raise UserError(f'data.path: {path} does not exist; give a folder of text, a .jsonl file, or "stdlib"')
    if not path.stat().st_size:
        raise UserError(f"data.path: {path} is empty; give a file with text")
    return Source(path.parent, (path,), section.field)


def _matching(root: Path, patterns: list[str]) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        for name in names:
            if not name.startswith(".") and any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
                yield Path(folder, name)


def _standard_library() -> Source:
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for file in root.rglob("*.py") if not NOT_LIBRARY.intersection(file.relative_to(root).parts)]
    if not files:
        raise UserError(f'data.path: "stdlib": this Python carries no source under {root}; give a folder of text')
    return Source(root, tuple(sorted(files, key=lambda file: file.relative_to(root).as_posix())), "text")
