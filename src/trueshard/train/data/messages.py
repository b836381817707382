"""Conversations: messages of a role and a content, whatever form a record has them in.

- `messages` with `role` and `content`, or `conversations` with `from` and `value` ("human" and "gpt" are the user and
  the assistant).
- A content is a string, or parts of type "text" and "image". Without parts, "<image>" in the text stands for the next
  of the record's `images`; images that nothing stands for come before the first text of the user.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from trueshard import names
from trueshard.errors import UserError
from trueshard.train.data.records import Fields
from trueshard.train.data.tokenizer import IMAGE

Message = dict[str, Any]

ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant", "observation": "tool"}
"""Other words for the roles of ``messages``."""
KNOWN = ("system", "developer", "user", "assistant", "tool", "function")
FORMS = (("messages", "role", "content"), ("conversations", "from", "value"))


def conversation(fields: Fields, where: str) -> list[Message]:
    """The messages of a record. Raises `UserError` that names the place for a record that has none."""
    for key, role, content in FORMS:
        if fields.get(key) is not None:
            return messages(fields[key], f"{where}: {key}", role, content)
    raise UserError(
        f'{where}: wanted a list under "messages" (or "conversations"), found keys {sorted(fields)}; correct it.'
        f"{''.join(names.nearest(key, ['messages', 'conversations'], 1) for key in list(fields)[:1])}".removesuffix(".")
    )


def messages(value: Any, where: str, role: str = "role", content: str = "content") -> list[Message]:
    """A list of messages in the form of ``messages``; ``role`` and ``content``: the keys that they have."""
    if isinstance(value, str):  # as a field of CSV holds them
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            raise UserError(f"{where} is a string, wanted a list of messages; correct it") from None
    if not isinstance(value, list) or not value:
        state = "empty" if value == [] else f"a {type(value).__name__}"
        raise UserError(f"{where} is {state}, wanted a list of messages; correct it")
    return [_message(entry, f"{where}[{number}]", role, content) for number, entry in enumerate(value)]


def place_images(found: list[Message], images: list[Any], where: str) -> list[Message]:
    """The messages with their images as parts ``{"type": "image", "image": …}``, where their text says so."""
    left = list(images)
    marked = any(IMAGE in message["content"] for message in found if isinstance(message["content"], str))
    parted = any(part["type"] == "image" for message in found for part in _parts(message["content"]))
    placed = []
    for message in found:
        content = message["content"]
        if isinstance(content, str):
            parts: list[Message] = []
            if left and not marked and not parted and message["role"] == "user":
                parts, left = [{"type": "image", "image": image} for image in left], []
            for number, text in enumerate(content.split(IMAGE)):
                parts += [_next_image(left, where)] if number else []
                parts += [{"type": "text", "text": text}] if text else []
        else:
            parts = [
                _next_image(left, where) if part["type"] == "image" and "image" not in part else part
                for part in content
            ]
        placed.append({**message, "content": parts})
    if left:
        raise UserError(f"{where}: {len(left)} of {len(images)} images have no place in the messages; correct it")
    return placed


def texts(found: list[Message]) -> Iterator[str]:
    """What the messages say."""
    for message in found:
        if isinstance(message["content"], str):
            yield message["content"]
        else:
            yield from (part["text"] for part in message["content"] if part["type"] == "text")


def _message(entry: Any, where: str, role: str, content: str) -> Message:
    if not isinstance(entry, dict):
        raise UserError(f"{where} is a {type(entry).__name__}, wanted an object with {role!r} and {content!r}")
    entry = {key: value for key, value in entry.items() if value is not None}  # as Parquet has what is left out
    who = entry.get(role)
    if not isinstance(who, str):
        raise UserError(f"{where} has no {role!r} (a string) but keys {sorted(entry)}; correct it")
    known = ROLES.get(who.lower(), who.lower())
    if known not in KNOWN:
        wanted = ", ".join(KNOWN)
        raise UserError(f"{where}: unknown role {who!r}, wanted one of {wanted}.{names.nearest(who, KNOWN, 1)}")
    said = entry.get(content)
    if said is None and "tool_calls" in entry:
        said = ""
    if isinstance(said, list):
        said = [_part(part, f"{where}.{content}[{number}]") for number, part in enumerate(said)]
    elif not isinstance(said, str):
        found = f"a {type(said).__name__} under {content!r}" if said is not None else f"keys {sorted(entry)}"
        raise UserError(f"{where}: wanted {content!r}, a string or a list of parts, found {found}; correct it")
    rest = {key: value for key, value in entry.items() if key not in (role, content)}
    return {"role": known, "content": said, **rest}


def _part(part: Any, where: str) -> Message:
    part = {key: value for key, value in part.items() if value is not None} if isinstance(part, dict) else {}
    if part.get("type") == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if part.get("type") == "image":
        given = [part[key] for key in ("image", "path", "url") if key in part]
        return {"type": "image", **({"image": given[0]} if given else {})}
    raise UserError(
        f'{where}: wanted a part of type "text" with a "text", or of type "image", found {part!r:.80}; correct it'
    )


def _parts(content: Any) -> list[Message]:
    return content if isinstance(content, list) else []


def _next_image(left: list[Any], where: str) -> Message:
    if not left:
        raise UserError(f'{where}: a message has a place for an image that "images" does not hold; correct it')
    return {"type": "image", "image": left.pop(0)}
