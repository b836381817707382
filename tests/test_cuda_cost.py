"""What a step costs on a CUDA device, counted on the emulated one: waits of the host, and operations."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.device_cost import counted
from emulated_cuda import build

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="needs a C++ compiler: install g++, or set CXX")

IN_FORWARD = "find_packed_sequence_indices"
"""Where transformers itself waits, once in each forward."""
WAITS: dict[str, dict[str, int]] = {
    "AdamW, foreach": {},
    "AdamW, fused": {},
    "AdamW, 4 microbatches": {},
    "AdamW, float16, GradScaler": {"grad_scaler.py": 1},
    "AdamW, token_mean": {},
    "AdamW, offloaded": {"finalize_backward": 39},  # FSDP2's own: an event for each gradient
    "AdamW, exact": {},
    "Muon": {},
    "Muon, exact": {"optim/owners.py": 1},  # whether the owners' values are those of the shards
    "Adafactor": {"optim/_adafactor.py": 40, "optim/owners.py": 1},  # torch's two for each matrix that is here
    "tensor = 2": {},
    "context = 2": {},
    "experts = 2": {"parallel/experts.py": 2, "moe.py": 4},  # how many rows travel, once a layer
    "Trainer": {"train/trainer.py": 1},
    "Trainer, float16": {"train/trainer.py": 1, "grad_scaler.py": 1},
    "RL, update": {"rl/policy.py": 2, "train/trainer.py": 1},  # which places have targets, once a microbatch
    "RL, a token": {"rl/engine.py": 1, "generation/utils.py": 1},
    "save(wait=False)": {"checkpoint/saving.py": 1},
    "state_hash": {"checkpoint/hashing.py": 1},
}
"""Where a step of ours waits, and how often."""
MOST = {label: 1.1 for label in WAITS if label.startswith("AdamW") and label != "AdamW, token_mean"}
MOST |= {"AdamW, exact": 1.35, "Trainer": 1.1}
"""Operations of a step by those of the same step by hand, at most; it waits no more often either."""


def places(count: dict[str, Any]) -> dict[str, int]:
    return {place: number for place, number in count["places"] if IN_FORWARD not in place}


def check(counts: dict[str, Any]) -> None:
    for label, (ours, by_hand) in counts.items():
        assert not ours["failed"], (label, ours["failed"])
        here, expected = places(ours), dict(WAITS[label])
        for place, number in here.items():
            key = next((key for key in expected if key in place), None)
            assert key is not None, f"{label}: {number} × {place}"
            expected[key] -= number
        assert not any(expected.values()), (label, expected, here)
        if label in MOST:
            assert ours["waits"] <= by_hand["waits"], label
            assert ours["operations"] <= MOST[label] * by_hand["operations"], label


@pytest.mark.rest
def test_the_trainer_waits_once_a_step() -> None:
    check(counted(["AdamW, fused", "Trainer"]))


@pytest.mark.rest
@pytest.mark.timeout(600)
def test_no_step_waits_elsewhere() -> None:
    check(counted([label for label in WAITS if label not in ("AdamW, fused", "Trainer")]))


def test_every_case_has_its_waits() -> None:
    from benchmarks.device_cost_cases import CASES

    assert list(CASES) == list(WAITS)
