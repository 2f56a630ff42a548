"""Counter-based noise: a pure function of its counters, and random enough."""

import math

import pytest
import torch

from segment_env.batch import Samples, pack
from segment_env.noise import ACTIONS, BYTES, action_noise, hashed, uniform


def test_a_row_alone_is_the_row_in_a_batch():
    sequence, sample = torch.tensor([3, 3, 10**12, 0]), torch.tensor([0, 1, 0, 5])
    u = action_noise(7, sequence, sample, 40)
    for b in range(4):
        alone = action_noise(7, sequence[b : b + 1], sample[b : b + 1], 40)
        assert torch.equal(alone[0], u[b])
    assert torch.equal(action_noise(7, sequence, sample, 15), u[:, :15])


def test_order_of_sequences_does_not_matter():
    order = torch.tensor([4, 0, 3, 1, 2])
    batch, samples = pack([b"x"] * 5, seed=1), Samples([2, 1, 2, 3, 1])
    by_counts = {}
    for permutation in (torch.arange(5), order):
        shuffled = Samples([samples.counts[s] for s in permutation.tolist()])
        u = action_noise(1, batch.sequence[permutation][shuffled.row], shuffled.sample, 9)
        rows = zip(permutation[shuffled.row].tolist(), shuffled.sample.tolist(), u.tolist(), strict=True)
        by_counts[permutation is order] = {(s, k): row for s, k, row in rows}
    assert by_counts[True] == by_counts[False]
    assert torch.equal(samples.noise(batch, 9), torch.tensor(list(by_counts[False].values())))


def test_antithetic_pairs_are_exact_complements():
    samples = Samples([4, 2, 1], antithetic=True)
    u = samples.noise(pack([b"abc"] * 3, seed=5), 200)
    assert torch.equal(u[0] + u[1], torch.ones(200)) and torch.equal(u[1], 1 - u[0])
    assert torch.equal(u[2] + u[3], torch.ones(200)) and not torch.equal(u[0], u[2])
    independent = Samples([4, 2, 1]).noise(pack([b"abc"] * 3, seed=5), 200)
    assert torch.equal(u[0], independent[0]) and torch.equal(u[6], independent[6])


def test_every_counter_matters():
    index, other = torch.arange(64), torch.full((64,), 100)
    draws = [
        hashed(5, BYTES, index),
        hashed(5, ACTIONS, index),
        hashed(6, BYTES, index),
        hashed(-5, BYTES, index),
        hashed(5, BYTES, index, other),
        hashed(5, BYTES, other, index),
        hashed(5, BYTES, index, index),
    ]
    everything = torch.cat(draws)
    assert len(everything.unique()) == len(everything)  # 448 numbers of 63 bits coincide by chance once in 10^14
    assert everything.min() >= 0


def test_floats_are_inside_the_open_interval_and_exact():
    u = uniform(3, ACTIONS, torch.arange(100_000))
    assert u.dtype == torch.float32
    assert u.min() > 0 and u.max() < 1
    assert torch.equal((1 - u.double()).float(), 1 - u) and torch.equal(u * 2**24 % 2, torch.ones_like(u))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("axis", ["sequence", "sample", "time"])
def test_uniform_along_every_counter(seed, axis):
    """Chi-square of 64 cells, and correlation of neighbours, by normal bounds of 5 standard errors.

    A sound generator fails one of these 12 checks with a chance below 10^-4 (chi-square of 63 degrees beyond 63 + 5 sqrt(126)
    has a chance below 10^-5, a correlation beyond 5 standard errors one of 6 * 10^-7); the seeds are fixed.
    """
    n, counter, fixed = 64_000, torch.arange(64_000), torch.full((1,), 11)
    counters = {
        "sequence": (counter, fixed, fixed),
        "sample": (fixed, counter, fixed),
        "time": (fixed, fixed, counter),
    }[axis]
    u = uniform(seed, ACTIONS, *counters).double()
    cells = torch.bincount((u * 64).long(), minlength=64)
    chi_square = ((cells - n / 64) ** 2 / (n / 64)).sum()
    assert abs(chi_square - 63) < 5 * math.sqrt(2 * 63)
    correlation = ((u[1:] - 0.5) * (u[:-1] - 0.5)).mean() * 12
    assert abs(correlation) < 5 / math.sqrt(n)
