"""Closed-form scorers: the protocol of scorer.py, and the figures that their docstrings derive."""

import math

import pytest
import torch
from torch import float32, float64

from segment_env.batch import Samples
from segment_env.boundaries import is_choice
from segment_env.closed_form import AlignedScorer, CountingStream, TableScorer
from segment_env.diagnostics import Deceptive, Delayed, Delimiter, Period, Silence, Words
from segment_env.scorer import reset_rows

SCORERS = {
    "aligned": lambda dtype=float64: AlignedScorer(5, 0.1, dtype),
    "table": lambda dtype=float64: TableScorer(byte_noise=2.0, dtype=dtype),
    "period": lambda dtype=float64: Period(dtype=dtype),
    "delimiter": lambda dtype=float64: Delimiter(dtype=dtype),
    "words": lambda dtype=float64: Words(dtype=dtype),
    "delayed": lambda dtype=float64: Delayed(lag=7, gap=2.0, dtype=dtype),
    "deceptive": lambda dtype=float64: Deceptive(dtype=dtype),
    "silence": lambda dtype=float64: Silence(silence=8.0, dtype=dtype),
}
TOLERANCE = {float64: 1e-12, float32: 1e-5}


@pytest.fixture(params=SCORERS)
def make(request):
    return SCORERS[request.param]


def rows_of(scorer, seed, counts, length):
    """Bytes of the scorer's own stream if it has one, broken in places, and random starts: x [S, T], samples, starts [B, T]."""
    generator = torch.Generator().manual_seed(seed)
    stream = scorer if hasattr(scorer, "sequences") else CountingStream(5, 0.2)
    x = stream.sequences(seed, torch.arange(len(counts)), length)[0]
    x[0] = torch.randint(0, 256, (length,), generator=generator)
    moved = x[1][torch.randint(0, length, (length,), generator=generator)]
    x[1] = torch.where(torch.rand(length, generator=generator) < 0.1, moved, x[1])
    samples = Samples(counts)
    starts = torch.rand(samples.num_rows, length, generator=generator) < 0.4
    starts[:, 0] = True
    return x, samples, starts


def stepped(scorer, x, starts):
    """log p [B, T, 256] and h [B, T+1, D] a position at a time."""
    state, h = scorer.init_state(*x.shape)
    log_p, hidden = [], [h]
    for t in range(x.shape[1]):
        state, prediction = scorer.predict(state, starts[:, t])
        state, h = scorer.observe(state, x[:, t])
        log_p.append(prediction)
        hidden.append(h)
    return torch.stack(log_p, 1), torch.stack(hidden, 1)


@pytest.mark.parametrize("dtype", [float64, float32])
@pytest.mark.parametrize("length", [1, 2, 3, 40, 150])
def test_stepwise_is_parallel(make, dtype, length):
    scorer = make(dtype)
    x, samples, starts = rows_of(scorer, 1, [2, 1, 2], length)
    h = scorer.encode(x)
    assert h.shape == (3, length + 1, scorer.width) and h.dtype == scorer.dtype == dtype
    rows, h_rows = samples.expand(x), samples.expand(h)
    nll = scorer.nll(h_rows[:, :-1], starts, rows)
    log_p, hidden = stepped(scorer, rows, starts)
    assert nll.dtype == log_p.dtype == dtype and nll.shape == starts.shape
    torch.testing.assert_close(hidden, h_rows, rtol=0, atol=TOLERANCE[dtype])
    torch.testing.assert_close(-log_p.gather(-1, rows[..., None]).squeeze(-1), nll, rtol=0, atol=TOLERANCE[dtype])


def test_probabilities_sum_to_one(make):
    scorer = make()
    x, samples, starts = rows_of(scorer, 2, [1, 2], 30)
    log_p, hidden = stepped(scorer, samples.expand(x), starts)
    for log_probabilities in (log_p, scorer.early_log_p(hidden)):
        assert log_probabilities.shape[-1] == 256 and log_probabilities.isfinite().all()
        total = log_probabilities.exp().sum(-1)
        torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=1e-12)


