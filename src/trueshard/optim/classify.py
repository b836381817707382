"""Verdict on how an optimizer may step when its parameters are cut by rows: on the shards, by owners, or not at all.

Known classes (torch's own) are looked up. Of any other, a copy with the user's own settings steps small parameters that
stand in for the user's: once whole, once with each parameter alone having a gradient, once cut by rows as ranks would
cut them. Again in the user's dtypes, for hundreds of steps, since much begins after a warm-up, and one parameter after
the other. For shapes on which it does something else than on these (``trial``), larger ones. Differences tell:

- alone ≠ together: it couples different parameters;
- the random seed matters: it draws random numbers, which ranks would draw differently (unless sums are exact, for
  which each parameter is drawn for by itself, from a seed that follows from the step and its place);
- cut ≠ whole: an update depends on more than the element's own row, so it needs the whole tensor.

Rows differ in scale by powers of ten and parameters by more, so that any norm or mean over them shows. The answer is
for each parameter group, since one class may treat groups differently (Muon's matrices, and the rest by Adam).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import nn

from trueshard import _torch
from trueshard.distributed import made_on_cpu
from trueshard.errors import with_kind
from trueshard.optim import trial
from trueshard.optim.rebind import by_shape, family, leaves
from trueshard.optim.runs import BINDING
from trueshard.optim.trial import RANKS, STEPS, Parted, Path, Place, Refused, Result, Shapes, run

TOLERANCE = 1e-3
"""Tolerated difference, as a part of a parameter's largest change: float32 sums in another order stay far below, any
coupling far above."""


@dataclass
class Verdict:
    """Verdict on how one parameter group may step."""

    whole: bool = False
    """An element's update depends on others of its parameter, beyond its row: it is made by the owner."""
    inside: bool = False
    """An element's update depends on the element alone, so a rank may have parts of rows; not asked of all."""
    elementwise: bool = False
    """An element's update depends on the element alone, so parameters can be stepped as one flat tensor."""
    decoupled: bool = False
    """The new parameter is ``parameter · (1 - lr · weight_decay)`` plus what a parameter of zeros would become."""
    rows: set[tuple[Any, ...]] | None = None
    """State that has a row for each row of its parameter, by its keys; None: not tried, what has its shape."""
    replicated: set[tuple[Any, ...]] = field(default_factory=set)
    """State that is the same on every rank, by its keys."""
    draws: bool = False
    """The optimizer draws random numbers, on which its update does not depend."""
    seeded: bool = False
    """An optimizer draws, with exact sums: each parameter is updated whole and by itself, from a seed of its own."""

    def is_rows(self, path: tuple[Any, ...], tensor: torch.Tensor, leaf: torch.Tensor) -> bool:
        """True if the state ``tensor`` of ``leaf`` has a row for each of its rows."""
        if self.rows is not None and (path in self.rows or path in self.replicated):
            return path in self.rows and tensor.ndim > 0
        return by_shape(path, tensor, leaf)


_ON_SHARDS = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
_BY_OWNER = {"Muon": True, "Adafactor": False}
"""Class → True if it is decoupled."""
_REFUSED = {
    "LBFGS": "its step is one function of all parameters together (line search, curvature pairs over a flat vector)",
    "SparseAdam": "it takes sparse gradients alone, and those of sharded parameters are dense",
}
_REFUSED_BY_NAME = {
    "PCGrad": "it projects the gradients of several losses, of all parameters together",
    "DeMo": "it communicates by itself",
    "DistributedMuon": "it communicates by itself",
}
"""Class names, wherever they are defined: what such a class does beside its step in one process cannot be tried."""
_RANDOM = "it draws random numbers, which every rank would draw differently"
_COUPLED = "its update of one parameter depends on others, which other ranks hold"
_QUANTIZED = "torchao.optim."
"""Their state is quantized by blocks of a tensor: on shards, exact up to the rounding of a block."""


@made_on_cpu()
def classify(optimizer: torch.optim.Optimizer, *, exact: bool = False, inside: bool = False) -> list[Verdict]:
    """Return a verdict for each group, the same on every rank; raise ValueError, with the reason, if it cannot step.

    ``inside``: some ranks have parts of rows, so it is tried whether these may be stepped.

    ``exact``: an update has the same bits however parameters are cut. An owner that is given gradients alone adds its
    update to zeros first, which rounds once more than one rank does; and what is drawn follows from the parameter.
    """
    verdicts = _classified(optimizer, exact, inside)
    return [dataclasses.replace(verdict, decoupled=False) for verdict in verdicts] if exact else verdicts


