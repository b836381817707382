"""Sampling with transformers' own ``generate``, on the model that is trained: any architecture, with its cache.

- ``gathered``: on a whole copy in the compute dtype, on each rank by itself. ``sharded``, ``kept``: on the sharded
  model, so that all ranks march together, one forward a token.
- Requests are generated in pieces of ``batch``, whose content follows from the order of requests and not from the
  number of ranks; piece i on rank i modulo ranks. Each form of the engine gives the same tokens.
- Continuous batching, the fourth form, is in ``continuous``.
- Tokens are drawn by ``token_sampling.Draw``, which gives each sample random numbers of its own.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import transformers
from torch import nn
from transformers import GenerationConfig

from trueshard.distributed import device_of
from trueshard.errors import UserError
from trueshard.model import names
from trueshard.sharding.engine import set_reshard_after_forward, sharded
from trueshard.sharding.gathering import GatheredCopy
from trueshard.train.data.order import draws
from trueshard.train.data.tokenizer import pad_token
from trueshard.train.rl.batch import PromptEncoder
from trueshard.train.rl.config import ENGINES, RolloutSection
from trueshard.train.rl.ranks import divided, rank_and_ranks
from trueshard.train.rl.samples import Answer, Engine, Request, Sampling
from trueshard.train.rl.token_sampling import Draw, EndOfAnswers
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
        self._pad = pad_token(tokenizer)
        self._device = device_of(sharded(model).mesh)
        self._kept = copy == "kept"
        self._copy: GatheredCopy | None = GatheredCopy(model) if copy == "gathered" else None

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


_BOUNDS = {torch.float32: 1e-3, torch.float16: 0.04, torch.bfloat16: 0.3}
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
    if section.continuous:
        return _continuous(model, encoder, ends, copy, section.batch)
    images = encoder.images if encoder.has_images else None
    return TransformersEngine(
        model, encoder.tokenizer, ends, copy=copy, batch=section.batch, images=images, never=encoder.never
    )


def _continuous(model: nn.Module, encoder: PromptEncoder, ends: Collection[int], copy: str, batch: int) -> Engine:
    continuous = import_continuous()
    if encoder.has_images:
        raise UserError("rollout.continuous: transformers batches text alone continuously; remove it")
    if copy != "gathered":
        raise UserError(
            "rollout.continuous generates on a whole copy of the model, which the free memory does not hold; remove it"
        )
    texts, bound = probes(len(encoder.tokenizer)), probe_bound(compute_dtype(model))
    result: Engine = continuous.ContinuousEngine(model, encoder.tokenizer, ends, texts, bound, batch=batch)
    return result


def import_continuous() -> Any:
    """Return the module of the continuous engine. Raises `UserError` if this transformers lacks what it uses."""
    try:
        from trueshard.train.rl import continuous
    except ImportError as error:
        raise UserError(
            "rollout.continuous needs the continuous batching of transformers 5.19 to 5.23, and this is "
            f"{transformers.__version__} ({error}); install one of these, or remove the key"
        ) from error
    return continuous


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
    return sharded(model).compute_dtype or next(model.parameters()).dtype


def probe_bound(dtype: torch.dtype) -> float:
    """Return how far the log-probabilities of two right programs may be apart, in nats, if they compute in ``dtype``.

    Measured between engines: up to 7e-6 in float32, and 0.065 in bfloat16, on models of few layers. Rounding adds up
    over layers and rows, so the bounds leave a hundred and five times that; float16 has three bits more than bfloat16.
    """
    return _BOUNDS.get(dtype, _BOUNDS[torch.float32])


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
