"""The formats of data: how records become documents, and documents samples and batches.

- Text: an end-of-text token follows each document. Documents are joined and cut into sequences without padding: the
  last target of one is the first input of the next.
- Chat and vision: see ``chat``.
- Prompts are strings, or messages for the chat template, kept as JSON with the record, whose fields are for the reward.
- Preferences are two documents a record that begin with the same prompt; the answers are the targets. `prompt`,
  `chosen` and `rejected` are strings, joined as they are with an end-of-text token at the end, or lists of messages,
  which go through the chat template. Without `prompt`, the prompt is the messages that both conversations share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, islice, takewhile
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from trueshard.errors import UserError
from trueshard.model import names
from trueshard.train.config import DataSection
from trueshard.train.data import chat, samples
from trueshard.train.data.samples import Collate, Document, Sample
from trueshard.train.data.sources import DataSource, Fields, Record
from trueshard.train.data.tokenizer import pad_token

Encode = Callable[[Sequence[Record], Path], list[tuple[Document, ...]]]
"""(records, folder for files beside the documents) → the documents of each. Raises `UserError` that names the record.
"""
Layout = Literal["joined", "packed", "single", "kept"]
"""joined: documents follow each other without a gap, and are cut into sequences on reading. packed: several documents
share a sequence. single: a sample is one record. kept: the same, as JSON that becomes tokens with its batch."""
Item = TypeVar("Item")

RECORDS_AT_ONCE = 256
"""Records that are tokenised together."""
BUFFER = 1024
"""Samples from which the next one is drawn."""
TOGETHER = 512
"""Documents that are packed together."""
Placed = tuple[Sample, str]
"""A sample and its origin."""
PAIR = ("prompt", "chosen", "rejected")


@dataclass(frozen=True)
class Format:
    """The way the data of a run are stored and read."""

    layout: Layout
    encode: Encode
    sample: Callable[[Sequence[Document]], Sample]
    """Makes a sample of the documents of a sequence; unused for the layouts "joined" and "kept"."""
    collate: Collate
    vocabulary: int | None
    """Number of token ids; None: documents are bytes of JSON."""

    @property
    def cut(self) -> bool:
        """True if a document longer than a sequence is cut when it is read, and only some tokens may be targets."""
        return self.layout in ("packed", "single")

    def documents(self, source: DataSource, folder: Path) -> Iterator[tuple[Record, tuple[Document, ...]]]:
        """Iterate over the records of a source and the documents of each, before any is cut."""
        for group in batched(source.records(), RECORDS_AT_ONCE):
            yield from zip(group, self.encode(group, folder), strict=True)


def format_of(section: DataSection, length: int, tokenizer: Any, processor: Any) -> Format:
    """Return the format of `[data]`, for sequences or prompts of ``length`` tokens. ``processor``: for images."""
    pad = pad_token(tokenizer)
    vocabulary = 1 + max(tokenizer.get_vocab().values())
    if section.format == "text":
        return Format("joined", partial(encode_texts, tokenizer, section.field), single, samples.stack, vocabulary)
    if section.format == "prompt":
        prompts = partial(chat.encode_prompts, chat.ChatTemplate(tokenizer, True), None if section.images else length)
        return Format("kept", prompts, single, samples.stack, None)
    if section.format == "vision":
        collate = chat.VisionCollate(processor, length, section.answers_only)
        return Format("kept", chat.encode_vision, single, collate, None)
    if section.format == "preference":
        pairs = partial(encode_pairs, chat.ChatTemplate(tokenizer, answers_only=True))
        return Format("single", pairs, paired, partial(samples.pad_pairs, pad), vocabulary)
    chats = partial(chat.encode_chats, chat.ChatTemplate(tokenizer, section.answers_only))
    if not section.packing:
        return Format("single", chats, single, partial(samples.pad_ends, pad), vocabulary)
    return Format("packed", chats, partial(samples.packed, length=length, pad=pad), samples.stack, vocabulary)


def texts_of(section: DataSection, record: Record) -> Iterator[str]:
    """Yield the texts of a record, to train a tokenizer on; images need a ready one."""
    if section.format == "preference":
        for part in pair(record.fields, record.where):
            yield from [part] if isinstance(part, str) else chat.texts(part)
    elif section.format == "prompt":
        prompt = chat.prompt_of(record)
        yield from [prompt] if isinstance(prompt, str) else chat.texts(prompt)
    elif section.format == "chat":
        yield from chat.texts(chat.spoken(record))
    else:
        yield plain_text(section.field, record)


def batched(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Yield consecutive items, ``size`` at a time."""
    remaining = iter(items)
    while group := list(islice(remaining, size)):
        yield group


