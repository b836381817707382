"""Step a copy of an optimizer on small parameters that stand in for the user's.

The copy has all of the user's settings, but parameters, state and hooks of its own; the gradients are always the same.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import pickle
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import nn

from trueshard.model.regions import rows_of
from trueshard.optim.rebind import family
from trueshard.optim.seeded_random import SameDraws

EXTREMES = (1e4, 1e-4)
"""Factors of the last two gradients: a limit may be high."""
STEPS = 12
"""Enough for what is done every tenth step."""
RANKS = 4
"""Into how many pieces a parameter is cut; of five rows the last gets none."""
ROWS = 5
LARGE = (192, 160)
"""A matrix on the far side of the sizes from which optimizers factorise or quantize their state."""
LARGE_STEPS = 3


class Refused(Exception):
    """The optimizer cannot be sharded; the message is the reason. ``instead``: what to use, if that is known."""

    def __init__(self, reason: str, instead: str = "") -> None:
        super().__init__(reason)
        self.instead = instead


@dataclass
class Result:
    """Result of one trial; lists go by the number of a stand-in over all groups."""

    before: list[torch.Tensor]
    later: list[list[torch.Tensor]]
    """Values at several times."""
    state: list[dict[tuple[Any, ...], Any]]
    settings: list[dict[tuple[Any, ...], Any]] = field(default_factory=list)
    """Numbers that each group has besides parameters; at last those among the optimizer's own attributes."""
    drew: bool = False
    """Random numbers were drawn."""
    drew_elsewhere: bool = False
    """True if Python's generator or numpy's drew."""


def shapes_of(group: dict[str, Any], small: bool) -> list[tuple[int, ...]]:
    """Return the shapes of two stand-ins for each number of dimensions in the group, or of one large matrix."""
    dimensions = sorted({parameter.ndim for parameter in group["params"]})
    if not small:
        return [LARGE] if 2 in dimensions else []
    shapes: list[tuple[int, ...]] = []
    for n in dimensions:
        rest = (4, 3, 3, 2, 2, 2)[: max(0, n - 1)]
        shapes += [()] if n == 0 else [(ROWS, *rest), (ROWS + 2, *rest)]
    return shapes


def _gradient(shape: tuple[int, ...], number: int, rank: int | None, step: int, factor: float) -> torch.Tensor:
    """Return the same gradient in every trial, ``factor`` times as large.

    It keeps its direction: what estimates a distance from how far it went must see progress.
    """
    value = _values(shape, number + 100, rank) + 0.3 * _values(shape, 1000 * (step + 1) + number, rank)
    return value * (factor * 3.0 ** (number % 4))


