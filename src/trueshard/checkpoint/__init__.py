"""Checkpoints: the same content at any world size.

``saving`` collects the content (``state``), assigns files (``layout``) and writes them (``writing``). ``loading`` reads
from a ``catalogue`` of tensors in files, whoever wrote them. All else needs no model.
"""

from trueshard.checkpoint.catalogue import latest
from trueshard.checkpoint.checking import Checked, DamagedCheckpoint, check
from trueshard.checkpoint.exporting import export
from trueshard.checkpoint.inspecting import Compared, Inspected, inspect
from trueshard.checkpoint.loading import Found, load
from trueshard.checkpoint.retention import Checkpoints
from trueshard.checkpoint.saving import Saving, save

__all__ = [
    "Checked",
    "Checkpoints",
    "Compared",
    "DamagedCheckpoint",
    "Found",
    "Inspected",
    "Saving",
    "check",
    "export",
    "inspect",
    "latest",
    "load",
    "save",
]
