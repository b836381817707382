"""A Muon step at Llama 3.2 1B's shapes: by owners, against the way of ``full_tensor()``.

- With P elements in the matrices, N ranks and b bytes an element, owners take each gradient from the ranks that hold
  rows of it and send those ranks their rows of the update:

      2 (N-1)/N² · P · b   received bytes per rank, the mean over ranks

- By gathering: the momentum stays sharded, every rank gathers each whole update, runs Newton-Schulz on it and keeps its
  rows. That is (N-1)/N · P · b bytes, N/2 times as many, and N times the work.
- Time and bytes are those of ``LAYERS`` blocks, as many as a small machine can hold; both grow with the blocks. How
  even the shares of the owners are is reckoned from the shapes of all blocks.
- The slowest rank's wall time counts, and the processor time of all ranks together. The first step is counted, not
  timed; parameters are compared after the last one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from benchmarks import gradients
from benchmarks.llama import Shape, shard_by_hand
from benchmarks.paired import clocked, fours, interval, median
from benchmarks.processes import on_ranks
from benchmarks.table import Table, Tell
from tests.traffic import Traffic

RANKS = 4
LAYERS, SAMPLES = 2, 3
OWNERS = (2, 4, 8)
"""Ranks for which the owners' shares are reckoned."""
EVEN = 1.1
"""The largest share of a rank, over the mean, that is allowed."""

# The embeddings are not Muon's, so their size does not matter.
_1B = Shape(layers=16, hidden=2048, intermediate=8192, heads=32, key_value_heads=8, vocabulary=256)


def matrices(model: Any) -> list[nn.Parameter]:
    """What Muon is for: the matrices of the blocks."""
    return [parameter for parameter in model.model.layers.parameters() if parameter.ndim == 2]


class GatheringMuon(torch.optim.Optimizer):
    """torch's Muon on sharded parameters, as one writes it: gather each update, orthogonalize it, keep the own rows."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(parameters, torch.optim.Muon(parameters).defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One step; rows divide evenly by the ranks."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._update(parameter, group)

    def _update(self, parameter: DTensor, group: dict[str, Any]) -> None:
        grad, state = parameter.grad, self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        momentum = state["momentum_buffer"]
        momentum.lerp_(grad, 1 - group["momentum"])
        update = (grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum).full_tensor()
        update = _zeropower_via_newtonschulz(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
        mesh = parameter.device_mesh
        rows = update.chunk(mesh.size())[mesh.get_local_rank()]
        rate = _adjust_lr(group["lr"], group["adjust_lr_fn"], parameter.shape)
        parameter.to_local().mul_(1 - group["lr"] * group["weight_decay"]).add_(rows, alpha=-rate)


@dataclass(frozen=True)
class Found:
    """One rank's figures; pairs are (by gathering, ours)."""

    received: tuple[float, float]
    """bytes in a step"""
    held: tuple[int, int]
    """bytes of state after it"""
    elements: int
    """in the matrices, over all ranks"""
    wall: list[list[float]]
    """Seconds of two steps of each way, one pair a sample."""
    processor: list[list[float]]
    apart: float
    """The largest difference between the parameters of the two ways."""


