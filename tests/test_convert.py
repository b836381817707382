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
EXAMPLE_FILES = ["accelerate.yaml", "composer.yaml", "fsdp.env", "torchtitan.toml", "training_arguments.json"]
EXAMPLE_FILES += ["deepspeed.json", "easyr1.yaml", "verl.yaml", "trl.yaml"]
KNOWN = {source.name: set(source.index) for source in FRAMEWORKS}
RULES = {source.name: source.index for source in FRAMEWORKS}
PLACEHOLDERS = {
    "model.path": "model",
    "data.path": "data",
    "train.steps": 10,
    "train.batch_size": 16,
    "train.sequence_length": 64,
    "reward.function": "rewards.py:score",
}


def written(folder: Path, name: str, content: Any) -> Path:
    path = folder / name
    if not isinstance(content, str):
        content = yaml.safe_dump(content) if path.suffix == ".yaml" else json.dumps(content)
    path.write_text(content)
    return path


def accepted(folder: Path, converted: Converted, **more: Any) -> Config:
    """The text as `trueshard train` reads it, with what it asks for."""
    path = folder / f"accepted{len(list(folder.iterdir()))}.toml"
    path.write_text(converted.toml)
    asked = {key: value for key, value in {**PLACEHOLDERS, **more}.items() if key in converted.missing}
    return load_config(path, [f"{key}={json.dumps(value)}" for key, value in asked.items()])


def from_accelerate(folder: Path, top: Mapping[str, Any] | None = None, **fsdp_config: Any) -> Converted:
    """A YAML of FSDP on 4 ranks, and these settings."""
    prefixed = {f"fsdp_{key}": value for key, value in fsdp_config.items()}
    tree = {"distributed_type": "FSDP", "num_processes": 4, "fsdp_config": prefixed, **(top or {})}
    return convert(written(folder, "accelerate.yaml", tree))


def from_hf(folder: Path, ranks: int | None = 4, **arguments: Any) -> Converted:
    return convert(written(folder, "arguments.json", {"output_dir": "out", **arguments}), "hf", ranks=ranks)


def from_torchtitan(folder: Path, text: str, ranks: int | None = 4) -> Converted:
    return convert(written(folder, "titan.toml", text), "torchtitan", ranks=ranks)


def from_composer(folder: Path, tree: Mapping[str, Any], ranks: int | None = 4) -> Converted:
    return convert(written(folder, "composer.yaml", dict(tree)), "composer", ranks=ranks)


def status(converted: Converted, key: str) -> list[str]:
    return [entry.status for entry in converted.entries if entry.key == key]


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
VALUES += [512, "grpo", "k1", "gspo", "token", "token-mean", "cosine", [0.9, 0.999], ["a"], [{"path": "a"}]]
VALUES += [{"name": "decoupled_adamw"}, {"name": "cosine_with_warmup"}]
AS_ANOTHER = {"composer": ("parallelism_config.fsdp2.", "fsdp_config."), "hf": ("evaluation_strategy",)}
"""Keys with the rules of others, under whose name they are told."""


def of_tree(source: Framework, key: str, value: Any, folder: Path) -> Converted:
    """As `convert`, of nothing but this key."""
    if source.name == "environment":
        return convert(None, environment={key: str(value)})
    tree = value
    for name in reversed(key.split(".")):
        tree = {name: tree}
    return convert(written(folder, "tree.json", tree), source.name, ranks=4)


QUICK = [each for each in FRAMEWORKS if each.name not in ("easyr1", "torchtitan", "verl")]
"""Those with fewer keys."""


@pytest.mark.parametrize("source", all_but(QUICK, FRAMEWORKS), ids=lambda source: source.name)
def test_every_key_is_told_whatever_its_value(source: Framework, tmp_path: Path) -> None:
    for key in (key for rule in source.own for key in rule.keys):
        if key.startswith(AS_ANOTHER.get(source.name, ("-",))):
            continue
        taken = 0
        for value in VALUES:
            try:
                converted = of_tree(source, key, value, tmp_path)
            except UserError:
                continue
            assert status(converted, key), f"{key} = {value}: nothing is said of it"
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
    converted = convert(EXAMPLES / name, ranks=RANKS.get(name))
    more = {"model.config": "model", "train.batch_size": 32}
    if name == "trl.yaml":
        more |= {"train.sequence_length": 2048, "reward.function": ["rewards.py:right", "rewards.py:form"]}
    config = accepted(tmp_path, converted, **more)
    assert config.shard.mixed_precision == "bf16"


