"""Policies with parameters: where a segment begins, as a Bernoulli decision at every byte.

Letters: B rows, T bytes, D width.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from segment_env.boundaries import recent_starts
from segment_env.errors import UserError, check_rate
from segment_env.scorer import Decision, Observation, capped


class WindowPolicy(nn.Module):
    """The paper's policy: a linear read-out of h, modulated by the last ``n_past`` decisions (arXiv 2602.13940, section 3).

    logit[t] = (W_0 h[t] + sum_j a[t-j] W_j h[t]) / logit_scale + logit(target), W = 0 at the start: it begins as iid random at the
    target rate. It acts by a = (u < sigmoid(logit)). With ``n_past`` = 0 decisions are independent given h, and all positions are
    decided at once; else sampling walks over T, while replayed actions still take one pass.

    Args: ``width`` D of h; ``target`` rate in (0, 1); ``n_past``; ``logit_scale``, positive. Raises UserError on other numbers.
    """

    reads_early_log_p = False

    def __init__(self, width: int, target: float = 0.2, n_past: int = 0, logit_scale: float = 16.0):
        super().__init__()
        check_rate(target, "the target rate")
        if n_past < 0 or n_past % 1 or not logit_scale > 0:
            raise UserError(f"n_past must be a whole number from 0 on and logit_scale positive, got {n_past} and {logit_scale}")
        self.n_past, self.logit_scale = n_past, logit_scale
        self.offset = math.log(target / (1 - target))
        self.weight = nn.Parameter(torch.zeros(1 + n_past, width))

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
        """Decide all positions: h [B, T, D], noise [B, T] -> action and logits [B, T]."""
        scores = self._scores(h)
        if not self.n_past:
            logits = self._logits(scores, None, soft_cap)
            return Decision(noise < logits.sigmoid() if actions is None else actions, logits)
        if actions is None:
            actions = self._walk(scores.detach(), noise, soft_cap)
        return Decision(actions, self._logits(scores, recent_starts(actions, self.n_past)[:, :-1], soft_cap))

    def init(self, num_rows: int) -> tuple:
        """It keeps nothing of its own."""
        return ()

    def step(self, state: tuple, observation: Observation, *, soft_cap: float | None = None) -> tuple[tuple, Decision]:
        """Decide one position of [B] rows."""
        logits = self._logits(self._scores(observation.hidden), observation.recent, soft_cap)
        return state, Decision(observation.noise < logits.sigmoid(), logits)

    def _scores(self, h: Tensor) -> Tensor:
        with torch.autocast(h.device.type, enabled=False):  # a logit is a statistic: bf16 would round it to 8 bits
            return F.linear(h.to(self.weight.dtype), self.weight)

    def _logits(self, scores: Tensor, recent: Tensor | None, soft_cap: float | None) -> Tensor:
        raw = scores[..., 0] if recent is None else scores[..., 0] + (scores[..., 1:] * recent).sum(-1)
        return capped(raw / self.logit_scale + self.offset, soft_cap)

    def _walk(self, scores: Tensor, noise: Tensor, soft_cap: float | None) -> Tensor:
        rows, length, _ = scores.shape
        starts = torch.zeros(rows, length + self.n_past, dtype=torch.bool, device=scores.device)
        starts[:, self.n_past] = True
        for t in range(1, length):
            recent = starts[:, t : t + self.n_past].flip(-1)
            starts[:, t + self.n_past] = noise[:, t] < self._logits(scores[:, t], recent, soft_cap).sigmoid()
        return starts[:, self.n_past :]
