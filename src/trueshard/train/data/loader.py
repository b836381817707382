"""Microbatches of a rank, made ahead of time by a thread, and the one integer from which a resumed run continues (for
streamed data, with the places of the files that are read next).

The sample at a global index does not depend on the number of ranks: a rank takes its slice of the global batch of each
step and splits it into ``accumulate`` microbatches.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic

import torch
import torch.distributed as dist

from trueshard.checkpoint.state import random_state, set_random_state
from trueshard.errors import warn_user
from trueshard.train.data.batches import Batch, Collate, Item, Mixture, Sample, Samples, Stream, batched

PATIENCE = 2.0
"""Seconds to wait for the thread when closing; a slower one ends by itself after its item."""
SHOWN = 8
"""Maximum number of origins in ``describe_last``."""
Placed = tuple[Sample, str, Any]
"""A sample, and of a stream its origin and the blocks of ``Stream.begin``."""
Made = tuple[Batch, list[str], Any]
"""A microbatch, and of a stream the origins and the blocks of its samples."""


class Prefetcher(Generic[Item]):
    """Iterate over ``items`` in a background thread, which may be ``depth`` items ahead, and give them in their order.

    An exception of the thread is raised in place of the item that it was to make. The thread holds no reference to
    the prefetcher, and ends when this is closed or collected, or the interpreter exits. It makes a CUDA ``device`` its
    current one: otherwise pinning would create a context on device 0.
    """

    def __init__(self, items: Iterator[Item], depth: int, device: torch.device | None = None) -> None:
        self._queue: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(maxsize=depth)
        self._end: BaseException | None = None
        stopped = threading.Event()
        arguments = (items, self._queue, stopped, device)
        thread = threading.Thread(target=_fill, args=arguments, name="trueshard-prefetch", daemon=True)
        self.close = weakref.finalize(self, _stop, self._queue, stopped, thread)  # may be called twice
        thread.start()

    def __iter__(self) -> Prefetcher[Item]:
        return self

    def __next__(self) -> Item:
        if self._end is None:
            item, self._end = self._queue.get()
        if self._end is not None:
            raise self._end
        return item


def _fill(items: Iterator[Any], ready: queue.Queue[Any], stopped: threading.Event, device: torch.device | None) -> None:
    """Put (item, None) for each item, then (None, the exception that ended them)."""
    end: BaseException = StopIteration()
    try:
        if device is not None and device.type == "cuda":
            torch.cuda.set_device(device)
        for item in items:
            ready.put((item, None))
            if stopped.is_set():
                return
    except BaseException as error:  # the reader's to handle
        end = error
    ready.put((None, end))


def _stop(ready: queue.Queue[Any], stopped: threading.Event, thread: threading.Thread) -> None:
    stopped.set()
    with contextlib.suppress(queue.Empty):
        while True:
            ready.get_nowait()  # makes room: the thread must not wait for a reader
    if thread is not threading.current_thread():
        thread.join(PATIENCE)


class Loader:
    """This rank's microbatches, without end: ``accumulate`` a step, in an order that follows from ``seed``.

    Raises `ValueError` if ``batch_size`` does not divide, or there are no samples.
    """

    def __init__(
        self,
        samples: Samples | Stream,
        collate: Collate,
        *,
        batch_size: int,  # samples a step over all ranks and microbatches; a multiple of ``ranks * accumulate``
        accumulate: int = 1,  # microbatches of this rank in a step
        seed: int = 0,  # 0 to 2**64 - 1; equal on every rank
        rank: int = 0,
        ranks: int = 1,
        prefetch: int = 2,  # steps whose microbatches are made ahead; 0: each is made on demand
        device: torch.device | None = None,  # destination of the batches; for a CUDA device they are pinned
    ) -> None:
        if batch_size < 1 or batch_size % (ranks * accumulate):
            raise ValueError(f"batch_size is {batch_size}; it is a multiple of {ranks} ranks × accumulate {accumulate}")
        if isinstance(samples, Samples) and not len(samples):
            raise ValueError("there are no samples; a loader needs at least one")
        if isinstance(samples, Samples) and not isinstance(samples, Mixture):
            samples = Mixture([samples], [1])
        self._data: Any = samples
        self._collate, self._seed = collate, seed
        self._batch_size, self._accumulate = batch_size, accumulate
        self._microbatch = batch_size // (ranks * accumulate)  # samples
        portion = batch_size // ranks
        self._part = range(rank * portion, (rank + 1) * portion)  # this rank's samples among those of a step
        self._prefetch, self._device = prefetch, device
        self._first = 0  # first global sample of the current step
        self._taken = 0  # microbatches given in the current step
        self._origins: list[str] = []  # of a stream's samples in the current step
        self._blocks: Any = None  # of a stream when the current step began: the same on every rank
        self._made: Iterator[Made] | None = None

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Batch:
        if self._made is None:
            self._made = self._begin()
        batch, origins, self._blocks = next(self._made)
        if self._taken == self._accumulate:
            self._first, self._taken, self._origins = self._first + self._batch_size, 0, []
        self._taken += 1
        self._origins += origins
        return batch

    def close(self) -> None:
        """End the thread; the next microbatch starts another."""
        if isinstance(self._made, Prefetcher):
            self._made.close()
        self._made = None

    def state_dict(self) -> dict[str, Any]:
        """Return ``samples``: the number of global samples of complete steps; for a stream its ``blocks``, too."""
        samples = self._first + (self._batch_size if self._taken == self._accumulate else 0)
        return {"samples": samples} | ({} if isinstance(self._data, Mixture) else {"blocks": self._blocks})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after ``state["samples"]`` global samples, at any batch size and number of ranks."""
        self.close()
        self._first, self._taken, self._origins = int(state["samples"]), 0, []
        self._blocks = state.get("blocks")

    def origins(self, microbatches: int) -> list[str]:
        """Return the origins of the global samples of the last step; of a stream, of this rank's microbatches."""
        if not isinstance(self._data, Mixture):
            return self._origins[-microbatches * self._microbatch :]
        return [
            self._data.where(n) for n in self._data.order(self._seed).indices(self._first, self._batch_size).tolist()
        ]

    def describe_last(self, microbatches: int) -> str:
        """Describe the global samples of the last step and their origins; for a stream, of this rank's samples."""
        last, origins = self._first + self._batch_size - 1, self.origins(microbatches)
        owner = "" if isinstance(self._data, Mixture) else "of this rank: "
        shown = "; ".join(dict.fromkeys(origins[:SHOWN]))
        more = f"; and {len(origins) - SHOWN} more" if len(origins) > SHOWN else ""
        return f"samples {self._first} to {last} ({owner}{shown}{more})"

    def _begin(self) -> Iterator[Made]:
        # Nothing here may refer to self: the thread would keep this loader alive.
        samples = _samples_of(self._data, self._seed, self._first, self._blocks, self._batch_size, self._part)
        made = _microbatches(samples, self._microbatch, self._collate, self._device)
        return Prefetcher(made, self._prefetch * self._accumulate, self._device) if self._prefetch else made


