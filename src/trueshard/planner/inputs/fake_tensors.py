"""Models without their memory: built on the meta device, copied onto fake tensors.

- A factory is called inside ``on_meta``. Its tensors lie on the meta device; small constants (``arange``, ``linspace``,
  ``tensor``) are real, since constructors read them (drop-path rates, tables of positions). Fake tensors would not do
  there: ``module.to(dtype)`` fails on them, and some initialisers read values.
- ``fake_copy`` and ``make_fake`` put a stand-in for each tensor: same shape, dtype, ties and attributes. Called inside
  ``fake_tensors``, where stand-ins take no memory and lie on the CPU.
"""

from __future__ import annotations

import builtins
import contextlib
import copy
import io
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from trueshard import _torch
from trueshard.errors import with_kind
from trueshard.model import intent, names

DATA = frozenset({".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".gguf", ".npy", ".npz", ".h5", ".hdf5", ".parquet"})
DATA |= {".arrow", ".tar", ".tfrecord", ".mds"}
"""Endings of files of tensors or of training data."""
READERS = {"transformers.modeling_utils": "from_pretrained", "safetensors.torch": "safetensors"}
"""Modules that read weights, with the word by which a file uses them: to be guarded they must be imported."""

_CONSTANTS = (torch.tensor, torch.as_tensor, torch.arange, torch.linspace, torch.logspace)
_VALUE_METHODS = {
    getattr(torch.Tensor, name): f".{name}()"
    for name in ("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__array__")
}


# Fake stand-ins


def refuse_sharded(model: nn.Module) -> None:
    """Raise ValueError for a sharded model."""
    if any(isinstance(module, _torch.ShardedModule) for module in model.modules()):
        raise ValueError("the model is sharded already; give the unsharded model, or a function that makes it")


def fake_copy(model: nn.Module, dtype: torch.dtype | None = None) -> tuple[nn.Module, dict[int, torch.Tensor]]:
    """Return a copy of ``model`` on fake tensors, and the stand-in of each tensor by the tensor's ``id``.

    The model stays as it is, and none of its data is copied. ``dtype``: of floating-point parameters and buffers; None:
    their own. Raises ValueError if it is sharded, has parameters without a shape, or cannot be copied.
    """
    refuse_sharded(model)
    stand_ins = _stand_ins(model, dtype)
    memo: dict[int, Any] = {}
    for module in model.modules():
        for tensor in _torch.tensors_in(names.plain_attributes(module)):
            memo[id(tensor)] = tensor if _torch.is_fake(tensor) else _stand_in(tensor)
    memo |= stand_ins
    try:
        copied: nn.Module = copy.deepcopy(model, memo)
    except Exception as error:  # whatever an attribute raises that cannot be copied
        raise ValueError(
            f"the {type(model).__name__} cannot be copied ({with_kind(error)}); give a function that makes it instead"
        ) from error
    return copied, stand_ins


def make_fake(model: nn.Module, dtype: torch.dtype | None = None) -> dict[int, torch.Tensor]:
    """Replace all tensors of ``model`` by stand-ins; return the stand-in of each tensor by the tensor's ``id``.

    The ids hold for tensors that the caller keeps. Raises ValueError for a parameter without a shape.
    """
    stand_ins = _stand_ins(model, dtype)
    for kind, registry in (("parameters", _torch.own_parameters), ("buffers", _torch.own_buffers)):
        for _, module, attribute, tensor in list(names.named_tensors(model, kind)):
            registry(module)[attribute] = stand_ins[id(tensor)]
    replace_plain(model, stand_ins, lambda plain: not _torch.is_fake(plain), _stand_in)
    return stand_ins


def _stand_ins(model: nn.Module, dtype: torch.dtype | None) -> dict[int, Any]:
    made: dict[int, Any] = {}
    for kind in ("parameters", "buffers"):
        for held in names.held_tensors(model, kind):
            if is_lazy(held.tensor):
                raise ValueError(
                    f"{held.name!r} has no shape yet (its module initialises itself at the first forward): give the "
                    "sizes when the module is made, or run the model once before planning"
                )
            made[id(held.tensor)] = _stand_in(held.tensor, dtype)
    return made


def _stand_in(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    if dtype is None or not tensor.is_floating_point():
        dtype = tensor.dtype
    fake = torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=dtype)
    if not isinstance(tensor, nn.Parameter):
        return fake.requires_grad_(tensor.requires_grad)
    parameter = nn.Parameter(fake, requires_grad=tensor.requires_grad)
    vars(parameter).update(intent.attributes_of(tensor))
    for hook in (_torch.gradient_hooks(tensor)[0] or {}).values():
        parameter.register_hook(hook)
    return parameter


def replace_plain(
    model: nn.Module,
    made: dict[int, Any],
    is_old: Callable[[torch.Tensor], bool],
    make: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Replace the tensors of plain attributes that are old; ``made``: what stands for each, by its ``id``."""

    def replaced(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not is_old(value):
            return value
        if id(value) not in made:
            made[id(value)] = make(value)
        return made[id(value)]

    for module in model.modules():
        for key, value in names.plain_attributes(module).items():
            if any(map(is_old, _torch.tensors_in(value))):
                vars(module)[key] = _torch.mapped(replaced, value)


# Building on the meta device


class Unavailable(Exception):
    """Raised where a factory asks for what the planner does not have; says for what, and what to do instead."""


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    """Make tensors on the meta device; raise ``Unavailable`` for a GPU, a file of tensors, or a tensor's value."""
    files = [mock.patch.object(owner, "open", _guarded(owner.open)) for owner in (builtins, io)]
    with files[0], files[1], without_gpu(), _torch.real_tensors(), torch.device("meta"), _OnMeta():
        yield


@contextlib.contextmanager
def without_gpu() -> Iterator[None]:
    """Show no GPU, and raise ``Unavailable`` if weights are loaded. Tensors are real."""

    def refusing(error: Callable[..., Unavailable]) -> Callable[..., Any]:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise error(*args, *kwargs.values())

        return refuse

    safe_open = refusing(lambda file="", *_: _reads(f"safetensors, {_shown(file)}"))
    from_pretrained = refusing(lambda cls, name="", *_: _reads(f"{cls.__name__}.from_pretrained({_shown(name)})"))
    replacements: list[tuple[Any, str, Any]] = [
        (torch.cuda, "is_available", lambda: False),
        (torch.cuda, "set_device", refusing(lambda device: _gpu(f"torch.cuda.set_device({device!r})"))),
        (nn.Module, "cuda", refusing(lambda *_: _gpu(".cuda()"))),
        (torch, "load", refusing(lambda file="", *_: _reads(f"torch.load({_shown(file)})"))),
    ]
    readers = [sys.modules.get(name, object) for name in ("safetensors", "safetensors.torch")]
    replacements += [(module, "safe_open", safe_open) for module in readers if "safe_open" in vars(module)]
    hub = sys.modules.get("transformers.modeling_utils")
    if hub is not None:
        replacements.append((hub.PreTrainedModel, "from_pretrained", classmethod(from_pretrained)))
    with contextlib.ExitStack() as stack:
        for replacement in replacements:
            stack.enter_context(mock.patch.object(*replacement))
        yield


class _OnMeta(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            raise _gpu(".cuda()")
        if func is torch.Tensor.cpu:
            func, args = torch.Tensor.to, (args[0], "cpu")
        if func is torch.Tensor.to:
            return _moved(func, args, kwargs)
        if kwargs.get("device") is not None:
            _refuse_gpu(kwargs["device"], f"torch.{getattr(func, '__name__', '')}")
            if func not in _CONSTANTS:
                kwargs["device"] = "meta"
        elif func in _CONSTANTS:
            kwargs["device"] = "cpu"
        if func in _VALUE_METHODS and args[0].is_meta:
            raise Unavailable(
                f"reads the value of a tensor ({_VALUE_METHODS[func]}), and there are no values: build the model from "
                "a configuration, and move what looks at data out of it"
            )
        try:
            return func(*args, **kwargs)
        except (RuntimeError, NotImplementedError):
            if len({tensor.is_meta for tensor in _torch.tensors_in((args, kwargs))}) < 2:
                raise
            args, kwargs = _torch.map_only(torch.Tensor, lambda real: real.to("meta"), (args, kwargs))
            return func(*args, **kwargs)


def _moved(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Do ``tensor.to(...)``; a meta tensor takes the dtype alone."""
    tensor, *others = args
    others += kwargs.values()
    for argument in others:
        if isinstance(argument, (str, torch.device)) or type(argument) is int:
            _refuse_gpu(argument, ".to")
    if not tensor.is_meta:
        return func(*args, **kwargs)
    dtypes = [argument for argument in others if isinstance(argument, torch.dtype)]
    dtypes += [argument.dtype for argument in others if isinstance(argument, torch.Tensor)]
    return func(tensor, dtypes[-1] if dtypes else tensor.dtype)


def _refuse_gpu(device: Any, where: str) -> None:
    kind = "cuda" if isinstance(device, int) else torch.device(device).type
    if kind not in ("cpu", "meta"):
        raise _gpu(f"{where}(…, {str(device)!r})")


def _gpu(what: str) -> Unavailable:
    return Unavailable(
        f"uses a GPU ({what}), and there is none: build the model on the CPU, and move it where it is trained"
    )


def _guarded(original: Callable[..., Any]) -> Callable[..., Any]:
    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, (str, os.PathLike)) and "r" in mode and Path(os.fspath(file)).suffix in DATA:
            raise _reads(f"open({_shown(file)})")
        return original(file, mode, *args, **kwargs)

    return opened


def _reads(what: str) -> Unavailable:
    return Unavailable(
        f"reads a file of tensors ({what}), and the planner needs none: build the model from a configuration (such as "
        "from_config), and load weights and data where it is trained"
    )


def _shown(file: Any) -> str:
    return repr(os.fspath(file)) if isinstance(file, (str, os.PathLike)) else "…"
