# ruff: noqa: RUF001
"""What `trueshard plan` prints, as text and as JSON, and how two plans differ."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

import studies
from messages import lacking
from trueshard.planner import ledger
from trueshard.planner.report.compare import collapse, diff
from trueshard.planner.report.summary import as_json, duration, pareto, text, time_parts, verdict, worst_error
from trueshard.planner.timeline import Span
from trueshard.planner.workload import Alternative, StepPhase, Study
from trueshard.plans import Forecast, MixedPrecision, Plan, Replicated
from trueshard.text import size


def names(*given: str) -> list[str]:
    return [str(row) for row in collapse(given, lambda name: name)]


def with_alternatives() -> Study:
    others = {"recompute full": (0.5, 0.8), "slower and larger": (1.1, 0.9), "reshard never": (1.2, 1.1)}
    return studies.with_alternatives(4, others | {"too large": (9, 2)}, too_large="too large")


def test_names_that_differ_in_a_number_are_one() -> None:
    assert names("embed", *(f"layers.{i}" for i in range(32)), "") == ["embed", "layers.0–31 ×32", "(root)"]
    assert names("layers.7") == ["layers.7"]
    assert names("a.0", "a.1", "a.5", "b.0.x", "b.1.x", "c.0 + d.0", "c.1 + d.1") == [
        "a.0–1,5 ×3",
        "b.0–1.x ×2",
        "c.0–1 + d.0–1 ×2",
    ]
    assert names("w1", "w2", "a.1 + b.2", "a.2 + b.3") == ["w1", "w2", "a.1 + b.2", "a.2 + b.3"]
    assert names(*(f"layers.{i}" for i in range(0, 16, 2))) == ["layers.0,2,4,…,14 ×8"]
    assert names("{x}.0", "{x}.1") == ["{x}.0–1 ×2"]


def test_the_text_has_the_figures_of_the_forecast() -> None:
    study = studies.study(layers=8)
    lines = text(study).splitlines()
    assert all(len(line) <= 100 for line in lines)
    words = [line.split() for line in lines]
    assert lines[0] == "a hand-made model on 8 × h100"
    assert lacking(lines[1], "bfloat16", "float32") == []
    (blocks,) = [row for row in words if row[:2] == ["model.layers.0–6", "×7"]]
    assert blocks[2:8] == ["201,326,592", "768.0", "MiB", "float32", "yes", "none"]
    use = ledger.by_unit(study.trace)
    together = sum(use[f"model.layers.{i}"].bytes_received for i in range(7))
    assert blocks[-2:] == [f"{together / 2**30:.1f}", "GiB"]
    (last,) = [row for row in words if row[:2] == ["model.layers.7", "201,326,592"]]
    assert last[5] == "no"
    forecast = study.forecast
    live = next(row for row in words if row[:1] == ["live"])
    assert live[1:3] == [f"{forecast.peak_live_bytes / 2**30:.1f}", "GiB"]
    assert next(row for row in words if row[:1] == ["MFU"])[1] == f"{forecast.mfu:.1%}"
    assert next(row for row in words if row[:1] == ["tokens/s"])[1] == f"{forecast.tokens_per_second_per_rank:,.0f}"
    assert f"  - {study.reasons[0]}" in lines
    assert "  - model.layers.0–7 ×8: a repeated block." in lines
    assert f"  - {study.assumptions[0]}" in lines


def test_the_text_says_whether_it_fits_and_by_how_much() -> None:
    study = studies.study()
    tight = dataclasses.replace(
        study.forecast, budget_bytes=1 << 30, peak_reserved_bytes=(3 << 30) + (1 << 29), fits=False
    )
    (line,) = [line for line in text(dataclasses.replace(study, forecast=tight)).splitlines() if "not fit" in line]
    assert "2.5 GiB" in line
    loose = dataclasses.replace(tight, budget_bytes=5 << 30, fits=True)
    (line,) = [line for line in text(dataclasses.replace(study, forecast=loose)).splitlines() if "fits" in line]
    assert "1.5 GiB" in line


def test_a_tight_answer_says_how_far_forecasts_of_its_kind_were_off() -> None:
    forecast = dataclasses.replace(studies.study().forecast, budget_bytes=1000, peak_reserved_bytes=997)
    for axes, error in (({"shard": 1}, "one axis"), ({"shard": 1, "tensor": 1}, "several axes")):
        tight = dataclasses.replace(forecast, received_by_axis=axes)
        worst = worst_error(tight)
        assert worst == published_errors()[error]
        assert lacking(verdict(tight), "0.3%", f"{worst:.0%}", size(997 / (1 - worst))) == []
        loose = dataclasses.replace(tight, peak_reserved_bytes=int(1000 * (1 - worst)))
        assert verdict(loose) == f"fits, {size(1000 - loose.peak_reserved_bytes)} to spare"


def published_errors() -> dict[str, float]:
    """The worst errors of the page's table of reserved memory by which a run took more than its forecast, by kind."""
    page = (Path(__file__).parent.parent / "docs" / "planner.md").read_text(encoding="utf-8")
    rows = page.partition("**Reserved memory**")[2].partition("**Live memory**")[0]
    worst = {"one axis": 0.0, "several axes": 0.0}
    for row in (line.split("|") for line in rows.splitlines() if "%" in line):
        kind = "several axes" if re.search(r"\b[TCPE]P \d", row[3]) else "one axis"
        worst[kind] = max(worst[kind], round(-float(row[6].strip(" %")) / 100, 3))
    return worst


