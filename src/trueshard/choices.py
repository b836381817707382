"""Every option of ``shard()``: words, defaults, checks, and one value for each unit.

- ``Choices`` is made once, where options enter (``shard()``, ``plan()``, ``verify()``, a command, a ``[shard]`` table),
  and passed on whole. A ``Plan`` holds the same choices, resolved for one model.
- Nothing here imports torch at the top, so that the command line takes words and defaults from here at no cost.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast, get_args

from trueshard.plans import SHORT_DTYPES, MixedPrecision, Offload, Plan, Recompute, Unit
from trueshard.text import nearest, parse_size

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.fsdp import MixedPrecisionPolicy

UnitWords: TypeAlias = "str | type | Callable[[str, nn.Module], bool] | Sequence[str | type] | None"

ReshardWord = Literal["default", "always", "never", "last_layer", "auto"]
RecomputeWord = Literal["none", "full", "selective", "auto"]
PrecisionWord = Literal["bf16", "fp16"]

RESHARD_WORDS = tuple(word for word in get_args(ReshardWord) if word != "auto")
RECOMPUTE_WORDS = get_args(Recompute)
TENSOR_KEYS = ("ranks", "sequence")
"""Keys of the option ``tensor`` that are no glob."""
OFFLOAD_WORDS = get_args(Offload)


@dataclass(frozen=True)
class Choices:
    """The options of ``shard()`` as the user gave them; ``trueshard.shard`` explains each."""

    units: UnitWords = "auto"
    reshard_after_forward: str | int | Mapping[str, str | int | bool] = "default"
    mixed_precision: MixedPrecisionPolicy | str | None = None
    activation_checkpointing: str | Mapping[str, str] = "none"
    compile: bool = False
    offload: str = "none"
    memory: str | int | None = None
    tensor: int | Mapping[str, str | int | bool] = 1
    context: int = 1
    experts: int = 1
    exact: bool | Mapping[str, int] = False

    def check(self) -> None:
        """Raise ValueError for a value that no model and no number of ranks could make valid."""
        self.plan()
        self.budget()

    def said(self, defaults: Choices | None = None) -> list[str]:
        """Return the options that differ from their defaults."""
        usual = vars(defaults or DEFAULTS)
        return [name for name, value in vars(self).items() if value != usual[name]]

    def check_alone(self, plan: Plan | None, defaults: Choices | None = None) -> None:
        """Raise ValueError if any option is set alongside ``plan=``."""
        if plan is not None and (said := self.said(defaults)):
            raise ValueError(f"plan= holds every choice: leave out {', '.join(said)}, or leave out plan")

    def needs_planner(self) -> bool:
        """True if an option is ``"auto"``, or a budget must be kept."""
        return self.memory is not None or is_free(self.reshard_after_forward) or is_free(self.activation_checkpointing)

    def budget(self) -> int | None:
        """Return ``memory`` in bytes."""
        return None if self.memory is None else parse_size("memory", self.memory)

    def replace(self, **changes: Any) -> Choices:
        """Return a copy with other values for some options."""
        return dataclasses.replace(self, **changes)

    def plan(self) -> Plan:
        """Return the plan, without units, that holds these choices (``units`` and ``memory`` are not part of it)."""
        styles = {glob: str(style) for glob, style in self._tensor().items() if glob not in TENSOR_KEYS}
        return Plan(
            reshard_after_forward=self.reshard_after_forward,
            activation_checkpointing=self.activation_checkpointing,
            mixed_precision=precision_of(self.mixed_precision),
            compile=bool(self.compile),
            offload=cast(Offload, self.offload),
            tensor=cast(int, self._tensor().get("ranks", 1)),
            styles=styles,
            sequence=cast(bool, self._tensor().get("sequence", False)),
            context=self.context,
            experts=self.experts,
            exact=dict(self.exact) if isinstance(self.exact, Mapping) else self.exact,
        )

    def axes(self) -> dict[str, int]:
        """Return the ranks asked for along axes of the mesh."""
        asked = {"context": self.context, "tensor": self._tensor().get("ranks", 1)}
        return {name: size for name, size in asked.items() if type(size) is int}  # ``check`` refuses another

    def on(self, sizes: Mapping[str, int]) -> Choices:
        """Return a copy with the sizes of a mesh's axes, by name."""
        ranks = sizes.get("tensor", 1)
        tensor = {**self.tensor, "ranks": ranks} if isinstance(self.tensor, Mapping) else ranks
        return self.replace(tensor=tensor, context=sizes.get("context", 1))

    def _tensor(self) -> Mapping[str, str | int | bool]:
        return self.tensor if isinstance(self.tensor, Mapping) else {"ranks": self.tensor}


