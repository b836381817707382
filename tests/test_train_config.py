"""The configuration: what contradicts itself is refused, what --set says wins, and the reference is true."""

from __future__ import annotations

from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

import configuration_reference
from messages import lacking, naming
from trueshard import train
from trueshard.errors import UserError
from trueshard.train.config import Config
from trueshard.train.data.config import TEXT_FILES
from trueshard.train.models.build import architecture
from trueshard.train.parse import load_config
from trueshard.train.run.resuming import located, with_settings, write_settings

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.toml"))


def example(name: str, *overrides: str) -> object:
    return load_config(ROOT / "examples" / name, overrides)


def test_the_reference_is_that_of_the_code() -> None:
    assert configuration_reference.FILE.read_text() == configuration_reference.reference(), "run `make tables`"


def test_there_is_an_example_of_each_recipe() -> None:
    wanted = {"pretrain.toml", "continue.toml", "sft.toml", "lora.toml", "frozen_vision.toml", "dpo.toml"}
    assert wanted <= set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_is_valid(name: str) -> None:
    config = example(name)
    assert config.run.dir == f"runs/{name.removesuffix('.toml')}"  # type: ignore[attr-defined]


def test_demo_is_a_llama_of_ten_million_parameters() -> None:
    from transformers import AutoModelForCausalLM

    config = load_config(Path(train.__file__).parent / "demo.toml")
    assert config.tokenizer.vocab_size is not None
    settings = architecture(config, config.tokenizer.vocab_size)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings)
    assert settings.model_type == "llama"
    assert 9e6 < sum(parameter.numel() for parameter in model.parameters()) < 11e6


def test_sums_of_gradients_are_a_key_of_training() -> None:
    words = "train.accumulate=2", "train.accumulate_gradients=sharded"
    config: Any = example("pretrain.toml", *words)
    assert config.shard.options().accumulate_gradients == "sharded"
    config = example("pretrain.toml", *words, "shard.mixed_precision=bf16")
    again = with_settings(config, {"train.steps": 5, "train.accumulate_gradients": "whole"})
    assert again.shard.options().accumulate_gradients == "whole"
    with pytest.raises(UserError, match=naming("accumulate_gradients", "[train]", "[shard]")):
        example("pretrain.toml", *words, "shard.accumulate_gradients=whole")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model.path=a", "model.config=b"], ("exactly one", "model.path, model.config, model.architecture")),
        (["train.steps=3", "train.epochs=1"], ("exactly one", "train.steps and train.epochs")),
        (["data.format=text", "data.packing=true"], ("data.packing", 'data.format = "chat"')),
        (["preference.beta=0.2"], ("[preference]", 'data.format = "preference"')),
        (["model.quantize=int8"], ("model.quantize", "[adapter]")),
        (["data.streaming=true"], ("train.epochs", "data")),
        (["data.streaming=true", "train.steps=3"], ("evaluation.path", "missing")),
        (["schedule.class=torch.optim.lr_scheduler.StepLR"], ("schedule.warmup_steps", "schedule.class")),
        (["schedule.arguments={a = 1}"], ("schedule.arguments", "schedule.class")),
        (["schedule.decay_steps=3"], ("schedule.decay_steps", 'schedule.decay = "wsd"')),
        (["adapter.rnk=4"], ("adapter.rnk;", "adapter.rank")),
        (
            ["optimizer.groups=[{parameters = ['a'], lrr = 1.0}]"],
            ("optimizer.groups[0].lrr;", "optimizer.groups.lr"),
        ),
        (["shard.memory=3"], ("shard.memory", 3, "a valid string")),
        (["train.on_oom=panic"], ("train.on_oom", "panic")),
    ],
)
def test_keys_that_contradict_each_other_are_refused(overrides: list[str], said: tuple[object, ...]) -> None:
    with pytest.raises(UserError) as caught:
        example("sft.toml", *overrides)
    assert lacking(caught.value, *said) == []
    assert "\n" not in str(caught.value)


