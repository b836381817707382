"""Metrics of each step, and `metrics.jsonl`.

Model FLOPs utilisation (MFU) is a model's operations over a device's peak. Operations a token: 6 N + 12 L H Q T, with N
parameters, L layers, H heads of size Q and T tokens a sequence (PaLM, Chowdhery et al. 2022, appendix B). Forward takes
2 operations a parameter, the gradients of inputs and of weights 2 each, so a frozen parameter counts 4. Embedding
lookups and recomputation count nothing. The peak is that of the planner's catalogue.

An unknown value is absent, never 0; memory and data wait are the largest of all ranks; seconds are those of the step
alone, without evaluations and checkpoints.

`metrics.jsonl` has one JSON object a step, numbered 1, 2, 3, … without gaps or repeats, also after a resume; 0 is an
evaluation before training.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn

from trueshard.planner.hardware import hardware, recognise
from trueshard.train.data.loader import Loader
from trueshard.train.metrics.jsonl import StepLines, read_lines
from trueshard.train.trainer import Callback, Trainer, over_ranks

NAME = "metrics.jsonl"


def flops_per_token(model: nn.Module, sequence_length: int) -> float | None:
    """Return the operations of forward and backward for each token, before quantisation; None if the formula does not
    hold: experts, several towers, no transformers configuration.
    """
    config = getattr(model, "config", None)
    layers, heads = (getattr(config, key, None) for key in ("num_hidden_layers", "num_attention_heads"))
    experts = ("num_experts", "num_local_experts", "n_routed_experts", "vision_config", "audio_config")
    if not isinstance(layers, int) or not isinstance(heads, int) or any(getattr(config, key, None) for key in experts):
        return None
    size = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // heads
    looked_up, used = set[int](), set[int]()
    for module in model.modules():
        own = looked_up if isinstance(module, nn.Embedding) else used
        own.update(map(id, module.parameters(recurse=False)))
    counted = [parameter for parameter in model.parameters() if id(parameter) not in looked_up - used]
    weights = sum((6 if each.requires_grad else 4) * each.numel() for each in counted)
    return float(weights + 12 * layers * heads * size * sequence_length)


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the dense operations a second of a device in ``dtype``; None for a CPU or an unknown device."""
    if device.type != "cuda":
        return None
    name = recognise(torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory)
    if name is None:
        return None
    tensor_cores = dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    return hardware(name).peak("tfloat32" if tensor_cores else str(dtype).removeprefix("torch."))


class Measures(Callback):
    """Adds tokens_per_second (of all ranks and a rank), mfu (0 to 1) and memory to the record of each step.

    Memory is in bytes of the fullest rank: the peaks of torch's allocator since the last step or, on a CPU, the
    resident bytes. To be given first, so that other callbacks see it. Collective.
    """

    def __init__(
        self,
        *,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
        memory_planned: int | None = None,
    ) -> None:
        self._flops, self._peak, self._planned = flops_per_token, peak_flops, memory_planned

    def on_start(self, trainer: Trainer) -> None:
        if trainer.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(trainer.device)

    def on_step(self, trainer: Trainer, record: dict[str, Any]) -> None:
        rate = record["step_tokens"] / max(record["seconds"], 1e-9)
        record["tokens_per_second"] = rate
        record["tokens_per_second_per_rank"] = rate / trainer.ranks
        if self._flops is not None and self._peak is not None:
            record["mfu"] = rate * self._flops / (self._peak * trainer.ranks)
        if isinstance(trainer.loader, Loader):
            record |= trainer.loader.state_dict()
        memory = _memory(trainer.device)
        largest = over_ranks([record["data_wait"], *memory.values()], trainer.device, dist.ReduceOp.MAX)
        record |= {"data_wait": largest[0]} | dict(zip(memory, map(int, largest[1:]), strict=True))
        if self._planned is not None:
            record["memory_planned"] = self._planned


def _memory(device: torch.device) -> dict[str, int]:
    """Return the bytes of this process; on a CUDA device the peaks since the last call."""
    if device.type != "cuda":
        return {"memory_allocated": psutil.Process().memory_info().rss}
    allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    return {"memory_allocated": allocated, "memory_reserved": reserved}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the records of a file; none if it does not exist.

    A last line that a crash cut off is left out. Raises `UserError` if another line is damaged.
    """
    if not path.exists():
        return []
    with path.open("rb") as file:
        return list(read_lines(file, path))


def before_training(trainer: Trainer, record: Mapping[str, float]) -> dict[str, Any] | None:
    """Return the metrics of step 0 for an evaluation before the first step; None for a later one, whose step has it."""
    return None if trainer.step else {"step": 0} | {f"evaluation_{key}": value for key, value in record.items()}


class MetricsWriter(Callback):
    """Writes `metrics.jsonl` in a folder, on rank 0; to be given after the callbacks that add to the record."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self._lines = StepLines(self.path)

    def on_start(self, trainer: Trainer) -> None:
        if trainer.rank == 0:
            read_metrics(self.path)  # a damaged line is an error now, and not after training
            self._lines.open(trainer.step)

    def on_step(self, trainer: Trainer, record: dict[str, Any]) -> None:
        self._lines.write([record])

    def on_evaluation(self, trainer: Trainer, record: dict[str, float]) -> None:
        if (first := before_training(trainer, record)) is not None:
            self._lines.write([first])

    def on_end(self, trainer: Trainer) -> None:
        self._lines.close()
