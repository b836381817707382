"""Checkpoints that others wrote: torch.distributed.checkpoint as Accelerate and TorchTitan use it, Hugging Face, PEFT.

What is read is written by those others' own code, in real processes; what a load must bring back is what their model
and optimizer held.
"""

from __future__ import annotations

import os
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

import trueshard
from checkpointing import scribble
from gathering import whole
from messages import lacking, naming
from models import CASES
from parity import Ranks, assert_same
from resting import all_but
from tower import Tower, built, held, trained

Content = dict[str, Any]


def _progress() -> Content:
    scheduler = {"base_lrs": [0.02, 0.01], "last_epoch": 2, "pair": (1, "two")}
    return {"train_state": {"step": torch.tensor(2), "seen": 24}, "lr_scheduler": scheduler}


def _flat(model: nn.Module, optimizer: torch.optim.Optimizer) -> Content:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    return {"optimizer": get_optimizer_state_dict(model, optimizer, options=options), **_progress()}


def _both(model: nn.Module, optimizer: torch.optim.Optimizer) -> Content:
    return {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}


def _folders(model: nn.Module, optimizer: torch.optim.Optimizer) -> Content:
    both = _both(model, optimizer)
    return {"pytorch_model_fsdp_0": {"model": both["model"]}, "optimizer_0": {"optimizer": both["optim"]}}


STYLES: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Content]] = {
    "Accelerate": _folders,
    "TorchTitan": lambda m, o: get_model_state_dict(m) | _flat(m, o),
    "TorchTitan, below model": lambda m, o: {"model": get_model_state_dict(m), **_flat(m, o)},
    "nested": lambda m, o: {"model": _both(m, o)["model"], "optimizer": _both(m, o)["optim"], **_progress()},
    "numbered": lambda m, o: {"model": m.state_dict(), "optim": o.state_dict(), **_progress()},
    "at the top": lambda m, o: m.state_dict() | o.state_dict(),
    "in an application": lambda m, o: {"app": _both(m, o), **_progress()},
}
"""Name → what is saved; by Accelerate in a folder each."""


