"""Discounted returns and those of a hard horizon against plain loops, and gamma given as a horizon."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from agents.returns import discounted_return, gamma_of_horizon, hard_horizon


def looped(reward: Tensor, done: Tensor, gamma: float) -> Tensor:
    """G[t] = r[t] + gamma (1 - done[t]) G[t+1], a step at a time from the end."""
    out = torch.zeros_like(reward)
    later = torch.zeros_like(reward[:, 0])
    for t in reversed(range(reward.shape[1])):
        later = reward[:, t] + torch.where(done[:, t], 0.0, gamma * later)
        out[:, t] = later
    return out


@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 4),
    length=st.integers(1, 70),
    gamma=st.sampled_from([0.0, 0.3, 0.9, 0.99, 1.0]),
    ends=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
)
def test_it_is_the_loop(seed: int, rows: int, length: int, gamma: float, ends: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    reward = torch.randn(rows, length, generator=generator, dtype=torch.float64)
    done = torch.rand(rows, length, generator=generator) < ends
    got = discounted_return(reward, done, gamma)
    torch.testing.assert_close(got, looped(reward, done, gamma), rtol=0, atol=1e-12)
    assert got.shape == reward.shape and got.dtype == torch.float64


def test_literal_numbers() -> None:
    reward = torch.tensor([[1.0, -2.0, 3.0, 4.0]], dtype=torch.float64)
    never, within = torch.zeros(1, 4, dtype=torch.bool), torch.tensor([[False, True, False, False]])
    for gamma, done, expected in [
        (0.0, never, [1, -2, 3, 4]),
        (0.5, never, [1.25, 0.5, 5, 4]),  # 3 + 4/2 = 5; -2 + 5/2 = .5; 1 + .5/2 = 1.25
        (1.0, never, [6, 5, 7, 4]),
        (0.5, within, [0, -2, 5, 4]),  # an episode ends with index 1, and nothing of the next one comes back over it
        (1.0, within, [-1, -2, 7, 4]),
    ]:
        torch.testing.assert_close(discounted_return(reward, done, gamma), torch.tensor([expected]).double(), rtol=0, atol=1e-15)


def test_a_long_sum_of_float32_keeps_its_digits() -> None:
    generator = torch.Generator().manual_seed(0)
    reward, done = torch.randn(2, 4096, generator=generator), torch.zeros(2, 4096, dtype=torch.bool)
    for gamma in (0.99, 1.0):
        exact = looped(reward.double(), done, gamma)
        got = discounted_return(reward, done, gamma)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), exact, rtol=0, atol=2e-5 * float(exact.abs().max()))


# --- a hard horizon ---


@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 3),
    length=st.integers(1, 40),
    horizon=st.integers(1, 50),
    ends=st.sampled_from([0.0, 0.05, 0.3, 1.0]),
)
def test_a_hard_horizon_is_the_loop(seed: int, rows: int, length: int, horizon: int, ends: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    reward = torch.randint(-(2**40), 2**40, (rows, length), generator=generator).double()  # whole numbers: sums are exact
    done = torch.rand(rows, length, generator=generator) < ends
    expected = torch.zeros_like(reward)
    for b, t in [(b, t) for b in range(rows) for t in range(length)]:
        for k in range(t, min(t + horizon, length)):
            expected[b, t] += reward[b, k]
            if done[b, k]:
                break
    assert torch.equal(hard_horizon(reward, done, horizon), expected)
    if horizon >= length:
        assert torch.equal(expected, discounted_return(reward, done, 1.0))


def test_a_hard_horizon_loses_no_digits_behind_a_large_reward() -> None:
    reward = torch.full((1, 1000), 0.1)
    reward[0, 3] = 1e8
    got = hard_horizon(reward, torch.zeros(1, 1000, dtype=torch.bool), 10)
    torch.testing.assert_close(got[0, 4:991], torch.ones(987), rtol=1e-6, atol=0)


@pytest.mark.parametrize("horizon", [0, -1, 2.5, 3.0, True])
def test_other_hard_horizons_are_refused(horizon: float) -> None:
    with pytest.raises(ValueError, match="a hard horizon must be a whole number of bytes, at least 1"):
        hard_horizon(torch.zeros(1, 3), torch.zeros(1, 3, dtype=torch.bool), horizon)


def test_rewards_are_not_written_to_and_carry_their_gradient() -> None:
    reward = torch.ones(1, 3, dtype=torch.float64, requires_grad=True)
    discounted_return(reward, torch.zeros(1, 3, dtype=torch.bool), 0.5)[0, 0].backward()
    assert reward.grad.tolist() == [[1.0, 0.5, 0.25]]
    assert reward.tolist() == [[1.0, 1.0, 1.0]]


@pytest.mark.parametrize("gamma", [-0.1, 1.01, math.nan])
def test_no_other_gamma(gamma: float) -> None:
    with pytest.raises(ValueError, match=r"gamma must lie in \[0, 1\]"):
        discounted_return(torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.bool), gamma)


def test_a_horizon_is_the_sum_of_the_weights() -> None:
    assert gamma_of_horizon(1) == 0
    assert gamma_of_horizon(10) == 0.9
    assert gamma_of_horizon(100) == 0.99
    assert gamma_of_horizon(math.inf) == gamma_of_horizon(math.inf, "ms", 8000) == 1
    assert gamma_of_horizon(2.5, "ms", 16000) == 1 - 1 / 40  # 2.5 ms of 16 kHz are 40 samples
    for horizon in (1.5, 20.0, 300.0):
        gamma = gamma_of_horizon(horizon)
        assert math.isclose(sum(gamma**k for k in range(20_000)), horizon, rel_tol=1e-9)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((0.5,), "at least one byte"),
        ((0,), "at least one byte"),
        ((math.nan,), "at least one byte"),
        ((0.1, "ms", 8000), "at least one byte"),  # 0.8 samples
        ((10, "ms"), "sample rate"),
        ((10, "seconds"), 'in "bytes" or "ms"'),
    ],
)
def test_no_other_horizon(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gamma_of_horizon(*arguments)