def test_what_is_offloaded_is_told_for_a_node() -> None:
    study = studies.study()
    forecast = dataclasses.replace(study.forecast, host_bytes=600 << 30, host_budget_bytes=64 << 30, fits=False)
    shown = text(dataclasses.replace(study, forecast=forecast))
    (line,) = [line for line in shown.splitlines() if "on the host" in line]
    assert lacking(line, "600.0 GiB", "4.7 TiB", "512.0 GiB", "does not fit", "--host-memory") == []
    assert forecast.lacking_bytes == 536 << 30


def test_an_optimizer_on_the_cpu_is_not_called_the_issuing_of_work() -> None:
    study = studies.study()
    step = study.timeline.seconds
    spans = [*study.timeline.spans, Span("host", step, step + 2, "aten._foreach_add_", "optimizer", "", 0)]
    line = dataclasses.replace(study.timeline, spans=spans, host_seconds=2.5, seconds=step + 2.5)
    forecast = dataclasses.replace(study.forecast, step_seconds=step + 2.5)
    parts = {
        name: (seconds, words)
        for name, seconds, words in time_parts(dataclasses.replace(study, timeline=line, forecast=forecast))
    }
    assert parts["optimizer"][0] == pytest.approx(2)
    assert "CPU" in parts["optimizer"][1]
    assert parts["host"][0] == pytest.approx(0.5)


def test_long_names_stay_within_the_width() -> None:
    study = studies.study(layers=1)
    long = dataclasses.replace(study.plan.units[1], name="model." + "very_long." * 20 + "block")
    wide = dataclasses.replace(
        long,
        parameters=1_050_681_344_000,
        bytes=4 * 1_050_681_344_000,
        trainable=0,
        dtype="bfloat16+float32",
        reshard_after_forward=1024,
        activation_checkpointing="selective",
    )
    many = [dataclasses.replace(wide, name=f"model.{'tower.' * 8}layers.{number}") for number in range(126)]
    plan = dataclasses.replace(
        study.plan,
        units=(*study.plan.units, long, *many),
        replicated=(Replicated("scale." * 30, 1, "it has no dimension"),),
    )
    forecast = dataclasses.replace(study.forecast, peak_unit=long.name, model="m" * 200)
    phases = (StepPhase("generate", 1 << 40, 1234.5, {"key and value cache " * 4: 1 << 40}, ("a note " * 20,)),)
    other = Alternative("replicas " * 20, forecast)
    output = text(
        dataclasses.replace(
            study, plan=plan, forecast=forecast, reasons=("word " * 80,), phases=phases, alternatives=[other]
        )
    )
    assert max(len(line) for line in output.splitlines()) <= 100
    assert lacking(output, "×126", "to 1024 ranks", "selective (frozen)", "1,050,681,344,000") == []


def test_json_has_every_figure_and_a_plan_that_can_be_given_back() -> None:
    study = with_alternatives()
    result: dict[str, Any] = json.loads(json.dumps(as_json(study)))
    for field in dataclasses.fields(Forecast):
        assert result[field.name] == getattr(study.forecast, field.name)
    assert Plan.from_json(json.dumps(result["plan"])) == study.plan
    assert [unit["name"] for unit in result["units"]] == [unit.name for unit in study.plan.units]
    unit = result["units"][1]
    assert (unit["parameters"], unit["reshard_after_forward"], unit["activation_checkpointing"]) == (
        201_326_592,
        True,
        "none",
    )
    assert sum(each["bytes_at_peak"] for each in result["units"]) == result["peak_live_bytes"]
    assert sum(each["bytes_received"] for each in result["units"]) == result["bytes_received_per_step"]
    assert sum(each["flops"] for each in result["units"]) == result["flops_per_step"]
    assert result["reasons"] == list(study.reasons)
    assert result["assumptions"] == list(study.assumptions)


