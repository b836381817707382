"""The catalogue holds what parity tests assume of it: deterministic builds, and losses that are means over samples."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from messages import naming
from models import ARCHITECTURES, CASES, LAZY, rows
from resting import all_but

SAMPLES = 6


SOME = list(CASES)[::6]


@pytest.mark.parametrize("name", all_but(SOME, CASES))
def test_loss_is_a_mean_over_slices_and_reaches_the_parameters(name: str) -> None:
    case = CASES[name]
    model, batch = case.build(0), case.batch(SAMPLES, 0)
    whole = case.loss(model, batch)
    whole.backward()
    assert whole.isfinite()
    trainable = {key: parameter for key, parameter in model.named_parameters() if parameter.requires_grad}
    assert [key for key in trainable if not case.reaches(key)] == [
        key for key, p in trainable.items() if p.grad is None
    ]
    assert not [key for key, p in trainable.items() if p.grad is not None and not p.grad.any()], (
        "gradients are all zero"
    )
    for parts in (2, 3):
        with torch.no_grad():
            mean = sum(case.loss(model, rows(batch, part, parts)) for part in range(parts)) / parts
        assert mean == pytest.approx(whole.item(), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("name", all_but(SOME, CASES))
def test_the_same_seed_gives_the_same_model_and_batch(name: str) -> None:
    case = CASES[name]
    before = torch.get_rng_state()
    first, second, other = case.build(3), case.build(3), case.build(4)
    assert torch.equal(torch.get_rng_state(), before)
    assert same(dict(first.state_dict()), dict(second.state_dict()))
    assert not same(dict(first.state_dict()), dict(other.state_dict()))
    assert same(case.batch(SAMPLES, 5), case.batch(SAMPLES, 5))
    assert not same(case.batch(SAMPLES, 5), case.batch(SAMPLES, 6))
    assert first.training


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[key], other[key]) for key in one)


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
