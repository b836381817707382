"""Conversations: their messages, in whatever form a record has them, and their tokens through a chat template.

- `messages` with `role` and `content`, or `conversations` with `from` and `value` ("human" and "gpt" mean user and
  assistant).
- A content is a string, or parts of type "text" and "image". Without parts, "<image>" in the text stands for the next
  of the record's `images`; images without a mark come before the first text of the user.
- The targets are the assistant's turns, as the template marks them (`{% generation %}`). Without marks, the
  conversation is rendered up to the beginning and up to the end of each turn, and the text between is the target, with
  the token that ends the turn. Both must be prefixes of the whole.
- A message of the assistant with `weight` 0 (as OpenAI writes it) or `train` false is no target.
- `tools`, and the arguments of calls, may be JSON in a string: which form a template takes is tried.
- Targets are found as spans of characters, so that the whole is tokenised once, as it is when the model is used.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trueshard.errors import UserError, explained, one_line, with_kind
from trueshard.text import load_json, nearest
from trueshard.train.data.batches import Document
from trueshard.train.data.bounded import Failed, bounded
from trueshard.train.data.sources import Fields

_RENDERING = threading.Lock()
"""transformers keeps one compiled template a process, which collects the marked spans in itself: two streams that are
read in threads would mix theirs. Held over a fork: the child could not take what another thread held then."""
os.register_at_fork(before=_RENDERING.acquire, after_in_parent=_RENDERING.release, after_in_child=_RENDERING.release)

Message = dict[str, Any]
Span = tuple[int, int]
"""Half-open range of characters."""

ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant", "observation": "tool"}
ROLES |= {"function_call": "assistant"}
"""Other names of roles → the names in ``messages``."""
KNOWN = ("system", "developer", "user", "assistant", "tool", "function")
FORMS = (("messages", "role", "content"), ("conversations", "from", "value"))
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
MARK = "\uf8ff"
"""A character of private use: no text has it, and no template takes it away as white space."""
COMPARED = 50
"""Conversations whose targets are also found without the marks of the template."""


def conversation(fields: Fields, where: str) -> list[Message]:
    """Return the messages of a record. Raises `UserError` that names ``where`` if it has none."""
    for key, role, content in FORMS:
        if fields.get(key) is not None:
            turns = messages(fields[key], f"{where}: {key}", role, content)
            return with_system(fields, turns, where)
    near = nearest(next(iter(fields), ""), ["messages", "conversations"], 1)
    wanted = 'wanted a list under "messages" (or "conversations")'
    raise UserError(f"{where}: {wanted}, found keys {sorted(fields)}; correct it.{near}".removesuffix("."))


def with_system(fields: Fields, turns: list[Message], where: str) -> list[Message]:
    """Return messages with that of the record's key "system" before them."""
    if not (system := fields.get("system")):
        return turns
    if not isinstance(system, str) or turns[0]["role"] == "system":
        state = "is given twice, also as a message" if isinstance(system, str) else f"is a {type(system).__name__}"
        raise UserError(f"{where}: system {state}; correct it")
    return [{"role": "system", "content": system}, *turns]


def tools_of(fields: Fields, where: str) -> Any:
    """Return the tools of a record: a list, also if they are JSON in a string."""
    tools = fields.get("tools")
    if not isinstance(tools, str) or not tools.strip():
        return tools or None
    with explained(f"{where}: tools is no JSON", "correct it", ValueError, one_line):
        return load_json(tools) or None


def messages(value: Any, where: str, role: str = "role", content: str = "content") -> list[Message]:
    """Normalise a list of messages whose keys are ``role`` and ``content``. Raises `UserError` for anything else."""
    if isinstance(value, str):  # as in a field of CSV
        try:
            value = load_json(value)
        except ValueError:
            raise UserError(f"{where} is a string, wanted a list of messages; correct it") from None
    if not isinstance(value, list) or not value:
        state = "empty" if value == [] else f"a {type(value).__name__}"
        raise UserError(f"{where} is {state}, wanted a list of messages; correct it")
    return [_message(entry, f"{where}[{number}]", role, content) for number, entry in enumerate(value)]


def texts(turns: list[Message]) -> Iterator[str]:
    """Yield the texts of messages."""
    for message in turns:
        content = message["content"]
        yield from [content] if isinstance(content, str) else (part["text"] for part in content if "text" in part)


def flat(turns: list[Message], where: str) -> list[Message]:
    """Return the messages with each content one string. Raises `UserError` if one has an image."""
    contents = [message["content"] for message in turns if not isinstance(message["content"], str)]
    if any(part["type"] == "image" for parts in contents for part in parts):
        raise UserError(f'{where}: a message has an image; set data.format = "vision", or leave it out')
    return [{**message, "content": "".join(texts([message]))} for message in turns]


