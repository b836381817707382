"""Whole programs on emulated CUDA devices: the commands, reinforcement learning, and a pipeline of three stages."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.steps import SMALL_SIZES
from emulated_cuda import MEMORY, build
from emulated_cuda.running import run
from running import project
from trueshard.checkpoint.format import MANIFEST
from trueshard.checkpoint.snapshot_parts import ROOT as PLACE

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


def test_a_device_without_triton_is_measured_but_for_compiled_units(tmp_path: Path) -> None:
    file = tmp_path / "here.toml"
    done = run([sys.executable, "-c", SMALL_SIZES, "plan", "calibrate", str(file)], devices=1)
    assert done.code == 0, done.output[-4000:]
    assert "compile.launch_seconds is that of h100: triton" in done.output
    assert "\neager.launch_seconds = " in file.read_text()
    assert "compile.launch" not in file.read_text()


def test_a_run_out_of_memory_is_planned_anew_for_a_device_that_the_catalogue_does_not_know(tmp_path: Path) -> None:
    folder = project(tmp_path / "run")
    words = settings("train.batch_size=64", "train.sequence_length=256", "train.steps=2", "train.on_oom=tighten")
    words += settings("model.fields.hidden_size=64")
    command = [sys.executable, "-m", "trueshard", "train", "train.toml", "--nproc", "2", *words]
    done = run(command, devices=2, cwd=folder, variables={MEMORY: str(100 << 20)})
    assert done.code == 0, done.output[-4000:]
    assert not done.faults
    assert re.search(r"rank \d ran out of memory: .*the plan needs .* train.accumulate = \d \(planned: ", done.output)


FULL = """
from pathlib import Path
import torch
from trueshard.train.callbacks import Callback
class Full(Callback):
    # Once, after the third step, rank 1 asks for more than its device has.
    def on_step(self, trainer, record):
        if trainer.step == 3 and trainer.rank == 1 and not (once := Path(__file__).with_name("once")).exists():
            once.touch()
            torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
"""


def test_a_run_out_of_memory_goes_on_from_the_step_in_the_hosts_memory(tmp_path: Path) -> None:
    folder = project(tmp_path / "run")
    (folder / "full.py").write_text(FULL)
    words = settings("train.batch_size=64", "train.sequence_length=256", "train.steps=5", "train.on_oom=tighten")
    words += settings("model.fields.hidden_size=64", "train.memory_every=1")
    words += settings(f"train.callbacks=['{folder / 'full.py'}:Full']")
    command = [sys.executable, "-m", "trueshard", "train", "train.toml", "--nproc", "2", *words]
    done = run(command, devices=2, cwd=folder, variables={MEMORY: str(1 << 29), PLACE: str(tmp_path)})
    assert done.code == 0, done.output[-4000:]
    assert not done.faults
    assert re.search(r"rank 1 ran out of memory: .*train.accumulate = \d", done.output)
    assert re.search(r"Resumed after step [23] from memory", done.output), done.output[-4000:]
    assert [path for path in tmp_path.iterdir() if path.name.startswith("trueshard-")] == []


def test_reinforcement_learning_takes_over_weights_and_updates(tmp_path: Path) -> None:
    words = settings(f'run.dir="{tmp_path}/grpo"', "train.steps=2", "train.batch_size=16", "evaluation.samples=8")
    trueshard(ROOT, "train", "examples/grpo.toml", "--nproc", "2", *words)
    steps = [json.loads(line) for line in (tmp_path / "grpo" / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1]["step"] == 2
    assert steps[1]["mismatch_max"] < 1e-3  # the copy that generates has the weights that are trained


PIPELINE = f"""
import sys, torch, os
sys.path.insert(0, {str(ROOT / "examples")!r})
import pipeline
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
pipeline.main(sys.argv[1], "saved-" + sys.argv[1], int(sys.argv[2]))
"""


@pytest.mark.parametrize(("stages", "devices"), [(3, 3), (2, 4)])
def test_stages_of_a_pipeline_with_a_tie(tmp_path: Path, stages: int, devices: int) -> None:
    """Under each schedule the losses are the same, of stages on one device each or on two.

    The last stage alone exchanges its number of tokens, before all stages save together.
    """
    file = tmp_path / "pipelined.py"
    file.write_text(PIPELINE)
    losses = []
    for schedule in ("gpipe", "1f1b"):
        done = run([str(file), schedule, str(stages)], devices=devices, processes=devices, cwd=tmp_path)
        assert done.code == 0, done.output[-4000:]
        assert not done.faults
        losses.append(re.findall(r"step \d: loss [\d.]+, norm [\d.]+", done.output))
    assert len(losses[0]) == 5
    assert losses[0] == losses[1]


SCHEDULES = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble")


def test_schedules_with_two_stages_a_rank_train_as_one_process_does() -> None:
    """Also those that split backward, whose second half needs the unit that the first has freed."""
    command = [str(ROOT / "tests" / "pipeline_schedules.py"), *(f"Schedule{kind}" for kind in SCHEDULES)]
    done = run(command, devices=4, processes=4)
    assert done.code == 0, done.output[-4000:]
    assert not done.faults
    assert done.output.count("is right") == 4 * len(SCHEDULES)


TRAINER = f"""
import json, os, sys
sys.path.insert(0, {str(ROOT / "tests")!r})
from transformers import Trainer, TrainingArguments, set_seed
from trainers import BATCH, SETTINGS, STEPS, curve, language_model, tokens
from trueshard.integrations.transformers import ShardedTrainer

