"""Expert parallelism: each rank of a group has some experts of every layer, and tokens travel to them.

- A module of stacked experts is cut by expert before FSDP2 shards it, over the ranks that have the same experts. Its
  own forward computes with the part: each architecture keeps its activation, its layout and its kernels.
- A rank sends a row for each of a token's experts by all-to-all, sorted by expert. What comes back is weighted and
  summed where the row came from, so the gradients of routers need no communication of their own.
- Ranks of a tensor axis have the same tokens, so each sends its part of them, and gathers what the others got.
- Tokens of all ranks of the group arrive, so the gradient of an expert is the sum over the group. FSDP2 averages over
  the ranks that have the same experts, which are fewer than those that have different tokens: the factor that is
  missing is in autograd's graph, since FSDP2's own (``set_gradient_divide_factor``) fails for float16 and float64 where
  one rank has all.
- That a forward is the weighted sum of what each expert makes of a token is tried, once a class (``_try``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from trueshard import _torch
from trueshard.distributed import Axes, is_simulated
from trueshard.errors import TrueShardValueError, warn_user
from trueshard.model import experts
from trueshard.model.names import Index
from trueshard.parallel.collectives import exchange_rows, gather, own_part, scale_gradient
from trueshard.parallel.module_copies import LARGE, CheapMatrices, copy_on_cpu, kind_of, random_values
from trueshard.plans import Plan


def resolve(index: Index, plan: Plan, sizes: Mapping[str, int]) -> Plan:
    """Return ``plan``; raise ValueError, naming what does not fit, if ranks cannot share the experts so."""
    if plan.experts > 1:
        _refuse(index, plan)
    return plan


def _refuse(index: Index, plan: Plan) -> None:
    if any(isinstance(parameter, DTensor) for parameter in index.root.parameters()):
        raise TrueShardValueError(
            f"experts={plan.experts}: the model is cut already; give shard() the model before that"
        )
    counts = experts.shared_out(index, plan.experts)
    modules, replicated = index.modules, {parameter.name for parameter in plan.replicated}
    units = {unit.name for unit in plan.units if unit.kind == "experts"}
    for name in counts:
        if name not in units:
            raise TrueShardValueError(
                f"experts={plan.experts}: {name!r} is no unit of its own in the plan (tied to another, or the plan was "
                "made for other ranks): make the plan anew, or leave out experts"
            )
        for attribute, parameter in _torch.own_parameters(modules[name]).items():
            fqn = f"{name}.{attribute}"
            if parameter is not None and (fqn in replicated or not parameter.is_floating_point()):
                raise TrueShardValueError(
                    f"experts={plan.experts}: {fqn!r} is {parameter.dtype} and cannot be cut (quantised experts, or "
                    "several dtypes in one module): load it in floating point, or leave out experts"
                )
        _refuse_adapter(name, modules, plan.experts)
        if plan.sequence and name.rpartition(".")[0] in {unit.name for unit in plan.units if unit.kind == "block"}:
            raise TrueShardValueError(
                f"experts={plan.experts}: {name!r} lies in its block itself: leave out tensor's sequence"
            )


def _refuse_adapter(name: str, modules: dict[str, nn.Module], ranks: int) -> None:
    above, _, attribute = name.rpartition(".")
    if attribute == "base_layer":
        raise TrueShardValueError(
            f"experts={ranks}: {above!r} is a {type(modules[above]).__name__} around stacked experts, whose matrices "
            "are not cut by expert: adapt linear layers only (target_modules), or leave out experts"
        )


def try_experts(index: Index, plan: Plan, mesh: DeviceMesh) -> Plan:
    """Return the plan with what trials found. Raises ValueError if experts apart compute something else; names them."""
    if plan.experts == 1 or not plan.trial or is_simulated(mesh):
        return plan
    kinds: set[Any] = set()
    sentences = []
    for name in plan.modules_apart:
        module = index.modules[name]
        if (kind := kind_of(module)) not in kinds:
            kinds.add(kind)
            sentences.append(f"{name} ({_torch.own_class(module).__name__}): {_try(name, module, plan.experts)}")
    return dataclasses.replace(plan, tried=(*plan.tried, *sentences))


def _try(name: str, module: Any, ranks: int) -> str:
    """Raise ValueError if parts of the experts make something else of tokens, or of gradients, than all of them."""
    noise = torch.Generator().manual_seed(0)

    def parameter(original: torch.Tensor) -> nn.Parameter:  # gradients of large matrices would have their memory
        return nn.Parameter(random_values(original, noise, centred=True), original.numel() < LARGE)

    on_cpu = torch.device("cpu"), torch.autocast("cpu", enabled=False)
    with _torch.real_tensors(), torch.enable_grad(), on_cpu[0], on_cpu[1], CheapMatrices():
        tried: Any = copy_on_cpu(module, parameter, torch.float32)
        count, here = tried.num_experts, tried.num_experts // ranks
        chosen = torch.stack([torch.randperm(count, generator=noise)[: min(2, count)] for _ in range(_TOKENS)])
        weights = torch.rand(chosen.shape, generator=noise).requires_grad_()
        parameters = {key: p for key, p in _torch.own_parameters(tried).items() if p is not None}
        for width in sorted({size for p in parameters.values() for size in p.shape[1:]}):
            tokens = _Tokens(torch.randn(_TOKENS, width, generator=noise).requires_grad_(), chosen, weights)
            with contextlib.suppress(Exception):  # whatever a forward raises at another width
                expected = tried(*tokens)
                break
        else:
            warn_user(f"experts={ranks}: {name!r} does not run in a trial, so it was not tried")
            return "not tried, since it does not run"
        order, experts_of = _by_expert(chosen)
        rows, back = tokens.hidden[order // chosen.shape[-1]], []
        for rank in range(ranks):
            parts: Parts = {key: p.narrow(0, rank * here, here) for key, p in parameters.items()}
            mine = experts_of // here == rank
            back.append(_compute(tried, tried.forward, parts.copy, rows[mine], experts_of[mine] % here))
        together_and_apart = expected, _combined(torch.cat(back), order, tokens)
        grain = torch.randn(expected.shape, generator=noise)
        leaves = {"hidden states": tokens.hidden, "routing weights": weights}
        leaves |= {key: p for key, p in parameters.items() if p.requires_grad}
        results = [
            [output, *torch.autograd.grad((output * grain).sum(), list(leaves.values()), materialize_grads=True)]
            for output in together_and_apart
        ]
    places = ["what it returns", *(f"the gradient of {key}" for key in leaves)]
    triples = zip(places, *results, strict=True)
    wrong = [place for place, a, b in triples if (a - b).abs().max() > 1e-4 * a.abs().max()]
    if wrong:
        raise TrueShardValueError(
            f"experts={ranks}: {name!r} ({_torch.own_class(module).__name__}) is something else with its experts "
            f"apart: {wrong[0]} differs. Its forward (hidden states, experts of each token, weights) must be the "
            "weighted sum of what each expert makes of a token by itself; change that, or leave out experts "
            '(tensor={"trial": False} turns this check off)'
        )
    return "its experts apart are the same as together"


class _Tokens(NamedTuple):
    """Inputs of a module of experts."""

    hidden: torch.Tensor
    """(tokens, width)"""
    chosen: torch.Tensor
    """(tokens, experts of each), numbers of experts"""
    weights: torch.Tensor
    """Routing weights of the experts, in the same order."""


_TOKENS = 7
"""Tokens on which experts are tried."""

Compute = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(rows, the expert of each, counted on this rank) → rows."""
Parts = dict[str, torch.Tensor]
"""Name of a parameter → some of its experts."""


