"""`trueshard data`: what it shows is what a run reads, token by token, and what is wrong has a place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import chromium
import corpora
from messages import lacking
from showing import data_of
from test_data_vision import asked, processor, vision, write_pictures  # noqa: F401
from trueshard.cli import main
from trueshard.train.data.batches import IGNORED
from trueshard.train.data.prepared import prepare
from trueshard.train.parse import to_toml
from trueshard.train.run.session import loader_of
from trueshard.train.run.survey_report import show, survey_of, write_page

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"


def config(root: Path, records: list[Any], length: int = 128, **data: Any) -> Any:
    file = corpora.write_lines(root / "data.jsonl", records)
    return corpora.config(root, {"path": str(file), **data}, length=length, tokenizer={"vocab_size": 400})


def talks(count: int = 12) -> list[Any]:
    return [corpora.conversation(number, 1 + number % 3) for number in range(count)]


@pytest.mark.parametrize("packing", [True, False])
def test_samples_are_rows_of_the_first_step_and_targets_are_its_targets(tmp_path: Path, packing: bool) -> None:
    settings = config(tmp_path, talks(), format="chat", packing=packing)
    found = survey_of(settings, 5)
    assert not (tmp_path / "run").exists()
    data = corpora.made(settings)
    batch = next(loader_of(settings, data, prefetch=0))
    for row, sample in enumerate(found["samples"]):
        inputs, targets = batch["input_ids"][row].numpy(), batch["targets"][row].numpy()
        parts = [part for part in sample["parts"] if not part["padding"]]
        assert (
            "".join(piece for part in parts for piece in part["pieces"]) in data.tokenizer.decode(inputs) + "<|im_end|>"
        )
        shown = (zip(part["pieces"], part["counts"], strict=True) for part in parts)
        learnt = "".join(piece for pairs in shown for piece, mark in pairs if mark == "1")
        assert learnt == corpora.learnt(data, targets)
        starts = int((batch["position_ids"][row] == 0).sum()) if packing else 1
        assert starts - len(parts) in (0, 1)  # padding begins anew, too
        assert all(len(part["breaks"]) >= 1 for part in parts)
        assert "data.jsonl, line" in sample["where"]
    targets = sum(int((data.train[n]["targets"] != IGNORED).sum()) for n in range(len(data)))  # type: ignore[index]
    counts = found["counts"]
    assert (counts["records"], counts["samples"], counts["targets"]) == (12, len(data), targets)
    assert counts["tokens"] == sum(1 for _ in np.fromfile(tmp_path / "run/data/tokens.bin", np.uint16))
    assert sum(count for *_, count in found["lengths"]) == 12


END = "<|im_end|>"
LONG = {
    "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": " ".join(map(str, range(200)))}]
}
LATE = {"messages": [{"role": "user", "content": " ".join(map(str, range(200)))}, LONG["messages"][1]]}
DOUBLED = {"messages": [{"role": "user", "content": END + END}, {"role": "assistant", "content": "a"}]}
OPEN = {"messages": [*corpora.conversation(40)["messages"], {"role": "user", "content": "and?"}]}


@pytest.mark.parametrize(
    ("records", "data", "parts"),
    [
        (talks(), {}, None),
        ([*talks(), talks()[3]], {}, ("1 of 13 records", "an earlier one", "line 13 is", "line 4")),
        ([*talks(), LONG], {}, ("1 of 13 records cut", "line 13")),
        ([*talks(), LATE], {}, ("1 of 13 records left out as no answer", "line 13")),
        ([*talks(), DOUBLED], {}, (f"{END} follows itself", "line 13")),
        ([*talks(), OPEN], {}, ("line 13", "the last message")),
        (
            [{"prompt": "" if n == 4 else "a", "completion": f"{n} b"} for n in range(9)],
            {"format": "completion"},
            ("every token of 1 of 9 documents is a target", "line 5"),
        ),
    ],
    ids=["right", "repeated", "cut", "left out", "doubled", "open", "all targets"],
)
def test_what_is_wrong_is_told_with_its_place(
    tmp_path: Path, records: list[Any], data: dict[str, Any], parts: tuple[str, ...] | None
) -> None:
    found = survey_of(config(tmp_path, records, **{"format": "chat", **data}), 2)
    assert len(found["warnings"]) == (parts is not None)
    assert [lacking(warning, *(parts or ())) for warning in found["warnings"]] == [[]] * len(found["warnings"])


def test_where_a_record_was_cut_is_shown(tmp_path: Path) -> None:
    found = survey_of(config(tmp_path, [LONG], format="chat", length=64), 1)
    assert [part["cut"] for part in found["samples"][0]["parts"]] == [True]


@pytest.mark.rest
@pytest.mark.parametrize("streaming", [False, True])
def test_pairs_text_and_streams_are_shown(tmp_path: Path, streaming: bool) -> None:
    pairs = [{"prompt": f"{n} is", "chosen": f" {n}", "rejected": " no"} for n in range(8)]
    found = survey_of(config(tmp_path, pairs, format="preference", streaming=streaming), 4)
    sides = [sample["where"].split(":")[0] for sample in found["samples"]]
    assert sides == ["chosen", "rejected"] * 2
    learnt = [part["counts"].count("1") for sample in found["samples"] for part in sample["parts"]]
    assert min(learnt) > 0
    (tmp_path / "b").mkdir()
    found = survey_of(
        config(tmp_path / "b", [{"text": f"{n} and so on. " * 9} for n in range(20)], streaming=streaming), 2
    )
    assert len(found["samples"][0]["parts"]) > 1  # documents that follow each other
    assert bool(found["counts"]) == (not streaming)


@pytest.mark.rest
def test_images_are_shown_as_one_token(tmp_path: Path, processor: Path) -> None:  # noqa: F811
    write_pictures(tmp_path)
    records = [{"messages": asked(f"{n}? <image>"), "images": [f"pictures/{n}.png"]} for n in range(4)]
    found = survey_of(vision(tmp_path, processor, records), 2)
    text = "".join(found["samples"][0]["parts"][0]["pieces"])
    assert "<image> × 16" in text
    assert "1" in found["samples"][0]["parts"][0]["counts"]


@pytest.mark.rest
def test_prompts_of_reinforcement_learning_have_no_targets(capsys: pytest.CaptureFixture[str]) -> None:
    grpo = Path(__file__).parents[1] / "examples/grpo.toml"
    assert main(["data", str(grpo), "--set", "run.dir=nowhere", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "1" not in found["samples"][0]["parts"][0]["counts"]
    assert not [warning for warning in found["warnings"] if "no token" in warning]


def test_prepared_data_are_kept_where_training_finds_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = config(tmp_path, talks(), format="chat")
    (file := tmp_path / "train.toml").write_text(to_toml(settings))
    assert main(["data", str(file), "--prepare"]) == 0
    out = capsys.readouterr().out
    assert lacking(out, "12 records", "⟦That is ", f".{END}⟧", "of format chat", "data.jsonl, line") == []
    assert len(prepare(settings, frozen=False, make=False)) > 0


@pytest.fixture
def page(tmp_path: Path) -> Path:
    evil = {"messages": [{"role": "user", "content": EVIL}, {"role": "assistant", "content": "no"}]}
    found = survey_of(config(tmp_path, [evil, evil, *talks()], format="chat", packing=False), 8)
    write_page(found, tmp_path / "page.html")
    return tmp_path / "page.html"


def test_the_page_has_all_and_is_never_markup(page: Path) -> None:
    text = page.read_text()
    assert "<script>alert" not in text
    assert "<img" not in text
    assert len(data_of(text)["samples"]) == 8


@pytest.mark.rest
@pytest.mark.skipif(chromium.PROGRAM is None, reason="needs Chromium")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_shows_samples_one_by_one(browser: chromium.Page, page: Path, scheme: str) -> None:
    browser.scheme(scheme)
    browser.open(page)
    data = data_of(page.read_text())
    for index, sample in enumerate(data["samples"]):
        assert browser.run("document.getElementById('where').innerText") == sample["where"]
        targets = browser.run("[...document.querySelectorAll('.document .target')].length")
        assert targets == sum(part["counts"].count("1") for part in sample["parts"])
        assert browser.run("document.getElementById('after').disabled") == (index == 7)
        browser.run("document.getElementById('after').click()")
    assert "1 warning" in browser.run("document.getElementById('verdict').innerText")
    for width in (1280, 380):
        browser.resize(width, 1000)
        browser.settle()
        assert browser.run(chromium.CONTRAST) == []
        assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    assert browser.errors == []
    assert browser.requests == [page.as_uri()]


def test_the_terminal_shows_control_characters_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = {"messages": [{"role": "user", "content": "\x1b[31m[bold]x"}, {"role": "assistant", "content": "y"}]}
    show(survey_of(config(tmp_path, [record], format="chat"), 1))
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "[bold]x" in out
