"""Compare offers (a device, how many, a method of training) by what a whole run costs on each.

- Every offer is predicted as a search predicts its plans, from probes that all offers of a method share.
- Offers that may be the cheapest are studied exactly, as ``solve`` alone would, until the cheapest one was. How
  wrong predictions were there tells how far to trust the others.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from trueshard.planner.choose_plan import Progress, shared_simulations, solve, space_of
from trueshard.planner.planning import Request
from trueshard.planner.price import Bill, Run
from trueshard.planner.search.evaluator import Evaluator, Expected
from trueshard.planner.search.explain import frugal
from trueshard.planner.search.search import DOUBT, checked, proposals
from trueshard.planner.workload import NothingFits

GAIN = 0.01
"""Part by which a predicted offer must be cheaper than a studied one to count as cheaper: as much may be an error."""

UNSURE = 0.1
"""Part of the budget up to which an offer that is predicted to lack memory is studied if it would be the cheapest: what
the allocator reserves above live bytes is a guess."""


@dataclass(frozen=True, eq=False)
class Offer:
    """Devices and a method, and what they do."""

    method: str
    request: Request
    """The model by that method, on that many of that device."""
    search: Evaluator
    run: Run
    expected: Expected
    """Speed and memory of the best plan, or of the most frugal one where none fits."""
    predicted: Expected | None = None
    """Expectation before it was studied; None if it was not."""

    @functools.cached_property
    def bill(self) -> Bill:
        """Costs of the run."""
        space = self.search.space
        return self.run.bill(1 / self.expected.cost, space.ranks, space.workload.sequence, space.hardware)

    @property
    def name(self) -> str:
        """Return devices and method in words."""
        return f"{self.request.ranks:,} × {self.request.hardware}"

    @property
    def cost(self) -> float:
        """Money, or hours of all devices where there are no prices; more by ``GAIN`` while it is predicted."""
        return (self.bill.money or self.bill.device_hours) * (1.0 if self.expected.is_exact else 1 + GAIN)

    @property
    def lack(self) -> float:
        """Bytes of a rank by which nothing fits; 0 if something does."""
        return 0.0 if self.expected.may_fit else self.expected.excess

    def serves(self, hours: float, doubt: float = 0.0, unsure: float = 0.0) -> bool:
        """Return whether it fits, and its run ends within ``hours``; with doubts, whether it may."""
        return self.lack <= unsure * self.expected.reserved and self.bill.hours * (1 - doubt) <= hours


def compare(
    requests: Mapping[str, Request],
    devices: Sequence[tuple[str, int]],
    run: Run,
    progress: Progress,
    hours: float = math.inf,
    workers: int | None = None,
) -> tuple[list[Offer], list[str]]:
    """Return what every offer does by every method, as ``ordered``, and for those that are refused a sentence each.

    The first, if it fits and ends within ``hours``, was studied. Nothing is offloaded unless a request says so.
    ``requests``: by method; ``devices``: (device, number of them); ``progress``, ``workers``: as of ``solve``.
    """
    searches: list[tuple[str, Request, Evaluator]] = []
    refused: list[str] = []
    with contextlib.ExitStack() as stack:
        for method, request in requests.items():
            progress(f"Building the model ({method}) on fake tensors")
            request = replace(request, offload=request.offload or "none")
            several = [replace(request, hardware=device, ranks=ranks) for device, ranks in devices]
            shared = stack.enter_context(shared_simulations(several[0], workers))
            for one in several:
                try:
                    search = Evaluator(space_of(one, shared)[0], simulations=shared)
                except ValueError as error:
                    refused.append(f"{method} on {one.ranks:,} × {one.hardware} is refused: {error}.")
                    continue
                search.start_probes()
                searches.append((method, one, search))
            _ = shared.check  # beside the predictions
        progress(f"Predicting {len(searches)} offers")
        offers = [Offer(*search, run, _prediction(search[-1])) for search in searches]
        while (best := next_study(offers, hours)) is not None:
            progress(f"Studying {best.method} on {best.name}")
            exact = _study(best, workers)
            offers = [_told_by(offer, best, exact) for offer in offers]
    return ordered(offers, hours), refused


def _told_by(offer: Offer, studied: Offer, exact: Expected) -> Offer:
    """Return an offer after a study: predictions of a method on a device are wrong by nearly the same factor."""
    if offer is studied:
        return replace(offer, expected=exact, predicted=offer.expected)
    is_like = (offer.method, offer.request.hardware) == (studied.method, studied.request.hardware)
    factor = exact.cost / studied.expected.cost if is_like and exact.may_fit and not offer.predicted else 1.0
    return replace(offer, expected=replace(offer.expected, cost=offer.expected.cost * factor))


def ordered(offers: Iterable[Offer], hours: float) -> list[Offer]:
    """Return first the offers that serve, then those that are too late, each the cheapest first, then the others."""
    return sorted(offers, key=lambda offer: (not offer.serves(hours), offer.lack, offer.cost))


def _prediction(search: Evaluator) -> Expected:
    offload = search.space.offloads[0]
    return search.expected(min(proposals(search, offload) or [frugal(search, offload)], key=search.order))


def _study(offer: Offer, workers: int | None) -> Expected:
    shared = offer.search.simulations
    try:
        study = checked(shared, lambda: solve(offer.request, workers=workers, shared=shared, faster_than=0.0))
    except NothingFits as error:
        study = error.study
    return Expected.of(study.forecast)


def next_study(offers: Sequence[Offer], hours: float) -> Offer | None:
    """Return the offer to be studied next: one that may be cheaper than all that were; None if there is none."""
    studied = [offer for offer in offers if offer.predicted is not None]
    best = min((offer.cost for offer in studied if offer.serves(hours)), default=math.inf)
    left = [offer for offer in offers if offer.predicted is None and offer.serves(hours, DOUBT, UNSURE)]
    offer = min(left, key=lambda offer: offer.cost, default=None)
    return offer if offer is not None and offer.cost < best else None
