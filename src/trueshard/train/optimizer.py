"""The optimizer and the learning-rate schedule of a run, as `[optimizer]` and `[schedule]` describe them.

- Any optimizer class by import path, over groups of parameters. Norms and biases have no weight decay, unless
  `optimizer.no_decay` says otherwise. A glob that matches no trainable parameter is an error.
- The shapes of `[schedule]` are pure functions of the step: a resume, a longer run or another peak needs no state.
- Any scheduler of torch by import path; its state is in the checkpoints.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from trueshard.errors import UserError, explained, one_line
from trueshard.train.config import OptimizerSection, ScheduleSection
from trueshard.train.models.parameters import match_globs
from trueshard.train.own_code import Wrong, blamed, own

_KERNELS = {"fused", "foreach", "capturable", "differentiable"}
"""Arguments of torch's optimizers that choose the kernel."""


def build_optimizer(
    section: OptimizerSection, named: Iterable[tuple[str, nn.Parameter]], *, on_gpu: bool = False
) -> torch.optim.Optimizer:
    """Return the optimizer over the trainable parameters. Raises `UserError` for a wrong class, argument or glob.

    ``on_gpu``: shards rest there, so Adam and AdamW have their fused kernel unless the section chooses.
    """
    kind = imported_class(section.class_path, torch.optim.Optimizer, "optimizer.class")
    trainable = {name: parameter for name, parameter in named if parameter.requires_grad}
    if not trainable:
        raise UserError("[optimizer]: no parameter is trainable; freeze fewer with model.freeze, or add an [adapter]")
    arguments: dict[str, Any] = {"lr": section.lr, **section.arguments}
    chosen = {key for given in (section.arguments, *(group.arguments for group in section.groups)) for key in given}
    if on_gpu and kind in (torch.optim.Adam, torch.optim.AdamW) and not chosen & _KERNELS:
        arguments["fused"] = True  # reads and writes each number once, and needs no memory beside them
    if section.betas is not None:
        arguments["betas"] = tuple(section.betas)
    if section.weight_decay is not None:
        arguments["weight_decay"] = section.weight_decay
    problem = f"[optimizer]: {section.class_path} refuses its arguments"
    with explained(problem, "correct them", (TypeError, ValueError, RuntimeError), one_line):
        default = inspect.signature(kind).parameters.get("weight_decay")
        decay = arguments.get("weight_decay", None if default is None else default.default)
        decays = isinstance(decay, (int, float)) and decay > 0
        return kind(_groups(section, trainable, decays), **arguments)


def check_optimizer(section: OptimizerSection) -> None:
    """Raise `UserError` if the class or its arguments are wrong, whatever the model is."""
    plain = section.model_copy(update={"groups": [], "no_decay": None})
    build_optimizer(plain, [("weight", nn.Parameter(torch.zeros(2, 2)))])


def imported_class(path: str, base: type, key: str) -> Any:
    """Return the class at an import path, a subclass of `base`. Raise `UserError`, naming `key`, if there is none."""
    if ":" in path:
        return own(key, path, base=base, binds=False)
    module_name, _, name = path.rpartition(".")
    home = base.__module__ if base is not torch.optim.Optimizer else "torch.optim"
    with explained(f"{key}: {path!r} cannot be imported", "install it, or correct the path", ImportError, str):
        module = importlib.import_module(module_name or home)
    kind = getattr(module, name, None)
    if isinstance(kind, type) and issubclass(kind, base):
        return kind
    state = f"is no {home}.{base.__name__} class" if kind is not None else "does not exist"
    classes = [key for key, value in vars(module).items() if isinstance(value, type) and issubclass(value, base)]
    near = difflib.get_close_matches(name, classes, n=1) or classes[:1]
    hint = f"nearest one: {module.__name__}.{near[0]}" if near else f"give the import path of a class of {home}"
    raise UserError(f"{key}: {path!r} {state}; {hint}")


