"""Snapshots: the newest steps of a run in the memory of its hosts, for processes that start after others were lost.

- Each rank copies what it holds to its host's memory, at places that stay the same from step to step; nothing is
  gathered. All else happens on a thread: checksums, records, copies for another host, and the word of all ranks that
  they have their part, without which the other slot is not written again (``[Note: Whole or not at all]``).
- Frozen parameters on a CPU are copied to a slot once, and again when their bits are others.
- Loading takes the newest step of which every rank's part is there and intact, on this host or on another. What is read
  goes through ``load``'s own checks. At the number of ranks that made it each rank reads its own part; at another one,
  whatever of the parts lies in the regions that it holds.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from trueshard import _torch
from trueshard.checkpoint import state
from trueshard.checkpoint.format import crc32
from trueshard.checkpoint.loading import Found, LoadJob
from trueshard.checkpoint.process_group import RankGroup, as_bytes
from trueshard.checkpoint.saving import Saving, Staging, background, check_kind
from trueshard.checkpoint.snapshot_finding import Meeting, catalogue_of, here, layout_of, layout_of_regions, regions_of
from trueshard.checkpoint.snapshot_parts import (
    SLOTS,
    Part,
    Placed,
    Slot,
    checksum_of,
    clear,
    folder_of,
    folders_of,
    lasting_text,
    make_private,
    parts_in,
    place,
    record_of,
    view_of,
)
from trueshard.errors import RankFailed, own_errors, warn_user
from trueshard.files import replace_text


class Snapshots:
    """Keeps the state of the newest steps in the memory of the hosts, where it outlives the processes::

        snapshots = trueshard.Snapshots("runs/first")
        found = snapshots.load(model=model, optimizer=optimizer)
        for step in range(snapshots.step or 0, steps):
            ...
            snapshots.save(step + 1, model=model, optimizer=optimizer)
        snapshots.close()

    Two steps are kept, in ``/dev/shm``, readable by this user alone: of each rank two times what it holds. Processes
    that are started with the same ``run`` find them until the host starts anew, at any number of ranks.

    Args:
        run: name of the run, such as its folder; a relative path means another run in another working directory.
        copies: 1: a second copy of each rank's part goes to the memory of the next host, so that a host that is lost
            loses nothing. It sends what a rank holds over the network at every save.
        fallback: folder on a disk that is used, with a warning, where the memory has no room.

    Raises:
        ValueError: ``copies`` is neither 0 nor 1.
        PermissionError: another user has made the folder that is to be this run's.
    """

    def __init__(
        self, run: str | os.PathLike[str], *, copies: int = 0, fallback: str | os.PathLike[str] | None = None
    ) -> None:
        if copies not in (0, 1):
            raise ValueError(f"copies is {copies!r}; it is 0 or 1")
        self.step: int | None = None
        """Step of the snapshot that was saved or loaded last; None: none was."""
        self._copies = copies
        self._folders = folders_of(run, fallback)
        """Places where parts may be: in memory, and on the disk."""
        self._folder = self._folders[0]
        """Place of new files."""
        self._next = 0
        """Slot that the next save writes to."""
        self._made_by = ""
        """See ``Part.made_by``; set by the first save."""
        self._ranks: RankGroup | None = None
        """The ranks, connected for the thread; set by the first save."""
        self._targets: dict[int, int] = {}
        """Rank → the rank on the next host that keeps a copy of its part."""
        self._slots: dict[tuple[int, int], Slot] = {}
        """(slot, rank) → the file that this process writes: its own, and copies of others'."""
        self._kept: tuple[dict[str, Placed], str] | None = None
        """Places of the tensors in the save before, and what follows from them, as the record has it."""
        self._staging = Staging()
        self._saving: Saving | None = None
        """The save whose thread may still run."""

    @own_errors()
    @torch.no_grad()
    def save(self, step: int, *, model: Any = None, optimizer: Any = None, **more: Any) -> None:
        """Keep this step. Collective; returns once this rank's part is copied, and does the rest in the background.

        Args:
            step: number of the step, larger than that of the save before.
            model: as in ``trueshard.save``.
            optimizer: as in ``trueshard.save``.
            more: as in ``trueshard.save``; equal on every rank, or restored on each rank as it was at the same number.

        Raises:
            ValueError, TypeError: an argument cannot be saved; the message names it.
            OSError: there is no room, and no ``fallback``.
            RuntimeError: another rank was lost during the save before (``RankFailed``).
        """
        self.wait()
        models, optimizers = state.by_prefix(model, optimizer)
        tensors, manifest = state.collect(models, optimizers, more, None)
        for key, tensor in tensors.items():
            check_kind(key, tensor)
        ranks = self._ranks or self._connect(model)
        table, bits = state.random_state()
        regions = regions_of(tensors) | {"rng": (((0, len(bits)),),)}
        frozen = [key for key, entry in manifest.tensors.items() if entry.trainable is False]  # in one piece, first
        locals_of = {key: _torch.local(tensors[key]).detach() for key in dict.fromkeys([*frozen, *tensors])}
        locals_of["rng"] = bits
        placed, size = place(locals_of, regions)
        slot, data = self._open(self._next, ranks.rank, size)
        stamp = [(placed[key], _bits(locals_of[key])) for key in frozen]
        (held, checksum), slot.frozen = slot.frozen, ([], 0)
        kept = len(frozen) if held == stamp else 0
        views = [view_of(data, part) for part in placed.values()]
        land = self._staging.copy_into(views[kept:], list(locals_of.values())[kept:])
        begin = [*placed.values()][len(frozen)].begin
        about: dict[str, Any] = {"made_by": self._made_by, "step": step, "slot": self._next}
        about |= {"rank": ranks.rank, "ranks": ranks.world, "size": size, "layout": layout_of_regions(regions)}
        about["content"] = {
            "manifest": {"models": manifest.models, "optimizers": manifest.optimizers, "more": manifest.more},
            "rng": table,
        }
        if self._kept is None or self._kept[0] != placed:  # else no word of it is another
            content = state.rank_content("", ranks, {}, manifest, tensors)
            entries = {key: asdict(entry) for key, entry in manifest.tensors.items()}
            told = [content.first, [*content.entries], content.tied, bool(content.models)]
            lasting = {"entries": entries, "told": told}
            self._kept = placed, lasting_text(placed, lasting)
        lasting_part = self._kept[1]

        def complete() -> None:
            land()
            slot.frozen = stamp, checksum if kept else checksum_of(data[:begin])
            text = record_of(about, checksum_of(data[begin:], slot.frozen[1]), lasting_part)
            slot.publish(text)
            self._exchange_copies(ranks, about["slot"], text, data)
            try:
                ranks.attempt("", lambda: None)
            except RuntimeError as error:  # the group's: nothing of this rank can fail here
                raise RankFailed(f"the snapshot of step {step} is not whole on every rank ({error})") from error

        self.step, self._next = step, (self._next + 1) % SLOTS
        self._saving = Saving(complete, f"snapshot of step {step}")

    def wait(self) -> None:
        """Wait until the newest snapshot is whole on every rank, and raise what went wrong with it."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.wait()

    @own_errors()
    @torch.no_grad()
    def load(
        self,
        *,
        model: Any = None,
        optimizer: Any = None,
        after: int = -1,
        before: int | None = None,
        rng: bool = True,
        **more: Any,
    ) -> Found | None:
        """Load the newest snapshot, in place; its number is in ``step`` then. Collective.

        Args:
            model: as in ``trueshard.load``.
            optimizer: as in ``trueshard.load``.
            after: load one of a later step than this alone, such as that of the newest checkpoint on disk.
            before: load one of an earlier step than this alone, such as one at which a fault was found.
            rng: restore this rank's random generators.
            more: as in ``trueshard.load``.

        Returns:
            What ``trueshard.load`` returns; None, and nothing is changed, if no snapshot is whole.

        Raises:
            ValueError: it is of another model.
            RuntimeError: another rank failed, or did not call ``load``.
        """
        self.wait()
        background.wait()
        group = state.group_of(model)
        parts = Meeting(group, self._folders).newest(after, before, layout_of(model))
        if parts is None:
            return None
        options = {"strict": True, "verify": False, "rng": rng, "convert": False, "allow_pickle": False}
        with torch.device("cpu"):
            result = LoadJob(group, options, None, more).run(catalogue_of(parts, group), model, optimizer)
        first = parts.records[0]
        self.step, self._next = first.step, (first.slot + 1) % SLOTS
        return result

    def close(self) -> None:
        """Remove this run's snapshots from this host: the run has ended. Every rank calls it."""
        self.wait()
        self._slots.clear()
        for folder in self._folders:
            clear(folder)

    def _connect(self, model: Any) -> RankGroup:
        """Prepare for the first save. Collective."""
        group = state.group_of(model)
        token = secrets.token_hex(4)
        make_private(self._folders[0])
        everyone = group.attempt("the snapshot was not begun", lambda: (token, here(self._folders)))
        hosts = [host for _, host in everyone]
        order = list(dict.fromkeys(hosts))
        if self._copies and len(order) == 1 and group.world > 1:
            warn_user("memory copies: all ranks are on one host, whose loss no copy in its own memory survives")
        if self._copies and len(order) > 1:
            on_host = {host: [rank for rank, other in enumerate(hosts) if other == host] for host in order}
            for at, host in enumerate(order):
                neighbours = on_host[order[(at + 1) % len(order)]]
                self._targets |= {rank: neighbours[place % len(neighbours)] for place, rank in enumerate(on_host[host])}
        mine = [rank for rank, host in enumerate(hosts) if host == hosts[group.rank]]
        if group.rank == mine[0]:
            kept = mine + [rank for rank, target in self._targets.items() if target in mine]
            for folder in self._folders:
                # Without a step that was loaded, what is there is of a run that somebody began anew.
                clear(folder, kept if self.step is not None else ())
        group.attempt("the snapshot was not begun", lambda: None)
        self._made_by, self._ranks = everyone[0][0], group.for_background("snapshots")
        return self._ranks

    def _open(self, number: int, rank: int, size: int) -> tuple[Slot, torch.Tensor]:
        """Return the file of a rank in a slot, and its memory: on the disk if there is no room elsewhere."""
        slot = self._slots.get((number, rank))
        if slot is None:
            slot = self._slots[number, rank] = Slot(self._folder / f"slot-{number}", rank)
        try:
            return slot, slot.open(size)
        except OSError as error:
            if error.errno != errno.ENOSPC or self._folder == self._folders[-1]:
                raise
            full, self._folder = self._folder, self._folders[-1]
        warn_user(
            f"{full}: no room for {size:,} bytes of a snapshot; from now on {self._folder} is used, which is slower"
        )
        make_private(self._folder)
        del self._slots[number, rank]
        return self._open(number, rank, size)

    def _exchange_copies(self, ranks: RankGroup, number: int, text: str, data: torch.Tensor) -> None:
        """Send this rank's part to the next host, and keep those that come from the one before."""
        if not self._targets:
            return
        target = self._targets[ranks.rank]
        sources = [rank for rank, to in self._targets.items() if to == ranks.rank]
        record = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        sizes = {rank: torch.zeros(2, dtype=torch.int64) for rank in sources}
        ranks.exchange({target: torch.tensor([len(record), len(data)])}, sizes)
        records = {rank: torch.empty(int(sizes[rank][0]), dtype=torch.uint8) for rank in sources}
        ranks.exchange({target: record}, records)
        opened = {rank: self._open(number, rank, int(sizes[rank][1])) for rank in sources}
        ranks.exchange({target: data}, {rank: memory for rank, (_, memory) in opened.items()})
        for rank, (copy, _) in opened.items():
            copy.publish(bytes(records[rank].numpy()).decode())


