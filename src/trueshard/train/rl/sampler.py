"""Prompts as tokens, answers of the model to them, and the rewards of these."""

from __future__ import annotations

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from trueshard.errors import UserError
from trueshard.text import logger
from trueshard.train.data import chat, vision
from trueshard.train.data.batches import Batch, Samples
from trueshard.train.rl.ranks import divided, on_first_rank, rank_and_ranks
from trueshard.train.rl.reward import CalledReward, Reward, Rewards
from trueshard.train.rl.samples import Answer, Asked, Engine, Name, Prompt, Request, Sample, Sampling, describe

Prompts = Sequence[Mapping[str, Any]] | Samples
"""Records with a ``prompt``, a string or messages; or what a run has prepared of them."""
Messages = list[dict[str, Any]]


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
        tokens = [getattr(self._processor, f"{kind}_token_id", None) for kind in ("image", "video")]
        return [token for token in tokens if isinstance(token, int)]

    def of(self, prompts: Prompts, number: int) -> Prompt:
        """Return a prompt: its ``prompt`` is a string, or messages with images in place."""
        fields = prompts[number]
        prompt, where = fields["prompt"], str(fields.get("where", f"prompt {number}"))
        record = {**fields.get("record", fields), "prompt": prompt}
        if isinstance(prompt, str):
            return Prompt(number, self._ids(prompt) or [self.tokenizer.eos_token_id], record, where)
        text = self._template(where).prompt(prompt, where, record.get("tools"))
        ids = self._process([text], [prompt], "left")["input_ids"][0].tolist() if self.has_images else self._ids(text)
        return Prompt(number, ids, record, where, prompt)

    def text(self, ids: Sequence[int], finished: bool) -> str:
        """Return tokens as text, without the special token that ended them; any other one is part of the answer."""
        decode, last = self.tokenizer.decode, ids[-1:]
        is_special = decode(last) != decode(last, skip_special_tokens=True)
        return str(decode(ids[:-1] if finished and is_special else ids))

    def plain(self, messages: Messages) -> list[int]:
        """Return the tokens of messages in a conversation that began with plain text: their contents as they are."""
        text = "".join(str(message["content"]) for message in messages)
        return self._ids(text) if text else []

    def opening(self, conversation: Messages, prompt: Prompt) -> list[int]:
        """Return the tokens of a conversation up to the model's first answer."""
        return self._ids(self._template(prompt.where).prompt(conversation, prompt.where, prompt.record.get("tools")))

    def reply(self, conversation: Messages, answer: str, last: int, new: Messages, where: str) -> list[int]:
        """Return the tokens after an answer in a conversation: its end, ``new`` messages, the beginning of the next.

        ``conversation``: the messages before the answer; ``last``: its last token. Raises `UserError` for a chat
        template that writes earlier messages otherwise once more follow.
        """
        template = self._template(where)
        before = template.prompt(conversation, where)
        after = template.prompt([*conversation, {"role": "assistant", "content": answer}, *new], where)
        rest = after.removeprefix(before)
        if len(rest) == len(after) or (not rest.startswith(answer.strip()) and not rest.startswith(answer)):
            raise UserError(
                f"{where}: the chat template writes earlier messages otherwise once more follow, so the tokens that "
                "the model gave would change; set tokenizer.chat_template to one that only adds"
            )
        rest = rest.removeprefix(answer if rest.startswith(answer) else answer.strip())
        return self._ids(rest.removeprefix(self.tokenizer.decode([last])))

    def images(self, conversations: Sequence[Messages], width: int, side: str = "left") -> Batch:
        """Return the model's inputs besides ``input_ids`` and ``attention_mask``, for prompts of these conversations.

        Those of a token a place are [rows, width], padded with 0 on ``side``.
        """
        template = self._template("a prompt")
        texts = [template.prompt(conversation, "a prompt") for conversation in conversations]
        inputs = self._process(texts, conversations, side)
        shape, result = inputs["input_ids"].shape, {}
        for key, value in inputs.items():
            if key in ("input_ids", "attention_mask") or not isinstance(value, torch.Tensor):
                continue
            if value.shape[:2] == shape:
                room = (width - shape[1], 0) if side == "left" else (0, width - shape[1])
                value = torch.nn.functional.pad(value, (0, 0) * (value.ndim - 2) + room)
            result[key] = value
        return result

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _template(self, where: str) -> chat.ChatTemplate:
        if self.template is None:
            raise UserError(f"{where}: its prompt is messages, and the tokenizer has no chat template; set one")
        return self.template

    def _process(self, texts: list[str], conversations: Sequence[Messages], side: str) -> Any:
        images = [vision.images_in(conversation, "a prompt") for conversation in conversations]
        return self._processor(
            text=texts, images=images, padding=True, padding_side=side, add_special_tokens=False, return_tensors="pt"
        )


