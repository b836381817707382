"""What fake tensors cannot tell a simulation: how much is selected, which kernels a device has, several meshes."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from planning import OPTIMIZERS, Setting
from resting import all_but
from trueshard import _torch
from trueshard.options import Options
from trueshard.planner.simulation.fake_values import EQUAL_SHARES, EVERYTHING
from trueshard.planner.simulation.recorder import Recorder
from trueshard.planner.simulation.simulate import Simulation, simulate
from trueshard.planner.trace import Allocation, Communication, Kernel
from trueshard.planner.workload import Job, Workload

VOCABULARY = 96
EXPERTS = 4
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY,
    "use_cache": False,
}
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {"kv_lora_rank": 32, "q_lora_rank": 48, "qk_rope_head_dim": 16, "qk_nope_head_dim": 24, "v_head_dim": 16}
MIXTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {"num_local_experts": EXPERTS}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig", {"num_experts": EXPERTS}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {"num_experts": EXPERTS, "head_dim": 16}),
    "olmoe": ("OlmoeForCausalLM", "OlmoeConfig", {"num_experts": EXPERTS}),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        LATENT | {"n_routed_experts": EXPERTS, "n_group": 2, "topk_group": 2, "first_k_dense_replace": 0},
    ),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", {"num_local_experts": EXPERTS, "head_dim": 16}),
}


def hub(model: str, config: str, **sizes: Any) -> nn.Module:
    import transformers

    implementation = sizes.pop("experts", None)
    made = getattr(transformers, config)(**(SIZES | sizes))
    if implementation is not None:
        made._experts_implementation = implementation
    return getattr(transformers, model)(made).train()


def own_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=ids)["loss"]


def run(make: Callable[[], nn.Module], on_cpu: bool = False, **words: Any) -> Simulation:
    """Two samples of 32 tokens on two ranks."""
    workload = Workload(
        "model",
        make,
        OPTIMIZERS["adamw"],
        lambda samples, length: torch.randint(0, VOCABULARY, (samples, length)),
        own_loss,
        32,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return simulate(Job(workload, (2,), microbatch=2, choices=Options(**words), on_cpu=on_cpu), whole=True)


def flops(found: Simulation, op: str = "") -> int:
    return sum(each.flops for each in found.steady if isinstance(each, Kernel) and op in each.op)


@pytest.mark.parametrize("name", all_but(["mixtral"], MIXTURES))
def test_experts_cost_the_same_however_they_are_called(name: str) -> None:
    model, config, sizes = MIXTURES[name]
    sizes = ROUTED | sizes
    precision = "bf16" if name == "qwen3_moe" else None
    grouped, looped = (
        run(lambda how=how: hub(model, config, **sizes, experts=how), mixed_precision=precision)
        for how in ("grouped_mm", "eager")
    )
    assert flops(grouped) == flops(looped) > 0
    assert flops(grouped, "grouped_mm") > 0
    assert EQUAL_SHARES in looped.warnings
    assert EVERYTHING not in looped.warnings
    assert EQUAL_SHARES not in grouped.warnings


def test_the_default_way_of_calling_experts() -> None:
    model, config, sizes = MIXTURES["mixtral"]
    assert flops(run(lambda: hub(model, config, **sizes))) > 0


SELECTED: dict[str, tuple[Callable[[torch.Tensor], Any], list[tuple[int, ...]]]] = {
    "nonzero": (lambda x: (x > 0).nonzero(), [(12, 2)]),
    "where": (lambda x: torch.where(x > 0), [(12,), (12,)]),
    "masked_select": (lambda x: x.masked_select(x[0] > 0), [(12,)]),
    "index": (lambda x: x[x > 0], [(12,)]),
    "rows": (lambda x: x[x[:, 0] > 0], [(3, 4)]),
    "unique": (lambda x: x.unique(return_counts=True), [(12,), (12,)]),
    "unique_consecutive": (lambda x: x.flatten().unique_consecutive(), [(12,)]),
    "repeat_interleave": (lambda x: torch.repeat_interleave(x.flatten().long()), [(12,)]),
    "bincount": (lambda x: torch.bincount(x.argmax(1), minlength=2), [(4,)]),
    "one expert": (lambda x: torch.where(x.topk(2).indices == 3), [(2,), (2,)]),
    "experts": (lambda x: functional.one_hot(x.topk(2).indices, 5).permute(2, 1, 0)[1].nonzero(), [(2, 2)]),
    "known": (lambda x: torch.tensor([True, False, True]).nonzero(), [(2, 1)]),
    "known rows": (lambda x: x[torch.tensor([True, False, True])], [(2, 4)]),
    "known repeats": (lambda x: torch.repeat_interleave(torch.tensor([2, 3])), [(5,)]),
}


@pytest.mark.parametrize("name", SELECTED)
def test_what_data_select(name: str) -> None:
    select, shapes = SELECTED[name]
    with _torch.fake_tensors(), warnings.catch_warnings(record=True) as told, Recorder():
        warnings.simplefilter("always")
        found = select(torch.randn(3, 4))
    assert [tuple(each.shape) for each in _torch.tensors_in(found)] == shapes
    assert bool(told) == (name not in ("known", "known repeats", "bincount", "known rows"))


def test_values_of_what_is_selected_are_followed() -> None:
    with _torch.fake_tensors(), warnings.catch_warnings(), Recorder():
        warnings.simplefilter("ignore")
        hit = (torch.randn(5) > 0).nonzero()
        assert [each[0].item() for each in hit] == [0, 1, 2, 3, 4]
        assert torch.tensor([0, 3, 0, 2]).nonzero().flatten().tolist() == [1, 3]


def test_checks_of_input_pass() -> None:
    with _torch.fake_tensors(), Recorder():
        labels = torch.randint(0, 100, (4, 4))
        assert not labels.max() >= 10
        assert not labels.min() < 0
        assert labels.max() < 10


@pytest.mark.parametrize("model", all_but(["scalar_blocks"], ["wav2vec2", "scalar", "scalar_blocks"]))
def test_models_that_were_refused(model: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert any(isinstance(each, Kernel) for each in Setting(model).simulated().steady)


def test_twins_of_parts_that_cannot_be_seen_in_another_dtype() -> None:
    with _torch.fake_tensors(), Recorder() as recorder:
        three = torch.tensor([1, 2, 3], dtype=torch.uint8)
        assert three[2].item() == 3
    with _torch.fake_tensors():
        wide = torch.empty(0, dtype=torch.int64).set_(three.untyped_storage(), 0, (0,))
        assert recorder.values.read(wide) == 1  # unknown


@pytest.mark.rest
def test_replicas_of_shards() -> None:
    found = Setting("perceptron", words={"mixed_precision": "bf16"}, ranks=(2, 2)).simulated()
    strides = {each.op: each.stride for each in found.steady if isinstance(each, Communication) and each.unit}
    assert (strides["all_gather"], strides["reduce_scatter"]) == (1, 1)
    assert 2 in {each.stride for each in found.steady if isinstance(each, Communication) and each.op == "all_reduce"}


def scores(found: Simulation, heads: int = 4, length: int = 32) -> int:
    """Allocations as large as attention's scores [2, heads, length, length]."""
    return sum(
        each.shape == (2, heads, length, length) or each.shape == (2 * heads, length, length)
        for each in found.steady.events
        if isinstance(each, Allocation)
    )


