"""What the user's code reads from sharded tensors, and assigns to them, as if they were whole.

A rank has a part of a sum or a norm, so all ranks must read it, at the same place. Before they exchange their parts
they meet in the store that they were started with, not in a collective: a collective would pair with whatever the
others do next, and give a wrong number or wait for ever.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from trueshard import _torch
from trueshard.distributed import all_reduce, is_simulated
from trueshard.optim.stepping import sharded_models
from trueshard.sharding.hooks import runtime_of
from trueshard.sharding.stall_watch import time_limit, user_line

_reads: weakref.WeakKeyDictionary[Any, Counter[tuple[int, ...]]] = weakref.WeakKeyDictionary()
"""Process group → ranks of a mesh → number of reads so far."""


@functools.cache
def open_tensors() -> None:
    """From now on, let sharded tensors of this process behave as whole ones where torch's do not."""
    _torch.find_every_inf()
    _torch.average_mixed_lists()
    _torch.compare_tensors()
    _torch.read_numbers_of_the_whole(agree_to_read)
    _torch.draw_as_one_device()
    _torch.assign_data_with(assign_data)
    _torch.take_plain_tensors(agree_to_read, _Whole.apply)
    _torch.differentiate_with(differentiate)
    _torch.check_functional_calls(check_functional_call)


def agree_to_read(value: DTensor) -> None:
    """Return when every rank of the mesh reads this number.

    Raises:
        RuntimeError: a rank reads another, or none until the process group's time limit.
    """
    mesh = value.device_mesh
    if is_simulated(mesh):
        return
    world, store = dist.group.WORLD, _torch.store()
    ranks, mine, site = tuple(mesh.mesh.flatten().tolist()), dist.get_rank(), user_line(sys._getframe())
    counts = _reads.setdefault(world, Counter())
    counts[ranks] += 1
    place = f"trueshard/read/{hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]}"
    keys = {rank: f"{place}/{counts[ranks]}/{rank}" for rank in ranks}
    store.set(keys[mine], f"{site}|{tuple(value.shape)}|{value.dtype}|{value.placements}")
    try:
        store.wait(list(keys.values()), time_limit(world))
    except RuntimeError:
        missing = [rank for rank in ranks if not store.check([keys[rank]])]
        raise RuntimeError(_words(site, f"ranks {missing} read none")) from None
    texts = dict(zip(ranks, store.multi_get(list(keys.values())), strict=True))
    for rank, text in texts.items():
        if text != texts[mine]:
            raise RuntimeError(_words(site, f"rank {rank} reads one at {text.decode().partition('|')[0]}"))
    # Whoever is here has left the read before it.
    store.delete_key(f"{place}/{counts[ranks] - 1}/{mine}")


class _Whole(torch.autograd.Function):
    """A number of a DTensor as a plain tensor; its gradient is averaged over ranks, as that of a loss is."""

    @staticmethod
    def forward(ctx: Any, value: DTensor) -> torch.Tensor:
        ctx.mesh = value.device_mesh
        return value.full_tensor().clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> DTensor:
        mean = all_reduce(grad.clone(), ctx.mesh) / ctx.mesh.size()
        return DTensor.from_local(mean, ctx.mesh, [Replicate()] * ctx.mesh.ndim, run_check=False)


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
    runtimes = [runtime for root in sharded_models() if (runtime := runtime_of(root)) is not None]
    pairs_of = {runtime: runtime.in_graph() for runtime in runtimes}
    pairs = [pair for each in pairs_of.values() for pair in each]
    sharded_of = {id(each): sharded for sharded, leaf in pairs for each in (sharded, leaf)}
    if not any(id(each) in sharded_of for each in inputs):
        return engine(inputs, allow_unused, accumulate)
    leaf_of = {id(sharded): leaf for sharded, leaf in pairs}
    inputs = [sharded_of.get(id(each), each) for each in inputs]  # between forward and backward, names give leaves
    if create_graph:
        raise RuntimeError(_cannot("have a graph (create_graph=True), since ranks average numbers"))
    asked = set(map(id, inputs))
    runtimes = [each for each in runtimes if any(id(sharded) in asked for sharded, _ in pairs_of[each])]
    if any(runtime.accumulating or runtime.has_unreduced() for runtime in runtimes):
        raise RuntimeError(_cannot("be told from what accumulate(model, last=False) has summed; call it outside"))
    if not all(each.is_leaf for each in inputs):
        raise RuntimeError(_cannot("be taken together with those of a tensor that is no leaf; use two calls"))
    targets = list(dict.fromkeys(own for each in inputs for own in (each, leaf_of.get(id(each), each))))
    if accumulate:
        return engine(targets, True, True)
    before = [each.grad for each in inputs]
    for each in inputs:
        each.grad = None
    try:
        engine(targets, True, True)
        found = [each.grad for each in inputs]
    finally:
        for each, grad in zip(inputs, before, strict=True):
            each.grad = grad
    unused = [i for i, grad in enumerate(found) if grad is None]
    if unused and not allow_unused:
        raise RuntimeError(f"inputs {unused} of autograd.grad() are not used in the graph; pass allow_unused=True")
    return tuple(found)


def _cannot(words: str) -> str:
    return f"the gradients of sharded parameters that autograd.grad() or backward(inputs=...) gives cannot {words}"


def check_functional_call(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise RuntimeError if ``functional_call`` gives a sharded parameter another value, which FSDP2 would not see."""
    placed: dict[Any, tuple[Any, Any]] = {}
    for root in sharded_models():
        for _, sharded, gathered, places in _torch.sharded_places(root):
            placed |= dict.fromkeys(places, (sharded, gathered))
        if (runtime := runtime_of(root)) is not None:
            for whole in runtime.replicated:
                placed |= dict.fromkeys(whole.places, (whole.parameter, whole.leaf))
    for name, tensor in tensors.items() if placed else ():
        path, _, attribute = name.rpartition(".")
        known = placed.get((module.get_submodule(path), attribute))
        if known is not None and all(tensor is not each for each in known):
            raise RuntimeError(
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
    given, own = ((tuple(each.shape), each.dtype) for each in (value, tensor))
    if given != own:
        raise RuntimeError(
            f"p.data = w: w has shape {given[0]} and {given[1]}, the whole parameter {own[0]} and {own[1]}. Assign "
            "a tensor of the parameter's own shape and dtype, or convert the model before shard()"
        )
    mesh, placements = tensor.device_mesh, tensor.placements
    if isinstance(value, DTensor):
        part = value.redistribute(mesh, placements)
    else:
        part = distribute_tensor(value.to(_torch.local(tensor).device), mesh, placements, src_data_rank=None)
    _torch.local(tensor).copy_(_torch.local(part))


def _words(site: str, others: str) -> str:
    return (
        f"at {site} this rank reads a number of a sharded tensor, of which each rank has a part, and {others}: call "
        "full_tensor() on every rank, outside `if rank == 0`, and read the number of what it returns"
    )
