"""Every optimizer that steps on shards or by owners has the same bits at 1 and 3 ranks with ``exact=True``."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from exact_optimizers import compared, names
from parity import Pool

QUICK = [("torch.optim", "AdamW"), ("torch.optim", "Muon")]
REFUSED = {"fused=True", "differentiable=True", "LBFGS", "SparseAdam"}
ALONE = {"capturable=True"}


def batches() -> list[object]:
    """(names, numbers of ranks): the rest at 3 ranks, where parts are uneven."""
    every = [each for each in names() if each not in QUICK]
    parts = [every[at : at + 12] for at in range(0, len(every), 12)]
    return [(QUICK, (2, 3)), *(pytest.param(part, (3,), marks=pytest.mark.rest) for part in parts)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("given", "counts"), batches(), ids=lambda each: f"{each[0][1]} and more" if isinstance(each, list) else ""
)
def test_an_optimizer_has_the_same_bits_at_any_number_of_ranks(
    given: Sequence[tuple[str, str]], counts: Sequence[int], pool: Pool
) -> None:
    for (_, name), found in zip(given, compared(pool, given, counts), strict=True):
        refused = any(word in name for word in REFUSED)
        alone = any(word in name for word in ALONE)
        expected = "refused: " if refused else "does not run" if alone else "same bits"
        assert found.startswith(expected), (name, found)
