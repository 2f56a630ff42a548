"""The formulas of arXiv 2602.13940 as numbers worked out by hand, on the configuration ``agent=paper``.

Letters: R reward, G return, A advantage, B rows, T bytes.
"""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from agents import config
from agents.advantages import batch_relative, discounted_return, early_exit
from agents.agent import Reinforce
from agents.estimators import policy_loss
from agents.learner import Learner
from agents.policies import WindowPolicy
from agents.rates import LogitPressure
from agents.returns import discounted_return as returns
from segment_env.batch import Samples, pack
from segment_env.closed_form import TableScorer
from segment_env.scorer import Decision, capped, uncapped
from segment_env.unroll import unroll


@pytest.fixture(scope="module")
def paper() -> dict[str, Any]:
    return config.load(["agent=paper"])


def close(got: Tensor | float, expected: list | float, atol: float = 1e-6) -> None:
    torch.testing.assert_close(torch.as_tensor(got).double(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=atol)


# --- one formula at a time ---


def test_return() -> None:
    # G_2 = 3; G_1 = -2 + .99 * 3 = .97; G_0 = 1 + .99 * .97 = 1.9603
    reward, done = torch.tensor([[1.0, -2.0, 3.0]], dtype=torch.float64), torch.zeros(1, 3, dtype=torch.bool)
    close(returns(reward, done, 0.99), [[1.9603, 0.97, 3.0]], atol=1e-12)


def test_soft_cap() -> None:
    # 6 tanh(.5) = 6 * .46211716; 6 tanh(-2) = -6 * .96402758; and within rounding 6 at 10 times the cap
    raw = torch.tensor([0.0, 3.0, -12.0, 60.0], dtype=torch.float64)
    close(capped(raw, 6.0), [0.0, 2.77270294, -5.78416548, 5.99999998], atol=1e-8)
    close(uncapped(capped(raw, 6.0), 6.0), [0.0, 3.0, -12.0, 60.0])
    assert capped(raw, None) is raw and uncapped(raw, None) is raw


@pytest.mark.parametrize("soft_cap, logit, rate", [(None, -1.386294, 0.2000), (6.0, -1.362141, 0.2039)])
def test_initial_rate(soft_cap: float | None, logit: float, rate: float) -> None:
    # logit(.2) = log(1/4) = -1.386294; 6 tanh(-1.386294 / 6) = -1.362141, and sigmoid of that is .203892
    for n_past in (0, 7, 8):
        policy, h = WindowPolicy(5, 0.2, n_past), torch.randn(2, 4, 5)
        x, noise = torch.zeros(2, 4, dtype=torch.long), torch.rand(2, 4)
        decision = policy.parallel(h, x, noise, soft_cap=soft_cap)
        close(decision.logits, [[logit] * 4] * 2)
        close(decision.logits.sigmoid(), [[rate] * 4] * 2, atol=1e-5)


def test_window_policy() -> None:
    # W_0 h = 1*2 + 2*(-1) + 4*4 = 16, W_1 h = 32, W_2 h = -8; over 16: 1, 2, -.5; logit(.2) = -1.386294
    # a = 1 0 1 1: t = 0 has no past, t = 1 sees a_0 by W_1, t = 2 sees a_0 by W_2, t = 3 sees a_2 by W_1, not a_1
    policy = WindowPolicy(3, 0.2, n_past=2).double()
    with torch.no_grad():
        policy.weight.copy_(torch.tensor([[2.0, -1.0, 4.0], [0.0, 0.0, 8.0], [-8.0, 0.0, 0.0]]))
    h = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64).expand(1, 4, 3)
    actions, x, noise = torch.tensor([[True, False, True, True]]), torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4)
    logits = policy.parallel(h, x, noise, actions=actions).logits
    close(logits, [[1 - 1.386294, 3 - 1.386294, 0.5 - 1.386294, 3 - 1.386294]])
    close(policy.parallel(h, x, noise, actions=actions, soft_cap=6.0).logits, capped(logits, 6.0).tolist(), atol=1e-12)


def test_target_loss() -> None:
    # l = log(1/3) and 0: p = .25 and .5; mean l = -.549306, mean p = .375; -.549306 * (.375 - .2) = -.096129
    # every logit's gradient is (.375 - .2) / 2 = .0875: descending it lowers a rate that is too high
    logits = torch.tensor([[9.0, math.log(1 / 3), 0.0, 9.0]], dtype=torch.float64).requires_grad_()
    loss = LogitPressure(0.2)(logits, torch.tensor([[False, True, True, False]]), 6.0)
    close(loss.detach(), -0.096129)
    loss.backward()
    close(logits.grad, [[0.0, 0.0875, 0.0875, 0.0]], atol=1e-12)


def test_policy_loss_is_the_mean_of_advantage_times_log_prob() -> None:
    # d/dl log P(a) = a - p, so the gradient of -A log P(a) / 2 is -(a - p) A / 2:
    # a = 1, p = .25, A = 4: -.75 * 4 / 2 = -1.5; a = 0, p = .5, A = -3: -(-.5)(-3) / 2 = -.75
    logits = torch.tensor([[math.log(1 / 3), 0.0]], dtype=torch.float64).requires_grad_()
    policy_loss(torch.tensor([[-0.75 * 4, -0.5 * 3]], dtype=torch.float64), logits, 2).backward()
    close(logits.grad, [[-1.5, -0.75]], atol=1e-12)
    written_out = -(4 * logits[0, 0].sigmoid().log() - 3 * (1 - logits[0, 1].sigmoid()).log()) / 2
    close(torch.autograd.grad(written_out, logits)[0], [[-1.5, -0.75]], atol=1e-12)


