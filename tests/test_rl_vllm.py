"""The vLLM engine: same requests, same answers; a server that goes wrong is one line on every rank, in time."""

from __future__ import annotations

import json
import re
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import trueshard
from fake_vllm import FakeVLLM
from parity import Pool, Ranks
from rl_serving import answers, change, made, requests, tiny, with_adapter
from test_rl_rollouts import model_of, records, reward, run, tokenizer
from trueshard.errors import UserError
from trueshard.train.data.config import EvaluationSection
from trueshard.train.rl.config import RolloutSection
from trueshard.train.rl.run import Evaluation
from trueshard.train.rl.samples import Request, Sampling
from trueshard.train.rl.vllm import VLLMEngine

LIMIT = 1.0
"""Seconds of `rollout.timeout` in the tests of a server that goes wrong"""


@pytest.fixture
def server() -> Iterator[FakeVLLM]:
    fake = FakeVLLM()
    yield fake
    fake.close()


def set_mode(engine: VLLMEngine, rank: int, mode: str) -> None:
    """Before a collective, which the other ranks reach afterwards."""
    if rank == 0:
        body = json.dumps({"mode": mode}).encode()
        urllib.request.urlopen(urllib.request.Request(f"{engine._server.url}/mode", body)).close()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def failure(function: Callable[[], Any]) -> tuple[str, float]:
    """The line of the `UserError` that is raised, and after how many seconds."""
    begin = time.monotonic()
    try:
        function()
    except UserError as error:
        return str(error), time.monotonic() - begin
    return "", time.monotonic() - begin


@pytest.mark.rest
def test_same_requests_have_the_same_answers_on_one_rank_and_on_two(
    alone: Ranks, ranks2: Ranks, tmp_path: Path, server: FakeVLLM
) -> None:
    (expected,) = alone.run(answers, str(tmp_path / "one"), server.url)
    asked = len(server.bodies)
    for found in ranks2.run(answers, str(tmp_path / "two"), server.url):
        assert {**found, "mismatch": 0} == {**expected, "mismatch": 0}
    assert len(server.bodies) == 2 * asked, "each request was sent once, by one rank"
    assert expected["again"] == expected["reversed"] == expected["first"]
    assert len({tuple(each.ids) for each in expected["first"]}) == 6, "seeds differ from sample to sample"
    assert expected["other seed"] != expected["first"]
    assert expected["after a step"] != expected["first"]
    assert [each.finished for each in expected["stopped"]].count(True) >= 1
    assert expected["mismatch"] < 1e-5
    assert expected["kept"] == ["weights-1"]
    assert not (tmp_path / "two" / "rollout").exists()
    bodies = [body for body in server.bodies if "seed" in body]
    assert all(0 <= body["seed"] < 2**63 and body["stop_token_ids"] == [0] for body in bodies)


def test_a_continued_sample_has_another_seed(tmp_path: Path, server: FakeVLLM) -> None:
    _, engine = made(str(tmp_path), server.url)
    engine.update(0)
    engine.generate([Request((1, 2, 3), [5, 6], first=each, most=2) for each in (0, 2)], Sampling())
    assert len({body["seed"] for body in server.bodies[-2:]}) == 2


def held(found: dict[str, tuple[str, float]], said: dict[str, str], url: str) -> None:
    for what, pattern in said.items():
        line, seconds = found[what]
        assert line.startswith(f"rollout.url: {url} ") or "the server's weights" in line, (what, line)
        assert re.search(pattern, line), (what, line)
        assert line.isprintable(), what
        assert seconds < LIMIT + 1.5, what


def stale(rank: int, world_size: int, folder: str, url: str) -> dict[str, tuple[str, float]]:
    model, engine = made(folder, url)
    engine.update(0)
    engine._server.timeout = LIMIT
    found = {"the same weights": failure(lambda: engine.update(1))}
    set_mode(engine, rank, "keeps old weights")
    change(model, 3e-4)
    found["small step"] = failure(lambda: engine.update(2))
    change(model, 0.5)
    found["large step"] = failure(lambda: engine.update(3))
    set_mode(engine, rank, "")
    found["reloaded"] = failure(lambda: engine.update(3))
    set_mode(engine, rank, "drops one tensor")
    change(model, 0.5)
    found["dropped"] = failure(lambda: engine.update(4))
    set_mode(engine, rank, "dies@/collective_rpc")
    found["dies"] = failure(lambda: engine.update(5))
    return found


