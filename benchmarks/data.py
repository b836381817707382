"""A text file of 300 MB and 200,000 records made into tokens on disk, by each way in a process of its own.

- `datasets.map` with the same tokenizer, in as many processes as there are cores; and `tokenizers` alone: 1,000 texts
  at a time, on all cores. Both write the tokens, too.
- The file is one document. The others read its lines, as `datasets` does by itself: as one text it needs some 60 GB.
- Lines are those of Python's own library, drawn by seed. The tokenizer is a byte-level BPE, trained on them.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import kernel
from benchmarks.table import Over, Table, Tell

OURS, MAP, ALONE = WAYS = ("trueshard", "datasets.map", "tokenizers alone")
SIZE, RECORDS = 300_000_000, 200_000
QUICK = 200
"""How many times less with ``--quick``."""
VOCABULARY = 32_000
BATCH = 1000
GIB = 2**30


def run(tell: Tell, quick: bool = False) -> Table:
    """Each way on both kinds of data, in turns."""
    rows, numbers, over = [], [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = {"one file": folder / "one.txt", "records": folder / "records.jsonl"}
        write(folder, files, QUICK if quick else 1)
        for kind, file in files.items():
            by_way = {}
            for way in WAYS:
                by_way[way] = _measured(way, file, folder)
                tell(f"{kind}, {way}: {by_way[way]['seconds']:.0f} s")
            size = file.stat().st_size
            label = f"{kind}, {size / 1e6:.0f} MB"
            for way, one in by_way.items():
                ratios = [by_way[OURS][clock] / one[clock] for clock in ("seconds", "processor")]
                cells = [f"{size / one['seconds'] / 1e6:.2f}", f"{size / one['processor'] / 1e6:.2f}"]
                cells += [f"{one['memory'] / GIB:.2f}", f"{one['tokens']:,}", *(f"{ratio:.2f}" for ratio in ratios)]
                rows.append((label, way, *cells))
                numbers.append({"data": kind, "way": way, "bytes": size, **one})
                if way != OURS:
                    over.append(Over(f"data, {kind}: processor time", way, f"{ratios[1]:.2f}"))
    note = (
        "Tokens on disk from one text file and from records of JSON lines. The file is one document to TrueShard; the "
        "others read it by lines, which are other tokens. Processor seconds are those of all threads and processes, "
        "and what other programs on the machine disturb least; memory is the largest resident size of one process. "
        "The last columns are TrueShard's time over the way's: below one, TrueShard takes less."
    )
    columns = ("data", "way", "MB/s", "MB a processor second", "GiB", "tokens", "wall time", "processor time")
    return Table("data", "Data of real size", note, columns, tuple(rows), numbers, over)


def write(folder: Path, files: dict[str, Path], parts: int) -> None:
    """Write both kinds of data, and the tokenizer; a ``parts``-th of each."""
    from trueshard.train.data.tokenizer import train_tokenizer

    root = Path(sysconfig.get_path("stdlib"))
    sources = [file for file in sorted(root.rglob("*.py")) if "site-packages" not in file.parts]
    texts = [file.read_text(encoding="utf-8", errors="ignore") for file in sources]
    lines = [line for text in texts for line in text.splitlines(keepends=True)]
    chosen = random.Random(0)

    def some() -> str:
        first = chosen.randrange(len(lines) - 50)
        return "".join(lines[first : first + chosen.randrange(3, 50)])

    left = SIZE // parts
    with files["one file"].open("w", encoding="utf-8") as stream:
        while left > 0:
            left -= len(text := some())
            stream.write(text)
    with files["records"].open("w", encoding="utf-8") as stream:
        stream.writelines(json.dumps({"text": some()}) + "\n" for _ in range(RECORDS // parts))
    train_tokenizer(texts if parts == 1 else texts[::10], VOCABULARY, "text").save_pretrained(str(folder / "tokenizer"))


def _measured(way: str, file: Path, folder: Path) -> dict[str, float]:
    """Run a way in a process of its own; return seconds, processor seconds, bytes of memory, and tokens."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        command = [sys.executable, "-m", "benchmarks.data", way, str(file), str(folder / "tokenizer"), scratch]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{way}: {done.stderr}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def prepared(file: Path, tokenizer: Path, scratch: Path) -> int:
    from trueshard.train.config import Config
    from trueshard.train.data.prepared import prepare

    tree = {
        "run": {"dir": str(scratch / "run")},
        "model": {"architecture": "llama"},
        "tokenizer": {"path": str(tokenizer)},
        "train": {"steps": 1, "sequence_length": 1024},
        "data": {"path": str(file)},
    }
    return prepare(Config.model_validate(tree), frozen=False, make=True).summary.tokens or 0


def mapped(file: Path, tokenizer: Path, scratch: Path) -> int:
    import datasets
    from transformers import AutoTokenizer

    loaded, kind = AutoTokenizer.from_pretrained(tokenizer), "json" if file.suffix == ".jsonl" else "text"
    load: Any = datasets.load_dataset
    settings = {"keep_linebreaks": True} if kind == "text" else {}
    data = load(kind, data_files=str(file), split="train", cache_dir=str(scratch), **settings)

    def encode(rows: dict[str, list[str]]) -> dict[str, Any]:
        return {"ids": loaded(rows["text"], add_special_tokens=False, return_attention_mask=False)["input_ids"]}

    data = data.map(encode, batched=True, batch_size=BATCH, num_proc=_cores(), remove_columns=["text"])
    return sum(len(ids) for rows in data.iter(batch_size=BATCH) for ids in rows["ids"])


def alone(file: Path, tokenizer: Path, scratch: Path) -> int:
    from tokenizers import Tokenizer

    loaded, tokens = Tokenizer.from_file(str(tokenizer / "tokenizer.json")), 0
    with file.open(encoding="utf-8", newline="") as stream, (scratch / "tokens.bin").open("wb") as out:
        texts: Iterator[str] = (json.loads(line)["text"] for line in stream) if file.suffix == ".jsonl" else stream
        while batch := list(islice(texts, BATCH)):
            for encoding in loaded.encode_batch_fast(batch, add_special_tokens=False):
                ids = np.array(encoding.ids, dtype=np.uint16)
                tokens += len(ids)
                out.write(ids.tobytes())
    return tokens


RUNS: dict[str, Callable[[Path, Path, Path], int]] = {OURS: prepared, MAP: mapped, ALONE: alone}


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _main(way: str, *paths: str) -> None:
    """Run a way in this process, and print what it took."""
    import datasets
    from transformers import AutoTokenizer  # noqa: F401  # imports are behind all ways, transformers' too

    import trueshard.train.data.prepared  # noqa: F401

    datasets.disable_progress_bars()
    began = time.perf_counter(), _processor()
    with contextlib.redirect_stdout(sys.stderr):
        tokens = RUNS[way](*map(Path, paths))
    seconds, processor = time.perf_counter() - began[0], _processor() - began[1]
    peak = kernel.peak()  # the resource usage of a process begins with the size of the one that started it
    if processes := resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss:
        peak = max(peak, processes * 1024)
    print(json.dumps({"seconds": seconds, "processor": processor, "memory": peak, "tokens": tokens}))


def _processor() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


if __name__ == "__main__":
    _main(*sys.argv[1:])
