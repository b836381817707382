"""A few layers of a large model: enough to see every kind of parameter, and to fit anywhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from trueshard import names
from trueshard._torch import own_class

COUNTS = (
    "num_hidden_layers",
    "num_layers",
    "n_layer",
    "n_layers",
    "encoder_layers",
    "decoder_layers",
    "num_decoder_layers",
)
"""What configurations call their number of layers."""


def keep_layers(model: nn.Module, layers: int, optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """Leave the first ``layers`` modules of every list of blocks, in place; optimizers forget the others' parameters.

    A list of blocks is a ``ModuleList`` or ``Sequential`` of more modules than that, all of one class, which is in no
    other such list.

    Returns:
        How many modules were taken out.
    """
    root = names.unwrap(model)
    removed = 0
    for held in list(_lists(root, layers + 1)):
        removed += len(held) - layers
        del held[layers:]
    if removed:
        settings = getattr(root, "config", None)
        if settings is not None:
            shorten(settings, layers)
        _forget(optimizers, {id(parameter) for parameter in root.parameters()})
    return removed


def shorten(settings: Any, layers: int) -> None:
    """Write ``layers`` into a transformers configuration, in place: into those within it, too."""
    for inner in vars(settings).values():
        if hasattr(inner, "to_dict") and hasattr(inner, "model_type"):
            shorten(inner, layers)
    for name in COUNTS:
        count = getattr(settings, name, None)
        if type(count) is not int or count <= layers:
            continue
        for key, value in vars(settings).items():  # such as one word a layer
            if isinstance(value, list) and len(value) == count:
                setattr(settings, key, value[:layers])
        setattr(settings, name, layers)


def _lists(module: nn.Module, least: int) -> Iterator[Any]:
    for child in module.children():
        blocks = list(child.children())
        is_list = isinstance(child, (nn.ModuleList, nn.Sequential)) and len(blocks) >= least
        if is_list and len({own_class(block) for block in blocks}) == 1 and any(True for _ in blocks[0].parameters()):
            yield child
        else:
            yield from _lists(child, least)


def _forget(optimizers: Iterable[torch.optim.Optimizer], kept: set[int]) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            staying = [i for i, parameter in enumerate(group["params"]) if id(parameter) in kept]
            group["params"] = [group["params"][i] for i in staying]
            if "param_names" in group:
                group["param_names"] = [group["param_names"][i] for i in staying]
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
        for parameter in [each for each in optimizer.state if id(each) not in kept]:
            del optimizer.state[parameter]
