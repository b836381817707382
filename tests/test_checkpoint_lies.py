"""Manifests, headers and indexes that lie: refused by name, with nothing changed and nothing opened outside."""

from __future__ import annotations

import contextlib
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trueshard
from damage import (
    MANIFEST,
    Notes,
    Table,
    build,
    files_of,
    load_damaged,
    load_plain,
    problems,
    reheader,
    restamp,
    watching,
)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of step 1."""
    model, optimizer = build(1)
    trueshard.save(tmp_path / "saved", model=model, optimizer=optimizer, notes=Notes(1))
    return tmp_path / "saved"


@pytest.fixture
def outside(saved: Path) -> Path:
    """A directory beside the checkpoint, with files that would be right if they were in it."""
    folder = saved.parent / "outside"
    shutil.copytree(saved, folder)
    return folder


NAMES = {
    "absolute": "{outside}/model.safetensors",
    "above": "../outside/model.safetensors",
    "above, from below": "sub/../../outside/model.safetensors",
    "above, with backslashes": "..\\outside\\model.safetensors",
    "a link to a file": "link.safetensors",
    "below a link": "folder/model.safetensors",
    "with a zero": "model.safetensors\0",
    "empty": "",
    "the directory itself": ".",
    "a URL": "file://{outside}/model.safetensors",
}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES.keys())
def test_a_manifest_that_points_outside(name: str, saved: Path, outside: Path) -> None:
    (saved / "sub").mkdir()
    (saved / "link.safetensors").symlink_to(outside / "model.safetensors")
    (saved / "folder").symlink_to(outside)
    name = name.format(outside=outside)

    def change(table: Table) -> None:
        table["files"][name] = table["files"].pop("model.safetensors")
        for entry in table["tensors"].values():
            for piece in entry["pieces"]:
                piece["file"] = name if piece["file"] == "model.safetensors" else piece["file"]

    restamp(saved, change)
    with watching(outside) as opened:
        found = problems(saved)
        message = load_damaged(saved)
    assert opened == []
    assert MANIFEST in found or name in found
    assert message
    assert name in message or repr(name)[1:-1] in message


def test_files_that_are_links_to_outside(saved: Path, outside: Path) -> None:
    for file in files_of(saved):
        aside = file.rename(saved.parent / "aside")
        file.symlink_to(outside / file.name)
        with watching(outside) as opened:
            assert file.name in problems(saved)
            assert file.name in load_damaged(saved)
        assert opened == []
        file.unlink()
        aside.rename(file)


def test_an_index_that_points_outside(tmp_path: Path, saved: Path, outside: Path) -> None:
    folder = tmp_path / "plain"
    folder.mkdir()
    for name in ("../outside/model.safetensors", str(outside / "model.safetensors")):
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": {"hidden.weight": name, "scale": name}})
        )
        with watching(outside) as opened:
            assert name in load_plain(folder)
        assert opened == []


def test_watching_sees_what_is_opened(outside: Path) -> None:
    """The tests above would show nothing if it did not."""
    from safetensors import safe_open

    with watching(outside) as opened, safe_open(outside / "model.safetensors", "pt") as file:
        file.keys()
    assert opened
    with watching(outside) as opened:
        (outside / MANIFEST).read_bytes()
    assert str(outside / MANIFEST) in opened


def test_a_link_to_a_checkpoint_is_one(saved: Path) -> None:
    link = saved.with_name("link")
    link.symlink_to(saved)
    assert trueshard.check(link)
    assert load_damaged(link) == ""


FIRST, SECOND = "optimizer/hidden.weight/exp_avg", "optimizer/hidden.weight/exp_avg_sq"


def piece(key: str, **said: Any) -> Callable[[Table], None]:
    return lambda table: table["tensors"][key]["pieces"][0].update(said)


def entry(key: str, **said: Any) -> Callable[[Table], None]:
    return lambda table: table["tensors"][key].update(said)


def moved(by: int) -> Callable[[Table], None]:
    def change(table: Table) -> None:
        place = table["tensors"][FIRST]["pieces"][0]
        place["begin"] += by
        place["end"] += by

    return change


def doubled(table: Table) -> None:
    table["tensors"][FIRST]["pieces"] = table["tensors"][SECOND]["pieces"]


def twice(table: Table) -> None:
    table["tensors"][FIRST]["pieces"] *= 2


def dropped(table: Table) -> None:
    del table["tensors"][FIRST]


def unlisted(table: Table) -> None:
    del table["files"]["optimizer.safetensors"]


def exchanged(table: Table) -> None:
    """Two tensors in one another's place, checksums and all: only the file's own header says otherwise."""
    one, other = table["tensors"][FIRST], table["tensors"][SECOND]
    one["pieces"], other["pieces"] = other["pieces"], one["pieces"]
    one["crc32"], other["crc32"] = other["crc32"], one["crc32"]


def file_said(**said: Any) -> Callable[[Table], None]:
    return lambda table: table["files"]["optimizer.safetensors"].update(said)


LIES: dict[str, Callable[[Table], None]] = {
    "two tensors at one place": doubled,
    "overlap with the tensor before": moved(-4),
    "overlap with the tensor after": moved(4),
    "overlap with the header": piece(FIRST, begin=0, end=36),
    "beyond the end": piece(FIRST, begin=10**6, end=10**6 + 36),
    "far beyond the end": piece(FIRST, begin=2**70, end=2**70 + 36),
    "backwards": piece(FIRST, begin=200, end=100),
    "before the beginning": piece(FIRST, begin=-36, end=0),
    "a range of text": piece(FIRST, begin="0"),
    "a range of truths": piece(FIRST, begin=True),
    "half a byte": piece(FIRST, begin=0.5),
    "no range": piece(FIRST, begin=None),
    "the same piece twice": twice,
    "an entry that is gone": dropped,
    "a file that is not listed": unlisted,
    "another file": piece(FIRST, file="model.safetensors"),
    "a larger shape": entry(FIRST, shape=[3, 4]),
    "an enormous shape": entry(FIRST, shape=[2**40, 3]),
    "a shape beyond any": entry(FIRST, shape=[2**64, 2**64]),
    "a negative shape": entry(FIRST, shape=[-3, -3]),
    "a shape of text": entry(FIRST, shape="33"),
    "another dtype": entry(FIRST, dtype="float64"),
    "no dtype": entry(FIRST, dtype="float33"),
    "a dtype that is none": entry(FIRST, dtype="load"),
    "another checksum": entry(FIRST, crc32=1),
    "a checksum of text": entry(FIRST, crc32="1"),
    "a longer file": file_said(size=10**6),
    "an enormous file": file_said(size=2**62),
    "a longer header": file_said(header=10**6),
    "another header checksum": file_said(crc32=1),
    "exchanged": exchanged,
}
ABOUT_FILES = (
    "a file that is not listed",
    "a longer file",
    "an enormous file",
    "a longer header",
    "another header checksum",
)
"""lies that are not about one tensor"""


@pytest.mark.parametrize("lie", LIES, ids=LIES.keys())
def test_a_manifest_that_lies(lie: str, saved: Path) -> None:
    restamp(saved, LIES[lie])
    found = problems(saved)
    assert MANIFEST in found or "optimizer.safetensors" in found, found
    if lie not in ABOUT_FILES:
        assert FIRST in found, found
    if lie not in ("exchanged", "another header checksum"):  # where each tensor is, the manifest alone says to a load
        message = load_damaged(saved)
        assert MANIFEST in message or "optimizer.safetensors" in message, message
        assert lie in ABOUT_FILES or FIRST in message, message


HEADERS: dict[str, Callable[[Table], object]] = {
    "overlap": lambda table: table["hidden.weight"].update(data_offsets=table["embed.weight"]["data_offsets"]),
    "beyond": lambda table: table["hidden.weight"].update(data_offsets=[10**6, 10**6 + 36]),
    "backwards": lambda table: table["hidden.weight"].update(data_offsets=[36, 0]),
    "negative": lambda table: table["hidden.weight"].update(data_offsets=[-36, 0]),
    "one offset": lambda table: table["hidden.weight"].update(data_offsets=[0]),
    "huge shape": lambda table: table["hidden.weight"].update(shape=[2**62, 2**62]),
    "wrong shape": lambda table: table["hidden.weight"].update(shape=[3, 4]),
    "unknown dtype": lambda table: table["hidden.weight"].update(dtype="F31"),
    "no entry": lambda table: table.update({"hidden.weight": 3}),
    "hole": lambda table: table.pop("hidden.weight"),
}


@pytest.mark.parametrize("lie", HEADERS, ids=HEADERS.keys())
def test_a_safetensors_header_that_lies(lie: str, saved: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain" / "model.safetensors"
    plain.parent.mkdir()
    shutil.copy(saved / "model.safetensors", plain)
    reheader(plain, HEADERS[lie])
    message = load_plain(plain.parent)
    assert "model.safetensors" in message
    assert lie == "hole" or "hidden.weight" in message
    reheader(saved / "model.safetensors", HEADERS[lie])
    assert "model.safetensors" in problems(saved)


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.path, "unpickled")


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
