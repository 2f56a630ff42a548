"""A rule that needs no words: a start where the early head does not know what comes.

Letters: S sequences, B rows, T bytes, N choices.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

from agents.rules import Rule
from segment_env.batch import Batch
from segment_env.boundaries import is_choice
from segment_env.errors import UserError, check_rate
from segment_env.scorer import Decision, Observation, Scorer


class Entropy(Rule):
    """a[t] = H[t] > theta, where H[t] is the entropy of p_early(. | x[<t]) in nats; ``monotonic``: a[t] = H[t] - H[t-1] > theta.

    Global threshold and approximate monotonic constraint of BLT (Pagnoni et al. 2024, arXiv 2412.09871, section 2.3), with the early
    head in place of a language model of its own. Theta is what gives ``rate`` on validation bytes (:meth:`calibrate`); other
    bytes have another rate. It is a buffer, and so in every checkpoint; before it is first calibrated nothing starts. The state
    of a row is H at its last position.

    Raises UserError on a rate outside (0, 1).
    """

    reads_early_log_p = True
    rate_is = "calibrated"

    theta: Tensor

    def __init__(self, rate: float = 0.2, monotonic: bool = False):
        super().__init__()
        check_rate(rate, "the rate of agent.policy")
        self.rate, self.monotonic = rate, monotonic
        self.register_buffer("theta", torch.tensor(torch.nan, dtype=torch.float64))

    def parallel(self, h: Tensor, x: Tensor, noise: Tensor, early_log_p: Tensor, **_) -> Decision:
        """Decide all positions: early_log_p [B, T, 256]."""
        return Decision(self._scores(early_log_p) > self.theta, None)

    def init(self, num_rows: int) -> Tensor:
        """H of the position before: [B], in nats."""
        return torch.zeros(num_rows, dtype=self.theta.dtype, device=self.theta.device)

    def step(self, state: Tensor, observation: Observation, **_) -> tuple[Tensor, Decision]:
        """Decide one position."""
        assert observation.early_log_p is not None
        now = entropy(observation.early_log_p)
        return now, Decision((now - state if self.monotonic else now) > self.theta, None)

    @torch.no_grad()
    def calibrate(self, scorer: Scorer, batches: Iterable[Batch], device: torch.device | str = "cpu") -> None:
        """Set theta so that the choices of ``batches`` have the rate. Raises UserError where no theta can."""
        scores = []
        for batch in batches:
            x, choice = batch.bytes.to(device), is_choice(batch.valid.to(device))
            scores.append(self._scores(scorer.early_log_p(scorer.encode(x)[:, :-1]))[choice])
        self.theta.fill_(threshold_for(torch.cat(scores) if scores else self.theta[None][:0], self.rate))

    def _scores(self, early_log_p: Tensor) -> Tensor:
        """What theta is compared with: early_log_p [S, T, 256] -> [S, T]."""
        now = entropy(early_log_p)
        return now - F.pad(now, (1, 0))[:, :-1] if self.monotonic else now


def entropy(log_p: Tensor) -> Tensor:
    """-sum p log p in nats: log-probabilities [..., V] -> [...].

    >>> entropy(torch.tensor([0.5, 0.5, 0.0]).log()).item() / torch.tensor(2.0).log().item()
    1.0
    """
    return torch.special.entr(log_p.exp()).sum(-1)


def threshold_for(scores: Tensor, rate: float) -> Tensor:
    """The theta that the share ``rate`` of ``scores`` [N] exceeds: a scalar, float64.

    It lies half-way between two neighbours of the sorted scores, so that no rounding moves a decision. Where scores tie, no theta
    gives every rate: the nearest that can be had is taken. Raises UserError where there are no scores, where they are no numbers,
    or where all are equal.
    """
    if not len(scores):
        raise UserError("the threshold of agent.policy has no validation bytes to be calibrated on: use a larger file")
    falling = scores.double().sort(descending=True).values
    if not falling.isfinite().all():
        raise UserError("the threshold of agent.policy cannot be calibrated: the early head's predictions are no numbers")
    cuts = (falling[:-1] > falling[1:]).nonzero().squeeze(-1) + 1  # how many scores may exceed a theta
    if not len(cuts):
        raise UserError(f"no threshold of agent.policy gives the rate {rate}: the early head is equally unsure everywhere")
    count = cuts[(cuts - rate * len(falling)).abs().argmin()]
    return (falling[count - 1] + falling[count]) / 2
