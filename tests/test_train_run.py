"""Whole runs of `trueshard train`, as a user starts them: real processes, a real text, a tiny model."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
from pathlib import Path

import pytest

import running
import trueshard
from messages import lacking
from resting import all_but
from running import end, metrics, project, start, wait_for_steps, workers_of

LAYERS = ["model.layers.0", "model.layers.1"]
#: Of six steps, with two microbatches each, and a sample at the end.
CHANGES = {
    "steps = 40": "steps = 6\naccumulate = 2\nkeep = 5",
    "checkpoint_every = 20": "checkpoint_every = 3",
    'decay = "constant"': "warmup_steps = 2",
    "tokens = 0": 'prompt = "def "\ntokens = 8',
}
CONFIG = running.CONFIG
for old, new in CHANGES.items():
    assert old in CONFIG
    CONFIG = CONFIG.replace(old, new)


def run(folder: Path, *options: str) -> str:
    """Run to a good end that has nothing to complain of; returns stdout."""
    code, out, err = end(start(folder, *options))
    assert (code, err) == (0, ""), out + err
    return out


def make_project(folder: Path) -> Path:
    """A folder with a text of some ten kilobytes and this file's configuration."""
    project(folder)
    (folder / "train.toml").write_text(CONFIG)
    return folder


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in metrics(folder)]


