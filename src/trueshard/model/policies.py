"""Words for resharding, activation checkpointing and sums of gradients, as one value for each unit of a plan.

The only place that compares these words: everything else reads ``Unit.reshard_after_forward`` and the like, or asks
here which values a word means.
"""

from __future__ import annotations

import dataclasses
import glob
from collections.abc import Mapping, Sequence
from typing import Any

from trueshard.model import names
from trueshard.options import GRADIENT_SUMS, RECOMPUTE_WORDS, RESHARD_WORDS, SHARDED, WHOLE, GradientSums, Recompute
from trueshard.plans import DTYPES, MixedPrecision, Plan, Unit
from trueshard.text import nearest

FREES_ALL = "always"
"""The word for resharding that takes the least memory."""

BYTES = dict(zip(DTYPES, (8, 4, 2, 2), strict=True))
"""Bytes of an element, by the name of its dtype."""


def apply_words(plan: Plan, shard_ranks: int, memory: int | None = None) -> Plan:
    """Turn a plan's words into one value for each unit; ``memory``: bytes of a rank, see ``accumulation_values``.

    Raises ValueError for an unknown word, an integer that does not divide the ranks that shard a parameter, or a glob
    that matches no unit.
    """
    reshard = reshard_values(plan, plan.reshard_after_forward, shard_ranks)
    recompute = recompute_values(plan.units, plan.activation_checkpointing)
    accumulate = accumulation_values(plan, plan.accumulate_gradients, shard_ranks, memory)
    units = tuple(
        dataclasses.replace(
            unit, reshard_after_forward=freed, activation_checkpointing=again, accumulate_gradients=sums
        )
        for unit, freed, again, sums in zip(plan.units, reshard, recompute, accumulate, strict=True)
    )
    return dataclasses.replace(plan, units=units, resolved_for=plan.policies)


def reshard_values(plan: Plan, policy: Any, shard_ranks: int) -> list[bool | int]:
    """Return ``Unit.reshard_after_forward`` for each unit of ``plan``, in order."""
    last = next((unit.name for unit in reversed(plan.units) if unit.kind == "block"), None)

    def value(unit: Unit, word: Any) -> bool | int:
        if isinstance(word, bool) or word in ("always", "never"):
            return word in (True, "always")
        if isinstance(word, int) and unit.kind == "experts":
            return word != 1  # its parameters are sharded over fewer ranks: there are no smaller groups of them
        if isinstance(word, int):
            if word < 1 or shard_ranks % word:
                divisors = [str(d) for d in range(1, shard_ranks + 1) if shard_ranks % d == 0]
                raise ValueError(
                    f"reshard_after_forward={word} must divide the {shard_ranks} ranks that share a parameter; "
                    f"use one of {', '.join(divisors)}"
                )
            # One rank means no resharding, all ranks mean plain resharding.
            return word == shard_ranks if word in (1, shard_ranks) else word
        if word not in ("default", "last_layer"):
            raise ValueError(_unknown("reshard_after_forward", word, (*RESHARD_WORDS, "an integer", "{glob: word}")))
        kept = {last} if word == "last_layer" else {last, ""}
        inside_last = unit.kind == "experts" and last is not None and unit.name.startswith(f"{last}.")
        return (
            unit.name not in kept
            and not inside_last
            and unit.kind != "head"
            and not (word == "default" and plan.pipeline)
        )

    return list(map(value, plan.units, _by_unit("reshard_after_forward", plan.units, policy, "default")))


def frees_root(policy: Any) -> bool:
    """True if the root may be freed between forward and backward, so that what lies in it may be gathered twice."""
    return isinstance(policy, Mapping) or policy not in ("default", "never")


def reshard_word(plan: Plan, values: Sequence[bool | int], shard_ranks: int) -> Any:
    """Return the shortest word that means these values of a plan's units."""
    numbers = [value for value in values if not isinstance(value, bool)]
    for word in (*RESHARD_WORDS, *numbers[:1]):
        meant = reshard_values(plan, word, shard_ranks)
        if list(map(repr, meant)) == list(map(repr, values)):  # True is not 1 rank
            return word
    words = ["always" if value is True else "never" if value is False else value for value in values]
    most = max(words, key=words.count)
    exceptions = {glob.escape(unit.name): word for unit, word in zip(plan.units, words, strict=True) if word != most}
    return {"*": most, **exceptions}


