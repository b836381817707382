"""Loads from directories of torch.distributed.checkpoint (DCP), whoever wrote them.

- The metadata is a pickle, and so is every value that is no tensor. Nothing is opened before the user has allowed that.
- What the keys mean is found out by ``dcp_keys``; from there on it is loaded like any other checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from trueshard.checkpoint import pieces
from trueshard.checkpoint.catalogue import Catalogue
from trueshard.checkpoint.dcp_keys import understood
from trueshard.checkpoint.dcp_parts import parts_in
from trueshard.checkpoint.loading import Loading
from trueshard.checkpoint.store import LocalStore
from trueshard.checkpoint.together import Together


class DcpLoading(Loading):
    """One load from DCP directories.

    Args:
        catalogue: of the directory.
        models: key prefix → model.
        wanted: key prefix → optimizer.
        strict: whether what does not fit is an error.
        convert: whether another dtype is allowed.
        names: the model's name of a tensor → its name, or whole key, in the directory.
        allow_pickle: what the user says of it.
        more: entries to load in place.

    Raises:
        ValueError: pickles are not allowed, or it is damaged.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        models: Mapping[str, nn.Module],
        wanted: Mapping[str, Any],
        strict: bool,
        convert: bool,
        names: Any,
        allow_pickle: bool,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        if not allow_pickle:
            raise ValueError(
                f"{catalogue.where} is a directory of torch.distributed.checkpoint, whose metadata is a pickle, which "
                "can run any code; nothing was opened. Pass allow_pickle=True if you trust whoever wrote it"
            )
        if not isinstance(catalogue.store, LocalStore):
            raise ValueError(f"{catalogue.where}: torch reads its checkpoints from local directories; copy it to one")
        self._dcp = understood(catalogue.store, parts_in(catalogue.store.directory), models, wanted, names)
        super().__init__(self._dcp, models, wanted, more or {}, strict, convert, names, rng=False)

    @property
    def has_checksums(self) -> bool:
        """Those of the zip files."""
        return True

    def verify(self, together: Together) -> None:
        """Compare checksums of all that will be read. Collective."""
        error: BaseException | None = None
        try:
            reads = [*self._targets, *(each for plan in self._plans for each in plan.templates)]
            for number, (key, tensor) in enumerate(reads):
                if isinstance(tensor, DTensor) or together.rank == number % together.world:
                    self._dcp.verify(key, *pieces.rows_here(tensor))
        except Exception as caught:
            error = caught
        together.settle(error, f"{self._dcp.where} was not loaded")
