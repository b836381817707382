"""Two hosts: network namespaces of this machine, joined by a cable that can be cut."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from messages import lacking
from running import end, metrics, project, start, wait_for_steps

ADDRESSES = ("10.213.77.1", "10.213.77.2")
TIMEOUT = 10
"""Seconds that a rank waits for another: more than a slow machine needs for a step."""
TORCHRUN = """
import ctypes, os, sys
from torch.distributed.run import main
host = os.open(f"/run/netns/{sys.argv.pop(1)}", os.O_RDONLY)
libc = ctypes.CDLL(None, use_errno=True)
if libc.setns(host, 0x40000000):  # CLONE_NEWNET
    raise OSError(ctypes.get_errno(), "setns")
main()
"""
"""torchrun on the host that its first argument names, as with `ip netns exec`; but a fork can stand for it."""


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Two namespaces with an interface of the same name in each, joined by veth."""
    if shutil.which("ip") is None:
        pytest.skip("two hosts need the ip command (iproute2)")
    names = f"trueshard-{os.getpid()}-a", f"trueshard-{os.getpid()}-b"
    made: list[str] = []
    try:
        for name in names:
            try:
                ip("netns", "add", name)
            except OSError as error:
                pytest.skip(f"network namespaces are not permitted here ({error})")
            made.append(name)
        ip("link", "add", "veth", "netns", names[0], "type", "veth", "peer", "name", "veth", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "veth")
            for interface in ("lo", "veth"):
                ip("-n", name, "link", "set", interface, "up")
        yield names
    finally:
        for name in made:
            ip("netns", "del", name)


def train(folder: Path, hosts: tuple[str, str], steps: int) -> list[subprocess.Popen[str]]:
    """The same command on both hosts."""
    nodes = ("--nnodes", "2", "--nproc-per-node", "1", "--master-addr", ADDRESSES[0], "--master-port", "29511")
    options = (f"run.timeout={TIMEOUT}", f"train.steps={steps}")
    return [
        start(
            folder,
            *(f"--set={option}" for option in options),
            python=("-c", TORCHRUN, host, *nodes, "--node-rank", str(rank), "-m", "trueshard"),
            GLOO_SOCKET_IFNAME="veth",
        )
        for rank, host in enumerate(hosts)
    ]


@pytest.mark.timeout(180)
@pytest.mark.rest
def test_cut_link_is_a_clear_error_on_both_hosts_and_the_same_command_goes_on(
    hosts: tuple[str, str], tmp_path: Path
) -> None:
    folder = project(tmp_path / "shared")
    processes = train(folder, hosts, steps=100_000)
    wait_for_steps(folder, processes[0], 30)
    ip("-n", hosts[1], "link", "set", "veth", "down")
    for rank, process in enumerate(processes):
        code, _, err = end(process, limit=60)
        assert code == 1
        told = [line for line in err.splitlines() if line.startswith("trueshard:")]
        assert len(told) == 1, err
        assert lacking(told[0], f"rank {rank}", "the same command", "newest checkpoint") == []

    ip("-n", hosts[1], "link", "set", "veth", "up")
    taken = len(metrics(folder))
    results = [end(process) for process in train(folder, hosts, steps=taken + 5)]
    assert [code for code, _, _ in results] == [0, 0], results
    assert re.search(r"Resumed after step \d+", results[0][1])
    assert [record["step"] for record in metrics(folder)] == list(range(1, taken + 6))
