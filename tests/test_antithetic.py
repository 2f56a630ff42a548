"""Antithetic pairs and DisARM: expectation and variance are exact sums over all that a pair can do, in float64.

A pair acts on u and 1 - u. At a choice it does one of three things: (1, 0) or (0, 1), each with probability min(p, 1 - p), or the
same in both rows, what is more probable, with |1 - 2p|: 3^(T-1) cells a string.

Letters: J joint segmentations of all rows, K boundary samples of a string, B rows, T bytes.
"""

from functools import partial

import pytest
import torch
from enumeration import DOCUMENTS, EXACT, PRICE, Strings, all_of, cut, estimates, expectation, random_policy, variance
from tensordict import TensorDict
from test_advantages import rollout_of
from torch import Tensor
from worlds import Stepped

from agents import config, training
from agents.advantages import batch_relative, discounted_return, early_exit, group_relative, leave_one_out
from agents.agent import Agent, Reinforce
from agents.estimators import disarm, partner, score_function
from agents.learner import Learner
from agents.policies import WindowPolicy
from agents.rates import LogitPressure
from agents.rules import IidRandom
from segment_env.batch import Samples, pack
from segment_env.closed_form import TableScorer
from segment_env.errors import UserError
from segment_env.unroll import unroll

MEAN_OF_OTHERS = partial(batch_relative, own_sample=False)
BACK = partial(discounted_return, gamma=1.0)
ONE_PAIR = [(0, 2)]  # string, rows
CASES = {
    "pair": (cut(8), ONE_PAIR),
    "pair_of_other_bytes": ([DOCUMENTS[1]], ONE_PAIR),
    "ragged_pairs": (cut(5, 3), [(0, 2), (1, 2)]),
    "ragged_pairs_and_one": (cut(4, 4, 3), [(0, 2), (1, 1), (2, 2)]),
    "pair_and_ones": (cut(2, 5, 4), [(0, 1), (1, 2), (2, 1)]),
}
POLICIES = {"flat": dict(target=0.35), "steep": dict(target=0.45, scale=40.0), "rare": dict(target=0.2, scale=20.0)}
CAPS = [None, 6.0]


class Pairs(Strings):
    """All that antithetic pairs of strings can do."""

    def cells(self, string: int) -> tuple[Tensor, Tensor]:
        """Segmentations of both rows [3^(T-1), 2], as their numbers among all, and the probabilities [3^(T-1)]."""
        rollout = self.rollouts[string]
        p = rollout["logits"][0][rollout["is_choice"][0]].sigmoid()
        cell = all_of([3] * len(p))
        first = torch.where(cell == 2, p > 0.5, cell == 0)
        second = torch.where(cell == 2, p > 0.5, cell == 1)
        digit = 2 ** torch.arange(len(p)).flip(0)
        probability = torch.where(cell == 2, (1 - 2 * p).abs(), torch.minimum(p, 1 - p)).prod(1)
        return torch.stack([(each * digit).sum(1) for each in (first, second)], 1), probability

    def coupled(self, units: list[tuple[int, int]]) -> tuple[TensorDict, Tensor, list[int]]:
        """All that can happen to units (string, 1 or 2 rows): rollouts [J, B, T], probabilities [J], the string of every row."""
        made = [self.cells(s) if k == 2 else (torch.arange(len(self.rollouts[s]))[:, None], self.probability[s]) for s, k in units]
        which = all_of([len(probability) for _, probability in made])
        numbers = torch.cat([number[which[:, u]] for u, (number, _) in enumerate(made)], 1)
        probability = torch.stack([probability[which[:, u]] for u, (_, probability) in enumerate(made)]).prod(0)
        rows = [s for s, k in units for _ in range(k)]
        return self.rows(self.rollouts, rows, numbers), probability, rows


def coupled(name: str, policy: str = "steep", soft_cap: float | None = None, **settings) -> tuple[Pairs, TensorDict, Tensor, list[int]]:
    documents, units = CASES[name]
    strings = Pairs(documents, policy=random_policy(**POLICIES[policy]), soft_cap=soft_cap, **settings)
    return strings, *strings.coupled(units)


