"""Tie parameters over the stages of a pipeline, each a sharded model on ranks of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trueshard.distributed import all_reduce, device_of, gather_objects
from trueshard.errors import own_errors
from trueshard.model import agreement, registry
from trueshard.optim.ties import Tie, check_stages, tie_of
from trueshard.sharding.hooks import Runtime


@own_errors()
def tie_over(stages: DeviceMesh, parameters: Mapping[str, nn.Parameter | None]) -> None:
    """Tie parameters over the stages of a pipeline, once, after ``shard()``: those that are one in the whole model::

        embedding = stage.wte.weight if is_first else stage.lm_head.weight if is_last else None
        trueshard.tie_over(mesh["stage"], {"transformer.wte.weight": embedding})

    The copies take the first stage's values. At the end of every step of a schedule their gradients are the sum over
    all copies, as on one device; optimizers with the same settings then keep the copies bit-equal. ``clip_grad_norm_``
    counts such a parameter once, and ``save`` writes it once, under the name given here.

    Collective over ``stages``. At the end of a schedule's step the ranks that hold copies of one shard send each other
    its gradient. For schedules of ``torch.distributed.pipelining`` that give a rank one stage, as GPipe and 1F1B do.

    Args:
        stages: 1-D: the ranks that hold the other stages at this rank's place, in their order.
        parameters: the parameter's (first) name in the whole model → this stage's copy, or None where it has none; the
            same names in the same order on every stage.

    Raises:
        ValueError: a parameter belongs to no sharded stage, is on one stage alone, or its copies differ in shape, dtype
            or sharding; on every rank.
        TypeError: ``stages`` is no mesh.
    """
    check_stages("stages", stages)
    with agreement.together(stages):
        runtimes = [None if p is None else _stage_of(name, p) for name, p in parameters.items()]
        described = {name: None if p is None else _description(p) for name, p in parameters.items()}
    everyone = gather_objects(described, stages)
    _check_alike(everyone)
    # NCCL makes the group's communicator in its first call, which all ranks have to make; copies travel between some.
    all_reduce(torch.zeros((), device=device_of(stages)), stages)
    for (name, parameter), runtime in zip(parameters.items(), runtimes, strict=True):
        if parameter is not None and runtime is not None:
            holders = [number for number, theirs in enumerate(everyone) if theirs[name] is not None]
            tie = Tie(parameter, name, stages, holders)
            tie.take_values()
            runtime.ties.append(tie)


@contextlib.contextmanager
def keep_gradients(stages: Sequence[nn.Module]) -> Iterator[None]:
    """Keep the gradients of sharded stages, and what is known of their ties, as they are now."""
    runtimes = [runtime for runtime in registry.models() if runtime.root in stages]
    parameters = [parameter for runtime in runtimes for parameter in runtime.parameters()]
    grads = [(parameter, parameter.grad) for parameter in parameters]
    added_up = [tie for runtime in runtimes for tie in runtime.ties if not tie.is_pending]
    for parameter in parameters:  # FSDP2 would add to them in place
        parameter.grad = None
    try:
        yield
    finally:
        for tie in added_up:
            tie.forget()
        for parameter, grad in grads:
            parameter.grad = grad


def _stage_of(name: str, parameter: Any) -> Runtime:
    runtime: Runtime | None = registry.owner_of([parameter])
    if runtime is None:
        raise ValueError(f"{name!r} is no parameter of a sharded stage: call trueshard.shard(stage, ...) before")
    if tie_of(parameter) is not None:
        raise ValueError(f"{name!r} is tied over the stages already")
    return runtime


def _description(parameter: torch.Tensor) -> dict[str, Any]:
    assert isinstance(parameter, DTensor)
    mesh = parameter.device_mesh
    return {
        "shape": tuple(parameter.shape),
        "dtype": str(parameter.dtype),
        "requires_grad": parameter.requires_grad,
        "sharding": f"{parameter.placements} on ranks {tuple(mesh.shape)}",
        "place in its mesh": mesh.get_coordinate(),
    }


def _check_alike(everyone: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError unless all stages name the same, each parameter has several copies, and they are alike."""
    for number, theirs in enumerate(everyone):
        if list(theirs) != list(everyone[0]):
            raise ValueError(
                f"stage {number} ties {list(theirs)} and stage 0 {list(everyone[0])}: give all stages the same names, "
                "with None where a stage has no copy"
            )
    for name in everyone[0]:
        copies = [(number, theirs[name]) for number, theirs in enumerate(everyone) if theirs[name] is not None]
        if len(copies) < 2:
            raise ValueError(f"{name!r} is given by {len(copies)} of {len(everyone)} stages; a tie has two copies")
        first, expected = copies[0]
        for number, description in copies[1:]:
            for what, value in expected.items():
                if description[what] != value:
                    raise ValueError(
                        f"{name!r}: its {what} is {value} on stage {first} and {description[what]} on stage {number}; "
                        "build the copies alike, and shard their stages on slices of one mesh"
                    )
