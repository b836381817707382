"""The plans among which one is chosen: what is free, what is fixed, and how a point of that space reads as a Plan."""

from __future__ import annotations

import dataclasses
import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from trueshard import _torch, choices
from trueshard.choices import Choices
from trueshard.planner.forecasting import Cluster
from trueshard.planner.hardware import Hardware
from trueshard.planner.report.compare import collapse
from trueshard.planner.workload import Workload
from trueshard.plans import Offload, Plan, Recompute
from trueshard.runtime import engine

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
"""From the fastest to the one that takes the least memory."""


@dataclass(frozen=True)
class Space:
    """What is asked for."""

    workload: Workload
    hardware: Hardware
    ranks: int
    ranks_per_node: int
    budget: int | None
    """Bytes that torch's allocator may reserve on each rank; None: all that the device has."""
    choices: Choices
    """``shard()``'s options. ``reshard_after_forward`` and ``activation_checkpointing`` may be or contain ``"auto"``,
    ``offload`` may be it: chosen. All else is taken as it is; ``memory`` is ``budget``."""
    replicate: int | None
    """Replicas; None: chosen among those of whole nodes."""
    microbatch: int | None
    accumulation: int | None
    global_batch: int | None
    """Samples of all ranks in a step; where microbatch or accumulation is None, it is chosen to make this number.
    None: microbatch and accumulation are 1 where they are not given."""
    optimizer: str

    def cluster(self, replicate: int) -> Cluster:
        """The ranks in so many replicas."""
        return Cluster(self.hardware, self.ranks, self.ranks_per_node, replicate)

    @property
    def offloads(self) -> tuple[Offload, ...]:
        """Ways to offload, to be tried one after another until something fits."""
        word = self.choices.offload
        return ("none", "cpu") if word == "auto" else (cast(Offload, word),)

    def given(self, **instead: Any) -> Choices:
        """Return the choices with ``instead`` in the place of every ``"auto"``, without offload."""
        settled = {key: _without_auto(getattr(self.choices, key), value) for key, value in instead.items()}
        return self.choices.replace(offload="none", **settled)


@dataclass(frozen=True)
class Setting:
    """All of a plan but what its units do."""

    replicate: int
    microbatch: int
    accumulation: int
    offload: Offload


@dataclass(frozen=True)
class Point:
    """One plan."""

    setting: Setting
    split: bool
    """Whether embeddings are units of their own."""
    reshard: tuple[bool | int, ...]
    """For each unit of that grouping, in order."""
    recompute: tuple[Recompute, ...]


@dataclass(frozen=True)
class Base:
    """The units of one grouping, and what of them is free."""

    plan: Plan
    """Free values are ``default`` and ``none``."""
    free_reshard: tuple[bool, ...]
    free_recompute: tuple[bool, ...]

    def reshard(self, word: str | int) -> tuple[bool | int, ...]:
        """Every free unit by ``word``."""
        wanted = choices.reshard_values(self.plan, word, self.plan.ranks[-1])
        units = zip(self.plan.units, wanted, self.free_reshard, strict=True)
        return tuple(value if free else unit.reshard_after_forward for unit, value, free in units)

    def recompute(self, word: Recompute) -> tuple[Recompute, ...]:
        """Every free unit by ``word``."""
        units = zip(self.plan.units, self.free_recompute, strict=True)
        return tuple(word if free else unit.activation_checkpointing for unit, free in units)


