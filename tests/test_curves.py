"""Charts of literal metrics: where the points lie, and what is left out."""

import json
import math

import pytest

from agents import curves
from segment_env.errors import UserError


def line(update: int, **values) -> dict:
    return {"update": update, "bytes_decoded": 1000 * update, "skipped": 0, **values}


def chart_of(title: str, *runs: tuple[str, list[dict]]) -> curves.Chart:
    (chart,) = (chart for chart in curves.charts(runs) if chart.title == title)
    return chart


def numbers(path: str) -> list[list[float]]:
    return [[float(each) for each in point.split()] for point in path.removeprefix("M").split("L")]


def test_points_lie_where_the_axes_say() -> None:
    metrics = [line(1, bits_per_byte=6.0), line(2, bits_per_byte=4.0), line(4, bits_per_byte=2.0)]
    chart = chart_of("Bits per byte", ("run", metrics))
    (curve,) = chart.curves
    place = {text: y for y, text in chart.y_ticks}
    along = {text: x for x, text in chart.x_ticks}
    assert [y for _, y in numbers(curve.path)] == pytest.approx([place["6"], place["4"], place["2"]], abs=0.06)
    assert [x for x, _ in numbers(curve.path)] == pytest.approx([along["1k"], along["2k"], along["4k"]], abs=0.06)
    assert along["0"] == curves.LEFT and along["4k"] == curves.RIGHT
    assert curve.last == "2" and curve.dots == [] and chart.missing == []


def test_validations_are_dots_and_the_last_value() -> None:
    metrics = [line(1, rate=0.1), {"update": 1, "bytes_decoded": 1000, "validation_rate": 0.3, "validation_recall": math.nan}]
    chart = chart_of("Rate", ("run", metrics))
    assert len(chart.curves[0].dots) == 1 and chart.curves[0].last == "0.3"
    assert "Recall" not in [chart.title for chart in curves.charts([("run", metrics)])], "one without a number is not drawn"


def test_what_is_not_finite_breaks_the_line() -> None:
    metrics = [line(n, bits_per_byte=math.nan if n == 3 else float(n)) for n in range(1, 6)]
    path = chart_of("Bits per byte", ("run", metrics)).curves[0].path
    assert path.count("M") == 2 and "nan" not in path


def test_signal_to_noise_is_a_ratio_of_means() -> None:
    metrics = [line(n, policy_signal=float(n % 2), policy_power=2.0) for n in range(1, 2 * curves.WINDOWS + 1)]
    chart = chart_of("Signal to noise", ("run", metrics))
    assert chart.curves[0].last == "0.333" and chart.curves[0].path.count("L") == curves.WINDOWS - 1


def test_norms_are_on_a_logarithmic_scale() -> None:
    metrics = [line(n, model_grad_norm=10.0**-n, policy_grad_norm=0.0) for n in range(4)]
    ys = [y for _, y in numbers(chart_of("Gradient norm, model", ("run", metrics)).curves[0].path)]
    assert [b - a for a, b in zip(ys, ys[1:], strict=False)] == pytest.approx([ys[1] - ys[0]] * 3, abs=0.21)
    assert "Gradient norm, policy" not in [chart.title for chart in curves.charts([("run", metrics)])]


def test_a_run_that_did_not_log_a_quantity_is_named() -> None:
    chart = chart_of("Bits per byte", ("first", [line(1, bits_per_byte=1.0)]), ("second", [line(1)]))
    assert [curve.name for curve in chart.curves] == ["first"] and chart.missing == ["second"]
    assert curves.charts([("none", [])]) == []


@pytest.mark.parametrize("value", [0.0, -1.0, 1e-30, 1e30])
def test_a_level_line_has_an_axis(value: float) -> None:
    chart = chart_of("Bits per byte", ("run", [line(0, bits_per_byte=value), line(0, bits_per_byte=value)]))
    assert "nan" not in chart.curves[0].path and all(math.isfinite(y) for y, _ in chart.y_ticks)


def test_broken_lines_are_counted_and_left_out(tmp_path) -> None:
    assert curves.read_metrics(tmp_path) == ([], 0)
    good = line(1, bits_per_byte=2.0)
    broken = ["{", "", "[]", "3", '{"update": 1}', '{"update": "x", "bytes_decoded": 1}', "\x00"]
    (tmp_path / "metrics.jsonl").write_text("\n".join([json.dumps(good), *broken]) + "\n")
    assert curves.read_metrics(tmp_path) == ([good], len(broken))
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match="Is a directory"):
        curves.read_metrics(tmp_path)
