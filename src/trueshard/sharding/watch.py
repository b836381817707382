"""Watch what several ranks hold in common: after steps, compare it by hashes, and raise where it went apart.

- Held in common are parameters and gradients along the dimensions of their mesh on which they are ``Replicate``
  (replicas, matrices that ranks do not share, what is held whole), buffers on all ranks, and seeds of optimizers.
- A check is one hash for each kind and group of ranks, reduced in the group (MAX of it and of its complement), and one
  reduction of what differed over all ranks, so that all of them raise. The device is waited for once, at its end.
- Only on a difference ranks exchange the hash of each tensor, and how far the values are apart. Kernels that add in
  another order each time move replicas by roundings; that is a warning, once, and an error as soon as it is more.
- A buffer that differs between ranks with different samples was computed from a rank's part of the batch: a warning,
  once for each, as for batch normalisation.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from trueshard import _torch
from trueshard.axes import AXES
from trueshard.distributed import all_reduce, device_of, gather_objects, gather_parts
from trueshard.errors import ReplicasDiffer, warn_user
from trueshard.model import agreement, names
from trueshard.model.regions import replicated_dims
from trueshard.optim.seeded_random import DRAWS
from trueshard.sharding.hooks import Runtime

FIRST = (1, 2)
"""Steps after which ranks always compare: the first one has made the optimizer's state, the second has used it."""
KINDS = ("parameter", "gradient", "buffer", "seed of the optimizer")
ROUNDINGS = 16
"""Distance, in units of the dtype's eps and of the largest value, up to which tensors differ by rounding alone."""


@dataclass(frozen=True)
class _Item:
    """One tensor that ranks of a group hold in common; None: there is no gradient."""

    kind: str
    name: str
    tensor: torch.Tensor | None


@dataclass
class _Common:
    """Tensors that the ranks of one group hold in common."""

    group: dist.ProcessGroup
    axis: str
    items: list[_Item] = field(default_factory=list)


@dataclass(frozen=True)
class _Difference:
    """A tensor that went apart; ``distance``: largest difference over the largest value, in units of eps."""

    kind: str
    name: str
    axis: str
    ranks: tuple[int, ...]
    distance: float


