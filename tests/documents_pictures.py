"""Writes the pictures of the documents, docs/pictures/*.svg: `make tables`. The house is drawn from the floors."""

from __future__ import annotations

from pathlib import Path

from architecture_floors import FLOORS
from documents_drawing import Drawing

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
RANKS = ("here", "other", "third", "fourth")


def house() -> Drawing:
    """The floors of the package, from the top down."""
    height = 34
    drawing = Drawing(860, height * len(FLOORS) + 30, "The floors of the package; a file imports from floors below it")
    for row, names in enumerate(FLOORS):
        width = 800 / len(names)
        for column, name in enumerate(names):
            x, y = 50 + column * width, 10 + row * height
            drawing.box(x + 2, y + 2, width - 4, height - 4, "here" if name in PACKAGES else "plain")
            drawing.words(x + width / 2, y + height / 2 + 5, name, "middle", "code")
    drawing.arrow(25, 20, 25, height * len(FLOORS) + 4)
    drawing.words(50, height * len(FLOORS) + 26, "imports run downwards; blue: a folder", kind="faint")
    return drawing


PACKAGES = {path.name for path in (Path(__file__).parents[1] / "src" / "trueshard").iterdir() if path.is_dir()}


def units() -> Drawing:
    """A model as units; the shards of one of them, gathered and freed."""
    drawing = Drawing(
        760, 300, "A model's blocks are units; each rank keeps a slice of each, and gathers one at a time"
    )
    names = ("(root) embed, head", "layers.0", "layers.1", "layers.2")
    drawing.words(10, 22, "the model, cut into units")
    for row, name in enumerate(names):
        inset = 14 if row else 0
        drawing.box(10 + inset, 34 + row * 44, 210 - inset, 36, "plain")
        drawing.words(24 + inset, 57 + row * 44, name, kind="code")
    drawing.words(290, 22, "at rest: a slice of each")
    for row in range(4):
        for rank, kind in enumerate(RANKS):
            drawing.box(290 + rank * 52, 34 + row * 44, 44, 36, kind, f"{rank}" if row == 0 else "")
    drawing.words(560, 22, "rank 0, in layers.1")
    for row in range(4):
        for rank, kind in enumerate(RANKS):
            if row in (0, 2) or rank == 0:
                drawing.box(560 + rank * 46, 34 + row * 44, 46 if row in (0, 2) else 44, 36, kind)
    drawing.arrow(502, 140, 552, 140)
    drawing.words(
        290, 238, "All-gather before a unit runs: every rank has the whole of it and of the root.", kind="faint"
    )
    drawing.words(290, 258, "After it, what is not its own is freed. In backward it is gathered again,", kind="faint")
    drawing.words(290, 278, "and reduce-scatter gives each rank its slice of the gradient.", kind="faint")
    return drawing


def resharding() -> Drawing:
    """Which units are gathered when, under three policies."""
    blocks, kept = 4, {"always": set[int](), "default": {0, 4}, "never": {0, 1, 2, 3, 4}}
    drawing = Drawing(760, 470, "Which units are held gathered over forward and backward, by policy")
    left, column = 150, 70
    drawing.words(left + column * 2, 20, "forward", "middle")
    drawing.words(left + column * 6, 20, "backward", "middle")
    for number, (policy, whole) in enumerate(kept.items()):
        top = 36 + number * 142
        drawing.words(10, top + 14, policy, kind="code")
        for unit in range(blocks + 1):
            y = top + unit * 24
            drawing.words(left - 10, y + 15, "(root)" if unit == 0 else f"layers.{unit - 1}", "end", "faint")
            begin, end = (0, 8) if unit == 0 else (unit - 1, 9 - unit)
            length = 4 if unit == 0 else 1
            runs = [(begin, end)] if unit in whole else [(begin, begin + length - 0.05), (end - length + 0.05, end)]
            for first, last in runs:
                drawing.box(left + first * column, y, (last - first) * column, 19, "here" if unit else "third")
        drawing.line(left + 4 * column, top - 4, left + 4 * column, top + 122)
    drawing.words(10, 464, "A bar: the unit is whole in memory. Where a bar begins, it is gathered.", kind="faint")
    return drawing


