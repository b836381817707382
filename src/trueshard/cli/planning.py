"""`trueshard plan`."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from trueshard.cli.options import (
    ActivationCheckpointing,
    Compile,
    Exact,
    Experts,
    Json,
    Optimizer,
    Overrides,
    PlanFile,
    ReshardAfterForward,
    Tensor,
    Tokens,
    Units,
)
from trueshard.errors import UserError, refused
from trueshard.files import replace_text
from trueshard.options import Options, reshard_word
from trueshard.planner.inputs import architectures
from trueshard.plans import dtype_name


def _count(what: str) -> Any:
    return typer.Option(help=what, metavar="N", min=1, show_default=False)


def _dtype(what: str) -> Any:
    return typer.Option(help=f"{what}: bf16, fp16 or fp32.", metavar="DTYPE", show_default=False)


def _known() -> str:
    """Return the names of known architectures; "" without the package that reads their table."""
    try:
        return f" Known architectures: {architectures.listed()}."
    except ImportError:
        return ""


_MODEL = (
    "A known architecture (llama-3-70b), a name on the hub, a folder with a config.json, that file, file.py:factory, "
    "or a training configuration (TOML)."
)


def plan(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(help=_MODEL + _known(), metavar="MODEL"),
    ] = "",
    of: Annotated[
        str, typer.Argument(help="With --for: the model, where CONFIG names none.", metavar="OF", show_default=False)
    ] = "",
    hardware: Annotated[str, typer.Option(help="A device of the catalogue, or a TOML file.", metavar="NAME")] = "h100",
    ranks: Annotated[int, typer.Option(help="Processes, one a device.", metavar="N", min=1)] = 8,
    ranks_per_node: Annotated[int | None, _count("Devices of a node.")] = None,
    replicate: Annotated[int | None, _count("Whole copies of the model, each over a part of the ranks.")] = None,
    tensor: Tensor = 1,
    sequence_parallel: Annotated[
        bool,
        typer.Option("--sequence-parallel", help="With --tensor: cut what lies between matrices by tokens."),
    ] = False,
    shared: Annotated[int, typer.Option("--context", help="Ranks that share each sequence.", metavar="N", min=1)] = 1,
    experts: Experts = 1,
    pipeline: Annotated[
        int, typer.Option(help="Stages of a pipeline, of --accumulation microbatches.", metavar="N", min=1)
    ] = 1,
    schedule: Annotated[
        str | None, typer.Option(help="1f1b, gpipe or interleaved.", metavar="WORD", show_default=False)
    ] = None,
    virtual: Annotated[int, typer.Option(help="Chunks of blocks a rank (interleaved).", metavar="N", min=1)] = 1,
    axes: Annotated[
        bool, typer.Option("--axes", help="Choose tensor, context, experts and pipeline, too.", show_default=False)
    ] = False,
    imbalance: Annotated[
        float, typer.Option(help="Tokens of the busiest rank's experts over their mean.", metavar="FACTOR", min=1.0)
    ] = 1.0,
    exact: Exact = False,
    sequence: Tokens = None,
    microbatch: Annotated[int | None, _count("Samples of a rank in one forward.")] = None,
    accumulation: Annotated[int | None, _count("Microbatches a step.")] = None,
    global_batch: Annotated[int | None, _count("Samples of all ranks in a step.")] = None,
    param_dtype: Annotated[str | None, _dtype("What units compute in")] = None,
    reduce_dtype: Annotated[str | None, _dtype("What gradients are reduced in")] = None,
    storage_dtype: Annotated[str | None, _dtype("What parameters are stored in")] = None,
    matmul: Annotated[
        str | None,
        typer.Option(
            help="Forecast linear layers in float8, float8-rowwise or mxfp8; shard() does not do that.",
            metavar="RECIPE",
            show_default=False,
        ),
    ] = None,
    optimizer: Optimizer = None,
    units: Units = None,
    reshard_after_forward: ReshardAfterForward = "auto",
    activation_checkpointing: ActivationCheckpointing = "auto",
    offload: Annotated[
        str | None, typer.Option(help="none, cpu, or auto (left out: if nothing else fits).", metavar="WORD")
    ] = None,
    compiled: Compile = Options.compile,
    memory: Annotated[
        str | None, typer.Option(help="What torch may reserve on a rank, such as 70GiB.", metavar="SIZE")
    ] = None,
    given: PlanFile = None,
    framework: Annotated[
        str | None,
        typer.Option(
            "--for",
            help="torchtitan, accelerate or deepspeed: MODEL is its configuration; say what to change in it.",
            metavar="NAME",
            show_default=False,
        ),
    ] = None,
    diff: Annotated[
        tuple[Path, Path] | None, typer.Option(help="Say how two plans differ.", metavar="A B", show_default=False)
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the plan, for shard(plan=...).", metavar="FILE")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with memory and time line.", metavar="FILE")] = None,
    sliders: Annotated[
        bool,
        typer.Option(
            "--sliders", help="With --html: the same plan at other ranks, lengths, microbatches.", show_default=False
        ),
    ] = False,
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="Run rank 0 on this machine's GPU, and compare.", show_default=False)
    ] = False,
    calibrate: Annotated[
        Path | None,
        typer.Option(help="Measure this machine's device, and write a file for --hardware.", metavar="FILE.toml"),
    ] = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Say what training a model costs on a cluster, and choose how to shard it. Needs neither GPUs nor weights.

    A training configuration has its own batch, optimizer and sharding: change them by --set.
    """
    with refused(), _status("Starting the planner"), _importing():
        from trueshard.planner.planning import Request, check_writable, read_plan
        from trueshard.planner.report import compare

        if diff is None and model and not model.endswith(".toml"):
            from trueshard.planner.choose_plan import solve, space_of

            if rehearse:
                from trueshard.planner.simulation import rehearse as rehearsing
    with refused():
        if diff is not None:
            plans = [read_plan(path) for path in diff]
            if html is not None:
                from trueshard.planner.report import compare_page

                check_writable(html)
                names = [path.stem if len({each.stem for each in diff}) > 1 else str(path) for path in diff]
                replace_text(html, compare_page.page(list(zip(names, plans, strict=True))))
            print(compare.diff(*plans))
            return
        if calibrate is not None:
            given_hardware = context.get_parameter_source("hardware")
            _calibrate(calibrate, hardware if given_hardware and given_hardware.name == "COMMANDLINE" else None)
            return
        if sliders and html is None:
            raise UserError("--sliders needs --html FILE, the page that they are on")
        if not model:
            raise UserError("plan needs a MODEL, such as llama-3-70b, a folder with a config.json, or file.py:factory")
        for file in (out, html):
            if file is not None:
                check_writable(file)
        if framework is not None:
            _show_advice(context, framework, Path(model), of)
            return
        if of:
            raise UserError(f"{of}: a second model goes with --for alone; leave it out")
        if model.endswith(".toml"):
            _show(_plan_of_training(context, Path(model), overrides or []), out, html, as_json)
            return
        if overrides:
            raise UserError("--set changes a training configuration, and MODEL is none; give the option itself")
        request = Request(
            model=model,
            hardware=hardware,
            ranks=ranks,
            memory=memory,
            ranks_per_node=ranks_per_node,
            replicate=replicate,
            sequence=sequence,
            microbatch=microbatch,
            accumulation=accumulation,
            global_batch=global_batch,
            optimizer=optimizer,
            storage_dtype=storage_dtype,
            matmul=matmul,
            units=units or Options.units,
            reshard_after_forward=reshard_word(reshard_after_forward),
            activation_checkpointing=activation_checkpointing,
            mixed_precision=_precision(param_dtype, reduce_dtype) or "auto",
            compile=compiled,
            offload=offload,
            tensor={"ranks": tensor, "sequence": True} if sequence_parallel else tensor,
            context=shared,
            experts=experts,
            pipeline=pipeline,
            schedule=schedule,
            virtual=virtual,
            axes=axes,
            imbalance=imbalance,
            exact=exact,
            plan=None if given is None else read_plan(given),
        )
        if axes or sliders:
            gc.unfreeze()  # several searches: what each leaves behind is collected
        with _status(f"Building {model} on fake tensors") as status:
            if rehearse:
                rehearsing.require_gpu()
            found = solve(request, status.update, workers=None)
            points = None
            if sliders:
                from trueshard.planner.grid import grid

                points = grid(request, found, status.update)
        rehearsal = None
        if rehearse:
            space, _ = space_of(request)
            rehearsal = rehearsing.rehearse(rehearsing.job_of(found, space.workload), space.hardware)
        _show(found, out, html, as_json, rehearsal, points)


