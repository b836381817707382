"""Text: where documents come from, how they become sequences, what is held out, and what is kept."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import get_args

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

import corpora
from messages import naming
from trueshard.errors import UserError
from trueshard.train.data.config import DataSection
from trueshard.train.data.formats import FORMATS
from trueshard.train.data.prepared import prepare
from trueshard.train.data.sources import HubSource, find


def texts(section: DataSection) -> list[str]:
    return [record.fields[section.field] for source in find(section) for record in source.records()]


def test_folder_is_read_in_the_order_of_its_paths(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a.txt", "a/.hidden.txt", ".git/x.txt", "c.bin", "empty.txt"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("" if name == "empty.txt" else name)
    assert texts(DataSection(path=str(tmp_path))) == ["a.txt", "a/z.md", "b.txt", ""]
    assert texts(DataSection(path=str(tmp_path), include=["*.md"])) == ["a/z.md"]


RECORDS = [{"text": "one", "more": "1"}, {"text": "", "more": ""}, {"text": 'two,\n"three"', "more": "2"}]


def write_csv(file: Path) -> None:
    file.write_text('\ufefftext,more\none,1\n"",""\n"two,\n""three""",2\n', encoding="utf-8")


WRITERS = {
    "a.jsonl": lambda file: file.write_text("\n\n".join(map(json.dumps, RECORDS))),
    "a.jsonl.gz": lambda file: file.write_bytes(gzip.compress("\n".join(map(json.dumps, RECORDS)).encode())),
    "a.json": lambda file: file.write_text(json.dumps(RECORDS, indent=1)),
    "nested.json": lambda file: file.write_text(json.dumps({"version": 1, "data": RECORDS})),
    "a.csv": write_csv,
    "a.parquet": lambda file: parquet.write_table(pyarrow.Table.from_pylist(RECORDS), file),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_gives_the_same_records(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name)
    (source,) = find(DataSection(path=str(tmp_path / name)))
    assert [record.fields for record in source.records()] == RECORDS
    word = {"a.parquet": "row", "a.json": "entry", "nested.json": "entry"}.get(name, "line")
    assert list(source.records())[-1].where.startswith(f"{tmp_path / name}, {word} ")


def test_folder_that_the_datasets_library_reads(tmp_path: Path) -> None:
    """As a data set on the hub is read, which is a folder like this one."""
    corpora.write_lines(tmp_path / "train.jsonl", RECORDS)
    for streaming in (False, True):
        source = HubSource("data.path", str(tmp_path), 1.0, (str(tmp_path),), streaming=streaming)
        assert [record.fields for record in source.records()] == RECORDS
        with pytest.raises(UserError, match=naming("data.path", "split", "trian")):
            list(HubSource("data.path", str(tmp_path), 1.0, (str(tmp_path),), split="trian").records())


def test_standard_library_leaves_tests_and_packages_out() -> None:
    (source,) = find(DataSection(path="stdlib"))
    names = [Path(file).as_posix() for file in source.files]
    assert any(name.endswith("json/decoder.py") for name in names)
    assert not any(part in name.split("/") for name in names for part in ("test", "site-packages", "idle_test"))
    size = source.size()
    assert size is not None
    assert size > 5e6


def test_folder_of_records_is_read_without_being_told(tmp_path: Path) -> None:
    corpora.write_lines(tmp_path / "b.jsonl", [{"text": "second"}])
    corpora.write_lines(tmp_path / "a.jsonl", [{"text": "first"}])
    assert texts(DataSection(path=str(tmp_path))) == ["first", "second"]


def test_folder_of_text_and_records_must_say_which(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("About the data.")
    corpora.write_lines(tmp_path / "a.jsonl", [{"text": "first"}])
    with pytest.raises(UserError, match=naming("README.md", "a.jsonl", "data.include")):
        find(DataSection(path=str(tmp_path)))
    assert texts(DataSection(path=str(tmp_path), include=["*.jsonl"])) == ["first"]


def test_documents_are_joined_and_cut_without_loss(tmp_path: Path) -> None:
    data = corpora.made(corpora.config(tmp_path, {"path": str(corpora.write_texts(tmp_path / "text"))}))
    tokenizer = data.tokenizer
    whole = [tokenizer(file.read_text())["input_ids"] for file in sorted((tmp_path / "text").iterdir())]
    joined = [token for ids in whole for token in [*ids, tokenizer.eos_token_id]]
    samples = [data.train[index] for index in range(len(data))]
    assert [token for sample in samples for token in sample["input_ids"]] == joined[: 32 * len(data)]
    assert [token for sample in samples for token in sample["targets"]] == joined[1 : 32 * len(data) + 1]
    assert len(joined) - 1 - 32 * len(data) < 32
    assert (data.summary.tokens, data.summary.documents) == (len(joined), 20)
    share = np.bincount(joined) / len(joined)
    assert data.summary.unigram_entropy == pytest.approx(-sum(p * np.log(p) for p in share if p))


def test_a_sample_knows_its_documents(tmp_path: Path) -> None:
    data = corpora.made(corpora.config(tmp_path, {"path": str(corpora.write_texts(tmp_path / "text"))}))
    corpora.check_places(data, [(data.train[i]["input_ids"], data.train.where(i)) for i in range(len(data))])


def test_held_out_text_is_the_part_asked_for_and_not_trained_on(tmp_path: Path) -> None:
    path = {"path": str(corpora.write_texts(tmp_path / "text", 200))}
    whole = corpora.made(corpora.config(tmp_path, path))
    total = whole.summary.tokens
    data = corpora.made(corpora.config(tmp_path, path, evaluation={"fraction": 0.2}))
    assert [*data.evaluation] == [""]
    assert len(data.evaluation[""]) == (round(0.2 * total) - 1) // 32
    assert len(data) == (total - round(0.2 * total) - 1) // 32
    parts = (data.train, data.evaluation[""])
    train, held = ({file for i in range(len(part)) for file in part.where(i).split(" and ")} for part in parts)
    assert len(train & held) <= 1


def test_a_single_long_document_can_be_held_out_of(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("To shard or not to shard, that is the question. " * 200)
    data = corpora.made(corpora.config(tmp_path, {"path": str(tmp_path / "one.txt")}, evaluation={"fraction": 0.1}))
    assert [*data.evaluation] == [""]
    assert len(data.evaluation[""]) == pytest.approx(0.1 * (len(data) + len(data.evaluation[""])), abs=1)


def test_evaluation_of_its_own_is_not_in_the_data(tmp_path: Path) -> None:
    settings = corpora.config(
        tmp_path,
        {"path": str(corpora.write_texts(tmp_path / "text"))},
        evaluation={"path": str(corpora.write_texts(tmp_path / "other", 12))},
    )
    data = corpora.made(settings)
    alone = corpora.made(corpora.config(tmp_path / "alone", {"path": str(tmp_path / "text")}))
    assert len(data) == len(alone)
    assert [*data.evaluation] == [""]
    assert f"{tmp_path / 'other'}" in data.evaluation[""].where(0)


@pytest.mark.parametrize("more", [{}, {"fraction": 0.2}])
def test_sets_of_an_evaluation_have_names(tmp_path: Path, more: dict[str, float]) -> None:
    sets = {name: str(corpora.write_texts(tmp_path / name, 12)) for name in ("maths", "code")}
    data = {"path": str(corpora.write_texts(tmp_path / "text"))}
    settings = corpora.config(tmp_path, data, evaluation={"sets": sets} | more)
    made = corpora.made(settings)
    assert [*made.evaluation] == [*([""] if more else []), "maths", "code"]
    for name in sets:
        assert f"{tmp_path / name}" in made.evaluation[name].where(0)
    (tmp_path / "none").mkdir()
    wrong = corpora.config(tmp_path / "wrong", data, evaluation={"sets": {"maths": str(tmp_path / "none")}})
    with pytest.raises(UserError, match=r"evaluation\.sets\.maths"):
        corpora.made(wrong)


def test_sources_are_mixed_by_weight(tmp_path: Path) -> None:
    data = corpora.made(corpora.config(tmp_path, corpora.weighted(tmp_path)))
    order = data.train.order(seed=1)  # type: ignore[union-attr]
    places = [data.train.where(index) for index in order.indices(0, 40)]  # type: ignore[union-attr]
    assert sum(str(tmp_path / "a") in place for place in places) == 30


def test_prepared_data_are_not_read_again(tmp_path: Path) -> None:
    settings = corpora.config(tmp_path, {"path": str(corpora.write_texts(tmp_path / "text"))})
    corpora.made(settings)
    kept = (tmp_path / "run" / "data").stat().st_ino
    for file in (tmp_path / "text").iterdir():
        file.chmod(0)
    data = corpora.made(settings)
    assert (tmp_path / "run" / "data").stat().st_ino == kept
    assert len(data) > 0


@pytest.mark.parametrize("change", ["content", "settings"])
def test_changed_data_are_read_again(tmp_path: Path, change: str) -> None:
    folder = corpora.write_texts(tmp_path / "text")
    first = corpora.made(corpora.config(tmp_path, {"path": str(folder)}))
    data: dict[str, object] = {"path": str(folder)}
    if change == "content":
        (folder / "000.txt").write_text("Something else that is longer than what was there. " * 20)
    else:
        data["include"] = ["00*.txt"]
    second = corpora.made(corpora.config(tmp_path, data))
    assert second.summary.crc32 != first.summary.crc32


def test_data_of_a_run_with_a_checkpoint_are_used_as_they_are(tmp_path: Path) -> None:
    folder = corpora.write_texts(tmp_path / "text")
    settings = corpora.config(tmp_path, {"path": str(folder)})
    first = corpora.made(settings)
    for file in folder.iterdir():
        os.remove(file)
    second = prepare(settings, frozen=True, make=True)
    assert second.summary == first.summary


def test_rank_that_does_not_see_the_folder_says_so(tmp_path: Path) -> None:
    settings = corpora.config(tmp_path, {"path": str(corpora.write_texts(tmp_path / "text"))})
    with pytest.raises(UserError, match=naming("run.dir", "every rank")):
        prepare(settings, frozen=True, make=False)


def test_nothing_is_left_of_data_that_are_refused(tmp_path: Path) -> None:
    corpora.write_lines(tmp_path / "a.jsonl", [{"text": "fine " * 100}, {"txt": "wrong"}])
    with pytest.raises(UserError, match=naming("a.jsonl", "line 2", "'text'", "keys")):
        corpora.made(corpora.config(tmp_path, {"path": str(tmp_path / "a.jsonl")}))
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("a.jsonl", '{"text": "x"}\n{"text": \n', ("a.jsonl, line 2", "JSON")),
        ("a.json", '[{"text": "x"},\n {]', ("a.json, line 2", "JSON")),
        ("a.json", '{"text": "x"}', ("a.json", "array")),
        ("a.csv", "text,more\na,b\nc\n", ("a.csv, line 3", "1 fields", "head of 2")),
        ("a.csv", 'text\n"a\n', ("a.csv, line", "CSV")),
        ("a.parquet", "no table", ("a.parquet", "Parquet")),
        ("a.jsonl.gz", "no gzip", ("a.jsonl.gz", "cannot be read")),
        ("a.jsonl", '{"txt": "x"}', ("line 1", "['txt']", "data.field", "'txt'?")),
        ("a.jsonl", '{"text": 3}', ("line 1", "int", "data.field")),
    ],
)
def test_damaged_records_name_file_and_line(tmp_path: Path, name: str, content: str, parts: tuple[str, ...]) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError) as error:
        corpora.made(corpora.config(tmp_path, {"path": str(tmp_path / name)}))
    assert "\n" not in str(error.value)
    assert [part for part in parts if part not in str(error.value)] == []