def cut(modules: Mapping[str, nn.Module], plan: Plan, axes: Axes) -> None:
    """Cut the experts of a model, and let tokens travel to this rank's part and back, in place."""
    group, alike = axes.along["experts"], axes.alike
    assert alike is not None
    tensor = axes.along["tensor"].get_group() if "tensor" in axes.along else None
    factor = alike.size() / axes.data.size()
    for name in plan.modules_apart:
        module = modules[name]
        parameters = _torch.own_parameters(module)
        for attribute, old in parameters.items():
            if old is not None:
                placed = distribute_tensor(old.detach(), group, [Shard(0)], src_data_rank=None)
                parameters[attribute] = nn.Parameter(placed, requires_grad=old.requires_grad)
        _route(module, group.get_group(), tensor, factor)


def _route(module: Any, group: dist.ProcessGroup, tensor: dist.ProcessGroup | None, factor: float) -> None:
    inner = module.forward
    signature, count = inspect.signature(inner), module.num_experts
    compute = functools.partial(_compute, module, inner, functools.partial(_here, module, factor))

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        inputs = _Tokens(*signature.bind(*args, **kwargs).arguments.values())
        tokens = _Tokens(*(tensor.flatten(0, -2) for tensor in inputs))
        if tensor is None:
            outputs = _travel(tokens, count, group, compute)
        else:  # all ranks of the axis have the same tokens: each sends its part of them
            parts = _Tokens(*(own_part(token, 0, tensor) for token in tokens))
            outputs = gather(_travel(parts, count, group, compute), 0, len(tokens.hidden), tensor)
        return outputs.view(inputs.hidden.shape)

    # How many rows travel is known when they do: nothing of it is for a compiler.
    module.__dict__["forward"] = torch.compiler.disable(forward)


