"""Functions that rules of EasyR1, verl and TRL name: rollouts, minibatches, evaluation, data and rewards; EasyR1's own.

EasyR1 and verl count steps in rollouts, and batches in prompts; here both are those of the optimizer, in answers. So
numbers of steps are multiplied by the minibatches of a rollout (`rl.updates`), and batches by the answers to a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any

from trueshard.convert.engine import NOT_ASKED, Draft, Wrong, boolean, checked, integer, number, numbers, positive, text
from trueshard.convert.shared import pieces

IN_GROUPS = ("group", "centred", "leave_one_out")
"""Words of rl.advantage that compare the answers to a prompt."""


def several(value: Any) -> list[str]:
    """Read a word, an array of words, or nothing."""
    listed = [value] if isinstance(value, str) else value or []
    good = isinstance(listed, list) and all(isinstance(word, str) for word in listed)
    return [word for word in checked(listed, good, value, "a word, or an array of words") if word]


def samples(draft: Draft, key: str) -> int:
    """Set `rl.samples` from their key, or ask for it; return it, or what the question suggests."""
    count = draft.count(key) if draft.get(key) else 1
    advantage = draft.tree.get("rl.advantage", "group")
    if count > 1 or ("rl.advantage" not in draft.asked and advantage not in IN_GROUPS):
        draft.put("rl.samples", count, key)
        return count
    if key in draft.given and "rl.advantage" not in draft.asked:
        raise Wrong(f'{key} = 1: rl.advantage = "{advantage}" compares answers; give 2 or more')
    draft.ask("rl.samples", "8", "answers to each prompt")
    draft.tell(key, "set", "at least 2, for an advantage among answers", "rl.samples")
    return 8


def updates(draft: Draft, rollout: str, minibatch: str) -> int:
    """Return the minibatches of a rollout; raises `Wrong` if they do not divide it."""
    of_rollout, of_step = draft.count(rollout), draft.count(minibatch)
    if of_rollout % of_step:
        raise Wrong(f"{rollout} = {of_rollout} is no multiple of {minibatch} = {of_step}; change one of them")
    return of_rollout // of_step


def steps(draft: Draft, key: str, value: Any) -> None:
    """Read a number of rollouts as steps of the optimizer; -1, or nothing: not asked for."""
    rule, count = draft.rules[key], integer(value if value is not None else -1)
    if count < 0 or (count == 0 and not rule.becomes.endswith("warmup_steps")):
        draft.tell(key, *NOT_ASKED)
        return
    times = updates(draft, *rule.beside)
    draft.put(rule.becomes, count * times, key, f"× {times} updates of a rollout" if times > 1 and count else "")


def warmup_share(draft: Draft, key: str, value: Any) -> None:
    """Read the share of all rollouts in which the learning rate rises; `beside`: the number, all rollouts, batches."""
    steps_key, all_key, rollout, minibatch = draft.rules[key].beside
    share, instead = number(value or 0), draft.given.get(steps_key)
    if instead is not None and integer(instead) >= 0 and (integer(instead) or share == 0):
        draft.tell(key, "always", f"{steps_key} counts instead")
    elif not share:
        draft.tell(key, *NOT_ASKED)
    elif draft.get(all_key) is None:
        draft.tell(key, "none", "a share of steps that are not known yet; set schedule.warmup_steps")
        draft.ask("schedule.warmup_steps", "100", f"{share} of all steps")
    else:
        rollouts = draft.count(all_key)
        count = int(share * rollouts) * updates(draft, rollout, minibatch)
        draft.put("schedule.warmup_steps", count, key, f"of {rollouts} rollouts")


def passes(draft: Draft, key: str, value: Any) -> None:
    """Read how often the answers of a rollout are trained on."""
    if positive(value) > 1:
        draft.tell(key, "none", "answers are trained on once; more minibatches of a rollout are rl.updates")
    else:
        draft.tell(key, "always", "each answer is trained on once")


def lengths(draft: Draft) -> int:
    """Set `train.sequence_length` from the lengths of a prompt and of an answer, and return it."""
    key = "data.max_prompt_length"
    prompt, answer = draft.count(key), draft.count("data.max_response_length")
    draft.put("train.sequence_length", prompt + answer, key, f"{prompt} + {answer}", given=prompt)
    draft.origins["train.sequence_length"] = f"{prompt} of the prompt + {answer} of the answer"
    return prompt + answer


def batches(draft: Draft, rollout: str, minibatch: str, of_prompt: int, micro: int | None, micro_key: str) -> None:
    """Set `rl.updates` and `train.batch_size`, and `train.accumulate` from ``micro`` answers of a rank at a time.

    ``of_prompt``: answers to a prompt. A key of theirs with prompts of a step is multiplied by it.
    """
    prompts = draft.count(minibatch)
    answers = prompts * of_prompt
    draft.put("rl.updates", updates(draft, rollout, minibatch), rollout, f"/ {minibatch}")
    if "rl.samples" in draft.tree:
        draft.put("train.batch_size", answers, minibatch, f"× {of_prompt} answers to a prompt")
        draft.origins["train.batch_size"] = f"{prompts} prompts × {of_prompt} answers"
    else:
        draft.ask("train.batch_size", str(answers), f"{prompts} prompts × rl.samples")
        draft.tell(minibatch, "set", "× answers to a prompt", "train.batch_size", prompts)
    if micro is None:
        draft.tell(micro_key, "always", "not given")
    elif draft.ranks is None or "train.batch_size" not in draft.tree:
        draft.ask("train.accumulate", "1", f"{answers} / ({micro} a rank × ranks)")
        draft.tell(micro_key, "set", "which needs the number of ranks and of answers", "train.accumulate")
    elif answers % draft.ranks:
        remedy = f"change --ranks, or {micro_key}'s batch"
        raise Wrong(f"{answers} answers of a step are no multiple of {draft.ranks} ranks; {remedy}")
    else:
        of_rank = answers // draft.ranks
        count = pieces(of_rank, micro)
        note = f"{answers} of all / ({of_rank // count} × {draft.ranks} ranks)"
        draft.put("train.accumulate", count, micro_key, note)
        draft.origins["train.accumulate"] = note


def copies(draft: Draft, key: str, value: Any) -> None:
    """Read over how many ranks the model is sharded; fewer than all: full copies, `shard.replicate`."""
    size = integer(value if value is not None else -1)
    if size <= 0 or (draft.ranks is not None and size >= draft.ranks):
        draft.tell(key, "always", "sharded over all ranks")
    elif draft.ranks is None:
        draft.ask("shard.replicate", "1", f"ranks / {size}")
        draft.tell(key, "set", "which needs the number of ranks", "shard.replicate")
    else:
        checked(size, draft.ranks % size == 0, size, f"a divisor of {draft.ranks} ranks")
        draft.put("shard.replicate", draft.ranks // size, key, f"{draft.ranks} ranks / {size}")


def devices(draft: Draft, key: str, value: Any) -> None:
    """Read the devices of a machine, and `beside` how many machines: together the ranks."""
    draft.machines = positive(draft.get(draft.rules[key].beside[0]) or 1)
    ranks = positive(value) * draft.machines
    draft.ranks = draft.ranks or ranks
    draft.tell(key, "command", "--nproc" if draft.ranks == ranks else f"--nproc; {draft.ranks} ranks count instead")


# Evaluation: `beside` is the key of how often it is done.


def is_evaluated(draft: Draft, every: str) -> bool:
    return integer(draft.get(every, -1)) > 0


def evaluated(draft: Draft, key: str, value: Any) -> None:
    """Read one of the settings of evaluation, if there is one."""
    ours, every = draft.rules[key].becomes, draft.rules[key].beside[0]
    if not is_evaluated(draft, every) or value is None:
        draft.tell(key, "always", "no validation is asked for" if value is not None else "not asked for")
    else:
        draft.put(ours, EVALUATED[ours.removeprefix("evaluation.")](value), key)


EVALUATED: dict[str, Callable[[Any], float]] = {
    "temperature": number,
    "top_p": number,
    "top_k": lambda value: max(0, integer(value)),  # -1 and 0: all tokens
    "answers": positive,
}
"""Readers of keys of [evaluation]."""


def evaluate_as_trained(draft: Draft, keys: Mapping[str, str]) -> None:
    """Set keys of [evaluation] that are not set yet from those of training, where there is an evaluation."""
    for name, key in keys.items():
        if "evaluation.every" in draft.tree and f"evaluation.{name}" not in draft.tree:
            draft.put(f"evaluation.{name}", EVALUATED[name](draft.get(key)), key)


def held_out(draft: Draft, key: str, value: Any) -> None:
    """Read the validation data; `beside`: how often, and the training data, of whose split it must be."""
    every, training = draft.rules[key].beside
    (path, split), (_, of_training) = ((*several(of), "")[0].partition("@")[::2] for of in (value, draft.get(training)))
    if not is_evaluated(draft, every) or not path:
        draft.tell(key, "always", "no validation is asked for")
    elif split != of_training and (split or "train") != (of_training or "train"):
        why = f"evaluation.path has no split of its own; save {split or 'train'!r} as a file, and give that"
        draft.tell(key, "none", f"{why}. Left out, a part of the data is held out")
    else:
        draft.put("evaluation.path", path, key)


# Data and rewards.


def data(draft: Draft, key: str, value: Any) -> None:
    """Read the training data: a path, with @split as EasyR1 writes it, or several."""
    places = [place.partition("@")[::2] for place in several(value)]
    if not places:
        draft.tell(key, "always", "not given: data.path")
    elif len(places) > 1:
        draft.put("data.sources", [{"path": path} for path, _ in places], key)
    else:
        draft.put("data.path", places[0][0], key)
        if places[0][1]:
            draft.put("data.split", places[0][1], key)


def reward(draft: Draft, key: str, value: Any) -> None:
    """Read a reward function: EasyR1's "file:name", or verl's file, which has its name under a key beside it."""
    file, theirs = key.removesuffix(".path"), text(value)
    name = "main" if file == key else text(draft.get(f"{file}.name", "compute_score"))
    ours = theirs if ":" in theirs else f"{theirs}:{name}"
    draft.put("reward.function", ours, key, "called as there: its arguments are recognised")


def off_unless_enabled(draft: Draft, key: str, value: Any) -> None:
    """Read a table with a switch of its own (`enable`, `enabled`, `mode`): nothing is lost while it is off."""
    on = value if not isinstance(value, dict) else next((value[name] for name in SWITCHES if name in value), None)
    if on in (None, False, "disabled", {}, []) or str(on).lower() == "false":
        draft.tell(key, *NOT_ASKED)
    else:
        draft.tell(key, "none", draft.rules[key].why)


SWITCHES = ("enable", "enabled", "enable_train", "mode", "tool", "path", "class_path", "backend")


def lora_targets(value: Any) -> str | list[str]:
    """Read "all-linear", names with commas between them, or an array of names."""
    if isinstance(value, list):
        return [text(name) for name in value]
    listed = [name.strip() for name in text(value).split(",")]
    return "all-linear" if listed == ["all-linear"] else listed


def betas(value: Any) -> list[float]:
    return checked(numbers(value), len(numbers(value)) == 2, value, "two numbers")


def frozen_tower(draft: Draft, key: str, value: Any) -> None:
    if boolean(value or False):
        draft.put("model.freeze", ["*visual.*"], key)
    else:
        draft.tell(key, *NOT_ASKED)


def clip(draft: Draft, low: str, high: str) -> None:
    """Set `rl.clip` from two keys."""
    for key in (low, high):
        draft.put("rl.clip", [number(draft.get(low)), number(draft.get(high))], key)


def dual_clip(draft: Draft, key: str, loss: str, counts: bool) -> None:
    if counts:
        draft.put("rl.dual_clip", number(draft.get(key)), key)
    else:
        draft.tell(key, "always", f"not looked at with {loss}")


def soft(draft: Draft, loss: str, above: str, below: str) -> None:
    """Set `rl.soft` from SAPO's two temperatures, if that is the loss."""
    temperatures = [number(draft.get(key)) for key in (above, below)]
    for key in (above, below):
        if loss == "sapo":
            draft.put("rl.soft", temperatures, key)
        else:
            draft.tell(key, "always", "of effect with the loss sapo")


