"""What single training arguments of transformers become, where a table of words is not enough."""

from __future__ import annotations

import math
from typing import Any

from trueshard.train.convert import fsdp, values
from trueshard.train.convert.sheet import Sheet, Wrong, either, nearest


def fsdp_words(sheet: Sheet, key: str, value: Any) -> None:
    """`fsdp`: true, or words as `"full_shard auto_wrap offload"`."""
    if value in (None, False, "", []):
        sheet.put("shard.reshard_after_forward", "never", key, value)
        fsdp.replicate(sheet, "ranks", key, value)
        return
    if value is True or str(value).lower() == "true":
        sheet.tell(key, value, "always", "fsdp_config says how")
        return
    listed = value if isinstance(value, list) else str(value).replace(",", " ").split()
    known = [*(name.lower() for name in fsdp.STRATEGIES), "offload", "auto_wrap"]
    for word in map(str, listed):
        if word not in known:
            raise Wrong(f"found {word!r}, wanted {either(known)}{nearest(word, known)}")
        if word == "offload":
            sheet.put("shard.offload", "cpu", key, value)
        elif word == "auto_wrap":
            sheet.tell(key, value, "always", "auto_wrap: the classes of fsdp_config, else the model's own hints")
        elif "fsdp_config.reshard_after_forward" in sheet.given:
            sheet.tell(key, word, "always", "fsdp_config.reshard_after_forward counts instead")
        else:
            fsdp.put_strategy(sheet, key, word)


def duration(sheet: Sheet, key: str, value: Any) -> None:
    """`max_steps` counts where it is given, else `num_train_epochs`."""
    steps = values.integer(sheet.get("max_steps"))
    if steps > 0:
        if key == "max_steps":
            sheet.put("train.steps", steps, key, value)
        else:
            sheet.tell(key, value, "always", "max_steps counts instead")
    elif key == "num_train_epochs":
        sheet.put("train.epochs", values.number(value), key, value)
    else:
        sheet.tell(key, value, "always", "num_train_epochs counts instead")


def warmup(sheet: Sheet, key: str, value: Any) -> None:
    """`warmup_steps`, a number or a share of the steps; or `warmup_ratio`, as it was called."""
    ratio, kind = values.number(value or 0), str(sheet.get("lr_scheduler_type")).lower()
    if ratio and kind in ("constant", "reduce_lr_on_plateau"):
        sheet.tell(key, value, "none", f"{kind} has no warm-up, there either")
        return
    if key == "warmup_ratio" and (sheet.get("warmup_steps") or not ratio):
        sheet.tell(key, value, "always", "warmup_steps counts instead" if ratio else "no warm-up by ratio")
        return
    if key == "warmup_steps" and not ratio and sheet.given.get("warmup_ratio"):
        sheet.tell(key, value, "always", "warmup_ratio counts instead")
        return
    steps = values.integer(sheet.get("max_steps", -1))
    if ratio >= 1 or not ratio:
        sheet.put("schedule.warmup_steps", values.integer(ratio), key, value)
    elif steps > 0:
        sheet.put("schedule.warmup_steps", math.ceil(ratio * steps), key, value, "set", f"of {steps} steps")
    else:
        sheet.tell(key, value, "none", "a share of steps that are not known yet; set schedule.warmup_steps")
        sheet.ask("schedule.warmup_steps", "100", f"{ratio} of all steps")


DECAYS: dict[str, tuple[str, float]] = {
    "linear": ("linear", 0.0),
    "cosine": ("cosine", 0.0),
    "constant": ("constant", 1.0),
    "constant_with_warmup": ("constant", 1.0),
    "cosine_with_min_lr": ("cosine", 0.0),
    "cosine_warmup_with_min_lr": ("cosine", 0.0),
    "polynomial": ("linear", 0.0),
    "warmup_stable_decay": ("wsd", 0.0),
    "reduce_lr_on_plateau": ("", 0.0),
    "cosine_with_restarts": ("", 0.0),
    "inverse_sqrt": ("", 0.0),
    "greedy": ("", 0.0),
}
PLATEAU = "torch.optim.lr_scheduler.ReduceLROnPlateau"


