"""Sequence parallelism: what lies between matrices, the last norm too, is computed on parts, and trains the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import trueshard
from cases import on_ranks, raises_on_ranks
from gathering import gradients
from messages import naming
from parity import Ranks
from tensor_models import SIZES, distance, far_apart, in_float64, llama, optimizers, train
from trueshard.model.names import Index
from trueshard.model.regions import rows_of
from trueshard.parallel.forward_trial import last_norm

EXACT = 1e-12
REST = pytest.mark.rest
SIX = {"hidden_size": 36, "num_attention_heads": 6, "num_key_value_heads": 6}
"""heads that two and three ranks share, in which 11 tokens have unequal parts"""


def _of(kind: str, **more: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **SIX, **more})
    model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
    return model


ARCHITECTURES: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: _of("Llama"),
    "qwen3": lambda: _of("Qwen3", head_dim=6),
    "gemma": lambda: _of("Gemma", head_dim=6),  # its head is tied, its norms scale by 1 + weight
    "tied": lambda: _of("Llama", tie_word_embeddings=True, intermediate_size=66),
}


def build(name: str) -> Any:
    torch.manual_seed(0)
    model = ARCHITECTURES[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # else weights of norms are all alike
                parameter.add_(torch.rand_like(parameter) / 4)
    return model.double().train()


def _sharded(model: nn.Module, ranks: int, *made: torch.optim.Optimizer, **words: Any) -> list[torch.Size]:
    """Shard with sequence parallelism; return the list of shapes that the last norm will be given."""
    seen: list[torch.Size] = []
    norm = model.get_submodule(str(last_norm(Index(model).modules, ["model.layers.0"])))
    norm.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape))
    trueshard.shard(model, *made, tensor={"ranks": ranks, "sequence": True}, **words)
    return seen


# Training


def in_parts(rank: int, world_size: int, name: str, ranks: int, words: dict[str, Any]) -> dict[str, float]:
    """Two steps of two microbatches, against one process."""
    with in_float64():
        plain, model = build(name), build(name)
        expected = train(plain, optimizers("AdamW", plain), range(2))
        made = optimizers("AdamW", model)
        seen = _sharded(model, ranks, *made, **words)
        found = train(model, made, range(2), rank // ranks, world_size // ranks)
    part = rows_of(11, rank % ranks, ranks)[1]
    assert len(seen) == 4
    assert {shape[1] for shape in seen} == {part}
    norm = "model.norm.weight"
    far = {what: distance(found[what], expected[what]) for what in ("grads", "parameters")}
    return far | {"last norm": distance(*({norm: each["grads"][norm]} for each in (found, expected)))}


FULL, SELECTIVE = ({"activation_checkpointing": words} for words in ("full", "selective"))
TRAINED = [
    (2, "llama", FULL),
    (3, "llama", {}),
    (2, "llama", SELECTIVE),
    (2, "qwen3", {}),
    (3, "qwen3", FULL),
    (2, "gemma", SELECTIVE),
    (3, "gemma", {}),
    (2, "tied", {}),
    (3, "tied", FULL | {"reshard_after_forward": "always"}),
    (4, "tied, of two", {}),
]


@pytest.mark.rest
@pytest.mark.parametrize(("count", "name", "words"), TRAINED)
def test_the_last_norm_is_on_parts_and_trains_the_same(
    count: int, name: str, words: dict[str, Any], ranks2: Ranks, ranks3: Ranks, ranks4: Ranks
) -> None:
    ranks = {2: ranks2, 3: ranks3, 4: ranks4}[count]
    for far in ranks.run(in_parts, name.removesuffix(", of two"), count if count < 4 else 2, words):
        assert far_apart(far, EXACT) == {}


@pytest.mark.parametrize(
    ("mode", "name", "backend"),
    [
        pytest.param("full", "llama", "eager", marks=REST),
        pytest.param("full", "llama", "aot_eager", marks=REST),
        pytest.param("selective", "qwen3", "aot_eager", marks=REST),
    ],
)
@on_ranks(2, timeout=300)
def test_recomputed_blocks_are_compiled_whole(rank: int, world_size: int, mode: str, name: str, backend: str) -> None:
    """Two lengths, with blocks that a compiler traces."""
    from torch._dynamo.testing import CompileCounterWithBackend
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    counter = CompileCounterWithBackend(backend)
    with in_float64():
        plain, model = build(name), build(name)
        for each in (plain, model):
            each.config.use_cache = False
        for layer in model.model.layers:
            layer.compile(backend=counter)
        _sharded(model, 2, activation_checkpointing=mode)
        for length in (11, 8):
            ids = torch.arange(2 * length).view(2, length)
            for each in (plain, model):
                each(input_ids=ids, labels=ids).loss.backward()
        assert distance(gradients(model), gradients(plain)) < EXACT
    assert counter.frame_count >= 2  # the first block, that splits sequences, and the others
    assert dict(counters["graph_break"]) == {}
    torch._dynamo.reset()


# What a model returns of hidden states


@pytest.mark.rest
@pytest.mark.parametrize("mode", ["none", "full", "selective"])
@on_ranks(2)
def test_hidden_states_that_are_asked_for_are_whole(rank: int, world_size: int, mode: str) -> None:
    """A loss that reads what the first block returns; of a model with a head and one without."""
    found: dict[str, Any] = {}
    with in_float64():
        for name in ("head", "base"):
            plain, model = (build("qwen3") if name == "head" else build("qwen3").model for _ in range(2))
            tensor = {"ranks": 2, "sequence": True}
            trueshard.shard(model, tensor=tensor, activation_checkpointing=mode)
            ids = torch.arange(22).view(2, 11)
            states, grads = [], []
            for each in (model, plain):
                kept: list[torch.Tensor] = []
                # Of a model that is itself a unit transformers gives none: it knows a model by the name of its class.
                for asked in (True, False) if name == "head" else (False,):
                    out = each(input_ids=ids, output_hidden_states=asked)
                    last = out.logits if name == "head" else out.last_hidden_state
                    middle = out.hidden_states[1] if asked else last
                    (last.square().mean() + middle.square().mean()).backward()
                    kept = [last, *(out.hidden_states if asked else kept[1:])]
                states.append({str(number): state.detach() for number, state in enumerate(kept)})
                grads.append(gradients(each))
            found |= {f"{name} states": distance(*states), f"{name} grads": distance(*grads)}
            assert [tuple(each.shape[:2]) for each in states[0].values()] == [(2, 11)] * (4 if name == "head" else 1)
    assert far_apart(found, EXACT) == {}


# Blocks that run without gradients in a pass with them


def _reentrant(model: Any) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()


def _recomputing(model: Any) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})


def _frozen_below(model: Any) -> None:
    layer = model.model.layers[0]
    layer.__class__ = type("Frozen", (type(layer),), {"forward": torch.no_grad()(type(layer).forward)})


def _wrapped_below(model: Any) -> None:
    model.model.layers[0].forward = torch.no_grad()(model.model.layers[0].forward)


def without_gradients(rank: int, world_size: int, change: Callable[[Any], None], later: bool, lengths: Any) -> float:
    """Passes of several lengths, then their backwards in turn; a pass that splits nothing lies between."""
    with in_float64():
        plain, model = build("llama"), build("llama")
        for each in (plain, model):
            each.config.use_cache = False
            if not later:
                change(each)
        trueshard.shard(model, tensor={"ranks": world_size, "sequence": True})
        for each in (plain, model):
            if later:
                change(each)
            outputs = [each(input_ids=torch.arange(2 * length).view(2, length)) for length in lengths]
            with torch.no_grad():
                each(input_ids=torch.arange(6).view(2, 3))
            for output in outputs:
                output.logits.square().mean().backward()
        return distance(gradients(model), gradients(plain))


@pytest.mark.parametrize(
    ("count", "change", "later"),
    [
        (3, _reentrant, False),
        pytest.param(2, _reentrant, True, marks=REST),
        pytest.param(3, _recomputing, True, marks=REST),
        (2, _frozen_below, False),
        (2, _wrapped_below, False),
    ],
)
def test_blocks_without_gradients_train_the_same(
    count: int, change: Callable[[Any], None], later: bool, ranks2: Ranks, ranks3: Ranks
) -> None:
    lengths = (11,) if change in (_frozen_below, _wrapped_below) else (11, 8)
    for far in (ranks2 if count == 2 else ranks3).run(without_gradients, change, later, lengths):
        assert far < EXACT


# Which norm it is


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.feed = nn.LayerNorm(6), Feed()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.feed(self.norm(x))


class Pair(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), None


class Model(nn.Module):
    """Own blocks; what makes an output of what they return differs."""

    kind = Block

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(13, 6)
        self.blocks = nn.ModuleList(self.kind() for _ in range(2))
        self.norm, self.other = nn.LayerNorm(6), nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 13)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.output(x)

    def output(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x))


class Plain(Model):
    """The norm and the head follow the blocks."""


class Tuples(Model):
    kind = Pair

    def forward(self, ids: torch.Tensor, output_hidden_states: bool = False) -> torch.Tensor:
        x, every = self.table(ids), []
        for _, block in enumerate(self.blocks[:]):
            if output_hidden_states:
                every.append(x)
            outputs = block(x)
            x = outputs[0]
        if output_hidden_states:
            every.append(x)
        x = self.norm(x)
        return self.head(x) + x.mean()


class TuplesKept(Model):
    """What the last block returned is read again."""

    kind = Pair

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for block in self.blocks:
            outputs = block(x)
            x = outputs[0]
        return self.output(x) + outputs[0].mean()


class Residual(Model):
    """Adds what lies before the norm to what comes out of it."""

    def output(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x) + x)


class Scaled(Model):
    def output(self, x: torch.Tensor) -> torch.Tensor:
        return super().output(x * x.mean(1, keepdim=True))  # over tokens


class Added(Model):
    def output(self, x: torch.Tensor) -> torch.Tensor:
        x += 1
        return super().output(x)


class Twice(Model):
    """The norm is called before the blocks, too."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.table(ids))
        for block in self.blocks:
            x = block(x)
        return self.output(x)


