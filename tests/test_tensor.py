"""The tensor axis: ranks that share each matrix train what one process trains."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import trueshard
from cases import on_ranks
from gathering import gradients, parameters, whole
from messages import naming
from meter import gloo_lets_go, meter, peak_and_rest
from parity import Ranks, assert_same
from resting import all_but
from tensor_models import MODELS, batch, build, distance, far_apart, llama, optimizers, state, train
from trueshard import _torch
from trueshard.checkpoint.catalogue import Catalogue
from trueshard.checkpoint.format import dtype_of
from trueshard.model.names import Index
from trueshard.model.regions import has_one_run, region_of, take
from trueshard.parallel.tensor import own_styles
from trueshard.parallel.tp_styles import shared_head
from trueshard.train.losses import CausalLoss

EXACT = 1e-12
ROUTED = ("mixtral", "qwen3_moe")


def trained(rank: int, world_size: int, name: str, kind: str, tensor: int, path: str | None = None) -> dict[str, Any]:
    """Three steps; `tensor` 0: not sharded. A momentum of one step is there before."""
    model = build(name)
    made = optimizers(kind, model)
    train(model, made, [9])
    if not tensor:
        return train(model, made, range(3))
    trueshard.shard(model, *made, tensor=tensor)
    cut = [n for n, p in model.named_parameters() if not p.placements[-1].is_replicate()]
    assert len(cut) >= 0.5 * len(list(model.parameters())), cut
    found = train(model, made, range(3), rank // tensor, world_size // tensor)
    if path:
        trueshard.save(path, model=model, optimizer=dict(zip("abc", made, strict=False)))
        found["state"] = state(model, made) if kind == "AdamW" else {}
    return found


def loaded(rank: int, world_size: int, name: str, kind: str, tensor: int, path: str, again: str) -> dict[str, Any]:
    """The state after loading, saved `again`; and how often each byte of the files was read, over all ranks."""
    model = build(name)
    made = optimizers(kind, model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    if tensor:
        trueshard.shard(model, *made, tensor=tensor)
    reads: list[tuple[str, int, int]] = []
    read_into = Catalogue.read_into

    def counting(self: Any, key: str, begin: int, local: torch.Tensor) -> None:
        reads.append((key, begin, begin + local.numel() * dtype_of(self.entries[key].dtype).itemsize))
        read_into(self, key, begin, local)

    Catalogue.read_into = counting  # type: ignore[method-assign]
    try:
        trueshard.load(path, model=model, optimizer=dict(zip("abc", made, strict=False)), verify=False, rng=False)
    finally:
        Catalogue.read_into = read_into  # type: ignore[method-assign]
    trueshard.save(again, model=model, optimizer=dict(zip("abc", made, strict=False)))
    kept = state(model, made) if kind == "AdamW" else parameters(model)
    return {"state": kept, "reads": [each for each in reads if each[0].startswith("model/")]}


REST = pytest.mark.rest
ON_TWO = ("llama", "qwen3", "mixtral")
"""Trained on two ranks, too, without an axis of shards."""
CASES = [
    pytest.param(name, kind, marks=[] if (name, kind) in (("qwen3", "AdamW"),) else REST)
    for name in MODELS
    for kind in ("AdamW", "Muon", "Adafactor")
    if kind == "AdamW" or name in ("llama", "tied")
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_training_is_training_on_one_process(
    name: str, kind: str, alone: Ranks, ranks4: Ranks, ranks2: Ranks, tmp_path: Path
) -> None:
    (expected,) = alone.run(trained, name, kind, 0)
    # Mixture models compute their routers in float32; Muon's and Adafactor's steps turn roundings into more.
    bound = 1e-5 if name in ROUTED else EXACT if kind == "AdamW" else 1e-9
    for ranks in (ranks2, ranks4) if name in ON_TWO else (ranks4,):
        path = str(tmp_path / f"on-{ranks.count}")
        for found in ranks.run(trained, name, kind, 2, path):
            for what in ("grads", "parameters"):
                assert distance(found[what], expected[what]) < bound, what
            assert torch.allclose(found["norms"], expected["norms"], rtol=bound, atol=0)
    # Bit for bit wherever it is loaded, each byte read once; and equal values are equal files.
    kept = found["state"] or found["parameters"]
    layouts = ((alone, 0), (ranks4, 1), (ranks2, 2)) if name == "lora" or kind != "AdamW" else ((alone, 0), (ranks4, 4))
    for number, (ranks, tensor) in enumerate(layouts):
        again = str(tmp_path / f"again-{number}")
        if tensor == 4 and name in ("llama", "qwen3"):
            tensor = 1  # two heads of keys
        everyone = ranks.run(loaded, name, kind, tensor, path, again)
        for one in everyone:
            assert one["state"].keys() == kept.keys()
            for key, value in kept.items():
                assert torch.equal(one["state"][key], value.to(one["state"][key].dtype)), key
        spans = sorted(span for one in everyone for span in one["reads"] if span[2] > span[1])
        assert spans
        assert all(a[0] != b[0] or a[2] <= b[1] for a, b in pairwise(spans)), "read twice"
        files = sorted(each.relative_to(path) for each in Path(path).rglob("*.safetensors") if "extra" not in each.name)
        assert files
        assert all((Path(path) / f).read_bytes() == (Path(again) / f).read_bytes() for f in files)


@REST
@on_ranks(4)
def test_an_optimizer_of_whole_tensors_steps_bit_for_bit_on_two_axes(rank: int, world_size: int) -> None:
    """Three steps of SOAP on given gradients, on 2 × 2 ranks and on this process.

    Its eigenvectors turn the last bit of a gradient into other updates, also on one process: so gradients are given.
    """
    from pytorch_optimizer import SOAP

    plain, model = build("qwen3"), build("qwen3")
    known, made = (SOAP(each.parameters(), lr=1e-2) for each in (plain, model))
    trueshard.shard(model, made, tensor=2)
    for step in range(3):
        ids = batch(step)
        plain(input_ids=ids, labels=ids).loss.backward()
        for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
            local = take(its.grad, region_of(mine)).contiguous()
            mine.grad = DTensor.from_local(
                local, mine.device_mesh, mine.placements, shape=mine.shape, stride=mine.stride(), run_check=False
            )
        for each in (known, made):
            each.step()
            each.zero_grad()
    assert_same(parameters(model), parameters(plain))


WAYS: dict[str, dict[str, Any]] = {
    "always": {"reshard_after_forward": "always"},
    "never, recomputed": {"reshard_after_forward": "never", "activation_checkpointing": "full"},
    "selective, offloaded": {"activation_checkpointing": "selective", "offload": "cpu"},
    "copies": {},
}


def features(rank: int, world_size: int, *ways: str) -> dict[str, Any]:
    """What a user does with a sharded model, on 2 × 2 ranks, each against a plain model of this process."""
    plain = build("llama")
    made = optimizers("AdamW", plain)
    expected = [train(plain, made, [step])["parameters"] for step in range(2)]
    found: dict[str, Any] = {}
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tensor"))
    for words in ways:
        options = {"mesh": mesh} if words == "copies" else WAYS[words]
        model = build("llama")
        made = optimizers("AdamW", model)
        trueshard.shard(model, *made, **({"tensor": 2} | options))
        found[words] = distance(train(model, made, range(2), rank // 2, 2)["parameters"], expected[1])
    # The last one goes on: copied, its gradients, its whole tensors.
    twin, average = copy.deepcopy(model), torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    found["copies of it"] = max(distance(parameters(each), parameters(model)) for each in (twin, average.module))
    alone = copy.deepcopy(plain)
    learnt = [train(each, optimizers("AdamW", each), [2], *own) for each, own in ((twin, (rank // 2, 2)), (alone, ()))]
    found["a copy learns"] = distance(learnt[0]["grads"], learnt[1]["grads"])
    found["it stays"] = distance(parameters(model), expected[1])
    plain.load_state_dict(parameters(model))
    own, ids = batch(5).chunk(2)[rank // 2], batch(5)
    model(input_ids=own, labels=own).loss.backward()
    plain.zero_grad()
    plain(input_ids=ids, labels=ids).loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    found["torch's norm"] = abs(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9) / norm) - 1)
    weight, other = (each.model.layers[0].mlp.down_proj.weight for each in (model, plain))
    found["a number of it"] = abs(float(weight.norm() / other.norm()) - 1)
    given = {
        name: t.clone() for names, tensors in trueshard.weights(model) for name, t in zip(names, tensors, strict=True)
    }
    found["weights"] = distance(given, parameters(plain))
    with trueshard.gathered(model) as gathered:
        found["gathered"] = distance(parameters(gathered), parameters(plain))
    tokens = [m.eval().generate(ids[:2, :4], max_new_tokens=4, do_sample=False, pad_token_id=0) for m in (model, plain)]
    found["generate"] = float(not torch.equal(*tokens))
    with torch.no_grad():
        doubled = {name: 2 * value for name, value in parameters(plain).items()}
    model.load_state_dict(doubled)
    found["loaded"] = distance(parameters(model), doubled)
    return found


@pytest.mark.rest
@pytest.mark.parametrize("ways", all_but([("copies",)], [("copies",), tuple(WAYS)[:-1]]), ids=", ".join)
def test_what_users_do_with_a_shared_model(ways: tuple[str, ...], ranks4: Ranks) -> None:
    for found in ranks4.run(features, *ways):
        assert far_apart(found, EXACT) == {}


@REST
@on_ranks(2, timeout=200)
def test_blocks_are_compiled(rank: int, world_size: int) -> None:
    plain = build("llama")
    expected = train(plain, optimizers("AdamW", plain), range(2))["parameters"]
    model = build("llama")
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    made = optimizers("AdamW", model)
    trueshard.shard(model, *made, tensor=2)
    assert distance(train(model, made, range(2))["parameters"], expected) < EXACT


@on_ranks(4)
def test_a_hook_sees_the_whole_gradient(rank: int, world_size: int) -> None:
    model, plain = build("llama"), build("llama")
    seen: list[tuple[int, ...]] = []
    for each in (model, plain):
        weight = each.model.layers[0].mlp.down_proj.weight
        weight.register_hook(lambda grad: seen.append(tuple(grad.shape)) or grad * 2)
        weight.tag = "kept"
    trueshard.shard(model, tensor=2)
    for each, ids in ((model, batch(0).chunk(2)[rank // 2]), (plain, batch(0))):
        each(input_ids=ids, labels=ids).loss.backward()
    assert model.model.layers[0].mlp.down_proj.weight.tag == "kept"
    assert seen == [(32, 65), (32, 65)]
    assert distance(gradients(model), gradients(plain)) < EXACT


@REST
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(4)
def test_what_is_held_in_common_stays_bit_equal(rank: int, world_size: int, dtype: torch.dtype) -> None:
    """After ten steps: of what every tensor rank has whole, whether they have the same bits."""
    model = build("qwen3", dtype)
    made = optimizers("AdamW", model)
    trueshard.shard(model, *made, tensor=2)
    train(model, made, range(10), rank // 2, world_size // 2)
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.placements[-1].is_replicate():
            local = _torch.local(parameter)
            every = [torch.empty_like(local) for _ in range(2)]
            dist.all_gather(every, local, group=parameter.device_mesh.get_group(1))
            found[name] = torch.equal(*every)
    assert len(found) == 2 * 4 + 1  # two norms of each block, those of queries and keys, and the last one
    assert all(found.values()), found


def in_parts(rank: int, world_size: int, name: str, ways: tuple[str, ...]) -> dict[str, float]:
    """Sequence parallelism with several ways to recompute; 11 tokens do not divide by 2."""
    plain = build(name)
    expected = train(plain, optimizers("AdamW", plain), range(2))
    found = {}
    for words in ways:
        model = build(name)
        made = optimizers("AdamW", model)
        trueshard.shard(model, *made, tensor={"ranks": 2, "sequence": True}, activation_checkpointing=words)
        trained = train(model, made, range(2), rank // 2, world_size // 2)
        found[words] = max(distance(trained[what], expected[what]) for what in ("grads", "parameters"))
        ids = batch(3)[:2, :5]
        tokens = [m.eval().generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0) for m in (model, plain)]
        assert torch.equal(*tokens)
    return found


EVERY = ("none", "full", "selective")


@pytest.mark.rest
@pytest.mark.parametrize(
    ("name", "ways"),
    [
        ("llama", ("full",)),
        *(
            pytest.param(name, ways, marks=REST)
            for name, ways in {
                "llama": EVERY,
                "lora": ("selective",),
                "mixtral": ("none", "full"),
                "qwen3_moe": ("selective",),
            }.items()
        ),
    ],
)
def test_each_rank_holds_its_part_of_the_sequence(name: str, ways: tuple[str, ...], ranks4: Ranks) -> None:
    for found in ranks4.run(in_parts, name, ways):
        # Mixture models compute their routers in float32, and add gradients of parts.
        bound = 1e-5 if name in ROUTED else EXACT
        assert far_apart(found, bound) == {}


# Models that arrive cut, and styles of one's own


@pytest.mark.rest
@pytest.mark.parametrize(
    ("way", "kind"),
    [("qwen3", "AdamW"), pytest.param("tied", "AdamW", marks=REST), pytest.param("tied", "Muon", marks=REST)],
)
@on_ranks(4)
def test_a_model_that_arrives_cut_is_taken_as_it_is(
    rank: int, world_size: int, way: str, kind: str, tmp_path: Path
) -> None:
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
    model, plain = build(way), build(way)
    if way == "qwen3":
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism

        apply_tensor_parallelism(model, mesh["tp"], model._expand_parallel_plan(model.tp_plan))
    else:
        for layer in model.model.layers:
            styles = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
            parallelize_module(layer.mlp, mesh["tp"], styles)
    made, known = optimizers(kind, model), optimizers(kind, plain)
    trueshard.shard(model, *made, mesh=mesh["dp"])
    found = train(model, made, range(3), rank // 2, world_size // 2)
    trueshard.save(tmp_path / "kept", model=model, optimizer=dict(zip("abc", made, strict=False)))
    trueshard.load(tmp_path / "kept", model=model, optimizer=dict(zip("abc", made, strict=False)))
    assert distance(parameters(model), found["parameters"]) == 0
    with pytest.raises(RuntimeError, match="tensor="):
        copy.deepcopy(model)
    expected = train(plain, known, range(3))
    assert max(distance(found[what], expected[what]) for what in ("grads", "parameters")) < 1e-9


@REST
@on_ranks(4)
def test_adapters_of_a_model_that_arrives_cut_are_cut_or_refused(rank: int, world_size: int) -> None:
    """Adapters of a model that transformers has cut: by a PEFT that knows of it, and by one that does not."""
    from peft import LoraConfig, get_peft_model
    from transformers.distributed import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
    config = LoraConfig(r=3, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, init_lora_weights=False)
    torch.manual_seed(1)
    plain = get_peft_model(build("qwen3"), config).double()
    found: dict[str, Any] = {}
    for knows in (False, True):
        model = build("qwen3")
        apply_tensor_parallelism(model, mesh["tp"], model._expand_parallel_plan(model.tp_plan))
        if knows:
            model._device_mesh, model.config.distributed_config = mesh["tp"], DistributedConfig(tp_size=2)
        wrapped = get_peft_model(model, config).double()
        if not knows:
            before = [id(p) for p in wrapped.parameters()]
            with pytest.raises(ValueError, match=naming("layers.0.self_attn.q_proj", "PEFT", "tensor=")):
                trueshard.shard(wrapped, mesh=mesh["dp"])
            assert [id(p) for p in wrapped.parameters()] == before
            continue
        made = optimizers("AdamW", wrapped)
        trueshard.shard(wrapped, *made, mesh=mesh["dp"])
        wrapped.load_state_dict(parameters(plain))
        trained = train(wrapped, made, range(2), rank // 2, world_size // 2)
        expected = train(plain, optimizers("AdamW", plain), range(2))
        found = {what: distance(trained[what], expected[what]) for what in ("grads", "parameters")}
        found["norms"] = float((trained["norms"] / expected["norms"] - 1).abs().max())
    assert far_apart(found, 1e-9) == {}


class Blocks(nn.Module):
    """Blocks of a user's own, with biases, a table of vectors, and widths that do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(13, 6, padding_idx=3)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(6, 7), "norm": nn.LayerNorm(7), "down": nn.Linear(7, 6)}) for _ in range(2)
        )
        self.wide = nn.Embedding(13, 7)
        self.head = nn.Linear(6, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids) + self.wide(ids)[..., :6]
        for layer in self.layers:
            x = x + layer["down"](torch.tanh(layer["up"](x)))
        return self.head(x).square().mean()


