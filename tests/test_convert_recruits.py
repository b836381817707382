"""`trueshard convert` of torchtune and Axolotl, whose users fine-tune: data, adapters, batches."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from convert_examples import outcomes
from test_convert import EXAMPLES, RULES, accepted, converted, status, value_of
from trueshard.convert.tables import table
from trueshard.errors import UserError
from trueshard.train.models.adapters import add_adapter, layers
from trueshard.train.models.config import AdapterSection


def freed(word: str, offload: str) -> dict[str, Any]:
    return {"shard.reshard_after_forward": word, "shard.offload": offload}


LORA = {"model._component_": "torchtune.models.llama3_2.lora_llama3_2_1b", "model.lora_attn_modules": ["q_proj"]}
ALPACA = {"dataset._component_": "torchtune.datasets.alpaca_cleaned_dataset"}
STEP = {"batch_size": 3, "gradient_accumulation_steps": 5}
HELD_OUT = ALPACA | {"dataset.split": "train[:95%]", "dataset_val.split": "train[95%:]"}
COSINE = {"lr_scheduler._component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"}

TORCHTUNE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    # The batch of a step is that of a rank × ranks × accumulation; ranks that share a matrix count once.
    (STEP, {"train.batch_size": 3 * 5 * 4, "train.accumulate": 5}),
    (STEP | {"tensor_parallel_dim": 2}, {"train.batch_size": 3 * 5 * 2, "shard.tensor": 2}),
    # What is absent there is off there, whatever the default is here.
    (STEP, {"train.max_grad_norm": math.inf, "schedule.decay": "constant", "optimizer.no_decay": None}),
    (STEP | COSINE, {"schedule.decay": "cosine", "schedule.final": 0.0}),
    (STEP | {"optimizer._component_": "torch.optim.SGD"}, {"optimizer.no_decay": []}),
    # The layers of an adapter have the names of the weights; phi's are fused.
    (
        STEP | LORA | {"model.apply_lora_to_mlp": True, "model.apply_lora_to_output": True},
        {"adapter.targets": ["q_proj", "gate_proj", "up_proj", "down_proj", "lm_head"], "adapter.rank": 8},
    ),
    (
        STEP
        | {"model._component_": "torchtune.models.phi4.lora_phi4_14b", "model.apply_lora_to_mlp": True}
        | {"model.lora_attn_modules": ["q_proj", "v_proj", "output_proj"]},
        {"adapter.targets": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]},
    ),
    (
        STEP | LORA | {"model._component_": "torchtune.models.gemma.qlora_gemma_2b"},
        {"model.quantize": "nf4", "adapter.targets": ["q_proj"]},
    ),
    # A builder of data says which they are, and whether the prompt counts.
    (
        STEP | ALPACA,
        {"data.path": "yahma/alpaca-cleaned", "data.format": "instruction", "data.answers_only": False},
    ),
    (STEP | ALPACA | {"dataset.train_on_input": False}, {"data.answers_only": True, "data.packing": False}),
    (STEP | ALPACA | {"dataset.packed": True, "dataset.source": "me/mine"}, {"data.packing": True}),
    (STEP | ALPACA | {"dataset.source": "me/mine"}, {"data.path": "me/mine", "data.format": "instruction"}),
    (STEP | ALPACA | {"dataset.source": "json", "dataset.data_files": "a.jsonl"}, {"data.path": "a.jsonl"}),
    # Validation data that are the rest of a split are held out of the whole.
    (STEP | HELD_OUT, {"data.split": "train[:95%]", "evaluation.every": None}),
    (
        STEP | HELD_OUT | {"run_val_every_n_steps": 7},
        {"data.split": "train", "evaluation.fraction": 0.05, "evaluation.every": 7},
    ),
    # Steps of an epoch are multiplied by the epochs.
    (STEP | {"epochs": 3, "max_steps_per_epoch": 10}, {"train.steps": 30}),
    (STEP | {"epochs": 3, "max_steps_per_epoch": None}, {"train.epochs": 3.0}),
    # Moments in 8 bits are moments; other classes keep their path.
    (
        STEP | {"optimizer._component_": "bitsandbytes.optim.PagedAdamW8bit"},
        {"optimizer.class_path": "torch.optim.AdamW"},
    ),
    (STEP | {"optimizer.eps": 1e-6}, {"optimizer.arguments": {"eps": 1e-6}}),
    # Preferences.
    (
        STEP | {"loss._component_": "torchtune.rlhf.loss.DPOLoss", "loss.beta": 0.3},
        {"data.format": "preference", "preference.beta": 0.3},
    ),
    # References are followed.
    (STEP | {"base": "b", "checkpointer.checkpoint_dir": "${base}/m"}, {"model.path": "b/m"}),
]


@pytest.mark.parametrize(("keys", "expected"), TORCHTUNE)
def test_what_keys_of_torchtune_become(keys: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    config = accepted(tmp_path, converted(tmp_path, "torchtune", keys))
    assert {key: value_of(config, key) for key in expected} == expected


LISTED = [{"path": "a", "type": "chat_template", "split": "train[:5%]", "name": "s"}]
STEPS = {"micro_batch_size": 3, "gradient_accumulation_steps": 5, "max_steps": 100}
QLORA = {"adapter": "qlora", "load_in_4bit": True, "lora_r": 4}
ZERO = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
POLICY = {"rl": "grpo", "trl": {"num_generations": 2, "beta": 0.1, "epsilon": 0.3, "max_completion_length": 9}}
AXOLOTL: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (STEPS, {"train.batch_size": 3 * 5 * 4, "train.accumulate": 5, "train.steps": 100, "train.sequence_length": 512}),
    ({"micro_batch_size": 2, "batch_size": 8}, {"train.batch_size": 8 * 4, "train.accumulate": 4, "train.epochs": 1.0}),
    (STEPS | {"tensor_parallel_size": 2}, {"train.batch_size": 3 * 5 * 2, "shard.tensor": 2}),
    # Absent keys have its defaults, or those of transformers' arguments.
    (STEPS, {"schedule.decay": "cosine", "schedule.final": 0.0, "shard.mixed_precision": "bf16"}),
    (STEPS, {"optimizer.weight_decay": 0.0, "model.dtype": "float32", "rl": None, "adapter": None}),
    (STEPS | {"bf16": False, "fp16": True}, {"shard.mixed_precision": "fp16"}),
    (STEPS | {"warmup_ratio": 0.05, "save_steps": 0.1}, {"schedule.warmup_steps": 5, "train.checkpoint_every": 10}),
    (STEPS | {"lr_scheduler": "cosine", "cosine_min_lr_ratio": 0.2}, {"schedule.final": 0.2}),
    # Moments in fewer bits are moments.
    (STEPS | {"optimizer": "adamw_bnb_8bit", "adam_beta2": 0.95}, {"optimizer.class_path": "torch.optim.AdamW"}),
    (STEPS | {"optimizer": "sgd", "adam_beta2": 0.95}, {"optimizer.class_path": "torch.optim.SGD"}),
    # The base of an adapter is stored in 16 bits; patterns stay patterns.
    (STEPS | QLORA, {"model.quantize": "nf4", "model.dtype": "bfloat16", "adapter.targets": "all-linear"}),
    (STEPS | QLORA | {"lora_target_modules": ["q_proj"]}, {"adapter.targets": ["q_proj"], "adapter.rank": 4}),
    (STEPS | QLORA | {"lora_target_modules": "a.(b|c)_proj"}, {"adapter.targets": "a.(b|c)_proj"}),
    (STEPS | QLORA | {"lora_target_modules": ["q"], "lora_target_linear": True}, {"adapter.targets": "all-linear"}),
    (STEPS | QLORA | {"peft_use_rslora": True}, {"adapter.arguments": {"use_rslora": True}}),
    (STEPS | {"load_in_8bit": False, "lora_r": 4}, {"adapter": None, "model.quantize": "none"}),
    # A data set: its path, its format by type, and what is of all sources.
    (STEPS | {"datasets": LISTED, "excess_length_strategy": "truncate"}, {"data.long": "cut"}),
    (STEPS | {"datasets": LISTED}, {"data.long": "drop"}),
    (STEPS | {"datasets": LISTED}, {"data.path": "a", "data.format": "chat", "data.split": "train[:5%]"}),
    (STEPS | {"datasets": LISTED, "sample_packing": True}, {"data.packing": True, "data.answers_only": True}),
    (STEPS | {"datasets": LISTED, "processor_type": "AutoProcessor"}, {"data.format": "vision"}),
    (STEPS | {"datasets": [{"path": "a", "type": "alpaca:chat"}]}, {"data.format": "instruction"}),
    (STEPS | {"datasets": [{"path": "json", "data_files": ["a.jsonl"], "type": None}]}, {"data.path": "a.jsonl"}),
    (
        STEPS | {"pretraining_dataset": [{"path": "a", "type": "pretrain", "text_column": "t"}]},
        {"data.format": "text", "data.field": "t", "data.streaming": True},
    ),
    (STEPS | {"num_epochs": 2, "saves_per_epoch": 5}, {"train.checkpoint_every": 10}),
    (STEPS | {"val_set_size": 0.1, "eval_steps": 7}, {"evaluation.fraction": 0.1, "evaluation.every": 7}),
    (STEPS | {"val_set_size": 0.0, "eval_steps": 7, "evals_per_epoch": 2}, {"evaluation": None}),
    (STEPS | {"test_datasets": [{"path": "b", "type": "chat_template"}]}, {"evaluation.path": "b"}),
    # Engines: ZeRO by name or by table, FSDP's words with and without their prefix.
    (STEPS | {"deepspeed": "deepspeed_configs/zero2.json"}, freed("never", "none")),
    (STEPS | {"deepspeed": "deepspeed_configs/zero3_bf16_cpuoffload_all.json"}, freed("always", "cpu")),
    (STEPS | {"deepspeed": ZERO}, freed("always", "cpu")),
    (STEPS | {"fsdp_config": {"fsdp_offload_params": True, "reshard_after_forward": False}}, freed("never", "cpu")),
    # Kernels and trackers by several keys.
    (STEPS | {"liger_rope": True, "context_parallel_size": 2}, {"model.kernels": None, "shard.context": 2}),
    (STEPS | {"liger_rope": True, "liger_rms_norm": True, "flash_attention": True}, {"model.kernels": "liger"}),
    (STEPS | {"wandb_project": "p", "use_tensorboard": True}, {"log.to": ["wandb", "tensorboard"], "log.project": "p"}),
    # Preferences, and answers by the fields of TRL.
    (STEPS | {"rl": "dpo", "rl_beta": 0.3, "datasets": LISTED}, {"data.format": "preference", "preference.beta": 0.3}),
    (
        {"micro_batch_size": 4, "sequence_len": 64} | POLICY,
        {"rl.samples": 2, "rl.kl": 0.1, "rl.clip": [0.3, 0.3], "rollout.tokens": 9, "train.batch_size": 16},
    ),
]


@pytest.mark.parametrize(("keys", "expected"), AXOLOTL)
def test_what_keys_of_axolotl_become(keys: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    config = accepted(tmp_path, converted(tmp_path, "axolotl", keys))
    assert {key: value_of(config, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("value", "base", "told"),
    [
        ("tokenizer_default", "any", "always"),
        ("llama3", "meta-llama/Llama-3.2-1B", "near"),
        ("chatml", "meta-llama/Llama-3.2-1B", "near"),
        ("llama3", "Qwen/Qwen3-8B", "none"),
        ("mine.jinja", "Qwen/Qwen3-8B", "set"),
    ],
)
def test_a_template_is_the_tokenizers_own_a_file_or_lost(value: str, base: str, told: str, tmp_path: Path) -> None:
    result = converted(tmp_path, "axolotl", {"base_model": base, "chat_template": value})
    assert status(result, "chat_template") == [told]
    assert ("chat_template" in result.dropped) == (told == "none")


def test_a_pattern_over_whole_names_chooses_the_layers_of_an_adapter() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
    with torch.device("meta"):
        chosen = AdapterSection(targets=r"model.layers.1.(mlp|self_attn).(q|up)_proj")
        model = add_adapter(LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)), chosen, None)
        names = [name.partition("layers.")[2] for name, _ in layers(model)]
        assert sorted(names) == ["1.mlp.up_proj", "1.self_attn.q_proj"]
        with pytest.raises(UserError, match="adapter"):
            add_adapter(LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)), AdapterSection(targets="x.*"), None)


def test_every_key_that_axolotl_shares_has_a_rule() -> None:
    for row in (row for row in table("axolotl")["rule"] if "take" in row):
        assert set(row["keys"]) <= set(RULES[{"huggingface": "hf"}.get(row["take"], row["take"])])


@pytest.mark.parametrize(
    ("source", "keys", "dropped"),
    [
        ("torchtune", {"teacher_model._component_": "torchtune.models.llama3_1.llama3_1_8b", "kd_ratio": 0.5}, 2),
        ("torchtune", {"quantizer._component_": "torchtune.training.quantization.Int8DynActInt4WeightQATQuantizer"}, 1),
        ("torchtune", {"loss._component_": "torchtune.rlhf.loss.PPOLoss"}, 1),
        ("axolotl", {"rl": "kto", "kto_desirable_weight": 0.2}, 2),
        ("axolotl", {"unfrozen_parameters": ["^lm_head"], "qat.weight_dtype": "int4"}, 2),
        ("axolotl", {"plugins": ["axolotl.integrations.diffusion.DiffusionPlugin"]}, 1),
        ("axolotl", {"datasets": [{"path": "a", "type": "chat_template", "drop_system_message": True}]}, 1),
        ("axolotl", {"lora_mlp_kernel": True, "activation_offloading": True}, 0),
        ("torchtune", {"optimizer_in_bwd": True, "enable_activation_offloading": True}, 0),
    ],
)
def test_a_method_that_is_not_there_is_dropped_by_name(
    source: str, keys: dict[str, Any], dropped: int, tmp_path: Path
) -> None:
    result = converted(tmp_path, source, keys)
    assert len(result.dropped) == dropped
    assert all("none" in status(result, key) for key in keys)


def test_composers_average_is_an_average(tmp_path: Path) -> None:
    average = {"smoothing": 0.99, "update_interval": "10ba", "ema_start": "0.5dur"}
    keys = {"max_duration": "100ba", "device_train_batch_size": 8, "algorithms": {"ema": average}}
    config = accepted(tmp_path, converted(tmp_path, "composer", keys))
    assert config.average is not None
    assert (config.average.decay, config.average.every, config.average.start) == (0.99, 10, 50)


def test_sources_of_several_formats_or_with_parts_are_named(tmp_path: Path) -> None:
    listed = [{"_component_": "chat_dataset", "source": "a"}, {"_component_": "text_completion_dataset", "source": "b"}]
    result = converted(tmp_path, "torchtune", STEP | {"dataset": [*listed, {**listed[0], "subset": "s"}]})
    config = accepted(tmp_path, result)
    assert [source.path for source in config.data.sources] == ["a", "b", "a"]
    assert status(result, "dataset") == ["set", "always", "none"]


@pytest.mark.rest
@pytest.mark.parametrize("name", ["axolotl", "torchtune"])
def test_an_example_passes_the_checks_of_a_run_with_a_tiny_model_and_data(name: str) -> None:
    (found,) = outcomes(name, [EXAMPLES / f"{name}.yaml"])
    assert found[1:] == ("accepted", "")
