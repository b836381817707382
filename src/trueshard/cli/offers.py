"""Whole runs in `plan`: their length and prices, methods of training, offers to compare."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from trueshard.errors import UserError
from trueshard.files import replace_text

if TYPE_CHECKING:
    from trueshard.planner.planning import Request
    from trueshard.planner.price import Run


def counts(words: Any) -> tuple[int, ...]:
    """Return numbers of ranks, which commas separate."""
    parts = str(words).split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise typer.BadParameter(f"{words!r} is not a whole number of 1 or more, or, with --compare, several: 8,16")
    return tuple(map(int, parts))


def one(ranks: Sequence[int]) -> int:
    """Return the only number; raise UserError for several."""
    if len(ranks) > 1:
        raise UserError("--ranks: several go with --compare alone; give one number")
    return ranks[0]


def run_of(params: Mapping[str, Any], devices: Iterable[str]) -> Run:
    """Return the run that options say; raise ValueError for devices that are not known or have no price."""
    from trueshard.planner.hardware import hardware
    from trueshard.planner.price import Run

    run = Run(params["tokens"], params["samples"], params["price"])
    for device in devices:
        run.price(hardware(device).name)
    return run


def by_method(request: Request, lora: str | None, method: str | None) -> dict[str, Request]:
    """Return the request for each method, by name: ``"full"``, ``"lora 16"``, ``"qlora 16"``; raise UserError."""
    requests = {}
    for base, rank in itertools.product((method or "full").split(","), (lora or "none").split(",")):
        if base not in ("full", "qlora") or not (rank == "none" or rank.isdecimal()):
            raise UserError(f"--method {base} --lora {rank}: write full or qlora, and a rank, such as 16, or none")
        if rank != "none":
            from trueshard.train.run.forecast import with_adapter

            name, kind = ("qlora", "nf4") if base == "qlora" else ("lora", "none")
            requests[f"{name} {rank}"] = with_adapter(request, int(rank), kind)
        elif base == "full":
            requests[base] = request
    if not requests:
        raise UserError("--method qlora trains an adapter: give its rank, such as --lora 16")
    return requests


def show(params: Mapping[str, Any], request: Request, html: Path | None, status: Any) -> None:
    """Compare offers, and print the table, or write it on a page, too."""
    from trueshard.planner.offers import compare
    from trueshard.planner.report import offers as report

    devices = params["compare"].split(",")
    pairs, run = list(itertools.product(devices, params["ranks"])), run_of(params, devices)
    hours = math.inf if params["hours"] is None else params["hours"]
    with status:
        requests = by_method(request, params["lora"], params["method"])
        offers, refused = compare(requests, pairs, run, status.update, hours)
    data = report.as_json(f"{params['model']}: {len(offers)} offers", offers, refused, hours)
    if html is not None:
        replace_text(html, report.page(data))
    print(json.dumps(data, indent=2) if params["as_json"] else report.text(data))
