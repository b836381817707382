"""Streams: samples while the data are read, in an order that depends on the seed alone."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import corpora
from messages import naming
from trueshard.errors import UserError
from trueshard.train.data.batches import IGNORED, Stream
from trueshard.train.data.loader import Loader
from trueshard.train.data.prepared import BUFFER, Prepared, prepare, shuffled


def streamed(root: Path, settings: dict[str, Any], **sections: Any) -> Prepared:
    return corpora.made(corpora.config(root, settings | {"streaming": True}, **sections))


def first(data: Prepared, count: int, seed: int = 0) -> list[tuple[list[int], str]]:
    """The first samples and where they come from."""
    assert isinstance(data.train, Stream)
    return [(sample["input_ids"].tolist(), where) for sample, where in islice(data.train.begin(seed), count)]


def test_text_has_the_sequences_of_prepared_text(tmp_path: Path) -> None:
    path = {"path": str(corpora.write_texts(tmp_path / "text"))}
    kept = corpora.made(corpora.config(tmp_path / "kept", path))
    whole = sorted(kept.train[index]["input_ids"].tolist() for index in range(len(kept)))  # type: ignore[index]
    data = streamed(tmp_path, path)
    assert sorted(ids for ids, _ in first(data, len(whole))) == whole
    again = [ids for ids, _ in first(data, 2 * len(whole))]
    assert sorted(again[len(whole) :]) == whole
    assert again[len(whole) :] != again[: len(whole)]


def test_samples_follow_from_the_seed(tmp_path: Path) -> None:
    data = streamed(tmp_path, {"path": str(corpora.write_texts(tmp_path / "text"))})
    assert first(data, 20, seed=1) == first(data, 20, seed=1)
    assert first(data, 20, seed=1) != first(data, 20, seed=2)


def test_places_name_the_documents(tmp_path: Path) -> None:
    data = streamed(tmp_path, {"path": str(corpora.write_texts(tmp_path / "text"))})
    corpora.check_places(data, first(data, 20))


@pytest.mark.parametrize("packing", [True, False])
def test_conversations_have_the_targets_of_prepared_ones(tmp_path: Path, packing: bool) -> None:
    settings = {
        "format": "chat",
        "path": str(corpora.write_conversations(tmp_path / "chat.jsonl")),
        "packing": packing,
    }
    kept = corpora.made(corpora.config(tmp_path / "kept", settings, length=128))
    data = streamed(tmp_path, settings, length=128)
    assert isinstance(data.train, Stream)
    found = [sample for sample, _ in islice(data.train.begin(0), len(kept))]
    expected = [kept.train[index] for index in range(len(kept))]  # type: ignore[index]

    def targets(samples: list[Any]) -> list[list[int]]:
        return sorted(sample["targets"].tolist() for sample in samples)

    assert targets(found) == targets(expected)
    assert any((sample["targets"] != IGNORED).any() for sample in found)


def test_sources_take_turns_by_weight(tmp_path: Path) -> None:
    data = streamed(tmp_path, corpora.weighted(tmp_path))
    assert sum(str(tmp_path / "a") in where for _, where in first(data, 40)) == 30


def test_resume_skips_to_the_sample(tmp_path: Path) -> None:
    data = streamed(tmp_path, {"path": str(corpora.write_texts(tmp_path / "text"))})
    whole = Loader(data.train, data.collate, batch_size=6)
    batches = [next(whole)["input_ids"] for _ in range(8)]
    for step, ranks in ((0, 2), (3, 3), (7, 1)):
        parts = []
        for rank in range(ranks):
            loader = Loader(data.train, data.collate, batch_size=6, rank=rank, ranks=ranks)
            loader.load_state_dict({"samples": 6 * step})
            parts.append(next(loader)["input_ids"])
            loader.close()
        np.testing.assert_array_equal(np.concatenate(parts), batches[step])
    whole.close()


def test_shuffling_keeps_every_sample_and_moves_them() -> None:
    plain = [({}, str(number)) for number in range(3 * BUFFER)]
    found = [int(where) for _, where in shuffled(plain, seed=4)]
    assert sorted(found) == list(range(3 * BUFFER))
    assert abs(np.corrcoef(found[:BUFFER], np.arange(BUFFER))[0, 1]) < 0.8
    assert max(number - place for place, number in enumerate(found)) <= BUFFER


def test_evaluation_beside_a_stream_is_prepared(tmp_path: Path) -> None:
    other = corpora.write_texts(tmp_path / "other", 12)
    data = streamed(tmp_path, {"path": str(corpora.write_texts(tmp_path / "text"))}, evaluation={"path": str(other)})
    assert data.evaluation is not None
    assert str(other) in data.evaluation.where(0)
    with pytest.raises(TypeError, match="not known"):
        len(data)


def test_changed_files_change_what_a_resume_compares(tmp_path: Path) -> None:
    folder = corpora.write_texts(tmp_path / "text")
    settings = corpora.config(tmp_path, {"path": str(folder), "streaming": True})
    before = corpora.made(settings).summary.crc32
    assert prepare(settings, frozen=True, make=True).summary.crc32 == before
    (folder / "000.txt").write_text("Something else. " * 40)
    assert prepare(settings, frozen=True, make=True).summary.crc32 != before


def test_stream_without_a_sequence_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(UserError, match=naming("data.path", "a.txt", "one sequence")):
        streamed(tmp_path, {"path": str(tmp_path / "a.txt")})
    assert not (tmp_path / "run").exists()


def test_damaged_line_is_named_when_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "fine and long enough to fill it"}\n' * 300 + "{\n")
    own = corpora.made(corpora.config(tmp_path / "own", {"path": str(corpora.write_texts(tmp_path / "text"))}))
    own.tokenizer.save_pretrained(str(tmp_path / "tokenizer"))
    data = streamed(tmp_path, {"path": str(file)}, tokenizer={"path": str(tmp_path / "tokenizer")})
    with pytest.raises(UserError, match=naming("a.jsonl", "line 301", "JSON")):
        next(Loader(data.train, data.collate, batch_size=1))