def test_the_torchtitan_example_says_the_right_thing(tmp_path: Path) -> None:
    config = accepted(tmp_path, convert(EXAMPLES / "torchtitan.toml", ranks=8), **{"model.config": "model"})
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
    words = words_of(accepted(tmp_path, convert(EXAMPLES / "torchtitan.toml", ranks=8), **{"model.config": "model"}))
    plan = alone.run(plan_of, words | {"compile": False})[0]
    assert [name for name, _, recompute in plan if recompute == "full"] == ["model.layers.1", "model.layers.3"]


# ---- what single keys mean


@pytest.mark.parametrize(
    ("word", "freed", "replicate"),
    [
        ("FULL_SHARD", "always", 1),
        ("SHARD_GRAD_OP", "never", 1),
        ("NO_SHARD", "never", 4),
        ("HYBRID_SHARD", "always", 2),
        ("HYBRID_SHARD_ZERO2", "never", 2),
        (1, "always", 1),
        (2, "never", 1),
    ],
)
def test_a_sharding_strategy_is_when_units_are_freed_and_how_many_copies_there_are(
    word: str | int, freed: str, replicate: int, tmp_path: Path
) -> None:
    converted = from_accelerate(tmp_path, {"num_machines": 2}, sharding_strategy=word)
    config = accepted(tmp_path, converted)
    assert (config.shard.reshard_after_forward, config.shard.replicate) == (freed, replicate)


def test_hybrid_sharding_over_an_unknown_number_of_machines_is_asked(tmp_path: Path) -> None:
    converted = convert(None, environment={"FSDP_SHARDING_STRATEGY": "HYBRID_SHARD"})
    assert "shard.replicate" in converted.missing


@pytest.mark.parametrize(("value", "freed"), [(True, "always"), (False, "never"), ("true", "always")])
def test_version_two_is_freed_as_reshard_after_forward_says(value: Any, freed: str, tmp_path: Path) -> None:
    converted = from_accelerate(tmp_path, version=2, reshard_after_forward=value)
    assert accepted(tmp_path, converted).shard.reshard_after_forward == freed


def test_version_two_does_not_look_at_the_strategy_beside_reshard_after_forward(tmp_path: Path) -> None:
    converted = from_accelerate(tmp_path, version=2, reshard_after_forward=False, sharding_strategy="FULL_SHARD")
    assert accepted(tmp_path, converted).shard.reshard_after_forward == "never"
    assert status(converted, "fsdp_config.fsdp_sharding_strategy") == ["always"]


def test_empty_class_names_mean_the_models_own_hints(tmp_path: Path) -> None:
    converted = convert(None, environment={"FSDP_TRANSFORMER_CLS_TO_WRAP": ""})
    assert accepted(tmp_path, converted).shard.units == "auto"


def test_class_names_are_read_with_commas_and_blanks(tmp_path: Path) -> None:
    converted = convert(None, environment={"FSDP_TRANSFORMER_CLS_TO_WRAP": "Block, Embedding,"})
    assert accepted(tmp_path, converted).shard.units == ["Block", "Embedding"]


def test_wrapping_by_size_has_no_equivalent(tmp_path: Path) -> None:
    converted = from_accelerate(tmp_path, auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=1000)
    assert status(converted, "fsdp_config.fsdp_auto_wrap_policy") == ["none"]
    assert status(converted, "fsdp_config.fsdp_min_num_params") == ["none"]
    assert accepted(tmp_path, converted).shard.units == "auto"


def test_the_mixed_precision_of_a_table_is_exact_where_gradients_are_reduced_in_float32(tmp_path: Path) -> None:
    policy = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
    converted = from_accelerate(tmp_path, mixed_precision_policy=policy)
    assert accepted(tmp_path, converted).shard.mixed_precision == "bf16"
    assert status(converted, "fsdp_config.fsdp_mixed_precision_policy") == ["set"]


