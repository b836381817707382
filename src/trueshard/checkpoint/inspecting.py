"""List the content of a checkpoint, compare two, or check every byte of one, without the model.

``inspect`` reads manifests and headers. Tensors are compared by their checksums, so at any world size; only where a
file has no checksums are they read.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trueshard.checkpoint import hashing
from trueshard.checkpoint.catalogue import Catalogue, open_catalogue
from trueshard.checkpoint.format import MANIFEST, Manifest, TensorEntry, crc32, is_marked, join, with_wrapped
from trueshard.errors import TrueShardError, own_errors
from trueshard.text import size, table


@dataclass(frozen=True)
class TensorFound:
    key: str
    """"model/<name>", "optimizer/<parameter>/<state>", "more/<path>", "rng"; in other programs' files, the name."""
    names: list[str]  # a tied tensor has several
    shape: list[int]
    dtype: str
    bytes: int
    trainable: bool | None  # None if not a parameter, or unknown
    files: list[str]
    crc32: int | None


@dataclass(frozen=True)
class GroupFound:
    settings: dict[str, Any]
    parameters: list[str]
    elements: int  # of all its parameters


@dataclass(frozen=True)
class OptimizerFound:
    key: str
    kind: str  # the class
    groups: list[GroupFound]
    with_state: list[str]  # names of parameters
    without_state: list[str]


@dataclass(frozen=True)
class Inspected:
    """The content of a checkpoint. ``str()`` is a listing."""

    where: str
    about: dict[str, Any]
    """Format, and when, by which versions and from how many ranks it was written, as far as known."""
    step: int | None
    """The first integer called "step" among the user's entries."""
    tensors: list[TensorFound]
    optimizers: list[OptimizerFound]
    more: dict[str, Any]
    """The user's entries; each tensor in them as its dtype and shape."""

    def totals(self) -> dict[str, dict[str, int]]:
        """Return bytes by part (model, optimizer, …) and dtype."""
        result: dict[str, dict[str, int]] = {}
        for tensor in self.tensors:
            by_dtype = result.setdefault(_part(tensor.key), {})
            by_dtype[tensor.dtype] = by_dtype.get(tensor.dtype, 0) + tensor.bytes
        return result

    def to_json(self) -> str:
        """Return all fields as JSON."""
        return json.dumps(asdict(self) | {"totals": self.totals()}, indent=1, default=str)

    def __str__(self) -> str:
        facts = self.about if self.step is None else {**self.about, "step": self.step}
        lines = [self.where, *(f"  {key}: {value}" for key, value in facts.items())]
        kinds = {True: "trainable", False: "frozen", None: ""}
        rows = []
        for t in self.tensors:
            if _part(t.key) in ("model", "more"):
                name, shape = " = ".join([t.key.removeprefix("model/"), *t.names[1:]]), "×".join(map(str, t.shape))
                rows.append((name, shape or "one", t.dtype, size(t.bytes), kinds[t.trainable]))
        lines += ["", *table(("tensor", "shape", "dtype", "size", ""), rows, right=(3,))]
        counts = Counter((_part(tensor.key), tensor.dtype) for tensor in self.tensors)
        parts = [
            (part, dtype, f"{counts[part, dtype]:,}", size(count))
            for part, by_dtype in self.totals().items()
            for dtype, count in by_dtype.items()
        ]
        parts.append(("all", "", f"{len(self.tensors):,}", size(sum(tensor.bytes for tensor in self.tensors))))
        lines += ["", *table(("part", "dtype", "tensors", "size"), parts, right=(2, 3))]
        for optimizer in self.optimizers:
            lines += ["", f"{optimizer.key}: {optimizer.kind}, state of {len(optimizer.with_state)} parameters"]
            if optimizer.without_state:
                few = ", ".join(optimizer.without_state[:5]) + ("…" if optimizer.without_state[5:] else "")
                lines.append(f"  no state of {len(optimizer.without_state)}: {few}")
            for g, group in enumerate(optimizer.groups):
                settings = ", ".join(f"{key} {_short(value)}" for key, value in group.settings.items())
                members = f"{len(group.parameters)} parameters, {group.elements:,} elements"
                lines.append(f"  group {g}: {members}; {settings}")
        if self.more:
            entries = [(key, _short(value)) for key, value in self.more.items()]
            lines += ["", *table(("entry", "value"), entries)]
        return "\n".join(line.rstrip() for line in lines)


