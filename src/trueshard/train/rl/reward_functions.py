"""Reward functions: how one is found, which form it has, what it is called with, and what it may return.

Forms:

- one: ``score(completion, record, sample) -> float | dict``;
- list: ``scores(completions, records, samples) -> list``, by its name or those of its parameters;
- sequential: ``(reward_input) -> dict`` with "overall", by the name of its first parameter, as in EasyR1;
- batch: ``(reward_inputs) -> list[dict]``, likewise;
- trl: ``(completions, **columns) -> list``, by the parameter "completions", as in TRL: called by name;
- verl: ``(data_source, solution_str, ground_truth, extra_info) -> float | dict`` with "score", by "solution_str", as in
  verl: called by name; verl_batch: the same names with an s, lists, ``-> list``, by "solution_strs";
- episode: a generator function ``episode(record)``, which yields messages and returns the reward.

Used in the worker's process alone, which nothing here makes import torch.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trueshard.errors import with_kind
from trueshard.train.own_code import Wrong, find
from trueshard.train.rl.samples import Sample

Form = Literal["one", "list", "sequential", "batch", "trl", "verl", "verl_batch", "episode"]
LISTS = ("list", "batch", "trl", "verl_batch")
"""Forms that are called with all samples at once."""
_POSITIONAL: dict[Form, tuple[str, ...]] = {
    "one": ("completion", "record", "sample"),
    "list": ("completions", "records", "samples"),
    "sequential": ("reward_input",),
    "batch": ("reward_inputs",),
    "episode": ("record",),
}
_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
_NAMED: dict[Form, tuple[str, ...]] = {
    "trl": ("prompts", "completions", "completion_ids"),
    "verl": _VERL,
    "verl_batch": tuple(f"{name}s" for name in _VERL),
}
"""Forms that are called by name, with what they have parameters for; "trl" with the keys of records, too."""
_TOTAL: dict[Form, str] = {"sequential": "overall", "batch": "overall", "verl": "score", "verl_batch": "score"}
"""Key of the reward in a dict that a function returned; "reward" in other forms."""
_LATEX = ("$", "\\boxed", "\\(", "\\[")
"""Marks of text in which LaTeX is set off already."""


@dataclass(frozen=True)
class Function:
    """A reward function."""

    call: Callable[..., Any]
    form: Form
    arguments: dict[str, Any]
    """Keyword arguments of every call."""
    folder: Path | None
    """Folder of its file; None if it is built in."""

    def on(self, records: list[dict[str, Any]], samples: list[Sample], *, is_trial: bool = False) -> Any:
        """Call it with samples, one unless its form takes a list; ``is_trial``: a key that no record has is `Wrong`."""
        completions = [sample.text for sample in samples]
        if self.form in _NAMED:
            return self.call(**self._named(records, samples, is_trial))
        if self.form == "list":
            return self.call(completions, records, samples, **self.arguments)
        if self.form == "one":
            return self.call(completions[0], records[0], samples[0], **self.arguments)
        inputs = [_easy_input(record, sample) for record, sample in zip(records, samples, strict=True)]
        return self.call(inputs if self.form == "batch" else inputs[0], **self.arguments)

    def _named(self, records: list[dict[str, Any]], samples: list[Sample], is_trial: bool) -> dict[str, Any]:
        """Return the keyword arguments of a call of a form that is called by name."""
        given: dict[str, Any]
        if self.form == "trl":
            keys, columns = {key for record in records for key in record}, _columns(self.call, self.arguments)
            if is_trial and (missing := [column for column in columns if column not in keys]):
                known = ", ".join(sorted(keys))
                raise Wrong(f"it takes {', '.join(missing)}, and records have {known}; rename it, or give it a default")
            keys = {*columns, *keys} - {"prompt", "completion"}
            given = {key: [record.get(key) for record in records] for key in sorted(keys)}
            given["prompts"] = prompts = [record.get("prompt") for record in records]
            given["completions"] = [
                [{"role": "assistant", "content": sample.text}] if isinstance(prompt, list) else sample.text
                for sample, prompt in zip(samples, prompts, strict=True)
            ]
            given["completion_ids"] = [sample.tokens for sample in samples]
        else:
            inputs = list(map(_verl_input, records, samples))
            is_batch = self.form == "verl_batch"
            given = {f"{key}s": [one[key] for one in inputs] for key in _VERL} if is_batch else inputs[0]
        return _taken(self.call, given) | self.arguments


def _easy_input(record: Mapping[str, Any], sample: Sample) -> dict[str, Any]:
    """Return what EasyR1's functions take: the record, and three keys of theirs."""
    truth = {"ground_truth": record["answer"]} if "answer" in record else {}
    return {**truth, **record, "response": sample.text, "response_length": len(sample.tokens)}


