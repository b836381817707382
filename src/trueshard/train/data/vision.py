"""Conversations with images: kept as records, made into tokens and pixels when a batch is.

- Images are read by the thread that makes batches, so that data of any size needs no preparation but a look at each
  record: its messages are in order, and its images are there.
- A batch goes through the model's processor as a whole, which decides the shapes of what it gives.
- The processor puts many tokens where the text has one for an image. Where a target stands is found in the text
  without images, and moved by as many tokens as the images before it have; each token is compared, so nothing shifts
  unseen.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trueshard.errors import UserError, one_line
from trueshard.train.data.chat import Template
from trueshard.train.data.messages import Message, conversation, place_images, texts
from trueshard.train.data.records import Located
from trueshard.train.data.samples import IGNORED, Batch, Document, Ids, Sample
from trueshard.train.data.tokenizer import IMAGE


class VisionFormat:
    """Records with ``messages`` and ``images``: kept as they are, in JSON.

    Args:
        folder: where images that stand in the data themselves are put, as `images/…`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "images"
        self._count = 0

    def encode(self, records: Sequence[Located]) -> list[tuple[Document, ...]]:
        """One document each of the records: its ids are the bytes of the JSON."""
        return [(self._document(vision_messages(each)),) for each in records]

    def _document(self, found: list[Message]) -> Document:
        for message in found:
            for part in message["content"]:
                if isinstance(part.get("image"), bytes):
                    self._folder.mkdir(exist_ok=True)
                    (self._folder / str(self._count)).write_bytes(part["image"])
                    part["image"] = f"{self._folder.name}/{self._count}"
                    self._count += 1
        line = np.frombuffer(json.dumps(found).encode(), dtype=np.uint8)
        return Document(line, np.ones(len(line), dtype=np.bool_))


def vision_texts(record: Located) -> Iterator[str]:
    """What is said in a record."""
    return texts(vision_messages(record))


def vision_messages(record: Located) -> list[Message]:
    """The messages of a record with their images in place, each a path or, where the data hold it, its bytes.

    Raises `UserError` for an image that is not there or cannot be opened, and for a record without any.
    """
    fields, where, folder = record
    images = fields.get("images", fields.get("image"))
    images = [] if images is None else images if isinstance(images, list) else [images]
    found = place_images(conversation(fields, where), images, where)
    if not any(part["type"] == "image" for message in found for part in message["content"]):
        # The rank with such a batch would not gather the weights that read images, and the others wait for it.
        raise UserError(f'{where}: has no image, which every record needs with data.format = "vision"; leave it out')
    return [{**message, "content": [_located(part, where, folder) for part in message["content"]]} for message in found]


def _located(part: Message, where: str, folder: Path) -> Message:
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
    open_image(image, where, verify=True).close()
    return {"type": "image", "image": image}


def open_image(image: str | bytes, where: str, verify: bool = False) -> Any:
    """An image of PIL, its head read; checked as far as that goes without decoding. Raises `UserError` if it is none.

    One that was checked is of no other use.
    """
    from PIL import Image

    try:
        opened = Image.open(io.BytesIO(image) if isinstance(image, bytes) else image)
        if verify:
            opened.verify()
        return opened
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        name = "an image in the data" if isinstance(image, bytes) else f"the image {image}"
        detail = one_line(error, 200)
        raise UserError(f"{where}: {name} cannot be read ({detail}); replace it, or leave it out") from None


