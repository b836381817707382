"""The command line on wrong input: one line that names key or path and the remedy, exit code 2, nothing left."""

from __future__ import annotations

import json
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
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "SLURM_STEP_ID", "SLURM_NTASKS"):
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


#: What is set → what its refusal names; ROOT is the folder of the configuration.
SETTINGS: dict[str, tuple[str, ...]] = {
    "train.step=3": ("--set train.step=3", "unknown key train.step", "train.steps"),
    "train.lr=0.1": ("train.lr;", "optimizer.lr"),
    "trian.steps=3": ("trian;", ": train"),
    "train.steps=ten": ("train.steps", '"ten"', "integer"),
    "train.steps=0": ("train.steps", "0", "1"),
    "train.seed=1.5": ("train.seed", "1.5", "integer"),
    "shard.compile=1": ("shard.compile", "1", "boolean"),
    "shard.reshard_after_forward=often": ("shard.reshard_after_forward", "often", "'always'"),
    "schedule.decay=cosin": ("schedule.decay", "cosin", "'cosine'"),
    "optimizer.betas=[0.9]": ("optimizer.betas", "at least 2"),
    "train=3": ("--set train=3", "section.key=value"),
    "model.config=x": ("model.config", "x does not exist"),
    "tokenizer.path=x": ("tokenizer.path: x ",),
    "train.steps.more=1": ("train.steps", "not a table"),
    "model.architecture=lama": ("model.architecture", "'lama'", "llama"),
    "model.architecture=vit model.fields={}": ("model.architecture", "'vit'", "language model"),
    "model.fields.hiden_size=3": ("model.fields.hiden_size", "hidden_size"),
    "model.fields.hidden_size=30": ("model.", "correct"),
    "model.fields.max_position_embeddings=8": ("train.sequence_length", "16", "max_position_embeddings = 8"),
    "data.path=ROOT/nowhere": ("data.path", "ROOT/nowhere", "does not exist"),
    "run.dir=ROOT/train.toml/run": ("run.dir", "a file", "another folder"),
    "run.dir=/proc/trueshard/run": ("run.dir", "/proc/trueshard/run", "another folder"),
    "optimizer.class=torch.optim.AdamV": ("optimizer.class", "torch.optim.AdamV", "torch.optim.Adam"),
    "optimizer.class=nowhere.AdamW": ("optimizer.class", "nowhere.AdamW", "cannot be imported"),
    "optimizer.class=torch.nn.Linear": ("optimizer.class", "torch.nn.Linear", "torch.optim.Optimizer"),
    "optimizer.arguments.bogus=1": ("[optimizer]", "AdamW", "bogus"),
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_wrong_setting_is_told_with_what_is_wanted(refused: Refused, tmp_path: Path, settings: str) -> None:
    options = [word for setting in settings.split(" ") for word in ("--set", setting.replace("ROOT", str(tmp_path)))]
    assert lacking(refused(*options), *(part.replace("ROOT", str(tmp_path)) for part in SETTINGS[settings])) == []


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        *((f"--nproc {count}", (f"--nproc {count}", "1 to")) for count in (0, -1, 100000)),
        ("--nproc two", ("--nproc",)),
        ("--nproc 3", ("train.batch_size", "4", "3 ranks", "multiple of 3")),
    ],
)
def test_wrong_numbers_of_processes(refused: Refused, options: str, parts: tuple[str, ...]) -> None:
    assert lacking(refused(*options.split()), *parts) == []


def test_nproc_under_another_launcher(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    assert lacking(refused("--nproc", "2"), "--nproc 2", "srun", "--nproc") == []


@pytest.mark.parametrize(
    ("file", "parts"), [("nowhere.toml", ("ROOT/nowhere.toml", "path")), ("", ("ROOT", "TOML"))], ids=str
)
def test_no_configuration(refused: Refused, tmp_path: Path, file: str, parts: tuple[str, ...]) -> None:
    assert lacking(refused(file=tmp_path / file), *(part.replace("ROOT", str(tmp_path)) for part in parts)) == []


VALID, NO_MODEL = CONFIG.index("[model]"), CONFIG.index("[tokenizer]")
LLAMA = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}


