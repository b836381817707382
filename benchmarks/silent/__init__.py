"""Bugs that raise nothing, written anew as small programs: ``python -m benchmarks silent`` tries to find them.

- ``frame``: what the programs share: processes, data, models, the loop, and the two lines that record a run.
- ``data_parallel``, ``megatron``, ``pipeline``, ``context``, ``between_runs``: the programs, a file for each family.
- Each runs by itself: ``torchrun --nproc-per-node 2 -m benchmarks.silent final_norm --bug``, and without ``--bug``. On
  one process, which is the reference: ``python -m benchmarks.silent final_norm``.
- ``trial`` holds the runs against each other.
"""

from benchmarks import machine
from benchmarks.table import Table, Tell


def run(tell: Tell, quick: bool = False) -> Table:
    """See ``benchmarks.silent.trial``, which is imported by whoever measures, not by each program."""
    from benchmarks.silent.trial import run as tried

    return tried(tell, quick)


def in_place(table: Table) -> str:
    """Return the part of docs/benchmarks.md that lies between the marks of this benchmark."""
    _, _, rest = table.markdown().partition("\n\n")
    return f"On {machine.describe()}:\n\n{rest}"
