"""Given rules: boundaries that are not learned. Each is a policy without parameters.

Letters: B rows, T bytes.
"""

import math

import torch
from torch import Tensor, nn

from segment_env.errors import UserError, check_rate
from segment_env.scorer import Decision, Observation


class Rule(nn.Module):
    """What given rules share: no past decisions, no state of their own, and logits only where they are random."""

    n_past = 0
    reads_early_log_p = False

    def init(self, num_rows: int) -> tuple:
        """A rule keeps nothing."""
        return ()


class UniformStride(Rule):
    """a[t] = 1 iff t mod ``stride`` = 0: a token of ``stride`` bytes, whatever they say; 1 cuts at every byte.

    Raises UserError on a stride below 1 or between two whole numbers.
    """

    def __init__(self, stride: int):
        super().__init__()
        if stride < 1 or stride % 1:
            raise UserError(f"a stride is a whole number of bytes, at least 1, got {stride}")
        self.stride = stride

    def parallel(self, h: Tensor, x: Tensor, noise: Tensor, early_log_p: Tensor | None = None, **_) -> Decision:
        """Decide all positions: x [B, T] gives the shape."""
        return Decision((torch.arange(x.shape[1], device=x.device) % self.stride == 0).expand(x.shape), None)

    def step(self, state: tuple, observation: Observation, **_) -> tuple[tuple, Decision]:
        """Decide one position: a start when the last lies ``stride`` bytes back."""
        return state, Decision((observation.since == 0) | (observation.since >= self.stride), None)


class IidRandom(Rule):
    """a[t] = (u[t] < rate): independent of everything. Raises UserError on a rate outside (0, 1)."""

    def __init__(self, rate: float):
        super().__init__()
        check_rate(rate, "a rate")
        self.rate = rate

    def parallel(self, h: Tensor, x: Tensor, noise: Tensor, early_log_p: Tensor | None = None, **_) -> Decision:
        """Decide all positions: noise [B, T]."""
        return self._decide(noise)

    def step(self, state: tuple, observation: Observation, **_) -> tuple[tuple, Decision]:
        """Decide one position."""
        return state, self._decide(observation.noise)

    def _decide(self, noise: Tensor) -> Decision:
        return Decision(noise < self.rate, torch.full_like(noise, math.log(self.rate / (1 - self.rate))))
