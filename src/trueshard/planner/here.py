"""A plan for the very model and optimizers that ``shard()`` was given, on the devices it runs on."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from trueshard import _torch, distributed
from trueshard.choices import Choices
from trueshard.planner.hardware import hardware_here
from trueshard.planner.inputs.fakes import twin
from trueshard.planner.inputs.workloads import workload_of
from trueshard.planner.search.search import NothingFits, Space, choose
from trueshard.planner.trace import Trace
from trueshard.planner.workload import Study
from trueshard.plans import Plan


def plan_here(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    mesh: DeviceMesh,
    choices: Choices,
) -> Plan:
    """The best plan that fits ``choices.memory``. Collective: the first rank works it out, all get it.

    Args:
        model: the user's, unsharded; it stays as it is.
        optimizers: over its parameters; they too.
        mesh: the ranks.
        choices: ``shard()``'s options.

    Raises:
        NothingFits: on every rank, if nothing fits.
        ValueError: on every rank, if the model cannot be simulated; the message says what to do.
    """
    told: tuple[Plan | None, str, Study | None] = None, "", None
    failure: Exception | None = None
    if not any(mesh.get_coordinate() or ()):
        try:
            told = _work_out(model, optimizers, mesh, choices), "", None
        except NothingFits as error:
            failure, told = error, (None, str(error), _without_events(error.study))
        except Exception as error:
            failure, told = error, (None, str(error) or type(error).__name__, None)
    plan, message, study = distributed.gather_objects(told, mesh)[0]
    if failure is not None:
        raise failure
    if plan is None:
        raise ValueError(message) if study is None else NothingFits(message, study)
    assert isinstance(plan, Plan)
    return plan


def _without_events(study: Study) -> Study:
    """Small enough to be sent to every rank."""
    return dataclasses.replace(study, trace=Trace(), timeline=dataclasses.replace(study.timeline, spans=[]))


def _work_out(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], mesh: DeviceMesh, choices: Choices
) -> Plan:
    with _torch.fake_tensors():
        copied, stand_ins = twin(model)
    for i, optimizer in enumerate(optimizers):
        for g, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                stand_ins[id(parameter)].__dict__[_MEMBER] = i, g
    workload = workload_of(copied, optimizer=lambda made: [_alike(each, i, made) for i, each in enumerate(optimizers)])
    device = hardware_here(torch.device(mesh.device_type))
    study = choose(
        Space(
            workload=workload,
            hardware=device,
            ranks=mesh.size(),
            ranks_per_node=min(device.ranks_per_node, mesh.size()),
            budget=choices.budget(),
            choices=choices,
            replicate=mesh.size(0) if mesh.ndim == 2 else 1,
            microbatch=1,
            accumulation=1,
            global_batch=None,
            optimizer="own",
        )
    )
    warnings.warn(
        f"planned for one sample of {workload.sequence} tokens in a forward on {device.name}; for another batch make "
        "the plan with trueshard.plan(model, batch=...) and give it to shard(plan=...)",
        stacklevel=5,
    )
    return study.plan


_MEMBER = "_planned_group"
"""Attribute of a stand-in: which group of which optimizer holds it. It goes along when the model is copied."""


def _alike(optimizer: torch.optim.Optimizer, number: int, model: nn.Module) -> torch.optim.Optimizer:
    """``optimizer`` as it is, on the parameters of ``model`` that stand for its own; without state and hooks."""
    made = copy.copy(optimizer)
    # What a scheduler put in the place of step() would step the user's own optimizer.
    made.__dict__ = {key: value for key, value in vars(optimizer).items() if key != "step" and "_hooks" not in key}
    _torch.make_hookable(made)
    made.state = defaultdict(dict)
    made.param_groups = []
    for g, group in enumerate(optimizer.param_groups):
        members = [each for each in model.parameters() if getattr(each, _MEMBER, None) == (number, g)]
        if members:
            made.param_groups.append({**group, "params": members})
    return made
