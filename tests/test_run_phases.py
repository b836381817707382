"""What is planned of evaluating and saving, held against real ones; and what is said of them."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import trueshard
from meter import gloo_lets_go, meter, peak_and_rest
from parity import Ranks
from planning import Setting, sizes
from trueshard.cli import main
from trueshard.options import Options
from trueshard.planner.simulation.simulate import Simulation, run_step
from trueshard.planner.workload import Workload
from trueshard.sharding import engine
from trueshard.train.parse import load_config
from trueshard.train.run.forecast import evaluation_pass, plan

SFT = Path("examples/sft.toml")


@dataclasses.dataclass(frozen=True)
class Evaluated(Setting):
    """A training with evaluations."""

    def workload(self) -> Workload:
        found = super().workload()
        return dataclasses.replace(found, score=evaluation_pass(found.loss))


def measured(rank: int, world: int, setting: Evaluated, folder: str) -> list[tuple[int, int]]:
    """Peak and rest of an evaluation, and of the beginning of a save, after two steps."""
    warnings.simplefilter("ignore")
    setting.workload().model()
    savings: list[Any] = []

    def phases() -> Iterator[Callable[[], object]]:
        torch.manual_seed(0)
        workload = setting.workload()
        assert workload.score is not None
        mesh = init_device_mesh("cpu", setting.ranks, mesh_dim_names=("shard",))
        model = workload.model()
        optimizers = list(workload.optimizers(model))
        engine.shard(model, optimizers, Options(**setting.words), mesh)

        def batch() -> Any:
            return workload.batch(setting.microbatch, workload.sequence)

        def evaluate() -> None:
            with torch.no_grad():
                workload.score(model, batch())  # type: ignore[misc]

        def save() -> None:
            savings.append(trueshard.save(folder, model=model, optimizer=optimizers[0], wait=False))

        for _ in range(2):
            yield lambda: run_step(workload, model, optimizers, [batch()])
        yield evaluate
        yield save
        savings[0].wait()

    with gloo_lets_go(), torch.backends.mkldnn.flags(enabled=False):
        found = meter(phases())
    return [peak_and_rest([change.bytes for change in step]) for step in found.steps[2:]]


def staged(found: Simulation) -> int:
    return sum(each.bytes for each in found.steady.resident if each.kind in ("parameters", "optimizer"))


@pytest.mark.rest
@pytest.mark.parametrize(
    "setting", [Evaluated("llama large head"), Evaluated("gpt2", words={"mixed_precision": "bf16"})]
)
def test_evaluation_and_saving_take_the_bytes_that_were_planned(
    setting: Evaluated, ranks2: Ranks, tmp_path: Path
) -> None:
    found = setting.simulated()
    assert found.score is not None
    (evaluation, save), _ = ranks2.run(measured, setting, str(tmp_path / "checkpoint"))
    assert evaluation == peak_and_rest(sizes(found.score))
    planned = staged(found)
    # Besides the copies: the generator's state, and what ranks tell each other; without rotary tables.
    assert planned - 2048 <= save[0] <= planned + (48 << 10)


def told_of(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["plan", str(SFT), "--ranks", "2", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.rest
def test_a_training_configuration_has_evaluation_and_saving(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--set", "evaluation.every=5", "--set", "evaluation.samples=64", "--set", "train.checkpoint_every=7")
    told = told_of(capsys, "--hardware", "h100", *words)
    step, evaluation, saving = told["phases"]
    assert [each["name"] for each in told["phases"]] == ["step", "evaluation", "saving"]
    assert (step["live_bytes"], step["seconds"]) == (told["peak_live_bytes"], told["step_seconds"])
    stays = step["live_bytes"] - step["needs"]["step"]
    assert stays < evaluation["live_bytes"] == stays + evaluation["needs"]["pass"] < step["live_bytes"]
    assert saving["live_bytes"] == stays
    assert (evaluation["every"], saving["every"]) == (5, 7)
    assert min(each["seconds"] for each in told["phases"]) > 0
    assert any("Of the phases, step needs the most memory" in each for each in told["reasons"])


@pytest.mark.rest
@pytest.mark.parametrize(
    ("overrides", "batches"),
    [
        ((), (4, 2)),
        pytest.param(("train.microbatch=2", "train.accumulate=1"), (2, 4), marks=pytest.mark.rest),
    ],
)
def test_ranks_that_share_matrices_have_the_samples_of_one(
    overrides: tuple[str, ...], batches: tuple[int, int]
) -> None:
    study = plan(load_config(Path("examples/tensor.toml"), overrides), "h100", 4)
    assert (study.forecast.microbatch, study.forecast.accumulation) == batches
    _, evaluation, _ = study.phases
    assert evaluation.notes[0] == f"{32 // 2 // batches[0]} × {batches[0]}"


@pytest.mark.rest
def test_on_a_cpu_the_copies_of_a_save_lie_beside_the_next_step(capsys: pytest.CaptureFixture[str]) -> None:
    told = told_of(capsys, "--hardware", "cpu")
    step, saving = told["phases"][0], told["phases"][-1]
    assert saving["name"] == "saving"
    assert saving["live_bytes"] == step["live_bytes"] + saving["needs"]["copies"]
    assert any("Of the phases, saving needs the most memory" in each for each in told["reasons"])
