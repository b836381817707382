"""Ranks that are forks of a spare: to whoever starts them they are what it would have started itself."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from trueshard.launching import Spare, python_command, run_ranks

RANK = """
import json, os, signal, sys, threading, time
from pathlib import Path
from trueshard.launching import wait_to_begin
imported, folder, way = os.getpid(), Path(sys.argv[1]), sys.argv[2]
if way.startswith("CUDA"):
    import torch
if "TRUESHARD_SPARE" in os.environ:
    if way == "a thread":
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    if way == "CUDA is used":
        torch.zeros(1, device="cuda")
    wait_to_begin()
if way.startswith("CUDA"):
    assert torch.ones(2, device="cuda").sum().item() == 2
rank = os.environ["RANK"]
told = {"parent": os.getppid(), "session": os.getsid(0), "pid": os.getpid(), "forked": imported != os.getpid()}
(folder / f"{os.environ['TURN']}-{rank}").write_text(json.dumps(told | {"ranks": os.environ["WORLD_SIZE"]}))
if rank == "1":
    while not (folder / f"{os.environ['TURN']}-0").exists():  # the end of this rank ends the other
        time.sleep(0.01)
    time.sleep(0.1)
    sys.exit(3) if os.environ["TURN"] == "0" else os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""


ON_CUDA = pytest.mark.skipif(os.environ.get("TRUESHARD_TEST_DEVICE") != "cuda", reason="needs a CUDA device")
ON_CUDA_TOO = [pytest.param(f"CUDA is {what}", marks=ON_CUDA) for what in ("left alone", "used")]


@pytest.mark.parametrize("way", ["nothing", "a thread", *ON_CUDA_TOO])
def test_ranks_of_every_start_are_forks_of_one_spare_and_children_of_the_launcher(way: str, tmp_path: Path) -> None:
    command = python_command(RANK, str(tmp_path), way)
    spare = Spare(command, 2)
    try:
        for turn, code in enumerate((3, -signal.SIGKILL)):
            ended = run_ranks(command, 2, environment={"TURN": str(turn)}, spare=spare)
            assert ended.codes == {1: code}
            ranks = [json.loads((tmp_path / f"{turn}-{rank}").read_text()) for rank in range(2)]
            assert [each["parent"] for each in ranks] == [os.getpid()] * 2
            assert [each["session"] for each in ranks] == [each["pid"] for each in ranks]
            assert [each["forked"] for each in ranks] == [way in ("nothing", "CUDA is left alone")] * 2
            assert not any(psutil.pid_exists(each["pid"]) for each in ranks)
    finally:
        spare.close()
    # Without it, processes are started.
    ended = run_ranks(command, 2, environment={"TURN": "0"}, spare=spare)
    assert ended.codes == {1: 3}
    assert json.loads((tmp_path / "0-0").read_text())["forked"] is False
