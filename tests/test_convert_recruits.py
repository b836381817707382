"""`trueshard convert` of torchtune and Axolotl, whose users fine-tune: data, adapters, batches."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from convert_examples import outcomes
from test_convert import EXAMPLES, accepted, converted, status, value_of

LORA = {"model._component_": "torchtune.models.llama3_2.lora_llama3_2_1b", "model.lora_attn_modules": ["q_proj"]}
ALPACA = {"dataset._component_": "torchtune.datasets.alpaca_cleaned_dataset"}
STEP = {"batch_size": 3, "gradient_accumulation_steps": 5}
HELD_OUT = ALPACA | {"dataset.split": "train[:95%]", "dataset_val.split": "train[95%:]"}
GRPO = {"grpo_samples": 8, "loss.epsilon": 0.1, "loss.kl_coeff": 0.01, "max_generated_tokens": 64}
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
    # Preferences; and batches of prompts are batches of answers.
    (
        STEP | {"loss._component_": "torchtune.rlhf.loss.DPOLoss", "loss.beta": 0.3},
        {"data.format": "preference", "preference.beta": 0.3},
    ),
    (
        {"batch_size": 2, **GRPO},
        {"train.batch_size": 2 * 4 * 8, "rl.clip": [0.1, 0.1], "rl.kl": 0.01, "rollout.tokens": 64},
    ),
    # References are followed.
    (STEP | {"base": "b", "checkpointer.checkpoint_dir": "${base}/m"}, {"model.path": "b/m"}),
]


@pytest.mark.parametrize(("keys", "expected"), TORCHTUNE)
def test_what_keys_of_torchtune_become(keys: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    config = accepted(tmp_path, converted(tmp_path, "torchtune", keys))
    assert {key: value_of(config, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("source", "keys", "dropped"),
    [
        ("torchtune", {"teacher_model._component_": "torchtune.models.llama3_1.llama3_1_8b", "kd_ratio": 0.5}, 2),
        ("torchtune", {"quantizer._component_": "torchtune.training.quantization.Int8DynActInt4WeightQATQuantizer"}, 1),
        ("torchtune", {"loss._component_": "torchtune.rlhf.loss.PPOLoss"}, 1),
        ("torchtune", {"optimizer_in_bwd": True, "enable_activation_offloading": True}, 0),
    ],
)
def test_a_method_that_is_not_there_is_dropped_by_name(
    source: str, keys: dict[str, Any], dropped: int, tmp_path: Path
) -> None:
    result = converted(tmp_path, source, keys)
    assert len(result.dropped) == dropped
    assert [status(result, key) for key in keys] == [["none"]] * len(keys)


def test_sources_of_several_formats_or_with_parts_are_named(tmp_path: Path) -> None:
    listed = [{"_component_": "chat_dataset", "source": "a"}, {"_component_": "text_completion_dataset", "source": "b"}]
    result = converted(tmp_path, "torchtune", STEP | {"dataset": [*listed, {**listed[0], "subset": "s"}]})
    config = accepted(tmp_path, result)
    assert [source.path for source in config.data.sources] == ["a", "b", "a"]
    assert status(result, "dataset") == ["set", "none", "none"]


@pytest.mark.rest
@pytest.mark.parametrize("name", ["torchtune"])
def test_an_example_passes_the_checks_of_a_run_with_a_tiny_model_and_data(name: str) -> None:
    (found,) = outcomes(name, [EXAMPLES / f"{name}.yaml"])
    assert found[1:] == ("accepted", "")
