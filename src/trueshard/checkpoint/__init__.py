"""Checkpoints: the same content at any world size.

``saving`` collects the content (``state``), assigns files (``layout``) and writes them (``writing``). ``loading`` reads
from a ``catalogue`` of tensors in files, whoever wrote them. All else needs no model.
"""
