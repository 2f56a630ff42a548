"""A baseline that reads the bytes to come.

Letters: B rows, T bytes, D width, E units.
"""

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn import functional

from agents.returns import discounted_return
from segment_env.boundaries import NUM_BYTES
from segment_env.errors import UserError


class Hindsight(nn.Module):
    """b[t] = w . h[t] + c + sum_k gamma^k s[t+k] within the episode: what return the bytes alone lead to expect.

    s[t] = v . gelu(W h[t] + V[x[t]] + u early_nll[t]) is what byte t is expected to yield, from E learned features of the byte, of
    its context and of how much it surprised the early head. A linear read-out of discounted sums of features is the discounted
    sum of the read-out, so one sum a row is all that is computed. w, c and v are 0 at the start: the first advantages are plain
    returns.

    It reads bytes, h and early_nll, at all positions, and no action, reward, nll, ``since`` or ``recent`` at any. The bytes do not
    depend on the actions; subtracted from Monte-Carlo returns it therefore costs no bias, whatever it has learned from other batches.
    As the bootstrapped value of GAE with lambda < 1 it would be biased: there it stands in for later rewards, which depend on a[<=t],
    and it does not.

    Args: ``width`` D of h; ``gamma``, the discount of the return that it predicts; ``units`` E. Raises UserError on other numbers.
    """

    def __init__(self, width: int, gamma: float, units: int = 32):
        super().__init__()
        if not 0 <= gamma <= 1 or units < 1:
            raise UserError(f"a baseline's gamma must lie in [0, 1] and its units be at least 1, got {gamma} and {units}")
        self.gamma = float(gamma)
        self.byte = nn.Embedding(NUM_BYTES, units)
        self.context = nn.Linear(width + 1, units)
        self.of_byte = nn.Linear(units, 1, bias=False)
        self.of_hidden = nn.Linear(width, 1)
        for layer in (self.of_byte, self.of_hidden):
            for parameter in layer.parameters():
                nn.init.zeros_(parameter)

    def forward(self, rollout: TensorDictBase) -> Tensor:
        """A rollout [B, T] -> b [B, T] in nats, 0 where not valid; what stands there counts for nothing."""
        valid, dtype, following = rollout["valid"], self.of_byte.weight.dtype, rollout["next"]
        h = torch.where(valid[..., None], rollout["hidden"], 0.0).to(dtype)
        early_nll = torch.where(valid[..., None], following["early_nll"], 0.0).to(dtype)
        x = torch.where(valid, following["byte"], 0)  # the byte of this step: x[t]
        with torch.autocast(h.device.type, enabled=False):  # a baseline is a statistic: bf16 would round it to 8 bits
            features = functional.gelu(self.context(torch.cat([h, early_nll], -1)) + self.byte(x))
            later = discounted_return(self.of_byte(features).squeeze(-1), following["done"].squeeze(-1), self.gamma)
            return torch.where(valid, self.of_hidden(h).squeeze(-1) + later, 0.0)