@functools.lru_cache(maxsize=1024)
def _values(shape: tuple[int, ...], seed: int, rank: int | None) -> torch.Tensor:
    """Return normal values made from ``seed``, rows of very different size; of a ``rank`` its rows. Read-only."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    if not shape:
        return values
    rows = torch.logspace(-2, 1, shape[0])[torch.randperm(shape[0], generator=generator)]
    values *= rows.view(-1, *[1] * (len(shape) - 1))
    if rank is None:
        return values
    start, count = rows_of(shape[0], rank, RANKS)
    return values[start : start + count].clone()


def run(
    optimizer: torch.optim.Optimizer,
    shapes: list[list[tuple[int, ...]]],
    steps: int,
    *,
    extreme: bool,
    fresh: bool,
    remade: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    only: tuple[int, int] | None = None,
    rank: int = 0,
    cut: int | None = None,
    same_draws: bool = False,
) -> Result:
    """Run steps of a copy of ``optimizer`` on stand-ins of ``shapes``, by group.

    ``extreme``: the last gradients are very large, and very small. ``fresh``: forget what the optimizer has counted.
    ``remade``: construct it anew. ``only``: the one stand-in, as (group, position), that has gradients; None: all.
    ``cut``: the group of whose stand-ins there is the piece of ``rank`` alone; None: none. ``same_draws``: whatever was
    drawn before, torch draws the same.
    """
    trial = _copy(optimizer, fresh)
    numbers = itertools.count(1)
    kinds = {
        (g, i): (shape, next(numbers), rank if g == cut else None)
        for g, in_group in enumerate(shapes)
        for i, shape in enumerate(in_group)
    }
    stand_ins = {place: nn.Parameter((0.1 * _values(*kind) + 0.1).to(dtype)) for place, kind in kinds.items()}
    for g, group in enumerate(trial.param_groups):
        group["params"][:] = [stand_in for place, stand_in in stand_ins.items() if place[0] == g]
        _make_visible(group)
    if remade:
        trial = _remake(optimizer, trial)
    parameters = list(stand_ins.values())
    before = [p.detach().clone() for p in parameters]
    torch.default_generator.manual_seed(seed)  # this one alone: `torch.manual_seed` would seed the user's accelerators
    drawn = _drawn()
    later = []
    for step, factor in enumerate([1.0] * steps + list(EXTREMES) * extreme):
        for place, stand_in in stand_ins.items():
            if only in (None, place):
                stand_in.grad = _gradient(*kinds[place], step, factor).to(stand_in.dtype)
        with SameDraws(seed) if same_draws else contextlib.nullcontext():
            _step(trial)
        if step >= steps - 1:
            later.append([p.detach().clone() for p in parameters])
    settings = [_numbers(group) for group in trial.param_groups]
    states = [member.state for member in family(trial)]
    state = [dict(leaf for held in states if p in held for leaf in leaves(held[p])) for p in parameters]
    drawn_now = _drawn()
    settings.append(_numbers(vars(trial)))
    return Result(before, later, state, settings, drew=drawn_now != drawn, drew_elsewhere=drawn_now[1:] != drawn[1:])


def _drawn() -> tuple[Any, ...]:
    """Return what changes when random numbers are drawn from any of the usual generators."""
    numbers = pickle.dumps(numpy.random.get_state())  # noqa: NPY002
    return bytes(torch.get_rng_state().numpy()), random.getstate(), numbers


def _step(trial: torch.optim.Optimizer) -> None:
    try:
        trial.step()
    except Exception as error:
        if "closure" in str(error):
            raise Refused("its step needs a closure, whose loss each rank has for its own part of the batch") from error
        if "grad_fn" in str(error):
            raise Refused("it differentiates gradients (create_graph=True), which ranks cannot reduce") from error
        raise


def _make_visible(group: dict[str, Any]) -> None:
    """Raise a learning rate of zero (a warm-up's first), which would hide everything."""
    rate = group.get("lr")
    if isinstance(rate, (int, float, torch.Tensor)) and rate <= 0:
        group["lr"] = torch.full_like(rate, 1e-2) if isinstance(rate, torch.Tensor) else 1e-2


def _numbers(table: dict[str, Any]) -> dict[tuple[Any, ...], Any]:
    """Return what a group, or an optimizer by itself, may have counted or estimated: numbers and small tensors."""
    settings = {k: v for k, v in table.items() if k not in ("params", "state", "param_groups", "defaults")}
    return {
        path: value.detach().reshape(-1).clone() if isinstance(value, torch.Tensor) else value
        for path, value in leaves(settings)
        if (isinstance(value, torch.Tensor) and value.numel() <= 1) or isinstance(value, (int, float))
    }


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield (path, value) for what nested dicts, lists and tuples hold."""
    if isinstance(value, dict):
        for key, member in value.items():
            yield from leaves(member, (*path, key))
    elif isinstance(value, (list, tuple)):
        for i, member in enumerate(value):
            yield from leaves(member, (*path, i))
    else:
        yield path, value


def _copy(optimizer: torch.optim.Optimizer, fresh: bool) -> torch.optim.Optimizer:
    """Copy the optimizer as it would be with other parameters and without state: attributes, settings, wrapped ones.

    Not by ``copy.deepcopy``: torch's optimizers drop attributes of their own when they are copied.
    """
    members = family(optimizer)
    nothing = nn.Parameter(torch.zeros(1))
    memo: dict[int, Any] = {id(p): nothing for o in members for group in o.param_groups for p in group["params"]}
    copies = []
    for member in members:
        new = object.__new__(type(member))
        memo[id(member)] = new
        # What an optimizer keeps of all parameters together lies under keys that are no parameters.
        shared = {key: copy.deepcopy(value) for key, value in member.state.items() if not isinstance(key, torch.Tensor)}
        memo[id(member.state)] = defaultdict(dict, shared)
        copies.append(new)
    for member, new in zip(members, copies, strict=True):
        for key, value in vars(member).items():
            if key.endswith("_hooks"):
                new.__dict__[key] = type(value)()
            elif key != "step":  # what schedulers put over the class's own
                new.__dict__[key] = copy.deepcopy(value, memo)
    if fresh:
        settings = {"lr", "initial_lr"}.union(*(member.defaults for member in members if hasattr(member, "defaults")))
        for group in (group for new in copies for group in new.param_groups):
            for key, value in list(group.items()):
                if (
                    key not in settings
                    and isinstance(value, (int, float, torch.Tensor))
                    and not isinstance(value, bool)
                ):
                    del group[key]
    return copies[0]


def _remake(optimizer: torch.optim.Optimizer, trial: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Construct the copy with the arguments that can be read from its defaults and attributes."""
    defaults = getattr(optimizer, "defaults", {})
    names = list(inspect.signature(type(optimizer).__init__).parameters)[2:]
    arguments = {name: getattr(optimizer, name) for name in names if hasattr(optimizer, name)} | defaults
    groups = [{k: v for k, v in group.items() if k == "params" or k in defaults} for group in trial.param_groups]
    wrapped: Any = [member for member in family(trial) if member is not trial]
    made: Any = type(optimizer)
    remade: torch.optim.Optimizer = made(
        wrapped[0] if wrapped else groups, **{name: arguments[name] for name in names if name in arguments}
    )
    return remade
