"""The tensor axis: which modules its ranks share, and how; what cannot be shared; and the cutting itself.

- The styles are those of the model's own plan (transformers' ``tp_plan``), or the user's, by globs over names.
- A layer that PEFT has adapted is shared as the layer in it is (``adapters``).
- A parameter is cut before FSDP2 shards it: FSDP2 gathers this rank's part, and the module computes with it. What no
  style cuts, every rank of the axis has whole (``Replicate``), so that all parameters of a model are on one mesh.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from trueshard import _torch
from trueshard.model import names
from trueshard.model.names import Held, Index, nearest
from trueshard.model.regions import rows_of
from trueshard.parallel.adapters import adapter_styles, is_adapter, refuse_adapters, refuse_later_adapters
from trueshard.parallel.collectives import LastInput
from trueshard.parallel.sequence import Parts, blocks_of, parts_of, split_children
from trueshard.parallel.tp_styles import REPLICATE, STYLES, Style, compute_with_parts, share_forward
from trueshard.plans import Plan

_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def resolve(index: Index, plan: Plan, sizes: Mapping[str, int]) -> Plan:
    """Return ``plan`` with the sizes of a mesh, and the styles for this model; nothing is touched.

    Raises:
        ValueError: the model cannot be shared; names the module, and what does not fit.
    """
    requested = plan.tensor > 1 or bool(plan.styles)
    plan = dataclasses.replace(plan, tensor=sizes.get("tensor", 1))
    if (mesh := arrived_on(index)) is not None:
        if requested or plan.tensor > 1:
            raise ValueError(
                "tensor: the model is cut already; leave out tensor, or give shard() the model before that"
            )
        refuse_later_adapters(index)
        return dataclasses.replace(plan, tensor=mesh.size())
    if plan.tensor == 1:
        if plan.styles:
            raise ValueError(
                'tensor: styles need ranks that share: add "ranks" to them, or an axis "tensor" to the mesh'
            )
        return plan
    given_styles = dict(plan.styles)
    styles = given_styles or own_styles(index)
    if unknown := next(((glob, word) for glob, word in styles.items() if word not in STYLES), None):
        raise ValueError(
            f"tensor: {unknown[1]!r}, for {unknown[0]!r}, is no style.{nearest(unknown[1], STYLES)} Styles: "
            f"{', '.join(sorted(STYLES))}"
        )
    if not given_styles:
        styles = styles | _of_parted_ties(index, by_name(index, plan, styles))
    style_of = by_name(index, plan, styles, strict=bool(given_styles))
    if all(STYLES[word].dim is None for word in style_of.values()):
        raise ValueError(
            f"tensor: the plan of {type(index.root).__name__} cuts none of its matrices: give styles of your own"
        )
    _refuse(index, plan, style_of)
    return dataclasses.replace(plan, styles=styles)


def arrived_on(index: Index) -> DeviceMesh | None:
    """Return the mesh over which the parameters of an unsharded model are cut already; None if they are whole.

    Raises ValueError for meshes of several dimensions, or more than one.
    """
    meshes: dict[DeviceMesh, str] = {}
    for held in index.parameters:
        if isinstance(held.tensor, DTensor):
            meshes.setdefault(held.tensor.device_mesh, held.name)
    for mesh, name in meshes.items():
        if mesh.ndim > 1 or len(meshes) > 1:
            first = next(iter(meshes.values()))
            shown = (
                f"{name!r} is on {mesh.ndim} dimensions" if mesh.ndim > 1 else f"{first!r} and {name!r} are not on one"
            )
            raise ValueError(f"a model may arrive cut over one mesh of one dimension: {shown}; let shard() cut it")
    return next(iter(meshes), None)


def own_styles(index: Index) -> dict[str, str]:
    """Return the styles of the model's own plan, by globs over its names; raise ValueError if it has none."""
    for name, module in index.modules.items():
        if own_plan := vars(module).get("_tp_plan"):  # not of what a wrapper such as PEFT's passes on
            styles = {f"{name}.{glob}" if name else glob: word for glob, word in own_plan.items()}
            # As a user would give them.
            return {glob: word for glob, word in styles.items() if names.matching(glob, index.all_names)}
    raise ValueError(
        f"tensor: {type(index.root).__name__} has no plan for sharing matrices (transformers' tp_plan): give the "
        'styles of its modules, as tensor={"ranks": 2, "*.up": "colwise", "*.down": "rowwise"}, or leave out tensor'
    )