def contract() -> Drawing:
    """What goes in, what comes out, and what is compared on the way."""
    drawing = Drawing(760, 230, "Intent is captured before and after; a difference is an error that names it")
    stages = ("model,\noptimizers", "Intent", "Plan", "sharded\nmodel", "steps", "checkpoint")
    for i, stage in enumerate(stages):
        drawing.box(10 + i * 126, 30, 104, 56, "here" if stage in ("Intent", "Plan") else "plain", stage)
        if i:
            drawing.arrow(10 + i * 126 - 20, 58, 10 + i * 126 - 3, 58)
    drawing.line(188, 90, 188, 128)
    drawing.line(188, 128, 440, 128)
    drawing.arrow(440, 128, 440, 92)
    drawing.words(314, 122, "captured again, and compared", "middle", "faint")
    drawing.line(188, 128, 188, 168)
    drawing.line(188, 168, 692, 168)
    drawing.arrow(692, 168, 692, 92)
    drawing.words(440, 162, "the same names, ties, dtypes, groups, at any number of ranks", "middle", "faint")
    drawing.words(
        10,
        215,
        "A difference is an error that names the parameter. If one rank fails, all raise, and all is as it was.",
        kind="faint",
    )
    return drawing


def optimizers() -> Drawing:
    """An element-wise step on shards, and a whole-tensor step by owner."""
    drawing = Drawing(
        760, 330, "On shards each rank steps its rows; by owner gradients travel to one rank and results back"
    )
    drawing.words(10, 22, "on shards: each rank steps its own rows")
    drawing.words(400, 22, "by owner: one rank has the whole of a parameter")
    for rank, kind in enumerate(RANKS):
        y = 40 + rank * 62
        drawing.words(10, y + 28, f"rank {rank}", kind="faint")
        drawing.box(70, y, 110, 44, kind, "rows of W")
        drawing.arrow(184, y + 22, 226, y + 22)
        drawing.box(230, y, 110, 44, kind, "new rows")
        drawing.box(400, y, 96, 44, kind, "gradient")
    drawing.box(556, 102, 84, 106, "strong")
    drawing.box(562, 108, 72, 94, "plain", "W whole,\nstate")
    for rank in range(4):
        drawing.arrow(500, 62 + rank * 62, 550, 128 + rank * 18)
        drawing.arrow(644, 128 + rank * 18, 694, 62 + rank * 62)
        drawing.box(698, 40 + rank * 62, 52, 44, RANKS[rank], "rows")
    drawing.words(10, 306, "nothing is sent", kind="faint")
    drawing.words(400, 306, "gradients travel in, results travel out, each once", kind="faint")
    return drawing


def checkpoints() -> Drawing:
    """Four ranks write one file, two read it."""
    drawing = Drawing(
        760, 250, "Each rank writes its rows at their place in one file; any number of ranks reads its own"
    )
    drawing.words(10, 22, "four ranks save")
    drawing.words(300, 22, "model.safetensors", kind="code")
    drawing.words(620, 22, "two ranks load")
    for rank, kind in enumerate(RANKS):
        y = 40 + rank * 44
        drawing.box(10, y, 130, 36, kind, f"rank {rank}'s rows")
        drawing.arrow(146, y + 18, 292, y + 18)
        drawing.box(300, y - 4, 150, 44, kind)
        drawing.arrow(456, y + 18, 608, 80 if rank < 2 else 168)
    for rank in range(2):
        drawing.box(616, 46 + rank * 88, 130, 68, RANKS[rank], f"rank {rank}'s rows")
    drawing.words(
        10,
        240,
        "Nothing is gathered: a rank writes the bytes that it holds, and reads the bytes that it will hold.",
        kind="faint",
    )
    return drawing


def planning() -> Drawing:
    """From a model and a cluster to a plan."""
    drawing = Drawing(
        760, 220, "A step is run on fake tensors; its events give memory and time; the fastest plan that fits is chosen"
    )
    drawing.box(10, 30, 130, 44, "plain", "model")
    drawing.box(10, 84, 130, 44, "plain", "cluster, budget")
    drawing.box(200, 40, 150, 76, "here", "real shard(),\nreal step,\nfake tensors")
    drawing.box(410, 30, 130, 44, "third", "memory, by kind")
    drawing.box(410, 84, 130, 44, "other", "time, traffic")
    drawing.box(600, 50, 150, 56, "strong")
    drawing.box(606, 56, 138, 44, "plain", "plan")
    for y in (52, 106):
        drawing.arrow(144, y, 194, 78)
        drawing.arrow(354, 78, 404, y)
        drawing.arrow(544, y, 594, 78)
    drawing.line(675, 110, 675, 160)
    drawing.line(675, 160, 275, 160)
    drawing.arrow(275, 160, 275, 122)
    drawing.words(475, 153, "another plan, until the fastest that fits is known", "middle", "faint")
    drawing.words(
        10,
        205,
        "One process stands for one rank of any number. Nothing is allocated and nothing is sent.",
        kind="faint",
    )
    return drawing


PICTURES = {each.__name__: each for each in (house, units, resharding, contract, optimizers, checkpoints, planning)}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")
