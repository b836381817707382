"""Start Python programs as forks of a process that has imported torch and transformers already.

    forks.run([sys.executable, "-m", "trueshard", "plan", …], capture_output=True, text=True)
    forks.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)

These are `subprocess.run` and `subprocess.Popen`, with processes that start in a tenth of a second. A command line that
a fork cannot stand for is started for real. `subprocess` itself stays as it is, for tests of the start.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ADDRESS = "TRUESHARD_TESTS_FORKS"
"""Environment variable with the path of the server's socket, for the processes that share a session's server."""
#: An answer: s and the process id of what has started (0: it is to be started for real), e and an exit code.
HEAD = struct.Struct("!cq")
START_LIMIT = 240.0
"""Seconds for the server to import what it imports, on a busy machine."""


class Server:
    """The fork server of this session. It leaves when this process does."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="forks-"))
        self.address = str(self.folder / "socket")
        self.log = self.folder / "log"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with listener, self.log.open("wb") as log:
            listener.bind(self.address)
            listener.listen(64)
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("forks_server.py")), str(listener.fileno())],
                env=_environment(),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


_server: Server | None = None


def start_server() -> str:
    """The address of this session's server, which is started if it is not there."""
    global _server
    if ADDRESS not in os.environ:
        _server = Server()
        os.environ[ADDRESS] = _server.address
    return os.environ[ADDRESS]


def stop_server() -> None:
    """End the server, if this process has started it."""
    global _server
    if _server is not None:
        os.environ.pop(ADDRESS, None)
        _server.close()
        _server = None


class Popen(subprocess.Popen):
    """A `subprocess.Popen` whose process the server has forked."""

    _line: socket.socket | None = None

    def _execute_child(self, args: Any, *more: Any) -> None:
        import forks_child

        asked = forks_child._signature.bind(self, args, *more).arguments
        command = [os.fsdecode(word) for word in args] if isinstance(args, list | tuple) else [os.fsdecode(args)]
        plain = asked["preexec_fn"] is None and not asked["shell"] and asked["executable"] is None
        inside = forks_child._origin is not None and ADDRESS not in os.environ
        if inside or not plain or command[0] != sys.executable:
            super()._execute_child(args, *more)
            return
        environment = dict(os.environ) if asked["env"] is None else forks_child._decoded(asked["env"])
        address = start_server()
        pairs = {number: number for number in asked["pass_fds"]}
        inputs = [asked[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        pairs |= {target: source if source != -1 else target for target, source in enumerate(inputs)}
        request = {
            "command": command,
            "environment": environment,
            "folder": os.path.join(os.getcwd(), os.fsdecode(asked["cwd"] or "")),
            "numbers": list(pairs),
            "session": bool(asked["start_new_session"]),
            "ignored": forks_child.ignored_signals(),
        }
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        line.connect(address)
        socket.send_fds(line, [pickle.dumps(request)], list(pairs.values()))
        line.settimeout(START_LIMIT)
        answer = line.recv(HEAD.size)
        kind, self.pid = HEAD.unpack(answer) if answer else (b"e", -1)
        if kind != b"s":
            raise RuntimeError("the fork server could not start a program: " + _said(address))
        if self.pid == 0:
            line.close()
            super()._execute_child(args, *more)
            return
        self._line, self._child_created = line, True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(asked[name] for name in ends))

    def _internal_poll(self, *state: Any, **more: Any) -> int | None:
        if self._line is None:
            return super()._internal_poll(*state, **more)
        with self._waitpid_lock:
            if self.returncode is None:
                if self._line.fileno() < 0:  # this object was garbage, and `subprocess` still looks after it
                    self.returncode = -9
                elif select.select([self._line], [], [], 0)[0]:
                    self._end()
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self._line is None:
            return super()._wait(timeout)
        until = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            left = None if until is None else max(0.0, until - time.monotonic())
            if not select.select([self._line], [], [], left)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self._internal_poll()
        return self.returncode

    def _end(self) -> None:
        assert self._line is not None
        answer = self._line.recv(HEAD.size)
        # A server that is gone has killed its children.
        _, self.returncode = HEAD.unpack(answer) if answer else (b"e", -9)
        self._line.close()


def adopt(module: Any) -> None:
    """Let the programs that a module of the library starts with `subprocess.Popen` be forks, too."""
    module.subprocess = types.SimpleNamespace(**vars(subprocess) | {"Popen": Popen})


def run(
    command: Any,
    *,
    input: Any = None,
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **more: Any,
) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run` of a `Popen` of here."""
    if input is not None:
        more["stdin"] = subprocess.PIPE
    if capture_output:
        more |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(command, **more) as process:
        try:
            out, err = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def _environment() -> Mapping[str, str]:
    """The server's: without devices and network, and with one thread."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {key: value for key, value in os.environ.items() if key not in launcher} | {
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin while others have the cores make all slow
        "GOMP_SPINCOUNT": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "ARROW_DEFAULT_MEMORY_POOL": "system",  # another would have a thread
    }


def _said(address: str) -> str:
    with contextlib.suppress(OSError):
        return Path(address).with_name("log").read_text(errors="replace")[-4000:]
    return ""
