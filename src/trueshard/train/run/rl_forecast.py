"""The memory and time of a step of reinforcement learning, phase by phase: generate, score, update.

- The update is the planner's step, of the loss that trains: batches of full length, of which all but one row are padded
  by a token, as answers of different lengths are; the last ``rollout.tokens`` places of a row are targets.
- The score is the same pass without gradient. The reference is sharded like the model, and computes likewise.
- To generate, a whole model in the compute dtype is simulated: the prompts, and the last of the tokens, whose cache is
  the longest. Answers have all their tokens; prompts have what these leave of ``train.sequence_length``.
- A gathered copy and the reference stay from phase to phase, as shards and optimizer state do.
- What a vLLM server takes is not known here.
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
from trueshard.planner.hardware import Hardware, Mode
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
from trueshard.train.run import run_forecast

COPY, REFERENCE = "rollout copy", "reference"
SERVER_PAYS = 0.6
"""Part of a step from which on generating is worth a server of its own."""


# The update and the score


def needs_old(config: Config) -> bool:
    """Return True if log-probabilities before the update are computed by a pass of their own."""
    rl = config.rl
    assert rl is not None
    return rl.updates > 1 or config.rollout.ahead > 0 or (rl.kl > 0 and rl.kl_place == "reward")


def microbatch(config: Config, ranks: int) -> int:
    """Return the answers of a rank's largest microbatch."""
    return config.train.microbatch or -(-config.train.batch_size // config.train.accumulate // ranks) or 1


def policy_batch(config: Config, rows: int, length: int) -> Batch:
    """Return a batch of `PolicyLoss`, [rows, length]: prompts and answers of full length without their last token."""
    assert config.rl is not None
    answer = min(config.rollout.tokens, length)
    places = torch.arange(length - answer, length).expand(rows, answer)
    ids = torch.ones(rows, length, dtype=torch.int64)
    ids[-1:, -1] = 0 if rows > 1 else 1
    batch = {
        "input_ids": ids,
        "attention_mask": ids.ne(0).to(torch.int64),
        "targets": torch.full((rows, length), IGNORED).scatter(1, places, 0),
        "advantages": torch.zeros(rows),
    }
    keys = ["engine_logprobs", *(["old_logprobs"] if needs_old(config) else [])]
    keys += ["reference_logprobs"] if config.rl.kl > 0 else []
    return batch | {key: torch.zeros(rows, length) for key in keys}


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

    def of_text(batch: Batch) -> Batch:
        """Complete a batch with images, which the planner makes from the model."""
        if "targets" in batch:
            return batch
        plain = {key: value for key, value in batch.items() if key != "labels"}
        rows, length = batch["input_ids"].shape
        return {**policy_batch(config, rows, length), **plain}

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return policy(model)(model, of_text(batch)) / batch["input_ids"].numel()

    def score(model: nn.Module, batch: Batch) -> Any:
        return policy(model).logprobs(model, of_text(batch))

    return loss, score


# What stays beside the model


def copy_bytes(config: Config, settings: Any, compute: torch.dtype | None) -> int:
    """Return the bytes of a gathered copy: parameters in the compute dtype, and buffers."""
    model = empty(config, settings)
    parameters = sum(parameter.numel() * _width(parameter, compute) for parameter in model.parameters())
    return parameters + sum(buffer.nbytes for buffer in model.buffers())


def _width(parameter: torch.Tensor, compute: torch.dtype | None) -> int:
    cast = compute is not None and parameter.is_floating_point()
    return compute.itemsize if cast and compute is not None else parameter.itemsize


def copy_word(config: Config, settings: Any, device: Hardware, ranks: int) -> str | None:
    """Return `rollout.copy`; of "auto" what `engine.copy_fits` will find, before there is optimizer state.

    None if nothing is generated on the ranks.
    """
    if config.rl is None or config.rollout.on_server:
        return None
    if config.rollout.copy_ != "auto":
        return config.rollout.copy_
    compute, model = compute_dtype(config), empty(config, settings)
    models = 0 if config.shard.options().offload == "cpu" else 1 + has_reference(config)
    shards = sum(parameter.nbytes for parameter in model.parameters()) * config.shard.replicate // ranks
    free = device.memory_bytes - device.context_bytes - models * shards
    whole = sum(parameter.numel() * _width(parameter, compute) for parameter in model.parameters())
    return "gathered" if ROOM * free > whole else "kept"


def has_reference(config: Config) -> bool:
    """Return True if a second model is kept."""
    return config.rl is not None and config.rl.kl > 0 and config.adapter is None


def beside(config: Config, settings: Any, copy: str | None) -> tuple[tuple[str, int | None], ...]:
    """Return what stays on each rank beside model and optimizer, for `Request`."""
    result: tuple[tuple[str, int | None], ...] = ((REFERENCE, None),) if has_reference(config) else ()
    if copy == "gathered":
        result += ((COPY, copy_bytes(config, settings, compute_dtype(config))),)
    return result


def compute_dtype(config: Config) -> torch.dtype | None:
    """Return the dtype of mixed precision; None without."""
    precision = precision_of(config.shard.options().mixed_precision)
    return None if precision is None or precision.compute is None else getattr(torch, precision.compute)


# Generating


@dataclass(frozen=True)
class Generation:
    """Generating a piece of answers on a whole model, without that model's own memory."""

    prompts: Trace
    """The pass over the prompts, with the first token drawn."""
    token: Trace
    """The pass that makes the last token."""
    prompt_bytes: int
    """Peak of the first pass, its part of the cache included."""
    token_bytes: int
    """Peak of the second pass, the cache included."""
    cache_bytes: int
    """Bytes of the cache, at its longest."""


@quietly()
def generation(config: Config, settings: Any, compute: torch.dtype | None) -> Generation:
    """Simulate a piece of `rollout.batch` answers. For the planner's process."""
    rows, tokens = piece_rows(config), config.rollout.tokens
    prompt = config.train.sequence_length - tokens
    with _torch.fake_tensors(), torch.no_grad(), attention_as_on_a_device(), fake_tensors_look_real():
        model = from_callable(lambda: empty(config, settings)).build().model.eval()
        for parameter in model.parameters():
            if compute is not None and parameter.is_floating_point():
                parameter.data = parameter.data.to(compute)
        first, short = _recorded(model, config, rows, prompt, None)
        if tokens == 1:
            return Generation(first, Trace(), _beyond(first), 0, _bytes_of(short))
        with KnownValues():
            long = _run(model, config, rows, prompt + tokens - 2, None)
        last, cache = _recorded(model, config, rows, 1, long)
        return Generation(first, last, _beyond(first), _beyond(last, "cache"), _bytes_of(cache))


def piece_rows(config: Config) -> int:
    """Return the answers that a rank generates together."""
    return min(config.rollout.batch, answers(config))


def answers(config: Config) -> int:
    """Return the answers of a rollout."""
    assert config.rl is not None
    count = config.train.batch_size * config.rl.updates
    return count + count // config.rl.samples * (config.rl.advantage == "greedy")


def _recorded(model: nn.Module, config: Config, rows: int, length: int, cache: Any) -> tuple[Trace, Any]:
    recorder = Recorder()
    recorder.adopt([*model.named_parameters(), *model.named_buffers()], "parameters", "")
    recorder.adopt((("cache", each) for each in _tensors_of(cache)), "activations", "cache")
    resident = recorder.alive()
    with recorder:
        cache = _run(model, config, rows, length, cache)
    return Trace(recorder.take(), resident), cache


def _run(model: nn.Module, config: Config, rows: int, length: int, cache: Any) -> Any:
    """Run one pass of generation and draw a token for each row, as `engine.Draw` does; return the cache."""
    own: Any = names.unwrap(model)
    base = own.get_base_model() if hasattr(own, "peft_config") else own
    ids = torch.ones(rows, length, dtype=torch.int64)
    whole = length if cache is None else config.train.sequence_length - 1
    seen = torch.ones(rows, whole, dtype=torch.int64)
    seen[:1, 0] = 0 if rows > 1 else 1
    given: dict[str, Any] = {"attention_mask": seen.ne(0).to(torch.int64), "use_cache": True}
    if cache is not None:
        given["past_key_values"] = cache
    if "logits_to_keep" in inspect.signature(base.forward).parameters:
        given["logits_to_keep"] = 1
    out = own(input_ids=ids, **given)
    scores = out.logits[:, -1].to(copy=True, dtype=torch.float32)
    logs = (scores / config.rollout.temperature).log_softmax(1)
    drawn(logs, torch.zeros(rows, dtype=torch.float64))
    return out.past_key_values


def _beyond(trace: Trace, *kept: str) -> int:
    """Return the peak of a pass beyond what was there before it, but for units that are ``kept``."""
    before = sum(each.bytes for each in trace.resident if each.unit not in kept)
    return ledger.peak(trace).bytes - before


def _tensors_of(cache: Any) -> list[torch.Tensor]:
    """Return the tensors of a cache of transformers: of its layers, or its own."""
    if cache is None:
        return []
    found = _torch.tensors_in([vars(each) for each in getattr(cache, "layers", [])] or vars(cache))
    return [each for each in found if each.ndim > 1]


def _bytes_of(cache: Any) -> int:
    return sum(each.nbytes for each in _tensors_of(cache))


# All phases


def phases(
    config: Config, found: Study, copy: str | None, made: Generation | None, device: Hardware
) -> tuple[StepPhase, ...]:
    """Return the phases of a step, or of a rollout and its `rl.updates`.

    Args:
        config: of the run.
        found: the study of an update.
        copy: what is generated on: "gathered", "kept" or "sharded".
        made: how answers are generated on the ranks; None: they come from a server.
        device: of the study.
    """
    assert config.rl is not None
    assert found.score is not None
    forecast, updates = found.forecast, config.rl.updates
    stays = sum(each.bytes for each in found.trace.resident)
    passes = needs_old(config) + (config.rl.kl > 0)
    score = ledger.peak(found.score).bytes - stays if passes else 0
    mode: Mode = "compile" if found.plan.compile else "eager"
    line = schedule(found.score, device, forecast.ranks_per_node, mode)
    return (
        _generate(config, found, stays, copy, made, device),
        StepPhase(
            "score",
            stays + score,
            passes * config.train.accumulation(forecast.ranks) * updates * line.seconds,
            {"pass": score} if passes else {},
            () if passes else ("nothing to compare with",),
        ),
        StepPhase(
            "update",
            forecast.peak_live_bytes,
            updates * forecast.step_seconds,
            {"step": forecast.peak_live_bytes - stays},
        ),
    )


def _generate(
    config: Config, found: Study, stays: int, copy: str | None, made: Generation | None, device: Hardware
) -> StepPhase:
    assert found.score is not None
    unit = max(_gathered_bytes(found.plan))
    if made is None:
        return StepPhase("generate", stays + unit, None, {"a unit of weights to send": unit}, ("on the server",))
    node = found.forecast.ranks_per_node
    gathers = [event for event in found.score.events if isinstance(event, Communication) and event.op == "all_gather"]
    sync = sum(communication_seconds(gather, device, node) for gather in gathers)
    prompts, token = (schedule(trace, device, node).seconds for trace in (made.prompts, made.token))
    if copy == "sharded":
        prompts, token, sync = max(prompts, sync), max(token, sync), 0.0
    rows = piece_rows(config)
    pieces = math.ceil(math.ceil(answers(config) / rows) / found.forecast.ranks)
    weights = {"gathered": 0, "kept": sum(_gathered_bytes(found.plan)), "sharded": 2 * unit}[copy or "gathered"]
    work = max(made.prompt_bytes, made.token_bytes)
    needs = {"weights": weights, "cache": made.cache_bytes, "pass": work - made.cache_bytes}
    return StepPhase(
        "generate",
        stays + max(weights + work, unit),  # the copy takes over new weights unit by unit
        sync + pieces * (prompts + (config.rollout.tokens - 1) * token),
        {key: value for key, value in needs.items() if value},
        (f"{pieces} × {rows} answers a rank", f"copy {copy}"),
    )


def _gathered_bytes(plan: Plan) -> list[int]:
    """Return the bytes of each unit when it is gathered."""
    compute = (plan.mixed_precision or MixedPrecision()).compute
    widths: list[int] = [getattr(torch, compute or unit.dtype.partition("+")[0]).itemsize for unit in plan.units]
    return [unit.parameters * width for unit, width in zip(plan.units, widths, strict=True)]


def rl_advice(phases: tuple[StepPhase, ...], budget: int) -> str:
    """Return ``run_forecast.advice``, and a sentence if a server would pay."""
    advice = run_forecast.advice(phases, budget)
    total, generate = sum(phase.seconds or 0.0 for phase in phases), phases[0].seconds
    if generate is not None and total and (share := generate / total) > SERVER_PAYS:
        advice += f" Generating takes {share:.0%} of a step: a vLLM server pays (rollout.engine)."
    return advice
