"""`trueshard convert`: other frameworks' configurations become ours, key by key."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import accelerate
import peft
import pytest
import torch
import transformers
import yaml
from accelerate.commands.config.config_args import ClusterConfig, SageMakerConfig
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin, constants
from accelerate.utils import dataclasses as accelerate_dataclasses
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, trainer, trainer_utils, training_args

import trueshard
from convert_tables import FILE, fill
from messages import lacking
from parity import Ranks
from resting import all_but
from trueshard.convert.converting import Converted, convert
from trueshard.convert.engine import Draft, Wrong, our_default
from trueshard.convert.tables import FRAMEWORKS, Framework, spelled, table
from trueshard.errors import UserError
from trueshard.plans import Plan
from trueshard.train.config import Config
from trueshard.train.parse import fields, load_config

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples" / "coming_from"
RANKS = {"torchtitan.toml": 8, "deepspeed.json": 8, "composer.yaml": 8, "training_arguments.json": 8, "trl.yaml": 4}
RANKS |= {"axolotl.yaml": 8, "torchtune.yaml": 8}
EXAMPLE_FILES = ["accelerate.yaml", "composer.yaml", "fsdp.env", "torchtitan.toml", "training_arguments.json"]
EXAMPLE_FILES += ["deepspeed.json", "easyr1.yaml", "verl.yaml", "trl.yaml", "axolotl.yaml", "torchtune.yaml"]
KNOWN = {source.name: set(source.index) for source in FRAMEWORKS}
RULES = {source.name: source.index for source in FRAMEWORKS}
PLACEHOLDERS = {
    "model.path": "model",
    "data.path": "data",
    "model.config": "model",
    "train.steps": 10,
    "train.batch_size": 32,
    "train.sequence_length": 4096,
    "reward.function": "rewards.py:score",
    "rl.samples": 4,
    "rl.advantage": "group",
}
BASES: dict[str, dict[str, Any]] = {
    "accelerate": {"distributed_type": "FSDP", "num_processes": 4},
    "hf": {"output_dir": "out"},
    "easyr1": {"worker.rollout.n": 4},
    "verl": {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 4},
    "trl": {"model_name_or_path": "m", "dataset_name": "d"},
}
"""Keys that a file of a framework needs beside those that a test is about."""


def written(folder: Path, name: str, content: Any) -> Path:
    path = folder / name
    if not isinstance(content, str):
        content = yaml.safe_dump(content) if path.suffix == ".yaml" else json.dumps(content)
    path.write_text(content)
    return path


def nested(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as tables."""
    tree: dict[str, Any] = {}
    for key, value in keys.items():
        *tables, last = key.split(".")
        inner = tree
        for name in tables:
            inner = inner.setdefault(name, {})
        inner[last] = value
    return tree


def converted(
    folder: Path, source: str, keys: Mapping[str, Any] | None = None, ranks: int | None = 4, *, base: bool = True
) -> Converted:
    """Convert a file of a framework that has these keys, dotted, beside those of `BASES`."""
    keys = (BASES.get(source, {}) if base else {}) | dict(keys or {})
    if source == "environment":
        return convert(None, environment={key: str(value) for key, value in keys.items()})
    return convert(written(folder, "tree.json", nested(keys)), source, ranks=ranks)


def accepted(folder: Path, result: Converted, **more: Any) -> Config:
    """The text as `trueshard train` reads it, with what it asks for."""
    path = folder / f"accepted{len(list(folder.iterdir()))}.toml"
    path.write_text(result.toml)
    asked = {key: value for key, value in {**PLACEHOLDERS, **more}.items() if key in result.missing}
    return load_config(path, [f"{key}={json.dumps(value)}" for key, value in asked.items()])


def value_of(config: Config, key: str) -> Any:
    """The value of a dotted key; None below a section that is not there."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name, None)
    return value


def status(result: Converted, key: str) -> list[str]:
    return [entry.status for entry in result.entries if entry.key == key]


# ---- every key of what is installed is known


def test_every_field_of_accelerates_plugin_is_known_in_yaml_environment_and_fsdp_config() -> None:
    fields = [field.name for field in dataclasses.fields(FullyShardedDataParallelPlugin)]
    assert "cpu_offload" in fields
    for source, file in (("accelerate", "accelerate"), ("environment", "environment"), ("hf", "huggingface")):
        (include,) = [row for row in table(file)["rule"] if row.get("include") == "fsdp"]
        assert set(spelled(include, fields)) <= KNOWN[source]


def test_every_field_of_accelerates_yaml_is_known() -> None:
    known = {key.partition(".")[0] for key in KNOWN["accelerate"]}
    fields = {field.name for kind in (ClusterConfig, SageMakerConfig) for field in dataclasses.fields(kind)}
    assert fields <= known


def test_every_option_of_accelerates_launcher_that_a_section_may_hold_is_known() -> None:
    options = {action.dest for action in launch_command_parser()._actions}
    sections = {"fsdp_": "fsdp_config", "dynamo_": "dynamo_config", "parallelism_config_": "parallelism_config"}
    wanted = {
        f"{section}.{name}" for name in options for prefix, section in sections.items() if name.startswith(prefix)
    }
    assert len(wanted) > 25
    assert wanted <= KNOWN["accelerate"]


def quoted_variables() -> Iterator[str]:
    """Names of variables in the sources of Accelerate, PEFT and transformers."""
    for package in (accelerate, peft, transformers):
        for file in Path(package.__file__ or "").parent.rglob("*.py"):
            text = file.read_text(encoding="utf-8")
            yield from re.findall(r"[\"']((?:FSDP|ACCELERATE|PARALLELISM_CONFIG)_[A-Z0-9_]*[A-Z0-9])[\"']", text)


def prefixed_variables() -> Iterator[str]:
    """Names that Accelerate's dataclasses put together from a prefix and the rest."""
    for name, kind in inspect.getmembers(accelerate_dataclasses, inspect.isclass):
        if kind.__module__ == accelerate_dataclasses.__name__ and name != "MegatronLMPlugin":
            source = inspect.getsource(kind)
            for prefix in set(re.findall(r'prefix = "([A-Z0-9_]+_)"', source)):
                yield from (prefix + rest for rest in re.findall(r'prefix \+ "([A-Z0-9_]+)"', source))


