"""``trueshard plan`` as a user types it: the fixed command line, the files it writes, and wrong input."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import trueshard
from messages import lacking
from resting import all_but
from trueshard.cli import main
from trueshard.launching import python_command
from trueshard.train.shard_section import ShardSection

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 256,
}
FACTORY = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

def make():
    return nn.Sequential(nn.Linear(16, 64), Block(), Block(), nn.Linear(64, 8))

def data():
    torch.load("tokens.pt")
    return make()

def gpu():
    return make().cuda()
"""
FIXED = [
    *("--hardware", "h100-96gb", "--ranks", "8", "--ranks-per-node", "8", "--sequence", "128", "--microbatch", "2"),
    *("--param-dtype", "bf16", "--reduce-dtype", "fp32", "--optimizer", "adamw"),
    *("--reshard-after-forward", "default", "--activation-checkpointing", "selective"),
]
"""The words that outside programs call it with."""

FEW = ["--hardware", "cpu", "--ranks", "2", "--reshard-after-forward", "always", "--activation-checkpointing", "none"]

KEYS = {
    "fits",
    "peak_live_bytes",
    "peak_reserved_bytes",
    "bytes_received_per_step",
    "step_seconds",
    "tokens_per_second_per_rank",
    "mfu",
    "units",
}
UNIT_KEYS = {"name", "parameters", "reshard_after_forward", "activation_checkpointing"}

Said = Callable[..., str]


def without_progress(err: str) -> str:
    """What is on stderr but the lines that say what is done, of a command that takes its time."""
    return "".join(line for line in err.splitlines(keepends=True) if not line.endswith(" …\n"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the command runs: a configuration and a file of functions."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "mine.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def said(folder: Path, capsys: pytest.CaptureFixture[str]) -> Said:
    """What the command prints, nothing but progress on stderr."""

    def run(*arguments: str) -> str:
        code = main(["plan", *arguments])
        out, err = capsys.readouterr()
        assert (code, without_progress(err)) == (0, "")
        return str(out)

    return run


@pytest.fixture
def refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> Said:
    """The line that the command refuses wrong input with; it leaves the folder as it was."""

    def run(*arguments: str) -> str:
        before = sorted(path for path in folder.rglob("*") if "__pycache__" not in path.parts)
        code = main(["plan", *arguments])
        out, err = capsys.readouterr()
        assert (code, out) == (2, "")
        err = without_progress(err)
        assert err.count("\n") == 1
        assert sorted(path for path in folder.rglob("*") if "__pycache__" not in path.parts) == before
        return str(err)

    return run


def test_the_fixed_command_line(said: Said) -> None:
    found: dict[str, Any] = json.loads(said("tiny", *FIXED, "--json"))
    assert found.keys() >= KEYS
    assert all(unit.keys() >= UNIT_KEYS for unit in found["units"])
    assert [unit["name"] for unit in found["units"]] == ["", "model.layers.0", "model.layers.1", "model.layers.2"]
    assert [unit["reshard_after_forward"] for unit in found["units"]] == [False, True, True, False]
    assert [unit["activation_checkpointing"] for unit in found["units"]] == ["none"] + ["selective"] * 3
    assert found["fits"] is True
    assert 0 < found["peak_live_bytes"] <= found["peak_reserved_bytes"]
    assert found["tokens_per_second_per_rank"] == pytest.approx(2 * 128 / found["step_seconds"])
    assert 0 < found["mfu"] < 1
    parameters = sum(unit["parameters"] for unit in found["units"])
    # bf16: gathered whole in forward, all but what is kept again in backward; fp32: reduced once.
    kept = sum(unit["parameters"] for unit in found["units"] if not unit["reshard_after_forward"])
    expected = 7 / 8 * (2 * (2 * parameters - kept) + 4 * parameters)
    assert found["bytes_received_per_step"] == pytest.approx(expected, rel=0.001)


@pytest.mark.rest
def test_units_that_go_on_from_the_automatic_choice(said: Said) -> None:
    found = json.loads(
        said("tiny", *FIXED, "--units", "...", "--units", "model.layers.1.mlp", "--json", "--out", "plan.json")
    )
    names = ["", *(f"model.layers.{name}" for name in ("0", "1", "1.mlp", "2"))]
    assert [unit["name"] for unit in found["units"]] == names
    assert [unit.name for unit in trueshard.Plan.from_json(Path("plan.json").read_text()).units] == names
    text = 'units = ["...", "model.layers.1.mlp"]'
    assert ShardSection(**tomllib.loads(text)).options().units == ["...", "model.layers.1.mlp"]


@pytest.mark.rest
def test_latest_is_the_newest_checkpoint(said: Said, folder: Path) -> None:
    trueshard.save(folder / "step-00000001", model=nn.Linear(2, 2))
    (folder / "step-00000001" / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 1}))
    assert json.loads(said("latest", *FIXED, "--json"))["model"] == "step-00000001"


