"""What single keys of TorchTitan become, where a rule cannot say it as data.

Its file means all keys: those that are absent have TorchTitan's defaults. Its models are its own; here a model is a
Hugging Face directory, so that path is asked for.
"""

from __future__ import annotations

import math
from typing import Any

from trueshard.convert.engine import Draft, Wrong, boolean, integer, number, positive, text
from trueshard.convert.shared import batch, count
from trueshard.train.parse import toml_value


def betas(draft: Draft, key: str, value: Any) -> None:
    """Join beta1 and beta2."""
    pair = [number(draft.get("optimizer.beta1")), number(draft.get("optimizer.beta2"))]
    draft.put("optimizer.betas", pair, key, value)


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


def decay_ratio(draft: Draft, key: str, value: Any) -> None:
    """Check a share of the steps, which `decay_type` reads."""
    if value is not None and not 0 <= number(value) <= 1:
        raise Wrong(f"found {value!r}, wanted a share from 0 to 1")
    draft.tell(key, value, "set", "", "schedule.decay and schedule.decay_steps")


def recompute(draft: Draft, key: str, value: Any) -> None:
    """Read `activation_checkpoint.mode` with `selective_ac_option`: "op", or every so many blocks."""
    ours, option_key = "shard.activation_checkpointing", "activation_checkpoint.selective_ac_option"
    option = str(draft.get(option_key))
    if str(value).lower() != "selective":
        draft.tell(option_key, option, "always", f"not looked at with mode = {value}")
        draft.put_word(key, value)
        return
    if option == "op":
        draft.put_word(key, value)
        draft.tell(option_key, option, "set", "", f'{ours} = "selective"')
        return
    every = positive(option)
    if every == 1:
        draft.put(ours, "full", option_key, option)
    elif 10 % every == 0:
        # TorchTitan counts from 1: of blocks 0, 1, 2, ... every second is 1, 3, 5, ..., told by its last digit.
        digits = "".join(str(digit) for digit in range(every - 1, 10, every))
        draft.put(ours, {f"*[{digits}]": "full"}, option_key, option)
    else:
        note = f"every {every}th block there; here what is dear to recompute is kept of each"
        draft.put(ours, "selective", option_key, option, "near", note)
    draft.tell(key, value, "set", "", f"{ours}, by {option_key}")


def compiled(draft: Draft, key: str, value: Any) -> None:
    """Read `compile.enable` with `compile.components`."""
    if not boolean(value):
        draft.tell(key, value, "always", "not asked for")
    elif "model" in (draft.get("compile.components") or []):
        draft.put("shard.compile", True, key, value)
    else:
        draft.tell(key, value, "none", "shard.compile compiles blocks; other components are not compiled")


def initial_load_path(draft: Draft, key: str, value: Any) -> None:
    """Read the weights to begin with, which are a Hugging Face directory with `initial_load_in_hf`."""
    if not value:
        draft.tell(key, value, "always", "not asked for")
    elif boolean(draft.get("checkpoint.initial_load_in_hf")):
        draft.put("model.path", text(value), key, value)
    else:
        draft.tell(key, value, "none", "its own format; convert it to a Hugging Face directory, and set model.path")


def assets(draft: Draft, key: str, value: Any) -> None:
    """Read the directory of the tokenizer, or its file there."""
    if value:
        path = text(value).removesuffix("/tokenizer.model").removesuffix("/original")
        draft.put("tokenizer.path", path, key, value)
    else:
        draft.tell(key, value, "always", "not given")


