"""A Muon step at Llama 3.2 1B's shapes: by owners, against the way of ``full_tensor()``.

- With P elements in the matrices, N ranks and b bytes an element, owners take each gradient from the ranks that hold
  rows of it and send those ranks their rows of the update:

      2 (N-1)/N² · P · b   received bytes per rank, the mean over ranks

- By gathering: the momentum stays sharded, every rank gathers each whole update, runs Newton-Schulz on it and keeps its
  rows. That is (N-1)/N · P · b bytes, N/2 times as many, and N times the work.
- Bytes do not depend on the iterations, so they are counted without any, one way in each group of processes; and time
  is that of ``TIMED`` blocks: as much as a small machine can do. All grow with the blocks. How even the shares of the
  owners are is reckoned from the shapes of all blocks.
- The slowest rank's wall time counts, and the processor time of all ranks together. Parameters are compared at the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from benchmarks import gradients, memory
from benchmarks.llama import Shape, shard_by_hand
from benchmarks.paired import clocked, few, fours, interval, median
from benchmarks.processes import on_ranks
from benchmarks.table import Table, Tell
from tests.traffic import Traffic

RANKS = 4
COUNTED, TIMED = 2, 1
"""Blocks in which bytes are counted, and those that are timed."""
SAMPLES = 3
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

    def __init__(self, parameters: Sequence[nn.Parameter], **words: Any) -> None:
        super().__init__(parameters, torch.optim.Muon(parameters, **words).defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step; rows divide evenly by the ranks."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._update(parameter, group)

    def _update(self, parameter: Any, group: dict[str, Any]) -> None:
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
class Counted:
    """One way's bytes on one rank."""

    received: list[int]
    """In the first step, and in the second."""
    held: int
    """By all tensors, after both: parameters, gradients, state."""
    elements: int
    """In the matrices, over all ranks."""


@dataclass(frozen=True)
class Timed:
    """One rank's samples."""

    wall: list[list[float]]
    """Seconds of two steps by gathering and by owners, one pair a sample."""
    processor: list[list[float]]
    """The same of processor time."""
    apart: float
    """The largest difference between the parameters of the two ways."""


def run(tell: Tell, quick: bool = False) -> Table:
    """Bytes and time on ``RANKS`` processes; the owners' shares on each of ``OWNERS``. ``quick``: narrow blocks."""
    shape = replace(_1B, hidden=128, intermediate=512) if quick else _1B
    gathering, owners = (on_ranks(count, RANKS, shape, owned) for owned in (False, True))
    timed = on_ranks(measure, RANKS, shape, few(SAMPLES, quick))
    elements = gathering[0].elements
    limit = 2 * (RANKS - 1) / RANKS**2 * elements * 4
    rows = [
        _bytes("received in a step", [c.received[1] for c in owners], [c.received[1] for c in gathering], limit),
        _bytes("received in the first", [c.received[0] for c in owners], [c.received[0] for c in gathering]),
        _bytes("held after it", [c.held for c in owners], [c.held for c in gathering]),
    ]
    tell(f"{rows[0][5]} times fewer bytes")
    wall = torch.tensor([rank.wall for rank in timed], dtype=torch.float64).amax(dim=0)
    processor = torch.tensor([rank.processor for rank in timed], dtype=torch.float64).sum(dim=0)
    for label, samples in (("wall time", wall), ("processor time", processor)):
        ratios = samples[:, 0] / samples[:, 1]
        low, high = interval(ratios)
        rows.append(
            (label, "1", "", f"{median(ratios):.2f}", "", f"{median(ratios):.2f}", f"{low:.2f} to {high:.2f}", "")
        )
        tell(f"{label}: {median(ratios):.2f} times less")
    shares = {ranks: even(ranks) for ranks in OWNERS}
    for ranks, share in shares.items():
        for label, most in share.items():
            rows.append((f"{label} an owner, of {ranks}", "1", f"{most:.3f}", "", "", "", "", f"{EVEN:.3f}"))
    return Table(
        name="muon",
        title="A Muon step by owners, over the way of `full_tensor()`",
        note=_note(max(rank.apart for rank in timed)),
        columns=("figure", "by owners", "most", "by gathering", "most", "times less", "95% interval", "limit"),
        rows=tuple(rows),
        numbers=[
            {"gathering": asdict(a), "owners": asdict(b), **asdict(c)}
            for a, b, c in zip(gathering, owners, timed, strict=True)
        ],
    )


