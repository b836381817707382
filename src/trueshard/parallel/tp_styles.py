"""Styles: how the ranks of the tensor axis share a module. The words are those of transformers' plans.

A module computes with plain tensors, this rank's part of each parameter. A style says along which dimension a parameter
is cut, and what happens to the module's input and output: Megatron's two kinds of linear layers (Shoeybi et al., 2019,
arXiv 1909.08053), embeddings by rows or columns, experts of which each rank has a slice, and modules that every rank
has whole, on all of the activations (the gradients of ranks are equal) or on its own part (they are parts of a sum).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from trueshard import _torch
from trueshard.model import names
from trueshard.model.regions import rows_of
from trueshard.parallel.collectives import LastInput, gather, own_part, sum_gradients, sum_parts

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_KEY, _SHARED, _LAST = "_trueshard_sums", "_trueshard_shared_head", "_trueshard_last_input"
_GROUP = "_trueshard_tensor_group"


@dataclass(frozen=True)
class Style:
    """Way in which ranks share a module, or a parameter."""

    dim: int | None = None
    """Dimension along which a parameter of two or more dimensions is cut; None: every rank has all of it."""
    vectors: bool = False
    """Cut parameters of one dimension, too (a bias)."""
    halves: int = 1
    """More than one: the dimension holds so many packed ones, of each of which a rank has its part."""
    sums: bool = False
    """Gradients of what every rank has whole are parts of a sum."""
    enter: Callable[[nn.Module, Any, dist.ProcessGroup], Any] | None = None
    """(module, first input, group) → what the module is given instead."""
    leave: Callable[[nn.Module, Any, dist.ProcessGroup], Any] | None = None
    """(module, output, group) → what the module returns instead."""
    linear: bool = False
    """True for modules that multiply by ``weight`` of (out_features, in_features) alone."""
    local: bool = False
    """``enter`` communicates nothing."""
    apart: str | None = None
    """Attribute that the module computes without, and which is added to its output."""
    defers: bool = False
    """Communicates nothing where the module that holds it gathers before it and scatters after (``sequence``)."""
    shares_outputs: bool = False
    """Each rank computes a part of the outputs, which ``leave`` joins: of a head, the loss can be computed on parts."""
    weights_outputs: bool = False
    """The second input (routing weights of experts) needs the gradients of all ranks, too."""
    by_rows: bool = False
    """True for embeddings of whose rows each rank has a part."""
    of: type[nn.Module] | None = None
    """Class of module that the style is for; None: any."""
    prepare: Callable[[nn.Module, nn.Module], None] | None = None
    """(root, module) → what ``leave`` needs to know is noted on the module."""
    uncut: str | None = None
    """The style of a module that every rank computes whole, and that is given and gives what this style's one is."""

    @property
    def hands_on(self) -> bool:
        """True if each rank goes on with its part of a linear layer's outputs, such as its heads."""
        return self.linear and self.dim == -2 and self.leave is None

    def placement(self, parameter: torch.Tensor) -> Any:
        """Return how the parameter is placed on the axis."""
        if self.dim is None or parameter.ndim == 0 or (parameter.ndim == 1 and not self.vectors):
            return Replicate()
        dim = max(parameter.ndim + self.dim, 0)
        return _torch.packed(dim, self.halves) if self.halves > 1 and parameter.ndim > 1 else Shard(dim)


def _sum_gradients(module: nn.Module, value: Any, group: dist.ProcessGroup) -> Any:
    return sum_gradients(value, group, module.__dict__[_LAST])


def _sum(_: nn.Module, output: Any, group: dist.ProcessGroup) -> Any:
    return sum_parts(output, group)


def _gather_columns(module: Any, output: Any, group: dist.ProcessGroup) -> Any:
    return gather(output, -1, module.embedding_dim if isinstance(module, nn.Embedding) else module.out_features, group)


def _gather_inputs(module: Any, value: Any, group: dist.ProcessGroup) -> Any:
    while not hasattr(module, "in_features"):
        module = module.base_layer
    return gather(value, -1, module.in_features, group)


def _own_columns(_: nn.Module, value: Any, group: dist.ProcessGroup) -> Any:
    return own_part(value, -1, group)


def _divide(_: nn.Module, value: Any, group: dist.ProcessGroup) -> Any:
    return value / group.size()


