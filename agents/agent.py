"""What the trainer asks of an agent, and the two that the main job needs: REINFORCE, and a rule that learns nothing.

Letters: S sequences, K boundary samples of a sequence, B rows, T bytes.
"""

import inspect
import math
from collections.abc import Callable, Sequence

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from agents.advantages import (
    Step,
    Steps,
    discounted_return,
    early_exit,
    function_of,
    gae,
    group_relative,
    hard_horizon,
    in_order,
    leave_one_out,
    name_of,
    subtract_baseline,
)
from agents.estimators import disarm, policy_loss, score_function
from agents.gradient_figures import policy_signal
from agents.hindsight import Hindsight
from agents.rates import Free, mean_over
from agents.totals import sum_over_ranks
from segment_env.errors import UserError
from segment_env.masking import mask_invalid
from segment_env.scorer import Policy, uncapped
from segment_env.unroll import Live


class Agent(nn.Module):
    """A policy and how it learns. Subclasses give :meth:`loss`; the trainer reads the rest.

    Args: ``policy``; ``rate``, a controller of ``agents.rates``; ``samples`` K of the sequences that get more than one row,
    ``samples_share`` of the rows that belong to them; ``antithetic``: samples 2i and 2i + 1 act on u and 1 - u; ``soft_cap`` of the
    logits in training; ``price`` of a start in nats; ``encoder_grad``: the policy's gradient reaches the encoder; ``lr_scale``: the
    policy's learning rate over the model's; ``epochs``: optimiser steps that the agent makes on a batch, of which the model shares
    the first.

    Raises UserError on a cap, a scale or a number of epochs that is none, on ``antithetic`` without pairs, and on ``encoder_grad``
    with several epochs.
    """

    def __init__(
        self,
        policy: Policy,
        rate: Free | None = None,
        *,
        samples: int = 1,
        samples_share: float = 1.0,
        antithetic: bool = False,
        soft_cap: float | None = None,
        price: float = 0.0,
        encoder_grad: bool = False,
        lr_scale: float = 1.0,
        epochs: int = 1,
    ):
        super().__init__()
        if not (soft_cap is None or soft_cap > 0) or not lr_scale >= 0:
            raise UserError(f"agent.soft_cap must be positive or null and agent.lr_scale not negative, got {soft_cap} and {lr_scale}")
        if not finite(price):
            raise UserError(f"agent.price must be a number of nats, got {price!r}")
        if type(epochs) is not int or epochs < 1:
            raise UserError(f"agent.epochs must be a whole number of at least 1, got {epochs!r}")
        if encoder_grad and epochs > 1:
            raise UserError(
                f"agent.encoder_grad=true needs one epoch on live states, but agent.epochs={epochs}: set one of the two otherwise"
            )
        if not isinstance(rate, Free | None):
            raise UserError(f"agent.rate must be a controller of agents.rates, got {rate!r}")
        if antithetic and not (samples > 1 and samples_share > 0):
            got = f"got {samples} and {samples_share}"
            raise UserError(f"agent.antithetic=true needs pairs: agent.samples of 2 or more and agent.samples_share above 0, {got}")
        self.policy, self.rate, self.samples, self.samples_share = policy, rate or Free(), samples, samples_share
        self.soft_cap, self.price, self.encoder_grad, self.lr_scale = soft_cap, float(price), encoder_grad, lr_scale
        self.antithetic, self.epochs = antithetic, epochs

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

    def direction(self, rollout: TensorDictBase) -> Tensor:
        """The boundary gradient g [B, T] = dL/dlogit of a prepared rollout, unreduced: see ``agents.estimators``."""
        raise NotImplementedError

    def loss(self, rollout: TensorDictBase, live: Live | None) -> tuple[Tensor, dict[str, Tensor]]:
        """The agent's loss on a prepared rollout, weights included, and what to log of it (detached scalars).

        ``live`` carries the graph of the batch in its first epoch, and is None in later ones.
        """
        raise NotImplementedError


