"""Forecast the memory and speed of a run with the planner, phase by phase, and print it with the configuration.

- The model, its frozen parts and adapters, the optimizer and the loss are those of the run; only the data are made up.
- The device is the one at hand, or any of the planner's catalogue. On a CPU, the memory is what a process may have.
- What the planner cannot simulate is said in one line (`Unplanned`); no training ends because of it.

Phases of a training run: step, evaluation, saving. A save copies what the rank writes to host memory, tensor by tensor,
and writes from there while training goes on; a device gives no memory for that, on a CPU the copies lie beside the next
steps. Phases of reinforcement learning: generate, score, update. The update is the planner's step, of the loss that
trains; the score is the same pass without gradient. To generate, a whole model in the compute dtype is simulated: the
prompts, and the last of the tokens, whose cache is the longest. What a vLLM server takes is not known here.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trueshard import _torch
from trueshard.errors import UserError, one_line, refused
from trueshard.files import replace_text
from trueshard.machine import memory_of_process
from trueshard.model import names
from trueshard.planner import hardware as catalogue
from trueshard.planner import ledger, process
from trueshard.planner.hardware import Hardware
from trueshard.planner.inputs.batches import model_loss, quietly
from trueshard.planner.inputs.factories import from_callable
from trueshard.planner.planning import Request
from trueshard.planner.report import summary
from trueshard.planner.simulation.environment import attention_as_on_a_device, fake_tensors_look_real
from trueshard.planner.simulation.fake_values import KnownValues
from trueshard.planner.simulation.recorder import Recorder
from trueshard.planner.timeline import communication_seconds, schedule
from trueshard.planner.trace import Communication, Trace
from trueshard.planner.workload import StepPhase, Study
from trueshard.plans import MixedPrecision, Plan, precision_of
from trueshard.text import size
from trueshard.train.config import Config
from trueshard.train.data.batches import IGNORED, Batch
from trueshard.train.data.formats import FORMATS
from trueshard.train.losses import CausalLoss
from trueshard.train.models.build import architecture, empty, quiet_transformers
from trueshard.train.optimizer import build_optimizer
from trueshard.train.parse import to_toml
from trueshard.train.rl.engine import ROOM, drawn
from trueshard.train.rl.policy import PolicyLoss, policy_loss
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
) -> Study | Unplanned:
    """Return the planner's study of a step of the run; ``in_place``: in this process, which does nothing else.

    ``device``: an entry of the planner's catalogue, or a device of this machine. `Unplanned` if the planner does not
    know it or cannot simulate the step, or nothing fits where a choice was left to it.
    """

    def model() -> nn.Module:
        return empty(config, settings)

    def mean_loss(model: nn.Module, batch: Any) -> torch.Tensor:  # for preferences it stands for that of pairs
        return loss_sum(model, batch) / batch["targets"].numel()

    train, rl, batch = config.train, config.rl, _batch_function(config)
    loss_sum = CausalLoss(train.whole_logits)
    model.__name__ = getattr(settings, "model_type", "model")  # for the tables of the study
    loss: Callable[[nn.Module, Any], torch.Tensor] | None
    score: Callable[[nn.Module, Any], Any] | None
    if rl is not None:
        loss, score = policy_functions(config)
    else:
        loss = None if batch is None else mean_loss
        score = None if config.evaluation is None else evaluation_pass(loss or model_loss)
    try:
        hardware = device if isinstance(device, Hardware) else catalogue.hardware_here(device)
        if isinstance(device, torch.device) and device.type == "cpu":  # the catalogue cannot know what a rank may have
            hardware = dataclasses.replace(hardware, memory_bytes=memory_of_process(ranks_per_node))
        copy = rollout_copy(config, settings, hardware, ranks)
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
            optimizer=lambda model: build_optimizer(config.optimizer, model.named_parameters()),
            loss=loss,
            score=score,
            beside=_beside(config, settings, copy),
            clip=train.max_grad_norm,
            **vars(config.shard.options()),
        )
        result: Study = process.call("trueshard.planner.choose_plan:solve", request, in_place=in_place)
        if rl is None:
            phases = _training_phases(config, result, hardware)
        else:
            generation = None
            if copy is not None:
                generation = process.call(f"{__name__}:simulate_generation", config, settings, in_place=in_place)
            phases = _rl_phases(config, result, copy, generation, hardware)
    except Exception as error:  # whatever a model or an optimizer raises under simulation
        return Unplanned(one_line(error))
    assumptions = result.assumptions
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
        forecast=dataclasses.replace(result.forecast, optimizer=config.optimizer.class_path.rpartition(".")[2]),
    )


def _batch_function(config: Config) -> Callable[[int, int], Batch] | None:
    """Return what makes batches like the data's, of full length; None for images, which the planner makes itself."""
    data = config.data
    if config.images:
        return None
    if config.rl is not None:
        return lambda microbatch, sequence: policy_batch(config, microbatch, sequence - 1)
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
    kept = (one for one in study.trace.resident if one.kind in ("parameters", "optimizer") and one.storage >= 0)
    copies = sum(allocation.bytes for allocation in kept) // (study.plan.ranks[0] if len(study.plan.ranks) == 2 else 1)
    every = config.train.checkpoint_every
    notes = (f"every {every:,} steps", "written while training goes on")
    if hardware.streams:
        live, seconds, needs = stays, copies / hardware.host_bandwidth, {}
        notes = (f"{size(copies)} copied to the host", *notes)
    else:
        live, seconds = stays + copies + step, 2 * copies / hardware.host_memory_bandwidth
        needs = {"copies": copies, "step": step}
    return (*phases, StepPhase("saving", live, seconds, needs, notes, every))


