"""Checkpoints that mean the same model at any world size."""

from trueshard.checkpoint.reader import load
from trueshard.checkpoint.writer import save

__all__ = ["load", "save"]