def test_hub_name_without_a_network_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=naming("data.path", "'someone/something'", "network")):
        find(DataSection(path="someone/something"))


def test_source_that_is_too_short_is_named(tmp_path: Path) -> None:
    corpora.write_texts(tmp_path / "a")
    (tmp_path / "b.txt").write_text("short")
    sources = [{"path": str(tmp_path / "a")}, {"path": str(tmp_path / "b.txt")}]
    with pytest.raises(UserError, match=naming("data.sources", "b.txt", "tokens", "one sequence")):
        corpora.made(corpora.config(tmp_path, {"sources": sources}))


@pytest.mark.parametrize(
    ("texts", "fraction", "parts"),
    [
        (20, 0.001, ("evaluation.fraction", "0.001", "one sequence")),
        (3, 0.9, ("data.path", "tokens", "evaluation.fraction")),
    ],
    ids=["nothing held out", "nothing left to learn from"],
)
def test_an_empty_part_is_refused(tmp_path: Path, texts: int, fraction: float, parts: tuple[str, ...]) -> None:
    folder = corpora.write_texts(tmp_path / "text", texts)
    with pytest.raises(UserError, match=naming(*parts)):
        corpora.made(corpora.config(tmp_path, {"path": str(folder)}, evaluation={"fraction": fraction}))


