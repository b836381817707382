"""Evaluation on several sets: the same metrics, best step and early stop at any number of ranks."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

import chromium
import corpora
import trueshard
from messages import lacking, naming
from parity import Ranks
from running import CONFIG, end, metrics, run, start
from showing import answer, data_of, record, write_run, write_samples
from test_trainer import Batches, build
from trueshard.errors import UserError
from trueshard.train.config import Config
from trueshard.train.evaluation import Evaluation, is_greater_better
from trueshard.train.generation import check_answers, prompts_of
from trueshard.train.metrics.answers import page
from trueshard.train.metrics.curves import RunRecords, plot, shown_panels
from trueshard.train.metrics.step_metrics import read_steps
from trueshard.train.metrics.text_scores import METRICS, metric_of
from trueshard.train.run.checks import check
from trueshard.train.run.resuming import with_settings


def single_rows(rank: int, world_size: int, begin: int, end: int) -> list[Any]:
    """A rank's part of some rows of a batch, a microbatch each: of few rows some ranks have none."""
    batch = next(iter(Batches(0, 1)))
    rows = range(begin, end)
    own = rows[len(rows) * rank // world_size : len(rows) * (rank + 1) // world_size]
    return [{key: value[row : row + 1] for key, value in batch.items()} for row in own]


def trained_on_sets(rank: int, world_size: int, folder: str, best: str) -> dict[str, Any]:
    trainer: Any = None
    sets = {
        "few": single_rows(rank, world_size, 4, 5),
        "many": single_rows(rank, world_size, 3, 12),
        "own": lambda: {"steps_apart": float(min(0, trainer.step - 3))},  # from 3 on it is as good, and no better
    }
    settings = {"steps": 9, "evaluation": sets, "evaluate_every": 1, "best": best, "patience": 2}
    greatest = is_greater_better(best)
    checkpoints = trueshard.Checkpoints(
        folder, keep_last=1, keep_best=1, metric=f"evaluation_{best}", mode="max" if greatest else "min"
    )
    trainer, recorder = build(rank, world_size, checkpoints=checkpoints, checkpoint_every=100, **settings)
    trainer.fit()
    records = [event for event in recorder.events if isinstance(event, dict)]
    found = [{key: record[key] for key in record if key.startswith("evaluation_")} for record in records]
    kept = checkpoints.best()
    return {"found": found, "best": kept and kept.name, "stopped": trainer.stopped, "step": trainer.step}


@pytest.mark.rest
@pytest.mark.parametrize(("best", "expected"), [("steps_apart", 3), ("few_loss", None)])
def test_sets_give_the_same_metrics_best_step_and_stop_at_any_number_of_ranks(
    alone: Ranks, ranks2: Ranks, ranks3: Ranks, tmp_path: Path, best: str, expected: int | None
) -> None:
    (single,) = alone.run(trained_on_sets, str(tmp_path / "1"), best)
    assert {*single["found"][0]} == {
        *("evaluation_few_loss", "evaluation_few_count", "evaluation_few_perplexity", "evaluation_steps_apart"),
        *("evaluation_many_loss", "evaluation_many_count", "evaluation_many_perplexity"),
    }
    assert single["found"][0]["evaluation_few_count"] == 2
    if expected is not None:
        assert single["best"] == f"step-{expected:08d}"
        assert single["step"] == expected + 2
        assert "evaluation" in single["stopped"]
    for ranks, count in ((ranks2, 2), (ranks3, 3)):
        for several in ranks.run(trained_on_sets, str(tmp_path / str(count)), best):
            for one, other in zip(several["found"], single["found"], strict=True):
                assert one == pytest.approx(other, rel=1e-5)
            assert {**several, "found": 0} == {**single, "found": 0}


def resumed(rank: int, world_size: int, folder: str) -> list[Any]:
    value = [3.0]
    settings: dict[str, Any] = {"evaluate_every": 2, "checkpoint_every": 2, "best": "score"}
    made = []
    for steps, now, best in ((2, 3.0, "score"), (4, 1.0, "score"), (6, 1.0, "other")):
        value[0] = now
        checkpoints = trueshard.Checkpoints(folder, keep_last=2, keep_best=1, metric=f"evaluation_{best}", mode="max")
        own = {"own": lambda: {"score": value[0], "other": 0.5}}
        words = settings | {"steps": steps, "evaluation": own, "best": best, "checkpoints": checkpoints}
        trainer, _ = build(rank, world_size, **words)
        trainer.fit()
        kept = checkpoints.best()
        made.append((trainer.best, trainer.worse, kept and kept.name))
    return made


def test_a_resumed_run_knows_its_best_and_begins_anew_with_another_metric(ranks2: Ranks, tmp_path: Path) -> None:
    for found in ranks2.run(resumed, str(tmp_path)):
        assert found == [(-3.0, 0, "step-00000002"), (-3.0, 1, "step-00000002"), (-0.5, 0, "step-00000006")]


def test_what_is_better_follows_from_the_metric() -> None:
    assert Evaluation({"maths": [], "own": dict}, best="maths_f1").score({"maths_f1": 0.25}) == -0.25
    assert Evaluation({"maths": []}).score({"maths_loss": 0.25}) == 0.25
    assert Evaluation({"own": dict}, best="errors", greater=False).score({"errors": 4.0}) == 4.0
    assert Evaluation(lambda: {"reward": 1.0}).score({"reward": 1.0}) == -1.0
    with pytest.raises(ValueError, match=r"maths_f1.*maths_loss"):
        Evaluation({"maths": []}, best="maths_f1").score({"maths_loss": 0.5})


# Generated answers

GENERATE = """
[evaluation]
every = 3
generate = 5
tokens = 12
batch = 2
metrics = ["f1", "exact_match", "own.py:score"]
best = "sums_f1"
[evaluation.sets]
sums = "sums.jsonl"
one = "one.jsonl"
"""
OWN = """def score(answer, target, prompt):
    assert "What is" in prompt and target.startswith("That is")
    return {"score": len(answer), "same": answer == target}
"""


def chat_project(folder: Path, *, more: str = GENERATE, replace: tuple[str, str] = ("", "")) -> Path:
    """A run on conversations: 7 prompts in one set, a single one in another."""
    folder.mkdir(parents=True)
    corpora.write_lines(folder / "chat.jsonl", (corpora.conversation(number, 1 + number % 2) for number in range(40)))
    corpora.write_lines(folder / "sums.jsonl", (corpora.conversation(number, 2) for number in range(7)))
    corpora.write_lines(folder / "one.jsonl", [corpora.conversation(3)])
    (folder / "own.py").write_text(OWN)
    text = CONFIG.replace('path = "text"', 'path = "chat.jsonl"\nformat = "chat"').replace("steps = 40", "steps = 6")
    text = text.replace("sequence_length = 32", "sequence_length = 128").replace("checkpoint_every = 20", "keep = 1")
    (folder / "train.toml").write_text((text + more).replace(*replace))
    return folder


def answers_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "samples.jsonl").read_text().splitlines()]