def _verl_input(record: Mapping[str, Any], sample: Sample) -> dict[str, Any]:
    """Return what verl's functions take: its record's keys, or ours. Raises `Wrong` without a ground truth."""
    model = record.get("reward_model")
    places = model if isinstance(model, Mapping) else {}, record
    truths = [place[key] for place in places for key in ("ground_truth", "answer") if key in place]
    if not truths:
        raise Wrong(f"the record has no reward_model.ground_truth, ground_truth or answer, but {', '.join(record)}")
    more = record.get("extra_info") or {}
    return dict(zip(_VERL, (record.get("data_source"), sample.text, truths[0], more), strict=True))


# Finding one


def maths(completion: str, record: Mapping[str, Any], sample: Sample) -> float:
    """Return 1.0 if the last expression of ``completion`` equals ``record["answer"]`` as mathematics, else 0.0.

    Raises `ValueError` if the record's answer is no expression.
    """
    from math_verify import parse, verify

    answer = str(record["answer"])
    expected = parse(answer if any(mark in answer for mark in _LATEX) else f"${answer}$")
    if not expected:
        raise ValueError(f"the record's answer {answer[:60]!r} is no mathematical expression")
    return float(verify(expected, parse(completion)))


def load(words: str, arguments: dict[str, Any]) -> Function:
    """Import "file.py:function", or take "maths", and return the function. Raises `Wrong`, which names it."""
    if words == "maths":
        if importlib.util.find_spec("math_verify") is None:
            raise Wrong("maths needs math_verify, which is not installed; pip install math-verify")
        return Function(maths, "one", arguments, None)
    call, folder = find(words, ("maths",))
    form = form_of(call, words.rpartition(":")[2])
    check_signature(call, form, arguments, words)
    return Function(call, form, arguments, folder)


def form_of(call: Callable[..., Any], name: str) -> Form:
    """Return the form of a function with this name."""
    if inspect.isgeneratorfunction(call):
        return "episode"
    parameters: Mapping[str, inspect.Parameter] = {}
    with contextlib.suppress(TypeError, ValueError):  # compiled code without a signature
        parameters = inspect.signature(call).parameters
    first = next(iter(parameters), "")
    if first in ("reward_input", "reward_inputs"):
        return "sequential" if first == "reward_input" else "batch"
    if "solution_str" in parameters or "solution_strs" in parameters:
        return "verl" if "solution_str" in parameters else "verl_batch"
    if {*_POSITIONAL["list"]} <= {*parameters}:
        return "list"
    if "completions" in parameters and (name != "scores" or _takes_all(parameters)):
        return "trl"
    return "list" if name == "scores" else "one"


