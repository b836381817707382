"""The catalogue of devices, and calibration: what it writes is read as hardware, and follows from what was done."""

import dataclasses
import itertools
import math
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from messages import naming
from trueshard.cli import main
from trueshard.planner import calibrate as calibrating
from trueshard.planner.calibrate import SMALL, Calibration, calibrate
from trueshard.planner.hardware import hardware, hardware_here, known, recognise
from trueshard.planner.planning import Request


@pytest.mark.parametrize("name", known())
def test_every_device_states_its_source_and_plausible_figures(name: str) -> None:
    device = hardware(name)
    assert device.name == name
    assert len(device.source) > 20
    assert device.title
    assert device.peak_flops["bfloat16"] >= device.peak_flops["float32"]
    assert device.peak_flops["tfloat32"] <= device.peak_flops["bfloat16"]
    assert device.memory_bandwidth > device.link_bandwidth >= device.network_bandwidth
    assert device.compile.launch_seconds <= device.eager.launch_seconds


def test_newer_devices_are_faster_and_larger() -> None:
    rows = [hardware(name) for name in ("a100-40gb", "a100", "h100", "h200", "b200")]
    for older, newer in itertools.pairwise(rows):
        assert newer.memory_bandwidth > older.memory_bandwidth
        assert newer.peak_flops["bfloat16"] >= older.peak_flops["bfloat16"]
        assert newer.memory_bytes > older.memory_bytes or newer.name == "h100"


def test_a_name_is_found_in_any_case_and_figures_can_be_overridden() -> None:
    device = hardware("H100-96GB", ranks_per_node=4, peak_flops={"bfloat16": 5e14}, eager={"matmul": 0.5})
    assert device.memory_bandwidth == 2.4e12
    assert device.ranks_per_node == 4
    assert device.peak("bfloat16") == 5e14
    assert device.peak("float16") == 989.4e12
    assert device.eager.matmul == 0.5
    assert device.eager.memory == hardware("h100-96gb").eager.memory
    assert device.peak("float8_e4m3fn") == 1978.9e12
    assert device.peak("float64") == device.peak("float32")


