"""Direct preference optimisation (Rafailov et al. 2023, equation 7), with label smoothing (Mitchell 2023).

- The reference is another model, frozen and sharded like any; or the model itself with its PEFT adapter off, which
  costs no memory.
- Log-probabilities are sums over the targets of a row in float32, and the whole logits are held for neither model
  (where the model allows it, see ``CausalLoss``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from trueshard import names
from trueshard.train.data.samples import Batch
from trueshard.train.losses import chunks
from trueshard.train.losses.causal import Forward, TokenLosses, tokens_of


class PreferenceLoss:
    """The DPO loss, summed over pairs: a ``trueshard.train.trainer.Loss``.

    For a pair of a chosen and a rejected answer, with margin m = log π(chosen) - log π(rejected) less the same of the
    reference, it is -(1 - s) log sigmoid(βm) - s log sigmoid(-βm).

    Args:
        reference: the model before training, frozen, on the same device, sharded if the model is. None: the model
            itself with its adapter off; it must be a PEFT model.
        beta: how strongly the model is held to the reference.
        label_smoothing: s, the probability that a preference is the wrong way round.
        whole_logits: compute from the whole logits.
    """

    def __init__(
        self,
        reference: nn.Module | None = None,
        beta: float = 0.1,
        label_smoothing: float = 0.0,
        whole_logits: bool = False,
    ) -> None:
        self.reference = None if reference is None else reference.eval()
        self.beta, self.label_smoothing = beta, label_smoothing
        self._policy, self._other = TokenLosses(whole_logits), TokenLosses(whole_logits)

    unit = "pair"

    def count(self, batch: Batch) -> int:
        """The number of pairs."""
        return batch["input_ids"].shape[0] // 2

    def tokens(self, batch: Batch) -> int:
        """The number of tokens that the model reads."""
        return tokens_of(batch)

    def __call__(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The summed loss of a microbatch: 0-dim, float32.

        Args:
            model: the one that is trained. Every rank calls it at the same time.
            batch: ``input_ids`` and ``targets`` [2 × pairs, length], the chosen answers first, then the rejected ones
                in the same order; the rest is given to the models as it is.
        """
        with torch.no_grad(), self._referring(model) as reference:
            before = self._margins(self._other, reference, batch)
        margins = self.beta * (self._margins(self._policy, model, batch) - before)
        right, wrong = F.logsigmoid(margins), F.logsigmoid(-margins)
        return -((1 - self.label_smoothing) * right + self.label_smoothing * wrong).sum()

    def _margins(self, losses: TokenLosses, model: nn.Module, batch: Batch) -> torch.Tensor:
        """[pairs]: log-probability of the chosen answer less that of the rejected one."""
        rows = -losses(model, batch, _rows, lambda found: found.sum(1))
        chosen, rejected = rows.chunk(2)
        return chosen - rejected

    @contextlib.contextmanager
    def _referring(self, model: nn.Module) -> Iterator[nn.Module]:
        if self.reference is not None:
            yield self.reference
            return
        with without_adapter(model):
            yield model


@contextlib.contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """The base of a PEFT model, in evaluation mode; sharded or not.

    PEFT thaws and freezes parameters along, for which sharded units would let go of their buffers; so ``requires_grad``
    is put back at once.
    """
    root: Any = names.unwrap(model)
    if not callable(getattr(root, "disable_adapter", None)):
        raise ValueError(f"a {type(root).__name__} has no adapter to turn off; give PreferenceLoss a reference")
    trainable = [(parameter, parameter.requires_grad) for parameter in root.parameters()]
    training = model.training

    def put_back() -> None:
        for parameter, wanted in trainable:
            if parameter.requires_grad != wanted:
                parameter.requires_grad_(wanted)

    try:
        with root.disable_adapter():
            put_back()
            model.eval()
            yield
    finally:
        put_back()
        model.train(training)


def _rows(head: nn.Module, own: Forward, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return chunks.each(own, hidden, targets.flatten()).view(targets.shape).sum(1)
