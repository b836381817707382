"""Single keys of verl for which a rule cannot say as data what they become.

Its YAML is laid by Hydra over verl's own files, so that absent keys have the defaults of these. A composed file (as
Hydra writes beside a run) has all keys, and references such as `${oc.select:data.max_prompt_length,512}`.
"""

from __future__ import annotations

import re
from collections.abc import Set
from typing import Any

import yaml

from trueshard.convert import reinforcement
from trueshard.convert.engine import Draft, Wrong, boolean, number, positive, table, text

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"
REFERENCE = re.compile(r"\$\{([^${}]*)\}")
MISSING = "???"


def prepare(tree: dict[str, Any], sections: Set[str]) -> dict[str, Any]:
    """Follow references, and leave out Hydra's `_target_` and what it marks as missing."""
    return dict(_resolved(tree, tree, ()))


def _resolved(value: Any, tree: dict[str, Any], place: tuple[str, ...]) -> Any:
    if isinstance(value, dict):
        inner = {
            str(key): _resolved(each, tree, (*place, str(key))) for key, each in value.items() if key != "_target_"
        }
        return {key: each for key, each in inner.items() if each != MISSING}
    if not isinstance(value, str):
        return value
    for _ in range(20):
        found = REFERENCE.search(value)
        if found is None:
            break
        replacement = _referred(found[1], tree, place)
        if replacement is REFERENCE:
            break
        if found[0] == value.strip():
            return _resolved(replacement, tree, place)
        value = value.replace(found[0], str(replacement))
    return value


def _referred(reference: str, tree: dict[str, Any], place: tuple[str, ...]) -> Any:
    """Return what `key`, `.neighbour` or `oc.select:key,default` stands for; `REFERENCE` if that is not known."""
    kind, colon, rest = reference.partition(":")
    if colon and kind != "oc.select":
        return REFERENCE
    key, comma, default = (rest if colon else reference).partition(",")
    dots = len(key) - len(key.lstrip("."))
    path = [*place[: len(place) - dots], *key.lstrip(".").split(".")] if dots else key.strip().split(".")
    result: Any = tree
    for part in path:
        if not isinstance(result, dict) or part not in result:
            return (yaml.safe_load(default) if comma else None) if colon else REFERENCE
        result = result[part]
    return result


def advantage(draft: Draft, key: str, value: Any) -> None:
    """Read `adv_estimator`; GRPO without `norm_adv_by_std_in_grpo` is that of Dr. GRPO."""
    word, divided = str(value).lower(), draft.rules[key].beside[0]
    if word in ("grpo", "grpo_vectorized") and not boolean(draft.get(divided)):
        draft.word(key, value)
        draft.put("rl.advantage", "centred", key, value)
    else:
        draft.put_word(key, value)


def filtering(draft: Draft, key: str, value: Any) -> None:
    note = f"by the reward; there by {draft.get('algorithm.filter_groups.metric') or 'the reward'}"
    reinforcement.skip_equal(draft, key, value, "algorithm.filter_groups.max_num_gen_batches", note)


def correction(draft: Draft, key: str, value: Any) -> None:
    """Read `rollout_is` with its threshold, a number or "lower_upper"."""
    threshold = f"{CORRECTION}.rollout_is_threshold"
    bounds = _bounds(draft.get(threshold))
    if str(value).lower() != "token":
        draft.tell(
            key, value, "none", 'weights are of tokens; rollout.correction = "sequence_mask" masks whole answers'
        )
        draft.tell(threshold, draft.get(threshold), "always", f"with {key}")
        return
    draft.put("rollout.correction", "mask" if bounds[0] else "truncate", key, value)
    draft.put("rollout.bounds", bounds, threshold, draft.get(threshold))


def rejection(draft: Draft, key: str, value: Any) -> None:
    """Read `rollout_rs` with its threshold: ratios engine / trainer there, trainer / engine here."""
    threshold = f"{CORRECTION}.rollout_rs_threshold"
    lower, upper = _bounds(draft.get(threshold))
    if str(value).lower() != "seq_sum_k1" or not lower or draft.get(f"{CORRECTION}.rollout_is"):
        why = "masks here: tokens, or answers by the product over their tokens (rollout.correction)"
        draft.tell(key, value, "none", why)
        draft.tell(threshold, draft.get(threshold), "always", f"with {key}")
        return
    draft.put("rollout.correction", "sequence_mask", key, value)
    inverse = [round(1 / upper, 12), round(1 / lower, 12)]
    draft.put("rollout.bounds", inverse, threshold, draft.get(threshold), "set", "trainer / engine; there the inverse")


