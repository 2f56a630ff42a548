"""Figures of literal cells: what is drawn, and that a file of it is not blank."""

import subprocess
import sys
from dataclasses import replace
from io import BytesIO

import matplotlib.image
import pytest

from agents import plots
from agents.grid import Grid, Results


def cell(final: float, rewards: tuple[float, ...] = (), bits: float = 2.0, rate: float = 0.2) -> dict:
    """What a cell's file holds, as far as a plot needs it; a rule has no rewards on the way."""
    curve = [
        {"update": n, "bytes_decoded": 1000 * n, "validation_reward": reward, "validation_bits_per_byte": 3 - reward}
        for n, reward in enumerate(rewards, 1)
    ]
    figures = {"reward": final, "bits_per_byte": bits, "rate": rate}
    return {"figures": figures, "validation": figures, "curve": curve, "update": len(curve)}


COLUMN = {
    "random": [cell(-1.0), cell(0.0)],
    "oracle": [cell(1.0), cell(4.0)],
    "always": [cell(-9.0, bits=5.0), cell(-16.0, bits=7.0)],  # scores -4 and -4
    "mine": [cell(0.0, (-1.0, 0.0), 2.0, 0.1), cell(4.0, (2.0, 4.0), 3.0, 0.3)],  # scores 0, 0.5 and 0.5, 1
}
RESULTS: Results = {"easy": COLUMN, "hard": COLUMN}
SCALED = Grid({row: [] for row in COLUMN}, [0, 1], None, {"easy": [], "hard": []}, ("random", "oracle"), name="tiny")
PLAIN = Grid({row: [] for row in COLUMN}, [0, 1], "random", {"easy": [], "hard": []}, name="tiny")


def texts(legend) -> list[str]:
    return [text.get_text() for text in legend.get_texts()]


def test_curves_are_scores_between_the_ends_of_the_scale() -> None:
    figure = plots.draw_curves(SCALED, RESULTS)
    assert figure
    assert [panel.get_title("left") for panel in figure.axes] == ["easy", "hard"]
    for panel in figure.axes:
        lines = {line.get_label(): line for line in panel.lines}
        assert list(lines) == ["always", "mine", "random", "oracle"]
        assert [list(lines[name].get_ydata()) for name in ("random", "oracle", "always")] == [[0, 0], [1, 1], [-4, -4]]
        assert list(lines["mine"].get_xdata()) == [1000, 2000]
        assert list(lines["mine"].get_ydata()) == [0.25, 0.75]
        (band,) = panel.collections
        corners = {tuple(corner) for corner in band.get_paths()[0].vertices.tolist()}
        assert corners == {(1000, 0), (2000, 0.5), (2000, 1), (1000, 0.5)}
        low, high = panel.get_ylim()
        assert -1 < low < 0 and 1 < high < 2
        assert panel.get_title("right") == "below: always -4.0"
    (legend,) = figure.legends
    assert texts(legend) == ["always", "mine"] and legend.get_title().get_text() == "mean of 2 seeds,\nband: lowest to highest"
    assert figure.get_supxlabel() == "bytes decoded" and figure.get_supylabel() == "validation score (random 0, oracle 1)"


def test_curves_without_a_scale_are_bits_per_byte() -> None:
    figure = plots.draw_curves(PLAIN, RESULTS)
    assert figure
    lines = {line.get_label(): list(line.get_ydata()) for line in figure.axes[0].lines}
    assert lines == {"random": [2, 2], "oracle": [2, 2], "always": [6, 6], "mine": [2.5, 1.0]}
    assert figure.get_supylabel() == "validation bits per byte"


def test_rates_show_every_seed_and_their_mean() -> None:
    figure = plots.draw_rates(PLAIN, RESULTS)
    dots, mean = figure.axes[1].lines[-2:]
    assert (list(dots.get_xdata()), list(dots.get_ydata())) == ([0.1, 0.3], [2.0, 3.0])
    assert mean.get_label() == "mine" and (list(mean.get_xdata()), list(mean.get_ydata())) == ([0.2], [2.5])
    assert texts(figure.legends[0]) == list(COLUMN)


def test_what_is_drawn_depends_on_what_there_is() -> None:
    assert list(plots.draw(SCALED, RESULTS)) == ["curves"]
    assert list(plots.draw(PLAIN, RESULTS)) == ["curves", "rates"]
    rules: Results = {column: {**COLUMN, "mine": COLUMN["always"]} for column in RESULTS}
    assert list(plots.draw(SCALED, rules)) == []
    assert list(plots.draw(PLAIN, rules)) == ["rates"]


def test_what_is_to_be_reached_is_drawn_too() -> None:
    figures = plots.draw(replace(PLAIN, reach={"bits_per_byte": (0.0, 1.0)}), RESULTS)
    assert list(figures) == ["curves", "rates", "bits_per_byte"]
    assert figures["bits_per_byte"].get_supylabel() == "validation bits per byte"


def test_operations_stretch_the_bytes() -> None:
    flops = {"": {row: [{**one, "flops_per_byte": 3e6} for one in ones] for row, ones in COLUMN.items()}}
    (panel,) = plots.draw(Grid({row: [] for row in COLUMN}, [0, 1], "random", costs=2), flops)["flops"].axes
    (line,) = (line for line in panel.lines if line.get_label() == "mine")
    assert list(line.get_xdata()) == [3e9, 6e9]


def test_one_seed_and_a_scale_without_length_are_drawn() -> None:
    column = {"zero": [cell(1.0)], "one": [cell(1.0)], "mine": [cell(2.0, (1.0, 2.0))]}
    grid = Grid({row: [] for row in column}, [5], None, scale=("zero", "one"), name="tiny")
    figure = plots.draw_curves(grid, {"": column})
    assert figure and figure.axes[0].get_title("left") == "tiny" and not figure.axes[0].collections
    assert figure.legends[0].get_title().get_text() == "seed 5 alone"
    assert plots.png(figure)


@pytest.mark.parametrize("grid", [SCALED, PLAIN], ids=["scaled", "plain"])
def test_files_are_not_blank_and_always_the_same(grid: Grid) -> None:
    for name, figure in plots.draw(grid, RESULTS).items():
        content = plots.png(figure)
        image = matplotlib.image.imread(BytesIO(content))
        assert min(image.shape[:2]) > 300 and image[..., :3].std() > 0.05
        blue = [
            abs(image[..., channel] - int(plots.COLOURS[0][1 + 2 * channel : 3 + 2 * channel], 16) / 255) < 0.01 for channel in range(3)
        ]
        assert (blue[0] & blue[1] & blue[2]).sum() > 100  # the first row that learns
        assert content == plots.png(plots.draw(grid, RESULTS)[name])


def test_many_rows_that_learn_look_different() -> None:
    rows = {f"row {n}": [cell(0.0, (0.0,))] for n in range(18)}
    looks = plots._looks(Grid({row: [] for row in rows}, [0], "row 0"), {"": rows})
    assert len({(look.colour, look.dashes) for look in looks.values()}) == 18
    assert len({(look.colour, look.marker) for look in looks.values()}) == 18


def test_training_and_comparing_do_not_wait_for_matplotlib() -> None:
    code = "import sys, agents.cli, agents.training, agents.compare, agents.variance; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code]).returncode == 0
