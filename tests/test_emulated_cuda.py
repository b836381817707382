"""The emulated CUDA device sees the faults that it is for; and what runs on a CUDA device runs on it without any."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

import forks
from emulated_cuda import build
from emulated_cuda.running import Run, run

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="needs a C++ compiler: install g++, or set CXX")

TESTS = Path(__file__).parent
FAULTS = {
    "race: aten::mul": """
        with torch.cuda.stream(torch.cuda.Stream()):
            on_device.mul_(2)
    """,
    "reused: aten::zero_": """
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            twice = on_device * 2
        del on_device
        torch.zeros(1000, device="cuda")
    """,
    "unlanded: the host touches 4000 bytes": """
        print(on_device.to("cpu", non_blocking=True).sum())
    """,
    "overwritten: the host writes 4000 bytes": """
        pinned = torch.ones(1000).pin_memory()
        pinned.to("cuda", non_blocking=True)
        pinned[0] = 2
    """,
}
ORDERED = """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        twice = on_device * 2
    torch.cuda.current_stream().wait_stream(side)
    on_host = twice.to("cpu", non_blocking=True)
    torch.cuda.current_stream().synchronize()
    assert on_host.sum() == 2000
"""
COLLECTIVES = {
    "the first NCCL call of a group": """
        if rank < 2:
            dist.batch_isend_irecv([dist.P2POp(dist.isend if rank else dist.irecv, data, 1 - rank)])
        else:
            time.sleep(30)
    """,
    "all ranks must make the same collective": "dist.all_reduce(data[: 5 + rank])",
    "Tensors must be contiguous": "dist.all_reduce(data.view(10, 10).t())",
    "data type is not supported": "dist.all_reduce(data.short())",
}


def program(tmp_path: Path, *parts: str) -> str:
    file = tmp_path / "program.py"
    file.write_text("\n".join(textwrap.dedent(part) for part in parts))
    return str(file)


def test_each_fault_is_seen_once_and_what_is_ordered_is_none(tmp_path: Path) -> None:
    fresh = "import torch\ntorch.cuda.synchronize()\non_device = torch.ones(1000, device='cuda')"
    parts = [part for text in (ORDERED, *FAULTS.values()) for part in (fresh, text)]
    done = run([sys.executable, program(tmp_path, *parts)], devices=1, waits=True)
    assert done.code == 0, done.output
    assert len(done.faults) == len(FAULTS), done.faults
    for fault in FAULTS:
        assert [each for each in done.faults if each.startswith(f"1 × {fault}") and "program.py" in each], done.faults
    assert sum("Stream.synchronize" in each for each in done.waits) == 1


@pytest.mark.rest
@pytest.mark.parametrize("rule", COLLECTIVES)
def test_a_broken_rule_of_nccl_is_seen(tmp_path: Path, rule: str) -> None:
    head = """
import os, time, torch, torch.distributed as dist
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
data = torch.ones(100, device="cuda")
"""
    done = run([program(tmp_path, head, COLLECTIVES[rule])], devices=3, processes=3)
    assert done.code != 0
    assert any(rule in each for each in done.faults), done.output


def run_tests(devices: int, *words: str) -> Run:
    # Without this session's server of forks, which has imported a torch without the device.
    command = ["env", "-u", forks.ADDRESS, sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider"]
    command += ["-q", *words]
    done = run(command, devices=devices, variables={"TRUESHARD_TEST_DEVICE": "cuda"}, cwd=TESTS.parent)
    assert done.code == 0, done.output[-8000:]
    assert not done.faults
    return done


def test_some_features_on_two_devices() -> None:
    run_tests(2, "tests/test_cuda.py", "-m", "not rest")


@pytest.mark.rest
@pytest.mark.timeout(1200)
def test_every_feature() -> None:
    run_tests(3, "tests/test_cuda.py", "-m", "rest or not rest")


@pytest.mark.rest
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("devices", [1, 2])
def test_the_contract_of_a_device(devices: int) -> None:
    run_tests(devices, "tests/test_device.py", "-m", "not compiles")
