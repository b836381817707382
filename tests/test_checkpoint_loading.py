"""What load does with what does not fit: groups, names, shapes, dtypes; and with files that others wrote."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

import trueshard
from cases import on_ranks
from checkpointing import SETUPS, everything, go_on, hub_model, logits, scribble
from gathering import whole
from messages import naming
from meter import gloo_lets_go, meter, peak_and_rest
from models import CASES
from models.handmade import Stack
from parity import Ranks, assert_same
from resting import all_but
from stepping import Whole
from trueshard import _torch
from trueshard.checkpoint.catalogue import Catalogue


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return everything(model)["model "]["tensors"]


def grouped(model: nn.Module, words: list[tuple[str, dict[str, Any]]], lr: float = 0.5) -> torch.optim.AdamW:
    """Groups of the parameters of submodules (names separated by blanks), with settings."""
    groups = []
    for names, settings in words:
        members = [p for name in names.split() for p in model.get_submodule(name).parameters()]
        groups.append({"params": members} | settings)
    return torch.optim.AdamW(groups, lr=lr, eps=1e-3)


FIRST: list[tuple[str, dict[str, Any]]] = [("first blocks", {"lr": 0.01, "tag": "body"}), ("last", {"lr": 0.02})]


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return everything(model, optimizer)["optimizer "]["state"]


def trained(rank: int, world_size: int, folder: str) -> None:
    """A checkpoint of an optimizer of two groups."""
    torch.manual_seed(0)
    model = Stack(depth=2)
    optimizer = grouped(model, FIRST)
    trueshard.shard(model, optimizer)
    go_on(SETUPS["fewer rows than ranks"], model, optimizer, rank, world_size, range(2))
    trueshard.save(Path(folder, "groups"), model=model, optimizer=optimizer)
    empty = torch.optim.AdamW(model.parameters(), lr=0.3)
    trueshard.save(Path(folder, "no state"), model=model, optimizer=empty)


def reloaded(rank: int, world_size: int, folder: str, words: list[Any], strict: bool) -> dict[str, Any]:
    """The checkpoint in an optimizer of other groups: what it has then, what is reported, what is raised."""
    torch.manual_seed(1)
    same = Stack(depth=2)
    trained_one = grouped(same, FIRST)
    trueshard.shard(same, trained_one)
    trueshard.load(Path(folder, "groups"), model=same, optimizer=trained_one)
    model = Stack(depth=2)
    optimizer = grouped(model, words)
    trueshard.shard(model, optimizer)
    go_on(SETUPS["fewer rows than ranks"], model, optimizer, rank, world_size, [9])
    before = everything(model, optimizer)
    try:
        result = trueshard.load(Path(folder, "groups"), model=model, optimizer=optimizer, strict=strict)
    except ValueError as error:
        assert_same(everything(model, optimizer), before)
        return {"error": str(error)}
    now = _state(model, optimizer)
    members = {name for group in everything(model, optimizer)["optimizer "]["groups"] for name in group["params"]}
    saved = {name: each for name, each in _state(same, trained_one).items() if name in members}
    assert_same({name: now[name] for name in sorted(saved)}, {name: saved[name] for name in sorted(saved)})
    return {
        "lr": [group["lr"] for group in optimizer.param_groups],
        "tag": [group.get("tag") for group in optimizer.param_groups],
        "told": [result.missing, result.unexpected, result.mismatched],
    }


@pytest.fixture
def folder(tmp_path: Path, ranks2: Ranks) -> str:
    ranks2.run(trained, str(tmp_path))
    return str(tmp_path)


def test_groups_and_members_in_another_order_are_matched_by_name(folder: str, ranks3: Ranks) -> None:
    words = [("last", {}), ("blocks.1 first blocks.0", {})]
    for result in ranks3.run(reloaded, folder, words, True):
        assert result == {"lr": [0.02, 0.01], "tag": [None, "body"], "told": [[], [], []]}


def partly(rank: int, world_size: int, folder: str) -> list[Any]:
    """A group added since: of parameters that nothing trained before."""
    torch.manual_seed(0)
    model = Stack(depth=2)
    optimizer = grouped(model, FIRST[:1])
    trueshard.shard(model, optimizer)
    setup = SETUPS["fewer rows than ranks"]
    go_on(setup, model, optimizer, rank, world_size, range(2))
    trueshard.save(Path(folder, "part"), model=model, optimizer=optimizer)
    expected = _state(model, optimizer)
    other = Stack(depth=2)
    optimizer = grouped(other, [("last", {"lr": 0.7}), FIRST[0]])
    trueshard.shard(other, optimizer)
    result = trueshard.load(Path(folder, "part"), model=other, optimizer=optimizer)
    assert_same(_state(other, optimizer), expected)
    go_on(setup, other, optimizer, rank, world_size, range(2))
    return [[group["lr"] for group in optimizer.param_groups], result.missing]


def test_a_group_that_was_added_since_keeps_its_settings_and_is_reported(tmp_path: Path, ranks2: Ranks) -> None:
    for rates, missing in ranks2.run(partly, str(tmp_path)):
        assert rates == [0.7, 0.01]
        assert len(missing) == 1
        assert "group 0" in missing[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([("first blocks last", {})], "last.weight"),
        pytest.param([("first blocks.0", {}), ("blocks.1 last", {})], "blocks.1", marks=pytest.mark.rest),
        ([("first blocks", {})], "last.weight"),
    ],
    ids=["joined", "moved", "left out"],
)
def test_groups_that_differ_are_named_or_loaded_as_far_as_they_fit(
    words: list[Any], message: str, folder: str, ranks2: Ranks
) -> None:
    for result in ranks2.run(reloaded, folder, words, True):
        assert message in result["error"]
        assert "strict=False" in result["error"]
    for result in ranks2.run(reloaded, folder, words, False):
        assert any(result["told"])


def without_state(rank: int, world_size: int, folder: str) -> None:
    """State that was not there when it was saved is not there after loading; another class is refused."""
    model = Stack(depth=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    trueshard.shard(model, optimizer)
    go_on(SETUPS["fewer rows than ranks"], model, optimizer, rank, world_size, range(2))
    other = torch.optim.SGD(model.parameters(), lr=0.5)
    with pytest.raises(ValueError, match=naming("AdamW", "SGD")):
        trueshard.load(Path(folder, "no state"), model=model, optimizer=other)
    trueshard.load(Path(folder, "no state"), model=model, optimizer=optimizer)
    assert not any(optimizer.state.values())
    assert optimizer.param_groups[0]["lr"] == 0.3


def test_state_that_was_absent_is_absent_again(folder: str, alone: Ranks, ranks2: Ranks) -> None:
    for ranks in (alone, ranks2):
        ranks.run(without_state, folder)


class Around(torch.optim.Optimizer):
    """Steps another optimizer, which keeps all state."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


