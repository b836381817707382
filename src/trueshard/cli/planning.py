"""`trueshard plan`, and `plan diff`, `plan calibrate` and `plan rehearse`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import importlib
import inspect
import json
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trueshard.cli import offers
from trueshard.cli.options import Json, Optimizer, Overrides, PlanFile, Tokens, count, flag, spread, takes_options, word
from trueshard.errors import UserError, refused
from trueshard.files import replace_text
from trueshard.planner.inputs import architectures
from trueshard.plans import dtype_name

if TYPE_CHECKING:
    from trueshard.planner.planning import Request
    from trueshard.planner.workload import Study


def _dtype(what: str) -> Any:
    return word(f"{what}: bf16, fp16 or fp32.", "DTYPE")


def _listed() -> str:
    """Return the names of known architectures; "" without the package that reads their table."""
    try:
        return f" Known architectures: {architectures.listed()}."
    except ImportError:
        return ""


_MODEL = (
    "A known architecture (llama-3-70b), a name on the hub, a folder with a config.json, that file, file.py:factory, "
    "or a training configuration (TOML)."
)


@takes_options(("mixed_precision", "offload", "memory"), reshard_after_forward="auto", activation_checkpointing="auto")
def _arguments(
    *,
    model: Annotated[str, typer.Argument(help=_MODEL + _listed(), metavar="MODEL")] = "",
    hardware: Annotated[str, typer.Option(help="A device of the catalogue, or a TOML file.", metavar="NAME")] = "h100",
    ranks: Annotated[Any, typer.Option(parser=offers.counts, help="Processes, one a device.", metavar="N")] = "8",
    ranks_per_node: Annotated[int | None, count("Devices of a node.")] = None,
    link: Annotated[str | None, word("Link inside a node: nvlink4, pcie5, …, or a rate of a device.", "WORD")] = None,
    network: Annotated[str | None, word("Rate of a device between nodes, such as 400Gb.", "RATE")] = None,
    replicate: Annotated[int | None, count("Whole copies of the model, each over a part of the ranks.")] = None,
    sequence: Tokens = None,
    microbatch: Annotated[int | None, count("Samples of a rank in one forward.")] = None,
    accumulation: Annotated[int | None, count("Microbatches a step.")] = None,
    global_batch: Annotated[int | None, count("Samples of all ranks in a step.")] = None,
    param_dtype: Annotated[str | None, _dtype("What units compute in")] = None,
    reduce_dtype: Annotated[str | None, _dtype("What gradients are reduced in")] = None,
    storage_dtype: Annotated[str | None, _dtype("What parameters are stored in")] = None,
    optimizer: Optimizer = None,
    memory: Annotated[str | None, word("What torch may reserve on a rank, such as 70GiB.", "SIZE")] = None,
    host_memory: Annotated[str | None, word("Main memory of a node, such as 512GiB.", "SIZE")] = None,
    offload: Annotated[str | None, word("none, cpu, or auto (left out: if nothing else fits).", "WORD")] = None,
    options: dict[str, Any],
    sequence_parallel: Annotated[
        bool, flag("--sequence-parallel", "With --tensor: cut what lies between matrices by tokens.")
    ] = False,
    pipeline: Annotated[
        int, typer.Option(help="Stages of a pipeline, of --accumulation microbatches.", metavar="N", min=1)
    ] = 1,
    schedule: Annotated[str | None, word("1f1b, gpipe or interleaved.", "WORD")] = None,
    virtual: Annotated[int, typer.Option(help="Chunks of blocks a rank (interleaved).", metavar="N", min=1)] = 1,
    axes: Annotated[bool, flag("--axes", "Choose tensor, context, experts and pipeline, too.")] = False,
    thorough: Annotated[
        bool, flag("--thorough", "Study plans until none is expected to be faster, however long it takes.")
    ] = False,
    imbalance: Annotated[
        float, typer.Option(help="Tokens of the busiest rank's experts over their mean.", metavar="FACTOR", min=1.0)
    ] = 1.0,
    plan_file: PlanFile = None,
) -> dict[str, Any]:
    """Return the options that planning and rehearsing take, by name."""
    return dict(locals())  # its parameters


def _request(arguments: dict[str, Any], several: bool = False) -> Request:
    """Return the request that ``_arguments`` make, of the first number of ranks, if there may be ``several``."""
    from trueshard.planner.planning import Request, read_plan

    if not arguments["model"]:
        raise UserError("plan needs a MODEL, such as llama-3-70b, a folder with a config.json, or file.py:factory")
    fields = {field.name for field in dataclasses.fields(Request)}
    values = {name: value for name, value in arguments.items() if name in fields} | arguments["options"]
    values["ranks"] = arguments["ranks"][0] if several else offers.one(arguments["ranks"])
    if arguments["sequence_parallel"]:
        values["tensor"] = {"ranks": values["tensor"], "sequence": True}
    file = arguments["plan_file"]
    return Request(
        **values,
        mixed_precision=_precision(arguments["param_dtype"], arguments["reduce_dtype"]) or "auto",
        plan=None if file is None else read_plan(file),
    )


_takes_request = spread(
    "request",
    inspect.signature(_arguments).parameters.values(),
    lambda values: functools.partial(_request, _arguments(**values)),
)
"""Decorator for a command with an argument ``request``, a function that makes it: the options that it is made of."""

Out = Annotated[Path | None, typer.Option(help="Write the plan, for shard(plan=...).", metavar="FILE")]
Html = Annotated[Path | None, typer.Option(help="Write a page with memory and time line.", metavar="FILE")]


@_takes_request
def plan(
    request: Callable[..., Any],
    typed: typer.Context,
    model: str,
    of: Annotated[
        str, typer.Argument(help="With --for: the model, where CONFIG names none.", metavar="OF", show_default=False)
    ] = "",
    framework: Annotated[
        str | None,
        typer.Option(
            "--for",
            help="fsdp2, torchtitan, accelerate or deepspeed: plan for it. MODEL may be its configuration: say what to "
            "change in it. --out writes its files into a new folder.",
            metavar="NAME",
            show_default=False,
        ),
    ] = None,
    out: Out = None,
    html: Html = None,
    sliders: Annotated[
        bool, flag("--sliders", "With --html: the same plan at other ranks, lengths, microbatches.")
    ] = False,
    price: Annotated[str | None, word("Money for an hour of a device, or a TOML file: a line each.", "MONEY")] = None,
    tokens: Annotated[float | None, word("Tokens of a whole run, such as 2e12, for what it costs.", "N")] = None,
    samples: Annotated[float | None, word("Samples of a whole run, likewise.", "N")] = None,
    lora: Annotated[str | None, word("Train a LoRA adapter of this rank, the model frozen.", "N")] = None,
    method: Annotated[str | None, word("full; or qlora: below the adapter 4 bits.", "WORD")] = None,
    compare: Annotated[
        str | None,
        word("Compare these devices (h100,h200) by what a run costs; also of --ranks, --lora, --method.", "NAMES"),
    ] = None,
    hours: Annotated[float | None, word("With --compare: hours in which the run must end.", "N")] = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Say what training a model costs on a cluster, and choose how to shard it. Needs neither GPUs nor weights.

    A training configuration has its own batch, optimizer and sharding: change them by --set. `plan diff`, `plan
    calibrate` and `plan rehearse` are commands of their own.
    """
    is_model = framework is None and not model.endswith(".toml")
    with refused(), _starting():
        importlib.import_module(f"trueshard.planner.{'choose_plan' if model and is_model else 'planning'}")
    with refused():
        from trueshard.planner.planning import check_writable

        if sliders and html is None:
            raise UserError("--sliders needs --html FILE, the page that they are on")
        if of and framework is None:
            raise UserError(f"{of}: a second model goes with --for alone; leave it out")
        if overrides and is_model:
            raise UserError("--set changes a training configuration, and MODEL is none; give the option itself")
        is_folder = framework is not None and out is not None and out.suffix != ".json"
        check_writable(None if is_folder else out, html)
        if compare is None and (hours is not None or "," in f"{lora}{method}"):
            raise UserError("--hours, and several --lora or --method, go with --compare alone")
        if compare is not None:
            _refuse_others(typed, {*typed.params} - _ALONE, "--compare", "; leave it out")
            offers.show(typed.params, request(several=True), html, _status(f"Comparing offers for {model}"))
        elif framework is not None:
            _plan_for(typed, framework, of, request, out if is_folder else None)
        elif is_model:
            (job,) = offers.by_method(request(), lora, method).values()
            run = offers.run_of(typed.params, [typed.params["hardware"]])
            study, points = _best(job, sliders, curve=as_json or html is not None)
            _show(run.billed(study, job.device()), out, html, as_json, points=points)
        else:
            _show(_study_of_training(typed, overrides or []), out, html, as_json)


