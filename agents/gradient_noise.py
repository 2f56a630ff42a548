"""How noisy a gradient estimate is, and how far off, from independent draws of it.

Every draw of bytes comes with two draws of everything else (boundaries), so that what the bytes contribute can be told from the rest.
All figures are U-statistics: no draw is ever multiplied with itself where an expectation is meant, so that noise does not pass for
signal, in resampled draws neither.

Letters: N draws of bytes, R those of the reference, P parameters, Z resamplings.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

RESAMPLINGS = 1000


@dataclass(frozen=True)
class Draws:
    """Inner products of N draws of one gradient, two for each draw of bytes, and with a reference's R draws."""

    power: Tensor  #: [N] mean |g|^2 of the two
    within: Tensor  #: [N] half |g_1 - g_2|^2
    gram: Tensor  #: [N, N] products of the means of the two
    cross: Tensor  #: [N, R] products with the reference's means
    reference_gram: Tensor  #: [R, R]

    @classmethod
    def of(cls, gradients: Tensor, reference: Tensor) -> "Draws":
        """``gradients`` [N, 2, P], N >= 2, and a ``reference`` [R, 2, P] drawn from other bytes."""
        first, second = gradients.double().unbind(1)
        mean, other = (first + second) / 2, reference.double().mean(1)
        power = (first.square().sum(-1) + second.square().sum(-1)) / 2
        return cls(power, (first - second).square().sum(-1) / 2, mean @ mean.T, mean @ other.T, other @ other.T)


@dataclass(frozen=True)
class Figures:
    """Each [Z + 1]: as drawn, then resampled."""

    variance: Tensor  #: trace of the covariance of one draw, bytes drawn anew
    from_bytes: Tensor  #: fraction of it that is left when the boundaries are averaged out
    signal: Tensor  #: |expectation|^2; may come out negative where noise rules
    signal_to_noise: Tensor  #: signal / variance
    bias: Tensor  #: |expectation - the reference's| / |the reference's|; nan where noise hides it
    cosine: Tensor  #: of the two expectations


def figures(draws: Draws, resamplings: int = RESAMPLINGS, seed: int = 0) -> Figures:
    """Figures of one estimator, with ``resamplings`` bootstrap draws of bytes, its own and the reference's."""
    w, v = (weights(count, resamplings, seed + i) for i, count in enumerate(draws.cross.shape))
    mean_power, within = ((w * each).sum(1) / w.sum(1) for each in (draws.power, draws.within))
    signal, reference = _between(draws.gram, w), _between(draws.reference_gram, v)
    cross = torch.einsum("zn,nr,zr->z", w, draws.cross, v) / (w.sum(1) * v.sum(1))
    variance = mean_power - signal
    bias = (signal - 2 * cross + reference) / reference
    cosine = cross / (signal * reference).sqrt()
    return Figures(variance, 1 - within / variance, signal, signal / variance, bias.sqrt(), cosine)


def interval(values: Tensor, confidence: float = 0.95) -> tuple[float, float, float]:
    """``values`` [Z + 1] -> the figure as drawn, and the percentiles of its resamplings; nan where fewer than half are numbers."""
    drawn, resampled = float(values[0]), values[1:][values[1:].isfinite()]
    if len(resampled) < len(values) / 2:
        return drawn, float("nan"), float("nan")
    low, high = resampled.quantile(torch.tensor([(1 - confidence) / 2, (1 + confidence) / 2], dtype=values.dtype)).tolist()
    return drawn, low, high


def weights(count: int, resamplings: int, seed: int) -> Tensor:
    """How often each of ``count`` draws is taken: [Z + 1, count], the first row all 1."""
    generator = torch.Generator().manual_seed(seed)
    taken = torch.randint(count, (resamplings, count), generator=generator)
    times = torch.zeros(resamplings + 1, count, dtype=torch.float64)
    times[0] = 1
    times[1:].scatter_add_(1, taken, torch.ones(taken.shape, dtype=torch.float64))
    return times


def _between(gram: Tensor, w: Tensor) -> Tensor:
    """Mean product of different draws: [n, n] and weights [Z, n] -> [Z]."""
    every = torch.einsum("zi,ij,zj->z", w, gram, w)
    own = w.square() @ gram.diagonal()
    return (every - own) / (w.sum(1).square() - w.square().sum(1))
