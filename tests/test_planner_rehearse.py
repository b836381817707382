"""A rehearsal: what it measures is a real run's, what it forecasts is the simulation's, and nothing of it stays."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import cpu_rehearsal
from cpu_recorder import CpuRecorder
from cpu_rehearsal import rehearsed
from parity import Ranks
from planning import Setting
from resting import all_but
from trueshard.cli import main
from trueshard.options import Options
from trueshard.planner.forecasting import Cluster, study_job
from trueshard.planner.hardware import hardware
from trueshard.planner.inputs.workloads import workload_of
from trueshard.planner.simulation.rehearse import Pair, Rehearsal, job_of, rehearse
from trueshard.planner.workload import Job, Workload

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="what is said where there is no GPU")
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(autouse=True)
def as_simulated() -> Iterator[None]:
    """One thread, and ATen's own kernels: what oneDNN takes for itself depends on the processor."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.backends.mkldnn.flags(enabled=False):
        yield
    torch.set_num_threads(threads)


SETTINGS = {
    "replicated parameter, bf16": Setting("perceptron", words={"mixed_precision": "bf16"}),
    "group normalisation, hybrid": Setting("cnn", "sgd", ranks=(2, 2)),
    "uneven shards, recomputed, gathered twice": Setting(
        "llama uneven", ranks=(4,), words={"reshard_after_forward": "always", "activation_checkpointing": "full"}
    ),
    "frozen, accumulated, offload, muon": Setting("frozen", "muon", words={"offload": "cpu"}, accumulation=2),
}


@pytest.mark.parametrize("name", all_but(list(SETTINGS)[-1:], SETTINGS))
def test_what_is_measured_on_a_cpu_is_what_was_simulated_to_the_byte(name: str) -> None:
    allocated, seconds = rehearsed(SETTINGS[name].job(), hardware("cpu"))
    assert allocated.measured == allocated.forecast
    assert min(seconds.measured, seconds.forecast) > 0


class Greedy(nn.Module):
    """Keeps memory that no simulation of another model expects."""

    extra = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("table", torch.arange(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.device == self.table.device
        assert torch.isfinite(self.layer.weight).all()
        more = x.new_ones(1 << 14)[: 1 + self.extra].clone()
        return self.layer(x[:, self.table]) * more[0]


def greedy() -> Workload:
    return workload_of(Greedy, optimizer="sgd", batch=lambda count, _: torch.randn(count, 8), sequence=1)


def test_measured_is_not_copied_from_the_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(greedy(), (2,), on_cpu=True, recorder=CpuRecorder)
    real = cpu_rehearsal.simulate
    monkeypatch.setattr(cpu_rehearsal, "simulate", lambda job: _then(real(job), lambda: setattr(Greedy, "extra", 4095)))
    try:
        allocated, _ = rehearsed(job, hardware("cpu"))
    finally:
        Greedy.extra = 0
    assert allocated.measured - allocated.forecast == 4 * 4095


def _then(value: Any, act: Any) -> Any:
    act()
    return value


def test_the_time_of_a_step_leaves_communication_out() -> None:
    slow = hardware("cpu", link_bandwidth=1e3, network_bandwidth=1e3)
    job = Job(greedy(), (2,), on_cpu=True)
    _, seconds = rehearsed(job, slow)
    assert seconds.forecast < study_job(job, Cluster(slow, 2, 2)).forecast.step_seconds / 2


def beside_a_group(rank: int, world_size: int) -> None:
    group, state = dist.group.WORLD, torch.get_rng_state()
    rehearsed(Job(greedy(), (2, 2), on_cpu=True), hardware("cpu"))
    assert dist.group.WORLD is group
    assert dist.get_world_size() == 1
    dist.all_reduce(torch.ones(1))
    assert torch.equal(torch.get_rng_state(), state)


def test_the_process_is_as_it_was(alone: Ranks) -> None:
    alone.run(beside_a_group)


def test_the_plan_of_a_study_is_rehearsed() -> None:
    choices = Options(reshard_after_forward="never")
    job = Job(greedy(), (4,), microbatch=3, accumulation=2, choices=choices, recorder=CpuRecorder)
    found = study_job(job, Cluster(hardware("cpu"), 4, 4))
    again = job_of(found, job.workload)
    assert (again.ranks, again.microbatch, again.accumulation, again.plan) == ((4,), 3, 2, found.plan)
    allocated, _ = rehearsed(dataclasses.replace(again, recorder=CpuRecorder), hardware("cpu"))
    assert allocated.forecast == allocated.measured == found.forecast.peak_live_bytes


def test_the_table() -> None:
    found = Rehearsal("8b", 64, "H200", "h100", 3, Pair(100 << 20, 80 << 20), Pair(99 << 30, 100 << 30), Pair(0.5, 1.0))
    lines = str(found).splitlines()
    assert lines[0] == "8b: rank 0 of 64, 3 steps on H200"
    assert [line.split()[-1] for line in lines[3:]] == ["+25.0%", "-1.0%", "-50.0%"]
    for line, word in ((1, "forecast (h100)"), (4, "100.0 GiB"), (5, "500 ms")):
        assert word in lines[line]


@NO_GPU
def test_without_a_gpu_nothing_is_rehearsed() -> None:
    with pytest.raises(ValueError, match="CUDA GPU"):
        rehearse(Job(greedy(), (2,)), hardware("cpu"))


@NO_GPU
def test_without_a_gpu_the_command_says_so_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "rehearse", "no-such-model"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert "CUDA GPU" in said.err


@GPU
def test_on_a_gpu_what_is_reserved_is_as_forecast(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16}
    whole = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, **settings}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    words = ["--ranks", "8", "--sequence", "2048", "--microbatch", "2", "--param-dtype", "bf16", "--json"]
    words += ["--reshard-after-forward", "default", "--activation-checkpointing", "none"]
    assert main(["plan", "rehearse", str(tmp_path), *words]) == 0
    told = json.loads(capsys.readouterr().out)["rehearsal"]
    for what in ("allocated", "reserved"):
        assert told[what]["forecast"] == pytest.approx(told[what]["measured"], rel=0.03)
