"""Training curves of runs as small charts: what ``metrics.jsonl`` says, and where its points lie in a drawing.

A chart has a coordinate system of its own, WIDTH x HEIGHT, y downwards, in which a template writes SVG; colours and fonts are the
template's.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator

from segment_env.errors import UserError

WIDTH, HEIGHT = 280, 160
LEFT, RIGHT, TOP, BOTTOM = 40, 270, 8, 136  #: of the area of the curves
WINDOWS = 12  #: that the lines of a run are pooled into, where a ratio of means is drawn

Point = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """Of one run in one chart."""

    run: int  #: its place among the runs
    name: str
    last: str  #: value in its last point, as it is shown
    path: str  #: SVG path of the line through the training's points
    dots: list[Point]  #: of validations


@dataclass(frozen=True)
class Chart:
    """What a template needs to draw one."""

    title: str
    note: str
    curves: list[Curve]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    missing: list[str]  #: runs that logged nothing of it


@dataclass(frozen=True)
class Quantity:
    """One chart: what is drawn of a line of metrics, None where it says nothing about it."""

    title: str
    note: str
    training: Callable[[dict[str, Any]], float | None]
    validation: str = ""  #: key
    pooled: Callable[[Sequence[dict[str, Any]]], float | None] | None = None  #: in place of ``training``, of all lines of a window
    logarithmic: bool = False


def _key(name: str) -> Callable[[dict[str, Any]], float | None]:
    return lambda line: line.get(name)


def _gain(line: dict[str, Any]) -> float | None:
    bits = line.get("early_bits_per_byte"), line.get("bits_per_byte")
    return None if None in bits else bits[0] - bits[1]  # type: ignore[operator]


def _signal_to_noise(lines: Sequence[dict[str, Any]]) -> float | None:
    """See ``agents.gradient_figures.policy_signal``."""
    known = [(line["policy_signal"], line["policy_power"]) for line in lines if {"policy_signal", "policy_power"} <= line.keys()]
    if not known:
        return None
    signal, power = (fmean(values) for values in zip(*known, strict=True))
    return signal / (power - signal) if power > signal else math.nan


QUANTITIES = (
    Quantity("Bits per byte", "line: training; dots: validation", _key("bits_per_byte"), "validation_bits_per_byte"),
    Quantity("Rate", "starts per byte; line: training; dots: validation", _key("rate"), "validation_rate"),
    Quantity("Recall", "of the true starts, in validation", _key(""), "validation_recall"),
    Quantity("Precision", "of the starts, in validation", _key(""), "validation_precision"),
    Quantity("What tokens gain", "bits per byte of the early exit minus those of the whole model", _gain),
    Quantity("Signal to noise", "of one update's policy gradient, |mean|² / variance", _key(""), pooled=_signal_to_noise),
    Quantity("Gradient norm, policy", "before clipping", _key("policy_grad_norm"), logarithmic=True),
    Quantity("Gradient norm, model", "before clipping", _key("model_grad_norm"), logarithmic=True),
)


def read_metrics(folder: Path) -> tuple[list[dict[str, Any]], int]:
    """Lines of the ``metrics.jsonl`` of a run, and how many of them are broken and left out; none where it has no such file.

    Raises UserError where it cannot be read.
    """
    path = folder / "metrics.jsonl"
    try:
        texts = path.read_bytes().splitlines() if path.exists() else []
    except OSError as error:
        raise UserError(f"cannot read '{path}': {error.strerror}") from error
    lines = [line for text in texts if (line := _line(text))]
    return lines, len(texts) - len(lines)


def charts(runs: Sequence[tuple[str, list[dict[str, Any]]]]) -> list[Chart]:
    """A chart for every quantity that any of the runs, names with lines of metrics, logged."""
    return [made for quantity in QUANTITIES if (made := _chart(quantity, runs))]


def _line(text: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
        return line if line["update"] >= 0 and line["bytes_decoded"] >= 0 else None
    except (ValueError, KeyError, TypeError):
        return None


def _chart(quantity: Quantity, runs: Sequence[tuple[str, list[dict[str, Any]]]]) -> Chart | None:
    lines = [_points(quantity, metrics) for _, metrics in runs]
    dots = [_finite((line["bytes_decoded"], line.get(quantity.validation)) for line in metrics) for _, metrics in runs]
    every = [point for points in (*lines, *dots) for point in points if math.isfinite(point[1])]
    if quantity.logarithmic:
        every = [point for point in every if point[1] > 0]
    if not every:
        return None
    x_ticks, x = _axis([0.0, *(point[0] for point in every)], LEFT, RIGHT)
    y_ticks, y = _axis([point[1] for point in every], BOTTOM, TOP, quantity.logarithmic)
    curves = []
    for number, (name, _) in enumerate(runs):
        shown = [point for point in dots[number] or lines[number] if math.isfinite(point[1])]
        if shown:
            placed = [(round(x(a), 1), round(y(b), 1)) for a, b in dots[number]]
            curves.append(Curve(number, name, f"{shown[-1][1]:.3g}", _path(lines[number], x, y), placed))
    missing = [name for number, (name, _) in enumerate(runs) if number not in [curve.run for curve in curves]]
    short = EngFormatter(sep="")
    x_named = [(x(value), short(value)) for value in x_ticks if LEFT <= x(value) <= RIGHT]
    y_named = [(y(value), f"{value:g}") for value in y_ticks if TOP - 1 <= y(value) <= BOTTOM + 1]
    return Chart(quantity.title, quantity.note, curves, x_named, y_named, missing)


def _points(quantity: Quantity, metrics: Sequence[dict[str, Any]]) -> list[Point]:
    """Of training; not finite where the line is to be broken."""
    training = [line for line in metrics if "bits_per_byte" in line or "skipped" in line]
    if quantity.pooled is None:
        found = [(line["bytes_decoded"], quantity.training(line)) for line in training]
    else:
        size = max(1, math.ceil(len(training) / WINDOWS))
        windows = [training[n : n + size] for n in range(0, len(training), size)]
        found = [(fmean(line["bytes_decoded"] for line in window), quantity.pooled(window)) for window in windows]
    known = [(float(x), float(y)) for x, y in found if isinstance(y, int | float)]
    return [(x, math.nan) if quantity.logarithmic and y <= 0 else (x, y) for x, y in known]


def _finite(points: Iterable[tuple[Any, Any]]) -> list[Point]:
    return [(float(x), float(y)) for x, y in points if isinstance(y, int | float) and math.isfinite(y)]


def _axis(values: Sequence[float], low: float, high: float, logarithmic: bool = False) -> tuple[list[float], Callable[[float], float]]:
    """Round numbers along an axis for ``values``, and where a value lies between the pixels ``low`` and ``high``."""
    least, most = min(values), max(values)
    if logarithmic:
        steps = LogLocator(subs=(1.0, 2.0, 5.0) if most < 100 * least else (1.0,)).tick_values(least, most)
        scale: Callable[[float], float] = math.log10
        least, most = least / 1.05, most * 1.05
    else:
        if least == most:
            least, most = least - 0.5 * abs(least) - 1e-9, most + 0.5 * abs(most) + 1e-9
        steps = MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]).tick_values(least, most)
        scale = float
        margin = 0.04 * (most - least) if low > high else 0.0  # only upwards: the drawing begins at the first byte
        least, most = least - margin, most + margin
    begin, end = scale(least), scale(most)
    return [float(step) for step in steps], lambda value: low + (scale(value) - begin) / (end - begin) * (high - low)


def _path(points: Sequence[Point], x: Callable[[float], float], y: Callable[[float], float]) -> str:
    """A line through the points, broken where one is not finite; a lone point is a dot of the line's width."""
    parts = []
    for finite, group in groupby(points, lambda point: math.isfinite(point[1])):
        if finite:
            placed = [f"{x(a):.1f} {y(b):.1f}" for a, b in group]
            parts.append("M" + "L".join(placed if len(placed) > 1 else placed * 2))
    return "".join(parts)