@pytest.mark.rest
def test_a_configuration_may_be_named_itself_and_a_budget_too_small_is_no_error(said: Said) -> None:
    found = json.loads(said("tiny/config.json", *FIXED, "--memory", "1MiB", "--json"))
    assert found["fits"] is False
    assert found["budget_bytes"] == 1 << 20


@pytest.mark.rest
def test_a_plan_is_written_read_and_compared(said: Said, folder: Path) -> None:
    text = said("mine.py:make", *FEW, "--out", "a.json", "--html", "a.html")
    assert "mine.py:make on 2 × cpu" in text
    assert "<html" in (folder / "a.html").read_text()
    plan = trueshard.Plan.from_json((folder / "a.json").read_text())
    assert [unit.name for unit in plan.units] == ["", "1", "2"]
    again = json.loads(said("mine.py:make", "--hardware", "cpu", "--ranks", "2", "--plan", "a.json", "--json"))
    assert again["plan"] == json.loads((folder / "a.json").read_text())
    (folder / "b.json").write_text(json.dumps(again))  # what --json printed is read as well
    assert "equal" in said("diff", "a.json", "b.json")
    (folder / "c.json").write_text((folder / "a.json").read_text().replace('"compile": false', '"compile": true'))
    assert said("diff", "a.json", "c.json").startswith("compile: false → true")
    assert sorted(path.name for path in folder.glob("*.*")) == ["a.html", "a.json", "b.json", "c.json", "mine.py"]


@pytest.mark.rest
def test_what_is_left_open_is_chosen(said: Said) -> None:
    text = said("mine.py:make", "--hardware", "cpu", "--ranks", "2", "--sequence", "8")
    assert "\nWhy\n  - Reshard " in text
    assert "  - Recompute " in text
    assert re.search(r"another plan \(.*\) is about [\d.]+% slower", text)


@pytest.mark.rest
@pytest.mark.parametrize(
    ("hardware", "compute"), [pytest.param("h100", "bfloat16", marks=pytest.mark.rest), ("cpu", None)]
)
def test_what_is_left_out_is_said_with_the_option_that_changes_it(
    said: Said, hardware: str, compute: str | None
) -> None:
    words = ["tiny", "--hardware", hardware, "--ranks", "2", *FIXED[-4:]]
    text = said(*words)
    assert ("computes in bfloat16, reduces in float32" in text) == (compute == "bfloat16")
    assumed = text.partition("Taken for granted")[2].partition("Units\nunit")[0]
    for option in ("param-dtype", "storage-dtype", "optimizer", "sequence", "microbatch"):
        assert f"(--{option})" in assumed
    assert "Values that depend on data" not in assumed  # what clipping reads is not the model's
    small = ("--sequence", "64", "--microbatch", "1", "--json")
    assert (json.loads(said(*words, *small))["plan"]["mixed_precision"] or {}).get("compute") == compute
    given = ["--param-dtype", "fp32", "--sequence", "64", "--optimizer", "sgd", "--storage-dtype", "bf16"]
    told = said(*words, *given, "--microbatch", "1")
    assert "(--" not in told


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("tiny --hardware h10", ("'h10'", "'h100'")),
        ("tiny --ranks 12 --ranks-per-node 8", ("ranks=12", "nodes of 8")),
        ("tiny --ranks 8 --replicate 3", ("ranks=8", "3 replicas")),
        ("tiny --ranks-per-node 0", ("'--ranks-per-node'",)),
        ("tiny --sequence 0", ("'--sequence'",)),
        ("tiny --ranks 8 --global-batch 12", (12, "multiple of 8")),
        ("tiny --memory lots", ("memory='lots'", "70GiB")),
        ("tiny --memory 70", ("memory='70' is 70 bytes", "70GiB")),
        pytest.param("tiny --memory 500GiB", ("84,005,000,000", "h100"), marks=pytest.mark.rest),
        pytest.param("tiny --memory 1KiB", ("1.0 KiB", "one unit", "tiny"), marks=pytest.mark.rest),
        ("tiny --reshard-after-forward alway", ("'alway'", "'always'")),
        ("tiny --activation-checkpointing ful", ("'ful'", "'full'")),
        pytest.param("tiny --offload disk", ("offload='disk'",), marks=pytest.mark.rest),
        ("tiny --optimizer adamx", ("'adamx'", "'adamax'")),
        ("tiny --param-dtype bf17", ("'bf17'", "'bf16'")),
        ("tiny --storage-dtype bf17", ("'bf17'", "'bf16'")),
        ("tiny --units Foo", ("'Foo'",)),
        ("tinyy", ("tinyy", "'tiny'")),
        ("mine.py", ("mine.py", "function")),
        ("mine.py:mak", ("mine.py", "'mak'", "'make'")),
        ("mine.py:data", ("torch.load('tokens.pt')",)),
        ("mine.py:gpu", (".cuda()", "GPU")),
        ("", ("MODEL",)),
        ("tiny --plan mine.py", ("mine.py", "JSON")),
        ("tiny --plan none.json", ("none.json",)),
        ("mine.py:make --out nowhere/a.json", ("no folder", "nowhere")),
        ("mine.py:make --html nowhere/a.html --out a.json", ("no folder", "nowhere")),
        ("mine.py:make --html tiny", ("tiny", "is a folder")),
        ("tiny --sliders", ("--html",)),
    ],
)
def test_wrong_input_is_one_line(refused: Said, words: str, parts: tuple[object, ...]) -> None:
    assert lacking(refused(*words.split()), *parts) == []


