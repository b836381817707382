"""The training loop: plain PyTorch around `trueshard.shard()`, the same for one rank and for many.

- One all-reduce a step carries the loss and the wish to stop, so that ranks agree on both.
- Everything a step depends on is in the checkpoint or is a pure function of seed and step (data order, learning
  rate, random state), so that a resumed run continues bit for bit at the same world size.
- Loss is the mean over all tokens of the global batch, in nats.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import trueshard
from trueshard.errors import UserError
from trueshard.train.config import Config, ShardSection
from trueshard.train.data.order import sequence_indices
from trueshard.train.models.build import build, plain_settings
from trueshard.train.optimizer import build_optimizer, learning_rate
from trueshard.train.running import resuming as checkpoints
from trueshard.train.running.launch import Ranks
from trueshard.train.running.preflight import Ready
from trueshard.train.running.signals import STOPPED, StopRequest
from trueshard.train.sample import sample
from trueshard.train.showing import report
from trueshard.train.showing.metrics import MetricsFile, read_metrics
from trueshard.train.showing.progress import StepDisplay


@dataclass
class Trainer:
    """A sharded model and its optimizer, with the two integers that say how far they are."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: int = 0
    samples: int = 0


def train(config: Config, ready: Ready, ranks: Ranks, stop: StopRequest) -> int:
    """Train from the run's last checkpoint, or from the start, to `train.steps`; returns the exit code."""
    trainer = start(config, ready, ranks)
    folder = checkpoints.folder(config)
    if ranks.rank == 0:
        checkpoints.write_settings(config, plain_settings(ready.architecture))
    finished = run_steps(config, ready, ranks, trainer, stop)
    if not finished:
        if ranks.rank == 0:
            saved = checkpoints.of(config).path(trainer.step)
            print(f"Stopped after step {trainer.step}; saved in {saved}. The same command resumes.", flush=True)
        dist.barrier()
        return STOPPED
    finish(config, ready, ranks, trainer, folder)
    dist.barrier()
    return 0


def start(config: Config, ready: Ready, ranks: Ranks) -> Trainer:
    """Build, shard and, where there is a checkpoint, load."""
    model = build(config, ready.architecture)
    optimizer = build_optimizer(config.optimizer, model.parameters())
    count = sum(parameter.numel() for parameter in model.parameters())
    try:
        plan = trueshard.shard(model, optimizer, **shard_words(config.shard))
    except ValueError as error:
        raise UserError(f"[shard]: {' '.join(str(error).split())}") from error
    trainer = Trainer(model, optimizer)
    if ranks.rank == 0:
        data = ready.data.summary
        print(plan)
        print(
            f"{count:,} parameters on {ranks.world} {ranks.device.type} rank{'s' if ranks.world > 1 else ''}, "
            f"{data.tokens:,} tokens of text in {data.documents:,} documents",
            flush=True,
        )
    if ready.step:
        resume(config, ready, ranks, trainer)
    model.train()
    return trainer


def shard_words(section: ShardSection) -> dict[str, Any]:
    """The arguments of `trueshard.shard()` that `[shard]` stands for."""
    return section.model_dump()


def resume(config: Config, ready: Ready, ranks: Ranks, trainer: Trainer) -> None:
    """Load the checkpoint of `ready.step` in place; raises `UserError` if it is damaged, or of another text."""
    path = checkpoints.of(config).path(ready.step)
    try:
        found = trueshard.load(path, model=trainer.model, optimizer=trainer.optimizer)["trainer"]
    except (ValueError, KeyError, OSError) as error:
        detail = " ".join(str(error).split())
        raise UserError(f"{path} does not load: {detail}; delete it to go on from the one before it") from error
    if found["tokens_crc32"] != ready.data.summary.crc32:
        raise UserError(
            f"data.path: the tokens in {ready.data.folder} are not those that {path} was trained on; "
            "put the text back as it was, or choose another run.dir"
        )
    trainer.step, trainer.samples = int(found["step"]), int(found["samples"])
    if ranks.rank == 0:
        print(f"Resumed after step {trainer.step} from {path}", flush=True)


def save(config: Config, ready: Ready, ranks: Ranks, trainer: Trainer) -> Path:
    """Write a checkpoint of all ranks and delete those that are no longer kept."""
    kept = checkpoints.of(config)
    progress = {"step": trainer.step, "samples": trainer.samples, "tokens_crc32": ready.data.summary.crc32}
    tokenizer = ready.data.tokenizer()
    kept.save(trainer.step, model=trainer.model, optimizer=trainer.optimizer, tokenizer=tokenizer, trainer=progress)
    return kept.path(trainer.step)


