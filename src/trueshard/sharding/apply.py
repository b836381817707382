"""Apply a Plan to a model, and again to its copies. The only file that calls ``fully_shard``.

- The order: activation checkpointing, compile, sharding, each in place, the innermost unit first.
- Attributes, gradient hooks and gradients belong to the parameter that the user made; FSDP2 puts another in its place,
  and shows a third one, the gathered parameter, to the forward. So they are moved, and the runtime is installed.
- Activation checkpointing replaces a module's own ``forward``: a wrapper module would put its attribute into every name
  below it. A transformers layer has a switch of its own, which also keeps its key-value cache out of the recomputation.
- ``selective`` keeps the outputs of attention and of every second matrix product, and recomputes the rest (as
  TorchTitan's per-operation mode does).
- ``copy.deepcopy``, which FSDP2 refuses, gives a sharded copy (as ``AveragedModel`` makes for EMA), 1/N of the memory a
  rank: modules are copied as they were before sharding, on the meta device, the plan is applied to the copy, and the
  shards are copied over.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trueshard import _torch
from trueshard._torch import ShardedModule
from trueshard.distributed import Axes, device_of
from trueshard.model import names
from trueshard.model.intent import attributes_of
from trueshard.model.names import Held
from trueshard.model.snapshot import Snapshot, Trace
from trueshard.optim.rebind import shard_like
from trueshard.optim.stepping import watch
from trueshard.parallel import experts
from trueshard.parallel.context import share_attention
from trueshard.parallel.sequence import recomputing, split_ends
from trueshard.parallel.tensor import arrived_on, cut
from trueshard.plans import MixedPrecision, Plan, Unit
from trueshard.sharding import methods
from trueshard.sharding.gradients import GradientHooks
from trueshard.sharding.hooks import Runtime
from trueshard.sharding.replicated import HoldsWhole, follow_assignments, release_whole

_aten = torch.ops.aten
_ATTENTION = (
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_cudnn_attention.default,
)
_PRODUCTS = (_aten.mm.default, _aten.addmm.default, _aten.bmm.default)


def recompute(module: nn.Module, mode: str, *, shared: bool = False, of_parts: bool = False) -> None:
    """Make ``module`` recompute its forward in backward, in place.

    ``"full"`` keeps only the inputs for backward; ``"selective"`` also the costly operations' outputs. ``shared``: the
    module's matrices, by ranks. ``of_parts``: it is given parts of sequences.
    """
    function = _checkpointed(mode, shared, of_parts)
    if any(cls.__name__ == "GradientCheckpointingLayer" for cls in type(module).__mro__):
        module.gradient_checkpointing = True  # type: ignore[assignment]
        module._gradient_checkpointing_func = function  # type: ignore[assignment]
        return
    forward: Callable[..., Any] = module.forward

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return function(functools.partial(forward, **kwargs), *args)

    module.__dict__["forward"] = recomputed


def _checkpointed(mode: str, shared: bool, of_parts: bool) -> Callable[..., Any]:
    """Return (function, *args) → its outputs, recomputed in backward."""
    contexts = _selective_contexts if mode == "selective" else None
    plain = _checkpoint_in(contexts)
    if not shared:
        return plain
    compiled = _checkpoint_in(contexts or _traced_contexts)
    eager = _checkpoint_in(functools.partial(recomputing, contexts)) if of_parts else plain

    def function(*args: Any) -> Any:
        # A compiler traces the recomputation along with the forward: at the same length, and in no context of ours.
        return (compiled if torch.compiler.is_compiling() else eager)(*args)

    return function


def _checkpoint_in(contexts: Callable[[], Any] | None) -> Callable[..., Any]:
    """Return torch's checkpoint, with contexts of a forward and of its recomputation if there are any."""
    options: dict[str, Any] = {"context_fn": contexts} if contexts else {}
    return functools.partial(checkpoint, use_reentrant=False, **options)


def _traced_contexts() -> Any:
    """Keep attention's output on CPUs, where it is a seeded operation.

    Beside DTensors, torch 2.13 saves its seed where a mesh is expected.
    """

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        on_cpu = operation is _aten._scaled_dot_product_flash_attention_for_cpu.default
        return CheckpointPolicy.MUST_SAVE if on_cpu else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _selective_contexts() -> Any:
    products = {True: 0, False: 0}

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operation in _ATTENTION:
            return CheckpointPolicy.MUST_SAVE
        if operation in _PRODUCTS:
            products[context.is_recompute] += 1
            if products[context.is_recompute] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


SMALL = 64 << 10
"""Bytes of a shard up to which an optimizer's step costs the host more than the arithmetic: such shards are joined over
all units."""


