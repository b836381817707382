"""Contract line 1: names are the user's own, in the user's order, whatever wraps the model."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import trueshard
from cases import on_ranks
from gathering import whole
from models.handmade import Stack, TiedLanguageModel
from parity import Ranks
from stepping import take_step

WRAPPINGS = ["lora", "compiled whole", "compiled in place", "compiled block", "recomputed block"]
"""LoRA comes first; after it the order makes a difference to the two that wrap the same block alone."""


def wrapped(kinds: tuple[str, ...]) -> tuple[nn.Module, nn.Module]:
    """A stack wrapped in each of ``kinds``, in that order, and the same without what only wraps."""
    torch.manual_seed(0)
    plain = model = Stack(depth=2)
    for kind in kinds:
        if kind == "lora":
            import peft

            base = plain if model is plain else model._orig_mod
            plain = peft.get_peft_model(base, peft.LoraConfig(target_modules=["up"], r=2))
            model = plain if model is base else torch.compile(plain, backend="eager")
        elif kind == "compiled whole":
            model = torch.compile(plain, backend="eager")
        elif kind == "compiled in place":
            plain.compile(backend="eager")
        else:
            blocks = next(m for m in plain.modules() if isinstance(m, nn.ModuleList))
            wrap = checkpoint_wrapper if kind == "recomputed block" else _compile
            blocks[1] = wrap(blocks[1])
    return model, plain


def _compile(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")


def wrappings(rank: int, world_size: int, counts: tuple[int, ...]) -> list[str]:
    torch.manual_seed(0)
    bare = Stack(depth=2)
    x = torch.randn(4, 8)
    expected = bare(x)
    checked = []
    for count in counts:
        for kinds in itertools.permutations(WRAPPINGS, count):
            if list(kinds) != sorted(kinds, key=WRAPPINGS.index) and not all("block" in kind for kind in kinds):
                continue
            torch._dynamo.reset()
            model, _ = wrapped(kinds)
            clean = [n for n, _ in wrapped(("lora",) if "lora" in kinds else ())[1].named_parameters()]
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
            trueshard.shard(model, optimizer)
            assert [n for n, _ in model.named_parameters()] == clean, kinds
            assert list(model.state_dict()) == clean, kinds
            inner = getattr(model, "_orig_mod", model)
            assert [n for n, _ in inner.named_parameters()] == clean, kinds
            found = model(x)
            torch.testing.assert_close(found, expected)
            saved = whole(dict(model.state_dict()))
            found.sum().backward()
            optimizer.step()
            model.load_state_dict(model.state_dict())
            assert list(saved) == clean
            checked.append(" + ".join(kinds))
    return checked


@pytest.mark.rest
def test_names_under_each_wrapper_and_every_two(ranks2: Ranks) -> None:
    checked = ranks2.run(wrappings, (1, 2), timeout=240)[0]
    assert set(checked) > set(WRAPPINGS)
    assert len(checked) > 15
    assert {"lora + recomputed block", "recomputed block + compiled block"} < set(checked)


@on_ranks(2)
def test_activation_checkpointing_adds_no_prefix(rank: int, world_size: int) -> None:
    for options in (
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "selective"},
        {"activation_checkpointing": {"layers.1": "full"}},
    ):
        torch.manual_seed(0)
        model = TiedLanguageModel()
        names = [n for n, _ in model.named_parameters(remove_duplicate=False)]
        keys = list(model.state_dict())
        modules = [n for n, _ in model.named_modules()]
        buffers = [n for n, _ in model.named_buffers()]
        trueshard.shard(model, **options)
        model(torch.randint(0, 64, (2, 4))).sum().backward()
        assert [n for n, _ in model.named_parameters(remove_duplicate=False)] == names
        assert list(model.state_dict()) == keys
        assert [n for n, _ in model.named_modules()] == modules
        assert [n for n, _ in model.named_buffers()] == buffers


@on_ranks(2)
def test_state_dict_moves_between_compiled_and_plain_models(rank: int, world_size: int) -> None:
    """A compiled model takes and gives the keys of a model that never was compiled."""
    torch.manual_seed(0)
    source = Stack(depth=2)
    model, _ = wrapped(("compiled block", "compiled whole"))
    trueshard.shard(model)
    sharded = Stack(depth=2)
    trueshard.shard(sharded)
    model.load_state_dict(sharded.state_dict())
    for (name, mine), theirs in zip(model.state_dict().items(), source.state_dict().values(), strict=True):
        if world_size > 1:
            assert name in source.state_dict()
        assert whole(mine).shape == theirs.shape


@pytest.mark.rest
@pytest.mark.compiles
@on_ranks(2, timeout=280)
def test_inductor_compiles_the_blocks_in_place(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    reference = Stack(depth=2)
    torch.manual_seed(0)
    model = Stack(depth=2)
    names = list(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trueshard.shard(model, optimizer, compile=True)
    expected = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step, (each, made) in itertools.product(range(2), ((model, optimizer), (reference, expected))):
        each(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).pow(2).mean().backward()
        take_step(made)
    assert list(model.state_dict()) == names
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(mine), theirs.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.rest
@on_ranks(2)
def test_blocks_alike_are_compiled_once_however_many_there_are(rank: int, world_size: int) -> None:
    """And once more for passes without gradients: graphs after a step, after three, with an evaluation, after five."""
    from torch._dynamo.testing import CompileCounter

    for depth in (2, 12):
        torch._dynamo.reset()
        counter = CompileCounter()
        torch.manual_seed(0)
        model = Stack(depth)
        for block in model.blocks:
            block.compile(backend=counter)
        optimizer = torch.optim.AdamW(model.parameters())
        trueshard.shard(model, optimizer)
        counts = []
        for steps in (1, 2, 0, 2):
            for _ in range(steps):
                model(torch.ones(4, 8)).pow(2).mean().backward()
                take_step(optimizer)
            if not steps:
                with torch.no_grad():
                    model(torch.ones(4, 8))
            counts.append(counter.frame_count)
        assert counts == [1, 1, 2, 2]
