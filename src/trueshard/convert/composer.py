"""Single keys of Composer's `Trainer`, and of llm-foundry's YAML around it, for which data cannot say what they become.

Defaults are not assumed: such a file names what matters, and most keys are made by other tools.
"""

from __future__ import annotations

import math
import re
from collections.abc import Set
from typing import Any

from trueshard.convert.engine import NOT_ASKED, Draft, Wrong, number, positive, table, text
from trueshard.convert.shared import REDUCED, batch, count, followed, mixed_precision_policy


def prepare(tree: dict[str, Any], sections: Set[str]) -> dict[str, Any]:
    """Follow references, and put `parallelism_config` around a file of its tables, or of the keys of its `fsdp`."""
    tree = followed(tree, tree)
    for key in ("optimizer", "scheduler"):
        if {key, f"{key}s"} <= set(tree):
            raise Wrong(f"{key} and {key}s are the same; keep one")
        if (settings := tree.pop(f"{key}s", tree.get(key))) is not None:
            tree[key] = _named(key, settings)
    if isinstance(tree.get("tokenizer"), str):
        tree["tokenizer"] = {"name": tree["tokenizer"]}
    if set(tree) <= {"fsdp", "fsdp2", "tp"}:
        return {"parallelism_config": tree}
    return tree if sections & set(tree) else {"parallelism_config": {"fsdp": tree}}


def _named(key: str, value: Any) -> dict[str, Any]:
    """Return the settings of `{NAME: {...}}` with the name among them, as in `{name: NAME, ...}`."""
    if not isinstance(value, dict):
        raise Wrong(f"{key}: found {value!r}, wanted a table with a name; give it one")
    inner = next(iter(value.values())) if len(value) == 1 else None
    return {"name": next(iter(value)), **inner} if isinstance(inner, dict) else value


# Times: a number with a unit, such as "100ba".

TIME = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*(ba|ep|tok|sp|dur|iter|sec)", re.IGNORECASE)


