"""What single keys of a Composer run become, where a table of words is not enough."""

from __future__ import annotations

import math
import re
from typing import Any

from trueshard.train.convert import fsdp, values
from trueshard.train.convert.rules import Apply
from trueshard.train.convert.sheet import Sheet, Wrong

TIME = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*(ba|ep|tok|sp|dur|iter|sec)", re.IGNORECASE)
REFERENCE = re.compile(r"\$\{([\w.]+)\}")
PRECISIONS: dict[str, str | None] = {
    "fp32": None,
    "amp_fp32": None,
    "amp_bf16": "bf16",
    "bf16": "bf16",
    "amp_fp16": "fp16",
    "fp16": "fp16",
}
PRECISIONS |= {"amp_fp8": "fp8"}
EVALUATED = ("eval_loader", "eval_dataloader", "evaluators", "icl_tasks", "icl_tasks_str")


def resolved(value: Any, tree: dict[str, Any]) -> Any:
    """llm-foundry's `${key}` and `${section.key}`: the value that stands there, where one does."""
    if isinstance(value, dict):
        return {key: resolved(each, tree) for key, each in value.items()}
    if isinstance(value, list):
        return [resolved(each, tree) for each in value]
    match = REFERENCE.fullmatch(value) if isinstance(value, str) else None
    found: Any = tree
    for part in match[1].split(".") if match else ():
        found = found.get(part) if isinstance(found, dict) else None
    return value if match is None or found is None or isinstance(found, dict) else found


def a_time(value: Any) -> tuple[float, str]:
    """A number and its unit: "100ba", "1ep"; a bare number counts epochs."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value), "ep"
    match = TIME.fullmatch(str(value).strip().replace("_", ""))
    if not match:
        raise Wrong(f'found {value!r}, wanted a time such as "1000ba", "1ep" or "2e9tok"')
    return float(match[1]), match[2].lower()


def batch_size(sheet: Sheet) -> int | None:
    """Sequences a step over all ranks, where that can be told."""
    each, total = sheet.get("device_train_batch_size"), sheet.get("global_train_batch_size")
    if total is not None:
        return values.positive(total)
    return values.positive(each) * sheet.ranks if each is not None and sheet.ranks else None


def in_steps(sheet: Sheet, value: Any) -> int | None:
    """A time in steps, where that can be told."""
    count, unit = a_time(value)
    if unit in ("ba", "iter"):
        return math.ceil(count)
    size, length = batch_size(sheet), sheet.get("max_seq_len")
    if unit == "sp" and size:
        return math.ceil(count / size)
    if unit == "tok" and size and length:
        return math.ceil(count / (size * values.positive(length)))
    if unit == "dur":
        whole = sheet.get("max_duration")
        steps = in_steps(sheet, whole) if whole is not None and a_time(whole)[1] != "dur" else None
        return math.ceil(count * steps) if steps else None
    return None


def duration(sheet: Sheet, key: str, value: Any) -> None:
    """`max_duration` in steps or passes."""
    count, unit = a_time(value)
    steps = in_steps(sheet, value)
    if unit == "ep":
        sheet.put("train.epochs", count, key, value)
    elif steps:
        sheet.put("train.steps", max(1, steps), key, value)
    else:
        sheet.tell(key, value, "none", "how many steps that is depends on batch and sequence; set train.steps")
        sheet.ask("train.steps", "1000", f"there {value}")


def every(ours: str, what: str) -> Apply:
    """A time between two of something, in steps."""

    def apply(sheet: Sheet, key: str, value: Any) -> None:
        steps = in_steps(sheet, value)
        if what == "evaluations" and not any(each in sheet.given for each in EVALUATED):
            sheet.tell(key, value, "always", "nothing to evaluate on is given, so there is none, there either")
        elif steps:
            sheet.put(ours, steps, key, value)
        else:
            sheet.tell(key, value, "none", f"told in steps here; set {ours}")
            sheet.ask(ours, "100", f"steps between {what}; there {value}")

    return apply


def mixed(sheet: Sheet, key: str, value: Any) -> None:
    """`mixed_precision` of FSDP with the Trainer's `precision`."""
    if isinstance(value, dict):
        fsdp.policy_of_dtypes(sheet, key, value)
        return
    way = sheet.word(value, {"DEFAULT": "default", "PURE": "pure", "FULL": "full"})
    if way == "full":
        sheet.tell(key, value, "always", "computed as stored")
    elif sheet.get("precision") is None:
        sheet.tell(key, value, "none", "of what, the Trainer's precision says; set shard.mixed_precision")
        sheet.ask("shard.mixed_precision", '"bf16"', "the Trainer's precision")
    else:
        note = {"default": "reduced in float32, as there", "pure": fsdp.REDUCED}[way]
        sheet.tell(key, value, "near" if way == "pure" else "set", note, "shard.mixed_precision, by precision")


