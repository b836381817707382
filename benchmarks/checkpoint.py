"""What loading and saving cost: time, memory and bytes, beside transformers, Accelerate, torch DCP and the bare disk.

- Llama 3.2 1B in bfloat16 over gloo processes. Each load has fresh processes; the ways take turns, and so do saves.
- A load goes from nothing to a sharded model. Three clocks: until it returns, until a byte of each page of the weights
  has been read, and until one has been written. They differ for a way that maps the file and hands out the map as
  weights: reading is put off until the first use, copying until the first step.
- Files are in the page cache when they are loaded. Saves end with ``fsync``; before each, the disk is quiet.
- The slowest rank's time counts, and the largest memory of a rank. A sample costs seconds and a disk is never quiet:
  medians of a few, with the least and the largest beside them, not an interval.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import checkpoint_ways as ways
from benchmarks import kernel
from benchmarks.forked import on_ranks, preload
from benchmarks.paired import clocked
from benchmarks.table import Table, Tell

RANKS = (2, 4)
LOADS, SAVES, STALLS, STATES = 3, 4, 4, 2
"""Samples: of a load, of a save, of a stall, of a save with optimizer state. Removing what was saved takes longest."""
WITH_STATE = ("plain write", "trueshard", "torch DCP")
"""The ways of saving that are tried with optimizer state."""
FREE = 30 * 2**30
"""bytes of disk that it needs for a while"""
STALL = 1.2
"""The longest stall of a save in the background, over the time to copy what a rank holds."""

GIB = 2**30


def run(tell: Tell) -> Table:
    """All of it, on every number of ranks; what it writes is removed."""
    build = Path("build")
    build.mkdir(exist_ok=True)
    if shutil.disk_usage(build).free < FREE:
        raise RuntimeError(f"{build.absolute()} has less than {FREE / GIB:.0f} GiB free; make room there")
    preload([__name__, *ways.IMPORTS])
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=build) as name:
        folder = Path(name)
        on_ranks(write_source, 1, folder)
        for ranks in RANKS:
            rows += _on(ranks, folder, tell)
        rows += _with_state(RANKS[0], folder, tell)
    return Table(
        name="checkpoint",
        title="Loading and saving 1.2 billion parameters",
        note=_note(),
        columns=("figure", "ranks", "TrueShard", "beside", "its own", "ratio", "range", "at most"),
        rows=tuple(row.cells() for row in rows),
        numbers=[asdict(row) for row in rows],
    )


@dataclass(frozen=True)
class Row:
    """A figure of ours, and the same of something else, sample by sample."""

    figure: str
    ranks: int
    ours: Sequence[float]
    beside: str
    theirs: Sequence[float]
    at_most: float | None = None
    """The ratio that is aimed at."""

    def cells(self) -> tuple[str, ...]:
        """As the table shows it."""
        ratios = [ours / theirs for ours, theirs in zip(self.ours, self.theirs, strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}" if len(ratios) > 1 else ""
        return (
            self.figure,
            str(self.ranks),
            f"{statistics.median(self.ours):.2f}",
            self.beside,
            f"{statistics.median(self.theirs):.2f}",
            f"{statistics.median(ratios):.2f}",
            spread,
            "" if self.at_most is None else f"{self.at_most:.2f}",
        )


def _on(ranks: int, folder: Path, tell: Tell) -> list[Row]:
    saved = on_ranks(measure_saves, ranks, folder, tuple(ways.SAVES), SAVES, False)
    rows = _save_rows("save", ranks, saved)
    tell(f"saves on {ranks}: {rows[0].cells()[2]} s")
    found: dict[str, list[list[Loaded]]] = {way: [] for way in ways.LOADS}
    for i in range(LOADS):
        for way in list(ways.LOADS)[:: -1 if i % 2 else 1]:
            found[way].append(on_ranks(load, ranks, folder, way))
    rows += _load_rows(ranks, found, folder)
    tell(f"loads on {ranks}: {statistics.median(_most(found['trueshard, meta'], 'written')):.2f} s")
    rows += _stall_rows(ranks, folder)
    tell(f"stalls on {ranks}")
    for each in (ways.OURS, ways.DCP):
        shutil.rmtree(folder / f"{each}-{ranks}")
    return rows


def write_source(folder: Path) -> None:
    """The Hugging Face directory that is loaded from."""
    _quietly()
    ways.write_source(folder / ways.HUGGING_FACE)


def _quietly() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()


# ---- loading

CLOCKS = {"returned": "returns", "read": "has been read", "written": "has been written to"}
"""The fields of ``Loaded`` that are times, in words."""

COMPARED = (
    ("load, meta model", "trueshard, meta", "transformers", ("returned", "read", "written")),
    ("load, meta model", "trueshard, meta", "Accelerate", ("written",)),
    ("load, meta model", "trueshard, meta", "torch DCP", ("written",)),
    ("load, sharded model", "trueshard, sharded", "transformers", ("written",)),
    ("load, sharded model", "trueshard, sharded", "Accelerate", ("written",)),
    ("load, sharded model", "trueshard, sharded", "torch DCP", ("written",)),
    ("load, own checkpoint", "trueshard, own", "torch DCP", ("returned", "read", "written")),
)
"""Rows: label, our way, the other, by which clocks."""


@dataclass(frozen=True)
class Loaded:
    """One load on one rank."""

    returned: float
    """Seconds until the model was returned."""
    read: float
    """Seconds until its weights had been read."""
    written: float
    """Seconds until its weights had been written to."""
    before: int
    """Bytes resident at the beginning."""
    peak: int
    """The most bytes that were ever resident."""
    bytes_read: int
    """Of files: by calls of ``read``, by TrueShard through maps, and of weights that lie in a map when it returns."""
    digest: int
    """A sum over some of the bytes of this rank."""


def load(folder: Path, way: str) -> Loaded:
    """One load on this rank."""
    _quietly()
    model: list[nn.Module] = []
    taken = ways.count_reads()
    before, count = kernel.resident(), kernel.bytes_read()
    returned = clocked(lambda: model.append(ways.LOADS[way](folder)))[0].item()
    count = kernel.bytes_read() - count + sum(taken) + _in_maps(model[0], folder)
    digest: list[int] = []
    read = clocked(lambda: digest.append(_touch(model[0], lambda each: int(each.sum()))))[0].item()
    written = clocked(lambda: _touch(model[0], lambda each: int(each.add_(0).numel())))[0].item()
    return Loaded(returned, returned + read, returned + read + written, before, kernel.peak(), count, digest[0])


def _in_maps(model: nn.Module, folder: Path) -> int:
    """Bytes of weights that are to be read yet, where they are mapped; and what has been touched of these maps."""
    maps = kernel.mapped(folder)
    places = [(local.data_ptr(), local.nbytes) for local in ways.locals_of(model)]
    waiting = sum(size for at, size in places if any(begin <= at < end for begin, end, _ in maps))
    return waiting + sum(touched for _, _, touched in maps)


def _touch(model: nn.Module, what: Callable[[torch.Tensor], int]) -> int:
    return sum(what(ways.pages(local)) for local in ways.locals_of(model))


def _most(runs: list[list[Loaded]], field: str) -> list[float]:
    """Of each run, that of the rank that has most."""
    return [max(float(getattr(each, field)) for each in run) for run in runs]


def _load_rows(ranks: int, found: dict[str, list[list[Loaded]]], folder: Path) -> list[Row]:
    for rank in range(ranks):
        digests = {way: {run[rank].digest for run in runs} for way, runs in found.items()}
        if len(set().union(*digests.values())) > 1:
            raise RuntimeError(f"rank {rank} did not load the same weights by all ways: {digests}")

    rows: list[Row] = []
    for label, ours, peer, fields in COMPARED:
        for field in fields:
            figure = f"{label}: s until it {CLOCKS[field]}"
            rows.append(Row(figure, ranks, _most(found[ours], field), peer, _most(found[peer], field), 1.0))
        peaks = [[each / GIB for each in _most(found[way], "peak")] for way in (ours, peer)]
        rows.append(Row(f"{label}: peak memory of a rank, GiB", ranks, peaks[0], peer, peaks[1], 1.0))
    size = sum(each.stat().st_size for each in (folder / ways.HUGGING_FACE).glob("*.safetensors")) / GIB
    for label, ours in {label: ours for label, ours, _, _ in COMPARED}.items():
        counts = [sum(each.bytes_read for each in run) / GIB for run in found[ours]]
        limit = None if ours == "trueshard, own" else 1.0
        rows.append(Row(f"{label}: GiB read", ranks, counts, "the file", [size] * len(counts), limit))
    return rows


# ---- saving


@dataclass(frozen=True)
class Saved:
    """All saves on one rank, by way."""

    seconds: dict[str, list[float]]
    written: dict[str, int]
    """Bytes of all files of all ranks."""
    loads: dict[str, list[float]]
    """Seconds of loading what was saved again, where there is optimizer state."""


def measure_saves(folder: Path, names: Sequence[str], samples: int, state: bool) -> Saved:
    """Saves on this rank, the ways in turns.

    Args:
        folder: of folders; the last of ours and of DCP's stay there.
        names: of the ways.
        samples: of each.
        state: with AdamW and its momenta.
    """
    model, optimizer = prepare(folder, state)
    seconds: dict[str, list[float]] = {way: [] for way in names}
    loads: dict[str, list[float]] = {}
    written: dict[str, int] = {}
    kept = {"trueshard": folder / f"{ways.OURS}-{dist.get_world_size()}"}
    kept["torch DCP"] = folder / f"{ways.DCP}-{dist.get_world_size()}"
    for i in range(samples):
        for way in names[:: -1 if i % 2 else 1]:
            path = kept.get(way, folder / "other")
            _remove(path)
            seconds[way].append(clocked(partial(ways.SAVES[way], model, optimizer, path))[0].item())
            dist.barrier()  # others may still write
            written[way] = _size(path)
            dist.barrier()  # or remove it already
            if way not in kept:
                _remove(path)
    if optimizer is not None:
        for _ in range(samples):
            for way, again in ways.RELOADS.items():
                found = clocked(partial(again, model, optimizer, kept[way]))[0].item()
                loads.setdefault(way, []).append(found)
    return Saved(seconds, written, loads)


def prepare(folder: Path, state: bool) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """The sharded model with its weights; with ``state``, AdamW after one step."""
    import trueshard

    _quietly()
    model = ways.bare()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0) if state else None
    trueshard.shard(model, *([optimizer] if optimizer else []))
    ways.with_memory(model)
    trueshard.load(folder / ways.HUGGING_FACE, model=model)
    if optimizer is not None:
        for parameter in model.parameters():
            parameter.grad = parameter.detach()  # a gradient that costs no memory; the rate is 0
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _remove(path: Path) -> None:
    """Away with it, on all ranks; then the disk is quiet."""
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
        os.sync()
    dist.barrier()


def _size(path: Path) -> int:
    return sum(each.stat().st_size for each in path.rglob("*") if each.is_file())


def _slowest(runs: list[list[float]]) -> list[float]:
    return [max(each) for each in zip(*runs, strict=True)]


def _save_rows(label: str, ranks: int, saved: list[Saved]) -> list[Row]:
    seconds = {way: _slowest([each.seconds[way] for each in saved]) for way in saved[0].seconds}
    written = {way: size / GIB for way, size in saved[0].written.items()}
    rows = []
    for ours, words in (("trueshard", "verified"), ("trueshard, unverified", "not verified")):
        for peer in ("torch DCP", "Accelerate", "plain write"):
            if ours in seconds and peer in seconds:
                limit = None if peer == "plain write" else 1.0
                rows.append(Row(f"{label}, {words}, s", ranks, seconds[ours], peer, seconds[peer], limit))
    plain = [written["plain write"]]
    rows.append(Row(f"{label}: GiB written", ranks, [written["trueshard"]], "unique bytes", plain, 1.0))
    rows.append(Row(f"{label}: GiB written", ranks, [written["trueshard"]], "torch DCP", [written["torch DCP"]]))
    return rows


# ---- saving in the background


@dataclass(frozen=True)
class Stalled:
    """Saves in the background on one rank."""

    seconds: dict[str, list[float]]
    """Until the call returned, by way."""
    copies: dict[str, list[float]]
    """Of a copy: the mean of one before each of these and one after it."""
    first: float
    """Seconds of the first of the process."""
    extra: int
    """The most bytes resident over those before, in the first save."""
    shard: int
    """Bytes of the parameters that the rank holds."""


def measure_stalls(folder: Path, first: str) -> Stalled:
    """The first save in the background of this process by one way; of ours, more of all ways in turns."""
    import trueshard

    model, _ = prepare(folder, False)
    held = list(ways.locals_of(model))
    path = folder / "background"

    def ours() -> Callable[[], object]:
        saving: Any = trueshard.save(path, model=model, wait=False)
        end: Callable[[], object] = saving.wait
        return end

    def dcp() -> Callable[[], object]:
        import torch.distributed.checkpoint as dcp

        future: Any = dcp.async_save(ways.dcp_state(model, None), checkpoint_id=path)
        end: Callable[[], object] = future.result
        return end

    def copy() -> Callable[[], object]:
        copies = [each.clone() for each in held]
        return copies.clear

    kinds: dict[str, Callable[[], Callable[[], object]]] = {"trueshard": ours, "torch DCP": dcp, "a copy": copy}

    def stall(kind: str) -> float:
        _remove(path)
        end: list[Callable[[], object]] = []
        found = clocked(lambda: end.append(kinds[kind]()))[0].item()
        end[0]()
        return found

    kernel.forget_peak()
    before = kernel.resident()
    once = stall(first)
    extra = kernel.peak() - before
    seconds: dict[str, list[float]] = {"trueshard": [], "torch DCP": []}
    copies: dict[str, list[float]] = {"trueshard": [], "torch DCP": []}
    for i in range(STALLS if first == "trueshard" else 0):
        for kind in list(seconds)[:: -1 if i % 2 else 1]:
            around = stall("a copy")
            seconds[kind].append(stall(kind))
            copies[kind].append((around + stall("a copy")) / 2)
    _remove(path)
    return Stalled(seconds, copies, once, extra, sum(each.nbytes for each in held))


def _stall_rows(ranks: int, folder: Path) -> list[Row]:
    found = {way: on_ranks(measure_stalls, ranks, folder, way) for way in ("trueshard", "torch DCP")}
    ours = found["trueshard"]
    seconds = {kind: _slowest([each.seconds[kind] for each in ours]) for kind in ours[0].seconds}
    copies = _slowest([each.copies["trueshard"] for each in ours])
    label = "save in the background: s of stall"
    first = [[max(each.first for each in found[way])] for way in found]
    extra = [[max(each.extra for each in found[way]) / GIB] for way in found]
    shard = [max(each.shard for each in ours) / GIB]
    return [
        Row(label, ranks, seconds["trueshard"], "a copy", copies, STALL),
        Row(label, ranks, seconds["trueshard"], "torch DCP", seconds["torch DCP"], 1.0),
        Row(f"{label}, the first", ranks, first[0], "torch DCP", first[1], 1.0),
        Row("save in the background: extra memory, GiB", ranks, extra[0], "the shard", shard, 1.0),
        Row("save in the background: extra memory, GiB", ranks, extra[0], "torch DCP", extra[1], 1.0),
    ]


# ---- with optimizer state


def _with_state(ranks: int, folder: Path, tell: Tell) -> list[Row]:
    saved = on_ranks(measure_saves, ranks, folder, WITH_STATE, STATES, True)
    loads = {way: _slowest([each.loads[way] for each in saved]) for way in ways.RELOADS}
    rows = _save_rows("save with AdamW", ranks, saved)
    rows.append(Row("load with AdamW, s", ranks, loads["trueshard"], "torch DCP", loads["torch DCP"], 1.0))
    tell(f"with AdamW: {rows[0].cells()[2]} s")
    return rows


def _note() -> str:
    return (
        "Llama 3.2 1B in bfloat16 over gloo processes of one thread each. A load goes from nothing to a sharded model, "
        "in fresh processes, files in the page cache: TrueShard's into a model on the meta device, or into one that "
        "has memory, both sharded first. transformers: `from_pretrained` with `DistributedConfig(fsdp_size=…)`. "
        "Accelerate: `from_pretrained` and its FSDP2 preparation, with RAM-efficient loading, called directly: on CPUs "
        "its plugin runs DDP. torch DCP: what it saved, in which a tie is twice. transformers hands out the mapped "
        "file as weights, and so does TrueShard to a model on the meta device; hence three times: until the "
        "call returns, until a byte of each page has been read, until one has been written. Memory is the peak of what "
        "is resident, mapped files included. Bytes read are those of all ranks: returned by `read`, taken by TrueShard "
        "from files that it maps, and weights that lie in a map when it returns; an own checkpoint is also read for "
        "its checksums, once more. Saves end on the disk; the plain write is the same bytes by the same ranks, to a "
        "file each, with `fsync`. A stall is the time until `save(wait=False)` or `async_save` returns; a copy is a "
        "clone of the rank's parameters; extra memory is the peak of the first one over what was resident before. The "
        "slowest rank's time, the largest memory of a rank. "
        f"Medians of {LOADS} loads, {SAVES} saves and {STALLS} stalls ({STATES} with AdamW, its momenta in bfloat16), "
        "ways in turn, with the least and the largest ratio: too few for an interval, and a disk's noise is large."
    )
