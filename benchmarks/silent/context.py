"""Bugs of context parallelism and of experts: ranks with parts of each sequence, ranks with experts of their own."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.silent.frame import LENGTH, WIDTH, Programs, Run, adamw, sgd
from benchmarks.silent.megatron import ALONE, GATHER, across

PROGRAMS = Programs()


class Context(nn.Module):
    """Causal attention on this rank's part of the sequences, with keys and values of all parts, and a head."""

    def __init__(self, run: Run, join: Any = GATHER, positions: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.run, self.join, self.positions = run, join, positions
        self.place = nn.Embedding(LENGTH, WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's part, (samples, LENGTH / ranks, WIDTH), for whole sequences (samples, LENGTH, WIDTH)."""
        places = torch.arange(LENGTH)
        mine = self.run.mine(places)
        x = self.run.mine(x, 1) + self.place(mine if self.positions else mine - mine[0])
        key, value = (across(self.join, layer(x), self.run) for layer in (self.key, self.value))
        mask = mine[:, None] >= places
        attended = nn.functional.scaled_dot_product_attention(self.query(x), key, value, attn_mask=mask)
        return self.head(attended)


def attend(run: Run, model: nn.Module, factor: float = 1.0) -> None:
    def loss() -> torch.Tensor:
        x = run.features(2 * LENGTH).unflatten(0, (2, LENGTH))
        return factor * (model(x) - run.mine(x, 1)).square().mean()

    run.train(model, sgd(model), loss, lambda: run.average(model))


@PROGRAMS.add("NVIDIA/Megatron-LM#906", "the loss is scaled by the ranks of a sequence twice", "", "gradient")
def loss_scale(run: Run) -> None:
    attend(run, Context(run), run.ranks if run.bug else 1.0)


@PROGRAMS.add("NVIDIA/Megatron-LM#1464", "keys and values lack gradients of later parts", r"^(key|value)\b", "backward")
def attention(run: Run) -> None:
    attend(run, Context(run, ALONE if run.bug else GATHER))


@PROGRAMS.add("no report known", "each part of a sequence counts its places from 0", r"^place\b", "forward")
def positions(run: Run) -> None:
    attend(run, Context(run, positions=not run.bug))


class Experts(nn.Module):
    """Two experts, each on a rank of its own, that tokens reach by an all-to-all of equal or of stated sizes."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.run = run
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            result = torch.where((chosen == number)[:, None], expert(x), result)
        return x + weights[:, None] * result


@PROGRAMS.add("deepspeedai/DeepSpeed#5794", "a rank leaves an all-to-all out", "", "end")
def uneven(run: Run) -> None:
    model = Experts(run)

    def loss() -> torch.Tensor:
        if run.ranks > 1 and not (run.bug and run.rank == 1):
            dist.all_to_all_single(torch.zeros(2), torch.ones(2))
        return model(run.mine(run.features())).square().mean()

    run.train(model, adamw(model), loss, lambda: run.average(model))


@PROGRAMS.add("deepspeedai/DeepSpeed#5259", "experts' gradients are divided by all ranks", r"^experts\b", "gradient")
def expert_scale(run: Run) -> None:
    model = Experts(run)

    def reduce() -> None:
        run.average(model)
        for parameter in model.experts.parameters() if run.bug else ():
            if parameter.grad is not None:
                parameter.grad.div_(run.ranks)

    run.train(model, adamw(model), lambda: model(run.mine(run.features())).square().mean(), reduce)


@PROGRAMS.add("NVIDIA/Megatron-LM#761", "the states of two optimizers are exchanged when resumed", r"", "optimizer")
def exchanged(run: Run) -> None:
    model = Experts(run)
    optimizer = adamw(model)
    batch = run.features()

    def loss() -> torch.Tensor:
        return model(run.mine(batch)).square().mean()

    for _ in range(2):  # before the checkpoint
        loss().backward()
        run.average(model)
        optimizer.step()
        optimizer.zero_grad()
    one, two = ([optimizer.state[p] for p in expert.parameters()] for expert in model.experts)
    for first, second in zip(one, two, strict=True) if run.bug else ():
        for key in ("exp_avg", "exp_avg_sq"):
            first[key], second[key] = second[key], first[key]
    run.train(model, optimizer, loss, lambda: run.average(model))
