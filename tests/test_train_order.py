"""The order of samples: a pure function of seed and sample index, the same for every number of ranks."""

from __future__ import annotations

import numpy as np
import pytest

from trueshard.train.data.order import sequence_indices


@pytest.mark.parametrize("sequences", [1, 2, 3, 5, 64, 1000, 4097])
def test_each_pass_takes_every_sequence_once(sequences: int) -> None:
    taken = sequence_indices(seed=7, first_sample=0, count=3 * sequences, sequences=sequences)
    for number in range(3):
        assert sorted(taken[number * sequences : (number + 1) * sequences]) == list(range(sequences))


def test_passes_and_seeds_differ() -> None:
    taken = sequence_indices(seed=7, first_sample=0, count=2000, sequences=1000)
    assert (taken[:1000] != taken[1000:]).any()
    assert (taken != sequence_indices(seed=8, first_sample=0, count=2000, sequences=1000)).any()


def test_any_slice_is_a_slice_of_the_whole() -> None:
    whole = sequence_indices(seed=3, first_sample=0, count=500, sequences=123)
    for first, count in [(0, 1), (17, 30), (120, 8), (245, 255)]:
        np.testing.assert_array_equal(sequence_indices(3, first, count, 123), whole[first : first + count])


def test_order_is_shuffled() -> None:
    taken = sequence_indices(seed=0, first_sample=0, count=10_000, sequences=10_000)
    assert abs(np.corrcoef(taken, np.arange(10_000))[0, 1]) < 0.05
    assert abs(np.corrcoef(taken[:-1], taken[1:])[0, 1]) < 0.05


def test_order_stays_what_it_was() -> None:
    """Runs are resumed by later versions: these numbers may never change."""
    assert sequence_indices(seed=5, first_sample=998, count=6, sequences=1000).tolist() == [464, 174, 238, 528, 14, 682]


def test_large_seed_and_many_samples() -> None:
    taken = sequence_indices(seed=2**63 - 1, first_sample=10**15, count=4, sequences=10**12)
    assert ((taken >= 0) & (taken < 10**12)).all()
    assert len(set(taken.tolist())) == 4
