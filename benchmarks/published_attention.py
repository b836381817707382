"""Attention as others' code has it, for simulations of published runs; not for training.

``keys_go_round``: context parallelism of TorchTitan and Automodel, torch's ring in the place of this library's exchange
of heads. What runs in the simulation is torch's own code, ``context_parallel`` with its defaults
(torch/distributed/tensor/experimental/_attention.py of December 2024, and still):

- A rank has the parts r and 2·n - 1 - r of 2·n. Of n steps the first is causal over what the rank has; the others are
  half of its queries over all keys of another rank, or all queries over half of them: n calls of flash attention.
- Keys and values are gathered at once, with as many heads as queries have: TorchTitan repeats them before
  (``repeat_kv`` of torchtitan/models/llama/model.py).
- Results are merged in float32, by their logarithmic sums, after each step.
- Backward gathers keys and values again, adds up gradients in float32, and sends those of keys and values on to the
  next rank after each step, in float32.
- In a compiled block, a collective is waited for where it is called: functional collectives do so while they are
  traced (``_maybe_wrap_tensor``), and inductor reorders nothing (``reorder_for_compute_comm_overlap`` is off).

``keys_repeated``: torchtune copies keys and values to as many heads as queries have (torchtune/modules/attention.py),
and attention keeps the copies for its backward.

``attention_again``: selective recomputation of TorchTitan kept the results of flash and of efficient attention, and
until December 2025 not those of cuDNN's, which it uses on a B200 (``_save_list`` of torchtitan/models/llama3/infra/
parallelize.py, ``ScaledDotProductAttention`` of torchtitan/models/attention.py; pytorch/torchtitan#2095).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from trueshard import _torch
from trueshard.parallel import context
from trueshard.sharding import activation_checkpointing


@contextlib.contextmanager
def keys_go_round() -> Iterator[None]:
    """Let models that are sharded inside, on a context axis, use torch's ring.

    A simulated rank computes on the first positions, and not on two parts: shapes are the same.
    """
    with mock.patch.object(context, "attend", _attend):
        yield


@contextlib.contextmanager
def keys_repeated() -> Iterator[None]:
    """Let transformers' models copy keys and values, as they do where a kernel takes no groups of heads."""
    from transformers.integrations import sdpa_attention

    def never(*given: Any) -> bool:  # a mock would remember what it is called with, and keep it alive
        return False

    with mock.patch.object(sdpa_attention, "use_gqa_in_sdpa", never):
        yield


@contextlib.contextmanager
def attention_again() -> Iterator[None]:
    """Let selective recomputation compute attention again, too."""
    with mock.patch.object(activation_checkpointing, "_ATTENTION", ()):
        yield


def _attend(
    kind: str,
    module: Any,
    query: torch.Tensor,  # [batch, heads, positions here, head size]
    key: torch.Tensor,  # [batch, key-value heads, positions here, head size]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Return [batch, positions here, heads, head size], and no weights."""
    times = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(times, 1) if times > 1 else part for part in (key, value))
    group = module.__dict__[context.GROUP]
    made = _torch.ring_attention(query, key, value, group, kwargs.get("scaling"), balanced=True)
    return made.transpose(1, 2).contiguous(), None
