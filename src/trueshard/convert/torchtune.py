"""Single keys of torchtune for which a rule cannot say as data what they become.

Its YAML names a builder in each section (`_component_`), whose parameters are the other keys there. Weights lie in a
Hugging Face directory, so the builder of a model says only whether it has an adapter.
"""

from __future__ import annotations

import re
from collections.abc import Set
from typing import Any

from trueshard.convert.engine import Draft, boolean, checked, names, number, positive, table, text
from trueshard.convert.shared import batch, followed, mix, of_answers

MLP = ("gate_proj", "up_proj", "down_proj")
OF_PHI = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj") | dict.fromkeys(MLP[:2], "gate_up_proj")
"""Projections that are one matrix in phi's own weights."""


def prepare(tree: dict[str, Any], sections: Set[str]) -> dict[str, Any]:
    """Follow references, leave out what is null or only referred to, and call a component by its last part."""
    plain = _plain(followed(tree, tree))
    return {key: value for key, value in plain.items() if key in sections or f"${{{key}" not in str(tree)}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.rpartition(".")[2] if str(value).startswith("torchtune.") else value


def model(draft: Draft, key: str, value: Any) -> None:
    """Read the builder of the model, of which `qlora_…` quantizes the base."""
    if text(value).startswith("qlora_"):
        draft.put("model.quantize", "nf4", key)
    else:
        draft.tell(key, "always", "the directory of checkpointer.checkpoint_dir; an adapter by lora_attn_modules")


def targets(draft: Draft, key: str, value: Any) -> None:
    """Read the projections of attention with an adapter, and whether MLPs and the head have one."""
    of_mlp, of_head = (boolean(draft.get(other, False)) for other in draft.rules[key].beside)
    listed = [name.replace("output_proj", "o_proj") for name in names(value)]
    listed += [*MLP] * of_mlp + ["lm_head"] * of_head
    differs = ""
    if "phi" in str(draft.get("model._component_")):
        listed = list(dict.fromkeys(OF_PHI.get(name, name) for name in listed))
        differs = "q, k and v are one matrix in phi's weights, gate and up another: one adapter each"
    draft.put("adapter.targets", listed, key, differs=differs)


def dataset(draft: Draft, key: str, value: Any) -> None:
    """Read the builder of the data set, of which `dataset.source` names another one."""
    word, source = draft.word(key, value), draft.get("dataset.source")
    for ours, setting in word.sets.items():
        if source is None or ours != "data.path":
            draft.put(ours, setting, key, differs=word.differs)
    if word.none:
        draft.tell(key, "none", word.none)


def mixture(draft: Draft, key: str, value: Any) -> None:
    """Read several data sets, of which path and format stay."""
    listed = [table(source) for source in checked(value, isinstance(value, list), value, "an array of tables")]
    words = [draft.word("dataset._component_", source.get("_component_")).sets for source in listed]
    paths = [_place(source.get("source"), source.get("data_files")) for source in listed]
    paths = [path or sets.get("data.path") for path, sets in zip(paths, words, strict=True)]
    lost = {part for source in listed for part in source} - {"_component_", "source", "data_files", "transform"}
    mix(draft, key, [{"path": path} for path in paths if path], lost, {sets.get("data.format") for sets in words})


def _place(kind: Any, files: Any) -> Any:
    return files if kind in ("json", "csv", "parquet", "text") and files else kind


def source(draft: Draft, key: str, value: Any) -> None:
    draft.put("data.path", text(_place(value, draft.get("dataset.data_files"))), key)


def split(draft: Draft, key: str, value: Any) -> None:
    """Read the split; where the validation data are the rest of it, they are held out of the whole."""
    held, match = str(draft.get("dataset_val.split")), re.fullmatch(r"(\w+)\[:(\d+)%\]", text(value))
    if match and draft.get("run_val_every_n_steps") and held == f"{match[1]}[{match[2]}%:]":
        draft.put("data.split", match[1], key, differs=f"{held} is evaluation.fraction, of samples chosen by seed")
        draft.put("evaluation.fraction", round(1 - int(match[2]) / 100, 4), key)
    elif value != "train" and draft.get("dataset.data_files") is not None:
        draft.tell(key, "none", "a file is read whole; [evaluation] fraction holds a part of it out")
    else:
        draft.put("data.split", value, key)


def epochs(draft: Draft, key: str, value: Any) -> None:
    """Read `epochs`, with at most `max_steps_per_epoch` in each."""
    most = draft.get("max_steps_per_epoch")
    if most is None:
        draft.put("train.epochs", number(value), key)
    else:
        steps = positive(most) * positive(value)
        draft.put("train.steps", steps, key, differs="there fewer, if an epoch of the data has fewer")


def optimizer(draft: Draft, key: str, value: Any) -> None:
    """Read the class of the optimizer; moments in 8 bits, or in pages of the host, are sharded moments here."""
    if text(value).startswith("bitsandbytes.") and "AdamW" in value:
        draft.put("optimizer.class", "torch.optim.AdamW", key, differs=draft.rules[key].otherwise)
    else:
        draft.put("optimizer.class", value, key)
    draft.put("optimizer.no_decay", [], key)


def argument(draft: Draft, key: str, value: Any) -> None:
    draft.put(f"optimizer.arguments.{key.rpartition('.')[2]}", value, key)


def finish(draft: Draft) -> None:
    """Set what several keys decide, and what absent keys mean; ask for what no key says."""
    batch(draft, "batch_size", "gradient_accumulation_steps")
    if not any(key.startswith("lr_scheduler.") for key in draft.given):
        draft.put("schedule.decay", "constant", "lr_scheduler._component_", given="none")
    is_alpaca = str(draft.get("dataset._component_")).startswith("alpaca")
    of_answers(draft, "dataset.packed", "dataset.train_on_input", is_alpaca)
    if "evaluation.every" in draft.tree and "evaluation.fraction" not in draft.tree:
        draft.ask("evaluation.path", '"path/to/held_out"', "left out, a part of the data is held out")
    draft.ask("train.sequence_length", "2048", "tokens of the longest sample, without bound there")
