"""Reading of sharded tensors by the user's code, and assignments to them, as if they were whole.

A rank has a part of a sum or a norm, so all ranks must read it, at the same place. Before they exchange their parts
they meet in the store that they were started with, not in a collective: a collective would pair with whatever the
others do next, and give a wrong number or wait for ever.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from trueshard import _torch
from trueshard.distributed import all_reduce
from trueshard.errors import TrueShardRuntimeError
from trueshard.model import names, registry
from trueshard.sharding.hooks import Runtime
from trueshard.sharding.meeting import meet, meet_to_gather
from trueshard.sharding.stall_watch import user_line


def agree_to_read(value: DTensor) -> None:
    """Return when every rank of the mesh reads this number.

    Raises:
        RuntimeError: a rank reads another, or none until the process group's time limit.
    """
    mesh, site = value.device_mesh, user_line(sys._getframe()) or "?"
    text = f"a number at {site}, of {tuple(value.shape)}, {value.dtype}, {value.placements}"
    start = f"at {site} this rank reads a number of a sharded tensor, of which each rank has a part, and "
    end = "call full_tensor() on every rank, outside `if rank == 0`, and read the number of what it returns"
    meet(text, mesh, range(mesh.ndim), lambda problem: f"{start}{problem}: {end}")


def agree_to_gather(value: DTensor) -> None:
    """Return when every rank that holds another part of a tensor calls ``full_tensor()`` of one like it."""
    dims = [dim for dim, placement in enumerate(value.placements) if not placement.is_replicate()]
    meet_to_gather(f"full_tensor() of {tuple(value.shape)}", value.device_mesh, dims)


class WholeNumber(torch.autograd.Function):
    """A number of a DTensor as a plain tensor; its gradient is averaged over ranks, as that of a loss is."""

    @staticmethod
    def forward(ctx: Any, value: DTensor) -> torch.Tensor:
        ctx.mesh = value.device_mesh
        return value.full_tensor().clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> DTensor:
        mean = all_reduce(grad.clone(), ctx.mesh) / ctx.mesh.size()
        return _torch.dtensor_from(mean, ctx.mesh, [Replicate()] * ctx.mesh.ndim)


def differentiate(
    engine: Callable[[Sequence[torch.Tensor], bool, bool], Any],
    inputs: Sequence[torch.Tensor],
    create_graph: bool,
    allow_unused: bool,
    accumulate: bool,
) -> Any:
    """Do ``torch.autograd.grad`` or ``backward(inputs=)`` for sharded parameters among ``inputs``.

    The graph holds gathered parameters; their gradients reach the shards, reduced, at the end of a backward that adds
    to ``.grad``. So ``grad`` is such a backward for these inputs alone, with ``.grad`` set aside.

    Raises:
        RuntimeError: with a graph of the gradients, under ``accumulate(last=False)``, beside a tensor that is no leaf,
            or for an input that is not used, as torch does.
    """
    pairs_of: dict[Runtime, Any] = {runtime: runtime.in_graph() for runtime in registry.models()}
    pairs = [pair for of_model in pairs_of.values() for pair in of_model]
    sharded_of = {id(tensor): sharded for sharded, leaf in pairs for tensor in (sharded, leaf)}
    if not any(id(tensor) in sharded_of for tensor in inputs):
        return engine(inputs, allow_unused, accumulate)
    leaf_of = {id(sharded): leaf for sharded, leaf in pairs}
    inputs = [sharded_of.get(id(tensor), tensor) for tensor in inputs]  # from forward to backward, names give leaves
    if create_graph:
        raise TrueShardRuntimeError(_cannot("have a graph (create_graph=True), since ranks average numbers"))
    requested = set(map(id, inputs))
    runtimes = [runtime for runtime, pairs in pairs_of.items() if any(id(sharded) in requested for sharded, _ in pairs)]
    if any(runtime.accumulating or runtime.has_unreduced() for runtime in runtimes):
        raise TrueShardRuntimeError(
            _cannot("be told from what accumulate(model, last=False) has summed; call it outside")
        )
    if not all(tensor.is_leaf for tensor in inputs):
        raise TrueShardRuntimeError(_cannot("be taken together with those of a tensor that is no leaf; use two calls"))
    targets = list(dict.fromkeys(target for tensor in inputs for target in (tensor, leaf_of.get(id(tensor), tensor))))
    if accumulate:
        return engine(targets, True, True)
    before = [tensor.grad for tensor in inputs]
    for tensor in inputs:
        tensor.grad = None
    try:
        engine(targets, True, True)
        grads = [tensor.grad for tensor in inputs]
    finally:
        for tensor, grad in zip(inputs, before, strict=True):
            tensor.grad = grad
    unused = [i for i, grad in enumerate(grads) if grad is None]
    if unused and not allow_unused:
        raise TrueShardRuntimeError(
            f"inputs {unused} of autograd.grad() are not used in the graph; pass allow_unused=True"
        )
    return tuple(grads)


def _cannot(words: str) -> str:
    return f"the gradients of sharded parameters that autograd.grad() or backward(inputs=...) gives cannot {words}"


def check_functional_call(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise RuntimeError if ``functional_call`` gives a sharded parameter another value, which FSDP2 would not see."""
    placed: dict[Any, tuple[Any, Any]] = {}
    for runtime in registry.models():
        for _, sharded, gathered, places in _torch.sharded_places(runtime.root):
            placed |= dict.fromkeys(places, (sharded, gathered))
        for whole in runtime.replicated:
            placed |= dict.fromkeys(whole.places, (whole.parameter, whole.leaf))
    for name, tensor in tensors.items() if placed else ():
        path, _, attribute = name.rpartition(".")
        present = placed.get((module.get_submodule(path), attribute))
        if present is not None and all(tensor is not other for other in present):
            raise TrueShardRuntimeError(
                f"functional_call() gives {name!r} another value, and FSDP2 would compute with the one that it "
                "sharded: write the value into the parameter for the call, or call the model before shard()"
            )