def is_shared(root: nn.Module, plan: Plan, module: nn.Module) -> bool:
    """Return True if ``tensor`` ranks share ``module`` of a model with this plan."""
    if plan.tensor == 1:
        return False
    index = Index(root)
    styles = by_name(index, plan, plan.styles)
    return any(name in styles for name, other in index.modules.items() if other is module)


def _of_parted_ties(index: Index, styles: Mapping[str, str]) -> dict[str, str]:
    """Return the modules of ties that a model's own plan would cut in one place and not in another: not at all."""
    result: dict[str, str] = {}
    for held in index.parameters:
        dims = {getattr(placement_of(held, i, styles), "dim", None) for i in range(len(held.places))}
        if len(dims) > 1:
            result |= {name.rpartition(".")[0]: REPLICATE for name in held.names}
    return result


def by_name(index: Index, plan: Plan, styles: Mapping[str, str], *, strict: bool = False) -> dict[str, str]:
    """Return name of a module or parameter → style: that of the last glob that matches.

    Experts that ranks share out have none: each is a whole matrix.
    """
    prefixes = tuple(f"{name}." for name in plan.modules_apart)
    result: dict[str, str] = {}
    for glob, word in styles.items():
        hits = names.matching(glob, index.all_names)
        if strict and not hits:
            raise ValueError(f"tensor: {glob!r} matches no module and no parameter.{nearest(glob, index.all_names)}")
        result |= dict.fromkeys((name for name in hits if not f"{name}.".startswith(prefixes)), word)
    for name in list(result):
        if is_adapter(module := index.modules.get(name)):
            result |= adapter_styles(name, module, result.pop(name))
    return result


# What cannot be shared


def _refuse(index: Index, plan: Plan, styles: Mapping[str, str]) -> None:
    ranks = plan.tensor
    for name, word in styles.items():
        if name in index.modules:
            _refuse_module(name, index.modules[name], word, ranks)
    replicated = {parameter.name for parameter in plan.replicated}
    for held in index.parameters:
        placements = [placement_of(held, i, styles) for i in range(len(held.places))]
        dims = {getattr(placement, "dim", None) for placement in placements}
        if len(dims) > 1:
            raise ValueError(
                f"tensor: {' and '.join(held.names)} are one parameter, and their styles cut it differently"
            )
        dim = dims.pop()
        if dim is None:
            continue
        if held.name in replicated or not held.tensor.is_floating_point():
            raise ValueError(
                f"tensor: {held.name!r} is {held.tensor.dtype} and cannot be cut (a quantised base, or one of several "
                "dtypes in a module): load the base in floating point, or leave out tensor"
            )
        if not all(rows_of(held.tensor.shape[dim], rank, ranks)[1] for rank in range(ranks)):
            raise ValueError(
                f"tensor={ranks} is too many for {held.name!r} of shape {tuple(held.tensor.shape)}, of which a rank "
                f"would have nothing along dimension {dim}"
            )
    _refuse_heads(index.modules, styles, ranks)
    refuse_adapters(index)
    refuse_random(index, "tensor", ranks, dropout=not plan.trial)
    if plan.sequence:
        blocks_of(index.modules, plan, styles)


def _refuse_module(name: str, module: Any, word: str, ranks: int) -> None:
    if STYLES[word].linear:
        weight = _torch.own_parameters(module).get("weight")
        shape = getattr(module, "out_features", None), getattr(module, "in_features", None)
        if weight is None or tuple(weight.shape) != shape or not weight.is_floating_point():
            raise ValueError(
                f"tensor: {name!r} is a {type(module).__name__}, not a linear layer with a floating-point weight of "
                f"(out_features, in_features), which {word!r} is for: give it another style, or leave out tensor"
            )
    kind = STYLES[word].of
    if kind is not None and not isinstance(module, kind):
        raise ValueError(
            f"tensor: {name!r} is a {type(module).__name__}, no {kind.__name__.lower()}; {word!r} does not fit it"
        )