def test_own_tokenizer_that_changes_makes_the_data_anew(tmp_path: Path) -> None:
    folder = corpora.write_texts(tmp_path / "text")
    for name, size in (("small", 270), ("large", 400)):
        data = corpora.made(corpora.config(tmp_path / name, {"path": str(folder)}, tokenizer={"vocab_size": size}))
        data.tokenizer.save_pretrained(str(tmp_path / name / "own"))
    own = {"path": str(tmp_path / "small" / "own")}
    first = corpora.made(corpora.config(tmp_path, {"path": str(folder)}, tokenizer=own))
    os.replace(tmp_path / "large" / "own" / "tokenizer.json", tmp_path / "small" / "own" / "tokenizer.json")
    second = corpora.made(corpora.config(tmp_path, {"path": str(folder)}, tokenizer=own))
    assert second.summary.tokens < first.summary.tokens  # type: ignore[operator]


def test_folder_of_several_splits_must_say_which(tmp_path: Path) -> None:
    for name in ("train-0.jsonl", "train-1.jsonl", "test-0.jsonl"):
        corpora.write_lines(tmp_path / name, [{"text": name}])
    with pytest.raises(UserError, match=naming("split", "test (test-0.jsonl)", "train (", "data.include")):
        find(DataSection(path=str(tmp_path)))
    assert texts(DataSection(path=str(tmp_path), include=["train*"])) == ["train-0.jsonl", "train-1.jsonl"]


def test_saved_data_set_of_the_datasets_library(tmp_path: Path) -> None:
    import datasets

    saved = datasets.Dataset.from_list(RECORDS)
    saved.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": saved, "test": saved.select([0])}).save_to_disk(tmp_path / "several")
    assert texts(DataSection(path=str(tmp_path / "one"))) == [record["text"] for record in RECORDS]
    assert texts(DataSection(path=str(tmp_path / "several"), split="test")) == ["one"]


def test_every_value_of_data_format_has_a_class_in_the_table() -> None:
    assert get_args(DataSection.model_fields["format"].annotation) == tuple(FORMATS)
