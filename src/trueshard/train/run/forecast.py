"""Forecast the memory and speed of a run with the planner, phase by phase, and print it with the configuration.

- The model, its frozen parts and adapters, the optimizer and the loss are those of the run; only the data are made up.
- The device is the one at hand, or any of the planner's catalogue. On a CPU, the memory is what a process may have.
- What the planner cannot simulate is said in one line (`Unplanned`); no training ends because of it.

Phases of a training run: step, evaluation, saving, verifying. A save copies what the rank writes to host memory, tensor
by tensor, and writes from there while training goes on; a device gives no memory for that, on a CPU the copies lie
beside the next steps. Those of reinforcement learning stand in ``train/rl/forecast.py``.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trueshard.checkpoint.snapshot_parts import SLOTS
from trueshard.errors import UserError, one_line, refused
from trueshard.files import replace_text
from trueshard.machine import memory_of_process
from trueshard.planner import hardware as catalogue
from trueshard.planner import ledger, process
from trueshard.planner.choose_plan import BF16, LENGTH
from trueshard.planner.hardware import Hardware
from trueshard.planner.inputs import workloads
from trueshard.planner.inputs.batches import hub_feed, model_loss
from trueshard.planner.inputs.factories import Configuration
from trueshard.planner.planning import Request
from trueshard.planner.report import summary
from trueshard.planner.timeline import schedule
from trueshard.planner.workload import StepPhase, Study
from trueshard.plans import Plan, dtype_name
from trueshard.text import size
from trueshard.train.config import Config
from trueshard.train.data.batches import Batch
from trueshard.train.data.formats import FORMATS
from trueshard.train.losses import loss_of
from trueshard.train.models import kernels, vocabulary
from trueshard.train.models.adapters import add_adapter
from trueshard.train.models.build import checked, empty, quantise, quiet_transformers
from trueshard.train.models.config import AdapterSection
from trueshard.train.optimizer import build_optimizer
from trueshard.train.parse import to_toml
from trueshard.train.rl import forecast as rl_forecast
from trueshard.train.run import resuming
from trueshard.train.run.checks import check_settings, count_samples, process_count, steps_of_epochs

SERVER_PAYS = 0.6
"""Part of a step from which on generating is worth a server of its own."""


class Unplanned(str):
    """The reason for which the planner cannot simulate the run, in one line."""


def study(
    config: Config,
    settings: Any,
    ranks: int,
    device: Hardware | torch.device,
    ranks_per_node: int,
    *,
    in_place: bool = False,
    workers: int | None = 0,
    made: nn.Module | None = None,
) -> Study | Unplanned:
    """Return the planner's study of a step of the run; ``in_place``: in this process, which does nothing else.

    ``workers``: as of ``choose_plan.solve``, in place; ``made``: the run's model as ``empty`` makes it, to be used up.
    ``device``: an entry of the planner's catalogue, or a device of this machine. `Unplanned` if the planner does not
    know it or cannot simulate the step, or nothing fits where a choice was left to it.
    """

    ready = [] if made is None else [made]

    def model() -> nn.Module:
        return ready.pop() if ready else empty(config, settings)

    def mean_loss(model: nn.Module, batch: Any) -> torch.Tensor:  # for preferences it stands for that of pairs
        return loss_sum(model, batch) / batch["targets"].numel()

    train, rl, batch = config.train, config.rl, _batch_function(config)
    loss_sum = loss_of(train)
    model.__name__ = getattr(settings, "model_type", "") or "model"  # for the tables of the study
    loss: Callable[[nn.Module, Any], torch.Tensor] | None
    score: Callable[[nn.Module, Any], Any] | None
    if rl is not None:
        loss, score = rl_forecast.policy_functions(config)
    else:
        loss = None if batch is None else mean_loss
        score = None if config.evaluation is None else evaluation_pass(loss or model_loss)
    try:
        hardware = device if isinstance(device, Hardware) else catalogue.hardware_here(device)
        if isinstance(device, torch.device) and device.type == "cpu":  # the catalogue cannot know what a rank may have
            hardware = dataclasses.replace(hardware, memory_bytes=memory_of_process(ranks_per_node))
        rests_on_gpu = hardware.name != "cpu" and config.shard.options().offload != "cpu"
        copy = rl_forecast.rollout_copy(config, settings, hardware, ranks)
        readers = config.shard.readers(ranks)  # ranks that share matrices or sequences have the same samples
        request = Request(
            model=model,
            hardware=hardware,
            ranks=ranks,
            batch=batch,
            ranks_per_node=min(ranks_per_node, ranks),
            replicate=config.shard.replicate,
            sequence=train.sequence_length,
            microbatch=train.microbatch or -(-train.batch_size // train.accumulate // readers) or 1,
            accumulation=train.accumulation(readers),
            optimizer=lambda model: build_optimizer(config.optimizer, model.named_parameters(), on_gpu=rests_on_gpu),
            loss=loss,
            score=score,
            beside=(*rl_forecast.beside(config, settings, copy), *_average(config, settings, ranks)),
            clip=train.max_grad_norm,
            snapshots=(SLOTS * (1 + train.memory_copies) if train.memory_every else 0, train.memory_every),
            **vars(config.shard.options()),
        )
        solving = "imbalance:solve_with_imbalances" if in_place else "choose_plan:solve"
        result: Study = process.call(f"trueshard.planner.{solving}", request, in_place=in_place, workers=workers)
        if rl is None:
            phases = (*_training_phases(config, result, hardware), *_verifying(config, settings, result, hardware))
        else:
            generation = None
            if copy is not None:
                generation = process.call(
                    f"{rl_forecast.__name__}:simulate_generation", config, settings, in_place=in_place
                )
            stays, cost = _resident_bytes(result), _score_cost(result, hardware)
            phases = rl_forecast.phases(config, result, stays, cost, copy, generation, hardware)
    except Exception as error:  # whatever a model or an optimizer raises under simulation
        return Unplanned(one_line(error))
    assumptions = (*result.assumptions, *kernels.assumptions(config.model))
    if rl is not None:
        tokens = config.rollout.tokens
        # Preflight's is of the trainer's loss, which a policy does not have.
        assumptions = (
            *(assumption for assumption in assumptions if not assumption.startswith("loss: ")),
            f"Answers have rollout.tokens = {tokens:,} tokens, and their prompts what these leave of "
            f"train.sequence_length: {train.sequence_length - tokens:,}.",
        )
    return dataclasses.replace(
        result,
        phases=phases,
        assumptions=assumptions,
        reasons=(_advice(phases, result.forecast.budget_bytes), *result.reasons),
        forecast=dataclasses.replace(result.forecast, optimizer=re.split("[.:]", config.optimizer.class_path)[-1]),
    )


def _average(config: Config, settings: Any, ranks: int) -> tuple[tuple[str, int], ...]:
    """Return the bytes of [average] on a rank, for `Request`: trained parameters in float32."""
    if config.average is None:
        return ()
    count = sum(parameter.numel() for parameter in empty(config, settings).parameters() if parameter.requires_grad)
    return (("average", 4 * count * config.shard.replicate // ranks),)


def _batch_function(config: Config) -> Callable[[int, int], Batch] | None:
    """Return what makes batches like the data's, of full length; None for images, which the planner makes itself."""
    data = config.data
    if config.images:
        return None
    if config.rl is not None:
        return lambda microbatch, sequence: rl_forecast.policy_batch(config, microbatch, sequence - 1)
    rows, layout = FORMATS[data.format].rows, FORMATS[data.format].layout_of(data)

    def batch(microbatch: int, sequence: int) -> Batch:
        ids = torch.zeros(rows * microbatch, sequence, dtype=torch.int64)
        result = {"input_ids": ids, "targets": ids.clone()}
        if layout == "packed":
            result["position_ids"] = torch.arange(sequence).expand(rows * microbatch, sequence).contiguous()
        elif layout == "single":
            result["attention_mask"] = torch.ones_like(ids)
        return result

    return batch