def test_data_parallel_copies_are_copies(tmp_path: Path) -> None:
    converted = from_accelerate(tmp_path, {"distributed_type": "MULTI_GPU", "fsdp_config": {}})
    assert accepted(tmp_path, converted).shard.replicate == 4


def test_an_accelerate_file_written_by_accelerate_itself_is_read(tmp_path: Path) -> None:
    more: dict[str, Any] = {"fsdp_config": {"fsdp_version": 2, "fsdp_offload_params": True}, "num_processes": 2}
    config = ClusterConfig("LOCAL_MACHINE", "FSDP", "fp16", False, False, **more)
    config.to_yaml_file(tmp_path / "own.yaml")
    converted = convert(tmp_path / "own.yaml")
    assert converted.source == "accelerate"
    assert accepted(tmp_path, converted).shard.offload == "cpu"
    assert not [entry for entry in converted.entries if entry.status == "none"]


def test_training_arguments_dumped_with_all_defaults_lose_nothing(tmp_path: Path) -> None:
    arguments = TrainingArguments(output_dir=str(tmp_path / "run"), use_cpu=False, bf16=False)
    converted = convert(written(tmp_path, "dump.json", arguments.to_json_string()), ranks=2)
    config = accepted(tmp_path, converted)
    assert converted.source == "hf"
    assert [entry.key for entry in converted.entries if entry.status == "none"] == []
    assert (config.train.batch_size, config.train.epochs, config.train.seed) == (16, 3.0, 42)
    assert (config.optimizer.lr, config.optimizer.weight_decay) == (5e-5, 0.0)
    assert (config.schedule.decay, config.schedule.final, config.train.checkpoint_every) == ("linear", 0.0, 500)


def test_an_fsdp_config_alone_says_nothing_of_training(tmp_path: Path) -> None:
    path = written(tmp_path, "fsdp_config.json", {"fsdp_transformer_layer_cls_to_wrap": ["Block"], "cpu_offload": True})
    converted = convert(path)
    assert converted.source == "hf"
    assert accepted(tmp_path, converted).optimizer.lr == our_default("optimizer.lr")
    assert "train.batch_size" in converted.missing


def test_the_batch_of_a_step_is_that_of_a_rank_times_ranks_times_accumulation(tmp_path: Path) -> None:
    sizes = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 5}
    assert accepted(tmp_path, from_hf(tmp_path, ranks=4, **sizes)).train.batch_size == 60


def test_without_a_number_of_ranks_the_batch_is_asked(tmp_path: Path) -> None:
    assert "train.batch_size" in from_hf(tmp_path, ranks=None).missing


def test_a_share_of_the_steps_becomes_a_number(tmp_path: Path) -> None:
    config = accepted(tmp_path, from_hf(tmp_path, max_steps=50, warmup_ratio=0.05, save_steps=0.1))
    assert (config.schedule.warmup_steps, config.train.checkpoint_every) == (3, 5)


def test_a_share_of_unknown_steps_is_asked(tmp_path: Path) -> None:
    assert "schedule.warmup_steps" in from_hf(tmp_path, warmup_steps=0.05).missing


@pytest.mark.parametrize(
    ("kind", "more", "decay", "final"),
    [
        ("linear", {}, "linear", 0.0),
        ("constant_with_warmup", {}, "constant", 0.1),
        ("cosine_with_min_lr", {"min_lr": 1e-5}, "cosine", 0.2),
        ("polynomial", {"lr_end": 5e-6}, "linear", 0.1),
        ("warmup_stable_decay", {"num_decay_steps": 5, "decay_type": "1-sqrt", "min_lr_ratio": 0.3}, "wsd", 0.3),
    ],
)
def test_a_schedule_of_transformers_has_its_shape_and_end(
    kind: str, more: dict[str, Any], decay: str, final: float, tmp_path: Path
) -> None:
    converted = from_hf(tmp_path, lr_scheduler_type=kind, lr_scheduler_kwargs=more)
    schedule = accepted(tmp_path, converted).schedule
    assert (schedule.decay, schedule.final) == (decay, pytest.approx(final))


def test_a_schedule_without_equivalent_is_asked(tmp_path: Path) -> None:
    converted = from_hf(tmp_path, lr_scheduler_type="inverse_sqrt")
    assert status(converted, "lr_scheduler_type") == ["none"]
    assert "schedule.decay" in converted.missing


