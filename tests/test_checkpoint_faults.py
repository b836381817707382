"""Saves that fail: full and read-only disks, interrupts, two runs at one place.

What each of them comes to: an error on every rank that names the file; earlier checkpoints untouched; nothing left of
what failed; model, optimizer and random generators as they were, to the bit; and the next save works.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import trueshard
from damage import build, photograph, tree, values
from messages import lacking
from parity import Ranks
from resting import all_but
from trueshard.checkpoint import writing

WIDTH = 64
"""of the model that is to be too big: a save of it and its optimizer takes some 90 KB"""
ROUNDS = 60
"""saves that are interrupted, each at another line"""
LIBRARY = str(Path(trueshard.__file__).parent)
TraceFunction = Callable[[FrameType, str, object], Any]


def meet() -> None:
    """Wait for the other ranks, if there are any."""
    if dist.is_initialized():
        dist.barrier()


def attempt(path: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer, wait: bool = True) -> str | None:
    """Save, with nothing changed by it; the error, as text."""
    before = photograph(model, optimizer)
    error = None
    try:
        saving = trueshard.save(path, model=model, optimizer=optimizer, wait=wait)
        if saving is not None:
            saving.wait()
    except (OSError, RuntimeError) as caught:
        error = f"{type(caught).__name__}: {caught}"
    assert photograph(model, optimizer) == before
    return error


def limited(rank: int, world_size: int, folder: str, scheme: str, limit: int, who: list[int], wait: bool) -> str | None:
    """Save while files of some ranks may not grow beyond `limit` bytes; then without that."""
    model, optimizer = build(1, world_size, WIDTH)
    trueshard.save(f"{scheme}{folder}/earlier", model=model, optimizer=optimizer)
    meet()
    earlier = tree(Path(folder))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank in who:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        error = attempt(f"{scheme}{folder}/next", model, optimizer, wait)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    meet()
    assert tree(Path(folder)) == earlier
    meet()
    assert attempt(f"{scheme}{folder}/next", model, optimizer, wait) is None
    return error


@pytest.mark.parametrize(
    ("scheme", "wait"), [("", True), ("", False), ("file://", True)], ids=["", "in the background", "behind a URL"]
)
@pytest.mark.parametrize(
    ("world_size", "who"), all_but([(2, [1])], [(1, [0]), (2, [0]), (2, [1]), (2, [0, 1])], unpack=True)
)
def test_a_disk_that_is_full_for_some(
    world_size: int, who: list[int], scheme: str, wait: bool, tmp_path: Path, alone: Ranks, ranks2: Ranks
) -> None:
    for name, limit in (("none", 100), ("some", 20_000)):
        (tmp_path / name).mkdir()
        ranks = ranks2 if world_size == 2 else alone
        errors = ranks.run(limited, str(tmp_path / name), scheme, limit, who, wait)
        for rank, error in enumerate(errors):
            assert lacking(error, "File too large", ".safetensors") == []
            assert "OSError: " in error or rank != who[0]
        for name_of in ("earlier", "next"):
            trueshard.check(tmp_path / name / name_of)


def lied_to(rank: int, world_size: int, folder: str, wait: bool, direct: bool) -> str | None:
    """Save to a disk on which, on the last rank, one bit of each tensor turns over as soon as it was written."""
    model, optimizer = build(1, world_size, WIDTH)
    usual = writing._DiskFile.write

    def write(self: Any, at: int, data: memoryview) -> int:
        checksum = usual(self, at, data)
        if rank == world_size - 1 and len(data):
            middle = at + len(data) // 2
            os.pwrite(self._cached, bytes([os.pread(self._cached, 1, middle)[0] ^ 1]), middle)
        return checksum

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(writing._DiskFile, "write", write)
        if not direct:
            patched.delattr(os, "O_DIRECT")
        error = attempt(f"{folder}/next", model, optimizer, wait)
    meet()
    assert not tree(Path(folder))
    meet()
    assert attempt(f"{folder}/next", model, optimizer, wait) is None
    return error


@pytest.mark.parametrize(("wait", "direct"), [(True, True), (False, True), (True, False)])
def test_a_disk_that_holds_something_else(wait: bool, direct: bool, tmp_path: Path, ranks2: Ranks) -> None:
    *others, last = ranks2.run(lied_to, str(tmp_path), wait, direct)
    assert lacking(last, ".safetensors", "reads differently") == []
    assert all(others)
    trueshard.check(tmp_path / "next")


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a small file system in memory, by its options."""
    made: list[Path] = []

    def mount(options: str) -> Path:
        folder = tmp_path / f"mount{len(made)}"
        folder.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True)
        if done.returncode:
            pytest.skip("this user may not mount a file system")
        made.append(folder)
        return folder

    if not shutil.which("mount"):
        pytest.skip("there is no mount")
    yield mount
    for folder in made:
        subprocess.run(["umount", str(folder)], check=True)