def wrapped(rank: int, world_size: int, folder: str) -> int:
    """Save and load a wrapped optimizer whose state each parameter's owner alone has; return how much this rank has."""
    torch.manual_seed(0)
    model = Stack(depth=2)
    optimizer = Around(Whole(model.parameters()))
    trueshard.shard(model, optimizer)
    go_on(SETUPS["fewer rows than ranks"], model, optimizer, rank, world_size, range(2))
    trueshard.save(Path(folder, "wrapped"), model=model, optimizer=optimizer)
    state = optimizer.inner.state
    saved = {parameter: copy.deepcopy(entries) for parameter, entries in state.items() if entries}
    state.clear()
    trueshard.load(Path(folder, "wrapped"), model=model, optimizer=optimizer)
    assert_same([state[parameter] for parameter in saved], list(saved.values()))
    return len(saved)


def test_state_of_a_wrapped_optimizer_is_saved_by_every_owner(tmp_path: Path, ranks2: Ranks) -> None:
    first, second = ranks2.run(wrapped, str(tmp_path))
    assert first
    assert second
    assert first + second == len(list(Stack(depth=2).parameters()))


# Names, shapes, dtypes


class Other(Stack):
    """Two blocks where the saved one has three, a wider head, and a bias more."""

    def __init__(self) -> None:
        super().__init__(depth=2)
        self.last = nn.Linear(8, 9)
        self.shift = nn.Parameter(torch.zeros(8))


