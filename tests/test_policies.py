"""Policies and given rules: both faces agree, and probabilities are those they claim."""

import math

import pytest
import torch
from torch import Tensor, float64

from agents.policies import WindowPolicy
from agents.rules import IidRandom, UniformStride
from segment_env.boundaries import recent_starts, since_start
from segment_env.errors import UserError
from segment_env.scorer import Decision, Observation, capped

ROWS, LENGTH, WIDTH = 3, 40, 6


def window(n_past: int, scale: float = 12.0) -> WindowPolicy:
    policy = WindowPolicy(WIDTH, 0.3, n_past).double()
    with torch.no_grad():
        policy.weight.normal_(std=scale)
    return policy


def inputs(seed: int = 0, rows: int = ROWS, length: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    """h [B, T, D], x [B, T], noise [B, T]."""
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(rows, length, WIDTH, generator=generator, dtype=float64)
    return h, torch.randint(0, 256, (rows, length), generator=generator), torch.rand(rows, length, generator=generator)


def stepped(policy, h: Tensor, x: Tensor, noise: Tensor, soft_cap: float | None = None, replay: Tensor | None = None) -> Decision:
    """Decide a position at a time, with what the environment shows at each: True at t = 0."""
    state, before = policy.init(len(x)), torch.nn.functional.pad(x, (1, 0), value=256)
    starts, logits = torch.zeros_like(x, dtype=torch.bool), []
    for t in range(x.shape[1]):
        recent = recent_starts(starts, policy.n_past)[:, t] if policy.n_past else None
        observation = Observation(h[:, t], before[:, t], since_start(starts)[:, t], recent, noise[:, t], None)
        state, decision = policy.step(state, observation, soft_cap=soft_cap)
        starts[:, t] = True if t == 0 else decision.action if replay is None else replay[:, t]
        logits.append(decision.logits)
    return Decision(starts, None if logits[0] is None else torch.stack(logits, 1))


def starts_of(decision: Decision) -> Tensor:
    """Its action, True at t = 0."""
    return torch.cat([torch.ones_like(decision.action[:, :1]), decision.action[:, 1:]], 1)


# --- WindowPolicy ---


@pytest.mark.parametrize("soft_cap", [None, 1.0])
@pytest.mark.parametrize("n_past", [0, 1, 3, 8])
def test_sampling_at_once_is_stepping(n_past: int, soft_cap: float | None) -> None:
    policy, (h, x, noise) = window(n_past), inputs()
    parallel, step = policy.parallel(h, x, noise, soft_cap=soft_cap), stepped(policy, h, x, noise, soft_cap)
    assert torch.equal(starts_of(parallel), step.action)
    torch.testing.assert_close(parallel.logits, step.logits, rtol=0, atol=1e-12)
    assert 0.1 < step.action[:, 1:].double().mean() < 0.7
    assert torch.equal(step.action[:, 1:], (noise < step.logits.sigmoid())[:, 1:])
    if soft_cap:
        assert parallel.logits.abs().max() < soft_cap < window(n_past).parallel(h, x, noise).logits.abs().max()


@pytest.mark.parametrize("length", [1, 2, 3])
def test_sequences_shorter_than_the_window(length: int) -> None:
    policy, (h, x, noise) = window(3), inputs(length=length)
    parallel, step = policy.parallel(h, x, noise), stepped(policy, h, x, noise)
    assert torch.equal(starts_of(parallel), step.action)
    torch.testing.assert_close(parallel.logits, step.logits, rtol=0, atol=1e-12)


@pytest.mark.parametrize("n_past", [0, 3])
def test_replayed_actions_keep_their_logits(n_past: int) -> None:
    policy, (h, x, noise) = window(n_past), inputs()
    sampled = policy.parallel(h, x, noise, soft_cap=2.0)
    replayed = policy.parallel(h, x, torch.zeros_like(noise), soft_cap=2.0, actions=starts_of(sampled))
    assert torch.equal(replayed.action, starts_of(sampled))
    assert torch.equal(replayed.logits, sampled.logits)
    actions = torch.rand(ROWS, LENGTH) < 0.5
    actions[:, 0] = True
    replayed = policy.parallel(h, x, noise, actions=actions)
    assert torch.equal(replayed.action, actions)
    torch.testing.assert_close(replayed.logits, stepped(policy, h, x, noise, replay=actions).logits, rtol=0, atol=1e-12)


def test_only_the_window_is_read() -> None:
    """A decision moves the logits of the next n_past positions, and of no other."""
    policy, (h, x, noise) = window(3), inputs()
    actions = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
    actions[:, 0] = True
    other = actions.clone()
    other[:, 10] = True
    moved = policy.parallel(h, x, noise, actions=actions).logits != policy.parallel(h, x, noise, actions=other).logits
    assert moved.any(0).nonzero().squeeze(1).tolist() == [11, 12, 13]


@pytest.mark.parametrize("n_past", [0, 3])
def test_the_gradient_reaches_weights_and_h(n_past: int) -> None:
    policy, (h, x, noise) = window(n_past), inputs()
    h.requires_grad_()
    policy.parallel(h, x, noise, soft_cap=6.0).logits.sum().backward()
    assert policy.weight.grad.abs().amax(1).min() > 0 and h.grad.abs().amax(2).min() > 0


def test_a_logit_is_no_bf16() -> None:
    """Under autocast, and from an h of 8 bits, the read-out keeps the weights' precision."""
    policy, (h, x, noise) = WindowPolicy(WIDTH, 0.3), inputs()
    with torch.no_grad():
        policy.weight.normal_(std=10)
    plain = policy.parallel(h.bfloat16().float(), x, noise).logits
    with torch.autocast("cpu", torch.bfloat16):
        logits = policy.parallel(h.bfloat16(), x, noise).logits
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, plain, rtol=0, atol=1e-6)


