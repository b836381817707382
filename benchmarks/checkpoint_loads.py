"""Loads of ``benchmarks.checkpoint``: one on this rank, and the rows of all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from benchmarks import checkpoint_ways as ways
from benchmarks import kernel
from benchmarks.checkpoint_row import GIB, Row
from benchmarks.paired import clocked

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
    ("load, own checkpoint", "trueshard, own", "Lightning Fabric", ("written",)),
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
    ways.quietly()
    model: list[nn.Module] = []
    taken = ways.count_reads()
    before, count = kernel.resident(), kernel.bytes_read()
    returned = clocked(lambda: model.append(ways.LOADS[way](folder)))[0].item()
    count = kernel.bytes_read() - count + sum(taken) + _in_maps(model[0], folder)
    digest: list[int] = []
    read = clocked(lambda: digest.append(_touch(model[0], lambda tensor: int(tensor.sum()))))[0].item()
    written = clocked(lambda: _touch(model[0], lambda tensor: int(tensor.add_(0).numel())))[0].item()
    return Loaded(returned, returned + read, returned + read + written, before, kernel.peak(), count, digest[0])


def _in_maps(model: nn.Module, folder: Path) -> int:
    """Bytes of weights that are to be read yet, where they are mapped; and what has been touched of these maps."""
    maps = kernel.mapped(folder)
    places = [(local.data_ptr(), local.nbytes) for local in ways.locals_of(model)]
    waiting = sum(size for at, size in places if any(begin <= at < end for begin, end, _ in maps))
    return waiting + sum(touched for _, _, touched in maps)


def _touch(model: nn.Module, what: Callable[[torch.Tensor], int]) -> int:
    return sum(what(ways.pages(local)) for local in ways.locals_of(model))


def most(runs: list[list[Loaded]], field: str) -> list[float]:
    """Of each run, that of the rank that has most."""
    return [max(float(getattr(rank, field)) for rank in run) for run in runs]


def load_rows(ranks: int, by_way: dict[str, list[list[Loaded]]], folder: Path) -> list[Row]:
    """Rows of ``COMPARED``, from way → runs → ranks; all ways have to have loaded the same."""
    for rank in range(ranks):
        digests = {way: {run[rank].digest for run in runs} for way, runs in by_way.items()}
        if len(set().union(*digests.values())) > 1:
            raise RuntimeError(f"rank {rank} did not load the same weights by all ways: {digests}")

    rows: list[Row] = []
    for label, ours, peer, fields in COMPARED:
        for field in fields:
            figure = f"{label}: s until it {CLOCKS[field]}"
            rows.append(Row(figure, ranks, most(by_way[ours], field), peer, most(by_way[peer], field), 1.0))
        peaks = [[peak / GIB for peak in most(by_way[way], "peak")] for way in (ours, peer)]
        rows.append(Row(f"{label}: peak memory of a rank, GiB", ranks, peaks[0], peer, peaks[1], 1.0))
    size = sum(file.stat().st_size for file in (folder / ways.HUGGING_FACE).glob("*.safetensors")) / GIB
    for label, ours in {label: ours for label, ours, _, _ in COMPARED}.items():
        counts = [sum(rank.bytes_read for rank in run) / GIB for run in by_way[ours]]
        limit = None if ours == "trueshard, own" else 1.0
        rows.append(Row(f"{label}: GiB read", ranks, counts, "the file", [size] * len(counts), limit))
    return rows
