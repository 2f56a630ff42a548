"""Metrics: figures by hand, and sums that do not depend on how bytes were batched."""

import math

import pytest
import torch

from segment_env.boundaries import is_choice
from segment_env.metrics import Totals, alignment, bits_per_byte, rate, segment_lengths, signal_to_noise


def batch(seed, rows=6, length=20):
    """Random nll, starts, valid, choice, reference of ragged rows."""
    generator = torch.Generator().manual_seed(seed)
    valid = torch.arange(length) < torch.randint(1, length + 1, (rows, 1), generator=generator)
    starts = (torch.rand(rows, length, generator=generator) < 0.3) & valid
    starts[:, 0] = True
    reference = torch.rand(rows, length, generator=generator) < 0.3
    nll = torch.rand(rows, length, generator=generator)
    return nll, starts, valid, is_choice(valid), reference


def test_bits_per_byte():
    assert bits_per_byte(torch.tensor(100 * math.log(2)), torch.tensor(50)) == pytest.approx(2.0)
    assert math.isnan(bits_per_byte(0.0, 0))


def test_rate_counts_choices_alone():
    _, starts, valid, choice, _ = batch(0)
    assert rate(starts, choice) == starts[choice].float().mean()
    assert rate(starts | ~choice, choice) == rate(starts.long(), choice)
    assert rate(starts, torch.zeros_like(choice)).isnan()


def test_alignment_by_hand():
    starts = torch.tensor([[1, 1, 1, 0, 1, 0]]).bool()
    reference = torch.tensor([[1, 1, 0, 1, 1, 1]]).bool()
    choice = torch.tensor([[0, 1, 1, 1, 1, 0]]).bool()
    assert alignment(starts, reference, choice) == pytest.approx((2 / 3, 2 / 3, 2 / 3))
    assert alignment(reference, reference, choice) == (1.0, 1.0, 1.0)
    assert alignment(starts, ~starts, choice) == (0.0, 0.0, 0.0)


def test_alignment_where_it_is_undefined():
    some, none = torch.ones(1, 4, dtype=torch.bool), torch.zeros(1, 4, dtype=torch.bool)
    precision, recall, f1 = alignment(none, some, some)
    assert math.isnan(precision) and recall == 0 and f1 == 0
    precision, recall, f1 = alignment(some, none, some)
    assert precision == 0 and math.isnan(recall) and f1 == 0
    assert all(map(math.isnan, alignment(none, none, some)))


def test_segment_lengths_of_ragged_rows():
    _, starts, valid, _, _ = batch(1)
    lengths = segment_lengths(starts, valid)
    assert lengths.sum() == valid.sum() and len(lengths) == starts.sum() and lengths.min() >= 1
    first = segment_lengths(starts[:1], valid[:1]).tolist()
    positions = [*starts[0].nonzero().flatten().tolist(), int(valid[0].sum())]
    assert first == [b - a for a, b in zip(positions, positions[1:], strict=False)]


def test_totals_do_not_depend_on_the_batching():
    parts, together = Totals(), Totals()
    nll, starts, valid, choice, reference = batch(2)
    nll[~valid] = math.nan  # padding enters nothing
    together.add(nll, starts, valid, choice, reference)
    for rows in (slice(0, 1), slice(1, 4), slice(4, 6)):
        parts.add(nll[rows], starts[rows], valid[rows], choice[rows], reference[rows])
    assert parts.result() == pytest.approx(together.result(), rel=1e-12)


def test_totals_are_the_metrics():
    totals, (nll, starts, valid, choice, reference) = Totals(), batch(3)
    totals.add(nll, starts, valid, choice, reference)
    result = totals.result()
    lengths = segment_lengths(starts, valid).double()
    assert result["bits_per_byte"] == pytest.approx(float(nll[valid].double().mean()) / math.log(2))
    assert result["rate"] == pytest.approx(float(rate(starts, choice)))
    assert (result["precision"], result["recall"], result["f1"]) == pytest.approx(alignment(starts, reference, choice))
    assert result["segment_length_mean"] == pytest.approx(float(lengths.mean()))
    assert result["segment_length_std"] == pytest.approx(float(lengths.std(correction=0)))
    assert result["num_bytes"] == int(valid.sum())


def test_quantiles_of_segment_lengths_do_not_depend_on_the_batching():
    parts, (nll, starts, valid, choice, _) = Totals(), batch(2)
    for rows in (slice(0, 4), slice(4, 5), slice(5, 6)):
        parts.add(nll[rows], starts[rows], valid[rows], choice[rows])
    levels = (0.01, 0.25, 0.5, 0.9, 1.0)
    found = segment_lengths(starts, valid).double()
    assert parts.length_quantiles(*levels) == [int(found.quantile(level, interpolation="higher")) for level in levels]
    counted = Totals()
    counted.add(torch.zeros(1, 10), torch.tensor([[1, 1, 1, 0, 1, 0, 0, 0, 0, 0]]).bool(), *torch.ones(2, 1, 10).bool())
    assert counted.length_quantiles(0.5, 0.51, 0.75, 1.0) == [1, 2, 2, 6] and Totals().length_quantiles(0.5) == [0]


def test_totals_of_nothing_are_undefined():
    result = Totals().result()
    assert result.pop("num_bytes") == 0 and all(map(math.isnan, result.values()))
    totals, (nll, starts, valid, choice, _) = Totals(), batch(4)
    totals.add(nll, starts, valid, choice)
    assert math.isnan(totals.result()["recall"]) and totals.result()["rate"] > 0


def test_signal_to_noise_is_unbiased():
    """Means over 2000 repetitions within 5 standard errors (chance of a false failure 10^-6; the seed is fixed)."""
    mean = torch.tensor([1.0, -0.5, 0.0], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    samples = mean + 2 * torch.randn(2000, 4, 3, generator=generator, dtype=torch.float64)
    found = [signal_to_noise(sample) for sample in samples]
    for value, expected in ((torch.stack([f.variance for f in found]), 12.0), (torch.stack([f.signal for f in found]), 1.25)):
        assert abs(value.mean() - expected) < 5 * value.std() / math.sqrt(2000)
    assert found[0].ratio == found[0].signal / found[0].variance
    with pytest.raises(ValueError, match="two samples"):
        signal_to_noise(torch.zeros(1, 3))