def _advice(phases: tuple[StepPhase, ...], budget: int) -> str:
    """Return a sentence about the largest phase, and one if a server that generates would pay."""
    largest = max(phases, key=lambda phase: phase.live_bytes)
    advice = f"Of the phases, {largest.name} needs the most memory: {size(largest.live_bytes)}."
    if largest.live_bytes > budget:
        advice += f" It does not fit into {size(budget)}."
    total, first = sum(phase.seconds or 0.0 for phase in phases), phases[0]
    if first.name == "generate" and total and (share := (first.seconds or 0.0) / total) > SERVER_PAYS:
        advice += f" Generating takes {share:.0%} of a step: a vLLM server pays (rollout.engine)."
    return advice


def _resident_bytes(study: Study) -> int:
    """Return the bytes that stay on a rank from phase to phase."""
    return sum(allocation.bytes for allocation in study.trace.resident)


def _score_cost(study: Study, hardware: Hardware) -> tuple[int, float]:
    """Return (peak bytes, seconds) of one pass of the score."""
    assert study.score is not None
    line = schedule(study.score, hardware, study.forecast.ranks_per_node, "compile" if study.plan.compile else "eager")
    return ledger.peak(study.score).bytes, line.seconds


# Training: step, evaluation, saving


def evaluation_pass(loss: Callable[[nn.Module, Any], torch.Tensor]) -> Callable[[nn.Module, Any], Any]:
    """Return the pass of ``Trainer.evaluate`` over a microbatch, for ``Request.score``."""

    def score(model: nn.Module, batch: Any) -> Any:
        model.eval()
        result = loss(model, batch)
        model.train()
        return result

    return score


