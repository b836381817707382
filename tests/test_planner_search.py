"""The search: as good as trying everything, and what it says where nothing fits."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import studies
from messages import lacking, naming
from trueshard import _torch
from trueshard.model import policies
from trueshard.model.names import Index
from trueshard.options import GRADIENT_SUMS, Offload, Options
from trueshard.planner.forecasting import Cluster, study_job
from trueshard.planner.hardware import hardware
from trueshard.planner.search.costs import measured, memory_of
from trueshard.planner.search.evaluator import Evaluator
from trueshard.planner.search.search import choose
from trueshard.planner.search.space import RECOMPUTE, Setting, Space
from trueshard.planner.simulation.simulate import Short
from trueshard.planner.workload import Job, NotFaster, NothingFits, Study, Workload
from trueshard.plans import MixedPrecision, Plan
from trueshard.sharding import engine
from trueshard.text import size

AUTO = {"reshard_after_forward": "auto", "activation_checkpointing": "auto", "offload": "auto"}
MIB = 1 << 20
WORDS = 8192
BUDGETS = 4
"""Between the smallest and the largest peak of all plans."""
MOST = 16
"""Plans that are studied to choose one, where hundreds may be chosen."""
TENSOR = {"ranks": 4, "*up": "colwise", "*down": "rowwise"}
OFFLOADS: tuple[Offload, ...] = ("none", "cpu")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Tower(nn.Module):
    """Blocks and a head; without an embedding (``words``) there is one grouping of units only."""

    def __init__(self, blocks: int, words: int = 0, width: int = 1024) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width) if words else nn.Identity()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, words or width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tower(blocks: int, words: int = 0) -> Workload:
    def batch(samples: int, length: int) -> torch.Tensor:
        return torch.randint(0, words, (samples, length)) if words else torch.randn(samples, length, 1024)

    return Workload(
        name="tower",
        model=lambda: Tower(blocks, words),
        optimizers=lambda model: [torch.optim.AdamW(model.parameters(), foreach=True)],
        batch=batch,
        loss=lambda model, x: model(x).float().square().mean(),
        sequence=2048,
        clip=None,
    )


def space(trained: Workload, budget: int | None = None, **more: Any) -> Space:
    """On eight H100, one sample a rank, everything free."""
    given: dict[str, Any] = {
        "hardware": hardware("h100"),
        "ranks": 8,
        "ranks_per_node": 8,
        "budget": budget,
        "choices": Options(**AUTO, mixed_precision="bf16"),
        "replicate": None,
        "microbatch": None,
        "accumulation": None,
        "global_batch": None,
        "optimizer": "adamw",
    }
    return Space(workload=trained, **{**given, **more})


# As good as everything


@dataclasses.dataclass
class Remembered:
    """`study`, which simulates each plan once for all budgets."""

    made: dict[Any, Study] = dataclasses.field(default_factory=dict)

    def study(self, job: Job, cluster: Cluster, budget: int | None = None, simulator: Any = None) -> Study:
        assert job.plan is not None
        key = job.plan.units, job.plan.offload, job.microbatch, job.accumulation
        if key not in self.made:
            self.made[key] = study_job(job, cluster)
        result = self.made[key]
        budget = cluster.available_bytes if budget is None else budget
        fits = result.forecast.peak_reserved_bytes <= budget
        return dataclasses.replace(
            result, forecast=dataclasses.replace(result.forecast, budget_bytes=budget, fits=fits)
        )


def every_plan(request: Space, simulated: Remembered) -> Iterator[tuple[float, int]]:
    """(seconds a token, reserved bytes) of every batch and every free choice for every unit, in every grouping."""
    for words in ("default", "always") if request.choices.reshard_after_forward == "auto" else ("always",):
        given = request.settled(reshard_after_forward=words, activation_checkpointing="none")
        with _torch.fake_tensors():
            plan = engine.resolve(Index(request.workload.model()), given, (8,))
        recompute = RECOMPUTE if request.choices.activation_checkpointing == "auto" else RECOMPUTE[:1]
        choices = [
            [
                dataclasses.replace(unit, reshard_after_forward=freed, activation_checkpointing=again)
                for freed in ((True, False) if request.choices.reshard_after_forward == "auto" else (True,))
                for again in (recompute if unit.kind == "block" else RECOMPUTE[:1])
            ]
            for unit in plan.units
        ]
        batches = [(batch, sums) for batch in request.batches() for sums in sums_of_units(batch, len(plan.units))]
        for ((microbatch, accumulation), sums), units in itertools.product(batches, itertools.product(*choices)):
            added = zip(units, sums, strict=True)
            units = tuple(dataclasses.replace(unit, accumulate_gradients=word) for unit, word in added)
            job = Job(
                request.workload,
                (8,),
                microbatch=microbatch,
                accumulation=accumulation,
                plan=dataclasses.replace(plan, units=units),
            )
            result = simulated.study(job, request.cluster(1)).forecast
            yield 1 / result.tokens_per_second_per_rank, result.peak_reserved_bytes


def sums_of_units(batch: tuple[int, int], units: int) -> list[tuple[str, ...]]:
    """Every way in which gradients of several microbatches may add up, unit by unit."""
    words: tuple[str, ...] = GRADIENT_SUMS if batch[1] > 1 else ("whole",)
    return list(itertools.product(words, repeat=units))


ALWAYS, NONE = {"reshard_after_forward": "always"}, {"activation_checkpointing": "none"}


@pytest.mark.rest
@pytest.mark.parametrize(
    ("trained", "fixed", "global_batch"),
    [
        (tower(1), {}, None),
        (tower(1, WORDS), NONE, None),
        (tower(1), ALWAYS, 16),
        (tower(2), ALWAYS, None),
    ],
    ids=["all choices", "with an embedding", "two microbatches", "several blocks"],
)
def test_the_search_finds_hardly_more_than_the_least_time_of_all_plans(
    trained: Workload, fixed: dict[str, str], global_batch: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices = Options(**{**AUTO, **fixed}, mixed_precision="bf16", units="Block")
    request = space(trained, choices=choices, global_batch=global_batch)
    simulated = Remembered()
    monkeypatch.setattr("trueshard.planner.search.space.study_job", simulated.study)
    everything = list(every_plan(request, simulated))
    peaks = sorted({peak for _, peak in everything})
    assert len(peaks) > 1
    for budget in sorted({peaks[number * (len(peaks) - 1) // BUDGETS] for number in range(BUDGETS)}):
        result = choose(dataclasses.replace(request, budget=budget))
        assert len(result.alternatives) < MOST
        least = min(seconds for seconds, peak in everything if peak <= budget)
        assert result.plan.offload == "none"
        assert result.forecast.peak_reserved_bytes <= budget
        assert 1 / result.forecast.tokens_per_second_per_rank == pytest.approx(least, rel=1e-2)


# Many blocks

DEEP = 4


@pytest.fixture(scope="module")
def deep_space() -> Space:
    """Blocks in a budget between what full recomputation and no recomputation take."""
    request = space(tower(DEEP), replicate=1, microbatch=4)
    evaluator = Evaluator(request)
    setting = Setting(1, 4, 1, "none")
    none, full = (evaluator.evaluate(evaluator.uniform(setting, "always", word)) for word in ("none", "full"))
    budget = (3 * none.peak_reserved_bytes + full.peak_reserved_bytes) // 4
    return dataclasses.replace(request, budget=budget)


@pytest.fixture(scope="module")
def deep(deep_space: Space) -> Study:
    return choose(deep_space)


@pytest.mark.rest
def test_a_faster_plan_that_is_left_out_for_its_work_is_named(deep_space: Space, deep: Study) -> None:
    def left_out(study: Study) -> list[str]:
        return [line for line in study.assumptions if line.startswith("Not studied")]

    soon = choose(deep_space, work=0)
    assert not soon.alternatives
    assert soon.forecast.tokens_per_second_per_rank < deep.forecast.tokens_per_second_per_rank
    assert len(left_out(soon)) == 1
    assert "% faster" in left_out(soon)[0]
    assert not left_out(choose(deep_space, work=math.inf))


@pytest.mark.rest
def test_many_blocks_are_mixed_and_few_plans_worked_out(deep: Study) -> None:
    others = [each.forecast for each in deep.alternatives]
    assert deep.forecast.fits
    assert all(deep.forecast.tokens_per_second_per_rank >= f.tokens_per_second_per_rank for f in others if f.fits)
    kinds = {unit.activation_checkpointing for unit in deep.plan.units if unit.kind == "block"}
    assert len(kinds) > 1
    assert len(deep.alternatives) < 6
    words = [each.words for each in deep.alternatives]
    assert len(set(words)) == len(words)


@pytest.mark.rest
def test_the_first_blocks_are_those_that_are_recomputed(deep: Study) -> None:
    order = {"full": 2, "selective": 1, "none": 0}
    levels = [order[unit.activation_checkpointing] for unit in deep.plan.units if unit.kind == "block"]
    assert levels == sorted(levels, reverse=True)


@pytest.mark.rest
def test_a_chosen_plan_is_taken_as_it_stands_and_its_words_mean_its_units(deep: Study) -> None:
    plan = Plan.from_json(deep.plan.to_json())
    with _torch.fake_tensors():
        taken = engine.resolve(Index(Tower(DEEP)), plan, (8,))
    assert taken.units == deep.plan.units
    assert policies.apply_words(plan, 8).units == deep.plan.units
    edited = dataclasses.replace(plan, reshard_after_forward="never", activation_checkpointing="none")
    with _torch.fake_tensors():
        taken = engine.resolve(Index(Tower(DEEP)), edited, (8,))
    assert {(u.reshard_after_forward, u.activation_checkpointing) for u in taken.units} == {(False, "none")}


@pytest.mark.rest
def test_every_choice_has_its_reason_with_figures(deep: Study) -> None:
    assert len(deep.reasons) == 3  # resharding, recomputation, offload
    assert "lacks" in deep.reasons[1]
    assert "%" in deep.reasons[0]
    assert deep.reasons[2].startswith("Offload none: ")


def test_interrupted_it_is_the_best_so_far() -> None:
    lines: list[str] = []

    def interrupt(line: str) -> None:
        lines.append(line)
        if "the best so far" in line:
            raise KeyboardInterrupt

    result = choose(space(tower(2)), interrupt)
    assert result.assumptions[-1].startswith("Interrupted")
    assert f"{len(result.alternatives) + 1} plan" in result.assumptions[-1]
    assert f"{len(lines)} plan" in lines[-1]
    assert f"{result.forecast.tokens_per_second_per_rank:,.0f} tokens/s" in lines[-1]


def test_interrupted_before_anything_fits_it_stops() -> None:
    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        choose(space(tower(2), 100 * MIB), interrupt)


# What is fixed stays


@pytest.mark.rest
def test_words_that_are_fixed_are_kept_and_only_the_rest_is_chosen() -> None:
    words = {
        "mixed_precision": "bf16",
        "reshard_after_forward": {"*": "always", "blocks.1": "auto"},
        "activation_checkpointing": {"blocks.*": "full", "blocks.0": "auto"},
        "offload": "none",
    }
    result = choose(space(tower(2, WORDS), choices=Options(**words)))
    reshard = {unit.name: unit.reshard_after_forward for unit in result.plan.units}
    assert reshard == {"": True, "embed": True, "blocks.0": True, "blocks.1": False, "head": True}
    assert [unit.activation_checkpointing for unit in result.plan.units if unit.kind == "block"] == ["none", "full"]
    assert result.plan.mixed_precision == MixedPrecision("bfloat16", "float32")
    assert len(result.alternatives) < 6


def test_a_global_batch_is_kept_and_the_largest_microbatch_that_fits_is_best() -> None:
    request = space(tower(2), global_batch=32, choices=Options(mixed_precision="bf16"))
    assert request.batches() == [(4, 1), (2, 2), (1, 4)]
    result = choose(request).forecast
    assert (result.microbatch, result.accumulation) == (4, 1)
    assert dataclasses.replace(request, microbatch=2).batches() == [(2, 2)]
    assert dataclasses.replace(request, global_batch=None).batches() == [(1, 1)]
    for wrong in ({"global_batch": 12}, {"microbatch": 3}, {"accumulation": 3}, {"microbatch": 2, "accumulation": 4}):
        with pytest.raises(ValueError, match=naming("global_batch=", "microbatch", "accumulation", "8 ranks")):
            choose(dataclasses.replace(request, **wrong))


@pytest.mark.rest
def test_replicas_are_whole_nodes_and_a_node_size_needs_several() -> None:
    request = space(tower(1), ranks=64)
    assert request.replicas() == [1, 2, 8]
    assert dataclasses.replace(request, replicate=4).replicas() == [4]
    assert space(tower(1)).replicas() == [1]
    two = dataclasses.replace(request, ranks=16)
    assert two.reshard_words(1) == ("never", 8, "always")
    assert two.reshard_words(2) == ("never", "always")
    result = choose(two)
    assert result.reasons[0].startswith(("2 replicas of 8 ranks: ", "One replica over 16 ranks: "))


# Where nothing fits


@pytest.mark.rest
def test_the_host_is_used_only_where_nothing_else_fits() -> None:
    request = space(tower(1))
    evaluator = Evaluator(request)
    least = {way: evaluator.evaluate(evaluator.uniform(Setting(1, 1, 1, way), "always", "full")) for way in OFFLOADS}
    without, on_host = (least[way].peak_reserved_bytes for way in OFFLOADS)
    assert on_host < without
    budget = on_host + MIB
    result = choose(dataclasses.replace(request, budget=budget))
    assert result.plan.offload == "cpu"
    assert result.reasons[-1].startswith("Offload cpu: ")
    none = request.choices.replace(offload="none")
    with pytest.raises(NothingFits, match='offload="cpu"'):
        choose(dataclasses.replace(request, budget=budget, choices=none))


def nothing(request: Space, budget: int) -> NothingFits:
    with pytest.raises(NothingFits) as caught:
        choose(dataclasses.replace(request, budget=budget))
    assert "\n" not in str(caught.value)
    assert not caught.value.study.forecast.fits
    return caught.value


@pytest.mark.rest
def test_where_nothing_fits_it_says_by_how_much_and_what_would() -> None:
    request = space(tower(2), microbatch=4, choices=Options(**{**AUTO, "offload": "none"}, mixed_precision="bf16"))
    refused = nothing(request, 400 * MIB)
    lacks = refused.study.forecast.peak_reserved_bytes - 400 * MIB
    assert f"{size(lacks)} too much" in str(refused)
    # Accumulating would keep whole gradients, so that takes more.
    assert "microbatch=2" in str(refused)
    assert "(microbatch 4, reshard always, recompute full)" in str(refused)


@pytest.mark.rest
def test_a_word_that_is_fixed_is_the_first_to_give_way() -> None:
    everything = Options(**AUTO, mixed_precision="bf16")
    request = space(tower(6), microbatch=4, choices=everything.replace(activation_checkpointing="none"))
    evaluator = Evaluator(dataclasses.replace(request, choices=everything))
    full = evaluator.evaluate(evaluator.uniform(Setting(1, 4, 1, "none"), "always", "full"))
    refused = nothing(request, full.peak_reserved_bytes)
    assert 'activation_checkpointing="auto"' in str(refused)


@pytest.mark.rest
def test_a_device_that_is_too_small_asks_for_a_shorter_sequence_more_ranks_or_another() -> None:
    device = hardware("h100")
    small = hardware("h100", memory_bytes=device.context_bytes + device.communicator_bytes + 100 * MIB)
    with pytest.raises(NothingFits, match=r'ranks=\d+|hardware="[^"]+"|sequence=\d+'):
        choose(space(tower(1), hardware=small))


def test_a_budget_below_one_unit_is_told_by_its_name() -> None:
    refused = nothing(space(tower(2)), 12 * MIB)
    assert lacking(refused, "12.0 MiB", "one unit", "tower", "'blocks.0'", "16.0 MiB", "4.0") == []


def test_a_budget_above_the_device_is_refused() -> None:
    with pytest.raises(ValueError, match="more than"):
        choose(space(tower(2), 1 << 40))


# Host memory


def test_offload_needs_the_memory_of_its_node() -> None:
    """Shards, gradients, two moments and what the optimizer makes of them, all of float32, lie on the host."""
    offloaded = Options(**{**AUTO, "offload": "cpu"}, mixed_precision="bf16")
    enough = choose(space(tower(2), choices=offloaded)).forecast
    parameters = sum(parameter.numel() for parameter in Tower(2).parameters())
    assert 0 <= enough.host_bytes - 5 * 4 * parameters // 8 < 64  # and its count of steps
    assert enough.fits
    few = hardware("h100", host_memory_bytes=enough.host_bytes - 1)
    refused = nothing(space(tower(2), choices=offloaded, hardware=few), enough.budget_bytes)
    needed, has = (size(8 * count) for count in (enough.host_bytes, enough.host_bytes - 1))
    assert lacking(refused, needed, has, "host", "--host-memory") == []
    exact = hardware("h100", host_memory_bytes=enough.host_bytes)
    assert choose(space(tower(2), choices=offloaded, hardware=exact)).forecast.fits


@pytest.mark.rest
def test_an_offload_whose_host_memory_is_lacking_is_not_chosen() -> None:
    few = hardware("h100", host_memory_bytes=1 * MIB)
    refused = nothing(space(tower(2), hardware=few), 60 * MIB)
    assert "--host-memory" in str(refused)


@pytest.mark.rest
def test_what_fits_without_offload_comes_before_it() -> None:
    asked: list[str] = []
    other = studies.study()

    def instead(lack: str) -> Study:
        asked.append(lack)
        return other

    assert choose(space(tower(2), 60 * MIB), before_offload=instead) is other
    assert len(asked) == 1
    assert choose(space(tower(2)), before_offload=instead) is not other
    assert len(asked) == 1


@pytest.mark.rest
def test_a_space_that_is_expected_to_be_slower_is_not_studied() -> None:
    lines: list[str] = []
    best = choose(space(tower(2))).forecast.tokens_per_second_per_rank
    with pytest.raises(NotFaster) as slower:
        choose(space(tower(2)), lines.append, faster_than=100 * best)
    assert best / 2 < slower.value.args[0] < 100 * best  # short steps are issued slower than is predicted
    assert lines == []
    assert choose(space(tower(2)), faster_than=best / 2).forecast.tokens_per_second_per_rank == best


def test_a_probe_of_passes_alone_tells_what_one_with_a_step_tells_of_units() -> None:
    evaluator = Evaluator(space(tower(4), microbatch=4))
    short = Short(evaluator.space.job(None, Setting(1, 4, 1, "none")), evaluator.bases(1)[False], [], [])
    costs = []
    for steps in (True, False):
        trace = evaluator.simulations.simulator.probe(short, steps=steps)
        costs.append(measured(trace, memory_of(trace), evaluator.space.cluster(1), "eager"))
    stepped, passes = costs
    assert passes.units == stepped.units
    assert passes.events == stepped.events
    assert passes.step.forward < stepped.step.forward
    assert passes.step.resting == 0 < stepped.step.resting


@pytest.mark.rest
def test_predicted_speeds_are_those_of_ranks_that_share_tokens() -> None:
    """Where ranks have the same samples, their tokens count once, in what is predicted as in what is studied."""
    choices = Options(**AUTO, mixed_precision="bf16", tensor=TENSOR)
    evaluator = Evaluator(space(tower(4), choices=choices, microbatch=64, accumulation=1))
    candidate = evaluator.uniform(Setting(1, 64, 1, "none"), "always", "none")
    predicted = 1 / evaluator.expected(candidate).cost
    assert predicted == pytest.approx(evaluator.evaluate(candidate).tokens_per_second_per_rank, rel=0.3)