@_takes_request
def rehearse(request: Callable[[], Any], model: str, out: Out = None, html: Html = None, as_json: Json = False) -> None:
    """Plan as `plan` does, then run rank 0 of the plan on this machine's GPU, and compare."""
    with refused(), _starting():
        from trueshard.planner.choose_plan import space_of
        from trueshard.planner.planning import check_writable
        from trueshard.planner.simulation import rehearse as rehearsing
    with refused():
        if model.endswith(".toml"):
            raise UserError(f"plan rehearse takes a model alone, and no training configuration: {model}")
        check_writable(out, html)
        rehearsing.require_gpu()
        job = request()
        study, _ = _best(job, sliders=False)
        space, _ = space_of(job)
        rehearsal = rehearsing.rehearse(rehearsing.job_of(study, space.workload), space.hardware)
        _show(study, out, html, as_json, rehearsal)


def diff(
    first: Annotated[Path, typer.Argument(help="A plan, JSON.", metavar="A")],
    second: Annotated[Path, typer.Argument(help="Another.", metavar="B")],
    html: Annotated[Path | None, typer.Option(help="Write both plans side by side on a page.", metavar="FILE")] = None,
) -> None:
    """Say how two plans differ."""
    with refused():
        from trueshard.planner.planning import check_writable, read_plan
        from trueshard.planner.report import compare, page

        plans = [read_plan(path) for path in (first, second)]
        check_writable(html)
        if html is not None:
            names = [str(path) if first.stem == second.stem else path.stem for path in (first, second)]
            replace_text(html, page.comparison(list(zip(names, plans, strict=True))))
        print(compare.diff(*plans))


