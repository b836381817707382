"""A sharded model in use: policies, meshes, evaluation between steps, failures, one process, the meta device."""

from __future__ import annotations

import copy
import itertools
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import forks
import trueshard
from cases import as_on_one_device, on_ranks, raises_on_ranks
from gathering import gradients, parameters
from handmade_training import Report, batch, ids, prepared
from messages import naming
from meter import gloo_lets_go, meter, peak_and_rest
from models import CASES
from models.handmade import Block, Methods, Scalar, Stack, TiedLanguageModel
from parity import LAUNCHER_VARIABLES, RankFailure, Ranks, assert_same
from resting import all_but
from stepping import EPS, accumulate, shard_over, take_step
from training import train, train_many
from trueshard import _torch
from trueshard.distributed import device_of
from trueshard.sharding.hooks import runtime_of


def trained(
    rank: int, world_size: int, words: dict[str, Any], build: Callable[[], nn.Module] = Stack, samples: int = 6
) -> Report:
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if world_size > 1:
        shape = words.get("mesh")
        mesh = shape and torch.distributed.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        trueshard.shard(model, optimizer, **words | {"mesh": mesh})
    for seed in range(3):
        for part in range(2):
            with accumulate(model, last=part == 1):
                model(batch(2 * seed + part, rank, world_size, samples)).pow(2).mean().backward()
            assert part or all(p.grad is None for p in model.parameters() if isinstance(p, DTensor))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        take_step(optimizer)
    return parameters(model)


WORDS = [
    {"reshard_after_forward": "always"},
    {"reshard_after_forward": "never"},
    {"reshard_after_forward": "last_layer"},
    {"reshard_after_forward": {"blocks.[01]": "never", "": "always"}},
    {"activation_checkpointing": "full"},
    {"activation_checkpointing": "selective"},
    {"activation_checkpointing": {"": "full", "blocks.2": "selective"}},
    {"offload": "cpu"},
    {"units": "Linear"},
    {"units": ["Block", nn.LayerNorm]},
    {"units": "blocks.1"},
]


@pytest.mark.parametrize("words", all_but(WORDS[::4], WORDS), ids=str)
@as_on_one_device(3)
def test_every_word_trains_alike(rank: int, world_size: int, words: dict[str, Any]) -> Report:
    return trained(rank, world_size, words)


class Odd(Stack):
    """7 and 14 rows: over 4 ranks, and over 2 ranks of a node, shards of different sizes."""

    def __init__(self) -> None:
        super().__init__(width=7)


MESHES: list[dict[str, Any]] = [{"mesh": (2, 2)}, {"reshard_after_forward": 2}, {"mesh": (4, 1)}]


@pytest.mark.parametrize(
    ("words", "build"), all_but([(MESHES[0], Odd)], itertools.product(MESHES, [Stack, Scalar, Odd]), unpack=True)
)
@as_on_one_device(4)
def test_meshes_and_node_sizes_train_alike(
    rank: int, world_size: int, words: dict[str, Any], build: Callable[[], nn.Module]
) -> Report:
    return trained(rank, world_size, words, build, 8)


