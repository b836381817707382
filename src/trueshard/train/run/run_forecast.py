"""Work of a training run beside its steps: evaluation and saving, with the memory and time of each on a rank.

- An evaluation is the loss of a microbatch without gradient (``Trainer.evaluate``): simulated after the steps, with
  shards and optimizer state in place. Its batch is a rank's share of ``train.batch_size`` over ``train.accumulate``.
- A save copies what the rank writes to host memory, tensor by tensor, and writes from there while training goes on
  (``checkpoint/saving.py``: ``SaveJob.stage``). A device gives no memory beyond the state; on a CPU the copies lie
  beside the next steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from trueshard.planner import ledger
from trueshard.planner.hardware import Hardware, Mode
from trueshard.planner.timeline import schedule
from trueshard.planner.workload import StepPhase, Study
from trueshard.text import size
from trueshard.train.config import Config


def evaluated(loss: Callable[[nn.Module, Any], torch.Tensor]) -> Callable[[nn.Module, Any], Any]:
    """Return the pass of an evaluation, for ``Request.score``."""

    def score(model: nn.Module, batch: Any) -> Any:
        model.eval()
        result = loss(model, batch)
        model.train()
        return result

    return score


def run_phases(config: Config, found: Study, device: Hardware) -> tuple[StepPhase, ...]:
    """Return the step, the evaluation if there is one, and a save; of the study of a step."""
    forecast = found.forecast
    stays = sum(each.bytes for each in found.trace.resident)
    step = StepPhase(
        "step", forecast.peak_live_bytes, forecast.step_seconds, {"step": forecast.peak_live_bytes - stays}
    )
    evaluation = () if found.score is None else (_evaluation(config, found, stays, device),)
    return (step, *evaluation, _saving(config, found, stays, device))


def _evaluation(config: Config, found: Study, stays: int, device: Hardware) -> StepPhase:
    assert found.score is not None
    assert config.evaluation is not None
    forecast, samples = found.forecast, config.evaluation.samples
    mode: Mode = "compile" if found.plan.compile else "eager"
    seconds = schedule(found.score, device, forecast.ranks_per_node, mode).seconds
    count = 1 if samples is None else math.ceil(samples / (forecast.ranks * forecast.microbatch))
    words = (
        "a microbatch; there are as many as the data give" if samples is None else f"{count:,} × {forecast.microbatch}"
    )
    live = ledger.peak(found.score).bytes
    return StepPhase(
        "evaluation",
        live,
        count * seconds,
        {"pass": live - stays},
        (words, f"every {config.evaluation.every:,} steps"),
        every=config.evaluation.every,
    )


def _saving(config: Config, found: Study, stays: int, device: Hardware) -> StepPhase:
    copies = staged_bytes(found)
    notes: tuple[str, ...] = (f"every {config.train.checkpoint_every:,} steps", "written while training goes on")
    if device.streams:
        told = (f"{size(copies)} copied to the host", *notes)
        return StepPhase("saving", stays, copies / device.host_bandwidth, {}, told, every=config.train.checkpoint_every)
    step = found.forecast.peak_live_bytes - stays
    seconds = 2 * copies / device.host_memory_bandwidth
    needs = {"copies": copies, "step": step}
    return StepPhase("saving", stays + copies + step, seconds, needs, notes, every=config.train.checkpoint_every)


def staged_bytes(found: Study) -> int:
    """Return the bytes that a rank copies for a save: its shards, and its optimizer's; replicas share them out."""
    state = (each for each in found.trace.resident if each.kind in ("parameters", "optimizer") and each.storage >= 0)
    replicas = found.plan.ranks[0] if len(found.plan.ranks) == 2 else 1
    return sum(each.bytes for each in state) // replicas


def advice(phases: tuple[StepPhase, ...], budget: int) -> str:
    """Return a sentence about the largest phase."""
    largest = max(phases, key=lambda phase: phase.live_bytes)
    told = f"Of the phases, {largest.name} needs the most memory: {size(largest.live_bytes)}."
    return told if largest.live_bytes <= budget else f"{told} It does not fit into {size(budget)}."
