"""Every recipe of ``examples/`` trains on two emulated CUDA devices, and no fault of a device is seen in it."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

from emulated_cuda import build
from emulated_cuda.running import run
from test_recipes import RECIPES, overrides_of
from test_rl_recipes import RECIPES as RL_RECIPES
from test_rl_recipes import small

pytestmark = [
    pytest.mark.skipif(build.compiler() is None, reason="needs a C++ compiler: install g++, or set CXX"),
    pytest.mark.rest,
    pytest.mark.timeout(600),
]
ROOT = Path(__file__).parents[1]
STEPS = 2
LONG = ("data.path=tests/models", "tokenizer.vocab_size=512", "train.sequence_length=128")
WORDS = {
    **{name: overrides_of(name) for name in RECIPES},
    **{name: small(name) for name in RL_RECIPES},
    "long_context": (*LONG, "schedule.warmup_steps=1", "sample.tokens=4"),
    "exact": (*overrides_of("pretrain"), "train.exact=true", "train.microbatch=1"),
}
"""Recipe → what is set to make it short."""


@pytest.mark.parametrize("name", WORDS)
def test_a_recipe_trains(name: str, tmp_path: Path) -> None:
    last = 2 * STEPS if name == "gspo" else STEPS  # two updates of one rollout
    ends = (f"train.steps={last}", f"train.checkpoint_every={last}", f"run.dir={tmp_path}")
    words = [word for setting in (*WORDS[name], *ends) for word in ("--set", setting)]
    recipe = "examples/" + ("pretrain" if name == "exact" else name) + ".toml"
    done = run([sys.executable, "-m", "trueshard", "train", recipe, "--nproc", "2", *words], devices=2, cwd=ROOT)
    assert done.code == 0, done.output[-4000:]
    assert not done.faults
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in steps if line["step"]]
    assert len(losses) == last
    assert all(map(math.isfinite, losses))
