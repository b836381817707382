"""Whole runs of reinforcement learning: killed and gone on with, replayed, and what they write."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

import forks
from running import end, environment, kill, metrics, start, wait_for_steps
from trueshard.cli import main
from trueshard.train.metrics.answers import read_samples
from trueshard.train.run import launcher

ROOT = Path(__file__).parents[1]
TWICE = ("--nproc", "2")
CONFIG = """
[run]
dir = "run"
[model]
path = "model"
[data]
format = "prompt"
path = "sort.jsonl"
[rl]
samples = 4
updates = 2
[rollout]
tokens = 8
batch = 8
ahead = 1
[reward]
function = "rewards.py:sort"
[evaluation]
fraction = 0.02
every = 6
answers = 2
temperature = 1.0
patience = 5
[train]
steps = 12
sequence_length = 24
batch_size = 16
accumulate = 2
checkpoint_every = 3
keep = 9
[optimizer]
lr = 1e-3
"""


def project(folder: Path) -> Path:
    folder.mkdir(parents=True)
    shutil.copytree(ROOT / "examples" / "models" / "sort", folder / "model")
    for name in ("data/sort.jsonl", "rewards.py"):
        shutil.copy(ROOT / "examples" / name, folder)
    (folder / "train.toml").write_text(CONFIG)
    return folder


def command(folder: Path, *words: str) -> tuple[int, str, str]:
    process: subprocess.Popen[str] = forks.Popen(
        [sys.executable, "-m", "trueshard", *words],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    return end(process)


def answers(folder: Path) -> dict[tuple[int, int, int], dict[str, Any]]:
    lines = read_samples(folder / "run" / "samples.jsonl")
    found = {(each["step"], each["prompt"], each["sample"]): each for each in lines}
    assert len(found) == len(lines)
    return found


def weights(folder: Path, step: int = 12) -> bytes:
    return (folder / "run" / "checkpoints" / f"step-{step:08d}" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happened to: several steps a rollout, made one ahead."""
    folder = project(tmp_path_factory.mktemp("rl") / "undisturbed")
    code, out, err = end(start(folder, *TWICE))
    assert code == 0, out + err
    return folder


def test_a_run_writes_every_step_and_every_answer(undisturbed: Path) -> None:
    records = metrics(undisturbed)
    assert [each["step"] for each in records] == list(range(13))
    assert "evaluation_reward" in records[0]
    assert [each["step"] for each in records if "evaluation_reward" in each] == [0, 6, 12]
    first, second = records[1], records[2]
    wanted = ("reward", "reward_std", "mismatch_max", "mismatch_mean", "entropy", "clipped_low", "clipped_high")
    wanted += ("length_mean", "truncated", "reward_exact", "weights_version", "age", "refilled")
    assert set(wanted) <= set(first)
    assert {f"seconds_{key}" for key in ("sync", "generate", "reward", "score", "update")} <= set(first)
    assert "reward" not in second  # the second step of a rollout
    assert records[3]["age"] == 2  # made with the weights before the rollout in between
    assert first["ratio_max"] == 1.0 < second["ratio_max"]
    assert all(each["mismatch_max"] < 1e-4 for each in records[1:])
    found = answers(undisturbed)
    assert {step for step, _, _ in found} == {1, 3, 5, 7, 9, 11}
    groups: dict[tuple[int, int], list[float]] = {}
    for each in (each for each in found.values() if each["step"] == 1):
        groups.setdefault((each["prompt"], each["group"]), []).append(each["reward"])
    spreads = [statistics.pstdev(rewards) for rewards in groups.values()]
    assert {len(rewards) for rewards in groups.values()} == {4}
    assert first["reward_std_group"] == pytest.approx(statistics.fmean(spreads)) != pytest.approx(first["reward_std"])
    used = [each for each in found.values() if each["step"] == 5 and each["used"]]
    assert len(used) == 32
    assert all(len(each["tokens"]) == len(each["logprobs"]) == len(each["trained_logprobs"]) for each in used)
    group = [each for each in used if each["prompt"] == used[0]["prompt"]]
    assert sum(each["advantage"] for each in group) == pytest.approx(0, abs=1e-5)


@pytest.mark.rest
def test_killed_anywhere_it_ends_in_the_same_bytes(undisturbed: Path, tmp_path: Path) -> None:
    folder = project(tmp_path / "killed")
    for steps in (5, 8):  # in the middle of a rollout, and after one
        process = start(folder, *TWICE)
        wait_for_steps(folder, process, steps)
        kill(psutil.Process(process.pid))
        process.communicate()
    code, out, err = end(start(folder, *TWICE))
    assert code == 0, out + err
    assert "Resumed after step" in out
    assert answers(folder) == answers(undisturbed)
    assert weights(folder) == weights(undisturbed)


