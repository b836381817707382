"""`samples.jsonl`: each step once after a resume, plain JSON, damaged lines named; and the texts for trackers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from messages import lacking, naming
from parity import Ranks
from showing import Lost, answer, answers, trainer, write_samples
from test_metrics_trackers import CONFIG, Kept
from trueshard.errors import UserError
from trueshard.train.callbacks import Callback
from trueshard.train.metrics.answers import SamplesWriter, line, markdown, read_samples
from trueshard.train.metrics.step_metrics import Measures
from trueshard.train.metrics.trackers import Tracking, trackers
from trueshard.train.rl.samples import Sample
from trueshard.train.trainer import Trainer


class Rollouts(Callback):
    """Gives a writer the answers of each step: two prompts, three answers each."""

    def __init__(self, writer: SamplesWriter, **more: Any) -> None:
        self.writer, self.more = writer, more

    def on_step(self, trainer: Trainer, record: dict[str, Any]) -> None:
        self.writer.write([answer(record["step"], prompt, i, **self.more) for prompt in (5, 9) for i in range(3)])


def written(folder: Path, tracking: Tracking | None = None, **more: Any) -> list[Callback]:
    writer = SamplesWriter(folder, tracking, **more)
    return [Rollouts(writer), writer]


def steps(folder: Path) -> list[int]:
    return sorted({entry["step"] for entry in read_samples(folder / "samples.jsonl")})


def test_a_resumed_run_has_each_answer_once(tmp_path: Path) -> None:
    with pytest.raises(InterruptedError):  # steps 3 and 4 have answers, and no checkpoint
        trainer([*written(tmp_path), Lost(4)], 6, tmp_path).fit()
    assert steps(tmp_path) == [1, 2, 3, 4]
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write('{"step": 5, "pro')
    assert trainer(written(tmp_path), 6, tmp_path).fit()
    places = [(entry["step"], entry["prompt"], entry["sample"]) for entry in read_samples(tmp_path / "samples.jsonl")]
    assert places == [(step, prompt, i) for step in range(1, 7) for prompt in (5, 9) for i in range(3)]


def test_answers_that_the_file_has_are_not_written_again(tmp_path: Path) -> None:
    trainer(written(tmp_path), 2, tmp_path).fit()
    writer = SamplesWriter(tmp_path)
    resumed = trainer([writer], 3, tmp_path)
    resumed.resume()
    writer.on_start(resumed)
    writer.write([answer(2, 5, 0), answer(3, 5, 0)])  # a rollout that both steps use is made again
    writer.on_end(resumed)
    assert [entry["step"] for entry in read_samples(writer.path)] == [1] * 6 + [2] * 6 + [3]


def test_a_last_line_without_its_end_is_kept_if_it_is_whole(tmp_path: Path) -> None:
    trainer(written(tmp_path), 2, tmp_path).fit()
    file = tmp_path / "samples.jsonl"
    file.write_bytes(file.read_bytes().rstrip())
    trainer(written(tmp_path), 4, tmp_path).fit()
    assert len(read_samples(file)) == 24


def test_a_new_run_begins_with_an_empty_file(tmp_path: Path) -> None:
    write_samples(tmp_path, answers(2))
    trainer(written(tmp_path), 1).fit()
    assert len(read_samples(tmp_path / "samples.jsonl")) == 6


def test_a_sample_is_a_line(tmp_path: Path) -> None:
    whole = answer(7, 5, 2)
    own = {key: value for key, value in whole.items() if key in Sample.__dataclass_fields__}
    sample = Sample(asked=[1, 2], **own)
    assert line(sample, whole["prompt_text"], whole["pieces"], whole["trained_logprobs"]) | {"group": 0} == whole
    assert "trained_logprobs" not in line(sample, "", whole["pieces"])


def test_steps_may_be_left_out(tmp_path: Path) -> None:
    trainer(written(tmp_path, every=3), 7).fit()
    assert steps(tmp_path) == [1, 3, 6]


def test_what_is_not_finite_is_null_and_comes_back_as_nan(tmp_path: Path) -> None:
    lost = answer(1, 5, 0)
    lost |= {"reward": math.nan, "logprobs": [-math.inf, *lost["logprobs"][1:]], "parts": {"exact": math.inf}}
    writer = SamplesWriter(tmp_path)
    writer.on_start(trainer([], 1))
    writer.write([lost])
    json.loads((tmp_path / "samples.jsonl").read_text(), parse_constant=pytest.fail)
    (result,) = read_samples(writer.path)
    assert all(math.isnan(value) for value in (result["reward"], result["logprobs"][0], result["parts"]["exact"]))
    assert result["logprobs"][1:] == lost["logprobs"][1:]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ('{"step": 2, "pro', "JSON"),
        (json.dumps(answer(2, 5, 0) | {"reward": "good"}), "'reward'"),
        (json.dumps(answer(2, 5, 0) | {"own": [True]}), "lengths: tokens"),
        (json.dumps(answer(2, 5, 0) | {"pieces": "text"}), "'pieces'"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, damage: str, words: str) -> None:
    file = tmp_path / "samples.jsonl"
    file.write_text(json.dumps(answer(1, 5, 0)) + "\n" + damage)
    assert len(read_samples(file)) == 1
    file.write_text(json.dumps(answer(1, 5, 0)) + "\n" + damage + "\n" + json.dumps(answer(3, 5, 0)) + "\n")
    with pytest.raises(UserError, match=naming("samples.jsonl", "line 2", words, "delete")):
        read_samples(file)


def written_on(rank: int, ranks: int, folder: Path) -> None:
    trainer(written(folder / str(rank)), 2).fit()


@pytest.mark.rest
def test_one_rank_writes(ranks2: Ranks, tmp_path: Path) -> None:
    ranks2.run(written_on, tmp_path)
    assert [folder.name for folder in tmp_path.iterdir()] == ["0"]
    assert len(read_samples(tmp_path / "0" / "samples.jsonl")) == 12


# Texts


def test_a_text_has_the_best_and_the_worst_answer_literally() -> None:
    lines = [answer(1, 5, i, reward=i / 4, text=f"<b>{i}</b>\n* {i}") for i in range(4)]
    text = markdown(lines)
    assert lacking(text, "Prompt 5", "4 answers", "**Best:** reward 0.75", "**Worst:** reward 0", "`exact`") == []
    assert lacking(text, "\n    <b>3</b>\n    * 3", "\n    <b>0</b>\n    * 0") == []
    assert "<b>1" not in text
    long = markdown([answer(1, 5, 0, text="x" * 10_000)])
    assert len(long) < 3000
    assert "Worst" not in long


class Shows(Kept):
    """A tracker that takes texts, and fails at a step."""

    def __init__(self, fails_at: int = 0) -> None:
        super().__init__()
        self.fails_at, self.texts = fails_at, list[tuple[int, str, str]]()

    def text(self, step: int, tag: str, markdown: str) -> None:
        if step == self.fails_at:
            raise ConnectionError("nobody there")
        self.texts.append((step, tag, markdown))


def test_trackers_are_shown_the_first_group_alone_if_its_prompt_comes_again(tmp_path: Path) -> None:
    shows = Shows()
    writer = SamplesWriter(tmp_path, Tracking([shows], {}, tmp_path, "sort"))
    writer.write([answer(1, 5, i, group=i // 2, reward=i) for i in range(4)])
    writer.on_step(None, {"step": 1})  # type: ignore[arg-type]
    ((_, _, text),) = shows.texts
    assert lacking(text, "2 answers", "**Best:** reward 1", "**Worst:** reward 0") == []


def test_trackers_that_show_texts_get_some_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    silent, shows, fails = Kept(), Shows(), Shows(fails_at=4)
    tracking = Tracking([silent, shows, fails], CONFIG, tmp_path, "trial")
    trainer([Measures(), tracking, *written(tmp_path, tracking, text_every=4)], 9).fit()
    assert [(step, tag) for step, tag, _ in shows.texts] == [(1, "samples"), (4, "samples"), (8, "samples")]
    assert "Prompt 5" in shows.texts[0][2]
    assert [step for step, *_ in fails.texts] == [1]
    assert silent.told == shows.told == list(range(1, 10))
    assert lacking(capsys.readouterr().out, "Shows", "step 4", "nobody there") == []


def test_tensorboard_has_the_texts(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracking = Tracking(trackers(["tensorboard"]), CONFIG, tmp_path, "trial")
    trainer([Measures(), tracking, *written(tmp_path, tracking, text_every=2)], 4).fit()
    accumulator = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    (tag,) = [tag for tag in accumulator.Tags()["tensors"] if "samples" in tag]
    events = accumulator.Tensors(tag)
    assert [event.step for event in events] == [1, 2, 4]
    assert b"**Best:** reward" in events[0].tensor_proto.string_val[0]
