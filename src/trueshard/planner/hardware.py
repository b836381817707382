"""The catalogue of devices and nodes: their data sheets' figures, and the share of these that training reaches."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from trueshard import machine
from trueshard.text import nearest, size, tomllib

Mode = Literal["eager", "compile"]


def _number(value: Any) -> Any:
    if isinstance(value, bool | str):
        raise ValueError("must be a number")
    return value


def _has_float32(peaks: Mapping[str, float]) -> Mapping[str, float]:
    if "float32" not in peaks:
        raise ValueError("float32 is missing")
    return peaks


Rate = Annotated[float, BeforeValidator(_number), Field(gt=0, allow_inf_nan=False)]
"""Bytes, operations or joules a second."""
Share = Annotated[float, BeforeValidator(_number), Field(gt=0, le=1)]
Seconds = Annotated[float, BeforeValidator(_number), Field(ge=0, allow_inf_nan=False)]
Bytes = Annotated[int, BeforeValidator(_number), Field(ge=0)]
Count = Annotated[int, BeforeValidator(_number), Field(gt=0)]

_STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=_STRICT)
class Efficiency:
    """Shares of a device's peak that kernels reach, from 0 to 1, and the fixed cost of each kernel."""

    matmul: Share
    """Share of ``peak_flops`` in matrix products and convolutions."""
    attention: Share
    """Share of ``peak_flops`` in fused attention, counting only operations that a causal mask leaves."""
    memory: Share
    """Share of ``memory_bandwidth`` in memory-bound kernels."""
    launch_seconds: Seconds
    """Host time to launch one operation."""
    collective_seconds: Seconds
    """Additional host time to gather or reduce a unit's parameters."""
    kernel_seconds: Seconds
    """Shortest time that an operation occupies the device."""


@dataclass(frozen=True, config=_STRICT)
class Hardware:
    """A device and the node around it. Bytes, seconds, bytes a second, operations a second."""

    name: str
    """Key of the catalogue, or the stem of the file that it was read from."""
    title: str
    source: str
    """Source of the figures."""
    memory_bytes: Count
    memory_bandwidth: Rate
    peak_flops: Annotated[Mapping[str, Rate], AfterValidator(_has_float32)]
    """Dense, by torch's name of the dtype; ``"tfloat32"`` is float32 where TF32 is allowed, ``"float8"`` any of 8;
    ``"mxfp8"`` with scales of blocks, where the device multiplies them."""
    link: str
    """Name of the link between devices of a node."""
    link_bandwidth: Rate
    """Bandwidth of one device, one direction."""
    link_efficiency: Share
    """Share of the bandwidth that a ring collective reaches."""
    link_latency: Seconds
    """Latency of one step of a ring."""
    network_bandwidth: Rate
    """Device's share of its node's adapters, one direction."""
    network_efficiency: Share
    network_latency: Seconds
    ranks_per_node: Count
    """Devices of a usual node."""
    host_bandwidth: Rate
    """Bandwidth of copies between the device and pinned host memory, one direction."""
    host_memory_bandwidth: Rate
    """Device's share of the bandwidth of the node's main memory."""
    context_bytes: Bytes
    """Allocated by the driver and loaded kernels, outside of torch's allocator."""
    communicator_bytes: Bytes
    """Allocated by each communicator, outside of torch's allocator."""
    workspace_bytes: Bytes
    """Allocated by torch's allocator at the first matrix product."""
    streams: Annotated[bool, Field(strict=True)]
    """True if communication overlaps computation; on a CPU everything is sequential."""
    eager: Efficiency
    compile: Efficiency
    host_memory_bytes: Count | None = None
    """Device's share of the node's main memory; None: not known, and no limit."""
    switched: Annotated[bool, Field(strict=True)] = True
    """False if a node's devices are joined in pairs, each by an equal part of its links, and not by a switch."""
    watts: Rate | None = None
    """Most that the device draws, by its data sheet; None: not known."""

    def link_rate(self, ranks: int) -> float:
        """Return the bytes a second that each of some ranks of a node receives from the others."""
        whole = self.link_bandwidth * self.link_efficiency
        return whole if self.switched else whole * min(1.0, (ranks - 1) / max(1, self.ranks_per_node - 1))

    def efficiency(self, mode: Mode) -> Efficiency:
        """Return the shares for a mode."""
        return self.compile if mode == "compile" else self.eager

    def peak(self, dtype: str) -> float:
        """Return dense operations a second in a dtype; float32's if the catalogue has none for it."""
        peaks = self.peak_flops
        return peaks.get("float8" if dtype.startswith("float8") else dtype, peaks["float32"])


