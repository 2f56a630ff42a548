"""Losses that hold the rate of boundaries which learn through a gate: functions of gate, starts and is_choice [B, T] to a scalar.

``gate`` is the soft value of every decision and carries the gradient, ``starts`` are the decisions. Nothing but choices counts, and rows
without a choice count as little as if they were not there.

Letters: B rows, T bytes.
"""

import math

import torch
from torch import Tensor

from agents.rates import mean_over, ratio
from agents.totals import sum_over_ranks
from segment_env.errors import UserError, check_rate


def ratio_loss(gate: Tensor, starts: Tensor, is_choice: Tensor, target: float) -> Tensor:
    """H-Net's (arXiv 2507.07955, eq. 10): N / (N-1) * ((N-1) F G + (1-F)(1-G)), F = mean(a), G = mean(p), N = 1 / target.

    1 at F = G = target, and less where F lies on one side of the target and G on the other. F has no gradient.
    """
    check_rate(target, "the target rate")
    return ratio(mean_over(starts.to(gate.dtype), is_choice), mean_over(gate, is_choice), target)


def binomial_prior(gate: Tensor, starts: Tensor, is_choice: Tensor, target: float) -> Tensor:
    """Nawrot's (arXiv 2211.09761): -log Binomial(n, target)(k) of every row, k starts among n choices, over the number of choices.

    In nats a choice. k passes the gradient straight through to the gates of the row. Rows of one length count alike, as
    there; of different lengths, by their choices.
    """
    check_rate(target, "the target rate")
    k, n = _counts(gate, starts, is_choice)
    log_p = torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1) + k * math.log(target) + (n - k) * math.log1p(-target)
    log_p, n = sum_over_ranks(log_p.sum(), n.sum())
    return (-log_p / n.clamp(min=1)).to(gate.dtype)


def hinge_band(gate: Tensor, starts: Tensor, is_choice: Tensor, target: float, width: float) -> Tensor:
    """FlexiTokens' (2025): relu(r - target) + relu(target - width - r) of every row's rate r, mean over the rows that have choices.

    0 where r lies in [target - width, target]: there the rate is free. ``width`` is their lambda sigma. r passes the gradient straight
    through. Raises UserError where the band does not lie within [0, 1].
    """
    check_rate(target, "the target rate")
    if not 0 <= width <= target:
        raise UserError(f"the band below the target {target} must be between 0 and {target} wide, got {width}")
    k, n = _counts(gate, starts, is_choice)
    rate = k / n.clamp(min=1)
    outside = (rate - target).relu() + (target - width - rate).relu()
    return mean_over(outside, n > 0).to(gate.dtype)


def _counts(gate: Tensor, starts: Tensor, is_choice: Tensor) -> tuple[Tensor, Tensor]:
    """Starts among choices, straight through to the gate, and choices: two of [B], float64, as log-gammas of hundreds need."""
    soft = torch.where(is_choice, gate, 0.0).double()
    hard = (starts.bool() & is_choice).double()
    return (hard + (soft - soft.detach())).sum(-1), is_choice.sum(-1).double()
