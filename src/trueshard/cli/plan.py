"""Options of ``trueshard plan`` and ``trueshard verify``, with the words and defaults of ``shard()``'s own."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.console import Console

from trueshard.choices import OFFLOAD_WORDS, RECOMPUTE_WORDS, RESHARD_WORDS, Choices, PrecisionWord, reshard_word
from trueshard.errors import UserError, refused
from trueshard.files import replace_text
from trueshard.plans import dtype_name

Units = Annotated[list[str] | None, typer.Option(help="What is gathered together; repeatable.", metavar="NAME")]
ReshardAfterForward = Annotated[
    str, typer.Option(help=f"{', '.join(RESHARD_WORDS)}, a number of ranks, or auto.", metavar="WORD")
]
ActivationCheckpointing = Annotated[str, typer.Option(help=f"{', '.join(RECOMPUTE_WORDS)}, or auto.", metavar="WORD")]
MixedPrecision = Annotated[str | None, typer.Option(help=f"{' or '.join(get_args(PrecisionWord))}.", metavar="DTYPE")]
Compile = Annotated[bool, typer.Option("--compile", help="Every block is compiled.")]
Offload = Annotated[str, typer.Option(help=f"{' or '.join(OFFLOAD_WORDS)}.", metavar="WORD")]
Optimizer = Annotated[str | None, typer.Option(help="adamw, sgd, muon, or a class.", metavar="NAME")]
Tokens = Annotated[
    int | None, typer.Option("--sequence", help="Tokens of a sample.", metavar="N", min=1, show_default=False)
]
PlanFile = Annotated[Path | None, typer.Option("--plan", help="Take this plan, JSON.", metavar="FILE")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override a setting, such as train.steps=100; repeatable.", metavar="KEY=VALUE"),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _count(what: str) -> Any:
    return typer.Option(help=what, metavar="N", min=1, show_default=False)


def _dtype(what: str) -> Any:
    return typer.Option(help=f"{what}: bf16, fp16 or fp32.", metavar="DTYPE", show_default=False)


def plan(
    model: Annotated[
        str, typer.Argument(help="A folder with a config.json, that file, or file.py:factory.", metavar="MODEL")
    ] = "",
    hardware: Annotated[str, typer.Option(help="A device of the catalogue, or a TOML file.", metavar="NAME")] = "h100",
    ranks: Annotated[int, typer.Option(help="Processes, one a device.", metavar="N", min=1)] = 8,
    ranks_per_node: Annotated[int | None, _count("Devices of a node.")] = None,
    replicate: Annotated[int | None, _count("Whole copies of the model, each over a part of the ranks.")] = None,
    sequence: Tokens = None,
    microbatch: Annotated[int | None, _count("Samples of a rank in one forward.")] = None,
    accumulation: Annotated[int | None, _count("Microbatches a step.")] = None,
    global_batch: Annotated[int | None, _count("Samples of all ranks in a step.")] = None,
    param_dtype: Annotated[str | None, _dtype("What units compute in")] = None,
    reduce_dtype: Annotated[str | None, _dtype("What gradients are reduced in")] = None,
    storage_dtype: Annotated[str | None, _dtype("What parameters are stored in")] = None,
    optimizer: Optimizer = None,
    units: Units = None,
    reshard_after_forward: ReshardAfterForward = "auto",
    activation_checkpointing: ActivationCheckpointing = "auto",
    offload: Annotated[
        str | None, typer.Option(help="none, cpu, or auto (left out: if nothing else fits).", metavar="WORD")
    ] = None,
    compiled: Compile = Choices.compile,
    memory: Annotated[
        str | None, typer.Option(help="What torch may reserve on a rank, such as 70GiB.", metavar="SIZE")
    ] = None,
    given: PlanFile = None,
    diff: Annotated[
        tuple[Path, Path] | None, typer.Option(help="Say how two plans differ.", metavar="A B", show_default=False)
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the plan, for shard(plan=...).", metavar="FILE")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with memory and time line.", metavar="FILE")] = None,
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="Run rank 0 on this machine's GPU, and compare.", show_default=False)
    ] = False,
    as_json: Json = False,
) -> None:
    """Say what training a model costs on a cluster, and choose how to shard it. Needs neither GPUs nor weights."""
    from trueshard.planner.planning import Request, check_writable, read_plan
    from trueshard.planner.report import compare, page, report

    with refused():
        if diff is not None:
            print(compare.diff(*map(read_plan, diff)))
            return
        if not model:
            raise UserError("plan needs a MODEL: a folder with a config.json, that file, or file.py:factory")
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
            units=units or Choices.units,
            reshard_after_forward=reshard_word(reshard_after_forward),
            activation_checkpointing=activation_checkpointing,
            mixed_precision=_precision(param_dtype, reduce_dtype) or "auto",
            compile=compiled,
            offload=offload,
            plan=None if given is None else read_plan(given),
        )
        for file in (out, html):
            if file is not None:
                check_writable(file)
        with Console(stderr=True).status(f"Building {model} on fake tensors") as status:
            from trueshard.planner.simulation import rehearse as rehearsing
            from trueshard.planner.solve import solve, space_of

            if rehearse:
                rehearsing.require_gpu()
            found = solve(request, status.update)
        if out is not None:
            replace_text(out, found.plan.to_json() + "\n")
        if html is not None:
            replace_text(html, page.page(found))
        rehearsal = None
        if rehearse:
            space, _ = space_of(request)
            rehearsal = rehearsing.rehearse(rehearsing.job_of(found, space.workload), space.hardware)
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


def verify(
    subject: Annotated[
        str, typer.Argument(help="A training configuration, or file.py:factory.", metavar="CONFIG.toml|FILE.py:FACTORY")
    ],
    nproc: Annotated[int, typer.Option("--nproc", help="Processes to hold against one.", metavar="N", min=1)] = 2,
    layers: Annotated[
        int | None, typer.Option(help="Keep so many blocks of each list of blocks.", metavar="N", min=1)
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps.", metavar="N", min=2)] = 4,
    seed: Annotated[int, typer.Option(help="What everything random begins with.", metavar="N")] = 0,
    overrides: Overrides = None,
    optimizer: Optimizer = None,
    sequence: Tokens = None,
    given: PlanFile = None,
    units: Units = None,
    reshard_after_forward: ReshardAfterForward = str(Choices.reshard_after_forward),
    mixed_precision: MixedPrecision = None,
    activation_checkpointing: ActivationCheckpointing = str(Choices.activation_checkpointing),
    compiled: Compile = Choices.compile,
    offload: Offload = Choices.offload,
    replicate: Annotated[int, typer.Option(help="Copies of the model (HSDP).", metavar="N", min=1)] = 1,
    timeout: Annotated[float, typer.Option(help="For each of the three runs.", metavar="SECONDS", min=1)] = 600.0,
    html: Annotated[Path | None, typer.Option(help="Write the report as a page.", metavar="FILE")] = None,
    as_json: Json = False,
) -> None:
    """Train sharded and on one process, and say whether anything differs; exit code 1 if it does.

    A configuration has its own optimizer and [shard]: change them by --set. Their options here are for a factory.
    """
    import trueshard
    from trueshard.planner.planning import check_writable, read_plan

    if int(os.environ.get("RANK", "0")):  # under torchrun the first process does it, with processes of its own
        return
    if ".py" not in subject and not Path(subject).is_file():
        raise UserError(f"there is no {subject!r}: give a training configuration (TOML), or file.py:factory")
    with refused():
        if html is not None:
            check_writable(html)
        report = trueshard.verify(
            subject,
            nproc=int(os.environ.get("WORLD_SIZE", nproc)),
            layers=layers,
            steps=steps,
            seed=seed,
            overrides=overrides or (),
            optimizer=optimizer,
            sequence=sequence,
            plan=None if given is None else read_plan(given),
            units=units or Choices.units,
            reshard_after_forward=reshard_word(reshard_after_forward),
            mixed_precision=mixed_precision,
            activation_checkpointing=activation_checkpointing,
            compile=compiled,
            offload=offload,
            replicate=replicate,
            timeout=timeout,
        )
        if html is not None:
            from trueshard.verification.report import write_page

            write_page(report, html)
    print(report.to_json() if as_json else report)
    if not report.held:
        raise typer.Exit(1)
