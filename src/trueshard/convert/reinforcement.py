"""Functions that rules of EasyR1, verl and TRL name: rollouts, minibatches, evaluation, data and rewards.

EasyR1 and verl count steps in rollouts, and batches in prompts; here both are those of the optimizer, in answers. So
numbers of steps are multiplied by the minibatches of a rollout (`rl.updates`), and batches by the answers to a prompt.
"""

from __future__ import annotations

from typing import Any

from trueshard.convert.engine import Draft, Wrong, boolean, integer, number, numbers, positive, text

IN_GROUPS = ("group", "centred", "leave_one_out")
"""Words of rl.advantage that compare the answers to a prompt."""
TRACKERS, OWN_LOGS = ("tensorboard", "wandb", "trackio"), ("console", "file", "none")


def whole(draft: Draft, key: str) -> int:
    """Return a number of theirs from 1 on; raises `Wrong` with its key."""
    try:
        return positive(draft.get(key))
    except Wrong as error:
        raise Wrong(f"{key}: {error}") from None


def several(value: Any) -> list[str]:
    """Read a word, an array of words, or nothing."""
    listed = [value] if isinstance(value, str) else value or []
    if not isinstance(listed, list) or not all(isinstance(each, str) for each in listed):
        raise Wrong(f"found {value!r}, wanted a word, or an array of words")
    return [each for each in listed if each]


def samples(draft: Draft, key: str) -> int:
    """Set `rl.samples` from their key, or ask for it; return it, or what the question suggests."""
    count = whole(draft, key) if draft.get(key) else 1
    if count > 1 or ("rl.advantage" not in draft.asked and draft.tree.get("rl.advantage", "group") not in IN_GROUPS):
        draft.put("rl.samples", count, key, draft.get(key))
        return count
    if key in draft.given and "rl.advantage" not in draft.asked:
        word = draft.tree.get("rl.advantage", "group")
        raise Wrong(f'{key} = 1: rl.advantage = "{word}" compares answers; give 2 or more')
    draft.ask("rl.samples", "8", "answers to each prompt")
    draft.tell(key, draft.get(key), "set", "at least 2, for an advantage among answers", "rl.samples")
    return 8


def updates(draft: Draft, rollout: str, minibatch: str) -> int:
    """Return the minibatches of a rollout; raises `Wrong` if they do not divide it."""
    of_rollout, of_step = whole(draft, rollout), whole(draft, minibatch)
    if of_rollout % of_step:
        raise Wrong(f"{rollout} = {of_rollout} is no multiple of {minibatch} = {of_step}; change one of them")
    return of_rollout // of_step


def steps(draft: Draft, key: str, value: Any) -> None:
    """Read a number of rollouts as steps of the optimizer; -1, or nothing: not asked for."""
    count = integer(value if value is not None else -1)
    if count < 0 or (count == 0 and not draft.rules[key].becomes.endswith("warmup_steps")):
        draft.tell(key, value, "always", "not asked for")
        return
    times = updates(draft, *draft.rules[key].beside)
    note = f"× {times} updates of a rollout" if times > 1 and count else ""
    draft.put(draft.rules[key].becomes, count * times, key, value, "set", note)


def warmup_share(draft: Draft, key: str, value: Any) -> None:
    """Read the share of all rollouts in which the learning rate rises; `beside`: the number, all rollouts, batches."""
    steps_key, whole_key, *batches = draft.rules[key].beside
    share, given = number(value or 0), draft.get(steps_key)
    if given is not None and integer(given) >= 0 and steps_key in draft.given and (integer(given) or share == 0):
        draft.tell(key, value, "always", f"{steps_key} counts instead")
    elif not share:
        draft.tell(key, value, "always", "not asked for")
    elif draft.get(whole_key) is None:
        draft.tell(key, value, "none", "a share of steps that are not known yet; set schedule.warmup_steps")
        draft.ask("schedule.warmup_steps", "100", f"{share} of all steps")
    else:
        rollouts = whole(draft, whole_key)
        count = int(share * rollouts) * updates(draft, batches[0], batches[1])
        draft.put("schedule.warmup_steps", count, key, value, "set", f"of {rollouts} rollouts")


def passes(draft: Draft, key: str, value: Any) -> None:
    """Read how often the answers of a rollout are trained on."""
    if positive(value) > 1:
        draft.tell(key, value, "none", "answers are trained on once; more minibatches of a rollout are rl.updates")
    else:
        draft.tell(key, value, "always", "each answer is trained on once")


