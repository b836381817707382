"""A loop with TrueShard's ``Accelerator``, on several ranks, against accelerate's own on one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trueshard
from cases import on_ranks
from parity import Ranks, assert_same
from running import environment
from stepping import build
from trainers import BATCH, ON_CPU, STEPS, language_model, launched, tokens, whole_weights
from trueshard.sharding.hooks import runtime_of


def accelerator(rank: int, world_size: int, sharded: bool = True, **words: Any) -> Any:
    launched(rank, world_size)
    if sharded:
        from trueshard.integrations.accelerate import Accelerator
    else:
        from accelerate import Accelerator
    return Accelerator(cpu=ON_CPU, **words)


def rows(count: int) -> TensorDataset:
    random = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(count, 6, generator=random), torch.randn(count, 1, generator=random))


class Loop:
    """Two models, an optimizer and a schedule each, one loader; each step clips, and accumulates as the case says."""

    def __init__(self, rank: int, world_size: int, sharded: bool, microbatches: int = 1, **words: Any) -> None:
        self.accelerator = accelerator(rank, world_size, sharded, gradient_accumulation_steps=microbatches, **words)
        models = [build(), build()]
        nn.init.constant_(models[1].last.bias, 0.3)
        optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
        schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 2 * world_size, 0.5) for optimizer in optimizers]
        loader = DataLoader(rows(12 * STEPS), batch_size=12 // world_size // microbatches)
        prepared = self.accelerator.prepare(*models, *optimizers, *schedules, loader)
        self.models: list[Any] = list(prepared[:2])
        self.optimizers, self.schedules, self.loader = prepared[2:4], prepared[4:6], prepared[6]
        self.count = 0
        self.accelerator.register_for_checkpointing(self)
        self.norms: list[float] = []

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]

    def train(self, skip: int = 0, stop: int = 10**6) -> None:
        loader = self.accelerator.skip_first_batches(self.loader, skip) if skip else self.loader
        for number, (x, y) in enumerate(loader, start=skip):
            if number == stop:
                break
            with self.accelerator.accumulate(*self.models):
                hidden = sum(model(x) for model in self.models)
                with self.accelerator.autocast():
                    loss = nn.functional.mse_loss(hidden, y)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    norms = [self.accelerator.clip_grad_norm_(model.parameters(), 0.5) for model in self.models]
                    self.norms += [float(norm) for norm in norms]
                    self.count += 1
                for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()

    def result(self) -> Any:
        rates = [schedule.get_last_lr() for schedule in self.schedules]
        return [whole_weights(model) for model in self.models], self.norms, rates, self.count


def looped(rank: int, world_size: int, sharded: bool, microbatches: int, words: dict[str, Any]) -> Any:
    loop = Loop(rank, world_size, sharded, microbatches, **words)
    loop.train()
    return loop.result()


@pytest.mark.parametrize("microbatches", [pytest.param(1, marks=pytest.mark.rest), 2])
def test_two_models_with_accumulation_and_clipping(microbatches: int, alone: Ranks, sizes: list[Ranks]) -> None:
    (expected,) = alone.run(looped, False, microbatches, {})
    for ranks in (alone, *sizes):
        for found in ranks.run(looped, True, microbatches, {}):
            assert_same(found, expected, rtol=1e-4, atol=1e-6)


def saved(rank: int, world_size: int, folder: str) -> Any:
    loop = Loop(rank, world_size, sharded=True)
    loop.train(stop=2)
    for _ in range(2):  # the second takes the place of the first, as accelerate's does
        loop.accelerator.save_state(folder)
    return loop.result()


def resumed(rank: int, world_size: int, folder: str) -> Any:
    loop = Loop(rank, world_size, sharded=True)
    with torch.no_grad():
        for parameter in loop.models[0].parameters():
            parameter.zero_()
    loop.accelerator.load_state(folder)
    assert loop.accelerator.step == 2
    loop.train(skip=2)
    return loop.result()


def test_state_is_saved_and_loaded_at_another_number_of_ranks(
    alone: Ranks, ranks2: Ranks, ranks3: Ranks, tmp_path: Path
) -> None:
    (expected,) = alone.run(looped, False, 1, {})
    ranks2.run(saved, str(tmp_path / "state"))
    for ranks in (ranks2, ranks3, alone):
        for weights, norms, _, count in ranks.run(resumed, str(tmp_path / "state")):
            assert_same((weights, norms, count), (expected[0], expected[1][4:], expected[3]), rtol=1e-4, atol=1e-6)


@on_ranks(2)
def test_hooks_of_the_user_see_the_models(rank: int, world_size: int, tmp_path: Path) -> None:
    here, model, seen = accelerator(rank, world_size), build(), []
    model, _ = here.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    here.register_save_state_pre_hook(lambda models, weights, folder: seen.append((list(models), weights.pop())))
    here.register_load_state_pre_hook(lambda models, folder: seen.append(models.pop()))
    nn.init.constant_(model.last.bias, 3.0)
    here.save_state(str(tmp_path / "state"))
    nn.init.constant_(model.last.bias, 7.0)
    here.load_state(str(tmp_path / "state"))
    assert model.last.bias.full_tensor().eq(3.0).all()
    assert seen[0][0] == [model]
    assert seen[1] is model


@pytest.mark.rest
@on_ranks(1, 2)
def test_automatic_names_and_a_limit_of_checkpoints(rank: int, world_size: int, tmp_path: Path) -> None:
    from accelerate.utils import ProjectConfiguration

    config = ProjectConfiguration(str(tmp_path / str(world_size)), automatic_checkpoint_naming=True, total_limit=2)
    here = accelerator(rank, world_size, project_config=config)
    model = build()
    model, _ = here.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for value in range(3):
        nn.init.constant_(model.last.bias, float(value))
        here.save_state()
    nn.init.constant_(model.last.bias, 7.0)
    here.load_state()
    assert model.last.bias.item() == 2.0
    here.wait_for_everyone()
    assert {path.name for path in Path(tmp_path, str(world_size), "checkpoints").iterdir()} == {
        "checkpoint_1",
        "checkpoint_2",
    }


@pytest.mark.rest
@on_ranks(1, 3)
def test_weights_are_written_whole_by_the_main_process(rank: int, world_size: int, tmp_path: Path) -> None:
    from accelerate import load_checkpoint_in_model
    from transformers import AutoModelForCausalLM

    folder = tmp_path / str(world_size)
    here = accelerator(rank, world_size)
    model = language_model(tied=True)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    model = here.prepare(model)
    state = here.get_state_dict(model)
    assert_same(state, expected if rank == 0 else {})
    here.save_model(model, folder / "model")
    unwrapped = here.unwrap_model(model)
    unwrapped.save_pretrained(
        folder / "pretrained", is_main_process=here.is_main_process, save_function=here.save, state_dict=state
    )
    model.save_pretrained(folder / "pretrained again")
    here.wait_for_everyone()
    fresh = language_model(tied=True, seed=5)
    load_checkpoint_in_model(fresh, folder / "model")
    assert_same(fresh.state_dict(), expected)
    for name in ("pretrained", "pretrained again"):
        read = AutoModelForCausalLM.from_pretrained(folder / name)
        assert read.config.architectures == ["LlamaForCausalLM"]
        assert_same(read.state_dict(), expected)


@pytest.mark.rest
@on_ranks(1, 2, 3)
def test_metrics_are_those_of_each_sample_once(rank: int, world_size: int) -> None:
    here = accelerator(rank, world_size)
    model, loader = here.prepare(build(), DataLoader(rows(7), batch_size=2))
    with torch.no_grad():
        found = torch.cat([here.gather_for_metrics(model(x)) for x, _ in loader])
        expected = build()(rows(7).tensors[0])
    torch.testing.assert_close(found.cpu(), expected)


@pytest.mark.rest
@on_ranks(2)
def test_memory_is_freed_and_a_model_prepared_again(rank: int, world_size: int) -> None:
    here = accelerator(rank, world_size)
    model = build()
    model, optimizer = here.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    here.free_memory()
    assert here.prepare(model) is model
    optimizer = here.prepare(torch.optim.AdamW(model.parameters(), lr=0.1))
    before = whole_weights(model)
    here.backward(model(torch.ones(4, 6)).sum())
    optimizer.step()
    assert all((value != before[name]).any() for name, value in whole_weights(model).items())


def cut(rank: int, world_size: int, sharded: bool, tensor: int, replicas: int) -> Any:
    """Ranks that share matrices read the same samples, and replicas others."""
    from accelerate.utils import ParallelismConfig

    words: dict[str, Any] = {}
    if sharded:
        shard = world_size // tensor // replicas
        words["parallelism_config"] = ParallelismConfig(dp_replicate_size=replicas, dp_shard_size=shard, tp_size=tensor)
    here = accelerator(rank, world_size, sharded, **words)
    model = language_model()
    readers = world_size // tensor
    samples = [{k: torch.tensor(v) for k, v in sample.items()} for sample in tokens(BATCH * 2)]
    loader = DataLoader(samples, batch_size=4 // readers)
    model, optimizer, loader = here.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    gathered = []
    for batch in loader:
        logits = model(**{k: v for k, v in batch.items() if k != "labels"}).logits.float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["input_ids"].flatten())
        gathered.append(here.gather_for_metrics(batch["input_ids"]))
        here.backward(loss)
        here.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return whole_weights(model), torch.cat(gathered)


@pytest.mark.rest
@pytest.mark.parametrize(("count", "tensor", "replicas"), [(2, 2, 1), (4, 2, 1), (4, 1, 2), (2, 1, 2)])
def test_the_axes_of_a_parallelism_config(count: int, tensor: int, replicas: int, alone: Ranks, ranks4: Ranks) -> None:
    (expected,) = alone.run(cut, False, 1, 1)
    for found in Ranks(count, ranks4.pool).run(cut, True, tensor, replicas):
        assert_same(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.rest
def test_mixed_precision_is_that_of_shard(alone: Ranks, ranks2: Ranks) -> None:
    words = {"mixed_precision": "bf16"}
    (expected,) = alone.run(looped, True, 1, words)
    (plain,) = alone.run(looped, False, 1, words)
    for found in ranks2.run(looped, True, 1, words):
        assert_same(found, expected, rtol=5e-2, atol=2e-3)
        assert_same(found[1], plain[1], rtol=5e-2)


@pytest.mark.rest
@on_ranks(2)
def test_a_gathered_copy_generates_alone_and_is_written_as_ever(rank: int, world_size: int, tmp_path: Path) -> None:

    here = accelerator(rank, world_size)
    model = here.prepare(language_model())
    with trueshard.gathered(model) as copy:
        if rank == 1:
            assert copy.generate(torch.tensor([[3, 4]]), max_new_tokens=4, min_new_tokens=4).shape == (1, 6)
            copy.save_pretrained(tmp_path, is_main_process=True)
    here.wait_for_everyone()
    assert model.generate(torch.tensor([[3, 4]]), max_new_tokens=2 + rank, min_new_tokens=2 + rank).shape == (
        1,
        4 + rank,
    )


@pytest.mark.rest
@on_ranks(2)
def test_other_options_of_shard_reach_it(rank: int, world_size: int) -> None:
    """A plan for one model; axes without accelerate's configuration, which its loaders follow."""
    model = language_model()
    plan = trueshard.shard(language_model(), reshard_after_forward="never")
    here = accelerator(rank, world_size, shard={"plan": plan})
    here.prepare(model)
    assert runtime_of(model).plan.reshard_after_forward == "never"
    here = accelerator(rank, world_size, shard={"tensor": 2})
    model, loader = here.prepare(language_model(), DataLoader(rows(4), batch_size=2))
    assert len(loader) == 2
    assert here.parallelism_config.tp_size == 2


