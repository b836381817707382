"""The page of answers: what it holds, what is left out of a big run; and in headless Chromium, what it shows."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest

import chromium
from messages import lacking, naming
from parity import Ranks
from resting import all_but
from showing import answer, answers, data_of, rewarded, write_run, write_samples
from test_rl_rollouts import model_of, records, reward, tokenizer
from trueshard.errors import UserError
from trueshard.train.metrics import answers as answers_file
from trueshard.train.metrics.answers import choose, page
from trueshard.train.metrics.curves import plot
from trueshard.train.metrics.step_metrics import LineSpan, read_steps

in_a_browser = pytest.mark.skipif(chromium.PROGRAM is None, reason="needs Chromium")
SCHEMES = ("light", "dark")
CHECKED = [(1280, "light")]
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>$style"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 steps of 4 prompts with 8 answers each; one more prompt, with markup, in the last step alone."""
    folder = write_run(tmp_path_factory.mktemp("rl") / "sort", [rewarded(step) for step in range(1, 61)])
    lines = answers(60)
    pieces = [EVIL, "", "\n", " end"]
    changes = {"pieces": pieces, "tokens": [1, 2, 3, 4], "own": [True] * 4, "logprobs": [-0.5, -1.0, -2.0, 0.0]}
    changes |= {"trained_logprobs": [-0.25, -1.0, -2.0, 0.0], "prompt_text": EVIL, "text": "".join(pieces)}
    lines.append(answer(60, 77, 0, **changes, reward=math.nan, finished=False, weights_version=57))
    write_samples(folder, lines)
    return folder


@pytest.fixture(scope="module")
def file(run: Path) -> Path:
    return plot([run])[-1]


# The file


@pytest.mark.rest
def test_a_run_s_answers_lie_beside_its_curves(run: Path, file: Path, tmp_path: Path) -> None:
    assert file == run / "samples.html"
    names = ["curves.html", "curves.png", "metrics.jsonl", "samples.html", "samples.jsonl"]
    assert sorted(path.name for path in run.iterdir()) == names
    assert [path.name for path in plot([run], tmp_path / "a.html")] == ["a.html"]
    assert file.stat().st_size < 2_000_000


@pytest.mark.rest
def test_a_run_that_has_no_answer_yet_has_no_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path, [rewarded(1)])
    (folder / "samples.jsonl").write_text('{"step": 1, "pro')
    assert [path.name for path in plot([folder])] == ["curves.png", "curves.html"]


def test_the_page_has_every_answer_and_is_never_markup(file: Path) -> None:
    text = file.read_text()
    assert "<script>alert" not in text
    assert "<img" not in text
    data = data_of(text)
    assert data["left_out"] == {"answers": 0, "groups": 0, "tokens": 0}
    assert [prompt["number"] for prompt in data["prompts"]] == [0, 1, 2, 3, 77]
    assert [group["step"] for group in data["prompts"][0]["groups"]] == list(range(1, 61))
    shown, line = data["prompts"][1]["groups"][6]["answers"], answer(7, 1, 0)
    assert [entry["reward"] for entry in shown] == sorted((answer(7, 1, i)["reward"] for i in range(8)), reverse=True)
    (first,) = [entry for entry in shown if entry["sample"] == 0]
    assert (first["pieces"], first["given"], first["parts"]) == (line["pieces"], [2, 3], line["parts"])
    assert first["logprobs"] == pytest.approx(line["logprobs"], rel=1e-4)
    assert first["differences"][3] == pytest.approx(line["trained_logprobs"][3] - line["logprobs"][3], rel=1e-2)
    assert [group["used"] for group in data["prompts"][3]["groups"]] == [step < 40 for step in range(1, 61)]
    assert data["prompts"][4]["groups"][0]["rewards"] == [None]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    lines = write_samples(tmp_path, answers(3)).read_text().splitlines()
    lines[40] = lines[40].replace('"reward": ', '"reward" ')
    (file := tmp_path / "samples.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(UserError, match=naming("samples.jsonl", "line 41", "delete")):
        page("damaged", file, read_steps(file))


def test_of_a_long_run_every_nth_step_is_kept_and_the_first_and_the_last() -> None:
    places = [LineSpan(step, step, 1000 * step, 1000) for step in range(1, 201)]
    assert list(choose(places, most=200_000).steps) == list(range(1, 201))
    kept = choose(places, most=20_000)
    assert list(kept.steps) == [*range(1, 201, 6), 200]
    assert (kept.total, kept.bytes_a_step) == (200, math.inf)
    few = choose(places, most=3000)
    assert len(few.steps) == answers_file.FEWEST
    assert few.bytes_a_step == 250


@pytest.mark.rest
def test_of_big_steps_the_best_and_the_worst_answers_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers_file, "choose", lambda places: choose(places, most=30_000))
    file = write_samples(tmp_path, answers(60))
    data = data_of(page("big", file, read_steps(file)))
    assert len(data["steps"]) <= answers_file.FEWEST
    assert [data["steps"][0], data["steps"][-1], data["total"]] == [1, 60, 60]
    groups = [group for prompt in data["prompts"] for group in prompt["groups"]]
    assert {len(group["answers"]) for group in groups} == {2}
    assert {len(group["rewards"]) for group in groups} == {8}
    assert data["left_out"]["groups"] == 4 * len(data["steps"]) - len(groups) > 0
    assert data["left_out"]["answers"] == 6 * len(groups)


