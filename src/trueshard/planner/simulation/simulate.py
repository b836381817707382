"""Simulate one rank of a job in this process, on fake tensors: the real ``shard()`` and the real step, recorded."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import math
import sys
import warnings
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from trueshard import _torch, distributed
from trueshard.model import names
from trueshard.optim.norms import clip_grad_norm_
from trueshard.options import Options
from trueshard.parallel.tensor import resolve as resolve_tensor
from trueshard.planner import ledger
from trueshard.planner.simulation.extension import KEPT, NotPeriodicError, extend
from trueshard.planner.simulation.fake_values import tensor_of_values, value_as_text, values_as_array
from trueshard.planner.simulation.offloading import offloaded
from trueshard.planner.simulation.recorder import Recorder, track_units
from trueshard.planner.simulation.repeats import Run, find_runs, short_copy
from trueshard.planner.trace import Kernel, Phase, Place, Trace
from trueshard.planner.workload import Job, Workload
from trueshard.plans import Plan
from trueshard.sharding import engine
from trueshard.sharding.engine import accumulate
from trueshard.sharding.hooks import runtime_of
from trueshard.sharding.splitting import split_sequence


def run_step(
    workload: Workload,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    batches: Sequence[Any],
    enter: Callable[[Phase], None] = lambda phase: None,
) -> None:
    """Run forward and backward of each microbatch, clipping, the optimizers' step, ``zero_grad``.

    Gradients of several ``batches`` accumulate; ``enter`` is called with each phase as it begins.
    """
    for i, batch in enumerate(batches):
        with accumulate(model, last=i == len(batches) - 1):
            enter("forward")
            loss = workload.loss(model, own_part(model, batch))
            if len(batches) > 1:
                loss = loss / len(batches)
            enter("backward")
            loss.backward()
            del loss
    _update(workload, model, optimizers, enter)


def run_stage(
    workload: Workload,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    batches: Sequence[Any],
    in_flight: int,
    enter: Callable[[Phase], None] = lambda phase: None,
) -> None:
    """As ``run_step``, in the order of a stage of a pipeline: ``in_flight`` forwards before the first backward."""
    root = engine.sharded(model).root
    waiting: deque[torch.Tensor] = deque()
    for i in range(len(batches) + in_flight - 1):
        if i < len(batches):
            enter("forward")
            waiting.append(workload.loss(model, own_part(model, batches[i])))
        if i >= in_flight - 1:
            last = i == len(batches) + in_flight - 2
            root.set_is_last_backward(last)  # as torch.distributed.pipelining's stages do
            root.set_reshard_after_backward(last)
            root.set_requires_gradient_sync(last)
            enter("backward")
            waiting.popleft().backward()
    _update(workload, model, optimizers, enter)


def _update(
    workload: Workload,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    enter: Callable[[Phase], None],
) -> None:
    enter("clip")
    if workload.clip is not None:
        clip_grad_norm_(model.parameters(), workload.clip)
    enter("optimizer")
    for optimizer in optimizers:
        optimizer.step()
    enter("between")
    for optimizer in optimizers:
        optimizer.zero_grad()


def own_part(model: nn.Module, batch: Any) -> Any:
    """Return what this rank computes of a microbatch: where ranks share sequences, its part of each.

    Raises ValueError if it cannot be told what of the batch is a sequence.
    """
    runtime = runtime_of(names.unwrap(model))
    if runtime is None or "context" not in runtime.axes.along:
        return batch
    if not isinstance(batch, Mapping):
        raise ValueError(
            f"context: the batch is a {type(batch).__name__}, and of a dict alone, with input_ids of [batch, length], "
            "is it known what ranks may share: give such a batch, with its loss, or leave out context"
        )
    return split_sequence(model, batch)


def run_score(workload: Workload, model: nn.Module, batch: Any, enter: Callable[[Phase], None]) -> None:
    """Run the workload's ``score`` of a microbatch, without gradient."""
    assert workload.score is not None
    enter("forward")
    with torch.no_grad():
        workload.score(model, own_part(model, batch))
    enter("between")


