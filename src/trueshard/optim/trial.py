"""Step a copy of an optimizer on small parameters that stand in for the user's.

The copy has all of the user's settings, but parameters, state and hooks of its own; the gradients are always the same.

``[Note: Paths]`` Many optimizers factorise, normalise or quantize from some size on, and the user's own tensors are too
large to be stepped. So the steps of a stand-in are noted, operator by operator, and taken again with fake tensors of
the user's shape, which have no memory; numbers that are read from tensors are those of the stand-in. As long as both
run the same operators, what was found of the stand-in holds for the user's shape.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import math
import operator
import pickle
import random
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import numpy
import torch
from torch import nn
from torch.optim import Optimizer

from trueshard import _torch
from trueshard.model.regions import rows_of
from trueshard.optim.rebind import family, leaves
from trueshard.optim.runs import StepRuns
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
MOST = 1 << 17
"""Elements of the largest stand-in."""
MANY_STEPS = 300
"""Steps of the longest trial, for rules that begin after a warm-up, or when a history has filled."""
LATEST = 150
"""The largest whole number among the settings, where there are many steps: a warm-up must end within them."""
RECURRENCE = 25
"""Steps until gradients come again; the last of them is large, since some rules wait for a large one."""


ON_STAND_INS = "_trueshard_on_stand_ins"
"""Attribute of a copy that steps stand-ins. Thousands of such steps are not checked, which walks whole models."""
Shapes = list[list[tuple[int, ...]]]
"""Shapes of stand-ins, by group."""
Place = tuple[int, int]
"""(group, position) of a stand-in."""


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


def few_of(shapes: Shapes) -> Shapes:
    """Return one of ``shapes`` for each number of dimensions in each group; of a single one, all."""
    few = [list({len(shape): shape for shape in reversed(group)}.values()) for group in shapes]
    return few if sum(map(len, few)) > 1 else shapes


def outermost(shapes: set[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return those of ``shapes`` that are first or last by a measure that a threshold may be of, the largest first."""
    measures: list[Any] = [math.prod, min, operator.itemgetter(0), lambda shape: math.prod(shape[1:])]
    some = [sorted(shape for shape in shapes if len(shape) == n) for n in sorted(set(map(len, shapes)))]
    ends = {end(of_n, key=measure) for of_n in some for end in (min, max) for measure in measures}
    return sorted(ends, key=math.prod, reverse=True)