def run_steps(config: Config, ready: Ready, ranks: Ranks, trainer: Trainer, stop: StopRequest) -> bool:
    """Take the steps that are left; returns False if a stop was asked for before the last. Both ends are saved."""
    settings, first = config.train, trainer.step + 1
    metrics = MetricsFile(checkpoints.folder(config) / "metrics.jsonl", trainer.step) if ranks.rank == 0 else None
    stopping = False
    with StepDisplay(first, settings.steps, settings.log_every, ranks.rank == 0) as display:
        while trainer.step < settings.steps and not stopping:
            began = time.perf_counter()
            record = take_step(config, ready, ranks, trainer)
            record["loss"], stopping = agree(record["loss"], stop.requested, ranks)
            seconds = time.perf_counter() - began
            record["tokens_per_second"] = settings.batch_size * settings.sequence_length / seconds
            if metrics is not None:
                metrics.write(record)
            display.step(record)
            if stopping:
                display.say(f"Saving after step {trainer.step} …")
            if stopping or trainer.step % settings.checkpoint_every == 0 or trainer.step == settings.steps:
                save(config, ready, ranks, trainer)
    if metrics is not None:
        metrics.close()
    return trainer.step >= settings.steps


def take_step(config: Config, ready: Ready, ranks: Ranks, trainer: Trainer) -> dict[str, Any]:
    """One optimizer step; returns what `metrics.jsonl` says of it, with the mean loss of this rank's own part."""
    settings = config.train
    indices = sequence_indices(settings.seed, trainer.samples, settings.batch_size, ready.data.sequences)
    own = settings.batch_size // ranks.world
    batch = torch.from_numpy(ready.data.batch(indices[ranks.rank * own : (ranks.rank + 1) * own])).to(ranks.device)
    trainer.step += 1
    trainer.samples += settings.batch_size
    rate = learning_rate(config.schedule, config.optimizer.lr, trainer.step, settings.steps)
    for group in trainer.optimizer.param_groups:
        group["lr"] = rate
    torch.manual_seed((settings.seed + trainer.step * ranks.world + ranks.rank) % 2**63)  # what dropout draws from
    loss = torch.zeros((), device=ranks.device)
    for number, part in enumerate(batch.chunk(settings.accumulate), start=1):
        with trueshard.accumulate(trainer.model, last=number == settings.accumulate):
            part_loss = next_token_loss(trainer.model, part) / settings.accumulate
            part_loss.backward()
        loss += part_loss.detach()
    limit = float("inf") if settings.max_grad_norm is None else settings.max_grad_norm
    norm = trueshard.clip_grad_norm_(trainer.model.parameters(), limit)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    return {
        "step": trainer.step,
        "loss": loss.item(),
        "grad_norm": float(norm),
        "lr": rate,
        "samples": trainer.samples,
    }


def next_token_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy, nats, of tokens int64 `[batch, length + 1]`, each predicted from those before it."""
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def agree(loss: float, wants_stop: bool, ranks: Ranks) -> tuple[float, bool]:
    """The mean loss over ranks, and whether any rank was asked to stop."""
    shared = torch.tensor([loss, float(wants_stop)], dtype=torch.float64, device=ranks.device)
    dist.all_reduce(shared)
    total, wishes = shared.tolist()
    return total / ranks.world, wishes > 0


def finish(config: Config, ready: Ready, ranks: Ranks, trainer: Trainer, folder: Path) -> None:
    """Sample, draw, and say what the run has made. All ranks sample, rank 0 does the rest."""
    continuation = None
    tokenizer = ready.data.tokenizer()
    if config.sample.tokens:
        length, seed = config.train.sequence_length, config.train.seed
        continuation = sample(trainer.model, tokenizer, config.sample, length, seed, ranks.device)
    if ranks.rank != 0:
        return
    records = read_metrics(folder / "metrics.jsonl")
    entropy = ready.data.summary.unigram_entropy
    report.draw_loss(records, entropy, folder / "loss.png")
    loss, count = report.final_loss(records)
    print(f"\nLoss {loss:.3f} nats a token (mean of the last {count} steps); unigram entropy of the text {entropy:.3f}")
    if continuation is not None:
        (folder / "sample.txt").write_text(continuation, encoding="utf-8")
        print(f"\nA sampled continuation:\n\n{continuation}")
    saved = checkpoints.of(config)
    kept = [saved.path(step) for step in saved.steps()]
    print(f"\nFiles made:\n{report.file_list(folder, kept)}", flush=True)
