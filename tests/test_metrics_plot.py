"""`trueshard plot`: which runs, which points, the picture; and the page, read and tried in headless Chromium."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

import chromium
from messages import lacking, naming
from showing import assert_drawn, data_of, record, rewarded, write_run
from trueshard.errors import UserError
from trueshard.train.metrics.curves import (
    COLOURS,
    RunRecords,
    curve,
    half_life,
    page,
    picture,
    plot,
    read_runs,
    shown_panels,
    smoothed,
)

PLAIN = ["loss", "evaluation_loss", "grad_norm", "lr", "tokens_per_second", "mfu", "memory", "data_wait"]
in_a_browser = pytest.mark.skipif(chromium.PROGRAM is None, reason="needs Chromium")


def evaluated(step: int) -> dict[str, float]:
    return {"evaluation_loss": 3 + 1 / step, "evaluation_perplexity": 21.0} if step % 10 == 0 else {}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs of different length; the first has evaluations, MFU and a plan."""
    root = tmp_path_factory.mktemp("runs")
    full = [record(step, mfu=0.4, memory_planned=3 << 30, **evaluated(step)) for step in range(1, 101)]
    return [write_run(root / "one", full), write_run(root / "two", [record(step, lr=2e-5) for step in range(1, 61)])]


# Runs


def test_a_run_is_its_folder_or_its_file(two: list[Path]) -> None:
    runs = read_runs([two[0], two[1] / "metrics.jsonl"])
    assert [(run.name, len(run.records)) for run in runs] == [("one", 100), ("two", 60)]


def test_runs_of_one_name_are_told_apart_by_more_of_their_paths(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name / "run", [record(1)]) for name in ("a", "b")]
    assert [run.name for run in read_runs(folders)] == ["a/run", "b/run"]


def test_a_wrong_run_is_one_line_with_the_remedy(two: list[Path], tmp_path: Path) -> None:
    parent = two[0].parent

    def said(*paths: Path) -> str:
        with pytest.raises(UserError) as error:
            read_runs(paths)
        assert "\n" not in str(error.value)
        return str(error.value)

    assert lacking(said(parent / "tow"), parent / "tow", "'two'") == []
    assert lacking(said(parent), parent, "one, two") == []
    assert "twice" in said(two[0], two[0] / "metrics.jsonl")
    assert "no step yet" in said(write_run(tmp_path / "empty", []))
    damaged = write_run(tmp_path / "damaged", [record(1), record(2)])
    text = (damaged / "metrics.jsonl").read_text()
    (damaged / "metrics.jsonl").write_text(text.replace('"step": 1', "step"))
    assert lacking(said(damaged), "line 1", "JSON") == []


# Points


def test_a_short_run_is_drawn_step_by_step() -> None:
    points = curve([record(step) for step in range(1, 31)], "loss")
    assert points is not None
    assert points.step.tolist() == list(range(1, 31))
    assert points.mean.tolist() == [record(step)["loss"] for step in range(1, 31)]


def test_a_long_run_keeps_its_mean_and_its_extremes() -> None:
    values = np.random.default_rng(0).normal(size=10_007)
    values[[77, 5000]] = [50.0, -50.0]
    records = [record(step, loss=value) for step, value in enumerate(values.tolist(), start=1)]
    points = curve(records, "loss", points=100)
    assert points is not None
    assert len(points.step) == 100
    assert points.step[-1] == 10_007
    assert (points.low.min(), points.high.max()) == (-50, 50)
    assert points.count.sum() == 10_007
    assert (points.mean * points.count).sum() == pytest.approx(values.sum())


def test_what_is_not_finite_is_a_gap_and_counts_nothing() -> None:
    records = [record(step, loss=math.inf if step == 3 else 1.0) for step in range(1, 9)]
    whole, thinned = curve(records, "loss"), curve(records, "loss", points=4)
    assert whole is not None
    assert np.isnan(whole.mean).tolist() == [step == 3 for step in range(1, 9)]
    assert thinned is not None
    assert thinned.mean.tolist() == [1.0] * 4
    assert thinned.count.tolist() == [2, 1, 2, 2]
    assert curve([record(1, loss=math.nan)], "loss") is None


def test_smoothing_weighs_by_distance() -> None:
    points = curve([record(step, loss=float(step == 1001)) for step in range(1, 1102)], "loss")
    assert points is not None
    line = smoothed(points, 10)
    assert line[[990, 1010]] / line[1000] == pytest.approx([0.5, 0.5], rel=1e-3)
    assert line.sum() == pytest.approx(1, rel=0.01)