class Dropout(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = nn.functional.dropout(block(x), 0.5)
        return self.last(x)


def dropout(rank: int, world_size: int, mode: str) -> Report:
    torch.manual_seed(0)
    model = Dropout()
    model.first.requires_grad_(False)
    for block in model.blocks:
        block.add_module("drop", nn.Dropout(0.5))
        block.up.register_forward_hook(lambda m, a, out: nn.functional.dropout(out, 0.5))
    trueshard.shard(model, activation_checkpointing=mode)
    torch.manual_seed(7 + rank)
    model(batch(0, rank, world_size)).pow(2).mean().backward()
    return gradients(model)


def test_recomputation_repeats_its_dropout(ranks2: Ranks) -> None:
    expected = ranks2.run(dropout, "none")
    for mode in ("full", "selective"):
        assert_same(ranks2.run(dropout, mode), expected)


@on_ranks(2)
def test_what_is_offloaded_rests_in_host_memory(rank: int, world_size: int) -> None:
    for offload in ("cpu", "none"):
        model = Stack()
        optimizer = torch.optim.AdamW(model.parameters())
        plan = trueshard.shard(model, optimizer, offload=offload)
        model(torch.ones(2, 8).to(device_of(runtime_of(model).mesh))).sum().backward()
        optimizer.step()
        assert plan.offload == offload
        assert _torch.offloaded(model) == ({id(p) for p in model.parameters()} if offload == "cpu" else set())
        for parameter in model.parameters() if offload == "cpu" else ():
            held = [parameter, parameter.grad, *optimizer.state[parameter].values()]
            assert {each.device.type for each in held if isinstance(each, torch.Tensor)} == {"cpu"}


def kept_for_backward(rank: int, world_size: int, name: str, depth: int, word: str) -> int:
    """Bytes that a forward leaves behind for its backward."""
    torch.manual_seed(0)
    if name == "stack":
        model: Any = Stack(depth)
        given = {"x": torch.randn(64, 8)}
    else:
        model = CASES["llama"].build(0)
        model.config.num_hidden_layers = depth
        model = type(model)(model.config)
        given = {"input_ids": torch.randint(0, 64, (4, 8))}
    trueshard.shard(model, activation_checkpointing=word, reshard_after_forward="always")
    kept: list[Any] = [model(**given)]  # what is made once is made
    with gloo_lets_go():
        found = meter([lambda: kept.append(model(**given))])
    return peak_and_rest([change.bytes for change in found.steps[0]])[1]


def test_of_a_recomputed_block_its_input_alone_is_kept(ranks2: Ranks) -> None:
    """And the state of the random generator, so that dropout is repeated; and of a Llama's layer a number or two."""
    for name, size in (("stack", 64 * 8 * 4), ("llama", 4 * 8 * 32 * 4)):
        two, four = (ranks2.run(kept_for_backward, name, depth, "full")[0] for depth in (2, 4))
        assert 0 <= four - two - 2 * (size + torch.get_rng_state().nbytes) < 64, name
        two, four = (ranks2.run(kept_for_backward, name, depth, "none")[0] for depth in (2, 4))
        assert four - two > 2 * 4 * size, name


@as_on_one_device(atol=1e-5)
def test_policy_and_evaluation_between_steps(rank: int, world_size: int) -> Report:
    """Policies, evaluation and sampling between steps, also between backward and step."""
    model, optimizer = prepared(world_size, Methods)
    report: Report = {}
    policies: list[Any] = ["never", "always", {"layers.*": "never"}, "last_layer", world_size, 1, "default"]
    for seed, policy in enumerate(policies):
        if world_size > 1:
            trueshard.set_reshard_after_forward(model, policy)
        with torch.no_grad():
            report[f"before {seed}"] = model.loss(ids(50 + seed, 0, 1))
        model.loss(ids(seed, rank, world_size)).backward()
        with torch.no_grad():
            report[f"between {seed}"] = model(ids(60 + seed, 0, 1))
        report[f"no backward {seed}"] = model(ids(60 + seed, 0, 1)).detach()
        optimizer.step()
        with torch.no_grad():
            report[f"stepped {seed}"] = model(ids(60 + seed, 0, 1))
        optimizer.zero_grad()
        report[f"sample {seed}"] = model.generate(ids(70 + seed, 0, 1), 2)
        with torch.no_grad():
            for p in model.parameters():
                p.data.mul_(0.99)
        with torch.no_grad():
            report[f"after {seed}"] = model(ids(80 + seed, 0, 1))
    report["parameters"] = parameters(model)
    return report


class Squeezed(Block):
    """Its output is a view."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.unsqueeze(1)).squeeze(1)


class WrittenTo(Stack):
    """Adds to what blocks return in place, as ``hidden += residual`` does, and returns a view of a view itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Squeezed() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            y = block(x)
            y += x
            x = y
        return self.last(x).view(-1, 2, 4).transpose(0, 1)


@as_on_one_device(atol=1e-5)
def test_views_that_are_written_to_in_place_train_alike(rank: int, world_size: int) -> Report:
    report: Report = {}
    for policy in ("always", "default", "never"):
        torch.manual_seed(0)
        model = WrittenTo()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            shard_over(world_size, model, optimizer, reshard_after_forward=policy)
            for seed in range(3):
                out = model(batch(seed, rank, world_size))
                if seed < 2:
                    out *= 2
                if seed:
                    out.select(0, 0).sin_()
                loss = out.pow(2).mean()
                loss.backward(retain_graph=seed == 1)
                if seed == 1:
                    loss.backward()
                take_step(optimizer)
        report[policy] = parameters(model)
    return report


@raises_on_ranks(2, "modified inplace")
def test_a_unit_that_writes_to_its_own_input_is_an_error_and_no_other_gradient(rank: int, world_size: int) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8)))
    trueshard.shard(model, units="1")
    model(torch.ones(2, 8))


