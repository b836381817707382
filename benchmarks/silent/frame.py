"""What the programs share: processes, data, models, the loop, and the two lines that record a run.

A program is a function of a ``Run``. It says ``if run.bug`` where the bug is; everything else is the same with the bug
and without it. On one process its collectives do nothing, so that the same program is the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

WIDTH, SAMPLES, VOCABULARY, LENGTH = 16, 8, 30, 8
STEPS = 4
"""That a run takes; all but the last are recorded: its first pass ends the recording."""


@dataclass(frozen=True)
class Program:
    """A training program that can have a bug."""

    name: str
    source: str
    """The thread in which the bug was reported, ``owner/repository#number``; else a word for it."""
    title: str
    """What goes wrong."""
    where: str
    """Regular expression of what is at fault: names of a module or of parameters; "" for all parameters alike."""
    kind: str
    """Where it shows first: "start", "samples", "forward", "loss", "backward", "gradient", "optimizer", or "end": by a
    run that does not."""
    function: Callable[[Run], None]
    ranks: int = 2
    """Processes that the run with the bug has; the reference has one."""


@dataclass
class Run:
    """One process of a run of a program."""

    bug: bool = False
    rank: int = 0
    ranks: int = 1
    numbers: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(1))

    def mine(self, value: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Return this rank's equal part of ``value``, cut in ``dim``."""
        return value.chunk(self.ranks, dim)[self.rank]

    def total(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks."""
        value = value.detach().clone()
        if self.ranks > 1:
            dist.all_reduce(value)
        return value

    def average(self, model: nn.Module) -> None:
        """Replace gradients by their means over ranks, as data parallelism does."""
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.copy_(self.total(parameter.grad) / self.ranks)

    def features(self, samples: int = SAMPLES) -> torch.Tensor:
        """Return the next batch of features, (samples, WIDTH), fp32: the same on every rank."""
        return torch.randn(samples, WIDTH, generator=self.numbers)

    def tokens(self, samples: int = 2) -> torch.Tensor:
        """Return the next batch of token ids, (samples, LENGTH), int64: the same on every rank."""
        return torch.randint(0, VOCABULARY, (samples, LENGTH), generator=self.numbers)

    def train(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Callable[[], torch.Tensor],
        reduce: Callable[[], object] = lambda: None,
        steps: int = STEPS,
    ) -> None:
        """Train; ``loss`` draws its batch, ``reduce`` makes this rank's gradients whole before the optimizer's step."""
        record(model, optimizer)
        for _ in range(steps):
            loss().backward()
            reduce()
            optimizer.step()
            optimizer.zero_grad()


def record(model: nn.Module, optimizer: Optimizer) -> None:
    """Let ``trueshard verify`` see the run: the two lines that a script needs."""
    from trueshard.verification import record

    record(model, optimizer)


class Block(nn.Module):
    """A residual block: norm, up, down."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Network(nn.Module):
    """Two blocks and a head, on features (samples, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def sgd(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.05)


def adamw(model: nn.Module) -> AdamW:
    """Return AdamW that takes parameters one by one: parts and whole ones do not go together."""
    return AdamW(model.parameters(), lr=1e-2, foreach=False)


class Programs(dict[str, Program]):
    """The programs of a file, by name."""

    def add(
        self, source: str, title: str, where: str, kind: str, ranks: int = 2
    ) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
        """Return a decorator that adds a function as a program of its name."""

        def added(function: Callable[[Run], None]) -> Callable[[Run], None]:
            name = function.__name__
            self[name] = Program(name, source, title, where, kind, function, ranks)
            return function

        return added


def start(program: Program, bug: bool) -> None:
    """Run a program on this process, a rank of the process group if there is one."""
    torch.manual_seed(0)
    many = dist.is_initialized()
    program.function(Run(bug, dist.get_rank() if many else 0, dist.get_world_size() if many else 1))