def apply(
    model: nn.Module,
    plan: Plan,
    axes: Axes,
    *,
    hooked: Collection[str] = (),
    sources: dict[str, torch.Tensor] | None = None,
) -> dict[int, nn.Parameter]:
    """Shard ``model`` in place by a plan that has its units; return ``id`` of each original parameter → the new one.

    ``hooked``: parameters on which some rank has a gradient hook. ``sources``: for a model on the meta device, shards
    of the same plan to take the values from, by name.
    """
    _torch.complete_units()
    mesh = axes.data
    before = Snapshot(model)
    names.hide_wrappers(model)
    root = names.unwrap(model)
    modules = dict(names.named_modules(root))
    originals = names.held_tensors(root, "parameters")
    replicated = {each.name for each in plan.replicated}
    whole: set[Any] = {original.tensor for original in originals if original.name in replicated}
    _prepare_tensors(originals, whole, device_of(mesh))
    arrived = arrived_on(root)
    if plan.experts > 1:
        experts.cut(root, plan, axes)
    shared = axes.along.get("tensor") or arrived
    parts = cut(root, plan, shared) if shared is not None else None
    if "context" in axes.along and plan.context > 1:
        share_attention(root, axes.along["context"])
    for unit in plan.units:
        _prepare_modules(unit, [modules[name] for name in unit.modules], plan)
    if shared is not None and parts is not None:
        split_ends(root, parts, shared.get_group())
    for unit in sorted(plan.units, key=lambda unit: -max(name.count(".") + bool(name) for name in unit.modules)):
        _shard_unit(unit, modules, plan, axes, whole)
    if plan.exact and mesh.size(-1) == 1:
        _torch.align_gradients(root)
    else:
        _torch.join_shards(root, SMALL)
    if sources is not None:
        _fill(root, sources, torch.device("cpu") if plan.offload == "cpu" else device_of(mesh))
    assert isinstance(root, ShardedModule)
    runtime = Runtime(root, plan, axes)
    new_of = _attach(runtime, modules, originals, hooked)
    _allow_deepcopy(runtime, before)
    if arrived is not None:
        root.__dict__["__deepcopy__"] = _refuse_cut
    return new_of


def _prepare_tensors(originals: list[Held], whole: set[nn.Parameter], device: torch.device) -> None:
    for original in originals:
        parameter = original.tensor
        if not isinstance(parameter, DTensor) and not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
        if parameter in whole:
            if not parameter.is_meta:
                parameter.data = parameter.data.to(device)
            for module, _ in original.places:
                names.mix_in(module, HoldsWhole)


def _prepare_modules(unit: Unit, modules: list[nn.Module], plan: Plan) -> None:
    for module in modules:
        if unit.activation_checkpointing != "none":
            recompute(module, unit.activation_checkpointing, shared=plan.tensor > 1, of_parts=plan.sequence)
        if plan.compile and unit.kind == "block" and not _torch.is_compiled_in_place(module):
            module.compile()
        if unit.kind != "root" and _torch.own_parameters(module) and not _torch.is_compiled_in_place(module):
            names.mix_in(module, methods.GatheredOnAccess)


def _shard_unit(unit: Unit, modules: Mapping[str, nn.Module], plan: Plan, axes: Axes, whole: set[nn.Parameter]) -> None:
    members: Any = [modules[name] for name in unit.modules]
    policy = unit.reshard_after_forward
    mixed, mesh = plan.mixed_precision or MixedPrecision(), axes.data
    if unit.kind == "experts":
        # Inside its block, it is given what the block computed: routing weights stay in their own dtype.
        mixed, mesh = dataclasses.replace(mixed, output=None, cast_inputs=False), axes.alike or mesh
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
        ignored_params=whole or None,
    )
    if not unit.unshard_in_backward:
        assert isinstance(members[0], ShardedModule)
        members[0].set_unshard_in_backward(False)


# What the user set on parameters, and the runtime


def _attach(
    runtime: Runtime, modules: Mapping[str, nn.Module], originals: list[Held], hooked: Collection[str]
) -> dict[int, nn.Parameter]:
    """Move attributes, hooks and gradients to the shards, and install the runtime; the arguments are ``apply``'s.

    Returns ``id`` of each original parameter → the parameter that took its place.
    """
    units = runtime.plan.units
    named = {name: unit for unit in units for name in unit.modules}
    unit_of = {module: names.nearest_above(name, named) for name, module in modules.items()}
    module_of: dict[str, Any] = {unit.name: modules[unit.modules[0]] for unit in units}
    replicated = {each.name for each in runtime.plan.replicated}
    by_unit: dict[str, list[tuple[str, nn.Parameter]]] = {unit.name: [] for unit in units}
    new_of: dict[int, nn.Parameter] = {}
    for original in originals:
        module, attribute = original.places[0]
        unit = unit_of[module]
        if original.name in replicated:
            runtime.hold_whole(original, module_of[unit.name])
        new = _torch.own_parameters(module)[attribute]
        assert new is not None
        new_of[id(original.tensor)] = new
        attributes = attributes_of(original.tensor)
        new.__dict__.update(attributes)
        if original.tensor.grad is not None and isinstance(new, DTensor):
            new.grad = shard_like(original.tensor.grad, new)
        if original.name not in replicated:
            by_unit[unit.name].append((original.name, new))
            gathers = original.name in hooked
            if gathers or GradientHooks.on(original.tensor):
                runtime.call_hooks(new, GradientHooks(original.tensor, gathers), module_of[unit.name])
            for name in unit.modules if attributes else ():
                methods.carry_attributes(modules[name], module, attribute, attributes)
    with_lists = _units_with_lists(unit_of)
    for unit in units:
        module = module_of[unit.name]
        runtime.units[module] = [parameter for _, parameter in by_unit[unit.name]]
        runtime.usage.add(module, by_unit[unit.name], holds_list=unit.name in with_lists)
        if not isinstance(unit.reshard_after_forward, bool):
            _torch.set_reshard_after_forward(module, unit.reshard_after_forward, runtime.meshes)
    _gather_beside_forward(runtime, modules)
    _keep_records(runtime.root)
    if not any(parameter.is_meta for parameter in new_of.values()):
        _torch.initialise(runtime.root)
    runtime.install()
    follow_assignments(runtime, [(module, module_of[unit.name]) for module, unit in unit_of.items()])
    return new_of


