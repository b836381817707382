"""transformers' `TrainingArguments` as JSON, with `fsdp` and `fsdp_config`; or an `fsdp_config` file alone.

- A file with any training argument means all of them: those that are absent have transformers' defaults.
- Keys of older releases are known too: dumps of arguments live long.
- Model, data and sequence length are arguments of the script, and so are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trueshard.train.convert import fsdp, values
from trueshard.train.convert import huggingface_parts as parts
from trueshard.train.convert.batches import batch
from trueshard.train.convert.huggingface_rest import REST
from trueshard.train.convert.rules import Lost, Source, by, later, none, sets, words
from trueshard.train.convert.sheet import Sheet, Wrong

SPELLED = {"fsdp_version": "version", "transformer_cls_names_to_wrap": "transformer_layer_cls_to_wrap"}


def spelled(field: str) -> str:
    """A field of Accelerate's plugin in `fsdp_config`."""
    return f"fsdp_config.{SPELLED.get(field, field)}"


def _finish(sheet: Sheet) -> None:
    if _has_arguments(sheet.given):
        batch(sheet, "per_device_train_batch_size", "gradient_accumulation_steps")
    else:
        batch(sheet)
    sheet.ask("train.sequence_length", "1024", "tokens a sequence, as your script has it")


def _has_arguments(given: Mapping[str, Any]) -> bool:
    return any(key != "fsdp" and not key.startswith("fsdp_config") for key in given)


def _prepared(tree: dict[str, Any]) -> dict[str, Any]:
    """`fsdp_config` as a table; a file of such keys alone is one; its keys may have a prefix."""
    if "fsdp_config" not in tree and not any(key in _ARGUMENTS for key in tree):
        tree = {"fsdp_config": dict(tree)}
    if "evaluation_strategy" in tree:
        tree = {"eval_strategy" if key == "evaluation_strategy" else key: value for key, value in tree.items()}
    inner = tree.get("fsdp_config")
    if isinstance(inner, str):
        raise Wrong(f"fsdp_config is a path, {inner!r}; put that file's content in its place")
    if isinstance(inner, dict):
        tree = {**tree, "fsdp_config": {key.removeprefix("fsdp_"): value for key, value in inner.items()}}
    if not tree.get("fsdp_config"):
        tree = {key: value for key, value in tree.items() if key != "fsdp_config"}
    return tree


