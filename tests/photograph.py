"""All that a model and its optimizer hold, to see that a call left them as they were."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def photograph(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything that must come back, by identity where identity is what counts."""
    seen: dict[str, Any] = {}
    stack = [("", model)]
    while stack:
        name, module = stack.pop()
        held = dict(vars(module))
        for key, value in held.items():
            held[key] = list(value.items()) if isinstance(value, dict) else value
        seen[name] = (type(module), held)
        stack += [(f"{name}.{key}", child) for key, child in module._modules.items()]
    for name, p in model.named_parameters():
        hooks = list((p._backward_hooks or {}).items())
        seen[f"tensor {name}"] = (id(p), p.data_ptr(), p.stride(), p.requires_grad, dict(vars(p)), id(p.grad), hooks)
    seen["values"] = {name: p.detach().clone().numpy().tobytes() for name, p in model.named_parameters()}
    seen["groups"] = [(id(g), [id(p) for p in g["params"]], list(g)) for g in optimizer.param_groups]
    seen["state"] = [
        (id(p), [(k, id(v), v.sum().item()) for k, v in entries.items()]) for p, entries in optimizer.state.items()
    ]
    return seen
