"""What is measured, and where it goes: metrics of each step, `metrics.jsonl`, trackers, and a trace of some steps.

Model FLOPs utilisation (MFU) is a model's operations over a device's peak. Operations a token: 6 N + 12 L H Q T, with N
parameters, L layers, H heads of size Q and T tokens a sequence (PaLM, Chowdhery et al. 2022, appendix B). Forward takes
2 operations a parameter, the gradients of inputs and of weights 2 each, so a frozen parameter counts 4. Embedding
lookups and recomputation count nothing. The peak is that of the planner's catalogue.

An unknown value is absent, never 0; memory and data wait are the largest of all ranks; seconds are those of the step
alone, without evaluations and checkpoints.

`metrics.jsonl` has one JSON object a step, numbered 1, 2, 3, … without gaps or repeats, also after a resume; 0 is an
evaluation before training. Trackers beside it are TensorBoard, Weights & Biases, trackio, or any class of the same
shape. A resumed run continues its curves, with each step once. A tracker that fails during training is dropped with a
message.

The trace is that of torch's profiler, for Perfetto or chrome://tracing. Each rank writes its own, gzipped, which gets
its name once it is complete. Steps count from the start of the process: a resumed run is profiled too, after its own
warm-up.
"""

from __future__ import annotations

import html
import importlib.util
import math
import os
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch
import torch.distributed as dist
from torch import nn

from trueshard.errors import UserError, explained, one_line
from trueshard.files import replace_text, replacing
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
    counted = [each for each in model.parameters() if id(each) not in looked_up - used]
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


class Tracker(Protocol):
    """Shows metrics elsewhere; called on rank 0 only."""

    def start(self, config: Mapping[str, Any], folder: Path, project: str, step: int) -> None:
        """Begin a run or, in the same folder, continue it after ``step``; later steps will be told again."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the metrics of a step."""

    def finish(self) -> None:
        """End the run."""


class TextTracker(Tracker, Protocol):
    """A tracker that shows texts too; other trackers are told none."""

    def text(self, step: int, tag: str, markdown: str) -> None:
        """Take a text of a step."""


class TensorBoard:
    """Writes to `tensorboard/` in the run's folder, and flushes each step."""

    def start(self, config: Mapping[str, Any], folder: Path, project: str, step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard import SummaryWriter

        self._summary = Summary
        # Readers leave out points of earlier files from purge_step on.
        self._writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        # One event for all values: an add_scalar() for each takes twenty times as long.
        points = [self._summary.Value(tag=key, simple_value=value) for key, value in values.items()]
        self._writer.file_writer.add_summary(self._summary(value=points), step)
        self._writer.flush()

    def text(self, step: int, tag: str, markdown: str) -> None:
        self._writer.add_text(tag, markdown, step)
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()


class WandB:
    """Weights & Biases. Its environment variables apply: WANDB_MODE=offline keeps everything in `wandb/` of the run."""

    def start(self, config: Mapping[str, Any], folder: Path, project: str, step: int) -> None:
        import wandb

        remedy = "log in with `wandb login`, set WANDB_MODE=offline, or leave it out"
        with explained("log.to: wandb does not start", remedy, wandb.Error, one_line):
            self._run: Any = wandb.init(
                project=project,
                name=folder.resolve().name,
                id=_run_id(folder),
                dir=str(folder),
                config=dict(config),
                resume="allow",
            )
        self._next = self._run.step

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step >= self._next:  # the first one that the run does not have
            self._run.log(dict(values), step=step)

    def text(self, step: int, tag: str, markdown: str) -> None:
        if step >= self._next:
            self._run.log({tag: self._page(markdown)}, step=step)

    def _page(self, markdown: str) -> Any:
        import wandb

        return wandb.Html(f"<pre>{html.escape(markdown)}</pre>", data_is_not_path=True)

    def finish(self) -> None:
        self._run.finish()


class Trackio(WandB):
    """trackio, on this machine or where its environment variables say."""

    def start(self, config: Mapping[str, Any], folder: Path, project: str, step: int) -> None:
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        name = f"{folder.resolve().name}-{_run_id(folder)}"
        known = SQLiteStorage.get_max_step_for_run(project, name)
        self._next = 0 if known is None else known + 1
        self._run = trackio.init(project=project, name=name, config=dict(config), resume="allow", embed=False)

    def _page(self, markdown: str) -> Any:
        import trackio

        return trackio.Markdown(markdown)


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB, "trackio": Trackio}
"""Name in `log.to`, which is also the package → tracker."""


