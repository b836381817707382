"""Frozen linear layers with weights in 8 or 4 bits, in plain torch.

- "int8": rounded to 255 levels, scaled by the largest absolute value of each 64 inputs. "nf4": rounded to 16 quantiles
  of a normal distribution (Dettmers et al. 2023, QLoRA, appendix E), scaled likewise.
- One uint8 tensor a layer holds each row's codes and then its scales as bytes: it is sharded by rows like any weight,
  and gathered as it is stored (FSDP2 casts floating point only).
- The weight is dequantised again in backward, so activations do not hold it, and whenever ``weight`` is read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

Quantization = Literal["int8", "nf4"]

BLOCK = 64
"""Number of inputs that share a scale."""
NORMAL_FLOAT = (
    *(-1.0, -0.6961929, -0.52507305, -0.3949175, -0.28444135, -0.18477343, -0.09104999, 0.0),
    *(0.07958033, 0.16093017, 0.24611229, 0.33791518, 0.4407098, 0.56261694, 0.7229567, 1.0),
)
"""The 16 levels of "normal float 4": seven negative quantiles, zero, and eight positive ones."""
_PAIRS = tuple(level for high in NORMAL_FLOAT for low in NORMAL_FLOAT for level in (high, low))
"""The two levels of each byte."""
_SCALE_BYTES = 4


class QuantizedLinear(nn.Linear):
    """``nn.Linear`` with a quantised weight, which gets no gradient, in place of a plain one."""

    def __init__(self, linear: nn.Linear, kind: Quantization) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.kind = linear.in_features, linear.out_features, kind
        self.dtype = linear.weight.dtype
        """Dtype of ``weight``."""
        self.packed = nn.Parameter(quantise(linear.weight.detach(), kind), requires_grad=False)
        """uint8 [out_features, bytes of a row]."""
        self.bias = linear.bias

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """Dequantised weight, [out_features, in_features]."""
        if self.packed.is_meta:  # PEFT reads it often while it wraps a layer
            return self.packed.new_empty(self.out_features, self.in_features, dtype=self.dtype)
        return dequantise(self.packed, self.kind, self.in_features, self.dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return [..., out_features] for [..., in_features], in the dtype of ``input``."""
        output: torch.Tensor = _Product.apply(input, self.packed, self.bias, self.kind)
        return output

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, kind={self.kind}"


def quantise_layers(model: nn.Module, kind: Quantization, wanted: Callable[[str], bool]) -> int:
    """Replace the ``wanted`` plain linear layers of ``model``, in place; return their number of weights."""
    layers = [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear and wanted(name)]
    for name, module in layers:
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, QuantizedLinear(module, kind))
    return sum(module.weight.numel() for _, module in layers)


def quantise(weight: torch.Tensor, kind: Quantization) -> torch.Tensor:
    """Quantise rows of a weight: [rows, inputs] of floating point → uint8 [rows, bytes of a row]."""
    blocks = -(-weight.shape[1] // BLOCK)
    if weight.is_meta:
        codes_bytes = blocks * (BLOCK if kind == "int8" else BLOCK // 2)
        return weight.new_empty(len(weight), codes_bytes + blocks * _SCALE_BYTES, dtype=torch.uint8)
    values = F.pad(weight.float(), (0, blocks * BLOCK - weight.shape[1])).unflatten(1, (blocks, BLOCK))
    scales = values.abs().amax(2)
    values = values / torch.where(scales > 0, scales, 1).unsqueeze(2)
    if kind == "int8":
        codes = (values * 127).round().to(torch.int8).view(torch.uint8).flatten(1)
    else:
        levels = torch.tensor(NORMAL_FLOAT, device=weight.device)
        nearest = torch.bucketize(values, (levels[1:] + levels[:-1]) / 2, out_int32=True).to(torch.uint8).flatten(1)
        codes = nearest[:, ::2] * 16 + nearest[:, 1::2]
    return torch.cat([codes, scales.view(torch.uint8)], dim=1)


def dequantise(packed: torch.Tensor, kind: Quantization, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """Invert ``quantise``: uint8 [rows, bytes of a row] → [rows, inputs] in ``dtype``."""
    blocks = -(-inputs // BLOCK)
    codes, scales = packed.split([packed.shape[1] - blocks * _SCALE_BYTES, blocks * _SCALE_BYTES], dim=1)
    scale = scales.clone(memory_format=torch.contiguous_format).view(torch.float32).unsqueeze(2)
    if kind == "int8":
        values = codes.view(torch.int8).unflatten(1, (blocks, BLOCK)) * (scale / 127)
    else:
        pairs = torch.tensor(_PAIRS, device=packed.device).view(256, 2)
        values = pairs[codes.int()].view(len(packed), blocks, BLOCK) * scale
    return values.to(dtype).flatten(1)[:, :inputs]


class _Product(torch.autograd.Function):
    """Compute input × weightᵀ + bias; saves only the codes for backward."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, kind: Quantization
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
