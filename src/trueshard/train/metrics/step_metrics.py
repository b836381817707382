"""Metrics of each step, the files with a line a step, and profiles of some steps.

Model FLOPs utilisation (MFU) is a model's operations over a device's peak. Operations a token: 6 N + 12 L H Q T, with N
parameters, L layers, H heads of size Q and T tokens a sequence (PaLM, Chowdhery et al. 2022, appendix B). Forward takes
2 operations a parameter, the gradients of inputs and of weights 2 each, so a frozen parameter counts 4. Embedding
lookups and recomputation count nothing. The peak is that of the planner's catalogue.

An unknown value is absent, never 0; memory and data wait are the largest of all ranks; seconds are those of the step
alone, without evaluations and checkpoints.

`metrics.jsonl` has one JSON object a step, numbered 1, 2, 3, … without gaps or repeats, also after a resume; 0 is an
evaluation before training. Non-finite numbers are null in the file, so that every language can read it, and NaN when
read back.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import psutil
import torch
import torch.distributed as dist
from torch import nn

from trueshard._torch import mapped
from trueshard.errors import UserError
from trueshard.files import replacing
from trueshard.planner.hardware import hardware, recognise
from trueshard.text import load_json
from trueshard.train.callbacks import Callback
from trueshard.train.data.loader import Loader
from trueshard.train.preference import PreferenceLoss
from trueshard.train.reducing import over_ranks
from trueshard.train.trainer import Trainer

Line = dict[str, Any]

NAME = "metrics.jsonl"
START = re.compile(rb'\{"step": (\d+),')
"""Start of a line that `StepLines` has written."""


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
        parameters = looked_up if isinstance(module, nn.Embedding) else used
        parameters.update(map(id, module.parameters(recurse=False)))
    counted = [parameter for parameter in model.parameters() if id(parameter) not in looked_up - used]
    weights = sum((6 if parameter.requires_grad else 4) * parameter.numel() for parameter in counted)
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
    """Adds tokens_per_second (of all ranks and a rank), mfu (0 to 1), memory and rewards of preferences to each record.

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
        if isinstance(trainer.loss, PreferenceLoss):
            record |= trainer.loss.measures()
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


# Files with a line a step, in the order of steps


class WrongLineError(ValueError):
    """A line is wrong; the message follows its number."""


class LineSpan(NamedTuple):
    """The place of a line in its file."""

    step: int
    number: int  # from 1
    first: int  # byte at which it begins
    size: int  # bytes of the line, its end included


def record_of(line: bytes) -> Line:
    """Return a line as a record. Raises ValueError, TypeError or KeyError if it is no object with a step."""
    record = load_json(line)
    record["step"] = int(record["step"])
    if b"null" in line:
        record = mapped(lambda value: math.nan if value is None else value, record)
    return record


def _line_of(record: Line) -> bytes:
    def finite(value: Any) -> Any:
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(mapped(finite, record), allow_nan=False).encode() + b"\n"


def read_lines(path: Path, read: Callable[[bytes], Line] = record_of) -> Iterator[tuple[LineSpan, Line]]:
    """Yield place and record of each line of a file, if it exists; leave a last line out that a crash cut off.

    Raises `UserError` with the number of another line that ``read`` raises ValueError, TypeError or KeyError for.
    """
    if not path.exists():
        return
    damaged, first = None, 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if damaged is not None:
                raise damaged
            try:
                record = read(line)
            except (ValueError, TypeError, KeyError) as error:
                damaged = damage(path, number, error)
            else:
                yield LineSpan(record["step"], number, first, len(line)), record
            first += len(line)


def damage(path: Path, number: int, error: Exception) -> UserError:
    """Return what to raise for a damaged line."""
    reason = str(error) if isinstance(error, WrongLineError) else "is no JSON object with a step"
    return UserError(f"{path}, line {number}: {reason}; delete that line, or move the file away")


def read_metrics(path: Path) -> list[Line]:
    """Return the records of a file, as `read_lines` reads it."""
    return [record for _, record in read_lines(path)]


def read_steps(path: Path) -> list[LineSpan]:
    """Return the place of each line; of lines that `StepLines` wrote, only start and end are looked at."""

    def step_of(line: bytes) -> Line:
        match = START.match(line) if line.endswith(b"}\n") else None
        return {"step": int(match[1])} if match else record_of(line)

    return [span for span, _ in read_lines(path, step_of)]


class StepLines:
    """Appends to a file of steps; a resumed run has each step once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last = 0  # last step of the file when it was opened
        self._file: BinaryIO | None = None

    def open(self, step: int) -> None:
        """Cut off what comes after ``step``, and a line that a crash cut; a run from its beginning has no line yet."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = [span for span in read_steps(self.path) if step and span.step <= step]
        self.last, end = (kept[-1].step, kept[-1].first + kept[-1].size) if kept else (0, 0)
        self._file = self.path.open("ab")
        os.truncate(self.path, end)
        with self.path.open("rb") as file:
            file.seek(max(0, end - 1))
            if file.read() not in (b"", b"\n"):
                self._file.write(b"\n")

    def write(self, records: Iterable[Line]) -> None:
        """Append records; nothing if the file is not open."""
        if self._file is not None:
            self._file.write(b"".join(map(_line_of, records)))
            self._file.flush()

    def close(self) -> None:
        """Close the file if it is open."""
        if self._file is not None:
            self._file.close()
            self._file = None


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


# Profiles


class Profile(Callback):
    """Profiles the steps `first` (from 2 on) … `last` since the start of the process by torch's profiler.

    Each rank writes `rank-N.json.gz`, for Perfetto or chrome://tracing. The step before is profiled and dropped, so
    that the profiler's own start is not in the trace. A resumed run is profiled too, after its own warm-up.
    """

    def __init__(self, folder: Path, first: int, last: int) -> None:
        self._folder, self._first, self._last = folder, first, last
        self._profiler: torch.profiler.profile | None = None  # until the last of the steps
        self._taken, self._rank = 0, 0

    def on_start(self, trainer: Trainer) -> None:
        self._rank = trainer.rank
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it writes to stderr at its start and stop
        steps = torch.profiler.schedule(wait=self._first - 2, warmup=1, active=self._last - self._first + 1, repeat=1)
        self._profiler = torch.profiler.profile(schedule=steps, on_trace_ready=self._write, acc_events=True)
        self._profiler.start()

    def on_step(self, trainer: Trainer, record: dict[str, Any]) -> None:
        if self._profiler is not None:
            self._taken += 1
            self._profiler.step()
            if self._taken == self._last:
                self.on_end(trainer)

    def on_end(self, trainer: Trainer) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None
            if self._taken < self._first and self._rank == 0:
                print(f"No profile: the run ended before step {self._first} since its start", flush=True)

    def _write(self, profiler: torch.profiler.profile) -> None:
        if self._taken < self._first:  # it ended in its first step, or before
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / f"rank-{self._rank}.json.gz"
        with replacing(file) as scratch:  # of the same suffix, by which the profiler gzips
            profiler.export_chrome_trace(str(scratch))
        if self._rank == 0:
            steps = f"step {self._taken}" if self._taken == self._first else f"steps {self._first} to {self._taken}"
            print(f"Profile of {steps} since the start: {self._folder}/rank-*.json.gz", flush=True)
