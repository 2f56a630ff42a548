"""What the trainer asks of an agent, and the two that the main job needs: REINFORCE, and a rule that learns nothing.

Letters: S sequences, K boundary samples of a sequence, B rows, T bytes.
"""

import inspect
from collections.abc import Sequence

from tensordict import TensorDictBase
from torch import Tensor, nn

from agents.advantages import Step, leave_one_out
from agents.estimators import policy_loss, score_function
from agents.rates import mean_over
from segment_env.errors import UserError
from segment_env.masking import mask_invalid
from segment_env.scorer import Policy, uncapped
from segment_env.unroll import Live


class Agent(nn.Module):
    """A policy and how it learns. Subclasses give :meth:`loss`; the trainer reads the rest.

    Args: ``policy``; ``samples`` K of the sequences that get more than one row, ``samples_share`` of the rows that belong to them;
    ``soft_cap`` of the logits in training; ``price`` of a start in nats; ``encoder_grad``: the policy's gradient reaches the
    encoder; ``lr_scale``: the policy's learning rate over the model's. Raises UserError on a cap or a scale that is none.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        samples: int = 1,
        samples_share: float = 1.0,
        soft_cap: float | None = None,
        price: float = 0.0,
        encoder_grad: bool = False,
        lr_scale: float = 1.0,
    ):
        super().__init__()
        if not (soft_cap is None or soft_cap > 0) or not lr_scale >= 0:
            raise UserError(f"agent.soft_cap must be positive or null and agent.lr_scale not negative, got {soft_cap} and {lr_scale}")
        self.policy, self.samples, self.samples_share = policy, samples, samples_share
        self.soft_cap, self.price, self.encoder_grad, self.lr_scale = soft_cap, float(price), encoder_grad, lr_scale

    def sample_counts(self, rows: int) -> list[int]:
        """K of every sequence, so that they fill ``rows`` = B. Raises UserError where they cannot."""
        multiple = round(rows * self.samples_share, 6) if self.samples > 1 else 0  # 25 * 0.28 is not 7, but near it
        if self.samples < 1 or multiple % self.samples or not 0 <= multiple <= rows:
            raise UserError(
                f"agent.samples={self.samples} boundary samples per sequence do not fill a share agent.samples_share={self.samples_share} "
                f"of {rows} rows: {rows} times the share must be a multiple of the samples"
            )
        return [self.samples] * int(multiple // self.samples) + [1] * int(rows - multiple)

    def loss(self, rollout: TensorDictBase, live: Live) -> tuple[Tensor, dict[str, Tensor]]:
        """The agent's loss for one unrolled batch, weights included, and what to log of it (detached scalars)."""
        raise NotImplementedError


class Given(Agent):
    """Boundaries by a rule: the language model trains, the policy does not."""

    def loss(self, rollout: TensorDictBase, live: Live) -> tuple[Tensor, dict[str, Tensor]]:
        """Nothing to learn: 0."""
        return rollout["logits"].new_zeros(()), {}


class Reinforce(Agent):
    """The score-function estimator with a list of advantage steps and a rate controller (arXiv 2602.13940).

    loss = policy_weight * mean(g * logit) + rate_weight * rate(logits), the mean over choices.

    Args: ``advantage``, steps of ``agents.advantages``; ``rate``, a controller of ``agents.rates``; the two weights; others as
    :class:`Agent`'s. Raises UserError where leave-one-out has no second sample to leave.
    """

    def __init__(
        self,
        policy: Policy,
        advantage: Sequence[Step],
        rate: nn.Module,
        *,
        policy_weight: float = 0.01,
        rate_weight: float = 0.01,
        **settings,
    ):
        super().__init__(policy, **settings)
        paired = self.samples > 1 and self.samples_share > 0
        if not paired and any(getattr(step, "func", step) is leave_one_out for step in advantage):
            got = f"got {self.samples} and {self.samples_share}"
            raise UserError(f"leave_one_out needs agent.samples of 2 or more and agent.samples_share above 0, {got}")
        if not callable(rate):
            raise UserError(f"agent.rate must be a controller of agents.rates, got {rate!r}")
        for step in advantage:
            _check_step(step)
        self.advantage, self.rate = list(advantage), rate
        self.policy_weight, self.rate_weight = float(policy_weight), float(rate_weight)

    def loss(self, rollout: TensorDictBase, live: Live) -> tuple[Tensor, dict[str, Tensor]]:
        """Policy and rate loss of one batch."""
        if live.logits is None:
            raise UserError(f"{type(self.policy).__name__} has no logits to learn: use the agent Given for it")
        rollout = mask_invalid(rollout)
        choice = rollout["is_choice"]
        g = score_function(rollout, self.advantage)
        learn = policy_loss(g, live.logits, choice.sum().clamp(min=1))
        hold = self.rate(live.logits, choice, self.soft_cap)
        p = uncapped(rollout["logits"], self.soft_cap).sigmoid()
        metrics = {"rate_uncapped": mean_over(p, choice), "g_rms": mean_over(g.square(), choice).sqrt()}
        return self.policy_weight * learn + self.rate_weight * hold, metrics


def _check_step(step: Step) -> None:
    """Raises UserError unless ``step`` can be called with values and a rollout, all other arguments being given."""
    try:
        inspect.signature(step).bind(None, None)
    except (TypeError, ValueError) as error:
        name = getattr(getattr(step, "func", step), "__name__", repr(step))
        raise UserError(f"the advantage step {name} cannot be called with values and a rollout: {error}") from error
