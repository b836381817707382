"""Compare two runs: their tensors, one at a time, how far apart these may be, and the structure of model and optimizer.

- Training on N ranks adds up in another order than on one process. What that does to each tensor is measured: the
  reference runs twice, the second time with its parameters and gradients changed by ``SHAKE`` rounding errors.
- A tensor may be ``FACTOR`` times as far apart as those two runs were, and in any case ``FLOORS`` of its size. Sizes
  are root sums of squares: where an optimizer divides by what is nearly zero, single elements jump by rounding alone,
  and how far the worst one goes is luck; together they are steady, and one wrong row still shows.
- Parameters are compared with how far they have moved, not with their size: with a small learning rate an update that
  is wrong altogether is small beside the parameter.
- All ranks walk through the same list of tensors in the same order, agreed on before: a rank that lacks what another
  has is found, and nobody waits for it.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from trueshard import _torch
from trueshard.model.names import Index
from trueshard.model.regions import replicated_dims
from trueshard.optim.rebind import leaves

if TYPE_CHECKING:
    from trueshard.checkpoint.inspecting import Inspected

SHAKE = 8.0
"""Rounding errors by which the second run is changed: enough that whatever jumps at a rounding (an optimizer that
computes in bfloat16) does."""
FACTOR = 4.0
"""Allowed difference between two orders of summation, over the difference that the shaken run shows."""
FLOORS = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Allowed difference in any case, by compute dtype: some hundred roundings of float32 (of float64 too, whose loss may
be in float32), one of the 16-bit dtypes."""
ROUNDING_ALONE = 0.7
"""A tensor that rounding errors change by so much is nothing but rounding, and cannot be compared."""

Named = dict[str, Any]
"""Tensors by name; of optimizer state also values that are not tensors."""


@dataclass(frozen=True)
class Comparison:
    """The result of comparing one tensor or number."""

    kind: str
    """``"losses"``, ``"gradient norm"``, ``"gradients"``, ``"parameters"``, ``"buffers"`` or ``"state"``."""
    step: int
    name: str
    largest: float
    """Largest difference of an element."""
    relative: float
    """Root sum of squares of all differences, over that of the expected tensor or, for parameters, of its movement."""
    tolerance: float
    """Allowed ``relative``."""
    words: str = ""
    """Description of a difference that is not a number."""
    factor: float = math.nan
    """The tensor over the expected one, by least squares, where that was asked for."""

    @classmethod
    def fault(cls, kind: str, step: int, name: str, words: str) -> Comparison:
        return cls(kind, step, name, math.inf, math.inf, 0.0, words)

    @property
    def held(self) -> bool:
        return not self.words and self.relative <= self.tolerance

    @property
    def excess(self) -> float:
        """``relative`` over what is allowed: 1 is the limit."""
        if self.relative == 0:
            return 0.0
        return self.relative / self.tolerance if self.tolerance else math.inf


def distance(actual: torch.Tensor, expected: torch.Tensor, start: torch.Tensor | None = None) -> tuple[float, float]:
    """Return the largest difference of an element, and the size of all differences over that of ``expected``.

    Both are 0 where all is equal (NaN equals NaN), infinite where only one is NaN, or ``expected`` is zero. With
    ``start`` the size is that of ``expected - start``, without what ``expected``'s own dtype rounds.
    """
    if actual.shape != expected.shape:
        return math.inf, math.inf
    wide = torch.complex128 if expected.is_complex() else torch.float64
    one, two = actual.to(wide), expected.to(wide)
    same = (one == two) | (one.isnan() & two.isnan())
    if bool(same.all()):
        return 0.0, 0.0
    difference = torch.where(same, 0.0, (one - two).abs())
    largest = float(difference.max())
    if not math.isfinite(largest):
        return math.inf, math.inf
    if not (expected.is_floating_point() or expected.is_complex()):
        return largest, math.inf
    total, size = float(difference.norm()), _size(two if start is None else two - start.to(wide))
    if start is not None and size:
        total = max(0.0, total - 2 * torch.finfo(expected.dtype).eps * _size(two))
    return largest, (total / size if size else math.inf)


def factor(actual: torch.Tensor, expected: torch.Tensor) -> float:
    one, two = actual.double(), expected.double()
    return float((one * two).sum() / two.square().sum()) if one.shape == two.shape else math.nan


def _size(tensor: torch.Tensor) -> float:
    sizes = tensor.abs()
    return float(sizes[sizes.isfinite()].norm())


def first_bit(actual: torch.Tensor, expected: torch.Tensor) -> str:
    """Return the first element and bit in which two tensors differ, in words; "" if all bits are equal."""
    if actual.shape != expected.shape:
        return f"has shape {list(actual.shape)}, and {list(expected.shape)} there"
    rows = [t.contiguous().reshape(-1).view(torch.uint8).reshape(t.numel(), -1) for t in (actual, expected)]
    different = (rows[0] != rows[1]).any(1).nonzero().flatten()
    if not len(different):
        return ""
    place = int(different[0])
    index = ", ".join(str(int(i)) for i in torch.unravel_index(different[0], actual.shape))
    one, two = (int.from_bytes(bytes(row[place].tolist()), "little") for row in rows)
    changed, width = one ^ two, 2 * rows[0].shape[1]
    bit = (changed & -changed).bit_length() - 1
    message = f"differs first at element [{index}], bit {bit}: {one:0{width}x}, and {two:0{width}x} there"
    return f"{message} ({len(different):,} of {actual.numel():,} elements)"


