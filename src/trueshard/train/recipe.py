"""Turn a configuration into the parts of a training run: model, optimizer, data, loss and callbacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import trueshard
from trueshard import _torch
from trueshard.distributed import device_of, replicated_mesh
from trueshard.errors import UserError, one_line
from trueshard.model import names
from trueshard.runtime.engine import sharded
from trueshard.train.config import Config, ShardSection
from trueshard.train.data.loader import EvaluationLoader, Loader
from trueshard.train.data.prepared import Prepared
from trueshard.train.losses import CausalLoss, Loss, PreferenceLoss, logits_of
from trueshard.train.models.build import build, fill, reference
from trueshard.train.optimizer import build_optimizer, build_schedule
from trueshard.train.running.checks import Ready, checkpoints_of
from trueshard.train.showing import metrics, trackers
from trueshard.train.showing.metrics import Measures, MetricsWriter
from trueshard.train.showing.profile import Profile
from trueshard.train.showing.report import Display
from trueshard.train.trainer import Callback, Trainer

PROFILED = (3, 5)
"""First and last step that `--profile` records: caches and allocators are warm by then."""
DOCUMENT = 16
"""Tokens of each of the two documents by which packing is tested."""


def build_trainer(
    config: Config, ready: Ready, wants_stop: Callable[[], bool], *, device: torch.device, profile: bool = False
) -> tuple[Trainer, trueshard.Plan]:
    """Build, shard and fill the model, and put the loop around it. Collective; raises `UserError` on every rank."""
    train, settings, data, steps = config.train, ready.architecture, ready.data, ready.steps
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
        callbacks=[*_reporters(config, model, device, ready.memory_planned), *profiles],
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


def choose_loss(config: Config, settings: Any, model: nn.Module) -> Loss:
    """Return the loss of a run, for a sharded model with its values. A reference is sharded alike. Collective."""
    runtime = sharded(model)
    whole_logits = config.train.whole_logits
    if config.data.format == "preference":
        other = reference(config, settings)
        if other is not None:
            trueshard.shard(other, plan=runtime.plan, mesh=runtime.mesh)
            fill(config, other)
        return PreferenceLoss(other, config.preference.beta, config.preference.label_smoothing, whole_logits)
    if config.data.format == "chat" and config.data.packing:
        check_apart(model, device_of(runtime.mesh))
    return CausalLoss(whole_logits)


def check_apart(model: nn.Module, device: torch.device) -> None:
    """Raise `UserError`, on every rank, unless a packed document is independent of the one before it. Collective.

    ``position_ids`` restart at 0 with each document, and transformers' attention does not look across these places.
    Recurrent and convolutional layers do, and some models make masks of their own. So it is tested, in three small
    forwards without gradients and random numbers: one document is changed, and the output for the next must stay.
    """
    root = names.unwrap(model)
    find = getattr(root, "get_base_model", None)
    kind, remedy = _torch.own_class(find() if callable(find) else root).__name__, "set data.packing = false"
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            leak, noise = _influences(model, device)
    except TypeError as error:
        if "position_ids" not in str(error):
            raise
        raise UserError(f"data.packing: {kind} takes no position_ids, so packed documents mix; {remedy}") from error
    finally:
        model.train(training)
    worst = torch.tensor([leak, noise], device=device)
    if dist.is_initialized():
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    leak, noise = worst.tolist()
    if leak > 4 * (noise + torch.finfo(torch.float32).eps):
        raise UserError(f"data.packing: {kind} lets a document in a packed sequence see those before it; {remedy}")


def _influences(model: nn.Module, device: torch.device) -> tuple[float, float]:
    """Return a first document's influence on the logits of the second, and the reverse (noise), of the largest one."""
    vocabulary = int(names.unwrap(model).get_input_embeddings().num_embeddings)  # type: ignore[operator]
    positions = torch.arange(DOCUMENT, device=device).repeat(2).unsqueeze(0)

    def logits(first: int, second: int) -> torch.Tensor:
        steps = torch.arange(1, DOCUMENT + 1, device=device)
        tokens = torch.cat([steps * first, steps * second]).unsqueeze(0) % vocabulary
        return logits_of(model, {"input_ids": tokens, "position_ids": positions})[0].float()

    def change(one: torch.Tensor, two: torch.Tensor) -> float:
        return float((one - two).abs().max() / two.abs().max())

    plain, other_first, other_second = logits(3, 7), logits(5, 7), logits(3, 11)
    return change(other_first[DOCUMENT:], plain[DOCUMENT:]), change(other_second[:DOCUMENT], plain[:DOCUMENT])


def _loaders(config: Config, data: Prepared, device: torch.device) -> tuple[Loader, EvaluationLoader | None]:
    """Return this rank's batches to train on, and those to evaluate on, if there are any."""
    train, ranks = config.train, dist.get_world_size()
    here: dict[str, Any] = {"rank": dist.get_rank(), "ranks": ranks, "device": device}
    loader = Loader(
        data.train,
        data.collate,
        batch_size=train.batch_size,
        accumulate=train.accumulate,
        seed=train.seed,
        prefetch=config.data.prefetch,
        **here,
    )
    if config.evaluation is None or data.evaluation is None:
        return loader, None
    size = max(1, train.batch_size // (ranks * train.accumulate))
    limit = config.evaluation.samples
    return loader, EvaluationLoader(data.evaluation, data.collate, batch_size=size, limit=limit, **here)


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
