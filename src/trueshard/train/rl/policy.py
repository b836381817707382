"""The losses that raise the probability of answers with an advantage.

``policy_losses`` has the loss of a token; here is what all of them share.

- π and π_old are computed in the same microbatches and without dropout, so at equal weights r is exactly 1.
- Log-probabilities and entropies come from some rows of the head at a time: the whole logits are never held, unless the
  model changes them after its head. Positions without a target are left out before the head.
- Everything that is divided is summed here, and divided by the trainer over all ranks and microbatches: how answers are
  cut into microbatches does not change the loss.
- What is measured is summed over microbatches without rounding, so their order and the number of ranks do not matter.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import nn

from trueshard.train.data.batches import IGNORED, Batch
from trueshard.train.losses import CausalLoss, Forward, HeadRows, in_pieces, logits_of
from trueshard.train.own_code import own
from trueshard.train.rl.config import RLSection, RolloutSection
from trueshard.train.rl.policy_losses import LIMIT, LOSSES, LossInputs, LossOutputs, token_ratio
from trueshard.train.rl.ranks import on_every_rank

Function = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(log-probabilities, old ones, both [rows, length], advantages [rows, 1], mask [rows, length] of the targets) → loss
of each token, [rows, length]."""

FEW = 2**20
"""Logits of a microbatch that are computed at once, and kept for backward: 4 MiB in float32."""
NOT_INPUTS = ("targets", "advantages", "old_logprobs", "engine_logprobs", "reference_logprobs")
"""Entries of a batch that are not the model's inputs."""
MAXIMA = ("ratio_max", "mismatch_max")
"""Measures of which the largest value is reported, in place of the mean."""