def _keep_records(root: nn.Module) -> None:
    """Let transformers find what its models record (hidden states, attentions), of which it has a table by class.

    FSDP2 changes the class, and a model whose class is not in the table returns none of it, in silence.
    """
    places = ("transformers.utils.output_capturing", "transformers.utils.generic")
    tables = [getattr(sys.modules.get(place), "_CAN_RECORD_REGISTRY", None) for place in places]
    for table in tables:
        if isinstance(table, dict):
            for module in root.modules():
                if records := getattr(module, "_can_record_outputs", None):
                    dict.__setitem__(table, str(type(module)), records)


def _units_with_lists(unit_of: Mapping[nn.Module, Unit]) -> set[str]:
    """Return the units that gather members of a list of modules, of which a rank may use some and not others."""
    found: set[str] = set()
    for module in unit_of:
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            children = [names.unwrap(child) for child in module.children() if any(True for _ in child.parameters())]
            homes = [unit_of[child].name for child in children if not isinstance(child, ShardedModule)]
            found |= {home for home in homes if homes.count(home) > 1}
    return found


def _gather_beside_forward(runtime: Runtime, modules: Mapping[str, nn.Module]) -> None:
    methods.gather_in_submodules(runtime)
    compiled_root = _torch.is_compiled_in_place(runtime.root)
    for number, (unit, module) in enumerate(zip(runtime.plan.units, runtime.units, strict=True)):
        if unit.kind in ("root", "block") and len(unit.modules) == 1 and not compiled_root:
            methods.gather_in_methods(runtime, module, methods.methods_that_compute(module))
        if unit.kind == "root" and callable(getattr(module, "generate", None)):
            runtime.share_passes_in("generate")
        for name in unit.modules:
            modules[name].__dict__["_trueshard_root"] = runtime
            runtime.numbers[modules[name]] = number
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


# copy.deepcopy


def _allow_deepcopy(runtime: Runtime, before: Snapshot) -> None:
    """Make ``copy.deepcopy`` of the sharded model work; of one unit alone it is refused."""
    root: Any = runtime.root
    for module in root.modules():
        if isinstance(module, ShardedModule):
            module.__dict__["__deepcopy__"] = _refuse
    # The root's is among the changes that a copy undoes.
    runtime.changes = Trace(before)
    root.__dict__["__deepcopy__"] = functools.partial(_copy, runtime)


def _refuse(memo: dict[int, Any]) -> Any:
    raise RuntimeError("one unit of a sharded model cannot be copied alone; copy the model that was given to shard()")


def _refuse_cut(memo: dict[int, Any]) -> Any:
    raise RuntimeError("a model that was cut before shard() cannot be copied: let shard(tensor=...) cut it")


def _copy(runtime: Runtime, memo: dict[int, Any]) -> nn.Module:
    root: Any = runtime.root
    runtime.free()
    sources = {name: t for kind in ("parameters", "buffers") for name, _, _, t in names.named_tensors(root, kind)}
    new: nn.Module = copy_modules(runtime, root, on_meta, memo)
    apply(new, runtime.plan, runtime.axes, sources=sources)
    # Whatever is copied along with the model (an optimizer) holds the copy's parameters.
    copies = {name: tensor for name, _, _, tensor in names.named_tensors(names.unwrap(new), "parameters")}
    watch(names.unwrap(new), {})
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
            raise RuntimeError(f"the module {name!r} cannot be copied by copy.deepcopy: {error}") from error
    for module in (m for each in (copied if isinstance(copied, list) else [copied]) for m in each.modules()):
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


@torch.no_grad()
def _fill(root: nn.Module, sources: dict[str, torch.Tensor], device: torch.device) -> None:
    """Give a model that is sharded on the meta device memory, and the values of ``sources``, sharded alike."""
    if all(t.is_meta for t in sources.values()):
        return
    root.to_empty(device=device)
    for kind in ("parameters", "buffers"):
        for name, _, _, tensor in names.named_tensors(root, kind):
            _torch.local(tensor).copy_(_torch.local(sources[name]))
