"""A place in which models are made without their weights, and where reaching for data or a GPU is found out.

- Tensors that are made inside lie on the meta device; small constants (``arange``, ``linspace``, ``tensor``) are real,
  since constructors read them (drop-path rates, tables of positions).
- Fake tensors would not do here: ``module.to(dtype)`` fails on them, and some initialisers read values.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from trueshard import _torch
from trueshard.planner.inputs.fakes import mapped

#: What a file of tensors or of training data is called.
DATA = frozenset({".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".gguf", ".npy", ".npz", ".h5", ".hdf5", ".parquet"})
DATA |= {".arrow", ".tar", ".tfrecord", ".mds"}

_CONSTANTS = (torch.tensor, torch.as_tensor, torch.arange, torch.linspace, torch.logspace)
_READERS = {
    getattr(torch.Tensor, name): f".{name}()"
    for name in ("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__array__")
}


class Touched(Exception):
    """A factory reached for what the planner does not have. ``str()`` says what it did and what to do instead."""


@contextlib.contextmanager
def weightless() -> Iterator[None]:
    """Inside, tensors have no memory; what needs data or a GPU raises ``Touched``."""
    files = [(owner, "open", _guarded(owner.open)) for owner in (builtins, io)]
    with _replaced(files), without_gpu(), _torch.real_tensors(), torch.device("meta"), _Weightless():
        yield


@contextlib.contextmanager
def without_gpu() -> Iterator[None]:
    """Inside, no GPU is available, and loading weights raises ``Touched``. Tensors that are made are real."""
    with _replaced(_replacements()):
        yield


class _Weightless(TorchFunctionMode):
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
        if func in _READERS and args[0].is_meta:
            raise Touched(
                f"reads the value of a tensor ({_READERS[func]}), and there are no values: build the model from a "
                "configuration, and move what looks at data out of it"
            )
        try:
            return func(*args, **kwargs)
        except (RuntimeError, NotImplementedError):
            if len({each.is_meta for each in _torch.tensors_in((args, kwargs))}) < 2:
                raise
            args, kwargs = mapped(_on_meta, (args, kwargs))
            return func(*args, **kwargs)


def _on_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def _moved(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """``tensor.to(...)``: a meta tensor stays where it is, and takes the dtype."""
    tensor, *rest = args
    for each in (*rest, kwargs.get("device")):
        if isinstance(each, (str, torch.device)) or (isinstance(each, int) and not isinstance(each, bool)):
            _refuse_gpu(each, ".to")
    if not tensor.is_meta:
        return func(*args, **kwargs)
    dtype = next((each for each in (*rest, kwargs.get("dtype")) if isinstance(each, torch.dtype)), tensor.dtype)
    dtype = next((each.dtype for each in (*rest, kwargs.get("other")) if isinstance(each, torch.Tensor)), dtype)
    return func(tensor, dtype)


def _refuse_gpu(device: Any, where: str) -> None:
    kind = "cuda" if isinstance(device, int) else torch.device(device).type
    if kind not in ("cpu", "meta"):
        raise _gpu(f"{where}(…, {str(device)!r})")


def _gpu(what: str) -> Touched:
    return Touched(
        f"uses a GPU ({what}), and there is none: build the model on the CPU, and move it where it is trained"
    )


def _replacements() -> list[tuple[Any, str, Any]]:
    """(owner, name, what takes its place) of functions that reach outside without making a tensor."""

    def set_device(device: Any) -> None:
        raise _gpu(f"torch.cuda.set_device({device!r})")

    def load(file: Any, *args: Any, **kwargs: Any) -> Any:
        raise _reads(f"torch.load({_shown(file)})")

    found: list[tuple[Any, str, Any]] = [
        (torch.cuda, "is_available", lambda: False),
        (torch.cuda, "set_device", set_device),
        (nn.Module, "cuda", lambda module, device=None: _raise(_gpu(".cuda()"))),
        (torch, "load", load),
    ]

    def safe_open(file: Any, *args: Any, **kwargs: Any) -> Any:
        raise _reads(f"safetensors, {_shown(file)}")

    readers = [sys.modules.get(name, object) for name in ("safetensors", "safetensors.torch")]
    found += [(module, "safe_open", safe_open) for module in readers if "safe_open" in vars(module)]
    hub = sys.modules.get("transformers.modeling_utils")
    if hub is not None:

        def from_pretrained(cls: type, name: Any = "", *args: Any, **kwargs: Any) -> Any:
            raise _reads(f"{cls.__name__}.from_pretrained({_shown(name)})")

        found.append((hub.PreTrainedModel, "from_pretrained", classmethod(from_pretrained)))
    return found


def _guarded(original: Callable[..., Any]) -> Callable[..., Any]:
    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, (str, os.PathLike)) and "r" in mode and Path(os.fspath(file)).suffix in DATA:
            raise _reads(f"open({_shown(file)})")
        return original(file, mode, *args, **kwargs)

    return opened


def _reads(what: str) -> Touched:
    return Touched(
        f"reads a file of tensors ({what}), and the planner needs none: build the model from a configuration (such as "
        "from_config), and load weights and data where it is trained"
    )


def _shown(file: Any) -> str:
    return repr(os.fspath(file)) if isinstance(file, (str, os.PathLike)) else "…"


def _raise(error: Exception) -> None:
    raise error


@contextlib.contextmanager
def _replaced(replacements: list[tuple[Any, str, Any]]) -> Iterator[None]:
    before = [(owner, name, vars(owner)[name]) for owner, name, _ in replacements]
    for owner, name, value in replacements:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
