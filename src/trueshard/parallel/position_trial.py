"""Ask the blocks of a model by trial whether anything in them but attention looks at other positions.

The holder of the blocks runs its own forward (``forward_trial``); where it calls a block that is the first of its kind,
a copy with random weights runs on random hidden states twice, and the second time one token differs. Attention is
replaced by a function that reads its own position alone, so no module of the copy may give something else for another
token: a convolution or a recurrence does, and so does attention that does not go through the replaced function.

Random weights fill branches that begin at zero. They are views of little memory, and a large matrix is replaced by a
cheap mixture of features, so that a trial takes milliseconds at any size, also where weights are on the meta device.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from trueshard import _torch
from trueshard.model import names
from trueshard.parallel.forward_trial import list_of, run_holder
from trueshard.parallel.module_copies import CheapMatrices, kind_of, random_copy
from trueshard.parallel.random_streams import random_states, set_random_states

LENGTH = 11
"""Tokens of the sequence on which a block is tried: a prime, by which the dimension of positions is recognised."""
_PLACE = 5
"""Position of the token that differs."""
CALLS = "_trueshard_trial_calls"
"""Attribute of the modules of attention in a copy: what ``attend_alone`` notes."""

Reading = tuple[str, list[torch.Tensor]]
"""A module's name, and copies of the tensors that it returned."""


def find_mixer(model: nn.Module, attention: Mapping[str, nn.Module], configs: Mapping[int, Any]) -> str | None:
    """Return why the blocks of ``model`` look at other positions beside attention; None: they do not.

    Args:
        attention: its modules of attention, by name; they lie in one list of blocks.
        configs: ``id`` of a configuration of its modules → the one that copies have, with which each module of
            attention calls ``attend_alone``.

    Raises:
        RuntimeError: it cannot be told; says why.
    """
    trial = _Trial({id(module): name for name, module in names.named_modules(model)}, attention, configs)
    with _torch.real_tensors(), torch.no_grad():  # also where the model is simulated
        holder, blocks = list_of(model, attention)
        run_holder(holder, blocks, LENGTH, visit=trial.visit, replace=trial.replace)
    return trial.why


