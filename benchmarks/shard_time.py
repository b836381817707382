"""The seconds that ``shard()`` takes on an 8B-shaped model, beside ``fully_shard``'s own.

- The model is Llama 3.1 8B on the meta device: its shapes without its memory. One process stands for rank 0 of 64.
- Each time is the first call in a fresh process, as in a user's run. The modules that either needs are imported before.
- ``shard()`` also takes an optimizer, which the hand-written version does not: its time counts.
"""

from __future__ import annotations

import statistics
import time

import torch

from benchmarks.llama import Shape, shard_by_hand
from benchmarks.paired import few
from benchmarks.processes import on_simulated_ranks
from benchmarks.table import Table, Tell

RANKS = (1, 64)
RUNS = 5
LIMIT = 2.0
"""seconds that ``shard()`` may add"""

_8B = Shape(layers=32, hidden=4096, intermediate=14336, heads=32, key_value_heads=8, vocabulary=128256)


def run(tell: Tell, quick: bool = False) -> Table:
    """Both ways on every number of ranks, alternating."""
    rows, numbers = [], []
    for ranks in RANKS:
        hand, ours = [], []
        for _ in range(few(RUNS, quick)):
            hand.append(on_simulated_ranks(seconds_by_hand, ranks, ranks))
            ours.append(on_simulated_ranks(seconds_of_shard, ranks))
        added = [b - a for a, b in zip(hand, ours, strict=True)]
        rows.append(
            (
                str(ranks),
                f"{statistics.median(hand):.2f}",
                f"{statistics.median(ours):.2f}",
                f"{statistics.median(added):.2f}",
                f"{min(added):.2f} to {max(added):.2f}",
                f"{LIMIT:.2f}",
            )
        )
        numbers.append({"ranks": ranks, "by_hand": hand, "shard": ours, "added": added, "limit": LIMIT})
        tell(f"on {ranks}: {rows[-1][3]} s")
    return Table(
        name="shard_time",
        title="Seconds that `shard()` adds to `fully_shard`",
        note=(
            "Llama 3.1 8B's shapes on the meta device, with AdamW; one process is rank 0 of a simulated group. Medians "
            f"of {RUNS} fresh processes each. On the meta device there are no values: comparing those of real "
            "parameters between ranks comes on top, and takes time in proportion to their bytes."
        ),
        columns=("ranks", "fully_shard, s", "shard(), s", "added, s", "range of added, s", "limit, s"),
        rows=tuple(rows),
        numbers=numbers,
    )


def _model() -> torch.nn.Module:
    with torch.device("meta"):
        return _8B.build()


def seconds_by_hand(ranks: int) -> float:
    """``fully_shard`` on each block and the root."""
    model = _model()
    began = time.perf_counter()
    shard_by_hand(model, ranks)
    return time.perf_counter() - began


def seconds_of_shard() -> float:
    """``trueshard.shard`` of the model and an optimizer."""
    from trueshard import shard

    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    began = time.perf_counter()
    shard(model, optimizer)
    return time.perf_counter() - began
