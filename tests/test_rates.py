"""Rate controllers: their formulas in numbers, and that they hold a rate."""

import math

import pytest
import torch
from torch import Tensor, nn
from worlds import make_env

from agents.rates import PI, Free, Lagrangian, LogitPressure, RatioLoss, mean_over
from agents.rules import UniformStride
from segment_env.actor import Actor
from segment_env.closed_form import AlignedScorer
from segment_env.errors import UserError
from segment_env.scorer import capped, uncapped

THIRD, ALL = math.log(1 / 3), torch.tensor([[False, True, True]])
CONTROLLERS = {
    "free": Free,
    "logit_pressure": lambda: LogitPressure(0.2),
    "pi": lambda: PI(0.2),
    "ratio_loss": lambda: RatioLoss(0.2),
    "ratio_loss_hard": lambda: RatioLoss(0.2, sampled=False),
    "lagrangian": lambda: Lagrangian(0.2),
}


def told(controller: Free, logits: Tensor, choice: Tensor, soft_cap: float | None) -> Tensor:
    """A batch as an agent takes it: the controller is told its rate, then asked for its loss."""
    controller.update(mean_over(uncapped(logits.detach(), soft_cap).sigmoid(), choice))
    return controller(logits, choice, soft_cap)


def logits_of(*values: float) -> Tensor:
    return torch.tensor([[9.0, *values]], dtype=torch.float64, requires_grad=True)


