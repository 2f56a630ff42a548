"""Rate controllers: what holds the mean rate of boundaries at its target. Without one the best policy cuts everywhere.

A controller acts in one or both of two ways: a loss on the logits, and a price per boundary in the reward. Once a batch it is told
the batch's mean rate (``update``), before the loss of that batch is asked for. Means are over ``is_choice``.

Letters: B rows, T bytes.
"""

import torch
from torch import Tensor, nn

from agents.totals import sum_over_ranks
from segment_env.errors import UserError, check_rate
from segment_env.scorer import uncapped


def mean_over(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of ``values`` where ``mask`` is True, over all ranks (see ``agents.totals``); 0 where it nowhere is."""
    total, count = sum_over_ranks(torch.where(mask, values, 0.0).sum(), mask.sum())
    return total / count.clamp(min=1)


def ratio(f: Tensor, g: Tensor, target: float) -> Tensor:
    """H-Net's N / (N-1) * ((N-1) F G + (1-F)(1-G)), N = 1 / target, of two rates."""
    n = 1 / target
    return n / (n - 1) * ((n - 1) * f * g + (1 - f) * (1 - g))


class Free(nn.Module):
    """Controls nothing: the base of all controllers."""

    price: Tensor  #: scalar, nats that a start costs, beside the agent's own price

    def __init__(self):
        super().__init__()
        self.register_buffer("price", torch.zeros(()), persistent=False)

    def update(self, rate: Tensor) -> None:
        """Take in the mean ``rate`` of one batch: of uncapped probabilities where the policy has any, else of starts."""

    def forward(self, logits: Tensor, is_choice: Tensor, soft_cap: float | None) -> Tensor:
        """Logits as sampled [B, T], is_choice [B, T] -> scalar loss."""
        return logits.new_zeros(())


class _Controller(Free):
    def __init__(self, target: float):
        super().__init__()
        check_rate(target, "the target rate")
        self.target = target


class LogitPressure(_Controller):
    """The paper's target loss: mean(l) * detach(mean(p) - target), on logits and probabilities as sampled, capped."""

    def forward(self, logits: Tensor, is_choice: Tensor, soft_cap: float | None) -> Tensor:
        """Logits [B, T], is_choice [B, T] -> scalar loss; its gradient moves every logit alike."""
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

    def update(self, rate: Tensor) -> None:
        """Add this batch's error to the sum."""
        self.integral.add_(rate - self.target).clamp_(-self.limit, self.limit)

    def forward(self, logits: Tensor, is_choice: Tensor, soft_cap: float | None) -> Tensor:
        """Logits [B, T], is_choice [B, T] -> scalar loss."""
        error = mean_over(uncapped(logits.detach(), soft_cap).sigmoid(), is_choice) - self.target
        return mean_over(logits, is_choice) * (self.kp * error + self.ki * self.integral)


class RatioLoss(_Controller):
    """H-Net's ratio loss, N / (N-1) * ((N-1) F G + (1-F)(1-G)), N = 1 / target (arXiv 2507.07955, eq. 10).

    G is the mean probability, uncapped, and carries the gradient; F is the mean of the hard decisions p >= 1/2, as in their code,
    where routing is deterministic. ``sampled`` takes the mean of the probabilities for F instead: what a sampled policy's starts
    come to. At F = G = target the loss is 1; its gradient in G, (F/target - 1) / (1 - target), vanishes where F = target.
    """

    def __init__(self, target: float, sampled: bool = True):
        super().__init__(target)
        self.sampled = sampled

    def forward(self, logits: Tensor, is_choice: Tensor, soft_cap: float | None) -> Tensor:
        """Logits [B, T], is_choice [B, T] -> scalar loss."""
        if soft_cap is not None:
            edge = soft_cap * (1 - 1e-6)  # where the cap has saturated p no longer moves; its slope would be 0 * inf
            logits = logits.clamp(-edge, edge)
        free = uncapped(logits, soft_cap)
        p = free.sigmoid()
        g = mean_over(p, is_choice)
        f = (g if self.sampled else mean_over((free >= 0).to(p.dtype), is_choice)).detach()
        return ratio(f, g, self.target)


class Lagrangian(_Controller):
    """A price per boundary by dual ascent, damped: dual += step * e; price = dual + damping * e, e = rate - target.

    The price is part of the reward, so that an agent which knows nothing of rates sees a complete problem: minimise the loss at a
    mean rate of the target. Where boundaries are too few it becomes a bonus. Dual ascent alone (``damping`` 0) swings, as it only
    answers to what has added up; the proportional term is that of PID Lagrangian methods (Stooke et al. 2020). The price is one
    tensor, changed in place: an environment that was given it as its ``price`` follows.

    Args: ``step`` in nats per unit of rate, an update; ``damping`` in nats per unit of rate; ``limit`` of dual and price to either side;
    ``price``, the first one. Raises UserError on numbers that make none.
    """

    dual: Tensor

    def __init__(self, target: float, step: float = 0.01, damping: float = 1.0, limit: float = 10.0, price: float = 0.0):
        super().__init__(target)
        if not (step > 0 and damping >= 0 and abs(price) <= limit):
            got = f"got step={step}, damping={damping}, price={price}, limit={limit}"
            raise UserError(f"a Lagrangian price needs a positive step, a damping from 0 on and a first price within its limit, {got}")
        self.step, self.damping, self.limit = float(step), float(damping), float(limit)
        self.register_buffer("price", torch.tensor(float(price)))
        self.register_buffer("dual", torch.tensor(float(price)))

    def update(self, rate: Tensor) -> None:
        """Raise the price where boundaries are too many, lower it where they are too few."""
        error = rate - self.target
        self.dual.add_(self.step * error).clamp_(-self.limit, self.limit)
        self.price.copy_(self.dual + self.damping * error).clamp_(-self.limit, self.limit)