def test_a_key_of_the_command_line_takes_those_away_that_it_excludes() -> None:
    config = example("sft.toml", "model.path=somewhere", "train.steps=4")
    assert (config.model.path, config.model.architecture, config.model.fields) == ("somewhere", None, {})  # type: ignore[attr-defined]
    assert config.tokenizer.vocab_size is None  # type: ignore[attr-defined]
    assert (config.train.steps, config.train.epochs) == (4, None)  # type: ignore[attr-defined]
    kept = example("sft.toml", "model.fields.hidden_size=64")
    assert (kept.model.architecture, kept.model.fields["hidden_size"]) == ("qwen2", 64)  # type: ignore[attr-defined]


def test_what_may_change_on_resume_does_not_identify_the_run() -> None:
    first = example("sft.toml").identity()  # type: ignore[attr-defined]
    free = ("optimizer.lr=1.0", "shard.compile=true", "data.prefetch=0", "evaluation.every=7", "train.batch_size=4")
    assert example("sft.toml", *free).identity() == first  # type: ignore[attr-defined]
    for bound in ("train.seed=3", "data.answers_only=false", "evaluation.fraction=0.3", "model.freeze=['a']"):
        assert example("sft.toml", bound).identity() != first, bound  # type: ignore[attr-defined]


def test_a_schedule_by_the_evaluation_needs_one(tmp_path: Path) -> None:
    file = tmp_path / "plateau.toml"
    text = (ROOT / "examples" / "dpo.toml").read_text()
    assert "[evaluation]" in text
    head, _, rest = text.partition("[evaluation]")
    plateau = 'class = "torch.optim.lr_scheduler.ReduceLROnPlateau"'
    file.write_text(head + rest[rest.index("[train]") :].replace("warmup_steps = 5", plateau))
    with pytest.raises(UserError, match=naming("[evaluation]")):
        load_config(file)


RL = {
    "run": {"dir": "x"},
    "model": {"path": "m"},
    "data": {"format": "prompt", "path": "d"},
    "rl": {"samples": 4},
    "reward": {"function": "r.py:f"},
    "train": {"steps": 1, "batch_size": 8},
    "rollout": {"tokens": 64},
}


@pytest.mark.parametrize("key", ["top_p", "top_k", "min_p"])
def test_what_would_bias_the_ratio_is_refused(key: str) -> None:
    Config.model_validate(RL)
    with pytest.raises(ValidationError, match=f"rollout.{key}: the model would be trained on answers from the kept"):
        Config.model_validate(RL | {"rollout": {key: 0.9}})
    Config.model_validate(RL | {"evaluation": {"path": "e", "top_p": 0.9}})


@pytest.mark.parametrize(
    ("name", "overrides", "key", "value"),
    [
        ("sft.toml", ["optimizer.weight_decay="], "optimizer.weight_decay", None),
        ("sft.toml", ["train.batch_size=", "train.seed= "], "train.batch_size", 8),
        ("sft.toml", ["optimizer.lr=1.0", "optimizer.lr="], "optimizer.lr", 1e-3),
        ("sft.toml", ["optimizer.lr=", "optimizer.lr=1.0"], "optimizer.lr", 1.0),
        ("sft.toml", ["sample.prompt="], "sample.prompt", ""),
        ("sft.toml", ["data.format=", "data.packing="], "data.format", "text"),
        ("continue.toml", ["data.include="], "data.include", None),
        ("continue.toml", ["data.sources=", "data.path=a"], "data.sources", []),
        ("frozen_vision.toml", ["optimizer.groups="], "optimizer.groups", []),
        ("sft.toml", ["evaluation="], "evaluation", None),
        ("dpo.toml", ["evaluation=", "preference="], "evaluation", None),
        ("dpo.toml", ["evaluation.every=", "evaluation.fraction="], "evaluation.every", 100),
        ("lora.toml", ["evaluation=", "evaluation.every="], "evaluation", None),
        ("tensor.toml", ["shard.tensor="], "shard.tensor", 1),
        ("pretrain.toml", ["model.fields.hidden_size="], "model.fields.hidden_size", None),
        ("pretrain.toml", ["model.fields=", "model.fields.x="], "model.fields", {}),
        ("sft.toml", ["train.steps=", "train.max_grad_norm="], "train.epochs", 6.0),
    ],
)
def test_a_key_without_a_value_is_unset(name: str, overrides: list[str], key: str, value: Any) -> None:
    tree = example(name, *overrides).model_dump(by_alias=True)  # type: ignore[attr-defined]
    found = reduce(lambda table, part: table.get(part), key.split("."), tree)
    assert found == (TEXT_FILES if key == "data.include" else value)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("run.dir=", ("run.dir is missing",)),
        ("model=", ("model is missing",)),
        ("train.epochs=", ("train.steps, train.epochs", "none")),
        ("train.stepz=", ("--set train.stepz=", "unknown key", "train.steps")),
        ("evaluatoin=", ("unknown key evaluatoin", "evaluation")),
        ("train.batch_size.x=", ("train.batch_size is a value",)),
        ("data.=", ("section.key=",)),
        ("=", ("section.key=",)),
    ],
)
def test_what_cannot_be_unset_is_named(override: str, said: tuple[object, ...]) -> None:
    with pytest.raises(UserError) as caught:
        example("sft.toml", override)
    assert lacking(caught.value, *said) == []
    assert "\n" not in str(caught.value)