def _training_phases(config: Config, study: Study, hardware: Hardware) -> tuple[StepPhase, ...]:
    """Return the step, the evaluation if there is one, and a save."""
    forecast, stays = study.forecast, _resident_bytes(study)
    step = forecast.peak_live_bytes - stays
    phases = [StepPhase("step", forecast.peak_live_bytes, forecast.step_seconds, {"step": step})]
    if study.score is not None:
        assert config.evaluation is not None
        every, samples = config.evaluation.every, config.evaluation.samples
        live, seconds = _score_cost(study, hardware)
        count, note = 1, "a microbatch; there are as many as the data give"
        if samples is not None:
            count = math.ceil(samples / (config.shard.readers(forecast.ranks) * forecast.microbatch))
            note = f"{count:,} × {forecast.microbatch}"
        notes: tuple[str, ...] = (note, f"every {every:,} steps")
        phases.append(StepPhase("evaluation", live, count * seconds, {"pass": live - stays}, notes, every))
    # The bytes that the rank copies: its shards, and its optimizer's; replicas share them out.
    kept = [one for one in study.trace.resident if one.kind in ("parameters", "optimizer")]
    kept = [one for one in kept if one.storage >= 0 or one.unit == "average"]
    copies = sum(allocation.bytes for allocation in kept) // (study.plan.ranks[0] if len(study.plan.ranks) == 2 else 1)
    every = config.train.checkpoint_every
    notes = (f"every {every:,} steps", "written while training goes on")
    if hardware.streams:
        live, seconds, needs = stays, copies / hardware.host_bandwidth, {}
        notes = (f"{size(copies)} copied to the host", *notes)
    else:
        live, seconds = stays + copies + step, 2 * copies / hardware.host_memory_bandwidth
        needs = {"copies": copies, "step": step}
    phases.append(StepPhase("saving", live, seconds, needs, notes, every))
    if config.train.memory_every is not None:
        held = SLOTS * (1 + config.train.memory_copies) * study.trace.snapshot_bytes
        notes = (f"{size(held)} of host memory a rank, for as long as the run lasts",)
        notes += (f"restarts {config.run.restarts}, spares {config.run.spares}",)
        # On a CPU that is the memory in which the ranks are, too.
        live, needs = (stays, {}) if hardware.streams else (stays + held + step, {"snapshots": held, "step": step})
        phases.append(StepPhase("snapshot", live, seconds, needs, notes, config.train.memory_every))
    return tuple(phases)


def _verifying(config: Config, settings: Any, study: Study, hardware: Hardware) -> list[StepPhase]:
    """Return `train.verify_every` on rank 0: a sharded pass, and two of a whole copy, which rests on the host."""
    if (every := config.train.verify_every) is None:
        return []
    model, forecast = empty(config, settings), study.forecast
    host = sum(p.numel() * p.itemsize * (1 + 2 * p.requires_grad) for p in model.parameters())
    seconds = (1 + 2 * forecast.ranks / config.shard.readers(forecast.ranks)) * forecast.step_seconds
    seconds = seconds / forecast.accumulation + 2 * host / hardware.host_bandwidth * hardware.streams
    needs = {"step": forecast.peak_live_bytes - _resident_bytes(study)} | ({} if hardware.streams else {"copy": host})
    notes = (f"every {every:,} steps", f"{size(host)} of rank 0's main memory for an unsharded copy and its gradients")
    live = _resident_bytes(study) + sum(needs.values())
    return [StepPhase("verifying", live, seconds, needs, notes, every)]


# What becomes of a forecast


def bytes_of(result: Study | Unplanned) -> int | None:
    """Return the peak memory of a rank: what torch reserves; on a CPU, which has no such cache, tensors alone.

    At least what tensors take in any phase; the copies of a save, which lie on the host, are left out.
    """
    if isinstance(result, Unplanned):
        return None
    forecast = result.forecast
    peak = forecast.peak_live_bytes if forecast.hardware == "cpu" else forecast.peak_reserved_bytes
    return max([peak, *(phase.live_bytes for phase in result.phases if phase.name != "saving")])


def write(folder: Path, result: Study | Unplanned | Plan) -> None:
    """Write `plan.json` in the run's folder: a study, a plan alone, or why there is no forecast. For one rank."""
    if isinstance(result, Study):
        record = summary.as_json(result)
    else:
        record = {"plan": dataclasses.asdict(result)} if isinstance(result, Plan) else {"unplanned": result}
    replace_text(folder / "plan.json", json.dumps(record, indent=1))


