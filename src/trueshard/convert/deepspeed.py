"""DeepSpeed's JSON, where it needs more than rules: "auto" is what the script says, and so is not given."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from trueshard.convert.engine import Draft
from trueshard.convert.shared import batch, count


def prepare(tree: dict[str, Any], sections: Set[str]) -> dict[str, Any]:
    """Return the tree without what is "auto"; older spellings in the present one."""
    found = {key: prepare(value, sections) if isinstance(value, dict) else value for key, value in tree.items()}
    if "bfloat16" in found:
        found["bf16"] = found.pop("bfloat16")
    return {key: value for key, value in found.items() if value != "auto"}


def finish(draft: Draft) -> None:
    """Set the batch; of its three sizes there, any two say the third."""
    total, each, pieces = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    if count(draft, total) is None:
        batch(draft, each, pieces, total=total)
    elif count(draft, each) is None and (accumulated := count(draft, pieces)) is not None:
        batch(draft, total=total)
        draft.put("train.accumulate", accumulated, pieces, accumulated)
    else:
        batch(draft, each, total=total)
        draft.tell(pieces, draft.get(pieces), "set", "by the other two sizes", "train.accumulate")
    draft.ask("train.sequence_length", "1024", "tokens a sequence, as your script has it")