# What is refused


def refused(here: Any, *args: Any) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        here.prepare(*args)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, trueshard.TrueShardError)
    return str(caught.value)


@on_ranks(1, 2)
def test_what_cannot_be_prepared_is_named(rank: int, world_size: int) -> None:
    here = accelerator(rank, world_size)
    model, other = build(), build()
    assert "AdamW holds parameters none of which" in refused(here, model, torch.optim.AdamW(other.parameters()))
    both = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    assert "SGD holds parameters of several models" in refused(here, model, other, both)
    late = torch.optim.AdamW(model.parameters())
    here.prepare(model)
    assert "Uneven is prepared here already" in refused(here, model)
    assert "AdamW holds parameters none of which" in refused(here, late)
    trueshard.shard(other)
    assert "Uneven is prepared by shard() already" in refused(here, other)


@pytest.mark.rest
@on_ranks(1, 2)
def test_plugins_of_others_are_named(rank: int, world_size: int) -> None:
    from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig

    launched(rank, world_size)
    for key, value in {"fsdp_plugin": FullyShardedDataParallelPlugin(), "deepspeed_plugin": object()}.items():
        with pytest.raises(ValueError, match=f"{key}: TrueShard shards"):
            accelerator(rank, world_size, **{key: value})
    os.environ["ACCELERATE_USE_FSDP"] = "true"  # as accelerate launch sets it
    with pytest.raises(ValueError, match="ACCELERATE_USE_FSDP: TrueShard shards"):
        accelerator(rank, world_size)
    del os.environ["ACCELERATE_USE_FSDP"]
    with pytest.raises(ValueError, match="its sizes make 8 ranks"):
        accelerator(rank, world_size, parallelism_config=ParallelismConfig(tp_size=8))
    with pytest.raises(TypeError, match=r"no argument 'unit'.*units"):
        accelerator(rank, world_size, shard={"unit": "x"}).prepare(build())


