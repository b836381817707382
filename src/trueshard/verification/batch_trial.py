"""Ask by trial whether a loss of one sample follows from the others of its batch: each rank has a part of them.

What the model itself computes is asked in its first pass, in every run; here the loss may be the user's own function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from trueshard import _torch
from trueshard.parallel.batch_trial import is_mean_or_sum
from trueshard.verification.subjects import FactorySubject, Subject, TrainingSetup, tensors_of


@torch.no_grad()
def batch_notes(subject: Subject, setup: TrainingSetup) -> list[str]:
    """Return a sentence if the loss of a factory's model follows from the rest of the batch, or was not tried."""
    if not isinstance(subject, FactorySubject) or subject.case.parts < 2:
        return []
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parts = [_torch.to_device(subject.microbatches(1, part)[0], device) for part in range(2)]
    dtypes = {p.dtype for p in setup.model.parameters() if p.is_floating_point()}
    eps = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
    setup.model.eval()  # nothing is dropped at random
    try:
        return follows_from_batch(lambda batch: float(setup.loss(setup.model, batch)), parts, eps)
    except (RuntimeError, ValueError, IndexError) as error:
        return [f"Whether the loss follows from the rest of the batch was not tried: {type(error).__name__}."]
    finally:
        setup.model.train()


def follows_from_batch(loss: Callable[[Any], float], parts: Sequence[Any], eps: float) -> list[str]:
    """Return a sentence if ``loss`` is neither a sum nor a mean over the samples of its batch.

    ``parts``: two batches; tensors of at least one dimension are joined along the first.
    """
    a, b = (loss(part) for part in parts)
    both = loss(_joined(parts))
    if is_mean_or_sum(a, b, both, loss(_joined([parts[0], *parts])), eps):
        return []
    return [
        f"The loss of a sample follows from the others of its batch: {a:.6g} and {b:.6g} of two parts are {both:.6g} "
        "together, which is no mean and no sum. Each rank computes it from its own samples, which is not what one "
        "device computes from all; here one process computes the parts one by one, too."
    ]


def _joined(parts: Sequence[Any]) -> Any:
    others = [iter(tensors_of(part)) for part in parts[1:]]

    def join(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        pieces = [leaf, *(next(other) for other in others)]
        return torch.cat(pieces) if leaf.ndim else leaf

    return _torch.mapped(join, parts[0])
