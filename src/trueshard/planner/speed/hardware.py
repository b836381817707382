"""Devices and nodes: what they can do by their data sheets, and what part of it training reaches."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_type_hints

from trueshard.names import nearest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Mode = Literal["eager", "compile"]


@dataclass(frozen=True)
class Efficiency:
    """What part of a device's peak kernels reach, from 0 to 1, and what each of them costs at least."""

    matmul: float
    """Matrix products and convolutions, of ``peak_flops``."""
    attention: float
    """Fused attention, of ``peak_flops``, over the operations that a causal mask leaves."""
    memory: float
    """Kernels that move memory, of ``memory_bandwidth``."""
    launch_seconds: float
    """What the host needs to issue one operation."""
    collective_seconds: float
    """What it needs besides to gather or to reduce a unit's parameters."""
    kernel_seconds: float
    """The least that one operation occupies the device."""


@dataclass(frozen=True)
class Hardware:
    """A device and the node around it. Bytes, seconds, bytes a second, operations a second."""

    name: str
    """Key of the catalogue, or the stem of the file that it was read from."""
    title: str
    source: str
    """Where the figures come from."""
    memory_bytes: int
    memory_bandwidth: float
    peak_flops: Mapping[str, float]
    """Dense, by torch's name of the dtype; ``"tfloat32"`` is float32 where TF32 is allowed, ``"float8"`` any of 8."""
    link: str
    """What joins the devices of a node."""
    link_bandwidth: float
    """Of one device, in one direction."""
    link_efficiency: float
    """Part of the bandwidth that a ring of collectives reaches."""
    link_latency: float
    """Of one step of a ring."""
    network_bandwidth: float
    """Between nodes: a device's own part of its node's adapters, in one direction."""
    network_efficiency: float
    network_latency: float
    ranks_per_node: int
    """As such nodes usually are."""
    host_bandwidth: float
    """Of copies between the device and pinned host memory, in one direction."""
    host_memory_bandwidth: float
    """Of the node's main memory, a device's part of it."""
    context_bytes: int
    """Taken by the driver and the loaded kernels, outside of torch's allocator."""
    communicator_bytes: int
    """Taken by each communicator, outside of torch's allocator."""
    workspace_bytes: int
    """Taken from torch's allocator at the first matrix product."""
    streams: bool
    """Whether communication runs beside computation; on a CPU everything is in a row."""
    eager: Efficiency
    compile: Efficiency

    def efficiency(self, mode: Mode) -> Efficiency:
        """The efficiency in that mode."""
        return self.compile if mode == "compile" else self.eager

    def peak(self, dtype: str) -> float:
        """Dense operations a second for tensors of that dtype; float32's where the catalogue has none for it."""
        known = self.peak_flops
        return known.get("float8" if dtype.startswith("float8") else dtype, known["float32"])


def hardware(name: str, **overrides: Any) -> Hardware:
    """A device of the catalogue, or of a file.

    Args:
        name: a key of the catalogue in any case, or the path of a TOML file (``*.toml``) with one device's keys at its
            top level; a key ``base`` there names the device of the catalogue from which the rest is taken.
        overrides: fields of :class:`Hardware` that are to be different. Mappings (``peak_flops``, ``eager``,
            ``compile``) replace only the keys that they hold.

    Raises:
        ValueError: unknown name, unknown key, or a value of a wrong type or sign, naming it.
    """
    if name.endswith(".toml"):
        row, key = _of_file(Path(name)), Path(name).stem
    else:
        key = name.lower()
        row = _row(key, name)
    return _build(key, _merged(row, overrides), name)


def known() -> tuple[str, ...]:
    """Every name of the catalogue."""
    return tuple(_catalogue())


@functools.cache
def _catalogue() -> dict[str, dict[str, Any]]:
    text = resources.files(__package__).joinpath("hardware.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def _row(key: str, asked: str) -> dict[str, Any]:
    catalogue = _catalogue()
    if key not in catalogue:
        raise ValueError(f"hardware {asked!r} is not known.{nearest(key, catalogue)} Known: {', '.join(catalogue)}")
    row = dict(catalogue[key])
    base = row.pop("base", None)
    return row if base is None else _merged(_row(base, base), row)


def _of_file(path: Path) -> dict[str, Any]:
    try:
        row = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"hardware file {str(path)!r} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"hardware file {str(path)!r} is not TOML: {error}") from None
    row = {"title": path.stem, "source": f"{path.name}", **row}
    base = row.pop("base", None)
    if base is None:
        return row
    if not isinstance(base, str):
        raise ValueError(f"hardware file {str(path)!r}: base={base!r} must be a name of the catalogue")
    return _merged(_row(base.lower(), base), row)


def _merged(row: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(row)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = {**old, **value} if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def _build(key: str, row: Mapping[str, Any], asked: str) -> Hardware:
    values = _values(Hardware, {**row, "name": key}, f"hardware {asked!r}", "")
    for dtype, flops in values["peak_flops"].items():
        _number(flops, f"hardware {asked!r}: peak_flops.{dtype}", positive=True)
    if "float32" not in values["peak_flops"]:
        raise ValueError(f"hardware {asked!r}: peak_flops.float32 is missing")
    return Hardware(**values)


def _values(cls: type, row: Mapping[str, Any], where: str, prefix: str) -> dict[str, Any]:
    """The fields of ``cls`` out of a row, each checked."""
    hints = get_type_hints(cls)
    names = [each.name for each in fields(cls)]
    for key in row:
        if key not in names:
            raise ValueError(f"{where}: {prefix + key!r} is no key.{nearest(key, names)} Known: {', '.join(names)}")
    values = {}
    for each in fields(cls):
        label = f"{where}: {prefix}{each.name}"
        if each.name not in row:
            assert each.default is MISSING
            raise ValueError(f"{label} is missing")
        values[each.name] = _checked(row[each.name], hints[each.name], each.name, label, where)
    return values


def _checked(value: Any, hint: Any, name: str, label: str, where: str) -> Any:
    if is_dataclass(hint):
        if isinstance(value, Efficiency):
            return value
        if not isinstance(value, Mapping):
            raise ValueError(f"{label}={value!r} must be a table")
        return Efficiency(**_values(Efficiency, value, where, f"{name}."))
    if hint is str or hint is bool:
        if not isinstance(value, hint):
            raise ValueError(f"{label}={value!r} must be {'text' if hint is str else 'true or false'}")
        return value
    if hint is int or hint is float:
        whole = hint is int
        may_be_zero = name in _MAY_BE_ZERO
        number = _number(value, label, positive=not may_be_zero, whole=whole)
        if name in _PARTS and number > 1:
            raise ValueError(f"{label}={value!r} must be a part of 1")
        return number
    if not isinstance(value, Mapping):
        raise ValueError(f"{label}={value!r} must be a table")
    return dict(value)


_PARTS = frozenset({"matmul", "attention", "memory", "link_efficiency", "network_efficiency"})
_MAY_BE_ZERO = frozenset(
    {"context_bytes", "communicator_bytes", "workspace_bytes", "launch_seconds", "collective_seconds", "kernel_seconds"}
    | {"link_latency", "network_latency"}
)


def _number(value: Any, label: str, *, positive: bool, whole: bool = False) -> int | float:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or value < 0 or (positive and value == 0) or (whole and int(value) != value):
        sign = "above 0" if positive else "0 or more"
        raise ValueError(f"{label}={value!r} must be a {'whole ' if whole else ''}number {sign}")
    return int(value) if whole else float(value)
