"""Checkpoints: one meaning at any world size.

- ``writer`` collects, agrees and lays out (``state``, ``randomness``, ``layout``, ``together``), and writes through a
  ``target``, in the ``background`` if asked. ``reader`` loads from a ``catalogue`` of tensors in files, whoever wrote
  them (``store``, ``tensorfile``, ``manifest``, ``naming``), into models (``materialise``, ``filling``) and
  ``optimizers``.
- ``dcp``, ``dcp_keys`` and ``dcp_parts`` make such a catalogue of a directory of torch.distributed.checkpoint.
- ``checking``, ``inspecting`` and ``retention`` look at checkpoints without a model. ``exporting`` writes them in other
  forms (``source``, ``adapters``, ``dcp_export``).
"""

from trueshard.checkpoint.background import Saving
from trueshard.checkpoint.checking import Checked, DamagedCheckpoint, check
from trueshard.checkpoint.exporting import export
from trueshard.checkpoint.found import Found
from trueshard.checkpoint.inspecting import Compared, Inspected, inspect
from trueshard.checkpoint.reader import load
from trueshard.checkpoint.retention import Checkpoints, latest
from trueshard.checkpoint.writer import save

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
