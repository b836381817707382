"""What would fail at the first forward, found before there is a GPU."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from trueshard import _torch, engine, names
from trueshard.errors import one_line
from trueshard.optim.clip import clip_grad_norm_
from trueshard.planner.inputs.batches import quietly
from trueshard.planner.inputs.twins import plain_attributes
from trueshard.planner.simulation.peers import seeing_real_tensors
from trueshard.planner.simulation.recorder import Recorder
from trueshard.planner.simulation.repeats import find_runs, shorten, shortened
from trueshard.planner.simulation.simulate import simulated_mesh
from trueshard.planner.simulation.strays import Stray, Watch, here, is_data_dependent
from trueshard.planner.workload import Workload
from trueshard.plans import Plan
from trueshard.policies import UNSAID

#: How many blocks of a run of equal ones are run at first.
_BLOCKS = 2


@dataclass(frozen=True)
class Problem:
    """One thing that fails, or that may not be meant."""

    where: str
    """A module or parameter by name; else ``model``, ``optimizer``, ``batch``, ``loss``, ``shard``, ``step``."""
    what: str
    remedy: str
    """What to do about it; "" where ``what`` says it."""
    severity: Literal["error", "warning"]

    def __str__(self) -> str:
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{self.severity}: {self.where}: {self.what}{remedy}"


def preflight(
    workload: Workload,
    *,
    ranks: Sequence[int] = (8,),
    microbatch: int = 1,
    plan: Plan | None = None,
    words: Mapping[str, Any] | None = None,
) -> list[Problem]:
    """Build, shard and run ``workload`` on fake tensors, as rank 0 would, and tell all that goes wrong.

    Where ``shard()`` refuses, the unsharded model runs instead, so that what fails there is found as well.

    Args:
        workload: what is trained.
        ranks: mesh shape: (shard,) or (replicate, shard).
        microbatch: samples in one forward.
        plan: what to apply; None: by words.
        words: ``shard()``'s arguments where they differ from the defaults.

    Returns:
        Errors first; [] if nothing is wrong.
    """
    problems: list[Problem] = []
    world = 1
    for size in ranks:
        world *= size
    choices = {**UNSAID, **(words or {})}
    # What is compiled runs as it is written: a compiled kernel would read the memory that fake tensors do not have.
    eagerly = torch.compiler.set_stance("force_eager")
    with quietly(), warnings.catch_warnings(), _torch.simulated_world(0, world), eagerly:
        warnings.simplefilter("ignore")
        mesh = simulated_mesh("cpu", tuple(ranks))
        # Equal blocks do the same. Only if something is wrong, all of them run: for the names, and to be certain.
        for shorter in (True, False):
            problems.clear()
            with _torch.fake_tensors(), seeing_real_tensors(), _collected("model", problems):
                model, own_plan = workload.model(), plan
                if shorter and (less := _shortened(model, plan, choices, tuple(ranks))) is not None:
                    model, own_plan = less
                elif shorter:
                    continue
                _run(workload, model, own_plan, mesh, choices, microbatch, problems)
            if not problems:
                break
    return sorted(problems, key=lambda each: each.severity)


def _shortened(
    model: nn.Module, plan: Plan | None, choices: Mapping[str, Any], ranks: tuple[int, ...]
) -> tuple[nn.Module, Plan] | None:
    """The model with a few of each run of equal blocks, and the plan for it; None if it stays as it is."""
    names.hide_wrappers(model)
    try:
        resolved = engine.resolve(model, plan, choices, ranks)
    except (ValueError, TypeError):  # shard() will say so
        return None
    runs = find_runs(model, resolved)
    if not runs:
        return None
    return model, shortened(resolved, shorten(model, runs, [min(run.count, _BLOCKS) for run in runs]))


def _run(
    workload: Workload,
    model: nn.Module,
    plan: Plan | None,
    mesh: DeviceMesh,
    choices: Mapping[str, Any],
    microbatch: int,
    problems: list[Problem],
) -> None:
    optimizers: list[torch.optim.Optimizer] = []
    with _collected("optimizer", problems):
        optimizers = list(workload.optimizers(model))
    is_sharded = False
    with _collected("shard", problems):
        engine.shard(model, optimizers, plan, mesh, choices if plan is None else UNSAID)
        is_sharded = True
    with _collected("batch", problems):
        batch = workload.batch(microbatch, workload.sequence)
        _step(workload, model, optimizers if is_sharded else [], batch, problems)


def _step(
    workload: Workload,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    batch: Any,
    problems: list[Problem],
) -> None:
    """A step up to the first failure; clipping and the optimizers' part only where there are ``optimizers``."""
    loss = _forward(workload, model, batch, problems)
    if loss is None:
        return
    phase = "backward"
    try:
        with Recorder(), _torch.watching_resizes(lambda *_: None):
            loss.backward()
            _unused(model, problems)
            if optimizers:
                phase = "clip"
                clip_grad_norm_(model.parameters(), workload.clip or 1.0)
                for optimizer in optimizers:
                    phase = type(optimizer).__name__
                    optimizer.step()
    except Exception as error:
        problems.append(_failure(error, "step", phase))