@dataclass
class Simulation:
    """One rank's first and later steps."""

    plan: Plan
    """With its units."""
    first: Trace
    """First step, in which optimizer state and FSDP2's buffers are made."""
    steady: Trace
    """Any later step."""
    score: Trace | None = None
    """Pass of ``Workload.score`` after these, if there is one."""
    models: int = 1
    """Models that were run; more than one if repeated blocks were extended."""
    whole_because: str = ""
    """Reason why repeated blocks were all run; "" if they were not, or if there are none."""
    warnings: list[str] = field(default_factory=list)
    """Warnings of ``shard()`` and of the model."""


def simulate(job: Job, *, whole: bool = False) -> Simulation:
    """Run two steps of ``job`` as its rank would.

    Of many equal blocks a few are run and the others extended from them exactly, see ``extend``; ``whole``: run all.

    Raises:
        ValueError: ``shard()`` refuses the job.
        Exception: raised by the workload's own functions.
    """
    return Simulator(job.workload).simulate(job, whole=whole)


@dataclass
class Short:
    """A job on a model with few blocks, to be run."""

    job: Job
    plan: Plan
    """Of the whole model, with its units."""
    runs: Sequence[Run]
    kept: Sequence[int]
    """Blocks of each run that are left."""

    def key(self) -> Hashable:
        """Return what tells it from others of its workload; equal ones differ in the place and length of runs alone."""
        job = self.job

        def labelled(name: str) -> Any:
            places = ((r, run.place_of(name)) for r, run in enumerate(self.runs))
            return next((each for each in places if each[1] is not None and each[1][0] < self.kept[each[0]]), name)

        def is_left(name: str) -> bool:
            return all((run.block_of(name) or 0) < kept for run, kept in zip(self.runs, self.kept, strict=True))

        units = [
            (labelled(unit.name), unit.reshard_after_forward, unit.activation_checkpointing)
            for unit in self.plan.units
            if is_left(unit.name)
        ]
        fixed = dataclasses.replace(
            self.plan, units=(), reshard_after_forward="", activation_checkpointing="", resolved_for=""
        )
        batch = job.microbatch, job.accumulation, job.workload.sequence, job.workload.score is None
        where = job.ranks, job.rank, job.on_cpu, job.recorder, job.imbalance, job.in_flight
        return repr((where, batch, units, fixed, [(run.container, run.period) for run in self.runs], self.kept))


@dataclass
class Steps:
    """What running a short model recorded."""

    first: Trace
    steady: Trace
    score: Trace | None
    warnings: set[str]
    runs: Sequence[Run]
    """Of the model that was run."""