@pytest.mark.rest
def test_the_probe_finds_a_server_without_the_new_weights(ranks2: Ranks, tmp_path: Path, server: FakeVLLM) -> None:
    for found in ranks2.run(stale, str(tmp_path), server.url):
        assert found.pop("the same weights")[0] == found.pop("reloaded")[0] == ""
        said = {
            "small step": "the server's weights are not those of step 2: .* are those of step 0 to the last bit",
            "large step": r"not those of step 3: its log-probability of token \d+ of probe \d \(id \d+\) is -\d",
            "dropped": r"not those of step 4: .* apart, and 0\.001 is allowed; see its log",
            "dies": r"broke off its answer to /collective_rpc .*weights-5, which the server must see",
        }
        held(found, said, server.url)


def refused(rank: int, world_size: int, folder: str, url: str, **more: Any) -> None:
    made(folder, url, **more)


def test_no_server_is_one_line_on_every_rank(ranks2: Ranks, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks2.raises(
        refused, str(tmp_path), f"http://127.0.0.1:{port}", match="no server answers at .*Refused.*start vLLM"
    )


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"temperature": 0.7}, "rollout.temperature is 0.7, .*--logprobs-mode processed_logprobs"),
        ({"sync": "nccl"}, "not started for it; add --weight-transfer-config"),
        ({"url": "localhost:8000"}, 'is no address of a server; write it as "http://127.0.0.1:8000"'),
    ],
)
def test_a_server_that_does_not_fit_is_refused(
    settings: dict[str, Any], match: str, tmp_path: Path, server: FakeVLLM
) -> None:
    with pytest.raises(UserError, match=match):
        made(str(tmp_path), **{"url": server.url, **settings})


def test_nccl_needs_vllm_and_a_gpu_here(tmp_path: Path, server: FakeVLLM) -> None:
    server.config["weight_transfer_config"] = {"backend": "nccl"}
    with pytest.raises(UserError, match=r'rollout\.sync = "nccl" (needs the package vllm|sends from GPU to GPU)'):
        made(str(tmp_path), server.url, sync="nccl")


def test_temperature_needs_processed_log_probabilities(tmp_path: Path) -> None:
    server = FakeVLLM("processed_logprobs")
    _, engine = made(str(tmp_path), server.url, temperature=0.7)
    engine.update(0)
    (answer, _) = engine.generate(requests(1), Sampling(temperature=0.7))
    assert len(answer.ids) == len(answer.logprobs) == 6
    assert server.bodies[-1]["temperature"] == 0.7
    server.close()


def test_images_are_refused(tmp_path: Path, server: FakeVLLM) -> None:
    _, engine = made(str(tmp_path), server.url)
    engine.update(0)
    with pytest.raises(UserError, match='takes prompts of text, and one has images; use "transformers"'):
        engine.generate([Request((1, 0, 0), [5], messages=[{"role": "user"}])], Sampling())


@pytest.mark.rest
def test_three_ranks_have_the_answers_of_one(alone: Ranks, pool: Pool, tmp_path: Path, server: FakeVLLM) -> None:
    (expected,) = alone.run(answers, str(tmp_path / "one"), server.url)
    for found in Ranks(3, pool).run(answers, str(tmp_path / "three"), server.url):
        assert {**found, "mismatch": 0} == {**expected, "mismatch": 0}


@pytest.mark.rest
def test_an_adapter_alone_goes_to_a_server_that_takes_it(tmp_path: Path, server: FakeVLLM) -> None:
    base, tokenizer = tiny()
    for name, scale in (("base", 1.0), ("another", 1.1)):
        change(base, scale - 1)
        base.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    server.load(str(tmp_path / "base"))
    server.config["lora_config"] = {"max_lora_rank": 8}
    model, engine = made(str(tmp_path / "run"), server.url, with_adapter)
    engine.update(0)
    first = engine.generate(requests(2), Sampling())
    assert engine.mismatch < 1e-5
    change(model, 0.5)
    engine.update(1)
    assert engine.generate(requests(2), Sampling()) != first
    assert engine.mismatch < 1e-5
    named = list(dict.fromkeys(body["model"] for body in server.bodies))
    assert len(named) == 2, "each version has a name of its own"
    assert list(server.adapters) == named[1:], "the one before is not kept"
    assert len(server.loaded) == 1, "the base stays"
    server.load(str(tmp_path / "another"))
    with pytest.raises(UserError, match="not those of step 2"):
        engine.update(2)
    engine.close()
    assert not server.adapters


@pytest.mark.rest
def test_an_adapter_is_merged_for_a_server_that_takes_none(tmp_path: Path, server: FakeVLLM) -> None:
    model, engine = made(str(tmp_path), server.url, with_adapter)
    for version in range(2):
        engine.update(version)
        assert engine.mismatch < 1e-5
        change(model, 0.5)
    assert not server.adapters
    assert len(server.loaded) == 2
    engine.close()


