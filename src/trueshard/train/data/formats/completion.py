"""`prompt` and `completion`: strings that are joined as they are, or lists of messages for the chat template."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from trueshard.train.data import chat
from trueshard.train.data.batches import Document, Documents
from trueshard.train.data.config import DataSection
from trueshard.train.data.formats.base import Format, Part, strings
from trueshard.train.data.sources import Record


class CompletionFormat(Format):
    noun = "prompts with completions"
    columns: ClassVar[Sequence[tuple[str, ...]]] = (("prompt", "completion"),)
    layout = "packed"

    @classmethod
    def parts(cls, section: DataSection, record: Record) -> Sequence[Part]:
        """Return prompt and completion: both strings, or both lists of messages. `UserError` names what is there."""
        fields, keys = record.fields, ("prompt", "completion")
        if not all(isinstance(fields.get(key), list) for key in keys):
            return strings(keys, record, "strings, or lists of messages")
        return [chat.flat(chat.messages(fields[key], f"{record.where}: {key}"), record.where) for key in keys]

    def encode(self, records: Sequence[Record], folder: Path) -> list[Documents]:
        return [tuple(self._encode(record, *self.parts(self.section, record))) for record in records]

    def _encode(self, record: Record, prompt: Any, completion: Any) -> list[Document]:
        context = len(prompt) if self.section.answers_only else 0
        if isinstance(prompt, str):
            return [self._answered(prompt, completion) if context else self._answered("", prompt + completion)]
        self.conversational, tools = True, chat.tools_of(record.fields, record.where)
        return self.template.documents([self.template.render([*prompt, *completion], record.where, tools, context)])