def test_what_best_stands_for_stays_the_same_in_a_run(tmp_path: Path) -> None:
    link, given = tmp_path / "best", [f"run.dir={tmp_path / 'run'}", f"model.path={tmp_path / 'best'}"]
    link.symlink_to("step-00000003")
    (tmp_path / "run").mkdir()
    for _ in range(2):
        config = located(load_config(ROOT / "examples" / "continue.toml", given))
        assert config.model.path == str(tmp_path / "step-00000003")
        write_settings(config, {})
        link.unlink()
        link.symlink_to("step-00000004")


SHARED = {"long_context.toml": "context", "mixture.toml": "experts", "tensor.toml": "tensor"}
"""Examples that are about what cannot be exact, and the axis that is in the way."""


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_is_exact_when_asked_for(name: str) -> None:
    """By one key; what is in the way of three is named with what takes it away, and then they are."""
    more = []
    if (axis := SHARED.get(name)) is not None:
        with pytest.raises(UserError, match=naming("train.exact", f"shard.{axis}", f"--set shard.{axis}=")):
            example(name, "train.exact=true")
        more = [f"shard.{axis}="]
    config = example(name, "train.exact=true", *more)
    assert [config.train.microbatch, config.train.accumulate] == [1, 1]  # type: ignore[attr-defined]
    assert config.shard.options().exact is True  # type: ignore[attr-defined]
    assert config.identity()["train.microbatch"] == 1  # type: ignore[attr-defined]
    assert example(name, "train.exact=true", "train.microbatch=2", *more).train.microbatch == 2  # type: ignore
    assert example(name, "train.exact=false") == example(name)


def test_an_accumulation_in_the_file_of_an_exact_run_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "exact.toml"
    file.write_text((ROOT / "examples" / "pretrain.toml").read_text().replace("[train]", "[train]\nexact = true"))
    with pytest.raises(UserError, match=naming("train.accumulate = 2", "train.exact", "train.microbatch")):
        load_config(file)
    assert load_config(file, ["train.microbatch=4"]).train.accumulate == 1
    assert load_config(file, ["train.accumulate="]).train.microbatch == 1


def test_what_goes_with_another_format_than_the_data_show_is_refused_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("no conversation")
    file = tmp_path / "run.toml"
    file.write_text(
        f'[run]\ndir = "{tmp_path}/run"\n[model]\nconfig = "a"\n[tokenizer]\npath = "b"\n'
        f'[data]\npath = "{tmp_path}/a.txt"\npacking = false\n[train]\nsteps = 1\n'
    )
    with pytest.raises(UserError, match=r"^data\.packing goes with data\.format") as error:
        located(load_config(file, []))
    assert "\n" not in str(error.value)
