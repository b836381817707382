"""``trueshard.plan``: what the user says becomes a space of plans, and the best of it a Plan."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from trueshard import _torch
from trueshard.choices import DEFAULTS, Choices, is_free
from trueshard.files import replace_text
from trueshard.log import timed
from trueshard.model import names
from trueshard.planner.forecasting import Cluster, study
from trueshard.planner.hardware import Hardware
from trueshard.planner.hardware import hardware as named_hardware
from trueshard.planner.inputs.workloads import workload_of
from trueshard.planner.search.search import Space, choose
from trueshard.planner.simulation.preflight import preflight
from trueshard.planner.workload import Job, Study
from trueshard.plans import Plan, dtype_name


def plan(
    model: nn.Module | Callable[[], Any] | str | os.PathLike[str],
    hardware: str | Hardware = "h100",
    ranks: int = 8,
    memory: str | int | None = None,
    batch: Any = None,
    **choices: Any,
) -> Plan:
    """The fastest plan that fits, worked out on fake tensors: no GPU, no weights, no process group.

    Args:
        model: an unsharded module, which stays as it is; a function that makes one; a folder with a transformers
            ``config.json``, or that file; or ``"file.py:factory"``.
        hardware: a device of the catalogue (``"h100"``, ``"a100"``, …), or a TOML file of that form.
        ranks: processes, one a device.
        memory: what torch may reserve on each rank (``"70GiB"``, or bytes); None: all that the device has.
        batch: one rank's microbatch: example tensors (their first dimension is the microbatch), ``(microbatch,
            sequence)``, or a function of these two; None: made up from what the model takes.
        choices: see ``work_out``.

    Returns:
        A plan with its units and its ``forecast``, for ``shard(plan=...)``.

    Raises:
        NothingFits: no plan fits; the message says by how much, and the cheapest change that would.
        ValueError: the model, the hardware or a choice is not understood.
    """
    known = inspect.signature(work_out).parameters
    if unknown := [key for key in choices if key not in known]:
        raise TypeError(f"plan() has no argument {unknown[0]!r}.{names.nearest(unknown[0], known)}")
    return work_out(model, hardware, ranks, memory, batch, **choices).plan


@timed("plan")
def work_out(
    model: nn.Module | Callable[[], Any] | str | os.PathLike[str],
    hardware: str | Hardware = "h100",
    ranks: int = 8,
    memory: str | int | None = None,
    batch: Any = None,
    *,
    ranks_per_node: int | None = None,
    replicate: int | None = None,
    sequence: int | None = None,
    microbatch: int | None = None,
    accumulation: int | None = None,
    global_batch: int | None = None,
    optimizer: str | Callable[[nn.Module], Any] | None = None,
    loss: Callable[[nn.Module, Any], torch.Tensor] | None = None,
    clip: float | None = 1.0,
    storage_dtype: str | None = None,
    units: Any = "auto",
    reshard_after_forward: Any = "auto",
    activation_checkpointing: Any = "auto",
    mixed_precision: MixedPrecisionPolicy | str | None = None,
    compile: bool = False,
    offload: str | None = None,
    plan: Plan | None = None,
) -> Study:
    """``plan`` with all that is known of the plan: what is printed and drawn.

    Args:
        model, hardware, ranks, memory, batch: as of ``plan``.
        ranks_per_node: devices of a node; None: as the hardware usually comes.
        replicate: replicas of the model; None: free to choose where anything is, else 1.
        sequence: tokens of a sample; None: what the model takes.
        microbatch: samples in one forward; None: free to choose with ``global_batch``, else 1.
        accumulation: microbatches a step; likewise.
        global_batch: samples of all ranks in a step.
        optimizer: ``"adamw"``, ``"sgd"``, ``"muon"``, a class of torch.optim, or a function (model) → optimizer(s).
        loss: (model, batch) → scalar; None: what forward returns, as the assumptions say.
        clip: norm to which gradients are clipped; None: not at all.
        storage_dtype: in which parameters are stored; None: as made, float32 for a configuration.
        units, mixed_precision, compile: as of ``shard``.
        reshard_after_forward, activation_checkpointing: as of ``shard``; ``"auto"``: free to choose.
        offload: as of ``shard``; ``"auto"``: if nothing fits without; None: that where anything is free, else not.
        plan: what this plan costs; nothing is chosen, and the other choices of ``shard`` are left out.

    Raises:
        NothingFits: no plan fits.
        ValueError: the model, the hardware or a choice is not understood.
    """
    _check_counts(
        ranks=ranks,
        ranks_per_node=ranks_per_node,
        replicate=replicate,
        sequence=sequence,
        microbatch=microbatch,
        accumulation=accumulation,
        global_batch=global_batch,
    )
    device = hardware if isinstance(hardware, Hardware) else named_hardware(os.fspath(hardware))
    workload = workload_of(
        model if isinstance(model, (nn.Module, str, Path)) or not isinstance(model, os.PathLike) else Path(model),
        sequence=sequence,
        optimizer=optimizer,
        batch=batch,
        loss=loss,
        clip=clip,
        storage_dtype=storage_dtype,
    )
    microbatch = _samples(batch) if microbatch is None else microbatch
    choices = Choices(
        units=units,
        reshard_after_forward=reshard_after_forward,
        activation_checkpointing=activation_checkpointing,
        mixed_precision=mixed_precision,
        compile=compile,
        offload=offload or "none",
        memory=memory,
    )
    choices.replace(memory=None).check_alone(plan, defaults=FREE)
    batch_is_free = global_batch is not None and (microbatch is None or accumulation is None)
    is_open = batch_is_free or offload == "auto" or is_free(reshard_after_forward) or is_free(activation_checkpointing)
    if offload is None and is_open:
        choices = choices.replace(offload="auto")
    node = min(device.ranks_per_node, ranks) if ranks_per_node is None else ranks_per_node
    space = Space(
        workload=workload,
        hardware=device,
        ranks=ranks,
        ranks_per_node=node,
        budget=choices.budget(),
        choices=choices,
        replicate=replicate if replicate or is_open else 1,
        microbatch=microbatch,
        accumulation=accumulation,
        global_batch=global_batch,
        optimizer=optimizer if isinstance(optimizer, str) else "adamw" if optimizer is None else "own",
    )
    told = _preflight(space, plan)
    if plan is not None:
        found = _of_plan(space, plan)
    elif is_open:
        found = choose(space)
    else:
        found = _of_words(space)
    return dataclasses.replace(found, assumptions=(*found.assumptions, *told))


def _check_counts(**counts: Any) -> None:
    for key, count in counts.items():
        if count is not None and (type(count) is not int or count < 1):
            raise ValueError(f"{key}={count!r} must be a whole number, 1 or more")


def _preflight(space: Space, plan: Plan | None) -> list[str]:
    """What may not be meant, one sentence each.

    Raises:
        ValueError: what would fail in the first step.
    """
    settled = {key: getattr(DEFAULTS, key) for key, value in vars(space.choices).items() if is_free(value)}
    choices = space.choices.replace(**settled)
    mesh = space.cluster(space.replicate or 1).mesh
    problems = preflight(
        space.workload,
        ranks=mesh,
        microbatch=space.microbatch or 1,
        plan=plan,
        choices=choices,
    )
    errors = [problem for problem in problems if problem.severity == "error"]
    if errors:
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        raise ValueError(f"{str(errors[0]).removeprefix('error: ')}{more}")
    return [str(problem).removeprefix("warning: ") for problem in problems]


FREE = Choices(reshard_after_forward="auto", activation_checkpointing="auto")
"""``plan()``'s defaults."""


