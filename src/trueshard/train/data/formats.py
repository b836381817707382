"""The formats of data: how records become documents, and documents samples and batches. A class each.

- "text": documents, each followed by an end-of-text token, joined and cut into sequences without padding. The last
  target of a sequence is the first input of the next.
- "chat": conversations through a chat template.
- "completion": `prompt` and `completion`, strings that are joined as they are, or lists of messages for the chat
  template. "instruction": `instruction`, `input` and `output`, as Alpaca has them, as a conversation of two messages.
  Of both the prompt is no target, unless `answers_only` is false.
- "preference": two documents a record that begin with the same prompt; the answers are the targets. `prompt`, `chosen`
  and `rejected` are strings, joined as they are, or lists of messages, which go through the chat template. Without
  `prompt`, it is the messages that both conversations share.
- "vision": conversations with images. "prompt": a string or messages, with all fields of their record for the reward.
  Both are kept as JSON that becomes tokens with each batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from trueshard.errors import UserError
from trueshard.text import nearest
from trueshard.train import plugins
from trueshard.train.data import chat
from trueshard.train.data.addresses import kind
from trueshard.train.data.batches import (
    Batch,
    Document,
    Documents,
    Sample,
    all_targets,
    json_document,
    packed,
    pad_ends,
    stack,
)
from trueshard.train.data.config import DataSection
from trueshard.train.data.cutting import PIECE, Cutter
from trueshard.train.data.sources import READERS, START, DataSource, Fields, HubSource, Place, Record, TextFile, find
from trueshard.train.data.tokenizer import fast_backend, pad_token
from trueshard.train.data.vision import VisionCollate, store_images, vision_messages

Layout = Literal["joined", "packed", "single", "kept"]
"""joined: documents follow each other without a gap, and are cut into sequences on reading. packed: several documents
share a sequence. single: a sample is one record, padded in a batch. kept: one record, as JSON that becomes tokens with
its batch."""
Part = str | list[chat.Message]

RECORDS_AT_ONCE = 256
"""Records, or pieces of them, that are tokenised together: a fast tokenizer spreads one call over all cores."""
CHARACTERS_AT_ONCE = 16 * PIECE
"""Characters in them from which on they are no more: the tokens of a character take some 100 bytes meanwhile."""
PAIR = ("prompt", "chosen", "rejected")


class Format:
    """A format with the tokenizer and the settings of a run; ``length``: maximum tokens of a sequence or a prompt."""

    noun: ClassVar[str]  # name of such data, in messages
    rows: ClassVar[int] = 1  # rows of a batch that a record becomes
    columns: ClassVar[Sequence[tuple[str, ...]]] = ()  # keys, each set of which shows a record to be of this format
    cuts: bool | None = None  # as in ``Cutter``; for text
    at_once: int = 1  # groups of records that may be encoded at the same time
    conversational: bool = False  # for some formats from their first record on: their texts are messages
    layout: Layout = "single"

    def __init__(self, section: DataSection, length: int, tokenizer: Any, processor: Any) -> None:
        self.section, self.length, self.tokenizer, self.processor = section, length, tokenizer, processor
        self.layout = self.layout_of(section)
        self.cut = self.layout in ("packed", "single")  # long documents are cut, and only some tokens are targets
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
        """Return the text that a model of these data reads for a prompt; None without a prompt, but for text."""
        if self.conversational and prompt:
            return self.template.prompt([{"role": "user", "content": prompt}], "sample.prompt")
        return prompt if prompt or isinstance(self, TextFormat) else None

    def notes(self) -> list[str]:
        """Return a line on each thing that is wrong with the targets of what was encoded."""
        return [f"{where}: {note}" for note, where in self.template.notes.items()] if self.conversational else []

    def _answered(self, prompt: str, answer: str) -> Document:
        question, reply = self.tokenizer([prompt, answer], add_special_tokens=False)["input_ids"]
        ids = np.array([*question, *reply, self.tokenizer.eos_token_id])
        return Document(ids, np.arange(len(ids)) >= len(question))


class TextFormat(Format):
    noun = "text"
    layout = "joined"

    @classmethod
    def parts(cls, section: DataSection, record: Record) -> list[Any]:
        return [_plain_text(section.field, record)]

    def split(self, record: Record) -> Iterator[Record]:
        """Yield the pieces of a text from where the record begins; none if it is blank."""
        (text,) = self.parts(self.section, record)
        begin, is_file = record.begin, isinstance(text, TextFile)
        if not is_file and not begin and len(text) <= PIECE:
            yield from [record] if text.strip() else []
            return
        pieces = self._cutter.pieces(text if is_file else text[begin:], record.where)
        first = piece = next(pieces)
        for following in pieces:
            yield record.of({self.section.field: piece}, begin, more=True)
            begin += len(piece.encode()) if is_file else len(piece)
            piece = following
        if record.begin or piece is not first or piece.strip():
            yield record.of({self.section.field: piece}, begin)

    def encode(self, records: Sequence[Record], folder: Path) -> list[Documents]:
        """Return one document a record."""
        texts, end = [record.fields[self.section.field] for record in records], [self.tokenizer.eos_token_id]
        if self._backend is not None:
            encoded = [tokens.ids for tokens in self._backend.encode_batch_fast(texts, add_special_tokens=False)]
        else:
            encoded = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return [
            (all_targets(np.array(ids if record.more else ids + end, dtype=np.int64), record.more),)
            for record, ids in zip(records, encoded, strict=True)
        ]

    @cached_property
    def _backend(self) -> Any:
        return fast_backend(self.tokenizer)

    @cached_property
    def _cutter(self) -> Cutter:
        return Cutter(self._backend, f"the tokenizer {self.tokenizer.name_or_path}".rstrip())

    @property
    def at_once(self) -> int:  # type: ignore[override]  # two: one fills the cores while of the other an array is made
        return 1 if self._backend is None else 2

    @property
    def cuts(self) -> bool | None:
        return self._cutter.cuts

    @cuts.setter
    def cuts(self, value: bool | None) -> None:
        self._cutter.cuts = value


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


class InstructionFormat(ChatFormat):
    noun = "instructions"
    columns = (("instruction", "output"),)

    @classmethod
    def parts(cls, section: DataSection, record: Record) -> list[list[chat.Message]]:
        asked, more, answer = _strings(("instruction", "input", "output"), record, optional="input")
        content = f"{asked}\n\n{more}" if more.strip() else asked
        return [[{"role": "user", "content": content}, {"role": "assistant", "content": answer}]]


class CompletionFormat(Format):
    noun = "prompts with completions"
    columns = (("prompt", "completion"),)
    layout = "packed"

    @classmethod
    def parts(cls, section: DataSection, record: Record) -> Sequence[Part]:
        return _completion(record)

    def encode(self, records: Sequence[Record], folder: Path) -> list[Documents]:
        return [tuple(self._encode(record, *_completion(record))) for record in records]

    def _encode(self, record: Record, prompt: Any, completion: Any) -> list[Document]:
        context = len(prompt) if self.section.answers_only else 0
        if isinstance(prompt, str):
            return [self._answered(prompt, completion) if context else self._answered("", prompt + completion)]
        self.conversational, tools = True, chat.tools_of(record.fields, record.where)
        return self.template.documents([self.template.render([*prompt, *completion], record.where, tools, context)])


class PreferenceFormat(Format):
    noun = "preferences"
    rows = 2
    columns = (("chosen", "rejected"),)

    @classmethod
    def parts(cls, section: DataSection, record: Record) -> tuple[Any, Any, Any]:
        return _pair(record.fields, record.where)

    def encode(self, records: Sequence[Record], folder: Path) -> list[Documents]:
        """Return two documents a record: the chosen and the rejected one."""
        return [self._encode(record) for record in records]

    def _encode(self, record: Record) -> Documents:
        prompt, *answers = _pair(record.fields, record.where)
        if isinstance(prompt, str):
            return tuple(self._answered(prompt, answer) for answer in answers)
        self.conversational = True
        tools, context = chat.tools_of(record.fields, record.where), len(prompt)
        rendered = [
            self.template.render([*prompt, *answer], f"{record.where}: {key}", tools, context)
            for key, answer in zip(PAIR[1:], answers, strict=True)
        ]
        return tuple(self.template.documents(rendered))

    def sample(self, documents: Documents) -> Sample:
        return {side: document.sample() for side, document in zip(PAIR[1:], documents, strict=True)}

    def collate(self, samples: Sequence[Sample]) -> Batch:
        """Return [2 × pairs, length]: the ``chosen`` sides, then the ``rejected`` ones in the same order."""
        return super().collate([sample[side] for side in PAIR[1:] for sample in samples])


class VisionFormat(Format):
    noun = "conversations with images"
    columns = (("messages", "images"), ("conversations", "images"))
    conversational = True
    layout = "kept"

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


class PromptFormat(Format):
    noun = "prompts"
    layout = "kept"

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
            if len(self.tokenizer(text, add_special_tokens=False)["input_ids"]) > self.length:
                return ()
        return (json_document({"prompt": prompt, "record": {**record.fields, "prompt": prompt}}),)


OWN: dict[str, type[Format]] = {
    "text": TextFormat,
    "chat": ChatFormat,
    "preference": PreferenceFormat,
    "vision": VisionFormat,
    "prompt": PromptFormat,
    "completion": CompletionFormat,
    "instruction": InstructionFormat,
}
FORMATS: dict[str, type[Format]] = plugins.Table("data.format", OWN)
"""Value of `data.format` → format."""


def find_format(section: DataSection) -> str:
    """Return the format that the keys of the first record show; "text" if they show none. `UserError` names several."""
    record = None
    with suppress(UserError):  # of what cannot be read, preparation tells
        source = find(section)[0]
        if isinstance(source, HubSource) or kind(source.files[0]) in READERS:
            record = next(source.records(), None)
    if record is None or record.fields.get(section.field) is not None:
        return "text"
    sets = [(set(keys), name) for name, form in OWN.items() for keys in form.columns]
    shown = [(keys, name) for keys, name in sets if all(record.fields.get(key) not in (None, []) for key in keys)]
    names = [name for keys, name in shown if not any(keys < others for others, _ in shown)]
    if len(set(names)) > 1:
        raise UserError(f"{record.where}: its keys show several formats; set data.format to {' or '.join(names)}")
    return names[0] if names else "text"


# Fields of records


def text_length(value: Any) -> int:
    """Return the length of all texts in a value of JSON."""
    if isinstance(value, str | bytes):
        return len(value)
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(map(text_length, values))


def _plain_text(field: str, record: Record) -> str | TextFile:
    """Return the text of a record. Raises `UserError` that names what is there instead."""
    fields, value = record.fields, record.fields.get(field)
    if isinstance(value, str | TextFile):
        return value
    state = f"{type(value).__name__} under it" if field in fields else f"keys {sorted(fields)}"
    near = "" if field in fields else f".{nearest(field, fields)}".removesuffix(".")
    raise UserError(
        f"{record.where}: wanted an object with a string under {field!r}, found {state}; correct it, or set "
        f"data.field{near}"
    )


def _lacking(key: str, problem: str, fields: Fields, where: str) -> UserError:
    near = nearest(key, fields, 1)
    return UserError(f"{where}: {problem}, found keys {sorted(fields)}; correct it.{near}".removesuffix("."))


def _pair(fields: Fields, where: str) -> tuple[Any, Any, Any]:
    """Return prompt, chosen and rejected: all strings, or all lists of messages. Raises `UserError` otherwise."""
    prompt, chosen, rejected = values = tuple(fields.get(key) for key in PAIR)
    for key in PAIR[1:]:
        if fields.get(key) is None:
            raise _lacking(key, f"has no {key!r}", fields, where)
    if chosen == rejected:
        raise UserError(
            f"{where}: chosen and rejected are the same, so nothing is preferred; correct it, or leave it out"
        )
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


def _completion(record: Record) -> list[Any]:
    """Return prompt and completion: both strings, or both lists of messages. Raises `UserError` otherwise."""
    fields, where = record.fields, record.where
    if not all(isinstance(fields.get(key), list) for key in ("prompt", "completion")):
        return _strings(("prompt", "completion"), record, "strings, or lists of messages")
    return [chat.flat(chat.messages(fields[key], f"{where}: {key}"), where) for key in ("prompt", "completion")]


def _strings(keys: Sequence[str], record: Record, wanted: str = "strings", optional: str = "") -> list[str]:
    """Return the strings under some keys, the last of which is the answer. Raises `UserError` that names another."""
    values = [record.fields.get(key) for key in keys]
    for key, value in zip(keys, values, strict=True):
        if value is None and key != optional:
            raise _lacking(key, f"has no {key!r}", record.fields, record.where)
    if not all(isinstance(value, str | None) for value in values):
        kinds = ", ".join(f"{key} {type(value).__name__}" for key, value in zip(keys, values, strict=True))
        raise UserError(f"{record.where}: wanted {wanted}, found {kinds}; correct it")
    if not str(values[-1]).strip():
        raise _lacking(keys[-1], f"has an empty {keys[-1]!r}", record.fields, record.where)
    return [value or "" for value in values]


def _prompt(record: Record) -> str | list[chat.Message]:
    value, where = record.fields.get("prompt"), record.where
    if value is None or isinstance(value, str):
        return _strings(["prompt"], record)[0]
    return chat.flat(chat.messages(value, f"{where}: prompt"), where)
