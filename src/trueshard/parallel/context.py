"""The context axis: ranks that share each sequence. What attention does on it, and which models it takes.

- A rank has a part of the positions. Everything but attention works on positions alone. Attention exchanges (DeepSpeed
  Ulysses, Jacobs et al. 2023): all positions of a part of the heads, the model's own attention, and back.
- It is reached through transformers' registry of attention functions, by a name in the model's configuration. The
  configuration is a copy, so what the user's is used for elsewhere is not changed.
- The mask tells whether a sequence is split: it has the length of the whole sequence, more than there are keys here.
  So a pass on whole sequences (``generate``, an evaluation) computes as before, and a recomputed pass knows what it
  recomputes. Where attention needs no mask, being plainly causal, a split sequence has one of no rows:
  [1, 1, 0, length].
- Fewer key-value heads than ranks are repeated, up to the least common multiple of both.
- Where the ranks do not divide the heads, keys and values go round instead (ring attention, Liu et al. 2023), as torch
  does it: of plain causal sequences, in parts of one length.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from trueshard import _torch
from trueshard.errors import TrueShardValueError
from trueshard.model import names
from trueshard.model.names import Index
from trueshard.parallel.collectives import exchange, part_of
from trueshard.parallel.forward_trial import MaskTrial, find_reader, try_masks
from trueshard.parallel.position_trial import attend_alone, find_mixer
from trueshard.parallel.tensor import refuse_random
from trueshard.plans import Plan

GROUP = "_trueshard_context"
"""Attribute of each module of attention: the process group of the ranks that share a sequence."""
_TRIAL = "_trueshard_mask_trial"
_OURS = "trueshard_"
"""Beginning of the names under which attention is registered."""
_TRIED = f"{_OURS}trial"
"""Name of what stands for attention where blocks are tried."""
_KINDS = ("sdpa", "eager")
_LAYERS = {"full_attention", "sliding_attention"}
_PER_HEAD = ("position_bias", "s_aux")
"""Arguments of attention functions that have a value for each head."""
_CHANGES = ("softcap", "sliding_window")
"""Arguments of attention functions that change scores or masks."""


def language_model(index: Index) -> Any:
    """Return the outermost module of transformers in a model; raise ValueError if there is none, or several."""
    transformers: Any = sys.modules.get("transformers")
    models: dict[str, nn.Module] = {}
    for name, module in index.modules.items() if transformers is not None else ():
        inside = any(not outer or name.startswith(f"{outer}.") for outer in models)
        if isinstance(module, transformers.PreTrainedModel) and not inside:
            models[name] = module
    if len(models) != 1:
        raise TrueShardValueError(
            f"context: {_torch.own_class(index.root).__name__} has {len(models)} models of transformers, and it is "
            "through their attention interface that ranks share a sequence; give one, or leave out context"
        )
    return next(iter(models.values()))


def resolve(index: Index, plan: Plan, sizes: Mapping[str, int]) -> Plan:
    """Return ``plan`` with the size of a mesh; raise ValueError if ranks cannot share the sequences of this model."""
    plan = dataclasses.replace(plan, context=sizes.get("context", 1))
    if plan.context > 1:
        refuse(index, plan)
    return plan


def refuse(index: Index, plan: Plan) -> MaskTrial:
    """Return how the model makes masks; raise ValueError if ranks cannot share its sequences, naming what is wrong.

    Nothing is tried of a model that has been handed what a trial showed.
    """
    model = language_model(index)
    handed: MaskTrial | None = model.__dict__.get(_TRIAL)
    config = model.config
    kind = _torch.own_class(model).__name__
    if (
        config.get_text_config() is not config
        or config.is_encoder_decoder
        or getattr(config, "add_cross_attention", False)
    ):
        raise TrueShardValueError(
            f"context={plan.context}: {kind} reads more than one sequence (images, or an encoder's), and only a "
            "model of text alone can share it; leave out context"
        )
    if handed is None:
        _refuse_attention(model, kind, plan)
    heads, ranks = config.num_attention_heads, plan.context * plan.tensor
    sliding = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    if heads % ranks and (sliding or getattr(config, "sliding_window", None)):
        product = f"context {plan.context}" + (f" × tensor {plan.tensor}" if plan.tensor > 1 else "")
        raise TrueShardValueError(
            f"{product} = {ranks} ranks do not divide the {heads} attention heads of {kind}, and with sliding windows "
            "keys cannot go round instead: choose a divisor"
        )
    refuse_random(index, "context", plan.context)
    return handed or try_masks(model, attention_of(model))


def hand_over(trial: MaskTrial, index: Index) -> None:
    """Let ``refuse`` take what it returned for a model as said of a copy with fewer blocks of the same kinds."""
    language_model(index).__dict__[_TRIAL] = trial


def _refuse_attention(model: Any, kind: str, plan: Plan) -> None:
    """Raise ValueError unless all that looks at other positions is causal attention behind the interface."""
    config, attention = model.config, attention_of(model)
    word, layers = _kind(config), set(getattr(config, "layer_types", None) or ())
    why = None
    if word not in _KINDS:
        why = f'its attention implementation is {word!r}: load it with attn_implementation="sdpa" or "eager"'
    elif getattr(config, "reorder_and_upcast_attn", False):
        why = "its configuration has reorder_and_upcast_attn: set it to False"
    elif not attention:
        why = "its attention does not go through transformers' attention interface"
    elif not all(module.is_causal for module in attention.values()):
        why = "its attention is not causal"
    elif parameters := [f"{name}.{key}" for name, module in attention.items() for key in _torch.own_parameters(module)]:
        why = f"{parameters[0]!r} has values for each head"
    elif hasattr(model, "create_masks_for_generate"):
        why = "it makes masks of its own"
    elif "position_ids" not in inspect.signature(type(model).forward).parameters:
        why = "it takes no position_ids, and would count them anew in each part"
    else:
        try:
            why = _find_mixer(model, attention) or find_reader(model, attention)
        except RuntimeError as error:
            why = f"whether it looks at other positions outside of attention cannot be told: {error}"
        if why is None and layers - _LAYERS:
            why = f"its layers are of kind {min(layers - _LAYERS)!r}"
    if why:
        raise TrueShardValueError(
            f"context={plan.context}: {kind} cannot share a sequence: {why}; or leave out context"
        )


def _find_mixer(model: Any, attention: Mapping[str, Any]) -> str | None:
    from transformers import AttentionInterface

    AttentionInterface.register(_TRIED, attend_alone)
    configs = _configs(model, _TRIED)
    for config in configs.values():
        config._experts_implementation = "eager"  # a loop over experts: grouped products would copy large weights
    return find_mixer(model, attention, configs)


def attention_of(root: nn.Module) -> dict[str, Any]:
    """Return the modules of attention, by name."""
    every = names.named_modules(root)
    return {name: module for name, module in every if hasattr(module, "is_causal") and hasattr(module, "config")}


def mask_trial(model: nn.Module) -> MaskTrial:
    """Return how the model of a sharded one makes masks, as it was found before sharding."""
    trial: MaskTrial = model.__dict__[_TRIAL]
    return trial


def _kind(config: Any) -> str:
    return str(config._attn_implementation).removeprefix(_OURS)


# The attention


def share_attention(root: nn.Module, mesh: DeviceMesh) -> None:
    """Let the attention of ``root`` exchange heads for positions over ``mesh``, in place."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    model = language_model(Index(root))
    kind = _kind(model.config)
    name = f"{_OURS}{kind}"
    AttentionInterface.register(name, functools.partial(attend, kind))
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[kind])
    if _TRIAL not in model.__dict__:
        model.__dict__[_TRIAL] = try_masks(model, attention_of(model))
    configs = _configs(model, name)
    for module in root.modules():
        if (config := configs.get(id(module.__dict__.get("config")))) is not None:
            module.__dict__["config"] = config
    for module in attention_of(model).values():
        module.__dict__[GROUP] = mesh.get_group()


