"""Data of format "preference": two documents a record that begin with the same prompt; the answers are the targets.

`prompt`, `chosen` and `rejected` are strings, joined as they are with an end-of-text token at the end, or lists of
messages, which go through the chat template. Without `prompt`, it is the messages that both conversations share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from trueshard.errors import UserError
from trueshard.model import names
from trueshard.train.config import DataSection
from trueshard.train.data import chat
from trueshard.train.data.batches import Document, Sample, pad_pairs
from trueshard.train.data.data_format import DataFormat, Format, FormatInputs
from trueshard.train.data.sources import Fields, Record

PAIR = ("prompt", "chosen", "rejected")


def open_preference(inputs: FormatInputs) -> Format:
    """Return the format with a run's tokenizer."""
    encode = partial(encode_pairs, chat.ChatTemplate(inputs.tokenizer, answers_only=True))
    return Format("single", encode, paired, partial(pad_pairs, inputs.pad), inputs.vocabulary)


def pair_texts(section: DataSection, record: Record) -> Iterator[str]:
    """Yield the texts of prompt and answers."""
    for part in pair(record.fields, record.where):
        yield from [part] if isinstance(part, str) else chat.texts(part)


def paired(documents: Sequence[Document]) -> Sample:
    """Return ``chosen`` and ``rejected``, each a sample."""
    chosen, rejected = documents
    return {"chosen": chosen.sample(), "rejected": rejected.sample()}


def encode_pairs(template: chat.ChatTemplate, records: Sequence[Record], folder: Path) -> list[tuple[Document, ...]]:
    """Return two documents a record: the chosen and the rejected one."""
    documents: list[tuple[Document, ...]] = []
    for record in records:
        prompt, *answers = pair(record.fields, record.where)
        if isinstance(prompt, str):
            documents.append(tuple(_answered(template.tokenizer, prompt, answer) for answer in answers))
            continue
        sides = [
            template.render([*prompt, *side], f"{record.where}: {key}", record.fields.get("tools"), context=len(prompt))
            for key, side in zip(PAIR[1:], answers, strict=True)
        ]
        documents.append(tuple(template.documents(sides)))
    return documents


def _answered(tokenizer: Any, prompt: str, answer: str) -> Document:
    question, reply = tokenizer([prompt, answer], add_special_tokens=False)["input_ids"]
    ids = np.asarray([*question, *reply, tokenizer.eos_token_id], dtype=np.int64)
    return Document(ids, np.arange(len(ids)) >= len(question))


def pair(fields: Fields, where: str) -> tuple[Any, Any, Any]:
    """Return prompt, chosen and rejected: all strings, or all lists of messages. Raises `UserError` otherwise."""
    prompt, chosen, rejected = values = tuple(fields.get(key) for key in PAIR)
    for key, value in zip(PAIR[1:], values[1:], strict=True):
        if value is None:
            near = names.nearest(key, fields, 1)
            problem = f"{where}: has no {key!r}, found keys {sorted(fields)}; correct it.{near}"
            raise UserError(problem.removesuffix("."))
    if chosen == rejected:
        problem = f"{where}: chosen and rejected are the same, so nothing is preferred"
        raise UserError(f"{problem}; correct it, or leave it out")
    strings = [isinstance(value, str) for value in values]
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


PREFERENCE = DataFormat(
    noun="preferences",
    layout=lambda section: "single",
    open=open_preference,
    texts=pair_texts,
    rows=2,
)
