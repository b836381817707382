"""Runs without a bug: models of the tests' catalogue in many ways to train, held against one process.

What is said of such a run is a false alarm. Every model is trained in one way, ways taking turns; language models share
matrices and sequences as well, mixtures their experts. A run that was stopped goes on from what it left in build/.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from benchmarks.silent import in_place as of_section
from benchmarks.silent.frame import STEPS, record
from benchmarks.silent.trial import Compared
from benchmarks.table import Table, Tell

ATTENTION = ("gpt_neo", "gptj", "codegen", "bloom", "falcon")
"""Models with an attention of their own, by which ranks cannot share sequences."""
PLAN = (*ATTENTION, "gpt2", "gpt_bigcode", "opt", "stablelm", "persimmon", "lora_plain_module", "lora_of_experts")
"""Models without a plan of how ranks share all that is trained."""
SAMPLES = 12
"""Of a step: they divide by 2, 3 and 4 ranks, and then by 3 or 1."""
ARITHMETIC = "mixed_precision", "exact"
"""Options that change it on one process, too: the reference has them."""
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Way:
    """A way to train that is one process's whole batch, up to the order of sums."""

    ranks: int = 2
    parts: int = 1
    """Microbatches of a step."""
    by: str = "shard"
    """What shards: "ddp", "fsdp2", "shard", or "" for nothing."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of ``shard()``."""
    kinds: tuple[str, ...] = ()
    """Of the models that every third is trained so beside its own way; none: it takes turns."""
    without: tuple[str, ...] = ()
    """Kinds of models, and models, that are not trained so: ``shard()`` refuses them, or see the note."""


WAYS = {
    "FSDP2": Way(by="fsdp2", without=("attachments",)),  # its gradient hooks are lost: that is no clean run
    "DDP": Way(by="ddp"),
    "DDP, accumulating": Way(by="ddp", parts=3),
    "one process, accumulating": Way(1, 3, by=""),
    "shard()": Way(),
    "shard(), 3 ranks": Way(3),
    "shard(), accumulating": Way(parts=3),
    "shard(), 2 replicas of 2 ranks": Way(4),
    "shard(exact=True)": Way(options={"exact": True}),
    "shard(mixed_precision='bf16')": Way(options={"mixed_precision": "bf16"}, without=("experts",)),
    "shard(activation_checkpointing='full')": Way(options={"activation_checkpointing": "full"}),
    "shard(compile=True)": Way(options={"compile": True}),
    "shard(offload='cpu')": Way(options={"offload": "cpu"}),
    "shard(tensor=2)": Way(options={"tensor": 2}, kinds=("decoder", "peft"), without=PLAN),
    "shard(context=2)": Way(options={"context": 2}, kinds=("decoder",), without=ATTENTION),
    "shard(experts=2)": Way(options={"experts": 2}, kinds=("experts",)),
}


def catalogue() -> dict[str, Any]:
    """Return the cases of the tests: how to make a small model, a batch for it, and its loss."""
    path = str(ROOT / "tests")
    if path not in sys.path:
        sys.path.append(path)
    from models import CASES

    return CASES


def pairs() -> Iterator[tuple[str, str]]:
    """Yield models and ways."""
    for turn, (way, one) in enumerate(WAYS.items()):
        fitting = [name for name, case in catalogue().items() if case.kind in one.kinds][turn % 3 :: 3]
        yield from ((name, way) for name in fitting if name not in one.without)
    turns = [way for way, one in WAYS.items() if not one.kinds]
    for number, (name, case) in enumerate(catalogue().items()):
        way = turns[number % len(turns)]
        yield name, way if not {name, case.kind} & {*WAYS[way].without} else turns[(number + 1) % len(turns)]


