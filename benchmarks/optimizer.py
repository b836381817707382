"""The time of an optimizer's step and of clipping, against the same torch optimizer on DTensors.

- The matrices are many and small, so that a step is the host's own work: what dispatch costs, and nothing else.
- By hand: ``fully_shard`` on each block and the root, then the optimizer made from the sharded parameters, so that each
  of its operations goes through DTensor. Ours: the same optimizer, given to ``shard()``.
- Twice: step after step on the same gradients, which is the host's own work and what the limits are for; and each step
  after ``zero_grad`` and a forward and backward pass, outside the clock, as in training. There gradients are new
  tensors every time, and what a step touches comes from memory instead of a cache.
- After a ``shard()``, every optimizer of the process is looked at before it steps: one walk over its parameters, which
  is in the time of both ways.
- Parameters, or what clipping made of the gradients, are compared at the end: a faster step that computed something
  else would be no result.
- Memory is counted in processes of its own, one way in each: bytes under all tensors that are alive after some steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks import gradients, memory
from benchmarks.paired import Ratio, clocked, fours, interval, median
from benchmarks.processes import on_ranks
from benchmarks.table import Over, Table, Tell

RANKS = 2
MATRICES, SIDE = 288, 64
"""Matrices, and their rows and columns."""
WARM_UP = 5
"""Steps of each before the first sample, and before memory is counted."""


class Block(nn.Module):
    """``matrices`` weights, float32 ``[SIDE, SIDE]``."""

    def __init__(self, matrices: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(SIDE, SIDE) / SIDE**0.5 for _ in range(matrices))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[n, SIDE]`` → ``[n, SIDE]``."""
        for weight in self.weights:
            x = nn.functional.rms_norm(x @ weight, (SIDE,))
        return x


def build(matrices: int, blocks: int) -> nn.Sequential:
    """``matrices`` weights in ``blocks`` blocks, the same on every rank and at every call."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(matrices // blocks) for _ in range(blocks)))


@dataclass(frozen=True)
class Case:
    """One row."""

    label: str
    samples: int
    limit: float
    """How many times faster it has to be, step after step."""
    kind: str = "AdamW"
    """A class of ``torch.optim``."""
    words: dict[str, Any] = field(default_factory=dict)
    """Its arguments."""
    matrices: int = MATRICES
    blocks: int = 32
    """Blocks among which the matrices are divided, each of them a unit."""
    clip: float | None = None
    """Not a step, but clipping to this part of the gradients' norm; above one, there is nothing to scale."""


CASES = (
    Case("AdamW, fused", 60, 4.0, words={"fused": True}),
    Case("AdamW, fused, one block", 60, 4.0, words={"fused": True}, blocks=1),
    Case("AdamW, foreach", 60, 1.6, words={"foreach": True}),
    Case("AdamW, for-loop", 30, 6.0, words={"foreach": False}),
    Case("SGD with momentum, foreach", 60, 1.6, "SGD", {"lr": 1e-3, "momentum": 0.9, "foreach": True}),
    Case("clip_grad_norm_", 60, 3.0, clip=0.5),
    Case("clip_grad_norm_, one block", 60, 3.0, clip=0.5, blocks=1),
    Case("clip_grad_norm_, norm below the maximum", 60, 3.0, clip=2.0),
)


