"""``trueshard plan --for … --out DIR``: files of other tools, each run by its tool, in the memory of the forecast."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from torch import nn
from torch.distributed.fsdp import FSDPModule

from cpu_recorder import CpuRecorder
from messages import lacking
from meter import Measured, gloo_lets_go, meter, peak_and_rest
from parity import Ranks, assert_same
from planning import Setting
from resting import all_but
from test_convert_planning import TINY, put, written
from trueshard.cli import main
from trueshard.convert import fsdp2
from trueshard.convert.converting import drafted
from trueshard.convert.planning import in_their_units
from trueshard.planner import ledger
from trueshard.planner.simulation.simulate import Simulation, Simulator
from trueshard.plans import Forecast

FORECAST: Any = dict.fromkeys((field.name for field in dataclasses.fields(Forecast)), 1) | {"hardware": "cpu"}
Training = tuple[nn.Module, list[Any], Callable[..., Any], Callable[..., Any]]
"""A sharded model, its optimizers, and a tool's own ways to run backward and to clip."""
Optimizers = Callable[[nn.Module], Any]


def by_torch(path: Path, model: nn.Module, optimizers: Optimizers) -> Training:
    """By the module at ``path``."""
    spec = importlib.util.spec_from_file_location("parallelize", path)
    assert spec is not None
    assert spec.loader is not None
    parallelize = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(parallelize)
    mesh = next(line for line in str(parallelize.__doc__).splitlines() if "init_device_mesh" in line).partition("= ")[2]
    model = parallelize.parallelize(model, eval(mesh))  # as it says itself
    return model, list(optimizers(model)), torch.Tensor.backward, nn.utils.clip_grad_norm_


def by_accelerate(path: Path, model: nn.Module, optimizers: Optimizers) -> Training:
    """By Accelerate, which reads the YAML at ``path`` as its launcher does.

    It has FSDP on accelerators alone, so that ranks are told to be some, whose device is the CPU.
    """
    from accelerate import Accelerator
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.state import DistributedType, PartialState
    from accelerate.utils.launch import prepare_multi_gpu_env

    arguments = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    variables = prepare_multi_gpu_env(_validate_launch_command(arguments)[0])
    os.environ |= {**variables, "ACCELERATE_TORCH_DEVICE": "cpu"}
    backend = "gloo", DistributedType.MULTI_GPU
    with mock.patch.object(PartialState, "_prepare_backend", return_value=backend):
        accelerator = Accelerator()
    model, optimizer = accelerator.prepare(model, *optimizers(model))
    return model, [optimizer], accelerator.backward, accelerator.clip_grad_norm_


Way = Callable[[Path, nn.Module, Optimizers], Training]


def as_launched(rank: int, world_size: int) -> None:
    """Set the variables of a launcher; the address is asked for, and not used: the group is there."""
    warnings.simplefilter("ignore")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


# Memory


