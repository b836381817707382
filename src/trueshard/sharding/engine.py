"""Resolve a Plan on a model, apply it, and compare the Intent before and after; ``accumulate``; the setter."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from trueshard import _torch, distributed
from trueshard._torch import ShardedModule
from trueshard.axes import AXES
from trueshard.errors import own_errors, warn_user
from trueshard.machine import garbage_collection_paused
from trueshard.model import agreement, experts, intent, names, policies, registry
from trueshard.model.intent import refuse
from trueshard.model.names import Index
from trueshard.model.snapshot import Snapshot
from trueshard.model.units import Grouping, choose_units, is_automatic
from trueshard.optim.classify import classify, manner, refusal
from trueshard.optim.rebind import rebind
from trueshard.optim.stepping import bind
from trueshard.options import GradientSums, Options, Reshard
from trueshard.parallel.batch_trial import BatchTrial
from trueshard.parallel.experts import try_experts
from trueshard.parallel.tensor_trial import try_in_first_pass, try_plan
from trueshard.plans import Plan, check_options
from trueshard.sharding import apply, exact
from trueshard.sharding.cut_dimensions import with_cut_dimensions
from trueshard.sharding.hooks import Runtime, runtime_of
from trueshard.sharding.stall_watch import watch_ranks


@garbage_collection_paused()
@distributed.made_on_cpu()
def shard(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    how: Plan | Options,
    mesh: DeviceMesh | None,
) -> Plan:
    """Shard ``model`` and ``optimizers`` by a plan, or by choices without ``"auto"``; see ``trueshard.shard``."""
    axes = distributed.ensure_axes(mesh, how)
    mesh = axes.all
    if not distributed.is_simulated(mesh):
        watch_ranks()
    with agreement.together(mesh):
        _torch.check_torch()
        check_arguments(model, optimizers, how)
        snapshot = Snapshot(model, optimizers)
    memory = distributed.least_memory(mesh)
    try:
        with agreement.together(mesh):
            names.hide_wrappers(model)
            index = Index(model)
            before = intent.capture(index, optimizers)
            refuse(index)
            resolved = resolve(index, how, tuple(axes.data.shape), memory)
            for axis in reversed(AXES):  # from the innermost outwards: one may read what an inner one has resolved
                resolved = axis.resolved(index, resolved, axes.sizes)
            resolved = with_cut_dimensions(index, resolved)
            exact.refuse(index.root, resolved)
            if resolved.exact:
                exact.refuse_experts(index.root, mesh)
            if resolved.exact and "cpu" in (mesh.device_type, resolved.offload):
                exact.refuse_fused(optimizers)
            inside = resolved.tensor > 1 or bool(resolved.cut_dimensions)
            verdicts = [classify(optimizer, exact=bool(resolved.exact), inside=inside) for optimizer in optimizers]
        facts = [(f"the plan's {key}", value) for key, value in vars(resolved).items() if key not in ("units", "tried")]
        facts += [(f"unit {unit.name!r}", unit) for unit in resolved.units]
        facts += exact.kernels(axes.data) if resolved.exact else []
        facts += [(f"optimizer {i}'s way to step", manner(groups)) for i, groups in enumerate(verdicts)]
        # What has values is compared below, so all ranks have them, or none.
        without = [held.name for held in (*index.parameters, *index.buffers) if held.tensor.is_meta]
        facts += [(f"{len(without)} tensors on the meta device", without[:3])]
        agreement.agree_on_structure(before, facts, mesh)
        with agreement.together(mesh):
            resolved = dataclasses.replace(resolved, tried=())  # a plan that was given may say what another run tried
            resolved, untried = try_plan(index, try_experts(index, resolved, mesh), mesh)
            is_tried = resolved.trial and axes.data.size() > 1 and not distributed.is_simulated(mesh)
            batch_trial = BatchTrial(index, resolved) if is_tried and mesh.get_rank() == int(mesh.mesh.min()) else None
        hooked = [p.name for p in index.parameters if _torch.gradient_hooks(p.tensor)[0]]
        hooked_anywhere: set[str] = set().union(*distributed.gather_objects(hooked, mesh))
        with agreement.together(mesh):
            _equalise(index, optimizers, mesh)
            new_of = apply.apply(model, resolved, axes, index=index, hooked=hooked_anywhere)
            for optimizer, verdict in zip(optimizers, verdicts, strict=True):
                rebind(optimizer, new_of, [group.is_rows for group in verdict])
            after = intent.capture(Index(model), optimizers)
            if words := intent.difference(before, after):
                raise RuntimeError(f"sharding would change the model: {words}")
            _warn(model, resolved, axes.data)
            replaced = sharded(model).replaced
            for parameter in index.parameters:
                if new_of[id(parameter.tensor)] is not parameter.tensor:
                    replaced[parameter.tensor] = parameter.name
            for optimizer, verdict in zip(optimizers, verdicts, strict=True):
                bind(optimizer, verdict)
            try_in_first_pass(index.modules, untried)
            sharded(model).batch_trial = batch_trial
    except BaseException:
        snapshot.restore()
        registry.discard(names.unwrap(model))
        raise
    return resolved


def _warn(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    if mesh.size() == 1:
        return
    split = [
        name
        for name, module in names.named_modules(model)
        if isinstance(module, _torch.BatchNorm) and not isinstance(module, nn.SyncBatchNorm) and module.training
    ]
    if split:
        warn_user(
            f"{split[0]!r} (and {len(split) - 1} more) normalises by the statistics of each rank's part of the batch, "
            "which is not what one device computes; use nn.SyncBatchNorm.convert_sync_batchnorm(model) before shard()"
        )
    if len(plan.units) == 1:
        warn_user("the whole model is one unit, so each rank gathers all of it at once; name its blocks with units=...")


def check_arguments(model: Any, optimizers: Any, how: Any) -> None:
    """Raise TypeError or ValueError for an argument of ``shard()`` that is wrong whatever the model holds."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"shard() takes a torch.nn.Module, not {type(model).__name__}")
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"shard() takes torch.optim.Optimizer objects after the model, not {type(optimizer)!r}")
        if not hasattr(optimizer, "param_groups") or not hasattr(optimizer, "state"):
            raise refusal(optimizer, "it has no param_groups or no state", "the optimizer that it wraps")
    if any(isinstance(module, ShardedModule) for module in names.unwrap(model).modules()):
        raise ValueError("the model is sharded already; shard() is called once, on the unsharded model")
    if not isinstance(how, (Plan, Options)):
        raise TypeError(f"plan must be a trueshard.Plan, not {type(how).__name__}")
    if isinstance(how, Options):
        check_options(how)


