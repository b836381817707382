"""What MFU is made of: the formula against torch's counter of operations, and the peak by a device's own name."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from trueshard.planner.hardware import hardware
from trueshard.train.metrics.step_metrics import flops_per_token, peak_flops

LENGTH = 64


def llama(tied: bool = False) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_key_value_heads=4, vocab_size=500, tie_word_embeddings=tied)
    config._attn_implementation = "eager"
    return LlamaForCausalLM(config)


def counted(model: torch.nn.Module) -> float:
    """Operations a token of forward and backward, as torch counts them."""
    tokens = torch.randint(0, 500, (2, LENGTH))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, labels=tokens).loss.backward()
    return counter.get_total_flops() / tokens.numel()


@pytest.mark.parametrize("tied", [False, True])
def test_the_formula_is_what_torch_counts(tied: bool) -> None:
    model = llama(tied)
    assert flops_per_token(model, LENGTH) == pytest.approx(counted(model), rel=0.01)


def test_a_frozen_parameter_costs_no_gradient_of_its_own() -> None:
    model = llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("embed" in name)
    assert flops_per_token(model, LENGTH) == pytest.approx(counted(model), rel=0.01)


def test_there_is_no_figure_where_the_formula_does_not_hold() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = MixtralConfig(**sizes, num_key_value_heads=4, vocab_size=100, num_local_experts=2)
    assert flops_per_token(MixtralForCausalLM(config), LENGTH) is None
    assert flops_per_token(torch.nn.Linear(2, 2), LENGTH) is None


def test_a_cpu_has_no_peak() -> None:
    assert peak_flops(torch.device("cpu"), torch.bfloat16) is None


def test_the_catalogue_has_the_peak_by_dtype() -> None:
    assert hardware("h100").peak("bfloat16") == 989.4e12
