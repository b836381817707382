"""What single keys of Composer's `Trainer`, and of llm-foundry's YAML around it, become, where data cannot say it.

Defaults are not assumed: such a file names what matters, and most keys are made by other tools.
"""

from __future__ import annotations

import math
import re
from collections.abc import Set
from typing import Any

from trueshard.convert.engine import Draft, Wrong, number, positive, table, text
from trueshard.convert.shared import REDUCED, batch, mixed_precision_policy

REFERENCE = re.compile(r"\$\{([\w.]+)\}")


def prepare(tree: dict[str, Any], sections: Set[str]) -> dict[str, Any]:
    """Follow references, and put `parallelism_config` around a file of its tables, or of the keys of its `fsdp`."""
    tree = {key: _resolved(value, tree) for key, value in tree.items()}
    if set(tree) <= {"fsdp", "fsdp2", "tp"}:
        return {"parallelism_config": {key: value for key, value in tree.items() if value is not None}}
    if not sections & set(tree):
        return {"parallelism_config": {"fsdp": tree}}
    return {key: tree[key] for key in tree if key not in ("parallelism_config", "fsdp_config") or tree[key] is not None}


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
    return positive(each) * draft.ranks if each is not None and draft.ranks else None


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
    """Read `max_duration` as steps or epochs."""
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
    """Read `save_interval` or `eval_interval` as steps; the latter counts where there is something to evaluate on."""
    ours, loaders, steps = draft.rules[key].becomes, draft.rules[key].beside, _steps(draft, value)
    if loaders and not any(each in draft.given for each in loaders):
        draft.tell(key, value, "always", "nothing to evaluate on is given, so there is none, there either")
    elif steps:
        draft.put(ours, steps, key, value)
    else:
        what = "evaluations" if loaders else "checkpoints"
        draft.tell(key, value, "none", f"told in steps here; set {ours}")
        draft.ask(ours, "100", f"steps between {what}; there {value}")


# Precision, sharding, compilation.


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


def reshard(draft: Draft, key: str, value: Any) -> None:
    """Read `reshard_after_forward` of FSDP2: true, false, or a number of ranks."""
    if isinstance(value, int) and not isinstance(value, bool):
        draft.put("shard.reshard_after_forward", positive(value), key, value)
    else:
        draft.put_word(key, value)


def compiled(draft: Draft, key: str, value: Any) -> None:
    """Read `compile_config`: any table means to compile."""
    if value is None:
        draft.tell(key, value, "always", "not asked for")
        return
    note = "each block, by inductor" if table(value) else ""
    draft.put("shard.compile", True, key, value, "near" if note else "set", note)


# Optimizer, schedule, model: tables with a name.


def _named(value: Any) -> tuple[str, dict[str, Any]]:
    """Return (name, settings) of `{name: NAME, ...}` or `{NAME: {...}}`."""
    if isinstance(value, dict) and isinstance(value.get("name"), str):
        return value["name"], value
    if isinstance(value, dict) and len(value) == 1 and isinstance(inner := next(iter(value.values())), dict):
        return next(iter(value)), inner
    raise Wrong(f"found {value!r}, wanted a table with a name")


def optimizer(draft: Draft, key: str, value: Any) -> None:
    """Read llm-foundry's `optimizer` or `optimizers`."""
    name, settings = _named(value)
    word = draft.word(key, name)
    if word.none:
        draft.tell(key, value, "none", word.none)
        draft.ask("optimizer.class", '"torch.optim.AdamW"', f"import path of {name}")
        return
    decoupled = name.lower() == "decoupled_adamw"
    lr = number(settings.get("lr", 1e-3))
    draft.put_word(key, name)
    draft.put("optimizer.lr", lr, key, {"lr": lr})
    if "betas" in settings:
        betas = [number(each) for each in settings["betas"]]
        draft.put("optimizer.betas", betas, key, {"betas": betas})
    if "eps" in settings:
        draft.put("optimizer.arguments.eps", number(settings["eps"]), key, {"eps": settings["eps"]})
    # Composer's decay goes by lr / peak, torch's by lr: w · lr / peak = (w / peak) · lr.
    decay = number(settings.get("weight_decay", 1e-5 if decoupled else 1e-2))
    scaled = round(decay / lr, 12) if decoupled and lr else decay
    draft.put("optimizer.weight_decay", scaled, key, {"weight_decay": decay}, "set", "/ lr" if decoupled else "")
    draft.put("optimizer.no_decay", [], key, name, "set", "decay on all parameters, as there")
    lost = {each: settings[each] for each in settings if each not in ("name", "lr", "betas", "eps", "weight_decay")}
    if lost:
        draft.tell(key, lost, "none", "give them in optimizer.arguments, or in optimizer.groups")


