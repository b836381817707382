"""Frozen linear layers whose weights are stored in 8 or 4 bits, in plain torch.

- "int8": rounded to 255 steps between ± the greatest of 64 inputs' weights. "nf4": to the 16 quantiles of a normal
  distribution (Dettmers et al. 2023, QLoRA, appendix E), likewise scaled.
- One uint8 tensor a layer holds the codes of a row and after them the row's scales as bytes: it is sharded by rows like
  any weight, gathered as it is stored (FSDP2 casts floating point only), and rows can be quantised where they are.
- The weight is made again in backward, so activations do not hold it. ``weight`` is made whenever it is read: PEFT
  takes the layer for the ``nn.Linear`` that it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

Kind = Literal["int8", "nf4"]

BLOCK = 64
"""Inputs that share a scale."""
_SCALE_BYTES = 4


class QuantizedLinear(nn.Linear):
    """``nn.Linear`` over a quantised weight, which gets no gradient.

    Args:
        linear: what it stands for; on the meta device, this will be there, too.
        kind: "int8" or "nf4".
    """

    def __init__(self, linear: nn.Linear, kind: Kind) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.kind = linear.in_features, linear.out_features, kind
        self.dtype = linear.weight.dtype
        """Of ``weight``."""
        self.packed = nn.Parameter(quantise(linear.weight.detach(), kind), requires_grad=False)
        """uint8 [out_features, bytes of a row]."""
        self.bias = linear.bias

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """[out_features, in_features], made anew."""
        return dequantise(self.packed, self.kind, self.in_features, self.dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in_features] → [..., out_features], in the dtype of ``input``."""
        output: torch.Tensor = _Product.apply(input, self.packed, self.bias, self.kind)
        return output

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, kind={self.kind}"


def quantise_layers(model: nn.Module, kind: Kind, wanted: Callable[[str], bool]) -> int:
    """Replace the linear layers of ``model`` that are ``wanted``, by name, in place; returns their weights' number.

    What is a subclass of ``nn.Linear`` is left alone.
    """
    found = [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear and wanted(name)]
    made = {id(module): QuantizedLinear(module, kind) for _, module in found}
    for name, module in found:
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, made[id(module)])
    return sum(module.weight.numel() for _, module in found)


def quantise(weight: torch.Tensor, kind: Kind) -> torch.Tensor:
    """Any rows of a weight, [rows, inputs] of floating point → uint8 [rows, bytes of a row]."""
    blocks = -(-weight.shape[1] // BLOCK)
    values = F.pad(weight.float(), (0, blocks * BLOCK - weight.shape[1])).unflatten(1, (blocks, BLOCK))
    scales = values.abs().amax(2)
    values = values / torch.where(scales > 0, scales, 1).unsqueeze(2)
    if kind == "int8":
        codes = (values * 127).round().to(torch.int8).view(torch.uint8).flatten(1)
    else:
        levels = _levels(weight.device)
        nearest = torch.bucketize(values, (levels[1:] + levels[:-1]) / 2, out_int32=True).to(torch.uint8).flatten(1)
        codes = nearest[:, ::2] * 16 + nearest[:, 1::2]
    return torch.cat([codes, scales.view(torch.uint8)], dim=1)


def dequantise(packed: torch.Tensor, kind: Kind, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """What ``quantise`` made → [rows, inputs] in ``dtype``."""
    blocks = -(-inputs // BLOCK)
    codes, scales = packed.split([packed.shape[1] - blocks * _SCALE_BYTES, blocks * _SCALE_BYTES], dim=1)
    scale = scales.clone(memory_format=torch.contiguous_format).view(torch.float32).unsqueeze(2)
    if kind == "int8":
        values = codes.view(torch.int8).unflatten(1, (blocks, BLOCK)) * (scale / 127)
    else:
        levels = _levels(packed.device)
        pairs = torch.stack([levels.repeat_interleave(16), levels.repeat(16)], dim=1)  # of each byte
        values = pairs[codes.int()].view(len(packed), blocks, BLOCK) * scale
    return values.to(dtype).flatten(1)[:, :inputs]


def _levels(device: torch.device) -> torch.Tensor:
    return torch.tensor(_quantiles(), device=device)


@functools.cache
def _quantiles() -> list[float]:
    """The 16 values of "normal float 4": eight quantiles on the positive side, seven on the negative, and zero."""
    last = 0.9677083  # so that the outermost is as far from 1 as half a step, averaged over both sides
    like: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
    positive = torch.special.ndtri(torch.linspace(last, 0.5, 9, **like)[:-1])
    negative = -torch.special.ndtri(torch.linspace(last, 0.5, 8, **like)[:-1])
    values = torch.cat([negative, torch.zeros(1, **like), positive]).sort().values
    found: list[float] = (values / values.max()).tolist()
    return found


class _Product(torch.autograd.Function):
    """input × weightᵀ + bias; keeps the codes for backward, and nothing else."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, kind: Kind
    ) -> torch.Tensor:
        ctx.save_for_backward(packed)
        ctx.kind, ctx.inputs = kind, input.shape[-1]
        return F.linear(input, dequantise(packed, kind, ctx.inputs, input.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (packed,), (grad,) = ctx.saved_tensors, grads
        to_input = grad @ dequantise(packed, ctx.kind, ctx.inputs, grad.dtype) if ctx.needs_input_grad[0] else None
        to_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return to_input, None, to_bias, None
