"""The process that imports once what programs of tests import, and forks a child for each of them.

It has one thread. Each connection is one program: the request comes with the file descriptors, the child answers with
its process id, and the exit code follows when it has ended. When the test session goes away, so do the children.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import pickle
import pkgutil
import selectors
import signal
import socket
import sys
from typing import Any, NoReturn

from forks import HEAD
from forks_child import Origin, Program, become

MODULES = [
    "torch",
    "torch.distributed.run",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "torch.distributed.launcher.api",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
    "torch._dynamo",
    "torch._subclasses.fake_tensor",
    "torch._subclasses.schema_check_mode",
    "torch.nn.modules.linear_cross_entropy",
    "torch.profiler._cupti_monitor",
    "torch.utils.flop_counter",
    "torch.testing",
    "numpy",
    "psutil",
    "rich.progress",
    "rich.table",
    "pytest",
    "hypothesis",
    "safetensors.torch",
    "yaml",
    "jinja2",
    "PIL.Image",
    "tokenizers",
    "datasets",
    "peft",
    "accelerate",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "pydantic.type_adapter",
    "fsspec.implementations.local",
    "fsspec.implementations.memory",
    "transformers",
    "transformers.models.llama.modeling_llama",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.auto.processing_auto",
    "transformers.models.auto.image_processing_auto",
    "transformers.tokenization_utils_fast",
    "transformers.trainer",
    "tensorboard.compat.proto.event_pb2",
    "torch.utils.tensorboard",
    "multiprocessing.spawn",
    "concurrent.futures.process",
]


def preload() -> Origin:
    """Import all, and take the state that every child starts from."""
    given = [os.path.abspath(each) for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    path = [each for each in sys.path if each not in ("", os.path.dirname(os.path.abspath(__file__)), *given)]
    environment = dict(os.environ)  # some modules add to it
    recorded: list[tuple[Any, Any, Any]] = []
    register = atexit.register

    def record(function: Any, *args: Any, **kwargs: Any) -> Any:
        recorded.append((function, args, kwargs))
        return register(function, *args, **kwargs)

    import logging  # registers its end before the recording starts

    recorded.append((logging.shutdown, (), {}))
    atexit.register = record
    names = list(MODULES)
    trueshard = importlib.import_module("trueshard")
    names += [each.name for each in pkgutil.walk_packages(trueshard.__path__, "trueshard.")]
    for name in names:
        if not name.endswith("__main__"):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    atexit.register = register
    return Origin(recorded, path, environment)


class Server:
    """Children by their process ids, and the connections that wait for their ends."""

    def __init__(self, listener: socket.socket, origin: Origin) -> None:
        self.listener, self.origin = listener, origin
        self.running: dict[int, tuple[socket.socket, bool]] = {}
        self.selector = selectors.DefaultSelector()
        woken, waker = os.pipe()
        os.set_blocking(waker, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker)
        self.selector.register(listener, selectors.EVENT_READ, self.accept)
        self.selector.register(woken, selectors.EVENT_READ, lambda: self.reap(woken))
        self.selector.register(0, selectors.EVENT_READ, self.leave)  # at its end when the session has ended

    def serve(self) -> NoReturn:
        while True:
            for key, _ in self.selector.select():
                key.data()

    def accept(self) -> None:
        connection, _ = self.listener.accept()
        message, descriptors, _, _ = socket.recv_fds(connection, 1 << 22, 64)
        if not message:
            connection.close()
            return
        request = pickle.loads(message)
        program = Program.of(request["command"])
        if program is None or not self.origin.stands_for(program, request["environment"], request["folder"]):
            connection.send(HEAD.pack(b"s", 0))
            connection.close()
        else:
            pairs = dict(zip(request["numbers"], descriptors, strict=True))
            session = request["session"]
            pid = os.fork()
            if pid == 0:
                become(
                    program,
                    request["environment"],
                    request["folder"],
                    pairs,
                    session=session,
                    nested=False,
                    ignored=request["ignored"],
                    origin=self.origin,
                    started=lambda: _answer(connection, os.getpid()),
                )
            self.running[pid] = connection, session
        for each in descriptors:
            os.close(each)

    def reap(self, woken: int) -> None:
        os.read(woken, 4096)
        while self.running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            connection, _ = self.running.pop(pid)
            with contextlib.suppress(OSError):
                connection.send(HEAD.pack(b"e", os.waitstatus_to_exitcode(status)))
            connection.close()

    def leave(self) -> NoReturn:
        for pid, (_, session) in self.running.items():
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if session else os.kill)(pid, signal.SIGKILL)
        os._exit(0)


def _answer(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):
        connection.send(HEAD.pack(b"s", number))


def main() -> NoReturn:
    listener = socket.socket(fileno=int(sys.argv[1]))
    origin = preload()
    gc.collect()
    gc.freeze()
    Server(listener, origin).serve()


if __name__ == "__main__":
    main()
