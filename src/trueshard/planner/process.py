"""The planner's process: simulations patch torch, Python and the environment, which are not the user's there.

- It is started at the first call, serves the following ones, and ends with this process, when a call is interrupted,
  after ``IDLE`` seconds without a call, or when a file that it has imported was changed.
- A call is sent with cloudpickle: functions and classes of ``__main__``, lambdas and local ones by value, everything
  else by its module, which is imported there. Models are sent as their structure: of a tensor the shape and dtype.
- What is written to stdout and stderr there appears in this process's.
- It forks ``Workers``, which run a search's tasks side by side.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import inspect
import io
import os
import pickle
import pkgutil
import signal
import sys
import threading
import traceback
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn, TypeAlias

import cloudpickle
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from trueshard import _torch
from trueshard.errors import is_defect, with_kind
from trueshard.launching import Served, end_with_parent, how, out_of_memory_hint
from trueshard.machine import cpu_cores
from trueshard.model import intent, names
from trueshard.planner.inputs.fake_tensors import READERS

IDLE = 300
"""Seconds without a call after which the process ends and gives its memory back."""
_SMALL = 1 << 20
"""Bytes up to which a tensor of no model is sent with its values."""


def call(function: str, *arguments: Any, in_place: bool = False, **options: Any) -> Any:
    """Return what ``function`` returns in the planner's process.

    Args:
        function: ``"package.module:name"``; the module is imported there, not here.
        in_place: call it in this process, with ``options``; so it is in the planner's process itself, too.

    Raises:
        ValueError: an argument cannot be sent; names the part.
        RuntimeError: the process ended before it answered.
        BaseException: raised by the function, with the same class, message and notes.
    """
    if in_place or _serves:
        return pkgutil.resolve_name(function)(*arguments, **options)
    surroundings = {
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "path": sys.path,
        "dtype": torch.get_default_dtype(),
        "readers": [name for name in READERS if name in sys.modules],
    }
    request = pickle.dumps((surroundings, _packed(function, arguments)))
    with _lock:
        value, error, trace = _answer(request)
    if error is not None:
        raise error from _Remote(trace)
    return value


def is_planners() -> bool:
    """True in the planner's process, which runs no user's threads and may be forked."""
    return _serves


class _Remote(Exception):
    """Traceback of an error in the planner's process, as the cause of the error here."""


# The caller's side

_lock = threading.Lock()
_child: _Child | None = None


class _Child(Served):
    """The process and the connection to it."""

    def ask(self, request: bytes) -> Any:
        """Return (value, error, its traceback), or None if the process has gone; show what it prints."""
        try:
            self.connection.send_bytes(request)
            while True:
                kind, content = pickle.loads(self.connection.recv_bytes())
                if kind == "answer":
                    return content
                if (stream := getattr(sys, kind)) is not None:
                    stream.write(content)
                    stream.flush()
        except (EOFError, ConnectionError):
            return None


def _answer(request: bytes) -> Any:
    global _child
    while True:
        is_new = _child is None
        child = _child = _child or _Child(__name__)
        try:
            answer = child.ask(request)
        except BaseException:  # such as a Ctrl-C
            _end()
            raise
        if answer is not None:
            return answer
        _child = None
        code = child.end(grace=10.0)
        if is_new or code:  # else it ended by itself, before it got the request
            hint = out_of_memory_hint(code)
            raise RuntimeError(f"the planner's process {how(code)} before it had a plan{hint}")


@atexit.register
def _end() -> None:
    global _child
    if _child is not None:
        child, _child = _child, None
        child.end()


def _forget() -> None:
    """Leave the process to the parent; runs in a fork of this one."""
    global _child, _lock
    _child, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)


# What is sent