def _classified(optimizer: torch.optim.Optimizer, exact: bool, inside: bool) -> list[Verdict]:
    cls = type(optimizer)
    groups = optimizer.param_groups
    if any(group.get("differentiable") for group in groups):
        raise refusal(
            optimizer,
            "differentiable=True records the update in autograd, which parameters refuse",
            "differentiable=False",
        )
    if getattr(torch.optim, cls.__name__, None) is cls:
        if cls.__name__ in _ON_SHARDS:
            return [Verdict(elementwise=True) for _ in groups]
        if cls.__name__ == "Adafactor" and any(g["eps"][0] is None and len(_dtypes(g)) > 1 for g in groups):
            raise refusal(
                optimizer,
                "eps=(None, …) in a group of several dtypes means that of the first",
                "a number as its first eps",
            )
        if cls.__name__ in _BY_OWNER:
            # Lower precision would round the difference before it is added.
            in_full = [_dtypes(group) <= {torch.float32, torch.float64} for group in groups]
            return [Verdict(whole=True, decoupled=_BY_OWNER[cls.__name__] and is_full) for is_full in in_full]
        if cls.__name__ in _REFUSED:
            raise refusal(optimizer, _REFUSED[cls.__name__])
    if cls.__name__ in _REFUSED_BY_NAME:
        raise refusal(optimizer, _REFUSED_BY_NAME[cls.__name__])
    if cls.__module__.startswith(_QUANTIZED):
        if getattr(optimizer, "bf16_stochastic_round", False):
            if exact:
                return [Verdict(whole=True, seeded=True) for _ in groups]
            instead = "bf16_stochastic_round=False, or shard(exact=True)"
            raise refusal(optimizer, "it rounds at random, which every rank does differently", instead)
        return [Verdict() for _ in groups]
    try:
        return _tried(optimizer, exact, inside)
    except Refused as refused:
        raise refusal(optimizer, str(refused), refused.instead) from refused.__cause__


def refusal(optimizer: torch.optim.Optimizer, reason: str, instead: str = "") -> ValueError:
    """Return the error for an optimizer that cannot be sharded."""
    remedy = f"use {instead}" if instead else "use an optimizer that updates each parameter by itself"
    return ValueError(f"{type(optimizer).__name__} cannot step on sharded parameters: {reason}; {remedy}")


def manner(verdicts: Sequence[Verdict]) -> str:
    """Return the verdicts in words."""
    kinds = {verdict.whole for verdict in verdicts}
    return "on shards and by owner" if len(kinds) > 1 else "by owner" if True in kinds else "on shards"


def _dtypes(*groups: dict[str, Any]) -> set[torch.dtype]:
    return {parameter.dtype for group in groups for parameter in group["params"]}


# By trial


@dataclass
class Tried:
    """Stand-ins of some shapes, tried."""

    attempt: functools.partial[Result]
    """``run`` with the arguments that every trial of these stand-ins has."""
    together: Result
    """Result of the trial on all of them, whole."""
    paths: dict[Place, Path] = field(default_factory=dict)
    """Operators that ran for each of them alone."""


def _tried(optimizer: torch.optim.Optimizer, exact: bool, inside: bool) -> list[Verdict]:
    _refuse_untried(optimizer)
    groups = optimizer.param_groups
    verdicts = [Verdict(rows=set(), inside=inside) for _ in groups]
    random_states = random.getstate(), numpy.random.get_state()  # noqa: NPY002
    try:
        with _torch.unwatched(), torch.random.fork_rng(devices=[]):  # under the planner's modes nothing has values
            small = _try(optimizer, verdicts, [trial.shapes_of(group, small=True) for group in groups], STEPS, exact)
            tried = [small]
            if any(large := [trial.shapes_of(group, small=False) for group in groups]):
                tried.append(_try(optimizer, verdicts, large, trial.LARGE_STEPS, exact))
            _try_apart(small)
            for dtype in sorted(_dtypes(*groups) - {torch.float32}, key=str):
                with contextlib.suppress(RuntimeError, TypeError):
                    small.attempt(dtype=dtype)  # some have no such kernel on the CPU
                    _try_again(functools.partial(small.attempt, dtype=dtype), verdicts)
            few = trial.few_of(small.attempt.args[1])
            _try_again(functools.partial(run, optimizer, few, trial.MANY_STEPS, **small.attempt.keywords), verdicts)
            _try_shapes(optimizer, tried, verdicts, exact)
    finally:
        random.setstate(random_states[0])
        numpy.random.set_state(random_states[1])  # noqa: NPY002
        trial.forget_values()
    return verdicts


