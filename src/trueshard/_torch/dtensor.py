"""DTensors without their dispatch: local shards, records of placement, and operators that DTensor gets wrong."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The local shard without ``to_local()``'s autograd node and view: versions and storages are the shard's own."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def shards_of(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """``local`` of each."""
    return [each._local_tensor if isinstance(each, DTensor) else each for each in parameters]


def dtensor_over(local: torch.Tensor, like: DTensor, shape: torch.Size, stride: tuple[int, ...]) -> DTensor:
    """``DTensor.from_local`` for a shard that may lie anywhere in its storage.

    Made from such a shard, the wrapper takes over its offset, and can then be neither copied nor pickled.
    """
    first = local.as_strided(local.shape, local.stride(), 0) if local.storage_offset() else local
    made = DTensor.from_local(first, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride)
    if first is not local:
        made._local_tensor = local
    return made


def shards_placed_alike(tensors: Sequence[Any]) -> list[torch.Tensor] | None:
    """The local shards of DTensors that are all on one mesh, with one placement, dtype and device; else None."""
    if set(map(type, tensors)) != {DTensor}:
        return None
    specs = [tensor._spec for tensor in tensors]
    shards = [tensor._local_tensor for tensor in tensors]
    mesh, placements = specs[0].mesh, specs[0].placements
    alike = (
        all(spec.mesh is mesh and spec.placements == placements for spec in specs)
        and len(set(map(operator.attrgetter("dtype"), shards))) == 1
        and len(set(map(torch.Tensor.get_device, shards))) == 1
    )
    return shards if alike else None


def specs_of(tensors: Iterable[Any]) -> list[Any]:
    """DTensor's own records of shape, mesh and placement; None for a plain tensor."""
    return [tensor._spec if type(tensor) is DTensor else None for tensor in tensors]


def is_placed_as(one: DTensor, two: DTensor) -> bool:
    """Whether both are cut alike. FSDP2 gives a gradient the very record of its parameter, so asking is cheap."""
    return one._spec is two._spec or one.placements == two.placements


def version(tensor: torch.Tensor) -> int:
    """A number that grows when ``tensor`` is written to in place, through it or through its local shard.

    torch documents the counter under its private name only. DTensor's dispatch counts on the wrapper alone.
    """
    return int(tensor._version) + (int(tensor._local_tensor._version) if isinstance(tensor, DTensor) else 0)


def find_every_inf() -> None:
    """Let a gradient scaler see the infs of every gradient in a list, on whichever ranks they are.

    torch's DTensor handler of the scaler's operator reduces what each rank found as the *first* gradient of the list is
    placed. With a replicated gradient at the head it reduces nothing, with two meshes over one of them, and ranks part:
    some skip the step. Handlers of DTensor's operators have no public place. For a list that is placed all alike this
    one computes the same.
    """
    operator = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers[operator] = _unscale


def _unscale(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    grads, found_inf, *rest = args
    operator([local(grad) for grad in grads], found_inf, *rest, **kwargs)
    placed = {(g.device_mesh, g.placements): None for g in grads if isinstance(g, DTensor)}
    over = {(m, d): m.size(d) for m, placements in placed for d, p in enumerate(placements) if not p.is_replicate()}
    # From few ranks to many: what is found among the few reaches all. Equally many: as in the list, on every rank.
    for mesh, dim in sorted(over, key=lambda each: over[each]):
        torch.distributed.all_reduce(found_inf, torch.distributed.ReduceOp.MAX, mesh.get_group(dim))


def average_mixed_lists() -> None:
    """Let torch's averaging functions (EMA, SWA) take lists in which plain tensors stand beside DTensors.

    ``AveragedModel(use_buffers=True)`` puts parameters and buffers into one list, which DTensor refuses. Its public
    switch for that, ``implicit_replication``, would have to be on around the user's own call. A list that is not mixed
    goes its usual way.
    """
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    aten = torch.ops.aten
    for each in (aten._foreach_lerp_.Scalar, aten._foreach_sub.List, aten._foreach_addcdiv_.Scalar):
        handlers.setdefault(each, _apart)


def _apart(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor] | None:
    """Run a list operator on the DTensors of its lists, and on the plain tensors, each by themselves."""
    first = args[0]
    kinds = [isinstance(tensor, DTensor) for tensor in first]
    found: dict[int, torch.Tensor] = {}
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    del handlers[operator]  # or calling it would come here again
    try:
        for kind in set(kinds):
            places = [i for i, each in enumerate(kinds) if each is kind]
            some = [[arg[i] for i in places] if isinstance(arg, (list, tuple)) else arg for arg in args]
            found.update(zip(places, operator(*some, **kwargs) or (), strict=False))
    finally:
        handlers[operator] = _apart
    return [found[i] for i in range(len(first))] if found else None
