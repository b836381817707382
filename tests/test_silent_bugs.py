"""Bugs that raise nothing are found and localised, and their programs raise no alarm without them."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from benchmarks import silent_clean as clean
from benchmarks.silent import trial

PROGRAMS = {program.name: (family, program) for family, program in trial.programs()}
TRIED = ("final_norm", "stale", "attention", "converted", "dropout", "old_parameters", "shared_embedding")


def test_every_bug_names_its_source_and_what_is_at_fault() -> None:
    for name, (_, program) in PROGRAMS.items():
        assert re.fullmatch(r"[\w-]+/[\w.-]+#\d+|[\w ,-]+", program.source), name
        assert re.compile(program.where)
        assert re.compile(program.kind)


def test_a_finding_elsewhere_is_not_localised() -> None:
    _, program = PROGRAMS["final_norm"]
    right, elsewhere = (
        trial.Found(True, module, "gradient", f"that of '{module}.weight'") for module in ("norm", "up")
    )
    assert trial.cells_of(program, right)[:2] == ("yes", "yes")
    assert trial.cells_of(program, elsewhere)[:2] == ("yes", "no")
    assert trial.cells_of(program, trial.Found(False))[:2] == ("no", "no")


@pytest.mark.rest
@pytest.mark.parametrize("name", TRIED)
def test_a_bug_is_found_where_it_is_and_no_alarm_is_raised_without_it(tmp_path: Path, name: str) -> None:
    family, program = PROGRAMS[name]
    compare = trial.Compared(functools.partial(trial.recorded, family, name), tmp_path)
    with_bug, without = compare.of(program.ranks, bug=True), compare.of(program.ranks)
    assert trial.cells_of(program, with_bug)[:2] == ("yes", "yes"), with_bug
    assert not without.differs, without


@pytest.mark.rest
@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("gpt2", "DDP, accumulating"),
        ("llama", "shard(tensor=2)"),
        ("gpt2", "shard(context=2)"),
        ("mixed", "shard(), accumulating"),
        ("jamba", "shard(), 3 ranks"),
        ("roberta", "shard(mixed_precision='bf16')"),
        ("qwen2_vl", "shard(mixed_precision='bf16')"),
        ("whisper", "shard(mixed_precision='bf16')"),
        ("marian", "shard(exact=True)"),
    ],
    ids=[
        *("ddp", "tensor", "parts of a loss", "sums in bf16", "rows that a router sorts", "a gradient near zero"),
        *("a norm's bias in bf16", "what follows from it in the optimizer", "a gradient of few steps of the grid"),
    ],
)
def test_clean_runs_raise_no_alarm(name: str, way: str) -> None:
    result = clean.compared(name, way)
    assert result["cell"] == "no alarm", result


def test_clean_runs_are_a_hundred_and_of_every_model() -> None:
    pairs = list(clean.pairs())
    assert len(set(pairs)) == len(pairs) >= 100
    assert {name for name, _ in pairs} == set(clean.catalogue())
    assert {way for _, way in pairs} == set(clean.WAYS)