@on_ranks(2)
def test_of_a_reference_nothing_stays_gathered_and_the_model_goes_on(rank: int, world_size: int) -> None:
    """A frozen copy of a model computes between the model's forward and its backward."""
    torch.manual_seed(0)
    model = TiedLanguageModel()
    reference = copy.deepcopy(model).requires_grad_(False).eval()
    plan = trueshard.shard(model)
    same_plan = trueshard.shard(reference, plan=plan)
    assert [unit.name for unit in same_plan.units] == [unit.name for unit in plan.units] == ["", "layers.0", "layers.1"]
    loss = model(ids(0, rank, world_size)).mean()
    waiting = runtime_of(model).memory.now()
    with torch.no_grad():
        wanted = reference(ids(0, rank, world_size))
    assert runtime_of(reference).memory.now() == []
    assert all(
        gathered.untyped_storage().nbytes() == 0 for _, _, gathered in _torch.gathered_parameters(reference.modules())
    )
    assert runtime_of(model).memory.now() == waiting != []
    (loss + wanted.mean()).backward()


class Fragile(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.fail = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.first(x))
        if self.fail == "forward":
            raise ValueError("in forward")
        x = self.blocks[1](x)
        if self.fail == "backward":
            x.register_hook(_raise)
        return self.last(self.blocks[2](x))


def _raise(grad: torch.Tensor) -> torch.Tensor:
    raise ValueError("in backward")


@as_on_one_device(atol=1e-5)
def test_the_step_after_a_caught_exception_is_right(rank: int, world_size: int) -> Report:
    model, optimizer = prepared(world_size, Fragile)
    for seed, where in enumerate(["", "forward", "", "backward", "backward", "forward", ""]):
        model.fail = where
        try:
            model(batch(seed, rank, world_size)).pow(2).mean().backward()
            assert not where
            optimizer.step()
        except ValueError:
            assert where
        optimizer.zero_grad()
    return parameters(model)


def one_fails(rank: int, world_size: int, where: str) -> None:
    model = Fragile()
    trueshard.shard(model)
    model.fail = where if rank == 1 else ""
    try:
        model(batch(0, rank, world_size)).pow(2).mean().backward()
    except ValueError:
        os._exit(3)
    except RuntimeError:
        os._exit(4)  # as an uncaught error ends a real rank


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_rank_that_fails_ends_the_others_with_an_error(where: str, ranks3: Ranks) -> None:
    with pytest.raises(RankFailure) as failure:
        ranks3.run(one_fails, where, timeout=40)
    assert "rank 0 died with exit code 4" in str(failure.value)
    assert "rank 1 died with exit code 3" in str(failure.value)
    assert "rank 2 died with exit code 4" in str(failure.value)


def without_a_launcher(rank: int, world_size: int) -> Report:
    report: Report = {}
    for sharded in (False, True):
        torch.manual_seed(0)
        model = TiedLanguageModel()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if sharded:
            plan = trueshard.shard(model, optimizer)
            assert plan.ranks == (1,)
        for seed in range(3):
            logits = model(ids(seed, 0, 1))
            logits.pow(2).mean().backward()
            take_step(optimizer)
        report[str(sharded)] = parameters(model)
    return report


def test_one_process_without_a_launcher(alone: Ranks) -> None:
    (report,) = alone.run(without_a_launcher, group=False)
    assert_same(report["True"], report["False"], rtol=1e-6, atol=1e-7)


SCRIPT = """
import torch, trueshard
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
optimizer = torch.optim.AdamW(model.parameters())
trueshard.shard(model, optimizer)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
line = f"{torch.distributed.get_world_size()} {type(model[0].weight).__name__}\\n"
print(line, end="", flush=True)  # in one piece: two processes write to one pipe
"""


LAUNCHER = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python", sys.executable]


