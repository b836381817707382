"""The code blocks of the documents, and what is done with each.

- python: the blocks of a page are one program, run from the top down; with ``title="name"``, a file.
- bash: each command is run, in the same place and order (``shortened`` says how); with a title, a file.
- toml: with a title a file, read as a configuration; else a part of one, put over ``examples/pretrain.toml``.
- json and yaml: parsed; with a title, a file. text: nothing is done; with the title "output", its lines must have been
  printed by the page.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LANGUAGES = ("python", "bash", "toml", "json", "yaml", "text")
FENCE = re.compile(r"^( *)```(\w*)([^\n]*)\n(.*?)^\1```$", flags=re.DOTALL | re.MULTILINE)

#: What a page says of one node of eight GPUs is run on two processes of this machine.
FEWER = ((r"--nproc(=| )8\b", r"--nproc\g<1>2"), (r"--nproc-per-node(=| )8\b", r"--nproc-per-node\g<1>2"))
#: Beginnings of the commands that this machine cannot run, or has run elsewhere; their words are parsed.
PARSED = {
    "torchrun --nnodes": "several machines",
    "srun ": "a cluster",
    "sbatch ": "a cluster",
    "pip install ": "the tests of the package install it",
    "python -m benchmarks": "takes long, and is about this machine; `make bench`",
    "python tests/lost_seconds": "takes minutes, and is about this machine",
    "torchrun --nproc-per-node 2 tests/snapshot_seconds": "takes minutes, and is about this machine",
    "python -m pytest": "this is one",
    "trueshard plan qwen3-32b": "takes half a minute of two cores; tests/test_planner_offers.py runs it",
    "python examples/ray_train": "Ray is in an environment of its own; `make ray`",
    "python tests/emulated_cuda": "compiles, and runs a program of yours; `make cuda`",
}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    """Of its first line of code, counted from 1."""
    language: str
    title: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """Every page, as a path from the root of the repository."""
    return [
        "README.md",
        "CHANGELOG.md",
        *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md")),
    ]


def blocks(page: str) -> list[Block]:
    """The blocks of a page, from the top down."""
    text, found = (ROOT / page).read_text(encoding="utf-8"), []
    for match in FENCE.finditer(text):
        indent, language, attributes, code = match.groups()
        title = re.search(r'title="([^"]+)"', attributes)
        line = text.count("\n", 0, match.start(4)) + 1
        code = re.sub(rf"^{indent}", "", code, flags=re.MULTILINE)
        found.append(Block(page, line, language, title[1] if title else "", code))
    return found


def commands(text: str) -> Iterator[str]:
    """The commands of a block: a line each, or several that end in a backslash."""
    for line in text.replace("\\\n", " ").splitlines():
        words = " ".join(shlex.split(line, comments=True))
        if words:
            yield re.sub(r"\s+#.*$", "", line.strip())


def is_parsed(command: str) -> bool:
    """Whether the words of a command are parsed and nothing is run."""
    return command.startswith(tuple(PARSED))


def shortened(command: str) -> str:
    """What is run for a command: two processes and steps at most, less text, a plan of one choice; of `make` what it
    would do.
    """
    for pattern, replacement in FEWER:
        command = re.sub(pattern, replacement, command)
    if re.match(r"make\b", command):
        return f"make --dry-run --directory {ROOT} {command.removeprefix('make')} > /dev/null"
    if re.search(
        r"\btrueshard (demo|(train|verify) (exact|examples/(pretrain|long_context|mixture))\.toml)\b", command
    ):
        command += " --set data.path=src/trueshard/optim"
    trains = re.search(r"\btrueshard (train|demo)\b", command)
    if trains and "train.steps=" not in command:
        command += " --set train.steps=2 --set sample.tokens=2"
    if re.match(r"trueshard plan (?!\S+\.toml|--for )", command) and "--reshard-after-forward" not in command:
        command += " --reshard-after-forward default --activation-checkpointing none"
    if re.search(r"\btrueshard verify\b", command) and "--steps" not in command:
        command += " --steps 2" + (" --layers 1" if ".toml" in command and "--layers" not in command else "")
    return command
