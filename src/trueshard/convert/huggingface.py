"""Single arguments of transformers' `Trainer` for which a rule cannot say as data what they become.

A file with any training argument means all of them: absent ones have transformers' defaults. Model, data and sequence
length are arguments of the script, and so are asked for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Set
from typing import Any

from trueshard.convert.engine import NOT_ASKED, Draft, Wrong, boolean, integer, number, positive, table
from trueshard.convert.shared import batch, join
from trueshard.convert.shared import recompute as recompute_blocks


def prepare(tree: dict[str, Any], sections: Set[str]) -> dict[str, Any]:
    """Make `fsdp_config` a table with keys without prefix; a file of such keys alone is that table."""
    tree = tree if sections & set(tree) else {"fsdp_config": dict(tree)}
    inner = tree.get("fsdp_config")
    if isinstance(inner, str):
        raise Wrong(f"fsdp_config is a path, {inner!r}; put that file's content in its place")
    tree = {"eval_strategy" if key == "evaluation_strategy" else key: value for key, value in tree.items()}
    if isinstance(inner, dict):
        tree["fsdp_config"] = {key.removeprefix("fsdp_"): value for key, value in inner.items()}
    return tree


def fsdp(draft: Draft, key: str, value: Any) -> None:
    """Read `fsdp`: true, or words as "full_shard auto_wrap offload"."""
    if value in (None, False, "", []):
        draft.put("shard.reshard_after_forward", "never", key)
        draft.replicate("ranks", key, value)
        return
    if value is True or str(value).lower() == "true":
        draft.tell(key, "always", "fsdp_config says how")
        return
    for word in value if isinstance(value, list) else str(value).replace(",", " ").split():
        strategy = "shard.reshard_after_forward" in draft.word(key, word).sets
        if strategy and "fsdp_config.reshard_after_forward" in draft.given:
            draft.tell(key, "always", "fsdp_config.reshard_after_forward counts instead", value=word)
        else:
            draft.put_word(key, word)


def warmup(draft: Draft, key: str, value: Any) -> None:
    """Read `warmup_steps`, a number or a share of the steps; or `warmup_ratio`, as it was called."""
    ratio, kind = number(value or 0), str(draft.get("lr_scheduler_type", draft.get("lr_scheduler"))).lower()
    if ratio and kind in ("constant", "reduce_lr_on_plateau"):
        draft.tell(key, "none", f"{kind} has no warm-up, there either")
    elif key == "warmup_ratio" and (draft.get("warmup_steps") or not ratio):
        draft.tell(key, "always", "warmup_steps counts instead" if ratio else "no warm-up by ratio")
    elif key == "warmup_steps" and not ratio and draft.given.get("warmup_ratio"):
        draft.tell(key, "always", "warmup_ratio counts instead")
    else:
        in_steps(draft, "schedule.warmup_steps", key, ratio)


def every(draft: Draft, key: str, value: Any) -> None:
    """Read `logging_steps`, `eval_steps` or `save_steps`; `eval_steps` that are not given are `logging_steps`."""
    steps = draft.get("logging_steps") if value is None and key == "eval_steps" else value
    in_steps(draft, draft.rules[key].becomes, key, number(steps))


def in_steps(draft: Draft, ours: str, key: str, steps: float) -> None:
    """Set a number of steps; below 1 it is a share of all steps."""
    of_all = integer(draft.get("max_steps", -1))
    if steps >= 1 or not steps:
        draft.put(ours, integer(steps), key)
    elif of_all > 0:
        draft.put(ours, math.ceil(steps * of_all), key, f"of {of_all} steps")
    else:
        draft.tell(key, "none", f"a share of steps that are not known yet; set {ours}")
        draft.ask(ours, "100", f"{steps:.4g} of all steps")


def schedule(draft: Draft, key: str, value: Any) -> None:
    """Read the kind of a schedule with its keyword arguments."""
    kind, kwargs = str(value).lower(), "lr_scheduler_kwargs"
    word, more = draft.word(key, value), table(draft.get(kwargs))
    decay, note = word.sets.get("schedule.decay"), ""
    if decay is None:
        draft.put_word(key, value)
        if more and not word.none:
            draft.put("schedule.arguments", more, kwargs)
        else:
            draft.tell(kwargs, "none" if more else "always", f"part of {kind}", value=more)
        return
    least = next((number(draft.get(name)) for name in draft.rules[key].beside if draft.get(name) is not None), None)
    final = _final(draft, kind, more) if least is None else least
    if kind == "polynomial" and number(more.pop("power", 1.0)) != 1:
        note = "falls in a line; a power has no equivalent"
    if kind == "warmup_stable_decay":
        if more.pop("decay_type", "cosine") != "1-sqrt":
            note = "falls along 1 - √x"
        if "num_decay_steps" in more:
            draft.put("schedule.decay_steps", positive(more["num_decay_steps"]), key)
        more.pop("num_stable_steps", None)
    draft.put("schedule.decay", decay, key, differs=note)
    if decay != "constant":
        draft.put("schedule.final", round(final, 12), key)
    lost = {name: more[name] for name in more if not re.fullmatch("num_(decay|warmup|training)_steps", name)}
    if lost:
        draft.tell(kwargs, "none", "no equivalent in [schedule]", value=lost)
    else:
        draft.tell(kwargs, "always", f"part of {kind}")


def _final(draft: Draft, kind: str, more: dict[str, Any]) -> float:
    """Take the last learning rate / the peak out of the scheduler's arguments."""
    lr = number(draft.get("learning_rate"))
    for name in ("min_lr_rate", "min_lr", "min_lr_ratio"):
        if name in more and (name != "min_lr" or lr):
            return number(more.pop(name)) / (lr if name == "min_lr" else 1)
    return number(more.pop("lr_end", 1e-7)) / lr if kind == "polynomial" and lr else 0.0


def of_adam(draft: Draft, key: str, value: Any) -> None:
    """Read betas, or eps, which only Adam and its kin have."""
    if not draft.tree.get("optimizer.class", "Adam").endswith(("Adam", "AdamW")):
        draft.tell(key, "always", "not looked at with another optimizer")
    elif draft.rules[key].beside:
        join(draft, key, value)
    else:
        draft.put(draft.rules[key].becomes, number(value), key)


def recompute(draft: Draft, key: str, value: Any) -> None:
    """Read `activation_checkpointing`, or `gradient_checkpointing` as it was called, with its keyword arguments."""
    nth = positive(draft.get(f"{key}_kwargs.every_n_layers", 1))
    if boolean(value or False):
        recompute_blocks(draft, key, nth, 0, "full", f"every block, there each {nth}th")
    else:
        draft.tell(key, *NOT_ASKED)


def evaluation(draft: Draft) -> None:
    """Set when to evaluate, if that is asked for and `eval_steps` does not say it."""
    key = "logging_steps"
    if str(draft.get("eval_strategy")).lower() == "steps" and draft.get("eval_steps") is None and draft.defaults:
        in_steps(draft, "evaluation.every", key, number(draft.get(key)))


def finish(draft: Draft) -> None:
    evaluation(draft)
    if draft.defaults:
        batch(draft, "per_device_train_batch_size", "gradient_accumulation_steps")
    else:
        batch(draft)
    draft.ask("train.sequence_length", "1024", "tokens a sequence, as your script has it")
