"""The protocol of a format: how records become documents, documents sequences, and these samples and batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from trueshard.errors import UserError
from trueshard.text import nearest
from trueshard.train.data import chat
from trueshard.train.data.batches import (
    Batch,
    Document,
    Documents,
    Sample,
    packed,
    pad_ends,
    stack,
)
from trueshard.train.data.config import DataSection
from trueshard.train.data.cutting import PIECE
from trueshard.train.data.sources import START, DataSource, Fields, Place, Record, TextFile
from trueshard.train.data.tokenizer import pad_token

Layout = Literal["joined", "packed", "single", "kept"]
"""joined: documents follow each other without a gap, and are cut into sequences on reading. packed: several documents
share a sequence. single: a sample is one record, padded in a batch. kept: one record, as JSON that becomes tokens with
its batch."""
Part = str | list[chat.Message]

RECORDS_AT_ONCE = 256
"""Records, or pieces of them, that are tokenised together: a fast tokenizer spreads one call over all cores."""
CHARACTERS_AT_ONCE = 16 * PIECE
"""Characters in them from which on they are no more: the tokens of a character take some 100 bytes meanwhile."""
CUT, SPLIT, LONG = "cut at the end", "split", "left out as longer"
UNLEARNT = "left out as no answer is within that"
"""Words for what is done to a record that is longer than a sequence."""


class Format:
    """A format with the tokenizer and the settings of a run; ``length``: maximum tokens of a sequence or a prompt."""

    noun: ClassVar[str]  # name of such data, in messages
    rows: ClassVar[int] = 1  # rows of a batch that a record becomes
    columns: ClassVar[Sequence[tuple[str, ...]]] = ()  # keys, each set of which shows a record to be of this format
    long: ClassVar[Sequence[str]] = ("cut", "drop", "split", "error")  # values of `data.long`; the first without it
    omitted: ClassVar[str] = UNLEARNT  # what is said of a record without documents
    limit: ClassVar[str] = "train.sequence_length"
    by_name: ClassVar[str] = ""  # reason for which keys alone do not choose it, and what to set
    cuts: bool | None = None  # as in ``Cutter``; for text
    at_once: int = 1  # groups of records that may be encoded at the same time
    conversational: bool = False  # for some formats from their first record on: their texts are messages
    layout: Layout = "single"

    def __init__(self, section: DataSection, length: int, tokenizer: Any, processor: Any) -> None:
        self.section, self.length, self.tokenizer, self.processor = section, length, tokenizer, processor
        self.layout = self.layout_of(section)
        self.masked = self.layout in ("packed", "single")  # only some tokens are targets
        if section.long is not None and section.long not in self.long:
            remedy = f"use {' or '.join(map(repr, self.long))}" if self.long else "remove it"
            raise UserError(f'data.long: "{section.long}" does not go with data.format = "{section.format}"; {remedy}')
        # Number of token ids; None: documents are bytes of JSON.
        self.vocabulary = None if self.layout == "kept" else 1 + max(tokenizer.get_vocab().values())

    @classmethod
    def layout_of(cls, section: DataSection) -> Layout:
        """Return the layout, known before a tokenizer is, so that a forecast can make batches of the same form."""
        return "single" if cls.layout == "packed" and not section.packing else cls.layout

    @classmethod
    def parts(cls, section: DataSection, record: Record) -> Sequence[Part]:
        """Return the texts and conversations of a record; a single conversation if it is kept."""
        raise NotImplementedError

    @classmethod
    def texts(cls, section: DataSection, record: Record) -> Iterator[str | TextFile]:
        """Yield the texts of a record, to train a tokenizer on."""
        for part in cls.parts(section, record):
            yield from chat.texts(part) if isinstance(part, list) else [part]

    def encode(self, records: Sequence[Record], folder: Path) -> list[Documents]:
        """Return the documents of each record; ``folder``: for files beside them. `UserError` names a wrong record."""
        raise NotImplementedError

    def fitted(self, record: Record, documents: Documents) -> tuple[list[Documents], str]:
        """Return the documents of a record, a tuple for each sequence that has some, and what was done to them, if any.

        Raises `UserError` for a long one if that is an error.
        """
        if not documents or not self.masked:
            return [documents][: len(documents)], "" if documents or self.layout == "joined" else self.omitted
        length = self.length
        if (longest := max(len(document.ids) - 1 for document in documents)) > length:
            word = self.section.long or self.long[0]
            self.check_long(record, longest)
            if word == "drop":
                return [], LONG
            starts = range(0, longest, length) if word == "split" else (0,)
            pieces = [tuple(document.piece(start, length) for document in documents) for start in starts]
            done = SPLIT if word == "split" else CUT
        else:
            pieces, done = [documents], ""
        kept = [piece for piece in pieces if all(document.counted[1:].any() for document in piece)]
        return kept, done if kept else UNLEARNT

    def check_long(self, record: Record, tokens: int) -> None:
        """Raise `UserError` for a record of more tokens than fit, if `data.long` says so."""
        if self.section.long == "error":
            raise UserError(
                f"{record.where}: has {tokens:,} tokens, more than {self.limit} = {self.length:,}; raise that, shorten "
                "it, or set data.long to what is to be done"
            )

    def sample(self, documents: Documents) -> Sample:
        """Return the sample of a sequence's documents; for the layouts "packed" and "single"."""
        if self.layout == "packed":
            return packed(documents, self.length, pad_token(self.tokenizer))
        (document,) = documents
        return document.sample()

    def collate(self, samples: Sequence[Sample]) -> Batch:
        """Return the batch of some samples; those of one record each are padded."""
        return pad_ends(pad_token(self.tokenizer), samples) if self.layout == "single" else stack(samples)

    def split(self, record: Record) -> Iterator[Record]:
        """Yield a record, or one for each piece of its text, if that is long and the pieces have its tokens."""
        yield record

    def documents(
        self, source: DataSource, folder: Path, start: Place = START, skip: int = 0
    ) -> Iterator[list[tuple[Record, Documents]]]:
        """Iterate over groups of records of a source and the documents of each, before any is cut to a sequence.

        They begin ``skip`` records, or pieces of one, after the place ``start``.
        """
        return (self.encoded(group, folder) for group in self.groups(source, start, skip))

    def encoded(self, group: list[Record], folder: Path) -> list[tuple[Record, Documents]]:
        """Return the records of a group with the documents of each, as ``encode`` makes them."""
        return list(zip(group, self.encode(group, folder), strict=True))

    def groups(self, source: DataSource, start: Place, skip: int) -> Iterator[list[Record]]:
        """Iterate over the groups of records that ``documents`` encodes."""
        group: list[Record] = []
        characters = 0
        pieces = (piece for whole in source.records(start) for piece in self.split(whole))
        for record in islice(pieces, skip, None):
            group.append(record)
            characters += text_length(record.fields)
            if characters >= CHARACTERS_AT_ONCE or len(group) == RECORDS_AT_ONCE:
                yield group
                group, characters = [], 0
        if group:
            yield group

    @cached_property
    def template(self) -> chat.ChatTemplate:
        """The tokenizer's chat template."""
        return chat.ChatTemplate(self.tokenizer, self.section.answers_only)

    def opening(self, prompt: str) -> str | None:
        """Return the text that a model of these data reads for a prompt; None if it needs one."""
        if self.conversational and prompt:
            return self.template.prompt([{"role": "user", "content": prompt}], "sample.prompt")
        return prompt or None

    def notes(self) -> list[str]:
        """Return a line on each thing that is wrong with the targets of what was encoded."""
        return [f"{where}: {note}" for note, where in self.template.notes.items()] if self.conversational else []

    def _answered(self, prompt: str, answer: str) -> Document:
        question, reply = self.tokenizer([prompt, answer], add_special_tokens=False)["input_ids"]
        ids = np.array([*question, *reply, self.tokenizer.eos_token_id])
        return Document(ids, np.arange(len(ids)) >= len(question))


def text_length(value: Any) -> int:
    """Return the length of all texts in a value of JSON."""
    if isinstance(value, str | bytes):
        return len(value)
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(map(text_length, values))


def lacking(key: str, problem: str, fields: Fields, where: str) -> UserError:
    near = nearest(key, fields, 1)
    return UserError(f"{where}: {problem}, found keys {sorted(fields)}; correct it.{near}".removesuffix("."))


def strings(keys: Sequence[str], record: Record, wanted: str = "strings", optional: str = "") -> list[str]:
    """Return the strings under some keys, the last of which is the answer. Raises `UserError` that names another."""
    values = [record.fields.get(key) for key in keys]
    for key, value in zip(keys, values, strict=True):
        if value is None and key != optional:
            raise lacking(key, f"has no {key!r}", record.fields, record.where)
    if not all(isinstance(value, str | None) for value in values):
        kinds = ", ".join(f"{key} {type(value).__name__}" for key, value in zip(keys, values, strict=True))
        raise UserError(f"{record.where}: wanted {wanted}, found {kinds}; correct it")
    if not str(values[-1]).strip():
        raise lacking(keys[-1], f"has an empty {keys[-1]!r}", record.fields, record.where)
    return [value or "" for value in values]
