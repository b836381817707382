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
import functools
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
from trueshard.parallel.forward_trial import BlockStandIn, run_holder
from trueshard.parallel.module_copies import copy_without_memory, kind_of, random_copy
from trueshard.parallel.sequence import Parts, parts_of
from trueshard.parallel.tensor import arrived_on, by_name
from trueshard.parallel.tensor_comparison import SUMMED, Comparison, NotTried
from trueshard.parallel.tp_styles import REPLICATE, STYLES
from trueshard.plans import Plan

LENGTH = 11
"""Tokens of the sequence on which a module is tried."""

Untried = dict[str, list[Comparison]]
"""Name of a module → how it may be tried in the first pass; the first way that runs is taken."""

_log = logging.getLogger("trueshard")


def try_plan(index: Index, plan: Plan, mesh: DeviceMesh) -> tuple[Plan, Untried]:
    """Return the plan with what trials found, and what is left for the first pass.

    Rank 0 computes, and tells the others. Collective; the model is not touched.

    Raises:
        ValueError: a module computes something else on parts; names it, its styles and the remedy.
    """
    if plan.tensor == 1 or not plan.trial or distributed.is_simulated(mesh):
        return plan, {}
    if arrived_on(index) is not None:
        return dataclasses.replace(plan, tried=(*plan.tried, "no matrices, since the model arrived cut")), {}
    trial, error = _Trial(index, plan), ""
    if all(mesh.get_local_rank(dim) == 0 for dim in range(mesh.ndim)):
        try:
            trial.run()
        except ValueError as raised:
            error = str(raised)
    outcome = error, trial.tried, trial.added, trial.untried, trial.kinds
    error, tried, added, untried, trial.kinds = distributed.gather_objects(outcome, mesh)[0]
    if error:
        raise ValueError(error)
    plan = dataclasses.replace(plan, styles={**plan.styles, **added}, tried=(*plan.tried, *tried))
    return plan, {name: [trial.comparison(name, way) for way in ways] for name, ways in untried.items()}


