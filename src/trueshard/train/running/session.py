"""One rank's training from beginning to end: what is resumed, the steps, what is left and said afterwards."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

import trueshard
from trueshard.errors import UserError, written_to
from trueshard.train import recipe
from trueshard.train.config import Config
from trueshard.train.data.prepared import NOUNS
from trueshard.train.models.build import plain_settings
from trueshard.train.running import planned, resuming
from trueshard.train.running.launch import Ranks
from trueshard.train.running.preflight import Ready
from trueshard.train.running.signals import STOPPED, StopRequest
from trueshard.train.sample import sample
from trueshard.train.showing import report
from trueshard.train.showing.metrics import read_metrics
from trueshard.train.trainer import NonFiniteLoss, Trainer


def train(
    config: Config, ready: Ready, ranks: Ranks, stop: StopRequest, *, profile: bool = False, override: bool = False
) -> int:
    """Train from the run's last checkpoint, or from the start, to the last step; returns the exit code. Collective."""
    trainer, plan = recipe.build_trainer(
        config,
        ready.architecture,
        ready.data,
        lambda: stop.requested,
        device=ranks.device,
        memory_planned=ready.memory_planned,
        profile=profile,
    )
    if ranks.rank == 0:
        print(plan)
        print(f"{_size(trainer)} on {_ranks(ranks)}, {_data(config, ready)}", flush=True)
    resume(config, ready, ranks, trainer, override)
    if ranks.rank == 0:  # not before: what a run that cannot go on says of itself is of no use to the next
        resuming.write_settings(config, plain_settings(ready.architecture), trainer.step)
        if ranks.device.type == "cpu":  # elsewhere it stands there with its forecast
            planned.write(config, plan)
    try:
        with written_to(recipe.folder_of(config)):
            complete = trainer.fit()
    except NonFiniteLoss as error:
        raise UserError(f"{error}. Lower optimizer.lr, or set train.skip_nonfinite to leave such steps out") from error
    if not complete and stopped_by_signal(trainer):
        if ranks.rank == 0:
            saved = recipe.checkpoints_of(config).path(trainer.step)
            print(f"Stopped after step {trainer.step}; saved in {saved}. The same command resumes.", flush=True)
        dist.barrier()
        return STOPPED
    finish(config, ready, ranks, trainer)
    dist.barrier()
    return 0


def stopped_by_signal(trainer: Trainer) -> bool:
    """Whether the run ended because it was asked to, and not because it need not go on."""
    return trainer.stopped == "asked to"


def resume(config: Config, ready: Ready, ranks: Ranks, trainer: Trainer, override: bool) -> None:
    """Load the newest checkpoint in place; raises `UserError` if it is damaged, or of other data."""
    path = recipe.checkpoints_of(config).latest()
    if path is None:
        return
    try:
        found = trainer.resume()
    except (ValueError, KeyError, OSError) as error:
        detail = " ".join(str(error).partition(" strict=False")[0].split())
        remedy = (
            "delete it to go on from the one before it"
            if damaged(path)
            else "it is whole: set the configuration back to what it was made with, or choose another run.dir"
        )
        raise UserError(f"{path} does not load: {detail}; {remedy}") from error
    assert found is not None
    if found["data"]["crc32"] != ready.data.summary.crc32 and not override:
        raise UserError(
            f"data.path: what {ready.data.folder} holds is not what {path} was trained on; put it back as it was, "
            "choose another run.dir, or go on all the same with --override"
        )
    if ranks.rank == 0:
        print(f"Resumed after step {trainer.step} from {path}", flush=True)


def damaged(path: Path) -> bool:
    """Whether a checkpoint does not hold what was saved."""
    try:
        trueshard.check(path)
    except (ValueError, OSError):
        return True
    return False


def finish(config: Config, ready: Ready, ranks: Ranks, trainer: Trainer) -> None:
    """Sample, draw, and say what the run has made. All ranks sample, rank 0 does the rest."""
    continuation, folder = None, recipe.folder_of(config)
    if config.sample.tokens and config.data.format == "text":
        length, seed = config.train.sequence_length, config.train.seed
        continuation = sample(trainer.model, ready.data.tokenizer(), config.sample, length, seed, ranks.device)
    if ranks.rank != 0:
        return
    records = read_metrics(folder / "metrics.jsonl")
    entropy = ready.data.summary.unigram_entropy if config.data.format == "text" else None
    report.draw_loss(records, entropy, folder / "loss.png")
    unit = getattr(trainer.loss, "unit", "token")
    print(f"\n{report.final_line(records, entropy, unit)}")
    if trainer.stopped:
        print(f"Ended after step {trainer.step}: {trainer.stopped}")
    if continuation is not None:
        (folder / "sample.txt").write_text(continuation, encoding="utf-8")
        print(f"\nA sampled continuation:\n\n{continuation}")
    saved = recipe.checkpoints_of(config)
    kept = [saved.path(step) for step in saved.steps()]
    print(f"\nFiles made:\n{report.file_list(folder, kept, saved.best())}", flush=True)


def _size(trainer: Trainer) -> str:
    every = list(trainer.model.parameters())
    count = sum(parameter.numel() for parameter in every)
    trained = sum(parameter.numel() for parameter in every if parameter.requires_grad)
    return f"{count:,} parameters" + (f" ({trained:,} trained)" if trained != count else "")


def _data(config: Config, ready: Ready) -> str:
    summary, noun = ready.data.summary, {"text": "documents"}.get(config.data.format, NOUNS[config.data.format])
    if summary.documents is None:
        return f"a stream of {NOUNS[config.data.format]}"
    tokens = "" if summary.tokens is None else f"{summary.tokens:,} tokens of text in "
    return f"{tokens}{summary.documents:,} {noun}"


def _ranks(ranks: Ranks) -> str:
    return f"{ranks.world} {ranks.device.type} rank{'s' if ranks.world > 1 else ''}"
