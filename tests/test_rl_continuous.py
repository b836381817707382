"""Continuous batching gives what the other forms of the engine give, and leaves nothing behind."""

from __future__ import annotations

import importlib
import sys
import threading
from typing import Any

import pytest
import torch

import trueshard
from parity import Ranks, assert_same
from test_rl_rollouts import model_of, run, tokenizer
from trueshard.errors import UserError
from trueshard.train.config import Config
from trueshard.train.rl.config import RolloutSection
from trueshard.train.rl.engine import TransformersEngine, choose_engine, import_continuous
from trueshard.train.rl.sampler import PromptEncoder
from trueshard.train.rl.samples import Answer, Request, Sampling

CONTINUOUS = {"rollout": {"continuous": True}}
ENDS = {1}


def requests(count: int, most: int) -> list[Request]:
    """Texts of 3 to 19 tokens, and answers of 1 to `most`."""
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(2, 14, (3 + n % 17,), generator=generator).tolist() for n in range(count)]
    return [Request((1, n // 4, n % 4), text, first=n % 3, most=1 + n % most) for n, text in enumerate(texts)]


def of_kind(kind: str) -> Any:
    import transformers

    small = {
        "vocab_size": 14,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
    }
    if kind == "sliding":
        config: Any = transformers.Gemma3TextConfig(
            **small, num_key_value_heads=2, head_dim=8, layer_types=["sliding_attention", "full_attention"]
        )
        config.sliding_window = 12
        return transformers.Gemma3ForCausalLM(config)
    if kind == "mamba":
        return transformers.MambaForCausalLM(transformers.MambaConfig(**small))
    if kind == "local":
        types = [[["global", "local"], 1]]
        return transformers.GPTNeoForCausalLM(
            transformers.GPTNeoConfig(
                vocab_size=14, hidden_size=32, num_layers=2, num_heads=4, window_size=4, attention_types=types
            )
        )
    model = model_of("lora" if kind == "lora" else "llama")
    if kind == "eager":
        model.set_attn_implementation("eager")
    return model


def both(rank: int, world: int, kind: str, sampling: Sampling) -> tuple[list[Answer], list[Answer], bool]:
    """What `generate` and continuous batching answer, and whether the latter left all as it was."""
    model = of_kind(kind)
    trueshard.shard(model)
    asked = requests(90, 23)
    encoder = PromptEncoder(tokenizer())
    wanted = TransformersEngine(model, encoder, ENDS, batch=16).generate(asked, sampling)
    engine = import_continuous().ContinuousEngine(model, encoder, ENDS, batch=16)
    generator, threads = torch.get_rng_state(), threading.active_count()
    found = engine.generate(asked, sampling)
    untouched = torch.equal(generator, torch.get_rng_state()) and threading.active_count() <= threads
    engine.close()
    return wanted, found, untouched


@pytest.mark.rest
def test_a_run_trains_on_the_same_tokens(ranks2: Ranks) -> None:
    wanted, _ = ranks2.run(run, {"steps": 2})
    for found in ranks2.run(run, {"steps": 2, **CONTINUOUS}):
        assert found["samples"] == wanted["samples"]
        assert_same(found["weights"], wanted["weights"], 1e-4, 1e-5)
        assert all(each["mismatch_max"] < 2e-5 for each in found["measures"])


@pytest.mark.rest
def test_tokens_do_not_depend_on_the_number_of_ranks(alone: Ranks, ranks2: Ranks, ranks3: Ranks) -> None:
    (wanted,) = alone.run(run, {"steps": 4})
    for ranks in (alone, ranks2, ranks3):
        for found in ranks.run(run, {"steps": 4, **CONTINUOUS}):
            assert found["samples"] == wanted["samples"]
            assert_same(found["weights"], wanted["weights"], 1e-3, 1e-4)


SAMPLINGS = {
    "plain": Sampling(seed=1),
    "warped": Sampling(seed=1, temperature=0.7, top_p=0.9, top_k=9),
    "greedy": Sampling(temperature=0),
    "stop": Sampling(seed=2, stop=["3 4", "9"]),
}


@pytest.mark.rest
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *(("llama", how) for how in SAMPLINGS),
        ("eager", "warped"),
        ("lora", "plain"),
        ("lora", "stop"),
        ("sliding", "stop"),
    ],
)
def test_each_way_of_drawing_gives_the_same_answers(kind: str, how: str, ranks2: Ranks) -> None:
    for wanted, found, untouched in ranks2.run(both, kind, SAMPLINGS[how]):
        assert [each.ids for each in found] == [each.ids for each in wanted]
        assert [each.finished for each in found] == [each.finished for each in wanted]
        for mine, theirs in zip(found, wanted, strict=True):
            assert mine.logprobs == pytest.approx(theirs.logprobs, abs=2e-5)
        assert untouched


def refusal(rank: int, world: int, kind: str, words: dict[str, Any]) -> str:
    model = of_kind(kind)
    trueshard.shard(model)
    with pytest.raises(UserError) as caught:
        choose_engine(RolloutSection(continuous=True, **words), model, PromptEncoder(tokenizer()), None)
    return str(caught.value)


@pytest.mark.rest
def test_a_model_without_pages_is_refused_in_one_line(ranks2: Ranks) -> None:
    for kind, name in (("mamba", "MambaForCausalLM"), ("local", "GPTNeoForCausalLM")):
        for said in ranks2.run(refusal, kind, {}):
            assert said.startswith("rollout.continuous: ")
            assert name in said
            assert said.endswith("; remove it")
            assert "\n" not in said


def test_what_does_not_go_together_is_refused() -> None:
    for words, said in (
        ({"copy": "kept"}, 'rollout.copy is "kept"; use "gathered"'),
        ({"engine": "vllm", "url": "http://127.0.0.1:1"}, 'rollout.engine = "transformers" only'),
    ):
        with pytest.raises(ValueError, match=said):
            RolloutSection(continuous=True, **words)
    with pytest.raises(ValueError, match=r"rollout\.continuous goes with prompts of text only"):
        Config(
            run={"dir": "runs"},
            model={"path": "model"},
            data={"format": "prompt", "path": "a.jsonl", "images": True},
            rl={},
            rollout={"continuous": True, "tokens": 8},
            reward={"function": "a.py:b"},
            train={"steps": 1, "sequence_length": 32, "batch_size": 8},
        )


def test_another_transformers_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "transformers.generation.continuous_batching.cb_logits_processors"
    importlib.import_module(name)
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "trueshard.train.rl.continuous", raising=False)
    monkeypatch.delattr("trueshard.train.rl.continuous", raising=False)
    with pytest.raises(UserError, match=r"rollout.continuous needs the continuous batching of transformers 5\.\d+ to"):
        import_continuous()
