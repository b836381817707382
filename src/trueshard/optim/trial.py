"""Steps a copy of an optimizer on small parameters that stand in for the user's.

The copy has all of the user's settings, but parameters, state and hooks of its own; the gradients are always the same.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import nn

from trueshard.distributed import rows_of
from trueshard.optim.rebind import family

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
    """The optimizer cannot be sharded; the message is the reason."""


@dataclass
class Result:
    """One run: per stand-in the values before and after, and its state."""

    before: list[torch.Tensor]
    later: list[list[torch.Tensor]]
    """Values at several times."""
    state: list[dict[tuple[Any, ...], Any]]
    settings: list[dict[tuple[Any, ...], Any]] = field(default_factory=list)
    """By group, what it has besides parameters; at last the optimizer's own attributes."""
    drew: bool = False
    """Random numbers were drawn."""


def shapes_of(group: dict[str, Any], small: bool) -> list[tuple[int, ...]]:
    """Two stand-ins for each number of dimensions in the group, or one large matrix."""
    dimensions = sorted({parameter.ndim for parameter in group["params"]})
    if not small:
        return [LARGE] if 2 in dimensions else []
    found: list[tuple[int, ...]] = []
    for n in dimensions:
        rest = (4, 3, 3, 2, 2, 2)[: max(0, n - 1)]
        found += [()] if n == 0 else [(ROWS, *rest), (ROWS + 2, *rest)]
    return found


def _values(shape: tuple[int, ...], seed: int, scale: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * scale
    if shape:
        rows = torch.logspace(-2, 1, shape[0])[torch.randperm(shape[0], generator=generator)]
        values *= rows.view(-1, *[1] * (len(shape) - 1))
    return values


def _piece(whole: torch.Tensor, rank: int) -> torch.Tensor:
    if whole.ndim == 0:
        return whole
    start, rows = rows_of(whole.shape[0], rank, RANKS)
    return whole[start : start + rows].clone()


class _StandIn:
    """A parameter in the place of one of the user's, whole, or the piece of it that a rank has.

    Args:
        shape: of the whole.
        number: one of its own; values and gradients follow from it.
        dtype: of the parameter.
        rank: whose piece; None: the whole.
    """

    def __init__(self, shape: tuple[int, ...], number: int, dtype: torch.dtype, rank: int | None) -> None:
        self._shape, self._number, self._rank = shape, number, rank
        self.parameter = nn.Parameter(self._part(0.1 * _values(shape, number, 1.0) + 0.1).to(dtype))

    def give_gradient(self, step: int, factor: float, has_one: bool) -> None:
        """Set the gradient of a step, ``factor`` times as large as usual, or none."""
        # Mostly one direction: what estimates a distance from how far it went must see progress.
        scale = 3.0 ** (self._number % 4)
        steady = _values(self._shape, self._number + 100, scale)
        value = steady + 0.3 * _values(self._shape, 1000 * (step + 1) + self._number, scale)
        if factor != 1:
            value = value * factor
        self.parameter.grad = self._part(value).to(self.parameter.dtype) if has_one else None

    def _part(self, whole: torch.Tensor) -> torch.Tensor:
        return whole if self._rank is None else _piece(whole, self._rank)


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
) -> Result:
    """Steps of a copy of ``optimizer`` on stand-ins of ``shapes``.

    Args:
        optimizer: the user's.
        shapes: of the stand-ins, by group.
        steps: how many.
        extreme: let the last gradients be very large, and very small.
        fresh: forget what the optimizer has counted.
        remade: construct it anew.
        seed: of the random number generators.
        dtype: of the stand-ins.
        only: the one stand-in, as (group, position), that has gradients; None: all.
        rank: the piece of those that are cut.
        cut: the group whose stand-ins are cut; None: none.
    """
    trial = _copy(optimizer, fresh)
    numbers = itertools.count(1)
    stand_ins = [
        [_StandIn(shape, next(numbers), dtype, rank if g == cut else None) for shape in each]
        for g, each in enumerate(shapes)
    ]
    for group, members in zip(trial.param_groups, stand_ins, strict=True):
        group["params"][:] = [each.parameter for each in members]
        _make_visible(group)
    if remade:
        trial = _remake(optimizer, trial)
    flat = [each.parameter for members in stand_ins for each in members]
    before = [p.detach().clone() for p in flat]
    torch.manual_seed(seed)
    drawn = _drawn()
    later = []
    for step in range(steps + len(EXTREMES) * extreme):
        factor = 1.0 if step < steps else EXTREMES[step - steps]
        for g, members in enumerate(stand_ins):
            for i, each in enumerate(members):
                each.give_gradient(step, factor, has_one=only is None or only == (g, i))
        _step(trial)
        if step >= steps - 1:
            later.append([p.detach().clone() for p in flat])
    state = [_flat_state(trial, p) for p in flat]
    settings = [_numbers({k: v for k, v in group.items() if k != "params"}) for group in trial.param_groups]
    own = _numbers({k: v for k, v in vars(trial).items() if k not in ("state", "param_groups", "defaults")})
    return Result(before, later, state, [*settings, own], drew=_drawn() != drawn)


