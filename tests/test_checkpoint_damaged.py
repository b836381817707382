"""Damaged and lying checkpoints: refused by name, with nothing changed and nothing opened outside.

``DAMAGES`` holds what is done to a checkpoint and what ``check`` and ``load`` name then; ``PLAIN_DAMAGES`` the same of
a Hugging Face directory. Below: damage to every file or byte in turn, and loads that fail on the way.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import trueshard
from damage import (
    MANIFEST,
    Notes,
    Table,
    build,
    files_of,
    flipped,
    load_damaged,
    load_plain,
    photograph,
    place_of,
    problems,
    reheader,
    restamp,
    values,
    watching,
)
from messages import naming
from parity import Ranks
from trueshard.checkpoint.format import FORMAT


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of step 1."""
    model, optimizer = build(1)
    path = tmp_path_factory.mktemp("intact") / "saved"
    trueshard.save(path, model=model, optimizer=optimizer, notes=Notes(1))
    return path


@pytest.fixture
def saved(intact: Path, tmp_path: Path) -> Path:
    """A copy of it to be damaged."""
    return shutil.copytree(intact, tmp_path / "saved")


@pytest.fixture
def outside(intact: Path, tmp_path: Path) -> Path:
    """A directory beside it, with files that would be right if they were in it."""
    return shutil.copytree(intact, tmp_path / "outside")


@pytest.fixture
def plain(saved: Path, tmp_path: Path) -> Path:
    """A directory with the model's file alone."""
    (tmp_path / "plain").mkdir()
    return Path(shutil.copy(saved / "model.safetensors", tmp_path / "plain")).parent


# ---- The table.


@dataclass(frozen=True)
class Damage:
    do: Callable[[Path], object]  # to the directory, beside which is "outside"
    file: str = "optimizer.safetensors"  # named by ``check`` and ``load``, or the manifest is
    named: str = ""  # named by both
    refused: bool | None = True  # False: what ``load`` loads, if it does, is what was saved; None: it cannot see it
    only: bool = False  # True: each of ``check``'s problems names both


FIRST, SECOND = "optimizer/hidden.weight/exp_avg", "optimizer/hidden.weight/exp_avg_sq"


def lie(change: Callable[[Table], object], named: str = FIRST, refused: bool | None = True) -> Damage:
    """A manifest that was changed, with a checksum that fits."""
    return Damage(lambda path: restamp(path, change), named=named, refused=refused)


def piece(**said: Any) -> Damage:
    return lie(lambda table: table["tensors"][FIRST]["pieces"][0].update(said))


def entry(**said: Any) -> Damage:
    return lie(lambda table: table["tensors"][FIRST].update(said))


def file_said(refused: bool = True, **said: Any) -> Damage:
    return lie(lambda table: table["files"]["optimizer.safetensors"].update(said), "", refused)


def moved(by: int) -> Damage:
    def change(table: Table) -> None:
        place = table["tensors"][FIRST]["pieces"][0]
        place.update(begin=place["begin"] + by, end=place["end"] + by)

    return lie(change)


def exchange(table: Table) -> None:
    """Two tensors in one another's place, checksums and all: only the file's own header says otherwise."""
    one, other = table["tensors"][FIRST], table["tensors"][SECOND]
    for key in ("pieces", "crc32"):
        one[key], other[key] = other[key], one[key]


def elsewhere(name: str) -> Damage:
    """A manifest by which the model is in the file ``name``."""

    def do(path: Path) -> None:
        outside = path.parent / "outside"
        (path / "sub").mkdir()
        (path / "link.safetensors").symlink_to(outside / "model.safetensors")
        (path / "folder").symlink_to(outside)
        full_name = name.format(outside=outside)

        def change(table: Table) -> None:
            table["files"][full_name] = table["files"].pop("model.safetensors")
            for place in (place for tensor in table["tensors"].values() for place in tensor["pieces"]):
                place["file"] = full_name if place["file"] == "model.safetensors" else place["file"]

        restamp(path, change)

    shown = repr(name)[1:-1]
    return Damage(do, shown, shown)


