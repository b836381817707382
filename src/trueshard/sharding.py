"""Applies a Plan to a model. The only file that calls ``fully_shard``.

The order matters: activation checkpointing, then compile, then sharding, each in place, the innermost unit first.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from trueshard import _torch, activation, names
from trueshard._torch import ShardedModule
from trueshard.beside import GatheredOnAccess
from trueshard.carrying import Carrying, Original, originals_of
from trueshard.copying import allow_deepcopy, fill
from trueshard.distributed import device_of
from trueshard.plans import MixedPrecision, Plan, Unit
from trueshard.replicated import HoldsWhole
from trueshard.snapshot import Snapshot

SMALL = 64 << 10
"""Bytes of a shard up to which an optimizer's step costs the host more than the arithmetic: these are stepped together,
over all units."""


def apply(
    model: nn.Module,
    plan: Plan,
    mesh: DeviceMesh,
    *,
    hooked: Collection[str] = (),
    sources: dict[str, torch.Tensor] | None = None,
) -> dict[int, nn.Parameter]:
    """Shard ``model`` in place by a plan that has its units.

    Args:
        model: the user's module, or a wrapper of it.
        plan: with ``units``; its names must be this model's.
        mesh: 1-D (shard) or 2-D (replicate, shard).
        hooked: parameters on which some rank has a gradient hook.
        sources: for a model on the meta device, shards of the same plan to take the values from, by name.

    Returns:
        ``id`` of each original parameter → the parameter that took its place.
    """
    before = Snapshot(model)
    names.hide_wrappers(model)
    root = names.unwrap(model)
    modules = dict(names.named_modules(root))
    originals = originals_of(root)
    replicated = {each.name for each in plan.replicated}
    whole = {original.parameter for original in originals if original.name in replicated}
    _prepare_tensors(originals, whole, device_of(mesh))
    for unit in plan.units:
        _prepare_modules(unit, [modules[name] for name in unit.modules], plan.compile)
    for unit in sorted(plan.units, key=lambda unit: -_depth(unit)):
        _shard_unit(unit, modules, plan, mesh, whole)
    _torch.join_shards(root, SMALL)
    if sources is not None:
        fill(root, sources, torch.device("cpu") if plan.offload == "cpu" else device_of(mesh))
    carrying = Carrying(root, plan, mesh, modules, originals, hooked)
    carrying.carry()
    allow_deepcopy(carrying.runtime, before, apply)
    return carrying.new_of


def _prepare_tensors(originals: list[Original], whole: set[nn.Parameter], device: torch.device) -> None:
    for original in originals:
        parameter = original.parameter
        if not isinstance(parameter, DTensor) and not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
        if parameter in whole:
            if not parameter.is_meta:
                parameter.data = parameter.data.to(device)
            for module, _ in original.places:
                _mix_in(module, HoldsWhole)


def _mix_in(module: nn.Module, mixin: type) -> None:
    if not isinstance(module, mixin):
        cls: Any = type(module)
        object.__setattr__(module, "__class__", _mixed(cls, mixin))


@functools.cache
def _mixed(cls: type, mixin: type) -> type:
    return type(cls.__name__, (mixin, cls), {})


def _prepare_modules(unit: Unit, modules: list[nn.Module], compile_blocks: bool) -> None:
    for module in modules:
        if unit.activation_checkpointing != "none":
            activation.recompute(module, unit.activation_checkpointing)
        if compile_blocks and unit.kind == "block" and not _torch.is_compiled_in_place(module):
            module.compile()
        if unit.kind != "root" and module._parameters and not _torch.is_compiled_in_place(module):
            _mix_in(module, GatheredOnAccess)


def _depth(unit: Unit) -> int:
    return max(name.count(".") + 1 if name else 0 for name in unit.modules)


def _shard_unit(
    unit: Unit, modules: Mapping[str, nn.Module], plan: Plan, mesh: DeviceMesh, whole: set[nn.Parameter]
) -> None:
    members = [modules[name] for name in unit.modules]
    policy = unit.reshard_after_forward
    # An integer is set after all units are made: fully_shard would make process groups for each unit.
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": policy if isinstance(policy, bool) else True}
    options["mp_policy"] = precision_policy(plan.mixed_precision)
    options["offload_policy"] = CPUOffloadPolicy() if plan.offload == "cpu" else OffloadPolicy()
    if mesh.device_type == "cpu" and plan.offload == "cpu":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if whole:
        options["ignored_params"] = whole
    fully_shard(members[0] if len(members) == 1 else members, **options)
    if not unit.unshard_in_backward:
        assert isinstance(members[0], ShardedModule)
        members[0].set_unshard_in_backward(False)


def precision_policy(mixed: MixedPrecision | None) -> MixedPrecisionPolicy:
    """torch's policy object for a plan's choice."""
    if mixed is None:
        return MixedPrecisionPolicy()
    dtype = {None: None} | {name: getattr(torch, name) for name in (mixed.compute, mixed.reduce, mixed.output) if name}
    return MixedPrecisionPolicy(
        param_dtype=dtype[mixed.compute],
        reduce_dtype=dtype[mixed.reduce],
        output_dtype=dtype[mixed.output],
        cast_forward_inputs=mixed.cast_inputs,
    )


def splits_statistics(root: nn.Module) -> str | None:
    """A warning if batch normalisation would see one rank's part of the batch only."""
    found = [
        name
        for name, module in names.named_modules(root)
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        and not isinstance(module, nn.SyncBatchNorm)
        and module.training
    ]
    if not found:
        return None
    return (
        f"{found[0]!r} (and {len(found) - 1} more) normalises by the statistics of each rank's part of the batch, "
        "which is not what one device computes; use nn.SyncBatchNorm.convert_sync_batchnorm(model) before shard()"
    )
