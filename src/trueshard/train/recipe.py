"""A configuration becomes the parts of a training run: model, optimizer, data, loss and what shows them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import trueshard
from trueshard.errors import UserError, one_line
from trueshard.train.config import Config, ShardSection
from trueshard.train.data.loader import EvaluationLoader, Loader
from trueshard.train.data.prepared import Prepared
from trueshard.train.events import Callback
from trueshard.train.losses.choose import choose_loss
from trueshard.train.models.build import build, fill
from trueshard.train.optimizer import build_optimizer
from trueshard.train.schedules import build_schedule
from trueshard.train.showing import operations, trackers
from trueshard.train.showing.display import Display
from trueshard.train.showing.measures import Measures
from trueshard.train.showing.metrics import MetricsWriter
from trueshard.train.showing.profile import Profile
from trueshard.train.trainer import Trainer

PROFILED = (3, 5)
"""First and last step that `--profile` records: what is warmed up by then is warm."""


def folder_of(config: Config) -> Path:
    """The run's folder."""
    return Path(config.run.dir).expanduser()


def checkpoints_of(config: Config) -> trueshard.Checkpoints:
    """The run's checkpoints, of which the newest `train.keep` stay, and the best if there is a patience."""
    best = config.evaluation is not None and config.evaluation.patience is not None
    return trueshard.Checkpoints(
        folder_of(config) / "checkpoints",
        keep_last=config.train.keep,
        keep_best=1 if best else None,
        metric="evaluation",
    )


def steps_of(config: Config, data: Prepared) -> int:
    """Optimizer steps of the whole run."""
    if config.train.steps is not None:
        return config.train.steps
    assert config.train.epochs is not None
    return max(1, math.ceil(config.train.epochs * len(data) / config.train.batch_size))


def build_trainer(
    config: Config,
    settings: Any,
    data: Prepared,
    wants_stop: Callable[[], bool],
    *,
    device: torch.device,
    memory_planned: int | None = None,
    profile: bool = False,
) -> tuple[Trainer, trueshard.Plan]:
    """Build, shard and fill the model, and put the loop around it. Collective.

    Args:
        settings: the transformers configuration of the model.
        wants_stop: whether this rank was asked to stop.
        memory_planned: bytes of a rank.

    Raises:
        UserError: what the configuration says cannot be done, on every rank.
    """
    train, steps = config.train, steps_of(config, data)
    model = build(config, settings)
    optimizer = build_optimizer(config.optimizer, model.named_parameters())
    plan = shard(config.shard, model, optimizer)
    fill(config, model)
    torch.manual_seed((train.seed + 1 + dist.get_rank()) % 2**63)  # what dropout draws from: different on each rank
    loss = choose_loss(config, settings, model)
    loader, evaluation = loaders(config, data, device)
    trainer = Trainer(
        model,
        optimizer,
        loader,
        loss=loss,
        steps=steps,
        accumulate=train.accumulate,
        scheduler=build_schedule(config.schedule, optimizer, steps),
        scaler=torch.amp.GradScaler(device.type) if config.shard.mixed_precision == "fp16" else None,
        max_grad_norm=train.max_grad_norm,
        evaluation=evaluation,
        evaluate_every=config.evaluation.every if config.evaluation else None,
        patience=config.evaluation.patience if config.evaluation else None,
        checkpoints=checkpoints_of(config),
        checkpoint_every=train.checkpoint_every,
        skip_nonfinite=train.skip_nonfinite,
        callbacks=[
            Samples(loader),
            *shown(config, model, device, memory_planned),
            *([Profile(folder_of(config) / "profile", *PROFILED)] if profile else []),
        ],
        wants_stop=wants_stop,
        saved={"tokenizer": data.tokenizer(), "data": {"crc32": data.summary.crc32}},
    )
    return trainer, plan


def loaders(config: Config, data: Prepared, device: torch.device) -> tuple[Loader, EvaluationLoader | None]:
    """This rank's batches to train on, and those to evaluate on, if there are any."""
    train, rank, ranks = config.train, dist.get_rank(), dist.get_world_size()
    loader = Loader(
        data.train,
        data.collate,
        batch_size=train.batch_size,
        accumulate=train.accumulate,
        seed=train.seed,
        rank=rank,
        ranks=ranks,
        prefetch=config.data.prefetch,
        device=device,
    )
    if config.evaluation is None or data.evaluation is None:
        return loader, None
    evaluation = EvaluationLoader(
        data.evaluation,
        data.collate,
        batch_size=max(1, train.batch_size // (ranks * train.accumulate)),
        rank=rank,
        ranks=ranks,
        limit=config.evaluation.samples,
    )
    return loader, evaluation


def shard(section: ShardSection, model: nn.Module, *optimizers: torch.optim.Optimizer) -> trueshard.Plan:
    """`trueshard.shard()` in the words of `[shard]`. Collective. Raises `UserError` for what it refuses."""
    words = section.model_dump(exclude={"replicate"})
    try:
        return trueshard.shard(model, *optimizers, mesh=mesh_of(section), **words)
    except (ValueError, trueshard.NothingFits) as error:
        raise UserError(f"[shard]: {one_line(error)}") from error


def mesh_of(section: ShardSection) -> DeviceMesh | None:
    """Replicas × shards, or None where all ranks shard. Raises `UserError` if the ranks do not divide."""
    if section.replicate == 1:
        return None
    ranks = dist.get_world_size()
    if ranks % section.replicate:
        raise UserError(f"shard.replicate: {ranks} ranks do not divide into {section.replicate} copies; choose another")
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    shape = (section.replicate, ranks // section.replicate)
    return init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard"))


def shown(config: Config, model: nn.Module, device: torch.device, memory_planned: int | None) -> list[Callback]:
    """What measures, writes and draws each step, in the order in which they build on each other."""
    train = config.train
    computes = {"bf16": torch.bfloat16, "fp16": torch.float16, None: getattr(torch, config.model.dtype)}
    peak = operations.peak_flops(device, computes[config.shard.mixed_precision])
    countable = peak is not None and config.model.quantize == "none"  # packed weights do not tell how many they are
    flops = operations.flops_per_token(model, train.sequence_length) if countable else None
    folder = folder_of(config)
    plain = config.model_dump(mode="json", by_alias=True)
    return [
        Measures(
            flops_per_token=flops,
            peak_flops=peak,
            memory_planned=memory_planned,
        ),
        MetricsWriter(folder),
        Display(train.log_every),
        trackers.Tracking(trackers.trackers(config.log.to), plain, folder, config.log.project),
    ]


class Samples(Callback):
    """Adds how many samples of the data were taken."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def on_step(self, trainer: Trainer, record: dict[str, Any]) -> None:
        record["samples"] = self._loader.state_dict()["samples"]
