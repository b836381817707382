"""The parts of a run of reinforcement learning, from its configuration, and what it writes each step."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from trueshard.errors import UserError
from trueshard.train.callbacks import Callback
from trueshard.train.config import Config
from trueshard.train.data.batches import Mixture, Samples
from trueshard.train.data.config import EvaluationSection
from trueshard.train.data.prepared import Prepared
from trueshard.train.data.tokenizer import load_processor, set_chat_template
from trueshard.train.metrics.answers import SamplesWriter, line, pieces_of
from trueshard.train.metrics.trackers import Tracking
from trueshard.train.models.values import reference
from trueshard.train.rl.engine import import_continuous
from trueshard.train.rl.estimator import OwnEstimator
from trueshard.train.rl.policy import policy_loss
from trueshard.train.rl.policy_losses import ADVANTAGES
from trueshard.train.rl.ranks import rank_and_ranks
from trueshard.train.rl.reward import CHECKED, Rewards
from trueshard.train.rl.rollouts import Rollouts
from trueshard.train.rl.sampler import means
from trueshard.train.trainer import Trainer


def check_parts(config: Config, data: Prepared) -> None:
    """Raise `UserError` for a reward or loss function that is wrong, or a package too old, before a model is built."""
    assert config.rl is not None
    assert config.reward is not None
    policy_loss(config.rl, config.rollout)
    if config.rl.advantage not in ADVANTAGES:
        OwnEstimator(config.rl.advantage, config.rl.samples)
    if config.rollout.continuous:
        import_continuous()
    rewards = Rewards(config.reward)
    try:
        prompts: Any = data.train
        first = [prompts[number] for number in range(min(len(prompts), CHECKED))]
        if config.images and rewards.turns:
            name = config.reward.functions[0]
            raise UserError(f"reward.function: {name} is an episode, which is of text; remove data.images")
        rewards.check([(prompt["record"], prompt["where"]) for prompt in first])
    finally:
        rewards.close()


def build_rollouts(
    config: Config, settings: Any, model: nn.Module, data: Prepared
) -> tuple[Rollouts, Evaluation | None]:
    """Return the loader of a run and its evaluation, for a sharded model. Collective; raises `UserError`."""
    assert config.rl is not None
    assert config.reward is not None
    assert isinstance(data.train, Mixture)
    rl, train = config.rl, config.train
    processor = load_processor(config.tokenizer, config.model) if config.images else None
    if processor is not None:
        set_chat_template(config.tokenizer, processor.tokenizer, processor)
    rollouts = Rollouts(
        model,
        data.tokenizer,
        data.train,
        Rewards(config.reward),
        loss=policy_loss(rl, config.rollout, train.whole_logits),
        batch_size=train.batch_size,
        rl=rl,
        rollout=config.rollout,
        accumulate=train.accumulation(rank_and_ranks()[1]),
        microbatch=train.microbatch,
        seed=train.seed,
        reference=reference(config, settings, model) if rl.kl > 0 else None,
        processor=processor,
        folder=config.run.folder,
    )
    if config.evaluation is None:
        return rollouts, None
    return rollouts, Evaluation(rollouts, data.evaluation[""], config.evaluation)


class Evaluation:
    """The mean reward of answers to held-out prompts: a function for ``Trainer(evaluation=...)``."""

    def __init__(self, rollouts: Rollouts, prompts: Samples, section: EvaluationSection) -> None:
        self._rollouts, self._prompts, self._section = rollouts, prompts, section
        sampling = rollouts.sampling
        # All evaluations draw the same random numbers, so that their differences are those of the weights.
        self._sampling = replace(
            sampling, temperature=section.temperature, top_p=section.top_p, top_k=section.top_k, seed=sampling.seed + 1
        )

    def __call__(self) -> dict[str, float]:
        """Return ``reward``, its parts, ``length_mean`` and ``count``. Collective."""
        sampler, section = self._rollouts.sampler, self._section
        self._rollouts.settle()
        measured = sampler.seconds.copy(), sampler.slow  # of the rollout that was settled, for the next step's line
        sampler.update(self._rollouts.step)
        count = min(len(self._prompts), section.samples or len(self._prompts))
        prompts = [sampler.encoder.of(self._prompts, number) for number in range(count)]
        prompts_of_samples = [(prompt, number) for prompt in prompts for number in range(section.answers)]
        samples = sampler.answer(sampler.ask(prompts_of_samples, 0, self._sampling))
        sampler.seconds, sampler.slow = measured
        return means(samples) | {"count": float(len(samples))}


def with_samples(rollouts: Rollouts, config: Config, reporters: Sequence[Callback]) -> list[Callback]:
    """Return the callbacks of a run and those that measure and write its samples, in their order."""
    tracking = next((reporter for reporter in reporters if isinstance(reporter, Tracking)), None)
    writer = SamplesWriter(config.run.folder, tracking, every=config.log.samples_every)
    return [Reinforcement(rollouts, writer), *reporters, writer]


class Reinforcement(Callback):
    """Adds what rollouts and loss measure to the record of each step, and writes the samples.

    To be given before the callbacks that write the record.
    """

    def __init__(self, rollouts: Rollouts, writer: SamplesWriter) -> None:
        self._rollouts, self._writer = rollouts, writer

    def on_step(self, trainer: Trainer, record: dict[str, Any]) -> None:
        rollouts = self._rollouts
        # The first step of a rollout, if anybody wants its answers: the same on every rank.
        is_written = "reward" in rollouts.measures and self._writer.wants(record["step"])
        trained = rollouts.trained() if is_written else {}
        record |= rollouts.measures | rollouts.loss.measures()
        # The loader's time is that of the rollout, not of waiting for data.
        record["seconds_update"] = record["seconds"] - record["data_wait"]
        record["data_wait"] = 0.0
        if is_written and trainer.rank == 0:
            self._writer.write(lines(rollouts, trained))

    def on_end(self, trainer: Trainer) -> None:
        self._rollouts.close()


def lines(rollouts: Rollouts, trained: Mapping[int, list[float]]) -> list[dict[str, Any]]:
    """Return the lines of `samples.jsonl` of the present rollout; ``trained``: see ``Rollouts.trained``."""
    assert rollouts.current is not None
    tokenizer = rollouts.sampler.encoder.tokenizer
    of_last = {id(sample): trained[place] for place, sample in enumerate(rollouts.minibatch) if place in trained}

    prompt_text, pieces = functools.cache(lambda *tokens: tokenizer.decode(list(tokens))), pieces_of(tokenizer)
    result = []
    for sample in rollouts.current.samples:
        trained_logprobs = sample.old_logprobs or of_last.get(id(sample))
        of_sample = line(sample, prompt_text(*sample.asked), pieces(sample.tokens), trained_logprobs)
        result.append(of_sample | {"group": sample.sample // rollouts.rl.samples})
    return result
