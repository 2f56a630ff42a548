"""Ratios between two measurements that take turns, so that what else the machine does falls on both alike."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

Measure = Callable[[], float]


@dataclass(frozen=True)
class Goal:
    """What a ratio should be: at least ``low``, at most ``high``, where they are given."""

    low: float | None = None
    high: float | None = None

    def met(self, ratio: float) -> bool:
        """True where ``ratio`` lies inside, its ends included."""
        return (self.low is None or ratio >= self.low) and (self.high is None or ratio <= self.high)

    def __str__(self) -> str:
        if self.low is not None and self.high is not None:
            return f"{self.low:g} to {self.high:g}"
        return f"at least {self.low:g}" if self.low is not None else f"at most {self.high:g}"


@dataclass(frozen=True)
class Row:
    """One ratio of a measurement: ``ratios`` pair by pair, and the ``setting`` they hold for."""

    measurement: str
    name: str  #: what is divided by what
    ratios: Sequence[float]
    goal: Goal
    setting: dict[str, Any]
    figures: dict[str, float] = field(default_factory=dict)  #: medians of what else was seen, with their unit in the name

    def result(self) -> dict[str, Any]:
        """The row as JSON holds it, every ratio included."""
        median, low, high = median_and_spread(self.ratios)
        stated = {"measurement": self.measurement, "name": self.name, "ratio": median, "p10": low, "p90": high, "pairs": len(self.ratios)}
        judged = {"goal": asdict(self.goal), "met": self.goal.met(median)}
        return {**stated, **judged, **self.setting, **self.figures, "ratios": list(self.ratios)}


def median_and_spread(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Median, 10th and 90th percentile; linear between neighbours.

    >>> median_and_spread([4.0, 1.0, 2.0, 3.0, 5.0])
    (3.0, 1.4, 4.6)
    """
    median, low, high = (round(float(value), 6) for value in np.quantile(ratios, [0.5, 0.1, 0.9]))
    return median, low, high


def interleaved(first: Measure, second: Measure, pairs: int, warm_up: int = 1) -> list[tuple[float, float]]:
    """Measure both in turns, the order swapped from pair to pair (A B, B A, ...): -> (first, second) of every pair."""
    for _ in range(warm_up):
        first(), second()
    taken = []
    for pair in range(pairs):
        if pair % 2:
            other = second()
            taken.append((first(), other))
        else:
            taken.append((first(), second()))
    return taken


def updates_in_turns(learners: Sequence[Any], batches: Sequence[Any], pairs: int, warm_up: int = 1) -> list[tuple[float, float]]:
    """Seconds of an update of each of two learners (:class:`agents.learner.Learner`), each on a batch of its own, pair by pair."""
    first, second = (stopwatch(partial(learner.update, batch), learner.device) for learner, batch in zip(learners, batches, strict=True))
    return interleaved(first, second, pairs, warm_up)


def stopwatch(function: Callable[[], Any], device: torch.device) -> Measure:
    """A measure of the seconds that ``function`` takes, until the device is done with it."""

    def seconds() -> float:
        _wait(device)
        begin = time.perf_counter()
        function()
        _wait(device)
        return time.perf_counter() - begin

    return seconds


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
