"""Conversations: their messages, in whatever form a record has them, and their tokens through a chat template.

- `messages` with `role` and `content`, or `conversations` with `from` and `value` ("human" and "gpt" mean user and
  assistant).
- A content is a string, or parts of type "text" and "image". Without parts, "<image>" in the text stands for the next
  of the record's `images`; images without a mark come before the first text of the user.
- The targets are the assistant's turns, as the template marks them (`{% generation %}`). Without marks, the
  conversation is rendered up to the beginning and up to the end of each turn, and the text between is the target, with
  the token that ends the turn. Both must be prefixes of the whole.
- Targets are found as spans of characters, so that the whole is tokenised once, as it is when the model is used.
- With images, conversations are kept as JSON records, and turned into tokens and pixels with each batch: the
  thread that makes batches reads the images; data are only checked before.
- The processor expands an image into many tokens. Targets are found in the text without images, and shifted by the
  number of tokens of the images before them; every token is compared, so that no shift goes unnoticed.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from trueshard.errors import UserError, cut_line, explained
from trueshard.model import names
from trueshard.train.data.samples import Batch, Document, Ids, Sample, pad_ends, whole
from trueshard.train.data.sources import Fields, Record
from trueshard.train.data.tokenizer import IMAGE

Message = dict[str, Any]
Span = tuple[int, int]
"""Half-open range of characters."""

ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant", "observation": "tool"}
"""Other names of roles → the names in ``messages``."""
KNOWN = ("system", "developer", "user", "assistant", "tool", "function")
FORMS = (("messages", "role", "content"), ("conversations", "from", "value"))
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def conversation(fields: Fields, where: str) -> list[Message]:
    """Return the messages of a record. Raises `UserError` that names ``where`` if it has none."""
    for key, role, content in FORMS:
        if fields.get(key) is not None:
            return messages(fields[key], f"{where}: {key}", role, content)
    raise UserError(
        f'{where}: wanted a list under "messages" (or "conversations"), found keys {sorted(fields)}; correct it.'
        f"{''.join(names.nearest(key, ['messages', 'conversations'], 1) for key in list(fields)[:1])}".removesuffix(".")
    )


def messages(value: Any, where: str, role: str = "role", content: str = "content") -> list[Message]:
    """Normalise a list of messages whose keys are ``role`` and ``content``. Raises `UserError` for anything else."""
    if isinstance(value, str):  # as in a field of CSV
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            raise UserError(f"{where} is a string, wanted a list of messages; correct it") from None
    if not isinstance(value, list) or not value:
        state = "empty" if value == [] else f"a {type(value).__name__}"
        raise UserError(f"{where} is {state}, wanted a list of messages; correct it")
    return [_message(entry, f"{where}[{number}]", role, content) for number, entry in enumerate(value)]


def place_images(found: list[Message], images: list[Any], where: str) -> list[Message]:
    """Return the messages with contents as parts, and each image as ``{"type": "image", "image": …}`` in its place."""
    left, mark = list(images), {"type": "image"}
    placed = [{**message, "content": _parts(message["content"])} for message in found]
    first = next((message for message in placed if message["role"] == "user"), None)
    if first is not None and not any(part["type"] == "image" for message in placed for part in message["content"]):
        first["content"] = [mark] * len(left) + first["content"]
    for message in placed:
        for number, part in enumerate(message["content"]):
            if part == mark:
                if not left:
                    raise UserError(f'{where}: a message has a place for an image that "images" lacks; correct it')
                message["content"][number] = {**mark, "image": left.pop(0)}
    if left:
        raise UserError(f"{where}: {len(left)} of {len(images)} images have no place in the messages; correct it")
    return placed


def _parts(content: str | list[Message]) -> list[Message]:
    """Return a content as parts; "<image>" becomes an image without a path."""
    if not isinstance(content, str):
        return list(content)
    parts: list[Message] = []
    for number, text in enumerate(content.split(IMAGE)):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": text}] if text else []
    return parts


def texts(found: list[Message]) -> Iterator[str]:
    """Yield the texts of messages."""
    for message in found:
        content = message["content"]
        yield from [content] if isinstance(content, str) else (part["text"] for part in content if "text" in part)


def flat(found: list[Message], where: str) -> list[Message]:
    """Return the messages with each content one string. Raises `UserError` if one has an image."""
    contents = [message["content"] for message in found if not isinstance(message["content"], str)]
    if any(part["type"] == "image" for parts in contents for part in parts):
        raise UserError(f'{where}: a message has an image; set data.format = "vision", or leave it out')
    return [{**message, "content": "".join(texts([message]))} for message in found]


def _message(entry: Any, where: str, role: str, content: str) -> Message:
    if not isinstance(entry, dict):
        raise UserError(f"{where} is a {type(entry).__name__}, wanted an object with {role!r} and {content!r}")
    entry = {key: value for key, value in entry.items() if value is not None}  # Parquet has every key in each row
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

    def render(self, found: list[Message], where: str, tools: Any = None, asked: int = 0) -> Rendered:
        """Render a conversation; its first ``asked`` messages have no targets. Raises `UserError` if that fails."""
        text, marked = self._text(found, where, tools)

        def prefix(count: int, prompt: bool = False) -> int:
            """Return the length of the first messages in the text."""
            written, _ = self._text(found[:count], where, tools, prompt) if count or prompt else ("", [])
            if not text.startswith(written):
                raise UserError(
                    f"{where}: the chat template writes earlier messages otherwise once more follow, so what the "
                    "assistant says cannot be told apart; set tokenizer.chat_template to one with {% generation %}, or "
                    "data.answers_only = false"
                )
            return len(written)

        begin = prefix(asked)
        if not self.answers_only:
            spans = [(begin, len(text))]
        elif self._marked:
            spans = [span for span in marked if span[0] >= begin]
        else:
            spans = []
            for number, message in enumerate(found):
                if message["role"] == "assistant" and number >= asked:
                    first, last = prefix(number, prompt=True), prefix(number + 1)
                    said = text[first:last].rstrip()
                    # A line break after the token that ends a turn is nobody's; without that token, it is the end.
                    spans.append((first, first + len(said) if said.endswith(self._ends) else last))
        if not any(first < last for first, last in spans):
            raise UserError(f"{where}: there is nothing that the assistant says, so nothing to learn; leave it out")
        return Rendered(text, spans)

    def prompt(self, found: list[Message], where: str, tools: Any = None) -> str:
        """Return a conversation as text, up to where the assistant begins to answer. Raises `UserError`."""
        return self._text(found, where, tools, prompt=True)[0]

    def ends_turn(self) -> str | None:
        """Return the special token after what the assistant says; None if there is none."""
        talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "."}]
        before, after = self._text(talk[:1], "", None, prompt=True)[0], self._text(talk, "", None)[0]
        said = after[len(before) :].lstrip().removeprefix(".").lstrip() if after.startswith(before) else ""
        return max((end for end in self._ends if said.startswith(end)), key=len, default=None)

    def documents(self, rendered: Sequence[Rendered]) -> list[Document]:
        """Tokenise conversations; tokens that begin in a span are targets."""
        found = self.tokenizer([each.text for each in rendered], add_special_tokens=False, return_offsets_mapping=True)
        return [
            Document(np.asarray(ids, dtype=np.int64), _inside(np.asarray(places, dtype=np.int64), each.spans))
            for ids, places, each in zip(found["input_ids"], found["offset_mapping"], rendered, strict=True)
        ]

    def _text(self, found: list[Message], where: str, tools: Any, prompt: bool = False) -> tuple[str, list[Span]]:
        """Return the text, and the spans that the template marks."""
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        problem = f"{where}: the chat template refuses it"
        remedy = "correct it, or set tokenizer.chat_template"
        with explained(problem, remedy, (TemplateError, TypeError, ValueError, KeyError)):
            rendered: Any = render_jinja_template(
                conversations=[found],
                tools=tools,
                chat_template=self.tokenizer.chat_template,
                return_assistant_tokens_mask=self._marked,
                add_generation_prompt=prompt,
                **self.tokenizer.special_tokens_map,
            )
        text, marked = rendered
        return str(text[0]), list(marked[0]) if marked else []


def encode_chats(template: ChatTemplate, records: Sequence[Record], folder: Path) -> list[tuple[Document, ...]]:
    """Return one document a record."""
    rendered = [template.render(spoken(each), each.where, each.fields.get("tools")) for each in records]
    return [(document,) for document in template.documents(rendered)]


def spoken(record: Record) -> list[Message]:
    """Return the messages of a record, each content one string."""
    return flat(conversation(record.fields, record.where), record.where)


def encode_prompts(
    template: ChatTemplate, most: int | None, records: Sequence[Record], folder: Path
) -> list[tuple[Document, ...]]:
    """Return one document a record, the prompt and all fields as JSON; none for a prompt of more than ``most`` tokens.

    Images held as bytes go to `images/` in ``folder``; what else JSON cannot hold is left out of the fields.
    """
    found: list[tuple[Document, ...]] = []
    for record in records:
        prompt = prompt_of(record, images=most is None)
        if most is None:
            _store_images([prompt], folder)  # type: ignore[list-item]
        else:
            tools = record.fields.get("tools")
            text = prompt if isinstance(prompt, str) else template.prompt(prompt, record.where, tools)
            if len(template.tokenizer(text, add_special_tokens=False)["input_ids"]) > most:
                found.append(())
                continue
        kept = {"prompt": prompt, "record": _plain({**record.fields, "prompt": prompt})}
        found.append((whole(np.frombuffer(json.dumps(kept).encode(), dtype=np.uint8)),))
    return found


def prompt_of(record: Record, images: bool = False) -> str | list[Message]:
    """Return the prompt of a record: a string, or messages, with ``images`` in place. Raises `UserError`."""
    value, where = record.fields.get("prompt"), record.where
    if images:
        asked = [{"role": "user", "content": value}] if isinstance(value, str) else value
        fields = {**record.fields, "messages": asked}
        return vision_messages(Record(fields, record.file, record.line, where, record.folder))
    if isinstance(value, str) and value.strip():
        return value
    if value is None or isinstance(value, str):
        state = "has no 'prompt'" if value is None else "has an empty 'prompt'"
        near = names.nearest("prompt", record.fields, 1)
        raise UserError(f"{where}: {state}, found keys {sorted(record.fields)}; correct it.{near}".removesuffix("."))
    return flat(messages(value, f"{where}: prompt"), where)


def _plain(value: Any) -> Any:
    """Return what JSON can hold of a value; None in place of anything else."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value if isinstance(value, (str, int, float, bool)) else None