def schedule(sheet: Sheet, key: str, value: Any) -> None:
    """`lr_scheduler_type` with `lr_scheduler_kwargs`."""
    kind = str(value).lower()
    decay, final = sheet.word(kind, DECAYS)
    more = values.table(sheet.get("lr_scheduler_kwargs"))
    if kind == "reduce_lr_on_plateau":
        sheet.put("schedule.class", PLATEAU, key, value)
        if more:
            sheet.put("schedule.arguments", more, "lr_scheduler_kwargs", more)
        else:
            sheet.tell("lr_scheduler_kwargs", {}, "always", "the class's own")
        return
    if not decay:
        sheet.tell(key, value, "none", "another curve; set schedule.decay, or schedule.class to a torch scheduler")
        sheet.ask("schedule.decay", '"cosine"', f"in place of {kind}")
        sheet.tell("lr_scheduler_kwargs", more, "none" if more else "always", f"part of {kind}")
        return
    lr = values.number(sheet.get("learning_rate"))
    if "min_lr_rate" in more:
        final = values.number(more.pop("min_lr_rate"))
    elif "min_lr" in more and lr:
        final = values.number(more.pop("min_lr")) / lr
    elif "min_lr_ratio" in more:
        final = values.number(more.pop("min_lr_ratio"))
    elif kind == "polynomial" and lr:
        final = values.number(more.pop("lr_end", 1e-7)) / lr
    note = ""
    if kind == "polynomial" and values.number(more.pop("power", 1.0)) != 1:
        note = "falls in a line; a power has no equivalent"
    if kind == "warmup_stable_decay":
        if more.pop("decay_type", "cosine") != "1-sqrt":
            note = "falls along 1 - √x"
        if "num_decay_steps" in more:
            sheet.put("schedule.decay_steps", values.positive(more["num_decay_steps"]), key, value)
        more.pop("num_stable_steps", None)
    more.pop("num_decay_steps", None)
    sheet.put("schedule.decay", decay, key, value, "near" if note else "set", note)
    if decay != "constant":
        sheet.put("schedule.final", round(final, 12), key, value)
    rest = {name: each for name, each in more.items() if name not in ("num_warmup_steps", "num_training_steps")}
    if rest:
        sheet.tell("lr_scheduler_kwargs", rest, "none", "no equivalent in [schedule]")
    else:
        sheet.tell("lr_scheduler_kwargs", sheet.get("lr_scheduler_kwargs"), "always", f"part of {kind}")


OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw_torch": ("torch.optim.AdamW", {}),
    "adamw_torch_fused": ("torch.optim.AdamW", {}),
    "adamw_torch_xla": ("torch.optim.AdamW", {}),
    "adamw_torch_npu_fused": ("torch.optim.AdamW", {}),
    "adamw_hf": ("torch.optim.AdamW", {}),
    "sgd": ("torch.optim.SGD", {}),
    "adagrad": ("torch.optim.Adagrad", {}),
    "rmsprop": ("torch.optim.RMSprop", {}),
    "adafactor": ("transformers.Adafactor", {"scale_parameter": False, "relative_step": False}),
}
ELSEWHERE = (
    *("adamw_anyprecision", "adamw_torch_4bit", "adamw_torch_8bit", "ademamix", "adamw_bnb_8bit", "adamw_8bit"),
    *("ademamix_8bit", "lion_8bit", "lion_32bit", "paged_adamw_32bit", "paged_adamw_8bit", "paged_ademamix_32bit"),
    *("paged_ademamix_8bit", "paged_lion_32bit", "paged_lion_8bit", "rmsprop_bnb", "rmsprop_bnb_8bit"),
    *("rmsprop_bnb_32bit", "galore_adamw", "galore_adamw_8bit", "galore_adafactor", "galore_adamw_layerwise"),
    *("galore_adamw_8bit_layerwise", "galore_adafactor_layerwise", "lomo", "adalomo", "grokadamw"),
    *("schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd", "apollo_adamw", "apollo_adamw_layerwise"),
    *("stable_adamw", "adamw_apex_fused"),
)


