"""Copy a sharded model: ``copy.deepcopy``, which FSDP2 refuses, gives a sharded copy, 1/N of the memory a rank.

``AveragedModel`` makes one for EMA. Modules are copied as they were before sharding, on the meta device, the plan is
applied to the copy, and the shards are copied over. ``gathered`` copies modules in the same way, with whole memory.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from trueshard import _torch
from trueshard.errors import TrueShardRuntimeError
from trueshard.model import names
from trueshard.model.snapshot import ModuleState, Trace
from trueshard.sharding.hooks import Runtime
from trueshard.sharding.replicated import release_whole

Apply = Callable[..., Any]
"""``apply.apply``, which calls this file."""


def allow_deepcopy(runtime: Runtime, before: Sequence[ModuleState], apply: Apply, *, was_cut: bool) -> None:
    """Make ``copy.deepcopy`` of the sharded model work; of one unit alone it is refused.

    ``was_cut``: by the user, before ``shard()``: so is the whole model.
    """
    root: Any = runtime.root
    for module in _torch.fsdp_modules(root):
        module.__dict__["__deepcopy__"] = _refuse
    # The root's is among the changes that a copy undoes.
    runtime.changes = Trace(before)
    root.__dict__["__deepcopy__"] = _refuse_cut if was_cut else functools.partial(_copy, runtime, apply)


def _refuse(memo: dict[int, Any]) -> Any:
    raise TrueShardRuntimeError(
        "one unit of a sharded model cannot be copied alone; copy the model that was given to shard()"
    )


def _refuse_cut(memo: dict[int, Any]) -> Any:
    raise TrueShardRuntimeError("a model that was cut before shard() cannot be copied: let shard(tensor=...) cut it")


def _copy(runtime: Runtime, apply: Apply, memo: dict[int, Any]) -> nn.Module:
    root: Any = runtime.root
    runtime.memory.free()
    sources = {name: t for kind in ("parameters", "buffers") for name, _, _, t in names.named_tensors(root, kind)}
    new: nn.Module = copy_modules(runtime, root, on_meta, memo)
    apply(new, runtime.plan, runtime.axes, sources=sources)
    # Whatever is copied along with the model (an optimizer) holds the copy's parameters.
    copies = {name: tensor for name, _, _, tensor in names.named_tensors(names.unwrap(new), "parameters")}
    memo.update((id(tensor), copies[name]) for name, tensor in sources.items() if name in copies)
    return new


def on_meta(parameter: torch.Tensor) -> nn.Parameter:
    """Return a parameter without memory, whole, that is like a sharded one."""
    shape = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    return nn.Parameter(shape, requires_grad=parameter.requires_grad)


def copy_modules(
    runtime: Runtime, modules: Any, made: Callable[[torch.Tensor], nn.Parameter], memo: dict[int, Any]
) -> Any:
    """Return a deep copy of ``modules``, the root or a list of modules below, as they were before sharding.

    ``made``: sharded parameter → the whole one that stands for it in the copy. ``memo``: that of ``copy.deepcopy``.

    Raises:
        RuntimeError: a module cannot be copied; the message names it.
    """
    root = runtime.root
    pairs = [(sharded, gathered) for _, sharded, gathered, _ in _torch.sharded_places(root)]
    pairs += [(whole.parameter, None) for whole in runtime.replicated]
    for sharded, gathered in pairs:
        new = made(sharded)
        new.__dict__.update(copy.deepcopy(sharded.__dict__, memo))
        memo[id(sharded)] = new
        if gathered is not None:
            memo[id(gathered)] = new
    memo.update((id(whole), "left out") for whole in runtime.replicated)
    assert runtime.changes is not None
    parameters = dict(memo)
    with runtime.changes.undone(root):
        try:
            copied = copy.deepcopy(modules, memo)
        except Exception as error:
            name = _uncopied(root, parameters)
            raise TrueShardRuntimeError(f"the module {name!r} cannot be copied by copy.deepcopy: {error}") from error
    for top in copied if isinstance(copied, list) else [copied]:
        for module in top.modules():
            release_whole(module)
    return copied


def _uncopied(root: nn.Module, memo: dict[int, Any]) -> str:
    """Return the name of the first module that cannot be copied, without those below it."""
    modules = dict(names.named_modules(root))
    for name, module in modules.items():
        others = {id(other): other for other in modules.values() if other is not module}
        try:
            copy.deepcopy(module, memo | others)
        except Exception:
            return name or type(module).__name__
    return type(root).__name__
