"""All axes together, with all that one may choose beside them: every pair of choices at least once, in float64."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import trueshard
from cases import raises_on_ranks
from gathering import gradients, parameters, whole
from messages import naming
from parity import Ranks
from resting import all_but
from stepping import accumulate
from tensor_models import SIZES, distance, far_apart, in_float64

RANKS = 4
CASES = 17
"""how many ``covering`` finds"""
CHOICES: dict[str, tuple[Any, ...]] = {
    "replicate": (1, 2),
    "tensor": ("1", "2", "2, sequence"),
    "context": (1, 2),
    "experts": (1, 2, 4),
    "recompute": ("none", "full", "selective"),
    "precision": (False, True),
    "offload": ("none", "cpu"),
    "reshard": ("default", "always", "never"),
    "accumulated": (1, 2),
    "gradients": ("whole", "sharded"),
    "optimizer": ("AdamW", "Muon", "Adafactor"),
    "clip": ("ours", "torch's", "none"),
    "after": ("average, copy", "generate", "state dict"),
}


def is_possible(case: dict[str, Any]) -> bool:
    """Of four ranks at most so many; and torch's own clipping wants all parameters on one mesh."""
    shared = case["context"] * int(case["tensor"][0])
    if case["replicate"] * shared > RANKS or (RANKS // case["replicate"]) % case["experts"]:
        return False
    return not (case["clip"] == "torch's" and case["experts"] > 1)


def covering() -> list[dict[str, Any]]:
    """Cases that have every possible pair of choices: greedily, of some drawn at random the one with most new pairs,
    in which then single choices are replaced as long as that adds pairs.
    """
    draw = random.Random(1)
    factors = list(CHOICES)

    def pairs(case: dict[str, Any]) -> set[Any]:
        return {((a, case[a]), (b, case[b])) for a, b in itertools.combinations(factors, 2)}

    def drawn() -> dict[str, Any]:
        while not is_possible(case := {name: draw.choice(values) for name, values in CHOICES.items()}):
            pass
        return case

    wanted = set().union(*(pairs(drawn()) for _ in range(20_000)))
    found = []
    while wanted:
        best = max((drawn() for _ in range(300)), key=lambda case: len(pairs(case) & wanted))
        before: dict[str, Any] = {}
        while before != best:
            before = best
            near = [{**best, name: value} for name, values in CHOICES.items() for value in values]
            best = max([best, *filter(is_possible, near)], key=lambda case: len(pairs(case) & wanted))
        wanted -= pairs(best)
        found.append(best)
    return found


def build() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes = {**SIZES, "num_hidden_layers": 2, "num_key_value_heads": 2, "vocab_size": 66}
    config = Qwen3MoeConfig(**sizes, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12)
    config.norm_topk_prob = True
    model: Any = Qwen3MoeForCausalLM(config)
    model.set_experts_implementation("eager")
    return model.double().train()


def optimizers_of(kind: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    if kind == "Muon":
        return [torch.optim.Muon(matrices, 1e-2), torch.optim.AdamW(others, 1e-2, eps=1e-4)]
    if kind == "Adafactor":
        return [torch.optim.Adafactor(model.parameters(), 1e-2)]
    return [torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-4)]


def train(model: Any, made: list[torch.optim.Optimizer], case: dict[str, Any], reader: tuple[int, int]) -> Any:
    """Two steps on this reader's part of the samples; return norms and last gradients."""
    is_sharded = reader[1] > 1 or any(hasattr(p, "device_mesh") for p in model.parameters())
    norms = []
    for step in range(2):
        ids = torch.randint(0, 66, (8, 11), generator=torch.Generator().manual_seed(step))
        batches = [ids.chunk(case["accumulated"])[i].chunk(reader[1])[reader[0]] for i in range(case["accumulated"])]
        parts = [trueshard.split_sequence(model, {"input_ids": each, "labels": each}) for each in batches]
        count = sum(int(trueshard.count_targets(each["labels"], shifted=False)) for each in parts)
        mean = trueshard.token_mean(model, count) if is_sharded else functools.partial(torch.mul, 1 / count)
        for number, part in enumerate(parts, start=1):
            last = number == len(parts)
            with accumulate(model, last, case["gradients"]):
                logits = model(**{k: v for k, v in part.items() if "labels" not in k}, use_cache=False).logits
                mean(F.cross_entropy(logits.flatten(0, 1), part["labels"].flatten(), reduction="sum")).backward()
        if case["clip"] != "none":
            clip = trueshard.clip_grad_norm_ if case["clip"] == "ours" or not is_sharded else nn.utils.clip_grad_norm_
            norms.append(float(whole(clip(model.parameters(), 0.5))))
        grads = gradients(model)
        for each in made:
            each.step()
            each.zero_grad()
    return {"norms": torch.tensor([*norms, 0.0], dtype=torch.float64), **grads}


@in_float64()
def case_on_ranks(rank: int, world_size: int, case: dict[str, Any]) -> dict[str, float]:
    plain, model = build(), build()
    made, known = (optimizers_of(case["optimizer"], each) for each in (model, plain))
    tensor, context = int(case["tensor"][0]), case["context"]
    shape = {"replicate": case["replicate"], "shard": RANKS // (case["replicate"] * tensor * context)}
    shape |= {"context": context, "tensor": tensor}
    kept = {name: size for name, size in shape.items() if size > 1 or name == "shard"}
    mesh = init_device_mesh("cpu", tuple(kept.values()), mesh_dim_names=tuple(kept))
    precision = MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float64)
    trueshard.shard(
        model,
        *made,
        mesh=mesh,
        tensor={"sequence": True} if "sequence" in case["tensor"] else 1,
        experts=case["experts"],
        activation_checkpointing=case["recompute"],
        mixed_precision=precision if case["precision"] else None,
        offload=case["offload"],
        reshard_after_forward=case["reshard"],
    )
    from trueshard.sharding.engine import sharded

    found, expected = train(model, made, case, sharded(model).axes.reader), train(plain, known, case, (0, 1))
    far = {"gradients": distance(found, expected), "parameters": distance(parameters(model), parameters(plain))}
    return far | AFTER[case["after"]](model, plain)


def _average(model: Any, plain: Any) -> dict[str, float]:
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    return {"average": distance(parameters(average.module), parameters(plain))}


def _generate(model: Any, plain: Any) -> dict[str, float]:
    ids = torch.arange(8).view(2, 4)
    tokens = [m.eval().generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0) for m in (model, plain)]
    return {"generate": float(not torch.equal(*tokens))}