def rate_uncapped(rollout: TensorDictBase, soft_cap: float | None) -> Tensor:
    """Mean over choices of the probability of a start without the cap: the rate that evaluation sees."""
    return mean_over(uncapped(rollout["logits"], soft_cap).sigmoid(), rollout["is_choice"])


class Given(Agent):
    """Boundaries by a rule: the language model trains, the policy does not, and the rate is what the rule makes it."""

    def prepare(self, rollout: TensorDictBase) -> TensorDictBase:
        """Masked; there is no rate to control."""
        return mask_invalid(rollout)

    def loss(self, rollout: TensorDictBase, live: Live | None) -> tuple[Tensor, dict[str, Tensor]]:
        """Nothing to learn: 0."""
        return rollout["logits"].new_zeros(()), {}


Estimator = Callable[[TensorDictBase, Sequence[Step]], Tensor]  #: see ``agents.estimators``


class Reinforce(Agent):
    """An estimator of the boundary gradient with a list of advantage steps and a rate controller (arXiv 2602.13940).

    loss = policy_weight * mean(g * logit) + rate_weight * rate(logits) + baseline_weight * mean((b - target)^2), means over choices.

    Args: ``advantage``, steps of ``agents.advantages``; ``estimator`` of g, a function of ``agents.estimators``; ``baseline``, read by
    the step ``subtract_baseline`` and fitted with the learning rate ``baseline_lr_scale`` times the model's; the three weights;
    others as :class:`Agent`'s. Raises UserError where a step or the estimator lacks the samples, the baseline or the critic
    that it needs, and on more than one epoch.
    """

    def __init__(
        self,
        policy: Policy,
        advantage: Steps,
        rate: Free | None = None,
        *,
        estimator: Estimator = score_function,
        baseline: Hindsight | None = None,
        policy_weight: float = 0.01,
        rate_weight: float = 0.01,
        baseline_weight: float = 0.01,
        baseline_lr_scale: float = 1.0,
        **settings,
    ):
        super().__init__(policy, rate, **settings)
        advantage = in_order(advantage)
        check_steps(advantage, self, critic=False, baseline=baseline is not None)
        if baseline is not None and not any(function_of(step) is subtract_baseline for step in advantage):
            raise UserError("agent.baseline is given, but no step of agent.advantage subtracts it: add subtract_baseline, or leave it out")
        _check_estimator(estimator, self)
        if self.epochs > 1:
            raise UserError(f"REINFORCE is on-policy, agent.epochs must be 1, got {self.epochs}; a PPO agent makes several")
        self.advantage, self.estimator, self.baseline = advantage, estimator, baseline
        self.policy_weight, self.rate_weight = weight("policy_weight", policy_weight), weight("rate_weight", rate_weight)
        self.baseline_weight = weight("baseline_weight", baseline_weight)
        self.baseline_lr_scale = weight("baseline_lr_scale", baseline_lr_scale)

    def groups(self) -> list[tuple[list[nn.Parameter], float]]:
        """The baseline learns at a rate of its own."""
        return split_groups(self, self.baseline, self.baseline_lr_scale)

    @torch.no_grad()
    def prepare(self, rollout: TensorDictBase) -> TensorDictBase:
        """Masked, with ``baseline`` [B, T] as it stands before it is fitted on these rows."""
        rollout = super().prepare(rollout)
        if self.baseline is not None:
            rollout["baseline"] = self.baseline(rollout).to(rollout["logits"].dtype)
        return rollout

    def direction(self, rollout: TensorDictBase) -> Tensor:
        """The estimator's g [B, T] of a prepared rollout."""
        return self.estimator(rollout, self.advantage)

    def loss(self, rollout: TensorDictBase, live: Live | None) -> tuple[Tensor, dict[str, Tensor]]:
        """Losses of the policy, the rate and the baseline on one batch."""
        if live is None or live.logits is None:
            raise UserError(f"{type(self.policy).__name__} has no logits to learn: use the agent Given for it")
        choice = rollout["is_choice"]
        g = self.direction(rollout)
        (choices,) = sum_over_ranks(choice.sum())
        learn = policy_loss(g, live.logits, choices.clamp(min=1))
        hold = self.rate(live.logits, choice, self.soft_cap)
        metrics = {"rate_uncapped": rate_uncapped(rollout, self.soft_cap), "g_rms": mean_over(g.square(), choice).sqrt()}
        metrics |= policy_signal(g, live.logits, choice, rollout["sequence"][:, 0], self.policy)
        loss = self.policy_weight * learn + self.rate_weight * hold
        if self.baseline is not None:
            target = rollout["baseline_target"]
            error = mean_over((self.baseline(rollout) - target).square(), choice)
            spread = mean_over((target - mean_over(target, choice)).square(), choice)
            metrics["baseline_explained"] = 1 - error.detach() / spread.clamp(min=1e-12)
            loss = loss + self.baseline_weight * error
        return loss, metrics


