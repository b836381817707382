"""KempnerForge's runs, and how its code shares matrices; for simulations of published runs, not for training.

By its code at 01b461a (5 April 2026; at 601aba9 for the second report; 3ad9d9a and 5666d0d, of June and July, are read
as the same), torch 2.11, and its profile of 13B on 24 GPUs:

- Parameters are cast to bfloat16 after FSDP2 has sharded them (``build_parallel_model``), and so are the moments of the
  fused AdamW. With a tensor axis FSDP2 is there on a data axis of one rank, too (``init_distributed``), so gradients of
  several microbatches add up in float32, unsharded. On one GPU alone there is none: they add up in bfloat16, and the
  model is one compiled graph.
- Blocks and the root reshard after forward; blocks are recomputed.
- Each projection gathers the sequence by itself, and its backward scatters the gradient by itself
  (``_build_block_tp_plan``: ``ColwiseParallel(input_layouts=Shard(1))`` for each): 12 all-gathers and 8 reduce-scatters
  a block and microbatch, as in the profile (benchmarks/profiling), which was not compiled. Of compiled blocks the
  compiler gathers one tensor once (``fx_graph_cse`` of torch/_functorch/compile_utils.py; counted with torch 2.11 in
  such a model of a few layers): 6 and 8, where one of each for each module makes 6 and 5.
- Every rank has the whole embedding and, of its own part of the head's products, gathers all logits. The loss is
  ``F.cross_entropy`` in bfloat16, outside of the compiled model; the loop's variable keeps the logits until the next
  ones are there (scripts/train.py).
- Keys and values are repeated to as many heads as queries have (kempnerforge/model/attention.py).
- Memory is ``torch.cuda.max_memory_allocated()`` in GiB (kempnerforge/metrics/memory.py).
- One GPU, and two with FSDP, had 2 sequences in 4 microbatches, by the script (mfu_bench.sh) and by their memory; the
  report's table has 4 in 2 for all.
- Nodes are HGX H200 of 4 GPUs, which no switch joins: of 18 links a GPU has 6 to each other one, 150 GB/s in one
  direction (NVIDIA, 'Introducing NVIDIA HGX H100': 300 GB/s in both between two of the 4).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import nn

from benchmarks.published_rows import LLAMA3_8B, LLAMA3_70B, MATMUL, Model, Row, Setting
from trueshard.parallel import sequence, tensor
from trueshard.parallel.collectives import gather, scatter_sum
from trueshard.planner.hardware import Mode

LLAMA3_15B = Model("Llama 3 14.8B", 40, 5120, 40, 128256, 17920, 8)
DENSE_175B = Model("Llama 3 175B", 96, 12288, 96, 128256, 39680, 8)

_READERS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_BLOCKS = {**{f"*.{name}": "colwise" for name in _READERS}, **dict.fromkeys(("*.o_proj", "*.down_proj"), "rowwise")}
STYLES: Mapping[str, Mapping[str, Any]] = {
    "titan": {"sequence": True, **_BLOCKS, "*embed_tokens": "embedding_rowwise", "*lm_head": "colwise"},
    "kempner": {"sequence": True, **_BLOCKS, "*lm_head": "colwise_gather_output"},
}
"""How ranks share matrices: ``titan`` with a loss of which each has a part of the vocabulary."""


@contextlib.contextmanager
def projections_alone() -> Iterator[None]:
    """Let each layer of a block scatter the gradient of what it reads, which is gathered for the first of them."""
    with mock.patch.object(tensor, "split_children", _split_children):
        yield


def _split_children(modules: Mapping[str, nn.Module], parts: sequence.Parts, group: Any) -> None:
    state = parts.state

    def enter(x: torch.Tensor) -> Any:
        whole: Any = x.new_empty(1).expand(x.shape[0], state.total, x.shape[2])  # its shape alone is read
        whole.part = x
        return whole

    leave = functools.partial(scatter_sum, dim=1, group=group)
    for name in [name for block in parts.blocks for name in block.scattered]:
        sequence._around(modules[name], state, enter, leave)
        for below in _READERS:
            if (reader := modules.get(f"{name}.{below}")) is not None:
                reader.__dict__["forward"] = functools.partial(_read, reader.forward, state, group)


def _read(inner: Any, state: sequence.Pass, group: Any, x: Any) -> Any:
    if not state.holds_parts():
        return inner(x)
    if getattr(x, "gathered", None) is None:
        x.gathered = gather(x.part, 1, state.total, group, sums=True)
        return inner(x.gathered)
    return inner(_Again.apply(x.part, x.gathered, group))


class _Again(torch.autograd.Function):
    """What was gathered, for another reader, whose gradient is scattered by itself."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, gathered: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return gathered.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return scatter_sum(grad, 1, ctx.group), None, None


