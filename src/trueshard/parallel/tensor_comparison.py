"""Compute one module whole, and as ranks of the tensor axis would, and compare: outputs and gradients.

Both are copies with the same random weights. Those of ranks are cut by the code of ``tensor`` itself, and computed by
threads, so that a comparison needs no communication and leaves nobody waiting. Gradients of large matrices are left
out: they follow from the gradients on both sides.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from trueshard import _torch
from trueshard.errors import one_line
from trueshard.model import names
from trueshard.model.names import Held
from trueshard.model.regions import placed_region, take
from trueshard.parallel.adapters import is_adapter, kind_of_adapter
from trueshard.parallel.collectives import LastInput
from trueshard.parallel.module_copies import LARGE, copy_tree, random_values, real_values
from trueshard.parallel.sequence import Parts, split_ends
from trueshard.parallel.tensor import Sums, add_sums, placement_of, share_modules
from trueshard.parallel.tp_styles import REPLICATE, STYLES

SUMMED = "replicated_with_grad_allreduce"
"""Style of a whole parameter whose gradients on ranks are parts of a sum."""
_RELATIVE, _ABSOLUTE = 1e-3, 1e-5
"""Allowed difference, over the largest element of a tensor, and over that of all gradients: on random weights what is
wrong is so by far more, and modules may compute in float32 by themselves."""
_MOST = 1 << 31
"""Elements of a module that a comparison takes at most."""
_KERNELS = {"_experts_implementation": ("eager",), "_attn_implementation": ("sdpa", "eager")}
"""Settings of transformers → kernels that compute on the CPU, in float64."""


class NotTried(Exception):
    """Raised where a trial says nothing; its text is the reason."""


@dataclass
class _Pass:
    """Record of a forward and a backward."""

    outputs: list[torch.Tensor] = field(default_factory=list)
    inputs: list[torch.Tensor | None] = field(default_factory=list)
    """Gradients of inputs."""
    grads: dict[str, torch.Tensor | None] = field(default_factory=dict)
    """Gradients of parameters, by name."""
    seen: list[tuple[str, list[torch.Tensor]]] = field(default_factory=list)
    """What each module returned, inner ones first."""


@dataclass(frozen=True)
class Comparison:
    """One module of a model under the styles of a plan."""

    name: str
    module: nn.Module
    """It, or a copy without memory."""
    root: nn.Module
    styles: Mapping[str, str]
    """Name of a module or parameter of the model → style."""
    ranks: int
    parts: Parts | None
    """The module's, if it is a block that holds parts of sequences."""

    def run(self, args: Any, kwargs: Any) -> dict[str, str]:
        """Compare on these inputs; return the styles that whole parameters lack, by name.

        Raises:
            NotTried: the module does not run on these inputs.
            ValueError: ranks compute something else; names module, styles or parameter, and the remedy.
        """
        elements = sum(parameter.numel() for parameter in self.module.parameters())
        if elements > _MOST:
            raise NotTried(f"it has {elements:,} parameters, and a trial takes {_MOST:,}")
        with torch.random.fork_rng(devices=[]):
            for dtype in (torch.float64, torch.float32) if elements < LARGE << 6 else (torch.float32,):
                try:
                    return self._run(_cast([args, kwargs], dtype), dtype)
                except NotTried as error:
                    reason = error
        raise reason

    def _run(self, inputs: Any, dtype: torch.dtype) -> dict[str, str]:
        noise = torch.Generator().manual_seed(0)
        values = {id(p): random_values(p.detach(), noise, dtype) for p in self.module.parameters()}
        try:
            whole = self._pass(self._copy(values, dtype), inputs)
        except Exception as error:  # whatever a forward raises that was given something unexpected
            raise NotTried(f"{type(error).__name__}: {one_line(error, 120)}") from None
        if not whole.outputs or not all(bool(output.isfinite().all()) for output in whole.outputs):
            raise NotTried("it returns no finite numbers")
        try:
            parts = _torch.run_as_ranks(
                self.ranks, lambda rank, group: self._pass(self._cut(values, dtype, rank, group), inputs)
            )
            return self._compare(whole, parts)
        except Exception as error:
            again = self._pass(self._copy(values, dtype), inputs)
            if not all(map(torch.equal, whole.outputs, again.outputs)):
                raise NotTried("it draws random numbers") from None
            if isinstance(error, ValueError) and error.args[:1] == (self,):
                raise ValueError(error.args[1]) from None
            raise ValueError(self._message(f"fails ({type(error).__name__}: {one_line(error, 160)})")) from error

    def _copy(self, values: Mapping[int, torch.Tensor], dtype: torch.dtype) -> nn.Module:
        noise = torch.Generator().manual_seed(1)
        configs: dict[int, Any] = {}
        for _, module in names.named_modules(self.module):
            config = module.__dict__.get("config")
            for key, kernels in _KERNELS.items():
                if getattr(config, key, kernels[0]) not in kernels:
                    configs.setdefault(id(config), copy.copy(config)).__dict__[key] = kernels[0]

        def buffer(value: torch.Tensor) -> torch.Tensor:
            result = real_values(value.detach(), noise)
            return result.to(dtype) if result.is_floating_point() else result.clone()

        return copy_tree(self.module, lambda p: _parameter(values[id(p)], p), buffer, replaced=configs)

    def _cut(self, values: Mapping[int, torch.Tensor], dtype: torch.dtype, rank: int, group: Any) -> nn.Module:
        """Return a rank's copy, as ``tensor.cut`` makes the model."""
        own = {}
        for held in self._held(self.module):
            placement = placement_of(held, 0, self.styles)
            region = placed_region(tuple(held.tensor.shape), (placement,), (self.ranks,), (rank,))
            own[id(held.tensor)] = take(values[id(held.tensor)], region)
        copied = self._copy(own, dtype)
        modules = {self._full(path): module for path, module in names.named_modules(copied)}
        sums: Sums = {}
        for held in self._held(copied):
            add_sums(sums, held, self.styles, self.parts)
        share_modules(self.root, modules, self.styles, self.parts, sums, group, LastInput())
        if self.parts is not None:
            holder = self.name.rpartition(".")[0].rpartition(".")[0]
            split_ends({**modules, holder: nn.Module()}, self.parts, group)
        return copied

    def _held(self, module: nn.Module) -> list[Held]:
        """Return the parameters of the module, or a copy, by their names in the model."""
        every = names.held_tensors(module, "parameters")
        return [Held(held.tensor, [self._full(path) for path in held.names], held.places) for held in every]

    def _full(self, path: str) -> str:
        return ".".join(part for part in (self.name, path) if part)

    def _pass(self, copied: nn.Module, inputs: Any) -> _Pass:
        result, noise = _Pass(), torch.Generator().manual_seed(2)
        for path, module in names.named_modules(copied):

            def note(_: nn.Module, args: Any, output: Any, path: str = path) -> None:
                result.seen.append((path, [tensor.detach() for tensor in floats_in(output)]))

            module.register_forward_hook(note)
        given: list[torch.Tensor] = []
        args, kwargs = _leaves(inputs, given)
        with torch.enable_grad():
            result.outputs = floats_in(copied(*args, **kwargs))
            ends = [output for output in result.outputs if output.requires_grad]
            grads = [torch.randn(end.shape, generator=noise).to(end.dtype) for end in ends]
            if ends:
                torch.autograd.backward(ends, grads)
        result.outputs = [output.detach() for output in result.outputs]
        result.inputs = [leaf.grad for leaf in given]
        result.grads = {held.name: held.tensor.grad for held in self._held(copied) if held.tensor.requires_grad}
        return result

    def _compare(self, whole: _Pass, parts: Sequence[_Pass]) -> dict[str, str]:
        every = [grad for grad in (*whole.inputs, *whole.grads.values()) if grad is not None]
        floor = _ABSOLUTE * max((float(grad.abs().max()) for grad in every if grad.numel()), default=0.0)
        for part in parts:
            for what, expected, found, least in (
                ("its output", whole.outputs, part.outputs, 0.0),
                ("the gradient of its input", whole.inputs, part.inputs, floor),
            ):
                for one, two in zip(expected, found, strict=True):
                    if off := _off(one, two, least):
                        self._refuse(f"{what} is off {off}", whole, parts)
        added: dict[str, str] = {}
        for held in self._held(self.module):
            expected_grad = whole.grads.get(held.name)
            placement, word = placement_of(held, 0, self.styles), self._style(held.name)
            grads = [part.grads.get(held.name) for part in parts]
            if expected_grad is None and all(grad is None for grad in grads):
                continue
            regions = (
                placed_region(tuple(held.tensor.shape), (placement,), (self.ranks,), (rank,))
                for rank in range(self.ranks)
            )
            expected_grad = torch.zeros(held.tensor.shape) if expected_grad is None else expected_grad
            pairs = [(take(expected_grad, region), grad) for region, grad in zip(regions, grads, strict=True)]
            if off := next(filter(None, (_off(one, two, floor) for one, two in pairs)), ""):
                total = [torch.zeros_like(expected_grad) if grad is None else grad for grad in grads]
                is_sum = placement.is_replicate() and not _off(expected_grad, torch.stack(total).sum(0), floor)
                if not is_sum or STYLES[word].sums:
                    self._refuse(f"the gradient of {held.name!r} (style {word}) is off {off}", whole, parts)
                added |= dict.fromkeys(held.names, SUMMED)
        return added

    def _style(self, parameter: str) -> str:
        return self.styles.get(parameter) or self.styles.get(parameter.rpartition(".")[0], REPLICATE)

    def _refuse(self, what: str, whole: _Pass, parts: Sequence[_Pass]) -> None:
        raise ValueError(self, self._message(what, _first_apart(whole, parts)))

    def _message(self, what: str, path: str | None = None) -> str:
        """Return what is wrong, where it was first seen, and what to do."""
        modules = dict(names.named_modules(self.module))
        places = [] if path is None else [".".join(path.split(".")[:end]) for end in range(path.count(".") + 2)]
        adapter = next((place for place in places if is_adapter(modules.get(place))), None)
        start = f"{self.name}." if self.name else ""
        inside = [name for name in self.styles if f"{name}.".startswith(start)]
        shown = ", ".join(f"{name!r} {self.styles[name]}" for name in inside[:8]) + ", …" * (len(inside) > 8)
        kind = type(names.unwrap(self.module)).__name__
        subject = f"{self.name!r} ({kind})" if self.name else kind
        where = f", first seen at {self._full(path)!r}" if path else ""
        if adapter is not None:
            where = f", first seen at {kind_of_adapter(modules[adapter])} of {self._full(adapter)!r}"
        return (
            f"tensor={self.ranks}: {subject}, computed by ranks with parts of its matrices, is not what one process "
            f"computes: {what}{where}. Its styles: {shown}. Heads, fused matrices or what lies between do not divide "
            "so: give them other styles (colwise_gather_output and rowwise_split_input join parts in between), or "
            'choose another number of ranks, or leave out tensor; "trial": false among its options turns this check off'
        )


