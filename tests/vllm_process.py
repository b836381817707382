"""A server of vLLM for processors, in the environment that `make vllm` makes: it needs another transformers."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from added_environment import python_of

START_LIMIT = 240
"""Seconds for a server to answer."""
VARIABLES = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
_OURS = re.compile(r"PYTHONPATH|RANK|WORLD_SIZE|LOCAL_RANK|MASTER_\w+")


@contextlib.contextmanager
def serving(model: Path, log: Path, *options: str) -> Iterator[str]:
    """The address of a server of ``model``; skips the test if it does not start on this machine."""
    place = Path(python_of("vllm")).parent
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["nice", str(place / "python"), str(place / "vllm"), "serve", str(model)]
    words += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager", *options]
    kept = {key: value for key, value in os.environ.items() if not _OURS.fullmatch(key)}
    with log.open("wb") as output:
        process = subprocess.Popen(words, stdout=output, stderr=output, env=kept | VARIABLES, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        if not _answers(url, process):
            pytest.skip(f"vllm-cpu does not serve on this machine: {log.read_text(errors='replace')[-500:]}")
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _answers(url: str, process: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + START_LIMIT
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
        time.sleep(0.5)
    return False
