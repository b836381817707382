"""``export`` and ``inspect``: what others read of it, with their own code, is what the model and its optimizer were."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

import trueshard
from checkpointing import hub_model, tokenizer
from messages import naming
from models import CASES
from parity import Ranks, assert_same
from tower import Tower, built, held, trained
from trueshard.cli import main

IDS = torch.arange(1, 13).view(2, 6)
OF_MODEL = {"config.json", "generation_config.json", "model.safetensors"}
PEFT_CASES = ("lora", "lora_all_linear", "dora", "modules_to_save", "prompt_tuning", "lora_plain_module")


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def save_llama(rank: int, world_size: int, path: str) -> dict[str, torch.Tensor]:
    model = hub_model("tied_llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trueshard.shard(model, optimizer)
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    trueshard.save(path, model=model, optimizer=optimizer, tokenizer=tokenizer(), progress={"step": 7})
    return dict(model.state_dict())


@pytest.fixture(scope="module")
def checkpoint(ranks2: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """Of a tied Llama with its tokenizer and optimizer, by two ranks; and its state dict."""
    path = tmp_path_factory.mktemp("llama") / "step-7"
    return path, ranks2.run(save_llama, str(path))[0]


@pytest.fixture(scope="module")
def towers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a model of our own, with its optimizer, at step 2."""
    model, optimizer = built()
    trained(model, optimizer)
    path = tmp_path_factory.mktemp("towers") / "step-2"
    trueshard.save(path, model=model, optimizer=optimizer, progress={"step": 2, "rate": 0.5}, scale=torch.ones(3))
    return path


# A Hugging Face directory, and one file