class _Pickler(cloudpickle.Pickler):
    """Sends tensors as shapes, and optimizers without their state, hooks and patched ``step``."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._of_models: set[int] = set()

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            return self._reduced(value)
        if isinstance(value, nn.Module):
            self._of_models.update(
                map(id, _torch.tensors_in([names.plain_attributes(value), list(value.buffers(False))]))
            )
            if is_parametrized(value):  # its class refuses to be pickled
                return object.__new__, (type(value),), vars(value), None, None, _set_attributes
        if isinstance(value, torch.optim.Optimizer):
            kept = {key: OrderedDict() if "_hooks" in key else held for key, held in vars(value).items()}
            kept["state"] = defaultdict(dict)
            kept.pop("step", None)  # a scheduler's
            return object.__new__, (type(value),), kept, None, None, _set_attributes
        if isinstance(value, BaseException) and inspect.isfunction(type(value).__init__):
            # By itself it would be made anew from what it passed to its base class.
            return type(value).__new__, (type(value), *value.args), vars(value), None, None, _set_attributes
        return super().reducer_override(value)

    def _reduced(self, tensor: torch.Tensor) -> Any:
        if is_lazy(tensor):
            return type(tensor), (tensor.requires_grad, "meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        shape = tuple(tensor.shape)
        if not is_parameter and id(tensor) not in self._of_models:
            if tensor.untyped_storage().nbytes() > _SMALL or tensor.device.type != "cpu" or _torch.is_fake(tensor):
                return functools.partial(torch.empty, shape, dtype=tensor.dtype), ()  # unwritten, so it takes no memory
            return NotImplemented
        hooks = list((_torch.gradient_hooks(tensor)[0] or {}).values())
        made = (is_parameter, shape, tensor.stride(), tensor.dtype, tensor.requires_grad)
        return _meta, made, (intent.attributes_of(tensor), hooks), None, None, _set_tensor


def _meta(is_parameter: bool, shape: Any, stride: Any, dtype: torch.dtype, requires_grad: bool) -> torch.Tensor:
    tensor = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)


def _set_tensor(tensor: torch.Tensor, state: tuple[dict[str, Any], list[Any]]) -> None:
    attributes, hooks = state
    vars(tensor).update(attributes)
    for hook in hooks:
        tensor.register_hook(hook)


def _set_attributes(value: Any, attributes: dict[str, Any]) -> None:
    vars(value).update(attributes)


def dumped(value: Any) -> bytes:
    """Return ``value`` pickled, without the values of weights."""
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def _packed(function: str, arguments: tuple[Any, ...]) -> bytes:
    try:
        return dumped((function, arguments))
    except Exception as error:
        name, part = _unsendable("", arguments, set())
        raise ValueError(
            f"{name.lstrip('.')} ({type(part).__name__}) cannot be sent to the planner's process "
            f"({with_kind(error)}): take it out, or give a function that makes the model, and make it there"
        ) from error


def _unsendable(name: str, value: Any, seen: set[int]) -> tuple[str, Any]:
    """Return the innermost part of ``value`` that cannot be pickled, and its name."""
    seen.add(id(value))
    for label, part in _parts(value):
        try:
            dumped(part)
        except Exception:
            if id(part) not in seen:
                return _unsendable(f"{name}{label}", part, seen)
    return name, value


def _parts(value: Any) -> list[tuple[str, Any]]:
    """Return the parts of a value, each with what its name has behind that of the value."""
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", part) for key, part in value.items()]
    if isinstance(value, (list, tuple)):
        return [("" if len(value) == 1 else f"[{i}]", part) for i, part in enumerate(value)]
    if inspect.isfunction(value):
        used = inspect.getclosurevars(value)
        return [(f".{value.__name__}: {key}", part) for key, part in {**used.globals, **used.nonlocals}.items()]
    attributes = getattr(value, "__dict__", {})
    if isinstance(value, nn.Module):
        attributes = {**names.plain_attributes(value), **dict(value.named_children())}
    return [(f".{key}", part) for key, part in attributes.items()]


# The planner's process

_serves = False


def serve(descriptor: int) -> NoReturn:
    """Answer the calls that come over a connection."""
    global _serves
    _serves = True
    end_with_parent()
    connection, sending = Connection(descriptor), threading.Lock()

    def send(message: bytes) -> None:
        with sending:
            connection.send_bytes(message)

    sys.stdout, sys.stderr = _Stream(send, "stdout"), _Stream(send, "stderr")
    modified: dict[str, float] = {}
    with contextlib.suppress(EOFError, ConnectionError):  # the caller has gone
        while connection.poll(IDLE):
            request = connection.recv_bytes()
            if any(_modified(file) != before for file, before in modified.items()):
                break  # the caller starts another process, which imports anew
            answer = _answered(request)
            sys.stdout.flush()
            sys.stderr.flush()
            files = [str(getattr(module, "__file__", None)) for module in list(sys.modules.values())]
            modified = {file: _modified(file) for file in files}
            send(answer)
    os._exit(0)


class _Stream(io.TextIOBase):
    """Stands for stdout or stderr and sends what is written to the caller by whole lines: forked workers write, too."""

    def __init__(self, send: Callable[[bytes], None], name: str) -> None:
        self._send, self._name, self._begun = send, name, ""

    def write(self, text: str) -> int:
        lines, end, self._begun = (self._begun + text).rpartition("\n")
        if end:
            self._send(pickle.dumps((self._name, lines + end)))
        return len(text)

    def flush(self) -> None:
        if self._begun:
            begun, self._begun = self._begun, ""
            self._send(pickle.dumps((self._name, begun)))


def _modified(file: str) -> float:
    """Return the time of a file's last change; 0.0 if there is none."""
    try:
        return os.stat(file).st_mtime
    except OSError:
        return 0.0


