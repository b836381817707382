"""``train.verify_every``: one rank computes a microbatch without sharding, and the run does not notice."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from messages import lacking
from parity import DEVICE
from running import CONFIG, end, metrics, project, run, start
from trueshard.errors import UserError
from trueshard.train.parse import load_config
from trueshard.verification.steps import undisturbed

SHORT = (
    CONFIG.replace("steps = 40", "steps = 4")
    .replace("checkpoint_every = 20", "checkpoint_every = 2")
    .replace("batch_size = 8", "batch_size = 12")
)
LayOut = Callable[..., Path]
EVERY = ("--set", "train.verify_every=2")


def weights(folder: Path, step: int = 4) -> dict[str, bytes]:
    files = sorted((folder / "run/checkpoints").glob(f"*{step}/**/*.safetensors"))
    assert files
    return {file.name: file.read_bytes() for file in files}


@pytest.fixture
def lay_out(tmp_path: Path) -> LayOut:
    """(name, configuration, files by their names) → the folder of a run."""

    def folder_of(name: str = "run", text: str = SHORT, **files: str) -> Path:
        folder = project(tmp_path / name)
        for file, content in {"train.toml": text, **{f"{file}.py": content for file, content in files.items()}}.items():
            (folder / file).write_text(content)
        return folder

    return folder_of


def result_of(folder: Path) -> Any:
    """Return all that a run leaves: weights, and losses and norms by step."""
    return weights(folder), [(record["step"], record["loss"], record["grad_norm"]) for record in metrics(folder)]


BF16 = ("--set", "shard.mixed_precision=bf16")
DROPS = SHORT.replace("num_key_value_heads = 2", "num_key_value_heads = 2\nattention_dropout = 0.1")
ADAPTER = SHORT + "[adapter]\nrank = 4\n"
MIXTURE = SHORT.replace('"llama"', '"mixtral"').replace("num_hidden_layers", "num_local_experts = 4\nnum_hidden_layers")
CASES: dict[str, tuple[int, tuple[str, ...], str]] = {
    "one": (1, (), SHORT),
    "two": (2, (), DROPS),
    "three": (3, ("--set", "train.accumulate=2"), DROPS),
    "replicas": (2, ("--set", "shard.replicate=2"), SHORT),
    "adapter": (2, (), ADAPTER),
    "tensor": (2, ("--set", "shard.tensor=2"), SHORT),
    "context": (2, ("--set", "shard.context=2"), SHORT),
    "bf16": (2, BF16, DROPS),
    "offload": (2, (*BF16, "--set", "shard.offload=cpu"), SHORT),
    "recomputed": (2, ("--set", "shard.activation_checkpointing=full"), DROPS),
    "exact": (3, ("--set", "train.exact=true"), DROPS),
    "compiled": (2, ("--set", "shard.compile=true", "--set", 'train.callbacks=["compiling.py:Nothing"]'), SHORT),
    "experts": (2, ("--set", "shard.experts=2"), MIXTURE),
}
COMPILING = """
import functools, torch, trueshard
torch.nn.Module.compile = functools.partialmethod(torch.nn.Module.compile, backend="aot_eager")  # no C++ compiler
class Nothing(trueshard.Callback):
    pass
"""


@pytest.mark.rest
@pytest.mark.parametrize("name", CASES)
def test_a_run_that_is_verified_has_the_bits_that_it_has_without(lay_out: LayOut, name: str) -> None:
    ranks, options, text = CASES[name]
    folders = {every: lay_out(str(len(every)), text, compiling=COMPILING) for every in (EVERY, ())}
    for every, folder in folders.items():
        run(folder, "--nproc", str(ranks), *options, *every)
    assert result_of(folders[EVERY]) == result_of(folders[()])
    records = [record for record in metrics(folders[EVERY]) if "verified" in record or "verify_failed" in record]
    assert [record["step"] for record in records] == [2, 4]
    assert all(record.get("verified") for record in records), records
    bound = 1e-2 if "bf16" in str(options) else 1e-5
    assert all(record["verify_difference"] < 4 * bound for record in records), records


@pytest.mark.rest
def test_a_run_that_was_stopped_goes_on_with_the_same_bits_verified_or_not(lay_out: LayOut) -> None:
    once, twice = lay_out("once", DROPS), lay_out("twice", DROPS)
    run(once, "--nproc", "2")
    run(twice, "--nproc", "2", *EVERY, "--set", "train.steps=2")
    run(twice, "--nproc", "2", *EVERY)
    assert result_of(twice) == result_of(once)
    assert [record["step"] for record in metrics(twice) if record.get("verified")] == [2, 4]


FAULTS = """
import torch, trueshard

class Longer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1.1

class Forward(trueshard.Callback):
    def on_start(self, trainer):
        if trainer.rank == 1:
            down = trainer.model.get_submodule("model.layers.1.mlp.down_proj")
            down.register_forward_hook(lambda module, inputs, output: self.changed(output))
    def changed(self, output):
        return output * 1.01

class Backward(Forward):
    def changed(self, output):
        return Longer.apply(output)

