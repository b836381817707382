"""Turn a configuration into the parts of a training run: model, optimizer, data, loss and callbacks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import trueshard
from trueshard.distributed import replicated_mesh
from trueshard.errors import UserError, one_line
from trueshard.train.config import Config, ShardSection, TrainSection
from trueshard.train.data.loader import EvaluationLoader, Loader
from trueshard.train.data.prepared import Prepared
from trueshard.train.losses.choose import choose_loss
from trueshard.train.models.build import build
from trueshard.train.models.filling import fill
from trueshard.train.optimizer import build_optimizer, build_schedule
from trueshard.train.showing import metrics, trackers
from trueshard.train.showing.metrics import Measures, MetricsWriter
from trueshard.train.showing.profile import Profile
from trueshard.train.showing.report import Display
from trueshard.train.trainer import Callback, Trainer

PROFILED = (3, 5)
"""First and last step that `--profile` records: caches and allocators are warm by then."""


def checkpoints_of(config: Config) -> trueshard.Checkpoints:
    """Return the run's checkpoints: the newest `train.keep` stay, and the best one if there is a patience."""
    best = config.evaluation is not None and config.evaluation.patience is not None
    return trueshard.Checkpoints(
        config.run.folder / "checkpoints",
        keep_last=config.train.keep,
        keep_best=1 if best else None,
        metric="evaluation",
    )


def steps_of(train: TrainSection, data: Prepared) -> int:
    """Return the optimizer steps of the whole run."""
    if train.steps is not None:
        return train.steps
    assert train.epochs is not None
    return max(1, math.ceil(train.epochs * len(data) / train.batch_size))


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
        wants_stop: returns True once this rank was asked to stop.
        memory_planned: forecast peak memory of a rank, in bytes.

    Raises:
        UserError: the configuration cannot be carried out; on every rank.
    """
    train, steps = config.train, steps_of(config.train, data)
    model = build(config, settings)
    optimizer = build_optimizer(config.optimizer, model.named_parameters())
    plan = shard(config.shard, model, optimizer)
    fill(config, model)
    torch.manual_seed((train.seed + 1 + dist.get_rank()) % 2**63)  # dropout draws from it: different on each rank
    loss = choose_loss(config, settings, model)
    loader, evaluation = _loaders(config, data, device)
    profiles = [Profile(config.run.folder / "profile", *PROFILED)] if profile else []
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
        callbacks=[SampleCounter(loader), *_reporters(config, model, device, memory_planned), *profiles],
        wants_stop=wants_stop,
        saved={"tokenizer": data.tokenizer(), "data": {"crc32": data.summary.crc32}},
    )
    return trainer, plan


def shard(section: ShardSection, model: nn.Module, *optimizers: torch.optim.Optimizer) -> trueshard.Plan:
    """Call `trueshard.shard()` with the words of `[shard]`. Collective. Raise `UserError` for what it refuses."""
    ranks, mesh = dist.get_world_size() if dist.is_initialized() else 1, None
    if section.replicate > 1:
        if ranks % section.replicate:
            raise UserError(
                f"shard.replicate: {ranks} ranks do not divide into {section.replicate} copies; choose another"
            )
        mesh = replicated_mesh(section.replicate)
    try:
        return trueshard.shard(model, *optimizers, mesh=mesh, **vars(section.choices()))
    except (ValueError, trueshard.NothingFits) as error:
        raise UserError(f"[shard]: {one_line(error)}") from error


def _loaders(config: Config, data: Prepared, device: torch.device) -> tuple[Loader, EvaluationLoader | None]:
    """Return this rank's batches to train on, and those to evaluate on, if there are any."""
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


def _reporters(config: Config, model: nn.Module, device: torch.device, memory_planned: int | None) -> list[Callback]:
    """Return the callbacks that measure, write and draw each step; later ones read what earlier ones add."""
    compute = {"bf16": torch.bfloat16, "fp16": torch.float16, None: getattr(torch, config.model.dtype)}
    peak = metrics.peak_flops(device, compute[config.shard.mixed_precision])
    countable = peak is not None and config.model.quantize == "none"  # packed weights do not tell how many they are
    flops = metrics.flops_per_token(model, config.train.sequence_length) if countable else None
    folder, plain = config.run.folder, config.model_dump(mode="json", by_alias=True)
    return [
        Measures(flops_per_token=flops, peak_flops=peak, memory_planned=memory_planned),
        MetricsWriter(folder),
        Display(config.train.log_every),
        trackers.Tracking(trackers.trackers(config.log.to), plain, folder, config.log.project),
    ]


class SampleCounter(Callback):
    """Add to each step's record how many samples of the data were taken."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def on_step(self, trainer: Trainer, record: dict[str, Any]) -> None:
        record["samples"] = self._loader.state_dict()["samples"]
