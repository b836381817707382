"""Composer's `parallelism_config` (`fsdp`, `fsdp2`, `tp`), the older `fsdp_config`, and the file of a run around them.

- The keys around are those of Composer's `Trainer`, and those that llm-foundry's YAML adds to build its arguments.
- Defaults are not assumed: such a file names what matters, and most keys are made by other tools.
"""

from __future__ import annotations

from typing import Any

from trueshard.train.convert import composer_parts as parts
from trueshard.train.convert import fsdp, values
from trueshard.train.convert.batches import batch
from trueshard.train.convert.composer_rest import REST
from trueshard.train.convert.rules import Rule, Source, always, by, later, none, sets, words
from trueshard.train.convert.sheet import Sheet, Wrong


def both(*keys: str) -> str:
    """The same keys in `parallelism_config.fsdp`, `.fsdp2`, and the older `fsdp_config`."""
    sections = ("parallelism_config.fsdp", "parallelism_config.fsdp2", "fsdp_config")
    return " ".join(f"{section}.{key}" for section in sections for key in keys)


def _finish(sheet: Sheet) -> None:
    micro = sheet.get("device_train_microbatch_size")
    if str(micro).lower() == "auto":
        sheet.put("train.on_oom", "tighten", "device_train_microbatch_size", micro)
    elif "device_train_microbatch_size" in sheet.given:
        _accumulate(sheet, values.positive(micro))
    if "global_train_batch_size" in sheet.given:
        total = values.positive(sheet.get("global_train_batch_size"))
        sheet.put("train.batch_size", total, "global_train_batch_size", total)
        if "device_train_batch_size" in sheet.given:
            each = sheet.get("device_train_batch_size")
            sheet.tell("device_train_batch_size", each, "always", "global_train_batch_size says it")
    elif "device_train_batch_size" in sheet.given:
        batch(sheet, "device_train_batch_size", pieces=1)
    else:
        batch(sheet)


