"""Finds out by trial what an optimizer's update of an element depends on.

A copy of the user's optimizer, with all of its settings, steps small parameters that stand in for the user's: once
whole, once with each parameter alone having a gradient, once cut by rows as ranks would cut them. Differences tell:

- alone ≠ together: it couples different parameters;
- the random seed matters: it draws random numbers, which ranks would draw differently;
- cut ≠ whole: an update depends on more than the element's own row, so it needs the whole tensor.

Rows differ in scale by powers of ten and parameters by more, so that any norm or mean over them shows. Nothing of the
user's is touched: not the parameters, not the state, not the random number generator.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import nn

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
TOLERANCE = 1e-3
"""Of the largest change of a parameter: float32 sums in another order stay far below, any coupling far above."""


class Refused(Exception):
    """The optimizer cannot be sharded; the message is the reason."""


@dataclass
class Group:
    """What was found of one parameter group."""

    whole: bool = False
    rows: set[tuple[Any, ...]] = field(default_factory=set)
    alike: set[tuple[Any, ...]] = field(default_factory=set)


@dataclass
class _Result:
    """One run: per stand-in the values before and after, and its state."""

    before: list[torch.Tensor]
    later: list[list[torch.Tensor]]
    """Values at several times."""
    state: list[dict[tuple[Any, ...], Any]]
    settings: list[dict[tuple[Any, ...], Any]] = field(default_factory=list)
    """By group, what it has besides parameters; at last the optimizer's own attributes."""
    drew: bool = False
    """Random numbers were drawn."""


def groups(optimizer: torch.optim.Optimizer) -> list[Group]:
    """What is found of each group of ``optimizer``.

    Raises:
        Refused: it cannot be sharded, or cannot be tried.
    """
    _look(optimizer)
    found = [Group() for _ in optimizer.param_groups]
    random_states = random.getstate(), numpy.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=[]):
            _probe(optimizer, found, small=True)
            if any(parameter.ndim == 2 for group in optimizer.param_groups for parameter in group["params"]):
                _probe(optimizer, found, small=False)
    finally:
        random.setstate(random_states[0])
        numpy.random.set_state(random_states[1])  # noqa: NPY002
    return found


def _look(optimizer: torch.optim.Optimizer) -> None:
    """What need not be tried.

    Raises:
        Refused: it reaches parameters by another way than its groups, or has random numbers of its own.
    """
    ours = {id(p) for each in family(optimizer) for group in each.param_groups for p in group["params"]}
    for member in family(optimizer):
        for name, attribute in vars(member).items():
            if name in ("param_groups", "state"):
                continue
            for _, value in _leaves(attribute):
                if isinstance(value, nn.Module) and any(id(p) in ours for p in value.parameters()):
                    raise Refused(f"it holds the model itself (its attribute {name!r})")
                if id(value) in ours:
                    raise Refused(f"it keeps parameters beside its groups (its attribute {name!r})")
        for _, value in itertools.chain(_leaves(vars(member)), _leaves(member.param_groups)):
            if isinstance(value, torch.Generator):
                raise Refused("it draws random numbers, which every rank would draw differently")


def _probe(optimizer: torch.optim.Optimizer, found: list[Group], *, small: bool) -> None:
    steps = STEPS if small else LARGE_STEPS
    shapes = [_shapes(group, small) for group in optimizer.param_groups]
    places = [(g, i) for g, each in enumerate(shapes) for i in range(len(each))]
    trial, together = _first(optimizer, shapes, steps)
    if together.drew or _draws_in_other_dtypes(optimizer, trial):
        raise Refused("it draws random numbers, which every rank would draw differently")
    for k, place in enumerate(places):
        try:
            alone = trial(only=place)
        except Exception as error:
            raise Refused(f"it needs gradients of all parameters at once ({_first_line(error)})") from error
        if _differs(together, alone, [k]) or not _same_settings(together, alone, (place[0], -1)):
            raise Refused("its update of one parameter depends on others, which other ranks hold")
        if not any(bool((values[k] != together.before[k]).any()) for values in together.later):
            raise Refused("it moved nothing when it was tried, so nothing can be said about it")
    for g, group in enumerate(found):
        members = [k for k, place in enumerate(places) if place[0] == g]
        if members and not group.whole:
            _cut(trial, g, together, members, group)


