"""Hand-made modules, each with one property that fully-sharded training has to keep or to refuse in words."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from models.case import (
    VOCABULARY,
    Batch,
    Case,
    features,
    next_token,
    regression,
    seeded,
    squared_error,
    tokens,
)

WIDTH = 8


class Block(nn.Module):
    """A residual two-layer perceptron: the repeated unit of most modules here."""

    def __init__(self, width: int = WIDTH, norm_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, dtype=norm_dtype)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x.to(self.norm.weight.dtype)).to(self.up.weight.dtype)
        return x + self.down(torch.tanh(self.up(normed)))


class Stack(nn.Module):
    """Blocks in a ModuleList between two linear layers. The base of most modules here."""

    def __init__(self, depth: int = 3, width: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.last = nn.Linear(width, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class TiedLanguageModel(nn.Module):
    """Embedding and output head are one parameter, in different modules."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Scalar(Stack):
    """Has a 0-dim parameter at the root and one in every block, as learned temperatures and gates are."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        for block in self.blocks:
            block.gate = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block.gate * block(x)
        return self.scale * self.last(x)


class ScalarFirst(Scalar):
    """The first parameter is one that every rank holds whole, so that a list of all starts with it."""

    def __init__(self) -> None:
        super().__init__()
        self._parameters = {"scale": self._parameters["scale"], **self._parameters}


class GatedBlock(Block):
    """Reads its own 0-dim parameter inside its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gate * (super().forward(x) - x)


class Tiny(Stack):
    """Parameters with fewer rows than ranks: a norm over one channel, a (1, width) row, a bias of one element."""

    def __init__(self) -> None:
        super().__init__(depth=2)
        self.row = nn.Parameter(torch.randn(1, WIDTH))
        self.one = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.row) + self.one(x)


class TiedBlocks(Stack):
    """The first and the last block share one weight: a tie across units."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight


class Scaled(Block):
    """Has a parameter of its own beside its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(1 + 0.1 * torch.randn(WIDTH))


class SharingBlock(Block):
    """Holds a module of all blocks, whose own weight it reads as well, and vectors of all blocks in a ParameterDict."""

    def __init__(self, shared: nn.Module, bank: nn.ParameterDict) -> None:
        super().__init__()
        self.shared, self.bank = shared, bank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared(super().forward(x) * self.shared.scale) * self.bank["vectors"].mean(0)


class Sharing(Stack):
    """Every block holds one module (whose child the root calls as well) and one ParameterDict, which is not called."""

    def __init__(self) -> None:
        super().__init__(depth=0)
        shared, bank = Scaled(), nn.ParameterDict({"vectors": nn.Parameter(1 + 0.1 * torch.randn(5, WIDTH))})
        self.blocks = nn.ModuleList(SharingBlock(shared, bank) for _ in range(3))
        self.norm = shared.norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x))


