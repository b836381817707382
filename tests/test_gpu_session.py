"""What ``make gpu`` keeps when a step fails, hangs, or the budget ends."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import forks
from benchmarks.gpu import page
from benchmarks.gpu.__main__ import run
from benchmarks.gpu.profiles import joined
from benchmarks.gpu.session import ROOT, Outcome, Session
from benchmarks.gpu.steps import STEPS, Step, contract
from emulated_cuda import build
from emulated_cuda.running import run as run_emulated

MACHINE = {"gpus": [["A GPU", 2**36]], "torch": "2", "cuda": "13", "nccl": "2", "python": "3", "cores": 2}


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return Session(tmp_path, dict(os.environ), "cuda", True, 1e9, lambda session: None, machine=dict(MACHINE))


LEAVES = """
import json, os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open(os.environ["RESULT"], "w").write(json.dumps({"child": child.pid}))
print("so far", flush=True)
time.sleep(600)
"""


def test_a_step_that_hangs_is_killed_whole_and_keeps_what_it_had(session: Session) -> None:
    outcome, log = session.run("hangs", [sys.executable, "-c", LEAVES], 2)
    assert outcome.failed == "not done after 2 s"
    assert log.read_text() == "so far\n"
    child = Path("/proc", str(outcome.data["child"]), "stat")  # it had a session of its own
    assert not child.exists() or child.read_text().split()[2] == "Z"


def test_a_step_that_fails_says_its_last_line(session: Session) -> None:
    outcome, _ = session.run(
        "fails", [sys.executable, "-c", "print('a stray line'); raise SystemExit('no memory')"], 20
    )
    assert (outcome.failed, outcome.data) == ("no memory", None)


def test_each_step_is_kept_and_the_next_call_goes_on(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def works(_: Session, step: Step) -> Outcome:
        ran.append(step.name)
        return Outcome(step.name, 1.0, data={"figure": 0.5})

    def raises(_: Session, step: Step) -> Outcome:
        ran.append(step.name)
        raise ValueError("broken")

    table = (Step("one", 1, works), Step("two", 1, raises), Step("eight", 1, works, gpus=8), Step("three", 1, works))
    monkeypatch.setattr("benchmarks.gpu.steps.STEPS", table)
    run(session, None)
    assert ran == ["one", "two", "three"]
    figures = json.loads(session.file.read_text())
    assert [step["failed"] for step in figures["steps"]] == ["", "ValueError: broken", "", ""]
    again = Session(session.out, session.environment, "cuda", True, 1e9, session.write, machine=dict(MACHINE))
    again.resume()
    run(again, None)
    assert ran[3:] == ["two"]
    run(again, ["three"])
    assert ran[4:] == ["three"]
    other = Session(
        session.out, session.environment, "cuda", True, 1e9, session.write, machine=MACHINE | {"torch": "3"}
    )
    other.resume()
    assert other.outcomes == {}
    spent = Session(session.out, session.environment, "cuda", True, 0.0, session.write, machine=dict(MACHINE))
    assert {outcome.failed for outcome in run(spent, None)} == {"", "not begun: the budget is spent"}
    text = page.page_of(again)
    for part in (
        "mean nothing",
        "| two | 0 | ValueError: broken |",
        "| eight | 0 | needs 8 GPUs |",
        "| figure | 0.5 |",
    ):
        assert part in text


def test_a_report_that_was_cut_off_is_a_step_that_failed(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    report = str(session.out / "tests.xml")
    program = f"import pathlib, time; pathlib.Path({report!r}).write_text('<tests'); time.sleep(60)"

    def cut_off(name: str, *_: object, **__: object) -> Any:
        return Session.run(session, name, [sys.executable, "-c", program], 2)

    monkeypatch.setattr(session, "run", cut_off)
    assert contract(session, Step("contract", 2, contract)).failed == "not done after 2 s"


def test_what_nothing_hides_is_communication_apart_from_all_else() -> None:
    assert joined([(3, 5), (0, 2), (1, 2.5), (5, 6)]) == [(0, 2.5), (3, 6)]


@pytest.mark.rest
def test_steps_run_on_a_cpu_too(tmp_path: Path) -> None:
    """Those that run apart from the GPU's own: the contract, counted steps, a save, a killed rank."""
    only = ["contract", "cost", "checkpoint", "bandwidth", "killed rank"]
    assert set(only) <= {step.name for step in STEPS}
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--out", tmp_path, "--only", *only]
    ran = forks.run(command, cwd=ROOT, timeout=400)
    text = (tmp_path / "gpu.md").read_text()
    assert ran.returncode == 0, text
    assert re.search(r"\| contract \| \d+ \| [2-9]\d passed, 0 skipped \|", text)
    figures = {step["name"]: step["data"] for step in json.loads((tmp_path / "gpu.json").read_text())["steps"]}
    assert figures["checkpoint"]["resumed alike"] is True
    assert len(figures["checkpoint"]["steps after 2, s"]) == 10
    assert figures["cost"]["AdamW, fused"]["shard()"]["launches"] > 100
    assert figures["bandwidth"]["1 MiB"]["all-gather"] > 0
    assert 0 < figures["killed rank"]["seconds"] < figures["killed rank"]["limit"]


@pytest.mark.rest
@pytest.mark.timeout(1800)
@pytest.mark.skipif(build.compiler() is None, reason="needs a C++ compiler: install g++, or set CXX")
def test_all_steps_run_on_an_emulated_device(tmp_path: Path) -> None:
    """Tiny; what one device cannot show, or an emulated one, is left out and says why."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--small", "--out", str(tmp_path)]
    done = run_emulated(["env", "-u", forks.ADDRESS, *command], devices=1, cwd=ROOT)
    text = (tmp_path / "gpu.md").read_text()
    assert done.code == 0, text
    assert not done.faults
    ended = {step["name"]: step for step in json.loads((tmp_path / "gpu.json").read_text())["steps"]}
    assert list(ended) == ["environment", *(step.name for step in STEPS)]
    for step in STEPS:
        reason = (ended[step.name]["data"] or {}) if isinstance(ended[step.name]["data"], dict) else {}
        assert ("left out" in reason) == (step.gpus > 1 or step.name == "releases"), step.name
    assert "emulated CUDA device" in text.splitlines()[0]
    assert "seconds, rates and bytes on this page mean nothing" in text
    assert all("left out: inductor" in row["failed"] for row in ended["speed 8B"]["data"]["rows"] if row["compiled"])
    assert "ran out of memory" in str(ended["out of memory"]["data"])
