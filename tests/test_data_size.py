"""Data of real size: memory is bounded, no token changes by that, and a stop loses seconds."""

from __future__ import annotations

import gzip
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import corpora
import forks
from messages import naming
from tokenizer_kinds import KINDS, PARTS, hard_text
from trueshard.errors import UserError
from trueshard.train.data import cutting
from trueshard.train.data.tokenizer import fast_backend, train_tokenizer

QUICK = ("Llama 3", "Mistral")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of a few hundred characters, so that short texts have many."""
    for name, value in {"PIECE": 256, "SEARCH": 128, "LARGE": 4096}.items():
        monkeypatch.setattr(cutting, name, value)


def check(tokenizer: Tokenizer, text: str) -> int:
    """Assert that the pieces of a text have its tokens; return how many pieces there are."""
    pieces = list(cutting.Cutter(tokenizer, "the tokenizer").pieces(text, "a.txt"))
    assert "".join(pieces) == text
    encoded = tokenizer.encode_batch(pieces, add_special_tokens=False)
    whole = tokenizer.encode(text, add_special_tokens=False).ids
    assert [token for piece in encoded for token in piece.ids] == whole
    fast = tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
    assert [token for piece in fast for token in piece.ids] == whole
    return len(pieces)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", [pytest.param(k, marks=[] if k in QUICK else pytest.mark.rest) for k in KINDS])
def test_pieces_have_the_tokens_of_the_whole_text(kind: str) -> None:
    tokenizer = KINDS[kind]()
    counts = [check(tokenizer, hard_text(seed, 400)) for seed in range(3)]
    assert max(counts) > 2 or kind in ("Llama 2", "Unigram without words")


@pytest.mark.rest
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_any_text_have_its_tokens(kind: str) -> None:
    tokenizer = KINDS[kind]()
    parts = st.one_of(
        st.sampled_from(PARTS),
        st.sampled_from(PARTS).map(lambda part: part * 60),
        st.text(max_size=40),
        st.integers(0, 10**9).map(lambda seed: hard_text(seed, 60)),
    )

    @settings(max_examples=25, deadline=None, database=None)
    @given(st.lists(parts, max_size=30))
    def holds(texts: list[str]) -> None:
        check(tokenizer, "".join(texts).encode(errors="replace").decode())

    holds()


@pytest.mark.usefixtures("small")
def test_a_place_that_depends_on_the_begin_of_the_text_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    """Where a group of three digits ends follows from the first digit, far away."""
    digits = "".join(random.Random(0).choices("0123456789", k=9000))
    assert check(KINDS["Llama 3"](), digits) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert all(part in line for part in ("a.txt", "the tokenizer", "together", "memory"))
    assert check(KINDS["Llama 3"](), digits[:1050] + " and " + digits) > 1


@pytest.mark.usefixtures("small")
def test_a_tokenizer_without_places_is_told_of_and_encodes_the_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert check(KINDS["Llama 2"](), "To shard or not to shard. " * 400) == 1
    assert len(capsys.readouterr().out.splitlines()) == 1


def long_file(file: Path, size: int = 1_000_000) -> str:
    """Write a text of at least ``size`` characters, of which many are several bytes; return it."""
    chosen = random.Random(1)
    words = [hard_text(seed, 8) for seed in range(200)]
    parts: list[str] = []
    while size > 0:
        parts.append(chosen.choice(words))
        size -= len(parts[-1])
    text = "".join(parts)
    data = text.encode()
    file.write_bytes(gzip.compress(data, 1) if file.suffix == ".gz" else data)
    return text


def with_tokenizer(folder: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(str(folder))
    return {"path": str(folder)}


def template(single: str) -> Any:
    return processors.TemplateProcessing(single=single, pair="$A $B", special_tokens=[("<s>", 1)])


@pytest.mark.parametrize(
    "stage",
    [
        template("<s> $A <s>"),
        processors.RobertaProcessing(("<s>", 1), ("<s>", 1)),
        processors.BertProcessing(("<s>", 1), ("<s>", 1)),
        processors.Sequence([processors.ByteLevel(), template("<s> $A")]),
    ],
    ids=["template", "roberta", "bert", "sequence"],
)
def test_tokens_are_made_without_the_last_stage(stage: Any) -> None:
    """It adds special tokens, of which a text has none."""
    wrapped = PreTrainedTokenizerFast(tokenizer_object=KINDS["GPT-2"]())
    wrapped.backend_tokenizer.post_processor = stage
    backend, text = fast_backend(wrapped), hard_text(7)
    assert backend.post_processor is None
    assert backend.encode(text, add_special_tokens=False).ids == wrapped(text, add_special_tokens=False)["input_ids"]
    assert len(wrapped("the shard")["input_ids"]) > len(backend.encode("the shard").ids)


def test_a_stage_that_changes_tokens_is_kept_and_one_written_in_python_does_not_hinder() -> None:
    twice, wrapped = (PreTrainedTokenizerFast(tokenizer_object=KINDS["GPT-2"]()) for _ in range(2))
    twice.backend_tokenizer.post_processor = template("$A $A")
    assert fast_backend(twice).post_processor is not None
    assert len(fast_backend(twice).encode("the", add_special_tokens=False).ids) == 2

    class Whole:
        def pre_tokenize(self, text: Any) -> None:
            """Leave a text as it is."""

    wrapped.backend_tokenizer.post_processor = template("<s> $A")
    wrapped.backend_tokenizer.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Whole())
    assert fast_backend(wrapped).post_processor is not None
    assert fast_backend(wrapped) is fast_backend(wrapped)


@pytest.mark.rest
@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_a_long_file_has_the_tokens_of_its_whole_text(tmp_path: Path, name: str) -> None:
    text, tokenizer = long_file(tmp_path / name), KINDS["GPT-2"]()
    own = with_tokenizer(tmp_path / "own", tokenizer)
    data = corpora.made(corpora.config(tmp_path, {"path": str(tmp_path / name)}, tokenizer=own))
    tokens = np.fromfile(tmp_path / "run/data/tokens.bin", dtype=np.uint16).tolist()
    assert tokens == [*tokenizer.encode(text, add_special_tokens=False).ids, tokenizer.token_to_id("<|end|>")]
    assert (data.summary.documents, data.summary.tokens) == (1, len(tokens))
    assert data.train.where(0) == str(tmp_path / name)  # type: ignore[union-attr]


def test_a_long_record_is_cut_too_and_held_out_whole(tmp_path: Path) -> None:
    texts = [long_file(tmp_path / "a.txt", 300_000), "short", " \n", hard_text(3)]
    own = with_tokenizer(tmp_path / "own", KINDS["GPT-2"]())
    file = corpora.write_lines(tmp_path / "a.jsonl", ({"text": text} for text in texts))
    plain = corpora.made(corpora.config(tmp_path, {"path": str(file)}, tokenizer=own))
    held = corpora.config(tmp_path / "held", {"path": str(file)}, tokenizer=own, evaluation={"fraction": 0.9})
    assert corpora.made(held).summary.documents == plain.summary.documents == 3
    tokens = [sorted(np.fromfile(tmp_path / f"{run}/data/tokens.bin", np.uint16)) for run in ("run", "held/run")]
    assert tokens[0] == tokens[1]


def test_damage_far_into_a_file_is_named_by_its_byte(tmp_path: Path) -> None:
    long_file(tmp_path / "a.txt")
    data = bytearray((tmp_path / "a.txt").read_bytes())
    data[1_100_000:] = b"\xff" + data[1_100_000:].decode(errors="ignore").encode()
    first = len(bytes(data[:1_100_000]).decode(errors="ignore").encode())
    (tmp_path / "a.txt").write_bytes(data)
    with pytest.raises(UserError, match=naming("a.txt", f"byte {first}", "UTF-8")):
        corpora.made(corpora.config(tmp_path, {"path": str(tmp_path / "a.txt")}))
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.usefixtures("small")
def test_a_tokenizer_is_trained_on_pieces_as_on_the_whole_text() -> None:
    text = hard_text(5, 3000)
    pieces = train_tokenizer([text[at : at + 1000] for at in range(0, len(text), 1000)], 400, "text")
    chunks: Iterator[str] = (text[at : at + 1000] for at in range(0, len(text), 1000))
    cut, whole = train_tokenizer([chunks], 400, "text"), train_tokenizer([text], 400, "text")  # type: ignore[list-item]
    assert cut.backend_tokenizer.to_str() == whole.backend_tokenizer.to_str()
    assert cut.backend_tokenizer.to_str() != pieces.backend_tokenizer.to_str()


STOPPED = """
import os, signal, sys
import corpora
from pathlib import Path
from trueshard.train.data import building
from trueshard.train.data.formats import base
building.SAVE_EVERY = 0.0
base.RECORDS_AT_ONCE, base.CHARACTERS_AT_ONCE = 5, 2**17
root, stop, encoded = Path(sys.argv[1]), int(sys.argv[3]), 0
def show(progress, tokens):
    global encoded
    encoded += 1
    if encoded == stop:
        os.kill(os.getpid(), signal.SIGKILL)