def test_nothing_is_known_of_the_future(make):
    scorer = make()
    x, samples, starts = rows_of(scorer, 3, [1, 1, 1], 20)
    h, log_p = scorer.encode(x), stepped(scorer, x, starts)[0]
    for t in (0, 1, 9, 19):
        other, later = x.clone(), starts.clone()
        other[:, t:] = 255 - other[:, t:]
        later[:, t + 1 :] ^= True
        assert torch.equal(scorer.encode(other)[:, : t + 1], h[:, : t + 1])
        torch.testing.assert_close(stepped(scorer, other, later)[0][:, : t + 1], log_p[:, : t + 1], rtol=0, atol=1e-14)
        before = scorer.nll(h[:, :-1], starts, x)[:, :t]
        torch.testing.assert_close(scorer.nll(scorer.encode(other)[:, :-1], later, other)[:, :t], before, rtol=0, atol=1e-14)


def test_a_row_alone_and_a_ragged_row(make):
    scorer = make()
    x, samples, starts = rows_of(scorer, 4, [1, 1, 1], 25)
    whole = scorer.nll(scorer.encode(x)[:, :-1], starts, x)
    x[1, 10:], starts[1, 10:] = 0, False  # padding
    ragged = scorer.nll(scorer.encode(x)[:, :-1], starts, x)
    assert ragged.isfinite().all()
    torch.testing.assert_close(ragged[1, :10], whole[1, :10], rtol=0, atol=1e-14)
    for b in range(3):
        alone = scorer.nll(scorer.encode(x[b : b + 1])[:, :-1], starts[b : b + 1], x[b : b + 1])
        torch.testing.assert_close(alone[0], ragged[b], rtol=0, atol=1e-14)


def test_rows_that_start_afresh(make):
    scorer = make()
    x, samples, starts = rows_of(scorer, 5, [1, 1], 12)
    state, first = scorer.init_state(2, 12)
    for t in range(4):
        state, _ = scorer.predict(state, starts[:, t])
        state, _ = scorer.observe(state, x[:, t])
    state = reset_rows(state, scorer.init_state(2, 12)[0], torch.tensor([True, False]))
    state, prediction = scorer.predict(state, torch.tensor([True, bool(starts[1, 4])]))
    log_p, _ = stepped(scorer, x, starts)
    torch.testing.assert_close(prediction, torch.stack([log_p[0, 0], log_p[1, 4]]), rtol=0, atol=1e-14)


def test_gate_is_ignored_and_both_dtypes_hold_the_same_tables(make):
    exact, single = make(float64), make(float32)
    x, samples, starts = rows_of(exact, 6, [1, 1], 20)
    nll = exact.nll(exact.encode(x)[:, :-1], starts, x)
    assert torch.equal(exact.nll(exact.encode(x)[:, :-1], starts, x, torch.rand(2, 20)), nll)
    torch.testing.assert_close(single.nll(single.encode(x)[:, :-1], starts, x).double(), nll, rtol=1e-4, atol=1e-4)
    assert not list(exact.parameters())


# the aligned scorer's figures


def policies(stream, x, generator):
    """Actions of the policies of the docstring, by name."""
    draws = torch.rand(x.shape, generator=generator)
    return {
        "oracle": stream.reference(x),
        "never": torch.zeros_like(x, dtype=torch.bool),
        "always": torch.ones_like(x, dtype=torch.bool),
        "iid": draws < 0.3,
    }


@pytest.mark.parametrize(("period", "noise", "stream_noise"), [(6, 0.1, 0.1), (4, 0.05, 0.2), (9, 0.02, 0.0)])
def test_costs_are_as_derived(period, noise, stream_noise):
    """Means over 400 sequences, each an independent sample, within 5 standard errors: a false failure has chance 10^-5 in all.

    The first 60 bytes are left out: by then the count is known but for chances below 0.2^60.
    """
    stream, scorer = CountingStream(period, stream_noise), AlignedScorer(period, noise, float64)
    fractions = {"oracle": 1.0, "never": 0.0, "always": 1 / period, "iid": (1 - 0.7**period) / period}
    assert scorer.sharp_fraction(0.3) == pytest.approx(fractions["iid"])
    assert scorer.sharp_fraction(1.0) == pytest.approx(fractions["always"])
    x = stream.sequences(1, torch.arange(400), 260)[0]
    h = scorer.encode(x)[:, :-1]
    for name, starts in policies(stream, x, torch.Generator().manual_seed(0)).items():
        starts[:, 0] = True
        mean = scorer.nll(h, starts, x)[:, 60:].mean(1)
        expected = scorer.nats_per_byte(fractions[name], stream_noise)
        assert abs(mean.mean() - expected) <= 5 * mean.std() / math.sqrt(400) + 1e-12, name


