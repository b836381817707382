"""Conversations as tokens: through a chat template, with the assistant's own words as targets.

- Where the template marks what the assistant says (`{% generation %}`), that counts, exactly.
- Elsewhere the conversation is rendered up to each turn of the assistant and up to its end, and what lies between
  counts, the token that ends the turn included. Both must be beginnings of the whole; a template that writes earlier
  turns anew is an error, as nothing would tell which tokens are whose.
- Places are found in the text, and tokens by where they stand in it, so that the whole is tokenised once, as it is when
  the model is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trueshard.errors import UserError, one_line
from trueshard.train.data.messages import Message, conversation, texts
from trueshard.train.data.records import Located
from trueshard.train.data.samples import Document

MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
Span = tuple[int, int]


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, and where in it (characters, half open) the targets stand."""

    text: str
    spans: list[Span]


class Template:
    """A chat template and what goes with it.

    Args:
        tokenizer: with its ``chat_template``.
        answers_only: only what the assistant says counts.
    """

    def __init__(self, tokenizer: Any, answers_only: bool) -> None:
        self.tokenizer, self.answers_only = tokenizer, answers_only
        self._marks = MARKS.search(tokenizer.chat_template) is not None
        added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._ends = (*tokenizer.all_special_tokens, *added)

    def render(self, found: list[Message], where: str, tools: Any = None, asked: int = 0) -> Rendered:
        """The conversation as text. ``asked``: so many first messages are no targets, whoever speaks.

        Raises `UserError` that names the place if the template refuses it, or nothing in it is a target.
        """
        text, marked = self._text(found, where, tools)
        begin = len(self._prefix(found[:asked], text, where, tools)) if asked else 0
        if not self.answers_only:
            spans = [(begin, len(text))]
        elif self._marks:
            spans = [span for span in marked if span[0] >= begin]
        else:
            spans = [
                self._turn(found, number, text, where, tools)
                for number, message in enumerate(found)
                if message["role"] == "assistant" and number >= asked
            ]
        if not any(first < last for first, last in spans):
            raise UserError(f"{where}: there is nothing that the assistant says, so nothing to learn; leave it out")
        return Rendered(text, spans)

    def documents(self, rendered: Sequence[Rendered]) -> list[Document]:
        """Tokens, and which of them stand in a span."""
        found = self.tokenizer([each.text for each in rendered], add_special_tokens=False, return_offsets_mapping=True)
        return [
            Document(np.asarray(ids, dtype=np.int64), inside(np.asarray(places, dtype=np.int64), each.spans))
            for ids, places, each in zip(found["input_ids"], found["offset_mapping"], rendered, strict=True)
        ]

    def _turn(self, found: list[Message], number: int, text: str, where: str, tools: Any) -> Span:
        """What the template writes for a turn of the assistant, from after its head to the token that ends it."""
        begin = len(self._prefix(found[:number], text, where, tools, prompt=True))
        end = len(self._prefix(found[: number + 1], text, where, tools))
        said = text[begin:end].rstrip()
        # A line break after the token that ends a turn belongs to nobody; where there is no such token, it is the end.
        return begin, begin + len(said) if said.endswith(self._ends) else end

    def _prefix(self, part: list[Message], text: str, where: str, tools: Any, prompt: bool = False) -> str:
        written, _ = self._text(part, where, tools, prompt) if part or prompt else ("", [])
        if not text.startswith(written):
            raise UserError(
                f"{where}: the chat template writes earlier messages otherwise once more follow, so what the assistant "
                "says cannot be told apart; set tokenizer.chat_template to one with {% generation %}, or "
                "data.answers_only = false"
            )
        return written

    def _text(
        self, found: list[Message], where: str, tools: Any = None, prompt: bool = False
    ) -> tuple[str, list[Span]]:
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered: Any = render_jinja_template(
                conversations=[found],
                tools=tools,
                chat_template=self.tokenizer.chat_template,
                return_assistant_tokens_mask=self._marks,
                add_generation_prompt=prompt,
                **self.tokenizer.special_tokens_map,
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            detail = one_line(error, 200)
            raise UserError(
                f"{where}: the chat template refuses it ({type(error).__name__}: {detail}); correct it, or set "
                "tokenizer.chat_template"
            ) from None
        text, marked = rendered
        return str(text[0]), list(marked[0]) if marked else []


class ChatFormat:
    """Records with ``messages``: one document each.

    Args:
        tokenizer: with its ``chat_template``; None: only ``texts`` is asked for.
        answers_only: only what the assistant says counts.
    """

    def __init__(self, tokenizer: Any, answers_only: bool) -> None:
        self._template = Template(tokenizer, answers_only)

    def encode(self, records: Sequence[Located]) -> list[tuple[Document, ...]]:
        """The document of each of the records."""
        rendered = [self._template.render(spoken(each), each.where, each.fields.get("tools")) for each in records]
        return [(document,) for document in self._template.documents(rendered)]


def chat_texts(record: Located) -> Iterator[str]:
    """What is said in a record."""
    return texts(spoken(record))


def spoken(record: Located) -> list[Message]:
    """The messages of a record, each with its content as one string."""
    return [flat(message, record.where) for message in conversation(record.fields, record.where)]


def flat(message: Message, where: str) -> Message:
    """A message whose content is a string. Raises `UserError` if it has an image."""
    if isinstance(message["content"], str):
        return message
    if any(part["type"] == "image" for part in message["content"]):
        raise UserError(f'{where}: a message has an image; set data.format = "vision", or leave it out')
    return {**message, "content": "".join(texts([message]))}


def inside(places: npt.NDArray[np.int64], spans: Sequence[Span]) -> npt.NDArray[np.bool_]:
    """Which tokens begin in a span; ``places``: `[tokens, 2]`, the characters that each stands for."""
    begins, ends = places.reshape(-1, 2).T
    found = np.zeros(len(begins), dtype=np.bool_)
    for first, last in spans:
        found |= (begins >= first) & (begins < last) & (ends > begins)
    return found