class Watch:
    """Compares after every ``every``-th step of each optimizer, and after the first ones."""

    def __init__(self, runtime: Runtime, every: int) -> None:
        self._runtime, self._every = weakref.proxy(runtime), every
        self._steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._warned: set[tuple[str, str]] = set()
        """(kind, name) of what differs and may."""
        self.checks = 0
        """Number of comparisons so far."""

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a model is watched anew."""

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step, and compare if it is one after which ranks do. Collective then."""
        step = self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        if step in FIRST or step % self._every == 0:
            self._compare(optimizer, step)

    @torch.no_grad()
    def _compare(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        everything, device = self._in_common(optimizer), device_of(self._runtime.mesh)
        of_tied = [(tie, _hash(tie.parameter, device).view(1)) for tie in self._runtime.ties]
        ties = [(tie, torch.cat(tie.exchange(own))) for tie, own in of_tied]
        if not everything and not ties:
            return
        self.checks += 1
        differs = torch.zeros(len(KINDS), dtype=torch.int32, device=device)
        for _, hashes_there in ties:
            differs[0] |= (hashes_there != hashes_there[0]).any().int()
        hashes = [torch.stack([_hash(item.tensor, device) for item in common.items]) for common in everything]
        for common, of_items in zip(everything, hashes, strict=True):
            weighted = of_items * agreement.weights_of_places(len(of_items), device)
            place = torch.tensor([KINDS.index(item.kind) for item in common.items]).to(device, non_blocking=True)
            sums = torch.zeros(len(KINDS), dtype=torch.int64, device=device).index_add_(0, place, weighted)
            both = torch.cat([sums, ~sums])
            dist.all_reduce(both, dist.ReduceOp.MAX, group=common.group)
            largest, complement = both.chunk(2)
            differs |= (largest != ~complement).int()
        if not any(all_reduce(differs, self._runtime.axes.all, dist.ReduceOp.MAX).tolist()):
            return
        here = [
            _Difference("parameter", tie.name, "pipeline", tuple(tie.holders), math.inf)
            for tie, hashes_there in ties
            if (hashes_there != hashes_there[0]).any()
        ]
        for common, of_items in zip(everything, hashes, strict=True):
            here += _differences(common, of_items)
        everywhere = set().union(*gather_objects(here, self._runtime.axes.all))
        self._tell(sorted(everywhere, key=lambda one: (-one.distance, one.name, one.axis)), step)

    def _in_common(self, optimizer: torch.optim.Optimizer) -> list[_Common]:
        """Return what ranks hold in common, a group each, in one order on all of them.

        Parameters are the optimizer's; the first optimizer brings those that none trains, and buffers, too.
        """
        axes, is_first = self._runtime.axes, next(iter(self._steps)) is optimizer
        axis_of = axes.groups
        # Ranks of the tensor axis hold the same of what is whole on each.
        tensor_groups = [axes.along["tensor"].get_group()] if "tensor" in axes.along else []
        result: dict[str, _Common] = {}

        def add(groups: Iterable[dist.ProcessGroup], *items: _Item) -> None:
            kept = [item for item in items if item.tensor is None or _is_plain(item.tensor)]
            for group in groups if kept else ():
                if group.size() > 1:
                    key = str(group.group_name)
                    axis = "/".join(axis_of.get(key, ["its mesh"]))
                    result.setdefault(key, _Common(group, axis)).items.extend(kept)

        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for name, parameter, is_whole in self._parameters():
            if id(parameter) in own or (is_first and not parameter.requires_grad):
                groups = [*_groups(parameter), *(tensor_groups if is_whole else ())]
                items = [_Item("parameter", name, parameter)]
                if id(parameter) in own and parameter.requires_grad:
                    items.append(_Item("gradient", name, parameter.grad))
                add(groups, *items)
        everyone = axes.all.get_all_groups()
        if is_first:
            for name, module, _, buffer in names.named_tensors(self._runtime.root, "buffers"):
                if not isinstance(buffer, DTensor) and (not isinstance(module, _torch.BatchNorm)):
                    add(everyone, _Item("buffer", name, buffer))
        draws = [torch.tensor(group[DRAWS]) for group in optimizer.param_groups if DRAWS in group]
        add(everyone, *(_Item(KINDS[-1], type(optimizer).__name__, numbers) for numbers in draws))
        return list(result.values())

    def _parameters(self) -> Iterator[tuple[str, Any, bool]]:
        """Yield (name, parameter, True if every rank of the mesh holds it whole)."""
        for name, sharded, _, _ in _torch.sharded_places(self._runtime.root):
            yield name, sharded, False
        wholes = {id(whole.parameter) for whole in self._runtime.replicated if whole.places}
        for name, _, _, parameter in names.named_tensors(self._runtime.root, "parameters"):
            if id(parameter) in wholes:
                wholes.remove(id(parameter))  # once, if it is tied
                yield name, parameter, True

    def _tell(self, differences: list[_Difference], step: int) -> None:
        """Raise ReplicasDiffer for what must be equal; warn once of what may differ."""
        wrong = []
        for one in differences:
            on_data = not any(axis.same_samples for axis in AXES if axis.name in one.axis.split("/"))
            if one.kind == "buffer" and on_data:
                words = (
                    "follows from each rank's part of the batch, which is not what one device computes: reduce over "
                    "ranks what it is computed from"
                )
            elif one.kind != "seed of the optimizer" and one.distance <= ROUNDINGS:
                words = (
                    "differs by roundings between ranks: kernels add in another order each time; "
                    "torch.use_deterministic_algorithms(True) keeps the order"
                )
            else:
                wrong.append(one)
                continue
            if (one.kind, one.name) not in self._warned:
                self._warned.add((one.kind, one.name))
                warn_user(f"{one.kind} {one.name!r} {words}")
        if wrong:
            shown = "; ".join(
                f"the {one.kind} {one.name!r} along axis {one.axis} (ranks {', '.join(map(str, one.ranks))})"
                for one in wrong[:4]
            )
            more = f", and {len(wrong) - 4} more" if len(wrong) > 4 else ""
            raise ReplicasDiffer(
                f"after step {step} ranks hold different values of what they hold in common: {shown}{more}. Either one "
                "rank was given other values or draws by itself, or the gradient of one depends on what others do not "
                "have; go back to a checkpoint. watch=0 leaves the comparison out",
                wrong[0].name,
                wrong[0].ranks,
            )


def _groups(parameter: Any) -> list[dist.ProcessGroup]:
    """Return the groups of ranks that hold the same shard of a parameter, one for each such dimension of its mesh."""
    if not isinstance(parameter, DTensor):
        return []
    return [parameter.device_mesh.get_group(dim) for dim in replicated_dims(parameter)]


def _is_plain(tensor: torch.Tensor) -> bool:
    """True if a tensor has memory of bits to read: it is not on meta, sparse or of a class of its own (quantised)."""
    local = _torch.local(tensor)
    known = type(local) in (torch.Tensor, nn.Parameter, nn.Buffer)
    return known and not local.is_meta and local.layout is torch.strided


def _hash(tensor: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """Return a hash of the bits and their places, 0-dim int64 on ``device``, without waiting for it; 0 for None."""
    if tensor is None:
        return torch.zeros((), dtype=torch.int64, device=device)
    return agreement.checksum(tensor).to(device, non_blocking=True)


def _differences(common: _Common, hashes: torch.Tensor) -> list[_Difference]:
    """Return the tensors that differ in a group; its ranks exchange all hashes. Collective in the group."""
    ranks = dist.get_process_group_ranks(common.group)
    table = gather_parts(hashes, common.group)
    result = []
    for number in (table != table[0]).any(0).nonzero().flatten().tolist():
        item, column = common.items[number], table[:, number].tolist()
        usual = max(column, key=column.count)
        few = tuple(rank for rank, value in zip(ranks, column, strict=True) if value != usual)
        if 2 * len(few) >= len(ranks):  # no majority tells which are right
            few = tuple(ranks)
        distance = math.inf if 0 in column else _distance(item, common.group, hashes.device)
        result.append(_Difference(item.kind, item.name, common.axis, few, distance))
    return result


def _distance(item: _Item, group: dist.ProcessGroup, device: torch.device) -> float:
    """Return how far the ranks' values are apart. Collective in the group, unless shapes may differ (buffers)."""
    if item.tensor is None or item.kind not in ("parameter", "gradient") or not item.tensor.is_floating_point():
        return math.inf
    value = _torch.local(item.tensor.detach()).to(device)
    value = value.to(torch.float32 if value.itemsize < 8 else torch.float64)
    largest, smallest = value.clone(), value.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    dist.all_reduce(smallest, dist.ReduceOp.MIN, group=group)
    size = torch.maximum(largest.abs(), smallest.abs()).max()
    distance = float((largest - smallest).max() / size / torch.finfo(item.tensor.dtype).eps)
    return math.inf if math.isnan(distance) else distance


def watch(runtime: Runtime, every: int) -> None:
    """Watch a sharded model from now on; ``every``: steps between two comparisons."""
    runtime.watch = Watch(runtime, every)
    runtime.after_step.append(runtime.watch.stepped)
