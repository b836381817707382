"""Simulate layers that are recurrent over tokens by their published kernels, which ``scan_kernels.toml`` lists.

Where these are not installed, transformers loops over tokens: it would take minutes to simulate, and be wrong. So their
tensors are made and their steps recorded, each as an operator ``fused::kernel``. What loops nevertheless is refused.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import re
import string
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from trueshard import _torch
from trueshard.model import names
from trueshard.planner.simulation.fake_values import KnownValues, is_passed
from trueshard.planner.simulation.recorder import watching_forwards
from trueshard.text import tomllib

KERNELS = (
    "Layers that are recurrent over tokens compute by the kernels of causal-conv1d, mamba-ssm, flash-linear-attention "
    "or RWKV: without these, training loops over tokens."
)
MANY = 640
"""Turns of a loop from which on it is one over tokens: more than any layer has experts."""


class RefusedLoop(ValueError):
    """``module: what it does; remedy``."""


@contextlib.contextmanager
def recurrences(model: nn.Module, values: KnownValues, *, on_cpu: bool) -> Iterator[None]:
    """Inside, compute the layers of ``model`` by their kernels, except ``on_cpu``, which has none.

    Raises RefusedLoop for a layer that loops over tokens, or whose kernel is not known.
    """
    watch = values.loops = LoopWatch(model)
    files = {sys.modules.get(cls.__module__) for module in model.modules() for cls in type(module).__mro__}
    with contextlib.ExitStack() as stack:
        stack.enter_context(watching_forwards(watch.begin, watch.end, always_call=True))
        for file in () if on_cpu else files:
            for name, function in [*getattr(file, "__dict__", {}).items()]:
                if name in _table():
                    stack.enter_context(mock.patch.object(file, name, _by_kernel(name, function)))
                elif name.startswith("chunk_") and _has_kernel(function):
                    refuse = functools.partial(watch.refuse, f"has a kernel of its own ({name})")
                    stack.enter_context(mock.patch.object(file, name, refuse))
        yield
    values.loops = None


def _has_kernel(function: Any) -> bool:
    """True for a function in whose place transformers takes another package's kernel if that is installed."""
    return Path(getattr(getattr(function, "__code__", None), "co_filename", "")).name == "hub_kernels.py"


@dataclass
class _Running:
    """A call of a module."""

    module: nn.Module
    operators: int = 0
    turns: dict[Any, tuple[int, Any, int]] = field(default_factory=dict)
    """Function → instruction and operator that it was at, and how often it went back to an earlier one."""


class LoopWatch:
    """Find modules whose own forward loops over tokens, by the operators and modules that it calls."""

    def __init__(self, model: nn.Module) -> None:
        self._name_of = {module: name for name, module in names.named_modules(names.unwrap(model))}
        self._running: list[_Running] = []

    def begin(self, module: nn.Module, args: Any) -> None:
        self.count(type(module))
        self._running.append(_Running(module))

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        while self._running and self._running.pop().module is not module:
            pass

    def count(self, what: Any) -> None:
        """Count an operator, or the call of a module."""
        if not self._running:
            return
        running = self._running[-1]
        running.operators += 1
        if running.operators <= MANY:  # it is not worth the time to look where
            return
        frame = sys._getframe(1)
        while frame.f_back is not None and is_passed(frame.f_code.co_filename):
            frame = frame.f_back
        instruction, operator, turns = running.turns.get(frame.f_code, (-1, None, 0))
        turns += frame.f_lasti < instruction or (frame.f_lasti, what) == (instruction, operator)
        running.turns[frame.f_code] = frame.f_lasti, what, turns
        if turns > MANY:
            self.refuse(f"loops over tokens ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})")

    def refuse(self, what: str, *args: Any, **kwargs: Any) -> None:
        """Raise RefusedLoop for the module that runs; the rest are arguments of a kernel that is not known."""
        module = self._running[-1].module
        raise RefusedLoop(
            f"{self._name_of.get(module) or 'model'}: {type(module).__name__} {what}, and the planner knows no kernel "
            f"for it: plan with another layer in its place, or, of a loop, at most {MANY} tokens (--sequence)"
        )


# Kernels as steps


