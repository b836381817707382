"""Two runs of any program are compared, and the first place at which they part is named."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typing_extensions

import forks
import trueshard
from messages import lacking
from optimizer_catalogue import APART
from trueshard.verification import verify_runs
from trueshard.verification.programs import SEEDS, verified

SCRIPT = """
import argparse, os
import torch, torch.distributed as dist
from torch import nn


parser = argparse.ArgumentParser()
for name, default in (("--batch", 2), ("--stack", "ddp"), ("--fault", ""), ("--steps", 4)):
    parser.add_argument(name, type=type(default), default=default)
options = parser.parse_args()
world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
fault = options.fault if world > 1 else ""

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
    def forward(self, x):
        y = self.down(torch.relu(self.up(x)))
        return x + (y * 1.01 if fault == "module" and rank == 1 else y)

torch.manual_seed(rank if fault == "seed" else 0)
model = nn.Sequential(nn.Embedding(50, 16), Block(), Block(), nn.Linear(16, 50))
torch.manual_seed(0)
data = torch.randint(0, 50, (64, 6))
rows = [torch.arange(step * options.batch * world, (step + 1) * options.batch * world) for step in range(options.steps)]
rows = [data[step[rank::world]] for step in rows]  # as a DistributedSampler deals them out
frozen = fault == "frozen"
if frozen:
    model[1].up.weight.requires_grad_(False)
loss_of = lambda model, batch: nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())
limit = 0.1 if fault == "clip" else 1.0
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
"""
LOOP = """
def train(model, optimizer, backward=lambda loss: loss.backward(), clip=torch.nn.utils.clip_grad_norm_):
    for batch in rows:
        loss = loss_of(model, batch) * (1 / world if fault == "mean" else 1)
        backward(loss)
        clip(model.parameters(), limit)
        optimizer.step()
        optimizer.zero_grad()
"""
LIGHTNING = """
import pytorch_lightning as lightning
from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = model
    def configure_model(self):
        for block in (self.model[1], self.model[2], self.model) if self.device_mesh is not None else ():
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
    def training_step(self, batch, index):
        return loss_of(self.model, batch[0])
    def configure_optimizers(self):
        return torch.optim.AdamW(self.model.parameters(), lr=1e-2)
dataset = torch.utils.data.TensorDataset(data)
sampler = torch.utils.data.DistributedSampler(dataset, world, rank, shuffle=False)
loader = torch.utils.data.DataLoader(dataset, options.batch, sampler=sampler)
lightning.Trainer(accelerator="cpu", devices=world, strategy=STRATEGY if world > 1 else "auto", max_steps=options.steps,
    gradient_clip_val=LIMIT, use_distributed_sampler=False,
    logger=False, enable_checkpointing=False, enable_progress_bar=False).fit(Module(), loader)
"""
PIPELINE = """
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from trueshard.verification import record
class Stage(nn.Module):  # has some of the parts
    def __init__(self, parts):
        super().__init__()
        self.parts = nn.ModuleDict({str(i): part for i, part in enumerate(parts)})
    def forward(self, x):
        for part in self.parts.values():
            x = part(x)
        return x
model = Stage(model)
if world > 1:
    dist.init_process_group("gloo")
    for name in set(model.parts) - MINE:
        del model.parts[name]
rows = [data[step * 4 : step * 4 + 4] for step in range(options.steps)]
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loss = lambda output, batch: nn.functional.cross_entropy(output.flatten(0, 1), batch.flatten())
stage = lambda number, part: PipelineStage(part, number, 4, torch.device("cpu"))
if world > 1:
    schedule = SCHEDULE
for batch in rows:
    if world == 1:
        loss(model(batch), batch).backward()
    else:
        schedule.step(batch) if rank == 0 else schedule.step(target=batch)
    optimizer.step()
    optimizer.zero_grad()
"""
STACKS = {
    "ddp": """