class VisionCollate:
    """Makes batches of samples ``{"messages", "where"}``: ``input_ids``, ``targets``, ``attention_mask`` and what else
    the processor gives, such as ``pixel_values``.

    Args:
        processor: of the model, with its ``chat_template`` the tokenizer's.
        length: inputs of a sequence at most; what is longer is cut at its end.
        answers_only: only what the assistant says counts.

    Raises:
        UserError: when called, for a record with an image that cannot be read, or that would be cut before an image.
    """

    def __init__(self, processor: Any, length: int, answers_only: bool) -> None:
        self._processor, self._length = processor, length
        self._tokenizer = processor.tokenizer
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        image, begin = getattr(processor, "image_token", IMAGE), getattr(processor, "boi_token", None)
        self._image = self._id(image)
        # What stands for an image in the text: some write the token that begins images, and put the others after it.
        self._marks = [self._image] if begin is None else [self._image, self._id(begin)]
        self._template = Template(self._tokenizer, answers_only)

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        rendered = [self._template.render(sample["messages"], sample["where"]) for sample in samples]
        images = [self._load(sample) for sample in samples]
        whole = self._process([each.text for each in rendered], images)
        plain = self._template.documents(rendered)
        rows = []
        for number, sample in enumerate(samples):
            ids = whole["input_ids"][number][whole["attention_mask"][number].bool()].numpy()
            counted = self._counted(ids, plain[number].ids, plain[number].counted, images[number], sample["where"])
            rows.append((ids, counted))
        return self._batch(whole, rows, samples)

    def _batch(self, whole: Mapping[str, Any], rows: list[tuple[Ids, Ids]], samples: Sequence[Sample]) -> Batch:
        """Inputs and targets, shifted by one, cut and padded; what stands for each token is cut and padded likewise."""
        width = min(self._length, max(len(ids) for ids, _ in rows) - 1)
        shape = (len(rows), width)
        inputs = np.full(shape, self._tokenizer.pad_token_id, dtype=np.int64)
        targets, mask = np.full(shape, IGNORED, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        for row, ((ids, counted), sample) in enumerate(zip(rows, samples, strict=True)):
            count = min(len(ids) - 1, width)
            if (ids[count:] == self._image).any():
                raise UserError(
                    f"{sample['where']}: its images end beyond {width} of {len(ids)} tokens; raise "
                    "train.sequence_length, or leave it out"
                )
            inputs[row, :count], mask[row, :count] = ids[:count], 1
            targets[row, :count] = np.where(counted[1 : count + 1], ids[1 : count + 1], IGNORED)
        batch = {"input_ids": inputs, "targets": targets, "attention_mask": mask}
        made = {key: torch.from_numpy(value) for key, value in batch.items()}
        padded = whole["input_ids"].shape
        for key, value in whole.items():
            if key not in made and isinstance(value, torch.Tensor):
                made[key] = value[:, :width] if value.shape[:2] == padded else value
        return made

    def _counted(self, ids: Ids, plain: Ids, counted: Ids, images: list[Any], where: str) -> Ids:
        """Which of the processor's tokens are targets, from which of the text's are."""
        mark = next((each for each in self._marks if (plain == each).any()), self._image)
        places = np.flatnonzero(plain == mark)
        if len(places) == 1:
            grown = np.array([len(ids) - len(plain)])
        else:
            grown = np.array([self._grown(image, mark) for image in images], dtype=np.int64)
        if len(places) == len(images) == len(grown):
            moved = (
                np.arange(len(plain))
                + np.concatenate([[0], np.cumsum(grown)])[np.searchsorted(places, np.arange(len(plain)), side="left")]
            )
            text = plain != mark
            if moved[-1] == len(ids) - 1 and (ids[moved[text]] == plain[text]).all():
                result = np.zeros(len(ids), dtype=np.bool_)
                result[moved[text]] = counted[text]
                return result
        raise UserError(
            f"{where}: the processor's tokens are not those of the text with its {len(images)} images; correct the "
            "messages, or set tokenizer.chat_template to one that writes a token for each image"
        )

    def _id(self, token: Any) -> int:
        return int(self._tokenizer.convert_tokens_to_ids(str(token)))

    def _grown(self, image: Any, mark: int) -> int:
        """How many tokens more than the one in the text an image has."""
        text = self._tokenizer.convert_ids_to_tokens(mark)
        return int(self._process([text], [[image]])["input_ids"].shape[1]) - 1

    def _process(self, written: list[str], images: list[list[Any]]) -> Any:
        return self._processor(
            text=written,
            images=images if any(images) else None,
            padding=True,
            padding_side="right",
            add_special_tokens=False,
            return_tensors="pt",
        )

    @staticmethod
    def _load(sample: Sample) -> list[Any]:
        loaded = []
        for message in sample["messages"]:
            for part in message["content"]:
                if part["type"] == "image":
                    with open_image(part["image"], sample["where"]) as image:
                        try:
                            loaded.append(image.convert("RGB"))
                        except (OSError, SyntaxError, ValueError) as error:  # as PIL tells damage
                            raise UserError(
                                f"{sample['where']}: the image {part['image']!s:.200} cannot be read ({error}); "
                                "replace it, or leave it out"
                            ) from None
        return loaded
