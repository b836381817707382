"""Sequence parallelism: between matrices, each rank of the tensor axis holds its part of the sequence.

In the blocks of a model, what lies between their larger modules (norms, residuals) is computed on a part of the tokens,
so its activations take 1/tensor of the memory (Korthikanti et al., 2022, arXiv 2205.05198). A larger module (attention,
feed-forward) gathers the tokens before. Where styles share all of its matrices, it communicates nothing inside, all of
its gradients are parts of a sum, and the sum of its outputs is scattered after: the bytes are those without sequence
parallelism. Else it computes as without, and each rank keeps its part of the output. The norm behind the last block
computes on parts, too, where a trial of the model's forward shows that nothing else reads what the blocks return
(``forward_trial``).

A pass that begins without gradients splits nothing: there is no memory to save. One that begins with them splits in all
blocks, also in those that run without (frozen ones under ``no_grad``, reentrant checkpointing); and backward, which may
compute blocks again, sees the pass as its forward did. Where a model is asked for its hidden states, each block
takes its part of whole ones and gathers them again.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trueshard import _torch
from trueshard.errors import TrueShardRuntimeError, TrueShardValueError
from trueshard.model.units import has_forward
from trueshard.parallel.collectives import gather, own_part, scatter_sum
from trueshard.parallel.forward_trial import last_norm
from trueshard.parallel.tp_styles import REPLICATE, STYLES
from trueshard.plans import Plan

_DIM = 1  # of the tokens, in (batch, tokens, width)
ASKED = "output_hidden_states"
"""Argument of transformers' models by which they return what lies between blocks."""


@dataclass
class Pass:
    """The pass of one model that is under way. Each sharded model has its own, so that several may be in flight."""

    total: int = 0
    """Tokens of the sequences that the blocks are given; a recomputation in backward has those of its forward."""
    split: bool | None = None
    """Blocks hold parts. None outside of passes and their backward: blocks that are called by themselves."""
    in_parts: bool = False
    """True while the next block is given this rank's part: from the first block to the last, or to the norm."""
    asked: bool = False
    """Hidden states between blocks are whole, since the model returns them."""

    def holds_parts(self) -> bool:
        """True where the blocks hold parts of sequences."""
        return torch.is_grad_enabled() if self.split is None else self.split

    @contextlib.contextmanager
    def of_length(self, total: int) -> Iterator[None]:
        """Inside, blocks that are computed again see sequences of this length."""
        before, self.total = self.total, total
        try:
            yield
        finally:
            self.total = before

    def forget(self) -> None:
        """End a backward."""
        self.split, self.asked = None, False

    def follow_backward(self, output: Any) -> None:
        """Let backward see this pass, whose output is given, as its forward did."""
        total, split, asked = self.total, self.split, self.asked

        def restore(_: Any) -> None:
            self.total, self.split, self.asked = total, split, asked
            _torch.at_end_of_backward(self.forget)

        for tensor in _torch.tensors_in(output):
            if tensor.requires_grad:
                _torch.call_with_gradient(tensor, restore)


@dataclass(frozen=True)
class Block:
    """A block of a model, by names."""

    name: str
    scattered: tuple[str, ...]
    """Its larger children whose matrices are all shared."""
    whole: tuple[str, ...]
    """Its other larger children."""

    def holds_parts(self, name: str) -> bool:
        """True if gradients of what every rank has whole, under this name, are parts of a sum."""
        return name.startswith(f"{self.name}.") and not any(name.startswith(f"{child}.") for child in self.whole)

    def scatters(self, name: str) -> bool:
        """True for a module whose own communication is left to a child of the block."""
        return any(name.startswith(f"{child}.") for child in self.scattered)


@dataclass(frozen=True)
class Parts:
    """Modules of a model that compute on parts of sequences."""

    blocks: tuple[Block, ...]
    norm: str | None
    """Name of the norm behind the last block, if it does."""
    state: Pass = field(default_factory=Pass, compare=False)

    def holds_parts(self, name: str) -> bool:
        """True if gradients of what every rank has whole, under this name, are parts of a sum."""
        in_norm = self.norm is not None and name.startswith(f"{self.norm}.")
        return in_norm or any(block.holds_parts(name) for block in self.blocks)

    def scatters(self, name: str) -> bool:
        """True for a module whose own communication is left to a child of a block."""
        return any(block.scatters(name) for block in self.blocks)


