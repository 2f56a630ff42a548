"""Policies with parameters: where a segment begins, as a Bernoulli decision at every byte.

Letters: B rows, T bytes, D width.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from agents.sampling import modulated, pinned, settle, shifted
from segment_env.errors import UserError, check_rate
from segment_env.scorer import Decision, Observation, capped, uncapped


class WindowPolicy(nn.Module):
    """The paper's policy: a linear read-out of h, modulated by the last ``n_past`` decisions (arXiv 2602.13940, section 3).

    logit[t] = (W_0 h[t] + sum_j a[t-j] W_j h[t]) / logit_scale + logit(target), W = 0 at the start: it begins as iid random at the
    target rate. It acts by a = (u < sigmoid(logit)). With ``n_past`` = 0 decisions are independent given h, and all positions are
    decided at once; else sampling settles in sweeps (see :mod:`agents.sampling`), and replayed actions take one pass.

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
        if actions is not None:
            return Decision(actions, self._logits(scores, shifted(actions, self.n_past, scores.dtype), soft_cap))
        if self.n_past:
            return self._sample(scores, noise, soft_cap)
        logits = self._logits(scores, [], soft_cap)
        return Decision(noise < logits.sigmoid(), logits)

    def init(self, num_rows: int) -> tuple:
        """It keeps nothing of its own."""
        return ()

    def step(self, state: tuple, observation: Observation, *, soft_cap: float | None = None) -> tuple[tuple, Decision]:
        """Decide one position of [B] rows."""
        scores = self._scores(observation.hidden)
        past = [] if observation.recent is None else observation.recent.to(scores.dtype).unbind(-1)
        logits = self._logits(scores, past, soft_cap)
        return state, Decision(observation.noise < logits.sigmoid(), logits)

    def _scores(self, h: Tensor) -> Tensor:
        with torch.autocast(h.device.type, enabled=False):  # a logit is a statistic: bf16 would round it to 8 bits
            return F.linear(h.to(self.weight.dtype), self.weight)

    def _logits(self, scores: Tensor, past: Sequence[Tensor], soft_cap: float | None) -> Tensor:
        return capped(modulated(scores.unbind(-1), past) / self.logit_scale + self.offset, soft_cap)

    def _threshold(self, noise: Tensor, soft_cap: float | None) -> Tensor:
        """What a modulated score has to exceed for u < sigmoid(logit), up to rounding; a[0] = 1 is pinned."""
        logits = noise.logit() if soft_cap is None else uncapped(noise.logit().clamp(-soft_cap, soft_cap), soft_cap)
        threshold = (logits - self.offset) * self.logit_scale
        threshold[:, :1] = -torch.inf
        return threshold

    def _sample(self, scores: Tensor, noise: Tensor, soft_cap: float | None) -> Decision:
        """Sample by thresholds, and let the formula that ``step`` acts by check what they say: their roundings differ."""
        threshold = self._threshold(noise.to(scores.dtype), soft_cap)
        while True:
            starts = settle(scores.detach(), threshold)
            logits = self._logits(scores, shifted(starts, self.n_past, scores.dtype), soft_cap)
            acts = noise < logits.detach().sigmoid()
            wrong = acts != starts
            wrong[:, :1] = False
            if not wrong.any():
                return Decision(starts, logits)
            first = wrong & (wrong.cumsum(1) == 1)  # nothing before it changes any more, and so the formula is right about it
            threshold = pinned(threshold, first, acts)
