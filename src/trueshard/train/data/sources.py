"""Sources: where the data of a run comes from, in an order that does not depend on the machine.

- A folder is read in the sorted order of its relative paths. Where it holds both text and files of records, the
  configuration must say which are meant: nothing is left out unasked.
- "stdlib" is the source of the running interpreter's standard library, without tests and installed packages:
  text of some ten megabytes that every Python carries.
- A data set on the hub is pinned to the revision that it has when it is found.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trueshard.errors import UserError, with_kind
from trueshard.train.config import TEXT_FILES, DataSection
from trueshard.train.data.records import READERS, Located, Record, kind, place, read

NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
SPLITS = {"train": "train", "training": "train", "test": "test", "testing": "test"} | dict.fromkeys(
    ("validation", "valid", "val", "dev", "eval", "evaluation"), "validation"
)
"""Words in the names of files that tell what their records are for."""
LINES, WHOLE = (".jsonl", ".parquet"), (".json", ".csv")


@dataclass(frozen=True)
class Source:
    """One place with records."""

    key: str
    """The setting that names it: "data.path"."""
    name: str
    """As the setting gives it."""
    weight: float
    files: tuple[str, ...]
    """What a record's `file` counts; of a data set on the hub its name."""
    text_field: str = "text"

    def records(self) -> Iterator[Record]:
        """All of them, in order. Raises `UserError` for what cannot be read."""
        for number, file in enumerate(self.files):
            for fields, line in read(Path(file), self.text_field):
                yield Record(fields, number, line)

    def located(self, record: Record) -> Located:
        """A record with its place in words."""
        file = self.files[record.file]
        return Located(record.fields, place(file, record.line), Path(file).parent)

    def size(self) -> int | None:
        """Bytes in all files; None: not known."""
        return sum(Path(file).stat().st_size for file in self.files)

    def fingerprint(self) -> str:
        """A hash of names, sizes and times of change: equal means that nothing has to be read again."""
        status = [(file, os.stat(file)) for file in self.files]
        return _hash([[file, each.st_size, each.st_mtime_ns] for file, each in status])


@dataclass(frozen=True)
class HubSource(Source):
    """A data set on the hub, or a folder that the `datasets` library reads."""

    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    streaming: bool = False

    def records(self) -> Iterator[Record]:
        try:
            found, row = self._load(), 0
            # As plain values: images stay the bytes that they are stored as.
            for table in found.with_format("arrow").iter(batch_size=256):
                for fields in table.to_pylist():
                    row += 1
                    yield Record(fields, 0, row)
        except (OSError, ValueError, RuntimeError) as error:  # what `datasets` raises for names, splits and damage
            raise UserError(
                f"{self.key}: {self.name!r} cannot be read ({with_kind(error)}); {self._remedy()}"
            ) from None

    def size(self) -> int | None:
        return None

    def fingerprint(self) -> str:
        return _hash([self.name, self.subset, self.split, self.revision])

    def _load(self) -> Any:
        import datasets

        return datasets.load_dataset(
            self.name, self.subset, split=self.split, revision=self.revision, streaming=self.streaming
        )

    def _remedy(self) -> str:
        return "correct data.path, data.subset or data.split, or see that there is a network"


