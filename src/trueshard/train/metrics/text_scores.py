"""Metrics of generated answers beside their targets, by the words of ``evaluation.metrics``.

- exact_match and f1, 0 to 1: as for SQuAD (Rajpurkar et al. 2016, evaluation script of version 2.0): in lower case,
  without punctuation and articles; F1 is of the words that both have, counted as often as both have them.
- bleu, 0 to 100: of all answers together, by sacrebleu. rouge: rouge1, rouge2 and rougeL, 0 to 1, F-measures by
  rouge-score.
- "file.py:function": (answer, target, prompt), texts, → a number, or a dict of several.

A metric measures answers one by one; what it measured is put together afterwards. So no rank needs all answers.
"""

from __future__ import annotations

import importlib
import math
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from trueshard.errors import UserError
from trueshard.train.own_code import blamed, own
from trueshard.train.rl.reward_functions import number

KEY = "evaluation.metrics"
Scores = dict[str, float]


def mean(measured: Sequence[Scores]) -> Scores:
    """Return the mean of each value, over the answers that have it; the same in any order."""
    values: dict[str, list[float]] = {}
    for scores in measured:
        for key, value in scores.items():
            values.setdefault(key, []).append(value)
    return {key: math.fsum(scores) / len(scores) for key, scores in values.items()}


class Metric(NamedTuple):
    """One word of the configuration."""

    measure: Callable[[str, str, str], Any]  # answer, target and prompt → a picklable value
    total: Callable[[Sequence[Any]], Scores] = mean  # such values, of one or more answers


def words_of(text: str) -> list[str]:
    """Return the words of a text that SQuAD compares."""
    plain = text.lower().translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def exact_match(answer: str, target: str, prompt: str) -> Scores:
    return {"exact_match": float(words_of(answer) == words_of(target))}


def f1(answer: str, target: str, prompt: str) -> Scores:
    made, wanted = words_of(answer), words_of(target)
    shared = sum((Counter(made) & Counter(wanted)).values())
    return {"f1": 2 * shared / (len(made) + len(wanted)) if made and wanted else float(made == wanted)}


def bleu() -> Metric:
    """Return BLEU: counts of n-grams of each answer, which are added up."""
    kind = _imported("bleu", "sacrebleu").BLEU
    sentence = kind(effective_order=True)

    def measure(answer: str, target: str, prompt: str) -> list[int]:
        score = sentence.sentence_score(answer, [target])
        return [*score.counts, *score.totals, score.sys_len, score.ref_len]

    def total(measured: Sequence[list[int]]) -> Scores:
        *counts, made, wanted = (sum(column) for column in zip(*measured, strict=True))
        orders = {"smooth_method": "exp", "effective_order": len(measured) == 1}  # as for a sentence, for a corpus
        return {"bleu": float(kind.compute_bleu(counts[:4], counts[4:], made, wanted, **orders).score)}

    return Metric(measure, total)


def rouge() -> Metric:
    scorer = _imported("rouge", "rouge_score.rouge_scorer").RougeScorer(["rouge1", "rouge2", "rougeL"])
    return Metric(lambda answer, target, prompt: {k: s.fmeasure for k, s in scorer.score(target, answer).items()})


METRICS: dict[str, Callable[[], Metric]] = {
    "exact_match": lambda: Metric(exact_match),
    "f1": lambda: Metric(f1),
    "bleu": bleu,
    "rouge": rouge,
}


def metric_of(words: str) -> Metric:
    """Return the metric of a word, or of "file.py:function". Raises `UserError`: a package or function is missing."""
    if words in METRICS:
        return METRICS[words]()
    call, name = own(KEY, words, "answer", "target", "prompt"), words.rpartition(":")[2]

    def measure(answer: str, target: str, prompt: str) -> Scores:
        with blamed(KEY, words):
            value = call(answer, target, prompt)
            values = value if isinstance(value, Mapping) else {name: value}
            return {str(key): number(f"{key} is", score) for key, score in values.items()}

    return Metric(measure)


def _imported(word: str, module: str) -> Any:
    package = module.partition(".")[0].replace("_", "-")
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{KEY}: {word} needs {package}, which is not installed; pip install {package}") from error
