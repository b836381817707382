"""Draws tokens by inverse CDF, with the random numbers of the samples' names.

transformers samples with one generator for all rows. Here one token of each row is left finite instead, and whoever
takes the likeliest token takes it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import LogitsProcessor, StoppingCriteria, TopKLogitsWarper, TopPLogitsWarper

from trueshard.train.rl.samples import Answer, Request, Sampling, key_of, uniform


class Draw(LogitsProcessor):
    """Draws the next token of each row, and records it and its log-probability."""

    def __init__(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        ends: Collection[int],
        tokenizer: Any,
        never: Sequence[int] = (),  # tokens that are not drawn
    ) -> None:
        rows, most = len(requests), max(request.most for request in requests)
        self._sampling, self._ends, self._tokenizer = sampling, np.array(sorted(ends)), tokenizer
        self._never = torch.tensor(never, dtype=torch.int64)
        self._most = np.array([request.most for request in requests])
        self._keys = np.array([key_of(sampling.seed, request.name) for request in requests], dtype=np.uint64)
        self._firsts = np.array([request.first for request in requests], dtype=np.uint64)
        self._tokens = np.zeros((rows, most), dtype=np.int64)
        self._logprobs = np.zeros((rows, most), dtype=np.float32)
        self._lengths = np.zeros(rows, dtype=np.int64)
        self._finished = np.zeros(rows, dtype=np.bool_)
        self.done = np.zeros(rows, dtype=np.bool_)
        """[rows]: True if the answer of a row has ended."""
        self._all = np.arange(rows)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores, [rows, vocabulary], of which the drawn token's alone are finite."""
        return alone(scores, self.draw(self._all, scores))

    def draw(
        self,
        rows: npt.NDArray[np.int64],  # [n], each at most once
        scores: torch.Tensor,  # [n, vocabulary]
    ) -> torch.Tensor:
        """Draw the next token of some of the rows: int64 [n]. It counts unless the answer of its row has ended."""
        greedy = self._sampling.temperature == 0
        logits = scores.float()
        if len(self._never):
            logits = logits.index_fill(1, self._never.to(logits.device), -torch.inf)
        logs = (logits if greedy else logits / self._sampling.temperature).log_softmax(1)
        numbers = uniform(self._keys[rows], self._firsts[rows] + self._lengths[rows].astype(np.uint64))
        chosen = logs.argmax(1) if greedy else drawn(self._warped(logs), torch.from_numpy(numbers))
        self._record(rows, chosen.cpu().numpy(), logs.gather(1, chosen[:, None])[:, 0].cpu().numpy())
        return chosen

    def _warped(self, logs: torch.Tensor) -> torch.Tensor:
        sampling, unused = self._sampling, torch.empty(0, dtype=torch.int64)
        if sampling.top_k:
            logs = TopKLogitsWarper(sampling.top_k)(unused, logs)
        return TopPLogitsWarper(sampling.top_p)(unused, logs) if sampling.top_p < 1 else logs

    def _record(
        self, rows: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64], logprobs: npt.NDArray[np.float32]
    ) -> None:
        counts = ~self.done[rows]
        live, tokens = rows[counts], tokens[counts]
        self._tokens[live, self._lengths[live]] = tokens
        self._logprobs[live, self._lengths[live]] = logprobs[counts]
        self._lengths[live] += 1
        ended = np.isin(tokens, self._ends)
        if self._sampling.stop:
            ended |= [self._at_stop(row) for row in live.tolist()]
        self._finished[live] = ended
        self.done[live] = ended | (self._lengths[live] >= self._most[live])

    def _at_stop(self, row: int) -> bool:
        longest = max(len(text) for text in self._sampling.stop)
        end = self._lengths[row]
        text = self._tokenizer.decode(self._tokens[row, max(0, end - longest - 1) : end])  # a token is at least a byte
        return any(stop in text for stop in self._sampling.stop)

    def answers(self) -> list[Answer]:
        """Return the answers of all rows."""
        return [
            Answer(self._tokens[row, :end].tolist(), self._logprobs[row, :end].tolist(), bool(self._finished[row]))
            for row, end in enumerate(self._lengths.tolist())
        ]


class EndOfAnswers(StoppingCriteria):
    """Ends the generation of rows whose answers have ended."""

    def __init__(self, draw: Draw) -> None:
        self._draw = draw

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.from_numpy(self._draw.done.copy()).to(input_ids.device)


def alone(
    scores: torch.Tensor,  # [rows, vocabulary]
    tokens: torch.Tensor,  # [rows]
) -> torch.Tensor:
    """Return scores of which those of ``tokens`` alone are finite: who takes the likeliest token takes these."""
    return torch.full_like(scores, -torch.inf).scatter_(1, tokens[:, None], 0.0)


def drawn(
    logs: torch.Tensor,  # [rows, vocabulary], log-probabilities or anything that differs from them by a constant
    numbers: torch.Tensor,  # [rows], float64 in [0, 1)
) -> torch.Tensor:
    """Return the token of each row at which its cumulative distribution first exceeds a number: int64 [rows]."""
    heights = logs.softmax(1).double().cumsum(1)
    wanted = numbers.to(heights.device)[:, None] * heights[:, -1:]
    found = torch.searchsorted(heights, wanted, right=True)[:, 0]
    likeliest = (heights < heights[:, -1:]).sum(1)  # the last token that has any probability
    return torch.minimum(found, likeliest)
