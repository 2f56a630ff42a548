"""Critics: what return to expect, from what a decision may read and nothing else.

Letters: B rows, T bytes, D width.
"""

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn import functional

from segment_env.errors import UserError

LONGEST = 63  #: bytes since the last start beyond which a critic no longer tells them apart


class Critic(nn.Module):
    """V(hidden, since, recent) of [...] decisions: one hidden layer, or a linear function where ``hidden_units`` is 0.

    The bytes since the last start enter as a learned vector for each number of them. Its last layer is 0 at the start, so that the
    first advantages are plain returns.

    Args: ``width`` D of h; ``n_past`` of the policy, length of ``recent``; ``hidden_units``. Raises UserError on another number of
    those.
    """

    def __init__(self, width: int, n_past: int = 0, hidden_units: int = 32):
        super().__init__()
        if type(hidden_units) is not int or hidden_units < 0:
            raise UserError(f"agent.critic.hidden_units must be a whole number from 0 on, got {hidden_units!r}")
        self.n_past = n_past
        self.first = nn.Linear(width + n_past, hidden_units or 1)
        self.since = nn.Embedding(LONGEST + 1, hidden_units or 1)
        self.last = nn.Linear(hidden_units, 1) if hidden_units else None
        for layer in (self.last,) if self.last is not None else (self.first, self.since):
            for parameter in layer.parameters():
                nn.init.zeros_(parameter)

    def forward(self, decisions: TensorDictBase) -> Tensor:
        """``decisions``: hidden [..., D], since [...] and, if it reads past decisions, recent [..., n_past] -> nats [..., 1]."""
        dtype, hidden = self.first.weight.dtype, decisions["hidden"]
        features = torch.cat([hidden, decisions["recent"]], -1) if self.n_past else hidden
        with torch.autocast(hidden.device.type, enabled=False):  # a value is a statistic: bf16 would round it to 8 bits
            value = self.first(features.to(dtype)) + self.since(decisions["since"].clamp(max=LONGEST))
            return value if self.last is None else self.last(functional.gelu(value))
