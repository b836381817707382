"""The seconds and the memory that a forecast takes: from a transformers configuration to memory, traffic and step time.

Each is one fresh process, as of a user's command; imports are counted apart. No weights, no GPU, one core.
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
CASES: tuple[tuple[str, dict[str, Any], int, float], ...] = (
    (
        "Llama 3.1 8B",
        {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
        8,
        10.0,
    ),
    (
        "Llama 3.1 70B",
        {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
        512,
        30.0,
    ),
    (
        "Llama 3.1 405B",
        {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128},
        4096,
        30.0,
    ),
)
MEMORY = 4.0
"""GiB, the limit of the process"""


def run(tell: Tell, quick: bool = False) -> Table:
    """Each case once, in a process of its own; ``quick``: the first, of two blocks."""
    rows, numbers = [], []
    for name, sizes, ranks, limit in CASES[: 1 if quick else None]:
        if quick:
            sizes = {**sizes, "num_hidden_layers": 2}
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps({**_LLAMA, **sizes}), encoding="utf-8")
            command = [sys.executable, "-m", "benchmarks.planner", folder, str(ranks)]
            found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        rows.append(
            (
                name,
                str(ranks),
                f"{found['imports']:.1f}",
                f"{found['seconds']:.1f}",
                f"{limit:.0f}",
                f"{found['gib']:.2f}",
                f"{MEMORY:.0f}",
                f"{found['reserved'] / 2**30:.1f}",
            )
        )
        numbers.append({"model": name, "ranks": ranks, "limit": limit, **found})
        tell(f"{name} on {ranks}: {found['seconds']:.1f} s, {found['gib']:.2f} GiB")
    return Table(
        name="planner",
        title="Seconds and memory of a forecast",
        note=(
            "`trueshard plan` of a configuration for H100s, sequence 8,192, one sample a rank, bfloat16, selective "
            "recomputation. One process on one core; the last column is the forecast's reserved memory of a rank."
        ),
        columns=(
            "model",
            "ranks",
            "imports, s",
            "forecast, s",
            "limit, s",
            "memory, GiB",
            "limit, GiB",
            "reserved, GiB",
        ),
        rows=tuple(rows),
        numbers=numbers,
    )


def _forecast(folder: str, ranks: int) -> dict[str, float]:
    start = time.perf_counter()
    from trueshard.planner.planning import Request
    from trueshard.planner.solve import solve

    imported = time.perf_counter()
    request = Request(
        model=folder,
        ranks=ranks,
        sequence=8192,
        mixed_precision="bf16",
        reshard_after_forward="default",
        activation_checkpointing="selective",
    )
    study = solve(request)
    return {
        "imports": imported - start,
        "seconds": time.perf_counter() - imported,
        "gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "reserved": study.forecast.peak_reserved_bytes,
    }


if __name__ == "__main__":
    print(json.dumps(_forecast(sys.argv[1], int(sys.argv[2]))))
