"""Sequence parallelism: between matrices, each rank of the tensor axis holds its part of the sequence.

In the blocks of a model, what lies between the shared modules (norms, residuals) is computed on a part of the tokens,
so its activations take 1/tensor of the memory (Korthikanti et al., 2022, arXiv 2205.05198). A shared module of a block
(attention, feed-forward) gathers the tokens before and scatters the sum of its outputs after; inside it nothing is
communicated, and all gradients are parts of a sum. Without gradients nothing is split: there is no memory to save.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trueshard.model import names
from trueshard.plans import Plan
from trueshard.runtime.collectives import gather, own_part, scatter_sum

_DIM = 1  # of the tokens, in (batch, tokens, width)
_FITTING = {
    "colwise",
    "rowwise",
    "packed_colwise",
    "packed_rowwise",
    "replicated_with_grad_allreduce",
    "moe_tp_experts",
    "moe_identity_expert",
    "mla_kv_a_proj",
    "local_params",
    "replicate",
}
"""Styles that a shared module of a block may hold."""


class _Length:
    total = 0
    """Tokens of the sequences that the blocks are given."""


def is_split() -> bool:
    """True where blocks hold parts of sequences: with gradients."""
    return torch.is_grad_enabled()


def shared_modules(root: nn.Module, plan: Plan, styles: Mapping[str, str]) -> list[tuple[str, list[str]]]:
    """Return each block's name, and those of its children that hold what ranks share.

    Raises ValueError for a model whose blocks are of another form.
    """
    modules = dict(names.named_modules(root))
    found = []
    for block in [unit.name for unit in plan.units if unit.kind == "block"]:
        inside = [name for name in styles if name.startswith(f"{block}.") and name in modules]
        children = {f"{block}.{name.removeprefix(f'{block}.').partition('.')[0]}": None for name in inside}
        found.append((block, list(children)))
        if flat := next((name for name in children if name in styles), None):
            raise ValueError(
                f"tensor: with sequence, a block's attention and feed-forward are modules of their own, which {flat!r} "
                "is not: leave out sequence"
            )
        if other := next((name for name in inside if styles[name] not in _FITTING), None):
            raise ValueError(f"tensor: sequence does not go with the style {styles[other]!r} of {other!r}")
    lists = {block.rpartition(".")[0] for block, _ in found}
    if len(lists) != 1 or not any(children for _, children in found):
        shown = ", ".join(map(repr, sorted(lists))) or "none"
        raise ValueError(
            f"tensor: with sequence, the blocks are one list of modules; here: {shown}. Leave out sequence"
        )
    if whole := next((each for each in plan.replicated if any(each.name.startswith(f"{b}.") for b, _ in found)), None):
        raise ValueError(
            f"tensor: {whole.name!r} is whole on every rank ({whole.why}), which does not go with sequence"
        )
    return found


def split_blocks(root: nn.Module, blocks: list[tuple[str, list[str]]], group: dist.ProcessGroup) -> None:
    """Let the blocks compute on parts of the sequence, in place."""
    modules = dict(names.named_modules(root))
    for _, children in blocks:
        for name in children:
            _around(
                modules[name], functools.partial(_gathered, group=group), functools.partial(_scattered, group=group)
            )
    _around(modules[blocks[0][0]], functools.partial(_begun, group=group), None)
    _around(modules[blocks[-1][0]], None, functools.partial(_ended, group=group))


def _begun(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    _Length.total = x.shape[_DIM]
    return own_part(x, _DIM, group)


def _ended(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return gather(x, _DIM, _Length.total, group)


def _gathered(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return gather(x, _DIM, _Length.total, group, sums=True)


def _scattered(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return scatter_sum(x, _DIM, group)


def _around(module: nn.Module, enter: Callable[..., Any] | None, leave: Callable[..., Any] | None) -> None:
    """Change the hidden states that a module is given, and those that it returns."""
    inner = module.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not is_split():
            return inner(*args, **kwargs)
        if enter is not None and args:
            args = (enter(args[0]), *args[1:])
        elif enter is not None:
            name = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
            kwargs[name] = enter(kwargs[name])
        output = inner(*args, **kwargs)
        if leave is None:
            return output
        return (leave(output[0]), *output[1:]) if isinstance(output, tuple) else leave(output)

    module.__dict__["forward"] = forward


def recomputing(contexts: Callable[[], Any] | None = None) -> Any:
    """Return the contexts of a forward and of its recomputation, which sees sequences of the same length."""
    forward, again = contexts() if contexts is not None else (contextlib.nullcontext(), contextlib.nullcontext())
    return forward, _of_length(_Length.total, again)


@contextlib.contextmanager
def _of_length(total: int, inner: Any) -> Iterator[None]:
    before, _Length.total = _Length.total, total
    try:
        with inner:
            yield
    finally:
        _Length.total = before