def _configs(model: Any, name: str) -> dict[int, Any]:
    """Return ``id`` of each configuration → a copy that calls the attention that is registered by ``name``.

    A layer that was copied from another (depth up-scaling) has one of its own.
    """
    configs = [model.config, *(module.config for module in attention_of(model).values())]
    copies = {id(config): copy.copy(config) for config in configs}
    for config in copies.values():
        config._attn_implementation = name
    return copies


def attend(
    kind: str,
    module: Any,
    query: torch.Tensor,  # [batch, heads, positions here, head size]
    key: torch.Tensor,  # [batch, key-value heads, positions here, head size]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # [batch or 1, 1, length, length] or [1, 1, 0, length] for a split sequence
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, Any]:
    """Compute the model's own attention, ``kind``; of a split sequence, all positions of a part of the heads.

    Returns [batch, positions here, heads, head size], and the weights if the sequence is not split.
    """
    inner, group = _own_attention(module, kind), module.__dict__.get(GROUP)
    if group is None or attention_mask is None or not _is_split(attention_mask, query, key, group):
        unsplit: tuple[torch.Tensor, Any] = inner(module, query, key, value, attention_mask, *args, **kwargs)
        return unsplit
    if per_head := [name for name in _PER_HEAD if kwargs.get(name) is not None]:
        raise TrueShardValueError(
            f"context: attention has {per_head[0]}, with values for each head, which ranks do not share yet"
        )
    length, heads = attention_mask.shape[-1], query.shape[1]
    if heads % math.lcm(key.shape[1], group.size()):
        return _around(query, key, value, attention_mask, group, kwargs), None
    (query, key, value), groups = _by_heads(query, key, value, length, group)
    mask = attention_mask if attention_mask.shape[-2] else None
    with _key_value_groups(module, groups):
        output = inner(module, query, key, value, mask, *args, **kwargs)[0]
    return _exchange(output, 1, 2, heads, group), None


