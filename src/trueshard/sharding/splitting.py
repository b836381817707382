"""``split_sequence``: this rank's part of a batch of whole sequences, on the context axis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trueshard import _torch
from trueshard.distributed import device_of, gather_parts, host_group
from trueshard.errors import own_errors
from trueshard.model import agreement, names
from trueshard.parallel.collectives import part_of
from trueshard.parallel.context import language_model, mask_trial
from trueshard.sharding.hooks import Runtime, runtime_of

IGNORED = -100
"""Label of a position without a target, as in ``torch.nn.functional.cross_entropy``."""


@own_errors()
def split_sequence(model: nn.Module, batch: Mapping[str, Any], *, ignore_index: int = IGNORED) -> dict[str, Any]:
    """Return this rank's part of ``batch``, for a model that was sharded with ``context``::

        part = trueshard.split_sequence(model, batch)
        mean = trueshard.token_mean(model, trueshard.count_targets(part["labels"], shifted=False))
        loss = model(**part, num_items_in_batch=mean.divisor).loss

    Each rank has one piece of every sequence: rank r of n has positions length·r//n to length·(r+1)//n, so
    parts differ by at most one position, and nothing is padded. Labels are shifted before the cut, positions are those
    in the whole sequence, and the mask is that of the whole sequence: attention computes what one process does.

    With ``context=1``, and for a model that is not sharded, the part is the whole, its labels shifted likewise.

    Args:
        model: the model. Collective over its context: one small all-gather, which compares the batches.
        batch: the same on all ranks of a context.

            - ``input_ids``: [batch, length].
            - ``position_ids``: [batch or 1, length]; left out: 0, 1, … Packed documents begin at 0 each, and do not
              see each other, as in transformers: if there is no ``attention_mask``.
            - ``attention_mask``: [batch, length], 0 on padding; or 4-D, ready for the model.
            - ``labels``: [batch, length], not shifted, as for transformers' models.
            - Others are cut if they are [batch, length, …], and stay as they are if they are no tensors, or [batch].
        ignore_index: the label that is no target.

    Returns:
        The part, on the model's device: what ``batch`` has, with ``position_ids``; with ``labels``, shifted, the target
        of each position, under this name and that of ``shift_labels``, by which transformers' loss takes them as they
        are. Do not shift them again.

    Raises:
        ValueError: the batches of a context differ, the length is less than its ranks, or a tensor of another shape. On
            every rank of the context.
    """
    runtime = runtime_of(names.unwrap(model))
    mesh = None if runtime is None else runtime.axes.along.get("context")
    _check(batch)
    ids = batch["input_ids"]
    if runtime is None or mesh is None:
        return _shifted(batch, ignore_index)
    group, device = mesh.get_group(), device_of(runtime.mesh)
    _agree(batch, group)
    length = ids.shape[1]
    if length < group.size():
        raise ValueError(f"input_ids: {length} positions are fewer than the {group.size()} ranks that share a sequence")
    _check_positions(runtime, batch)  # where the batch lies: on the host that waits for nothing
    full = _torch.to_device(dict(batch), device)
    masks = _masks(runtime, full)
    full = _shifted(full, ignore_index)
    full.setdefault("position_ids", torch.arange(length, device=device).unsqueeze(0))
    here = part_of(length, group.rank(), group.size())
    part = {key: _cut(value, ids.shape, *here) for key, value in full.items() if key != "attention_mask"}
    return part | {"attention_mask": masks}


def _check(batch: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError for a batch that no rank could split."""
    ids = batch.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
        shown = tuple(ids.shape) if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise ValueError(f"input_ids: must be a tensor of [batch, length], not {shown}")
    rows, length = ids.shape
    for key, value in batch.items():
        if not isinstance(value, torch.Tensor):
            continue
        shape = tuple(value.shape)
        by_position = value.ndim > 1 and shape[1] == length and shape[0] in (1, rows)
        is_mask = key == "attention_mask" and value.ndim == 4 and shape[2:] == (length, length)
        if not (by_position or is_mask or shape in ((), (rows,))):
            raise ValueError(
                f"{key}: {shape} is neither [batch, length, …] nor [batch] of {rows} sequences of {length} positions"
            )