@pytest.mark.rest
@pytest.mark.parametrize("launcher", [[], LAUNCHER])
def test_a_script_ends_by_itself(launcher: list[str], tmp_path: Path) -> None:
    """The group that shard() made is closed at exit: no warning, no hang, exit code 0."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    # The launcher may be a fork; the script's own processes are started anew, since their ends are what is seen here.
    command = [*launcher, "-X", "utf8", str(script)]
    environment = {key: value for key, value in os.environ.items() if key not in LAUNCHER_VARIABLES}
    done = forks.run(
        [sys.executable, *command],
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == {"2" if launcher else "1", "DTensor"}
    assert "destroy_process_group" not in done.stderr


@on_ranks(3)
def test_a_whole_state_dict_loads_into_a_sharded_model(rank: int, world_size: int) -> None:
    torch.manual_seed(1)
    source = TiedLanguageModel()
    torch.manual_seed(0)
    model = TiedLanguageModel()
    trueshard.shard(model)
    model.load_state_dict(source.state_dict())
    assert_same(parameters(model), parameters(source))
    wrong = source.state_dict() | {"layers.0.up.weight": torch.zeros(3, 3)}
    with pytest.raises(RuntimeError, match=naming("size mismatch", "layers.0.up.weight")):
        model.load_state_dict(wrong)
    wrapped = nn.ModuleDict({"inner": model})
    wrapped.load_state_dict({f"inner.{key}": value * 2 for key, value in source.state_dict().items()})
    assert_same(parameters(model), {name: value * 2 for name, value in parameters(source).items()})


@as_on_one_device(3, atol=1e-5)
def test_a_model_may_change_dtype_between_steps(rank: int, world_size: int) -> Report:
    model, optimizer = prepared(world_size, Scalar)
    for seed in range(3):
        if seed == 1:
            model.double()
        x = batch(seed, rank, world_size).to(next(model.parameters()).dtype)
        model(x).pow(2).mean().backward()
        take_step(optimizer)
    return parameters(model)


@pytest.mark.rest
@pytest.mark.parametrize("word", ["bf16", "always"])
def test_architectures_take_the_words_too(word: str, alone: Ranks, ranks2: Ranks) -> None:
    words: dict[str, Any] = {"activation_checkpointing": "full"}
    words |= {"reshard_after_forward": "always"} if word == "always" else {"mixed_precision": "bf16"}
    tolerance = (1e-4, 2e-5) if word == "always" else (5e-2, 2e-2)
    for name in ("llama", "t5", "gpt2", "vit", "lora"):
        (expected,) = alone.run(train, name)
        for found in ranks2.run(train_many, [name], words):
            assert_same(found[name]["parameters"], expected["parameters"], rtol=tolerance[0], atol=tolerance[1])


class Adapted(nn.Linear):
    """A frozen matrix, and two rows that train: of three ranks the last one holds none of them."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.requires_grad_(False)
        self.down = nn.Parameter(torch.full((2, 6), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x @ self.down.T @ self.down


@as_on_one_device(3)
def test_ranks_agree_on_what_a_step_made_old(rank: int, world_size: int) -> Any:
    """A rank that has written nothing gathers with the others when layers are called one by one, as PEFT generates."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 6), Adapted(), Adapted(), nn.Linear(6, 6))
    for end in (model[0], model[-1]):
        end.requires_grad_(False)

    def generate(x: torch.Tensor) -> torch.Tensor:
        for layer in [*model, *model]:
            x = layer(x)
        return x

    model.generate = generate
    optimizer = torch.optim.AdamW([layer.down for layer in model[1:3]], lr=0.1, eps=EPS, fused=True)
    shard_over(world_size, model, optimizer, units=[Adapted])
    found = []
    for seed in range(3):
        x = torch.randn(6, 6, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            found.append(model.generate(x))
        model(x.chunk(world_size)[rank]).pow(2).mean().backward()
        take_step(optimizer)
    return found


@as_on_one_device(3, atol=1e-3)
def test_adapters_are_off_in_a_pass_between_a_forward_and_its_backward(rank: int, world_size: int) -> Any:
    """They train on, and their gradients are reduced in their own dtype, as PEFT's do where a reference is computed."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Adapted() for _ in range(3)))
    optimizer = torch.optim.AdamW([layer.down for layer in model], lr=0.1, eps=EPS)
    words = {"units": [Adapted], "mixed_precision": trueshard.MixedPrecision(compute="bfloat16")}
    shard_over(world_size, model, optimizer, **words)
    for seed in range(3):
        x = torch.randn(6, 6, generator=torch.Generator().manual_seed(seed)).chunk(world_size)[rank]
        output = model(x)
        for on in (False, True):
            for layer in model:
                layer.down.requires_grad_(on)
            if not on:
                with torch.no_grad():
                    model(x)
        output.float().pow(2).mean().backward()
        assert all(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])
        take_step(optimizer)
        assert all(layer.down.requires_grad for layer in model)
    return {name: value.dtype for name, value in parameters(model).items()}
