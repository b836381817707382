"""Random numbers on ranks that read the same samples: all draw what the first of them draws, whatever their seeds.

- Ranks along the tensor axis, and those of a context, stand for one process. So before each pass they take over the
  states of generators of the first of them (torch's on CPU and device, Python's, numpy's), which draws as one process.
- They keep them after the pass: what is drawn between passes (tokens of a ``generate``, noise for a batch, the order of
  samples, which they must read alike) is that of one process, too. Ranks with other samples keep streams of their own.
- States may go apart between any two passes, by seeds, draws on one rank, a checkpoint; only the first rank knows its
  own. So 16 bytes of hashes are compared before each pass, and states are sent where they differ.
- Recomputation in backward begins with the states of its forward. Generators that the user made are the user's.
- What a rank draws for its part of a tensor cannot be what one process draws: trials of the model find that.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy
import torch
import torch.distributed as dist

from trueshard import _torch
from trueshard.distributed import host_group
from trueshard.optim.seeded_random import torch_states

_PYTHON = "<i625I?d"  # version, Mersenne Twister's 624 words and position, and the second number of a pair
_NUMPY = "<iid"  # behind 624 words: position, and the second number of a pair


def draw_alike(groups: Iterable[dist.ProcessGroup], device: torch.device) -> Callable[[], None]:
    """Return what is to be called before each pass, on all ranks of ``groups``: this rank's neighbours along axes.

    After it all of them have the states of the first rank of all. ``device``: the one on which this rank computes.
    """
    hosts = [host_group(group) for group in groups if group.size() > 1]

    def before_pass() -> None:
        with _torch.unwatched():  # what counts memory and traffic of a model's operators has nothing of this
            for group in hosts:  # along one axis after the other
                _take_over(group, device)

    return before_pass


def _take_over(group: dist.ProcessGroup, device: torch.device) -> None:
    """Take over the states of the first rank of a group, if they are not those of all. Collective."""
    is_simulated = dist.get_backend(group) == "fake"
    states = random_states(torch.device("cpu") if is_simulated else device)
    if is_simulated:
        return
    digest = int.from_bytes(hashlib.blake2b(b"".join(states.values()), digest_size=7).digest(), "little")
    both = numpy.array([digest, -digest])  # their maxima are opposite if all digests are one
    dist.all_reduce(torch.from_numpy(both), dist.ReduceOp.MAX, group=group)
    if both[0] == -both[1]:
        return
    sent = [states]
    dist.broadcast_object_list(sent, dist.get_global_rank(group, 0), group, torch.device("cpu"))
    if group.rank():
        set_random_states(sent[0])


def random_states(device: torch.device | None) -> dict[str, bytes]:
    """Return the states of this process's generators, and of that of an accelerator, by name. Draws no number."""
    states = torch_states(device)
    version, words, gauss = random.getstate()
    states["python"] = struct.pack(_PYTHON, version, *words, gauss is not None, gauss or 0.0)
    legacy: Any = numpy.random.get_state(legacy=True)  # noqa: NPY002 - what user code draws from
    name, keys, place, has_gauss, cached = legacy
    if name == "MT19937":
        states["numpy"] = keys.astype("<u4").tobytes() + struct.pack(_NUMPY, place, has_gauss, cached)
    return states


def set_random_states(states: Mapping[str, bytes]) -> None:
    """Set the generators to what ``random_states`` returned; one that this machine lacks is skipped."""
    for kind, data in states.items():
        if kind == "python":
            version, *words, has_gauss, gauss = struct.unpack(_PYTHON, data)
            random.setstate((version, tuple(words), gauss if has_gauss else None))
        elif kind == "numpy":
            keys, rest = numpy.frombuffer(data, "<u4", 624), struct.unpack(_NUMPY, data[4 * 624 :])
            numpy.random.set_state(("MT19937", keys, *rest))  # noqa: NPY002
        elif kind in ("torch", str(torch.accelerator.current_accelerator(check_available=True))):
            owner = torch if kind == "torch" else torch.get_device_module(kind)
            owner.set_rng_state(torch.frombuffer(bytearray(data), dtype=torch.uint8))
