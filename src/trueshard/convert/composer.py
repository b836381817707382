"""Single keys of Composer's `Trainer`, and of llm-foundry's YAML around it, for which data cannot say what they become.

Defaults are not assumed: such a file names what matters, and most keys are made by other tools.
"""

from __future__ import annotations

import math
import re
from collections.abc import Set
from typing import Any

from trueshard.convert.engine import Draft, Wrong, number, positive, table, text
from trueshard.convert.shared import REDUCED, batch, count, mixed_precision_policy

REFERENCE = re.compile(r"\$\{([\w.]+)\}")


def prepare(tree: dict[str, Any], sections: Set[str]) -> dict[str, Any]:
    """Follow references, and put `parallelism_config` around a file of its tables, or of the keys of its `fsdp`."""
    tree = {key: _resolved(value, tree) for key, value in tree.items()}
    for key in ("optimizer", "scheduler"):
        if {key, f"{key}s"} <= set(tree):
            raise Wrong(f"{key} and {key}s are the same; keep one")
        if (given := tree.pop(f"{key}s", tree.get(key))) is not None:
            tree[key] = _named(key, given)
    if isinstance(tree.get("tokenizer"), str):
        tree["tokenizer"] = {"name": tree["tokenizer"]}
    if set(tree) <= {"fsdp", "fsdp2", "tp"}:
        return {"parallelism_config": tree}
    if not sections & set(tree):
        return {"parallelism_config": {"fsdp": tree}}
    return tree


def _resolved(value: Any, tree: dict[str, Any]) -> Any:
    """Replace llm-foundry's `${key}` and `${section.key}` by the value that stands there, where one does."""
    if isinstance(value, dict):
        return {key: _resolved(each, tree) for key, each in value.items()}
    if isinstance(value, list):
        return [_resolved(each, tree) for each in value]
    match = REFERENCE.fullmatch(value) if isinstance(value, str) else None
    found: Any = tree
    for part in match[1].split(".") if match else ():
        found = found.get(part) if isinstance(found, dict) else None
    return value if match is None or found is None or isinstance(found, dict) else found


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


def _batch_size(draft: Draft) -> int | None:
    """Return the sequences of a step over all ranks; None: unknown."""
    each, total = draft.get("device_train_batch_size"), draft.get("global_train_batch_size")
    if total is not None:
        return positive(total)
    return positive(each) * draft.readers if each is not None and draft.readers else None


def _steps(draft: Draft, value: Any) -> int | None:
    """Return a time in steps; None: unknown."""
    number, unit = _time(value)
    if unit in ("ba", "iter"):
        return math.ceil(number)
    size, length = _batch_size(draft), draft.get("max_seq_len")
    if unit == "sp" and size:
        return math.ceil(number / size)
    if unit == "tok" and size and length:
        return math.ceil(number / (size * positive(length)))
    if unit == "dur":
        whole = draft.get("max_duration")
        steps = _steps(draft, whole) if whole is not None and _time(whole)[1] != "dur" else None
        return math.ceil(number * steps) if steps else None
    return None


def duration(draft: Draft, key: str, value: Any) -> None:
    number, unit = _time(value)
    steps = _steps(draft, value)
    if unit == "ep":
        draft.put("train.epochs", number, key, value)
    elif steps:
        draft.put("train.steps", max(1, steps), key, value)
    else:
        draft.tell(key, value, "none", "how many steps that is depends on batch and sequence; set train.steps")
        draft.ask("train.steps", "1000", f"there {value}")


def interval(draft: Draft, key: str, value: Any) -> None:
    """Read an interval, or the length of a warm-up, as steps."""
    ours, steps = draft.rules[key].becomes, _steps(draft, value)
    if steps or (steps == 0 and key == "scheduler.t_warmup"):
        draft.put(ours, steps, key, value)
    else:
        draft.tell(key, value, "none", f"told in steps here; set {ours}")
        draft.ask(ours, "100", f"in steps; there {value}")


