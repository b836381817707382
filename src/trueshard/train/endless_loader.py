"""Read a loader without end, and resume where a stopped run stood.

- A loader with `state_dict` and `load_state_dict` keeps its own place.
- Any other is read again up to the place, from the random state in which its pass began (torch's own, and that of the
  generators of a `DataLoader` and its sampler): one that shuffles gives the same batches again.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist


class EndlessLoader:
    """This rank's microbatches from `loader`, which is begun again whenever it ends."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader
        self._iterator: Iterator[Any] | None = None
        self._begun = self._random_states()
        self.passes = 0
        self.in_pass = 0
        """Microbatches taken since the loader was begun."""

    def __next__(self) -> Any:
        for _ in range(2):
            if self._iterator is None:
                self._begin()
            assert self._iterator is not None
            try:
                batch = next(self._iterator)
            except StopIteration:
                self._iterator, self.in_pass, self.passes = None, 0, self.passes + 1
            else:
                self.in_pass += 1
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
                warnings.warn(
                    "the loader cannot say where it stood with another number of ranks, and is begun anew; give it "
                    "state_dict and load_state_dict",
                    stacklevel=2,
                )
            return
        here = torch.get_rng_state()
        own, *others = state["begun"][rank]
        torch.set_rng_state(own.cpu())
        for generator, begun in zip(self._generators(), others, strict=True):
            generator.set_state(begun.cpu())
        self.passes, self.in_pass = int(state["passes"]), 0
        for _ in range(int(state["in_pass"])):
            next(self)
        torch.set_rng_state(here)

    def _begin(self) -> None:
        self._begun = self._random_states()
        sampler = getattr(self._loader, "sampler", None)
        if sampler is not None and hasattr(sampler, "set_epoch"):
            sampler.set_epoch(self.passes)
        self._iterator = iter(self._loader)

    def _generators(self) -> list[torch.Generator]:
        """Return the generators of the loader and its samplers."""
        batches = getattr(self._loader, "batch_sampler", None)
        owners = (self._loader, getattr(self._loader, "sampler", None), batches, getattr(batches, "sampler", None))
        found = [getattr(owner, "generator", None) for owner in owners]
        return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())

    def _random_states(self) -> list[torch.Tensor]:
        return [torch.get_rng_state(), *(each.get_state() for each in self._generators())]

    def _keeps_place(self) -> bool:
        return hasattr(self._loader, "state_dict") and hasattr(self._loader, "load_state_dict")
