"""Prompts as tokens, and samples as microbatches of the trainer.

- Which samples share an optimizer step follows from their names alone. Within a step they are dealt to microbatches by
  length, so that the microbatches of all ranks at one time are of about one length. With a fixed number of samples in a
  microbatch its content, and so its shape, follows from the samples alone, and not from the ranks.
- Rows are padded at their ends: prompt, then answer. The target at a position is the next token, if the model gave it.
- A microbatch without a sample gets one of another, without targets, so that all ranks take part in each pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from trueshard.errors import UserError
from trueshard.train.data import chat, vision
from trueshard.train.data.batches import IGNORED, Batch, Samples
from trueshard.train.rl.samples import Prompt, Sample

Prompts = Sequence[Mapping[str, Any]] | Samples
"""Records with a ``prompt``, a string or messages; or what a run has prepared of them."""


class PromptEncoder:
    """Makes tokens of prompts and, for models of images and text, the inputs that images are."""

    def __init__(self, tokenizer: Any, processor: Any = None) -> None:
        self.tokenizer, self._processor = tokenizer, processor
        self.template = chat.ChatTemplate(tokenizer, True) if tokenizer.chat_template else None

    @property
    def has_images(self) -> bool:
        """True for a model of images and text."""
        return self._processor is not None

    @property
    def never(self) -> list[int]:
        """Tokens that stand for images, and are no part of an answer."""
        found = [getattr(self._processor, f"{kind}_token_id", None) for kind in ("image", "video")]
        return [each for each in found if isinstance(each, int)]

    def of(self, prompts: Prompts, number: int) -> Prompt:
        """Return a prompt: its ``prompt`` is a string, or messages with images in place."""
        found = prompts[number]
        record = {**found.get("record", found), "prompt": found["prompt"]}
        asked, where = record["prompt"], str(found.get("where", f"prompt {number}"))
        if isinstance(asked, str):
            ids = self.tokenizer(asked, add_special_tokens=False)["input_ids"]
            return Prompt(number, ids or [self.tokenizer.eos_token_id], record, where)
        if self.template is None:
            raise UserError(f"{where}: its prompt is messages, and the tokenizer has no chat template; set one")
        text = self.template.prompt(asked, where, record.get("tools"))
        if self._processor is None:
            return Prompt(number, self.tokenizer(text, add_special_tokens=False)["input_ids"], record, where, asked)
        ids = self._process([text], [asked], "left")["input_ids"][0].tolist()
        return Prompt(number, ids, record, where, asked)

    def plain(self, messages: list[Any]) -> list[int]:
        """Return the tokens of messages in a conversation that began with plain text: their contents as they are."""
        text = "".join(str(message["content"]) for message in messages)
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
        return ids

    def opening(self, talk: list[Any], prompt: Prompt) -> list[int]:
        """Return the tokens of a conversation up to the model's first answer."""
        assert self.template is not None
        text = self.template.prompt(talk, prompt.where, prompt.record.get("tools"))
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def reply(self, talk: list[Any], answer: str, last: int, new: list[Any], where: str) -> list[int]:
        """Return the tokens after an answer in a conversation: its end, ``new`` messages, the beginning of the next.

        ``talk``: the messages before the answer; ``last``: its last token. Raises `UserError` for a chat template that
        writes earlier messages otherwise once more follow.
        """
        assert self.template is not None
        before = self.template.prompt(talk, where)
        after = self.template.prompt([*talk, {"role": "assistant", "content": answer}, *new], where)
        rest = after.removeprefix(before)
        if len(rest) == len(after) or (not rest.startswith(answer.strip()) and not rest.startswith(answer)):
            raise UserError(
                f"{where}: the chat template writes earlier messages otherwise once more follow, so the tokens that "
                "the model gave would change; set tokenizer.chat_template to one that only adds"
            )
        rest = rest.removeprefix(answer if rest.startswith(answer) else answer.strip())
        rest = rest.removeprefix(self.tokenizer.decode([last]))
        ids: list[int] = self.tokenizer(rest, add_special_tokens=False)["input_ids"]
        return ids

    def images(self, conversations: Sequence[list[dict[str, Any]]], width: int, side: str = "left") -> Batch:
        """Return the model's inputs besides ``input_ids`` and ``attention_mask``, for prompts of these conversations.

        Those of a token a place are [rows, width], padded with 0 on ``side``.
        """
        assert self.template is not None
        texts = [self.template.prompt(conversation, "a prompt") for conversation in conversations]
        made = self._process(texts, conversations, side)
        shape, result = made["input_ids"].shape, {}
        for key, value in made.items():
            if key in ("input_ids", "attention_mask") or not isinstance(value, torch.Tensor):
                continue
            if value.shape[:2] == shape:
                room = (width - shape[1], 0) if side == "left" else (0, width - shape[1])
                value = torch.nn.functional.pad(value, (0, 0) * (value.ndim - 2) + room)
            result[key] = value
        return result

    def _process(self, texts: list[str], conversations: Sequence[list[dict[str, Any]]], side: str) -> Any:
        images = [
            [
                vision.read_image(part["image"], "a prompt")
                for message in conversation
                for part in message["content"]
                if isinstance(part, dict) and part["type"] == "image"
            ]
            for conversation in conversations
        ]
        return self._processor(
            text=texts, images=images, padding=True, padding_side=side, add_special_tokens=False, return_tensors="pt"
        )