def model_from(key: str, path: str = "{root}") -> str:
    """The configuration with its model from a directory."""
    return f'{CONFIG[:VALID]}[model]\n{key} = "{path}"\n{CONFIG[NO_MODEL:]}'


#: What is wrong → (the configuration, files that are written, what the refusal names).
FILES: dict[str, tuple[str, dict[str, str | bytes], tuple[str, ...]]] = {
    "malformed": ("[run\ndir = 3", {}, ("ROOT/train.toml", "TOML", "line 1")),
    "no steps": (CONFIG.replace("steps = 4\n", ""), {}, ("train.steps", "train.epochs", "none")),
    "no folder": (CONFIG.replace("[run]\ndir", "[run]\ntimeout = 1 #"), {}, ("run.dir", "missing")),
    "no model there": (model_from("path", "{root}/text"), {}, ("model.path", "ROOT/text", "config.json")),
    "no directory": (model_from("path", "{root}/nowhere"), {}, ("model.path", "ROOT/nowhere", "does not exist")),
    "unknown architecture": (
        model_from("config"),
        {"config.json": '{"model_type": "gpt3"}'},
        ("model.config", "ROOT/config.json", "'gpt3'", "gpt2"),
    ),
    "no weights": (
        model_from("path"),
        {"config.json": '{"model_type": "gpt2"}'},
        ("model.path", "ROOT", "no weights", "model.config"),
    ),
    "no JSON": (model_from("config"), {"config.json": "{"}, ("model.config", "ROOT/config.json", "transformers")),
    "small vocabulary": (
        model_from("config"),
        {"config.json": json.dumps({"model_type": "llama"} | LLAMA)},
        ("model.config", "99", "300"),
    ),
    "no tokenizer": (
        model_from("config").replace("[tokenizer]\nvocab_size = 300\n", ""),
        {"config.json": '{"model_type": "gpt2"}'},
        ("model.config", "ROOT", "no tokenizer", "tokenizer.path"),
    ),
    "wrong tokenizer": (
        CONFIG.replace("vocab_size = 300", 'path = "{root}/tokenizer.json"'),
        {"tokenizer.json": "{}"},
        ("tokenizer.path", "ROOT/tokenizer.json"),
    ),
    "no text": (
        CONFIG.replace("/text", "/texts"),
        {"texts/a.unknown": "To shard"},
        ("data.path", "ROOT/texts", "no file", "data.include"),
    ),
    "empty text": (CONFIG, {"text/a.txt": ""}, ("data.path", "ROOT/text", "only empty files")),
    "short text": (
        CONFIG,
        {"text/a.txt": "short"},
        ("data.path", "ROOT/text", "tokens", "train.sequence_length"),
    ),
    "not UTF-8": (CONFIG, {"text/b.txt": b"caf\xe9"}, ("ROOT/text/b.txt", "UTF-8", "byte 3", "data.include")),
}


@pytest.mark.parametrize("wrong", FILES)
def test_wrong_files_are_named(refused: Refused, config: Path, tmp_path: Path, wrong: str) -> None:
    text, files, parts = FILES[wrong]
    config.write_text(text.replace("{root}", str(tmp_path)))
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert lacking(refused(), *(part.replace("ROOT", str(tmp_path)) for part in parts)) == []


@pytest.mark.parametrize(
    ("line", "problem"),
    [("{not json", "JSON"), ('{"body": "x"}', "'text'"), ("[1]", "a list"), ('{"text": 3}', "'text'")],
)
def test_malformed_jsonl_names_file_and_line(refused: Refused, tmp_path: Path, line: str, problem: str) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps({"text": "fine " * 100}) + "\n\n" + line + "\n")
    assert lacking(refused("--set", f"data.path={file}"), f"{file}, line 3", problem) == []


@pytest.mark.parametrize("arguments", [["tarin"], ["train"], ["train", "x.toml", "--bogus"]])
def test_wrong_command_line(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    command = "trueshard train" if arguments[0] == "train" else "trueshard"
    assert lines[0].endswith(f"See `{command} --help`.")
    assert ("?." in lines[0], "?" in lines[0]) == (False, arguments == ["tarin"])


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
