"""Parts of a loop of one's own: batches in an order that is free of the ranks, values of all ranks, rank 0 first.

torch's ``DataLoader`` has the workers. torchdata's ``StatefulDataLoader`` would add nothing: its state is bound to the
numbers of ranks and workers. Here a worker makes every n-th batch of its rank, and sends the place in the data along.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from trueshard import _torch
from trueshard.distributed import ensure_axes, ensure_process_group, gloo_group, host_group
from trueshard.errors import RankFailed, TrueShardValueError, own_errors, with_kind
from trueshard.model import registry
from trueshard.optim.seeded_random import seed_of
from trueshard.parallel.random_streams import random_states, set_random_states
from trueshard.sharding.engine import sharded
from trueshard.train.data.order import sequence_indices

LONGEST = datetime.timedelta(days=1)
"""Time limit of the ranks that wait in ``main_first``."""


class _Batches(IterableDataset[Any]):
    """This rank's batches of a pass, or a worker's part of them, each with the number of its repeated samples and the
    place in the data after the last complete step.
    """

    rank, rows = 0, 0  # this rank among those that read different samples; samples of a batch
    worker: Any = None

    def __init__(self, dataset: Any, size: int, shuffle: bool, drop_last: bool, seed: int, parts: int, collate: Any):
        self.dataset, self.size, self.parts, self.seed, self.collate = dataset, size, parts, seed, collate
        self.shuffle, self.drop_last = shuffle, drop_last
        is_stream = isinstance(dataset, IterableDataset)  # has a __getitem__, too
        self.is_sized = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and not is_stream
        self.place: dict[str, Any] = {"passes": 0, "samples": 0}

    def __iter__(self) -> Iterator[tuple[Any, int, dict[str, Any]]]:
        place, number = self.place, 0
        self.place = {"passes": place["passes"] + 1, "samples": 0}  # persistent workers are not told
        worker = self.worker = self.worker or get_worker_info()
        if not self.is_sized:
            _torch.hide_worker()
        for samples, after in self._steps(**place):
            for part in range(self.parts):
                if worker is None or number % worker.num_workers == worker.id:
                    first = (self.rank * self.parts + part) * self.rows
                    rows = [samples[i % len(samples)] for i in range(first, first + self.rows)]
                    if self.is_sized:
                        rows = [self._draw(self.dataset.__getitem__, place["passes"], index) for index in rows]
                    repeated = max(0, min(self.rows, first + self.rows - len(samples)))
                    yield self.collate(rows), repeated, after if part == self.parts - 1 else place
                number += 1
            place = after
        if number == place["samples"] == 0:
            raise TrueShardValueError("the dataset has no sample, or less than a step, which drop_last leaves out")

    def _draw(self, get: Callable[[Any], Any], passes: int, number: int) -> Any:
        """Get a sample; what it draws from torch (on the CPU; outside of workers also on an accelerator that is torch's
        default device), Python and numpy follows from seed, pass and number alone.
        """
        seed = seed_of(self.seed, passes, number)
        torch.default_generator.manual_seed(seed)
        if self.worker is None and (device := torch.get_default_device()).type != "cpu":
            torch.get_device_module(device).manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed % 2**32)  # noqa: NPY002 - what user code draws from
        return get(number)

    def _steps(self, passes: int, samples: int, dataset: Any = None) -> Iterator[tuple[Sequence[Any], dict[str, Any]]]:
        """Yield the samples of each step over all ranks, or their indices, and the place after it."""
        if self.is_sized:
            length = len(self.dataset)
            for first in range(samples, length - (self.size - 1 if self.drop_last else 0), self.size):
                count = min(self.size, length - first)
                order = sequence_indices(self.seed, passes * length + first, count, length).tolist()
                after = {"passes": passes, "samples": first + count}
                yield order if self.shuffle else range(first, first + count), after
            return
        data = copy.deepcopy(self.dataset)  # else later passes, too, would begin at a place that was loaded
        if hasattr(data, "set_epoch"):
            data.set_epoch(passes)
        if dataset is not None:
            data.load_state_dict(dataset)
        iterator, ended, group = iter(data), object(), list[Any]()
        number = 0 if dataset is None else samples
        while (sample := self._draw(lambda _: next(iterator, ended), passes, number)) is not ended:
            number += 1
            group += [sample] if number > samples else []
            if len(group) == self.size:
                state = {"dataset": data.state_dict()} if hasattr(data, "load_state_dict") else {}
                yield group, {"passes": passes, "samples": number} | state
                group = []
        if group and not self.drop_last:
            yield group, {"passes": passes, "samples": number}


class OwnLoader:
    """The loader that ``trueshard.loader`` returns."""

    def __init__(self, batches: _Batches, reader: Callable[[], tuple[int, int]], options: dict[str, Any]) -> None:
        self._batches, self._reader, self._options = batches, reader, options
        self._torch: DataLoader[Any] | None = None
        self._place, self._begun = batches.place, False  # begun: a pass that has not ended
        self.repeated = 0

    @property
    def passes(self) -> int:
        """The pass in which the loop is, from 0."""
        return int(self._place["passes"])

    def meet(self) -> _Batches:
        """Return the batches of this rank, as the ranks of now share them."""
        batches, (batches.rank, ranks) = self._batches, self._reader()
        batches.rows, rest = divmod(batches.size, ranks * batches.parts)
        if rest or not batches.rows:
            raise TrueShardValueError(
                f"batch_size is {batches.size}; it is a multiple of {ranks} ranks × accumulate {batches.parts}"
            )
        return batches

    def __len__(self) -> int:
        batches = self.meet()
        return (len(batches.dataset) + (0 if batches.drop_last else batches.size - 1)) // batches.size * batches.parts

    def __iter__(self) -> Iterator[Any]:
        if self._begun:  # and left early
            self._place = {"passes": self.passes + 1, "samples": 0}
        self.meet().place, self._begun = self._place, True
        device = torch.get_default_device()
        if self._torch is None:
            # Of its own: else each pass would draw from the training's. On the device on which torch draws from it.
            generator = torch.Generator(device)
            self._torch = DataLoader(self._batches, batch_size=None, generator=generator, **self._options)
        before, made = random_states(device), iter(self._torch)
        while (item := next(made, None)) is not None:
            set_random_states(before)
            batch, self.repeated, self._place = item
            yield batch
            before = random_states(device)
        set_random_states(before)
        self._place, self._begun = {"passes": self.passes + 1, "samples": 0}, False

    def state_dict(self) -> dict[str, Any]:
        """Return the place after the last complete step."""
        return dict(self._place)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a place, at any number of ranks and workers, and any ``batch_size``."""
        self._place, self._begun, self._torch = dict(state), False, None


