"""Record what a training program does in its first steps, in a folder that ``comparing`` holds against another's.

- A step is all that the model does up to the last ``optimizer.step()`` before its next pass with gradients.
- Tensors are whole, gathered. A file for each content keeps once what is the same twice; each rank lists what it saw.
- The model is the outermost module that is called with gradients, whatever wraps it. Until then ``Module.__call__`` is
  replaced: torch's global hooks see no keyword arguments, and ours have to come after those of FSDP2.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FlatParameter, FullyShardedDataParallel
from torch.optim import optimizer as hooks

from trueshard import _torch
from trueshard.errors import TrueShardTypeError, TrueShardValueError
from trueshard.files import replace_text, replacing
from trueshard.model.names import held_tensors, unwrap
from trueshard.optim.rebind import leaves
from trueshard.verification import compare
from trueshard.verification.disturbing import Disturbance
from trueshard.verification.modules import Place, Recorder

FOLDER, STEPS, SHAKEN, STOPS = (f"TRUESHARD_RECORD{end}" for end in ("", "_STEPS", "_SHAKEN", "_STOPS"))
"""Environment variables: folder; steps (3); disturb by rounding, with this seed; end the program after the steps."""
INDEX = "record.json"


def record(model: nn.Module, optimizer: Any = None) -> None:
    """Record the first steps of ``model`` if the environment variable TRUESHARD_RECORD names a folder; else do nothing.

    Args:
        model: before or after it is wrapped or sharded.
        optimizer: one or a list; needed only if it is no ``torch.optim.Optimizer``, or steps copies of the model's
            parameters. Others are found by what they step.
    """
    if os.environ.get(FOLDER):
        begin().look_for(model, optimizer if isinstance(optimizer, (list, tuple)) else [optimizer])


def _seed(text: str) -> int | None:
    if text and not text.isdecimal():
        raise TrueShardValueError(f"{SHAKEN}={text}: it is the seed of the roundings; give a whole number")
    return int(text) if text else None


@functools.cache
def begin() -> _Recording:
    """Record the first model that is called, or the one that ``record`` names before."""
    return _Recording(Path(os.environ[FOLDER]))


class _Recording(Recorder):
    """One rank's recording, which finds by itself where a pass of the model begins and ends, and a step."""

    def __init__(self, folder: Path) -> None:
        super().__init__(nn.Identity(), self._keep, compare.full)
        self.model: nn.Module | None = None
        self._folder, self._steps = folder, int(os.environ.get(STEPS, "3"))
        self._step = 0
        self._disturbance: Disturbance | None = None
        self._stepped: set[int] = set()
        self._given: list[Any] = []
        self._rows: dict[int, list[dict[str, Any]]] = defaultdict(list)
        self._calls_of: Counter[tuple[int, str]] = Counter()
        """Passes that begin at a module, by step and name."""
        self._entries: dict[tuple[str, int, str], str] = {}
        self._notes: dict[str, Any] = {"in the optimizer": {}, "dtypes": {}, "is later stage": False}
        call, clip = nn.Module.__call__, functools.partial(self._clip, nn.utils.clip_grad_norm_)

        def look(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled() and not self._step and (root := self._root(module)) is not None:
                nn.Module.__call__ = call  # type: ignore[method-assign]
                self._start(root, module)
            return call(module, *args, **kwargs)

        nn.Module.__call__ = look  # type: ignore[method-assign]
        nn.utils.clip_grad_norm_ = nn.utils.clip_grad.clip_grad_norm_ = clip
        torch.compiler.set_stance("force_eager")  # compiled code calls no hooks

    def look_for(self, model: nn.Module, optimizers: Any) -> None:
        self.model, self._given = self.model or model, [*self._given, *optimizers]
        for optimizer in optimizers:
            if not isinstance(optimizer, torch.optim.Optimizer | None):  # torch's hooks do not see it
                optimizer.step = functools.partial(self._step_of, optimizer, optimizer.step)

    def _root(self, module: nn.Module) -> nn.Module | None:
        """Return the model that is looked for if ``module`` is a part of it or wraps it."""
        if self.model is not None:
            if self.model not in module.modules() and module not in self.model.modules():
                return None
            module = self.model
        elif not any(parameter.requires_grad for parameter in module.parameters()):
            return None
        while True:
            module, inner = unwrap(module), dict(unwrap(module).named_children())
            held = [name for name, child in inner.items() if any(True for _ in child.parameters())]
            is_wrapper = list(inner) == ["module"] or (hasattr(module, "training_step") and len(held) == 1)
            if not is_wrapper or _torch.own_parameters(module):
                return module
            module = inner[held[0]]

    def _start(self, root: nn.Module, outermost: nn.Module) -> None:
        self.model = self._model = root
        self._step = 1
        joined = dist.is_initialized()
        self._notes["rank"] = dist.get_rank() if joined else int(os.environ.get("RANK", "0"))
        self._notes["ranks"] = dist.get_world_size() if joined else int(os.environ.get("WORLD_SIZE", "1"))
        self._own = self._folder / f"rank-{self._notes['rank']}"
        seed = _seed(os.environ.get(SHAKEN, ""))
        try:
            self._own.mkdir(parents=True)
        except FileExistsError:
            raise TrueShardValueError(f"{self._own} is there already; record in another folder") from None
        modules = list(dict.fromkeys([*_torch.every_module(outermost), *_torch.every_module(root)]))
        self._flat = next((module for module in modules if isinstance(module, FullyShardedDataParallel)), None)
        trained = {held.name: held.tensor for held in held_tensors(root, "parameters") if held.tensor.requires_grad}
        if any(isinstance(parameter, FlatParameter) for parameter in trained.values()):
            raise TrueShardValueError("the model's parameters are flat (FSDP 1): give it use_orig_params=True")
        self._notes["trained"] = list(trained)
        if seed is not None:
            self._disturbance = Disturbance(root, seed)
            self._disturbance.parameters(trained.values())
        self._keep_all("parameters", 0)
        for module in modules:  # before FSDP2 gathers parameters for the pass
            module.register_forward_pre_hook(self._before_pass, prepend=True)
        # Hooks stay, and do nothing after the last step: one cannot be removed while torch calls it.
        self._watching = self.watching()
        self._watching.__enter__()
        hooks.register_optimizer_step_pre_hook(self._before_step)
        hooks.register_optimizer_step_post_hook(self._after_step)
        atexit.register(self._finish)

    def _before_pass(self, *_: Any) -> None:
        if self._stepped and torch.is_grad_enabled() and not _torch.in_backward():
            self._end_step()

    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        over = self._is_forward or self._step > self._steps
        if not over and torch.is_grad_enabled() and not _torch.in_backward():
            tensors, passes = _torch.tensors_in((args, kwargs)), self._rows[self._step]
            if passes and not all(tensor.is_leaf for tensor in tensors):  # the second of several parts of a pass
                self._is_forward = True
            else:
                self._begin_pass(name, tensors)
        return super()._before(name, module, args, kwargs)

    def _begin_pass(self, name: str, tensors: list[torch.Tensor]) -> None:
        """Begin a pass at a module, and keep the hashes of its samples.

        Of several stages of a pipeline on one rank, a later one goes on with the passes that the first has begun.
        """
        is_later, passes = any(tensor.requires_grad for tensor in tensors), self._rows[self._step]
        number = self._calls_of[self._step, name] if is_later else len(passes)
        self._calls_of[self._step, name] += 1
        self.begin(0, number)
        if number == len(passes):
            self._notes["is later stage"] |= is_later
            count = next((tensor.size(0) for tensor in tensors if tensor.ndim), 0)
            batch = [tensor.detach() for tensor in tensors if tensor.ndim and tensor.size(0) == count]
            inner = next((tensor.size(1) for tensor in batch if tensor.ndim > 1), 1)
            hashes = [[_hash(tensor[row]) for row in range(count)] for tensor in batch]
            passes.append({"count": count, "inner": inner, "hashes": hashes})

    def _after(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        super()._after(name, module, args, output)
        if self._is_forward and not self._open:
            self.end_forward(None)

    def _end_step(self) -> None:
        self._keep_all("parameters", self._step)  # again: an optimizer may copy its own to the model's after the hook
        self._stepped.clear()
        self._step += 1
        if self._step > self._steps:
            self._finish()
            if os.environ.get(STOPS):
                threading.Thread(target=self._leave, daemon=True).start()

    def _leave(self) -> None:
        """End the program once all ranks have ended their recordings: a pipeline's first stage is ahead of others."""
        while len(list(self._folder.glob(f"rank-*/{INDEX}"))) < self._notes["ranks"]:
            time.sleep(0.05)
        sys.stdout.flush()
        os._exit(0)

    def _clip(self, clip: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not 0 < self._step <= self._steps:
            return clip(*args, **kwargs)
        self._keep_gradients()
        norm = clip(*args, **kwargs)
        self._keep(("gradient norm", self._step, ""), norm)
        return norm

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        if (names := self._names_in(optimizer)) is None:
            return
        if id(optimizer) in self._stepped:  # without a pass in between
            self._end_step()
        self._notes["in the optimizer"] |= dict.fromkeys(names)
        if ("gradient norm", self._step, "") not in self._entries:
            self._keep_gradients()
        self._keep_all("clipped gradients", self._step)

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if (names := self._names_in(optimizer)) is None:
            return
        self._stepped.add(id(optimizer))
        for name, parameter in names.items():
            for path, value in leaves(dict(optimizer.state.get(parameter, {})), (name,)):
                if isinstance(value, (torch.Tensor, int, float)):
                    self._keep(("state", self._step, ": ".join(map(str, path))), value)
        self._keep_all("parameters", self._step)

    def _step_of(self, optimizer: Any, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._before_step(optimizer)
        result = step(*args, **kwargs)
        self._after_step(optimizer)
        return result

    def _names_in(self, optimizer: Any) -> dict[str, torch.Tensor] | None:
        """Return the model's parameters that an optimizer steps; None if it is not one of this recording."""
        inside = {id(p) for group in getattr(optimizer, "param_groups", ()) for p in group["params"]}
        held = held_tensors(self._model, "parameters") if 0 < self._step <= self._steps else ()
        names = {one.name: one.tensor for one in held if id(one.tensor) in inside}
        return names if names or (held and any(optimizer is given for given in self._given)) else None

    def _keep_gradients(self) -> None:
        """Keep gradients as they are before clipping; where rounding is measured, disturbed."""
        if self._disturbance is not None and not self._stepped:
            named = [(held.name, held.tensor) for held in held_tensors(self._model, "parameters")]
            self._disturbance.gradients(named, self._notes["dtypes"])
        self._keep_all("gradients", self._step)

    def _keep_all(self, kind: str, step: int) -> None:
        gather: Any = functools.partial(FullyShardedDataParallel.summon_full_params, writeback=False, with_grads=True)
        with contextlib.nullcontext() if self._flat is None else gather(self._flat):
            for held in held_tensors(self._model, "parameters"):
                tensor = held.tensor if kind == "parameters" else held.tensor.grad
                if tensor is not None:
                    self._keep((kind, step, held.name), tensor)

    def _keep(self, place: Place | tuple[str, int, str], value: Any) -> None:
        """Write a tensor or number. Collective if it is a DTensor."""
        tensor = compare.full(torch.as_tensor(value))
        if isinstance(place, Place):
            self._notes["dtypes"][str(tensor.dtype).removeprefix("torch.")] = None
            place = place.side, self._step, place.key
        self._entries[place] = content = _hash(tensor)
        file = self._folder / "tensors" / f"{content}.pt"
        if not file.exists():
            file.parent.mkdir(exist_ok=True)
            with replacing(file) as scratch:
                torch.save(tensor.clone(), scratch)

    def _finish(self) -> None:
        """Leave the list of what was recorded, if a step was, and the program has not failed."""
        atexit.unregister(self._finish)
        steps = min(self._steps, self._step - (not self._stepped))
        if steps and not hasattr(sys, "last_value"):
            git = subprocess.run("git describe --always --dirty", shell=True, capture_output=True, text=True)
            notes = {**self._notes, "torch": torch.__version__, "command": " ".join(sys.argv), "steps": steps}
            notes |= {"commit": git.stdout.strip(), "rows": self._rows}
            notes["entries"] = [[*key, content] for key, content in self._entries.items() if key[1] <= steps]
            replace_text(self._own / INDEX, json.dumps(notes))


def _hash(tensor: torch.Tensor) -> str:
    kind = f"{tensor.dtype}{list(tensor.shape)}".encode()
    plain = tensor.clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()
    if type(plain) is not torch.Tensor:
        raise TrueShardTypeError(f"a {type(plain).__name__} cannot be recorded, only plain tensors")
    # numpy need not be there in another program
    data = (ctypes.c_char * (plain.numel() * plain.itemsize)).from_address(plain.data_ptr())
    return hashlib.blake2b(data, digest_size=12, key=hashlib.sha256(kind).digest()).hexdigest()
