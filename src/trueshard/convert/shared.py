"""Functions that rules of several frameworks name: FSDP's words, Accelerate's launcher, and batch sizes."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from trueshard.convert.engine import Draft, Wrong, integer, names, number, positive
from trueshard.plans import SHORT_DTYPES

# FSDP's words, which Accelerate, transformers and PEFT pass on under several names.


def strategy(draft: Draft, key: str, value: Any) -> None:
    """Read `sharding_strategy` (of FSDP 1) or `reshard_after_forward` (of FSDP 2); Accelerate's launcher sets both."""
    rule = draft.rules[key]
    counts = rule.keys[str(draft.given.get(rule.beside[0], 1)) == "2"]
    if key != counts and counts in draft.given:
        draft.word(key, value)
        draft.tell(key, value, "always", f"not looked at beside {counts}, there either")
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
        draft.tell(key, value, "always", "computed as stored")
        return
    differs = "" if reduced == "fp32" else REDUCED
    draft.put("shard.mixed_precision", compute, key, value, "near" if differs else "set", differs)


def _dtype(value: Any) -> str | None:
    """Return bf16, fp16 or fp32 for any name of a dtype; None for None."""
    if value is None:
        return None
    result = DTYPES.get(str(value).removeprefix("torch.").lower())
    if result is None:
        raise Wrong(f"found {value!r}, wanted a dtype: {', '.join(DTYPES)}")
    return result


def keep(draft: Draft, key: str, value: Any) -> None:
    """Read how many checkpoints stay; 0 and less: all."""
    if integer(value) < 1:
        draft.tell(key, value, "near", "all stay there; here at most train.keep")
        draft.ask("train.keep", "100", "how many checkpoints stay; all do there")
    else:
        draft.put("train.keep", positive(value), key, value)


def trackers(draft: Draft, key: str, value: Any) -> None:
    """Read names of loggers, or a table with a section for each, of which trackers have an equivalent."""
    named = list(value) if isinstance(value, dict) else names(value or [])
    here = [each for each in named if each in ("tensorboard", "wandb", "trackio")]
    lost = [each for each in named if each not in here and each != "none"]
    if here:
        draft.put("log.to", here, key, here if isinstance(value, dict) else value)
    if lost:
        draft.tell(key, lost, "none", "trackers here: tensorboard, wandb, trackio; metrics.jsonl is always written")
    if not here and not lost:
        draft.tell(key, value, "always", "none but metrics.jsonl")


def join(draft: Draft, key: str, value: Any) -> None:
    """Read two numbers that are one array here, as `betas`."""
    draft.put(draft.rules[key].becomes, [number(draft.get(each)) for each in draft.rules[key].beside], key, value)


def recompute(draft: Draft, key: str, value: Any, every: int, first: int, word: str, note: str) -> None:
    """Recompute every so many blocks from the one numbered `first`; `word` where a glob cannot tell these."""
    ours = "shard.activation_checkpointing"
    if every == 1:
        draft.put(ours, "full", key, value)
    elif 10 % every == 0:  # blocks are told apart by the last digit of their number
        digits = "".join(str(digit) for digit in range(first, 10, every))
        draft.put(ours, {f"*[{digits}]": "full"}, key, value)
    else:
        draft.put(ours, word, key, value, "near", note)


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
    """Read which engine trains; MULTI_* is DistributedDataParallel, a whole copy in each rank."""
    kind = str(value).upper().removeprefix("DISTRIBUTEDTYPE.")
    if kind.startswith("MULTI_"):
        draft.put("shard.reshard_after_forward", "never", key, value)
        draft.replicate("ranks", key, value)
    elif kind == "NO":
        draft.ranks = draft.ranks or 1
        draft.tell(key, value, "command", "--nproc 1")
    else:
        draft.put_word(key, kind)


