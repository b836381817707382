"""Whole programs on emulated CUDA devices: the commands, reinforcement learning, and a pipeline of three stages."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from emulated_cuda import build
from emulated_cuda.running import run
from running import project
from trueshard.checkpoint.format import MANIFEST

pytestmark = [
    pytest.mark.skipif(build.compiler() is None, reason="needs a C++ compiler: install g++, or set CXX"),
    pytest.mark.rest,
    pytest.mark.timeout(600),
]
ROOT = Path(__file__).parents[1]


def trueshard(folder: Path, *words: str, devices: int = 2) -> str:
    """Run a command to a good end, without a fault of the device; return what it wrote."""
    done = run([sys.executable, "-m", "trueshard", *words], devices=devices, cwd=folder)
    assert done.code == 0, done.output[-4000:]
    assert not done.faults
    return done.output


def settings(*values: str) -> list[str]:
    return [word for value in values for word in ("--set", value)]


def test_a_run_is_trained_resumed_and_has_the_fused_kernel(tmp_path: Path) -> None:
    folder = project(tmp_path / "run")
    for steps in ("4", "6"):
        settings = (f"train.steps={steps}", "train.checkpoint_every=2", "evaluation.every=2")
        output = trueshard(
            folder, "train", "train.toml", "--nproc", "2", *(w for each in settings for w in ("--set", each))
        )
    assert "Resumed after step 4" in output
    losses = [json.loads(line)["loss"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0]
    manifest = (folder / "run" / "checkpoints" / "latest" / MANIFEST).read_text()
    assert '"fused",true' in "".join(manifest.split())


def test_a_configuration_is_verified(tmp_path: Path) -> None:
    folder = project(tmp_path / "run")
    output = trueshard(folder, "verify", "train.toml", "--nproc", "2", "--set", "train.steps=2")
    assert "Sharding changes where the tensors live, and nothing else." in output


def test_a_configuration_is_verified_on_one_device(tmp_path: Path) -> None:
    folder = project(tmp_path / "run")
    output = trueshard(folder, "verify", "train.toml", "--nproc", "1", "--set", "train.steps=2", devices=1)
    assert "Sharding changes where the tensors live, and nothing else." in output
    assert "There is one GPU" in " ".join(output.split())


def test_the_doctor_sees_the_devices(tmp_path: Path) -> None:
    output = trueshard(tmp_path, "doctor")
    assert "gpu 1                    NVIDIA H100 80GB HBM3" in output
    assert re.search(r"nccl shard\(\) and a step +right", output)


def test_a_plan_is_rehearsed(tmp_path: Path) -> None:
    output = trueshard(
        tmp_path, "plan", "rehearse", str(ROOT / "examples" / "models" / "sort"), "--ranks", "2", devices=1
    )
    assert "3 steps on NVIDIA H100 80GB HBM3" in output


def test_reinforcement_learning_takes_over_weights_and_updates(tmp_path: Path) -> None:
    words = settings(f'run.dir="{tmp_path}/grpo"', "train.steps=2", "train.batch_size=16", "evaluation.samples=8")
    trueshard(ROOT, "train", "examples/grpo.toml", "--nproc", "2", *words)
    steps = [json.loads(line) for line in (tmp_path / "grpo" / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1]["step"] == 2
    assert steps[1]["mismatch_max"] < 1e-3  # the copy that generates has the weights that are trained


def test_a_pipeline_of_three_stages_with_a_tie(tmp_path: Path) -> None:
    file = tmp_path / "three.py"
    file.write_text(f"""
import sys, torch, os
sys.path.insert(0, {str(ROOT / "examples")!r})
import pipeline
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
pipeline.main("1f1b", "saved", 3)
""")
    done = run([str(file)], devices=3, processes=3, cwd=tmp_path)
    assert done.code == 0, done.output[-4000:]
    assert not done.faults