@pytest.mark.rest
def test_every_variable_that_accelerate_peft_and_transformers_name_is_known() -> None:
    named = {*quoted_variables(), *prefixed_variables()}
    assert {"FSDP_TRANSFORMER_CLS_TO_WRAP", "FSDP_RESHARD_AFTER_FORWARD", "ACCELERATE_DYNAMO_MODE"} <= named
    assert named - KNOWN["environment"] == set()


def test_every_training_argument_is_known() -> None:
    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert fields - {key.partition(".")[0] for key in KNOWN["hf"]} == set()


def test_every_key_that_transformers_reads_from_fsdp_config_is_known() -> None:
    source = inspect.getsource(training_args) + inspect.getsource(trainer)
    read = set(re.findall(r'(?<!xla_)fsdp_config(?:\.get\(|\[|\.setdefault\()"(\w+)"', source))
    assert "transformer_layer_cls_to_wrap" in read
    assert {f"fsdp_config.{key}" for key in read} <= KNOWN["hf"]


def test_every_word_of_what_is_installed_is_known() -> None:
    hf, yaml = RULES["hf"], RULES["accelerate"]
    assert {kind.value for kind in trainer_utils.SchedulerType} <= set(hf["lr_scheduler_type"].words)
    assert {name.value for name in training_args.OptimizerNames} <= set(hf["optim"].words)
    backends = {backend.value.lower() for backend in accelerate_dataclasses.DynamoBackend}
    assert backends <= set(yaml["dynamo_config.dynamo_backend"].words)
    assert set(constants.FSDP_SHARDING_STRATEGY) <= set(yaml["fsdp_config.fsdp_sharding_strategy"].words)
    assert set(constants.FSDP_AUTO_WRAP_POLICY) <= set(yaml["fsdp_config.fsdp_auto_wrap_policy"].words)


# ---- the rules as a whole


@pytest.mark.parametrize("source", FRAMEWORKS, ids=lambda source: source.name)
def test_no_key_is_known_twice(source: Framework) -> None:
    assert len(source.index) == sum(len(rule.keys) for rule in source.rules)


def names_of(section: str) -> set[str]:
    return {key.split(".")[1] for key in fields() if key.startswith(f"{section}.")}


@pytest.mark.parametrize("source", FRAMEWORKS, ids=lambda source: source.name)
def test_each_key_that_a_rule_names_is_one_of_ours(source: Framework) -> None:
    named = {rule.becomes for rule in source.rules if re.fullmatch(r"[a-z]+\.[a-z_.]+", rule.becomes)}
    assert len(named) > 5
    for section, name in (key.split(".")[:2] for key in named):
        assert name in names_of(section), f"{section}.{name}"


VALUES: list[Any] = [True, 2, "2", 0.5, -1, "1ep", {}, {"min_lr_rate": 0.1}]
VALUES += ["none", "no", "never", "full_shard", "FSDP", "NO_WRAP", "BACKWARD_PRE", "PURE", "selective", "op"]
VALUES += ["adamw_torch", "AdamW", "linear", "steps", "float32", "amp_bf16", "inductor"]
VALUES += [512, "drop", "grpo", "k1", "gspo", "token", "token-mean", "cosine", [0.9, 0.999], ["a"], [{"path": "a"}]]
VALUES += [{"name": "decoupled_adamw"}, {"name": "cosine_with_warmup"}]
AS_ANOTHER = {"composer": ("parallelism_config.fsdp2.", "fsdp_config."), "hf": ("evaluation_strategy",)}
AS_ANOTHER |= {"axolotl": ("evaluation_strategy", "fsdp_config.fsdp_")}
"""Keys with the rules of others, under whose name they are told."""


QUICK = [each for each in FRAMEWORKS if each.name in ("accelerate", "deepspeed", "environment")]
"""Those with the fewest keys."""


