"""Stand-ins: for the time of a step, plain tensors take the place of an optimizer's sharded parameters.

- A *leaf* is a plain parameter over the very memory of a DTensor's local shard, so nothing is copied and no operation
  goes through DTensor's dispatch. A *stand-in* is a leaf with its gradient and its state.
- Shards that follow one another in memory have one leaf: an element-wise update does not care where one parameter ends,
  and a step on one tensor costs the host as much as a step on one of hundreds. ``shard()`` lays out the parameters of a
  unit in the order in which FSDP2 reduces their gradients. Where that does not hold in some step, each has its own.
- ``swapped`` puts leaves into the groups of the user's own optimizer object and takes them out again; what the
  optimizer made of state in between is shown as DTensors.

``[Note: Parts of a step]`` torch's foreach steps hold an intermediate result for every parameter of a group at once: as
much memory as all shards together (33 GiB for 70B parameters on 8 ranks), where a fused step needs none. A fused step
would round otherwise. But torch's own classes step one group after the other, and their updates are element-wise: so
each large leaf is shown as a group of its own, with the settings of its group, and the same kernels compute the same
bits with intermediate results of one leaf at a time. Small leaves stay together, so that a step costs the host no more.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from trueshard import _torch
from trueshard.machine import garbage_collection_paused
from trueshard.model.regions import has_whole_rows
from trueshard.optim.classify import Verdict
from trueshard.optim.rebind import IsRows, as_shard, by_shape, each_in, family, shard_like
from trueshard.optim.shards import concatenate, contiguous_pieces, sharded_over

State = dict[Any, Any]
"""An optimizer's ``state``: parameter → what it keeps for it."""

COPIED = 16 << 20
"""Bytes up to which gradients that lie apart are copied into one tensor for a step: those of small parameters of
several units."""


LARGE = 16 << 20
"""Bytes from which a leaf steps by itself: its kernels take a GPU longer than launching them takes the host."""


def leaf_over(memory: torch.Tensor, parameter: torch.Tensor) -> nn.Parameter:
    """Return a plain parameter over ``memory``, trainable as ``parameter`` is, sharing its attributes."""
    leaf = nn.Parameter(memory.detach(), requires_grad=parameter.requires_grad)
    leaf.__dict__ = parameter.__dict__  # the very dict: what is set on one is set on the other
    return leaf


class StandIn:
    """Takes the place of one parameter or several during a step."""

    leaf: torch.Tensor

    def take_gradient(self) -> None:
        """Give the leaf its gradient. May raise: nothing is swapped yet."""

    def lend(self, state: State) -> Any:
        """Return the leaf's state, or None if there is none yet."""

    def take_back(self) -> None:
        """Carry what the optimizer changed in the leaf over to the parameters."""

    def keep(self, state: State, entries: Any) -> None:
        """Carry the leaf's ``entries``, or None if it has none, over to the state of the parameters."""


class Placeholder(StandIn):
    """Keeps the place of a parameter that is not stepped now: it has no gradient, and nothing is kept of it."""

    def __init__(self, like: torch.Tensor | None) -> None:
        device = None if like is None else _torch.local(like).device
        self.leaf = nn.Parameter(torch.zeros([1] * (1 if like is None else like.ndim), device=device))


class WholeTensor(StandIn):
    """A leaf with gradient and state of its own: a plain parameter itself, or a whole one at its owner."""

    def __init__(self, parameter: torch.Tensor, leaf: torch.Tensor) -> None:
        self.parameter, self.leaf = parameter, leaf

    def lend(self, state: State) -> Any:
        return state.get(self.parameter)

    def keep(self, state: State, entries: Any) -> None:
        _put(state, self.parameter, entries)