def filled(rank: int, world_size: int, folder: str, size: int) -> list[str]:
    """Save with more and more room, until one save has enough; the errors of the others."""
    model, optimizer = build(1, world_size, WIDTH)
    trueshard.save(f"{folder}/earlier", model=model, optimizer=optimizer)
    filler, errors = Path(folder, "filler"), []
    for free in range(0, size, 8192):
        if rank == 0:
            filler.unlink(missing_ok=True)
            usage = os.statvfs(folder)
            filler.write_bytes(bytes(max(usage.f_bavail * usage.f_frsize - free, 0)))
        meet()
        before = tree(Path(folder))
        error = attempt(f"{folder}/next", model, optimizer)
        meet()
        if error is None:
            return errors
        errors.append(error)
        assert tree(Path(folder)) == before
        meet()
    raise AssertionError("no save had enough room")


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_disk_that_is_full(world_size: int, mounted: Callable[[str], Path], alone: Ranks, ranks2: Ranks) -> None:
    folder = mounted("size=512k")
    for errors in (ranks2 if world_size == 2 else alone).run(filled, str(folder), 512 * 1024):
        assert len(errors) > 5
        assert all("No space left on device" in error for error in errors), errors
        assert sum(".safetensors" in error for error in errors) > 3, errors
    trueshard.check(folder / "earlier")
    trueshard.check(folder / "next")


def test_a_full_disk_behind_a_url(mounted: Callable[[str], Path]) -> None:
    folder = mounted("size=128k")
    model, optimizer = build(1, 1, WIDTH)
    trueshard.save(f"file://{folder}/earlier", model=model, optimizer=optimizer)
    before = tree(folder)
    error = attempt(f"file://{folder}/next", model, optimizer)
    assert lacking(error, "No space left on device") == []
    assert tree(folder) == before


def test_a_read_only_file_system(mounted: Callable[[str], Path], tmp_path: Path) -> None:
    error = attempt(str(mounted("ro") / "step-1"), *build(1))
    assert lacking(error, "Read-only file system", "step-1") == []


def forbidden(rank: int, world_size: int, folder: str, who: list[int]) -> str | None:
    """Save into a directory that the process of some ranks may not write to."""
    model, optimizer = build(1, world_size)
    root = os.geteuid() == 0  # whom permissions do not bind
    if root and rank in who:
        os.seteuid(65534)
    try:
        return attempt(f"{folder}/step-1", model, optimizer)
    finally:
        if root:
            os.seteuid(0)


@pytest.mark.parametrize(("world_size", "who"), [(1, [0]), (2, [0]), (2, [1]), (2, [0, 1])])
def test_a_directory_that_may_not_be_written(world_size: int, who: list[int], alone: Ranks, ranks2: Ranks) -> None:
    if os.geteuid() != 0 and who != list(range(world_size)):
        pytest.skip("only root can be another user on one rank alone")
    with tempfile.TemporaryDirectory() as folder:  # not tmp_path, which another user may not even enter
        os.chmod(folder, 0o555)
        errors = (ranks2 if world_size == 2 else alone).run(forbidden, folder, who)
        assert all(error and "Permission denied" in error for error in errors), errors
        assert tree(Path(folder)) == {}


def below(rank: int, world_size: int, folder: str) -> str | None:
    return attempt(folder, *build(1, world_size))


def test_a_path_below_a_file(tmp_path: Path, ranks2: Ranks) -> None:
    (tmp_path / "file").write_text("mine")
    for error in ranks2.run(below, str(tmp_path / "file" / "step-1")):
        assert lacking(error, "NotADirectoryError", tmp_path / "file") == []
    assert (tmp_path / "file").read_text() == "mine"
    assert tree(tmp_path).keys() == {"file"}