def _time(value: Any) -> tuple[float, str]:
    """Split a time into its number and its unit; a bare number counts epochs."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value), "ep"
    match = TIME.fullmatch(str(value).strip().replace("_", ""))
    if not match:
        raise Wrong(f'found {value!r}, wanted a time such as "1000ba", "1ep" or "2e9tok"')
    return float(match[1]), match[2].lower()


def _samples(draft: Draft) -> int | None:
    """Return the sequences of a step over all ranks; None: unknown."""
    of_device, of_all = draft.get("device_train_batch_size"), draft.get("global_train_batch_size")
    if of_all is not None:
        return positive(of_all)
    return positive(of_device) * draft.readers if of_device is not None and draft.readers else None


def _steps(draft: Draft, value: Any) -> int | None:
    """Return a time in steps; None: unknown."""
    number, unit = _time(value)
    if unit in ("ba", "iter"):
        return math.ceil(number)
    samples, length, duration = _samples(draft), draft.get("max_seq_len"), draft.get("max_duration")
    if unit == "sp" and samples:
        return math.ceil(number / samples)
    if unit == "tok" and samples and length:
        return math.ceil(number / (samples * positive(length)))
    if unit == "dur" and duration is not None and _time(duration)[1] != "dur":
        steps = _steps(draft, duration)
        return math.ceil(number * steps) if steps else None
    return None


def duration(draft: Draft, key: str, value: Any) -> None:
    (number, unit), steps = _time(value), _steps(draft, value)
    if unit == "ep":
        draft.put("train.epochs", number, key)
    elif steps:
        draft.put("train.steps", steps, key)
    else:
        draft.tell(key, "none", "how many steps that is depends on batch and sequence; set train.steps")
        draft.ask("train.steps", "1000", f"there {value}")


def interval(draft: Draft, key: str, value: Any) -> None:
    """Read an interval, or the length of a warm-up, as steps."""
    ours, steps = draft.rules[key].becomes, _steps(draft, value)
    if steps or (steps == 0 and key == "scheduler.t_warmup"):
        draft.put(ours, steps, key)
    else:
        draft.tell(key, "none", f"told in steps here; set {ours}")
        draft.ask(ours, "100", f"in steps; there {value}")


def mixed_precision(draft: Draft, key: str, value: Any) -> None:
    """Read FSDP's `mixed_precision` with the Trainer's `precision`."""
    word = str(value).upper()
    if isinstance(value, dict):
        mixed_precision_policy(draft, key, value)
        return
    draft.word(key, value)
    if word == "FULL":
        draft.tell(key, "always", "computed as stored")
    elif draft.get("precision") is None:
        draft.tell(key, "none", "of what, the Trainer's precision says; set shard.mixed_precision")
        draft.ask("shard.mixed_precision", '"bf16"', "the Trainer's precision")
    elif word == "PURE":
        draft.tell(key, "near", REDUCED, "shard.mixed_precision, by precision")
    else:
        draft.tell(key, "set", "reduced in float32, as there", "shard.mixed_precision, by precision")


def precision(draft: Draft, key: str, value: Any) -> None:
    """Read the Trainer's `precision`, unless FSDP's `mixed_precision` is FULL."""
    draft.word(key, value)
    if any(str(draft.given[other]).upper() == "FULL" for other in draft.given if other.endswith(".mixed_precision")):
        draft.tell(key, "always", "computed as stored")
    else:
        draft.put_word(key, value)


def compiled(draft: Draft, key: str, value: Any) -> None:
    """Read `compile_config`: any table means to compile, an empty one too."""
    if value is None:
        draft.tell(key, *NOT_ASKED)
        return
    draft.put("shard.compile", True, key, differs="each block, by inductor" if table(value) else "")


def decay(draft: Draft, key: str, value: Any) -> None:
    """Read `weight_decay`: decoupled_adamw takes it · lr / peak, torch takes it · lr."""
    decoupled, lr = str(draft.get("optimizer.name")).lower() == "decoupled_adamw", number(draft.get("optimizer.lr"))
    weight = number(value if key in draft.given else 1e-5 if decoupled else 1e-2)
    if decoupled and lr:
        draft.put("optimizer.weight_decay", round(weight / lr, 12), key, "/ lr", given=weight)
    else:
        draft.put("optimizer.weight_decay", weight, key, given=weight)


def model(draft: Draft, key: str, value: Any) -> None:
    """Read llm-foundry's `model`: one of transformers by its path, or one of its own."""
    path = value.get("pretrained_model_name_or_path") if isinstance(value, dict) else None
    if path:
        ours = "model.path" if value.get("pretrained", True) else "model.config"
        draft.put(ours, text(path), key, "a directory on this machine", given=path)
    else:
        draft.tell(key, "none", "models are Hugging Face directories; set model.path, or model.architecture")


def finish(draft: Draft) -> None:
    """Set the batch from that of all ranks or of one, and `train.accumulate` from the microbatch."""
    total, per_rank, micro = "global_train_batch_size", "device_train_batch_size", "device_train_microbatch_size"
    if str(draft.get(micro)).lower() == "auto":
        draft.put("train.on_oom", "tighten", micro)
        micro = ""
    if total in draft.given:
        batch(draft, micro, total=total)
        draft.tell(per_rank, "always", f"{total} says it")
        return
    if micro in draft.given:
        of_rank, part = count(draft, per_rank), positive(draft.get(micro))
        if of_rank is None:
            draft.ask("train.accumulate", "1", f"a rank's part of the batch / {part}")
            draft.tell(micro, "set", "which needs the batch of a rank", "train.accumulate", part)
        elif of_rank % part:
            raise Wrong(f"{micro} = {part} does not divide {per_rank} = {of_rank}; change one of them")
        else:
            draft.put("train.accumulate", of_rank // part, micro, f"{of_rank} of a rank / {part}", given=part)
    batch(draft, per_rank if per_rank in draft.given else "", microbatches=1)