# Reinforcement learning: the update and the score


def _passes_without_gradient(config: Config) -> tuple[bool, bool]:
    """Return whether a pass of its own computes log-probabilities (before the update, of the reference)."""
    rl = config.rl
    assert rl is not None
    return rl.updates > 1 or config.rollout.ahead > 0 or (rl.kl > 0 and rl.kl_place == "reward"), rl.kl > 0


def policy_batch(config: Config, rows: int, length: int) -> Batch:
    """Return a batch of `PolicyLoss`, [rows, length]: prompts and answers of full length without their last token.

    All rows but one are padded by a token, as answers of different lengths are.
    """
    answer = min(config.rollout.tokens, length)
    places = torch.arange(length - answer, length).expand(rows, answer)
    ids = torch.ones(rows, length, dtype=torch.int64)
    ids[-1:, -1] = 0 if rows > 1 else 1
    old, reference = _passes_without_gradient(config)
    keys = ["engine_logprobs", *["old_logprobs"] * old, *["reference_logprobs"] * reference]
    return {
        "input_ids": ids,
        "attention_mask": ids.ne(0).to(torch.int64),
        "targets": torch.full((rows, length), IGNORED).scatter(1, places, 0),
        "advantages": torch.zeros(rows),
        **{key: torch.zeros(rows, length) for key in keys},
    }


def policy_functions(
    config: Config,
) -> tuple[Callable[[nn.Module, Batch], torch.Tensor], Callable[[nn.Module, Batch], Any]]:
    """Return the loss of a microbatch, a mean, and its score, for `Workload`. They can be pickled."""
    made: list[tuple[Any, PolicyLoss]] = []  # of the last model: it finds out how its head is reached, and adds up

    def policy(model: nn.Module) -> PolicyLoss:
        if not made or made[0][0]() is not model:
            assert config.rl is not None
            made[:] = [(weakref.ref(model), policy_loss(config.rl, config.rollout, config.train.whole_logits))]
        made[0][1].forget()  # on the CPU, which is not the rank's memory
        return made[0][1]

    def completed(batch: Batch) -> Batch:
        """Complete a batch with images, which the planner makes from the model."""
        if "targets" in batch:
            return batch
        plain = {key: value for key, value in batch.items() if key != "labels"}
        rows, length = batch["input_ids"].shape
        return {**policy_batch(config, rows, length), **plain}

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return policy(model)(model, completed(batch)) / batch["input_ids"].numel()

    def score(model: nn.Module, batch: Batch) -> Any:
        return policy(model).logprobs(model, completed(batch))

    return loss, score


# Reinforcement learning: what stays beside the model


def _compute_dtype(config: Config) -> torch.dtype | None:
    """Return the dtype of mixed precision; None without."""
    precision = precision_of(config.shard.options().mixed_precision)
    return None if precision is None or precision.compute is None else getattr(torch, precision.compute)


def copy_bytes(config: Config, settings: Any) -> int:
    """Return the bytes of a gathered copy: parameters in the compute dtype, and buffers."""
    model, compute = empty(config, settings), _compute_dtype(config)
    parameters = sum(
        parameter.numel() * (compute if compute and parameter.is_floating_point() else parameter.dtype).itemsize
        for parameter in model.parameters()
    )
    return parameters + sum(buffer.nbytes for buffer in model.buffers())


def _has_reference(config: Config) -> bool:
    """Return True if a second model is kept."""
    return config.rl is not None and config.rl.kl > 0 and config.adapter is None


