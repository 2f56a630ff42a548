"""What the trainer asks of an agent, and the two that the main job needs: REINFORCE, and a rule that learns nothing.

Letters: S sequences, K boundary samples of a sequence, B rows, T bytes.
"""

import inspect
from collections.abc import Sequence

from tensordict import TensorDictBase
from torch import Tensor, nn

from agents.advantages import Step, gae, group_relative, leave_one_out
from agents.estimators import policy_loss, score_function
from agents.rates import Free, mean_over
from segment_env.errors import UserError
from segment_env.masking import mask_invalid
from segment_env.scorer import Policy, uncapped
from segment_env.unroll import Live


class Agent(nn.Module):
    """A policy and how it learns. Subclasses give :meth:`loss`; the trainer reads the rest.

    Args: ``policy``; ``rate``, a controller of ``agents.rates``; ``samples`` K of the sequences that get more than one row,
    ``samples_share`` of the rows that belong to them; ``soft_cap`` of the logits in training; ``price`` of a start in nats;
    ``encoder_grad``: the policy's gradient reaches the encoder; ``lr_scale``: the policy's learning rate over the model's;
    ``epochs``: optimiser steps that the agent makes on a batch, of which the model shares the first.

    Raises UserError on a cap, a scale or a number of epochs that is none, and on ``encoder_grad`` with several epochs.
    """

    def __init__(
        self,
        policy: Policy,
        rate: Free | None = None,
        *,
        samples: int = 1,
        samples_share: float = 1.0,
        soft_cap: float | None = None,
        price: float = 0.0,
        encoder_grad: bool = False,
        lr_scale: float = 1.0,
        epochs: int = 1,
    ):
        super().__init__()
        if not (soft_cap is None or soft_cap > 0) or not lr_scale >= 0:
            raise UserError(f"agent.soft_cap must be positive or null and agent.lr_scale not negative, got {soft_cap} and {lr_scale}")
        if type(epochs) is not int or epochs < 1:
            raise UserError(f"agent.epochs must be a whole number of at least 1, got {epochs!r}")
        if encoder_grad and epochs > 1:
            raise UserError(
                f"agent.encoder_grad=true needs one epoch on live states, but agent.epochs={epochs}: set one of the two otherwise"
            )
        if not isinstance(rate, Free | None):
            raise UserError(f"agent.rate must be a controller of agents.rates, got {rate!r}")
        self.policy, self.rate, self.samples, self.samples_share = policy, rate or Free(), samples, samples_share
        self.soft_cap, self.price, self.encoder_grad, self.lr_scale = soft_cap, float(price), encoder_grad, lr_scale
        self.epochs = epochs

    def sample_counts(self, rows: int) -> list[int]:
        """K of every sequence, so that they fill ``rows`` = B. Raises UserError where they cannot."""
        multiple = round(rows * self.samples_share, 6) if self.samples > 1 else 0  # 25 * 0.28 is not 7, but near it
        if self.samples < 1 or multiple % self.samples or not 0 <= multiple <= rows:
            raise UserError(
                f"agent.samples={self.samples} boundary samples per sequence do not fill a share agent.samples_share={self.samples_share} "
                f"of {rows} rows: {rows} times the share must be a multiple of the samples"
            )
        return [self.samples] * int(multiple // self.samples) + [1] * int(rows - multiple)

    def groups(self) -> list[tuple[list[nn.Parameter], float]]:
        """Parameters, and their learning rate over the model's."""
        return [(list(self.parameters()), self.lr_scale)]

    def prepare(self, rollout: TensorDictBase) -> TensorDictBase:
        """Once a batch, before its losses: mask what is not valid, and tell the rate controller what came. -> the masked rollout."""
        rollout = mask_invalid(rollout)
        if self.training:
            self.rate.update(rate_uncapped(rollout, self.soft_cap))
        return rollout

    def loss(self, rollout: TensorDictBase, live: Live | None) -> tuple[Tensor, dict[str, Tensor]]:
        """The agent's loss on a prepared rollout, weights included, and what to log of it (detached scalars).

        ``live`` carries the graph of the batch in its first epoch, and is None in later ones.
        """
        raise NotImplementedError


def rate_uncapped(rollout: TensorDictBase, soft_cap: float | None) -> Tensor:
    """Mean over choices of the probability of a start without the cap: the rate that evaluation sees."""
    return mean_over(uncapped(rollout["logits"], soft_cap).sigmoid(), rollout["is_choice"])


class Given(Agent):
    """Boundaries by a rule: the language model trains, the policy does not."""

    def loss(self, rollout: TensorDictBase, live: Live | None) -> tuple[Tensor, dict[str, Tensor]]:
        """Nothing to learn: 0."""
        return rollout["logits"].new_zeros(()), {}


class Reinforce(Agent):
    """The score-function estimator with a list of advantage steps and a rate controller (arXiv 2602.13940).

    loss = policy_weight * mean(g * logit) + rate_weight * rate(logits), the mean over choices.

    Args: ``advantage``, steps of ``agents.advantages``; the two weights; others as :class:`Agent`'s. Raises UserError where a step
    lacks the samples or the critic that it needs, and on more than one epoch.
    """

    def __init__(
        self,
        policy: Policy,
        advantage: Sequence[Step],
        rate: Free | None = None,
        *,
        policy_weight: float = 0.01,
        rate_weight: float = 0.01,
        **settings,
    ):
        super().__init__(policy, rate, **settings)
        check_steps(advantage, self, critic=False)
        if self.epochs > 1:
            raise UserError(f"REINFORCE is on-policy, agent.epochs must be 1, got {self.epochs}; a PPO agent makes several")
        self.advantage = list(advantage)
        self.policy_weight, self.rate_weight = float(policy_weight), float(rate_weight)

    def loss(self, rollout: TensorDictBase, live: Live | None) -> tuple[Tensor, dict[str, Tensor]]:
        """Policy and rate loss of one batch."""
        if live is None or live.logits is None:
            raise UserError(f"{type(self.policy).__name__} has no logits to learn: use the agent Given for it")
        choice = rollout["is_choice"]
        g = score_function(rollout, self.advantage)
        learn = policy_loss(g, live.logits, choice.sum().clamp(min=1))
        hold = self.rate(live.logits, choice, self.soft_cap)
        metrics = {"rate_uncapped": rate_uncapped(rollout, self.soft_cap), "g_rms": mean_over(g.square(), choice).sqrt()}
        return self.policy_weight * learn + self.rate_weight * hold, metrics


def check_steps(steps: Sequence[Step], agent: Agent, critic: bool) -> None:
    """Raises UserError unless every step can be called with values and a rollout, and finds the samples or the critic it needs."""
    paired = agent.samples > 1 and agent.samples_share > 0
    for step in steps:
        function = getattr(step, "func", step)
        try:
            inspect.signature(step).bind(None, None)
        except (TypeError, ValueError) as error:
            name = getattr(function, "__name__", repr(step))
            raise UserError(f"the advantage step {name} cannot be called with values and a rollout: {error}") from error
        if function in (leave_one_out, group_relative) and not paired:
            raise UserError(
                f"the advantage step {function.__name__} needs agent.samples of 2 or more and agent.samples_share above 0, "
                f"got {agent.samples} and {agent.samples_share}"
            )
        if function is gae and not critic:
            raise UserError("the advantage step gae needs a critic, and agent.critic is missing")
