"""Preferences as tokens: two documents a record, with the same beginning, whose answers are the targets.

- `prompt`, `chosen` and `rejected` are strings, and follow each other as they are, an end-of-text token at the end; or
  lists of messages, which go through the chat template.
- Without `prompt`, chosen and rejected are whole conversations, and the prompt is the messages that they share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from trueshard import names
from trueshard.errors import UserError
from trueshard.train.data.chat import Rendered, Template, flat
from trueshard.train.data.messages import Message, messages, texts
from trueshard.train.data.records import Fields, Located
from trueshard.train.data.samples import Document

KEYS = ("prompt", "chosen", "rejected")


class PreferenceFormat:
    """Records with ``prompt``, ``chosen`` and ``rejected``: the chosen document and the rejected one.

    Args:
        tokenizer: with an end-of-text token and its ``chat_template``.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._template = tokenizer, Template(tokenizer, answers_only=True)

    def encode(self, records: Sequence[Located]) -> list[tuple[Document, ...]]:
        """The two documents of each of the records."""
        return [self._pair(each.fields, each.where) for each in records]

    def _pair(self, fields: Fields, where: str) -> tuple[Document, Document]:
        prompt, chosen, rejected = pair(fields, where)
        if isinstance(prompt, str):
            return self._plain(prompt, str(chosen)), self._plain(prompt, str(rejected))
        tools = fields.get("tools")
        sides: list[Rendered] = [
            self._template.render([*prompt, *side], f"{where}: {key}", tools, asked=len(prompt))
            for key, side in (("chosen", chosen), ("rejected", rejected))
        ]
        first, second = self._template.documents(sides)
        return first, second

    def _plain(self, prompt: str, answer: str) -> Document:
        asked, said = self._tokenizer([prompt, answer], add_special_tokens=False)["input_ids"]
        ids = np.asarray([*asked, *said, self._tokenizer.eos_token_id], dtype=np.int64)
        return Document(ids, np.arange(len(ids)) >= len(asked))


def pair_texts(record: Located) -> Iterator[str]:
    """What is said in a record."""
    for part in pair(record.fields, record.where):
        yield from [part] if isinstance(part, str) else texts(part)


def pair(fields: Fields, where: str) -> tuple[Any, Any, Any]:
    """Prompt, chosen and rejected: all strings, or all lists of messages. Raises `UserError` that names the place."""
    for key in KEYS[1:]:
        if fields.get(key) is None:
            near = names.nearest(key, fields, 1)
            raise UserError(
                f"{where}: has no {key!r}, found keys {sorted(fields)}; correct it.{near}".removesuffix(".")
            )
    prompt, chosen, rejected = (fields.get(key) for key in KEYS)
    if chosen == rejected:
        raise UserError(
            f"{where}: chosen and rejected are the same, so nothing is preferred; correct it, or leave it out"
        )
    if all(isinstance(each, str) for each in (prompt, chosen, rejected)):
        return prompt, chosen, rejected
    if any(isinstance(each, str) for each in (prompt, chosen, rejected)):
        found = ", ".join(f"{key} {type(fields.get(key)).__name__}" for key in KEYS)
        raise UserError(f"{where}: wanted three strings, or lists of messages, found {found}; correct it")
    first, second = ([flat(m, where) for m in messages(fields[key], f"{where}: {key}")] for key in KEYS[1:])
    if prompt is not None:
        return [flat(m, where) for m in messages(prompt, f"{where}: prompt")], first, second
    shared = _shared(first, second)
    if not shared:
        raise UserError(f"{where}: has no 'prompt', and chosen and rejected begin differently; add it")
    return first[:shared], first[shared:], second[shared:]


def _shared(first: list[Message], second: list[Message]) -> int:
    """How many messages two conversations begin with alike."""
    return next(
        (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