def partial(rank: int, world_size: int, folder: str) -> None:
    torch.manual_seed(0)
    source = Stack(depth=3)
    trueshard.shard(source)
    path = Path(folder, "three")
    trueshard.save(path, model=source)
    model = Other()
    trueshard.shard(model)
    before, wanted = tensors_of(model), tensors_of(source)
    with pytest.raises(ValueError, match=naming("last.weight", "[8, 8]", "[9, 8]")) as caught:
        trueshard.load(path, model=model)
    for word in ("last.bias", "shift", "blocks.2.norm.weight", "strict=False"):
        assert word in str(caught.value)
    assert_same(tensors_of(model), before)
    result = trueshard.load(path, model=model, strict=False)
    assert result.missing == ["shift"]
    assert sorted(result.mismatched) == ["last.bias", "last.weight"]
    assert sorted(result.unexpected) == sorted(name for name in wanted if name.startswith("blocks.2."))
    for name, value in tensors_of(model).items():
        kept = name == "shift" or name.startswith("last")
        assert_same({name: value}, {name: before[name] if kept else wanted[name]})


def test_what_does_not_fit_is_named_and_the_rest_is_loaded_with_strict_false(tmp_path: Path, ranks2: Ranks) -> None:
    ranks2.run(partial, str(tmp_path))


def converted(rank: int, world_size: int, folder: str) -> None:
    torch.manual_seed(0)
    source = Stack(depth=1).bfloat16()
    trueshard.shard(source)
    path = Path(folder, "bf16")
    trueshard.save(path, model=source)
    model = Stack(depth=1)
    trueshard.shard(model)
    before = tensors_of(model)
    with pytest.raises(ValueError, match=naming("'first.weight'", "bfloat16", "float32", "convert=True")):
        trueshard.load(path, model=model)
    assert_same(tensors_of(model), before)
    trueshard.load(path, model=model, convert=True)
    assert_same(tensors_of(model), {name: value.float() for name, value in tensors_of(source).items()})


def test_a_dtype_that_differs_is_converted_only_when_asked(tmp_path: Path, alone: Ranks, ranks3: Ranks) -> None:
    alone.run(converted, str(tmp_path / "1"))
    ranks3.run(converted, str(tmp_path / "3"))


# At once, and in place


def while_gathered(rank: int, world_size: int, folder: str) -> None:
    """Load after a forward that left units gathered, or one without gradients: the next forward has what was loaded."""
    torch.manual_seed(0)
    source, x = Stack(), torch.randn(4, 8)
    expected, path = source(x).detach(), Path(folder, "other")
    trueshard.shard(source)
    trueshard.save(path, model=source)
    whole_state = whole(source.state_dict())
    for policy, way in itertools.product(("never", "default", "always"), ("load", "load_state_dict")):
        model = Stack()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trueshard.shard(model, optimizer, reshard_after_forward=policy)
        for before in ("a forward", "no_grad", "a backward"):
            scribble(model)
            if before == "no_grad":
                with torch.no_grad():
                    model(x)
            else:
                loss = model(x).sum()
                if before == "a backward":
                    loss.backward()
            if way == "load":
                trueshard.load(path, model=model)
            else:
                model.load_state_dict(whole_state)
            torch.testing.assert_close(model(x).detach(), expected, msg=f"{policy} {way} {before}")
        optimizer.zero_grad()


def test_what_is_loaded_is_what_the_next_forward_computes_with(tmp_path: Path, alone: Ranks, ranks2: Ranks) -> None:
    alone.run(while_gathered, str(tmp_path / "1"))
    ranks2.run(while_gathered, str(tmp_path / "2"))


