"""How the launchers of real clusters hand out devices, and what a rank that hangs on one says."""

from __future__ import annotations

import socket
import sys
import textwrap
from pathlib import Path

import pytest

from emulated_cuda import build
from emulated_cuda.running import run

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="needs a C++ compiler: install g++, or set CXX")

STARTS = """
import os, subprocess, sys
codes = []
for rank in range(2):
    own = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[1]}
    own["CUDA_VISIBLE_DEVICES"] = sys.argv[2].split(",")[rank]
    codes.append(subprocess.Popen([sys.executable, sys.argv[3]], env=os.environ | own))
sys.exit(max(process.wait(60) for process in codes))
"""
TRAINS = """
import logging, os, time, torch, trueshard
logging.basicConfig()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
trueshard.shard(model, optimizer)
model(torch.ones(2, 8, device="cuda")).sum().backward()
optimizer.step()
print(f"trained on {torch.cuda.current_device()}\\n", end="", flush=True)  # in one piece, beside the other process
"""


def written(folder: Path, name: str, text: str) -> str:
    file = folder / name
    file.write_text(textwrap.dedent(text))
    return str(file)


@pytest.mark.rest
@pytest.mark.parametrize(("visible", "code"), [("3,5", 0), ("3,3", 1)])
def test_each_process_may_see_its_own_device_alone(tmp_path: Path, visible: str, code: int) -> None:
    """As Slurm's ``--gpus-per-task``, Kubernetes and MIG do it, without LOCAL_RANK; but not one for two."""
    starts, trains = written(tmp_path, "starts.py", STARTS), written(tmp_path, "trains.py", TRAINS)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    done = run([sys.executable, starts, str(port), visible, trains], devices=1)
    assert done.code == code, done.output
    assert done.output.count("trained on 0") == (0 if code else 2)
    if code:
        assert "ranks 0 and 1 have the same device (GPU-3 of " in done.output
        assert "CUDA_VISIBLE_DEVICES" in done.output


@pytest.mark.rest
def test_more_processes_than_devices_are_refused(tmp_path: Path) -> None:
    done = run([written(tmp_path, "trains.py", TRAINS)], devices=2, processes=3)
    assert done.code == 1
    assert "this machine has 2 devices, and LOCAL_RANK is 2" in done.output


@pytest.mark.rest
def test_a_group_for_processors_alone_stays_on_them(tmp_path: Path) -> None:
    """Torch says of it that it serves CUDA, too."""
    program = """
        import torch, torch.distributed as dist, trueshard
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model = torch.nn.Linear(8, 8)
        trueshard.shard(model)
        print("on", next(model.parameters()).device.type)
    """
    done = run([sys.executable, written(tmp_path, "gloo.py", program)], devices=1)
    assert done.code == 0, done.output
    assert "on cpu" in done.output


HANGS = """
from trueshard.sharding import stall_watch
stall_watch.PATIENCE = 1.5
rank = int(os.environ["RANK"])
for step in range(3):
    if rank == 1 and step == 2:
        time.sleep(12)
    loss = model(torch.ones(2, 8, device="cuda")).sum()
    loss.backward()
    optimizer.step()
    loss.item()
"""


@pytest.mark.rest
def test_a_rank_that_does_not_come_is_named_though_collectives_return_at_once(tmp_path: Path) -> None:
    begin, shards, end = TRAINS.partition("trueshard.shard(model, optimizer)\n")
    watched = "from trueshard.sharding import stall_watch\nstall_watch.PATIENCE = 1.5\n"
    done = run([written(tmp_path, "hangs.py", begin + watched + shards + end + HANGS)], devices=2, processes=2)
    assert done.code == 0, done.output
    (line,) = {line for line in done.output.splitlines() if "ranks have waited" in line}
    assert "rank 1 hangs.py:" in line
    assert "(slowest)" in line
    assert "rank 0 in " in line


STUCK = """
rank = int(os.environ["RANK"])
for step in range(3):
    loss = model(torch.ones(2, 8, device="cuda")).sum()
    loss.backward()
    optimizer.step()
    if step == 2:
        torch.cuda._sleep(9_000_000_000)  # longer than the time limit
    loss.item()
"""


@pytest.mark.rest
def test_a_device_that_does_not_end_its_work_is_told_with_the_files_of_the_flight_recorder(tmp_path: Path) -> None:
    """All ranks stand at the same place, as after a hung kernel: said once, shortly before the time limit."""
    begin, shards, end = TRAINS.partition("trueshard.shard(model, optimizer)\n")
    limited = """
from datetime import timedelta
from trueshard.sharding import stall_watch
stall_watch.PATIENCE = 1.5
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.distributed.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(seconds=7))
"""
    script = written(tmp_path, "stuck.py", begin.replace("model =", limited + "model =") + shards + end + STUCK)
    variables = {"XDG_CACHE_HOME": str(tmp_path)}
    done = run([script], devices=2, processes=2, variables=variables)
    assert done.code == 0, done.output
    (line,) = {line for line in done.output.splitlines() if "ranks have waited" in line}
    place = script.rsplit("/", 1)[1] + f":{Path(script).read_text().splitlines().index('    loss.item()') + 1}"
    assert f"ranks 0-1 in work that the device has not ended, {place}; the time limit of 7 s ends this run" in line
    assert f"NCCL leaves the last collectives of each rank in {tmp_path}/torch/comm_lib_trace_rank_*" in line
    off = run([script], devices=2, processes=2, variables=variables | {"TORCH_FR_BUFFER_SIZE": "0"})
    assert "ends this run" in off.output
    assert "torchfrtrace" not in off.output
