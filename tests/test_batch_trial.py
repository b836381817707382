"""Trials of the batch: what a model computes from other samples is named, and nothing else is."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import trueshard
from cases import on_ranks
from messages import lacking, naming
from models import CASES
from models.decoders import DENSE, EXPERTS
from trueshard.model.names import Index
from trueshard.options import Options
from trueshard.parallel.batch_trial import BatchTrial
from trueshard.sharding.engine import resolve


def asked(model: nn.Module, *args: Any, method: str = "forward", **kwargs: Any) -> str:
    """Return the sentence of a trial, and hold that it changes nothing."""
    index = Index(model.train())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    states = torch.get_rng_state(), random.getstate()
    attributes = [repr({k: v for k, v in vars(module).items() if k[0] != "_"}) for module in model.modules()]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        sentence = BatchTrial(index, resolve(index, Options(), (2,))).ask(method, args, kwargs, True)
    assert bool(told) == ("depend on others" in sentence)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert attributes == [repr({k: v for k, v in vars(m).items() if k[0] != "_"}) for m in model.modules()]
    return sentence


class Block(nn.Module):
    """Residual, with a function in it."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(8, 8), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.function(self.linear(x))


class Stack(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.first, self.blocks, self.head = nn.Linear(6, 8), nn.ModuleList(blocks), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class OwnBatchNorm(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - x.mean(0)) / (x.var(0) + 1e-5).sqrt()


class HiddenGradient(torch.autograd.Function):
    """Scales gradients by those of all samples."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad / grad.norm()


X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def test_what_rows_depend_on_is_named() -> None:
    assert "no sample depends" in asked(Stack(Block(torch.tanh), Block(torch.tanh)), X)
    found = asked(Stack(Block(torch.tanh), Block(OwnBatchNorm()), Block(OwnBatchNorm())), X)
    assert lacking(found, "output", "'blocks.1.function' (OwnBatchNorm)") == []
    assert "'blocks.0' (Block)" in asked(Stack(Block(lambda x: x - x.mean(0))), X)
    assert "'blocks.0' (Block)" in asked(Stack(Block(lambda x: x.roll(1, 0))), X)
    assert "gradient of its inputs" in asked(Stack(Block(HiddenGradient.apply)), X)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_few_samples_are_enough(rows: int) -> None:
    assert "OwnBatchNorm" in asked(Stack(Block(OwnBatchNorm())), X[:rows])
    assert "no sample depends" in asked(Stack(Block(torch.tanh)), X[:rows])


def test_norms_within_a_sample_and_those_told_by_class_are_not() -> None:
    for norm in (nn.GroupNorm(2, 8), nn.LayerNorm(8), nn.BatchNorm1d(8), nn.SyncBatchNorm(8), nn.Dropout(0.5)):
        assert "no sample depends" in asked(Stack(Block(norm)), X), norm
    assert "no sample depends" in asked(nn.Sequential(nn.Conv1d(3, 4, 3), nn.InstanceNorm1d(4)), torch.randn(4, 3, 9))


# Losses


class Encoder(nn.Module):
    """Returns losses of features, in a dict, as one value, or by a method."""

    def __init__(self, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.of_features = nn.Linear(6, 8), loss

    def forward(self, one: torch.Tensor, two: torch.Tensor) -> dict[str, Any]:
        one, two = self.linear(one), self.linear(two)
        return {"features": one, "more": [{"loss": self.of_features(one, two)}]}

    def loss(self, one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
        return self.of_features(self.linear(one), self.linear(two))


def clip(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    scores = F.normalize(one, dim=-1) @ F.normalize(two, dim=-1).T / 0.1
    labels = torch.arange(len(scores))
    return (F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels)) / 2


def simclr(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    z = F.normalize(torch.cat([one, two]), dim=-1)
    scores = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
    return F.cross_entropy(scores, torch.arange(len(z)).roll(len(one)))


def in_batch_negatives(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    return F.triplet_margin_loss(one, two, two.roll(1, 0), margin=50.0)


def barlow_twins(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    one, two = ((x - x.mean(0)) / x.std(0) for x in (one, two))
    return (one.T @ two / len(one) - torch.eye(one.shape[1])).square().sum()


@pytest.mark.parametrize("loss", [clip, simclr, in_batch_negatives, barlow_twins])
def test_losses_over_pairs_of_samples(loss: Any) -> None:
    torch.manual_seed(0)
    assert lacking(asked(Encoder(loss), X, X + 0.1), "Encoder", "'more[0].loss'") == []
    assert "Encoder" in asked(Encoder(loss), X, X + 0.1, method="loss")


def test_means_and_sums_over_samples_or_tokens_are_not_named() -> None:
    for loss in (F.mse_loss, lambda one, two: (one - two).abs().sum(), lambda one, two: one.square().mean(-1)):
        assert "no sample depends" in asked(Encoder(loss), X, X + 0.1)
    ids, labels = torch.arange(24).view(4, 6), torch.arange(24).view(4, 6).clone()
    labels[1, :3] = labels[2, 1:] = -100
    mask = torch.ones(4, 6, dtype=torch.int64)
    mask[0, :2] = mask[3, :4] = 0
    for given in ({}, {"attention_mask": mask}, {"num_items_in_batch": 7}):
        assert "no sample depends" in asked(DENSE["llama"].build(0), input_ids=ids, labels=labels, **given)


# Routers


class Router(nn.Module):
    """Chances of four experts; its loss is returned, an attribute, or by sequence; counts move a bias."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.gate, self.kind, self.losses = nn.Linear(8, 4), kind, []
        self.register_buffer("bias", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> Any:
        chances = self.gate(x).softmax(-1)
        chosen = F.one_hot((chances + self.bias).argmax(-1), 4).to(x.dtype)
        dims = 1 if self.kind == "sequence" else tuple(range(x.ndim - 1))
        loss = (chances.mean(dims) * chosen.mean(dims)).sum(-1).mean()
        if self.kind == "bias":
            self.bias += 0.1 * torch.sign(chosen.mean() - chosen.mean((0, 1)))
        elif self.kind == "attribute":
            self.last_loss = loss
        elif self.kind == "list":
            self.losses.append(loss)
        elif self.kind == "z":
            self.last_loss = self.gate(x).logsumexp(-1).square().mean()
        return (x * chances[..., :1], loss) if self.kind in ("returned", "sequence") else x * chances[..., :1]


class Routed(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(6, 8), nn.ModuleList([Router(kind), Router(kind)])

    def forward(self, x: torch.Tensor) -> Any:
        x, losses = self.first(x), []
        for block in self.blocks:
            x = block(x)
            if isinstance(x, tuple):
                losses.append(x[1])
                x = x[0]
        return {"hidden": x, "aux_loss": sum(losses)} if losses else {"hidden": x}


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("returned", ("'aux_loss'", "'blocks.0' (Router)")),
        ("attribute", ("attribute 'last_loss'", "'blocks.0' (Router)")),
        ("list", ("attribute 'losses[0]'", "'blocks.0' (Router)")),
        ("bias", ("buffer 'bias'", "'blocks.0' (Router)")),
        ("sequence", ("no sample depends",)),
        ("z", ("no sample depends",)),
    ],
)
def test_losses_of_routers(kind: str, words: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    assert lacking(asked(Routed(kind), torch.randn(4, 5, 6)), *words) == []


# What cannot be told


def test_what_draws_or_communicates_is_not_told() -> None:
    noisy = Stack(Block(lambda x: x + torch.randn_like(x).mean(0)))
    assert "draws random numbers" in asked(noisy, X)
    assert "given no tensors" in asked(Stack(), 1)

    class Replaced(nn.Linear):
        pass

    model = Replaced(6, 6)
    model.forward = lambda x: x - x.mean(0)  # type: ignore[method-assign]
    assert "was replaced" in asked(model, X)


# Nothing is said of what has no such loss


FEW = ("llama", "qwen3_moe", "bert", "vit", "clip")


@pytest.mark.parametrize("name", [n if n in FEW else pytest.param(n, marks=pytest.mark.rest) for n in CASES])
def test_architectures_have_none(name: str) -> None:
    case, calls = CASES[name], list[Any]()
    model = case.build(0)
    with model.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True):
        case.loss(model, case.batch(2, 0))
    sentence = asked(model, *calls[0][0], **calls[0][1])
    assert ("not tried" if name == "qwen2_vl" else "no sample depends") in sentence


# Sharded


@on_ranks(2)
def test_a_pass_of_a_sharded_model_warns_once(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = Routed("attribute")
    plan = trueshard.shard(model)
    with torch.no_grad():
        model(torch.randn(4, 5, 6))  # not asked
    named = pytest.warns(UserWarning, match=naming("'last_loss'", "'blocks.0' (Router)", "all_reduce"))
    with named if rank == 0 else contextlib.nullcontext():
        model(torch.randn(4, 5, 6))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.randn(4, 5, 6))
    assert plan.tried == ()


@on_ranks(2)
def test_losses_that_ranks_gather_by_themselves_are_not_tried(rank: int, world_size: int) -> None:
    def gathered(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
        every = [torch.empty_like(two) for _ in range(world_size)]
        dist.all_gather(every, two.detach())
        return (one @ torch.cat(every).T).logsumexp(-1).mean()

    model = Encoder(gathered)
    trueshard.shard(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(X, X)["more"][0]["loss"].backward()


@on_ranks(2)
def test_balancing_over_ranks_is_not_named_and_the_switch_is_kept(rank: int, world_size: int) -> None:
    ids = torch.arange(24).view(4, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = EXPERTS["qwen3_moe"].build(0)
        trueshard.shard(model)
        model(input_ids=ids, labels=ids, output_router_logits=True).loss.backward()
        off = Routed("attribute")
        plan = trueshard.shard(off, tensor={"trial": False})
        off(torch.randn(4, 5, 6))
    assert lacking(str(plan), "not tried", '"trial" is false') == []
