"""What TrainCheck says of the same programs: ``python -m benchmarks.silent.traincheck PYTHON [PROGRAM …]``.

PYTHON is an interpreter whose environment has TrainCheck. By its own commands it learns invariants from the run without
the bug, and checks them in the run with the bug, and in another without it, whose data have another seed. A program
becomes one file, since TrainCheck instruments the file that it is given.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks import machine, page
from benchmarks.silent.frame import STEPS, Program
from benchmarks.silent.trial import programs
from benchmarks.table import Table

NAMES = ("converted", "unwrapped", "frozen", "lost", "final_norm", "not_cleared", "spectral", "autocast", "dropout")
"""Tried if none are named: of TrainCheck's own list, and one of Megatron's."""
LIMIT = 300.0
"""Seconds of a command."""
STYLES = "proxy", "sampler"
"""How TrainCheck watches parameters; the first with which the program ends as it should."""
END = """
import os
def record(*_): pass
MANY = int(os.environ.get("WORLD_SIZE", "1")) > 1
if MANY:
    dist.init_process_group("gloo")
numbers = torch.Generator().manual_seed({seed})
run = Run({bug}, dist.get_rank() if MANY else 0, dist.get_world_size() if MANY else 1, numbers)
torch.manual_seed(0)
PROGRAMS["{name}"].function(run)
if MANY:
    dist.destroy_process_group()
"""


class Failed(Exception):
    """A command of TrainCheck's that did not end as it should, in words."""


def script(family: str, name: str, bug: bool, seed: int) -> str:
    """Return a program as one file."""
    text = "from __future__ import annotations\n"
    for part in ("frame", *(("megatron",) if family == "context" else ()), family):
        tree = ast.parse((Path(__file__).parent / f"{part}.py").read_text(encoding="utf-8"))
        for one in tree.body[1:]:
            if not (isinstance(one, ast.ImportFrom) and str(one.module).startswith(("benchmarks", "__future__"))):
                text += ast.unparse(one) + "\n"
    return text + END.format(seed=seed, bug=bug, name=name)