def _calibrate(file: Path, base: str | None) -> None:
    """Measure this machine's device, and write the file; ``base``: the device of the catalogue that it resembles."""
    import torch

    from trueshard.planner.calibrate import calibrate
    from trueshard.planner.hardware import hardware, hardware_here
    from trueshard.planner.planning import check_writable

    if file.suffix != ".toml":
        raise UserError(f"--calibrate writes TOML: call the file {file.with_suffix('.toml')}")
    check_writable(file)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    known = hardware_here(device) if base is None else hardware(base)
    with _status("measuring") as status:
        found = calibrate(device, known, status.update)
    replace_text(file, found.toml())
    print(found)


def _status(line: str) -> Any:
    """Show a line on stderr, if that is a terminal, while a context is open; drawn seldom: it takes processor time."""
    from rich.console import Console

    return Console(stderr=True).status(line, refresh_per_second=4)


@contextlib.contextmanager
def _importing() -> Iterator[None]:
    """Collect no garbage while modules are imported, and none of them later: they leave hardly any, and are many."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


_OF_OTHERS = ("hardware", "ranks", "ranks_per_node", "sequence", "microbatch", "memory", "optimizer")
"""Options of `plan` that go with another framework's configuration, in the place of what it says."""
_OF_TRAINING = ("model", "hardware", "ranks", "ranks_per_node", "overrides", "out", "html", "as_json")
"""Parameters of `plan` that go with a training configuration."""


