"""A policy as TorchRL wants it: a module that reads one step's observation and writes an action.

Letters: B rows, D width.
"""

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase

from segment_env.boundaries import effective
from segment_env.scorer import Observation, Policy, Scorer, reset_rows
from segment_env.unroll import action_log_prob


class Actor(TensorDictModuleBase):
    """Steps ``policy`` through an environment; its own state of a row begins anew where the row is at t = 0.

    Args: ``policy``; ``scorer``, read for the early head's predictions if the policy reads them; ``soft_cap`` of its logits.
    Writes ``action`` (1 at t = 0, 0 in padding), ``logits`` and ``action_log_prob`` (0 where there is no choice). Raises ValueError
    where the environment shows another number of past decisions than the policy reads.
    """

    def __init__(self, policy: Policy, scorer: Scorer, soft_cap: float | None = None):
        super().__init__()
        self.policy, self.soft_cap = policy, soft_cap
        self.__dict__["scorer"] = scorer  # read, never trained or moved with the policy
        self.in_keys = ["hidden", "byte", "since", "noise", "is_choice", "valid"] + (["recent"] if policy.n_past else [])
        self.out_keys = ["action", "logits", "action_log_prob"]
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
        return tensordict.update({"action": action.long(), "logits": logits, "action_log_prob": log_prob})