def _draws_in_other_dtypes(optimizer: torch.optim.Optimizer, trial: Callable[..., _Result]) -> bool:
    """Some round at random where parameters have few bits."""
    dtypes = {p.dtype for group in optimizer.param_groups for p in group["params"]} - {torch.float32}
    for dtype in sorted(dtypes, key=str):
        with contextlib.suppress(Exception):
            if trial(dtype=dtype).drew:
                return True
    return False


def _first(
    optimizer: torch.optim.Optimizer, shapes: list[list[tuple[int, ...]]], steps: int
) -> tuple[Callable[..., _Result], _Result]:
    """How to try the optimizer, and the first trial: on all stand-ins, whole.

    Gentler each time: an update may not survive extreme gradients, and settings may hold what a first step must not
    find (a count, in an optimizer that has trained).
    """
    reason: BaseException | None = None
    for extreme, fresh in ((True, False), (True, True), (False, False), (False, True)):
        trial = functools.partial(_run, optimizer, shapes, steps, extreme=extreme, fresh=fresh)
        try:
            return trial, trial()
        except Refused:
            raise
        except Exception as error:
            reason = reason or error
    assert reason is not None
    raise Refused(f"it cannot be tried on stand-ins for the parameters ({_first_line(reason)})") from reason


def _cut(trial: Callable[..., _Result], g: int, together: _Result, members: list[int], group: Group) -> None:
    """Hold the pieces of group ``g`` against the whole."""
    try:
        pieces = [trial(rank=rank, cut=g) for rank in range(RANKS)]
    except Exception:
        group.whole = True
        return
    joined = _Result(
        _join([piece.before for piece in pieces], members),
        [_join([piece.later[i] for piece in pieces], members) for i in range(len(together.later))],
        [],
    )
    agree = all(_same_settings(together, piece, (g, -1)) for piece in pieces)
    if not agree or _differs(together, joined, members):
        group.whole = True
        return
    for k in members:
        if together.before[k].ndim == 0:
            continue
        for path, value in together.state[k].items():
            kind = _placed(value, [piece.state[k].get(path) for piece in pieces], together.before[k].shape[0])
            if kind is None or (kind == "rows" and path in group.alike) or (kind == "alike" and path in group.rows):
                group.whole = True
                return
            (group.rows if kind == "rows" else group.alike).add(path)


def _join(pieces: list[list[torch.Tensor]], members: list[int]) -> list[torch.Tensor]:
    """Tensors from their pieces; only ``members`` are cut, and of these not the 0-dim ones."""
    return [
        torch.cat(parts) if k in members and parts[0].ndim else parts[0]
        for k, parts in enumerate(zip(*pieces, strict=True))
    ]


def _placed(whole: Any, pieces: list[Any], rows: int) -> str | None:
    """Whether a piece of state is cut by rows, or the same on every rank; None: neither."""
    if not isinstance(whole, torch.Tensor):
        return "alike" if all(_equal_values(piece, whole) for piece in pieces) else None
    if not all(isinstance(piece, torch.Tensor) for piece in pieces):
        return None
    by_rows = whole.ndim > 0 and whole.shape[0] == rows and all(piece.ndim == whole.ndim for piece in pieces)
    if by_rows and sum(piece.shape[0] for piece in pieces) == rows and _near(torch.cat(pieces), whole):
        return "rows"
    if all(piece.shape == whole.shape and _near(piece, whole) for piece in pieces):
        return "alike"
    return None


