"""Functions that rules of several frameworks name: FSDP's words, Accelerate's launcher, DeepSpeed, and batch sizes."""

from __future__ import annotations

import re
from collections.abc import Set
from typing import Any

import yaml

from trueshard.convert.engine import Draft, Wrong, boolean, integer, names, number, positive
from trueshard.plans import SHORT_DTYPES

# FSDP's words, which Accelerate, transformers and PEFT pass on under several names.


def strategy(draft: Draft, key: str, value: Any) -> None:
    """Read `sharding_strategy` (of FSDP 1) or `reshard_after_forward` (of FSDP 2); Accelerate's launcher sets both."""
    rule = draft.rules[key]
    counts = rule.keys[str(draft.given.get(rule.beside[0], 1)) == "2"]
    if key != counts and counts in draft.given:
        draft.word(key, value)
        draft.tell(key, "always", f"not looked at beside {counts}, there either")
    else:
        draft.put_word(key, value)


REDUCED = "gradients are reduced in float32, there in the compute dtype: more exact, twice the bytes"
POLICY = ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype", "cast_forward_inputs")
DTYPES = {name: word for word in ("bf16", "fp16", "fp32") for name in (SHORT_DTYPES[word], word)} | {"half": "fp16"}


def mixed_precision_policy(draft: Draft, key: str, value: Any) -> None:
    """Read `mixed_precision_policy`: a word, or a table of dtypes."""
    if not isinstance(value, dict):
        draft.put_word(key, value)
        return
    if unknown := sorted(set(value) - set(POLICY)):
        raise Wrong(f"unknown key {unknown[0]!r}, wanted param_dtype, reduce_dtype, buffer_dtype or output_dtype")
    compute, reduced = (_dtype(value.get(name)) for name in POLICY[:2])
    if compute in (None, "fp32"):
        draft.tell(key, "always", "computed as stored")
    else:
        draft.put("shard.mixed_precision", compute, key, differs="" if reduced == "fp32" else REDUCED)


def _dtype(value: Any) -> str | None:
    """Return bf16, fp16 or fp32 for any name of a dtype; None for None."""
    result = DTYPES.get(str(value).removeprefix("torch.").lower())
    if result is None and value is not None:
        raise Wrong(f"found {value!r}, wanted a dtype: {', '.join(DTYPES)}")
    return result


def keep(draft: Draft, key: str, value: Any) -> None:
    """Read how many checkpoints stay; 0 and less: all."""
    if integer(value) < 1:
        draft.tell(key, "near", "all stay there; here at most train.keep")
        draft.ask("train.keep", "100", "how many checkpoints stay; all do there")
    else:
        draft.put("train.keep", positive(value), key)


def trackers(draft: Draft, key: str, value: Any) -> None:
    """Read names of loggers, or a table with a section for each, of which trackers have an equivalent.

    `beside`: other names that are no loss, since the screen and files are always written.
    """
    rule = draft.rules[key]
    read = rule.read or names
    named = list(value) if isinstance(value, dict) and not rule.read else read(value or [])
    here = [name for name in named if name in ("tensorboard", "wandb", "trackio", "mlflow")]
    lost = [name for name in named if name not in (*here, *rule.beside, "none")]
    if here:
        draft.put("log.to", here, key, given=here if isinstance(value, dict) else value)
    if lost:
        why = "trackers here: tensorboard, wandb, trackio, mlflow; metrics.jsonl is always written"
        draft.tell(key, "none", why, value=lost)
    if not here and not lost:
        draft.tell(key, "always", "the screen and metrics.jsonl" if rule.beside else "none but metrics.jsonl")


def join(draft: Draft, key: str, value: Any) -> None:
    """Read two numbers that are one array here, as `betas`."""
    draft.put(draft.rules[key].becomes, [number(draft.get(part)) for part in draft.rules[key].beside], key)


def recompute(draft: Draft, key: str, every: int, first: int, word: str, note: str) -> None:
    """Recompute every so many blocks from the one numbered `first`; `word` where a glob cannot tell these."""
    ours = "shard.activation_checkpointing"
    if every == 1:
        draft.put(ours, "full", key)
    elif 10 % every == 0:  # blocks are told apart by the last digit of their number
        digits = "".join(str(digit) for digit in range(first, 10, every))
        draft.put(ours, {f"*[{digits}]": "full"}, key)
    else:
        draft.put(ours, word, key, differs=note)


# References of OmegaConf, which llm-foundry and verl read their YAML by.

REFERENCE = re.compile(r"\$\{(oc\.select:)?([^${}:]*)\}")
DEPTH = 20
"""References that one may lead to; more are a circle."""


