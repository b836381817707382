"""Contract line 10: a checkpoint means the same at any world size and in any layout, and resumes bitwise at its own.

Every setup is trained, saved, and trained on. Processes that were started afterwards load it over models and optimizers
whose every number was overwritten. What a load must bring back is held against what was there when ``save`` was called,
on every rank, to the last bit. Every setup is saved at two or three world sizes, and each size loads its own and one
other; the rest takes two setups from every layout to every other.
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import trueshard
from checkpointing import LAYOUTS, SETUPS, attempted, draw, everything, go_on, scribble, seed, started
from parity import Pool, Ranks, assert_same

FEW = ("without dimensions", "Muon and SGD")
"""setups that the rest saves and loads in every layout, not only at some world sizes"""
PAIRS = (("1", "3"), ("2", "4"), ("1", "2"), ("2", "3"))
"""world sizes that the other setups take in turn"""
FIRST = "by owner and by element"
"""the setup that is not of the rest"""
COMPILED = ("without dimensions",)
COMPILED_LAYOUT = "compiled"
PROGRESS = {"step": 3, "rate": 0.1, "seen": {7: [1, None, "two"], "pair": (1, 2.5)}}

Outcome = dict[tuple[str, str, str], str]
"""(setup, layout saved in, layout loaded in) → why it failed, or nothing"""


def _layouts(name: str, how: str) -> list[str]:
    """Where a setup is saved and loaded."""
    if how == "layouts":
        return [layout for layout in LAYOUTS if layout != COMPILED_LAYOUT or name in COMPILED]
    return ["1", "2", "3"] if name == FIRST else list(PAIRS[list(SETUPS).index(name) % len(PAIRS)])


def _sources(name: str, layout: str, how: str) -> list[str]:
    """What a layout loads. Its own comes first: of the others nothing can be left over in it."""
    layouts = _layouts(name, how)
    place = layouts.index(layout)
    turned = layouts[place:] + layouts[:place]
    return turned[:2] if how == "short" else [each for each in turned if each == layout or _is_of(name, layout, each)]


def _is_of(name: str, one: str, two: str) -> bool:
    """Whether this setup goes from the one layout to the other: each pair is of one of the few, and of each layout it
    has every second."""
    places = list(LAYOUTS)
    if COMPILED_LAYOUT in (one, two):
        return name in COMPILED
    return (places.index(one) + places.index(two) + FEW.index(name)) % 2 == 1


def save_all(rank: int, world_size: int, folder: str, layout: str, names: list[str]) -> dict[str, str]:
    """Each setup trained for two steps, saved, and trained for two more; the traceback of each that failed."""
    return {name: attempted(_save_one, rank, world_size, Path(folder), layout, name) for name in names}


def _save_one(rank: int, world_size: int, folder: Path, layout: str, name: str) -> None:
    setup = SETUPS[name]
    model, optimizer = started(setup, LAYOUTS[layout])
    seed(rank)
    go_on(setup, model, optimizer, rank, world_size, range(2))
    expected = {"saved": everything(model, optimizer)}
    weights = torch.arange(10.0) + 1
    trueshard.save(folder / name / layout, model=model, optimizer=optimizer, progress=PROGRESS, weights=weights)
    go_on(setup, model, optimizer, rank, world_size, [2])
    expected["next"] = everything(model)
    go_on(setup, model, optimizer, rank, world_size, [3])
    expected["later"] = everything(model, optimizer) | {"random": draw()}
    torch.save(expected, folder / name / f"{layout}.rank{rank}.pt")


def load_all(rank: int, world_size: int, folder: str, layout: str, names: list[str], how: str) -> Outcome:
    """Each setup loaded from the layouts that it was saved in."""
    outcome: Outcome = {}
    for name in names:
        try:
            model, optimizer = started(SETUPS[name], LAYOUTS[layout])
        except Exception:
            outcome[name, layout, layout] = traceback.format_exc()
            continue
        for source in _sources(name, layout, how):
            outcome[name, source, layout] = attempted(
                _load_one, rank, world_size, Path(folder), layout, name, source, model, optimizer
            )
    return outcome


def _load_one(
    rank: int, world_size: int, folder: Path, layout: str, name: str, source: str, model: Any, optimizer: Any
) -> None:
    setup = SETUPS[name]
    theirs = rank if layout == source else 0
    expected = torch.load(folder / name / f"{source}.rank{theirs}.pt", weights_only=False)
    scribble(model, optimizer)
    seed(rank + 100)
    result = trueshard.load(folder / name / source, model=model, optimizer=optimizer)
    assert_same(dict(result), {"progress": PROGRESS, "weights": torch.arange(10.0) + 1})
    assert_same(everything(model, optimizer), expected["saved"])
    go_on(setup, model, optimizer, rank, world_size, [2])
    if layout == source:
        go_on(setup, model, optimizer, rank, world_size, [3])
        assert_same(everything(model, optimizer) | {"random": draw()}, expected["later"])
    elif setup.near:
        assert_same(everything(model), expected["next"], rtol=setup.near, atol=setup.near)


def _tried(pool: Pool, folder: Path, names: Iterable[str], how: str) -> Outcome:
    """All that is saved, loaded by other processes than those that saved it."""
    result: Outcome = {}
    for name in names:
        (folder / name).mkdir()
    ways = {layout: [name for name in names if layout in _layouts(name, how)] for layout in LAYOUTS}
    ways = {layout: some for layout, some in ways.items() if some}
    for key, some in ways.items():
        ranks = Ranks(LAYOUTS[key].ranks, pool)
        for rank, each in enumerate(ranks.run(save_all, str(folder), key, some, timeout=120)):
            result |= {(n, key, f"nothing: rank {rank} did not save it"): text for n, text in each.items() if text}
    pool.drop(list(pool.workers.values()))
    for key, some in ways.items():
        ranks = Ranks(LAYOUTS[key].ranks, pool)
        for rank, each in enumerate(ranks.run(load_all, str(folder), key, some, how, timeout=120)):
            for pair, failure in each.items():
                if failure or pair not in result:
                    result[pair] = f"rank {rank}: {failure}" if failure else ""
    return result


def _hold(outcome: Outcome, name: str, pairs: Iterable[tuple[str, str]]) -> None:
    wanted = {(name, *pair): outcome.get((name, *pair), "did not run") for pair in pairs}
    assert wanted
    failed = {key: text for key, text in (outcome | wanted).items() if key[0] == name and text}
    failed = {key: text for key, text in failed.items() if key in wanted or key[2].startswith("nothing")}
    lines = [f"{name}: saved as {one}, loaded as {two}: {text}" for (_, one, two), text in failed.items()]
    assert not failed, f"{len(failed)} failed; " + "\n".join(lines[:3])


def test_the_same_world_size_resumes_bitwise_and_another_loads_the_identical_state(pool: Pool, tmp_path: Path) -> None:
    """Two steps, saved, two more: as two more in new processes that loaded it. Random numbers go on too."""
    _hold_short([FIRST], pool, tmp_path)


def _hold_short(names: list[str], pool: Pool, folder: Path) -> None:
    outcome = _tried(pool, folder, names, "short")
    for name in names:
        _hold(outcome, name, [(one, two) for two in _layouts(name, "short") for one in _sources(name, two, "short")])


@pytest.mark.rest
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FEW)
def test_any_layout_loads_into_any_other(name: str, pool: Pool, tmp_path: Path) -> None:
    """Not sharded, replicated and sharded, offloaded, compiled: each into each, and each resumes bitwise."""
    outcome = _tried(pool, tmp_path, [name], "layouts")
    _hold(outcome, name, [(one, two) for two in _layouts(name, "layouts") for one in _sources(name, two, "layouts")])


def test_some_setup_goes_from_every_layout_to_every_other() -> None:
    taken = {(one, two) for name in FEW for two in _layouts(name, "layouts") for one in _sources(name, two, "layouts")}
    assert taken == set(itertools.product(LAYOUTS, repeat=2))


@pytest.mark.rest
@pytest.mark.timeout(900)
def test_every_setup_goes_to_another_world_size(pool: Pool, tmp_path: Path) -> None:
    """All others, in the same processes."""
    _hold_short([name for name in SETUPS if name not in (*FEW, FIRST)], pool, tmp_path)
