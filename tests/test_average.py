"""[average]: sharded, saved, resumed at another number of ranks, evaluated and exported as on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import running
import trueshard
from cases import as_on_one_device, on_ranks
from gathering import whole
from handmade_training import batch, take_steps
from messages import naming
from parity import Ranks
from running import metrics, run
from stepping import shard_over
from test_averaging import Everything
from trueshard.errors import UserError
from trueshard.train.parse import load_config

AVERAGE = "[average]\ndecay = 0.5\nstart = 2\n"


def trained(world_size: int, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Everything().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    shard_over(world_size, model, optimizer)
    return model, optimizer


@as_on_one_device(atol=1e-5)
def test_it_is_torchs_average_of_what_is_trained(rank: int, world_size: int) -> dict[str, Any]:
    """Uneven, 0-dim, frozen and tied parameters, and buffers, of which AveragedModel averages integers badly."""
    model, optimizer = trained(world_size)
    average, copy = trueshard.Average(model, decay=0.8, start=1, every=2), None
    for step in range(1, 6):
        take_steps(model, optimizer, rank, world_size, [step])
        average.update(step)
        if step % 2:
            copy = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8)) if copy is None else copy
            copy.update_parameters(model)
    assert copy is not None
    assert average.updates == 3
    mine = whole(dict(average.shards()))
    theirs = whole(dict(copy.module.named_parameters()))
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert mine.keys() == trainable
    for name in trainable:
        torch.testing.assert_close(mine[name], theirs[name], atol=1e-6, rtol=1e-5)
    report: dict[str, Any] = {"average": mine}
    before, version = whole(dict(model.named_parameters())), average.shards()
    model.eval()
    with average.swapped(), torch.no_grad():
        report["output"] = model(batch(9, 0, 1))
        copy.module.eval()
        copy.module.mean.copy_(model.mean)
        torch.testing.assert_close(report["output"], copy.module(batch(9, 0, 1)), atol=1e-5, rtol=1e-5)
    after, again = whole(dict(model.named_parameters())), whole(dict(version))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(torch.equal(mine[name], again[name]) for name in mine)
    return report


@on_ranks(2)
def test_narrow_weights_have_a_float32_average_and_come_back(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8).bfloat16()
    trueshard.shard(model)
    average = trueshard.Average(model, decay=0.999)
    average.update(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    before = {name: parameter.full_tensor().clone() for name, parameter in model.named_parameters()}  # type: ignore[attr-defined]
    average.update(1)
    found = {name: tensor.full_tensor() for name, tensor in average.shards().items()}  # type: ignore[attr-defined]
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    for name, tensor in found.items():  # in bfloat16 a thousandth of 1 would be lost
        torch.testing.assert_close(tensor, before[name].float() - 0.999, atol=1e-2, rtol=0)
        assert bool((tensor != tensor.bfloat16().float()).any())
    with pytest.raises(KeyError), average.swapped():
        raise KeyError
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), before[name])  # type: ignore[attr-defined]
        assert torch.equal(average.shards()[name].full_tensor(), found[name])  # type: ignore[attr-defined]


def saved(rank: int, world_size: int, folder: str, late: bool) -> dict[str, Any]:
    model, optimizer = trained(world_size)
    average = trueshard.Average(model, decay=0.8, start=9 if late else 0)
    for step in range(3):
        take_steps(model, optimizer, rank, world_size, [step])
        average.update(step)
    trueshard.save(folder, model=model, optimizer=optimizer, average=average)
    snapshots = trueshard.Snapshots(folder)
    snapshots.save(3, model=model, optimizer=optimizer, average=average)
    snapshots.wait()
    return whole(dict(average.shards()))


def loaded(rank: int, world_size: int, folder: str) -> tuple[int, dict[str, Any]]:
    model, optimizer = trained(world_size)
    average = trueshard.Average(model, decay=0.8)
    result = trueshard.load(folder, model=model, optimizer=optimizer, average=average)
    assert "average" not in result
    none = trueshard.Average(nn.Module())  # a run without [average]: nothing is read
    assert "average" not in trueshard.load(folder, model=model, optimizer=optimizer, average=none)
    if world_size > 1:
        held = [tensor.to_local() for tensor in average.shards().values() if isinstance(tensor, DTensor)]
        assert sum(tensor.numel() for tensor in held) < sum(p.numel() for p in model.parameters())
    in_memory = trueshard.Average(model, decay=0.8)
    assert trueshard.Snapshots(folder).load(model=model, optimizer=optimizer, average=in_memory) is not None
    first, second = whole(dict(average.shards())), whole(dict(in_memory.shards()))
    assert average.updates == in_memory.updates
    assert all(torch.equal(first[name], second[name]) for name in first)
    return average.updates, first


@pytest.mark.rest
@pytest.mark.parametrize("late", [False, True])
def test_it_is_loaded_at_any_number_of_ranks(late: bool, sizes: list[Ranks], tmp_path: Path) -> None:
    for writer in sizes:
        folder = str(tmp_path / f"from{writer.count}")
        expected = writer.run(saved, folder, late)[0]
        for reader in sizes:
            for updates, found in reader.run(loaded, folder):
                assert updates == (0 if late else 3)
                assert found.keys() == expected.keys()
                assert late or all(torch.equal(found[name], expected[name]) for name in found)
        trueshard.Snapshots(folder).close()
    if late:
        with pytest.raises(ValueError, match="has no average"):
            trueshard.export(folder, tmp_path / "none", "safetensors", average=True)
    else:
        trueshard.export(folder, tmp_path / "out.safetensors", "safetensors", average=True)
        tensors = load_file(tmp_path / "out.safetensors")
        assert all(torch.equal(tensors[name], value) for name, value in expected.items())
        assert set(tensors) > set(expected)  # what is frozen, and buffers


def project(folder: Path, more: str = "") -> Path:
    running.project(folder)
    text = (folder / "train.toml").read_text().replace("steps = 40", "steps = 6\nexact = true")
    (folder / "train.toml").write_text(text.replace("checkpoint_every = 20", "checkpoint_every = 3") + AVERAGE + more)
    return folder


@pytest.mark.rest
def test_a_run_has_the_same_bits_at_any_number_of_ranks_and_after_a_resume(tmp_path: Path) -> None:
    exports, evaluated = [], list[list[float | None]]()
    for name, ranks in (("one", (("6", "1"),)), ("two", (("6", "2"),)), ("both", (("3", "2"), ("6", "1")))):
        folder = project(tmp_path / name, "[evaluation]\nfraction = 0.1\nevery = 2\n")
        for steps, count in ranks:
            run(folder, "--nproc", count, "--set", f"train.steps={steps}", "--set", "average.evaluate=true")
        trueshard.export(folder / "run" / "checkpoints" / "latest", folder / "out", average=True)
        trueshard.export(folder / "run" / "checkpoints" / "latest", folder / "plain")
        exports.append(load_file(folder / "out" / "model.safetensors"))
        plain = load_file(folder / "plain" / "model.safetensors")
        assert any(not torch.equal(plain[key], exports[-1][key]) for key in plain)
        assert all(torch.equal(exports[0][key], exports[-1][key]) for key in exports[0])
        found = {record["step"]: record.get("evaluation_loss") for record in metrics(folder)}
        evaluated.append([found[step] for step in (2, 4, 6)])
        assert evaluated[0] == evaluated[-1]
        assert None not in evaluated[0]


@pytest.mark.rest
def test_of_an_adapter_it_alone_is_averaged(tmp_path: Path) -> None:
    folder = project(tmp_path / "project", "[adapter]\nrank = 4\n[optimizer.arguments]\n")
    run(folder, "--nproc", "2", "--set", "train.steps=4")
    run(folder, "--nproc", "1")
    trueshard.export(folder / "run" / "checkpoints" / "latest", folder / "adapter", "adapter", average=True)
    trueshard.export(folder / "run" / "checkpoints" / "latest", folder / "plain", "adapter")
    averaged, plain = (load_file(folder / name / "adapter_model.safetensors") for name in ("adapter", "plain"))
    assert averaged.keys() == plain.keys()
    assert all(not torch.equal(averaged[key], plain[key]) for key in plain if "lora_B" in key)
    trueshard.export(folder / "run" / "checkpoints" / "latest", folder / "merged", "merged", average=True)
    merged = load_file(folder / "merged" / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    a, b = (averaged[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    base = load_file(folder / "run" / "checkpoints" / "latest" / "base" / "model.safetensors")
    torch.testing.assert_close(merged[f"{name}.weight"], base[f"{name}.weight"] + 16 / 4 * b @ a)


def test_keys_that_do_not_go_together(tmp_path: Path) -> None:
    project(tmp_path / "project")
    for keys, words in {
        ("average.evaluate=true",): ["average.evaluate", "[evaluation]"],
        ("average.decay=1.0",): ["average.decay", "less than 1"],
    }.items():
        with pytest.raises(UserError, match=naming(*words)):
            load_config(tmp_path / "project" / "train.toml", keys)


def test_a_forecast_counts_it(tmp_path: Path) -> None:
    from trueshard.train.run.checks import check_settings
    from trueshard.train.run.forecast import _average

    project(tmp_path / "project")
    config = load_config(tmp_path / "project" / "train.toml", ["model.dtype=bfloat16", "train.exact="])
    settings = check_settings(config, 2)
    ((name, size),) = _average(config, settings, 2)
    count = 400 * 32 * 2 + 2 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 64 + 64) + 32
    assert (name, size) == ("average", 4 * count // 2)