def test_hf_is_read_by_transformers(checkpoint: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    import transformers

    path, expected = checkpoint
    assert trueshard.export(path, tmp_path / "out") == tmp_path / "out"
    written = {file.name for file in (tmp_path / "out").iterdir()}
    assert written == OF_MODEL | {"tokenizer.json", "tokenizer_config.json"}
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_same(dict(model.state_dict()), expected)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    read = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert read("to shard")["input_ids"] == [3, 4]


def test_dtype_is_kept_unless_asked_for(checkpoint: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    import transformers

    path, expected = checkpoint
    trueshard.export(path, tmp_path / "half", dtype="bfloat16")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
    assert_same(dict(model.state_dict()), {name: value.bfloat16() for name, value in expected.items()})
    trueshard.export(tmp_path / "half", tmp_path / "again", to="safetensors")
    assert {value.dtype for value in load_file(tmp_path / "again").values()} == {torch.bfloat16}
    with pytest.raises(ValueError, match=naming("dtype='int8'", "bfloat16")):
        trueshard.export(path, tmp_path / "none", dtype="int8")


def test_large_models_are_divided(
    checkpoint: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    from trueshard.checkpoint import layout

    path, expected = checkpoint
    monkeypatch.setattr(layout, "LARGEST", 4000)
    trueshard.export(path, tmp_path / "out")
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    assert_same(dict(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()), expected)
    trueshard.export(tmp_path / "out", tmp_path / "one", to="safetensors")  # of a Hugging Face directory
    assert sorted(load_file(tmp_path / "one")) == sorted(set(expected) - {"lm_head.weight"})


def test_one_file_holds_the_model_and_loads_again(towers: Path, tmp_path: Path) -> None:
    file = trueshard.export(towers, tmp_path / "model.safetensors", to="safetensors")
    model, _ = built(seed=1)
    expected, optimizer = built()
    trained(expected, optimizer)
    trueshard.load(file, model=model)
    assert_same(held(model), held(expected))
    assert "head.weight" not in load_file(file)  # the tie is there once


@pytest.mark.parametrize("place", ["memory://{}/a", "file://{}/b"])
def test_stores_without_positioned_writes_are_exported_too(tmp_path: Path, place: str) -> None:
    model, optimizer = built()
    url = place.format(tmp_path)
    trueshard.save(url, model=model, optimizer=optimizer)
    file = trueshard.export(url, tmp_path / "model.safetensors", to="safetensors")
    assert_same(load_file(file)["norm.weight"], model.norm.weight)


# PEFT


@pytest.fixture(scope="module", params=PEFT_CASES)
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A PEFT model of random adapters, and its checkpoint."""
    return _adapted(CASES[request.param].build(0), tmp_path_factory.mktemp(request.param))


def _adapted(model: Any, folder: Path) -> tuple[Any, Path]:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
    trueshard.save(folder / "saved", model=model)
    return model, folder / "saved"


def same_adapter(result: Path, expected: Path, saved: Path) -> None:
    """The files of an adapter, as PEFT wrote them; a base that is nowhere else is in the checkpoint."""
    files = sorted(path.relative_to(expected) for path in expected.rglob("adapter_*"))
    assert sorted(path.relative_to(result) for path in result.rglob("adapter_*")) == files
    for file in files:
        if file.suffix == ".json":
            config = _configuration(expected / file)
            config["base_model_name_or_path"] = config["base_model_name_or_path"] or str(saved / "base")
            assert _configuration(result / file) == config
        else:
            assert_same(
                dict(sorted(load_file(result / file).items())), dict(sorted(load_file(expected / file).items()))
            )


def _configuration(file: Path) -> dict[str, Any]:
    """An adapter's configuration; of what is a set to PEFT, the order says nothing."""
    read = json.loads(file.read_text())
    return {key: sorted(value) if isinstance(value, list) else value for key, value in read.items()}


def test_adapter_is_what_peft_itself_saves(adapted: tuple[Any, Path], tmp_path: Path) -> None:
    model, path = adapted
    model.save_pretrained(tmp_path / "peft")
    trueshard.export(path, tmp_path / "out", to="adapter")
    same_adapter(tmp_path / "out", tmp_path / "peft", path)


def test_merged_is_what_peft_itself_merges(adapted: tuple[Any, Path], tmp_path: Path) -> None:
    import transformers

    model, path = adapted
    if "prompt" in str(path) or "plain" in str(path):
        reason = "cannot merge" if "prompt" in str(path) else "config.json"
        with pytest.raises(ValueError, match=reason):
            trueshard.export(path, tmp_path / "out", to="merged")
        assert list(tmp_path.iterdir()) == []
        return
    import copy

    merged = copy.deepcopy(model).merge_and_unload()
    trueshard.export(path, tmp_path / "out", to="merged")
    result = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert_same(dict(result.state_dict()), dict(merged.state_dict()))
    plain = tmp_path / "plain"
    plain.touch()
    assert {file.stat().st_mode for file in (tmp_path / "out").iterdir()} == {plain.stat().st_mode}
    torch.testing.assert_close(logits(result), logits(model), rtol=1e-4, atol=1e-5)


def test_several_adapters(tmp_path: Path) -> None:
    import peft

    model = peft.get_peft_model(
        hub_model("tied_llama"), peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    )
    model.add_adapter("other", peft.LoraConfig(r=3, target_modules=["v_proj"], task_type="CAUSAL_LM"))
    for parameter in (p for name, p in model.named_parameters() if "lora" in name):
        nn.init.normal_(parameter)
    trueshard.save(tmp_path / "saved", model=model)
    model.save_pretrained(tmp_path / "peft")
    trueshard.export(tmp_path / "saved", tmp_path / "all", to="adapter")
    same_adapter(tmp_path / "all", tmp_path / "peft", tmp_path / "saved")
    trueshard.export(tmp_path / "saved", tmp_path / "one", to="adapter", adapter="other")
    same_adapter(tmp_path / "one" / "other", tmp_path / "peft" / "other", tmp_path / "saved")
    with pytest.raises(ValueError, match=naming("default, other", "adapter=")):
        trueshard.export(tmp_path / "saved", tmp_path / "out", to="merged")
    trueshard.export(tmp_path / "saved", tmp_path / "merged", to="merged", adapter="other")
    model.set_adapter("other")
    import transformers

    result = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(result), logits(model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tie", [False, True])
def test_adapters_of_embeddings(tmp_path: Path, tie: bool) -> None:
    import peft

    options = {"r": 2, "target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": tie}
    model = peft.get_peft_model(
        hub_model("tied_llama" if tie else "llama"), peft.LoraConfig(task_type="CAUSAL_LM", **options)
    )
    model, path = _adapted(model, tmp_path)
    model.save_pretrained(tmp_path / "peft")
    trueshard.export(path, tmp_path / "out", to="adapter")
    same_adapter(tmp_path / "out", tmp_path / "peft", path)


def test_what_a_form_cannot_have_is_refused(adapted: tuple[Any, Path], towers: Path, tmp_path: Path) -> None:
    for to in ("adapter", "merged"):
        with pytest.raises(ValueError, match="no adapter"):
            trueshard.export(towers, tmp_path / "out", to=to)
    with pytest.raises(ValueError, match=naming("base alone", 'to="merged"')):
        trueshard.export(adapted[1], tmp_path / "out", to="hf")
    with pytest.raises(ValueError, match=naming("to='gguf'", "hf, safetensors, adapter, merged, dcp")):
        trueshard.export(towers, tmp_path / "out", to="gguf")
    with pytest.raises(FileExistsError, match="exists already"):
        trueshard.export(towers, tmp_path)
    assert list(tmp_path.iterdir()) == []


# torch.distributed.checkpoint


def read_dcp(rank: int, world_size: int, path: str) -> dict[str, Any]:
    """By torch's own code, into its own FSDP2."""
    model, _ = built(seed=1)
    fully_shard(model)
    groups = [{"params": [model.norm.weight, model.norm.bias, model.unused]}, {"params": [model.embed.weight]}]
    optimizer = torch.optim.AdamW(groups, lr=1.0)
    trained(model, optimizer)
    both = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    both["optimizer"]["state"].pop("unused", None)  # which never had a gradient, and so has no state
    dcp.load(both, checkpoint_id=path)
    options = StateDictOptions(strict=False)
    set_state_dict(
        model, optimizer, model_state_dict=both["model"], optim_state_dict=both["optimizer"], options=options
    )
    return held(model, optimizer)


def test_dcp_is_read_by_torch_and_by_ourselves(ranks2: Ranks, towers: Path, tmp_path: Path) -> None:
    expected, optimizer = built()
    trained(expected, optimizer)
    trueshard.export(towers, tmp_path / "out", to="dcp")
    for result in ranks2.run(read_dcp, str(tmp_path / "out")):
        assert_same(result["model"], held(expected)["model"])
        whole = held(expected, optimizer)
        assert_same({name: result["state"][name] for name in whole["state"]}, whole["state"])
        assert_same(result["groups"], whole["groups"])
    model, own = built(seed=1)
    trueshard.load(tmp_path / "out", model=model, optimizer=own, allow_pickle=True)
    assert_same(held(model, own), held(expected, optimizer))


# Several models, damage, and what is left behind


def test_one_of_several_models(tmp_path: Path) -> None:
    actor, critic = hub_model("tied_llama"), Tower()
    trueshard.save(tmp_path / "saved", model={"actor": actor, "critic": critic})
    with pytest.raises(ValueError, match=naming("actor, critic", "model=")):
        trueshard.export(tmp_path / "saved", tmp_path / "out")
    trueshard.export(tmp_path / "saved", tmp_path / "actor", model="actor")
    import transformers

    result = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "actor")
    assert_same(dict(result.state_dict()), dict(actor.state_dict()))
    trueshard.export(tmp_path / "saved", tmp_path / "critic", model="critic")
    assert {file.name for file in (tmp_path / "critic").iterdir()} == {"model.safetensors"}
    trueshard.export(tmp_path / "saved", tmp_path / "dcp", to="dcp", model="critic")
    other = Tower()
    trueshard.load(tmp_path / "dcp", model=other, allow_pickle=True)
    assert_same(held(other), held(critic))


@pytest.mark.parametrize("to", ["hf", "safetensors", "dcp"])
def test_a_damaged_tensor_is_not_exported_and_nothing_is_left(towers: Path, tmp_path: Path, to: str) -> None:
    shutil.copytree(towers, tmp_path / "bad")
    data = bytearray((tmp_path / "bad" / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "bad" / "model.safetensors").write_bytes(data)
    with pytest.raises((ValueError, RuntimeError), match=naming("model.safetensors", "damaged", "'model/")):
        trueshard.export(tmp_path / "bad", tmp_path / "out", to=to)
    assert [file.name for file in tmp_path.iterdir()] == ["bad"]


# What is in it


def test_inspect_says_what_was_saved(towers: Path) -> None:
    result = trueshard.inspect(towers)
    model, optimizer = built()
    assert result.step == 2
    assert (result.about["ranks"], result.about["torch"]) == (1, torch.__version__)
    tensors = {tensor.key: tensor for tensor in result.tensors}
    tied = tensors["model/embed.weight"]
    assert (tied.names, tied.shape, tied.dtype, tied.bytes) == (
        ["embed.weight", "head.weight"],
        [13, 6],
        "float32",
        312,
    )
    kinds = {name: tensors[f"model/{name}"].trainable for name in ("unused", "frozen.bias", "seen")}
    assert kinds == {"unused": True, "frozen.bias": False, "seen": None}
    (one,) = result.optimizers
    assert one.kind == "torch.optim.adamw.AdamW"
    assert [(len(group.parameters), group.elements) for group in one.groups] == [(3, 15), (1, 78)]
    assert one.groups[0].settings == {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    assert (one.with_state, one.without_state) == (["norm.weight", "norm.bias", "embed.weight"], ["unused"])
    assert result.more == {"progress": {"step": 2, "rate": 0.5}, "scale": "float32[3]"}
    assert result.totals()["model"] == {"float32": sum(4 * p.numel() for p in model.parameters()) + 16}
    assert json.loads(result.to_json())["optimizers"][0]["groups"][1]["parameters"] == ["embed.weight"]
    lines = str(result).splitlines()
    assert lines[0] == str(towers)
    assert any(line.split()[:4] == ["embed.weight", "=", "head.weight", "13×6"] for line in lines)


def test_inspect_of_others_files(checkpoint: tuple[Path, Any], tmp_path: Path) -> None:
    import transformers

    transformers.AutoModelForCausalLM.from_pretrained(checkpoint[0]).save_pretrained(tmp_path / "hf")
    for path in (tmp_path / "hf", tmp_path / "hf" / "model.safetensors"):
        result = trueshard.inspect(path)
        assert {tensor.key for tensor in result.tensors} == set(load_file(tmp_path / "hf" / "model.safetensors"))
    same = trueshard.inspect(checkpoint[0], tmp_path / "hf")  # by bytes, for want of checksums
    assert (same.equal, same.added, same.changed_bytes) == (20, [], [])
    assert all(not key.startswith("model/") for key in same.removed)


def test_inspect_of_two_says_what_differs(towers: Path, tmp_path: Path) -> None:
    model, optimizer = built()
    trained(model, optimizer)
    trueshard.save(tmp_path / "same", model=model, optimizer=optimizer, progress={"step": 2, "rate": 0.5})
    same = trueshard.inspect(towers, tmp_path / "same")
    assert (same.removed, same.added, same.changed_bytes) == (["more/scale"], [], ["rng"] if same.changed_bytes else [])
    model.norm.bias.data += 1
    model.norm.weight = nn.Parameter(torch.ones(2, 3))
    model.register_buffer("more", torch.ones(2))
    model.frozen.bias.requires_grad_(True)
    other = torch.optim.SGD([model.norm.bias, model.embed.weight], lr=0.3)
    trueshard.save(tmp_path / "other", model=model, optimizer=other, progress={"step": 5, "rate": 0.5})
    result = trueshard.inspect(tmp_path / "same", tmp_path / "other")
    assert result
    assert result.added == ["model/more"]
    assert "optimizer/norm.bias/exp_avg" in result.removed
    assert result.changed_kind == {"model/norm.weight": ("float32[6]", "float32[2, 3]")}
    assert [key for key in result.changed_bytes if key != "rng"] == ["model/norm.bias"]
    assert result.settings["progress.step"] == (2, 5)
    assert result.settings["optimizer: class"] == ("torch.optim.adamw.AdamW", "torch.optim.sgd.SGD")
    assert result.settings["optimizer: group 0: lr"] == (0.02, 0.3)
    assert result.settings["model/frozen.bias: trainable"] == (False, True)
    assert "~ progress.step: 2 → 5" in str(result).splitlines()
    assert not trueshard.inspect(towers, towers)
    assert str(trueshard.inspect(towers, towers)).endswith("nothing differs")


# The command line


def test_commands(towers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(towers)]) == 0
    assert capsys.readouterr().out.endswith("all well\n")
    assert main(["inspect", str(towers)]) == 0
    assert capsys.readouterr().out.splitlines() == str(trueshard.inspect(towers)).splitlines()
    assert main(["inspect", str(towers), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 2
    assert main(["export", str(towers), str(tmp_path / "out"), "--to", "safetensors", "--dtype", "bfloat16"]) == 0
    assert load_file(tmp_path / "out")["norm.weight"].dtype == torch.bfloat16
    assert main(["inspect", str(towers), str(tmp_path / "out")]) == 0
    assert "~ model/norm.weight: float32[6] → bfloat16[6]" in capsys.readouterr().out


def test_wrong_input_is_one_line(towers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nowhere, out = str(tmp_path / "nowhere"), str(tmp_path / "out")
    for arguments in (
        ["check", nowhere],
        ["inspect", nowhere],
        ["inspect", str(towers), nowhere],
        ["export", nowhere, out],
        ["export", str(towers), out, "--to", "gguf"],
        ["export", str(towers), out, "--to", "adapter"],
        ["export", str(towers), out, "--dtype", "int7"],
        ["export", str(towers), str(towers)],
        ["export", str(towers), out, "--model", "other"],
        ["export", str(towers)],
    ):
        assert main(arguments) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1, lines
        assert lines[0].startswith("trueshard: ")
    assert list(tmp_path.iterdir()) == []


def test_check_lists_what_is_damaged(towers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(towers, tmp_path / "bad")
    for name in ("model.safetensors", "optimizer.safetensors"):
        data = bytearray((tmp_path / "bad" / name).read_bytes())
        data[-1] ^= 1
        (tmp_path / "bad" / name).write_bytes(data)
    assert main(["check", str(tmp_path / "bad")]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    lines = output.err.splitlines()
    assert [any(name in line for line in lines) for name in ("model.safetensors", "optimizer.safetensors")] == [
        True
    ] * 2
    assert len(lines) == 2


@pytest.mark.parametrize("to", ["hf", "safetensors"])
def test_an_export_is_whole_without_a_manifest(to: str, tmp_path: Path) -> None:
    """Only a checkpoint's own files say that a manifest belongs to them."""
    trueshard.save(tmp_path / "saved", model=torch.nn.Linear(3, 2))
    out = trueshard.export(tmp_path / "saved", tmp_path / "out", to=to)
    assert trueshard.check(out).tensors == 2
    (tmp_path / "saved" / "manifest.json").unlink()
    with pytest.raises(trueshard.DamagedCheckpoint, match=naming("manifest.json", "missing")):
        trueshard.check(tmp_path / "saved")
