"""A vLLM server as the engine: it generates, and is proven to have the model's weights after each update.

- Requests are divided over the ranks, and every rank gets all answers. The seed of a request follows from the name of
  its sample; the server's kernels depend on what else it computes at the time, so equal seeds give equal tokens up to
  rounding.
- After an update the server is asked for the log-probabilities of a few fixed texts, the *probe*, which are compared
  with the model's own. They are also compared with the server's before: a server that keeps its old weights answers
  with the same bits, however small the step was.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from trueshard.checkpoint.process_group import RankGroup
from trueshard.errors import UserError
from trueshard.train.rl.batch import PromptEncoder
from trueshard.train.rl.config import RolloutSection
from trueshard.train.rl.engine import compute_dtype, ends_of, log_probabilities, probe_bound, probes
from trueshard.train.rl.policy import PolicyLoss
from trueshard.train.rl.samples import Answer, Request, Sampling
from trueshard.train.rl.vllm_server import (
    COMPLETIONS,
    Completions,
    Server,
    ServerSettings,
    on_every_rank,
    on_first_rank,
    question,
)
from trueshard.train.rl.vllm_weights import Directory, Sync, Transfer, has_adapters

_STILL = 0.1
"""Part of the bound by which the model's log-probabilities may move while the server's keep every bit."""

Logprobs = list[list[float]]
"""Log-probabilities of the tokens of each text, from the second on, in nats."""
Score = Callable[[list[list[int]]], Logprobs]
"""The model's own log-probabilities of texts, at temperature 1. Collective; the same on every rank."""


@dataclass(frozen=True)
class Started:
    """Requests that are under way."""

    completions: Completions
    """Completions of this rank's requests."""
    count: int
    """Number of requests of all ranks."""
    version: int
    """Optimizer steps that the weights have taken which answer them."""