def _bytes(label: str, ours: list[int], theirs: list[int], limit: float | None = None) -> tuple[str, ...]:
    mean, other = sum(ours) / len(ours), sum(theirs) / len(theirs)
    cells = (f"{mean:,.0f}", f"{max(ours):,.0f}", f"{other:,.0f}", f"{max(theirs):,.0f}", f"{other / mean:.3f}", "")
    return (f"bytes {label}", *cells, "" if limit is None else f"{limit:,.0f}")


def _note(apart: float) -> str:
    return (
        f"Llama 3.2 1B's matrices, float32, `torch.optim.Muon`, {RANKS} gloo processes: {COUNTED} of the "
        f"{_1B.layers} blocks for bytes, {TIMED} for time, all for the shares of owners. By gathering: the momentum "
        "stays sharded, each update is gathered on every rank by `full_tensor()`, every rank runs Newton-Schulz on it "
        "and keeps its rows. Means over ranks, beside them the most that a rank has. Bytes received are counted from "
        "the collectives; their limit is 2(N-1)/N² · elements · 4; bytes held are those of all tensors: parameters, "
        "gradients, state. Times are ratios of the slowest rank's wall time and of all ranks' processor time; the two "
        f"ways alternate, four steps make a sample, medians of {SAMPLES}. After the last step the parameters of the "
        f"two ways are {apart:.0e} apart."
    )


def count(shape: Shape, owned: bool) -> Counted:
    """Bytes of one way on this rank, in steps without iterations."""
    model, optimizer, elements = prepare(replace(shape, layers=COUNTED), owned, ns_steps=0)
    received = []
    for _ in range(2):
        with Traffic() as traffic:
            optimizer.step()
        received.append(round(traffic.total))
    tensors = memory.held()
    assert list(model.parameters())  # and what belongs to them was alive until here
    return Counted(received, tensors, elements)


def measure(shape: Shape, samples: int) -> Timed:
    """Both ways on this rank."""
    (first, gathering, _), (second, owners, _) = (
        prepare(replace(shape, layers=TIMED), owned) for owned in (False, True)
    )
    steps = gathering.step, owners.step
    seconds = fours(lambda which: clocked(steps[which]), warm_up=1, samples=samples)
    apart = gradients.apart(matrices(first), matrices(second))
    return Timed(seconds[..., 0].tolist(), seconds[..., 1].tolist(), apart)


def prepare(shape: Shape, owned: bool, **words: Any) -> tuple[nn.Module, torch.optim.Optimizer, int]:
    """A sharded model with gradients, its optimizer, and the elements in its matrices.

    Args:
        shape: of the model.
        owned: by ``shard()``; otherwise by gathering.
        words: for Muon.
    """
    import trueshard

    model = shape.build()
    elements = sum(parameter.numel() for parameter in matrices(model))
    if owned:
        optimizer: torch.optim.Optimizer = torch.optim.Muon(matrices(model), **words)
        trueshard.shard(model, optimizer)
    else:
        shard_by_hand(model, RANKS)
        optimizer = GatheringMuon(matrices(model), **words)
    gradients.give(matrices(model))
    return model, optimizer, elements


def even(ranks: int) -> dict[str, float]:
    """Most over mean, of what the owners among ``ranks`` hold and compute, for all blocks."""
    from trueshard.optim.owners import assign

    with torch.device("meta"):
        shapes = [tuple(parameter.shape) for parameter in matrices(_1B.build())]
    owners = assign(shapes, ranks)
    shares = {}
    for label, measure in (("elements of", math.prod), ("operations of", _operations)):
        loads = [0] * ranks
        for shape, owner in zip(shapes, owners, strict=True):
            loads[owner] += measure(shape)
        shares[label] = max(loads) * ranks / sum(loads)
    return shares


def _operations(shape: Sequence[int]) -> int:
    """Floating-point operations of one Newton-Schulz iteration: two products with a Gram matrix, and its square."""
    small, large = sorted(shape)
    return 2 * small * small * (2 * large + small)
