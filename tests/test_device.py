"""The contract on the device at hand, as one process knows it: on GPUs with NCCL (``make gpu``), elsewhere on the CPU.

Each rank trains the plain model on the whole batch beside the sharded one on its part: there are as many ranks as GPUs,
or one, so that the same lines run everywhere.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import trueshard
from cases import on
from gathering import parameters, whole
from models import CASES, Case, rows
from parity import DEVICE, Pool, Ranks, assert_same
from running import metrics, project, run
from stepping import accumulate, take_step

STEPS = 3
ROUGH = {"mixed": 1e-2}
"""Relative difference where parameters themselves are bfloat16."""
SAMPLES = 12
WAYS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "always": {"reshard_after_forward": "always"},
    "never": {"reshard_after_forward": "never"},
    "recomputed": {"activation_checkpointing": "full"},
    "selective": {"activation_checkpointing": "selective"},
    "offloaded": {"offload": "cpu"},
    "offloaded, recomputed": {"offload": "cpu", "activation_checkpointing": "full"},
}
MODELS = ("llama", "gpt2", "qwen3_moe", "t5", "vit", "lora", "mixed", "scalar")
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture(scope="session")
def here(pool: Pool) -> Ranks:
    return Ranks(max(1, torch.cuda.device_count()) if DEVICE == "cuda" else 1, pool)


def device() -> torch.device:
    return torch.device(DEVICE)


def moved(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value.to(device()) for key, value in batch.items()}


def optimizer_of(model: nn.Module, name: str = "AdamW", **settings: Any) -> torch.optim.Optimizer:
    trained = [each for each in model.parameters() if each.requires_grad]
    eps = {"eps": 1e-3} if name == "AdamW" else {}
    return getattr(torch.optim, name)(trained, lr=0.01, **eps, **settings)


def train(case: Case, model: nn.Module, optimizer: Any, rank: int, world_size: int, parts: int = 1) -> list[float]:
    """Losses of some steps, clipped; ``parts``: microbatches of each."""
    losses, is_sharded = [], isinstance(model, FSDPModule)
    clip = trueshard.clip_grad_norm_ if is_sharded else nn.utils.clip_grad_norm_
    for step in range(STEPS):
        batch = moved(rows(case.batch(SAMPLES, 10 * step), rank, world_size))
        for part in range(parts):
            with accumulate(model, last=part == parts - 1):
                loss = case.loss(model, rows(batch, part, parts)) / parts
                loss.backward()
        losses.append(float(loss.detach()))
        clip(model.parameters(), 0.5)
        take_step(optimizer)
    return losses


def pair(name: str, rank: int, world_size: int, parts: int = 1, fused: bool = False, **words: Any) -> Any:
    """A plain model and a sharded one with their optimizers, both trained."""
    case, found = CASES[name], []
    for words_of in (None, words):
        model = case.build(0).to(device())
        optimizer = optimizer_of(model, **({"fused": True} if fused else {}))
        if words_of is not None:
            trueshard.shard(model, optimizer, **words_of)
        place = (0, 1) if words_of is None else (rank, world_size)
        train(case, model, optimizer, *place, parts)
        found += [model, optimizer]
    return found


def trains_alike(rank: int, world_size: int, name: str, words: dict[str, Any], parts: int, fused: bool) -> None:
    plain, plain_optimizer, model, optimizer = pair(name, rank, world_size, parts, fused, **words)
    rtol = ROUGH.get(name, 2e-3)
    resting = "cpu" if words.get("offload") == "cpu" else device().type
    assert {each.device.type for each in model.parameters()} == {resting}
    assert_same(parameters(model), parameters(plain), rtol=rtol, atol=2e-4)
    mine, its = (
        {
            f"{number}.{key}": value
            for number, state in each.state_dict()["state"].items()
            for key, value in state.items()
            if key != "step"
        }
        for each in (optimizer, plain_optimizer)
    )
    assert_same(whole(mine), whole(its), rtol=rtol, atol=2e-4)


@pytest.mark.parametrize("name", MODELS)
def test_models_train_as_without_sharding(here: Ranks, name: str) -> None:
    here.run(trains_alike, name, {}, 2, False)


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_shard_train_as_without(here: Ranks, way: str) -> None:
    here.run(trains_alike, "llama", WAYS[way], 2, "offload" not in WAYS[way])


@pytest.mark.compiles
@pytest.mark.rest
def test_compiled_units_train_as_without_sharding(here: Ranks) -> None:
    here.run(trains_alike, "llama", {"compile": True}, 1, False, timeout=240.0)


@on("here")
def test_optimizers_step_as_without_sharding(rank: int, world_size: int) -> None:
    case = CASES["llama"]
    for name, settings in (
        ("SGD", {"momentum": 0.9, "foreach": True}),
        ("SGD", {"momentum": 0.9, "fused": True}),
        ("AdamW", {"foreach": True}),
        ("AdamW", {"fused": True, "amsgrad": True}),
        ("AdamW", {"capturable": DEVICE == "cuda"}),
        ("Adafactor", {}),
        ("RMSprop", {"centered": True}),
        ("Adagrad", {}),
        ("NAdam", {}),
    ):
        found = []
        for is_sharded in (False, True):
            model = case.build(0).to(device())
            optimizer = optimizer_of(model, name, **settings)
            if is_sharded:
                trueshard.shard(model, optimizer)
            train(case, model, optimizer, *((rank, world_size) if is_sharded else (0, 1)))
            found.append(parameters(model))
        assert_same(found[1], found[0], rtol=5e-3, atol=5e-4)


@pytest.mark.parametrize("word", LOW)
@on("here")
def test_low_precision_with_a_scaler(rank: int, world_size: int, word: str) -> None:
    """Losses fall, storage stays; with float16 a scaler skips the step in which one gradient is infinite."""
    case = CASES["llama"]
    model = case.build(0).to(device())
    optimizer = optimizer_of(model)
    trueshard.shard(model, optimizer, mixed_precision=word)
    seen: list[torch.dtype] = []
    model.get_submodule("model.layers.0").register_forward_hook(lambda module, args, out: seen.append(args[0].dtype))
    batch = moved(rows(case.batch(SAMPLES, 0), rank, world_size))
    scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0, enabled=word == "fp16")
    losses = []
    for step in range(6):
        loss = case.loss(model, batch)
        scaler.scale(loss).backward()
        before = parameters(model)
        if step == 2 and rank == 0 and word == "fp16":
            next(each.grad for each in model.parameters()).to_local().view(-1)[0] = torch.inf
        scaler.unscale_(optimizer)
        trueshard.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step == 2 and word == "fp16":
            assert_same(parameters(model), before)
            assert scaler.get_scale() == 512.0
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert {each.dtype for each in model.parameters()} == {torch.float32}
    assert set(seen) == {LOW[word]}


@pytest.mark.parametrize("offload", ["none", "cpu"])
@on("here")
def test_checkpoints_hold_what_is_on_the_device(rank: int, world_size: int, tmp_path: Path, offload: str) -> None:
    from transformers import AutoModelForCausalLM

    case = CASES["llama"]
    models = []
    for seed in (0, 1):
        model = case.build(seed).to(device())
        optimizer = optimizer_of(model)
        trueshard.shard(model, optimizer, offload=offload)
        models.append((model, optimizer))
    (model, optimizer), (other, its) = models
    train(case, model, optimizer, rank, world_size)
    trueshard.save(tmp_path / "now", model=model, optimizer=optimizer)
    pending = trueshard.save(tmp_path / "later", model=model, optimizer=optimizer, wait=False)
    assert pending is not None
    expected = parameters(model)
    train(case, model, optimizer, rank, world_size)  # while it is written
    pending.wait()
    for name in ("now", "later"):
        trueshard.load(tmp_path / name, model=other, optimizer=its)
        assert_same(parameters(other), expected, rtol=0, atol=0)
        assert {each.device for each in other.parameters()} == {each.device for each in model.parameters()}
        read = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert_same(dict(read.named_parameters()), expected, rtol=0, atol=0)
    train(case, other, its, rank, world_size)
    assert_same(parameters(other), parameters(model), rtol=0, atol=0)


@on("here")
def test_copies_averages_and_generation(rank: int, world_size: int) -> None:
    """``deepcopy``, a moving average, ``gathered``, and ``generate`` beside the plain model's."""
    case = CASES["llama"]
    plain = case.build(0).to(device())
    model = case.build(0).to(device())
    optimizer = optimizer_of(model)
    trueshard.shard(model, optimizer)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    prompt = moved(case.batch(2, 5))["input_ids"]
    for each in (model, plain):
        each.eval()
    with torch.no_grad():
        expected = plain.generate(prompt, max_new_tokens=6, do_sample=False)
        assert torch.equal(model.generate(prompt, max_new_tokens=6, do_sample=False), expected)
        with trueshard.gathered(model) as full:
            assert torch.equal(full.generate(prompt, max_new_tokens=6, do_sample=False), expected)
    model.train()
    train(case, model, optimizer, rank, world_size)
    average.update_parameters(model)
    average.update_parameters(model)
    duplicate = copy.deepcopy(model)
    assert_same(parameters(duplicate), parameters(model), rtol=0, atol=0)
    averaged = parameters(average.module)
    assert_same(averaged, parameters(model), rtol=1e-5, atol=1e-5)