@pytest.mark.parametrize("source", all_but(QUICK, FRAMEWORKS), ids=lambda source: source.name)
def test_every_key_is_told_whatever_its_value(source: Framework, tmp_path: Path) -> None:
    for key in (key for rule in source.own for key in rule.keys):
        if key.startswith(AS_ANOTHER.get(source.name, ("-",))):
            continue
        taken = 0
        is_section = any(other.startswith(f"{key}.") for other in KNOWN[source.name])
        for value in (each for each in VALUES if not (is_section and isinstance(each, dict))):  # their keys are told
            try:
                result = converted(tmp_path, source.name, {key: value}, base=False)
            except UserError:
                continue
            assert status(result, key), f"{key} = {value}: nothing is said of it"
            taken += 1
            if taken == 3:
                break
        assert taken, f"{key}: no value is taken"


def test_the_page_has_the_present_tables() -> None:
    page = FILE.read_text(encoding="utf-8")
    assert fill(page) == page, "run `make tables`"


# ---- the examples


@pytest.mark.parametrize("name", EXAMPLE_FILES)
def test_an_example_becomes_what_lies_beside_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES)
    out = Path(name).with_suffix(".out.toml")
    assert convert(Path(name), ranks=RANKS.get(name), out=out).toml == out.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", EXAMPLE_FILES)
def test_an_example_is_accepted_once_what_it_asks_is_set(name: str, tmp_path: Path) -> None:
    functions = {"reward.function": ["rewards.py:right", "rewards.py:form"]} if name == "trl.yaml" else {}
    config = accepted(tmp_path, convert(EXAMPLES / name, ranks=RANKS.get(name)), **functions)
    assert "bf16" in (config.shard.mixed_precision, {"bfloat16": "bf16"}.get(config.model.dtype))


def test_the_torchtitan_example_says_the_right_thing(tmp_path: Path) -> None:
    config = accepted(tmp_path, convert(EXAMPLES / "torchtitan.toml", ranks=8))
    assert (config.train.batch_size, config.train.accumulate, config.train.sequence_length) == (32, 4, 8192)
    assert (config.schedule.decay, config.schedule.decay_steps, config.schedule.final) == ("wsd", 800, 0.1)
    assert (config.optimizer.lr, config.optimizer.betas, config.optimizer.no_decay) == (3e-4, [0.9, 0.95], [])
    assert config.shard.activation_checkpointing == {"*[13579]": "full"}
    assert (config.data.path, config.data.streaming) == ("allenai/c4", True)


def test_the_composer_example_says_the_right_thing(tmp_path: Path) -> None:
    config = accepted(tmp_path, convert(EXAMPLES / "composer.yaml", ranks=8))
    assert (config.train.steps, config.train.batch_size, config.train.accumulate) == (24800, 256, 4)
    assert (config.schedule.decay, config.schedule.warmup_steps, config.schedule.final) == ("cosine", 100, 0.1)
    assert config.evaluation is not None
    assert config.evaluation.every == 1000


def test_the_environment_example_says_the_right_thing(tmp_path: Path) -> None:
    config = accepted(tmp_path, convert(EXAMPLES / "fsdp.env"))
    assert config.shard.units == ["LlamaDecoderLayer", "LlamaMLP"]
    assert (config.shard.reshard_after_forward, config.shard.offload) == ("never", "cpu")
    assert config.train.accumulate == 2


