"""Prompts with completions, and instructions: the prompt is no target, and the format shows in the keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import corpora
import running
from messages import lacking, naming
from resting import all_but
from trueshard.errors import UserError
from trueshard.train.config import Config
from trueshard.train.data.batches import IGNORED
from trueshard.train.data.prepared import Prepared
from trueshard.train.parse import to_toml
from trueshard.train.run.resuming import located

USER = [{"role": "user", "content": "What is 1 + 1?"}]
SAID = [{"role": "assistant", "content": "That is 2."}]
TEXTS = {"prompt": "1 + 1 =", "completion": " 2"}
ALPACA = {"instruction": "Add.", "input": "1 and 1", "output": "2"}


def settings(root: Path, records: list[Any], name: str = "data.jsonl", **data: Any) -> Config:
    file = corpora.write_lines(root / name, records)
    if name.endswith(".json"):
        file.write_text(json.dumps(records))
    return located(corpora.config(root, {"path": str(file), **data}, length=128))


def made(root: Path, records: list[Any], **data: Any) -> Prepared:
    return corpora.made(settings(root, records, **data))


@pytest.mark.parametrize(
    ("record", "read", "learnt"),
    [
        (TEXTS, "1 + 1 = 2", " 2<|endoftext|>"),
        ({"prompt": "", "completion": "hello"}, "hello", "<|endoftext|>"),
        (
            {"prompt": USER, "completion": SAID},
            "<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n<|im_start|>assistant\nThat is 2.<|im_end|>",
            "That is 2.<|im_end|>",
        ),
        (
            {"prompt": USER + SAID + USER, "completion": [{**SAID[0], "content": "2!"}]},
            "That is 2.<|im_end|>",
            "2!<|im_end|>",
        ),
        (
            ALPACA,
            "<|im_start|>user\nAdd.\n\n1 and 1<|im_end|>\n<|im_start|>assistant\n2<|im_end|>",
            "2<|im_end|>",
        ),
        ({**ALPACA, "input": ""}, "user\nAdd.<|im_end|>", "2<|im_end|>"),
        ({**ALPACA, "input": None}, "user\nAdd.<|im_end|>", "2<|im_end|>"),
        ({"instruction": "Add.", "output": "2"}, "user\nAdd.<|im_end|>", "2<|im_end|>"),
    ],
    ids=["text", "no prompt", "messages", "several turns", "alpaca", "empty input", "null input", "without input"],
)
@pytest.mark.parametrize("streaming", all_but([False], [False, True]))
def test_the_prompt_is_read_and_the_completion_learnt(
    tmp_path: Path, record: dict[str, Any], read: str, learnt: str, streaming: bool
) -> None:
    data = made(tmp_path, [record], packing=False, streaming=streaming)
    sample = next(data.train.begin(0))[0] if streaming else data.train[0]  # type: ignore[union-attr]
    assert read in data.tokenizer.decode(sample["input_ids"]) + "<|im_end|>"
    assert corpora.learnt(data, sample["targets"]) == learnt


@pytest.mark.parametrize("record", [TEXTS, {"prompt": USER, "completion": SAID}, ALPACA])
def test_everything_is_a_target_when_asked_for(tmp_path: Path, record: dict[str, Any]) -> None:
    data = made(tmp_path, [record], packing=False, answers_only=False)
    assert (data.train[0]["targets"] != IGNORED).all()


@pytest.mark.rest
def test_completions_are_packed(tmp_path: Path) -> None:
    data = made(tmp_path, [{"prompt": f"{n} + 1 =", "completion": f" {n + 1}"} for n in range(20)])
    assert len(data) < 4
    assert "position_ids" in data.train[0]


@pytest.mark.parametrize(
    ("record", "given", "expected"),
    [
        (TEXTS, {}, "completion"),
        (ALPACA, {}, "instruction"),
        ({"messages": USER + SAID}, {}, "chat"),
        ({"conversations": [{"from": "human", "value": "?"}]}, {"packing": False}, "chat"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, {}, "preference"),
        ({"messages": USER + SAID, "images": ["a.png"]}, {}, "vision"),
        ({"messages": USER + SAID, "images": []}, {}, "chat"),
        ({**ALPACA, "text": "Add."}, {}, "text"),
        ({**ALPACA, "body": "Add."}, {"field": "body"}, "text"),
        ({**ALPACA, "text": "Add."}, {"format": "instruction"}, "instruction"),
        ({"title": "a"}, {}, "text"),
    ],
)
@pytest.mark.parametrize("name", all_but(["data.jsonl"], ["data.jsonl", "data.json"]))
def test_the_format_shows_in_the_keys(
    tmp_path: Path, record: dict[str, Any], given: dict[str, Any], expected: str, name: str
) -> None:
    config = settings(tmp_path, [record], name, **given)
    assert config.data.format == expected
    assert f'format = "{expected}"' in to_toml(config)
    assert located(config) == config


def test_a_text_is_not_read_to_find_its_format(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff")
    assert located(corpora.config(tmp_path, {"path": str(tmp_path / "a.txt")})).data.format == "text"
    assert located(corpora.config(tmp_path, {"path": str(tmp_path / "no")})).data.format == "text"


@pytest.mark.parametrize(
    ("record", "given", "parts"),
    [
        ({**TEXTS, **ALPACA}, {}, ("data.format", "completion or instruction")),
        ({"prompt": "a", "text": "b"}, {"format": "completion"}, ("'completion'", "['prompt', 'text']")),
        ({"prompt": "a", "completions": "b"}, {"format": "completion"}, ("'completion'", "'completions'?")),
        ({"prompt": USER, "completion": "2"}, {}, ("prompt list", "completion str", "lists of messages")),
        ({"prompt": "2", "completion": 2}, {}, ("prompt str", "completion int")),
        ({"prompt": "2", "completion": " "}, {}, ("an empty 'completion'",)),
        ({"prompt": USER, "completion": USER}, {}, ("assistant",)),
        ({"instruction": "a"}, {"format": "instruction"}, ("'output'", "['instruction']")),
        ({**ALPACA, "input": 3}, {}, ("input int",)),
        ({**ALPACA, "output": ""}, {}, ("an empty 'output'",)),
        (TEXTS, {"format": "text"}, ("'text'", "['completion', 'prompt']", "data.field")),
        ({"title": "a"}, {"packing": True}, ("data.packing", '"chat" or "completion"')),
    ],
)
def test_wrong_records_are_named(
    tmp_path: Path, record: dict[str, Any], given: dict[str, Any], parts: tuple[str, ...]
) -> None:
    with pytest.raises((UserError, ValueError)) as caught:
        made(tmp_path, [record], **given)
    assert lacking(str(caught.value), *parts) == []
    assert not (tmp_path / "run").exists()


PLAIN = {"text": " ".join(map(str, range(400)))}
CHATML = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("record", "prompt", "expected"),
    [
        (PLAIN, "hello", "hello"),
        (PLAIN, "", ""),
        ({"messages": USER + SAID}, "hello", CHATML),
        ({"messages": USER + SAID}, "", None),
        (TEXTS, "hello", "hello"),
        (TEXTS, "", None),
        ({"prompt": USER, "completion": SAID}, "hello", CHATML),
        (ALPACA, "hello", CHATML),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "hello", "hello"),
        ({"prompt": USER, "chosen": SAID, "rejected": USER + SAID}, "hello", CHATML),
    ],
)
@pytest.mark.parametrize("streaming", all_but([False], [False, True]))
def test_what_is_sampled_begins_as_the_data_do(
    tmp_path: Path, record: dict[str, Any], prompt: str, expected: str | None, streaming: bool
) -> None:
    """Also when the data are there already."""
    config = settings(tmp_path, [record], streaming=streaming)
    config = config.model_copy(update={"sample": config.sample.model_copy(update={"prompt": prompt})})
    assert [corpora.made(config).opening for _ in range(2)] == [expected, expected]


def test_a_template_that_refuses_the_prompt_is_named_before_training(tmp_path: Path) -> None:
    template = "{% if messages | length < 2 %}{{ raise_exception('no answer') }}{% endif %}{{ messages[1].content }}"
    (tmp_path / "template.jinja").write_text(template)
    config = settings(tmp_path, [{"messages": USER + SAID}], answers_only=False)
    config = config.model_copy(
        update={
            "sample": config.sample.model_copy(update={"prompt": "hello"}),
            "tokenizer": config.tokenizer.model_copy(update={"chat_template": str(tmp_path / "template.jinja")}),
        }
    )
    with pytest.raises(UserError, match=naming("sample.prompt", "no answer")):
        corpora.made(config)
    assert not (tmp_path / "run").exists()


@pytest.mark.rest
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_model_of_conversations_answers_when_training_ends(tmp_path: Path, ranks: str) -> None:
    """It has learnt one answer by heart, which ends where the model ends it; and the format was found."""
    folder = running.project(tmp_path / "project")
    corpora.write_lines(folder / "data.jsonl", [{"prompt": USER, "completion": SAID}] * 8)
    text = (folder / "train.toml").read_text().replace('path = "text"', 'path = "data.jsonl"')
    (folder / "train.toml").write_text(text.replace("tokens = 0", 'prompt = "What is 1 + 1?"\ntemperature = 0'))
    out = running.run(folder, "--nproc", ranks)
    assert "prompts with completions" in out
    assert (folder / "run" / "sample.txt").read_text() == "user\nWhat is 1 + 1?\nassistant\nThat is 2."
    given = json.loads((folder / "run" / "config.json").read_text())
    assert given["config"]["data"]["format"] == "completion"
    (folder / "data.jsonl").unlink()  # what it trains on is kept
    assert "step 41/41" in running.run(folder, "--nproc", ranks, "--set", "train.steps=41")


LABELLED = [{**TEXTS, "label": True}, {"prompt": "1 + 1 =", "completion": " 3", "label": False}]


def test_labels_are_learnt_by_name_alone_and_only_the_good_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=naming("data.jsonl, line 1", "'label'", "KTO", 'data.format = "label"', "TRL")):
        made(tmp_path, LABELLED)
    data = made(tmp_path, LABELLED * 3, format="label", packing=False)
    assert [corpora.learnt(data, data.train[n]["targets"]) for n in range(len(data))] == [" 2<|endoftext|>"] * 3
    assert "3 of 6 records left out as their label is false" in capsys.readouterr().out
    with pytest.raises(UserError, match=naming("line 1", "label is 'good'", "true or false")):
        made(tmp_path / "run", [{**TEXTS, "label": "good"}], format="label")


def test_files_of_several_formats_are_named_each(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name, record in {"a": TEXTS, "b": {"messages": USER + SAID}, "c": TEXTS, "d": ALPACA}.items():
        corpora.write_lines(tmp_path / "data" / f"{name}.jsonl", [record] * 2)
    said = ("completion (", "a.jsonl, line 1", "chat (", "b.jsonl, line 1", "instruction (", "d.jsonl", "data.include")
    with pytest.raises(UserError, match=naming(*said)):
        located(corpora.config(tmp_path, {"path": str(tmp_path / "data")}))
    given = {"path": str(tmp_path / "data"), "include": ["a.jsonl", "c.jsonl"]}
    assert located(corpora.config(tmp_path, given)).data.format == "completion"
