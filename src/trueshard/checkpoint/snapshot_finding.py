"""Find the newest snapshot that is whole, together with the other ranks, and read tensors from its parts.

At the number of ranks that made a snapshot each rank reads its own part; at another one, whatever of the parts lies in
the regions that it holds. A host that lacks a part which is read there gets it from one that has it.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from trueshard import _torch
from trueshard.checkpoint import state
from trueshard.checkpoint.catalogue import Catalogue
from trueshard.checkpoint.format import Manifest, TensorEntry, crc32, with_wrapped
from trueshard.checkpoint.process_group import RankGroup
from trueshard.checkpoint.snapshot_parts import (
    Part,
    Slot,
    make_private,
    parts_in,
    view_of,
)
from trueshard.model.regions import Region, common, coordinate_of, extent, inside, put, region_of, take

_FAILED = "no snapshot was loaded"


def here(folders: Sequence[Path]) -> str:
    """Return a word for this host's memory, the same for all processes that see it, and for no others.

    Containers of one machine may have memories of their own, and machines the same name.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    root = folders[0].parent
    device = root.stat().st_dev if root.exists() else 0
    return f"{socket.gethostname()}:{boot.read_text().strip() if boot.exists() else ''}:{device}:{folders[0]}"


def layout_of_regions(regions: Mapping[str, Region]) -> int:
    """Return a number that is equal where a rank holds the same parts of a model's tensors."""
    return crc32(memoryview(repr([(key, regions[key]) for key in regions if key.startswith("model")]).encode()))


def layout_of(model: Any) -> int:
    """Return ``Part.layout`` of what this rank holds of a model."""
    models, _ = state.by_prefix(model, None)
    tensors, _ = state.collect(models, {}, {}, None)
    return layout_of_regions(regions_of(tensors))


def regions_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Region]:
    """Return the region of each tensor that is here; a mesh is asked once where this rank is in it."""
    here_in: dict[Any, tuple[int, ...]] = {}
    result = {}
    for key, tensor in tensors.items():
        coordinate = None
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            coordinate = here_in[mesh] = here_in.get(mesh) or coordinate_of(mesh)
        result[key] = region_of(tensor, coordinate)
    return result


@dataclass
class Parts:
    """Parts of one snapshot: the record of every rank's, and those whose bytes this host has."""

    records: list[Part]
    here: dict[int, Part] = field(default_factory=dict)


class Meeting:
    """Finds, together with the other ranks, the newest snapshot that is whole, and brings what a host lacks."""

    def __init__(self, group: RankGroup, folders: Sequence[Path]) -> None:
        self._group, self._folders = group, folders
        self._mine = [part for folder in self._folders for part in parts_in(folder)]
        word = here(self._folders)
        names = [(part.step, part.made_by, part.ranks, part.rank) for part in self._mine]
        everyone = self._group.attempt(_FAILED, lambda: (word, names))
        self._hosts = [host for host, _ in everyone]
        self._on_host = dict(everyone)

    def newest(self, after: int, before: int | None, layout: int) -> Parts | None:
        """Return the parts of the newest whole snapshot of a step between the two, or None. Collective."""
        held = {name for names in self._on_host.values() for name in names}
        whole = {(step, made_by, ranks) for step, made_by, ranks, _ in held if after < step < (before or step + 1)}
        for step, made_by, ranks in sorted(whole, reverse=True):
            if any((step, made_by, ranks, rank) not in held for rank in range(ranks)):
                continue
            mine = {part.rank: part for part in self._mine if (part.step, part.made_by) == (step, made_by)}
            intact = self._intact(mine)
            if {rank for ranks_there in intact.values() for rank in ranks_there} == {*range(ranks)}:
                return self._brought({rank: mine[rank] for rank in intact[self._here]}, intact, ranks, layout)
        return None

    @property
    def _here(self) -> str:
        return self._hosts[self._group.rank]

    def _intact(self, mine: Mapping[int, Part]) -> dict[str, list[int]]:
        """Return the intact parts of each host: its ranks share the reading. Collective."""
        neighbours = [rank for rank, host in enumerate(self._hosts) if host == self._here]
        turn = neighbours.index(self._group.rank)
        share = [rank for at, rank in enumerate(sorted(mine)) if at % len(neighbours) == turn]
        everyone = self._group.attempt(_FAILED, lambda: [rank for rank in share if mine[rank].is_intact()])
        result: dict[str, list[int]] = {}
        for host, intact in zip(self._hosts, everyone, strict=True):
            result.setdefault(host, []).extend(intact)
        return result

    def _brought(self, mine: dict[int, Part], intact: Mapping[str, list[int]], ranks: int, layout: int) -> Parts:
        """Return all records, and the parts here after those that a host lacks were brought to it. Collective."""
        source = {rank: next(host for host in intact if rank in intact[host]) for rank in range(ranks)}
        leads = self._hosts.index(self._here) == self._group.rank
        here = {rank: mine[rank].text for rank in mine if leads and source[rank] == self._here}
        own = mine.get(self._group.rank)
        as_before = ranks == self._group.world and (own is None or own.layout == layout)
        everyone = self._group.attempt(_FAILED, lambda: (here, as_before))
        texts = {rank: text for told_there, _ in everyone for rank, text in told_there.items()}
        records = [mine.get(rank) or Part.parse(Path(), texts[rank]) for rank in range(ranks)]
        alone = all(same for _, same in everyone)  # each rank needs its own part, and no other
        for rank in range(ranks):
            needing = [
                host
                for host in dict.fromkeys(self._hosts)
                if rank not in intact.get(host, []) and (not alone or self._hosts[rank] == host)
            ]
            if needing:
                self._bring(rank, records[rank], source[rank], needing, mine)
        return Parts([part for part in records if part is not None], mine)

    def _bring(self, rank: int, part: Any, source: str, needing: Sequence[str], mine: dict[int, Part]) -> None:
        """Send a part from the host that has it to those that need it: the first rank of each takes it."""
        leader, me = self._hosts.index, self._group.rank
        slot = Slot(self._folders[0] / f"slot-{part.slot}", rank)
        if me == leader(source):
            data = mine[rank].mapped()
            self._group.exchange({leader(host): data for host in needing}, {})
        elif self._here in needing and me == leader(self._here):
            make_private(self._folders[0])
            self._group.exchange({}, {leader(source): slot.open(part.size)})
            slot.publish(part.text)
        self._group.attempt(_FAILED, lambda: None)
        if self._here in needing:
            mine[rank] = replace(part, folder=slot.folder)