class LocalShard(StandIn):
    """This rank's shard of a DTensor."""

    def __init__(self, parameter: DTensor, is_rows: IsRows) -> None:
        self.parameter, self._is_rows = parameter, is_rows
        self._memory = _torch.local(parameter)
        self.leaf = leaf_over(self._memory, parameter)
        self._grad: torch.Tensor | None = None
        """Gradient that the leaf was given in this step, to see whether the optimizer put another in its place."""
        self._dtensor_of: dict[int, DTensor] = {}
        """``id`` of a lent tensor of state → the DTensor that it came from."""

    def take_gradient(self) -> None:
        parameter, leaf = self.parameter, self.leaf
        if leaf.requires_grad != parameter.requires_grad:
            leaf.requires_grad_(parameter.requires_grad)
        self._grad = leaf.grad = None if parameter.grad is None else local_gradient(parameter)

    def lend(self, state: State) -> Any:
        entries = state.get(self.parameter)
        return None if entries is None else self._localise(entries)

    def take_back(self) -> None:
        parameter, leaf = self.parameter, self.leaf
        before, now = _torch.addresses([self._memory, leaf])
        if now != before:  # the optimizer assigned new memory: p.data = ...
            self._memory.copy_(leaf.detach())
            leaf.data = self._memory
        if leaf.grad is not self._grad:
            parameter.grad = None if leaf.grad is None else as_shard(leaf.grad, parameter)
        leaf.grad = self._grad = None

    def keep(self, state: State, entries: Any) -> None:
        _put(state, self.parameter, None if entries is None else self._show(entries))
        self._dtensor_of.clear()

    def _localise(self, value: Any, path: tuple[Any, ...] = ()) -> Any:
        """Return plain local state; dicts and lists are changed in place, so that the user's own objects stay."""
        if isinstance(value, DTensor):
            local = _torch.local(value)
            self._dtensor_of[id(local)] = value
            return local
        if isinstance(value, torch.Tensor):
            parameter = self.parameter
            # Plain, though it goes by rows: a state dict from one process, the same whole tensor on every rank.
            if value.ndim and parameter.ndim and len(value) == len(parameter) and self._is_rows(path, value, parameter):
                return self._localise(shard_like(value, parameter))
            return value
        return each_in(value, self._localise, path)

    def _show(self, value: Any, path: tuple[Any, ...] = ()) -> Any:
        if isinstance(value, torch.Tensor):
            if (dtensor := self._dtensor_of.get(id(value))) is not None:
                return dtensor
            if not isinstance(value, DTensor) and self._is_rows(path, value, self.leaf):
                return as_shard(value, self.parameter)
            return value
        return each_in(value, self._show, path)


def local_gradient(parameter: DTensor) -> torch.Tensor:
    """Return this rank's part of the gradient, sharded like the parameter."""
    grad = parameter.grad
    assert grad is not None
    if not isinstance(grad, DTensor):  # torch lets one assign it
        if grad.shape != parameter.shape:
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} was given a plain gradient of shape "
                f"{tuple(grad.shape)}; give it a DTensor placed like the parameter, or the whole gradient"
            )
        return _torch.local(shard_like(grad, parameter))
    if not _torch.is_placed_as(grad, parameter):
        grad = grad.redistribute(placements=parameter.placements)
    return _torch.local(grad)


def _put(state: State, key: torch.Tensor, entries: Any) -> None:
    if entries is not None:
        if state.get(key) is not entries:
            state[key] = entries
    elif key in state:
        del state[key]