class Hook(trueshard.Callback):
    def on_start(self, trainer):
        weight = trainer.model.get_parameter("model.layers.1.mlp.up_proj.weight")
        weight.register_hook(lambda gradient: gradient * 2)

class Flip(trueshard.Callback):
    def on_step(self, trainer, record):
        if trainer.step == 3 and trainer.rank == 1:
            weight = trainer.model.get_parameter("model.layers.0.self_attn.o_proj.weight")
            weight.to_local().detach().view(torch.int32).view(-1)[0] ^= 1 << 29

class Alone(trueshard.Callback):
    def on_start(self, trainer):
        trainer.model.get_submodule("model.layers.1").register_forward_pre_hook(self.refuse)
    def refuse(self, module, inputs):
        if type(module).__name__ == "LlamaDecoderLayer":
            raise OSError("no room for this")
"""
FOUND: dict[str, tuple[tuple[str, ...], tuple[int, ...], tuple[str, ...]]] = {
    "Forward": (("model.layers.1.mlp.down_proj, forward, step 2, rank 1", "its input agrees"), (2, 4), ()),
    "Backward": (("model.layers.1.mlp.down_proj, backward, step 2, rank 1", "0.1 of the scale"), (2, 4), ()),
    "Hook": (("model.layers.1.mlp.up_proj, gradient, step 2", "2 times what it should be"), (2, 4), ()),
    "Flip": (
        ("model.layers.0.self_attn.o_proj, forward, step 4, rank 1",),
        (4,),
        ("--set", "shard.replicate=2", "--set", "shard.watch=0"),
    ),
}


@pytest.mark.rest
@pytest.mark.parametrize("fault", FOUND)
def test_a_fault_is_said_once_with_its_module_and_the_run_goes_on(lay_out: LayOut, fault: str) -> None:
    folder, (words, steps, options) = lay_out(faults=FAULTS), FOUND[fault]
    given = ("--set", f'train.callbacks=["faults.py:{fault}"]', *options)
    code, out, err = end(start(folder, "--nproc", "2", *given, *EVERY))
    assert code == 0, out + err
    assert lacking(err, "train.verify_every", *words) == [], err
    assert (out + err).count("said once") == 1
    records = {record["step"]: record for record in metrics(folder)}
    assert [step for step in records if records[step].get("verified") is False] == list(steps)
    assert ["verify_first" in records[step] for step in steps] == [True] + [False] * (len(steps) - 1)
    assert lacking(out, f"{2 - len(steps)} of 2 verified steps", *words) == []  # the report at the end
    assert not (folder / "run/verify").exists()


@pytest.mark.rest
def test_what_one_rank_cannot_compute_is_said_once(lay_out: LayOut) -> None:
    folder = lay_out(faults=FAULTS)
    code, out, err = end(start(folder, "--nproc", "2", "--set", 'train.callbacks=["faults.py:Alone"]', *EVERY))
    assert code == 0, out + err
    words = "one rank cannot compute it: no room for this"
    assert (err.count(words), out.count(words)) == (1, 1), out + err
    assert ["verify_failed" in record for record in metrics(folder)] == [False, True] * 2
    assert not any("verified" in record for record in metrics(folder))


@pytest.mark.rest
@pytest.mark.skipif(DEVICE != "cpu", reason="an emulated device's memory is the host's, which the test takes away")
def test_a_model_for_which_rank_0_has_no_memory_is_refused_before_the_first_step(lay_out: LayOut) -> None:
    folder = lay_out(limit=LIMIT)
    code, out, err = end(start(folder, "--nproc", "2", "--set", 'train.callbacks=["limit.py:Limit"]', *EVERY))
    assert (code, metrics(folder)) == (2, []), out + err
    assert lacking(err, "train.verify_every", "rank 0's main memory", "remove it") == [], err


LIMIT = """
import resource, trueshard

class Limit(trueshard.Callback):
    def __init__(self):
        resource.setrlimit(resource.RLIMIT_DATA, (1 << 18, resource.RLIM_INFINITY))
"""


def test_after_a_pass_a_model_is_as_before_it() -> None:
    model = Counting()
    model(torch.ones(3, 4)).sum().backward()
    before = copy.deepcopy(model.state_dict()), [parameter.grad for parameter in model.parameters()]
    with undisturbed(model):
        assert all(parameter.grad is None for parameter in model.parameters())
        model(torch.randn(3, 4)).sum().backward()
        assert not torch.equal(model.norm.running_mean, before[0]["norm.running_mean"])
    assert all(torch.equal(value, before[0][name]) for name, value in model.state_dict().items())
    assert model.calls == {"forward": 1}
    assert all(parameter.grad is grad for parameter, grad in zip(model.parameters(), before[1], strict=True))


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.calls = nn.BatchNorm1d(4), {"forward": 0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls["forward"] += 1
        return self.norm(x).square()


def test_what_one_rank_cannot_verify_is_refused_in_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "train.toml").write_text(SHORT)
    preference = ["train.verify_every=2", 'data.format="preference"']
    with pytest.raises(UserError, match=r"verify_every.*without \[adapter\]"):
        load_config(tmp_path / "train.toml", preference)
    assert load_config(tmp_path / "train.toml", [*preference, "adapter.rank=4"]).train.verify_every == 2
