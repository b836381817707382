"""``trueshard.plan``, what ``shard()`` asks of the planner, and plans as files. The work itself: see ``solve``."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trueshard import distributed
from trueshard.distributed import Axes
from trueshard.errors import own_errors, warn_user
from trueshard.model.names import nearest
from trueshard.options import Options, Precision, Recomputation, Reshard
from trueshard.planner import process
from trueshard.planner.hardware import Hardware, hardware, hardware_here, with_links
from trueshard.planner.inputs.fake_tensors import refuse_sharded
from trueshard.planner.schedules import Pipeline
from trueshard.planner.trace import Trace
from trueshard.planner.workload import NothingFits
from trueshard.plans import Plan
from trueshard.text import logger, timed


@dataclass(frozen=True, kw_only=True)
class Request(Options):
    """Arguments of ``trueshard.plan``: the options of ``shard()``, of which some are chosen unless given, and a job."""

    model: nn.Module | Callable[[], Any] | str | os.PathLike[str]
    hardware: str | os.PathLike[str] | Hardware = "h100"
    ranks: int = 8
    batch: Any = None
    ranks_per_node: int | None = None
    """Devices of a node; None: as the hardware usually comes."""
    link: str | None = None
    """Link inside a node in the place of the hardware's own: a word (``"pcie5"``) or a rate, see ``with_links``."""
    network: str | None = None
    """A device's rate between nodes, likewise: ``"400Gb"``."""
    host_memory: str | int | None = None
    """Main memory of a node (``"512GiB"``, or bytes), for what is offloaded; None: as the hardware usually has."""
    replicate: int | None = None
    """Replicas of the model; None: free to choose where anything is, else 1."""
    sequence: int | None = None
    """Tokens of a sample; None: what the model takes."""
    microbatch: int | None = None
    """Samples in one forward; None: free to choose with ``global_batch``, else 1."""
    accumulation: int | None = None
    """Microbatches a step; likewise."""
    global_batch: int | None = None
    """Samples of all ranks in a step."""
    optimizer: str | Callable[[nn.Module], Any] | None = None
    """``"adamw"``, ``"sgd"``, ``"muon"``, a class of torch.optim, or a function (model) → optimizer(s)."""
    loss: Callable[[nn.Module, Any], torch.Tensor] | None = None
    """(model, batch) → scalar; None: what forward returns, as the assumptions say."""
    clip: float | None = 1.0
    """Norm to which gradients are clipped; None: not at all."""
    score: Callable[[nn.Module, Any], Any] | None = None
    """(model, batch) → anything: a pass without gradient beside the step."""
    beside: tuple[tuple[str, int | None], ...] = ()
    """(name, bytes) of what lies on every rank beside; None bytes: another model that is sharded alike."""
    snapshots: tuple[int, int | None] = (0, None)
    """Snapshots of a rank's state in the memory of its host, and the steps between two."""
    storage_dtype: str | None = None
    """Dtype in which parameters are stored; None: as made, float32 for a configuration."""
    reshard_after_forward: Reshard = "auto"
    activation_checkpointing: Recomputation = "auto"
    mixed_precision: Precision = "auto"
    """``"auto"``: ``"bf16"`` for a model given as words (a configuration, a name, a file), but not on a CPU; for a
    module or a function None, as ``shard`` has it."""
    offload: Any = None
    """``"auto"``: if nothing fits without; None: that where anything is free, else not."""
    plan: Plan | None = None
    """Plan to forecast; nothing is chosen, and the other choices of ``shard`` are left out."""
    pipeline: int = 1
    """Stages of a pipeline, each of some of the blocks on ranks of its own; of ``accumulation`` microbatches."""
    schedule: str | None = None
    """``"1f1b"``, ``"gpipe"`` or ``"interleaved"``; None: by ``virtual``."""
    virtual: int = 1
    """Chunks of blocks a rank, of an interleaved schedule."""
    axes: bool = False
    """Choose ``tensor``, ``context``, ``experts`` and ``pipeline``, too, from what they are upwards."""
    thorough: bool = False
    """Study plans until none is expected to be faster, however long that takes; else it ends in about ten seconds."""
    imbalance: float = 1.0
    """Tokens that arrive for the experts of the slowest rank, over their mean over ranks, at least 1."""

    def __post_init__(self) -> None:
        for key in ("ranks", "ranks_per_node", "replicate", "sequence", "microbatch", "accumulation", "global_batch"):
            count = getattr(self, key)
            if count is not None and (type(count) is not int or count < 1):
                raise ValueError(f"{key}={count!r} must be a whole number, 1 or more")
        self.pipe()
        if not 1 <= self.imbalance < math.inf:
            raise ValueError(
                f"imbalance={self.imbalance!r} must be 1 or more: it is the slowest rank's share of tokens"
            )

    def choices(self) -> Options:
        """Return the options of ``shard()``."""
        options = {field.name: getattr(self, field.name) for field in dataclasses.fields(Options)}
        if self.mixed_precision == "auto":
            is_words = isinstance(self.model, (str, os.PathLike))
            options["mixed_precision"] = "bf16" if is_words and self.plan is None and self.device().streams else None
        return Options(**options | {"offload": self.offload or "none"})

    def pipe(self) -> Pipeline:
        """Return the pipeline; raise ValueError for what no model could be run by."""
        schedule = self.schedule or ("interleaved" if self.virtual > 1 else "1f1b")
        if self.pipeline == 1 and (self.schedule or self.virtual > 1):
            raise ValueError("schedule and virtual are of a pipeline: give its stages, pipeline, or leave them out")
        return Pipeline(self.pipeline, schedule, self.virtual)

    def device(self) -> Hardware:
        """Return the hardware; raises ValueError if it is not known."""
        device = self.hardware
        device = device if isinstance(device, Hardware) else hardware(os.fspath(device))
        return with_links(device, self.link, self.network)


