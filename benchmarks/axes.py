"""A step on a mesh (shard, tensor), over what others make of the same PyTorch parts.

- Transformers: its own plan and styles, then FSDP2 by hand. TorchTitan: its styles of ``parallelize_module`` for Llama,
  sequences split between matrices, then FSDP2 by hand; beside it TrueShard with ``sequence``.
- A step is forward, backward, clipping and fused AdamW. Ways take turns; the slowest rank's wall time counts.
- All ways begin with the same values and see the same batches: the norms of their gradients are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.llama import Shape, shard_by_hand
from benchmarks.paired import Ratio, clocked, few, rounds
from benchmarks.processes import on_ranks
from benchmarks.table import Table, Tell
from tests.traffic import Traffic

RANKS, TENSOR = 4, 2
SAMPLES = 9
WAYS = ("TrueShard", "transformers", "TrueShard, sequence", "TorchTitan")
PAIRS = ((0, 1), (2, 3))
"""Which is held against which."""

_SMALL = Shape(layers=4, hidden=64, intermediate=128, heads=4, vocabulary=256, sequences=2, tokens=32)
_WIDE = Shape(layers=2, hidden=512, intermediate=1408, heads=8, vocabulary=2048, sequences=2, tokens=128)


@dataclass(frozen=True)
class Timed:
    """One rank's samples."""

    wall: list[list[float]]
    """Seconds of each way, a row a sample."""
    received: list[float]
    """Bytes received in a step of each way."""
    apart: float
    """The largest difference of a way's gradient norm from the first's, over it."""


def run(tell: Tell, quick: bool = False) -> Table:
    """Ratios of a step's time, and of the bytes that a rank receives."""
    rows, numbers = [], []
    for label, shape in (("0.2M parameters", _SMALL), ("8M parameters", _WIDE))[: 1 if quick else 2]:
        timed = on_ranks(measure, RANKS, shape, few(SAMPLES, quick))
        wall = torch.tensor([rank.wall for rank in timed], dtype=torch.float64).amax(dim=0)
        received = torch.tensor([rank.received for rank in timed], dtype=torch.float64).mean(dim=0)
        for ours, theirs in PAIRS:
            ratio = Ratio.of(wall[:, ours] / wall[:, theirs])
            share = float(received[ours] / received[theirs])
            tell(f"{label}, over {WAYS[theirs]}: {ratio.median:.2f}")
            rows.append((label, WAYS[ours], WAYS[theirs], *ratio.cells(), f"{share:.3f}"))
        numbers += [asdict(rank) for rank in timed]
    apart = max(number["apart"] for number in numbers)
    return Table(
        name="axes",
        title="A step on a mesh (shard, tensor)",
        note=(
            f"Llama, float32, {RANKS} gloo processes: {RANKS // TENSOR} × {TENSOR}; forward, backward, clipping to 1, "
            "fused AdamW. Ratios of the slowest rank's wall time, below 1 is faster; the ways alternate, medians of "
            f"{SAMPLES} samples. Bytes are those that a rank receives in a step, counted from the collectives. The "
            f"gradient norms of the ways are at most {apart:.0e} apart."
        ),
        columns=("model", "way", "over", "time", "95% interval", "10% to 90%", "bytes"),
        rows=tuple(rows),
        numbers=numbers,
    )


def measure(shape: Shape, samples: int) -> Timed:
    """All ways on this rank."""
    mesh = init_device_mesh("cpu", (RANKS // TENSOR, TENSOR), mesh_dim_names=("shard", "tensor"))
    steps = [_prepared(shape, mesh, way) for way in WAYS]
    norms = [step() for step in steps]
    received = []
    for step in steps:
        with Traffic() as traffic:
            step()
        received.append(traffic.total)
    seconds = rounds(lambda which: clocked(steps[which]), len(WAYS), warm_up=2, samples=samples)
    return Timed(seconds[..., 0].tolist(), received, max(abs(norm / norms[0] - 1) for norm in norms))


def _prepared(shape: Shape, mesh: DeviceMesh, way: str) -> Callable[[], float]:
    """One way's step: it returns the norm of the gradients."""
    import trueshard

    model: Any = shape.build()
    if way.startswith("TrueShard"):
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
        trueshard.shard(model, optimizer, mesh=mesh, tensor={"sequence": way != WAYS[0]})
        clip: Any = trueshard.clip_grad_norm_
    else:
        share = _as_transformers if way == "transformers" else _as_torchtitan
        share(model, mesh["tensor"])
        shard_by_hand(model, RANKS // TENSOR, mesh=mesh["shard"])
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
        clip = nn.utils.clip_grad_norm_ if way == "TorchTitan" else _clip_by_mesh
    ids = shape.batch(mesh.get_local_rank("shard"))
    places = torch.arange(shape.tokens).expand_as(ids)

    def step() -> float:
        model(input_ids=ids, labels=ids, position_ids=places).loss.backward()
        norm = clip(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    return step


def _as_transformers(model: Any, mesh: DeviceMesh) -> None:
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    apply_tensor_parallelism(model, mesh, model._expand_parallel_plan(model.tp_plan))


def _clip_by_mesh(parameters: Any, most: float) -> torch.Tensor:
    """As transformers' Trainer does: torch's own refuses parameters of several meshes."""
    by_mesh: dict[Any, list[Any]] = {}
    for parameter in parameters:
        by_mesh.setdefault(parameter.device_mesh, []).append(parameter)
    norms = [nn.utils.get_total_norm([p.grad for p in parameters]) for parameters in by_mesh.values()]
    total = torch.stack([norm.full_tensor() for norm in norms]).norm()  # type: ignore[attr-defined]
    for parameters in by_mesh.values():
        nn.utils.clip_grads_with_norm_(parameters, most, total)
    return total


def _as_torchtitan(model: Any, mesh: DeviceMesh) -> None:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    parts, whole = Shard(1), Replicate()
    parallelize_module(
        model,
        mesh,
        {
            "model.embed_tokens": RowwiseParallel(input_layouts=whole, output_layouts=parts),
            "model.norm": SequenceParallel(),
            "lm_head": ColwiseParallel(input_layouts=parts, output_layouts=whole),
        },
    )
    for layer in model.model.layers:
        attention = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": parts}, desired_input_kwarg_layouts={"hidden_states": whole}
        )
        feed = PrepareModuleInput(input_layouts=(parts,), desired_input_layouts=(whole,))
        styles: dict[str, Any] = {
            "input_layernorm": SequenceParallel(),
            "post_attention_layernorm": SequenceParallel(),
            "self_attn": attention,
            "self_attn.o_proj": RowwiseParallel(output_layouts=parts),
            "mlp": feed,
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(output_layouts=parts),
        }
        styles |= {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        parallelize_module(layer, mesh, styles)
