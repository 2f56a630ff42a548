"""The offset of the logits: it brings the rate to its target, and leaves the policy as it was."""

import pytest
import torch
from torch import nn

from agents.calibration import offset_for, shifted_logits
from agents.policies import WindowPolicy
from agents.rules import IidRandom
from segment_env.batch import Episodes, Samples, pack
from segment_env.closed_form import CountingStream, TableScorer
from segment_env.errors import UserError
from segment_env.streams import moby_dick
from segment_env.unroll import unroll
from tests.worlds import tiny_unet


def policy_of(n_past: int) -> WindowPolicy:
    policy = WindowPolicy(8, 0.3, n_past)
    nn.init.normal_(policy.weight, std=20.0)
    return policy


@pytest.mark.parametrize("n_past", [0, 2])
@pytest.mark.parametrize("target", [0.05, 0.2, 0.6])
def test_the_rate_is_the_target(n_past: int, target: float) -> None:
    scorer, policy = TableScorer(), policy_of(n_past)
    batches = [Episodes(CountingStream(6, 0.3), 4, 300, seed=1).batch(n) for n in range(3)] + [pack([b"a", b"short", b"documents"])]
    before = policy.offset
    offset = offset_for(scorer, policy, batches, target)
    assert policy.offset == before and abs(offset) > 0.05
    with shifted_logits(policy, offset):
        rollouts = [unroll(scorer, policy, batch, Samples([1] * len(batch.bytes)))[0] for batch in batches]
    p = torch.cat([rollout["logits"].sigmoid()[rollout["is_choice"]] for rollout in rollouts])
    assert p.mean() == pytest.approx(target, abs=1e-3 if n_past else 1e-5)  # sampled decisions move the rate in steps
    assert policy.offset == before


@pytest.mark.parametrize("target", [0.05, 0.2, 0.6])
def test_the_rate_of_thresholded_boundaries_is_the_target(target: float) -> None:
    scorer, policy = tiny_unet(), WindowPolicy(32, 0.3, logit_scale=1.0).double()
    nn.init.normal_(policy.weight)
    batches = [Episodes(moby_dick().stream("train"), 4, 200, seed=1).batch(n) for n in range(2)]
    sampled, offset = offset_for(scorer, policy, batches, target), offset_for(scorer, policy, batches, target, thresholded=True)
    assert abs(offset - sampled) > 0.005
    with shifted_logits(policy, offset), torch.no_grad():
        rollouts = [unroll(scorer, policy, batch, Samples([1] * 4))[0] for batch in batches]
    above = torch.cat([rollout["logits"][rollout["is_choice"]] > 0 for rollout in rollouts])
    assert above.double().mean() == pytest.approx(target, abs=0.01)  # what 16 equal states of 1,592 are worth


def test_what_cannot_be_calibrated() -> None:
    batch = [Episodes(CountingStream(6, 0.3), 2, 20, seed=1).batch(0)]
    with pytest.raises(UserError, match="IidRandom has no offset of its logits to calibrate"):
        offset_for(TableScorer(), IidRandom(0.2), batch, 0.2)
    with pytest.raises(UserError, match="strictly between 0 and 1"):
        offset_for(TableScorer(), policy_of(0), batch, 1.0)
    certain = policy_of(0)
    nn.init.normal_(certain.weight, std=1e4)
    with pytest.raises(UserError, match="no offset of the logits brings the rate to 0.001"):
        offset_for(TableScorer(), certain, batch, 0.001)
