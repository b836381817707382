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

import shutil
import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path

from benchmarks import checkpoint_ways as ways
from benchmarks.checkpoint_loads import Loaded, load, load_rows, most
from benchmarks.checkpoint_row import GIB, PEERS, Row, slowest
from benchmarks.checkpoint_saves import FIRSTS, STALLS, measure_saves, save_rows, stall_rows
from benchmarks.paired import few
from benchmarks.processes import on_ranks
from benchmarks.table import Table, Tell

RANKS = (2, 4)
LOADS, SAVES, STATES = 3, 4, 2
"""Samples: of a load, of a save, of a save with optimizer state. Removing what was saved takes longest."""
WITH_STATE = ("plain write", "trueshard", "torch DCP")
"""The ways of saving that are tried with optimizer state."""
FREE = 30 * 2**30
"""bytes of disk that it needs for a while"""


def run(tell: Tell, quick: bool = False) -> Table:
    """All of it, on every number of ranks; what it writes is removed. ``quick``: a small model, on two."""
    build = Path("build")
    build.mkdir(exist_ok=True)
    if not quick and shutil.disk_usage(build).free < FREE:
        raise RuntimeError(f"{build.absolute()} has less than {FREE / GIB:.0f} GiB free; make room there")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=build) as name:
        folder = Path(name)
        on_ranks(write_source, 1, folder, quick)
        for ranks in RANKS[: 1 if quick else None]:
            rows += _on(ranks, folder, tell, quick)
        rows += _with_state(RANKS[0], folder, tell, quick)
    return Table(
        name="checkpoint",
        title="Loading and saving 1.2 billion parameters",
        note=_note(),
        columns=("figure", "ranks", "TrueShard", "beside", "its own", "ratio", "range", "at most"),
        rows=tuple(row.cells() for row in rows),
        numbers=[asdict(row) for row in rows],
        over=[row.over() for row in rows if row.ranks == RANKS[0] and row.beside in PEERS],
    )


def _on(ranks: int, folder: Path, tell: Tell, quick: bool) -> list[Row]:
    saved = on_ranks(measure_saves, ranks, folder, tuple(ways.SAVES), few(SAVES, quick), False)
    rows = save_rows("save", ranks, saved)
    tell(f"saves on {ranks}: {rows[0].cells()[2]} s")
    by_way: dict[str, list[list[Loaded]]] = {way: [] for way in ways.LOADS}
    for i in range(few(LOADS, quick)):
        for way in list(ways.LOADS)[:: -1 if i % 2 else 1]:
            by_way[way].append(on_ranks(load, ranks, folder, way))
    rows += load_rows(ranks, by_way, folder)
    tell(f"loads on {ranks}: {statistics.median(most(by_way['trueshard, meta'], 'written')):.2f} s")
    rows += stall_rows(ranks, folder, quick)
    tell(f"stalls on {ranks}")
    for way in (ways.OURS, ways.DCP, ways.FABRIC):
        shutil.rmtree(folder / f"{way}-{ranks}")
    return rows


def write_source(folder: Path, small: bool) -> None:
    """The Hugging Face directory that is loaded from."""
    ways.quietly()
    ways.write_source(folder, small=small)


def _with_state(ranks: int, folder: Path, tell: Tell, quick: bool) -> list[Row]:
    saved = on_ranks(measure_saves, ranks, folder, WITH_STATE, few(STATES, quick), True)
    loads = {way: slowest([rank.loads[way] for rank in saved]) for way in ways.RELOADS}
    rows = save_rows("save with AdamW", ranks, saved)
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
        "file as weights, TrueShard a copy, which does not change with the file; hence three times: until the "
        "call returns, until a byte of each page has been read, until one has been written. Memory is the peak of what "
        "is resident, mapped files included. Bytes read are those of all ranks: returned by `read`, taken by TrueShard "
        "from files that it maps, and weights that lie in a map when it returns; an own checkpoint is also read for "
        "its checksums, once more. Saves end on the disk; the plain write is the same bytes by the same ranks, to a "
        "file each, with `fsync`. Lightning Fabric: `save` and `load` of its strategy for FSDP2. "
        "A stall is the time until `save(wait=False)` or `async_save` returns; a copy is a "
        "clone of the rank's parameters; extra memory is the peak of the first one over what was resident before. The "
        "slowest rank's time, the largest memory of a rank. "
        f"Medians of {LOADS} loads, {SAVES} saves and {STALLS} stalls ({STATES} with AdamW, its momenta in "
        f"bfloat16; {FIRSTS} first stalls), "
        "ways in turn, with the least and the largest ratio: too few for an interval, and a disk's noise is large."
    )
