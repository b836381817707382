"""The catalogue of devices."""

import itertools
import math
from pathlib import Path

import pytest

from trueshard.planner.speed.hardware import hardware, known


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


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"memory_bandwith": 1}, r"'memory_bandwith' is no key. Did you mean 'memory_bandwidth'"),
        ({"eager": {"matmull": 0.5}}, r"'eager.matmull' is no key. Did you mean 'matmul'"),
        ({"ranks_per_node": 0}, r"ranks_per_node=0 must be a whole number above 0"),
        ({"ranks_per_node": 2.5}, r"ranks_per_node=2.5 must be a whole number"),
        ({"memory_bandwidth": "fast"}, r"memory_bandwidth='fast' must be a number above 0"),
        ({"memory_bandwidth": -1.0}, r"memory_bandwidth=-1.0 must be a number above 0"),
        ({"memory_bandwidth": math.nan}, r"memory_bandwidth=nan must be a number"),
        ({"memory_bytes": math.inf}, r"memory_bytes=inf must be a whole number"),
        ({"memory_bytes": True}, r"memory_bytes=True must be a whole number"),
        ({"eager": {"memory": 1.5}}, r"eager.memory=1.5 must be a part of 1"),
        ({"eager": 0.5}, r"eager=0.5 must be a table"),
        ({"peak_flops": {"bfloat16": 0}}, r"peak_flops.bfloat16=0 must be a number above 0"),
        ({"peak_flops": 1e12}, r"peak_flops=1000000000000.0 must be a table"),
        ({"streams": 1}, r"streams=1 must be true or false"),
        ({"link": 4}, r"link=4 must be text"),
    ],
)
def test_a_bad_value_is_refused_by_its_key(overrides: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hardware("h100", **overrides)


def test_an_unknown_device_is_refused_with_near_matches() -> None:
    with pytest.raises(ValueError, match=r"'h10' is not known. Did you mean 'h100'.* Known: h100, h100-96gb, "):
        hardware("h10")


def test_a_bad_file_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none.toml' cannot be read: No such file"):
        hardware(str(tmp_path / "none.toml"))
    broken = tmp_path / "broken.toml"
    broken.write_text("a = = 1")
    with pytest.raises(ValueError, match=r"broken.toml' is not TOML"):
        hardware(str(broken))
    broken.write_text('base = "h1000"')
    with pytest.raises(ValueError, match=r"'h1000' is not known. Did you mean 'h100'"):
        hardware(str(broken))
    broken.write_text("memory_bytes = 1")
    with pytest.raises(ValueError, match=r"is missing"):
        hardware(str(broken))
