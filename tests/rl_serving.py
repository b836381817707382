"""What the tests of the vLLM engine share: a tiny sharded model, its log-probabilities, and requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import trueshard
from trueshard.train.rl.config import RolloutSection
from trueshard.train.rl.sampler import PromptEncoder
from trueshard.train.rl.samples import Request, Sampling
from trueshard.train.rl.vllm import VLLMEngine

TEXT = "the quick brown fox jumps over the lazy dog 0123456789. " * 20


def tiny() -> tuple[Any, Any]:
    """A Llama of two layers, and a tokenizer; the same in every process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from trueshard.train.data.tokenizer import train_tokenizer

    tokenizer = train_tokenizer([TEXT], 280, "text")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    ends = {"bos_token_id": None, "pad_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=280, **sizes, **heads, **ends)).eval(), tokenizer


def with_adapter() -> tuple[Any, Any]:
    """The same model with LoRA, whose values are not zero."""
    from peft import LoraConfig, get_peft_model

    model, tokenizer = tiny()
    targets = ["q_proj", "v_proj", "down_proj"]
    return get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False)), tokenizer


def change(model: Any, by: float) -> None:
    """What a step of an optimizer does: every trainable parameter becomes another."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(1 + by)


def requests(samples: int, most: int = 6) -> list[Request]:
    """Two prompts, and so many samples of each."""
    prompts = ([5, 6, 7], [50, 51])
    return [
        Request((1, prompt, sample), ids, most=most) for prompt, ids in enumerate(prompts) for sample in range(samples)
    ]


def made(folder: str, url: str, build: Any = tiny, **more: Any) -> tuple[Any, VLLMEngine]:
    """A sharded model, and its engine."""
    model, tokenizer = build()
    trueshard.shard(model)
    section = RolloutSection(engine="vllm", url=url, **{"batch": 4, "timeout": 30, **more})
    return model, VLLMEngine(section, model, PromptEncoder(tokenizer), Path(folder))


def answers(rank: int, world_size: int, folder: str, url: str, limit: float = 30) -> dict[str, Any]:
    """What the engine generates, in several ways."""
    model, engine = made(folder, url, timeout=limit)
    engine.update(0)
    found: dict[str, Any] = {"first": engine.generate(requests(3), Sampling(seed=7)), "mismatch": engine.mismatch}
    found["again"] = engine.generate(requests(3), Sampling(seed=7))
    found["other seed"] = engine.generate(requests(3), Sampling(seed=8))
    begun = engine.start(requests(3)[::-1], Sampling(seed=7))
    found["reversed"] = engine.finish(begun)[::-1]
    found["stopped"] = engine.generate(requests(1, most=30), Sampling(seed=7, stop=["o"]))
    change(model, 0.1)
    engine.update(1)
    found["after a step"] = engine.generate(requests(3), Sampling(seed=7))
    found["kept"] = sorted(path.name for path in Path(folder, "rollout").iterdir())
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    engine.close()
    return found