def parts_of(modules: Mapping[str, nn.Module], plan: Plan, styles: Mapping[str, str]) -> Parts:
    """Return what may compute on parts of sequences, with a trial of the norm; raises as ``blocks_of``."""
    blocks = blocks_of(modules, plan, styles)
    norm = last_norm(modules, [block.name for block in blocks])
    otherwise = [name for name, word in styles.items() if STYLES[word] != STYLES[REPLICATE]] + [
        parameter.name for parameter in plan.replicated
    ]
    return Parts(tuple(blocks), None if any(f"{name}.".startswith(f"{norm}.") for name in otherwise) else norm)


def blocks_of(modules: Mapping[str, nn.Module], plan: Plan, styles: Mapping[str, str]) -> list[Block]:
    """Return the blocks that may compute on parts of sequences; raise ValueError for a model of another form."""
    result = []
    for name in [unit.name for unit in plan.units if unit.kind == "block"]:
        children = [f"{name}.{child}" for child, _ in modules[name].named_children()]
        large = [child for child in children if any(parameter.ndim > 1 for parameter in modules[child].parameters())]
        if flat := next((child for child in large if child in styles), None):
            raise TrueShardValueError(
                f"tensor: with sequence, a block's attention and feed-forward are modules of their own, which {flat!r} "
                "is not: leave out sequence"
            )
        scattered = [child for child in large if _shares_all(child, modules[child], styles)]
        result.append(Block(name, tuple(scattered), tuple(child for child in large if child not in scattered)))
    lists = {block.name.rpartition(".")[0] for block in result}
    if len(lists) != 1:
        shown = ", ".join(map(repr, sorted(lists))) or "none"
        raise TrueShardValueError(
            f"tensor: with sequence, the blocks are one list of modules; here: {shown}. Leave out sequence"
        )
    if replicated := next(
        (parameter for parameter in plan.replicated if any(block.holds_parts(parameter.name) for block in result)), None
    ):
        raise TrueShardValueError(
            f"tensor: {replicated.name!r} is whole on every rank ({replicated.why}), which does not go with sequence"
        )
    return result


def _shares_all(name: str, child: nn.Module, styles: Mapping[str, str]) -> bool:
    """True if styles share every matrix of a module, so that its outputs are parts of a sum."""
    adapted = [f"{name}.{below}" for below, module in child.named_modules() if hasattr(module, "lora_A")]
    for below, module in child.named_modules():
        full = f"{name}.{below}"
        if full in styles and not STYLES[styles[full]].defers:
            return False
        inside = any(full.startswith(f"{layer}.") for layer in adapted)
        for attribute, parameter in module.named_parameters(recurse=False):
            style = STYLES[styles.get(f"{full}.{attribute}") or styles.get(full, REPLICATE)]
            if parameter.ndim > 1 and not inside and style.dim is None and not style.sums:
                return False
    return True


def split_children(modules: Mapping[str, nn.Module], parts: Parts, group: dist.ProcessGroup) -> None:
    """Let the larger modules of blocks take and return parts of sequences, in place."""
    for block in parts.blocks:
        for name in (*block.scattered, *block.whole):
            sums = name in block.scattered
            enter = functools.partial(_gathered, state=parts.state, group=group, sums=sums)
            leave = functools.partial(scatter_sum if sums else own_part, dim=_DIM, group=group)
            _around(modules[name], parts.state, enter, leave)


