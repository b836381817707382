"""Layers that are recurrent over tokens are forecast by their published kernels, or refused by name."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from messages import naming
from trueshard.options import Options
from trueshard.planner.choose_plan import solve
from trueshard.planner.inputs.workloads import workload_of
from trueshard.planner.planning import Request
from trueshard.planner.simulation.recurrences import KERNELS, MANY
from trueshard.planner.simulation.simulate import Simulation, simulate
from trueshard.planner.trace import Allocation, Kernel, Phase
from trueshard.planner.workload import Job

TOKENS = 4096
SMALL = {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2, "pad_token_id": 0}
HYBRID = {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 64}
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Mamba": {**SMALL, "state_size": 16},
    "FalconMamba": {**SMALL, "state_size": 16},
    "Mamba2": {**SMALL, "state_size": 16, "num_heads": 4, "head_dim": 32, "n_groups": 1, "chunk_size": 64},
    "Jamba": {**HYBRID, **EXPERTS, "mamba_dt_rank": 8, "attn_layer_period": 2, "attn_layer_offset": 1},
    "Zamba": {**HYBRID, "num_hidden_layers": 6, "mamba_dt_rank": 8, "attn_layer_period": 3, "attn_layer_offset": 2},
    "Bamba": {**HYBRID, **MAMBA2, "attn_layer_indices": [1]},
    "FalconH1": {**HYBRID, **MAMBA2, "mamba_d_ssm": 128},
    "GraniteMoeHybrid": {**HYBRID, **MAMBA2, "num_local_experts": 4, "layer_types": ["mamba", "attention"]},
    "Qwen3Next": {**HYBRID, **EXPERTS, **DELTA, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "OlmoHybrid": {**HYBRID, **DELTA},
    "Lfm2": {**HYBRID, "layer_types": ["conv", "full_attention"]},
    "Rwkv": {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2, "context_length": TOKENS},
}
"""Tiny models, by the beginning of their classes' names."""
KINDS = ("Mamba", "Mamba2", "Qwen3Next")


def family(name: str) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{name}Config")(**FAMILIES[name], use_cache=False)
    return getattr(transformers, f"{name}ForCausalLM")(config)


def simulated(make: Callable[[], nn.Module], tokens: int = TOKENS, **options: Any) -> Simulation:
    workload = workload_of(make, sequence=tokens)
    options = {"mixed_precision": "bf16", "reshard_after_forward": "default", **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return simulate(Job(workload, (2,), choices=Options(**options)))


def steps(made: Simulation, phase: Phase) -> list[Kernel]:
    kernels = [event for event in made.steady if isinstance(event, Kernel)]
    return [kernel for kernel in kernels if kernel.op.startswith("fused.") and kernel.place.phase == phase]


def operations(made: Simulation, phase: Phase, *, model: bool = False) -> int:
    """Of one layer in a phase; `model`: without what backward computes again."""
    return sum(kernel.flops for kernel in steps(made, phase) if not (model and kernel.recomputed))


def kept(made: Simulation) -> int:
    """Bytes that steps of kernels made in forward and backward finds there."""
    held = [event for event in made.steady if isinstance(event, Allocation) and event.what.startswith("fused.")]
    return sum(each.bytes for each in held if each.place.phase == "forward" and each.kind == "activations")


@pytest.mark.parametrize(
    "name", ["Jamba", *(pytest.param(n, marks=pytest.mark.rest) for n in FAMILIES if n != "Jamba")]
)
def test_each_family_is_forecast_by_kernels(name: str) -> None:
    made = simulated(lambda: family(name))
    assert steps(made, "forward")
    assert steps(made, "backward")
    assert KERNELS in made.warnings
    assert len(made.steady.events) < 4000  # a loop over tokens has more in one layer


@pytest.mark.rest
@pytest.mark.parametrize("how", [{"activation_checkpointing": "full"}, {"compile": True}])
@pytest.mark.parametrize("name", KINDS)
def test_kernels_are_recomputed_and_compiled_like_other_operators(name: str, how: dict[str, Any]) -> None:
    plain, other = simulated(lambda: family(name)), simulated(lambda: family(name), **how)
    again = "activation_checkpointing" in how
    assert operations(other, "backward") == operations(plain, "backward") + again * operations(plain, "forward")
    assert operations(other, "backward", model=True) == operations(plain, "backward", model=True)
    assert (kept(other) < kept(plain)) == again


# By the kernels' sources: b = 1 sample of t tokens, bfloat16


def one_layer(name: str, **changes: Any) -> Callable[[], nn.Module]:
    import transformers

    config = {**FAMILIES[name], "num_hidden_layers": 1, **changes}
    return lambda: getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**config))


def test_mamba_keeps_and_computes_what_its_kernel_does() -> None:
    made = simulated(one_layer("Mamba"))
    t, o, d, n, v, r = TOKENS, 64, 128, 16, 4, 4
    m, chunks = r + 2 * n, 2
    # MambaInnerFn: xz, x_dbl, B, C, out, and in float32 two numbers a state of each 2,048 tokens
    assert kept(made) == 2 * t * (2 * d + m + 2 * n + d) + 4 * d * chunks * 2 * n
    scan, conv, inner, step, out = 8 * t * d * n, 2 * t * d * v, 2 * t * d * m, 2 * t * d * r, 2 * t * d * o
    assert operations(made, "forward") == scan + conv + inner + step + out
    assert operations(made, "backward", model=True) == 26 * t * d * n + 3 * conv + 2 * inner + 2 * step + 2 * out
    assert operations(made, "backward") - operations(made, "backward", model=True) == conv + step


