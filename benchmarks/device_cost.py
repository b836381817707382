"""What a step costs on a CUDA device beside ``fully_shard`` by hand: waits of the host, and operations. Counted.

- Nothing is timed: the device is the emulated one of the tests (``docs/emulated-cuda.md``), which knows where the host
  waits and what it launches. Both are the same on a GPU.
- A wait costs what the host launches afterwards: the device has nothing to do until then. An operation costs the host
  some 5 µs.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.table import Table, Tell

ROOT = Path(__file__).parents[1]
RANKS = 2


def run(tell: Tell, quick: bool = False) -> Table:
    """Every case, on two emulated devices."""
    counts = counted(["AdamW, fused", "Trainer"] if quick else [])
    rows = [(label, *_cells(ours), *_cells(hand)) for label, (ours, hand) in counts.items()]
    for row in rows:
        tell(f"{row[0]}: {row[1]} waits, {row[2]} operations")
    return Table(
        name="device_cost",
        title="What a step costs on a CUDA device",
        note=(
            "Waits of the host for the device, and operations that it launches (kernels, copies, collectives; a "
            f"foreach counts as one), in one step of rank 0 of {RANKS}, once nothing is new: counted on the emulated "
            "device, not timed. A Llama of 4 blocks with 39 parameters, AdamW and clipping where nothing else is said; "
            "`experts`: a Qwen3-MoE of 2 blocks. transformers itself waits once in each forward. By hand: "
            "`fully_shard` on each block and the root, torch's own clipping and accumulation, GradScaler, "
            "`parallelize_module`, CPUOffloadPolicy; Muon gathers each update; of `exact`, the same without it, "
            "where each gradient of each microbatch takes four kernels more (three round it to the grid, one finds its "
            "largest element), 312 in all, a copy to float64, and the norm adds its squares on two grids; of "
            "`experts`, rows exchanged by `all_to_all_single`, which takes their numbers from the host, while the "
            "router on the device decides them: so both wait once a layer; generation is `generate()` of a whole "
            "model; saving copies shard after shard to the host. The trainer takes two microbatches, and reads loss "
            "and norm; so does the loop by hand. Of a generation, what one more token costs. `Muon, exact` and "
            "`Adafactor` wait once more than by hand: their owners keep whole values, and what travels in a step "
            "follows from whether a rank wrote to its shard. Its bits alone show that: torch counts no writes through "
            "`parameter.data`, or by kernels of others. To be without the wait, values would travel in every step "
            "(half as much again), or such a write would count from the next step on, when the owner has stepped from "
            "other values and nothing can undo it. The gradients of the first batch are on their way meanwhile. An "
            "error in a cell is torch's own."
        ),
        columns=("step", "waits", "operations", "waits by hand", "operations by hand"),
        rows=tuple(rows),
        numbers=[{"step": label, "ours": ours, "by hand": hand} for label, (ours, hand) in counts.items()],
    )


def in_place(table: Table) -> str:
    """Return the part of docs/benchmarks.md that lies between the marks of this benchmark: counts, of any machine."""
    return table.markdown().partition("\n\n")[2]


def counted(labels: Sequence[str]) -> dict[str, list[dict[str, Any] | None]]:
    """Return label → [count by TrueShard, by hand or None] of some cases, or of all; raise RuntimeError if it fails."""
    sys.path.append(str(ROOT / "tests"))
    from emulated_cuda.running import run as run_emulated

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "counts.json"
        program = ["-m", "benchmarks.device_cost_cases", str(file), *labels]
        done = run_emulated(program, devices=RANKS, processes=RANKS, cwd=ROOT)
        if done.code or done.faults:
            raise RuntimeError("\n".join([done.output[-4000:], *done.faults]))
        result: dict[str, list[dict[str, Any] | None]] = json.loads(file.read_text(encoding="utf-8"))
    return result


def _cells(count: dict[str, Any] | None) -> tuple[str, str]:
    if count is None:
        return "—", "—"
    return (count["failed"], "") if count["failed"] else (str(count["waits"]), f"{count['operations']:,}")
