"""Runs a function on N fresh processes that have their imports behind them: forks of one that did nothing else.

Fresh, as those of ``benchmarks.processes``: nothing was called before, and what they use of memory is counted anew.
But importing transformers takes longer than what is measured after it, and once is enough.
"""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

from benchmarks.processes import _work


def preload(modules: Sequence[str]) -> None:
    """What the processes will have imported; to be called before the first of them is started."""
    multiprocessing.set_forkserver_preload(list(modules))


def on_ranks(function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """As ``benchmarks.processes.on_ranks``."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_work, (Path(folder), ranks, ranks, function, args), nprocs=ranks, start_method="forkserver")
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(ranks)]
