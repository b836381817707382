"""Text as tokens: documents one after the other, an end-of-text token after each, cut into sequences.

- Nothing is padded: a sequence ends where the next begins, and the last target of one is the first input of the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from trueshard.train.data.records import Located, string
from trueshard.train.data.samples import Document, Ids


class TextFormat:
    """Records with a text: one document each, none where the text is blank.

    Args:
        tokenizer: with an end-of-text token.
        field: the key that holds the text.
    """

    def __init__(self, tokenizer: Any, field: str) -> None:
        self._tokenizer, self._field = tokenizer, field

    def encode(self, records: Sequence[Located]) -> list[tuple[Document, ...]]:
        """The document of each of the records, or none."""
        said = [text for record in records for text in text_texts(self._field, record)]
        kept = [text for text in said if text.strip()]
        found = iter(self._tokenizer(kept, add_special_tokens=False)["input_ids"] if kept else [])
        return [(self._document(next(found)),) if text.strip() else () for text in said]

    def _document(self, ids: list[int]) -> Document:
        whole = np.asarray([*ids, self._tokenizer.eos_token_id], dtype=np.int64)
        return Document(whole, np.ones(len(whole), dtype=np.bool_))


def text_texts(field: str, record: Located) -> Iterator[str]:
    """What a record says."""
    yield string(record.fields, field, record.where, "data.field")


def sequence(tokens: Ids, start: int, length: int) -> dict[str, Ids]:
    """The sample of ``length`` inputs that begins at a token."""
    piece = np.asarray(tokens[start : start + length + 1], dtype=np.int64)
    return {"input_ids": piece[:-1], "targets": piece[1:]}
