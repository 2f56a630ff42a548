"""Pages of HTML that need nothing but themselves: no script, no network, light and dark.

All that is not a template's own text is escaped by Jinja; and a page forbids what a mistake in that could do: its policy lets a
browser load and run nothing.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from agents import durable
from agents.heat_map import Cell
from segment_env.errors import UserError, one_line

MOST = 100_000  #: cells of a page: a browser grows slow with more
BAR = 9  #: pixels of a bar for probability 1; the style sheet leaves as much room


def templates() -> Environment:
    """Of ``agents/templates``: what they are given is escaped, and what they are not given is an error."""
    options: dict[str, Any] = {"autoescape": True, "undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(loader=PackageLoader("agents"), **options)
    environment.globals.update(bars=bars, hover=hover)
    return environment


def render(template: str, **values: Any) -> str:
    """A page from a template."""
    return templates().get_template(template).render(**values)


def heat_map(title: str, cells: Sequence[Cell]) -> str:
    """A page with one heat map. Raises UserError where there are more than MOST cells."""
    if len(cells) > MOST:
        raise UserError(f"a page shows at most {MOST:,} characters, got {len(cells):,}: choose a part of the text")
    starts = sum(sum(cell.starts) for cell in cells)
    return render("heat_map.html", title=title, cells=cells, segments=starts, num_bytes=sum(len(cell.data) for cell in cells))


def check_writable(*paths: Path | None) -> None:
    """Raises UserError where one of the files cannot be written: better known before the work than after."""
    for path in paths:
        if path is None:
            continue
        if path.is_dir():
            raise UserError(f"cannot write '{path}': it is a folder; give a file in it")
        if not path.parent.is_dir():
            raise UserError(f"cannot write '{path}': there is no folder '{path.parent}'")


def write(path: Path, content: str | bytes) -> None:
    """Write a whole file. Raises UserError where that fails."""
    try:
        durable.write(path, content)
    except OSError as error:
        raise UserError(f"cannot write '{path}': {one_line(error)}") from error


def bars(cell: Cell) -> str:
    """CSS background of a cell: a bar for each byte, in the direction it is read in, and a rule before those that start."""
    count = len(cell.data)
    drawn, rules = [], []
    for n, (p, start) in enumerate(zip(cell.probabilities, cell.starts, strict=True)):
        place = count - 1 - n if cell.right_to_left else n
        left = f"{100 * place / max(count - 1, 1):.0f}%"
        drawn.append(f"linear-gradient(var(--heat) 0 0) {left} 100%/{100 / count:.1f}% {BAR * p:.1f}px no-repeat")
        if start:
            edge = (place + 1) / count if cell.right_to_left else place / count
            rules.append(f"linear-gradient(var(--rule) 0 0) {100 * edge:.0f}% 0/1.5px 100% no-repeat")
    return ",".join([*rules, *drawn])


def hover(cell: Cell) -> str:
    """What a cell says of itself: where its bytes are, what they are, and the probability of a start at each."""
    place = f"byte {cell.offset}" if len(cell.data) == 1 else f"bytes {cell.offset}–{cell.offset + len(cell.data) - 1}"
    return f"{place}: {cell.data.hex(' ')}; p = {_listed(cell.probabilities)}"


def _listed(probabilities: Sequence[float]) -> str:
    return " ".join(f"{p:.2f}" for p in probabilities)