@own_errors()
@timed("plan")
def plan(
    model: nn.Module | Callable[[], Any] | str | os.PathLike[str],
    hardware: str | Hardware = "h100",
    ranks: int = 8,
    memory: str | int | None = None,
    batch: Any = None,
    **choices: Any,
) -> Plan:
    """The fastest plan that fits, worked out on fake tensors: no GPU, no weights, no process group.

    It is worked out in a process of its own, to which functions are sent by cloudpickle: what they use of an imported
    module is imported there again.

    Args:
        model: an unsharded module, which stays as it is; a function that makes one; a folder with a transformers
            ``config.json``, or that file; ``"file.py:factory"``; or a name: of a known architecture
            (``"llama-3-70b"``, see ``trueshard plan --help``), of the hub (``"Qwen/Qwen3-8B"``). What is given as
            words computes in bfloat16, as by the command (not on a CPU); a module or a function as by ``shard``, in
            the dtype of its parameters. ``mixed_precision`` changes either.
        hardware: a device of the catalogue (``"h100"``, ``"a100"``, …), or a TOML file of that form.
        ranks: processes, one a device.
        memory: what torch may reserve on each rank (``"70GiB"``, or bytes); None: all that the device has.
        batch: one rank's microbatch: example tensors (their first dimension is the microbatch), ``(microbatch,
            sequence)``, or a function of these two; None: made up from what the model takes.
        choices: the options of ``shard`` and the other fields of ``Request``.

    Returns:
        A plan with its units and its ``forecast``, for ``shard(plan=...)``.

    Raises:
        NothingFits: no plan fits; the message says by how much, and the cheapest change that would.
        ValueError: the model, the hardware or a choice is not understood.
    """
    known = [field.name for field in dataclasses.fields(Request)]
    if unknown := [key for key in choices if key not in known]:
        raise TypeError(f"plan() has no argument {unknown[0]!r}.{nearest(unknown[0], known)}")
    if isinstance(model, nn.Module):
        refuse_sharded(model)
    request = Request(model=model, hardware=hardware, ranks=ranks, memory=memory, batch=batch, **choices)
    result: Plan = process.call("trueshard.planner.choose_plan:best_plan", request)
    logger.info("planned for %s", _job_text(result))
    return result


def _job_text(plan: Plan) -> str:
    """Return what a plan was made for, in words: samples, precision, optimizer, hardware."""
    forecast = plan.forecast
    assert forecast is not None
    compute = plan.mixed_precision and plan.mixed_precision.compute
    tokens = f" of {forecast.sequence:,} tokens" if forecast.sequence > 1 else ""
    return (
        f"{forecast.microbatch} sample{'s' if forecast.microbatch > 1 else ''}{tokens} in a "
        f"forward, computing in {compute or 'the dtype of the parameters'}, with {forecast.optimizer}, on "
        f"{forecast.ranks:,} × {forecast.hardware}"
    )


def plan_for(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], axes: Axes, choices: Options) -> Plan:
    """Return the best plan that fits ``choices.memory`` for the arguments of ``shard()``.

    Collective: the first rank works it out, all get it, or all raise: ``NothingFits``, or ``ValueError`` if the model
    cannot be simulated.
    """
    mesh, choices = axes.all, choices.on(axes.sizes)
    result: Plan | Exception = Plan()
    failure: Exception | None = None
    is_first = not any(mesh.get_coordinate() or ())
    if is_first:
        try:
            device = hardware_here(torch.device(mesh.device_type))
            arguments = (model, list(optimizers), device, tuple(axes.data.shape), choices)
            result = process.call("trueshard.planner.choose_plan:best_plan_for", *arguments)
        except Exception as error:
            failure = error
            text = str(error) or type(error).__name__
            result = _without_events(error) if isinstance(error, NothingFits) else ValueError(text)
    result = distributed.gather_objects(result, mesh)[0]
    if failure is not None:
        raise failure
    if isinstance(result, Exception):
        raise result
    if is_first:
        warn_user(
            f"planned for {_job_text(result)}; for another batch make the plan with trueshard.plan(model, batch=...) "
            "and give it to shard(plan=...); mixed_precision= changes the dtype"
        )
    return result


def _without_events(error: NothingFits) -> NothingFits:
    """Return an error that is small enough to be sent to every rank."""
    timeline = dataclasses.replace(error.study.timeline, spans=[])
    return NothingFits(str(error), dataclasses.replace(error.study, trace=Trace(), timeline=timeline))


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan from a JSON file: ``Plan.to_json``'s, or what ``trueshard plan --json`` printed.

    Raises:
        ValueError: not a plan; the message names file and key.
        OSError: the file cannot be read.
    """
    if not Path(path).is_file():
        raise ValueError(f"there is no plan {str(path)!r}; `trueshard plan --out FILE` writes one")
    try:
        return Plan.from_json(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def check_writable(*paths: Path | None) -> None:
    """Raise ValueError if, as far as can be told without trying, no file can be made at one of the paths."""
    for path in filter(None, paths):
        if path.is_dir():
            raise ValueError(f"{path} is a folder; give the name of a file")
        if not path.parent.is_dir():
            raise ValueError(f"{path} cannot be written: there is no folder {path.parent}")
        if not os.access(path.parent, os.W_OK):
            raise ValueError(f"{path} cannot be written: {path.parent} takes no new files")
