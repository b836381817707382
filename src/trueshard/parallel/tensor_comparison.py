"""Compute one module whole, and as ranks of the tensor axis would, and compare: outputs and gradients.

Both are copies with the same random weights. Those of ranks are cut by the code of ``tensor`` itself, and computed by
threads, so that a comparison needs no communication and leaves nobody waiting. Gradients of large matrices are left
out: they follow from the gradients on both sides.
All begin with one state of generators: what they draw for whole tensors is the same, and draws for parts are seen.
"""

from __future__ import annotations

import copy
import itertools
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trueshard import _torch
from trueshard.distributed import made_on_cpu
from trueshard.errors import one_line
from trueshard.model import names
from trueshard.model.names import Held
from trueshard.model.regions import placed_region, take
from trueshard.parallel.collectives import LastInput
from trueshard.parallel.module_copies import LARGE, copy_on_cpu, random_values, replaced_forward
from trueshard.parallel.random_streams import random_states, set_random_states
from trueshard.parallel.sequence import Parts, split_ends
from trueshard.parallel.tensor import Sums, add_sums, placement_of, share_modules
from trueshard.parallel.tp_styles import REPLICATE

SUMMED = "replicated_with_grad_allreduce"
"""Style of a whole parameter whose gradients on ranks are parts of a sum."""
_RELATIVE, _ABSOLUTE = 1e-3, 1e-5
"""Allowed difference, over the largest element of a tensor, and over that of all gradients: on random weights what is
wrong is so by far more, and modules may compute in float32 by themselves."""
_MOST = 1 << 31
"""Elements of a module that a comparison takes at most."""

Results = dict[tuple[str, str], torch.Tensor | None]
"""("output" | "input" | "parameter" | "module", number or name) → what was returned, or a gradient; ("draws", name of a
module) → a hash of the generator's state when it returned."""


class NotTried(Exception):
    """Raised where a trial says nothing; its text is the reason."""


