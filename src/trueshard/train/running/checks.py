"""Find everything that can be wrong with a run before a process starts and before a file is written.

The launcher calls `check` for the whole run; workers call it again, rank 0 first, because under `torchrun` and `srun`
there is no launcher. `check_settings` is the part that reads no data.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import trueshard
from trueshard.errors import UserError, written_to
from trueshard.machine import cpu_cores
from trueshard.train.config import Config, TrainSection
from trueshard.train.data.prepared import Prepared, prepare
from trueshard.train.data.tokenizer import load_processor, load_tokenizer
from trueshard.train.models.build import architecture, plain_settings, quiet_transformers
from trueshard.train.optimizer import check_optimizer, check_schedule
from trueshard.train.recipe import checkpoints_of, steps_of
from trueshard.train.running import resuming
from trueshard.train.showing.trackers import trackers

PROCESSES_PER_CORE = 4
"""CPU processes that may share a core: a larger number is surely a slip, and each loads its own libraries."""


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
    """Return `config` with `model.path = "…/latest"` resolved to a checkpoint, the same one in every start of a run.

    It is the checkpoint that the run began with or, if the run has not begun, the newest one.
    """
    given = Path(config.model.path or "")
    if given.name != "latest" or given.expanduser().exists():
        return config
    begun = resuming.read_settings(config.run.folder).get("identity", {}).get("model.path")
    if begun is not None and Path(begun).parent == given.parent:
        return resuming.with_settings(config, {"model.path": begun})
    newest = trueshard.latest(given.expanduser().parent)
    if newest is None:
        return config
    return resuming.with_settings(config, {"model.path": str(given.parent / newest.name)})


def check(config: Config, ranks: int, make: bool = True, override: bool = False) -> Ready:
    """Check `config` against the machine and the run's folder, and make the run's data if they are missing.

    Args:
        ranks: processes of the whole run.
        make: False on ranks that only read what another has made.
        override: resume although settings differ that decide what the steps mean.

    Raises:
        UserError: and then nothing was left on disk.
    """
    settings = check_settings(config, ranks)
    saved = checkpoints_of(config).steps()
    changes = resuming.check_resumable(config, plain_settings(settings), override) if saved else []
    if make:
        check_writable(config.run.folder)
    processor = load_processor(config.tokenizer, config.model) if config.data.format == "vision" else None
    with written_to(config.run.folder):
        data = prepare(config, frozen=bool(saved) or not make, make=make, processor=processor)
    return Ready(settings, data, saved[-1] if saved else 0, steps_of(config.train, data), changes)


def check_settings(config: Config, ranks: int) -> Any:
    """Return the transformers configuration of the model; raise `UserError` if settings do not go together."""
    quiet_transformers()
    _check_batch(config.train, ranks)
    check_optimizer(config.optimizer)
    check_schedule(config.schedule)
    trackers(config.log.to)
    tokenizer = load_tokenizer(config.tokenizer, config.model, config.data.format)
    vocab_size = len(tokenizer) if tokenizer is not None else config.tokenizer.vocab_size
    assert vocab_size is not None
    processor = load_processor(config.tokenizer, config.model) if config.data.format == "vision" else None
    settings = architecture(config, vocab_size, getattr(processor, "image_token_id", None))
    _check_length(config.train, settings)
    return settings


def tell_if_complete(folder: Path, ready: Ready, aloud: bool) -> bool:
    """Return True if the run has no steps left; say so, and what to change, if `aloud`."""
    if ready.step < ready.steps or not (folder / "loss.png").exists():
        return False
    if aloud:
        print(
            f"The run in {folder} is complete: {ready.step} steps. To train on, set train.steps above "
            f"{ready.step}; to begin another run, change run.dir.",
            flush=True,
        )
    return True


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
    place = folder
    try:
        while not place.exists():
            place = place.parent
        if not place.is_dir():
            raise UserError(f"run.dir: {folder} cannot be made, {place} is a file; choose another folder")
        probe = place / f".trueshard-{os.getpid()}"
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        raise UserError(
            f"run.dir: {folder} cannot be written ({error.strerror}); choose another folder, or correct its permissions"
        ) from None


def _check_batch(train: TrainSection, ranks: int) -> None:
    portion = ranks * train.accumulate
    if train.batch_size % portion:
        above = -(-train.batch_size // portion) * portion
        raise UserError(
            f"train.batch_size: {train.batch_size} sequences do not divide over {ranks} ranks × "
            f"train.accumulate = {train.accumulate}; use a multiple of {portion}, such as {above}"
        )


def _check_length(train: TrainSection, settings: Any) -> None:
    limit = getattr(settings, "max_position_embeddings", None)
    if isinstance(limit, int) and limit < train.sequence_length:
        raise UserError(
            f"train.sequence_length: {train.sequence_length} is more than the model's "
            f"max_position_embeddings = {limit}; lower it to that, or choose a model with more positions"
        )
