"""Loading in place, at any world size: each rank reads the bytes it holds, and nothing else.

Everything is checked before anything is changed: that names, shapes, dtypes and groups fit, on every rank, and then
that the bytes are those that were written: each rank takes the checksum of its own, and together they must give the
tensor's. Only then are values copied, from memory that the system has at hand by now.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from trueshard.checkpoint import background, state
from trueshard.checkpoint.catalogue import open_catalogue
from trueshard.checkpoint.found import Found
from trueshard.checkpoint.loading import Loading
from trueshard.checkpoint.together import Together, compare


@torch.no_grad()
def load(
    path: str | os.PathLike[str],
    *,
    model: Any = None,
    optimizer: Any = None,
    strict: bool = True,
    verify: bool = True,
    rng: bool = True,
    convert: bool = False,
    names: Mapping[str, str] | Callable[[str], str | None] | None = None,
    allow_pickle: bool = False,
    **more: Any,
) -> Found:
    """Load into ``model`` and ``optimizer``, in place. Collective where there are several ranks.

    Nothing is changed unless everything fits. A model on the meta device gets memory; its buffers that are in no
    checkpoint are computed as the model itself does, or an error names them. On the CPU its parameters are, where they
    can be, private maps of the files: read when they are used, copied when they are written to. Until then the files
    may be deleted, but not overwritten in place.

    Args:
        path: a checkpoint; ``…/latest`` is the newest one beside it. Or a Hugging Face directory, a .safetensors file,
            a PEFT adapter's directory, a directory of torch.distributed.checkpoint.
        model: as given to ``save``: the same names and shapes, any sharding.
        optimizer: as given to ``save``. Its groups are matched by the names of their parameters, in any order; a group
            of parameters that were not in the saved optimizer keeps its settings.
        strict: False: load what fits, and report the rest in what is returned.
        verify: compare checksums, where the checkpoint has them.
        rng: restore this rank's random generators, where the checkpoint has their state.
        convert: allow a dtype that differs; otherwise it is an error.
        names: the model's name of a tensor → its name in the files (None, or left out of a dict: the same).
        allow_pickle: needed for torch.distributed.checkpoint, whose metadata is a pickle: only from whom you trust.
        more: entries to load in place, by the name they were saved under: objects with ``load_state_dict()``.

    Returns:
        The saved entries that are not in ``more``, by name, and what did not fit.

    Raises:
        FileNotFoundError: nothing is at ``path``.
        ValueError: it is damaged, or of another model; the message names tensors and files.
        RuntimeError: another rank failed, or did not come.
    """
    background.finish()
    together = Together(state.parameters_of(model))
    what = f"{path} was not loaded"
    job: Any = None
    error: BaseException | None = None
    digest: dict[str, Any] = {}
    try:
        models, wanted = state.models_of(model), state.optimizers_of(optimizer)
        catalogue = open_catalogue(latest_in(path))
        if catalogue.dcp:
            from trueshard.checkpoint.dcp import DcpLoading

            job = DcpLoading(catalogue, models, wanted, strict, convert, names, allow_pickle, more)
        else:
            job = Loading(catalogue, models, wanted, more, strict, convert, names, rng)
        job.check()
        digest = {"strict": strict, "verify": verify, "rng": rng, "convert": convert, "allow_pickle": allow_pickle}
        digest |= {"models": sorted(models), "optimizers": sorted(wanted), "entries": sorted(more)}
        digest |= {"path": job.identity(), **job.wanted()}
    except Exception as caught:
        error = caught
    compare("load()", together.settle(error, what, digest))
    if verify and job.has_checksums:
        job.verify(together)
    found = Found()
    try:
        found = job.begin()
    except Exception as caught:
        error = caught
    if job.has_entries:  # otherwise nothing can have failed
        together.settle(error, what)
    try:
        job.apply(together)
    except Exception as caught:
        error = caught
    together.settle(error, what)
    return found


def latest_in(path: str | os.PathLike[str]) -> Any:
    """``path``, or for ``…/latest`` the newest checkpoint there."""
    from trueshard.checkpoint.retention import latest

    if os.path.basename(os.fspath(path)) == "latest" and not os.path.lexists(path):
        folder = os.path.dirname(os.fspath(path)) or "."
        newest = latest(folder)
        if newest is None:
            raise FileNotFoundError(f"{folder} holds no complete checkpoint")
        return newest
    return path