class Commands:
    """TrainCheck's commands in a folder of one program."""

    def __init__(self, python: Path, folder: Path, family: str, program: Program) -> None:
        self._bin, self._folder, self._family, self._program = python.parent, folder, family, program

    def collect(self, to: str, style: str, *options: str, bug: bool = False, seed: int = 1) -> None:
        """Trace a run."""
        place = self._folder / f"{to}-{style}"
        place.mkdir()
        file = place / "program.py"
        file.write_text(script(self._family, self._program.name, bug, seed), encoding="utf-8")
        given = ["-p", str(file), "--models-to-track", "model", "--model-tracker-style", style]
        if self._program.ranks > 1:
            start = place / "start.sh"
            launch = f"python -m torch.distributed.run --standalone --nproc-per-node {self._program.ranks}"
            start.write_text(f"{launch} program.py\n")
            given += ["-s", str(start)]
        self._run("collect", *given, "--output-dir", str(place / "trace"), *options)

    def infer(self, style: str) -> str:
        """Learn invariants of the clean run; return their file."""
        file = str(self._folder / f"invariants-{style}.json")
        self._run("infer", "-f", str(self._folder / f"clean-{style}" / "trace"), "-o", file)
        return file

    def check(self, of: str, style: str, invariants: str) -> set[str]:
        """Return the invariants that a run violates."""
        place = self._folder / f"{of}-{style}"
        given = ("-i", invariants, "-o", str(place / "result"), "--no-html-report")
        self._run("check", "-f", str(place / "trace"), *given)
        (summary,) = (place / "result").glob("*/violations_summary.json")
        violations = json.loads(summary.read_text())["violations"]
        return {f"{one['relation_type']}: {one['display_name']}" for one in violations}

    def _run(self, command: str, *options: str) -> None:
        path = {**os.environ, "PATH": f"{self._bin}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        path.pop("PYTHONPATH", None)
        full = [str(self._bin / f"traincheck-{command}"), *options]
        try:
            ended = subprocess.run(full, cwd=self._folder, env=path, capture_output=True, text=True, timeout=LIMIT)
        except subprocess.TimeoutExpired:
            raise Failed(f"{command} took over {LIMIT:.0f} s") from None
        if ended.returncode:
            lines = [line.split("[94m")[-1] for line in (ended.stdout + ended.stderr).splitlines() if "Error" in line]
            raise Failed(f"{command}: {lines[-1].strip()[-90:] if lines else 'an error'}")


def tried(python: Path, family: str, program: Program) -> tuple[str, str, str]:
    """Return whether TrainCheck tells the bug, its alarms in a clean run, and the invariants that it has learned."""
    with tempfile.TemporaryDirectory() as folder:
        commands = Commands(python, Path(folder), family, program)
        for style in STYLES:
            try:
                commands.collect("clean", style)
                invariants = commands.infer(style)
                commands.collect("bug", style, "-i", invariants, bug=True)
                commands.collect("again", style, "-i", invariants, seed=2)
                violated = commands.check("bug", style, invariants)
                alarms = commands.check("again", style, invariants)
                break
            except Failed as error:
                if style == STYLES[-1]:
                    return f"did not run: {error}", "", ""
        count = len(Path(invariants).read_text().splitlines())
    new = violated - alarms
    return (f"yes: {len(new)} violated" if new else "no"), str(len(alarms)), str(count)


def main() -> None:
    """Try the programs, show the table, and write it into a page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.silent.traincheck")
    parser.add_argument("python", type=Path)
    parser.add_argument("names", nargs="*", metavar="program")
    parser.add_argument("--markdown", type=Path, help="a page that has the marks of this table")
    given = parser.parse_args()
    rows = list[tuple[str, ...]]()
    for family, program in programs():
        if program.name in (given.names or NAMES):
            begin = time.monotonic()
            rows.append((program.title, program.source, *tried(given.python, family, program)))
            print(f"{program.name} ({time.monotonic() - begin:.0f} s): {', '.join(rows[-1][2:])}", flush=True)
    table = Table(
        name="silent_traincheck",
        title="Beside TrainCheck",
        note=note(given.python, rows),
        columns=("bug", "reported in", "told by TrainCheck", "alarms in another clean run", "invariants learned"),
        rows=tuple(rows),
        numbers=[],
        words=True,
    )
    _, _, words, cells = table.markdown().split("\n\n")
    command = "```bash\npython -m benchmarks.silent.traincheck PYTHON\n```"
    part = "\n\n".join([f"On {machine.describe()}:", command, words, cells])
    print(part)
    if given.markdown:
        text = given.markdown.read_text(encoding="utf-8")
        given.markdown.write_text(page.replaced(text, table.name, part), encoding="utf-8")


def note(python: Path, rows: list[tuple[str, ...]]) -> str:
    """Return what the table says, in sentences."""
    code = "from importlib.metadata import version; print(version('traincheck'))"
    version = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    alarmed = sum(row[2].startswith("yes") for row in rows)
    alarms = sum(row[3] not in ("", "0") for row in rows)
    return (
        f"TrainCheck {version} on {len(rows)} of these programs, by its commands `collect`, `infer` and `check`, with "
        "its defaults: PYTHON is of an environment that has it. It learns invariants from one run without the bug, of "
        f"{STEPS} steps, fewer than it is made for, and checks them with the bug, and without it on other data. "
        "A bug counts as told if an invariant is violated that is not in that clean run. It needs no second run of the "
        f"same program, as `verify_runs` does. {alarmed} are told; of the clean runs {alarms} have alarms. Alarms come "
        "also from its second trace, which leaves out what the invariants do not name: by hand, on a program like "
        "these, 24 of 675 are violated by the same run traced so, and none by its full trace. The other programs were "
        "not tried: each takes minutes."
    )


if __name__ == "__main__":
    main()
