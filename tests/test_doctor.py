"""`trueshard doctor`: what it finds on this machine, and on one that is broken in a known way."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

import forks
from messages import lacking
from running import environment
from trueshard import doctor as examined
from trueshard import machine
from trueshard.cli import main
from trueshard.doctor import Finding, Report, processes

FACTS: dict[str, Any] = {
    "version": "2.13.0",
    "cuda": None,
    "hip": None,
    "gloo": True,
    "nccl": None,
    "accelerator": None,
    "gpus": [],
    "warnings": [],
}
#: Of a machine with two pairs of GPUs, as `nvidia-smi topo -m` prints it, escapes included.
TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV12\tSYS\tSYS\tPXB\t0-31\t0\t\tN/A
GPU1\tNV12\t X \tSYS\tSYS\tPXB\t0-31\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tNV12\tSYS\t32-63\t1\t\tN/A
GPU3\tSYS\tSYS\tNV12\t X \tSYS\t32-63\t1\t\tN/A
NIC0\tPXB\tPXB\tSYS\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def doctor(*options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`trueshard doctor` as a user starts it."""
    return forks.run(
        [sys.executable, "-m", "trueshard", "doctor", *options],
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """What is found on this machine."""
    done = doctor("--json", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def named(found: list[Any], name: str) -> Any:
    """The one finding of a name."""
    (one,) = [each for each in found if (each["name"] if isinstance(each, dict) else each.name) == name]
    return one


def test_processes_gather_reduce_and_train(report: dict[str, Any]) -> None:
    found = report["sections"]["processes"]
    for task in ("all-gather", "reduce-scatter", "shard() and a step"):
        assert named(found, f"gloo {task}")["says"].startswith("right, ")
    assert report["problems"] == 0


def test_every_section_has_findings_of_known_levels(report: dict[str, Any]) -> None:
    assert list(report["sections"]) == ["versions", "devices", "host", "environment", "extras", "processes"]
    levels = {finding["level"] for findings in report["sections"].values() for finding in findings}
    assert "ok" in levels
    assert levels <= {"ok", "note", "warning", "problem"}
    assert named(report["sections"]["environment"], "OMP_NUM_THREADS")["says"] == "1"


def problem_of(*options: str, **variables: str) -> tuple[str, str]:
    """Return the line of the one problem that stops training, and the last one."""
    done = doctor(*options, **variables)
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    lines = done.stdout.splitlines()
    (line,) = [line for line in lines if line.strip().startswith("problem")]
    return line, lines[-1]


@pytest.mark.rest
def test_an_interface_that_is_not_there_is_a_problem_with_its_remedy() -> None:
    line, last = problem_of("--nproc", "2", GLOO_SOCKET_IFNAME="nowhere0")
    assert lacking(line, "gloo join", "nowhere0", "GLOO_SOCKET_IFNAME") == []
    assert lacking(last, "not", "1 problem") == []


def test_a_torch_that_cannot_be_imported_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object')")
    line, _ = problem_of(PYTHONPATH=str(tmp_path))
    assert lacking(line, "torch", "libcudart.so.13: cannot open shared object") == []


@pytest.mark.rest
def test_processes_that_take_too_long_are_ended_and_named() -> None:
    *_, last = processes.try_backend("gloo", 2, limit=0.3)
    assert last.level == "problem"
    assert lacking(last.says, "ranks 0, 1", "0 seconds") == []
    assert "--timeout" in last.remedy
    assert not [each for each in psutil.Process().children() if "trueshard.doctor" in " ".join(each.cmdline())]


def test_under_a_launcher_one_process_speaks(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out == ""


def test_more_processes_than_the_machine_can_try_are_refused(capsys: Any) -> None:
    assert main(["doctor", "--nproc", "100000"]) == 2
    assert lacking(capsys.readouterr().err, "--nproc 100000", "1 to ") == []


@pytest.mark.parametrize(
    ("version", "level", "says"),
    [
        ("2.10.1", "problem", "older than 2.11"),
        ("2.11.0+cu128", "ok", "2.11.0+cu128"),
        ("2.15.1", "ok", "2.15.1"),
        ("2.16.0.dev20261101", "warning", "(2.11 to 2.15)"),
    ],
)
def test_torch_beside_the_releases_that_are_tested(version: str, level: str, says: str) -> None:
    torch = named(list(examined.versions({**FACTS, "version": version})), "torch")
    assert torch.level == level
    assert says in torch.says


INSTALLED = """\
Metadata-Version: 2.4
Name: trueshard
Version: 0.1.0
Requires-Python: >=3.10
Requires-Dist: numpy>=1
Requires-Dist: rich>=9000
Requires-Dist: nobody-has-this>=2; python_version < '3'
Provides-Extra: small
Requires-Dist: nobody-has-this>=2; extra == 'small'
Requires-Dist: pytest>=1; extra == 'small'
Provides-Extra: large
Requires-Dist: trueshard[small]; extra == 'large'
Requires-Dist: psutil>=9000; extra == 'large'
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution whose requirements are known."""
    (tmp_path / "trueshard-0.1.0.dist-info").mkdir()
    (tmp_path / "trueshard-0.1.0.dist-info" / "METADATA").write_text(INSTALLED)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("installed")
def test_a_package_that_is_too_old_is_a_problem_with_its_remedy() -> None:
    found = list(examined.versions(FACTS))
    assert named(found, "numpy").level == "ok"
    assert named(found, "rich").level == "problem"
    assert named(found, "rich").remedy == "pip install 'rich>=9000'"
    assert "nobody-has-this" not in {each.name for each in found}


@pytest.mark.usefixtures("installed")
def test_what_an_extra_lacks_is_named_with_how_to_install_it() -> None:
    small, large = examined.by_extra()
    assert small == Finding("small", "missing: nobody-has-this", "note", "pip install 'trueshard[small]'")
    assert large.level == "warning"
    assert large.remedy == "pip install 'trueshard[large]'"
    assert "wants >=9000" in large.says
    assert [need.name for need in examined.needs("large")] == ["nobody-has-this", "pytest", "psutil"]


def test_links_between_gpus_are_counted_from_the_fastest() -> None:
    assert list(examined.links(TOPOLOGY).items()) == [("NVLink (NV12)", 2), ("PCIe across CPU sockets", 4)]
    assert examined.links("no devices were found") == {}


def test_gpus_are_shown_with_their_memory_and_a_torch_for_gpus_that_sees_none_is_a_warning() -> None:
    gpu = {"name": "NVIDIA H200", "memory": 141 * 2**30, "bf16": True}
    shown = list(examined.devices({**FACTS, "cuda": "13.0", "gpus": [gpu]}))
    assert named(shown, "gpu 0") == Finding("gpu 0", "NVIDIA H200, 141.0 GiB")
    without = list(examined.devices({**FACTS, "cuda": "13.0", "warnings": ["the driver is too old"]}))
    assert named(without, "gpu").level == "warning"
    assert "CUDA_VISIBLE_DEVICES" in named(without, "gpu").remedy
    assert named(without, "torch says").says == "the driver is too old"


def test_the_limits_of_a_container_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "memory.max").write_text(f"{2**30}\n")
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    assert machine.cpu_quota() == 1.5
    assert machine.memory_bytes() == 2**30
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.cpu_quota() is None
    assert machine.memory_bytes() > 2**30


def test_little_shared_memory_and_a_compiler_that_is_not_there_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examined, "SHARED_ENOUGH", 2**60)
    monkeypatch.setenv("CXX", "no-such-compiler")
    memory, compiler = (named(list(examined.host()), name) for name in (str(examined.SHARED), "compiler"))
    assert (memory.level, compiler.level) == ("warning", "note")
    assert "--shm-size" in memory.remedy
    assert "CXX=no-such-compiler" in compiler.says


def test_the_environment_is_fit_to_be_shown() -> None:
    variables = {
        "HOME": "/home/someone",
        "HF_TOKEN": "secret-token",
        "HF_HOME": "/home/someone/models",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_IB_DISABLE": "0",
        "PATH": "/usr/bin",
        "AWS_SECRET_ACCESS_KEY": "secret-key",
    }
    found = {each.name: each for each in examined.environment(variables)}
    assert set(found) == {"HF_TOKEN", "HF_HOME", "NCCL_P2P_DISABLE", "NCCL_IB_DISABLE"}
    assert found["HF_TOKEN"].says == "(set)"
    assert found["HF_HOME"].says == "~/models"
    assert found["NCCL_P2P_DISABLE"].remedy == "unset NCCL_P2P_DISABLE"
    assert found["NCCL_IB_DISABLE"].level == "note"


def test_a_rank_without_a_launcher_is_a_problem() -> None:
    *_, last = examined.environment({"RANK": "0"})
    assert last.level == "problem"
    assert list(examined.environment({"RANK": "0", "MASTER_ADDR": "a"}))[-1].level == "note"


def test_only_problems_stop_training() -> None:
    report = Report({"a": [Finding("x", "y", "warning"), Finding("x", "y", "problem")], "b": [Finding("x", "y")]})
    assert report.count("problem") == 1
    assert report.as_json()["warnings"] == 1
