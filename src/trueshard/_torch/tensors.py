"""Tensors: shared memory and nested containers; DTensors without their dispatch."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils import _pytree

from trueshard._torch.capabilities import missing_for_speed

#: What torch itself keeps in a parameter's ``__dict__``: ``nn.Parameter``'s mark, and ``fully_shard``'s (2.13 on).
PARAMETER_ATTRIBUTES = frozenset({"_is_param", "_fsdp_orig_uid"})

HAS_SPECS = "DTensor._spec" not in missing_for_speed()

#: What knows every registered container of tensors has no public name.
leaves_of = _pytree.tree_leaves
map_only = _pytree.tree_map_only


def _mul_each(tensors: Sequence[torch.Tensor], factor: Any) -> None:
    for tensor in tensors:
        tensor.mul_(factor)


def _norm_each(tensors: Sequence[torch.Tensor], order: float, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    return [torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in tensors]


#: The operators over lists of tensors, of which torch's own optimizers and clipping are made, have no public name.
foreach_mul_: Any = getattr(torch, "_foreach_mul_", None) or _mul_each
foreach_norm: Any = getattr(torch, "_foreach_norm", None) or _norm_each


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return every tensor in nested containers, the ones registered with ``torch.utils._pytree`` too."""
    return [leaf for leaf in leaves_of(value) if isinstance(leaf, torch.Tensor)]


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Return ``value`` with ``function`` called on each leaf of nested lists, tuples and mappings; their types stay."""
    if isinstance(value, Mapping):
        made = {key: mapped(function, item) for key, item in value.items()}
        return made if type(value) is dict else type(value)(made)  # type: ignore[call-arg]
    if isinstance(value, (list, tuple)):
        items = [mapped(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return function(value)


def to_device(value: Any, device: torch.device | str) -> Any:
    """Return ``value`` with its tensors on a device, as ``mapped`` does it."""
    ahead = torch.device(device).type != "cpu"  # a copy to the host has to be waited for
    return mapped(lambda leaf: leaf.to(device, non_blocking=ahead) if isinstance(leaf, torch.Tensor) else leaf, value)


def call_with_gradient(tensor: torch.Tensor, function: Callable[[torch.Tensor | None], Any]) -> None:
    """Call ``function(gradient)`` when backward comes to ``tensor``; what it returns, if not None, is the gradient.

    A view that is written to in place (``y += x``) loses its hooks, since torch computes it anew from its base. Then
    the base's place in the graph calls ``function(None)``.
    """
    called = False

    def hook(gradient: torch.Tensor) -> Any:
        nonlocal called
        called = True
        return function(gradient)

    def before_base(_: Any) -> None:
        if not called:
            function(None)

    tensor.register_hook(hook)
    base = tensor._base
    if base is not None and base.grad_fn is not None:
        base.grad_fn.register_prehook(before_base)


def storage_identity(tensor: torch.Tensor) -> int:
    """Return a number that two tensors share exactly if they share memory; every meta tensor's address is 0."""
    return storage_number(tensor.untyped_storage())


def storage_number(storage: Any) -> int:
    """Return the identity of a storage while it lives."""
    return int(storage._cdata)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local shard, without ``to_local()``'s autograd node and view: version and storage are its own."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def shards_of(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return ``local`` of each."""
    return [p._local_tensor if isinstance(p, DTensor) else p for p in parameters]


def own_storage(part: torch.Tensor) -> torch.Tensor:
    """Return ``part`` over the same memory, but a storage of its own that begins and ends where it does.

    A DTensor takes over the offset of its shard in a storage, and can then be neither copied nor pickled nor traced;
    FSDP2 makes such gradients. ``flat_memory`` finds neighbours in memory again.
    """
    storage_of_all: Any = part.untyped_storage()
    if type(part) is not torch.Tensor or part.is_meta or storage_of_all.nbytes() == part.nbytes:
        return part
    return _in_own_storage(part, part.shape, part.stride())


def _in_own_storage(part: torch.Tensor, shape: Any, stride: Any) -> torch.Tensor:
    start = part.storage_offset() * part.itemsize
    storage: Any = part.untyped_storage()[start : start + part.nbytes]
    storage.part_of = part  # on the storage: what a tensor has of its own is copied and pickled with it
    return part.data.set_(storage, 0, shape, stride)  # ``.data``: the quickest new tensor of this dtype and device


