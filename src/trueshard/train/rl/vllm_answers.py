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
    """Return the continuation in a completion. Raises ValueError if it is not whole, or not what was asked for."""
    choice, prompt, most = _choice(content, prompt=body["prompt"]), body["prompt"], body["max_tokens"]
    ids, logprobs = entry(choice, "token_ids"), entry(choice, "logprobs", "token_logprobs")
    if not isinstance(ids, list) or not isinstance(logprobs, list) or not ids or len(ids) != len(logprobs):
        raise ValueError("without token ids and exactly one log-probability of each")
    if len(ids) > most:
        raise ValueError(f"of {len(ids)} tokens, and at most {most} were asked for")
    for place, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocabulary:
            raise ValueError(f"whose token {place} is {reprlib.repr(token)}, no integer from 0 to {vocabulary - 1}")
    values = [_logprob(value) for value in logprobs]
    usage, known = entry(content, "usage"), {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
    if any(entry(usage, key) not in (None, count) for key, count in known.items()):
        raise ValueError(f"whose usage is {reprlib.repr(usage)}, and there are {known}")
    reason = entry(choice, "finish_reason")
    if reason not in ("stop", "length"):
        raise ValueError(f"that was broken off (finish_reason {reprlib.repr(reason)})")
    if reason == "length" and len(ids) < most:
        raise ValueError(
            f"cut after {len(ids)} of {most} tokens: --max-model-len must be train.sequence_length or more"
        )
    return Answer(ids, values, reason == "stop")


def prompt_logprobs_of(content: Any, ids: Sequence[int]) -> list[float]:
    """Return the log-probabilities of the tokens of a prompt, from the second on, in nats. Raises ValueError."""
    logprobs = entry(_choice(content, prompt=ids), "prompt_logprobs")
    if not isinstance(logprobs, list) or len(logprobs) != len(ids):
        raise ValueError("without log-probabilities of the prompt (prompt_logprobs)")
    return [
        _logprob(entry(entry_of, str(token), "logprob")) for token, entry_of in zip(ids[1:], logprobs[1:], strict=True)
    ]


def _choice(content: Any, prompt: Sequence[int]) -> Any:
    """Return the only choice of a completion of ``prompt``."""
    choices = entry(content, "choices")
    if not isinstance(choices, list) or len(choices) != 1:
        count = f"with {len(choices)} completions" if isinstance(choices, list) else "without a completion"
        raise ValueError(f"{count}, and one was asked for")
    if entry(choices, 0, "prompt_token_ids") not in (None, prompt):
        raise ValueError("to another prompt than was sent")
    return choices[0]


def _logprob(value: Any) -> float:
    if type(value) not in (int, float) or not _LOWEST < value <= _ROUNDING:  # NaN is in no interval
        raise ValueError(f"with a log-probability that is {reprlib.repr(value)}, and not a finite number of at most 0")
    return min(float(value), 0.0)
