"""The baseline that reads the bytes to come: what it reads, that it costs no bias, and that it takes the bytes' noise away.

Letters: J joint segmentations of all rows, B rows, T bytes.
"""

import copy
from functools import partial

import pytest
import torch
from enumeration import DOCUMENTS, EXACT, Strings, cut, estimates, expectation, random_policy, variance
from tensordict import TensorDict
from torch import Tensor, float64
from torch.nn import functional
from worlds import tiny_unet

from agents import config, training
from agents.advantages import batch_relative, discounted_return, early_exit, leave_one_out, subtract_baseline
from agents.agent import Reinforce
from agents.hindsight import Hindsight
from agents.learner import Learner
from agents.rates import PI
from agents.rules import IidRandom
from segment_env.batch import Episodes, Samples, pack
from segment_env.closed_form import TableScorer
from segment_env.errors import UserError
from segment_env.noise import BYTES, hashed
from segment_env.unroll import unroll

RAGGED = [b"Call me Ishmael.", b"Some", b"years ago-"]
STEPS = [early_exit, partial(discounted_return, gamma=0.9), subtract_baseline]


def baseline_of(width: int = 8, gamma: float = 0.9, seed: int = 0) -> Hindsight:
    """One that has learned something, though nothing of use."""
    baseline, generator = Hindsight(width, gamma, 5).double(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in baseline.parameters():
            parameter.normal_(generator=generator)
    return baseline


def agent_of(baseline: Hindsight | None = None, width: int = 8, **settings) -> Reinforce:
    policy = random_policy() if width == 8 else IidRandom(0.3)
    chosen = {"baseline": baseline_of(width) if baseline is None else baseline, "soft_cap": 6.0, **settings}
    return Reinforce(policy, STEPS, PI(0.35), **chosen)


def played(policy=None, documents: list[bytes] = RAGGED) -> TensorDict:
    scorer = TableScorer(byte_noise=1.0, dtype=float64)
    return unroll(scorer, random_policy() if policy is None else policy, pack(documents), Samples([1] * len(documents)), soft_cap=6.0)[0]


# --- what it reads ---


def test_its_formula() -> None:
    baseline, rollout = baseline_of(), played()
    got = baseline(rollout)
    assert got.shape == (3, 16) and got.dtype == float64
    h, early = rollout["hidden"], rollout["next", "early_nll"].squeeze(-1)
    for b, document in enumerate(RAGGED):
        later = torch.zeros((), dtype=float64)
        for t in reversed(range(len(document))):
            read = torch.cat([h[b, t], early[b, t, None]])
            features = baseline.context.weight @ read + baseline.context.bias + baseline.byte.weight[document[t]]
            later = functional.gelu(features) @ baseline.of_byte.weight[0] + 0.9 * later
            expected = later + h[b, t] @ baseline.of_hidden.weight[0] + baseline.of_hidden.bias[0]
            torch.testing.assert_close(got[b, t], expected, rtol=0, atol=1e-12)
        assert not got[b, len(document) :].any()


def test_it_reads_no_decision_and_nothing_that_follows_from_one() -> None:
    """The same for all segmentations of the same bytes, bit for bit, and whatever stands in keys that it must not read."""
    baseline, strings = baseline_of(), Strings(DOCUMENTS)
    for rollout in strings.rollouts:
        value = baseline(rollout)
        assert torch.equal(value, value[:1].expand_as(value)) and value.std() > 0.1
    rollout = played(random_policy(2))
    expected = baseline(rollout)
    reads = {"hidden", "valid", ("next", "byte"), ("next", "early_nll"), ("next", "done")}
    for key in set(rollout.keys(True, True)) - reads:
        other = rollout.clone()
        other[key] = ~other[key] if other[key].dtype == torch.bool else other[key] + 3
        assert torch.equal(baseline(other), expected), key


def test_it_reads_the_future() -> None:
    """A byte, its surprise and the h that has read it move the values at their own and all earlier positions, and no later one."""
    baseline, rollout = baseline_of(), played()
    before = baseline(rollout)
    for key in (("next", "byte"), ("next", "early_nll"), "hidden"):
        other = rollout.clone()
        other[key][0, 9] += 1
        moved = baseline(other) != before
        assert moved[0, :10].all() and not moved[0, 10:].any() and not moved[1:].any(), key


def test_padding_is_nothing_to_it() -> None:
    baseline, rollout = baseline_of(), played()
    dirty, outside = rollout.clone(), ~rollout["valid"]
    for key in ("hidden", ("next", "early_nll")):
        dirty[key][outside] = torch.nan
    dirty["next", "byte"][outside] = 999
    assert torch.equal(baseline(dirty), baseline(rollout)) and not baseline(dirty)[outside].any()


def test_it_begins_at_nothing() -> None:
    assert not Hindsight(8, 0.9).double()(played()).any()


def test_the_gamma_is_a_gamma() -> None:
    for gamma, units in ((-0.1, 4), (1.1, 4), (0.9, 0)):
        with pytest.raises(UserError, match=f"gamma must lie in .0, 1. and its units be at least 1, got {gamma} and {units}"):
            Hindsight(8, gamma, units)


# --- bias ---


@pytest.mark.parametrize("rows", [[0], [0, 0, 1], [2, 0, 1]], ids=str)
def test_it_leaves_the_expected_gradient(rows: list[int]) -> None:
    """Any function of all bytes, the learned one among them, before and after other steps."""
    strings = Strings(cut(5, 4, 3))
    rollouts, probability = strings.joint(rows)
    gradient = torch.stack([strings.gradient(s) for s in rows])
    back = partial(discounted_return, gamma=1.0)
    others = partial(batch_relative, own_sample=False)
    fitted = baseline_of()
    with torch.no_grad():
        learned = torch.stack([fitted(rollouts[:, b]) for b in range(len(rows))], 1)
    for baseline in (10 * torch.randn(3, 5, dtype=float64)[rows].expand_as(learned), learned):
        rollouts["baseline"] = baseline
        for steps in ([back, subtract_baseline], [subtract_baseline, back], [back, others, subtract_baseline, leave_one_out]):
            torch.testing.assert_close(expectation(rollouts, probability, [early_exit, *steps]), gradient, **EXACT)
    rollouts["baseline"] = rollouts["action"].double()  # nor does the test pass whatever is subtracted
    biased = expectation(rollouts, probability, [early_exit, back, subtract_baseline])
    assert (biased - gradient)[rollouts["is_choice"][0]].abs().min() > 0.05


def test_a_constant_reward_has_no_gradient() -> None:
    strings = Strings(cut(5, 4))
    rollouts, probability = strings.joint([0, 1])
    rollouts["next", "reward"] = torch.where(rollouts["valid"], 1.7, 0.0).double()[..., None]
    rollouts["baseline"] = torch.randn(2, 5, dtype=float64).expand(rollouts.shape)
    mean = expectation(rollouts, probability, STEPS)
    torch.testing.assert_close(mean, torch.zeros_like(mean), **EXACT)


def test_permuting_rows_permutes_the_terms() -> None:
    agent = agent_of().eval()
    g = agent.direction(agent.prepare(played()))
    order = [2, 0, 1]
    torch.testing.assert_close(agent.direction(agent.prepare(played()[order])), g[order], rtol=0, atol=1e-12)


# --- fitting ---


def test_its_loss() -> None:
    """baseline_weight times the mean over choices of (b - G)^2, which reaches the baseline alone; the policy's is as without."""
    baseline = baseline_of()
    agent = agent_of(baseline, policy_weight=0.5, baseline_weight=0.125)
    rollout, live = unroll(TableScorer(dtype=float64), agent.policy, pack(RAGGED), Samples([1] * 3), soft_cap=6.0)
    prepared = agent.prepare(rollout)
    assert not prepared["baseline"].requires_grad
    loss, metrics = agent.loss(prepared, live)
    loss.backward()
    choice, target = rollout["is_choice"], discounted_return(rollout["next", "reward"].squeeze(-1), rollout, 0.9)
    error = (baseline(rollout) - target)[choice].square().mean()
    expected = torch.autograd.grad(0.125 * error, list(baseline.parameters()))
    share = 1 - float(error.detach() / target[choice].var(correction=0))
    for parameter, gradient in zip(baseline.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-12)
    got, agent.policy.weight.grad = agent.policy.weight.grad, None
    steps = [*STEPS[:2], lambda values, _: values - prepared["baseline"]]
    alone = Reinforce(agent.policy, steps, PI(0.35), policy_weight=0.5, soft_cap=6.0)
    _, live = unroll(TableScorer(dtype=float64), agent.policy, pack(RAGGED), Samples([1] * 3), soft_cap=6.0)
    alone.loss(alone.prepare(rollout), live)[0].backward()
    torch.testing.assert_close(got, agent.policy.weight.grad, rtol=0, atol=1e-12)
    assert metrics["baseline_explained"] == pytest.approx(share)


def test_it_is_read_before_it_is_fitted_on_the_same_rows() -> None:
    baseline = baseline_of()
    agent, before = agent_of(baseline), copy.deepcopy(baseline)
    learner, seen = Learner(TableScorer(dtype=float64), agent, 3, 5, lr=0.1, warmup=0.0), []
    direct = agent.direction
    agent.direction = lambda rollout: seen.append(rollout) or direct(rollout)
    for n in range(2):
        learner.update(pack(RAGGED, seed=n))
        with torch.no_grad():
            assert torch.equal(seen[n]["baseline"], before(seen[n]))
            assert (baseline(seen[n]) - before(seen[n])).abs().max() > 0.01
        before = copy.deepcopy(baseline)


def test_it_has_a_learning_rate_of_its_own_and_leaves_the_encoder_alone() -> None:
    model = tiny_unet()
    agent = Reinforce(
        training.make_agent(config.load(["agent=default"])["agent"], 32).double().policy, STEPS, baseline=baseline_of(32), lr_scale=8
    )
    agent.baseline_lr_scale = 0.5
    learner = Learner(model, agent, 2, 1, lr=1e-3, warmup=0.0)
    assert [group["initial_lr"] for group in learner.optimiser.param_groups] == [1e-3, 8e-3, 5e-4]
    assert [len(group["params"]) for group in learner.optimiser.param_groups[1:]] == [1, 6]
    rollout, live = unroll(model, agent.policy, pack(RAGGED[:2]), learner.samples)
    agent.loss(agent.prepare(rollout), live)[0].backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.grad.any() for parameter in agent.baseline.parameters())