def evaluations(folder: Path) -> list[dict[str, float]]:
    keys = [{key: record[key] for key in record if key.startswith("evaluation_")} for record in metrics(folder)]
    return [found for found in keys if found]


def settings_of(folder: Path, **evaluation: Any) -> Config:
    """A configuration with an evaluation on conversations."""
    corpora.write_lines(folder / "chat.jsonl", (corpora.conversation(number, 1 + number % 3) for number in range(30)))
    more = {"path": str(folder / "chat.jsonl"), "generate": 4, "tokens": 20} | evaluation
    return corpora.config(folder, {"path": str(folder / "chat.jsonl"), "format": "chat"}, length=160, evaluation=more)


@pytest.mark.parametrize("packing", [True, False])
def test_the_target_is_the_last_answer_and_the_prompt_all_before_it(tmp_path: Path, packing: bool) -> None:
    config = settings_of(tmp_path)
    data = corpora.made(with_settings(config, {"data.packing": packing}))
    decode = data.tokenizer.decode
    found = {decode(prompt): decode(target) for prompt, target in prompts_of(config, data.evaluation[""])}
    assert len(found) == 30
    expected = {}
    for number in range(30):
        *before, last = corpora.conversation(number, 1 + number % 3)["messages"]
        text = data.tokenizer.apply_chat_template(before, tokenize=False, add_generation_prompt=True)
        expected[text] = f"{last['content']}<|im_end|>"
    assert found == expected
    longest = max(len(prompt) for prompt, _ in prompts_of(config, data.evaluation[""]))
    short = with_settings(config, {"evaluation.tokens": 160 - longest + 1})
    assert 0 < len([*prompts_of(short, data.evaluation[""])]) < 30
    assert check_answers(config, data) == ["exact_match", "f1"]
    with pytest.raises(UserError, match=naming("evaluation.path", "evaluation.tokens = 159", "sequence_length = 160")):
        check_answers(with_settings(config, {"evaluation.tokens": 159}), data)