def batches(draft: Draft, rollout: str, minibatch: str, each: int, micro: int | None, micro_key: str) -> None:
    """Set `rl.updates` and `train.batch_size`, and `train.accumulate` from ``micro`` answers of a rank at a time.

    ``each``: answers to a prompt. A key of theirs with prompts of a step is multiplied by it.
    """
    prompts = whole(draft, minibatch)
    answers = prompts * each
    draft.put("rl.updates", updates(draft, rollout, minibatch), rollout, draft.get(rollout), "set", f"/ {minibatch}")
    if "rl.samples" in draft.tree:
        draft.put("train.batch_size", answers, minibatch, draft.get(minibatch), "set", f"× {each} answers to a prompt")
        draft.origins["train.batch_size"] = f"{prompts} prompts × {each} answers"
    else:
        draft.ask("train.batch_size", str(answers), f"{prompts} prompts × rl.samples")
        draft.tell(minibatch, prompts, "set", "× answers to a prompt", "train.batch_size")
    accumulate(draft, answers, micro, micro_key)


def accumulate(draft: Draft, answers: int, micro: int | None, key: str) -> None:
    """Set `train.accumulate` so that a rank takes at most ``micro`` of ``answers`` answers at a time."""
    if micro is None:
        draft.tell(key, draft.get(key), "always", "not given")
        return
    if draft.ranks is None or "train.batch_size" not in draft.tree:
        draft.ask("train.accumulate", "1", f"{answers} / ({micro} a rank × ranks)")
        draft.tell(key, draft.get(key), "set", "which needs the number of ranks and of answers", "train.accumulate")
        return
    if answers % draft.ranks:
        raise Wrong(
            f"{answers} answers of a step are no multiple of {draft.ranks} ranks; change --ranks, or {key}'s batch"
        )
    of_rank = answers // draft.ranks
    pieces = next(count for count in range(1, of_rank + 1) if of_rank % count == 0 and of_rank // count <= micro)
    note = f"{answers} of all / ({of_rank // pieces} × {draft.ranks} ranks)"
    draft.put("train.accumulate", pieces, key, draft.get(key), "set", note)
    draft.origins["train.accumulate"] = note


def copies(draft: Draft, key: str, value: Any) -> None:
    """Read over how many ranks the model is sharded; fewer than all: whole copies, `shard.replicate`."""
    size = integer(value if value is not None else -1)
    if size <= 0 or (draft.ranks is not None and size >= draft.ranks):
        draft.tell(key, value, "always", "sharded over all ranks")
    elif draft.ranks is None:
        draft.ask("shard.replicate", "1", f"ranks / {size}")
        draft.tell(key, value, "set", "which needs the number of ranks", "shard.replicate")
    elif draft.ranks % size:
        raise Wrong(f"found {size}, wanted a divisor of {draft.ranks} ranks")
    else:
        draft.put("shard.replicate", draft.ranks // size, key, value, "set", f"{draft.ranks} ranks / {size}")


def devices(draft: Draft, key: str, value: Any) -> None:
    """Read the devices of a machine, and `beside` how many machines: together the ranks."""
    count = positive(draft.get(draft.rules[key].beside[0]) or 1)
    draft.machines = count
    draft.ranks = draft.ranks or positive(value) * count
    same = draft.ranks == positive(value) * count
    draft.tell(key, value, "command", "--nproc" if same else f"--nproc; {draft.ranks} ranks count instead")


# Evaluation: `beside` is the key of how often it is done.


def asked(draft: Draft, every: str) -> bool:
    return integer(draft.get(every) if draft.get(every) is not None else -1) > 0


def evaluated(draft: Draft, key: str, value: Any) -> None:
    """Read one of the settings of evaluation, if there is one."""
    rule = draft.rules[key]
    if not asked(draft, rule.beside[0]) or value is None:
        draft.tell(key, value, "always", "no validation is asked for" if value is not None else "not asked for")
    else:
        draft.put(rule.becomes, EVALUATED[rule.becomes](value), key, value)


def any_or_count(value: Any) -> int:
    """Read how many of the likeliest tokens count; -1 and 0: all."""
    return max(0, integer(value))


EVALUATED = {
    "evaluation.temperature": number,
    "evaluation.top_p": number,
    "evaluation.top_k": any_or_count,
    "evaluation.answers": positive,
}


def held_out(draft: Draft, key: str, value: Any) -> None:
    """Read the validation data; `beside`: how often, and the training data, of whose split it must be."""
    every, training = draft.rules[key].beside
    path, split = _split(_one(value))
    _, of_training = _split(_one(draft.get(training)))
    if not asked(draft, every) or not path:
        draft.tell(key, value, "always", "no validation is asked for")
    elif split != of_training and (split or "train") != (of_training or "train"):
        why = f"evaluation.path has no split of its own; save {split or 'train'!r} as a file, and give that"
        draft.tell(key, value, "none", f"{why}. Left out, a part of the data is held out")
    else:
        draft.put("evaluation.path", path, key, value)


# Data and rewards.


def data(draft: Draft, key: str, value: Any) -> None:
    """Read the training data: a path, with @split as EasyR1 writes it, or several."""
    paths = several(value)
    if not paths:
        draft.tell(key, value, "always", "not given: data.path")
    elif len(paths) > 1:
        draft.put("data.sources", [{"path": _split(each)[0]} for each in paths], key, value)
    else:
        path, split = _split(paths[0])
        draft.put("data.path", path, key, value)
        if split:
            draft.put("data.split", split, key, value)


def _one(value: Any) -> str:
    return next(iter(several(value)), "")


def _split(path: str) -> tuple[str, str]:
    name, _, split = path.partition("@")
    return name, split


def reward(draft: Draft, key: str, value: Any) -> None:
    """Read EasyR1's reward function, which `[reward]` calls as it is."""
    place = text(value)
    ours = place if ":" in place else f"{place}:main"
    draft.put("reward.function", ours, key, value, "set", "called as there: EasyR1's arguments are recognised")


def own_reward(draft: Draft, key: str, value: Any) -> None:
    """Name a reward function of another shape, and ask for one of ours."""
    draft.tell(key, value, "none", draft.rules[key].why)
    draft.ask("reward.function", '"rewards.py:score"', f"a function of yours; there {value}")


def off_unless_enabled(draft: Draft, key: str, value: Any) -> None:
    """Read a table with a switch of its own (`enable`, `enabled`, `mode`): nothing is lost while it is off."""
    on = value if not isinstance(value, dict) else next((value[each] for each in SWITCHES if each in value), None)
    if on in (None, False, "disabled", {}, []) or str(on).lower() == "false":
        draft.tell(key, value, "always", "not asked for")
    else:
        draft.tell(key, value, "none", draft.rules[key].why)


SWITCHES = ("enable", "enabled", "enable_train", "mode", "tool", "path", "class_path", "backend")


def lora_targets(value: Any) -> str | list[str]:
    """Read "all-linear", names with commas between them, or an array of names."""
    if isinstance(value, list):
        return [text(each) for each in value]
    listed = [each.strip() for each in text(value).split(",")]
    return "all-linear" if listed == ["all-linear"] else listed


def betas(value: Any) -> list[float]:
    result = numbers(value)
    if len(result) != 2:
        raise Wrong(f"found {value!r}, wanted two numbers")
    return result


def trackers(draft: Draft, key: str, value: Any) -> None:
    """Read names of loggers; console and file are always there."""
    listed = several(value)
    here = [each for each in listed if each in TRACKERS]
    lost = [each for each in listed if each not in (*TRACKERS, *OWN_LOGS)]
    if here:
        draft.put("log.to", here, key, value)
    if lost:
        draft.tell(key, lost, "none", f"trackers here: {', '.join(TRACKERS)}; metrics.jsonl is always written")
    if not here and not lost:
        draft.tell(key, value, "always", "the screen and metrics.jsonl")


def clip(draft: Draft, low: str, high: str) -> None:
    """Set `rl.clip` from two keys."""
    bounds = [number(draft.get(low)), number(draft.get(high))]
    for key in (low, high):
        draft.put("rl.clip", bounds, key, draft.get(key))


def soft(draft: Draft, counts: bool, positive_key: str, negative_key: str) -> None:
    """Set `rl.soft` from SAPO's two temperatures, if that is the loss."""
    taus = [number(draft.get(key)) for key in (positive_key, negative_key)]
    for key in (positive_key, negative_key):
        if counts:
            draft.put("rl.soft", taus, key, draft.get(key))
        else:
            draft.tell(key, draft.get(key), "always", "of effect with the loss sapo")


def start(draft: Draft, files: str) -> None:
    """Set the format of the data, and ask for a reward function, if none is given."""
    draft.tree["data.format"] = "prompt"
    draft.origins["data.format"] = f"{files}: prompts, for [rl]"
    if "reward.function" not in draft.tree:
        draft.ask("reward.function", '"rewards.py:score"', "a function of yours")


def folder(draft: Draft) -> None:
    """Set `run.dir` as EasyR1 and verl name the folder of a run, unless it is given."""
    name = "trainer.experiment_name"
    if "run.dir" in draft.tree:
        draft.tell(name, draft.get(name), "always", "the folder is given: run.dir")
    else:
        project, run = draft.get("trainer.project_name"), draft.get(name)
        draft.put("run.dir", f"checkpoints/{project}/{run}", name, run)


def skip_equal(draft: Draft, key: str, value: Any, most: str, note: str) -> None:
    """Set `rl.skip_equal` and `rl.refill` from whether groups without signal are replaced, and how often ``most``."""
    if not boolean(value or False):
        draft.put("rl.skip_equal", False, key, value)
        draft.tell(most, draft.get(most), "always", f"of effect with {key} alone")
        return
    draft.put("rl.skip_equal", True, key, value, "near", note)
    count = integer(draft.get(most) or 0)
    limit = count - 1 if count > 0 else 1000
    draft.put(
        "rl.refill", limit, most, draft.get(most), "set", "after the first try" if count > 0 else "no limit there"
    )
