"""TorchTitan's TOML: its sections, as the releases knew them that were configured by TOML.

- A file means all keys: those that are absent have TorchTitan's defaults.
- Its models are its own; here a model is a Hugging Face directory, so that path is asked for.
"""

from __future__ import annotations

import math
from typing import Any

from trueshard.train.convert import fsdp, values
from trueshard.train.convert.batches import batch, count
from trueshard.train.convert.rules import Lost, Near, Source, always, by, command, later, none, part, sets, words
from trueshard.train.convert.sheet import Sheet, Wrong, toml_value
from trueshard.train.convert.torchtitan_rest import REST

OTHER_WAYS = ("tensor", "context", "pipeline")
HUB = {"c4": ("allenai/c4", "en", "train"), "c4_validation": ("allenai/c4", "en", "validation")}
LAST_BLOCK = "the last block and the root are kept; there the norm and the head, and the last block is freed"


def _data(sheet: Sheet, key: str, value: Any) -> None:
    path, name = sheet.get("training.dataset_path"), values.text(sheet.get("training.dataset"))
    if key == "training.dataset_path":
        if value:
            sheet.put("data.path", values.text(value), key, value)
        else:
            sheet.tell(key, value, "always", "training.dataset says which")
    elif path:
        sheet.tell(key, value, "always", "training.dataset_path says where it is")
    elif name in HUB:
        place, subset, split = HUB[name]
        for ours, each in (("path", place), ("subset", subset), ("split", split), ("streaming", True)):
            sheet.put(f"data.{ours}", each, key, value)
    else:
        sheet.tell(key, value, "none", "a data set of its own; set data.path")


def _optimizer(sheet: Sheet, key: str, value: Any) -> None:
    known = {"AdamW": "torch.optim.AdamW", "Adam": "torch.optim.Adam"}
    sheet.put("optimizer.class", sheet.word(value, known), key, value)
    # Weight decay there is on every parameter; here norms and biases are left out unless told otherwise.
    sheet.put("optimizer.no_decay", [], key, value)


def _betas(sheet: Sheet, key: str, value: Any) -> None:
    betas = [values.number(sheet.get("optimizer.beta1")), values.number(sheet.get("optimizer.beta2"))]
    sheet.put("optimizer.betas", betas, key, value)


def _decay(sheet: Sheet, key: str, value: Any) -> None:
    """`decay_type` with `decay_ratio`: the shape, and over which last part of the steps."""
    shape, ratio = str(value).lower(), sheet.get("lr_scheduler.decay_ratio")
    sheet.word(shape, {"linear": 0, "cosine": 0, "sqrt": 0})
    steps = values.positive(sheet.get("lr_scheduler.total_steps") or sheet.get("training.steps"))
    warm = values.integer(sheet.get("lr_scheduler.warmup_steps"))
    falling = steps - warm if ratio is None else min(round(values.number(ratio) * steps), steps - warm)
    if falling < steps - warm or shape == "sqrt":
        note = "" if shape == "sqrt" else f"falls along 1 - √x over the last {falling} steps, there {shape}"
        sheet.put("schedule.decay", "wsd", key, value, "near" if note else "set", note)
        if falling > 0:
            sheet.put("schedule.decay_steps", falling, key, value)
    else:
        sheet.put("schedule.decay", shape, key, value)


def _ratio(sheet: Sheet, key: str, value: Any) -> None:
    if value is not None and not 0 <= values.number(value) <= 1:
        raise Wrong(f"found {value!r}, wanted a share from 0 to 1")
    sheet.tell(key, value, "set", "", "schedule.decay and schedule.decay_steps")


def _recompute(sheet: Sheet, key: str, value: Any) -> None:
    ours, option = "shard.activation_checkpointing", str(sheet.get("activation_checkpoint.selective_ac_option"))
    option_key = "activation_checkpoint.selective_ac_option"
    mode = sheet.word(value, {"none": "none", "full": "full", "selective": "selective", "memory_budget": "budget"})
    if mode == "budget":
        sheet.tell(key, value, "none", 'a compiler chooses what to keep there; here shard.memory with "auto" does')
    if mode != "selective":
        sheet.tell(option_key, option, "always", f"not looked at with mode = {value}")
        if mode in ("none", "full"):
            sheet.put(ours, mode, key, value)
        return
    if option == "op":
        sheet.put(ours, "selective", key, value)
        sheet.tell(option_key, option, "set", "", f'{ours} = "selective"')
        return
    every = values.positive(option)
    if every == 1:
        sheet.put(ours, "full", option_key, option)
    elif 10 % every == 0:
        # Counted from 1 there: of 0, 1, 2, ... every second is 1, 3, 5, ..., told by its last digit.
        digits = "".join(str(digit) for digit in range(every - 1, 10, every))
        sheet.put(ours, {f"*[{digits}]": "full"}, option_key, option)
    else:
        note = f"every {every}th block there; here what is dear to recompute is kept of each"
        sheet.put(ours, "selective", option_key, option, "near", note)
    sheet.tell(key, value, "set", "", f"{ours}, by {option_key}")


