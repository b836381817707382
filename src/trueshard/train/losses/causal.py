"""The losses of the trainer: what it asks of one, next-token cross entropy, and direct preference optimisation.

- Targets are aligned with inputs: the token to predict at a position stands at that position.
- The whole logits (tokens × vocabulary, in float32 with their gradient the largest tensors of a step) are never held
  if the model returns the output of its head unchanged; otherwise they are, with one warning.
- DPO (Rafailov et al. 2023, equation 7; label smoothing: Mitchell 2023) compares with a reference: another model,
  frozen and sharded, or the model itself with its PEFT adapter off, which costs no memory.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Protocol, cast, runtime_checkable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import get_device_states, set_device_states

from trueshard import _torch
from trueshard.model import names
from trueshard.train.data.samples import IGNORED, Batch
from trueshard.train.losses import head as chunks
from trueshard.train.losses.head import Forward, at_head, logits_of


@runtime_checkable
class Loss(Protocol):
    """A loss that counts the terms of its mean.

    Optional: ``unit``, the name of a term ("token" by default, for which an evaluation has a perplexity), and
    ``tokens(batch)``, the number of tokens that the model reads (by default the terms), for tokens a second.
    """

    def count(self, batch: Any) -> int:
        """Return the number of terms in the sum over a microbatch: its target tokens."""

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the sum of the terms of a microbatch: 0-dim, float32 or wider."""


class Mean:
    """Adapts a function (model, batch) → mean loss: every microbatch of every rank has the same weight."""

    unit = "microbatch"

    def __init__(self, function: Callable[[nn.Module, Any], torch.Tensor]) -> None:
        self._function = function

    def count(self, batch: Any) -> int:
        return 1

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return self._function(model, batch)


class CausalLoss:
    """Summed cross entropy of the next token: a ``Loss``."""

    def __init__(self, whole_logits: bool = False) -> None:
        self.whole_logits = whole_logits
        """True if the whole logits are held: as asked for, or because the model needs it."""
        self._known = whole_logits

    def count(self, batch: Batch) -> int:
        """Return the number of targets."""
        return int(batch["targets"].ne(IGNORED).sum())

    def tokens(self, batch: Batch) -> int:
        """Return the number of tokens that the model reads, without padding."""
        return int(batch["attention_mask"].sum()) if "attention_mask" in batch else batch["input_ids"].numel()

    def __call__(self, model: nn.Module, batch: Batch, *, rows: bool = False) -> torch.Tensor:
        """Return the cross entropy, in nats, float32, summed over a microbatch (0-dim) or each of its rows ([batch]).

        ``batch``: ``input_ids`` and ``targets`` [batch, length]; other tensors are passed to the model. Raises
        `ValueError` if the model gives no logits for each position. Collective if sharded.
        """
        inputs = {key: value for key, value in batch.items() if key != "targets"}
        targets = batch["targets"]
        shape = targets.shape[:1] if rows else ()

        def compute(head: nn.Module, own: Forward, hidden: torch.Tensor) -> torch.Tensor:
            hidden = hidden.flatten(0, 1)
            is_plain = isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward
            if is_plain and not rows:
                found = chunks.summed(cast(nn.Linear, head), hidden, targets.flatten())
            else:
                each = chunks.each(own, hidden, targets.flatten())
                found = each.view(targets.shape).sum(1) if rows else each.sum()
            return found.reshape(-1, 1, 1).clone()  # FSDP2 warns of views

        if not self.whole_logits:
            before = None if self._known else (torch.get_rng_state(), *get_device_states(targets))
            found = at_head(model, inputs, targets.shape, compute)
            if found is not None:
                self._known = True
                return found.reshape(shape)
            assert before is not None, "a model changed what it does to its logits"
            torch.set_rng_state(before[0])
            set_device_states(*before[1:])
            self.whole_logits = self._known = True
            if not dist.is_initialized() or dist.get_rank() == 0:
                kind = _torch.own_class(names.unwrap(model)).__name__
                warnings.warn(
                    f"{kind} changes the logits that its head gives, so the loss is computed from all of them at once",
                    stacklevel=2,
                )
        logits = logits_of(model, inputs)
        if logits.shape[:-1] != targets.shape:
            raise ValueError(
                f"the model gives logits of shape {list(logits.shape)} for {list(targets.shape)} targets; it must give "
                "one row for each input token"
            )
        each = chunks.losses_of(logits.flatten(0, 1), targets.flatten()).view(targets.shape)
        return each.sum(1) if rows else each.sum()


class PreferenceLoss:
    """DPO loss, summed over pairs: a ``Loss``.

    For a chosen and a rejected answer, with the margin m = log π(chosen) - log π(rejected) minus the same of the
    reference, it is -(1 - s) log sigmoid(βm) - s log sigmoid(-βm).

    The reference is the frozen model before training, on the same device, sharded if the model is; without one, the
    model with its adapter off, which must be a PEFT model.
    """

    unit = "pair"

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

    def count(self, batch: Batch) -> int:
        """Return the number of pairs."""
        return batch["input_ids"].shape[0] // 2

    def tokens(self, batch: Batch) -> int:
        """Return the number of tokens that the model reads."""
        return self._policy.tokens(batch)

    def __call__(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the summed loss of a microbatch: 0-dim, float32. Collective if sharded.

        ``batch``: ``input_ids`` and ``targets`` [2 × pairs, length]: the chosen answers, then the rejected ones in the
        same order; other tensors are passed to the models.
        """
        adapter_off = without_adapter(model) if self.reference is None else contextlib.nullcontext()
        with torch.no_grad(), adapter_off:
            before = self._margins(self._other, model if self.reference is None else self.reference, batch)
        margins = self.beta * (self._margins(self._policy, model, batch) - before)
        right, wrong = F.logsigmoid(margins), F.logsigmoid(-margins)
        return -((1 - self.label_smoothing) * right + self.label_smoothing * wrong).sum()

    def _margins(self, losses: CausalLoss, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return log-probability of the chosen minus the rejected answers, [pairs]."""
        chosen, rejected = losses(model, batch, rows=True).chunk(2)
        return rejected - chosen


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