def plan_of(rank: int, world: int, words: dict[str, Any]) -> list[tuple[str, bool | int, str]]:
    """What `shard()` does to a tiny Llama with these words of `[shard]`."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))
    optimizer = torch.optim.AdamW(model.parameters())
    plan = trueshard.shard(model, optimizer, **words)
    assert plan.mixed_precision is not None
    return [
        (unit.name, unit.reshard_after_forward, unit.activation_checkpointing)
        for unit in plan.units
        if unit.kind in ("block", "root")
    ] + [("compute", True, str(plan.mixed_precision.compute))]


def words_of(config: Config) -> dict[str, Any]:
    """Those of `[shard]` that `shard()` takes."""
    words = config.shard.model_dump()
    return {name: value for name, value in words.items() if name in inspect.signature(trueshard.shard).parameters}


@pytest.mark.parametrize("name", ["accelerate.yaml", "training_arguments.json"])
def test_an_example_gives_the_plan_that_its_framework_would(name: str, tmp_path: Path, alone: Ranks) -> None:
    words = words_of(accepted(tmp_path, convert(EXAMPLES / name, ranks=8)))
    plan = alone.run(plan_of, words)[0]
    blocks = [(f"model.layers.{number}", True, "full") for number in range(4)]
    assert sorted(plan) == sorted([*blocks, ("", True, "none"), ("compute", True, "bfloat16")])


def test_every_second_block_is_recomputed_as_torchtitan_counts_them(tmp_path: Path, alone: Ranks) -> None:
    words = words_of(accepted(tmp_path, convert(EXAMPLES / "torchtitan.toml", ranks=8)))
    plan = alone.run(plan_of, words | {"compile": False})[0]
    assert [name for name, _, recompute in plan if recompute == "full"] == ["model.layers.1", "model.layers.3"]


# ---- what keys mean


def freed(word: str, copies: int) -> dict[str, Any]:
    return {"shard.reshard_after_forward": word, "shard.replicate": copies}


def scheduled(kind: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"lr_scheduler_type": kind, "lr_scheduler_kwargs": arguments}


def falls(decay: str, final: float) -> dict[str, Any]:
    return {"schedule.decay": decay, "schedule.final": pytest.approx(final)}


FSDP, PARALLELISM = "fsdp_config.fsdp_", "parallelism."
STEP = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 5}
COPIES = {"distributed_type": "MULTI_GPU", "num_processes": 8, "parallelism_config.parallelism_config_tp_size": 4}
TENSOR = {"training.local_batch_size": 8, "parallelism.tensor_parallel_degree": 2}
SHARED = TENSOR | {"parallelism.context_parallel_degree": 2}
VALIDATION = {"enable": True, "steps": 5, "local_batch_size": 3, "dataset_path": "held"}
DECOUPLED = {"optimizer": {"name": "decoupled_adamw", "lr": 2e-4, "weight_decay": 1e-6}, "max_duration": "5ba"}
FALL = {"lr_scheduler.decay_ratio": 0.1, "lr_scheduler.decay_type": "linear", "lr_scheduler.warmup_steps": 10}
STABLE = {"num_decay_steps": 5, "decay_type": "1-sqrt", "min_lr_ratio": 0.3}
VARIABLES = {"variables": {"seed": 5, "run": "a", "folder": "${variables.run}/b"}}
INJECTED = 'a"b\\\n[shard]\nx = 1'
SETS: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
    # A strategy says when units are freed, and how many copies there are.
    ("accelerate", 4, {"num_machines": 2, f"{FSDP}sharding_strategy": "FULL_SHARD"}, freed("always", 1)),
    ("accelerate", 4, {"num_machines": 2, f"{FSDP}sharding_strategy": "SHARD_GRAD_OP"}, freed("never", 1)),
    ("accelerate", 4, {"num_machines": 2, f"{FSDP}sharding_strategy": "NO_SHARD"}, freed("never", 4)),
    ("accelerate", 4, {"num_machines": 2, f"{FSDP}sharding_strategy": "HYBRID_SHARD"}, freed("always", 2)),
    ("accelerate", 4, {"num_machines": 2, f"{FSDP}sharding_strategy": "HYBRID_SHARD_ZERO2"}, freed("never", 2)),
    ("accelerate", 4, {"num_machines": 2, f"{FSDP}sharding_strategy": 1}, freed("always", 1)),
    ("accelerate", 4, {"num_machines": 2, f"{FSDP}sharding_strategy": 2}, freed("never", 1)),
    ("accelerate", 4, {f"{FSDP}version": 2, f"{FSDP}reshard_after_forward": True}, freed("always", 1)),
    ("accelerate", 4, {f"{FSDP}version": 2, f"{FSDP}reshard_after_forward": False}, freed("never", 1)),
    ("accelerate", 4, {f"{FSDP}version": 2, f"{FSDP}reshard_after_forward": "true"}, freed("always", 1)),
    # Data-parallel copies are copies: as many as there are ranks for each.
    ("accelerate", 4, {"distributed_type": "MULTI_GPU"}, {"shard.replicate": 4}),
    ("accelerate", 8, COPIES, {"shard.replicate": 2, "shard.tensor": 4}),
    ("hf", 8, {"fsdp": False, "parallelism_config": {"cp_size": 2}}, {"shard.replicate": 4}),
    # Empty class names are the model's own hints; others have commas and blanks between them.
    ("environment", 4, {"FSDP_TRANSFORMER_CLS_TO_WRAP": ""}, {"shard.units": "auto"}),
    ("environment", 4, {"FSDP_TRANSFORMER_CLS_TO_WRAP": "Block, Embedding,"}, {"shard.units": ["Block", "Embedding"]}),
    ("accelerate", 4, {f"{FSDP}auto_wrap_policy": "SIZE_BASED_WRAP"}, {"shard.units": "auto"}),
    # A variable is true in every way that Accelerate takes, and a key without a value is not given.
    *(
        ("environment", 4, {"FSDP_OFFLOAD_PARAMS": word}, {"shard.offload": "cpu"})
        for word in ("1", "yes", "True", "on")
    ),
    ("accelerate", 4, {"mixed_precision": None, f"{FSDP}offload_params": None}, {"shard.offload": "none"}),
    ("hf", 4, {"max_steps": None}, {"train.epochs": 3.0, "schedule.warmup_steps": 0}),
    # The batch of a step is that of a rank × ranks × accumulation; ranks that share a matrix count once.
    ("hf", 4, STEP, {"train.batch_size": 3 * 5 * 4}),
    ("hf", 8, {**STEP, "parallelism_config": {"tp_size": 2, "cp_size": 2}}, {"train.batch_size": 3 * 5 * 2}),
    ("hf", 8, {**STEP, "parallelism_config": {"dp_replicate_size": 2}}, {"train.batch_size": 3 * 5 * 8}),
    ("hf", 8, {**STEP, "parallelism_config": None}, {"train.batch_size": 3 * 5 * 8}),
    ("torchtitan", 8, SHARED, {"train.batch_size": 8 * 2, "train.accumulate": 1}),
    ("torchtitan", 8, {**SHARED, "training.global_batch_size": 48}, {"train.batch_size": 48, "train.accumulate": 3}),
    ("torchtitan", 4, {f"validation.{key}": VALIDATION[key] for key in VALIDATION}, {"evaluation.samples": 5 * 3 * 4}),
    (
        "torchtitan",
        4,
        {"parallelism.context_parallel_degree": 2} | {f"validation.{key}": VALIDATION[key] for key in VALIDATION},
        {"evaluation.samples": 5 * 3 * 2},
    ),
    # The batch stays where ranks of a pipeline shared it.
    (
        "torchtitan",
        8,
        TENSOR | {"parallelism.pipeline_parallel_degree": 2},
        {"train.batch_size": 8 * 2, "train.accumulate": 1},
    ),
    # A share of the steps becomes a number.
    ("hf", 4, {"max_steps": 50, "warmup_ratio": 0.05}, {"schedule.warmup_steps": 3}),
    ("hf", 4, {"max_steps": 50, "save_steps": 0.1}, {"train.checkpoint_every": 5}),
    # A schedule of transformers has its shape and end.
    ("hf", 4, {"lr_scheduler_type": "linear"}, falls("linear", 0.0)),
    ("hf", 4, {"lr_scheduler_type": "constant_with_warmup"}, falls("constant", 0.1)),
    ("hf", 4, scheduled("cosine_with_min_lr", {"min_lr": 1e-5}), falls("cosine", 0.2)),
    ("hf", 4, scheduled("polynomial", {"lr_end": 5e-6}), falls("linear", 0.1)),
    ("hf", 4, scheduled("warmup_stable_decay", STABLE), falls("wsd", 0.3)),
    # No clipping is clipping at infinity.
    ("hf", 4, {"max_grad_norm": 0}, {"train.max_grad_norm": float("inf")}),
    # A word of theirs cannot break out of its comment or string.
    ("hf", 4, {"output_dir": INJECTED}, {"run.dir": INJECTED}),
    # Each second block is recomputed as transformers counts them.
    (
        "hf",
        4,
        {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"every_n_layers": 2}},
        {"shard.activation_checkpointing": {"*[02468]": "full"}},
    ),
    # Weight decay that Composer does not scale is divided by the learning rate.
    ("composer", 4, DECOUPLED, {"optimizer.weight_decay": pytest.approx(5e-3), "optimizer.no_decay": []}),
    # A duration in tokens becomes steps.
    (
        "composer",
        4,
        {"max_duration": "1e6tok", "global_train_batch_size": 10, "max_seq_len": 1000},
        {"train.steps": 100},
    ),
    # Composer's sections take the same keys.
    *(
        ("composer", 4, {f"{place}.{key}": value, "precision": "amp_bf16"}, {ours: expected})
        for place in ("parallelism_config.fsdp", "parallelism_config.fsdp2", "fsdp_config")
        for key, value, ours, expected in (
            ("activation_checkpointing", True, "shard.activation_checkpointing", "full"),
            ("mixed_precision", "PURE", "shard.mixed_precision", "bf16"),
            ("mixed_precision", "FULL", "shard.mixed_precision", None),
        )
    ),
    # References are followed, also within a word.
    ("composer", 4, {**VARIABLES, "seed": "${variables.seed}"}, {"train.seed": 5}),
    ("composer", 4, {**VARIABLES, "save_folder": "runs/${variables.folder}"}, {"run.dir": "runs/a/b"}),
    # TorchTitan's defaults count where keys are absent.
    ("torchtitan", 4, {"training.steps": 7}, {"train.sequence_length": 2048, "train.batch_size": 32}),
    ("torchtitan", 4, {"training.steps": 7}, {"schedule.warmup_steps": 200, "schedule.final": 0.0}),
    ("torchtitan", 4, {"training.steps": 7}, {"optimizer.lr": 8e-4}),
    ("torchtitan", 4, {**FALL, "training.steps": 100}, {"schedule.decay": "wsd", "schedule.decay_steps": 10}),
    ("torchtitan", 4, {"training.local_batch_size": 8, "training.batch_size": 2}, {"train.batch_size": 8}),
]


@pytest.mark.parametrize(("source", "ranks", "keys", "expected"), SETS)
def test_what_keys_become(
    source: str, ranks: int, keys: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    config = accepted(tmp_path, converted(tmp_path, source, keys, ranks))
    assert {key: value_of(config, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("source", "keys", "told"),
    [
        ("accelerate", {f"{FSDP}auto_wrap_policy": "SIZE_BASED_WRAP"}, ["none"]),
        ("accelerate", {f"{FSDP}min_num_params": 1000}, ["none"]),
        (
            "accelerate",
            {f"{FSDP}sharding_strategy": "FULL_SHARD", f"{FSDP}version": 2, f"{FSDP}reshard_after_forward": False},
            ["always"],
        ),
        (
            "accelerate",
            {f"{FSDP}mixed_precision_policy": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}},
            ["set"],
        ),
        ("hf", {"lr_scheduler_type": "inverse_sqrt"}, ["none"]),
        ("torchtitan", {"training.local_batch_size": 8, "training.batch_size": 2}, ["always"]),
        ("torchtitan", {"parallelism.pipeline_parallel_degree": 2}, ["none"]),
        ("torchtitan", {"lr_scheduler.decay_type": "linear", **FALL}, ["near", "set"]),
        # Logits that TorchTitan splits, and ranks here have whole, are said to differ.
        (
            "torchtitan",
            {"parallelism.tensor_parallel_degree": 2, "parallelism.disable_loss_parallel": False},
            ["near", "set"],
        ),
        (
            "torchtitan",
            {"parallelism.tensor_parallel_degree": 2, "parallelism.disable_loss_parallel": True},
            ["set", "set"],
        ),
    ],
)
def test_what_is_told_of_the_first_key(source: str, keys: dict[str, Any], told: list[str], tmp_path: Path) -> None:
    assert status(converted(tmp_path, source, keys), next(iter(keys))) == told


@pytest.mark.parametrize(
    ("source", "ranks", "keys", "ours"),
    [
        ("environment", None, {"FSDP_SHARDING_STRATEGY": "HYBRID_SHARD"}, "shard.replicate"),
        ("hf", None, {}, "train.batch_size"),
        ("hf", 4, {"warmup_steps": 0.05}, "schedule.warmup_steps"),
        ("hf", 4, {"lr_scheduler_type": "inverse_sqrt"}, "schedule.decay"),
        # More stages of a pipeline than samples.
        ("torchtitan", 4, {"parallelism.pipeline_parallel_degree": 64}, "train.batch_size"),
    ],
)
def test_what_their_file_does_not_say_is_asked(
    source: str, ranks: int | None, keys: dict[str, Any], ours: str, tmp_path: Path
) -> None:
    assert ours in converted(tmp_path, source, keys, ranks).missing


@pytest.mark.parametrize(
    ("source", "keys", "dropped"),
    [
        ("accelerate", {f"{FSDP}min_num_params": 100}, []),
        ("hf", {"neftune_noise_alpha": 5.0}, ["neftune_noise_alpha"]),
        ("hf", {"parallelism_config": "ParallelismConfig(tp_size=2)"}, ["parallelism_config"]),
        ("torchtitan", {"parallelism.pipeline_parallel_degree": 2}, ["parallelism.pipeline_parallel_degree"]),
        ("torchtitan", {"parallelism.pipeline_parallel_degree": 1}, []),
    ],
)
def test_what_is_dropped_and_changes_the_result_is_listed(
    source: str, keys: dict[str, Any], dropped: list[str], tmp_path: Path
) -> None:
    assert converted(tmp_path, source, keys).dropped == dropped


@pytest.mark.parametrize("place", ["parallelism_config.tp", "tp_config"])
def test_composers_degree_is_an_axis_and_its_plan_is_named(place: str, tmp_path: Path) -> None:
    keys = {f"{place}.tensor_parallel_degree": 2, f"{place}.layer_plan": {"fc1": "ColwiseParallel()"}}
    result = converted(tmp_path, "composer", {"max_duration": "640sp", "device_train_batch_size": 8, **keys})
    config = accepted(tmp_path, result)
    assert (axes(config), config.train.batch_size, config.train.steps) == ((2, False, 1, 1), 16, 640 / 16)
    assert [entry.key for entry in result.entries if entry.status == "none"] == [f"{place}.layer_plan"]


def test_an_accelerate_file_written_by_accelerate_itself_is_read(tmp_path: Path) -> None:
    more: dict[str, Any] = {"fsdp_config": {"fsdp_version": 2, "fsdp_offload_params": True}, "num_processes": 2}
    config = ClusterConfig("LOCAL_MACHINE", "FSDP", "fp16", False, False, **more)
    config.to_yaml_file(tmp_path / "own.yaml")
    result = convert(tmp_path / "own.yaml")
    assert result.source == "accelerate"
    assert accepted(tmp_path, result).shard.offload == "cpu"
    assert not [entry for entry in result.entries if entry.status == "none"]


def test_training_arguments_dumped_with_all_defaults_lose_nothing(tmp_path: Path) -> None:
    arguments = TrainingArguments(output_dir=str(tmp_path / "run"), use_cpu=False, bf16=False)
    result = convert(written(tmp_path, "dump.json", arguments.to_json_string()), ranks=2)
    config = accepted(tmp_path, result)
    assert result.source == "hf"
    assert [entry.key for entry in result.entries if entry.status == "none"] == []
    assert (config.train.batch_size, config.train.epochs, config.train.seed) == (16, 3.0, 42)
    assert (config.optimizer.lr, config.optimizer.weight_decay) == (5e-5, 0.0)
    assert (config.schedule.decay, config.schedule.final, config.train.checkpoint_every) == ("linear", 0.0, 500)


def test_an_fsdp_config_alone_says_nothing_of_training(tmp_path: Path) -> None:
    path = written(tmp_path, "fsdp_config.json", {"fsdp_transformer_layer_cls_to_wrap": ["Block"], "cpu_offload": True})
    result = convert(path)
    assert result.source == "hf"
    assert accepted(tmp_path, result).optimizer.lr == our_default("optimizer.lr")
    assert "train.batch_size" in result.missing


def test_a_bare_table_of_composers_fsdp_is_read(tmp_path: Path) -> None:
    path = written(tmp_path, "bare.yaml", {"fsdp": {"sharding_strategy": "SHARD_GRAD_OP", "auto_wrap": True}})
    result = convert(path)
    assert result.source == "composer"
    assert accepted(tmp_path, result).shard.reshard_after_forward == "never"


def axes(config: Config) -> tuple[int, bool, int, int]:
    """Ranks along tensor, whether they split the sequence, ranks along context, ranks that share experts."""
    plan = Plan.of(config.shard.options())
    return plan.tensor, plan.sequence, plan.context, plan.experts


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [
        ({"tensor_parallel_degree": 2}, (2, True, 1, 1)),
        ({"tensor_parallel_degree": 2, "enable_sequence_parallel": True}, (2, True, 1, 1)),
        ({"tensor_parallel_degree": 2, "enable_sequence_parallel": False}, (2, False, 1, 1)),
        ({"tensor_parallel_degree": 1, "enable_sequence_parallel": True}, (1, False, 1, 1)),
        ({"context_parallel_degree": 4}, (1, False, 4, 1)),
        ({"expert_parallel_degree": 4, "tensor_parallel_degree": 2}, (2, True, 1, 4)),
    ],
)
def test_torchtitans_degrees_are_axes(
    degrees: dict[str, int], expected: tuple[int, bool, int, int], tmp_path: Path
) -> None:
    keys = {f"parallelism.{key}": value for key, value in degrees.items()}
    assert axes(accepted(tmp_path, converted(tmp_path, "torchtitan", keys))) == expected


def test_torchtitans_number_of_ranks_is_the_product_of_its_degrees(tmp_path: Path) -> None:
    degrees = {"data_parallel_shard": 3, "data_parallel_replicate": 2, "tensor_parallel": 2, "context_parallel": 2}
    for sizes, ranks in ((degrees, 24), ({"data_parallel_shard": 1, "tensor_parallel": 8}, 8)):
        keys = {f"parallelism.{kind}_degree": size for kind, size in sizes.items()}
        result = converted(tmp_path, "torchtitan", keys, ranks=None)
        assert result.command.endswith(f"--nproc {ranks}")
        readers = ranks // sizes["tensor_parallel"] // sizes.get("context_parallel", 1)
        assert accepted(tmp_path, result).train.batch_size == 8 * readers


@pytest.mark.parametrize(
    ("key", "value", "degree", "told"),
    [
        ("enable_sequence_parallel", True, "tensor", "set"),
        ("disable_loss_parallel", False, "tensor", "always"),
        ("enable_async_tensor_parallel", True, "tensor", "none"),
        ("context_parallel_rotate_method", "alltoall", "context", "always"),
        ("expert_tensor_parallel_degree", 2, "expert", "none"),
        ("pipeline_parallel_schedule", "1F1B", "pipeline", "none"),
    ],
)
def test_what_tunes_an_axis_is_of_no_effect_without_it_alone(
    key: str, value: Any, degree: str, told: str, tmp_path: Path
) -> None:
    for size, expected in ((1, "always"), (2, told)):
        keys = {f"parallelism.{key}": value, f"parallelism.{degree}_parallel_degree": size}
        entries = converted(tmp_path, "torchtitan", keys).entries
        (entry,) = [entry for entry in entries if entry.key == f"parallelism.{key}"]
        assert (entry.status, "of no effect" in entry.note) == (expected, size == 1)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"tp_size": 2}, (2, False, 1, 1)),
        ({"cp_size": 2, "sp_size": 1}, (1, False, 2, 1)),
        ({"sp_size": 2, "tp_size": 2}, (2, False, 2, 1)),
        ({"tp_size": 1, "cp_size": 1}, (1, False, 1, 1)),
    ],
)
def test_accelerates_sizes_are_axes_in_yaml_environment_and_training_arguments(
    sizes: dict[str, int], expected: tuple[int, bool, int, int], tmp_path: Path
) -> None:
    for source, prefix in (
        ("accelerate", "parallelism_config.parallelism_config_"),
        ("environment", "PARALLELISM_CONFIG_"),
        ("hf", "parallelism_config."),
    ):
        keys = {prefix + (key.upper() if source == "environment" else key): size for key, size in sizes.items()}
        result = converted(tmp_path, source, keys)
        assert axes(accepted(tmp_path, result)) == expected
        assert result.dropped == []


def test_what_is_first_asked_and_then_given_is_set() -> None:
    draft = Draft({}, {"a": 3}, {}, None, "run")
    draft.ask("shard.replicate", "1", "copies")
    draft.put("shard.replicate", 3, "a")
    assert draft.asked == {}


def test_ranks_of_several_machines_are_started_by_torchrun(tmp_path: Path) -> None:
    result = converted(tmp_path, "accelerate", {"num_machines": 2})
    assert result.command.startswith("torchrun --nnodes 2 --nproc-per-node 2 -m trueshard train")


def test_variables_before_a_command_and_over_several_lines_are_read(tmp_path: Path) -> None:
    text = "#!/bin/sh\necho begins\nFSDP_OFFLOAD_PARAMS=true \\\n  FSDP_VERSION=2 python train.py --lr=3\n"
    result = convert(written(tmp_path, "run.sh", text))
    assert {entry.key for entry in result.entries} == {"FSDP_OFFLOAD_PARAMS", "FSDP_VERSION"}


# ---- what is wrong


def refused(path: Path | None, source: str | None = None, **more: Any) -> str:
    with pytest.raises(UserError) as caught:
        convert(path, source, **more)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("source", "keys", "parts"),
    [
        ("accelerate", {"fsdp_config.fsdp_ofload_params": True}, ["ofload_params", "fsdp_config.fsdp_offload_params"]),
        ("environment", {"FSDP_TRANSFORMER_CLS_WRAP": "Block", "PATH": "/bin"}, ["FSDP_TRANSFORMER_CLS_TO_WRAP"]),
        ("environment", {"PATH": "/bin"}, ["path"]),
        ("hf", {"lr_scheduler_type": "cosin"}, ["lr_scheduler_type", "'cosin'", "nearest: cosine"]),
        ("hf", {"bf16": True, "fp16": True}, ["bf16", "fp16"]),
        ("composer", {"seed": 1, "global_seed": 2, "max_duration": "1ba"}, ["train.seed"]),
        ("composer", {"seed": "${other}", "other": "${seed}"}, ["seed", "leads back to itself"]),
        ("torchtitan", {"parallelism.tensor_parallel_degree": 3}, ["shard.tensor = 3", "4 ranks", "--ranks"]),
        (
            "accelerate",
            {f"parallelism_config.parallelism_config_{kind}_size": size for kind, size in (("cp", 2), ("sp", 4))},
            ["cp_size", "sp_size"],
        ),
        ("torchtitan", {"training.local_batch_size": 3, "training.global_batch_size": 32}, ["no multiple"]),
        ("hf", {"learning_rate": -1}, ["learning_rate = -1"]),
        ("torchtitan", {"training": 3, "job": {}}, ["training", "table"]),
    ],
)
def test_a_value_that_contradicts_or_is_not_taken_is_named(
    source: str, keys: dict[str, Any], parts: list[str], tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        converted(tmp_path, source, keys)
    assert "\n" not in str(caught.value)
    assert lacking(str(caught.value), *parts) == []


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("a.yaml", {"colour": "red"}, "--from"),
        ("a.json", {"activation_checkpointing": True}, "--from"),
        ("own.toml", '[run]\ndir = "runs/own"\n', "trueshard train"),
        ("a.yaml", "a: [1", "a.yaml"),
        ("a.json", "{", "a.json"),
        ("a.toml", "a = ", "a.toml"),
        ("a.yaml", "", "a.yaml"),
        ("a.ini", "a = 1", "a.ini"),
    ],
)
def test_a_file_of_no_one_framework_or_that_is_malformed_is_refused(
    name: str, content: Any, part: str, tmp_path: Path
) -> None:
    assert part in refused(written(tmp_path, name, content))


def test_a_file_that_is_not_there_and_an_unknown_framework_are_refused(tmp_path: Path) -> None:
    assert "no such file" in refused(tmp_path / "a.yaml")
    assert "--from fairseq" in refused(tmp_path / "a.yaml", "fairseq")


# ---- what comes out


def test_a_converted_file_is_not_written_over_another(tmp_path: Path) -> None:
    result = converted(tmp_path, "accelerate")
    out = written(tmp_path, "mine.toml", "mine")
    with pytest.raises(UserError, match="exists already"):
        result.write(out)
    assert out.read_text() == "mine"


def test_a_converted_file_is_written_whole_and_leaves_nothing_beside(tmp_path: Path) -> None:
    result = converted(tmp_path, "accelerate")
    before = set(tmp_path.iterdir())
    result.write(tmp_path / "out.toml")
    assert set(tmp_path.iterdir()) - before == {tmp_path / "out.toml"}
    assert (tmp_path / "out.toml").read_text() == result.toml


def test_what_has_no_equivalent_stands_at_the_head_with_its_reason(tmp_path: Path) -> None:
    result = converted(tmp_path, "accelerate", {f"{FSDP}min_num_params": 100})
    assert f"{FSDP}min_num_params = 100" in result.toml.partition("[run]")[0]


def test_the_report_has_a_line_for_each_key_that_was_given(tmp_path: Path) -> None:
    result = convert(EXAMPLES / "composer.yaml", ranks=8)
    given = {entry.key for entry in result.entries}
    report = result.report()
    assert all(f"{key} = " in report for key in given)
    assert "no equivalent" in report


def test_what_is_dropped_and_changes_the_result_is_the_exit_code(tmp_path: Path) -> None:
    out = tmp_path / "out.toml"
    file = written(tmp_path, "run.yaml", "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3}\n")
    command = [sys.executable, "-m", "trueshard", "convert", str(file), "--from", "accelerate", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 3
    assert lacking(done.stdout.splitlines()[-2], "distributed_type", "deepspeed_config") == []
    assert out.exists()


def test_a_key_set_twice_in_the_same_way_is_no_contradiction() -> None:
    draft = Draft({}, {"a": 1, "b": 1}, {}, None, "run")
    draft.put("train.seed", 1, "a")
    draft.put("train.seed", 1, "b")
    with pytest.raises(Wrong):
        draft.put("train.seed", 2, "b")


def test_converting_imports_neither_transformers_nor_accelerate() -> None:
    code = (
        "import sys, pathlib; from trueshard.convert.converting import convert;"
        f"convert(pathlib.Path({str(EXAMPLES / 'accelerate.yaml')!r}));"
        "print([name for name in ('transformers', 'accelerate', 'datasets', 'peft') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
