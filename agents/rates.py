"""Rate controllers: losses on the logits that hold the mean rate of boundaries at its target.

Without one the best policy cuts everywhere. A controller is called with the logits as sampled, ``is_choice`` and the soft cap, and
returns a scalar loss; means are over ``is_choice``.

Letters: B rows, T bytes.
"""

import torch
from torch import Tensor, nn

from segment_env.errors import UserError, check_rate
from segment_env.scorer import uncapped


def mean_over(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of ``values`` where ``mask`` is True, 0 where it nowhere is."""
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)


class _Controller(nn.Module):
    def __init__(self, target: float):
        super().__init__()
        check_rate(target, "the target rate")
        self.target = target


class LogitPressure(_Controller):
    """The paper's target loss: mean(l) * detach(mean(p) - target), on logits and probabilities as sampled, capped."""

    def forward(self, logits: Tensor, is_choice: Tensor, soft_cap: float | None) -> Tensor:
        """logits [B, T], is_choice [B, T] -> scalar loss; its gradient moves every logit alike."""
        error = mean_over(logits.detach().sigmoid(), is_choice) - self.target
        return mean_over(logits, is_choice) * error


class PI(_Controller):
    """A proportional-integral controller: mean(l) * detach(kp e + ki sum(e)), e = mean(p) - target on the uncapped p.

    The uncapped rate is the one that evaluation and generation see. The sum is kept between updates, clamped to +-``limit`` against
    wind-up, and is part of the checkpoint.
    """

    integral: Tensor

    def __init__(self, target: float, kp: float = 1.0, ki: float = 0.02, limit: float = 10.0):
        super().__init__(target)
        if not limit > 0:
            raise UserError(f"the limit of the controller's sum must be positive, got {limit}")
        self.kp, self.ki, self.limit = float(kp), float(ki), float(limit)
        self.register_buffer("integral", torch.zeros(()))

    def forward(self, logits: Tensor, is_choice: Tensor, soft_cap: float | None) -> Tensor:
        """logits [B, T], is_choice [B, T] -> scalar loss; in training mode the sum takes this batch in first."""
        error = mean_over(uncapped(logits.detach(), soft_cap).sigmoid(), is_choice) - self.target
        if self.training:
            self.integral.add_(error).clamp_(-self.limit, self.limit)
        return mean_over(logits, is_choice) * (self.kp * error + self.ki * self.integral)
