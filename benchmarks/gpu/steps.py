"""The table of steps, by worth: those without which others mean nothing first, 1B before 8B, what may hang last."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.session import EMULATED, ROOT, Outcome, Session, last_line

_LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
_1B = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
_MORE = {"num_key_value_heads": 8, "vocab_size": 128256}
_SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8}
_SMALL |= {"vocab_size": 256}
REHEARSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "1B on 8 ranks": (_1B, ["--ranks", "8", "--sequence", "2048", "--microbatch", "4"]),
    "8B on 8 ranks": (_8B, ["--ranks", "8", "--sequence", "8192", "--activation-checkpointing", "selective"]),
    "8B on 64 ranks": (
        _8B,
        ["--ranks", "64", "--sequence", "4096", "--microbatch", "2", "--activation-checkpointing", "full", "--compile"],
    ),
}
"""Name → fields of the model, and options of `trueshard plan`."""
SMALL_SIZES = """
import contextlib, os, sys, types
from trueshard import cli
from trueshard.planner import calibrate
calibrate.LARGE = calibrate.SMALL
if "EMULATED_CUDA" in os.environ:
    import torch
    torch.cuda.CUDAGraph, torch.cuda.graph = lambda: types.SimpleNamespace(replay=int), contextlib.nullcontext
sys.exit(cli.main())
"""
"""Program: the command line, which measures a GPU with the sizes of a CPU; an emulated one without CUDA graphs, which
do not run there."""
VERIFIED: dict[str, list[str]] = {
    "plain": [],
    "fused": ["--set", "optimizer.arguments.fused=true"],
    "bf16": ["--set", "shard.mixed_precision=bf16"],
    "fp16": ["--set", "shard.mixed_precision=fp16"],
    "offload": ["--set", "shard.offload=cpu"],
    "exact": ["--set", "train.exact=true"],
}
"""Name → settings under which the contract is verified."""


SCARCE = 600 << 20
"""Bytes of an emulated device that is to run out of memory."""


@dataclass(frozen=True)
class Step:
    name: str
    limit: float
    """Seconds of all its processes together, at most."""
    run: Callable[[Session, Step], Outcome]
    gpus: int = 1
    """Devices that it needs."""


_LOOK = """
import json, os, platform, subprocess, torch
gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
def ask(*words):
    try:
        return subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, timeout=30).stdout.strip()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
query = "driver_version,clocks.max.sm,clocks.sm,power.limit,temperature.gpu,clocks_throttle_reasons.active"
print(json.dumps({
    "torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version(),
    "gpus": [[gpu.name, gpu.total_memory] for gpu in gpus], "cores": os.cpu_count(),
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpus else None,
    "state": ask("--query-gpu=" + query, "--format=csv") if gpus else "", "links": ask("topo", "-m") if gpus else "",
}))
"""


def look(session: Session) -> str:
    """Take down what the machine is; return why that is not possible, or ""."""
    outcome, log = session.run("environment", [sys.executable, "-c", _LOOK], 120)
    if outcome.failed:
        return f"torch cannot be imported here: {outcome.failed}"
    session.machine = json.loads(log.read_text().splitlines()[-1])
    session.machine["emulated"] = EMULATED
    outcome.data = {key: session.machine.pop(key) for key in ("state", "links")}  # they change from call to call
    session.outcomes["environment"] = outcome
    return ""


def contract(session: Session, step: Step, python: str | Path = sys.executable) -> Outcome:
    """Run the tests that hold the contract on a device, and count what they gave."""
    report = session.out / "tests.xml"
    report.unlink(missing_ok=True)
    files = ["tests/test_device.py"]
    if session.device == "cuda":
        files += ["tests/test_data_loader.py"]
        files += [] if EMULATED else ["tests/test_planner_rehearse.py::test_on_a_gpu_what_is_reserved_is_as_forecast"]
    marks = "(rest or not rest) and not compiles" if EMULATED else "rest or not rest"
    options = ["-q", "-p", "no:cacheprovider", "-m", marks, f"--junitxml={report}"]
    command = [python, "-m", "pytest", *options, *files]
    environment = {"TRUESHARD_TEST_DEVICE": session.device, "OMP_NUM_THREADS": "1"}
    outcome, _ = session.run(step.name, command, step.limit, **environment)
    try:
        suite = ElementTree.parse(report).getroot()[0]
    except (OSError, ElementTree.ParseError):  # it ended before it wrote one
        return outcome
    failed = [
        str(case.get("name")) for case in suite.iter("testcase") if any(e.tag in ("failure", "error") for e in case)
    ]
    outcome.data = {key: int(suite.get(key, "0")) for key in ("tests", "failures", "errors", "skipped")}
    outcome.data["failed"] = failed
    if EMULATED:
        outcome.data["without"] = "compiled units; forecasts of what the real allocator reserves"
    if failed:
        outcome.failed = f"{len(failed)} of {outcome.data['tests']} failed: {', '.join(failed[:4])}"
    return outcome


def releases(session: Session, step: Step) -> Outcome:
    """Hold the contract with every other torch of which the folder of wheels has one, each in its environment."""
    if EMULATED:
        return Outcome(step.name, data={"left out": "the emulated device is compiled for one torch"})
    data: dict[str, Any] = {}
    failed = []
    for file in sorted(session.wheels.glob("torch-*.whl")) if session.wheels else ():
        release = file.name.split("-")[1]
        folder = session.out / f"torch-{release}"
        python = folder / "bin" / "python"
        # What this Python has serves there too, below the torch of its own.
        commands = [[sys.executable, "-m", "venv", "--system-site-packages", folder]] if not python.exists() else []
        commands += [
            [python, "-m", "pip", "install", "-q", "--no-index", "--find-links", session.wheels, f"torch=={release}"]
        ]
        outcomes = [session.run(f"install torch {release}", command, 240)[0] for command in commands]
        if not any(outcome.failed for outcome in outcomes):
            outcomes = [contract(session, Step(f"contract, torch {release}", step.limit, contract), python)]
        data[release] = outcomes[-1].failed or outcomes[-1].data
        failed += [f"{release}: {outcome.failed}" for outcome in outcomes if outcome.failed]
    return Outcome(step.name, failed="; ".join(failed), data=data or {"left out": "no wheels of other releases"})


def verified(session: Session, step: Step) -> Outcome:
    """Verify the contract on a small model under several settings, as many processes as there are devices."""
    result = Outcome(step.name, data={})
    processes = max(1, len(session.machine["gpus"])) if session.device == "cuda" else 2
    configuration = ROOT / "examples/grpo_start.toml"
    for name, settings in VERIFIED.items():
        command = _trueshard("verify", configuration, "--nproc", str(min(2, processes)), "--layers", "1", *settings)
        outcome, log = session.run(f"{step.name} {name}", command, step.limit / len(VERIFIED))
        result.seconds += outcome.seconds
        result.data[name] = outcome.failed or last_line(log)
        if outcome.failed:
            result.failed = f"{name}: {outcome.failed}"
    return result


_WRONG = """
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