def dealt(
    samples: Sequence[Sample],
    ranks: int,
    accumulate: int,  # microbatches of a rank
    size: int | None = None,  # samples of a microbatch; None: as many as there are for ``accumulate``
) -> list[list[list[int]]]:
    """Return the positions of samples by [rank][microbatch]: by length, and then dealt in turn. Some may be empty.

    With ``size`` whole microbatches are dealt, number n of all to rank n modulo ``ranks``; else samples.
    """
    order = sorted(range(len(samples)), key=lambda i: (-len(samples[i].asked) - len(samples[i].tokens), i))
    if size is not None:
        whole = [order[number * size : (number + 1) * size] for number in range(ranks * accumulate)]
        return [whole[rank::ranks] for rank in range(ranks)]
    size = -(-len(order) // accumulate)
    parts = [order[number * size : (number + 1) * size] for number in range(accumulate)]
    return [[part[rank::ranks] for part in parts] for rank in range(ranks)]


def microbatch(
    samples: Sequence[Sample],
    advantages: Sequence[float],
    pad: int,
    *,
    counted: Sequence[bool],  # False: no token of the sample is a target
    more: Mapping[str, Sequence[np.ndarray[Any, Any] | None]],  # log-probabilities of each sample's tokens, by key
) -> Batch:
    """Return a batch of ``PolicyLoss``, a row a sample."""
    length = max(len(each.asked) + len(each.tokens) - 1 for each in samples)
    rows = len(samples)
    batch: Batch = {
        "input_ids": torch.full((rows, length), pad, dtype=torch.int64),
        "attention_mask": torch.zeros(rows, length, dtype=torch.int64),
        "targets": torch.full((rows, length), IGNORED, dtype=torch.int64),
        "advantages": torch.tensor(advantages, dtype=torch.float32),
    }
    batch |= {key: torch.zeros(rows, length, dtype=torch.float32) for key in more}
    arrays = {key: value.numpy() for key, value in batch.items()}  # the same memory
    for row, sample in enumerate(samples):
        begin, end = len(sample.asked) - 1, len(sample.asked) + len(sample.tokens) - 1
        arrays["input_ids"][row, :end] = [*sample.asked, *sample.tokens][:-1]
        arrays["attention_mask"][row, :end] = 1
        if counted[row]:
            arrays["targets"][row, begin:end] = np.where(sample.own, sample.tokens, IGNORED)
        for key, values in more.items():
            if (value := values[row]) is not None:
                arrays[key][row, begin:end] = value
    return batch


def of_samples(values: torch.Tensor, samples: Sequence[Sample]) -> list[np.ndarray[Any, Any]]:
    """Return the values at each sample's tokens, float32, of [rows, length] of their microbatch: its inverse."""
    table = values.float().cpu().numpy()
    places = [(len(sample.asked) - 1, len(sample.asked) + len(sample.tokens) - 1) for sample in samples]
    return [table[row, begin:end] for row, (begin, end) in enumerate(places)]