def _inside(places: npt.NDArray[np.int64], spans: Sequence[Span]) -> npt.NDArray[np.bool_]:
    """Return bool [tokens]: True if a token begins in a span. ``places``: [tokens, 2], its range of characters."""
    begins, ends = places.reshape(-1, 2).T
    found = np.zeros(len(begins), dtype=np.bool_)
    for first, last in spans:
        found |= (begins >= first) & (begins < last) & (ends > begins)
    return found


# Conversations with images


def encode_vision(records: Sequence[Record], folder: Path) -> list[tuple[Document, ...]]:
    """Return one document a record: its messages as JSON. Images held as bytes go to `images/` in ``folder``."""
    conversations = [vision_messages(each) for each in records]
    _store_images(conversations, folder)
    return [(whole(np.frombuffer(json.dumps(found).encode(), dtype=np.uint8)),) for found in conversations]


def _store_images(conversations: Sequence[list[Message]], folder: Path) -> None:
    """Write images held as bytes to `images/` in ``folder``, and put their paths in their places."""
    for part in (part for found in conversations for message in found for part in message["content"]):
        if isinstance(part.get("image"), bytes):
            name = f"images/{hashlib.sha256(part['image']).hexdigest()[:32]}"
            (folder / "images").mkdir(exist_ok=True)
            (folder / name).write_bytes(part["image"])
            part["image"] = name


