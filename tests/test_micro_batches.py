"""A batch in micro-batches: the update of the whole, on ragged rows, whatever the agent.

Letters: S sequences, K boundary samples of a sequence, B rows.
"""

import pytest
import torch
from learners import AGENTS, ROWS, UPDATES, batch, everything, far, made

from agents.agent import Reinforce
from agents.learner import Learner
from agents.micro_batches import parts
from agents.policies import WindowPolicy
from segment_env.batch import Samples
from segment_env.closed_form import AlignedScorer
from segment_env.errors import UserError


@pytest.mark.parametrize("name", AGENTS)
def test_four_micro_batches_learn_what_the_batch_does(name: str) -> None:
    """Parameters and the controllers' state after 5 updates to 1e-10, and what is logged of each."""
    whole, split = made(name), made(name, micro_batches=4)
    start = everything(whole)
    for n in range(UPDATES):
        expected, got = whole.update(batch(whole, n)), split.update(batch(split, n))
        assert expected.keys() - got.keys() <= {"policy_signal", "policy_power"} and not got["skipped"]  # of live logits alone
        for key, value in got.items():
            torch.testing.assert_close(value.double(), expected[key].double(), rtol=1e-6, atol=1e-10, msg=key)
    assert far(everything(whole), everything(split)) < 1e-10 < 1e-3 < far(everything(whole), start)


def test_a_mean_of_means_would_be_seen() -> None:
    """The same rows as four batches, whose gradients are averaged, learn something else."""
    whole, part = made("batch_relative"), made("batch_relative", rows=ROWS // 4)
    loss = torch.stack([part.loss(batch(part, 0, rank, 4))[0] for rank in range(4)]).mean()
    loss.backward()
    whole.loss(batch(whole, 0))[0].backward()
    pairs = zip(whole.model.parameters(), part.model.parameters(), strict=True)
    assert max(float((one.grad - other.grad).abs().max()) for one, other in pairs) > 1e-3


def test_a_scorer_without_parameters_teaches_in_micro_batches() -> None:
    found = []
    for count in (1, 2):
        learner = made_for_scorer(count)
        for n in range(3):
            learner.update(batch(learner, n))
        found.append(learner.agent.policy.weight.detach().clone())
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)
    assert found[0].any()


def made_for_scorer(count: int) -> Learner:
    agent = Reinforce(WindowPolicy(5, 0.25), AGENTS["leave_one_out"]().advantage, samples=2).double()
    return Learner(AlignedScorer(4, 0.05), agent, ROWS, 3, micro_batches=count)


def test_an_update_that_is_not_finite_is_skipped_whole() -> None:
    learner = made("paper", micro_batches=4)
    learner.update(batch(learner, 0))
    before = everything(learner)
    with torch.no_grad():
        learner.model.head.weight[0, 0] = torch.nan
    assert learner.update(batch(learner, 1))["skipped"]
    after = everything(learner)
    assert after["model.head.weight"].isnan().sum() == 1
    del before["model.head.weight"], after["model.head.weight"]
    assert far(before, after) == 0


def test_an_agent_that_reads_more_than_logits_and_gates_fails() -> None:
    class ReadsNll(Reinforce):
        def loss(self, rollout, live):
            loss, metrics = super().loss(rollout, live)
            return loss + live.nll.sum(), metrics

    learner = made_for_scorer(2)
    learner.agent = ReadsNll(WindowPolicy(5, 0.25), learner.agent.advantage, samples=2).double()
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'sum'"):
        learner.update(batch(learner, 0))


def test_micro_batches_are_whole_sequences_of_equally_many_rows() -> None:
    found = parts(Samples([2, 2, 1, 1, 1, 1]), 2, "cpu")
    assert [(part.sequences, part.rows, part.samples.counts) for part in found] == [
        (slice(0, 2), slice(0, 4), (2, 2)),
        (slice(2, 6), slice(4, 8), (1, 1, 1, 1)),
    ]


@pytest.mark.parametrize(
    ("counts", "count", "says"),
    [
        ([1, 1, 1], 2, "train.micro_batches=2 do not divide the 3 rows of a rank: choose"),
        ([2, 2, 2], 2, "micro_batches=2 do not divide the 6 rows of a rank without parting the 2 samples of a sequence"),
        ([1, 1], 0, "train.micro_batches must be a whole number of at least 1, got 0"),
        ([1, 1], 4, "train.micro_batches=4 do not divide the 2 rows"),
        ([1, 1], True, "must be a whole number of at least 1, got True"),
    ],
)
def test_micro_batches_that_cannot_be(counts: list[int], count: int, says: str) -> None:
    with pytest.raises(UserError, match=says):
        parts(Samples(counts), count, "cpu")