def validation(draft: Draft, key: str, value: Any) -> None:
    """Read `validation.enable` with the other keys of its section."""
    if not boolean(value):
        draft.tell(key, value, "always", "not asked for")
        return
    draft.put("evaluation.every", positive(draft.get("validation.freq")), key, value)
    if draft.get("validation.dataset_path"):
        draft.put("evaluation.path", text(draft.get("validation.dataset_path")), key, value)
    else:
        draft.ask("evaluation.path", '"path/to/validation"', f"there {draft.get('validation.dataset')}")
    steps = integer(draft.get("validation.steps"))
    if steps > 0 and draft.ranks:
        each = positive(draft.get("validation.local_batch_size"))
        draft.put("evaluation.samples", steps * each * draft.ranks, key, value)
    elif steps > 0:
        draft.ask("evaluation.samples", "100", f"{steps} × validation.local_batch_size × ranks; --ranks works it out")


def trackers(draft: Draft, key: str, value: Any) -> None:
    """Read `metrics.enable_tensorboard` and `metrics.enable_wandb` together."""
    chosen = [each for each in ("tensorboard", "wandb") if boolean(draft.get(f"metrics.enable_{each}") or False)]
    if boolean(value):
        draft.put("log.to", chosen, key, value)
    else:
        draft.tell(key, value, "always", "not asked for")


def ranks(draft: Draft, key: str, value: Any) -> None:
    """Read the number of ranks that a model is sharded over; -1: all there are."""
    degree = integer(value)
    if degree > 1:
        draft.ranks = draft.ranks or degree * positive(draft.get("parallelism.data_parallel_replicate_degree"))
        draft.tell(key, value, "command", "--nproc")
    else:
        draft.tell(key, value, "always", "as many as there are ranks")


def fault_tolerance(draft: Draft, key: str, value: Any) -> None:
    """Report [fault_tolerance], which takes effect if it is enabled."""
    used = isinstance(value, dict) and value.get("enable", False)
    why = draft.rules[key].why
    draft.tell(key, value, "none" if used else "always", why if used else "not asked for")


def finish(draft: Draft) -> None:
    """Ask for the model, and set the batch; ranks that share a matrix, a sequence or a pipeline share a batch there."""
    if "model.path" not in draft.tree:
        place = toml_value(draft.tree.get("tokenizer.path", "path/to/model"))
        flavor = f"{draft.get('model.name')} {draft.get('model.flavor')}"
        draft.ask("model.config", place, f"a directory with the config.json of {flavor}; with weights: model.path")
    older = "training.batch_size" in draft.given
    per_rank = "training.batch_size" if older else "training.local_batch_size"
    degrees = [f"parallelism.{each}_parallel_degree" for each in ("tensor", "context", "pipeline")]
    ways = math.prod(positive(draft.get(each) or 1) for each in degrees)
    if ways > 1:
        _shared_batch(draft, per_rank, ways)
    else:
        batch(draft, per_rank, total="training.global_batch_size")


def _shared_batch(draft: Draft, per_rank: str, ways: int) -> None:
    """Set the batch where `ways` ranks share one there; here every rank reads its own part of the same step."""
    key, each = "training.global_batch_size", positive(draft.get(per_rank))
    total = count(draft, key)
    if total is None and draft.ranks is not None:
        total = each * draft.ranks // ways
    if total is None or draft.ranks is None or total % draft.ranks:
        readers = f"{draft.ranks or ''} ranks / {ways}".strip()
        draft.ask("train.batch_size", str(total or each), f"{each} × {readers} there; a multiple of the ranks here")
        draft.tell(per_rank, each, "none", f"{ways} ranks share a batch there; set train.batch_size")
        draft.tell(key, draft.get(key), "always", f"with {per_rank}")
        return
    of_rank = total // draft.ranks
    pieces = next(number for number in range(1, of_rank + 1) if of_rank % number == 0 and of_rank // number <= each)
    draft.put("train.batch_size", total, key, draft.get(key))
    draft.put("train.accumulate", pieces, per_rank, each, "near", f"{ways} ranks share a batch there; the whole stays")
    draft.origins["train.batch_size"] = f"{total} of all ranks, as there"
    draft.tell(key, draft.get(key), "set", "as there", f"train.batch_size = {total}")
