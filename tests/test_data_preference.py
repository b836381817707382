"""Preferences: pairs of documents with the same beginning, whose answers are the targets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import corpora
from trueshard.errors import UserError
from trueshard.train.data.batches import IGNORED, Sample
from trueshard.train.data.prepared import Prepared

USER = [{"role": "user", "content": "What is 1 + 1?"}]
RIGHT, WRONG = ([{"role": "assistant", "content": text}] for text in ("That is 2.", "No idea, sorry."))


def preferences(root: Path, records: list[Any], length: int = 128) -> Prepared:
    file = corpora.write_lines(root / "pairs.jsonl", records)
    return corpora.made(corpora.config(root, {"format": "preference", "path": str(file)}, length=length))


def said(data: Prepared, sample: Sample) -> list[str]:
    return [corpora.learnt(data, sample[side]["targets"]) for side in ("chosen", "rejected")]


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (
            {"prompt": "1 + 1 =", "chosen": " 2", "rejected": " 3, I think"},
            [" 2<|endoftext|>", " 3, I think<|endoftext|>"],
        ),
        ({"prompt": USER, "chosen": RIGHT, "rejected": WRONG}, ["That is 2.<|im_end|>", "No idea, sorry.<|im_end|>"]),
        ({"chosen": USER + RIGHT, "rejected": USER + WRONG}, ["That is 2.<|im_end|>", "No idea, sorry.<|im_end|>"]),
        (
            {"prompt": USER + WRONG + USER, "chosen": RIGHT, "rejected": WRONG},
            ["That is 2.<|im_end|>", "No idea, sorry.<|im_end|>"],
        ),
    ],
    ids=["strings", "messages", "without prompt", "prompt with an answer"],
)
def test_only_answers_are_targets(tmp_path: Path, record: dict[str, Any], expected: list[str]) -> None:
    data = preferences(tmp_path, [record])
    sample = data.train[0]
    assert said(data, sample) == expected
    asked = int((sample["chosen"]["targets"] == IGNORED).sum())
    assert asked > 2
    assert (sample["chosen"]["input_ids"][:asked] == sample["rejected"]["input_ids"][:asked]).all()


def test_batch_has_the_chosen_then_the_rejected(tmp_path: Path) -> None:
    records = [{"prompt": "x" * n, "chosen": "yes", "rejected": "no, " * n} for n in range(1, 4)]
    data = preferences(tmp_path, records)
    samples = [data.train[index] for index in (2, 0, 1)]
    batch = data.collate(samples)
    rows = [sample[side]["input_ids"] for side in ("chosen", "rejected") for sample in samples]
    assert batch["input_ids"].shape == batch["targets"].shape == (6, max(map(len, rows)))
    for row, ids, mask in zip(rows, batch["input_ids"], batch["attention_mask"], strict=True):
        assert ids[mask.bool()].tolist() == row.tolist()
        assert mask.sum() == len(row)


def test_pair_without_an_answer_in_a_sequence_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [{"prompt": f"{n} why? " * 60 * n, "chosen": "yes", "rejected": "no"} for n in range(3)]
    assert len(preferences(tmp_path, records, length=32)) == 1
    assert "2 of 3 records left out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("record", "parts"),
    [
        ({"prompt": "a", "chosen": "b", "reject": "c"}, ("'rejected'", "'reject'?")),
        ({"prompt": "a", "chosen": RIGHT, "rejected": "c"}, ("chosen", "list", "rejected", "str")),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, ("chosen", "rejected", "same")),
        ({"chosen": USER + RIGHT, "rejected": RIGHT}, ("'prompt'", "begin")),
        ({"prompt": USER, "chosen": USER, "rejected": WRONG}, ("chosen", "assistant")),
    ],
)
def test_wrong_pairs_are_named(tmp_path: Path, record: Any, parts: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as error:
        preferences(tmp_path, [record])
    assert str(error.value).startswith(f"{tmp_path / 'pairs.jsonl'}, line 1")
    assert [part for part in parts if part not in str(error.value)] == []


def test_a_prompt_of_strings_is_the_words_that_both_begin_with(tmp_path: Path) -> None:
    records = [{"chosen": "The sky is blue.", "rejected": "The sky is black, I think."}]
    records.append({"chosen": "yes", "rejected": "yesterday"})
    data = preferences(tmp_path, records)
    assert said(data, data.train[0]) == [" blue.<|endoftext|>", " black, I think.<|endoftext|>"]
    assert said(data, data.train[1])[0].endswith("<|endoftext|>")
