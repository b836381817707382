"""Answers that no healthy vLLM server gives: what is damaged, and what is said of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

NAN, INFINITY = float("nan"), float("inf")


@dataclass(frozen=True)
class Forged:
    """A completion that is damaged, and a regular expression of the line that says so."""

    damage: Callable[[Any], Any]
    """Takes JSON, and returns JSON, or the bytes of an answer."""
    said: str


def _token(value: Any) -> Forged:
    def damage(content: Any) -> Any:
        content["choices"][0]["token_ids"][1] = value
        return content

    return Forged(damage, "whose token 1 is .*, no integer from 0 to (279|13)\\)")


def _logprob(value: Any) -> Forged:
    def damage(content: Any) -> Any:
        content["choices"][0]["logprobs"]["token_logprobs"][-1] = value
        return content

    return Forged(damage, "with a log-probability that is .*, and not a finite number of at most 0")


def _probed(value: Any) -> Forged:
    def damage(content: Any) -> Any:
        logprobs = content["choices"][0]["prompt_logprobs"]
        logprobs[1] = {key: {"logprob": value} for key in logprobs[1]}
        return content

    return Forged(damage, _logprob(0).said)


def _choice(said: str, **fields: Any) -> Forged:
    def damage(content: Any) -> Any:
        for name, value in fields.items():
            old = content["choices"][0][name]
            content["choices"][0][name] = value(old) if callable(value) else value
        return content

    return Forged(damage, said)


def _whole(value: Any, said: str = "without a completion") -> Forged:
    return Forged(lambda content: value, said)


def _counted(name: str, value: Any) -> Forged:
    def damage(content: Any) -> Any:
        content["usage"][name] = value
        return content

    return Forged(damage, "whose usage is .*, and there are ")


def _cut(content: Any) -> Any:
    (choice,) = content["choices"]
    choice["token_ids"], choice["logprobs"] = choice["token_ids"][:2], {"token_logprobs": [-1.0, -1.0]}
    return content | {"usage": {"prompt_tokens": 3, "completion_tokens": 2}}


_NESTED = b"[" * 200_000
_LISTS = "without token ids and exactly one log-probability of each"

FORGED = {
    **{f"token {value!r:.20}": _token(value) for value in (10**6, 280, 2**70, -5, None, 1.5, True, "7", [7], {}, NAN)},
    **{
        f"log-probability {value!r:.20}": _logprob(value)
        for value in (NAN, INFINITY, -INFINITY, -9999.0, 0.5, 2**70, -(2**2000), None, True, "-1", [-1.0])
    },
    "ids left out": _choice(_LISTS, token_ids=None),
    "no ids": _choice(_LISTS, token_ids=[]),
    "ids are text": _choice(_LISTS, token_ids="123456"),
    "an id less": _choice(_LISTS, token_ids=lambda ids: ids[1:]),
    "too many ids": _choice(
        "of 7 tokens, and at most 6 were asked for",
        token_ids=lambda ids: [*ids, 1],
        logprobs=lambda of: {"token_logprobs": [*of["token_logprobs"], -1.0]},
    ),
    "log-probabilities left out": _choice(_LISTS, logprobs=None),
    "a log-probability less": _choice(_LISTS, logprobs=lambda of: {"token_logprobs": of["token_logprobs"][1:]}),
    "log-probabilities are a number": _choice(_LISTS, logprobs={"token_logprobs": 3}),
    "broken off": _choice(r"that was broken off \(finish_reason 'abort'\)", finish_reason="abort"),
    "no reason": _choice(r"that was broken off \(finish_reason None\)", finish_reason=None),
    "a reason that is a table": _choice(r"that was broken off \(finish_reason \{\}\)", finish_reason={}),
    "cut": Forged(_cut, "cut after 2 of 6 tokens: --max-model-len"),
    "another prompt": _choice("to another prompt than was sent", prompt_token_ids=[1, 2]),
    "prompt is text": _choice("to another prompt than was sent", prompt_token_ids="no"),
    "another count of the prompt": _counted("prompt_tokens", 4),
    "another count of tokens": _counted("completion_tokens", 7),
    "a count that is text": _counted("prompt_tokens", "3"),
    "two choices": Forged(lambda content: {"choices": content["choices"] * 2}, "with 2 completions, and one"),
    "no choice": _whole({"choices": []}, "with 0 completions, and one"),
    "choices are a table": _whole({"choices": {"0": {}}}),
    "a choice is null": _whole({"choices": [None]}, _LISTS),
    "null": _whole(None),
    "a list": _whole([1, 2]),
    "a number": _whole(7),
    "text": _whole(b"<html>"),
    "nothing": _whole(b""),
    "no UTF-8": _whole(b"\xff\xfe{"),
    "cut JSON": Forged(lambda content: json.dumps(content).encode()[:-9], "without a completion"),
    "a number of 5000 digits": _whole(b'{"choices": [' + b"9" * 5000 + b"]}"),
    "200,000 brackets": _whole(_NESTED),
    "ids are 200,000 brackets": _whole(b'{"choices": [{"token_ids": ' + _NESTED + b"]" * 200_000 + b"}]}"),
    "900 brackets": _whole(
        b'{"choices": [{"token_ids": [' + b"[" * 900 + b"]" * 900 + b'], "logprobs": {"token_logprobs": [0]}}]}',
        "whose token 0 is|without a completion",
    ),
    "5 MiB": Forged(lambda content: json.dumps(content).encode() + b" " * 5 * 2**20, "of more than \\d+ bytes"),
}
"""Of an answer, by name."""

PROBED = {
    **{f"probe {value!r:.20}": _probed(value) for value in (NAN, -INFINITY, 0.5, 2**70, 2**2000, "-1", True, None, [])},
    "probe left out": _choice("without log-probabilities of the prompt", prompt_logprobs=None),
    "probe of lists": _choice(_logprob(0).said, prompt_logprobs=lambda old: [[]] * len(old)),
    "probe too short": _choice("without log-probabilities of the prompt", prompt_logprobs=lambda old: old[1:]),
    "probe of another prompt": _choice("to another prompt than was sent", prompt_token_ids=[1]),
}
"""Of the probe, by name."""
FORGED |= PROBED
