"""The bytes that a step receives and the memory at its peak, over the least there can be, for each peer.

With P elements of which T are trained, N ranks, f = (N-1)/N, b bytes an element, every unit freed after forward:

    received    f·b·P + f·b·(P - embedding) + f·b·T          forward, backward (which reads no embedding), gradients
    at the peak (b·P + b·T + 2·b·T) / N + b·largest unit     shards, gradients, AdamW's state, what is gathered

where units are the embedding, each block, and the final norm with the head. Nobody reaches the second: it leaves out
whole gradients, activations, and that the next unit is gathered while one computes.

- Bytes are counted from the collectives. The sizes divide by the ranks, so there is no padding.
- The peak is what tensors hold when the step begins, and the highest rise in it by the allocator's own account. Batches
  are small, so that activations, which are the same for all, are a small part. Of a weight that lies in a mapped file,
  only this rank's rows count: the others were never read.
- Each peer has processes of its own: what another holds is not its memory.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from benchmarks import kernel, memory
from benchmarks.llama import Shape, blocks_of
from benchmarks.peers import OURS, WAYS, reason
from benchmarks.peers.recipe import Recipe
from benchmarks.peers.training import REFERENCE, TOLERANCE, Training
from benchmarks.processes import on_ranks
from benchmarks.table import Over, Table, Tell
from tests.meter import gloo_lets_go, meter, peak_and_rest
from tests.traffic import Traffic

RANKS = 2
STEPS = 3
"""Of which the last is measured: the first ones make optimizer state."""
# The head is somewhat larger than a block, as in models of a few billion parameters.
SHAPE = Shape(layers=8, hidden=256, intermediate=768, heads=4, vocabulary=4096, sequences=1, tokens=8)
SMALL = replace(SHAPE, layers=2, hidden=64, intermediate=192, vocabulary=1024)


def run(tell: Tell, quick: bool = False) -> Table:
    """Every way, with all parameters trained and with adapters alone; ``quick``: the first, of a small model."""
    rows: list[tuple[str, ...]] = []
    numbers, over = [], []
    with tempfile.TemporaryDirectory() as folder:
        recipe = Recipe(SMALL if quick else SHAPE, Path(folder) / "model")
        on_ranks(recipe.write, 1)
        cases = (("all trained", recipe), ("LoRA", replace(recipe, lora=True)))
        for label, recipe in cases[: 1 if quick else None]:
            (least,) = on_ranks(limits, 1, recipe, RANKS)
            by_way = {way: on_ranks(measure, RANKS, way, recipe)[0] for way in WAYS}
            by_way = {way: _held_against(used, by_way[REFERENCE]) for way, used in by_way.items()}
            for way, used in by_way.items():
                rows.append((label, way, *_cells(used, least)))
                over += _over(label, way, used, by_way[OURS])
            numbers.append({"case": label, "limits": asdict(least), **{way: asdict(u) for way, u in by_way.items()}})
            tell(f"{label}: " + ", ".join(f"{row[1]} {row[3]} and {row[5]}" for row in rows if row[0] == label))
    return Table(
        name="peers_limits",
        title="Bytes and memory of a step, over their limits",
        note=_note(),
        columns=("model", "way", "received", "over limit", "MiB at the peak", "over limit"),
        rows=tuple(rows),
        numbers=numbers,
        over=over,
    )


@dataclass(frozen=True)
class Used:
    """What a step of one rank took, bytes; or why there was none."""

    received: float = 0
    peak: int = 0
    losses: tuple[float, ...] = ()
    """Of all steps, nats."""
    failed: str = ""


def limits(recipe: Recipe, ranks: int) -> Used:
    """The formulas above."""
    model = recipe.build()
    embedding = model.get_input_embeddings().weight.numel()  # type: ignore[operator]
    everything = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    blocks = [sum(parameter.numel() for parameter in block.parameters()) for block in blocks_of(model)]
    largest = max(embedding, *blocks, everything - sum(blocks) - embedding)
    received = (ranks - 1) / ranks * 4 * (everything + everything - embedding + trained)
    return Used(received, int(4 * (everything + 3 * trained) / ranks + 4 * largest))


def measure(way: str, recipe: Recipe) -> Used:
    """One way on this rank."""
    warnings.simplefilter("ignore")
    held: list[int] = []
    received: list[float] = []
    losses: list[float] = []

    def steps() -> Iterator[Callable[[], object]]:
        training = WAYS[way](recipe)
        for i in range(STEPS):
            batch = recipe.shape.batch(dist.get_world_size() * i + dist.get_rank())
            held.append(memory.held() - _never_read(training, recipe.folder))
            yield lambda batch=batch: losses.append(training.step(batch)[0])  # type: ignore[misc]
        received.append(_received(training, batch))

    try:
        # Without oneDNN: how much it takes beside its results depends on the processor.
        with gloo_lets_go(), torch.backends.mkldnn.flags(enabled=False):
            measured = meter(steps())
    except Exception as error:
        if way == OURS:
            raise
        return Used(failed=reason(error))
    rise, _ = peak_and_rest([change.bytes for change in measured.steps[-1]])
    return Used(received[0], held[-1] + rise, tuple(losses))


def _held_against(used: Used, reference: Used) -> Used:
    """``used``, failed where other losses than the reference's say that something else was trained."""
    apart = max((abs(a - b) for a, b in zip(used.losses, reference.losses, strict=False)), default=0.0)
    return replace(used, failed=f"trains something else: losses {apart:.0e} apart") if apart > TOLERANCE else used


def _never_read(training: Training, folder: Path) -> int:
    maps = kernel.mapped(folder)
    unread = 0
    for parameter in training.model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if any(begin <= local.data_ptr() < end for begin, end, _ in maps):
            unread += local.untyped_storage().nbytes() - local.nbytes
    return unread


def _received(training: Training, batch: torch.Tensor) -> float:
    with Traffic() as traffic:
        training.step(batch)
    return traffic.total


def _cells(used: Used, least: Used) -> tuple[str, ...]:
    if used.failed:
        return ("", used.failed, "", "")
    return (
        f"{used.received:,.0f}",
        f"{used.received / least.received:.4f}",
        f"{used.peak / 2**20:.2f}",
        f"{used.peak / least.peak:.3f}",
    )


def _over(label: str, way: str, used: Used, ours: Used) -> list[Over]:
    if way == OURS:
        return []
    if used.failed:
        cell = used.failed.partition(":")[0] if used.losses else "cannot"
        return [Over(f"{figure}, {label}", way, cell) for figure in ("bytes received", "peak memory")]
    return [
        Over(f"bytes received, {label}", way, f"{ours.received / used.received:.3f}"),
        Over(f"peak memory, {label}", way, f"{ours.peak / used.peak:.3f}"),
    ]


def _note() -> str:
    return (
        f"A Llama of {SHAPE.layers} blocks over {RANKS} gloo processes, float32, AdamW, clipping; every unit is freed "
        "after forward, but for the final norm and the head, which Accelerate and transformers keep to backward, and "
        "the root, which they keep too; both gather the embedding for backward instead. Bytes a rank receives, counted "
        "from the collectives, clipping's norm included. "
        "Memory is what tensors hold when a step begins and the highest rise in it by the allocator's own events, "
        "gloo's buffers left out. The limits are the formulas in `benchmarks/peers_limits.py`: P·b/N for shards, "
        "T·(b + 2b)/N for gradients and AdamW's state, and the largest unit gathered, of the embedding, the blocks and "
        "the final norm with the head; nobody reaches it, since whole gradients, activations and what is gathered "
        "ahead come on top. One process group a way; one step, since these figures do not vary."
    )
