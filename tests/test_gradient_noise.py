"""Statistics of gradient draws: against what they were drawn with, and against sums written out."""

import math

import pytest
import torch
from torch import Tensor, float64

from agents.gradient_noise import Draws, Figures, figures, interval


def drawn(count: int, mean: Tensor, bytes_std: float, boundary_std: float, seed: int) -> Tensor:
    """[count, 2, P]: what the bytes contribute is shared by the two."""
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randn(count, 1, len(mean), generator=generator, dtype=float64)
    return mean + bytes_std * shared + boundary_std * torch.randn(count, 2, len(mean), generator=generator, dtype=float64)


def test_it_finds_what_it_was_drawn_with() -> None:
    """Each within four standard errors, as the spread over 40 repetitions tells them: a false alarm in 1 of 16,000 each."""
    mean = torch.linspace(-1, 1, 20, dtype=float64)
    other = mean + 0.5
    expected = {
        "variance": 20 * (4 + 9),
        "from_bytes": 4 / 13,
        "signal": float(mean @ mean),
        "signal_to_noise": float(mean @ mean) / 260,
        "bias": math.sqrt(20 * 0.25 / float(other @ other)),
        "cosine": float(mean @ other / (mean.norm() * other.norm())),
    }
    found: dict[str, list[float]] = {name: [] for name in expected}
    for seed in range(40):
        draws = Draws.of(drawn(60, mean, 2.0, 3.0, 2 * seed), drawn(400, other, 1.0, 1.0, 2 * seed + 1))
        for name, values in vars(figures(draws, resamplings=1)).items():
            found[name].append(float(values[0]))
    for name, value in expected.items():
        each = torch.tensor(found[name])
        each = each[each.isfinite()]
        assert len(each) >= 35
        slack = 0.05 if name in ("bias", "cosine") else 0.0  # roots and quotients are a little off in the mean
        assert abs(each.mean() - value) < 4 * each.std() / len(each) ** 0.5 + slack * abs(value), name


def test_sums_written_out() -> None:
    gradients = drawn(5, torch.ones(3, dtype=float64), 1.0, 1.0, 0)
    reference = drawn(4, torch.ones(3, dtype=float64), 1.0, 1.0, 1)
    got = figures(Draws.of(gradients, reference), resamplings=1)
    means, others = gradients.mean(1), reference.mean(1)
    signal = sum(float(means[i] @ means[j]) for i in range(5) for j in range(5) if i != j) / 20
    square = sum(float(others[i] @ others[j]) for i in range(4) for j in range(4) if i != j) / 12
    cross = float(means.mean(0) @ others.mean(0))
    power = float(gradients.square().sum(-1).mean())
    within = float((gradients[:, 0] - gradients[:, 1]).square().sum(-1).mean() / 2)
    expected = {
        "variance": power - signal,
        "signal": signal,
        "signal_to_noise": signal / (power - signal),
        "from_bytes": 1 - within / (power - signal),
        "bias": math.sqrt((signal - 2 * cross + square) / square) if signal - 2 * cross + square > 0 else math.nan,
        "cosine": cross / math.sqrt(signal * square),
    }
    for name, value in expected.items():
        assert float(getattr(got, name)[0]) == pytest.approx(value, rel=1e-12, nan_ok=True), name


def test_resampled_draws_do_not_pass_noise_for_signal() -> None:
    """Of pure noise no resampling sees a signal either: a draw that is taken twice is not multiplied with itself."""
    zero = torch.zeros(30, dtype=float64)
    got = figures(Draws.of(drawn(40, zero, 1.0, 1.0, 3), drawn(40, zero, 1.0, 1.0, 4)), resamplings=500)
    assert abs(got.signal[1:].mean() - got.signal[0]) < 0.1 * got.variance[0] / 40


def test_intervals_hold_the_truth() -> None:
    """Of 100 intervals of a variance ratio at 95% between 86 and 100 hold it; a false alarm in 1 of 3,000."""
    mean, hit = torch.ones(10, dtype=float64), 0
    for seed in range(100):
        reference = drawn(30, mean, 1.0, 1.0, 1000 + seed)
        one, other = (figures(Draws.of(drawn(50, mean, s, 1.0, 3 * seed + n), reference), 200, seed=7 * n) for n, s in ((0, 2.0), (1, 1.0)))
        _, low, high = interval(one.variance / other.variance)
        hit += low < 2.5 < high
    assert 86 <= hit <= 100


def test_an_interval_that_is_mostly_undefined_is_none() -> None:
    values = torch.tensor([0.5, *[math.nan] * 60, *[1.0] * 40], dtype=float64)
    drawn_value, low, high = interval(values)
    assert drawn_value == 0.5 and math.isnan(low) and math.isnan(high)


def test_seeds_repeat() -> None:
    draws = Draws.of(drawn(5, torch.ones(3, dtype=float64), 1.0, 1.0, 0), drawn(4, torch.ones(3, dtype=float64), 1.0, 1.0, 1))
    one, other = figures(draws), figures(draws)
    assert isinstance(one, Figures) and len(one.variance) == 1001
    torch.testing.assert_close(one.variance, other.variance, rtol=0, atol=0, equal_nan=True)  # nan where one draw is all there is