def vision_messages(record: Record) -> list[Message]:
    """Return the messages of a record with their images in place: checked absolute paths, or bytes."""
    where, images = record.where, record.fields.get("images", record.fields.get("image"))
    images = [] if images is None else images if isinstance(images, list) else [images]
    found = place_images(conversation(record.fields, where), images, where)
    if not any(part["type"] == "image" for message in found for part in message["content"]):
        # A rank with such a batch would not gather the weights that read images, while the others wait for it.
        raise UserError(f'{where}: has no image, which every record needs with data.format = "vision"; leave it out')
    for message in found:
        message["content"] = [_located(part, where, record.folder) for part in message["content"]]
    return found


def _located(part: Message, where: str, folder: Path) -> Message:
    """Make the path of an image absolute, and check the image."""
    if part["type"] != "image":
        return part
    image = part["image"]
    if isinstance(image, Mapping):  # as the `datasets` library stores it
        image = image.get("bytes") or image.get("path")
    if isinstance(image, str):
        image = str((folder / Path(image).expanduser()).absolute())
        if not Path(image).is_file():
            raise UserError(
                f"{where}: the image {image} does not exist; correct the path, which is relative to {folder}"
            )
    elif not isinstance(image, bytes):
        raise UserError(f"{where}: wanted the path of an image, found a {type(image).__name__}; correct it")
    read_image(image, where, verify=True)
    return {"type": "image", "image": image}


