"""Damaged checkpoints: what check finds, what load refuses, and that a load that fails has changed nothing."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import trueshard
from damage import (
    MANIFEST,
    Notes,
    build,
    files_of,
    flipped,
    load_damaged,
    load_plain,
    photograph,
    place_of,
    problems,
    values,
)
from messages import naming
from parity import Ranks


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of step 1."""
    model, optimizer = build(1)
    trueshard.save(tmp_path / "saved", model=model, optimizer=optimizer, notes=Notes(1))
    return tmp_path / "saved"


def test_latest_is_the_newest_checkpoint(saved: Path, tmp_path: Path) -> None:
    saved.rename(tmp_path / "step-00000001")
    assert trueshard.check(tmp_path / "latest").where == str(tmp_path / "step-00000001")
    with pytest.raises(FileNotFoundError, match=naming("elsewhere", "no complete checkpoint")):
        trueshard.check(tmp_path / "elsewhere" / "latest")


# ---- Files that were damaged.


def test_a_file_cut_short_or_too_long(saved: Path) -> None:
    for file in files_of(saved):
        data = file.read_bytes()
        for size in sorted({0, 1, 7, 8, 9, len(data) // 2, len(data) - 1, len(data) + 1, len(data) + 4096}):
            file.write_bytes((data + bytes(4096))[:size])
            assert file.name in problems(saved), f"{file.name} cut to {size}"
            message = load_damaged(saved)
            if size < len(data):
                assert file.name in message, f"{file.name} cut to {size}: {message!r}"
        file.write_bytes(data)
    assert trueshard.check(saved)


def test_a_file_that_is_missing(saved: Path, tmp_path: Path) -> None:
    for file in files_of(saved):
        file.rename(tmp_path / "aside")
        with pytest.raises((trueshard.DamagedCheckpoint, FileNotFoundError), match=file.name):
            trueshard.check(saved)
        assert load_damaged(saved)
        (tmp_path / "aside").rename(file)
    assert trueshard.check(saved)


def _error_of(function: Callable[..., Any], path: Path, **words: Any) -> str:
    """The message of what it raises, if that is documented; empty if nothing."""
    try:
        function(path, **words)
    except (ValueError, FileNotFoundError) as error:
        return str(error)
    return ""


def bytes_to_flip(path: Path) -> list[tuple[Path, int]]:
    """Every byte of every file; but inside the random states, which are most of a checkpoint so small, every tenth."""
    found = [(file, at) for file in files_of(path) for at in range(file.stat().st_size)]
    (states,) = json.loads((path / MANIFEST).read_text())["tensors"]["rng"]["pieces"]
    begin, end = states["begin"] + 8, states["end"] - 8
    return [(file, at) for file, at in found if file.name != states["file"] or at % 10 == 0 or not begin <= at < end]


def flip(rank: int, world_size: int, folder: str) -> int:
    """Flip one bit of every byte whose turn is this rank's; how many."""
    path = Path(folder, f"copy{rank}")
    shutil.copytree(Path(folder, "saved"), path)
    files = bytes_to_flip(path)
    model, optimizer = build(2)
    old = photograph(model, optimizer)
    right = values(*build(1))
    for number, (file, at) in enumerate(files[rank::world_size]):
        place = f"{file.name}, byte {at}"
        loads = number % 9 == 0
        with flipped(file, at, 1 << number % 8):
            found = _error_of(trueshard.check, path)
            assert found, f"{place}: not found"
            assert file.name in found, f"{place}: {found}"
            if loads:
                words = {"model": model, "optimizer": optimizer, "notes": Notes(0)}
                refused = _error_of(trueshard.load, path, **words)
                assert not refused or file.name in refused, f"{place}: {refused}"
        if loads and refused:
            assert photograph(model, optimizer) == old, place
        elif loads:
            assert values(model, optimizer) == right, place
            model, optimizer = build(2)
            old = photograph(model, optimizer)
    return len(files[rank::world_size])


@pytest.mark.rest
def test_every_flipped_byte_is_found(saved: Path, ranks2: Ranks) -> None:
    counts = ranks2.run(flip, str(saved.parent), group=False, timeout=200)
    assert sum(counts) == len(bytes_to_flip(saved))


@pytest.mark.parametrize(
    ("key", "file"),
    [
        ("model/hidden.weight", "model.safetensors"),
        ("model/scale", "model.safetensors"),
        ("optimizer/embed.weight/exp_avg", "optimizer.safetensors"),
        ("more/notes/curve", "extra.safetensors"),
    ],
)
def test_a_flipped_bit_is_laid_to_its_tensor(key: str, file: str, saved: Path) -> None:
    begin, _ = place_of(saved, key)
    with flipped(saved / file, begin, 1):
        assert [line for line in problems(saved).splitlines() if repr(key) not in line or file not in line] == []
        message = load_damaged(saved)
        assert repr(key) in message
        assert file in message


def test_a_flipped_bit_in_a_remote_store(tmp_path: Path) -> None:
    import fsspec

    url = "memory://faults/flipped"
    model, optimizer = build(1)
    trueshard.save(url, model=model, optimizer=optimizer, notes=Notes(1))
    assert trueshard.check(url)
    store = fsspec.filesystem("memory")
    (name,) = [each for each in store.find("/faults/flipped") if each.endswith(".safetensors")]
    data = bytearray(store.cat_file(name))
    data[-1] ^= 16
    store.pipe_file(name, bytes(data))
    with pytest.raises(trueshard.DamagedCheckpoint, match=Path(name).name):
        trueshard.check(url)
    model, optimizer = build(2)
    before = photograph(model, optimizer)
    with pytest.raises(ValueError, match=Path(name).name):
        trueshard.load(url, model=model, optimizer=optimizer, notes=Notes(2))
    assert photograph(model, optimizer) == before


@pytest.mark.parametrize("length", [0, 1, 7, 2**31, 2**63, 2**64 - 1, "-1", "+1", "+8", "file"])
def test_a_header_that_lies_about_its_length(length: int | str, saved: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain" / "model.safetensors"
    plain.parent.mkdir()
    save_file({name: tensor.clone() for name, tensor in dict(build(1)[0].named_parameters()).items()}, plain)
    for file in (saved / "model.safetensors", saved / "optimizer.safetensors", saved / "extra.safetensors", plain):
        data = file.read_bytes()
        (true,) = struct.unpack("<Q", data[:8])
        said = len(data) if length == "file" else true + int(length) if isinstance(length, str) else length
        file.write_bytes(struct.pack("<Q", said) + data[8:])
        if file is plain:
            assert file.name in load_plain(plain.parent)
        else:
            assert file.name in problems(saved)
            load_damaged(saved)
        file.write_bytes(data)


# ---- Loads that fail on the way.


def save_of_two(rank: int, world_size: int, folder: str) -> None:
    trueshard.save(folder, **parts(1, world_size))


def parts(step: int, world_size: int) -> dict[str, Any]:
    model, optimizer = build(step, world_size)
    return {"model": model, "optimizer": optimizer, "notes": Notes(step)}


def load_of_two(rank: int, world_size: int, folder: str) -> str:
    """The error, before and after which model, optimizer and the user's own entry are the same."""
    given = parts(2, world_size)
    before = photograph(given["model"], given["optimizer"])
    try:
        trueshard.load(folder, **given)
    except (ValueError, RuntimeError) as error:
        assert photograph(given["model"], given["optimizer"]) == before
        assert given["notes"].step == 2
        return f"{type(error).__name__}: {error}"
    raise AssertionError("it was loaded")


@pytest.mark.parametrize("where", [0, -1], ids=["in the first rank's rows", "in the last rank's rows"])
@pytest.mark.parametrize("key", ["model/embed.weight", "optimizer/norm.weight/exp_avg_sq"])
def test_damage_on_one_rank_fails_the_load_on_all(key: str, where: int, tmp_path: Path, ranks2: Ranks) -> None:
    path = tmp_path / "saved"
    ranks2.run(save_of_two, str(path))
    begin, end = place_of(path, key)
    file = "optimizer.safetensors" if key.startswith("optimizer") else "model.safetensors"
    with flipped(path / file, begin if where == 0 else end - 1, 2):
        errors = ranks2.run(load_of_two, str(path))
    assert all(key in error and file in error for error in errors), errors


class Stubborn(Notes):
    """Refuses what it is given."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("stubborn")


def test_an_entry_that_refuses_its_state_leaves_the_rest_as_it_was(saved: Path) -> None:
    model, optimizer = build(2)
    before = photograph(model, optimizer)
    with pytest.raises(KeyError, match="stubborn"):
        trueshard.load(saved, model=model, optimizer=optimizer, notes=Stubborn(2))
    assert photograph(model, optimizer) == before


def refused_by_one(rank: int, world_size: int, folder: str) -> None:
    """One rank's entry refuses its state; no rank's model is changed."""
    given = parts(2, world_size)
    before = photograph(given["model"], given["optimizer"])
    given["notes"] = Stubborn(2) if rank == 1 else Notes(2)
    try:
        trueshard.load(folder, **given)
    finally:
        assert photograph(given["model"], given["optimizer"]) == before


def test_an_entry_that_refuses_its_state_on_one_rank_leaves_all_as_they_were(tmp_path: Path, ranks2: Ranks) -> None:
    ranks2.run(save_of_two, str(tmp_path / "saved"))
    ranks2.raises(refused_by_one, str(tmp_path / "saved"), match="stubborn")


def test_another_model_or_optimizer_is_left_as_it_was(saved: Path) -> None:
    model, optimizer = build(2, width=4)
    before = photograph(model, optimizer)
    with pytest.raises(ValueError, match=r"embed\.weight"):
        trueshard.load(saved, model=model, optimizer=optimizer)
    assert photograph(model, optimizer) == before
    model, _ = build(2)
    other = torch.optim.AdamW([model.hidden.weight], lr=0.5)
    before = photograph(model, other)
    with pytest.raises(ValueError, match=r"embed\.weight"):
        trueshard.load(saved, model=model, optimizer=other)
    assert photograph(model, other) == before
