"""Estimators of the boundary gradient: functions from a rollout to the unreduced descent direction g [B, T] = dL/dlogit.

The code that trains is the code that is measured: the policy loss is the sum of detach(g) * logit over a stated denominator.

Letters: B rows, T bytes.
"""

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from torch import Tensor

from agents.advantages import Step, advantage


def score_function(rollout: TensorDictBase, steps: Sequence[Step]) -> Tensor:
    """REINFORCE (Williams 1992): g[t] = -(a[t] - p[t]) A[t] at choices, 0 elsewhere.

    ``rollout`` [B, T] holds the action and the logits that it was sampled with, so p = sigmoid(logits); ``steps`` make A. The
    result estimates the gradient of the *loss* -sum_t r[t] in every logit: descending it raises the return.
    """
    p = rollout["logits"].sigmoid()
    g = -(rollout["action"] - p) * advantage(rollout, steps)
    return torch.where(rollout["is_choice"], g, 0.0)


def policy_loss(g: Tensor, logits: Tensor, denominator: Tensor | float) -> Tensor:
    """The scalar whose gradient in ``logits`` [B, T] is g / denominator; its value means nothing."""
    return (g.detach() * logits).sum() / denominator