@pytest.mark.rest
def test_mamba_2_keeps_and_computes_what_its_kernel_does() -> None:
    made = simulated(one_layer("Mamba2"))
    t, o, h, p, n, q, v, g = TOKENS, 64, 4, 32, 16, 64, 4, 1
    d = h * p
    # MambaSplitConv1dScanCombinedFn: zxbcdt, which the projection made, the scan's output, and rstd in float32
    assert kept(made) == 2 * t * d + 4 * t * g
    conv, project = 2 * t * (d + 2 * g * n) * v, 2 * t * d * o
    scores, inside, states = 2 * t * q * g * n, 2 * t * q * d, 2 * t * d * n
    assert operations(made, "forward") == conv + project + scores + inside + 2 * states
    again = conv + scores + states
    assert operations(made, "backward") == again + 3 * conv + 2 * project + 2 * scores + 3 * inside + 4 * states
    assert operations(made, "backward", model=True) == operations(made, "backward") - again


@pytest.mark.rest
def test_the_gated_delta_rule_keeps_and_computes_what_its_kernel_does() -> None:
    made = simulated(one_layer("Qwen3Next", num_hidden_layers=2))
    t, h, k, i, v, q, width = TOKENS, 2, 16, 4, 32, 64, 4
    channels = 2 * h * k + i * v
    # ChunkGatedDeltaRuleFunction: q, k, v, A, and in float32 g and rstd; CausalConv1dFn: its input, which torch made
    assert kept(made) == 2 * t * (channels + i * q) + 4 * t * (i + 2 * h)
    chunk_k, chunk_v, states = 2 * t * i * q * k, 2 * t * i * q * v, 2 * t * i * k * v
    conv = 2 * t * channels * width
    assert operations(made, "forward") == conv + 3 * chunk_k + 2 * chunk_v + 3 * states
    again = chunk_k + chunk_v + 2 * states
    made_of = 3 * conv + (1 + 2 + 5) * chunk_k + (1 + 1 + 2) * chunk_v + 2 * 2 * t * i * q * q + (3 + 3) * states
    assert operations(made, "backward", model=True) == made_of
    assert operations(made, "backward") == made_of + again


@pytest.mark.rest
def test_rwkv_keeps_and_computes_what_its_kernel_does() -> None:
    made = simulated(one_layer("Rwkv", num_hidden_layers=2))
    assert kept(made) == 2 * (2 * TOKENS * 64 + 4 * 64)  # the output, and the decay in float32
    assert operations(made, "forward") == 2 * 23 * TOKENS * 64
    assert operations(made, "backward") == 2 * 60 * TOKENS * 64


# Refused by name


class Cell(nn.Module):
    """A recurrence of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.gate, self.head = nn.Embedding(50, 8), nn.Linear(8, 8), nn.Linear(8, 50)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, state, states = self.table(ids), ids.new_zeros(1, dtype=torch.float32), []
        for token in x.unbind(1):
            state = token + self.gate(state.expand_as(token)).tanh()
            states.append(state)
        return self.head(torch.stack(states, 1))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Cell()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.inner(ids)


def planned(model: Any, **options: Any) -> Any:
    words = {"reshard_after_forward": "default", "activation_checkpointing": "none", "hardware": "h100", "ranks": 2}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return solve(Request(model=model, **{**words, **options}))


def test_a_loop_over_tokens_is_refused_by_the_name_of_its_module() -> None:
    parts = ("inner: Cell", "test_planner_recurrent.py:", "loops over tokens", "--sequence")
    with pytest.raises(ValueError, match=naming(*parts)) as caught:
        planned(lambda: Model(), sequence=4 * MANY)
    assert "\n" not in str(caught.value)


@pytest.mark.rest
def test_a_short_loop_is_simulated_as_it_would_run() -> None:
    assert planned(lambda: Model(), sequence=MANY // 4).forecast.flops_per_step > 0


@pytest.mark.rest
def test_layers_without_a_known_kernel_are_refused_by_name(tmp_path: Path) -> None:
    fields = {**HYBRID, "lru_width": 64, "num_hidden_layers": 3}
    with pytest.raises(ValueError, match=naming("layers.0.temporal_block.rg_lru: RecurrentGemmaRglru loops")):
        planned(configured(tmp_path, model_type="recurrent_gemma", **fields), sequence=TOKENS)
    with pytest.raises(ValueError, match=naming("layers.0.self_attn: KimiLinearDelta", "chunk_kimi_delta_attention")):
        planned(configured(tmp_path, model_type="kimi_linear", **HYBRID), sequence=TOKENS)


def configured(folder: Path, **fields: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


@pytest.mark.rest
def test_on_a_cpu_no_kernel_is_taken() -> None:
    made = planned(lambda: family("Mamba"), hardware="cpu", sequence=16)
    assert KERNELS not in made.assumptions


# Multi-token prediction


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model_type": "deepseek_v3", "num_nextn_predict_layers": 1}, "num_nextn_predict_layers=1"),
        ({"model_type": "glm4_moe", "num_nextn_predict_layers": 2}, "num_nextn_predict_layers=2"),
        ({"model_type": "qwen3_next"}, "mtp.*"),
        ({"model_type": "deepseek_v3", "num_nextn_predict_layers": 0}, None),
        ({"model_type": "llama"}, None),
    ],
)
def test_layers_of_multi_token_prediction_are_said_to_be_left_out(
    fields: dict[str, Any], said: str | None, tmp_path: Path
) -> None:
    sentences = [each for each in workload_of(configured(tmp_path, **fields)).assumptions if "Multi-token" in each]
    assert [said in each for each in sentences] == ([] if said is None else [True])
