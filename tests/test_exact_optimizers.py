"""Every optimizer with ``shard(exact=True)``: the same bits at 1, 2 and 3 ranks, or refused by name.

python tests/test_exact_optimizers.py                 # the table of docs/how-to/exact.md, printed
python tests/test_exact_optimizers.py Muon SOAP Lion  # these alone
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import trueshard
from exactness import dealt
from optimizer_catalogue import Entry, entries
from optimizer_trial import SAMPLES, batch, build, stepped
from parity import Pool, RankFailure, Ranks

MICROBATCHES = 6
"""of a step: divides by 1, 2 and 3 ranks"""
TEN = ("AdaFactor", "Adan", "CAME", "Lamb", "LARS", "Lion", "Muon", "Shampoo", "ScheduleFreeAdamW", "SOAP")
"""Of pytorch_optimizer: on shards and by owners, with norms of whole parameters, factors, preconditioners."""
DRAWING = ("Alice", "DASH", "Gravity", "RACS")
"""Of the same, those that draw random numbers."""


def names() -> list[tuple[str, str]]:
    torchs = [("torch.optim", name) for name in entries("torch.optim")]
    others = entries("pytorch_optimizer")
    return torchs + [("pytorch_optimizer", name) for name in (*TEN, *DRAWING) if name in others]


def trained(rank: int, world_size: int, entry: Entry) -> dict[str, Any]:
    """Hashes of parameters and state after the entry's steps, or how it was refused."""
    model = build(entry)
    optimizers = entry.make(model)
    try:
        trueshard.shard(model, *optimizers, units="Linear", exact=True)
    except ValueError as error:
        return {"refused": str(error)}
    own = dealt(rank, world_size, MICROBATCHES)
    for step in range(entry.special.steps):
        mean = trueshard.token_mean(model, SAMPLES // world_size)

        def loss(number: int, step: int = step, mean: Any = mean) -> torch.Tensor:
            x, y = batch(step, number, MICROBATCHES)
            summed: torch.Tensor = mean((model(x, step % 2 == 0) - y).square().sum())
            return summed

        def forward(loss: Any = loss) -> torch.Tensor:
            for number in own[:-1]:
                with trueshard.accumulate(model, last=False):
                    loss(number).backward()
            last: torch.Tensor = loss(own[-1])
            return last

        entry.take(model, optimizers, forward)
    entry.finish(optimizers)
    whole = {str(number): optimizer for number, optimizer in enumerate(optimizers)}
    return {"hashes": dict(trueshard.state_hash(model, whole)), "way": stepped(optimizers[0])}


def several(rank: int, world_size: int, given: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    found = []
    for library, name in given:
        with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
            warnings.simplefilter("ignore")
            try:
                found.append(trained(rank, world_size, entries(library)[name]))
            except Exception as error:
                if world_size > 1:
                    raise
                found.append({"alone": f"{type(error).__name__}: {str(error).splitlines()[0]}"})
    return found


def compared(pool: Pool, given: Sequence[tuple[str, str]], counts: Sequence[int] = (2, 3)) -> list[str]:
    """What became of each: "same bits, on shards", "refused: …", "differs: …", "does not run: …"."""
    (one,) = Ranks(1, pool).run(several, given, timeout=600)
    runnable = [each for each, told in zip(given, one, strict=True) if "alone" not in told]
    many = {count: Ranks(count, pool).run(several, runnable, timeout=600)[0] for count in counts}
    found = []
    for each, told in zip(given, one, strict=True):
        if "alone" in told:
            found.append(f"does not run on one device: {told['alone']}")
            continue
        others = [many[count][runnable.index(each)] for count in counts]
        if "refused" in told:
            found.append(f"refused: {told['refused'].partition(': ')[2].rpartition('; ')[0]}")
        elif all(other["hashes"] == told["hashes"] for other in others):
            found.append(f"same bits, {others[0]['way']}")
        else:
            keys = [
                key for other in others for key in told["hashes"] if other["hashes"].get(key) != told["hashes"][key]
            ]
            found.append(f"differs: {', '.join(dict.fromkeys(keys))[:90]} ({others[0]['way']})")
    return found


QUICK = [("torch.optim", "AdamW"), ("torch.optim", "Muon")]
REFUSED = {"fused=True", "differentiable=True", "LBFGS", "SparseAdam"}
ALONE = {"capturable=True"}


def batches() -> list[object]:
    """(names, numbers of ranks): the rest at 3 ranks, where parts are uneven."""
    every = [each for each in names() if each not in QUICK]
    parts = [every[at : at + 12] for at in range(0, len(every), 12)]
    return [(QUICK, (2, 3)), *(pytest.param(part, (3,), marks=pytest.mark.rest) for part in parts)]


@pytest.mark.rest
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("given", "counts"), batches(), ids=lambda each: f"{each[0][1]} and more" if isinstance(each, list) else ""
)
def test_an_optimizer_has_the_same_bits_at_any_number_of_ranks(
    given: Sequence[tuple[str, str]], counts: Sequence[int], pool: Pool
) -> None:
    for (_, name), found in zip(given, compared(pool, given, counts), strict=True):
        refused = any(word in name for word in REFUSED)
        alone = any(word in name for word in ALONE)
        expected = "refused: " if refused else "does not run" if alone else "same bits"
        assert found.startswith(expected), (name, found)


def main() -> None:
    wanted = [each for each in names() if len(sys.argv) == 1 or each[1] in sys.argv[1:]]
    pool = Pool()
    for start in range(0, len(wanted), 12):
        part = wanted[start : start + 12]
        try:
            for (library, name), words in zip(part, compared(pool, part), strict=True):
                print(f"| `{library}` | `{name}` | {words} |", flush=True)
        except RankFailure as error:
            print(error, flush=True)
    pool.close()


if __name__ == "__main__":
    import test_exact_optimizers  # whose functions workers find by name

    test_exact_optimizers.main()