# ---- Saves that are interrupted.


class Interrupted(BaseException):
    """As KeyboardInterrupt: no Exception, and it may come anywhere."""


def lines_until(save: Callable[[], object], last: int) -> int:
    """Call `save`, interrupted before line `last` of those that the library runs in it; how many it came to."""
    count = 0

    def inside(frame: FrameType, event: str, _: object) -> TraceFunction:
        nonlocal count
        count += event == "line"
        if count == last:
            sys.settrace(None)
            raise Interrupted
        return inside

    def enters(frame: FrameType, event: str, _: object) -> TraceFunction | None:
        return inside if frame.f_code.co_filename.startswith(LIBRARY) else None

    before = sys.gettrace()
    sys.settrace(enters)
    try:
        save()
    finally:
        sys.settrace(before)
    return count


def test_a_save_that_is_interrupted_leaves_nothing_or_a_checkpoint(tmp_path: Path) -> None:
    model, optimizer = build(1, 1, WIDTH)
    trueshard.save(tmp_path / "first", model=model, optimizer=optimizer)  # what is made once is made
    whole = lines_until(lambda: trueshard.save(tmp_path / "second", model=model, optimizer=optimizer), 0)
    assert whole > ROUNDS
    left = []
    for number in range(ROUNDS):
        path = tmp_path / f"step-{number}"
        with pytest.raises(Interrupted):
            lines_until(
                lambda path=path: trueshard.save(path, model=model, optimizer=optimizer),
                1 + number * (whole - 2) // (ROUNDS - 1),
            )
        if path.exists():
            trueshard.check(path)
        left.append(path.exists())
        assert not [each for each in os.listdir(tmp_path) if each.startswith(".")], number
    assert not left[0]


# ---- Two runs at one place.


def race(rank: int, world_size: int, folder: str, rounds: int, same: bool) -> list[bool]:
    """One of two runs that know nothing of one another; for each round, whether its save was the one."""
    model, optimizer = build(rank)
    won = []
    for number in range(rounds):
        Path(folder, f"ready{number}.{rank}").touch()
        deadline = time.monotonic() + 30
        while not Path(folder, f"ready{number}.{1 - rank}").exists():
            assert time.monotonic() < deadline, "the other run does not come"
        name = f"step-{number}" if same else f"step-{number}.{rank}"
        try:
            trueshard.save(f"{folder}/run/{name}", model=model, optimizer=optimizer, who=rank)
            won.append(True)
        except FileExistsError as error:
            won.append(False)
            if name not in str(error):
                raise
    return won


@pytest.mark.rest
def test_two_runs_that_save_under_one_name(tmp_path: Path, ranks2: Ranks) -> None:
    """One of them gets it; the other is told, and nothing of the two is mixed."""
    rounds = 20
    first, second = ranks2.run(race, str(tmp_path), rounds, True, group=False)
    assert [one != other for one, other in zip(first, second, strict=True)] == [True] * rounds, (first, second)
    for number in range(rounds):
        path = tmp_path / "run" / f"step-{number}"
        trueshard.check(path)
        model, optimizer = build(5)
        winner = 0 if first[number] else 1
        assert trueshard.load(path, model=model, optimizer=optimizer)["who"] == winner
        assert values(model, optimizer) == values(*build(winner))
    assert {each.name for each in (tmp_path / "run").iterdir()} == {f"step-{number}" for number in range(rounds)}


@pytest.mark.rest
def test_two_runs_that_save_into_one_directory(tmp_path: Path, ranks2: Ranks) -> None:
    """Neither takes the other's unfinished save for one that was left behind."""
    for won in ranks2.run(race, str(tmp_path), 20, False, group=False):
        assert all(won)
    assert len(list((tmp_path / "run").iterdir())) == 40
    for path in (tmp_path / "run").iterdir():
        trueshard.check(path)


def test_what_is_there_already_is_not_touched(tmp_path: Path) -> None:
    model, optimizer = build(2)
    trueshard.save(tmp_path / "saved", model=model, optimizer=optimizer)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    before = tree(tmp_path)
    for name in ("saved", "file", "nowhere"):
        with pytest.raises(FileExistsError, match=name):
            trueshard.save(tmp_path / name, model=model, optimizer=optimizer)
    assert tree(tmp_path) == before
