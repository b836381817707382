"""The tensor axis under PEFT's adapters: every kind trains what one process trains, or is refused by its name."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

import trueshard
from gathering import gradients
from messages import naming
from parity import Ranks
from tensor_models import MODELS, distance, llama

LAYERS = ["q_proj", "o_proj", "up_proj", "down_proj"]
SIZES = {"intermediate_size": 48, "vocab_size": 64}
"""of which most kinds of adapters want a divisor"""

KINDS: dict[str, dict[str, Any]] = {
    "LORA": {},
    "LORA, DoRA": {"use_dora": True},
    "LORA, DoRA of rows": {"use_dora": True, "target_modules": ["o_proj", "down_proj"]},
    "LORA, ends": {"target_modules": ["embed_tokens", "q_proj", "lm_head"]},
    "LORA, DoRA of ends": {"use_dora": True, "target_modules": ["embed_tokens", "lm_head"]},
    "LORA, head": {"modules_to_save": ["lm_head"]},
    "LORA, ends saved": {"modules_to_save": ["lm_head", "embed_tokens", "input_layernorm"]},
    "LORA, tokens": {"trainable_token_indices": [1, 5]},
    "ADALORA": {"total_step": 100, "tinit": 1, "tfinal": 1, "init_r": 4, "target_r": 2},
    "BOFT": {"boft_block_size": 4},
    "C3A": {"block_size": 4},
    "FOURIERFT": {"n_frequency": 20},
    "HRA": {},
    "IA3": {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
    "LOHA": {},
    "LOKR": {},
    "MISS": {"r": 4},
    "OFT": {"oft_block_size": 4, "r": 0},
    "PROMPT_TUNING": {"num_virtual_tokens": 3},
    "P_TUNING": {"num_virtual_tokens": 3},
    "RANDLORA": {},
    "SHIRA": {"r": 4},
    "TRAINABLE_TOKENS": {"target_modules": ["embed_tokens"], "token_indices": [1, 2]},
    "VERA": {},
    "HIRA": {},
    "DELORA": {},
    "GRALORA": {},
    "PSOFT": {},
    "TINYLORA": {},
    "PVERA": {},
    "BEFT": {},
    "LILY": {},
    "UNILORA": {},
    "GLORA": {},
    "VBLORA": {"num_vectors": 8, "vector_length": 4},
    "ROAD": {"group_size": 4},
    "WAVEFT": {"n_frequency": 20},
    "ADAPTION_PROMPT": {"adapter_len": 3, "adapter_layers": 1, "target_modules": "self_attn"},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "PREFIX_TUNING": ({"num_virtual_tokens": 3}, "PREFIX_TUNING"),
    "LORA, parameters": (
        {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
        "target_parameters",
    ),
    "LORA, dropout": ({"lora_dropout": 0.1, "target_modules": ["o_proj"]}, "o_proj.lora_dropout.default"),
}
OFTEN = ("LORA, DoRA", "ADALORA", "IA3", "LORA, head")


def build(kind: str, words: dict[str, Any]) -> nn.Module:
    """An adapted model, of which nothing trainable is zero."""
    import peft
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    torch.manual_seed(0)
    config = PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType[kind.partition(",")[0]]]
    words = dict(words)
    if "target_modules" in inspect.signature(config).parameters:
        words = {"target_modules": LAYERS} | words
    base = MODELS["mixtral"]() if "target_parameters" in words else llama(**SIZES | words.pop("sizes", {}))
    model = peft.get_peft_model(base, config(task_type="CAUSAL_LM", **words)).double()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
            parameter.data += 0.1 * noise.double()
    return model


def apart(rank: int, world_size: int, kind: str, words: dict[str, Any], options: dict[str, Any]) -> float:
    """Distance of the loss and of gradients from one process, over the same batch."""
    plain, model = build(kind, words), build(kind, words)
    trueshard.shard(model, tensor={"ranks": world_size, **options})
    ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))
    found = []
    for each in (model, plain):
        torch.manual_seed(1)
        loss = each(input_ids=ids).logits.square().mean()
        loss.backward()
        found.append(gradients(each) | {"loss": loss.detach()})
    assert len(found[0]) > 1
    return distance(*found)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in OFTEN else [pytest.mark.rest]) for kind in KINDS]
)
def test_every_kind_of_adapter_trains_as_on_one_process(kind: str, ranks2: Ranks) -> None:
    # Mixture models compute their routers in float32.
    assert max(ranks2.run(apart, kind, KINDS[kind], {})) < (1e-5 if "parameters" in kind else 1e-9)


@pytest.mark.rest
@pytest.mark.parametrize("kind", ["LORA, DoRA", "OFT", "LORA, ends saved"])
def test_adapters_where_ranks_hold_parts_of_sequences(kind: str, ranks2: Ranks) -> None:
    assert max(ranks2.run(apart, kind, KINDS[kind], {"sequence": True})) < 1e-9


@pytest.mark.rest
@pytest.mark.parametrize("kind", ["LORA", "LORA, DoRA", "ADALORA"])
def test_adapters_on_three_ranks_whose_parts_are_uneven(kind: str, ranks3: Ranks) -> None:
    sizes = {"hidden_size": 36, "intermediate_size": 50, "num_attention_heads": 6, "num_key_value_heads": 6}
    assert max(ranks3.run(apart, kind, KINDS[kind] | {"sizes": sizes}, {})) < 1e-9


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_had_is_refused_by_the_name_of_the_adapter(kind: str, ranks2: Ranks) -> None:
    words, name = REFUSED[kind]
    ranks2.raises(apart, kind, words, {}, match=naming("tensor", name))
