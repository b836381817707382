"""The state of this rank's random generators (torch's on CPU and accelerator, Python's, numpy's) as bytes, and back."""

from __future__ import annotations

import random
import struct
from typing import Any

import numpy
import torch

_WORDS = 625
"""of Python's Mersenne Twister: 624, and the place in them"""


def capture() -> tuple[list[list[Any]], torch.Tensor]:
    """([generator, bytes] in turn, their states behind one another as uint8 ``[n]``). Draws nothing."""
    parts = {"torch": bytes(torch.get_rng_state().numpy())}
    if torch.accelerator.is_available():
        device: Any = torch.accelerator.current_accelerator()
        module = torch.get_device_module(device)
        if hasattr(module, "get_rng_state"):
            parts[device.type] = bytes(module.get_rng_state().cpu().numpy())
    version, words, gauss = random.getstate()
    parts["python"] = struct.pack(f"<i{_WORDS}I?d", version, *words, gauss is not None, gauss or 0.0)
    legacy: Any = numpy.random.get_state(legacy=True)  # noqa: NPY002
    name, keys, place, has_gauss, cached = legacy
    if name == "MT19937":
        parts["numpy"] = struct.pack("<624Iii d", *keys.tolist(), place, has_gauss, cached)
    table = [[kind, len(data)] for kind, data in parts.items()]
    return table, torch.frombuffer(bytearray(b"".join(parts.values())), dtype=torch.uint8)


def restore(table: list[list[Any]], state: bytes) -> None:
    """Set the generators to what ``capture`` returned; one that this machine does not have is passed over."""
    at = 0
    for kind, length in table:
        data = state[at : at + length]
        at += length
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if kind == "torch":
            torch.set_rng_state(tensor)
        elif kind == "python":
            version, *words, has_gauss, gauss = struct.unpack(f"<i{_WORDS}I?d", data)
            random.setstate((version, tuple(words), gauss if has_gauss else None))
        elif kind == "numpy":
            *keys, place, has_gauss, cached = struct.unpack("<624Iii d", data)
            generator = ("MT19937", numpy.array(keys, dtype=numpy.uint32), place, has_gauss, cached)
            numpy.random.set_state(generator)  # noqa: NPY002
        elif torch.accelerator.is_available():
            device: Any = torch.accelerator.current_accelerator()
            if device.type == kind:
                torch.get_device_module(device).set_rng_state(tensor)