def optimizer(sheet: Sheet, key: str, value: Any) -> None:
    name = str(value).lower()
    found = sheet.word(name, {**OPTIMIZERS, **dict.fromkeys(ELSEWHERE, None)})
    if found is None:
        sheet.tell(key, value, "none", "of another package; give its class in optimizer.class by import path")
        sheet.ask("optimizer.class", '"torch.optim.AdamW"', f"import path of {name}")
        return
    path, arguments = found
    sheet.put("optimizer.class", path, key, value)
    if path == "torch.optim.AdamW":
        betas = [values.number(sheet.get(f"adam_beta{number}")) for number in (1, 2)]
        given = next((each for each in ("adam_beta2", "adam_beta1") if each in sheet.given), "adam_beta1")
        sheet.put("optimizer.betas", betas, given, betas)
        if given == "adam_beta2":
            sheet.tell("adam_beta1", sheet.get("adam_beta1"), "set", "", f"optimizer.betas = {betas}")
        if "adam_epsilon" in sheet.given:
            eps = values.number(sheet.get("adam_epsilon"))
            sheet.put("optimizer.arguments.eps", eps, "adam_epsilon", eps)
    else:
        for each in ("adam_beta1", "adam_beta2", "adam_epsilon"):
            sheet.tell(each, sheet.get(each), "always", f"not looked at with optim = {name}, there either")
    if arguments:
        sheet.put("optimizer.arguments", arguments, key, value)


def precision(sheet: Sheet, key: str, value: Any) -> None:
    if values.boolean(sheet.get("bf16") or False) and values.boolean(sheet.get("fp16") or False):
        raise Wrong("bf16 and fp16 are both true; keep one")
    if values.boolean(value or False):
        sheet.put("shard.mixed_precision", key, key, value, "near", fsdp.REDUCED)
    else:
        sheet.tell(key, value, "always", "not asked for")


def recompute(sheet: Sheet, key: str, value: Any) -> None:
    """`activation_checkpointing`, or `gradient_checkpointing` as it was called, with its keyword arguments."""
    every = values.positive(values.table(sheet.get(f"{key}_kwargs")).get("every_n_layers", 1))
    if not values.boolean(value or False):
        sheet.tell(key, value, "always", "not asked for")
    elif every == 1:
        sheet.put("shard.activation_checkpointing", "full", key, value)
    elif 10 % every == 0:
        # Blocks whose number, from 0, is a multiple of 2, 5 or 10: told by its last digit.
        glob = f"*[{''.join(str(digit) for digit in range(0, 10, every))}]"
        sheet.put("shard.activation_checkpointing", {glob: "full"}, key, value, "set", f"every {every}th block")
    else:
        sheet.put("shard.activation_checkpointing", "full", key, value, "near", f"every block, there each {every}th")


def recompute_more(sheet: Sheet, key: str, value: Any) -> None:
    if values.table(value).get("offload"):
        sheet.tell(key, value, "none", 'what a recomputed block keeps stays on the device; "full" keeps the least')
    else:
        sheet.tell(key, value, "always", "recomputation is without reentrance, and keeps random states")


def every(ours: str, strategy: str, steps: str) -> Any:
    """`save_*`, `logging_*`, `eval_*`: a strategy, and a number or share of steps."""

    def apply(sheet: Sheet, key: str, value: Any) -> None:
        how = str(sheet.get(strategy) or "no").lower()
        if key == strategy:
            sheet.word(how, {"no": 0, "steps": 0, "epoch": 0, "best": 0})
            note = {"no": "not asked for", "steps": f"{steps} says when"}.get(how)
            sheet.tell(key, value, "always" if note else "none", note or f"told in steps here; set {ours}")
            if how in ("epoch", "best"):
                sheet.ask(ours, "100", f"steps; there by {how}")
            return
        if how != "steps" or (value is None and steps != "eval_steps"):
            sheet.tell(key, value, "always", f"not looked at with {strategy} = {how}")
            return
        count = values.number(sheet.get("logging_steps") if value is None else value)
        whole = values.integer(sheet.get("max_steps", -1))
        if count < 1 and whole < 1:
            sheet.tell(key, value, "none", f"a share of steps that are not known yet; set {ours}")
            sheet.ask(ours, "100", f"{count} of all steps")
            return
        sheet.put(ours, max(1, math.ceil(count * whole)) if count < 1 else values.positive(count), key, value)

    return apply


def keep(value: Any) -> int:
    return values.positive(value)


def norm(value: Any) -> float:
    return values.number(value) or math.inf


def trackers(sheet: Sheet, key: str, value: Any) -> None:
    named = values.names(value or [])
    here = [each for each in named if each in ("tensorboard", "wandb", "trackio")]
    rest = [each for each in named if each not in here and each != "none"]
    if here:
        sheet.put("log.to", here, key, value)
    if rest:
        sheet.tell(key, rest, "none", "trackers here: tensorboard, wandb, trackio; metrics.jsonl is always written")
    if not named or named == ["none"]:
        sheet.tell(key, value, "always", "none but metrics.jsonl")
