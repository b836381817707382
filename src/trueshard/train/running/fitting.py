"""When memory runs out: what of a configuration has to change so that it fits into the memory that a rank really had.

- What is tried costs little speed first: reshard, smaller microbatches with more accumulation, recomputation, then all
  of these.
- The planner's figure is held against what the rank had. Where the planner thought that the configuration fits, it was
  wrong by at least that much, and less is asked of the change too.
- Where the planner cannot simulate the model, what takes less for certain is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from trueshard.tables import size
from trueshard.train.config import Config
from trueshard.train.recipe import folder_of
from trueshard.train.running import memory, planned
from trueshard.train.running.memory import Shortage
from trueshard.train.running.tighten import Words, changed, keep

MARGIN = {"cuda": 0.95, "cpu": 0.6}
"""Of what a rank had, the part that a change may be planned to take. On a CPU the plan counts tensors alone, and malloc
holds half as much again between them."""


@dataclass(frozen=True)
class Settled:
    """What came of a shortage of memory."""

    message: str
    """One line for the user."""
    words: Words | None
    """What was changed so that the run goes on; None: it ends."""


def settle(config: Config, settings: Any, ranks: int, local_ranks: int, device: torch.device) -> Settled | None:
    """Find what would fit, if there is a record of a shortage, and take that away. For one process of the run.

    With `on_oom = "tighten"` what is found is kept in `config.json`.

    Args:
        config: as it was used.
        settings: the transformers configuration of the model.
        device: of the rank that ran out, or one like it.
    """
    shortage = memory.read(folder_of(config))
    if shortage is None:
        return None
    try:
        return _settled(config, _Desk(config, settings, ranks, local_ranks, device, shortage), shortage, ranks)
    finally:
        memory.clear(folder_of(config))


def _settled(config: Config, desk: _Desk, shortage: Shortage, ranks: int) -> Settled:
    found = desk.find()
    facts = f"rank {shortage.rank} ran out of memory: {_used(shortage)}; {desk.was_planned()}"
    if found is None:
        return Settled(
            f"{facts}; no change of resharding, microbatch or recomputation fits: use more ranks or a larger device, "
            "or lower train.sequence_length or train.batch_size",
            None,
        )
    words, bytes_planned = found
    text = " with ".join(_said(key, value) for key, value in words.items())
    expected = "" if bytes_planned is None else f" (planned: {size(bytes_planned)} a rank)"
    if config.train.on_oom != "tighten" or "shard.offload" in words:
        own = "" if "shard.offload" in words else ', or train.on_oom = "tighten" to have it done'
        return Settled(f"{facts}; {text}{expected} {'would fit' if expected else 'takes less'}: set it{own}", None)
    keep(config, words, ranks)
    return Settled(f"{facts}; going on with {text}{expected}, the global batch stays as it is", words)


class _Desk:
    """Studies of one configuration and of what could be made of it."""

    def __init__(
        self, config: Config, settings: Any, ranks: int, local_ranks: int, device: torch.device, shortage: Shortage
    ) -> None:
        self._config, self._settings, self._ranks = config, settings, ranks
        self._local_ranks, self._shortage = local_ranks, shortage
        self._is_cpu = device.type == "cpu"
        self._hardware = planned.hardware_here(device, local_ranks)
        self._why = ""
        self._now = self._bytes({})
        self._budget = int(MARGIN[device.type] * min(shortage.available, self._now or shortage.available))

    def was_planned(self) -> str:
        """What the planner says of the configuration as it is."""
        if self._now is None:
            return f"what it takes could not be planned ({self._why})"
        return f"the plan needs {size(self._now)} a rank"

    def find(self) -> tuple[Words, int | None] | None:
        """The first change that fits, and the bytes that it is planned to take."""
        if self._now is None:
            return self._blind()
        sizes: dict[str, int | None] = {}

        def fits(words: Words) -> bool:
            key = repr(words)
            if key not in sizes:
                sizes[key] = self._bytes(words)
            found = sizes[key]
            return found is not None and found <= self._budget

        for words in self._changes(fits):
            if fits(words):
                return words, sizes[repr(words)]
        return None

    def _blind(self) -> tuple[Words, None] | None:
        """What takes less for certain, the least of it that there is."""
        reshard = self._reshard()
        words = [{"train.accumulate": count} for count in self._accumulations()[:1]]
        words += [*self._recompute()[-1:], *([reshard] if reshard else [])]
        return (words[0], None) if words else None

    def _changes(self, fits: Callable[[Words], bool]) -> Iterator[Words]:
        """What may be tried, what costs the least speed first. Of several microbatches only where the smallest fits."""
        accumulations = [{"train.accumulate": count} for count in self._accumulations()]
        reshard = self._reshard()
        if reshard:
            yield reshard
        if accumulations and fits(accumulations[-1]):
            yield from accumulations
        recompute = self._recompute()
        yield from recompute
        most = {**reshard, **(recompute[-1] if recompute else {})}
        if len(most) > 1:
            yield most
        if most and accumulations and fits({**most, **accumulations[-1]}):
            yield from ({**most, **each} for each in accumulations)
        if self._config.shard.offload == "none" and not self._is_cpu:
            yield {"shard.offload": "cpu"}

    def _reshard(self) -> dict[str, Any]:
        word = self._config.shard.reshard_after_forward
        return {} if word == "always" or self._ranks == 1 else {"shard.reshard_after_forward": "always"}

    def _recompute(self) -> list[dict[str, Any]]:
        word = self._config.shard.activation_checkpointing
        stronger = {"none": ["selective", "full"], "full": []}.get(str(word), ["full"])
        return [{"shard.activation_checkpointing": each} for each in stronger]

    def _accumulations(self) -> list[int]:
        train = self._config.train
        rows = train.batch_size // (self._ranks * train.accumulate)
        return [train.accumulate * times for times in range(2, rows + 1) if rows % times == 0]

    def _bytes(self, words: Words) -> int | None:
        """What a rank takes with these words; None where that cannot be planned."""
        try:
            found = planned.study(
                changed(self._config, words), self._settings, self._ranks, self._hardware, self._local_ranks
            )
        except planned.Unplanned as error:
            self._why = self._why or str(error)
            return None
        return planned.bytes_of(found.forecast)


def _used(shortage: Shortage) -> str:
    asked = f" when {size(shortage.asked)} more was asked for" if shortage.asked else ""
    return f"{size(shortage.used)} of {size(shortage.available)} were used{asked}"


def _said(key: str, value: Any) -> str:
    return f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {value}"