def test_smoothing_does_not_hold_a_steep_beginning_up() -> None:
    steep = curve([record(step, loss=1 / step) for step in range(1, 1000)], "loss")
    assert steep is not None
    assert smoothed(steep, 500)[[9, 99, 499]] * [10, 100, 500] == pytest.approx(1, rel=0.1)


def test_smoothing_keeps_gaps() -> None:
    points = curve([record(step, loss=math.nan if step == 3 else 1.0) for step in range(1, 9)], "loss")
    assert points is not None
    assert smoothed(points, 5).tolist() == pytest.approx([1, 1, math.nan, 1, 1, 1, 1, 1], nan_ok=True)


def test_smoothing_is_a_hundredth_of_the_longest_run() -> None:
    runs = [RunRecords("short", [record(1)] * 10), RunRecords("long", [record(1)] * 1000)]
    assert half_life(runs) == 10


# Panels


def test_a_run_with_a_reward_shows_that_first_and_its_loss_without_a_unit() -> None:
    panels = shown_panels([RunRecords("rl", [rewarded(step) for step in range(1, 31)])])
    keys = [panel.key for panel in panels]
    learned = ["length_mean", "entropy", "mismatch_mean", "kl_reference", "clipped_high", "grad_norm"]
    assert keys[:9] == ["reward", "evaluation_reward", "loss", *learned]
    by = dict(zip(keys, panels, strict=True))
    assert (by["loss"].title, by["loss"].unit) == ("Policy loss", "signed")
    assert (by["reward"].band, by["mismatch_mean"].dashed, by["clipped_high"].dashed) == (
        "reward_std",
        "mismatch_max",
        "clipped_low",
    )
    assert by["mismatch_mean"].log
    assert by["memory"].dashed == ""


def test_what_a_run_does_not_have_is_not_named() -> None:
    zeros = {"mismatch_mean": 0.0, "mismatch_max": 0.0}
    panels = shown_panels([RunRecords("rl", [record(1, reward=0.5, **zeros)])])
    by = {panel.key: panel for panel in panels}
    assert (by["reward"].band, by["reward"].note) == ("", "")
    assert not by["mismatch_mean"].log
    assert "entropy" not in by


# Files


@pytest.mark.rest
def test_one_run_s_curves_lie_in_its_folder(two: list[Path]) -> None:
    made = plot([two[0]])
    assert made == [two[0] / "curves.png", two[0] / "curves.html"]
    assert sorted(file.name for file in two[0].iterdir()) == ["curves.html", "curves.png", "metrics.jsonl"]