def twice(folder: Path) -> Path:
    """Prompt 0 has one group in step 1, two in step 2 and one in step 3; prompt 1 has two in step 2 alone."""
    groups = [(1, 0, 0, 0.0), (2, 0, 0, 0.25), (2, 1, 0, 0.5), (2, 0, 1, 1.0), (2, 1, 1, 0.75), (3, 0, 0, 1.0)]
    lines = [
        answer(step, prompt, 4 * group + i, group=group, reward=reward, used=group == 0)
        for step, prompt, group, reward in groups
        for i in range(4)
    ]
    return write_samples(folder, lines)


def test_two_groups_of_a_prompt_in_a_step_are_kept_apart(tmp_path: Path) -> None:
    file = twice(tmp_path)
    first, second = data_of(page("twice", file, read_steps(file)))["prompts"]
    assert [(group["step"], group["number"]) for group in first["groups"]] == [(1, 0), (2, 0), (2, 1), (3, 0)]
    assert [group["rewards"] for group in first["groups"]] == [[0] * 4, [0.25] * 4, [1] * 4, [1] * 4]
    assert [group["used"] for group in first["groups"]] == [True, True, False, True]
    assert [sorted(shown["sample"] for shown in group["answers"]) for group in second["groups"]] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]


def rollout(rank: int, world: int) -> list[dict[str, Any]]:
    """The lines of a rollout whose only prompt is asked three times."""
    import trueshard
    from trueshard.train.rl.run import lines

    model = model_of()
    trueshard.shard(model)
    rollouts = trueshard.rl.Rollouts(
        model, tokenizer(), records(1), reward, batch_size=12, rl={"samples": 4, "skip_equal": False}
    )
    next(rollouts)
    rollouts.close()
    return lines(rollouts, {})


