"""Forecast the memory and speed of a run with the planner, and print a configuration with its forecast (`--dry-run`).

- The model, its frozen parts and adapters, the optimizer and the loss are those of the run; only the data are made up.
- The device is the one at hand, or any of the planner's catalogue. On a CPU, the memory is what a process may have.
- What the planner cannot simulate is said in one line (`Unplanned`); no training ends because of it.
- `--dry-run` writes nothing. What it prints is TOML that means the same as the configuration: settings that were left
  out stand there with their defaults, as comments where they would not go with others; so does the forecast.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trueshard.errors import UserError, one_line, refused
from trueshard.files import replace_text
from trueshard.machine import memory_of_process
from trueshard.planner import hardware as catalogue
from trueshard.planner import process
from trueshard.planner.hardware import Hardware
from trueshard.planner.inputs.batches import model_loss
from trueshard.planner.planning import Request
from trueshard.planner.report import summary
from trueshard.planner.workload import StepPhase, Study
from trueshard.plans import Plan
from trueshard.train.config import Config
from trueshard.train.data.batches import Batch
from trueshard.train.data.formats import FORMATS
from trueshard.train.losses import CausalLoss
from trueshard.train.models.build import architecture, empty, quiet_transformers
from trueshard.train.optimizer import build_optimizer
from trueshard.train.parse import toml_key, toml_value
from trueshard.train.run import resuming, rl_forecast, run_forecast
from trueshard.train.run.checks import check_nproc, check_settings, count_samples, default_nproc, steps_of_epochs

SILENT = ("include",)
"""Keys that mean more if they are given, even with their default."""


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

    def own_loss(model: nn.Module, batch: Any) -> torch.Tensor:  # for preferences it stands for that of pairs
        return whole(model, batch) / batch["targets"].numel()

    model.__name__ = getattr(settings, "model_type", "model")  # for the tables of the study
    train, feed = config.train, _feed(config)
    whole = CausalLoss(train.whole_logits)
    loss, score = (
        (own_loss, _evaluation(config, feed, own_loss)) if config.rl is None else rl_forecast.policy_functions(config)
    )
    try:
        known = device if isinstance(device, Hardware) else _hardware_here(device, ranks_per_node)
        copy = rl_forecast.copy_word(config, settings, known, ranks)
        request = Request(
            model=model,
            hardware=known,
            ranks=ranks,
            batch=feed,
            ranks_per_node=min(ranks_per_node, ranks),
            replicate=config.shard.replicate,
            sequence=train.sequence_length,
            microbatch=rl_forecast.microbatch(config, ranks),
            accumulation=train.accumulation(ranks),
            optimizer=lambda model: build_optimizer(config.optimizer, model.named_parameters()),
            loss=None if feed is None and config.rl is None else loss,
            score=score,
            beside=rl_forecast.beside(config, settings, copy),
            clip=train.max_grad_norm,
            **vars(config.shard.options()),
        )
        found: Study = process.call("trueshard.planner.choose_plan:solve", request, in_place=in_place)
        if config.rl is not None:
            made = None
            if copy is not None:
                arguments = (config, settings, rl_forecast.compute_dtype(config))
                made = process.call("trueshard.train.run.rl_forecast:generation", *arguments, in_place=in_place)
            found = _with_phases(found, rl_forecast.phases(config, found, copy, made, known), config)
        else:
            every = run_forecast.run_phases(config, found, known)
            told = run_forecast.advice(every, found.forecast.budget_bytes)
            found = dataclasses.replace(found, phases=every, reasons=(told, *found.reasons))
    except Exception as error:  # whatever a model or an optimizer raises under simulation
        return Unplanned(one_line(error))
    optimizer = config.optimizer.class_path.rpartition(".")[2]
    return dataclasses.replace(found, forecast=dataclasses.replace(found.forecast, optimizer=optimizer))


def _evaluation(
    config: Config, feed: Callable[[int, int], Batch] | None, loss: Callable[[nn.Module, Any], torch.Tensor]
) -> Callable[[nn.Module, Any], Any] | None:
    """Return the pass of an evaluation; None without one."""
    if config.evaluation is None:
        return None
    return run_forecast.evaluated(model_loss if feed is None else loss)


def _with_phases(found: Study, every: tuple[StepPhase, ...], config: Config) -> Study:
    """Return the study of an update with all phases of its step."""
    # Preflight's is of the trainer's loss, which a policy does not have.
    own = [assumption for assumption in found.assumptions if not assumption.startswith("loss: ")]
    tokens = config.rollout.tokens
    own.append(
        f"Answers have rollout.tokens = {tokens:,} tokens, and their prompts what these leave of "
        f"train.sequence_length: {config.train.sequence_length - tokens:,}."
    )
    told = rl_forecast.rl_advice(every, found.forecast.budget_bytes)
    return dataclasses.replace(found, phases=every, assumptions=tuple(own), reasons=(told, *found.reasons))


def _hardware_here(device: torch.device, local_ranks: int) -> Hardware:
    """Return the catalogue's entry for this device; of a CPU, with the memory of one rank."""
    result = catalogue.hardware_here(device)
    if device.type == "cpu":
        return dataclasses.replace(result, memory_bytes=memory_of_process(local_ranks))
    return result