def check(got: Tensor, expected: list | float, atol: float = 1e-6) -> None:
    torch.testing.assert_close(got.detach().double(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=atol)


def test_mean_over() -> None:
    values, mask = torch.tensor([[1.0, 2.0, 6.0], [math.nan, 4.0, math.inf]]), torch.tensor([[True, False, True], [False, True, False]])
    assert mean_over(values, mask) == (1 + 6 + 4) / 3
    assert mean_over(values, torch.zeros_like(mask)) == 0


def test_logit_pressure() -> None:
    # mean l = (log(1/3) + 0) / 2 = -.549306, mean p = (.25 + .5) / 2 = .375, error .175
    logits = logits_of(THIRD, 0.0)
    loss = LogitPressure(0.2)(logits, ALL, 6.0)
    check(loss, -0.549306 * 0.175)
    loss.backward()
    check(logits.grad, [[0, 0.0875, 0.0875]], atol=1e-12)


def test_pi() -> None:
    # errors .175 and then -.15 (p = .05 twice, l = log(1/19) = -2.944439): sums .175 and .025
    controller = PI(0.2, kp=2.0, ki=0.4, limit=10.0)
    logits = logits_of(THIRD, 0.0)
    loss = told(controller, logits, ALL, None)
    check(loss, -0.549306 * (2 * 0.175 + 0.4 * 0.175))  # the sum takes this batch in first
    loss.backward()
    check(logits.grad, [[0, 0.21, 0.21]])
    check(told(controller, logits_of(math.log(1 / 19), math.log(1 / 19)), ALL, None), -2.944439 * (2 * -0.15 + 0.4 * 0.025))
    check(controller.integral, 0.025)


def test_pi_measures_the_rate_without_the_cap() -> None:
    """l = 2 tanh(log(1/4) / 2) is what the policy acts by in training; log(1/4), p = .2, is what it will be judged by."""
    raw = torch.tensor([[9.0, math.log(1 / 4), math.log(1 / 4)]], dtype=torch.float64)
    logits = capped(raw, 2.0).requires_grad_()
    assert logits[0, 1].sigmoid() > 0.22
    controller = PI(0.2)
    loss = told(controller, logits, ALL, 2.0)
    loss.backward()
    check(logits.grad, [[0, 0, 0]], atol=1e-8)
    check(controller.integral, 0.0, atol=1e-8)
    under_pressure = capped(raw, 2.0).requires_grad_()
    LogitPressure(0.2)(under_pressure, ALL, 2.0).backward()
    assert (under_pressure.grad[0, 1:] > 0.01).all()  # the paper's holds the capped rate


def test_pi_where_the_cap_has_saturated() -> None:
    """In float32 a raw logit of 80 comes back from the cap as infinite: p is 1, and nothing is nan."""
    logits = capped(torch.tensor([[0.0, 80.0, -80.0]]), 6.0).requires_grad_()
    controller = PI(0.2)
    loss = told(controller, logits, ALL, 6.0)
    loss.backward()
    check(controller.integral, 0.5 - 0.2)
    assert loss.isfinite() and logits.grad.isfinite().all()


def test_the_sum_is_clamped() -> None:
    controller = PI(0.2, limit=0.3)
    for _ in range(4):
        told(controller, logits_of(THIRD, 0.0), ALL, None)  # .175 each
    check(controller.integral, 0.3)
    told(controller, logits_of(math.log(1 / 19), math.log(1 / 19)), ALL, None)  # it comes back at once
    check(controller.integral, 0.15)
    for _ in range(4):
        told(controller, logits_of(math.log(1 / 19), math.log(1 / 19)), ALL, None)
    check(controller.integral, -0.3)


def test_the_sum_is_part_of_the_checkpoint() -> None:
    controller, other = PI(0.2), PI(0.2)
    told(controller, logits_of(THIRD, 0.0), ALL, None)
    assert list(controller.state_dict()) == ["integral"]
    other.load_state_dict(controller.state_dict())
    assert torch.equal(other.integral, controller.integral) and other.integral > 0.17
    assert not list(controller.parameters())


def test_asking_for_a_loss_changes_nothing() -> None:
    controller = PI(0.2, kp=1.0, ki=0.5)
    controller.update(torch.tensor(0.375))
    for _ in range(3):
        check(controller(logits_of(THIRD, 0.0), ALL, None), -0.549306 * (0.175 + 0.5 * 0.175))
    check(controller.integral, 0.175)


def test_ratio_loss() -> None:
    # N = 5, G = F = .375: 1.25 * (4 * .375^2 + .625^2) = 1.19140625; dL/dG = (.375 / .2 - 1) / .8 = 1.09375, over 2 choices
    logits = logits_of(THIRD, 0.0)
    loss = RatioLoss(0.2)(logits, ALL, None)
    check(loss, 1.19140625, atol=1e-12)
    loss.backward()
    check(logits.grad, [[0, 1.09375 * 0.25 * 0.75 / 2, 1.09375 * 0.25 / 2]], atol=1e-12)
    # hard: one of two probabilities reaches one half, F = .5: 1.25 * (4 * .5 * .375 + .5 * .625) = 1.328125, dL/dG = 1.875
    logits = logits_of(THIRD, 0.0)
    loss = RatioLoss(0.2, sampled=False)(logits, ALL, None)
    check(loss, 1.328125, atol=1e-12)
    loss.backward()
    check(logits.grad, [[0, 1.875 * 0.25 * 0.75 / 2, 1.875 * 0.25 / 2]], atol=1e-12)


def test_ratio_loss_at_its_minimum() -> None:
    logits = logits_of(math.log(1 / 4), math.log(1 / 4))
    loss = RatioLoss(0.2)(logits, ALL, None)
    check(loss, 1.0, atol=1e-12)
    loss.backward()
    check(logits.grad, [[0, 0, 0]], atol=1e-12)


def test_ratio_loss_moves_what_lies_below_the_cap() -> None:
    """The gradient in the raw logit does not depend on the cap, and is 0, no nan, where the cap has saturated."""
    raw = torch.tensor([[0.0, 0.7, -0.4]], dtype=torch.float64, requires_grad=True)
    found = [torch.autograd.grad(RatioLoss(0.2)(capped(raw, cap), ALL, cap), raw)[0] for cap in (None, 2.0)]
    torch.testing.assert_close(*found, rtol=0, atol=1e-10)
    raw = torch.tensor([[0.0, 80.0, -80.0]], requires_grad=True)
    (gradient,) = torch.autograd.grad(RatioLoss(0.2)(capped(raw, 6.0), ALL, 6.0), raw)
    assert torch.equal(gradient, torch.zeros_like(raw))


def test_lagrangian_price_follows_the_constraint() -> None:
    controller = Lagrangian(0.2, step=0.5, damping=0.0, limit=0.3)
    prices = []
    for rate in (0.5, 0.4, 0.9, 0.1, 0.0, 0.0, 0.0, 0.0):
        controller.update(torch.tensor(rate))
        prices.append(round(float(controller.price), 6))
    assert prices == [0.15, 0.25, 0.3, 0.25, 0.15, 0.05, -0.05, -0.15]  # .3 is the limit, to either side
    assert controller(logits_of(THIRD, 0.0), ALL, None) == 0
    assert list(controller.state_dict()) == ["price", "dual"]
    damped = Lagrangian(0.2, step=0.5, damping=2.0, limit=5.0)
    prices = []
    for rate in (0.5, 0.4, 0.1):  # dual .15, .25, .2; error .3, .2, -.1
        damped.update(torch.tensor(rate))
        prices.append(round(float(damped.price), 6))
    assert prices == [0.75, 0.65, 0.0]


def test_an_environment_follows_the_price_it_was_given() -> None:
    controller = Lagrangian(0.2, step=1.0, damping=0.0)
    scorer = AlignedScorer(5, 0.1)
    env = make_env(scorer, price=controller.price)

    def reward() -> Tensor:
        env.set_seed(3)
        return env.rollout(12, Actor(UniformStride(1), scorer))["next", "reward"].squeeze(-1)

    before = reward()
    controller.update(torch.tensor(0.9))
    after = reward()
    assert torch.equal(after[:, 0], before[:, 0])  # no choice at t = 0
    torch.testing.assert_close(after[:, 1:], before[:, 1:] - 0.7)


@pytest.mark.parametrize("bad", [{"step": 0.0}, {"price": -2.0, "limit": 1.0}, {"price": 2.0, "limit": 1.0}])
def test_no_such_price(bad: dict) -> None:
    with pytest.raises(UserError, match="positive step, a damping from 0 on and a first price within its limit"):
        Lagrangian(0.2, **bad)


@pytest.mark.parametrize("name", CONTROLLERS)
def test_only_choices_count(name: str) -> None:
    logits = torch.tensor([[5.0, THIRD, 7.0], [5.0, 0.0, -8.0]], dtype=torch.float64)
    choice = torch.tensor([[False, True, False], [False, True, False]])
    loss = CONTROLLERS[name]()(logits, choice, None)
    assert torch.equal(loss, CONTROLLERS[name]()(torch.where(choice, logits, 0.0), choice, None))
    nothing = CONTROLLERS[name]()(logits, torch.zeros_like(choice), None)
    assert nothing == (1.25 if name.startswith("ratio") else 0)  # of the ratio loss a constant is left, without a gradient


def driven(controller: nn.Module, begin: float, updates: int, soft_cap: float | None, push: float = 0.0, step: float = 1.0) -> Tensor:
    """Gradient descent on one raw logit that decides all positions; ``push`` is a gradient that always asks for more starts."""
    raw = torch.tensor(math.log(begin / (1 - begin)), dtype=torch.float64, requires_grad=True)
    choice = torch.ones(4, 16, dtype=torch.bool)
    for _ in range(updates):
        logits = capped(raw, soft_cap).expand(4, 16)
        loss = told(controller, logits, choice, soft_cap) - push * logits.mean()
        (gradient,) = torch.autograd.grad(loss, raw)
        with torch.no_grad():
            raw -= step * gradient
    return raw.detach()


@pytest.mark.parametrize("begin", [0.01, 0.9])
@pytest.mark.parametrize("soft_cap", [None, 6.0])
def test_they_drive_the_rate_to_its_target(begin: float, soft_cap: float | None) -> None:
    raw = driven(LogitPressure(0.2), begin, 150, soft_cap)
    assert abs(capped(raw, soft_cap).sigmoid() - 0.2) < 0.005
    raw = driven(PI(0.2), begin, 250, soft_cap)
    assert abs(raw.sigmoid() - 0.2) < 0.005
    raw = driven(RatioLoss(0.2), begin, 250, soft_cap)
    assert abs(raw.sigmoid() - 0.2) < 0.005


def test_against_a_steady_push_only_the_sum_holds_the_target() -> None:
    # at rest the pressure's gradient, its error, equals the push: .2 + .1; the sum grows until it bears the push alone
    assert abs(driven(LogitPressure(0.2), 0.2, 400, None, push=0.1).sigmoid() - 0.3) < 0.005
    controller = PI(0.2)
    assert abs(driven(controller, 0.2, 400, None, push=0.1).sigmoid() - 0.2) < 0.005
    assert abs(controller.ki * controller.integral - 0.1) < 0.005


@pytest.mark.parametrize("make", [LogitPressure, PI, RatioLoss, Lagrangian])
@pytest.mark.parametrize("target", [0.0, 1.0, 1.5, -0.2, math.nan])
def test_no_other_target(make: type, target: float) -> None:
    with pytest.raises(UserError, match="strictly between 0 and 1"):
        make(target)
