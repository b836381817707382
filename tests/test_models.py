"""The catalogue has every family and every property; that its models train is held in ``test_architectures.py``."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from messages import naming
from models import ARCHITECTURES, CASES, LAZY, rows


def test_every_family_of_architectures_is_there() -> None:
    assert len(ARCHITECTURES) >= 45
    families = {
        "decoder",
        "experts",
        "state-space",
        "encoder",
        "encoder-decoder",
        "speech",
        "vision",
        "vision-language",
    }
    assert {case.kind for case in ARCHITECTURES.values()} == families


def test_the_catalogue_has_ties_scalars_strides_dtypes_and_frozen_parameters() -> None:
    def parameters(name: str) -> list[nn.Parameter]:
        return list(CASES[name].build(0).parameters())

    for name in ("tied_language_model", "gpt2", "t5", "bart", "bert"):
        model = CASES[name].build(0)
        assert len(list(model.named_parameters(remove_duplicate=False))) > len(list(model.parameters()))
    assert any(p.dim() == 0 for p in parameters("scalar"))
    assert any(p.dim() == 0 for p in parameters("clip"))
    assert any(not p.is_contiguous() for p in parameters("strided"))
    assert {p.dtype for p in CASES["mixed"].build(0).blocks[0].parameters()} == {torch.float32, torch.bfloat16}
    assert {p.requires_grad for p in parameters("frozen_tower")} == {True, False}
    assert any(0 < len(p) < 2 for p in parameters("tiny"))
    assert any(isinstance(p, nn.UninitializedParameter) for p in LAZY.build(0).parameters())


@pytest.mark.parametrize(
    ("name", "trained"),
    [
        ("lora", ["lora_A", "lora_B"]),
        ("dora", ["lora_A", "lora_B", "lora_magnitude_vector"]),
        ("modules_to_save", ["lora_A", "lora_B", "modules_to_save"]),
        ("prompt_tuning", ["prompt_encoder"]),
        ("lora_plain_module", ["lora_A", "lora_B"]),
    ],
)
def test_adapters_train_their_own_parameters_alone(name: str, trained: list[str]) -> None:
    for key, parameter in CASES[name].build(0).named_parameters():
        assert parameter.requires_grad == any(part in key for part in trained), key


def test_rows_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match=naming("4 rows", "3 ranks")):
        rows({"x": torch.zeros(4, 2)}, 0, 3)