def _equal_values(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return a == b or abs(a - b) <= 1e-5 * abs(b)
    try:
        return bool(a == b)
    except Exception:
        return False


def _same_settings(one: _Result, two: _Result, which: Sequence[int]) -> bool:
    """What an optimizer estimates for all of a group shows in what it keeps there, long before it shows elsewhere."""
    for i in which:
        a, b = one.settings[i], two.settings[i]
        for path, value in a.items():
            other = b.get(path)
            if isinstance(value, torch.Tensor):
                if not isinstance(other, torch.Tensor) or not _near(other.reshape(-1), value.reshape(-1)):
                    return False
            elif not _equal_values(other, value):
                return False
    return True


def _near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if not expected.numel():
        return True
    a, b = found.detach().double(), expected.detach().double()
    return bool(torch.allclose(a, b, rtol=TOLERANCE, atol=1e-5 * _largest(b), equal_nan=True))


def _largest(tensor: torch.Tensor) -> float:
    """The largest finite magnitude; 0 if there is none."""
    finite = tensor[tensor.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0


def _differs(one: _Result, two: _Result, members: Sequence[int]) -> bool:
    for k in members:
        for values, others in zip(one.later, two.later, strict=True):
            a, b = values[k].double(), others[k].double()
            change = (a - one.before[k].double()).abs()
            limit = TOLERANCE * _largest(change)
            if not torch.allclose(a, b, rtol=1e-6, atol=max(limit, 1e-12), equal_nan=True):
                return True
    return False


# Stand-ins


def _shapes(group: dict[str, Any], small: bool) -> list[tuple[int, ...]]:
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
    size = -(-whole.shape[0] // RANKS)
    return whole[min(rank * size, whole.shape[0]) : (rank + 1) * size].clone()


def _run(
    optimizer: torch.optim.Optimizer,
    shapes: list[list[tuple[int, ...]]],
    steps: int,
    *,
    extreme: bool,
    fresh: bool,
    dtype: torch.dtype = torch.float32,
    only: tuple[int, int] | None = None,
    rank: int = 0,
    cut: int | None = None,
) -> _Result:
    """Steps of a copy of ``optimizer`` on stand-ins of ``shapes``.

    Args:
        optimizer: the user's.
        shapes: of the stand-ins, by group.
        steps: how many.
        extreme: let the last gradients be very large, and very small.
        fresh: forget what the optimizer has counted.
        dtype: of the stand-ins.
        only: the one stand-in, as (group, position), that has gradients; None: all.
        rank: the piece of those that are cut.
        cut: the group whose stand-ins are cut; None: none.
    """
    trial = _copy(optimizer, fresh)
    stand_ins: list[list[nn.Parameter]] = []
    grads: list[list[Callable[[int], torch.Tensor]]] = []
    number = 0
    for g, each in enumerate(shapes):
        stand_ins.append([])
        grads.append([])
        for shape in each:
            number += 1
            whole = 0.1 * _values(shape, number, 1.0) + 0.1
            stand_ins[g].append(nn.Parameter((_piece(whole, rank) if g == cut else whole).to(dtype)))

            def grad(step: int, shape: Any = shape, number: int = number, g: int = g) -> torch.Tensor:
                # Mostly one direction: what estimates a distance from how far it went must see progress.
                scale = 3.0 ** (number % 4)
                value = _values(shape, number + 100, scale) + 0.3 * _values(shape, 1000 * (step + 1) + number, scale)
                if step >= steps:
                    value = value * EXTREMES[step - steps]
                return _piece(value, rank) if g == cut else value

            grads[g].append(grad)
    for group, members in zip(trial.param_groups, stand_ins, strict=True):
        group["params"][:] = members
        _make_visible(group)
    flat = [p for members in stand_ins for p in members]
    before = [p.detach().clone() for p in flat]
    torch.manual_seed(0)
    drawn = _drawn()
    later = []

    def give(step: int) -> None:
        for g, members in enumerate(stand_ins):
            for i, p in enumerate(members):
                p.grad = grads[g][i](step).to(p.dtype) if only is None or only == (g, i) else None

    for step in range(steps + len(EXTREMES) * extreme):
        give(step)
        _step(trial)
        if step >= steps - 1:
            later.append([p.detach().clone() for p in flat])
    state = [_flat_state(trial, p) for p in flat]
    settings = [_numbers({k: v for k, v in group.items() if k != "params"}) for group in trial.param_groups]
    own = _numbers({k: v for k, v in vars(trial).items() if k not in ("state", "param_groups", "defaults")})
    return _Result(before, later, state, [*settings, own], drew=_drawn() != drawn)


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
            found |= dict(_leaves(member.state[parameter]))
    return found


def _numbers(table: dict[str, Any]) -> dict[tuple[Any, ...], Any]:
    """What may have been counted or estimated: numbers and small tensors."""
    return {
        path: value.detach().clone() if isinstance(value, torch.Tensor) else value
        for path, value in _leaves(table)
        if (isinstance(value, torch.Tensor) and value.numel() <= 1) or isinstance(value, (int, float))
    }


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _leaves(each, (*path, key))
    elif isinstance(value, (list, tuple)):
        for i, each in enumerate(value):
            yield from _leaves(each, (*path, i))
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


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, torch.Tensor)) and not isinstance(value, bool)


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no message'}"
