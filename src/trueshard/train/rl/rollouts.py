"""Rollouts: the loader of the trainer that samples what a step is trained on.

- Before a step: the engine takes over the weights, prompts are answered, answers are rewarded, groups of equal rewards
  are replaced, log-probabilities of the model (and the reference) are computed where the loss needs them, and rewards
  become advantages. Every rank knows all samples, and trains on its part.
- The place of a run in its data is the number of prompts consumed. With several steps a rollout, or samples made ahead,
  the samples that are not used yet are in the checkpoint.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from trueshard.distributed import device_of
from trueshard.sharding.engine import sharded
from trueshard.train.data.batches import Batch, Mixture
from trueshard.train.data.order import Order
from trueshard.train.data.tokenizer import pad_token
from trueshard.train.losses import without_adapter
from trueshard.train.rl import advantages
from trueshard.train.rl.batch import PromptEncoder, Prompts, dealt, microbatch, of_samples
from trueshard.train.rl.config import RewardSection, RLSection, RolloutSection
from trueshard.train.rl.engine import choose_engine
from trueshard.train.rl.policy import PolicyLoss, estimates, padding_is_seen, policy_loss
from trueshard.train.rl.ranks import on_every_rank, rank_and_ranks
from trueshard.train.rl.reward import CalledReward, Rewards
from trueshard.train.rl.rollout_state import Logs, Rollout, Scored, packed, unpacked
from trueshard.train.rl.sampler import Asked, Sampler
from trueshard.train.rl.samples import Prompt, Sampling


@dataclass
class Begun:
    """A rollout whose first prompts are chosen."""

    step: int
    version: int
    seen: Counter[int]
    """Number of samples of each prompt so far."""
    asked: Asked


class Rollouts:
    """Microbatches of sampled answers, without end; see the file's docstring. Every method is collective.

    Args:
        model: sharded, on the rank's device; of transformers, with ``generate``.
        tokenizer: of transformers.
        prompts: records with a ``prompt``, a string or messages; the reward gets the whole record.
        reward: ``(completion, record, sample) -> float or dict`` or another form of such a function; or the table
            [reward].
        loss: the loss of the trainer, whose log-probabilities are used before a step too; None: that of ``rl``.
        batch_size: answers of an optimizer step over all ranks; a multiple of ``rl.samples``.
        rl: the table [rl], or a dict of its keys.
        rollout: the table [rollout], or a dict of its keys.
        accumulate: microbatches of this rank in a step.
        microbatch: answers of a microbatch, which do not follow from the ranks then, for ``shard(exact=True)``;
            ``batch_size`` is ranks × ``accumulate`` × ``microbatch``. None: as many as there are for ``accumulate``.
        seed: of the order of prompts and of the samples.
        reference: with ``rl.kl``, the model before training, sharded; None: the adapter is turned off instead.
        processor: of images and text, for such a model.
        folder: for the files that an engine needs.

    Raises:
        ValueError: a key or value of the tables is wrong, or ``batch_size``.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        prompts: Prompts,
        reward: Callable[..., Any] | Mapping[str, Any] | Rewards,
        *,
        batch_size: int,
        loss: PolicyLoss | None = None,
        rl: RLSection | Mapping[str, Any] | None = None,
        rollout: RolloutSection | Mapping[str, Any] | None = None,
        accumulate: int = 1,
        microbatch: int | None = None,
        seed: int = 0,
        reference: nn.Module | None = None,
        processor: Any = None,
        folder: Path | None = None,
    ) -> None:
        self.rl = rl if isinstance(rl, RLSection) else RLSection(**rl or {})
        self.rollout = rollout if isinstance(rollout, RolloutSection) else RolloutSection(**rollout or {})
        if batch_size < 1 or batch_size % self.rl.samples:
            raise ValueError(f"batch_size is {batch_size}; it is a multiple of {self.rl.samples} samples a prompt")
        ranks = rank_and_ranks()[1]
        if microbatch is not None and batch_size != ranks * accumulate * microbatch:
            raise ValueError(
                f"batch_size is {batch_size}; with microbatch it is {ranks} ranks × accumulate {accumulate} × "
                f"microbatch {microbatch} = {ranks * accumulate * microbatch}"
            )
        self.model, self.reference = model, reference
        self.loss = policy_loss(self.rl, self.rollout) if loss is None else loss
        encoder = PromptEncoder(tokenizer, processor)
        self.loss.never = encoder.never
        self._pad = pad_token(tokenizer)
        engine = choose_engine(self.rollout, model, encoder, folder)
        self.sampler = Sampler(engine, _rewards(reward), encoder, tokens=self.rollout.tokens)
        self.loss.off_policy = self.rollout.ahead > 0 and self.sampler.in_background
        self._prompts, self._accumulate, self._microbatch = prompts, accumulate, microbatch
        self._is_padding_probed = False
        self.deals_in_turn = microbatch is not None
        """True if microbatch number n of a step, over all ranks, is that of rank n modulo ranks."""
        self._order = prompts.order(seed) if isinstance(prompts, Mixture) else Order(seed, [len(prompts)], [1])
        self._groups = batch_size * self.rl.updates // self.rl.samples
        self.sampling = Sampling(self.rollout.temperature, stop=tuple(self.rollout.stop), seed=seed)
        self.step = 0
        """The optimizer step whose microbatches were begun last."""
        self.consumed = 0
        """Prompts answered so far."""
        self.current: Rollout | None = None
        self.measures: dict[str, float] = {}
        """Measures of the current step."""
        self._ahead: Rollout | None = None
        self._begun: Begun | None = None
        self._left: list[list[Scored]] = []
        self.minibatch: list[Scored] = []
        """Samples of the current step."""
        self._batches: list[Batch] = []

    def __iter__(self) -> Rollouts:
        return self

    def __next__(self) -> Batch:
        if not self._batches:
            self._begin_step()
        return self._batches.pop(0)

    def _begin_step(self) -> None:
        if not self._is_padding_probed:  # here and not in the constructor: it runs forwards, and so collectives
            self._is_padding_probed = True
            has_images = self.sampler.encoder.has_images
            self.loss.reads_mask = has_images or padding_is_seen(self.model, self._pad, self.device)
        self.step += 1
        self.measures = {}
        if not self._left:
            self.settle()
            self.current = self._ahead or self._complete(self._begin(self.step))
            self._ahead = None
            if self.rollout.ahead:
                self._begun = self._begin(self.step + self.rl.updates, background=self.sampler.in_background)
                if self._begun.asked.started is None:
                    self.settle()
            self._left = self.current.minibatches(self.rl.updates, self.rl.samples)
            self.measures |= self._measured(self.current)
        self.minibatch = self._left.pop(0)
        places = self._dealt(self.minibatch)[rank_and_ranks()[0]]
        self._batches = [self._batch(self.minibatch, place) for place in places]

    # One rollout

    def settle(self) -> None:
        """Finish the rollout that a server has begun in the background."""
        if self._begun is not None:
            begun, self._begun = self._begun, None
            self._ahead = self._complete(begun)

    def _begin(self, step: int, *, background: bool = False) -> Begun:
        """Choose the prompts of a rollout; with ``background``, let the engine begin."""
        version = self.step - 1
        self.sampler.update(version)
        seen: Counter[int] = Counter()
        asked = self._asked(self._groups, seen)
        return Begun(step, version, seen, self.sampler.ask(asked, step, version, self.sampling, background=background))

    def _complete(self, begun: Begun) -> Rollout:
        """Answer the prompts, replace groups of equal rewards, and compute what the loss needs."""
        rollout, kept, missing = Rollout(begun.step, []), 0, self._groups
        for number in range(1 + (self.rl.refill if self.rl.skip_equal else 0)):
            if number:
                asked = self._asked(missing, begun.seen)
                rollout.refilled += missing
                begun.asked = self.sampler.ask(asked, begun.step, begun.version, self.sampling)
            groups = self._answered(begun.asked)
            rewards = np.array([[each.sample.reward for each in group] for group in groups])
            equal = advantages.is_equal(rewards) if self.rl.samples > 1 else np.zeros(len(groups), dtype=np.bool_)
            rollout.equal += int(equal.sum())
            for group, same in zip(groups, equal.tolist(), strict=True):
                for each in group:
                    each.used = not (same and self.rl.skip_equal)
                kept += group[0].used
                rollout.scored += group
            missing = self._groups - kept
            if not missing:
                break
        self._keep_enough(rollout, kept)
        self._score(rollout)
        self._weigh(rollout)
        return rollout

    def _asked(self, groups: int, seen: Counter[int]) -> list[tuple[Prompt, int]]:
        """Return the next prompts, each once a sample; one that comes again in a rollout gets further samples."""
        asked = []
        for number in self._order.indices(self.consumed, groups).tolist():
            first = seen[number]
            seen[number] += self.rl.samples
            prompt = self.sampler.encoder.of(self._prompts, number)
            asked += [(prompt, first + sample) for sample in range(self.rl.samples)]
        self.consumed += groups
        return asked

    def _answered(self, asked: Asked) -> list[list[Scored]]:
        """Return a group for each prompt."""
        count, samples = self.rl.samples, self.sampler.answer(asked)
        if isinstance(self.rl.overlong, dict):
            lengths = np.array([len(each.tokens) for each in samples])
            falls = advantages.too_long(lengths, self.rl.overlong["from"], self.rollout.tokens)
            for sample, fall in zip(samples, falls.tolist(), strict=True):
                sample.reward, sample.parts = sample.reward + fall, {**sample.parts, "overlong": fall}
        scored = [Scored(sample) for sample in samples]
        return [scored[at : at + count] for at in range(0, len(scored), count)]

    def _keep_enough(self, rollout: Rollout, kept: int) -> None:
        """Use equal groups, whose advantages are 0, where a step would have no group else."""
        for at in range(0, len(rollout.scored), self.rl.samples):
            if kept >= self.rl.updates:
                break
            group = rollout.scored[at : at + self.rl.samples]
            kept += not group[0].used
            for each in group:
                each.used = True

    def _score(self, rollout: Rollout) -> None:
        """Compute the log-probabilities that the loss compares with, in the microbatches of the steps to come."""
        began = time.perf_counter()
        in_reward = self.rl.kl > 0 and self.rl.kl_place == "reward"
        is_late = rollout.step > self.step and not self.sampler.in_background
        needs_old = self.rl.updates > 1 or is_late or in_reward
        for minibatch in rollout.minibatches(self.rl.updates, self.rl.samples):
            parts = self._dealt(minibatch)
            if needs_old:
                for each, logs in zip(minibatch, self._logs(self.model, minibatch, parts), strict=True):
                    each.old = logs
            if self.rl.kl > 0:
                with without_adapter(self.model) if self.reference is None else contextlib.nullcontext():
                    found = self._logs(self.reference or self.model, minibatch, parts)
                for each, logs in zip(minibatch, found, strict=True):
                    each.reference = logs
        self.sampler.seconds["score"] += time.perf_counter() - began

    @torch.no_grad()
    def _logs(self, model: nn.Module, minibatch: list[Scored], parts: list[list[list[int]]]) -> list[Logs]:
        """Return the log-probabilities of all samples of a minibatch, each computed on the rank that trains on it."""
        rank = rank_and_ranks()[0]

        def compute() -> dict[int, Logs]:
            result: dict[int, Logs] = {}
            for places in parts[rank]:
                batch = self._batch(minibatch, places)
                logs, _ = self.loss.logprobs(model, batch_to(batch, self.device))
                result |= dict(zip(places, of_samples(logs, [minibatch[i].sample for i in places]), strict=False))
            return result

        every = {place: logs for part in on_every_rank(compute) for place, logs in part.items()}
        return [every[place] for place in range(len(minibatch))]

    def _weigh(self, rollout: Rollout) -> None:
        """Turn rewards into advantages."""
        used = [each for each in rollout.scored if each.used]
        rewards = np.array([each.sample.reward for each in used])
        if self.rl.kl > 0 and self.rl.kl_place == "reward":
            for number, each in enumerate(used):
                assert each.old is not None
                assert each.reference is not None
                own = torch.tensor(each.sample.own)
                difference = torch.from_numpy(each.old - each.reference).double()[own]
                divergence = float(estimates(difference, self.rl.kl_estimator).sum())
                each.sample.parts["kl"] = divergence
                rewards[number] -= self.rl.kl * divergence
        shape = (-1, self.rl.samples)
        lengths = np.array([sum(each.sample.own) for each in used]).reshape(shape)
        baselines = self._baselines(used, rollout) if self.rl.advantage == "greedy" else None
        found = advantages.advantages(self.rl.advantage, rewards.reshape(shape), lengths, baselines)
        for each, advantage in zip(used, found.ravel().tolist(), strict=True):
            each.advantage = advantage

    def _baselines(self, used: list[Scored], rollout: Rollout) -> npt.NDArray[np.float64]:
        """Return the reward of the likeliest answer to the prompt of each group."""
        firsts = [each.sample for each in used[:: self.rl.samples]]
        prompts = {first.prompt: self.sampler.encoder.of(self._prompts, first.prompt) for first in firsts}
        greedy = replace(self.sampling, temperature=0.0)
        asked = [(prompt, 0) for prompt in prompts.values()]
        found = self.sampler.answer(self.sampler.ask(asked, rollout.step, firsts[0].weights_version, greedy))
        rewards = {sample.prompt: sample.reward for sample in found}
        return np.array([rewards[first.prompt] for first in firsts])

    # Microbatches

    @property
    def device(self) -> torch.device:
        """The device on which the model computes."""
        return device_of(sharded(self.model).mesh)

    def _dealt(self, minibatch: list[Scored]) -> list[list[list[int]]]:
        """Return the positions of a step's samples by [rank][microbatch]."""
        ranks = rank_and_ranks()[1]
        return dealt([each.sample for each in minibatch], ranks, self._accumulate, self._microbatch)

    def _batch(self, minibatch: list[Scored], places: list[int]) -> Batch:
        chosen = [minibatch[place] for place in places] or minibatch[:1]
        samples = [each.sample for each in chosen]
        counted = [bool(places) and (sample.finished or self.rl.overlong != "mask") for sample in samples]
        more: dict[str, list[Logs | None]] = {
            "engine_logprobs": [np.array(sample.logprobs, dtype=np.float32) for sample in samples]
        }
        if minibatch[0].old is not None:
            more["old_logprobs"] = [each.old for each in chosen]
        if minibatch[0].reference is not None:
            more["reference_logprobs"] = [each.reference for each in chosen]
        batch = microbatch(samples, [each.advantage for each in chosen], self._pad, counted=counted, more=more)
        if self.sampler.encoder.has_images:
            talks = [self._prompts[sample.prompt]["prompt"] for sample in samples]
            batch |= self.sampler.encoder.images(talks, batch["input_ids"].shape[1], "right")
        return batch

    # What is measured, and kept

    def _measured(self, rollout: Rollout) -> dict[str, float]:
        samples = [each.sample for each in rollout.scored]
        rewards, lengths = [sample.reward for sample in samples], [len(sample.tokens) for sample in samples]
        found: dict[str, float] = {
            "reward": float(np.mean(rewards)),
            "reward_std": float(np.std(rewards)),
            "samples_equal": rollout.equal,
            "refilled": rollout.refilled,
            "prompts": self.consumed,
            "length_mean": float(np.mean(lengths)),
            "length_max": max(lengths),
            "truncated": float(np.mean([not sample.finished for sample in samples])),
            "weights_version": samples[0].weights_version,
            "age": self.step - 1 - samples[0].weights_version,
            "slow_rewards": self.sampler.slow,
        }
        parts = {key for sample in samples for key in sample.parts}
        for key in sorted(parts):
            found[f"reward_{key}"] = float(np.mean([sample.parts[key] for sample in samples if key in sample.parts]))
        seconds = self.sampler.take_seconds()
        return found | {f"seconds_{key}": seconds[key] for key in ("sync", "generate", "reward", "score")}

    def trained(self, kept: Sequence[torch.Tensor]) -> dict[int, Logs]:
        """Return the trainer's log-probabilities of the last step's samples, by place in its minibatch.

        ``kept``: of each microbatch of this rank, [rows, length].
        """
        places = self._dealt(self.minibatch)[rank_and_ranks()[0]]
        found: dict[int, Logs] = {}
        for own, values in zip(places, kept, strict=False):
            found |= dict(zip(own, of_samples(values, [self.minibatch[i].sample for i in own]), strict=False))
        return {place: logs for part in on_every_rank(lambda: found) for place, logs in part.items()}

    def close(self) -> None:
        """End the processes of rewards, and free what the engine holds."""
        self.sampler.rewards.close()
        self.sampler.engine.close()

    def describe_last(self, microbatches: int) -> str:
        """Describe the samples of the last step."""
        wanted = dict.fromkeys(each.sample.prompt for each in self.minibatch)
        return f"{len(self.minibatch)} samples of the prompts {', '.join(map(str, wanted))}"

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the prompts, and the samples that are not used yet."""
        self.settle()
        rollouts = {"ahead": self._ahead}
        if self._left and self.current is not None:
            rollouts["current"] = self.current
        kept = {key: packed(rollout) for key, rollout in rollouts.items() if rollout is not None}
        return {"step": self.step, "consumed": self.consumed, "left": len(self._left), "rollouts": kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what ``state_dict`` returned, at any number of ranks."""
        self.step, self.consumed, self._batches = int(state["step"]), int(state["consumed"]), []
        found = {key: unpacked(rollout) for key, rollout in state["rollouts"].items()}
        self._ahead, self.current = found.get("ahead"), found.get("current")
        self._left = []
        if self.current is not None:
            self._left = self.current.minibatches(self.rl.updates, self.rl.samples)[-int(state["left"]) :]


def _rewards(reward: Callable[..., Any] | Mapping[str, Any] | Rewards) -> Rewards | CalledReward:
    if isinstance(reward, Rewards):
        return reward
    return Rewards(RewardSection(**reward)) if isinstance(reward, Mapping) else CalledReward(reward)


def batch_to(batch: Batch, device: torch.device) -> Batch:
    """Return a batch on another device."""
    return {key: value.to(device) for key, value in batch.items()}
