"""The page of results: how many tests pass with which system, and why some fail with TrueShard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from benchmarks.suites.explained import explanation
from benchmarks.suites.selection import SUITES

_HEAD = """\
# Their own tests

Tests that transformers, Accelerate and Lightning keep of their own trainers, about training, accumulation, resuming,
evaluation, saving and best models, run as they are with TrueShard in the place of what they shard with.

```bash
make peers                     # clones their sources at the installed versions
make peers PEERS_SOURCES=dir   # or takes dir/transformers, dir/accelerate, dir/lightning
```

writes this page. A plugin of pytest (`benchmarks/suites`) changes what their trainer makes before their tests are
imported, and no file of theirs. A test is counted if it passes on **one** process here, offline and without a GPU; it
then runs on two processes (gloo), and passes if it passes on both; Accelerate's scripts are written for two, and what
passes with DDP is counted. Folders and random numbers are the same on both, and `wait_for_everyone` follows each
`save_model` and `save_state` of Accelerate, as in a script.

Many of these tests expect one process (files that are there once this process has saved, `model.a` of a wrapped model,
counts of steps), so plain DDP is what to compare with. It is a selection, which `benchmarks/suites/selection.py` names:
tests of `torch.compile`, of transformers' checkpoints on a signal and of its greedy schedule are left out, and so are
TRL's, whose models and data come from the hub.
"""


def page(results: Mapping[str, Any]) -> str:
    """Return the page.

    Args:
        results: by suite, ``versions`` (installed, of the tests) and, by system, what ``running.run`` returned.
    """
    rows, failures = [], []
    for suite in SUITES:
        if suite.name not in results:
            continue
        by_way = results[suite.name]
        base = by_way[suite.base]
        counted = [name for name, result in base.items() if result["outcome"] == "passed"]
        cells = [_count(by_way.get(system), counted) for system in ("ddp", "fsdp2", "ours")]
        installed, tests = by_way["versions"]
        left = len(base) - len(counted)
        rows.append(f"| {suite.name} {installed} | {tests} | {left} | {len(counted)} | {' | '.join(cells)} |")
        failures += _failures(by_way, counted)
    table = [
        "| | tests of | do not run here | counted | DDP | their FSDP2 | TrueShard |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    lines = [_HEAD, *table, *rows, "", _TAIL, "| test | DDP | their FSDP2 | why |", "|---|---|---|---|", *failures]
    return "\n".join(lines) + "\n"


_TAIL = """\
What does not run here is skipped by the test itself (a GPU, another package) or needs the hub. Lightning's FSDP2 is its
`ModelParallelStrategy`, with `fully_shard` of each child in `configure_model`. Accelerate's plugin runs DDP on CPUs, so
it is told that they are another device. Most of transformers' tests train toy models of two numbers: its wrapping by
transformer blocks asks them for `get_input_embeddings`, and some have parameters without a dimension, which FSDP2
refuses. For a check by Lightning that no thread is left, TrueShard's daemon that watches for stalls is hidden.

## What fails with TrueShard

Where DDP fails, too, the reason is read from the error's message and was not traced; DDP may fail for another one.

"""


def _count(results: Any, counted: list[str]) -> str:
    if results is None:
        return "not run"
    return str(sum(results[name]["outcome"] == "passed" for name in counted))


def _failures(by_way: Mapping[str, Any], counted: list[str]) -> list[str]:
    rows: Counter[tuple[str, ...]] = Counter()  # cases of a test that fail alike are one
    for name in counted:
        result = by_way["ours"][name]
        if result["outcome"] != "passed":
            others = [by_way[system][name]["outcome"] if system in by_way else "" for system in ("ddp", "fsdp2")]
            test = name.rpartition("/")[2].partition("[")[0].removeprefix("::")
            rows[(test, *others, explanation(name, result["message"]))] += 1
    return [
        f"| `{test}`{f' (×{count})' if count > 1 else ''} | {' | '.join(cells)} |"
        for (test, *cells), count in rows.items()
    ]
