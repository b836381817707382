"""FSDP's own words, which Accelerate, transformers and PEFT pass on under several names.

- A sharding strategy says two things: whether a unit is freed after its forward ("always") or kept until its backward
  ("never"), and how many whole copies there are (shard.replicate).
- What FSDP2 does by itself, other than FSDP1, is told where it is another value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trueshard.train.convert import values
from trueshard.train.convert.rules import Lost, Near, Rule, always, by, none, words
from trueshard.train.convert.sheet import Sheet, Wrong

ROOT_TOO = "the root is freed too, which is kept there: one gather more in a step, and less memory"
REDUCED = "gradients are reduced in float32, there in the compute dtype: more exact, twice the bytes"

STRATEGIES: dict[str, tuple[str, str]] = {
    "FULL_SHARD": ("always", ""),
    "SHARD_GRAD_OP": ("never", ""),
    "NO_SHARD": ("never", "ranks"),
    "HYBRID_SHARD": ("always", "machines"),
    "HYBRID_SHARD_ZERO2": ("never", "machines"),
}
"""For each: when units are freed, and of what there is a whole copy in each."""
RESHARD: dict[str, tuple[str, str]] = {
    **STRATEGIES,
    "_HYBRID_SHARD_ZERO2": STRATEGIES["HYBRID_SHARD_ZERO2"],
    **{str(number): word for number, word in enumerate(STRATEGIES.values(), start=1)},
    "true": STRATEGIES["FULL_SHARD"],
    "false": STRATEGIES["SHARD_GRAD_OP"],
}
STRATEGY_WHY = (
    "FULL_SHARD and true: `always` (the root is freed too); SHARD_GRAD_OP and false: `never`; the HYBRID ones the "
    "same, with shard.replicate = the number of machines; NO_SHARD: shard.replicate = the number of ranks"
)
PRECISIONS: dict[str, Any] = {
    "no": None,
    "none": None,
    "fp32": None,
    "bf16": Near("bf16", REDUCED),
    "fp16": Near("fp16", REDUCED),
    "fp8": Near("bf16", "products in 8 bits have no equivalent; what is gathered is bfloat16, as there"),
}
PRECISION_WHY = "`no`: nothing to set; `bf16` and `fp16`: computed in it, reduced in float32; `fp8`: `bf16`"

OFFLOAD = {"true": "cpu", "false": None}
RECOMPUTE = {"true": "full", "false": None}


def rules(spelled: Callable[[str], str]) -> tuple[Rule, ...]:
    """The rules of all fields of Accelerate's plugin; `spelled` gives the key(s) under which a source has a field."""
    return (
        always(
            spelled("fsdp_version"),
            "the engine is FSDP2; what version 1 does otherwise is told key by key",
        ),
        *_of_strategy(spelled),
        *_of_units(spelled),
        *_of_memory(spelled),
        *_of_state(spelled),
        *_of_prefetching(spelled),
        *_of_python(spelled),
    )


def _of_strategy(spelled: Callable[[str], str]) -> tuple[Rule, ...]:
    """When units are freed, and how many whole copies there are."""

    def strategy(sheet: Sheet, key: str, value: Any) -> None:
        # Version 1 looks at the strategy, version 2 at the other; the launcher sets both, one of them by default.
        first, second = spelled("sharding_strategy"), spelled("reshard_after_forward")
        counts = second if str(sheet.given.get(spelled("fsdp_version"), 1)) == "2" else first
        if key != counts and counts in sheet.given:
            sheet.word(value, RESHARD)
            sheet.tell(key, value, "always", f"not looked at beside {counts}, there either")
            return
        put_strategy(sheet, key, value)

    return (
        by(
            " ".join([spelled("sharding_strategy"), spelled("reshard_after_forward")]),
            "shard.reshard_after_forward",
            STRATEGY_WHY,
            strategy,
            together=True,
        ),
    )


def _of_units(spelled: Callable[[str], str]) -> tuple[Rule, ...]:
    """What is gathered together."""
    wrap, classes = spelled("auto_wrap_policy"), spelled("transformer_cls_names_to_wrap")

    def units(sheet: Sheet, key: str, value: Any) -> None:
        chosen = next((sheet.given[each] for each in wrap.split() if each in sheet.given), "TRANSFORMER_BASED_WRAP")
        named = [] if value is None else values.names(value)
        if not named:
            sheet.tell(key, value, "always", "empty: the model's own hints")
        elif str(chosen).upper() != "TRANSFORMER_BASED_WRAP":
            sheet.tell(key, value, "none", f"not looked at beside {wrap.split()[0]} = {chosen}, there either")
        else:
            sheet.put("shard.units", named, key, value)

    return (
        by(
            classes,
            "shard.units",
            "the same class names, with commas between them or as an array; empty: `auto`, the model's own hints",
            units,
        ),
        by(
            wrap,
            "shard.units",
            "TRANSFORMER_BASED_WRAP: the classes named, else `auto`, the model's own hints; NO_WRAP: `auto` (units "
            "in place of one whole); SIZE_BASED_WRAP has no equivalent: units are named, not weighed",
            put_policy,
        ),
        none(spelled("min_num_params"), "units are named by class or glob (shard.units), not by size", off=[0]),
    )


