"""Check what a vLLM server answers against what was asked, before it is used: another program may have answered."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from trueshard.train.rl.samples import Answer

_LOWEST = -9999.0
"""The number that the server writes for minus infinity, which no token that was drawn has."""
_ROUNDING = 1e-4
"""Nats above 0 that are a kernel's rounding of 0, and are taken as 0."""


class Unusable(ValueError):
    """Raised for an answer that cannot be used; its text goes on after "gave an answer"."""


def entry(content: Any, *path: str | int) -> Any:
    """Return what JSON has at a path of keys and places; None if it has nothing there."""
    for key in path:
        try:
            content = content[key]
        except (LookupError, TypeError):
            return None
    return content


def answer_of(
    content: Any,  # JSON of a completion
    body: Mapping[str, Any],  # what was asked
    vocabulary: int,
) -> Answer:
    """Return the continuation in a completion. Raises `Unusable` if it is not whole, or not of what was asked."""
    choice, prompt, most = _choice(content, prompt=body["prompt"]), body["prompt"], body["max_tokens"]
    ids, logprobs = entry(choice, "token_ids"), entry(choice, "logprobs", "token_logprobs")
    if not isinstance(ids, list) or not isinstance(logprobs, list) or not ids or len(ids) != len(logprobs):
        raise Unusable("without token ids and exactly one log-probability of each")
    if len(ids) > most:
        raise Unusable(f"of {len(ids)} tokens, and at most {most} were asked for")
    for place, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocabulary:
            raise Unusable(f"whose token {place} is {_shown(token)}, and ids are integers from 0 to {vocabulary - 1}")
    values = [_logprob(value) for value in logprobs]
    for noun, count, known in (
        ("of the prompt", entry(content, "usage", "prompt_tokens"), len(prompt)),
        ("after it", entry(content, "usage", "completion_tokens"), len(ids)),
    ):
        if count is not None and count != known:
            raise Unusable(f"that counts {_shown(count)} tokens {noun}, and there are {known}")
    reason = entry(choice, "finish_reason")
    if reason not in ("stop", "length"):
        raise Unusable(f"that was broken off (finish_reason {_shown(reason)})")
    return Answer(ids, values, reason == "stop")


def prompt_logprobs_of(content: Any, ids: Sequence[int]) -> list[float]:
    """Return the log-probabilities of the tokens of a prompt, from the second on, in nats. Raises `Unusable`."""
    logprobs = entry(_choice(content, prompt=ids), "prompt_logprobs")
    if not isinstance(logprobs, list) or len(logprobs) != len(ids):
        raise Unusable("without log-probabilities of the prompt (prompt_logprobs)")
    return [_logprob(entry(each, str(token), "logprob")) for token, each in zip(ids[1:], logprobs[1:], strict=True)]


def _choice(content: Any, prompt: Sequence[int]) -> Any:
    """Return the only choice of a completion of ``prompt``."""
    choices = entry(content, "choices")
    if not isinstance(choices, list) or len(choices) != 1:
        count = f"with {len(choices)} completions" if isinstance(choices, list) else "without a completion"
        raise Unusable(f"{count}, and one was asked for")
    if entry(choices, 0, "prompt_token_ids") not in (None, prompt):
        raise Unusable("to another prompt than was sent")
    return choices[0]


def _logprob(value: Any) -> float:
    if type(value) not in (int, float) or not _LOWEST < value <= _ROUNDING:  # NaN is in no interval
        raise Unusable(f"with a log-probability that is {_shown(value)}, and not a finite number of at most 0")
    return min(float(value), 0.0)


def _shown(value: Any) -> str:
    return ascii(reprlib.repr(value))[1:-1] if isinstance(value, str) else reprlib.repr(value)