@dataclass
class _SnapshotCatalogue(Catalogue):
    """The tensors of a snapshot, read from the parts that this host has."""

    parts: list[tuple[Part, torch.Tensor]] = field(default_factory=list)
    """Parts with their bytes, this rank's own first: what ranks hold unlike each other is each one's own."""
    of_rank: dict[int, int] = field(default_factory=dict)
    """Rank → its place in ``parts``."""

    def read(self, key: str, region: Region, local: torch.Tensor) -> None:
        """Fill ``local``, the part of a tensor in ``region``."""
        done: set[Region] = set()
        left = local.numel()
        for part, data in self.parts:
            placed = part.tensors.get(key)
            if not left or placed is None or placed.region in done:
                continue
            done.add(placed.region)
            shared = common(region, placed.region)
            count = torch.Size(extent(shared)).numel()
            if count:
                put(local, inside(region, shared), take(view_of(data, placed), inside(placed.region, shared)))
                left -= count
        if left:
            raise ValueError(f"{self.where}: {left} elements of {key!r} are in no part of it")

    def fill_together(self, key: str, tensor: torch.Tensor, failures: list[Exception]) -> None:
        """Fill this rank's shard of ``tensor``. Not collective: each rank has a part of its own."""
        try:
            self.read(key, region_of(tensor), _torch.local(tensor).detach())
        except Exception as error:
            failures.append(error)

    def read_into(self, key: str, begin: int, local: torch.Tensor) -> None:
        """Fill ``local`` with a rank's random state, which alone is asked for by bytes."""
        part, data = self.parts[self.of_rank[begin // len(local)]]
        local.copy_(view_of(data, part.tensors[key]))

    def full_tensor(self, key: str) -> torch.Tensor:
        tensor = self.entries[key].empty()
        self.read(key, region_of(tensor), tensor)
        return tensor


def _told(part: Part) -> state.RankContent:
    """Return what the rank of a part would have told the others, had it saved a checkpoint."""
    first, owned, tied, tells_all = part.lasting["told"]
    manifest = part.content["manifest"]
    records = with_wrapped(manifest["optimizers"])
    entries = {key: TensorEntry(**part.lasting["entries"][key]) for key in owned}
    optimizers = {
        key: {"groups": record["groups"] if tells_all else [], "state": record["state"]}
        for key, record in records.items()
    }
    models = manifest["models"] if tells_all else {}
    return state.RankContent("", first, {}, {}, entries, tied, models, optimizers)


def catalogue_of(parts: Parts, group: RankGroup) -> _SnapshotCatalogue:
    """Return the catalogue of a snapshot, whose values are those of this rank's own part if the ranks are as many."""
    same = len(parts.records) == group.world
    own = parts.records[group.rank] if same else parts.records[0]
    manifest = Manifest(**own.content["manifest"])
    manifest.tensors.update({key: TensorEntry(**entry) for key, entry in own.lasting["entries"].items()})
    state.merge(manifest, [_told(part) for part in parts.records], group.staged)
    manifest.rng = [part.content["rng"] for part in parts.records]
    length = sum(size for _, size in own.content["rng"])
    manifest.tensors["rng"] = TensorEntry(["rng"], [len(parts.records), length], "uint8")
    first = [group.rank] if same and group.rank in parts.here else []
    order = [*first, *(rank for rank in sorted(parts.here) if rank not in first)]
    read = [(parts.here[rank], parts.here[rank].mapped()) for rank in order]
    directory: Any = SimpleNamespace(where=f"the snapshot of step {own.step}")  # the bytes are in parts
    of_rank = {rank: at for at, rank in enumerate(order)}
    return _SnapshotCatalogue(directory, manifest.tensors, manifest, parts=read, of_rank=of_rank)