@pytest.mark.rest
def test_a_rollout_that_asks_a_prompt_again_writes_its_groups(ranks2: Ranks) -> None:
    for found in ranks2.run(rollout):
        assert [(line["prompt"], line["group"]) for line in found] == [(0, i // 4) for i in range(12)]
        assert [line["sample"] for line in found] == list(range(12))


# In a browser


@pytest.fixture
def tab(browser: chromium.Page, file: Path) -> chromium.Page:
    browser.resize(1280, 1000)
    browser.open(file)
    return browser


def text(tab: chromium.Page, selector: str) -> str:
    return str(tab.run(f"document.querySelector({selector!r}).innerText"))


def hover(tab: chromium.Page, card: int, token: int) -> str:
    x, y = tab.run(
        f"(() => {{ const e = now.cards[{card}].tokens[{token}]; e.scrollIntoView({{block: 'center'}});"
        "const b = e.getClientRects()[0]; return [b.left + 2, b.top + b.height / 2]; })()"
    )
    tab.point(x, y)
    return str(tab.run(f"now.cards[{card}].tip.hidden ? '' : now.cards[{card}].tip.innerText"))


@pytest.mark.rest
@in_a_browser
def test_it_shows_the_best_beside_the_worst_answer_of_a_step(tab: chromium.Page, file: Path) -> None:
    assert tab.run("document.title") == "sort: answers"
    assert lacking(text(tab, "#settings"), "60 steps", "5 prompts") == []
    assert tab.run("$('left-out').hidden")
    assert tab.run("document.querySelectorAll('#list li').length") == 5
    rewards = [answer(60, 0, i)["reward"] for i in range(8)]
    assert lacking(text(tab, "article:nth-of-type(1) h3"), "Best", f"{max(rewards):.4g}") == []
    assert lacking(text(tab, "article:nth-of-type(2) h3"), "Worst", f"{min(rewards):.4g}") == []
    assert lacking(text(tab, "article:nth-of-type(2)"), "exact", "place", "27 tokens", "advantage") == []
    first, second = tab.run("now.cards.slice(0, 2).map((each) => each.card.getBoundingClientRect().top)")
    assert first == second
    assert tab.run("now.cards.length") == 8
    assert tab.run("now.cards[0].tokens.filter((each) => each.className === 'given').length") == 2
    assert tab.errors == []
    assert tab.requests == [file.as_uri()]


@in_a_browser
def test_steps_are_chosen_by_slider_button_and_diagram(tab: chromium.Page) -> None:
    tab.run("(() => { $('step').value = 9; $('step').dispatchEvent(new Event('input')); })()")
    assert text(tab, "#answers-title") == "Answers at step 10"
    tab.run("$('before').click()")
    assert text(tab, "#step-words") == "step 9 of 60"
    x, y, wide = tab.run("(() => { const b = $('rewards').getBoundingClientRect(); return [b.x, b.y, b.width]; })()")
    for kind in ("mousePressed", "mouseReleased"):
        tab.point(x + 44 + (wide - 56) * 29 / 59, y + 60, kind, button="left", clickCount=1)
    assert text(tab, "#answers-title") == "Answers at step 30"
    tab.run("document.querySelector('#list li:nth-child(2) button').click()")
    assert text(tab, "#prompt-title") == "Prompt 1"
    assert text(tab, "#answers-title") == "Answers at step 30"


@pytest.mark.rest
@in_a_browser
def test_hovering_shows_both_probabilities_of_a_token(tab: chromium.Page) -> None:
    tab.run("choose(data.prompts[4])")
    said = hover(tab, 0, 0)
    assert lacking(said, "token 1 of 4", "60.65%", "0.5000", "77.88%", "0.2500", "+0.250") == []
    assert lacking(hover(tab, 0, 3), "100%", "0.0000") == []
    tab.run("choose(data.prompts[0])")
    assert "environment" in hover(tab, 0, 2)
    tab.point(2, 2)
    assert tab.run("now.cards[0].tip.hidden")
    tab.run("now.cards[1].text.focus()")
    tab.press("ArrowRight")
    assert lacking(tab.run("$('say').textContent"), "token 1 of 27", "engine", "trainer") == []


@pytest.mark.rest
@in_a_browser
def test_tokens_are_shaded_by_mismatch_or_probability(tab: chromium.Page) -> None:
    tab.run("choose(data.prompts[4])")
    shades = "now.cards[0].tokens.map((each) => each.style.getPropertyValue('--a'))"
    assert tab.run(shades) == ["0.500", "", "", ""]
    tab.run("document.querySelector('input[value=probability]').click()")
    assert tab.run(shades) == ["0.393", "0.632", "0.865", ""]
    tab.run("document.querySelector('input[value=none]').click()")
    assert tab.run(shades) == [""] * 4


@in_a_browser
def test_markup_is_shown_as_it_is_and_what_is_odd_is_marked(tab: chromium.Page) -> None:
    tab.run("choose(data.prompts[4])")
    assert EVIL in text(tab, "#prompt-text")
    assert EVIL in text(tab, "article .text")
    assert tab.run("document.querySelectorAll('main script, main img').length") == 0
    assert lacking(text(tab, "article"), "Only answer", "not finite", "cut") == []
    assert "weights after step 57" in text(tab, "#group")
    assert tab.run("$('steps').hidden && $('rewards').hidden")
    tab.run("choose(data.prompts[3])")
    assert "equal rewards" in text(tab, "#group")
    assert "Best" not in text(tab, "#answers")
    assert tab.errors == []


@pytest.mark.rest
@in_a_browser
def test_groups_of_a_prompt_in_a_step_are_shown_each(browser: chromium.Page, tmp_path: Path) -> None:
    lines = twice(tmp_path)
    (html := tmp_path / "twice.html").write_text(page("twice", lines, read_steps(lines)))
    browser.resize(1280, 1000)
    browser.open(html)
    found = []
    for index in range(4):
        browser.run(f"go({index})")
        found.append((text(browser, "#answers-title"), text(browser, "article:nth-of-type(1) h3").split()[-1]))
    assert found == [
        ("Answers at step 1", "0"),
        ("Answers at step 2, group 1 of 2", "0.25"),
        ("Answers at step 2, group 2 of 2", "1"),
        ("Answers at step 3", "1"),
    ]
    assert "group 2 of 2" in browser.run("(() => { go(2); return $('step-words').innerText; })()")
    dim = browser.run("[...document.querySelectorAll('#list .dim')].map((e) => e.innerText)")
    assert dim == ["0 · 3 steps", "1 · step 2"]
    assert browser.run("[...document.querySelectorAll('path')].every((e) => !e.getAttribute('d').includes('NaN'))")
    browser.run("choose(data.prompts[1])")
    assert browser.run("[...document.querySelectorAll('path')].every((e) => !e.getAttribute('d').includes('NaN'))")
    assert browser.errors == []


@in_a_browser
def test_prompts_can_be_searched_and_ordered(tab: chromium.Page) -> None:
    def search(words: str, order: str = "number") -> list[int]:
        tab.run(f"$('search').value = {words!r}; $('order').value = {order!r}; list()")
        return [
            int(each.split()[0])
            for each in tab.run("[...document.querySelectorAll('#list .dim')].map((e) => e.innerText)")
        ]

    assert search("ALERT") == [77]
    assert search("step 60") == [0, 1, 2, 3, 77]
    assert search("step 61") == []
    assert search("sort these", "high")[0] == 3
    means = tab.run("[...data.prompts].sort(ORDERS.low).map((each) => each.number)")
    assert sorted(means) == [0, 1, 2, 3, 77]


@in_a_browser
@pytest.mark.parametrize(
    ("width", "scheme"), all_but(CHECKED, itertools.product([1280, 700, 380], SCHEMES), unpack=True)
)
def test_it_can_be_read_in_light_and_dark_wide_and_narrow(tab: chromium.Page, width: int, scheme: str) -> None:
    tab.scheme(scheme)
    tab.resize(width, 1000)
    tab.settle()
    assert tab.run(chromium.CONTRAST) == []
    assert tab.run("document.documentElement.scrollWidth <= innerWidth")
    assert tab.errors == []
