"""Watches a forward on fake tensors for what real ones would stumble over, and for what needs values.

On a CPU everything lies on one device. On a GPU, ``.to(device)`` moves parameters and buffers; a tensor that a module
holds as an ordinary attribute stays behind, and one that ``forward`` makes without ``device=`` lies on the CPU.
"""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from trueshard import _torch
from trueshard.planner.simulation.recorder import Recorder

_MAKERS = frozenset(
    getattr(torch, name)
    for name in ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm", "tensor")
) | {torch.zeros, torch.logspace, torch.as_tensor}
_MOVERS = frozenset({torch.Tensor.to, torch.Tensor.type_as, torch.Tensor.cuda, torch.Tensor.cpu})
_ACROSS = frozenset({torch.Tensor.copy_, torch.Tensor.__getitem__, torch.Tensor.__setitem__})
"""What takes tensors of two devices."""
_PRODUCTS = frozenset(
    ("linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "einsum", "bilinear", "conv1d")
) | {"conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "scaled_dot_product_attention"}
"""What takes operands of one floating-point dtype. Fake tensors do not insist."""


@dataclass(frozen=True)
class Stray:
    """Something that a watched forward did."""

    kind: str
    """``"attribute"``, ``"made"`` (both: a tensor on the CPU beside others), ``"dtypes"`` or ``"read"`` (a value)."""
    module: str
    """Which module's forward did it; of an attribute, whose it is."""
    what: str
    """The attribute, the function that made or read the tensor, or the product and its dtypes."""
    line: str
    """Where in the user's code."""


class Watch(TorchFunctionMode):
    """Inside, a forward is watched.

    Args:
        held: (module's name, attribute) by ``id`` of each tensor that is an ordinary attribute.
        where: the name of the module that runs.
    """

    def __init__(self, held: Mapping[int, tuple[str, str]], where: Callable[[], str]) -> None:
        super().__init__()
        self.found: dict[tuple[str, ...], Stray] = {}
        self.guessed = ""
        """Where a value was asked for first that only data tell; "" if none was."""
        self._held = held
        self._where = where
        self._stray: dict[int, tuple[weakref.ref[torch.Tensor], Stray]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = self._called(func, args, kwargs)
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "__delete__"):
            return out
        tensors = _torch.tensors_in((args, kwargs))
        if func in _MAKERS:
            if kwargs.get("device") is None and not tensors:
                self._mark(out, Stray("made", self._where(), f"torch.{name}", here()))
            return out
        strays = [(each, stray) for each in tensors if (stray := self._known(each)) is not None]
        if name in _PRODUCTS:
            self._check_dtypes(name, tensors)
        if not strays:
            return out
        if func in _MOVERS and _moves(args, kwargs):  # a tensor of its own, even where it lies there already
            return out.view_as(out) if out is args[0] else out
        if len(strays) == len(tensors):
            self._mark(out, strays[0][1])
        elif func not in _ACROSS:
            for tensor, stray in strays:
                if tensor.ndim:  # a number on the CPU may stand beside anything
                    self._find(stray)
        return out

    def _check_dtypes(self, name: str, tensors: list[torch.Tensor]) -> None:
        dtypes = sorted({str(each.dtype).removeprefix("torch.") for each in tensors if each.is_floating_point()})
        if len(dtypes) > 1 and not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda"):
            self._find(Stray("dtypes", self._where(), f"{name.strip('_')} of {' and '.join(dtypes)}", here()))

    def _known(self, tensor: torch.Tensor) -> Stray | None:
        if id(tensor) in self._held:
            return Stray("attribute", *self._held[id(tensor)], "")
        reference, stray = self._stray.get(id(tensor), (None, None))
        return stray if reference is not None and reference() is tensor else None

    def _mark(self, out: Any, stray: Stray) -> None:
        for each in _torch.tensors_in(out):
            self._stray[id(each)] = (weakref.ref(each), stray)

    def _called(self, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if not is_data_dependent(error):
                raise
        with Recorder():  # answers as it does in a simulation
            out = func(*args, **kwargs)
        self.guessed = self.guessed or here()
        if "site-packages" not in _frame().filename:  # what a library looks at, its user cannot change
            self._find(Stray("read", self._where(), f".{getattr(func, '__name__', func)}()", here()))
        return out

    def _find(self, stray: Stray) -> None:
        """Once for each line of code, whichever modules run it; an attribute once for each module."""
        owner = stray.module if stray.kind == "attribute" else ""
        self.found.setdefault((stray.kind, owner, stray.what, stray.line), stray)


def is_data_dependent(error: BaseException) -> bool:
    """Whether a fake tensor was asked for what only values tell: a number, or a shape that depends on them."""
    return type(error).__name__ in ("DataDependentOutputException", "DynamicOutputShapeException")


def here(error: BaseException | None = None) -> str:
    """``file:line`` of the innermost code that is neither torch's nor this library's; "" where there is none."""
    frame = _frame(error)
    return f"{Path(frame.filename).name}:{frame.lineno}" if frame.filename else ""


def _frame(error: BaseException | None = None) -> traceback.FrameSummary:
    frames = traceback.extract_stack() if error is None else traceback.extract_tb(error.__traceback__)
    own = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
    found = [frame for frame in frames if not frame.filename.startswith((*own, "<"))]
    return found[-1] if found else traceback.FrameSummary("", 0, "")


def _moves(args: Any, kwargs: Any) -> bool:
    """Whether ``tensor.to(...)`` says a device, or a tensor that is on one."""
    rest = [*args[1:], *kwargs.values()]
    return any(isinstance(each, (str, int, torch.device, torch.Tensor)) and each is not True for each in rest)
