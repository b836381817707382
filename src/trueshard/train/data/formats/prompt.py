"""A string or messages, with all fields of their record for the reward: for `[rl]`.

Kept as JSON that becomes tokens with each batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trueshard.train.data import chat
from trueshard.train.data.batches import Documents, json_document
from trueshard.train.data.config import DataSection
from trueshard.train.data.formats.base import Format, Part, strings
from trueshard.train.data.sources import Record
from trueshard.train.data.vision import store_images, vision_messages


class PromptFormat(Format):
    noun = "prompts"
    layout = "kept"
    long = ("drop", "error")
    limit = "train.sequence_length - rollout.tokens"
    omitted = f"left out: longer than {limit}"

    @classmethod
    def parts(cls, section: DataSection, record: Record) -> list[Part]:
        if not section.images:
            return [_prompt(record)]
        prompt = record.fields.get("prompt")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return [vision_messages(Record({**record.fields, "messages": messages}, *record[1:]))]

    def encode(self, records: Sequence[Record], folder: Path) -> list[Documents]:
        """Return one document a record, the prompt and all fields as JSON; none for a prompt that is too long.

        Images held as bytes go to `images/` in ``folder``.
        """
        return [self._encode(record, folder) for record in records]

    def _encode(self, record: Record, folder: Path) -> Documents:
        (prompt,) = self.parts(self.section, record)
        self.conversational |= not isinstance(prompt, str)
        if self.section.images:
            assert not isinstance(prompt, str)
            store_images([prompt], folder)
        else:
            tools = chat.tools_of(record.fields, record.where)
            text = prompt if isinstance(prompt, str) else self.template.prompt(prompt, record.where, tools)
            if (tokens := len(self.tokenizer(text, add_special_tokens=False)["input_ids"])) > self.length:
                self.check_long(record, tokens)
                return ()
        return (json_document({"prompt": prompt, "record": {**record.fields, "prompt": prompt}}),)


def _prompt(record: Record) -> str | list[chat.Message]:
    value, where = record.fields.get("prompt"), record.where
    if value is None or isinstance(value, str):
        return strings(["prompt"], record)[0]
    return chat.flat(chat.messages(value, f"{where}: prompt"), where)