def test_a_file_describes_a_device(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text('base = "A100"\nnetwork_bandwidth = 5e9\n[eager]\nmatmul = 0.7\n')
    device = hardware(str(path), ranks_per_node=2)
    assert (device.name, device.network_bandwidth, device.ranks_per_node) == ("ours", 5e9, 2)
    assert device.eager.matmul == 0.7
    assert device.peak_flops == hardware("a100").peak_flops


def test_a_file_may_have_the_table_that_the_catalogue_would(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text('[ours]\nbase = "h100"\nnetwork_bandwidth = 5e9\neager = { matmul = 0.7 }\n')
    device = hardware(str(path))
    assert (device.name, device.title, device.network_bandwidth, device.eager.matmul) == ("ours", "ours", 5e9, 0.7)
    path.write_text(path.read_text() + '[theirs]\nbase = "a100"\n')
    with pytest.raises(ValueError, match=naming("cluster.toml", "ours, theirs")):
        hardware(str(path))


@pytest.mark.parametrize(
    ("link", "network", "figures"),
    [
        (None, "400Gb", ("NVLink 4", 450e9, 50e9)),
        (None, "50 GB/s", ("NVLink 4", 450e9, 50e9)),
        ("pcie5", None, ("PCIe 5 x16", 64e9, 50e9)),
        ("NVLink 5", "100Gbps", ("NVLink 5", 900e9, 12.5e9)),
        ("32GB", None, ("32GB", 32e9, 50e9)),
    ],
)
def test_link_and_network_are_words(link: str | None, network: str | None, figures: tuple[str, float, float]) -> None:
    device = Request(model="gpt2", link=link, network=network).device()
    assert (device.link, device.link_bandwidth, device.network_bandwidth) == figures


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ({"network": "fast"}, ("network='fast'", "400Gb", "50GB")),
        ({"network": "0Gb"}, ("network='0Gb'",)),
        ({"link": "nvlink"}, ("link='nvlink'", "NVLink 4", "PCIe 5 x16")),
    ],
)
def test_other_words_are_refused(words: dict[str, str], parts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=naming(*parts)):
        Request(model="gpt2", **words).device()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"memory_bandwith": 1}, naming("'memory_bandwith'", "'memory_bandwidth'")),
        ({"eager": {"matmull": 0.5}}, naming("'eager.matmull'", "'matmul'")),
        ({"ranks_per_node": 0}, naming("ranks_per_node=0", "greater than 0")),
        ({"ranks_per_node": 2.5}, naming("ranks_per_node=2.5", "integer")),
        ({"memory_bandwidth": "fast"}, naming("memory_bandwidth='fast'", "number")),
        ({"memory_bandwidth": -1.0}, naming("memory_bandwidth=-1.0", "greater than 0")),
        ({"memory_bandwidth": math.nan}, naming("memory_bandwidth=nan", "greater than 0")),
        ({"memory_bytes": math.inf}, naming("memory_bytes=inf", "finite")),
        ({"memory_bytes": True}, naming("memory_bytes=True", "number")),
        ({"eager": {"memory": 1.5}}, naming("eager.memory=1.5", "equal to 1")),
        ({"eager": 0.5}, naming("eager=0.5", "dictionary")),
        ({"peak_flops": {"bfloat16": 0}}, naming("peak_flops.bfloat16=0", "greater than 0")),
        ({"peak_flops": 1e12}, naming("peak_flops=1000000000000.0", "dictionary")),
        ({"streams": 1}, naming("streams=1", "boolean")),
        ({"link": 4}, naming("link=4", "string")),
    ],
)
def test_a_bad_value_is_refused_by_its_key(overrides: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hardware("h100", **overrides)


def test_an_unknown_device_is_refused_with_near_matches() -> None:
    with pytest.raises(ValueError, match=naming("'h10'", "'h100'", "h100, h100-96gb, ")):
        hardware("h10")


def test_a_bad_file_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=naming("none.toml", "No such file")):
        hardware(str(tmp_path / "none.toml"))
    broken = tmp_path / "broken.toml"
    broken.write_text("a = = 1")
    with pytest.raises(ValueError, match=naming("broken.toml", "TOML")):
        hardware(str(broken))
    broken.write_text('base = "h1000"')
    with pytest.raises(ValueError, match=naming("'h1000'", "'h100'")):
        hardware(str(broken))
    broken.write_text("memory_bytes = 1")
    with pytest.raises(ValueError, match="missing"):
        hardware(str(broken))


DEVICES = [
    ("NVIDIA H100 80GB HBM3", 85_024_000_000, "h100"),
    ("NVIDIA H100 80GB HBM3", 83_800_000_000, "h100"),
    ("NVIDIA H100", 102_000_000_000, "h100-96gb"),
    ("NVIDIA H100 PCIe", 84_900_000_000, "h100-pcie"),
    ("NVIDIA H200", 150_100_000_000, "h200"),
    ("NVIDIA B200", 191_500_000_000, "b200"),
    ("NVIDIA A100-SXM4-80GB", 84_987_740_160, "a100"),
    ("NVIDIA A100-SXM4-40GB", 42_405_855_232, "a100-40gb"),
    ("NVIDIA L40S", 47_670_000_000, "l40s"),
    ("NVIDIA GeForce RTX 4090", 25_383_000_000, "rtx4090"),
    ("AMD Instinct MI300X", 206_141_000_000, "mi300x"),
    ("NVIDIA H100 80GB HBM3", 40_000_000_000, None),
    ("NVIDIA GH200 480GB", 102_000_000_000, None),
    ("NVIDIA H100 NVL", 100_000_000_000, None),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 10_200_000_000, None),
    ("NVIDIA A100 80GB PCIe", 84_987_740_160, None),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", 17_000_000_000, None),
    ("Tesla T4", 15_800_000_000, None),
    ("cpu", 64_000_000_000, None),
]