def _refuse_untried(optimizer: torch.optim.Optimizer) -> None:
    """Raise Refused if it reaches parameters by another way than its groups, or has random numbers of its own."""
    members = family(optimizer)
    ours = {id(p) for member in members for group in member.param_groups for p in group["params"]}
    known = {id(table) for member in members for table in (member.param_groups, *member.param_groups, member.state)}
    for member in members:
        for name, attribute in vars(member).items():
            if name == BINDING or name.endswith("_hooks"):
                continue
            for _, value in trial.held_by(attribute, set(known)):
                if isinstance(value, nn.Module) and any(id(p) in ours for p in value.parameters()):
                    raise Refused(f"it holds the model itself (its attribute {name!r})")
                other = isinstance(value, torch.optim.Optimizer) and not any(value is one for one in members)
                if id(value) in ours or (other and any(id(p) in ours for g in value.param_groups for p in g["params"])):
                    raise Refused(f"it keeps parameters beside its groups (its attribute {name!r})")
                if isinstance(value, torch.Generator):
                    raise Refused(_RANDOM)
        if any(isinstance(value, torch.Generator) for _, value in leaves(member.param_groups)):
            raise Refused(_RANDOM)


def _try(optimizer: torch.optim.Optimizer, verdicts: list[Verdict], shapes: Shapes, steps: int, exact: bool) -> Tried:
    attempt, together = _first(optimizer, shapes, steps, same_draws=exact)
    tried = Tried(attempt, together)
    is_random = _is_random(optimizer, attempt, together)
    if is_random and (not exact or together.drew_elsewhere):
        instead = "" if together.drew_elsewhere else "shard(exact=True), which draws by step and parameter"
        raise Refused(_RANDOM, instead)
    for verdict in verdicts:
        verdict.draws |= together.drew
        if exact and (is_random or together.drew):
            verdict.seeded = verdict.whole = True
    places = _places(shapes)
    for k, place in enumerate(places):
        path = tried.paths[place] = Path()
        try:
            alone = attempt(only=place, path=path)
        except Exception as error:
            raise Refused(f"it needs gradients of all parameters at once ({with_kind(error)})") from error
        if _differs(together, alone, [k]) or not _same_settings(together, alone, (place[0], -1)):
            raise Refused(_COUPLED)
        if steps == STEPS and not any(bool((values[k] != together.before[k]).any()) for values in together.later):
            raise Refused("it moved nothing when it was tried, so nothing can be said about it")
    for g, verdict in enumerate(verdicts):
        members = [k for k, place in enumerate(places) if place[0] == g]
        if members and not verdict.whole:
            verdict.whole = not _steps_by_rows(attempt, g, together, members, verdict)
        if members and verdict.inside and not verdict.whole:
            verdict.inside = _steps_inside(attempt, g, together, members)
    return tried


def _places(shapes: Shapes) -> list[Place]:
    return [(g, i) for g, in_group in enumerate(shapes) for i in range(len(in_group))]


def _try_again(attempt: functools.partial[Result], verdicts: list[Verdict]) -> None:
    """Try in other circumstances each stand-in alone and, where its group steps by rows, the first piece of it."""
    try:
        together = attempt()
    except Refused:
        raise
    except Exception as error:
        raise Refused(f"it cannot be tried for {attempt.args[2]} steps ({with_kind(error)})") from error

    def fits(k: int, place: Place, cut: int | None, inside: bool = False) -> bool:
        with contextlib.suppress(ArithmeticError, LookupError, RuntimeError, TypeError, ValueError):
            alone = attempt(only=place, cut=cut, inside=inside)
            rank = None if cut is None else 0
            return _same_settings(together, alone, (place[0], -1)) and not _differs(together, alone, [k], rank, inside)
        return False

    for k, place in enumerate(_places(attempt.args[1])):
        g, verdict = place[0], verdicts[place[0]]
        verdict.inside = verdict.inside and not verdict.whole and fits(k, place, g, inside=True)
        if verdict.whole or not fits(k, place, g):
            if not fits(k, place, None):
                raise Refused(_COUPLED)
            verdict.whole = True