def _answered(request: bytes) -> bytes:
    """Return the message with the function's value, or with the error and its traceback."""
    try:
        surroundings, packed = pickle.loads(request)
        os.chdir(surroundings["folder"])
        os.environ.clear()
        os.environ.update(surroundings["environment"])
        sys.path[:] = surroundings["path"]
        torch.set_default_dtype(surroundings["dtype"])
        for name in surroundings["readers"]:
            importlib.import_module(name)
        function, arguments = pickle.loads(packed)
        return dumped(("answer", (pkgutil.resolve_name(function)(*arguments), None, "")))
    except BaseException as error:
        trace = f"\n{traceback.format_exc()}"
        return dumped(("answer", (None, _sendable(error, dumped), trace)))


def _sendable(error: BaseException, dumps: Callable[[Any], bytes]) -> BaseException:
    """Return an error with ``is_defect``, since its traceback stays here; one that cannot be sent as a RuntimeError."""
    error.is_defect = is_defect(error)  # type: ignore[attr-defined]
    try:
        pickle.loads(dumps(error))
    except Exception:
        return RuntimeError(with_kind(error))
    return error


# Workers

Task: TypeAlias = Callable[[], Any]
"""Return the result of a task that was started, or raise its error."""


class Workers:
    """A pool of forked processes that are killed when the context is left; without any, tasks run when waited for.

    They have all that existed when they were forked. A process that has not run a backward yet may be forked
    (autograd's threads do not survive it), so the one that forks runs none: it hands out tasks. A task names one of the
    functions that existed before: they hold models and closures, which cannot be sent.

    Args:
        functions: what tasks may call, by name.
        count: how many; None: one for each core, two at most, and none where a process cannot be forked.
    """

    def __init__(self, functions: Mapping[str, Callable[..., Any]], count: int | None = None) -> None:
        self._functions = functions
        if count is None:
            count = min(2, cpu_cores()) if sys.platform == "linux" else 0
        self.count = count if count > 1 else 0
        """Processes of the pool; 0: tasks run here. One alone would only add the cost of sending."""
        self._pool: ProcessPoolExecutor | None = None
        self._processes: set[BaseProcess] = set()
        """Held to be killed, and for the exit code of one that died."""

    def __enter__(self) -> Workers:
        self._freezes = not gc.get_freeze_count()  # else the user's objects must stay frozen
        if self._freezes or self.count:
            gc.freeze()  # neither collected before each simulation nor copied, in a fork, by counting references
        self._threads = torch.get_num_threads()
        if self.count:
            torch.set_num_threads(1)  # here and in each: a second one would only take the core of another
            context = get_context("fork")
            self._pool = ProcessPoolExecutor(self.count, context, initializer=_begin, initargs=(self._functions,))
        return self

    def __exit__(self, *error: object) -> None:
        if self._freezes:
            gc.unfreeze()
        if self._pool is not None:
            for process in self._processes:
                process.kill()
            self._pool.shutdown()
            self._pool = None
            torch.set_num_threads(self._threads)

    def start(self, name: str, *arguments: Any) -> Task:
        """Hand a task to the pool. Raises RuntimeError if a process of it has died."""
        if self._pool is None:
            return functools.cache(functools.partial(self._functions[name], *arguments))
        before = set(active_children())
        try:
            future = self._pool.submit(_run, name, arguments)
        except BrokenProcessPool:
            raise self._death() from None
        self._processes |= set(active_children()) - before
        return functools.partial(self._result, future)

    def _result(self, future: Future[Any]) -> Any:
        error = future.exception()
        if isinstance(error, BrokenProcessPool):
            raise self._death() from None
        if error is not None:
            raise error  # here, so that ``errors.is_defect`` takes it for one of this library
        return future.result()

    def _death(self) -> RuntimeError:
        """Return the error for a process that died; the pool has ended the others by SIGTERM."""
        assert self._pool is not None
        self._pool.shutdown()
        codes = [process.exitcode for process in self._processes]
        code = next((code for code in codes if code not in (None, 0, -signal.SIGTERM)), -signal.SIGTERM)
        hint = out_of_memory_hint(code or 0)
        return RuntimeError(f"a process of the planner {how(code or 0)} before it was done{hint}")


_functions: Mapping[str, Callable[..., Any]] = {}
"""Functions that tasks may call, by name; set in a process of the pool."""


def _begin(functions: Mapping[str, Callable[..., Any]]) -> None:
    global _functions
    _functions = functions
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the process that waits
    end_with_parent()  # which a pool by itself would not notice


def _run(name: str, arguments: tuple[Any, ...]) -> Any:
    try:
        return _functions[name](*arguments)
    except BaseException as error:
        raise _sendable(error, pickle.dumps) from error.__cause__
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
