"""`model.attention`, `model.kernels` and `model.rope_scaling`: checked before a run, then as on one process."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import trueshard
from added_environment import site_of
from gathering import whole
from messages import naming
from parity import Pool, Ranks, assert_same
from resting import all_but
from trueshard.errors import UserError
from trueshard.train.config import Config
from trueshard.train.losses import CausalLoss
from trueshard.train.models import kernels
from trueshard.train.models.build import architecture, build, plain_settings
from trueshard.train.models.values import fill
from trueshard.train.run import forecast
from trueshard.train.run.session import check_apart

VOCABULARY = 303
"""Odd, so that no number of ranks divides it"""
LLAMA: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def config(train: dict[str, Any] | None = None, **model: Any) -> Config:
    tree: dict[str, Any] = {
        "run": {"dir": "run"},
        "model": {"architecture": "llama", "fields": LLAMA} | model,
        "tokenizer": {"vocab_size": VOCABULARY},
        "data": {"path": "stdlib"},
        "train": {"steps": 1, "seed": 7} | (train or {}),
    }
    return Config.model_validate(tree)


def made(given: Config) -> Any:
    model = build(given, architecture(given, VOCABULARY))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trueshard.shard(model)
    fill(given, model)
    return model


def batch(rows: int, length: int = 24) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    positions = torch.cat([torch.arange(10), torch.arange(length - 10)]).expand(rows, length)  # two packed documents
    return {
        **{name: torch.randint(0, VOCABULARY, (rows, length)) for name in ("input_ids", "targets")},
        "position_ids": positions.contiguous(),
    }


def trained(rank: int, world: int, given: Config, site: str = "") -> dict[str, torch.Tensor]:
    """Gradients after one pass over a packed batch, and the loss; of all ranks' rows."""
    if site:
        interpret(site)
    model = made(given)
    check_apart(model, torch.device("cpu"))
    rows = 6 // world
    part = {name: value[rank * rows : (rank + 1) * rows] for name, value in batch(6).items()}
    (CausalLoss()(model, part) / (rows * 24)).backward()
    return whole({name: parameter.grad for name, parameter in model.named_parameters()})


def interpret(site: str) -> None:
    """Let triton's interpreter run Liger's kernels here: it takes no floats, and lacks one function of CUDA."""
    os.environ["TRITON_INTERPRET"] = "1"
    if site not in sys.path:
        sys.path.append(site)
    import numpy as np
    from liger_kernel.ops import rms_norm
    from triton import language
    from triton.runtime import interpreter

    rms_norm.rsqrt = lambda value: language.rsqrt(value)
    taken = interpreter._implicit_cvt

    def converted(value: Any) -> Any:
        if type(value) is not float:
            return taken(value)
        handle = interpreter.TensorHandle(np.array([value], np.float32), language.float32)
        return language.tensor(handle, language.float32)

    interpreter._implicit_cvt = converted


SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
}


@pytest.mark.parametrize(
    "model",
    all_but([{"attention": "eager"}], [{"attention": "eager"}, {"rope_scaling": SCALINGS["yarn"]}]),
    ids=lambda each: next(iter(each)),
)
def test_training_is_that_of_one_process(model: dict[str, Any], alone: Ranks, ranks3: Ranks) -> None:
    given = config(**model)
    (expected,) = alone.run(trained, given)
    for found in ranks3.run(trained, given):
        assert_same(found, expected, rtol=1e-4, atol=1e-6)


def test_attention_is_what_was_asked_for() -> None:
    for word in ("eager", "sdpa"):
        model: Any = build(config(attention=word), architecture(config(attention=word), VOCABULARY))
        assert model.config._attn_implementation == word
    given = config(attention="eager")
    assert build(given, architecture(given, VOCABULARY)).config._attn_implementation == "eager"


@pytest.mark.parametrize(("kind", "table"), SCALINGS.items(), ids=SCALINGS)
def test_a_scaled_model_is_that_of_transformers(kind: str, table: dict[str, Any]) -> None:
    settings = architecture(config(rope_scaling=table), VOCABULARY)
    factor = table["factor"]
    own = {} if kind == "linear" else {"original_max_position_embeddings": 64}
    more = {"max_position_embeddings": int(64 * factor), "rope_parameters": {"rope_theta": 10000.0} | own | table}
    expected = LlamaConfig(**LLAMA | {"vocab_size": VOCABULARY} | more)
    assert plain_settings(settings) == plain_settings(expected)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(settings)
    plain = AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA | {"vocab_size": VOCABULARY}))
    plain.load_state_dict(model.state_dict())
    ids = torch.randint(0, VOCABULARY, (1, 48))
    assert not torch.allclose(model(input_ids=ids).logits, plain(input_ids=ids).logits)


REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "dynamic": ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, ("model.rope_scaling", "dynamic", "yarn")),
    "no factor": ({"rope_scaling": {"rope_type": "yarn"}}, ("model.rope_scaling", "factor")),
    "misspelt": ({"rope_scaling": {"rope_type": "yarn", "factr": 2.0}}, ("model.rope_scaling.factr", "factor")),
    "scaled twice": (
        {"fields": LLAMA | {"rope_parameters": SCALINGS["linear"]}, "rope_scaling": SCALINGS["yarn"]},
        ("model.rope_scaling", "linear", "original_max_position_embeddings"),
    ),
    "no rotary": (
        {"architecture": "gpt2", "fields": {"n_embd": 8, "n_head": 2}, "rope_scaling": SCALINGS["yarn"]},
        ("model.rope_scaling", "gpt2"),
    ),
    "not in the model": (
        {
            "architecture": "bloom",
            "fields": {"hidden_size": 8, "n_head": 2},
            "attention": "flash_attention_2",
            "dtype": "bfloat16",
        },
        ("model.attention", "flash_attention_2", "sdpa"),
    ),
}