def test_no_clipping_is_clipping_at_infinity(tmp_path: Path) -> None:
    assert accepted(tmp_path, from_hf(tmp_path, max_grad_norm=0)).train.max_grad_norm == float("inf")


def test_each_second_block_is_recomputed_as_transformers_counts_them(tmp_path: Path) -> None:
    converted = from_hf(tmp_path, activation_checkpointing=True, activation_checkpointing_kwargs={"every_n_layers": 2})
    assert accepted(tmp_path, converted).shard.activation_checkpointing == {"*[02468]": "full"}


def test_weight_decay_that_composer_does_not_scale_is_divided_by_the_learning_rate(tmp_path: Path) -> None:
    optimizer = {"name": "decoupled_adamw", "lr": 2e-4, "weight_decay": 1e-6}
    config = accepted(tmp_path, from_composer(tmp_path, {"optimizer": optimizer, "max_duration": "5ba"}))
    assert config.optimizer.weight_decay == pytest.approx(5e-3)
    assert config.optimizer.no_decay == []


def test_a_duration_in_tokens_becomes_steps(tmp_path: Path) -> None:
    tree = {"max_duration": "1e6tok", "global_train_batch_size": 10, "max_seq_len": 1000}
    assert accepted(tmp_path, from_composer(tmp_path, tree)).train.steps == 100


@pytest.mark.parametrize("place", ["parallelism_config.fsdp", "parallelism_config.fsdp2", "fsdp_config"])
def test_composers_sections_take_the_same_keys(place: str, tmp_path: Path) -> None:
    inner: Any = {"activation_checkpointing": True, "mixed_precision": "PURE"}
    for name in reversed(place.split(".")):
        inner = {name: inner}
    config = accepted(tmp_path, from_composer(tmp_path, {**inner, "precision": "amp_bf16"}))
    assert (config.shard.activation_checkpointing, config.shard.mixed_precision) == ("full", "bf16")


def test_a_bare_table_of_composers_fsdp_is_read(tmp_path: Path) -> None:
    path = written(tmp_path, "bare.yaml", {"fsdp": {"sharding_strategy": "SHARD_GRAD_OP", "auto_wrap": True}})
    converted = convert(path)
    assert converted.source == "composer"
    assert accepted(tmp_path, converted).shard.reshard_after_forward == "never"


def test_full_precision_in_composers_fsdp_computes_as_stored(tmp_path: Path) -> None:
    tree = {"fsdp_config": {"mixed_precision": "FULL"}, "precision": "amp_bf16"}
    assert accepted(tmp_path, from_composer(tmp_path, tree)).shard.mixed_precision is None


PARALLELISM = "[training]\nlocal_batch_size = 8\n[parallelism]\n"


def from_degrees(folder: Path, degrees: str, ranks: int | None = 4, **more: Any) -> Config:
    """TorchTitan's file of these `[parallelism]` keys alone, and 8 sequences a rank, as it is accepted here."""
    return accepted(folder, from_torchtitan(folder, PARALLELISM + degrees, ranks), **{"model.config": "model"}, **more)


def axes(config: Config) -> tuple[int, bool, int, int]:
    """Ranks along tensor, whether they split the sequence, ranks along context, ranks that share experts."""
    plan = Plan.of(config.shard.options())
    return plan.tensor, plan.sequence, plan.context, plan.experts


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [
        ("tensor_parallel_degree = 2", (2, True, 1, 1)),
        ("tensor_parallel_degree = 2\nenable_sequence_parallel = true", (2, True, 1, 1)),
        ("tensor_parallel_degree = 2\nenable_sequence_parallel = false", (2, False, 1, 1)),
        ("tensor_parallel_degree = 1\nenable_sequence_parallel = true", (1, False, 1, 1)),
        ("context_parallel_degree = 4", (1, False, 4, 1)),
        ("expert_parallel_degree = 4\ntensor_parallel_degree = 2", (2, True, 1, 4)),
    ],
)
def test_torchtitans_degrees_are_axes(degrees: str, expected: tuple[int, bool, int, int], tmp_path: Path) -> None:
    assert axes(from_degrees(tmp_path, degrees)) == expected


