"""The seconds and the memory that `trueshard plan` takes to answer a question, from the start of Python to its end.

The questions are those that newcomers ask. Each is a fresh process with the two cores that it uses at most, its stderr
no terminal. No weights, no GPU.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.table import Table, Tell

_TITAN = """
[model]
name = "llama3"
flavor = "70B"

[training]
local_batch_size = 1
seq_len = 8192

[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 8

[activation_checkpoint]
mode = "selective"
"""
_QLORA = """
[run]
dir = "qlora"

[model]
config = "70b.json"
quantize = "nf4"

[tokenizer]
vocab_size = 128256

[adapter]
rank = 16

[data]
path = "data.jsonl"

[train]
steps = 100
batch_size = 2
sequence_length = 2048

[optimizer]
class = "torch.optim.AdamW"

[shard]
activation_checkpointing = "full"
"""
_TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "num_key_value_heads": 8,
}
_70B = {
    **_TINY,
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
_4096 = ("--sequence", "4096")
CASES: dict[str, tuple[str, ...]] = {
    "Llama 3 8B on 8": ("llama-3-8b", "--ranks", "8", *_4096),
    "Llama 3 8B on 64, global batch 512": ("llama-3-8b", "--ranks", "64", *_4096, "--global-batch", "512"),
    "Llama 3 70B on 64": ("llama-3-70b", "--ranks", "64", *_4096),
    "Llama 3 70B on 512": ("llama-3-70b", "--ranks", "512", *_4096),
    "Llama 3 405B on 4,096": ("llama-3.1-405b", "--ranks", "4096", *_4096),
    "Llama 3 70B on 64, its axes, too": ("llama-3-70b", "--ranks", "64", "--axes"),
    "Llama 3 70B on 64, global batch 256": ("llama-3-70b", "--ranks", "64", "--global-batch", "256"),
    "Qwen3 235B on 512, experts 8": ("qwen3-235b-a22b", "--ranks", "512", "--experts", "8"),
    "TorchTitan's 70B on 64": ("titan.toml", "--for", "torchtitan", "--ranks", "64"),
    "QLoRA of 70B on two RTX 4090": ("qlora.toml", "--hardware", "rtx4090", "--ranks", "2"),
    "8B on 64, 1M tokens, context 32": ("llama-3-8b", "--ranks", "64", "--sequence", "1048576", "--context", "32"),
}
"""Questions, and the command's arguments: of H100s, with everything left to it that is not named"""

_FIGURES = {
    "tokens/s": r"^ *tokens/s  +([\d,]+)|^best .* ([\d,]+)  +[\d.]+%",
    "reserved": r"^ *reserved  +([\d.]+ \w+)|^best  +([\d.]+ \w+)",
}
"""What is read from the answer's text: of a plan, or of the best beside another stack's own."""

LIMIT = 10.0
"""Seconds of an answer; of the first line on stderr 2"""


def run(tell: Tell, quick: bool = False) -> Table:
    """Each question once, in a process of its own; ``quick``: a model of two blocks on 8."""
    rows, numbers, torch = [], [], _seconds_of_importing_torch()
    for name, arguments in list(CASES.items())[: 1 if quick else None]:
        answer = _answer(("tiny", *arguments[1:]) if quick else arguments)
        cells = (f"{answer['first']:.1f}", f"{answer['seconds']:.1f}", f"{LIMIT:.0f}")
        cells += (f"{answer['seconds'] / torch:.1f}", f"{answer['cpu']:.1f}")
        rows.append((name, *cells, f"{answer['gib']:.2f}", answer["tokens/s"], answer["reserved"]))
        numbers.append({"question": name, "limit": LIMIT, "torch": torch, **answer})
        tell(f"{name}: {answer['seconds']:.1f} s")
    return Table(
        name="planner",
        title="Seconds and memory of choosing a plan",
        note=(
            "`trueshard plan` on two cores, from the start of Python. `first line`: seconds until it says on stderr, "
            "which is no terminal, what it does; memory that of the largest process. `over torch`: over the "
            f"{torch:.2f} s that a process takes on this machine to import torch, which it does too. The last two "
            "columns are the forecast. `--json` and `--html` ask for more: with experts, a study at each of several "
            "imbalances."
        ),
        columns=(
            "question",
            "first line",
            "seconds",
            "limit",
            "over torch",
            "CPU seconds",
            "memory, GiB",
            "tokens/s a rank",
            "reserved",
        ),
        rows=tuple(rows),
        numbers=numbers,
    )


def _seconds_of_importing_torch() -> float:
    """Return the median of five processes: a measure of the machine."""
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def _answer(arguments: tuple[str, ...]) -> dict[str, Any]:
    """Return what the command took, and what it chose."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "titan.toml").write_text(_TITAN, encoding="utf-8")
        (Path(folder) / "qlora.toml").write_text(_QLORA, encoding="utf-8")
        for name, settings in (("tiny", _TINY), ("70b", _70B)):
            (Path(folder) / f"{name}.json").write_text(json.dumps(settings), encoding="utf-8")
        command = [sys.executable, "-m", "trueshard", "plan", *arguments]
        command = [f"{word}.json" if word == "tiny" else word for word in command]
        begin = time.perf_counter()
        answer = Path(folder) / "answer.txt"
        with (
            answer.open("w", encoding="utf-8") as output,
            subprocess.Popen(command, stdout=output, stderr=subprocess.PIPE, text=True, cwd=folder) as process,
        ):
            assert process.stderr is not None
            line = process.stderr.readline()
            first = time.perf_counter() - begin
            errors = process.stderr.read()
            _, status, used = os.wait4(process.pid, 0)  # of this one and its own processes, not of those before
            process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - begin
        if process.returncode:
            raise RuntimeError(line + errors)
        text = answer.read_text(encoding="utf-8")
    forecast = {key: re.search(pattern, text, re.MULTILINE) for key, pattern in _FIGURES.items()}
    return {
        "first": first,
        "seconds": seconds,
        "cpu": used.ru_utime + used.ru_stime,
        "gib": used.ru_maxrss / 2**20,
        **{key: match[match.lastindex or 0] for key, match in forecast.items() if match},
    }
