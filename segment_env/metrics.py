"""What is measured of boundaries and predictions, always in the same units: sums first, ratios last.

Ratios are taken of sums over all batches, never averaged over batches, so that a mean is exact however the bytes were batched.
Only valid bytes count towards bits per byte and lengths, only choices (valid and t > 0) towards the rate and the alignment. What is
undefined, such as the precision of no starts at all, is nan.

Letters: B rows, T bytes, M segments, N gradient samples, P parameters.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from segment_env.boundaries import since_start


def bits_per_byte(nll_sum: Tensor | float, num_bytes: Tensor | float) -> float:
    """Bits per byte of ``nll_sum`` nats over ``num_bytes`` bytes; nan for none.

    >>> bits_per_byte(8 * math.log(256), 8)
    8.0
    """
    return _ratio(float(nll_sum), float(num_bytes) * math.log(2))


def rate(action: Tensor, is_choice: Tensor) -> Tensor:
    """Mean of ``action`` [B, T] (bool or 0/1) over ``is_choice`` [B, T]: a scalar in starts per byte, nan where nothing is a choice.

    >>> rate(torch.tensor([[1, 1, 0, 1]]), torch.tensor([[False, True, True, False]]))
    tensor(0.5000)
    """
    return (action.bool() & is_choice).sum() / is_choice.sum()


class Alignment(NamedTuple):
    """How starts agree with reference starts: three fractions in [0, 1], nan where undefined."""

    precision: float  #: of the starts, how many are reference starts
    recall: float  #: of the reference starts, how many are starts
    f1: float  #: harmonic mean of the two


def alignment(starts: Tensor, reference: Tensor, is_choice: Tensor) -> Alignment:
    """Precision, recall and F1 of ``starts`` against ``reference`` over ``is_choice``: all [B, T] bool.

    >>> a = torch.tensor([[1, 1, 0, 1]]).bool()
    >>> alignment(a, torch.tensor([[1, 0, 1, 1]]).bool(), torch.tensor([[0, 1, 1, 1]]).bool())
    Alignment(precision=0.5, recall=0.5, f1=0.5)
    """
    return _alignment(*(count.item() for count in _agreement(starts, reference, is_choice)))


def segment_lengths(starts: Tensor, valid: Tensor) -> Tensor:
    """Bytes of every segment of all rows, in order: ``starts``, ``valid`` [B, T] bool -> [M] int64, summing to ``valid.sum()``.

    The last segment of a row ends with its valid bytes, be that the document's end or only the crop's.

    >>> segment_lengths(torch.tensor([[1, 0, 1, 0], [1, 0, 0, 0]]).bool(), torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]).bool()).tolist()
    [2, 1, 4]
    """
    is_last = valid.clone()
    is_last[..., :-1] &= starts[..., 1:] | ~valid[..., 1:]
    return since_start(starts)[..., 1:][is_last]


class Noisiness(NamedTuple):
    """Strength of a gradient estimate beside its scatter."""

    variance: Tensor  #: trace of the covariance of one sample, unbiased
    signal: Tensor  #: squared norm of the expectation, unbiased: it may come out negative where noise rules
    ratio: Tensor  #: signal / variance


def signal_to_noise(gradients: Tensor) -> Noisiness:
    """Variance and signal-to-noise ratio of N independent samples [N, P] of one gradient; N >= 2, all results scalars.

    Raises ValueError for fewer samples.
    """
    if len(gradients) < 2:
        raise ValueError(f"a variance needs at least two samples, got {len(gradients)}")
    variance = gradients.var(0).sum()
    signal = gradients.mean(0).square().sum() - variance / len(gradients)  # the mean's own scatter is no signal
    return Noisiness(variance, signal, signal / variance)


class Totals:
    """Sums over batches, kept on the device of the batches and in float64 or int64; read once, by :meth:`result`."""

    def __init__(self):
        self._sums: dict[str, Tensor] = {}
        self._lengths = torch.zeros(1, dtype=torch.int64)  # how many segments there are of 0, 1, 2 ... bytes

    def add(self, nll: Tensor, starts: Tensor, valid: Tensor, is_choice: Tensor, reference: Tensor | None = None) -> None:
        """Count a batch: ``nll`` [B, T] nats; ``starts``, ``valid``, ``is_choice``, ``reference`` [B, T] bool.

        A batch without ``reference`` counts towards everything but the alignment. NaN in padding does no harm.
        """
        length = segment_lengths(starts, valid)
        new = {
            "nll": torch.where(valid, nll.detach(), 0).sum(dtype=torch.float64),
            "bytes": valid.sum(),
            "choices": is_choice.sum(),
            "cuts": (starts & is_choice).sum(),
            "segments": torch.tensor(length.numel()),
            "squares": length.square().sum(),
        }
        if reference is not None:
            new |= dict(zip(("hits", "starts", "references"), _agreement(starts, reference, is_choice), strict=True))
        self._sums |= {key: value + self._sums[key] if key in self._sums else value for key, value in new.items()}
        found = torch.bincount(length, minlength=len(self._lengths))
        self._lengths = pad(self._lengths.to(found.device), (0, len(found) - len(self._lengths))) + found

    def length_quantiles(self, *levels: float) -> list[int]:
        """For each level in (0, 1] the smallest number of bytes that this share of the segments does not exceed; 0 of no segments."""
        share = self._lengths.cpu().double().cumsum(0)
        return torch.searchsorted(share, torch.tensor(levels, dtype=torch.float64) * share[-1]).tolist()

    def result(self) -> dict[str, float]:
        """Means of all that was added: bits per byte; rate in starts per choice; precision, recall and F1; bytes per segment, mean
        and standard deviation; and the number of bytes. Figures that nothing was added for are nan.
        """
        sums = {key: value.item() for key, value in self._sums.items()}
        num_bytes, segments = sums.get("bytes", 0), sums.get("segments", 0)
        mean = _ratio(num_bytes, segments)
        return {
            "bits_per_byte": bits_per_byte(sums.get("nll", 0.0), num_bytes),
            "rate": _ratio(sums.get("cuts", 0), sums.get("choices", 0)),
            **_alignment(*(sums.get(key, 0) for key in ("hits", "starts", "references")))._asdict(),
            "segment_length_mean": mean,
            "segment_length_std": max(0.0, _ratio(sums.get("squares", 0), segments) - mean**2) ** 0.5 if segments else math.nan,
            "num_bytes": num_bytes,
        }


def _agreement(starts: Tensor, reference: Tensor, is_choice: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Among choices: starts that are reference starts, starts, reference starts."""
    return (starts & reference & is_choice).sum(), (starts & is_choice).sum(), (reference & is_choice).sum()


def _alignment(hits: float, starts: float, references: float) -> Alignment:
    return Alignment(_ratio(hits, starts), _ratio(hits, references), _ratio(2 * hits, starts + references))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
