"""Parameter groups by glob, any optimizer class, every learning rate schedule of torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import trueshard
from messages import lacking, naming
from trueshard.errors import UserError
from trueshard.train.config import OptimizerSection, ScheduleSection
from trueshard.train.optimizer import build_optimizer, build_schedule, check_optimizer, check_schedule, factor


def model() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({"tower": nn.Linear(3, 3), "norm": nn.LayerNorm(3), "head": nn.Linear(3, 2)})


def groups(**section: Any) -> list[dict[str, Any]]:
    module = model()
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    optimizer = build_optimizer(OptimizerSection(**section), module.named_parameters())
    return [group | {"params": [names[id(each)] for each in group["params"]]} for group in optimizer.param_groups]


def test_norms_and_biases_have_no_weight_decay() -> None:
    first, second = groups(weight_decay=0.1)
    assert (first["params"], first["weight_decay"]) == (["tower.weight", "head.weight"], 0.1)
    assert (second["params"], second["weight_decay"]) == (
        ["tower.bias", "norm.weight", "norm.bias", "head.bias"],
        0.0,
    )


def test_without_weight_decay_there_is_one_group() -> None:
    for section in ({"weight_decay": 0.0}, {"class": "torch.optim.SGD"}):
        assert [len(group["params"]) for group in groups(**section)] == [6]


def test_the_default_of_the_class_counts_too() -> None:
    assert [group["weight_decay"] for group in groups()] == [0.01, 0.0]


def test_groups_go_by_globs_and_the_first_counts() -> None:
    found = groups(
        weight_decay=0.1,
        no_decay=["*.bias"],
        groups=[
            {"parameters": ["tower.*"], "lr": 1e-5},
            {"parameters": ["*.weight"], "weight_decay": 0.5, "arguments": {"betas": (0.5, 0.5)}},
        ],
    )
    assert [group["params"] for group in found] == [
        ["tower.weight", "tower.bias"],
        ["norm.weight", "head.weight"],
        ["norm.bias", "head.bias"],
    ]
    assert [group["lr"] for group in found] == [1e-5, 1e-3, 1e-3]
    assert [group["weight_decay"] for group in found] == [0.1, 0.5, 0.0]
    assert found[1]["betas"] == (0.5, 0.5)


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"groups": [{"parameters": ["towr.*"]}]}, ("'towr.*'", "tower")),
        ({"no_decay": ["nothing"]}, ("optimizer.no_decay", "'nothing'")),
        ({"groups": [{"parameters": ["*"]}, {"parameters": ["head.*"]}]}, ("earlier group",)),
        ({"class": "torch.optim.AdamWW"}, ("AdamWW", "torch.optim.AdamW")),
        ({"class": "no_such_module.Adam"}, ("no_such_module", "imported")),
        ({"arguments": {"momentum": 1.0}}, ("AdamW", "momentum")),
    ],
)
def test_what_is_wrong_is_one_line(section: dict[str, Any], said: tuple[object, ...]) -> None:
    with pytest.raises(UserError) as caught:
        groups(**section)
    assert lacking(caught.value, *said) == []
    assert "\n" not in str(caught.value)


def test_what_does_not_depend_on_the_model_is_found_without_one() -> None:
    check_optimizer(OptimizerSection(groups=[{"parameters": ["later"]}]))
    with pytest.raises(UserError, match="foreachh"):
        check_optimizer(OptimizerSection(arguments={"foreachh": True}))


def test_a_frozen_model_has_nothing_to_optimize() -> None:
    module = model().requires_grad_(False)
    with pytest.raises(UserError, match=naming("no parameter", "trainable")):
        build_optimizer(OptimizerSection(), module.named_parameters())


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"decay": "constant", "warmup_steps": 2}, [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        ({"decay": "linear", "final": 0.0}, [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0]),
        (
            {"decay": "wsd", "warmup_steps": 2, "decay_steps": 4, "final": 0.0},
            [0.5, 1, 1, 1, 1, 1, *(1 - math.sqrt(n / 4) for n in (1, 2, 3, 4))],
        ),
        ({"decay": "cosine", "final": 0.2}, [0.2 + 0.4 * (1 + math.cos(math.pi * n / 10)) for n in range(1, 11)]),
    ],
)
def test_shapes_are_functions_of_the_step(section: dict[str, Any], expected: list[float]) -> None:
    assert [factor(ScheduleSection(**section), step, 10) for step in range(1, 11)] == pytest.approx(expected)


def test_a_shape_keeps_the_ratio_of_the_groups_and_a_new_peak_on_resume() -> None:
    section = ScheduleSection(decay="linear", final=0.0)

    def made(lr: float) -> Any:
        optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))], "lr": lr * k} for k in (1, 2)], lr=1.0)
        return optimizer, build_schedule(section, optimizer, 4)

    optimizer, schedule = made(0.4)
    seen = []
    for _ in range(4):
        seen.append([group["lr"] for group in optimizer.param_groups])
        schedule.step()
    assert seen == [pytest.approx([0.1 * k, 0.2 * k]) for k in (3, 2, 1, 0)]
    other, resumed = made(4.0)
    resumed.load_state_dict({"taken": 2})
    assert [group["lr"] for group in other.param_groups] == pytest.approx([1.0, 2.0])


ARGUMENTS: dict[str, dict[str, Any]] = {
    "LambdaLR": {"lr_lambda": "math:exp"},
    "MultiplicativeLR": {"lr_lambda": "math:cos"},
    "StepLR": {"step_size": 2},
    "MultiStepLR": {"milestones": [2, 3]},
    "ExponentialLR": {"gamma": 0.9},
    "CosineAnnealingLR": {"T_max": 5},
    "CyclicLR": {"base_lr": 0.1, "max_lr": 1.0},
    "CosineAnnealingWarmRestarts": {"T_0": 2},
    "OneCycleLR": {"max_lr": 1.0, "total_steps": 10},
    "SequentialLR": {
        "schedulers": [
            {"class": "torch.optim.lr_scheduler.LinearLR"},
            {"class": "torch.optim.lr_scheduler.ExponentialLR", "arguments": {"gamma": 0.5}},
        ],
        "milestones": [2],
    },
    "ChainedScheduler": {"schedulers": [{"class": "torch.optim.lr_scheduler.ConstantLR"}]},
}
SCHEDULERS = sorted(
    name
    for name, kind in vars(lr_scheduler).items()
    if isinstance(kind, type)
    and issubclass(kind, lr_scheduler.LRScheduler)
    and not name.startswith("_")
    and name != "LRScheduler"
)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_schedule_of_torch_runs_and_resumes(name: str, tmp_path: Path) -> None:
    section = ScheduleSection(**{"class": f"torch.optim.lr_scheduler.{name}", "arguments": ARGUMENTS.get(name, {})})
    check_schedule(section)

    def trainer(steps: int, folder: str) -> Any:
        module = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        rates: list[float] = []

        class Rates(trueshard.Callback):
            def on_step(self, trainer: Any, record: dict[str, Any]) -> None:
                rates.append(record["lr"])

        made = trueshard.Trainer(
            module,
            optimizer,
            [torch.ones(1, 2)],
            loss=lambda model, batch: model(batch).square().mean(),
            steps=6,
            scheduler=build_schedule(section, optimizer, 6),
            evaluation=[torch.ones(1, 2)],
            evaluate_every=1,
            checkpoints=trueshard.Checkpoints(tmp_path / folder),
            callbacks=[Rates()],
            wants_stop=lambda: made.step == steps - 1,
        )
        made.fit()
        return rates

    whole = trainer(6, "whole")
    assert len(whole) == 6
    assert trainer(3, "parts") + trainer(6, "parts") == whole


def test_a_schedule_that_is_none_is_refused() -> None:
    for section, said in (
        (
            {"class": "torch.optim.lr_scheduler.StepLRR", "arguments": {}},
            "torch.optim.lr_scheduler.StepLR",
        ),
        ({"class": "torch.optim.lr_scheduler.StepLR", "arguments": {}}, "refuses them"),
        ({"class": "torch.optim.AdamW", "arguments": {}}, "torch.optim.lr_scheduler.LRScheduler"),
        ({"class": "torch.optim.lr_scheduler.LambdaLR", "arguments": {"lr_lambda": "math:expp"}}, "math:expp"),
    ):
        with pytest.raises(UserError) as caught:
            check_schedule(ScheduleSection(**section))
        assert said in str(caught.value)
