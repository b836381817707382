"""Ask by trial whether ranks with parts of the matrices compute what one process computes.

A style says how one module is cut. Whether what lies between is right for parts (heads that a reshape counts, a fused
matrix, a learned scale, an adapter) no list can know. So one block of each class is tried on a few tokens, and the rest
of the model with its blocks left out (``tensor_comparison``).

- A block is given what the forward of its holder gives it (``forward_trial``), else a guess. What runs on no guess is
  tried on the inputs of the first pass that has gradients.
- A whole parameter whose gradients on ranks are parts of a sum gets the style that says so.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from trueshard import _torch, distributed
from trueshard.model import names
from trueshard.model.names import Index
from trueshard.parallel.forward_trial import run_holder
from trueshard.parallel.module_copies import copy_tree, kind_of, random_values, real_values
from trueshard.parallel.sequence import Parts, parts_of
from trueshard.parallel.tensor import arrived_on, by_name
from trueshard.parallel.tensor_comparison import Comparison, NotTried
from trueshard.parallel.tp_styles import REPLICATE, STYLES
from trueshard.plans import Plan

LENGTH = 11
"""Tokens of the sequence on which a module is tried."""

_log = logging.getLogger("trueshard")

Untried = dict[str, list[Comparison]]
"""Name of a module → how it may be tried in the first pass; the first way that runs is taken."""


def try_plan(index: Index, plan: Plan, mesh: DeviceMesh) -> tuple[Plan, Untried]:
    """Return the plan with what trials found, and what is left for the first pass.

    Rank 0 computes, and tells the others. Collective; the model is not touched.

    Raises:
        ValueError: a module computes something else on parts; names it, its styles and the remedy.
    """
    if plan.tensor == 1 or not plan.trial or arrived_on(index) is not None or distributed.is_simulated(mesh):
        return plan, {}
    trial, error = _Trial(index, plan), None
    if all(mesh.get_local_rank(dim) == 0 for dim in range(mesh.ndim)):
        try:
            trial.run()
        except ValueError as raised:
            error = str(raised)
    found = (error, trial.tried, trial.added, trial.pending, list(trial.kinds.values()))
    error, tried, added, pending, kinds = distributed.gather_objects(found, mesh)[0]
    if error is not None:
        raise ValueError(error)
    styles = plan.styles or (by_name(index, plan, plan.styles) if added else {})
    plan = dataclasses.replace(plan, styles={**styles, **added}, tried=tuple(tried))
    trial.kinds = dict(enumerate(kinds))
    return plan, {name: [trial.comparison(name, way) for way in ways] for name, ways in pending.items()}


class _Trial:
    """Trials of one model under one plan."""

    def __init__(self, index: Index, plan: Plan) -> None:
        self.index, self.plan = index, plan
        self.styles = by_name(index, plan, plan.styles)
        self.parts = parts_of(index.modules, plan, self.styles) if plan.sequence else None
        self.noise = torch.Generator().manual_seed(0)
        self.tried: list[str] = []
        """Sentences, for the plan."""
        self.added: dict[str, str] = {}
        """Styles that whole parameters lack, by name."""
        self.pending: dict[str, tuple[str, ...]] = {}
        """Modules for the first pass, by name → how blocks in them may be left out."""
        self.kinds: dict[Any, list[str]] = {}
        """Kind of block → its blocks, of those that ranks share."""
        for name in (unit.name for unit in plan.units if unit.kind == "block" and unit.name not in self.styles):
            if shared := self._shared_below(name):
                kind = kind_of(names.unwrap(index.modules[name])), frozenset(shared.items())
                self.kinds.setdefault(kind, []).append(name)

    def _shared_below(self, name: str) -> dict[str, str]:
        """Return relative name → style of what ranks share in a module, and do not just have whole."""
        start = f"{name}." if name else ""
        inside = {other[len(start) :]: word for other, word in self.styles.items() if f"{other}.".startswith(start)}
        return {other: word for other, word in inside.items() if STYLES[word] is not STYLES[REPLICATE]}

    def run(self) -> None:
        with _torch.real_tensors():
            found = [self._try_guesses(blocks[0], ("",), blocks) for blocks in self._try_by_holders()]
            inside = tuple(f"{name}." for blocks in self.kinds.values() for name in blocks)
            outside = any(not f"{name}.".startswith(inside) for name in self._shared_below(""))
            ways = ("tensor", "tuple") if inside else ("",)
            if (outside or any(found)) and (error := self._try_guesses("", ways, [""])):
                raise error

    def _try_by_holders(self) -> list[list[str]]:
        """Try blocks with what their holders give them; return the blocks of each kind that was not tried so."""
        left = list(self.kinds.values())
        errors: list[ValueError] = []

        def visit(block: nn.Module, hidden: torch.Tensor, args: Any, kwargs: Any) -> None:
            here = [(b, n) for b in left for n in b if self.index.modules[n] is names.unwrap(block)]
            if not here or errors:
                return
            blocks, name = here[0]
            try:
                self._try(name, "", blocks, (torch.randn(hidden.shape, generator=self.noise), *args), kwargs)
            except NotTried:
                return
            except ValueError as error:  # the holder's forward is not to catch it
                errors.append(error)
            left.remove(blocks)

        for list_name in dict.fromkeys(name.rpartition(".")[0] for blocks in left for name in blocks):
            above, _, attribute = list_name.rpartition(".")
            if isinstance(self.index.modules.get(list_name), nn.ModuleList):
                try:
                    with torch.no_grad():
                        run_holder(self.index.modules[above], attribute, LENGTH, visit=visit, replace=self._random_copy)
                except RuntimeError:
                    pass  # blocks are tried on a guess
            if errors:
                raise errors[0]
        return left

    def _random_copy(self, module: nn.Module) -> nn.Module:
        return copy_tree(
            module,
            lambda p: nn.Parameter(random_values(p, self.noise), requires_grad=False),
            lambda b: real_values(b, self.noise),
        )

    def _try_guesses(self, name: str, ways: tuple[str, ...], alike: list[str]) -> ValueError | None:
        """Try a module on guessed inputs, or leave it for the first pass; return what differs.

        What differs in a block may be meant so: the next one goes on with parts. So it is tried with what is around it.
        """
        why = "no guess of its inputs runs"
        for way in ways:
            for guess in self._guesses(self.index.modules[name]):
                try:
                    self._try(name, way, alike, (guess,), {})
                    return None
                except NotTried as reason:
                    why = str(reason)
                except ValueError as error:
                    self.kinds = {kind: blocks for kind, blocks in self.kinds.items() if blocks is not alike}
                    return error
        self.pending[name] = ways
        self.tried.append(f"{self._shown(name, alike)}: in the first pass, since it does not run before ({why})")
        return None

    def _guesses(self, module: nn.Module) -> Iterator[torch.Tensor]:
        """Yield what a module may take as its one input: ids, and features as wide as its layers take them."""
        every = [each for _, each in names.named_modules(module)]
        required = [p for p in inspect.signature(module.forward).parameters.values() if p.default is p.empty]
        if len([p for p in required if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]) > 1:
            return
        if rows := [each.num_embeddings for each in every if isinstance(each, nn.Embedding)]:
            yield torch.randint(0, min(rows), (2, LENGTH), generator=self.noise)
        for width in dict.fromkeys(getattr(each, "in_features", None) for each in every):
            if isinstance(width, int):
                yield torch.randn(2, LENGTH, width, generator=self.noise)
                yield torch.randn(2, width, generator=self.noise)

    def _try(self, name: str, left_out: str, alike: list[str], args: Any, kwargs: Any) -> None:
        """Try one module for all that are alike; raise NotTried, or ValueError for what differs."""
        added = self.comparison(name, left_out).run(args, kwargs)
        self.added |= {other + full[len(name) :]: word for full, word in added.items() for other in alike}
        styles = f"; summed over ranks: {', '.join(added)}" if added else ""
        self.tried.append(f"{self._shown(name, alike)}: the same as one process{styles}")

    def _shown(self, name: str, alike: list[str]) -> str:
        more = f", as {len(alike) - 1} more" if len(alike) > 1 else ""
        return f"{type(self.index.modules[name]).__name__} {name or '(root)'}{more}"

    def comparison(self, name: str, left_out: str) -> Comparison:
        """Return the comparison of a module, of which nothing takes memory; ``left_out``: what blocks in it return."""
        replaced = {
            id(self.index.modules[block]): _LeftOut(self.index.modules[block], left_out == "tuple")
            for blocks in self.kinds.values()
            for block in blocks
            if left_out
        }
        template = copy_tree(
            self.index.modules[name],
            lambda p: nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=False),
            lambda b: b,
            replaced=replaced,
        )
        parts = None
        if self.parts is not None and name:
            parts = Parts(tuple(block for block in self.parts.blocks if block.name == name), None)
        return Comparison(name, template, self.index.root, self.styles, self.plan.tensor, parts)


class _LeftOut(nn.Module):
    """Stands for a block, whose attributes it has: scales what it is given."""

    def __init__(self, block: nn.Module, returns_tuple: bool) -> None:
        super().__init__()
        self.__dict__ |= {"_block": block, "_returns_tuple": returns_tuple}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_block"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        return (hidden * 1.25,) if self.__dict__["_returns_tuple"] else hidden * 1.25


def try_in_first_pass(modules: Mapping[str, nn.Module], untried: Untried) -> None:
    """Try each module once, before it first computes with gradients, on what that is given."""
    for name, comparisons in untried.items():
        _before_first_pass(modules[name], comparisons)


def _before_first_pass(module: nn.Module, comparisons: list[Comparison]) -> None:
    @torch.compiler.disable
    def compare(_: nn.Module, args: Any, kwargs: Any) -> None:
        if not comparisons or not torch.is_grad_enabled():
            return
        ways = list(comparisons)
        comparisons.clear()  # a copy of the module may have this hook, too
        handle.remove()
        for comparison in ways:
            try:
                if lacking := comparison.run(args, kwargs):
                    name, word = next(iter(lacking.items()))
                    raise ValueError(
                        f"tensor: the gradients of {name!r} on ranks are parts of a sum: give it the style {word!r}"
                    )
            except NotTried as reason:
                why = reason
            else:
                return
        shown = ways[0].name or type(ways[0].module).__name__
        _log.warning("tensor: whether ranks compute %s as one process does could not be tried: %s", shown, why)

    handle = module.register_forward_pre_hook(compare, with_kwargs=True)