OWN = {
    "table": "embedding_rowwise",
    "wide": "embedding_colwise",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
    "head": "colwise_gather_output",
}


def with_own_styles(rank: int, world_size: int, ranks: int) -> float:
    torch.manual_seed(0)
    model = Blocks().double()
    plain = copy.deepcopy(model)
    ids = torch.arange(24).view(12, 2) % 13
    plan = trueshard.shard(model, tensor={"ranks": ranks, **OWN})
    assert plan.styles == OWN
    assert trueshard.Plan.from_json(plan.to_json()) == plan
    for each, own in ((model, ids.chunk(world_size // ranks)[rank // ranks]), (plain, ids)):
        each(own).backward()
    return distance(gradients(model), gradients(plain))


def test_styles_of_ones_own_for_any_module(ranks3: Ranks, ranks4: Ranks) -> None:
    assert max(ranks3.run(with_own_styles, 3) + ranks4.run(with_own_styles, 2)) < EXACT


# What is said at once


@on_ranks(4)
def test_what_cannot_be_shared_is_said_at_once_and_changes_nothing(rank: int, world_size: int) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    def refused(words: str, model: nn.Module, *made: torch.optim.Optimizer, **options: Any) -> None:
        before = [(name, id(p)) for name, p in model.named_parameters()]
        with pytest.raises(ValueError, match=words):
            trueshard.shard(model, *made, **options)
        assert [(name, id(p)) for name, p in model.named_parameters()] == before
        assert not any(isinstance(module, _torch.ShardedModule) for module in model.modules())

    def mesh(*names: str) -> DeviceMesh:
        return init_device_mesh("cpu", (2, 2) if len(names) == 2 else (4,), mesh_dim_names=names)

    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=8))
    dropout, few = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)), nn.Sequential(nn.Linear(4, 3))
    balanced = MODELS["mixtral"]()
    balanced.config.output_router_logits = True
    packed = llama()
    packed.model.layers[0].mlp.up_proj.weight = nn.Parameter(torch.zeros(1, dtype=torch.uint8), requires_grad=False)
    refused(naming("self_attn.k_proj", 2, 4), llama(num_key_value_heads=2), tensor=4)
    refused(naming("GPT2LMHeadModel", "plan", "tensor="), gpt2, tensor=2)
    refused(naming("tensor 3", 4), llama(), tensor=3)
    refused(naming("'1'", "0.1"), dropout, tensor={"ranks": 2, "0": "colwise_gather_output", "trial": False})
    refused(naming("self_attn", "attention_dropout", "0.1"), llama(attention_dropout=0.1), tensor=2)
    refused(naming("columwise", "head", "colwise"), Blocks(), tensor={"ranks": 2, "head": "columwise"})
    refused(naming("haed", "head"), Blocks(), tensor={"ranks": 2, "haed": "colwise"})
    refused(naming("table", "Embedding", "colwise"), Blocks(), tensor={"ranks": 2, "table": "colwise"})
    refused(naming("0.weight", 4), few, tensor={"ranks": 4, "0": "colwise_gather_output"})
    refused(naming("layers.0.mlp.up_proj"), packed, tensor=2)
    refused(naming("ranks"), Blocks(), tensor=OWN)
    refused(naming("tensor=4", "'tensor': 2"), llama(), mesh=mesh("shard", "tensor"), tensor=4)
    refused(naming("'tensor', 'shard'", "replicate, shard, context, tensor"), llama(), mesh=mesh("tensor", "shard"))
    refused(naming("'tensor'", "always shard", 1), llama(), mesh=mesh("tensor"))
    refused(naming("output_router_logits"), balanced, tensor=2)
    refused(naming("LBFGS"), model := llama(), torch.optim.LBFGS(model.parameters()), tensor=2)


