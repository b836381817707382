"""Find everything that can be wrong with a run before a process starts and before a file is written.

The launcher calls `check` for the whole run; workers call it again, rank 0 first, because under `torchrun` and `srun`
there is no launcher. One run at a time may use a folder: it holds the folder's lock.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import trueshard
from trueshard.checkpoint.snapshot_parts import clear, folder_of
from trueshard.checkpoint.snapshots import newest_parts
from trueshard.errors import UserError, explained, one_line, written_to
from trueshard.files import locked, making
from trueshard.machine import PROCESSES_PER_CORE, cpu_cores
from trueshard.text import nearest
from trueshard.train.callbacks import Callback
from trueshard.train.config import Config
from trueshard.train.data.prepared import Prepared, prepare
from trueshard.train.data.tokenizer import load_processor, load_tokenizer
from trueshard.train.evaluation import is_greater_better, named
from trueshard.train.losses import loss_of
from trueshard.train.metrics.trackers import trackers
from trueshard.train.models import kernels
from trueshard.train.models.build import architecture, from_files, plain_settings, quiet_transformers
from trueshard.train.optimizer import check_optimizer, check_schedule
from trueshard.train.own_code import own
from trueshard.train.run import resuming

LOCK = ".lock"
"""Name of the lock in a run's folder; it holds between hosts that share the file system."""
PATIENCE = 10.0
"""Seconds to wait for a run before it: processes whose launcher was killed end by themselves after a step."""


@dataclass(frozen=True)
class Ready:
    """Results of the checks: all that a worker needs to begin. From here on nothing else has the configuration."""

    config: Config
    """The configuration as `resuming.resolved` has made it."""
    architecture: Any
    """The transformers configuration of the model."""
    data: Prepared
    step: int
    """The step of the newest checkpoint, or 0."""
    steps: int
    """Optimizer steps of the whole run."""
    changes: list[resuming.SettingChange]
    """Settings that differ from the run's last start."""
    memory_planned: int | None = None
    """Forecast peak memory of a rank, in bytes; None: there is no forecast."""
    goes_on: bool = False
    """True if ranks are started again after a loss, with a step to load. Workers set it, equal on all of them."""

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.config.run.folder


def check(config: Config, ranks: int, make: bool = True, override: bool = False) -> Ready:
    """Check `config` for a run of ``ranks`` processes, and, with ``make``, make the run's data if they are missing.

    With ``override``, what the steps mean may differ. Raises `UserError`, and leaves nothing on disk.
    """
    for name in ("data", "checkpoints", "metrics.jsonl", "plan.json"):
        place = config.run.folder / name
        if os.path.lexists(place) and place.is_dir() == ("." in name):
            raise UserError(f"run.dir: {place} is {'a' if '.' in name else 'no'} folder; remove it")
    config = resuming.resolved(config, ranks)
    settings, folder = check_settings(config, ranks), config.run.folder
    kernels.check_here(config.model, settings)
    is_new = not (folder / "data").exists()
    if config.train.memory_every is not None and not resuming.read_settings(folder):
        clear(folder_of(folder))  # a run that begins: what memory has is of one that was removed
    begun = any(newest := newest_steps(config))
    changes = resuming.check_resumable(config, plain_settings(settings), override) if begun else []
    with written_to(folder):
        data = prepare(config, frozen=begun or not make, make=make)
    if make:
        try:
            _check_parts(config, data)
        except UserError:
            if is_new:
                shutil.rmtree(data.folder, ignore_errors=True)
            raise
    steps = config.train.steps or steps_of_epochs(config, len(data))
    return Ready(config, settings, data, newest[0], steps, changes)


def _check_parts(config: Config, data: Prepared) -> None:
    """Raise `UserError` for a reward, a loss or a metric that is wrong, before a model is built."""
    if config.rl is not None:
        from trueshard.train.rl.run import check_parts

        check_parts(config, data)
    elif (section := config.evaluation) is not None:
        of_loss = ("loss",) if config.data.format == "preference" else ("loss", "perplexity")
        known = [named(name, metric) for name in data.evaluation for metric in of_loss]
        if section.generate is not None:
            from trueshard.train.generation import check_answers

            known += check_answers(config, data)
        if section.best is not None and section.best not in known:
            near = nearest(section.best, known)
            raise UserError(f"evaluation.best: there is no {section.best!r}; use one of {', '.join(known)}.{near}")


def steps_of_epochs(config: Config, samples: int) -> int:
    """Return the optimizer steps of `train.epochs` over ``samples``: sequences, or prompts with several answers."""
    answers = samples * (config.rl.samples if config.rl is not None else 1)
    return max(1, math.ceil((config.train.epochs or 0) * answers / config.train.batch_size))