def test_logits_that_torchtitan_splits_and_ranks_here_have_whole_are_said_to_differ(tmp_path: Path) -> None:
    for disabled, expected in (("false", "near"), ("true", "set")):
        text = f"{PARALLELISM}tensor_parallel_degree = 2\ndisable_loss_parallel = {disabled}\n"
        assert status(from_torchtitan(tmp_path, text), "parallelism.tensor_parallel_degree") == [expected, "set"]


def test_ranks_that_share_a_matrix_or_a_sequence_count_once_in_torchtitans_batch(tmp_path: Path) -> None:
    degrees = "tensor_parallel_degree = 2\ncontext_parallel_degree = 2"
    train = from_degrees(tmp_path, degrees, ranks=8).train
    assert (train.batch_size, train.accumulate) == (8 * 2, 1)
    whole = PARALLELISM.replace("8\n", "8\nglobal_batch_size = 48\n") + degrees
    train = accepted(tmp_path, from_torchtitan(tmp_path, whole, ranks=8), **{"model.config": "model"}).train
    assert (train.batch_size, train.accumulate) == (48, 3)


def test_torchtitans_number_of_ranks_is_the_product_of_its_degrees(tmp_path: Path) -> None:
    degrees = "data_parallel_shard_degree = 3\ndata_parallel_replicate_degree = 2\ntensor_parallel_degree = 2\n"
    converted = from_torchtitan(tmp_path, PARALLELISM + degrees + "context_parallel_degree = 2", ranks=None)
    assert converted.command.endswith("--nproc 24")
    assert accepted(tmp_path, converted, **{"model.config": "model"}).train.batch_size == 8 * 6
    alone = "data_parallel_shard_degree = 1\ntensor_parallel_degree = 8"
    assert from_torchtitan(tmp_path, PARALLELISM + alone, ranks=None).command.endswith("--nproc 8")


def test_the_batch_stays_where_ranks_of_a_pipeline_shared_it(tmp_path: Path) -> None:
    degrees = "pipeline_parallel_degree = 2\ntensor_parallel_degree = 2"
    config = from_degrees(tmp_path, degrees, ranks=8)
    assert (config.train.batch_size, config.train.accumulate) == (8 * 2, 1)
    converted = from_torchtitan(tmp_path, PARALLELISM + degrees, ranks=8)
    assert status(converted, "parallelism.pipeline_parallel_degree") == ["none"]
    assert converted.dropped == ["parallelism.pipeline_parallel_degree"]


def test_validation_counts_ranks_that_share_a_sequence_once(tmp_path: Path) -> None:
    validation = "\n[validation]\nenable = true\nsteps = 5\nlocal_batch_size = 3\ndataset_path = 'held'"
    config = from_degrees(tmp_path, "context_parallel_degree = 2" + validation, ranks=4)
    assert config.evaluation is not None
    assert config.evaluation.samples == 5 * 3 * 2


@pytest.mark.parametrize(
    ("key", "value", "degree", "told"),
    [
        ("enable_sequence_parallel", "true", "tensor", "set"),
        ("disable_loss_parallel", "false", "tensor", "always"),
        ("enable_async_tensor_parallel", "true", "tensor", "none"),
        ("context_parallel_rotate_method", "'alltoall'", "context", "always"),
        ("expert_tensor_parallel_degree", "2", "expert", "none"),
        ("pipeline_parallel_schedule", "'1F1B'", "pipeline", "none"),
    ],
)
def test_what_tunes_an_axis_is_of_no_effect_without_it_alone(
    key: str, value: str, degree: str, told: str, tmp_path: Path
) -> None:
    for size, expected in ((1, "always"), (2, told)):
        text = f"{PARALLELISM}{key} = {value}\n{degree}_parallel_degree = {size}\n"
        converted = from_torchtitan(tmp_path, text)
        (entry,) = [each for each in converted.entries if each.key == f"parallelism.{key}"]
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
    yaml = {"parallelism_config": {f"parallelism_config_{key}": value for key, value in sizes.items()}}
    environment = {f"PARALLELISM_CONFIG_{key.upper()}": str(value) for key, value in sizes.items()}
    for converted in (
        from_accelerate(tmp_path, yaml),
        convert(None, environment=environment),
        from_hf(tmp_path, parallelism_config=sizes),
    ):
        assert axes(accepted(tmp_path, converted)) == expected
        assert converted.dropped == []


