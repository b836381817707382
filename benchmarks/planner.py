"""The seconds and the memory that `trueshard plan` takes to choose a plan, from the start of Python to its end.

Resharding, recomputation, replicas and offload are free, in one case microbatch and accumulation, too. Each is a fresh
process with the two cores that it uses at most. No weights, no GPU.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.table import Table, Tell

_LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "num_key_value_heads": 8}
_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
_70B = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
_405B = {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128}
CASES: tuple[tuple[str, dict[str, Any], int, int | None], ...] = (
    ("Llama 3 8B", _8B, 8, None),
    ("Llama 3 8B", _8B, 64, 512),
    ("Llama 3 70B", _70B, 64, None),
    ("Llama 3 70B", _70B, 512, None),
    ("Llama 3 405B", _405B, 4096, None),
)
"""Model, its sizes, ranks, and the samples of all ranks in a step; None: one a rank"""

LIMIT = 10.0
"""Seconds"""


def run(tell: Tell, quick: bool = False) -> Table:
    """Each case once, in a process of its own; ``quick``: the first, of two blocks."""
    rows, numbers = [], []
    for name, sizes, ranks, batch in CASES[: 1 if quick else None]:
        found = _chosen({**sizes, "num_hidden_layers": 2} if quick else sizes, ranks, batch)
        rows.append(
            (
                name,
                f"{ranks:,}",
                "" if batch is None else f"{batch:,}",
                f"{found['seconds']:.1f}",
                f"{LIMIT:.0f}",
                f"{found['cpu']:.1f}",
                f"{found['plans']}",
                f"{found['gib']:.2f}",
                f"{found['tokens']:,.0f}",
                f"{found['reserved']:.1f}",
            )
        )
        numbers.append({"model": name, "ranks": ranks, "global_batch": batch, "limit": LIMIT, **found})
        tell(f"{name} on {ranks}: {found['seconds']:.1f} s, {found['plans']} plans")
    return Table(
        name="planner",
        title="Seconds and memory of choosing a plan",
        note=(
            "`trueshard plan` of a configuration for H100s with everything left to it, sequence 4,096. `plans` is how "
            "many were studied exactly; memory is that of the largest process. The last two columns are the forecast."
        ),
        columns=(
            "model",
            "ranks",
            "global batch",
            "seconds",
            "limit",
            "CPU seconds",
            "plans",
            "memory, GiB",
            "tokens/s a rank",
            "reserved, GiB",
        ),
        rows=tuple(rows),
        numbers=numbers,
    )


def _chosen(sizes: dict[str, Any], ranks: int, batch: int | None) -> dict[str, float]:
    """Return what the command took, and what it chose."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**_LLAMA, **sizes}), encoding="utf-8")
        command = [sys.executable, "-m", "trueshard", "plan", folder, "--hardware", "h100", "--ranks", str(ranks)]
        command += ["--sequence", "4096", "--json"] + ([] if batch is None else ["--global-batch", str(batch)])
        begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    seconds, used = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "seconds": seconds,
        "cpu": used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime,
        "gib": used.ru_maxrss / 2**20,
        "plans": 1 + len(found["alternatives"]),
        "tokens": found["tokens_per_second_per_rank"],
        "reserved": found["peak_reserved_bytes"] / 2**30,
    }