def _samples(batch: Any) -> int | None:
    """How many samples a batch holds, or its size says; None where it is neither."""
    if isinstance(batch, (tuple, list)) and len(batch) == 2 and all(type(each) is int for each in batch):
        return int(batch[0])
    return next((len(each) for each in _torch.tensors_in(batch) if each.ndim), None)


def _of_words(space: Space) -> Study:
    """The study of the one plan that the words mean."""
    assert space.replicate is not None
    cluster = Cluster(space.hardware, space.ranks, space.ranks_per_node, space.replicate)
    return study(_job(space, cluster, choices=space.choices), cluster, space.budget)


def _of_plan(space: Space, plan: Plan) -> Study:
    if plan.ranks and space.replicate is None:
        space = dataclasses.replace(space, replicate=plan.ranks[0] if len(plan.ranks) == 2 else 1)
    cluster = Cluster(space.hardware, space.ranks, space.ranks_per_node, space.replicate or 1)
    return study(_job(space, cluster, plan=plan), cluster, space.budget)


def _job(space: Space, cluster: Cluster, **rest: Any) -> Job:
    microbatch, accumulation = space.microbatch or 1, space.accumulation or 1
    if space.global_batch is not None and space.global_batch != microbatch * accumulation * space.ranks:
        raise ValueError(
            f"global_batch={space.global_batch} is not microbatch {microbatch} × accumulation {accumulation} × "
            f"{space.ranks} ranks; leave one of them out"
        )
    return Job(
        space.workload,
        cluster.mesh,
        microbatch=microbatch,
        accumulation=accumulation,
        optimizer=space.optimizer,
        **rest,
    )


def precision(param: str | None, reduce: str | None) -> MixedPrecisionPolicy | None:
    """torch's policy for two words such as ``"bf16"`` or ``"float32"``; None where neither is said.

    Raises:
        ValueError: a word that is no floating-point dtype.
    """
    if param is None and reduce is None:
        return None
    return MixedPrecisionPolicy(param_dtype=_dtype("param-dtype", param), reduce_dtype=_dtype("reduce-dtype", reduce))


def _dtype(option: str, word: str | None) -> torch.dtype | None:
    found: torch.dtype | None = None if word is None else getattr(torch, dtype_name(option, word))
    return found


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """A plan from a JSON file: ``Plan.to_json``'s, or what ``trueshard plan --json`` printed.

    Raises:
        ValueError: not a plan; the message names file and key.
        OSError: the file cannot be read.
    """
    if not Path(path).is_file():
        raise ValueError(f"there is no plan {str(path)!r}; `trueshard plan --out FILE` writes one")
    text = Path(path).read_text(encoding="utf-8")
    try:
        with contextlib.suppress(json.JSONDecodeError):  # from_json says it
            data = json.loads(text)
            if isinstance(data, dict) and isinstance(data.get("plan"), dict):
                text = json.dumps(data["plan"])
        return Plan.from_json(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def check_writable(path: str | os.PathLike[str]) -> None:
    """A file can be made at ``path``, as far as can be told without making it.

    Raises:
        ValueError: there is no such folder, it cannot be written to, or ``path`` is a folder.
    """
    target = Path(path)
    if target.is_dir():
        raise ValueError(f"{path} is a folder; give the name of a file")
    if not target.parent.is_dir():
        raise ValueError(f"{path} cannot be written: there is no folder {target.parent}")
    if not os.access(target.parent, os.W_OK):
        raise ValueError(f"{path} cannot be written: {target.parent} takes no new files")


def write_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan as JSON; a file that is there is replaced when the new one is complete."""
    replace_text(Path(path), plan.to_json() + "\n")
