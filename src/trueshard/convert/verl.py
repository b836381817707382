"""Single keys of verl for which a rule cannot say as data what they become.

Its YAML is laid by Hydra over verl's own files, so that absent keys have the defaults of these. A composed file (as
Hydra writes beside a run) has all keys, and references such as `${oc.select:data.max_prompt_length,512}`.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from trueshard.convert import reinforcement
from trueshard.convert.engine import NOT_ASKED, Draft, boolean, checked, number, positive, table, text
from trueshard.convert.shared import followed

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def prepare(tree: dict[str, Any], sections: Set[str]) -> dict[str, Any]:
    return dict(followed(tree, tree))


def advantage(draft: Draft, key: str, value: Any) -> None:
    """Read `adv_estimator`; GRPO without `norm_adv_by_std_in_grpo` is that of Dr. GRPO."""
    if str(value).lower() in ("grpo", "grpo_vectorized") and not boolean(draft.get(draft.rules[key].beside[0])):
        draft.put("rl.advantage", "centred", key)
    else:
        draft.put_word(key, value)


def filtering(draft: Draft, key: str, value: Any) -> None:
    metric, most = draft.rules[key].beside
    note = f"by the reward; there by {draft.get(metric) or 'the reward'}"
    reinforcement.skip_equal(draft, key, value, most, note)


def correction(draft: Draft, key: str, value: Any) -> None:
    """Read `rollout_is` with its threshold, a number or "lower_upper"."""
    threshold = draft.rules[key].beside[0]
    bounds = _bounds(draft.get(threshold))
    if str(value).lower() == "token":
        draft.put("rollout.correction", "mask" if bounds[0] else "truncate", key)
        draft.put("rollout.bounds", bounds, threshold)
    else:
        draft.tell(key, "none", 'weights are of tokens; rollout.correction = "sequence_mask" masks whole answers')
        draft.tell(threshold, "always", f"with {key}")


def rejection(draft: Draft, key: str, value: Any) -> None:
    """Read `rollout_rs` with its threshold: ratios engine / trainer there, trainer / engine here."""
    threshold, weights = draft.rules[key].beside
    lower, upper = _bounds(draft.get(threshold))
    if str(value).lower() == "seq_sum_k1" and lower and not draft.get(weights):
        draft.put("rollout.correction", "sequence_mask", key)
        inverse = [round(1 / upper, 12), round(1 / lower, 12)]
        draft.put("rollout.bounds", inverse, threshold, "trainer / engine; there the inverse")
    else:
        draft.tell(key, "none", "masks here: tokens, or answers by the product over their tokens (rollout.correction)")
        draft.tell(threshold, "always", f"with {key}")


def threshold(draft: Draft, key: str, value: Any) -> None:
    """Tell a threshold that nothing looks at."""
    if not draft.get(draft.rules[key].beside[0]):
        draft.tell(key, "always", f"of effect with {draft.rules[key].beside[0]}")


def _bounds(value: Any) -> list[float]:
    parts = [number(part) for part in str(value if value is not None else 2.0).split("_")]
    checked(parts, len(parts) <= 2 and parts == sorted(parts), value, 'a number, or "lower_upper"')
    return [0.0, *parts][-2:]


def validation(draft: Draft, key: str, value: Any) -> None:
    """Read `val_kwargs`; without `do_sample` the likeliest token is always taken."""
    sampled = boolean(draft.get(f"{ROLLOUT}.val_kwargs.do_sample") or False)
    if draft.rules[key].becomes == "evaluation.answers" or sampled:
        reinforcement.evaluated(draft, key, value)
    elif reinforcement.is_evaluated(draft, draft.rules[key].beside[0]) and key.endswith("temperature"):
        draft.put("evaluation.temperature", 0.0, key, "do_sample = false")
    else:
        draft.tell(key, "always", "of effect with do_sample, for a validation that is asked for")


def overlong(draft: Draft, key: str, value: Any) -> None:
    """Read the buffer of DAPO's reward manager: `enable`, `len`, `penalty_factor`."""
    buffer = table(value)
    longest = positive(draft.get("data.max_response_length"))
    if not boolean(buffer.get("enable") or False):
        draft.tell(key, *NOT_ASKED)
    elif number(buffer.get("penalty_factor", 1.0)) != 1:
        draft.tell(key, "none", "rl.overlong falls by 1; multiply the other rewards, or let the function do it")
    else:
        draft.put("rl.overlong", {"from": longest - positive(buffer.get("len"))}, key)


def optimizer(draft: Draft, key: str, value: Any) -> None:
    package = text(draft.get(draft.rules[key].beside[0]))
    draft.put("optimizer.class", f"{package}.{text(value)}", key)
    draft.put("optimizer.no_decay", [], key)


def finish(draft: Draft) -> None:
    """Set what several keys decide: clipping, length, batches, the folder."""
    loss = str(draft.get(f"{ACTOR}.policy_loss.loss_mode")).lower()
    of_both, *bounds = (f"{ACTOR}.{name}" for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"))
    low, high = (key if draft.get(key) is not None else of_both for key in bounds)
    reinforcement.clip(draft, low, high)
    for key in {of_both, *bounds} - {low, high}:
        others = "clip_ratio_low and clip_ratio_high count" if key == of_both else "clip_ratio counts"
        draft.tell(key, "always", f"{others} instead")
    reinforcement.dual_clip(draft, f"{ACTOR}.clip_ratio_c", loss, loss == "vanilla")
    reinforcement.soft(draft, loss, f"{ACTOR}.tau_pos", f"{ACTOR}.tau_neg")
    length = reinforcement.lengths(draft)
    of_prompt = reinforcement.samples(draft, f"{ROLLOUT}.n")
    keys = [f"{ACTOR}.ppo_micro_batch_size_per_gpu", f"{ACTOR}.ppo_max_token_len_per_gpu"]
    is_dynamic = boolean(draft.get(f"{ACTOR}.use_dynamic_bsz"))
    counts, other = reversed(keys) if is_dynamic else keys
    micro = None if draft.get(counts) is None else positive(draft.get(counts))
    if micro is not None and is_dynamic:
        micro = max(1, micro // length)  # tokens of a microbatch → answers that they surely hold
    reinforcement.batches(draft, "data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size", of_prompt, micro, counts)
    draft.tell(other, "always", f"{counts.rpartition('.')[2]} counts instead")
    reinforcement.start(draft, "data.train_files")
    reinforcement.folder(draft)