kind, folder, settings = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
ranks = int(os.environ.get("WORLD_SIZE", "1"))
set_seed(0)
words = SETTINGS | {{"use_cpu": False, "per_device_train_batch_size": BATCH // ranks, "lr_scheduler_type": "linear"}}
words |= {{"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}}
words |= {{"per_device_eval_batch_size": 1}}  # the loss is the mean of those of batches
trainer = (type("Mine", (ShardedTrainer, Trainer), {{}}) if kind == "sharded" else Trainer)(
    model=language_model(),
    args=TrainingArguments(folder, **words | settings),
    train_dataset=tokens(BATCH * STEPS),
    eval_dataset=tokens(12, seed=1),
)
trainer.train(resume_from_checkpoint=sys.argv[4] if len(sys.argv) > 4 else None)
assert trainer.args.device.type == "cuda"
if trainer.is_world_process_zero():
    print("curve", json.dumps(curve(trainer)))
"""


def trainer_curve(folder: Path, kind: str, settings: dict[str, object], *words: str) -> dict[str, list[float]]:
    """Train by transformers' Trainer, on two devices if it is sharded, without a fault; return what it logged."""
    file = folder / "trainer.py"
    file.write_text(TRAINER)
    ranks = 2 if kind == "sharded" else 1
    command = [str(file), kind, str(folder / kind), json.dumps(settings), *words]
    variables = {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    done = run(command, devices=ranks, processes=ranks, cwd=folder, variables=variables)
    assert done.code == 0, done.output[-4000:]
    assert not done.faults
    (line,) = re.findall(r"^curve (.*)$", done.output, re.MULTILINE)
    logged: dict[str, list[float]] = json.loads(line)
    return logged


@pytest.mark.parametrize("settings", [{}, {"bf16": True, "gradient_checkpointing": True}], ids=["plain", "bf16"])
def test_the_trainer_of_transformers_trains_and_resumes(tmp_path: Path, settings: dict[str, object]) -> None:
    near = {"rel": 2e-2 if settings else 2e-4, "abs": 1e-3 if settings else 1e-5}
    expected = trainer_curve(tmp_path, "plain", settings)
    found = [trainer_curve(tmp_path, "sharded", settings)]
    found += [trainer_curve(tmp_path, "sharded", settings, str(tmp_path / "sharded" / "checkpoint-2"))]
    for curves in found:
        assert curves.keys() == expected.keys()
        for key, values in expected.items():
            assert curves[key] == pytest.approx(values, **near), key
