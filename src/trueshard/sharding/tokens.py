"""The token-weighted loss: the mean over all target tokens of the global batch.

- A mean of means is not the mean: ranks and microbatches hold different numbers of target tokens (padding, packing,
  masked prompts). The divisor is the number of them over all ranks and all microbatches of a step.
- FSDP2 averages gradients over ranks, so each loss is also multiplied by the number of ranks.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trueshard.distributed import all_reduce, device_of
from trueshard.errors import TrueShardTypeError, TrueShardValueError
from trueshard.model import names
from trueshard.optim.shards import widest_float
from trueshard.sharding.exact import ExactSums
from trueshard.sharding.hooks import runtime_of


@dataclass(frozen=True)
class TokenMean:
    """Turns sums over tokens into the global mean over tokens. Made by ``token_mean``; good for one step."""

    total: int
    """Target tokens over all ranks and microbatches of the step."""
    ranks: int
    """Ranks over which gradients are averaged."""
    _mesh: DeviceMesh | None = field(default=None, repr=False, compare=False)
    _exact: ExactSums | None = field(default=None, repr=False, compare=False)
    """Sums of ``shard(exact=True)``: divides the reduced gradient by what is no power of two."""

    @property
    def divisor(self) -> float:
        """``total / ranks``: for models that divide a summed loss themselves, as transformers' do by
        ``num_items_in_batch``. With ``shard(exact=True)`` the power of two above ``total``."""
        return self.total / self.ranks if self._exact is None else self._exact.divide_by(self.total)

    def __call__(self, loss_sum: torch.Tensor) -> torch.Tensor:
        """``loss_sum * ranks / total``: call ``backward()`` on this.

        With ``shard(exact=True)`` the loss is divided by a power of two, the same at any number of ranks, and the
        reduced gradient by the rest; so a term that is added to the loss belongs into ``loss_sum``.

        Args:
            loss_sum: 0-dim, the loss *summed* over the target tokens of one microbatch (``reduction="sum"``), in
                float32 or wider; 0 where there is none.

        Raises:
            TypeError: not a floating-point tensor.
            ValueError: not 0-dim.
        """
        if not isinstance(loss_sum, torch.Tensor) or not loss_sum.is_floating_point():
            kind = loss_sum.dtype if isinstance(loss_sum, torch.Tensor) else type(loss_sum).__name__
            raise TrueShardTypeError(f"loss_sum must be a floating-point tensor, not {kind}")
        if loss_sum.ndim:
            raise TrueShardValueError(
                f"loss_sum has shape {tuple(loss_sum.shape)}, but must be one number: the sum over the microbatch's "
                'target tokens, as cross_entropy(..., reduction="sum") gives'
            )
        if self._exact is not None:
            return loss_sum * (1 / self._exact.divide_by(self.total))
        return loss_sum * (self.ranks / self.total)

    def value(self, loss_sum: torch.Tensor | float) -> float:
        """Return the global mean loss, the same on every rank, for a log. Collective: one small all-reduce.

        Args:
            loss_sum: this rank's summed loss over all microbatches of the step.
        """
        shared = torch.as_tensor(loss_sum).detach().double().reshape(())
        if self._mesh is not None:
            device = device_of(self._mesh)
            shared = all_reduce(shared.to(device, widest_float(device), copy=True), self._mesh)
        return shared.item() / self.total


def token_mean(model: nn.Module, tokens: int | torch.Tensor) -> TokenMean:
    """Agree on the number of target tokens of a step, before its first backward::

        microbatches = [next(batches) for _ in range(4)]
        mean = trueshard.token_mean(model, sum(trueshard.count_targets(labels) for _, labels in microbatches))
        loss_sum = 0.0
        for number, (inputs, labels) in enumerate(microbatches, start=1):
            with trueshard.accumulate(model, last=number == len(microbatches)):
                logits = model(inputs)[:, :-1].float().flatten(0, 1)
                loss = cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100, reduction="sum")
                mean(loss).backward()
            loss_sum += loss.detach()
        optimizer.step()
        print(mean.value(loss_sum))

    The gradients are those that one process has of the sum of all losses over the number of all tokens. Collective over
    the model's mesh, all of its dimensions: one small all-reduce between hosts, which does not wait for the device,
    unless ``tokens`` lie there.

    Args:
        model: sharded; or not sharded, in a program of one process. Of a pipeline the last stage, on its ranks alone,
            whose schedule must not divide by the number of microbatches (``scale_grads=False``).
        tokens: this rank's number of target tokens over all microbatches of the step; an integer, or an integer tensor
            of one element. A rank may have none.

    Raises:
        TypeError: ``tokens`` is no integer.
        ValueError: ``tokens`` is negative on any rank, or zero on all; or several processes run, and ``model`` is not
            sharded. On every rank.
    """
    runtime = runtime_of(names.unwrap(model))
    if runtime is None and dist.is_initialized() and dist.get_world_size() > 1:
        raise TrueShardValueError(
            f"this {type(model).__name__} is not sharded, so the ranks of its batch are not known; call "
            "trueshard.shard(model, ...) first"
        )
    mesh = None if runtime is None else runtime.mesh
    error = None
    try:
        count = _count(tokens)
    except (TypeError, ValueError) as caught:
        count, error = 0, caught
    # A flag says that a rank was given something else: if it raised at once, the others would wait in the all-reduce.
    shared = torch.tensor([count, error is not None])
    total, errors = (shared if mesh is None else all_reduce(shared, mesh)).tolist()
    if error is not None:
        raise error
    if errors:
        raise TrueShardValueError(f"tokens is not a number of tokens on {errors} other rank{'s' if errors > 1 else ''}")
    if total == 0:
        raise TrueShardValueError(
            "no rank has a target token in this step, so there is no mean; skip the step, on every rank"
        )
    return TokenMean(total, 1 if mesh is None else mesh.size(), mesh, None if runtime is None else runtime.exact)


def _count(tokens: int | torch.Tensor) -> int:
    if isinstance(tokens, torch.Tensor) and (isinstance(tokens, DTensor) or tokens.numel() != 1):
        raise TrueShardValueError(
            f"tokens must be one number, this rank's own, not a tensor of shape {tuple(tokens.shape)}"
        )
    try:
        if isinstance(tokens, bool) or (isinstance(tokens, torch.Tensor) and tokens.dtype == torch.bool):
            raise TypeError
        count = operator.index(tokens)
    except TypeError:
        raise TrueShardTypeError(f"tokens must be an integer, the number of target tokens, not {tokens!r}") from None
    if count < 0:
        raise TrueShardValueError(f"tokens is {count}, but a number of tokens is not negative")
    return count


def count_targets(labels: torch.Tensor, ignore_index: int = -100, *, shifted: bool = True) -> torch.Tensor:
    """Return the number of target tokens in ``labels``: those that a loss counts.

    Args:
        labels: [..., length], integers.
        ignore_index: the label that is no target.
        shifted: the label at a position is predicted from the positions before, so the first of each sequence is no
            target (as in transformers' causal language models). False: labels are aligned with their predictions.

    Returns:
        A 0-dim int64 tensor on the device of ``labels``, without waiting for it; ``sum`` adds several.

    Raises:
        TypeError: ``labels`` are no integers.
        ValueError: ``labels`` have no dimension.
    """
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TrueShardTypeError(f"labels must be integers, not {labels.dtype}")
    if labels.ndim == 0:
        raise TrueShardValueError("labels must be [..., length], not 0-dim")
    return (labels[..., 1:] if shifted else labels).ne(ignore_index).sum()
