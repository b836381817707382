"""Tiny models that a tensor axis can share, their batches, and what is held against one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import trueshard
from gathering import gradients, parameters, whole

VOCABULARY = 129
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 65,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
"""neither the vocabulary nor the width of a block divides by 2 or 4"""


def llama(**more: Any) -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **more}))


def lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        llama(), LoraConfig(r=3, target_modules=["q_proj", "v_proj", "o_proj", "down_proj"], lora_dropout=0.0)
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zeros, and then nothing would reach the other matrix
            nn.init.normal_(parameter, std=0.1)
    return model


def frozen() -> nn.Module:
    model: Any = llama()
    for parameter in (model.model.embed_tokens.weight, model.model.layers[0].self_attn.o_proj.weight):
        parameter.requires_grad_(False)
    return model


def _experts(kind: Any, config: Any, **more: Any) -> nn.Module:
    model: Any = kind(config(**{**SIZES, "intermediate_size": 64, "num_experts_per_tok": 2, **more}))
    model.set_experts_implementation("eager")  # grouped products have no float64
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: llama(num_key_value_heads=2, attention_bias=True),
    "tied": lambda: llama(tie_word_embeddings=True, intermediate_size=64),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**{**SIZES, "num_key_value_heads": 2}, head_dim=8)),
    "mixtral": lambda: _experts(MixtralForCausalLM, MixtralConfig, num_local_experts=4),
    "qwen3_moe": lambda: _experts(
        Qwen3MoeForCausalLM, Qwen3MoeConfig, head_dim=8, num_experts=4, moe_intermediate_size=16
    ),
    "lora": lora,
    "frozen": frozen,
}


def build(name: str, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    return MODELS[name]().to(dtype).train()


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Norms and routers of transformers compute in float32 by themselves, and add their weights' gradients in it."""
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm, Qwen3MoeTopKRouter

    def norm(self: Any, x: torch.Tensor) -> torch.Tensor:
        scale = 1 + self.weight if isinstance(self, GemmaRMSNorm) else self.weight
        return scale * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    def route(self: Any, hidden: torch.Tensor) -> Any:
        logits = F.linear(hidden.reshape(-1, self.hidden_dim), self.weight)
        values, indices = torch.topk(F.softmax(logits, dim=-1), self.top_k, dim=-1)
        return logits, values / values.sum(-1, keepdim=True), indices

    kinds: dict[Any, Any] = dict.fromkeys((GemmaRMSNorm, LlamaRMSNorm, Qwen3RMSNorm, Qwen3MoeRMSNorm), norm)
    kinds[Qwen3MoeTopKRouter] = route
    with pytest.MonkeyPatch.context() as patch:
        for kind, forward in kinds.items():
            patch.setattr(kind, "forward", forward)
        yield


def optimizers(kind: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if kind == "AdamW":
        return [torch.optim.AdamW(trainable.values(), 1e-2)]
    if kind == "Adafactor":
        return [torch.optim.Adafactor(trainable.values(), 1e-2)]
    matrices = {name: p for name, p in trainable.items() if p.ndim == 2 and "embed" not in name}
    others = [p for name, p in trainable.items() if name not in matrices]
    made: list[torch.optim.Optimizer] = [torch.optim.Muon(matrices.values(), 1e-2)]
    return [*made, torch.optim.SGD(others, 1e-2, momentum=0.9)] if others else made


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (8, 11), generator=torch.Generator().manual_seed(step))


def train(
    model: Any, made: Sequence[torch.optim.Optimizer], steps: Sequence[int], part: int = 0, parts: int = 1
) -> dict[str, Any]:
    """Two microbatches a step; return norms, last clipped gradients, and parameters. ``parts``: ranks of the data."""
    sharded = any(isinstance(p, DTensor) for p in model.parameters())
    clip = trueshard.clip_grad_norm_ if sharded else nn.utils.clip_grad_norm_
    norms: list[float] = []
    grads: dict[str, torch.Tensor] = {}
    for step in steps:
        for number, micro in enumerate(batch(step).chunk(2)):
            accumulate = trueshard.accumulate(model, last=number == 1) if sharded else contextlib.nullcontext()
            own = micro.chunk(parts)[part]
            with accumulate:
                (model(input_ids=own, labels=own).loss / 2).backward()
        norms.append(float(clip(model.parameters(), 0.1)))
        grads = gradients(model)
        for each in made:
            each.step()
            each.zero_grad()
    return {"norms": torch.tensor(norms, dtype=torch.float64), "grads": grads, "parameters": parameters(model)}


def state(model: nn.Module, made: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """Parameters, and the state of element-wise optimizers by name."""
    name_of = {p: name for name, p in model.named_parameters()}
    return parameters(model) | {
        f"{i}/{name_of[p]}/{key}": whole(value)
        for i, each in enumerate(made)
        for p, entries in each.state.items()
        for key, value in entries.items()
        if isinstance(value, torch.Tensor)
    }


def far_apart(found: dict[str, float], bound: float) -> dict[str, float]:
    """The distances that are not below ``bound``."""
    return {what: distance for what, distance in found.items() if not distance < bound}


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest difference of a tensor, over the largest element of the expected one."""
    assert found.keys() == expected.keys()
    return max(float((found[n] - e).abs().max() / e.abs().max().clamp_min(1e-30)) for n, e in expected.items())
