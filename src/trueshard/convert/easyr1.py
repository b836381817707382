"""Single keys of EasyR1 for which a rule cannot say as data what they become.

Its file is laid over the defaults of its classes, so that absent keys have these.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from trueshard.convert import reinforcement
from trueshard.convert.engine import Draft, boolean, integer, number

ROLLOUT, MINIBATCH = "data.rollout_batch_size", "worker.actor.global_batch_size"
FILTER_KEYS = ("algorithm.filter_key", "algorithm.filter_low", "algorithm.filter_high")
DECIDES_EVALUATION = {
    "evaluation.temperature": "worker.rollout.temperature",
    "evaluation.top_p": "worker.rollout.top_p",
    "evaluation.top_k": "worker.rollout.top_k",
}
DUAL = "worker.actor.clip_ratio_dual"


def prepare(tree: dict[str, Any], sections: Set[str]) -> dict[str, Any]:
    return {key: value for key, value in tree.items() if key != "config"}


def filtering(draft: Draft, key: str, value: Any) -> None:
    """Read `online_filtering` with its key and bounds."""
    which, low, high = (draft.get(each) for each in FILTER_KEYS)
    note = f"groups whose rewards are all equal; there those whose mean {which} is not within {low} … {high}"
    reinforcement.skip_equal(draft, key, value, "trainer.max_try_make_batch", note)


def finish(draft: Draft) -> None:
    """Set what several keys decide: clipping, length, batches, evaluation, the folder."""
    loss = str(draft.get("worker.actor.loss_type")).lower()
    reinforcement.clip(draft, "worker.actor.clip_ratio_low", "worker.actor.clip_ratio_high")
    if loss in ("cispo", "sapo"):
        draft.tell(DUAL, draft.get(DUAL), "always", f"not looked at with {loss}")
    else:
        draft.put("rl.dual_clip", number(draft.get(DUAL)), DUAL, draft.get(DUAL))
    reinforcement.soft(draft, loss == "sapo", "worker.actor.tau_positive", "worker.actor.tau_negative")
    asked, answer = (reinforcement.whole(draft, f"data.max_{part}_length") for part in ("prompt", "response"))
    draft.put("train.sequence_length", asked + answer, "data.max_prompt_length", asked, "set", f"{asked} + {answer}")
    draft.origins["train.sequence_length"] = f"{asked} of the prompt + {answer} of the answer"
    micro = "worker.actor.micro_batch_size_per_device_for_update"
    each = reinforcement.samples(draft, "worker.rollout.n")
    reinforcement.batches(draft, ROLLOUT, MINIBATCH, each, reinforcement.whole(draft, micro), micro)
    if "evaluation.every" in draft.tree:
        for ours, theirs in DECIDES_EVALUATION.items():
            if ours not in draft.tree:
                draft.put(ours, reinforcement.EVALUATED[ours](draft.get(theirs)), theirs, draft.get(theirs))
    reinforcement.start(draft, "data.train_files")
    reinforcement.folder(draft)


def images(draft: Draft, key: str, value: Any) -> None:
    """Read how many images a prompt may have: any means that there are."""
    if integer(value or 0) > 0:
        draft.put("data.images", True, key, value)
    else:
        draft.tell(key, value, "always", "data.images says whether records have images")


def frozen_tower(draft: Draft, key: str, value: Any) -> None:
    if boolean(value or False):
        draft.put("model.freeze", ["*visual.*"], key, value)
    else:
        draft.tell(key, value, "always", "not asked for")
