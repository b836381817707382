"""Answers to prompts of the evaluation sets: the model generates them, and metrics compare them with the targets.

- The target is the last answer of a conversation, or the completion; the prompt is all before it, as in training. A
  record that was cut at ``train.sequence_length`` is left out, and one that leaves no room for an answer.
- Which records: the first of a random order of the set's, always the same one.
- Answers are generated in pieces that follow from this order, a piece on each rank at a time. Ranks score theirs, and
  rank 0 writes all before the next pieces: no rank ever holds more than those.
- An answer is a function of the weights, the seed and the prompt's number: the same at any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, pairwise
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from trueshard.axes import sizes_of
from trueshard.errors import UserError
from trueshard.model import names
from trueshard.text import logger
from trueshard.train.config import Config
from trueshard.train.data.batches import IGNORED, Samples
from trueshard.train.data.order import Order
from trueshard.train.data.prepared import Prepared
from trueshard.train.evaluation import Metrics, named
from trueshard.train.metrics.answers import SamplesWriter, line, pieces_of
from trueshard.train.metrics.text_scores import metric_of
from trueshard.train.metrics.trackers import Tracking
from trueshard.train.rl.config import RolloutSection
from trueshard.train.rl.engine import build, ends_of
from trueshard.train.rl.ranks import divided, on_first_rank
from trueshard.train.rl.sampler import PromptEncoder
from trueshard.train.rl.samples import Answer, Request, Sample, Sampling
from trueshard.train.trainer import Trainer

ORDER_SEED = 30_000


class Question(NamedTuple):
    """A prompt and its target, as tokens."""

    number: int  # in the order in which a set's prompts are asked
    ids: list[int]
    target: list[int]


def prompts_of(config: Config, samples: Samples) -> Iterator[tuple[list[int], list[int]]]:
    """Yield prompt and target of each record of a set, as tokens, in a fixed random order of the samples."""
    assert config.evaluation is not None
    length, order = config.train.sequence_length, Order(ORDER_SEED, [len(samples)], [1])
    for place in range(len(samples)):
        sample = samples[int(order.indices(place, 1)[0])]
        ids, targets = sample["input_ids"], sample["targets"]
        starts = np.flatnonzero(sample["position_ids"] == 0) if "position_ids" in sample else np.zeros(1, dtype=int)
        for first, last in pairwise([*starts.tolist(), len(ids)]):
            counted = first + np.flatnonzero(targets[first:last] != IGNORED)
            if not len(counted) or last - first == length:  # padding; or cut, perhaps
                continue
            begin = counted[np.flatnonzero(np.diff(counted, prepend=-2) > 1)[-1]]  # of the last run of targets
            prompt = ids[first : begin + 1].tolist()
            if len(prompt) + config.evaluation.tokens <= length:
                yield prompt, targets[begin : counted[-1] + 1].tolist()


def check_answers(config: Config, data: Prepared) -> list[str]:
    """Return the names of all metrics of answers. Raises `UserError` for a metric, or a set without prompts."""
    section, scores = config.evaluation, dict[str, float]()
    assert section is not None
    metrics, encoder = [metric_of(words) for words in section.metrics], PromptEncoder(data.tokenizer)
    for name, samples in data.evaluation.items():
        example = next(prompts_of(config, samples), None)
        if example is None:
            key = section.paths[name][0] if name in section.paths else "evaluation.fraction"
            raise UserError(
                f"{key}: no prompt leaves room for an answer of evaluation.tokens = {section.tokens} within "
                f"train.sequence_length = {config.train.sequence_length}; lower the former, or raise the latter"
            )
        prompt, target = (encoder.text(ids, True) for ids in example)
        for metric in metrics:
            scores |= metric.total([metric.measure(target, target, prompt)])
    return [named(name, metric) for name in data.evaluation for metric in scores]


class GeneratedAnswers(SamplesWriter):
    """Metrics of generated answers: a function for ``Trainer(evaluation=...)``, and a callback that writes them."""

    def __init__(self, config: Config, data: Prepared, model: nn.Module, tracking: Tracking | None) -> None:
        assert config.evaluation is not None
        super().__init__(config.run.folder, tracking, text_every=1)
        root = names.unwrap(model)
        if not callable(getattr(root, "generate", None)):
            raise UserError(f"evaluation.generate: a {type(root).__name__} has no generate(); remove it")
        section, self._model, self._encoder = config.evaluation, model, PromptEncoder(data.tokenizer)
        self._metrics, self._ends = [metric_of(words) for words in section.metrics], ends_of(model, self._encoder)
        self._pieces, self._most, self._wanted = pieces_of(data.tokenizer), section.tokens, section.generate or 0
        # Ranks that share matrices or sequences answer different prompts, each with a copy of its own.
        shares = any(size > 1 for size in sizes_of(config.shard.options()).values())
        self._rollout = RolloutSection(batch=section.batch, copy="gathered" if shares else "auto")
        self._sampling = Sampling(section.temperature, section.top_p, section.top_k, seed=config.train.seed + 1)
        self._questions = {
            name: [
                Question(number, *prompt)
                for number, prompt in enumerate(islice(prompts_of(config, samples), section.generate))
            ]
            for name, samples in data.evaluation.items()
        }

    def on_start(self, trainer: Trainer) -> None:
        super().on_start(trainer)
        self._trainer = trainer
        few = {name: len(questions) for name, questions in self._questions.items() if len(questions) < self._wanted}
        if few and trainer.rank == 0:
            counts = ", ".join(f"{count} {f'of {name}' * bool(name)}".rstrip() for name, count in few.items())
            logger.warning("prompts that fit, of evaluation.generate = %d: %s", self._wanted, counts)

    def __call__(self) -> Metrics:
        """Return the metrics of all sets. Collective; the same on every rank."""
        engine, result = build(self._rollout, self._model, self._encoder, None), Metrics()
        at_once = self._rollout.batch * self._trainer.ranks
        try:
            for name, questions in self._questions.items():
                measured: list[list[Any]] = []  # of each answer, by each metric
                for first in range(0, len(questions), at_once):
                    asked = questions[first : first + at_once]
                    requests = [Request((0, question.number, 0), question.ids, most=self._most) for question in asked]
                    answers = engine.generate(requests, self._sampling)
                    pairs = list(zip(asked, answers, strict=True))
                    scored = divided(pairs, lambda part: [self._measured(*pair) for pair in part])
                    measured += scored
                    self._write(name, pairs, scored)
                for metric, values in zip(self._metrics, zip(*measured, strict=True), strict=True):
                    result |= {named(name, key): value for key, value in metric.total(values).items()}
        finally:
            engine.close()
        return result

    def _texts(self, question: Question, answer: Answer) -> tuple[str, str, str]:
        """Return answer, target and prompt as text; the target up to its first token that ends an answer."""
        end = next((at for at, token in enumerate(question.target, 1) if token in self._ends), len(question.target))
        text, target = self._encoder.text(answer.ids, answer.finished), self._encoder.text(question.target[:end], True)
        return text, target, self._encoder.tokenizer.decode(question.ids)

    def _measured(self, question: Question, answer: Answer) -> list[Any]:
        texts = self._texts(question, answer)
        return [metric.measure(*texts) for metric in self._metrics]

    def _write(self, name: str, pairs: list[tuple[Question, Answer]], scored: list[list[Any]]) -> None:
        step = self._trainer.step

        def line_of(question: Question, answer: Answer, values: list[Any]) -> dict[str, Any]:
            text, target, prompt = self._texts(question, answer)
            of_each = [metric.total([one]) for metric, one in zip(self._metrics, values, strict=True)]
            own, parts = [True] * len(answer.ids), {key: value for part in of_each for key, value in part.items()}
            sample = Sample(step, question.number, 0, question.ids, answer.ids, own, answer.logprobs, text)
            sample.finished, sample.parts, sample.weights_version = answer.finished, parts, step
            sample.reward = next(iter(parts.values()))
            result = line(sample, prompt, self._pieces(answer.ids))
            return result | {"set": name, "target": target, "advantage": None}

        lines = ((*pair, values) for pair, values in zip(pairs, scored, strict=True))
        on_first_rank(lambda: self.write([line_of(*shown) for shown in lines]))
