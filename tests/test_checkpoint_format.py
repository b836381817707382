"""What is on disk: a Hugging Face model directory, no pickle, and a manifest that says all of it, at any world size."""

from __future__ import annotations

import json
import math
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import trueshard
from checkpointing import (
    LAYOUTS,
    SETUPS,
    everything,
    go_on,
    hub_model,
    logits,
    named,
    seed,
    started,
    tokenizer,
    words_of,
)
from damage import bits, manifest_of
from models import CASES
from parity import Ranks, assert_same
from resting import all_but

HUGGING_FACE = ("llama", "tied_llama", "mixtral", "t5", "llava", "qwen2_vl", "gpt2")


def saved_model(rank: int, world_size: int, folder: str, name: str) -> dict[str, Any]:
    """One step, saved with the optimizer as a training run does; what the model holds and gives."""
    model = hub_model(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trueshard.shard(model, optimizer)
    case = CASES[name.removeprefix("tied_")]
    case.loss(model, case.batch(4, 3)).backward()
    optimizer.step()
    optimizer.zero_grad()
    trueshard.save(Path(folder, name), model=model, optimizer=optimizer, progress={"step": 1})
    return {"tensors": everything(model)["model "]["tensors"], "logits": logits(model, name)}


def from_pretrained(rank: int, world_size: int, folder: str, name: str) -> dict[str, Any]:
    import transformers

    path = Path(folder, name)
    config = json.loads((path / "config.json").read_text())
    kind = getattr(transformers, config["architectures"][0])
    model, info = kind.from_pretrained(
        path, output_loading_info=True, attn_implementation="eager", experts_implementation="eager"
    )
    assert not info["missing_keys"], info
    assert not info["unexpected_keys"], info
    assert not info["mismatched_keys"], info
    return {"tensors": everything(model)["model "]["tensors"], "logits": logits(model, name)}


@pytest.mark.parametrize("name", all_but(list(HUGGING_FACE)[::3], HUGGING_FACE))
def test_from_pretrained_reads_a_training_checkpoint_as_it_stands(
    name: str, tmp_path: Path, alone: Ranks, ranks2: Ranks
) -> None:
    """The same tensors to the last bit, and the same logits."""
    expected = ranks2.run(saved_model, str(tmp_path), name)[0]
    (result,) = alone.run(from_pretrained, str(tmp_path), name)
    assert_same(result["tensors"], expected["tensors"])
    assert_same(result["logits"], expected["logits"], rtol=1e-5, atol=1e-6)


def with_tokenizer(rank: int, world_size: int, folder: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = hub_model("llama").bfloat16()
    trueshard.shard(model)
    path = Path(folder, "with")
    trueshard.save(path, model=model, tokenizer=tokenizer())
    assert AutoTokenizer.from_pretrained(path)("shard to")["input_ids"] == [4, 3]
    assert AutoModelForCausalLM.from_pretrained(path).dtype == torch.bfloat16
    assert json.loads((path / "config.json").read_text())["dtype"] == "bfloat16"
    trueshard.check(path)


def test_tokenizer_files_are_put_beside_the_model(tmp_path: Path, ranks2: Ranks) -> None:
    ranks2.run(with_tokenizer, str(tmp_path))


def in_several_files(rank: int, world_size: int, folder: str, name: str) -> dict[str, Any]:
    """``saved_model`` where a file holds no more than 20 kB."""
    from trueshard.checkpoint import layout

    usual, layout.LARGEST = layout.LARGEST, 20_000
    try:
        return saved_model(rank, world_size, folder, name)
    finally:
        layout.LARGEST = usual


def test_a_large_model_is_several_files_and_an_index(tmp_path: Path, alone: Ranks, ranks3: Ranks) -> None:
    expected = ranks3.run(in_several_files, str(tmp_path), "llama")[0]
    files = sorted(path.name for path in (tmp_path / "llama").glob("model-*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    (result,) = alone.run(from_pretrained, str(tmp_path), "llama")
    assert_same(result["tensors"], expected["tensors"])
    trueshard.check(tmp_path / "llama")


def adapted(rank: int, world_size: int, folder: str, adapters: int) -> dict[str, Any]:
    """A trained LoRA model; its logits with each adapter, and without."""
    model: Any = CASES["lora"].build(0)
    if adapters == 2:
        from peft import LoraConfig

        model.add_adapter("second", LoraConfig(r=2, target_modules=["k_proj"], init_lora_weights=False))
    trueshard.shard(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    case = CASES["lora"]
    case.loss(model, case.batch(4, 3)).backward()
    optimizer.step()
    trueshard.save(Path(folder, "adapted"), model=model, optimizer=optimizer)
    result = {"default": logits(model, "lora")}
    if adapters == 2:
        model.set_adapter("second")
        result["second"] = logits(model, "lora")
    with model.disable_adapter():
        result["base"] = logits(model, "lora")
    return result


def adapted_by_others(rank: int, world_size: int, folder: str, adapters: int) -> dict[str, Any]:
    from peft import AutoPeftModelForCausalLM, PeftModel
    from transformers import LlamaForCausalLM

    path = Path(folder, "adapted")
    base, info = LlamaForCausalLM.from_pretrained(path / "base", output_loading_info=True, attn_implementation="eager")
    assert not info["missing_keys"], info
    assert not info["unexpected_keys"], info
    result = {"base": logits(base, "lora")}
    for name in ("default", "second")[:adapters]:
        base = LlamaForCausalLM.from_pretrained(path / "base", attn_implementation="eager")
        adapter = path if name == "default" else path / name
        result[name] = logits(PeftModel.from_pretrained(base, adapter), "lora")
    result["whole"] = logits(LlamaForCausalLM.from_pretrained(path, attn_implementation="eager"), "lora")
    result["by PEFT"] = logits(AutoPeftModelForCausalLM.from_pretrained(path, attn_implementation="eager"), "lora")
    return result


@pytest.mark.parametrize("adapters", [1, 2])
def test_base_and_adapters_are_what_transformers_and_peft_read(
    adapters: int, tmp_path: Path, alone: Ranks, ranks2: Ranks
) -> None:
    """The base under the names that it has without PEFT, and each adapter as PEFT itself writes it."""
    expected = ranks2.run(adapted, str(tmp_path), adapters)[0]
    (result,) = alone.run(adapted_by_others, str(tmp_path), adapters)
    assert_same({key: result[key] for key in expected}, expected, rtol=1e-5, atol=1e-6)
    assert not torch.equal(expected["base"], expected["default"])
    for whole in (result["whole"], result["by PEFT"]):
        assert torch.equal(whole, result["default"]), "from_pretrained gives what was trained"


# Pickle


def unpickled(rank: int, world_size: int, folder: str) -> list[str]:
    """Loads with an ear at the interpreter: which globals does anything ask a pickle for?"""
    heard: list[str] = []
    listening = True
    sys.addaudithook(
        lambda event, args: heard.append(str(args)) if listening and event == "pickle.find_class" else None
    )
    setup = SETUPS["Muon and SGD"]
    model, optimizer = started(setup, LAYOUTS["unsharded"])
    go_on(setup, model, optimizer, 0, 1, range(2))
    path = Path(folder, "one")
    trueshard.save(path, model=model, optimizer=optimizer, more={"a": torch.ones(2)})
    trueshard.load(path, model=model, optimizer=optimizer)
    trueshard.check(path)
    listening = False
    return heard


def test_no_pickle_is_written_or_read(tmp_path: Path, alone: Ranks) -> None:
    assert alone.run(unpickled, str(tmp_path), group=False) == [[]]
    files = [path for path in (tmp_path / "one").rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".safetensors"}
    for path in files:
        if path.suffix == ".json":
            json.loads(path.read_text())
        else:
            safe_open(path, "pt").keys()


# The manifest


def write(rank: int, world_size: int, folder: str, name: str, label: str) -> dict[str, Any]:
    """A setup after two steps on one process, sharded as ``label`` says, saved; all that it holds, by key."""
    setup, layout = SETUPS[name], LAYOUTS[label]
    model = setup.build()
    optimizer = setup.optimizer(model)
    go_on(setup, model, optimizer, 0, 1, range(2))
    trueshard.shard(model, *named(optimizer).values(), **words_of(layout))
    seed(rank)
    trueshard.save(Path(folder, label), model=model, optimizer=optimizer, progress={"step": 2, "list": [1, (2, None)]})
    report = everything(model, optimizer)
    return report | {"trainable": {n: p.requires_grad for n, p in model.named_parameters()}}


def raw(path: Path, entry: dict[str, Any]) -> bytes:
    return b"".join((path / p["file"]).read_bytes()[p["begin"] : p["end"]] for p in entry["pieces"])


@pytest.mark.parametrize("name", ["tied", "frozen inside and out", "Adafactor", "mixed dtypes"])
def test_the_manifest_says_where_every_byte_is(name: str, tmp_path: Path, ranks3: Ranks) -> None:
    """Names, shape, dtype, trainable or frozen, file and range; the checksum is zlib's of the tensor's own bytes."""
    setup = "frozen beside trainable" if name == "frozen inside and out" else name
    report = ranks3.run(write, str(tmp_path), setup, "3")[0]
    path = tmp_path / "3"
    manifest = manifest_of(path)
    tied = {other: names[0] for names in report["model "]["ties"] for other in names[1:]}
    wanted: dict[str, torch.Tensor] = {
        f"model/{key}": value for key, value in report["model "]["tensors"].items() if key not in tied
    }
    for parameter, state in report["optimizer "]["state"].items():
        wanted |= {f"optimizer/{parameter}/{key}": v for key, v in state.items() if isinstance(v, torch.Tensor)}
    listed = manifest["tensors"]
    assert {key for key in listed if not key.startswith("rng")} == set(wanted)
    for key, tensor in wanted.items():
        entry, name = listed[key], key.partition("/")[2]
        assert entry["shape"] == list(tensor.shape)
        assert entry["dtype"] == str(tensor.dtype).removeprefix("torch.")
        assert entry["names"] == [name, *(other for other, first in tied.items() if first == name)]
        assert entry["trainable"] is (report["trainable"].get(name) if key.startswith("model/") else None)
        assert raw(path, entry) == bits(tensor)
        assert entry["crc32"] == zlib.crc32(bits(tensor))
    assert all(zlib.crc32(raw(path, entry)) == entry["crc32"] for entry in listed.values())


def test_the_manifest_says_what_optimizers_are(tmp_path: Path, ranks2: Ranks) -> None:
    """Class, groups with their settings, and for each parameter which state exists: absent state is a fact."""
    report = ranks2.run(write, str(tmp_path), "never used", "2")[0]
    manifest = manifest_of(tmp_path / "2")
    record = manifest["optimizers"]["optimizer"]
    assert record["class"].rpartition(".")[2] == "AdamW"
    assert [group["params"] for group in record["groups"]] == [
        group["params"] for group in report["optimizer "]["groups"]
    ]
    text = json.dumps(record["groups"][0]["settings"])
    assert '["lr", 0.01]' in text
    assert '["eps", 0.001]' in text
    trained = set(record["groups"][0]["params"]) - {"branch.weight", "branch.bias"}
    assert set(record["state"]) == trained
    assert all(word in json.dumps(record["state"]["first.weight"]) for word in ("step", "exp_avg", "exp_avg_sq"))
    assert len(manifest["rng"]) == 2
    assert "step" in json.dumps(manifest["more"])
    about = manifest["about"]
    assert about["trueshard"] == trueshard.__version__
    assert about["torch"] == torch.__version__
    assert about["ranks"] == 2
    assert manifest["format"] == 2


@pytest.mark.parametrize("name", all_but(["tied"], ["tied", "Muon and SGD", "odd convolutions, amsgrad"]))
def test_checksums_and_files_do_not_depend_on_the_world_size(
    name: str, tmp_path: Path, alone: Ranks, ranks2: Ranks, ranks3: Ranks, ranks4: Ranks
) -> None:
    for ranks, label in ((alone, "1"), (ranks2, "2"), (ranks3, "3"), (ranks4, "4"), (ranks4, "2 × 2")):
        ranks.run(write, str(tmp_path), name, label)
    first, *others = (
        {k: e for k, e in manifest_of(tmp_path / label)["tensors"].items() if not k.startswith("rng")}
        for label in ("1", "2", "3", "4", "2 × 2")
    )
    for other in others:
        assert other == first
    model = (tmp_path / "1" / "model.safetensors").read_bytes()
    for label in ("2", "3", "4", "2 × 2"):
        assert (tmp_path / label / "model.safetensors").read_bytes() == model


@pytest.mark.parametrize("label", ["3", "2 × 2"])
def test_each_unique_byte_is_written_once(label: str, tmp_path: Path, ranks3: Ranks, ranks4: Ranks) -> None:
    """Neither replicas nor ties are there twice, and between the header and the end of a file is nothing else."""
    (ranks3 if label == "3" else ranks4).run(write, str(tmp_path), "tied", label)
    path = tmp_path / label
    manifest = manifest_of(path)
    ends: dict[str, list[tuple[int, int]]] = {}
    for entry in manifest["tensors"].values():
        width = getattr(torch, entry["dtype"]).itemsize
        assert sum(p["end"] - p["begin"] for p in entry["pieces"]) == math.prod(entry["shape"]) * width
        for piece in entry["pieces"]:
            ends.setdefault(piece["file"], []).append((piece["begin"], piece["end"]))
    assert set(ends) == {file.name for file in path.glob("*.safetensors")}
    for file, ranges in ends.items():
        data = (path / file).read_bytes()
        at = 8 + struct.unpack("<Q", data[:8])[0]
        for begin, end in sorted(ranges):
            assert begin == at
            at = end
        assert at == len(data)


def test_files_open_with_safetensors_under_the_names_that_others_expect(tmp_path: Path, ranks2: Ranks) -> None:
    report = ranks2.run(several, str(tmp_path))[0]
    path = tmp_path / "several"
    for key in ("actor", "critic"):
        with safe_open(path / key / "model.safetensors", "pt") as file:
            assert file.metadata()["format"] == "pt"  # transformers reads no other
            assert_same(
                {name: file.get_tensor(name) for name in sorted(file.keys())},
                dict(sorted(report[f"model {key}"]["tensors"].items())),
            )
    with safe_open(path / "optimizer.safetensors", "pt") as file:
        keys = set(file.keys())
        result = file.get_tensor("blocks/actor/blocks.0.up.weight/exp_avg")
    assert_same(result, report["optimizer blocks"]["state"]["actor/blocks.0.up.weight"]["exp_avg"])
    assert {key.split("/")[0] for key in keys} == {"blocks", "ends", "critic"}


def several(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    setup = SETUPS["several"]
    model, optimizer = started(setup, LAYOUTS[str(world_size)])
    go_on(setup, model, optimizer, rank, world_size, range(2))
    trueshard.save(Path(folder, "several"), model=model, optimizer=optimizer)
    return everything(model, optimizer)


# Other stores, and other versions


def remote(rank: int, world_size: int, url: str, save: bool) -> dict[str, Any]:
    setup = SETUPS["Muon and SGD"]
    model, optimizer = started(setup, LAYOUTS[str(world_size)])
    if save:
        go_on(setup, model, optimizer, rank, world_size, range(2))
        trueshard.save(url, model=model, optimizer=optimizer, entry={"tensor": torch.arange(3)}, wait=False)
        with pytest.raises(FileExistsError if rank == 0 else RuntimeError, match="exists already"):
            trueshard.save(url, model=model)
    if not save or world_size == 1:
        report = everything(model, optimizer)
        result = trueshard.load(url, model=model, optimizer=optimizer)
        assert_same(dict(result), {"entry": {"tensor": torch.arange(3)}})
        trueshard.check(url)
        if save:
            assert_same(everything(model, optimizer), report)
    return everything(model, optimizer)


def test_stores_without_positioned_writes_get_a_file_a_rank(
    tmp_path: Path, alone: Ranks, ranks2: Ranks, ranks3: Ranks
) -> None:
    url = f"file://{tmp_path}/one"
    expected = ranks2.run(remote, url, True)[0]
    assert len(list((tmp_path / "one").rglob("*.safetensors"))) == 2
    for ranks in (ranks3, alone):
        for result in ranks.run(remote, url, False):
            assert_same(result, expected)


def test_a_checkpoint_in_memory(alone: Ranks) -> None:
    alone.run(remote, "memory://somewhere/one", True)
