"""Single keys of TorchTitan for which a rule cannot say as data what they become.

Its file means all keys: those that are absent have TorchTitan's defaults. Its models are its own; here a model is a
Hugging Face directory, so that path is asked for.
"""

from __future__ import annotations

from typing import Any

from trueshard.convert.engine import NOT_ASKED, Draft, boolean, checked, integer, number, positive, text
from trueshard.convert.shared import NEEDS_RANKS, batch, count, pieces, recompute
from trueshard.train.parse import toml_value


def decay_type(draft: Draft, key: str, value: Any) -> None:
    """Read `decay_type` with `decay_ratio`: the shape, and over which last part of the steps."""
    shape, ratio = str(value).lower(), draft.get("lr_scheduler.decay_ratio")
    draft.word(key, value)
    steps = positive(draft.get("lr_scheduler.total_steps") or draft.get("training.steps"))
    after_warmup = steps - integer(draft.get("lr_scheduler.warmup_steps"))
    falling = after_warmup if ratio is None else min(round(number(ratio) * steps), after_warmup)
    if falling == after_warmup and shape != "sqrt":
        draft.put("schedule.decay", shape, key)
        return
    note = "" if shape == "sqrt" else f"falls along 1 - √x over the last {falling} steps, there {shape}"
    draft.put("schedule.decay", "wsd", key, differs=note)
    if falling > 0:
        draft.put("schedule.decay_steps", falling, key)


def share(value: Any) -> float:
    return checked(number(value), 0 <= number(value) <= 1, value, "a share from 0 to 1")


def folder(value: Any) -> str:
    """Read the directory of the tokenizer, or its file there."""
    return text(value).removesuffix("/tokenizer.model").removesuffix("/original")


def selected(draft: Draft, key: str, value: Any) -> None:
    """Read `selective_ac_option`: "op", or every so many blocks, which are counted from 1."""
    if str(value) == "op":
        draft.put("shard.activation_checkpointing", "selective", key)
        return
    every = positive(value)
    note = f"every {every}th block there; here what is dear to recompute is kept of each"
    recompute(draft, key, every, every - 1, "selective", note)


def samples(draft: Draft, key: str, value: Any) -> None:
    """Read `validation.steps` with the batch of a rank; -1: all samples."""
    steps = integer(value)
    if steps > 0 and draft.readers:
        of_rank = positive(draft.get("validation.local_batch_size"))
        readers = draft.readers // _degree(draft, "pipeline_parallel")
        draft.put("evaluation.samples", steps * of_rank * readers, key)
    elif steps > 0:
        factors = f"{steps} × validation.local_batch_size × {draft.readers_in_words}"
        draft.ask("evaluation.samples", "100", f"{factors}; --ranks works it out")
        draft.tell(key, "set", NEEDS_RANKS, "evaluation.samples")
    else:
        draft.tell(key, "always", "all samples")


def trackers(draft: Draft, key: str, value: Any) -> None:
    """Read `metrics.enable_tensorboard` and `metrics.enable_wandb` together."""
    chosen = [name for name in ("tensorboard", "wandb") if boolean(draft.get(f"metrics.enable_{name}") or False)]
    if boolean(value):
        draft.put("log.to", chosen, key)
    else:
        draft.tell(key, *NOT_ASKED)


def ranks(draft: Draft, key: str, value: Any) -> None:
    """Read the number of ranks that a model is sharded over, which with the other degrees is that of all; -1: the rest.

    Ranks that share experts are some of these, and none besides.
    """
    ranks = integer(value)
    for kind in ("data_parallel_replicate", "tensor_parallel", "context_parallel", "pipeline_parallel"):
        ranks *= _degree(draft, kind)
    if ranks > 1:
        draft.ranks = draft.ranks or ranks
        draft.tell(key, "command", "--nproc" if ranks == value else f"--nproc {ranks}, the product of all degrees")
    else:
        draft.tell(key, "always", "as many as there are ranks")


def _degree(draft: Draft, kind: str) -> int:
    return positive(draft.get(f"parallelism.{kind}_degree") or 1)


def tensor(draft: Draft, key: str, value: Any) -> None:
    """Read `tensor_parallel_degree`; there sequences and logits are split too, unless other keys say otherwise."""
    note = "each rank has the whole logits, there a part: the same loss, more memory"
    differs = "" if boolean(draft.get("parallelism.disable_loss_parallel", False)) else note
    if boolean(draft.get("parallelism.enable_sequence_parallel", True)):
        draft.put("shard.tensor.ranks", positive(value), key, differs=differs)
        draft.put("shard.tensor.sequence", True, key)
    else:
        draft.put("shard.tensor", positive(value), key, differs=differs)


def finish(draft: Draft) -> None:
    """Ask for the model, and set the batch."""
    if "model.path" not in draft.tree:
        place = toml_value(draft.tree.get("tokenizer.path", "path/to/model"))
        flavor = f"{draft.get('model.name')} {draft.get('model.flavor')}"
        draft.ask("model.config", place, f"a directory with the config.json of {flavor}; with weights: model.path")
    per_rank = "training.local_batch_size"
    if (older := "training.batch_size") in draft.given:
        draft.tell(per_rank, "always", f"{older} counts instead")
        per_rank = older
    if _degree(draft, "pipeline_parallel") > 1:
        _batch_of_pipelines(draft, per_rank, _degree(draft, "pipeline_parallel"))
    else:
        batch(draft, per_rank, total="training.global_batch_size")


def _batch_of_pipelines(draft: Draft, per_rank: str, stages: int) -> None:
    """Set the batch that the ranks of a pipeline share there; here each of them reads its own part of the same step."""
    key, most, readers = "training.global_batch_size", positive(draft.get(per_rank)), draft.readers
    total = count(draft, key)
    if total is None and readers is not None:
        total = most * readers // stages
    note = f"{stages} ranks share a batch there, by a pipeline"
    if not total or readers is None or total % readers:
        there = f"{most} × {draft.readers_in_words} / {stages} there"
        draft.ask("train.batch_size", str(total or most), f"{there}; a multiple of {draft.readers_in_words} here")
        draft.tell(per_rank, "none", f"{note}; set train.batch_size", value=most)
        draft.tell(key, "always", f"with {per_rank}")
        return
    draft.put("train.batch_size", total, key)
    accumulate = pieces(total // readers, most)
    draft.put("train.accumulate", accumulate, per_rank, differs=f"{note}; the whole stays", given=most)
    draft.origins["train.batch_size"] = f"{total} of all ranks, as there"
    draft.tell(key, "set", "as there", f"train.batch_size = {total}")
