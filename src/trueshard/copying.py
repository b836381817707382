"""``copy.deepcopy`` of a sharded model: a sharded copy (as ``AveragedModel`` makes for EMA), 1/N of the memory.

FSDP2 refuses. Here the modules are copied as they were before sharding, with meta tensors in the place of the sharded
parameters; the plan is applied to the copy; the shards are copied over.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trueshard import _torch, names
from trueshard._torch import ShardedModule
from trueshard.optim.watch import watch
from trueshard.runtime import Runtime
from trueshard.snapshot import Snapshot, Trace

Apply = Callable[..., Any]


def allow_deepcopy(runtime: Runtime, before: Snapshot, apply: Apply) -> None:
    """Make ``copy.deepcopy`` of the sharded model work, and say what to do where it cannot.

    Args:
        runtime: the model's; everything else has been installed on its modules.
        before: how the modules were before that.
        apply: ``sharding.apply``.
    """
    root: Any = runtime.root
    for module in root.modules():
        if isinstance(module, ShardedModule) and module is not root:
            module.__dict__["__deepcopy__"] = _refuse
    root.__dict__["__deepcopy__"] = lambda memo: _copy(runtime, memo, apply)
    runtime.trace = Trace(before)


def _refuse(memo: dict[int, Any]) -> Any:
    raise RuntimeError("one unit of a sharded model cannot be copied alone; copy the model that was given to shard()")


def _copy(runtime: Runtime, memo: dict[int, Any], apply: Apply) -> nn.Module:
    root: Any = runtime.root
    assert runtime.trace is not None
    runtime.free()
    sources = {name: t for kind in ("parameters", "buffers") for name, _, _, t in names.named_tensors(root, kind)}
    for tensor in sources.values():
        if isinstance(tensor, DTensor):
            shape = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            empty = nn.Parameter(shape, requires_grad=tensor.requires_grad)
            empty.__dict__.update(copy.deepcopy(tensor.__dict__, memo))
            memo[id(tensor)] = empty
    with runtime.trace.undone(root):
        new: nn.Module = copy.deepcopy(root, memo)
    apply(new, runtime.plan, runtime.mesh, sources=sources)
    # Whatever is copied along with the model (an optimizer) holds the copy's parameters.
    copies = {name: tensor for name, _, _, tensor in names.named_tensors(names.unwrap(new), "parameters")}
    watch(names.unwrap(new), {})
    memo.update((id(tensor), copies[name]) for name, tensor in sources.items() if name in copies)
    return new


@torch.no_grad()
def fill(root: nn.Module, sources: dict[str, torch.Tensor], device: torch.device) -> None:
    """Give a model on the meta device memory, and the values of ``sources``.

    Args:
        root: sharded on the meta device.
        sources: parameter and buffer names → tensors sharded alike.
        device: where the shards rest.
    """
    if all(t.is_meta for t in sources.values()):
        return
    root.to_empty(device=device)
    for kind in ("parameters", "buffers"):
        for name, _, _, tensor in names.named_tensors(root, kind):
            _torch.local(tensor).copy_(_torch.local(sources[name]))