@functools.cache
def _table() -> dict[str, dict[str, Any]]:
    text = resources.files(__package__).joinpath("scan_kernels.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


_STEP = re.compile(r"(\w+)\(([\w ]*)\)(?: -> ([\w: ]+?))?(?: = ([\w ]+))?")
_LAST = ("return_final_states", "return_last_state", "output_final_state", "return_state")
"""Arguments that ask for the last state."""


@functools.cache
def _steps(name: str, part: str) -> list[tuple[str, list[str], list[str], list[str]]]:
    """Return for each step of a part its kernel, and the words for what it reads, writes and computes."""
    steps = []
    for line in _table()[name][part].strip().splitlines():
        if line in _table():
            steps += _steps(line, part)
        elif match := _STEP.fullmatch(line):
            kernel, read, written, work = match.groups("")
            steps.append((kernel, read.split(), written.split(), work.split()))
    return steps


def _by_kernel(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that records the kernel ``name`` in the place of ``function``, but of a single token."""
    signature, entry = inspect.signature(function), _table()[name]

    def compute(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        call = _Call(name, bound.arguments)
        if call.sizes["t"] == 1:
            return function(*args, **kwargs)
        warnings.warn(KERNELS, stacklevel=2)
        out = _Fused.apply(call, *call.inputs.values())
        if "last" not in entry:
            return out.transpose(1, 2) if name == "causal_conv1d_fn" else out
        asked = any(bound.arguments.get(key) for key in _LAST)
        last = out.new_empty([call.sizes[letter] for letter in entry["last"]], dtype=torch.float32) if asked else None
        return (out, last) if asked or "pair" in entry else out

    return compute


class _Call:
    """A call of a kernel: its inputs by their names in the table, and the sizes that letters stand for."""

    def __init__(self, name: str, arguments: dict[str, Any]) -> None:
        self.name, self.entry = name, _table()[name]
        self.inputs: dict[str, torch.Tensor] = {}
        self.sizes: dict[str, Any] = {"e": 2, "g": arguments.get("ngroups"), "p": arguments.get("headdim")}
        for word in self.entry["inputs"].split():
            keys, sizes = word.split(":")
            key, _, argument = keys.partition("=")
            if (tensor := arguments[argument or key]) is not None:
                self.inputs[key] = tensor.transpose(1, 2) if sizes == "btk" else tensor
                self.sizes |= dict(zip(sizes, self.inputs[key].shape, strict=True))
        self.dtype = next(iter(self.inputs.values())).dtype
        if self.sizes["g"] is not None:  # beside the channels, the convolution has B and C of each group
            self.sizes["n"] = (self.sizes["k"] - self.sizes["d"]) // (2 * self.sizes["g"])
        chunk = self.entry.get("chunk", 1)
        self.sizes["q"] = arguments[chunk] if isinstance(chunk, str) else chunk
        self.sizes["c"] = -(-self.sizes["t"] // self.sizes["q"])

    def run(self, part: str, tensors: dict[str, torch.Tensor]) -> None:
        """Run the steps of ``part``, ``"forward"`` or ``"backward"``; ``tensors`` gets what they make, by name."""
        forward = {kernel for kernel, *_ in _steps(self.name, "forward")}
        for kernel, read, written, work in _steps(self.name, part):
            words = [word.split(":") for word in written]
            shapes = [[self.sizes[letter] for letter in sizes] for _, sizes, *_ in words]
            dtypes = [getattr(torch, dtype[0]) if dtype else self.dtype for _, _, *dtype in words]
            terms = [(term.rstrip(string.ascii_letters), term.lstrip(string.digits)) for term in work]
            flops = sum(int(times) * math.prod([self.sizes[size] for size in sizes]) for times, sizes in terms)
            # What backward computes again is recorded as recomputed: it is no work of the model.
            with torch.set_grad_enabled(_torch.in_backward() and (part == "forward" or kernel in forward)):
                results = _operator(kernel)([tensors[key] for key in read if key in tensors], shapes, dtypes, flops)
            tensors |= {key: result for (key, *_), result in zip(words, results, strict=True)}


_LIBRARY = torch.library.Library("fused", "FRAGMENT")


@functools.cache
def _operator(kernel: str) -> Any:
    """Return ``fused::kernel``: (tensors, shapes and dtypes of results, operations) → results."""

    def results(read: list[torch.Tensor], shapes: list[list[int]], dtypes: list[torch.dtype], flops: int) -> Any:
        return [read[0].new_empty(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]

    _LIBRARY.define(f"{kernel}(Tensor[] read, int[][] shapes, ScalarType[] dtypes, int flops) -> Tensor[]")
    _LIBRARY.impl(kernel, results, "CompositeExplicitAutograd")
    return getattr(torch.ops.fused, kernel)


class _Fused(torch.autograd.Function):
    """A kernel with its gradient."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.call, tensors, call.inputs = call, dict(zip(call.inputs, inputs, strict=True)), {}
        ctx.gradients = [(f"d{key}", tensor.shape, tensor.dtype) for key, tensor in tensors.items()]
        call.run("forward", tensors)
        ctx.kept = [key for key in call.entry["kept"].split() if key in tensors]
        ctx.save_for_backward(*(tensors[key] for key in ctx.kept))
        return tensors[call.entry.get("result", "y")]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        tensors = dict(zip(ctx.kept, ctx.saved_tensors, strict=True))
        tensors[f"d{ctx.call.entry.get('result', 'y')}"] = gradients[0]
        ctx.call.run("backward", tensors)
        made: list[torch.Tensor | None] = [None]
        for (key, shape, dtype), needed in zip(ctx.gradients, ctx.needs_input_grad[1:], strict=True):
            gradient = tensors[key] if key in tensors else torch.empty(shape, dtype=dtype)
            made.append(gradient.to(dtype).view(shape) if needed else None)
        return tuple(made)
