"""A configuration against what the run remembers of itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from messages import lacking, naming
from running import CONFIG
from trueshard.errors import UserError
from trueshard.train.config import Config
from trueshard.train.parse import load_config
from trueshard.train.run import resuming

ARCHITECTURE = {"model_type": "llama", "hidden_size": 32, "vocab_size": 400}


def configuration(folder: Path, *overrides: str) -> Config:
    file = folder / "train.toml"
    file.write_text(CONFIG)
    return load_config(file, [f"run.dir={folder / 'run'}", *overrides])


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A folder in which a run has written its settings."""
    (tmp_path / "run").mkdir()
    resuming.write_settings(configuration(tmp_path), ARCHITECTURE)
    return tmp_path


def record(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run" / "config.json").read_text())
    return found


def test_all_that_contradicts_is_told_in_one_line(recorded: Path) -> None:
    config = configuration(recorded, "model.fields.hidden_size=64", "train.seed=12", "data.field=body")
    with pytest.raises(UserError) as caught:
        resuming.check_resumable(config, ARCHITECTURE)
    line = str(caught.value)
    assert "\n" not in line
    assert lacking(line, "model.fields.hidden_size", 64, 32) == []
    assert lacking(line, "train.seed", 12, 11) == []
    assert lacking(line, "data.field", '"body"', '"text"') == []
    assert "--override" not in line  # which would be refused, too: no checkpoint has these shapes
    assert "run.dir" in line
    with pytest.raises(UserError, match="--override"):
        resuming.check_resumable(configuration(recorded, "train.seed=12"), ARCHITECTURE)


def test_what_may_change_is_told_with_old_and_new(recorded: Path) -> None:
    config = configuration(recorded, "train.steps=80", "optimizer.lr=0.1", 'shard.mixed_precision="bf16"')
    changes = [str(change) for change in resuming.check_resumable(config, ARCHITECTURE)]
    assert changes == [
        "train.steps = 40, now 80",
        "optimizer.lr = 0.01, now 0.1",
        'shard.mixed_precision = unset, now "bf16"',
    ]


def test_what_nobody_needs_to_know_is_not_told(recorded: Path) -> None:
    config = configuration(recorded, "run.restarts=3", "train.log_every=1", "data.prefetch=5")
    assert resuming.check_resumable(config, ARCHITECTURE) == []


def test_override_lets_it_change_and_is_remembered(recorded: Path) -> None:
    config = configuration(recorded, "train.seed=12")
    (change,) = resuming.check_resumable(config, ARCHITECTURE, override=True)
    assert (change.key, change.was, change.now) == ("train.seed", 11, 12)
    resuming.write_settings(config, ARCHITECTURE, step=40)
    assert record(recorded)["overridden"] == [{"after_step": 40, "key": "train.seed", "was": 11, "now": 12}]
    assert resuming.check_resumable(config, ARCHITECTURE) == []


def test_what_was_overridden_stays_remembered(recorded: Path) -> None:
    for step, seed in ((20, 12), (40, 13)):
        resuming.write_settings(configuration(recorded, f"train.seed={seed}"), ARCHITECTURE, step=step)
    resuming.write_settings(configuration(recorded, "train.seed=13", "train.steps=90"), ARCHITECTURE, step=60)
    assert [each["now"] for each in record(recorded)["overridden"]] == [12, 13]


def test_architecture_of_changed_files_is_told(recorded: Path) -> None:
    with pytest.raises(UserError, match=naming("model.config", "hidden_size", 48, 32)):
        resuming.check_resumable(configuration(recorded), {**ARCHITECTURE, "hidden_size": 48})


def test_damaged_record_is_one_line(recorded: Path) -> None:
    (recorded / "run" / "config.json").write_text('{"identity": ')
    with pytest.raises(UserError, match=naming("config.json", "run.dir")):
        resuming.check_resumable(configuration(recorded), ARCHITECTURE)


def test_run_without_a_record_has_nothing_to_contradict(tmp_path: Path) -> None:
    assert resuming.check_resumable(configuration(tmp_path), ARCHITECTURE) == []


def test_settings_are_replaced_at_once(recorded: Path) -> None:
    resuming.write_settings(configuration(recorded, "train.steps=80"), ARCHITECTURE)
    assert [each.name for each in (recorded / "run").iterdir()] == ["config.json"]
    assert record(recorded)["config"]["train"]["steps"] == 80
