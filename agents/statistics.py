"""Intervals of means and of paired differences, by Student's t.

Letters: n values or pairs.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple


class Interval(NamedTuple):
    """A mean and how far its confidence interval reaches to either side."""

    mean: float
    half_width: float  #: nan for a single value


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Mean of ``values`` with its t-interval, n - 1 degrees of freedom. Raises ValueError for none.

    >>> mean, half_width = mean_interval([2.0, 4.0])
    >>> mean, round(half_width, 4)
    (3.0, 12.7062)
    """
    n = len(values)
    if n == 0:
        raise ValueError("a mean needs at least one value")
    mean = math.fsum(values) / n
    if n == 1:
        return Interval(mean, math.nan)
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    return Interval(mean, t_factor(confidence, n - 1) * math.sqrt(variance / n))


def paired_difference(values: Sequence[float], reference: Sequence[float], confidence: float = 0.95) -> Interval:
    """Mean of ``values[i] - reference[i]`` with its t-interval, n - 1 degrees of freedom.

    Raises ValueError unless there are as many of one as of the other, and at least one.

    >>> mean, half_width = paired_difference([3.0, 5.0], [1.0, 1.0])
    >>> mean, round(half_width, 4)
    (3.0, 12.7062)
    """
    n = len(values)
    if n != len(reference) or n == 0:
        raise ValueError(f"pairs need as many values as references and at least one, got {n} and {len(reference)}")
    return mean_interval([value - other for value, other in zip(values, reference, strict=True)], confidence)


def score(value: float, zero: float, one: float) -> float:
    """Where ``value`` lies on the line on which ``zero`` is 0 and ``one`` is 1; nan where the two are the same.

    >>> score(1.5, 1.0, 3.0)
    0.25
    """
    return (value - zero) / (one - zero) if one != zero else math.nan


def t_factor(confidence: float, degrees: int) -> float:
    """The t with P(|T| < t) = ``confidence`` of Student's distribution with a whole number of ``degrees`` of freedom.

    Raises ValueError on a confidence outside (0, 1) and on degrees below 1.

    >>> round(t_factor(0.95, 4), 4)
    2.7764
    """
    if not 0 < confidence < 1 or degrees < 1:
        raise ValueError(f"t needs a confidence in (0, 1) and at least 1 degree of freedom, got {confidence} and {degrees}")
    low, high = 0.0, math.pi / 2
    while low < (middle := (low + high) / 2) < high:  # until no float lies between
        low, high = (middle, high) if _inside(middle, degrees) < confidence else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


def _inside(angle: float, degrees: int) -> float:
    """P(|T| < sqrt(degrees) * tan(angle)), a finite sum: Abramowitz & Stegun, 26.7.3 and 26.7.4."""
    sine, cosine, odd = math.sin(angle), math.cos(angle), degrees % 2
    term, total = cosine if odd else 1.0, 0.0
    for k in range(1 + odd, degrees, 2):
        total += term
        term *= cosine**2 * k / (k + 1)
    return (angle + sine * total) * 2 / math.pi if odd else sine * total