def processes(draft: Draft, key: str, value: Any) -> None:
    """Read the number of ranks of Accelerate's YAML; -1: said when the run is started."""
    count = integer(value)
    if count == -1:
        draft.tell(key, value, "command", "given when the run is started: --nproc")
        return
    draft.ranks = draft.ranks or positive(value)
    where = "" if draft.ranks == count else f"; {draft.ranks} counts instead"
    draft.tell(key, value, "command", f"--nproc, or torchrun's --nproc-per-node × --nnodes{where}")


def machines(draft: Draft, key: str, value: Any) -> None:
    draft.machines = positive(value)
    draft.tell(key, value, "command", "torchrun --nnodes" if draft.machines > 1 else "one machine")


def context(draft: Draft, key: str, value: Any) -> None:
    """Read the number of ranks that share a sequence, where they exchange keys and values."""
    note = "ranks exchange heads, there keys and values, as here where the ranks do not divide the heads"
    draft.put("shard.context", positive(value), key, value, "near", note)


# Batch sizes, which several keys decide together.


def batch(
    draft: Draft, per_rank: str = "", accumulate: str = "", total: str = "", microbatches: int | None = None
) -> None:
    """Set `train.batch_size` and `train.accumulate` from keys for the sequences of a rank, its microbatches, all ranks.

    Ranks that share matrices or sequences read the same samples, and count once.
    `microbatches`: how many times `per_rank` a rank has in a step; None: `train.accumulate` times.
    """
    sequences, whole = count(draft, per_rank), count(draft, total)
    if whole is not None:
        _batch_of_all_ranks(draft, whole, total, sequences, per_rank)
        return
    if total:
        draft.tell(total, draft.get(total), "always", f"not given: {per_rank} × ranks")
    if accumulate:
        draft.put("train.accumulate", count(draft, accumulate) or 1, accumulate, draft.get(accumulate))
    microbatches = microbatches or draft.tree.get("train.accumulate", 1)
    factors = f"{f'{sequences} a rank' if sequences else 'sequences a rank'} × {draft.readers_in_words}"
    factors += f" × {microbatches} accumulated"
    if sequences is not None and draft.readers is not None:
        draft.put("train.batch_size", sequences * draft.readers * microbatches, per_rank, draft.get(per_rank))
        draft.origins["train.batch_size"] = factors
        return
    hint = "; --ranks works it out" if sequences and not draft.ranks else ""
    example = (sequences or 1) * (draft.readers or 1) * microbatches
    draft.ask("train.batch_size", str(example), f"{factors}{hint}")
    if per_rank:
        becomes = "train.batch_size, of a whole step"
        draft.tell(per_rank, draft.get(per_rank), "set", "which needs the number of ranks", becomes)


def _batch_of_all_ranks(draft: Draft, whole: int, total: str, sequences: int | None, per_rank: str) -> None:
    """Set the batch from that of all ranks; `train.accumulate` follows from what a rank takes at a time."""
    draft.put("train.batch_size", whole, total, draft.get(total))
    if sequences is None:
        if per_rank:
            draft.tell(per_rank, draft.get(per_rank), "always", "not given")
    elif draft.readers is None:
        each = f"{sequences} a rank × {draft.readers_in_words}"
        draft.ask("train.accumulate", "1", f"{whole} / ({each}); --ranks works it out")
        draft.tell(per_rank, draft.get(per_rank), "set", "which needs the number of ranks", "train.accumulate")
    else:
        microbatches, rest = divmod(whole, sequences * draft.readers)
        if rest or not microbatches:
            raise Wrong(
                f"{total} = {whole} is no multiple of {per_rank} = {sequences} × {draft.readers_in_words}; "
                f"change one of them, or --ranks"
            )
        note = f"{whole} of all / ({sequences} × {draft.readers_in_words})"
        draft.put("train.accumulate", microbatches, per_rank, draft.get(per_rank), "set", note)
        draft.origins["train.accumulate"] = note


def count(draft: Draft, key: str) -> int | None:
    """Return a key's number from 1 on; None where it is not given (absent, -1 or "auto")."""
    value = draft.get(key) if key else None
    if value is None or value in (-1, "auto"):
        return None
    try:
        return positive(value)
    except Wrong as error:
        raise Wrong(f"{key}: {error}") from None