def followed(value: Any, tree: dict[str, Any], place: tuple[str, ...] = (), depth: int = 0) -> Any:
    """Replace `${key}`, `${.neighbour}` and `${oc.select:key,default}` by what stands there, where that is known.

    Leaves out Hydra's `_target_`, and keys that it marks as missing. Raises `Wrong` for references in a circle.
    """
    if isinstance(value, dict):
        inner = {
            str(name): followed(item, tree, (*place, str(name)), depth)
            for name, item in value.items()
            if name != "_target_"
        }
        return {name: item for name, item in inner.items() if item != "???"}
    if isinstance(value, list):
        return [followed(item, tree, place, depth) for item in value]
    match = REFERENCE.search(value) if isinstance(value, str) else None
    if match is None:
        return value
    if depth == DEPTH:
        raise Wrong(f"{'.'.join(place)}: {value} leads back to itself")
    result = _referred(match, tree, place)
    if result is REFERENCE:
        return value
    replaced = result if match[0] == value.strip() else value.replace(match[0], str(result))
    return followed(replaced, tree, place, depth + 1)


def _referred(match: re.Match[str], tree: dict[str, Any], place: tuple[str, ...]) -> Any:
    """Return what a reference stands for; `REFERENCE` if that is not known."""
    key, comma, default = match[2].partition(",")
    dots = len(key) - len(key.lstrip("."))
    path = [*place[: len(place) - dots], *key.lstrip(".").split(".")] if dots else key.strip().split(".")
    result: Any = tree
    for part in path:
        if not isinstance(result, dict) or part not in result:
            return (yaml.safe_load(default) if comma else None) if match[1] else REFERENCE
        result = result[part]
    return result


# Accelerate's launcher: its YAML and the environment variables that it sets.


def accelerate_tree(tree: dict[str, Any], sections: Set[str]) -> dict[str, Any]:
    """Give each key of a section the section's prefix, as Accelerate does."""
    result = dict(tree)
    for section, prefix in (("fsdp_config", "fsdp_"), ("dynamo_config", "dynamo_")):
        if isinstance(inner := result.get(section), dict):
            result[section] = {prefix + key.removeprefix(prefix): inner[key] for key in inner}
    return result


def accelerate_variables(tree: dict[str, Any], sections: Set[str]) -> dict[str, Any]:
    """Return the variables that Accelerate and PEFT read, out of an environment."""
    prefixes = ("FSDP_", "ACCELERATE_", "PARALLELISM_CONFIG_")
    return {key: value for key, value in tree.items() if key.startswith(prefixes) or key == "WORLD_SIZE"}


def distributed_type(draft: Draft, key: str, value: Any) -> None:
    """Read which engine trains; MULTI_* is DistributedDataParallel, a full copy in each rank."""
    kind = str(value).upper().removeprefix("DISTRIBUTEDTYPE.")
    if kind.startswith("MULTI_"):
        draft.put("shard.reshard_after_forward", "never", key)
        draft.replicate("ranks", key, value)
    elif kind == "NO":
        draft.ranks = draft.ranks or 1
        draft.tell(key, "command", "--nproc 1")
    else:
        draft.put_word(key, kind)


def processes(draft: Draft, key: str, value: Any) -> None:
    """Read the number of ranks of Accelerate's YAML; -1: said when the run is started."""
    count = integer(value)
    if count == -1:
        draft.tell(key, "command", "given when the run is started: --nproc")
        return
    draft.ranks = draft.ranks or positive(value)
    where = "" if draft.ranks == count else f"; {draft.ranks} counts instead"
    draft.tell(key, "command", f"--nproc, or torchrun's --nproc-per-node × --nnodes{where}")


def machines(draft: Draft, key: str, value: Any) -> None:
    draft.machines = positive(value)
    draft.tell(key, "command", "torchrun --nnodes" if draft.machines > 1 else "one machine")


def context(draft: Draft, key: str, value: Any) -> None:
    """Read the number of ranks that share a sequence, where they exchange keys and values."""
    note = "ranks exchange heads, there keys and values, as here where the ranks do not divide the heads"
    draft.put("shard.context", positive(value), key, differs=note)


# DeepSpeed


def deepspeed_tree(tree: dict[str, Any], sections: Set[str]) -> dict[str, Any]:
    """Return the tree without what is "auto", which the script says; older spellings in the present one."""
    present = {
        "bf16" if key == "bfloat16" else key: deepspeed_tree(value, sections) if isinstance(value, dict) else value
        for key, value in tree.items()
    }
    return {key: value for key, value in present.items() if value != "auto"}


def deepspeed(draft: Draft) -> None:
    """Set the batch; of its three sizes there, any two say the third."""
    total, per_rank, accumulate = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    if count(draft, total) is None:
        batch(draft, per_rank, accumulate, total=total)
    elif count(draft, per_rank) is None and (accumulated := count(draft, accumulate)) is not None:
        batch(draft, total=total)
        draft.put("train.accumulate", accumulated, accumulate, given=accumulated)
    else:
        batch(draft, per_rank, total=total)
        draft.tell(accumulate, "set", "by the other two sizes", "train.accumulate")
    draft.ask("train.sequence_length", "1024", "tokens a sequence, as your script has it")