def rollout_copy(config: Config, settings: Any, device: Hardware, ranks: int) -> str | None:
    """Return `rollout.copy`; of "auto" what `engine.copy_fits` will find, before there is optimizer state.

    None if nothing is generated on the ranks.
    """
    if config.rl is None or config.rollout.on_server:
        return None
    if config.rollout.copy_ != "auto":
        return config.rollout.copy_
    models = 0 if config.shard.options().offload == "cpu" else 1 + _has_reference(config)
    bytes_of_model = sum(parameter.nbytes for parameter in empty(config, settings).parameters())
    free = device.memory_bytes - device.context_bytes - models * bytes_of_model * config.shard.replicate // ranks
    return "gathered" if ROOM * free > copy_bytes(config, settings) else "kept"


def _beside(config: Config, settings: Any, copy: str | None) -> tuple[tuple[str, int | None], ...]:
    """Return what stays on each rank beside model and optimizer, for `Request`."""
    reference = (("reference", None),) if _has_reference(config) else ()
    return (*reference, *((("rollout copy", copy_bytes(config, settings)),) if copy == "gathered" else ()))


# Reinforcement learning: generating


@dataclass(frozen=True)
class Generation:
    """Generating a piece of answers on a whole model, without that model's own memory."""

    prompts: Trace
    """The pass over the prompts, with the first token drawn."""
    token: Trace
    """The pass that makes the last token; empty if the first is the last."""
    cache_bytes: int
    """Bytes of the cache, at its longest."""

    @property
    def peak_bytes(self) -> int:
        """Peak of both passes, the cache included."""
        return max(_peak_beyond(self.prompts), _peak_beyond(self.token))


@quietly()
def simulate_generation(config: Config, settings: Any) -> Generation:
    """Simulate a piece of `rollout.batch` answers: all tokens of the last one. For the planner's process.

    Answers have all their tokens; prompts have what these leave of ``train.sequence_length``.
    """
    rows, tokens, compute = _piece_rows(config), config.rollout.tokens, _compute_dtype(config)
    prompt = config.train.sequence_length - tokens
    with _torch.fake_tensors(), torch.no_grad(), attention_as_on_a_device(), fake_tensors_look_real():
        model = from_callable(lambda: empty(config, settings)).build().model.eval()
        for parameter in model.parameters():
            if compute is not None and parameter.is_floating_point():
                parameter.data = parameter.data.to(compute)
        prompts, cache = _recorded(model, config, rows, prompt, None)
        token = Trace()
        if tokens > 1:
            with KnownValues():
                cache = _run(model, config, rows, prompt + tokens - 2, None)
            token, cache = _recorded(model, config, rows, 1, cache)
        return Generation(prompts, token, bytes_of_cache(cache))


def _piece_rows(config: Config) -> int:
    """Return the answers that a rank generates together."""
    return min(config.rollout.batch, _answers(config))


def _answers(config: Config) -> int:
    """Return the answers of a rollout."""
    assert config.rl is not None
    count = config.train.batch_size * config.rl.updates
    return count + count // config.rl.samples * (config.rl.advantage == "greedy")


def _recorded(model: nn.Module, config: Config, rows: int, length: int, cache: Any) -> tuple[Trace, Any]:
    recorder = Recorder()
    recorder.adopt([*model.named_parameters(), *model.named_buffers()], "parameters", "")
    recorder.adopt((("cache", tensor) for tensor in _tensors_of(cache)), "activations", "cache")
    resident = recorder.alive()
    with recorder:
        cache = _run(model, config, rows, length, cache)
    return Trace(recorder.take(), resident), cache


def _run(model: nn.Module, config: Config, rows: int, length: int, cache: Any) -> Any:
    """Run one pass of generation and draw a token for each row, as `engine.Draw` does; return the cache."""
    root: Any = names.unwrap(model)
    base = root.get_base_model() if hasattr(root, "peft_config") else root
    full_length = length if cache is None else config.train.sequence_length - 1
    mask = torch.ones(rows, full_length, dtype=torch.int64)
    mask[:1, 0] = 0 if rows > 1 else 1
    inputs: dict[str, Any] = {"attention_mask": mask, "use_cache": True}
    if cache is not None:
        inputs["past_key_values"] = cache
    if "logits_to_keep" in inspect.signature(base.forward).parameters:
        inputs["logits_to_keep"] = 1
    output = root(input_ids=torch.ones(rows, length, dtype=torch.int64), **inputs)
    scores = output.logits[:, -1].to(copy=True, dtype=torch.float32)
    drawn((scores / config.rollout.temperature).log_softmax(1), torch.zeros(rows, dtype=torch.float64))
    return output.past_key_values


def _peak_beyond(trace: Trace) -> int:
    """Return the peak of a pass beyond what was there before it, without the cache, which grows in it."""
    before = sum(allocation.bytes for allocation in trace.resident if allocation.unit != "cache")
    return ledger.peak(trace).bytes - before