@own_errors()
def loader(
    dataset: Any,
    batch_size: int,
    *,
    shuffle: bool = False,
    drop_last: bool = False,
    seed: int = 0,
    accumulate: int = 1,
    model: nn.Module | None = None,
    mesh: DeviceMesh | None = None,
    collate_fn: Callable[[list[Any]], Any] = default_collate,
    **options: Any,
) -> OwnLoader:
    """Return this rank's batches of a dataset, in an order that is the same at any number of ranks::

        data = trueshard.loader(dataset, batch_size=64, shuffle=True, drop_last=True, model=model)
        for epoch in range(data.passes, 3):
            for batch in data: ...
        trueshard.save(path, model=model, optimizer=optimizer, data=data)

    A ``for`` is a pass. Which samples make a step follows from ``seed`` alone, and what a transform draws (from torch,
    Python, numpy) from ``seed``, pass and sample: a run goes on exactly, at another number of ranks and workers too.
    All ranks have equally many batches, of equal size, so that none waits for another in a collective.

    Args:
        dataset: with ``__getitem__`` and ``__len__``; or an iterable, which each rank reads whole to keep its part. One
            with ``state_dict`` and ``load_state_dict`` resumes at its place, any other is read again up to there.
        batch_size: samples of a step over all ranks; a multiple of the ranks that read different ones × ``accumulate``.
        shuffle: each pass in another order. An iterable shuffles itself; its ``set_epoch(pass)``, if any, is called.
        drop_last: leave out what does not fill the last step. Else its samples are repeated until they do; at the end
            of this rank's last batch are ``data.repeated`` such ones, which ``gather`` leaves out.
        seed: 0 to 2**63 - 1, equal on every rank.
        accumulate: batches into which a rank splits its part of a step.
        model: needed if ranks share a sequence (``context``) or matrices (``tensor``): these read the same samples.
        mesh: in place of a model, as ``shard()`` takes it.
        collate_fn: makes a batch of a list of samples; default: torch's.
        options: of ``torch.utils.data.DataLoader``, such as ``num_workers`` and ``pin_memory``.

    Raises ValueError, also where the first batch is asked for: ``batch_size`` does not divide, no sample fills a step,
    an iterable is to be shuffled; TypeError: an option chooses samples.
    """
    if chosen := {"batch_sampler", "sampler", "generator"} & {*options}:
        raise TypeError(f"{', '.join(sorted(chosen))}: which samples make a batch follows from seed; leave it out")
    batches = _Batches(dataset, batch_size, shuffle, drop_last, seed, accumulate, collate_fn)
    if shuffle and not batches.is_sized:
        raise ValueError("shuffle=True needs a dataset with __getitem__ and __len__; let an iterable shuffle itself")
    return OwnLoader(batches, lambda: _reader(model, mesh), options)


