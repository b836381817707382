"""Writes ``docs/optimizers.md``: how every optimizer of the catalogue steps when sharded, and how far from one device.

python tests/optimizer_table.py                 # all of them; nothing is written if one is wrong
python tests/optimizer_table.py Muon SOAP Lion  # these alone, printed
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from optimizer_catalogue import LIBRARIES, entries
from optimizer_trial import Sweep
from parity import Pool

PAGE = Path(__file__).resolve().parent.parent / "docs" / "optimizers.md"
SIZES = (2, 3)

INTRODUCTION = """\
# Every optimizer, sharded

Written by `make tables`, from runs that `tests/test_every_optimizer.py` asserts on, at three ranks for one of each
kind: each optimizer trains a tiny model on one process without TrueShard, and on two and three with it. The model has
parameters of 0 to 4 dimensions that divide by neither number of ranks, two groups of different learning rate and weight
decay, gradient clipping, and a branch whose parameters get a gradient in every other step only. A name with options is
the class with these options; without, with its defaults (what happens every so many steps is set to happen within the
run).

| outcome | means |
|---|---|
| on shards | an element's update depends on its own row alone: each rank steps its shards, as plain tensors |
| by owner | it depends on the whole parameter: gradients travel to the rank that owns it, the result travels back |
| on shards and by owner | some groups one way, some the other |
| refused | `shard()` raises a `ValueError` that names the class and gives this reason; most of those that draw random \
numbers are taken with [`exact`](how-to/exact.md) |
| does not run on one device | the class raises this error by itself, on the CPU and without TrueShard |

The figures are the largest difference of any parameter from one process, over the largest change of that parameter.
"""

QUANTIZED = """\
The classes of `torchao.optim` keep their state in 8 or 4 bits, by blocks of 256 or 128 elements that share a scale. A
shard that holds whole blocks has the blocks of the whole; any other the library keeps in full precision, and so nearer
to AdamW than one process is. The figures of these classes are the root mean square of the difference from one process,
over that of one process from the same optimizer in full precision: near 1, sharding costs what quantization costs.
"""


def outcome(one: dict[str, Any], many: dict[str, Any]) -> str:
    """The word or the sentence for the second column."""
    if "error" in one:
        return f"does not run on one device: {one['error']}"
    if "refused" in many:
        return f"refused: {reason(many['refused'])}"
    return str(many["way"])


def reason(refusal: str) -> str:
    """The middle of "Class cannot step on sharded parameters: reason; remedy"."""
    return refusal.partition(": ")[2].rpartition("; ")[0]


def escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def table(sweep: Sweep, library: str, names: list[str]) -> list[str]:
    """The rows of `library`, as Markdown."""
    lines = [f"| `{library}` | outcome | 2 ranks | 3 ranks |", "|---|---|---|---|"]
    for name in names:
        one = sweep.results(1, library, names)[name]
        many = sweep.results(SIZES[0], library, names)[name]
        figures = [sweep.compared(count, library, name, names) for count in SIZES]
        cells = [f"{each.difference:.0e}" if each.outcome in ("equal", "different") else "" for each in figures]
        lines.append(f"| `{name}` | {escaped(outcome(one, many))} | {' | '.join(cells)} |")
    return lines


def wrong(sweep: Sweep, library: str, names: list[str]) -> list[str]:
    """What is neither equal nor refused."""
    found = []
    for name in names:
        for count in SIZES:
            compared = sweep.compared(count, library, name, names)
            if compared.outcome in ("different", "failed"):
                found.append(f"{library} {name} on {count} ranks: {compared.outcome}: {compared.words}")
    return found


def committed() -> dict[str, dict[str, str]]:
    """Library → name → outcome, as the page says."""
    found: dict[str, dict[str, str]] = {}
    library = ""
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.replace("\\|", "\0").strip("|").split("|")]
        if len(cells) > 1 and cells[0].strip("`") in LIBRARIES:
            library = cells[0].strip("`")
            found[library] = {}
        elif library and len(cells) > 1 and cells[0].startswith("`"):
            found[library][cells[0].strip("`")] = cells[1].replace("\0", "\\|")
    return found


def main() -> None:
    sweep = Sweep(Pool())
    chosen = sys.argv[1:]
    parts, failures = [INTRODUCTION], []
    for library in LIBRARIES:
        names = [name for name in entries(library) if not chosen or name in chosen or name.partition("(")[0] in chosen]
        if names:
            parts += [QUANTIZED] if library == "torchao.optim" else []
            parts.append("\n".join(table(sweep, library, names)) + "\n")
            failures += wrong(sweep, library, names)
    sweep.pool.close()
    if chosen:
        print("\n".join(parts[1:]))
    elif not failures:
        PAGE.write_text("\n".join(parts))
    for each in failures:
        lines = each.splitlines()
        print(each if chosen or len(lines) == 1 else f"{lines[0]} … {lines[-1]}")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
