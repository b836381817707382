"""Cross entropy of a causal language model, over batches of ``trueshard.train.data.samples``.

- Targets are aligned with inputs: what is to be predicted at a place stands at that place.
- The whole logits (tokens × vocabulary, in float32 with their gradient the largest tensors of a step) are never held,
  where the model returns what its head gives; elsewhere they are, and that is said once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from trueshard import _torch, names
from trueshard.train.data.samples import IGNORED, Batch
from trueshard.train.losses import chunks
from trueshard.train.losses.head import at_head, logits_of

Forward = Callable[[torch.Tensor], torch.Tensor]
ReduceAtHead = Callable[[nn.Module, Forward, torch.Tensor, torch.Tensor], torch.Tensor]


class CausalLoss:
    """The cross entropy of the next token, summed: a ``trueshard.train.trainer.Loss``.

    Args:
        whole_logits: compute it from the whole logits.
    """

    def __init__(self, whole_logits: bool = False) -> None:
        self._tokens = TokenLosses(whole_logits)

    @property
    def whole_logits(self) -> bool:
        """Whether the whole logits are held: as asked for, or as the model turned out to need."""
        return self._tokens.whole_logits

    def count(self, batch: Batch) -> int:
        """The number of targets that count."""
        return int(batch["targets"].ne(IGNORED).sum())

    def tokens(self, batch: Batch) -> int:
        """The number of tokens that the model reads."""
        return tokens_of(batch)

    def __call__(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The summed cross entropy of a microbatch: 0-dim, float32, in nats.

        Args:
            model: of transformers, sharded or not. Every rank calls it at the same time.
            batch: ``input_ids`` and ``targets`` [batch, length]; the rest is given to the model as it is.

        Raises:
            ValueError: the model gives no logits for each place of ``input_ids``.
        """
        return self._tokens(model, batch, _sum, lambda losses: losses.sum())


def tokens_of(batch: Batch) -> int:
    """Tokens in a microbatch, without the padding that an attention mask tells of."""
    return int(batch["attention_mask"].sum()) if "attention_mask" in batch else batch["input_ids"].numel()


class TokenLosses:
    """Cross entropies of tokens, reduced at the head, or from the whole logits.

    Args:
        whole_logits: always from the whole logits.
    """

    def __init__(self, whole_logits: bool) -> None:
        self.whole_logits = whole_logits
        self._known = whole_logits

    def __call__(
        self,
        model: nn.Module,
        batch: Batch,
        reduce_at_head: ReduceAtHead,
        reduce: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Reduced losses, any shape.

        Args:
            model, batch: as for ``CausalLoss``.
            reduce_at_head: (head, its forward, hidden [tokens, features], targets [batch, length]) → reduced losses.
            reduce: losses [batch, length] → the same.
        """
        inputs = {key: value for key, value in batch.items() if key != "targets"}
        targets = batch["targets"]
        if not self.whole_logits:
            random = None if self._known else _random_state(targets.device)
            shape: list[torch.Size] = []

            def compute(head: nn.Module, own: Forward, hidden: torch.Tensor) -> torch.Tensor:
                found = reduce_at_head(head, own, hidden.flatten(0, 1), targets)
                shape.append(found.shape)
                return found.reshape(-1, 1, 1).clone()  # FSDP2 warns of views

            found = at_head(model, inputs, targets.shape, compute)
            if found is not None:
                self._known = True
                return found.reshape(shape[0])
            assert random is not None, "a model changed what it does to its logits"
            _restore(random, targets.device)
            self.whole_logits = self._known = True
            kind = _torch.own_class(names.unwrap(model)).__name__
            _say(f"{kind} changes the logits that its head gives, so the loss is computed from all of them at once")
        logits = logits_of(model, inputs)
        if logits.shape[:-1] != targets.shape:
            raise ValueError(
                f"the model gives logits of shape {list(logits.shape)} for {list(targets.shape)} targets; it must give "
                "one row for each input token"
            )
        wide = logits if logits.dtype == torch.float64 else logits.float()
        losses = F.cross_entropy(wide.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none")
        return reduce(losses.view(targets.shape))


def _sum(head: nn.Module, own: Forward, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if chunks.is_plain(head):
        assert isinstance(head, nn.Linear)
        return chunks.summed(head, hidden, targets.flatten())
    return chunks.each(own, hidden, targets.flatten()).sum()


def _random_state(device: torch.device) -> list[torch.Tensor]:
    """Of the generators that a pass may use."""
    module = None if device.type == "cpu" else torch.get_device_module(device)
    return [torch.get_rng_state(), *([] if module is None else [module.get_rng_state(device)])]


def _restore(states: list[torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.get_device_module(device).set_rng_state(state, device)


def _say(text: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        warnings.warn(text, stacklevel=2)
