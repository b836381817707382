"""New tokens of a model: rows of its embedding and its head.

transformers grows them, on this machine and before anything is sharded: the new rows are about the mean of the others,
so that they change no probability much. They follow from ``train.seed``, whatever the number of ranks.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import torch
from torch import nn

from trueshard.errors import UserError
from trueshard.train.models.parameters import seeded


def ends(model: Any) -> list[nn.Module]:
    """Return the embedding and, if there is one, the head; without what an adapter has put around them."""
    pair = (model.get_input_embeddings(), model.get_output_embeddings())
    return [getattr(module, "original_module", module) for module in pair if module is not None]


def with_rows(settings: Any, rows: int) -> Any:
    """Return a copy of a transformers configuration with another vocabulary size."""
    result = copy.deepcopy(settings)
    result.get_text_config().vocab_size = rows
    return result


def grow(model: Any, settings: Any, seed: int) -> None:
    """Give embedding and head of a model with its values as many rows as ``settings`` say, if they have fewer."""
    rows = settings.get_text_config().vocab_size
    if model.get_input_embeddings().weight.shape[0] < rows:
        with seeded(seed, "tokenizer.add_tokens", torch.device("cpu")):
            model.resize_token_embeddings(rows)


def keep_ends(model: nn.Module) -> None:
    """Remove all modules but embedding, head, and those that hold them, which get memory in that of the host."""
    kept = {id(module) for module in ends(model)}
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if not any(id(part) in kept for part in child.modules()):
                delattr(module, name)
    model.to_empty(device="cpu")


def check_trained(model: Any) -> None:
    """Raise `UserError` if new rows of the embedding or the head would stay as they begin."""
    pair = (model.get_input_embeddings(), model.get_output_embeddings())
    kept = [module for module in pair if module is not None and not any(p.requires_grad for p in module.parameters())]
    if kept:
        names = [
            name.rpartition(".")[2] for name, module in model.named_modules() if any(module is end for end in kept)
        ]
        raise UserError(
            f"tokenizer.add_tokens: the new rows of {' and '.join(names)} would not be trained; with [adapter], add "
            f"adapter.save_modules = {json.dumps(names)}, else correct model.freeze"
        )
