"""What the tests of faults share: a small model that holds every kind of tensor, pictures of it and of directories, and
ways to damage a checkpoint and to see what is opened.

- A picture is of bits, not of values: what a failed load must leave alone, it must leave alone to the last one.
- What a manifest or header is changed to gets a checksum that fits, so that it is the change itself that is found.
- Opening is seen twice: Python's own by an audit hook, everybody's (safetensors opens files by itself) by inotify.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import random
import struct
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

import trueshard

MANIFEST = "manifest.json"
Table = dict[str, Any]


class Small(nn.Module):
    """A tie, a frozen, a 0-dim and a bf16 parameter, a buffer: few bytes of many kinds."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.embed = nn.Embedding(5, width)
        self.hidden = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, dtype=torch.bfloat16)
        self.head = nn.Linear(width, 5, bias=False)
        self.head.weight = self.embed.weight
        self.hidden.bias.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.hidden(self.embed(ids)).to(torch.bfloat16)).float()
        return self.head(self.scale * x)


class Notes:
    """An entry of the user's own that is loaded in place."""

    def __init__(self, step: int) -> None:
        self.step = step

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "curve": torch.arange(3) + self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def build(step: int, world_size: int = 1, width: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The small model and its AdamW, sharded over all ranks if there are several, holding what belongs to ``step``."""
    torch.manual_seed(0)
    model = Small(width)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    if world_size > 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            trueshard.shard(model, optimizer)
    model(torch.arange(4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    fill(model, optimizer, step)
    return model, optimizer


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that a checkpoint of the two holds, by name, in the same order at any world size."""
    names = {id(p): name for name, p in model.named_parameters()}
    yield from model.named_parameters()
    yield from model.named_buffers()
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                yield f"{names[id(parameter)]}/{key}", value


def fill(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Give every element a value that says which tensor, which place and which step it belongs to."""
    with torch.no_grad():
        for number, (_, tensor) in enumerate(tensors_of(model, optimizer)):
            values = torch.arange(tensor.numel(), dtype=torch.float64) % 97 + 100 * number + step
            _put(tensor.detach(), values.view(tensor.shape).to(tensor.dtype))
        for number, group in enumerate(optimizer.param_groups):
            group["lr"] = float(step + number)


def _put(tensor: torch.Tensor, value: torch.Tensor) -> None:
    if not isinstance(tensor, DTensor):
        tensor.copy_(value)
        return
    for dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            pieces = value.chunk(tensor.device_mesh.size(dim), placement.dim)
            rank = tensor.device_mesh.get_local_rank(dim)
            value = pieces[rank] if rank < len(pieces) else value[:0]
    tensor.to_local().copy_(value)


def photograph(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """This rank's part of model, optimizer and random generators, to the bit."""
    seen: dict[str, Any] = {}
    for name, tensor in tensors_of(model, optimizer):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        seen[name] = (tensor.dtype, tuple(tensor.shape), tensor.requires_grad, bits(local))
    seen["groups"] = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    numbers = numpy.random.get_state(legacy=True)  # noqa: NPY002 (the global one is what a load would set)
    seen["random"] = (bits(torch.get_rng_state()), random.getstate(), bytes(numbers[1].data), numbers[2:])
    return seen


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def tree(directory: Path) -> dict[str, str]:
    """What is below ``directory``, hidden or not: path → a digest of its bytes, "/" of a directory, a link's end."""

    def content(path: Path) -> str:
        if path.is_symlink():
            return os.readlink(path)
        return "/" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()

    return {str(path.relative_to(directory)): content(path) for path in sorted(directory.rglob("*"))}


def manifest_of(directory: Path) -> Table:
    table = json.loads((directory / MANIFEST).read_text())
    del table["crc32"]
    return table


def restamp(directory: Path, change: Callable[[Table], object]) -> None:
    """Change the manifest of a checkpoint, and give it the checksum of what it then says."""
    table = manifest_of(directory)
    change(table)
    (directory / MANIFEST).write_bytes(stamped(table))


def stamped(table: Any) -> bytes:
    """A manifest's bytes with a checksum that fits."""
    text = json.dumps(table, indent=1)[2:].encode(errors="surrogatepass")
    return b'{"crc32": "%08x",\n' % zlib.crc32(text) + text


def header_of(file: Path) -> tuple[Table, bytes]:
    """A safetensors file's header, and the bytes behind it."""
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def headed(table: Any, rest: bytes) -> bytes:
    text = json.dumps(table).encode()
    return struct.pack("<Q", len(text)) + text + rest


def reheader(file: Path, change: Callable[[Table], object]) -> None:
    """Change the header of a safetensors file; the tensors' bytes stay as they are."""
    table, rest = header_of(file)
    change(table)
    file.write_bytes(headed(table, rest))


def load_damaged(path: Path, **words: Any) -> str:
    """The message of the error that loading comes to; nothing is changed by it. Empty if it loads what was saved."""
    model, optimizer = build(2)
    notes = Notes(2)
    before = photograph(model, optimizer)
    try:
        trueshard.load(path, model=model, optimizer=optimizer, notes=notes, **words)
    except (ValueError, FileNotFoundError) as error:
        assert photograph(model, optimizer) == before
        assert notes.step == 2
        return str(error)
    assert values(model, optimizer) == values(*build(1))
    assert notes.step == 1
    return ""


def values(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Table:
    """A photograph without the random generators, which a load sets and a build does not."""
    seen = photograph(model, optimizer)
    del seen["random"]
    return seen


def problems(path: Path) -> str:
    with pytest.raises(trueshard.DamagedCheckpoint) as caught:
        trueshard.check(path)
    assert isinstance(caught.value, ValueError)
    assert caught.value.problems
    return "\n".join(caught.value.problems)


def files_of(path: Path) -> list[Path]:
    return sorted(each for each in path.rglob("*") if each.is_file())


@contextlib.contextmanager
def flipped(file: Path, at: int, mask: int) -> Iterator[None]:
    with file.open("r+b", buffering=0) as stream:
        byte = os.pread(stream.fileno(), 1, at)
        os.pwrite(stream.fileno(), bytes([byte[0] ^ mask]), at)
        yield
        os.pwrite(stream.fileno(), byte, at)


def place_of(path: Path, key: str) -> tuple[int, int]:
    """(begin, end) of a tensor in its file."""
    (piece,) = manifest_of(path)["tensors"][key]["pieces"]
    return piece["begin"], piece["end"]


def load_plain(path: Path) -> str:
    """The error of loading into the model alone, which stays as it was."""
    model, optimizer = build(2)
    before = photograph(model, optimizer)
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        trueshard.load(path, model=model, strict=False)
    assert photograph(model, optimizer) == before
    return str(caught.value)


_watched: dict[str, list[str]] = {}


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "open" or not _watched or not isinstance(arguments[0], str | bytes | os.PathLike):
        return
    path, flags = os.fsdecode(arguments[0]), arguments[2]
    followed = not (isinstance(flags, int) and flags & getattr(os, "O_NOFOLLOW", 0))
    real = os.path.realpath(path) if followed else os.path.abspath(path)
    for directory, opened in _watched.items():
        if Path(real).is_relative_to(directory):
            opened.append(path)


_hooked: list[bool] = []


@contextlib.contextmanager
def watching(directory: Path) -> Iterator[list[str]]:
    """A list of what is opened below ``directory`` meanwhile, whoever opens it; complete on leaving."""
    if not _hooked:
        sys.addaudithook(_audit)  # for good: Python has no way to take one out
        _hooked.append(True)
    opened: list[str] = []
    _watched[str(directory.resolve())] = opened
    descriptor = _inotify(directory) if sys.platform == "linux" else -1
    try:
        yield opened
    finally:
        del _watched[str(directory.resolve())]
        if descriptor >= 0:
            with contextlib.suppress(BlockingIOError):
                opened += [f"something in {directory}"] * bool(os.read(descriptor, 4096))
            os.close(descriptor)


def _inotify(directory: Path) -> int:
    library = ctypes.CDLL(None, use_errno=True)
    descriptor = library.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    in_open = 0x20
    for folder in (directory, *(path for path in directory.rglob("*") if path.is_dir())):
        if descriptor < 0 or library.inotify_add_watch(descriptor, os.fsencode(folder), in_open) < 0:
            raise OSError(ctypes.get_errno(), "inotify")
    return int(descriptor)