def test_exact_match_and_f1_are_those_of_squad() -> None:
    def scores(answer: str, target: str) -> tuple[float, float]:
        found = METRICS["exact_match"]().measure(answer, target, "") | METRICS["f1"]().measure(answer, target, "")
        return found["exact_match"], found["f1"]

    assert scores("The  Eiffel Tower.", "eiffel tower") == (1.0, 1.0)
    assert scores("in Paris, in a tower", "a tower in Paris") == (0.0, 2 * 3 / (4 + 3))
    assert scores("", "the") == (1.0, 1.0)
    assert scores("", "Paris") == scores("London", "Paris") == (0.0, 0.0)


def test_bleu_and_rouge_are_those_of_their_libraries() -> None:
    import sacrebleu
    from rouge_score.rouge_scorer import RougeScorer

    pairs = [
        ("That is the number 4.", "That is the number 5."),
        ("a cat sat on the mat", "the cat sat on a mat"),
        ("x", "y"),
    ]
    metric = metric_of("bleu")
    found = metric.total([metric.measure(*pair, "") for pair in pairs])
    expected = sacrebleu.corpus_bleu([made for made, _ in pairs], [[wanted for _, wanted in pairs]])
    assert found == {"bleu": pytest.approx(expected.score, rel=1e-12)}
    (single,) = metric.total([metric.measure(*pairs[0], "")]).values()
    assert single == pytest.approx(sacrebleu.sentence_bleu(pairs[0][0], [pairs[0][1]]).score)
    metric, scorer = metric_of("rouge"), RougeScorer(["rouge1", "rouge2", "rougeL"])
    found = metric.total([metric.measure(*pair, "") for pair in pairs])
    each = [scorer.score(wanted, made) for made, wanted in pairs]
    assert found == {
        key: math.fsum(scores[key].fmeasure for scores in each) / 3 for key in ("rouge1", "rouge2", "rougeL")
    }


def test_a_metric_that_cannot_be_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for word, module, package in (
        ("bleu", "sacrebleu", "sacrebleu"),
        ("rouge", "rouge_score.rouge_scorer", "rouge-score"),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(UserError, match=naming("evaluation.metrics", word, f"pip install {package}")):
            metric_of(word)
    file = tmp_path / "scores.py"
    file.write_text(
        "def two(answer, target): return 1\ndef bad(a, t, p): return 'x'\ndef raises(a, t, p):\n  return a[99]\n"
    )
    for name, words in (
        ("two", ("two", "prompt")),
        ("bad", ("bad is 'x'",)),
        ("raises", ("scores.py:4", "IndexError")),
    ):
        with pytest.raises(UserError, match=naming("evaluation.metrics", *words)):
            metric_of(f"{file}:{name}").measure("a", "b", "c")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"evaluation.metrics": ["f2"]}, ("evaluation.metrics", "'f2'", "f1")),
        ({"evaluation.generate": None, "evaluation.metrics": ["f1"]}, ("evaluation.metrics", "evaluation.generate")),
        ({"data.answers_only": False}, ("evaluation.generate", "answers_only")),
        ({"data.format": "text"}, ("evaluation.generate", '"chat"')),
        ({"evaluation.tokens": 160}, ("evaluation.tokens", "160")),
        ({"evaluation.sets": {"a_b": "x"}}, ("evaluation.sets",)),
    ],
)
def test_settings_that_do_not_go_together_are_refused(tmp_path: Path, changes: dict[str, Any], words: Any) -> None:
    with pytest.raises(UserError, match=naming(*words)):
        with_settings(settings_of(tmp_path), changes)


def test_the_best_is_a_metric_that_there_is(tmp_path: Path) -> None:
    config = settings_of(tmp_path, sets={"more": str(tmp_path / "chat.jsonl")})
    for best in ("loss", "more_perplexity", "f1", "more_exact_match"):
        check(with_settings(config, {"evaluation.best": best}), 1)
    with pytest.raises(UserError, match=naming("evaluation.best", "'more_f2'", "more_f1")):
        check(with_settings(config, {"evaluation.best": "more_f2"}), 1)