def test_the_batch_counts_ranks_that_share_a_matrix_once_as_transformers_does(tmp_path: Path) -> None:
    sizes = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 5}
    for parallelism, readers in (({"tp_size": 2, "cp_size": 2}, 2), ({"dp_replicate_size": 2}, 8), (None, 8)):
        converted = from_hf(tmp_path, ranks=8, fsdp=True, parallelism_config=parallelism, **sizes)
        assert accepted(tmp_path, converted).train.batch_size == 3 * 5 * readers


def test_an_object_of_python_as_parallelism_has_no_equivalent(tmp_path: Path) -> None:
    assert from_hf(tmp_path, parallelism_config="ParallelismConfig(tp_size=2)").dropped == ["parallelism_config"]


def test_whole_copies_are_as_many_as_there_are_ranks_for_each(tmp_path: Path) -> None:
    top = {"distributed_type": "MULTI_GPU", "fsdp_config": {}, "num_processes": 8}
    converted = from_accelerate(tmp_path, {**top, "parallelism_config": {"parallelism_config_tp_size": 4}})
    shard = accepted(tmp_path, converted).shard
    assert (shard.replicate, shard.tensor) == (2, 4)
    converted = from_hf(tmp_path, ranks=8, fsdp=False, parallelism_config={"cp_size": 2})
    assert accepted(tmp_path, converted).shard.replicate == 4


@pytest.mark.parametrize("place", ["parallelism_config.tp", "tp_config"])
def test_composers_degree_is_an_axis_and_its_plan_is_named(place: str, tmp_path: Path) -> None:
    inner: Any = {"tensor_parallel_degree": 2, "layer_plan": {"fc1": "ColwiseParallel()"}}
    for name in reversed(place.split(".")):
        inner = {name: inner}
    tree = {"max_duration": "640sp", "device_train_batch_size": 8, **inner}
    converted = from_composer(tmp_path, tree)
    config = accepted(tmp_path, converted)
    assert (axes(config), config.train.batch_size) == ((2, False, 1, 1), 16)
    assert config.train.steps == 640 / 16
    assert [entry.key for entry in converted.entries if entry.status == "none"] == [f"{place}.layer_plan"]


def test_an_older_spelling_beside_the_present_one_is_told(tmp_path: Path) -> None:
    converted = from_torchtitan(tmp_path, "[training]\nlocal_batch_size = 8\nbatch_size = 2\n")
    assert accepted(tmp_path, converted, **{"model.config": "model"}).train.batch_size == 8
    assert status(converted, "training.local_batch_size") == ["always"]


def test_what_is_first_asked_and_then_given_is_set() -> None:
    draft = Draft({}, {"a": 3}, {}, None, "run")
    draft.ask("shard.replicate", "1", "copies")
    draft.put("shard.replicate", 3, "a")
    assert draft.asked == {}


def test_torchtitans_defaults_count_where_keys_are_absent(tmp_path: Path) -> None:
    config = accepted(tmp_path, from_torchtitan(tmp_path, "[training]\nsteps = 7\n"), **{"model.config": "model"})
    assert (config.train.sequence_length, config.train.batch_size, config.optimizer.lr) == (2048, 32, 8e-4)
    assert (config.schedule.warmup_steps, config.schedule.final) == (200, 0.0)


def test_a_linear_fall_over_a_part_of_the_steps_is_said_to_differ(tmp_path: Path) -> None:
    text = "[lr_scheduler]\ndecay_ratio = 0.1\nwarmup_steps = 10\n[training]\nsteps = 100\n"
    converted = from_torchtitan(tmp_path, text + "[checkpoint]\nenable = true\n")
    config = accepted(tmp_path, converted, **{"model.config": "model"})
    assert (config.schedule.decay, config.schedule.decay_steps) == ("wsd", 10)


def test_ranks_of_several_machines_are_started_by_torchrun(tmp_path: Path) -> None:
    converted = from_accelerate(tmp_path, {"num_machines": 2})
    assert converted.command.startswith("torchrun --nnodes 2 --nproc-per-node 2 -m trueshard train")


