"""Agents without a score function: the language model's own loss reaches the policy, through the gate that its pooling reads.

Letters: B rows, T bytes.
"""

from collections.abc import Callable

from tensordict import TensorDictBase
from torch import Tensor

from agents.agent import Agent, weight
from agents.rates import mean_over
from segment_env.errors import UserError
from segment_env.masking import mask_invalid
from segment_env.scorer import Policy, gives_gate
from segment_env.unroll import Live

RateLoss = Callable[[Tensor, Tensor, Tensor], Tensor]  #: see ``agents.rate_losses``


class StraightThrough(Agent):
    """Holds the rate; what is worth a boundary the policy learns from the language model's loss, and so from nothing here.

    loss = rate_weight * rate_loss(gate, starts, is_choice). A price of a start enters the reward that is reported, and no loss.

    Args: ``policy``, one that gives a gate, in a model whose pooling reads it; ``rate_loss``, a function of ``agents.rate_losses``;
    ``rate_weight``; ``encoder_grad`` False keeps the gate's gradient from the encoder; others as :class:`Agent`'s. Raises UserError
    on a policy without a gate, and on a cap, further epochs or a controller of logits, which do not go with it.
    """

    def __init__(self, policy: Policy, rate_loss: RateLoss, *, rate_weight: float, encoder_grad: bool = True, **settings):
        super().__init__(policy, encoder_grad=encoder_grad, **settings)
        if not gives_gate(policy):
            raise UserError(f"{type(policy).__name__} gives no gate to learn through: use an agent that learns from logits")
        if self.epochs > 1 or self.soft_cap is not None:
            got = f"got {self.epochs} and {self.soft_cap}"
            raise UserError(f"a gate carries the gradient of one pass, uncapped: agent.epochs must be 1 and agent.soft_cap null, {got}")
        if settings.get("rate") is not None:
            raise UserError(
                "agent.rate acts on logits or rewards, which nothing is learned from here: agent.rate_loss holds the rate of a gate"
            )
        self.rate_loss, self.rate_weight = rate_loss, weight("rate_weight", rate_weight)

    def prepare(self, rollout: TensorDictBase) -> TensorDictBase:
        """Masked; there is no controller to tell."""
        return mask_invalid(rollout)

    def loss(self, rollout: TensorDictBase, live: Live | None) -> tuple[Tensor, dict[str, Tensor]]:
        """The rate's loss on one batch; ``gate`` among the metrics is its mean."""
        if live is None or live.gate is None:
            raise UserError(f"{type(self.policy).__name__} was unrolled without a gate")
        choice = rollout["is_choice"]
        hold = self.rate_loss(live.gate, rollout["action"].bool(), choice)
        return self.rate_weight * hold, {"rate_loss": hold.detach(), "gate": mean_over(live.gate.detach(), choice)}
