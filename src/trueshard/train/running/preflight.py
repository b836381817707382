"""Everything that can be wrong with a run is found here: before a process starts, before a file is written.

The launcher calls `check` for the whole run. Workers call it again, rank 0 first: under `torchrun` and `srun` there is
no launcher, and after one all of it is ready.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from trueshard.errors import UserError
from trueshard.train.config import Config
from trueshard.train.data import text
from trueshard.train.data.tokens import TokenData, load_tokenizer, prepare
from trueshard.train.models.build import architecture, plain_settings, quiet_transformers
from trueshard.train.optimizer import build_optimizer
from trueshard.train.running import resuming as checkpoints
from trueshard.train.running.launch import cpu_cores

PROCESSES_A_CORE = 4
"""CPU processes that may share a core: more are surely a slip, and each holds its own copy of the libraries."""


@dataclass(frozen=True)
class Ready:
    """What the checks have found, all that a worker needs to begin."""

    architecture: Any
    """The transformers configuration of the model."""
    data: TokenData
    step: int
    """The step of the checkpoint to go on from, or 0."""


def check(config: Config, ranks: int, make: bool = True) -> Ready:
    """Hold `config` against the machine and the run's folder, and make the run's tokens where they are missing.

    `ranks`: processes of the whole run. `make`: False on ranks that only read what another has made.
    Raises `UserError`, and then leaves nothing on disk.
    """
    quiet_transformers()
    _check_batch(config, ranks)
    build_optimizer(config.optimizer, [torch.nn.Parameter(torch.zeros(2, 2))])
    source = text.find(config.data)
    tokenizer = load_tokenizer(config)
    vocab_size = len(tokenizer) if tokenizer is not None else config.tokenizer.vocab_size
    assert vocab_size is not None
    settings = architecture(config, vocab_size)
    _check_length(config, settings)
    steps = checkpoints.of(config).steps()
    if steps:
        checkpoints.check_resumable(config, plain_settings(settings))
    if make:
        _check_writable(config)
    data = prepare(config, source, tokenizer, frozen=bool(steps) or not make, make=make)
    return Ready(settings, data, steps[-1] if steps else 0)


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


def _check_writable(config: Config) -> None:
    """Raise `UserError` unless the run's folder, or the nearest parent that exists, takes new files."""
    folder = checkpoints.folder(config)
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
