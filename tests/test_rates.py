"""Rate controllers: their formulas in numbers, and that they hold a rate."""

import math

import pytest
import torch
from torch import Tensor, nn

from agents.rates import PI, LogitPressure, mean_over
from segment_env.errors import UserError
from segment_env.scorer import capped

THIRD, ALL = math.log(1 / 3), torch.tensor([[False, True, True]])
CONTROLLERS = {"logit_pressure": lambda: LogitPressure(0.2), "pi": lambda: PI(0.2)}


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
    loss = controller(logits, ALL, None)
    check(loss, -0.549306 * (2 * 0.175 + 0.4 * 0.175))  # the sum takes this batch in first
    loss.backward()
    check(logits.grad, [[0, 0.21, 0.21]])
    check(controller(logits_of(math.log(1 / 19), math.log(1 / 19)), ALL, None), -2.944439 * (2 * -0.15 + 0.4 * 0.025))
    check(controller.integral, 0.025)


def test_pi_measures_the_rate_without_the_cap() -> None:
    """l = 2 tanh(log(1/4) / 2) is what the policy acts by in training; log(1/4), p = .2, is what it will be judged by."""
    raw = torch.tensor([[9.0, math.log(1 / 4), math.log(1 / 4)]], dtype=torch.float64)
    logits = capped(raw, 2.0).requires_grad_()
    assert logits[0, 1].sigmoid() > 0.22
    controller = PI(0.2)
    loss = controller(logits, ALL, 2.0)
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
    loss = controller(logits, ALL, 6.0)
    loss.backward()
    check(controller.integral, 0.5 - 0.2)
    assert loss.isfinite() and logits.grad.isfinite().all()


def test_the_sum_is_clamped() -> None:
    controller = PI(0.2, limit=0.3)
    for _ in range(4):
        controller(logits_of(THIRD, 0.0), ALL, None)  # .175 each
    check(controller.integral, 0.3)
    controller(logits_of(math.log(1 / 19), math.log(1 / 19)), ALL, None)  # it comes back at once
    check(controller.integral, 0.15)
    for _ in range(4):
        controller(logits_of(math.log(1 / 19), math.log(1 / 19)), ALL, None)
    check(controller.integral, -0.3)


def test_the_sum_is_part_of_the_checkpoint() -> None:
    controller, other = PI(0.2), PI(0.2)
    controller(logits_of(THIRD, 0.0), ALL, None)
    assert list(controller.state_dict()) == ["integral"]
    other.load_state_dict(controller.state_dict())
    assert torch.equal(other.integral, controller.integral) and other.integral > 0.17
    assert not list(controller.parameters())


def test_the_sum_grows_in_training_only() -> None:
    controller = PI(0.2, kp=1.0, ki=0.5)
    controller(logits_of(THIRD, 0.0), ALL, None)
    controller.eval()
    for _ in range(3):
        check(controller(logits_of(THIRD, 0.0), ALL, None), -0.549306 * (0.175 + 0.5 * 0.175))
    check(controller.integral, 0.175)


@pytest.mark.parametrize("name", CONTROLLERS)
def test_only_choices_count(name: str) -> None:
    logits = torch.tensor([[5.0, THIRD, 7.0], [5.0, 0.0, -8.0]], dtype=torch.float64)
    choice = torch.tensor([[False, True, False], [False, True, False]])
    loss = CONTROLLERS[name]()(logits, choice, None)
    assert torch.equal(loss, CONTROLLERS[name]()(torch.where(choice, logits, 0.0), choice, None))
    assert CONTROLLERS[name]()(logits, torch.zeros_like(choice), None) == 0


def driven(controller: nn.Module, begin: float, updates: int, soft_cap: float | None, push: float = 0.0, step: float = 1.0) -> Tensor:
    """Gradient descent on one raw logit that decides all positions; ``push`` is a gradient that always asks for more starts."""
    raw = torch.tensor(math.log(begin / (1 - begin)), dtype=torch.float64, requires_grad=True)
    choice = torch.ones(4, 16, dtype=torch.bool)
    for _ in range(updates):
        logits = capped(raw, soft_cap).expand(4, 16)
        loss = controller(logits, choice, soft_cap) - push * logits.mean()
        (gradient,) = torch.autograd.grad(loss, raw)
        with torch.no_grad():
            raw -= step * gradient
    return raw.detach()


@pytest.mark.parametrize("begin", [0.01, 0.9])
@pytest.mark.parametrize("soft_cap", [None, 6.0])
def test_both_drive_the_rate_to_its_target(begin: float, soft_cap: float | None) -> None:
    raw = driven(LogitPressure(0.2), begin, 150, soft_cap)
    assert abs(capped(raw, soft_cap).sigmoid() - 0.2) < 0.005
    raw = driven(PI(0.2), begin, 250, soft_cap)
    assert abs(raw.sigmoid() - 0.2) < 0.005


def test_against_a_steady_push_only_the_sum_holds_the_target() -> None:
    # at rest the pressure's gradient, its error, equals the push: .2 + .1; the sum grows until it bears the push alone
    assert abs(driven(LogitPressure(0.2), 0.2, 400, None, push=0.1).sigmoid() - 0.3) < 0.005
    controller = PI(0.2)
    assert abs(driven(controller, 0.2, 400, None, push=0.1).sigmoid() - 0.2) < 0.005
    assert abs(controller.ki * controller.integral - 0.1) < 0.005


@pytest.mark.parametrize("make", [LogitPressure, PI])
@pytest.mark.parametrize("target", [0.0, 1.0, 1.5, -0.2, math.nan])
def test_no_other_target(make: type, target: float) -> None:
    with pytest.raises(UserError, match="strictly between 0 and 1"):
        make(target)