def within(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return ``shape``, its largest dimension halved until there are few enough elements to step them all."""
    while math.prod(shape) > MOST:
        i = shape.index(max(shape))
        shape = (*shape[:i], shape[i] // 2, *shape[i + 1 :])
    return shape


Part: TypeAlias = tuple[int, bool] | None
"""``rank`` and ``inside`` of ``piece_of``; None: the whole."""


def piece_of(tensor: torch.Tensor, rank: int, inside: bool = False) -> torch.Tensor:
    """Return some rows, a view: those of ``rank``; if ``inside``, of these its part along every other dimension, too.

    What an element of that part becomes without the rest, it becomes in any larger part.
    """
    for dim in range(tensor.ndim if inside else min(tensor.ndim, 1)):
        tensor = tensor.narrow(dim, *rows_of(tensor.shape[dim], rank, RANKS))
    return tensor


@functools.lru_cache(maxsize=1024)
def _gradient(shape: tuple[int, ...], number: int, part: Part, step: int, factor: float) -> torch.Tensor:
    """Return the same gradient in every trial, ``factor`` times as large. Read-only.

    It keeps its direction: what estimates a distance from how far it went must see progress.
    """
    value = _values(shape, number + 100, part) + 0.3 * _values(shape, 1000 * (step + 1) + number, part)
    return value * (factor * 3.0 ** (number % 4))


@functools.lru_cache(maxsize=1024)
def _values(shape: tuple[int, ...], seed: int, part: Part) -> torch.Tensor:
    """Return a part of normal values made from ``seed``, rows of very different size. Read-only."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    if not shape:
        return values
    rows = torch.logspace(-2, 1, shape[0])[torch.randperm(shape[0], generator=generator)]
    values *= rows.view(-1, *[1] * (len(shape) - 1))
    return values if part is None else piece_of(values, *part).clone()


def forget_values() -> None:
    """Free what the trials of one optimizer share."""
    _gradient.cache_clear()
    _values.cache_clear()


def run(
    optimizer: Optimizer,
    shapes: Shapes,
    steps: int,
    *,
    extreme: bool,
    fresh: bool,
    remade: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    only: Place | None = None,
    rank: int = 0,
    cut: int | None = None,
    inside: bool = False,
    same_draws: bool = False,
    apart: bool = False,
    path: Path | None = None,
) -> Result:
    """Run steps of a copy of ``optimizer`` on stand-ins of ``shapes``, by group.

    ``extreme``: the last gradients are very large, and very small. ``fresh``: forget what the optimizer has counted.
    ``remade``: construct it anew. ``only``: the one stand-in, as (group, position), that has gradients; None: all.
    ``cut``: the group of whose stand-ins there is ``piece_of`` them alone; None: none. ``same_draws``: whatever was
    drawn before, torch draws the same. ``apart``: a step takes a run for each stand-in. ``path``: note operators
    there, of fake tensors if it follows another.
    """
    trial = _copy(optimizer, fresh)
    if steps > STEPS:
        _come_sooner(trial)
    numbers = itertools.count(1)
    kinds = {
        (g, i): (shape, next(numbers), (rank, inside) if g == cut else None)
        for g, in_group in enumerate(shapes)
        for i, shape in enumerate(in_group)
    }
    follows = path is not None and path.first is not None
    none: Any = contextlib.nullcontext()
    fake = _torch.fake_tensors() if follows else none
    with fake:
        values = {p: torch.ones(kind[0]) if follows else 0.1 * _values(*kind) + 0.1 for p, kind in kinds.items()}
    stand_ins = {place: nn.Parameter(value.to(dtype)) for place, value in values.items()}
    for g, group in enumerate(trial.param_groups):
        group["params"][:] = [stand_in for place, stand_in in stand_ins.items() if place[0] == g]
        _make_visible(group)
    if remade:
        trial = _remake(optimizer, trial)
    for member in family(trial):
        setattr(member, ON_STAND_INS, True)
    parameters = list(stand_ins.values())
    before = [p.detach().clone() for p in parameters]
    torch.default_generator.manual_seed(seed)  # this one alone: `torch.manual_seed` would seed the user's accelerators
    drawn = _drawn()
    later = []
    for step, factor in enumerate([*map(_factor, range(steps)), *EXTREMES[: 2 * extreme]]):
        for place, stand_in in stand_ins.items():
            if only in (None, place):
                gradient = values[place] if follows else _gradient(*kinds[place], step % RECURRENCE, factor)
                stand_in.grad = gradient.to(dtype, copy=True)
        with fake, SameDraws(seed) if same_draws else none, path or none:
            _step_apart(trial, stand_ins) if apart else _step(trial)
        if step >= steps - 1 or _factor(step) > 1:
            later.append([p.detach().clone() for p in parameters])
    settings = [_numbers(group) for group in trial.param_groups]
    states = [member.state for member in family(trial)]
    state = [dict(leaf for held in states if p in held for leaf in leaves(held[p])) for p in parameters]
    drawn_now = _drawn()
    shared = [{k: v for k, v in held.items() if not isinstance(k, torch.Tensor)} for held in states]
    settings.append(_numbers(vars(trial) | {"shared": shared}))
    return Result(before, later, state, settings, drew=drawn_now != drawn, drew_elsewhere=drawn_now[1:] != drawn[1:])


def _drawn() -> tuple[Any, ...]:
    """Return what changes when random numbers are drawn from any of the usual generators."""
    numbers = pickle.dumps(numpy.random.get_state())  # noqa: NPY002
    return bytes(torch.get_rng_state().numpy()), random.getstate(), numbers


def _factor(step: int) -> float:
    return 30.0 if step % RECURRENCE == RECURRENCE - 1 else 1.0


def _come_sooner(trial: Optimizer) -> None:
    """Make whole numbers among the settings small enough that what waits for so many steps happens in a trial."""
    for member in family(trial):
        owned = [vars(value) for value in vars(member).values() if is_own(value)]
        for table in (*member.param_groups, vars(member), *owned):
            table.update({key: LATEST for key, value in table.items() if type(value) is int and value > LATEST})


def _step_apart(trial: Optimizer, stand_ins: dict[Place, nn.Parameter]) -> None:
    """Step each stand-in in a run of its own, the others replaced by ones without a gradient."""
    runs = StepRuns(trial)
    lists = [list(group["params"]) for group in trial.param_groups]
    for number, here in enumerate(stand_ins.values()):
        with runs.ahead() if number + 1 < len(stand_ins) else contextlib.nullcontext():
            for group, members in zip(trial.param_groups, lists, strict=True):
                group["params"][:] = [p if p is here else nn.Parameter(torch.zeros([1] * p.ndim)) for p in members]
            runs.note_gradients()
            _step(trial)
    runs.finish()
    for group, members in zip(trial.param_groups, lists, strict=True):
        group["params"][:] = members


def _step(trial: Optimizer) -> None:
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
        for path, value in held_by(settings, set())
        if (isinstance(value, torch.Tensor) and value.numel() <= 1) or isinstance(value, (int, float))
    }


