"""Changes outside a sharded model while this process has one: the one table, also shown in the documentation.

Most of what a sharded model needs is set on its own modules, parameters and optimizers. These cannot be: torch calls
them for the whole process, and says only then whose tensors it has. Each goes torch's own way for what belongs to no
sharded model; a DTensor belongs to one if it is on its mesh (``registry.is_ours``). All are undone when the last
sharded model is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trueshard import _torch
from trueshard.model.registry import is_ours
from trueshard.optim import stepping
from trueshard.sharding import additions
from trueshard.sharding.dtensor_compat import (
    WholeNumber,
    agree_to_gather,
    agree_to_read,
    assign_data,
    check_functional_call,
    differentiate,
    explain_mixed,
)
from trueshard.sharding.stages import keep_gradients


@dataclass(frozen=True)
class Patch:
    """A function of torch that is replaced, or a hook that is called for all of the process."""

    name: str
    """Name of the function, class or operators."""
    does: str
    why: str
    """Reason why it cannot be left to the objects of one model."""
    install: Callable[[], Callable[[], Any]]
    """Function that installs it, and returns what undoes it."""
    of_stages: bool = False
    """True if it is for stages of a pipeline alone: importing torch's schedules takes a second."""


PATCHES = (
    Patch(
        "a hook before the step of every optimizer",
        "refuses one that holds parameters from before `shard()`; binds one made after it",
        "such an optimizer was never given to `shard()`",
        stepping.watch_steps,
    ),
    Patch(
        "`Optimizer.zero_grad`, `Module.zero_grad`",
        "also drop gradients that `accumulate(last=False)` left unreduced",
        "torch has no hook for it; the optimizer may be new, the module one around the model",
        lambda: _torch.call_after_zero_grad(stepping.drop_unreduced),
    ),
    Patch(
        "hooks on assignments to every module",
        "take new parameters into the model, refuse to replace sharded ones",
        "torch registers these hooks for the process alone",
        additions.watch_assignments,
    ),
    Patch(
        "`DistributedDataParallel.__init__`",
        "refuses a module that holds a sharded model",
        "it asks nothing of the modules that it is given",
        lambda: _torch.check_replicas(additions.refuse_replicas),
    ),
    Patch(
        "`torch.autograd.grad`, `backward(inputs=)`",
        "reduce gradients of sharded parameters",
        "they are plain functions",
        lambda: _torch.differentiate_with(differentiate),
    ),
    Patch(
        "`torch.func.functional_call`",
        "refuses another value for a sharded parameter",
        "it is a plain function, and FSDP2 would compute with its own value",
        lambda: _torch.check_functional_calls(check_functional_call),
    ),
    Patch(
        "DTensor's scaling of gradients (`GradScaler`)",
        "finds an inf on any rank, in any gradient of the list",
        "DTensor has one table of operators",
        lambda: _torch.find_every_inf(is_ours),
    ),
    Patch(
        "DTensor's list operators of EMA and SWA",
        "take plain tensors (buffers, copies from before `shard()`) beside DTensors",
        "DTensor has one table of operators",
        lambda: _torch.average_mixed_lists(is_ours),
    ),
    Patch(
        "DTensor's operators of `clip_grad_norm_`",
        "take gradients of several meshes (experts)",
        "DTensor has one table of operators",
        lambda: _torch.clip_over_meshes(is_ours),
    ),
    Patch(
        "`DTensor.item()`, `float()`, `bool()`, `__format__`",
        "give the number of the whole, on every rank",
        "the number (`p.norm()`) is a new DTensor, which no attribute of `p` reaches",
        lambda: _torch.read_numbers_of_the_whole(is_ours, agree_to_read),
    ),
    Patch(
        "`DTensor.full_tensor()`",
        "says so where some ranks call it alone",
        "gradients and results (`p.norm()`) are plain DTensors, whatever class a parameter has",
        lambda: _torch.gather_after(is_ours, agree_to_gather),
    ),
    Patch(
        "DTensor's random operators",
        "draw what one device draws from the same seed",
        "DTensor has one table of operators",
        lambda: _torch.draw_as_one_device(is_ours),
    ),
    Patch(
        "`DTensor.data`",
        "`p.data = w` writes to the shards",
        "it is an attribute of the class; gradients, which FSDP2 makes anew, have it too",
        lambda: _torch.assign_data_with(is_ours, assign_data),
    ),
    Patch(
        "`DTensor` `+ - * /`, `copy_`, `add_`, `sub_`, `mul_`, `lerp_`, `numpy()`, `p[i] = x`",
        "compute with plain tensors of one shape, and numbers with any",
        "operands are results of operators, plain DTensors, whatever class a parameter has",
        lambda: _torch.take_plain_tensors(is_ours, agree_to_read, WholeNumber.apply),
    ),
    Patch(
        "DTensor's distances, extremes, norms, `any`, `all`",
        "are those of the whole, whatever rows a rank has, and so are their gradients",
        "DTensor has one table of operators",
        lambda: _torch.reduce_over_the_whole(is_ours, agree_to_read),
    ),
    Patch(
        "DTensor's `view`, `unbind`",
        "view a gathered copy where DTensor refuses to cross the sharded dimension",
        "DTensor has one table of operators",
        lambda: _torch.view_what_is_cut(is_ours),
    ),
    Patch(
        "DTensor's in-place operators, `DTensor.data` of a view",
        "write through a view (`p[:2].zero_()`) to the shards",
        "a view is a new DTensor, of a gathered copy",
        lambda: _torch.write_through_views(is_ours),
    ),
    Patch(
        "DTensor's operators of layers (`mm`, `embedding`, …)",
        "name a parameter that is read where its unit is not gathered, and the remedy",
        "DTensor has one table of operators",
        lambda: _torch.refuse_mixed(is_ours, explain_mixed),
    ),
    Patch(
        "`DTensor.storage()`",
        "names `trueshard.save` to a serializer (safetensors, `save_pretrained` of an inner model)",
        "serializers are plain functions that are given tensors",
        lambda: _torch.refuse_storage(is_ours, lambda: additions.refuse_to_write("a serializer (safetensors)")),
    ),
    Patch(
        "torch's trial of a stage, at the first step of a schedule",
        "keeps gradients that are there, of steps of another schedule (another length)",
        "a schedule is given a stage, not a model; torch drops the gradients of any FSDP2 module",
        lambda: _torch.try_stages_in(keep_gradients),
        of_stages=True,
    ),
    Patch(
        "`DTensor.__ne__` (torch 2.11)",
        "`a != b`, for which that torch has no rule",
        "DTensor has one table of operators",
        lambda: _torch.compare_tensors(is_ours),
    ),
    Patch(
        "FSDP2's backward function and `FSDPParam`",
        "take forward-mode derivatives; on torch 2.11 frozen parameters of integers",
        "FSDP2 names these classes itself; other FSDP2 models get the same rule, which torch lacks",
        _torch.complete_units,
    ),
)
"""Every patch, in the order of installation."""