def shards_over(flat: torch.Tensor, like: Sequence[DTensor]) -> list[DTensor]:
    """Return the parts of the 1-D ``flat``, which follow one another in it, as DTensors like those of ``like``.

    By ``DTensor.__new__``, with the very records of ``like``: FSDP2 makes gradients so, and of thousands of small
    parameters ``DTensor.from_local`` (a node of autograd, a new record) would take most of an optimizer's first step.
    """
    locals_of = [tensor._local_tensor for tensor in like]
    parts = zip(flat.split(list(map(torch.Tensor.numel, locals_of))), locals_of, like, strict=True)
    is_known = HAS_SPECS and type(flat) in (torch.Tensor, FakeTensor)
    if not is_known or flat.dtype != locals_of[0].dtype or flat.is_meta:
        return [dtensor_over(part.view(local.shape), p, p.shape, p.stride()) for part, local, p in parts]
    if type(flat) is torch.Tensor:
        shards = ((_in_own_storage(part, local.shape, local.stride()), p) for part, local, p in parts)
    else:  # fake: a storage of its own would be taken for memory
        shards = ((part.view(local.shape), p) for part, local, p in parts)
    return [DTensor.__new__(DTensor, shard, p._spec, requires_grad=False) for shard, p in shards]


def flat_memory(first: torch.Tensor, count: int) -> torch.Tensor:
    """Return a 1-D view of ``count`` elements from where ``first`` begins, which may lie in an ``own_storage``.

    Raises:
        RuntimeError: the memory ends before.
    """
    memory: torch.Tensor = getattr(first.untyped_storage(), "part_of", first)
    return memory.as_strided((count,), (1,))


def memory_identity(tensor: torch.Tensor) -> int:
    """Return ``storage_identity`` of what ``tensor`` is a part of."""
    return storage_identity(getattr(tensor.untyped_storage(), "part_of", tensor))


def dtensor_over(local: torch.Tensor, like: DTensor, shape: torch.Size, stride: tuple[int, ...]) -> DTensor:
    """Do ``DTensor.from_local`` for a shard that may lie anywhere in its storage."""
    return dtensor_from(own_storage(local), like.device_mesh, like.placements, shape, stride)


def dtensor_from(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: torch.Size | None = None,
    stride: tuple[int, ...] | None = None,
) -> DTensor:
    """Do ``DTensor.from_local`` where the tensor lies; that one moves it to the mesh's device, also an offloaded one.

    ``shape`` and ``stride``: of the whole; None: as the placements say, if ranks have as much each.
    """
    if local.device.type == mesh.device_type or local.is_meta or local.requires_grad:
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
    like = DTensor.from_local(local.to("meta"), mesh, placements, run_check=False, shape=shape, stride=stride)
    return DTensor.__new__(DTensor, local.detach(), like._spec, requires_grad=False)  # FSDP2 makes its own so


def split_factor(placement: Any) -> int:
    """Return into how many halves a placement cuts a dimension before it cuts each of them: 1 for ``Shard``.

    That is ``_StridedShard``, of FSDP2 over what is cut already, and of packed weights; it has no public name.
    """
    return int(getattr(placement, "split_factor", 1))


def packed(dim: int, halves: int) -> Any:
    """Return the placement that gives each rank a part of each of ``halves`` of a dimension."""
    return _StridedShard(dim, split_factor=halves)


def shards_placed_alike(tensors: Sequence[Any]) -> list[torch.Tensor] | None:
    """Return the local shards if all are DTensors of one mesh, placement, dtype and device; else None."""
    if set(map(type, tensors)) != {DTensor} or not HAS_SPECS:
        return None
    specs = [tensor._spec for tensor in tensors]
    shards = [tensor._local_tensor for tensor in tensors]
    mesh, placements = specs[0].mesh, specs[0].placements
    same = (
        all(spec.mesh is mesh and spec.placements == placements for spec in specs)
        and len(set(map(operator.attrgetter("dtype"), shards))) == 1
        and len(set(map(torch.Tensor.get_device, shards))) == 1
    )
    return shards if same else None


def specs_of(tensors: Iterable[Any]) -> list[Any]:
    """Return DTensor's own records of shape, mesh and placement (or objects of which none are equal); None if plain."""
    if not HAS_SPECS:
        return [tensor if type(tensor) is DTensor else None for tensor in tensors]
    return [tensor._spec if type(tensor) is DTensor else None for tensor in tensors]


def is_placed_as(one: DTensor, two: DTensor) -> bool:
    """True if both are placed alike. FSDP2 gives a gradient the very record of its parameter, so this is cheap."""
    return (HAS_SPECS and one._spec is two._spec) or one.placements == two.placements


def version(tensor: torch.Tensor) -> int:
    """Return a number that grows when ``tensor`` is written to in place, through it or through its local shard.

    torch documents the counter under its private name only. DTensor's dispatch counts on the wrapper alone.
    """
    return int(tensor._version) + (int(tensor._local_tensor._version) if isinstance(tensor, DTensor) else 0)