def is_own(value: Any) -> bool:
    """True for an object of the optimizer's own, that is copied by its attributes."""
    if isinstance(value, (type, FunctionType, MethodType, ModuleType, nn.Module, Optimizer)):
        return False
    made_by: Any = type(value).__reduce_ex__
    return made_by is object.__reduce_ex__ and hasattr(value, "__dict__") and not hasattr(value, "__deepcopy__")


def held_by(value: Any, seen: set[int], path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield what ``leaves`` does, and what deques, sets and objects of the optimizer's own hold, each once.

    ``seen``: ``id`` of what is left out; added to.
    """
    if is_own(value) or isinstance(value, (dict, list, tuple, set, deque)):
        if id(value) not in seen:
            seen.add(id(value))
            members = value if isinstance(value, dict) else vars(value) if is_own(value) else dict(enumerate(value))
            for key, member in members.items():
                yield from held_by(member, seen, (*path, key))
    else:
        yield path, value


def _copy(optimizer: Optimizer, fresh: bool) -> Optimizer:
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


def _remake(optimizer: Optimizer, trial: Optimizer) -> Optimizer:
    """Construct the copy with the arguments that can be read from its defaults and attributes."""
    defaults = getattr(optimizer, "defaults", {})
    names = list(inspect.signature(type(optimizer).__init__).parameters)[2:]
    arguments = {name: getattr(optimizer, name) for name in names if hasattr(optimizer, name)} | defaults
    groups = [{k: v for k, v in group.items() if k == "params" or k in defaults} for group in trial.param_groups]
    wrapped: Any = [member for member in family(trial) if member is not trial]
    made: Any = type(optimizer)
    remade: Optimizer = made(
        wrapped[0] if wrapped else groups, **{name: arguments[name] for name in names if name in arguments}
    )
    return remade


# Operators of a step: see [Note: Paths]

_READS = [torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.allclose.default]
"""Operators whose result is a number, which fake tensors have not."""


class Parted(BaseException):
    """A step with another shape runs another operator; no optimizer that catches errors shall catch it."""


class Path(_torch.DispatchMode):
    """Inside, note the operators that run; or, made by ``follow``, raise ``Parted`` where others run."""

    def __init__(self, first: Path | None = None) -> None:
        super().__init__()
        self.first = first
        self._operators: list[Any] = []
        self._answers: list[Any] = []
        self.numbers: list[Any] = []
        """Numbers that operators were given, other than sizes: rates and such."""

    def follow(self) -> Path:
        """Return a path that must run the operators of this one; it may end earlier."""
        return Path(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _torch.device_asked(func, args) is not None:
            return func(*args, **kwargs)
        kept, numbers = _arguments(func)
        operator = (func, *(str(args[i]) for i in kept if i < len(args)))
        number = len(self._operators)
        if self.first is not None and self.first._operators[number : number + 1] != [operator]:
            raise Parted
        self._operators.append(operator)
        given = [*(args[i] for i in numbers if i < len(args)), *kwargs.values()]
        self.numbers += [value for value in given if isinstance(value, (int, float))]
        if self.first is not None and func in _READS:
            answer = self.first._answers[len(self._answers)]
        else:
            answer = func(*args, **kwargs)
        if func in _READS:
            self._answers.append(answer)
        return answer


@functools.cache
def _arguments(func: Any) -> tuple[list[int], list[int]]:
    """Return the positions of an operator's dimensions, and of its numbers that are no sizes."""
    arguments = list(enumerate(_torch.schema_of(func).arguments))
    dims = [i for i, argument in arguments if argument.name.startswith(("dim", "keepdim"))]
    return dims, [i for i, argument in arguments if "nt" not in str(argument.type).replace("Opt", "")]