def _try_apart(tried: Tried) -> None:
    """Raise Refused if a step cannot be taken in several runs, one for each parameter: owners take it in some."""
    with contextlib.suppress(Exception):
        apart = tried.attempt(apart=True)
        same = _same_settings(tried.together, apart, range(-1, len(apart.settings) - 1))
        if same and not _differs(tried.together, apart, range(len(apart.before))):
            return
    raise Refused(
        "what it keeps outside of its groups, its attributes and state[parameter] does not fit a step that takes some "
        "parameters after others",
        "an optimizer that keeps what belongs to a parameter in state[parameter], and counts steps in its groups",
    )


def _try_shapes(optimizer: torch.optim.Optimizer, tried: list[Tried], verdicts: list[Verdict], exact: bool) -> None:
    """Find out if parameters of the user's shapes are updated as stand-ins are; if not, as larger ones; else, whole."""
    for g, group in enumerate(optimizer.param_groups):
        shapes = trial.outermost({tuple(p.shape) for p in group["params"] if p.ndim and p.numel()})
        for number, shape in enumerate(shapes):
            steps = trial.LARGE_STEPS if number else STEPS
            if verdicts[g].whole or any(_goes_like(earlier, g, shape, steps) for earlier in tried):
                continue
            smaller = trial.within(shape)
            stand_ins = [[smaller] * 2 * (g == k) for k in range(len(verdicts))]
            tried.append(_try(optimizer, verdicts, stand_ins, STEPS, exact))
            verdicts[g].whole |= smaller != shape and not _goes_like(tried[-1], g, shape, steps)
        if verdicts[g].inside and not verdicts[g].whole:
            verdicts[g].inside = all(
                any(_goes_like(earlier, g, shape, STEPS, least=(1,) * len(shape)) for earlier in tried)
                for shape in shapes
            )


def _goes_like(tried: Tried, g: int, shape: tuple[int, ...], steps: int, least: tuple[int, ...] | None = None) -> bool:
    """True if a parameter of ``shape``, and the ``least`` of it (a row), run what a stand-in in group ``g`` ran."""
    optimizer, shapes, most = tried.attempt.args
    i = next((i for i, known in enumerate(shapes[g]) if len(known) == len(shape)), None)
    if i is None:
        return False
    whole, row = tried.paths[g, i].follow(), tried.paths[g, i].follow()
    try:
        for path, shown, count in (
            (whole, shape, min(steps, most)),
            (row, least or (1, *shape[1:]), trial.LARGE_STEPS),
        ):
            changed = [[*in_group] for in_group in shapes]
            changed[g][i] = shown
            run(optimizer, changed, count, **tried.attempt.keywords | {"only": (g, i), "path": path, "extreme": False})
    except (Parted, Exception):  # also where values are asked for, which fake tensors have not
        return False
    return row.numbers == whole.numbers[: len(row.numbers)]


def _first(
    optimizer: torch.optim.Optimizer, shapes: Shapes, steps: int, *, same_draws: bool
) -> tuple[functools.partial[Result], Result]:
    """Return how to try the optimizer, and the first trial: on all stand-ins, whole.

    Gentler each time: an update may not survive extreme gradients, and settings may hold what a first step must not
    find (a count, in an optimizer that has trained). At last it is made anew, for what it keeps from its construction.
    """
    reason: BaseException | None = None
    for remade, extreme, fresh in itertools.product((False, True), (True, False), (False, True)):
        how: dict[str, Any] = {"remade": remade, "extreme": extreme, "fresh": fresh, "same_draws": same_draws}
        attempt = functools.partial(run, optimizer, shapes, steps, **how)
        try:
            return attempt, attempt()
        except Refused:
            raise
        except Exception as error:
            reason = reason or error
    assert reason is not None
    raise Refused(f"it cannot be tried on stand-ins for the parameters ({with_kind(reason)})") from reason


def _is_random(optimizer: torch.optim.Optimizer, attempt: Callable[..., Result], together: Result) -> bool:
    """True if the update depends on what torch draws; a start value of an iteration that converges may be drawn.

    In float32 and in the dtypes of the parameters: some round at random where there are few bits.
    """
    dtypes = {torch.float32} | _dtypes(*optimizer.param_groups)
    for dtype in sorted(dtypes, key=str):
        with contextlib.suppress(RuntimeError, TypeError):
            one = together if dtype is torch.float32 else attempt(dtype=dtype)
            if one.drew and _differs_in_a_row(one, attempt(dtype=dtype, seed=1)):
                return True
    return False