def start(draft: Draft, files: str) -> None:
    """Set the format of the data, and ask for a reward function, if none is given."""
    draft.tree["data.format"] = "prompt"
    draft.origins["data.format"] = f"{files}: prompts, for [rl]"
    draft.ask("reward.function", '"rewards.py:score"', "a function of yours")


def folder(draft: Draft) -> None:
    """Set `run.dir` as EasyR1 and verl name the folder of a run, unless it is given."""
    name = "trainer.experiment_name"
    if "run.dir" in draft.tree:
        draft.tell(name, "always", "the folder is given: run.dir")
    else:
        draft.put("run.dir", f"checkpoints/{draft.get('trainer.project_name')}/{draft.get(name)}", name)


def skip_equal(draft: Draft, key: str, value: Any, most: str, note: str) -> None:
    """Set `rl.skip_equal` and `rl.refill` from whether groups without signal are replaced, and how often ``most``."""
    if not boolean(value or False):
        draft.put("rl.skip_equal", False, key)
        draft.tell(most, "always", f"of effect with {key} alone")
        return
    draft.put("rl.skip_equal", True, key, differs=note)
    count = integer(draft.get(most) or 0)
    if count > 0:
        draft.put("rl.refill", count - 1, most, "after the first try")
    else:
        draft.put("rl.refill", 1000, most, "no limit there")


