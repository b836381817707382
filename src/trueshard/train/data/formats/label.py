"""Completions with a `label`, true if it is a good one: those are learnt, and the others left out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trueshard.errors import UserError
from trueshard.train.data.batches import Documents
from trueshard.train.data.formats.completion import CompletionFormat
from trueshard.train.data.sources import Record


class LabelFormat(CompletionFormat):
    noun = "labelled completions"
    columns = (("prompt", "completion", "label"),)
    omitted = "left out as their label is false"
    by_name = (
        'there is no loss for bad answers (KTO) here: set data.format = "label" to learn those whose label is true, or '
        "train with TRL's KTOTrainer (trueshard.integrations)"
    )

    def encode(self, records: Sequence[Record], folder: Path) -> list[Documents]:
        """Return a document a record, none if its label is false."""
        for record in records:
            if (label := record.fields.get("label")) not in (True, False):
                raise UserError(f"{record.where}: label is {label!r:.80}, wanted true or false; correct it")
        encoded = super().encode([record for record in records if record.fields["label"]], folder)
        return [encoded.pop(0) if record.fields["label"] else () for record in records]