def _differs_in_a_row(one: Result, two: Result) -> bool:
    """Stricter than ``_differs``: a small noise must not hide behind a row of large changes."""
    for values, others in zip(one.later, two.later, strict=True):
        for before, a, b in zip(one.before, values, others, strict=True):
            rows = [tensor.double().reshape(len(tensor) if tensor.ndim else 1, -1) for tensor in (before, a, b)]
            limit = 1e-4 * (rows[1] - rows[0]).abs().amax(1) + 1e-12
            if not bool(((rows[1] - rows[2]).abs().amax(1) <= limit).all()):
                return True
    return False


def _steps_by_rows(
    attempt: Callable[..., Result], g: int, together: Result, members: list[int], verdict: Verdict
) -> bool:
    """True if the pieces of group ``g`` step as the whole; note in the verdict which of its state is in pieces, too."""
    if (pieces := _like_the_whole(attempt, g, together, members)) is None:
        return False
    assert verdict.rows is not None
    for k in members:
        if together.before[k].ndim == 0:
            continue
        for path, value in together.state[k].items():
            parts = [piece.state[k].get(path) for piece in pieces]
            if _are_rows(parts, value, together.before[k].shape[0]):
                verdict.rows.add(path)
            elif all(_same(part, value) for part in parts):
                verdict.replicated.add(path)
            else:
                return False
    return not verdict.rows & verdict.replicated


def _steps_inside(attempt: Callable[..., Result], g: int, together: Result, members: list[int]) -> bool:
    """True if parts of rows of group ``g`` step as the whole, and their state is cut as they are, or not at all."""
    if (pieces := _like_the_whole(attempt, g, together, members, inside=True)) is None:
        return False
    for k in members:
        for path, value in together.state[k].items():
            is_cut = isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape == together.before[k].shape
            for rank, piece in enumerate(pieces):
                if not _same(piece.state[k].get(path), trial.piece_of(value, rank, inside=True) if is_cut else value):
                    return False
    return True


def _like_the_whole(
    attempt: Callable[..., Result], g: int, together: Result, members: list[int], inside: bool = False
) -> list[Result] | None:
    """Return how the pieces of group ``g`` step, by rank; None if not as the whole."""
    pieces: list[Result] = []
    for rank in range(RANKS):
        try:
            piece = attempt(rank=rank, cut=g, inside=inside)
        except Exception:
            return None
        if not _same_settings(together, piece, (g, -1)) or _differs(together, piece, members, rank, inside):
            return None  # at the first that differs: trying is most of what sharding such an optimizer costs
        pieces.append(piece)
    return pieces


def _are_rows(pieces: list[Any], whole: Any, rows: int) -> bool:
    """True if ``whole`` has a row for each of its parameter's, and ``pieces`` are what ranks have of it."""
    if not all(isinstance(value, torch.Tensor) and value.ndim for value in (whole, *pieces)) or len(whole) != rows:
        return False
    same_columns = all(piece.shape[1:] == whole.shape[1:] for piece in pieces)
    return same_columns and _same(torch.cat(pieces), whole)


def _same_settings(one: Result, two: Result, which: Sequence[int]) -> bool:
    """True if both have the same numbers in ``which`` groups: an estimate for a whole group shows there first."""
    return all(_same(two.settings[i].get(path), value) for i in which for path, value in one.settings[i].items())


def _same(actual: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        if not isinstance(actual, torch.Tensor) or (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
            return False
        a, b = actual.detach().double(), expected.detach().double()
        return torch.allclose(a, b, rtol=TOLERANCE, atol=1e-5 * _largest(b), equal_nan=True)
    if isinstance(actual, float) and isinstance(expected, float):
        return actual == expected or abs(actual - expected) <= 1e-5 * abs(expected)
    try:
        return bool(actual == expected)
    except Exception:
        return False


def _largest(tensor: torch.Tensor) -> float:
    """Return the largest finite magnitude; 0 if there is none."""
    finite = tensor[tensor.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0


def _differs(one: Result, two: Result, members: Sequence[int], rank: int | None = None, inside: bool = False) -> bool:
    """True if what became of ``members`` differs; with a ``rank``, ``two`` has ``piece_of`` them alone."""
    for k in members:
        for values, others in zip(one.later, two.later, strict=True):
            a, b = values[k].double(), others[k].double()
            limit = TOLERANCE * _largest((a - one.before[k].double()).abs())
            if rank is not None:
                a = trial.piece_of(a, rank, inside)
            if not torch.allclose(a, b, rtol=1e-6, atol=max(limit, 1e-12), equal_nan=True):
                return True
    return False