@dataclass(frozen=True)
class Compared:
    """The differences between two checkpoints. ``str()`` is a listing; false if there are none."""

    one: str
    other: str
    removed: list[str]
    """Keys of tensors that only ``one`` has."""
    added: list[str]
    """Keys of tensors that only ``other`` has."""
    changed_kind: dict[str, tuple[str, str]]
    """Key → shape and dtype in both."""
    changed_bytes: list[str]
    """Keys of tensors of the same shape and dtype, and different content."""
    equal: int
    """Number of equal tensors."""
    settings: dict[str, tuple[Any, Any]]
    """Settings, entries and facts that differ, by path; None if missing."""
    read: bool
    """True if tensors were read; else what the manifests say of them was compared, where they do."""

    def __bool__(self) -> bool:
        return bool(self.removed or self.added or self.changed_kind or self.changed_bytes or self.settings)

    def to_json(self) -> str:
        """Return all fields as JSON."""
        return json.dumps(asdict(self), indent=1, default=str)

    def __str__(self) -> str:
        how = "by their bytes" if self.read else "by the checksums that were saved with them; --bytes reads them"
        lines = [f"- {self.one}", f"+ {self.other}", f"{self.equal:,} tensors are equal, {how}"]
        lines += [f"- {key}" for key in self.removed]
        lines += [f"+ {key}" for key in self.added]
        lines += [f"~ {key}: {before} → {after}" for key, (before, after) in self.changed_kind.items()]
        lines += [f"~ {key}: other values" for key in self.changed_bytes]
        lines += [f"~ {path}: {_short(a)} → {_short(b)}" for path, (a, b) in self.settings.items()]
        return "\n".join(lines if self else [*lines, "nothing differs"])


@own_errors()
def inspect(
    path: str | os.PathLike[str], other: str | os.PathLike[str] | None = None, *, read: bool = False
) -> Inspected | Compared:
    """List the content of a checkpoint, or compare two.

    Args:
        path: a checkpoint; ``…/latest`` is the newest one beside it. Or a Hugging Face or PEFT directory, or a
            .safetensors file.
        other: a second one.
        read: compare tensors by their bytes, not by the checksums that were saved with them.

    Returns:
        An object to print, or to read field by field or by ``to_json()``.

    Raises:
        FileNotFoundError: no checkpoint is there.
        ValueError: it is damaged, or a directory of torch.distributed.checkpoint.
    """
    catalogue = open_catalogue(path)
    result = _inspected(catalogue)
    if other is None:
        return result
    second = open_catalogue(other)
    return _compared(catalogue, result, second, _inspected(second), read)


def _inspected(catalogue: Catalogue) -> Inspected:
    catalogue.refuse_dcp()
    tensors = [
        TensorFound(key, e.names, e.shape, e.dtype, e.nbytes, e.trainable, e.files, e.crc32)
        for key, e in catalogue.entries.items()
    ]
    manifest = catalogue.manifest
    if manifest is None:
        about: dict[str, Any] = {"format": "PEFT adapter" if catalogue.adapter else "safetensors"}
        return Inspected(catalogue.where, about, None, tensors, [], {})
    classes = {prefix: record.get("class") for prefix, record in manifest.models.items() if record.get("class")}
    about = {"format": manifest.format, **manifest.about, **classes}
    more = {key: _readable(value, catalogue) for key, value in manifest.more.items()}
    return Inspected(catalogue.where, about, _step(more), tensors, _optimizers(manifest, catalogue), more)