def _takes_all(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def _taken(call: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of ``values`` that a function has parameters for; all if it has ``**kwargs``."""
    parameters = inspect.signature(call).parameters
    return {key: value for key, value in values.items() if key in parameters or _takes_all(parameters)}


def _columns(call: Callable[..., Any], arguments: Mapping[str, Any]) -> list[str]:
    """Return the parameters without a default that are neither arguments nor what TRL gives to each function."""
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [
        name
        for name, parameter in inspect.signature(call).parameters.items()
        if parameter.default is parameter.empty and parameter.kind not in variable
        if name not in _NAMED["trl"] and name not in arguments
    ]


def check_signature(call: Callable[..., Any], form: Form, arguments: dict[str, Any], words: str) -> None:
    """Raise `Wrong` unless the function takes what a call of its form gives."""
    if inspect.iscoroutinefunction(call) or inspect.isasyncgenfunction(call):
        raise Wrong(f"{words} is async, and is called without an event loop; make it a plain function")
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):
        return
    columns = _columns(call, arguments) if form == "trl" else []
    positional, named = _POSITIONAL.get(form, ()), dict.fromkeys([*_NAMED.get(form, ()), *columns])
    try:
        signature.bind(*positional, **_taken(call, named) | arguments)
    except TypeError as error:
        expected = ", ".join((*positional, *(f"{key}=…" for key in named | arguments)))
        raise Wrong(
            f"{words} is called with ({expected}), and has {signature}: {error}; see reward.arguments"
        ) from None


# What it returns, or raises


def rewards_of(value: Any, function: Function, samples: int) -> list[tuple[float, dict[str, float]]]:
    """Return (reward, parts) of each sample from what a function returned. Raises `Wrong`."""
    if function.form not in LISTS:
        return [reward_of(value, function)]
    if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__len__"):
        raise Wrong(f"it returned {_short(value)}, not a list of {samples} rewards")
    if len(value) != samples:
        raise Wrong(f"it returned {len(value)} rewards for {samples} samples")
    result = []
    for number, reward in enumerate(value):
        try:
            result.append(reward_of(reward, function))
        except Wrong as error:
            raise Wrong(str(error), at=number) from None
    return result


def reward_of(value: Any, function: Function) -> tuple[float, dict[str, float]]:
    """Return (reward, parts) of one sample from what a function returned for it. Raises `Wrong`."""
    if value is None and function.form == "trl":  # it has none for this sample
        return math.nan, {}
    if not isinstance(value, Mapping):
        return number("it returned", value), {}
    key = _TOTAL.get(function.form, "reward")
    if key not in value:
        raise Wrong(f'it returned a dict without "{key}", but with {", ".join(map(repr, value)) or "nothing"}')
    # verl's functions return texts, too, such as the answer that they found.
    left_out = (type(None), str, list) if function.form in ("verl", "verl_batch") else type(None)
    others = {str(name): part for name, part in value.items() if name != key and not isinstance(part, left_out)}
    parts = {name: number(f'in its dict "{name}" is', part) for name, part in others.items()}
    return number(f'in its dict "{key}" is', value[key]), parts


def number(says: str, value: Any) -> float:
    """Return a number of Python, numpy or torch as a float; raise `Wrong` if it is none, or not finite."""
    try:
        number = float(math.nan if isinstance(value, (str, bytes)) else value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = math.nan
    if not math.isfinite(number):
        raise Wrong(f"{says} {_short(value)}, not a finite number")
    return number


def messages_of(value: Any) -> list[dict[str, Any]]:
    """Return the messages that an episode yielded; a string is one of the user. Raises `Wrong`."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, (list, tuple)):
        raise Wrong(f"it yielded {_short(value)}, not messages: a list of {{role, content}}, or a string")
    for message in value:
        is_message = isinstance(message, Mapping) and isinstance(message.get("role"), str) and "content" in message
        if not is_message or not isinstance(message["content"], (str, list)):
            raise Wrong(f"it yielded {_short(message)} as a message, which has no role and content")
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise Wrong(f"it yielded messages that are no JSON ({with_kind(error)})") from None
    return [dict(message) for message in value]


def _short(value: Any) -> str:
    if value is None or isinstance(value, (str, bytes, int, float)):
        text = repr(value)
        return text if len(text) < 60 else f"{text[:57]}…"
    return f"a {type(value).__name__}"