if world > 1:
    dist.init_process_group("gloo")
    if fault not in ("sync", "seed"):
        model = nn.parallel.DistributedDataParallel(model)
train(model, optimizer)
""",
    "fsdp": """
from torch.distributed.fsdp import fully_shard
if world > 1:
    dist.init_process_group("gloo")
    for block in (model[1], model[2], model):
        fully_shard(block)
train(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
""",
    "trueshard": """
import trueshard
if world > 1:
    trueshard.shard(model, optimizer, units="Block")
train(model, optimizer)
""",
    "tensor": """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
rows = [data[step * 4 : step * 4 + 4] for step in range(options.steps)]  # the same on ranks that share matrices
if world > 1:
    for block in (model[1], model[2]):
        styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, init_device_mesh("cpu", (world,)), styles)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)  # tensors and DTensors
train(model, optimizer, clip=lambda *_: None)
""",
    "accelerate": """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model, optimizer = accelerator.prepare(model, optimizer)
train(model, optimizer, accelerator.backward, accelerator.clip_grad_norm_)
""",
    "lightning": LIGHTNING.replace("STRATEGY", "DDPStrategy()").replace("LIMIT", "limit"),
    "accelerate_fsdp": """
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType
accelerator = Accelerator(cpu=True)
if world > 1:  # on CPUs it takes DDP, unless its state says otherwise
    wrapped = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(2, cpu_ram_efficient_loading=False, **wrapped)
    PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
model, optimizer = accelerator.prepare(model, optimizer)
assert world == 1 or isinstance(next(model.parameters()), torch.distributed.tensor.DTensor)
train(model, optimizer, accelerator.backward, accelerator.clip_grad_norm_)
""",
    "lightning_fsdp": LIGHTNING.replace("STRATEGY", "ModelParallelStrategy(world, 1)").replace("LIMIT", "None"),
    "fsdp1": """
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
clip = torch.nn.utils.clip_grad_norm_
if world > 1:
    dist.init_process_group("gloo")
    policy = ModuleWrapPolicy({Block})
    how = {"use_orig_params": fault != "flat", "device_id": torch.device("cpu")}
    model = FullyShardedDataParallel(model, auto_wrap_policy=policy, **how)
    clip = lambda _, norm: model.clip_grad_norm_(norm)