class Kept(Model):
    """What the blocks return is kept, too."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, every = self.table(ids), []
        for block in self.blocks:
            x = block(x)
            every.append(x)
        return self.output(x)


class Sometimes(Model):
    def output(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x) if x.shape[1] > 1 else x)


class OverBatch(Model):
    def output(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.other(x))


class Straight(Model):
    def output(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


class Again(Model):
    """The blocks run twice."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        return self.output(x)


class Reentrant(Model):
    """Both blocks in one checkpoint, their list inside a bare dictionary of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"blocks": self.blocks})
        del self.blocks

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        first, second = self.inner["blocks"]
        return self.output(checkpoint(lambda x: second(first(x)), self.table(ids), use_reentrant=True))


class Leaves(Model):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
            if x.shape[1] > 99:
                break
        return self.output(x)


FOUND = {Plain: "norm", Tuples: "norm", Kept: "norm", Leaves: "norm"}
OTHERS = (TuplesKept, Residual, Scaled, Added, Twice, Sometimes, OverBatch, Straight, Again)


@pytest.mark.parametrize("kind", [*FOUND, *OTHERS], ids=lambda kind: kind.__name__)
def test_the_norm_is_found_where_nothing_else_reads_what_the_blocks_return(kind: type[nn.Module]) -> None:
    assert last_norm(Index(kind()).modules, ["blocks.0", "blocks.1"]) == FOUND.get(kind)


def test_a_forward_that_was_replaced_is_tried_itself() -> None:
    model = Plain()
    model.__dict__["forward"] = lambda ids: model.head(model.table(ids))
    assert last_norm(Index(model).modules, ["blocks.0", "blocks.1"]) is None


STYLES = {"*blocks.*.up": "colwise", "*blocks.*.down": "rowwise", "head": "colwise_gather_output"}


WHOLE = (Reentrant, *FOUND, *(kind for kind in OTHERS if kind is not OverBatch))


@pytest.mark.rest
@pytest.mark.parametrize("words", [{}, FULL, SELECTIVE])
@on_ranks(3)
def test_models_of_ones_own_train_the_same_with_and_without_it(
    rank: int, world_size: int, words: dict[str, Any]
) -> None:
    found = {}
    for kind in WHOLE:
        torch.manual_seed(0)
        plain = kind().double()
        model = copy.deepcopy(plain)
        trueshard.shard(model, tensor={"ranks": world_size, "sequence": True, **STYLES}, **words)
        for length in (7, 4):
            ids = torch.arange(2 * length).view(2, length) % 13
            for each in (model, plain):
                each(ids).logsumexp(-1).square().mean().backward()
        found[kind.__name__] = distance(gradients(model), gradients(plain))
    assert far_apart(found, EXACT) == {}


class Outside(nn.Module):
    """Calls the norm of the model in it with whole sequences, too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = llama()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        inner: Any = self.inner
        before = inner.model.norm(inner.model.embed_tokens(ids))
        return inner.lm_head(inner.model(ids).last_hidden_state + before) + inner.lm_head(inner.model.norm(before))


