"""What flipping a decision says it is worth: against the enumeration of all boundaries.

Letters: T bytes.
"""

import pytest
import torch
from torch import float64

from agents.credit import Truth, true_direction
from agents.policies import WindowPolicy
from agents.returns import discounted_return
from segment_env.batch import Samples, pack
from segment_env.closed_form import TableScorer
from segment_env.unroll import action_log_prob, unroll


@pytest.mark.parametrize("gamma", [1.0, 0.7])
def test_it_is_the_expected_direction(gamma: float) -> None:
    """Documents of six bytes, all 32 segmentations of each; within 4.5 standard errors: a false alarm in 1 of 15,000 in all."""
    scorer, batch = TableScorer(scale=2.0, dtype=float64), pack([b"abcdef", b"xyzzyx"])
    policy = WindowPolicy(scorer.width, 0.4).double()
    with torch.no_grad():
        policy.weight.normal_(std=8.0)
    masks = torch.arange(32)[:, None] >> torch.arange(5) & 1
    actions = torch.cat([torch.ones(32, 1, dtype=torch.int64), masks], 1).bool()
    rollout, _ = unroll(scorer, policy, batch, Samples([32, 32]), actions=actions.repeat(2, 1), soft_cap=6.0)
    returns = discounted_return(rollout["next", "reward"].squeeze(-1), rollout["next", "done"].squeeze(-1), gamma)
    log_p = action_log_prob(rollout["logits"], rollout["action"])
    log_p[:, 0] = 0
    weight = log_p.sum(1).exp()
    direction = -(rollout["action"] - rollout["logits"].sigmoid()) * returns
    expected = (weight[:, None] * direction).view(2, 32, 6).sum(1)[:, 1:]
    positions = torch.arange(1, 6).expand(2, 5)
    mean, error = true_direction(scorer, policy, batch, positions, gamma, 6.0, rounds=400)
    assert ((mean - expected).abs() < 4.5 * error + 1e-12).all()
    assert (error < 0.1 * expected.abs().max()).all()


def test_errors_of_known_directions() -> None:
    """One draw in four points the wrong way at the start, none elsewhere; where g is 0 it points nowhere."""
    truth = Truth(torch.tensor([[1, 3]]), torch.tensor([[2.0, -1.0]]), torch.tensor([[0.0, 0.5]]), torch.tensor([[True, False]]))
    directions = torch.zeros(5, 1, 4, dtype=float64)
    directions[:4, 0, 1] = torch.tensor([2.0, 2.0, 2.0, -2.0])
    directions[:4, 0, 3] = -1.0
    found = truth.errors(directions)
    assert found["wrong_at_starts"][0] == 0.25 and found["wrong_elsewhere"][0] == 0.0
    expected = ((16 + 4) / 5 + 1 / 5 - 0.25) / (4 + 1 - 0.25)
    assert found["noise"][0].item() == pytest.approx(expected, abs=1e-12)


def test_a_policy_that_reads_its_past_is_refused() -> None:
    scorer, batch = TableScorer(dtype=float64), pack([b"abc"])
    with pytest.raises(ValueError, match="n_past = 0, got 2"):
        true_direction(scorer, WindowPolicy(scorer.width, 0.4, 2).double(), batch, torch.tensor([[1]]), 1.0, None, 3)