@dataclass(frozen=True)
class Comparison:
    """One module of a model under the styles of a plan."""

    name: str
    module: nn.Module
    """The module, or a copy without memory."""
    root: nn.Module
    styles: Mapping[str, str]
    """Name of a module or parameter of the model → style."""
    ranks: int
    parts: Parts | None
    """Present for a block that holds parts of sequences."""

    @made_on_cpu()
    def run(self, args: Any, kwargs: Any) -> dict[str, str]:
        """Compare on these inputs; return the styles that whole parameters lack, by name.

        Raises:
            NotTried: the module does not run on these inputs.
            ValueError: ranks compute something else; names module, styles or parameter, and the remedy.
        """
        elements = sum(parameter.numel() for parameter in self.module.parameters())
        if elements > _MOST:
            raise NotTried(f"it has {elements:,} parameters, and a trial takes {_MOST:,}")
        if (name := replaced_forward(self.module)) is not None:
            raise NotTried(f"the forward of {self._full(name)!r} was replaced")
        dtypes = (torch.float64, torch.float32) if elements < LARGE << 6 else (torch.float32,)
        before = random_states(None)
        try:  # in training, where it may draw; else as it is evaluated
            for training, dtype in itertools.product((True, False), dtypes):
                try:
                    return self._run(_cast([args, kwargs], dtype), dtype, training)
                except NotTried as error:
                    why = str(error)
        finally:
            set_random_states(before)
        raise NotTried(why)

    def _run(self, inputs: Any, dtype: torch.dtype, training: bool) -> dict[str, str]:
        noise = torch.Generator().manual_seed(0)
        values = {id(p): random_values(p.detach(), noise, dtype) for p in self.module.parameters()}
        why, states = "", random_states(None)

        def run_pass(copied: nn.Module) -> Results:
            set_random_states(states)
            copied.train(training)
            return self._pass(copied, inputs)

        try:
            whole = run_pass(self._copy(values, dtype))
            draws = random_states(None) != states
        except Exception as error:  # whatever a forward raises that was given something unexpected
            why = f"{type(error).__name__}: {one_line(error, 120)}"
        if why:
            raise NotTried(why)
        outputs = [value for (kind, _), value in whole.items() if kind == "output" and value is not None]
        if not outputs or not all(bool(output.isfinite().all()) for output in outputs):
            raise NotTried("it returns no finite numbers")

        def run_rank(rank: int, group: Any) -> Results:
            return run_pass(self._cut(values, dtype, rank, group))

        try:
            parts = _torch.run_as_ranks(self.ranks, run_rank, lambda: random_states(None), set_random_states)
            added, fault = self._compare(whole, parts)
        except Exception as error:
            added, fault = {}, f"fails ({type(error).__name__}: {one_line(error, 160)})"
        if fault:
            again = run_pass(self._copy(values, dtype))
            if any(_off(value, again[key]) for key, value in whole.items()):
                raise NotTried("it returns something else each time")
            hint = "; it draws random numbers: for a rank's part set dropout and noise to 0" if draws else ""
            raise ValueError(self._message(f"{fault}{hint}"))
        return added

    # Copies

    def _copy(self, values: Mapping[int, torch.Tensor], dtype: torch.dtype) -> nn.Module:
        def parameter(original: torch.Tensor) -> nn.Parameter:
            value = values[id(original)]
            return nn.Parameter(value, requires_grad=value.is_floating_point() and original.numel() < LARGE)

        return copy_on_cpu(self.module, parameter, dtype)

    def _cut(self, values: Mapping[int, torch.Tensor], dtype: torch.dtype, rank: int, group: Any) -> nn.Module:
        """Return a rank's copy, as ``tensor.cut`` makes the model."""
        own = {id(held.tensor): self._part(held, values[id(held.tensor)], rank) for held in self._held(self.module)}
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

    def _part(self, held: Held, value: torch.Tensor, rank: int) -> torch.Tensor:
        """Return a rank's part of a parameter, or of its gradient."""
        placement = placement_of(held, 0, self.styles)
        return take(value, placed_region(tuple(held.tensor.shape), (placement,), (self.ranks,), (rank,)))

    def _held(self, module: nn.Module) -> list[Held]:
        """Return the parameters of the module, or a copy, by their names in the model."""
        every = names.held_tensors(module, "parameters")
        return [Held(held.tensor, [self._full(path) for path in held.names], held.places) for held in every]

    def _full(self, path: str) -> str:
        return ".".join(part for part in (self.name, path) if part)

    # Results

    def _pass(self, copied: nn.Module, inputs: Any) -> Results:
        """Return what a forward and a backward give."""
        results: Results = {}
        noise, given, handles = torch.Generator().manual_seed(2), list[torch.Tensor](), list[Any]()
        for path, module in names.named_modules(copied):

            def note(_: nn.Module, args: Any, output: Any, path: str = path) -> None:
                results["module", path] = next((tensor.detach() for tensor in _floats_in(output)), None)
                results["draws", path] = torch.tensor(zlib.crc32(torch.get_rng_state().numpy().tobytes()))

            handles.append(module.register_forward_hook(note))
        args, kwargs = _leaves(inputs, given)
        try:
            with torch.enable_grad():
                outputs = _floats_in(copied(*args, **kwargs))
                ends = [output for output in outputs if output.requires_grad]
                if ends:
                    grads = [torch.randn(end.shape, generator=noise).to(end.dtype) for end in ends]
                    torch.autograd.backward(ends, grads)
            results |= {("output", str(i)): output.detach() for i, output in enumerate(outputs)}
            results |= {("input", str(i)): leaf.grad for i, leaf in enumerate(given)}
            trained = (held for held in self._held(copied) if held.tensor.requires_grad)
            return results | {("parameter", held.name): held.tensor.grad for held in trained}
        finally:  # modules that compute with parts are cycles, which would keep memory till a collection
            for handle in handles:
                handle.remove()
            for module in copied.modules():
                _torch.own_parameters(module).clear()
                _torch.own_buffers(module).clear()

    def _compare(self, whole: Results, parts: list[Results]) -> tuple[dict[str, str], str]:
        """Return the styles that whole parameters lack, and what else is wrong, in words."""
        held_by_name = {held.name: held for held in self._held(self.module)}
        sizes = [_size(value) for (kind, _), value in whole.items() if kind in ("input", "parameter")]
        floor, added = _ABSOLUTE * max(sizes, default=0.0), dict[str, str]()
        for (kind, name), value in whole.items():
            if kind == "draws" and any(part.get((kind, name), value) != value for part in parts):
                return {}, f"ranks draw other numbers of random values, as is seen when {self._full(name)!r} returns"
        for (kind, name), value in whole.items():
            if kind in ("module", "draws"):
                continue
            held = held_by_name[name] if kind == "parameter" else None
            computed = [part.get((kind, name)) for part in parts]
            cut = [value if held is None or value is None else self._part(held, value, r) for r in range(self.ranks)]
            least = 0.0 if kind == "output" else floor
            off = next(filter(None, (_off(one, two, least) for one, two in zip(cut, computed, strict=True))), "")
            if off and held is not None and value is not None:
                style = self.styles.get(name) or self.styles.get(name.rpartition(".")[0], REPLICATE)
                same = [one for one in computed if one is not None and one.shape == value.shape]
                if style != SUMMED and same and not _off(value, torch.stack(same).sum(0), floor):
                    added |= dict.fromkeys(held.names, SUMMED)
                    continue
                return {}, f"the gradient of {name!r} (style {style}) is off {off}"
            if off:
                what = "output" if kind == "output" else "gradient of the input"
                return {}, f"the {what} is off {off}{self._where(whole, parts)}"
        return added, ""

    def _where(self, whole: Results, parts: list[Results]) -> str:
        """Return the first module that returns other values of the same shape, inner ones first, in words."""
        for (kind, path), value in whole.items():
            computed = parts[0].get((kind, path))
            same = kind == "module" and value is not None and computed is not None and value.shape == computed.shape
            if same and self.parts is None and _off(value, computed):
                return f", first in what {self._full(path)!r} returns"
        return ""

    def _message(self, what: str) -> str:
        start = f"{self.name}." if self.name else ""
        inside = [f"{name!r} {word}" for name, word in self.styles.items() if f"{name}.".startswith(start)]
        kind = type(names.unwrap(self.module)).__name__
        return (
            f"tensor={self.ranks}: {f'{self.name!r} ({kind})' if self.name else kind}, computed by ranks with parts of "
            f"its matrices, is not what one process computes: {what}. Styles: {', '.join(inside[:8])}"
            f"{', …' * (len(inside) > 8)}. Heads, fused matrices or what lies between do not divide so: join parts in "
            "between (colwise_gather_output, rowwise_split_input), leave the module out of the styles, or choose "
            'another number of ranks. "trial": false in tensor turns this check off'
        )


def _off(expected: torch.Tensor | None, actual: torch.Tensor | None, least: float = 0.0) -> str:
    """Return how far ``actual`` is off, in words; "" if it is not. None is zeros."""
    if expected is None or actual is None:
        return "" if max(_size(expected), _size(actual)) <= least else "where one of them has none"
    if expected.shape != actual.shape:
        return f"in shape: {tuple(actual.shape)} for {tuple(expected.shape)}"
    size, far = _size(expected), _size(expected - actual)
    return "" if far <= _RELATIVE * size + least else f"by {far / max(size, 1e-30):.2g} of its size"


def _size(value: torch.Tensor | None) -> float:
    return float(value.abs().max()) if value is not None and value.numel() else 0.0


def _floats_in(output: Any) -> list[torch.Tensor]:
    output = dict(output) if isinstance(output, Mapping) else output  # of transformers, unknown to torch's trees
    return [tensor for tensor in _torch.tensors_in(output) if tensor.is_floating_point()]


# Inputs


def _mapped(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return nested arguments with ``function`` of each tensor, and copies of what else a forward may write to."""
    return _torch.mapped(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf), value)


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
