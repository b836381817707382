"""``shard()``: choose a Plan, given, by words, or by the planner; then apply it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from trueshard import distributed, engine
from trueshard.plans import Plan
from trueshard.policies import UNSAID
from trueshard.units import UnitWords


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
) -> Plan:
    """Shard ``model`` and ``optimizers`` over ranks, in place. Nothing changes but where the tensors live.

    Collective over the mesh. Either everything is sharded, on every rank, or everything is as it was and an error
    says why.

    Args:
        model: any module, or one that ``torch.compile`` returned. On the meta device its shards stay there.
        optimizers: made before, on the model's parameters; the same objects go on, state included.
        plan: all choices in one object; the arguments below must then be left out.
        mesh: 1-D (shard) or 2-D (replicate, shard); None: all ranks shard. Without a process group or a launcher's
            environment, one rank.
        units: what is gathered together: ``"auto"``, class name(s), class(es), glob(s) over names, or
            ``callable(name, module) -> bool``.
        reshard_after_forward: when gathered parameters are freed. ``"default"``: blocks after forward, the last block
            and the root after backward. ``"always"``: all after forward. ``"never"``: all after backward.
            ``"last_layer"``: all but the last block after forward. An integer: reshard to so many ranks. A dict of
            globs over unit names: each its own, the rest by default.
        mixed_precision: ``"bf16"`` or ``"fp16"`` (compute in it, reduce in float32), or torch's policy as it stands.
            The storage dtype is never touched.
        activation_checkpointing: ``"none"``, ``"full"``, ``"selective"`` (for every block), or a dict of globs.
        compile: compile every block in place.
        offload: ``"cpu"`` keeps shards, gradients and optimizer state in host memory.
        memory: what torch may reserve on each rank, such as ``"70GiB"``: what is ``"auto"`` is chosen so that it fits,
            and nothing is sharded if it does not. The planner takes one sample for a microbatch; for another, give the
            plan that ``trueshard.plan`` makes.

    Returns:
        The plan that was applied; ``print`` shows it as a table.

    Raises:
        ValueError: something in the model, the optimizers or the arguments cannot be sharded as it stands; the message
            names it and the remedy.
        TypeError: an argument of the wrong type.
    """
    given = {
        "units": units,
        "reshard_after_forward": reshard_after_forward,
        "mixed_precision": mixed_precision,
        "activation_checkpointing": activation_checkpointing,
        "compile": compile,
        "offload": offload,
        "memory": memory,
    }
    if plan is not None and (also := [name for name, word in given.items() if word != UNSAID.get(name)]):
        raise ValueError(f"plan= holds every choice: leave out {', '.join(also)}, or leave out plan")
    if plan is None and _needs_planner(given):
        from trueshard.planner.here import plan_here

        mesh = distributed.ensure_mesh(mesh)
        with engine.together(mesh):
            engine.check_arguments(model, optimizers, plan, given)
        plan = plan_here(model, optimizers, mesh, given)
    return engine.shard(model, optimizers, plan, mesh, given)


def _needs_planner(given: Mapping[str, Any]) -> bool:
    words = [given["reshard_after_forward"], given["activation_checkpointing"]]
    values = [value for word in words for value in (word.values() if isinstance(word, Mapping) else [word])]
    return given["memory"] is not None or any(isinstance(value, str) and value == "auto" for value in values)
