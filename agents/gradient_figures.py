"""How large the gradients of an update are, and how much of the policy's is signal: read on the device, nothing waits for them.

Letters: S sequences, B rows, T bytes.
"""

from typing import Any

import torch
from torch import Tensor, nn


@torch.no_grad()
def gradient_norms(model: Any, policy: Any) -> dict[str, Tensor]:
    """``model_grad_norm`` and ``policy_grad_norm`` of the gradients as they are: scalars; what has no gradient has no norm."""
    figures = {}
    for name, part in (("model", model), ("policy", policy)):
        gradients = [p.grad for p in part.parameters() if p.grad is not None] if isinstance(part, nn.Module) else []
        if gradients:
            figures[f"{name}_grad_norm"] = nn.utils.get_total_norm(gradients)
    return figures


def policy_signal(g: Tensor, logits: Tensor, choice: Tensor, sequence: Tensor, policy: Any) -> dict[str, Tensor]:
    """Signal and power of the estimator's gradient in the parameters of ``policy``, mean(g * dlogit) over choices: two scalars.

    Every second sequence is one half of the batch, the others the other; with the halves' shares u + v of the gradient, and w the
    share of sequences, of those with a choice, that u is of::

        policy_signal = <u, v> / (w (1 - w))        policy_power = <u + v, u + v>

    As sequences are independent, and rows of one stay together, the first is an unbiased estimate of |E g|^2, the second of
    |E g|^2 + tr Cov g (up to 1 / B^2 where a step of the advantage subtracts other rows' mean). The signal-to-noise ratio of an
    update, signal over variance as in ``segment_env.metrics.signal_to_noise``, is mean signal / (mean power - mean signal), of means
    over many updates: one signal is mostly noise, and may be negative. Where one sequence alone has choices both are 0,
    which that ratio does not see.

    Args: the estimator's ``g`` [B, T]; the live ``logits`` [B, T], whose graph is kept; ``choice`` [B, T] bool; ``sequence`` [B] int64,
    equal for the adjacent rows of a sequence. Nothing where nothing is to be learned, no parameters or no graph, and nothing in
    micro-batches, whose logits have their graph elsewhere; of several ranks each has its own.
    """
    parameters = [p for p in policy.parameters() if p.requires_grad] if isinstance(policy, nn.Module) else []
    if not (parameters and logits.requires_grad):
        return {}
    first = torch.cat([sequence.new_ones(1, dtype=torch.bool), sequence.diff() != 0])  # row of its sequence
    halves = [(first.cumsum(0) % 2 == half)[:, None] for half in (1, 0)]
    scaled = g.detach().to(logits.dtype) / choice.sum().clamp(min=1)
    u, v = (torch.autograd.grad(logits, parameters, half * scaled, retain_graph=True, allow_unused=True) for half in halves)
    pairs = [(a, b) for a, b in zip(u, v, strict=True) if a is not None and b is not None]
    if not pairs:
        return {}
    counts = [(half & first[:, None] & choice).any(1).sum() for half in halves]
    known, total = counts[0] * counts[1] > 0, (counts[0] + counts[1]).clamp(min=1)
    share = (counts[0] * counts[1] / total.square()).clamp(min=1e-12)  # w (1 - w)
    dot = torch.stack([(a * b).sum() for a, b in pairs]).sum()
    power = torch.stack([(a + b).square().sum() for a, b in pairs]).sum()
    return {"policy_signal": torch.where(known, dot / share, 0.0), "policy_power": torch.where(known, power, 0.0)}
