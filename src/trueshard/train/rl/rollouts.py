"""Rollouts: the loader of the trainer that samples what a step is trained on.

- Before a step: the engine takes over the weights, prompts are answered, answers are rewarded, groups of equal rewards
  are replaced, log-probabilities of the model (and the reference) are computed where the loss needs them, and rewards
  become advantages. Every rank knows all samples, and trains on its part.
- Which samples share an optimizer step follows from their names alone. Within a step they are dealt to microbatches by
  length, so that the microbatches of all ranks at one time are of about one length. With a fixed number of samples in a
  microbatch its content, and so its shape, follows from the samples alone, and not from the ranks.
- The place of a run in its data is the number of prompts consumed. With several steps a rollout, or samples made ahead,
  the samples that are not used yet are in the checkpoint.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from trueshard.distributed import device_of
from trueshard.sharding.engine import sharded
from trueshard.train.data.batches import IGNORED, Batch, Mixture
from trueshard.train.data.order import Order
from trueshard.train.data.tokenizer import pad_token
from trueshard.train.preference import without_adapter
from trueshard.train.rl.config import RewardSection, RLSection, RolloutSection
from trueshard.train.rl.engine import choose_engine
from trueshard.train.rl.estimator import OwnEstimator
from trueshard.train.rl.policy import PolicyLoss, estimates, padding_is_seen, policy_loss
from trueshard.train.rl.policy_losses import ADVANTAGES, advantages, is_equal, too_long
from trueshard.train.rl.ranks import on_every_rank, rank_and_ranks
from trueshard.train.rl.reward import CalledReward, Rewards
from trueshard.train.rl.sampler import Pending, PromptEncoder, Prompts, Sampler, means
from trueshard.train.rl.samples import Sample, Sampling

_LISTS = {
    "asked": torch.int64,
    "tokens": torch.int64,
    "own": torch.bool,
    "logprobs": torch.float32,
    "old_logprobs": torch.float32,
    "reference_logprobs": torch.float32,
}
"""Fields of a sample that are tensors in a checkpoint."""


class Scored(NamedTuple):
    """A sample in the form of an earlier release."""

    sample: Sample


@dataclass
class Rollout:
    """The samples of one rollout."""

    step: int
    """The first step that uses it."""
    samples: list[Sample] = field(default_factory=list)
    """Group after group; those that are used and those that are left out."""
    refilled: int = 0
    """Prompts answered in place of others."""
    equal: int = 0
    """Groups whose rewards were all equal."""

    @property
    def scored(self) -> list[Scored]:
        """``samples`` as ``[i].sample``, which programs of one's own read before they were one record."""
        return [Scored(sample) for sample in self.samples]

    def minibatches(self, updates: int, size: int) -> list[list[Sample]]:
        """Return the samples of each step: whole groups of ``size``, in their order, as evenly as can be."""
        used = [sample for sample in self.samples if sample.used]
        groups = len(used) // size
        cuts = [number * groups // updates * size for number in range(updates + 1)]
        return [used[begin:end] for begin, end in itertools.pairwise(cuts)]

    def packed(self) -> dict[str, Any]:
        """Return JSON values and tensors: the lists of all samples as one, with their lengths."""
        rows = [dict(vars(sample)) for sample in self.samples]
        lists = {}
        for key, dtype in _LISTS.items():
            values = [row.pop(key) or [] for row in rows]
            lists[key] = torch.tensor([value for row in values for value in row], dtype=dtype)
            lists[f"{key}_lengths"] = torch.tensor([len(row) for row in values], dtype=torch.int64)
        return {"step": self.step, "refilled": self.refilled, "equal": self.equal, "rows": rows, "lists": lists}

    @classmethod
    def unpacked(cls, state: Mapping[str, Any]) -> Rollout:
        """Return the rollout that ``packed`` made this of."""
        samples = [Sample(**row, asked=[]) for row in state["rows"]]
        for key in _LISTS:
            parts = state["lists"][key].split(state["lists"][f"{key}_lengths"].tolist())
            for sample, part in zip(samples, parts, strict=True):
                setattr(sample, key, part.tolist() or getattr(sample, key))
        return cls(state["step"], samples, state["refilled"], state["equal"])


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
        own = self.rl.advantage not in ADVANTAGES
        self._own_estimator = OwnEstimator(self.rl.advantage, self.rl.samples) if own else None
        encoder = PromptEncoder(tokenizer, processor)
        self.loss.never = encoder.never
        self._pad = pad_token(tokenizer)
        engine = choose_engine(self.rollout, model, encoder, folder)
        if isinstance(reward, Mapping):
            reward = Rewards(RewardSection(**reward))
        rewards = reward if isinstance(reward, Rewards) else CalledReward(reward)
        self.sampler = Sampler(engine, rewards, encoder, self.rollout.tokens)
        self.loss.off_policy = self.rollout.ahead > 0 and self.sampler.in_background
        self._prompts, self._accumulate, self._microbatch = prompts, accumulate, microbatch
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
        self._begun: Pending | None = None
        """The first prompts of a rollout whose answers are under way."""
        self._left: list[list[Sample]] = []
        """Samples of the steps to come, of the current rollout."""
        self.minibatch: list[Sample] = []
        """Samples of the current step."""
        self._batches: list[Batch] = []

    def __iter__(self) -> Rollouts:
        return self

    def __next__(self) -> Batch:
        if not self._batches:
            self._begin_step()
        return self._batches.pop(0)

    def _begin_step(self) -> None:
        if not self.minibatch:  # the first step here; the constructor runs no forward, which is collective
            has_images = self.sampler.encoder.has_images
            self.loss.reads_mask = has_images or padding_is_seen(self.model, self._pad, self.device)
        self.step += 1
        self.measures = {}
        if not self._left:
            self.settle()
            self.sampler.update(self.step - 1)
            self.current = self._ahead or self._complete(self._ask(self._groups, self.step))
            self._ahead = None
            if self.rollout.ahead:
                background = self.sampler.in_background
                self._begun = self._ask(self._groups, self.step + self.rl.updates, background=background)
                if not background:
                    self.settle()
            self._left = self.current.minibatches(self.rl.updates, self.rl.samples)
            self.measures |= self._measured(self.current)
        self.minibatch = self._left.pop(0)
        self._batches = [self._batch(self.minibatch, places) for places in self._dealt(self.minibatch)]

    # One rollout

    def settle(self) -> None:
        """Finish the rollout that a server has begun in the background."""
        if self._begun is not None:
            begun, self._begun = self._begun, None
            self._ahead = self._complete(begun)

    def _ask(
        self,
        groups: int,
        step: int,  # of which they are samples
        earlier: Sequence[Sample] = (),  # of the same rollout
        *,
        background: bool = False,  # the engine begins at once
    ) -> Pending:
        """Ask the next prompts, each once a sample; one that comes again in a rollout gets further samples."""
        seen, prompts = Counter(sample.prompt for sample in earlier), []
        for number in self._order.indices(self.consumed, groups).tolist():
            prompt = self.sampler.encoder.of(self._prompts, number)
            prompts += [(prompt, seen[number] + sample) for sample in range(self.rl.samples)]
            seen[number] += self.rl.samples
        self.consumed += groups
        return self.sampler.ask(prompts, step, self.sampling, background=background)

    def _complete(self, pending: Pending) -> Rollout:
        """Answer the prompts, replace groups of equal rewards, and compute what the loss needs."""
        count, skips = self.rl.samples, self.rl.skip_equal
        rollout, kept = Rollout(pending.step), 0
        for number in range(1 + (self.rl.refill if skips else 0)):
            if number:
                missing = self._groups - kept
                pending = self._ask(missing, rollout.step, rollout.samples)
                rollout.refilled += missing
            samples = self._answer(pending)
            rewards = np.array([sample.reward for sample in samples]).reshape(-1, count)
            equal = is_equal(rewards) if count > 1 else np.zeros(len(rewards), dtype=np.bool_)
            rollout.equal += int(equal.sum())
            for sample, same in zip(samples, equal.repeat(count).tolist(), strict=True):
                sample.used = not (same and skips)
            rollout.samples += samples
            kept = sum(sample.used for sample in rollout.samples) // count
            if kept == self._groups:
                break
        for begin in range(0, len(rollout.samples), count):  # equal ones, where a step would have no group else
            if kept < self.rl.updates and not rollout.samples[begin].used:
                kept += 1
                for sample in rollout.samples[begin : begin + count]:
                    sample.used = True
        with self.sampler.timed("score"):
            self._score(rollout)
        self._weigh(rollout)
        return rollout

    def _answer(self, pending: Pending) -> list[Sample]:
        samples = self.sampler.answer(pending)
        if isinstance(self.rl.overlong, dict):
            lengths = np.array([len(sample.tokens) for sample in samples])
            falls = too_long(lengths, self.rl.overlong["from"], self.rollout.tokens)
            for sample, fall in zip(samples, falls.tolist(), strict=True):
                sample.reward, sample.parts = sample.reward + fall, {**sample.parts, "overlong": fall}
        return samples

    def _score(self, rollout: Rollout) -> None:
        """Compute the log-probabilities that the loss compares with, in the microbatches of the steps to come."""
        in_reward = self.rl.kl > 0 and self.rl.kl_place == "reward"
        is_late = rollout.step > self.step and not self.sampler.in_background
        for minibatch in rollout.minibatches(self.rl.updates, self.rl.samples):
            if self.rl.updates > 1 or is_late or in_reward:
                for place, logprobs in self._logprobs(self.model, minibatch).items():
                    minibatch[place].old_logprobs = logprobs
            if self.rl.kl > 0:
                with without_adapter(self.model) if self.reference is None else contextlib.nullcontext():
                    reference = self._logprobs(self.reference or self.model, minibatch)
                for place, logprobs in reference.items():
                    minibatch[place].reference_logprobs = logprobs

    @torch.no_grad()
    def _logprobs(self, model: nn.Module, minibatch: list[Sample]) -> dict[int, list[float]]:
        """Return the log-probabilities of the samples of a minibatch, each computed on the rank that trains on it."""

        def of(places: list[int]) -> torch.Tensor:
            batch = {key: value.to(self.device) for key, value in self._batch(minibatch, places).items()}
            return self.loss.logprobs(model, batch)[0]

        return self._of_samples(minibatch, map(of, self._dealt(minibatch)))

    def _of_samples(self, minibatch: list[Sample], tables: Iterable[torch.Tensor]) -> dict[int, list[float]]:
        """Return the values at each sample's tokens, by its place in a minibatch. Collective.

        ``tables``: [rows, length], of each microbatch of this rank.
        """

        def compute() -> dict[int, list[float]]:
            result = {}
            for places, table in zip(self._dealt(minibatch), tables, strict=False):
                values = table.float().cpu()
                for row, place in enumerate(places):
                    begin, end = _span(minibatch[place])
                    result[place] = values[row, begin:end].tolist()
            return result

        return {place: values for part in on_every_rank(compute) for place, values in part.items()}

    def _weigh(self, rollout: Rollout) -> None:
        """Turn rewards into advantages."""
        used = [sample for sample in rollout.samples if sample.used]
        rewards = np.array([sample.reward for sample in used])
        if self.rl.kl > 0 and self.rl.kl_place == "reward":
            for number, sample in enumerate(used):
                old, reference = (_floats(values) for values in (sample.old_logprobs, sample.reference_logprobs))
                difference = (old - reference).double()[torch.tensor(sample.own)]
                divergence = float(estimates(difference, self.rl.kl_estimator).sum())
                sample.parts["kl"] = divergence
                rewards[number] -= self.rl.kl * divergence
        shape = (-1, self.rl.samples)
        lengths = np.array([sum(sample.own) for sample in used]).reshape(shape)
        baselines = self._baselines(used, rollout) if self.rl.advantage == "greedy" else None
        estimate = self._own_estimator or functools.partial(advantages, self.rl.advantage, baselines=baselines)
        for sample, advantage in zip(used, estimate(rewards.reshape(shape), lengths).ravel().tolist(), strict=True):
            sample.advantage = advantage

    def _baselines(self, used: list[Sample], rollout: Rollout) -> npt.NDArray[np.float64]:
        """Return the reward of the likeliest answer to the prompt of each group."""
        numbers = [sample.prompt for sample in used[:: self.rl.samples]]
        prompts = [(self.sampler.encoder.of(self._prompts, number), 0) for number in dict.fromkeys(numbers)]
        greedy = replace(self.sampling, temperature=0.0)
        pending = self.sampler.ask(prompts, rollout.step, greedy)
        rewards = {sample.prompt: sample.reward for sample in self.sampler.answer(pending)}
        return np.array([rewards[number] for number in numbers])

    # Microbatches

    @property
    def device(self) -> torch.device:
        """The device on which the model computes."""
        return device_of(sharded(self.model).mesh)

    def _dealt(self, minibatch: list[Sample]) -> list[list[int]]:
        """Return the places of a step's samples in this rank's microbatches: by length, and then dealt in turn.

        With a fixed size whole microbatches are dealt, number n of all to rank n modulo ranks; else samples. Some may
        be empty.
        """
        rank, ranks = rank_and_ranks()
        order = sorted(range(len(minibatch)), key=lambda i: (-len(minibatch[i].asked) - len(minibatch[i].tokens), i))
        if (size := self._microbatch) is not None:
            return [
                order[number * size : (number + 1) * size] for number in range(rank, ranks * self._accumulate, ranks)
            ]
        size = -(-len(order) // self._accumulate)
        return [order[number * size : (number + 1) * size][rank::ranks] for number in range(self._accumulate)]

    def _batch(self, minibatch: list[Sample], places: list[int]) -> Batch:
        """Return a batch of ``PolicyLoss``, a row a sample: prompt, then answer, padded at the end.

        The target at a position is the next token, if the model gave it. Without a sample it gets one of another,
        without targets, so that all ranks take part in each pass.
        """
        samples = [minibatch[place] for place in places] or minibatch[:1]
        rows, length = len(samples), max(_span(sample)[1] for sample in samples)
        batch: Batch = {
            "input_ids": torch.full((rows, length), self._pad, dtype=torch.int64),
            "attention_mask": torch.zeros(rows, length, dtype=torch.int64),
            "targets": torch.full((rows, length), IGNORED, dtype=torch.int64),
            "advantages": torch.tensor([sample.advantage for sample in samples], dtype=torch.float32),
        }
        logprobs = {"engine_logprobs": "logprobs"}
        logprobs |= {
            key: key for key in ("old_logprobs", "reference_logprobs") if getattr(minibatch[0], key) is not None
        }
        batch |= {key: torch.zeros(rows, length, dtype=torch.float32) for key in logprobs}
        for row, sample in enumerate(samples):
            begin, end = _span(sample)
            batch["input_ids"][row, :end] = torch.tensor([*sample.asked, *sample.tokens][:-1])
            batch["attention_mask"][row, :end] = 1
            if places and (sample.finished or self.rl.overlong != "mask"):
                targets = torch.tensor(sample.tokens, dtype=torch.int64)
                batch["targets"][row, begin:end] = targets.where(torch.tensor(sample.own, dtype=torch.bool), IGNORED)
            for key, name in logprobs.items():
                batch[key][row, begin:end] = _floats(getattr(sample, name))
        if self.sampler.encoder.has_images:
            conversations = [self._prompts[sample.prompt]["prompt"] for sample in samples]
            batch |= self.sampler.encoder.images(conversations, length, "right")
        return batch

    # What is measured, and kept

    def _measured(self, rollout: Rollout) -> dict[str, float]:
        samples, rewards = rollout.samples, np.array([sample.reward for sample in rollout.samples])
        result = means(samples) | {
            "reward_std": float(rewards.std()),
            "reward_std_group": float(rewards.reshape(-1, self.rl.samples).std(1).mean()),
            "samples_equal": rollout.equal,
            "refilled": rollout.refilled,
            "prompts": self.consumed,
            "length_max": max(len(sample.tokens) for sample in samples),
            "truncated": float(np.mean([not sample.finished for sample in samples])),
            "weights_version": samples[0].weights_version,
            "age": self.step - 1 - samples[0].weights_version,
            "slow_rewards": self.sampler.slow,
        }
        seconds = self.sampler.take_seconds()
        return result | {f"seconds_{key}": seconds[key] for key in ("sync", "generate", "reward", "score")}

    def trained(self) -> dict[int, list[float]]:
        """Return the trainer's log-probabilities of the last step's samples, by place in its minibatch."""
        return self._of_samples(self.minibatch, self.loss.kept)

    def close(self) -> None:
        """End the processes of rewards, and free what the engine holds."""
        self.sampler.rewards.close()
        self.sampler.engine.close()

    def describe_last(self, microbatches: int) -> str:
        """Describe the samples of the last step."""
        prompts = dict.fromkeys(sample.prompt for sample in self.minibatch)
        return f"{len(self.minibatch)} samples of the prompts {', '.join(map(str, prompts))}"

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the prompts, and the samples that are not used yet."""
        self.settle()
        rollouts = {"ahead": self._ahead, "current": self.current if self._left else None}
        kept = {key: rollout.packed() for key, rollout in rollouts.items() if rollout is not None}
        return {"step": self.step, "consumed": self.consumed, "left": len(self._left), "rollouts": kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what ``state_dict`` returned, at any number of ranks."""
        self.step, self.consumed, self._batches = int(state["step"]), int(state["consumed"]), []
        rollouts = {key: Rollout.unpacked(rollout) for key, rollout in state["rollouts"].items()}
        self._ahead, self.current = rollouts.get("ahead"), rollouts.get("current")
        self._left = []
        if self.current is not None:
            self._left = self.current.minibatches(self.rl.updates, self.rl.samples)[-int(state["left"]) :]


def _span(sample: Sample) -> tuple[int, int]:
    """Return the (begin, end) of the positions in a row of a batch whose targets are the sample's tokens."""
    begin = len(sample.asked) - 1
    return begin, begin + len(sample.tokens)


def _floats(values: Sequence[float] | None) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)
