"""``python -m benchmarks.gpu``: run the steps that have no figures yet, and write page and figures after each."""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu import page, steps
from benchmarks.gpu.session import LEAST, ROOT, Outcome, Session, replace


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 1 if a step of this call failed, 2 if there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="STEP", help="these alone, even if they have figures")
    parser.add_argument("--list", action="store_true", help="print the steps and their limits")
    parser.add_argument("--budget", type=float, default=math.inf, metavar="SECONDS", help="of all steps of this call")
    parser.add_argument("--out", type=Path, default=ROOT / "build/gpu", help="folder of figures, page and logs")
    parser.add_argument("--anew", action="store_true", help="forget the figures of earlier calls")
    parser.add_argument("--page", type=Path, help="write the page here, too")
    parser.add_argument("--wheels", type=Path, help="folder of wheels that are missing here")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a trial where there is none")
    parser.add_argument("--small", action="store_true", help="tiny models: to see that all of it runs")
    options = parser.parse_args(arguments)
    names = [step.name for step in steps.STEPS]
    for name in options.only or ():
        if name not in names:
            parser.error(f"no step is called {name!r}; use {', '.join(names)}")
    if options.list:
        print("\n".join(f"{step.name:24} {step.limit:5.0f} s  {step.gpus} GPU(s)" for step in steps.STEPS))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)

    def write(session: Session) -> None:
        text = page.page_of(session)
        for file in (options.out / "gpu.md", options.page):
            if file is not None:
                replace(file, text)

    environment = _environment(options.out, options.wheels)
    small = options.small or options.device == "cpu"
    session = Session(options.out, environment, options.device, small, options.budget, write, options.wheels)
    failed = steps.look(session)
    if failed or (options.device == "cuda" and not session.machine["gpus"]):
        print(failed or "make gpu needs a CUDA GPU, and torch sees none on this machine", file=sys.stderr)
        return 2
    if not options.anew:
        session.resume()
    return int(any(outcome.failed for outcome in run(session, options.only)))


def run(session: Session, only: Sequence[str] | None) -> list[Outcome]:
    """Run the steps that were asked for, or all that have not ended well; return their outcomes."""
    outcomes = []
    for step in steps.STEPS:
        before = session.outcomes.get(step.name)
        if step.name not in only if only else before and not before.failed:
            continue
        if session.device == "cuda" and step.gpus > len(session.machine["gpus"]):
            outcome = Outcome(step.name, data={"left out": f"needs {step.gpus} GPUs"})
        elif session.left < LEAST:
            outcome = Outcome(step.name, failed="not begun: the budget is spent")
        else:
            try:
                outcome = step.run(session, step)
            except Exception as error:  # a step that fails loses itself alone
                outcome = Outcome(step.name, failed=f"{type(error).__name__}: {error}")
        session.outcomes[step.name] = outcome
        outcomes.append(outcome)
        session.keep()
    print(f"{session.out / 'gpu.md'}, {session.file}")
    return outcomes


def _environment(out: Path, wheels: Path | None) -> dict[str, str]:
    """Return the environment of all processes; the wheels are unpacked into a folder of their own first."""
    paths = [ROOT / "src"]
    if wheels is not None:
        site = out / "site"
        files = [file for file in sorted(wheels.glob("*.whl")) if not file.name.startswith("torch-")]
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--upgrade"]
        if subprocess.run([*command, "--target", site, *files]).returncode:
            print(f"not all wheels of {wheels} could be installed; steps that need them will fail", file=sys.stderr)
        paths.append(site)
    before = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([*map(str, paths), *([before] if before else [])])
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}


if __name__ == "__main__":
    sys.exit(main())