def hardware(name: str, **overrides: Any) -> Hardware:
    """Return a device of the catalogue, or of a file.

    Args:
        name: a key of the catalogue in any case, or the path of a TOML file (``*.toml``) with one device, as the
            catalogue has it: a table ``[name]``, or its keys at the top level. The key ``base`` names the device of the
            catalogue that gives all other keys.
        overrides: fields of :class:`Hardware` to replace. Mappings (``peak_flops``, ``eager``, ``compile``) replace
            only the keys that they hold.

    Raises:
        ValueError: unknown name, unknown key, or a value of a wrong type or sign, naming it.
    """
    if name.endswith(".toml"):
        row, key = _of_file(Path(name))
    else:
        row, key = _row(name), name.lower()
    try:
        return Hardware(**{**_merged(row, overrides), "name": key})
    except ValidationError as error:
        problem = error.errors()[0]
    *outer, last = map(str, problem["loc"])
    path = ".".join([*outer, last])
    if problem["type"] == "unexpected_keyword_argument":
        valid = [field.name for field in fields(Efficiency if outer else Hardware)]
        raise ValueError(f"hardware {name!r}: {path!r} is no key.{nearest(last, valid)} Known: {', '.join(valid)}")
    if problem["type"] == "missing":
        raise ValueError(f"hardware {name!r}: {path} is missing")
    message = problem["msg"].removeprefix("Value error, ")
    raise ValueError(f"hardware {name!r}: {path}={problem['input']!r}: {message}")


def known() -> tuple[str, ...]:
    """Return all names of the catalogue."""
    return tuple(_catalogue())


def recognise(title: str, memory_bytes: int) -> str | None:
    """Return the catalogue's name of a device; None if it has none.

    All words of the title (``torch.cuda.get_device_name()``) must be known: "H100 NVL" and "RTX 4090 Laptop GPU" are
    other devices than "H100" and "RTX 4090". Total memory in bytes tells variants of one title apart.
    """
    words = _model_words(title.lower().replace("rtx ", "rtx"))
    memory_of = {name: hardware(name).memory_bytes for name in known() if name != "cpu" and _model_words(name) == words}
    name = min(memory_of, key=lambda name: abs(memory_of[name] - memory_bytes), default=None)
    return name if name is not None and abs(memory_of[name] / memory_bytes - 1) < _SAME_MEMORY else None


def hardware_here(device: torch.device, otherwise: str | None = None) -> Hardware:
    """Return the catalogue's entry for a CUDA device of this machine with its own memory, or for the CPU.

    ``otherwise``: the entry that stands for a device that the catalogue does not know; None: that raises ValueError.
    """
    if device.type == "cpu":
        return hardware("cpu")
    title = torch.cuda.get_device_name(device)
    memory_bytes = int(torch.cuda.get_device_properties(device).total_memory)
    name = recognise(title, memory_bytes) or otherwise
    if name is None:
        raise ValueError(
            f"the planner's catalogue has no device {title!r} with {size(memory_bytes)}: name one with --hardware "
            f"(hardware= in Python), one of {', '.join(known())}, or a TOML file that describes it"
        )
    host = machine.memory_bytes() // max(1, torch.cuda.device_count())
    return hardware(name, memory_bytes=memory_bytes, host_memory_bytes=host)