def _drawn() -> tuple[Any, ...]:
    """Changes when random numbers are drawn from any of the usual generators."""
    return bytes(torch.get_rng_state().numpy()), random.getstate(), str(numpy.random.get_state())  # noqa: NPY002


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
    """A learning rate of zero (a warm-up's first) would hide everything."""
    rate = group.get("lr")
    if isinstance(rate, torch.Tensor):
        group["lr"] = rate.detach().clone() if float(rate) > 0 else torch.full_like(rate, 1e-2)
    elif isinstance(rate, (int, float)) and rate <= 0:
        group["lr"] = 1e-2


def _flat_state(trial: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[tuple[Any, ...], Any]:
    found: dict[tuple[Any, ...], Any] = {}
    for member in family(trial):
        if parameter in member.state:
            found |= dict(leaves(member.state[parameter]))
    return found


def _numbers(table: dict[str, Any]) -> dict[tuple[Any, ...], Any]:
    """What may have been counted or estimated: numbers and small tensors."""
    return {
        path: value.detach().clone() if isinstance(value, torch.Tensor) else value
        for path, value in leaves(table)
        if (isinstance(value, torch.Tensor) and value.numel() <= 1) or isinstance(value, (int, float))
    }


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from leaves(each, (*path, key))
    elif isinstance(value, (list, tuple)):
        for i, each in enumerate(value):
            yield from leaves(each, (*path, i))
    else:
        yield path, value


def _copy(optimizer: torch.optim.Optimizer, fresh: bool) -> torch.optim.Optimizer:
    """The optimizer as it would be with other parameters and without state: attributes, settings, wrapped ones too.

    Not by ``copy.deepcopy``: torch's optimizers drop attributes of their own when they are copied.
    """
    members = family(optimizer)
    nothing = nn.Parameter(torch.zeros(1))
    memo: dict[int, Any] = {id(p): nothing for each in members for group in each.param_groups for p in group["params"]}
    copies = []
    for each in members:
        new = object.__new__(type(each))
        memo[id(each)] = new
        # What an optimizer keeps of all parameters together lies under keys of its own.
        own = {key: copy.deepcopy(value) for key, value in each.state.items() if not isinstance(key, torch.Tensor)}
        memo[id(each.state)] = defaultdict(dict, own)
        copies.append(new)
    for each, new in zip(members, copies, strict=True):
        for key, value in vars(each).items():
            if key.endswith("_hooks"):
                new.__dict__[key] = type(value)()
            elif key != "step":  # what schedulers put over the class's own
                new.__dict__[key] = copy.deepcopy(value, memo)
    if fresh:
        given = {"lr", "initial_lr"}.union(*(each.defaults for each in members if hasattr(each, "defaults")))
        for group in (group for new in copies for group in new.param_groups):
            for key in [key for key, value in group.items() if key not in given and _is_number(value)]:
                del group[key]
    return copies[0]


def _remake(optimizer: torch.optim.Optimizer, trial: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The copy, constructed: with the arguments that can be read from its defaults and attributes."""
    defaults = getattr(optimizer, "defaults", {})
    names = list(inspect.signature(type(optimizer).__init__).parameters)[2:]
    known = {name: defaults.get(name, getattr(optimizer, name, _MISSING)) for name in names}
    groups = [{k: v for k, v in group.items() if k == "params" or k in defaults} for group in trial.param_groups]
    wrapped: Any = [each for each in family(trial) if each is not trial]
    made: Any = type(optimizer)
    remade: torch.optim.Optimizer = made(
        wrapped[0] if wrapped else groups, **{name: value for name, value in known.items() if value is not _MISSING}
    )
    return remade


_MISSING = object()


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, torch.Tensor)) and not isinstance(value, bool)


def first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no message'}"