def split_ends(modules: Mapping[str, nn.Module], parts: Parts, group: dist.ProcessGroup) -> None:
    """Split sequences before the first block and gather them behind the last or the norm, in place.

    Around what recomputes a block, which then keeps a part.
    """
    state, ends = parts.state, [block.name for block in parts.blocks]
    last = parts.norm or ends[-1]
    for name in ends:
        _around(
            modules[name],
            state,
            functools.partial(_begun, state=state, group=group, first=name == ends[0]),
            functools.partial(_ended, state=state, group=group, last=name == last),
        )
    if parts.norm is not None:
        _around(
            modules[last],
            state,
            functools.partial(_begun_anew, state=state, group=group),
            functools.partial(_ended, state=state, group=group),
        )
    holder = ends[0].rpartition(".")[0].rpartition(".")[0]
    while holder and holder in modules and not has_forward(modules[holder]):  # a ModuleDict around the list
        holder = holder.rpartition(".")[0]
    if holder in modules and has_forward(modules[holder]):  # not where one block is tried
        _follow_passes(modules[holder], state, parts.norm)


def _begun(x: torch.Tensor, state: Pass, group: dist.ProcessGroup, first: bool = True) -> torch.Tensor:
    """Enter a block, or the norm where it is given whole sequences."""
    if not (first or state.asked):
        return x
    state.total, state.in_parts = x.shape[_DIM], True
    return own_part(x, _DIM, group)


def _begun_anew(x: torch.Tensor, state: Pass, group: dist.ProcessGroup) -> torch.Tensor:
    """Enter the norm, which a model may also call with whole sequences."""
    return x if state.in_parts else _begun(x, state, group)


def _ended(x: torch.Tensor, state: Pass, group: dist.ProcessGroup, last: bool = True) -> torch.Tensor:
    """Leave a block or the norm."""
    if not (last or state.asked):
        return x
    state.in_parts = False
    return gather(x, _DIM, state.total, group)


def _gathered(x: torch.Tensor, state: Pass, group: dist.ProcessGroup, sums: bool) -> torch.Tensor:
    return gather(x, _DIM, state.total, group, sums=sums)


def _forward_of(module: nn.Module) -> Callable[..., Any]:
    """Return what calls the forward that a module has now, to be put into another.

    FSDP2 changes the class later, and transformers recomputes in the forward of the class that a layer has then.
    """
    forward: Callable[..., Any] | None = module.__dict__.get("forward")
    return forward if forward is not None else lambda *args, **kwargs: type(module).forward(module, *args, **kwargs)


def _around(module: nn.Module, state: Pass, enter: Callable[..., Any], leave: Callable[..., Any]) -> None:
    """Change the hidden states that a module is given, and those that it returns."""
    inner = _forward_of(module)

    @functools.wraps(module.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not state.holds_parts():
            return inner(*args, **kwargs)
        if args:
            args = (enter(args[0]), *args[1:])
        else:
            name = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
            kwargs[name] = enter(kwargs[name])
        output = inner(*args, **kwargs)
        return (leave(output[0]), *output[1:]) if isinstance(output, tuple) else leave(output)

    module.__dict__["forward"] = forward


def _follow_passes(holder: nn.Module, state: Pass, norm: str | None) -> None:
    """Note whether the module that holds the blocks is asked for what lies between them."""
    inner = _forward_of(holder)
    parameters = list(inspect.signature(holder.forward).parameters)

    @functools.wraps(holder.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        argument = (dict(zip(parameters, args, strict=False)) | kwargs).get(ASKED)
        asked = getattr(getattr(holder, "config", None), ASKED, False) if argument is None else argument
        before = state.split, state.in_parts, state.asked
        state.split, state.in_parts, state.asked = torch.is_grad_enabled(), False, bool(asked)
        try:
            output = inner(*args, **kwargs)
            # A forward that goes another way than it was tried: its output would be a part, in silence.
            if state.in_parts:
                raise TrueShardRuntimeError(
                    f"tensor: {type(holder).__name__} did not call {norm!r} behind its blocks in this pass, as it did "
                    "when it was tried, and returns a part of the sequence: leave out sequence"
                )
            if not torch.compiler.is_compiling():  # a compiler traces the recomputation along with the forward
                state.follow_backward(output)
            return output
        finally:
            state.split, state.in_parts, state.asked = before

    holder.__dict__["forward"] = forward