def run(tell: Tell) -> Table:
    """Bytes, state and time on ``RANKS`` processes; the owners' shares on each of ``OWNERS``."""
    found = on_ranks(measure, RANKS)
    rows, numbers = [], [asdict(each) for each in found]
    limit = 2 * (RANKS - 1) / RANKS**2 * found[0].elements * 4
    for label, key, most in (("bytes received", "received", limit), ("bytes of state", "held", None)):
        theirs, ours = torch.tensor([getattr(each, key) for each in found], dtype=torch.float64).T
        end = "" if most is None else f"{most:,.0f}"
        cells = f"{ours.mean():,.0f}", f"{theirs.mean():,.0f}", f"{theirs.mean() / ours.mean():.3f}"
        rows.append((f"{label} a rank, mean", *cells, "", end))
        rows.append((f"{label} a rank, most", f"{ours.max():,.0f}", f"{theirs.max():,.0f}", "", "", ""))
        tell(f"{label}: {cells[2]} times fewer")
    wall = torch.tensor([each.wall for each in found], dtype=torch.float64).amax(dim=0)
    processor = torch.tensor([each.processor for each in found], dtype=torch.float64).sum(dim=0)
    for label, samples in (("wall time", wall), ("processor time", processor)):
        ratios = samples[:, 0] / samples[:, 1]
        low, high = interval(ratios)
        rows.append((label, "1.000", f"{median(ratios):.3f}", f"{median(ratios):.3f}", f"{low:.2f} to {high:.2f}", ""))
        tell(f"{label}: {median(ratios):.2f} times less")
    rows.append(("parameters apart", f"{max(each.apart for each in found):.0e}", "", "", "", ""))
    for ranks in OWNERS:
        shares = even(ranks)
        for label, share in shares.items():
            rows.append(
                (f"{label} of an owner, most over mean, {ranks} ranks", f"{share:.3f}", "", "", "", f"{EVEN:.3f}")
            )
        numbers.append({"ranks": ranks, **shares})
    return Table(
        "muon", "A Muon step by owners, over the way of `full_tensor()`", _note(), _COLUMNS, tuple(rows), numbers
    )


_COLUMNS = ("figure", "by owners", "by gathering", "times less", "95% interval", "limit")


def _note() -> str:
    return (
        f"Llama 3.2 1B's matrices, float32, `torch.optim.Muon`; {LAYERS} of its {_1B.layers} blocks over {RANKS} gloo "
        "processes for bytes, state and time; all blocks for the shares of the owners. By gathering: the momentum "
        "stays sharded, each update is gathered on every rank by `full_tensor()`, every rank runs Newton-Schulz on it "
        "and keeps its rows. Bytes are counted from the collectives; their limit is 2(N-1)/N² · elements · 4. Times "
        "are ratios of the slowest rank's wall time and of all ranks' processor time; the two ways alternate, four "
        f"steps make a sample, {SAMPLES} samples. Where ranks have no cores of their own, as here with more ranks than "
        "cores, wall time cannot show what uneven owners would cost: their shares stand below."
    )


def measure() -> Found:
    """Both ways on this rank."""
    import trueshard

    shape = replace(_1B, layers=LAYERS)
    models = [shape.build() for _ in range(2)]
    elements = sum(parameter.numel() for parameter in matrices(models[0]))
    shard_by_hand(models[0], RANKS)
    optimizers: list[torch.optim.Optimizer] = [
        GatheringMuon(matrices(models[0])),
        torch.optim.Muon(matrices(models[1])),
    ]
    trueshard.shard(models[1], optimizers[1])
    for model in models:
        gradients.give(matrices(model))
    received = []
    for optimizer in optimizers:
        with Traffic() as traffic:
            optimizer.step()
        received.append(traffic.total)
    held = [_held(optimizer) for optimizer in optimizers]
    samples = fours(lambda which: clocked(optimizers[which].step), warm_up=0, samples=SAMPLES)
    apart = gradients.apart(*map(matrices, models))
    return Found(
        (received[0], received[1]),
        (held[0], held[1]),
        elements,
        samples[..., 0].tolist(),
        samples[..., 1].tolist(),
        apart,
    )


def _held(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of this rank's state."""
    tensors = [each for entries in optimizer.state.values() for each in entries.values()]
    here = [gradients.local(each) if isinstance(each, DTensor) else each for each in tensors]
    return sum(each.untyped_storage().nbytes() for each in here)


def even(ranks: int) -> dict[str, float]:
    """Most over mean, of what the owners among ``ranks`` hold and compute, for all blocks."""
    from trueshard.optim.owner import assign

    with torch.device("meta"):
        shapes = [tuple(parameter.shape) for parameter in matrices(_1B.build())]
    owners = assign(shapes, ranks)
    shares = {}
    for label, measure in (("elements", math.prod), ("operations", _operations)):
        loads = [0] * ranks
        for shape, owner in zip(shapes, owners, strict=True):
            loads[owner] += measure(shape)
        shares[label] = max(loads) * ranks / sum(loads)
    return shares


def _operations(shape: tuple[int, int]) -> int:
    """Floating-point operations of one Newton-Schulz iteration: two products with a Gram matrix, and its square."""
    small, large = sorted(shape)
    return 2 * small * small * (2 * large + small)
