"""Streams: samples while the data are read, in an order that depends on the seed alone."""

from __future__ import annotations

import gzip
import io
import json
import random
import tarfile
import zipfile
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

import corpora
from messages import naming
from trueshard.errors import UserError
from trueshard.train.data import cutting, sources, streams
from trueshard.train.data.batches import IGNORED, Batch, Stream
from trueshard.train.data.config import DataSection
from trueshard.train.data.formats import FORMATS, base
from trueshard.train.data.formats import text as text_format
from trueshard.train.data.loader import Loader
from trueshard.train.data.prepared import Prepared, prepare
from trueshard.train.data.sources import DataSource, HubSource, Place
from trueshard.train.data.streams import BLOCK
from trueshard.train.data.tokenizer import train_tokenizer


def streamed(root: Path, settings: dict[str, Any], **sections: Any) -> Prepared:
    return corpora.made(corpora.config(root, settings | {"streaming": True}, **sections))


def first(data: Prepared, count: int, seed: int = 0) -> list[tuple[list[int], str]]:
    """The first samples and where they come from."""
    assert isinstance(data.train, Stream)
    return [(sample["input_ids"].tolist(), where) for sample, where, _ in islice(data.train.begin(seed), count)]


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
    found = [sample for sample, *_ in islice(data.train.begin(0), len(kept))]
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


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks, groups and pieces of a few, so that little data has many of each."""
    sizes: dict[Any, dict[str, int]] = {streams: {"BLOCK": 5, "TOGETHER": 8}, sources: {"TABLE": 4}}
    sizes |= {base: {"RECORDS_AT_ONCE": 3}, text_format: {"PIECE": 256}, cutting: {"PIECE": 256, "SEARCH": 128}}
    for module, values in sizes.items():
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)


def texts(count: int = 40) -> list[dict[str, Any]]:
    """Records of a few words, an empty one, and two that are longer than many sequences."""
    words = [f"Record {number} says: " + "To shard or not. " * (number % 5) for number in range(count)]
    words[7], words[11], words[30] = " ", words[11] + "A long text goes on, and on. " * 150, "Another one? " * 200
    return [{"text": text} for text in words]


def write_tar(file: Path, samples: list[dict[str, bytes]]) -> Path:
    """A WebDataset: sample n has the members n.extension."""
    with tarfile.open(file, "w:gz" if file.suffix == ".gz" else "w") as archive:
        for number, sample in enumerate(samples):
            for extension, content in sample.items():
                info = tarfile.TarInfo(f"part/{number:05}.{extension}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return file


def _text(root: Path) -> dict[str, Any]:
    folder = corpora.write_texts(root / "text")
    (folder / "010.txt").write_text("A file that is longer than a chunk: é, ü. " * 30_000)
    return {"path": str(folder)}


def _jsonl(root: Path) -> dict[str, Any]:
    return {"path": str(corpora.write_lines(root / "a.jsonl", texts()))}


def _gzip(root: Path) -> dict[str, Any]:
    lines = corpora.write_lines(root / "a.jsonl", texts()).read_bytes()
    (root / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    return {"path": str(root / "a.jsonl.gz")}


def _csv(root: Path) -> dict[str, Any]:
    (root / "a.csv").write_text("text\n" + "".join(f'"{record["text"]}\nand more"\n' for record in texts()))
    return {"path": str(root / "a.csv")}


def _json(root: Path) -> dict[str, Any]:
    (root / "a.json").write_text(json.dumps(texts()))
    return {"path": str(root / "a.json")}


def _parquet(root: Path) -> dict[str, Any]:
    (root / "parts").mkdir(parents=True)
    for number, rows in enumerate((texts()[:25], texts()[25:])):
        pq.write_table(pa.Table.from_pylist(rows), root / f"parts/{number}.parquet", row_group_size=7)
    return {"path": str(root / "parts")}


def _tar(root: Path) -> dict[str, Any]:
    samples = [{"txt": record["text"].encode(), "json": b'{"n": 1}', "cls": b"3"} for record in texts()]
    return {"path": str(write_tar(root / "a.tar", samples)), "field": "txt"}


def _tar_of_records(root: Path) -> dict[str, Any]:
    return {"path": str(write_tar(root / "a.tar.gz", [{"json": json.dumps(record).encode()} for record in texts()]))}


def _pattern(root: Path) -> dict[str, Any]:
    for number in range(3):
        corpora.write_lines(root / f"a-{number}.jsonl", texts()[number::3])
    return {"path": str(root / "a-*.jsonl")}


def _address(root: Path) -> dict[str, Any]:
    _pattern(root)
    return {"path": f"file://{root}/a-[02].jsonl"}


def _archive(root: Path) -> dict[str, Any]:
    _pattern(root)
    with zipfile.ZipFile(root / "a.zip", "w") as archive:
        for number in range(3):
            archive.write(root / f"a-{number}.jsonl", f"a-{number}.jsonl")
    return {"path": f"zip://a-*.jsonl::file://{root}/a.zip"}


def _memory(root: Path) -> dict[str, Any]:
    with fsspec.open(f"memory:/{root}/a.tar", "wb") as stream:
        stream.write(write_tar(root / "a.tar", [{"txt": text["text"].encode()} for text in texts()]).read_bytes())
    return {"path": f"memory:/{root}", "field": "txt"}


def _hub(root: Path) -> dict[str, Any]:
    """As a data set on the hub is read: through `datasets`, of two files."""
    _parquet(root)
    return {"path": "owner/name"}


def _saved(root: Path) -> dict[str, Any]:
    datasets.Dataset.from_list(texts()).save_to_disk(root / "saved")
    return {"path": str(root / "saved")}


def _chat(root: Path) -> dict[str, Any]:
    return {"path": str(corpora.write_conversations(root / "chat.jsonl", 60)), "format": "chat"}


def _unpacked(root: Path) -> dict[str, Any]:
    return _chat(root) | {"packing": False}


def _preference(root: Path) -> dict[str, Any]:
    pairs = ({"prompt": f"{n}?", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in range(40))
    return {"path": str(corpora.write_lines(root / "a.jsonl", pairs)), "format": "preference"}


KINDS = (_text, _jsonl, _gzip, _csv, _json, _parquet, _tar, _tar_of_records, _pattern, _address, _archive, _memory)
KINDS += (_hub, _saved, _chat, _unpacked, _preference, corpora.weighted)
QUICK = (_text, _chat)


def opened(root: Path, settings: dict[str, Any]) -> Prepared:
    """The stream as a new process opens it; of the data set on the hub, what lies in `parts`."""
    return streamed(root, settings, tokenizer={"path": str(tokenizer(root.parent))}, length=96)


def tokenizer(root: Path) -> Path:
    place = root / "tokenizer"
    if not place.exists():
        train_tokenizer([record["text"] for record in texts()], 400, "text").save_pretrained(str(place))
    return place


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", [pytest.param(k, marks=[] if k in QUICK else pytest.mark.rest) for k in KINDS])
def test_resume_gives_the_batches_of_a_run_that_never_stopped(tmp_path: Path, kind: Any, monkeypatch: Any) -> None:
    """Over the ends of passes, at another number of ranks and another batch size, and stopped twice."""
    root = tmp_path / "data"
    root.mkdir()
    if kind is _hub:
        found = HubSource("data.path", str(root / "parts"), 1.0, (str(root / "parts"),), streaming=True)
        monkeypatch.setattr("trueshard.train.data.prepared.find", lambda *_: [found])
    settings = kind(root)

    def loader(ranks: int = 1, rank: int = 0, size: int = 6) -> Loader:
        data = opened(root, settings)
        return Loader(data.train, data.collate, batch_size=size, rank=rank, ranks=ranks, seed=3)

    whole, states = loader(), []
    samples = []
    for _ in range(40):
        states.append(json.loads(json.dumps(whole.state_dict())))
        samples += samples_of(next(whole), 6)
    whole.close()
    assert len({block[1] for state in states if state["blocks"] for block in state["blocks"]}) > 1 or kind is _text
    for step, ranks, size in ((1, 2, 6), (7, 3, 6), (16, 1, 4), (25, 2, 12), (33, 1, 6)):
        for rank in range(ranks):
            again = loader(ranks, rank, size)
            again.load_state_dict(states[step])
            for number in range(3):
                if number == 1:  # a second stop
                    state, again = again.state_dict(), loader(ranks, rank, size)
                    again.load_state_dict(json.loads(json.dumps(state)))
                first = 6 * step + size * number + size // ranks * rank
                assert samples_of(next(again), size // ranks) == samples[first : first + size // ranks]
            again.close()


def samples_of(batch: Batch, count: int) -> list[Any]:
    """The inputs and targets of each sample of a batch, of all its sides, without what pads it to the longest."""
    rows = zip(batch["input_ids"].tolist(), batch["targets"].tolist(), strict=True)
    short = [[*zip(*row, strict=True)] for row in rows]
    for row in short:
        while row[-1][1] == IGNORED:
            row.pop()
    return [short[number::count] for number in range(count)]


def test_shuffling_keeps_every_sample_and_moves_them(tmp_path: Path) -> None:
    records = [{"prompt": "?", "completion": str(number)} for number in range(3 * BLOCK)]
    settings = {"format": "completion", "path": str(corpora.write_lines(tmp_path / "a.jsonl", records))}
    data = opened(tmp_path, settings | {"packing": False})
    found = [int(where.rpartition(" ")[2]) - 1 for _, where in first(data, 3 * BLOCK, seed=4)]
    assert sorted(found) == list(range(3 * BLOCK))
    assert abs(np.corrcoef(found[:BLOCK], np.arange(BLOCK))[0, 1]) < 0.2
    assert max(abs(number - place) for place, number in enumerate(found)) <= BLOCK


@pytest.mark.rest
@pytest.mark.parametrize("kind", ["a.jsonl", "a.parquet", "a.tar", "a.txt"])
def test_a_resume_reads_nothing_that_is_before(tmp_path: Path, kind: str) -> None:
    """Files of some 10 MB; resumed near their ends, a few hundred kB are read."""
    rows = [{"text": random.Random(number).randbytes(1000).hex()} for number in range(5000)]
    match kind:
        case "a.jsonl":
            corpora.write_lines(tmp_path / kind, rows)
        case "a.parquet":
            pq.write_table(pa.Table.from_pylist(rows), tmp_path / kind, row_group_size=100)
        case "a.tar":
            write_tar(tmp_path / kind, [{"json": json.dumps(row).encode()} for row in rows])
        case _:
            (tmp_path / kind).write_text(" ".join(row["text"] for row in rows))
    source = DataSource("data.path", "a", 1.0, (str(tmp_path / kind),))
    form = FORMATS["text"](DataSection(path="a"), 1024, AutoTokenizer.from_pretrained(tokenizer(tmp_path)), None)
    samples = [placed for _, _, placed in streams.SourceStream(source, form)._once(Place())]
    size, place = (tmp_path / kind).stat().st_size, samples[-40]
    source.read[0] = 0
    again = [placed for _, _, placed in streams.SourceStream(source, form)._once(place)]
    assert again == samples[-40:]
    assert source.read[0] - (place.offset or place.begin) < size // 10


def test_evaluation_beside_a_stream_is_prepared(tmp_path: Path) -> None:
    other = corpora.write_texts(tmp_path / "other", 12)
    data = streamed(tmp_path, {"path": str(corpora.write_texts(tmp_path / "text"))}, evaluation={"path": str(other)})
    assert [*data.evaluation] == [""]
    assert str(other) in data.evaluation[""].where(0)
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
