"""Ask a language model by trial how it makes masks: no source is read, and no weight is needed.

The module that holds the blocks runs its own forward, with children that compute nothing: blocks note what they are
given, embeddings give zeros. So the trial takes milliseconds at any size, also where weights are on the meta device.
What a trial cannot tell is an error that names the model: a mask that lets packed documents see each other changes the
training and fails nowhere.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trueshard import _torch
from trueshard.model import names

LENGTH = 8
"""Tokens of the sequence on which a model is tried: two packed documents of half of them."""


@dataclass(frozen=True)
class MaskTrial:
    """How a language model makes masks and positions."""

    keeps_apart: bool
    """Packed documents, whose positions begin at 0 each, do not see each other."""
    takes_kinds: bool
    """It takes a dict of masks, one for each kind of its layers."""
    counts_by_mask: bool
    """Where it is given no positions it counts them by the mask, so padding before tokens moves them."""


def try_masks(model: Any, attention: Iterable[str]) -> MaskTrial:
    """Return how ``model`` makes masks; ``attention``: names of its modules of attention, which lie in its blocks.

    Raises:
        ValueError: its forward does not run with blocks that compute nothing, or gives them no mask that can be read.
    """
    with _torch.real_tensors(), torch.no_grad():  # also where the model is simulated
        holder, blocks = _holder(model, list(attention))
        packed = torch.arange(LENGTH).remainder(LENGTH // 2).unsqueeze(0)  # (1, length)
        given = _run(model, holder, blocks, position_ids=packed)
        padded = torch.ones(1, LENGTH, dtype=torch.int64)
        padded[:, : LENGTH // 4] = 0
        counted = _run(model, holder, blocks, attention_mask=padded).positions
        return MaskTrial(
            keeps_apart=bool(given.masks) and not any(map(_crosses, given.masks)),
            takes_kinds=_takes_kinds(model, holder, blocks),
            counts_by_mask=not counted or any(not torch.equal(ids, torch.arange(LENGTH)) for ids in counted),
        )


class _Notes:
    """What children of the holder were given in one pass."""

    def __init__(self) -> None:
        self.masks: list[torch.Tensor | None] = []
        """A block's each: (batch or 1, 1, length, length), or None for plainly causal attention."""
        self.positions: list[torch.Tensor] = []
        """Whole numbers for each token, (length,)."""

    def take(self, arguments: Iterable[Any]) -> None:
        for value in _torch.tensors_in(list(arguments)):
            is_index = not value.is_floating_point() and value.dtype != torch.bool and value.shape[-1:] == (LENGTH,)
            if is_index and value.numel() == LENGTH:
                self.positions.append(value.flatten())


class _Block(nn.Module):
    """Stands for a block, whose attributes it has: a model may ask of which kind it is."""

    def __init__(self, block: nn.Module, notes: _Notes, returns_tuple: bool) -> None:
        super().__init__()
        self.__dict__ |= {"_stands_for": block, "_notes": notes, "_returns_tuple": returns_tuple}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_stands_for"], name)

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        notes: _Notes = self.__dict__["_notes"]
        notes.take([*args, *(value for key, value in kwargs.items() if key != "attention_mask")])
        masks = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor) and value.ndim == 4]
        notes.masks.append(masks[0] if masks else None)
        return (hidden,) if self.__dict__["_returns_tuple"] else hidden


class _Child(nn.Module):
    """Stands for what the holder has beside its blocks: gives back what it is given, an embedding zeros."""

    def __init__(self, child: nn.Module, notes: _Notes, dtype: torch.dtype) -> None:
        super().__init__()
        self.notes, self.dtype = notes, dtype
        self.width: int | None = getattr(child, "embedding_dim", None)

    def forward(self, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.notes.take([value, *args, *kwargs.values()])
        return value if self.width is None else torch.zeros((*value.shape, self.width), dtype=self.dtype)


def _holder(model: Any, attention: list[str]) -> tuple[str, str]:
    """Return the name of the module that runs the blocks, and of its attribute that lists them."""
    modules = dict(names.named_modules(model))
    lists = set()
    for name in attention:
        parts = name.split(".")
        place = next((i for i, part in enumerate(parts) if part.isdecimal()), 0)
        lists.add(".".join(parts[:place]))
    if len(lists) != 1 or not isinstance(modules.get(listed := lists.pop()), nn.ModuleList):
        raise _unknown(model, "its attention does not lie in one list of blocks")
    return listed.rpartition(".")[0], listed.rpartition(".")[2]


def _run(model: Any, holder: str, blocks: str, **inputs: Any) -> _Notes:
    """Run the holder's forward once, with children that compute nothing."""
    error: Exception | None = None
    for returns_tuple in (False, True):
        notes = _Notes()
        stand_in = _stand_in(dict(names.named_modules(model))[holder], blocks, notes, returns_tuple, model.dtype)
        width = model.get_input_embeddings().embedding_dim
        embeddings = torch.zeros(1, LENGTH, width, dtype=model.dtype)
        try:
            stand_in(inputs_embeds=embeddings, use_cache=False, **inputs)
        except Exception as reason:  # whatever a forward raises that was given something unexpected
            error = error or reason
            continue
        return notes
    raise _unknown(model, f"its forward does not run on blocks that compute nothing ({type(error).__name__}: {error})")


def _stand_in(holder: nn.Module, blocks: str, notes: _Notes, returns_tuple: bool, dtype: torch.dtype) -> nn.Module:
    """Return a copy of the holder with other children, and without hooks; the holder stays as it is."""
    copied: nn.Module = object.__new__(_torch.own_class(holder))
    copied.__dict__.update(holder.__dict__)
    for key in [key for key in copied.__dict__ if key.endswith("_hooks")]:
        copied.__dict__[key] = OrderedDict()
    copied.__dict__.pop("forward", None)
    children: dict[str, nn.Module] = {}
    for name, child in holder.named_children():
        if name == blocks:
            children[name] = nn.ModuleList(_Block(block, notes, returns_tuple) for block in child.children())
        else:
            children[name] = _Child(child, notes, dtype)
    copied.__dict__["_modules"] = children
    return copied


def _crosses(mask: torch.Tensor | None) -> bool:
    """True if the second document may see the first."""
    if mask is None:
        return True
    seen = mask[0, 0, LENGTH // 2 :, : LENGTH // 2]  # (queries of the second, keys of the first)
    return bool(seen.any()) if mask.dtype == torch.bool else bool((seen > torch.finfo(mask.dtype).min / 2).any())


def _takes_kinds(model: Any, holder: str, blocks: str) -> bool:
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"]
    masks: Mapping[str, torch.Tensor] = {kind: torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool) for kind in kinds}
    try:
        given = _run(model, holder, blocks, attention_mask=masks).masks
    except ValueError:
        return False
    return bool(given) and all(any(mask is known for known in masks.values()) for mask in given)


def _unknown(model: nn.Module, why: str) -> ValueError:
    return ValueError(
        f"context: whether {_torch.own_class(model).__name__} keeps packed documents apart cannot be told: {why}; "
        "leave out context"
    )
