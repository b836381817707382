"""``shard()``: take the plan, the options, or the planner's choice, and apply it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from trueshard import distributed
from trueshard.choices import Choices, UnitWords
from trueshard.errors import with_extra
from trueshard.model import agreement
from trueshard.plans import Plan
from trueshard.sharding import engine
from trueshard.text import timed


def shard(
    model: nn.Module,
    *optimizers: torch.optim.Optimizer,
    plan: Plan | None = None,
    mesh: DeviceMesh | None = None,
    units: UnitWords = "auto",
    reshard_after_forward: str | int | Mapping[str, str | int | bool] = "default",
    mixed_precision: MixedPrecisionPolicy | str | None = None,
    activation_checkpointing: str | Mapping[str, str] = "none",
    compile: bool = False,
    offload: str = "none",
    memory: str | None = None,
    tensor: int | Mapping[str, str | int | bool] = 1,
    context: int = 1,
    experts: int = 1,
    exact: bool | Mapping[str, int] = False,
) -> Plan:
    """Shard ``model`` and ``optimizers`` over ranks, in place. Nothing changes but where the tensors live.

    Collective over the mesh: all is sharded on every rank, or nothing is, and an error on every rank says why.

    Args:
        model: any module, or one that ``torch.compile`` returned. On the meta device its shards stay there.
        optimizers: made before, on the model's parameters; the same objects go on, state included.
        plan: all choices in one object; the options below must then be left out.
        mesh: with axes named replicate, shard, context, tensor, in this order, of which shard is always there; or
            1-D (shard), or 2-D (replicate, shard) of any names; None: all ranks shard, but for those that ``tensor``
            and ``context`` take. Without a process group or a launcher's environment, one rank.
        units: modules that are gathered together: ``"auto"``, class name(s), class(es), glob(s) over names, or
            ``callable(name, module) -> bool``.
        reshard_after_forward: when gathered parameters are freed. ``"default"``: blocks after forward, the last block
            and the root after backward. ``"always"``: all after forward. ``"never"``: all after backward.
            ``"last_layer"``: all but the last block after forward. An integer: reshard to that many ranks. A dict from
            globs over unit names to these; the rest is ``"default"``.
        mixed_precision: ``"bf16"`` or ``"fp16"`` (compute in it, reduce in float32), or torch's policy as it stands.
            The storage dtype is never touched.
        activation_checkpointing: ``"none"``, ``"full"``, ``"selective"`` (for every block), or a dict of globs.
        compile: compile every block in place.
        offload: ``"cpu"`` keeps shards, gradients and optimizer state in host memory.
        memory: budget of torch's reserved memory on each rank, such as ``"70GiB"``: options that are ``"auto"`` are
            chosen to fit it, or nothing is sharded. The planner assumes a microbatch of one sample; for another, give
            the plan that ``trueshard.plan`` makes.
        tensor: ranks that share each matrix, as the model's own plan says (transformers' ``tp_plan``); neighbours, of
            one node. Or a dict from globs over names of modules to styles, with ``"ranks"``, the number of ranks,
            unless ``mesh`` has it, and ``"sequence"``: True if each rank holds its part of the sequence between
            matrices, which saves memory.
        context: ranks that share each sequence: give each its part of the tokens, see ``trueshard.split_sequence``.
        experts: ranks that share out the experts of each layer, to which tokens travel; neighbours among all that are
            not copies. For stacked experts, as transformers has them.
        exact: the same microbatches give the same gradients, parameters and optimizer state, bit for bit, at any number
            of ranks and replicas and any split into accumulation. Gradients are rounded to a grid of 2**-40 and added
            in float64: twice the bytes of a float32 reduction. Or a dict from globs over parameters' names to another
            exponent, from -126 to 74: the first that matches counts, the rest has -40. The range is 2**53 steps.

    Returns:
        The plan that was applied; ``print`` shows it as a table.

    Raises:
        ValueError: a part of the model, the optimizers or the options cannot be sharded; names it and the remedy.
        TypeError: an argument of the wrong type.
    """
    choices = Choices(
        units=units,
        reshard_after_forward=reshard_after_forward,
        mixed_precision=mixed_precision,
        activation_checkpointing=activation_checkpointing,
        compile=compile,
        offload=offload,
        memory=memory,
        tensor=tensor,
        context=context,
        experts=experts,
        exact=exact,
    )
    choices.check_alone(plan)
    with timed("shard"):
        if plan is None and choices.needs_planner():
            axes = distributed.ensure_axes(mesh, choices.axes(), choices.experts)
            with with_extra():
                from trueshard.planner.planning import plan_for  # only here: a plain shard() does without it

            mesh = axes.all
            with agreement.together(mesh):
                engine.check_arguments(model, optimizers, choices)
            plan = plan_for(model, optimizers, axes, choices)
        return engine.shard(model, optimizers, choices if plan is None else plan, mesh)