class PolicyLoss:
    """Loss of sampled answers, weighted by their advantages: a ``Loss`` of the trainer.

    A batch has ``input_ids`` and ``targets`` [rows, length], -100 where there is no target; ``advantages`` [rows],
    float32; and, float32 [rows, length] at the targets: ``engine_logprobs``, with which the answers were sampled;
    ``old_logprobs``, without which π_old is π; ``reference_logprobs`` for ``kl``. Other tensors are the model's inputs.
    """

    unit = "term"
    tokens = staticmethod(CausalLoss.tokens)

    def __init__(
        self,
        loss: str | Function = "clip",
        *,
        clip: Sequence[float] = (0.2, 0.28),
        dual_clip: float | None = None,
        soft: Sequence[float] = (1.0, 1.05),  # τ for A >= 0 and for A < 0
        average: Literal["token", "sequence", "length"] = "token",
        length: int | None = None,  # tokens by which ``average="length"`` divides each answer
        temperature: float = 1.0,  # of sampling; divides the logits
        kl: float = 0.0,  # weight of the divergence from the reference in the loss
        kl_estimator: Literal["k1", "k2", "k3"] = "k3",
        correction: Literal["none", "truncate", "mask", "sequence_mask"] = "none",
        bounds: Sequence[float] = (0.5, 5.0),  # of π_old over the engine's probability
        whole_logits: bool = False,
    ) -> None:
        if isinstance(loss, str) and loss not in LOSSES:
            raise ValueError(f"loss is {loss!r}; it is one of {', '.join(LOSSES)}, or a function")
        if average not in ("token", "sequence", "length") or (average == "length") != (length is not None):
            raise ValueError(f'average is {average!r}; it is "token", "sequence", or "length" together with length=')
        self.loss, self.dual_clip = loss, dual_clip
        self.clip, self.soft = (clip[0], clip[1]), (soft[0], soft[1])
        self.average, self.length, self.temperature = average, length, temperature
        self.kl, self.kl_estimator, self.correction, self.bounds = kl, kl_estimator, correction, tuple(bounds)
        self.off_policy = False
        """True if, without ``old_logprobs``, π_old is the distribution that the answers were sampled from."""
        self.reads_mask = True
        """False if the model is given no ``attention_mask``: padding at the end has no influence on what is before."""
        self.never: list[int] = []
        """Tokens that are never sampled, such as the place of an image: their probability is 0."""
        self._rows_of = HeadRows(whole_logits)
        self._parts: dict[str, list[torch.Tensor]] = {}
        """Measure → its sum or maximum in each microbatch since the last call of ``measures``: 0-dim, float64."""
        self.kept: list[torch.Tensor] = []
        """Log-probabilities of the microbatches since ``measures``, [rows, length] each: `samples.jsonl` shows them."""

    def count(self, batch: Batch) -> int:
        """Return the number of terms in the mean: target tokens, answers, or answers × ``length``."""
        targets = batch["targets"].ne(IGNORED)
        if self.average == "token":
            return int(targets.sum())
        return int(targets.any(1).sum()) * (self.length or 1)

    def logprobs(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probabilities of the targets and entropies of the distributions, in nats, 0 where no target is.

        Both [rows, length], float32 or wider; the entropies have no gradient. Collective if sharded.
        """
        left_out = NOT_INPUTS if self.reads_mask else (*NOT_INPUTS, "attention_mask")
        inputs = {key: value for key, value in batch.items() if key not in left_out}
        targets = batch["targets"]
        places = targets.ne(IGNORED).flatten().nonzero().flatten()  # once: how many there are has to be waited for
        chosen = targets.flatten().index_select(0, places)

        def compute(head: nn.Module | None, forward: Forward, hidden: torch.Tensor) -> torch.Tensor:
            def piece(rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
                return self._of_logits(forward(rows), tokens)

            hidden, width = hidden.index_select(0, places), getattr(head, "out_features", None)
            if width is not None and len(chosen) * width <= FEW:
                return piece(hidden, chosen)
            # Whole logits, and a pass without gradients, have nothing to save by computing it again.
            return in_pieces(piece, hidden, chosen, recompute=head is not None and torch.is_grad_enabled())

        with without_dropout(model):
            result = self._rows_of(model, inputs, targets.shape, compute).view(-1, 2)
        spread = result.new_zeros(targets.numel(), 2).index_copy(0, places, result)
        return spread[:, 0].view(targets.shape), spread[:, 1].detach().view(targets.shape)

    def _of_logits(self, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return the log-probability of each token and the entropy: [rows, vocabulary], [rows] → [rows, 2]."""
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if self.never:
            logits = logits.index_fill(1, torch.tensor(self.never, device=logits.device), -torch.inf)
        logprobs = (logits / self.temperature).log_softmax(1)
        with torch.no_grad():
            entropy = torch.special.entr(logprobs.exp()).sum(1)
        return torch.stack([logprobs.gather(1, tokens[:, None])[:, 0], entropy], 1)

    def __call__(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the summed loss of a microbatch, 0-dim. Collective if sharded."""
        trainer_logprobs, entropy = self.logprobs(model, batch)
        loss_mask = batch["targets"].ne(IGNORED)
        before_update = batch.get("old_logprobs", trainer_logprobs.detach())
        advantages = batch["advantages"].to(trainer_logprobs.dtype)[:, None]
        inference_logprobs = batch.get("engine_logprobs")
        old_logprobs = before_update
        if self.off_policy and inference_logprobs is not None and "old_logprobs" not in batch:
            old_logprobs = inference_logprobs
        inputs = LossInputs(
            trainer_logprobs,
            old_logprobs,
            advantages,
            loss_mask,
            self.clip,
            self.dual_clip,
            self.soft,
        )
        outputs = self._token_loss(inputs)
        loss, measures = outputs.loss, self._measures_of(inputs, outputs.ratio, entropy)
        if inference_logprobs is not None:
            if self.correction != "none":
                loss = loss * self._weights(old_logprobs - inference_logprobs, loss_mask)
            mismatch = before_update - inference_logprobs  # also where the loss compares with the engine itself
            measures |= {"mismatch": mismatch.abs(), "mismatch_max": mismatch.abs()}
            measures["mismatch_k3"] = estimates(-mismatch, "k3")
        if "reference_logprobs" in batch:
            divergence = estimates(trainer_logprobs - batch["reference_logprobs"], self.kl_estimator)
            loss = loss + self.kl * divergence if self.kl else loss
            measures["kl_reference"] = divergence
        if torch.is_grad_enabled():
            self.kept.append(trainer_logprobs.detach())
            for key, values in measures.items():
                values = torch.where(loss_mask, values.detach().double(), 0.0)
                self._parts.setdefault(key, []).append(values.max() if key in MAXIMA else values.sum())
        loss = torch.where(loss_mask, loss, 0.0)
        if self.average == "sequence":
            return (loss.sum(1) / loss_mask.sum(1).clamp(min=1)).sum()
        return loss.sum()

    def _token_loss(self, inputs: LossInputs) -> LossOutputs:
        if isinstance(self.loss, str):
            return LOSSES[self.loss].function(inputs)
        arguments = inputs.trainer_logprobs, inputs.old_logprobs, inputs.advantages, inputs.loss_mask
        return LossOutputs(self.loss(*arguments), token_ratio(inputs))

    def _weights(self, difference: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
        """Return the weights of the correction, [rows, length], for log π_old - log of the engine's probability."""
        difference = torch.where(loss_mask, difference, 0.0).detach()
        if self.correction == "sequence_mask":
            difference = difference.sum(1, keepdim=True)
        weights = difference.clamp(-LIMIT, LIMIT).exp()
        low, high = self.bounds
        if self.correction == "truncate":
            return weights.clamp(max=high)
        return torch.where((weights >= low) & (weights <= high), weights, 0.0)

    # What is measured

    def _measures_of(
        self, inputs: LossInputs, ratio: torch.Tensor, entropy: torch.Tensor
    ) -> dict[str, torch.Tensor]:  # (rows, length) each, or (rows, 1)
        ratio, advantages, (low, high) = ratio.detach(), inputs.advantages, self.clip
        return {
            "tokens": torch.ones_like(entropy),
            "entropy": entropy,
            "clipped_low": (ratio < 1 - low) & (advantages < 0),
            "clipped_high": (ratio > 1 + high) & (advantages > 0),
            "ratio_max": ratio,
        }

    def measures(self) -> dict[str, float]:
        """Return means over the target tokens since the last call, and maxima; begin anew. Collective.

        ``entropy`` and ``kl_reference`` in nats, ``clipped_low`` and ``clipped_high`` as fractions, ``ratio_max``;
        ``mismatch_mean`` and ``mismatch_max`` of |log π_old - log of the engine's probability|, ``mismatch_k3``.
        """
        local: dict[str, list[float]] = {key: torch.stack(parts).tolist() for key, parts in self._parts.items()}
        self.forget()
        ranks = on_every_rank(lambda: local)
        parts = {key: [value for rank in ranks for value in rank.get(key, ())] for key in local}
        tokens = max(1.0, _sum(parts.pop("tokens", [])))
        return {
            "mismatch_mean" if key == "mismatch" else key: _largest(values) if key in MAXIMA else _sum(values) / tokens
            for key, values in parts.items()
        }

    def forget(self) -> None:
        """Drop what was measured and kept."""
        self._parts, self.kept = {}, []


def _sum(values: Sequence[float]) -> float:
    """Return the sum, rounded once, so that it does not depend on the order."""
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)


def _largest(values: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else max(values)


def estimates(
    difference: torch.Tensor,  # log π - log of the other's probability, of tokens sampled from π
    kind: str,  # "k1", "k2" or "k3"
) -> torch.Tensor:
    """Return estimates of the divergence of π from another distribution (Schulman 2020), each token's own."""
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference**2 / 2
    return (-difference).clamp(max=LIMIT).exp() + difference - 1


@contextlib.contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Run a model in evaluation mode, but for layers of transformers that recompute in training mode only."""
    modules: list[Any] = [module for module in model.modules() if module.training]
    for module in modules:
        module.training = bool(getattr(module, "gradient_checkpointing", False))
    try:
        yield
    finally:
        for module in modules:
            module.training = True


@torch.no_grad()
def padding_is_seen(model: nn.Module, pad: int, device: torch.device) -> bool:
    """Return True if tokens at the end of a row have an influence on the logits before. Collective if sharded.

    A causal model sees none. So it needs no mask of padding, without which attention has faster kernels.
    """
    tokens = torch.arange(8, device=device)[None] % max(2, pad)
    padded = torch.cat([tokens, torch.full_like(tokens, pad)], 1)
    with without_dropout(model):
        without, with_padding = (logits_of(model, {"input_ids": ids})[:, :8] for ids in (tokens, padded))
    dtype, without = without.dtype, without.float()
    # Kernels for another length may round otherwise; what is seen differs by far more.
    limit = (8 if dtype.itemsize == 2 else 64) * torch.finfo(dtype).eps * float(without.abs().max())
    return float((without - with_padding.float()).abs().max()) > limit


def policy_loss(rl: RLSection, rollout: RolloutSection, whole_logits: bool = False) -> PolicyLoss:
    """Return the loss of the tables [rl] and [rollout]. Raises `UserError` for a function that cannot be had."""
    loss: str | Function = rl.loss
    if ":" in rl.loss:
        loss = own("rl.loss", rl.loss, "logprobs", "old_logprobs", "advantages", "mask")
    return PolicyLoss(
        loss,
        clip=rl.clip,
        dual_clip=rl.dual_clip,
        soft=rl.soft,
        average=rl.average,
        length=rollout.tokens if rl.average == "length" else None,
        temperature=rollout.temperature,
        kl=rl.kl if rl.kl_place == "loss" else 0.0,
        kl_estimator=rl.kl_estimator,
        correction=rollout.correction,
        bounds=rollout.bounds,
        whole_logits=whole_logits,
    )
