"""Process groups: the default one, and what is known of any."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


def world() -> Any:
    """The default process group."""
    return torch.distributed.distributed_c10d._get_default_group()


def timeout_of(group: Any) -> Any:
    """The time limit that the user gave a process group, for groups beside it; None if that cannot be told."""
    for device in ("cpu", "cuda"):
        with contextlib.suppress(RuntimeError, AttributeError):
            return group._get_backend(torch.device(device)).options._timeout
    return None


def group_named(name: Any) -> torch.distributed.ProcessGroup:
    """The process group that a functional collective names."""
    return torch.distributed.distributed_c10d._resolve_process_group(name)