class Tolerances:
    """Allowed distances: they follow from that between the reference's two runs (``noise``, by kind, step and name).

    At least ``floor`` or, for parameters whose optimizer computes in a 16-bit dtype, ``floors`` by name.
    """

    def __init__(self, noise: Mapping[tuple[str, int, str], float], floor: float, floors: Mapping[str, float]) -> None:
        self._noise, self.floor, self._floors = noise, floor, floors
        self._typical = {
            place: statistics.median_high([size for key, size in noise.items() if key[:2] == place])
            for place in {key[:2] for key in noise}
        }

    def of(self, kind: str, step: int, name: str) -> float:
        """Return the tolerance of a tensor: by its own noise, or the median noise of its kind if that is more.

        For the norm of all gradients, one number that may agree by chance, it is the median of the gradients.
        """
        usual = self._typical.get(("gradients" if kind == "gradient norm" else kind, step), 0.0)
        noise = max((self._noise.get((kind, earlier, name), 0.0) for earlier in range(1, step + 1)), default=0.0)
        floor = self._floors.get(name, 0.0) if kind == "parameters" else 0.0
        return max(self.floor, floor, FACTOR * noise, FACTOR * usual)

    def rounding_alone(self, kind: str, step: int) -> int:
        """Return the number of tensors that cannot be compared."""
        return sum(key[:2] == (kind, step) and size > ROUNDING_ALONE for key, size in self._noise.items())


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor, on the CPU. Collective if it is sharded."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()


@torch.no_grad()
def shake(tensor: torch.Tensor, dtype: torch.dtype, random: torch.Generator, errors: float = SHAKE) -> None:
    """Change nonzero elements by rounding errors of ``dtype``, of their own and, as sums cancel, the usual size."""
    part = _torch.local(tensor.detach())
    if not part.is_floating_point():
        return
    wide, some = part.double(), part != 0
    usual = wide[some].square().mean().sqrt() if bool(some.any()) else 0.0
    change = torch.rand(part.shape, generator=random, dtype=torch.float64, device="cpu").mul_(2).sub_(1).to(part.device)
    change *= errors * torch.finfo(dtype).eps
    part.copy_(torch.where(some, wide + change * (wide.abs() + usual), wide))


def values_of(kind: str, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer] = ()) -> Named:
    """Return the ``"parameters"``, ``"gradients"``, ``"buffers"`` or optimizer ``"state"`` of a run, by name.

    An entry of state is named like ``"0: layer.weight: exp_avg"``; gradients that are None are left out.
    """
    if kind == "parameters":
        return dict(model.named_parameters())
    if kind == "gradients":
        return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    if kind == "buffers":
        return dict(model.named_buffers())
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        ": ".join(map(str, path)): value
        for number, optimizer in enumerate(optimizers)
        for parameter, entries in optimizer.state.items()
        if id(parameter) in name_of and isinstance(entries, Mapping)
        for path, value in leaves(dict(entries), (number, name_of[id(parameter)]))
    }


def gathered_tensors(values: Named) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every full tensor that some rank has, on every rank; numbers as tensors. Collective.

    A tensor that lies on some ranks only (of an owner) comes from the first of them; a sharded one must be on all.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    listed = [{name: isinstance(value, DTensor) for name, value in values.items()}] * ranks
    if ranks > 1:
        dist.all_gather_object(listed, listed[0])
    for name in dict.fromkeys(name for names in listed for name in names):
        holders = [rank for rank in range(ranks) if name in listed[rank]]
        if any(listed[rank][name] for rank in holders):
            if len(holders) != ranks:
                lacking = min(set(range(ranks)) - set(holders))
                raise RuntimeError(f"{name!r} is sharded, and rank {lacking} has no part of it")
            yield name, full(values[name])
            continue
        value = values.get(name)
        box = [value.detach().cpu() if isinstance(value, torch.Tensor) else value]
        if holders[0] != 0:
            dist.broadcast_object_list(box, src=holders[0])
        if isinstance(box[0], torch.Tensor):
            yield name, box[0]
        elif isinstance(box[0], (bool, int, float)):
            yield name, torch.tensor(box[0], dtype=torch.float64)


def unequal_copies(model: nn.Module) -> tuple[int, list[str]]:
    """Return how many parameters several ranks hold a part of, the same, and those of which they differ. Collective."""
    from trueshard.checkpoint.hashing import hash_here  # not for a recording, which needs torch alone

    count, wrong = 0, []
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            continue
        mesh, content = parameter.device_mesh, hash_here(parameter)
        copies = [dim for dim in replicated_dims(parameter) if mesh.size(dim) > 1]
        count += bool(copies)
        for dim in copies:
            hashes: list[Any] = [None] * mesh.size(dim)
            dist.all_gather_object(hashes, content, group=mesh.get_group(dim))
            if len(set(hashes)) > 1:
                wrong.append(f"{name!r} has {len(set(hashes))} values on the ranks that hold the same of it")
                break
    return count, wrong


