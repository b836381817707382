"""Stages of a pipeline in a forecast: schedules as numbers against real ones, and a stage's memory against both."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

import trueshard
from parity import Ranks
from planning import Setting
from resting import all_but
from test_planner_axes import llama
from traffic import Traffic
from trueshard import _torch
from trueshard.model.names import Index
from trueshard.options import Options
from trueshard.planner.forecasting import Cluster, peak_of
from trueshard.planner.hardware import hardware
from trueshard.planner.pipelining import Passed, Stage, stage_workload
from trueshard.planner.schedules import Pipeline
from trueshard.planner.simulation.simulate import Simulator, simulate
from trueshard.planner.workload import Job
from trueshard.plans import Plan
from trueshard.sharding import engine

STAGES, WIDTH, ROWS = 2, 6, 3
REAL = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}
CASES = {
    "gpipe": (Pipeline(STAGES, "gpipe"), 4),
    "1f1b": (Pipeline(STAGES, "1f1b"), 4),
    "1f1b, few": (Pipeline(STAGES, "1f1b"), 2),
    "interleaved": (Pipeline(STAGES, "interleaved", 2), 4),
    "interleaved, few": (Pipeline(STAGES, "interleaved", 2), 2),
}


class Counted(PipelineStage):
    """Tells ``held`` how many chunks of this rank are forward and not yet backward, and its maximum.

    At each backward, ``seen`` gets that number and how many chunks have gradients that are not reduced.
    """

    held: list[int]
    seen: list[tuple[int, int]]
    beside: list[Counted]
    every: int
    done: int = 0

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        self.held[0] += 1
        self.held[1] = max(self.held)
        return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        begun = sum(0 < each.done < each.every for each in self.beside if each is not self)
        self.seen.append((self.held[0], begun + 1))
        self.held[0] -= 1
        self.done += 1
        return super().backward_one_chunk(*args, **kwargs)


def real(rank: int, world_size: int, name: str) -> tuple[int, int, float, list[tuple[int, int]], int]:
    """This rank's stage, the largest number of chunks in flight, and the bytes it received from other stages; and what
    it held at each backward, and the outputs that it keeps.
    """
    pipe, microbatches = CASES[name]
    mesh = torch.distributed.init_device_mesh("cpu", (STAGES, world_size // STAGES), mesh_dim_names=("stage", "shard"))
    number, stages = mesh["stage"].get_local_rank(), []
    held, seen = [0, 0], []
    for chunk in range(pipe.virtual):
        block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        trueshard.shard(block, plan=trueshard.Plan(pipeline=True), mesh=mesh["shard"])
        at = chunk * STAGES + number
        stage = Counted(block, at, STAGES * pipe.virtual, torch.device("cpu"), group=mesh["stage"].get_group())
        stage.held, stage.seen, stage.beside, stage.every = held, seen, stages, microbatches
        stages.append(stage)
    given: Any = stages if pipe.virtual > 1 else stages[0]
    schedule = REAL[pipe.schedule](given, microbatches, loss_fn=nn.functional.mse_loss)
    x = torch.randn(ROWS * microbatches, WIDTH)
    for _ in range(2):  # in the first step, stages tell each other shapes
        held[:] = [0, 0]
        seen.clear()
        for stage in stages:
            stage.done = 0
        with Traffic() as counted:
            schedule.step(*((x,) if number == 0 else ()), target=x if number == STAGES - 1 else None)
    kept = sum(len(stage.output_chunks) for stage in stages)
    return number, held[1], counted.received["receive"], seen, kept


@pytest.mark.parametrize("name", all_but(["1f1b", "interleaved", "interleaved, few"], CASES))
def test_schedules_run_as_they_are_counted(name: str, ranks4: Ranks) -> None:
    pipe, microbatches = CASES[name]
    for number, held, received, seen, kept in ranks4.run(real, name):
        assert held / pipe.virtual == pipe.in_flight(number, microbatches)
        assert received == pipe.received(number, microbatches) * ROWS * WIDTH * 4
        assert kept == (microbatches if number == STAGES - 1 else 0)  # Pipeline.outputs
        counted = list(pipe.backwards(number, microbatches))
        if pipe.virtual == 1:
            assert counted == [(max(each for each, _ in seen), 1)]
        else:
            assert counted == [(each / pipe.virtual, begun / pipe.virtual) for each, begun in seen]


def test_published_formulas() -> None:
    """Megatron-LM's of warm-up microbatches (2104.04473, section 2.2.2)."""
    assert [Pipeline(4, "1f1b").in_flight(stage, 8) for stage in range(4)] == [4, 3, 2, 1]
    assert Pipeline(4, "gpipe").in_flight(0, 8) == 8
    assert Pipeline(4, "interleaved", 2).in_flight(0, 8) == (2 * 3 + 4 + 1) / 2