def memory_of(model: nn.Module) -> list[int]:
    return [_torch.local(each).data_ptr() for each in model.parameters()]


def in_place(rank: int, world_size: int, folder: str) -> list[tuple[int, int, int]]:
    """Of a load into a new optimizer, and of one over its state: most bytes allocated at a time, those left at its end,
    and the bytes of this rank's parameters."""
    torch.manual_seed(0)
    model = Stack(width=96)
    optimizer = torch.optim.AdamW(model.parameters())
    trueshard.shard(model, optimizer)
    go_on(SETUPS["fewer rows than ranks"], model, optimizer, rank, world_size, [0])
    path = Path(folder, "large")
    trueshard.save(path, model=model, optimizer=optimizer)
    optimizer.state.clear()
    before = memory_of(model)
    with gloo_lets_go():
        result = meter([lambda: trueshard.load(path, model=model, optimizer=optimizer)] * 2)
    assert memory_of(model) == before
    own = sum(_torch.local(each).nbytes for each in model.parameters())
    return [(*peak_and_rest([change.bytes for change in step]), own) for step in result.steps]


def test_each_rank_reads_into_its_own_shards_and_little_else_is_allocated(tmp_path: Path, ranks2: Ranks) -> None:
    """So nothing can come to another device than it is on, nor a whole model into one process."""
    for loads in ranks2.run(in_place, str(tmp_path)):
        steps = 4 * len(list(Stack().parameters()))
        for (highest, rest, own), made in zip(loads, (2 * loads[0][2] + steps, 0), strict=True):
            assert rest == made
            assert highest - rest < own // 10


def replicated(world_size: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    mesh = torch.distributed.init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = Stack(width=9).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    trueshard.shard(model, optimizer, mesh=mesh)
    return model, optimizer


def read_by_replicas(rank: int, world_size: int, folder: str) -> tuple[int, int, str]:
    """(bytes that this rank reads into what is cut, but for checksums; bytes of all that is cut; what a disk that fails
    on rank 2 comes to)."""
    model, optimizer = replicated(world_size)
    for _ in range(2):
        model(torch.ones(2, 8, dtype=torch.bfloat16)).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    path, count, read_into = Path(folder, "replicas"), 0, Catalogue.read_into
    trueshard.save(path, model=model, optimizer=optimizer)

    def counted(catalogue: Catalogue, key: str, begin: int, local: torch.Tensor) -> None:
        nonlocal count
        count += local.nbytes if not key.endswith("/step") and key.startswith(("model", "optimizer")) else 0
        read_into(catalogue, key, begin, local)

    def failing(catalogue: Catalogue, key: str, begin: int, local: torch.Tensor) -> None:
        if rank == 2 and key.startswith("model"):
            raise OSError("the disk is gone")
        read_into(catalogue, key, begin, local)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Catalogue, "read_into", counted)
        other, second = replicated(world_size)
        trueshard.load(path, model=other, optimizer=second)
        assert_same(everything(other, second), everything(model, optimizer))
        patch.setattr(Catalogue, "read_into", failing)
        with pytest.raises((OSError, RuntimeError)) as caught:
            trueshard.load(path, model=other, optimizer=second)
    return count, 3 * sum(p.nbytes for p in model.parameters()), str(caught.value)


def test_of_replicas_one_reads_and_sends(tmp_path: Path, ranks4: Ranks) -> None:
    result = ranks4.run(read_by_replicas, str(tmp_path))
    assert sum(count for count, _, _ in result) == result[0][1]
    assert max(count for count, _, _ in result) < result[0][1] // 2
    assert ["rank 2 failed" in error for _, _, error in result] == [True, True, False, True]
    assert all("the disk is gone" in error for _, _, error in result)


# What others wrote


def _renamed(name: str) -> str | None:
    return None if name.startswith("first") else name.replace("blocks.", "transformer.h.")