def _show_advice(context: typer.Context, framework: str, path: Path, model: str) -> None:
    """Print forecasts of another framework's configuration, as it is and at best; write the best plan's files."""
    from trueshard.convert.planning import advise
    from trueshard.planner.report import page

    params = context.params
    _refuse_others(context, (*_OF_OTHERS, "model", "of", "framework", "out", "html", "as_json"), f"--for {framework}")
    given = {key: params[key] for key in _OF_OTHERS if _is_given(context, key)}
    with _status(f"Building {path} on fake tensors") as status:
        advice = advise(path, framework, model, progress=status.update, **{"ranks": None, **given})
    if params["out"] is not None:
        replace_text(params["out"], advice.best.plan.to_json() + "\n")
    if params["html"] is not None:
        replace_text(params["html"], page.page(advice.best))
    print(json.dumps(advice.as_json(), indent=2) if params["as_json"] else advice)


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _refuse_others(context: typer.Context, known: tuple[str, ...], what: str) -> None:
    """Raise UserError for an option on the command line that is none of the parameters ``known``."""
    for parameter in context.command.params:
        if parameter.name not in known and _is_given(context, parameter.name or ""):
            raise UserError(f"{parameter.opts[0]} does not go with {what}, which says it")


def _plan_of_training(context: typer.Context, path: Path, overrides: list[str]) -> Any:
    """Return the study of a training configuration, with the options that go with it."""
    from trueshard.train.parse import load_config
    from trueshard.train.run.forecast import plan as planned

    given = context.params
    if given["sliders"]:
        raise UserError(
            "--sliders plans a model alone at other ranks, lengths and microbatches; of a training configuration, plan "
            "each with --ranks and --set"
        )
    try:
        _refuse_others(context, _OF_TRAINING, "a training configuration")
    except UserError as error:
        raise UserError(f"{error}; use --set") from None
    return planned(load_config(path, overrides), given["hardware"], given["ranks"], given["ranks_per_node"])


def _show(
    found: Any, out: Path | None, html: Path | None, as_json: bool, rehearsal: Any = None, points: Any = None
) -> None:
    """Print a study, and write its files."""
    from trueshard.planner.report import page, report

    if out is not None:
        replace_text(out, found.plan.to_json() + "\n")
    if html is not None:
        replace_text(html, page.page(found, points))
    if as_json:
        more = {} if rehearsal is None else {"rehearsal": dataclasses.asdict(rehearsal)}
        print(json.dumps(report.as_json(found) | more, indent=2))
    else:
        print(report.text(found), *([] if rehearsal is None else ["", rehearsal]), sep="\n")


def _precision(param: str | None, reduce: str | None) -> Any:
    """Return torch's policy for two words such as ``"bf16"`` or ``"float32"``; None where neither is given."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    given = [("param_dtype", param), ("reduce_dtype", reduce)]
    words = {key: dtype_name(key.replace("_", "-"), word) for key, word in given if word is not None}
    return MixedPrecisionPolicy(**{key: getattr(torch, word) for key, word in words.items()}) if words else None