class SavedSource(HubSource):
    """A folder that `Dataset.save_to_disk` wrote; of a `DatasetDict` the split's."""

    def fingerprint(self) -> str:
        files = [file for file in sorted(Path(self.files[0]).iterdir()) if file.is_file()]
        return _hash([[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files])

    def _load(self) -> Any:
        import datasets

        return datasets.load_from_disk(self.files[0])


def find(section: DataSection, path: str | None = None) -> list[Source]:
    """The sources that `[data]` names; with `path`: the one at that path, as `evaluation.path` gives it.

    Raises `UserError` if there is none, or nothing to read in it.
    """
    if path is not None:
        return [_find(section, path, "evaluation.path", 1.0)]
    if section.path is not None:
        return [_find(section, section.path, "data.path", 1.0)]
    return [
        _find(section, each.path, f"data.sources[{number}].path", each.weight)
        for number, each in enumerate(section.sources)
    ]


def _find(section: DataSection, name: str, key: str, weight: float) -> Source:
    if name == "stdlib":
        return Source(key, name, weight, _standard_library(key), section.field)
    path = Path(name).expanduser()
    saved = path / section.split if (path / "dataset_dict.json").is_file() else path
    if (saved / "dataset_info.json").is_file() and (saved / "state.json").is_file():
        return SavedSource(key, name, weight, (str(saved),), section.field)
    if path.is_dir():
        return Source(key, name, weight, _folder(section, path, key), section.field)
    if not path.exists():
        if HUB_NAME.fullmatch(name) and kind(path) not in READERS:
            revision = _revision(name, key)
            return HubSource(
                key, name, weight, (name,), section.field, section.subset, section.split, revision, section.streaming
            )
        raise UserError(
            f"{key}: {path} does not exist; give a folder or a file of text, JSONL, JSON, CSV or Parquet, "
            'owner/name of a data set on the hub, or "stdlib"'
        )
    if not path.stat().st_size:
        raise UserError(f"{key}: {path} is empty; give a file with {_wanted(section)}")
    if section.format != "text" and kind(path) not in READERS:
        raise UserError(
            f'{key}: {path} is no file of records, which data.format = "{section.format}" reads; '
            f"give one of {', '.join(READERS)}"
        )
    return Source(key, name, weight, (str(path),), section.field)


def _folder(section: DataSection, root: Path, key: str) -> tuple[str, ...]:
    """The files in a folder that are meant."""
    listed = sorted(_walk(root), key=lambda file: file.relative_to(root).as_posix())
    if "include" in section.model_fields_set:
        patterns: Sequence[str] = section.include
        groups = [[file for file in listed if _matches(file, patterns)]]
    else:
        patterns = TEXT_FILES if section.format == "text" else [f"*{suffix}" for suffix in READERS]
        records = [[file for file in listed if kind(file) in suffixes] for suffixes in (LINES, WHOLE)]
        text = [file for file in listed if _matches(file, TEXT_FILES)] if section.format == "text" else []
        # Code has .json and .csv files of all kinds beside it, so beside text these do not count.
        groups = [group for group in ([text, records[0]] if text else records) if group] or [[]]
    if len(groups) > 1:
        counted = " and ".join(f"{len(group)} such as {group[0].relative_to(root)}" for group in groups)
        raise UserError(f"{key}: {root} holds files of different kinds ({counted}); choose with data.include")
    if not any(file.stat().st_size for file in groups[0]):
        state = "holds only empty files that match" if groups[0] else "holds no file that matches"
        shown = ", ".join(patterns[:6]) + (", …" if len(patterns) > 6 else "")
        raise UserError(f"{key}: {root} {state} data.include ({shown}); add {_wanted(section)} or change data.include")
    if section.format != "text" and (other := [file for file in groups[0] if kind(file) not in READERS]):
        raise UserError(f"{key}: {other[0]} is no file of records ({', '.join(READERS)}); change data.include")
    if "include" not in section.model_fields_set and groups[0] and kind(groups[0][0]) in READERS:
        _check_one_split(key, root, groups[0])
    return tuple(map(str, groups[0]))


def _check_one_split(key: str, root: Path, files: Sequence[Path]) -> None:
    """Raise `UserError` if names tell that files are for training and for testing: no run is to learn from both."""
    found: dict[str, Path] = {}
    for file in files:
        for word in re.split(r"[^a-z]+", file.relative_to(root).as_posix().lower()):
            if word in SPLITS:
                found.setdefault(SPLITS[word], file.relative_to(root))
    if len(found) > 1:
        named = ", ".join(f"{split} ({file})" for split, file in found.items())
        raise UserError(
            f"{key}: {root} holds more than one split: {named}; choose with data.include, or name its folder"
        )


def _wanted(section: DataSection) -> str:
    return "text" if section.format == "text" else "records"


def _walk(root: Path) -> Iterator[Path]:
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        yield from (Path(folder, name) for name in files if not name.startswith("."))


def _matches(file: Path, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(file.name, pattern) for pattern in patterns)


def _standard_library(key: str) -> tuple[str, ...]:
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for file in root.rglob("*.py") if not NOT_LIBRARY.intersection(file.relative_to(root).parts)]
    if not files:
        raise UserError(f'{key}: "stdlib": this Python carries no source under {root}; give a folder of text')
    return tuple(map(str, sorted(files, key=lambda file: file.relative_to(root).as_posix())))


def _revision(name: str, key: str) -> str | None:
    """What the hub has now. None: asked not to reach it, what was fetched before is read."""
    from huggingface_hub import HfApi
    from huggingface_hub.constants import is_offline_mode

    if is_offline_mode():
        return None
    try:
        return HfApi().dataset_info(name, timeout=20).sha
    except Exception as error:  # of the network, the hub and its client, each with classes of its own
        raise UserError(
            f"{key}: {name!r} is no folder or file here, and not to be had from the hub ({with_kind(error)}); correct "
            "it, or see that there is a network (HF_HUB_OFFLINE=1 reads what was fetched before)"
        ) from None


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
