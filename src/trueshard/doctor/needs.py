"""Which packages the installed distribution asks for, by extra, and which of them are there.

Read from the metadata that pip wrote when it installed TrueShard, so that what is said here is what `pip install` would
do. An extra that names other extras of TrueShard has their packages too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

OURS = "trueshard"


@dataclass(frozen=True)
class Need:
    """A package that is asked for."""

    name: str
    wants: str
    """Which versions, such as ">=2.11"; empty for any."""
    found: str | None
    """The version that is installed, or None."""
    fits: bool

    def __str__(self) -> str:
        """Such as "torch 2.13.0", "peft 0.9 (wants >=0.17)" or "peft (missing)"."""
        if self.found is None:
            return f"{self.name} (missing)"
        return f"{self.name} {self.found}" + ("" if self.fits else f" (wants {self.wants})")


def extras() -> list[str]:
    """The extras of the installed distribution."""
    return metadata.metadata(OURS).get_all("Provides-Extra") or []


def needs(extra: str = "") -> list[Need]:
    """What TrueShard itself asks for (`extra=""`), or what an extra asks for beyond that.

    Raises:
        importlib.metadata.PackageNotFoundError: TrueShard was not installed, but is found as a folder.
    """
    return list({need.name: need for need in _needs(extra)}.values())


def _needs(extra: str) -> Iterator[Need]:
    for text in metadata.requires(OURS) or []:
        requirement = Requirement(text)
        marker = requirement.marker
        without = marker is None or marker.evaluate({"extra": ""})
        if without is not (extra == "") or not (without or (marker is not None and marker.evaluate({"extra": extra}))):
            continue
        if canonicalize_name(requirement.name) == OURS:
            for other in requirement.extras:
                yield from _needs(other)
            continue
        yield _need(requirement)


def _need(requirement: Requirement) -> Need:
    try:
        found = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        found = None
    fits = found is not None and requirement.specifier.contains(found, prereleases=True)
    return Need(requirement.name, str(requirement.specifier), found, fits)