def test_an_unknown_architecture_has_near_matches(refused: Said, folder: Path) -> None:
    (folder / "tiny" / "config.json").write_text(json.dumps(CONFIG | {"model_type": "lama"}))
    assert lacking(refused("tiny"), "lama", "'llama'") == []


def test_a_plan_holds_every_choice(refused: Said, folder: Path) -> None:
    (folder / "a.json").write_text(trueshard.Plan().to_json())
    assert "reshard_after_forward" in refused("tiny", "--plan", "a.json", "--reshard-after-forward", "never")


@pytest.mark.rest
def test_sliders_have_a_forecast_for_each_position(said: Said, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trueshard.planner import choose_plan

    def sizes(ranks: int, sequence: int, microbatch: int) -> list[str]:
        return ["--ranks", str(ranks), "--sequence", str(sequence), "--microbatch", str(microbatch)]

    monkeypatch.setattr(choose_plan, "FACTORS", (1, 2))
    said("tiny", *FEW, *sizes(2, 32, 1), "--html", "plan.html", "--sliders")
    data = re.search(r'id="data">(.*?)</script>', (folder / "plan.html").read_text(), re.DOTALL)
    assert data
    shown = json.loads(data[1])["grid"]
    values = {axis["name"]: axis["values"] for axis in shown["axes"]}
    assert values == {"ranks": [2, 4], "sequence": [32, 64], "microbatch": [1, 2]}
    assert shown["start"] == [0, 0, 0]
    for number, point in ((0, (2, 32, 1)), (3, (2, 64, 2)), (4, (4, 32, 1))):
        alone = json.loads(said("tiny", *FEW, *sizes(*point), "--json"))
        assert alone["peak_live_bytes"] == shown["points"][number]["peak_live_bytes"]


def test_a_model_named_like_a_command_is_not_mistaken_for_it(refused: Said, folder: Path) -> None:
    assert lacking(refused("diff", "a.json", "b.json"), "a.json", "no plan") == []
    (folder / "tiny").rename(folder / "diff")
    assert lacking(refused("diff", "a.json", "b.json"), "plan diff", "folder", "./diff") == []
    assert lacking(refused("./diff", "--memory", "lots"), "memory='lots'") == []


@pytest.mark.parametrize(
    "arguments",
    all_but(
        [("tiny", "--sequence", "64")],
        [("tiny", "--sequence", "64"), ("titan.toml", "--for", "torchtitan"), ("train.toml",)],
    ),
    ids=lambda arguments: arguments[0],
)
def test_progress_is_on_stderr_within_two_seconds_where_that_is_no_terminal(
    arguments: tuple[str, ...], folder: Path
) -> None:
    (folder / "titan.toml").write_text('[model]\nname = "llama3"\nflavor = "8B"\n')
    (folder / "train.toml").write_text('[run]\ndir = "run"\n[model]\nconfig = "tiny"\n')
    command = python_command("from trueshard.cli import main; main()", "plan", *arguments)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        process.kill()
    assert line == "Starting the planner …\n"
    # Of its own processor time (user and system): others may have the processor meanwhile.
    assert (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") < 2