class Simulator:
    """Simulates jobs of one workload: its model is built once, and what several jobs share is run once.

    Args:
        workload: of all jobs.
        run_all: runs several short models, perhaps side by side; None: ``run``, one after the other.
    """

    def __init__(self, workload: Workload, run_all: Callable[[list[Short]], list[Steps]] | None = None) -> None:
        self.workload = workload
        self._run_all = run_all or (lambda shorts: [self.run(each) for each in shorts])
        self._mode = _torch.fake_tensors()
        self._known: dict[Hashable, Steps] = {}

    @functools.cached_property
    def model(self) -> nn.Module:
        """The whole, unsharded model, which stays as it is: copies of it are run."""
        with self._mode:
            return self.workload.model()

    def resolve(self, how: Plan | Options, ranks: tuple[int, ...]) -> Plan:
        """Return a plan with its units; raise ValueError if ``shard()`` refuses it."""
        model = self.model
        job = Job(self.workload, ranks, plan=how) if isinstance(how, Plan) else Job(self.workload, ranks, choices=how)
        with self._mode:
            return resolve_tensor(names.unwrap(model), engine.resolve(model, how, ranks), job.axes)

    def simulate(self, job: Job, *, whole: bool = False) -> Simulation:
        """Run two steps of a job; see ``simulate``."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            plan = self.resolve(job.plan or job.choices, job.ranks)
            runs = [] if whole else find_runs(self.model, plan)
        try:
            made = self._extended(Short(job, plan, runs, [KEPT] * len(runs)))
        except NotPeriodicError as reason:
            made = self._extended(Short(job, plan, [], []))
            made.whole_because = str(reason)
        made.warnings = sorted({*made.warnings, *_told(caught)})
        return made

    def _extended(self, short: Short) -> Simulation:
        """Run the model with ``KEPT`` blocks of each run, and once for each run with one block less; extend traces."""
        runs = short.runs
        less = ([KEPT - (r == other) for other in range(len(runs))] for r in range(len(runs)))
        shorts = [short, *(dataclasses.replace(short, kept=kept) for kept in less)]
        keys = [each.key() for each in shorts]
        missing = [key for key in keys if key not in self._known]
        made = self._run_all([shorts[keys.index(key)] for key in missing])
        base, *fewer = [{**self._known, **dict(zip(missing, made, strict=True))}[key] for key in keys]
        told = sorted(set().union(base.warnings, *(each.warnings for each in fewer)))
        if not runs:
            return Simulation(short.plan, base.first, base.steady, base.score, warnings=told)
        self._known.update(zip(missing, made, strict=True))
        first = extend(base.first, [each.first for each in fewer], runs, base.runs)
        steady = extend(base.steady, [each.steady for each in fewer], runs, base.runs)
        score = base.score and extend(base.score, [each.score for each in fewer if each.score], runs, base.runs)
        return Simulation(short.plan, first, steady, score, models=len(shorts), warnings=told)

    def run(self, short: Short) -> Steps:
        """Run two steps, and the score if there is one, of a short model."""
        with self._prepared(short) as (mesh, model, plan, told):
            traces = _run(short.job, mesh, model, plan)
        return Steps(traces[0], traces[1], traces[2] if len(traces) > 2 else None, told, short.runs)

    def probe(self, short: Short) -> Trace:
        """Run one step alone of a short model, whose optimizers have stepped before: less than half of ``run``."""
        with self._prepared(short) as (mesh, model, plan, _):
            return _run(short.job, mesh, model, plan, probe=True)[0]

    @contextlib.contextmanager
    def _prepared(self, short: Short) -> Iterator[tuple[DeviceMesh, nn.Module, Plan, set[str]]]:
        """Yield a mesh, a model of few blocks, its plan, and a set to which warnings are added at the end."""
        told: set[str] = set()
        whole = self.model if short.runs else None
        # Modules that torch.compile returned run eagerly: it would compile what follows the operators, too.
        eagerly = torch.compiler.set_stance("force_eager")
        with warnings.catch_warnings(record=True) as caught, simulated_mesh(short.job, "cpu") as mesh, eagerly:
            warnings.simplefilter("always")
            with self._mode, _torch.unseen_propagation():
                if whole is None:
                    yield mesh, self.workload.model(), short.plan, told
                else:
                    yield mesh, *short_copy(whole, short.plan, short.runs, short.kept), told
        told |= _told(caught)


def _told(caught: list[warnings.WarningMessage]) -> set[str]:
    of_libraries = (DeprecationWarning, FutureWarning)  # about their own use of other libraries
    return {str(each.message) for each in caught if not issubclass(each.category, of_libraries)}


@contextlib.contextmanager
def simulated_mesh(job: Job, device_type: str) -> Iterator[DeviceMesh]:
    """Simulate the job's world as its rank, and yield its mesh."""
    sizes = job.axes
    with _torch.simulated_world(job.rank, math.prod(sizes.values())), _torch.one_chunk():
        yield distributed.simulated_mesh(device_type, sizes, (job.plan or job.choices).experts)