def resolve(index: Index, how: Plan | Options, ranks: tuple[int, ...], memory: int | None = None) -> Plan:
    """Return the plan with its units, for an unsharded model and ``Plan.ranks``; nothing is touched.

    ``memory``: bytes of a rank, by which gradients add up whole or as shards; None: unknown.
    """
    plan, units = (Plan.of(how), how.units) if isinstance(how, Options) else (how, "auto")
    exact.check_globs(index, plan)
    if plan.units:
        grouped = Grouping.of_plan(index, plan).units()
        for unit in grouped:
            planned = plan.unit(unit.name)
            if (unit.parameters, unit.dtype) != (planned.parameters, planned.dtype):
                raise ValueError(
                    f"the plan's unit {unit.name or '(root)'!r} has {planned.parameters:,} elements of "
                    f"{planned.dtype}, the model's has {unit.parameters:,} of {unit.dtype}: the plan was "
                    "made for another model"
                )
            policies.reshard_values(plan, planned.reshard_after_forward, ranks[-1])
        plan = dataclasses.replace(plan, ranks=ranks)
        return plan if plan.resolved_for == plan.policies else policies.apply_words(plan, ranks[-1], memory)
    # An embedding is a unit of its own where that saves a gathering: not inside one compiled graph, which it would
    # break, and not where the root stays gathered to the end of backward anyway.
    compiled = index.root is not index.model or _torch.is_compiled_in_place(index.root)
    grouping = Grouping(index)
    # Units that were named are the only ones; and the stages of a pipeline run their backward in parts.
    heads = is_automatic(units) and not compiled and not plan.pipeline
    grouping.choose(
        choose_units(index, units),
        split_embeddings=policies.frees_root(plan.reshard_after_forward) and not compiled,
        split_head=heads,
        experts=experts.shared_out(index, plan.experts),
    )
    plan = dataclasses.replace(plan, units=grouping.units(), replicated=grouping.replications())
    return on_ranks(plan, ranks, memory)


