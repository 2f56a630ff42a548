"""Heat maps as PNG pictures: a place for every character, in the order of the bytes.

matplotlib joins no letters and turns no direction of reading: Arabic stands in its isolated forms and Hebrew runs from left to
right, which the picture says; what its fonts lack is escaped. A page shows such text as it is read.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font

from agents.heat_map import Cell, width
from segment_env.errors import UserError

COLUMNS = 84  #: places in a line
MOST = 8192  #: cells of a picture
FONTS = ["DejaVu Sans Mono", "DejaVu Sans"]  # both come with matplotlib
HEAT, RULE, INK, GREY = (0.85, 0.37, 0.05), (0.1, 0.1, 0.12), (0.1, 0.1, 0.12), (0.42, 0.42, 0.45)
LINE, BAR = 2.0, 0.5  #: of a line and of a bar for probability 1: heights in places
_ASPECT = 0.6  # of a place: width over height of a character
_SHOWN = 0.52  # of a tint at probability 1


def draw(maps: Sequence[tuple[str, Sequence[Cell]]], note: str = "") -> Figure:
    """One heat map below the other, each under its title, a legend above them, a ``note`` under all.

    Raises UserError where there are more than MOST cells.
    """
    if (count := sum(len(made) for _, made in maps)) > MOST:
        raise UserError(f"a picture holds at most {MOST:,} characters, got {count:,}; use --html")
    maps = [(title, [_drawable(cell) for cell in made]) for title, made in maps]
    broken = [(title, list(_lines(made))) for title, made in maps]
    notes = [note] if note else []
    if any(cell.right_to_left for _, made in maps for cell in made):
        notes.append("Characters stand in the order of the bytes, from left to right and unjoined, whatever their script.")
    height = 2.7 + sum(1.4 + LINE * len(lines) + 0.4 for _, lines in broken) + 1.2 * len(notes)
    inch = 0.09  # of a place
    figure = Figure(figsize=(inch * (COLUMNS + 2), inch / _ASPECT * height), facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-1, COLUMNS + 1), ylim=(height, 0))
    axes.axis("off")
    y = _legend(axes)
    for title, lines in broken:
        y += 1.4
        if title:
            axes.text(0, y - 0.35, title, size=8, color=GREY, family=FONTS[1], parse_math=False, va="bottom")
        _cells(axes, lines, y)
        y += LINE * len(lines) + 0.4
    for line in notes:
        y += 1.2
        axes.text(0, y - 0.3, line, size=7, color=GREY, family=FONTS[1], parse_math=False, va="bottom")
    return figure


def _lines(made: Sequence[Cell]) -> Iterator[list[Cell]]:
    """Broken after newlines, else after the last space that fits, else where the line is full."""
    line: list[Cell] = []
    for cell in made:
        if line and sum(map(width, line)) + width(cell) > COLUMNS:
            cut = next((n for n in range(len(line), len(line) // 2, -1) if line[n - 1].data == b" "), len(line))
            yield line[:cut]
            line = line[cut:]
        line.append(cell)
        if cell.ends_line:
            yield line
            line = []
    if line:
        yield line


def _cells(axes: Axes, lines: Sequence[Sequence[Cell]], top: float) -> None:
    """Tints, bars below the characters, and rules where segments start."""
    boxes, tints, bars, rules = [], [], [], []
    for number, line in enumerate(lines):
        x, above = 0.0, top + number * LINE
        foot = above + 1.1 + BAR
        for cell in line:
            wide, count = width(cell), len(cell.data)
            boxes.append(_box(x, above, x + wide, foot))
            tints.append(_tint(max(cell.probabilities)))
            for n, (p, start) in enumerate(zip(cell.probabilities, cell.starts, strict=True)):
                left, right = x + wide * n / count, x + wide * (n + 1) / count
                bars.append(_box(left, foot - BAR * p, right, foot))
                if start:
                    rules.append(_box(left - 0.06, above, left + 0.06, foot))
            size, colour = (6.5, GREY) if cell.escaped else (8.5, INK)
            if not cell.text.isspace():
                style: dict[str, Any] = {"ha": "center", "va": "baseline", "family": FONTS, "parse_math": False}
                axes.text(x + wide / 2, above + 0.9, cell.text, size=size, color=colour, **style)
            x += wide
    for shapes, colours in ((boxes, tints), (bars, HEAT), (rules, RULE)):
        axes.add_collection(PolyCollection(shapes, facecolors=colours, linewidths=0, antialiased=False), autolim=False)


def _legend(axes: Axes) -> float:
    """The scale, from 0 to 1, and what a rule means: -> where it ends."""
    style: dict[str, Any] = {"size": 7.5, "color": GREY, "family": FONTS[1], "va": "baseline"}
    axes.text(0, 1.4, "probability of a start", **style)
    steps = [0.0, 0.25, 0.5, 0.75, 1.0]
    for n, p in enumerate(steps):
        x, wide = 20 + 5 * n, 5
        corners = [_box(x, 0.5, x + wide, 1.1 + 0.5 + BAR), _box(x, 1.6 + BAR * (1 - p), x + wide, 1.6 + BAR)]
        axes.add_collection(PolyCollection(corners, facecolors=[_tint(p), HEAT], linewidths=0), autolim=False)
        axes.text(x + wide / 2, 1.4, f"{p:g}", ha="center", **{**style, "color": INK})
    axes.add_collection(PolyCollection([_box(49.94, 0.5, 50.06, 1.6 + BAR)], facecolors=RULE, linewidths=0), autolim=False)
    axes.text(50.8, 1.4, "a segment starts, as drawn", **style)
    return 2.1 + BAR


def _box(left: float, top: float, right: float, bottom: float) -> list[tuple[float, float]]:
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def _tint(p: float) -> tuple[float, ...]:
    """Between white and HEAT, pale enough for characters to be read on it."""
    return tuple(1 - _SHOWN * p * (1 - part) for part in HEAT)


def _drawable(cell: Cell) -> Cell:
    """``cell``, escaped where the fonts lack a character of it."""
    known = [get_font(findfont(FontProperties(family=family))) for family in FONTS]
    if all(any(font.get_char_index(ord(character)) for font in known) for character in cell.text):
        return cell
    return replace(cell, text=cell.text.encode("unicode_escape").decode(), escaped=True)
