"""Gradients of the same bits at any number of ranks: ``shard(exact=True)``.

- A microbatch is computed alike on any rank. What differs is the order in which gradients are added: over microbatches,
  over ranks, in the collective. So each microbatch's gradient is rounded to a grid, of steps of 2**-40 or of another
  power that the user chose for a parameter, by a hook on the gathered parameter, and FSDP2 itself adds and reduces in
  float64, where such sums are exact (``optim/exact.py``). What it reduces is multiplied by one factor and rounded to
  the stored dtype, once.
- The grid is that of the finished gradient: where ranks are averaged, what each adds is rounded to so much more.
- One microbatch on one rank is no sum: nothing is rounded, and the gradient is plain PyTorch's.
- ``token_mean`` divides by the number of targets here, after the sum: a division before it would round differently for
  each number of ranks.
- That all sums were exact is checked at the end of the backward that reduces. Nothing wraps: what is too large would
  be an ordinary sum. A device is not waited for: its answer is read where the next step's backward ends, and before
  anything is read from the model as a whole (a checkpoint, a hash, a gathered copy, a pass without gradients).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakTensorKeyDictionary

from trueshard import _torch
from trueshard._torch import ShardedModule
from trueshard.axes import OPTIONS
from trueshard.distributed import all_reduce, device_of, is_simulated
from trueshard.errors import TrueShardRuntimeError, TrueShardValueError, warn_user
from trueshard.model import names
from trueshard.model.experts import by_grouped_products
from trueshard.model.names import Index
from trueshard.optim.exact import DIGITS, below, largest_of, to_grid
from trueshard.options import EXPONENTS
from trueshard.plans import Plan
from trueshard.text import logger, nearest

EXPONENT = -40
"""Default exponent of the grid's step, for the finished gradient: 9.1e-13. The largest elements of all microbatches of
a step may add up to 2**53 steps, here 8192."""
MANTISSA = 24
"""Bits of float32."""
KEPT = 16
"""Bits of a gradient's largest element that the grid is to keep; fewer are told of."""
SHOWN = 3
"""Parameters that a message names."""


def check_globs(index: Index, plan: Plan) -> None:
    """Raise ValueError for a glob of ``exact`` that matches no parameter."""
    if not isinstance(plan.exact, Mapping) or plan.pipeline:  # a stage has some of the parameters, and is refused
        return
    present = [name for held in index.parameters for name in held.names]
    for glob in plan.exact:
        if not names.matching(glob, present):
            shown = ", ".join(map(repr, present[:8]))
            raise TrueShardValueError(
                f"exact: {glob!r} matches no parameter.{nearest(glob, present)} Parameters: {shown}"
            )


def refuse(root: nn.Module, plan: Plan) -> None:
    """Raise ValueError if gradients of this model or plan cannot be exact sums; names what does not fit."""
    if not plan.exact:
        return
    for axis in OPTIONS:
        if (size := getattr(plan, axis)) > 1:
            raise TrueShardValueError(
                f"exact=True does not go with {axis}={size}, whose ranks add up inside of forward and backward, in an "
                f"order that follows from their number; leave out {axis}"
            )
    if plan.pipeline:
        raise TrueShardValueError("exact=True does not go with a pipeline: its schedule adds up microbatches itself")
    if plan.mixed_precision is not None and plan.mixed_precision.compute == "float16":
        raise TrueShardValueError(
            "exact=True does not go with float16: gradients of a scaled loss leave the range of exact sums; compute in "
            "bfloat16"
        )
    for name, parameter in root.named_parameters():
        if parameter.requires_grad and (parameter.is_complex() or parameter.dtype == torch.float16):
            raise TrueShardValueError(
                f"exact=True: {name!r} is {parameter.dtype}, of which there are no exact sums; convert it"
            )
    for name, module in root.named_modules():
        if isinstance(module, _torch.BatchNorm) and module.training and module.track_running_stats:
            raise TrueShardValueError(
                f"exact=True: {name!r} keeps statistics of what a rank has seen, which follow from the number of "
                "ranks; replace it (GroupNorm), or freeze it with eval()"
            )