building._Progress.show = show
import json
data, sections = json.loads(sys.argv[2])
corpora.made(corpora.config(root, data, **sections))
print("groups", encoded)
"""


@pytest.mark.rest
@pytest.mark.parametrize("kind", ["text", "records", "sources", "chat", "preference"])
def test_a_killed_preparation_goes_on_where_it_was(tmp_path: Path, kind: str) -> None:
    sections: dict[str, Any] = {"evaluation": {"fraction": 0.3}}
    if kind == "text":
        long_file(tmp_path / "a.txt", 800_000)
        data: dict[str, Any] = {"path": str(tmp_path / "a.txt")}
    elif kind == "sources":
        data = corpora.weighted(tmp_path)
    elif kind == "records":
        texts = ({"text": hard_text(seed, 300)} for seed in range(60))
        data = {"path": str(corpora.write_lines(tmp_path / "a.jsonl", texts))}
    elif kind == "chat":
        data = {"path": str(corpora.write_conversations(tmp_path / "a.jsonl", 60)), "format": "chat"}
    else:
        pairs = ({"prompt": f"{n}?", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in range(60))
        data = {"path": str(corpora.write_lines(tmp_path / "a.jsonl", pairs)), "format": "preference"}

    def start(stop: int) -> Any:
        arguments = [str(tmp_path), json.dumps([data, sections]), str(stop)]
        code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n{STOPPED}"
        return forks.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120)

    def groups(done: Any) -> int:
        assert done.returncode == 0, done.stderr
        return int(done.stdout.split("groups ")[1])

    whole = groups(start(0))
    made = {file.name: file.read_bytes() for file in (tmp_path / "run/data").iterdir() if file.is_file()}
    (tmp_path / "run/data").rename(tmp_path / "whole")
    for _ in range(2):
        assert start(3).returncode == -9
    assert [path.name[:5] for path in (tmp_path / "run").iterdir()] == [".new-"]
    left = groups(start(0))
    assert left == whole - 4  # of three groups before each kill, the last was not written to disk
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["data"]
    assert {file.name: file.read_bytes() for file in (tmp_path / "run/data").iterdir() if file.is_file()} == made


def test_what_a_stop_left_of_other_settings_is_removed(tmp_path: Path) -> None:
    (tmp_path / "run" / ".new-1-data").mkdir(parents=True)
    corpora.made(corpora.config(tmp_path, {"path": str(corpora.write_texts(tmp_path / "text"))}))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["data"]


GROWTH = """
import resource, sys
import corpora
import trueshard.train.data.building
from pathlib import Path
root, tokenizer, streaming = Path(sys.argv[1]), sys.argv[3], sys.argv[4] == "streamed"
section = {"path": tokenizer} if tokenizer else {"vocab_size": 400}
def read(folder, path):
    settings = corpora.config(folder, {"path": path, "streaming": streaming}, tokenizer=section)
    data = corpora.made(settings)
    if streaming:  # up to its second pass
        next(blocks for _, _, blocks in data.train.begin(0) if blocks[0][1])
        assert sum(file.stat().st_size for file in data.folder.rglob("*") if file.is_file()) < 1_000_000
read(root / "small", str(corpora.write_texts(root / "texts")))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
read(root, sys.argv[2])
print("growth", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.rest
@pytest.mark.parametrize("way", ["prepared", "trained on", "streamed"])
def test_memory_does_not_grow_with_a_document(tmp_path: Path, way: str) -> None:
    """40 MB in one document; encoded whole they take 8 GiB."""
    own = "" if way == "trained on" else with_tokenizer(tmp_path / "own", KINDS["GPT-2"]())["path"]
    part = " ".join(long_file(tmp_path / "part.txt", 1_000_000).split())
    (tmp_path / "a.txt").write_text(part * (40_000_000 // len(part.encode())))
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n{GROWTH}"
    command = [sys.executable, "-c", code, str(tmp_path), str(tmp_path / "a.txt"), own, way]
    done = forks.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split("growth ")[1]) < 400 * 1024
