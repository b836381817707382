"""Conversations with images.

- They become tokens and pixels with each batch: the thread that makes batches reads the images; data are only checked
  before.
- The processor expands an image into many tokens. Targets are found in the text without images, and shifted by the
  number of tokens of the images before them; every token is compared, so that no shift goes unnoticed.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trueshard.errors import UserError, cut_line, explained
from trueshard.train.data.batches import Batch, Document, Ids, Sample, pad_ends
from trueshard.train.data.chat import ChatTemplate, Message, conversation
from trueshard.train.data.sources import Record
from trueshard.train.data.tokenizer import IMAGE


def store_images(conversations: Sequence[list[Message]], folder: Path) -> None:
    """Write images held as bytes to `images/` in ``folder``, and put their paths in their places."""
    for part in (part for turns in conversations for message in turns for part in message["content"]):
        if isinstance(part.get("image"), bytes):
            name = f"images/{hashlib.sha256(part['image']).hexdigest()[:32]}"
            (folder / "images").mkdir(exist_ok=True)
            (folder / name).write_bytes(part["image"])
            part["image"] = name


def vision_messages(record: Record) -> list[Message]:
    """Return the messages of a record with their images in place: checked absolute paths, or bytes."""
    where, images = record.where, record.fields.get("images", record.fields.get("image"))
    images = [] if images is None else images if isinstance(images, list) else [images]
    turns = place_images(conversation(record.fields, where), images, where)
    if not any(part["type"] == "image" for message in turns for part in message["content"]):
        # A rank with such a batch would not gather the weights that read images, while the others wait for it.
        raise UserError(f'{where}: has no image, which every record needs with data.format = "vision"; leave it out')
    for message in turns:
        message["content"] = [_located(part, where, record.folder) for part in message["content"]]
    return turns


def place_images(turns: list[Message], images: list[Any], where: str) -> list[Message]:
    """Return the messages with contents as parts, and each image as ``{"type": "image", "image": …}`` in its place."""
    unplaced, mark = list(images), {"type": "image"}
    placed = [{**message, "content": _parts(message["content"])} for message in turns]
    first = next((message for message in placed if message["role"] == "user"), None)
    if first is not None and not any(part["type"] == "image" for message in placed for part in message["content"]):
        first["content"] = [mark] * len(unplaced) + first["content"]
    for message in placed:
        for number, part in enumerate(message["content"]):
            if part == mark:
                if not unplaced:
                    raise UserError(f'{where}: a message has a place for an image that "images" lacks; correct it')
                message["content"][number] = {**mark, "image": unplaced.pop(0)}
    if unplaced:
        raise UserError(f"{where}: {len(unplaced)} of {len(images)} images have no place in the messages; correct it")
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


def images_in(turns: Sequence[Message], where: str) -> list[Any]:
    """Return the images of a conversation in their order, read. Raises `UserError` for one that cannot be."""
    parts = (part for message in turns for part in message["content"] if isinstance(part, dict))
    return [read_image(part["image"], where) for part in parts if part["type"] == "image"]


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
        images = [images_in(sample["messages"], sample["where"]) for sample in samples]
        processed = self._process([chat.text for chat in rendered], images)
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
        batch = pad_ends(self._tokenizer.pad_token_id, [row.sample() for row in cut])
        padded = processed["input_ids"].shape
        for key, value in processed.items():
            if key not in batch and isinstance(value, torch.Tensor):
                batch[key] = value[:, :width] if value.shape[:2] == padded else value
        return batch

    def _counted(self, ids: Ids, plain: Document, images: list[Any], where: str) -> Ids:
        """Map the targets of the text to the processor's tokens: bool [len(ids)]."""
        mark = next((token for token in self._marks if (plain.ids == token).any()), self._image)
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
