"""Bugs of pipelines: ranks with stages of a model, here two stages of two replicas each.

The embedding is on the first stage, and once more on the last one, as its head. Each stage's parameters have owners
among its replicas, that alone keep the reduced gradient, step, and send what they have updated (ZeRO 1).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.silent.frame import VOCABULARY, WIDTH, Block, Programs, Run, adamw

PROGRAMS = Programs()
REPLICAS = 2


class Sent(torch.autograd.Function):
    """Sends activations to the next stage, and receives their gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rank: int) -> torch.Tensor:
        ctx.rank, ctx.like = rank, torch.empty_like(x)
        dist.send(x.contiguous(), rank)
        return x.new_zeros(0)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        dist.recv(ctx.like, ctx.rank)
        return ctx.like, None


class Received(torch.autograd.Function):
    """Receives activations of the stage before, and sends their gradient."""

    @staticmethod
    def forward(ctx: Any, like: torch.Tensor, rank: int) -> torch.Tensor:
        ctx.rank, x = rank, torch.empty_like(like)
        dist.recv(x, rank)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        dist.send(gradient.contiguous(), ctx.rank)
        return None, None


class Stages(nn.Module):
    """A language model with a tied head: all of it on one process, else the modules of this rank's stage."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.run, self.first, self.last = run, run.rank < REPLICAS, run.ranks == 1 or run.rank >= REPLICAS
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        blocks = {"before": Block(), "after": Block()}
        self.blocks = nn.ModuleDict(
            {name: block for name, block in blocks.items() if (self.first if name == "before" else self.last)}
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits, (samples, LENGTH, VOCABULARY); nothing on the first of two stages."""
        if self.first:
            x = self.blocks["before"](self.embed(tokens))
            if not self.last:
                return Sent.apply(x, self.run.rank + REPLICAS)
        else:
            x = Received.apply(torch.empty(*tokens.shape, WIDTH, requires_grad=True), self.run.rank - REPLICAS)
        return nn.functional.linear(self.blocks["after"](x), self.embed.weight)


@PROGRAMS.add(
    "NVIDIA/Megatron-LM#844",
    "stages sum their shared embedding's gradients after each has reduced and scattered them",
    r"^embed\b",
    "gradient",
    ranks=4,
)
def shared_embedding(run: Run) -> None:
    model = Stages(run)
    parameters = list(model.parameters())
    optimizer = adamw(model)
    groups = [dist.new_group(ranks) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3))] if run.ranks > 1 else []
    replica, stage = run.rank % REPLICAS, run.rank // REPLICAS

    def owner(number: int) -> int:  # the embedding comes first on the first stage, and last on the last one
        return stage * REPLICAS + (number + stage) % REPLICAS

    def replicas() -> None:
        for number, parameter in enumerate(parameters):
            mean = parameter.grad / REPLICAS
            dist.all_reduce(mean, group=groups[stage])
            if run.rank == owner(number):
                parameter.grad = mean

    def stages() -> None:
        dist.all_reduce(model.embed.weight.grad, group=groups[2 + replica])

    def reduce() -> None:
        if run.ranks > 1:
            for step in (replicas, stages) if run.bug else (stages, replicas):
                step()
            for number, parameter in enumerate(parameters):
                if run.rank != owner(number):
                    parameter.grad = None

    def send(*_: object) -> None:
        for number, parameter in enumerate(parameters) if run.ranks > 1 else ():
            dist.broadcast(parameter.data, owner(number), group=groups[stage])

    def loss() -> torch.Tensor:
        tokens = run.tokens().chunk(REPLICAS if run.ranks > 1 else 1)[replica]
        logits = model(tokens)
        if not model.last:
            return logits.sum()
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    optimizer.register_step_post_hook(send)
    run.train(model, optimizer, loss, reduce)