DEFAULTS = Choices()


def is_free(word: Any) -> bool:
    """True if an option, or one glob of it, is ``"auto"``."""
    return "auto" in word.values() if isinstance(word, Mapping) else bool(word == "auto")


def precision_of(given: MixedPrecisionPolicy | str | None) -> MixedPrecision | None:
    """Return a plan's mixed precision for ``shard()``'s option; raise ValueError for an unknown word."""
    if given is None:
        return None
    if isinstance(given, str):
        if given not in get_args(PrecisionWord):
            known = ", ".join(f'"{word}"' for word in get_args(PrecisionWord))
            raise ValueError(f"mixed_precision={given!r} is not known; use {known} or a MixedPrecisionPolicy")
        return MixedPrecision(compute=SHORT_DTYPES[given], reduce="float32")
    dtypes = (given.param_dtype, given.reduce_dtype, given.output_dtype)
    compute, reduce, output = (None if dtype is None else str(dtype).removeprefix("torch.") for dtype in dtypes)
    return MixedPrecision(compute, reduce, output, given.cast_forward_inputs)


def reshard_word(text: str) -> str | int:
    """Return ``reshard_after_forward`` as a command line gives it: a word, or a number of ranks."""
    return int(text) if text.isdecimal() else text


# Words into one value for each unit


def apply_words(plan: Plan, shard_ranks: int) -> Plan:
    """Turn a plan's reshard and activation-checkpointing words into one value for each unit.

    Raises ValueError for an unknown word, an integer that does not divide the ranks that shard a parameter, or a glob
    that matches no unit.
    """
    reshard = reshard_values(plan, plan.reshard_after_forward, shard_ranks)
    recompute = recompute_values(plan.units, plan.activation_checkpointing)
    units = tuple(
        dataclasses.replace(unit, reshard_after_forward=freed, activation_checkpointing=again)
        for unit, freed, again in zip(plan.units, reshard, recompute, strict=True)
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


def recompute_values(units: Sequence[Unit], words: Any) -> list[Recompute]:
    """Return ``Unit.activation_checkpointing`` for each unit: a single word means every block."""
    for word in words.values() if isinstance(words, Mapping) else [words]:
        if word not in RECOMPUTE_WORDS:
            raise ValueError(_unknown("activation_checkpointing", word, (*RECOMPUTE_WORDS, "{glob: word}")))
    if isinstance(words, Mapping):
        return _by_unit("activation_checkpointing", units, words, "none")
    return [words if unit.kind == "block" else "none" for unit in units]


def _by_unit(option: str, units: Sequence[Unit], words: Any, rest: str) -> list[Any]:
    """Return a word for each unit: the same, or that of the last glob that matches its name, else ``rest``.

    Raises ValueError for a glob that matches no unit.
    """
    if not isinstance(words, Mapping):
        return [words] * len(units)
    chosen: list[Any] = [rest] * len(units)
    for glob, word in words.items():
        called = [(unit.name, *unit.modules) for unit in units]
        hits = [i for i, each in enumerate(called) if any(fnmatch.fnmatchcase(name, glob) for name in each)]
        if not hits:
            near = nearest(glob, [unit.name for unit in units])
            shown = ", ".join(repr(unit.name) for unit in units[:8])
            raise ValueError(f'{option}: {glob!r} matches no unit.{near} Units ("" is the root): {shown}')
        for i in hits:
            chosen[i] = word
    return chosen


def _unknown(option: str, word: Any, known: Sequence[str]) -> str:
    if word == "auto":
        return f'{option}="auto" is a word of shard() and trueshard.plan(); here use one of {", ".join(known)}'
    near = nearest(word, known) if isinstance(word, str) else ""
    return f"{option}={word!r} is not known.{near} Use one of {', '.join(known)}"