def test_costs_by_hand():
    scorer, e, q = AlignedScorer(4, 0.1, float64), 0.2, 0.1
    sharp = -(1 - e) * math.log(1 - q) - e * math.log(q / 255)
    blurred = -(1 - e) * math.log((1 - q) / 4) - e * math.log(q / 252)
    assert scorer.nats_per_byte(1, e) == pytest.approx(sharp)
    assert scorer.nats_per_byte(0, e) == pytest.approx(blurred)
    assert blurred - sharp == pytest.approx((1 - e) * math.log(4) - e * math.log(255 / 252))


def test_the_oracle_is_the_one_best_policy():
    """All 2^9 ways to cut ten bytes, of every phase: the least nll has one start pattern from the first known cycle on."""
    scorer, length = AlignedScorer(4, 0.1, float64), 10
    actions = torch.tensor([[1, *(a >> t & 1 for t in range(length - 1))] for a in range(2 ** (length - 1))]).bool()
    for phase in range(4):
        x = ((torch.arange(length) + phase) % 4).expand(len(actions), -1)
        nll = scorer.nll(scorer.encode(x)[:, :-1], actions, x).sum(1)
        best = actions[nll <= nll.min() + 1e-12]
        first = next(t for t in range(1, length) if x[0, t] == 0)
        expected = CountingStream(4).reference(x[:1])[0]
        assert (best[:, first:] == expected[first:]).all()


def test_a_linear_policy_can_be_the_oracle():
    scorer = AlignedScorer(6, 0.1)
    x = CountingStream(6, 0.2).sequences(0, torch.arange(10), 50)[0]
    weight = torch.zeros(scorer.width).index_fill(0, torch.tensor([0]), 1.0)
    action = scorer.encode(x)[:, :-1] @ weight > 0.5
    choice = is_choice(torch.ones_like(action))
    assert torch.equal(action[choice], CountingStream(6).reference(x)[choice])


# the table scorer


def test_every_earlier_decision_matters_and_not_additively():
    scorer, length = TableScorer(dtype=float64), 7
    x = torch.tensor([[3, 200, 77, 14, 90, 3, 41]])
    actions = torch.tensor([[1, *(a >> t & 1 for t in range(length - 1))] for a in range(2 ** (length - 1))]).bool()
    rows = x.expand(len(actions), -1)
    last = scorer.nll(scorer.encode(rows)[:, :-1], actions, rows)[:, -1].view([2] * (length - 1))  # bit t - 1 is dimension -t
    for d in range(length - 1):
        effect = last.select(d, 1) - last.select(d, 0)
        assert effect.abs().max() > 1e-3
        assert effect.std() > 1e-3  # the effect of one decision depends on the others


def test_byte_noise_moves_log_p_alone():
    x, samples, _ = rows_of(None, 7, [1, 1], 30)
    starts = torch.rand(2, 2, 30, generator=torch.Generator().manual_seed(0)) < 0.5  # two boundary samples
    starts[..., 0] = True
    plain, noisy = (TableScorer(byte_noise=b, dtype=float64) for b in (0.0, 3.0))
    h = plain.encode(x)
    assert torch.equal(h, noisy.encode(x))
    assert torch.equal(plain.early_log_p(h), noisy.early_log_p(h))
    term = [noisy.nll(h[:, :-1], a, x) - plain.nll(h[:, :-1], a, x) for a in starts]
    torch.testing.assert_close(term[0], term[1], rtol=0, atol=1e-12)  # no boundary moves it
    assert term[0].std() > 1


def test_settings_outside_their_range():
    for make_wrong in (
        lambda: TableScorer(width=2),
        lambda: TableScorer(dtype=torch.float16),
        lambda: AlignedScorer(dtype=torch.bfloat16),
        lambda: AlignedScorer(noise=0.0),
        lambda: AlignedScorer(period=1),
    ):
        with pytest.raises(ValueError):
            make_wrong()
