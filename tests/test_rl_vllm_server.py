"""The vLLM engine against vLLM itself, on the processor; in the environment of `make vllm`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import trueshard
from parity import Pool, Ranks
from rl_serving import answers, change, made, requests, tiny, with_adapter
from trueshard.errors import UserError
from trueshard.train.rl.samples import Request, Sampling
from trueshard.train.rl.vllm_server import Server
from vllm_process import serving

pytestmark = [pytest.mark.rest, pytest.mark.timeout(900)]

LIMIT = 120.0
"""Seconds; the first answers take the longest"""
SLOW = {"timeout": LIMIT}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vllm")
    for part in tiny():
        part.save_pretrained(folder / "start")
    return folder / "start"


@pytest.fixture(scope="module")
def url(start: Path) -> Any:
    options = ("--dtype", "float32", "--max-model-len", "64", "--logprobs-mode", "processed_logprobs")
    adapters = ("--enable-lora", "--max-lora-rank", "8")
    with serving(start, start.parent / "server.log", *options, *adapters) as address:
        yield address


def test_an_adapter_alone(url: str, tmp_path: Path) -> None:
    """First: the base is still the one that the server was started with."""
    model, engine = made(str(tmp_path), url, with_adapter, **SLOW)
    engine.update(0)
    first = engine.generate(requests(2), Sampling())
    change(model, 0.5)
    with pytest.raises(UserError, match="not those of step 1"):
        engine._probe(1)
    engine.update(1)
    assert engine.mismatch < 1e-5
    assert [each.logprobs for each in engine.generate(requests(2), Sampling())] != [each.logprobs for each in first]
    engine.close()


def saved(rank: int, world_size: int, path: str) -> None:
    """A checkpoint with an optimizer, after a step; of the tiny model."""
    model, tokenizer = tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trueshard.shard(model, optimizer)
    ids = torch.arange(20).view(2, 10)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    trueshard.Checkpoints(path).save(1, model=model, optimizer=optimizer, tokenizer=tokenizer)


def test_a_checkpoint_is_served_as_it_is(ranks2: Ranks, tmp_path: Path) -> None:
    ranks2.run(saved, str(tmp_path / "checkpoints"))
    latest = tmp_path / "checkpoints" / "latest"
    assert (latest / "optimizer.safetensors").is_file()
    model, ids = AutoModelForCausalLM.from_pretrained(latest), list(range(5, 25))
    with torch.no_grad():
        logprobs = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    with serving(latest, tmp_path / "log", "--dtype", "float32", "--max-model-len", "64") as address:
        found = Server(address, LIMIT, 280).prompt_logprobs(ids, None)
    assert found == pytest.approx([logprobs[place, token].item() for place, token in enumerate(ids[1:])], abs=1e-5)


def test_seeds_and_weights(url: str, alone: Ranks, pool: Pool, tmp_path: Path) -> None:
    (expected,) = alone.run(answers, str(tmp_path / "one"), url, LIMIT, timeout=400)
    (found, _) = Ranks(2, pool).run(answers, str(tmp_path / "two"), url, LIMIT, timeout=400)
    for name in ("first", "after a step", "stopped"):
        assert [each.ids for each in found[name]] == [each.ids for each in expected[name]]
    assert [each.ids for each in expected["again"]] == [each.ids for each in expected["first"]]
    assert [each.ids for each in expected["reversed"]] == [each.ids for each in expected["first"]]
    assert len({tuple(each.ids) for each in expected["first"]}) == 6
    assert expected["after a step"] != expected["first"]
    assert expected["mismatch"] < 1e-5


def test_log_probabilities_and_ends(url: str, tmp_path: Path) -> None:
    model, engine = made(str(tmp_path), url, temperature=0.7, **SLOW)
    engine.update(0)
    for request, answer in zip(requests(3), engine.generate(requests(3), Sampling(temperature=0.7)), strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([request.ids + answer.ids])).logits[0, len(request.ids) - 1 : -1]
        own = (logits / 0.7).log_softmax(-1).gather(1, torch.tensor(answer.ids)[:, None])[:, 0]
        assert own.tolist() == pytest.approx(answer.logprobs, abs=1e-5)
    engine._ends = list(range(140))  # so that answers end
    for answer in engine.generate(requests(3, most=40), Sampling()):
        assert answer.finished
        assert [token < 140 for token in answer.ids] == [False] * (len(answer.ids) - 1) + [True]
    with pytest.raises(UserError, match=r"cut after \d+ of \d+ tokens: --max-model-len"):
        engine.generate([Request((1, 0, 0), [200] * 63, most=9), Request((1, 0, 1), [201] * 63, most=9)], Sampling())


def test_the_probe_finds_old_weights(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, engine = made(str(tmp_path), url, **SLOW)
    engine.update(0)
    monkeypatch.setattr(engine._sync, "send", lambda version: None)
    change(model, 3e-4)
    with pytest.raises(UserError, match="those of step 0 to the last bit"):
        engine.update(1)
    change(model, 0.1)
    with pytest.raises(UserError, match=r"not those of step 2: .* apart"):
        engine.update(2)
