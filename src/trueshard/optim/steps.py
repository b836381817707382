"""What happens around ``step()`` of an optimizer that holds sharded parameters: the same object, the same call.

Hooks on the optimizer's own step show it plain tensors and put the DTensors back, between the user's hooks, which see
DTensors. Parameters of a group that works on shards are stepped by the call itself. Those that need an owner come in
batches: all but the last part of a step are run before the call, each from the same settings, so that what a step
changes in its groups (a count) is changed once.
"""

from __future__ import annotations

import functools
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trueshard.optim.classify import Verdict, classify
from trueshard.optim.exchange import Owned
from trueshard.optim.local import Own, Shards, StandIn, Swap
from trueshard.optim.owner import Owners, is_cut
from trueshard.optim.rebind import family
from trueshard.optim.runs import Runs

_bound: weakref.WeakKeyDictionary[torch.optim.Optimizer, Stepping] = weakref.WeakKeyDictionary()


def bind(optimizer: torch.optim.Optimizer, verdicts: list[Verdict] | None = None) -> None:
    """From now on ``optimizer`` steps without DTensor dispatch, exactly. Once is enough.

    Args:
        optimizer: one that holds DTensors.
        verdicts: what ``classify`` said before its parameters were sharded; None: ask now.

    Raises:
        ValueError: it cannot step on shards; the message names its class and the reason.
    """
    if optimizer not in _bound:
        _bound[optimizer] = Stepping(optimizer, classify(optimizer) if verdicts is None else verdicts)


