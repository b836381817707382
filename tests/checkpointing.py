"""What the tests of checkpoints share: models and optimizers, how they train, and all that a checkpoint must keep.

- A ``Setup`` is built alike on every rank; ``started`` shards it as a ``Layout`` says. What is special about each one
  stands beside it.
- ``everything`` is the whole state, gathered, by the names of the user: two of them are equal or they are not.
- ``scribble`` overwrites all of it, so that nothing can be right after a load that the load did not write.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import trueshard
from gathering import whole_of_all
from models import CASES, rows
from models.handmade import Scalar, Stack, Tiny
from stepping import EPS, Mixed, Whole, matrices, vectors

SAMPLES = 12
"""rows of the global batch: divides by 1, 2, 3 and 4 ranks"""

Model = nn.Module | dict[str, nn.Module]
Optimizer = torch.optim.Optimizer | dict[str, torch.optim.Optimizer]


@dataclass(frozen=True)
class Setup:
    """A model, or several, and what trains it."""

    build: Callable[[], Model]
    optimizer: Callable[[Any], Optimizer]
    case: str = "stack"
    """whose batches and loss it takes, see ``models.CASES``"""
    near: float | None = 2e-3
    """how far parameters may be after one more step at another world size; None: it draws random numbers"""

    def loss(self, model: nn.Module, step: int, rank: int, world_size: int) -> torch.Tensor:
        case, dtype = CASES[self.case], next(model.parameters()).dtype
        batch = rows(case.batch(SAMPLES, step), rank, world_size)
        return case.loss(model, {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()})


@dataclass(frozen=True)
class Layout:
    """How many ranks there are, and what ``shard`` is told."""

    ranks: int
    words: dict[str, Any] = field(default_factory=dict)
    sharded: bool = True


LAYOUTS: dict[str, Layout] = {
    "1": Layout(1),
    "2": Layout(2),
    "3": Layout(3),
    "4": Layout(4),
    "unsharded": Layout(1, sharded=False),
    "2 × 2": Layout(4, {"mesh": (2, 2)}),
    "offload": Layout(2, {"offload": "cpu"}),
    "compiled": Layout(2, {"compiled": True}),
}


class Noisy(Stack):
    """Draws random numbers in every forward, as dropout does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.dropout(x, 0.3, self.training))


