"""Figures of an experiment's cells: learning curves, and bits per byte against the rate.

Importing this module imports matplotlib; nothing is shown on a screen, and no state of pyplot is touched.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import count
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator

from agents.grid import Grid, Results
from agents.statistics import score
from agents.tables import Cells

#: Okabe and Ito's, told apart by the colour-blind too; without the yellow, which is lost on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1)))  #: once the colours are used up
GREYS: tuple[Any, ...] = ("#555555", "#888888", "#AAAAAA")
MARKERS = "os^DvP"
LOWEST, HIGHEST = -1.5, 2.0  #: scores beyond are not drawn: the rest would be flat
PANELS = 3  #: beside one another


@dataclass(frozen=True)
class Look:
    """How a row is drawn, in all panels alike."""

    colour: str
    dashes: Any
    marker: str


def draw(grid: Grid, results: Results) -> dict[str, Figure]:
    """All figures of an experiment by name; those that would be empty are left out."""
    drawn = {
        "curves": draw_curves(grid, results),
        "rates": None if grid.scale else draw_rates(grid, results),
        "flops": draw_curves(grid, results, flops=True) if grid.costs else None,
    }
    return {name: figure for name, figure in drawn.items() if figure}


def png(figure: Figure) -> bytes:
    """The same bytes whenever it is drawn with the same version of matplotlib."""
    file = BytesIO()
    figure.savefig(file, format="png", dpi=150, bbox_inches="tight", metadata={"Software": None})
    return file.getvalue()


def draw_curves(grid: Grid, results: Results, flops: bool = False) -> Figure | None:
    """A panel per column, a line per row: validation scores where there is a scale, else bits per byte, over bytes decoded.

    With ``flops`` over the operations of training instead. None where no row has a curve.
    """
    if not any(one["curve"] for cells in results.values() for ones in cells.values() for one in ones):
        return None
    looks = _looks(grid, results)
    figure, panels = _panels(grid)
    for panel, cells in zip(panels, results.values(), strict=True):
        rows = {row: _drawn(grid, cells, row, flops) for row in looks}
        for row, look in looks.items():
            _draw_row(panel, row, rows[row], look, band=min(0.2, 0.6 / len(looks)))
        if grid.scale:
            _draw_scale(panel, grid.scale, rows)
        panel.xaxis.set_major_formatter(EngFormatter(sep=""))
        panel.xaxis.set_major_locator(MaxNLocator(5))
        panel.margins(x=0)
        panel.set_xlim(left=0)
    zero, one = grid.scale or ("", "")
    figure.supxlabel("operations of training (FLOPs)" if flops else "bytes decoded", fontsize=11)
    figure.supylabel(f"validation score ({zero} 0, {one} 1)" if grid.scale else "validation bits per byte", fontsize=11)
    handles = [Line2D([], [], color=look.colour, linestyle=look.dashes, linewidth=1.8, label=row) for row, look in looks.items()]
    _add_legend(figure, handles, grid, "band: lowest to highest")
    return figure


def draw_rates(grid: Grid, results: Results) -> Figure:
    """A panel per column: bits per byte against the rate, on the test split; a dot per seed, a mark at their mean."""
    looks = _looks(grid, results)
    figure, panels = _panels(grid)
    for panel, cells in zip(panels, results.values(), strict=True):
        for row, look in looks.items():
            rates, bits = ([one["figures"][key] for one in cells[row]] for key in ("rate", "bits_per_byte"))
            panel.plot(rates, bits, ".", color=look.colour, markersize=5, alpha=0.7)
            panel.plot([fmean(rates)], [fmean(bits)], look.marker, color=look.colour, markersize=8, markeredgecolor="white", label=row)
        panel.margins(0.1)
    figure.supxlabel("starts per byte", fontsize=11)
    figure.supylabel("test bits per byte", fontsize=11)
    handles = [Line2D([], [], color=look.colour, marker=look.marker, linestyle="", markersize=7, label=row) for row, look in looks.items()]
    _add_legend(figure, handles, grid, "a dot for each")
    return figure


@dataclass(frozen=True)
class _Drawn:
    """What is drawn of a row in a panel."""

    x: list[float]  #: bytes decoded, or operations, at every validation; empty for a row that was never validated in training
    points: list[tuple[float, ...]]  #: by validation, then by seed; for such a row the one at its end

    @property
    def means(self) -> list[float]:
        return [fmean(values) for values in self.points]


def _drawn(grid: Grid, cells: Cells, row: str, flops: bool) -> _Drawn:
    each = fmean(one["flops_per_byte"] or math.nan for one in cells[row]) if flops else 1
    x = [line["bytes_decoded"] * each for line in cells[row][0]["curve"]]
    points = []
    for index, one in enumerate(cells[row]):
        validations = [{key.removeprefix("validation_"): value for key, value in line.items()} for line in one["curve"]]
        ends = [cells[name][index]["validation"]["reward"] for name in grid.scale or ()]
        shown = validations or [one["validation"]]
        points.append([score(each["reward"], *ends) if grid.scale else each["bits_per_byte"] for each in shown])
    return _Drawn(x, list(zip(*points, strict=True)))


def _draw_row(panel: Axes, row: str, drawn: _Drawn, look: Look, band: float) -> None:
    """A line through the means, and a band of opacity ``band`` from the lowest to the highest seed; a level line without a curve."""
    style = {"color": look.colour, "linestyle": look.dashes, "label": row}
    if not drawn.x:
        panel.axhline(drawn.means[0], linewidth=1.3, **style)
        return
    panel.plot(drawn.x, drawn.means, linewidth=1.6, **style)
    if len(drawn.points[0]) > 1:
        low, high = ([best(values) for values in drawn.points] for best in (min, max))
        panel.fill_between(drawn.x, low, high, color=look.colour, alpha=band, linewidth=0)


def _draw_scale(panel: Axes, scale: tuple[str, str], rows: dict[str, _Drawn]) -> None:
    """Level lines at 0 and 1; limits that hold them and, from LOWEST to HIGHEST, all means; the names of rows that end below."""
    for level, name in enumerate(scale):
        panel.axhline(level, color="black", linewidth=0.9, label=name)
        side = 1 - level  # curves begin near 0 and end near 1; what fails ends above 0
        panel.annotate(
            name,
            (side, level),
            xycoords=("axes fraction", "data"),
            xytext=(2 - 4 * side, 2 - 4 * side),
            textcoords="offset points",
            horizontalalignment="right" if side else "left",
            verticalalignment="top" if side else "bottom",
            fontsize=8,
        )
    inside = [0.0, 1.0, *(value for drawn in rows.values() for value in drawn.means if LOWEST <= value <= HIGHEST)]
    margin = 0.06 * (max(inside) - min(inside))
    panel.set_ylim(min(inside) - 2 * margin, max(inside) + 2 * margin)
    below = [f"{row} {drawn.means[-1]:.1f}" for row, drawn in rows.items() if drawn.means[-1] < LOWEST]
    if below:
        text = f"below: {below[0]}" if len(below) == 1 else f"below: {len(below)} rows"
        panel.set_title(text, loc="right", fontsize=8, color=GREYS[0])


def _looks(grid: Grid, results: Results) -> dict[str, Look]:
    """Of all rows but the scale's: colours for what learns somewhere, greys for the rest."""
    looks, coloured, grey = {}, count(), count()
    for row in [name for name in grid.rows if name not in (grid.scale or ())]:
        if any(one["update"] for cells in results.values() for one in cells[row]):
            n = next(coloured)
            turn, place = divmod(n, len(COLOURS))  # of two rows of one colour neither dashes nor marks are the same
            colour, dashes, marker = COLOURS[place], DASHES[turn % len(DASHES)], MARKERS[(n + turn) % len(MARKERS)]
        else:
            n = next(grey)
            colour, dashes, marker = GREYS[n % len(GREYS)], DASHES[1 + n % 2], MARKERS[n % len(MARKERS)]
        looks[row] = Look(colour, dashes, marker)
    return looks


