"""The floors of the library: which file may import which."""

from __future__ import annotations

#: From the top down. A file imports from floors below its own; files of one package may import each other.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("__main__",),
    ("cli",),
    ("convert", "doctor", "verification"),
    ("rl",),
    ("integrations", "train"),
    ("__init__",),
    ("api",),
    ("planner",),
    ("checkpoint",),
    ("sharding",),
    ("parallel",),
    ("optim",),
    ("model",),
    ("distributed", "plans"),
    ("options",),
    ("_torch",),
    ("axes", "launching", "machine", "text"),
    ("files",),
    ("errors",),
)