def _accumulate(sheet: Sheet, micro: int) -> None:
    """From the microbatch of a rank."""
    key, total, each = "device_train_microbatch_size", parts.batch_size(sheet), sheet.get("device_train_batch_size")
    of_rank = values.positive(each) if each is not None else total / sheet.ranks if total and sheet.ranks else None
    if of_rank is None:
        sheet.ask("train.accumulate", "1", f"a rank's part of the batch / {micro}; --ranks works it out")
        sheet.tell(key, micro, "set", "which needs the number of ranks", "train.accumulate")
    elif of_rank % micro:
        raise Wrong(f"{key} = {micro} does not divide a rank's {of_rank:g} sequences; change it, or --ranks")
    else:
        sheet.put("train.accumulate", int(of_rank // micro), key, micro, "set", f"{of_rank:g} of a rank / {micro}")
        sheet.origins["train.accumulate"] = f"{of_rank:g} of a rank / {key} = {micro}"


FSDP: tuple[Rule, ...] = (
    by(both("sharding_strategy"), "shard.reshard_after_forward", fsdp.STRATEGY_WHY, fsdp.put_strategy, together=True),
    by(
        both("reshard_after_forward"),
        "shard.reshard_after_forward",
        "true: `always`; false: `never`; a number: the same",
        parts.reshard,
    ),
    words(
        both("activation_checkpointing"),
        "shard.activation_checkpointing",
        fsdp.RECOMPUTE,
        "true: `full`: every block; no function on the model is looked for",
    ),
    always(both("activation_checkpointing_reentrant"), "recomputation is without reentrance: the same numbers"),
    none(
        both("activation_cpu_offload"),
        'what a recomputed block keeps stays on the device; "full" keeps the least',
        off=[False],
    ),
    always(
        both("auto_wrap"),
        "units are the model's own hints, else its blocks",
        {False: "blocks are units: the same numbers in less memory"},
    ),
    none(
        both("te_checkpoint_wrapper", "te_shard_fp8_weight"), "for Transformer Engine, which is not used", off=[False]
    ),
    always(
        both("backward_prefetch"),
        "in backward the next unit is gathered while this one computes (BACKWARD_PRE)",
        {"backward_post": "FSDP2 always gathers one unit ahead (BACKWARD_PRE): the same numbers"},
    ),
    none(both("backward_prefetch_limit", "forward_prefetch_limit"), "FSDP2 gathers one unit ahead", off=[1]),
    words(both("cpu_offload"), "shard.offload", fsdp.OFFLOAD, "true: `cpu`"),
    always(both("data_parallel_shard_degree"), "as many as there are ranks"),
    sets(both("data_parallel_replicate_degree"), "shard.replicate", values.positive, "the same"),
    none(
        both("forward_prefetch"), "FSDP2 issues the next gather while a unit computes, without being told", off=[False]
    ),
    none(
        both("ignored_modules", "process_group", "device_mesh"), "an object of Python; shard(..., mesh=) takes a mesh"
    ),
    none(both("keep_low_precision_grads"), "gradients are in the dtype of their parameters", off=[False]),
    always(
        both("limit_all_gathers"), "FSDP2 gathers no further ahead than one unit", {False: "FSDP2 always limits it"}
    ),
    always(
        both("load_monolith_rank0_only", "load_fsdp_monolith_rank0_only"),
        "each rank reads its own bytes; none ever holds the whole model",
    ),
    none(both("load_planner", "save_planner"), "an object of Python, of torch's checkpoints"),
    by(
        both("mixed_precision"),
        "shard.mixed_precision",
        "DEFAULT: as precision says, reduced in float32; PURE: the same, reduced in float32; FULL: nothing to set",
        parts.mixed,
    ),
    none(both("sharded_ckpt_prefix_dir"), "checkpoints are called by their step", off=["ep{epoch}-ba{batch}"]),
    always(both("state_dict_type"), "sharded in the writing, full in the reading, at any number of ranks"),
    always(both("sync_module_states"), "ranks that differ go on from rank 0's values"),
    always(both("use_orig_params", "flatten_parameters"), "parameters keep their names and the optimizer its groups"),
    always(both("verbose"), "the plan is printed, and stored with the run"),
    none(both("min_params"), "units are named by class or glob (shard.units), not by size"),
    none("parallelism_config.tp tp_config", "ranks only share parameters; tensor parallelism has no equivalent"),
)

RULES: tuple[Rule, ...] = (
    *FSDP,
    by(
        "precision",
        "shard.mixed_precision",
        "amp_bf16: `bf16`; amp_fp16: `fp16`; fp32: nothing to set; amp_fp8: `bf16`",
        parts.precision,
    ),
    by(
        "max_duration",
        "train.steps",
        "ba: the same; ep: train.epochs; tok and sp: worked out from batch and sequence",
        parts.duration,
    ),
    by(
        "global_train_batch_size device_train_batch_size",
        "train.batch_size",
        "the same; that of a device × ranks",
        later,
    ),
    by(
        "device_train_microbatch_size",
        "train.accumulate",
        "a rank's part of the batch / this; auto: train.on_oom = `tighten`",
        later,
    ),
    sets("max_seq_len", "train.sequence_length", values.positive, "the same"),
    sets("seed global_seed", "train.seed", values.integer, "the same word, another random order"),
    by("eval_interval", "evaluation.every", "in steps", parts.every("evaluation.every", "evaluations")),
    by("save_interval", "train.checkpoint_every", "in steps", parts.every("train.checkpoint_every", "checkpoints")),
    by("save_num_checkpoints_to_keep", "train.keep", "the same; -1: name a number", parts.keep),
    sets("save_folder", "run.dir", values.text, "the same"),
    by(
        "optimizer optimizers",
        "optimizer.class",
        "decoupled_adamw: torch's AdamW with weight_decay / lr, and no_decay = []",
        parts.optimizer,
    ),
    by(
        "scheduler schedulers",
        "schedule.decay",
        "constant, cosine and linear with warm-up: the same; alpha_f: schedule.final",
        parts.schedule,
    ),
    by("model", "model.path", "hf_causal_lm: its directory; MPT's own models: none", parts.model),
    by("tokenizer tokenizer_name", "tokenizer.path", "a directory on this machine", parts.tokenizer),
    by("algorithms", "train.max_grad_norm", "gradient_clipping by norm; others have no equivalent", parts.clipping),
    by("loggers", "log.to", "wandb, tensorboard", parts.loggers),
    none("deepspeed_config", "another engine, with no equivalent; FSDP's words are in [shard]"),
    by(
        "compile_config",
        "shard.compile",
        "any table: true",
        parts.compiled,
    ),
    *REST,
)

_SECTIONS = {"parallelism_config", "fsdp_config"}
_AT_THE_TOP = {key for rule in RULES for key in rule.keys if "." not in key}

SOURCE = Source(
    name="composer",
    title="Composer",
    rules=RULES,
    finish=_finish,
    prepare=lambda tree: _under(tree),
    assumes=lambda given: False,
    marks=("max_duration", "device_train_microbatch_size", "train_loader"),
)


def _under(tree: dict[str, Any]) -> dict[str, Any]:
    """`fsdp` alone, or its keys alone, belong under `parallelism_config`."""
    tree = {key: parts.resolved(value, tree) for key, value in tree.items()}
    if set(tree) & (_AT_THE_TOP | _SECTIONS):
        return {key: value for key, value in tree.items() if key not in _SECTIONS or value is not None}
    if set(tree) <= {"fsdp", "fsdp2", "tp"}:
        return {"parallelism_config": {key: value for key, value in tree.items() if value is not None}}
    return {"parallelism_config": {"fsdp": dict(tree)}}
