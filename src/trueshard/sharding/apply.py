"""Apply a Plan to a model, and again to its copies. The only file that calls ``fully_shard``.

``[Note: Order of application]`` The tensor axis and experts cut parameters first, since FSDP2 shards what is left of
them. Then, each in place: activation checkpointing, compile (whose graph so has the recomputation), sharding. Units are
sharded from the innermost outwards, since ``fully_shard`` takes every parameter that no unit below has.

Attributes, gradient hooks and gradients belong to the parameter that the user made; FSDP2 puts another in its place,
and shows a third one, the gathered parameter, to the forward. So they are moved, and the runtime is installed.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from trueshard import _torch
from trueshard._torch import ShardedModule
from trueshard.distributed import Axes, connect_hosts, device_of, is_simulated
from trueshard.model import names, registry
from trueshard.model.intent import attributes_of
from trueshard.model.names import Held, Index
from trueshard.model.snapshot import module_states
from trueshard.optim.rebind import shard_like
from trueshard.parallel import experts
from trueshard.parallel.balancing import balance_over_ranks
from trueshard.parallel.collectives import LastInput
from trueshard.parallel.context import share_attention
from trueshard.parallel.random_streams import draw_alike
from trueshard.parallel.sequence import Parts, split_ends
from trueshard.parallel.tensor import arrived_on, cut
from trueshard.plans import MixedPrecision, Plan, Unit
from trueshard.sharding import methods
from trueshard.sharding.activation_checkpointing import recompute
from trueshard.sharding.additions import follow_assignments
from trueshard.sharding.copying import allow_deepcopy
from trueshard.sharding.gradients import GradientHooks
from trueshard.sharding.hooks import Runtime
from trueshard.sharding.process_patches import PATCHES
from trueshard.sharding.replicated import HoldsWhole
from trueshard.sharding.watch import watch

SMALL = 64 << 10
"""Bytes of a shard up to which an optimizer's step costs the host more than the arithmetic: such shards are joined over
all units."""


def apply(
    model: nn.Module,
    plan: Plan,
    axes: Axes,
    *,
    index: Index | None = None,
    hooked: Collection[str] = (),
    sources: dict[str, torch.Tensor] | None = None,
) -> dict[int, nn.Parameter]:
    """Shard ``model`` in place by a plan that has its units; return ``id`` of each original parameter → the new one.

    ``index``: of the model, if there is one. ``hooked``: parameters on which some rank has a gradient hook.
    ``sources``: for a model on the meta device, shards of the same plan to take the values from, by name.
    """
    mesh = axes.data
    before = module_states(model)
    names.hide_wrappers(model)
    root = names.unwrap(model)
    runtime = Runtime(root, plan, axes)
    registry.add(runtime, [patch.install for patch in PATCHES if plan.pipeline or not patch.of_stages])
    if plan.pipeline:
        connect_hosts(axes.all)
    index = index or Index(root)
    modules, originals = index.modules, index.parameters
    replicated = {whole.name for whole in plan.replicated}
    whole: set[Any] = {original.tensor for original in originals if original.name in replicated}
    _prepare_tensors(originals, whole, device_of(mesh))
    arrived = arrived_on(index)
    if plan.experts > 1:
        experts.cut(modules, plan, axes)
    shared = axes.along.get("tensor") or arrived
    # Gathered, a parameter is on the axis along which it is cut, alone.
    runtime.meshes |= {*axes.along.values(), *([shared] if shared is not None else [])}
    of_one_process = [along.get_group() for along in (axes.along.get("context"), shared) if along is not None]
    runtime.before_pass.append(draw_alike(of_one_process, device_of(mesh)))
    if axes.all.size() > 1:
        before_pass, after_pass = balance_over_ranks(root, plan, mesh)
        runtime.before_pass.append(before_pass)
        runtime.after_pass.append(after_pass)
        if plan.watch and not is_simulated(axes.all):
            watch(runtime, plan.watch)
    parts = None
    if shared is not None:
        last_input = LastInput()
        runtime.after_pass.append(last_input.forget)
        parts = cut(index, plan, shared, last_input)
    if "context" in axes.along and plan.context > 1:
        share_attention(root, axes.along["context"])
    for unit in plan.units:
        _prepare_modules(unit, [modules[name] for name in unit.modules], plan, parts)
    if shared is not None and parts is not None:
        split_ends(modules, parts, shared.get_group())
    dimensions = plan.cut_dimensions
    shard_of: dict[Any, Shard] = {_present(p): Shard(dimensions[p.name]) for p in originals if p.name in dimensions}
    # [Note: Order of application]
    with _torch.meshes_joined_once():
        for unit in sorted(plan.units, key=lambda unit: -max(index.depths[name] for name in unit.modules)):
            _shard_unit(unit, modules, plan, axes, whole, shard_of)
    if plan.exact and mesh.size(-1) == 1:
        _torch.align_gradients(root)
    else:
        _torch.join_shards(root, SMALL)
    if sources is not None:
        _fill(root, sources, torch.device("cpu") if plan.offload == "cpu" else device_of(mesh))
    new_of = _attach(runtime, modules, originals, hooked)
    allow_deepcopy(runtime, before, apply, was_cut=arrived is not None)
    return new_of


def _prepare_tensors(originals: list[Held], replicated: set[nn.Parameter], device: torch.device) -> None:
    for original in originals:
        parameter = original.tensor
        if not isinstance(parameter, DTensor) and not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
        if parameter in replicated:
            if not parameter.is_meta:
                parameter.data = parameter.data.to(device)
            for module, _ in original.places:
                names.mix_in(module, HoldsWhole)


def _prepare_modules(unit: Unit, modules: list[nn.Module], plan: Plan, parts: Parts | None) -> None:
    for module in modules:
        if unit.activation_checkpointing != "none":
            recompute(module, unit.activation_checkpointing, shared=plan.tensor > 1, parts=parts)
        if plan.compile and unit.kind == "block" and not _torch.is_compiled_in_place(module):
            module.compile()
        if unit.kind != "root" and _torch.own_parameters(module) and not _torch.is_compiled_in_place(module):
            names.mix_in(module, methods.GatheredOnAccess)


def _shard_unit(
    unit: Unit,
    modules: Mapping[str, nn.Module],
    plan: Plan,
    axes: Axes,
    replicated: set[nn.Parameter],
    shard_of: Mapping[nn.Parameter, Shard],
) -> None:
    members: Any = [modules[name] for name in unit.modules]
    policy = unit.reshard_after_forward
    mixed, mesh = plan.mixed_precision or MixedPrecision(), axes.data
    if unit.kind == "experts":
        # Inside its block, it is given what the block computed: routing weights stay in their own dtype.
        mixed, mesh = dataclasses.replace(mixed, output=None, cast_inputs=False), axes.alike or mesh
    # Exact sums are exact in float64 alone; what FSDP2 has reduced, it casts to the stored dtype itself.
    compute, reduce, output = mixed.compute, "float64" if plan.exact else mixed.reduce, mixed.output
    dtypes: dict[str | None, torch.dtype] = {n: getattr(torch, n) for n in (compute, reduce, output) if n}
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if plan.offload == "cpu" else OffloadPolicy()
    fully_shard(
        members[0] if len(members) == 1 else members,
        mesh=mesh,
        # An integer is set after all units are made: fully_shard would make process groups for each unit.
        reshard_after_forward=policy if isinstance(policy, bool) else True,
        mp_policy=MixedPrecisionPolicy(
            param_dtype=dtypes.get(compute),
            reduce_dtype=dtypes.get(reduce),
            output_dtype=dtypes.get(output),
            cast_forward_inputs=mixed.cast_inputs,
        ),
        offload_policy=offload,
        shard_placement_fn=shard_of.get if shard_of else None,  # rows, where it gives None
        ignored_params=replicated or None,
    )
    if not unit.unshard_in_backward:
        assert isinstance(members[0], ShardedModule)
        members[0].set_unshard_in_backward(False)


# What the user set on parameters, and the runtime


def _attach(
    runtime: Runtime, modules: Mapping[str, nn.Module], originals: list[Held], hooked: Collection[str]
) -> dict[int, nn.Parameter]:
    """Move what the user set on parameters to the shards, and install the runtime; the arguments are ``apply``'s.

    Returns ``id`` of each original parameter → the parameter that took its place.
    """
    units = runtime.plan.units
    named = {name: number for number, unit in enumerate(units) for name in unit.modules}
    number_of = {module: names.nearest_above(name, named) for name, module in modules.items()}
    heads: list[Any] = [modules[unit.modules[0]] for unit in units]
    replicated = {whole.name for whole in runtime.plan.replicated}
    members: list[list[tuple[str, nn.Parameter]]] = [[] for _ in units]
    new_of: dict[int, nn.Parameter] = {}
    for original in originals:
        number = number_of[original.places[0][0]]
        if original.name in replicated:
            runtime.hold_whole(original, heads[number])
        new = new_of[id(original.tensor)] = _move_attachments(original)
        if original.name not in replicated:
            members[number].append((original.name, new))
            gathers = original.name in hooked
            if gathers or GradientHooks.on(original.tensor):
                runtime.hooks.add(new, GradientHooks(original.tensor, gathers), heads[number])
            _carry_to_gathered(original, [modules[name] for name in units[number].modules])
    with_lists = _units_with_lists(number_of)
    for number, (unit, module) in enumerate(zip(units, heads, strict=True)):
        runtime.units[module] = [parameter for _, parameter in members[number]]
        runtime.usage.add(module, members[number], holds_list=number in with_lists)
        if not isinstance(unit.reshard_after_forward, bool):
            _torch.set_reshard_after_forward(module, unit.reshard_after_forward, runtime.smaller_meshes)
    _gather_beside_forward(runtime, modules)
    _keep_records(runtime.root)
    if not any(parameter.is_meta for parameter in new_of.values()):
        _torch.initialise(runtime.root)
    runtime.install()
    # Behind all that assigns to modules here: from now on an assignment is the user's.
    follow_assignments(runtime, number_of)
    return new_of


def _move_attachments(original: Held) -> nn.Parameter:
    """Give the parameter that took the place of ``original`` its attributes and its gradient; return it."""
    new = _present(original)
    new.__dict__.update(attributes_of(original.tensor))
    if original.tensor.grad is not None and isinstance(new, DTensor):
        new.grad = shard_like(original.tensor.grad, new)
    return new


def _present(original: Held) -> nn.Parameter:
    """Return what stands in the place of a parameter now."""
    module, attribute = original.places[0]
    parameter = _torch.own_parameters(module)[attribute]
    assert parameter is not None
    return parameter


def _carry_to_gathered(original: Held, unit: list[nn.Module]) -> None:
    """Give the gathered parameter, which the forward sees, the attributes of the original."""
    if attributes := attributes_of(original.tensor):
        for module in unit:
            methods.carry_attributes(module, *original.places[0], attributes)


def _keep_records(root: nn.Module) -> None:
    """Let transformers find what its models record (hidden states, attentions), of which it has a table by class.

    FSDP2 changes the class, and a model whose class is not in the table returns none of it, in silence.
    """
    places = ("transformers.utils.output_capturing", "transformers.utils.generic")
    tables = [getattr(sys.modules.get(place), "_CAN_RECORD_REGISTRY", None) for place in places]
    for table in tables:
        if isinstance(table, dict):
            for module in root.modules():
                cls = str(type(module))
                if (records := getattr(module, "_can_record_outputs", None)) and cls not in table:
                    dict.__setitem__(table, cls, records)
                    registry.at_end(functools.partial(table.pop, cls, None))


def _units_with_lists(number_of: Mapping[nn.Module, int]) -> set[int]:
    """Return the units that gather members of a list of modules, of which a rank may use some and not others."""
    units: set[int] = set()
    for module in number_of:
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            children = [names.unwrap(child) for child in module.children() if any(True for _ in child.parameters())]
            homes = [number_of[child] for child in children if not isinstance(child, ShardedModule)]
            units |= {home for home in homes if homes.count(home) > 1}
    return units


def _gather_beside_forward(runtime: Runtime, modules: Mapping[str, nn.Module]) -> None:
    methods.gather_in_submodules(runtime)
    compiled_root = _torch.is_compiled_in_place(runtime.root)
    for unit, module in zip(runtime.plan.units, runtime.units, strict=True):
        if unit.kind in ("root", "block") and len(unit.modules) == 1 and not compiled_root:
            methods.gather_in_methods(runtime, module, methods.methods_that_compute(module))
        if unit.kind == "root" and callable(getattr(module, "generate", None)):
            runtime.share_passes_in("generate")
        for name in unit.modules:
            modules[name].__dict__["_trueshard_root"] = runtime
        if unit.kind in ("tied", "dtype"):
            methods.after_gathering(modules[_around(unit, runtime.plan)], module.unshard)


def _around(unit: Unit, plan: Plan) -> str:
    """Return the innermost other module around all of ``unit``, whose forward may read them without calling them."""
    around = (
        other.modules[0]
        for other in plan.units
        if len(other.modules) == 1 and all(module.startswith(f"{other.modules[0]}.") for module in unit.modules)
    )
    return max(around, key=len, default="")


@torch.no_grad()
def _fill(root: nn.Module, sources: dict[str, torch.Tensor], device: torch.device) -> None:
    """Give a model that is sharded on the meta device memory, and the values of ``sources``, sharded alike."""
    if all(t.is_meta for t in sources.values()):
        return
    root.to_empty(device=device)
    for kind in ("parameters", "buffers"):
        for name, _, _, tensor in names.named_tensors(root, kind):
            _torch.local(tensor).copy_(_torch.local(sources[name]))
