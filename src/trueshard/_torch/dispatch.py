"""Who calls the operator that a dispatch mode sees, and who else holds its tensors."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

#: What sees every operator that runs inside it; it has no public name.
DispatchMode = TorchDispatchMode


def running_node() -> str:
    """Name of the autograd node whose backward runs in this thread, for example ``"MulBackward0"``; else ``""``."""
    node = torch._C._current_autograd_node()
    return "" if node is None else str(node.name())


def called_by_mode(frame: Any) -> bool:
    """Whether the operator that ``frame`` (that of a dispatch mode) sees was called by another mode's method."""
    caller, between = frame.f_back, ("torch/_ops.py", "torch/_compile.py", "torch/_dynamo/eval_frame.py")
    while caller is not None and caller.f_code.co_filename.endswith(between):
        caller = caller.f_back
    return caller is not None and caller.f_code.co_name == "__torch_dispatch__"


def engine_calls(frame: Any) -> bool:
    """Whether the autograd engine itself called what ``frame`` (that of a dispatch mode's caller) runs."""
    if torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
        return False
    while frame is not None and frame.f_code.co_filename.endswith(("torch/_compile.py", "torch/_dynamo/eval_frame.py")):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"


HELD = 4, 2
"""Uses of a tensor and of its storage that the call of a dispatch mode itself makes up for."""


def is_held_once(tensor: torch.Tensor) -> bool:
    """Whether nobody holds ``tensor`` or its storage but the arguments of the operator that a dispatch mode sees."""
    dense = tensor.is_contiguous() or torch._prims_common.is_non_overlapping_and_dense_or_false(tensor)
    uses = int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
    return dense and int(cast(Any, tensor)._use_count()) <= HELD[0] and uses <= HELD[1]
