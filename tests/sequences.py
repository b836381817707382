"""Tiny language models in float64, and batches of sequences: plain, packed, padded; for the context axis."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from models.case import seeded
from models.hub import TEXT, quiet

IGNORED = -100
LENGTH = 13
"""Positions of a sequence: no number of ranks divides them."""
ROWS, STEPS = 4, 3


def exact_norm(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    """RMSNorm in the dtype of its input: transformers' computes in float32."""
    return self.weight * (hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


def build(name: str, heads: int = 4, key_value_heads: int = 2, attention: str = "sdpa", **options: Any) -> nn.Module:
    import transformers

    name, _, adapter = name.partition("+")
    model, config = {
        "gpt2": ("GPT2LMHeadModel", "GPT2Config"),
        "llama": ("LlamaForCausalLM", "LlamaConfig"),
        "qwen3": ("Qwen3ForCausalLM", "Qwen3Config"),
        "mistral": ("MistralForCausalLM", "MistralConfig"),
        "gemma2": ("Gemma2ForCausalLM", "Gemma2Config"),
    }[name]
    fields = TEXT | {"hidden_size": 8 * heads, "num_attention_heads": heads}
    if name != "gpt2":
        fields |= {"num_key_value_heads": key_value_heads, "head_dim": 8}
    settings = quiet(getattr(transformers, config)(**fields | options))
    settings._attn_implementation = attention
    made = seeded(0, lambda: getattr(transformers, model)(settings)).double()
    if adapter:
        import peft

        adapter_config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        made = seeded(1, lambda: peft.get_peft_model(made, adapter_config)).double()
    for module in made.modules():
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            module.forward = exact_norm.__get__(module)
    return made


def batch_of(kind: str, seed: int) -> dict[str, torch.Tensor]:
    """ROWS sequences: plain, packed from documents, padded at their ends, or plain of 12 positions (even)."""
    ids = torch.randint(3, 64, (ROWS, 12 if kind == "even" else LENGTH), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[0, 2:7] = IGNORED
    if kind in ("plain", "even"):
        return {"input_ids": ids, "labels": labels}
    if kind == "packed":
        ends = torch.tensor([3, 5, 8, 11]).unsqueeze(1)
        places = torch.arange(LENGTH).expand(ROWS, -1)
        positions = torch.where(places < ends, places, places - ends)
        return {"input_ids": ids, "labels": labels, "position_ids": positions}
    mask = (torch.arange(LENGTH) < torch.tensor([[13], [9], [4], [1]])).long()
    return {"input_ids": ids, "labels": labels.masked_fill(mask == 0, IGNORED), "attention_mask": mask}


def summed(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
