"""Out of memory: recognise it, record what a rank had, and find settings that would fit.

- On a GPU the figures are the caching allocator's. On a CPU they are the process's data, less what it held before the
  model was made, against the limits that the system sets a process.
- Remedies that cost the least speed are tried first: reshard, generating without a copy of the model that stays,
  smaller microbatches with more accumulation, recomputation, then all of them together. Where the planner thought that
  the configuration fits, it was wrong by at least the difference, and the remedy has to fit into that much less. A
  model that the planner cannot simulate gets a setting that takes less for certain.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from trueshard.machine import memory_of_process
from trueshard.model.policies import FREES_ALL
from trueshard.options import SHARDED
from trueshard.text import size
from trueshard.train.config import Config
from trueshard.train.run import resuming

NAME = "out-of-memory.json"
MARGIN = {"cuda": 0.95, "cpu": 0.6}
"""Part of a rank's memory that a remedy may be planned to take, by device type. On a CPU the plan counts tensors alone,
and malloc holds half as much again between them."""

Settings = Mapping[str, Any]
"""Settings by dotted key."""


@dataclass(frozen=True)
class Shortage:
    """The memory of a rank when an allocation failed, in bytes."""

    rank: int
    used: int
    """Bytes of tensors, and of what the allocator kept for them, before the allocation that failed."""
    requested: int
    """Bytes of that allocation; 0 where the error does not say it."""
    available: int
    """Bytes that tensors of this process could have at most."""

    def __str__(self) -> str:
        when = f" when {size(self.requested)} more was asked for" if self.requested else ""
        return f"rank {self.rank} ran out of memory: {size(self.used)} of {size(self.available)} were used{when}"


class MemoryMeter:
    """Measure what this process holds, from before the model is made."""

    def __init__(self, device: torch.device, local_ranks: int) -> None:
        self._device = device
        self._before = 0 if device.type == "cuda" else psutil.Process().memory_info().data
        self._limit = memory_of_process(local_ranks)

    def shortage(self, rank: int, error: BaseException) -> Shortage:
        """Return the figures of now; to be called while `error` is handled."""
        if self._device.type == "cuda":
            used = torch.cuda.memory_reserved(self._device)
            available = used + torch.cuda.mem_get_info(self._device)[0]
        else:
            available = max(1, self._limit - self._before)
            used = min(available, max(0, psutil.Process().memory_info().data - self._before))
        return Shortage(rank, used, _requested(str(error)), available)


_REFUSALS = (
    "can't allocate memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Failed to CUDA calloc",
    "Cuda failure 2 'out of memory'",
)
"""Words of errors that have no type of their own: of the CPU's allocator, of pinned memory, of cuBLAS and of NCCL."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if the error is an allocator's that had nothing more to give."""
    refused = isinstance(error, RuntimeError) and any(words in str(error) for words in _REFUSALS)
    return refused or isinstance(error, (torch.OutOfMemoryError, MemoryError))


def _requested(message: str) -> int:
    """Return the bytes that an allocator's message names: torch's for the CPU ("512 bytes"), or CUDA ("20.00 MiB")."""
    match = re.search(r"[Tt]ried to allocate ([\d.]+) ([KMGT]?)", message)
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2] or " ")) if match else 0


def leave(folder: Path, shortage: Shortage) -> bool:
    """Write the record; return False if another rank was first."""
    scratch = folder / f".{NAME}.{os.getpid()}"
    scratch.write_text(json.dumps(asdict(shortage)), encoding="utf-8")
    try:
        os.link(scratch, folder / NAME)
    except FileExistsError:
        return False
    finally:
        scratch.unlink()
    return True


def read(folder: Path) -> Shortage | None:
    """Return the record, or None if there is none."""
    try:
        return Shortage(**json.loads((folder / NAME).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None


def clear(folder: Path) -> None:
    """Remove the record."""
    (folder / NAME).unlink(missing_ok=True)


@dataclass(frozen=True)
class Remedy:
    """Settings that would end a shortage of memory, or why there are none."""

    message: str
    """One line for the user."""
    settings: Settings | None
    """Settings with which the run goes on; None: it ends."""


def find_remedy(config: Config, settings: Any, ranks: int, local_ranks: int, device: torch.device) -> Remedy | None:
    """Return a remedy for a recorded shortage, whose record goes; `on_oom = "tighten"` keeps it in `config.json`."""
    folder = config.run.folder
    shortage = read(folder)
    if shortage is None:
        return None
    from trueshard.planner.hardware import hardware_here
    from trueshard.train.run import forecast  # the planner, which few runs need

    config = resuming.tightened(config, ranks)  # what an earlier remedy of this run has set
    # Tensors take as many bytes on any GPU: so a slice of one is planned for, and one that no catalogue has.
    target = device if device.type == "cpu" else hardware_here(device, otherwise="h100")
    reasons: list[str] = []

    @functools.cache
    def planned(*settings_changed: tuple[str, Any]) -> int | None:
        """Return the planned bytes a rank with this change; None where that cannot be planned."""
        changed = resuming.with_settings(config, dict(settings_changed))
        result = forecast.study(changed, settings, ranks, target, local_ranks)
        if isinstance(result, forecast.Unplanned):
            reasons.append(result)
        return forecast.bytes_of(result)

    def fits(change: Settings) -> bool:
        return (needed := planned(*change.items())) is not None and needed <= budget

    try:
        now = planned()
        budget = int(MARGIN[device.type] * min(shortage.available, now or shortage.available))
        if now is None:
            facts = f"{shortage}; what it takes could not be planned ({reasons[0]})"
            certain = [*_accumulations(config, ranks)[:1], *_recomputations(config)[-1:], *_reshard(config, ranks)]
            change = next(iter(certain), None)
        else:
            facts = f"{shortage}; the plan needs {size(now)} a rank"
            change = next(filter(fits, _changes(config, ranks, device, fits)), None)
        if change is None:
            lower = "train.sequence_length or train.batch_size" + (", or rollout.batch" if config.rl else "")
            return Remedy(
                f"{facts}; no change of resharding, microbatch or recomputation fits: use more ranks or a larger "
                f"device, or lower {lower}",
                None,
            )
        needed = None if now is None else planned(*change.items())
        text = " with ".join(f"{key} = {json.dumps(value)}" for key, value in change.items())
        expected = "" if needed is None else f" (planned: {size(needed)} a rank)"
        if config.train.on_oom != "tighten" or "shard.offload" in change:
            hint = "" if "shard.offload" in change else ', or train.on_oom = "tighten" to have it done'
            fits_or_less = "would fit" if expected else "takes less"
            return Remedy(f"{facts}; {text}{expected} {fits_or_less}: set it{hint}", None)
        resuming.keep_tightened(folder, change, ranks)
        return Remedy(f"{facts}; going on with {text}{expected}, the global batch stays as it is", change)
    finally:
        clear(folder)


def _changes(
    config: Config, ranks: int, device: torch.device, fits: Callable[[Settings], bool]
) -> Iterator[dict[str, Any]]:
    """Yield changes, those that cost the least speed first. Of several microbatches only if the smallest fits."""
    accumulations, recomputations = _accumulations(config, ranks), _recomputations(config)
    yield from _reshard(config, ranks)
    yield from _sharded_sums(config, ranks)
    if config.rl is not None and not config.rollout.on_server:  # ways to generate without a copy that stays
        ways = {"auto": ["kept", "sharded"], "gathered": ["kept", "sharded"], "kept": ["sharded"], "sharded": []}
        yield from ({"rollout.copy": way} for way in ways[config.rollout.copy_])
    if accumulations and fits(accumulations[-1]):
        yield from accumulations
    yield from recomputations
    strongest = (*_reshard(config, ranks), *_sharded_sums(config, ranks), *recomputations)
    most = {key: value for change in strongest for key, value in change.items()}
    if len(most) > 1:
        yield most
    if most and accumulations and fits({**most, **accumulations[-1]}):
        yield from ({**most, **accumulation} for accumulation in accumulations)
    if config.shard.options().offload == "none" and device.type != "cpu":
        yield {"shard.offload": "cpu"}


def _reshard(config: Config, ranks: int) -> list[dict[str, Any]]:
    word = config.shard.options().reshard_after_forward
    return [] if word == FREES_ALL or ranks == 1 else [{"shard.reshard_after_forward": FREES_ALL}]


def _sharded_sums(config: Config, ranks: int) -> list[dict[str, Any]]:
    several = ranks > 1 and config.train.accumulation(config.shard.readers(ranks)) > 1
    is_open = several and config.shard.options().accumulate_gradients != SHARDED
    section = "shard" if "accumulate_gradients" in config.shard.model_fields_set else "train"
    return [{f"{section}.accumulate_gradients": SHARDED}] if is_open else []


def _recomputations(config: Config) -> list[dict[str, Any]]:
    word = str(config.shard.options().activation_checkpointing)
    stronger = {"none": ["selective", "full"], "full": []}.get(word, ["full"])
    return [{"shard.activation_checkpointing": choice} for choice in stronger]


def _accumulations(config: Config, ranks: int) -> list[dict[str, Any]]:
    """Return smaller microbatches of the same batch, in descending order."""
    train = config.train
    if train.microbatch is not None:
        sizes = range(train.microbatch - 1, 0, -1) if not train.exact else ()
        return [{"train.microbatch": size} for size in sizes if train.microbatch % size == 0]
    rows = train.batch_size // (config.shard.readers(ranks) * train.accumulate)
    return [{"train.accumulate": train.accumulate * times} for times in range(2, rows + 1) if rows % times == 0]
