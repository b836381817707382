"""Data of format "text": documents, joined and cut into sequences without padding.

An end-of-text token follows each document. The last target of a sequence is the first input of the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trueshard.errors import UserError
from trueshard.model import names
from trueshard.train.data.batches import Document, stack, whole
from trueshard.train.data.data_format import DataFormat, Format, FormatInputs, single
from trueshard.train.data.sources import Record


def open_text(inputs: FormatInputs) -> Format:
    """Return the format with a run's tokenizer."""
    encode = partial(encode_texts, inputs.tokenizer, inputs.section.field)
    return Format("joined", encode, single, stack, inputs.vocabulary)


def encode_texts(tokenizer: Any, field: str, records: Sequence[Record], folder: Path) -> list[tuple[Document, ...]]:
    """Return one document a record, or none for blank text."""
    texts = [plain_text(field, record) for record in records]
    kept = [text for text in texts if text.strip()]
    encoded = iter(tokenizer(kept, add_special_tokens=False)["input_ids"] if kept else [])
    end = tokenizer.eos_token_id
    return [(whole(np.array([*next(encoded), end], np.int64)),) if text.strip() else () for text in texts]


def plain_text(field: str, record: Record) -> str:
    """Return the text of a record. Raises `UserError` that names what is there instead."""
    fields, value = record.fields, record.fields.get(field)
    if not isinstance(value, str):
        state = f"{type(value).__name__} under it" if field in fields else f"keys {sorted(fields)}"
        near = "" if field in fields else f".{names.nearest(field, fields)}".removesuffix(".")
        raise UserError(
            f"{record.where}: wanted an object with a string under {field!r}, found {state}; correct it, or set "
            f"data.field{near}"
        )
    return value


TEXT = DataFormat(
    noun="text",
    layout=lambda section: "joined",
    open=open_text,
    texts=lambda section, record: iter([plain_text(section.field, record)]),
)