def recompute_word(units: Sequence[Unit], values: Sequence[Recompute]) -> Any:
    """Return the shortest word that means these values of units."""
    for word in RECOMPUTE_WORDS:
        if recompute_values(units, word) == list(values):
            return word
    return {glob.escape(unit.name): word for unit, word in zip(units, values, strict=True) if word != "none"}


def recompute_values(units: Sequence[Unit], words: Any) -> list[Recompute]:
    """Return ``Unit.activation_checkpointing`` for each unit: a single word means every block."""
    for word in words.values() if isinstance(words, Mapping) else [words]:
        if word not in RECOMPUTE_WORDS:
            raise ValueError(_unknown("activation_checkpointing", word, (*RECOMPUTE_WORDS, "{glob: word}")))
    if isinstance(words, Mapping):
        return _by_unit("activation_checkpointing", units, words, "none")
    return [words if unit.kind == "block" else "none" for unit in units]


def accumulation_values(plan: Plan, words: Any, shard_ranks: int, memory: int | None) -> list[GradientSums]:
    """Return ``Unit.accumulate_gradients`` for each unit of ``plan``, in order.

    ``"auto"`` is whole if whole gradients, and the model's state of four times the parameters (themselves, gradients,
    two moments), take at most half of ``memory``, the bytes of a rank; None: if there is no end of it.
    """
    allowed = (*GRADIENT_SUMS, "auto")
    for word in words.values() if isinstance(words, Mapping) else [words]:
        if word not in allowed:
            raise ValueError(_unknown("accumulate_gradients", word, (*allowed, "{glob: word}")))
        if word == SHARDED and plan.pipeline:
            raise ValueError(
                'accumulate_gradients="sharded" does not go with a pipeline, whose schedule reduces after the last '
                'microbatch itself; use "whole"'
            )
    state = 4 * sum(unit.bytes for unit in plan.units) / shard_ranks
    is_whole = plan.pipeline or memory is None or state + unreduced_bytes(plan) <= memory / 2
    chosen = WHOLE if is_whole or shard_ranks == 1 else SHARDED
    by_unit = _by_unit("accumulate_gradients", plan.units, words, "auto")
    return [chosen if word == "auto" else word for word in by_unit]


def unreduced_bytes(plan: Plan) -> int:
    """Return the bytes of all whole gradients of a step, in the dtype in which they are reduced."""
    mixed = plan.mixed_precision or MixedPrecision()
    word = "float64" if plan.exact else mixed.reduce or mixed.compute
    total = 0
    for unit in plan.units:
        dtype = word or unit.dtype.partition("+")[0]
        total += unit.trainable * BYTES.get(dtype, 4)
    return total


def accumulation_word(units: Sequence[Unit], values: Sequence[GradientSums]) -> Any:
    """Return the shortest word that means these values of units."""
    if len(set(values)) == 1:
        return values[0]
    most = max(values, key=values.count)
    return {"*": most} | {glob.escape(u.name): word for u, word in zip(units, values, strict=True) if word != most}


def _by_unit(option: str, units: Sequence[Unit], words: Any, rest: str) -> list[Any]:
    """Return a word for each unit: the same, or that of the last glob that matches its name, else ``rest``.

    Raises ValueError for a glob that matches no unit.
    """
    if not isinstance(words, Mapping):
        return [words] * len(units)
    chosen: list[Any] = [rest] * len(units)
    called = [(unit.name, *unit.modules) for unit in units]
    for pattern, word in words.items():
        matched = set(names.matching(pattern, (alias for aliases in called for alias in aliases)))
        hits = [i for i, aliases in enumerate(called) if not matched.isdisjoint(aliases)]
        if not hits:
            near = nearest(pattern, [unit.name for unit in units])
            shown = ", ".join(repr(unit.name) for unit in units[:8])
            raise ValueError(f'{option}: {pattern!r} matches no unit.{near} Units ("" is the root): {shown}')
        for i in hits:
            chosen[i] = word
    return chosen


def _unknown(option: str, word: Any, known: Sequence[str]) -> str:
    if word == "auto":
        return f'{option}="auto" is a word of shard() and trueshard.plan(); here use one of {", ".join(known)}'
    near = nearest(word, known) if isinstance(word, str) else ""
    return f"{option}={word!r} is not known.{near} Use one of {', '.join(known)}"