def flip(key: str, file: str) -> Damage:
    def do(path: Path) -> None:
        data = bytearray((path / file).read_bytes())
        data[place_of(path, key)[0]] ^= 1
        (path / file).write_bytes(data)

    return Damage(do, file, repr(key), only=True)


def length_said(file: str, length: int | str) -> Damage:
    """A header that lies about its length; text: relative to the true one, or to the file's."""

    def do(path: Path) -> None:
        data = (path / file).read_bytes()
        (true,) = struct.unpack("<Q", data[:8])
        said = len(data) if length == "file" else true + int(length) if isinstance(length, str) else length
        (path / file).write_bytes(struct.pack("<Q", said) + data[8:])

    return Damage(do, file, refused=False)


def headed(named: str = "hidden.weight", **said: Any) -> Damage:
    """A header that lies about a tensor."""
    change: Callable[[Table], object] = lambda table: table["hidden.weight"].update(said)  # noqa: E731
    return Damage(lambda path: reheader(path / "model.safetensors", change), "model.safetensors", named, refused=False)


def header_changed(change: Callable[[Table], object], named: str = "hidden.weight") -> Damage:
    return Damage(lambda path: reheader(path / "model.safetensors", change), "model.safetensors", named, refused=False)


HEADERS = {
    "overlap": header_changed(lambda t: t["hidden.weight"].update(data_offsets=t["embed.weight"]["data_offsets"])),
    "beyond": headed(data_offsets=[10**6, 10**6 + 36]),
    "backwards": headed(data_offsets=[36, 0]),
    "negative": headed(data_offsets=[-36, 0]),
    "one offset": headed(data_offsets=[0]),
    "huge shape": headed(shape=[2**62, 2**62]),
    "wrong shape": headed(shape=[3, 4]),
    "unknown dtype": headed(dtype="F31"),
    "no entry": header_changed(lambda table: table.update({"hidden.weight": 3})),
    "hole": header_changed(lambda table: table.pop("hidden.weight"), ""),
}
LENGTHS = (0, 1, 7, 2**31, 2**63, 2**64 - 1, "-1", "+1", "+8", "file")
DAMAGES: dict[str, Damage] = {
    "two tensors at one place": lie(lambda t: t["tensors"][FIRST].update(pieces=t["tensors"][SECOND]["pieces"])),
    "overlap with the tensor before": moved(-4),
    "overlap with the tensor after": moved(4),
    "overlap with the header": piece(begin=0, end=36),
    "beyond the end": piece(begin=10**6, end=10**6 + 36),
    "far beyond the end": piece(begin=2**70, end=2**70 + 36),
    "backwards": piece(begin=200, end=100),
    "before the beginning": piece(begin=-36, end=0),
    "a range of text": piece(begin="0"),
    "a range of truths": piece(begin=True),
    "half a byte": piece(begin=0.5),
    "no range": piece(begin=None),
    "the same piece twice": lie(lambda t: t["tensors"][FIRST]["pieces"].append(t["tensors"][FIRST]["pieces"][0])),
    "an entry that is gone": lie(lambda table: table["tensors"].pop(FIRST)),
    "a file that is not listed": lie(lambda table: table["files"].pop("optimizer.safetensors"), ""),
    "another file": piece(file="model.safetensors"),
    "a larger shape": entry(shape=[3, 4]),
    "an enormous shape": entry(shape=[2**40, 3]),
    "a shape beyond any": entry(shape=[2**64, 2**64]),
    "a negative shape": entry(shape=[-3, -3]),
    "a shape of text": entry(shape="33"),
    "another dtype": entry(dtype="float64"),
    "no dtype": entry(dtype="float33"),
    "a dtype that is none": entry(dtype="load"),
    "another checksum": entry(crc32=1),
    "a checksum of text": entry(crc32="1"),
    "a longer file": file_said(size=10**6),
    "an enormous file": file_said(size=2**62),
    "a longer header": file_said(header=10**6),
    "another header checksum": file_said(crc32=1, refused=False),
    "exchanged": lie(exchange, refused=None),  # where each tensor is, the manifest alone says to a load
    "absolute": elsewhere("{outside}/model.safetensors"),
    "above": elsewhere("../outside/model.safetensors"),
    "above, from below": elsewhere("sub/../../outside/model.safetensors"),
    "above, with backslashes": elsewhere("..\\outside\\model.safetensors"),
    "a link to a file": elsewhere("link.safetensors"),
    "below a link": elsewhere("folder/model.safetensors"),
    "with a zero": elsewhere("model.safetensors\0"),
    "empty": elsewhere(""),
    "the directory itself": elsewhere("."),
    "a URL": elsewhere("file://{outside}/model.safetensors"),
    "format 1": lie(lambda table: table.update(format=1), "format 1"),
    "format 99": lie(lambda table: table.update(format=99), f"format 99 is newer than format {FORMAT}"),
    "a bit of a matrix": flip("model/hidden.weight", "model.safetensors"),
    "a bit of a number": flip("model/scale", "model.safetensors"),
    "a bit of the optimizer": flip("optimizer/embed.weight/exp_avg", "optimizer.safetensors"),
    "a bit of an entry": flip("more/notes/curve", "extra.safetensors"),
}
DAMAGES |= {
    f"{file}: a header of {length} bytes": length_said(f"{file}.safetensors", length)
    for file in ("model", "optimizer", "extra")
    for length in LENGTHS
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_found_by_name_and_changes_nothing(name: str, saved: Path, outside: Path) -> None:
    damage, named = DAMAGES[name], DAMAGES[name].named.format(outside=outside)
    damage.do(saved)
    with watching(outside) as opened:
        found, message = problems(saved), "" if damage.refused is None else load_damaged(saved)
    assert opened == []
    for text in (found, message) if damage.refused else (found,):
        assert MANIFEST in text or damage.file in text, text
        assert named in text
    if damage.only:
        assert all(named in line and damage.file in line for line in found.splitlines())


def index(name: str) -> Damage:
    """An index by which tensors are in the file ``name``."""

    def do(path: Path) -> None:
        full_name = name.format(outside=path.parent / "outside")
        table = {"metadata": {}, "weight_map": {"hidden.weight": full_name, "scale": full_name}}
        (path / "model.safetensors.index.json").write_text(json.dumps(table))

    return Damage(do, named=name)


PLAIN_DAMAGES = {
    **{f"a header: {name}": damage for name, damage in HEADERS.items()},
    **{f"a header of {length} bytes": length_said("model.safetensors", length) for length in LENGTHS},
    "above": index("../outside/model.safetensors"),
    "absolute": index("{outside}/model.safetensors"),
}


@pytest.mark.parametrize("name", PLAIN_DAMAGES)
def test_damage_to_other_programs_files_is_found_by_name(name: str, saved: Path, plain: Path, outside: Path) -> None:
    damage = PLAIN_DAMAGES[name]
    damage.do(plain)
    with watching(outside) as opened:
        message = load_plain(plain)
    assert opened == []
    assert "model.safetensors" in message
    assert damage.named.format(outside=outside) in message
    if damage in HEADERS.values():  # in a checkpoint too
        damage.do(saved)
        assert "model.safetensors" in problems(saved)


@pytest.mark.parametrize("name", [".metadata", "pytorch_model.bin", "adapter_model.bin", "optimizer.bin"])
def test_nothing_is_unpickled_unasked(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "pickled"
    folder.mkdir()
    (folder / name).write_bytes(pickle.dumps(Bomb(tmp_path / "proof")))
    (folder / "adapter_config.json").write_text("{}")
    load_plain(folder)
    for look in (trueshard.check, trueshard.inspect):
        with contextlib.suppress(ValueError, FileNotFoundError):
            look(folder)
    assert not (tmp_path / "proof").exists()


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.path, "unpickled")


def test_watching_sees_what_is_opened(outside: Path) -> None:
    """The tests above would show nothing if it did not."""
    with watching(outside) as opened, safe_open(outside / "model.safetensors", "pt") as file:
        file.keys()
    assert opened
    with watching(outside) as opened:
        (outside / MANIFEST).read_bytes()
    assert str(outside / MANIFEST) in opened


# ---- Every file and every byte in turn.


def test_each_file_missing_cut_short_too_long_or_a_link_to_outside(saved: Path, outside: Path, tmp_path: Path) -> None:
    for file in files_of(saved):
        data, aside = file.read_bytes(), tmp_path / "aside"
        for size in sorted({0, 1, 7, 8, 9, len(data) // 2, len(data) - 1, len(data) + 1, len(data) + 4096}):
            file.write_bytes((data + bytes(4096))[:size])
            assert file.name in problems(saved), f"{file.name} cut to {size}"
            message = load_damaged(saved)
            assert size > len(data) or file.name in message, f"{file.name} cut to {size}: {message!r}"
        file.rename(aside)
        with pytest.raises((trueshard.DamagedCheckpoint, FileNotFoundError), match=file.name):
            trueshard.check(saved)
        assert load_damaged(saved)
        file.symlink_to(outside / file.name)
        with watching(outside) as opened:
            assert file.name in problems(saved)
            assert file.name in load_damaged(saved)
        assert opened == []
        file.unlink()
        file.write_bytes(data)
    assert trueshard.check(saved)


def test_a_link_to_a_checkpoint_and_the_newest_are_checkpoints(saved: Path, tmp_path: Path) -> None:
    link = saved.with_name("link")
    link.symlink_to(saved)
    assert trueshard.check(link)
    assert load_damaged(link) == ""
    link.unlink()
    saved.rename(tmp_path / "step-00000001")
    assert trueshard.check(tmp_path / "latest").where == str(tmp_path / "step-00000001")
    with pytest.raises(FileNotFoundError, match=naming("elsewhere", "no complete checkpoint")):
        trueshard.check(tmp_path / "elsewhere" / "latest")


def bytes_to_flip(path: Path) -> list[tuple[Path, int]]:
    """Every byte of every file; but inside the random states, which are most of a checkpoint so small, every tenth."""
    places = [(file, at) for file in files_of(path) for at in range(file.stat().st_size)]
    (states,) = json.loads((path / MANIFEST).read_text())["tensors"]["rng"]["pieces"]
    begin, end = states["begin"] + 8, states["end"] - 8
    return [(file, at) for file, at in places if file.name != states["file"] or at % 10 == 0 or not begin <= at < end]


def _error_of(function: Callable[..., Any], path: Path, **words: Any) -> str:
    """The message of what it raises, if that is documented; empty if nothing."""
    try:
        function(path, **words)
    except (ValueError, FileNotFoundError) as error:
        return str(error)
    return ""


def flip_all(rank: int, world_size: int, folder: str) -> int:
    """Flip one bit of every byte whose turn is this rank's; how many."""
    path = Path(folder, f"copy{rank}")
    shutil.copytree(Path(folder, "saved"), path)
    places = bytes_to_flip(path)[rank::world_size]
    model, optimizer = build(2)
    old, right = photograph(model, optimizer), values(*build(1))
    for number, (file, at) in enumerate(places):
        place = f"{file.name}, byte {at}"
        with flipped(file, at, 1 << number % 8):
            found = _error_of(trueshard.check, path)
            assert file.name in found, f"{place}: {found or 'not found'}"
            if number % 9:
                continue
            refused = _error_of(trueshard.load, path, model=model, optimizer=optimizer, notes=Notes(0))
            assert not refused or file.name in refused, f"{place}: {refused}"
        if refused:
            assert photograph(model, optimizer) == old, place
        else:
            assert values(model, optimizer) == right, place
            model, optimizer = build(2)
            old = photograph(model, optimizer)
    return len(places)


@pytest.mark.rest
def test_every_flipped_byte_is_found(saved: Path, ranks2: Ranks) -> None:
    counts = ranks2.run(flip_all, str(saved.parent), group=False, timeout=200)
    assert sum(counts) == len(bytes_to_flip(saved))


def test_a_flipped_bit_in_a_remote_store(tmp_path: Path) -> None:
    import fsspec

    url = "memory://faults/flipped"
    trueshard.save(url, **parts(1))
    assert trueshard.check(url)
    store = fsspec.filesystem("memory")
    (name,) = [each for each in store.find("/faults/flipped") if each.endswith(".safetensors")]
    data = bytearray(store.cat_file(name))
    data[-1] ^= 16
    store.pipe_file(name, bytes(data))
    with pytest.raises(trueshard.DamagedCheckpoint, match=Path(name).name):
        trueshard.check(url)
    assert Path(name).name in refused(url, ValueError, **parts(2))


# ---- Loads that fail on the way.


def parts(step: int, world_size: int = 1) -> dict[str, Any]:
    model, optimizer = build(step, world_size)
    return {"model": model, "optimizer": optimizer, "notes": Notes(step)}


def refused(path: Any, kind: type[Exception] | tuple[type[Exception], ...], **given: Any) -> str:
    """The error of a load, before and after which model, optimizer and the user's own entry are the same."""
    before = photograph(given["model"], given["optimizer"])
    with pytest.raises(kind) as caught:
        trueshard.load(path, **given)
    assert photograph(given["model"], given["optimizer"]) == before
    assert "notes" not in given or given["notes"].step == 2
    return str(caught.value)


def save_of_two(rank: int, world_size: int, folder: str) -> None:
    trueshard.save(folder, **parts(1, world_size))


def load_of_two(rank: int, world_size: int, folder: str) -> str:
    return refused(folder, (ValueError, RuntimeError), **parts(2, world_size))


@pytest.mark.parametrize("where", [0, -1], ids=["in the first rank's rows", "in the last rank's rows"])
@pytest.mark.parametrize("key", ["model/embed.weight", "optimizer/norm.weight/exp_avg_sq"])
def test_damage_on_one_rank_fails_the_load_on_all(key: str, where: int, tmp_path: Path, ranks2: Ranks) -> None:
    path = tmp_path / "saved"
    ranks2.run(save_of_two, str(path))
    begin, end = place_of(path, key)
    file = f"{key.partition('/')[0]}.safetensors"
    with flipped(path / file, begin if where == 0 else end - 1, 2):
        errors = ranks2.run(load_of_two, str(path))
    assert all(key in error and file in error for error in errors), errors


class Stubborn(Notes):
    """Refuses what it is given."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("stubborn")


def test_an_entry_that_refuses_its_state_leaves_the_rest_as_it_was(saved: Path) -> None:
    assert "stubborn" in refused(saved, KeyError, **parts(2) | {"notes": Stubborn(2)})


def refused_by_one(rank: int, world_size: int, folder: str) -> str:
    """One rank's entry refuses its state; no rank's model is changed."""
    given = parts(2, world_size)
    before = photograph(given["model"], given["optimizer"])
    given["notes"] = Stubborn(2) if rank == 1 else Notes(2)
    with pytest.raises((KeyError, RuntimeError), match="stubborn") as caught:
        trueshard.load(folder, **given)
    assert photograph(given["model"], given["optimizer"]) == before
    return str(caught.value)


def test_an_entry_that_refuses_its_state_on_one_rank_leaves_all_as_they_were(tmp_path: Path, ranks2: Ranks) -> None:
    ranks2.run(save_of_two, str(tmp_path / "saved"))
    ranks2.run(refused_by_one, str(tmp_path / "saved"))


def test_another_model_or_optimizer_is_left_as_it_was(saved: Path) -> None:
    model, optimizer = build(2, width=4)
    assert "embed.weight" in refused(saved, ValueError, model=model, optimizer=optimizer)
    model, _ = build(2)
    other = torch.optim.AdamW([model.hidden.weight], lr=0.5)
    assert "embed.weight" in refused(saved, ValueError, model=model, optimizer=other)
