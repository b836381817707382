"""Run tests that know no device on one: what a rank makes without a word on where lies on its device.

    TRUESHARD_TEST_DEVICE=cuda TRUESHARD_TEST_ALL=1 python -m pytest tests/test_accumulation.py

A test cannot run so if a rank compares with what the test itself has made, or if it asks for the CPU by name.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.distributed import device_mesh
from torch.utils import _device

ALL = "TRUESHARD_TEST_ALL"
"""Environment variable: if it is set, ranks make everything on their devices."""


def adopt() -> None:
    """Let ``torch.set_default_device`` serve generators of the CPU, too, and meshes of the CPU be of the device."""
    if ALL not in os.environ:
        return
    make = device_mesh.init_device_mesh

    def init_device_mesh(device_type: str, *arguments: Any, **words: Any) -> Any:
        return make("cuda", *arguments, **words)

    def called(self: Any, function: Any, types: Any, arguments: Any = (), words: Any = None) -> Any:
        words = dict(words or {})
        if function not in _device._device_constructors() or words.get("device") is not None:
            return function(*arguments, **words)
        if (generator := words.get("generator")) is not None and generator.device.type == "cpu":
            return function(*arguments, **words | {"device": "cpu"}).to(self.device)
        return function(*arguments, **words | {"device": self.device})

    _device.DeviceContext.__torch_function__ = called
    device_mesh.init_device_mesh = torch.distributed.init_device_mesh = init_device_mesh


def begin() -> None:
    """Make everything on this rank's device from now on, until the default device is another."""
    if ALL in os.environ:
        torch.set_default_device("cuda")