def test_what_is_sent_is_what_was_asked_for(tmp_path: Path, server: FakeVLLM) -> None:
    with pytest.raises(UserError, match=r"rollout\.send.*--enable-lora"):
        made(str(tmp_path), server.url, with_adapter, send="adapter")
    server.config["lora_config"] = {"max_lora_rank": 8}
    _, engine = made(str(tmp_path), server.url, with_adapter, send="merged")
    engine.update(0)
    assert engine.mismatch < 1e-5
    assert (len(server.loaded), server.adapters) == (1, {})
    engine.close()
    with pytest.raises(ValueError, match=r"rollout\.send.*rollout\.url"):
        RolloutSection(send="adapter")


def bf16_adapter() -> tuple[Any, Any]:
    """An adapter in float32 over a base in bfloat16, after a small step."""
    model, tokens = with_adapter()
    for name, parameter in model.named_parameters():
        if "lora" not in name:
            parameter.data = parameter.data.bfloat16()
        elif "lora_B" in name:
            parameter.data.mul_(1e-4)
    return model, tokens


@pytest.mark.rest
def test_a_merged_copy_in_16_bits_loses_what_an_adapter_keeps(tmp_path: Path, server: FakeVLLM) -> None:
    """The tensors that a server is sent, both ways, against what the trainer has."""
    base, name = tiny()[0].bfloat16(), "model.layers.0.self_attn.q_proj"
    base.save_pretrained(tmp_path / "base")
    tiny()[1].save_pretrained(tmp_path / "base")
    server.load(str(tmp_path / "base"))
    server.config["lora_config"] = {"max_lora_rank": 8}
    start = base.get_submodule(name).weight.float()
    off = {}
    for way in ("merged", "adapter"):
        model, engine = made(str(tmp_path / way), server.url, bf16_adapter, send=way)
        tensors = dict(pair for unit in trueshard.weights(model, dtype="float32") for pair in zip(*unit, strict=True))
        exact = tensors[f"{name}.weight"]
        engine.update(0)
        if way == "merged":
            weight = server.model.get_submodule(name).weight.float()
        else:
            (served,) = server.adapters.values()
            layer = served.get_submodule(f"base_model.model.{name}")
            weight = layer.base_layer.weight.float() + layer.get_delta_weight(served.active_adapter).float()
        off[way] = float(((weight - exact).abs().mean() / (exact - start).abs().mean()).detach())
        server.load(str(tmp_path / "base"))
        engine.close()
    assert off["merged"] > 0.5, "of the update itself"
    assert off["adapter"] < 0.01


def test_a_run_on_a_server_trains_on_its_answers(ranks2: Ranks, tmp_path: Path, server: FakeVLLM) -> None:
    at = {"engine": "vllm", "url": server.url, "timeout": 30.0}
    (found, other) = ranks2.run(run, {"rollout": at, "folder": str(tmp_path / "now"), "steps": 3})
    assert found["samples"] == other["samples"]
    assert [each["weights_version"] for each in found["measures"]] == [0, 1, 2]
    assert all(each["mismatch_max"] < 1e-4 for each in found["measures"])


def test_an_evaluation_leaves_the_measures_of_the_answers_made_ahead(tmp_path: Path, server: FakeVLLM) -> None:
    """It waits for these answers; what they took is in the line of the step that uses them."""
    model = model_of()
    trueshard.shard(model)
    section = {"engine": "vllm", "url": server.url, "timeout": 30.0, "tokens": 4, "ahead": 1}
    rollouts = trueshard.rl.Rollouts(
        model, tokenizer(), records(), reward, batch_size=4, rl={"samples": 4}, rollout=section, folder=tmp_path
    )
    next(rollouts)
    measured = Evaluation(rollouts, records(), EvaluationSection(samples=2, temperature=1.0))()
    assert measured["count"] == 2
    assert rollouts.sampler.seconds["generate"] > 0
    assert rollouts.sampler.seconds["sync"] == 0.0
    rollouts.close()


@pytest.mark.rest
def test_a_run_ahead_keeps_what_a_server_answers_meanwhile(ranks2: Ranks, tmp_path: Path, server: FakeVLLM) -> None:
    at = {"engine": "vllm", "url": server.url, "timeout": 30.0}
    ahead = {"rollout": at | {"ahead": 1}, "folder": str(tmp_path / "ahead")}
    whole = ranks2.run(run, {**ahead, "steps": 4})[0]
    assert [each["age"] for each in whole["measures"]] == [0, 1, 1, 1]
    assert whole["measures"][1]["ratio_max"] != 1.0, "the ratio is to the server's distribution"
    first = ranks2.run(run, {**ahead, "steps": 2, "lr": 0.0})[0]
    rest = ranks2.run(run, {**ahead, "steps": 2, "lr": 0.0, "start": first})[0]
    wanted = ranks2.run(run, {**ahead, "steps": 4, "lr": 0.0})[0]
    assert first["samples"] | rest["samples"] == wanted["samples"]
