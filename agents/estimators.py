"""Estimators of the boundary gradient: functions from a rollout to the unreduced descent direction g [B, T] = dL/dlogit.

The code that trains is the code that is measured: the policy loss is the sum of detach(g) * logit over a stated denominator.

Letters: K boundary samples of a sequence, B rows, T bytes.
"""

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from torch import Tensor

from agents.advantages import Step, advantage
from agents.totals import sum_over_ranks
from segment_env.errors import UserError


def score_function(rollout: TensorDictBase, steps: Sequence[Step]) -> Tensor:
    """REINFORCE (Williams 1992): g[t] = -(a[t] - p[t]) A[t] at choices, 0 elsewhere.

    ``rollout`` [B, T] holds the action and the logits that it was sampled with, so p = sigmoid(logits); ``steps`` make A. The
    result estimates the gradient of the *loss* -sum_t r[t] in every logit: descending it raises the return.
    """
    g = _score(rollout) * advantage(rollout, steps)
    return torch.where(rollout["is_choice"], g, 0.0)


def disarm(rollout: TensorDictBase, steps: Sequence[Step]) -> Tensor:
    """DisARM (Dong, Mnih and Tucker 2020; U2G, Yin et al. 2020) of antithetic pairs, rows that act on u and on 1 - u.

    With a, A of a row and a', A' of its partner (:func:`partner`), at choices::

        g[t] = -1/2 (A[t] - A'[t]) (-1)^a'[t] 1[a[t] != a'[t]] sigmoid(|logit[t]|) = -1/2 (A[t] - A'[t]) (a[t] - a'[t]) sigmoid(|logit[t]|)

    It is symmetric: both rows have the same g, whose expectation is that of :func:`score_function` for one row, so the denominator
    is the same too. What both rows have in common, the bytes' own noise and every mean over other rows, cancels. Rows without a
    partner get :func:`score_function`.

    ``rollout`` [B, T] must have been sampled with ``Samples(..., antithetic=True)`` and decisions that do not depend on earlier
    ones, so that a pair shares its logits. Raises UserError on a rollout that holds ``recent``.
    """
    if "recent" in rollout:
        raise UserError("the estimator disarm needs decisions that do not depend on earlier ones: the policy's n_past must be 0")
    action, values, other = rollout["action"], advantage(rollout, steps), partner(rollout)
    paired = -0.5 * (values - values[other]) * (action - action[other]) * rollout["logits"].abs().sigmoid()
    alone = (other == torch.arange(len(other), device=other.device))[:, None]
    g = torch.where(alone, _score(rollout) * values, paired)
    return torch.where(rollout["is_choice"], g, 0.0)


def partner(rollout: TensorDictBase) -> Tensor:
    """[B] int64: the row that each row is paired with, itself where there is none.

    Samples 2i and 2i + 1 of a sequence are a pair; its K rows are adjacent and in order, as :class:`segment_env.batch.Samples` has
    them. The last sample of an odd K has no partner.
    """
    sequence = rollout["sequence"][:, 0]
    row = torch.arange(len(sequence), device=sequence.device)
    new = torch.ones_like(sequence, dtype=torch.bool)
    new[1:] = sequence[1:] != sequence[:-1]
    sample = row - torch.where(new, row, 0).cummax(0).values
    other = (row + 1 - 2 * (sample % 2)).clamp(max=len(row) - 1)
    return torch.where(sequence[other] == sequence, other, row)


def _score(rollout: TensorDictBase) -> Tensor:
    """-d log P(a[t]) / dlogit[t] = -(a[t] - p[t])."""
    return rollout["logits"].sigmoid() - rollout["action"]


def policy_loss(g: Tensor, logits: Tensor, denominator: Tensor | float) -> Tensor:
    """The scalar whose gradient in ``logits`` [B, T] is g / denominator; its value means nothing. Its sum is one over all ranks."""
    (total,) = sum_over_ranks((g.detach() * logits).sum())
    return total / denominator
