"""A comparison of offers as text, as JSON and as a page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from trueshard.planner.offers import GAIN, Offer
from trueshard.planner.report.frame import framed
from trueshard.planner.report.summary import indented, listed
from trueshard.text import size

HEAD = ("", "offer", "method", "a second", "hours", "GPU hours", "money", "kWh", "memory of a rank")


def text(comparison: dict[str, Any]) -> str:
    """Return what ``as_json`` returned as a table, and the answer."""
    rows = [tuple(row["cells"]) for row in comparison["offers"]]
    table = indented([HEAD, *rows], range(3, 8))
    return "\n".join([comparison["headline"], *table, "", *listed("Answer", comparison["notes"])])


def page(comparison: dict[str, Any]) -> str:
    """Return what ``as_json`` returned as a page."""
    data = {"head": HEAD, **comparison}
    return framed(comparison["headline"], text(comparison), data, __package__, "offers.html", "offers.js")


def as_json(headline: str, offers: Sequence[Offer], refused: Sequence[str], hours: float) -> dict[str, Any]:
    """Return the offers' figures, as ``cells`` in words, in the order of ``compare``; the answer as ``notes``."""
    rows = [_row(offer, offer.serves(hours)) for offer in offers]
    return {"headline": headline, "offers": rows, "notes": [*_notes(offers, hours), *refused]}


def _row(offer: Offer, serves: bool) -> dict[str, Any]:
    expected, bill, ranks = offer.expected, offer.bill, offer.request.ranks
    verdict = f"lacks {size(offer.lack)}" if offer.lack else size(expected.reserved) + ("" if serves else ", too late")
    verdict += f" of {size(expected.reserved - expected.excess)}" if offer.lack or serves else ""
    costs = [""] * 5 if offer.lack else [f"{ranks / expected.cost:,.0f}", *bill.figures().values()]
    row: dict[str, Any] = {"method": offer.method, "hardware": offer.request.hardware, "ranks": ranks, "serves": serves}
    row |= {"is_exact": expected.is_exact, "tokens_per_second_per_rank": 1 / expected.cost, "bill": asdict(bill)}
    row |= {"reserved_bytes": int(expected.reserved), "lacking_bytes": int(offer.lack)}
    return row | {"cells": ["*" if expected.is_exact else "~", offer.name, offer.method, *costs, verdict]}


def _notes(offers: Sequence[Offer], hours: float) -> list[str]:
    """Return the answer, and how far to trust the table."""
    within = f" and ends within {hours:g} hours" if hours < math.inf else ""
    notes = [f"Nothing fits{within}."]
    if offers and (best := offers[0]).serves(hours):
        figures = ", ".join(f"{words} {name}" for name, words in best.bill.figures().items() if words)
        figures += f", for a run of {best.bill.amount:,.0f} tokens"
        notes = [f"The cheapest that fits{within}: {best.method} on {best.name}: {figures}."]
        notes += ["Without --price the cheapest is that of the fewest GPU hours."] if best.bill.money is None else []
    if pairs := [(offer.predicted, offer.expected) for offer in offers if offer.predicted]:
        speed = max((exact.cost / predicted.cost - 1 for predicted, exact in pairs), key=abs)
        memory = max((predicted.reserved / exact.reserved - 1 for predicted, exact in pairs), key=abs)
        trust = f"that of what is simulated was off by up to {speed:+.1%} in speed, {memory:+.1%} in memory"
        notes += [f"* is simulated, as by `trueshard plan` with --offload none; ~ is a prediction: {trust}."]
        notes += [f"A prediction counts as cheaper from {GAIN:.0%} on."]
    return notes