def _readable(value: Any, catalogue: Catalogue) -> Any:
    """Rebuild a value of the manifest with dtype and shape in the place of each tensor."""
    return join(value, lambda key: _dtype_and_shape(catalogue.entries[key]))


def _dtype_and_shape(entry: TensorEntry) -> str:
    return f"{entry.dtype}[{', '.join(map(str, entry.shape))}]"


def _step(value: Any) -> int | None:
    if not isinstance(value, Mapping):
        return None
    if type(value.get("step")) is int:
        return int(value["step"])
    return next((step for inner in value.values() if (step := _step(inner)) is not None), None)


def _optimizers(manifest: Manifest, catalogue: Catalogue) -> list[OptimizerFound]:
    models = {key: entry for key, entry in catalogue.entries.items() if key.startswith("model/")}
    elements = {key.partition("/")[2]: math.prod(entry.shape) for key, entry in models.items()}
    result = []
    for key, record in with_wrapped(manifest.optimizers).items():
        groups = []
        for group in record["groups"]:
            count = sum(elements.get(name, 0) for name in group["params"])
            groups.append(GroupFound(_readable(group["settings"], catalogue), group["params"], count))
        members = [name for group in groups for name in group.parameters]
        having, without = ([name for name in members if (name in record["state"]) is has] for has in (True, False))
        result.append(OptimizerFound(key, record["class"], groups, having, without))
    return result


def _compared(first: Catalogue, one: Inspected, second: Catalogue, other: Inspected, read: bool) -> Compared:
    # Other programs' files hold only a model, under its own names.
    before, after = (
        {key if source.manifest is not None else f"model/{key}": key for key in source.entries}
        for source in (first, second)
    )
    shared = {key: (first.entries[before[key]], second.entries[after[key]]) for key in before if key in after}
    facts = [_facts(content, shared) if first.manifest and second.manifest else {} for content in (one, other)]
    kinds = {key: (_dtype_and_shape(a), _dtype_and_shape(b)) for key, (a, b) in shared.items()}
    changed = {key: (a, b) for key, (a, b) in kinds.items() if a != b}
    same = [key for key in shared if key not in changed]

    def checksum(catalogue: Catalogue, key: str) -> int:
        entry = catalogue.entries[key]
        return catalogue.checksum(key, 0, entry.nbytes) if read or entry.crc32 is None else entry.crc32

    differ = [key for key in same if checksum(first, before[key]) != checksum(second, after[key])]
    return Compared(
        one.where,
        other.where,
        [key for key in before if key not in after],
        [key for key in after if key not in before],
        changed,
        differ,
        len(same) - len(differ),
        {key: (a, b) for key in facts[0] | facts[1] if repr(a := facts[0].get(key)) != repr(b := facts[1].get(key))},
        read,
    )


def _facts(content: Inspected, shared: Collection[str]) -> dict[str, Any]:
    """Return all that is compared besides values, by path; ``shared``: keys of the tensors that both have."""
    facts: dict[str, Any] = {}

    def flatten(value: Mapping[str, Any], path: str) -> None:
        for key, inner in value.items():
            if isinstance(inner, Mapping):
                flatten(inner, f"{path}{key}.")
            else:
                facts[f"{path}{key}"] = inner

    for optimizer in content.optimizers:
        facts[f"{optimizer.key}: class"] = optimizer.kind
        facts[f"{optimizer.key}: without state"] = optimizer.without_state
        for g, group in enumerate(optimizer.groups):
            facts[f"{optimizer.key}: group {g}: parameters"] = group.parameters
            flatten(group.settings, f"{optimizer.key}: group {g}: ")
    flatten(content.more, "")
    for tensor in content.tensors:
        if tensor.trainable is not None and tensor.key in shared:
            facts[f"{tensor.key}: trainable"] = tensor.trainable
            facts[f"{tensor.key}: names"] = tensor.names
    return facts | {f"about: {key}": value for key, value in content.about.items() if key != "written"}


def _part(key: str) -> str:
    kind = key.partition("/")[0]
    return kind if kind in ("optimizer", "more", "rng") else "model"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:59] + "…"