def _shifted(batch: Mapping[str, Any], ignore_index: int) -> dict[str, Any]:
    """Return the batch with the target of each position as its label."""
    if (labels := batch.get("labels")) is None or "shift_labels" in batch:
        return dict(batch)
    targets = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], ignore_index)], 1)
    return {**batch, "labels": targets, "shift_labels": targets}


def _agree(batch: Mapping[str, Any], group: dist.ProcessGroup) -> None:
    """Raise ValueError, on every rank, if ranks were given different tensors."""
    tensors = sorted((key, value) for key, value in batch.items() if isinstance(value, torch.Tensor))
    # Between hosts: of a batch that lies there, nothing has to be waited for. A forecast knows the bytes of tensors.
    checksums = torch.stack([_with_shape(tensor).to(tensors[0][1].device) for _, tensor in tensors]).cpu()
    hosts = host_group(group)
    count = torch.tensor([len(tensors)], device="cpu")
    which = "tensors"
    if bool((gather_parts(count, hosts) == count).all()):
        differing = (gather_parts(checksums, hosts) != checksums).any(0).tolist()
        which = ", ".join(key for (key, _), differs in zip(tensors, differing, strict=True) if differs)
    if which:
        raise ValueError(
            f"the ranks that share a sequence were given different {which}: let a sample's number follow from the rank "
            "along replicate and shard alone"
        )


def _with_shape(tensor: torch.Tensor) -> torch.Tensor:
    """Return a checksum, 0-dim int64, that depends on the shape too."""
    return agreement.checksum(tensor) + sum(size * 1_000_003**dim for dim, size in enumerate(tensor.shape))


def _check_positions(runtime: Runtime, batch: Mapping[str, Any]) -> None:
    """Raise ValueError for positions, or a mask without them, from which the model would compute something else."""
    model = language_model(names.Index(runtime.root))
    trial, given_mask, positions = mask_trial(model), batch.get("attention_mask"), batch.get("position_ids")
    if positions is None and given_mask is not None and trial.counts_by_mask and bool((given_mask.diff() > 0).any()):
        raise ValueError(
            f"position_ids: {_torch.own_class(model).__name__} counts them by the mask, which has padding before "
            "tokens: give them"
        )
    sees_all = given_mask is None and not trial.keeps_apart
    if positions is not None and sees_all and bool((positions.diff(dim=1) != 1).any()):
        raise ValueError(
            f"position_ids: {_torch.own_class(model).__name__} does not keep packed documents apart: each would see "
            "those before it; give one document a sequence, or a 4-D attention_mask"
        )


def _masks(runtime: Runtime, batch: Mapping[str, Any]) -> Any:
    """Return the mask of the whole sequences as the model would make it: a tensor, or one for each kind of layer."""
    from transformers.masking_utils import create_masks_for_generate

    model = language_model(names.Index(runtime.root))
    trial = mask_trial(model)
    ids, given_mask, positions = batch["input_ids"], batch.get("attention_mask"), batch.get("position_ids")
    embeddings = torch.empty((*ids.shape, 0), dtype=runtime.compute_dtype or model.dtype, device=ids.device)
    masks = create_masks_for_generate(
        model.config, embeddings, given_mask, None, positions if trial.keeps_apart else None
    )
    plain = torch.empty((1, 1, 0, ids.shape[1]), dtype=torch.bool, device=ids.device)
    if not isinstance(masks, dict):
        return plain if masks is None else masks
    masks = {kind: plain if given_mask is None else given_mask for kind, given_mask in masks.items()}
    if trial.takes_kinds:
        return masks
    if len(masks) > 1:
        raise ValueError(
            f"context: {_torch.own_class(model).__name__} does not take a mask for each of {', '.join(masks)}"
        )
    return next(iter(masks.values()))


def _cut(value: Any, shape: torch.Size, start: int, length: int) -> Any:
    by_position = isinstance(value, torch.Tensor) and value.ndim > 1 and value.shape[1] == shape[1]
    return value.narrow(1, start, length).contiguous() if by_position else value
