"""Find what would fail at the first forward, before there is a GPU, by running the model on fake tensors.

Forward runs under watch for what fake CPU tensors do not show. On a CPU everything lies on one device. On a GPU,
``.to(device)`` moves parameters and buffers; a tensor that a module holds as an ordinary attribute stays behind, and
one that ``forward`` makes without ``device=`` lies on the CPU.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from trueshard import _torch
from trueshard.errors import one_line
from trueshard.model import names
from trueshard.optim.norms import clip_grad_norm_
from trueshard.options import Options
from trueshard.planner.inputs.batches import quietly
from trueshard.planner.simulation.environment import fake_tensors_look_real
from trueshard.planner.simulation.fake_values import KnownValues, code_line, innermost_frame, is_of_library
from trueshard.planner.simulation.recorder import watching_forwards
from trueshard.planner.simulation.recurrences import RefusedLoop, recurrences
from trueshard.planner.simulation.simulate import Simulator, own_part, simulated_mesh
from trueshard.planner.workload import Job
from trueshard.plans import Plan
from trueshard.sharding import engine
from trueshard.sharding.hooks import runtime_of

_BLOCKS = 2
"""Blocks of a run of equal ones that are run at first."""


@dataclass(frozen=True)
class Problem:
    """Something that fails, or that may not be intended."""

    where: str
    """Name of a module or parameter; else ``model``, ``optimizer``, ``batch``, ``loss``, ``shard``, ``step``."""
    what: str
    remedy: str
    """Change that solves it; "" where ``what`` names it."""
    severity: Literal["error", "warning"]

    def __str__(self) -> str:
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{self.severity}: {self.where}: {self.what}{remedy}"


def preflight(job: Job, simulator: Simulator | None = None) -> list[Problem]:
    """Build, shard and run one microbatch of a job on fake tensors, and return errors, then warnings.

    If ``shard()`` refuses the model, it runs unsharded, so that further problems are found as well. The job's choices
    hold no ``"auto"``. ``simulator``: of the job's workload, if there is one, whose model is taken.
    """
    simulator = simulator or Simulator(job.workload)
    # Two of many equal blocks run first. All run if there is a problem: for the names, and to be certain.
    problems = _Trial(job, simulator).run(shorter=True)
    if problems or problems is None:
        problems = _Trial(job, simulator).run(shorter=False)
    return sorted(problems or [], key=lambda problem: problem.severity)


class _Trial:
    """A model that is built, sharded and run once, with the problems that this shows."""

    def __init__(self, job: Job, simulator: Simulator) -> None:
        self.job, self.workload, self.simulator = job, job.workload, simulator
        self.problems: list[Problem] = []
        self.values = KnownValues()

    def run(self, *, shorter: bool) -> list[Problem] | None:
        """Return the problems; ``shorter``: of the model with ``_BLOCKS`` of equal blocks, None if it has none."""
        # Compiled modules run eagerly: a compiled kernel would read the memory that fake tensors do not have.
        eagerly = torch.compiler.set_stance("force_eager")
        with quietly(), warnings.catch_warnings(), simulated_mesh(self.job, "cpu") as mesh, eagerly:
            warnings.simplefilter("ignore")
            with self.simulator.mode, fake_tensors_look_real(), self._collected("model"):
                how: Plan | Options = self.job.plan or self.job.choices
                if shorter:
                    short = self._short(how)
                    if short is None:
                        return None
                    model, how = short
                else:
                    model = self.workload.model()
                with self.values:
                    self._shard_and_step(model, how, mesh)
        return self.problems

    def _short(self, how: Plan | Options) -> tuple[nn.Module, Plan] | None:
        """Return the model with ``_BLOCKS`` of each run, and its plan; None if there is no run."""
        try:
            plan = self.simulator.resolve(how, self.job.ranks)
            runs = self.simulator.repeats.runs(plan)
            return self.simulator.short_copy(plan, runs, [_BLOCKS] * len(runs)) if runs else None
        except (ValueError, TypeError):  # shard() will raise it
            return None

    def _shard_and_step(self, model: nn.Module, how: Plan | Options, mesh: DeviceMesh) -> None:
        """Shard the model and run a step of it."""
        optimizers: list[torch.optim.Optimizer] = []
        with self._collected("optimizer"):
            optimizers = list(self.workload.optimizers(model))
        with self._collected("shard"):
            engine.shard(model, optimizers, how, mesh)
        with self._collected("batch"):
            with self.values.drawing():
                batch = own_part(model, self.workload.batch(self.job.microbatch, self.workload.sequence))
            with recurrences(model, self.values, on_cpu=self.job.on_cpu):
                self._step(model, [] if self.problems else optimizers, batch)

    def _step(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], batch: Any) -> None:
        """Run a step up to the first failure; clip and step only if there are ``optimizers``."""
        loss = self._forward(model, batch)
        if loss is None:
            return
        phase = "backward"
        try:
            with _torch.watching_resizes(lambda *_: None):
                loss.backward()
                self.problems += _unused(model)
                if optimizers:
                    phase = "clip"
                    clip_grad_norm_(model.parameters(), self.workload.clip or 1.0)
                    for optimizer in optimizers:
                        phase = type(optimizer).__name__
                        optimizer.step()
        except Exception as error:
            self.problems.append(_failure(error, "step", phase))

    def _forward(self, model: nn.Module, batch: Any) -> torch.Tensor | None:
        """Return the loss of a watched forward; None if it fails or has no gradient."""
        watch = _Watch(model, self.values)
        try:
            with watching_forwards(watch.begin, watch.end, always_call=False), watch:
                loss = self.workload.loss(model, batch)
        except RefusedLoop as error:
            where, _, what = str(error).partition(": ")
            self.problems.append(Problem(where, what, "", "error"))
            return None
        except Exception as error:
            phase = f"forward, after a value was guessed ({watch.first_guess})," if watch.first_guess else "forward"
            if _is_data_dependent(error):
                phase = f"forward, in {watch.operation}"
            self.problems.append(_failure(error, watch.where() or "loss", phase))
            return None
        finally:
            watch.counted.close()
            self.problems += watch.problems.values()
        if isinstance(loss, torch.Tensor) and not loss.ndim and loss.requires_grad:
            return loss
        what = f"is a {type(loss).__name__}"
        if isinstance(loss, torch.Tensor):
            what = f"has the shape {tuple(loss.shape)}" if loss.ndim else "has no gradient"
        self.problems.append(Problem("loss", what, "return a scalar tensor that requires a gradient", "error"))
        return None

    @contextlib.contextmanager
    def _collected(self, where: str) -> Iterator[None]:
        try:
            yield
        except (ValueError, TypeError) as error:
            self.problems.append(Problem(where, one_line(error), "", "error"))
        except Exception as error:
            self.problems.append(_failure(error, where, where))


def _unused(model: nn.Module) -> list[Problem]:
    unused = [
        name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter.grad is None
    ]
    if not unused:
        return []
    more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
    what = f"{len(unused)} parameter{'s get' if len(unused) > 1 else ' gets'} no gradient from this batch"
    remedy = "freeze what is not used (requires_grad_(False)), or use it"
    return [Problem(", ".join(unused[:3]) + more, what, remedy, "warning")]


def _failure(error: Exception, where: str, phase: str) -> Problem:
    line, words = _line(error), one_line(error, 300)
    if _is_data_dependent(error):
        words = "it reads memory" if _NO_MEMORY in words else words
        what = f"{phase}: a shape or a value depends on data{line}: {words}"
        remedy = "it may train, but the planner cannot follow it: make shapes depend on shapes alone (masks, padding)"
        return Problem(where, what, remedy, "error")
    what = f"{phase} fails{line}: {type(error).__name__}: {words}"
    return Problem(where, what, "correct the model, or the batch it is given", "error")


# Watching a forward

_MAKERS = frozenset(
    getattr(torch, name)
    for name in ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm", "tensor")
) | {torch.zeros, torch.logspace, torch.as_tensor}
_MOVERS = frozenset({torch.Tensor.to, torch.Tensor.type_as, torch.Tensor.cuda, torch.Tensor.cpu})
_ACROSS = frozenset({torch.Tensor.copy_, torch.Tensor.__getitem__, torch.Tensor.__setitem__})
"""Functions that accept tensors on two devices."""
_PRODUCTS = frozenset(
    ("linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "einsum", "bilinear", "conv1d")
) | {"conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "scaled_dot_product_attention"}
"""Functions whose operands must have one floating-point dtype; on fake tensors they do not insist."""
_NO_MEMORY = "its data is not allocated yet"
_STAYS = "is a tensor attribute, which stays on the CPU when the model goes to a GPU"


class _Watch(TorchFunctionMode):
    """Find tensors that would be on the CPU beside others on a GPU, mixed dtypes, and values that are read."""

    def __init__(self, model: nn.Module, values: KnownValues) -> None:
        super().__init__()
        root = names.unwrap(model)
        self.problems: dict[str, Problem] = {}
        """Problems: one for each line of code, whichever modules run it; one for each attribute and table."""
        self.first_guess = ""
        """``file:line`` that first read a value that depends on data; "" if none did."""
        self.operation = ""
        """Name of the function of torch that failed last."""
        self._failure: Exception | None = None
        self._values = values
        self._name_of = {module: name for name, module in names.named_modules(root)}
        runtime = runtime_of(root)
        self._apart = frozenset(() if runtime is None else runtime.plan.modules_apart)
        """Names of modules in which ranks tell each other how many tokens they send: values that may be read."""
        self._attributes = self._plain_tensors(model)
        """Problem with each tensor that is an ordinary attribute, by its ``id``."""
        self.counted = contextlib.ExitStack()
        self._running: list[nn.Module] = []
        self._on_cpu: MutableMapping[torch.Tensor, Problem] = WeakTensorKeyDictionary()

    def _plain_tensors(self, model: nn.Module) -> dict[int, Problem]:
        registered = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        return {
            id(tensor): Problem(
                f"{name}.{attribute}".lstrip("."),
                _STAYS,
                f"register_buffer({attribute!r}, …, persistent=False)",
                "error",
            )
            for module, name in self._name_of.items()
            for attribute, value in names.plain_attributes(module).items()
            for tensor in _torch.tensors_in(value)
            if id(tensor) not in registered
        }

    def where(self) -> str:
        """Return the module's name, ``model`` for the root; "" outside of all forwards."""
        return (self._name_of[self._running[-1]] or "model") if self._running else ""

    def begin(self, module: nn.Module, args: Any) -> None:
        if module in self._name_of:
            self._running.append(module)
            if self._name_of[module] in self._apart:
                self.counted.enter_context(KnownValues())
            if isinstance(module, nn.Embedding) and args and isinstance(args[0], torch.Tensor):
                self._check_positions(self._name_of[module], module.num_embeddings, args[0])

    def _check_positions(self, name: str, rows: int, ids: torch.Tensor) -> None:
        """Add a problem if a sequence has more positions than the table has rows: no fake index is out of range."""
        attribute = name.rpartition(".")[2]
        is_table = attribute in ("wpe", "pos_emb") or "position" in attribute
        if is_table and ids.ndim and ids.shape[-1] > rows:
            what = f"its table of positions has {rows} rows, and the sequence is {ids.shape[-1]}"
            problem = Problem(name, what, f"ask for at most {rows} (--sequence), or a longer table", "error")
            self.problems.setdefault(name, problem)

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        if module in self._running:
            while self._running.pop() is not module:  # a module whose exception was caught
                pass
            if self._name_of[module] in self._apart:
                self.counted.close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = self._call(func, args, kwargs)
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "__delete__"):
            return out
        tensors = _torch.tensors_in((args, kwargs))
        if func in _MAKERS:
            if kwargs.get("device") is None and not tensors:
                what = f"torch.{name} makes a tensor on the CPU{_line()}, which meets others that would be on a GPU"
                self._mark(out, Problem(self.where() or "loss", what, "give it device= of the input", "error"))
            return out
        if name in _PRODUCTS:
            self._check_dtypes(name, tensors)
        problems = ((tensor, self._attributes.get(id(tensor)) or self._on_cpu.get(tensor)) for tensor in tensors)
        on_cpu = [(tensor, problem) for tensor, problem in problems if problem is not None]
        if not on_cpu:
            return out
        if func in _MOVERS and _moves(args, kwargs):  # its own tensor, even if it is on the device already
            return out.view_as(out) if out is args[0] else out
        if len(on_cpu) == len(tensors):
            self._mark(out, on_cpu[0][1])
        elif func not in _ACROSS:
            for tensor, problem in on_cpu:
                if tensor.ndim:  # a scalar on the CPU is accepted beside any tensor
                    self._add(problem)
        return out

    def _check_dtypes(self, name: str, tensors: list[torch.Tensor]) -> None:
        dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors if tensor.is_floating_point()})
        if len(dtypes) > 1 and not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda"):
            what = f"{name.strip('_')} of {' and '.join(dtypes)}{_line()}: its operands must have one dtype"
            self._add(Problem(self.where() or "loss", what, "cast one of them", "error"))

    def _mark(self, out: Any, problem: Problem) -> None:
        for tensor in _torch.tensors_in(out):
            self._on_cpu[tensor] = problem

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        before = self._values.guesses
        try:
            out = func(*args, **kwargs)
        except Exception as error:
            if error is not self._failure:  # of calls inside each other, the innermost one
                self._failure, self.operation = error, getattr(func, "__name__", "")
            raise
        if self._values.guesses == before:
            return out
        self.first_guess = self.first_guess or _line().strip(" ()")
        if not is_of_library(innermost_frame()):
            what = f".{getattr(func, '__name__', func)}() reads a value{_line()}: a GPU waits for it, and the planner "
            remedy = "keep what depends on data in tensors"
            self._add(Problem(self.where() or "loss", f"{what}goes on with a guess", remedy, "warning"))
        return out

    def _add(self, problem: Problem) -> None:
        self.problems.setdefault(problem.where if problem.what == _STAYS else problem.what, problem)


def _is_data_dependent(error: BaseException) -> bool:
    """True if a fake tensor was asked for its memory, for a value, or for a shape that depends on values."""
    kinds = ("DataDependentOutputException", "DynamicOutputShapeException", "UnsupportedOperatorException")
    return type(error).__name__ in kinds or _NO_MEMORY in str(error)


def _line(error: BaseException | None = None) -> str:
    """Return `` (file:line)`` of the innermost code that is neither torch's nor this library's; "" if there is none."""
    return code_line(innermost_frame(error))


def _moves(args: Any, kwargs: Any) -> bool:
    """True if ``tensor.to(...)`` names a device, or a tensor that is on one."""
    devices = (str, int, torch.device, torch.Tensor)
    return any(isinstance(value, devices) and value is not True for value in (*args[1:], *kwargs.values()))