def single(documents: Sequence[Document]) -> Sample:
    """Return the sample of one document."""
    (document,) = documents
    return document.sample()


def paired(documents: Sequence[Document]) -> Sample:
    """Return ``chosen`` and ``rejected``, each a sample."""
    chosen, rejected = documents
    return {"chosen": chosen.sample(), "rejected": rejected.sample()}


def encode_texts(tokenizer: Any, field: str, records: Sequence[Record], folder: Path) -> list[tuple[Document, ...]]:
    """Return one document a record, or none for blank text."""
    said = [plain_text(field, record) for record in records]
    kept = [text for text in said if text.strip()]
    found = iter(tokenizer(kept, add_special_tokens=False)["input_ids"] if kept else [])
    end = tokenizer.eos_token_id
    return [(samples.whole(np.array([*next(found), end], np.int64)),) if text.strip() else () for text in said]


def plain_text(field: str, record: Record) -> str:
    """Return the text of a record. Raises `UserError` that names what is there instead."""
    fields, value = record.fields, record.fields.get(field)
    if not isinstance(value, str):
        found = f"{type(value).__name__} under it" if field in fields else f"keys {sorted(fields)}"
        near = "" if field in fields else f".{names.nearest(field, fields)}".removesuffix(".")
        raise UserError(
            f"{record.where}: wanted an object with a string under {field!r}, found {found}; correct it, or set "
            f"data.field{near}"
        )
    return value


def encode_pairs(template: chat.ChatTemplate, records: Sequence[Record], folder: Path) -> list[tuple[Document, ...]]:
    """Return two documents a record: the chosen and the rejected one."""
    found: list[tuple[Document, ...]] = []
    for record in records:
        prompt, *answers = pair(record.fields, record.where)
        if isinstance(prompt, str):
            found.append(tuple(_answered(template.tokenizer, prompt, answer) for answer in answers))
            continue
        sides = [
            template.render([*prompt, *side], f"{record.where}: {key}", record.fields.get("tools"), asked=len(prompt))
            for key, side in zip(PAIR[1:], answers, strict=True)
        ]
        found.append(tuple(template.documents(sides)))
    return found


def _answered(tokenizer: Any, prompt: str, answer: str) -> Document:
    asked, said = tokenizer([prompt, answer], add_special_tokens=False)["input_ids"]
    ids = np.asarray([*asked, *said, tokenizer.eos_token_id], dtype=np.int64)
    return Document(ids, np.arange(len(ids)) >= len(asked))