# --- the cells are what pairs do ---


@pytest.mark.parametrize("policy", POLICIES)
def test_every_row_of_a_pair_alone_is_a_sample_of_the_policy(policy: str) -> None:
    _, rollouts, probability, _ = coupled("pair", policy)
    assert len(probability) == 3**7
    torch.testing.assert_close(probability.sum(), torch.ones((), dtype=torch.float64), **EXACT)
    p = rollouts["logits"][0, :, 1:].sigmoid()
    assert policy == "rare" or (p.min() < 0.45 and p.max() > 0.55)
    rate = torch.einsum("j,jbt->bt", probability, rollouts["action"][..., 1:].double())
    torch.testing.assert_close(rate, p, **EXACT)


def test_unroll_plays_the_cells() -> None:
    """Sampled: two rows agree only on what is more probable, and each of the three cells comes as often as it should."""
    policy, batch = random_policy(**POLICIES["steep"]), pack([DOCUMENTS[0]] * 4000, seed=3)
    rollout, _ = unroll(TableScorer(dtype=torch.float64), policy, batch, Samples([2] * 4000, antithetic=True))
    first, second = rollout["action"].view(4000, 2, 8).bool().unbind(1)
    p = rollout["logits"][0].sigmoid()
    assert not (first & second)[:, p < 0.5].any() and not (~first & ~second)[:, p > 0.5][:, 1:].any()
    for cell in (first & ~second, second & ~first):
        expected = torch.minimum(p, 1 - p)[1:]
        assert ((cell[:, 1:].double().mean(0) - expected).abs() < 4 * (expected * (1 - expected) / 4000).sqrt()).all()


# --- expectation ---


