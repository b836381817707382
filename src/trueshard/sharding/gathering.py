"""An unsharded copy of a sharded model, for evaluation, generation and export.

- Values are gathered unit by unit, with one collective each, in the dtype in which the unit computes. So the peak of
  memory is the copy and one unit.
- The copy is made of the modules as they were before sharding: adapters stay in their place, ties are ties. FSDP2 casts
  what goes into a unit and what comes out; hooks of the copy do the same, so it computes the same bits.
- It is no part of the sharded model: a rank may call it alone, in any order, and training goes on as without it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from trueshard import _torch
from trueshard._torch import ShardedModule
from trueshard.distributed import device_of
from trueshard.errors import TrueShardRuntimeError, TrueShardValueError
from trueshard.model import names
from trueshard.sharding import methods
from trueshard.sharding.copying import copy_modules
from trueshard.sharding.engine import sharded
from trueshard.sharding.hooks import Runtime

Item = TypeVar("Item")
Model = TypeVar("Model", bound=nn.Module)

_OWN = frozenset(nn.Module().__dict__)
"""Attributes that every module has."""


@contextlib.contextmanager
def gathered(model: Model) -> Iterator[Model]:
    """Give an unsharded copy of a sharded model, to evaluate, to generate with, or to export. Collective.

    The copy has the values of now, in the dtype in which the model computes, whole on every rank: an ordinary module in
    evaluation mode, whose parameters require no gradient. In float32 and under mixed precision it computes what the
    sharded model computes under ``torch.no_grad()``, bit for bit, but for matrix products of inputs that are not
    contiguous, which torch folds by whether the weight requires a gradient. Adapters stay adapters. It is not compiled.
    Inside, no call of the copy is collective. At the end its memory is freed; the sharded model is not changed.

    Args:
        model: a sharded model. Every rank needs memory for all of it in its compute dtype, and for one unit more.

    Raises:
        ValueError: the model is not sharded, or has no values yet.
        RuntimeError: a module cannot be copied; the message names it.
    """
    copied = GatheredCopy(model)
    try:
        yield copied.module
    finally:
        copied.close()


class GatheredCopy:
    """The copy that ``gathered`` gives, kept: ``update`` gathers later values into the same memory.

    ``model``, what is raised, and which ranks call: as for ``gathered``.
    """

    def __init__(self, model: nn.Module) -> None:
        self._runtime: Runtime | None = sharded(model)
        runtime, root = self._runtime, self._runtime.root
        if any(parameter.is_meta for parameter in root.parameters()):
            raise TrueShardValueError(
                "the model is on the meta device and has no values to gather: load or initialise it first"
            )
        with torch.inference_mode(False):
            self.module: Any = unsharded_copy(runtime, device_of(runtime.mesh), trains=False).eval()
        """The copy; it is the same object after ``update``."""
        originals, copies = (dict(names.named_modules(model)) for model in (root, self.module))
        # Module of the sharded model → its copy; and its settings when they were last copied, to see what changed.
        self._twins = {originals[name]: twin for name, twin in copies.items()}
        self._settings = {module: copy.deepcopy(plain_values(module)) for module in self._twins}
        self.update()

    @torch.no_grad()
    def update(self) -> None:
        """Gather the present values, and take over settings that changed, as of adapters on or off. Collective.

        Raises:
            RuntimeError: the copy is closed, or the model was given modules or parameters since it was made.
        """
        runtime = self._runtime
        if runtime is None:
            _refuse_closed()
        for unit in gather_each(runtime, runtime.units):
            for (module, attribute), *_ in _torch.places_in_unit(unit):
                gathered = _torch.own_parameters(module)[attribute]
                assert gathered is not None
                self._twin_of(module, attribute).copy_(gathered)
        for whole in runtime.replicated:
            self._twin_of(*whole.places[0]).copy_(whole.gathered())
        for module, twin in self._twins.items():
            self._follow(module, twin)

    def close(self) -> None:
        """Free the memory of the copy, also while somebody holds it."""
        self._runtime, self._twins, self._settings = None, {}, {}
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            tensor.data = tensor.new_empty(0)
        self.module.register_forward_pre_hook(_refuse_closed)

    def _twin_of(self, module: nn.Module, attribute: str) -> torch.Tensor:
        twin = self._twins.get(module)
        parameter = None if twin is None else _torch.own_parameters(twin).get(attribute)
        if parameter is None:
            raise TrueShardRuntimeError(
                f"the model was given {attribute!r} of a {type(module).__name__} after its gathered copy was made: "
                "make another copy"
            )
        return parameter

    def _follow(self, module: nn.Module, twin: nn.Module) -> None:
        """Copy buffers, and settings that changed."""
        buffers = _torch.own_buffers(twin)
        for name, new in _torch.own_buffers(module).items():
            old = buffers.get(name)
            if new is None or old is None or (old.shape, old.dtype) != (new.shape, new.dtype):
                buffers[name] = None if new is None else new.detach().clone()
            else:
                old.copy_(new)
        now, before = plain_values(module), self._settings[module]
        changed = {key: value for key, value in now.items() if key not in before or before[key] != value}
        if changed:
            twin.__dict__.update(copy.deepcopy(changed))
            before.update(copy.deepcopy(changed))


def unsharded_copy(runtime: Runtime, device: torch.device | str, *, trains: bool) -> nn.Module:
    """Return a copy as before sharding, without values, that computes in the dtypes in which FSDP2 does.

    ``trains``: its parameters require gradients as the model's do.
    """

    def made(parameter: torch.Tensor) -> nn.Parameter:
        dtype = runtime.compute_dtype if parameter.is_floating_point() else None
        whole = torch.empty(parameter.shape, dtype=dtype or parameter.dtype, device=device)
        return nn.Parameter(whole, requires_grad=trains and parameter.requires_grad)

    result: nn.Module = copy_modules(runtime, runtime.root, made, {})
    copies, mixed = dict(names.named_modules(result)), runtime.plan.mixed_precision
    inputs = getattr(torch, mixed.compute) if mixed and mixed.compute and mixed.cast_inputs else None
    output = getattr(torch, mixed.output) if mixed and mixed.output else None
    # What goes into and out of the modules of a unit is cast.
    for unit in runtime.plan.units if mixed is not None else ():
        if unit.kind == "experts":
            continue
        for module in (copies[name] for name in unit.modules):
            casts = _Casts(inputs, output)
            module.register_forward_pre_hook(casts.enter, prepend=True, with_kwargs=True)
            module.register_forward_hook(casts.leave, always_call=True)
            if unit.kind in ("root", "block") and len(unit.modules) == 1:
                for method in methods.methods_that_compute(module):
                    module.__dict__[method] = casts.around(getattr(module, method))
    return result


class _Casts:
    """The casts of one unit: floating-point inputs and outputs of its forward, and of methods called outside it."""

    def __init__(self, inputs: torch.dtype | None, output: torch.dtype | None) -> None:
        self.inputs, self.output = inputs, output
        self.depth = 0
        """Forwards of the module that run."""

    def enter(self, _: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self.depth += 1
        return _cast(args, self.inputs), _cast(kwargs, self.inputs)

    def leave(self, _: Any, args: Any, output: Any) -> Any:
        self.depth = max(0, self.depth - 1)
        return _cast(output, self.output)

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function``, which outside the forward casts as the forward does."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.depth:
                return function(*args, **kwargs)
            args, kwargs = self.enter(None, args, kwargs)
            output = None
            try:
                output = function(*args, **kwargs)
            finally:
                output = self.leave(None, args, output)
            return output

        return call


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    return value if dtype is None else _torch.cast_floating(value, dtype)


def plain_values(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of ``module`` that are numbers, text, or collections of them."""
    return {key: value for key, value in module.__dict__.items() if key not in _OWN and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, (dict, list, tuple, set)):
        return all(map(_is_plain, value.values() if isinstance(value, dict) else value))
    return value is None or isinstance(value, (bool, int, float, str))


