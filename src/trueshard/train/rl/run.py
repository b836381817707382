"""The parts of a run of reinforcement learning, from its configuration, and what it writes each step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn

import trueshard
from trueshard.distributed import device_of
from trueshard.errors import UserError
from trueshard.runtime.engine import sharded
from trueshard.train.config import Config, EvaluationSection
from trueshard.train.data.prepared import Prepared
from trueshard.train.data.samples import Mixture
from trueshard.train.data.tokenizer import load_processor, set_chat_template
from trueshard.train.models.build import fill, reference
from trueshard.train.rl.batch import PromptEncoder
from trueshard.train.rl.policy import Function, PolicyLoss
from trueshard.train.rl.ranks import rank_and_ranks
from trueshard.train.rl.reward import Rewards
from trueshard.train.rl.rollouts import Rollouts
from trueshard.train.rl.sampler import Sampler
from trueshard.train.rl.samples import Engine
from trueshard.train.trainer import Callback, Trainer, over_ranks

Line = dict[str, Any]

ROOM = 0.5
"""Part of the free memory that a gathered copy may take with `rollout.copy = "auto"`."""


@dataclass(frozen=True)
class Parts:
    """What the trainer needs."""

    rollouts: Rollouts
    loss: PolicyLoss
    evaluation: Evaluation | None


def parts_of(config: Config, settings: Any, model: nn.Module, data: Prepared) -> Parts:
    """Return the parts of a run, for a sharded model with its values. Collective; raises `UserError`."""
    assert config.rl is not None
    assert config.reward is not None
    rl, rollout, train = config.rl, config.rollout, config.train
    processor = load_processor(config.tokenizer, config.model) if config.images else None
    if processor is not None:
        set_chat_template(config.tokenizer, processor.tokenizer, processor)
    encoder = PromptEncoder(data.tokenizer, processor)
    loss = policy_loss(config)
    engine = choose_engine(config, model, encoder)
    sampler = Sampler(engine, Rewards(config.reward), encoder, tokens=rollout.tokens)
    other = reference(config, settings) if rl.kl > 0 else None
    if other is not None:
        runtime = sharded(model)
        trueshard.shard(other, plan=runtime.plan, mesh=runtime.mesh)
        fill(config, other)
    assert isinstance(data.train, Mixture)
    rollouts = Rollouts(
        model,
        sampler,
        data.train,
        loss=loss,
        batch_size=train.batch_size,
        rl=rl,
        rollout=rollout,
        accumulate=train.accumulate,
        seed=train.seed,
        reference=other,
    )
    evaluation = None
    if config.evaluation is not None:
        assert isinstance(data.evaluation, Mixture)
        evaluation = Evaluation(rollouts, data.evaluation, config.evaluation)
    return Parts(rollouts, loss, evaluation)


def policy_loss(config: Config) -> PolicyLoss:
    """Return the loss of a run."""
    rl, rollout = config.rl, config.rollout
    assert rl is not None
    return PolicyLoss(
        own_loss(rl.loss) if ":" in rl.loss else rl.loss,
        clip=rl.clip,
        dual_clip=rl.dual_clip,
        soft=rl.soft,
        average=rl.average,
        length=rollout.tokens if rl.average == "length" else None,
        temperature=rollout.temperature,
        kl=rl.kl if rl.kl_place == "loss" else 0.0,
        kl_estimator=rl.kl_estimator,
        correction=rollout.correction,
        bounds=rollout.bounds,
        whole_logits=config.train.whole_logits,
    )


def own_loss(words: str) -> Function:
    """Return the function of "file.py:function". Raises `UserError`."""
    import importlib.util
    from pathlib import Path

    file, _, name = words.rpartition(":")
    path = Path(file).expanduser()
    if not path.is_file():
        raise UserError(f"rl.loss: {path} does not exist; correct the path")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UserError(f"rl.loss: {path} is no Python file; give one")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"rl.loss: {path} cannot be imported ({type(error).__name__}: {error}); correct it") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"rl.loss: {path} has no function {name!r}; correct the name")
    return function


def choose_engine(config: Config, model: nn.Module, encoder: PromptEncoder) -> Engine:
    """Return the engine of `[rollout]`. Collective."""
    from trueshard.train.rl.engine import TransformersEngine

    section = config.rollout
    template = encoder.template
    end = template.ends_turn() if template is not None else None
    ends = [] if end is None else [int(encoder.tokenizer.convert_tokens_to_ids(end))]
    copy = section.copy_ if section.copy_ != "auto" else ("gathered" if copy_fits(model) else "kept")
    images = encoder.images if encoder.has_images else None
    return TransformersEngine(model, encoder.tokenizer, copy=copy, batch=section.batch, ends=ends, images=images)


def copy_fits(model: nn.Module) -> bool:
    """Return True if a whole copy in the compute dtype takes at most half of every rank's free memory. Collective."""
    runtime = sharded(model)
    mixed = runtime.plan.mixed_precision
    width = getattr(torch, mixed.compute).itemsize if mixed and mixed.compute else None
    size = sum(each.numel() * (width or each.dtype.itemsize) for each in model.parameters())
    device = device_of(runtime.mesh)
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = psutil.virtual_memory().available // rank_and_ranks()[1]
    return bool(over_ranks([free], device, dist.ReduceOp.MIN)[0] * ROOM > size)


