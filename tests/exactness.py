"""Steps of twelve microbatches of fixed content, on any mesh and in any split, for tests of ``shard(exact=True)``."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import forks
import trueshard
from gathering import whole
from models.handmade import Scalar, TiedBlocks, Tiny
from trueshard.optim.exact import loss_on_grid

MICROBATCHES, ROWS, LENGTH, VOCABULARY = 12, 2, 6, 61
CLIP = 0.01


def gpt2(dropout: float = 0.0) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": LENGTH, "vocab_size": VOCABULARY}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout))


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


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "gpt2": gpt2,
    "gpt2_with_dropout": lambda: gpt2(0.1),
    "mixtral": mixtral,
    "vit": vit,
    "lora": lora,
    "tied": lambda: llama(tie=True),
    "uneven": Tiny,  # fewer rows than ranks
    "whole_ones": Scalar,  # parameters that FSDP2 cannot shard
    "tied_blocks": TiedBlocks,
}


def terms(model: nn.Module, number: int) -> int:
    """How many targets a microbatch has: tokens of different numbers, or rows."""
    is_language_model = hasattr(model, "config") and not hasattr(model, "vit")
    return ROWS * (LENGTH - 1) - number % 3 if is_language_model else ROWS


def summed_loss(model: nn.Module, step: int, number: int) -> torch.Tensor:
    """The loss of one microbatch, summed over its ``terms``."""
    generator = torch.Generator().manual_seed(1000 * step + number)
    if hasattr(model, "vit"):
        images = torch.randn(ROWS, 3, 8, 8, generator=generator)
        labels = torch.randint(0, 5, (ROWS,), generator=generator)
        return F.cross_entropy(model(images).logits.float(), labels, reduction="sum")
    if not hasattr(model, "config"):
        x = torch.randn(ROWS, 8, generator=generator)
        return model(x).float().sub(x.roll(1, 1)).pow(2).sum()
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
    logits = model(ids, use_cache=False).logits[:, :-1].float().flatten(0, 1)
    return F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="none")[: terms(model, number)].sum()


def digest(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """A digest of the bits of each tensor, whole."""
    found = whole(tensors)
    return {
        name: hashlib.sha256(t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:12]
        for name, t in found.items()
    }


def dealt(rank: int, world_size: int, microbatches: int, order: str = "in turn") -> list[int]:
    """Numbers of a rank's microbatches, of those of all ranks, in the order in which it computes them."""
    if order == "strided":
        return list(range(rank, microbatches, world_size))
    own = range(rank * microbatches // world_size, (rank + 1) * microbatches // world_size)
    return list(reversed(own)) if order == "reversed" else list(own)


@contextmanager
def unreduced(model: Any, last: bool, order: str) -> Iterator[None]:
    """Both ways to say which backward reduces: this library's and FSDP2's."""
    if order == "strided":
        model.set_requires_gradient_sync(last)
        yield
    else:
        with trueshard.accumulate(model, last=last):
            yield


def train(
    rank: int,
    world_size: int,
    name: str,
    steps: int,
    options: dict[str, Any] | None = None,
    shape: tuple[int, int] | None = None,
    microbatches: int = MICROBATCHES,
    order: str = "in turn",
    forwards: int = 1,
) -> dict[str, Any]:
    """Digests of gradients after each step's last backward, losses, norms; hashes of parameters and state.

    ``options``: of ``shard()``; ``shape``: of a mesh (replicate, shard). ``microbatches``: of a step of all ranks, of
    ``forwards`` forwards each.
    """
    torch.manual_seed(0)
    model = MODELS[name]()
    made = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    mesh = shape and init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    trueshard.shard(model, made, mesh=mesh, **{"exact": True} | (options or {}))
    model.train()
    own = dealt(rank, world_size, microbatches, order)
    report: dict[str, Any] = {}
    for step in range(steps):
        numbers = [[forwards * number + part for part in range(forwards)] for number in own]
        mean = trueshard.token_mean(model, sum(terms(model, each) for several in numbers for each in several))
        total = torch.zeros((), dtype=torch.float64)
        for number, parts in zip(own, numbers, strict=True):
            with trueshard.sample_rng(0, step, number), unreduced(model, number == own[-1], order):
                loss = torch.stack([summed_loss(model, step, part) for part in parts]).sum()
                mean(loss).backward()
            total += loss_on_grid(loss)
        report[f"loss {step}"] = mean.value(total)
        report[f"gradients {step}"] = digest({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        report[f"norm {step}"] = float(trueshard.clip_grad_norm_(model.parameters(), CLIP))
        made.step()
        made.zero_grad()
        report[f"state {step}"] = dict(trueshard.state_hash(model, made))
    return report


def verified(file: Path, exact: Any) -> dict[str, Any]:
    """The report of ``verify`` on ``make`` of a file, in a program of its own, whose processes are forks."""
    code = f"import sys, trueshard; print(trueshard.verify(sys.argv[1], nproc=2, exact={exact!r}).to_json())"
    done = forks.run([sys.executable, "-c", code, f"{file}:make"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
