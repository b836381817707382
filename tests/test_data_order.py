"""The order of samples: a pure function of seed and sample index, the same for every number of ranks."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from trueshard.train.data.order import Order, draws, sequence_indices


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
    mixed = Order(5, [1000, 10, 100], [1, 0.5, 2])
    assert mixed.indices(998, 6).tolist() == [548, 1007, 1038, 382, 1086, 1022]
    assert list(islice(draws(5, 1024), 4)) == [565, 730, 361, 700]


def test_large_seed_and_many_samples() -> None:
    taken = sequence_indices(seed=2**63 - 1, first_sample=10**15, count=4, sequences=10**12)
    assert ((taken >= 0) & (taken < 10**12)).all()
    assert len(set(taken.tolist())) == 4


def test_one_source_is_in_the_order_of_its_sequences() -> None:
    np.testing.assert_array_equal(Order(3, [123], [0.7]).indices(50, 200), sequence_indices(3, 50, 200, 123))


def test_mixture_has_its_shares_in_any_window() -> None:
    weights = [0.5, 0.2, 0.2, 0.1]
    order = Order(11, [50] * 4, weights)
    turns = np.array([order.turn(sample)[0] for sample in range(4000)])
    for source, weight in enumerate(weights):
        taken = np.concatenate([[0], np.cumsum(turns == source)])
        for window in (10, 37, 500, 4000):
            counts = taken[window:] - taken[:-window]
            assert np.abs(counts - weight * window).max() <= 2.0


def test_mixture_shares_are_exact_in_the_long_run() -> None:
    order = Order(2, [3, 5], [3, 1])
    counts = np.bincount([order.turn(sample)[0] for sample in range(4 * 1000)])
    assert counts.tolist() == [3000, 1000]
    far = [order.turn(sample) for sample in range(4 * 10**18, 4 * 10**18 + 4)]
    assert sorted(ordinal for source, ordinal in far if source == 0) == [3 * 10**18 + number for number in range(3)]


def test_each_source_of_a_mixture_is_passed_through_in_permutations() -> None:
    order = Order(4, [7, 13], [1, 2])
    taken = order.indices(0, 3 * 13 * 7)
    for first, length in ((0, 7), (7, 13)):
        own = taken[(taken >= first) & (taken < first + length)]
        assert sorted(own[:length]) == list(range(first, first + length))
        assert sorted(own[length : 2 * length]) == list(range(first, first + length))
        assert (own[:length] != own[length : 2 * length]).any()


def test_any_slice_of_a_mixture_is_a_slice_of_the_whole() -> None:
    order = Order(9, [20, 30, 50], [1, 0.3, 2])
    whole = order.indices(0, 300)
    for first, count in [(0, 1), (17, 30), (120, 8), (245, 55)]:
        np.testing.assert_array_equal(order.indices(first, count), whole[first : first + count])


def test_mixture_of_another_seed_begins_elsewhere() -> None:
    first, second = (Order(seed, [20, 30], [1, 2]).indices(0, 60).tolist() for seed in (1, 2))
    assert first != second


def test_given_counts_the_turns_of_each_source() -> None:
    order = Order(7, [1] * 5, [1, 0.3, 2, 5, 0.01])
    turns = [order.turn(sample)[0] for sample in range(300)]
    for samples in (0, 1, 17, 300):
        assert order.given(samples) == [turns[:samples].count(source) for source in range(5)]
