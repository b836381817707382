"""The page of a study: one file that loads nothing, and in headless Chromium draws it, answers, and can be read."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import chromium
import studies
from studies import Writer
from trueshard.files import replace_text
from trueshard.planner import ledger
from trueshard.planner.ledger import Series
from trueshard.planner.report import page
from trueshard.planner.timeline import Gap, Span, Timeline
from trueshard.planner.trace import KINDS, Allocation, Communication, EventPlace, Free, Kernel, Trace
from trueshard.planner.workload import Study

in_a_browser = pytest.mark.skipif(chromium.PROGRAM is None, reason="needs Chromium")


def with_alternatives(layers: int = 8) -> Study:
    """This plan, one on the front that is smaller, one that is beaten, one that does not fit."""
    others = {"recompute full": (0.5, 0.8), "beaten": (0.9, 0.7), "reshard never": (1.9, 1.1)}
    study = studies.with_alternatives(layers, others, too_large="reshard never")
    budget = study.forecast.peak_reserved_bytes + (8 << 30)
    alternatives = [
        dataclasses.replace(other, forecast=dataclasses.replace(other.forecast, budget_bytes=budget))
        for other in study.alternatives
    ]
    forecast = dataclasses.replace(study.forecast, budget_bytes=budget, fits=True)
    return dataclasses.replace(study, forecast=forecast, alternatives=alternatives)


def data_of(text: str) -> dict[str, Any]:
    result = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert result
    return json.loads(result[1])  # type: ignore[no-any-return]


def expanded(runs: list[int], count: int) -> np.ndarray:
    values = np.zeros(count, np.int64)
    for index, value in zip(runs[::2], runs[1::2], strict=True):
        values[index:] = value
    return values


# The file


def test_it_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "plan.html"
    replace_text(target, page.page(studies.study()))
    first = target.read_text(encoding="utf-8")
    assert first.startswith("<!doctype html>")
    assert first.rstrip().endswith("</html>")
    with pytest.raises(AttributeError):
        replace_text(target, page.page(dataclasses.replace(studies.study(), forecast=None)))  # type: ignore[arg-type]
    assert target.read_text(encoding="utf-8") == first
    assert [file.name for file in tmp_path.iterdir()] == ["plan.html"]
    with pytest.raises(FileNotFoundError):
        replace_text(tmp_path / "nowhere" / "plan.html", page.page(studies.study()))


def test_names_are_data_and_never_markup() -> None:
    study = studies.study()
    forecast = dataclasses.replace(study.forecast, model="</script><script>alert(1)</script>$style")
    text = page.page(dataclasses.replace(study, forecast=forecast))
    assert "<script>alert" not in text
    assert text.count("</script>") == 2
    assert data_of(text)["headline"].startswith("</script><script>alert(1)</script>$style on 8")


def test_nothing_in_it_points_elsewhere() -> None:
    text = page.page(with_alternatives())
    addresses = set(re.findall(r"(?:https?:)?//[a-z][\w.]+\.[a-z]{2,}[\w/]*", text))
    assert addresses <= {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in text
    assert not re.search(r"<(?:img|iframe|link(?! rel=\"icon\" href=\"data:,\"))|@import|url\(", text)


def test_the_curve_is_exact_at_what_is_kept() -> None:
    study = studies.study()
    memory = data_of(page.page(study))["memory"]
    live = ledger.curve(study.trace)
    count = len(memory["seconds"])
    assert count == memory["changes"] == len(live.total.positions)
    for key in ("kinds", "units"):
        added = sum(expanded(part["bytes"], count) for part in memory[key])
        assert np.array_equal(added, live.total.bytes)
    assert live.total.bytes[memory["peak"]] == study.forecast.peak_live_bytes
    assert memory["seconds"] == sorted(memory["seconds"])


def test_many_units_are_put_together_with_their_neighbours() -> None:
    study = studies.study(layers=126, kernels=2)
    units = data_of(page.page(study))["memory"]["units"]
    assert len(units) <= page.BANDS
    assert units[0]["name"] == "model.embed_tokens, model.layers.0–2"  # noqa: RUF001
    count = len(data_of(page.page(study))["memory"]["seconds"])
    assert max(sum(expanded(unit["bytes"], count) for unit in units)) == study.forecast.peak_live_bytes


@pytest.mark.rest
def test_a_long_step_makes_a_light_page() -> None:
    writer = Writer()
    kept: list[int] = []
    spans = []
    for number in range(40_000):
        writer.at("forward" if number < 20_000 else "backward", f"model.layers.{number * 126 // 40_000}")
        kept.append(writer.take(1000 + number * 7919 % 100_000, KINDS[number % len(KINDS)], what=f"op{number % 50}"))
        position, place, start = writer.compute("aten.mm", 10), writer.place, number * 1e-4
        spans.append(Span("compute", start, start + 9e-5, "aten.mm", place.phase, place.unit, position))
        if len(kept) > 500:
            writer.give(kept.pop(number * 31 % 500))
    time = Timeline(spans, 6.0, 5.4, 0.6)
    forecast = studies.forecast(writer.trace, time)
    study = Study(studies.plan(126), forecast, writer.trace, time)
    text = page.page(study)
    assert len(text.encode()) < 1_500_000
    memory = data_of(text)["memory"]
    total = sum(expanded(part["bytes"], len(memory["seconds"])) for part in memory["kinds"])
    assert total[memory["peak"]] == max(total) == forecast.peak_live_bytes


def test_the_parts_of_a_step_add_up_to_it() -> None:
    study = studies.study()
    waiting = study.timeline.exposed_seconds
    line = dataclasses.replace(study.timeline, host_seconds=0.25, straggling_seconds=0.75)
    forecast = dataclasses.replace(
        study.forecast, step_seconds=line.compute_seconds + waiting + 1.0, exposed_communication_seconds=waiting
    )
    data = data_of(page.page(dataclasses.replace(study, timeline=line, forecast=forecast)))
    parts = {part["name"]: part["seconds"] for part in data["parts"]}
    assert sum(parts.values()) == pytest.approx(data["seconds_of_step"], rel=1e-9) == forecast.step_seconds
    assert (parts["host"], parts["ranks"]) == pytest.approx((0.25, 0.75))
    assert parts["waiting"] == pytest.approx(waiting)


# What a drawing leaves out, and what it never does


def test_thinning_keeps_the_extremes_of_every_bucket() -> None:
    random = np.random.default_rng(0)
    values = random.integers(0, 10**9, 10_000)
    values[[1234, 8765]] = 10**10, -1
    curve = Series(np.arange(10_000) * 3, values)
    kept = page.positions(curve, 50)
    assert len(kept) <= 102
    assert {0, 1234 * 3, 8765 * 3, 9999 * 3} <= set(kept.tolist())
    for start in range(0, 10_000, 200):
        bucket = values[start : start + 200]
        mine = curve.at(kept[(kept >= start * 3) & (kept < (start + 200) * 3)])
        assert bucket.max() in mine
        assert bucket.min() in mine
    assert page.positions(curve, 5000) is curve.positions


def test_runs_say_where_a_sequence_changes() -> None:
    assert page.runs(np.array([5, 5, 7, 7, 7, 0])) == [0, 5, 2, 7, 5, 0]


def test_memory_is_drawn_when_the_compute_stream_gets_there() -> None:
    place = EventPlace("forward", "a")
    trace = Trace(
        [
            Allocation(place, 0, 8),
            Kernel(place, "aten.mm", 1, 0, 0, ""),
            Allocation(place, 1, 8),
            Kernel(place, "aten.mm", 1, 0, 0, ""),
            Free(place, 0, 8),
        ]
    )
    timeline = Timeline(
        [Span("compute", 0.1, 0.5, "mm", "forward", "a", 1), Span("compute", 0.5, 0.9, "mm", "forward", "a", 3)], 1.0
    )
    positions = ledger.curve(trace).total.positions
    assert page.seconds_at(timeline, positions).tolist() == [0.0, 0.0, 0.5, 0.9]


def test_short_spans_are_put_together_and_stay_as_busy() -> None:
    place = EventPlace("forward", "a")
    trace = Trace([Kernel(place, "aten.mm", 1, 0, 0, "", recomputed=i >= 900) for i in range(1000)])
    names = ["aten.mm" if i % 10 else "aten.mul" for i in range(1000)]
    spans = [
        Span("compute", i * 1e-3, i * 1e-3 + 5e-4, name, "forward", f"layers.{i // 100}", i)
        for i, name in enumerate(names)
    ]
    spans.append(Span("all_gather", 0.0, 0.5, "all_gather", "forward", "layers.0", 1000))
    trace.events.append(Communication(place, "all_gather", "all_gather", 8, 1, 7, 8, "float32"))
    timeline = Timeline(spans, 1.0)
    compute, gathers = page.lanes(trace, timeline, limit=50)
    assert len(compute["spans"]) <= 50
    assert sum(span[2] for span in compute["spans"]) == pytest.approx(0.5)
    assert sum(span[3] for span in compute["spans"]) == 1000
    assert compute["units"] == [f"layers.{i}" for i in range(10)]
    assert compute["groups"] == ["forward", "recompute"]
    assert compute["names"] == ["aten.mm"]
    assert (gathers["stream"], gathers["spans"]) == ("all_gather", [[0.0, 0.5, 0.5, 1, 0, 0, 0]])
    assert len(page.lanes(trace, timeline, limit=2000)[0]["spans"]) == 1000


# In a browser


GAPS = [Gap("waiting", 0.0, 0.001), Gap("host", 0.001, 0.002), Gap("ranks", 0.003, 0.004)]
POINTS = {
    "axes": [{"name": "ranks", "values": [4, 8]}, {"name": "sequence", "values": [1024, 2048, 4096]}],
    "start": [1, 1],
    "points": [
        *({"peak_live_bytes": n << 30, "peak_reserved_bytes": n << 30, "budget_bytes": 5 << 30, "fits": n < 5,
           "peak_by_kind": {"parameters": n << 30}, "step_seconds": 1.0, "tokens_per_second_per_rank": 100.0 * n,
           "mfu": 0.4, "exposed_communication_seconds": 0.1} for n in range(1, 6)),
        {"problem": "ranks=8 is too many"},
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[Study, Path]:
    study = with_alternatives()
    study = dataclasses.replace(study, timeline=dataclasses.replace(study.timeline, gaps=GAPS))
    file = tmp_path_factory.mktemp("page") / "plan.html"
    replace_text(file, page.page(study, POINTS))
    return study, file


@pytest.fixture
def tab(browser: chromium.Page, shown: tuple[Study, Path]) -> chromium.Page:
    browser.resize(1400, 1400)
    browser.open(shown[1])
    return browser


def middle(tab: chromium.Page, of: str) -> tuple[float, float]:
    x, y = tab.run(
        f"(() => {{ const e = document.querySelector({of!r}); e.scrollIntoView({{block: 'center'}});"
        "const b = e.getBoundingClientRect(); return [b.left + b.width / 2, b.top + b.height / 2]; })()"
    )
    return x, y


def gib(count: float) -> str:
    value = count / 2**30
    return f"{value:.2f} GiB" if value < 10 else f"{value:.1f} GiB"


@in_a_browser
def test_it_renders_without_an_error_or_a_request(tab: chromium.Page, shown: tuple[Study, Path]) -> None:
    study, file = shown
    assert tab.run("document.title") == "a hand-made model on 8 × h100"
    colours = tab.run(
        "(() => { const c = document.getElementById('step');"
        "const all = c.getContext('2d').getImageData(0, 0, c.width, c.height).data; const found = {};"
        "for (let i = 0; i < all.length; i += 4)"
        "{ const k = all[i] + ',' + all[i + 1] + ',' + all[i + 2]; found[k] = (found[k] || 0) + 1; } return found; })()"
    )
    for kind in ("activations", "parameters", "optimizer"):
        colour = tab.run(f"solid('var(--{kind})')")
        red, green, blue = re.findall(r"\d+", colour)[:3]
        assert colours.get(f"{red},{green},{blue}", 0) > 1000, kind
    assert tab.run("document.querySelectorAll('#scatter circle').length") == 4
    assert gib(study.forecast.peak_live_bytes) in tab.run("TOTAL[memory.peak] && bytes(TOTAL[memory.peak])")
    rows = tab.run("[...document.querySelectorAll('#units tbody tr')].map((row) => row.cells[0].textContent)")
    assert rows == ["model.embed_tokens", "model.layers.0–6 ×7", "model.layers.7", "(root)"]  # noqa: RUF001
    assert tab.errors == []
    assert tab.requests == [file.as_uri()]


@in_a_browser
def test_a_request_would_be_refused(tab: chromium.Page) -> None:
    outcome = tab.run("fetch('https://example.org/').then(() => 'went out', () => 'refused')")
    assert outcome == "refused"
    assert any("Content Security Policy" in error for error in tab.errors)


@in_a_browser
def test_hovering_the_memory_shows_its_figures(tab: chromium.Page, shown: tuple[Study, Path]) -> None:
    study = shown[0]
    middle(tab, "#step")
    at = tab.run(
        "(() => { const b = canvas.getBoundingClientRect();"
        "return [b.left + xOf(AT[memory.peak]) + 0.5, b.top + yOf(TOTAL[memory.peak]) + 60]; })()"
    )
    tab.point(*at)
    message = tab.run("document.getElementById('step-tip').innerText")
    peak = ledger.peak(study.trace)
    assert f"{gib(peak.bytes)} live" in message
    assert gib(peak.by_kind["activations"]) in message
    assert gib(peak.by_kind["optimizer"]) in message
    assert tab.run("document.getElementById('step-tip').hidden") is False
    tab.point(2, 2)
    assert tab.run("document.getElementById('step-tip').hidden") is True


@in_a_browser
def test_hovering_a_stream_shows_what_runs(tab: chromium.Page) -> None:
    middle(tab, "#step")
    for lane, words in enumerate(("aten.m", "all_gather", "reduce_scatter")):
        at = tab.run(
            f"(() => {{ const b = canvas.getBoundingClientRect(), s = data.lanes[{lane}].spans;"
            "const longest = s.reduce((a, c) => (c[1] - c[0] > a[1] - a[0] ? c : a));"
            f"return [b.left + xOf((longest[0] + longest[1]) / 2), b.top + LANES_TOP + LANE * ({lane} + 0.5)]; }})()"
        )
        tab.point(*at)
        message = tab.run("document.getElementById('step-tip').innerText")
        assert words in message
        assert re.search(r"[\d.]+ ms, from [\d.]+ (ms|s)", message)


@in_a_browser
def test_memory_can_be_stacked_by_unit(tab: chromium.Page) -> None:
    def names() -> list[str]:
        buttons = "[...document.querySelectorAll('#memory-legend button')]"
        return list(tab.run(f"{buttons}.map((button) => button.children[1].textContent)"))

    assert set(names()) <= set(KINDS)
    tab.point(*middle(tab, ".switch input[value=units] + span"), "mousePressed", button="left", clickCount=1)
    tab.point(*middle(tab, ".switch input[value=units] + span"), "mouseReleased", button="left", clickCount=1)
    assert names() == ["model.embed_tokens", *(f"model.layers.{i}" for i in range(8)), "(root)"]


@in_a_browser
def test_hovering_an_alternative_shows_its_figures(tab: chromium.Page, shown: tuple[Study, Path]) -> None:
    labels = tab.run("[...document.querySelectorAll('#scatter circle')].map((c) => c.getAttribute('aria-label'))")
    forecast = shown[0].alternatives[0].forecast
    assert sum(label.endswith("does not fit") for label in labels) == 1
    smaller = next(label for label in labels if label.startswith("recompute full"))
    tab.point(*middle(tab, f'#scatter circle[aria-label="{smaller}"]'))
    message = tab.run("document.getElementById('scatter-tip').innerText")
    assert gib(forecast.peak_reserved_bytes) in message
    assert f"{forecast.tokens_per_second_per_rank:,.0f}" in message
    assert "Pareto" in message
    plans = tab.run("[...document.querySelectorAll('#front tbody tr')].map((row) => row.cells[1].textContent)")
    assert plans == ["recompute full", "This plan"]


@pytest.mark.rest
@in_a_browser
def test_the_keyboard_reaches_all_of_it(tab: chromium.Page, shown: tuple[Study, Path]) -> None:
    tab.run("document.getElementById('step').focus()")
    tab.press("p")
    message = tab.run("document.getElementById('step-say').textContent")
    assert f"{gib(shown[0].forecast.peak_live_bytes)} live" in message
    assert tab.run("view.to - view.from") <= tab.run("SECONDS") / 8 * 1.001
    before = tab.run("view.cursor")
    tab.press("ArrowRight")
    assert tab.run("view.cursor") > before
    assert tab.run("document.getElementById('step-say').textContent") != message
    tab.press("0")
    assert tab.run("[view.from, view.to - SECONDS]") == [0, 0]
    reached = set()
    tab.run("document.activeElement.blur()")
    for _ in range(45):
        tab.press("Tab")
        reached.add(tab.run("document.activeElement.id || document.activeElement.tagName"))
    assert {"step", "zoom-in", "zoom-peak", "circle", "BUTTON", "INPUT"} <= reached


@in_a_browser
def test_dragging_zooms_and_a_double_click_shows_all(tab: chromium.Page) -> None:
    x, y = middle(tab, "#step")
    y -= 80
    tab.point(x - 100, y, "mousePressed", button="left", clickCount=1)
    tab.point(x + 100, y, button="left", buttons=1)
    tab.point(x + 100, y, "mouseReleased", button="left", clickCount=1)
    share = tab.run("(view.to - view.from) / SECONDS")
    assert share == pytest.approx(200 / tab.run("inner()"), rel=0.02)
    for count in (1, 2):
        tab.point(x, y, "mousePressed", button="left", clickCount=count)
        tab.point(x, y, "mouseReleased", button="left", clickCount=count)
    assert tab.run("(view.to - view.from) / SECONDS") == 1


@in_a_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_entry_of_a_legend_has_a_colour_of_its_own(tab: chromium.Page, scheme: str) -> None:
    tab.scheme(scheme)
    for legend in ("#parts-legend", "#memory-legend", "#lane-legend", "#grid-legend"):
        result = tab.run(
            f"[...document.querySelectorAll('{legend} > div > *')].map((each) => [each.innerText,"
            "getComputedStyle(each.querySelector('.swatch')).backgroundColor])"
        )
        colours = [colour for _, colour in result]
        assert colours, legend
        assert "rgba(0, 0, 0, 0)" not in colours, result
        assert len(set(colours)) == len(colours), result
    message = tab.run("document.getElementById('lane-legend').innerText")
    for words in ("waiting for communication", "waiting for the host", "waiting for other ranks"):
        assert words in message


@in_a_browser
def test_sliders_show_the_points_that_were_simulated(tab: chromium.Page) -> None:
    def slide(axis: str, to: int) -> str:
        tab.run(
            f"(() => {{ const e = document.getElementById('slide-{axis}'); e.value = {to};"
            "e.dispatchEvent(new Event('input')); })()"
        )
        return str(tab.run("document.getElementById('grid-say').textContent"))

    assert tab.run("document.getElementById('grid-say').textContent").startswith("5.00 GiB live")
    assert "does not fit" in slide("sequence", 1)
    assert slide("ranks", 0).startswith("2.00 GiB live, 2.00 GiB reserved of 5.00 GiB: fits. 200 tokens a second")
    assert slide("sequence", 2).startswith("3.00 GiB live")
    assert slide("ranks", 1) == "No forecast: ranks=8 is too many"


@in_a_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_two_plans_stand_on_one_page(browser: chromium.Page, tmp_path: Path, scheme: str) -> None:
    plan = dataclasses.replace(studies.plan(8), forecast=with_alternatives().forecast)
    assert plan.forecast is not None
    faster = dataclasses.replace(plan.forecast, step_seconds=plan.forecast.step_seconds / 2, microbatch=7)
    other = dataclasses.replace(plan, reshard_after_forward="never", forecast=faster)
    file = tmp_path / "compare.html"
    replace_text(file, page.comparison([("one", plan), ("two", other)]))
    browser.scheme(scheme)
    browser.resize(1280, 1000)
    browser.open(file)
    rows = browser.run(
        "[...document.querySelectorAll('#figures tbody tr')].map((row) => [...row.cells].map((c) => c.textContent))"
    )
    assert next(row for row in rows if row[0] == "Step")[3] == "-50.0%"
    settings = browser.run("document.getElementById('differing').innerText")
    assert "never" in settings
    assert "7" in settings
    widths = browser.run(
        "[...document.querySelectorAll('#time-bars .parts')].map((bar) => bar.children[0].style.width)"
    )
    assert len(widths) == 2
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    assert browser.run(chromium.CONTRAST) == []
    assert browser.errors == []
    with pytest.raises(ValueError, match="two has no forecast"):
        page.comparison([("one", plan), ("two", dataclasses.replace(plan, forecast=None))])


@in_a_browser
def test_nothing_is_cut_at_1280_pixels(tab: chromium.Page) -> None:
    tab.resize(1280, 1000)
    tab.settle()
    cut = "[...document.querySelectorAll('.scroll')].filter((e) => e.scrollWidth > e.clientWidth).map((e) => e.id)"
    assert tab.run(cut) == []


@in_a_browser
def test_tensors_are_sorted_by_the_column_that_is_clicked(tab: chromium.Page) -> None:
    def column(index: int) -> list[float]:
        rows = "[...document.querySelectorAll('#tensors tbody tr')]"
        result = tab.run(f"{rows}.map((row) => row.cells[{index}].innerText)")
        factor = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
        return [float(value.split()[0]) * factor[value.split()[1]] for value in result]

    assert column(2) == sorted(column(2), reverse=True)
    assert column(4) != sorted(column(4), reverse=True)
    tab.run("document.querySelectorAll('#tensors th button')[4].click()")
    assert column(4) == sorted(column(4), reverse=True)


@in_a_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 700, 380])
def test_it_can_be_read_in_light_and_dark_wide_and_narrow(tab: chromium.Page, scheme: str, width: int) -> None:
    tab.scheme(scheme)
    tab.resize(width, 1000)
    tab.settle()
    assert tab.run(chromium.CONTRAST) == []
    paper = sum(int(part) for part in re.findall(r"\d+", tab.run("getComputedStyle(document.body).backgroundColor")))
    assert (paper > 600) == (scheme == "light")
    assert tab.run("document.documentElement.scrollWidth <= innerWidth")
    assert tab.run("canvas.width") == tab.run("plot.clientWidth")
    assert tab.errors == []
