"""`instruction`, `input` and `output`, as Alpaca has them, as a conversation of two messages."""

from __future__ import annotations

from trueshard.train.data import chat
from trueshard.train.data.config import DataSection
from trueshard.train.data.formats.base import strings
from trueshard.train.data.formats.chat import ChatFormat
from trueshard.train.data.sources import Record


class InstructionFormat(ChatFormat):
    noun = "instructions"
    columns = (("instruction", "output"),)

    @classmethod
    def parts(cls, section: DataSection, record: Record) -> list[list[chat.Message]]:
        asked, more, answer = strings(("instruction", "input", "output"), record, optional="input")
        content = f"{asked}\n\n{more}" if more.strip() else asked
        return [[{"role": "user", "content": content}, {"role": "assistant", "content": answer}]]