@pytest.mark.rest
def test_at_another_number_of_ranks_it_goes_on_with_the_same_answers(undisturbed: Path, tmp_path: Path) -> None:
    folder = project(tmp_path / "elsewhere")
    shutil.copytree(undisturbed / "run", folder / "run")
    for step in (9, 12):
        shutil.rmtree(folder / "run" / "checkpoints" / f"step-{step:08d}")
    code, out, err = end(start(folder, "--nproc", "3"))
    assert code == 0, out + err
    assert "Resumed after step 6" in out
    wanted, found = answers(undisturbed), answers(folder)
    assert found.keys() == wanted.keys()
    for name, each in found.items():
        assert each["tokens"] == wanted[name]["tokens"]


@pytest.mark.rest
def test_a_step_is_made_again(undisturbed: Path, tmp_path: Path) -> None:
    code, out, err = command(undisturbed, "replay", "run", "--step", "9")
    assert code == 0, out + err
    assert "step 9 again, from run/checkpoints/step-00000006, training 2 steps again" in out
    assert out.endswith("samples: same\n")
    file = undisturbed / "run" / "samples.jsonl"
    before = file.read_bytes()
    lines = [json.loads(line) for line in before.splitlines()]
    place = next(i for i, line in enumerate(lines) if line["step"] == 9 and len(line["tokens"]) > 2)
    prompt, number = lines[place]["prompt"], lines[place]["sample"]
    lines[place]["tokens"][2] = 99
    try:
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        code, out, err = command(undisturbed, "replay", "run", "--step", "9", "--prompt", str(prompt))
        assert code == 1, out + err
        assert f"the first that differs is prompt {prompt}, sample {number}, token 2: 99, now" in out
    finally:
        file.write_bytes(before)
    for words, said in {
        ("--step", "4"): "the nearest step that has some is",
        ("--step", "9", "--prompt", "77777"): "--prompt 77777: is not among those of step 9",
    }.items():
        code, out, err = command(undisturbed, "replay", "run", *words)
        assert code == 2
        assert said in err
        assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("variables", "nproc"),
    [
        ({}, 2),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, 2),  # an interactive job
        ({"RANK": "0", "WORLD_SIZE": "2"}, None),
    ],
)
def test_a_replay_has_as_many_processes_as_the_run(
    variables: dict[str, str], nproc: int | None, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int | None] = []
    monkeypatch.setattr(launcher, "start", lambda *passed, nproc, **named: counts.append(nproc) or 0)
    monkeypatch.setattr(os, "environ", environment(**variables))
    monkeypatch.chdir(undisturbed)
    assert main(["replay", "run", "--step", "9"]) == 0
    assert counts == [nproc]


BAD = """
import time
def good(completion, record, sample):
    return float(len(completion) % 3)
def raises(completion, record, sample):
    return record["points"] if sample.step == 3 else good(completion, record, sample)
def nan(completion, record, sample):
    return float("nan") if sample.step == 3 else good(completion, record, sample)
def slow(completion, record, sample):
    time.sleep(5 if sample.step == 3 and sample.sample == 1 and sample.prompt % 2 else 0)
    return good(completion, record, sample)
def equal(completion, record, sample):
    return 1.0
"""


def bad(folder: Path, function: str, *sets: str) -> tuple[int, str, str]:
    folder = project(folder)
    (folder / "bad.py").write_text(BAD)
    words = [f"reward.function=bad.py:{function}", "train.steps=4", "rollout.ahead=0", "reward.seconds=1.0", *sets]
    return end(start(folder, *TWICE, *[word for each in words for word in ("--set", each)]))


@pytest.mark.rest
@pytest.mark.parametrize("function", ["raises", "nan"])
def test_a_reward_that_goes_wrong_ends_the_run_in_one_line(function: str, tmp_path: Path) -> None:
    code, _, err = bad(tmp_path / function, function)
    assert code == 2
    (line,) = err.splitlines()
    assert "sort.jsonl, line" in line
    assert "of step 3" in line
    assert {"raises": "bad.py:6: KeyError: 'points'", "nan": "nan, not a finite number"}[function] in line


@pytest.mark.rest
def test_a_slow_reward_is_nothing_and_named(tmp_path: Path) -> None:
    code, out, err = bad(tmp_path / "slow", "slow")
    assert code == 0, out + err
    made = answers(tmp_path / "slow").values()
    late = [each for each in made if (each["step"], each["sample"], each["prompt"] % 2) == (3, 1, 1)]
    assert [each["reward"] for each in late] == [0.0] * len(late)
    assert metrics(tmp_path / "slow")[3]["slow_rewards"] == len(late) == len(err.splitlines()) > 0
    assert all("sample 1 of step 3) took too long, and is 0" in line for line in err.splitlines())


@pytest.mark.rest
def test_equal_rewards_are_replaced_and_then_give_no_gradient(tmp_path: Path) -> None:
    code, out, err = bad(tmp_path / "equal", "equal", "optimizer.weight_decay=0.0")
    assert code == 0, out + err
    records = metrics(tmp_path / "equal")
    assert records[1]["refilled"] == 3 * 8
    assert records[1]["samples_equal"] == 4 * 8
    assert [each["grad_norm"] for each in records[1:]] == [0.0] * 4