def schedule(draft: Draft, key: str, value: Any) -> None:
    """Read llm-foundry's `scheduler` or `schedulers`."""
    name, settings = _named(value)
    word = draft.word(key, name)
    if word.none:
        draft.tell(key, value, "none", word.none)
        draft.ask("schedule.decay", '"cosine"', f"in place of {name}")
        return
    draft.put_word(key, name)
    if "t_warmup" in settings:
        warm, steps = {"t_warmup": settings["t_warmup"]}, _steps(draft, settings["t_warmup"])
        if steps is None:
            draft.tell(key, warm, "none", "told in steps here; set schedule.warmup_steps")
            draft.ask("schedule.warmup_steps", "100", f"there {settings['t_warmup']}")
        else:
            draft.put("schedule.warmup_steps", steps, key, warm)
    if word.sets["schedule.decay"] != "constant":
        final = number(settings.get("alpha_f", 0.0))
        draft.put("schedule.final", final, key, {"alpha_f": final})
    if str(settings.get("t_max", "1dur")) != "1dur":
        draft.tell(key, {"t_max": settings["t_max"]}, "none", "the schedule ends with train.steps")


def model(draft: Draft, key: str, value: Any) -> None:
    """Read llm-foundry's `model`: one of transformers by its path, or one of its own."""
    path = value.get("pretrained_model_name_or_path") if isinstance(value, dict) else None
    if not path:
        draft.tell(key, value, "none", "models are Hugging Face directories; set model.path, or model.architecture")
        return
    ours = "model.path" if value.get("pretrained", True) else "model.config"
    draft.put(ours, text(path), key, path, "set", "a directory on this machine")


def tokenizer(draft: Draft, key: str, value: Any) -> None:
    """Read llm-foundry's `tokenizer` by its name."""
    name = text(value.get("name") if isinstance(value, dict) else value)
    draft.put("tokenizer.path", name, key, name, "set", "a directory on this machine")


def algorithms(draft: Draft, key: str, value: Any) -> None:
    """Read `algorithms`, of which gradient clipping by norm has an equivalent."""
    given = table(value)
    settings = given.get("gradient_clipping")
    if isinstance(settings, dict) and settings.get("clipping_type") == "norm":
        threshold = number(settings.get("clipping_threshold"))
        draft.put("train.max_grad_norm", threshold, key, given.pop("gradient_clipping"))
    if given:
        draft.tell(key, given, "none", "methods of training of their own, made by changing the model or the batch")
    elif not value:
        draft.tell(key, value, "always", "not asked for")


# The batch.


def finish(draft: Draft) -> None:
    """Set the batch from that of all ranks or of one, and `train.accumulate` from the microbatch."""
    micro = draft.get("device_train_microbatch_size")
    if str(micro).lower() == "auto":
        draft.put("train.on_oom", "tighten", "device_train_microbatch_size", micro)
    elif "device_train_microbatch_size" in draft.given:
        _accumulate(draft, positive(micro))
    if "global_train_batch_size" in draft.given:
        total = positive(draft.get("global_train_batch_size"))
        draft.put("train.batch_size", total, "global_train_batch_size", total)
        each = draft.get("device_train_batch_size")
        draft.tell("device_train_batch_size", each, "always", "global_train_batch_size says it")
    elif "device_train_batch_size" in draft.given:
        batch(draft, "device_train_batch_size", microbatches=1)
    else:
        batch(draft)


def _accumulate(draft: Draft, micro: int) -> None:
    """Set `train.accumulate` from the microbatch of a rank."""
    key, total, each = "device_train_microbatch_size", _batch_size(draft), draft.get("device_train_batch_size")
    of_rank = positive(each) if each is not None else total / draft.ranks if total and draft.ranks else None
    if of_rank is None:
        draft.ask("train.accumulate", "1", f"a rank's part of the batch / {micro}; --ranks works it out")
        draft.tell(key, micro, "set", "which needs the number of ranks", "train.accumulate")
    elif of_rank % micro:
        raise Wrong(f"{key} = {micro} does not divide a rank's {of_rank:g} sequences; change it, or --ranks")
    else:
        draft.put("train.accumulate", int(of_rank // micro), key, micro, "set", f"{of_rank:g} of a rank / {micro}")
        draft.origins["train.accumulate"] = f"{of_rank:g} of a rank / {key} = {micro}"