def precision(sheet: Sheet, key: str, value: Any) -> None:
    """The Trainer's `precision`, unless FSDP's `mixed_precision` is FULL."""
    found = sheet.word(value, PRECISIONS)
    ways = [str(sheet.given[each]).upper() for each in sheet.given if each.endswith(".mixed_precision")]
    if found is None or "FULL" in ways:
        sheet.tell(key, value, "always", "computed as stored")
    elif found == "fp8":
        sheet.put("shard.mixed_precision", "bf16", key, value, "near", "products in 8 bits have no equivalent")
    else:
        sheet.put("shard.mixed_precision", found, key, value)


OPTIMIZERS = {"decoupled_adamw": "torch.optim.AdamW", "adamw": "torch.optim.AdamW", "adam": "torch.optim.Adam"}
ELSEWHERE = ("decoupled_sgdw", "decoupled_lionw", "decoupled_adalr_lion", "decoupled_clip_lion", "adalr_lion", "no_op")


def optimizer(sheet: Sheet, key: str, value: Any) -> None:
    """llm-foundry's `optimizer` or `optimizers`: a table with a name, or names to tables."""
    name, settings = named(value)
    path = sheet.word(name, {**OPTIMIZERS, **dict.fromkeys(ELSEWHERE, "")})
    if not path:
        sheet.tell(key, value, "none", "no such class in torch; give one in optimizer.class by import path")
        sheet.ask("optimizer.class", '"torch.optim.AdamW"', f"import path of {name}")
        return
    decoupled = name.lower() == "decoupled_adamw"
    lr = values.number(settings.get("lr", 1e-3))
    sheet.put("optimizer.class", path, key, name)
    sheet.put("optimizer.lr", lr, key, {"lr": lr})
    if "betas" in settings:
        betas = [values.number(each) for each in settings["betas"]]
        sheet.put("optimizer.betas", betas, key, {"betas": betas})
    if "eps" in settings:
        sheet.put("optimizer.arguments.eps", values.number(settings["eps"]), key, {"eps": settings["eps"]})
    # Composer's decay goes by lr / peak, torch's by lr: w · lr / peak = (w / peak) · lr.
    decay = values.number(settings.get("weight_decay", 1e-5 if decoupled else 1e-2))
    scaled = round(decay / lr, 12) if decoupled and lr else decay
    sheet.put("optimizer.weight_decay", scaled, key, {"weight_decay": decay}, "set", "/ lr" if decoupled else "")
    sheet.put("optimizer.no_decay", [], key, name, "set", "decay on all parameters, as there")
    rest = {each: settings[each] for each in settings if each not in ("name", "lr", "betas", "eps", "weight_decay")}
    if rest:
        sheet.tell(key, rest, "none", "give them in optimizer.arguments, or in optimizer.groups")


DECAYS = {"constant_with_warmup": "constant", "cosine_with_warmup": "cosine", "linear_decay_with_warmup": "linear"}


