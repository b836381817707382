"""`trueshard replay`: make the samples of a step again, and compare them with those that the run has written.

The newest checkpoint before the step is loaded, the steps between are trained again, and nothing is written. At the
same number of ranks on the same machine all is equal to the bit; so the first token that differs shows what is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import trueshard
from trueshard.errors import UserError, explained
from trueshard.plans import Plan
from trueshard.train.config import Config
from trueshard.train.metrics.answers import NAME, read_samples
from trueshard.train.rl.samples import Sample
from trueshard.train.run import resuming
from trueshard.train.run.checks import Ready, checkpoints_of
from trueshard.train.run.session import build_trainer

Recorded = dict[tuple[int, int], dict[str, Any]]
"""(prompt, sample) → line of `samples.jsonl`."""


@dataclass(frozen=True)
class Replayed:
    """Samples that are to be made again."""

    step: int
    prompt: int | None = None
    """Compare the answers to this prompt alone, and show them."""


def config_of(run: Path) -> tuple[Config, int | None]:
    """Return the configuration of a run, and its number of ranks if that is known. Raises `UserError`."""
    record = resuming.read_settings(run)
    if "given" not in record:
        raise UserError(f"{run}: is no folder of a run (it has no config.json); give the run.dir of one")
    with explained(f"{run / 'config.json'}: is no configuration of this version", "train the run again"):
        config = Config.model_validate(record["given"])
    if config.rl is None:
        raise UserError(f"{run}: is no run of reinforcement learning, so it has no samples; give one with [rl]")
    config = resuming.with_settings(config, {"run.dir": str(run), "run.restarts": 0})
    try:
        return config, math.prod(Plan.from_json((run / "plan.json").read_text(encoding="utf-8")).ranks)
    except (OSError, ValueError):  # there was no forecast
        return config, None


def recorded(config: Config, replayed: Replayed) -> Recorded:
    """Return the written samples to compare with. Raises `UserError` if there are none."""
    assert config.rl is not None
    file = config.run.folder / NAME
    lines, step = read_samples(file), replayed.step
    result = {(line["prompt"], line["sample"]): line for line in lines if line["step"] == step}
    if not result:
        why = ""
        if config.rl.updates > 1:
            why = f"; samples are made every {config.rl.updates} steps (rl.updates)"
        near = min(sorted({line["step"] for line in lines}), key=lambda other: abs(other - step), default=None)
        hint = f"the nearest step that has some is {near}" if near is not None else "it has none"
        raise UserError(f"--step {step}: {file} has no samples of it; {hint}{why}")
    if replayed.prompt is None:
        return result
    prompts = sorted({prompt for prompt, _ in result})
    if replayed.prompt not in prompts:
        raise UserError(
            f"--prompt {replayed.prompt}: is not among those of step {step}: {', '.join(map(str, prompts))}"
        )
    return {name: line for name, line in result.items() if name[0] == replayed.prompt}


def replay(ready: Ready, device: torch.device, wants_stop: Callable[[], bool], replayed: Replayed) -> int:
    """Make the samples of a step again, and say how they compare; return 1 if one differs. Collective."""
    config, step = ready.config, replayed.step
    assert config.rl is not None
    expected = recorded(config, replayed)
    trainer, _ = build_trainer(ready, wants_stop, device=device)
    rollouts: Any = trainer.loader
    checkpoints, callbacks = checkpoints_of(config), trainer.callbacks
    trainer.callbacks, trainer.checkpoints, trainer.evaluation = [], None, None
    last = step - 1 - config.rl.updates * config.rollout.ahead  # what was made ahead is in later checkpoints
    start = max((saved for saved in checkpoints.steps() if saved <= last), default=0)
    if start:
        state = trueshard.load(checkpoints.path(start), model=trainer.model, optimizer=trainer.optimizer)
        trainer.load_state_dict(state["trainer"])
    is_first = trainer.rank == 0
    if is_first:
        origin = f"from {checkpoints.path(start)}" if start else "from the beginning"
        again = f", training {step - 1 - start} steps again" if step - 1 > start else ""
        print(f"Making the samples of step {step} again, {origin}{again}", flush=True)
    trainer.model.train()
    try:
        while trainer.step < step - 1:
            trainer.take_step()
            if wants_stop():
                raise UserError(f"stopped after step {trainer.step}, before the samples of step {step}")
        next(rollouts)
        made = {(sample.prompt, sample.sample): sample for sample in rollouts.current.samples}
    finally:
        for callback in callbacks:
            callback.on_end(trainer)
    if not is_first:
        return 0
    if replayed.prompt is not None:
        for (prompt, number), line in sorted(expected.items()):
            print(f"prompt {prompt}, sample {number}, reward {line['reward']:.4g}: {line['text']!r}")
    difference = first_difference(expected, made)
    print(f"{len(expected)} samples: {difference or 'same'}", flush=True)
    return 1 if difference else 0


def first_difference(expected: Recorded, made: dict[tuple[int, int], Sample]) -> str:
    """Return what differs first, in words; "" if all is the same."""
    for (prompt, number), line in sorted(expected.items()):
        about, sample = f"prompt {prompt}, sample {number}", made.get((prompt, number))
        if sample is None:
            return f"{about} was not made again: the prompts of the step are others"
        pairs = zip(line["tokens"], sample.tokens, strict=False)
        place = next((at for at, (was, now) in enumerate(pairs) if was != now), None)
        if place is not None:
            was, now = line["tokens"][place], sample.tokens[place]
            return f"the first that differs is {about}, token {place}: {was}, now {now} (text now {sample.text!r})"
        if len(line["tokens"]) != len(sample.tokens):
            return f"the first that differs is {about}: {len(line['tokens'])} tokens, now {len(sample.tokens)}"
        if line["reward"] != sample.reward:
            return f"the tokens are the same so far; {about} has the reward {line['reward']!r}, now {sample.reward!r}"
    return ""