def _run(job: Job, mesh: DeviceMesh, model: nn.Module, plan: Plan, *, probe: bool = False) -> list[Trace]:
    """Return the traces of the first and the second step, and of the score if there is one; ``probe``: of one step."""
    workload = job.workload
    recorder = (job.recorder or Recorder)()
    recorder.values.imbalance = job.imbalance
    with recorder.values:
        optimizers = list(workload.optimizers(model))
        resolved = engine.shard(model, optimizers, dataclasses.replace(plan, compile=False), mesh)
        if probe:
            _make_optimizer_state(model, optimizers)
    recorder.axes = engine.sharded(model).axes.groups
    recorder.apart = {unit.name for unit in resolved.units if set(unit.modules) & set(resolved.modules_apart)}
    _adopt(recorder, model, resolved)
    recorder.adopt(_optimizer_state(model, optimizers), "optimizer", "")

    def enter(phase: Phase) -> None:
        if phase == "clip":
            recorder.mark([each.grad for each in model.parameters() if each.grad is not None], "gradients")
        recorder.place = Place(phase, "")

    traces = []
    attention = contextlib.nullcontext() if job.on_cpu else attention_as_on_a_device()
    with attention, track_units(recorder, model, resolved), fake_tensors_look_real(), without_garbage_collection():
        for number, trains in enumerate((True,) if probe else (True, True, False)[: 3 if workload.score else 2]):
            resident = recorder.alive()
            with recorder, _torch.watching_resizes(recorder.resized):
                # Of a stage's first step, only what it makes for all further ones matters.
                count = job.accumulation if trains and not (job.in_flight == 1 and number == 0) else 1
                with recorder.values.drawing():
                    batches = [workload.batch(job.microbatch, workload.sequence) for _ in range(count)]
                recorder.mark(_torch.tensors_in(batches), "inputs")
                if trains and job.in_flight:
                    run_stage(workload, model, optimizers, batches, job.in_flight, enter)
                elif trains:
                    run_step(workload, model, optimizers, batches, enter)
                else:
                    run_score(workload, model, batches[0], enter)
                del batches
            for name, tensor in _optimizer_state(model, optimizers):
                recorder.mark([tensor], "optimizer", name)
            trace = Trace(recorder.take(), resident)
            _mark_activations(trace)
            traces.append(_as_planned(trace, job, plan, recorder.members))
    return traces


def _adopt(recorder: Recorder, model: nn.Module, plan: Plan) -> None:
    name_of = _parameter_names(model)
    for unit, parameters in zip(plan.units, engine.sharded(model).units.values(), strict=True):
        recorder.members[unit.name] = [name_of[id(parameter)] for parameter in parameters]
        recorder.adopt(zip(recorder.members[unit.name], parameters, strict=True), "parameters", unit.name)
    recorder.adopt(((name_of[id(parameter)], parameter) for parameter in model.parameters()), "parameters", "")
    recorder.adopt(((name, tensor) for name, _, _, tensor in names.named_tensors(model, "buffers")), "parameters", "")


def _parameter_names(model: nn.Module) -> dict[int, str]:
    return {id(tensor): name for name, _, _, tensor in reversed(list(names.named_tensors(model, "parameters")))}


