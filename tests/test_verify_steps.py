"""``train.verify_every``: one rank computes a microbatch without sharding, and the run has the bits that it has without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from messages import lacking
from running import CONFIG, end, metrics, project, run, start

SHORT = CONFIG.replace("steps = 40", "steps = 4").replace("checkpoint_every = 20", "checkpoint_every = 2").replace(
    "batch_size = 8", "batch_size = 12"
)
EVERY = ("--set", "train.verify_every=2")


def weights(folder: Path, step: int = 4) -> dict[str, bytes]:
    files = sorted((folder / "run/checkpoints").glob(f"*{step}/**/*.safetensors"))
    assert files
    return {file.name: file.read_bytes() for file in files}


def both(tmp_path: Path, ranks: int, *options: str, text: str = SHORT, files: dict[str, str] | None = None) -> Any:
    """Run with and without; the records of the one with."""
    result = []
    for name, more in (("with", EVERY), ("without", ())):
        folder = project(tmp_path / name)
        (folder / "train.toml").write_text(text)
        for file, content in (files or {}).items():
            (folder / file).write_text(content)
        run(folder, "--nproc", str(ranks), *options, *more)
        result.append((weights(folder), [(r["step"], r["loss"], r["grad_norm"]) for r in metrics(folder)]))
    assert result[0] == result[1]
    return metrics(tmp_path / "with")


BF16 = ("--set", "shard.mixed_precision=bf16")
DROPS = SHORT.replace("num_key_value_heads = 2", "num_key_value_heads = 2\nattention_dropout = 0.1")
ADAPTER = SHORT + "[adapter]\nrank = 4\n"
CASES: dict[str, tuple[int, tuple[str, ...], str]] = {
    "one": (1, (), SHORT),
    "two": (2, (), DROPS),
    "three": (3, ("--set", "train.accumulate=2"), DROPS),
    "replicas": (2, ("--set", "shard.replicate=2"), SHORT),
    "adapter": (2, (), ADAPTER),
    "tensor": (2, ("--set", "shard.tensor=2"), SHORT),
    "context": (2, ("--set", "shard.context=2"), SHORT),
    "bf16": (2, BF16, DROPS),
    "offload": (2, (*BF16, "--set", "shard.offload=cpu"), SHORT),
    "recomputed": (2, ("--set", "shard.activation_checkpointing=full"), DROPS),
    "exact": (3, ("--set", "train.exact=true"), DROPS),
}


@pytest.mark.rest
@pytest.mark.parametrize("name", CASES)
def test_a_run_that_is_verified_has_the_bits_that_it_has_without(tmp_path: Path, name: str) -> None:
    ranks, options, text = CASES[name]
    records = both(tmp_path, ranks, *options, text=text)
    found = [record for record in records if "verified" in record or "verify_failed" in record]
    assert [record["step"] for record in found] == [2, 4]
    assert all(record.get("verified") for record in found), found
    bound = 1e-2 if "bf16" in str(options) else 1e-5
    assert all(record["verify_loss"] < bound and record["verify_gradients"] < 4 * bound for record in found), found
