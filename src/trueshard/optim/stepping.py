"""Watches every optimizer's step, from the first ``shard()`` of the process on.

- One that holds a parameter from before sharding, or one of the gathered copies, would train nothing: an error says so.
- One that was made from a sharded model's parameters and never given to ``shard()`` is bound before its first step, so
  that it steps as exactly as the others.

What happens around ``step()`` of an optimizer that holds sharded parameters: the same object, the same call.

Hooks on the optimizer's own step show it plain tensors and put the DTensors back, between the user's hooks, which see
DTensors. Parameters of a group that works on shards are stepped by the call itself. Those that need an owner come in
batches: all but the last part of a step are run before the call, each from the same settings, so that what a step
changes in its groups (a count) is changed once.
"""

from __future__ import annotations

import copy
import functools
import operator
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from trueshard import _torch
from trueshard.distributed import device_of, groups_of
from trueshard.optim.classify import Verdict, classify
from trueshard.optim.exchange import Owned
from trueshard.optim.owners import Owners, is_cut
from trueshard.optim.rebind import IsRows, by_shape, each_in, family
from trueshard.optim.runs import Runs
from trueshard.optim.shards import Nothing, Own, Shards, StandIn, Swap

_replaced: Any = WeakTensorKeyDictionary()
"""Parameters from before sharding → their names."""
_roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_checked: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[list[int]]] = weakref.WeakKeyDictionary()
_watching: list[Any] = []


def watch(root: nn.Module, originals: Mapping[str, nn.Parameter]) -> None:
    """From now on, optimizers that hold parameters of ``root`` are looked at before they step.

    Args:
        root: the sharded model.
        originals: the parameters that were replaced, by name; held weakly.
    """
    for name, parameter in originals.items():
        _replaced[parameter] = name
    _roots.add(root)
    if not _watching:
        _watching.append(register_optimizer_step_pre_hook(torch.compiler.disable(_check)))


def _check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    signature = [list(map(id, group["params"])) for group in optimizer.param_groups]
    if _checked.get(optimizer) == signature:
        return
    members = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    plain = [p for p in members if not isinstance(p, DTensor)]
    for parameter in plain:
        if (name := _replaced.get(parameter)) is not None:
            raise RuntimeError(
                f"{type(optimizer).__name__} holds {name!r} as it was before shard(), so its step would train nothing; "
                "give the optimizer to shard(), or make it from model.parameters() after shard()"
            )
    if plain:
        gathered = {id(g): name for root in _roots for name, _, g in _torch.gathered_parameters(root)}
        for parameter in plain:
            if (name := gathered.get(id(parameter))) is not None:
                raise RuntimeError(
                    f"{type(optimizer).__name__} was made while {name!r} was gathered (between forward and backward), "
                    "so its step would train nothing; make it before the forward, or give it to shard()"
                )
    if len(plain) < len(members) and not is_bound(optimizer):
        ours = {id(parameter) for root in _roots for parameter in root.parameters()}
        if any(id(parameter) in ours for parameter in members):
            bind(optimizer)
    _checked[optimizer] = signature


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


@dataclass(frozen=True)
class Role:
    """How the state of a sharded parameter is kept."""

    is_mine: bool | None
    """Whether this rank has all of it, as the parameter's owner; None: each rank has that of its shard."""
    is_rows: IsRows
    """Of the latter, which tensors are cut as the parameter is."""


def roles_of(optimizer: torch.optim.Optimizer) -> dict[int, Role]:
    """By ``id``, the role of each sharded parameter of ``optimizer``, which is bound if it was not. No communication.

    Raises:
        ValueError: it cannot step on shards.
    """
    if not any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"]):
        return {}
    bind(optimizer)
    return _bound[optimizer].roles(optimizer)


