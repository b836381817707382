"""`trueshard plot`: the curves of runs, as a picture and as a page."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from trueshard.errors import UserError
from trueshard.train.showing.page import page
from trueshard.train.showing.picture import picture
from trueshard.train.showing.runs import Run, read_runs

FORMS: dict[str, Callable[[Sequence[Run]], bytes]] = {".png": picture, ".html": lambda runs: page(runs).encode()}


def plot(runs: Sequence[Path], out: Path | None = None) -> list[Path]:
    """Draw loss, evaluation, gradient norm, learning rate, tokens/s and memory of runs; returns the files made.

    Args:
        runs: folders of runs, or their `metrics.jsonl`.
        out: a `.png` or a `.html` file, replaced when the new one is complete. None: `curves.png` and `curves.html`,
            in the folder of the run where it is one, in the current one where there are several.

    Raises:
        UserError: no such run, one without steps, a damaged file, or an `out` that cannot be written.
    """
    if out is not None and out.suffix.lower() not in FORMS:
        raise UserError(f"--out {out}: its name must end in {' or '.join(FORMS)}")
    found = read_runs(runs)
    if out is not None:
        targets = [out.expanduser()]
    else:
        first = runs[0].expanduser()
        folder = Path() if len(runs) > 1 else first if first.is_dir() else first.parent
        targets = [folder / f"curves{suffix}" for suffix in FORMS]
    for target in targets:
        if not target.absolute().parent.is_dir() or not os.access(target.absolute().parent, os.W_OK):
            raise UserError(f"--out {target}: there is no folder {target.absolute().parent} that can be written to")
    for target in targets:
        made = FORMS[target.suffix.lower()](found)
        scratch = target.with_name(f".{target.name}.new")
        scratch.write_bytes(made)
        scratch.replace(target)
    return targets
