"""Two documents a record that begin with the same prompt; the answers are the targets.

`prompt`, `chosen` and `rejected` are strings, joined as they are, or lists of messages, which go through the chat
template. Without `prompt`, it is what both begin with: messages, or words of strings.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from trueshard.errors import UserError
from trueshard.train.data import chat
from trueshard.train.data.batches import Batch, Documents, Sample
from trueshard.train.data.config import DataSection
from trueshard.train.data.formats.base import Format, lacking
from trueshard.train.data.sources import Fields, Record

PAIR = ("prompt", "chosen", "rejected")


class PreferenceFormat(Format):
    noun = "preferences"
    rows = 2
    long = ("cut", "drop", "error")
    columns = (("chosen", "rejected"),)

    @classmethod
    def parts(cls, section: DataSection, record: Record) -> tuple[Any, Any, Any]:
        return _pair(record.fields, record.where)

    def encode(self, records: Sequence[Record], folder: Path) -> list[Documents]:
        """Return two documents a record: the chosen and the rejected one."""
        return [self._encode(record) for record in records]

    def _encode(self, record: Record) -> Documents:
        prompt, *answers = _pair(record.fields, record.where)
        if isinstance(prompt, str):
            return tuple(self._answered(prompt, answer) for answer in answers)
        self.conversational = True
        tools, context = chat.tools_of(record.fields, record.where), len(prompt)
        rendered = [
            self.template.render([*prompt, *answer], f"{record.where}: {key}", tools, context)
            for key, answer in zip(PAIR[1:], answers, strict=True)
        ]
        return tuple(self.template.documents(rendered))

    def sample(self, documents: Documents) -> Sample:
        return {side: document.sample() for side, document in zip(PAIR[1:], documents, strict=True)}

    def collate(self, samples: Sequence[Sample]) -> Batch:
        """Return [2 × pairs, length]: the ``chosen`` sides, then the ``rejected`` ones in the same order."""
        return super().collate([sample[side] for side in PAIR[1:] for sample in samples])


def _pair(fields: Fields, where: str) -> tuple[Any, Any, Any]:
    """Return prompt, chosen and rejected: all strings, or all lists of messages. Raises `UserError` otherwise."""
    values: tuple[Any, Any, Any] = (fields.get(PAIR[0]), fields.get(PAIR[1]), fields.get(PAIR[2]))
    prompt, chosen, rejected = values
    for key in PAIR[1:]:
        if fields.get(key) is None:
            raise lacking(key, f"has no {key!r}", fields, where)
    if chosen == rejected:
        raise UserError(
            f"{where}: chosen and rejected are the same, so nothing is preferred; correct it, or leave it out"
        )
    strings = [isinstance(value, str) for value in values]
    if strings == [False, True, True] and prompt is None:  # up to the last space that both have: words stay whole
        prompt = chosen[: next((at for at, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), None)]
        prompt = prompt[: max(prompt.rfind(" "), prompt.rfind("\n"), 0)]
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
        strings = [True] * 3
    if all(strings):
        return prompt, chosen, rejected
    if any(strings):
        kinds = ", ".join(f"{key} {type(value).__name__}" for key, value in zip(PAIR, values, strict=True))
        raise UserError(f"{where}: wanted three strings, or lists of messages, found {kinds}; correct it")
    first, second = (chat.flat(chat.messages(fields[key], f"{where}: {key}"), where) for key in PAIR[1:])
    if prompt is not None:
        return chat.flat(chat.messages(prompt, f"{where}: prompt"), where), first, second
    shared = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(first, second, strict=False)))
    if not shared:
        raise UserError(f"{where}: has no 'prompt', and chosen and rejected begin differently; add it")
    return first[:shared], first[shared:], second[shared:]
