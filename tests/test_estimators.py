"""Estimator truth: expectations are exact sums over all segmentations of short strings, in float64, against autograd.

A string of T bytes has 2^(T-1) segmentations. All of them are scored by ``unroll``; the rollouts of several rows are assembled
from these, and every one of them goes through the estimator that trains, weighted by its probability. Nothing is sampled.

Letters: N segmentations of a string, J joint segmentations of all rows, K boundary samples of a string, B rows, T bytes.
"""

from functools import partial
from itertools import combinations, permutations, product
from typing import NamedTuple

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from agents.advantages import batch_relative, discounted_return, early_exit, leave_one_out, normalise
from agents.agent import Reinforce
from agents.estimators import policy_loss, score_function
from agents.policies import WindowPolicy
from agents.rates import LogitPressure
from segment_env.batch import Batch, Samples, pack
from segment_env.closed_form import TableScorer
from segment_env.errors import UserError
from segment_env.scorer import capped
from segment_env.unroll import unroll

DOCUMENTS = [b"Call me ", b"ab;\xff\x00 cd", b"aaaaaaaa", b"0.1, 2.3"]
PRICE = 1 / 16
EXACT = dict(rtol=0, atol=1e-10)


def random_policy(n_past: int = 0) -> WindowPolicy:
    policy = WindowPolicy(8, 0.35, n_past).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        policy.weight.copy_(10 * torch.randn(policy.weight.shape, generator=generator, dtype=torch.float64))
    return policy


def segmentations(length: int) -> Tensor:
    """All starts of ``length`` bytes: [2^(length-1), length] bool, True at t = 0."""
    return torch.tensor([(True, *rest) for rest in product([False, True], repeat=length - 1)])


class Strings:
    """All segmentations of each of some strings, scored: what the rows of a batch are taken from."""

    def __init__(self, documents: list[bytes], byte_noise: float = 1.0, soft_cap: float | None = None):
        batch = pack(documents)
        counts = [2 ** (len(document) - 1) for document in documents]
        actions = torch.zeros(sum(counts), batch.bytes.shape[1], dtype=torch.bool)
        for document, rows in zip(documents, actions.split(counts), strict=True):
            rows[:, : len(document)] = segmentations(len(document))
        scorer = TableScorer(byte_noise=byte_noise, dtype=torch.float64)
        rollout, _ = unroll(scorer, random_policy(), batch, Samples(counts), actions=actions, soft_cap=soft_cap, price=PRICE)
        #: of each string, its N rollouts [N, T]
        self.rollouts = rollout.split(counts)
        #: [N] probability of each segmentation
        self.probability = [each["action_log_prob"].sum(-1).exp() for each in self.rollouts]

    def joint(self, rows: list[int]) -> tuple[TensorDict, Tensor]:
        """All that can happen to a batch whose row b is string rows[b]: rollouts [J, B, T] and their probabilities [J]."""
        which = torch.tensor(list(product(*(range(len(self.rollouts[s])) for s in rows))))
        rollouts = torch.stack([self.rollouts[s][which[:, b]] for b, s in enumerate(rows)], 1)
        return rollouts, torch.stack([self.probability[s][which[:, b]] for b, s in enumerate(rows)]).prod(0)

    def gradient(self, string: int) -> Tensor:
        """[T] gradient of -E[sum_t r_t] in the logits of a string, by autograd of the enumerated expectation."""
        rollout = self.rollouts[string]
        logits = rollout["logits"][0].clone().requires_grad_()
        p = torch.where(rollout["action"].bool(), logits.sigmoid(), 1 - logits.sigmoid())
        p = torch.where(rollout["is_choice"], p, 1.0).prod(-1)
        (-(p * rollout["next", "reward"].sum((1, 2))).sum()).backward()
        return logits.grad

    def surrogate(self, string: int, gamma: float, weight: Tensor | None = None) -> Tensor:
        """[T] E[-(a_t - p_t) sum_k gamma^k weight_{t+k} r_{t+k}] by plain loops: what discounting makes of the gradient."""
        rollout, probability = self.rollouts[string], self.probability[string]
        length = int(rollout["valid"][0].sum())
        p, reward = rollout["logits"].sigmoid(), rollout["next", "reward"].squeeze(-1)
        weight = torch.ones(length, dtype=p.dtype) if weight is None else weight
        expected = torch.zeros_like(p[0])
        for t in range(1, length):
            for k in range(length - t):
                score = rollout["action"][:, t] - p[:, t]
                expected[t] -= (probability * score * reward[:, t + k]).sum() * gamma**k * weight[t + k]
        return expected


def estimates(rollouts: TensorDict, steps: list) -> Tensor:
    """The estimator of every joint rollout: [J, B, T]. It runs as it is, J batches side by side."""
    keys = ["action", "logits", "is_choice", "valid", "sequence", *(("next", name) for name in ("reward", "early_nll", "done"))]
    return torch.vmap(lambda rollout: score_function(rollout, steps))({key: rollouts[key] for key in keys})


def expectation(rollouts: TensorDict, probability: Tensor, steps: list) -> Tensor:
    """[B, T] exact mean of the estimator."""
    return torch.einsum("j,jbt->bt", probability, estimates(rollouts, steps))


class Case(NamedTuple):
    documents: list[bytes]
    rows: list[int]


def cut(*lengths: int) -> list[bytes]:
    return [document[:length] for document, length in zip(DOCUMENTS, lengths, strict=False)]


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
