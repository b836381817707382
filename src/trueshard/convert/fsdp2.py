"""A plan as a Python module that needs torch alone: `parallelize(model, mesh)`, for a training loop of one's own."""

from __future__ import annotations

from dataclasses import replace

from trueshard.errors import UserError
from trueshard.planner.planning import Request
from trueshard.plans import MixedPrecision, Plan

_MODULE = '''\
"""Sharding of %(model)s, planned by TrueShard for %(ranks)d × %(hardware)s. It needs torch alone.

Start `torchrun --nproc-per-node %(ranks_per_node)d train.py`, and in train.py, before the optimizer is made:

    mesh = torch.distributed.init_device_mesh("%(device)s", %(sizes)r, mesh_dim_names=%(axes)r)
    model = parallelize(model, mesh)

The forecast is of %(accumulation)d × %(microbatch)d samples of %(sequence)d tokens in a step of a rank%(sums)s.
"""

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

POLICIES = {"mp_policy": MixedPrecisionPolicy(%(precision)s), "offload_policy": %(offload)s}
UNITS = [  # modules, reshard_after_forward, recomputed in backward, gathered for backward
%(units)s
]


def parallelize(model, mesh):
    """Shard a model in place, the innermost units first, and return it."""
    modules = dict(model.named_modules())
    for names, reshard, recompute, gathered in UNITS:
        for name in names if recompute != "none" else ():
            options = {"context_fn": keep_products} if recompute == "selective" else {}
            modules[name] = checkpoint_wrapper(modules[name], **options)
            model.set_submodule(name, modules[name])
            if hasattr(model, "config"):
                model.config.use_cache = False  # it would grow again in a recomputation
        unit = [modules[name] for name in names]
        fully_shard(unit if len(unit) > 1 else unit[0], mesh=mesh, reshard_after_forward=reshard, **POLICIES)
        unit[0].set_unshard_in_backward(gathered)
    return model


def keep_products():
    """Keep the outputs of attention and of every second matrix product, and recompute the rest."""
    products, counts = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default"), {True: 0, False: 0}

    def policy(context, operation, *args, **kwargs):
        is_product = str(operation) in products
        counts[context.is_recompute] += is_product
        is_kept = is_product and counts[context.is_recompute] %% 2 or "_scaled_dot_product" in str(operation)
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
'''


def settled(request: Request) -> Request:
    """Return a request without what torch alone cannot be told in a line; raise UserError for such an option."""
    usual = Request(model=request.model)
    for option in ("axes", "tensor", "context", "experts", "pipeline", "exact", "compile"):
        if getattr(request, option) != getattr(usual, option):
            raise UserError(
                f"--for fsdp2: --{option} is more than fully_shard does; leave it out, or train with shard()"
            )
    return replace(request, accumulate_gradients="whole") if request.accumulate_gradients == "auto" else request


def module(plan: Plan) -> str:
    """Return the text of the module for a plan with its units and its forecast.

    Raises UserError for parameters that FSDP2 does not shard.
    """
    forecast = plan.forecast
    assert forecast is not None
    if plan.replicated:
        names = ", ".join(parameter.name for parameter in plan.replicated)
        raise UserError(f"--for fsdp2: fully_shard refuses {names} ({plan.replicated[0].why}); train with shard()")
    units = [
        (list(unit.modules), unit.reshard_after_forward, unit.activation_checkpointing, unit.unshard_in_backward)
        for unit in sorted(plan.units, key=lambda unit: -max(name.count(".") + bool(name) for name in unit.modules))
    ]
    mixed = plan.mixed_precision or MixedPrecision()
    dtypes = {"param_dtype": mixed.compute, "reduce_dtype": mixed.reduce, "output_dtype": mixed.output}
    words = [f"{name}=torch.{dtype}" for name, dtype in dtypes.items() if dtype is not None]
    words += [] if mixed.cast_inputs else ["cast_forward_inputs=False"]
    sums = {unit.accumulate_gradients for unit in plan.units} if forecast.accumulation > 1 else set()
    if len(sums) > 1:
        raise UserError("--for fsdp2: --accumulate-gradients whole or sharded, the same for all units")
    is_cpu = forecast.hardware == "cpu"
    return _MODULE % {
        **vars(forecast),
        "device": "cpu" if is_cpu else "cuda",
        "precision": ", ".join(words),
        "offload": f"CPUOffloadPolicy(pin_memory={not is_cpu})" if plan.offload == "cpu" else "OffloadPolicy()",
        "sums": ",\nwith model.set_requires_gradient_sync(False) before all microbatches but the last"
        if "whole" in sums
        else "",
        "units": "\n".join(f"    {unit}," for unit in units),
        "sizes": plan.ranks,
        "axes": ("replicate", "shard")[-len(plan.ranks) :],
    }