@pytest.mark.rest
def test_several_runs_curves_lie_here(two: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert [str(file) for file in plot(two)] == ["curves.png", "curves.html"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["curves.html", "curves.png"]


@pytest.mark.rest
def test_out_names_one_file_of_either_form(two: list[Path], tmp_path: Path) -> None:
    assert plot(two, tmp_path / "a.html")[0].read_text().startswith("<!doctype html>")
    assert plot(two, tmp_path / "a.PNG")[0].read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match=naming(".png", ".html")):
        plot(two, tmp_path / "a.svg")
    with pytest.raises(UserError, match=naming("no folder", "nowhere")):
        plot(two, tmp_path / "nowhere" / "a.png")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.PNG", "a.html"]


@pytest.mark.rest
def test_the_picture_has_every_run_s_colour(two: list[Path], tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture(read_runs(two)))
    assert_drawn(tmp_path / "a.png", 500, *COLOURS[:2])
    assert imread(tmp_path / "a.png").shape[1] == 1560


@pytest.mark.rest
def test_a_run_of_one_step_is_drawn(tmp_path: Path) -> None:
    assert len(plot([write_run(tmp_path / "one", [record(1)])])) == 2


# The page


def test_the_page_has_the_figures_and_points_nowhere(two: list[Path]) -> None:
    text = page(read_runs(two))
    assert {*re.findall(r"(?:https?:)?//[a-z][\w.]+\.[a-z]{2,}[\w/]*", text)} <= {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in text
    data = data_of(text)
    assert [panel["key"] for panel in data["panels"]] == PLAIN
    one, other = data["runs"]
    assert one["curves"]["loss"]["mean"] == pytest.approx([record(step)["loss"] for step in range(1, 101)])
    assert one["curves"]["evaluation_loss"]["step"] == list(range(10, 101, 10))
    assert one["best_evaluation_loss"] == pytest.approx(3.01)
    assert "evaluation_loss" not in other["curves"]
    assert other["curves"]["lr"]["mean"] == [2e-5] * 60


def test_names_are_data_and_never_markup(two: list[Path]) -> None:
    text = page([RunRecords("</script><script>alert(1)</script>$style", read_runs(two)[0].records)])
    assert "<script>alert" not in text
    assert data_of(text)["headline"] == "</script><script>alert(1)</script>$style"


@pytest.mark.rest
def test_a_long_run_makes_a_light_page() -> None:
    text = page([RunRecords("long", [record(step, **evaluated(step)) for step in range(1, 20_001)])])
    assert len(text.encode()) < 600_000


@pytest.fixture(scope="module")
def file(two: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plot(two, tmp_path_factory.mktemp("page") / "curves.html")[0]


@pytest.fixture
def tab(browser: chromium.Page, file: Path) -> chromium.Page:
    browser.resize(1400, 1400)
    browser.open(file)
    return browser


def at(tab: chromium.Page, chart: str, across: float, down: float = 0.5) -> tuple[float, float]:
    """Where a chart shows that value across, in the window."""
    x, y = tab.run(
        f"(() => {{ const c = charts.find((each) => each.panel.key === {chart!r});"
        "c.canvas.scrollIntoView({block: 'center'}); const b = c.canvas.getBoundingClientRect();"
        f"return [b.left + c.xOf({across}), b.top + b.height * {down}]; }})()"
    )
    return x, y


def tip(tab: chromium.Page, chart: str) -> str:
    element = f"charts.find((each) => each.panel.key === {chart!r}).tip"
    return str(tab.run(f"{element}.hidden ? '' : {element}.innerText"))


def choose(tab: chromium.Page, selector: str) -> None:
    tab.run(f"document.querySelector({selector!r}).click()")
    tab.settle()


@in_a_browser
def test_the_page_draws_every_run_without_an_error_or_a_request(tab: chromium.Page, file: Path) -> None:
    assert tab.run("document.title") == "2 runs"
    for number, chart in ((0, "loss"), (0, "evaluation_loss"), (0, "memory"), (1, "grad_norm"), (1, "lr")):
        red, green, blue = re.findall(r"\d+", tab.run(f"solid('var(--run-{number})')"))[:3]
        count = tab.run(
            f"(() => {{ const c = document.getElementById({chart!r});"
            "const all = c.getContext('2d').getImageData(0, 0, c.width, c.height).data; let n = 0;"
            f"for (let i = 0; i < all.length; i += 4) n += all[i] == {red} && all[i + 1] == {green}"
            f" && all[i + 2] == {blue}; return n; }})()"
        )
        assert count > 50, (number, chart)
    assert tab.errors == []
    assert tab.requests == [file.as_uri()]


@pytest.mark.rest
@in_a_browser
def test_rewards_have_a_band_and_figures_a_second_line(browser: chromium.Page, tmp_path: Path) -> None:
    before = {"step": 0, "evaluation_reward": 0.125}
    run = write_run(tmp_path / "rl", [before, *(rewarded(step, tokens=100 * step) for step in range(1, 61))])
    browser.resize(1280, 1400)
    browser.open(plot([run], tmp_path / "rl.html")[0])
    assert browser.run("charts.slice(0, 3).map((each) => each.panel.title)") == [
        "Reward",
        "Evaluation reward",
        "Policy loss",
    ]
    low, top = browser.run("[charts[0].low, charts[0].top]")
    assert low < rewarded(1)["reward"] - rewarded(1)["reward_std"]
    assert top > rewarded(60)["reward"] + rewarded(60)["reward_std"]
    browser.point(*at(browser, "reward", 30))
    assert "±" in tip(browser, "reward")
    browser.point(*at(browser, "mismatch_mean", 30))
    assert "largest 0.0" in tip(browser, "mismatch_mean")
    browser.point(*at(browser, "evaluation_reward", 0))
    assert lacking(tip(browser, "evaluation_reward"), "step 0", "0.125") == []
    row = browser.run("document.querySelector('#runs').innerText")
    assert lacking(row, "Reward", "Best evaluation", "0.5") == []
    assert "Loss" not in row
    choose(browser, "input[value=tokens]")
    assert browser.run("[view.from, view.to]") == [0, 6000]
    assert browser.run(chromium.CONTRAST) == []
    assert browser.errors == []


@pytest.mark.rest
@in_a_browser
def test_hovering_shows_the_figures_of_every_run_there(tab: chromium.Page) -> None:
    tab.point(*at(tab, "loss", 40))
    said = tip(tab, "loss")
    assert said.startswith("step 40")
    assert f"{record(40)['loss']:.5g}" in said
    assert "one" in said
    assert "two" in said
    tab.point(*at(tab, "loss", 80))
    assert "two" not in tip(tab, "loss")
    tab.point(*at(tab, "evaluation_loss", 50))
    assert tip(tab, "loss") == ""
    assert tip(tab, "evaluation_loss").splitlines()[0].startswith("step 50")
    assert "3.02" in tip(tab, "evaluation_loss")
    tab.point(2, 2)
    assert tip(tab, "evaluation_loss") == ""


@pytest.mark.rest
@in_a_browser
def test_a_run_can_be_left_out(tab: chromium.Page) -> None:
    choose(tab, "#runs tbody tr:first-child input")
    tab.point(*at(tab, "loss", 40))
    assert "two" in tip(tab, "loss")
    assert "one" not in tip(tab, "loss")
    assert tab.run("view.to") == 60
    choose(tab, "#runs tbody tr:first-child input")
    assert tab.run("view.to") == 100


@pytest.mark.rest
@in_a_browser
def test_across_may_be_tokens_and_the_loss_may_be_logarithmic(tab: chromium.Page) -> None:
    choose(tab, "input[value=tokens]")
    assert tab.run("[view.from, view.to]") == [4096, 409600]
    tab.point(*at(tab, "loss", 4096 * 40))
    assert tip(tab, "loss").startswith("step 40 · 163.8k tokens")
    choose(tab, "input[value=log]")
    height = tab.run("(() => { const c = charts[0]; return c.yOf(4) - c.yOf(8) - (c.yOf(2) - c.yOf(4)); })()")
    assert height == pytest.approx(0, abs=1e-6)


@in_a_browser
def test_smoothing_is_what_the_picture_s_is(tab: chromium.Page, two: list[Path]) -> None:
    points = curve(read_runs(two)[0].records, "loss")
    assert points is not None
    assert tab.run("view.half") == 1
    tab.run("(() => { const h = $('half-life'); h.value = 4; h.dispatchEvent(new Event('input')); })()")
    assert tab.run("$('half-life-words').textContent") == "half-life 10 steps"
    assert tab.run("[...charts[0].smoothed(data.runs[0].curves.loss)]") == pytest.approx(smoothed(points, 10), rel=1e-6)
    tab.run("(() => { const h = $('half-life'); h.value = 0; h.dispatchEvent(new Event('input')); })()")
    assert tab.run("$('half-life-words').textContent") == "none"
    assert tab.run("charts[0].smoothed(data.runs[0].curves.loss) === data.runs[0].curves.loss.mean")


@pytest.mark.rest
@in_a_browser
def test_dragging_zooms_all_diagrams_and_a_double_click_shows_the_whole(tab: chromium.Page) -> None:
    for kind, across in (("mousePressed", 20), ("mouseMoved", 40), ("mouseReleased", 40)):
        tab.point(*at(tab, "lr", across), kind, button="left", buttons=1, clickCount=1)
    assert tab.run("[view.from, view.to]") == pytest.approx([20, 40], abs=0.5)
    assert tab.run("$('zoom-all').disabled") is False
    where = at(tab, "loss", 30)
    for count in (1, 2):
        tab.point(*where, "mousePressed", button="left", clickCount=count)
        tab.point(*where, "mouseReleased", button="left", clickCount=count)
    tab.settle()
    assert tab.run("[view.from, view.to]") == [1, 100]


@in_a_browser
def test_the_keyboard_reaches_the_figures(tab: chromium.Page) -> None:
    tab.run("document.getElementById('loss').focus()")
    tab.press("ArrowRight")
    said = tab.run("$('say').textContent")
    assert said.startswith("step 5")
    tab.press("ArrowRight")
    assert tab.run("$('say').textContent") != said
    tab.press("+")
    assert tab.run("view.to - view.from") == pytest.approx(49.5)
    tab.press("0")
    tab.press("Escape")
    assert tab.run("[view.from, view.to, view.cursor]") == [1, 100, None]


@pytest.mark.rest
@in_a_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 700, 380])
def test_it_can_be_read_in_light_and_dark_wide_and_narrow(tab: chromium.Page, scheme: str, width: int) -> None:
    tab.scheme(scheme)
    tab.resize(width, 1000)
    tab.settle()
    assert tab.run(chromium.CONTRAST) == []
    assert tab.run("document.documentElement.scrollWidth <= innerWidth")
    assert tab.run("charts.every((chart) => chart.canvas.width === chart.plot.clientWidth)")
    assert tab.errors == []