def _message(entry: Any, where: str, role: str, content: str) -> Message:
    if not isinstance(entry, dict):
        raise UserError(f"{where} is a {type(entry).__name__}, wanted an object with {role!r} and {content!r}")
    entry = {key: value for key, value in entry.items() if value is not None}  # Parquet has every key in each row
    word = entry.get(role)
    if not isinstance(word, str):
        raise UserError(f"{where} has no {role!r} (a string) but keys {sorted(entry)}; correct it")
    name = ROLES.get(word.lower(), word.lower())
    if name not in KNOWN:
        wanted = ", ".join(KNOWN)
        raise UserError(f"{where}: unknown role {word!r}, wanted one of {wanted}.{nearest(word, KNOWN, 1)}")
    value = entry.get(content)
    if value is None and "tool_calls" in entry:
        value = ""
    if isinstance(value, list):
        value = [_part(part, f"{where}.{content}[{number}]") for number, part in enumerate(value)]
    elif not isinstance(value, str):
        state = f"a {type(value).__name__} under {content!r}" if value is not None else f"keys {sorted(entry)}"
        raise UserError(f"{where}: wanted {content!r}, a string or a list of parts, found {state}; correct it")
    others = {key: value for key, value in entry.items() if key not in (role, content)}
    if word.lower() == "function_call":
        others["tool_calls"], value = [{"type": "function", "function": _call(value, where)}], ""
    weights = {key: others.pop(key) for key in ("weight", "train") if key in others}
    for key, weight in weights.items():
        if (isinstance(weight, bool) and key == "weight") or weight not in (0, 1):
            raise UserError(f"{where}: {key} is {weight!r:.80}, wanted 0 (no target) or 1; correct it")
        if weight and name != "assistant":
            raise UserError(
                f"{where}: a message of role {word!r} has a {key}, which only the assistant's have; remove it"
            )
    others |= {"weight": int(min(weights.values()))} if weights else {}
    return {"role": name, "content": value, **others}


def _call(value: Any, where: str) -> Any:
    with explained(f"{where}: no call of a function", 'write {"name": …, "arguments": …}', ValueError, one_line):
        call = load_json(value) if isinstance(value, str) else value
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise ValueError("it has no name")
        return call


def _part(part: Any, where: str) -> Message:
    part = {key: value for key, value in part.items() if value is not None} if isinstance(part, dict) else {}
    if part.get("type") == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if part.get("type") == "image":
        paths = [part[key] for key in ("image", "path", "url") if key in part]
        return {"type": "image", **({"image": paths[0]} if paths else {})}
    raise UserError(
        f'{where}: wanted a part of type "text" with a "text", or of type "image", found {part!r:.80}; correct it'
    )


class Rendered(NamedTuple):
    """A conversation as text, and the spans of its targets."""

    text: str
    spans: list[Span]


