"""What the tests of the data share: small files of each kind, and configurations that read them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from trueshard.train.config import Config
from trueshard.train.data.batches import IGNORED
from trueshard.train.data.prepared import Prepared, prepare


def config(root: Path, data: dict[str, Any], *, length: int = 32, **sections: Any) -> Config:
    """A configuration whose run lives in `root`/run."""
    tree: dict[str, Any] = {
        "run": {"dir": str(root / "run")},
        "model": {"architecture": "llama"},
        "tokenizer": {"vocab_size": 300},
        "train": {"steps": 1, "sequence_length": length},
        "data": data,
    }
    return Config.model_validate(tree | sections)


def made(settings: Config) -> Prepared:
    """The data of a run, made now if need be."""
    return prepare(settings, frozen=False, make=True)


def write_lines(file: Path, records: Iterable[Any]) -> Path:
    """A file of JSONL."""
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def write_texts(folder: Path, count: int = 20) -> Path:
    """A folder of texts of different lengths."""
    folder.mkdir(parents=True)
    for number in range(count):
        (folder / f"{number:03}.txt").write_text(
            f"Text {number} begins. " + "To shard or not to shard. " * (number % 7)
        )
    return folder


def conversation(number: int, turns: int = 1) -> dict[str, Any]:
    """A record of questions and answers."""
    messages = []
    for turn in range(turns):
        messages += [
            {"role": "user", "content": f"What is {number} + {turn}?"},
            {"role": "assistant", "content": f"That is {number + turn}."},
        ]
    return {"messages": messages}


def write_conversations(file: Path, count: int = 30) -> Path:
    """A file of conversations of one to three turns."""
    return write_lines(file, (conversation(number, 1 + number % 3) for number in range(count)))


def learnt(data: Prepared, targets: Any) -> str:
    """The targets of a row as text."""
    return str(data.tokenizer.decode(targets[np.asarray(targets) != IGNORED]))


def check_places(data: Prepared, placed: Iterable[tuple[Any, str]]) -> None:
    """Assert that the place of each row of `write_texts` names the documents in it; some begin in these rows."""
    begun = set()
    for ids, where in placed:
        text = data.tokenizer.decode(ids)
        named = [int(number) for number in re.findall(r"(\d{3})\.txt", where)]
        numbers = {number for number in range(20) if f"Text {number} begins" in text}
        assert all(named[0] <= number <= named[-1] for number in numbers)
        begun |= numbers
    assert len(begun) > 3


def weighted(root: Path) -> dict[str, Any]:
    """Two sources, `a` three times as often as `b`."""
    a, b = (str(write_texts(root / name, 40)) for name in ("a", "b"))
    return {"sources": [{"path": a, "weight": 3.0}, {"path": b}]}
