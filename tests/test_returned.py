"""What a model returns besides its logits: hidden states and attentions, which transformers records by class."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import trueshard
from models import CASES
from parity import Ranks

KINDS = ("decoder", "experts", "encoder", "encoder-decoder", "vision", "vision-language", "speech")
ASKED = {"output_hidden_states": True, "output_attentions": True}


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [each for item in value for each in tensors(item)] if isinstance(value, (tuple, list)) else []


def returned(rank: int, world_size: int, names: tuple[str, ...], bare: bool) -> tuple[int, dict[str, str]]:
    """How many models were held, and what is wrong, by model; ``bare``: of the models without their heads."""
    wrong, held = {}, 0
    for name in names:
        model: Any = CASES[name].build(0)
        batch = CASES[name].batch(2, 1)
        if bare:
            if model.base_model is model:
                continue
            model, batch = model.base_model, {k: v for k, v in batch.items() if k != "labels"}
        model.set_attn_implementation("eager")
        model.eval()
        with torch.no_grad():
            try:
                expected = model(**batch, **ASKED)
            except (TypeError, ValueError):  # a base model that needs more than its head, or that records nothing
                continue
            trueshard.shard(model)
            found = model(**batch, **ASKED)
        held += len(expected.get("hidden_states") or expected.get("encoder_hidden_states") or ()) > 0
        if list(found.keys()) != list(expected.keys()):
            wrong[name] = f"{list(expected.keys())} → {list(found.keys())}"
        for key in found:
            for a, b in zip(tensors(found.get(key)), tensors(expected.get(key)), strict=True):
                if a.shape != b.shape or not torch.allclose(a.float(), b.float(), rtol=1e-4, atol=1e-5):
                    wrong[name] = f"{key} differs"
    return held, wrong


NAMES = tuple(name for name, case in CASES.items() if case.kind in KINDS)


def test_hidden_states_and_attentions_are_returned(ranks2: Ranks) -> None:
    of_each_kind = tuple({CASES[name].kind: name for name in NAMES}.values())
    for held, wrong in ranks2.run(returned, of_each_kind, False):
        assert not wrong
        assert held >= len(KINDS) - 1


@pytest.mark.rest
@pytest.mark.parametrize("bare", [True, False])
def test_hidden_states_and_attentions_of_every_model_are_returned(bare: bool, ranks2: Ranks) -> None:
    for held, wrong in ranks2.run(returned, NAMES, bare, timeout=280):
        assert not wrong
        assert held >= 30
