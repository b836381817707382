"""Single keys of TorchTitan for which a rule cannot say as data what they become.

Its file means all keys: those that are absent have TorchTitan's defaults. Its models are its own; here a model is a
Hugging Face directory, so that path is asked for.
"""

from __future__ import annotations

from typing import Any

from trueshard.convert.engine import Draft, Wrong, boolean, integer, number, positive, text
from trueshard.convert.shared import batch, count, recompute
from trueshard.train.parse import toml_value


def decay_type(draft: Draft, key: str, value: Any) -> None:
    """Read `decay_type` with `decay_ratio`: the shape, and over which last part of the steps."""
    shape, ratio = str(value).lower(), draft.get("lr_scheduler.decay_ratio")
    draft.word(key, value)
    steps = positive(draft.get("lr_scheduler.total_steps") or draft.get("training.steps"))
    warm = integer(draft.get("lr_scheduler.warmup_steps"))
    falling = steps - warm if ratio is None else min(round(number(ratio) * steps), steps - warm)
    if falling < steps - warm or shape == "sqrt":
        note = "" if shape == "sqrt" else f"falls along 1 - √x over the last {falling} steps, there {shape}"
        draft.put("schedule.decay", "wsd", key, value, "near" if note else "set", note)
        if falling > 0:
            draft.put("schedule.decay_steps", falling, key, value)
    else:
        draft.put("schedule.decay", shape, key, value)


def share(value: Any) -> float:
    if not 0 <= number(value) <= 1:
        raise Wrong(f"found {value!r}, wanted a share from 0 to 1")
    return number(value)


def folder(value: Any) -> str:
    """Read the directory of the tokenizer, or its file there."""
    return text(value).removesuffix("/tokenizer.model").removesuffix("/original")


def selected(draft: Draft, key: str, value: Any) -> None:
    """Read `selective_ac_option`: "op", or every so many blocks, which are counted from 1."""
    if str(value) == "op":
        draft.put("shard.activation_checkpointing", "selective", key, value)
        return
    every = positive(value)
    note = f"every {every}th block there; here what is dear to recompute is kept of each"
    recompute(draft, key, value, every, every - 1, "selective", note)


def samples(draft: Draft, key: str, value: Any) -> None:
    """Read `validation.steps` with the batch of a rank; -1: all samples."""
    steps = integer(value)
    if steps > 0 and draft.readers:
        each = positive(draft.get("validation.local_batch_size"))
        readers = draft.readers // _degree(draft, "pipeline_parallel")
        draft.put("evaluation.samples", steps * each * readers, key, value)
    elif steps > 0:
        factors = f"{steps} × validation.local_batch_size × {draft.readers_in_words}"
        draft.ask("evaluation.samples", "100", f"{factors}; --ranks works it out")
        draft.tell(key, value, "set", "which needs the number of ranks", "evaluation.samples")
    else:
        draft.tell(key, value, "always", "all samples")


def trackers(draft: Draft, key: str, value: Any) -> None:
    """Read `metrics.enable_tensorboard` and `metrics.enable_wandb` together."""
    chosen = [each for each in ("tensorboard", "wandb") if boolean(draft.get(f"metrics.enable_{each}") or False)]
    if boolean(value):
        draft.put("log.to", chosen, key, value)
    else:
        draft.tell(key, value, "always", "not asked for")


def ranks(draft: Draft, key: str, value: Any) -> None:
    """Read the number of ranks that a model is sharded over, which with the other degrees is that of all; -1: the rest.

    Ranks that share experts are some of these, and none besides.
    """
    ranks = integer(value)
    for kind in ("data_parallel_replicate", "tensor_parallel", "context_parallel", "pipeline_parallel"):
        ranks *= _degree(draft, kind)
    if ranks > 1:
        draft.ranks = draft.ranks or ranks
        product = "" if ranks == value else f" {ranks}, the product of all degrees"
        draft.tell(key, value, "command", f"--nproc{product}")
    else:
        draft.tell(key, value, "always", "as many as there are ranks")


def _degree(draft: Draft, kind: str) -> int:
    return positive(draft.get(f"parallelism.{kind}_degree") or 1)


def tensor(draft: Draft, key: str, value: Any) -> None:
    """Read `tensor_parallel_degree`; there sequences and logits are split too, unless other keys say otherwise."""
    split, whole = (draft.get(f"parallelism.{each}") for each in ("enable_sequence_parallel", "disable_loss_parallel"))
    note = "" if boolean(whole or False) else "each rank has the whole logits, there a part: the same loss, more memory"
    splits = boolean(True if split is None else split)
    ours = "shard.tensor.ranks" if splits else "shard.tensor"
    draft.put(ours, positive(value), key, value, "near" if note else "set", note)
    if splits:
        draft.put("shard.tensor.sequence", True, key, value)


def finish(draft: Draft) -> None:
    """Ask for the model, and set the batch."""
    if "model.path" not in draft.tree:
        place = toml_value(draft.tree.get("tokenizer.path", "path/to/model"))
        flavor = f"{draft.get('model.name')} {draft.get('model.flavor')}"
        draft.ask("model.config", place, f"a directory with the config.json of {flavor}; with weights: model.path")
    older = "training.batch_size" in draft.given
    per_rank = "training.batch_size" if older else "training.local_batch_size"
    if older:
        each = "training.local_batch_size"
        draft.tell(each, draft.get(each), "always", f"{per_rank} counts instead")
    if _degree(draft, "pipeline_parallel") > 1:
        _batch_of_pipelines(draft, per_rank, _degree(draft, "pipeline_parallel"))
    else:
        batch(draft, per_rank, total="training.global_batch_size")


def _batch_of_pipelines(draft: Draft, per_rank: str, stages: int) -> None:
    """Set the batch that the ranks of a pipeline share there; here each of them reads its own part of the same step."""
    key, each, readers = "training.global_batch_size", positive(draft.get(per_rank)), draft.readers
    total = count(draft, key)
    if total is None and readers is not None:
        total = each * readers // stages
    note = f"{stages} ranks share a batch there, by a pipeline"
    if total is None or readers is None or total % readers:
        there = f"{each} × {draft.readers_in_words} / {stages} there"
        draft.ask("train.batch_size", str(total or each), f"{there}; a multiple of {draft.readers_in_words} here")
        draft.tell(per_rank, each, "none", f"{note}; set train.batch_size")
        draft.tell(key, draft.get(key), "always", f"with {per_rank}")
        return
    of_rank = total // readers
    pieces = next(number for number in range(1, of_rank + 1) if of_rank % number == 0 and of_rank // number <= each)
    draft.put("train.batch_size", total, key, draft.get(key))
    draft.put("train.accumulate", pieces, per_rank, each, "near", f"{note}; the whole stays")
    draft.origins["train.batch_size"] = f"{total} of all ranks, as there"
    draft.tell(key, draft.get(key), "set", "as there", f"train.batch_size = {total}")