def calibrate(
    file: Annotated[Path, typer.Argument(help="The hardware file to write.", metavar="FILE.toml")],
    hardware: Annotated[str | None, word("The device of the catalogue that this one resembles.", "NAME")] = None,
) -> None:
    """Measure this machine's device, in about a minute on a GPU, and write a file for --hardware."""
    with refused():
        from trueshard.planner.calibrate import calibrate_here
        from trueshard.planner.planning import check_writable

        if file.suffix != ".toml":
            raise UserError(f"plan calibrate writes TOML: call the file {file.with_suffix('.toml')}")
        check_writable(file)
        with _status("measuring") as status:
            calibration = calibrate_here(hardware, status.update)
        replace_text(file, calibration.toml())
        print(calibration)


COMMANDS: dict[str, Callable[..., None]] = {
    "plan": plan,
    "plan diff": diff,
    "plan calibrate": calibrate,
    "plan rehearse": rehearse,
}
"""The commands of this file by name. A name of two words is one argument to typer, see `joined`."""


def joined(arguments: list[str]) -> list[str]:
    """Return the arguments of the command line with the two words of a command such as ``plan diff`` as one.

    Raises UserError where the second word is the name of a file or folder here, too: it may be meant as the MODEL.
    """
    command = " ".join(arguments[:2])
    if len(arguments) < 2 or command not in COMMANDS:
        return arguments
    second = arguments[1]
    if Path(second).exists():
        raise UserError(
            f"{command}: {second} is a command, and here it is a {'folder' if Path(second).is_dir() else 'file'}, too; "
            f"write ./{second} for the model, or go to another folder for the command"
        )
    return [command, *arguments[2:]]


def _best(request: Request, sliders: bool, curve: bool = False) -> tuple[Study, dict[str, Any] | None]:
    """Return the study of the best plan, or of the one that the request has, and the points of the sliders."""
    from trueshard.planner.choose_plan import grid
    from trueshard.planner.imbalance import solve_with_imbalances

    if request.axes or sliders:
        gc.unfreeze()  # several searches: what each leaves behind is collected
    with _status(f"Building {getattr(request.model, '__name__', request.model)} on fake tensors") as status:
        study = solve_with_imbalances(request, status.update, whole=curve, workers=None)
        return study, grid(request, study, status.update) if sliders else None


def _show(
    study: Study, out: Path | None, html: Path | None, as_json: bool, rehearsal: Any = None, points: Any = None
) -> None:
    """Print a study, and write its files."""
    from trueshard.planner.report import summary

    _write(study, out, html, points)
    if as_json:
        more = {} if rehearsal is None else {"rehearsal": dataclasses.asdict(rehearsal)}
        print(json.dumps(summary.as_json(study) | more, indent=2))
    else:
        print(summary.text(study), *([] if rehearsal is None else ["", rehearsal]), sep="\n")


def _write(study: Study, out: Path | None, html: Path | None, points: Any = None) -> None:
    """Write a study's plan and its page, where files are named."""
    from trueshard.planner.report import page

    if out is not None:
        replace_text(out, study.plan.to_json() + "\n")
    if html is not None:
        replace_text(html, page.page(study, points))


class _Lines:
    """Shows what is done on a stderr that is no terminal: a line, when it is new and half a second has passed."""

    def __init__(self, line: str) -> None:
        self.line = line
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._show, daemon=True)

    def update(self, line: str) -> None:
        self.line = line

    def _show(self) -> None:
        shown = ""
        while not self._ended.wait(0.5):
            if self.line != shown:
                shown = self.line
                print(f"{shown} …", file=sys.stderr, flush=True)

    def __enter__(self) -> _Lines:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()


