"""Documents, each followed by an end-of-text token, joined and cut into sequences without padding.

The last target of a sequence is the first input of the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from trueshard.errors import UserError
from trueshard.machine import cpu_cores
from trueshard.text import nearest
from trueshard.train.data.batches import Documents, all_targets
from trueshard.train.data.config import DataSection
from trueshard.train.data.cutting import PIECE, Cutter
from trueshard.train.data.formats.base import Format
from trueshard.train.data.sources import Record, TextFile
from trueshard.train.data.tokenizer import fast_backend


class TextFormat(Format):
    noun = "text"
    layout = "joined"
    long = ()

    @classmethod
    def parts(cls, section: DataSection, record: Record) -> list[Any]:
        return [_plain_text(section.field, record)]

    def split(self, record: Record) -> Iterator[Record]:
        """Yield the pieces of a text from where the record begins; none if it is blank."""
        (text,) = self.parts(self.section, record)
        begin, is_file = record.begin, isinstance(text, TextFile)
        if not is_file and not begin and len(text) <= PIECE:
            yield from [record] if text.strip() else []
            return
        pieces = self._cutter.pieces(text if is_file else text[begin:], record.where)
        first = piece = next(pieces)
        for following in pieces:
            yield record.of({self.section.field: piece}, begin, more=True)
            begin += len(piece.encode()) if is_file else len(piece)
            piece = following
        if record.begin or piece is not first or piece.strip():
            yield record.of({self.section.field: piece}, begin)

    def encode(self, records: Sequence[Record], folder: Path) -> list[Documents]:
        """Return one document a record."""
        texts, end = [record.fields[self.section.field] for record in records], [self.tokenizer.eos_token_id]
        if self._backend is not None:
            encoded = [tokens.ids for tokens in self._backend.encode_batch_fast(texts, add_special_tokens=False)]
        else:
            encoded = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return [
            (all_targets(np.array(ids if record.more else ids + end, dtype=np.int64), record.more),)
            for record, ids in zip(records, encoded, strict=True)
        ]

    def opening(self, prompt: str) -> str:
        return prompt

    @cached_property
    def _backend(self) -> Any:
        return fast_backend(self.tokenizer)

    @cached_property
    def _cutter(self) -> Cutter:
        return Cutter(self._backend, f"the tokenizer {self.tokenizer.name_or_path}".rstrip())

    @property
    def at_once(self) -> int:  # type: ignore[override]
        # Two where cores are many: one fills them while of the other an array is made. Few have their fill by one, and
        # with two lose more by the caches that these share.
        return 1 if self._backend is None or cpu_cores() <= 4 else 2

    @property
    def cuts(self) -> bool | None:
        return self._cutter.cuts

    @cuts.setter
    def cuts(self, value: bool | None) -> None:
        self._cutter.cuts = value


def _plain_text(field: str, record: Record) -> str | TextFile:
    """Return the text of a record. Raises `UserError` that names what is there instead."""
    fields, value = record.fields, record.fields.get(field)
    if isinstance(value, str | TextFile):
        return value
    state = f"{type(value).__name__} under it" if field in fields else f"keys {sorted(fields)}"
    near = "" if field in fields else f".{nearest(field, fields)}".removesuffix(".")
    raise UserError(
        f"{record.where}: wanted an object with a string under {field!r}, found {state}; correct it, or set "
        f"data.field{near}"
    )