def gather_each(runtime: Runtime, units: Iterable[ShardedModule]) -> Iterator[ShardedModule]:
    """Gather one unit after the other, with one collective each; free it when the iterator goes on or is closed.

    What the forward of a pass left gathered for its backward stays so.
    """
    runtime.meet("gathering of the model")
    settle(runtime)
    before = runtime.memory.now()
    for unit in units:
        with torch.no_grad(), torch.inference_mode(False):
            unit.unshard()
        try:
            yield unit
        finally:
            if unit not in before:
                unit.reshard()


def on_this_stream(items: Generator[Item, None, None], device: torch.device) -> Generator[Item, None, None]:
    """Run a generator's body on the stream of now, whichever is current where somebody asks for the next item.

    That stream waits for the item, and its memory for that stream. Else the rest of a unit is read on a stream that
    does not know of the unit's collective: vLLM asks for weights on two streams in turn.
    """
    return items if device.type == "cpu" else _on_stream(items, torch.accelerator.current_stream(device))


def _on_stream(items: Generator[Item, None, None], own: torch.Stream) -> Generator[Item, None, None]:
    consumer = own
    with contextlib.closing(items):
        while True:
            own.wait_stream(consumer)
            with own:
                item = next(items, None)
            if item is None:
                return
            consumer = torch.accelerator.current_stream(own.device)
            consumer.wait_stream(own)
            for tensor in _torch.tensors_in(item):
                tensor.record_stream(consumer)
            yield item


def settle(runtime: Runtime) -> None:
    """Do what comes before a pass: follow what was assigned and written, free what is outdated."""
    with torch.no_grad(), torch.inference_mode(False):
        try:
            runtime.begin()
        finally:
            runtime.leave()


def _refuse_closed(*_: Any) -> NoReturn:
    raise TrueShardRuntimeError("this copy of the model is closed; make another")