def _travel(tokens: _Tokens, count: int, group: dist.ProcessGroup, compute: Compute) -> torch.Tensor:
    """Return the weighted sum of what the experts of each token, of ``count`` in all, make of it: (tokens, width)."""
    hidden, chosen, _ = tokens
    ranks, choices = group.size(), chosen.shape[-1]
    order, by_expert = _by_expert(chosen)
    # Where the rows of each expert end: bincount would wait for the largest number.
    ends = torch.searchsorted(by_expert, torch.arange(count, device=chosen.device), right=True)
    leaving = ends.diff(prepend=ends.new_zeros(1))
    arriving = torch.empty_like(leaving)
    dist.all_to_all_single(arriving, leaving, group=group)
    sent, received = torch.stack([leaving, arriving]).view(2, ranks, -1).sum(-1).tolist()
    rows = exchange_rows(hidden[order // choices], sent, received, group)
    here = torch.arange(count, device=rows.device) % (count // ranks)
    expert = here.repeat_interleave(arriving, output_size=len(rows))
    return _combined(exchange_rows(compute(rows, expert), received, sent, group), order, tokens)


def _by_expert(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the order of rows, one for each choice of a token, by expert, and the expert of each."""
    order = chosen.flatten().argsort(stable=True)
    return order, chosen.flatten()[order]


def _combined(rows: torch.Tensor, order: torch.Tensor, tokens: _Tokens) -> torch.Tensor:
    """Return the weighted sum of the rows of each token, which came in ``order``: (tokens, width)."""
    outputs = rows[order.argsort()].view(*tokens.chosen.shape, rows.shape[-1])
    return (outputs * tokens.weights.unsqueeze(-1)).sum(1).to(tokens.hidden.dtype)


def _compute(
    module: Any, inner: Callable[..., Any], parts: Callable[[], Parts], rows: torch.Tensor, expert: torch.Tensor
) -> torch.Tensor:
    """Return what ``inner``, the forward of ``module``, makes of rows for one expert each, with some of the experts."""
    arrived = len(rows)
    if not arrived:  # of a row that nobody reads, so that the gradients here are zeros, as of experts without tokens
        rows, expert = torch.cat([rows, rows.new_zeros((1, *rows.shape[1:]))]), expert.new_zeros(1)
    with _holding(module, parts()):
        outputs: torch.Tensor = inner(rows, expert.unsqueeze(-1), rows.new_ones((len(rows), 1)))
    return outputs[:arrived]


def _here(module: Any, factor: float) -> Parts:
    """Return this rank's experts alone: plain tensors whose gradients are multiplied by ``factor``."""
    held = {name: parameter for name, parameter in _torch.own_parameters(module).items() if parameter is not None}
    return {name: scale_gradient(p.to_local(grad_placements=[Shard(0)]), factor) for name, p in held.items()}  # type: ignore[attr-defined]


@contextlib.contextmanager
def _holding(module: Any, parts: Parts) -> Iterator[None]:
    """Inside, ``module`` has these experts alone."""
    held: Any = _torch.own_parameters(module)
    before, count = dict(held), module.num_experts
    try:
        held.update(parts)
        module.num_experts = next(len(part) for part in parts.values())
        yield
    finally:
        held.update(before)
        module.num_experts = count
