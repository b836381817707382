"""A sample is a function of its name: whichever engine, however many ranks, stopped or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import trueshard
from parity import Ranks, assert_same
from resting import all_but
from test_train_losses import adapted

DIGITS = 5


def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained("examples/models/sort", local_files_only=True)


def records(count: int = 12) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(5)
    found = torch.randint(0, 10, (count, DIGITS), generator=generator).tolist()
    return [
        {"prompt": f"sort {' '.join(map(str, each[: 2 + n % 4]))} ->", "answer": " ".join(map(str, sorted(each)))}
        for n, each in enumerate(found)
    ]


def reward(completion: str, record: dict[str, Any], sample: Any) -> dict[str, float]:
    given, wanted = completion.split(), record["answer"].split()
    right = sum(a == b for a, b in zip(given, wanted, strict=False))
    return {"reward": right / DIGITS, "length": float(len(given))}


def model_of(kind: str = "llama", dtype: torch.dtype = torch.float32) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=14,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=kind == "tied",
        )
    ).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # far from uniform
    return adapted(model) if kind == "lora" else model


def run(rank: int, world: int, words: dict[str, Any]) -> dict[str, Any]:
    return trained(**words)


def trained(
    *,
    steps: int = 4,
    kind: str = "llama",
    copy: str = "gathered",
    accumulate: int = 1,
    updates: int = 1,
    start: dict[str, Any] | None = None,
    lr: float = 1e-2,
    words: dict[str, Any] | None = None,
    rl: dict[str, Any] | None = None,
    rollout: dict[str, Any] | None = None,
    folder: str | None = None,
) -> dict[str, Any]:
    """Train, and return every sample's name and tokens, the measures of each step, the weights, and the state."""
    model = model_of(kind)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    if start is not None:
        model.load_state_dict(start["weights"])
    trueshard.shard(model, optimizer, **words or {})
    rollouts = trueshard.rl.Rollouts(
        model,
        tokenizer(),
        records(),
        reward,
        batch_size=16,
        rl={"samples": 4, "updates": updates} | (rl or {}),
        rollout={"tokens": 8, "batch": 6, "copy": copy} | (rollout or {}),
        accumulate=accumulate,
        folder=Path(folder) if folder else None,
    )
    if start is not None:
        rollouts.load_state_dict(start["state"])
    found: dict[str, Any] = {"samples": {}, "measures": []}
    for _ in range(steps):
        batches = [next(rollouts) for _ in range(accumulate)]
        mean = trueshard.token_mean(model, sum(map(rollouts.loss.count, batches)))
        for number, batch in enumerate(batches, start=1):
            with trueshard.accumulate(model, last=number == accumulate):
                mean(rollouts.loss(model, batch)).backward()
        trueshard.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        measured = {k: v for k, v in rollouts.measures.items() if not k.startswith("seconds")}
        found["measures"].append(measured | rollouts.loss.measures())
        found["samples"] |= {sample.name: sample.tokens for sample in rollouts.current.samples}
        assert [scored.sample for scored in rollouts.current.scored] == rollouts.current.samples
    found["state"] = rollouts.state_dict()
    found["weights"] = {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
        for name, value in model.state_dict().items()
    }
    rollouts.close()
    return found


@pytest.fixture(scope="module")
def whole(alone: Ranks) -> dict[str, Any]:
    (found,) = alone.run(run, {})
    return found


def test_tokens_do_not_depend_on_the_number_of_ranks(
    whole: dict[str, Any], ranks2: Ranks, ranks3: Ranks, ranks4: Ranks
) -> None:
    assert len(whole["samples"]) >= 64
    for ranks, accumulate in ((ranks2, 2), (ranks3, 1), (ranks4, 3)):
        for found in ranks.run(run, {"accumulate": accumulate}):
            assert found["samples"] == whole["samples"]
            assert_same(found["weights"], whole["weights"], 1e-3, 1e-4)


@pytest.mark.rest
@pytest.mark.parametrize("copy", ["sharded", "kept"])
def test_each_form_of_the_engine_gives_the_same_tokens_and_weights(copy: str, ranks2: Ranks) -> None:
    wanted = ranks2.run(run, {})[0]
    for found in ranks2.run(run, {"copy": copy}):
        assert found["samples"] == wanted["samples"]
        assert_same(found["weights"], wanted["weights"])
        assert found["measures"] == wanted["measures"]


@pytest.mark.rest
def test_the_mismatch_of_the_embedded_engine_is_rounding(whole: dict[str, Any], ranks2: Ranks) -> None:
    for measured in whole["measures"]:
        assert 0 < measured["mismatch_max"] < 2e-5
        assert measured["ratio_max"] == 1.0
    (found, _) = ranks2.run(run, {"words": {"mixed_precision": "bf16"}})
    assert found["measures"][0]["mismatch_max"] < 0.1


@pytest.mark.parametrize("updates", all_but([2], [1, 2]))
def test_a_run_that_was_stopped_goes_on_as_if_it_was_not(updates: int, alone: Ranks, ranks2: Ranks) -> None:
    """Also in the middle of the steps of one rollout, and at another number of ranks."""
    (wanted,) = alone.run(run, {"updates": updates, "lr": 0.0})
    (first,) = alone.run(run, {"steps": 1, "updates": updates, "lr": 0.0})
    for ranks in (alone, ranks2):
        found = ranks.run(run, {"steps": 3, "updates": updates, "start": first, "lr": 0.0})[0]
        assert first["samples"] | found["samples"] == wanted["samples"]


@pytest.mark.rest
def test_at_a_learning_rate_of_zero_the_ratio_is_one_and_there_is_no_divergence(ranks2: Ranks) -> None:
    settings = {"kl": 0.1, "skip_equal": False}
    for kind in ("lora", "tied"):
        extra = {"kl": 0.0} if kind == "tied" else {}  # no reference without an adapter
        found = ranks2.run(run, {"kind": kind, "lr": 0.0, "updates": 2, "accumulate": 3, "rl": settings | extra})[0]
        for measured in found["measures"]:
            assert measured["ratio_max"] == 1.0
            assert measured["clipped_low"] == measured["clipped_high"] == 0.0


def test_temperature_enters_once_on_both_sides(alone: Ranks) -> None:
    (found,) = alone.run(run, {"steps": 2, "rollout": {"temperature": 0.6}})
    assert all(measured["mismatch_max"] < 2e-5 for measured in found["measures"])


def loaded_later(rank: int, world: int) -> float:
    """As on a resume: the engine is made, and then the model gets other weights. Returns the first mismatch."""
    model = model_of()
    trueshard.shard(model)
    words = {"samples": 4}, {"tokens": 8, "copy": "gathered"}
    rollouts = trueshard.rl.Rollouts(model, tokenizer(), records(), reward, batch_size=8, rl=words[0], rollout=words[1])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    rollouts.loss(model, next(rollouts)).backward()
    rollouts.close()
    return float(rollouts.loss.measures()["mismatch_max"])


def test_answers_come_from_weights_that_were_loaded_after_the_engine_was_made(ranks2: Ranks) -> None:
    assert max(ranks2.run(loaded_later)) < 2e-5
