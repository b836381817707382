"""What a dry run prints, and that it is all it does."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from messages import lacking
from running import project
from trueshard.cli import main
from trueshard.errors import UserError
from trueshard.train.config import Config
from trueshard.train.parse import load_config, to_toml
from trueshard.train.run.forecast import dry_run

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project, in which the command is given."""
    monkeypatch.chdir(project(tmp_path / "dry"))
    return tmp_path / "dry"


def test_dry_run_prints_configuration_and_forecast_and_writes_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(folder.rglob("*"))
    assert main(["train", "train.toml", "--nproc", "2", "--set", "train.steps=7", "--dry-run"]) == 0
    out = capsys.readouterr().out
    printed = tomllib.loads(out)
    assert printed["train"]["steps"] == 7
    assert printed["shard"]["reshard_after_forward"] == "default"
    assert "# llama on 2 × cpu" in out
    assert "# sequence 32 · microbatch 4 · AdamW" in out
    assert "tokens/s" in out
    assert re.search(r"^# [\d,]+ samples of 32 tokens; 7 steps are [\d.]+ epochs$", out, re.MULTILINE)
    assert sorted(folder.rglob("*")) == before


@pytest.mark.rest
@pytest.mark.usefixtures("folder")
def test_dry_run_on_other_hardware_takes_any_number_of_ranks() -> None:
    config = load_config(Path("train.toml"), ["train.batch_size=64"])
    assert "# llama on 64 × h100, 8 ranks a node" in dry_run(config, 64, hardware="h100")


def test_what_is_wrong_with_the_data_is_one_line_as_in_a_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "rows.jsonl").write_text('{"text": "some words"}\n{"text": \n')
    before = sorted(folder.rglob("*"))
    assert main(["train", "train.toml", "--nproc", "2", "--set", "data.path=rows.jsonl", "--dry-run"]) == 2
    assert lacking(capsys.readouterr().err, "rows.jsonl, line 2") == []
    assert sorted(folder.rglob("*")) == before


@pytest.mark.usefixtures("folder")
def test_unknown_hardware_is_one_line() -> None:
    with pytest.raises(UserError, match=r"h10.*h100"):
        dry_run(load_config(Path("train.toml")), 2, hardware="h10")


@pytest.mark.usefixtures("folder")
def test_what_the_planner_cannot_simulate_is_said() -> None:
    last = dry_run(load_config(Path("train.toml"), ["shard.units=NoSuchBlock"]), 2).splitlines()[-1]
    assert last.startswith("# No forecast")
    assert "NoSuchBlock" in last


EVERYTHING = """
[run]
dir = "run"
[model]
path = "base"
[adapter]
targets = ["q_proj"]
[data]
format = "chat"
packing = false
[[data.sources]]
path = "a.jsonl"
weight = 2.0
[[data.sources]]
path = "b.jsonl"
[evaluation]
[train]
steps = 3
[optimizer]
class = "torch.optim.SGD"
[[optimizer.groups]]
parameters = ["*.bias"]
lr = 0.5
arguments = { momentum = 0.9 }
[schedule]
class = "torch.optim.lr_scheduler.StepLR"
arguments = { step_size = 2 }
[shard]
reshard_after_forward = { "model.layers.*" = "always" }
"""


def test_printed_configuration_has_every_key_and_means_the_same(tmp_path: Path) -> None:
    file = tmp_path / "all.toml"
    file.write_text(EVERYTHING)
    config = load_config(file)
    text = to_toml(config)
    again = Config.model_validate(tomllib.loads(text))
    assert again == config
    assert again.identity() == config.identity()
    for name, section in config.model_dump(mode="json", by_alias=True, exclude_none=True).items():
        assert f"[{name}]" in text
        for key in section:
            assert f"{key} = " in text or f"[[{name}.{key}]]" in text
