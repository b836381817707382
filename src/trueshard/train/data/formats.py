"""The table of the formats of data: a file each, and a line here."""

from __future__ import annotations

from typing import Any

from trueshard.train.config import DataSection
from trueshard.train.data.chat import CHAT
from trueshard.train.data.data_format import DataFormat, Format, FormatInputs
from trueshard.train.data.preference import PREFERENCE
from trueshard.train.data.prompts import PROMPT
from trueshard.train.data.text import TEXT
from trueshard.train.data.tokenizer import pad_token
from trueshard.train.data.vision import VISION

FORMATS: dict[str, DataFormat] = {
    "text": TEXT,
    "chat": CHAT,
    "preference": PREFERENCE,
    "vision": VISION,
    "prompt": PROMPT,
}
"""Value of `data.format` → format; the values stand in `DataSection` too."""


def format_of(section: DataSection, length: int, tokenizer: Any, processor: Any) -> Format:
    """Return the format of `[data]`, for sequences or prompts of ``length`` tokens. ``processor``: for images."""
    vocabulary = 1 + max(tokenizer.get_vocab().values())
    inputs = FormatInputs(section, length, tokenizer, processor, pad_token(tokenizer), vocabulary)
    return FORMATS[section.format].open(inputs)
