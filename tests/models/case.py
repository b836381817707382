"""What every entry of the catalogue is: a way to build a small model, a batch for it, and its loss.

- Building is deterministic: the same seed gives the same weights in every process, without a file or a hub.
- A loss is a mean over samples, and nothing couples samples (no padding, no batch statistics, no auxiliary loss of
  experts, no dropout): the mean over equal slices of a batch is the loss of the whole batch. Parity stands on this.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

Batch = dict[str, torch.Tensor]

VOCABULARY = 64
"""token ids of the tiny models; 0 to 2 are padding, start and end and appear in no batch"""
LENGTH = 8
"""tokens a sample"""


def own_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The loss that a transformers model computes from the labels in `batch`."""
    return model(**batch).loss


@dataclass(frozen=True)
class Case:
    """A small model to train. Tests name it (`ARCHITECTURES["llama"]`), so that workers look it up by themselves."""

    build: Callable[[int], nn.Module]
    """seed -> a fresh module in training mode"""
    batch: Callable[[int, int], Batch]
    """(samples, seed) -> what the model is called with; every tensor has the samples in dim 0"""
    loss: Callable[[nn.Module, Batch], torch.Tensor] = own_loss
    """(model, batch) -> scalar, a mean over samples"""
    unused: tuple[str, ...] = ()
    """trainable parameters that this loss does not reach: globs over names"""
    kind: str = ""
    """the family it belongs to, as in `decoder`"""

    def reaches(self, name: str) -> bool:
        """Whether the parameter `name` gets a gradient from this loss, if it is trainable."""
        return not any(fnmatchcase(name, pattern) for pattern in self.unused)


def rows(batch: Batch, rank: int, world_size: int) -> Batch:
    """The part of a global batch that `rank` trains on: equal, contiguous rows of dim 0.

    Raises ValueError if the rows do not divide by `world_size`: a mean of means would not be the mean.
    """
    found = {}
    for key, value in batch.items():
        if len(value) % world_size:
            raise ValueError(f"{key}: {len(value)} rows do not divide by {world_size} ranks; choose a multiple")
        found[key] = value.chunk(world_size)[rank]
    return found


def seeded(seed: int, build: Callable[[], nn.Module]) -> nn.Module:
    """`build()` under `torch.manual_seed(seed)`, in training mode; the caller's random state is kept."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build().train()


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tokens(samples: int, seed: int, length: int = LENGTH, high: int = VOCABULARY) -> torch.Tensor:
    """Token ids [samples, length] without special ones."""
    return torch.randint(3, high, (samples, length), generator=generator(seed))


def features(samples: int, seed: int, *shape: int) -> torch.Tensor:
    """Normal fp32 numbers [samples, *shape]."""
    return torch.randn(samples, *shape, generator=generator(seed))


def regression(samples: int, seed: int, width: int = 8) -> Batch:
    return {"x": features(samples, seed, width), "y": features(samples, seed + 1, width)}


def language(samples: int, seed: int) -> Batch:
    ids = tokens(samples, seed)
    return {"input_ids": ids, "labels": ids.clone()}


def squared_error(model: nn.Module, batch: Batch) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def next_token(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of token t + 1 under logits [samples, length, vocabulary] at t."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
