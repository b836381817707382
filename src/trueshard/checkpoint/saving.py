"""Save a checkpoint: each rank writes its own bytes of the final files, and the directory appears when all are on disk.

1. Content is collected and compared; every rank computes the same layout.
2. With ``wait=False`` this rank's part is copied to host memory, and the rest happens on a thread.
3. Rank 0 makes the files with their headers; every rank writes its ranges, flushes them to disk, reads them again.
4. Rank 0 writes the manifest and gives the directory its name.

If anything fails on any rank, all ranks raise, and what was written is removed. One save runs at a time.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import logging
import math
import os
import secrets
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor

from trueshard import _torch
from trueshard.checkpoint import hashing, layout, state
from trueshard.checkpoint.catalogue import is_url
from trueshard.checkpoint.format import MANIFEST, FileRecord, Manifest, TensorEntry, aligned, crc32, crc32_joined, join
from trueshard.checkpoint.process_group import RankGroup, by_rows, check_equal, own_part
from trueshard.checkpoint.writing import OF_A_STEP, LocalWriter, RemoteWriter, Written, discard, move_link
from trueshard.errors import own_errors
from trueshard.text import logger, timed

_RESERVED = ("model", "optimizer", "rng")


@own_errors()
@torch.no_grad()
def save(
    path: str | os.PathLike[str],
    *,
    model: Any = None,
    optimizer: Any = None,
    wait: bool = True,
    verify: bool = True,
    tokenizer: Any = None,
    names: Mapping[str, str] | Callable[[str], str | None] | None = None,
    base: bool = True,
    **more: Any,
) -> Saving | None:
    """Write a checkpoint. Collective; has no effect on training.

    The stages of a pipeline (``Plan(pipeline=True)``) are one model: every rank of every stage saves to one ``path``.

    Args:
        path: the directory to make; it must not exist, and has this name only once it is complete. Or a URL of fsspec,
            which is a checkpoint as soon as its manifest is there.
        model: a module, sharded or not, or a dict of several.
        optimizer: an optimizer of their parameters, or a dict of several.
        wait: False: return once this rank's part is copied to host memory (one shard of what is saved; of a GPU's into
            pinned memory, which is kept for the next save), and write in the background. The next ``save`` or ``load``
            waits for it, and raises its error.
        verify: read the files again, past the system's cache where possible, and compare checksums.
        tokenizer: one of transformers; its files are put beside the model's.
        names: the model's name of a tensor → its name in the files (None, or left out of a dict: the same). What a
            stage calls ``h.0.weight`` may be ``h.2.weight`` in the whole model.
        base: False: of a PEFT model leave out the base, unless it is trained, or changed by the adapter's
            initialisation, or nothing says where it is. ``load`` leaves a model's base as it is then.
        more: nested dicts of tensors and JSON values, or objects with ``state_dict()``.

    Returns:
        None; with ``wait=False``, an object to wait for.

    Raises:
        FileExistsError: something is at ``path`` already.
        ValueError, TypeError: an argument cannot be saved, or differs between ranks; the message names it.
        OSError: it cannot be written; nothing is left behind.
        RuntimeError: another rank failed, or did not call ``save``.
    """
    background.wait()
    renaming = names.get if isinstance(names, Mapping) else names
    job = _prepare(
        path, model, optimizer, tokenizer if wait else copy.deepcopy(tokenizer), more, verify, renaming, base
    )
    if wait:
        job.run()
        return None
    job.group = job.group.for_background()
    staged = _staging.copies([_torch.local(tensor).detach() for _, tensor in job.rows.values()])
    job.rows = {key: (begin, copy) for (key, (begin, _)), copy in zip(job.rows.items(), staged, strict=True)}
    return background.start(job.run, f"saving {path}")


class Staging:
    """Copies of tensors in host memory; that for tensors of a device is pinned, and kept for the next copies."""

    def __init__(self) -> None:
        self._pinned = torch.empty(0, dtype=torch.uint8, device="cpu")
        """Kept, since making pinned memory takes longer than copying to it."""

    def copies(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies, valid until the next call. Waits once for the device, at the end."""
        sizes = [0 if tensor.device.type == "cpu" else aligned(tensor.nbytes) for tensor in tensors]
        if sum(sizes) > self._pinned.numel():
            self._pinned = torch.empty(0, dtype=torch.uint8, device="cpu")  # freed before there is a second one
            pinned = torch.cuda.is_available()
            self._pinned = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu", pin_memory=pinned)
        copies, place = [], 0
        for tensor, size in zip(tensors, sizes, strict=True):
            if size:
                memory = self._pinned[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            else:
                memory = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            copies.append(memory.copy_(tensor, non_blocking=bool(size)))
            place += size
        if place:
            torch.accelerator.current_stream().synchronize()
        return copies

    def copy_into(self, targets: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Copy to tensors in host memory what lies there already; return what copies the rest, on any thread."""
        away = [i for i, tensor in enumerate(tensors) if tensor.device.type != "cpu"]
        for target, tensor in zip(targets, tensors, strict=True):
            if tensor.device.type == "cpu":
                target.copy_(tensor)
        staged = self.copies([tensors[i] for i in away])

        def land() -> None:
            for i, there in zip(away, staged, strict=True):
                targets[i].copy_(there)

        return land


_staging = Staging()
"""Memory of ``save``: one runs at a time."""


@dataclass
class SaveJob:
    """A save that all ranks have agreed on."""

    writer: LocalWriter | RemoteWriter
    group: RankGroup
    manifest: Manifest
    headers: dict[str, bytes]  # first bytes of tensor files, and whole index files
    companions: Callable[[], dict[str, bytes]]  # returns the files without tensors
    rows: dict[str, tuple[int, Any]]  # key → (first byte in the tensor, this rank's rows of it)
    verify: bool
    left_out: tuple[str, ...]  # folders that have no tensors

    def run(self) -> None:
        rank, where = self.group.rank, self.writer.where
        attempt = functools.partial(self.group.attempt, f"{where} was not saved")
        try:
            with timed(f"save of {where}"):
                attempt(lambda: None if rank else self.writer.begin(*self._files()))
                everyone = attempt(lambda: self.writer.write(rank, self.rows, self.manifest.tensors, self.verify))
                attempt(lambda: None if rank else self._publish(everyone))
        except BaseException:
            if rank == 0:
                self.writer.abandon()
            raise
        finally:
            self.rows = {}  # what was copied to host memory is not kept by whoever keeps the `Saving`

    def _files(self) -> tuple[dict[str, bytes], dict[str, int]]:
        """Return each file's first bytes and its size; record them in the manifest. Rank 0."""
        files = self.headers | {k: v for k, v in self.companions().items() if not k.startswith(self.left_out)}
        sizes = {file: len(data) for file, data in files.items()}
        for entry in self.manifest.tensors.values():
            for piece in entry.pieces:
                sizes[piece.file] = max(sizes[piece.file], piece.end)
        for file, data in files.items():
            header = len(data) if file in self.headers and file.endswith(".safetensors") else None
            self.manifest.files[file] = FileRecord(sizes[file], crc32(memoryview(data)), header)
        return files, sizes

    def _publish(self, everyone: list[Written]) -> None:
        """Combine the checksums and pieces of all ranks, and write the manifest. Rank 0."""
        for key, entry in self.manifest.tensors.items():
            holders = [written for written in everyone if key in written.parts]
            parts = sorted((written.parts[key], written.pieces.get(key)) for written in holders)
            ends = [0, *(end for (_, end, _), _ in parts)]
            if [begin for (begin, _, _), _ in parts] != ends[:-1] or ends[-1] != entry.nbytes:
                held = ", ".join(f"{begin} to {end}" for (begin, end, _), _ in parts)
                raise RuntimeError(f"{key!r}: the ranks' parts, bytes {held}, do not make up its {entry.nbytes}")
            entry.crc32 = crc32_joined((checksum, end - begin) for (begin, end, checksum), _ in parts)
            entry.pieces = [piece for _, piece in parts if piece is not None] or entry.pieces
        for written in everyone:
            self.manifest.files.update(written.files)
        self.writer.publish(self.manifest.to_bytes())


def _prepare(
    path: str | os.PathLike[str],
    model: Any,
    optimizer: Any,
    tokenizer: Any,
    more: Mapping[str, Any],
    verify: bool,
    renaming: state.Renaming,
    base: bool,
) -> SaveJob:
    """Collect, compare and lay out. Collective: one exchange, since training waits for it."""
    group, failed = state.group_of(model), f"{path} was not saved"
    token = secrets.token_hex(4) if group.rank == 0 else ""
    models: dict[str, Any] = {}
    tensors: state.Tensors = {}
    manifest, bits = Manifest(), torch.empty(0)
    left_out: tuple[str, ...] = ()

    def collect() -> state.RankContent:
        nonlocal models, tensors, manifest, bits, left_out
        if bad := [key for key in more if key in _RESERVED or "/" in key]:
            raise ValueError(f"{bad[0]!r} cannot be the name of an entry; give it another")
        models, optimizers = state.by_prefix(model, optimizer)
        if group.staged or renaming is not None:
            layout.refuse_adapters(models)
        tensors, manifest = state.collect(models, optimizers, more, renaming)
        left_out = () if base else layout.leave_base_out(models, tensors, manifest.tensors)
        table, bits = state.random_state()
        manifest.rng = [table] * group.world
        manifest.tensors["rng"] = TensorEntry(["rng"], [group.world, len(bits)], "uint8")
        if group.rank == 0:
            _writer(path, token).check_free()
        common = {"path": os.fspath(path), "verify": verify, "rng": table, "more": sorted(more)}
        for key, tensor in tensors.items():
            check_kind(key, tensor)
        return state.rank_content(token, group, common, manifest, tensors)

    everyone = group.attempt(failed, collect)
    check_equal("save()", [(content.first, content.common, content.in_stage) for content in everyone])
    # From here on every rank computes the same, or fails alike.
    first_with = state.merge(manifest, everyone, group.staged)
    rows: dict[str, tuple[int, Any]] = {}
    for number, key in enumerate(manifest.tensors):
        tensor, first = tensors.get(key), first_with.get(key, group.stage[0])
        if isinstance(tensor, DTensor):
            local, (begin, end) = by_rows(tensor), own_part(tensor, number)
            if end > begin and first in group.stage:
                rows[key] = begin, local
        elif tensor is not None and first == group.rank:
            rows[key] = 0, tensor
    rows["rng"] = group.rank * len(bits), bits.view(1, -1)
    manifest.about = {
        "written": datetime.now(timezone.utc).isoformat(timespec="microseconds"),
        "trueshard": version("trueshard"),
        "torch": torch.__version__,
        "ranks": group.world,
    }
    if hashing.are_exact(models):
        hashed = {key: tensor for key, tensor in tensors.items() if not key.startswith("more/")}
        manifest.about["hashes"] = hashing.hash_together(hashed, group, failed)
    writer, headers = _writer(path, everyone[0].token), {}
    if isinstance(writer, LocalWriter):
        headers = layout.lay_out(manifest.tensors, layout.file_keys(models, manifest.tensors), marked=True)
    companions = layout.companions(models, tokenizer, str(path) if is_url(path) else os.path.abspath(path))
    return SaveJob(writer, group, manifest, headers, companions, rows, verify, left_out)


def _writer(path: str | os.PathLike[str], token: str) -> LocalWriter | RemoteWriter:
    return RemoteWriter(str(path)) if is_url(path) else LocalWriter(Path(path), token)


def check_kind(key: str, tensor: torch.Tensor) -> None:
    local = _torch.local(tensor)
    if tensor.is_meta or local.is_meta:
        raise ValueError(f"{key!r} is on the meta device and has no values; load or initialise it first")
    if tensor.layout != torch.strided:
        raise TypeError(f"{key!r} is a {tensor.layout} tensor; give its parts as entries of their own")
    if type(local) is not torch.Tensor and not isinstance(local, torch.nn.Parameter):
        raise TypeError(
            f"{key!r} is a {type(local).__name__}, whose bytes depend on how it is cut, so it would not load at "
            "another number of ranks; leave its optimizer or model out, or convert it"
        )


class Saving:
    """A save in the background: ``work``, called ``what`` in messages."""

    def __init__(self, work: Callable[[], None], what: str) -> None:
        self.what = what
        self.failure: BaseException | None = None
        """Not raised yet: ``wait`` raises it once."""
        self.after: Callable[[], None] = lambda: None  # called in the background once the checkpoint is there
        # No daemon: a script that ends waits for its checkpoint.
        self._thread = threading.Thread(target=self._run, args=(work,), name=f"trueshard: {what}")
        self._thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
            self.after()
        except BaseException as error:
            self.failure = error

    @property
    def done(self) -> bool:
        """True once it has ended, successfully or not."""
        return not self._thread.is_alive()

    @own_errors()
    def wait(self) -> None:
        """Wait until the checkpoint is complete.

        Raises:
            OSError, RuntimeError: it failed, with the error that a ``save`` which waits would have raised.
        """
        self._thread.join()
        error, self.failure = self.failure, None
        if error is not None:
            raise error


class Background:
    """The save that runs in the background of this process, if any.

    There is one at a time: the exchanges of two would mix on the group that is theirs.
    """

    def __init__(self) -> None:
        self._newest: Saving | None = None
        """Kept after its end until the next save or load, or the end of the process, has looked for its error."""
        atexit.register(self._report)

    def start(self, work: Callable[[], None], what: str) -> Saving:
        self._newest = Saving(work, what)
        return self._newest

    def wait(self) -> None:
        """Wait for the save in the background, and raise its error."""
        if self._newest is not None:
            self._newest.wait()
            self._newest = None

    def _report(self) -> None:
        """Report at exit a failed save nobody waited on, and exit with code 1: no handler can change it otherwise."""
        if self._newest is not None and self._newest.failure is not None:
            logger.error("trueshard: %s failed: %s", self._newest.what, self._newest.failure)
            logging.shutdown()
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            os._exit(1)


background = Background()


class Checkpoints:
    """Saves a run's checkpoints as ``step-00000100`` in one directory, and deletes those that are not to be kept.

    The link ``latest`` beside them points to the one that was written last; with ``keep_best``, ``best`` to the best.

    Args:
        directory: made when needed.
        keep_last: how many of the newest are kept, at least 1.
        keep_every: keep steps that are multiples of it for good.
        keep_best: how many of the best by ``metric`` are kept.
        metric: a key of the ``metrics`` given to ``save``.
        mode: "min" or "max": which values are better.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep_last: int = 3,
        keep_every: int | None = None,
        keep_best: int | None = None,
        metric: str = "loss",
        mode: Literal["min", "max"] = "min",
    ) -> None:
        for name, value in (("keep_last", keep_last), ("keep_every", keep_every), ("keep_best", keep_best)):
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} is {value!r}; it is a whole number from 1 on")
        if mode not in ("min", "max"):
            raise ValueError(f'mode is {mode!r}; it is "min" or "max"')
        self.directory = Path(directory)
        self._last, self._every, self._best = keep_last, keep_every, keep_best
        self._metric, self._sign = metric, 1.0 if mode == "min" else -1.0

    def path(self, step: int) -> Path:
        """Return the place of a step's checkpoint."""
        return self.directory / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Return the steps of complete checkpoints, in order."""
        names = (path.parent.name for path in self.directory.glob(f"*/{MANIFEST}"))
        return sorted(int(match[1]) for match in map(OF_A_STEP.fullmatch, names) if match)

    def latest(self) -> Path | None:
        """Return the checkpoint of the last step, or None."""
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def best(self) -> Path | None:
        """Return the checkpoint with the best metric, of equals the first; or None if none was saved with it."""
        ranked = self._ranked()
        return self.path(ranked[0]) if ranked else None

    def save(self, step: int, *, metrics: Mapping[str, float] | None = None, **arguments: Any) -> Saving | None:
        """Call ``trueshard.save`` under the step's name, then delete what is not kept. Collective.

        Args:
            step: of training, from 0 on.
            metrics: saved along, in the entry ``progress``.
            arguments: those of ``save``.

        Raises:
            ValueError: ``keep_best`` needs a metric that is not in ``metrics``.
        """
        if self._best is not None and self._metric not in (metrics or {}):
            raise ValueError(f"keep_best goes by {self._metric!r}, which is not among metrics {sorted(metrics or {})}")
        progress = {"step": step, "metrics": {key: float(value) for key, value in (metrics or {}).items()}}
        saving = save(self.path(step), progress=progress, **arguments)
        if saving is not None and not RankGroup().rank:
            saving.after = self._link_best  # if it is complete by now, `prune` does it
        # With wait=False the newest is not there yet: one more of the older ones stays until the next save.
        self.prune()
        return saving

    def prune(self) -> None:
        """Delete what is not kept. Rank 0 does."""
        if RankGroup().rank:
            return
        self._link_best()
        steps = self.steps()
        kept = {*steps[-self._last :], *self._ranked()[: self._best or 0]}
        for step in steps:
            if step not in kept and not (self._every and step % self._every == 0):
                discard(self.path(step))

    def _link_best(self) -> None:
        best = self.best() if self._best is not None else None
        move_link(self.directory / "best", None if best is None else best.name)

    def _ranked(self) -> list[int]:
        """Return the steps that have the metric, best first, of equals the earlier one: a later one is no better."""
        result: list[tuple[float, int]] = []
        for step in self.steps():
            path = self.path(step) / MANIFEST
            try:
                progress = join(Manifest.parse(path.read_bytes(), str(path)).more["progress"], lambda key: None)
                value = progress["metrics"][self._metric]
            except (OSError, ValueError, LookupError, TypeError):  # damaged, or saved without the metric
                continue
            if type(value) in (int, float) and not math.isnan(value):
                result.append((self._sign * value, step))
        return [step for _, step in sorted(result)]