class TwoPrecisions(torch.optim.Optimizer):
    """Element-wise, with state of other dtypes than its parameters': float32, int64 and bool beside bfloat16."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p, dtype=torch.float32)
                    state["falls"] = torch.zeros_like(p, dtype=torch.int64)
                    state["rising"] = torch.zeros_like(p, dtype=torch.bool)
                state["mean"].lerp_(p.grad.float(), 0.5)
                state["falls"].add_(p.grad < 0)
                state["rising"].copy_(p.grad > 0)
                p.sub_((group["lr"] * state["mean"]).to(p.dtype))


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    """Over what is trainable: two groups of different settings, the second in reverse order."""
    members = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": members[::2]}, {"params": members[1::2][::-1], "lr": 0.02, "tag": "second"}]
    return torch.optim.AdamW(groups, **{"lr": 0.01, "eps": EPS} | options)


def sgd(model: nn.Module, momentum: float = 0.9) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=momentum)


def _of(case: str) -> Callable[[], nn.Module]:
    return lambda: CASES[case].build(0)


def _seeded(build: Callable[[], Any]) -> Callable[[], Any]:
    def built() -> Any:
        torch.manual_seed(0)
        return build()

    return built


def _setup(case: str, optimizer: Callable[[Any], Optimizer] = adamw, near: float | None = 2e-3) -> Setup:
    return Setup(_of(case), optimizer, case, near)


def _several(models: dict[str, nn.Module]) -> dict[str, torch.optim.Optimizer]:
    """Two optimizers over parts of one model, and a third over the other."""
    actor, critic = models["actor"], models["critic"]
    ends = [*actor.last.parameters(), *actor.first.parameters()]
    return {
        "blocks": adamw(actor.blocks),
        "ends": torch.optim.SGD(ends, lr=0.02, momentum=0.9),
        "critic": torch.optim.Adagrad(critic.parameters(), lr=0.02, eps=EPS),
    }


SETUPS: dict[str, Setup] = {
    "fewer rows than ranks": _setup("tiny"),
    "odd convolutions, amsgrad": _setup("convolutions", lambda model: adamw(model, amsgrad=True)),
    "bf16": Setup(_seeded(lambda: Stack().bfloat16()), adamw, near=None),
    "bf16, state in float32 and integers": Setup(
        _seeded(lambda: Stack().bfloat16()), lambda m: TwoPrecisions(m.parameters()), near=None
    ),
    "mixed dtypes": _setup("mixed", near=None),
    "not contiguous": _setup("strided", sgd),
    "frozen tower": _setup("frozen_tower"),
    "frozen beside trainable": _setup("frozen_inside", sgd),
    "never used": _setup("sometimes", lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, eps=EPS)),
    "tied": _setup("tied_language_model"),
    "tied across blocks": _setup("tied_blocks", sgd),
    "without dimensions": Setup(_seeded(Scalar), adamw),
    "buffers, no momenta": _setup("buffers", lambda model: sgd(model, momentum=0.0)),
    "experts": _setup("experts"),
    "dropout": Setup(_seeded(Noisy), adamw, near=None),
    "Llama": _setup("llama"),
    "Mixtral": _setup("mixtral", near=None),
    "LoRA": _setup("lora"),
    "Adafactor": Setup(_seeded(Tiny), lambda model: torch.optim.Adafactor(model.parameters(), lr=0.02), near=1e-2),
    "Muon and SGD": Setup(
        _seeded(Scalar),
        lambda m: {
            "muon": torch.optim.Muon(matrices(m), lr=0.02),
            "sgd": torch.optim.SGD(vectors(m), lr=0.02, momentum=0.9),
        },
        near=1e-2,
    ),
    "nested state, by owner": Setup(_seeded(Tiny), lambda model: Whole(model.parameters(), lr=0.02), near=1e-2),
    "by owner and by element": Setup(
        _seeded(Stack),
        lambda m: Mixed([{"params": matrices(m), "whole": True}, {"params": vectors(m)}], lr=0.02),
        near=1e-2,
    ),
    "several": Setup(_seeded(lambda: {"actor": Stack(depth=2), "critic": Tiny()}), _several, near=1e-2),
}


def named(value: Any) -> dict[str, Any]:
    """One or several, as several."""
    return dict(value) if isinstance(value, Mapping) else {"": value}


def words_of(layout: Layout) -> dict[str, Any]:
    """The arguments of ``shard``, with a mesh in the place of its shape."""
    words = dict(layout.words)
    if "mesh" in words:
        words["mesh"] = init_device_mesh("cpu", words["mesh"], mesh_dim_names=("replicate", "shard"))
    return words


def started(setup: Setup, layout: Layout) -> tuple[Any, Any]:
    """The model and the optimizer, sharded."""
    model = setup.build()
    words = words_of(layout)
    if words.pop("compiled", False):
        model = {key: torch.compile(each, backend="aot_eager") for key, each in named(model).items()}
        model = model.get("", model)
    optimizer = setup.optimizer(model)
    if layout.sharded:
        optimizers = list(named(optimizer).values())
        for each in named(model).values():
            mine = {id(p) for p in each.parameters()}
            of_it = [o for o in optimizers if all(id(p) in mine for g in o.param_groups for p in g["params"])]
            trueshard.shard(each, *of_it, **words)
    return model, optimizer


def go_on(setup: Setup, model: Any, optimizer: Any, rank: int, world_size: int, steps: Iterable[int]) -> None:
    """Train every model on the batches of ``steps``."""
    for step in steps:
        for each in named(model).values():
            setup.loss(each, step, rank, world_size).backward()
        for each in named(optimizer).values():
            each.step()
            each.zero_grad()


def _ties(model: nn.Module) -> list[list[str]]:
    names_of: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
    return [names for names in names_of.values() if len(names) > 1]


def everything(model: Any, optimizer: Any = None) -> dict[str, Any]:
    """All that a checkpoint keeps of models and optimizers, gathered. Collective.

    Tensors of the state dict, dtypes with them; ties; what is trainable; groups with their settings; state by name.
    """
    name_of: dict[int, str] = {}
    report: dict[str, Any] = {}
    for key, each in named(model).items():
        for name, parameter in each.named_parameters():
            name_of.setdefault(id(parameter), f"{key}/{name}" if key else name)
        report[f"model {key}"] = {
            "tensors": dict(each.state_dict()),
            "ties": _ties(each),
            "trainable": {name: p.requires_grad for name, p in each.named_parameters()},
        }
    for key, each in ({} if optimizer is None else named(optimizer)).items():
        groups = [
            {k: [name_of[id(p)] for p in v] if k == "params" else v for k, v in group.items()}
            for group in each.param_groups
        ]
        state = {name_of[id(p)]: each.state[p] for g in each.param_groups for p in g["params"] if each.state.get(p)}
        report[f"optimizer {key}"] = {"groups": groups, "state": state}
    states = whole_of_all(report)
    mine = states[dist.get_rank() if dist.is_initialized() else 0]
    for key in mine:
        if key.startswith("optimizer"):  # what is updated by its owner, only its owner has
            state = {name: entries for theirs in states for name, entries in theirs[key]["state"].items()}
            state |= mine[key]["state"]
            mine[key]["state"] = {name: dict(sorted(state[name].items())) for name in sorted(state)}
    return mine


@torch.no_grad()
def scribble(model: Any, optimizer: Any = None) -> None:
    """Overwrite every tensor that a state dict has, the state of optimizers, and the numbers in their groups."""
    for each in named(model).values():
        for value in each.state_dict().values():
            (value.to_local() if isinstance(value, DTensor) else value).fill_(3)
    for each in ({} if optimizer is None else named(optimizer)).values():
        for group in each.param_groups:
            group["lr"] = 77.0
        for state in each.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    (value.to_local() if isinstance(value, DTensor) else value).fill_(1)


def attempted(function: Callable[..., Any], *args: Any) -> str:
    """The traceback of a function that failed; nothing if it did not."""
    try:
        function(*args)
    except Exception:
        return traceback.format_exc(limit=-6)
    return ""


def seed(number: int) -> None:
    """Every generator that ``draw`` draws from."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 (the generator that libraries draw from)


def draw() -> dict[str, Any]:
    """A number or more from each generator."""
    return {"torch": torch.rand(3), "random": random.random(), "numpy": float(np.random.rand())}  # noqa: NPY002


def hub_model(name: str) -> Any:
    """A tiny transformers model of the catalogue, or (``tied_llama``) a Llama whose embeddings are tied."""
    model: Any = CASES[name.removeprefix("tied_")].build(0)
    if name.startswith("tied_"):
        model.config.tie_word_embeddings = True
        torch.manual_seed(0)
        model = type(model)(model.config).train()
    return model


def tokenizer() -> Any:
    """A tokenizer of five words: "to" is 3, "shard" is 4."""
    import tokenizers
    import transformers

    words = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", "to", "shard"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>")


@torch.no_grad()
def logits(model: nn.Module, name: str) -> torch.Tensor:
    return model.eval()(**CASES[name.removeprefix("tied_")].batch(4, 7)).logits