class FourSymbols:
    """Bytes of four symbols, at random: little to learn, and much noise of the bytes' own."""

    unit, sample_rate = "byte", None

    def sequences(self, seed: int, index: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
        x = 97 + hashed(seed, BYTES, index[:, None], torch.arange(length)) % 4
        return x, torch.ones_like(x, dtype=torch.bool), torch.ones_like(index, dtype=torch.bool)


def test_a_fitted_one_lowers_the_variance() -> None:
    """Exact variance of g given the bytes, of strings not seen: 78.5 with early exit alone, 11.6 with it, 10.3 with the best there is."""
    torch.manual_seed(0)
    scorer, policy = TableScorer(byte_noise=1.0, dtype=float64), random_policy()
    baseline = Hindsight(8, 0.9).double()
    agent = Reinforce(policy, STEPS, baseline=baseline, baseline_weight=1.0, lr_scale=0.0)
    learner, stream = Learner(scorer, agent, 64, 400, lr=0.02), FourSymbols()
    episodes = Episodes(stream, 64, 8, seed=1)
    explained = [float(learner.update(episodes.batch(n))["baseline_explained"]) for n in range(400)]
    assert torch.equal(policy.weight, random_policy().weight)
    documents = [bytes(row.tolist()) for row in stream.sequences(2, torch.arange(6), 8)[0]]
    strings = Strings(documents, price=0.0)
    found: dict[str, list[float]] = {"alone": [], "fitted": [], "best of all": []}
    for rollout, probability in zip(strings.rollouts, strings.probability, strict=True):
        back = discounted_return(rollout["next", "reward"].squeeze(-1), rollout, 0.9)
        weight = probability[:, None] * (rollout["action"] - rollout["logits"].sigmoid()).square()
        best = ((weight * back).sum(0) / weight.sum(0).clamp(min=1e-12)).expand_as(back)  # d/db E[(a - p)^2 (G - b)^2] = 0
        with torch.no_grad():
            values = (torch.zeros_like(back), baseline(rollout), best)
        for name, value in zip(found, values, strict=True):
            rollout["baseline"] = value
            found[name].append(variance(estimates(rollout[:, None], STEPS), probability))
    means = {name: sum(values) / len(values) for name, values in found.items()}
    print(f"\nvariance {means}; explained {explained[0]:.3f} to {explained[-1]:.3f}")
    alone, fitted, least = means.values()
    assert least < fitted < alone / 4 and fitted < 1.2 * least and explained[-1] > 0.5


# --- mistakes ---


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["agent.baseline=null"], "the advantage step subtract_baseline needs a baseline, and agent.baseline is missing"),
        (
            ["agent.advantage.subtract_baseline=null"],
            "agent.baseline is given, but no step of agent.advantage subtracts it: add subtract_baseline",
        ),
        (["agent.baseline.gamma=2"], "a baseline's gamma must lie in .0, 1. and its units be at least 1, got 2"),
        (["agent.baseline.gamma=x"], "agent.baseline cannot be built"),
    ],
)
def test_a_mistake_of_the_configuration_is_named(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        training.Run(config.load(["agent=hindsight", "data=made_up", *overrides]))


def test_the_shipped_one_is_told_the_width() -> None:
    run = training.Run(config.load(["agent=hindsight", "data=made_up", "gamma=0.95"]))
    assert run.agent.baseline.of_hidden.in_features == run.model.width == 128 and run.agent.baseline.gamma == 0.95
