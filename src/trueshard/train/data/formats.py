"""What `data.format` decides: how records become documents, and documents samples and batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from trueshard.train.config import Config
from trueshard.train.data.chat import ChatFormat, chat_texts
from trueshard.train.data.collate import Pad, PadPairs, stack
from trueshard.train.data.preference import PreferenceFormat, pair_texts
from trueshard.train.data.records import Located
from trueshard.train.data.samples import Collate, Document, Samples
from trueshard.train.data.sequences import Cut, Kept, Packed, Pairs, Single
from trueshard.train.data.store import Store
from trueshard.train.data.text import TextFormat, text_texts
from trueshard.train.data.vision import VisionCollate, VisionFormat, vision_texts


class Encoder(Protocol):
    """From records to documents."""

    def encode(self, records: Sequence[Located]) -> list[tuple[Document, ...]]:
        """The documents of each of the records. Raises `UserError` that names the place."""


@dataclass(frozen=True)
class Format:
    """How the data of a run are read and looked at."""

    encoder: Callable[[Path], Encoder]
    """For a folder in which it may put what stands beside documents."""
    view: Callable[[Store, int, int], Samples]
    """The samples in a range of the store."""
    collate: Collate
    pad: int
    """The token that stands where there is none."""
    joined: bool = False
    """Documents follow each other without a gap, and are cut into sequences when they are looked at."""
    packed: bool = False
    """Several documents share a sequence."""
    cut: bool = True
    """A document that is longer than a sequence is cut when it is read."""
    kept: bool = False
    """Records stay what they are until a batch is made."""


def texts_of(config: Config) -> Callable[[Located], Iterator[str]]:
    """What a record says, for training a tokenizer."""
    spoken = {"chat": chat_texts, "preference": pair_texts, "vision": vision_texts}
    return spoken.get(config.data.format) or partial(text_texts, config.data.field)


def format_of(config: Config, tokenizer: Any, processor: Any) -> Format:
    """The format that `[data]` names. `processor`: of images and text, for "vision"."""
    section, length = config.data, config.train.sequence_length
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    if section.format == "text":
        text = TextFormat(tokenizer, section.field)
        return Format(lambda _: text, lambda store, a, b: Cut(store, a, b, length), stack, pad, joined=True, cut=False)
    if section.format == "chat":
        chat = ChatFormat(tokenizer, section.answers_only)
        if not section.packing:
            return Format(lambda _: chat, Single, Pad(pad), pad)
        return Format(lambda _: chat, lambda store, a, b: Packed(store, a, b, length, pad), stack, pad, packed=True)
    if section.format == "preference":
        preference = PreferenceFormat(tokenizer)
        return Format(lambda _: preference, Pairs, PadPairs(pad), pad)
    return Format(VisionFormat, Kept, VisionCollate(processor, length, section.answers_only), pad, cut=False, kept=True)