def checkpoints(folder: Path) -> list[str]:
    """Their names; ``latest`` is a link to the last."""
    found = folder / "run" / "checkpoints"
    names = sorted(path.name for path in found.iterdir() if path.name != "latest")
    assert (found / "latest").readlink() == Path(names[-1])
    return names


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of six steps on two processes, and what it printed."""
    folder = make_project(tmp_path_factory.mktemp("train") / "finished")
    return folder, run(folder, "--nproc", "2")


@pytest.fixture
def halfway(finished: tuple[Path, str], tmp_path: Path) -> Path:
    """A copy of the finished run as a crash after step 5 would have left it: its last checkpoint is of step 3."""
    folder = tmp_path / "halfway"
    shutil.copytree(finished[0], folder, symlinks=True)
    shutil.rmtree(folder / "run" / "checkpoints" / "step-00000006")
    (folder / "run" / "loss.png").unlink()
    file = folder / "run" / "metrics.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:5], lines[5][:20]]))
    return folder


def test_run_leaves_every_file_and_names_it(finished: tuple[Path, str]) -> None:
    folder, out = finished
    for name in ("metrics.jsonl", "loss.png", "sample.txt", "config.json", "data/tokenizer/", "data/tokens.bin"):
        assert (folder / "run" / name).exists()
        assert f"run/{name}" in out
    assert checkpoints(folder) == ["step-00000003", "step-00000006"]
    assert "run/checkpoints/step-00000003/" in out
    assert "run/checkpoints/step-00000006/" in out
    assert (folder / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "run" / "sample.txt").read_text().startswith("def ")
    left = {path.name for path in (folder / "run").iterdir()}
    plan = json.loads((folder / "run" / "plan.json").read_text())["plan"]
    assert [unit.name for unit in trueshard.Plan.from_json(json.dumps(plan)).units] == ["", *LAYERS]
    assert left == {
        "metrics.jsonl",
        "log.txt",
        "loss.png",
        "sample.txt",
        "config.json",
        "plan.json",
        "data",
        "checkpoints",
    }


def test_run_shows_steps_entropy_and_sample(finished: tuple[Path, str]) -> None:
    out = finished[1]
    assert re.search(r"step 1/6  loss \d\.\d+", out)
    assert re.search(r"Loss \d\.\d+ .*entropy.* \d\.\d+", out)
    assert "def " in out
    assert "\r" not in out


def test_metrics_hold_one_object_a_step(finished: tuple[Path, str]) -> None:
    records = metrics(finished[0])
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert [record["samples"] for record in records] == [8, 16, 24, 32, 40, 48]
    for record in records:
        assert {"loss", "grad_norm", "lr", "tokens_per_second"} <= record.keys()
        assert record["tokens_per_second"] > 0
    assert records[0]["lr"] == pytest.approx(5e-3)
    assert records[1]["lr"] == pytest.approx(1e-2)
    assert records[5]["lr"] == pytest.approx(1e-3)
    assert records[5]["loss"] < records[0]["loss"]


def test_resume_continues_bit_for_bit(finished: tuple[Path, str], halfway: Path) -> None:
    out = run(halfway, "--nproc", "2")
    assert "Resumed after step 3" in out
    for found, expected in zip(metrics(halfway), metrics(finished[0]), strict=True):
        for key in ("step", "loss", "grad_norm", "lr", "samples"):
            assert found[key] == expected[key]
    assert checkpoints(halfway) == ["step-00000003", "step-00000006"]
    assert (halfway / "run" / "loss.png").exists()


@pytest.mark.rest
def test_resume_on_one_process_sees_the_same_samples(finished: tuple[Path, str], halfway: Path) -> None:
    run(halfway, "--nproc", "1")
    assert [record["step"] for record in metrics(halfway)] == [1, 2, 3, 4, 5, 6]
    assert losses(halfway) == pytest.approx(losses(finished[0]), rel=1e-4)


def test_finished_run_says_what_to_change(finished: tuple[Path, str]) -> None:
    folder, _ = finished
    before = (folder / "run" / "metrics.jsonl").read_bytes()
    out = run(folder, "--nproc", "2")
    assert "complete: 6 steps" in out
    assert "train.steps" in out
    assert (folder / "run" / "metrics.jsonl").read_bytes() == before


def test_finished_run_names_the_key_that_it_has(
    finished: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from trueshard.cli import main

    monkeypatch.chdir(finished[0])
    assert main(["train", "train.toml", "--nproc", "2", "--set", "train.epochs=0.01"]) == 0
    assert lacking(capfd.readouterr().out, "complete: 6 steps", "set train.epochs above 0.01") == []


@pytest.mark.parametrize(
    "setting", all_but(["train.seed=12"], ["model.fields.hidden_size=64", "train.seed=12", "tokenizer.vocab_size=401"])
)
def test_resume_with_a_contradiction_is_refused(
    halfway: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], setting: str
) -> None:
    from trueshard.cli import main

    monkeypatch.chdir(halfway)
    assert main(["train", "train.toml", "--nproc", "2", "--set", setting]) == 2
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    key, _, value = setting.partition("=")
    assert lacking(lines[0], key, int(value)) == []
    assert "run.dir" in lines[0]


@pytest.mark.parametrize("number", all_but([signal.SIGINT], [signal.SIGINT, signal.SIGTERM]))
def test_stop_saves_and_the_same_command_resumes(tmp_path: Path, number: signal.Signals) -> None:
    folder = make_project(tmp_path / "stopped")
    long = ("--nproc", "2", "--set", "train.steps=100000", "--set", "train.checkpoint_every=100000")
    process = start(folder, *long)
    wait_for_steps(folder, process, 3)
    process.send_signal(number)
    code, out, err = end(process)
    assert code == 130, out + err
    assert err == ""
    steps = len(metrics(folder))
    assert f"Stopped after step {steps}" in out
    assert checkpoints(folder) == [f"step-{steps:08d}"]
    if number == signal.SIGTERM:
        return
    out = run(folder, "--nproc", "2", "--set", f"train.steps={steps + 2}")
    assert f"Resumed after step {steps}" in out
    assert [record["step"] for record in metrics(folder)] == list(range(1, steps + 3))


@pytest.mark.rest
def test_a_run_that_is_killed_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """First a rank is killed, then everything at once, launcher too; the same command goes on both times."""
    settings = ("train.steps=14", "schedule.decay=constant", "sample.tokens=0")
    options = ("--nproc", "2", *(f"--set={each}" for each in settings))
    expected = make_project(tmp_path / "expected")
    run(expected, *options)
    folder = make_project(tmp_path / "killed")
    process = start(folder, *options, "--set", "train.steps=100000")
    wait_for_steps(folder, process, 5)
    workers = [each.pid for each in workers_of(process.pid)]
    assert len(workers) == 2
    os.kill(max(workers), signal.SIGKILL)
    code, _, err = end(process)
    assert code == 1
    assert "SIGKILL" in err
    process = start(folder, *options, "--set", "train.steps=100000")
    wait_for_steps(folder, process, len(metrics(folder)) + 2)
    everything = [process.pid, *(each.pid for each in workers_of(process.pid))]
    for each in everything:
        os.kill(each, signal.SIGKILL)
    end(process)
    (taken,) = [len(metrics(folder))]
    run(folder, *options, "--set", f"train.steps={max(14, taken + 1)}")
    assert [record["step"] for record in metrics(folder)] == list(range(1, max(14, taken + 1) + 1))
    assert losses(folder)[:14] == losses(expected)


@pytest.mark.rest
def test_the_best_checkpoint_has_a_name_on_the_disk_also_after_a_kill(tmp_path: Path) -> None:
    folder = make_project(tmp_path / "best")
    evaluation = "[evaluation]\nfraction = 0.2\nevery = 4\npatience = 99\n[optimizer]"
    changed = CONFIG.replace("[optimizer]", evaluation).replace("steps = 6", "steps = 24").replace("1e-2", "5e-2")
    (folder / "train.toml").write_text(changed)

    def check() -> int:
        """Return the best step of those that are saved, which the link names."""
        step = int((folder / "run" / "checkpoints" / "best").readlink().name.removeprefix("step-"))
        losses = {each["step"]: each["evaluation_loss"] for each in metrics(folder) if "evaluation_loss" in each}
        assert losses[step] == min(losses[saved] for saved in losses if saved <= step)
        return step

    process = start(folder, "--nproc", "2")
    wait_for_steps(folder, process, 10)
    os.killpg(process.pid, signal.SIGKILL)
    end(process)
    assert check() >= 4
    run(folder, "--nproc", "2")
    evaluated = [each for each in metrics(folder) if "evaluation_loss" in each]
    assert check() == min(evaluated, key=lambda each: each["evaluation_loss"])["step"]


@pytest.mark.rest
def test_srun_starts_workers(finished: tuple[Path, str], tmp_path: Path) -> None:
    folder = make_project(tmp_path / "srun")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    tasks = [
        start(
            folder,
            SLURM_STEP_ID="0",
            SLURM_PROCID=str(task),
            SLURM_LOCALID=str(task),
            SLURM_NTASKS="2",
            MASTER_PORT=str(port),
        )
        for task in range(2)
    ]
    results = [end(task) for task in tasks]
    assert [code for code, _, _ in results] == [0, 0], results
    assert losses(folder) == losses(finished[0])
    assert json.loads((folder / "run" / "config.json").read_text())["config"]["train"]["seed"] == 11


@pytest.mark.rest
def test_own_model_directory_and_jsonl(tmp_path: Path) -> None:
    """GPT-2 with dropout and tied embeddings, its own tokenizer, text as JSONL: resumed, it goes on bit for bit."""
    folder = make_project(tmp_path / "own")
    save_gpt2(folder)
    documents = [file.read_text() for file in sorted((folder / "text").iterdir())]
    (folder / "text.jsonl").write_text("".join(json.dumps({"body": document}) + "\n" for document in documents))
    sources = '[model]\npath = "gpt2"\n[data]\npath = "text.jsonl"\nfield = "body"\n[train]'
    (folder / "train.toml").write_text(re.sub(r"\[model\].*?\[train\]", lambda _: sources, CONFIG, flags=re.DOTALL))
    run(folder, "--nproc", "2")
    expected = losses(folder)
    assert expected[-1] < expected[0]
    shutil.rmtree(folder / "run" / "checkpoints" / "step-00000006")
    run(folder, "--nproc", "2")
    assert losses(folder) == expected


def save_gpt2(folder: Path) -> None:
    """Write a tiny GPT-2 and its tokenizer to `gpt2` in the folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train(
        [str(file) for file in sorted((folder / "text").iterdir())],
        trainers.BpeTrainer(vocab_size=500, special_tokens=["<end>"], show_progress=False),
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(str(folder / "gpt2"))
    GPT2LMHeadModel(GPT2Config(vocab_size=512, n_positions=64, n_embd=32, n_layer=2, n_head=4)).save_pretrained(
        str(folder / "gpt2")
    )