def is_bound(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``bind`` was called."""
    return optimizer in _bound


class Stepping:
    """The hooks of one optimizer, and what they keep from step to step."""

    def __init__(self, optimizer: torch.optim.Optimizer, verdicts: list[Verdict]) -> None:
        self._verdicts = verdicts
        self._shards = Shards()
        self._runs = Runs()
        self._owners = Owners()
        self._tried = any(verdict.rows is not None for verdict in verdicts)
        self._random: torch.Tensor | None = None
        self._swap: Swap | None = None
        self._walk: Iterator[Any] | None = None
        self._depth = 0
        self._before_handle = optimizer.register_step_pre_hook(torch.compiler.disable(self._before))
        self._after_handle = optimizer.register_step_post_hook(torch.compiler.disable(self._after))
        optimizer._optimizer_step_post_hooks.move_to_end(self._after_handle.id, last=False)  # type: ignore[attr-defined]
        self._guard(optimizer)

    def _guard(self, optimizer: torch.optim.Optimizer) -> None:
        """An exception in a step leaves DTensors; and hooks that the user set since come before ours."""
        inner = optimizer.step
        before, handle = optimizer._optimizer_step_pre_hooks, self._before_handle.id

        @functools.wraps(inner)
        def step(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            before.move_to_end(handle)  # type: ignore[attr-defined]
            self._abandon()
            try:
                return inner(*args, **kwargs)
            finally:
                self._abandon()

        optimizer.step = types.MethodType(torch.compiler.disable(step, recursive=False), optimizer)  # type: ignore[method-assign]

    # The hooks

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        self._depth += 1
        if self._depth > 1:  # a subclass that calls super().step()
            return None
        if len(self._verdicts) != len(optimizer.param_groups):  # add_param_group
            self._verdicts = classify(optimizer)
        local, owned = self._parts(optimizer)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if callable(closure):
            closure = self._once(closure) if owned else self._outside(closure)
            args, kwargs = _with_closure(args, kwargs, closure)
        if self._tried:
            self._random = torch.get_rng_state()
        if owned:
            self._step_owned(optimizer, local, owned, args, kwargs)
        else:
            self._begin(optimizer, local)
        return args, kwargs

    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._end()
            if self._random is not None and not torch.equal(self._random, torch.get_rng_state()):
                self._tried = False
                warnings.warn(
                    f"{type(optimizer).__name__} drew random numbers in this step, which it did not when it was tried: "
                    "ranks draw their own, so from here on training depends on the number of ranks",
                    stacklevel=4,
                )
            self._random = None

    # Parts of a step

    def _parts(self, optimizer: torch.optim.Optimizer) -> tuple[list[list[StandIn]], list[Owned]]:
        """What each group steps on this rank's shards, and the parameters that are updated by their owners."""
        local: list[list[StandIn]] = []
        cut: list[tuple[DTensor, tuple[int, int]]] = []
        for g, (group, verdict) in enumerate(zip(optimizer.param_groups, self._verdicts, strict=True)):
            members = group["params"]
            stand_ins: list[StandIn] = []
            if verdict.whole:
                cut += [(p, (g, i)) for i, p in enumerate(members) if is_cut(p)]
                members = [p for p in members if not is_cut(p)]
            elif verdict.elementwise and len(members) > 1 and len(family(optimizer)) == 1:
                runs, members = self._runs.of(g, members)
                for run in runs:
                    if run.ready(optimizer.state):
                        stand_ins.append(run)
                    else:
                        members = [*members, *run.members]
            local.append(stand_ins + [self._shards.of(p, verdict.is_rows) for p in members])
        return local, self._owners.of(cut) if cut else []

    def _step_owned(
        self, optimizer: torch.optim.Optimizer, local: list[list[StandIn]], owned: list[Owned], args: Any, kwargs: Any
    ) -> None:
        """Runs all but the last part of the step, and shows the last to the call itself."""
        self._settle_state(optimizer, owned)
        groups = optimizer.param_groups
        step = _unhooked(optimizer)
        settings = _Settings(optimizer)
        self._walk = self._owners.walk(owned, groups, [verdict.decoupled for verdict in self._verdicts])
        for members, last in self._walk:
            lists: list[list[StandIn]] = [[] for _ in groups]
            for each, leaf in members:
                lists[each.place[0]].append(Own(each.parameter, leaf))
            if last and not any(local):
                self._begin(optimizer, lists)
                return
            if members:
                self._begin(optimizer, lists)
                step(optimizer, *args[1:], **kwargs)
                self._swap_back()
                settings.restore()
        self._walk = None
        self._begin(optimizer, local)

    def _begin(self, optimizer: torch.optim.Optimizer, lists: list[list[StandIn]]) -> None:
        groups = [
            # No optimizer expects an empty group, but each knows parameters without a gradient.
            (group, given or [_placeholder(group)])
            for group, given in zip(optimizer.param_groups, lists, strict=True)
        ]
        holders = [each for each in family(optimizer) if "state" in vars(each)]
        self._swap = Swap(groups, holders)
        self._swap.enter()

    def _swap_back(self) -> None:
        if self._swap is not None:
            swap, self._swap = self._swap, None
            swap.leave()

    def _end(self) -> None:
        self._swap_back()
        if self._walk is not None:
            walk, self._walk = self._walk, None
            for _ in walk:
                raise AssertionError("the last part of a step is followed by another")

    def _abandon(self) -> None:
        """After an exception: what was not updated stays as it is."""
        if self._depth:
            self._depth = 0
            self._walk = None
            self._swap_back()

    def _settle_state(self, optimizer: torch.optim.Optimizer, owned: list[Owned]) -> None:
        """State from elsewhere (before sharding, a checkpoint) goes to its owner alone. Collective where it is cut."""
        for member in family(optimizer):
            for each in owned:
                entries = member.state.get(each.parameter)
                if entries is None:
                    continue
                whole = _whole(entries)
                if Owners.is_mine(each):
                    member.state[each.parameter] = whole
                else:
                    del member.state[each.parameter]

    # Closures

    def _outside(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The user's closure meets DTensors, whenever the optimizer calls it."""

        @functools.wraps(closure)
        def outside() -> Any:
            swap = self._swap
            if swap is None:
                return closure()
            swap.leave()
            try:
                return closure()
            finally:
                swap.enter()

        return outside

    def _once(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Gradients must be there before they travel: the closure is called now, and what it returned is given out."""
        with torch.enable_grad():
            loss = closure()
        return lambda: loss


def _with_closure(args: Any, kwargs: Any, closure: Any) -> tuple[Any, Any]:
    return ((args[0], closure, *args[2:]), kwargs) if len(args) > 1 else (args, kwargs | {"closure": closure})


def _placeholder(group: dict[str, Any]) -> StandIn:
    parameters = group["params"]
    device = parameters[0].device if parameters else None
    nothing = nn.Parameter(torch.zeros([1] * (parameters[0].ndim if parameters else 1), device=device))
    return Own(nothing, nothing)


def _whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor()
    if type(value) is dict:
        return {key: _whole(each) for key, each in value.items()}
    if type(value) is list:
        return [_whole(each) for each in value]
    return value


def _unhooked(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """The class's ``step`` without the wrapper that torch puts around it to call hooks."""
    step: Any = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


class _Settings:
    """What an optimizer has besides parameters and state: its groups' other keys, its own attributes."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._tables: list[tuple[dict[str, Any], dict[str, Any], dict[str, torch.Tensor]]] = []
        for member in family(optimizer):
            for table in (*member.param_groups, member.__dict__):
                kept = {k: v for k, v in table.items() if k not in ("params", "param_groups", "state")}
                copies = {k: v.detach().clone() for k, v in kept.items() if isinstance(v, torch.Tensor)}
                self._tables.append((table, kept, copies))

    def restore(self) -> None:
        for table, kept, copies in self._tables:
            for key in [key for key in table if key not in kept and key not in ("params", "param_groups", "state")]:
                del table[key]
            table.update(kept)
            with torch.no_grad():
                for key, copy in copies.items():
                    table[key].copy_(copy)