class ChatTemplate:
    """Renders and tokenises conversations with a tokenizer's chat template."""

    def __init__(self, tokenizer: Any, answers_only: bool) -> None:
        self.tokenizer, self.answers_only = tokenizer, answers_only
        self._marked = GENERATION.search(tokenizer.chat_template) is not None
        added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._ends = (*tokenizer.all_special_tokens, *added)
        self._render: Callable[..., tuple[str, Any]] = self._rendered
        self._compared = 0
        self.notes: dict[str, str] = {}
        """Problem of the targets, with its remedy → place of the first such conversation."""

    def render(self, turns: list[Message], where: str, tools: Any = None, context: int = 0) -> Rendered:
        """Render a conversation; its first ``context`` messages have no targets. Raises `UserError` if that fails."""
        text, marked = self._text(turns, where, tools)
        whole = _Written(turns, text, where, lambda some, prompt=False: self._text(some, where, tools, prompt)[0])
        for at in range(len(marked) - 1, 0, -1):  # a turn may be marked in parts
            if marked[at - 1][1] == marked[at][0]:
                marked[at - 1 : at + 1] = [(marked[at - 1][0], marked[at][1])]
        begin = whole.beginning(context)
        answers = [number for number, message in enumerate(turns) if message["role"] == "assistant"]
        silent = [number for number in answers if turns[number].get("weight") == 0]
        answer_span = partial(whole.answer, ends=self._ends)
        if not self.answers_only:
            spans = [(begin, len(text))]
        elif self._marked:
            if len(marked) == len(answers):  # else, what a message becomes is found below
                marked = [span for number, span in zip(answers, marked, strict=True) if number not in silent]
                silent = []
            spans = [span for span in marked if span[0] >= begin]
        else:
            spans = [answer_span(number) for number in answers if number >= context]
        for first, last in map(answer_span, silent):
            spans = [part for a, b in spans for part in ((a, min(b, first)), (max(a, last), b)) if part[0] < part[1]]
        if not any(first < last for first, last in spans):
            what = "nothing that the assistant says (and whose weight is not 0), so nothing to learn"
            raise UserError(f"{where}: there is {what}; leave it out")
        if self.answers_only:
            answers = [number for number in answers if number >= context and turns[number].get("weight") != 0]
            notes = [*self._wrong_targets(turns, text, spans, answers)]
            if self._marked and self._compared < COMPARED and not notes:
                self._compared += 1
                with suppress(UserError):  # they cannot be found
                    notes = [*_unmarked(text, spans, map(answer_span, answers))]
            for note in notes:
                self.notes.setdefault(note, where)
        return Rendered(text, spans)

    def _wrong_targets(self, turns: list[Message], text: str, spans: list[Span], answers: list[int]) -> Iterator[str]:
        """Yield what is wrong with the targets of a conversation; ``answers``: the messages that are learnt."""
        asked = "".join(texts(turns[:1])).strip() if turns[0]["role"] != "assistant" else ""
        if any(first <= (text.find(asked) if asked else -1) < last for first, last in spans):
            remedy = "move its {% generation %}, or set data.answers_only = false if that is meant"
            yield f"the chat template makes the prompt a target, too; {remedy}"
        unlearnt = "after what the assistant says, so the model does not learn to stop"
        for first, last in spans:
            if text[first:last].strip() in self._ends and len(spans) == len(answers):
                remedy = "set tokenizer.chat_template to one that writes it"
                yield f"the chat template leaves out what the assistant says; {remedy}"
            if text[first:last].rstrip().endswith(self._ends):
                continue
            after = text[last:].lstrip()
            if (end := max((end for end in self._ends if after.startswith(end)), key=len, default=None)) is not None:
                yield f"{end} is no target {unlearnt}; move it into {{% generation %}} of tokenizer.chat_template"
            elif not any(end in text[first:] for end in self._ends):
                remedy = "set tokenizer.chat_template to one that does"
                yield f"the chat template writes no special token {unlearnt}; {remedy}"
        rest = text[max(last for _, last in spans) :].strip()
        rest = rest.removeprefix(next(filter(rest.startswith, self._ends), "")).strip()
        if turns[-1]["role"] != "assistant":
            yield f"nothing is learnt from the last message, of the {turns[-1]['role']}; answer it, or leave it out"
        elif rest and answers and answers[-1] == len(turns) - 1:
            yield f"the chat template writes {rest:.40} after the last turn; remove it from tokenizer.chat_template"

    def prompt(self, turns: list[Message], where: str, tools: Any = None) -> str:
        """Return a conversation as text, up to where the assistant begins to answer. Raises `UserError`."""
        return self._text(turns, where, tools, prompt=True)[0]

    def ends_turn(self) -> str | None:
        """Return the special token after what the assistant says; None if there is none."""
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "."}]
        before, after = self._text(turns[:1], "", None, prompt=True)[0], self._text(turns, "", None)[0]
        ending = after[len(before) :].lstrip().removeprefix(".").lstrip() if after.startswith(before) else ""
        return max((end for end in self._ends if ending.startswith(end)), key=len, default=None)

    def documents(self, rendered: Sequence[Rendered]) -> list[Document]:
        """Tokenise conversations; tokens that begin in a span are targets."""
        encoded = self.tokenizer(
            [chat.text for chat in rendered], add_special_tokens=False, return_offsets_mapping=True
        )
        return [
            Document(np.asarray(ids, dtype=np.int64), _inside(np.asarray(offsets, dtype=np.int64), chat.spans))
            for ids, offsets, chat in zip(encoded["input_ids"], encoded["offset_mapping"], rendered, strict=True)
        ]

    @contextmanager
    def bounded(self) -> Iterator[None]:
        """Render with limits of time, memory and text, in a process of its own, while records are prepared."""
        with bounded(self._rendered) as self._render:
            yield
        self._render = self._rendered

    def _text(self, turns: list[Message], where: str, tools: Any, prompt: bool = False) -> tuple[str, list[Span]]:
        """Return the text, and the spans that the template marks."""
        template = f"the chat template{getattr(self.tokenizer, 'template_place', '')}"
        remedy = "correct it, or set tokenizer.chat_template"
        turns = [{key: value for key, value in message.items() if key != "weight"} for message in turns]
        for message in turns:
            if isinstance(calls := message.get("tool_calls"), list):
                message["tool_calls"] = [self._call(call) for call in calls]
        with explained(f"{where}: {template} refuses it", remedy, detail=_reason):
            return self._render(turns, tools, prompt)

    def _call(self, call: Any) -> Any:
        """Return a call with its arguments in the form that the template takes: an object, or JSON in a string."""
        if not isinstance(call, dict):
            return call
        if "function" in call:
            return {**call, "function": self._call(call["function"])}
        arguments = call.get("arguments")
        if isinstance(arguments, str) and self._takes_objects:
            with suppress(ValueError):
                return {**call, "arguments": load_json(arguments)}
        is_object = isinstance(arguments, dict) and not self._takes_objects
        return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)} if is_object else call

    @cached_property
    def _takes_objects(self) -> bool:
        call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        try:
            return bool(self._render(turns, None, False))
        except Exception:  # whatever a template raises; `Failed` while it is bounded
            return False

    def _rendered(self, turns: list[Message], tools: Any, prompt: bool) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        with _RENDERING:
            rendered: Any = render_jinja_template(
                conversations=[turns],
                tools=tools,
                chat_template=self.tokenizer.chat_template,
                return_assistant_tokens_mask=self._marked,
                add_generation_prompt=prompt,
                **self.tokenizer.special_tokens_map,
            )
        text, marked = rendered
        return str(text[0]), list(marked[0]) if marked else []