_SAME_MEMORY = 0.08
"""Relative difference up to which two figures of total memory are taken for the same device's."""
_INDIFFERENT = {"nvidia", "amd", "instinct", "geforce", "tesla", "sxm", "sxm4", "sxm5", "oam", "hbm2e", "hbm3", "hbm3e"}
"""Words of a device's title that tell nothing besides its model and memory."""


def _model_words(title: str) -> set[str]:
    return {word for word in re.findall(r"[a-z0-9]+", title) if not re.fullmatch(r"\d+gb", word)} - _INDIFFERENT


@functools.cache
def _catalogue() -> dict[str, dict[str, Any]]:
    text = resources.files(__package__).joinpath("hardware.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def _row(name: str) -> dict[str, Any]:
    catalogue, key = _catalogue(), name.lower()
    if key not in catalogue:
        raise ValueError(f"hardware {name!r} is not known.{nearest(key, catalogue)} Known: {', '.join(catalogue)}")
    return _with_base(catalogue[key])


def _with_base(row: Mapping[str, Any]) -> dict[str, Any]:
    changes = {key: value for key, value in row.items() if key != "base"}
    return _merged(_row(row["base"]), changes) if "base" in row else changes


def _of_file(path: Path) -> tuple[dict[str, Any], str]:
    """Return a device of a file and its name."""
    try:
        row = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"hardware file {str(path)!r} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"hardware file {str(path)!r} is not TOML: {error}") from None
    key, devices = path.stem, [name for name in row if isinstance(row[name], dict) and name not in ("eager", "compile")]
    if devices == [*row] and len(row) > 1:
        raise ValueError(f"hardware file {str(path)!r} has several devices, {', '.join(row)}: leave one in it")
    if devices == [*row] != []:
        key, row = row.popitem()
    if not isinstance(base := row.get("base", ""), str):
        raise ValueError(f"hardware file {str(path)!r}: base={base!r} must be a name of the catalogue")
    return _with_base({"title": key, "source": path.name, **row}), key


def with_links(device: Hardware, link: str | None, network: str | None) -> Hardware:
    """Return a device with another link inside the node and another network between nodes; None: its own.

    Args:
        link: a link of the catalogue (``"nvlink4"``, ``"PCIe 5"``), or a device's rate in one direction (``"64GB"``).
        network: a device's rate in one direction, of bits or bytes a second (``"400Gb"``, ``"50GB/s"``).

    Raises:
        ValueError: a word that is neither.
    """
    changes: dict[str, Any] = {}
    links = {hardware(name).link: hardware(name) for name in reversed(known())}
    if link is not None:
        word = "".join(link.lower().split())
        named = [row for title, row in links.items() if "".join(title.lower().split()).startswith(word)]
        keys = ("link", "link_bandwidth", "link_efficiency", "link_latency")
        changes |= {key: getattr(named[0], key) for key in keys} if len(named) == 1 else {"link": link}
        if len(named) != 1:
            changes["link_bandwidth"] = _rate("link", link, f", or one of {', '.join(links)}")
    if network is not None:
        changes["network_bandwidth"] = _rate("network", network, "")
    return replace(device, **changes)


def _rate(option: str, words: str, more: str) -> float:
    """Return the bytes a second of a rate; raise ValueError, naming ``option``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT])(b|B|bit|bps|Bps)(?:/s)?", words.strip())
    if match is None or not float(match[1]):
        raise ValueError(f"{option}={words!r} is no rate: write 400Gb (bits a second) or 50GB (bytes a second){more}")
    rate = float(match[1]) * 1000.0 ** ("KMGT".index(match[2]) + 1)
    return rate if match[3].startswith("B") else rate / 8


def _merged(row: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(row)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = {**old, **value} if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged
