"""Estimator truth: expectations are exact sums over all segmentations of short strings, in float64, against autograd.

How: see ``enumeration.py``.

Letters: N segmentations of a string, J joint segmentations of all rows, K boundary samples of a string, B rows, T bytes.
"""

from functools import partial
from itertools import combinations, permutations, product
from typing import NamedTuple

import pytest
import torch
from enumeration import DOCUMENTS, EXACT, PRICE, Strings, all_of, cut, estimates, expectation, random_policy, segmentations
from tensordict import TensorDict
from torch import Tensor

from agents.advantages import batch_relative, discounted_return, early_exit, leave_one_out, normalise, subtract_baseline
from agents.agent import Reinforce
from agents.estimators import policy_loss, score_function
from agents.policies import WindowPolicy
from agents.rates import LogitPressure
from segment_env.batch import Batch, Samples, pack
from segment_env.closed_form import TableScorer
from segment_env.errors import UserError
from segment_env.scorer import capped
from segment_env.unroll import unroll


class Case(NamedTuple):
    documents: list[bytes]
    rows: list[int]


CASES = {
    "one": Case(DOCUMENTS, [0]),
    "two_strings": Case(DOCUMENTS, [1, 3]),
    "two_samples": Case(DOCUMENTS, [2, 2]),
    "two_and_one": Case(cut(5, 5), [0, 0, 1]),
    "three_samples": Case(cut(5), [0, 0, 0]),
    "ragged": Case(cut(5, 4, 2), [0, 1, 2]),
    "ragged_pairs": Case(cut(4, 3), [0, 0, 1, 1]),
    "ragged_pair_and_two": Case(cut(2, 5, 4), [0, 1, 1, 2]),
}
#: discounted return, with any of early exit, one of two batch means and leave-one-out
CHOICES = list(product([False, True], [None, False, True], [False, True]))


def orders_of(gamma: float, early: bool, own: bool | None, pairs: bool) -> list[list]:
    """Every order in which the chosen steps can be taken."""
    steps = [partial(discounted_return, gamma=gamma)]
    steps += [early_exit] * early + [partial(batch_relative, own_sample=own)] * (own is not None) + [leave_one_out] * pairs
    return [list(order) for order in permutations(steps)]


def name_of(step) -> str:
    return getattr(step, "func", step).__name__


@pytest.fixture(scope="module")
def cases() -> dict[str, tuple[Strings, TensorDict, Tensor]]:
    made = {}
    for name, case in CASES.items():
        strings = Strings(case.documents)
        made[name] = strings, *strings.joint(case.rows)
    return made


def test_all_segmentations_are_there_once() -> None:
    strings = Strings(DOCUMENTS)
    for rollout, probability in zip(strings.rollouts, strings.probability, strict=True):
        assert rollout.shape == (128, 8) and len(rollout["action"].unique(dim=0)) == 128
        torch.testing.assert_close(probability.sum(), torch.ones((), dtype=torch.float64), **EXACT)
        p = rollout["logits"][0, 1:].sigmoid()
        assert p.min() > 0.05 and p.max() < 0.95
    assert len({tuple(rollout["logits"][0].tolist()) for rollout in strings.rollouts}) == 4


@pytest.mark.parametrize("name", CASES)
def test_batches_side_by_side_are_what_each_is_alone(cases, name: str) -> None:
    _, rollouts, _ = cases[name]
    for early, own, pairs in CHOICES:
        steps = [*orders_of(0.9, early, own, pairs)[-1], normalise]
        together = estimates(rollouts, steps)
        for j in (0, len(rollouts) // 3, len(rollouts) - 1):
            torch.testing.assert_close(score_function(rollouts[j], steps), together[j], rtol=0, atol=1e-12)


@pytest.mark.parametrize("early, own, pairs", CHOICES)
@pytest.mark.parametrize("name", CASES)
def test_the_mean_is_the_gradient(cases, name: str, early: bool, own: bool | None, pairs: bool) -> None:
    strings, rollouts, probability = cases[name]
    rows = CASES[name].rows
    gradient = torch.stack([strings.gradient(s) for s in rows])
    valid = rollouts["valid"][0]
    count = valid.sum(0).double()
    for steps in orders_of(1.0, early, own, pairs):
        if own:  # the mean over all n valid rows, the own one among them, takes 1/n of the gradient with it
            names = [name_of(step) for step in steps]
            kept = (count - 1) / count.clamp(min=1)
            expected = []
            for b, s in enumerate(rows):
                if pairs and rows.count(s) > 1:  # leave-one-out takes that part out of both samples' means
                    expected.append(gradient[b])
                elif names.index("batch_relative") > names.index("discounted_return"):
                    expected.append(gradient[b] * kept)
                else:  # of every single reward
                    expected.append(strings.surrogate(s, 1.0, kept[: valid[b].sum()]))
            expected = torch.stack(expected)
        else:
            expected = gradient
        torch.testing.assert_close(expectation(rollouts, probability, steps), expected, **EXACT)
    assert gradient.abs().amax(1).min() > 0.01  # nor is it true because all is 0


def test_the_own_sample_takes_its_part(cases) -> None:
    """n = 3, 3, 2, 2, 1 rows reach index 0..4 where strings have 5, 4 and 2 bytes."""
    strings, rollouts, probability = cases["ragged"]
    mean = expectation(rollouts, probability, [partial(discounted_return, gamma=1.0), batch_relative])
    kept = torch.tensor([[2 / 3, 2 / 3, 1 / 2, 1 / 2, 0.0]], dtype=torch.float64)
    gradient = torch.stack([strings.gradient(s) for s in (0, 1, 2)])
    torch.testing.assert_close(mean, gradient * kept, **EXACT)
    assert gradient[0, 4].abs() > 0.001 and mean[0, 4] == 0
    _, rollouts, _ = cases["one"]
    assert not estimates(rollouts, [batch_relative]).any()


@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("name", CASES)
def test_discounting_costs_exactly_the_surrogate_bias(cases, name: str, gamma: float) -> None:
    strings, rollouts, probability = cases[name]
    rows = CASES[name].rows
    surrogate = torch.stack([strings.surrogate(s, gamma) for s in rows])
    for early, own, pairs in product([False, True], [None, False], [False, True]):
        for steps in orders_of(gamma, early, own, pairs):
            torch.testing.assert_close(expectation(rollouts, probability, steps), surrogate, **EXACT)
    gradient = torch.stack([strings.gradient(s) for s in rows])
    bias = float((surrogate - gradient).norm() / gradient.norm())
    print(f"\n{name}: gamma {gamma} changes the expected gradient by {100 * bias:.2f}% of its norm")
    assert bias > 0.01


def test_brute_force_agrees_with_autograd_where_nothing_is_discounted(cases) -> None:
    for strings, _, _ in cases.values():
        for s in range(len(strings.rollouts)):
            torch.testing.assert_close(strings.surrogate(s, 1.0), strings.gradient(s), **EXACT)


@pytest.mark.parametrize("name", CASES)
def test_normalising_is_biased(cases, name: str) -> None:
    """Beside the change of scale, which is meant, it turns the expected gradient."""
    strings, rollouts, probability = cases[name]
    gradient = torch.stack([strings.gradient(s) for s in CASES[name].rows])
    mean = expectation(rollouts, probability, [early_exit, partial(discounted_return, gamma=1.0), normalise])
    scale = (mean * gradient).sum() / gradient.square().sum()
    turned = float((mean - scale * gradient).norm() / (scale * gradient).norm())
    print(f"\n{name}: normalise scales the expected gradient by {scale:.3f} and adds {100 * turned:.2f}% of that at a right angle")
    assert scale > 0 and turned > 0.001


@pytest.mark.parametrize("name", ["one", "two_and_one", "ragged", "ragged_pair_and_two"])
def test_a_constant_reward_has_no_gradient(cases, name: str) -> None:
    _, rollouts, probability = cases[name]
    rollouts = rollouts.clone()
    rollouts["next", "reward"] = torch.where(rollouts["valid"], 1.7, 0.0).double()[..., None]
    for early, own, pairs in CHOICES:
        for steps in orders_of(0.9, early, own, pairs):
            for more in ([], [normalise]):
                mean = expectation(rollouts, probability, steps + more)
                atol = 1e-7 if more else 1e-12  # where a baseline leaves nothing, normalise magnifies what rounding leaves
                torch.testing.assert_close(mean, torch.zeros_like(mean), rtol=0, atol=atol)


@pytest.mark.parametrize("early, own, pairs", CHOICES)
def test_permuting_rows_permutes_the_terms(cases, early: bool, own: bool | None, pairs: bool) -> None:
    _, rollouts, _ = cases["ragged_pair_and_two"]
    batch = rollouts[777]
    order = torch.tensor([2, 0, 3, 1])
    for steps in orders_of(0.9, early, own, pairs):
        g = score_function(batch, [*steps, normalise])
        torch.testing.assert_close(score_function(batch[order], [*steps, normalise]), g[order], rtol=0, atol=1e-12)
        assert g.any() and not g[~batch["is_choice"]].any()


# --- parameters of the policy ---


def enumerated_logits(policy: WindowPolicy, h: Tensor, starts: Tensor, soft_cap: float | None) -> Tensor:
    """The policy's formula, spelt out: h [T, D], starts [N, T] -> logits [N, T]."""
    logits = []
    for t in range(starts.shape[1]):
        score = (h[t] * policy.weight[0]).sum().expand(len(starts))
        for j in range(1, min(policy.n_past, t) + 1):
            score = score + starts[:, t - j] * (h[t] * policy.weight[j]).sum()
        logits.append(score / 16 + torch.tensor(0.35 / 0.65, dtype=torch.float64).log())
    return capped(torch.stack(logits, 1), soft_cap)


def enumerated_gradient(policy: WindowPolicy, batch: Batch, soft_cap: float | None) -> Tensor:
    """Gradient in the policy's weights of -E[sum_t r_t] of the one string of ``batch``."""
    scorer = TableScorer(dtype=torch.float64, byte_noise=1.0)
    starts = segmentations(batch.bytes.shape[1])
    x, h = batch.bytes.expand(len(starts), -1), scorer.encode(batch.bytes)[0, :-1]
    logits = enumerated_logits(policy, h, starts, soft_cap)
    p = torch.where(starts, logits.sigmoid(), 1 - logits.sigmoid())[:, 1:].prod(-1)
    nll = scorer.nll(h.expand(len(starts), -1, -1), starts, x)
    cost = nll.sum(-1) + PRICE * (starts.sum(-1) - 1)  # the early head's reward is the same for all
    (gradient,) = torch.autograd.grad((p * cost).sum(), policy.weight)
    return gradient


@pytest.mark.parametrize("soft_cap", [None, 1.5])
@pytest.mark.parametrize("n_past", [0, 2])
@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_policy_loss_has_the_gradient_of_the_expected_return(document: bytes, n_past: int, soft_cap: float | None) -> None:
    policy, batch = random_policy(n_past), pack([document])
    starts = segmentations(8)
    scorer = TableScorer(dtype=torch.float64, byte_noise=1.0)
    rollout, live = unroll(scorer, policy, batch, Samples([128]), actions=starts, soft_cap=soft_cap, price=PRICE)
    torch.testing.assert_close(live.logits[:, 1:], enumerated_logits(policy, live.h[0, :-1], starts, soft_cap)[:, 1:], **EXACT)
    probability = rollout["action_log_prob"].sum(-1).exp()
    g = score_function(rollout, [early_exit, partial(discounted_return, gamma=1.0)])
    policy_loss(probability[:, None] * g, live.logits, 1).backward()
    expected = enumerated_gradient(policy, batch, soft_cap)
    torch.testing.assert_close(policy.weight.grad, expected, **EXACT)
    assert expected.abs().amax(1).min() > 1e-3


@pytest.mark.parametrize("n_past", [0, 2])
@pytest.mark.parametrize("baseline", ["batch_relative", "leave_one_out", "both", "of_all_bytes", "all"])
def test_a_baseline_leaves_the_gradient_of_the_parameters(baseline: str, n_past: int) -> None:
    """Two samples of one string and one of another, whose decisions may depend on the two before: W_0, W_1 and W_2."""
    policy, documents, rows = random_policy(n_past), cut(5, 4), [0, 0, 1]
    strings = Strings(documents, policy=policy, soft_cap=1.5)
    rollouts, probability = strings.joint(rows)
    rollouts["baseline"] = torch.randn(2, 5, dtype=torch.float64)[rows].expand(rollouts.shape)  # whatever the bytes are
    logits = strings.rows(strings.logits, rows, all_of([len(strings.rollouts[s]) for s in rows]))
    found = {
        "batch_relative": [partial(batch_relative, own_sample=False)],
        "leave_one_out": [leave_one_out],
        "both": [partial(batch_relative, own_sample=False), leave_one_out],
        "of_all_bytes": [subtract_baseline],
        "all": [subtract_baseline, partial(batch_relative, own_sample=False), leave_one_out],
    }
    g = estimates(rollouts, [early_exit, partial(discounted_return, gamma=1.0), *found[baseline]])
    policy_loss(probability[:, None, None] * g, logits, 1).backward()
    expected = [enumerated_gradient(policy, pack([documents[s]]), 1.5) for s in rows]
    torch.testing.assert_close(policy.weight.grad, torch.stack(expected).sum(0), **EXACT)
    assert policy.weight.grad.abs().amax(1).min() > 1e-3


@pytest.mark.parametrize("soft_cap", [None, 1.5])
def test_the_agents_loss_has_the_gradient_of_the_expected_return(soft_cap: float | None) -> None:
    """The whole agent with paired samples, every pair of segmentations one at a time; 8 choices share the denominator."""
    policy, batch = random_policy(), pack([b"Call "])
    steps = [early_exit, partial(discounted_return, gamma=1.0), partial(batch_relative, own_sample=False), leave_one_out]
    settings = dict(policy_weight=1.0, rate_weight=0.0, samples=2, soft_cap=soft_cap, price=PRICE)
    agent = Reinforce(policy, steps, LogitPressure(0.2), **settings)
    scorer = TableScorer(dtype=torch.float64, byte_noise=1.0)
    for pair in product(segmentations(5), repeat=2):
        arguments = dict(actions=torch.stack(pair), soft_cap=agent.soft_cap, price=agent.price)
        rollout, live = unroll(scorer, policy, batch, Samples([2]), **arguments)
        loss, _ = agent.loss(rollout, live)
        (8 * rollout["action_log_prob"].sum().exp() * loss).backward()
    torch.testing.assert_close(policy.weight.grad, 2 * enumerated_gradient(policy, batch, soft_cap), **EXACT)


def test_leave_one_out_needs_a_second_sample() -> None:
    for step in (leave_one_out, partial(leave_one_out)):
        for settings in ({}, {"samples": 1}, {"samples": 2, "samples_share": 0.0}):
            with pytest.raises(UserError, match="leave_one_out needs"):
                Reinforce(random_policy(), [step], LogitPressure(0.2), **settings)


# --- variance ---


@pytest.mark.parametrize("byte_noise, least", [(0.0, 3.0), (1.0, 6.0), (4.0, 50.0)])
def test_paired_samples_cut_the_variance(byte_noise: float, least: float) -> None:
    """Two rows: two samples of one string with leave-one-out, or two strings with early exit and the other row's mean.

    Total variance, exact: of all entries of g, given the bytes; and of the gradient in the policy's weights, where the choice of
    the strings counts too. ``byte_noise`` is the scorer's knob: how much of log p depends on the bytes alone.
    """
    strings = Strings(DOCUMENTS, byte_noise)
    scorer = TableScorer(dtype=torch.float64)
    h = scorer.encode(pack(DOCUMENTS).bytes)[:, :-1]
    back = partial(discounted_return, gamma=1.0)
    recipes = {
        "paired": ([(s, s) for s in range(4)], [early_exit, back, leave_one_out]),
        "centred": (list(combinations(range(4), 2)), [early_exit, back, partial(batch_relative, own_sample=False)]),
    }
    given_bytes, of_weights = {}, {}
    for name, (batches, steps) in recipes.items():
        inner, first, second = [], [], []
        for rows in batches:
            rollouts, probability = strings.joint(list(rows))
            g = estimates(rollouts, steps)
            mean = torch.einsum("j,jbt->bt", probability, g)
            inner.append((probability * (g - mean).square().sum((1, 2))).sum())
            weight_gradient = torch.einsum("jbt,btd->jd", g, h[list(rows)]) / 16
            first.append(probability @ weight_gradient)
            second.append((probability * weight_gradient.square().sum(1)).sum())
        given_bytes[name] = float(torch.stack(inner).mean())
        of_weights[name] = float(torch.stack(second).mean() - torch.stack(first).mean(0).square().sum())
    ratio, with_bytes = (variance["centred"] / variance["paired"] for variance in (given_bytes, of_weights))
    print(f"\nbyte_noise {byte_noise}: variance centred / paired = {ratio:.1f} given the bytes, {with_bytes:.1f} in the weights")
    assert ratio > least and with_bytes > least