def _note_rope(root: nn.Module, module: nn.Module) -> None:
    config: Any = getattr(names.unwrap(root), "config", None)
    module.__dict__["_trueshard_rope"] = config.get_text_config().qk_rope_head_dim


def _sum_rope_gradients(module: Any, output: Any, group: dist.ProcessGroup) -> Any:
    """Sum gradients of what goes past the next projection to this rank's heads only (multi-head latent attention)."""
    rope = module.__dict__["_trueshard_rope"]
    passed, rotated = output.split([output.shape[-1] - rope, rope], dim=-1)
    return torch.cat([passed, sum_gradients(rotated, group)], dim=-1)


REPLICATE = "replicate"
"""The style of what no other style names: every rank has all of it, and computes all of it."""
_WHOLE = Style(defers=True, uncut=REPLICATE)
_JOINED_COLUMNS = Style(
    dim=-2,
    vectors=True,
    enter=_sum_gradients,
    leave=_gather_columns,
    linear=True,
    shares_outputs=True,
    uncut=REPLICATE,
)
_SPLIT_ROWS = Style(dim=-1, enter=_own_columns, leave=_sum, linear=True, apart="bias", uncut=REPLICATE)
STYLES: dict[str, Style] = {
    "colwise": Style(dim=-2, vectors=True, enter=_sum_gradients, linear=True, defers=True, uncut="whole_own_outputs"),
    "colwise_gather_output": _JOINED_COLUMNS,
    "colwise_rep": _JOINED_COLUMNS,
    "rowwise": Style(dim=-1, leave=_sum, linear=True, apart="bias", defers=True, uncut="whole_gather_inputs"),
    "rowwise_split_input": _SPLIT_ROWS,
    "rowwise_rep": _SPLIT_ROWS,
    "embedding_rowwise": Style(dim=-2, by_rows=True, of=nn.Embedding, uncut=REPLICATE),
    "embedding_colwise": Style(dim=-1, leave=_gather_columns, of=nn.Embedding, uncut=REPLICATE),
    "packed_colwise": Style(dim=-2, vectors=True, halves=2, enter=_sum_gradients, defers=True),
    "packed_rowwise": Style(dim=-1, halves=2, defers=True),
    "replicated_with_grad_allreduce": Style(sums=True, defers=True),
    "moe_tp_experts": Style(enter=_sum_gradients, leave=_sum, weights_outputs=True, uncut=REPLICATE),
    "moe_identity_expert": Style(enter=_divide, local=True),
    "mla_kv_a_proj": Style(leave=_sum_rope_gradients, prepare=_note_rope, uncut="mla_kv_a_proj"),
    "whole_own_outputs": Style(leave=_own_columns),
    "whole_gather_inputs": Style(enter=_gather_inputs),
    "all_reduce": Style(leave=_sum),
    "local_params": _WHOLE,
    REPLICATE: _WHOLE,
}
"""Meaning of each word. Nothing outside of this table compares words: what differs is in the record."""


class ComputesWithParts(nn.Module):
    """Mixin for the class of a module: what reads a gathered parameter gets this rank's part, a plain tensor."""

    def __getattr__(self, name: str) -> Any:
        value: Any = super().__getattr__(name)
        # Gathered over the data ranks, it is on the tensor axis alone; the shards are on more dimensions.
        if isinstance(value, DTensor) and value.device_mesh.ndim == 1 and name in _torch.own_parameters(self):
            placements = value.placements
            if placements[0].is_replicate() and name in self.__dict__[_KEY]:
                placements = (Partial(),)
            return value.to_local(grad_placements=placements)
        if name in self.__dict__[_KEY] and not isinstance(value, DTensor):  # one that FSDP2 cannot shard
            wide = value.to(torch.promote_types(value.dtype, torch.float32))
            return sum_gradients(wide, self.__dict__[_GROUP]).to(value.dtype)
        return value


def compute_with_parts(module: nn.Module, sums: set[str], group: dist.ProcessGroup) -> None:
    """Let ``module`` compute with parts of its parameters; ``sums``: those whose gradients are parts of a sum."""
    module.__dict__[_KEY], module.__dict__[_GROUP] = frozenset(sums), group
    names.mix_in(module, ComputesWithParts)