def _is_split(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor, group: dist.ProcessGroup) -> bool:
    if mask.ndim != 4 or mask.shape[-1] == key.shape[2] or mask.shape[-2] not in (0, mask.shape[-1]):
        return False
    length = part_of(mask.shape[-1], group.rank(), group.size())[1]
    if (query.shape[2], key.shape[2]) != (length, length):
        raise TrueShardValueError(
            f"attention has {query.shape[2]} queries and {key.shape[2]} keys for {length} of {mask.shape[-1]} "
            "positions: what trueshard.split_sequence gives goes to the model as it is, and without past_key_values"
        )
    return True


def _by_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, length: int, group: dist.ProcessGroup
) -> tuple[list[torch.Tensor], int]:
    """Return query, key and value of all positions and this rank's heads; and the query heads of a key-value head."""
    heads, repeated = query.shape[1], math.lcm(key.shape[1], group.size())
    times = repeated // key.shape[1]
    if times > 1:
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    return [_exchange(tensor, 1, 2, length, group) for tensor in (query, key, value)], heads // repeated


def _around(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    group: dist.ProcessGroup,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """Return attention by a ring, [batch, positions here, heads, head size].

    Raises ValueError for what a ring does not compute.
    """
    ranks, heads, length = group.size(), query.shape[1], mask.shape[-1]
    why = None
    if mask.shape[-2]:
        why = "which takes no packed or padded sequences"
    elif length % ranks:
        why = f"which takes parts of one length, and {length} positions have none: choose a multiple of {ranks}"
    elif changes := [name for name in _CHANGES if kwargs.get(name) is not None]:
        why = f"which knows no {changes[0]}"
    if why:
        raise TrueShardValueError(
            f"context: {ranks} ranks do not divide {heads} attention heads, so keys and values go round, {why}; or "
            "choose a context that divides the heads"
        )
    times = heads // key.shape[1]
    key, value = (tensor.repeat_interleave(times, 1) if times > 1 else tensor for tensor in (key, value))
    return _ring(query.contiguous(), key, value, group, kwargs.get("scaling")).transpose(1, 2).contiguous()


# A compiled graph ends here: collectives of a forward are not part of it.
_exchange = torch.compiler.disable(exchange)
_ring = torch.compiler.disable(_torch.ring_attention)


def _own_attention(module: nn.Module, kind: str) -> Any:
    """Return what the file of the module's class uses for ``kind``."""
    for cls in type(module).__mro__:
        namespace = vars(sys.modules[cls.__module__]) if cls.__module__ in sys.modules else {}
        if "ALL_ATTENTION_FUNCTIONS" in namespace:
            return namespace["ALL_ATTENTION_FUNCTIONS"].get_interface(kind, namespace.get("eager_attention_forward"))
    raise TrueShardValueError(f"{type(module).__name__} is not of a file with transformers' attention interface")


@contextlib.contextmanager
def _key_value_groups(module: Any, groups: int) -> Iterator[None]:
    """Inside, tell the module's attention how many query heads share a key-value head here."""
    before = module.__dict__.get("num_key_value_groups")
    if before is None:
        yield
        return
    module.__dict__["num_key_value_groups"] = groups
    try:
        yield
    finally:
        module.__dict__["num_key_value_groups"] = before