class Sequences(nn.Module):
    """A language model that takes this rank's part of whole sequences, and returns its part of the loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, **batch: Any) -> Any:
        import trueshard

        part = trueshard.split_sequence(self.inner, batch)
        mean = trueshard.token_mean(self.inner, trueshard.count_targets(part["labels"], shifted=False))
        return self.inner(**part, num_items_in_batch=mean.divisor)


def train(name: str, way: str, alone: bool = False) -> None:
    """Train a case in that way on this rank; ``alone``: as the reference of it."""
    case, one, rank, ranks = catalogue()[name], WAYS[way], dist.get_rank(), dist.get_world_size()
    model = case.build(0)
    optimizer = AdamW(model.parameters(), lr=1e-3, foreach=False)
    called, apart = model, functools.partial(nullcontext[None])
    options = {key: value for key, value in one.options.items() if not alone or key in ARITHMETIC}
    if one.by == "ddp" and not alone:
        called = DistributedDataParallel(model, find_unused_parameters=True)
        apart = called.no_sync
    elif one.by == "fsdp2" and not alone:
        fully_shard(model)
        optimizer = AdamW(model.parameters(), lr=1e-3, foreach=False)
    elif one.by == "shard" and (options or not alone):
        import trueshard

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if ranks == 4 else None
        trueshard.shard(model, optimizer, mesh=mesh, **options)
        apart = functools.partial(trueshard.accumulate, model, last=False)
    if "context" in one.options:
        called = model = Sequences(model)
    record(model, optimizer)
    readers = ranks // (options.get("tensor", 1) * options.get("context", 1))
    for step in range(STEPS):
        batch = case.batch(SAMPLES, step)
        mine = {key: value.chunk(readers)[rank % readers] for key, value in batch.items()}
        parts = 1 if alone else one.parts
        for part in range(parts):
            context: Callable[[], AbstractContextManager[Any]] = nullcontext if part == parts - 1 else apart
            with context():
                loss = case.loss(called, {key: value.chunk(parts)[part] for key, value in mine.items()})
                (loss / parts).backward()
        optimizer.step()
        optimizer.zero_grad()


def compared(name: str, way: str) -> dict[str, str]:
    """Return what is said of a model that is trained in that way."""
    with tempfile.TemporaryDirectory() as folder:
        compare = Compared(functools.partial(train, name, way), Path(folder), alone=True)
        differences = compare.of(WAYS[way].ranks)
    cell = "no alarm" if not differences.differs else "alarm" if differences.where else differences.words
    return {"model": name, "way": way, "cell": cell, "words": differences.words}


def run(tell: Tell, quick: bool = False) -> Table:
    """Train all models; ``quick``: the first."""
    left = _left()
    rows = [json.loads(line) for line in left.read_text("utf-8").splitlines()] if left.exists() else []
    wanted = list(pairs())[: 1 if quick else None]
    rows = [row for row in rows if (row["model"], row["way"]) in wanted]
    missing = [pair for pair in wanted if pair not in {(row["model"], row["way"]) for row in rows}]
    left.parent.mkdir(exist_ok=True)
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("spawn")) as pool, left.open("a") as file:
        for result in as_completed([pool.submit(compared, *pair) for pair in missing]):
            row = result.result()
            rows.append(row)
            print(json.dumps(row), file=file, flush=True)
            tell(f"{len(rows)}/{len(wanted)} {row['model']}, {row['way']}: {row['words'] or row['cell']}")
    left.unlink()
    rows.sort(key=lambda row: wanted.index((row["model"], row["way"])))
    return _table(rows)


def _left() -> Path:
    """Return the file that holds what was done with this version of the library."""
    files = sorted(ROOT.glob("src/trueshard/**/*.py"))
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]
    return ROOT / "build" / f"silent_clean-{digest}.jsonl"


def _table(rows: list[dict[str, str]]) -> Table:
    cells = []
    for way, one in WAYS.items():
        mine = [row for row in rows if row["way"] == way]
        wrong = "; ".join(f"{row['model']}: {row['words']}" for row in mine if row["cell"] != "no alarm")
        cells.append((way, str(one.ranks), str(len(mine)), ", ".join(row["model"] for row in mine), wrong or "none"))
    alarms = sum(row["cell"] == "alarm" for row in rows)
    planned = len(list(pairs()))
    some = "" if len(rows) == planned else f" of {planned}"
    ended = sum(row["cell"] not in ("alarm", "no alarm") for row in rows)
    return Table(
        name="silent_clean",
        title="Clean runs, and what is said of them",
        note=(
            f"{len({row['model'] for row in rows})} models of the tests' catalogue, {STEPS - 1} steps of AdamW on gloo "
            f"processes, held against one process by `verify_runs`: {len(rows)} runs{some}, {alarms} false alarms, "
            f"{ended} that did not end as they should. In bf16 and with exact sums the one process computes so, too. "
            "Mixtures are not trained in bf16: which expert gets a token may fall either way by rounding; that is said."
        ),
        columns=("trained by", "ranks", "runs", "models", "alarms"),
        rows=tuple(cells),
        numbers=rows,
        words=True,
    )


in_place = of_section
