"""Bugs of data parallelism: ranks with a model each, or with shards of one, and rows of the batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.silent.frame import SAMPLES, Network, Programs, Run, adamw, sgd

PROGRAMS = Programs()


def wrapped(run: Run, model: nn.Module) -> nn.Module:
    """Return the model under DDP, if there are ranks."""
    return DistributedDataParallel(model) if run.ranks > 1 else model


def mean_square(run: Run, model: nn.Module) -> Callable[[], torch.Tensor]:
    """Return the loss of this rank's rows of the next batch."""
    return lambda: model(run.mine(run.features())).square().mean()


@PROGRAMS.add("pytorch/pytorch#104336", "DDP loses its hooks when the model is converted and back", "", "gradient")
def converted(run: Run) -> None:
    model = wrapped(run, Network())
    model(run.mine(run.features())).sum().backward()
    model.zero_grad()
    if run.bug:
        model.double().float()  # on a GPU: .cpu().cuda(); both make new gradient accumulators
    run.train(model, sgd(model), mean_square(run, model))


@PROGRAMS.add("jxmnop, DDP out of sync", "now and then the model is called without its DDP wrapper", "", "gradient")
def unwrapped(run: Run) -> None:
    model = wrapped(run, Network())
    calls = iter(range(100))

    def loss() -> torch.Tensor:
        called = getattr(model, "module", model) if run.bug and next(calls) == 1 else model
        return called(run.mine(run.features())).square().mean()

    run.train(model, sgd(model), loss)


@PROGRAMS.add("pytorch forum 84911", "names with a wrapper's prefix: the head is frozen, too", r"^head\b", "start")
def frozen(run: Run) -> None:
    model = Network()
    holder = nn.ModuleDict({"module": model})
    for name, parameter in (holder if run.bug else model).named_parameters():
        parameter.requires_grad_(name.startswith("head") or "norm" in name)
    run.train(model, sgd(model), mean_square(run, model), lambda: run.average(model))


@PROGRAMS.add("open-mmlab/mmpretrain#702", "stages that were to be frozen are trained", r"^blocks\.0\b", "start")
def thawed(run: Run) -> None:
    model = Network()
    model.blocks[0].requires_grad_(False)
    if run.bug:
        model.requires_grad_()  # nothing calls what freezes
    run.train(model, adamw(model), mean_square(run, model), lambda: run.average(model))


@PROGRAMS.add("pytorch/pytorch#84803", "a transfer between cards arrives as zeros", r"^blocks\.1\.up\b", "gradient")
def lost(run: Run) -> None:
    model = Network()

    def reduce() -> None:
        run.average(model)
        if run.bug and run.rank == 1:
            model.blocks[1].up.weight.grad.zero_()

    run.train(model, sgd(model), mean_square(run, model), reduce)


@PROGRAMS.add("huggingface/accelerate#2665", "the optimizer was made before FSDP replaced parameters", "", "optimizer")
def old_parameters(run: Run) -> None:
    model = Network()
    optimizer = adamw(model)
    if run.ranks > 1:
        for module in (*model.blocks, model):
            fully_shard(module)
    if not run.bug:
        optimizer = adamw(model)
    run.train(model, optimizer, mean_square(run, model))


@PROGRAMS.add("stackoverflow 67180955", "every rank draws the same augmentation", "", "samples")
def same_noise(run: Run) -> None:
    model = Network()

    def loss() -> torch.Tensor:
        noise = 0.1 * run.features()
        rows = noise[: SAMPLES // run.ranks] if run.bug else run.mine(noise)
        return model(run.mine(run.features()) + rows).square().mean()

    run.train(model, sgd(model), loss, lambda: run.average(model))


@PROGRAMS.add(
    "NVIDIA/Megatron-LM#7452", "a mean over valid tokens is taken on each rank, then over ranks", "", "gradient"
)
def local_mean(run: Run) -> None:
    model = Network()

    def loss() -> torch.Tensor:
        mask = torch.rand(SAMPLES, generator=run.numbers) < torch.linspace(0.2, 1.0, SAMPLES)
        mask[0] = True
        valid = run.mine(mask).float()
        count = valid.sum() if run.bug else run.total(valid.sum()) / run.ranks
        return (model(run.mine(run.features())).square().mean(-1) * valid).sum() / count

    run.train(model, sgd(model), loss, lambda: run.average(model))


@PROGRAMS.add("NVIDIA/Megatron-LM#1012", "a deferred gradient comes after the reduction", r"^head\.weight$", "gradient")
def deferred(run: Run) -> None:
    model = Network()
    held: list[tuple[torch.Tensor, torch.Tensor]] = []

    def loss() -> torch.Tensor:
        held.clear()
        x = run.mine(run.features())
        for block in model.blocks:
            x = block(x)
        result = nn.functional.linear(x, model.head.weight.detach(), model.head.bias)
        result.register_hook(lambda gradient: held.append((gradient, x.detach())))
        return result.square().mean()

    def finish() -> None:
        (gradient, x) = held[0]
        model.head.weight.grad = gradient.T @ x

    def reduce() -> None:
        if run.bug:
            run.average(model)
            finish()
        else:
            finish()
            run.average(model)

    run.train(model, sgd(model), loss, reduce)


class Sharded(torch.optim.Adam):
    """Adam whose parameters have owners, that send what they have updated to the other ranks."""

    def __init__(self, run: Run, model: nn.Module, late: str = "") -> None:
        self._run, self._late = run, late
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        super().__init__(model.parameters(), lr=1e-2, foreach=False)

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        parameters = self.param_groups[0]["params"]
        before = [parameter.clone() for parameter in parameters]
        super().step()
        for number, (parameter, old) in enumerate(zip(parameters, before, strict=True)):
            owner = number % self._run.ranks
            if self._run.rank != owner:
                parameter.copy_(old)
            if self._run.ranks > 1 and not (self._late and self._names[id(parameter)].startswith(self._late)):
                dist.broadcast(parameter.data, owner)


@PROGRAMS.add(
    "NVIDIA/Megatron-LM#950", "forward reads weights of the step before: their gather is late", r"^head\b", "optimizer"
)
def stale(run: Run) -> None:
    model = Network()
    optimizer = Sharded(run, model, "head" if run.bug else "")

    def arrive(*_: object) -> None:
        for number, (name, parameter) in enumerate(model.named_parameters()):
            if name.startswith("head") and run.ranks > 1 and run.bug:
                dist.broadcast(parameter.data, number % run.ranks)

    model.head.register_forward_hook(arrive)  # a pre-hook would be in time
    run.train(model, optimizer, mean_square(run, model), lambda: run.average(model))


@PROGRAMS.add(
    "NVIDIA/Megatron-LM#656", "the distributed optimizer's buffer unties the head", r"^(embed|head)\b", "start"
)
def untied(run: Run) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"embed": nn.Embedding(30, 16), "head": nn.Linear(16, 30, bias=False)})
    model["head"].weight = model["embed"].weight
    if run.bug and run.ranks > 1:
        model["head"].weight = nn.Parameter(model["embed"].weight.detach().clone())

    def loss() -> torch.Tensor:
        tokens = run.mine(run.tokens())
        logits = model["head"](model["embed"](tokens))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten())

    run.train(model, Sharded(run, model), loss, lambda: run.average(model))
