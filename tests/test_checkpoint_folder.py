"""What a user finds in the folder of a checkpoint, and beside it."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import forks
import trueshard
from messages import naming
from models.handmade import Scalar
from parity import Ranks
from resting import all_but
from trueshard.checkpoint.format import MANIFEST, Manifest


def saved(path: Path, value: float = 1.0) -> Path:
    model = nn.Linear(4, 2)
    nn.init.constant_(model.weight, value)
    trueshard.save(path, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), progress={"step": value})
    return path


def weight(path: Path | str) -> float:
    model = nn.Linear(4, 2)
    trueshard.load(path, model=model)
    return model.weight[0, 0].item()


def test_an_empty_directory_is_filled_and_another_is_not(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert weight(saved(tmp_path / "empty")) == 1.0
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="notes"):
        saved(tmp_path / "notes")
    assert [each.name for each in (tmp_path / "notes").iterdir()] == ["mine.txt"]


def test_a_dict_is_filled_with_what_was_saved(tmp_path: Path) -> None:
    progress = {"old": True}
    result = trueshard.load(saved(tmp_path / "one"), model=nn.Linear(4, 2), progress=progress)
    assert progress == {"step": 1.0}
    assert "progress" not in result
    trueshard.save(tmp_path / "two", model=nn.Linear(4, 2), progress=7)
    with pytest.raises(TypeError, match=naming("progress", "dict", "load()")):
        trueshard.load(tmp_path / "two", model=nn.Linear(4, 2), progress=progress)
    assert progress == {"step": 1.0}


def test_a_checkpoint_without_its_manifest_is_called_that(tmp_path: Path) -> None:
    path = saved(tmp_path / "one")
    (path / MANIFEST).unlink()
    with pytest.raises(ValueError, match=naming(str(path), MANIFEST, "model.safetensors")):
        weight(path)
    assert weight(path / "model.safetensors") == 1.0


def test_readers_of_every_file_are_told_which_holds_the_weights(tmp_path: Path) -> None:
    path = saved(tmp_path / "one")
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {"weight": "model.safetensors", "bias": "model.safetensors"}
    assert index["metadata"]["total_size"] == 4 * (4 * 2 + 2)
    trueshard.check(path)


def test_latest_is_a_link_to_what_was_written_last(tmp_path: Path) -> None:
    checkpoints, link = trueshard.Checkpoints(tmp_path, keep_last=1), tmp_path / "latest"
    for step in (1, 2):
        model = nn.Linear(4, 2)
        nn.init.constant_(model.weight, step)
        checkpoints.save(step, model=model)
        assert os.readlink(link) == f"step-{step:08d}"
        assert weight(link) == step
    assert trueshard.latest(tmp_path) == tmp_path / "step-00000002"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["latest", "step-00000002"]
    link.unlink()
    assert weight(link) == 2  # copied without its links
    link.symlink_to("step-00000009")
    assert weight(link) == 2
    saved(tmp_path / "mine")
    assert os.readlink(link) == "step-00000009"


def score(folder: Path) -> float | None:
    """The metric of the checkpoint that is called ``best``."""
    best = folder / "best"
    if not os.path.lexists(best):
        return None
    found = trueshard.load(best, model=nn.Linear(4, 2))
    return found["progress"]["metrics"]["loss"]


MODES = [(wait, mode) for wait in (True, False) for mode in ("min", "max")]


@pytest.mark.parametrize(("wait", "mode"), all_but([(False, "max")], MODES, unpack=True))
def test_best_is_a_link_to_the_best(tmp_path: Path, wait: bool, mode: str) -> None:
    """As soon as a better one is there, also in the background, and whatever is deleted."""
    checkpoints = trueshard.Checkpoints(tmp_path, keep_last=1, keep_best=1, mode=mode)
    losses = [4.0, 5.0, math.nan, 3.0, 3.0, 6.0, 2.0]
    for step, loss in enumerate(losses):
        saving = checkpoints.save(step, metrics={"loss": loss}, model=nn.Linear(4, 2), wait=wait)
        if saving is not None:
            saving.wait()
        best = (min if mode == "min" else max)(each for each in losses[: step + 1] if each == each)
        assert score(tmp_path) == best
        assert checkpoints.best() == tmp_path / os.readlink(tmp_path / "best")
        assert os.readlink(tmp_path / "best") == f"step-{losses.index(best):08d}"  # of equals the first
    checkpoints.prune()
    assert len(checkpoints.steps()) == 1 + (mode == "max")


def test_best_is_no_link_where_none_is_kept_or_something_has_its_name(tmp_path: Path) -> None:
    mine, plain = tmp_path / "mine", trueshard.Checkpoints(tmp_path / "plain", keep_last=1)
    kept = trueshard.Checkpoints(tmp_path / "plain", keep_last=1, keep_best=1)
    plain.save(1, metrics={"loss": 1.0}, model=nn.Linear(4, 2))
    assert score(plain.directory) is None
    kept.save(2, metrics={"loss": math.nan}, model=nn.Linear(4, 2))
    assert score(plain.directory) == 1.0
    plain.save(3, metrics={"loss": 9.0}, model=nn.Linear(4, 2))  # the best is deleted, and its link with it
    assert score(plain.directory) is None
    (mine / "best").mkdir(parents=True)
    trueshard.Checkpoints(mine, keep_best=1).save(1, metrics={"loss": 1.0}, model=nn.Linear(4, 2))
    assert not (mine / "best").is_symlink()


class Words:
    """A tokenizer that writes itself late."""

    released = threading.Event()

    def __init__(self) -> None:
        self.words = "before"

    def save_pretrained(self, folder: str) -> None:
        assert self.released.wait(60)
        Path(folder, "words.txt").write_text(self.words)


def test_a_tokenizer_is_saved_as_it_was_at_the_call(tmp_path: Path) -> None:
    words = Words()
    saving = trueshard.save(tmp_path / "one", model=nn.Linear(4, 2), tokenizer=words, wait=False)
    words.words = "after"
    Words.released.set()
    assert saving is not None
    saving.wait()
    assert (tmp_path / "one" / "words.txt").read_text() == "before"


def class_of(rank: int, world_size: int, folder: str) -> str:
    model = Scalar()
    trueshard.shard(model)
    trueshard.save(f"{folder}/one", model=model)
    return str(Manifest.parse(Path(folder, "one", MANIFEST).read_bytes(), "").models["model"]["class"])


def test_the_class_in_a_manifest_is_the_users(ranks2: Ranks, tmp_path: Path) -> None:
    assert ranks2.run(class_of, str(tmp_path)) == ["models.handmade.Scalar"] * 2


FAILS = """
import os, sys, torch, trueshard
from torch import nn
from trueshard.checkpoint import writing
def broken(*_): raise OSError("no space left on this disk")
writing.move_into_place = broken
trueshard.save(sys.argv[1], model=nn.Linear(4, 2), wait=False)
print("trained on", flush=True)
"""


def test_a_background_save_that_failed_and_was_not_waited_for_is_the_exit_code(tmp_path: Path) -> None:
    done = forks.run([sys.executable, "-c", FAILS, str(tmp_path / "one")], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (1, "trained on\n")
    assert "no space left on this disk" in done.stderr
    assert "one" in done.stderr


def test_the_command_has_a_version() -> None:
    done = forks.run([sys.executable, "-m", "trueshard", "--version"], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"trueshard {trueshard.__version__}\n", "")
