"""The formats of data: how records become documents, and documents samples and batches.

- Text: an end-of-text token follows each document. Documents are joined and cut into sequences without padding: the
  last target of one is the first input of the next.
- Chat: see ``chat``. Vision: see ``vision``.
- Preferences are two documents a record that begin with the same prompt; the answers are the targets. `prompt`,
  `chosen` and `rejected` are strings, joined as they are with an end-of-text token at the end, or lists of messages,
  which go through the chat template. Without `prompt`, the prompt is the messages that both conversations share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from trueshard.errors import UserError
from trueshard.model import names
from trueshard.train.config import DataSection
from trueshard.train.data.chat import ChatTemplate, Message, chat_texts, encode_chats, flat, messages, texts
from trueshard.train.data.samples import Collate, Document, Sample, packed, pad_ends, pad_pairs, stack, whole
from trueshard.train.data.sources import Fields, Record, string
from trueshard.train.data.vision import VisionCollate, encode_vision

Encode = Callable[[Sequence[Record]], list[tuple[Document, ...]]]
"""Records → the documents of each. Raises `UserError` that names the record."""
Layout = Literal["joined", "packed", "single", "kept"]
"""joined: documents follow each other without a gap, and are cut into sequences on reading. packed: several documents
share a sequence. single: a sample is one record. kept: the same, as JSON that becomes tokens with its batch."""


@dataclass(frozen=True)
class Format:
    """The way the data of a run are stored and read."""

    layout: Layout
    encoder: Callable[[Path], Encode]
    """Called with the folder of the data, for files beside the documents."""
    sample: Callable[[Sequence[Document]], Sample]
    """Makes a sample of the documents of a sequence; unused for the layouts "joined" and "kept"."""
    collate: Collate
    vocabulary: int | None
    """Number of token ids; None: documents are bytes of JSON."""

    @property
    def cut(self) -> bool:
        """True if a document longer than a sequence is cut when it is read."""
        return self.layout in ("packed", "single")


def format_of(section: DataSection, length: int, tokenizer: Any, processor: Any) -> Format:
    """Return the format of `[data]`, for sequences of ``length`` inputs. ``processor``: for the format "vision"."""
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    vocabulary = 1 + max(tokenizer.get_vocab().values())
    if section.format == "text":
        encode: Encode = partial(encode_texts, tokenizer, section.field)
        return Format("joined", lambda _: encode, single, stack, vocabulary)
    if section.format == "chat":
        encode = partial(encode_chats, ChatTemplate(tokenizer, section.answers_only))
        if not section.packing:
            return Format("single", lambda _: encode, single, partial(pad_ends, pad), vocabulary)
        return Format("packed", lambda _: encode, partial(packed, length=length, pad=pad), stack, vocabulary)
    if section.format == "preference":
        encode = partial(encode_pairs, ChatTemplate(tokenizer, answers_only=True))
        return Format("single", lambda _: encode, paired, partial(pad_pairs, pad), vocabulary)
    collate = VisionCollate(processor, length, section.answers_only)
    return Format("kept", lambda folder: partial(encode_vision, folder), single, collate, None)


def texts_of(section: DataSection) -> Callable[[Record], Iterator[str]]:
    """Return the function that yields the texts of a record, to train a tokenizer on; images need a ready one."""
    functions = {"chat": chat_texts, "preference": pair_texts}
    return functions.get(section.format) or partial(plain_texts, section.field)


def single(documents: Sequence[Document]) -> Sample:
    """Return the sample of one document."""
    (document,) = documents
    return document.sample()


def paired(documents: Sequence[Document]) -> Sample:
    """Return ``chosen`` and ``rejected``, each a sample."""
    chosen, rejected = documents
    return {"chosen": chosen.sample(), "rejected": rejected.sample()}


def encode_texts(tokenizer: Any, field: str, records: Sequence[Record]) -> list[tuple[Document, ...]]:
    """Return one document a record, or none for blank text."""
    said = [text for record in records for text in plain_texts(field, record)]
    kept = [text for text in said if text.strip()]
    found = iter(tokenizer(kept, add_special_tokens=False)["input_ids"] if kept else [])
    end = tokenizer.eos_token_id
    return [(whole(np.array([*next(found), end], np.int64)),) if text.strip() else () for text in said]


def plain_texts(field: str, record: Record) -> Iterator[str]:
    """Yield the text of a record."""
    yield string(record.fields, field, record.where, "data.field")


def encode_pairs(template: ChatTemplate, records: Sequence[Record]) -> list[tuple[Document, ...]]:
    """Return two documents a record: the chosen and the rejected one."""
    found: list[tuple[Document, ...]] = []
    for record in records:
        prompt, chosen, rejected = pair(record.fields, record.where)
        if isinstance(prompt, str):
            found.append(tuple(_answered(template.tokenizer, prompt, str(answer)) for answer in (chosen, rejected)))
            continue
        sides = [
            template.render([*prompt, *side], f"{record.where}: {key}", record.fields.get("tools"), asked=len(prompt))
            for key, side in (("chosen", chosen), ("rejected", rejected))
        ]
        found.append(tuple(template.documents(sides)))
    return found


def _answered(tokenizer: Any, prompt: str, answer: str) -> Document:
    asked, said = tokenizer([prompt, answer], add_special_tokens=False)["input_ids"]
    ids = np.asarray([*asked, *said, tokenizer.eos_token_id], dtype=np.int64)
    return Document(ids, np.arange(len(ids)) >= len(asked))


def pair_texts(record: Record) -> Iterator[str]:
    """Yield the prompt and both answers of a record."""
    for part in pair(record.fields, record.where):
        yield from [part] if isinstance(part, str) else texts(part)


KEYS = ("prompt", "chosen", "rejected")


def pair(fields: Fields, where: str) -> tuple[Any, Any, Any]:
    """Return prompt, chosen and rejected: all strings, or all lists of messages. Raises `UserError` otherwise."""
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
    first, second = (_flat(fields[key], f"{where}: {key}", where) for key in KEYS[1:])
    if prompt is not None:
        return _flat(prompt, f"{where}: prompt", where), first, second
    shared = 0
    while shared < min(len(first), len(second)) and first[shared] == second[shared]:
        shared += 1
    if not shared:
        raise UserError(f"{where}: has no 'prompt', and chosen and rejected begin differently; add it")
    return first[:shared], first[shared:], second[shared:]


def _flat(value: Any, place: str, where: str) -> list[Message]:
    return [flat(message, where) for message in messages(value, place)]
