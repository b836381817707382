"""Calibration: what it writes is read as hardware, and its figures follow from what the device did."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest
import torch

from trueshard.cli import main
from trueshard.planner import calibrate as calibrating
from trueshard.planner.calibrate import SMALL, Calibration, calibrate
from trueshard.planner.hardware import hardware

CPU = torch.device("cpu")
FIGURES = {"matmul", "attention", "memory", "kernel_seconds", "collective_seconds"}


def test_the_command_writes_a_device_that_the_planner_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.toml"
    assert main(["plan", "calibrate", str(file)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert {line.split()[0].partition(".")[2] for line in shown if line.startswith("eager.")} == FIGURES
    made, base = hardware(str(file)), hardware("cpu")
    assert (made.name, made.link_bandwidth) == ("mine", base.link_bandwidth)
    for figure in FIGURES:
        assert getattr(made.eager, figure) != getattr(base.eager, figure)


def test_rates_are_operations_over_the_time_they_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only products move: a second for each layer's forward."""
    now = 0.0
    original = torch.nn.functional.linear

    def linear(*given: torch.Tensor) -> torch.Tensor:
        nonlocal now
        now += 1.0
        return original(*given)

    def moment() -> float:
        nonlocal now
        now += 0.05
        return now

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    monkeypatch.setattr(time, "perf_counter", moment)
    found = calibrate(CPU, hardware("cpu"), sizes=dataclasses.replace(SMALL, seconds=2.0)).hardware
    products = 3 * 2 * 2 * SMALL.tokens * SMALL.hidden * SMALL.intermediate
    assert found.eager.matmul * found.peak("float32") == pytest.approx(products / 2, rel=0.03)
    assert found.eager.collective_seconds > 0.01


def test_a_rate_above_the_data_sheet_takes_its_place() -> None:
    modest = hardware("cpu", peak_flops={"float32": 1e6}, memory_bandwidth=1e3)
    found = calibrate(CPU, modest, sizes=dataclasses.replace(SMALL, seconds=0.01))
    made = found.hardware
    assert made.peak("float32") == found.measured["peak_flops.float32"] > 1e6
    assert max(made.eager.matmul, made.eager.attention) == made.eager.memory == 1.0


def test_what_is_not_measured_is_that_of_the_base(tmp_path: Path) -> None:
    told = Calibration(hardware("h100"), {"memory_bytes": 90, "eager.matmul": 0.5, "peak_flops.bfloat16": 2.0}, "GPU")
    file = tmp_path / "gpu.toml"
    file.write_text(told.toml())
    assert dataclasses.replace(hardware(str(file)), name="", source="", title="") == dataclasses.replace(
        hardware("h100", memory_bytes=90, eager={"matmul": 0.5}, peak_flops={"bfloat16": 2.0}),
        name="",
        source="",
        title="",
    )


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibrating, "calibrate", None)
    for file, says in ((tmp_path / "none" / "a.toml", "no folder"), (tmp_path / "a.json", "a.toml")):
        assert main(["plan", "calibrate", str(file)]) == 2
        assert says in capsys.readouterr().err