def _panels(grid: Grid) -> tuple[Figure, list[Axes]]:
    """A figure with a titled panel for every column; without a frame above and to the right."""
    total = len(grid.columns)
    wide = min(PANELS, total)
    high = math.ceil(total / wide)
    figure = Figure(figsize=(3.4 * wide + 0.6, 2.7 * high + 0.4) if total > 1 else (6.5, 4), layout="constrained")
    FigureCanvasAgg(figure)
    every = figure.subplots(high, wide, squeeze=False).flatten().tolist()
    for unused in every[total:]:
        unused.remove()
    for panel, column in zip(every, grid.columns, strict=False):
        panel.set_title(column or grid.name, loc="left", fontsize=11)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(color="#E5E5E5", linewidth=0.6)
        panel.set_axisbelow(True)
        panel.tick_params(labelsize=9)
    return figure, every[:total]


def _add_legend(figure: Figure, handles: list[Line2D], grid: Grid, seeds: str) -> None:
    """One for all panels, to their right."""
    title = f"mean of {len(grid.seeds)} seeds,\n{seeds}" if len(grid.seeds) > 1 else f"seed {grid.seeds[0]} alone"
    legend = figure.legend(
        handles=handles, title=title, loc="outside right center", frameon=False, fontsize=10, title_fontsize=9, alignment="left"
    )
    legend.get_title().set_color("#555555")


def draw_variances(rows: Sequence[dict[str, Any]], reference: str) -> Figure:
    """Variance relative to the reference's by estimator, at equal rows and at equal time, with intervals; a panel per part."""
    parts = list(dict.fromkeys(row["part"] for row in rows))
    height = max(sum(row["part"] == part for row in rows) for part in parts)
    figure = Figure(figsize=(4.2 * len(parts) + 2, 0.42 * height + 1.4), layout="constrained")
    FigureCanvasAgg(figure)
    for panel, part in zip(figure.subplots(1, len(parts), squeeze=False, sharey=True)[0], parts, strict=True):
        shown = [row for row in rows if row["part"] == part]
        for shift, key, marker, colour in ((-0.12, "rows", "o", COLOURS[0]), (0.12, "time", "s", COLOURS[1])):
            middle, low, high = ([row[f"variance_ratio_equal_{key}{end}"] for row in shown] for end in ("", "_low", "_high"))
            spread = [[m - a for m, a in zip(middle, low, strict=True)], [b - m for m, b in zip(middle, high, strict=True)]]
            places = [n + shift for n in range(len(shown))]
            panel.errorbar(middle, places, xerr=spread, fmt=marker, color=colour, markersize=5, linewidth=1.4, label=f"at equal {key}")
        panel.axvline(1, color="black", linewidth=0.9)
        panel.set_xscale("log")
        panel.set_yticks(range(len(shown)), [row["estimator"] for row in shown])
        panel.set_ylim(len(shown) - 0.5, -0.5)  # the first on top
        panel.set_title(part, loc="left", fontsize=11)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(color="#E5E5E5", linewidth=0.6, axis="x")
        panel.set_axisbelow(True)
    figure.supxlabel(f"variance over that of {reference}", fontsize=11)
    figure.legend(*panel.get_legend_handles_labels(), loc="outside upper right", frameon=False, fontsize=9, ncols=2)
    return figure
