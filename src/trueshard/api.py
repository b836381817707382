"""``shard()``: take the plan, the options, or the planner's choice, and apply it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from trueshard import distributed
from trueshard.errors import own_errors, with_extra
from trueshard.model import agreement
from trueshard.options import ShardOptions, options_of, show_options
from trueshard.plans import Plan
from trueshard.sharding import engine
from trueshard.text import timed

if TYPE_CHECKING:
    from typing_extensions import Unpack


@show_options
def shard(
    model: nn.Module,
    *optimizers: torch.optim.Optimizer,
    plan: Plan | None = None,
    mesh: DeviceMesh | None = None,
    **options: Unpack[ShardOptions],
) -> Plan:
    """Shard ``model`` and ``optimizers`` over ranks, in place. Nothing changes but where the tensors live.

    Collective over the mesh: all is sharded on every rank, or nothing is, and an error on every rank says why.

    Args:
        model: any module, or one that ``torch.compile`` returned. On the meta device its shards stay there.
        optimizers: made before, on the model's parameters; the same objects go on, state included.
        plan: all options in one object; the options below must then be left out.
        mesh: with axes named replicate, shard, context, tensor, in this order, of which shard is always there; or
            1-D (shard), or 2-D (replicate, shard) of any names; None: all ranks shard, but for those that ``tensor``
            and ``context`` take. Without a process group or a launcher's environment, one rank.
        options: see ``trueshard.options``.

    Returns:
        The plan that was applied; ``print`` shows it as a table.

    Raises:
        ValueError: a part of the model, the optimizers or the options cannot be sharded; names it and the remedy.
        TypeError: an argument of the wrong type.
    """
    with own_errors(), timed("shard"):
        wanted = options_of("shard", options)
        wanted.check_alone(plan)
        if plan is None and wanted.needs_planner():
            axes = distributed.ensure_axes(mesh, wanted)
            with with_extra():
                from trueshard.planner.planning import plan_for  # only here: a plain shard() does without it

            mesh = axes.all
            with agreement.together(mesh):
                engine.check_arguments(model, optimizers, wanted)
            plan = plan_for(model, optimizers, axes, wanted)
        return engine.shard(model, optimizers, wanted if plan is None else plan, mesh)
