"""A vLLM server that goes wrong, and one that forges answers: one line on every rank, in time, and exit code 2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fake_vllm import FAULTS, PROBE, FakeVLLM
from forged_answers import FORGED, PROBED
from parity import Ranks
from rl_serving import made, requests
from running import end, metrics, start
from test_rl_run import project
from test_rl_vllm import LIMIT, failure, held, set_mode
from trueshard.train.rl.samples import Sampling


@pytest.fixture
def server() -> Iterator[FakeVLLM]:
    fake = FakeVLLM()
    yield fake
    fake.close()


def going_wrong(
    rank: int, world_size: int, folder: str, url: str, modes: tuple[str, ...]
) -> dict[str, tuple[str, float]]:
    """What is said in each mode, and of a healthy server after them."""
    _, engine = made(folder, url)
    engine.update(0)
    engine._server.timeout = LIMIT
    found = {}
    for mode in (*modes, ""):
        set_mode(engine, rank, f"{mode}@{PROBE}" if mode in PROBED else mode)
        ask = (lambda: engine.update(0)) if mode in PROBED else lambda: engine.generate(requests(2), Sampling())
        found[mode] = failure(ask)
    return found


def faults(route: str) -> dict[str, str]:
    """What is said of each fault on a route."""
    return {
        "hangs": rf"did not answer {route}\S* within 1 s; .*rollout\.timeout",
        "half": rf"sent \d+ bytes of its answer to {route}\S* and no end within 1 s; .*rollout\.timeout",
        "trickles": rf"sent \d+ bytes of its answer to {route}\S* and no end within 1 s; .*rollout\.timeout",
        "dies": rf"broke off its answer to {route}\S* \(RemoteProtocolError.*\); see the server's log",
        "endless": rf"gave an unusable answer \(of more than \d+ bytes to {route}",
        "fails": rf"answered {route}\S* with HTTP 500 \(EngineCore \[31mencountered an issue\); see the server's log",
        "moved": rf"answered {route}\S* with HTTP 302",
        "no http": rf"broke off its answer to {route}\S* \(RemoteProtocolError.*no other program has its port",
    }


SAID = faults("/v1/completions") | {name: forged.said for name, forged in FORGED.items()}


@pytest.mark.parametrize(
    "modes", [("hangs", "token 1000000"), pytest.param((*FAULTS, *FORGED), marks=pytest.mark.rest)]
)
def test_a_server_that_goes_wrong_is_one_line_on_every_rank(
    modes: tuple[str, ...], ranks2: Ranks, tmp_path: Path, server: FakeVLLM
) -> None:
    for found in ranks2.run(going_wrong, str(tmp_path), server.url, modes):
        assert found.pop("")[0] == "", "a healthy server serves again"
        held(found, {mode: SAID[mode] for mode in modes}, server.url)


def on_every_route(rank: int, world_size: int, folder: str, url: str) -> dict[str, tuple[str, float]]:
    _, engine = made(folder, url)
    engine.update(0)
    engine._server.timeout = LIMIT
    found = {}
    for route in ("/server_info", "/collective_rpc", "/reset_prefix_cache", PROBE):
        for fault in FAULTS:
            set_mode(engine, rank, mode := f"{fault}@{route}")
            ask = (lambda: made(folder, url, timeout=LIMIT)) if route == "/server_info" else lambda: engine.update(0)
            found[mode] = failure(ask)
    return found


@pytest.mark.rest
def test_every_fault_on_every_route(ranks2: Ranks, tmp_path: Path, server: FakeVLLM) -> None:
    for found in ranks2.run(on_every_route, str(tmp_path), server.url):
        for mode in found:
            fault, _, route = mode.partition("@")
            held(found, {mode: faults(route.replace(PROBE, "/v1/completions"))[fault]}, server.url)


# Whole runs, whose ranks wait for one another less long than for the server


@pytest.mark.rest
@pytest.mark.parametrize(
    "mode",
    [
        "hangs@/server_info",
        "half@/collective_rpc",
        "trickles@probe",
        "hangs",
        "token 1000000",
        "ids are 200,000 brackets",
    ],
)
def test_a_run_ends_with_one_line_and_the_same_command_goes_on(mode: str, tmp_path: Path, server: FakeVLLM) -> None:
    folder = project(tmp_path / "run")
    settings: dict[str, Any] = {"engine": '"vllm"', "url": f'"{server.url}"', "timeout": 7, "ahead": 0}
    words = [f"--set=rollout.{key}={value}" for key, value in settings.items()]
    words += [
        "--nproc=2",
        "--set=run.timeout=3",
        "--set=train.steps=2",
        "--set=rl.updates=1",
        "--set=log.samples_every=1",
    ]
    server.mode = mode
    code, out, err = end(start(folder, *words))
    assert code == 2, out + err
    fault, _, route = mode.partition("@")
    said = FORGED[fault].said if fault in FORGED else faults("" if route in ("", PROBE) else route)[fault]
    assert len(err.splitlines()) == 1, err
    line = err.strip().removeprefix("trueshard: ")
    held({mode: (line, 0)}, {mode: said.replace("within 1 s", "within 7 s")}, server.url)
    server.mode = ""
    code, out, err = end(start(folder, *words))
    assert (code, err) == (0, ""), out + err
    assert [each["step"] for each in metrics(folder)][-2:] == [1, 2]
    assert not (folder / "run" / "rollout").exists(), "no weights are left, also of the run that failed"