class Methods(TiedLanguageModel):
    """Trained through `loss` and sampled through `generate`; neither is `forward`."""

    def loss(self, input_ids: torch.Tensor) -> torch.Tensor:
        return next_token(self(input_ids), input_ids)

    def encode(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Reads parameters without going through `forward` of this module."""
        return self.embed(input_ids) @ self.head.weight.T

    @torch.no_grad()
    def generate(self, input_ids: torch.Tensor, count: int) -> torch.Tensor:
        """Greedy continuation, [samples, length + count]."""
        for _ in range(count):
            input_ids = torch.cat([input_ids, self(input_ids)[:, -1].argmax(-1, keepdim=True)], dim=1)
        return input_ids


class ExpertsBlock(nn.Module):
    """A soft mixture over a ModuleList of experts: a repeated list inside a repeated block."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, experts)
        self.experts = nn.ModuleList(Block() for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.router(x).softmax(-1)
        return sum(weights[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


class Buffers(Stack):
    """A persistent buffer, one that state_dict leaves out, and an integer one that counts calls."""

    def __init__(self) -> None:
        super().__init__(depth=2)
        self.register_buffer("mean", torch.randn(WIDTH))
        self.register_buffer("mask", torch.rand(WIDTH), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward((x - self.mean) * self.mask)


class Sometimes(Stack):
    """Has a branch that no batch takes: its parameters are trainable and never get a gradient."""

    def __init__(self) -> None:
        super().__init__(depth=2)
        self.branch = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, use_branch: bool = False) -> torch.Tensor:
        return super().forward(self.branch(x) if use_branch else x)


def _strided() -> nn.Module:
    """Every weight of `up` is a transposed, so non-contiguous, view of what was allocated."""
    model = Stack()
    for block in model.blocks:
        block.up.weight = nn.Parameter(block.up.weight.detach().T.contiguous().T)
    return model


def _scalar_blocks() -> nn.Module:
    model = Stack()
    model.blocks = nn.ModuleList(GatedBlock() for _ in range(3))
    return model


def _mixed() -> nn.Module:
    """bf16 blocks with fp32 norms, between fp32 layers."""
    model = Stack(depth=2)
    model.blocks = nn.ModuleList(Block(norm_dtype=torch.float32) for _ in range(2))
    for block in model.blocks:
        block.up.to(torch.bfloat16)
        block.down.to(torch.bfloat16)
    return model


def _experts() -> nn.Module:
    model = Stack(depth=2)
    model.blocks = nn.ModuleList(ExpertsBlock() for _ in range(2))
    return model


def _frozen_tower() -> nn.Module:
    """A frozen stack that feeds a trainable one, as a vision tower feeds a language model."""
    return nn.Sequential(Stack(depth=2).requires_grad_(False), Stack(depth=2))


def _frozen_inside() -> nn.Module:
    """Frozen and trainable parameters side by side in every block."""
    model = Stack()
    for block in model.blocks:
        block.up.requires_grad_(False)
    return model


def _lazy() -> nn.Module:
    """Its second layer has no shape before the first forward."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LazyLinear(WIDTH))


def _attachments() -> nn.Module:
    """Attributes on parameters, and a gradient hook that halves the gradient of every `down.weight`."""
    model = Stack()
    for number, block in enumerate(model.blocks):
        block.up.weight.tag = f"up{number}"
        block.down.weight.register_hook(_half)
    return model


def _half(gradient: torch.Tensor) -> torch.Tensor:
    return gradient / 2


def _images(samples: int, seed: int) -> Batch:
    return {"x": features(samples, seed, 3, 8, 8), "y": features(samples, seed + 1, WIDTH)}


def _convolutions() -> nn.Module:
    """4-dim weights whose dim 0 is odd, and a group norm."""
    return nn.Sequential(
        nn.Conv2d(3, 5, 3, padding=1),
        nn.GroupNorm(1, 5),
        nn.ReLU(),
        nn.Conv2d(5, 7, 3),
        nn.Flatten(),
        nn.Linear(252, 8),
    )


def _language_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return next_token(model(batch["input_ids"]), batch["input_ids"])


def _ids(samples: int, seed: int) -> Batch:
    return {"input_ids": tokens(samples, seed)}


def _vector(build: Callable[[], nn.Module], unused: tuple[str, ...] = ()) -> Case:
    return Case(lambda seed: seeded(seed, build), regression, squared_error, unused, "handmade")


HANDMADE: dict[str, Case] = {
    "mlp": _vector(lambda: nn.Sequential(nn.Linear(WIDTH, 13), nn.Tanh(), nn.Linear(13, WIDTH))),
    "stack": _vector(Stack),
    "scalar": _vector(Scalar),
    "scalar_blocks": _vector(_scalar_blocks),
    "strided": _vector(_strided),
    "tiny": _vector(Tiny),
    "mixed": _vector(_mixed),
    "tied_blocks": _vector(TiedBlocks),
    "shared_modules": _vector(Sharing),
    "experts": _vector(_experts),
    "frozen_tower": _vector(_frozen_tower),
    "frozen_inside": _vector(_frozen_inside),
    "buffers": _vector(Buffers),
    "attachments": _vector(_attachments),
    "sometimes": _vector(Sometimes, unused=("branch.*",)),
    "convolutions": Case(lambda seed: seeded(seed, _convolutions), _images, squared_error, kind="handmade"),
    "tied_language_model": Case(lambda seed: seeded(seed, TiedLanguageModel), _ids, _language_loss, kind="handmade"),
    "methods": Case(
        lambda seed: seeded(seed, Methods), _ids, lambda model, batch: model.loss(**batch), kind="handmade"
    ),
}
"""trained as they are, and held against one process"""

LAZY = _vector(_lazy)
"""cannot be sharded before its first forward; to be refused in words"""

__all__ = ["HANDMADE", "LAZY", "Block", "ExpertsBlock", "GatedBlock", "Methods", "Stack", "TiedLanguageModel"]