def _groups(section: OptimizerSection, trainable: dict[str, nn.Parameter], decays: bool) -> list[dict[str, Any]]:
    """Return parameter groups: those of the section in order, then the rest, with and without weight decay."""
    left, groups = dict(trainable), list[dict[str, Any]]()
    for number, group in enumerate(section.groups, start=1):
        key = f"optimizer.groups, number {number}"
        taken = match_globs(group.parameters, trainable, key, "trainable parameter")
        members = {name: left.pop(name) for name in taken if name in left}
        if not members:
            raise UserError(f"{key}: an earlier group has all of its parameters; remove it, or put it first")
        settings = group.model_dump(include={"lr", "weight_decay"}, exclude_none=True)
        groups.append({"params": list(members.values()), **settings, **group.arguments})
    if section.no_decay is None:
        bare = [name for name, parameter in left.items() if parameter.ndim < 2 and decays]
    else:
        bare = match_globs(section.no_decay, trainable, "optimizer.no_decay", "trainable parameter")
    undecayed = [left.pop(name) for name in list(left) if name in set(bare)]
    groups += [{"params": list(left.values())}] if left else []
    return groups + ([{"params": undecayed, "weight_decay": 0.0}] if undecayed else [])


def factor(section: ScheduleSection, step: int, steps: int) -> float:
    """Return the fraction of the peak learning rate at step `step` of 1 … `steps`.

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


def _factor_of(section: ScheduleSection) -> Callable[[int, int], float]:
    """Return (step, steps) → fraction of the peak. Raises `UserError` for a function that is none."""
    if section.function is None:
        return functools.partial(factor, section)
    words = section.function
    function = own("schedule.function", words, "step", "steps")

    def checked(step: int, steps: int) -> float:
        with blamed("schedule.function", words, f" of step {step}"):
            part = float(function(step, steps))
            if not 0 <= part < math.inf:
                raise Wrong(f"it returned {part}, not a fraction of the peak from 0 on")
        return part

    return checked


class StepSchedule:
    """Set the learning rate of every group to its own peak × `factor` of the step. Its only state is the step."""

    def __init__(self, section: ScheduleSection, optimizer: torch.optim.Optimizer, steps: int) -> None:
        self._factor, self._optimizer, self._steps = _factor_of(section), optimizer, steps
        self._peaks = [group["lr"] for group in optimizer.param_groups]
        self.load_state_dict({"taken": 0})

    def step(self) -> None:
        """Set the learning rate of the next step; to be called after an optimizer step."""
        self.load_state_dict({"taken": self._taken + 1})

    def state_dict(self) -> dict[str, Any]:
        """Return the steps taken."""
        return {"taken": self._taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the steps taken, with this section and these peaks."""
        self._taken = int(state["taken"])
        part = self._factor(self._taken + 1, self._steps)
        for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(peak * part)
            else:
                group["lr"] = peak * part


def build_schedule(section: ScheduleSection, optimizer: torch.optim.Optimizer, steps: int) -> Any:
    """Return the scheduler, whose `step()` follows each optimizer step. Raises `UserError` for a wrong class."""
    if section.class_path is None:
        return StepSchedule(section, optimizer, steps)
    return _scheduler(section.class_path, section.arguments, optimizer)


def check_schedule(section: ScheduleSection) -> None:
    """Raise `UserError` if the class or its arguments are wrong, whatever the model is."""
    build_schedule(section, torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.9), 1000)


def _scheduler(path: str, arguments: dict[str, Any], optimizer: torch.optim.Optimizer) -> Any:
    kind = imported_class(path, LRScheduler, "schedule.class")
    values = {key: _value(value, optimizer) for key, value in arguments.items()}
    kinds = (TypeError, ValueError, LookupError, AttributeError, ZeroDivisionError)
    with explained(f"schedule.arguments: {path} refuses them", "correct them", kinds, one_line):
        return kind(optimizer=optimizer, **values)


def _value(value: Any, optimizer: torch.optim.Optimizer) -> Any:
    """Return an argument for the class: "module:function" becomes the function, a table with `class` the scheduler."""
    if isinstance(value, list):
        return [_value(item, optimizer) for item in value]
    if isinstance(value, dict) and "class" in value:
        return _scheduler(value["class"], value.get("arguments", {}), optimizer)
    if isinstance(value, str) and value.count(":") == 1:
        module, name = value.split(":")
        problem, kinds = f"schedule.arguments: {value!r} is no function", (ImportError, AttributeError, ValueError)
        with explained(problem, "give module:function", kinds, str):
            function = getattr(importlib.import_module(module), name)
        return function if hasattr(function, "__dict__") else functools.partial(function)  # torch saves its __dict__
    return value
