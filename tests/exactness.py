"""Steps of twelve microbatches of fixed content, on any mesh and in any split, for tests of ``shard(exact=True)``."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import trueshard
from gathering import whole
from models.handmade import Scalar, TiedBlocks, Tiny

MICROBATCHES, ROWS, LENGTH, VOCABULARY = 12, 2, 6, 61


def gpt2(dropout: float = 0.0) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": LENGTH, "vocab_size": VOCABULARY}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout))


def gpt2_with_dropout() -> nn.Module:
    return gpt2(0.1)


DECODER = {
    "hidden_size": 16,
    "intermediate_size": 23,  # and a vocabulary of 61: uneven over any number of ranks
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": VOCABULARY,
}


def llama(tie: bool = False) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**DECODER, tie_word_embeddings=tie))


def tied() -> nn.Module:
    return llama(tie=True)


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    model = MixtralForCausalLM(MixtralConfig(**DECODER, num_local_experts=4, num_experts_per_tok=2))
    model.set_experts_implementation("eager")  # grouped products want sizes that are multiples of 4
    return model


def lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
    return ViTForImageClassification(ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=5))


def uneven() -> nn.Module:
    """Fewer rows than ranks."""
    return Tiny()


def whole_ones() -> nn.Module:
    """Parameters that FSDP2 cannot shard."""
    return Scalar()


def tied_blocks() -> nn.Module:
    return TiedBlocks()


MODELS: dict[str, Callable[[], nn.Module]] = {
    build.__name__: build
    for build in (llama, gpt2, gpt2_with_dropout, mixtral, vit, lora, tied, uneven, whole_ones, tied_blocks)
}


def summed_loss(model: nn.Module, step: int, number: int) -> tuple[torch.Tensor, int]:
    """The loss of one microbatch, summed, and the number of its terms."""
    generator = torch.Generator().manual_seed(1000 * step + number)
    if hasattr(model, "vit"):
        images = torch.randn(ROWS, 3, 8, 8, generator=generator)
        labels = torch.randint(0, 5, (ROWS,), generator=generator)
        return F.cross_entropy(model(images).logits.float(), labels, reduction="sum"), ROWS
    if not hasattr(model, "config"):
        x = torch.randn(ROWS, 8, generator=generator)
        return model(x).float().sub(x.roll(1, 1)).pow(2).sum(), ROWS
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
    count = ROWS * (LENGTH - 1) - number % 3  # of different numbers of targets
    losses = F.cross_entropy(
        model(ids, use_cache=False).logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    )
    return losses[:count].sum(), count


def digest(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """A digest of the bits of each tensor, whole."""
    found = whole(tensors)
    return {
        name: hashlib.sha256(t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:12]
        for name, t in found.items()
    }


def train(
    rank: int,
    world_size: int,
    name: str,
    steps: int,
    options: dict[str, Any],
    shape: tuple[int, int] | None = None,
    microbatches: int = MICROBATCHES,
) -> dict[str, Any]:
    """Digests of gradients after each backward, and of parameters and state at the end.

    ``options``: of ``shard()``; ``shape``: of a mesh (replicate, shard). ``microbatches``: of a step of all ranks.
    """
    torch.manual_seed(0)
    model = MODELS[name]()
    made = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    mesh = shape and init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    trueshard.shard(model, made, mesh=mesh, **{"exact": True, **options})
    model.train()
    own = range(rank * microbatches // world_size, (rank + 1) * microbatches // world_size)
    report: dict[str, Any] = {}
    for step in range(steps):
        counts = sum(ROWS * (LENGTH - 1) - number % 3 for number in own)
        if not hasattr(model, "config") or name == "vit":
            counts = ROWS * len(own)
        mean = trueshard.token_mean(model, counts)
        total = torch.zeros((), dtype=torch.float64)
        for number in own:
            with trueshard.sample_rng(0, step, number), trueshard.accumulate(model, last=number == own[-1]):
                loss, _ = summed_loss(model, step, number)
                mean(loss).backward()
            total += loss.detach().double()
        report[f"loss {step}"] = mean.value(total)
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        report[f"gradients {step}"] = digest(grads)
        report[f"norm {step}"] = float(trueshard.clip_grad_norm_(model.parameters(), 0.1))
        made.step()
        made.zero_grad()
        report[f"parameters {step}"] = dict(trueshard.state_hash(model))
    return report | {"state": dict(trueshard.state_hash(model, made))}
