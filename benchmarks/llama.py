"""The model of every benchmark, and how one shards it by hand: each block, then the root.

The hand-written version is what TrueShard is held against, so it is what a careful user writes from PyTorch's
documentation, with the same policy for every unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


@dataclass(frozen=True)
class Shape:
    """A Llama's sizes, and the batch that a rank trains it on."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    vocabulary: int
    key_value_heads: int | None = None
    """None: as many as ``heads``."""
    sequences: int = 2
    """Sequences in a rank's batch."""
    tokens: int = 16
    """Tokens in a sequence."""

    def build(self) -> nn.Module:
        """The model with untied embeddings, float32, seeded: the same on every rank and at every call."""
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_value_heads or self.heads,
            use_cache=False,
        )
        torch.manual_seed(0)
        model: nn.Module = LlamaForCausalLM(config)
        return model

    def batch(self, seed: int) -> torch.Tensor:
        """Token numbers, int64 ``[sequences, tokens]``."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, self.vocabulary, (self.sequences, self.tokens), generator=generator)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the next token, nats."""
    loss: torch.Tensor = model(input_ids=batch, labels=batch).loss
    return loss


def blocks_of(model: Any) -> Sequence[Any]:
    """The blocks of what ``Shape.build`` returned, whether adapters stand around it or not."""
    blocks: Sequence[Any] = model.get_decoder().layers
    return blocks


def shard_by_hand(
    model: Any,
    ranks: int,
    policy: str = "default",
    *,
    bf16: bool = False,
    embedding_alone: bool = False,
    mesh: DeviceMesh | None = None,
) -> None:
    """``fully_shard`` on each block, then on the root, by the words of ``trueshard.shard``.

    Args:
        model: what ``Shape.build`` returned, or that with adapters.
        ranks: the size of the process group.
        policy: ``"default"``, ``"always"``, ``"never"``, ``"last_layer"``, or a number of ranks.
        bf16: compute in bfloat16, reduce in float32.
        embedding_alone: shard the input embedding by itself and do not gather it for backward, as TrueShard does.
        mesh: of ``ranks`` ranks; None: of CPUs.
    """
    options: dict[str, Any] = {"mesh": mesh or init_device_mesh("cpu", (ranks,))}
    if bf16:
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    middle: bool | int = int(policy) if policy.isdigit() else policy != "never"
    last: bool | int = middle if policy == "always" or policy.isdigit() else False
    root: bool | int = middle if policy not in ("default", "never") else False
    *blocks, final = blocks_of(model)
    for block in blocks:
        fully_shard(block, reshard_after_forward=middle, **options)
    fully_shard(final, reshard_after_forward=last, **options)
    if embedding_alone:
        fully_shard(model.model.embed_tokens, reshard_after_forward=middle, **options)
        model.model.embed_tokens.set_unshard_in_backward(False)
    fully_shard(model, reshard_after_forward=root, **options)