@pytest.mark.parametrize(("title", "memory", "name"), DEVICES)
def test_a_device_is_known_by_all_words_of_its_title_and_its_memory(title: str, memory: int, name: str | None) -> None:
    assert recognise(title, memory) == name


def at_hand(monkeypatch: pytest.MonkeyPatch, title: str, memory: int) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: title)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=memory))


def test_the_device_at_hand_has_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    at_hand(monkeypatch, "NVIDIA A100-SXM4-80GB", 85_000_000_000)
    device = hardware_here(torch.device("cuda", 0))
    assert (device.name, device.memory_bytes) == ("a100", 85_000_000_000)
    assert hardware_here(torch.device("cpu")) == hardware("cpu")


def test_an_unknown_device_at_hand_is_told_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    at_hand(monkeypatch, "Tesla T4", 15_800_000_000)
    with pytest.raises(ValueError, match=naming("'Tesla T4'", "14.7 GiB", "--hardware", "h100", "TOML file")):
        hardware_here(torch.device("cuda"))


# Calibration

CPU = torch.device("cpu")
FIGURES = {"matmul", "attention", "memory", "kernel_seconds", "collective_seconds"}


@pytest.mark.rest
def test_the_command_writes_a_device_that_the_planner_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.toml"
    assert main(["plan", "calibrate", str(file)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert {line.split()[0].partition(".")[2] for line in shown if line.startswith("eager.")} == FIGURES
    made, base = hardware(str(file)), hardware("cpu")
    assert (made.name, made.link_bandwidth) == ("mine", base.link_bandwidth)
    for figure in FIGURES:
        assert getattr(made.eager, figure) != getattr(base.eager, figure)


def test_rates_are_operations_over_the_time_they_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only products move: a second for each layer's forward."""
    now = 0.0
    original = torch.nn.functional.linear

    def linear(*given: torch.Tensor) -> torch.Tensor:
        nonlocal now
        now += 1.0
        return original(*given)

    def moment() -> float:
        nonlocal now
        now += 0.05
        return now

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    monkeypatch.setattr(time, "perf_counter", moment)
    found = calibrate(CPU, hardware("cpu"), sizes=dataclasses.replace(SMALL, seconds=2.0)).hardware
    products = 3 * 2 * 2 * SMALL.tokens * SMALL.hidden * SMALL.intermediate
    assert found.eager.matmul * found.peak("float32") == pytest.approx(products / 2, rel=0.03)
    assert found.eager.collective_seconds > 0.01


@pytest.mark.rest
def test_a_rate_above_the_data_sheet_takes_its_place() -> None:
    modest = hardware("cpu", peak_flops={"float32": 1e6}, memory_bandwidth=1e3)
    found = calibrate(CPU, modest, sizes=dataclasses.replace(SMALL, seconds=0.01))
    made = found.hardware
    assert made.peak("float32") == found.measured["peak_flops.float32"] > 1e6
    assert max(made.eager.matmul, made.eager.attention) == made.eager.memory == 1.0


def test_what_is_not_measured_is_that_of_the_base(tmp_path: Path) -> None:
    figures = {"memory_bytes": 90, "eager.matmul": 0.5, "peak_flops.bfloat16": 2.0}
    file = tmp_path / "gpu.toml"
    file.write_text(Calibration(hardware("h100"), figures, "GPU").toml())
    expected = hardware("h100", memory_bytes=90, eager={"matmul": 0.5}, peak_flops={"bfloat16": 2.0})
    anonymous = {"name": "", "source": "", "title": ""}
    assert dataclasses.replace(hardware(str(file)), **anonymous) == dataclasses.replace(expected, **anonymous)


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibrating, "calibrate", None)
    for file, says in ((tmp_path / "none" / "a.toml", "no folder"), (tmp_path / "a.json", "a.toml")):
        assert main(["plan", "calibrate", str(file)]) == 2
        assert says in capsys.readouterr().err