class EvaluationLoader:
    """This rank's part of all samples (or of the first ``limit``), once and in order, in microbatches of up to
    ``batch_size``. Ranks may have different numbers of them, or none.
    """

    def __init__(
        self,
        samples: Samples,
        collate: Collate,
        *,
        batch_size: int,
        rank: int = 0,
        ranks: int = 1,
        limit: int | None = None,
        whole: bool = False,  # microbatches of the same samples whatever the ranks: a rank's part is whole ones
        device: torch.device | None = None,
    ) -> None:
        count = len(samples) if limit is None else min(limit, len(samples))
        unit = batch_size if whole else 1
        units = -(-count // unit)
        self._samples, self._collate, self._batch_size, self._device = samples, collate, batch_size, device
        self._first, self._last = (min(count, place * units // ranks * unit) for place in (rank, rank + 1))

    def __iter__(self) -> Iterator[Batch]:
        samples = ((self._samples[index], "", None) for index in range(self._first, self._last))
        made = _microbatches(samples, self._batch_size, self._collate, self._device)
        with contextlib.closing(Prefetcher(made, 2, self._device)) as ready:
            yield from (batch for batch, *_ in ready)


class EndlessLoader:
    """This rank's microbatches from any `loader`, which is begun again whenever it ends.

    A loader with `state_dict` and `load_state_dict` keeps its own place. Any other is read again up to the place, from
    the random state in which its pass began (torch's own, and that of a `DataLoader`'s and its sampler's generators).
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader
        self._iterator: Iterator[Any] | None = None  # of the pass that was begun; None between passes
        self._begun = self._random_states()  # before the pass: an equal state shuffles equally when it is read again
        self.passes = 0
        self.in_pass = 0  # microbatches taken since the loader was begun

    def __next__(self) -> Any:
        for _ in range(2):
            iterator = self._begin() if self._iterator is None else self._iterator
            try:
                batch = next(iterator)
            except StopIteration:
                self._iterator, self.in_pass, self.passes = None, 0, self.passes + 1
            else:
                self._iterator, self.in_pass = iterator, self.in_pass + 1
                return batch
        raise ValueError("the loader gives no batch; it must have at least one")

    def state_dict(self) -> dict[str, Any]:
        """Return the place of the next microbatch. Collective for a loader that does not keep it."""
        if self._keeps_place():
            return {"loader": self._loader.state_dict()}  # type: ignore[attr-defined]
        begun = [self._begun]
        if dist.is_initialized():
            begun = [[torch.empty(0)]] * dist.get_world_size()
            dist.all_gather_object(begun, self._begun)
        return {"passes": self.passes, "in_pass": self.in_pass, "begun": begun}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the place in `state`."""
        self._iterator = None
        if self._keeps_place() and "loader" in state:
            self._loader.load_state_dict(state["loader"])  # type: ignore[attr-defined]
            return
        ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        if "begun" not in state or len(state["begun"]) != ranks:
            if not rank:
                warn_user(
                    "the loader cannot say where it stood with another number of ranks, and is begun anew; give it "
                    "state_dict and load_state_dict"
                )
            return
        here = random_state()
        if state["passes"] and getattr(self._loader, "persistent_workers", False):
            iter(self._loader)  # only at its first pass such a loader draws the seed of its workers
        default, *others = state["begun"][rank]
        torch.set_rng_state(default.cpu())
        for generator, begun in zip(self._generators(), others, strict=True):
            generator.set_state(begun.cpu())
        self.passes, self.in_pass = int(state["passes"]), 0
        for _ in range(int(state["in_pass"])):
            next(self)
        set_random_state(*here)

    def _begin(self) -> Iterator[Any]:
        self._begun = self._random_states()
        sampler = getattr(self._loader, "sampler", None)
        if sampler is not None and hasattr(sampler, "set_epoch"):
            sampler.set_epoch(self.passes)
        return iter(self._loader)

    def _generators(self) -> list[torch.Generator]:
        batches = getattr(self._loader, "batch_sampler", None)
        owners = (self._loader, getattr(self._loader, "sampler", None), batches, getattr(batches, "sampler", None))
        generators = [getattr(owner, "generator", None) for owner in owners]
        return list(dict.fromkeys(generator for generator in generators if isinstance(generator, torch.Generator)))

    def _random_states(self) -> list[torch.Tensor]:
        return [torch.get_rng_state(), *(generator.get_state() for generator in self._generators())]

    def _keeps_place(self) -> bool:
        return hasattr(self._loader, "state_dict") and hasattr(self._loader, "load_state_dict")


def _microbatches(
    samples: Iterable[Placed], size: int, collate: Collate, device: torch.device | None
) -> Iterator[Made]:
    """Yield microbatches of ``size`` samples, the origins of their samples, and the blocks of the last one."""
    for group in batched(samples, size):
        batch = collate([sample for sample, *_ in group])
        if device is not None and device.type == "cuda":
            batch = {key: value.pin_memory() for key, value in batch.items()}
        yield batch, [origin for _, origin, _ in group], group[-1][2]


def _samples_of(data: Mixture | Stream, seed: int, first: int, blocks: Any, step: int, part: range) -> Iterator[Placed]:
    """Yield the samples at ``part`` of each step of ``step`` samples, from global sample ``first`` on, without end.

    A stream's come with their origins, as it cannot be asked for them later, and with its blocks before their step.
    """
    if isinstance(data, Mixture):
        order = data.order(seed)
        for begin in itertools.count(first, step):
            for index in order.indices(begin + part.start, len(part)).tolist():
                yield data[index], "", None
    else:
        latest = blocks
        for number, (sample, origin, current) in enumerate(data.begin(seed, first, blocks)):
            if number % step == 0:
                blocks = latest
            latest = current
            if number % step in part:
                yield sample, origin, blocks
