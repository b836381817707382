"""The learning rate over the steps.

- The shapes of `[schedule]` are pure functions of the step: a resume, a longer run or another peak needs no state.
- Any scheduler of torch, by import path; its state is in the checkpoints.
"""

from __future__ import annotations

import functools
import importlib
import math
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from trueshard.errors import UserError, one_line
from trueshard.train.config import ScheduleSection
from trueshard.train.optimizer import imported_class

KEY = "schedule.class"


def factor(section: ScheduleSection, step: int, steps: int) -> float:
    """The part of the peak learning rate at step `step` of 1 … `steps`.

    "wsd" is the shape of Hägele et al. 2024 (arXiv 2405.18392): constant, then 1 - √x over the last steps.
    """
    if step <= section.warmup_steps:
        return step / section.warmup_steps
    progress = min(1.0, (step - section.warmup_steps) / max(1, steps - section.warmup_steps))
    if section.decay == "constant":
        return 1.0
    if section.decay == "linear":
        left = 1 - progress
    elif section.decay == "cosine":
        left = (1 + math.cos(math.pi * progress)) / 2
    else:
        falling = section.decay_steps or max(1, steps // 10)
        left = 1 - math.sqrt(min(1.0, max(0, step - (steps - falling)) / falling))
    return section.final + (1 - section.final) * left


class Shape:
    """Sets the learning rate of every group to its own peak × `factor` of the step. Has no state but the step."""

    def __init__(self, section: ScheduleSection, optimizer: torch.optim.Optimizer, steps: int) -> None:
        self._section, self._optimizer, self._steps = section, optimizer, steps
        self._peaks = [group["lr"] for group in optimizer.param_groups]
        self._taken = 0
        self._set()

    def step(self) -> None:
        """After an optimizer step: the learning rate of the next one."""
        self._taken += 1
        self._set()

    def state_dict(self) -> dict[str, Any]:
        """The steps taken."""
        return {"taken": self._taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the steps taken, along this shape and with these peaks."""
        self._taken = int(state["taken"])
        self._set()

    def _set(self) -> None:
        part = factor(self._section, self._taken + 1, self._steps)
        for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(peak * part)
            else:
                group["lr"] = peak * part


def build_schedule(section: ScheduleSection, optimizer: torch.optim.Optimizer, steps: int) -> Any:
    """What has `step()` for each optimizer step. Raises `UserError` if the class is none or refuses its arguments."""
    if section.class_path is None:
        return Shape(section, optimizer, steps)
    return _scheduler(section.class_path, section.arguments, optimizer)


def check_schedule(section: ScheduleSection) -> None:
    """Raise `UserError` for what is wrong with the class and its arguments, whatever the model is."""
    build_schedule(section, torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.9), 1)


def _scheduler(path: str, arguments: dict[str, Any], optimizer: torch.optim.Optimizer) -> Any:
    kind = imported_class(path, LRScheduler, KEY)
    given = {key: _value(value, optimizer) for key, value in arguments.items()}
    try:
        return kind(optimizer=optimizer, **given)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, ZeroDivisionError) as error:
        detail = one_line(error)
        raise UserError(f"schedule.arguments: {path} refuses them ({detail}); correct them") from None


def _value(value: Any, optimizer: torch.optim.Optimizer) -> Any:
    """An argument as the class wants it: "module:function" is that function, a table with a class that scheduler."""
    if isinstance(value, list):
        return [_value(each, optimizer) for each in value]
    if isinstance(value, dict) and "class" in value:
        return _scheduler(value["class"], value.get("arguments", {}), optimizer)
    if isinstance(value, str) and value.count(":") == 1:
        module, name = value.split(":")
        try:
            function = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise UserError(f"schedule.arguments: {value!r} is no function ({error}); give module:function") from None
        return function if hasattr(function, "__dict__") else functools.partial(function)  # torch saves its __dict__
    return value