train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), clip=clip)
""",
    "pipeline": PIPELINE.replace("MINE", '({"0", "1"} if rank == 0 else {"2", "3"})').replace(
        "SCHEDULE", 'Schedule1F1B(PipelineStage(model, rank, world, torch.device("cpu")), 2, loss)'
    ),
    "interleaved": PIPELINE.replace("MINE", '({"0", "2"} if rank == 0 else {"1", "3"})')
    .replace("loss = ", "record(model)  # it is not called as a whole\nloss = ", 1)
    .replace(
        "SCHEDULE", "ScheduleInterleaved1F1B([stage(int(name), part) for name, part in model.parts.items()], 2, loss)"
    ),
}


def run(folder: Path, stack: str, ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    file = folder / "script.py"
    file.write_text(SCRIPT + LOOP + STACKS[stack])
    command = [sys.executable, "-m", "trueshard", "verify", str(file), "--steps=2", "--nproc", str(ranks), "--json"]
    batch = ("--alone", f"--batch {2 * ranks}", "--", *arguments)
    return forks.run([*command, *batch], capture_output=True, text=True, timeout=280)


def verify(folder: Path, stack: str, *arguments: str, ranks: int = 2) -> dict:
    result = run(folder, stack, ranks, *arguments)
    assert result.returncode in (0, 1), result.stdout + result.stderr
    report = json.loads(result.stdout)
    assert report["held"] == (result.returncode == 0)
    return report


@pytest.mark.rest
@pytest.mark.parametrize(("stack", "ranks"), [*((stack, 2) for stack in STACKS), ("fsdp", 3)])
def test_a_script_on_several_processes_agrees_with_itself_on_one(tmp_path: Path, stack: str, ranks: int) -> None:
    report = verify(tmp_path, stack, ranks=ranks)
    assert report["held"], report
    details = {point["name"]: point["detail"] for point in report["points"]}
    # What a rank has of the output of `up` in both blocks; the model's own borders, of which a stage has a part
    parts = {"tensor": 2, "pipeline": 2, "interleaved": 2}.get(stack, 0)
    assert lacking(details["forward"], 18 - parts) == []
    assert lacking(details["parameters"], 11) == []
    assert lacking(details["state"], 33) == []


FAULTS = {
    "module": ("1", "forward", 1, ("its input agrees",)),
    "sync": ("", "gradient", None, ("not the same on all ranks",)),
    "seed": ("", "start", None, ("not the same on all ranks",)),
    "mean": ("", "gradient", None, ("0.5 times what it should be",)),
    "clip": ("", "clipped gradients", None, ("times what it should be", "all before it agrees")),
    "frozen": ("1.up", "start", None, ("1.up.weight", "is trained", "first")),
}


@pytest.mark.rest
@pytest.mark.parametrize("fault", FAULTS)
def test_the_first_difference_of_a_script_is_named(tmp_path: Path, fault: str) -> None:
    first = verify(tmp_path, "ddp", "--fault", fault)["first"]
    module, where, rank, words = FAULTS[fault]
    assert (first["where"], first["rank"]) == (where, rank)
    assert lacking(first["words"], *words) == []
    assert not module or first["module"] == module


@pytest.mark.rest
def test_flat_parameters_are_refused_by_name(tmp_path: Path) -> None:
    result = run(tmp_path, "fsdp1", 2, "--fault", "flat")
    assert result.returncode == 2
    assert lacking(result.stderr, "flat (FSDP 1)", "use_orig_params=True") == []


TITAN = Path(__file__).with_name("torchtitan_training.py")


@pytest.mark.rest
@pytest.mark.timeout(600)  # its imports take long
def test_torchtitan_agrees_with_itself_on_one_process(tmp_path: Path) -> None:
    paths = os.pathsep.join([str(APART), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [
        sys.executable,
        "-m",
        "trueshard",
        "verify",
        str(TITAN),
        "--steps",
        "2",
        "--json",
        "--",
        '{"ours": false}',
    ]
    result = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=590
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert json.loads(result.stdout)["held"]


SMALL = """
import sys, torch
from trueshard.verification import record

class Stepper:  # no torch.optim.Optimizer, and its parameters are copies
    def __init__(self, parameters, lr):
        self.parameters, self.lr = list(parameters), lr
        self.copies = [parameter.detach().double() for parameter in self.parameters]
    def step(self):
        for parameter, copy in zip(self.parameters, self.copies):
            parameter.data.copy_(copy.sub_(parameter.grad, alpha=self.lr))

lr, width, kind = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.manual_seed(0)
model = torch.nn.ModuleDict({"down" if width == 4 else "up": torch.nn.Linear(4, width)})
optimizer = Stepper(model.parameters(), lr) if kind == "own" else torch.optim.SGD(model.parameters(), lr=lr)
record(model, optimizer)
for step in range(4 if kind != "never" else 0):
    next(iter(model.values()))(torch.arange(8.0).view(2, 4) + step).square().mean().backward()
    optimizer.step()
    model.zero_grad()