class TensorStore:
    """Tensors on disk by kind, step and name, one file each, so that no process holds more than one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, kind: str, step: int, name: str, tensor: torch.Tensor) -> None:
        folder = self._folder / kind / str(step)
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(tensor.detach().cpu().clone(), self._file(kind, step, name))
        with (folder / "names").open("a", encoding="utf-8") as names:
            names.write(json.dumps(name) + "\n")

    def read(self, kind: str, step: int, name: str) -> torch.Tensor:
        return torch.load(self._file(kind, step, name))

    def names(self, kind: str, step: int) -> list[str]:
        file = self._folder / kind / str(step) / "names"
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []

    def _file(self, kind: str, step: int, name: str) -> Path:
        return self._folder / kind / str(step) / (hashlib.sha256(name.encode()).hexdigest()[:32] + ".pt")


Structure = Mapping[str, Mapping[str, Any]]
"""A model and its optimizers without their values, as plain data: names, dtypes, trainability, ties and membership, of
which each says something of several things by their names, in order."""


def structure_of(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, dict[str, Any]]:
    index = Index(model)
    held = (*index.parameters, *index.buffers)
    name_of = {id(parameter.tensor): parameter.name for parameter in index.parameters}
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    names += [f"state_dict: {key}" for key in index.root.state_dict(keep_vars=True)]
    return {
        "names": dict.fromkeys(names),
        "dtypes": {tensor.name: f"{tensor.tensor.dtype} {list(tensor.tensor.shape)}" for tensor in held},
        "trainability": {parameter.name: parameter.tensor.requires_grad for parameter in index.parameters},
        "ties": {" = ".join(tensor.names): list(tensor.names) for tensor in held if len(tensor.names) > 1},
        "membership": {
            f"{type(optimizer).__name__} {number}, group {place}: {key!r}": (
                {name_of[id(parameter)]: None for parameter in value} if key == "params" else _plain(value)
            )
            for number, optimizer in enumerate(optimizers)
            for place, group in enumerate(optimizer.param_groups)
            for key, value in group.items()
        },
    }


def _plain(value: Any) -> Any:
    """Return a setting of a group as plain data, comparable between processes."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return tuple(_plain(member) for member in value)
    return value if isinstance(value, (int, float, str, bool, type(None))) else repr(type(value))


def without_counts(structure: Structure, start: Structure, end: Structure) -> Structure:
    """Return a structure without the keys of groups that training changes from ``start`` to ``end``, such as counts."""
    old, new = start["membership"], end["membership"]
    kept = {key: value for key, value in structure["membership"].items() if old.get(key) == new.get(key)}
    return {**structure, "membership": kept}


def differences(actual: Structure, expected: Structure) -> dict[str, str]:
    """Return the first difference of each aspect, in words; aspects that are the same are left out."""
    messages = {aspect: _difference(value, expected[aspect]) for aspect, value in actual.items()}
    return {aspect: message for aspect, message in messages.items() if message}


def _difference(actual: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    lost, new = [name for name in expected if name not in actual], [name for name in actual if name not in expected]
    if lost or new:
        return "; ".join(
            f"{words} {names[0]!r}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
            for words, names in (("lost", lost), ("new", new))
            if names
        )
    for one, two in zip(actual, expected, strict=True):
        if one != two:
            return f"{one!r} stands where {two!r} stood"
    for name, value in expected.items():
        if isinstance(value, Mapping):  # the members of a group
            if message := _difference(actual[name], value):
                return f"{name}: {message}"
        elif actual[name] != value:
            return f"{name!r} is {actual[name]}, was {value}"
    return ""


def differences_on_disk(listing: Inspected, expected: Structure) -> list[str]:
    """Return how a checkpoint's listing differs in names, ties, dtypes and trainability, in words."""
    messages = []
    saved = {name: tensor for tensor in listing.tensors if tensor.key.startswith("model/") for name in tensor.names}
    for tie, names in expected["ties"].items():
        entries = {saved[name].key for name in names if name in saved}
        if len(entries) > 1:
            messages.append(f"the tie {tie} is {len(entries)} tensors in the checkpoint")
    for name, kind in expected["dtypes"].items():
        if name not in saved:
            if f"state_dict: {name}" in expected["names"]:
                messages.append(f"{name!r} is not in the checkpoint")
            continue
        dtype, other = (words.partition(" ")[0].removeprefix("torch.") for words in (kind, saved[name].dtype))
        if other != dtype:
            messages.append(f"{name!r} is {dtype}, and {other} in the checkpoint")
        if saved[name].trainable not in (None, expected["trainability"].get(name)):
            messages.append(f"{name!r} has another requires_grad in the checkpoint")
    return messages
