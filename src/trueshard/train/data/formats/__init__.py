"""The formats of data: how records become documents, and documents samples and batches. A file each, and one table."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from trueshard.errors import UserError
from trueshard.train import plugins
from trueshard.train.data.addresses import is_address, kind
from trueshard.train.data.config import DataSection
from trueshard.train.data.formats.base import Format
from trueshard.train.data.formats.chat import ChatFormat
from trueshard.train.data.formats.completion import CompletionFormat
from trueshard.train.data.formats.instruction import InstructionFormat
from trueshard.train.data.formats.label import LabelFormat
from trueshard.train.data.formats.preference import PreferenceFormat
from trueshard.train.data.formats.prompt import PromptFormat
from trueshard.train.data.formats.text import TextFormat
from trueshard.train.data.formats.vision import VisionFormat
from trueshard.train.data.sources import READERS, HubSource, Place, Record, find

OWN: dict[str, type[Format]] = {
    "text": TextFormat,
    "chat": ChatFormat,
    "preference": PreferenceFormat,
    "vision": VisionFormat,
    "prompt": PromptFormat,
    "completion": CompletionFormat,
    "instruction": InstructionFormat,
    "label": LabelFormat,
}
FORMATS: dict[str, type[Format]] = plugins.Table("data.format", OWN)
"""Value of `data.format` → format."""


def find_format(section: DataSection) -> str:
    """Return the format that the keys of each file's first record show; "text" if they show none.

    Raises `UserError` that names several, also which file is of which, or one that is not chosen by keys alone.
    """
    first_of: dict[str, str] = {}  # format → place of the first such record
    with suppress(UserError):  # of what cannot be read, preparation tells
        for record in firsts(section):
            for name in shown(section, record):
                first_of.setdefault(name, record.where)
    if len(first_of) > 1:
        named = ", ".join(f"{name} ({where})" for name, where in first_of.items())
        raise UserError(
            f"data.path: its keys show several formats, {named}; choose files of one with data.include, or set "
            f"data.format to {' or '.join(first_of)}"
        )
    for name, where in first_of.items():
        if name in OWN and (reason := OWN[name].by_name):
            raise UserError(f"{where}: its keys show the format {name!r}, and {reason}")
    return next(iter(first_of), "text")


def firsts(section: DataSection, path: str | None = None) -> Iterator[Record]:
    """Yield the first record of each file of records; of addresses and of the hub that of the first one."""
    for source in find(section, path):
        numbers = range(1 if isinstance(source, HubSource) or is_address(source.files[0]) else len(source.files))
        for number in numbers:
            if isinstance(source, HubSource) or kind(source.files[number]) in READERS:
                record = next(source.records(Place(number)), None)
                if record is not None and record.file == number:
                    yield record


def shown(section: DataSection, record: Record) -> list[str]:
    """Return the formats that the keys of a record show: "text" if its field of text is there, or none is shown."""
    if record.fields.get(section.field) is not None:
        return ["text"]
    sets = [(set(keys), name) for name, form in OWN.items() for keys in form.columns]
    here = [(keys, name) for keys, name in sets if all(record.fields.get(key) not in (None, []) for key in keys)]
    names = [name for keys, name in here if not any(keys < others for others, _ in here)]
    return [*dict.fromkeys(names)] or ["text"]