class Wrong(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (1.01 if isinstance(model, FSDPModule) else 1)

def broken():
    global model
    model = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 64), Wrong(64, 64), nn.Linear(64, 64))
    loss = lambda model, batch: nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), torch.randint(0, 64, (8, 16)), loss
"""
"""A model whose third module computes otherwise once it is sharded."""


def localised(session: Session, step: Step) -> Outcome:
    """Verify a model with a wrong module, which must be named; ``data``: what is said of it."""
    file = session.out / "wrong.py"
    file.write_text(_WRONG)
    processes = "2" if session.device == "cpu" or len(session.machine["gpus"]) > 1 else "1"
    outcome, log = session.run(
        step.name, _trueshard("verify", f"{file}:broken", "--nproc", processes, "--json"), step.limit
    )
    text = log.read_text()
    with contextlib.suppress(ValueError):
        outcome.data = json.loads(text[text.index("{") : text.rindex("}") + 1])["first"]
        named = (outcome.data or {}).get("module")
        outcome.failed = "" if named == "2" else f"it names module {named!r}, and '2' is wrong"
    return outcome


def lost(session: Session, step: Step) -> Outcome:
    """Kill a rank of a run that keeps its steps in memory, in each way; ``data``: what that took."""
    command = [sys.executable, "tests/lost_seconds.py", *(["--small"] if session.small else [])]
    outcome, log = session.run(step.name, command, step.limit)
    outcome.data = {"printed": [line for line in log.read_text().splitlines() if line.strip()][-20:]}
    return outcome


def calibration(session: Session, step: Step) -> Outcome:
    """Measure the device; ``data``: the hardware file."""
    file = session.out / "here.toml"
    file.unlink(missing_ok=True)
    command = [*([sys.executable, "-c", SMALL_SIZES] if session.small else _trueshard()), "plan", "calibrate", file]
    outcome, _ = session.run(step.name, command, step.limit)
    outcome.data = file.read_text() if file.exists() else None
    return outcome


def rehearsal(session: Session, step: Step) -> Outcome:
    """Run rank 0 of each job; ``data``: forecast and measured figures."""
    result = Outcome(step.name, data={})
    for name, (fields, options) in REHEARSED.items():
        folder = session.out / re.sub(r"\W", "_", name)
        folder.mkdir(exist_ok=True)
        fields = _SMALL if session.small else fields
        (folder / "config.json").write_text(json.dumps(_LLAMA | _MORE | fields))
        shorter = ["--sequence", "128"] if session.small else []  # of an option that is given twice, the last holds
        words = [*shorter, "--param-dtype", "bf16", "--reshard-after-forward", "default", "--json"]
        if "--activation-checkpointing" not in options:
            words += ["--activation-checkpointing", "none"]
        if (session.out / "here.toml").exists():
            words += ["--hardware", str(session.out / "here.toml")]
        options = [word for word in options if not (EMULATED and word == "--compile")]
        command = _trueshard("plan", "rehearse", folder, *options, *words)
        outcome, log = session.run(f"{step.name} {name}", command, step.limit / len(REHEARSED))
        result.seconds += outcome.seconds
        try:
            text = log.read_text()
            result.data[name] = json.loads(text[text.index("{") : text.rindex("}") + 1])["rehearsal"]
        except (ValueError, KeyError):
            outcome.failed = outcome.failed or "it printed no figures"
        if outcome.failed:
            result.failed = f"{name}: {outcome.failed}"
    return result


def learning(session: Session, step: Step) -> Outcome:
    """Train by reinforcement, and take the mean seconds of each phase from what the run wrote."""
    folder = Path(tempfile.mkdtemp(dir=session.out))
    steps = 4 if session.small else 20
    settings = [f"run.dir={folder / 'run'}", f"train.steps={steps}", "evaluation=", "schedule.decay=constant"]
    words = [word for setting in settings for word in ("--set", setting)]
    outcome, _ = session.run(step.name, _trueshard("train", ROOT / "examples/grpo.toml", *words), step.limit)
    lines = [
        json.loads(line) for file in folder.glob("run/metrics*.jsonl") for line in file.read_text().splitlines() if line
    ]
    phases = sorted({key for line in lines for key in line if key.startswith("seconds")})
    later = lines[len(lines) // 2 :]
    outcome.data = {key: sum(line.get(key, 0.0) for line in later) / max(1, len(later)) for key in phases}
    shutil.rmtree(folder, ignore_errors=True)
    return outcome


def memory(session: Session, step: Step) -> Outcome:
    """Let a run ask for more memory than there is, and see whether it names what fits and goes on with that."""
    folder = Path(tempfile.mkdtemp(dir=session.out))
    settings = {
        "run.dir": folder / "run",
        "train.on_oom": "tighten",
        "train.steps": 2,
        "train.sequence_length": 128 if session.small else 2048,
        "train.batch_size": 64 if EMULATED else 4096 if session.small else 2048,
        "train.checkpoint_every": "",
        "model.fields.max_position_embeddings": 2048,
    }
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    scarce = {"EMULATED_CUDA_MEMORY": str(SCARCE)} if EMULATED else {}
    command = _trueshard("train", ROOT / "src/trueshard/train/demo.toml", *words)
    outcome, log = session.run(step.name, command, step.limit, **scarce)
    said = [line.strip()[:300] for line in log.read_text(errors="replace").splitlines() if "memory" in line]
    outcome.data = {"said": said[-6:]}
    if not outcome.failed and not any("ran out of memory" in line for line in said):
        outcome.failed = "it did not run out of memory, so nothing was shown; ask for more"
    shutil.rmtree(folder, ignore_errors=True)
    return outcome


def measured(module: str, name: str, *words: str) -> Callable[[Session, Step], Outcome]:
    def run(session: Session, step: Step) -> Outcome:
        return session.measure(step.name, module, step.limit, name, *words)

    return run


STEPS: Sequence[Step] = (
    Step("contract", 360, contract),
    Step("verify", 480, verified),
    Step("speed 1B", 300, measured("measures", "speed", "1B")),
    Step("cost", 240, measured("measures", "cost")),
    Step("determinism", 240, measured("measures", "determinism")),
    Step("optimizers", 240, measured("measures", "optimizers")),
    Step("checkpoint", 240, measured("measures", "checkpoint")),
    Step("localised", 240, localised),
    Step("snapshot", 180, measured("measures", "snapshot")),
    Step("bandwidth", 120, measured("several", "bandwidth"), gpus=2),
    Step("axes", 420, measured("several", "axes"), gpus=2),
    Step("calibration", 180, calibration),
    Step("rehearsal", 420, rehearsal),
    Step("weights", 120, measured("measures", "weights")),
    Step("learning", 240, learning),
    Step("out of memory", 240, memory),
    Step("killed rank", 180, measured("several", "killed"), gpus=2),
    Step("hung rank", 300, measured("several", "hung"), gpus=2),
    Step("lost process", 300, lost, gpus=2),
    Step("speed 8B", 420, measured("measures", "speed", "8B")),
    Step("releases", 360, releases),
)


def _trueshard(*words: str | Path) -> list[str | Path]:
    return [sys.executable, "-m", "trueshard", *words]