def _first_apart(whole: _Pass, parts: Sequence[_Pass]) -> str | None:
    """Return the first module whose outputs on ranks are neither the whole, nor its parts, nor parts of a sum."""
    for i, (path, tensors) in enumerate(whole.seen):
        theirs = [part.seen[i] for part in parts if i < len(part.seen)]
        if len(theirs) < len(parts) or any(other != path for other, _ in theirs):
            return None
        for j, tensor in enumerate(tensors):
            own = [every[j] for _, every in theirs if j < len(every)]
            if not _belongs(tensor, own):
                return path
    return None


def _belongs(whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> bool:
    if all(not _off(whole, part) for part in parts):
        return True
    if all(part.shape == whole.shape for part in parts) and not _off(whole, torch.stack(list(parts)).sum(0)):
        return True
    for dim in range(whole.ndim):
        shapes = {tuple(part.shape[:dim]) + tuple(part.shape[dim + 1 :]) for part in parts}
        if shapes == {tuple(whole.shape[:dim]) + tuple(whole.shape[dim + 1 :])}:
            joined = torch.cat(list(parts), dim)
            if joined.shape == whole.shape and not _off(whole, joined):
                return True
    return False


def _off(expected: torch.Tensor | None, found: torch.Tensor | None, least: float = 0.0) -> str:
    """Return how far ``found`` is off, in words; "" if it is not. None is zeros."""
    if expected is None or found is None:
        both = expected if found is None else found
        return "" if both is None or float(both.abs().max()) <= least else "where one process has none"
    if expected.shape != found.shape:
        return f"in shape: {tuple(found.shape)} for {tuple(expected.shape)}"
    if not expected.numel():
        return ""
    size, far = float(expected.abs().max()), float((expected - found).abs().max())
    return "" if far <= _RELATIVE * size + least else f"by {far / max(size, 1e-30):.2g} of its size"


def floats_in(output: Any) -> list[torch.Tensor]:
    """Return the tensors with floats in what a module returned."""
    output = dict(output) if isinstance(output, Mapping) else output  # of transformers, unknown to torch's trees
    return [tensor for tensor in _torch.tensors_in(output) if tensor.is_floating_point()]


def _parameter(value: torch.Tensor, original: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=value.is_floating_point() and original.numel() < LARGE)


def _mapped(value: Any, function: Any) -> Any:
    """Return nested arguments with ``function`` of each tensor, and copies of what else a forward may write to."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if type(value) in (list, tuple):
        return type(value)(_mapped(each, function) for each in value)
    if type(value) is dict:
        return {key: _mapped(each, function) for key, each in value.items()}
    return copy.deepcopy(value)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    def cast(tensor: torch.Tensor) -> torch.Tensor:
        result = tensor.detach().cpu()
        return result.to(dtype).requires_grad_(tensor.requires_grad) if result.is_floating_point() else result

    return _mapped(value, cast)


def _leaves(inputs: Any, given: list[torch.Tensor]) -> Any:
    """Return inputs whose first tensor with floats, and those that needed gradients, are new leaves, in ``given``."""

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        result = tensor.detach().clone()
        if result.is_floating_point() and (tensor.requires_grad or not given):
            given.append(result.requires_grad_())
        return result

    return _mapped(inputs, leaf)
