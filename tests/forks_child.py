"""A forked process that becomes a Python program, as if the interpreter had just started it.

- `Program.of` reads a command line; what a fork cannot stand for (other interpreters, their options, variables that are
  read when a module is imported) is none, and starts for real.
- `Origin` is what a fresh process has: it is recorded once, after the imports, and each child is put back to it.
- `become` never returns. Programs that the child starts in turn are forked where they are started (`adopt`), so that
  they are its children, in the sight of `waitpid`, signals and psutil.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import faulthandler
import functools
import gc
import importlib.machinery
import inspect
import logging
import os
import random
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

READ_ON_IMPORT = ("LD_", "MALLOC_", "GLIBC_", "PYTHON", "HF_", "TRANSFORMERS_", "TORCH", "MKL_", "KMP_", "GOMP_")
READ_ON_IMPORT += (
    "OMP_",
    "OPENBLAS_",
    "MPL",
    "TERMINAL_WIDTH",
    "TYPER_",
    "LC_",
    "LANG",
    "HOME",
    "XDG_CACHE_HOME",
    "EMULATED_",
)
"""What the names of environment variables begin with that mean nothing after the imports."""
READ_LATER = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PYTHONPATH", "HF_HUB_OFFLINE", "TORCHELASTIC", "TORCH_NCCL")
READ_LATER += ("TORCHINDUCTOR_CACHE_DIR", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""Exceptions: set anew in each child, the same in every test, or read when used."""


@dataclass(frozen=True)
class Program:
    """What an interpreter is asked to run."""

    kind: str
    """module, code or script"""
    what: str
    arguments: tuple[str, ...]
    command: tuple[str, ...]
    unbuffered: bool = False

    @classmethod
    def of(cls, command: Sequence[str]) -> Program | None:
        """The program of a command line; None for one of another interpreter, or with options of it."""
        if command[0] != sys.executable:
            return None
        words, unbuffered = list(command[1:]), False
        while words and words[0] in ("-u", "-B"):
            unbuffered |= words.pop(0) == "-u"
        if len(words) > 1 and words[0] in ("-m", "-c"):
            return cls("module" if words[0] == "-m" else "code", words[1], tuple(words[2:]), tuple(command), unbuffered)
        if words and not words[0].startswith("-"):
            return cls("script", words[0], tuple(words[1:]), tuple(command), unbuffered)
        return None


class Origin:
    """The state of this process, taken when all is imported, as `restore` makes it again."""

    def __init__(
        self, at_exit: list[tuple[Callable[..., Any], Any, Any]], path: list[str], environment: dict[str, str]
    ) -> None:
        self.at_exit, self.path, self.environment = at_exit, path, environment
        self.process = sys.modules["multiprocessing.process"]._current_process
        self.modules = set(sys.modules)
        self.tops = {name for name in sys.modules if "." not in name}
        self.filters = list(warnings.filters)
        self.loggers = {name: _settings(each) for name, each in _loggers().items()}
        self.finalizers = dict(weakref.finalize._registry)
        self.meta_path, self.path_hooks = list(sys.meta_path), list(sys.path_hooks)
        self.thresholds = gc.get_threshold()

    def stands_for(self, program: Program, environment: Mapping[str, str], folder: str) -> bool:
        """Whether a fork can stand for a fresh interpreter with this environment."""
        keys = {*environment, *self.environment}
        changed = {key for key in keys if environment.get(key) != self.environment.get(key)}
        if any(key.startswith(READ_ON_IMPORT) and not key.startswith(READ_LATER) for key in changed):
            return False
        if Path("/dev/nvidiactl").exists() and environment.get("CUDA_VISIBLE_DEVICES") != "":
            return False
        first = Path(folder, program.what).parent if program.kind == "script" else Path(folder)
        places = [first, *(Path(folder, each) for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each)]
        return not any(self._shadows(place) for place in places if str(place) not in self.path)

    def _shadows(self, place: Path) -> bool:
        """Whether a folder has another module of a name that is imported."""
        with contextlib.suppress(OSError):
            for each in os.scandir(place):
                name, _, kind = each.name.partition(".")
                if name in self.tops and (kind == "py" or Path(each.path, "__init__.py").exists()):
                    file = getattr(sys.modules[name], "__file__", None) or ""
                    if not file.startswith(str(Path(place).resolve())):
                        return True
        return False

    def restore(self) -> None:
        """Undo what the parent's program has changed in this process."""
        import torch

        _forget_what_parents_hold()
        sys.modules["multiprocessing.process"]._current_process = self.process
        atexit._clear()
        for function, args, kwargs in self.at_exit:
            atexit.register(function, *args, **kwargs)
        _KEPT.append(dict(weakref.finalize._registry))
        weakref.finalize._registry.clear()
        weakref.finalize._registry.update(self.finalizers)
        warnings.resetwarnings()
        warnings.filters.extend(self.filters)
        for name, logger in _loggers().items():
            level, handlers, filters, propagate, disabled = self.loggers.get(
                name, (logging.NOTSET, [], [], True, False)
            )
            _KEPT.append(logger.handlers)
            logger.handlers, logger.filters = list(handlers), list(filters)
            logger.propagate, logger.disabled = propagate, disabled
            logger.setLevel(level)
        for name, module in list(sys.modules.items()):
            if name not in self.modules and not _is_installed(module):
                _KEPT.append(sys.modules.pop(name))
            elif name.startswith("trueshard"):
                clear_caches(module)
        sys.meta_path[:], sys.path_hooks[:] = self.meta_path, self.path_hooks
        sys.excepthook, threading.excepthook = sys.__excepthook__, threading.__excepthook__
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(False)
        gc.set_threshold(*self.thresholds)


