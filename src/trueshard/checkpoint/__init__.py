"""Checkpoints: the same content at any world size.

- ``saving`` collects the content (``state``), compares it between ranks (``ranks``), assigns files (``layout``) and
  writes them (``writing``).
- ``loading`` reads from a ``catalogue`` of tensors in files, whoever wrote them: ``tensorfile`` and ``manifest`` are
  the format, ``naming`` finds a model's tensors by name, ``materialise`` gives memory to models on the meta device, and
  ``optimizers`` matches groups and state. ``dcp_keys`` makes a catalogue of a directory of torch.distributed.checkpoint
  (``dcp``).
- ``checking``, ``inspecting``, ``retention`` need no model. ``exporting`` writes other formats (``adapters``, ``dcp``).
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