# Check


class DamagedCheckpoint(TrueShardError, ValueError):
    """A checkpoint does not hold what was saved; ``problems`` names tensors and files."""

    def __init__(self, where: str, problems: list[str]) -> None:
        self.problems = problems
        shown = "; ".join(problems[:10]) + (f"; and {len(problems) - 10} more" if problems[10:] else "")
        super().__init__(f"{where} is damaged: {shown}. Use an earlier checkpoint")


@dataclass(frozen=True)
class Checked:
    """The totals of an intact checkpoint."""

    where: str
    files: int
    tensors: int
    bytes: int
    unchecked: int
    """Tensors without a checksum: another program's."""

    def __str__(self) -> str:
        less = f", {self.unchecked} of them without a checksum to compare" if self.unchecked else ""
        return f"{self.where}: {self.files} files, {self.tensors} tensors{less}, {self.bytes:,} bytes: all well"


@own_errors()
def check(path: str | os.PathLike[str]) -> Checked:
    """Read every byte of a checkpoint and compare it with what was saved.

    Args:
        path: a checkpoint; ``…/latest`` is the newest one beside it. Or a Hugging Face directory, whose structure is
            checked.

    Raises:
        DamagedCheckpoint: something is missing or differs; ``problems`` names tensors and files.
        FileNotFoundError: no checkpoint is there.
    """
    try:
        catalogue = open_catalogue(path)
    except (FileNotFoundError, ValueError) as error:
        if isinstance(error, ValueError) or "incomplete" in str(error):
            raise DamagedCheckpoint(str(path), [str(error)]) from error
        raise
    catalogue.refuse_dcp()
    manifest, directory = catalogue.manifest, catalogue.directory
    files = {file for entry in catalogue.entries.values() for file in entry.files}
    problems = []
    for name, record in (manifest.files if manifest is not None else {}).items():
        data = directory.read(name, 0, record.size if record.header is None else record.header)
        if crc32(data) != record.crc32:
            what = "the header of " if record.header is not None else ""
            problems.append(f"{what}{name} does not have the bytes that were saved")
    problems += _exchanged(catalogue, files) if not problems else []
    for key, entry in catalogue.entries.items():
        if not catalogue.is_intact(key):
            problems.append(f"tensor {key!r} in {', '.join(entry.files)} does not have the bytes that were saved")
    if manifest is not None and not problems:
        for key, expected in manifest.about.get("hashes", {}).items():
            tensor = catalogue.full_tensor(key)
            if hashing.written(f"{tuple(tensor.shape)} {tensor.dtype}", hashing.hash_here(tensor)) != expected:
                problems.append(f"tensor {key!r} has other values than those in memory when it was saved")
    if manifest is None and any(is_marked(directory.header(file)) for file in files):
        problems.append(f"{MANIFEST} is missing: the files are those of a checkpoint")
    if problems:
        raise DamagedCheckpoint(catalogue.where, problems)
    files |= set() if manifest is None else {*manifest.files, MANIFEST}
    total = sum(directory.size(file) for file in files)
    unchecked = sum(entry.crc32 is None for entry in catalogue.entries.values())
    return Checked(catalogue.where, len(files), len(catalogue.entries), total, unchecked)


def _exchanged(catalogue: Catalogue, files: set[str]) -> list[str]:
    """Return a problem for each tensor whose place belongs to another one by the file's own header."""
    name_at = {tensor.pieces[0]: name for file in files for name, tensor in catalogue.directory.tensors(file).items()}
    usual = {key: {key, key.partition("/")[2], *entry.names} for key, entry in catalogue.entries.items()}
    all_names = {name for names in usual.values() for name in names}
    problems = []
    for key, entry in catalogue.entries.items():
        for piece in entry.pieces:
            name = name_at.get(piece)
            if piece.begin != piece.end and name not in usual[key] and (name is None or name in all_names):
                problems.append(f"tensor {key!r} is not where the manifest says: {piece.file} has {name!r} there")
    return problems
