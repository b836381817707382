"""The optimizer of a run, and its learning rate as a pure function of the step.

There is no scheduler object: a resume, a longer run or another world size needs no scheduler state.
"""

from __future__ import annotations

import difflib
import importlib
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from trueshard.errors import UserError
from trueshard.train.config import OptimizerSection, ScheduleSection


def build_optimizer(section: OptimizerSection, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer over those parameters that are trainable.

    Raises `UserError` if the class is not found, is not an optimizer, or refuses its arguments.
    """
    kind = _optimizer_class(section.class_path)
    arguments: dict[str, Any] = {"lr": section.lr, **section.arguments}
    if section.betas is not None:
        arguments["betas"] = tuple(section.betas)
    if section.weight_decay is not None:
        arguments["weight_decay"] = section.weight_decay
    try:
        return kind([parameter for parameter in parameters if parameter.requires_grad], **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        detail = " ".join(str(error).split())
        raise UserError(f"[optimizer]: {section.class_path} refuses its arguments ({detail}); correct them") from None


def learning_rate(section: ScheduleSection, peak: float, step: int, steps: int) -> float:
    """The learning rate of step `step` of 1 … `steps`."""
    if step <= section.warmup_steps:
        return peak * step / section.warmup_steps
    progress = (step - section.warmup_steps) / max(1, steps - section.warmup_steps)
    left = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}[section.decay]
    final = 1.0 if section.decay == "constant" else section.final
    return peak * (final + (1 - final) * left)


def _optimizer_class(path: str) -> type[torch.optim.Optimizer]:
    module_name, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name or "torch.optim")
    except ImportError as error:
        raise UserError(
            f"optimizer.class: {path!r} cannot be imported ({error}); install it, or correct the path"
        ) from None
    kind = getattr(module, name, None)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        state = "is no torch.optim.Optimizer class" if kind is not None else "does not exist"
        classes = [key for key, value in vars(module).items() if isinstance(value, type)]
        near = difflib.get_close_matches(name, classes, n=1)
        hint = (
            f"nearest one: {module.__name__}.{near[0]}" if near else 'give an import path, such as "torch.optim.AdamW"'
        )
        raise UserError(f"optimizer.class: {path!r} {state}; {hint}")
    return kind