def refuse_experts(root: nn.Module, mesh: DeviceMesh) -> None:
    """Raise ValueError for experts whose forward torch would refuse on this device."""
    if mesh.device_type == "cpu" or is_simulated(mesh) or not torch.are_deterministic_algorithms_enabled():
        return
    if modules := by_grouped_products(root):
        raise TrueShardValueError(
            f'exact=True: transformers computes the experts of {next(iter(modules))!r} by "grouped_mm", whose histc '
            'has no deterministic kernel on CUDA; call model.set_experts_implementation("eager")'
        )


def kernels(mesh: DeviceMesh) -> list[tuple[str, Any]]:
    """Return what kernels' bits follow from besides their inputs, by what it is called: the same on all ranks."""
    if mesh.device_type == "cpu":
        return [("number of threads (torch.set_num_threads)", torch.get_num_threads())]
    if not torch.are_deterministic_algorithms_enabled() and not is_simulated(mesh):
        warn_user(
            "exact=True: operations whose bits change from call to call are allowed; call "
            "torch.use_deterministic_algorithms(True), so that they raise instead"
        )
    device = torch.get_device_module(mesh.device_type)
    return [("device", device.get_device_name() if hasattr(device, "get_device_name") else mesh.device_type)]


def refuse_fused(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise ValueError if the kernel of an optimizer on a CPU rounds by the place of an element in memory."""
    for optimizer in optimizers:
        if any(group.get("fused") for group in optimizer.param_groups):
            raise TrueShardValueError(
                f"exact=True: {type(optimizer).__name__} has fused=True, and the fused kernels of the CPU round the "
                "last elements of a tensor otherwise than the rest; give it foreach=True"
            )


@dataclass(frozen=True)
class _Check:
    """Sums of a backward, on their device, and the answer whether all were exact, on its way to the host."""

    called: Sequence[str]
    sums: torch.Tensor  # (parameters,), float64, in steps of the grid
    over: torch.Tensor  # (parameters,), bool
    is_over: torch.Tensor  # 0-dim bool, on the host
    landed: torch.Event | None
    """Comes to pass once ``is_over`` may be read; None: now."""

    @classmethod
    def begin(cls, called: Sequence[str], sums: torch.Tensor) -> _Check:
        over = (sums > 2.0**DIGITS) & sums.isfinite()  # what is not finite is the loss's or the gradient's own matter
        is_over, landed = over.any().to("cpu", non_blocking=True), None
        if sums.device.type != "cpu":
            landed = torch.Event(sums.device.type)
            landed.record()
        return cls(called, sums, over, is_over, landed)

    def fails(self) -> bool:
        """Wait for the answer, if it is not there yet; every rank has the same."""
        if self.landed is not None and not self.landed.query():
            self.landed.synchronize()
        return bool(self.is_over)


class ExactSums:
    """Exact sums of the gradients of one sharded model."""

    def __init__(self, mesh: DeviceMesh, requested: bool | Mapping[str, int], names: dict[int, str]) -> None:
        self.mesh = mesh
        self._names = names
        """``id`` of a parameter → its name: the table of the model's record, which is filled here."""
        self.coarse: list[str] = []
        """Messages about gradients that lost digits in the first step that was rounded."""
        self._globs = requested if isinstance(requested, Mapping) else {}
        self._exponents: dict[str, int] = {}
        """Name → exponent of the grid's step; a tie for each of its names."""
        self._hooked: Any = WeakTensorKeyDictionary()
        """Leaves that have the hook that rounds: FSDP2 keeps a gathered parameter's object from pass to pass."""
        self._largest: dict[str, list[torch.Tensor]] = {}
        """Name → the largest element of this rank's gradient, 0-dim, for each microbatch of the step. What is computed
        from them is computed at its end, of all parameters at once: a kernel more for each would cost its launch."""
        self._finest = 0.0
        """Largest ``below(factor)`` of those microbatches."""
        self._units: torch.Tensor | None = None
        """Steps of the grid in 1.0 at factor 1, by name in order: (parameters,), float64, on the device."""
        self._is_first = True
        """True until a step that was rounded has ended: of that, largest elements are looked at."""
        self._rounds = True
        """False in a backward whose gradient is no sum: one microbatch on one rank."""
        self._reductions: dict[str, int] = {}
        """Unit → how often FSDP2 has reduced its gradients in this backward."""
        self._unread: _Check | None = None
        """Check of the last backward, if the host has not read it."""
        self.factor = 1.0 / mesh.size()
        """Factor by which the next sum over microbatches and ranks is multiplied."""

    def install(self, units: Iterable[ShardedModule]) -> None:
        """Let FSDP2 add alone; ``unit_reduced`` multiplies the sum, once."""
        for module in units:
            module.set_gradient_divide_factor(1.0)

    def name(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take the names of sharded and whole parameters: for grids, messages and the order of what ranks exchange.

        A tie goes by the first of its names, and has the grid of the first glob that matches any of them.
        """
        names_of: dict[int, list[str]] = {}
        for name, parameter in parameters:
            names_of.setdefault(id(parameter), []).append(name)
        for key, called in names_of.items():
            self._names[key] = called[0]
            hits = (e for glob, e in self._globs.items() if names.matching(glob, called))
            exponent = next(hits, EXPONENT)
            for name in called:  # FSDP2 tells one name of a tie later
                self._exponents.setdefault(name, exponent)
        self._units = None

    def knows(self, parameters: Iterable[torch.Tensor]) -> bool:
        """True if all ``parameters`` were named; an assigned state dict brings new ones."""
        return all(id(parameter) in self._names for parameter in parameters)

    def quantum(self, name: str) -> float:
        """Return the step of the grid to which one microbatch's gradient of a parameter is rounded."""
        return math.ldexp(1.0, self._exponents[name]) / below(self.factor)

    def refuse_earlier(self, parameters: Iterable[torch.Tensor]) -> None:
        """Raise RuntimeError if an earlier backward has reduced gradients that this one would be added to. Collective
        where some are there.
        """
        grads = [_torch.local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        if not grads:
            return
        kept = torch.stack([grad.any() for grad in grads]).any().to(device_of(self.mesh), torch.uint8)
        if all_reduce(kept, self.mesh, dist.ReduceOp.MAX):
            raise TrueShardRuntimeError(
                "exact=True: gradients of an earlier backward are there already, and reduced ones do not add up "
                "exactly; run all backwards of a step but the last one inside accumulate(model, last=False)"
            )

    def begin(self, leaves: Iterable[tuple[torch.Tensor, torch.Tensor]], *, is_sum: bool) -> None:
        """Begin a backward; ``leaves``: (parameter, its leaf in the graph); ``is_sum``: of more than one."""
        self._rounds, self._reductions = is_sum, {}
        weak = weakref.ref(self)
        for parameter, leaf in leaves:
            if leaf.requires_grad and leaf not in self._hooked:
                self._hooked[leaf] = True
                leaf.register_hook(_rounded(weak, self._names[id(parameter)]))

    def round(self, name: str, grad: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient of one microbatch on the grid; None: as it is."""
        if not self._rounds or grad.requires_grad or not grad.is_floating_point():
            return None
        quantum = self.quantum(name)
        with torch.no_grad():
            self._largest.setdefault(name, []).append(largest_of(_torch.local(grad)))
            self._finest = max(self._finest, below(self.factor))
            return to_grid(grad, quantum)

    def divide_by(self, total: int) -> float:
        """Make the sum that is reduced next a mean over ``total`` terms.

        Returns the power of two by which its losses are to be divided before.
        """
        power = 2.0 ** (total - 1).bit_length()
        self.factor = power / total
        return power

    def unit_reduced(self, name: str, reduced: torch.Tensor) -> None:
        """Take the sum of a unit's gradients over the microbatches and ranks of a step."""
        self._reductions[name] = self._reductions.get(name, 0) + 1
        self.scale(reduced)

    def scale(self, reduced: torch.Tensor) -> None:
        """Multiply what FSDP2 has added up, in place."""
        if self.factor != 1.0:
            reduced.mul_(self.factor)

    def end(self) -> None:
        """End a backward that reduced: check the sums. Collective.

        Raises the OverflowError of ``read``, on a CPU for this backward, elsewhere for the one before. RuntimeError if
        a unit was reduced in parts, which FSDP2 rounds before it adds them.
        """
        self.read()
        if twice := [name for name, count in self._reductions.items() if count > 1]:
            raise TrueShardRuntimeError(
                f"exact=True: unit {twice[0] or '(root)'!r} ran several times before this backward, so what had been "
                "accumulated was reduced apart from what came last, and those do not add up exactly: call backward() "
                "after each forward; for a module that the model itself calls again, choose larger units"
            )
        self.factor = 1.0 / self.mesh.size()
        called = sorted(set(self._names.values()))
        if not self._rounds or is_simulated(self.mesh):
            self.forget()
            if self._rounds:
                self._units_of(called)  # a forecast counts what stays
            return
        is_first, self._is_first = self._is_first, False
        largest = self._in_steps(called)
        sums = all_reduce(largest.sum(0), self.mesh)
        self._unread = _Check.begin(called, sums)
        if sums.device.type == "cpu" or is_first:
            self.read()
        if is_first:
            most = all_reduce(largest.amax(0), self.mesh, dist.ReduceOp.MAX).tolist()
            self._tell_of_coarse(dict(zip(called, most, strict=True)))

    def read(self) -> None:
        """Read the check of the last backward. Raises OverflowError, on every rank, if a sum may not have been exact;
        names the parameter.
        """
        check, self._unread = self._unread, None
        if check is not None and check.fails():
            self._refuse(check)

    def _in_steps(self, called: Sequence[str]) -> torch.Tensor:
        """Return the largest elements, in steps of the grid: (microbatches, parameters), float64; 0 where there is
        none. Drops their record.
        """
        largest, finest = self._largest, self._finest
        self.forget()
        units = self._units_of(called)
        count = max(map(len, largest.values()), default=1)
        zero = next((few[0].new_zeros(()) for few in largest.values()), units.new_zeros(()))
        padded = [[*few, *[zero] * (count - len(few))] for few in (largest.get(name, []) for name in called)]
        peaks = torch.stack([few[number] for number in range(count) for few in padded])
        return peaks.to(units).view(count, len(called)) * (units * finest)

    def _units_of(self, called: Sequence[str]) -> torch.Tensor:
        if self._units is None:
            units = [math.ldexp(1.0, -self._exponents[name]) for name in called]
            self._units = torch.tensor(units, dtype=torch.float64).to(device_of(self.mesh))
        return self._units

    def _refuse(self, check: _Check) -> None:
        worst = int(torch.where(check.over, check.sums, 0.0).argmax())
        name, steps = check.called[worst], float(check.sums[worst])
        exponent = self._exponents[name]
        wider = exponent + math.frexp(steps)[1] - DIGITS
        remedy = (
            f"give it the exponent {wider} or more, such as exact={{{name!r}: {wider}}}, " if wider in EXPONENTS else ""
        )
        raise OverflowError(
            f"exact: the largest gradients of {name!r} in the microbatches of one step add up to "
            f"{math.ldexp(steps, exponent):.3g}, and sums on its grid of 2**{exponent} are exact up to "
            f"{math.ldexp(1.0, exponent + DIGITS):g}: {remedy}use a mean for the loss (token_mean), or divide it by a "
            "power of two; or train without exact"
        )

    def _tell_of_coarse(self, peaks: Mapping[str, float]) -> None:
        """Log on rank 0 which gradients the grid takes digits from; ``peaks``: largest elements in steps of the grid.

        Of float32's 24 bits, those of the largest element that are worth less than a step are lost. That element is of
        one microbatch, so it is the same at any number of ranks.
        """
        exponents = {}
        for name, peak in peaks.items():
            if 0 < peak < 2.0**KEPT:
                exponents[name] = max(self._exponents[name] + math.frexp(peak)[1] - MANTISSA, EXPONENTS[0])
        if not exponents:
            return
        shown = ", ".join(f"{name!r}: {exponent}" for name, exponent in list(exponents.items())[:SHOWN])
        more = f" (and {len(exponents) - SHOWN} more)" if len(exponents) > SHOWN else ""
        self.coarse.append(
            f"Gradients are so small that exact sums keep fewer than {KEPT} of the {MANTISSA} bits of their largest "
            f"elements; exponents that keep all: exact={{{shown}}}{more}."
        )
        if self.mesh.get_rank() == 0:
            logger.warning("%s", self.coarse[-1])

    def forget(self) -> None:
        """Drop the record of a backward that was cut short; losses may have been divided already for what follows."""
        self._largest, self._finest = {}, 0.0


def _rounded(weak: weakref.ref[ExactSums], name: str) -> Any:
    def hook(grad: torch.Tensor) -> torch.Tensor | None:
        sums = weak()
        return None if sums is None else sums.round(name, grad)

    return hook
