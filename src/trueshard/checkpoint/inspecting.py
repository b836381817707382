"""``inspect``: what is in a checkpoint, and what differs between two. Reads what describes tensors, not the tensors.

- Whatever ``load`` reads by itself can be looked at: checkpoints of ours, Hugging Face directories, single files.
- Two tensors of one shape and dtype are compared by their checksums, and so at any world size; where a file has none,
  by one of their bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trueshard.checkpoint import state
from trueshard.checkpoint.catalogue import Catalogue, open_catalogue
from trueshard.checkpoint.manifest import Entry
from trueshard.tables import size, table

_LONGEST = 60
"""characters of a value in a table"""


@dataclass(frozen=True)
class TensorFound:
    """One tensor."""

    key: str
    """"model/<name>", "optimizer/<parameter>/<state>", "more/<path>", "rng"; in another's files, the name."""
    names: list[str]
    """All that it has: a tie is one tensor with several."""
    shape: list[int]
    dtype: str
    bytes: int
    trainable: bool | None
    """None for what is no parameter, or where the file does not say."""
    files: list[str]
    crc32: int | None


@dataclass(frozen=True)
class GroupFound:
    """One group of an optimizer."""

    settings: dict[str, Any]
    parameters: list[str]
    elements: int
    """of these parameters together"""


@dataclass(frozen=True)
class OptimizerFound:
    """One optimizer."""

    key: str
    kind: str
    """Its class."""
    groups: list[GroupFound]
    with_state: list[str]
    """The parameters that it has state of."""
    without_state: list[str]


@dataclass(frozen=True)
class Inspected:
    """What is in a checkpoint. ``str()`` is the listing."""

    where: str
    about: dict[str, Any]
    """Format, when and with what it was written, and from how many ranks; what is known."""
    step: int | None
    """The first whole number called "step" among the user's entries."""
    tensors: list[TensorFound]
    optimizers: list[OptimizerFound]
    more: dict[str, Any]
    """The user's entries; a tensor in them as its dtype and shape."""

    def totals(self) -> dict[str, dict[str, int]]:
        """Bytes by part (model, optimizer, …) and dtype."""
        found: dict[str, dict[str, int]] = {}
        for tensor in self.tensors:
            of = found.setdefault(_part(tensor.key), {})
            of[tensor.dtype] = of.get(tensor.dtype, 0) + tensor.bytes
        return found

    def to_json(self) -> str:
        """All of it, as JSON."""
        return json.dumps(asdict(self) | {"totals": self.totals()}, indent=1, default=str)

    def __str__(self) -> str:
        lines = [self.where]
        lines += [f"  {key}: {value}" for key, value in self.about.items()]
        if self.step is not None:
            lines.append(f"  step: {self.step}")
        shown = [tensor for tensor in self.tensors if _part(tensor.key) in ("model", "more")]
        rows = [(_name(t), "×".join(map(str, t.shape)) or "one", t.dtype, size(t.bytes), _kind(t)) for t in shown]
        lines += ["", *table(("tensor", "shape", "dtype", "size", ""), rows, right=(3,))]
        lines += ["", *table(("part", "dtype", "tensors", "size"), list(self._summary()), right=(2, 3))]
        for optimizer in self.optimizers:
            lines += ["", *_optimizer_lines(optimizer)]
        if self.more:
            entries = [(key, _short(value)) for key, value in self.more.items()]
            lines += ["", *table(("entry", "value"), entries)]
        return "\n".join(line.rstrip() for line in lines)

    def _summary(self) -> Iterable[tuple[str, str, str, str]]:
        for part, by_dtype in self.totals().items():
            for dtype, count in by_dtype.items():
                number = sum(_part(t.key) == part and t.dtype == dtype for t in self.tensors)
                yield part, dtype, f"{number:,}", size(count)
        yield "all", "", f"{len(self.tensors):,}", size(sum(t.bytes for t in self.tensors))


