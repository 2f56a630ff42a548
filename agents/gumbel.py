"""Boundaries that are sampled by a relaxed Bernoulli variable (Nawrot et al. 2023, arXiv 2211.09761).

Letters: B rows, T bytes, D width.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from segment_env.errors import UserError, check_rate
from segment_env.scorer import Decision, Observation, capped


class GumbelPolicy(nn.Module):
    """logit[t] of an MLP on h[t]; s[t] = sigmoid((logit[t] - logit(u[t])) / temperature), and a[t] = 1 where s[t] > 1/2.

    s is a relaxed Bernoulli sample (Maddison et al. 2017, Jang et al. 2017), made of the environment's uniform u, and it is the
    gate; s > 1/2 where u < sigmoid(logit), so the action is an exact Bernoulli one, as every policy's here. It is sampled in evaluation
    too, as in Nawrot's code.

    What differs from there: the last layer is 0 at the start and logit(target) is added, so that it begins as iid random at the
    target rate, and not at 1/2.

    Args: ``width`` D of h; ``target`` rate in (0, 1); ``hidden_units`` of the MLP (default: D); ``temperature``. Raises UserError on
    numbers that are none.
    """

    n_past = 0
    reads_early_log_p = False
    gives_gate = True

    def __init__(self, width: int, target: float = 0.2, hidden_units: int | None = None, temperature: float = 0.5):
        super().__init__()
        check_rate(target, "the target rate")
        units = width if hidden_units is None else hidden_units
        if type(units) is not int or units < 1 or not temperature > 0:
            got = f"got {hidden_units!r} and {temperature}"
            raise UserError(f"agent.policy needs hidden_units of at least 1 and a positive temperature, {got}")
        self.temperature, self.offset = float(temperature), math.log(target / (1 - target))
        self.first, self.last = nn.Linear(width, units), nn.Linear(units, 1)
        for parameter in self.last.parameters():
            nn.init.zeros_(parameter)

    def parallel(
        self,
        h: Tensor,
        x: Tensor,
        noise: Tensor,
        early_log_p: Tensor | None = None,
        *,
        soft_cap: float | None = None,
        actions: Tensor | None = None,
    ) -> Decision:
        """Decide all positions: h [B, T, D], noise [B, T] -> action, logits and gate [B, T]."""
        logits = self._logits(h, soft_cap)
        gate = ((logits - noise.to(logits.dtype).logit()) / self.temperature).sigmoid()
        return Decision(noise < logits.detach().sigmoid() if actions is None else actions, logits, gate)

    def init(self, num_rows: int) -> tuple:
        """It keeps nothing of its own."""
        return ()

    def step(self, state: tuple, observation: Observation, *, soft_cap: float | None = None) -> tuple[tuple, Decision]:
        """Decide one position of [B] rows."""
        return state, self.parallel(observation.hidden, observation.byte, observation.noise, soft_cap=soft_cap)

    def flops_per_byte(self) -> float:
        """Of both layers."""
        return 2.0 * (self.first.weight.numel() + self.last.weight.numel())

    def _logits(self, h: Tensor, soft_cap: float | None) -> Tensor:
        with torch.autocast(h.device.type, enabled=False):  # a logit is a statistic: bf16 would round it to 8 bits
            raw = self.last(functional.gelu(self.first(h.to(self.first.weight.dtype)))).squeeze(-1)
        return capped(raw + self.offset, soft_cap)