def schedule(sheet: Sheet, key: str, value: Any) -> None:
    """llm-foundry's `scheduler` or `schedulers`."""
    name, settings = named(value)
    decay = sheet.word(name, {**DECAYS, "inv_sqrt_with_warmup": ""})
    if not decay:
        sheet.tell(key, value, "none", "another curve; set schedule.decay, or schedule.class to a torch scheduler")
        sheet.ask("schedule.decay", '"cosine"', f"in place of {name}")
        return
    sheet.put("schedule.decay", decay, key, name)
    if "t_warmup" in settings:
        warm, steps = {"t_warmup": settings["t_warmup"]}, in_steps(sheet, settings["t_warmup"])
        if steps is None:
            sheet.tell(key, warm, "none", "told in steps here; set schedule.warmup_steps")
            sheet.ask("schedule.warmup_steps", "100", f"there {settings['t_warmup']}")
        else:
            sheet.put("schedule.warmup_steps", steps, key, warm)
    if decay != "constant":
        final = values.number(settings.get("alpha_f", 0.0))
        sheet.put("schedule.final", final, key, {"alpha_f": final})
    if str(settings.get("t_max", "1dur")) != "1dur":
        sheet.tell(key, {"t_max": settings["t_max"]}, "none", "the schedule ends with train.steps")


def named(value: Any) -> tuple[str, dict[str, Any]]:
    """A name and its settings, from either way of writing them."""
    if isinstance(value, dict) and isinstance(value.get("name"), str):
        return value["name"], value
    if isinstance(value, dict) and len(value) == 1 and isinstance(inner := next(iter(value.values())), dict):
        return next(iter(value)), inner
    raise Wrong(f"found {value!r}, wanted a table with a name")


def model(sheet: Sheet, key: str, value: Any) -> None:
    """llm-foundry's `model`: one of transformers by its path, or one of its own."""
    path = value.get("pretrained_model_name_or_path") if isinstance(value, dict) else None
    if not path:
        sheet.tell(key, value, "none", "models are Hugging Face directories; set model.path, or model.architecture")
        return
    ours = "model.path" if value.get("pretrained", True) else "model.config"
    sheet.put(ours, values.text(path), key, path, "set", "a directory on this machine")


def tokenizer(sheet: Sheet, key: str, value: Any) -> None:
    """llm-foundry's `tokenizer`, by its name."""
    name = values.text(value.get("name") if isinstance(value, dict) else value)
    sheet.put("tokenizer.path", name, key, name, "set", "a directory on this machine")


def clipping(sheet: Sheet, key: str, value: Any) -> None:
    """`algorithms`: of them gradient clipping by norm."""
    given = values.table(value)
    settings = given.get("gradient_clipping")
    if isinstance(settings, dict) and settings.get("clipping_type") == "norm":
        threshold = values.number(settings.get("clipping_threshold"))
        sheet.put("train.max_grad_norm", threshold, key, given.pop("gradient_clipping"))
    if given:
        sheet.tell(key, given, "none", "methods of training of their own, made by changing the model or the batch")
    elif not value:
        sheet.tell(key, value, "always", "not asked for")


def keep(sheet: Sheet, key: str, value: Any) -> None:
    """How many checkpoints stay; -1: all."""
    if values.integer(value) < 1:
        sheet.tell(key, value, "near", "all stay there; here at most train.keep")
        sheet.ask("train.keep", "100", "how many checkpoints stay; all do there")
    else:
        sheet.put("train.keep", values.positive(value), key, value)


def loggers(sheet: Sheet, key: str, value: Any) -> None:
    """Those that are trackers here, by name."""
    given = values.table(value)
    chosen = [each for each in given if each in ("wandb", "tensorboard")]
    rest = [each for each in given if each not in chosen]
    if chosen:
        sheet.put("log.to", chosen, key, chosen)
    if rest or not value:
        note = "trackers here: tensorboard, wandb, trackio; metrics.jsonl is always written"
        sheet.tell(key, rest, "none" if rest else "always", note)


def reshard(sheet: Sheet, key: str, value: Any) -> None:
    """`reshard_after_forward` of FSDP2: true, false, or a number of ranks."""
    if isinstance(value, int) and not isinstance(value, bool):
        sheet.put("shard.reshard_after_forward", values.positive(value), key, value)
    else:
        fsdp.put_strategy(sheet, key, value)


def compiled(sheet: Sheet, key: str, value: Any) -> None:
    """`compile_config`: any table means to compile."""
    if value is None:
        sheet.tell(key, value, "always", "not asked for")
        return
    note = "each block, by inductor" if values.table(value) else ""
    sheet.put("shard.compile", True, key, value, "near" if note else "set", note)