# EasyR1, whose file is laid over the defaults of its classes, so that absent keys have these.


def easyr1_tree(tree: dict[str, Any], sections: Set[str]) -> dict[str, Any]:
    return {key: value for key, value in tree.items() if key != "config"}


def easyr1_filtering(draft: Draft, key: str, value: Any) -> None:
    """Read `online_filtering` with its key and bounds."""
    most, which, low, high = draft.rules[key].beside
    bounds = f"whose mean {draft.get(which)} is not within {draft.get(low)} … {draft.get(high)}"
    skip_equal(draft, key, value, most, f"groups whose rewards are all equal; there those {bounds}")


def easyr1_images(draft: Draft, key: str, value: Any) -> None:
    """Read how many images a prompt may have: any means that there are."""
    if integer(value or 0) > 0:
        draft.put("data.images", True, key)
    else:
        draft.tell(key, "always", "data.images says whether records have images")


def easyr1(draft: Draft) -> None:
    """Set what several keys decide: clipping, length, batches, evaluation, the folder."""
    actor, rollout = "worker.actor", "worker.rollout"
    loss, micro = str(draft.get(f"{actor}.loss_type")).lower(), f"{actor}.micro_batch_size_per_device_for_update"
    clip(draft, f"{actor}.clip_ratio_low", f"{actor}.clip_ratio_high")
    dual_clip(draft, f"{actor}.clip_ratio_dual", loss, loss not in ("cispo", "sapo"))
    soft(draft, loss, f"{actor}.tau_positive", f"{actor}.tau_negative")
    lengths(draft)
    of_prompt = samples(draft, f"{rollout}.n")
    batches(draft, "data.rollout_batch_size", f"{actor}.global_batch_size", of_prompt, draft.count(micro), micro)
    evaluate_as_trained(draft, {name: f"{rollout}.{name}" for name in ("temperature", "top_p", "top_k")})
    start(draft, "data.train_files")
    folder(draft)