def dry_run(config: Config, nproc: int | None = None, *, hardware: str | None = None) -> str:
    """Return the resolved configuration as TOML, and its forecast as comments. Nothing is written.

    The data are read, and what is wrong with them raises `UserError`, as wrong settings do.
    With ``hardware``, a device of the planner's catalogue or a TOML file of that form, ``nproc`` may be any number.
    """
    ranks = process_count(nproc, 1) if hardware is None or nproc is None else nproc
    with refused():
        named = None if hardware is None else catalogue.hardware(hardware)
    config = resuming.resolved(config, ranks)
    settings, samples = check_settings(config, ranks), count_samples(config)
    here = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    node = ranks if named is None else min(ranks, named.ranks_per_node)
    result = study(config, settings, ranks, named or here, node, in_place=True)
    text = f"No forecast of memory and speed: {result}" if isinstance(result, Unplanned) else summary.text(result)
    if samples is not None:
        steps = config.train.steps or steps_of_epochs(config, samples)
        epochs, length = steps * config.train.batch_size / samples, config.train.sequence_length
        text = f"{samples:,} samples of {length} tokens; {steps:,} steps are {epochs:.3g} epochs\n{text}"
    comments = "\n".join(f"# {line}".rstrip() for line in text.splitlines())
    return f"{to_toml(config)}\n{comments}"


def with_adapter(request: Request, rank: int, quantize: Any) -> Request:
    """Return a request for the same model, frozen, with a LoRA adapter of float32 on all linear layers.

    The model is stored in bfloat16, or as the request says, and quantised as by ``model.quantize``. Raises ValueError
    where a function makes it.
    """
    source = workloads.source_of(request.model)
    if not isinstance(source, Configuration):
        raise ValueError(f"lora: {request.model} makes its model itself; let it add the adapter, and leave out lora")
    stored = dtype_name("storage_dtype", request.storage_dtype or "bfloat16")
    dtype = getattr(torch, stored)
    adapter = AdapterSection(rank=rank)

    def model() -> nn.Module:
        with torch.device("meta"):
            base = source.cls._from_config(source.settings, dtype=dtype)
            if quantize != "none":
                quantise(base, quantize, adapter)
            return add_adapter(base, adapter, None)

    model.__name__ = f"{source.name} with an adapter of rank {rank}"
    feed = hub_feed(source.cls, source.settings, request.sequence)  # else the model is built to see what it is fed with
    what = "Parameters" if quantize == "none" else f"Linear layers are stored in {quantize}, other parameters"
    assumed = (
        *([BF16] if request.mixed_precision == "auto" else []),
        *([LENGTH.format(feed.sequence)] if request.sequence is None else []),
        *source.assumptions,
        *([f"{what} are stored in {stored} (--storage-dtype)."] if request.storage_dtype is None else []),
        "The adapter is in float32, on all linear layers.",
        *feed.assumptions,
    )
    setattr(model, workloads.ASSUMED, assumed)
    return dataclasses.replace(
        request,
        model=model,
        batch=feed.batch if request.batch is None else request.batch,
        sequence=feed.sequence,
        storage_dtype=None,
        mixed_precision="bf16" if request.mixed_precision == "auto" else request.mixed_precision,
    )


def plan(config: Config, hardware: str, ranks: int, ranks_per_node: int | None = None) -> Study:
    """Return the forecast of a configuration on a device of the catalogue; of the model only its configuration is read.

    Raises `UserError` for settings that do not go together, and for what the planner cannot simulate.
    """
    with refused():
        named = catalogue.hardware(hardware)
    quiet_transformers()
    config = resuming.located(config)
    section = config.model
    if section.path is not None:  # of which the planner needs neither weights nor tokenizer
        bare = section.model_copy(update={"path": None, "config": str(section.place()), "revision": None})
        config = config.model_copy(update={"model": bare})
    has_files = section.path is not None or section.config is not None
    made: nn.Module | None = None
    if has_files:
        settings, made = checked(config, config.tokenizer.vocab_size or 0)
    else:
        settings = check_settings(config, ranks)
    if has_files and config.tokenizer.add_tokens:  # at most: which are new, the tokenizer knows
        rows = settings.get_text_config().vocab_size + len(config.tokenizer.add_tokens)
        settings, made = vocabulary.with_rows(settings, rows), None
    node = min(ranks, ranks_per_node or named.ranks_per_node)
    result = study(config, settings, ranks, named, node, in_place=True, workers=None, made=made)
    if isinstance(result, Unplanned):
        name = config.model.config or section.architecture or section.build
        raise UserError(f"{name}: the planner cannot simulate it: {result}")
    return result
