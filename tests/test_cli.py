"""The command line on wrong input: one line that names key or path and the remedy, exit code 2, nothing left."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import trueshard
from messages import lacking, naming
from trueshard import errors
from trueshard.cli import main
from trueshard.train.run import worker

CONFIG = """
[run]
dir = "{root}/run"
[model]
architecture = "llama"
[model.fields]
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 4
[tokenizer]
vocab_size = 300
[data]
path = "{root}/text"
[train]
steps = 4
sequence_length = 16
batch_size = 4
"""

Refused = Callable[..., str]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A valid configuration with a folder of text; each test breaks one thing."""
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("To shard or not to shard, that is the question.\n" * 40)
    file = tmp_path / "train.toml"
    file.write_text(CONFIG.format(root=tmp_path))
    return file


@pytest.fixture
def refused(config: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Refused:
    """Runs `trueshard train`, checks the form of the refusal, and returns its line."""

    def run(*options: str, file: Path = config) -> str:
        before = sorted(tmp_path.rglob("*"))
        code = main(["train", str(file), *options])
        lines = capfd.readouterr().err.splitlines()
        assert code == 2, lines
        assert len(lines) == 1, lines
        assert lines[0].startswith("trueshard: ")
        assert sorted(tmp_path.rglob("*")) == before
        return lines[0]

    return run


def holds(line: str, *parts: str) -> bool:
    """Whether the line has all the parts."""
    return lacking(line, *parts) == []


def test_missing_configuration(refused: Refused, tmp_path: Path) -> None:
    assert holds(refused(file=tmp_path / "nowhere.toml"), str(tmp_path / "nowhere.toml"), "path")


def test_configuration_that_is_a_folder(refused: Refused, tmp_path: Path) -> None:
    assert holds(refused(file=tmp_path), str(tmp_path), "TOML")


def test_malformed_configuration(refused: Refused, config: Path) -> None:
    config.write_text("[run\ndir = 3")
    assert holds(refused(), str(config), "TOML", "line 1")


def test_unknown_key_names_the_nearest(refused: Refused, config: Path) -> None:
    assert holds(refused("--set", "train.step=3"), str(config), "train.step;", "train.steps")


def test_unknown_key_of_another_section(refused: Refused) -> None:
    assert holds(refused("--set", "train.lr=0.1"), "train.lr;", "optimizer.lr")


def test_unknown_section(refused: Refused) -> None:
    assert holds(refused("--set", "trian.steps=3"), "trian;", ": train")


def test_missing_key(refused: Refused, config: Path) -> None:
    config.write_text(config.read_text().replace("steps = 4\n", ""))
    assert holds(refused(), "train.steps", "train.epochs", "none")
    config.write_text(config.read_text().replace("[run]\ndir", "[run]\ntimeout = 1 #"))
    assert holds(refused(), "run.dir", "missing")


@pytest.mark.parametrize(
    ("setting", "parts"),
    [
        ("train.steps=ten", ("train.steps", '"ten"', "integer")),
        ("train.steps=0", ("train.steps", "0", "1")),
        ("train.seed=1.5", ("train.seed", "1.5", "integer")),
        ("shard.compile=1", ("shard.compile", "1", "boolean")),
        ("shard.reshard_after_forward=often", ("shard.reshard_after_forward", "often", "'always'")),
        ("schedule.decay=cosin", ("schedule.decay", "cosin", "'cosine'")),
        ("optimizer.betas=[0.9]", ("optimizer.betas", "at least 2")),
        ("train=3", ("--set train=3", "section.key=value")),
        ("model.config=x", ("model.config", "x does not exist")),
        ("tokenizer.path=x", ("tokenizer.path: x ",)),
    ],
)
def test_wrong_value_is_told_with_what_is_wanted(refused: Refused, setting: str, parts: tuple[str, ...]) -> None:
    assert holds(refused("--set", setting), *parts)


def test_override_of_a_value_as_if_it_were_a_table(refused: Refused) -> None:
    assert holds(refused("--set", "train.steps.more=1"), "train.steps", "not a table")


def test_unknown_architecture_lists_near_matches(refused: Refused) -> None:
    assert holds(refused("--set", "model.architecture=lama"), "model.architecture", "'lama'", "llama")


def test_architecture_that_is_no_language_model(refused: Refused) -> None:
    line = refused("--set", "model.architecture=vit", "--set", "model.fields={}")
    assert holds(line, "model.architecture", "'vit'", "language model")


def test_unknown_model_field(refused: Refused) -> None:
    assert holds(refused("--set", "model.fields.hiden_size=3"), "model.fields.hiden_size", "model.fields.hidden_size")


def test_model_fields_that_do_not_go_together(refused: Refused) -> None:
    assert holds(refused("--set", "model.fields.hidden_size=30"), "model.", "correct")


def model_config(config: Path, key: str, directory: Path) -> None:
    """Let the configuration take its model from a directory."""
    text = re.sub(
        r"\[model\].*?\[tokenizer\]", f'[model]\n{key} = "{directory}"\n[tokenizer]', config.read_text(), flags=re.S
    )
    config.write_text(text)


def test_directory_that_is_not_a_model(refused: Refused, config: Path, tmp_path: Path) -> None:
    model_config(config, "path", tmp_path / "text")
    assert holds(refused(), "model.path", str(tmp_path / "text"), "config.json")


def test_model_directory_that_does_not_exist(refused: Refused, config: Path, tmp_path: Path) -> None:
    model_config(config, "path", tmp_path / "nowhere")
    assert holds(refused(), "model.path", str(tmp_path / "nowhere"), "does not exist")


def test_model_directory_of_an_unknown_architecture(refused: Refused, config: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt3"}))
    model_config(config, "config", tmp_path)
    assert holds(refused(), "model.config", str(tmp_path / "config.json"), "'gpt3'", "gpt2")


def test_model_directory_without_weights(refused: Refused, config: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    model_config(config, "path", tmp_path)
    assert holds(refused(), "model.path", str(tmp_path), "no weights", "model.config")


def test_model_configuration_that_is_not_json(refused: Refused, config: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    model_config(config, "config", tmp_path)
    assert holds(refused(), "model.config", str(tmp_path / "config.json"), "transformers")


def test_model_vocabulary_smaller_than_the_tokenizer(refused: Refused, config: Path, tmp_path: Path) -> None:
    settings = {"model_type": "llama", "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(settings | {"num_attention_heads": 4, "intermediate_size": 32}))
    model_config(config, "config", tmp_path)
    assert holds(refused(), "model.config", "99", "300")


def test_sequence_longer_than_the_model_can_read(refused: Refused) -> None:
    line = refused("--set", "model.fields.max_position_embeddings=8")
    assert holds(line, "train.sequence_length", "16", "max_position_embeddings = 8")


def test_model_directory_without_a_tokenizer(refused: Refused, config: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    model_config(config, "config", tmp_path)
    config.write_text(config.read_text().replace("[tokenizer]\nvocab_size = 300\n", ""))
    assert holds(refused(), "model.config", str(tmp_path), "no tokenizer", "tokenizer.path")


def test_tokenizer_that_cannot_be_read(refused: Refused, config: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    config.write_text(config.read_text().replace("vocab_size = 300", f'path = "{tmp_path}/tokenizer.json"'))
    assert holds(refused(), "tokenizer.path", str(tmp_path / "tokenizer.json"))


def test_missing_text(refused: Refused, tmp_path: Path) -> None:
    assert holds(
        refused("--set", f"data.path={tmp_path}/nowhere"), "data.path", f"{tmp_path}/nowhere", "does not exist"
    )


def test_empty_text_folder(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "text" / "a.txt").rename(tmp_path / "text" / "a.unknown")
    assert holds(refused(), "data.path", str(tmp_path / "text"), "no file", "data.include")


def test_text_folder_with_empty_files(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "text" / "a.txt").write_text("")
    assert holds(refused(), "data.path", str(tmp_path / "text"), "only empty files")


def test_text_shorter_than_one_sequence(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "text" / "a.txt").write_text("short")
    assert holds(refused(), "data.path", str(tmp_path / "text"), "tokens", "train.sequence_length")


def test_text_that_is_not_utf8(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "text" / "b.txt").write_bytes(b"caf\xe9")
    assert holds(refused(), str(tmp_path / "text" / "b.txt"), "UTF-8", "byte 3", "data.include")


@pytest.mark.parametrize(
    ("line", "problem"),
    [("{not json", "JSON"), ('{"body": "x"}', "'text'"), ("[1]", "a list"), ('{"text": 3}', "'text'")],
)
def test_malformed_jsonl_names_file_and_line(refused: Refused, tmp_path: Path, line: str, problem: str) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps({"text": "fine " * 100}) + "\n\n" + line + "\n")
    assert holds(refused("--set", f"data.path={file}"), f"{file}, line 3", problem)


@pytest.mark.parametrize("nproc", ["0", "-1", "100000"])
def test_more_processes_than_the_machine_can_start(refused: Refused, nproc: str) -> None:
    assert holds(refused("--nproc", nproc), f"--nproc {nproc}", "1 to")


def test_nproc_that_is_no_number(refused: Refused) -> None:
    assert holds(refused("--nproc", "two"), "--nproc")


def test_nproc_under_another_launcher(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    assert holds(refused("--nproc", "2"), "--nproc 2", "srun", "--nproc")


def test_batch_that_does_not_divide(refused: Refused) -> None:
    assert holds(refused("--nproc", "3"), "train.batch_size", "4", "3 ranks", "multiple of 3")


def test_run_folder_below_a_file(refused: Refused, tmp_path: Path) -> None:
    assert holds(refused("--set", f"run.dir={tmp_path}/train.toml/run"), "run.dir", "a file", "another folder")


def test_run_folder_that_cannot_be_written(refused: Refused) -> None:
    assert holds(refused("--set", "run.dir=/proc/trueshard/run"), "run.dir", "/proc/trueshard/run", "another folder")


@pytest.mark.parametrize(
    ("setting", "parts"),
    [
        ("torch.optim.AdamV", ("optimizer.class", "torch.optim.AdamV", "torch.optim.Adam")),
        ("nowhere.AdamW", ("optimizer.class", "nowhere.AdamW", "cannot be imported")),
        ("torch.nn.Linear", ("optimizer.class", "torch.nn.Linear", "torch.optim.Optimizer")),
    ],
)
def test_wrong_optimizer(refused: Refused, setting: str, parts: tuple[str, ...]) -> None:
    assert holds(refused("--set", f"optimizer.class={setting}"), *parts)


def test_optimizer_argument_it_does_not_have(refused: Refused) -> None:
    assert holds(refused("--set", "optimizer.arguments.bogus=1"), "[optimizer]", "AdamW", "bogus")


@pytest.mark.parametrize("arguments", [["tarin"], ["train"], ["train", "x.toml", "--bogus"]])
def test_wrong_command_line(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "trueshard --help" in lines[0]


def test_help_lists_the_commands(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capfd.readouterr().out
    assert "train" in shown
    assert "demo" in shown


def test_only_what_the_program_refuses_is_a_line_and_all_else_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="invalid literal"), errors.refused():
        int("x")
    with pytest.raises(errors.UserError, match="no checkpoint"), errors.refused():
        trueshard.check(tmp_path / "nothing")
    with pytest.raises(errors.UserError, match="nothing"), errors.refused():
        (tmp_path / "nothing").read_text()
    with pytest.raises(ConnectionResetError), errors.refused():
        raise ConnectionResetError("by a library")
    assert main(["check", str(tmp_path / "nothing")]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert main(["check", str(tmp_path / "nothing"), "--traceback"]) == 2
    assert lacking(capsys.readouterr().err, "Traceback", "catalogue.py", "trueshard: no checkpoint") == []


def test_a_lost_rank_is_known_by_what_raised() -> None:
    def of(error: Exception) -> bool:
        try:
            raise error
        except Exception as raised:
            return worker._lost_peer(raised)

    assert not of(RuntimeError("request timeout: gloo, connection reset"))
    assert not of(TimeoutError("timed out"))
    assert of(torch.distributed.DistNetworkError("gone"))
    assert of(errors.RankFailed("shard() failed on rank 1"))


def test_a_folder_of_a_run_points_to_its_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=naming("run's folder", "checkpoints/latest")):
        trueshard.check(tmp_path / "run")


def test_two_checkpoints_are_compared_by_checksums_or_by_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trueshard.save(tmp_path / "one", model=torch.nn.Linear(3, 3))
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    file = tmp_path / "two" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x77")
    pair = [str(tmp_path / "one"), str(tmp_path / "two")]
    assert main(["inspect", *pair]) == 0
    assert lacking(capsys.readouterr().out, "3 tensors are equal", "checksums", "--bytes", "nothing differs") == []
    assert main(["inspect", *pair, "--bytes"]) == 0
    assert lacking(capsys.readouterr().out, "2 tensors are equal", "by their bytes", "other values") == []
