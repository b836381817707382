"""Fills this rank's part of a tensor from a catalogue."""

from __future__ import annotations

import torch

from trueshard import _torch
from trueshard.checkpoint import pieces
from trueshard.checkpoint.catalogue import Catalogue


def fill(catalogue: Catalogue, key: str, tensor: torch.Tensor) -> None:
    """Fill this rank's part of ``tensor`` with what is under ``key``."""
    entry = catalogue.entries[key]
    local = _torch.local(tensor).detach()
    if not local.numel():
        return
    begin, _ = pieces.bytes_here(tensor, entry.nbytes)
    target = local[: pieces.rows_here(tensor)[1]] if local.ndim else local
    if target.device.type == "cpu":
        catalogue.read_into(key, begin, target)
    else:
        staged = torch.empty(target.shape, dtype=getattr(torch, entry.dtype))
        catalogue.read_into(key, begin, staged)
        target.copy_(staged)