class Groupings:
    """The bases of a space by replicas and by whether embeddings are split off; each is made once."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self._made: dict[int, dict[bool, Base]] = {}

    def of(self, replicate: int) -> dict[bool, Base]:
        """The groupings that differ: where all resharding is free, ``shard()`` knows two, see ``engine.resolve``.

        Raises:
            ValueError: what ``shard()`` refuses.
        """
        if replicate not in self._made:
            self._made[replicate] = self._bases(self.space.cluster(replicate).mesh)
        return self._made[replicate]

    def _bases(self, mesh: tuple[int, ...]) -> dict[bool, Base]:
        joined = self._base(mesh, "default")
        if self.space.choices.reshard_after_forward != "auto":
            return {False: joined}
        split = self._base(mesh, "always")
        names = [[unit.name for unit in base.plan.units] for base in (joined, split)]
        return {False: joined} if names[0] == names[1] else {False: joined, True: split}

    def _base(self, mesh: tuple[int, ...], word: str) -> Base:
        given = self.space.given(reshard_after_forward=word, activation_checkpointing="none")
        with _torch.fake_tensors():
            plan = engine.resolve(self.space.workload.model(), given, mesh)
        never, always = (
            choices.reshard_values(plan, self.space.given(reshard_after_forward=each).reshard_after_forward, mesh[-1])
            for each in ("never", "always")
        )
        none, full = (
            choices.recompute_values(
                plan.units, self.space.given(activation_checkpointing=each).activation_checkpointing
            )
            for each in ("none", "full")
        )
        return Base(plan, _differ(never, always), _differ(none, full))

    def plan(self, point: Point) -> Plan:
        """A point as a plan that ``shard()`` takes as it stands, and whose words say the same as its units."""
        setting = point.setting
        base = self.of(setting.replicate)[point.split].plan
        values = zip(base.units, point.reshard, point.recompute, strict=True)
        plan = dataclasses.replace(
            base,
            units=tuple(
                dataclasses.replace(unit, reshard_after_forward=freed, activation_checkpointing=again)
                for unit, freed, again in values
            ),
            offload=setting.offload,
        )
        plan = dataclasses.replace(
            plan, reshard_after_forward=_reshard_word(plan), activation_checkpointing=_recompute_word(plan)
        )
        return dataclasses.replace(plan, resolved_for=plan.policies)

    def uniform(self, setting: Setting, reshard: str | int, recompute: Recompute) -> Point:
        """All that is free by two words, in the grouping that ``shard()`` makes for them."""
        bases = self.of(setting.replicate)
        split = reshard not in ("default", "never") and True in bases
        return Point(setting, split, bases[split].reshard(reshard), bases[split].recompute(recompute))

    def away(self, point: Point) -> int:
        """How many choices are not what they are where nothing is said."""
        setting = point.setting
        plain = self.uniform(setting, "default", "none")
        units = zip(point.reshard, point.recompute, strict=True)
        usual = zip(plain.reshard, plain.recompute, strict=True)
        away = sum(a != b for a, b in zip(units, usual, strict=False)) + (len(point.reshard) != len(plain.reshard))
        return away + (setting.replicate != 1) + (setting.offload != "none")


def _differ(one: Sequence[Any], other: Sequence[Any]) -> tuple[bool, ...]:
    return tuple(a != b for a, b in zip(one, other, strict=True))


def _without_auto(word: Any, instead: Any) -> Any:
    if isinstance(word, Mapping):
        return {key: _without_auto(value, instead) for key, value in word.items()}
    return instead if word == "auto" else word


def _reshard_word(plan: Plan) -> Any:
    """The shortest word that means the units' values."""
    values = [unit.reshard_after_forward for unit in plan.units]
    ranks = plan.ranks[-1]
    numbers = [value for value in values if not isinstance(value, bool)]
    for word in (*choices.RESHARD_WORDS, *numbers[:1]):
        if _same(choices.reshard_values(plan, word, ranks), values):
            return word
    words = ["always" if value is True else "never" if value is False else value for value in values]
    most = max(words, key=words.count)
    exceptions = {glob.escape(unit.name): word for unit, word in zip(plan.units, words, strict=True) if word != most}
    return {"*": most, **exceptions}


def _same(one: Sequence[bool | int], other: Sequence[bool | int]) -> bool:
    """Equal, and a number of ranks is no truth value."""
    return [(type(a), a) for a in one] == [(type(b), b) for b in other]


def _recompute_word(plan: Plan) -> Any:
    values = [unit.activation_checkpointing for unit in plan.units]
    for word in RECOMPUTE:
        if choices.recompute_values(plan.units, word) == values:
            return word
    return {
        glob.escape(unit.name): unit.activation_checkpointing
        for unit in plan.units
        if unit.activation_checkpointing != "none"
    }