def _compile(sheet: Sheet, key: str, value: Any) -> None:
    parts = sheet.get("compile.components") or []
    if not values.boolean(value):
        sheet.tell(key, value, "always", "not asked for")
    elif "model" in parts:
        sheet.put("shard.compile", True, key, value)
    else:
        sheet.tell(key, value, "none", "shard.compile compiles blocks; other components are not compiled")


def _checkpoints(sheet: Sheet, key: str, value: Any) -> None:
    if values.boolean(value):
        sheet.tell(key, value, "always", "checkpoints are always written")
    else:
        sheet.tell(key, value, "none", "checkpoints are always written: a run resumes; train.keep says how many stay")


def _interval(sheet: Sheet, key: str, value: Any) -> None:
    sheet.put("train.checkpoint_every", values.positive(value), key, value)


def _keep(sheet: Sheet, key: str, value: Any) -> None:
    if values.integer(value) == 0:
        sheet.tell(key, value, "near", "all stay there; here at most train.keep")
        sheet.ask("train.keep", "100", "how many checkpoints stay; all do there")
    else:
        sheet.put("train.keep", values.positive(value), key, value)


def _initial(sheet: Sheet, key: str, value: Any) -> None:
    if not value:
        sheet.tell(key, value, "always", "not asked for")
    elif values.boolean(sheet.get("checkpoint.initial_load_in_hf")):
        sheet.put("model.path", values.text(value), key, value)
    else:
        sheet.tell(key, value, "none", "its own format; convert it to a Hugging Face directory, and set model.path")


def _assets(sheet: Sheet, key: str, value: Any) -> None:
    if value:
        path = values.text(value).removesuffix("/tokenizer.model").removesuffix("/original")
        sheet.put("tokenizer.path", path, key, value)
    else:
        sheet.tell(key, value, "always", "not given")


def _validation(sheet: Sheet, key: str, value: Any) -> None:
    if not values.boolean(value):
        sheet.tell(key, value, "always", "not asked for")
        return
    sheet.put("evaluation.every", values.positive(sheet.get("validation.freq")), key, value)
    if sheet.get("validation.dataset_path"):
        sheet.put("evaluation.path", values.text(sheet.get("validation.dataset_path")), key, value)
    else:
        sheet.ask("evaluation.path", '"path/to/validation"', f"there {sheet.get('validation.dataset')}")
    steps = values.integer(sheet.get("validation.steps"))
    if steps > 0 and sheet.ranks:
        each = values.positive(sheet.get("validation.local_batch_size"))
        sheet.put("evaluation.samples", steps * each * sheet.ranks, key, value)
    elif steps > 0:
        sheet.ask("evaluation.samples", "100", f"{steps} × validation.local_batch_size × ranks; --ranks works it out")


def _of_validation(sheet: Sheet, key: str, value: Any) -> None:
    on = any(values.boolean(sheet.get(f"validation.{each}") or False) for each in ("enable", "enabled"))
    sheet.tell(key, value, "set" if on else "always", "" if on else "not asked for", "[evaluation]" if on else "")


def _trackers(sheet: Sheet, key: str, value: Any) -> None:
    known = ("tensorboard", "wandb")
    chosen = [each for each in known if values.boolean(sheet.get(f"metrics.enable_{each}") or False)]
    if values.boolean(value):
        sheet.put("log.to", chosen, key, value)
    else:
        sheet.tell(key, value, "always", "not asked for")


def _ranks(sheet: Sheet, key: str, value: Any) -> None:
    count = values.integer(value)
    if count > 1:
        sheet.ranks = sheet.ranks or count * values.positive(sheet.get("parallelism.data_parallel_replicate_degree"))
    sheet.tell(
        key, value, "command" if count > 1 else "always", "--nproc" if count > 1 else "as many as there are ranks"
    )


