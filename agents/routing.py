"""H-Net's router: a segment starts where neighbouring states are unlike (Hwang et al. 2025, arXiv 2507.07955, eq. 4).

Letters: B rows, T bytes, D width.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from segment_env.boundaries import BOS
from segment_env.scorer import Decision, Observation


class CosineRouting(nn.Module):
    """p[t] = (1 - cos(W_q h[t], W_k h[t-1])) / 2 and p[0] = 1; a[t] = 1 where p[t] >= 1/2. W_q and W_k begin as the identity.

    h[t] has read x[<t], so byte t starts a segment where what byte t-1 did to the state was a surprise: the same computation as in
    H-Net, whose index counts the byte just read and stands one lower. Nothing is random, so there are no logits and no noise is read. p
    is the gate, through which alone it learns: it needs a pooling that reads one.

    Where bytes repeat, h[t] comes to equal h[t-1] once the encoder's windows hold nothing else, and p is one number for the whole
    run: (1 - cos(W_q h, W_k h)) / 2. It is 0 at the start, no boundary in the run; once trained, the run may also be cut at every
    byte. (After 1.6 MB of the embedded novel with ``agent=hnet`` runs of spaces and of dashes were cut at every byte, those of letters
    and of line ends nowhere.)

    ``offset`` moves the threshold: p becomes sigmoid(logit(p) + offset), for a rate to be calibrated by.

    Args: ``width`` D.
    """

    n_past = 0
    reads_early_log_p = False
    gives_gate = True

    def __init__(self, width: int):
        super().__init__()
        self.query, self.key = nn.Parameter(torch.eye(width)), nn.Parameter(torch.eye(width))
        self.offset = 0.0

    def parallel(
        self, h: Tensor, x: Tensor, noise: Tensor, early_log_p: Tensor | None = None, *, actions: Tensor | None = None, **_
    ) -> Decision:
        """Decide all positions: h [B, T, D] -> action and gate [B, T]."""
        p = self._probability(_project(h[:, 1:], self.query), _project(h[:, :-1], self.key))
        return self._decide(F.pad(p, (1, 0), value=1.0)[:, : h.shape[1]], actions)

    def init(self, num_rows: int) -> Tensor:
        """W_k h [B, D] of the position before; none yet."""
        return torch.zeros(num_rows, len(self.key), dtype=self.key.dtype, device=self.key.device)

    def step(self, state: Tensor, observation: Observation, **_) -> tuple[Tensor, Decision]:
        """Decide one position of [B] rows."""
        h = observation.hidden
        p = self._probability(_project(h, self.query), state)
        return _project(h, self.key), self._decide(torch.where(observation.byte == BOS, 1.0, p))

    def flops_per_byte(self) -> float:
        """Of both projections."""
        return 2.0 * (self.query.numel() + self.key.numel())

    def _probability(self, query: Tensor, key: Tensor) -> Tensor:
        p = ((1 - F.cosine_similarity(query, key, -1)) / 2).clamp(0, 1)
        return (p.logit() + self.offset).sigmoid() if self.offset else p

    @staticmethod
    def _decide(p: Tensor, actions: Tensor | None = None) -> Decision:
        return Decision(p.detach() >= 0.5 if actions is None else actions, None, p)


def _project(h: Tensor, weight: Tensor) -> Tensor:
    with torch.autocast(h.device.type, enabled=False):  # a threshold tells 0.499 from 0.5: bf16 does not
        return F.linear(h.to(weight.dtype), weight)
