"""Sampling with transformers' own ``generate``, on the model that is trained: any architecture, with its cache.

- ``gathered``: on a whole copy in the compute dtype, on each rank by itself. ``sharded``, ``kept``: on the sharded
  model, so that all ranks march together, one forward a token.
- Requests are generated in pieces of ``batch``, whose content follows from the order of requests and not from the
  number of ranks; piece i on rank i modulo ranks. Each form of the engine gives the same tokens.
- Tokens are drawn here, by inverse CDF with the random numbers of the sample's name, and not by ``generate``, which has
  one generator for all rows: one token is left finite, which it then takes.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import nn
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria, TopKLogitsWarper, TopPLogitsWarper

from trueshard.distributed import device_of
from trueshard.errors import UserError
from trueshard.model import names
from trueshard.runtime.engine import set_reshard_after_forward, sharded
from trueshard.runtime.gathering import GatheredCopy
from trueshard.train.config import RolloutSection
from trueshard.train.data.samples import draws
from trueshard.train.rl.batch import PromptEncoder
from trueshard.train.rl.policy import PolicyLoss
from trueshard.train.rl.ranks import divided, rank_and_ranks
from trueshard.train.rl.samples import Answer, Engine, Request, Sampling, key_of, uniform
from trueshard.train.trainer import over_ranks

Images = Callable[[Sequence[list[dict[str, Any]]], int], dict[str, torch.Tensor]]
"""(conversations with images, width) → the model's inputs besides tokens; those of a token a place, padded on the left.
"""


class TransformersEngine:
    """Generates on the model itself; see the file's docstring."""

    def __init__(
        self,
        model: nn.Module,  # sharded
        tokenizer: Any,
        ends: Collection[int],  # tokens that end an answer
        *,
        copy: str = "gathered",  # "gathered", "kept" or "sharded"
        batch: int = 64,  # requests that are generated together
        images: Images | None = None,
        never: Sequence[int] = (),  # tokens that are not drawn
    ) -> None:
        if not callable(getattr(names.unwrap(model), "generate", None)):
            raise UserError(f"rollout.engine: a {type(names.unwrap(model)).__name__} has no generate(); use another")
        self._model, self._tokenizer, self._batch, self._images = model, tokenizer, batch, images
        self._ends, self._never = frozenset(ends), list(never)
        self._pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self._device = device_of(sharded(model).mesh)
        self._kept = copy == "kept"
        self._copy: GatheredCopy | None = GatheredCopy(model) if copy == "gathered" else None
        if self._copy is not None:
            self._copy.module.eval()

    def update(self, version: int) -> None:
        """Take over the weights of the model. Collective."""
        if self._copy is not None:
            self._copy.update()

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Answer]:
        """Continue each request; the same requests and answers on every rank. Collective."""
        pieces = [list(requests[at : at + self._batch]) for at in range(0, len(requests), self._batch)]
        ranks = rank_and_ranks()[1]
        together = self._copy is None and ranks > 1
        if together:  # all ranks take part in each forward, so they generate equally many pieces
            pieces += [pieces[-1]] * (-len(pieces) % ranks)
        with self._generating() as model:
            found = divided(pieces, lambda own: [self._piece(model, each, sampling, together) for each in own])
        return [answer for piece in found for answer in piece][: len(requests)]

    def close(self) -> None:
        """Free the copy."""
        if self._copy is not None:
            self._copy.close()

    @contextlib.contextmanager
    def _generating(self) -> Iterator[Any]:
        """Give the model to generate on, in evaluation mode and without generation settings of its own."""
        root: Any = names.unwrap(self._model if self._copy is None else self._copy.module)
        training, settings = root.training, root.generation_config
        policy = sharded(self._model).plan.reshard_after_forward
        if training:
            root.eval()
        root.generation_config = GenerationConfig()
        if self._kept:
            set_reshard_after_forward(self._model, "never")
        try:
            with torch.no_grad():
                yield root
        finally:
            root.generation_config = settings
            if self._kept:
                set_reshard_after_forward(self._model, policy)
            if training:
                root.train()

    def _piece(self, model: Any, requests: list[Request], sampling: Sampling, together: bool) -> list[Answer]:
        width = max(len(request.ids) for request in requests)
        ids = torch.full((len(requests), width), self._pad, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            ids[row, width - len(request.ids) :] = torch.tensor(request.ids)
            mask[row, width - len(request.ids) :] = 1
        inputs = {"input_ids": ids, "attention_mask": mask}
        if self._images is not None:
            inputs |= self._images([request.messages or [] for request in requests], width)
        draw = Draw(requests, sampling, self._ends, self._tokenizer, self._never)
        model.generate(
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


class Draw(LogitsProcessor):
    """Draws the next token of each row, and records it and its log-probability."""

    def __init__(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        ends: Collection[int],
        tokenizer: Any,
        never: list[int],  # tokens that are not drawn
    ) -> None:
        self._sampling, self._ends, self._tokenizer = sampling, np.array(sorted(ends)), tokenizer
        self._never = never
        self._most = np.array([request.most for request in requests])
        self._keys = np.array([key_of(sampling.seed, request.name) for request in requests], dtype=np.uint64)
        self._firsts = np.array([request.first for request in requests], dtype=np.uint64)
        self._drawn: list[
            tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
        ] = []  # tokens and log-probabilities, [rows]
        self._lengths = np.zeros(len(requests), dtype=np.int64)
        self._finished = np.zeros(len(requests), dtype=np.bool_)
        self.done = np.zeros(len(requests), dtype=np.bool_)
        """[rows]: True if the answer of a row has ended."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores, [rows, vocabulary], of which the drawn token's alone are finite."""
        greedy = self._sampling.temperature == 0
        logits = scores.float()
        if self._never:
            logits = logits.index_fill(1, torch.tensor(self._never, device=logits.device), -torch.inf)
        logs = (logits if greedy else logits / self._sampling.temperature).log_softmax(1)
        numbers = uniform(self._keys, self._firsts + np.uint64(len(self._drawn)))
        chosen = logs.argmax(1) if greedy else drawn(self._warped(input_ids, logs), torch.from_numpy(numbers))
        self._record(chosen.cpu().numpy(), logs.gather(1, chosen[:, None])[:, 0].cpu().numpy())
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen[:, None], 0.0)

    def _warped(self, input_ids: torch.Tensor, logs: torch.Tensor) -> torch.Tensor:
        sampling = self._sampling
        if sampling.top_k:
            logs = TopKLogitsWarper(sampling.top_k)(input_ids, logs)
        return TopPLogitsWarper(sampling.top_p)(input_ids, logs) if sampling.top_p < 1 else logs

    def _record(self, tokens: np.ndarray[Any, Any], logprobs: np.ndarray[Any, Any]) -> None:
        self._drawn.append((tokens, logprobs))
        self._lengths[~self.done] += 1
        ended = np.isin(tokens, self._ends)
        if self._sampling.stop:
            for row in np.flatnonzero(~self.done & ~ended).tolist():
                ended[row] = self._at_stop(row)
        self._finished |= ended & ~self.done
        self.done |= self._finished | (self._lengths >= self._most)

    def _at_stop(self, row: int) -> bool:
        longest = max(len(text) for text in self._sampling.stop)
        last = [int(tokens[row]) for tokens, _ in self._drawn[-longest - 1 :]]  # a token is at least a byte
        text = self._tokenizer.decode(last)
        return any(stop in text for stop in self._sampling.stop)

    def answers(self) -> list[Answer]:
        """Return the answers of all rows."""
        tokens, logprobs = (np.stack(each, 1).tolist() for each in zip(*self._drawn, strict=True))
        rows = zip(tokens, logprobs, self._lengths.tolist(), self._finished.tolist(), strict=True)
        return [Answer(ids[:length], logs[:length], finished) for ids, logs, length, finished in rows]


class EndOfAnswers(StoppingCriteria):
    """Ends the generation of rows whose answers have ended."""

    def __init__(self, draw: Draw) -> None:
        self._draw = draw

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.from_numpy(self._draw.done.copy()).to(input_ids.device)


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


ROOM = 0.5
"""Part of the free memory that a gathered copy may take with `rollout.copy = "auto"`."""


def choose_engine(section: RolloutSection, model: nn.Module, encoder: PromptEncoder, folder: Path | None) -> Engine:
    """Return the engine of `[rollout]`. Collective; raises `UserError`."""
    ends = ends_of(model, encoder)
    if section.engine == "vllm":
        from trueshard.train.rl.vllm import VLLMEngine, probe_bound

        if folder is None:
            raise ValueError('rollout.engine = "vllm" puts new weights into a folder; give folder=')
        bound = probe_bound(compute_dtype(model))
        texts = probes(len(encoder.tokenizer))
        score = functools.partial(log_probabilities, model, PolicyLoss())
        return VLLMEngine(section, model, encoder.tokenizer, ends, folder, texts, bound, score)
    copy = section.copy_ if section.copy_ != "auto" else ("gathered" if copy_fits(model) else "kept")
    images = encoder.images if encoder.has_images else None
    return TransformersEngine(
        model, encoder.tokenizer, ends, copy=copy, batch=section.batch, images=images, never=encoder.never
    )


def ends_of(model: nn.Module, encoder: PromptEncoder) -> set[int]:
    """Return the tokens that end an answer: end of text, of the model's generation settings, of a turn of a chat."""
    own: Any = names.unwrap(model)
    own = own.get_base_model() if hasattr(own, "peft_config") else own
    more = getattr(getattr(own, "generation_config", None), "eos_token_id", None)
    found = {encoder.tokenizer.eos_token_id, *(more if isinstance(more, list) else [more])}
    if encoder.template is not None and (end := encoder.template.ends_turn()) is not None:
        found.add(encoder.tokenizer.convert_tokens_to_ids(end))
    return found - {None}


def compute_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype in which a sharded model computes."""
    mixed = sharded(model).plan.mixed_precision
    found: torch.dtype = getattr(torch, mixed.compute) if mixed and mixed.compute else next(model.parameters()).dtype
    return found


def probes(vocabulary: int) -> list[list[int]]:
    """Return a few texts of any tokens, by which an engine's weights are known."""
    tokens = draws(0, vocabulary)
    return [list(itertools.islice(tokens, 16)) for _ in range(4)]


@torch.no_grad()
def log_probabilities(model: nn.Module, loss: PolicyLoss, texts: Sequence[Sequence[int]]) -> list[list[float]]:
    """Return the model's log-probabilities of the tokens of ``texts``, from the second on. Collective."""
    device = device_of(sharded(model).mesh)
    found = []
    for text in texts:
        ids = torch.tensor([text], device=device)
        logs, _ = loss.logprobs(model, {"input_ids": ids[:, :-1], "targets": ids[:, 1:]})
        found.append(logs[0].tolist())
    return found


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