def threshold(draft: Draft, key: str, value: Any) -> None:
    """Tell a threshold that nothing looks at."""
    if not draft.get(draft.rules[key].beside[0]):
        draft.tell(key, value, "always", f"of effect with {draft.rules[key].beside[0]}")


def _bounds(value: Any) -> list[float]:
    parts = [number(each) for each in str(value if value is not None else 2.0).split("_")]
    if len(parts) > 2 or parts != sorted(parts):
        raise Wrong(f'found {value!r}, wanted a number, or "lower_upper"')
    return [0.0, *parts][-2:]


def validation(draft: Draft, key: str, value: Any) -> None:
    """Read `val_kwargs`; without `do_sample` the likeliest token is always taken."""
    sampled = boolean(draft.get(f"{ROLLOUT}.val_kwargs.do_sample") or False)
    if draft.rules[key].becomes == "evaluation.answers" or sampled:
        reinforcement.evaluated(draft, key, value)
    elif reinforcement.asked(draft, draft.rules[key].beside[0]) and key.endswith("temperature"):
        draft.put("evaluation.temperature", 0.0, key, value, "set", "do_sample = false")
    else:
        draft.tell(key, value, "always", "of effect with do_sample, for a validation that is asked for")


def overlong(draft: Draft, key: str, value: Any) -> None:
    """Read the buffer of DAPO's reward manager: `enable`, `len`, `penalty_factor`."""
    given = table(value)
    most = positive(draft.get("data.max_response_length"))
    if not boolean(given.get("enable") or False):
        draft.tell(key, value, "always", "not asked for")
    elif number(given.get("penalty_factor", 1.0)) != 1:
        draft.tell(key, value, "none", "rl.overlong falls by 1; multiply the other rewards, or let the function do it")
    else:
        draft.put("rl.overlong", {"from": most - positive(given["len"])}, key, value)


def optimizer(draft: Draft, key: str, value: Any) -> None:
    package = text(draft.get(f"{ACTOR}.optim.optimizer_impl"))
    draft.put("optimizer.class", f"{package}.{text(value)}", key, value)
    draft.put("optimizer.no_decay", [], key, value)


def finish(draft: Draft) -> None:
    """Set what several keys decide: clipping, length, batches, the folder."""
    _clip(draft)
    asked, answer = (reinforcement.whole(draft, f"data.max_{part}_length") for part in ("prompt", "response"))
    draft.put("train.sequence_length", asked + answer, "data.max_prompt_length", asked, "set", f"{asked} + {answer}")
    draft.origins["train.sequence_length"] = f"{asked} of the prompt + {answer} of the answer"
    each = reinforcement.samples(draft, f"{ROLLOUT}.n")
    dynamic, tokens = boolean(draft.get(f"{ACTOR}.use_dynamic_bsz")), f"{ACTOR}.ppo_max_token_len_per_gpu"
    micro_key = tokens if dynamic else f"{ACTOR}.ppo_micro_batch_size_per_gpu"
    micro = draft.get(micro_key)
    micro = None if micro is None else max(1, positive(micro) // (asked + answer)) if dynamic else positive(micro)
    reinforcement.batches(draft, "data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size", each, micro, micro_key)
    other = f"{ACTOR}.ppo_micro_batch_size_per_gpu" if dynamic else tokens
    draft.tell(other, draft.get(other), "always", f"{micro_key.rpartition('.')[2]} counts instead")
    reinforcement.start(draft, "data.train_files")
    reinforcement.folder(draft)


def _clip(draft: Draft) -> None:
    loss = str(draft.get(f"{ACTOR}.policy_loss.loss_mode")).lower()
    whole, low, high, dual = (
        f"{ACTOR}.{name}" for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c")
    )
    keys = [key if draft.get(key) is not None else whole for key in (low, high)]
    reinforcement.clip(draft, *keys)
    for key in {whole, low, high} - set(keys):
        others = "clip_ratio_low and clip_ratio_high count" if key == whole else "clip_ratio counts"
        draft.tell(key, draft.get(key), "always", f"{others} instead")
    if loss == "vanilla":
        draft.put("rl.dual_clip", number(draft.get(dual)), dual, draft.get(dual))
    else:
        draft.tell(dual, draft.get(dual), "always", f"not looked at with {loss}")
    reinforcement.soft(draft, loss == "sapo", f"{ACTOR}.tau_pos", f"{ACTOR}.tau_neg")