def _bits(local: torch.Tensor) -> Any:
    """Return a checksum of a tensor, as a write through ``.data`` counts nowhere; of a device's what nothing equals.

    That would have to come to the host for it, which is the copy that is to be saved.
    """
    return crc32(as_bytes(local)) if local.device.type == "cpu" else object()


def newest_parts(run: str | os.PathLike[str], fallback: str | os.PathLike[str] | None = None) -> list[Part]:
    """Return the parts of the newest snapshot of which this host alone has all; none if there is none.

    Their bytes are not read. ``fallback``: as of ``Snapshots``.
    """
    held: dict[tuple[int, str], dict[int, Part]] = {}
    for part in (part for folder in folders_of(run, fallback) for part in parts_in(folder)):
        held.setdefault((part.step, part.made_by), {})[part.rank] = part
    whole = [key for key, parts in held.items() if len(parts) == next(iter(parts.values())).ranks]
    return list(held[max(whole)].values()) if whole else []


def move_to_disk(run: str | os.PathLike[str], fallback: Path, after: int) -> int:
    """Move the newest snapshot from memory to a folder on a disk if its step is later than ``after``; remove the rest.

    Returns the step whose snapshot is in that folder now, or 0. For the end of a run, when no process writes.
    """
    parts = newest_parts(run, fallback)
    step = parts[0].step if parts else 0
    if step > after:
        for part in parts:
            slot = fallback / part.folder.name
            if part.folder != slot:
                slot.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(part.folder / part.name, slot / part.name)
                replace_text(slot / f"{part.name}.json", part.text)
    else:
        clear(fallback)
    clear(folder_of(run))
    return step if step > after else 0