"""


def recorded(folder: Path, *arguments: object, seed: str = "") -> int:
    """Run ``SMALL``, recording in ``folder``, with roundings of a seed or none; return its exit code."""
    file = folder.with_name("small.py")
    file.write_text(SMALL)
    command = [sys.executable, str(file), *map(str, arguments)]
    environment = {**os.environ, "TRUESHARD_RECORD": str(folder), "TRUESHARD_RECORD_SHAKEN": seed}
    return forks.run(command, env=environment, capture_output=True).returncode


def test_two_recordings_agree_or_the_optimizer_is_named(tmp_path: Path) -> None:
    for name, arguments in {"a": (0.1, 4, "torch"), "b": (0.1, 4, "torch"), "c": (0.2, 4, "torch")}.items():
        assert recorded(tmp_path / name, *arguments) == 0
    assert recorded(tmp_path / "a", 0.1, 4, "torch") == 1  # it is there
    report = verify_runs(tmp_path / "a", tmp_path / "b", exact=True)
    assert (report.held, report.first, report.setting["steps"]) == (True, None, 3)
    first = verify_runs(tmp_path / "a", tmp_path / "c").first
    assert first is not None
    assert (first.where, first.step, first.module) == ("optimizer", 1, "down")
    assert recorded(tmp_path / "own", 0.1, 4, "own") == 0
    assert verify_runs(tmp_path / "a", tmp_path / "own").held


def test_roundings_are_drawn_again_where_runs_differ(tmp_path: Path) -> None:
    one, again, other = tmp_path / "one", tmp_path / "again", tmp_path / "other"
    for folder, rate in ((one, 0.1), (again, 0.1), (other, 0.2)):
        assert recorded(folder, rate, 4, "torch") == 0
    seeds: list[str] = []

    def shaken(seed: str) -> Path:
        seeds.append(seed)
        folder = tmp_path / f"shaken-{len(seeds)}"
        assert recorded(folder, 0.1, 4, "torch", seed=seed) == 0
        return folder

    assert verified(one, again, shaken).held
    assert seeds == ["1"]
    report = verified(one, other, shaken)
    assert report.first is not None
    assert report.first.where == "optimizer"
    assert seeds == ["1", *SEEDS]
    both = [tmp_path / "shaken-2", tmp_path / "shaken-3"]
    assert not verify_runs(*both, exact=True).held
    assert all(verify_runs(one, folder, both).held for folder in both)
    assert recorded(tmp_path / "no seed", 0.1, 4, "torch", seed="often") == 1
    assert not (tmp_path / "no seed").exists()


@pytest.mark.rest
def test_a_recording_needs_torch_and_what_torch_needs_alone(tmp_path: Path) -> None:
    libraries, site = tmp_path / "libraries", Path(trueshard.__file__).with_name("verification") / "site"
    libraries.mkdir()
    for name in ("torch", "torchgen", "filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx", "sympy"):
        (libraries / name).symlink_to(Path(str(importlib.import_module(name).__file__)).parent)
    (libraries / "typing_extensions.py").symlink_to(typing_extensions.__file__)
    own = SMALL.replace("import sys, torch", "import sitecustomize, sys, torch\nassert 'numpy' not in sys.modules")
    (tmp_path / "small.py").write_text(own)
    paths = {"PYTHONPATH": f"{site}:{libraries}", "TRUESHARD_RECORD": str(tmp_path / "other")}
    command = [sys.executable, "-S", str(tmp_path / "small.py"), "0.1", "4", "torch"]  # no packages of this environment
    subprocess.run(command, env={**os.environ, **paths}, check=True)
    assert recorded(tmp_path / "this", 0.1, 4, "torch") == 0
    assert verify_runs(tmp_path / "this", tmp_path / "other", exact=True).held


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    for name, arguments in {"a": (0.1, 4, "torch"), "other": (0.1, 3, "torch"), "never": (0.1, 4, "never")}.items():
        assert recorded(tmp_path / name, *arguments) == 0
    with pytest.raises(ValueError, match="of other models"):
        verify_runs(tmp_path / "a", tmp_path / "other")
    for folder in (tmp_path / "never", tmp_path / "small.py", tmp_path / "none"):
        with pytest.raises(ValueError, match=re.escape(str(folder))):
            verify_runs(tmp_path / "a", folder)
    index = tmp_path / "a" / "rank-0" / "record.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"ranks": 2}))
    with pytest.raises(ValueError, match="1 of 2 ranks"):
        verify_runs(tmp_path / "a", tmp_path / "a")
