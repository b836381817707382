"""The axes of a mesh, one record each: along what ranks divide a model and its data.

Everything that goes through axes (meshes, plans, forecasts, refusals, configurations, the search) goes through this
table; what an axis does to a model is in ``parallel/``, a file an axis. Order is that of a mesh: neighbouring ranks lie
along the last axis, so what talks most stands last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One way in which ranks divide the work."""

    name: str
    """Its name in meshes, forecasts and reports; of an axis with ``is_option`` also the option with its ranks."""
    is_option: bool = True
    """``shard()`` and ``Plan`` have an option of its name. The mesh alone says how many ranks replicate or shard, and a
    pipeline is cut by the user."""
    place: Literal["mesh", "folded", "stages"] = "mesh"
    """``"mesh"``: a dimension of its own. ``"folded"``: neighbours among all ranks of a copy, whatever other axes they
    are on, so it multiplies with none. ``"stages"``: outside of the mesh of ``shard()``, which is that of a stage."""
    gradients: Literal["summed", "sharded", "apart"]
    """``"summed"``: added up over its ranks. ``"sharded"``: reduced over its ranks as shards. ``"apart"``: each rank
    has those of its own parameters, so they are not averaged over it."""
    same_samples: bool = False
    """True if its ranks read the same samples, of which each computes a part."""
    in_node: bool = False
    """True if its ranks talk inside of every block: the search keeps them inside a node, where links are fast."""
    resolve: str = ""
    """``"module:function"`` under ``trueshard``: (index of a model, plan, sizes of the mesh) → the plan for it; raises
    ValueError, naming the module that does not fit. Nothing is touched."""

    def resolved(self, index: Any, plan: Any, sizes: Mapping[str, int]) -> Any:
        """Return ``plan`` for a model, or raise ValueError if its ranks cannot share the model so."""
        if not self.resolve:
            return plan
        module, _, function = self.resolve.partition(":")
        return getattr(import_module(f"trueshard.{module}"), function)(index, plan, sizes)


AXES = (
    # Ranks that run some of the blocks each.
    Axis(name="pipeline", is_option=False, place="stages", gradients="apart", same_samples=True),
    # Ranks that hold a copy of the model each, and those that hold a shard of each parameter.
    Axis(name="replicate", is_option=False, gradients="summed"),
    Axis(name="shard", is_option=False, gradients="sharded"),
    # Ranks that share each sequence, each matrix, and the experts of each layer.
    Axis(name="context", gradients="sharded", same_samples=True, resolve="parallel.context:resolve"),
    Axis(name="tensor", gradients="apart", same_samples=True, in_node=True, resolve="parallel.tensor:resolve"),
    Axis(name="experts", place="folded", gradients="apart", resolve="parallel.experts:resolve"),
)

MESH = tuple(axis.name for axis in AXES if axis.place == "mesh")
"""Names of a mesh's dimensions, in order."""
DATA = tuple(axis.name for axis in AXES if axis.place == "mesh" and not axis.same_samples)
"""Dimensions whose ranks read different samples: (replicate, shard)."""
SHARED = tuple(name for name in MESH if name not in DATA)
"""Dimensions that an option asks for."""
FOLDED = tuple(axis.name for axis in AXES if axis.place == "folded")
"""Axes over ranks that lie on other axes already."""
OPTIONS = tuple(axis.name for axis in AXES if axis.is_option)
"""Options of ``shard()`` that are a number of ranks."""


def ranks_along(options: Any, axis: str) -> int:
    """Return the ranks along an axis that options, a plan or a request ask for; 1 for none, or for no number."""
    value = getattr(options, axis, 1)
    ranks = value.get("ranks", 1) if isinstance(value, Mapping) else value
    return ranks if type(ranks) is int else 1  # what is no number is refused where options are checked


def sizes_of(options: Any) -> dict[str, int]:
    """Return the ranks along each dimension of the mesh that options ask for, by name."""
    return {name: ranks_along(options, name) for name in SHARED}
