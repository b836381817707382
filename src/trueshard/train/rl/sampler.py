"""Answers of the model to prompts, and their rewards."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from trueshard.train.rl.batch import PromptEncoder
from trueshard.train.rl.ranks import divided
from trueshard.train.rl.samples import Answer, Engine, Prompt, Request, Sample, Sampling


class Sampler:
    """Samples answers with an engine, and rewards them. Collective: the same arguments and results on every rank."""

    def __init__(self, engine: Engine, rewards: Any, encoder: PromptEncoder, *, tokens: int) -> None:
        self.engine, self.rewards, self.encoder, self.tokens = engine, rewards, encoder, tokens
        self.seconds: dict[str, float] = defaultdict(float)
        """Seconds of "sync", "generate" and "reward" since the last ``take_seconds``."""
        self.slow: list[str] = []
        """Samples whose reward took too long, since the last ``take_seconds``."""

    def update(self, version: int) -> None:
        """Give the engine the weights of the model."""
        began = time.perf_counter()
        self.engine.update(version)
        self.seconds["sync"] += time.perf_counter() - began

    def take_seconds(self) -> dict[str, float]:
        """Return ``seconds``, and begin anew."""
        found, self.seconds, self.slow = self.seconds, defaultdict(float), []
        return found

    def answer(
        self,
        asked: Sequence[tuple[Prompt, int]],  # prompts, and the number of each one's sample
        step: int,
        version: int,
        sampling: Sampling,
    ) -> list[Sample]:
        """Return an answer to each, with its reward."""
        samples = [
            Sample(step, prompt.number, number, list(prompt.ids), weights_version=version) for prompt, number in asked
        ]
        prompts = [prompt for prompt, _ in asked]
        began = time.perf_counter()
        if self.rewards.turns:
            self._converse(samples, prompts, sampling)
            self.seconds["generate"] += time.perf_counter() - began
            return samples
        requests = [
            Request(sample.name, sample.asked, most=self.tokens, messages=prompt.messages)
            for sample, prompt in zip(samples, prompts, strict=True)
        ]
        for sample, answer in zip(samples, self.engine.generate(requests, sampling), strict=True):
            self._take(sample, answer)
        generated = time.perf_counter()
        self._reward(samples, prompts)
        self.seconds["generate"] += generated - began
        self.seconds["reward"] += time.perf_counter() - generated
        return samples

    def _take(self, sample: Sample, answer: Answer) -> None:
        """Add the tokens of an answer to a sample."""
        sample.tokens += answer.ids
        sample.logprobs += answer.logprobs
        sample.own += [True] * len(answer.ids)
        sample.finished = answer.finished
        sample.text = self._text(sample.tokens)

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
                self.slow.append(f"{prompt.where}, sample {sample.sample} of prompt {sample.prompt}")

    def _converse(self, samples: list[Sample], prompts: list[Prompt], sampling: Sampling) -> None:
        raise NotImplementedError