class VLLMEngine:
    """Generates on a vLLM server at ``rollout.url``; an `Engine`.

    Args:
        section: ``[rollout]``.
        model: sharded by ``trueshard.shard``.
        tokenizer: of the model.
        ends: tokens that end an answer.
        folder: ``run.dir``; new weights are written below it.
        probes: texts of the probe, as tokens.
        probe_bound: largest difference in the probe, in nats; see ``engine.probe_bound``.
        score: the model's own log-probabilities of texts.

    Raises:
        UserError: on every rank: no server answers, or not one that can be used.
    """

    version: int | None = None
    """Optimizer steps that the server's weights have taken; None before the first update."""
    mismatch: float = math.nan
    """Largest difference in the last probe, in nats."""

    def __init__(
        self,
        section: RolloutSection,
        model: nn.Module,
        tokenizer: Any,
        ends: Collection[int],
        folder: Path,
        probes: list[list[int]],
        probe_bound: float,
        score: Score,
    ) -> None:
        self._section, self._probes, self._bound, self._score = section, probes, probe_bound, score
        self._ranks = ranks = RankGroup(list(model.parameters()))
        self._server = server = Server(section.url or "", section.timeout)
        self._ends = sorted(ends)
        settings: ServerSettings = on_first_rank(ranks, lambda: _checked(section, server))
        alone = has_adapters(model) and settings.adapters and section.sync == "directory"
        self._served: str | None = None
        self._running: Completions | None = None
        self._before: tuple[int, Logprobs, Logprobs] | None = None
        self._sync: Sync
        if section.sync == "nccl":
            self._sync = Transfer(model, server, ranks)
        else:
            self._sync = Directory(model, tokenizer, folder, server, ranks, "alone" if alone else "merged")

    def update(self, version: int) -> None:
        """Give the server the model's weights, after ``version`` optimizer steps, and probe it. Collective.

        Raises:
            UserError: on every rank: it did not take them, or its log-probabilities are not the model's.
        """
        assert self._running is None, "finish() what was started with the old weights first"
        self._served = self._sync.send(version)
        on_first_rank(self._ranks, self._forget)
        self._probe(version)
        self.version = version

    def start(self, requests: Sequence[Request], sampling: Sampling) -> Started:
        """Ask for answers in the background, one batch at a time; ``finish`` returns them. No collective.

        Raises:
            UserError: a request has images.
        """
        assert self.version is not None, "update() gives the server its first weights"
        assert self._running is None, "one batch at a time: finish() the one before first"
        if any(request.messages is not None for request in requests):
            raise UserError('rollout.engine = "vllm" takes prompts of text, and one has images; use "transformers"')
        rank, world = self._ranks.rank, self._ranks.world
        mine = {
            number: question(request, sampling, self._ends, self._served)
            for number, request in enumerate(requests)
            if number % world == rank
        }
        self._running = Completions(self._server, mine, concurrent=-(-self._section.batch // world))
        return Started(self._running, len(requests), self.version)

    def finish(self, started: Started) -> list[Answer]:
        """Return the answers to what was started, in the order of its requests. Collective.

        Raises:
            UserError: on every rank: the server failed one of them, or took longer than ``rollout.timeout``.
        """
        try:
            everyone = on_every_rank(self._ranks, started.completions.wait)
        finally:
            self._running = None
        answers = {number: answer for part in everyone for number, answer in part.items()}
        return [answers[number] for number in range(started.count)]

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Answer]:
        """Continue each request: ``start``, then ``finish``. Collective."""
        return self.finish(self.start(requests, sampling))

    def close(self) -> None:
        """Delete the weights that were written, and stop asking. No collective."""
        if self._running is not None:
            self._running.stop()
        self._sync.close()

    def _forget(self) -> None:
        """Empty the server's cache of prefixes, which the old weights computed. Rank 0."""
        told = self._server.ask("/reset_prefix_cache?reset_running_requests=true", {})
        if isinstance(told, dict) and told.get("success") is False:
            raise UserError(
                f"rollout.url: {self._server.url} keeps its cache of prefixes, since it is answering others; give the "
                "run a server of its own"
            )

    def _probe(self, version: int) -> None:
        ours = self._score(self._probes)
        self.mismatch = on_first_rank(self._ranks, lambda: self._compare(version, ours))

    def _compare(self, version: int, ours: Logprobs) -> float:
        """Return the largest difference between the server's log-probabilities and the model's. Rank 0."""
        theirs = [self._theirs(ids) for ids in self._probes]
        difference, text, token = _largest(ours, theirs)
        said = f"rollout.url: the server's weights are not those of step {version}"
        remedy = "see its log since the last update: it must see run.dir, and serve this run alone"
        if not difference <= self._bound:
            raise UserError(
                f"{said}: its log-probability of token {token + 1} of probe {text} "
                f"(id {self._probes[text][token + 1]}) is {theirs[text][token]:.4f}, the model's "
                f"{ours[text][token]:.4f}: {difference:.2g} apart, and {self._bound:g} is allowed; {remedy}"
            )
        if self._before is None or self._before[2] != theirs:
            self._before = version, ours, theirs
        elif (moved := _largest(ours, self._before[1])[0]) > self._bound * _STILL:
            raise UserError(
                f"{said}: its log-probabilities of the probes are those of step {self._before[0]} to the last bit, "
                f"while the model's have moved by up to {moved:.2g}; {remedy}"
            )
        return difference

    def _theirs(self, ids: list[int]) -> list[float]:
        body: dict[str, Any] = {"prompt": ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        told = self._server.ask(COMPLETIONS, body if self._served is None else body | {"model": self._served})
        try:
            logprobs = told["choices"][0]["prompt_logprobs"]
            return [float(logprob[str(token)]["logprob"]) for token, logprob in zip(ids[1:], logprobs[1:], strict=True)]
        except (LookupError, TypeError, ValueError):
            raise UserError(
                f"rollout.url: {self._server.url} gave no log-probabilities of a prompt (prompt_logprobs); it must be "
                "vLLM 0.29 or newer"
            ) from None


def build(section: RolloutSection, model: nn.Module, encoder: PromptEncoder, folder: Path | None) -> VLLMEngine:
    """Return the engine "vllm". Collective; raises `UserError`."""
    if folder is None:
        raise ValueError('rollout.engine = "vllm" puts new weights into a folder; give folder=')
    tokenizer, ends, bound = encoder.tokenizer, ends_of(model, encoder), probe_bound(compute_dtype(model))
    score = functools.partial(log_probabilities, model, PolicyLoss())
    return VLLMEngine(section, model, tokenizer, ends, folder, probes(len(tokenizer)), bound, score)


def _checked(section: RolloutSection, server: Server) -> ServerSettings:
    """Ask for the server's settings. Raises `UserError` if it cannot be used as ``section`` says."""
    settings = ServerSettings.of(server)
    if section.temperature != 1 and not settings.processed:
        raise UserError(
            f"rollout.temperature is {section.temperature:g}, and the server's log-probabilities are those at 1; start "
            "it with --logprobs-mode processed_logprobs"
        )
    if section.sync == "nccl" and settings.transfer != "nccl":
        raise UserError(
            'rollout.sync = "nccl": the server was not started for it; add --weight-transfer-config '
            '\'{"backend": "nccl"}\', or use "directory"'
        )
    return settings


def _largest(ours: Logprobs, theirs: Logprobs) -> tuple[float, int, int]:
    """Return the largest difference, with the numbers of its text and token; NaN is larger than any."""
    every = [
        (abs(a - b), text, token)
        for text, (one, other) in enumerate(zip(ours, theirs, strict=True))
        for token, (a, b) in enumerate(zip(one, other, strict=True))
    ]
    return max(every, key=lambda each: math.inf if math.isnan(each[0]) else each[0])
