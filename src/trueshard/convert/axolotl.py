"""Single keys of Axolotl for which a rule cannot say as data what they become.

Its YAML means arguments of transformers' `Trainer`, most under their names, and in `trl` fields of TRL's `GRPOConfig`:
these have the rules of their own frameworks.
"""

from __future__ import annotations

import re
from collections.abc import Set
from typing import Any

from trueshard.convert import huggingface, trl
from trueshard.convert.engine import Draft, Wrong, boolean, checked, integer, names, number, positive, table, text
from trueshard.convert.shared import batch, mix, of_answers

OF_ONE = {"name": "data.subset", "split": "data.split", "field": "data.field", "text_column": "data.field"}
"""Keys of a data set → ours, which are those of all sources."""
TAKEN = {"ds_type", "path", "type", "data_files", "trust_remote_code", "roles"}
AS_HERE = {
    "field_messages": ("messages", "conversations"),
    "message_property_mappings": ({"role": "role", "content": "content"}, {"role": "from", "content": "value"}),
    "message_field_role": ("role", "from"),
    "message_field_content": ("content", "value"),
    "roles_to_train": (["assistant"], ["gpt"]),
    "train_on_eos": ("turn",),
    "field_chosen": ("chosen",),
    "field_rejected": ("rejected",),
}
"""Keys of a data set and the values of them that are so here."""
CUT = ("chat", "completion", "instruction", "preference")
LONG = {"truncate": "cut", "raise": "error"}
"""Formats whose records may be left out, and words for what becomes of long ones."""


def prepare(tree: dict[str, Any], sections: Set[str]) -> dict[str, Any]:
    """Leave out what is null, and take the fields of TRL out of `trl`."""
    tree = {str(key): value for key, value in tree.items() if value is not None}
    fields = table(tree.get("trl"))
    tree |= {name: fields.pop(name) for name in [*fields] if name in sections}
    return huggingface.prepare(tree | ({"trl": fields} if "trl" in tree else {}), sections)


def template(draft: Draft, key: str, value: Any) -> None:
    """Read a chat template: a file, the tokenizer's own, or the name of a family."""
    word, ours = text(value), "tokenizer.chat_template"
    family = re.match("[a-z]*", word.lower())
    if re.fullmatch(r"\S+\.(jinja2?|j2)", word):
        draft.put(ours, word, key)
    elif word.startswith(("tokenizer_default", "jinja")):
        draft.tell(key, "always", "the tokenizer's own, or ChatML where it has none")
    elif word == "chatml" or (family and family[0] and family[0] in str(draft.get("base_model")).lower()):
        draft.tell(key, "near", "the tokenizer's own, or ChatML where it has none; a base model may have none", ours)
    else:
        draft.tell(key, "none", f"the tokenizer's own is used; save another one as a file, and set {ours}")


def targets(draft: Draft, key: str, value: Any) -> None:
    """Read ends of names of layers, or a pattern over whole names."""
    if boolean(draft.get("lora_target_linear", False)):
        draft.tell(key, "always", "lora_target_linear has them all")
    else:
        is_pattern = isinstance(value, str) and re.search(r"[^\w.]", value)
        draft.put("adapter.targets", value if is_pattern else names(value), key)


def adapter_argument(draft: Draft, key: str, value: Any) -> None:
    draft.put(f"adapter.arguments.{key.partition('_')[2]}", value, key)


def data(draft: Draft, key: str, value: Any) -> None:
    """Read a list of data sets: paths, and one format; what concerns records is lost by name."""
    listed = [table(source) for source in checked(value, isinstance(value, list), value, "an array of tables")]
    sources, lost, formats = [], set[str](), set[str | None]()
    for source in listed:
        files = source.get("data_files")
        files = files[0] if isinstance(files, list) and len(files) == 1 else files
        sources.append({"path": text(files if isinstance(files, str) else source.get("path"))})
        lost |= {"data_files"} if isinstance(files, list) else set()
        word = draft.word(key, re.split(r"[.:]", str(source.get("type")))[0])
        form = word.sets.get("data.path")
        lost |= {"type"} if word.none else set()
        formats.add("vision" if form == "chat" and "processor_type" in draft.given else form)
        for name in set(source) - TAKEN:
            if name in OF_ONE and len(listed) == 1:
                draft.put(OF_ONE[name], source[name], key, given=source[name])
            elif source[name] not in (None, *AS_HERE.get(name, ())):
                lost.add(name)
    mix(draft, key, sources, lost, {None} if draft.get("rl") else formats)
    if key == "pretraining_dataset" and integer(draft.get("max_steps", -1)) > 0:
        draft.put("data.streaming", True, key)