@dataclass(frozen=True)
class Compared:
    """What differs between two checkpoints. ``str()`` is the listing; false if nothing does."""

    one: str
    other: str
    removed: list[str]
    """Keys of tensors that only ``one`` has."""
    added: list[str]
    """Keys of tensors that only ``other`` has."""
    changed_kind: dict[str, tuple[str, str]]
    """Key → shape and dtype in both."""
    changed_bytes: list[str]
    """Keys of tensors of one kind and different content."""
    equal: int
    """Tensors that are the same."""
    settings: dict[str, tuple[Any, Any]]
    """Settings, entries and facts that differ, by path; None where there is none."""

    def __bool__(self) -> bool:
        return bool(self.removed or self.added or self.changed_kind or self.changed_bytes or self.settings)

    def to_json(self) -> str:
        """All of it, as JSON."""
        return json.dumps(asdict(self), indent=1, default=str)

    def __str__(self) -> str:
        lines = [f"- {self.one}", f"+ {self.other}", f"{self.equal:,} tensors are equal"]
        if not self:
            return "\n".join([*lines, "nothing differs"])
        lines += [f"- {key}" for key in self.removed]
        lines += [f"+ {key}" for key in self.added]
        lines += [f"~ {key}: {before} → {after}" for key, (before, after) in self.changed_kind.items()]
        lines += [f"~ {key}: other values" for key in self.changed_bytes]
        lines += [f"~ {path}: {_short(a)} → {_short(b)}" for path, (a, b) in self.settings.items()]
        return "\n".join(lines)


def inspect(path: str | os.PathLike[str], other: str | os.PathLike[str] | None = None) -> Inspected | Compared:
    """What is in a checkpoint, or what differs between two.

    Args:
        path: a checkpoint; ``…/latest`` is the newest one beside it. Or a Hugging Face or PEFT directory, or a
            .safetensors file.
        other: a second one.

    Returns:
        What can be printed, read field by field, or had as JSON by ``to_json()``.

    Raises:
        FileNotFoundError: no checkpoint is there.
        ValueError: it is damaged, or a directory of torch.distributed.checkpoint.
    """
    catalogue = _opened(path)
    found = _inspected(catalogue)
    if other is None:
        return found
    second = _opened(other)
    return _compared(catalogue, found, second, _inspected(second))


def _opened(path: str | os.PathLike[str]) -> Catalogue:
    from trueshard.checkpoint.reader import latest_in

    catalogue = open_catalogue(latest_in(path))
    if catalogue.dcp:
        raise ValueError(
            f"{path} is a directory of torch.distributed.checkpoint, which only unpickling its metadata can describe; "
            "trueshard.load(…, allow_pickle=True) reads it"
        )
    return catalogue


def _inspected(catalogue: Catalogue) -> Inspected:
    tensors = []
    for key, entry in catalogue.entries.items():
        files = list(dict.fromkeys(piece.file for piece in entry.pieces))
        found = TensorFound(
            key, entry.names, entry.shape, entry.dtype, entry.nbytes, entry.trainable, files, entry.crc32
        )
        tensors.append(found)
    manifest = catalogue.manifest
    if manifest is None:
        about: dict[str, Any] = {"format": "PEFT adapter" if catalogue.adapter else "safetensors"}
        return Inspected(catalogue.where, about, None, tensors, [], {})
    classes = {prefix: record.get("class") for prefix, record in manifest.models.items() if record.get("class")}
    about = {"format": manifest.format, **manifest.about, **classes}
    more = {key: _readable(value, catalogue) for key, value in manifest.more.items()}
    optimizers = [
        _optimizer(key, each, catalogue)
        for prefix, record in manifest.optimizers.items()
        for key, each in _with_wrapped(prefix, record)
    ]
    return Inspected(catalogue.where, about, _step(more), tensors, optimizers, more)


def _readable(value: Any, catalogue: Catalogue) -> Any:
    """A split value with each tensor as a few words."""
    tensors = {key: _words(catalogue.entries[key]) for key in state.references(value)}
    return state.join(value, tensors)


def _words(entry: Entry) -> str:
    return f"{entry.dtype}[{', '.join(map(str, entry.shape))}]"


def _step(value: Any) -> int | None:
    if not isinstance(value, Mapping):
        return None
    if type(value.get("step")) is int:
        return int(value["step"])
    return next((found for each in value.values() if (found := _step(each)) is not None), None)


def _with_wrapped(prefix: str, record: Any) -> Iterable[tuple[str, Any]]:
    """An optimizer's record, and those of the optimizers that it wraps."""
    yield prefix, record
    for place, each in record.get("wrapped", {}).items():
        yield from _with_wrapped(f"{prefix}/@{place}", each)


def _optimizer(prefix: str, record: Any, catalogue: Catalogue) -> OptimizerFound:
    elements = {}
    for key, entry in catalogue.entries.items():
        kind, _, rest = key.partition("/")
        if kind == "model":
            elements[rest] = _elements(entry)
    groups = []
    for group in record["groups"]:
        settings = _readable(group["settings"], catalogue)
        groups.append(GroupFound(settings, group["params"], sum(elements.get(name, 0) for name in group["params"])))
    members = [name for group in groups for name in group.parameters]
    with_state = [name for name in members if name in record["state"]]
    without = [name for name in members if name not in record["state"]]
    return OptimizerFound(prefix, record["class"], groups, with_state, without)