def read_image(image: str | bytes, where: str, verify: bool = False) -> Any:
    """Return an image, a path or bytes, in RGB; with ``verify``, only check it, without decoding."""
    from PIL import Image

    name = "an image in the data" if isinstance(image, bytes) else f"the image {image}"
    kinds = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
    refused = explained(f"{where}: {name} cannot be read", "replace it, or leave it out", kinds, cut_line)
    with refused, Image.open(io.BytesIO(image) if isinstance(image, bytes) else image) as opened:
        return opened.verify() if verify else opened.convert("RGB")


class VisionCollate:
    """Makes a batch of samples ``{"messages", "where"}``: ``input_ids``, ``targets``, ``attention_mask`` and the
    processor's other tensors, such as ``pixel_values``. Sequences longer than ``length`` inputs are cut at their
    end. Raises `UserError` for an image that cannot be read, or that the cut would remove.
    """

    def __init__(self, processor: Any, length: int, answers_only: bool) -> None:
        self._processor, self._length = processor, length
        self._tokenizer = processor.tokenizer
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        image, begin = getattr(processor, "image_token", IMAGE), getattr(processor, "boi_token", None)
        self._image = self._id(image)
        # The mark of an image in the text: some templates write the token that begins images, and the processor
        # puts the others after it.
        self._marks = [self._image] if begin is None else [self._image, self._id(begin)]
        self._template = ChatTemplate(self._tokenizer, answers_only)

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        rendered = [self._template.render(sample["messages"], sample["where"]) for sample in samples]
        images = []
        for sample in samples:
            parts = (part for message in sample["messages"] for part in message["content"] if part["type"] == "image")
            images.append([read_image(part["image"], sample["where"]) for part in parts])
        processed = self._process([each.text for each in rendered], images)
        plain = self._template.documents(rendered)
        rows = []
        for number, sample in enumerate(samples):
            ids = processed["input_ids"][number][processed["attention_mask"][number].bool()].numpy()
            rows.append(Document(ids, self._counted(ids, plain[number], images[number], sample["where"])))
        return self._batch(processed, rows, samples)

    def _batch(self, processed: Mapping[str, Any], rows: list[Document], samples: Sequence[Sample]) -> Batch:
        """Shift inputs and targets by one, cut and pad them, and cut every tensor of their shape likewise."""
        width = min(self._length, max(len(row.ids) for row in rows) - 1)
        for row, sample in zip(rows, samples, strict=True):
            if (row.ids[min(len(row.ids) - 1, width) :] == self._image).any():
                raise UserError(
                    f"{sample['where']}: its images end beyond {width} of {len(row.ids)} tokens; raise "
                    "train.sequence_length, or leave it out"
                )
        cut = [Document(row.ids[: width + 1], row.counted[: width + 1]) for row in rows]
        made = pad_ends(self._tokenizer.pad_token_id, [each.sample() for each in cut])
        padded = processed["input_ids"].shape
        for key, value in processed.items():
            if key not in made and isinstance(value, torch.Tensor):
                made[key] = value[:, :width] if value.shape[:2] == padded else value
        return made

    def _counted(self, ids: Ids, plain: Document, images: list[Any], where: str) -> Ids:
        """Map the targets of the text to the processor's tokens: bool [len(ids)]."""
        mark = next((each for each in self._marks if (plain.ids == each).any()), self._image)
        places = np.flatnonzero(plain.ids == mark)
        if len(places) == 1:
            grown = np.array([len(ids) - len(plain.ids)])
        else:
            text = self._tokenizer.convert_ids_to_tokens(mark)
            sizes = [self._process([text], [[image]])["input_ids"].shape[1] for image in images]
            grown = np.array(sizes, dtype=np.int64) - 1
        if len(places) == len(images) == len(grown):
            numbers = np.arange(len(plain.ids))
            moved = numbers + np.concatenate([[0], np.cumsum(grown)])[np.searchsorted(places, numbers, side="left")]
            words = plain.ids != mark
            if moved[-1] == len(ids) - 1 and (ids[moved[words]] == plain.ids[words]).all():
                result = np.zeros(len(ids), dtype=np.bool_)
                result[moved[words]] = plain.counted[words]
                return result
        raise UserError(
            f"{where}: the processor's tokens are not those of the text with its {len(images)} images; correct the "
            "messages, or set tokenizer.chat_template to one that writes a token for each image"
        )

    def _id(self, token: Any) -> int:
        return int(self._tokenizer.convert_tokens_to_ids(str(token)))

    def _process(self, written: list[str], images: list[list[Any]]) -> Any:
        return self._processor(
            text=written,
            images=images if any(images) else None,
            padding=True,
            padding_side="right",
            add_special_tokens=False,
            return_tensors="pt",
        )