def finite(value: float) -> bool:
    """Whether it is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def weight(name: str, value: float) -> float:
    """``value`` of the setting agent.``name``. Raises UserError unless it is a number and not negative."""
    if not finite(value) or value < 0:
        raise UserError(f"agent.{name} must be a number and not negative, got {value!r}")
    return float(value)


def split_groups(agent: Agent, part: nn.Module | None, part_scale: float) -> list[tuple[list[nn.Parameter], float]]:
    """Parameters of ``agent`` without those of its ``part``, and those, each with their learning rate over the model's."""
    own = list(part.parameters()) if part is not None else []
    others = [parameter for parameter in agent.parameters() if all(parameter is not each for each in own)]
    return [(others, agent.lr_scale), (own, part_scale)]


def _check_call(function: Callable, what: str, needs: str) -> None:
    try:
        inspect.signature(function).bind(None, None)
    except (TypeError, ValueError) as error:
        raise UserError(f"{what} {name_of(function)} cannot be called with {needs}: {error}") from error


def _check_estimator(estimator: Estimator, agent: Agent) -> None:
    _check_call(estimator, "agent.estimator", "a rollout and the advantage's steps")
    if function_of(estimator) is not disarm:
        return
    if not agent.antithetic or agent.samples % 2:
        got = f"got {agent.antithetic} and {agent.samples}"
        raise UserError(f"the estimator disarm needs agent.antithetic=true and an even number of agent.samples, {got}")
    if agent.policy.n_past or not hasattr(agent.policy, "parallel"):
        name = type(agent.policy).__name__
        raise UserError(f"the estimator disarm needs decisions that do not depend on earlier ones, as those of {name} may: set n_past to 0")


def check_steps(steps: Sequence[Step], agent: Agent, critic: bool, baseline: bool = False) -> None:
    """Raises UserError unless every step can be called with values and a rollout, and finds the samples or the module it needs."""
    paired = agent.samples > 1 and agent.samples_share > 0
    _check_order([function_of(step) for step in steps])
    for step in steps:
        _check_call(step, "the advantage step", "values and a rollout")
        function = function_of(step)
        if function in (leave_one_out, group_relative) and not paired:
            raise UserError(
                f"the advantage step {function.__name__} needs agent.samples of 2 or more and agent.samples_share above 0, "
                f"got {agent.samples} and {agent.samples_share}"
            )
        if function in (leave_one_out, group_relative) and agent.antithetic:
            raise UserError(f"the advantage step {function.__name__} needs independent samples, but agent.antithetic=true couples them")
        if function is gae and not critic:
            raise UserError("the advantage step gae needs a critic, and agent.critic is missing")
        if function is subtract_baseline and not baseline:
            raise UserError("the advantage step subtract_baseline needs a baseline, and agent.baseline is missing")


_RETURNS = (discounted_return, hard_horizon, gae)


def _check_order(functions: Sequence[Callable]) -> None:
    """Raises UserError unless rewards become returns once, and early exit comes before."""
    found = [function for function in functions if function in _RETURNS]
    if len(found) > 1:
        raise UserError(f"agent.advantage makes returns of returns: {' and '.join(step.__name__ for step in found)}; use one of them")
    if found and early_exit in functions[functions.index(found[0]) :]:
        raise UserError(f"the advantage step early_exit is about rewards: it must come before {found[0].__name__}")