@pytest.mark.parametrize(("model", "words"), REFUSED.values(), ids=REFUSED)
def test_what_the_model_cannot_do_is_said_before_a_run(model: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match=naming(*words)):
        architecture(config(**model), VOCABULARY)


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is said of a machine without GPUs")
def test_what_this_machine_lacks_is_said_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, find = LlamaConfig(), kernels.importlib.util.find_spec
    for word, remedy in (
        ("flash_attention_2", "flash-attn"),
        ("flash_attention_3", "hopper"),
        ("flex_attention", "GPU"),
    ):
        with pytest.raises(UserError, match=naming("model.attention", word, remedy, "remove")):
            kernels.check_here(config(attention=word, dtype="bfloat16").model, settings)
    with pytest.raises(UserError, match=naming("model.kernels", "pip install liger-kernel")):
        kernels.check_here(config(kernels="liger").model, settings)
    monkeypatch.setattr(
        kernels.importlib.util, "find_spec", lambda name: name in ("flash_attn", "liger_kernel") or find(name)
    )
    with pytest.raises(UserError, match=naming("flash_attention_2", "8.0")):
        kernels.check_here(config(attention="flash_attention_2", dtype="bfloat16").model, settings)
    with pytest.raises(UserError, match=naming("model.kernels", "GPU")):
        kernels.check_here(config(kernels="liger").model, settings)


def test_what_does_not_go_with_the_kernels_is_said() -> None:
    with pytest.raises(ValueError, match=naming("flash_attention_2", "float32", "shard.mixed_precision")):
        config(attention="flash_attention_2")
    with pytest.raises(ValueError, match=naming("flash_attention_3", "train.exact")):
        config({"exact": True}, attention="flash_attention_3", dtype="bfloat16")
    tree = config(kernels="liger").model_dump(by_alias=True, exclude_unset=True) | {"shard": {"tensor": 2}}
    with pytest.raises(ValueError, match=naming("model.kernels", "shard.tensor")):
        Config.model_validate(tree)


def test_a_run_may_go_on_with_other_kernels_unless_it_is_exact() -> None:
    assert config(attention="eager").identity() == config(kernels="liger").identity() == config().identity()
    exact = {"exact": True}
    assert config(exact, attention="eager").identity() != config(exact).identity()
    assert config(rope_scaling=SCALINGS["yarn"]).identity() != config().identity()


def test_a_forecast_says_what_it_takes_instead() -> None:
    assert kernels.assumptions(config(attention="eager").model) == ()
    said = kernels.assumptions(config(attention="flash_attention_2", kernels="liger", dtype="bfloat16").model)
    assert "flash_attention_2" in said[0]
    assert "Liger" in said[1]


@pytest.mark.rest
def test_a_forecast_counts_the_scores_of_eager_attention(tmp_path: Path) -> None:
    peaks = {}
    (tmp_path / "config.json").write_text(LlamaConfig(**LLAMA | {"max_position_embeddings": 2048}).to_json_string())
    for word in ("eager", "sdpa", "flash_attention_2"):
        tree = config(attention=word, dtype="bfloat16").model_dump(by_alias=True, exclude_unset=True)
        tree["model"] = {"config": str(tmp_path), "attention": word, "dtype": "bfloat16"}
        tree["train"]["sequence_length"] = 2048
        study = forecast.plan(Config.model_validate(tree), "h100", 2)
        peaks[word] = study.forecast.peak_live_bytes
        assert any("flash_attention_2" in said for said in study.assumptions) is (word == "flash_attention_2")
    assert peaks["eager"] > 1.5 * peaks["sdpa"] == 1.5 * peaks["flash_attention_2"]


# Liger, by triton's interpreter; in the environment of `make liger`


def ligers(rank: int, world: int, given: Config, site: str) -> dict[str, Any]:
    interpret(site)
    model = build(given, architecture(given, VOCABULARY))
    return {type(module).__name__: module.forward.__func__.__module__ for module in model.modules()}


@pytest.mark.rest
@pytest.mark.timeout(300)
def test_ligers_kernels_train_as_on_one_process_and_as_the_models_own(alone: Ranks) -> None:
    site, given, pool = site_of("liger"), config(kernels="liger"), Pool()  # in these transformers is changed for good
    (expected,) = Ranks(1, pool).run(trained, given, site, timeout=200)
    for found in Ranks(3, pool).run(trained, given, site, timeout=200):
        assert_same(found, expected, rtol=1e-4, atol=1e-6)
    (plain,) = alone.run(trained, config())
    assert_same(expected, plain, rtol=1e-3, atol=1e-5)
    assert any(not torch.equal(expected[name], plain[name]) for name in plain), "other kernels round otherwise"
    (found,) = Ranks(1, pool).run(ligers, given, site, timeout=200)
    pool.close()
    assert found["LlamaRMSNorm"].startswith("liger_kernel.")
    assert found["LlamaForCausalLM"].startswith("transformers."), "the loss stays the run's own"
