"""Given rules: boundaries that are not learned. Each is a policy without parameters.

Letters: B rows, T bytes.
"""

import math
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from segment_env.batch import Batch
from segment_env.boundaries import is_choice
from segment_env.errors import UserError, check_rate
from segment_env.scorer import Decision, Observation, Scorer, State


class Rule(nn.Module):
    """What given rules share: no past decisions, no state unless they say so, logits only where they are random, and these flags.

    A rule that is not ``causal`` looks at bytes, or at a number of bytes, that a decision at t has not read. It has no ``step``, and its
    figures must say so: see :func:`segment_env.scorer.note`. A rule may be fitted: the training program calls :meth:`read_training`
    once, when a run is built or opened, and :meth:`calibrate` then, while it trains and before each validation. What a rule was
    fitted to stays in its buffers, and so in every checkpoint.
    """

    n_past = 0
    reads_early_log_p = False
    causal: bool = True
    needs_text: bool = False  #: it takes bytes for ASCII or UTF-8; on sound it would mean nothing
    #: Where the rate comes from: it is what the bytes make it ("given"); it is set, and held in the mean ("mean") or in every
    #: sequence ("exact"); or it is that of validation bytes ("calibrated").
    rate_is: Literal["given", "mean", "exact", "calibrated"] = "given"

    def init(self, num_rows: int) -> State:
        """A rule keeps nothing."""
        return ()

    def read_training(self, chunks: Iterable[bytes]) -> None:
        """Fit what can be fitted to bytes of the train split; most rules leave them unread."""

    def calibrate(self, scorer: Scorer, batches: Iterable[Batch], device: torch.device | str = "cpu") -> None:
        """Fit what depends on ``scorer`` as it is now to validation bytes; most rules leave them unread."""


class UniformStride(Rule):
    """a[t] = 1 iff t mod ``stride`` = 0: a token of ``stride`` bytes, whatever they say; 1 cuts at every byte.

    Raises UserError on a stride below 1 or between two whole numbers.
    """

    rate_is = "exact"

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

    rate_is = "mean"

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


class ExactRandom(Rule):
    """Exactly k choices of every sequence start, at random: k is ``rate`` times their number, rounded.

    NOT causal: where a sequence ends is known to it from the start, and how many starts were spent says how many are to come.
    Raises UserError on a rate outside (0, 1).
    """

    causal = False
    rate_is = "exact"

    def __init__(self, rate: float):
        super().__init__()
        check_rate(rate, "a rate")
        self.rate = rate

    def parallel(
        self, h: Tensor, x: Tensor, noise: Tensor, early_log_p: Tensor | None = None, *, valid: Tensor | None = None, **_
    ) -> Decision:
        """Decide all positions: the k smallest noise [B, T] among the choices of ``valid`` [B, T], by default of all positions."""
        choice = is_choice(torch.ones_like(x, dtype=torch.bool) if valid is None else valid)
        rank = torch.where(choice, noise, torch.inf).argsort(dim=1, stable=True).argsort(1)
        count = (self.rate * choice.sum(1, keepdim=True)).round()
        return Decision(rank < count, None)