def bytes_of(found: Study | Unplanned) -> int | None:
    """Return the peak memory of a rank: what torch reserves; on a CPU, which has no such cache, tensors alone.

    At least what tensors take in any phase; the copies of a save, which lie on the host, are left out.
    """
    if isinstance(found, Unplanned):
        return None
    forecast = found.forecast
    own = forecast.peak_live_bytes if forecast.hardware == "cpu" else forecast.peak_reserved_bytes
    return max([own, *(phase.live_bytes for phase in found.phases if phase.name != "saving")])


def write(folder: Path, found: Study | Unplanned | Plan) -> None:
    """Write `plan.json` in the run's folder: a study, a plan alone, or why there is no forecast. For one rank."""
    if isinstance(found, Study):
        record = summary.as_json(found)
    else:
        record = {"plan": dataclasses.asdict(found)} if isinstance(found, Plan) else {"unplanned": found}
    replace_text(folder / "plan.json", json.dumps(record, indent=1))


def dry_run(config: Config, nproc: int | None = None, *, hardware: str | None = None) -> str:
    """Return the resolved configuration as TOML, and its forecast as comments.

    The data are read, and what is wrong with them raises `UserError`, as wrong settings do.
    With ``hardware``, a device of the planner's catalogue or a TOML file of that form, ``nproc`` may be any number.
    """
    ranks = default_nproc(1) if nproc is None else nproc
    if hardware is None:
        check_nproc(ranks)
    with refused():
        named = None if hardware is None else catalogue.hardware(hardware)
    config = resuming.tightened(config, ranks)
    settings, samples = check_settings(config, ranks), count_samples(config)
    here = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    node = ranks if named is None else min(ranks, named.ranks_per_node)
    found = study(config, settings, ranks, named or here, node, in_place=True)
    told = f"No forecast of memory and speed: {found}" if isinstance(found, Unplanned) else summary.text(found)
    if samples is not None:
        steps = config.train.steps or steps_of_epochs(config, samples)
        epochs, length = steps * config.train.batch_size / samples, config.train.sequence_length
        told = f"{samples:,} samples of {length} tokens; {steps:,} steps are {epochs:.3g} epochs\n{told}"
    comments = "\n".join(f"# {line}".rstrip() for line in told.splitlines())
    return f"{toml(config)}\n{comments}"


def plan(config: Config, hardware: str, ranks: int, ranks_per_node: int | None = None) -> Study:
    """Return the forecast of a configuration on a device of the catalogue; of the model only its configuration is read.

    Raises `UserError` for settings that do not go together, and for what the planner cannot simulate.
    """
    with refused():
        named = catalogue.hardware(hardware)
    quiet_transformers()
    section = config.model
    if section.path is not None:
        bare = section.model_copy(update={"path": None, "config": str(section.place()), "revision": None})
        config = config.model_copy(update={"model": bare})
    settings = architecture(config, config.tokenizer.vocab_size or 0) if section.architecture is None else None
    settings = settings or check_settings(config, ranks)
    result = study(config, settings, ranks, named, min(ranks, ranks_per_node or named.ranks_per_node), in_place=True)
    if isinstance(result, Unplanned):
        raise UserError(f"{config.model.config or section.architecture}: the planner cannot simulate it: {result}")
    return result


def toml(config: Config) -> str:
    """Return a configuration with all its settings as TOML; those that may not be given are comments."""
    given = config.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True)
    lines: list[str] = []
    for name, section in config:
        if section is None:
            continue
        whole = section.model_dump(mode="json", by_alias=True, exclude_none=True)
        kept = given.get(name, {})
        lines += ["", f"[{name}]" if name in given or _is_valid({**given, name: whole}) else f"# [{name}]"]
        tables: list[str] = []
        for key, value in whole.items():
            if isinstance(value, list) and value and isinstance(value[0], dict):
                for row in value:
                    tables += ["", f"[[{name}.{key}]]", *(_line(inner, each) for inner, each in row.items())]
                continue
            trial = {**given, name: {**kept, key: value}}
            is_live = key in kept or (key not in SILENT and _is_valid(trial))
            lines.append(("" if is_live else "# ") + _line(key, value))
        lines += tables
    return "\n".join(lines).lstrip("\n") + "\n"


def _line(key: str, value: Any) -> str:
    return f"{toml_key(key)} = {toml_value(value)}"


def _is_valid(tree: dict[str, Any]) -> bool:
    try:
        Config.model_validate(tree)
    except ValueError:
        return False
    return True


def _feed(config: Config) -> Callable[[int, int], Batch] | None:
    """Return what makes batches like the data's, of full length; None for images, which the planner makes itself."""
    data = config.data
    if config.images:
        return None
    if config.rl is not None:
        return lambda microbatch, sequence: rl_forecast.policy_batch(config, microbatch, sequence - 1)
    form = FORMATS[data.format]
    rows, layout = form.rows, form.layout_of(data)

    def batch(microbatch: int, sequence: int) -> Batch:
        ids = torch.zeros(rows * microbatch, sequence, dtype=torch.int64)
        made = {"input_ids": ids, "targets": ids.clone()}
        if layout == "packed":
            made["position_ids"] = torch.arange(sequence).expand(rows * microbatch, sequence).contiguous()
        elif layout == "single":
            made["attention_mask"] = torch.ones_like(ids)
        return made

    return batch
