"""How far the shortcuts of credit are from the gradient: exact expectations over all segmentations of short strings, in float64.

Biases are norms, as a fraction of the norm of the gradient of the undiscounted return, of strings of 8 bytes.

Letters: N segmentations of a string, T bytes.
"""

from functools import cache, partial

import pytest
import torch
from enumeration import DOCUMENTS, EXACT, Strings, expectation
from tensordict import TensorDict
from torch import Tensor, float64

from agents.advantages import discounted_return, early_exit, gae, hard_horizon
from agents.critics import Critic

STRINGS = range(len(DOCUMENTS))


@pytest.fixture(scope="module")
def strings() -> Strings:
    return Strings(DOCUMENTS)


def of_all(strings: Strings, steps: list, values=None) -> Tensor:
    """[4, T] the expected estimate of every string alone, with the state values of ``values(string, rollout)``."""
    found = []
    for s in STRINGS:
        rollout = strings.rollouts[s].clone()
        if values is not None:
            rollout["state_value"], rollout["next", "state_value"] = (each[..., None] for each in values(s, rollout))
        found.append(expectation(rollout[:, None], strings.probability[s], steps)[0])
    return torch.stack(found)


def gradients(strings: Strings) -> Tensor:
    return torch.stack([strings.gradient(s) for s in STRINGS])


def bias(got: Tensor, truth: Tensor) -> float:
    return float((got - truth).norm() / truth.norm())


# --- a horizon ---


def test_a_hard_horizon_is_biased_by_what_lies_behind_it(strings: Strings) -> None:
    """H = 1, 2, 4, 7: 65%, 44%, 23%, 0% of the gradient. The first decision that is a choice sees 7 bytes: nothing lies behind."""
    gradient, found = gradients(strings), {}
    for horizon in (1, 2, 4, 7, 8):
        mean = of_all(strings, [early_exit, partial(hard_horizon, horizon=horizon)])
        expected = torch.stack([strings.surrogate(s, 1.0, horizon=horizon) for s in STRINGS])
        torch.testing.assert_close(mean, expected, **EXACT)
        found[horizon] = bias(mean, gradient)
    print("\nhard horizon:", {horizon: f"{100 * value:.1f}%" for horizon, value in found.items()})
    assert list(found.values()) == pytest.approx([0.654, 0.436, 0.230, 0, 0], abs=1e-3)


def test_a_constant_reward_has_no_gradient_in_a_hard_horizon(strings: Strings) -> None:
    for s in STRINGS:
        rollout = strings.rollouts[s].clone()
        rollout["next", "reward"] = torch.full_like(rollout["next", "reward"], 1.7)
        mean = expectation(rollout[:, None], strings.probability[s], [partial(hard_horizon, horizon=3)])
        torch.testing.assert_close(mean, torch.zeros_like(mean), **EXACT)


# --- a critic ---


@cache
def untrained_critic() -> Critic:
    torch.manual_seed(2)
    critic = Critic(8, hidden_units=8).double().requires_grad_(False)
    critic.last.weight.normal_(std=2.0)
    return critic


def of_a_critic(s: int, rollout: TensorDict) -> tuple[Tensor, Tensor]:
    """A function of h and the bytes since the last start that fits nothing."""
    return untrained_critic()(rollout).squeeze(-1), untrained_critic()(rollout["next"]).squeeze(-1)


def of_bytes_alone(s: int, rollout: TensorDict) -> tuple[Tensor, Tensor]:
    """What is best of all that read bytes, of the future too, and no action: E[G[t]]."""
    back = discounted_return((rollout["next", "reward"]).squeeze(-1), rollout, 1.0)
    value = torch.einsum("n,nt->t", rollout["action_log_prob"].sum(-1).exp(), back).expand_as(back)
    return value, torch.nn.functional.pad(value, (0, 1))[:, 1:]


def of_all_that_was_done(s: int, rollout: TensorDict) -> tuple[Tensor, Tensor]:
    """E[G[t] | a[<t], bytes]: the value of the true state."""
    back = discounted_return(rollout["next", "reward"].squeeze(-1), rollout, 1.0)
    probability, action = rollout["action_log_prob"].sum(-1).exp(), rollout["action"]
    value = torch.zeros_like(back)
    for t in range(back.shape[1]):
        group = action[:, :t].unique(dim=0, return_inverse=True)[1] if t else torch.zeros(len(action), dtype=torch.long)
        total, share = (
            torch.zeros(len(action), dtype=float64).index_add(0, group, each) for each in (probability * back[:, t], probability)
        )
        value[:, t] = (total / share)[group]
    return value, torch.nn.functional.pad(value, (0, 1))[:, 1:]


BIASES = {  # of the gradient, at lambda = 0, 0.5, 0.95, 1
    "critic": (of_a_critic, [0.783, 0.526, 0.089, 0]),
    "bytes_alone": (of_bytes_alone, [0.654, 0.467, 0.076, 0]),
    "true_state": (of_all_that_was_done, [0, 0, 0, 0]),
}


@pytest.mark.parametrize("which", BIASES)
def test_what_a_bootstrapped_value_costs(strings: Strings, which: str) -> None:
    """lambda = 0, 0.5, 0.95, 1: 78%, 53%, 9%, 0% with an untrained critic; 65%, 47%, 8%, 0% with the best function of all bytes.

    No function of bytes alone, however good, can stand in for later rewards, since it does not know what was decided: at lambda = 0 it
    is as biased as a hard horizon of one byte. The value of the true state, which reads all earlier decisions, costs nothing.
    """
    values, expected = BIASES[which]
    gradient, found = gradients(strings), []
    for lam in (0.0, 0.5, 0.95, 1.0):
        mean = of_all(strings, [early_exit, partial(gae, gamma=1.0, lam=lam)], values)
        found.append(bias(mean, gradient))
        if lam == 1 or which == "true_state":
            torch.testing.assert_close(mean, gradient, **EXACT)
    print(f"\nGAE, {which}:", [f"{100 * value:.1f}%" for value in found])
    assert found == pytest.approx(expected, abs=1e-3)


def test_discounted_gae_of_lambda_one_is_the_surrogate(strings: Strings) -> None:
    mean = of_all(strings, [early_exit, partial(gae, gamma=0.9, lam=1.0)], of_a_critic)
    torch.testing.assert_close(mean, torch.stack([strings.surrogate(s, 0.9) for s in STRINGS]), **EXACT)