def mixed_precision(draft: Draft, key: str, value: Any) -> None:
    """Read FSDP's `mixed_precision` with the Trainer's `precision`."""
    if isinstance(value, dict):
        mixed_precision_policy(draft, key, value)
        return
    draft.word(key, value)
    if str(value).upper() == "FULL":
        draft.tell(key, value, "always", "computed as stored")
    elif draft.get("precision") is None:
        draft.tell(key, value, "none", "of what, the Trainer's precision says; set shard.mixed_precision")
        draft.ask("shard.mixed_precision", '"bf16"', "the Trainer's precision")
    elif str(value).upper() == "PURE":
        draft.tell(key, value, "near", REDUCED, "shard.mixed_precision, by precision")
    else:
        draft.tell(key, value, "set", "reduced in float32, as there", "shard.mixed_precision, by precision")


def precision(draft: Draft, key: str, value: Any) -> None:
    """Read the Trainer's `precision`, unless FSDP's `mixed_precision` is FULL."""
    draft.word(key, value)
    if any(str(draft.given[each]).upper() == "FULL" for each in draft.given if each.endswith(".mixed_precision")):
        draft.tell(key, value, "always", "computed as stored")
    else:
        draft.put_word(key, value)


def compiled(draft: Draft, key: str, value: Any) -> None:
    """Read `compile_config`: any table means to compile."""
    if value is None:
        draft.tell(key, value, "always", "not asked for")
        return
    note = "each block, by inductor" if table(value) else ""
    draft.put("shard.compile", True, key, value, "near" if note else "set", note)


def _named(key: str, value: Any) -> dict[str, Any]:
    """Return the settings of `{NAME: {...}}` with the name among them, as in `{name: NAME, ...}`."""
    if not isinstance(value, dict):
        raise Wrong(f"{key}: found {value!r}, wanted a table with a name; give it one")
    inner = next(iter(value.values())) if len(value) == 1 else None
    return {"name": next(iter(value)), **inner} if isinstance(inner, dict) else value


def decay(draft: Draft, key: str, value: Any) -> None:
    """Read `weight_decay`: decoupled_adamw takes it · lr / peak, torch takes it · lr."""
    decoupled, lr = str(draft.get("optimizer.name")).lower() == "decoupled_adamw", number(draft.get("optimizer.lr"))
    given = number(value if key in draft.given else 1e-5 if decoupled else 1e-2)
    if decoupled and lr:
        draft.put("optimizer.weight_decay", round(given / lr, 12), key, given, "set", "/ lr")
    else:
        draft.put("optimizer.weight_decay", given, key, given)


def model(draft: Draft, key: str, value: Any) -> None:
    """Read llm-foundry's `model`: one of transformers by its path, or one of its own."""
    path = value.get("pretrained_model_name_or_path") if isinstance(value, dict) else None
    if not path:
        draft.tell(key, value, "none", "models are Hugging Face directories; set model.path, or model.architecture")
        return
    ours = "model.path" if value.get("pretrained", True) else "model.config"
    draft.put(ours, text(path), key, path, "set", "a directory on this machine")


def finish(draft: Draft) -> None:
    """Set the batch from that of all ranks or of one, and `train.accumulate` from the microbatch."""
    total, each, micro = "global_train_batch_size", "device_train_batch_size", "device_train_microbatch_size"
    if str(draft.get(micro)).lower() == "auto":
        draft.put("train.on_oom", "tighten", micro, draft.get(micro))
        micro = ""
    if total in draft.given:
        batch(draft, micro, total=total)
        draft.tell(each, draft.get(each), "always", f"{total} says it")
        return
    if micro in draft.given:
        of_rank, part = count(draft, each), positive(draft.get(micro))
        if of_rank is None:
            draft.ask("train.accumulate", "1", f"a rank's part of the batch / {part}")
            draft.tell(micro, part, "set", "which needs the batch of a rank", "train.accumulate")
        elif of_rank % part:
            raise Wrong(f"{micro} = {part} does not divide {each} = {of_rank}; change one of them")
        else:
            draft.put("train.accumulate", of_rank // part, micro, part, "set", f"{of_rank} of a rank / {part}")
    batch(draft, each if each in draft.given else "", microbatches=1)
