"""The planner's inputs and outputs as data: a ``Workload``, a ``Job`` of it on ranks, and the ``Study`` of that job."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from trueshard.axes import AXES, DATA, sizes_of
from trueshard.errors import TrueShardError
from trueshard.options import DEFAULTS, Options
from trueshard.planner.failures import FailureCost
from trueshard.planner.price import Bill
from trueshard.planner.timeline import Timeline
from trueshard.planner.trace import Trace
from trueshard.plans import Forecast, Plan


@dataclass(frozen=True)
class Workload:
    """A model and a training step of it, as functions that are called on fake CPU tensors: no weights, no data."""

    name: str
    """Model's name in tables, for example that of its folder."""
    model: Callable[[], nn.Module]
    """Build the model, in training mode, unsharded."""
    optimizers: Callable[[nn.Module], Sequence[torch.optim.Optimizer]]
    """Build the optimizers over the unsharded model's parameters."""
    batch: Callable[[int, int], Any]
    """(microbatch, sequence) → one rank's microbatch, in any form that ``loss`` accepts."""
    loss: Callable[[nn.Module, Any], torch.Tensor]
    """(model, batch) → a scalar with a gradient; calls the model once."""
    sequence: int
    """Tokens of one sample; 1 for samples that are no sequences."""
    clip: float | None = 1.0
    """Norm to which gradients are clipped; None: no clipping."""
    score: Callable[[nn.Module, Any], Any] | None = None
    """(model, batch) → anything: a pass without gradient that stands beside the step, simulated by itself."""
    snapshots: tuple[int, int | None] = (0, None)
    """Snapshots of a rank's state that lie in the memory of its host, and the steps between two."""
    beside: tuple[tuple[str, int | None], ...] = ()
    """(name, bytes) of what lies on every rank all the time beside the model and its optimizers; None bytes: another
    model that is sharded alike."""
    assumptions: tuple[str, ...] = ()
    """Assumptions made in building it, one sentence each, for the reader of a forecast."""


@dataclass(frozen=True)
class Job:
    """A workload on ranks, to be simulated."""

    workload: Workload
    ranks: tuple[int, ...]
    """Ranks over which gradients are averaged, as ``Plan.ranks``: (shard,) or (replicate, shard), where those of a
    context shard, too. The ranks that share matrices come on top of them, as the plan or the choices say."""
    rank: int = 0
    """Global rank to simulate; shards of indivisible dimensions differ between ranks, and rank 0 holds the most."""
    microbatch: int = 1
    """Samples in one forward."""
    accumulation: int = 1
    """Microbatches a step."""
    plan: Plan | None = None
    """Plan to apply; None: ``choices`` decide."""
    optimizer: str = "adamw"
    """Optimizer's name in tables."""
    choices: Options = DEFAULTS
    """Options of ``shard()``."""
    imbalance: float = 1.0
    """Tokens that arrive for the experts of the rank, where ranks share experts, over their mean over ranks."""
    in_flight: int = 0
    """Microbatches that a stage of a pipeline runs forward before the first runs backward; 0: no pipeline."""
    on_cpu: bool = False
    """Train on CPUs: attention by the CPU's kernels, and offloaded shards in the one memory there is."""
    recorder: Callable[[], Any] | None = None
    """Build the recorder of events; None: one that models no memory inside operators."""

    @property
    def axes(self) -> dict[str, int]:
        """Sizes of the job's mesh, see ``mesh_axes``."""
        return mesh_axes(self.ranks, self.plan or self.choices)


def mesh_axes(ranks: tuple[int, ...], how: Plan | Options) -> dict[str, int]:
    """Return the sizes of a mesh by axis, in order; tensor and context only where ranks share anything.

    ``ranks``: those over which gradients are averaged, as ``Plan.ranks``.
    """
    shared = {name: size for name, size in sizes_of(how).items() if size > 1}
    sizes = dict(zip(DATA[-len(ranks) :], ranks, strict=True))
    for axis in AXES:
        if axis.name in shared and axis.gradients == "sharded":  # ``ranks`` has them among those that shard
            if sizes["shard"] % shared[axis.name]:
                words = f"{axis.name}={shared[axis.name]} does not divide the {sizes['shard']} ranks that shard"
                raise ValueError(words)
            sizes["shard"] //= shared[axis.name]
    return sizes | shared


@dataclass(frozen=True)
class Alternative:
    """Another plan that the search evaluated."""

    words: str
    """The difference in a few words, for example ``"reshard never, recompute full, microbatch 2"``."""
    forecast: Forecast


@dataclass(frozen=True)
class StepPhase:
    """A phase of a step of reinforcement learning, or of a training run."""

    name: str
    """``"generate"``, ``"score"`` or ``"update"``; ``"step"``, ``"evaluation"``, ``"saving"``, ``"snapshot"`` or
    ``"verifying"``."""
    live_bytes: int
    """Peak of the memory that tensors take on a rank."""
    seconds: float | None
    """None: not known, as of a server."""
    needs: Mapping[str, int]
    """Bytes beyond what stays from phase to phase, by what takes them; of the update and the score, of all."""
    notes: tuple[str, ...] = ()
    every: int = 1
    """Steps from one to the next."""


@dataclass(frozen=True)
class Study:
    """A plan, its forecast, and the simulation behind the forecast."""

    plan: Plan
    forecast: Forecast
    trace: Trace
    """Steady step of the simulated rank."""
    timeline: Timeline
    reasons: tuple[str, ...] = ()
    """Reason for each choice, one sentence each."""
    assumptions: tuple[str, ...] = ()
    alternatives: list[Alternative] = field(default_factory=list)
    """All other plans that were evaluated."""
    score: Trace | None = None
    """Pass of ``Workload.score``."""
    failures: FailureCost | None = None
    """Costs of lost processes; None for one device, or processors."""
    imbalances: tuple[tuple[float, Forecast], ...] = ()
    """(imbalance of experts, forecast of the plan at it), in order; none unless ranks share experts."""
    phases: tuple[StepPhase, ...] = ()
    """Phases of reinforcement learning, where the forecast is that of the update, or of a training run."""
    bill: Bill | None = None
    """Costs of a whole run, where its length is known."""


class NotFaster(ValueError):
    """No plan is expected to be faster than one that is known; has the tokens a second of a rank that are expected."""


class NothingFits(TrueShardError, ValueError):
    """No plan fits the budget; the message says by how much and what would."""

    def __init__(self, message: str, study: Study) -> None:
        super().__init__(message)
        self.study = study
        """Study of the plan that takes the least memory."""

    def __reduce__(self) -> Any:
        return type(self), (str(self), self.study)
