"""Keeping steps costs what was planned: a snapshot has the bytes of a real one, and they count as host memory."""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import studies
import trueshard
from parity import Ranks
from planning import Setting
from test_planner_exact import simulated
from trueshard.checkpoint.snapshot_parts import ROOT, folder_of
from trueshard.options import Options
from trueshard.planner.failures import failure_cost
from trueshard.planner.hardware import hardware
from trueshard.planner.report.summary import as_json, text
from trueshard.planner.simulation.simulate import run_step
from trueshard.planner.workload import Study
from trueshard.sharding import engine
from trueshard.train.parse import load_config
from trueshard.train.run.forecast import plan

KEPT = {
    "llama tied, muon": Setting("llama tied", "muon"),
    "uneven, bf16, full": Setting("llama uneven", words={"mixed_precision": "bf16"}, rank=1),
    "lora": Setting("lora"),
    "experts": Setting("qwen3 moe", words={"experts": 2}),
    "replicas": Setting("llama", "adamw fused", ranks=(2, 1)),
    "sgd plain": Setting("cnn", "sgd plain"),
}


def kept(rank: int, world_size: int, setting: Setting, folder: str) -> list[int]:
    """Sizes of this rank's files of two snapshots."""
    warnings.simplefilter("ignore")
    os.environ[ROOT] = folder
    workload, sizes = setting.workload(), setting.job().axes
    model = workload.model()
    optimizers = list(workload.optimizers(model))
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    engine.shard(model, optimizers, Options(watch=0, **setting.words), mesh)
    snapshots = trueshard.Snapshots(f"{folder}/run")
    for step in range(2):
        run_step(workload, model, optimizers, [workload.batch(setting.microbatch, workload.sequence)])
        named: Any = {str(number): optimizer for number, optimizer in enumerate(optimizers)}
        snapshots.save(step + 1, model=model, optimizer=named)
    snapshots.wait()
    torch.distributed.barrier()
    files = sorted(folder_of(f"{folder}/run").glob(f"slot-*/rank-{rank:05d}"))
    found = [file.stat().st_size for file in files]
    torch.distributed.barrier()
    snapshots.close()
    return found


@pytest.mark.rest
@pytest.mark.parametrize("name", KEPT)
def test_a_snapshot_takes_the_bytes_that_were_planned(name: str, ranks2: Ranks, tmp_path: Path) -> None:
    setting = KEPT[name]
    planned = simulated(setting).steady.snapshot_bytes
    assert ranks2.run(kept, setting, str(tmp_path))[setting.rank] == [planned, planned]


@pytest.mark.rest
def test_of_blocks_that_are_extended_the_bytes_are_those_of_all() -> None:
    deep = Setting("llama deep")
    assert simulated(deep, whole=False).steady.snapshot_bytes == simulated(deep).steady.snapshot_bytes


def test_nothing_that_torch_warns_of_is_taken_for_granted() -> None:
    """The random generators in a snapshot were read under the fake mode, of which torch warns, once a process."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        made = Setting("llama", words={"activation_checkpointing": "full"}).simulated()
    finally:
        torch.set_warn_always(before)
    assert [each for each in made.warnings if "FakeTensor" in each] == []


# What is said of it

H100 = hardware("h100")


def plan_of(**words: Any) -> trueshard.Plan:
    study = studies.study()
    return dataclasses.replace(study.plan, forecast=dataclasses.replace(study.forecast, **words))


def test_the_interval_that_is_set_is_priced_beside_the_best_and_goodput_is_in_one_line() -> None:
    plan = plan_of(ranks=1024, snapshot_bytes=10 << 30, step_seconds=2.0)
    best, often = failure_cost(plan, H100), failure_cost(plan, H100, 2, 1)
    assert best.stall == (10 << 30) / H100.host_bandwidth
    assert best.every == best.best_every == round(math.sqrt(2 * best.stall * best.between_losses) / 2.0)
    assert all(best.goodput >= failure_cost(plan, H100, 2, every).goodput for every in range(1, 2000))
    assert often.goodput == 1 / (1 + often.stall / 2 + 1 / often.between_losses)
    (line,) = (each for each in often.sentences if each.startswith("Goodput"))
    assert f"train.memory_every = 1 ({best.every} costs least, {best.goodput:.3%}), {often.goodput:.3%} of the" in line


def test_snapshots_for_which_the_host_has_no_room_are_told_with_numbers() -> None:
    budget = {"snapshot_bytes": 10 << 30, "host_budget_bytes": 15 << 30}
    alone = failure_cost(plan_of(**budget), H100)
    assert "2 take 20.0 GiB of host memory, 5.0 GiB more than there is" in alone.sentences[1]
    copied = failure_cost(plan_of(**budget, host_bytes=40 << 30, fits=False), H100, 4, 3)
    assert "4 take 40.0 GiB of host memory, 25.0 GiB more than there is" in copied.sentences[1]
    assert "more than there is" not in failure_cost(plan_of(snapshot_bytes=10 << 30), H100).sentences[1]


@pytest.mark.rest
def test_a_runs_snapshots_count_against_the_hosts_memory_and_make_a_plan_not_fit() -> None:
    more = ("train.batch_size=16", "train.microbatch=1")
    kept = (*more, "train.memory_every=5", "train.memory_copies=1", "run.restarts=2", "run.spares=1")

    def study(host: int, *words: str) -> Study:
        device = dataclasses.replace(H100, host_memory_bytes=host)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("trueshard.planner.hardware.hardware", lambda name: device)
            return plan(load_config(Path("examples/sft.toml"), words), "h100", 16)

    without, with_copies = study(1 << 40, *more).forecast, study(1 << 40, *kept)
    part = with_copies.forecast.snapshot_bytes
    assert part == without.snapshot_bytes > 0
    assert with_copies.forecast.host_bytes == without.host_bytes + 4 * part
    assert with_copies.failures is not None
    assert with_copies.failures.every == 5
    assert as_json(with_copies)["failures"]["state_bytes"] == part
    assert [phase.notes[-1] for phase in with_copies.phases if phase.name == "snapshot"] == ["restarts 2, spares 1"]
    tight = study(4 * part - 1, *kept)
    assert not tight.forecast.fits
    assert tight.forecast.host_lack == 1
    assert "what its host holds does not" in text(tight)
    assert study(4 * part, *kept).forecast.fits