def _make_optimizer_state(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def _optimizer_state(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (parameter name.state key, tensor) for every tensor in the optimizers' state."""
    name_of = _parameter_names(model)
    for optimizer in optimizers:
        for parameter, entries in optimizer.state.items():
            for key, value in entries.items() if isinstance(entries, dict) else ():
                for tensor in _torch.tensors_in(value):
                    yield f"{name_of.get(id(parameter), '?')}.{key}", tensor


def _mark_activations(trace: Trace) -> None:
    """Set the kind of memory made in forward and freed in backward, unless it is known to be of another one."""
    for each in ledger.lifetimes(trace):
        made = each.allocation
        if made.kind == "temporary" and each.made >= 0 and each.freed < len(trace.events):
            phases = made.place.phase, trace.events[each.freed].place.phase
            made.kind = "activations" if phases == ("forward", "backward") else "temporary"


def _as_planned(trace: Trace, job: Job, plan: Plan, members: Mapping[str, Sequence[str]]) -> Trace:
    """Apply offloading and compilation, which no run on fake CPU tensors shows; drop ``reads`` and ``writes``."""
    if plan.offload == "cpu" and not job.on_cpu:
        trace = offloaded(trace, {name for names in members.values() for name in names})
    if plan.compile:
        from trueshard.planner.simulation.compiling import compiled  # with networkx, a tenth of a second

        trace = compiled(trace, plan)
    for event in trace.events:
        if isinstance(event, Kernel):
            event.reads = event.writes = ()
    return trace


# The environment of a simulation. torch chooses the kernel of attention by fake CPU tensors, and the fused one of a CPU
# accepts neither dropout nor values of another width than queries, nor a trained mask: the scores would lie in memory,
# as they never do on an accelerator.

_ALIGNED = 16
"""A mask's rows are a multiple of so many elements. Source: ``pad_bias`` of ATen/native/transformers/attention.cpp."""
_WIDEST = 256
"""Largest head of flash attention. Source: ``check_head_dim_size_flash`` of cuda/sdp_utils.cpp."""


def attention_as_on_a_device() -> AbstractContextManager[Any]:
    """Let ``scaled_dot_product_attention`` use CUDA's fused kernels on fake tensors for which the CPU has none."""
    original = functional.scaled_dot_product_attention

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        trained = attn_mask is not None and attn_mask.requires_grad
        fused = dropout_p == 0 and query.shape[-1] == value.shape[-1] and not trained
        if fused or query.dim() != 4 or query.dtype == torch.float64:
            return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if attn_mask is None and query.dtype != torch.float32 and query.shape[-1] == value.shape[-1] <= _WIDEST:
            return torch.ops.aten._scaled_dot_product_flash_attention(  # accepts fewer key heads than query heads
                query, key, value, dropout_p, is_causal, False, scale=scale
            )[0]
        if (groups := query.shape[-3] // key.shape[-3]) > 1:
            key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        needs_grad = any(each is not None and each.requires_grad for each in (query, key, value, bias))
        return torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, needs_grad, dropout_p, is_causal, scale=scale
        )[0]

    return mock.patch.object(functional, "scaled_dot_product_attention", attention)


def _bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return a mask as numbers to add, with aligned rows, expanded to (batch, heads, queries, keys)."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -torch.inf)
    if (missing := -mask.shape[-1] % _ALIGNED) and mask.shape[-1] == key.shape[-2]:
        mask = functional.pad(mask, (0, missing))[..., : key.shape[-2]]
    return mask.expand(*query.shape[:-1], key.shape[-2])


@contextlib.contextmanager
def fake_tensors_look_real() -> Iterator[None]:
    """Let transformers take fake tensors for real ones, and let numpy and strings have their values.

    transformers materialises attention masks while it is traced; in training it reads their values, and leaves them out
    where attention is causal and nothing is padded. Labels for a profiler, several at each unit, are left out.
    """
    imported = sys.modules.get("transformers.utils.import_utils")
    patches: list[tuple[Any, str, Any]] = [
        (torch.Tensor, "numpy", values_as_array),
        (torch.Tensor, "__format__", value_as_text),
        (torch, "tensor", tensor_of_values),
        (torch.profiler.record_function, "__enter__", lambda label: label),
        (torch.profiler.record_function, "__exit__", lambda label, *error: None),
    ]
    if hasattr(imported, "is_fake_tensor"):
        patches.append((imported, "is_fake_tensor", lambda tensor: False))
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(mock.patch.object(*patch))
        yield


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Collect garbage now and not inside, where it would free cycles at arbitrary times."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
