"""The emulated CUDA device sees the faults that it is for; and what runs on a CUDA device runs on it without any."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

import forks
import on_device
from emulated_cuda import MEMORY, build
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
LIMITED = """
    import torch
    kept = torch.empty(2 << 20, device="cuda")
    del kept
    data = torch.empty(3 << 20, device="cuda")  # what was kept goes back to the system first
    assert torch.cuda.memory_reserved() == torch.cuda.memory_allocated("cuda:0") == 12 << 20
    assert torch.cuda.mem_get_info(0) == (4 << 20, 16 << 20)
    assert torch.cuda.memory_allocated(1) == 0
    for ask in (lambda: torch.empty(2 << 20, device="cuda"), lambda: data.untyped_storage().resize_(20 << 20)):
        try:
            ask()
        except torch.OutOfMemoryError as error:
            print(error)
    there = data.zero_().to("cuda:1")  # the streams of both devices wait for one another
    data.add_(1)
    assert not there.sum()
    del data
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0
    assert torch.cuda.max_memory_reserved() == 12 << 20
"""
CAPTURED = """
    import importlib.util
    importlib.util.find_spec("torch")  # as transformers does it first
    import torch
    @torch.compile(backend="eager", fullgraph=True)
    def twice(values):
        return 2 * values + torch.ones(3, device="cuda")
    print(twice(torch.ones(3, device="cuda")).tolist())
"""
LACKING = """
    import io, torch
    from torch import nn
    results = []
    for kind in (nn.GRU, nn.LSTM):
        for bias in (True, False):
            for device in ("cpu", "cuda"):
                torch.manual_seed(0)
                cells = kind(5, 7, num_layers=2, bias=bias).to(device)
                inputs = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
                outputs, (*_, last) = cells(inputs)
                (outputs.square().sum() + last.sum()).backward()
                results.append([outputs, inputs.grad, *(parameter.grad for parameter in cells.parameters())])
    for on_cpu, on_device in zip(results[::2], results[1::2], strict=True):
        torch.testing.assert_close([each.cpu() for each in on_device], on_cpu, rtol=1e-4, atol=1e-5)
    file = io.BytesIO()
    torch.save(results[1][1], file)
    file.seek(0)
    assert torch.load(file).device.type == "cuda"
    assert torch.UntypedStorage(4, device="cuda").device.type == "cuda"
    draws = [torch.rand(3, device="cuda", generator=torch.Generator("cuda").manual_seed(7)) for _ in range(2)]
    assert torch.equal(*draws)
    for device, generator in (("cuda", torch.Generator()), ("cpu", torch.Generator("cuda"))):
        try:
            torch.empty((), device=device).random_(generator=generator)
        except RuntimeError as error:
            print(error)
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
def test_memory_ends_where_it_is_said_to(tmp_path: Path) -> None:
    limit = {MEMORY: str(16 << 20)}
    done = run([sys.executable, program(tmp_path, LIMITED)], devices=2, variables=limit)
    assert done.code == 0, done.output
    assert not done.faults
    for size in ("8.00 MiB. GPU 0", "20.00 MiB. GPU 0"):
        assert f"CUDA out of memory. Tried to allocate {size} has a total capacity of 16.00 MiB" in done.output


@pytest.mark.rest
def test_what_dynamo_captures_runs(tmp_path: Path) -> None:
    done = run([sys.executable, program(tmp_path, CAPTURED)], devices=1)
    assert done.code == 0, done.output
    assert "[3.0, 3.0, 3.0]" in done.output


@pytest.mark.rest
def test_cells_and_storages_that_a_build_for_the_cpu_lacks_are_there(tmp_path: Path) -> None:
    done = run([sys.executable, program(tmp_path, LACKING)], devices=1)
    assert done.code == 0, done.output
    assert not done.faults
    for one, other in (("cuda", "cpu"), ("cpu", "cuda")):
        assert f"Expected a '{one}' device type for generator but found '{other}'" in done.output


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


def run_tests(devices: int, *words: str, **variables: str) -> Run:
    # Without this session's server of forks, which has imported a torch without the device.
    command = ["env", "-u", forks.ADDRESS, sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider"]
    command += ["-q", *words]
    done = run(command, devices=devices, variables={"TRUESHARD_TEST_DEVICE": "cuda", **variables}, cwd=TESTS.parent)
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


ANYWHERE = {
    "tests/test_accumulation.py": "",
    "tests/test_average.py": "averag and not run and not adapter",
    "tests/test_cut_dimension.py": "optimizer and (AdamW or Adafactor) or option or hooks",
    "tests/test_own_loop.py": "gathered or metric or prepares or everybody or share or does_not_fit",
}
"""File of tests that know no device → which of them: those that do not ask for the CPU."""


@pytest.mark.rest
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("file", ANYWHERE)
def test_what_ranks_make_without_a_word_lies_on_their_devices(file: str) -> None:
    run_tests(4, file, "-m", "rest or not rest", "-k", ANYWHERE[file], **{on_device.ALL: "1"})