def shares(rank: int, world_size: int) -> None:
    """All ranks share matrices, then sequences: by heads, and around a ring where they do not divide these."""
    from sequences import batch_of, build

    batch = moved(batch_of("even", 0))
    for heads, words in ((2, {"tensor": world_size}), (2 * world_size, {"context": world_size}), (3, {"context": 2})):
        gradients = []
        for is_sharded in (False, True):
            model = build("llama", heads, heads).float().to(device())
            if is_sharded:
                trueshard.shard(model, **words)
            part = trueshard.split_sequence(model, batch)
            count = trueshard.count_targets(part["labels"], shifted=False)
            total = trueshard.token_mean(model, count).divisor if is_sharded else count
            model(**part, num_items_in_batch=total).loss.backward()
            gradients.append(whole({name: each.grad for name, each in model.named_parameters()}))
        assert_same(gradients[1], gradients[0], rtol=2e-3, atol=2e-4)


@pytest.mark.rest
def test_ranks_that_share_matrices_or_sequences(pool: Pool) -> None:
    if DEVICE == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    Ranks(2, pool).run(shares)


@pytest.mark.rest
def test_a_run_trains_stops_and_goes_on(tmp_path: Path) -> None:
    folder = project(tmp_path / "project")
    run(folder, "--set", "train.steps=6", "--set", "train.checkpoint_every=3", "--set", "shard.mixed_precision=bf16")
    run(folder, "--set", "train.steps=9", "--set", "train.checkpoint_every=3", "--set", "shard.mixed_precision=bf16")
    found = metrics(folder)
    assert [each["step"] for each in found] == list(range(1, 10))
    assert found[-1]["loss"] < found[0]["loss"]