def run(tell: Tell, quick: bool = False) -> Table:
    """Every case, over two gloo processes; ``quick``: the first, of few matrices."""
    rows, numbers, over = [], [], []
    for case in [replace(CASES[0], samples=1, matrices=8, blocks=2)] if quick else CASES:
        measured = on_ranks(measure, RANKS, case)
        cells: list[str] = []
        for times in (measured[0].wall, measured[0].processor, measured[0].after_backward):
            samples = torch.tensor(times)
            ratios = samples[:, 0] / samples[:, 1]
            low, high = interval(ratios.double())
            cells += [f"{median(ratios):.2f}", f"{low:.2f} to {high:.2f}"]
        warm, later = (torch.tensor(times) for times in (measured[0].wall, measured[0].after_backward))
        for words, times in (("", warm), (", after a backward", later)):
            over.append(Over(f"{case.label}{words}", "by hand", Ratio.of(times[:, 1] / times[:, 0]).short()))
        distance = max(rank.apart for rank in measured)
        by_hand, ours = (on_ranks(held, RANKS, case, sharded) for sharded in (False, True))
        more = max(b / a for a, b in zip(by_hand, ours, strict=True))
        cells.insert(2, f"{case.limit:.1f}")
        rows.append((case.label, *cells, str(case.samples), f"{more:.3f}", f"{distance:.0e}"))
        numbers.append(asdict(case) | asdict(measured[0]) | {"apart": distance, "held_by_hand": by_hand, "held": ours})
        tell(f"{case.label}: {cells[0]} times faster, memory {more:.3f}")
    return Table(
        name="optimizer",
        title="Speed of an optimizer's step, over DTensor's",
        note=(
            f"{MATRICES} matrices of {SIDE}×{SIDE} in {Case.blocks} blocks, float32, over {RANKS} gloo processes; "
            "step after step on the same gradients; in two columns each step follows a backward pass, outside the "
            "clock, so that what it touches comes from memory. By hand: `fully_shard` on each block and the root, "
            "and torch's optimizer or `torch.nn.utils.clip_grad_norm_` on the DTensors. How many times faster "
            "TrueShard is: both alternate in one run, four steps make a sample; medians of the samples' ratios, with "
            "their 95% interval by bootstrap. Memory is what a rank's tensors hold after some steps, over that by "
            "hand. The last column is the largest difference between what the two ways made of the parameters (of the "
            "gradients, where they are clipped)."
        ),
        columns=(
            "step",
            "faster, wall time",
            "95% interval",
            "at least",
            "faster, processor time",
            "95% interval",
            "after a backward",
            "95% interval",
            "samples",
            "memory",
            "apart",
        ),
        rows=tuple(rows),
        numbers=numbers,
        over=over,
    )


@dataclass(frozen=True)
class Found:
    """One rank's samples."""

    wall: list[list[float]]
    """Seconds by hand and ours, of two steps each, one pair a sample."""
    processor: list[list[float]]
    """The same of processor time."""
    after_backward: list[list[float]]
    """As ``wall``, of steps that each follow a backward pass."""
    apart: float
    """The largest difference between the two results."""


def measure(case: Case) -> Found:
    """Run one case on this rank."""
    ways = [prepare(case, sharded) for sharded in (False, True)]

    def one(which: int) -> torch.Tensor:
        ways[which].backward()
        return clocked(ways[which].act)

    cold = fours(one, warm_up=WARM_UP, samples=case.samples)
    samples = fours(lambda which: clocked(ways[which].act), warm_up=WARM_UP, samples=case.samples)
    results = [[p if case.clip is None else p.grad for p in way.parameters if p.grad is not None] for way in ways]
    return Found(samples[..., 0].tolist(), samples[..., 1].tolist(), cold[..., 0].tolist(), gradients.apart(*results))


@dataclass(frozen=True)
class Way:
    """One of the two ways."""

    backward: Callable[[], object]
    """Makes new gradients; of the same values, where parameters are the same."""
    act: Callable[[], object]
    """What is timed."""
    parameters: list[nn.Parameter]
    """Sharded."""


def prepare(case: Case, sharded: bool) -> Way:
    """A sharded model, and what is timed.

    Args:
        case: which step.
        sharded: by ``shard()``; otherwise by hand.
    """
    import trueshard

    model = build(case.matrices, case.blocks)
    kind = getattr(torch.optim, case.kind)
    if sharded:
        optimizer = kind(model.parameters(), **case.words)
        trueshard.shard(model, optimizer)
    else:
        mesh = init_device_mesh("cpu", (RANKS,))
        for module in (*model, model):
            fully_shard(module, mesh=mesh)
        optimizer = kind(model.parameters(), **case.words)
    parameters = list(model.parameters())
    batch = torch.randn(4, SIDE, generator=torch.Generator().manual_seed(dist.get_rank()))

    def backward() -> None:
        optimizer.zero_grad()
        model(batch).pow(4).mean().backward()  # the mean square is normalized, so it would have no gradient

    if case.clip is None:
        return Way(backward, optimizer.step, parameters)
    backward()
    largest = case.clip * trueshard.clip_grad_norm_(parameters, math.inf).item()
    clip: Callable[..., torch.Tensor] = trueshard.clip_grad_norm_ if sharded else torch.nn.utils.clip_grad_norm_
    return Way(backward, lambda: clip(parameters, largest), parameters)


def held(case: Case, sharded: bool) -> int:
    """Bytes under this rank's living tensors after ``WARM_UP`` steps of one way."""
    way = prepare(case, sharded)
    for _ in range(WARM_UP):
        way.backward()
        way.act()
    tensors = memory.held()
    assert way.parameters  # and what belongs to them was alive until here
    return tensors