def trackers(names: Sequence[str]) -> list[Tracker]:
    """Return the trackers of `log.to`. Raises `UserError` for a package that is not installed."""
    for name in names:
        if sys.modules.get(name, ...) is None or importlib.util.find_spec(name) is None:
            raise UserError(f'log.to: the package {name!r} is not installed; install it, or leave "{name}" out')
    return [TRACKERS[name]() for name in names]


def _run_id(folder: Path) -> str:
    """Return the id of the run for trackers, made once and kept in its folder as `tracking-id`."""
    file = folder / "tracking-id"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(file, uuid.uuid4().hex[:8] + "\n")
    return file.read_text(encoding="utf-8").strip()


class Tracking(Callback):
    """Passes each step to trackers, on rank 0; to be given after the callbacks that add to the record."""

    def __init__(self, trackers: Sequence[Tracker], config: Mapping[str, Any], folder: Path, project: str) -> None:
        self._trackers, self._config, self._folder, self._project = list(trackers), config, folder, project

    def on_start(self, trainer: Trainer) -> None:
        if trainer.rank != 0:
            self._trackers = []
        for each in self._trackers:
            each.start(self._config, self._folder, self._project, trainer.step)

    def on_step(self, trainer: Trainer, record: dict[str, Any]) -> None:
        numbers = {key: value for key, value in record.items() if key != "step" and isinstance(value, (int, float))}
        finite = {key: value for key, value in numbers.items() if math.isfinite(value)}
        for each in list(self._trackers):
            self._try(each, f"at step {record['step']}", each.log, record["step"], finite)

    def on_evaluation(self, trainer: Trainer, record: dict[str, float]) -> None:
        if (first := before_training(trainer, record)) is not None:
            self.on_step(trainer, first)

    def text(self, step: int, tag: str, markdown: str) -> None:
        """Pass a text to the trackers that show texts."""
        for each in list(self._trackers):
            if (show := getattr(each, "text", None)) is not None:
                self._try(each, f"at step {step}", show, step, tag, markdown)

    def on_end(self, trainer: Trainer) -> None:
        for each in list(self._trackers):
            self._try(each, "at the end", each.finish)

    def _try(self, tracker: Tracker, when: str, call: Callable[..., None], *arguments: Any) -> None:
        try:
            call(*arguments)
        except Exception as error:
            self._trackers.remove(tracker)
            name = type(tracker).__name__
            print(f"{name} failed {when} ({one_line(error)}) and is told no more; metrics.jsonl is whole", flush=True)


class Profile(Callback):
    """Profiles the steps `first` (from 2 on) … `last` since the start on every rank, each into `rank-N.json.gz`.

    The step before is profiled and dropped, so that the profiler's own start is not in the trace.
    """

    def __init__(self, folder: Path, first: int, last: int) -> None:
        self._folder, self._first, self._last = folder, first, last
        self._profiler: torch.profiler.profile | None = None
        self._taken, self._written, self._rank = 0, False, 0

    def on_start(self, trainer: Trainer) -> None:
        self._rank = trainer.rank
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it writes to stderr at its start and stop
        steps = torch.profiler.schedule(wait=self._first - 2, warmup=1, active=self._last - self._first + 1, repeat=1)
        self._profiler = torch.profiler.profile(schedule=steps, on_trace_ready=self._write, acc_events=True)
        self._profiler.start()

    def on_step(self, trainer: Trainer, record: dict[str, Any]) -> None:
        self._taken += 1
        if self._profiler is not None:
            self._profiler.step()
        if self._taken == self._last:
            self.on_end(trainer)

    def on_end(self, trainer: Trainer) -> None:
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        last = min(self._taken, self._last)
        steps = f"step {last}" if last == self._first else f"steps {self._first} to {last}"
        said = f"Profile of {steps} since the start: {self._folder}/rank-*.json.gz"
        if not self._written:
            said = f"No profile: the run ended before step {self._first} since its start"
        if self._rank == 0:
            print(said, flush=True)

    def _write(self, profiler: torch.profiler.profile) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / f"rank-{self._rank}.json.gz"
        with replacing(file) as scratch:  # of the same suffix, by which the profiler gzips
            profiler.export_chrome_trace(str(scratch))
        self._written = True