def others(rank: int, world_size: int, folder: str, table: bool, meta: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    with torch.device("meta" if meta else "cpu"):
        model = Stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trueshard.shard(model, optimizer)
    mapping = {name: new for name, _ in model.named_parameters() if (new := _renamed(name))}
    names: Any = mapping if table else _renamed
    result = trueshard.load(Path(folder, "others.safetensors"), model=model, names=names)
    assert not result
    assert [result.missing, result.unexpected, result.mismatched] == [[], [], []]
    report = tensors_of(model)
    go_on(SETUPS["fewer rows than ranks"], model, optimizer, rank, world_size, [0])
    return report


@pytest.mark.parametrize("meta", [False, True], ids=["filled", "meta"])
@pytest.mark.parametrize("table", [False, True], ids=["function", "table"])
def test_any_module_loads_by_a_mapping_of_names(
    table: bool, meta: bool, tmp_path: Path, alone: Ranks, ranks3: Ranks
) -> None:
    expected = {name: torch.randn(p.shape) for name, p in Stack().named_parameters()}
    save_file({_renamed(name) or name: value for name, value in expected.items()}, tmp_path / "others.safetensors")
    for ranks in (alone, ranks3):
        for result in ranks.run(others, str(tmp_path), table, meta):
            assert_same(result, expected)


def hub_directory(rank: int, world_size: int, folder: str, name: str) -> dict[str, Any]:
    """A model as transformers itself saves it, in several files; what it holds and gives."""
    model = hub_model(name)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(Path(folder, name), max_shard_size="40kB")
    return {"tensors": tensors_of(model), "logits": logits(model, name)}


def from_hub(rank: int, world_size: int, folder: str, name: str, how: str) -> dict[str, Any]:
    import transformers

    model = hub_model(name)
    if how == "meta":
        with torch.device("meta"):
            model = getattr(transformers, type(model).__name__)(model.config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parameters = len(list(model.parameters()))
    if how != "not sharded":
        trueshard.shard(model, optimizer)
    if how != "meta":
        scribble(model)
    result = trueshard.load(Path(folder, name), model=model)
    assert [result.missing, result.unexpected, result.mismatched] == [[], [], []]
    assert len(list(model.parameters())) == parameters
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    report = {"tensors": tensors_of(model), "logits": logits(model, name)}
    model.train()
    CASES[name.removeprefix("tied_")].loss(model, CASES[name.removeprefix("tied_")].batch(4, 1)).backward()
    optimizer.step()
    after = whole(dict(model.named_parameters()))
    changed = {n for n, value in after.items() if not torch.equal(value, report["tensors"][n])}
    assert changed  # what was loaded is what the optimizer holds, and what the forward reads
    assert changed <= {n for n, p in model.named_parameters() if p.grad is not None}
    return report


@pytest.mark.parametrize("name", all_but(["mixtral"], ["llama", "tied_llama", "gpt2", "mixtral", "llava"]))
def test_a_hugging_face_directory_loads_into_sharded_and_meta_models(
    name: str, tmp_path: Path, alone: Ranks, ranks2: Ranks, ranks3: Ranks
) -> None:
    """Equal tensors and logits, ties kept, buffers that no file has computed; and it trains."""
    (expected,) = alone.run(hub_directory, str(tmp_path), name)
    before = {path: path.read_bytes() for path in (tmp_path / name).iterdir()}
    for ranks, how in ((alone, "not sharded"), (alone, "meta"), (ranks2, "sharded"), (ranks3, "meta")):
        for result in ranks.run(from_hub, str(tmp_path), name, how):
            assert_same(result["tensors"], expected["tensors"])
            assert_same(result["logits"], expected["logits"], rtol=1e-4, atol=1e-5)
    assert {path: path.read_bytes() for path in (tmp_path / name).iterdir()} == before


@on_ranks(2)
def test_what_was_loaded_stays_when_its_file_is_written_to(rank: int, world_size: int, tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    if rank == 0:
        save_file({name: torch.full(tensor.shape, 2.0) for name, tensor in Stack().state_dict().items()}, file)
    dist.barrier()
    with torch.device("meta"):
        model = Stack()
    trueshard.shard(model)
    trueshard.load(file, model=model)
    if rank == 0:
        file.write_bytes(bytes(file.stat().st_size))
    dist.barrier()
    assert all((tensor.full_tensor() == 2).all() for tensor in model.parameters())


def incomplete(rank: int, world_size: int, folder: str) -> None:
    model = hub_model("llama")
    trueshard.shard(model)
    before = tensors_of(model)
    with pytest.raises(ValueError, match=naming("'model.norm.weight'", "'model.nrom.weight'")):
        trueshard.load(Path(folder, "llama"), model=model)
    assert_same(tensors_of(model), before)
    result = trueshard.load(Path(folder, "llama"), model=model, strict=False)
    assert result.missing == ["model.norm.weight"]
    assert result.unexpected == ["model.nrom.weight"]
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(2, 2), Bare())
    save_file({"0.weight": torch.ones(2, 2), "0.bias": torch.ones(2)}, Path(folder, f"bare{rank}.safetensors"))
    with pytest.raises(ValueError, match=naming("'1.scale'")):
        trueshard.load(Path(folder, f"bare{rank}.safetensors"), model=empty)
    assert all(p.is_meta for p in empty.parameters())


class Bare(nn.Module):
    """A parameter that nothing computes anew."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


def test_missing_and_unexpected_names_of_a_hugging_face_directory_are_reported(
    tmp_path: Path, alone: Ranks, ranks2: Ranks
) -> None:
    alone.run(hub_directory, str(tmp_path), "llama")
    index = tmp_path / "llama" / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    file = tmp_path / "llama" / table["weight_map"]["model.norm.weight"]
    data = file.read_bytes().replace(b'"model.norm.weight"', b'"model.nrom.weight"')
    file.write_bytes(data)
    table["weight_map"]["model.nrom.weight"] = table["weight_map"].pop("model.norm.weight")
    index.write_text(json.dumps(table))
    alone.run(incomplete, str(tmp_path))


def into_lora(rank: int, world_size: int, folder: str) -> None:
    """A base model's directory in a model that has adapters, and the adapters of another run."""
    model: Any = CASES["lora"].build(0)
    trueshard.shard(model)
    adapters = {name: value for name, value in tensors_of(model).items() if "lora_" in name}
    scribbled = tensors_of(model)
    result = trueshard.load(Path(folder, "llama"), model=model, strict=False)
    assert sorted(result.missing) == sorted(adapters)
    assert not result.unexpected
    now = tensors_of(model)
    assert_same({name: now[name] for name in adapters}, adapters)
    assert not torch.equal(now["base_model.model.model.norm.weight"], scribbled["base_model.model.model.norm.weight"])
    path = Path(folder, "lora")
    trueshard.save(path, model=model)
    other: Any = CASES["lora"].build(1)
    trueshard.shard(other)
    base = {name: value for name, value in tensors_of(other).items() if "lora_" not in name}
    if rank == 0:
        trueshard.export(path, Path(folder, "adapter"), to="adapter")
    torch.distributed.barrier()
    trueshard.load(Path(folder, "adapter"), model=other)
    now = tensors_of(other)
    assert_same({name: now[name] for name in base}, base)
    assert_same({name: now[name] for name in adapters}, adapters)
    plain = hub_model("llama")
    trueshard.shard(plain)
    trueshard.load(path / "base", model=plain)
    assert_same(tensors_of(plain)["model.norm.weight"], tensors_of(model)["base_model.model.model.norm.weight"])


def test_bases_and_adapters_load_into_one_another(tmp_path: Path, alone: Ranks, ranks2: Ranks) -> None:
    alone.run(hub_directory, str(tmp_path), "llama")
    ranks2.run(into_lora, str(tmp_path))