@pytest.mark.rest
def test_answers_and_metrics_are_the_same_at_any_number_of_ranks_and_after_a_resume(tmp_path: Path) -> None:
    exact = ("steps = 6", "steps = 6\nexact = true\nmicrobatch = 2\nbatch_size = 12")
    found = {}
    for ranks in (1, 3):
        folder = chat_project(tmp_path / str(ranks), replace=exact)
        text = (folder / "train.toml").read_text().replace("batch_size = 8\n", "")
        (folder / "train.toml").write_text(text)
        if ranks == 3:
            run(folder, "--nproc", "2", "--set", "train.steps=3")
        code, output, said = end(start(folder, "--nproc", str(ranks)))
        assert code == 0, output + said
        found[ranks] = (answers_of(folder), evaluations(folder), (folder / "run/checkpoints/best").resolve().name)
        assert lacking(output + said, "sums_f1", "samples.jsonl", "evaluation.generate = 5: 1 of one") == []
    answers, evaluated, best = found[1]
    assert found[3] == found[1]
    assert [(line["step"], line["set"], line["prompt"]) for line in answers if line["set"] == "one"] == [
        (3, "one", 0),
        (6, "one", 0),
    ]
    assert [line["prompt"] for line in answers if line["set"] == "sums" and line["step"] == 6] == [0, 1, 2, 3, 4]
    assert all(line["target"].startswith("That is") for line in answers)
    assert [*evaluated[0]] == [
        *(f"evaluation_{name}_{key}" for name in ("sums", "one") for key in ("loss", "count", "perplexity")),
        *(f"evaluation_{name}_{key}" for name in ("sums", "one") for key in ("f1", "exact_match", "score", "same")),
    ]
    last = [line for line in answers if line["set"] == "sums" and line["step"] == 6]
    assert evaluated[1]["evaluation_sums_f1"] == math.fsum(line["parts"]["f1"] for line in last) / len(last)
    assert all(line["reward"] == line["parts"]["f1"] for line in answers)
    assert best == f"step-{max((3, 6), key=lambda step: (evaluated[step // 3 - 1]['evaluation_sums_f1'], step)):08d}"


@pytest.mark.rest
@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (2, "[adapter]\nrank = 2\n"),
        (2, "[shard]\ntensor = 2\n"),
        (2, "[shard]\ncontext = 2\n"),
    ],
)
def test_answers_are_the_same_with_an_adapter_and_other_axes(tmp_path: Path, ranks: int, more: str) -> None:
    """In float32 the likeliest token is the same, though sums differ in their last digits."""
    found = []
    for count in (1, ranks):
        settings = GENERATE + (more if count > 1 or "adapter" in more else "")
        frozen = 'architecture = "llama"\nfreeze = ["*embed_tokens*"]'
        changed = ('architecture = "llama"', 'architecture = "llama"' if "adapter" in more else frozen)
        folder = chat_project(tmp_path / str(count), more=settings, replace=changed)
        run(folder, "--nproc", str(count), "--set", "data.packing=false")
        found.append([(line["step"], line["set"], line["prompt"], line["text"]) for line in answers_of(folder)])
    assert len(found[0]) == 2 * 6
    assert found[0] == found[1]


def lines_of_two_sets(steps: tuple[int, ...]) -> list[dict[str, Any]]:
    return [
        answer(
            step, number, 0, set=name, target=f"target {number} of {name}", parts={"f1": 0.5, "bleu": 12.0}, reward=0.5
        )
        for step in steps
        for name in ("", "maths")
        for number in (0, 1)
    ]


def test_the_page_has_each_set_with_its_targets(tmp_path: Path) -> None:
    file = write_samples(tmp_path, lines_of_two_sets((10, 20)))
    data = data_of(page("run", file, read_steps(file)))
    assert data["score"] == "f1"
    assert [(prompt["name"], prompt["target"]) for prompt in data["prompts"]] == [
        *(("0", "target 0 of "), ("1", "target 1 of ")),
        *(("maths 0", "target 0 of maths"), ("maths 1", "target 1 of maths")),
    ]
    assert [group["step"] for group in data["prompts"][3]["groups"]] == [10, 20]


def test_curves_have_a_panel_for_each_metric_of_an_evaluation() -> None:
    more = {"evaluation_maths_f1": 0.5, "evaluation_maths_count": 7, "evaluation_loss": 1.0}
    run = RunRecords("run", [record(step, **more) for step in range(1, 5)])
    keys = [panel.key for panel in shown_panels([run])]
    assert [key for key in keys if key.startswith("evaluation")] == ["evaluation_loss", "evaluation_maths_f1"]


@pytest.mark.rest
@pytest.mark.skipif(chromium.PROGRAM is None, reason="needs Chromium")
def test_the_page_shows_the_target_below_the_prompt(tmp_path: Path, browser: chromium.Page) -> None:
    folder = write_run(tmp_path / "sft", [record(step) for step in range(1, 21)])
    write_samples(folder, lines_of_two_sets((10, 20)))
    browser.resize(1280, 1000)
    browser.open(file := plot([folder])[-1])
    browser.run("choose(data.prompts[3])")
    shown = browser.run("document.querySelector('main').innerText")
    assert lacking(shown, "Prompt maths 1", "target 1 of maths", "mean f1 0.50", "bleu 12", "lowest f1 first") == []
    assert "reward" not in shown.replace("samples.jsonl", "")
    assert browser.errors == []
    assert browser.requests == [file.as_uri()]