GPT2 = {"n_embd": 64, "n_layer": 1, "n_head": 4, "vocab_size": VOCABULARY, "use_cache": False}
ATTENDING: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "dropout": (lambda: hub("GPT2LMHeadModel", "GPT2Config", **GPT2), "efficient"),
    "wide queries": (lambda: hub("DeepseekV3ForCausalLM", "DeepseekV3Config", **ROUTED, **LATENT), "efficient"),
}


@pytest.mark.parametrize("name", all_but(["dropout"], ATTENDING))
def test_attention_on_a_device_keeps_no_scores(name: str) -> None:
    make, kernel = ATTENDING[name]
    assert scores(run(make, on_cpu=True)) > 0
    found = run(make)
    assert scores(found) == 0
    assert flops(found, f"_scaled_dot_product_{kernel}_attention_backward") > 0


def test_attention_in_half_precision() -> None:
    found = run(ATTENDING["dropout"][0], mixed_precision="bf16", activation_checkpointing="selective")
    assert scores(found) == 0
    kernels = [each.op for each in found.steady if isinstance(each, Kernel) and "flash" in each.op]
    assert len(kernels) == 2  # forward and backward: selective recomputation keeps what attention made


class Biased(nn.Module):
    """Attention with a trained bias, and fewer heads of keys than of queries."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(64, 128)
        self.bias = nn.Parameter(torch.zeros(1, 4, 31, 31))
        self.embed = nn.Embedding(VOCABULARY, 64)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        hidden = self.project(self.embed(input_ids[:, 1:])).unflatten(-1, (8, 16)).transpose(1, 2)
        query, key, value = hidden.split([4, 2, 2], 1)
        out = functional.scaled_dot_product_attention(query, key, value, self.bias, enable_gqa=True)
        return {"loss": out.square().mean()}


def test_a_trained_bias_gets_its_gradient() -> None:
    found = run(Biased)
    assert scores(found, length=31) == 1  # the bias's own gradient, for each sample
    # Its one row would be padded to two: it is cut along its heads, and so is laid out for the reduction.
    assert any(
        isinstance(e, Allocation) and e.kind == "gradients" and e.shape == (2, 2, 31, 31) for e in found.steady.events
    )
    assert not hasattr(functional.scaled_dot_product_attention, "__closure__")


def test_columns_of_many_ranks_take_the_events_that_chunks_of_all_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where FSDP2 rearranges columns by a chunk for each rank, a simulation copies all of them at once."""
    ranks, made = 64, list[Simulation]()
    workload = Workload(
        "columns",
        lambda: nn.Sequential(nn.Linear(ranks, 3, bias=False), nn.Linear(3, ranks, bias=False)),
        OPTIMIZERS["adamw foreach"],
        lambda microbatch, _: torch.randn(microbatch, ranks),
        lambda model, batch: model(batch).square().mean(),
        1,
    )
    for chunks in (_torch.one_chunk, contextlib.nullcontext):
        monkeypatch.setattr(_torch, "one_chunk", chunks)
        made.append(simulate(Job(workload, (ranks,))))
    assert made[0].plan.cut_dimensions
    assert repr(made[0].steady.events) == repr(made[1].steady.events)
    assert [event.op for event in made[0].steady.events if isinstance(event, Kernel)].count("aten.cat") >= 2
