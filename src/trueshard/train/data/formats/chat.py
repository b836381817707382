"""Conversations, through a chat template: `messages`, or `conversations` as ShareGPT has them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from trueshard.train.data import chat
from trueshard.train.data.batches import Documents
from trueshard.train.data.config import DataSection
from trueshard.train.data.formats.base import Format
from trueshard.train.data.sources import Record


class ChatFormat(Format):
    noun = "conversations"
    columns: ClassVar[Sequence[tuple[str, ...]]] = (("messages",), ("conversations",))
    conversational = True
    layout = "packed"

    @classmethod
    def parts(cls, section: DataSection, record: Record) -> list[list[chat.Message]]:
        return [chat.flat(chat.conversation(record.fields, record.where), record.where)]

    def encode(self, records: Sequence[Record], folder: Path) -> list[Documents]:
        rendered = [
            self.template.render(turns, record.where, chat.tools_of(record.fields, record.where))
            for record in records
            for turns in self.parts(self.section, record)
        ]
        return [(document,) for document in self.template.documents(rendered)]