_PYTHON_IGNORES = {signal.SIGPIPE, signal.SIGXFSZ}
_KEPT: list[Any] = []
"""What the parent's objects were, never freed: their ends would reach into files and threads that are the parent's."""
_origin: Origin | None = None
_execute = subprocess.Popen._execute_child
_signature = inspect.signature(_execute)


def adopt(origin: Origin) -> None:
    """From here on, the programs that this process starts are forks of it, where a fork can stand for them."""
    global _origin
    from multiprocessing import util

    _origin = origin
    subprocess.Popen._execute_child = _fork_in_place
    util.spawnv_passfds = functools.partial(_spawn, util.spawnv_passfds)


def _fork_in_place(self: Any, *arguments: Any) -> None:
    """`Popen._execute_child`, with a fork for an exec."""
    asked = _signature.bind(self, *arguments).arguments
    found = _found_here(asked)
    if found is None:
        _execute(self, *arguments)
        return
    program, environment, folder = found
    inputs = [asked[name] for name in ("p2cread", "c2pwrite", "errwrite")]
    pairs = {number: number for number in asked["pass_fds"]}
    pairs |= {target: source if source != -1 else target for target, source in enumerate(inputs)}
    session = bool(asked["start_new_session"])
    ready, told = os.pipe()  # at its end when the child is in its session, as Popen returns after the exec
    pid = _forked()
    if pid == 0:
        become(program, environment, folder, pairs, session=session, nested=True, ignored=ignored_signals())
    os.close(told)
    os.read(ready, 1)
    os.close(ready)
    self.pid, self._child_created = pid, True
    self._close_pipe_fds(
        *(asked[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"))
    )


def _found_here(asked: Mapping[str, Any]) -> tuple[Program, Mapping[str, str], str] | None:
    """(program, environment, folder) of a start that a fork of this process can stand for."""
    plain = asked["preexec_fn"] is None and not asked["shell"] and asked["umask"] < 0
    plain = plain and all(asked[name] is None for name in ("gid", "gids", "uid", "executable"))
    plain = plain and asked.get("process_group", -1) in (-1, None) and asked["close_fds"]
    words = [asked["args"]] if isinstance(asked["args"], str | bytes | os.PathLike) else list(asked["args"])
    program = Program.of([os.fsdecode(word) for word in words]) if plain else None
    environment = dict(os.environ) if asked["env"] is None else _decoded(asked["env"])
    folder = os.getcwd() if asked["cwd"] is None else os.path.join(os.getcwd(), os.fsdecode(asked["cwd"]))
    if program is None or not os.path.isdir(folder) or not _can_fork(program, environment, folder):
        return None
    return program, environment, folder


def _can_fork(program: Program, environment: Mapping[str, str], folder: str) -> bool:
    """Whether this process, with what it did so far, is one to fork."""
    import torch

    assert _origin is not None
    if torch.distributed.is_initialized():
        return False  # its threads and connections
    # A pool of OpenMP threads is lost in a fork, and a child that would use it waits for ever.
    if (
        environment.get("OMP_NUM_THREADS") != "1"
        and torch.get_num_threads() > 1
        and len(os.listdir("/proc/self/task")) > 1
    ):
        return False
    return _origin.stands_for(program, environment, folder)


def _spawn(original: Callable[..., int], path: bytes, words: Sequence[Any], numbers: Sequence[int]) -> int:
    """`multiprocessing.util.spawnv_passfds`, with a fork for the processes of "spawn", and for the "forkserver"."""
    command = [os.fsdecode(word) for word in words]
    program = Program.of(command)
    of_multiprocessing = program is not None and ("spawn_main" in program.what or ".forkserver" in program.what)
    if program is None or not of_multiprocessing or not _can_fork(program, os.environ, os.getcwd()):
        return original(path, words, numbers)
    pid = _forked()
    if pid == 0:
        pairs = {number: number for number in (0, 1, 2, *numbers)}
        ignored = ignored_signals()
        become(program, dict(os.environ), os.getcwd(), pairs, session=False, nested=True, ignored=ignored)
    return pid


def _forked() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a fork beside threads: the child uses nothing of theirs
        return os.fork()


def become(
    program: Program,
    environment: Mapping[str, str],
    folder: str,
    pairs: Mapping[int, int],
    *,
    session: bool,
    nested: bool,
    ignored: Sequence[int],
    origin: Origin | None = None,
    started: Callable[[], None] = lambda: None,
) -> NoReturn:
    """Be the program, in a process that was just forked, and end the process with it.

    Args:
        pairs: the file descriptors that the program has, and those of this process that they are.
        nested: whether a program ran in this process before the fork.
        ignored: the signals that whoever starts the program ignores: a process inherits that.
        started: called when other processes can see that the program has started.
    """
    origin = origin or _origin
    code = 1
    try:
        assert origin is not None
        if session:
            os.setsid()
        _reset_signals(ignored)
        if nested:
            _drop_what_parents_print()
        started()
        _arrange(pairs, nested)
        gc.freeze()  # no end of an object of the parent's
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        time.tzset()
        if nested:
            origin.restore()
        adopt(origin)
        code = contextvars.Context().run(_run, program, origin)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def ignored_signals() -> list[int]:
    """The numbers of the signals that this process ignores, but those that Python itself does."""
    return [int(each) for each in signal.valid_signals() - _PYTHON_IGNORES if signal.getsignal(each) is signal.SIG_IGN]


def _reset_signals(ignored: Sequence[int]) -> None:
    signal.set_wakeup_fd(-1)
    faulthandler.disable()
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(RuntimeError):  # of signals that are enabled, not registered
            faulthandler.unregister(number)
        with contextlib.suppress(OSError, ValueError):  # of the C library's own
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (*_PYTHON_IGNORES, *ignored):
        signal.signal(number, signal.SIG_IGN)


def _drop_what_parents_print() -> None:
    """Empty the buffers of what the parent has printed and not yet written."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    saved = [os.dup(1), os.dup(2)]
    for number in (1, 2):
        os.dup2(nowhere, number)
    _KEPT.append((sys.stdin, sys.stdout, sys.stderr))
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(Exception):
            stream.flush()
    for number, source in zip((1, 2), saved, strict=True):
        os.dup2(source, number)


def _arrange(pairs: Mapping[int, int], nested: bool) -> None:
    """Give the file descriptors their numbers, and close all others.

    Those of a program that ran here before lead nowhere instead: its objects that end later close their numbers, which
    must not be those of files that were opened since.
    """
    import fcntl

    above = max(*pairs, 2) + 1
    high = {target: fcntl.fcntl(source, fcntl.F_DUPFD, above) for target, source in pairs.items()}
    for target, source in high.items():
        os.dup2(source, target, inheritable=True)
    nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number in sorted(map(int, os.listdir("/proc/self/fd"))):
        if number <= 2 or number in pairs or number == nowhere:
            continue
        with contextlib.suppress(OSError):  # that of the listing itself is closed already
            if nested and number not in high.values():
                fcntl.fcntl(number, fcntl.F_GETFD)
                os.dup2(nowhere, number, inheritable=False)
            else:
                os.close(number)
    os.close(nowhere)


def _run(program: Program, origin: Origin) -> int:
    """The exit code of the program, run as the interpreter runs it from first to last."""
    import torch

    torch.set_num_threads(_threads())
    tempfile.tempdir = None  # TMPDIR may be another
    torch.seed()
    random.seed()
    sys.modules["numpy"].random.seed()
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    line_by_line = program.unbuffered or os.isatty(1)
    sys.stdout.reconfigure(line_buffering=line_by_line, write_through=program.unbuffered)
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=sys.modules["builtins"], __annotations__={})
    _KEPT.append(sys.modules["__main__"])
    sys.modules["__main__"] = main
    first = {"module": os.getcwd(), "code": "", "script": str(Path(program.what).absolute().parent)}[program.kind]
    inherited = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    sys.path[:] = [first, *(os.path.abspath(each) for each in inherited), *origin.path]
    sys.argv = [{"module": "-m", "code": "-c"}.get(program.kind, program.what), *program.arguments]
    sys.orig_argv = list(program.command)
    sys.path_importer_cache.clear()
    code = _code_of(lambda: _execute_main(program, main))
    with _told():
        threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = 120
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def _execute_main(program: Program, main: types.ModuleType) -> None:
    if program.kind == "module":
        existing = sys.modules.get(program.what)
        if existing is not None and not hasattr(existing, "__path__"):
            del sys.modules[program.what]
        runpy._run_module_as_main(program.what)
        return
    name = "<string>"
    if program.kind == "script":
        name = str(Path(program.what).absolute())
        try:
            source: Any = Path(program.what).read_bytes()
        except OSError as error:
            why = f"[Errno {error.errno}] {error.strerror}"
            print(f"{sys.executable}: can't open file {name!r}: {why}", file=sys.stderr)
            sys.exit(2)
        main.__dict__.update(
            __file__=name, __cached__=None, __loader__=importlib.machinery.SourceFileLoader("__main__", name)
        )
    else:
        source = program.what
    exec(compile(source, name, "exec", dont_inherit=True), main.__dict__)


def _code_of(call: Callable[[], None]) -> int:
    """The exit code of an interpreter that ends so; below 0 for a signal."""
    try:
        call()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        with _told():
            sys.excepthook(type(error), error.with_traceback(frames), frames)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


@contextlib.contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except BaseException:
        import traceback

        traceback.print_exc()


def _threads() -> int:
    """How many threads OpenMP would take."""
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(asked) if asked.isdigit() and int(asked) else len(os.sched_getaffinity(0))


def _forget_what_parents_hold() -> None:
    """Processes, threads and their bookkeeping, of which this process has none."""
    from concurrent.futures import thread
    from multiprocessing import process, resource_tracker

    _KEPT.append((process._children, subprocess._active, dict(thread._threads_queues)))
    process._children = set()
    subprocess._active = []
    thread._threads_queues.clear()
    tracker = resource_tracker._resource_tracker
    tracker._fd = tracker._pid = None


def _loggers() -> dict[str, logging.Logger]:
    named = {name: each for name, each in logging.root.manager.loggerDict.items() if isinstance(each, logging.Logger)}
    return {"": logging.root, **named}


def _settings(logger: logging.Logger) -> tuple[int, list[Any], list[Any], bool, bool]:
    return logger.level, list(logger.handlers), list(logger.filters), logger.propagate, logger.disabled


def _is_installed(module: Any) -> bool:
    """Whether a module is of the interpreter or of an installed package, not of a test or a user."""
    file = getattr(module, "__file__", None) or ""
    folders = (sys.prefix, sys.base_prefix, str(Path(__file__).parents[1] / "src"))
    return not file or str(file).startswith(folders) or "site-packages" in str(file)


def clear_caches(module: Any) -> None:
    """Clear the caches of the functions and methods of a module."""
    classes = [each for each in vars(module).values() if isinstance(each, type)]
    for place in (module, *classes):
        for value in list(vars(place).values()):
            function = getattr(value, "__func__", value)  # of a static method
            if isinstance(function, functools._lru_cache_wrapper):
                function.cache_clear()


def _decoded(environment: Mapping[Any, Any]) -> dict[str, str]:
    return {os.fsdecode(key): os.fsdecode(value) for key, value in environment.items()}
