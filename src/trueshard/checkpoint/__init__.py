"""Checkpoints: one meaning at any world size.

- ``writer`` collects, agrees and lays out (``state``, ``randomness``, ``layout``, ``together``), and writes through a
  ``target``, in the ``background`` if asked. ``reader`` loads from a ``catalogue`` of tensors in files, whoever wrote
  them (``store``, ``tensorfile``, ``manifest``, ``naming``), into models (``materialise``, ``filling``) and
  ``optimizers``.
- ``checking`` and ``retention`` look at checkpoints without a model.
"""

from trueshard.checkpoint.background import Saving
from trueshard.checkpoint.checking import Checked, DamagedCheckpoint, check
from trueshard.checkpoint.found import Found
from trueshard.checkpoint.reader import load
from trueshard.checkpoint.retention import Checkpoints, latest
from trueshard.checkpoint.writer import save

__all__ = ["Checked", "Checkpoints", "DamagedCheckpoint", "Found", "Saving", "check", "latest", "load", "save"]
