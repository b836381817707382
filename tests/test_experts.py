"""Expert parallelism: ranks share the experts of every layer, and training is what it is on one process."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional

import trueshard
from cases import on_ranks
from checkpointing import scribble
from gathering import gradients, parameters, whole
from messages import naming
from parity import Ranks, assert_same
from photograph import photograph
from resting import all_but
from sequences import batch_of
from stepping import accumulate
from test_context import of_one, of_parts, steps
from trueshard.parallel import balancing

ROWS, LENGTH, MICROBATCHES, STEPS = 12, 5, 2, 3
"""of a microbatch over all ranks; 12 rows divide by 1, 2, 3 and 4 ranks"""
VOCABULARY = 40
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
}
SIGMOID = {
    "intermediate_size": 20,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
"""routers that score each expert by itself, in groups"""
CASES: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 16, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {"moe_intermediate_size": 16, "num_experts": 6, "num_experts_per_tok": 2, "head_dim": 4},
    "qwen3_moe, 2 experts": {"moe_intermediate_size": 24, "num_experts": 2, "num_experts_per_tok": 1, "head_dim": 4},
    "qwen3_moe, 3 experts": {"moe_intermediate_size": 24, "num_experts": 3, "num_experts_per_tok": 2, "head_dim": 4},
    "gpt_oss": {"intermediate_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 4},
    "dots1": SIGMOID | {"n_shared_experts": 1, "head_dim": 4},
    "deepseek_v3": SIGMOID
    | {"num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8}
    | {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4},
}


def build(name: str, dtype: torch.dtype = torch.float64, **fields: Any) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(name.partition(",")[0], **(SIZES | CASES[name] | fields))
    kernel = "eager" if dtype is torch.float64 else None  # torch has no grouped products of float64
    model = AutoModelForCausalLM.from_config(config, experts_implementation=kernel).to(dtype)
    with torch.no_grad():
        for each in model.parameters():
            each.add_(torch.randn(each.shape, generator=torch.Generator().manual_seed(each.numel())).to(dtype) * 0.1)
    return model


def batch(step: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step * MICROBATCHES + micro)
    return torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids, use_cache=False).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def trains(rank: int, world: int, name: str, how: dict[str, Any]) -> Any:
    """Losses, norms, the last gradients, and what the parameters are after three steps."""
    model = build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tensor, number = how.get("tensor", 1), world // how.get("tensor", 1)
    if world > 1:
        mesh = mesh_of(world, **how) if "replicate" in how else None
        sharing = {"ranks": tensor, "sequence": True} if "sequence" in how else tensor
        trueshard.shard(model, optimizer, mesh=mesh, tensor=sharing, experts=how.get("experts", 1))
    report: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(STEPS):
        for micro in range(MICROBATCHES):
            last = micro == MICROBATCHES - 1
            with accumulate(model, last):
                loss = loss_of(model, batch(step, micro).chunk(number)[rank // tensor])
                (loss / MICROBATCHES).backward()
            report["losses"].append(mean(loss))
        clip = trueshard.clip_grad_norm_ if world > 1 and step else nn.utils.clip_grad_norm_
        report["norms"].append(whole(clip(model.parameters(), 0.1)))
        report["gradients"] = gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():  # one token for all ranks of a tensor axis, of which one then has none
        report["of one token"] = model(input_ids=batch(0, 0)[:1, :1]).logits
    return report | {"parameters": parameters(model)}


def mean(value: torch.Tensor) -> torch.Tensor:
    """Over ranks."""
    value = value.detach().clone()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return value


FOUR = [
    ("mixtral", {"experts": 4}),
    ("qwen3_moe", {"experts": 2, "replicate": 2}),
    ("qwen3_moe", {"experts": 2, "tensor": 2}),
    ("qwen3_moe", {"experts": 2}),
    ("mixtral", {"experts": 2}),
    ("mixtral", {"experts": 2, "tensor": 2}),
    ("mixtral", {"experts": 4, "tensor": 2}),
    ("gpt_oss", {"experts": 4}),
    ("gpt_oss", {"experts": 2}),
    ("deepseek_v3", {"experts": 2}),
    ("deepseek_v3", {"experts": 4}),
    ("deepseek_v3", {"experts": 2, "tensor": 2}),
    ("qwen3_moe", {"experts": 2, "tensor": 2, "sequence": True}),
    ("dots1", {"experts": 4, "tensor": 2, "sequence": True}),
]
TOLERANCES = {"deepseek_v3": 1e-5, "dots1": 1e-5}
"""of gradients, in parts of the largest; these routers are of float32, where a sum of 16 is right to 1e-6"""


@pytest.mark.parametrize(("name", "how"), all_but(FOUR[:1], FOUR, unpack=True))
def test_training_is_that_of_one_process(ranks4: Ranks, alone: Ranks, name: str, how: dict[str, Any]) -> None:
    holds(ranks4, alone, name, how)


@pytest.mark.rest
def test_training_with_an_odd_number_of_ranks(ranks3: Ranks) -> None:
    """Against plain sharding: norms in float32 are not the same for 4 rows as for 12, with and without experts."""
    holds(ranks3, ranks3, "qwen3_moe", {"experts": 3})


def holds(ranks: Ranks, reference: Ranks, name: str, how: dict[str, Any]) -> None:
    expected, *_ = reference.run(trains, name, {})
    gradients, tolerance = expected.pop("gradients"), TOLERANCES.get(name, 1e-9)
    largest = max(each.abs().max().item() for each in gradients.values())
    for found in ranks.run(trains, name, how):
        assert_same(found.pop("gradients"), gradients, atol=tolerance * largest)
        # AdamW's step of an element is as wrong, in parts of the learning rate, as its gradient in parts of itself.
        assert_same(found, expected, atol=1e3 * tolerance if name in TOLERANCES else tolerance)


@pytest.mark.rest
@pytest.mark.parametrize("sizes", [{"context": 2, "experts": 2}, {"context": 2, "tensor": 2, "experts": 4}])
def test_ranks_that_share_sequences_share_experts(ranks4: Ranks, alone: Ranks, sizes: dict[str, int]) -> None:
    (expected,) = alone.run(trains_on_parts, {})
    for found in ranks4.run(trains_on_parts, sizes):
        assert_same(found, expected, atol=1e-5)  # norms in float32, of other numbers of tokens


def trains_on_parts(rank: int, world: int, sizes: dict[str, int]) -> Any:
    model = build("qwen3_moe", vocab_size=64, num_experts=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    batches = [[batch_of("plain", 2 * step), batch_of("plain", 2 * step + 1)] for step in range(2)]
    if world == 1:
        return steps(model, optimizer, batches, of_one)
    trueshard.shard(model, optimizer, **sizes)
    shared = sizes["context"] * sizes.get("tensor", 1)
    own = [
        [{key: each.chunk(world // shared)[rank // shared] for key, each in micro.items()} for micro in step]
        for step in batches
    ]
    return steps(model, optimizer, own, of_parts)


def gradients_of(rank: int, world: int, name: str, dtype: torch.dtype, how: dict[str, Any], fields: Any) -> Any:
    model = build(name, dtype, **fields)
    if fields.get("num_experts_per_tok") == 1:
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("gate.weight"):
                nn.init.zeros_(parameter)  # all logits are equal: every token chooses the same expert
    if world > 1:
        trueshard.shard(model, **how)
    loss = loss_of(model, batch(0, 0).chunk(world)[rank])
    (loss * 64).backward()
    return gradients(model)


@pytest.mark.parametrize("count", all_but([2], [2, 4]))
def test_gradients_of_float16_where_one_rank_has_all_of_an_expert(
    count: int, ranks2: Ranks, ranks4: Ranks, alone: Ranks
) -> None:
    """FSDP2's own factor would be applied twice there; float64 is among the trainings above."""
    (expected,) = alone.run(gradients_of, "mixtral", torch.float16, {}, {})
    ranks = ranks2 if count == 2 else ranks4
    for found in ranks.run(gradients_of, "mixtral", torch.float16, {"experts": count}, {}):
        for name, gradient in expected.items():
            largest = gradient.abs().max().item()
            assert_same(found[name], gradient, atol=0.05 * largest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_experts_without_tokens_have_gradients_of_zero(dtype: torch.dtype, ranks2: Ranks, alone: Ranks) -> None:
    """Top-1, where one of two ranks gets no token at all: by torch's grouped products, and by a loop over experts."""
    fields = {"num_experts_per_tok": 1}
    (expected,) = alone.run(gradients_of, "mixtral", dtype, {}, fields)
    assert all(sum(experts_with_gradients(expected, layer)) == 1 for layer in (0, 1))
    for found in ranks2.run(gradients_of, "mixtral", dtype, {"experts": 2}, fields):
        assert_same(found, expected, atol=1e-4)
        assert all(sum(experts_with_gradients(found, layer)) == 1 for layer in (0, 1))


def experts_with_gradients(gradients: dict[str, torch.Tensor], layer: int) -> list[bool]:
    return [bool(each.any()) for each in gradients[f"model.layers.{layer}.mlp.experts.down_proj"]]


def gradients_by(rank: int, world: int, kernel: str, how: dict[str, int]) -> Any:
    model: Any = build("qwen3_moe", torch.float32)
    model.set_experts_implementation(kernel)
    tensor = how.get("tensor", 1)
    if world > 1:
        trueshard.shard(model, **how)
    loss_of(model, batch(0, 0).chunk(world // tensor)[rank // tensor]).backward()
    return gradients(model)


@pytest.mark.rest
@pytest.mark.parametrize("how", [{"experts": 2}, {"tensor": 2}, {"tensor": 2, "experts": 2}])
def test_every_kernel_gives_the_gradients_of_one_process(ranks2: Ranks, alone: Ranks, how: dict[str, int]) -> None:
    """Those of routers among them, which are right only if every rank's experts add to them."""
    (expected,) = alone.run(gradients_by, "eager", {})
    for kernel in ("eager", "batched_mm", "grouped_mm"):
        for found in ranks2.run(gradients_by, kernel, how):
            for name, gradient in expected.items():
                assert_same(found[name], gradient, atol=1e-5 * gradient.abs().max().item())


def tied(rank: int, world: int, left_out: str, how: dict[str, int]) -> Any:
    """Gradients and logits of a tied model whose own plan cuts the parameter at one of its two places."""
    model: Any = build("qwen3_moe", tie_word_embeddings=True)
    if world > 1:
        own = {glob: word for glob, word in model._tp_plan.items() if left_out not in glob}
        assert 0 < len(own) < len(model._tp_plan)
        model._tp_plan = own
        trueshard.shard(model, **how)
        assert model.lm_head.weight is model.model.embed_tokens.weight
    loss_of(model, batch(0, 0)).backward()
    report = gradients(model)
    with torch.no_grad():
        return report | {"logits": model(input_ids=batch(0, 1)).logits}


@pytest.mark.rest
@pytest.mark.parametrize("left_out", ["embed_tokens", "lm_head"])
def test_a_tie_that_the_model_s_plan_cuts_at_one_place_stays_whole(ranks2: Ranks, alone: Ranks, left_out: str) -> None:
    (expected,) = alone.run(tied, left_out, {})
    for how in ({"tensor": 2}, {"tensor": 2, "experts": 2}):
        for found in ranks2.run(tied, left_out, how):
            for name, value in expected.items():
                assert_same(found[name], value, atol=1e-8 * value.abs().max().item())


# Beside training


def saves(rank: int, world: int, folder: str, how: dict[str, Any], loads: str = "") -> Any:
    """What was saved: a step's result, or what was loaded from `loads`."""
    model = build("qwen3_moe")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trueshard.shard(model, optimizer, **how)
    if loads:
        scribble(model)
        trueshard.load(loads, model=model, optimizer=optimizer)
    else:
        loss_of(model, batch(0, 0)).backward()
        optimizer.step()
    trueshard.save(folder, model=model, optimizer=optimizer)
    return whole([dict(model.named_parameters()), list(optimizer.state.values())])


@pytest.mark.rest
def test_checkpoints_are_equal_bit_for_bit(
    ranks4: Ranks, ranks3: Ranks, ranks2: Ranks, alone: Ranks, tmp_path: Path
) -> None:
    """Six experts: three for each of two ranks, of which FSDP2 gives a rank two or one; then two for each; then all."""
    places = [str(tmp_path / name) for name in ("two", "three", "one")]
    expected, *_ = ranks4.run(saves, places[0], {"experts": 2})
    assert_same(ranks3.run(saves, places[1], {"experts": 3}, places[0])[0], expected)
    assert_same(alone.run(saves, places[2], {}, places[1])[0], expected)
    for name in ("model.safetensors", "optimizer.safetensors"):
        contents = {Path(place, name).read_bytes() for place in places}
        assert len(contents) == 1, name


WITH = [
    "everything",
    "recomputed selectively",
    "kept",
    "resharded to two",
    "policy changed",
    "compiled",
    "offloaded",
    "hooked",
    "frozen experts",
    "adapters",
    "owned",
    "plan given",
]


@pytest.mark.rest
@pytest.mark.parametrize("kind", WITH)
def test_with_other_choices(ranks4: Ranks, alone: Ranks, kind: str) -> None:
    (expected,) = alone.run(with_choices, kind)
    for found in ranks4.run(with_choices, kind):
        assert_same(found, expected, atol=1e-5 if kind == "compiled" else 1e-8)


def with_choices(rank: int, world: int, kind: str) -> Any:
    """Two steps; before ``shard()`` the optimizer has state."""
    model = build("mixtral")
    if kind == "frozen experts":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("experts" not in name)
    if kind == "adapters":
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        adapters = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model = get_peft_model(model, adapters).double()
    if kind == "hooked":
        next(p for n, p in model.named_parameters() if "down_proj" in n).register_hook(lambda gradient: gradient * 2)
    trainable = [each for each in model.parameters() if each.requires_grad]
    # Adafactor needs whole matrices: each is updated by one rank.
    optimizer: Any = (torch.optim.Adafactor if kind == "owned" else torch.optim.AdamW)(trainable, lr=1e-2)
    loss_of(model, batch(9, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    for layer in model.model.layers if kind == "compiled" and world > 1 else ():
        layer.compile(backend="aot_eager")
    if world > 1:
        how: dict[str, Any] = {
            "everything": {"activation_checkpointing": "full"},
            "recomputed selectively": {"activation_checkpointing": "selective"},
            "kept": {"reshard_after_forward": "never"},
            "resharded to two": {"reshard_after_forward": 2},
            "offloaded": {"offload": "cpu"},
        }.get(kind, {})
        plan = trueshard.shard(model, optimizer, experts=2, **how)
        assert "4 of 8 experts a rank" in str(plan)
        if kind == "plan given":
            model, optimizer = given(trueshard.Plan.from_json(plan.to_json()))
    report: dict[str, Any] = {}
    for step in range(2):
        if kind == "policy changed" and world > 1:
            trueshard.set_reshard_after_forward(model, ("never", "always")[step])
        loss_of(model, batch(step, 0).chunk(world)[rank]).backward()
        report[f"gradients {step}"] = gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    if kind == "everything":
        twin = copy.deepcopy(model)
        report["twin"] = mean(loss_of(twin, batch(5, 0).chunk(world)[rank]))
        report["whole weights"] = weights_of(model)
        report["alone"] = logits_alone(model)
    return report | {"parameters": parameters(model)}


def given(plan: trueshard.Plan) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A second model and its optimizer, after a step, sharded by a plan that was read."""
    model = build("mixtral")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss_of(model, batch(9, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert trueshard.shard(model, optimizer, plan=plan) == plan
    return model, optimizer


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    if not isinstance(model, FSDPModule):
        return dict(sorted(model.named_parameters()))
    found = {n: t.clone() for some, them in trueshard.weights(model) for n, t in zip(some, them, strict=True)}
    return dict(sorted(found.items()))


@torch.no_grad()
def logits_alone(model: nn.Module) -> torch.Tensor:
    """Of a copy that needs no other rank, and that has all experts."""
    if not isinstance(model, FSDPModule):
        return model(batch(6, 0)).logits
    with trueshard.gathered(model) as unsharded:
        assert unsharded.model.layers[0].mlp.experts.num_experts == 8
        return unsharded(batch(6, 0)).logits


@pytest.mark.rest
def test_bf16_leaves_routing_weights_as_the_block_computes_them(ranks4: Ranks) -> None:
    apart, together = (ranks4.run(in_bf16, experts) for experts in (2, 1))
    for (found, dtypes), (expected, as_before) in zip(apart, together, strict=True):
        assert dtypes == as_before == [torch.bfloat16, torch.int64, torch.float32] * 2
        for name, gradient in expected.items():
            assert_same(found[name], gradient, atol=0.05 * gradient.abs().max().item())


def in_bf16(rank: int, world: int, experts: int) -> Any:
    model, given = build("mixtral", torch.float32), []
    layer = model.model.layers[0].mlp.experts
    layer.register_forward_pre_hook(lambda _, args: given.extend(each.dtype for each in args))
    trueshard.shard(model, experts=experts, mixed_precision="bf16")
    loss_of(model, batch(0, 0).chunk(world)[rank]).backward()
    with trueshard.gathered(model) as unsharded:
        unsharded(batch(0, 0))
    return gradients(model), given


# The loss that balances routers


def balanced(rank: int, world: int, name: str, how: dict[str, Any], asked: str) -> Any:
    """Losses and gradients of two microbatches; ranks have different numbers of sequences, and some have padding."""
    model = build(name, router_aux_loss_coef=0.5, output_router_logits=asked == "config")
    if world > 1:
        trueshard.shard(model, **how)
    keywords = {"output_router_logits": True} if asked == "call" else {}
    losses = []
    for micro in range(2):
        ids = batch(0, micro)[:7]
        mask = torch.ones_like(ids)
        mask[2, 3:] = mask[5, 1:] = 0
        mine = {"input_ids": ids.tensor_split(world)[rank]}
        if micro:
            mine["attention_mask"] = mask.tensor_split(world)[rank]
        output = model(**mine, **keywords)
        share = world * len(mine["input_ids"]) / len(ids)
        with accumulate(model, micro == 1):
            (output.logits.logsumexp(-1).mean() * share + output.aux_loss).backward()
        losses.append(output.aux_loss.detach())
    return {"losses": losses, "gradients": gradients(model)}


BALANCED = [
    ("qwen3_moe", {"experts": 2}, "call", 2),
    ("mixtral", {}, "config", 3),
    ("qwen3_moe", {"experts": 3}, "call", 3),
    ("gpt_oss", {"activation_checkpointing": "full"}, "config", 2),
]


@pytest.mark.parametrize(("name", "how", "asked", "ranks"), all_but(BALANCED[:2], BALANCED, unpack=True))
def test_routers_are_balanced_over_the_global_batch(
    name: str, how: dict[str, Any], asked: str, ranks: int, alone: Ranks, ranks2: Ranks, ranks3: Ranks
) -> None:
    (expected,) = alone.run(balanced, name, {}, asked)
    for result in {2: ranks2, 3: ranks3}[ranks].run(balanced, name, how, asked):
        assert_same(result, expected, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_routers_are_refused_or_named_where_no_global_loss_is_known(rank: int, world_size: int) -> None:
    from transformers.models.mixtral import modeling_mixtral
    from transformers.models.switch_transformers import modeling_switch_transformers

    original = modeling_mixtral.load_balancing_loss_func
    for how in ({"exact": True}, {"tensor": 2}):
        model = build("mixtral")
        trueshard.shard(model, **how)
        with pytest.raises(ValueError, match=naming(*how, "output_router_logits=False")):
            model(input_ids=batch(0, 0), output_router_logits=True)
        assert modeling_mixtral.load_balancing_loss_func is original  # outside of passes, also after an error

    def of_own(gate_logits: Any, *_: Any) -> torch.Tensor:
        return torch.cat(gate_logits).mean(0).square().sum()

    with mock.patch.object(modeling_mixtral, "load_balancing_loss_func", of_own):
        model = build("mixtral")
        trueshard.shard(model)
        with pytest.warns(UserWarning, match=naming("of_own", "output_router_logits=False")):
            output = model(input_ids=batch(0, 0), output_router_logits=True)
        torch.testing.assert_close(output.aux_loss, of_own(output.router_logits))
    loss = modeling_switch_transformers.load_balancing_loss_func
    assert balancing._over_ranks(loss, trueshard.Plan(), None) is loss  # a mean over sequences


# What is refused


def mesh_of(world: int, **sizes: int) -> DeviceMesh:
    shape = {"replicate": sizes.get("replicate", 1), "shard": 0, "tensor": sizes.get("tensor", 1)}
    shape["shard"] = world // (shape["replicate"] * shape["tensor"])
    return init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))


@on_ranks(4)
def test_what_does_not_fit_is_refused_by_name(rank: int, world_size: int) -> None:
    def refused(model: nn.Module, *parts: Any, **how: Any) -> None:
        before = [(id(p), tuple(p.shape)) for p in model.parameters()]
        with pytest.raises(ValueError, match=naming(*parts)):
            trueshard.shard(model, **how)
        assert [(id(p), tuple(p.shape)) for p in model.parameters()] == before

    refused(build("mixtral"), "experts=3", 4, experts=3)
    refused(build("mixtral"), "experts=4", 2, experts=4, mesh=mesh_of(world_size, replicate=2))
    refused(build("qwen3_moe"), "experts=4", 6, "model.layers.0.mlp.experts", experts=4)
    refused(nn.Sequential(nn.Linear(4, 4)), "experts=2", "Sequential", "stacked", experts=2)
    listed = nn.Sequential(nn.Linear(4, 4))
    listed.experts = nn.ModuleList([nn.Linear(4, 4)])
    refused(listed, "'experts'", "list", experts=2)
    with_integers = build("mixtral")
    held = with_integers.model.layers[1].mlp.experts
    held.down_proj = nn.Parameter(torch.zeros(held.down_proj.shape, dtype=torch.int8), requires_grad=False)
    refused(with_integers, "model.layers.1.mlp.experts.down_proj", "int8", experts=2)
    arrived = build("mixtral")
    arrived.lm_head.weight = nn.Parameter(
        distribute_tensor(arrived.lm_head.weight, mesh_of(world_size)["shard"], [Shard(0)])
    )
    refused(arrived, "cut already", experts=2)
    plan = dataclasses.replace(trueshard.shard(build("mixtral")), experts=2)
    refused(build("mixtral"), "model.layers.0.mlp.experts", "unit", plan=plan)
    from peft import LoraConfig, get_peft_model

    for forward in (
        lambda self, hidden, chosen, weights: type(self).__base__.forward(self, hidden, chosen, weights.square()),
        lambda self, *tokens: functional.normalize(type(self).__base__.forward(self, *tokens), dim=0),
    ):
        own = build("mixtral")
        for layer in own.model.layers:
            layer.mlp.experts.__class__ = type("OwnExperts", (type(layer.mlp.experts),), {"forward": forward})
        refused(own, "model.layers.0.mlp.experts", "OwnExperts", "what it returns differs", "weighted sum", experts=2)
    wrapped = get_peft_model(build("mixtral"), LoraConfig(r=2, target_parameters=["experts.down_proj"]))
    refused(wrapped, "ParamWrapper", "target_modules", experts=2)


@pytest.mark.rest
@on_ranks(2)
def test_a_failure_is_undone(rank: int, world_size: int) -> None:
    from trueshard.sharding import engine

    model = build("mixtral")
    optimizer = torch.optim.AdamW(model.parameters())
    before = photograph(model, optimizer)
    with mock.patch.object(engine, "rebind", side_effect=KeyError), pytest.raises(KeyError):
        trueshard.shard(model, optimizer, experts=2)
    assert photograph(model, optimizer) == before
    trueshard.shard(model, optimizer, experts=2)
    loss_of(model, batch(0, 0)).backward()