def test_the_front_is_what_nothing_that_fits_beats() -> None:
    study = with_alternatives()
    result = as_json(study)
    assert [(each["words"], each["on_front"]) for each in result["alternatives"]] == [
        ("recompute full", True),
        ("slower and larger", False),
        ("reshard never", True),
        ("too large", False),
    ]
    assert result["on_front"]
    forecast = study.forecast
    assert pareto([forecast, forecast]) == [0]
    assert pareto([dataclasses.replace(forecast, fits=False)]) == []
    lines = text(study).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("4 other plans"))
    assert [line.split(maxsplit=3)[3].split() for line in lines[start + 3 :]] == [
        ["yes", "*", "recompute", "full"],
        ["yes", "*", "this", "plan"],
        ["yes", "slower", "and", "larger"],
        ["yes", "*", "reshard", "never"],
        ["no", "too", "large"],
    ]


def test_durations() -> None:
    assert [duration(seconds) for seconds in (0.0, 4.2e-5, 0.01234, 0.9999, 2.456, 1234.0)] == [
        "0.00 µs",
        "42.0 µs",
        "12.3 ms",
        "1.00 s",
        "2.46 s",
        "1,234 s",
    ]


def test_equal_plans() -> None:
    assert "equal" in diff(studies.plan(), studies.plan())


def test_what_differs_is_named() -> None:
    one = studies.plan(layers=8)
    units = tuple(
        dataclasses.replace(unit, reshard_after_forward=False, activation_checkpointing="full")
        if unit.kind == "block" and unit.reshard_after_forward
        else unit
        for unit in one.units
    )
    other = dataclasses.replace(
        one,
        units=units[1:],
        replicated=(Replicated("scale", 1, "0-dim"),),
        ranks=(2, 8),
        reshard_after_forward={"model.layers.*": "never"},
        mixed_precision=MixedPrecision("float16", "float32"),
    )
    output = diff(one, other).splitlines()
    assert lacking(output[4], "  model.embed_tokens: ", "first") == []
    assert lacking(output[7], "  scale: ", "second") == []
    assert output == [
        'reshard_after_forward: default → {"model.layers.*": "never"}',
        "mixed_precision.compute: bfloat16 → float16",
        "ranks: [8] → [2, 8]",
        "units:",
        output[4],
        "  model.layers.0–6 ×7: reshard_after_forward: true → false; activation_checkpointing: none → full",
        "replicated:",
        output[7],
    ]
    bare = dataclasses.replace(one, mixed_precision=None)
    assert "mixed_precision.compute: bfloat16 → null" in diff(one, bare)


@dataclasses.dataclass(frozen=True)
class Forecasted(Plan):
    """A plan that carries what it is expected to cost."""

    forecast: Forecast | None = None


def test_forecasts_are_compared_where_both_plans_have_one() -> None:
    forecast = studies.study().forecast
    slower = dataclasses.replace(
        forecast, step_seconds=forecast.step_seconds * 2, peak_by_kind={**forecast.peak_by_kind, "inputs": 0}
    )
    assert diff(Forecasted(forecast=forecast), Forecasted(forecast=slower)).splitlines() == [
        "forecast:",
        "  peak_by_kind.inputs: 128.0 KiB → 0 bytes (-100.0%)",
        f"  step_seconds: {forecast.step_seconds:.4g} → {slower.step_seconds:.4g} (+100.0%)",
    ]
    assert "equal" in diff(Forecasted(forecast=forecast), Forecasted())


def test_sizes_and_counts_are_easy_to_read() -> None:
    one = studies.plan(layers=1)
    unit = dataclasses.replace(one.units[0], parameters=one.units[0].parameters * 2, bytes=1 << 30)
    output = diff(one, dataclasses.replace(one, units=(unit, *one.units[1:])))
    assert "parameters: 131,072,000 → 262,144,000 (+100.0%); bytes: 500.0 MiB → 1.0 GiB (+104.8%)" in output