@dataclass
class Pending:
    """Prompts to answer, as samples without tokens."""

    step: int
    """The step that they are made for."""
    asked: list[Asked]
    sampling: Sampling
    started: Any = None
    """The engine's handle, if it has begun."""


@dataclass
class _Conversation:
    sample: Sample
    prompt: Prompt
    messages: Messages = field(default_factory=list)
    """The conversation so far, for the chat template."""


class Sampler:
    """Samples answers with an engine, and rewards them. Collective: the same arguments and results on every rank."""

    def __init__(self, engine: Engine, rewards: Rewards | CalledReward, encoder: PromptEncoder, tokens: int) -> None:
        self.engine, self.encoder, self.tokens = engine, encoder, tokens
        self.rewards: Any = rewards
        self.seconds: dict[str, float] = defaultdict(float)
        """Seconds of "sync", "generate", "reward" and "score" since the last ``take_seconds``."""
        self.slow = 0
        """Samples whose reward took too long, since the last ``take_seconds``."""
        self.version = -1
        """Optimizer steps of the weights that the engine has; -1 before the first ``update``."""

    @property
    def in_background(self) -> bool:
        """True if the engine can generate while the model is trained."""
        return hasattr(self.engine, "start") and not self.rewards.turns

    def update(self, version: int) -> None:
        """Give the engine the weights of the model after ``version`` steps, unless it has them."""
        if version != self.version:
            with self.timed("sync"):
                self.engine.update(version)
            self.version = version

    @contextlib.contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        """Add what happens inside to ``seconds``."""
        began = time.perf_counter()
        yield
        self.seconds[kind] += time.perf_counter() - began

    def take_seconds(self) -> dict[str, float]:
        """Return ``seconds``, and begin anew."""
        result, self.seconds, self.slow = self.seconds, defaultdict(float), 0
        return result

    def ask(
        self,
        prompts: Sequence[tuple[Prompt, int]],  # with the number of each one's sample
        step: int,
        sampling: Sampling,
        *,
        background: bool = False,  # the engine begins at once
    ) -> Pending:
        """Return what to answer, with the weights of the last ``update``; the same on every rank."""
        asked = [
            (Sample(step, prompt.number, number, list(prompt.ids), weights_version=self.version), prompt)
            for prompt, number in prompts
        ]
        pending = Pending(step, asked, sampling)
        if background:
            engine: Any = self.engine
            pending.started = engine.start(self._requests(pending), sampling)
        return pending

    def answer(self, pending: Pending) -> list[Sample]:
        """Return an answer to each, with its reward; after ``ask``."""
        samples, engine = [sample for sample, _ in pending.asked], cast(Any, self.engine)
        if self.rewards.turns:
            with self.timed("generate"):
                self._converse(pending)
            return samples
        with self.timed("generate"):
            if pending.started is None:
                answers = engine.generate(self._requests(pending), pending.sampling)
            else:
                answers = engine.finish(pending.started)
            for sample, answer in zip(samples, answers, strict=True):
                self._add(sample, answer)
        with self.timed("reward"):
            self._reward(pending.asked)
        return samples

    def _requests(self, pending: Pending) -> list[Request]:
        return [
            Request(
                sample.name,
                sample.asked,
                most=self.tokens,
                messages=prompt.messages if self.encoder.has_images else None,
            )
            for sample, prompt in pending.asked
        ]

    def _reward(self, asked: Sequence[Asked]) -> None:
        score = self.rewards.score
        rewards = on_first_rank(lambda: score(asked)) if self.rewards.whole else divided(asked, score)
        for (sample, prompt), reward in zip(asked, rewards, strict=True):
            self._take(sample, prompt, reward)

    def _take(self, sample: Sample, prompt: Prompt, reward: Reward) -> None:
        """Put a reward into its sample."""
        sample.reward, sample.parts = reward.reward, reward.parts
        self.slow += reward.slow
        if reward.slow and rank_and_ranks()[0] == 0:
            logger.warning("reward.seconds: the reward of %s took too long, and is 0", describe(sample, prompt))

    def _converse(self, pending: Pending) -> None:
        """Play the episode of each sample: the environment and the model take turns, all samples together."""
        episodes = {sample.name: _Conversation(sample, prompt) for sample, prompt in pending.asked}
        turns = self._turns(episodes, None)
        while turns:
            room = {name: self._add_turn(episodes[name], messages) for name, messages in turns.items()}
            speaking = [episodes[name] for name in turns if room[name] > 0]
            requests = [
                Request(sample.name, sample.asked + sample.tokens, sum(sample.own), room[sample.name])
                for sample in (episode.sample for episode in speaking)
            ]
            answers = self.engine.generate(requests, pending.sampling) if requests else []
            texts: dict[Name, str | None] = dict.fromkeys(turns)
            for episode, answer in zip(speaking, answers, strict=True):
                texts[episode.sample.name] = text = self.encoder.text(answer.ids, answer.finished)
                self._add(episode.sample, answer)
                episode.messages.append({"role": "assistant", "content": text})
            for name in turns:
                if texts[name] is None:  # there was no room for an answer
                    episodes[name].sample.finished = False
            turns = self._turns(episodes, texts)

    def _add_turn(self, episode: _Conversation, new: Messages) -> int:
        """Add what the environment says to a sample and to its conversation; return how many tokens may follow.

        Without room for a token of the model nothing is added.
        """
        sample, prompt, encoder = episode.sample, episode.prompt, self.encoder
        is_text = prompt.messages is None
        if not sample.tokens:
            episode.messages += [*(prompt.messages or ()), *new]
            sample.asked = prompt.ids + encoder.plain(new) if is_text else encoder.opening(episode.messages, prompt)
            return self.tokens
        if is_text:
            ids = encoder.plain(new)
        else:
            *before, answer = episode.messages
            ids = encoder.reply(before, answer["content"], sample.tokens[-1], new, prompt.where)
        room = self.tokens - len(sample.tokens) - len(ids)
        if room > 0:
            sample.tokens += ids
            sample.own += [False] * len(ids)
            sample.logprobs += [0.0] * len(ids)
            episode.messages += new
        return room

    def _turns(
        self, episodes: Mapping[Name, _Conversation], texts: Mapping[Name, str | None] | None
    ) -> dict[Name, Messages]:
        """Return the messages of the episodes that go on; the others get their rewards.

        ``texts``: the model's answers, None of an episode without room for one, which is dropped; None: all begin. Each
        episode lives on one rank.
        """

        def play(names: list[Name]) -> list[Any]:
            if texts is None:
                return list(self.rewards.begin([(episodes[name].sample, episodes[name].prompt) for name in names]))
            self.rewards.drop([name for name in names if texts.get(name, "") is None])
            answers = {name: text for name in names if (text := texts.get(name)) is not None}
            turns = self.rewards.answer(answers)
            return [turns.get(name) for name in names]

        result = {}
        for (name, episode), turn in zip(episodes.items(), divided(list(episodes), play), strict=True):
            if isinstance(turn, list):
                result[name] = turn
            elif turn is not None:
                self._take(episode.sample, episode.prompt, turn)
        return result

    def _add(self, sample: Sample, answer: Answer) -> None:
        """Add the tokens of an answer to a sample."""
        sample.tokens += answer.ids
        sample.logprobs += answer.logprobs
        sample.own += [True] * len(answer.ids)
        sample.finished = answer.finished
        sample.text = self.encoder.text(sample.tokens, answer.finished)


def means(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the mean ``reward``, length and parts of rewards; a part over the samples that have it."""
    result = {"reward": _mean([sample.reward for sample in samples])}
    for key in sorted({key for sample in samples for key in sample.parts}):
        result[f"reward_{key}"] = _mean([sample.parts[key] for sample in samples if key in sample.parts])
    return result | {"length_mean": _mean([len(sample.tokens) for sample in samples])}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
