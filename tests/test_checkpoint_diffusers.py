"""Models of diffusers: a checkpoint and an export are directories that `from_pretrained` of the model's class reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trueshard
from parity import Ranks

SMALL: dict[str, dict[str, Any]] = {
    "UNet2DModel": {
        "sample_size": 8,
        "layers_per_block": 1,
        "block_out_channels": (8, 16),
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        "norm_num_groups": 4,
        "attention_head_dim": 4,
    },
    "AutoencoderKL": {"block_out_channels": (8,), "norm_num_groups": 4, "latent_channels": 2},
    "DiTTransformer2DModel": {
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "num_layers": 2,
        "sample_size": 4,
        "num_embeds_ada_norm": 10,
    },
}


def build(name: str, seed: int = 0) -> Any:
    import diffusers

    torch.manual_seed(seed)
    return getattr(diffusers, name)(**SMALL[name])


def trained(rank: int, world_size: int, name: str, folder: str, several: bool) -> dict[str, torch.Tensor]:
    """Save a model after a step; return its tensors."""
    model = build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trueshard.shard(model, optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    models = {"one": model, "two": nn.Linear(2, 2)} if several else model
    trueshard.save(folder, model=models)
    with trueshard.gathered(model) as copy:
        return {key: tensor.clone() for key, tensor in copy.state_dict().items()}


def check(kind: Any, folder: Path, expected: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> None:
    loaded, said = kind.from_pretrained(folder, local_files_only=True, output_loading_info=True, torch_dtype=dtype)
    assert {key: values for key, values in said.items() if values} == {}
    assert type(loaded) is kind
    found = loaded.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor.to(dtype)) for key, tensor in expected.items())
    assert json.loads((folder / "config.json").read_text()) == json.loads(build(kind.__name__).to_json_string())


@pytest.mark.rest
@pytest.mark.parametrize("name", SMALL)
def test_a_model_is_read_by_its_class(name: str, tmp_path: Path, ranks2: Ranks) -> None:
    import diffusers

    kind, path = getattr(diffusers, name), tmp_path / "saved"
    expected = ranks2.run(trained, name, str(path), False)[0]
    check(kind, path, expected)
    trueshard.check(path)
    trueshard.export(path, tmp_path / "out")
    check(kind, tmp_path / "out", expected)
    trueshard.export(tmp_path / "out", tmp_path / "half", dtype=torch.bfloat16)  # of what diffusers itself would write
    check(kind, tmp_path / "half", expected, torch.bfloat16)
    model = build(name, seed=1)
    trueshard.load(path, model=model)
    assert all(torch.equal(tensor, expected[key]) for key, tensor in model.state_dict().items())


@pytest.mark.rest
def test_a_model_of_several_and_in_several_files_is_read(
    tmp_path: Path, alone: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    import diffusers

    from trueshard.checkpoint import layout

    expected = alone.run(trained, "UNet2DModel", str(tmp_path / "saved"), True)[0]
    check(diffusers.UNet2DModel, tmp_path / "saved" / "one", expected)
    monkeypatch.setattr(layout, "LARGEST", 20_000)
    trueshard.export(tmp_path / "saved", tmp_path / "out", model="one")
    assert len(list((tmp_path / "out").glob("diffusion_pytorch_model-*.safetensors"))) > 2
    check(diffusers.UNet2DModel, tmp_path / "out", expected)
