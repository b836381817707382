"""Records of reinforcement learning: prompts, samples, and what an engine is asked and answers.

A reward's process imports this file, and needs neither numpy nor torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Name = tuple[int, int, int]
"""(step, prompt, sample)."""


@dataclass(frozen=True)
class Prompt:
    """A record of the data, as tokens."""

    number: int
    """Number of the record among the training samples."""
    ids: list[int]
    record: Mapping[str, Any]
    """The fields of the record, for the reward."""
    where: str
    """File and line, for error messages."""
    messages: list[dict[str, Any]] | None = None
    """Messages of a conversation, images in place; None for plain text."""


@dataclass
class Sample:
    """An answer of the model to a prompt, its reward, and what the loss needs of it."""

    step: int
    """The optimizer step that it was made for, from 1."""
    prompt: int
    """Number of the prompt in the data."""
    sample: int
    """Number among the answers to the prompt in this step, from 0."""
    asked: list[int]
    """Tokens of the prompt."""
    tokens: list[int] = field(default_factory=list)
    """Tokens after the prompt, with the one that ends the answer."""
    own: list[bool] = field(default_factory=list)
    """Origin of each of ``tokens``: True if the model gave it, False if an environment did."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probability of each of ``tokens`` by the engine, in nats; 0 if an environment gave it."""
    text: str = ""
    """``tokens`` as text, without the special token that ended the answer."""
    finished: bool = False
    """True if it ended by itself, False if it was cut at the largest number of tokens."""
    weights_version: int = 0
    """Optimizer steps that the weights had taken which made it."""
    reward: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    """Values that the reward functions returned, by name."""
    advantage: float = 0.0
    used: bool = True
    """False if its group was left out."""
    old_logprobs: list[float] | None = None
    """The trainer's log-probability of each of ``tokens`` before the update; None: that of the update itself."""
    reference_logprobs: list[float] | None = None

    @property
    def name(self) -> Name:
        return self.step, self.prompt, self.sample


Asked = tuple[Sample, Prompt]
"""A sample, and the prompt that it answers."""


def describe(sample: Sample, prompt: Prompt) -> str:
    """Return which sample it is in words, for messages."""
    return f"{prompt.where} (prompt {sample.prompt}, sample {sample.sample} of step {sample.step})"


@dataclass(frozen=True)
class Request:
    """A text to continue."""

    name: Name
    ids: list[int]
    first: int = 0
    """Tokens of the sample that the model has drawn before: index of its next random number."""
    most: int = 1
    """Tokens to draw, at most."""
    messages: list[dict[str, Any]] | None = None
    """The conversation, if it has images."""


@dataclass(frozen=True)
class Answer:
    """The continuation of a request."""

    ids: list[int]
    """Tokens, with the one that ends it."""
    logprobs: list[float]
    """Log-probability of each, in nats, at the temperature of sampling."""
    finished: bool
    """True if it ended by itself."""


@dataclass(frozen=True)
class Sampling:
    """Settings by which tokens are drawn."""

    temperature: float = 1.0
    """0: the likeliest token."""
    top_p: float = 1.0
    top_k: int = 0
    stop: Sequence[str] = ()
    seed: int = 0


class Engine(Protocol):
    """Generates. Both methods are collective; requests, and answers in their order, are the same on every rank."""

    def update(self, version: int) -> None:
        """Take over the weights of the model, after ``version`` optimizer steps."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Answer]:
        """Continue each request; equal requests, weights and sampling give equal answers."""

    def close(self) -> None:
        """Free what it holds."""
