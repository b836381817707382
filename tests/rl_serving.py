"""What the tests of the vLLM engine share: a tiny sharded model, its log-probabilities, and requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

import trueshard
from trueshard.checkpoint import layout
from trueshard.train.config import RolloutSection
from trueshard.train.rl.samples import Request, Sampling
from trueshard.train.rl.vllm import Logprobs, VLLMEngine, probe_bound

PROBES = [[5, 6, 7, 8, 9, 40, 41, 42], [100, 20, 30, 3]]
TEXT = "the quick brown fox jumps over the lazy dog 0123456789. " * 20


def weights(model: Any, *, adapters: str = "merged", naming: str = "saved") -> Iterator[tuple[list[str], list[Any]]]:
    """A stand-in for `trueshard.weights`, until that is there: each parameter a group; merges no adapters."""
    keys = layout.adapted_keys(model, "") or {}
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        if adapters == "merged" or keys[name].stem == "adapter_model":
            yield [keys[name].key if keys else name], [whole.detach()]


if "weights" not in trueshard.__all__:
    trueshard.weights = weights


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


def engine_of(model: Any, tokenizer: Any, folder: Path, url: str, **more: Any) -> VLLMEngine:
    def score(texts: list[list[int]]) -> Logprobs:
        with torch.no_grad():
            of_all = [model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1) for ids in texts]
        return [each[torch.arange(len(ids) - 1), ids[1:]].tolist() for each, ids in zip(of_all, texts, strict=True)]

    section = RolloutSection(engine="vllm", url=url, **{"batch": 4, "timeout": 30, **more})
    return VLLMEngine(section, model, tokenizer, folder, PROBES, probe_bound(torch.float32), score)


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
    return model, engine_of(model, tokenizer, Path(folder), url, **more)


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