@on_ranks(2)
def test_a_norm_that_is_called_with_whole_sequences_too(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    plain = Outside().double()
    model = copy.deepcopy(plain)
    assert trueshard.shard(model, tensor={"ranks": 2, "sequence": True}).sequence
    ids = torch.arange(22).view(2, 11)
    for each in (model, plain):
        each(ids).logsumexp(-1).square().mean().backward()
    assert distance(gradients(model), gradients(plain)) < EXACT


@on_ranks(2)
def test_of_one_sample_a_part_does_not_keep_the_whole(rank: int, world_size: int) -> None:
    """Bytes of each tensor with one row for each token of a part that backward keeps, and of the memory it lies in."""
    model = llama()
    trueshard.shard(model, tensor={"ranks": world_size, "sequence": True})
    kept: list[tuple[int, int]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim == 3 and tensor.shape[1] == 12 // world_size:
            kept.append((tensor.nbytes, tensor.untyped_storage().nbytes()))
        return tensor.detach()  # itself it would be a cycle with the node that made it

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.arange(12).view(1, 12), use_cache=False)
    assert kept
    assert all(taken == memory for taken, memory in kept)


@pytest.mark.rest
@pytest.mark.parametrize("words", [{}, FULL])
@on_ranks(3)
def test_two_models_in_flight_do_not_see_each_other(rank: int, world_size: int, words: dict[str, Any]) -> None:
    """A student whose pass is interrupted by that of a teacher with other sequences, and their backwards in turn."""

    def trained(shard: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        student, teacher = Plain().double(), Plain().double()
        for model in (student, teacher) if shard else ():
            trueshard.shard(model, tensor={"ranks": world_size, "sequence": True, **STYLES}, **words)
        ids, others = torch.arange(14).view(2, 7) % 13, torch.arange(10).view(2, 5) % 13
        answers: list[torch.Tensor] = []
        # The teacher's pass lies between two blocks of the student's: its length and its parts are others.
        hook = student.blocks[1].register_forward_pre_hook(lambda *_: answers.append(teacher(others)) or None)
        outputs = [student(ids), teacher(others.roll(1, 1))]
        hook.remove()
        for output in (*outputs, *answers):
            output.logsumexp(-1).square().mean().backward()
        return gradients(nn.ModuleDict({"student": student, "teacher": teacher}))

    assert distance(trained(True), trained(False)) < EXACT


class Short(Model):
    """Goes another way with long sequences than with those on which it is tried."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.is_long = ids.shape[1] > 99
        return super().forward(ids)

    def output(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x if self.is_long else self.norm(x))


@raises_on_ranks(2, naming("Short", "norm", "sequence"))
def test_a_pass_that_goes_another_way_than_was_tried_is_refused(rank: int, world_size: int) -> None:
    model = Short()
    assert last_norm(Index(model).modules, ["blocks.0", "blocks.1"]) == "norm"
    trueshard.shard(model, tensor={"ranks": world_size, "sequence": True, **STYLES})
    assert model(torch.zeros(1, 12, dtype=torch.int64)).shape == (1, 12, 13)
    model(torch.zeros(1, 120, dtype=torch.int64))
