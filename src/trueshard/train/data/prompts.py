"""Data of format "prompt": strings, or messages for the chat template, kept as JSON with their records.

All fields of a record are kept, for the reward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trueshard.errors import UserError
from trueshard.model import names
from trueshard.train.config import DataSection
from trueshard.train.data.batches import Document, json_document, stack
from trueshard.train.data.chat import ChatTemplate, Message, flat, messages, texts
from trueshard.train.data.data_format import DataFormat, Format, FormatInputs, single
from trueshard.train.data.sources import Record
from trueshard.train.data.vision import store_images, vision_messages


def open_prompts(inputs: FormatInputs) -> Format:
    """Return the format with a run's tokenizer."""
    longest = None if inputs.section.images else inputs.length
    encode = partial(encode_prompts, ChatTemplate(inputs.tokenizer, answers_only=True), longest)
    return Format("kept", encode, single, stack, None)


def prompt_texts(section: DataSection, record: Record) -> Iterator[str]:
    """Yield the texts of a prompt."""
    prompt = prompt_of(record)
    yield from [prompt] if isinstance(prompt, str) else texts(prompt)


def encode_prompts(
    template: ChatTemplate, most: int | None, records: Sequence[Record], folder: Path
) -> list[tuple[Document, ...]]:
    """Return one document a record, the prompt and all fields as JSON; none for a prompt of more than ``most`` tokens.

    Images held as bytes go to `images/` in ``folder``; what else JSON cannot hold is left out of the fields.
    """
    documents: list[tuple[Document, ...]] = []
    for record in records:
        prompt = prompt_of(record, images=most is None)
        if most is None:
            store_images([prompt], folder)  # type: ignore[list-item]
        else:
            tools = record.fields.get("tools")
            text = prompt if isinstance(prompt, str) else template.prompt(prompt, record.where, tools)
            if len(template.tokenizer(text, add_special_tokens=False)["input_ids"]) > most:
                documents.append(())
                continue
        stored = {"prompt": prompt, "record": _plain({**record.fields, "prompt": prompt})}
        documents.append((json_document(stored),))
    return documents


def prompt_of(record: Record, images: bool = False) -> str | list[Message]:
    """Return the prompt of a record: a string, or messages, with ``images`` in place. Raises `UserError`."""
    value, where = record.fields.get("prompt"), record.where
    if images:
        turns = [{"role": "user", "content": value}] if isinstance(value, str) else value
        fields = {**record.fields, "messages": turns}
        return vision_messages(Record(fields, record.file, record.line, where, record.folder))
    if isinstance(value, str) and value.strip():
        return value
    if value is None or isinstance(value, str):
        state = "has no 'prompt'" if value is None else "has an empty 'prompt'"
        near = names.nearest("prompt", record.fields, 1)
        raise UserError(f"{where}: {state}, found keys {sorted(record.fields)}; correct it.{near}".removesuffix("."))
    return flat(messages(value, f"{where}: prompt"), where)


def _plain(value: Any) -> Any:
    """Return what JSON can hold of a value; None in place of anything else."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (str, int, float, bool)) else None


PROMPT = DataFormat(
    noun="prompts",
    layout=lambda section: "kept",
    open=open_prompts,
    texts=prompt_texts,
)
