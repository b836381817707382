"""Direct preference optimisation: DPO (Rafailov et al. 2023, equation 7; label smoothing: Mitchell 2023).

It compares with a reference: another model, frozen and sharded, or the model itself with its PEFT adapter off, which
costs no memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from trueshard.model import names
from trueshard.parallel.collectives import sum_parts
from trueshard.sharding.hooks import runtime_of
from trueshard.train.data.batches import Batch
from trueshard.train.losses import CausalLoss
from trueshard.train.rl.ranks import on_every_rank


class PreferenceLoss:
    """DPO loss, summed over pairs: a ``Loss``.

    The reward of an answer is β (log π - log of the reference). For a chosen and a rejected answer, with the margin m =
    reward(chosen) - reward(rejected), the loss is -(1 - s) log sigmoid(m) - s log sigmoid(-m).

    The reference is the frozen model before training, on the same device, sharded if the model is; without one, the
    model with its adapter off, which must be a PEFT model.
    """

    unit = "pair"
    tokens = staticmethod(CausalLoss.tokens)

    def __init__(
        self,
        reference: nn.Module | None = None,
        beta: float = 0.1,  # β, strength of the pull towards the reference
        label_smoothing: float = 0.0,  # s, probability that a preference is swapped
        whole_logits: bool = False,
    ) -> None:
        self.reference = None if reference is None else reference.eval()
        self.beta, self.label_smoothing = beta, label_smoothing
        self._policy, self._other = CausalLoss(whole_logits), CausalLoss(whole_logits)
        self._rewards: list[torch.Tensor] = []
        """Rewards of the chosen and the rejected answers since ``measures``: [pairs, 2] of each microbatch, float64."""

    def count(self, batch: Batch) -> int:
        """Return the number of pairs."""
        return batch["input_ids"].shape[0] // 2

    def __call__(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the summed loss of a microbatch: 0-dim, float32. Collective if sharded.

        ``batch``: ``input_ids`` and ``targets`` [2 × pairs, length]: the chosen answers, then the rejected ones in the
        same order; other tensors are passed to the models.
        """
        adapter_off = without_adapter(model) if self.reference is None else contextlib.nullcontext()
        with torch.no_grad(), adapter_off:
            before = self._other(model if self.reference is None else self.reference, batch, rows=True)
        rewards = self.beta * (before - self._policy(model, batch, rows=True))  # cross entropies are -log π
        runtime = runtime_of(names.unwrap(model))
        axes = None if runtime is None else runtime.axes
        shared = None if axes is None else axes.along.get("context")
        if shared is not None:  # so far of a part of each answer
            rewards = sum_parts(rewards, shared.get_group())
        chosen, rejected = rewards.chunk(2)
        if torch.is_grad_enabled() and (axes is None or (axes.leads("context") and axes.leads("tensor"))):
            self._rewards.append(torch.stack([chosen, rejected], 1).detach().double())
        right, wrong = F.logsigmoid(chosen - rejected), F.logsigmoid(rejected - chosen)
        loss = -((1 - self.label_smoothing) * right + self.label_smoothing * wrong).sum()
        # Each of the ranks that share an answer has its loss, and the gradient of its part: the value counts once.
        return loss if shared is None or shared.get_local_rank() == 0 else loss - loss.detach()

    def measures(self) -> dict[str, float]:
        """Return means over the pairs of all ranks that were trained on since the last call; begin anew. Collective.

        ``rewards_chosen`` and ``rewards_rejected`` of the answers, ``rewards_margins`` between them, and
        ``rewards_accuracies``, the part of the pairs whose chosen answer has the higher one. As in TRL.
        """
        local = [pair for rewards in self._rewards for pair in rewards.tolist()]
        self._rewards = []
        pairs = [pair for part in on_every_rank(lambda: local) for pair in part]
        keys = [f"rewards_{key}" for key in ("chosen", "rejected", "margins", "accuracies")]
        values = zip(*((c, r, c - r, float(c > r)) for c, r in pairs), strict=True)
        # Sorted: a sum in an order that does not depend on the number of ranks.
        return {key: sum(sorted(measured)) / len(pairs) for key, measured in zip(keys, values, strict=False)}


@contextlib.contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Run a PEFT model as its base, in evaluation mode; sharded or not.

    PEFT changes ``requires_grad`` along with it, on which sharded units would free their buffers; so it is restored at
    once.
    """
    root: Any = names.unwrap(model)
    if not callable(getattr(root, "disable_adapter", None)):
        raise ValueError(f"a {type(root).__name__} has no adapter to turn off; give PreferenceLoss a reference")
    trainable = [(parameter, parameter.requires_grad) for parameter in root.parameters()]
    training = model.training

    def restore() -> None:
        for parameter, wanted in trainable:
            if parameter.requires_grad != wanted:
                parameter.requires_grad_(wanted)

    try:
        with root.disable_adapter():
            restore()
            model.eval()
            yield
    finally:
        restore()
        model.train(training)