class Evaluation:
    """The mean reward of answers to held-out prompts: a function for ``Trainer(evaluation=...)``."""

    def __init__(self, rollouts: Rollouts, prompts: Mixture, section: EvaluationSection) -> None:
        self._rollouts, self._prompts, self._section = rollouts, prompts, section
        sampling = rollouts.sampling
        # All evaluations draw the same random numbers, so that their differences are those of the weights.
        self._sampling = replace(
            sampling, temperature=section.temperature, top_p=section.top_p, top_k=section.top_k, seed=sampling.seed + 1
        )

    def __call__(self) -> dict[str, float]:
        """Return ``reward``, its parts, ``length_mean`` and ``count``. Collective."""
        sampler, section, version = self._rollouts.sampler, self._section, self._rollouts.step
        sampler.update(version)
        count = min(len(self._prompts), section.samples or len(self._prompts))
        prompts = [sampler.encoder.of(self._prompts, number) for number in range(count)]
        asked = [(prompt, number) for prompt in prompts for number in range(section.answers)]
        samples = sampler.answer(asked, 0, version, self._sampling)
        record = {"reward": _mean([each.reward for each in samples]), "count": float(len(samples))}
        for key in sorted({key for each in samples for key in each.parts}):
            record[f"reward_{key}"] = _mean([each.parts.get(key, 0.0) for each in samples])
        sampler.take_seconds()
        return record | {"length_mean": _mean([len(each.tokens) for each in samples])}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


class Reinforcement(Callback):
    """Adds what rollouts and loss measure to the record of each step, and evaluates before the first one.

    To be given before the callbacks that write the record.
    """

    def __init__(self, rollouts: Rollouts, loss: PolicyLoss, write: Callable[[Sequence[Line]], None]) -> None:
        self._rollouts, self._loss, self._write = rollouts, loss, write
        self._before: dict[str, float] = {}

    def on_start(self, trainer: Trainer) -> None:
        if trainer.evaluation is not None and trainer.step == 0:
            self._before = {"evaluation_reward_before": trainer.evaluate()["reward"]}

    def on_step(self, trainer: Trainer, record: dict[str, Any]) -> None:
        trained = self._rollouts.trained(self._loss.kept)
        record |= self._rollouts.measures | self._loss.measures() | self._before
        self._before = {}
        # The loader's time is that of the rollout, not of waiting for data.
        record["seconds_update"] = record["seconds"] - record["data_wait"]
        record["data_wait"] = 0.0
        if "reward" in record:  # the first step of a rollout
            self._write(lines(self._rollouts, trained) if trainer.rank == 0 else [])

    def on_end(self, trainer: Trainer) -> None:
        self._rollouts.sampler.rewards.close()
        self._rollouts.sampler.engine.close()


def lines(rollouts: Rollouts, trained: Mapping[int, Any]) -> list[Line]:
    """Return the lines of `samples.jsonl` of the present rollout; ``trained``: see ``Rollouts.trained``."""
    assert rollouts.current is not None
    tokenizer = rollouts.sampler.encoder.tokenizer
    of_last = {id(each): trained[place] for place, each in enumerate(rollouts.minibatch) if place in trained}
    found = []
    for each in rollouts.current.scored:
        sample, logs = each.sample, each.old if each.old is not None else of_last.get(id(each))
        line: Line = {
            **{key: getattr(sample, key) for key in ("step", "prompt", "sample", "text", "tokens", "own")},
            "prompt_text": tokenizer.decode(sample.asked),
            "pieces": [tokenizer.decode([token]) for token in sample.tokens],
            "logprobs": [round(value, 5) for value in sample.logprobs],
            "advantage": each.advantage,
            "used": each.used,
            **{key: getattr(sample, key) for key in ("reward", "parts", "finished", "weights_version")},
        }
        if logs is not None:
            line["trained_logprobs"] = [round(value, 5) for value in logs.tolist()]
        found.append(line)
    return found