# Data of several sources.


def mix(
    draft: Draft, key: str, sources: list[dict[str, Any]], lost: Set[str], formats: Set[str | None] = frozenset()
) -> None:
    """Set `data.path`, or `data.sources`, and `data.format` where sources have one and the same; name what is lost."""
    if len(sources) == 1:
        draft.put("data.path", sources[0]["path"], key)
    elif sources:
        draft.put("data.sources", sources, key)
    if len(formats) > 1:
        draft.tell(key, "always", "the first record of each file tells its format")
    for word in formats if len(formats) == 1 else ():
        if word is not None:
            draft.put("data.format", word, key)
    if lost:
        draft.tell(key, "none", f"{', '.join(sorted(lost))} lost: a source is a path and a weight; save it as a file")


def of_answers(draft: Draft, packed: str, whole: str, default: bool = False) -> None:
    """Set whether conversations share a sequence, and whether their answers alone count, by two keys of theirs.

    ``default``: of ``whole``, the switch for prompts that count.
    """
    for key, ours, value in ((packed, "data.packing", False), (whole, "data.answers_only", default)):
        value = boolean(draft.get(key, value))
        if draft.tree.get("data.format") in ("chat", "completion", "instruction"):
            draft.put(ours, value == (key == packed), key, given=value)
        else:
            draft.tell(key, "always", "of effect with conversations")


# Batch sizes, which several keys decide together.

NEEDS_RANKS = "which needs the number of ranks"


def batch(
    draft: Draft, per_rank: str = "", accumulate: str = "", total: str = "", microbatches: int | None = None
) -> None:
    """Set `train.batch_size` and `train.accumulate` from keys for the sequences of a rank, its microbatches, all ranks.

    Ranks that share matrices or sequences read the same samples, and count once.
    `microbatches`: how many times `per_rank` a rank has in a step; None: `train.accumulate` times.
    """
    sequences, of_all = count(draft, per_rank), count(draft, total)
    if of_all is not None:
        _batch_of_all_ranks(draft, of_all, total, sequences, per_rank)
        return
    if total:
        draft.tell(total, "always", f"not given: {per_rank} × ranks")
    if accumulate:
        draft.put("train.accumulate", count(draft, accumulate) or 1, accumulate)
    microbatches = microbatches or draft.tree.get("train.accumulate", 1)
    factors = f"{f'{sequences} a rank' if sequences else 'sequences a rank'} × {draft.readers_in_words}"
    factors += f" × {microbatches} accumulated"
    if sequences is not None and draft.readers is not None:
        draft.put("train.batch_size", sequences * draft.readers * microbatches, per_rank)
        draft.origins["train.batch_size"] = factors
        return
    hint = "; --ranks works it out" if sequences and not draft.ranks else ""
    example = (sequences or 1) * (draft.readers or 1) * microbatches
    draft.ask("train.batch_size", str(example), f"{factors}{hint}")
    draft.tell(per_rank, "set", NEEDS_RANKS, "train.batch_size, of a whole step")


def _batch_of_all_ranks(draft: Draft, of_all: int, total: str, sequences: int | None, per_rank: str) -> None:
    """Set the batch from that of all ranks; `train.accumulate` follows from what a rank takes at a time."""
    draft.put("train.batch_size", of_all, total)
    if sequences is None:
        draft.tell(per_rank, "always", "not given")
    elif draft.readers is None:
        at_a_time = f"{sequences} a rank × {draft.readers_in_words}"
        draft.ask("train.accumulate", "1", f"{of_all} / ({at_a_time}); --ranks works it out")
        draft.tell(per_rank, "set", NEEDS_RANKS, "train.accumulate")
    else:
        microbatches, rest = divmod(of_all, sequences * draft.readers)
        if rest or not microbatches:
            raise Wrong(
                f"{total} = {of_all} is no multiple of {per_rank} = {sequences} × {draft.readers_in_words}; "
                f"change one of them, or --ranks"
            )
        note = f"{of_all} of all / ({sequences} × {draft.readers_in_words})"
        draft.put("train.accumulate", microbatches, per_rank, note)
        draft.origins["train.accumulate"] = note


def count(draft: Draft, key: str) -> int | None:
    """Return a key's number from 1 on; None where it is not given (absent, -1 or "auto")."""
    return None if draft.get(key) in (None, -1, "auto") else draft.count(key)


def pieces(of_rank: int, most: int) -> int:
    """Return the fewest equal microbatches of a rank's part of a batch that hold at most ``most`` each."""
    return next(number for number in range(1, of_rank + 1) if of_rank % number == 0 and of_rank // number <= most)