def _tensors_of(cache: Any) -> list[torch.Tensor]:
    """Return the tensors of a cache of transformers: of its layers, or its own."""
    if cache is None:
        return []
    tensors = _torch.tensors_in([vars(layer) for layer in getattr(cache, "layers", [])] or vars(cache))
    return [tensor for tensor in tensors if tensor.ndim > 1]


def bytes_of_cache(cache: Any) -> int:
    """Return the bytes of keys and values in a cache of transformers."""
    return sum(tensor.nbytes for tensor in _tensors_of(cache))


def _rl_phases(
    config: Config,
    study: Study,  # of an update
    copy: str | None,  # what is generated on: "gathered", "kept" or "sharded"
    generation: Generation | None,  # None: answers come from a server
    hardware: Hardware,
) -> tuple[StepPhase, ...]:
    """Return the phases of a step, or of a rollout and its `rl.updates`."""
    assert config.rl is not None
    forecast, updates, stays = study.forecast, config.rl.updates, _resident_bytes(study)
    passes = sum(_passes_without_gradient(config))
    live, seconds = _score_cost(study, hardware)
    score = live - stays if passes else 0
    score_seconds = passes * config.train.accumulation(forecast.ranks) * updates * seconds
    needs, notes = ({"pass": score}, ()) if passes else ({}, ("nothing to compare with",))
    step = {"step": forecast.peak_live_bytes - stays}
    return (
        _generate_phase(config, study, copy, generation, hardware),
        StepPhase("score", stays + score, score_seconds, needs, notes),
        StepPhase("update", forecast.peak_live_bytes, updates * forecast.step_seconds, step),
    )


def _generate_phase(
    config: Config, study: Study, copy: str | None, generation: Generation | None, hardware: Hardware
) -> StepPhase:
    assert study.score is not None
    stays, units, node = _resident_bytes(study), _gathered_bytes(study.plan), study.forecast.ranks_per_node
    unit = max(units)
    if generation is None:
        return StepPhase("generate", stays + unit, None, {"a unit of weights to send": unit}, ("on the server",))
    gathers = [event for event in study.score.events if isinstance(event, Communication) and event.op == "all_gather"]
    sync = sum(communication_seconds(gather, hardware, node) for gather in gathers)
    prompts, token = (schedule(trace, hardware, node).seconds for trace in (generation.prompts, generation.token))
    if copy == "sharded":
        prompts, token, sync = max(prompts, sync), max(token, sync), 0.0
    rows = _piece_rows(config)
    pieces = math.ceil(math.ceil(_answers(config) / rows) / study.forecast.ranks)
    weights = {"gathered": 0, "kept": sum(units), "sharded": 2 * unit}[copy or "gathered"]
    needs = {
        "weights": weights,
        "cache": generation.cache_bytes,
        "pass": generation.peak_bytes - generation.cache_bytes,
    }
    return StepPhase(
        "generate",
        stays + max(weights + generation.peak_bytes, unit),  # the copy takes over new weights unit by unit
        sync + pieces * (prompts + (config.rollout.tokens - 1) * token),
        {key: value for key, value in needs.items() if value},
        (f"{pieces} × {rows} answers a rank", f"copy {copy}"),
    )


def _gathered_bytes(plan: Plan) -> list[int]:
    """Return the bytes of each unit when it is gathered."""
    compute = (plan.mixed_precision or MixedPrecision()).compute
    widths: list[int] = [getattr(torch, compute or unit.dtype.partition("+")[0]).itemsize for unit in plan.units]
    return [unit.parameters * width for unit, width in zip(plan.units, widths, strict=True)]


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


def plan(config: Config, hardware: str, ranks: int, ranks_per_node: int | None = None) -> Study:
    """Return the forecast of a configuration on a device of the catalogue; of the model only its configuration is read.

    Raises `UserError` for settings that do not go together, and for what the planner cannot simulate.
    """
    with refused():
        named = catalogue.hardware(hardware)
    quiet_transformers()
    section = config.model
    if section.path is not None:  # of which the planner needs neither weights nor tokenizer
        bare = section.model_copy(update={"path": None, "config": str(section.place()), "revision": None})
        config = config.model_copy(update={"model": bare})
    settings = architecture(config, config.tokenizer.vocab_size or 0) if section.architecture is None else None
    settings = settings or check_settings(config, ranks)
    result = study(config, settings, ranks, named, min(ranks, ranks_per_node or named.ranks_per_node), in_place=True)
    if isinstance(result, Unplanned):
        raise UserError(f"{config.model.config or section.architecture}: the planner cannot simulate it: {result}")
    return result
