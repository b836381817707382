"""Reward functions: how one is found, which form it has, what it is called with, and what it may return.

Forms:

- one: ``score(completion, record, sample) -> float | dict``;
- list: ``scores(completions, records, samples) -> list``, by its name;
- sequential: ``(reward_input) -> dict`` with "overall", by the name of its first parameter, as in EasyR1;
- batch: ``(reward_inputs) -> list[dict]``, likewise;
- episode: a generator function ``episode(record)``, which yields messages and returns the reward.

Used in the worker's process alone, which nothing here makes import torch.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import json
import math
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from trueshard.errors import with_kind
from trueshard.text import nearest
from trueshard.train.rl.samples import Sample

Form = Literal["one", "list", "sequential", "batch", "episode"]
LISTS = ("list", "batch")
"""Forms that are called with all samples at once."""
BUILT_IN = {"maths": "trueshard.train.rl.reward_maths"}
"""Functions without a file → their module."""
PACKAGES = {"maths": "math-verify"}
"""Built-in function → the package that it needs."""
_POSITIONAL = {
    "one": ("completion", "record", "sample"),
    "list": ("completions", "records", "samples"),
    "sequential": ("reward_input",),
    "batch": ("reward_inputs",),
    "episode": ("record",),
}
_SAMPLES_OF = {"reward_input": "sequential", "reward_inputs": "batch"}


class Wrong(Exception):
    """Mistake of a function, as half a sentence; ``at``: the input that it was made with, None for all."""

    def __init__(self, text: str, at: int | None = None) -> None:
        super().__init__(text)
        self.at = at


@dataclass(frozen=True)
class Function:
    """A reward function."""

    call: Callable[..., Any]
    form: Form
    arguments: dict[str, Any]
    """Keyword arguments of every call."""
    folder: Path | None
    """Folder of its file; None if it is built in."""

    def on(self, records: list[dict[str, Any]], samples: list[Sample]) -> Any:
        """Call it with samples, one unless its form takes a list, and return what it returns."""
        completions = [sample.text for sample in samples]
        if self.form == "list":
            return self.call(completions, records, samples, **self.arguments)
        if self.form == "one":
            return self.call(completions[0], records[0], samples[0], **self.arguments)
        inputs = [_easy_input(record, sample) for record, sample in zip(records, samples, strict=True)]
        return self.call(inputs if self.form == "batch" else inputs[0], **self.arguments)

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Turn errors inside into a ``Wrong`` with the line of the user's code: "rewards.py:12: KeyError: 'a'"."""
        try:
            yield
        except BaseException as error:
            raise Wrong(_told(error, self.folder)) from error


def _easy_input(record: Mapping[str, Any], sample: Sample) -> dict[str, Any]:
    """Return what EasyR1's functions take: the record, and three keys of theirs."""
    truth = {"ground_truth": record["answer"]} if "answer" in record else {}
    return {**truth, **record, "response": sample.text, "response_length": len(sample.tokens)}


# Finding one


def load(words: str, arguments: dict[str, Any]) -> Function:
    """Import "file.py:function", or a built-in word, and return the function. Raises `Wrong`, which names it."""
    call, folder = find(words, BUILT_IN)
    form = form_of(call, words.rpartition(":")[2])
    _check_signature(call, form, arguments, words)
    return Function(call, form, arguments, folder)


def find(words: str, built_in: Mapping[str, str]) -> tuple[Callable[..., Any], Path | None]:
    """Return the function of "file.py:function" and its folder, or of a ``built_in`` word. Raises `Wrong`."""
    path, _, name = words.rpartition(":")
    if not path and name in built_in:
        module, folder = _imported(words, lambda: importlib.import_module(built_in[name]), None), None
    elif not path or not name:
        near = nearest(words, built_in)
        words_known = f", or a word: {', '.join(built_in)}" if built_in else ""
        raise Wrong(f'{words!r} names no function; write "file.py:function"{words_known}.{near}')
    else:
        file = Path(path).expanduser().resolve()
        if not file.is_file():
            near = nearest(file.name, [each.name for each in file.parent.glob("*.py")])
            raise Wrong(f"there is no file {path!r}; correct the path.{near}")
        module, folder = _imported(words, lambda: _module(file), file.parent), file.parent
    call = getattr(module, name, None)
    if not callable(call):
        known = [key for key, value in vars(module).items() if inspect.isfunction(value) and key[0] != "_"]
        near = nearest(name, known) or (f" It has {', '.join(known)}." if known else "")
        raise Wrong(f"{Path(path).name} has no function {name!r}; name one that it has.{near}")
    return call, folder


