"""The only place that touches PyTorch's private names.

Each function says why nothing public serves. ``tests/test_torch_private.py`` calls every one of them, so a release of
torch that moves one of these names fails there, by name, and not in a user's run. Supported: torch 2.11 to 2.13.

Each file reaches into one part of torch. Others use the names below alone: ``_torch.local(tensor)``.
"""

# ruff: noqa: F401 (what is imported here is what the package offers)

from __future__ import annotations

from trueshard._torch.dispatch import DispatchMode, called_by_mode, engine_calls, is_held_once, running_node
from trueshard._torch.dtensor import (
    average_mixed_lists,
    dtensor_over,
    find_every_inf,
    is_placed_as,
    local,
    shards_of,
    shards_placed_alike,
    specs_of,
    version,
)
from trueshard._torch.fakes import (
    addresses,
    begins_where,
    fake_tensors,
    is_fake,
    is_plain,
    makes_fake_tensors,
    real_tensors,
)
from trueshard._torch.fsdp import (
    ShardedModule,
    forget,
    forget_gathered,
    fsdp_modules,
    gathered_parameters,
    gathered_units,
    in_pass,
    initialise,
    interrupted,
    is_initialised,
    join_shards,
    offloaded,
    own_class,
    refresh_dtypes,
    reset_iteration,
    set_reshard_after_forward,
    watch_communication,
)
from trueshard._torch.groups import group_named, timeout_of, world
from trueshard._torch.hooks import at_end_of_backward, call_first, has_accumulation_hooks, in_backward, make_hookable
from trueshard._torch.simulating import one_chunk, simulated_world, unseen_propagation, watching_resizes
from trueshard._torch.tensors import PARAMETER_ATTRIBUTES, leaves_of, map_only, storage_identity, tensors_in
from trueshard._torch.wrappers import is_compiled_in_place, renames_when_loading, wrapper_attribute