def steps(setting: Setting, path: Path, way: Way) -> Iterator[Callable[[], None]]:
    """Three steps of a training, each to be called before the next is asked for."""
    torch.manual_seed(0)
    workload = setting.workload()
    model, optimizers, _, clip = way(path, workload.model(), workload.optimizers)

    def step() -> None:
        batches = [workload.batch(setting.microbatch, workload.sequence) for _ in range(setting.accumulation)]
        for number, batch in enumerate(batches, 1):
            model.set_requires_gradient_sync(number == len(batches))
            loss = workload.loss(model, batch)
            (loss / len(batches) if len(batches) > 1 else loss).backward()
            del loss
        clip(model.parameters(), setting.clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    for _ in range(3):
        yield step


def measured(rank: int, world_size: int, setting: Setting, path: Path, way: Way) -> Measured:
    as_launched(rank, world_size)
    setting.workload().model()  # tensors that libraries make when they are imported are nobody's
    with gloo_lets_go(), torch.backends.mkldnn.flags(enabled=False):
        return meter(steps(setting, path, way))


def highest(real: Measured) -> int:
    """The most live bytes of a training."""
    live, peaks = sum(change.bytes for change in real.before), []
    for changes in real.steps:
        peak, rest = peak_and_rest([change.bytes for change in changes])
        peaks.append(live + peak)
        live += rest
    return max(peaks)


def forecast(simulation: Simulation) -> int:
    """``Forecast.peak_live_bytes`` of a simulation."""
    return max(ledger.peak(simulation.first).bytes, ledger.peak(simulation.steady).bytes)


FULL = {"activation_checkpointing": "full"}
ALWAYS, NEVER = {"reshard_after_forward": "always"}, {"reshard_after_forward": "never"}
BF16 = {"mixed_precision": "bf16"}
TORCH = {
    "default, bf16, full": (2, Setting("llama", "adamw foreach", FULL | BF16)),
    "always, selective": (2, Setting("llama", "adamw foreach", ALWAYS | {"activation_checkpointing": "selective"})),
    "never, one block again, tied": (
        2,
        Setting("llama tied", words=NEVER | {"activation_checkpointing": {"*.1": "full"}}),
    ),
    "large head, uneven": (3, Setting("llama uneven", words=ALWAYS, ranks=(3,))),
    "frozen": (2, Setting("frozen", words=ALWAYS)),
    "hybrid, accumulation": (4, Setting("llama", ranks=(2, 2), accumulation=2)),
    "node of 2": (4, Setting("llama", words={"reshard_after_forward": 2}, ranks=(4,))),
    "offload": (2, Setting("llama", words={"offload": "cpu"})),
}


@pytest.mark.parametrize("name", all_but(["default, bf16, full"], TORCH))
def test_torch_alone_takes_the_memory_of_the_forecast(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    count, setting = TORCH[name]
    simulation = setting.simulated()
    path = tmp_path / "parallelize.py"
    path.write_text(fsdp2.module(dataclasses.replace(simulation.plan, forecast=Forecast(**FORECAST))))
    real = request.getfixturevalue(f"ranks{count}").run(measured, setting, path, by_torch)[0]
    assert highest(real) - 4 * count == forecast(simulation)  # without the mesh's own table of ranks


class WithoutStates(CpuRecorder):
    """Accelerate recomputes without the generator's states."""

    def track_storage(self, tensor: Any, what: str, *args: Any) -> Any:
        return None if what == "get_rng_state" else super().track_storage(tensor, what, *args)


ACCELERATE = {
    "always": Setting("llama", "adamw foreach", ALWAYS),
    "never, full": Setting("llama", "adamw foreach", NEVER | FULL),
    "tied, always, full": Setting("llama tied", "adamw foreach", ALWAYS | FULL),
    "gpt2, never": Setting("gpt2", "adamw foreach", NEVER),
}


@pytest.mark.parametrize("name", all_but([], ACCELERATE))
def test_accelerate_takes_the_memory_of_the_forecast(name: str, fresh2: Ranks, tmp_path: Path) -> None:
    setting, tree = ACCELERATE[name], {"distributed_type": "FSDP", "num_processes": 2, "mixed_precision": "no"}
    keys = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    keys |= {"fsdp_reshard_after_forward": "always" in name, "fsdp_activation_checkpointing": "full" in name}
    path = written(tmp_path, "accelerate", {**tree, "fsdp_config": keys})
    draft, kind, _ = drafted(path, "accelerate", None)
    job = dataclasses.replace(setting.job(), recorder=WithoutStates)
    simulator = Simulator(job.workload)
    plan = in_their_units(simulator.resolve(job.choices, job.ranks), simulator.model, kind, draft)
    simulation = simulator.simulate(dataclasses.replace(job, plan=plan), whole=True)
    real = fresh2.run(measured, setting, path, by_accelerate)[0]
    tables = 4 * 2 * sum(unit.parameters > 0 for unit in plan.units)  # a mesh for each unit
    assert highest(real) - tables == forecast(simulation)


# Numbers


def trained(
    rank: int, world_size: int, config: Path, path: Path | None, way: Way = by_torch
) -> dict[str, torch.Tensor]:
    """The losses and parameters of three steps on the same global batches."""
    import transformers

    as_launched(rank, world_size)
    torch.manual_seed(0)
    model: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_pretrained(config)).train()

    def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
        # With torch's 1e-8, rounding of a gradient near zero moves its element by as much as a step does, and a
        # gradient that is wrong by a factor moves none.
        return [torch.optim.AdamW(model.parameters(), eps=1e-3)]

    training = (model, optimizers(model), torch.Tensor.backward, nn.utils.clip_grad_norm_)
    if path is not None:
        training = way(path, model, optimizers)
    model, (optimizer,), backward, clip = training
    for seed in range(3):
        ids = torch.randint(0, 512, (6, 32), generator=torch.Generator().manual_seed(seed))
        ids = ids.chunk(world_size)[rank]
        backward(model(input_ids=ids, labels=ids).loss)
        clip(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {name.replace("_checkpoint_wrapped_module.", ""): p for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run the command and return what it prints."""

    def run(*words: object) -> str:
        assert main(["plan", *map(str, words)]) == 0
        return capsys.readouterr().out

    return run


@pytest.mark.rest
def test_torch_alone_trains_as_one_process(
    plan: Callable[..., str], tiny: Path, tmp_path: Path, alone: Ranks, ranks2: Ranks, ranks3: Ranks
) -> None:
    out = tmp_path / "out"
    fixed = [
        "--hardware",
        "cpu",
        "--sequence",
        32,
        "--reshard-after-forward",
        "always",
        "--activation-checkpointing",
        "full",
    ]
    (expected,) = alone.run(trained, tiny, None)
    for count, ranks in ((2, ranks2), (3, ranks3)):
        text = plan(
            tiny, "--for", "fsdp2", "--ranks", count, "--ranks-per-node", count, *fixed, "--out", out / str(count)
        )
        assert lacking(text, "parallelize.py", "tiny on") == []
        assert {path.name for path in (out / str(count)).iterdir()} == {"parallelize.py", "plan.json"}
        for result in ranks.run(trained, tiny, out / str(count) / "parallelize.py"):
            assert_same(result, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.rest
def test_accelerate_trains_as_one_process(
    plan: Callable[..., str], tiny: Path, tmp_path: Path, alone: Ranks, fresh2: Ranks
) -> None:
    tree = {"distributed_type": "FSDP", "num_processes": 2, "mixed_precision": "no", "fsdp_config": {"fsdp_version": 2}}
    put(tree, "fsdp_config.fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP")
    path, out = written(tmp_path, "accelerate", tree), tmp_path / "out"
    plan("--for", "accelerate", path, tiny, "--sequence", 32, "--out", out)
    assert yaml.safe_load((out / path.name).read_text())["fsdp_config"]["fsdp_reshard_after_forward"] is False
    (expected,) = alone.run(trained, tiny, None)
    for result in fresh2.run(trained, tiny, out / path.name, by_accelerate):
        assert_same(result, expected, rtol=1e-4, atol=1e-5)


def test_what_a_tool_cannot_be_told_is_refused_and_nothing_is_written(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    (tmp_path / "made.py").write_text("from planning import Perceptron\n\ndef factory():\n    return Perceptron()\n")

    def refused(model: object, tool: str, *words: str, out: str = "new") -> str:
        assert main(["plan", str(model), "--for", tool, *words, "--out", str(tmp_path / out)]) == 2
        assert not (tmp_path / "new").exists()
        return capsys.readouterr().err

    assert lacking(refused(tiny, "fsdp2", out="full"), "full", "no empty folder") == []
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine.txt"]
    assert lacking(refused(tiny, "fsdp2", "--tensor", "2"), "--tensor", "fsdp2", "shard()") == []
    assert lacking(refused(tiny, "deepspeed", "--tensor", "2"), "--tensor", "deepspeed") == []
    assert lacking(refused(tiny, "torchtitan"), "tiny", "TorchTitan", "llama-3-8b", "torchtitan.toml") == []
    assert lacking(refused(tiny, "megatron"), "megatron", "fsdp2", "accelerate") == []
    fixed = ("--reshard-after-forward", "always", "--activation-checkpointing", "none", "--ranks", "2")
    assert lacking(refused(f"{tmp_path / 'made.py'}:factory", "fsdp2", *fixed), "temperature", "0-dim", "shard()") == []


# TorchTitan and DeepSpeed, where somebody has installed them: they are not in the tests' environment


def by_torchtitan(rank: int, world_size: int, path: Path) -> list[str]:
    """Train three steps of TorchTitan's own model; return the names of its units' modules."""
    as_launched(rank, world_size)
    import torchtitan.distributed.parallel_dims as dims
    from torchtitan.config import ConfigManager
    from torchtitan.protocols.train_spec import get_train_spec

    config = ConfigManager().parse_args(["--job.config_file", str(path)])
    degrees = {"dp_shard": config.parallelism.data_parallel_shard_degree, "dp_replicate": 1, "world_size": world_size}
    spec = get_train_spec(config.model.name)
    arguments = spec.model_args[config.model.flavor]
    arguments.update_from_config(config)
    with mock.patch.object(dims, "device_type", "cpu"):
        model = spec.model_cls(arguments)
        model = spec.parallelize_fn(model, dims.ParallelDims(**degrees, cp=1, tp=1, pp=1, ep=1, etp=1), config)
        with torch.no_grad():
            model.init_weights()
    units = {name: unit for name, unit in model.named_modules() if isinstance(unit, FSDPModule)}
    for unit in units.values():
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    ids = torch.randint(0, arguments.vocab_size, (config.training.local_batch_size, config.training.seq_len + 1))
    for _ in range(3):
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())
        losses.append(loss.item())
        (loss / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[2] < losses[0]
    return list(units)


def test_torchtitan_trains_by_its_file(plan: Callable[..., str], tiny: Path, fresh2: Ranks, tmp_path: Path) -> None:
    pytest.importorskip(
        "torchtitan.protocols.train_spec", reason="TorchTitan 0.2.2 is not installed; run by hand, see the page"
    )
    tree = {"model": {"name": "llama3", "flavor": "debugmodel"}, "training": {"seq_len": 64, "local_batch_size": 2}}
    path = written(tmp_path, "torchtitan", {**tree, "parallelism": {"fsdp_reshard_after_forward": "always"}})
    plan("--for", "torchtitan", path, tiny, "--ranks", 2, "--out", tmp_path / "out")
    units = fresh2.run(by_torchtitan, tmp_path / "out" / path.name)[0]
    assert units == ["", "tok_embeddings", *(f"layers.{number}" for number in range(6)), "norm", "output"]


def by_deepspeed(rank: int, world_size: int, config: Path, path: Path) -> tuple[Any, ...]:
    """Train three steps by DeepSpeed; return what it has read."""
    as_launched(rank, world_size)
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    import transformers

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_pretrained(config)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which is compiled for minutes
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=str(path))
    micro, losses = engine.train_micro_batch_size_per_gpu(), []
    ids = torch.randint(0, 512, (micro, 64))
    for _ in range(3 * engine.gradient_accumulation_steps()):
        loss = engine(input_ids=ids, labels=ids).loss
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    assert losses[-1] < losses[0]
    return engine.zero_optimization_stage(), micro, engine.gradient_accumulation_steps(), engine.bfloat16_enabled()


def test_deepspeed_trains_by_its_file(plan: Callable[..., str], tiny: Path, fresh2: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed; run by hand, see the page")
    plan(tiny, "--for", "deepspeed", "--ranks", 2, "--sequence", 64, "--microbatch", 2, "--out", tmp_path / "out")
    assert fresh2.run(by_deepspeed, tiny, tmp_path / "out" / "ds_config.json", timeout=300.0) == [(2, 2, 1, True)] * 2
