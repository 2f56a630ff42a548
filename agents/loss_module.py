"""Any on-policy loss of TorchRL as an agent: A2C, PPO with clipping or a KL penalty, with a critic or without.

The loss is used as it is. It is given the choices alone, as one flat batch of N decisions, so that its means, its clip fraction and
its adaptive penalty are over decisions and nothing else, whatever the padding. It owns no parameters: what it takes for an actor
and a critic read the logits and values that this module has computed, in one parallel pass, for all positions.

Letters: B rows, T bytes, N choices among them, D width.
"""

from collections.abc import Callable

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import Tensor, nn
from torchrl.objectives import LossModule

from agents.advantages import Steps, in_order, name_of
from agents.advantages import advantage as run_steps
from agents.agent import Agent, check_steps, rate_uncapped, split_groups, weight
from agents.critics import Critic
from agents.estimators import score_function
from agents.gradient_figures import policy_signal
from agents.rates import Free
from agents.totals import mean_over_ranks
from segment_env.actor import Start, replayed_logits
from segment_env.errors import UserError
from segment_env.scorer import Policy
from segment_env.unroll import Live


class LossModuleAgent(Agent):
    """Learns by a TorchRL loss, over ``epochs`` passes through each rollout.

    Args: ``advantage``, steps of ``agents.advantages``; ``objective``, a loss class of TorchRL with its settings, but without
    networks: it is called with ``actor_network`` and ``critic_network``; ``critic``, trained by the objective where it is given, with
    the learning rate ``critic_lr_scale`` times the model's; the weights of policy and rate; others as :class:`Agent`'s. Every
    epoch passes over the whole rollout: there are no minibatches.

    Raises UserError where a critic is missing or has no target, where a step lacks its samples, and where the policy cannot be
    replayed for several epochs.
    """

    def __init__(
        self,
        policy: Policy,
        advantage: Steps,
        objective: Callable[..., LossModule],
        rate: Free | None = None,
        critic: Critic | None = None,
        *,
        policy_weight: float = 1.0,
        rate_weight: float = 1.0,
        critic_lr_scale: float = 1.0,
        **settings,
    ):
        super().__init__(policy, rate, **settings)
        advantage = in_order(advantage)
        check_steps(advantage, self, critic=critic is not None)
        if isinstance(policy, nn.Module) and not any(True for _ in policy.parameters()):
            raise UserError(f"{type(policy).__name__} has no parameters to learn: use the agent Given for it")
        if self.epochs > 1 and not hasattr(policy, "parallel"):
            raise UserError(f"{type(policy).__name__} has no parallel form to replay a rollout with: agent.epochs must be 1")
        if self.epochs > 1 and policy.reads_early_log_p:
            raise UserError(f"{type(policy).__name__} reads the early head, which a rollout does not hold: agent.epochs must be 1")
        self.advantage, self.critic = advantage, critic
        self.policy_weight, self.rate_weight = weight("policy_weight", policy_weight), weight("rate_weight", rate_weight)
        self.critic_lr_scale = weight("critic_lr_scale", critic_lr_scale)
        self.objective = _build(objective, critic is not None)

    def groups(self) -> list[tuple[list[nn.Parameter], float]]:
        """The critic learns at a rate of its own."""
        return split_groups(self, self.critic, self.critic_lr_scale)

    @torch.no_grad()
    def prepare(self, rollout: TensorDictBase) -> TensorDictBase:
        """Masked, with the critic's values and what does not change over the epochs: ``advantage`` [B, T, 1] and ``value_target``."""
        rollout = super().prepare(rollout)
        if self.critic is not None:
            for part in (rollout, rollout["next"]):
                part["state_value"] = self.critic(part).to(rollout["logits"].dtype)
        rollout["advantage"] = run_steps(rollout, self.advantage)[..., None]
        if self.critic is not None and "value_target" not in rollout:
            raise UserError("agent.critic is given, but no step of agent.advantage reads it: add gae, or leave the critic out")
        return rollout

    def direction(self, rollout: TensorDictBase) -> Tensor:
        """The first epoch's, in which all ratios are 1: g [B, T] = -(a - p) A at choices, whichever the objective (entropy apart)."""
        return score_function(rollout, self.advantage)

    def loss(self, rollout: TensorDictBase, live: Live | None) -> tuple[Tensor, dict[str, Tensor]]:
        """One epoch: the objective's losses over all choices, and the rate's."""
        logits = replayed_logits(self.policy, rollout, self.soft_cap) if live is None else live.logits
        if logits is None:
            raise UserError(f"{type(self.policy).__name__} has no logits to learn: use the agent Given for it")
        choice = rollout["is_choice"]
        new = {"new_logits": logits} if self.critic is None else {"new_logits": logits, "new_value": self.critic(rollout)}
        decisions = _choices({key: rollout[key] for key in _STORED if key in rollout} | new, choice)
        result = self.objective(decisions) if len(decisions) else {}  # where nothing was decided a mean is no number
        losses = [value.sum() for key, value in result.items() if key.startswith("loss_")]
        learn = mean_over_ranks(sum(losses, 0 * logits.sum()), len(decisions))
        metrics = {key: value.detach().float().mean() for key, value in result.items() if not key.startswith("loss_")}
        metrics["rate_uncapped"] = rate_uncapped(rollout, self.soft_cap)
        if live is not None:
            g = score_function(rollout, [_prepared])
            metrics |= policy_signal(g, logits, choice, rollout["sequence"][:, 0], self.policy)
        return self.policy_weight * learn + self.rate_weight * self.rate(logits, choice, self.soft_cap), metrics


def _prepared(values: Tensor, rollout: TensorDictBase) -> Tensor:
    """The advantage that is there already, as a step."""
    return rollout["advantage"].squeeze(-1)


_STORED = ("action", "action_log_prob", "logits", "advantage", "state_value", "value_target")  #: what a loss may read of a rollout


def _choices(values: dict[str, Tensor], choice: Tensor) -> TensorDict:
    """Values [B, T, ...] -> [N, ...]. How many choices there are is the one thing that is read from the device."""
    index = choice.flatten().nonzero().squeeze(-1)
    return TensorDict({key: value.flatten(0, 1)[index] for key, value in values.items()}, [len(index)])


def _build(objective: Callable[..., LossModule], critic: bool) -> LossModule:
    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(nn.Identity(), ["new_logits"], ["logits"]),
        ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=Start, return_log_prob=True),
    )
    value = TensorDictModule(nn.Identity(), ["new_value"], ["state_value"]) if critic else None
    try:
        built = objective(actor_network=actor, critic_network=value, functional=False)
    except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        missing = "" if critic else "; agent.critic is missing, and the loss may need one"
        raise UserError(f"agent.objective {name_of(objective)} cannot be built: {error}{missing}") from error
    if not isinstance(built, LossModule):
        raise UserError(f"agent.objective must make a loss of TorchRL, got {type(built).__name__}")
    for name, buffer in list(built.named_buffers(recurse=False)):
        if not buffer.is_floating_point():  # of a number written without a point; what adapts is multiplied in place
            built.register_buffer(name, buffer.float())
    return built
