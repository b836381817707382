"""Saves of ``benchmarks.checkpoint``, in the foreground and in the background, and their rows."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import checkpoint_ways as ways
from benchmarks import kernel
from benchmarks.checkpoint_row import GIB, PEERS, Row, slowest
from benchmarks.paired import clocked, few
from benchmarks.processes import on_ranks

STALLS, FIRSTS = 4, 3
"""Samples: of a stall, and of the first one of a process."""
STALL = 1.2
"""The longest stall of a save in the background, over the time to copy what a rank holds."""


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
    kept["Lightning Fabric"] = folder / f"{ways.FABRIC}-{dist.get_world_size()}"
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
                taken = clocked(partial(again, model, optimizer, kept[way]))[0].item()
                loads.setdefault(way, []).append(taken)
    return Saved(seconds, written, loads)


def prepare(folder: Path, state: bool) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """The sharded model with its weights; with ``state``, AdamW after one step."""
    import trueshard

    ways.quietly()
    model = ways.bare(folder)
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
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def save_rows(label: str, ranks: int, saved: list[Saved]) -> list[Row]:
    """Ours, verified and not, beside each peer and the bare disk, from what each rank measured."""
    seconds = {way: slowest([rank.seconds[way] for rank in saved]) for way in saved[0].seconds}
    written = {way: size / GIB for way, size in saved[0].written.items()}
    rows = []
    for ours, words in (("trueshard", "verified"), ("trueshard, unverified", "not verified")):
        for peer in (*PEERS, "plain write"):
            if ours in seconds and peer in seconds:
                limit = None if peer == "plain write" else 1.0
                rows.append(Row(f"{label}, {words}, s", ranks, seconds[ours], peer, seconds[peer], limit))
    plain = [written["plain write"]]
    rows.append(Row(f"{label}: GiB written", ranks, [written["trueshard"]], "unique bytes", plain, 1.0))
    rows.append(Row(f"{label}: GiB written", ranks, [written["trueshard"]], "torch DCP", [written["torch DCP"]]))
    return rows


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


def measure_stalls(folder: Path, first: str, more: int) -> Stalled:
    """The first save in the background of this process by one way; then ``more`` of each way in turns."""
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
        copies = [tensor.clone() for tensor in held]
        return copies.clear

    kinds: dict[str, Callable[[], Callable[[], object]]] = {"trueshard": ours, "torch DCP": dcp, "a copy": copy}

    def stall(kind: str) -> float:
        _remove(path)
        end: list[Callable[[], object]] = []
        taken = clocked(lambda: end.append(kinds[kind]()))[0].item()
        end[0]()
        return taken

    kernel.forget_peak()
    before = kernel.resident()
    once = stall(first)
    extra = kernel.peak() - before
    seconds: dict[str, list[float]] = {"trueshard": [], "torch DCP": []}
    copies: dict[str, list[float]] = {"trueshard": [], "torch DCP": []}
    for i in range(more):
        for kind in list(seconds)[:: -1 if i % 2 else 1]:
            around = stall("a copy")
            seconds[kind].append(stall(kind))
            copies[kind].append((around + stall("a copy")) / 2)
    _remove(path)
    return Stalled(seconds, copies, once, extra, sum(tensor.nbytes for tensor in held))


def stall_rows(ranks: int, folder: Path, quick: bool) -> list[Row]:
    """How long a save in the background stops training, and the memory that it takes."""
    by_library: dict[str, list[list[Stalled]]] = {"trueshard": [], "torch DCP": []}
    for i in range(few(FIRSTS, quick)):
        for way in list(by_library)[:: -1 if i % 2 else 1]:
            more = few(STALLS, quick) if way == "trueshard" and i == 0 else 0
            by_library[way].append(on_ranks(measure_stalls, ranks, folder, way, more))
    ours = by_library["trueshard"][0]
    seconds = {kind: slowest([rank.seconds[kind] for rank in ours]) for kind in ours[0].seconds}
    copies = slowest([rank.copies["trueshard"] for rank in ours])
    label = "save in the background: s of stall"
    first = [[max(rank.first for rank in run) for run in runs] for runs in by_library.values()]
    extra = [[max(rank.extra for rank in run) / GIB for run in runs] for runs in by_library.values()]
    shard = [max(rank.shard for rank in ours) / GIB]
    return [
        Row(label, ranks, seconds["trueshard"], "a copy", copies, STALL),
        Row(label, ranks, seconds["trueshard"], "torch DCP", seconds["torch DCP"], 1.0),
        Row(f"{label}, the first", ranks, first[0], "torch DCP", first[1], 1.0),
        Row("save in the background: extra memory, GiB", ranks, extra[0], "the shard", shard * len(extra[0]), 1.0),
        Row("save in the background: extra memory, GiB", ranks, extra[0], "torch DCP", extra[1], 1.0),
    ]
