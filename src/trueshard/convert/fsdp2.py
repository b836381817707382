"""A plan as a Python module that needs torch alone: `parallelize(model, mesh)`, for a training loop of one's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from trueshard.errors import UserError
from trueshard.planner.planning import Request
from trueshard.plans import MixedPrecision, Plan

_TEXT = Path(__file__).with_name("frameworks") / "fsdp2.txt"
"""Text of the module, for ``%``."""


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
    return _TEXT.read_text(encoding="utf-8") % {
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