# --- the configuration ---


def test_numbers_of_the_configuration(paper: dict[str, Any]) -> None:
    agent = config.build({key: value for key, value in paper["agent"].items() if key != "policy"}, policy=None)
    policy = config.build(paper["agent"]["policy"])(width=128)
    assert isinstance(agent, Reinforce) and isinstance(policy, WindowPolicy)
    assert (policy.n_past, policy.logit_scale, tuple(policy.weight.shape)) == (0, 16, (1, 128))
    assert not policy.weight.any() and math.isclose(policy.offset, math.log(0.2 / 0.8))
    steps = [(step.func, step.keywords) for step in agent.advantage]
    assert steps == [(early_exit, {}), (discounted_return, {"gamma": 0.99}), (batch_relative, {"own_sample": True})]
    assert isinstance(agent.rate, LogitPressure) and agent.rate.target == 0.2
    assert (agent.policy_weight, agent.rate_weight, agent.samples, agent.soft_cap) == (0.01, 0.01, 1, 6)
    assert agent.encoder_grad is True and agent.price == 0 and agent.lr_scale == 1
    assert agent.sample_counts(16) == [1] * 16
    assert paper["train"]["optimiser"]["early_weight"] == 0.1 and paper["train"]["optimiser"]["clip"] == 1.0


class Placed(nn.Module):
    """Given actions with given logits, which are all there is to learn."""

    n_past, reads_early_log_p = 0, False

    def __init__(self, actions: Tensor, logits: Tensor):
        super().__init__()
        self.actions, self.logits = actions, nn.Parameter(logits)

    def parallel(self, h: Tensor, x: Tensor, noise: Tensor, early_log_p: Tensor | None, **_: Any) -> Decision:
        return Decision(self.actions, self.logits)


class TwoOrThree(nn.Module):
    """A byte costs 2 nats where a segment starts and 3 elsewhere; the early head knows nothing: log 256."""

    width, dtype = 1, torch.float64

    def encode(self, x: Tensor) -> Tensor:
        return torch.zeros(len(x), x.shape[1] + 1, 1, dtype=self.dtype)

    def early_log_p(self, h: Tensor) -> Tensor:
        return torch.full((*h.shape[:-1], 256), -math.log(256), dtype=self.dtype)

    def nll(self, h: Tensor, starts: Tensor, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return torch.where(starts, 2.0, 3.0).double()


def test_the_whole_loss(paper: dict[str, Any]) -> None:
    """Two rows of three bytes, every term by hand.

    ::

        a         1 0 1          1 1 0           t = 0 is no choice
        p           .5 .25         .5 .5         l = 0, log(1/3) = -1.098612; 0, 0
        R         log 256 - (2 3 2), - (2 2 3)   the log 256 are the same in both rows and drop out of A
        G           -4.98 -2       -4.97 -3      -3 - .99 * 2;  -2 - .99 * 3
        A           -.005 .5        .005 -.5     less the means -4.975 and -2.5
        g         -.0025 -.375   -.0025 -.25     -(a - p) A: .5 * -.005, -.75 * .5; -.5 * .005, .5 * -.5

        L_auto    (2 + 3 + 2 + 2 + 2 + 3) / 6 = 2.333333
        L_early   log 256 = 5.545177
        L_pi      sum(g l) / 4 = -.375 * -1.098612 / 4 = .102995
        L_target  mean l (mean p - .2) = -.274653 * (.4375 - .2) = -.065230
        L         L_auto + .01 L_pi + .01 L_target + .1 L_early = 2.888229
    """
    third = math.log(1 / 3)
    actions = torch.tensor([[True, False, True], [True, True, False]])
    logits = torch.tensor([[0.0, 0.0, third], [0.0, 0.0, 0.0]], dtype=torch.float64)
    policy = Placed(actions, logits)
    agent = config.build({key: value for key, value in paper["agent"].items() if key != "policy"}, policy=policy)
    settings = {**paper["train"]["optimiser"], "precision": "float32"}
    learner = Learner(TwoOrThree(), agent, rows=2, updates=1, **settings)
    loss, metrics, _ = learner.loss(pack([b"abc", b"def"]))
    close(metrics["nll"], 2.333333)
    close(metrics["early_nll"], 5.545177)
    close(metrics["rate"], 0.5)
    close(loss.detach(), 2.888229)
    loss.backward()
    # .01 g / 4 and .01 * (.4375 - .2) / 4 = .00059375 at every choice
    g = [[0.0, -0.00000625 + 0.00059375, -0.0009375 + 0.00059375], [0.0, -0.00000625 + 0.00059375, -0.000625 + 0.00059375]]
    close(policy.logits.grad, g, atol=1e-12)


def test_the_mean_of_one_row_leaves_no_gradient() -> None:
    """With B = 1 the batch-relative mean is the row itself: the paper's estimator needs B >= 2."""
    agent = Reinforce(WindowPolicy(8).double(), [early_exit, partial(discounted_return, gamma=0.99), batch_relative], LogitPressure(0.2))
    rollout, live = unroll(TableScorer(dtype=torch.float64), agent.policy, pack([b"Call me Ishmael."]), Samples([1]), soft_cap=6.0)
    _, metrics = agent.loss(rollout, live)
    assert metrics["g_rms"] == 0