@pytest.mark.parametrize("word", ["1", "yes", "True", "on"])
def test_a_variable_is_true_in_every_way_that_accelerate_takes(word: str, tmp_path: Path) -> None:
    assert accepted(tmp_path, convert(None, environment={"FSDP_OFFLOAD_PARAMS": word})).shard.offload == "cpu"


def test_a_key_without_a_value_is_not_given(tmp_path: Path) -> None:
    converted = from_accelerate(tmp_path, {"mixed_precision": None}, offload_params=None)
    assert accepted(tmp_path, converted).shard.offload == "none"


def test_variables_before_a_command_and_over_several_lines_are_read(tmp_path: Path) -> None:
    text = "#!/bin/sh\necho begins\nFSDP_OFFLOAD_PARAMS=true \\\n  FSDP_VERSION=2 python train.py --lr=3\n"
    converted = convert(written(tmp_path, "run.sh", text))
    assert {entry.key for entry in converted.entries} == {"FSDP_OFFLOAD_PARAMS", "FSDP_VERSION"}


def test_a_reference_to_another_key_is_followed(tmp_path: Path) -> None:
    tree = {"variables": {"seed": 5}, "seed": "${variables.seed}", "max_duration": "1ba"}
    assert accepted(tmp_path, from_composer(tmp_path, tree)).train.seed == 5


# ---- what is wrong


def refused(path: Path | None, source: str | None = None, **more: Any) -> str:
    with pytest.raises(UserError) as caught:
        convert(path, source, **more)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_an_unknown_key_is_answered_with_the_nearest(tmp_path: Path) -> None:
    path = written(tmp_path, "a.yaml", {"distributed_type": "FSDP", "fsdp_config": {"fsdp_ofload_params": True}})
    assert "fsdp_config.fsdp_ofload_params" in (message := refused(path))
    assert "fsdp_config.fsdp_offload_params" in message


def test_an_unknown_variable_is_answered_with_the_nearest() -> None:
    message = refused(None, environment={"FSDP_TRANSFORMER_CLS_WRAP": "Block", "PATH": "/bin"})
    assert "FSDP_TRANSFORMER_CLS_TO_WRAP" in message


def test_an_environment_without_any_of_the_variables_is_refused() -> None:
    assert "path" in refused(None, environment={"PATH": "/bin"})


def test_a_wrong_word_is_answered_with_the_nearest(tmp_path: Path) -> None:
    path = written(tmp_path, "a.json", {"output_dir": "o", "lr_scheduler_type": "cosin"})
    assert lacking(message := refused(path), "lr_scheduler_type", "'cosin'") == []
    assert "nearest: cosine" in message


def test_two_precisions_contradict_each_other(tmp_path: Path) -> None:
    path = written(tmp_path, "a.json", {"output_dir": "o", "bf16": True, "fp16": True})
    assert lacking(refused(path), "bf16", "fp16") == []


def test_two_keys_that_set_one_of_ours_contradict_each_other(tmp_path: Path) -> None:
    tree = {"seed": 1, "global_seed": 2, "max_duration": "1ba"}
    assert "train.seed" in refused(written(tmp_path, "a.yaml", tree))


def test_axes_that_do_not_divide_the_ranks_are_refused(tmp_path: Path) -> None:
    text = "[parallelism]\ntensor_parallel_degree = 3\n"
    assert lacking(refused(written(tmp_path, "a.toml", text), ranks=4), "shard.tensor = 3", "4 ranks", "--ranks") == []


def test_a_context_and_a_sequence_size_contradict_each_other(tmp_path: Path) -> None:
    sizes = {f"parallelism_config_{kind}_size": size for kind, size in (("cp", 2), ("sp", 4))}
    path = written(tmp_path, "a.yaml", {"distributed_type": "FSDP", "parallelism_config": sizes})
    assert lacking(refused(path), "cp_size", "sp_size") == []


def test_a_batch_that_ranks_do_not_divide_is_refused(tmp_path: Path) -> None:
    text = "[training]\nlocal_batch_size = 3\nglobal_batch_size = 32\n"
    assert "no multiple" in refused(written(tmp_path, "a.toml", text), ranks=4)