def write(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Train with torch's own FSDP2, and save in each style."""
    model, _ = built()
    fully_shard(model)
    groups = [
        {"params": [model.norm.weight, model.norm.bias, model.unused], "weight_decay": 0.0, "lr": 0.02},
        {"params": [model.embed.weight]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    trained(model, optimizer)
    for style, content_of in STYLES.items():
        content = content_of(model, optimizer)
        folders = content if style == "Accelerate" else {"": content}
        for name, inside in folders.items():
            dcp.save(inside, checkpoint_id=Path(folder, style, name))
    return held(model, optimizer)


def read(rank: int, world_size: int, folder: str, sharded: bool) -> dict[str, Any]:
    """Load each style over a model and an optimizer that have other values."""
    report = {}
    for style in STYLES:
        model, optimizer = built(seed=1)
        if sharded:
            trueshard.shard(model, optimizer)
        trained(model, optimizer)
        scribble(model, optimizer)
        result = trueshard.load(Path(folder, style), model=model, optimizer=optimizer, allow_pickle=True)
        report[style] = held(model, optimizer) | {
            "found": dict(result),
            "tied": model.head.weight is model.embed.weight,
        }
    return report


@pytest.fixture(scope="module")
def foreign(ranks2: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Directories by two ranks of torch's own FSDP2, in all styles; and what was saved."""
    folder = tmp_path_factory.mktemp("foreign")
    return folder, ranks2.run(write, str(folder))[0]


@pytest.mark.parametrize("count", all_but([1], [1, 3]))
def test_each_style_is_recognised_at_any_world_size(
    foreign: tuple[Path, dict[str, Any]], alone: Ranks, ranks3: Ranks, count: int
) -> None:
    folder, saved = foreign
    for report in (alone if count == 1 else ranks3).run(read, str(folder), count > 1):
        for style, held_now in report.items():
            result, tied = held_now.pop("found"), held_now.pop("tied")
            assert_same({style: held_now}, {style: saved})
            assert tied
            if style not in ("Accelerate", "at the top"):
                assert_same(result, _progress())


def test_without_leave_no_pickle_is_read(foreign: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    model, optimizer = built()
    before = held(model, optimizer)
    (tmp_path / "trap").mkdir()
    (tmp_path / "trap" / ".metadata").write_bytes(pickle.dumps(_Trap(str(tmp_path / "sprung"))))
    for path in (foreign[0] / "nested", tmp_path / "trap"):
        with pytest.raises(ValueError, match="allow_pickle=True"):
            trueshard.load(path, model=model, optimizer=optimizer)
    assert not (tmp_path / "sprung").exists()
    assert_same(held(model, optimizer), before)


class _Trap:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def write_by_accelerate(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """By Accelerate's own functions for FSDP2, on torch's own FSDP2."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # asked for, and not used: the group is there
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer

    model, _ = built()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trained(model, optimizer)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    accelerator = Accelerator(cpu=True)
    save_fsdp_model(plugin, accelerator, model, folder)
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)
    return held(model, optimizer)


def read_accelerate(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    model, _ = built(seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    trueshard.shard(model, optimizer)
    trueshard.load(folder, model=model, optimizer=optimizer, allow_pickle=True)
    return held(model, optimizer)


def test_what_accelerate_itself_saves(ranks2: Ranks, ranks3: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    saved = ranks2.run(write_by_accelerate, str(tmp_path))[0]
    for result in ranks3.run(read_accelerate, str(tmp_path)):
        assert_same(result, saved)
    model, _ = built(seed=1)
    trueshard.load(tmp_path / "pytorch_model_fsdp_0", model=model, allow_pickle=True)
    assert_same(held(model), {"model": saved["model"]})


@pytest.mark.parametrize("style", ["nested", "TorchTitan"])
def test_what_differs_is_named_before_anything_is_changed(foreign: tuple[Path, dict[str, Any]], style: str) -> None:
    model, optimizer = built(seed=1)
    model.extra = nn.Parameter(torch.zeros(2))
    model.norm.weight = nn.Parameter(torch.ones(7))
    model.half()
    model.frozen.bias = nn.Parameter(torch.ones(6))
    del model.unused
    optimizer = torch.optim.AdamW([model.embed.weight, model.norm.bias])
    before = held(model)
    with pytest.raises(ValueError, match=naming("does not fit", "'norm.weight'", "[6]", "[7]")) as error:
        trueshard.load(foreign[0] / style, model=model, optimizer=optimizer, convert=True, allow_pickle=True)
    assert lacking(error.value, "'extra'", "'unused'", "group 0", "'optimizer'") == []
    with pytest.raises(ValueError, match=naming("'embed.weight'", "float32", "float16", "convert=True")):
        trueshard.load(foreign[0] / style, model=model, allow_pickle=True)
    assert_same(held(model), before)
    result = trueshard.load(foreign[0] / style, model=model, strict=False, convert=True, allow_pickle=True)
    assert (result.missing, result.unexpected, result.mismatched) == (["extra"], ["unused"], ["norm.weight"])
    saved = foreign[1]["model"]
    assert_same(model.embed.weight.data, saved["embed.weight"].half())
    assert_same(model.norm.weight.data, before["model"]["norm.weight"])


DAMAGES: dict[str, tuple[str, Callable[[bytes, bytes], bytes | None], str]] = {
    "cut": ("__0_0.distcp", lambda data, value: data[:-40], naming("__0_0.distcp", "cut short", "byte")),
    "gone": ("__0_0.distcp", lambda data, value: None, naming("'__0_0.distcp'", "incomplete")),
    "flipped": (
        "__0_0.distcp",
        lambda data, value: data.replace(value, bytes([value[0] ^ 1]) + value[1:]),
        naming("__0_0.distcp", "damaged", "embed.weight'", "bytes"),
    ),
    "metadata": (".metadata", lambda data, value: data[:-40], naming(".metadata", "damaged")),
}
"""Way → (file, what becomes of its bytes, given those of a row of the embedding; what the error names)"""


@pytest.mark.parametrize("way", DAMAGES)
def test_damaged_directories_are_found_before_anything_is_changed(
    foreign: tuple[Path, dict[str, Any]], tmp_path: Path, way: str
) -> None:
    path = shutil.copytree(foreign[0] / "nested", tmp_path / "bad")
    name, change, reason = DAMAGES[way]
    data = change((path / name).read_bytes(), foreign[1]["model"]["embed.weight"][0].numpy().tobytes())
    (path / name).unlink()
    if data is not None:
        (path / name).write_bytes(data)
    model, optimizer = built(seed=1)
    before = held(model, optimizer)
    with pytest.raises((ValueError, FileNotFoundError), match=reason):
        trueshard.load(path, model=model, optimizer=optimizer, allow_pickle=True)
    assert_same(held(model, optimizer), before)


def test_names_and_copies(foreign: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """A mapping of names; a second copy of the model in the directory, which only a mapping can choose."""
    model, _ = built()
    averaged, _ = built(seed=2)
    both = {"network": model.state_dict(), "ema": averaged.state_dict()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(both, checkpoint_id=tmp_path, no_dist=True)
    other, _ = built(seed=1)
    with pytest.raises(ValueError, match=naming("'model'", "ema", "names=")):
        trueshard.load(tmp_path, model=other, allow_pickle=True)
    trueshard.load(tmp_path, model=other, allow_pickle=True, names=lambda name: f"ema.{name}")
    assert_same(held(other), held(averaged))


def load_onto_meta(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    with torch.device("meta"):
        model = Tower()
    trueshard.shard(model)
    trueshard.load(Path(folder, "TorchTitan"), model=model, allow_pickle=True)
    return held(model)


def test_models_without_memory(foreign: tuple[Path, dict[str, Any]], ranks2: Ranks) -> None:
    for result in ranks2.run(load_onto_meta, str(foreign[0])):
        assert_same(result, {"model": foreign[1]["model"]})


def test_several_models_and_optimizers(tmp_path: Path) -> None:
    actor, first = built()
    critic, second = built(seed=2)
    for model, optimizer in ((actor, first), (critic, second)):
        trained(model, optimizer)
    content = {
        "model": {"actor": actor.state_dict(), "critic": critic.state_dict()},
        "optimizer": {
            "actor": get_optimizer_state_dict(actor, first),
            "critic": get_optimizer_state_dict(critic, second),
        },
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(content, checkpoint_id=tmp_path, no_dist=True)
    new = {"critic": built(seed=3), "actor": built(seed=4)}
    trueshard.load(
        tmp_path,
        model={key: model for key, (model, _) in new.items()},
        optimizer={key: optimizer for key, (_, optimizer) in new.items()},
        allow_pickle=True,
    )
    assert_same(held(*new["actor"])["model"], held(actor)["model"])
    assert_same(held(*new["critic"])["model"], held(critic)["model"])


def test_entries_are_loaded_in_place(foreign: tuple[Path, dict[str, Any]]) -> None:
    class Progress:
        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.state = state

    model, optimizer = built()
    progress = Progress()
    result = trueshard.load(
        foreign[0] / "TorchTitan", model=model, optimizer=optimizer, allow_pickle=True, train_state=progress
    )
    assert_same(progress.state, {"step": torch.tensor(2), "seen": 24})
    assert list(result) == ["lr_scheduler"]


# Hugging Face and PEFT

HUB = ("llama", "t5", "gpt_neox", "mixtral", "qwen2_moe", "deepseek_v3", "vit", "llava", "qwen2_vl", "marian")
"""Among them all that is written under other names than it has in memory, and merged: experts"""
ADAPTERS = ("lora", "dora", "modules_to_save", "prompt_tuning", "lora_plain_module")


def load_pretrained(rank: int, world_size: int, folder: str, how: str) -> dict[str, Any]:
    """Write each with its own ``save_pretrained``; load it into another, sharded. What differs, by name."""
    failed = {}
    for name in HUB:
        path = Path(folder, name)
        expected = CASES[name].build(0)
        if rank == 0:
            expected.save_pretrained(path, max_shard_size="50KB")
        torch.distributed.barrier()
        if how == "meta":
            with torch.device("meta"):
                model = type(expected)(expected.config)
        else:
            model = CASES[name].build(1)
        trueshard.shard(model)
        result = trueshard.load(path, model=model)
        failed[name] = [result.missing, result.unexpected, _differing(model, expected)]
    return failed


def _differing(model: nn.Module, expected: nn.Module) -> list[str]:
    result = whole(dict(model.state_dict()))
    return [name for name, value in expected.state_dict().items() if not torch.equal(result[name], value)]


@pytest.mark.parametrize("how", all_but(["meta"], ["built", "meta"]))
def test_what_transformers_writes_loads_into_shards(ranks2: Ranks, tmp_path: Path, how: str) -> None:
    for result in ranks2.run(load_pretrained, str(tmp_path), how):
        assert result == {name: [[], [], []] for name in HUB}


def load_adapters(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Write each with PEFT's own ``save_pretrained``; load it over other values, sharded."""
    failed = {}
    for name in ADAPTERS:
        path = Path(folder, name)
        expected = CASES[name].build(0)
        torch.manual_seed(2)
        with torch.no_grad():
            for parameter in (p for p in expected.parameters() if p.requires_grad):
                parameter.normal_()
        if rank == 0:
            expected.save_pretrained(path)
        torch.distributed.barrier()
        model = CASES[name].build(0)
        trueshard.shard(model)
        result = trueshard.load(path, model=model)
        failed[name] = [result.missing, result.unexpected, _differing(model, expected)]
    return failed


def test_what_peft_writes_loads_into_shards(ranks2: Ranks, tmp_path: Path) -> None:
    for result in ranks2.run(load_adapters, str(tmp_path)):
        assert result == {name: [[], [], []] for name in ADAPTERS}


def test_a_base_model_loads_below_adapters(tmp_path: Path) -> None:
    base, model = CASES["llama"].build(1), CASES["lora"].build(0)
    base.save_pretrained(tmp_path)
    adapters = {name: value.clone() for name, value in model.state_dict().items() if "lora_" in name}
    with pytest.raises(ValueError, match=naming("lora_A.default.weight'")):
        trueshard.load(tmp_path, model=model)
    result = trueshard.load(tmp_path, model=model, strict=False)
    assert result.missing == list(adapters)
    assert (result.unexpected, result.mismatched) == ([], [])
    assert_same(dict(model.unload().state_dict()), dict(base.state_dict()))


def test_adapters_need_a_model_with_one(tmp_path: Path) -> None:
    CASES["lora"].build(0).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=naming("PEFT", "one adapter", 0)):
        trueshard.load(tmp_path, model=CASES["llama"].build(0))