class _Written(NamedTuple):
    """A conversation as a template writes it, in which messages are looked for without marks."""

    turns: list[Message]
    text: str
    where: str
    write: Callable[..., str]

    def beginning(self, count: int) -> int:
        """Return where the messages after the first ``count`` begin."""
        before = self.write(self.turns[:count]) if count else ""
        return len(before) if self.text.startswith(before) else self.extent(count)[0]

    def answer(self, number: int, ends: tuple[str, ...]) -> Span:
        """Return the span of an answer and the token, one of ``ends``, that ends it.

        It is what follows the prompt, up to the end of the conversation as it was then. Where a template writes a turn
        otherwise once more follow (Qwen3 leaves out thoughts, gpt-oss ends the last one with another token), it is
        looked for in the whole: from the words that ask for an answer, over what changes with the message, to the next
        special token.
        """
        text, turns = self.text, self.turns
        asked, after = self.write(turns[:number], True), self.write(turns[: number + 1])
        first, last = len(asked), len(after)
        if not (text.startswith(asked) and text.startswith(after)):
            begin, end = self.extent(number)
            if not text.startswith(asked):
                first, before = begin, self.write(turns[:number]) if number else asked
                low, head = self.extent(number - 1)[1] if number else 0, asked.removeprefix(before)
                sizes = (size for size in range(len(head), 0, -1) if text.find(head[:size], low, begin) >= 0)
                if asked.startswith(before) and (size := next(sizes, 0)):
                    first = text.rfind(head[:size], low, begin) + size
            if not text.startswith(after):
                at, size = min(((at, -len(one)) for one in ends if (at := text.find(one, end)) >= 0), default=(end, 0))
                return first, at - size
        answer = text[first:last].rstrip()
        # A line break after the token that ends a turn is nobody's; without that token, it is the end.
        return first, first + len(answer) if answer.endswith(ends) else last

    def extent(self, number: int) -> Span:
        """Return the span of the text that changes with a message. Raises `UserError` if none does."""
        changed = self.write([*self.turns[:number], _changed(self.turns[number]), *self.turns[number + 1 :]])
        if self.text == changed:
            raise UserError(
                f"{self.where}: the chat template writes earlier messages otherwise once more follow, so what the "
                "assistant says cannot be told apart; set tokenizer.chat_template to one with {% generation %}, or "
                "data.answers_only = false"
            )
        first = _shared(self.text, changed)
        return first, len(self.text) - _shared(self.text[first:][::-1], changed[first:][::-1])


def _unmarked(text: str, spans: list[Span], answers: Iterable[Span]) -> Iterator[str]:
    """Yield that the marks of a template leave out a part of an answer that is found without them."""
    for first, last in answers:
        places = [at for at in range(first, last) if not text[at].isspace()]
        if left := [at for at in places if not any(begin <= at < end for begin, end in spans)]:
            shown = text[left[0] : min(left[-1] + 1, left[0] + 60)]
            yield f"{{% generation %}} of the chat template leaves out {shown!r} of an answer; move it, if wrongly"


def _changed(value: Any) -> Any:
    """Return a message with all its texts changed at both ends."""
    if isinstance(value, dict):
        return {key: part if key in ("role", "type") else _changed(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_changed(part) for part in value]
    return f"{MARK}{value}{MARK}" if isinstance(value, str) else value


def _shared(one: str, other: str) -> int:
    """Return how many characters two texts have in common at their beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, Failed) else with_kind(error)


def _inside(offsets: npt.NDArray[np.int64], spans: Sequence[Span]) -> npt.NDArray[np.bool_]:
    """Return bool [tokens]: True if a token begins in a span. ``offsets``: [tokens, 2], its range of characters."""
    begins, ends = offsets.reshape(-1, 2).T
    inside = np.zeros(len(begins), dtype=np.bool_)
    for first, last in spans:
        inside |= (begins >= first) & (begins < last) & (ends > begins)
    return inside
