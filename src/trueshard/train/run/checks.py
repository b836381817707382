"""Find everything that can be wrong with a run before a process starts and before a file is written.

The launcher calls `check` for the whole run; workers call it again, rank 0 first, because under `torchrun` and `srun`
there is no launcher. One run at a time may use a folder: it holds the folder's lock.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import trueshard
from trueshard.checkpoint.catalogue import names_newest
from trueshard.errors import UserError, explained, one_line, written_to
from trueshard.files import locked, making
from trueshard.machine import PROCESSES_PER_CORE, cpu_cores
from trueshard.train.config import Config
from trueshard.train.data.prepared import Prepared, prepare
from trueshard.train.data.tokenizer import load_processor, load_tokenizer
from trueshard.train.metrics.trackers import trackers
from trueshard.train.models.build import architecture, plain_settings, quiet_transformers
from trueshard.train.models.config import is_hub_name
from trueshard.train.optimizer import check_optimizer, check_schedule
from trueshard.train.run import resuming

LOCK = ".lock"
"""Name of the lock in a run's folder; it holds between hosts that share the file system."""
PATIENCE = 10.0
"""Seconds to wait for a run before it: processes whose launcher was killed end by themselves after a step."""


@dataclass(frozen=True)
class Ready:
    """Results of the checks: all that a worker needs to begin."""

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


def located(config: Config) -> Config:
    """Return `config` with `model.path = "…/latest"` resolved to the checkpoint that the run began with, or begins.

    Likewise the `model.revision` of a name on the hub: to the commit.
    """
    known = resuming.read_settings(config.run.folder).get("identity", {})
    given, begun = Path(config.model.path or ""), known.get("model.path")
    if config.model.path is not None and is_hub_name(config.model.path):
        began_so = begun == config.model.path and config.model.revision is None
        commit = (known.get("model.revision") if began_so else None) or config.model.place().name
        return resuming.with_settings(config, {"model.revision": commit})
    if not names_newest(given.expanduser()):
        return config
    newest = trueshard.latest(given.expanduser().parent)
    if begun is not None and Path(begun).parent == given.parent:
        found = begun
    elif newest is not None:
        found = str(given.parent / newest.name)
    else:
        return config
    return resuming.with_settings(config, {"model.path": found})


def check(config: Config, ranks: int, make: bool = True, override: bool = False) -> Ready:
    """Check `config` for a run of ``ranks`` processes, and, with ``make``, make the run's data if they are missing.

    With ``override``, what the steps mean may differ. Raises `UserError`, and leaves nothing on disk.
    """
    settings = check_settings(config, ranks)
    is_new = not (config.run.folder / "data").exists()
    saved = checkpoints_of(config).steps()
    changes = resuming.check_resumable(config, plain_settings(settings), override) if saved else []
    with written_to(config.run.folder):
        data = prepare(config, frozen=bool(saved) or not make, make=make)
    if config.rl is not None and make:
        from trueshard.train.rl.run import check_parts

        try:
            check_parts(config, data)
        except UserError:
            if is_new:
                shutil.rmtree(data.folder, ignore_errors=True)
            raise
    steps = config.train.steps or steps_of_epochs(config, len(data))
    return Ready(settings, data, saved[-1] if saved else 0, steps, changes)


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
        what = "sequences" if config.rl is None else "answers"
        multiple = math.lcm(portion, 1 if config.rl is None else config.rl.samples)
        enough = -(-train.batch_size // multiple) * multiple
        raise UserError(
            f"train.batch_size: {train.batch_size} {what} do not divide over {readers} ranks × train.{key} = "
            f"{portion // readers}{once}; use a multiple of {multiple}, such as {enough}"
        )
    check_optimizer(config.optimizer)
    check_schedule(config.schedule)
    trackers(config.log.to)
    tokenizer = load_tokenizer(config.tokenizer, config.model, config.data.format)
    vocab_size = len(tokenizer) if tokenizer is not None else config.tokenizer.vocab_size
    assert vocab_size is not None
    processor = load_processor(config.tokenizer, config.model) if config.images else None
    settings = architecture(config, vocab_size, getattr(processor, "image_token_id", None))
    limit = getattr(settings, "max_position_embeddings", None)
    if isinstance(limit, int) and limit < train.sequence_length:
        raise UserError(
            f"train.sequence_length: {train.sequence_length} is more than the model's max_position_embeddings = "
            f"{limit}; lower it to that, or choose a model with more positions"
        )
    return settings


def checkpoints_of(config: Config) -> trueshard.Checkpoints:
    """Return the run's checkpoints: the newest `train.keep` stay, and the best one if there is a patience."""
    best = config.evaluation is not None and config.evaluation.patience is not None
    return trueshard.Checkpoints(
        config.run.folder / "checkpoints",
        keep_last=config.train.keep,
        keep_best=1 if best else None,
        metric="evaluation",
    )


def tell_if_complete(folder: Path, ready: Ready, aloud: bool) -> bool:
    """Return True if the run has no steps left; say so, and what to change, if `aloud`."""
    is_drawn = any((folder / name).exists() for name in ("loss.png", "reward.png"))
    is_complete = ready.step >= ready.steps and is_drawn
    if is_complete and aloud:
        said = f"The run in {folder} is complete: {ready.step} steps. To train on, set train.steps above {ready.step}"
        print(f"{said}; to begin another run, change run.dir.", flush=True)
    return is_complete


def tell_changes(ready: Ready) -> None:
    """Print the settings that differ from the run's last start."""
    if ready.changes:
        print(f"Changed since the last start: {'; '.join(map(str, ready.changes))}", flush=True)


def default_nproc(on_cpu: int) -> int:
    """Return the number of CUDA devices or, without any, `on_cpu`."""
    return torch.cuda.device_count() if torch.cuda.is_available() else on_cpu


def check_nproc(nproc: int) -> None:
    """Raise `UserError` if this machine cannot start `nproc` processes."""
    if torch.cuda.is_available():
        most, why = torch.cuda.device_count(), "one for each CUDA device"
    else:
        most, why = cpu_cores() * PROCESSES_PER_CORE, f"{PROCESSES_PER_CORE} for each of {cpu_cores()} CPU cores"
    if not 1 <= nproc <= most:
        raise UserError(f"--nproc {nproc}: this machine can start 1 to {most} processes ({why}); choose one of these")


def check_writable(folder: Path) -> None:
    """Raise `UserError` unless the run's folder, or the nearest parent that exists, takes new files."""
    remedy = "choose another folder, or correct its permissions"
    with explained(f"run.dir: {folder} cannot be written", remedy, OSError, one_line):
        place = next(parent for parent in (folder, *folder.parents) if parent.exists())
        if not place.is_dir():
            raise UserError(f"run.dir: {folder} cannot be made, {place} is a file; choose another folder")
        tempfile.TemporaryDirectory(prefix=".trueshard-", dir=place).cleanup()


@contextlib.contextmanager
def held(folder: Path, patience: float = PATIENCE) -> Iterator[None]:
    """Hold the lock of a run's folder, which is made, and removed if it stays empty; `UserError` names its holder."""
    check_writable(folder)
    with making(folder), contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(folder / LOCK, patience))
        except TimeoutError as holder:
            said = f"run.dir: {folder} is in use by {holder}; wait for its end, or choose another folder"
            raise UserError(said) from None
        yield
