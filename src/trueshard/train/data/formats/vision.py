"""Conversations with images, kept as JSON that becomes tokens with each batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trueshard.train.data import chat
from trueshard.train.data.batches import Batch, Documents, Sample, json_document
from trueshard.train.data.config import DataSection
from trueshard.train.data.formats.base import Format
from trueshard.train.data.sources import Record
from trueshard.train.data.vision import VisionCollate, store_images, vision_messages


class VisionFormat(Format):
    noun = "conversations with images"
    columns = (("messages", "images"), ("conversations", "images"))
    conversational = True
    layout = "kept"
    long = ("cut",)

    def __init__(self, section: DataSection, length: int, tokenizer: Any, processor: Any) -> None:
        super().__init__(section, length, tokenizer, processor)
        self._collate = VisionCollate(processor, length, section.answers_only)

    @classmethod
    def parts(cls, section: DataSection, record: Record) -> list[list[chat.Message]]:
        return [vision_messages(record)]

    def encode(self, records: Sequence[Record], folder: Path) -> list[Documents]:
        """Return one document a record: its messages as JSON. Images held as bytes go to `images/` in ``folder``."""
        conversations = [turns for record in records for turns in self.parts(self.section, record)]
        self.template.render(conversations[0], records[0].where)  # for its notes
        store_images(conversations, folder)
        return [(json_document(messages),) for messages in conversations]

    def collate(self, samples: Sequence[Sample]) -> Batch:
        return self._collate(samples)