def _refuse_heads(modules: Mapping[str, nn.Module], styles: Mapping[str, str], ranks: int) -> None:
    """Raise ValueError where the ranks would share a head of attention."""
    for name, word in styles.items():
        width = getattr(modules.get(name), "out_features", None)
        owner: Any = modules.get(name.rpartition(".")[0])
        head = getattr(owner, "head_dim", None)
        if not STYLES[word].hands_on or width is None or not isinstance(head, int) or width % head:
            continue
        if (width // head) % ranks:
            raise ValueError(
                f"tensor={ranks} does not divide the {width // head} heads of {name!r}: choose a divisor, or give the "
                "attention another style"
            )


def refuse_random(index: Index, axis: str, ranks: int, *, dropout: bool = True) -> None:
    """Raise ValueError for what is drawn at random, or summed over a batch, inside a module that ranks share."""
    for name, module in index.modules.items():
        if dropout and isinstance(module, _DROPOUT) and module.p > 0:
            raise ValueError(
                f"{axis}={ranks}: {name!r} drops values at random (p={module.p}), and ranks that share its work would "
                "drop different ones; set it to 0"
            )
        rate = getattr(module, "attention_dropout", 0.0)
        if isinstance(rate, float) and rate > 0:
            raise ValueError(f"{axis}={ranks}: {name!r} has attention_dropout={rate}; set it to 0")
    config = getattr(index.root, "config", None)
    if getattr(config, "output_router_logits", False):
        raise ValueError(
            f"{axis}: a loss that balances routers is not the same on several ranks: set output_router_logits=False"
        )


# The cutting


def placement_of(held: Held, place: int, styles: Mapping[str, str]) -> Any:
    """Return how the parameter is placed on the axis, as the style of one of its places says."""
    return _style_of(held.names[place], styles).placement(held.tensor)


def _style_of(parameter: str, styles: Mapping[str, str]) -> Style:
    """Return a parameter's own style, or that of its module."""
    return STYLES[styles.get(parameter) or styles.get(parameter.rpartition(".")[0], REPLICATE)]


def cut(index: Index, plan: Plan, mesh: DeviceMesh, last_input: LastInput) -> Parts | None:
    """Cut the parameters of a model, and let its modules compute with this rank's parts, in place.

    ``last_input``: made for this model; the caller lets it ``forget()`` at the end of each pass.

    Returns what computes on parts of sequences.
    """
    styles = by_name(index, plan, plan.styles or _reduced_by_hooks(index))
    replicated = {parameter.name for parameter in plan.replicated}
    parts = parts_of(index.modules, plan, styles) if plan.sequence else None
    sums: dict[nn.Module, set[str]] = {}
    for held in names.held_tensors(index.root, "parameters"):  # not the index's: experts may have been cut since
        if isinstance(held.tensor, DTensor):
            continue
        if held.name in replicated:
            add_sums(sums, held, styles, None)
            continue
        old: Any = held.tensor
        placed = distribute_tensor(old.detach(), mesh, [placement_of(held, 0, styles)], src_data_rank=None)
        new = nn.Parameter(placed, requires_grad=old.requires_grad)
        for module, attribute in held.places:
            _torch.own_parameters(module)[attribute] = new
        add_sums(sums, held, styles, parts)
    share_modules(index.root, index.modules, styles, parts, sums, mesh.get_group(), last_input)
    return parts


Sums = dict[nn.Module, set[str]]
"""Module → its attributes that hold parameters which are whole, and whose gradients on ranks are parts of a sum."""


def add_sums(sums: Sums, held: Held, styles: Mapping[str, str], parts: Parts | None) -> None:
    """Note a whole parameter where its gradients on ranks are parts of a sum."""
    for name, (module, attribute) in zip(held.names, held.places, strict=True):
        style = _style_of(name, styles)
        is_sum = style.sums or (parts is not None and parts.holds_parts(name))
        is_whole = style.placement(held.tensor).is_replicate()
        sums.setdefault(module, set()).update([attribute] if is_sum and is_whole else [])


def share_modules(
    root: nn.Module,
    modules: Mapping[str, nn.Module],
    styles: Mapping[str, str],
    parts: Parts | None,
    sums: Sums,
    group: Any,
    last_input: LastInput,
) -> None:
    """Let modules compute with this rank's parts of their parameters, in place."""
    for module, attributes in sums.items():
        compute_with_parts(module, attributes, group)
    for name, module in modules.items():
        if name in styles:
            if (prepare := STYLES[styles[name]].prepare) is not None:
                prepare(root, module)
            defers = {"defers": parts.state.holds_parts} if parts is not None and parts.scatters(name) else {}
            share_forward(module, styles[name], group, last_input, **defers)
    if parts is not None:
        split_children(modules, parts, group)


def _reduced_by_hooks(index: Index) -> dict[str, str]:
    """Return modules of a model that arrives cut whose gradients transformers sums in a hook, and remove that hook.

    It would sum them again with each microbatch.
    """
    result = {}
    for name, module in index.modules.items():
        forward = module.__dict__.get("forward")
        if getattr(forward, "__qualname__", "").startswith("ReplicatedWithGradAllReduce."):
            del module.__dict__["forward"]
            result[name] = "replicated_with_grad_allreduce"
    return result