@pytest.mark.parametrize("soft_cap", CAPS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", CASES)
def test_its_mean_is_the_gradient(name: str, policy: str, soft_cap: float | None) -> None:
    strings, rollouts, probability, rows = coupled(name, policy, soft_cap)
    gradient = torch.stack([strings.gradient(s) for s in rows])
    for steps in ([BACK], [early_exit, BACK], [early_exit, BACK, MEAN_OF_OTHERS], [MEAN_OF_OTHERS, BACK]):
        torch.testing.assert_close(expectation(rollouts, probability, steps, disarm), gradient, **EXACT)
    assert gradient.abs().amax(1).min() > 1e-3
    surrogate = torch.stack([strings.surrogate(s, 0.9) for s in rows])
    steps = [early_exit, partial(discounted_return, gamma=0.9)]
    torch.testing.assert_close(expectation(rollouts, probability, steps, disarm), surrogate, **EXACT)


def test_a_mean_that_holds_the_row_itself_takes_nothing_of_a_pairs_gradient() -> None:
    """The batch's mean is the same for both rows and cancels, their own share of it too."""
    strings, rollouts, probability, rows = coupled("ragged_pairs")
    gradient = torch.stack([strings.gradient(s) for s in rows])
    torch.testing.assert_close(expectation(rollouts, probability, [BACK, batch_relative], disarm), gradient, **EXACT)


@pytest.mark.parametrize("name", ["pair", "pair_and_ones"])
def test_the_score_function_is_right_on_pairs_and_leave_one_out_is_not(name: str) -> None:
    """The other sample is no baseline for a row that it is coupled with: what Reinforce refuses."""
    strings, rollouts, probability, rows = coupled(name)
    gradient = torch.stack([strings.gradient(s) for s in rows])
    torch.testing.assert_close(expectation(rollouts, probability, [early_exit, BACK]), gradient, **EXACT)
    for step, scale in ((leave_one_out, 1.0), (group_relative, 2.0)):
        mean = scale * expectation(rollouts, probability, [early_exit, BACK, step])
        pairs = torch.tensor([rows.count(s) > 1 for s in rows])
        bias = float((mean - gradient)[pairs].norm() / gradient[pairs].norm())
        print(f"\n{name}: {step.__name__} on an antithetic pair changes the expected gradient by {100 * bias:.0f}% of its norm")
        assert bias > 0.3
    double = expectation(rollouts, probability, [early_exit, BACK, leave_one_out], disarm)[pairs]
    torch.testing.assert_close(double, 2 * gradient[pairs], **EXACT)


@pytest.mark.parametrize("name", CASES)
def test_a_constant_reward_has_no_gradient(name: str) -> None:
    _, rollouts, probability, rows = coupled(name)
    rollouts["next", "reward"] = torch.where(rollouts["valid"], 1.7, 0.0).double()[..., None]
    rollouts["next", "early_nll"] = torch.zeros_like(rollouts["next", "reward"])
    for steps in ([BACK], [partial(discounted_return, gamma=0.9)], [BACK, MEAN_OF_OTHERS]):
        g = estimates(rollouts, steps, disarm)
        assert not g[:, [rows.count(s) > 1 for s in rows]].any()  # not even by chance
        torch.testing.assert_close(torch.einsum("j,jbt->bt", probability, g), torch.zeros_like(g[0]), **EXACT)


@pytest.mark.parametrize("soft_cap", CAPS)
def test_the_agents_loss_has_the_gradient_of_the_expected_return(soft_cap: float | None) -> None:
    """The whole agent, every cell of a pair one at a time, against autograd; 8 choices share the denominator."""
    policy, document = random_policy(**POLICIES["steep"]), b"Call "
    strings = Pairs([document], policy=policy, soft_cap=soft_cap)
    settings = dict(policy_weight=1.0, rate_weight=0.0, samples=2, antithetic=True, soft_cap=soft_cap, price=PRICE)
    agent = Reinforce(policy, [early_exit, BACK], LogitPressure(0.2), estimator=disarm, **settings)
    numbers, probability = strings.cells(0)
    scorer = TableScorer(byte_noise=1.0, dtype=torch.float64)
    for pair, share in zip(strings.rollouts[0]["action"][numbers], probability, strict=True):
        rollout, live = unroll(scorer, policy, pack([document]), Samples([2]), actions=pair, soft_cap=soft_cap, price=PRICE)
        (8 * share * agent.loss(agent.prepare(rollout), live)[0]).backward()
    got, policy.weight.grad = policy.weight.grad, None
    probability = strings.rollouts[0]["action_log_prob"].sum(-1).exp()
    log_p = torch.nn.functional.logsigmoid(torch.where(strings.rollouts[0]["action"].bool(), strings.logits[0], -strings.logits[0]))
    score = torch.where(strings.rollouts[0]["is_choice"], log_p, 0.0).sum(-1)
    (-2 * (probability * strings.rollouts[0]["next", "reward"].sum((1, 2)) * score).sum()).backward()
    torch.testing.assert_close(got, policy.weight.grad, **EXACT)
    assert got.abs().max() > 0.1


# --- variance ---


def variances(policy: dict, byte_noise: float, gamma: float = 1.0) -> dict[str, float]:
    """Exact, of the mean g of the two rows that decode one string, summed over its bytes; mean over the strings."""
    found: dict[str, list[float]] = {"plain": [], "leave_one_out": [], "disarm": [], "score_function_on_pairs": []}
    steps = [early_exit, partial(discounted_return, gamma=gamma)]
    strings = Pairs(DOCUMENTS, policy=random_policy(**policy), byte_noise=byte_noise)
    for s in range(len(DOCUMENTS)):
        rollouts, probability = strings.joint([s, s])
        found["plain"].append(variance(estimates(rollouts, steps).mean(1), probability))
        found["leave_one_out"].append(variance(estimates(rollouts, [*steps, leave_one_out]).mean(1), probability))
        rollouts, probability, _ = strings.coupled([(s, 2)])
        found["disarm"].append(variance(estimates(rollouts, steps, disarm).mean(1), probability))
        found["score_function_on_pairs"].append(variance(estimates(rollouts, steps).mean(1), probability))
    return {name: sum(values) / len(values) for name, values in found.items()}


@pytest.mark.parametrize("policy", POLICIES)
def test_pairs_that_move_apart_have_less_variance_than_independent_ones(policy: str) -> None:
    """On the mean of four strings, at equal rows: DisARM below leave-one-out below the plain estimator.

    The bytes' noise is nothing to the first two; the score function on antithetic pairs keeps it, but has less of the rest.
    """
    quiet, noisy = variances(POLICIES[policy], 0.0), variances(POLICIES[policy], 4.0)
    for byte_noise, found in ((0, quiet), (4, noisy)):
        print(f"\n{policy}, byte_noise {byte_noise}: variance " + ", ".join(f"{name} {value:.2f}" for name, value in found.items()))
        assert found["disarm"] < 0.8 * found["leave_one_out"] and found["leave_one_out"] < found["plain"]
        assert found["score_function_on_pairs"] < found["plain"]
    for name in ("disarm", "leave_one_out"):
        assert quiet[name] == pytest.approx(noisy[name])
    assert noisy["plain"] > 50 * noisy["leave_one_out"] and noisy["score_function_on_pairs"] > 30 * noisy["disarm"]


# --- one number at a time ---


def test_numbers() -> None:
    # |logit| = log 3: sigmoid = 3/4. A - A' = 4 - 1, 2 - 5, 6 - 3, 1 - 0
    # a - a' = 1, -1, 0 and, at t = 0, no choice: g = -1/2 * -3 * 1 * 3/4, -1/2 * 3 * -1 * 3/4, 0 for both rows
    rollout = rollout_of([[1.0, 2.0, 6.0, 1.0], [0.0, 5.0, 3.0, 0.0]], [7, 7])
    rollout["action"] = torch.tensor([[1, 1, 0, 1], [1, 0, 1, 1]])
    rollout["logits"] = torch.tensor([[9.0, 3.0, 3.0, 3.0]], dtype=torch.float64).log().expand(2, 4)
    for sign in (1, -1):
        rollout["logits"] = sign * rollout["logits"]
        torch.testing.assert_close(disarm(rollout, []), torch.tensor([[0.0, 9 / 8, 9 / 8, 0.0]] * 2, dtype=torch.float64), **EXACT)


@pytest.mark.parametrize(
    "sequence, partners",
    [
        ([5], [0]),
        ([5, 5], [1, 0]),
        ([5, 6, 7], [0, 1, 2]),
        ([9, 9, 3, 4, 4], [1, 0, 2, 4, 3]),
        ([1, 2, 2, 2, 2, 3], [0, 2, 1, 4, 3, 5]),
        ([8, 8, 8, 0, 0], [1, 0, 2, 4, 3]),  # the last of an odd number is alone
        ([4, 4, 4], [1, 0, 2]),
    ],
)
def test_partner(sequence: list[int], partners: list[int]) -> None:
    rollout = TensorDict({"sequence": torch.tensor(sequence)[:, None].expand(-1, 3)}, [len(sequence), 3])
    assert partner(rollout).tolist() == partners


def test_rows_without_a_partner_get_the_score_function() -> None:
    _, rollouts, _, rows = coupled("pair_and_ones")
    steps = [early_exit, BACK, MEAN_OF_OTHERS]
    alone = [b for b, s in enumerate(rows) if rows.count(s) == 1]
    for j in (0, 123, len(rollouts) - 1):
        assert torch.equal(disarm(rollouts[j], steps)[alone], score_function(rollouts[j], steps)[alone])


def test_permuting_sequences_permutes_the_terms() -> None:
    _, rollouts, _, rows = coupled("ragged_pairs_and_one")
    assert rows == [0, 0, 1, 2, 2]
    steps, batch = [early_exit, BACK, MEAN_OF_OTHERS], rollouts[777]
    g = disarm(batch, steps)
    for order in ([2, 3, 4, 0, 1], [3, 4, 0, 1, 2], [1, 0, 2, 4, 3]):
        torch.testing.assert_close(disarm(batch[order], steps), g[order], rtol=0, atol=1e-12)
    assert g.abs().amax(1).min() > 0 and not g[~batch["is_choice"]].any()


# --- the agent ---


def agent_of(policy: WindowPolicy | None = None, **settings) -> Reinforce:
    chosen = {"estimator": disarm, "samples": 2, "antithetic": True, **settings}
    return Reinforce(random_policy() if policy is None else policy, [early_exit, BACK], **chosen)


def test_the_learner_plays_antithetic_pairs() -> None:
    for antithetic in (True, False):
        agent = agent_of(antithetic=antithetic, estimator=disarm if antithetic else score_function, samples_share=0.5)
        learner = Learner(TableScorer(dtype=torch.float64), agent, 4, 1)
        assert learner.samples.counts == (2, 1, 1) and learner.samples.antithetic is antithetic
        _, _, rollout = learner.loss(pack(DOCUMENTS[:3]))
        assert bool(torch.allclose(rollout["noise"][0] + rollout["noise"][1], torch.ones(8))) is antithetic
        assert torch.equal(agent.direction(rollout), agent.estimator(rollout, agent.advantage))


def test_an_agent_without_advantages_has_no_direction() -> None:
    with pytest.raises(NotImplementedError):
        Agent(IidRandom(0.2)).direction(TensorDict({}, []))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"antithetic": False}, "disarm needs agent.antithetic=true and an even number of agent.samples, got False and 2"),
        ({"samples": 3}, "disarm needs agent.antithetic=true and an even number of agent.samples, got True and 3"),
        ({"samples": 1}, "agent.antithetic=true needs pairs: agent.samples of 2 or more and agent.samples_share above 0, got 1 and 1.0"),
        ({"samples_share": 0.0}, "agent.antithetic=true needs pairs.*got 2 and 0.0"),
        ({"policy": random_policy(2)}, "disarm needs decisions that do not depend on earlier ones, as those of WindowPolicy may"),
        ({"policy": Stepped(random_policy())}, "disarm needs decisions that do not depend on earlier ones, as those of Stepped may"),
        ({"estimator": lambda rollout: rollout}, "agent.estimator <lambda> cannot be called with a rollout and the advantage's steps"),
        ({"estimator": partial(disarm), "antithetic": False}, "disarm needs agent.antithetic=true"),
    ],
)
def test_a_mistake_is_named(settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        agent_of(**settings)


@pytest.mark.parametrize("step", [leave_one_out, group_relative])
@pytest.mark.parametrize("estimator", [disarm, score_function])
def test_pairs_are_no_independent_samples(step, estimator) -> None:
    with pytest.raises(UserError, match=f"the advantage step {step.__name__} needs independent samples, but agent.antithetic=true"):
        Reinforce(random_policy(), [BACK, step], estimator=estimator, samples=2, antithetic=True)


def test_a_rollout_of_dependent_decisions_is_refused() -> None:
    rollout, _ = unroll(TableScorer(dtype=torch.float64), random_policy(2), pack([b"Call"]), Samples([2], antithetic=True))
    with pytest.raises(UserError, match="the policy's n_past must be 0"):
        disarm(rollout, [])


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["agent=antithetic", "agent.antithetic=false"], "disarm needs agent.antithetic=true"),
        (["agent=antithetic", "agent.policy.n_past=1"], "disarm needs decisions that do not depend on earlier ones"),
        (["agent=antithetic", "agent.samples=3"], "an even number of agent.samples, got True and 3"),
        (["agent=rloo", "+agent.antithetic=true"], "leave_one_out needs independent samples"),
        (["agent=default", "+agent.antithetic=true"], "agent.antithetic=true needs pairs"),
        (["agent=default", "+agent.estimator._target_=agents.estimators.disarm", "+agent.estimator._partial_=true"], "disarm needs"),
    ],
)
def test_a_mistake_of_the_configuration_is_named(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        training.Run(config.load([*overrides, "data=made_up"]))