@torch.no_grad()
def assign_data(tensor: DTensor, value: torch.Tensor) -> None:
    """Do ``tensor.data = value``: write the values of a DTensor, or of a whole plain tensor, into the shards.

    FSDP2 gathers from memory of its own, so the values are copied. Collective for a DTensor that is placed otherwise.

    Raises:
        RuntimeError: ``value`` has another shape or dtype.
    """
    new, old = ((tuple(it.shape), it.dtype) for it in (value, tensor))
    if new != old:
        raise TrueShardRuntimeError(
            f"p.data = w: w has shape {new[0]} and {new[1]}, the whole parameter {old[0]} and {old[1]}. Assign "
            "a tensor of the parameter's own shape and dtype, or convert the model before shard()"
        )
    mesh, placements = tensor.device_mesh, tensor.placements
    part = value.redistribute(mesh, placements) if isinstance(value, DTensor) else _torch.cut_like(value, tensor)
    _torch.local(tensor).copy_(_torch.local(part))


def explain_mixed(value: DTensor) -> str:
    """Return why a layer is given a sharded weight: its parameter is read where its unit is not gathered."""
    storage = _torch.storage_identity(_torch.local(value))
    for runtime in registry.models():
        modules = dict(names.named_modules(runtime.root))
        for name, module, _, tensor in names.named_tensors(runtime.root, "parameters"):
            if isinstance(tensor, DTensor) and _torch.storage_identity(_torch.local(tensor)) == storage:
                owner = next(known for known, other in modules.items() if other is module)
                return (
                    f"{name!r} is sharded, and its unit is not gathered here. In a pass, make the module that holds it "
                    f"a unit, too, which is gathered wherever it is read: units=[..., {owner!r}], where ... is the "
                    "automatic choice (or beside what you named); outside of a pass, call full_tensor() on every rank"
                )
    return "a sharded tensor meets a plain one: call full_tensor() on it, on every rank"
