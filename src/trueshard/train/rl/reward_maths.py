"""The reward ``maths``: 1.0 if an answer equals the record's "answer", as mathematics, by the package math-verify."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from math_verify import parse, verify

from trueshard.train.rl.samples import Sample

_LATEX = ("$", "\\boxed", "\\(", "\\[")
"""Marks of text in which LaTeX is set off already."""


def maths(completion: str, record: Mapping[str, Any], sample: Sample) -> float:
    """Return 1.0 if the last expression of ``completion`` equals ``record["answer"]``, else 0.0.

    Raises:
        ValueError: the record's answer is no expression.
    """
    answer = str(record["answer"])
    wanted = parse(answer if any(mark in answer for mark in _LATEX) else f"${answer}$")
    if not wanted:
        raise ValueError(f"the record's answer {answer[:60]!r} is no mathematical expression")
    return float(verify(wanted, parse(completion)))