def _imported(words: str, make: Callable[[], ModuleType], folder: Path | None) -> ModuleType:
    try:
        return make()
    except BaseException as error:
        if folder is None and isinstance(error, ModuleNotFoundError):
            raise Wrong(f"{words} needs {error.name}, which is not installed; pip install {PACKAGES[words]}") from error
        raise Wrong(f"{words} cannot be imported: {_told(error, folder)}; correct it") from error


def _module(file: Path) -> ModuleType:
    """Import a file once, with its folder on ``sys.path`` below the standard library and above installed packages.

    So a reward in a "math.py" hides nothing, and modules beside it are found before others.
    """
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == str(file):
            return module
    if str(file.parent) not in sys.path:
        installed = (i for i, each in enumerate(sys.path) if each.endswith(("site-packages", "dist-packages")))
        sys.path.insert(next(installed, len(sys.path)), str(file.parent))
    taken = file.stem in sys.modules or file.stem in sys.stdlib_module_names
    name = f"reward_{len(sys.modules)}_{file.stem}" if taken else file.stem
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file.name} is no Python file")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def form_of(call: Callable[..., Any], name: str) -> Form:
    """Return the form of a function with this name."""
    if inspect.isgeneratorfunction(call):
        return "episode"
    with contextlib.suppress(TypeError, ValueError):  # compiled code without a signature
        first = next(iter(inspect.signature(call).parameters), "")
        if first in _SAMPLES_OF:
            return _SAMPLES_OF[first]  # type: ignore[return-value]
    return "list" if name == "scores" else "one"


def _check_signature(call: Callable[..., Any], form: Form, arguments: dict[str, Any], words: str) -> None:
    """Raise `Wrong` unless the function takes what a call of its form gives."""
    if inspect.iscoroutinefunction(call) or inspect.isasyncgenfunction(call):
        raise Wrong(f"{words} is async, and is called without an event loop; make it a plain function")
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*_POSITIONAL[form], **arguments)
    except TypeError as error:
        wanted = ", ".join((*_POSITIONAL[form], *(f"{key}=…" for key in arguments)))
        raise Wrong(f"{words} is called with ({wanted}), and has {signature}: {error}; see reward.arguments") from None


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
    for number, each in enumerate(value):
        try:
            result.append(reward_of(each, function))
        except Wrong as error:
            raise Wrong(str(error), at=number) from None
    return result


def reward_of(value: Any, function: Function) -> tuple[float, dict[str, float]]:
    """Return (reward, parts) of one sample from what a function returned for it. Raises `Wrong`."""
    if not isinstance(value, Mapping):
        return _number("it returned", value), {}
    key = "overall" if function.form in ("sequential", "batch") else "reward"
    if key not in value:
        raise Wrong(f'it returned a dict without "{key}", but with {", ".join(map(repr, value)) or "nothing"}')
    others = {str(name): part for name, part in value.items() if name != key and part is not None}
    parts = {name: _number(f'in its dict "{name}" is', part) for name, part in others.items()}
    return _number(f'in its dict "{key}" is', value[key]), parts


def _number(says: str, value: Any) -> float:
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


def _told(error: BaseException, folder: Path | None) -> str:
    """Return an error in one line, after the user's line that it came from: "rewards.py:12: KeyError: 'a'"."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}: {type(error).__name__}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if folder == Path(frame.filename).parent]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}: {with_kind(error)}" if own else with_kind(error)