# What there is to choose from


def meshes(space: Space) -> list[int]:
    """Numbers of replicas, the fewest first: each replica is a whole number of nodes."""
    if space.replicate is not None:
        return [space.replicate]
    nodes = max(1, space.ranks // space.ranks_per_node)
    divisors = [each for each in range(1, nodes + 1) if nodes % each == 0]
    middle = min(divisors, key=lambda each: abs(each * each - nodes))
    return sorted({1, middle, nodes})


def batches(space: Space) -> list[tuple[int, int]]:
    """(microbatch, accumulation), the largest microbatch first.

    Raises:
        ValueError: what is given cannot make the global batch.
    """
    if space.global_batch is None:
        return [(space.microbatch or 1, space.accumulation or 1)]
    each, rest = divmod(space.global_batch, space.ranks)
    sizes = range(each, 0, -1) if space.microbatch is None else [space.microbatch]
    found = [(size, each // size) for size in sizes if each % size == 0 and space.accumulation in (None, each // size)]
    if rest or not found:
        said = [
            f"{key}={value}" for key in ("microbatch", "accumulation") if (value := getattr(space, key)) is not None
        ]
        raise ValueError(
            f"global_batch={space.global_batch} is not microbatch × accumulation × {space.ranks} ranks"
            f"{' with ' + ' and '.join(said) if said else ''}; use a multiple of "
            f"{space.ranks * (space.microbatch or 1) * (space.accumulation or 1)}"
        )
    return found


def node_size(space: Space, replicate: int) -> int | None:
    """Ranks to which a unit may be resharded: a node's, where a replica spans several."""
    shard = space.ranks // replicate
    return space.ranks_per_node if shard > space.ranks_per_node and shard % space.ranks_per_node == 0 else None


# In words


def described(plan: Plan, point: Point) -> str:
    """A plan in a few words, as it differs from others of the space."""
    setting = point.setting
    words = [f"{setting.replicate} replicas"] if setting.replicate > 1 else []
    words += [f"microbatch {setting.microbatch}"]
    words += [f"accumulation {setting.accumulation}"] if setting.accumulation > 1 else []
    words += [reshard_text(plan, point.split), recompute_text(plan)]
    words += ["offload to cpu"] if setting.offload == "cpu" else []
    return ", ".join(words)


def reshard_text(plan: Plan, split: bool) -> str:
    """``reshard always``, or what is kept gathered.

    Args:
        split: embeddings are units of their own; told where ``shard()`` would not do that by itself.
    """
    word = plan.reshard_after_forward
    root_stays = plan.unit("").reshard_after_forward is False
    apart = " with embeddings apart" if split and root_stays and word != "last_layer" else ""
    if not isinstance(word, Mapping):
        return (f"reshard to {word} ranks" if isinstance(word, int) else f"reshard {word}") + apart
    kept = _listed(unit for unit in plan.units if unit.reshard_after_forward is False)
    words = [f"keep {kept} gathered"] if kept else []
    sizes = {each for unit in plan.units if not isinstance(each := unit.reshard_after_forward, bool)}
    words += [
        f"reshard {_listed(unit for unit in plan.units if unit.reshard_after_forward == ranks)} to {ranks} ranks"
        for ranks in sorted(sizes)
    ]
    return " and ".join(words) + apart


def recompute_text(plan: Plan) -> str:
    """``recompute full``, or what is recomputed how."""
    word = plan.activation_checkpointing
    if not isinstance(word, Mapping):
        return f"recompute {word}"
    parts = [
        f"recompute {_listed(unit for unit in plan.units if unit.activation_checkpointing == each)} {_ADVERBS[each]}"
        for each in RECOMPUTE[1:]
        if each in word.values()
    ]
    return ", ".join(parts)


_ADVERBS = {"selective": "selectively", "full": "fully"}


def _listed(units: Any) -> str:
    return ", ".join(group.name or "the root" for group in collapse(units, lambda unit: unit.name))