def _copy(model: Any, plain: Any) -> dict[str, float]:
    twin = copy.deepcopy(model).eval()
    with torch.no_grad():
        ids = torch.arange(16).view(2, 8)
        logits = [each.eval()(input_ids=ids).logits for each in (twin, plain)]
    return {"copy": float((logits[0] - logits[1]).abs().max())}


def _state_dict(model: Any, plain: Any) -> dict[str, float]:
    doubled = {name: value * 2 for name, value in parameters(plain).items()}
    model.load_state_dict(doubled)
    return {"state dict": distance(parameters(model), doubled)}


AFTER = {
    "average, copy": lambda model, plain: _average(model, plain) | _copy(model, plain),
    "generate": _generate,
    "state dict": _state_dict,
}


@functools.cache
def cases() -> list[dict[str, Any]]:
    return covering()


@pytest.mark.rest
def test_the_cases_have_every_pair() -> None:
    assert len(cases()) == CASES
    seen = {pair for case in cases() for pair in itertools.combinations(case.items(), 2)}
    every = itertools.combinations(CHOICES.items(), 2)
    pairs = {((a, x), (b, y)) for (a, xs), (b, ys) in every for x, y in itertools.product(xs, ys)}
    impossible = {pair for pair in pairs - seen if ("clip", "torch's") not in pair}
    assert impossible <= {(("replicate", 2), ("experts", 4))}
    assert math.prod(map(len, CHOICES.values())) > 10_000


@pytest.mark.rest
@pytest.mark.parametrize("number", range(CASES))
def test_every_pair_of_choices_trains_as_one_process(number: int, ranks4: Ranks) -> None:
    case = cases()[number]
    bound = 1e-12 if case["optimizer"] == "AdamW" else 1e-9
    for found in ranks4.run(case_on_ranks, case, timeout=120):
        assert far_apart(found, bound) == {}, case


