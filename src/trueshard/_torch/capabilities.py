"""Probe the installed torch, once, at the first ``shard()``, for the names that this package uses.

- Needed for correct results: missing is an error that names it.
- Only for speed: missing takes the slower way, and the warning says so.
- A torch newer than tested gives one warning that names its version.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import pkgutil
import re
import types
from typing import Any

import torch

from trueshard.errors import warn_user
from trueshard.machine import TESTED_TORCH

_FSDP = "torch.distributed.fsdp._fully_shard"
NEEDED = {
    f"{_FSDP}._fsdp_state.FSDPState": "_lazy_init _is_root _state_ctx _training_state _auto_reshard_after_forward "
    "_register_pre_backward_hook _pre_backward",
    f"{_FSDP}._fsdp_param_group.FSDPParamGroup": "fsdp_params is_unsharded _init_mp_dtypes mesh_info "
    "post_forward_mesh_info unshard wait_for_unshard post_forward pre_backward post_backward "
    "_register_post_backward_hook",
    f"{_FSDP}._fsdp_param.FSDPParam": "_unsharded_param _param_fqn sharded_param offload_to_cpu mp_policy "
    "_module_info free_unsharded_param all_gather_outputs reset_sharded_param "
    "post_forward_mesh_info _orig_size _init_sharded_post_forward_param_metadata fsdp_placement sharded_state "
    "sharded_post_forward_size contiguous_sharded_post_forward_stride",
    "torch.distributed.fsdp.FSDPModule": "_get_fsdp_state _orig_cls_mro_index",
    "torch.distributed.tensor.DTensor": "_local_tensor _op_dispatcher",
    "torch.Tensor": "_backward_hooks _post_accumulate_grad_hooks _version",
    "torch.nn.Module": "_parameters _buffers _modules _forward_pre_hooks _compiled_call_impl",
    "torch.optim.Optimizer": "_patch_step_function",
    "torch._C": "_current_graph_task_id _are_functorch_transforms_active",
}
"""Class or module → attributes without which results would be wrong."""

FOR_SPEED = {
    f"{_FSDP}._fsdp_param.FSDPParam": "_sharded_param_data padded_sharded_param_size to_sharded_dtensor",
    "torch.distributed.tensor.DTensor": "_spec",
    "torch": "_foreach_mul_ _foreach_norm",
}
"""Class or module → attributes without which steps take longer."""


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


IS_2_11 = _release(torch.__version__) < (2, 12)
"""True on the oldest release that is supported; what only that one lacks is put right in this package."""


@functools.cache
def check_torch() -> None:
    """Probe torch, once a process; raise RuntimeError that names what it lacks, and the versions that have it."""
    oldest, newest = TESTED_TORCH
    if missing := _missing(NEEDED):
        raise RuntimeError(
            f"torch {torch.__version__} has no {', '.join(missing)}, which sharding needs: install torch {oldest} to "
            f"{newest}, or a newer trueshard"
        )
    slower = missing_for_speed()
    newer = _release(torch.__version__) > _release(newest)
    words = [f"torch {torch.__version__} is newer than what is tested ({oldest} to {newest})"] if newer else []
    words += [f"steps take longer, since torch has no {', '.join(sorted(slower))}"] if slower else []
    if words:
        warn_user("; ".join(words))


@functools.cache
def missing_for_speed() -> frozenset[str]:
    """Return what torch lacks of ``FOR_SPEED``, as ``"FSDPParam._sharded_param_data"``."""
    return frozenset(_missing(FOR_SPEED))


def _missing(wanted: dict[str, str]) -> list[str]:
    missing = []
    for path, attributes in wanted.items():
        present: set[str] = set()
        with contextlib.suppress(ImportError, AttributeError):
            present = _names(pkgutil.resolve_name(path), set(attributes.split()))
        missing += [f"{path.rpartition('.')[2]}.{name}" for name in attributes.split() if name not in present]
    return missing


def _names(owner: Any, wanted: set[str]) -> set[str]:
    """Return the attributes of a class or module; of a class also the ``wanted`` that its methods set on instances."""
    names = set(dir(owner))
    for cls in inspect.getmro(owner) if inspect.isclass(owner) else ():
        names |= set(vars(cls).get("__annotations__", ()))  # once dynamo ran, it has replaced methods of nn.Module
        for value in vars(cls).values():
            function = inspect.unwrap(getattr(value, "fget", None) or value) if callable(value) else None
            stack = [code] if isinstance(code := getattr(function, "__code__", None), types.CodeType) else []
            while stack:
                code = stack.pop()
                if not wanted.isdisjoint(code.co_names):  # else it does not name any: reading instructions is slow
                    stores = (step for step in dis.get_instructions(code) if step.opname == "STORE_ATTR")
                    names.update(step.argval for step in stores)
                stack += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return names
