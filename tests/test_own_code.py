"""Code beside a model, tokenizer or processor: it runs by `model.trust_remote_code` alone, and nobody asks for it."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import forks
import running
from messages import lacking, naming
from running import end, environment, metrics, processes_below, start, wait_for_steps
from trueshard.errors import UserError
from trueshard.train.models.config import ModelSection, own_code
from trueshard.train.parse import load_config
from trueshard.train.run.checks import check_settings

ROOT = Path(__file__).parents[1]
MARK = "import pathlib; pathlib.Path({mark!r}).touch()\n"
CODE = """
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, ProcessorMixin
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
class OwnProcessor(ProcessorMixin):
    pass
"""
MAPS: dict[str, dict[str, Any]] = {
    "config.json": {"AutoConfig": "code.OwnConfig", "AutoModelForCausalLM": "code.OwnModel"},
    "tokenizer_config.json": {"AutoTokenizer": [None, "code.OwnTokenizer"]},
    "processor_config.json": {"AutoProcessor": "code.OwnProcessor"},
    "preprocessor_config.json": {"AutoProcessor": "code.OwnProcessor", "AutoImageProcessor": "code.OwnProcessor"},
}
"""By file: what its `auto_map` names."""


def project(folder: Path, *files: str) -> Path:
    """A run whose model's directory has code of its own, which leaves a file `ran` and is named in ``files``."""
    running.project(folder)
    model = folder / "model"
    shutil.copytree(ROOT / "examples" / "models" / "sort", model)
    (model / "code.py").write_text(MARK.format(mark=str(folder / "ran")) + CODE)
    for name in files:
        file = model / name
        data = json.loads(file.read_text()) if file.exists() else {}
        data |= {"auto_map": MAPS[name]}
        if name == "config.json":
            data |= {"model_type": "own", "architectures": ["OwnModel"]}
        if name == "tokenizer_config.json":
            data["tokenizer_class"] = "OwnTokenizer"
        file.write_text(json.dumps(data))
    (folder / "train.toml").write_text(
        '[run]\ndir = "run"\n[model]\npath = "model"\n[data]\npath = "text"\n[train]\nsteps = 2\n'
        "sequence_length = 32\nbatch_size = 4\n[sample]\ntokens = 0\n"
    )
    return folder


def yes(folder: Path, *words: str) -> tuple[int, str, str]:
    """`yes | trueshard …` in a folder: its exit code, stdout and stderr."""
    with subprocess.Popen(["yes"], stdout=subprocess.PIPE) as asked:
        process: subprocess.Popen[str] = forks.Popen(
            [sys.executable, "-m", "trueshard", *words],
            cwd=folder,
            env=environment(HF_MODULES_CACHE=str(folder / "modules")),
            stdin=asked.stdout,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        ended = end(process)
        asked.kill()
    return ended


IMAGES = ("--set=data.format=vision", f"--set=data.path={ROOT}/examples/data/pictures.jsonl")


@pytest.mark.rest
@pytest.mark.parametrize(
    ("file", "options"),
    [
        ("config.json", ("--nproc=2",)),
        ("config.json", ("--dry-run",)),
        ("config.json", ("--set=model.path=", "--set=model.config=model", "--set=tokenizer.vocab_size=300")),
        ("tokenizer_config.json", ("--nproc=2",)),
        ("processor_config.json", IMAGES),
        ("preprocessor_config.json", IMAGES),
    ],
)
def test_own_code_does_not_run_and_nobody_asks(file: str, options: tuple[str, ...], tmp_path: Path) -> None:
    folder = project(tmp_path / "run", file)
    code, out, err = yes(folder, "train", "train.toml", *options)
    assert not (folder / "ran").exists()
    assert (code, len(err.splitlines())) == (2, 1), out + err
    assert lacking(err, f"model/{file}", "auto_map", "model.trust_remote_code = true") == [], err
    assert "[y/N]" not in out + err
    assert not (folder / "run").exists()


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_the_line_names_the_file_and_the_key(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = project(tmp_path / "run", file)
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match=naming(f"model/{file}", "auto_map", "model.trust_remote_code = true")):
        check_settings(load_config(folder / "train.toml", []), 1)
    assert not (folder / "ran").exists()


def test_a_question_of_another_library_reaches_no_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    model = project(tmp_path / "run", "config.json") / "model"
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with pytest.raises(UserError, match=naming("config.json", "auto_map")), own_code(ModelSection(path="model"), model):
        input("Do you wish to run the custom code? [y/N] ")
    assert capfd.readouterr() == ("", "")


@pytest.mark.rest
@pytest.mark.parametrize("files", [("config.json",), ("config.json", "tokenizer_config.json")])
def test_own_code_runs_by_the_key(files: tuple[str, ...], tmp_path: Path) -> None:
    folder = project(tmp_path / "run", *files)
    words = ("train", "train.toml", "--nproc=2", "--set=model.trust_remote_code=true")
    code, out, err = yes(folder, *words)
    assert code == 0, out + err
    assert (folder / "ran").exists()
    assert [each["step"] for each in metrics(folder)] == [1, 2]
    code, out, err = yes(folder, *words, "--set=train.steps=3")
    assert code == 0, out + err
    assert "Resumed after step 2" in out
    saved = folder / "run" / "checkpoints" / "step-00000003"
    assert json.loads((saved / "config.json").read_text())["auto_map"]["AutoModelForCausalLM"].endswith("OwnModel")
    code, out, err = yes(folder, *words, "--set=run.dir=again", f"--set=model.path={saved}")
    assert code == 0, out + err


@pytest.mark.rest
def test_a_model_that_transformers_knows_needs_no_code_of_its_own(tmp_path: Path) -> None:
    folder = project(tmp_path / "run")
    file = folder / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"auto_map": MAPS["config.json"]}))
    code, out, err = yes(folder, "train", "train.toml", "--nproc=2")
    assert code == 0, out + err
    assert not (folder / "ran").exists()


@pytest.mark.rest
def test_no_process_of_a_run_has_a_standard_input(tmp_path: Path) -> None:
    folder = running.project(tmp_path / "run")
    process = start(folder, "--nproc=2", "--set=train.steps=100000")
    wait_for_steps(folder, process, 2)
    everyone = [process.pid, *(each.pid for each in processes_below(process.pid))]
    inputs = {os.readlink(f"/proc/{pid}/fd/0") for pid in everyone}
    process.terminate()
    assert end(process)[0] == 130
    assert len(everyone) >= 3
    assert inputs == {os.devnull}


@pytest.mark.rest
@pytest.mark.parametrize("words", [("plan", "own.py:make"), ("verify", "own.py:make", "--nproc=2")])
def test_code_that_is_named_is_told_the_end_of_the_input(words: tuple[str, ...], tmp_path: Path) -> None:
    folder = project(tmp_path / "run")
    (folder / "own.py").write_text("import sys\ndef make():\n    raise ValueError(f'read {sys.stdin.read()!r}')\n")
    code, out, err = yes(folder, *words)
    assert code != 0
    assert "read ''" in out + err
