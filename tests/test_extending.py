"""The files of the page "Extending", each tried as a user would: in a package, in a script, on two ranks."""

from __future__ import annotations

import importlib
import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trueshard
from cases import as_on_one_device, on_ranks
from documents_blocks import blocks
from running import CONFIG, environment
from trueshard.errors import UserError
from trueshard.train import plugins
from trueshard.train.metrics.trackers import TRACKERS, Logging, trackers

PAGE = {block.title: block.text for block in blocks("docs/how-to/extending.md") if block.title}


def site(folder: Path) -> Path:
    """A folder for ``sys.path`` with the page's files, as pip installs a package of them."""
    for name, text in PAGE.items():
        (folder / name).write_text(text)
    info = folder / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    points = re.sub(r'\[project\.entry-points\."(.*)"\]', r"[\1]", PAGE["pyproject.toml"]).replace('"', "")
    (info / "entry_points.txt").write_text(points)
    return folder


def imported(name: str, folder: Path) -> Any:
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))


def test_a_package_adds_words_and_is_imported_when_they_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(site(tmp_path)))
    assert plugins.words("data.format") == ("questions",)
    assert plugins.words("log.to") == ("csv",)
    assert "csv_logger" not in sys.modules
    (tracker,) = trackers(["csv"])
    assert type(tracker).__name__ == "CsvLogger"
    assert "questions" not in sys.modules
    (tmp_path / "questions.py").write_text("import nothing_of_this_name")
    with pytest.raises(UserError, match=r"data\.format: 'questions' .*nothing_of_this_name"):
        plugins.Table("data.format", {})["questions"]
    TRACKERS.pop("csv")


@pytest.mark.rest
def test_a_run_with_a_format_and_loggers_of_a_package(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    rows = [{"question": f"{a} + {b}", "answer": str(a + b)} for a in range(9) for b in range(9)]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    added = '[data]\nformat = "questions"\npath = "sums.jsonl"\n[log]\nto = ["csv", "logging"]\n'
    config = CONFIG.replace('[data]\npath = "text"\n', added).replace("steps = 40", "steps = 3")
    (tmp_path / "train.toml").write_text(config)
    command = [sys.executable, "-m", "trueshard", "train", "train.toml", "--nproc", "2"]
    variables = environment(PYTHONPATH=f"{site(tmp_path / 'site')}:{Path(trueshard.__file__).parents[1]}")

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        # Really started: a fork has read the configuration's words before.
        return subprocess.run([*command, *more], cwd=tmp_path, env=variables, capture_output=True, text=True)

    done = run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert len((tmp_path / "run" / "metrics.csv").read_text().splitlines()) == 3
    wrong = run("--set", "data.format=question")
    assert wrong.returncode == 2
    assert "'questions'" in wrong.stderr


def test_metrics_go_to_handlers_of_logging(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    tracker = Logging()
    tracker.start({}, tmp_path, "trial", 0)
    with caplog.at_level(logging.INFO, "trueshard.metrics"):
        tracker.log(3, {"loss": 0.5})
    (record,) = caplog.records
    assert record.getMessage() == "step 3 loss=0.5"
    assert record.metrics == {"loss": 0.5}  # type: ignore[attr-defined]


@as_on_one_device(ranks=2, rtol=1e-5, atol=1e-6)
def test_a_tensor_plan(rank: int, ranks: int, tmp_path: Path) -> Any:
    file = tmp_path / f"tensor_plan_{rank}{ranks}.py"
    file.write_text(PAGE["tensor_plan.py"])
    mine = imported(file.stem, tmp_path)
    torch.manual_seed(0)
    model = nn.Sequential(mine.Block(), mine.Block())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if ranks > 1:
        trueshard.shard(model, optimizer, tensor={"ranks": 2, **mine.PLAN})
    model(torch.linspace(-1, 1, 24).view(3, 8)).pow(2).mean().backward()
    optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@on_ranks(1)
def test_storage(rank: int, ranks: int, tmp_path: Path) -> None:
    (tmp_path / "vault.py").write_text(PAGE["vault.py"])
    imported("vault", tmp_path)
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    trueshard.save("vault://kept/one", model=model)
    trueshard.load("vault://kept/one", model=other)
    assert torch.equal(model.weight, other.weight)
    assert trueshard.check("vault://kept/one").tensors


@on_ranks(2)
def test_data_a_loss_and_a_callback(rank: int, ranks: int, tmp_path: Path) -> None:
    file = tmp_path / f"own_training_{rank}.py"
    file.write_text(PAGE["own_training.py"])
    mine = imported(file.stem, tmp_path)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    trueshard.shard(model, optimizer)
    stop = mine.StopWhenGood()
    trainer = trueshard.Trainer(model, optimizer, mine.Doubles(8), loss=mine.SummedError(), steps=300, callbacks=[stop])
    trainer.fit()
    assert 5 < trainer.step < 300
    assert stop.best < 0.5


@pytest.mark.rest
@on_ranks(2)
def test_an_adapter_of_peft(rank: int, ranks: int, tmp_path: Path) -> None:
    from peft import PeftModel

    file = tmp_path / f"adapter_{rank}.py"
    file.write_text(PAGE["adapter.py"])
    mine = imported(file.stem, tmp_path)
    model = mine.adapted()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    trueshard.shard(model, optimizer)
    ids = torch.arange(32).view(2, 16)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    trueshard.save(str(tmp_path / "saved"), model=model)
    with trueshard.gathered(model) as whole:
        expected = {name: p for name, p in whole.named_parameters() if "ia3" in name}
        loaded = PeftModel.from_pretrained(mine.adapted().unload(), tmp_path / "saved")
        found = {name: p for name, p in loaded.named_parameters() if "ia3" in name}
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[name], found[name]) for name in expected)