def pair(fields: Fields, where: str) -> tuple[Any, Any, Any]:
    """Return prompt, chosen and rejected: all strings, or all lists of messages. Raises `UserError` otherwise."""
    prompt, chosen, rejected = found = tuple(fields.get(key) for key in PAIR)
    for key, value in zip(PAIR[1:], found[1:], strict=True):
        if value is None:
            near = names.nearest(key, fields, 1)
            said = f"{where}: has no {key!r}, found keys {sorted(fields)}; correct it.{near}"
            raise UserError(said.removesuffix("."))
    if chosen == rejected:
        said = f"{where}: chosen and rejected are the same, so nothing is preferred"
        raise UserError(f"{said}; correct it, or leave it out")
    strings = [isinstance(each, str) for each in found]
    if all(strings):
        return prompt, chosen, rejected
    if any(strings):
        kinds = ", ".join(f"{key} {type(value).__name__}" for key, value in zip(PAIR, found, strict=True))
        raise UserError(f"{where}: wanted three strings, or lists of messages, found {kinds}; correct it")
    first, second = (chat.flat(chat.messages(fields[key], f"{where}: {key}"), where) for key in PAIR[1:])
    if prompt is not None:
        return chat.flat(chat.messages(prompt, f"{where}: prompt"), where), first, second
    shared = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(first, second, strict=False)))
    if not shared:
        raise UserError(f"{where}: has no 'prompt', and chosen and rejected begin differently; add it")
    return first[:shared], first[shared:], second[shared:]


class SourceStream:
    """The samples of one source, read during training, without end, in sequences of ``length`` inputs.

    The order is that of the source, shuffled through a buffer by seed: the same on every rank and at every world size.
    At its end a stream starts again, in another order. Every rank reads everything and keeps its own samples; a resume
    reads again up to where the run stood.
    """

    def __init__(self, source: DataSource, form: Format, length: int) -> None:
        self._source, self._form, self._length = source, form, length

    def begin(self, seed: int) -> Iterator[Placed]:
        """Iterate from the first sample. Raises `UserError` for a damaged record, or a source without a sample."""
        self.check()
        for number in count():
            yield from shuffled(self._once(), seed + number)

    def check(self) -> None:
        """Read the first sample. Raises `UserError` as ``begin`` does."""
        if next(self._once(), None) is None:
            raise UserError(
                f"{self._source.key}: {self._source.name} does not fill one sequence of train.sequence_length = "
                f"{self._length}; give it more, or lower train.sequence_length"
            )

    def _once(self) -> Iterator[Placed]:
        if self._form.layout == "kept":
            for record in self._source.records():
                yield {"messages": chat.vision_messages(record), "where": record.where}, record.where
        elif self._form.layout == "joined":
            yield from self._joined()
        elif self._form.layout == "packed":
            for group in batched(self._documents(), TOGETHER):
                for members in samples.pack([len(document.ids) - 1 for (document,), _ in group], self._length):
                    parts = [group[number] for number in members]
                    together = [document for (document,), _ in parts]
                    yield self._form.sample(together), samples.span([each for _, each in parts])
        else:
            for documents, where in self._documents():
                yield self._form.sample(documents), where

    def _documents(self) -> Iterator[tuple[tuple[Document, ...], str]]:
        """Iterate over the documents of each record that has any, and its origin."""
        for record, found in self._form.documents(self._source, Path()):  # streamed formats put no files beside them
            if documents := samples.truncate(found, self._length) if self._form.cut else found:
                yield documents, record.where

    def _joined(self) -> Iterator[Placed]:
        tokens, places = np.empty(0, dtype=np.int64), []
        for (document,), where in self._documents():
            tokens = np.concatenate([tokens, document.ids])
            places.append(where)
            full = max(0, len(tokens) - 1) // self._length * self._length
            for start in range(0, full, self._length):
                yield samples.sequence(tokens, start, self._length), samples.span(places)
            if full:
                tokens, places = tokens[full:], [where]


def shuffled(placed: Iterable[Placed], seed: int) -> Iterator[Placed]:
    """Yield the samples, each drawn from the next ``BUFFER`` ones."""
    buffer: list[Placed] = []
    chances = samples.draws(seed, BUFFER)
    for sample in placed:
        if len(buffer) < BUFFER:
            buffer.append(sample)
            continue
        place = next(chances)
        yield buffer[place]
        buffer[place] = sample
    while buffer:
        place = next(chances) % len(buffer)
        buffer[place], buffer[-1] = buffer[-1], buffer[place]
        yield buffer.pop()