@on_ranks(1, 2)
def test_accelerates_own_refuses_a_sharded_model(rank: int, world_size: int) -> None:
    here = accelerator(rank, world_size, sharded=False)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    trueshard.shard(model, optimizer)
    with pytest.raises(RuntimeError, match=r"trueshard\.integrations\.accelerate"):
        here.prepare(model, optimizer)


@on_ranks(1, 2)
def test_data_parallel_around_and_inside_is_refused(rank: int, world_size: int) -> None:
    replicas = nn.parallel.DistributedDataParallel
    with pytest.raises(ValueError, match="'0' is a DistributedDataParallel"):
        trueshard.shard(nn.Sequential(replicas(build())))
    model = build()
    around = replicas(model)
    trueshard.shard(model)
    with pytest.raises(RuntimeError, match="DistributedDataParallel"):
        around(torch.ones(2, 6))
    with pytest.raises(RuntimeError, match=r"trueshard\.integrations"):
        replicas(model)


LAUNCHED = """
import torch
from trueshard.integrations.accelerate import Accelerator

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = torch.randn(24, 8, generator=torch.Generator().manual_seed(1))
loader = torch.utils.data.DataLoader(rows, batch_size=12 // accelerator.num_processes)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
    optimizer.zero_grad()
weights = accelerator.get_state_dict(model)
accelerator.print(accelerator.num_processes, *(f"{value.sum().item():.5f}" for value in weights.values()))
"""


@pytest.mark.rest
def test_accelerate_launch(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LAUNCHED)

    def ran(*launcher: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *launcher, str(script)]
        return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)

    launch = ("-m", "accelerate.commands.accelerate_cli", "launch", "--num_processes=2", "--main_process_port=0")
    alone, launched = (done.stdout.split() for done in (ran(), ran(*launch, "--multi_gpu")))
    assert alone[0] == "1"
    assert launched == ["2", *alone[1:]]
    refused = ran(*launch, "--use_fsdp")
    assert refused.returncode
    assert "ACCELERATE_USE_FSDP: TrueShard shards in its place" in refused.stderr
