"""Words into per-unit values: when a unit is freed after forward, and what of it is recomputed."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any, cast

from trueshard import names
from trueshard.plans import Plan, Recompute, Unit

RESHARD_WORDS = ("default", "always", "never", "last_layer")
RECOMPUTE_WORDS = ("none", "full", "selective")

UNSAID: dict[str, Any] = {
    "units": "auto",
    "reshard_after_forward": "default",
    "mixed_precision": None,
    "activation_checkpointing": "none",
    "compile": False,
    "offload": "none",
}
"""``shard()``'s choices where nothing is said."""


def apply_words(plan: Plan, shard_ranks: int) -> Plan:
    """``plan`` with its reshard and activation-checkpointing words turned into a value for each unit.

    Args:
        plan: a plan that has its units.
        shard_ranks: the number of ranks a parameter is sharded over; an integer policy must divide it.

    Raises:
        ValueError: an unknown word, an integer that does not divide ``shard_ranks``, or a glob that matches no unit.
    """
    reshard = reshard_values(plan, plan.reshard_after_forward, shard_ranks)
    recompute = recompute_values(plan.units, plan.activation_checkpointing)
    units = tuple(
        dataclasses.replace(unit, reshard_after_forward=freed, activation_checkpointing=again)
        for unit, freed, again in zip(plan.units, reshard, recompute, strict=True)
    )
    return dataclasses.replace(plan, units=units, resolved_for=plan.policies)


def reshard_values(plan: Plan, policy: Any, shard_ranks: int) -> list[bool | int]:
    """One value for each unit of ``plan``, in order."""
    if isinstance(policy, Mapping):
        chosen = _by_glob("reshard_after_forward", plan.units, policy)
        rest = reshard_values(plan, "default", shard_ranks)
        return [
            value if word is None else reshard_values(plan, word, shard_ranks)[i]
            for i, (word, value) in enumerate(zip(chosen, rest, strict=True))
        ]
    if isinstance(policy, bool):
        return [policy] * len(plan.units)
    if isinstance(policy, int):
        return [_node_size(policy, shard_ranks)] * len(plan.units)
    if policy == "always":
        return [True] * len(plan.units)
    if policy == "never" or (policy == "default" and plan.pipeline):
        return [False] * len(plan.units)
    if policy in ("default", "last_layer"):
        last = next((unit.name for unit in reversed(plan.units) if unit.kind == "block"), None)
        kept = {last} if policy == "last_layer" else {last, ""}
        return [unit.name not in kept and unit.kind != "head" for unit in plan.units]
    raise ValueError(_unknown("reshard_after_forward", policy, (*RESHARD_WORDS, "an integer", "{glob: word}")))


def _node_size(size: int, shard_ranks: int) -> bool | int:
    """FSDP2's integer, with its two ends: resharding to one rank is keeping, to all of them is resharding."""
    if size < 1 or shard_ranks % size:
        divisors = [d for d in range(1, shard_ranks + 1) if shard_ranks % d == 0]
        raise ValueError(
            f"reshard_after_forward={size} must divide the {shard_ranks} ranks that share a parameter; "
            f"use one of {', '.join(map(str, divisors))}"
        )
    if size in (1, shard_ranks):
        return size == shard_ranks
    return size


def recompute_values(units: Sequence[Unit], words: Any) -> list[Recompute]:
    """One of ``RECOMPUTE_WORDS`` for each unit: a single word means every block."""
    if isinstance(words, Mapping):
        chosen = _by_glob("activation_checkpointing", units, words)
        for word in words.values():
            _check_recompute(word)
        return [cast(Recompute, word or "none") for word in chosen]
    _check_recompute(words)
    return [cast(Recompute, words if unit.kind == "block" else "none") for unit in units]


def _check_recompute(word: Any) -> None:
    if word not in RECOMPUTE_WORDS:
        raise ValueError(_unknown("activation_checkpointing", word, (*RECOMPUTE_WORDS, "{glob: word}")))


def _by_glob(argument: str, units: Sequence[Unit], table: Mapping[str, Any]) -> list[Any]:
    """For each unit the value of the last glob that matches its name; a glob without a match is an error."""
    chosen: list[Any] = [None] * len(units)
    for glob, word in table.items():
        hits = [
            i for i, unit in enumerate(units) if any(fnmatch.fnmatchcase(m, glob) for m in (unit.name, *unit.modules))
        ]
        if not hits:
            near = names.nearest(glob, [unit.name for unit in units])
            shown = ", ".join(repr(unit.name) for unit in units[:8])
            raise ValueError(f'{argument}: {glob!r} matches no unit.{near} Units ("" is the root): {shown}')
        for i in hits:
            chosen[i] = word
    return chosen


def _unknown(argument: str, word: Any, known: Sequence[str]) -> str:
    if word == "auto":
        return f'{argument}="auto" is a word of shard() and trueshard.plan(); here use one of {", ".join(known)}'
    near = names.nearest(word, known) if isinstance(word, str) else ""
    return f"{argument}={word!r} is not known.{near} Use one of {', '.join(known)}"