def _status(line: str) -> Any:
    """Show a line on stderr while a context is open; on a terminal drawn seldom: it takes processor time."""
    if not sys.stderr.isatty():
        return _Lines(line)
    from rich.console import Console

    return Console(stderr=True).status(line, refresh_per_second=4)


@contextlib.contextmanager
def _starting() -> Iterator[None]:
    """Collect no garbage while modules are imported, and none of them later: they leave hardly any, and are many."""
    with _status("Starting the planner"):
        gc.disable()
        try:
            yield
        finally:
            gc.freeze()
            gc.enable()


# Configurations, of other frameworks and for training

_OF_OTHERS = ("hardware", "ranks", "ranks_per_node", "sequence", "microbatch", "memory", "optimizer", "axes")
"""Options of `plan` that go with another framework's configuration, in the place of what it says."""
_OF_TRAINING = ("model", "hardware", "ranks", "ranks_per_node", "overrides", "out", "html", "as_json")
"""Parameters of `plan` that go with a training configuration; so do ``_LENGTH``."""
_LENGTH = ("price", "tokens", "samples")
_OF_RUNS = {*_LENGTH, "lora", "method", "compare", "hours"}
_ALONE = {"hardware", "plan_file", "pipeline", "axes", "sliders", "framework", "of", "overrides", "out"}
"""Parameters of `plan` that do not go with --compare."""


def _plan_for(typed: typer.Context, framework: str, of: str, request: Callable[[], Any], folder: Path | None) -> None:
    """Plan for another framework: print forecasts, and write the plan and, into a folder, the framework's own file."""
    from trueshard.convert import files, fsdp2

    params = typed.params
    if folder is not None:
        files.check_new(folder)
    if framework == "fsdp2":
        _refuse_others(typed, {*params} - _OF_RUNS, "--for fsdp2", "; leave it out")
        study, _ = _best(fsdp2.settled(request()), sliders=False)
        texts, start = {"parallelize.py": fsdp2.module(study.plan)}, "as it says"
        _show(study, None, None, params["as_json"])
    else:
        _refuse_others(typed, (*_OF_OTHERS, "model", "of", "framework", "out", "html", "as_json"), f"--for {framework}")
        single = params | {"ranks": offers.one(params["ranks"])}
        instead = {name: single[name] for name in _OF_OTHERS if _is_typed(typed, name)}
        with _status(f"Building {of or params['model']} on fake tensors") as status:
            advice, texts, start = files.planned(framework, params["model"], of, status.update, instead)
        study = advice.best
        print(json.dumps(advice.as_json(), indent=2) if params["as_json"] else advice)
    _write(study, None if folder else params["out"], params["html"])
    if folder is not None:
        files.write(folder, {**texts, "plan.json": study.plan.to_json() + "\n"})
        if not params["as_json"]:
            print(f"\nWritten: {', '.join(str(folder / name) for name in texts)}; start it {start}")


def _is_typed(typed: typer.Context, name: str) -> bool:
    """True if a parameter has its value from the command line, and not by default."""
    source = typed.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _refuse_others(typed: typer.Context, allowed: Collection[str], what: str, hint: str = "") -> None:
    """Raise UserError for an option on the command line that is not among the parameters ``allowed``."""
    for parameter in typed.command.params:
        if parameter.name not in allowed and _is_typed(typed, parameter.name or ""):
            raise UserError(f"{parameter.opts[0]} does not go with {what}, which says it{hint}")


def _study_of_training(typed: typer.Context, overrides: list[str]) -> Study:
    """Return the study of a training configuration, with the options that go with it."""
    from trueshard.planner.hardware import hardware
    from trueshard.train.parse import load_config
    from trueshard.train.run.forecast import plan as planned

    params = typed.params
    if params["sliders"]:
        raise UserError(
            "--sliders plans a model alone at other ranks, lengths and microbatches; of a training configuration, plan "
            "each with --ranks and --set"
        )
    _refuse_others(typed, (*_OF_TRAINING, *_LENGTH), "a training configuration", "; use --set")
    config = load_config(Path(params["model"]), overrides)
    run = offers.run_of(params, [params["hardware"]])
    ranks = offers.one(params["ranks"])
    with _status(f"Building the model of {params['model']} on fake tensors"):
        study = planned(config, params["hardware"], ranks, params["ranks_per_node"])
    return run.billed(study, hardware(params["hardware"]), config.train.steps)


def _precision(param: str | None, reduce: str | None) -> Any:
    """Return torch's policy for two words such as ``"bf16"`` or ``"float32"``; None where neither is given."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    typed = [("param_dtype", param), ("reduce_dtype", reduce)]
    words = {key: dtype_name(key.replace("_", "-"), word) for key, word in typed if word is not None}
    return MixedPrecisionPolicy(**{key: getattr(torch, word) for key, word in words.items()}) if words else None
