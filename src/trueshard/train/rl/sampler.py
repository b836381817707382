"""Answers of the model to prompts, and their rewards."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trueshard.text import logger
from trueshard.train.rl.batch import PromptEncoder
from trueshard.train.rl.ranks import divided, rank_and_ranks
from trueshard.train.rl.samples import Answer, Engine, Prompt, Request, Sample, Sampling


@dataclass
class Asked:
    """Prompts to answer, as samples without tokens and as requests."""

    samples: list[Sample]
    prompts: list[Prompt]
    requests: list[Request]
    sampling: Sampling
    started: Any = None
    """The engine's handle, if it has begun."""


class Sampler:
    """Samples answers with an engine, and rewards them. Collective: the same arguments and results on every rank."""

    def __init__(self, engine: Engine, rewards: Any, encoder: PromptEncoder, *, tokens: int) -> None:
        self.engine, self.rewards, self.encoder, self.tokens = engine, rewards, encoder, tokens
        self.seconds: dict[str, float] = defaultdict(float)
        """Seconds of "sync", "generate" and "reward" since the last ``take_seconds``."""
        self._version = -1
        self.slow = 0
        """Samples whose reward took too long, since the last ``take_seconds``."""

    def update(self, version: int) -> None:
        """Give the engine the weights of the model after ``version`` steps, unless it has them."""
        if version == self._version:
            return
        began = time.perf_counter()
        self.engine.update(version)
        self._version = version
        self.seconds["sync"] += time.perf_counter() - began

    def take_seconds(self) -> dict[str, float]:
        """Return ``seconds``, and begin anew."""
        result, self.seconds, self.slow = self.seconds, defaultdict(float), 0
        return result

    def answer(self, asked: Asked) -> list[Sample]:
        """Return an answer to each, with its reward; after ``ask``."""
        began = time.perf_counter()
        if self.rewards.turns:
            self._converse(asked.samples, asked.prompts, asked.sampling)
            self.seconds["generate"] += time.perf_counter() - began
            return asked.samples
        engine: Any = self.engine
        answers = (
            engine.generate(asked.requests, asked.sampling) if asked.started is None else engine.finish(asked.started)
        )
        texts = self.encoder.tokenizer.batch_decode([each.ids for each in answers], skip_special_tokens=True)
        for sample, answer, text in zip(asked.samples, answers, texts, strict=True):
            self._take(sample, answer, text)
        generated = time.perf_counter()
        self._reward(asked.samples, asked.prompts)
        self.seconds["generate"] += generated - began
        self.seconds["reward"] += time.perf_counter() - generated
        return asked.samples

    @property
    def in_background(self) -> bool:
        """True if the engine can generate while the model is trained."""
        return hasattr(self.engine, "start") and not self.rewards.turns

    def ask(
        self,
        asked: Sequence[tuple[Prompt, int]],  # prompts, and the number of each one's sample
        step: int,
        version: int,
        sampling: Sampling,
        *,
        background: bool = False,  # the engine begins at once
    ) -> Asked:
        """Return what to answer; the same on every rank."""
        samples = [
            Sample(step, prompt.number, number, list(prompt.ids), weights_version=version) for prompt, number in asked
        ]
        prompts, has_images = [prompt for prompt, _ in asked], self.encoder.has_images
        requests = [
            Request(sample.name, sample.asked, most=self.tokens, messages=prompt.messages if has_images else None)
            for sample, prompt in zip(samples, prompts, strict=True)
        ]
        engine: Any = self.engine
        return Asked(samples, prompts, requests, sampling, engine.start(requests, sampling) if background else None)

    def _take(self, sample: Sample, answer: Answer, text: str) -> None:
        """Add the tokens of an answer to a sample, whose text it has then."""
        sample.tokens += answer.ids
        sample.logprobs += answer.logprobs
        sample.own += [True] * len(answer.ids)
        sample.finished = answer.finished
        sample.text = text

    def _text(self, ids: Sequence[int]) -> str:
        return str(self.encoder.tokenizer.decode(ids, skip_special_tokens=True))

    def _reward(self, samples: list[Sample], prompts: list[Prompt]) -> None:
        both = list(zip(samples, prompts, strict=True))
        items = [both] if self.rewards.whole else [[each] for each in both]

        def score(own: list[list[tuple[Sample, Prompt]]]) -> list[Any]:
            flat = [each for item in own for each in item]
            if not flat:
                return []
            found = self.rewards.score([sample for sample, _ in flat], [prompt for _, prompt in flat])
            sizes = iter(found)
            return [[next(sizes) for _ in item] for item in own]

        found = [reward for part in divided(items, score) for reward in part]
        for sample, prompt, reward in zip(samples, prompts, found, strict=True):
            sample.reward, sample.parts = reward.reward, reward.parts
            if reward.slow:
                self._tell_slow(sample, prompt)

    def _tell_slow(self, sample: Sample, prompt: Prompt) -> None:
        self.slow += 1
        if rank_and_ranks()[0] == 0:
            about = f"{prompt.where} (prompt {sample.prompt}, sample {sample.sample} of step {sample.step})"
            logger.warning("reward.seconds: the reward of %s took too long, and is 0", about)

    def _converse(self, samples: list[Sample], prompts: list[Prompt], sampling: Sampling) -> None:
        """Play the episode of each sample: the environment and the model take turns, all samples together."""
        talks: list[list[Any]] = [[] for _ in samples]
        turns = self._turns(samples, prompts, {})
        while live := [i for i, turn in turns.items() if isinstance(turn, list)]:
            room = {i: self._add_turn(samples[i], prompts[i], talks[i], turns[i]) for i in live}
            requests = [
                Request(samples[i].name, samples[i].asked + samples[i].tokens, sum(samples[i].own), room[i])
                for i in live
                if room[i] > 0
            ]
            answers = iter(self.engine.generate(requests, sampling) if requests else ())
            texts: dict[int, str | None] = {}
            for i in live:
                answer = next(answers) if room[i] > 0 else None
                texts[i] = None if answer is None else self._text(answer.ids)
                if answer is None:
                    samples[i].finished = False
                else:
                    self._take(samples[i], answer, self._text(samples[i].tokens + answer.ids))
                    talks[i].append({"role": "assistant", "content": texts[i]})
            turns = self._turns(samples, prompts, texts)

    def _add_turn(self, sample: Sample, prompt: Prompt, talk: list[Any], new: list[Any]) -> int:
        """Add what the environment says to a sample and to its conversation; return how many tokens may follow.

        Without room for a token of the model nothing is added.
        """
        encoder, is_text = self.encoder, prompt.messages is None
        if not sample.tokens:
            talk += [*(prompt.messages or ()), *new]
            sample.asked = prompt.ids + encoder.plain(new) if is_text else encoder.opening(talk, prompt)
            return self.tokens
        *before, said = talk
        if is_text:
            ids = encoder.plain(new)
        else:
            ids = encoder.reply(before, said["content"], sample.tokens[-1], new, prompt.where)
        room = self.tokens - len(sample.tokens) - len(ids)
        if room > 0:
            sample.tokens += ids
            sample.own += [False] * len(ids)
            sample.logprobs += [0.0] * len(ids)
            talk += new
        return room

    def _turns(
        self, samples: list[Sample], prompts: list[Prompt], texts: dict[int, str | None]
    ) -> dict[int, Any]:  # by place: messages, or a reward
        """Give episodes the model's answers, or begin them all; one without room for an answer is dropped.

        Each lives on one rank. Rewards are put into the samples.
        """

        def play(places: list[int]) -> list[Any]:
            if not texts:
                begun = self.rewards.begin([samples[i].name for i in places], [prompts[i] for i in places])
                return list(begun)
            mine = {samples[i].name: text for i in places if (text := texts.get(i)) is not None}
            self.rewards.drop([samples[i].name for i in places if i in texts and texts[i] is None])
            found = self.rewards.answer(mine)
            return [found.get(samples[i].name) for i in places]

        found = dict(enumerate(divided(range(len(samples)), play)))
        for i, turn in found.items():
            if turn is not None and not isinstance(turn, list):
                samples[i].reward, samples[i].parts = turn.reward, turn.parts
                if turn.slow:
                    self._tell_slow(samples[i], prompts[i])
        return {i: turn for i, turn in found.items() if turn is not None}
