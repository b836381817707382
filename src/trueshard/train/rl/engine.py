"""Sampling with transformers' own ``generate``, on the model that is trained: any architecture, with its cache.

- ``gathered``: on a whole copy in the compute dtype, on each rank by itself. ``sharded``, ``kept``: on the sharded
  model, so that all ranks march together, one forward a token.
- Requests are generated in pieces of ``batch``, whose content follows from the order of requests and not from the
  number of ranks; piece i on rank i modulo ranks. Each form of the engine gives the same tokens.
- Continuous batching, the fourth form, is in ``continuous``.
- Tokens are drawn by inverse CDF. A sample is a function of (seed, step, prompt, sample) and of the weights: number t
  of its uniform random numbers, from which its token t is drawn, is a hash of these and of t. No generator has a state,
  so none is saved, lost, or shared by samples that are generated together.
- transformers samples with one generator for all rows. Here one token of each row is left finite instead, and whoever
  takes the likeliest token takes it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import itertools
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import torch
import torch.distributed as dist
import transformers
from torch import nn
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria, TopKLogitsWarper, TopPLogitsWarper

from trueshard.distributed import device_of
from trueshard.errors import UserError
from trueshard.model import names
from trueshard.sharding.engine import set_reshard_after_forward, sharded
from trueshard.sharding.gathering import GatheredCopy
from trueshard.train.data.order import draws, mix
from trueshard.train.data.tokenizer import pad_token
from trueshard.train.rl.config import ENGINES, RolloutSection
from trueshard.train.rl.ranks import divided, rank_and_ranks
from trueshard.train.rl.sampler import PromptEncoder
from trueshard.train.rl.samples import Answer, Engine, Name, Request, Sampling
from trueshard.train.trainer import over_ranks


class TransformersEngine:
    """Generates on the model itself; see the file's docstring."""

    def __init__(
        self,
        model: nn.Module,  # sharded
        encoder: PromptEncoder,
        ends: Collection[int],  # tokens that end an answer
        *,
        copy: str = "gathered",  # "gathered", "kept" or "sharded"
        batch: int = 64,  # requests that are generated together
    ) -> None:
        if not callable(getattr(names.unwrap(model), "generate", None)):
            raise UserError(f"rollout.engine: a {type(names.unwrap(model)).__name__} has no generate(); use another")
        self._model, self._encoder, self._ends, self._batch = model, encoder, frozenset(ends), batch
        self._pad = pad_token(encoder.tokenizer)
        self._device = device_of(sharded(model).mesh)
        self._kept = copy == "kept"
        self._copy: GatheredCopy | None = GatheredCopy(model) if copy == "gathered" else None
        self._root: Any = names.unwrap(model if self._copy is None else self._copy.module)
        """The model to generate on."""

    def update(self, version: int) -> None:
        """Take over the weights of the model. Collective."""
        if self._copy is None:
            return
        self._copy.update()
        # Also without gradients, torch multiplies otherwise by a matrix that requires one: the last digit may differ.
        for twin, parameter in zip(self._copy.module.parameters(), self._model.parameters(), strict=True):
            twin.requires_grad_(parameter.requires_grad)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Answer]:
        """Continue each request; the same requests and answers on every rank. Collective."""
        pieces = [list(requests[at : at + self._batch]) for at in range(0, len(requests), self._batch)]
        ranks = rank_and_ranks()[1]
        together = self._copy is None and ranks > 1
        if together:  # all ranks take part in each forward, so they generate equally many pieces
            pieces += [pieces[-1]] * (-len(pieces) % ranks)
        with self._generating():
            answers = divided(pieces, lambda part: [self._piece(piece, sampling, together) for piece in part])
        return list(itertools.chain.from_iterable(answers))[: len(requests)]

    def close(self) -> None:
        """Free the copy."""
        if self._copy is not None:
            self._copy.close()

    @contextlib.contextmanager
    def _generating(self) -> Iterator[None]:
        """Put the model into evaluation mode, and set its own generation settings aside."""
        root = self._root
        training, settings = root.training, root.generation_config
        policy = sharded(self._model).plan.reshard_after_forward
        if training:
            root.eval()
        root.generation_config = GenerationConfig()
        if self._kept:
            set_reshard_after_forward(self._model, "never")
        try:
            with torch.no_grad():
                yield
        finally:
            root.generation_config = settings
            if self._kept:
                set_reshard_after_forward(self._model, policy)
            if training:
                root.train()

    def _piece(self, requests: list[Request], sampling: Sampling, together: bool) -> list[Answer]:
        width = max(len(request.ids) for request in requests)
        ids = torch.full((len(requests), width), self._pad, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            ids[row, width - len(request.ids) :] = torch.tensor(request.ids)
            mask[row, width - len(request.ids) :] = 1
        inputs = {"input_ids": ids, "attention_mask": mask}
        if self._encoder.has_images:
            inputs |= self._encoder.images([request.messages or [] for request in requests], width)
        draw = Draw(requests, sampling, self._ends, self._encoder)
        self._root.generate(
            **{key: value.to(self._device) for key, value in inputs.items()},
            generation_config=GenerationConfig(
                max_new_tokens=max(request.most for request in requests),
                do_sample=False,
                pad_token_id=self._pad,
                use_cache=True,
            ),
            logits_processor=[draw],
            stopping_criteria=[EndOfAnswers(draw)],
            synced_gpus=together,
        )
        return draw.answers()


ROOM = 0.5
"""Part of the free memory that a gathered copy may take with `rollout.copy = "auto"`."""


def choose_engine(section: RolloutSection, model: nn.Module, encoder: PromptEncoder, folder: Path | None) -> Engine:
    """Return the engine of `[rollout]`. Collective; raises `UserError`."""
    module, _, function = ENGINES[section.engine].build.partition(":")
    engine: Engine = getattr(importlib.import_module(module), function)(section, model, encoder, folder)
    return engine


def build(section: RolloutSection, model: nn.Module, encoder: PromptEncoder, folder: Path | None) -> Engine:
    """Return the engine "transformers" in the form that `[rollout]` asks for. Collective; raises `UserError`."""
    ends = ends_of(model, encoder)
    copy = section.copy_ if section.copy_ != "auto" else ("gathered" if copy_fits(model) else "kept")
    if not section.continuous:
        return TransformersEngine(model, encoder, ends, copy=copy, batch=section.batch)
    continuous = import_continuous()
    if encoder.has_images:
        raise UserError("rollout.continuous: transformers batches text alone continuously; remove it")
    if copy != "gathered":
        raise UserError(
            "rollout.continuous generates on a whole copy of the model, which the free memory does not hold; remove it"
        )
    result: Engine = continuous.ContinuousEngine(model, encoder, ends, batch=section.batch)
    return result


def import_continuous() -> Any:
    """Return the module of the continuous engine. Raises `UserError` if this transformers lacks what it uses."""
    try:
        return importlib.import_module("trueshard.train.rl.continuous")
    except ImportError as error:
        raise UserError(
            "rollout.continuous needs the continuous batching of transformers 5.19 to 5.23, and this is "
            f"{transformers.__version__} ({error}); install one of these, or remove the key"
        ) from error


def ends_of(model: nn.Module, encoder: PromptEncoder) -> set[int]:
    """Return the tokens that end an answer: end of text, of the model's generation settings, of a turn of a chat."""
    inner: Any = names.unwrap(model)
    inner = inner.get_base_model() if hasattr(inner, "peft_config") else inner
    more = getattr(getattr(inner, "generation_config", None), "eos_token_id", None)
    ends = {encoder.tokenizer.eos_token_id, *(more if isinstance(more, list) else [more])}
    if encoder.template is not None and (end := encoder.template.ends_turn()) is not None:
        ends.add(encoder.tokenizer.convert_tokens_to_ids(end))
    return ends - {None}


def probe_bound(model: nn.Module) -> float:
    """Return how far the log-probabilities of two right programs may be apart, in nats, for a sharded model.

    Measured between engines: up to 7e-6 in float32, and 0.065 in bfloat16, on models of few layers. Rounding adds up
    over layers and rows, so the bounds leave a hundred and five times that; float16 has three bits more than bfloat16.
    """
    dtype = sharded(model).compute_dtype or next(model.parameters()).dtype
    return {torch.float16: 0.04, torch.bfloat16: 0.3}.get(dtype, 1e-3)


def probes(vocabulary: int) -> list[list[int]]:
    """Return a few texts of any tokens, by which an engine's weights are known."""
    tokens = draws(0, vocabulary)
    return [list(itertools.islice(tokens, 16)) for _ in range(4)]


def copy_fits(model: nn.Module) -> bool:
    """Return True if a whole copy in the compute dtype takes at most half of every rank's free memory. Collective."""
    runtime = sharded(model)
    size = sum(
        parameter.numel() * (runtime.compute_dtype or parameter.dtype).itemsize for parameter in model.parameters()
    )
    device = device_of(runtime.mesh)
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = psutil.virtual_memory().available // rank_and_ranks()[1]
    return bool(over_ranks([free], device, dist.ReduceOp.MIN)[0] * ROOM > size)


# Drawing tokens


class Draw(LogitsProcessor):
    """Draws the next token of each row, and records it and its log-probability."""

    def __init__(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        ends: Collection[int],
        encoder: PromptEncoder,
    ) -> None:
        rows, most = len(requests), max(request.most for request in requests)
        self._sampling, self._ends, self._tokenizer = sampling, np.array(sorted(ends)), encoder.tokenizer
        self._never = torch.tensor(encoder.never, dtype=torch.int64)
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
        return scores_of(self.draw(self._all, scores), like=scores)

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


def scores_of(
    tokens: torch.Tensor,  # [rows]
    like: torch.Tensor,  # [rows, vocabulary]
) -> torch.Tensor:
    """Return scores of which only those of ``tokens`` are finite, so that transformers' greedy choice is these."""
    return torch.full_like(like, -torch.inf).scatter_(1, tokens[:, None], 0.0)


def drawn(
    logs: torch.Tensor,  # [rows, vocabulary], log-probabilities or anything that differs from them by a constant
    numbers: torch.Tensor,  # [rows], float64 in [0, 1)
) -> torch.Tensor:
    """Return the token of each row at which its cumulative distribution first exceeds a number: int64 [rows]."""
    heights = logs.softmax(1).double().cumsum(1)
    levels = numbers.to(heights.device)[:, None] * heights[:, -1:]  # rounded, heights do not end at exactly 1
    tokens = torch.searchsorted(heights, levels, right=True)[:, 0]
    last = (heights < heights[:, -1:]).sum(1)  # the last token that has any probability
    return torch.minimum(tokens, last)


def key_of(seed: int, name: Name) -> int:
    """Return the 64-bit key of a sample: a hash of its name."""
    text = "/".join(map(str, (seed, *name)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def uniform(
    keys: npt.NDArray[np.uint64],  # [samples]
    numbers: npt.NDArray[np.uint64],  # [samples]: which random number of each
) -> npt.NDArray[np.float64]:
    """Return one random number of each sample, in [0, 1): float64 [samples], multiples of 2**-53."""
    return (mix(mix(numbers) ^ keys) >> np.uint64(11)).astype(np.float64) * 2.0**-53