@pytest.mark.parametrize(
    ("stages", "blocks", "each"),
    [(2, 4, [2, 2]), (8, 126, [15, *[16] * 6, 15]), (4, 9, [2, 3, 2, 2]), (4, 11, [3, 3, 3, 2]), (2, 5, [3, 2])],
)
def test_stages_in_the_middle_have_what_is_left_over(stages: int, blocks: int, each: list[int]) -> None:
    pipe = Pipeline(stages)
    assert [pipe.blocks(stage, blocks) for stage in range(stages)] == each
    assert pipe.middle(blocks) == sum(more > each[0] for more in each[1:-1])


def jobs(last: bool) -> Job:
    workload = Setting("llama deep, text").workload()
    job = Job(workload, (2,), microbatch=2, choices=Options())
    with _torch.fake_tensors():
        plan = engine.resolve(Index(workload.model()), job.choices, job.ranks)
    own = dataclasses.replace(Plan.of(job.choices), pipeline=True)
    cut = stage_workload(workload, plan, Pipeline(2), int(last), torch.float32)
    return dataclasses.replace(job, workload=cut, plan=own, accumulation=3, in_flight=1)


@pytest.mark.rest
@pytest.mark.parametrize("last", [False, True])
def test_a_microbatch_in_flight_adds_what_its_forward_leaves(last: bool) -> None:
    """Held against the real order of a schedule, in which two microbatches run forward before the first backward."""
    job = jobs(last)
    one, two = simulate(job), simulate(dataclasses.replace(job, in_flight=2))
    cluster = Cluster(hardware("h100"), 4, 4, {"pipeline": 2})
    whole = dataclasses.replace(job, plan=None, in_flight=0)
    stage = Stage.simulated(whole, cluster, int(last), 1, Simulator(job.workload))
    assert peak_of(two).bytes - peak_of(one).bytes == pytest.approx(stage.activations, rel=0.03)
    kept = {unit.name for unit in one.plan.units if unit.kind == "block"}
    assert len(kept) == 4
    with _torch.fake_tensors():
        names = dict(job.workload.model().named_parameters())
    assert ("model.embed_tokens.weight" in names) is not last
    assert ("lm_head.weight" in names) is last


def forecast(**words: Any) -> trueshard.plans.Forecast:
    given = {"ranks": 8, "batch": (1, 64), "pipeline": 2, "accumulation": 8, "activation_checkpointing": "none"}
    found = trueshard.plan(lambda: llama(4), **given | words).forecast
    assert found is not None
    return found


@pytest.mark.rest
def test_a_pipeline_is_forecast_and_its_tokens_count_once() -> None:
    found = forecast(tensor=2)
    assert (found.pipeline, found.schedule, found.virtual) == (2, "1f1b", 1)
    assert found.tokens_per_second_per_rank * found.step_seconds == pytest.approx(8 * 64 / 4)
    assert found.received_by_axis["pipeline"] == found.received_by_collective["send_receive"] == 8 * 64 * 32 * 4
    assert found.exposed_by_axis["pipeline"] >= found.bubble_seconds > 0
    assert sum(found.exposed_by_axis.values()) == pytest.approx(found.exposed_communication_seconds)


@pytest.mark.rest
def test_ranks_of_a_stage_share_sequences() -> None:
    """Also in stages without embeddings."""
    found = forecast(context=2)
    assert found.received_by_axis["context"] > 0
    assert found.tokens_per_second_per_rank * found.step_seconds == pytest.approx(8 * 64 / 4)