def attend_alone(
    module: Any,
    query: torch.Tensor,  # (1, heads, LENGTH, head size)
    key: torch.Tensor,  # (1, key-value heads, LENGTH, head size)
    value: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Return something like attention that reads each token by itself: (1, LENGTH, heads, head size of values)."""
    module.__dict__[CALLS].append([t.clone() for t in _torch.tensors_in([args, kwargs])])
    heads = query.shape[1]
    key, value = (t.repeat_interleave(math.ceil(heads / t.shape[1]), 1)[:, :heads] for t in (key, value))
    scores = torch.tanh(query.mean(-1, keepdim=True) + key.mean(-1, keepdim=True))
    return (value * (1 + scores)).transpose(1, 2).contiguous(), None


class _Trial:
    """Trial of one model; ``why``: what was seen first that looks at other positions."""

    def __init__(
        self, module_names: Mapping[int, str], attention: Mapping[str, nn.Module], configs: Mapping[int, Any]
    ) -> None:
        self.module_names, self.configs = module_names, configs
        self.attention = {id(module) for module in attention.values()}
        self.kinds: set[Any] = set()
        self.noise = torch.Generator().manual_seed(0)
        self.why: str | None = None

    def visit(self, block: nn.Module, hidden: torch.Tensor, args: Any, kwargs: Any) -> None:
        """Try a block that its holder calls with these arguments, if none of its kind was tried."""
        kind = kind_of(names.unwrap(block))
        if kind not in self.kinds and not self.why:
            self.kinds.add(kind)
            self._try(block, hidden, args, kwargs)

    def replace(self, child: nn.Module) -> nn.Module:
        """Return a copy of a child beside the blocks that is tried when it is called."""
        return _Child(self, child)

    def _try(self, module: nn.Module, hidden: torch.Tensor, args: Any, kwargs: Any) -> None:
        calls: dict[str, list[Any]] = {}
        copied = self.copy(names.unwrap(module), calls)
        tokens = torch.randn(hidden.shape, generator=self.noise)
        other = tokens.clone()
        other[:, _PLACE] = torch.randn(hidden.shape[-1], generator=self.noise)
        readings: list[list[Reading]] = []
        arguments = []

        def note(*call: Any, path: str) -> None:
            name = ".".join(filter(None, (self.module_names.get(id(module)), path)))
            readings[-1].append((name, [tensor.clone() for tensor in _torch.tensors_in(call[-1])]))

        for path, child in copied.named_modules():
            child.register_forward_hook(functools.partial(note, path=path))
        for values in (tokens, other):
            readings.append([])
            with CheapMatrices():
                copied(values, *args, **kwargs)
            arguments.append({name: list(noted) for name, noted in calls.items()})
            for noted in calls.values():
                noted.clear()
        self.why = self._compare(readings, arguments)
        if not self.why and (place := _find_draw(copied, tokens, args, kwargs)) is not None:
            name = ".".join(filter(None, (self.module_names.get(id(module)), place)))
            self.why = f"{name!r} draws random numbers, others for parts: set dropout and noise to 0"

    def copy(self, module: nn.Module, calls: dict[str, list[Any]] | None = None) -> nn.Module:
        """Return a copy with random weights, its own buffers, and the configurations of the trial."""

        def finish(original: nn.Module, copied: nn.Module) -> None:
            if calls is not None and id(original) in self.attention:
                copied.__dict__[CALLS] = calls.setdefault(self.module_names[id(original)], [])

        return random_copy(module, self.noise, replaced=self.configs, finish=finish)

    def _compare(self, readings: list[list[Reading]], arguments: list[dict[str, list[Any]]]) -> str | None:
        """Return what gave something else for a token that did not change, innermost and first."""
        for name, calls in arguments[0].items():
            if len(calls) != 1:
                return f"the attention of {name!r} does not go through transformers' attention interface"
            if not _same(calls[0], arguments[1][name][0]):
                return f"the attention of {name!r} is given what it computes from other positions"
        for (name, one), (_, two) in zip(*readings, strict=False):
            if not all(map(_same_elsewhere, one, two)):
                return f"it looks at other positions outside of attention, as {name!r} shows"
        if not any(LENGTH in tensor.shape for tensor in readings[0][-1][1]):
            raise RuntimeError(f"what {readings[0][-1][0]!r} returns has no positions")
        return None


class _Child(nn.Module):
    """Copy of a child of the holder, tried on the first hidden states that it is given."""

    def __init__(self, trial: _Trial, child: nn.Module) -> None:
        super().__init__()
        self.trial, self.is_tried = trial, False
        self.__dict__["child"], self.copied = child, trial.copy(names.unwrap(child))

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name == "copied" else getattr(self.__dict__["child"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], torch.Tensor) and args[0].is_floating_point() and not self.is_tried:
            self.is_tried = True
            if args[0].shape[:2] == (1, LENGTH) and not self.trial.why:
                self.trial._try(self.__dict__["child"], args[0], args[1:], kwargs)
        with CheapMatrices():
            return self.copied(*args, **kwargs)


def _find_draw(copied: nn.Module, tokens: torch.Tensor, args: Any, kwargs: Any) -> str | None:
    """Return the module of a copy by whose end it has drawn first; None: it returns the same each time in training."""
    states, outputs, places = random_states(None), [], list[str]()
    for key, child in copied.named_modules():
        child.register_forward_hook(lambda *_, key=key: places.append(key) if random_states(None) != states else None)
    copied.train()
    with contextlib.suppress(Exception), CheapMatrices():  # in training it may take more than a trial gives it
        outputs = [_torch.tensors_in(copied(tokens, *args, **kwargs)) for _ in range(2)]
    set_random_states(states)
    return places[0] if places and len(outputs) == 2 and not _same(*outputs) else None


def _same(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return len(one) == len(two) and all(map(torch.equal, one, two))


def _same_elsewhere(one: torch.Tensor, two: torch.Tensor) -> bool:
    """True if two results are equal but for the token that differs, or hold no positions: tokens of one expert."""
    dims = [dim for dim, size in enumerate(one.shape) if size == LENGTH]
    if one.shape != two.shape or not dims:
        return True
    others = torch.tensor([place for place in range(LENGTH) if place != _PLACE])
    pairs = ((t.index_select(dim, others).double() for t in (one, two)) for dim in dims)
    return any(torch.allclose(first, second, rtol=1e-3, atol=1e-4, equal_nan=True) for first, second in pairs)