_NETWORK = {"network_efficiency": 0.47}
"""Reduce-scatters of FSDP2 in the profile of 13B on 24 GPUs: 205 of 41 units in 5 steps took 2,953 ms, 14.0 GB a step
(4.2 billion elements of a tensor rank in float32, of which a rank of 6 receives 5/6): 23.7 of 50 GB/s."""
_NETWORK_OPEN = "rate between nodes: 23.7 of 50 GB/s by the source's own profile of another run"
_LATER = {"network_efficiency": 0.6}
_LATER_OPEN = "rate between nodes: 30 of 50 GB/s, set on the row of 70B on 32"
NETWORK = "network"


def _row(
    source: str,
    model: Model,
    ranks: int,
    shared: int,
    microbatch: int,
    accumulation: int,
    tokens: float,
    memory: float,
    *,
    mode: Mode = "compile",
    fitted: str = "",
    more: str = "",
) -> Row:
    setting = Setting(
        model, ranks, microbatch, 4096, "full", accumulation, mode,
        reshard="always",
        loss="kept",
        reduce="bfloat16" if ranks == 1 else "float32",
        storage="bfloat16",
        whole=ranks == 1,
        repeat=True,
        optimizer="adamw-fused",
        tensor=shared,
        styles="titan" if shared == 1 else "kempner",
    )  # fmt: skip
    network, remark = (_NETWORK, _NETWORK_OPEN) if source in ("kempner", "kempner-configs") else (_LATER, _LATER_OPEN)
    if ranks <= 4:
        network, remark = {}, ""
    return Row(
        source, "h200-4gpu", setting, tokens / ranks, memory, "live", fitted=fitted,
        overrides=network, open="; ".join(filter(None, (remark, more))),
    )  # fmt: skip


def _rows() -> tuple[Row, ...]:
    """Rows are (model, ranks, tensor, microbatch, microbatches, tokens of all ranks, memory)."""
    first = functools.partial(_row, "kempner")
    second = functools.partial(_row, "kempner-configs")
    scaling = functools.partial(_row, "kempner-scaling")
    return (
        first(LLAMA3_8B, 1, 1, 2, 4, 10471, 80.7),
        first(LLAMA3_8B, 2, 1, 2, 4, 18728, 62.4, fitted=MATMUL),
        first(LLAMA3_8B, 2, 2, 4, 2, 13163, 57.8),
        first(LLAMA3_8B, 4, 1, 4, 2, 38983, 61.1, fitted=MATMUL),
        first(LLAMA3_8B, 4, 4, 4, 2, 25135, 39.4),
        first(LLAMA3_8B, 4, 2, 4, 2, 25980, 45.9),
        first(LLAMA3_8B, 8, 4, 4, 2, 44299, 32.7),
        first(LLAMA3_15B, 8, 1, 4, 4, 35405, 88.5, mode="eager"),
        first(LLAMA3_15B, 8, 4, 4, 4, 27345, 45.1),
        first(LLAMA3_8B, 16, 4, 4, 2, 82988, 29.4),
        first(LLAMA3_15B, 16, 4, 4, 4, 53814, 39.2),
        first(LLAMA3_8B, 32, 4, 4, 2, 155917, 27.6),
        first(LLAMA3_15B, 32, 4, 4, 4, 104309, 36.3),
        first(LLAMA3_70B, 32, 4, 2, 4, 17657, 93.2),
        second(LLAMA3_8B, 4, 1, 8, 4, 38858, 81.0),
        second(LLAMA3_8B, 12, 4, 4, 8, 67045, 30.4),
        second(LLAMA3_8B, 32, 1, 4, 4, 297384, 51.3),
        second(LLAMA3_70B, 32, 4, 2, 4, 17769, 93.2),
        scaling(LLAMA3_15B, 8, 4, 4, 4, 29860, 45.0),
        scaling(LLAMA3_15B, 32, 4, 4, 4, 110373, 36.2),
        scaling(LLAMA3_15B, 64, 4, 4, 4, 216507, 34.8),
        scaling(LLAMA3_15B, 128, 4, 4, 4, 423306, 34.0),
        scaling(LLAMA3_15B, 160, 4, 4, 4, 534644, 33.9),
        scaling(LLAMA3_70B, 8, 4, 2, 4, 3623, 128.5, more="bound by its memory, says the source, which sets it aside"),
        scaling(LLAMA3_70B, 32, 4, 2, 4, 18688, 93.2, fitted=NETWORK),
        scaling(LLAMA3_70B, 64, 4, 2, 4, 35824, 86.8),
        scaling(LLAMA3_70B, 96, 4, 2, 4, 52190, 84.6),
        scaling(LLAMA3_70B, 128, 4, 2, 4, 69985, 83.6),
        scaling(LLAMA3_70B, 160, 4, 2, 4, 85571, 82.9),
        _row("kempner-175b", DENSE_175B, 360, 4, 8, 1, 154523, 53.8),
    )


ROWS = _rows()