def memory(rank: int, world_size: int, tensor: int, path: str) -> list[tuple[int, int]]:
    """Of a save, and of a load into what is there: the highest rise of live bytes, and what is left of it."""
    torch.manual_seed(0)
    model: Any = llama(hidden_size=64, intermediate_size=256, num_hidden_layers=4)
    made = optimizers("AdamW", model)
    trueshard.shard(model, *made, tensor=tensor)
    train(model, made, range(1), rank // tensor, world_size // tensor)
    what = {"model": model, "optimizer": made[0]}
    trueshard.save(f"{path}-first", **what)
    made[0].state.clear()
    trueshard.load(f"{path}-first", **what)
    calls = [lambda: trueshard.save(path, **what), lambda: trueshard.load(path, **what)]
    with gloo_lets_go():
        steps = meter(calls).steps
    inside = sum(_torch.local(p).nbytes for p in model.parameters() if not has_one_run(p))
    own = sum(_torch.local(p).nbytes for p in model.parameters())
    return [(*peak_and_rest([change.bytes for change in step]), own, inside) for step in steps]


@pytest.mark.rest
def test_saving_and_loading_take_memory_as_on_one_axis(ranks4: Ranks, tmp_path: Path) -> None:
    """On the CPU a save copies what is cut inside its rows, and its state; loading takes a tensor at a time."""
    one, two = (ranks4.run(memory, tensor, str(tmp_path / f"{tensor}")) for tensor in (1, 2))
    usual, other = (max(rank[i][0] - i * rank[i][1] for rank in one) for i in (0, 1))
    for (saved, *_, inside), (loaded, rest, own, _) in two:
        assert saved <= usual + 3 * inside
        assert loaded - rest <= other + own / 7


# The trainer's losses


def losses(rank: int, world_size: int, tensor: int) -> dict[str, torch.Tensor]:
    """Losses at the head and their gradients: of tokens and of rows; whole logits; log-probabilities of policies."""
    found = {}
    for name, head in (("llama", ""), ("tied", ""), ("llama", "colwise_rep")):
        model = build(name)
        styles = {"ranks": tensor, **own_styles(Index(model)), "lm_head": head} if head else tensor
        if tensor:
            trueshard.shard(model, tensor=styles)
            assert name == "tied" or shared_head(model.lm_head) is not None
        ids = batch(0)[:3]
        targets = ids.roll(-1, 1)
        targets[0, :5] = -100
        for what, loss in {"rows": CausalLoss(), "whole": CausalLoss(whole_logits=True)}.items():
            each = loss(model, {"input_ids": ids, "targets": targets}, rows=what == "rows")
            each.sum().backward()
            found[f"{name} {head} {what}"] = each.detach().double()
            found |= {f"{name} {head} {what} {n}": whole(p.grad) for n, p in model.named_parameters()}
            assert not loss.whole_logits or what == "whole"
            model.zero_grad()
    return found


@pytest.mark.rest
def test_losses_at_a_head_whose_vocabulary_is_shared(alone: Ranks, ranks2: Ranks) -> None:
    (expected,) = alone.run(losses, 0)
    for found in ranks2.run(losses, 2):
        assert distance(found, expected) < EXACT


@pytest.mark.rest
@pytest.mark.parametrize("fails", [False, True])
@on_ranks(2, fresh=True)
def test_a_model_is_freed_whose_pass_had_no_backward(rank: int, world_size: int, fails: bool) -> None:
    model = build("llama")
    trueshard.shard(model, tensor=world_size)
    if fails:
        model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
        model(batch(0)[:2])
    weak = weakref.ref(model)
    del model
    for _ in range(3):  # the first frees an exception's frames, and with them the graph in C++ that holds the model
        gc.collect()
    assert weak() is None


# Every architecture


def catalogue(rank: int, world_size: int, sequence: bool) -> dict[str, Any]:
    """Of every language model: why it is refused, or the worst gradient's distance from one process."""
    from models.decoders import DENSE, EXPERTS, STATE_SPACE

    found: dict[str, Any] = {}
    for name, case in (DENSE | EXPERTS | STATE_SPACE).items():
        plain, model = case.build(0).double(), case.build(0).double()
        for each in (plain, model):
            each.train()
            if hasattr(each, "set_experts_implementation"):
                each.set_experts_implementation("eager")
        try:
            trueshard.shard(model, tensor={"ranks": world_size, "sequence": sequence})
        except ValueError as error:
            found[name] = str(error)
            continue
        cut = sum(not p.placements[-1].is_replicate() for p in model.parameters())
        ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))
        for each in (plain, model):
            each(input_ids=ids, labels=ids).loss.backward()
        grads = [gradients(m) for m in (model, plain)]
        found[name] = (cut, distance(*grads))
        if sequence:
            states = [each(input_ids=ids, output_hidden_states=True).hidden_states or () for each in (model, plain)]
            wholes = [{str(number): each.detach() for number, each in enumerate(every)} for every in states]
            found[name] = (cut, max(distance(*grads), distance(*wholes) if wholes[1] else 0.0))
    return found


@pytest.mark.rest
@pytest.mark.parametrize("sequence", [False, True])
def test_every_language_model_is_refused_by_name_or_trains_the_same(sequence: bool, ranks2: Ranks) -> None:
    for found in ranks2.run(catalogue, sequence, timeout=400):
        taken = {name: each for name, each in found.items() if not isinstance(each, str)}
        assert {name: far for name, (cut, far) in taken.items() if not far < 1e-5 or not cut} == {}
        assert len(taken) > 15
        assert all("tensor" in why for why in found.values() if isinstance(why, str))
