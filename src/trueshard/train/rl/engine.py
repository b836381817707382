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
from trueshard.train.reducing import over_ranks
from trueshard.train.rl.config import ENGINES, RolloutSection
from trueshard.train.rl.ranks import divided, rank_and_ranks
from trueshard.train.rl.sampler import PromptEncoder
from trueshard.train.rl.samples import Answer, Engine, Name, Request, Sampling


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

MOST_BYTES = 4
"""Bytes of a character in UTF-8, at most: a token may be one of them."""


class Draw(LogitsProcessor):
    """Draws the next token of each row, and records it and its log-probability."""

    def __init__(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        ends: Collection[int],
        encoder: PromptEncoder,
    ) -> None:
        self._requests, self._sampling, self._ends, self._tokenizer = requests, sampling, ends, encoder.tokenizer
        self._never = torch.tensor(encoder.never, dtype=torch.int64)  # moved to where the scores are, once
        self._keys = np.array([key_of(sampling.seed, request.name) for request in requests], dtype=np.uint64)
        self._tokens: list[list[int]] = [[] for _ in requests]
        self._logprobs: list[list[float]] = [[] for _ in requests]
        self._finished = [False] * len(requests)
        self.done = [False] * len(requests)
        """True for each row whose answer has ended: transformers goes on with it until the longest has."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores, [rows, vocabulary], of which the drawn token's alone are finite."""
        return scores_of(self.draw(range(len(scores)), scores), like=scores)

    def draw(
        self,
        rows: Sequence[int],  # each at most once
        scores: torch.Tensor,  # [len(rows), vocabulary]
    ) -> torch.Tensor:
        """Draw the next token of some of the rows: int64 [len(rows)]. It counts unless its row's answer has ended."""
        greedy = self._sampling.temperature == 0
        logits = scores.float()
        if len(self._never):
            self._never = self._never.to(logits.device)
            logits = logits.index_fill(1, self._never, -torch.inf)
        logprobs = (logits if greedy else logits / self._sampling.temperature).log_softmax(1)
        if greedy:
            chosen = logprobs.argmax(1)
        else:
            places = np.array([self._requests[row].first + len(self._tokens[row]) for row in rows], dtype=np.uint64)
            numbers = uniform(self._keys[list(rows)], places)
            chosen = drawn(self._warped(logprobs), on_device(numbers, logprobs.device))
        of_chosen = logprobs.gather(1, chosen[:, None])[:, 0]
        # Read together, since each reading waits for the device; float64 holds a token's number, too.
        read = torch.stack([chosen.double(), of_chosen.double()]).tolist()
        for row, token, logprob in zip(rows, *read, strict=True):
            if not self.done[row]:
                self._record(row, int(token), logprob)
        return chosen

    def _warped(self, logprobs: torch.Tensor) -> torch.Tensor:
        sampling, unused = self._sampling, torch.empty(0, dtype=torch.int64)
        if sampling.top_k:
            logprobs = TopKLogitsWarper(sampling.top_k)(unused, logprobs)
        if sampling.top_p == 1:
            return logprobs
        if logprobs.device.type != "cpu":
            return nucleus(logprobs, sampling.top_p)
        return TopPLogitsWarper(sampling.top_p)(unused, logprobs)

    def _record(self, row: int, token: int, logprob: float) -> None:
        self._tokens[row].append(token)
        self._logprobs[row].append(logprob)
        self._finished[row] = token in self._ends or self._at_stop(row)
        self.done[row] = self._finished[row] or len(self._tokens[row]) >= self._requests[row].most

    def _at_stop(self, row: int) -> bool:
        if not self._sampling.stop:
            return False
        stops, tokens = self._sampling.stop, self._tokens[row]
        # A token is a byte, or more.
        first = max(0, len(tokens) - max(len(stop.encode()) for stop in stops) - MOST_BYTES)
        # Some decoders read no character of a run of bytes that begins inside one: then a later byte begins one.
        for begin in range(first, first + MOST_BYTES):
            text = self._tokenizer.decode(tokens[begin:])
            if any(stop in text for stop in stops):
                return True
            if not text.startswith("\N{REPLACEMENT CHARACTER}"):
                break
        return False

    def answers(self) -> list[Answer]:
        """Return the answers of all rows."""
        return list(map(Answer, self._tokens, self._logprobs, self._finished))


class EndOfAnswers(StoppingCriteria):
    """Ends the generation of rows whose answers have ended."""

    def __init__(self, draw: Draw) -> None:
        self._draw = draw

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return on_device(np.array(self._draw.done), input_ids.device)


def on_device(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return an array as a tensor on a device, without waiting for it."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


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
    heights = _cumulative(logs)
    levels = (numbers.to(heights.device)[:, None] * heights[:, -1:]).long()  # rounded, heights end near 2**52
    tokens = torch.searchsorted(heights, levels, right=True)[:, 0]
    last = (heights < heights[:, -1:]).sum(1)  # the last token that has any probability
    return torch.minimum(tokens, last)


def nucleus(
    logs: torch.Tensor,  # [rows, vocabulary], log-probabilities
    top_p: float,
) -> torch.Tensor:
    """Return ``logs`` of the likeliest tokens that have the probability ``top_p`` together, and -inf for the others.

    As transformers' warper, whose sums in float32 have no deterministic kernel on CUDA.
    """
    ordered, places = logs.sort(1)
    outside = _cumulative(ordered) <= round((1 - top_p) * 2**52)
    outside[:, -1] = False
    return logs.masked_fill(outside.scatter(1, places, outside), -torch.inf)


def _cumulative(logs: torch.Tensor) -> torch.Tensor:
    """Return cumulative probabilities of each row in steps of 2**-52, int64.

    In fixed point: sums of integers are exact in any order, and CUDA has no deterministic cumsum of floats.
    """
    return (logs.softmax(1).double() * 2.0**52).round().long().cumsum(1)


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
