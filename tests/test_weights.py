"""``weights``: the tensors of a sharded model, unit by unit, are those of the files that the house writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import trueshard
from cases import on_ranks
from messages import naming
from models import CASES, rows
from parity import Ranks, assert_same
from test_gathering import quantised_lora
from traffic import Traffic
from trueshard.sharding.engine import sharded


def lora(name: str, *targets: str) -> Callable[[int], nn.Module]:
    def build(seed: int) -> nn.Module:
        import peft

        model = CASES[name].build(seed)
        return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=[*targets], init_lora_weights=False))

    return build


LORA = {
    "lora_embeddings": lora(
        "llama", "embed_tokens", "q_proj", "lm_head"
    ),  # a layer's base and its adapter in two units
    "lora_llava": lora("llava", "q_proj"),
}


def trained(name: str, rank: int, world_size: int, **words: Any) -> nn.Module:
    case = CASES[{"lora_embeddings": "llama", "lora_llava": "llava"}.get(name, name)]
    model = LORA.get(name, case.build)(0)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    trueshard.shard(model, optimizer, **words)
    case.loss(model, rows(case.batch(6, 1), rank, world_size)).backward()
    optimizer.step()
    return model


def every_weight(model: nn.Module, **options: Any) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for names, tensors in trueshard.weights(model, **options):
        assert names
        assert len(names) == len(tensors)
        assert not found.keys() & names
        found |= {name: tensor.clone() for name, tensor in zip(names, tensors, strict=True)}
    return found


def written(rank: int, world_size: int, folder: str, names: list[str]) -> dict[str, Any]:
    """Save each model; return its weights, and those of the adapter alone."""
    found = {}
    for name in names:
        model = trained(name, rank, world_size)
        trueshard.save(f"{folder}/{name}", model=model)
        alone = every_weight(model, adapters="alone") if hasattr(model, "peft_config") else {}
        found[name] = every_weight(model, naming="hub" if alone else "saved"), alone
    return found


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    files = folder.glob("*model*.safetensors") if folder.is_dir() else [folder]
    return in_order({name: tensor for file in files for name, tensor in load_file(file).items()})


def in_order(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(sorted(tensors.items()))


PLAIN = ["llama", "gpt2", "llava", "mixtral", "scalar_blocks", "buffers", "tied_blocks"]
ADAPTED = ["lora", "lora_all_linear", "dora", "modules_to_save", *LORA]


def test_names_and_values_are_those_of_the_files(ranks2: Ranks, tmp_path: Path) -> None:
    for name, (found, _) in ranks2.run(written, str(tmp_path), PLAIN)[1].items():
        assert_same(in_order(found), tensors_in(tmp_path / name))


def test_adapters_are_merged_and_given_alone_as_saved(ranks2: Ranks, tmp_path: Path) -> None:
    for name, (merged, alone) in ranks2.run(written, str(tmp_path), ADAPTED)[1].items():
        assert_same(in_order(alone), tensors_in(tmp_path / name))
        assert_same(
            in_order(merged), tensors_in(trueshard.export(tmp_path / name, tmp_path / f"{name}-merged", to="merged"))
        )


def published(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    found = {}
    for name in ("llava", "mixtral", "gpt2"):
        model = trained(name, rank, world_size)
        with trueshard.gathered(model) as copied:
            if rank == 0:
                copied.save_pretrained(f"{folder}/{name}")
        found[name] = every_weight(model, naming="hub")
    return found


def test_names_of_the_hub_are_those_that_transformers_writes(ranks2: Ranks, tmp_path: Path) -> None:
    for name, found in ranks2.run(published, str(tmp_path))[1].items():
        assert_same(in_order(found), tensors_in(tmp_path / name))


def spoil(model: nn.Module) -> None:
    for _, tensors in trueshard.weights(model):
        tensors[0].zero_()
        raise ArithmeticError


@on_ranks(2)
def test_each_unit_is_gathered_once_and_freed(rank: int, world_size: int) -> None:
    """One collective a unit, none for a unit that is skipped, and a unit that is left early is freed."""
    model = trained("lora", rank, world_size)
    units = [unit.name for unit in sharded(model).plan.units if unit.parameters]
    for options in ({}, {"dtype": "bf16"}, {"adapters": "alone"}):
        with Traffic() as traffic:
            found = every_weight(model, **options)
        holding = [unit for unit in units if options != {"adapters": "alone"} or ".layers." in unit]
        assert (traffic.calls["all_gather"], sum(traffic.calls.values())) == (len(holding), len(holding))
        assert {each.dtype for each in found.values()} == {torch.bfloat16 if "dtype" in options else torch.float32}
    assert len(holding) < len(units)
    before = {name: p.to_local().clone() for name, p in model.named_parameters()}  # type: ignore[attr-defined]
    ids = torch.arange(3, 11).view(1, 8)
    with torch.no_grad():
        expected = model(input_ids=ids).logits
    going = trueshard.weights(model)
    next(going)
    assert len(sharded(model).memory.now()) == 1
    going.close()
    assert not sharded(model).memory.now()
    with pytest.raises(ArithmeticError):
        spoil(model)
    assert not sharded(model).memory.now()
    assert all(torch.equal(p.to_local(), before[name]) for name, p in model.named_parameters())  # type: ignore[attr-defined]
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, expected)


def in_bf16(rank: int, world_size: int) -> None:
    """Under mixed precision the merge adds what was gathered, in float32, and casts the sum."""
    model = trained("lora_all_linear", rank, world_size, mixed_precision="bf16", offload="cpu")
    found = every_weight(model)
    assert {each.dtype for each in found.values()} == {torch.bfloat16}
    state = {name: p.full_tensor().bfloat16().float() for name, p in model.named_parameters()}  # type: ignore[attr-defined]
    layer = "base_model.model.model.layers.1.mlp.up_proj"
    a, b, weight = (state[f"{layer}.{name}.weight"] for name in ("lora_A.default", "lora_B.default", "base_layer"))
    assert torch.equal(found["model.layers.1.mlp.up_proj.weight"], (weight + (b @ a) * 2).bfloat16())


def refused(rank: int, world_size: int) -> None:
    model = CASES["stack"].build(0)
    with pytest.raises(ValueError, match=naming("Stack", "shard(")):
        trueshard.weights(model)
    trueshard.shard(model)
    for words, options in (
        (('"merged"', '"alone"', "'both'"), {"adapters": "both"}),
        (("disk", '"hub"'), {"naming": "disk"}),
        (("int8", "bfloat16"), {"dtype": "int8"}),
        (("Stack", "PEFT"), {"adapters": "alone"}),
    ):
        with pytest.raises(ValueError, match=naming(*words)):
            trueshard.weights(model, **options)
    prompted = trained("prompt_tuning", rank, world_size)
    with pytest.raises(ValueError, match=naming("PROMPT_TUNING", 'adapters="alone"')):
        trueshard.weights(prompted)
    assert list(every_weight(prompted, adapters="alone")) == ["prompt_embeddings"]
    quantised = quantised_lora(0)
    trueshard.shard(quantised)
    with pytest.raises(ValueError, match=naming("quantized", ".packed", 'adapters="alone"')):
        trueshard.weights(quantised)
    assert len(every_weight(quantised, adapters="alone")) == 4


@on_ranks(2)
def test_merging_is_in_float32_and_what_cannot_be_given_is_named(rank: int, world_size: int) -> None:
    in_bf16(rank, world_size)
    refused(rank, world_size)
