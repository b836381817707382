"""The planner's forecasts beside figures that others have published.

Each device has one efficiency for matrix products and mode (``hardware.toml``), the same for all of its rows here;
nothing is fitted to a row. What is run is transformers' Llama, or a plain GPT for llm-foundry's MPT, by this library's
plan.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.table import Table, Tell
from trueshard.choices import Choices
from trueshard.planner.hardware import Mode, hardware
from trueshard.planner.inputs.workloads import workload_of
from trueshard.planner.reserve import replay
from trueshard.planner.simulation.simulate import Simulation, simulate
from trueshard.planner.timeline import schedule
from trueshard.planner.workload import Job, Workload

_LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}


@dataclass(frozen=True)
class Model:
    """Sizes of a decoder."""

    name: str
    layers: int
    hidden: int
    heads: int
    vocabulary: int
    intermediate: int = 0
    """Of a Llama; 0: a GPT."""
    key_value_heads: int = 0
    """0: as many as heads."""


LLAMA3_8B = Model("Llama 3 8B", 32, 4096, 32, 128256, 14336, 8)
LLAMA3_70B = Model("Llama 3 70B", 80, 8192, 64, 128256, 28672, 8)
LLAMA2_13B = Model("Llama 2 13B", 40, 5120, 40, 32000, 13824)
LLAMA2_70B = Model("Llama 2 70B", 80, 8192, 64, 32000, 28672, 8)
LLAMA3_15B = Model("Llama 3 14.8B", 40, 5120, 40, 128256, 17920, 8)
MPT_7B = Model("MPT 7B", 32, 4096, 32, 50368)
MPT_13B = Model("MPT 13B", 40, 5120, 40, 50368)
MPT_70B = Model("MPT 70B", 80, 8192, 64, 50368)


@dataclass(frozen=True)
class Setting:
    """What is simulated; rows that differ in mode or device only share it."""

    model: Model
    ranks: int
    microbatch: int
    sequence: int
    recompute: str = "none"
    accumulation: int = 1


@dataclass(frozen=True)
class Row:
    """A published figure."""

    source: str
    device: str
    setting: Setting
    tokens: int
    """Tokens a second and GPU."""
    mode: Mode = "eager"
    reserved: float | None = None
    """``max_memory_reserved`` in GiB."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Where the machine is not the catalogue's."""


_TITAN_8 = Setting(LLAMA3_8B, 8, 2, 8192, "selective")
_TITAN_128 = Setting(LLAMA3_8B, 128, 2, 8192, "selective")
_FOUR = {"ranks_per_node": 4}

ROWS = (
    Row("TorchTitan 12/2024", "h100-96gb", _TITAN_8, 5762, reserved=82.4),
    Row("TorchTitan 12/2024", "h100-96gb", _TITAN_8, 6667, "compile", reserved=77.0),
    Row("TorchTitan 12/2024", "h100-96gb", _TITAN_128, 5605, reserved=67.0),
    Row("TorchTitan 12/2024", "h100-96gb", _TITAN_128, 6514, "compile", reserved=62.0),
    Row("TorchTitan 2024", "a100", Setting(LLAMA3_8B, 64, 1, 8192, "selective"), 2973),
    Row("TorchTitan 2024", "a100", Setting(LLAMA3_70B, 64, 1, 8192, "full"), 331),
    Row("TorchTitan 2024", "a100", Setting(LLAMA2_13B, 64, 2, 4096), 2162),
    Row("TorchTitan 2024", "a100", Setting(LLAMA2_13B, 64, 2, 4096, "selective"), 1904),
    Row("TorchTitan 2024", "a100", Setting(LLAMA2_70B, 64, 2, 4096, "full"), 353),
    Row("llm-foundry 2023", "a100", Setting(MPT_7B, 8, 6, 2048, accumulation=2), 4641),
    Row("llm-foundry 2023", "a100", Setting(MPT_70B, 64, 8, 2048, "full"), 410),
    Row("llm-foundry 2023", "h100", Setting(MPT_7B, 8, 6, 2048), 10643),
    Row("llm-foundry 2023", "h100", Setting(MPT_7B, 128, 6, 2048), 10475),
    Row("llm-foundry 2023", "h100", Setting(MPT_7B, 512, 6, 2048), 9670),
    Row("llm-foundry 2023", "h100", Setting(MPT_13B, 8, 2, 2048), 4792),
    Row("llm-foundry 2023", "h100", Setting(MPT_70B, 64, 8, 2048, "full"), 1039),
    Row("llm-foundry 2023", "h100", Setting(MPT_70B, 512, 8, 2048, "full"), 1007),
    Row("KempnerForge 2026", "h200", Setting(LLAMA3_8B, 2, 4, 4096, "full", 2), 9364, "compile", overrides=_FOUR),
    Row("KempnerForge 2026", "h200", Setting(LLAMA3_8B, 4, 4, 4096, "full", 2), 9746, "compile", overrides=_FOUR),
    Row("KempnerForge 2026", "h200", Setting(LLAMA3_15B, 8, 4, 4096, "full", 4), 4426, overrides=_FOUR),
)
"""TorchTitan: benchmarks/llama3_h100_202412_torchtitan.md, and docs/performance.md of 2024. llm-foundry:
scripts/train/benchmarking/README.md (FSDP1; rows of 70B on 64 GPUs accumulate 4 microbatches, which is left out here).
KempnerForge: benchmarks/mfu_scaling/mfu_scaling.md."""