def _of_memory(spelled: Callable[[str], str]) -> tuple[Rule, ...]:
    """What rests where, what is computed again, and in which dtype."""
    return (
        words(
            spelled("cpu_offload"),
            "shard.offload",
            OFFLOAD,
            "true: `cpu`: parameters, gradients and optimizer state",
        ),
        words(
            spelled("activation_checkpointing"),
            "shard.activation_checkpointing",
            RECOMPUTE,
            "true: `full`: every block",
        ),
        none(
            spelled("activation_checkpointing_offload"),
            'what a recomputed block keeps stays on the device; shard.activation_checkpointing = "full" keeps the '
            "least",
            off=[False],
        ),
        by(
            spelled("mixed_precision_policy"),
            "shard.mixed_precision",
            "by its param_dtype and reduce_dtype; in Python, torch's own policy as it stands",
            policy_of_dtypes,
        ),
    )


def _of_state(spelled: Callable[[str], str]) -> tuple[Rule, ...]:
    """How parameters are filled, named and saved."""
    return (
        always(
            spelled("state_dict_type"),
            "each rank writes its own bytes of one whole Hugging Face directory: sharded in the writing, full in the "
            "reading, at any number of ranks",
        ),
        always(spelled("sync_module_states"), "ranks that differ go on from rank 0's values"),
        always(spelled("cpu_ram_efficient_loading"), "each rank reads its own bytes; none ever holds the whole model"),
        always(
            spelled("use_orig_params"),
            "parameters keep their names and the optimizer its groups",
            {False: "there are no flattened parameters; groups of the optimizer work as without sharding"},
        ),
    )


def _of_prefetching(spelled: Callable[[str], str]) -> tuple[Rule, ...]:
    """How far ahead units are gathered."""
    return (
        always(
            spelled("limit_all_gathers"),
            "FSDP2 gathers no further ahead than one unit",
            {False: "FSDP2 always limits how far ahead it gathers"},
        ),
        always(
            spelled("backward_prefetch"),
            "in backward the next unit is gathered while this one computes (BACKWARD_PRE)",
            dict.fromkeys(["backward_post", 2], "FSDP2 always gathers one unit ahead (BACKWARD_PRE): the same numbers"),
        ),
        none(
            spelled("forward_prefetch"),
            "FSDP2 issues the next gather while a unit computes, without being told; in Python: "
            "FSDPModule.set_modules_to_forward_prefetch",
            off=[False],
        ),
    )


def _of_python(spelled: Callable[[str], str]) -> tuple[Rule, ...]:
    """What only a program can say."""
    return (
        none(
            spelled("ignored_modules"),
            "every parameter is sharded; one that must stay whole has no words here, and is the same by numbers",
        ),
        none(
            " ".join(map(spelled, ["state_dict_config", "optim_state_dict_config", "param_init_fn"])),
            "an object of Python; a model on the meta device stays there until trueshard.load fills its shards",
        ),
    )


WRAP: dict[str, Any] = {
    "TRANSFORMER_BASED_WRAP": None,
    "SIZE_BASED_WRAP": Lost(
        "units are named by class or glob (shard.units), not by size; left at the model's own hints"
    ),
    "NO_WRAP": Near(
        "auto", "the whole model is one unit there; blocks as units are the same by numbers, in less memory"
    ),
}


def put_policy(sheet: Sheet, key: str, value: Any) -> None:
    """The wrap policy: which modules are units."""
    sheet.word(value, WRAP)
    which = WRAP[str(value).upper() if value is not None else "NO_WRAP"]
    if isinstance(which, Near):
        sheet.put("shard.units", which.value, key, value, "near", which.why)
    elif isinstance(which, Lost):
        sheet.tell(key, value, "none", which.why)
    else:
        sheet.tell(key, value, "always", "the classes that are named, else the model's own hints")


def put_strategy(sheet: Sheet, key: str, value: Any) -> None:
    """What a sharding strategy is here: when units are freed, and how many whole copies there are."""
    freed, copies = sheet.word(value, RESHARD)
    note = ROOT_TOO if freed == "always" else ""
    sheet.put("shard.reshard_after_forward", freed, key, value, "near" if note else "set", note)
    if copies:
        replicate(sheet, copies, key, value)


def replicate(sheet: Sheet, copies: str, key: str, value: Any) -> None:
    """One whole copy in each rank, or in each machine."""
    number = sheet.ranks if copies == "ranks" else sheet.machines
    if number is None:
        sheet.ask("shard.replicate", "1", f"as many as there are {copies}: a whole copy in each")
    else:
        sheet.put("shard.replicate", number, key, value)


def policy_of_dtypes(sheet: Sheet, key: str, value: Any) -> None:
    """`mixed_precision_policy`: a word, or a table of dtypes."""
    if isinstance(value, dict):
        unknown = sorted(
            set(value) - {"param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype", "cast_forward_inputs"}
        )
        if unknown:
            raise Wrong(f"unknown key {unknown[0]!r}, wanted param_dtype, reduce_dtype, buffer_dtype or output_dtype")
        compute, reduced = (dtype(value.get(name)) for name in ("param_dtype", "reduce_dtype"))
        if compute in (None, "fp32"):
            sheet.tell(key, value, "always", "computed as stored")
            return
        exact = reduced == "fp32"
        sheet.put("shard.mixed_precision", compute, key, value, "set" if exact else "near", "" if exact else REDUCED)
        return
    words(key, "shard.mixed_precision", PRECISIONS, PRECISION_WHY).apply(sheet, key, value)


DTYPES = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16", "half": "fp16"}
DTYPES |= {"float32": "fp32", "fp32": "fp32"}


def dtype(value: Any) -> str | None:
    """bf16, fp16 or fp32, whatever it is called."""
    if value is None:
        return None
    found = DTYPES.get(str(value).removeprefix("torch.").lower())
    if found is None:
        raise Wrong(f"found {value!r}, wanted a dtype: {', '.join(DTYPES)}")
    return found
