"""What the tests of the data share: small files of each kind, and configurations that read them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trueshard.train.config import Config
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