def held_out(draft: Draft, key: str, value: Any) -> None:
    """Read the evaluation's data: sets of their own, or a share or number of the samples."""
    if isinstance(value, list):
        differs = "the first of them" if len(value) > 1 else ""
        draft.put("evaluation.path", text(table(value[0]).get("path")), key, differs=differs)
    elif number(value) < 1:
        draft.put("evaluation.fraction", number(value), key)
    else:
        draft.tell(key, "none", "a number of samples; set evaluation.fraction, a share of them")
        draft.ask("evaluation.fraction", "0.05", f"{value} of all samples")


def in_an_epoch(draft: Draft, key: str, value: Any) -> None:
    share = 1 / (positive(value) * number(draft.get("num_epochs")))
    huggingface.in_steps(draft, draft.rules[key].becomes, key, min(share, 1 - 1e-9))  # from 1 on it is a number


def zero(draft: Draft, key: str, value: Any) -> None:
    """Read DeepSpeed's file by its name, or its table: which stage of ZeRO, and whether it offloads."""
    plain = str(value).lower()
    stage = re.search(r"zero(\d)|'stage': (\d)", plain)
    if stage is None:
        draft.tell(key, "none", draft.rules[key].otherwise)
        return
    reshard = "always" if "3" in stage.groups() else "never"
    differs = "by its name or stage; for the rest of it: trueshard convert FILE --from deepspeed"
    draft.put("shard.reshard_after_forward", reshard, key, differs=differs)
    if "offload" in plain:
        draft.put("shard.offload", "cpu", key)


def plugins(draft: Draft, key: str, value: Any) -> None:
    lost = [name for name in names(value) if not any(word in name for word in draft.rules[key].beside)]
    draft.tell(key, "none" if lost else "always", draft.rules[key].why, value=lost or value)


def tracker(draft: Draft, key: str, value: Any) -> None:
    """Read switches and projects of trackers together."""
    on = [other for other in draft.rules[key].keys if str(draft.get(other, "")).lower() not in ("", "false")]
    draft.put("log.to", list(dict.fromkeys(re.sub("^use_|_.*", "", other) for other in on)), key)
    if not key.startswith("use_"):
        draft.put("log.project", text(value), key)


def finish(draft: Draft) -> None:
    """Set what several keys decide: the batch, the layers of an adapter, what counts in the loss."""
    micro, accumulated, of_rank = "micro_batch_size", "gradient_accumulation_steps", "batch_size"
    linear = "lora_target_linear"
    if of_rank in draft.given and accumulated not in draft.given:
        if draft.count(of_rank) % draft.count(micro):
            raise Wrong(f"{micro} does not divide {of_rank}; change one of them")
        draft.put("train.accumulate", draft.count(of_rank) // draft.count(micro), of_rank, f"/ {micro}")
        accumulated = ""
    else:
        draft.tell(of_rank, "always", f"{accumulated} counts instead")
    batch(draft, micro, accumulated)
    if draft.get("adapter"):
        if boolean(draft.get(linear, False)):
            draft.put("adapter.targets", "all-linear", linear)
        else:
            draft.tell(linear, "always", "not asked for")
        if draft.tree.get("shard.mixed_precision") == "bf16":
            draft.put("model.dtype", "bfloat16", "adapter", "the base's")
    else:
        draft.tell(linear, "always", "of no effect without adapter")
    of_answers(draft, "sample_packing", "train_on_inputs")
    what, word = "excess_length_strategy", draft.get("excess_length_strategy", "drop")
    if draft.tree.get("data.format") in CUT:
        draft.put("data.long", LONG.get(str(word), word), what, given=word)
    else:
        draft.tell(what, "always", "of effect with conversations")
    if draft.tree.get("data.format") == "prompt":
        trl.policy(draft, micro, "gradient_accumulation_steps")