def _elements(entry: Entry) -> int:
    count = 1
    for length in entry.shape:
        count *= length
    return count


def _compared(first: Catalogue, one: Inspected, second: Catalogue, other: Inspected) -> Compared:
    before, after = first.entries, second.entries
    before_key, after_key = _plain_keys(first), _plain_keys(second)
    both = [key for key in before_key if key in after_key]
    kinds, bytes_differ, equal = {}, [], 0
    for key in both:
        a, b = before[before_key[key]], after[after_key[key]]
        if _words(a) != _words(b):
            kinds[key] = _words(a), _words(b)
        elif not _same_bytes(first, before_key[key], second, after_key[key]):
            bytes_differ.append(key)
        else:
            equal += 1
    return Compared(
        one.where,
        other.where,
        [key for key in before_key if key not in after_key],
        [key for key in after_key if key not in before_key],
        kinds,
        bytes_differ,
        equal,
        _differing(_facts(one), _facts(other)) if first.manifest is not None and second.manifest is not None else {},
    )


def _plain_keys(catalogue: Catalogue) -> dict[str, str]:
    """Keys as they are compared → keys: another's files hold a model and nothing else."""
    return {key if catalogue.manifest is not None else f"model/{key}": key for key in catalogue.entries}


def _same_bytes(first: Catalogue, a: str, second: Catalogue, b: str) -> bool:
    def checksum(catalogue: Catalogue, key: str) -> int:
        entry = catalogue.entries[key]
        return catalogue.checksum(key, 0, entry.nbytes) if entry.crc32 is None else entry.crc32

    return checksum(first, a) == checksum(second, b)


def _facts(found: Inspected) -> dict[str, Any]:
    """What is compared beside tensors, by path."""
    facts: dict[str, Any] = {}
    for optimizer in found.optimizers:
        facts[f"{optimizer.key}: class"] = optimizer.kind
        facts[f"{optimizer.key}: without state"] = optimizer.without_state
        for g, group in enumerate(optimizer.groups):
            facts[f"{optimizer.key}: group {g}: parameters"] = group.parameters
            _flatten(group.settings, f"{optimizer.key}: group {g}: ", facts)
    _flatten(found.more, "", facts)
    for tensor in found.tensors:
        if tensor.trainable is not None:
            facts[f"{tensor.key}: trainable"] = tensor.trainable
            facts[f"{tensor.key}: names"] = tensor.names
    facts |= {f"about: {key}": value for key, value in found.about.items() if key != "written"}
    return facts


def _flatten(value: Any, path: str, into: dict[str, Any]) -> None:
    if isinstance(value, Mapping):
        for key, each in value.items():
            _flatten(each, f"{path}{key}." if isinstance(each, Mapping) else f"{path}{key}", into)
    else:
        into[path] = value


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    keys = [*one, *(key for key in other if key not in one)]
    tensor = (": trainable", ": names")  # of a tensor that only one has, which is said already
    return {
        key: (one.get(key), other.get(key))
        for key in keys
        if one.get(key) != other.get(key) and not (key.endswith(tensor) and (key in one) != (key in other))
    }


# For the eye


def _part(key: str) -> str:
    kind = key.partition("/")[0]
    return kind if kind in ("optimizer", "more", "rng") else "model"


def _name(tensor: TensorFound) -> str:
    more = f" = {' = '.join(tensor.names[1:])}" if tensor.names[1:] else ""
    return tensor.key.removeprefix("model/") + more


def _kind(tensor: TensorFound) -> str:
    return {True: "trainable", False: "frozen", None: ""}[tensor.trainable]


def _optimizer_lines(optimizer: OptimizerFound) -> list[str]:
    lines = [f"{optimizer.key}: {optimizer.kind}, state of {len(optimizer.with_state)} parameters"]
    if optimizer.without_state:
        shown = ", ".join(optimizer.without_state[:5]) + ("…" if optimizer.without_state[5:] else "")
        lines.append(f"  no state of {len(optimizer.without_state)}: {shown}")
    for g, group in enumerate(optimizer.groups):
        settings = ", ".join(f"{key} {_short(value)}" for key, value in group.settings.items())
        lines.append(f"  group {g}: {len(group.parameters)} parameters, {group.elements:,} elements; {settings}")
    return lines


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
