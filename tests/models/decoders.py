"""Decoder-only language models: dense, mixtures of experts, state-space and hybrid."""

from __future__ import annotations

from functools import partial
from typing import Any

from models.case import Case
from models.hub import TEXT, hub_case


def _decoder(name: str, *, model: str = "", config: str = "", kind: str = "decoder", **options: Any) -> Case:
    return hub_case(model or f"{name}ForCausalLM", config or f"{name}Config", TEXT | options, kind=kind)


_experts = partial(_decoder, kind="experts")
_state_space = partial(_decoder, kind="state-space")

_GROUPED = {"num_key_value_heads": 2}
_MOE = _GROUPED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}

DENSE: dict[str, Case] = {
    "llama": _decoder("Llama", **_GROUPED),
    "mistral": _decoder("Mistral", **_GROUPED),
    "qwen2": _decoder("Qwen2", **_GROUPED),
    "qwen3": _decoder("Qwen3", head_dim=8, **_GROUPED),
    "gemma": _decoder("Gemma", head_dim=8, **_GROUPED),
    "gemma2": _decoder("Gemma2", head_dim=8, **_GROUPED),
    "gemma3": _decoder("Gemma3", config="Gemma3TextConfig", head_dim=8, **_GROUPED),
    "phi": _decoder("Phi"),
    "phi3": _decoder("Phi3", **_GROUPED),
    "gpt2": _decoder("GPT2", model="GPT2LMHeadModel"),
    "gpt_neo": _decoder("GPTNeo", attention_types=[[["global", "local"], 1]], num_layers=2, num_heads=4),
    "gpt_neox": _decoder("GPTNeoX"),
    "gptj": _decoder("GPTJ", rotary_dim=4),
    "gpt_bigcode": _decoder("GPTBigCode"),
    "codegen": _decoder("CodeGen", rotary_dim=4),
    "opt": _decoder("OPT", ffn_dim=64, word_embed_proj_dim=32),
    "bloom": _decoder("Bloom"),
    "falcon": _decoder("Falcon"),
    "stablelm": _decoder("StableLm", **_GROUPED),
    "olmo": _decoder("Olmo", **_GROUPED),
    "olmo2": _decoder("Olmo2", **_GROUPED),
    "cohere": _decoder("Cohere", **_GROUPED),
    "starcoder2": _decoder("Starcoder2", **_GROUPED),
    "glm": _decoder("Glm", head_dim=8, **_GROUPED),
    "granite": _decoder("Granite", **_GROUPED),
    "smollm3": _decoder("SmolLM3", **_GROUPED),
    "nemotron": _decoder("Nemotron", **_GROUPED),
    "persimmon": _decoder("Persimmon"),
    "helium": _decoder("Helium", head_dim=8, **_GROUPED),
}

EXPERTS: dict[str, Case] = {
    "mixtral": _experts("Mixtral", num_local_experts=4, **_GROUPED),
    "qwen2_moe": _experts("Qwen2Moe", shared_expert_intermediate_size=16, **_MOE),
    "qwen3_moe": _experts("Qwen3Moe", **_MOE),
    "olmoe": _experts("Olmoe", **_MOE),
    "granite_moe": _experts("GraniteMoe", num_local_experts=4, **_GROUPED),
    "gpt_oss": _experts("GptOss", num_local_experts=4, head_dim=8, **_GROUPED),
    "deepseek_v3": _experts(
        "DeepseekV3",
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        num_key_value_heads=4,
    ),
}

STATE_SPACE: dict[str, Case] = {
    "mamba": _state_space("Mamba", state_size=4),
    "mamba2": _state_space("Mamba2", state_size=4, num_heads=8, head_dim=8, n_groups=2, chunk_size=8),
    "falcon_mamba": _state_space("FalconMamba", state_size=4),
    "jamba": _state_space(
        "Jamba",
        mamba_d_state=4,
        mamba_dt_rank=4,
        num_experts=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        **_GROUPED,
    ),
    "recurrent_gemma": _state_space("RecurrentGemma", num_hidden_layers=3, lru_width=32, **_GROUPED),
    "lfm2": _state_space("Lfm2", layer_types=["conv", "full_attention"], **_GROUPED),
}
