"""Everything that can be wrong with a run is found here: before a process starts, before a file is written.

The launcher calls `check` for the whole run. Workers call it again, rank 0 first: under `torchrun` and `srun` there is
no launcher, and after one all of it is ready. `check_settings` is the part of it that reads no data.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from trueshard.errors import UserError, written_to
from trueshard.machine import cpu_cores
from trueshard.train.config import Config
from trueshard.train.data.prepared import Prepared, prepare
from trueshard.train.data.tokenizer import load_processor, load_tokenizer
from trueshard.train.models.build import architecture, plain_settings, quiet_transformers
from trueshard.train.optimizer import check_optimizer
from trueshard.train.recipe import checkpoints_of, folder_of, steps_of
from trueshard.train.running import resuming
from trueshard.train.schedules import check_schedule
from trueshard.train.showing.trackers import trackers

PROCESSES_A_CORE = 4
"""CPU processes that may share a core: more are surely a slip, and each holds its own copy of the libraries."""


@dataclass(frozen=True)
class Ready:
    """What the checks have found, all that a worker needs to begin."""

    architecture: Any
    """The transformers configuration of the model."""
    data: Prepared
    step: int
    """The step of the checkpoint to go on from, or 0."""
    steps: int
    """Of the whole run."""
    changes: list[resuming.Change]
    """What is not as it was when the run was last started."""
    memory_planned: int | None = None
    """Bytes of a rank, where a forecast was made."""


def check(config: Config, ranks: int, make: bool = True, override: bool = False) -> Ready:
    """Hold `config` against the machine and the run's folder, and make the run's data where it is missing.

    Args:
        ranks: processes of the whole run.
        make: False on ranks that only read what another has made.
        override: go on from checkpoints although settings differ that decide what their steps mean.

    Raises:
        UserError: and then nothing was left on disk.
    """
    settings = check_settings(config, ranks)
    saved = checkpoints_of(config).steps()
    changes = resuming.check_resumable(config, plain_settings(settings), override) if saved else []
    if make:
        check_writable(config)
    processor = load_processor(config) if config.data.format == "vision" else None
    with written_to(folder_of(config)):
        data = prepare(config, frozen=bool(saved) or not make, make=make, processor=processor)
    return Ready(settings, data, saved[-1] if saved else 0, steps_of(config, data), changes)


def check_settings(config: Config, ranks: int) -> Any:
    """The transformers configuration of the model, once all settings are found to go together.

    Raises:
        UserError: they do not.
    """
    quiet_transformers()
    _check_batch(config, ranks)
    check_optimizer(config.optimizer)
    check_schedule(config.schedule)
    trackers(config.log.to)
    tokenizer = load_tokenizer(config)
    vocab_size = len(tokenizer) if tokenizer is not None else config.tokenizer.vocab_size
    assert vocab_size is not None
    processor = load_processor(config) if config.data.format == "vision" else None
    settings = architecture(config, vocab_size, getattr(processor, "image_token_id", None))
    _check_length(config, settings)
    return settings


def tell_if_complete(config: Config, ready: Ready, aloud: bool) -> bool:
    """Whether there is nothing left to do in this run; says so, and what to change, if `aloud`."""
    folder = folder_of(config)
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
    """Say which settings are not what they were when the run was last started."""
    if ready.changes:
        print(f"Changed since the last start: {'; '.join(map(str, ready.changes))}", flush=True)


def default_nproc(on_cpu: int) -> int:
    """Processes on this machine when none are asked for: one a CUDA device, else `on_cpu`."""
    return torch.cuda.device_count() if torch.cuda.is_available() else on_cpu


def check_nproc(nproc: int) -> None:
    """Raise `UserError` if this machine cannot start so many processes."""
    if torch.cuda.is_available():
        most, why = torch.cuda.device_count(), "one for each CUDA device"
    else:
        most, why = cpu_cores() * PROCESSES_A_CORE, f"{PROCESSES_A_CORE} for each of {cpu_cores()} CPU cores"
    if not 1 <= nproc <= most:
        raise UserError(f"--nproc {nproc}: this machine can start 1 to {most} processes ({why}); choose one of these")


def _check_batch(config: Config, ranks: int) -> None:
    portion = ranks * config.train.accumulate
    if config.train.batch_size % portion:
        above = -(-config.train.batch_size // portion) * portion
        raise UserError(
            f"train.batch_size: {config.train.batch_size} sequences do not divide over {ranks} ranks × "
            f"train.accumulate = {config.train.accumulate}; use a multiple of {portion}, such as {above}"
        )


def _check_length(config: Config, settings: Any) -> None:
    limit = getattr(settings, "max_position_embeddings", None)
    if isinstance(limit, int) and limit < config.train.sequence_length:
        raise UserError(
            f"train.sequence_length: {config.train.sequence_length} is more than the model's "
            f"max_position_embeddings = {limit}; lower it to that, or choose a model with more positions"
        )


def check_writable(config: Config) -> None:
    """Raise `UserError` unless the run's folder, or the nearest parent that exists, takes new files."""
    folder = folder_of(config)
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