def test_a_stage_in_the_middle_has_blocks_alone() -> None:
    workload = Setting("llama deep, text").workload()
    found = []
    with _torch.fake_tensors():
        plan = engine.resolve(Index(workload.model()), Options(), (2,))
        for number in range(3):
            cut = stage_workload(workload, plan, Pipeline(3), number, torch.float32).model()
            found.append({".".join(name.split(".")[:3]) for name, _ in cut.named_parameters()})
    blocks = [sum(name.startswith("model.layers.") for name in each) for each in found]
    assert blocks == [Pipeline(3).blocks(number, sum(blocks)) for number in range(3)]
    assert found[1] == {f"model.layers.{i}" for i in range(blocks[1])}


@pytest.mark.rest
def test_styles_of_the_head_are_left_to_the_stage_that_has_it() -> None:
    names = {"*.q_proj": "colwise", "*.k_proj": "colwise", "*.v_proj": "colwise", "*.o_proj": "rowwise"}
    found = forecast(tensor={"ranks": 2, **names, "*embed_tokens": "embedding_rowwise", "lm_head": "colwise_rep"})
    assert found.received_by_axis["tensor"] > 0


@pytest.mark.rest
def test_more_chunks_wait_less_and_gpipe_holds_more() -> None:
    plain, chunks, gpipe = forecast(), forecast(virtual=2), forecast(schedule="gpipe")
    assert chunks.bubble_seconds == pytest.approx(plain.bubble_seconds / 2)
    assert gpipe.in_flight == 8
    assert gpipe.peak_live_bytes > plain.peak_live_bytes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"schedule": "interleaved"}, "virtual=1"),
        ({"pipeline": 1, "schedule": "gpipe"}, "of a pipeline"),
        ({"schedule": "zero"}, "'zero' is not known"),
        ({"pipeline": 3}, "3 stages"),
        # What is seen when the model is there takes a second each.
        pytest.param({"pipeline": 8}, "4 blocks", marks=pytest.mark.rest),
        pytest.param({"virtual": 2, "accumulation": 3}, "accumulation=3", marks=pytest.mark.rest),
        pytest.param({"accumulation": 1}, "accumulation=1", marks=pytest.mark.rest),
        pytest.param({"units": "Linear"}, "units", marks=pytest.mark.rest),
    ],
)
def test_what_no_pipeline_could_run_is_refused_by_name(words: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        forecast(**words)


def test_other_models_are_not_cut() -> None:
    with pytest.raises(ValueError, match="pipeline: Sequential is not a model of transformers"):
        trueshard.plan(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), pipeline=2)


@pytest.mark.rest
def test_the_last_stage_keeps_its_outputs_and_joins_them() -> None:
    """Of all microbatches: once as they were computed, and when a step ends once more, in one block."""
    job = dataclasses.replace(jobs(True), plan=None, in_flight=0)
    cluster = Cluster(hardware("h100"), 4, 4, {"pipeline": 2})
    stage = Stage.simulated(job, cluster, 1, 1, Simulator(job.workload))
    without, with_outputs = (
        stage.forecast(Pipeline(2), cluster, 1 << 40, Passed(64, each), [stage]) for each in (0, 512)
    )
    assert with_outputs.peak_live_bytes - without.peak_live_bytes == job.accumulation * 512
    assert with_outputs.peak_reserved_bytes - without.peak_reserved_bytes == 2 * job.accumulation * 512


@pytest.mark.rest
def test_a_published_row_of_a_pipeline_is_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    published, rows = (
        importlib.import_module(f"benchmarks.{name}") for name in ("planner_published", "published_rows")
    )
    (row,) = (row for row in published.ROWS if row.setting.pipe.virtual > 1)
    tiny = rows.Model("tiny", 4, 64, 4, 128, 128, 4)
    setting = dataclasses.replace(row.setting, model=tiny, ranks=8, sequence=64, tensor=2, pipe=Pipeline(2, parts=2))
    found = published.forecast(dataclasses.replace(row, setting=setting))
    assert 0 < found["bubble_seconds"] < found["step_seconds"]
    assert found["exposed_by_axis"]["pipeline"] > found["bubble_seconds"]
    tokens = setting.microbatch * setting.accumulation * setting.sequence * setting.shard
    assert found["tokens_expected"] == pytest.approx(tokens / found["step_seconds"] / setting.ranks)
    assert found["memory_expected"] == found["reserved_expected"] >= found["live_expected"] > 0
