"""Saving: each rank writes its own bytes of the final files, and the directory appears when all of it is on disk.

The way of a save, all ranks together:

1. What is to be saved is collected and agreed on; each rank computes the same layout.
2. Without waiting: what this rank writes is copied to host memory, and the rest happens in the background.
3. Rank 0 makes the files with their headers; every rank writes its ranges, makes them durable, and reads them again.
4. Rank 0 writes the manifest and gives the directory its name.

Whatever fails on any rank, all raise, and what was written is removed.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from trueshard import _torch
from trueshard.checkpoint import background, layout, pieces, randomness, state
from trueshard.checkpoint.checksum import joined
from trueshard.checkpoint.manifest import Entry, FileRecord, Manifest
from trueshard.checkpoint.target import Target, Written, target_of
from trueshard.checkpoint.together import Together, compare

RESERVED = ("model", "optimizer", "rng")


@torch.no_grad()
def save(
    path: str | os.PathLike[str],
    *,
    model: Any = None,
    optimizer: Any = None,
    wait: bool = True,
    verify: bool = True,
    tokenizer: Any = None,
    **more: Any,
) -> background.Saving | None:
    """Write a checkpoint. Collective; has no effect on training.

    Args:
        path: the directory to make; it must not exist, and has this name only once it is complete. Or a URL that fsspec
            knows, where it is one as soon as its manifest is there.
        model: a module, sharded or not, or a dict of several.
        optimizer: an optimizer of their parameters, or a dict of several.
        wait: False: return when this rank's part is copied to host memory (so much more memory is used: a shard of what
            is saved), and write in the background. The next ``save`` or ``load`` waits for it, and raises its error.
        verify: read what was written again, past the system's cache where it allows, and compare checksums.
        tokenizer: one of transformers; its files are put beside the model's.
        more: nested dicts of tensors and JSON values, or objects with ``state_dict()``.

    Returns:
        None; with ``wait=False`` what can be waited for.

    Raises:
        FileExistsError: something is at ``path`` already.
        ValueError, TypeError: an argument that cannot be saved, or ranks do not give the same; the message names it.
        OSError: it cannot be written; nothing is left behind.
        RuntimeError: another rank failed, or did not come.
    """
    background.finish()
    job = prepare(path, model, optimizer, tokenizer, more, verify)
    if wait:
        job.run()
        return None
    job.stage()
    return background.start(job.run, f"saving {path}")


@dataclass
class Job:
    """A save that is agreed on."""

    target: Target
    together: Together
    manifest: Manifest
    headers: dict[str, bytes]
    """Of tensor files, and their indices."""
    others: Callable[[], dict[str, bytes]]
    """The files that hold no tensors."""
    mine: dict[str, tuple[int, Any]]
    """Key → (where in the tensor's bytes, this rank's part of it)."""
    verify: bool

    def stage(self) -> None:
        """Copy what this rank writes."""
        staged = {}
        for key, (begin, tensor) in self.mine.items():
            local = _torch.local(tensor).detach()
            staged[key] = begin, torch.empty(local.shape, dtype=local.dtype).copy_(local)
        self.mine = staged

    def run(self) -> None:
        """Write it. Collective."""
        what = f"{self.target.where} was not saved"
        error: BaseException | None = None
        try:
            if self.together.rank == 0:
                self.target.begin(*self._files())
        except BaseException as caught:
            error = caught
        self._settle(error, what)
        found = Written()
        try:
            found = self.target.write(self.together.rank, self.mine, self.manifest.tensors, self.verify)
        except BaseException as caught:
            error = caught
        everyone = self._settle(error, what, found)
        try:
            if self.together.rank == 0:
                self._complete(everyone)
                self.target.publish(self.manifest.to_bytes())
        except BaseException as caught:
            error = caught
        self._settle(error, what)
        self.target.end()

    def _settle(self, error: BaseException | None, what: str, value: Any = None) -> list[Any]:
        try:
            return self.together.settle(error, what, value)
        except BaseException:
            self.mine = {}
            if self.together.rank == 0:
                self.target.abandon()
            raise

    def _files(self) -> tuple[dict[str, bytes], dict[str, int]]:
        """What rank 0 writes: how each file begins, and how long it will be."""
        files = self.headers | self.others()
        sizes = {file: len(data) for file, data in files.items()}
        for entry in self.manifest.tensors.values():
            for piece in entry.pieces:
                sizes[piece.file] = max(sizes[piece.file], piece.end)
        for file, data in files.items():
            is_header = file in self.headers and file.endswith(".safetensors")
            self.manifest.files[file] = FileRecord.of(data, is_header)
            self.manifest.files[file].size = sizes[file]
        return files, sizes

    def _complete(self, everyone: list[Written]) -> None:
        """Put together what the ranks have written; rank 0."""
        for key, entry in self.manifest.tensors.items():
            parts = sorted((each.parts[key], each.pieces.get(key)) for each in everyone if key in each.parts)
            ends = [0, *(end for (_, end, _), _ in parts)]
            if [begin for (begin, _, _), _ in parts] != ends[:-1] or ends[-1] != entry.nbytes:
                held = ", ".join(f"{begin} to {end}" for (begin, end, _), _ in parts)
                raise RuntimeError(f"{key!r}: the ranks' parts, bytes {held}, do not make up its {entry.nbytes}")
            entry.crc32 = joined((checksum, end - begin) for (begin, end, checksum), _ in parts)
            entry.pieces = [piece for _, piece in parts if piece is not None] or entry.pieces
        for each in everyone:
            self.manifest.files.update(each.files)


def prepare(
    path: str | os.PathLike[str], model: Any, optimizer: Any, tokenizer: Any, more: Mapping[str, Any], verify: bool
) -> Job:
    """Collect, agree and lay out. Collective: ranks speak once, since training waits for it."""
    error: BaseException | None = None
    together = Together(state.parameters_of(model))
    token = secrets.token_hex(4) if together.rank == 0 else ""
    told: Any = None
    try:
        if bad := [key for key in more if key in RESERVED or "/" in key]:
            raise ValueError(f"{bad[0]!r} cannot be the name of an entry; give it another")
        models = state.models_of(model)
        content = state.collect(models, state.optimizers_of(optimizer), more)
        table, bits = randomness.capture()
        content.tensors["rng"] = bits
        for key, tensor in content.tensors.items():
            _check_kind(key, tensor)
        if together.rank == 0:
            target_of(path, token).check_free()
        others = layout.companions(models, tokenizer)
        told = token, _digest(path, content, table, verify), _only_here(content)
    except Exception as caught:
        error = caught
    everyone = together.settle(error, f"{path} was not saved", told)
    compare("save()", [digest for _, digest, _ in everyone])
    # From here on every rank computes the same, or fails alike.
    target = target_of(path, everyone[0][0])
    writers = _merge([owned for *_, owned in everyone], content)
    entries = _entries(content, writers)
    entries["rng"] = Entry(["rng"], [together.world, len(bits)], "uint8")
    manifest = Manifest(entries, content.models, content.optimizers, content.more, [table] * together.world)
    manifest.about = _about(together.world)
    headers = layout.files_of(entries, layout.places_of(models, entries), marked=True) if target.positioned else {}
    mine = _mine(content, entries, writers, together)
    mine["rng"] = together.rank * len(bits), bits
    return Job(target, together, manifest, headers, others, mine, verify)


def _check_kind(key: str, tensor: torch.Tensor) -> None:
    local = _torch.local(tensor)
    if tensor.is_meta or local.is_meta:
        raise ValueError(f"{key!r} is on the meta device and has no values; load or initialise it first")
    if tensor.layout != torch.strided:
        raise TypeError(f"{key!r} is a {tensor.layout} tensor; give its parts as entries of their own")
    if type(local) not in (torch.Tensor, torch.nn.Parameter) and not isinstance(local, torch.nn.Parameter):
        raise TypeError(
            f"{key!r} is a {type(local).__name__}, whose bytes depend on how it is cut, so it would not load at "
            "another number of ranks; leave its optimizer or model out, or convert it"
        )


def _about(world: int) -> dict[str, Any]:
    now = datetime.now(timezone.utc).isoformat(timespec="microseconds")
    return {"written": now, "trueshard": version("trueshard"), "torch": torch.__version__, "ranks": world}


def _digest(path: Any, content: state.Content, table: list[list[Any]], verify: bool) -> dict[str, Any]:
    """What ranks must agree on."""
    tensors = {
        key: [pieces.placement(tensor), list(tensor.shape), str(tensor.dtype)]
        for key, tensor in content.tensors.items()
        if key in content.held or isinstance(tensor, DTensor) or not key.startswith("optimizer")
    }
    given = {"path": os.fspath(path), "verify": verify, "rng": table, "more": sorted(content.more)}
    return given | state.groups_of(content.optimizers) | tensors


def _only_here(content: state.Content) -> tuple[dict[str, Any], dict[str, Any]]:
    """What another rank may not have: the state of a parameter that is updated by its owner."""
    plain = {
        key: layout.entry_of(tensor, [key])
        for key, tensor in content.tensors.items()
        if key.startswith("optimizer") and not isinstance(tensor, DTensor)
    }
    return plain, {prefix: record["state"] for prefix, record in content.optimizers.items()}


def _merge(everyone: list[Any], content: state.Content) -> dict[str, tuple[int, Entry]]:
    """Complete the optimizers' records with what other ranks have; which rank writes each plain state tensor."""
    writers: dict[str, tuple[int, Entry]] = {}
    for rank, (plain, states) in enumerate(everyone):
        for key, entry in plain.items():
            writers.setdefault(key, (rank, entry))
        for prefix, theirs in states.items():
            known = content.optimizers[prefix]["state"]
            content.optimizers[prefix]["state"] = theirs | known
    for record in content.optimizers.values():
        order = {name: i for i, name in enumerate(name for group in record["groups"] for name in group["params"])}
        record["state"] = dict(sorted(record["state"].items(), key=lambda each: order.get(each[0], len(order))))
    return writers