def count_samples(config: Config) -> int | None:
    """Read the data as a run would, and keep nothing; return the number of training samples, None if streamed.

    Raises `UserError`.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        data = prepare(resuming.with_settings(config, {"run.dir": folder}), frozen=False, make=True)
        return None if config.data.streaming else len(data)


def check_settings(config: Config, ranks: int) -> Any:
    """Return the transformers configuration of the model; raise `UserError` if settings do not go together."""
    quiet_transformers()
    _check_batch(config, ranks)
    check_optimizer(config.optimizer)
    check_schedule(config.schedule)
    loss_of(config.train)
    for words in config.train.callbacks:
        own("train.callbacks", words, base=Callback)
    if config.data.transform is not None:
        own("data.transform", config.data.transform, "record")
    trackers(config.log.to)
    if (config.model.path or config.model.config) and not config.images:
        from_files(config)  # before the tokenizer, which transformers reads with it
    tokenizer = load_tokenizer(config.tokenizer, config.model, config.data.format)
    vocab_size = (config.tokenizer.vocab_size or 0) + len(config.tokenizer.add_tokens or ())
    if tokenizer is not None:  # one may leave numbers out
        vocab_size = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values()))
    processor = load_processor(config.tokenizer, config.model) if config.images else None
    settings = architecture(config, vocab_size, getattr(processor, "image_token_id", None))
    limit = getattr(settings, "max_position_embeddings", None)
    if isinstance(limit, int) and limit < config.train.sequence_length:
        raise UserError(
            f"train.sequence_length: {config.train.sequence_length} is more than the model's max_position_embeddings = "
            f"{limit}; lower it to that, or choose a model with more positions"
        )
    return settings


def _check_batch(config: Config, ranks: int) -> None:
    train = config.train
    try:
        readers = config.shard.readers(ranks)
    except ValueError as error:
        raise UserError(str(error)) from None
    # Without train.microbatch, answers are dealt to microbatches of different sizes.
    is_even = config.rl is None or train.microbatch is not None
    if is_even and train.batch_size % (portion := train.portion(readers)):
        once = "" if readers == ranks else ", those that read the same samples counted once"
        key = "accumulate" if train.microbatch is None else "microbatch"
        noun, group = ("sequences", 1) if config.rl is None else ("answers", config.rl.samples)
        multiple = math.lcm(portion, group)
        enough = -(-train.batch_size // multiple) * multiple
        raise UserError(
            f"train.batch_size: {train.batch_size} {noun} do not divide over {readers} ranks × train.{key} = "
            f"{portion // readers}{once}; use a multiple of {multiple}, such as {enough}"
        )


def checkpoints_of(config: Config) -> trueshard.Checkpoints:
    """Return the run's checkpoints: the newest `train.keep` stay, and the best one if a patience or `best` is set."""
    section = config.evaluation
    best, greater = (None, None) if section is None else (section.best, section.greater)
    great = best is not None and is_greater_better(best, greater)
    return trueshard.Checkpoints(
        config.run.folder / "checkpoints",
        keep_last=config.train.keep,
        keep_best=1 if best is not None or (section is not None and section.patience is not None) else None,
        metric="evaluation" if best is None else f"evaluation_{best}",
        mode="max" if great else "min",
    )


def snapshots_of(config: Config) -> trueshard.Snapshots | None:
    """Return the run's snapshots in memory; None if it keeps none."""
    if config.train.memory_every is None:
        return None
    return trueshard.Snapshots(config.run.folder, copies=config.train.memory_copies, fallback=on_disk(config))


def on_disk(config: Config) -> Path:
    """Return the folder for snapshots that have no place in memory, or whose run has ended in between."""
    return config.run.folder / "memory"


def newest_steps(config: Config) -> tuple[int, int]:
    """Return the newest step on disk, and the newest one in this host's memory; 0 where there is none."""
    parts = [] if config.train.memory_every is None else newest_parts(config.run.folder, on_disk(config))
    return max(checkpoints_of(config).steps(), default=0), parts[0].step if parts else 0


def tell_if_complete(ready: Ready, aloud: bool) -> bool:
    """Return True if the run has no steps left; say so, and what to change, if `aloud`."""
    is_drawn = any((ready.folder / name).exists() for name in ("loss.png", "reward.png"))
    is_complete = ready.step >= ready.steps and is_drawn
    if is_complete and aloud:
        key, value = ("epochs", train.epochs) if (train := ready.config.train).steps is None else ("steps", ready.step)
        print(
            f"The run in {ready.folder} is complete: {ready.step} steps. To train on, set train.{key} above {value:g}; "
            "to begin another run, change run.dir.",
            flush=True,
        )
    return is_complete


def tell_changes(ready: Ready) -> None:
    """Print the settings that differ from the run's last start."""
    if ready.changes:
        print(f"Changed since the last start: {'; '.join(map(str, ready.changes))}", flush=True)


def process_count(nproc: int | None, on_cpu: int) -> int:
    """Return how many processes to start: `nproc`, or one a CUDA device, or `on_cpu` where there is none.

    Raises `UserError` if this machine cannot start so many.
    """
    if torch.cuda.is_available():
        default = most = torch.cuda.device_count()
        why = "one for each CUDA device"
    else:
        default, most = on_cpu, cpu_cores() * PROCESSES_PER_CORE
        why = f"{PROCESSES_PER_CORE} for each of {cpu_cores()} CPU cores"
    count = default if nproc is None else nproc
    if not 1 <= count <= most:
        raise UserError(f"--nproc {count}: this machine can start 1 to {most} processes ({why}); choose one of these")
    return count


@contextlib.contextmanager
def held(folder: Path, patience: float = PATIENCE) -> Iterator[None]:
    """Hold the lock of a run's folder, which is made, and removed if it stays empty.

    Raises `UserError`: it takes no new files, or another run holds it, which is named.
    """
    remedy = "choose another folder, or correct its permissions"
    with contextlib.ExitStack() as stack:
        with explained(f"run.dir: {folder} cannot be written", remedy, OSError, one_line):
            place = next(parent for parent in (folder, *folder.parents) if parent.exists())
            if not place.is_dir():
                raise UserError(f"run.dir: {folder} cannot be made, {place} is a file; choose another folder")
            stack.enter_context(making(folder))
            try:
                stack.enter_context(locked(folder / LOCK, patience))
            except TimeoutError as holder:
                message = f"run.dir: {folder} is in use by {holder}; wait for its end, or choose another folder"
                raise UserError(message) from None
        yield
