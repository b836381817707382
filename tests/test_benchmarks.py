"""The benchmarks run, show every peer, and what they reckon is right; not how fast anything is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import forks
from benchmarks import cuda, goes_wrong, page
from benchmarks.__main__ import NAMES
from benchmarks.goes_wrong_systems import SYSTEMS
from benchmarks.llama import Shape
from benchmarks.paired import Ratio, rounds
from benchmarks.peers import OURS, WAYS
from benchmarks.peers.recipe import Recipe
from benchmarks.peers_limits import limits
from benchmarks.processes import Unfinished, on_ranks, on_ranks_within
from benchmarks.table import Over, Table
from messages import lacking

ROOT = Path(__file__).parents[1]
TINY = Shape(layers=2, hidden=32, intermediate=48, heads=2, vocabulary=64, sequences=1, tokens=8)
PEERS = [way for way in WAYS if way != OURS]


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return forks.run(
        [sys.executable, "-m", "benchmarks", *words], cwd=ROOT, capture_output=True, text=True, timeout=280
    )


def quick(tmp_path: Path, *names: str) -> dict[str, dict[str, Any]]:
    """Their tables, by name."""
    ran = command(*names, "--quick", "--json", str(tmp_path / "found.json"))
    assert ran.returncode == 0, ran.stderr
    found = json.loads((tmp_path / "found.json").read_text())["benchmarks"]
    return {table["name"]: table for table in found}


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return quick(tmp_path_factory.mktemp("step"), "peers_step")["peers_step"]


@pytest.mark.rest
def test_every_peer_is_in_the_table_of_steps(step: dict[str, Any]) -> None:
    assert {row[2] for row in step["rows"]} == set(PEERS)


@pytest.mark.rest
def test_the_hand_written_loop_and_the_peers_of_fsdp2_train_the_same(step: dict[str, Any]) -> None:
    (found, _) = step["numbers"][0]["ranks"]
    assert {way for way, apart in found["apart"].items() if apart < 1e-5} == set(WAYS) - {"Fabric, FSDP1"}


@pytest.mark.rest
def test_a_peer_that_refuses_has_its_own_error_in_its_cell(step: dict[str, Any]) -> None:
    (row,) = [row for row in step["rows"] if row[2] == "Fabric, FSDP1"]
    assert row[3].startswith("ValueError: ")
    assert lacking(row[3], "FSDP", "GPU") == []
    assert {"figure": "step, 0.4M", "peer": "Fabric, FSDP1", "cell": "cannot"} in step["over"]


@pytest.mark.rest
@pytest.mark.parametrize(
    "name",
    [
        name
        for name in NAMES
        if name not in ("goes_wrong", "peers_step", "peers_limits", "compiled", "rl", "lost_process")
    ],
)
def test_each_benchmark_runs(name: str, tmp_path: Path) -> None:
    table = quick(tmp_path, name)[name]
    assert table["rows"]
    assert {len(row) for row in table["rows"]} == {len(table["columns"])}


@pytest.mark.rest
def test_bytes_and_memory_are_told_of_every_peer(tmp_path: Path) -> None:
    rows = quick(tmp_path, "peers_limits")["peers_limits"]["rows"]
    assert [row[1] for row in rows] == list(WAYS)
    over = {row[1]: float(row[3]) for row in rows if row[2]}
    assert over[OURS] == 1.0 < over["by hand"]


@pytest.mark.rest
def test_reinforcement_learning_is_held_against_trl_and_against_other_ways_to_generate(tmp_path: Path) -> None:
    table = quick(tmp_path, "rl")["rl"]
    steps = {row[3]: row for row in table["rows"] if row[0] == "step, s"}
    assert set(steps) == {"TRL, DDP", "TRL, FSDP2", "copy = kept", "copy = sharded"}
    assert all(float(row[4]) > 0 for row in steps.values()), "none failed"
    assert {each["peer"] for each in table["over"]} == {"TRL, DDP", "TRL, FSDP2"}


@pytest.mark.rest
def test_runs_go_on_after_a_lost_process_and_those_from_memory_take_one_step_twice_at_most(
    tmp_path: Path,
) -> None:
    table = quick(tmp_path, "lost_process")["lost_process"]
    samples = {each["way"]: each["samples"][0] for each in table["numbers"]}
    assert {way: each["failed"] for way, each in samples.items() if each["failed"]} == {}
    assert len(table["rows"]) == 4
    own = [each for way, each in samples.items() if way.startswith("TrueShard")]
    assert len(own) == 2
    assert all(each["twice"] <= 1 for each in own)
    assert all("first step" in each["parts"] for each in own[:1])


@pytest.mark.rest
def test_what_goes_wrong_is_tried_under_every_system(tmp_path: Path) -> None:
    table = quick(tmp_path, "goes_wrong")["goes_wrong"]
    ((_, _, *cells),) = table["rows"]
    assert len(cells) == len(SYSTEMS)
    assert cells[0] == "same"


@pytest.mark.rest
def test_a_process_that_hangs_is_killed_and_one_that_crashes_is_told() -> None:
    on_ranks(os.getpid, 1)  # what forks them has begun: that is not in the limit
    kinds = on_ranks_within(8.0, timedelta(minutes=5), hang_crash_or_return, 3)
    assert kinds == [Unfinished(True, -9), Unfinished(False, 7), "returned"]


def hang_crash_or_return() -> str:
    if dist.get_rank() == 0:
        time.sleep(300)
    if dist.get_rank() == 1:
        os._exit(7)
    return "returned"


def cell(*ranks: goes_wrong.Found | Unfinished) -> str:
    right = {"parameters": {"w": torch.tensor([3.0, 4.0])}, "tied": True}
    limits = {"parameters": 0.01, "tied": 0.0}
    return goes_wrong.told(list(ranks), "waits for rank 1", right, limits, 20.0).words


def trained(value: float, *, tied: bool = True) -> goes_wrong.Found:
    return goes_wrong.Found({"parameters": {"w": torch.tensor([3.0, value])}, "tied": tied})


def test_a_cell_tells_by_how_much_the_worst_rank_differs_from_one_process() -> None:
    assert cell(trained(4.0), trained(4.04)) == "same"
    assert cell(trained(4.0), trained(5.0)) == "differs by 20%"
    assert cell(trained(4.0), trained(4.0, tied=False)) == "differs: tied"
    assert cell(trained(4.0), trained(float("nan"))) == "differs: parameters"
    assert cell(goes_wrong.Found({}), trained(4.0)) == "differs: parameters, tied"


def test_a_cell_tells_the_first_error_and_a_crash_before_the_errors_that_follow_it() -> None:
    lost = goes_wrong.Found(phase="training", error="RuntimeError: lost a peer", at=2.0)
    cause = goes_wrong.Found(phase="loading", error="KeyError: w", at=1.0)
    assert cell(lost, cause) == "error in loading: KeyError: w; logs: waits for rank 1"
    assert cell(lost, Unfinished(False, -6)) == "crash: SIGABRT"
    assert cell(Unfinished(True, -9), cause) == "error in loading: KeyError: w; logs: waits for rank 1"
    assert cell(Unfinished(True, -9), trained(4.0)) == "hangs (20 s); logs: waits for rank 1"


def test_a_thread_is_a_link_on_the_page() -> None:
    rows = (("a case", "owner/some.repository#12"),)
    text = Table("n", "T", "A note.", ("case", "reported in"), rows, [{}], words=True).markdown()
    assert "| [owner/some.repository#12](https://github.com/owner/some.repository/issues/12) |" in text
    assert "|---|---|" in text


def test_limits_are_those_of_the_formulas(tmp_path: Path) -> None:
    found = limits(Recipe(TINY, tmp_path), 2)
    block = 4 * 32 * 32 + 3 * 32 * 48 + 2 * 32
    embedding, tail = 64 * 32, 64 * 32 + 32
    everything = 2 * block + embedding + tail
    assert found.received == 0.5 * 4 * (everything + (everything - embedding) + everything)
    assert found.peak == 4 * 4 * everything / 2 + 4 * block


def test_ways_take_turns_forwards_and_backwards() -> None:
    called: list[int] = []

    def one(way: int) -> torch.Tensor:
        called.append(way)
        return torch.tensor([float(way)])

    assert rounds(one, 3, warm_up=1, samples=2).tolist() == [[[0.0], [2.0], [4.0]]] * 2
    assert called == [0, 1, 2] + [0, 1, 2, 2, 1, 0] * 2


def test_a_ratio_says_its_interval_and_its_spread() -> None:
    found = Ratio.of(torch.arange(1.0, 102.0))
    assert (found.median, found.tenth, found.ninetieth) == (51.0, 11.0, 91.0)
    assert 35 < found.low < 51 < found.high < 67


def test_cuda_without_a_gpu_is_one_line() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    ran = command("--device", "cuda")
    assert ran.returncode == 2
    assert lacking(ran.stderr.splitlines()[-1], "--device cuda", "leave it out") == []


@pytest.mark.rest
def test_what_runs_on_a_gpu_trains_the_same_in_all_ways() -> None:
    losses = {}
    for way in cuda.WAYS:
        (found,) = on_ranks(cuda.measure, 1, cuda.Case(way, TINY, device="cpu"), 1, 2)
        assert not found.failed
        assert found.tokens == pytest.approx(TINY.sequences * TINY.tokens / found.seconds)
        losses[way] = found.loss
    assert losses[OURS] == losses[cuda.BY_HAND] == pytest.approx(losses[cuda.LOOP], abs=2e-2)


@pytest.mark.rest
@pytest.mark.compiles
def test_what_runs_on_a_gpu_compiles() -> None:
    case = cuda.Case(OURS, replace(TINY, layers=1), compile=True, device="cpu")
    (found,) = on_ranks(cuda.measure, 1, case, 1, 1)
    assert not found.failed


def table(name: str, *over: Over) -> Table:
    return Table(name, f"Of {name}", "A note.", ("what", "figure"), (("a", "1"),), [{}], over)


def test_the_page_opens_with_ratios_over_each_peer() -> None:
    tables = [
        table("first", Over("step", "A", "0.90 (0.80 to 1.00)"), Over("step", "B", "cannot")),
        table("second", Over("bytes", "B", "1.00"), Over("bytes", "C", "cannot")),
    ]
    text = page.page("here", ("first", "second"), tables, page.Kept())
    assert "| figure | A | B | benchmark |" in text
    assert "| step | 0.90 (0.80 to 1.00) | cannot | first |" in text
    assert "| bytes |  | 1.00 | second |" in text
    assert text.index("| bytes |") < text.index("## Of first") < text.index("python -m benchmarks second")


def test_a_benchmark_that_is_run_anew_replaces_its_own_figures_alone(tmp_path: Path) -> None:
    names = ("first", "second")
    path = tmp_path / "page.md"
    tables = [table("first", Over("step", "A", "0.90")), table("second", Over("bytes", "B", "1.00"))]
    path.write_text(page.page("here", names, tables, page.Kept()))
    text = page.page("here", names, [table("second", Over("bytes", "B", "0.50"))], page.kept(path, "here"))
    assert text == path.read_text().replace("1.00", "0.50")


def test_a_page_of_another_machine_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(page.page("here", ("first",), [table("first")], page.Kept()))
    with pytest.raises(ValueError, match="another machine"):
        page.kept(path, "there")


def test_a_changed_recipe_is_another_training(tmp_path: Path) -> None:
    recipe = Recipe(TINY, tmp_path)
    adapted = replace(recipe, lora=True).build()
    assert any("lora_A" in name for name, _ in adapted.named_parameters())
    assert all(("lora_" in name) == each.requires_grad for name, each in adapted.named_parameters())