class _Block(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden, bias=False), nn.LayerNorm(hidden, bias=False)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.up, self.down = nn.Linear(hidden, 4 * hidden, bias=False), nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.qkv(self.norm_1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class _Gpt(nn.Module):
    """As MPT with learned positions: no biases, a tied output."""

    def __init__(self, model: Model, sequence: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(model.vocabulary, model.hidden)
        self.positions = nn.Embedding(sequence, model.hidden)
        self.blocks = nn.ModuleList(_Block(model.hidden, model.heads) for _ in range(model.layers))
        self.norm = nn.LayerNorm(model.hidden, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


def workload(model: Model, sequence: int) -> Workload:
    """The model with AdamW, as its publishers train it."""
    if not model.intermediate:
        return workload_of(lambda: _Gpt(model, sequence), sequence=sequence, optimizer="adamw")
    settings = _LLAMA | {
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "intermediate_size": model.intermediate,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.key_value_heads or model.heads,
        "vocab_size": model.vocabulary,
        "max_position_embeddings": sequence,
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(settings))
        return workload_of(folder, sequence=sequence, optimizer="adamw")


@functools.lru_cache(maxsize=1)
def simulated(setting: Setting, mode: Mode) -> Simulation:
    """One rank's step."""
    return simulate(
        Job(
            workload(setting.model, setting.sequence),
            (setting.ranks,),
            microbatch=setting.microbatch,
            accumulation=setting.accumulation,
            choices=Choices(
                # As those who published had them: the blocks, and all else together.
                units=["LlamaDecoderLayer" if setting.model.intermediate else "_Block"],
                mixed_precision="bf16",
                activation_checkpointing=setting.recompute,
                compile=mode == "compile",
            ),
        )
    )


def forecast(row: Row) -> dict[str, Any]:
    """What the planner expects of a row, beside what was published. Plain JSON values."""
    device = hardware(row.device, **row.overrides)
    made = simulated(row.setting, row.mode)
    line = schedule(made.steady, device, device.ranks_per_node, row.mode)
    setting = row.setting
    tokens = setting.microbatch * setting.accumulation * setting.sequence / line.seconds
    found: dict[str, Any] = asdict(row) | {
        "tokens_expected": tokens,
        "error": tokens / row.tokens - 1,
        "step_seconds": line.seconds,
        "exposed_seconds": line.exposed_seconds,
        "host_seconds": line.host_seconds,
    }
    if row.reserved is not None:
        reserved = replay(made.first, made.steady, workspace_bytes=device.workspace_bytes).reserved / 2**30
        found |= {"reserved_expected": reserved, "reserved_error": reserved / row.reserved - 1}
    return found


def run(tell: Tell, quick: bool = False) -> Table:
    """Every row; ``quick``: the first, of two blocks."""
    rows, numbers = [], []
    for row in ROWS[: 1 if quick else None]:
        setting = row.setting
        if quick:
            setting = replace(setting, model=replace(setting.model, layers=2))
        found = forecast(replace(row, setting=setting))
        label = f"{setting.model.name}, {setting.ranks} × {row.device}, {row.mode}"
        tell(f"{label}: {found['error']:+.1%}")
        memory = ("", "", "")
        if row.reserved is not None:
            memory = (f"{row.reserved}", f"{found['reserved_expected']:.1f}", f"{found['reserved_error']:+.1%}")
        batch = f"{setting.microbatch} × {setting.sequence:,}"
        figures = (f"{row.tokens:,}", f"{found['tokens_expected']:,.0f}", f"{found['error']:+.1%}")
        rows.append((label, row.source, batch, setting.recompute, *figures, *memory))
        numbers.append(found)
    return Table(
        "planner_published",
        "Forecasts beside published figures",
        "Tokens a second and GPU, and GiB of max_memory_reserved. One efficiency of matrix products for each device, "
        "set on TorchTitan's rows (h100-96gb: those of 8 GPUs; a100), on llm-foundry's rows of 8 GPUs (h100) and on "
        "KempnerForge's rows of 8B (h200), and one constant for how steps grow with nodes, set on all rows of several "
        "nodes on H100. Nothing else has seen these figures. llm-foundry is FSDP1 with the software of 2023; its 7B "
        "loses 9% from 8 to 512 GPUs, of which the model explains 4. KempnerForge's 14.8B is eager on two nodes.",
        ("model", "source", "batch", "recompute", "tokens/s", "expected", "error", "GiB", "expected", "error"),
        tuple(rows),
        numbers,
    )
