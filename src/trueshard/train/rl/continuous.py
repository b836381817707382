"""Sampling with transformers' continuous batching: an answer that ends makes room for the next one at once.

- Rows of all lengths are computed side by side without padding, and no row waits for the longest answer of its piece.
- Tokens are drawn by `Draw`, as in the other forms of the engine, since transformers has one generator for all rows. It
  is the only logits processor: it leaves one score finite, and the likeliest token is taken. The host draws, so there
  are no CUDA graphs. **Not run on GPUs.**
- A session lasts as long as a call of `generate`. No cache outlives the weights that filled it, its memory is free for
  training, and the random number generators, which it seeds, are given back as they were.
- All requests are there when the session begins: what is computed together follows from them, and not from time.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn
from transformers import ContinuousBatchingConfig, GenerationConfig, LogitsProcessorList
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
    ContinuousBatchingLogitsProcessorList,
)

from trueshard.errors import UserError
from trueshard.train.rl.engine import Draw, TransformersEngine, probe_bound, probes, scores_of
from trueshard.train.rl.ranks import divided, on_every_rank
from trueshard.train.rl.sampler import PromptEncoder
from trueshard.train.rl.samples import Answer, Request, Sampling

if "auto_switch_to_flash" not in ContinuousBatchingConfig.__dataclass_fields__:
    raise ImportError("its ContinuousBatchingConfig has no auto_switch_to_flash")

PAGE = 256
"""Tokens of a page of the cache: transformers' default."""

TOKENS = 512
"""Tokens of a forward, at most, if more are waiting than there are requests."""


class ContinuousEngine(TransformersEngine):
    """Generates on a gathered copy of the model, each rank its own requests; see the file's docstring."""

    def __init__(
        self,
        model: nn.Module,  # sharded
        encoder: PromptEncoder,
        ends: Collection[int],  # tokens that end an answer
        *,
        batch: int = 64,  # requests that are under way at a time
    ) -> None:
        super().__init__(model, encoder, ends, copy="gathered", batch=batch)
        bound = probe_bound(model)
        on_every_rank(lambda: self._try(bound))

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Answer]:
        """Continue each request; the same requests and answers on every rank. Collective."""
        return divided(requests, lambda part: self._answers(part, sampling))

    def _answers(self, requests: Sequence[Request], sampling: Sampling) -> list[Answer]:
        if not requests:
            return []
        draw = Draw(requests, sampling, self._ends, self._encoder)
        on_gpu = self._device.type == "cuda"
        with torch.random.fork_rng([self._device] if on_gpu else []):
            manager = self._manager(requests, draw)
            manager.warmup()  # makes the cache, and raises here what is wrong with it
            for number, request in enumerate(requests):
                manager.add_request(list(request.ids), str(number), max_new_tokens=request.most)
            if on_gpu:
                torch.cuda.synchronize(self._device)  # the session computes on a stream of its own
            manager.start()
            try:
                manager.stop(block=True)  # once every request is answered
            except BaseException:
                manager.stop(block=False, hard_stop=True)
                raise
            done = [result for _ in requests if (result := manager.get_result(timeout=0)) is not None]
            manager.destroy()
        error = next((result.error for result in done if result.error is not None), None)
        if error is not None or len(done) < len(requests):
            raise RuntimeError(error or "continuous batching ended before all answers did")
        return draw.answers()

    def _manager(self, requests: Sequence[Request], draw: Draw) -> Any:
        """Return a manager with room for so many requests that are as long, without them."""
        rows = min(self._batch, len(requests))
        longest = max(len(request.ids) + request.most for request in requests)
        config = ContinuousBatchingConfig(
            num_blocks=rows * -(-longest // PAGE),
            max_batch_tokens=max(rows, TOKENS),
            max_requests_per_batch=rows,
            safety_margin=0.0,
            allow_block_sharing=False,
            use_async_batching=False,
            use_cuda_graph=False,
            auto_switch_to_flash=False,
            disable_nccl_graph_mixing=False,
        )
        settings = GenerationConfig(do_sample=False, max_new_tokens=1, eos_token_id=sorted(self._ends) or -1)
        manager = self._root.init_continuous_batching(settings, config)
        processor = _Seeded(draw, min(self._ends, default=None))
        manager.logit_processor = ContinuousBatchingLogitsProcessorList(LogitsProcessorList([processor]))
        manager.logit_processor.tensors_required = 1
        return manager

    def _try(self, bound: float) -> None:
        """Raise `UserError` if log-probabilities with pages are not those without, within ``bound``, in nats."""
        kind = type(self._root).__name__
        texts = [text[: 8 + number] for number, text in enumerate(probes(len(self._encoder.tokenizer)))]
        requests = [Request((0, 0, number), text, most=4) for number, text in enumerate(texts)]
        logger = logging.getLogger("ContinuousBatchingLogger")
        before, logger.disabled = logger.disabled, True  # it would show the traceback of what is one line here
        try:
            answers = self._answers(requests, Sampling())
        except Exception as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise UserError(
                f"rollout.continuous: transformers cannot batch a {kind} continuously ({reason}); remove it"
            ) from error
        finally:
            logger.disabled = before
        difference = max(self._difference(text, answer) for text, answer in zip(texts, answers, strict=True))
        if not difference <= bound:
            raise UserError(
                f"rollout.continuous: a {kind} computes other log-probabilities in continuous batching, by "
                f"{difference:.2g}; remove it"
            )

    @torch.no_grad()
    def _difference(self, text: list[int], answer: Answer) -> float:
        ids = torch.tensor([text + answer.ids], device=self._device)
        logs = self._root(input_ids=ids[:, :-1], use_cache=False).logits[0].float().log_softmax(1)
        logprobs = logs.gather(1, ids[0, 1:, None])[len(text) - 1 :, 0]
        return float((logprobs - torch.tensor(answer.logprobs, device=self._device)).abs().max())


class _Seeded(ContinuousBatchingLogitsProcessor):
    """Draws with the random numbers of the samples; the ids of requests are the numbers of their rows in ``draw``."""

    def __init__(self, draw: Draw, end: int | None) -> None:
        self.supported_kwargs, self.ignored_kwargs = {}, ()
        self._draw = draw
        self._end = end
        """A token that ends an answer; stands for the drawn one where the answer ends for another reason."""
        self._rows: list[int] = []
        """Rows of ``draw`` whose tokens are drawn next: transformers tells them before it calls."""

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
        """Note whose tokens are drawn next. No tensor is needed."""
        self._rows = [int(request.state.request_id) for request in requests_with_new_token]
        return torch.empty(0, dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        """Return scores, [rows, vocabulary], of which one is finite. The last rows may be of nobody."""
        count = len(self._rows)
        if count == 0:
            return scores
        tokens = self._draw.draw(self._rows, scores[:count])
        if self._end is not None:
            ended = torch.tensor([self._draw.done[row] for row in self._rows], device=tokens.device)
            tokens = tokens.masked_fill(ended, self._end)
        return torch.cat([scores_of(tokens, like=scores[:count]), scores[count:]])
