"""`data.long`: what becomes of records that are longer than a sequence."""

from __future__ import annotations

import json
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import corpora
from messages import lacking, naming
from resting import all_but
from trueshard.errors import UserError
from trueshard.train.data.batches import IGNORED
from trueshard.train.data.prepared import Prepared, prepare

LENGTH = 32
SHORT, LONG = ({"prompt": "a", "completion": letter * size} for letter, size in (("b", 10), ("c", 100)))
DEEP = {"prompt": "q" * 80, "completion": "d" * 50}
RECORDS = [SHORT, LONG, DEEP]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A tokenizer that has a token for each byte, so that lengths are known."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(alphabet, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>").save_pretrained(str(folder))
    return {"path": str(folder)}


def config(root: Path, tokenizer: dict[str, Any], records: list[Any], **data: Any) -> Any:
    data = {"packing": False} | data if data.get("format", "completion") == "completion" else data
    root.mkdir(exist_ok=True)
    file = corpora.write_lines(root / "data.jsonl", records)
    sections = {name: data.pop(name) for name in ("evaluation",) if name in data}
    given = {"format": "completion", "path": str(file), **data}
    return corpora.config(root, given, length=LENGTH, tokenizer=tokenizer, **sections)


def learnt(data: Prepared, samples: Any) -> list[str]:
    return [corpora.learnt(data, sample["targets"]) for sample in samples]


@pytest.mark.parametrize(
    ("long", "expected", "told"),
    [
        (None, ["b" * 10 + "<end>", "c" * 32], ("1 of 3 records cut", "line 2", "1 left out", "line 3")),
        ("cut", ["b" * 10 + "<end>", "c" * 32], ("1 of 3 records cut", "1 left out as no answer")),
        ("drop", ["b" * 10 + "<end>"], ("2 of 3 records left out as longer", "line 2")),
        (
            "split",
            ["b" * 10 + "<end>", "c" * 32, "c" * 32, "c" * 32, "cccc<end>", "d" * 17, "d" * 32, "d<end>"],
            ("2 of 3 records split", "line 2"),
        ),
    ],
)
@pytest.mark.parametrize("streaming", all_but([False], [False, True]))
def test_a_long_record_is_treated_as_asked(
    tmp_path: Path,
    tokenizer: dict[str, Any],
    long: str | None,
    expected: list[str],
    told: tuple[str, ...],
    streaming: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Split: every token of an answer is a target once, whatever sequence has it."""
    data = corpora.made(config(tmp_path, tokenizer, RECORDS, long=long, streaming=streaming))
    if streaming:
        samples = [sample for sample, _, _ in islice(data.train.begin(0), len(expected))]  # type: ignore[union-attr]
        assert sorted(learnt(data, samples)) == sorted(expected)
        return
    assert learnt(data, [data.train[n] for n in range(len(data))]) == expected  # type: ignore[index]
    out = capsys.readouterr().out
    assert lacking(out, f"train.sequence_length = {LENGTH}", *told) == []
    assert data.summary.records == 3
    assert sum(count for count, _ in data.summary.done.values()) == 2


def test_packed_pieces_of_a_record_do_not_see_each_other(tmp_path: Path, tokenizer: dict[str, Any]) -> None:
    data = corpora.made(config(tmp_path, tokenizer, RECORDS, long="split", packing=True))
    found = sum(int((data.train[n]["targets"] != IGNORED).sum()) for n in range(len(data)))  # type: ignore[index]
    assert found == 11 + 101 + 51
    firsts = [int((data.train[n]["position_ids"] == 0).sum()) for n in range(len(data))]  # type: ignore[index]
    assert sum(firsts) >= 8


def test_an_error_names_the_record(tmp_path: Path, tokenizer: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=naming("line 2", 101, "train.sequence_length", "data.long")):
        corpora.made(config(tmp_path, tokenizer, RECORDS, long="error"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("form", "long", "remedy"),
    [("preference", "split", "'cut' or 'drop' or 'error'"), ("text", "drop", "remove"), ("vision", "split", "'cut'")],
)
def test_a_format_refuses_what_it_cannot(tmp_path: Path, form: str, long: str, remedy: str) -> None:
    from trueshard.train.data.config import DataSection
    from trueshard.train.data.formats import FORMATS

    with pytest.raises(UserError, match=naming("data.long", form, remedy)):
        FORMATS[form](DataSection(format=form, path="a", long=long), 8, None, None)


@pytest.mark.parametrize("rows", [1, 2])
def test_all_pieces_of_a_record_are_held_out_or_none(tmp_path: Path, tokenizer: dict[str, Any], rows: int) -> None:
    records: list[Any] = [{"prompt": "a", "completion": f"{n:04}" * 30} for n in range(20)]
    data: dict[str, Any] = {"long": "split"}
    if rows == 2:
        records = [{"prompt": "a", "chosen": f"{n}", "rejected": f"{n + 1}"} for n in range(20)]
        data = {"format": "preference"}
    settings = config(tmp_path, tokenizer, records, **data, evaluation={"fraction": 0.25})
    made = corpora.made(settings)
    places = [{part.where(n) for n in range(len(part))} for part in (made.train, made.evaluation[""])]  # type: ignore
    assert [len(each) for each in places] == [15, 5]
    assert not places[0] & places[1]
    assert len(made) == 15 * (4 if rows == 1 else 1)


@pytest.mark.rest
@pytest.mark.parametrize("packing", [False, True])
def test_a_stream_goes_on_inside_of_a_split_record(tmp_path: Path, tokenizer: dict[str, Any], packing: bool) -> None:
    records = [{"prompt": "a", "completion": f"{n:03}" * (5 + 7 * n)} for n in range(12)]
    settings = config(tmp_path, tokenizer, records, long="split", packing=packing, streaming=True)
    stream = corpora.made(settings).train
    whole = list(islice(stream.begin(3), 60))  # type: ignore[union-attr]
    for first, (_, _, blocks) in list(enumerate(whole))[::7]:
        again = list(islice(stream.begin(3, first, json.loads(json.dumps(blocks))), 60 - first))  # type: ignore[union-attr]
        for (one, place, _), (two, other, _) in zip(whole[first:], again, strict=True):
            np.testing.assert_array_equal(one["targets"], two["targets"])
            assert place == other
    assert any(one[1] == two[1] for one, two in pairwise(whole))


def test_data_without_the_key_stay_as_they_are(tmp_path: Path, tokenizer: dict[str, Any]) -> None:
    """A run that began before there was the key finds its data, and resumes."""
    settings = config(tmp_path, tokenizer, [SHORT])
    corpora.made(settings)
    file = tmp_path / "run/data/data.json"
    summary = json.loads(file.read_text())
    assert "data.long" not in summary["identity"]
    assert "data.long" in config(tmp_path, tokenizer, [SHORT], long="drop").identity()
    for key in ("records", "done", "notes"):
        summary.pop(key)
    file.write_text(json.dumps(summary))
    (tmp_path / "data.jsonl").unlink()
    assert len(prepare(settings, frozen=True, make=False)) == 1
