"""A continuation of a prompt, sampled by all ranks together.

The forward pass of a sharded model is a collective: every rank runs it on the same tokens, rank 0 chooses the next
token and sends it to the others, so that ranks cannot drift apart. Each token is a whole forward pass over the
context: simple, works for every architecture, fast enough for a few dozen tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trueshard.train.config import SampleSection


@torch.no_grad()
def sample(
    model: nn.Module, tokenizer: Any, section: SampleSection, context: int, seed: int, device: torch.device
) -> str:
    """`section.prompt` and the `section.tokens` tokens that follow; the model looks at the last `context` of them."""
    prompt = tokenizer(section.prompt, add_special_tokens=False)["input_ids"] or [tokenizer.eos_token_id]
    tokens = torch.tensor([prompt], dtype=torch.int64, device=device)
    chance = torch.Generator().manual_seed(seed)
    training = model.training
    model.eval()
    for _ in range(section.tokens):
        logits = model(input_ids=tokens[:, -context:], use_cache=False).logits[0, -1].float().cpu()
        chosen = _choose(logits[: len(tokenizer)], section.temperature, chance).to(device)
        dist.broadcast(chosen, src=0)
        tokens = torch.cat([tokens, chosen[None]], dim=1)
    model.train(training)
    return str(tokenizer.decode(tokens[0].tolist(), skip_special_tokens=True))


def _choose(logits: torch.Tensor, temperature: float, chance: torch.Generator) -> torch.Tensor:
    """The next token, int64 `[1]`, from logits `[vocabulary]`."""
    if temperature == 0:
        return logits.argmax(keepdim=True)
    return torch.multinomial(torch.softmax(logits / temperature, dim=0), 1, generator=chance)
