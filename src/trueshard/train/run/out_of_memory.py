"""Out of memory: recognise it, record what a rank had, and find settings that would fit.

- On a GPU the figures are the caching allocator's. On a CPU they are the process's data, less what it held before the
  model was made, against the limits that the system sets a process.
- Remedies that cost the least speed are tried first: reshard, generating without a copy of the model that stays,
  smaller microbatches with more accumulation, recomputation, then all of them together. Where the planner thought that
  the configuration fits, it was wrong by at least the difference, and the remedy has to fit into that much less. A
  model that the planner cannot simulate gets a setting that takes less for certain.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from trueshard.machine import memory_of_process
from trueshard.model.policies import FREES_ALL
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
    asked: int
    """Bytes of that allocation; 0 where the error does not say it."""
    available: int
    """Bytes that tensors of this process could have at most."""

    def __str__(self) -> str:
        asked = f" when {size(self.asked)} more was asked for" if self.asked else ""
        return f"rank {self.rank} ran out of memory: {size(self.used)} of {size(self.available)} were used{asked}"


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
        return Shortage(rank, used, _asked(str(error)), available)


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if the error is an allocator's that had nothing more to give."""
    allocator = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return allocator or isinstance(error, (torch.OutOfMemoryError, MemoryError))


def _asked(message: str) -> int:
    """Return the bytes that an allocator's message names: torch's for the CPU ("512 bytes"), or CUDA ("20.00 MiB")."""
    named = re.search(r"[Tt]ried to allocate ([\d.]+) ([KMGT]?)", message)
    return int(float(named[1]) * 1024 ** " KMGT".index(named[2] or " ")) if named else 0


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
    try:
        search = _RemedySearch(config, settings, ranks, local_ranks, device, shortage)
        found, facts = search.find(), f"{shortage}; {search.forecast}"
        if found is None:
            lower = "train.sequence_length or train.batch_size" + (", or rollout.batch" if config.rl else "")
            return Remedy(
                f"{facts}; no change of resharding, microbatch or recomputation fits: use more ranks or a larger "
                f"device, or lower {lower}",
                None,
            )
        changed, planned = found
        text = " with ".join(f"{key} = {json.dumps(value)}" for key, value in changed.items())
        expected = "" if planned is None else f" (planned: {size(planned)} a rank)"
        if config.train.on_oom != "tighten" or "shard.offload" in changed:
            own = "" if "shard.offload" in changed else ', or train.on_oom = "tighten" to have it done'
            fits = "would fit" if expected else "takes less"
            return Remedy(f"{facts}; {text}{expected} {fits}: set it{own}", None)
        resuming.keep_tightened(folder, changed, ranks)
        return Remedy(f"{facts}; going on with {text}{expected}, the global batch stays as it is", changed)
    finally:
        clear(folder)


class _RemedySearch:
    def __init__(
        self, config: Config, settings: Any, ranks: int, local_ranks: int, device: torch.device, shortage: Shortage
    ) -> None:
        self._config, self._settings, self._ranks, self._local_ranks = config, settings, ranks, local_ranks
        self._device = device
        self._known: dict[str, int | None] = {}
        self._why = ""
        self._now = self._bytes({})
        self._budget = int(MARGIN[device.type] * min(shortage.available, self._now or shortage.available))
        self.forecast = f"what it takes could not be planned ({self._why})"
        if self._now is not None:
            self.forecast = f"the plan needs {size(self._now)} a rank"

    def find(self) -> tuple[Settings, int | None] | None:
        """Return the first change that fits and its planned bytes a rank; None bytes if nothing can be planned."""
        if self._now is None:
            certain = [*self._accumulations()[:1], *self._recomputations()[-1:], self._reshard()]
            return next(((change, None) for change in certain if change), None)
        return next(((each, self._bytes(each)) for each in self._changes() if self._fits(each)), None)

    def _changes(self) -> Iterator[dict[str, Any]]:
        """Yield changes, those that cost the least speed first. Of several microbatches only if the smallest fits."""
        reshard, accumulations, recomputations = self._reshard(), self._accumulations(), self._recomputations()
        if reshard:
            yield reshard
        yield from self._copies()
        if accumulations and self._fits(accumulations[-1]):
            yield from accumulations
        yield from recomputations
        most = {**reshard, **(recomputations[-1] if recomputations else {})}
        if len(most) > 1:
            yield most
        if most and accumulations and self._fits({**most, **accumulations[-1]}):
            yield from ({**most, **accumulation} for accumulation in accumulations)
        if self._config.shard.options().offload == "none" and self._device.type != "cpu":
            yield {"shard.offload": "cpu"}

    def _reshard(self) -> dict[str, Any]:
        word = self._config.shard.options().reshard_after_forward
        return {} if word == FREES_ALL or self._ranks == 1 else {"shard.reshard_after_forward": FREES_ALL}

    def _copies(self) -> list[dict[str, Any]]:
        """Ways of reinforcement learning to generate without a copy that stays."""
        if self._config.rl is None or self._config.rollout.on_server:
            return []
        ways = {"auto": ["kept", "sharded"], "gathered": ["kept", "sharded"], "kept": ["sharded"], "sharded": []}
        return [{"rollout.copy": each} for each in ways[self._config.rollout.copy_]]

    def _recomputations(self) -> list[dict[str, Any]]:
        word = self._config.shard.options().activation_checkpointing
        stronger = {"none": ["selective", "full"], "full": []}.get(str(word), ["full"])
        return [{"shard.activation_checkpointing": each} for each in stronger]

    def _accumulations(self) -> list[dict[str, Any]]:
        train = self._config.train
        if train.microbatch is not None:
            sizes = range(train.microbatch - 1, 0, -1) if not train.exact else ()
            return [{"train.microbatch": size} for size in sizes if train.microbatch % size == 0]
        rows = train.batch_size // (self._config.shard.readers(self._ranks) * train.accumulate)
        return [{"train.accumulate": train.accumulate * times} for times in range(2, rows + 1) if rows % times == 0]

    def _fits(self, change: Settings) -> bool:
        return (planned := self._bytes(change)) is not None and planned <= self._budget

    def _bytes(self, change: Settings) -> int | None:
        """Return the planned bytes a rank with this change; None where that cannot be planned."""
        from trueshard.train.run import forecast  # the planner, which few runs need

        key = repr(change)
        if key not in self._known:
            config = resuming.with_settings(self._config, change)
            found = forecast.study(config, self._settings, self._ranks, self._device, self._local_ranks)
            self._known[key] = forecast.bytes_of(found)
            if isinstance(found, forecast.Unplanned):
                self._why = self._why or found
        return self._known[key]