class _Trial:
    """Trials of one model under one plan."""

    def __init__(self, index: Index, plan: Plan) -> None:
        self.index, self.plan = index, plan
        self.styles = by_name(index, plan, plan.styles)
        self.shared = [name for name, word in self.styles.items() if STYLES[word] is not STYLES[REPLICATE]]
        """Modules and parameters that ranks do not just have whole."""
        self.parts = parts_of(index.modules, plan, self.styles) if plan.sequence else None
        self.noise = torch.Generator().manual_seed(0)
        self.tried: list[str] = []
        """Sentences, for the plan."""
        self.added: dict[str, str] = {}
        """Styles that whole parameters lack, by name."""
        self.untried: dict[str, tuple[str, ...]] = {}
        """Modules for the first pass, by name → how blocks in them may be left out."""
        kinds: dict[Any, list[str]] = {}
        for name in (unit.name for unit in plan.units if unit.kind == "block" and unit.name not in self.styles):
            inside = {other[len(name) :]: self.styles[other] for other in self.shared if other.startswith(f"{name}.")}
            if inside:
                kind = kind_of(names.unwrap(index.modules[name])), frozenset(inside.items())
                kinds.setdefault(kind, []).append(name)
        self.kinds = list(kinds.values())
        """Blocks that ranks share, those alike together."""

    def run(self) -> None:
        with _torch.real_tensors():
            errors = [self._try_guesses(alike[0], ("",), alike) for alike in self._try_by_holders()]
            blocks = tuple(f"{name}." for alike in self.kinds for name in alike)
            ways = ("tensor", "tuple") if blocks else ("",)
            outside = any(errors) or any(not f"{name}.".startswith(blocks) for name in self.shared)
            if outside and (error := self._try_guesses("", ways, [""])):
                raise error

    def _try_by_holders(self) -> list[list[str]]:
        """Try blocks with what their holders give them; return those of which none was tried so."""
        left, errors = list(self.kinds), list[ValueError]()

        def visit(block: nn.Module, hidden: torch.Tensor, args: Any, kwargs: Any) -> None:
            for alike in left if not errors else ():
                name = next((n for n in alike if self.index.modules[n] is names.unwrap(block)), None)
                if name is None:
                    continue
                try:
                    self._try(name, "", alike, (torch.randn(hidden.shape, generator=self.noise), *args), kwargs)
                except NotTried:
                    return
                except ValueError as error:  # the holder's forward is not to catch it
                    errors.append(error)
                left.remove(alike)
                return

        copied = functools.partial(random_copy, noise=self.noise)
        for list_name in dict.fromkeys(name.rpartition(".")[0] for alike in left for name in alike):
            above, _, attribute = list_name.rpartition(".")
            if isinstance(self.index.modules.get(list_name), nn.ModuleList):
                try:
                    with torch.no_grad():
                        run_holder(self.index.modules[above], attribute, LENGTH, visit=visit, replace=copied)
                except RuntimeError:
                    pass  # blocks are tried on a guess
            if errors:
                raise errors[0]
        return left

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
                    self.kinds = [other for other in self.kinds if other is not alike]
                    return error
        self.untried[name] = ways
        self.tried.append(f"{self._shown(name, alike)}: in the first pass, since it does not run before ({why})")
        return None

    def _guesses(self, module: nn.Module) -> Iterator[torch.Tensor]:
        """Yield what a module may take as its one input: ids, and features as wide as its layers take them."""
        parameters = inspect.signature(module.forward).parameters.values()
        if sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters) > 1:
            return
        every = [inner for _, inner in names.named_modules(module)]
        if rows := [inner.num_embeddings for inner in every if isinstance(inner, nn.Embedding)]:
            yield torch.randint(0, min(rows), (2, LENGTH), generator=self.noise)
        for width in dict.fromkeys(getattr(inner, "in_features", None) for inner in every):
            if isinstance(width, int):
                yield torch.randn(2, LENGTH, width, generator=self.noise)
                yield torch.randn(2, width, generator=self.noise)

    def _try(self, name: str, way: str, alike: list[str], args: Any, kwargs: Any) -> None:
        """Try one module for all that are alike; raise NotTried, or ValueError for what differs."""
        added = self.comparison(name, way).run(args, kwargs)
        self.added |= {other + full[len(name) :]: word for full, word in added.items() for other in alike}
        styles = f"; summed over ranks: {', '.join(added)}" if added else ""
        self.tried.append(f"{self._shown(name, alike)}: the same as one process{styles}")

    def _shown(self, name: str, alike: list[str]) -> str:
        more = f", as {len(alike) - 1} more" if len(alike) > 1 else ""
        return f"{type(self.index.modules[name]).__name__} {name or '(root)'}{more}"

    def comparison(self, name: str, way: str) -> Comparison:
        """Return the comparison of a module, without its weights; ``way``: what blocks in it return if left out."""
        blocks = [self.index.modules[block] for alike in self.kinds for block in alike if way]
        left_out = {id(block): _LeftOut(block, _returns_tuple=way == "tuple") for block in blocks}
        template = copy_without_memory(self.index.modules[name], left_out)
        parts = None
        if self.parts is not None and name:
            parts = Parts(tuple(block for block in self.parts.blocks if block.name == name), None)
            parts.state.split = True  # as in a pass with gradients, also for a block that runs without
        return Comparison(name, template, self.index.root, self.styles, self.plan.tensor, parts)


class _LeftOut(BlockStandIn):
    """Stands for a block, whose attributes it has: scales what it is given."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        return (hidden * 1.25,) if self.__dict__["_returns_tuple"] else hidden * 1.25


def try_in_first_pass(modules: Mapping[str, nn.Module], untried: Untried) -> None:
    """Try each module once, before it first computes with gradients, on what that is given."""
    for name, ways in untried.items():
        _before_first_pass(modules[name], ways)


def _before_first_pass(module: nn.Module, ways: list[Comparison]) -> None:
    @torch.compiler.disable
    def compare(_: nn.Module, args: Any, kwargs: Any) -> None:
        if not ways or not torch.is_grad_enabled():
            return
        handle.remove()
        left = list(ways)
        ways.clear()  # a copy of the module may have this hook, too
        for way in left:
            try:
                added = way.run(args, kwargs)
            except NotTried as reason:
                why = reason
                continue
            if added:
                shown = ", ".join(map(repr, added))
                raise ValueError(f"tensor: gradients of {shown} are parts of a sum: give the style {SUMMED!r}")
            return
        shown = left[0].name or type(left[0].module).__name__
        _log.warning("tensor: whether ranks compute %s as one process does could not be tried: %s", shown, why)

    handle = module.register_forward_pre_hook(compare, with_kwargs=True)
