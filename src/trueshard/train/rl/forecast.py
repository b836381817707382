"""Forecast the phases of reinforcement learning, and what it keeps on a rank beside the model: generate, score, update.

The update is the planner's step, of the loss that trains; the score is the same pass without gradient. To generate, a
whole model in the compute dtype is simulated: the prompts, and the last of the tokens, whose cache is the longest. What
a vLLM server takes is not known here.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trueshard import _torch
from trueshard.model import names
from trueshard.planner import ledger
from trueshard.planner.hardware import Hardware
from trueshard.planner.inputs.batches import quietly
from trueshard.planner.inputs.factories import from_callable
from trueshard.planner.simulation.environment import attention_as_on_a_device, fake_tensors_look_real
from trueshard.planner.simulation.fake_values import KnownValues
from trueshard.planner.simulation.recorder import Recorder
from trueshard.planner.timeline import communication_seconds, schedule
from trueshard.planner.trace import Communication, Trace
from trueshard.planner.workload import StepPhase, Study
from trueshard.plans import MixedPrecision, Plan, precision_of
from trueshard.train.config import Config
from trueshard.train.data.batches import IGNORED, Batch
from trueshard.train.models.build import empty
from trueshard.train.rl.engine import ROOM, drawn
from trueshard.train.rl.policy import PolicyLoss, policy_loss

# The update and the score


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


# What stays beside the model


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


def beside(config: Config, settings: Any, copy: str | None) -> tuple[tuple[str, int | None], ...]:
    """Return what stays on each rank beside model and optimizer, for `Request`."""
    reference = (("reference", None),) if _has_reference(config) else ()
    return (*reference, *((("rollout copy", copy_bytes(config, settings)),) if copy == "gathered" else ()))


# Generating


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


def phases(
    config: Config,
    study: Study,  # of an update
    stays: int,  # bytes on a rank from phase to phase
    score_cost: tuple[int, float],  # (peak bytes, seconds) of a pass
    copy: str | None,  # what is generated on: "gathered", "kept" or "sharded"
    generation: Generation | None,  # None: answers come from a server
    hardware: Hardware,
) -> tuple[StepPhase, ...]:
    """Return the phases of a step, or of a rollout and its `rl.updates`."""
    assert config.rl is not None
    forecast, updates = study.forecast, config.rl.updates
    passes = sum(_passes_without_gradient(config))
    live, seconds = score_cost
    score = live - stays if passes else 0
    score_seconds = passes * config.train.accumulation(forecast.ranks) * updates * seconds
    needs, notes = ({"pass": score}, ()) if passes else ({}, ("nothing to compare with",))
    step = {"step": forecast.peak_live_bytes - stays}
    return (
        _generate_phase(config, study, stays, copy, generation, hardware),
        StepPhase("score", stays + score, score_seconds, needs, notes),
        StepPhase("update", forecast.peak_live_bytes, updates * forecast.step_seconds, step),
    )


def _generate_phase(
    config: Config, study: Study, stays: int, copy: str | None, generation: Generation | None, hardware: Hardware
) -> StepPhase:
    assert study.score is not None
    units, node = _gathered_bytes(study.plan), study.forecast.ranks_per_node
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
