"""A policy as TorchRL wants it: what acts in an environment, and what its losses differentiate.

Letters: B rows, T bytes, D width.
"""

import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModuleBase
from torch import Tensor

from segment_env.boundaries import effective, effective_gate
from segment_env.errors import UserError
from segment_env.scorer import Observation, Policy, Scorer, check_causal, check_gate, gives_gate, reset_rows
from segment_env.unroll import action_log_prob


class Actor(TensorDictModuleBase):
    """Steps ``policy`` through an environment; its own state of a row begins anew where the row is at t = 0.

    Args: ``policy``; ``scorer``, read for the early head's predictions if the policy reads them; ``soft_cap`` of its logits.
    Writes ``action`` (1 at t = 0, 0 in padding), ``logits`` and ``action_log_prob`` (0 where there is no choice), and ``gate`` (as the
    action) if the policy gives one. Raises UserError where that and the scorer do not go together and on a policy that is not causal,
    ValueError where the environment shows another number of past decisions than the policy reads.
    """

    def __init__(self, policy: Policy, scorer: Scorer, soft_cap: float | None = None):
        super().__init__()
        check_causal(policy)
        check_gate(scorer, policy)
        self.policy, self.soft_cap = policy, soft_cap
        self.__dict__["scorer"] = scorer  # read, never trained or moved with the policy
        self.in_keys = ["hidden", "byte", "since", "noise", "is_choice", "valid"] + (["recent"] if policy.n_past else [])
        self.out_keys = ["action", "logits", "action_log_prob"] + (["gate"] if gives_gate(policy) else [])
        self._state, self._num_rows = None, 0

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """One step of [B] rows, written into ``tensordict``."""
        hidden, valid, choice = tensordict["hidden"], tensordict["valid"], tensordict["is_choice"]
        if self.policy.n_past and (shown := tensordict["recent"].shape[-1]) != self.policy.n_past:
            raise ValueError(f"the policy reads {self.policy.n_past} past decisions, but the environment shows {shown}")
        observation = Observation(
            hidden,
            tensordict["byte"],
            tensordict["since"],
            tensordict["recent"] if self.policy.n_past else None,
            tensordict["noise"],
            self.scorer.early_log_p(hidden) if self.policy.reads_early_log_p else None,
        )
        fresh = self.policy.init(len(hidden))
        first = valid & ~choice
        state = reset_rows(self._state, fresh, first) if self._num_rows == len(hidden) else fresh
        self._num_rows = len(hidden)
        self._state, decision = self.policy.step(state, observation, soft_cap=self.soft_cap)
        action = effective(decision.action, choice, valid)
        nats = torch.promote_types(hidden.dtype, torch.float32)
        if decision.logits is None:
            logits = log_prob = torch.zeros(len(hidden), dtype=nats, device=hidden.device)
        else:
            logits = torch.where(choice, decision.logits, 0.0)
            log_prob = torch.where(choice, action_log_prob(logits, action), 0.0)
        gate = {} if decision.gate is None else {"gate": effective_gate(decision.gate, choice, valid)}
        return tensordict.update({"action": action.long(), "logits": logits, "action_log_prob": log_prob, **gate})


class Start(torch.distributions.Bernoulli):
    """Whether a segment starts, as TorchRL's losses read it: actions are integers, log-probabilities those of the rollout."""

    def log_prob(self, value: Tensor) -> Tensor:
        """Nats, of ``value`` 0 or 1."""
        return action_log_prob(self.logits, value)


def replayed_logits(policy: Policy, rollout: TensorDictBase, soft_cap: float | None = None) -> Tensor:
    """Logits [B, T] of the actions of ``rollout`` [B, T], by a policy with a parallel form as it is now."""
    starts = effective(rollout["action"].bool(), rollout["is_choice"], rollout["valid"])
    decision = policy.parallel(rollout["hidden"], rollout["next", "byte"], rollout["noise"], None, soft_cap=soft_cap, actions=starts)
    if decision.logits is None:
        raise UserError(f"{type(policy).__name__} has no logits to learn: its actions are no random variables")
    return decision.logits


class _Replay(TensorDictModuleBase):
    in_keys = ["hidden", ("next", "byte"), "noise", "action", "is_choice", "valid"]
    out_keys = ["logits"]

    def __init__(self, policy: Policy, soft_cap: float | None):
        super().__init__()
        self.policy, self.soft_cap = policy, soft_cap

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.set("logits", replayed_logits(self.policy, tensordict, self.soft_cap))


def loss_actor(policy: Policy, soft_cap: float | None = None) -> ProbabilisticTensorDictSequential:
    """``policy`` as the actor network of a TorchRL loss on whole rollouts [B, T] (rows may be drawn from a replay buffer).

    It has no early head to read. ``soft_cap`` is the one that the rollouts were sampled with. Give the loss
    ``loss.loss_mask_key = "is_choice"``, and its rollouts through :func:`segment_env.masking.mask_invalid` first.
    """
    draw = ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=Start, return_log_prob=True)
    return ProbabilisticTensorDictSequential(_Replay(policy, soft_cap), draw)