def test_a_value_that_ours_does_not_take_names_the_key_that_it_came_from(tmp_path: Path) -> None:
    path = written(tmp_path, "a.json", {"output_dir": "o", "learning_rate": -1})
    assert "learning_rate = -1" in refused(path)


def test_a_file_of_no_framework_is_refused_with_the_choices(tmp_path: Path) -> None:
    assert "--from" in refused(written(tmp_path, "a.yaml", {"colour": "red"}))


def test_keys_of_two_frameworks_are_not_guessed(tmp_path: Path) -> None:
    assert "--from" in refused(written(tmp_path, "a.json", {"activation_checkpointing": True}))


def test_our_own_configuration_is_not_converted(tmp_path: Path) -> None:
    assert "trueshard train" in refused(written(tmp_path, "own.toml", '[run]\ndir = "runs/own"\n'))


@pytest.mark.parametrize(
    ("name", "content"), [("a.yaml", "a: [1"), ("a.json", "{"), ("a.toml", "a = "), ("a.yaml", ""), ("a.ini", "a = 1")]
)
def test_a_malformed_file_is_refused_by_its_name(name: str, content: str, tmp_path: Path) -> None:
    assert name in refused(written(tmp_path, name, content))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert "no such file" in refused(tmp_path / "a.yaml")


def test_an_unknown_framework_is_refused(tmp_path: Path) -> None:
    assert "--from fairseq" in refused(tmp_path / "a.yaml", "fairseq")


def test_a_section_that_is_no_table_is_refused(tmp_path: Path) -> None:
    assert lacking(refused(written(tmp_path, "a.json", {"training": 3, "job": {}})), "training", "table") == []


# ---- what comes out


def test_a_converted_file_is_not_written_over_another(tmp_path: Path) -> None:
    converted = from_accelerate(tmp_path)
    out = written(tmp_path, "mine.toml", "mine")
    with pytest.raises(UserError, match="exists already"):
        converted.write(out)
    assert out.read_text() == "mine"


def test_a_converted_file_is_written_whole_and_leaves_nothing_beside(tmp_path: Path) -> None:
    converted = from_accelerate(tmp_path)
    before = set(tmp_path.iterdir())
    converted.write(tmp_path / "out.toml")
    assert set(tmp_path.iterdir()) - before == {tmp_path / "out.toml"}
    assert (tmp_path / "out.toml").read_text() == converted.toml


def test_what_has_no_equivalent_stands_at_the_head_with_its_reason(tmp_path: Path) -> None:
    toml = from_accelerate(tmp_path, min_num_params=100).toml
    head = toml.partition("[run]")[0]
    assert "fsdp_config.fsdp_min_num_params = 100" in head


def test_the_report_has_a_line_for_each_key_that_was_given(tmp_path: Path) -> None:
    converted = convert(EXAMPLES / "composer.yaml", ranks=8)
    given = {entry.key for entry in converted.entries}
    report = converted.report()
    assert all(f"{key} = " in report for key in given)
    assert "no equivalent" in report


def test_what_is_dropped_and_changes_the_result_is_listed_and_is_the_exit_code(tmp_path: Path) -> None:
    assert from_accelerate(tmp_path, min_num_params=100).dropped == []
    assert from_hf(tmp_path, neftune_noise_alpha=5.0).dropped == ["neftune_noise_alpha"]
    assert from_torchtitan(tmp_path, "[parallelism]\npipeline_parallel_degree = 2\n").dropped
    assert from_torchtitan(tmp_path, "[parallelism]\npipeline_parallel_degree = 1\n").dropped == []
    out = tmp_path / "out.toml"
    file = written(tmp_path, "run.yaml", "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3}\n")
    command = [sys.executable, "-m", "trueshard", "convert", str(file), "--from", "accelerate", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 3
    assert lacking(done.stdout.splitlines()[-2], "distributed_type", "deepspeed_config") == []
    assert out.exists()


def test_a_word_of_theirs_cannot_break_out_of_its_comment_or_string(tmp_path: Path) -> None:
    config = accepted(tmp_path, from_hf(tmp_path, output_dir='a"b\\\n[shard]\nx = 1'))
    assert config.run.dir == 'a"b\\\n[shard]\nx = 1'


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