def _finish(sheet: Sheet) -> None:
    flavor = f"{sheet.get('model.name')} {sheet.get('model.flavor')}"
    if "model.path" not in sheet.tree:
        place = toml_value(sheet.tree.get("tokenizer.path", "path/to/model"))
        sheet.ask("model.config", place, f"a directory with the config.json of {flavor}; with weights: model.path")
    older = "training.batch_size" in sheet.given
    per_rank = "training.batch_size" if older else "training.local_batch_size"
    ways = math.prod(values.positive(sheet.get(f"parallelism.{each}_parallel_degree") or 1) for each in OTHER_WAYS)
    if ways > 1:
        _fewer_readers(sheet, per_rank, ways)
        return
    batch(sheet, per_rank, total="training.global_batch_size")


def _fewer_readers(sheet: Sheet, per_rank: str, ways: int) -> None:
    """There, `ways` ranks share what one reads. The batch of a step stays; here every rank reads its own part of it."""
    key, each = "training.global_batch_size", values.positive(sheet.get(per_rank))
    total = count(sheet, key)
    if total is None and sheet.ranks is not None:
        total = each * sheet.ranks // ways
    if total is None or sheet.ranks is None or total % sheet.ranks:
        readers = f"{sheet.ranks or ''} ranks / {ways}".strip()
        sheet.ask("train.batch_size", str(total or each), f"{each} × {readers} there; a multiple of the ranks here")
        sheet.tell(per_rank, each, "none", f"{ways} ranks share a batch there; set train.batch_size")
        sheet.tell(key, sheet.get(key), "always", f"with {per_rank}")
        return
    of_rank = total // sheet.ranks
    pieces = next(number for number in range(1, of_rank + 1) if of_rank % number == 0 and of_rank // number <= each)
    sheet.put("train.batch_size", total, key, sheet.get(key))
    sheet.put("train.accumulate", pieces, per_rank, each, "near", f"{ways} ranks share a batch there; the whole stays")
    sheet.origins["train.batch_size"] = f"{total} of all ranks, as there"
    sheet.tell(key, sheet.get(key), "set", "as there", f"train.batch_size = {total}")


RULES = (
    sets("job.dump_folder", "run.dir", values.text, "the same", "./outputs"),
    none(
        "model.name model.flavor", "models are Hugging Face directories; set model.path, or model.config from scratch"
    ),
    by(
        "model.hf_assets_path model.tokenizer_path", "tokenizer.path", "the directory; model.path is asked for", _assets
    ),
    by(
        "optimizer.name",
        "optimizer.class",
        "torch's by import path; no_decay = []: decay on all parameters, as there",
        _optimizer,
        "AdamW",
    ),
    sets("optimizer.lr", "optimizer.lr", values.number, "the same", 8e-4),
    by("optimizer.beta1", "optimizer.betas", "the same", _betas, 0.9),
    by("optimizer.beta2", "optimizer.betas", "the same", _betas, 0.95),
    sets("optimizer.eps", "optimizer.arguments.eps", values.number, "the same"),
    sets("optimizer.weight_decay", "optimizer.weight_decay", values.number, "the same", 0.1),
    always(
        "optimizer.implementation",
        "steps run on local shards, which is fast in each; add optimizer.arguments.fused for CUDA's kernel",
    ),
    none(
        "optimizer.early_step_in_backward",
        "steps come after the whole backward, so that norms can be clipped",
        off=[False],
    ),
    sets("lr_scheduler.warmup_steps", "schedule.warmup_steps", values.integer, "the same", 200),
    by(
        "lr_scheduler.decay_type",
        "schedule.decay",
        "linear, cosine: the same; sqrt, and any with decay_ratio: wsd",
        _decay,
        "linear",
    ),
    by(
        "lr_scheduler.decay_ratio",
        "schedule.decay_steps",
        "a share of the steps becomes a number; the fall is 1 - √x",
        _ratio,
        None,
    ),
    sets("lr_scheduler.min_lr_factor lr_scheduler.lr_min", "schedule.final", values.number, "the same", 0.0),
    none("lr_scheduler.total_steps", "the schedule ends with train.steps"),
    by("training.dataset", "data.path", "c4: its name on the hub, streamed; others: set data.path", _data, "c4_test"),
    by("training.dataset_path", "data.path", "the same", _data),
    by(
        "training.local_batch_size training.batch_size",
        "train.batch_size",
        "× ranks; with global_batch_size: train.accumulate",
        later,
        8,
    ),
    by("training.global_batch_size", "train.batch_size", "the same; absent or -1: local_batch_size × ranks", later, -1),
    sets("training.seq_len", "train.sequence_length", values.positive, "the same", 2048),
    sets("training.max_norm", "train.max_grad_norm", values.number, "the same", 1.0),
    sets("training.steps", "train.steps", values.positive, "the same", 10000),
    words("training.enable_cpu_offload", "shard.offload", fsdp.OFFLOAD, "true: `cpu`"),
    words("training.dtype", "model.dtype", {"float32": "float32", "bfloat16": "bfloat16"}, "the same"),
    words(
        "training.mixed_precision_param",
        "shard.mixed_precision",
        {"bfloat16": "bf16", "float32": None},
        "bfloat16: `bf16`; float32: nothing to set",
        "bfloat16",
    ),
    always("training.mixed_precision_reduce", "gradients are reduced in float32"),
    words("training.compile", "shard.compile", {"true": True, "false": None}, "older spelling of compile.enable"),
    sets("training.seed debug.seed", "train.seed", values.integer, "the same word, another random order"),
    none(
        "training.deterministic debug.deterministic debug.deterministic_warn_only",
        "torch.use_deterministic_algorithms decides it; the order of samples is fixed anyway",
        off=[False],
    ),
    by("parallelism.data_parallel_shard_degree", "--nproc", "as many as there are ranks", _ranks, -1),
    sets("parallelism.data_parallel_replicate_degree", "shard.replicate", values.positive, "the same", 1),
    words(
        "parallelism.fsdp_reshard_after_forward training.fsdp_reshard_after_forward",
        "shard.reshard_after_forward",
        {"default": Near("default", LAST_BLOCK), "always": "always", "never": "never"},
        "the same words; default keeps the last block and the root",
    ),
    by("checkpoint.enable checkpoint.enable_checkpoint", "always so", "checkpoints are always written", _checkpoints),
    by("checkpoint.interval", "train.checkpoint_every", "the same", _interval, 500),
    by("checkpoint.keep_latest_k", "train.keep", "the same; 0: name a number", _keep, 10),
    by("checkpoint.initial_load_path", "model.path", "with initial_load_in_hf; else convert it first", _initial),
    part("checkpoint.initial_load_in_hf", "model.path", "initial_load_path is a Hugging Face directory", False),
    by(
        "activation_checkpoint.mode",
        "shard.activation_checkpointing",
        "none, full, selective: the same; memory_budget: shard.memory",
        _recompute,
        "selective",
    ),
    by(
        "activation_checkpoint.selective_ac_option",
        "shard.activation_checkpointing",
        "op: `selective`; 1, 2, 5, 10: a glob over blocks",
        lambda sheet, key, value: None,
        "2",
    ),
    by("compile.enable", "shard.compile", "true: each block is compiled", _compile),
    part(
        "compile.components",
        "shard.compile",
        "model: each block; loss: it is in chunks, and not compiled",
        ["model", "loss"],
    ),
    words(
        "compile.backend",
        "shard.compile",
        {"inductor": None, "aot_eager": Lost("inductor only"), "eager": Lost("inductor only")},
        "inductor",
    ),
    sets("metrics.log_freq", "train.log_every", values.positive, "the same", 10),
    by("metrics.enable_tensorboard metrics.enable_wandb", "log.to", "`tensorboard` and `wandb`", _trackers),
    by("validation.enable validation.enabled", "[evaluation]", "loss and perplexity", _validation),
    by("validation.freq", "evaluation.every", "the same", _of_validation, 10),
    by("validation.steps", "evaluation.samples", "× local_batch_size × ranks", _of_validation, -1),
    by("validation.local_batch_size", "evaluation.samples", "microbatches are those of training", _of_validation, 8),
    by(
        "validation.dataset",
        "evaluation.path",
        "asked for, unless dataset_path is given",
        _of_validation,
        "c4_validation",
    ),
    by("validation.dataset_path", "evaluation.path", "the same", _of_validation),
    command(
        "profiling.enable_profiling profiling.save_traces_folder profiling.profile_freq profiling.profiler_active "
        "profiling.profiler_warmup",
        "--profile",
        "the command writes one trace",
    ),
    *REST,
)

SOURCE = Source(
    name="torchtitan",
    title="TorchTitan",
    rules=RULES,
    finish=_finish,
    marks=("job", "parallelism", "lr_scheduler", "activation_checkpoint", "training"),
)