def _entries(content: state.Content, writers: Mapping[str, tuple[int, Entry]]) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for key, tensor in content.tensors.items():
        held = content.held.get(key)
        names = [key.partition("/")[2]] if held is None else held.names
        entries[key] = layout.entry_of(tensor, names, None if held is None else held.trainable)
    for key, (_, entry) in writers.items():
        entry.names = [key.partition("/")[2]]
        entries.setdefault(key, entry)
    # The same order on every rank, whoever has what.
    state_keys = sorted(key for key in entries if key.startswith("optimizer"))
    return {key: entry for key, entry in entries.items() if not key.startswith("optimizer")} | {
        key: entries[key] for key in state_keys
    }


def _mine(
    content: state.Content, entries: Mapping[str, Entry], writers: Mapping[str, tuple[int, Entry]], together: Together
) -> dict[str, tuple[int, Any]]:
    mine: dict[str, tuple[int, Any]] = {}
    for number, key in enumerate(entries):
        tensor = content.tensors.get(key)
        if isinstance(tensor, DTensor):
            if pieces.is_writer(tensor, number):
                begin, end = pieces.bytes_here(tensor)
                if end > begin:
                    mine[key] = begin, tensor
        elif tensor is not None and key != "rng" and writers.get(key, (0, None))[0] == together.rank:
            mine[key] = 0, tensor
    return mine