def _reader(model: nn.Module | None, mesh: DeviceMesh | None) -> tuple[int, int]:
    """Return this rank's number among those that read different samples, and how many there are."""
    ensure_process_group()
    if model is not None or mesh is not None:
        return (ensure_axes(mesh) if model is None else sharded(model).axes).reader
    if any(other.axes.reader[1] < dist.get_world_size() for other in registry.models()):
        raise TrueShardValueError("ranks share sequences or matrices, and must read the same samples: give model=")
    return dist.get_rank(), dist.get_world_size()


@own_errors()
def gather(values: Any, loader: OwnLoader | None = None) -> Any:
    """Return the values of all ranks, on every rank: for metrics that are those of one process. Collective::

        right = trueshard.gather(logits.argmax(-1) == labels, data)  # each sample of the step, once
        total = trueshard.gather({"loss": summed_loss, "tokens": count})
        mean = total["loss"].sum() / total["tokens"].sum()  # a mean of means would be another number

    They travel from host to host: gather predictions, not logits.

    Args:
        values: a tensor [rows, …], or a list of anything: concatenated in the order of ranks, which is that of samples;
            ranks may have different numbers of rows. A tensor [] or a number: a tensor [ranks]. Or a dict of these.
        loader: the one whose batch has the rows, one a sample. Those of repeated samples are left out, and ranks that
            read the same samples count once.

    Raises ValueError, on every rank: shapes or keys do not fit together, or are not one row a sample.
    """
    ensure_process_group()
    rank, rows = dist.get_rank(), cast("tuple[Any, Any]", (None, None))  # rows: how many there must be, and that count
    if loader is not None:
        batches = loader.meet()
        rank, rows = batches.rank, (batches.rows, batches.rows - loader.repeated)
    named = dict(values) if isinstance(values, Mapping) else {"values": values}
    gathered, world = [None] * dist.get_world_size(), cast("dist.ProcessGroup", dist.group.WORLD)
    dist.all_gather_object(gathered, (rank, rows, _torch.to_device(named, "cpu")), group=host_group(world))
    parts: dict[int, Any] = dict(sorted({part[0]: part[1:] for part in cast("list[Any]", gathered)}.items()))
    if keys := {frozenset(part) for _, part in parts.values()} - {frozenset(named)}:
        raise ValueError(f"ranks give other keys: {', '.join(named)}, and {', '.join(keys.pop())}")
    joined = {key: _joined(key, [(*rows, part[key]) for rows, part in parts.values()]) for key in named}
    device = next((value.device for value in named.values() if isinstance(value, torch.Tensor)), "cpu")
    return _torch.to_device(joined if isinstance(values, Mapping) else joined["values"], device)


def _joined(key: str, parts: list[tuple[int | None, int | None, Any]]) -> Any:
    """Return the values of all ranks as one. Of each: the rows that it must have, the rows that count, the value."""
    values = [part[2] for part in parts]
    if not (is_list := all(isinstance(value, list) for value in values)):
        values = [torch.as_tensor(value) for value in values]
        values = [value if value.ndim or part[0] else value[None] for value, part in zip(values, parts, strict=True)]
    shapes = [(len(value), "list") if is_list else (*value.shape, value.dtype) for value in values]
    wrong = [shape for shape, part in zip(shapes, parts, strict=True) if part[0] and shape[0] != part[0]]
    if wrong or len({shape[1:] for shape in shapes}) > 1:
        wanted = f"one row for each of its {parts[0][0]} samples" if parts[0][0] else "the same but for its rows"
        raise ValueError(
            f"{key}: ranks have {', '.join(map(str, shapes))}; a rank gives {wanted}: pad them, or give lists"
        )
    kept = [value[:count] for value, (_, count, _) in zip(values, parts, strict=True)]
    return [item for value in kept for item in value] if is_list else torch.cat(kept)


@contextlib.contextmanager
def main_first(*, per_machine: bool = False) -> Iterator[None]:
    """Let rank 0 do what is inside before the others, such as preparing files that these find then. Collective.

    With ``per_machine``, the first rank of each machine, for folders that machines do not share. Raises RankFailed on
    the others, before they begin, if it raised or was lost.
    """
    ensure_process_group()
    rank, first, ranks = dist.get_rank(), 0, dist.get_world_size()
    if per_machine:
        first, ranks = rank - int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    group, problem = gloo_group("first", range(first, first + ranks), LONGEST), [""]
    if rank == first:
        try:
            yield
        except BaseException as error:
            problem = [with_kind(error)]
            raise
        finally:
            dist.broadcast_object_list(problem, first, group)
        return
    try:
        dist.broadcast_object_list(problem, first, group)
    except RuntimeError as error:
        problem = [f"it was lost ({with_kind(error)})"]
    if problem[0]:
        raise RankFailed(f"rank {first} failed in main_first: {problem[0]}")
    yield
