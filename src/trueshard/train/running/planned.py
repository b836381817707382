"""What a configuration is expected to take: the planner's study of it, as this run would train.

- The model, its frozen parts and adapters, the optimizer and the loss are those of the run; only data is made up.
- The device is the one at hand, or any of the planner's catalogue. Of a CPU, the memory is what a rank may have.
- What the planner cannot simulate is said in one line (`Unplanned`); nobody's training ends for it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from trueshard.errors import one_line
from trueshard.forecast import Forecast
from trueshard.planner.planning import work_out
from trueshard.planner.showing import report
from trueshard.planner.speed.hardware import Hardware, hardware, known
from trueshard.planner.study import Study
from trueshard.plans import Plan
from trueshard.replacing import replace_text
from trueshard.train.config import Config
from trueshard.train.losses.causal import CausalLoss
from trueshard.train.models.making import empty
from trueshard.train.optimizer import build_optimizer
from trueshard.train.recipe import folder_of
from trueshard.train.running import memory

Batch = dict[str, torch.Tensor]


class Unplanned(Exception):
    """There is no study; one line that says why."""


def study(config: Config, settings: Any, ranks: int, device: Hardware, ranks_per_node: int) -> Study:
    """The planner's study of a step of the run.

    Args:
        settings: the transformers configuration of the model.
        ranks: of the whole run.
        device: on which each of them computes.

    Raises:
        Unplanned: the planner cannot simulate it, or nothing fits where a choice was left to it.
    """
    train, words = config.train, config.shard.model_dump(exclude={"memory", "replicate"})
    feed = _feed(config)
    try:
        found = work_out(
            _named(lambda: empty(config, settings), getattr(settings, "model_type", "model")),
            device,
            ranks,
            config.shard.memory,
            feed,
            ranks_per_node=min(ranks_per_node, ranks),
            replicate=config.shard.replicate,
            sequence=train.sequence_length,
            microbatch=max(1, train.batch_size // (ranks * train.accumulate)),
            accumulation=train.accumulate,
            optimizer=lambda model: build_optimizer(config.optimizer, model.named_parameters()),
            loss=None if feed is None else _loss(config),
            clip=train.max_grad_norm,
            **words,
        )
    except Exception as error:  # whatever a model or an optimizer trips over under simulation
        raise Unplanned(one_line(error)) from error
    optimizer = config.optimizer.class_path.rpartition(".")[2]
    return dataclasses.replace(found, forecast=dataclasses.replace(found.forecast, optimizer=optimizer))


def hardware_here(device: torch.device, local_ranks: int) -> Hardware:
    """The entry of the planner's catalogue for the device of this process, with the memory that it has."""
    if device.type == "cpu":
        return hardware("cpu", memory_bytes=memory.limit_of(device, local_ranks))
    title = torch.cuda.get_device_name(device).lower().replace(" ", "-")
    name = max((name for name in known() if name.partition("-")[0] in title), key=len, default="h100")
    return hardware(name, memory_bytes=torch.cuda.get_device_properties(device).total_memory)


def bytes_of(forecast: Forecast) -> int:
    """What a rank is expected to take: what torch reserves; on a CPU, whose allocator keeps nothing, tensors alone."""
    return forecast.peak_live_bytes if forecast.hardware == "cpu" else forecast.peak_reserved_bytes


def write(config: Config, found: Study | Unplanned | Plan) -> None:
    """Store a study with the run, as `plan.json`; where there is none, why, or the plan alone. For one rank."""
    if isinstance(found, Study):
        record = report.as_json(found)
    else:
        record = {"plan": dataclasses.asdict(found)} if isinstance(found, Plan) else {"unplanned": str(found)}
    replace_text(folder_of(config) / "plan.json", json.dumps(record, indent=1))


def _named(function: Callable[[], nn.Module], name: str) -> Callable[[], nn.Module]:
    """The function under a name for tables."""

    def make() -> nn.Module:
        return function()

    make.__name__ = name
    return make


def _feed(config: Config) -> Callable[[int, int], Batch] | None:
    """Batches like those of the data, all of full length; None: the planner knows better what the model takes."""
    if config.data.format == "vision":
        return None
    rows = 2 if config.data.format == "preference" else 1
    packed = config.data.format == "chat" and config.data.packing

    def batch(microbatch: int, sequence: int) -> Batch:
        ids = torch.zeros(rows * microbatch, sequence, dtype=torch.int64)
        made = {"input_ids": ids, "targets": ids.clone()}
        if packed:
            made["position_ids"] = torch.arange(sequence).expand(rows * microbatch, sequence).contiguous()
        elif config.data.format in ("chat", "preference"):
            made["attention_mask"] = torch.ones_like(ids)
        return made

    return batch


def _loss(config: Config) -> Callable[[nn.Module, Mapping[str, torch.Tensor]], torch.Tensor]:
    """The mean over tokens. For preferences it stands for the loss of pairs, without the reference model."""
    whole = CausalLoss(config.train.whole_logits)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return whole(model, batch) / batch["targets"].numel()

    return loss