def share_forward(
    module: nn.Module,
    word: str,
    group: dist.ProcessGroup,
    last_input: LastInput,
    *,
    defers: Callable[[], bool] = lambda: False,
) -> None:
    """Put what a style does to inputs and outputs around ``module``'s own forward, in place.

    Args:
        word: its style.
        group: ranks of the tensor axis.
        last_input: the model's, so that queries, keys and values sum the gradient of their input once.
        defers: () → True while the module is in a block that holds parts of sequences, whose own children communicate.
    """
    module.__dict__[_LAST] = last_input
    style, inner = STYLES[word], module.forward
    if style.by_rows:
        module.__dict__["forward"] = _own_rows_of(module, inner, group)
    if not any((style.enter, style.leave, style.apart)):
        return
    if style.shares_outputs:
        module.__dict__[_SHARED] = SharedHead(module, group)

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        joins = not defers()
        if style.enter is not None and (joins or style.local):
            args, kwargs = _on_first(functools.partial(style.enter, module), args, kwargs, group)
        if style.weights_outputs and joins:
            args, kwargs = _on_weights(args, kwargs, group)
        left_out, output = _without(module, style.apart, inner, args, kwargs)
        if style.leave is not None and output is not None and joins:
            output = style.leave(module, output, group)
        if left_out is None:
            return output
        added = getattr(module, str(style.apart))
        return output + (added if joins else added * float(group.rank() == 0))  # once in the sum

    module.__dict__["forward"] = forward


def _own_rows_of(module: Any, inner: Callable[..., Any], group: dist.ProcessGroup) -> Callable[..., Any]:
    """Return the forward of an embedding of whose rows this rank has a part: zeros for the others, and then the sum."""
    start, rows = rows_of(module.num_embeddings, group.rank(), group.size())
    padding = module.padding_idx

    @functools.wraps(inner)
    def forward(ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        others = (ids < start) | (ids >= start + rows)
        if padding is not None:  # an index, as the module sees it, of a row without gradient
            module.padding_idx = padding - start if start <= padding < start + rows else None
        try:
            embedded = inner((ids - start).masked_fill(others, 0), *args, **kwargs)
        finally:
            module.padding_idx = padding
        return sum_parts(embedded.masked_fill(others.unsqueeze(-1), 0), group)

    return forward


class SharedHead:
    """A layer of whose outputs each rank computes a part, and which gives all of them."""

    def __init__(self, module: Any, group: dist.ProcessGroup) -> None:
        self._module, self.group, self._total = module, group, module.out_features
        self.first = rows_of(self._total, group.rank(), group.size())[0]
        """The first output that is this rank's."""

    def part(self, hidden: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Return this rank's part of the outputs; the gradient of ``hidden`` is whole."""
        result: torch.Tensor = type(self._module).forward(self._module, sum_gradients(hidden, self.group), **kwargs)
        return result

    def whole(self, hidden: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Return all outputs."""
        return gather(self.part(hidden, **kwargs), -1, self._total, self.group)


def shared_head(module: nn.Module) -> SharedHead | None:
    """Return how ranks share the outputs of a layer; None if each computes all of them."""
    return module.__dict__.get(_SHARED)


def _on_first(function: Any, args: Any, kwargs: Any, group: dist.ProcessGroup) -> Arguments:
    if args:
        return (function(args[0], group), *args[1:]), kwargs
    name = next(iter(kwargs))
    return args, {**kwargs, name: function(kwargs[name], group)}


def _on_weights(args: Any, kwargs: Any, group: dist.ProcessGroup) -> Arguments:
    args = [sum_gradients(a, group) if i and _is_float(a) else a for i, a in enumerate(args)]
    first = next(iter(kwargs), None) if not args else None
    kwargs = {k: sum_gradients(v, group) if k != first and _is_float(v) else v for k, v in kwargs.items()}
    return tuple(args), kwargs


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _without(
    module: nn.Module, attribute: str | None, inner: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[Any, Any]:
    """Return one parameter of ``module``, None if there is none, and what ``inner``, its forward, gives without it."""
    held = _torch.own_parameters(module)
    hidden = held.get(attribute) if attribute else None
    if hidden is None:
        return None, inner(*args, **kwargs)
    if getattr(inner, "__func__", None) is nn.Linear.forward:  # a compiler recomputes nothing that hides a parameter
        inputs = args[0] if args else kwargs["input"]
        return hidden, F.linear(inputs, cast(Any, module).weight)
    held[str(attribute)] = None
    try:
        return hidden, inner(*args, **kwargs)
    finally:
        held[str(attribute)] = hidden