@pytest.mark.parametrize("n_past", [0, 3])
@pytest.mark.parametrize("soft_cap, expected", [(None, 0.2), (6.0, 0.203892)])
def test_it_begins_as_random_at_the_target(n_past: int, soft_cap: float | None, expected: float) -> None:
    policy = WindowPolicy(WIDTH, 0.2, n_past)
    h, x, noise = inputs(rows=8, length=500)
    decision = policy.parallel(h, x, noise, soft_cap=soft_cap)
    torch.testing.assert_close(decision.logits.sigmoid(), torch.full((8, 500), expected), rtol=0, atol=1e-6)
    chosen = decision.action[:, 1:].double()
    deviation = math.sqrt(expected * (1 - expected) / chosen.numel())
    assert abs(chosen.mean() - expected) < 4 * deviation


def test_the_scale_divides_and_the_target_is_not_scaled() -> None:
    h, x, noise = inputs()
    policies = [WindowPolicy(WIDTH, 0.3, logit_scale=scale).double() for scale in (16.0, 1.0)]
    with torch.no_grad():
        policies[0].weight.fill_(16.0)
        policies[1].weight.fill_(1.0)
    first, second = (policy.parallel(h, x, noise).logits for policy in policies)
    torch.testing.assert_close(first, second, rtol=0, atol=1e-12)
    torch.testing.assert_close(second, h.sum(-1) + math.log(0.3 / 0.7), rtol=0, atol=1e-12)
    torch.testing.assert_close(policies[1].parallel(h, x, noise, soft_cap=2.0).logits, capped(second, 2.0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("target", [0.0, 1.0, 1.5, -0.2, math.nan])
def test_no_other_target(target: float) -> None:
    with pytest.raises(UserError, match="strictly between 0 and 1"):
        WindowPolicy(WIDTH, target)


# --- rules ---


@pytest.mark.parametrize("stride", [1, 2, 5, 39, 100])
def test_uniform_stride(stride: int) -> None:
    rule, (h, x, noise) = UniformStride(stride), inputs()
    decision = rule.parallel(h, x, noise)
    assert decision.action.shape == x.shape and decision.logits is None
    assert [t for t in range(LENGTH) if decision.action[1, t]] == list(range(0, LENGTH, stride))
    assert torch.equal(decision.action, stepped(rule, h, x, noise).action)


@pytest.mark.parametrize("stride", [0, -3, 2.5, math.nan])
def test_no_other_stride(stride: float) -> None:
    with pytest.raises(UserError, match="whole number of bytes, at least 1"):
        UniformStride(stride)


def test_iid_random() -> None:
    rule, (h, x, noise) = IidRandom(0.3), inputs(rows=8, length=500)
    decision, step = rule.parallel(h, x, noise), stepped(rule, h, x, noise)
    assert torch.equal(starts_of(decision), step.action) and torch.equal(decision.logits, step.logits)
    assert torch.equal(decision.action, noise < 0.3)
    assert abs(decision.action.double().mean() - 0.3) < 4 * math.sqrt(0.3 * 0.7 / 4000)
    torch.testing.assert_close(decision.logits.sigmoid(), torch.full((8, 500), 0.3))
    assert not list(rule.parameters())


@pytest.mark.parametrize("rate", [0.0, 1.0, 1.5, -0.2, math.nan])
def test_no_other_rate(rate: float) -> None:
    with pytest.raises(UserError, match="strictly between 0 and 1"):
        IidRandom(rate)
