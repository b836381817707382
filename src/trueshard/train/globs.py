"""Globs over parameter names: `vision_tower.*` is also found as `model.vision_tower.…`."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Collection, Iterable

from trueshard.errors import UserError


def matching(globs: Iterable[str], names: Collection[str], key: str, what: str = "parameter") -> list[str]:
    """Those of `names` that one of `globs` matches, whole or from one of its dots on, in the order of the globs.

    Raises `UserError`, with `key`, for a glob that matches none.
    """
    found: dict[str, None] = {}
    for glob in globs:
        hits = [name for name in names if fnmatch.fnmatchcase(name, glob) or fnmatch.fnmatchcase(name, f"*.{glob}")]
        if not hits:
            near = difflib.get_close_matches(glob, names, n=1, cutoff=0.3)
            hint = f"the nearest is {near[0]}" if near else f"there are {len(names)}"
            raise UserError(f"{key}: {glob!r} matches no {what}; {hint}")
        found |= dict.fromkeys(hits)
    return list(found)
