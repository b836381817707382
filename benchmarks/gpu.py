"""``make gpu``: what one command shows on a machine with GPUs and no network, written to ``docs/gpu.md``.

The contract's tests on the device with NCCL, for each torch that is there; a calibration; rehearsals of jobs, forecast
beside measured; speed and memory beside plain PyTorch. Each is a process of its own with a time limit: what fails or
takes too long is a row that says so, and the others go on. This program itself imports nothing that must be installed.

python -m benchmarks.gpu --wheels DIR

DIR holds wheels of what the machine's Python lacks, and perhaps of other releases of torch: for each ``torch-*.whl`` an
environment is made under ``build/gpu``, from DIR alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "gpu"
PAGE = ROOT / "docs" / "gpu.md"
LIMIT = 20 * 60
"""Seconds for all."""

_LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
_1B = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
_MORE = {"num_key_value_heads": 8, "vocab_size": 128256}
REHEARSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "Llama 1B on 8 ranks, 4 × 2,048": (_1B, ["--ranks", "8", "--sequence", "2048", "--microbatch", "4"]),
    "Llama 8B on 8 ranks, 1 × 8,192, selective": (
        _8B,
        ["--ranks", "8", "--sequence", "8192", "--activation-checkpointing", "selective"],
    ),
    "Llama 8B on 64 ranks, 2 × 4,096, full, compiled": (
        _8B,
        ["--ranks", "64", "--sequence", "4096", "--microbatch", "2", "--activation-checkpointing", "full", "--compile"],
    ),
}
"""Name → fields of the model, and options of `trueshard plan`."""


@dataclass
class Outcome:
    """What a process gave."""

    name: str
    seconds: float = 0.0
    failed: str = ""
    """Last line of its error, or that it took too long; "" if it ended well."""
    out: str = ""
    data: Any = None


@dataclass
class Session:
    """All processes of one call, which share a time limit."""

    environment: dict[str, str]
    device: str
    began: float = field(default_factory=time.monotonic)
    outcomes: list[Outcome] = field(default_factory=list)

    def run(self, name: str, command: Sequence[str | Path], limit: float, **more: str) -> Outcome:
        """Run a command from the root of the checkout, at most ``limit`` seconds or what is left of all."""
        left = max(1.0, min(limit, LIMIT - (time.monotonic() - self.began)))
        outcome = Outcome(name)
        self.outcomes.append(outcome)
        print(f"{name} …", flush=True)
        began = time.monotonic()
        try:
            found = subprocess.run(
                command, cwd=ROOT, env=self.environment | more, timeout=left, capture_output=True, text=True
            )
        except subprocess.TimeoutExpired as expired:
            outcome.failed = f"not done after {left:.0f} s"
            outcome.out = _text(expired.stdout) + _text(expired.stderr)
        else:
            outcome.out = found.stdout
            if found.returncode:
                lines = [line for line in (found.stderr or found.stdout).splitlines() if line.strip()]
                outcome.failed = lines[-1] if lines else f"exit code {found.returncode}"
                outcome.out += found.stderr
        outcome.seconds = time.monotonic() - began
        (WORK / f"{len(self.outcomes):02d}.txt").write_text(outcome.out)
        print(f"  {outcome.seconds:.0f} s{': ' + outcome.failed if outcome.failed else ''}", flush=True)
        return outcome


def _text(given: Any) -> str:
    return given.decode(errors="replace") if isinstance(given, bytes) else given or ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all, write page and figures, and return 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="Hold TrueShard on this GPU.")
    parser.add_argument("--wheels", type=Path, help="folder of wheels that are missing here")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the same steps, as a trial")
    given = parser.parse_args(arguments)
    WORK.mkdir(parents=True, exist_ok=True)
    session = Session(_environment(given.wheels), given.device)
    where = _where(session)
    if given.device == "cuda" and not where.get("gpus"):
        print("make gpu needs a CUDA GPU, and torch sees none on this machine", file=sys.stderr)
        return 2
    pythons = {where["torch"]: Path(sys.executable), **_other_releases(session, given.wheels)}
    for release, python in pythons.items():
        contract(session, release, python)
    device = calibration(session)
    jobs = [rehearsal(session, name, device) for name in REHEARSED] if given.device == "cuda" else []
    speed = benchmark(session) if given.device == "cuda" else None
    page = page_of(where, session.outcomes, device, jobs, speed)
    given.page.write_text(page, encoding="utf-8")
    figures = {"machine": where, "steps": [vars(each) | {"out": ""} for each in session.outcomes]}
    (WORK / "gpu.json").write_text(json.dumps(figures, indent=1))
    print(f"{given.page}, {WORK / 'gpu.json'}")
    return int(any(each.failed for each in session.outcomes))


def _environment(wheels: Path | None) -> dict[str, str]:
    """Return the environment of all processes; the wheels are unpacked into a folder of their own first."""
    paths = [ROOT / "src"]
    if wheels is not None:
        site = WORK / "site"
        files = [each for each in sorted(wheels.glob("*.whl")) if not each.name.startswith("torch-")]
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--upgrade"]
        subprocess.run([*command, "--target", site, *files], check=True)
        paths.append(site)
    given = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([*map(str, paths), *([given] if given else [])])
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}


_LOOK = """
import json, platform, torch
gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
print(json.dumps({
    "torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version(),
    "gpus": [[each.name, each.total_memory] for each in gpus],
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpus else None,
}))
"""


def _where(session: Session) -> dict[str, Any]:
    looked = session.run("environment", [sys.executable, "-c", _LOOK], 120)
    if looked.failed:
        raise SystemExit(f"torch cannot be imported here: {looked.failed}")
    found: dict[str, Any] = json.loads(looked.out.splitlines()[-1])
    return found


def _other_releases(session: Session, wheels: Path | None) -> dict[str, Path]:
    """Make an environment for each wheel of torch; one that cannot be made is a row that says so."""
    made: dict[str, Path] = {}
    for file in sorted(wheels.glob("torch-*.whl")) if wheels is not None else ():
        release = file.name.split("-")[1]
        folder = WORK / f"torch-{release}"
        python = folder / "bin" / "python"
        if not python.exists():
            # What this Python has serves there too, below the torch of its own.
            subprocess.run([sys.executable, "-m", "venv", "--system-site-packages", folder], check=True)
        command = [python, "-m", "pip", "install", "-q", "--no-index", "--find-links", str(wheels), f"torch=={release}"]
        if not session.run(f"install torch {release}", command, 240).failed:
            made[release] = python
    return made


# The steps


def contract(session: Session, release: str, python: Path) -> Outcome:
    """Run the tests that need a GPU, or hold the contract on one, and count what they gave."""
    report = WORK / f"tests-{release}.xml"
    report.unlink(missing_ok=True)
    files = ["tests/test_device.py"]
    if session.device == "cuda":
        files += ["tests/test_planner_rehearse.py::test_on_a_gpu_what_is_reserved_is_as_forecast"]
        files += ["tests/test_data_loader.py"]
    options = ["-q", "-p", "no:cacheprovider", "-m", "rest or not rest", f"--junitxml={report}"]
    outcome = session.run(
        f"contract, torch {release}",
        [python, "-m", "pytest", *options, *files],
        360,
        TRUESHARD_TEST_DEVICE=session.device,
        OMP_NUM_THREADS="1",
    )
    if report.exists():
        suite = ElementTree.parse(report).getroot()[0]
        counts = {key: int(suite.get(key, "0")) for key in ("tests", "failures", "errors", "skipped")}
        failed = [
            case.get("name") for case in suite.iter("testcase") if any(e.tag in ("failure", "error") for e in case)
        ]
        outcome.data = counts | {"failed": failed}
        if failed:
            outcome.failed = f"{len(failed)} of {counts['tests']} failed: {', '.join(map(str, failed[:4]))}"
    return outcome


def calibration(session: Session) -> Outcome:
    """Measure the device; ``data``: the hardware file."""
    file = WORK / "here.toml"
    file.unlink(missing_ok=True)
    outcome = session.run("calibration", _trueshard("plan", "calibrate", file), 240)
    outcome.data = str(file) if file.exists() else None
    return outcome


def rehearsal(session: Session, name: str, device: Outcome) -> Outcome:
    """Run rank 0 of a job; ``data``: forecast and measured figures."""
    fields, options = REHEARSED[name]
    folder = WORK / "".join(each if each.isalnum() else "_" for each in name)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_LLAMA | fields | _MORE))
    words = ["--param-dtype", "bf16", "--reshard-after-forward", "default", "--json"]
    if "--activation-checkpointing" not in options:
        words += ["--activation-checkpointing", "none"]
    hardware = ["--hardware", device.data] if device.data else []
    outcome = session.run(
        f"rehearsal, {name}", _trueshard("plan", "rehearse", folder, *options, *words, *hardware), 240
    )
    if not outcome.failed:
        outcome.data = json.loads(outcome.out)["rehearsal"]
    return outcome


def benchmark(session: Session) -> Outcome:
    """Run ``python -m benchmarks --device cuda``; ``data``: its tables."""
    file = WORK / "cuda.json"
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks", "--device", "cuda", "--json", str(file)]
    outcome = session.run("speed and memory", command, 480)
    if file.exists():
        outcome.data = json.loads(file.read_text())["benchmarks"]
    return outcome


def _trueshard(*words: str | Path) -> list[str | Path]:
    return [sys.executable, "-m", "trueshard", *words]


# The page


def page_of(
    where: dict[str, Any], outcomes: Sequence[Outcome], device: Outcome, jobs: Sequence[Outcome], speed: Outcome | None
) -> str:
    """Return ``docs/gpu.md``."""
    gpus = [f"{name} ({memory / 2**30:.0f} GiB)" for name, memory in where["gpus"]] or ["none"]
    parts = [
        "# On a GPU",
        f"Written by `make gpu`: {len(where['gpus'])} × {gpus[0]}, torch {where['torch']} (CUDA {where['cuda']}, NCCL "
        f"{where['nccl']}), Python {where['python']}.",
        "## Steps",
        _table(("step", "seconds", "outcome"), [(e.name, f"{e.seconds:.0f}", _outcome(e)) for e in outcomes]),
    ]
    if device.data:
        parts += ["## Calibration", f"```toml\n{Path(device.data).read_text().strip()}\n```"]
    if rows := [row for job in jobs for row in _rehearsed(job)]:
        parts += ["## Rehearsals", _table(("job", "figure", "forecast", "measured", "error"), rows)]
    for table in (speed.data if speed else None) or ():
        parts += [f"## {table['title']}", table["note"], _table(table["columns"], table["rows"])]
    return "\n\n".join(parts) + "\n"


def _outcome(outcome: Outcome) -> str:
    if outcome.failed:
        return outcome.failed.replace("|", "\\|")
    if isinstance(outcome.data, dict) and "tests" in outcome.data:
        return f"{outcome.data['tests'] - outcome.data['skipped']} passed, {outcome.data['skipped']} skipped"
    return "done"


_SHOWN: dict[str, Callable[[float], str]] = {
    "allocated": lambda value: f"{value / 2**30:.2f} GiB",
    "reserved": lambda value: f"{value / 2**30:.2f} GiB",
    "seconds": lambda value: f"{value:.3f} s",
}


def _rehearsed(job: Outcome) -> list[tuple[str, ...]]:
    rows = []
    for key, shown in _SHOWN.items():
        if job.data and job.data[key]["measured"]:
            forecast, measured = job.data[key]["forecast"], job.data[key]["measured"]
            rows.append((job.name, key, shown(forecast), shown(measured), f"{forecast / measured - 1:+.1%}"))
    return rows


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
