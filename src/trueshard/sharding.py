"""Applies a Plan to a model. The only file that calls ``fully_shard``.

The order matters: activation checkpointing, then compile, then sharding, each in place, the innermost unit first.
What the user set on parameters (attributes, hooks, gradients) is carried to the shards.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from trueshard.copying import allow_deepcopy, fill
from trueshard.distributed import device_of
from trueshard.gradients import GradientHooks, ReplicatedGradients
from trueshard.intent import attributes_of
from trueshard.methods import methods_that_compute
from trueshard.optim.rebind import shard_like
from trueshard.plans import MixedPrecision, Plan, Unit
from trueshard.runtime import CarryOnce, GatheredOnAccess, Runtime, after_gathering
from trueshard.snapshot import Snapshot


def apply(
    model: nn.Module, plan: Plan, mesh: DeviceMesh, *, sources: dict[str, torch.Tensor] | None = None
) -> dict[int, nn.Parameter]:
    """Shard ``model`` in place by a plan that has its units.

    Args:
        model: the user's module, or a wrapper of it.
        plan: with ``units``; its names must be this model's.
        mesh: 1-D (shard) or 2-D (replicate, shard).
        sources: for a model on the meta device, shards of the same plan to take the values from, by name.

    Returns:
        ``id`` of each original parameter → the parameter that took its place.
    """
    before = Snapshot(model)
    names.hide_wrappers(model)
    root = names.unwrap(model)
    modules = dict(names.named_modules(root))
    places = _places(root)
    replicated = {each.name for each in plan.replicated}
    whole = {parameter for name, _, _, parameter in places if name in replicated}
    _prepare_tensors(places, whole, device_of(mesh))
    for unit in plan.units:
        _prepare_modules(unit, [modules[name] for name in unit.modules], plan.compile)
    for unit in sorted(plan.units, key=lambda unit: -_depth(unit)):
        _shard_unit(unit, modules, plan, mesh, whole)
    if sources is not None:
        fill(root, sources, torch.device("cpu") if plan.offload == "cpu" else device_of(mesh))
    return _Carrying(root, plan, mesh, modules, places, whole).carry(before)


_Place = tuple[str, nn.Module, str, nn.Parameter]


def _places(root: nn.Module) -> list[_Place]:
    """Each parameter once, at its first place: (name, module, attribute, parameter)."""
    seen: set[int] = set()
    found: list[_Place] = []
    for name, module, attribute, tensor in names.named_tensors(root, "parameters"):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            assert isinstance(tensor, nn.Parameter)
            found.append((name, module, attribute, tensor))
    return found


def _prepare_tensors(places: list[_Place], whole: set[nn.Parameter], device: torch.device) -> None:
    for _, _, _, parameter in places:
        if not isinstance(parameter, DTensor) and not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
        if parameter in whole and not parameter.is_meta:
            parameter.data = parameter.data.to(device)


def _prepare_modules(unit: Unit, modules: list[nn.Module], compile_blocks: bool) -> None:
    for module in modules:
        if unit.activation_checkpointing != "none":
            activation.recompute(module, unit.activation_checkpointing)
        if compile_blocks and unit.kind == "block" and not _torch.is_compiled_in_place(module):
            module.compile()
        if unit.kind == "embedding":
            cls = type(module)
            object.__setattr__(module, "__class__", type(cls.__name__, (GatheredOnAccess, cls), {}))


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


class _Carrying:
    """What comes after ``fully_shard``: the user's attributes, hooks and gradients, and the model's runtime."""

    def __init__(
        self,
        root: nn.Module,
        plan: Plan,
        mesh: DeviceMesh,
        modules: Mapping[str, nn.Module],
        places: list[_Place],
        whole: set[nn.Parameter],
    ) -> None:
        assert isinstance(root, ShardedModule)
        self.root, self.plan, self.modules, self.places, self.whole = root, plan, modules, places, whole
        self.hooks = {name: GradientHooks(p) for name, _, _, p in places if GradientHooks.on(p)}
        alone = [(name, p, self._take_hooks(name, p)) for name, _, _, p in places if p in whole]
        self.runtime = Runtime(root, plan, mesh, ReplicatedGradients(alone, mesh))

    def _take_hooks(self, name: str, parameter: nn.Parameter) -> GradientHooks | None:
        """A replicated parameter keeps its object, so autograd would call its hooks before the reduction."""
        hooks = self.hooks.get(name)
        if hooks is not None:
            parameter._backward_hooks = None
            if hooks.after:
                parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]
            if parameter.requires_grad:
                parameter.register_hook(lambda _: hooks.set_aside(parameter))
        return hooks

    def carry(self, before: Snapshot) -> dict[int, nn.Parameter]:
        runtime, root = self.runtime, self.root
        member = {name: unit for unit in self.plan.units for name in unit.modules}
        new_of: dict[int, nn.Parameter] = {}
        by_unit: dict[str, list[nn.Parameter]] = {unit.name: [] for unit in self.plan.units}
        first_name = {id(module): name for name, module in self.modules.items()}
        for name, module, attribute, original in self.places:
            new = module._parameters[attribute]
            assert new is not None
            new_of[id(original)] = new
            if original in self.whole:
                continue
            owner = first_name[id(module)]
            while owner not in member:
                owner = owner.rpartition(".")[0]
            by_unit[member[owner].name].append(new)
            self._carry_parameter(name, module, attribute, original, new, self._module(member[owner]))
        for unit in self.plan.units:
            runtime.units.append((self._module(unit), by_unit[unit.name]))
            if not isinstance(unit.reshard_after_forward, bool):
                for unit_module in {self._module(unit)}:
                    _torch.set_reshard_after_forward(unit_module, unit.reshard_after_forward, runtime.meshes)
        self._gather_beside_forward()
        if not any(p.is_meta for p in new_of.values()):
            _torch.initialise(root)
        runtime.install()
        allow_deepcopy(runtime, before, apply)
        return new_of

    def _module(self, unit: Unit) -> ShardedModule:
        module = self.modules[unit.modules[0]]
        assert isinstance(module, ShardedModule)
        return module

    def _carry_parameter(
        self,
        name: str,
        module: nn.Module,
        attribute: str,
        original: nn.Parameter,
        new: nn.Parameter,
        unit: ShardedModule,
    ) -> None:
        found = attributes_of(original)
        new.__dict__.update(found)
        hooks = self.hooks.get(name)
        if original.grad is not None and isinstance(new, DTensor):
            new.grad = shard_like(original.grad, new)
        if hooks is not None:
            trainable = new.requires_grad
            # torch registers such hooks on trainable tensors only; a frozen one may be thawed later.
            new.requires_grad_(True).register_post_accumulate_grad_hook(hooks)
            new.requires_grad_(trainable)
            if unit not in self.runtime.hooked:
                self.runtime.hooked.append(unit)
        if found or hooks is not None:
            for unit_name in self.plan_unit(unit).modules:
                CarryOnce(module, attribute, found, hooks).install(self.modules[unit_name])

    def plan_unit(self, module: ShardedModule) -> Unit:
        """The plan's unit whose first module is ``module``."""
        return next(unit for unit in self.plan.units if self.modules[unit.modules[0]] is module)

    def _gather_beside_forward(self) -> None:
        runtime = self.runtime
        runtime.gather_in_submodules()
        compiled_root = _torch.is_compiled_in_place(self.root)
        for unit in self.plan.units:
            module = self._module(unit)
            if unit.kind in ("root", "block") and len(unit.modules) == 1 and not compiled_root:
                runtime.gather_in_methods(module, methods_that_compute(self.modules[unit.name]))
            if unit.kind == "root" and callable(getattr(module, "generate", None)):
                runtime.keep_gathered_in("generate")
            if unit.kind == "embedding":
                module.__dict__["_trueshard_root"] = runtime
            if unit.kind in ("tied", "dtype"):
                outer = self._enclosing(unit)
                after_gathering(outer, module.unshard)

    def _enclosing(self, unit: Unit) -> nn.Module:
        """The innermost other unit around all modules of ``unit``: its forward may read them without calling them."""
        best = ""
        for other in self.plan.units:
            name = other.modules[0]
            inside = all(m.startswith(f"{name}.") for m in unit.modules) if name else True
            if len(other.modules) == 1 and inside and len(name) >= len(best):
                best = name
        return self.modules[best]


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
        f"{found[0]!r} (and {len(found) - 1} more) normalises by the statistics of each rank's part of the batch, which "
        "is not what one device computes; use nn.SyncBatchNorm.convert_sync_batchnorm(model) before shard()"
    )