def _forward(workload: Workload, model: nn.Module, batch: Any, problems: list[Problem]) -> torch.Tensor | None:
    """The loss, made under watch; None where it fails or has no gradient."""
    name_of = {module: name for name, module in names.named_modules(names.unwrap(model))}
    held = {
        id(tensor): (name, attribute)
        for module, name in name_of.items()
        for attribute, value in plain_attributes(module).items()
        for tensor in _torch.tensors_in(value)
    }
    for tensor in (*model.parameters(), *model.buffers()):
        held.pop(id(tensor), None)
    calls = _Calls(name_of, problems)
    watch = Watch(held, calls.where)
    try:
        with calls.followed(), watch:
            loss = workload.loss(model, batch)
    except Exception as error:
        phase = f"forward, after a value was guessed ({watch.guessed})" if watch.guessed else "forward"
        problems.append(_failure(error, calls.where() or "loss", phase))
        return None
    finally:
        problems += [_told(stray) for stray in watch.found.values()]
    if isinstance(loss, torch.Tensor) and not loss.ndim and loss.requires_grad:
        return loss
    what = f"is a {type(loss).__name__}"
    if isinstance(loss, torch.Tensor):
        what = f"has the shape {tuple(loss.shape)}" if loss.ndim else "has no gradient"
    problems.append(Problem("loss", what, "return a scalar tensor that requires a gradient", "error"))
    return None


def _unused(model: nn.Module, problems: list[Problem]) -> None:
    found = [name for name, each in model.named_parameters() if each.requires_grad and each.grad is None]
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        what = f"{len(found)} parameter{'s get' if len(found) > 1 else ' gets'} no gradient from this batch"
        remedy = "freeze what is not used (requires_grad_(False)), or use it"
        problems.append(Problem(", ".join(found[:3]) + more, what, remedy, "warning"))


class _Calls:
    """Which module's forward runs. After an exception: the innermost that was running."""

    def __init__(self, name_of: Mapping[nn.Module, str], problems: list[Problem]) -> None:
        self._name_of = name_of
        self._problems = problems
        self._running: list[nn.Module] = []

    def where(self) -> str:
        """The module's name; the root is ``model``, and outside of all forwards it is ""."""
        return (self._name_of[self._running[-1]] or "model") if self._running else ""

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Inside, forwards are followed."""
        handles = [
            nn.modules.module.register_module_forward_pre_hook(self._begins),
            nn.modules.module.register_module_forward_hook(self._ends),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _begins(self, module: nn.Module, args: Any) -> None:
        if module in self._name_of:
            self._running.append(module)
            if isinstance(module, nn.Embedding) and args and isinstance(args[0], torch.Tensor):
                self._check_positions(self._name_of[module], module.num_embeddings, args[0])

    def _check_positions(self, name: str, rows: int, ids: torch.Tensor) -> None:
        """On fake tensors no index is out of range; but as many positions as there are, are all different."""
        told = name.rpartition(".")[2]
        if (told in ("wpe", "pos_emb") or "position" in told) and ids.ndim and ids.shape[-1] > rows:
            what = f"its table of positions has {rows} rows, and the sequence is {ids.shape[-1]}"
            self._problems.append(Problem(name, what, "ask for a shorter sequence, or a longer table", "error"))

    def _ends(self, module: nn.Module, args: Any, output: Any) -> None:
        if module in self._running:
            while self._running.pop() is not module:  # one whose exception somebody caught
                pass


@contextlib.contextmanager
def _collected(where: str, problems: list[Problem]) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError) as error:
        problems.append(Problem(where, one_line(error), "", "error"))
    except Exception as error:
        problems.append(_failure(error, where, where))


def _failure(error: Exception, where: str, phase: str) -> Problem:
    line = f" ({place})" if (place := here(error)) else ""
    words = one_line(error, 300)
    if is_data_dependent(error):
        what = f"{phase}: a shape or a value depends on data{line}: {words}"
        remedy = "it may train, but the planner cannot follow it: make shapes depend on shapes alone (masks, padding)"
        return Problem(where, what, remedy, "error")
    what = f"{phase} fails{line}: {type(error).__name__}: {words}"
    return Problem(where, what, "correct the model, or the batch it is given", "error")


def _told(stray: Stray) -> Problem:
    line = f" ({stray.line})" if stray.line else ""
    if stray.kind == "attribute":
        what = "is a tensor attribute, which stays on the CPU when the model goes to a GPU"
        remedy = f"register_buffer({stray.what!r}, …, persistent=False)"
        return Problem(f"{stray.module}.{stray.what}".lstrip("."), what, remedy, "error")
    if stray.kind == "made":
        what = f"{stray.what} makes a tensor on the CPU{line}, which meets others that would be on a GPU"
        return Problem(stray.module or "loss", what, "give it device= of the input", "error")
    if stray.kind == "dtypes":
        what = f"{stray.what}{line}: its operands must have one dtype"
        return Problem(stray.module or "loss", what, "cast one of them", "error")
    what = f"{stray.what} reads a value{line}: a GPU waits for it, and the planner goes on with a guess"
    return Problem(stray.module or "loss", what, "keep what depends on data in tensors", "warning")