class Stepping:
    """The hooks of one optimizer, and what they keep from step to step."""

    def __init__(self, optimizer: torch.optim.Optimizer, verdicts: list[Verdict]) -> None:
        self._verdicts = verdicts
        self._groups = list(optimizer.param_groups)
        self._shards = Shards()
        self._runs = Runs()
        self._owners = Owners()
        self._is_tried = any(verdict.rows is not None for verdict in verdicts)
        self._looks_at_random = self._is_tried and not any(verdict.draws for verdict in verdicts)
        self._random: torch.Tensor | None = None
        self._losses: list[tuple[Any, Any]] = []
        """What the optimizer was told in this step, and what the user's closure returned."""
        self._swap: Swap | None = None
        self._walk: Iterator[Any] | None = None
        self._depth = 0
        _torch.make_hookable(optimizer)
        self._before_handle = optimizer.register_step_pre_hook(torch.compiler.disable(self._before))
        self._after_handle = optimizer.register_step_post_hook(torch.compiler.disable(self._after))
        _torch.step_hooks(optimizer)[1].move_to_end(self._after_handle.id, last=False)
        # Whoever looks at the optimizer after a step that failed before it was guarded.
        optimizer.register_state_dict_pre_hook(lambda _: self._abandon(), prepend=True)
        self._guard(optimizer)

    def _guard(self, optimizer: torch.optim.Optimizer) -> None:
        """An exception in a step leaves DTensors; and hooks that the user set since come before ours.

        Like a scheduler's, the function put over ``step`` holds the optimizer weakly: it is freed when it is let go of.
        """
        before, handle = _torch.step_hooks(optimizer)[0], self._before_handle.id
        inner = optimizer.__dict__.get("step")  # a scheduler's
        weak = weakref.ref(optimizer)

        def guarded(this: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            before.move_to_end(handle)
            self._abandon()
            try:
                found = type(this).step(this, *args, **kwargs) if inner is None else inner(*args, **kwargs)
                return self._told(found)
            finally:
                self._abandon()
                self._losses = []

        @functools.wraps(type(optimizer).step if inner is None else inner)
        def step(*args: Any, **kwargs: Any) -> Any:
            this = weak()
            assert this is not None
            return guarded(this, *args, **kwargs)

        replaced: Any = torch.compiler.disable(step, recursive=False)
        replaced.__func__ = torch.compiler.disable(guarded, recursive=False)  # schedulers take a bound method apart
        optimizer.step = replaced  # type: ignore[method-assign]

    def roles(self, optimizer: torch.optim.Optimizer) -> dict[int, Role]:
        """By ``id``, the role of each sharded parameter."""
        self._know(optimizer)
        found: dict[int, Role] = {}
        cut: list[tuple[DTensor, tuple[int, int]]] = []
        for g, (group, verdict) in enumerate(zip(optimizer.param_groups, self._verdicts, strict=True)):
            for i, parameter in enumerate(group["params"]):
                if verdict.whole and is_cut(parameter):
                    cut.append((parameter, (g, i)))
                elif isinstance(parameter, DTensor):
                    found[id(parameter)] = Role(None, verdict.is_rows)
        for each in self._owners.of(cut) if cut else []:
            found[id(each.parameter)] = Role(Owners.is_mine(each), by_shape)
        return found

    # The hooks

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        self._depth += 1
        if self._depth > 1:  # a subclass that calls super().step()
            return None
        self._know(optimizer)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        owned = any(verdict.whole for verdict in self._verdicts)
        if callable(closure):
            if self._is_tried:
                closure = self._averaged(optimizer, closure)
            closure = self._once(closure) if owned else self._outside(optimizer, closure)
            args, kwargs = _with_closure(args, kwargs, closure)
        if self._looks_at_random:
            self._random = torch.get_rng_state()
        local, cut = self._parts(optimizer)
        if cut:
            self._step_owned(optimizer, local, cut, args, kwargs)
        else:
            self._begin(optimizer, local)
        return args, kwargs

    def _know(self, optimizer: torch.optim.Optimizer) -> None:
        """Groups may have been added, removed, or loaded anew since the last step."""
        groups = optimizer.param_groups
        if len(groups) != len(self._groups) or not all(map(operator.is_, groups, self._groups)):
            self._verdicts = classify(optimizer)
            self._groups = list(groups)
            self._shards.keep_only(p for group in groups for p in group["params"])

    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._end()
            self._look_at_random(optimizer)
            self._random = None

    def _look_at_random(self, optimizer: torch.optim.Optimizer) -> None:
        if self._random is not None and not torch.equal(self._random, torch.get_rng_state()):
            self._looks_at_random = False
            warnings.warn(
                f"{type(optimizer).__name__} drew random numbers in this step, which it did not when it was tried: "
                "ranks draw their own, so from here on training depends on the number of ranks",
                stacklevel=5,
            )

    # Parts of a step

    def _parts(self, optimizer: torch.optim.Optimizer) -> tuple[list[list[StandIn]], list[Owned]]:
        """What each group steps on this rank's shards, and the parameters that are updated by their owners."""
        local: list[list[StandIn]] = []
        cut: list[tuple[DTensor, tuple[int, int]]] = []
        for g, (group, verdict) in enumerate(zip(optimizer.param_groups, self._verdicts, strict=True)):
            members = group["params"]
            if verdict.whole:
                cut += [(p, (g, i)) for i, p in enumerate(members) if is_cut(p)]
                local.append([Nothing(p) if is_cut(p) else self._shards.of(p, verdict.is_rows) for p in members])
            elif verdict.elementwise and len(members) > 1:
                local.append(self._in_runs(optimizer, g, members, verdict))
            else:
                local.append([self._shards.of(p, verdict.is_rows) for p in members])
        return local, self._owners.of(cut) if cut else []

    def _in_runs(
        self, optimizer: torch.optim.Optimizer, g: int, members: list[torch.Tensor], verdict: Verdict
    ) -> list[StandIn]:
        runs, loose = self._runs.of(g, members)
        ready = [run for run in runs if run.ready(optimizer.state)]
        alone = [p for run in runs if run not in ready for p in run.members] + loose
        return [*ready, *(self._shards.of(p, verdict.is_rows) for p in alone)]

    def _step_owned(
        self, optimizer: torch.optim.Optimizer, local: list[list[StandIn]], owned: list[Owned], args: Any, kwargs: Any
    ) -> None:
        """Runs all but the last part of the step, and shows the last to the call itself.

        Whoever is not in a part leaves a placeholder: an optimizer may go by the place of a parameter in its group.
        """
        self._settle_state(optimizer, owned)
        groups = optimizer.param_groups
        step = _unhooked(optimizer)
        settings = _Settings(optimizer)
        nothing_local = all(isinstance(each, Nothing) for members in local for each in members)
        self._walk = self._owners.walk(owned, groups, [verdict.decoupled for verdict in self._verdicts])
        for members, last in self._walk:
            lists: list[list[StandIn]] = [[Nothing(p) for p in group["params"]] for group in groups]
            for each, leaf in members:
                lists[each.place[0]][each.place[1]] = Own(each.parameter, leaf)
            if last and nothing_local:
                self._begin(optimizer, lists)
                return
            if members:
                settings.lend()
                self._begin(optimizer, lists)
                try:
                    step(optimizer, *args[1:], **kwargs)
                finally:
                    self._swap_back()
                    settings.restore()
        self._walk = None
        self._begin(optimizer, local)

    def _begin(self, optimizer: torch.optim.Optimizer, lists: list[list[StandIn]]) -> None:
        groups = [
            # No optimizer expects an empty group, but each knows parameters without a gradient.
            (group, given or [Nothing(None)])
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

    def _outside(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The user's closure meets DTensors, whenever the optimizer calls it, and makes other gradients."""

        @functools.wraps(closure)
        def outside() -> Any:
            self._look_at_random(optimizer)
            self._swap_back()
            try:
                loss = closure()
            except BaseException:
                self._abandon()
                raise
            self._begin(optimizer, self._parts(optimizer)[0])
            if self._random is not None:
                self._random = torch.get_rng_state()
            return loss

        return outside

    def _averaged(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Tells the optimizer the loss of the whole batch, as one device does: its update may depend on it."""

        @functools.wraps(closure)
        def averaged() -> Any:
            loss = closure()
            members = (p for group in optimizer.param_groups for p in group["params"])
            mesh = next((p.device_mesh for p in members if isinstance(p, DTensor)), None)
            if mesh is not None and isinstance(loss, (float, torch.Tensor)) and not isinstance(loss, DTensor):
                mean = torch.as_tensor(loss).detach().to(device_of(mesh), torch.float64, copy=True)
                for group in groups_of(mesh):
                    dist.all_reduce(mean, group=group)
                mean /= mesh.size()
                told = float(mean) if isinstance(loss, float) else mean.to(loss)
                self._losses.append((told, loss))
                return told
            return loss

        return averaged

    def _told(self, found: Any) -> Any:
        """What a step returned, with the user's own losses."""
        if type(found) in (tuple, list):
            return type(found)(map(self._told, found))
        return next((loss for told, loss in self._losses if told is found), found)

    def _once(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Gradients must be there before they travel: the closure is called now, and what it returned is given out."""
        with torch.enable_grad():
            loss = closure()
        return lambda: loss


def _with_closure(args: Any, kwargs: Any, closure: Any) -> tuple[Any, Any]:
    return ((args[0], closure, *args[2:]), kwargs) if len(args) > 1 else (args, kwargs | {"closure": closure})


def _whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor()
    return each_in(value, lambda each, _: _whole(each))


def _unhooked(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """The class's ``step`` without the wrapper that torch puts around it to call hooks."""
    step: Any = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


class _Settings:
    """What an optimizer has besides parameters and state: its groups' other keys, its own attributes.

    All parts of a step begin with the same: all but the last get a copy.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        members = family(optimizer)
        tables = [table for member in members for table in (*member.param_groups, vars(member))]
        self._tables = [(table, {k: v for k, v in table.items() if _is_setting(k, v)}) for table in tables]

    def lend(self) -> None:
        for table, kept in self._tables:
            for key, value in kept.items():
                if isinstance(value, torch.Tensor):
                    table[key] = value.detach().clone()
                elif not isinstance(value, (int, float, str, type(None))):
                    table[key] = copy.deepcopy(value)

    def restore(self) -> None:
        for table, kept in self._tables:
            for key in [key for key, value in table.items() if key not in kept and _is_setting(key, value)]:
                del table[key]
            table.update(kept)


def _is_setting(key: str, value: Any) -> bool:
    if key in ("params", "param_groups", "state", "defaults") or (key == "step" and callable(value)):
        return False
    return not key.endswith("_hooks") and not isinstance(value, (torch.optim.Optimizer, nn.Module))