class JoinedShards(StandIn):
    """Shards of one dtype that follow one another in memory, and are given in that order, as one flat tensor.

    State that was made for the flat tensor is shown as a DTensor for each parameter, a view of it.
    """

    def __init__(self, members: Sequence[DTensor]) -> None:
        self.members = list(members)
        self._locals = [_torch.local(member) for member in members]
        self._counts = [local.numel() for local in self._locals]
        self._specs = _torch.specs_of(members)
        self.leaf = leaf_over(_torch.flat_memory(self._locals[0], sum(self._counts)), members[0])
        self._grad: torch.Tensor | None = None
        """Flat gradient, from ``ready`` to the end of the step."""
        self._entries: dict[str, Any] | None = None
        """State of the leaf; None: the optimizer has made none yet."""
        self._shown: list[dict[str, Any]] = []
        """``_entries`` as each member shows it: its view of every tensor."""
        self._values: list[Any] = []
        """Every value in ``_shown``, to see whether one was replaced."""
        self._scalars: dict[str, torch.Tensor] = {}
        """Key of a 0-dim tensor → one element a member; the first is the leaf's own, so members see its count grow."""
        self._versions: dict[str, int] = {}
        """Version of each of ``_scalars`` when its elements were equal: comparing again would wait for the device."""
        self._spread_values: dict[str, Any] = {}
        """State of the leaf when it was last spread over the members, to see what the optimizer replaced."""

    def ready(self, state: State) -> bool:
        """True if all members can be stepped as one now: gradients and state allow it, or there are no gradients."""
        self._grad = None
        grads: list[Any] = [member.grad for member in self.members]
        if all(grad is None for grad in grads):
            return self._joins_state(state)
        if not all(map(operator.is_not, grads, itertools.repeat(None))):
            return False
        # FSDP2 gives each gradient its parameter's own record; asking all at once costs least.
        if all(map(operator.is_, _torch.specs_of(grads), self._specs)):
            shards = _torch.shards_of(grads)
        else:
            shards = [local_gradient(member) for member in self.members]
        same_dtype = all(shard.dtype == self.leaf.dtype for shard in shards)
        if not same_dtype or not all(map(torch.Tensor.is_contiguous, shards)):
            return False
        pieces = contiguous_pieces(shards)  # one for each unit
        if (len(pieces) > 1 and self.leaf.nbytes > COPIED) or not self._joins_state(state):
            return False
        self._grad = concatenate(pieces)
        return True

    def take_gradient(self) -> None:
        self.leaf.grad = self._grad

    def lend(self, state: State) -> Any:
        return self._entries

    def take_back(self) -> None:
        self.leaf.grad = self._grad = None
        increment_version(self._locals)  # they do not see what is written through the flat tensor

    def keep(self, state: State, entries: Any) -> None:
        if entries is None:
            return
        if self._entries is None:
            self._entries, self._shown = entries, [{} for _ in self.members]
            state.update(zip(self.members, self._shown, strict=True))
        changed = False
        for key, value in entries.items():
            if isinstance(value, torch.Tensor) and value.ndim == 0 and key in self._scalars:
                scalars = self._scalars[key]
                if _torch.storage_identity(value) == _torch.storage_identity(scalars):
                    scalars.fill_(value)
                    self._versions[key] = _torch.version(scalars)
                    continue
            if key not in self._spread_values or self._spread_values[key] is not value:
                self._spread(key, value)
                changed = True
        if changed:
            self._remember()

    @garbage_collection_paused()
    def _spread(self, key: str, value: Any) -> None:
        """Show each member its part of the leaf's ``value``."""
        assert self._entries is not None
        parts: Sequence[Any]
        if isinstance(value, torch.Tensor) and value.ndim == 0:
            scalars = value.detach().expand(len(self.members)).clone()
            self._scalars[key], self._versions[key] = scalars, _torch.version(scalars)
            parts = scalars.unbind()
            self._entries[key] = scalars[0]
        elif isinstance(value, torch.Tensor):
            parts = _torch.shards_over(value.view(-1), self.members)
        else:
            parts = [value] * len(self.members)
        for shown, part in zip(self._shown, parts, strict=True):
            shown[key] = part

    def _remember(self) -> None:
        assert self._entries is not None
        self._spread_values = dict(self._entries)
        self._values = [value for shown in self._shown for value in shown.values()]

    def _joins_state(self, state: State) -> bool:
        """True if the members' state is still the leaf's, or could be joined to be it."""
        now: list[Any] = list(map(state.get, self.members))
        if all(entries is None for entries in now):
            self._entries = None
            return True
        if self._entries is not None and all(map(operator.is_, now, self._shown)):
            values = list(itertools.chain.from_iterable(map(dict.values, self._shown)))
            if len(values) == len(self._values) and all(map(operator.is_, values, self._values)):
                return all(self._still_equal(key) for key in self._scalars)
        if any(type(entries) is not dict or entries.keys() != now[0].keys() for entries in now):
            return False
        joined: dict[str, Any] = {}
        for key in now[0]:
            values = [self._local(key, member, entries[key]) for member, entries in zip(self.members, now, strict=True)]
            if (value := self._join(values)) is None:
                return False
            (joined[key],) = value
        self._entries, self._shown, self._scalars = joined, now, {}
        for key, value in list(joined.items()):
            self._spread(key, value)
        self._remember()
        return True

    def _still_equal(self, key: str) -> bool:
        scalars = self._scalars[key]
        if _torch.version(scalars) != self._versions[key]:
            if not bool((scalars == scalars[0]).all()):
                return False
            self._versions[key] = _torch.version(scalars)
        return True

    @staticmethod
    def _local(key: str, member: DTensor, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
            # A state dict from one process has whole tensors.
            return _torch.local(shard_like(value, member)) if value.ndim and by_shape((key,), value, member) else value
        return _torch.local(value)

    def _join(self, values: list[Any]) -> tuple[Any] | None:
        """Copy the members' ``values``, from a checkpoint or before sharding, into one; None: they cannot be joined."""
        first = values[0]
        if not isinstance(first, torch.Tensor):
            return (first,) if all(type(value) is type(first) and value == first for value in values) else None
        if any(not isinstance(value, torch.Tensor) or value.dtype != first.dtype for value in values):
            return None
        if all(value.ndim == 0 for value in values):
            return (first.detach().clone(),) if all(bool(value == first) for value in values) else None
        if all(value.shape == local.shape for value, local in zip(values, self._locals, strict=True)):
            return (torch.cat([value.reshape(-1) for value in values]),)
        return None


class GroupStandIns:
    """The stand-ins of one parameter group, until its parameters, their memory or the verdict change."""

    def __init__(self, parameters: Sequence[torch.Tensor], verdict: Verdict) -> None:
        self._parameters, self._verdict = list(parameters), verdict
        self._memory = _torch.shards_of(parameters)
        self.owned: list[tuple[int, DTensor]] = []
        """(position in the group, parameter) of those that an owner updates."""
        if not verdict.elementwise:
            cut = [(i, p) for i, p in enumerate(parameters) if isinstance(p, DTensor) and sharded_over(p)]
            self.owned = [(i, p) for i, p in cut if verdict.whole or not (verdict.inside or has_whole_rows(p))]
        self._single: dict[int, StandIn] = {id(p): Placeholder(p) for _, p in self.owned}
        """``id`` of a parameter → the stand-in that takes its place alone."""
        self._placeholders: list[StandIn] = []
        self._joined = _join_neighbours(self._parameters) if verdict.elementwise else []
        joined = {id(member) for shards in self._joined for member in shards.members}
        # What is not joined in any step; of what is joined, a step may take some one by one.
        self._separate = [parameter for parameter in parameters if id(parameter) not in joined]

    def fit(self, parameters: Sequence[torch.Tensor], verdict: Verdict) -> bool:
        """True if these are the stand-ins of ``parameters`` still."""
        return (
            verdict is self._verdict
            and len(parameters) == len(self._parameters)
            and all(map(operator.is_, parameters, self._parameters))
            and all(map(operator.is_, _torch.shards_of(parameters), self._memory))
        )

    def placeholders(self) -> list[StandIn]:
        """Return one for each parameter; they are made once, since making one is an operation of the device."""
        self._placeholders = self._placeholders or [Placeholder(parameter) for parameter in self._parameters]
        return list(self._placeholders)

    def now(self, state: State) -> list[StandIn]:
        """Return what stands in the group in this step: joined shards that are ready, then the others one by one."""
        ready = [shards for shards in self._joined if shards.ready(state)]
        unready = [member for shards in self._joined if shards not in ready for member in shards.members]
        return [*ready, *map(self._alone, [*unready, *self._separate])]

    def _alone(self, parameter: torch.Tensor) -> StandIn:
        if (stand_in := self._single.get(id(parameter))) is not None:
            return stand_in
        is_rows = self._verdict.is_rows
        made = LocalShard(parameter, is_rows) if isinstance(parameter, DTensor) else WholeTensor(parameter, parameter)
        return self._single.setdefault(id(parameter), made)


def _join_neighbours(parameters: Sequence[torch.Tensor]) -> list[JoinedShards]:
    able = [
        parameter
        for parameter, local in zip(parameters, _torch.shards_of(parameters), strict=True)
        if isinstance(parameter, DTensor) and _torch.is_plain(local) and local.numel() and local.is_contiguous()
    ]
    chains: dict[Any, list[DTensor]] = {}
    """Key that the next neighbour must have (address, memory, dtype, ``requires_grad``) → the chain so far."""
    starts = _torch.addresses(_torch.shards_of(able))
    for start, parameter in sorted(zip(starts, able, strict=True), key=operator.itemgetter(0)):
        local = _torch.local(parameter)
        kind = _torch.memory_identity(local), local.dtype, parameter.requires_grad
        chain = chains.pop((start, kind), [])
        chain.append(parameter)
        chains[start + local.nbytes, kind] = chain
    return [JoinedShards(chain) for chain in chains.values() if len(chain) > 1]


@contextlib.contextmanager
def swapped(
    optimizer: torch.optim.Optimizer, stand_ins: Sequence[Sequence[StandIn]], *, in_parts: bool = False
) -> Iterator[None]:
    """Inside, show the optimizer, and those that it wraps, leaves; then again DTensors, with what it changed.

    ``in_parts``: it is one of torch's own that step element-wise; see [Note: Parts of a step].
    """
    # No optimizer expects an empty group, but each knows parameters without a gradient.
    lists = [in_group or [Placeholder(None)] for in_group in stand_ins]
    every = [stand_in for in_group in lists for stand_in in in_group]
    groups = list(optimizer.param_groups)
    members = [group["params"] for group in groups]
    for stand_in in every:
        stand_in.take_gradient()
    shown_groups: list[dict[str, Any]] = []
    for group, in_group in zip(groups, lists, strict=True):
        leaves = [stand_in.leaf for stand_in in in_group]
        group["params"], *more = _parts(leaves) if in_parts and not group.get("fused") else [leaves]
        shown_groups += [group, *(group | {"params": part} for part in more)]
    is_parted = len(shown_groups) > len(groups)
    if is_parted:
        optimizer.param_groups[:] = shown_groups
    holders = [member for member in family(optimizer) if "state" in vars(member)]
    states: list[State] = [holder.state for holder in holders]
    distinct = {id(state): state for state in states}  # a wrapper may share the state of what it wraps
    lent = {key: _lend(state, every) for key, state in distinct.items()}
    for holder, state in zip(holders, states, strict=True):
        holder.state = lent[id(state)]  # type: ignore[assignment]
    yield
    if is_parted:
        optimizer.param_groups[:] = groups
    for group, shown in zip(groups, members, strict=True):
        group["params"] = shown
    for stand_in in every:
        stand_in.take_back()
    for holder, state in zip(holders, states, strict=True):
        left: State = holder.state
        holder.state = state  # type: ignore[assignment]
        if distinct.pop(id(state), None) is not None:
            _keep(state, left, every, members)


def _parts(leaves: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return the small leaves together, then each large one alone."""
    small = [leaf for leaf in leaves if leaf.nbytes < LARGE]
    return [*([small] if small else []), *([leaf] for leaf in leaves if leaf.nbytes >= LARGE)]


def _lend(state: State, stand_ins: Sequence[StandIn]) -> State:
    lent: State = defaultdict(dict)
    if not all(issubclass(kind, torch.Tensor) for kind in set(map(type, state))):
        lent.update((key, value) for key, value in state.items() if not isinstance(key, torch.Tensor))
    for stand_in in stand_ins:
        if (entries := stand_in.lend(state)) is not None:
            lent[stand_in.leaf] = entries
    return lent


@garbage_collection_paused()
def _keep(state: State, lent: State, stand_ins: Sequence[StandIn], members: Sequence[Sequence[torch.Tensor]]) -> None:
    count = len(state)
    for stand_in in stand_ins:
        stand_in.keep(state, lent.pop(stand_in.leaf, None))
    state.update(lent)
    if len(state) != count:  # new state comes in the order of memory; the user's is that of the groups
        entries = dict(state)
        state.clear()
        state.update((p, entries.pop(p)) for group in members for p in group if p in entries)
        state.update(entries)