RULES = (
    by(
        "fsdp",
        "[shard]",
        "true: as fsdp_config says; its older words: as there; off: a whole copy in each rank",
        parts.fsdp_words,
    ),
    *fsdp.rules(spelled),
    none(
        "fsdp_config.xla fsdp_config.xla_fsdp_v2 fsdp_config.xla_fsdp_settings fsdp_config.xla_fsdp_grad_ckpt",
        "for TPUs only; CUDA devices and CPUs are supported",
        off=[False],
    ),
    sets("output_dir", "run.dir", values.text, "the same"),
    by("num_train_epochs", "train.epochs", "the same, where max_steps does not count instead", parts.duration, 3.0),
    by("max_steps", "train.steps", "the same; -1: num_train_epochs counts", parts.duration, -1),
    by(
        "per_device_train_batch_size",
        "train.batch_size",
        "× ranks × gradient_accumulation_steps: here it is that of a whole step, at any number of ranks",
        later,
        8,
    ),
    by("gradient_accumulation_steps", "train.accumulate", "the same", later, 1),
    sets("learning_rate", "optimizer.lr", values.number, "the same", 5e-5),
    by(
        "optim",
        "optimizer.class",
        "torch's by import path; those of other packages: give their class",
        parts.optimizer,
        "adamw_torch_fused",
    ),
    by("adam_beta1", "optimizer.betas", "the same", later, 0.9),
    by("adam_beta2", "optimizer.betas", "the same", later, 0.999),
    by("adam_epsilon", "optimizer.arguments", "eps", later, 1e-8),
    none("optim_args optim_target_modules", "give the class's arguments in optimizer.arguments"),
    sets("weight_decay", "optimizer.weight_decay", values.number, "the same; not on norms and biases, as there", 0.0),
    sets("max_grad_norm", "train.max_grad_norm", parts.norm, "the same; 0: inf, which only measures", 1.0),
    by(
        "warmup_steps warmup_ratio",
        "schedule.warmup_steps",
        "the same; a share of the steps becomes a number",
        parts.warmup,
        0,
    ),
    by(
        "lr_scheduler_type",
        "schedule.decay",
        "linear, cosine, constant and constant_with_warmup: the same, to 0; with min_lr: schedule.final; polynomial: "
        "linear; warmup_stable_decay: wsd; reduce_lr_on_plateau: schedule.class; others have no equivalent",
        parts.schedule,
        "linear",
        together=True,
    ),
    by("lr_scheduler_kwargs", "schedule.final", "min_lr, min_lr_rate, min_lr_ratio, num_decay_steps", later),
    by("bf16 fp16", "shard.mixed_precision", fsdp.PRECISION_WHY, parts.precision),
    by(
        "activation_checkpointing gradient_checkpointing",
        "shard.activation_checkpointing",
        "true: `full`, every block; each 2nd, 5th or 10th: a glob",
        parts.recompute,
        together=True,
    ),
    by(
        "activation_checkpointing_kwargs gradient_checkpointing_kwargs",
        "shard.activation_checkpointing",
        "every_n_layers: a glob; offload has no equivalent; recomputation is always without reentrance",
        parts.recompute_more,
    ),
    words("torch_compile", "shard.compile", {"true": True, "false": None}, "true: each unit is compiled"),
    words(
        "torch_compile_backend",
        "shard.compile",
        {
            "none": None,
            "inductor": True,
            "aot_eager": Lost("inductor only"),
            "cudagraphs": Lost("inductor only"),
            "eager": Lost("inductor only"),
        },
        "inductor: true; other backends have no equivalent",
    ),
    none("torch_compile_mode", "inductor's default mode is what shard.compile uses", off=["default"]),
    words(
        "auto_find_batch_size",
        "train.on_oom",
        {"true": "tighten", "false": None},
        "true: `tighten`: the microbatch shrinks, the global batch stays",
    ),
    sets("seed", "train.seed", values.integer, "the same word, another random order", 42),
    by(
        "logging_strategy",
        "train.log_every",
        "in steps; metrics.jsonl has every step",
        parts.every("train.log_every", "logging_strategy", "logging_steps"),
        "steps",
    ),
    by(
        "logging_steps",
        "train.log_every",
        "the same; a share of the steps becomes a number",
        parts.every("train.log_every", "logging_strategy", "logging_steps"),
        500,
    ),
    by("report_to", "log.to", "tensorboard, wandb, trackio; others have no equivalent", parts.trackers),
    sets("project", "log.project", values.text, "the same"),
    by(
        "eval_strategy evaluation_strategy",
        "evaluation.every",
        "steps: [evaluation]; no: none; epoch: told in steps",
        parts.every("evaluation.every", "eval_strategy", "eval_steps"),
    ),
    by(
        "eval_steps",
        "evaluation.every",
        "the same; absent: logging_steps",
        parts.every("evaluation.every", "eval_strategy", "eval_steps"),
    ),
    by(
        "save_strategy",
        "train.checkpoint_every",
        "in steps; there is always one at the end",
        parts.every("train.checkpoint_every", "save_strategy", "save_steps"),
        "steps",
    ),
    by(
        "save_steps",
        "train.checkpoint_every",
        "the same; a share of the steps becomes a number",
        parts.every("train.checkpoint_every", "save_strategy", "save_steps"),
        500,
    ),
    sets("save_total_limit", "train.keep", values.positive, "the same; absent there: all are kept, here two"),
    *REST,
)
_ARGUMENTS = {key for rule in RULES for key in rule.keys if "." not in key}

SOURCE = Source(
    name="hf",
    title="transformers' Trainer",
    rules=RULES,
    finish=_finish,
    prepare=_prepared,
    assumes=_has_arguments,
    marks=("per_device_train_batch_size", "output_dir", "learning_rate", "num_train_epochs"),
)
