"""Time, money and energy of a whole run, from the speed of a step. Prices are the user's own: none is known here."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trueshard.errors import one_line
from trueshard.planner.hardware import Hardware
from trueshard.text import nearest, tomllib

if TYPE_CHECKING:
    from trueshard.planner.workload import Study

USUAL = 1e9
"""Tokens of a run whose length nobody said."""


@dataclass(frozen=True)
class Bill:
    """Costs of a run: of its devices alone, without hosts and cooling, and without time lost to failures."""

    amount: float
    """Tokens that are trained on; samples, where these are no sequences."""
    hours: float
    device_hours: float
    """Hours of all devices together."""
    money: float | None
    """Currency: that of the price; None without one."""
    kilowatt_hours: float | None
    """Energy at the most that the devices draw, by their data sheet; None if that is not known."""

    def figures(self) -> dict[str, str]:
        """Return the figures in words, by name; "" for one that is not known."""
        values = {"hours": self.hours, "GPU hours": self.device_hours, "money": self.money, "kWh": self.kilowatt_hours}
        words = {name: f"{value:,.{1 if value > 9.9 else 3}f}" for name, value in values.items() if value is not None}
        return dict.fromkeys(values, "") | words


@dataclass(frozen=True)
class Run:
    """Length of a run, and prices, as far as they are given."""

    tokens: float | None = None
    samples: float | None = None
    prices: str | None = None
    """Money for an hour of one device, ``"2.49"``, or a TOML file with a line ``device = money`` for each."""

    def __post_init__(self) -> None:
        given = [count for count in (self.tokens, self.samples) if count is not None]
        if len(given) > 1 or not all(1 <= count < math.inf for count in given):
            raise ValueError("tokens, or samples, must be one number, 1 or more: that of the whole run")

    def price(self, device: str) -> float | None:
        """Return the money for an hour of a device; None if nothing is said; raise ValueError for what is no price."""
        if self.prices is None:
            return None
        try:
            if (table := self._table) and device not in table:
                raise ValueError(f"no price of {device} is in it: add `{device} = 2.49`.{nearest(device, table)}")
            if 0 < (price := float(str(table[device]) if table else self.prices)) < math.inf:
                return price
            raise ValueError("it must be more than 0")
        except (OSError, ValueError) as error:
            words = "write money for an hour of a device, 2.49, or name a TOML file of prices by device"
            raise ValueError(f"price={self.prices}: {one_line(error)}; {words}") from None

    @functools.cached_property
    def _table(self) -> dict[str, Any]:
        """Prices by device, of the file; empty if one price is for all."""
        is_file = self.prices is not None and self.prices.endswith(".toml")
        return tomllib.loads(Path(str(self.prices)).read_text(encoding="utf-8")) if is_file else {}

    def bill(self, rate: float, ranks: int, sequence: int, device: Hardware, amount: float = USUAL) -> Bill:
        """Return the costs on devices that do ``rate`` tokens a second each; ``amount``: where no length is given."""
        if self.tokens is not None and sequence == 1:
            raise ValueError("tokens: the model's samples are no sequences; give samples")
        amount = self.tokens or (self.samples or 0) * sequence or amount
        hours, price = amount / (rate * ranks) / 3600, self.price(device.name)
        money, energy = price and hours * ranks * price, device.watts and hours * ranks * device.watts / 1000
        return Bill(amount, hours, hours * ranks, money, energy)

    def billed(self, study: Study, device: Hardware, steps: int | None = None) -> Study:
        """Return a study with the costs of a run of its steps and phases; as it is if nothing says how long that is."""
        forecast, times = study.forecast, [phase.seconds and phase.seconds / phase.every for phase in study.phases]
        if self == Run() and (steps is None or None in times):
            return study
        if None in times:
            raise ValueError("tokens, samples and price: the time of a server's answers is not known; leave them out")
        tokens = forecast.tokens_per_second_per_rank * forecast.step_seconds
        rate = tokens / (sum(filter(None, times)) or forecast.step_seconds)
        amount = USUAL if steps is None else steps * tokens * forecast.ranks
        return replace(study, bill=self.bill(rate, forecast.ranks, forecast.sequence, device, amount))