def on_ranks(plan: Plan, ranks: tuple[int, ...], memory: int | None = None) -> Plan:
    """Return a plan that has its units, whose words are worked out for ``ranks`` anew; ``memory``: as of ``resolve``.

    Raises ValueError for words that do not go with them.
    """
    return policies.apply_words(dataclasses.replace(plan, ranks=ranks), ranks[-1], memory)


def _equalise(index: Index, optimizers: Sequence[torch.optim.Optimizer], mesh: DeviceMesh) -> None:
    """Take rank 0's values where ranks were initialised differently, with a warning."""
    name_of = {held.tensor: held.name for held in index.parameters}
    kinds = {
        "parameters": [(held.name, held.tensor) for held in index.parameters],
        "buffers": [(held.name, held.tensor) for held in index.buffers],
        "gradients": [(name, tensor.grad) for tensor, name in name_of.items() if tensor.grad is not None],
        "tensors of optimizer state": [
            (f"{name_of[parameter]}.{key}", value)
            for optimizer in optimizers
            for parameter, entries in optimizer.state.items()
            if parameter in name_of
            for key, value in entries.items()
            if isinstance(value, torch.Tensor)
        ],
    }
    for kind, tensors in kinds.items():
        if differing := agreement.take_from_first_rank(tensors, mesh):
            agreement.warn_of_differing(kind, differing, "the model")


@own_errors()
def sharded(model: nn.Module) -> Runtime:
    """Return the runtime of a sharded model; raise ValueError if ``shard()`` was not called on it."""
    runtime = runtime_of(names.unwrap(model))
    if runtime is None:
        inside = next((name for name, module in names.named_modules(model) if runtime_of(module)), "")
        around = [_torch.own_class(it.root).__name__ for it in registry.models() if model in set(it.root.modules())]
        message = f"this {type(model).__name__} is not sharded; call trueshard.shard(model, ...) first"
        if other := f"its {inside!r}" if inside else f"the {around[0]} that holds it" if around else "":
            message = f"this {type(model).__name__} is not sharded, {other} is: give that"
        raise ValueError(message)
    return runtime


@contextlib.contextmanager
def accumulate(model: nn.Module, *, last: bool, gradients: GradientSums | None = None) -> Iterator[None]:
    """Add up the gradients of backward passes; only with ``last`` are they a step's.

    Units with a gradient hook on a parameter reduce every time, since the hook means the global gradient.

    Args:
        model: a sharded model.
        last: True for the last microbatch before the optimizer's step.
        gradients: until the last one, ``"whole"`` adds up whole gradients on each rank, and reduces them once;
            ``"sharded"`` reduces each time, and ranks hold shards. None: as the plan says of each unit.

    Raises:
        ValueError: another word; ``"sharded"`` on a stage of a pipeline.
    """
    runtime = sharded(model)
    if gradients is not None:
        policies.accumulation_values(runtime.plan, gradients, runtime.mesh.size(-1), None)
    root, runtime.sums.word = runtime.root, gradients
    root.set_requires_gradient_sync(last)
    try:
        yield
    finally:
        runtime.sums.word = None
        root.set_requires_gradient_sync(True)


@own_errors()
def set_reshard_after_forward(model: nn.Module, policy: Reshard) -> None:
    """Change when gathered parameters are freed, between steps.

    Args:
        model: a sharded model.
        policy: as ``shard()``'s argument.

    Raises:
        ValueError: as in ``shard()``; nothing is changed then.
    """
    runtime = sharded(model)
    plan = dataclasses.replace(runtime.plan, reshard_after_forward=policy)
    values = policies.reshard_values(plan, policy, runtime.mesh.shape[-1])
    plan = dataclasses.replace(plan, resolved_for=plan.policies)
    for module, value in zip(runtime.units, values, strict=True):
        module.reshard()
        _torch.set_reshard_after_forward(module, value, runtime.smaller_meshes)
    runtime.meshes |= set(runtime.smaller_meshes.values())
    units = (dataclasses.replace(u, reshard_after_forward=v) for u, v in zip(plan.units, values, strict=True))
    runtime.plan = dataclasses.replace(plan, units=tuple(units))
