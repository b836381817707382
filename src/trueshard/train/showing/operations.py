"""What model floating-point operations utilisation (MFU) is made of: a model's operations and a device's peak.

- Operations a token: 6 N + 12 L H Q T, with N parameters, L layers, H heads of size Q and T tokens a sequence (PaLM,
  Chowdhery et al. 2022, appendix B). Forward takes 2 operations a parameter, the gradients of inputs and of weights 2
  each, so a frozen parameter counts 4. Embeddings that are only looked up count nothing; nor does recomputation.
- Where the formula does not hold there is no figure: the planner's simulation counts any model.
- The peak is the planner's catalogue's, for the device that bears the name; a device unlike those has none.
"""

from __future__ import annotations

import re

import torch
from torch import nn

from trueshard.planner.speed.hardware import hardware, known

FORMS = {"nvidia", "amd", "instinct", "geforce", "tesla", "sxm", "sxm4", "sxm5", "oam", "hbm2e", "hbm3", "hbm3e"}
"""Words of a device's name that say nothing about its speed."""


def flops_per_token(model: nn.Module, sequence_length: int) -> float | None:
    """Floating-point operations of forward and backward, for each token of a sequence of that many tokens.

    Args:
        model: a dense transformer with a transformers configuration, sharded or not, before its weights are quantised.
        sequence_length: tokens.

    Returns:
        None for what the formula does not hold: experts, several towers, no such configuration.
    """
    config = getattr(model, "config", None)
    layers, heads = (getattr(config, key, None) for key in ("num_hidden_layers", "num_attention_heads"))
    experts = ("num_experts", "num_local_experts", "n_routed_experts", "vision_config", "audio_config")
    if not isinstance(layers, int) or not isinstance(heads, int) or any(getattr(config, key, None) for key in experts):
        return None
    size = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // heads
    looked_up = {id(each) for module in model.modules() if isinstance(module, nn.Embedding) for each in own(module)}
    used = {id(each) for module in model.modules() if not isinstance(module, nn.Embedding) for each in own(module)}
    counted = [each for each in model.parameters() if id(each) not in looked_up - used]
    weights = sum((6 if each.requires_grad else 4) * each.numel() for each in counted)
    return float(weights + 12 * layers * heads * size * sequence_length)


def own(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of the module itself."""
    return list(module.parameters(recurse=False))


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Dense operations a second of a device, in products of tensors of that dtype; None where it is not known.

    Args:
        device: any; on a CPU there is no figure.
        dtype: in which the products are computed.
    """
    if device.type != "cuda":
        return None
    name = catalogued(torch.cuda.get_device_name(device))
    if name is None:
        return None
    tensor_cores = dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    return hardware(name).peak("tfloat32" if tensor_cores else str(dtype).removeprefix("torch."))


def catalogued(title: str) -> str | None:
    """The catalogue's name for a device that calls itself `title`, such as "NVIDIA A100-SXM4-40GB"."""
    words = set(re.findall(r"[a-z0-9]+", title.lower().replace("rtx ", "rtx")))
    found = [name for name in known() if set(name.split("-")) <= words]
    name = max(found, key=len, default=None)
    if name is None:
        return None
    rest = words - set(name.split("-")) - FORMS
    return name if all(re.fullmatch(r"\d+gb", word) for word in rest) else None