# The reduce dtype


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Between(nn.Module):
    """What is between two matrices is computed on a rank's own part, by a parameter that every rank has whole."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.scale, self.down = nn.Linear(6, 8, bias=False), Scale(), nn.Linear(8, 6, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(self.scale(self.up(x)))


BETWEEN = {"up": "colwise", "scale": "replicated_with_grad_allreduce", "down": "rowwise"}
EXPERTS = "model.layers.1.mlp.experts.down_proj"
SUMMED: dict[str, tuple[dict[str, Any], str]] = {
    "shard": ({}, "model.norm.weight"),
    "replicate": ({"mesh": ("replicate", "shard")}, "model.norm.weight"),
    "context": ({"context": 2}, "model.norm.weight"),
    "sequence": ({"tensor": {"ranks": 2, "sequence": True}}, "model.norm.weight"),
    "experts": ({"experts": 2}, EXPERTS),
    "tensor": ({"tensor": {"ranks": 4, **BETWEEN}}, "scale.weight"),
}


def parts_of_a_sum(rank: int, world_size: int, axis: str) -> list[torch.Tensor]:
    """The gradient to which all ranks contribute, and those to which one half of them contributes nothing."""
    from trueshard.sharding.engine import sharded

    words, name = SUMMED[axis]
    if "mesh" in words:
        words = {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=words["mesh"])}
    model: Any = Between() if "tensor" in axis else build().float()
    trueshard.shard(model, mixed_precision="bf16", **words)
    found = []
    for halves in ([1.0, 1.0], [1.0, 0.0], [0.0, 1.0]):
        model.zero_grad()
        if "tensor" in axis:
            with torch.no_grad():
                model.down.weight.copy_(Between().down.weight * torch.tensor(halves).repeat_interleave(4))
            model(torch.linspace(-1, 1, 6).view(1, 6)).sum().backward()
        else:
            reader, readers = sharded(model).axes.reader
            ids = torch.arange(readers * 12).view(readers, 12) * 7 % 66
            part = trueshard.split_sequence(model, {"input_ids": ids[reader : reader + 1]})
            logits = model(**part, use_cache=False).logits
            first = int(part["position_ids"][0, 0]) if axis == "context" else 0
            by_token = torch.tensor(halves).repeat_interleave(6)[first : first + logits.shape[1]]
            by_rank = torch.tensor(halves).repeat_interleave(readers // 2)[reader]
            weights = by_token if axis in ("context", "sequence") else by_rank
            (logits.sigmoid() * weights.view(-1, 1)).sum().backward()
        found.append(whole(dict(model.named_parameters())[name].grad))
    return found


@pytest.mark.parametrize("axis", all_but(["sequence", "tensor"], SUMMED))
def test_gradients_are_summed_in_the_reduce_dtype_on_every_axis(axis: str, ranks4: Ranks) -> None:
    """In bfloat16 a sum would be off by a thousandth."""
    for total, one, other in ranks4.run(parts_of_a_sum, axis):
        assert total.dtype == torch.float32
        assert min(float(each.abs().max()) for each in (one, other)) > 0
        assert float((total - (one + other)).abs().max() / one.abs().max()) < 1e-6


# Gradients of gradients


TWICE: dict[str, dict[str, Any]] = {
    "tensor": {"tensor": 2},
    "sequence": {"tensor": {"ranks": 2, "sequence": True}, "activation_checkpointing": "full"},
    "context": {"context": 2},
    "experts": {"experts": 2},
    "all": {"tensor": {"ranks": 2, "sequence": True}, "context": 2, "experts": 2},
}


@in_float64()
def differentiated_twice(rank: int, world_size: int, axis: str) -> dict[str, float]:
    """A penalty on the gradient of the embeddings: that gradient, and those of the parameters."""
    from trueshard.sharding.engine import sharded

    def penalised(model: Any, given: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        embedded = torch.sin(ids.unsqueeze(-1) * torch.arange(1, 33, dtype=torch.float64)).requires_grad_()
        outputs = model(inputs_embeds=embedded, use_cache=False, **given).logits.square().sum()
        (slope,) = torch.autograd.grad(outputs, embedded, create_graph=True)
        (outputs + slope.square().sum()).backward()
        return slope.detach()

    plain, model = build(), build()
    for each in (plain, model):
        each.set_attn_implementation("eager")
    trueshard.shard(model, **TWICE[axis])
    axes = sharded(model).axes
    reader, readers = axes.reader
    ids = torch.arange(2 * 7).view(2, 7)
    part = trueshard.split_sequence(model, {"input_ids": ids[reader % 2 :][: 2 // readers or 1]})
    own = part.pop("input_ids")
    found, expected = penalised(model, part, own), penalised(plain, {}, ids)
    where = (ids.view(1, -1) == own.view(-1, 1)).nonzero()[:, 1]
    times = axes.data.size() * (1 if readers < 3 else 2 / readers)
    return {
        "slope": distance({"": found.flatten(0, 1)}, {"": expected.flatten(0, 1)[where]}),
        "gradients": distance({n: g * times for n, g in gradients(model).items()}, gradients(plain)),
    }


@pytest.mark.parametrize("axis", all_but(["context"], TWICE))
def test_gradients_of_gradients_are_those_of_one_process(axis: str, ranks4: Ranks) -> None:
    for found in ranks4.run(differentiated_twice, axis):
        assert far_apart(found, 1e-11) == {}


@pytest.mark.rest
@raises_on_ranks(3, naming("context", "create_graph=True", "divides the heads"))
def test_attention_that_goes_round_is_not_differentiated_twice(rank: int, world_size: int) -> None:
    model = build()
    trueshard.shard(model, context=world_size)
    part = trueshard.split_sequence(model, {"input_ids": torch.arange(6).view(1, 6)})
    embedded = torch.rand(1, 2, 32, dtype=torch.float64, requires_grad=True)
    part.pop("input_ids")
    outputs = model(inputs_embeds=embedded, use_cache=False, **part).logits.sum()
    torch.autograd.grad(outputs, embedded, create_graph=True)
