"""What an experiment compares: rows of overrides, columns of them, and seeds.

An experiment is a configuration with these keys, of which the trainer knows nothing:

- ``grid``: rows by name, each a list of overrides
- ``seeds``: every cell is run with each of them
- ``reference``: the row that the others are paired with; may be left out where there is a scale
- ``across`` (optional): columns by name, each a list of overrides; a cell is one row in one column under one seed
- ``scale`` (optional): two rows; the table then holds scores, 0 for the reward of the first and 1 for that of the second
- ``reach`` (optional): ranges of validation figures; a second table says how many bytes it takes to get there: see ``agents.reach``
- ``costs`` (optional): pairs of updates that are timed; a further table says what a row costs, how long its segments are, and shows one
  sentence as it cuts it: see ``agents.costs``
- ``notes`` (optional): lines that are printed under the table
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from agents import config
from agents.costs import check_pairs
from agents.data import MAX_SEED
from agents.reach import Ranges, read_ranges
from segment_env.errors import UserError

GRID_KEYS = ("grid", "reference", "seeds", "across", "scale", "reach", "costs", "notes")

Results = dict[str, dict[str, list[dict[str, Any]]]]  #: what the cells' files hold: by column, by row, seed by seed


@dataclass(frozen=True)
class Grid:
    """What an experiment compares."""

    rows: dict[str, list[str]]  #: overrides by name
    seeds: list[int]
    reference: str | None  #: a row; None only where there is a scale
    columns: dict[str, list[str]] = field(default_factory=lambda: {"": []})  #: overrides by name; without ``across`` one without a name
    scale: tuple[str, str] | None = None  #: the rows of score 0 and of score 1
    reach: Ranges | None = None
    costs: int | None = None  #: pairs of timed updates
    notes: tuple[str, ...] = ()
    name: str = "grid"  #: of the experiment

    def overrides(self, column: str, row: str, seed: int) -> list[str]:
        """What a cell adds to the command line; of two that disagree the later holds."""
        return [*self.columns[column], *self.rows[row], f"seed={seed}"]

    @property
    def basis(self) -> str:
        """The row whose data the others of a column must read."""
        return self.reference or (self.scale or tuple(self.rows))[0]


def read_grid(overrides: Sequence[str]) -> Grid:
    """The grid of the experiment that ``overrides`` choose. Raises UserError where there is none, or none that can be compared."""
    settings = config.load(overrides)
    chosen = next((text for text in reversed(overrides) if text.startswith("experiment=")), None)
    _check_spelling(settings)
    if "grid" not in settings:
        options = sorted(file.stem for file in (config.find_folder() / "experiment").glob("*.yaml"))
        wrong = f"{chosen} has no grid to compare" if chosen else "compare needs an experiment, as in experiment=NAME"
        raise UserError(f"{wrong}; choose from {', '.join(options)}")
    for key in ["seeds"] if settings.get("scale") else ["reference", "seeds"]:
        if key not in settings:
            raise UserError(f"the experiment has a grid but no {key!r}: give it one with +{key}=VALUE")
    rows = override_lists(settings["grid"], "grid", "cells")
    across = settings.get("across")
    columns = {"": []} if across is None else override_lists(across, "across", "columns")
    seeds = settings["seeds"]
    if (
        not isinstance(seeds, list)
        or not seeds
        or not all(type(seed) is int and 0 <= seed <= MAX_SEED for seed in seeds)
        or len(set(seeds)) < len(seeds)
    ):
        raise UserError(f"seeds must be a list of different whole numbers, at least one, got {seeds!r}")
    scale = _scale(settings.get("scale"), rows)
    reference = settings.get("reference")
    if not (reference is None and scale):
        _check_row("reference", reference, rows)
    notes = settings.get("notes")
    if not (notes is None or isinstance(notes, list) and all(isinstance(line, str) for line in notes)):
        raise UserError(f"notes must be a list of lines, got {notes!r}")
    for text in [*overrides, *(text for named in (columns, rows) for texts in named.values() for text in texts)]:
        if text.lstrip("+").startswith("seed="):
            raise UserError(f"{text}: every cell is run with each of the experiment's seeds; choose them with seeds=[0,1,2]")
    name = chosen.partition("=")[2].replace("/", "_") if chosen else "grid"
    costs = None if settings.get("costs") is None else check_pairs(settings["costs"])
    reach = None if settings.get("reach") is None else read_ranges(settings["reach"])
    return Grid(rows, seeds, None if reference is None else str(reference), columns, scale, reach, costs, tuple(notes or ()), name)


def _check_spelling(settings: dict[str, Any]) -> None:
    """Refuse a key that is almost one of the grid's."""
    for key in settings.keys() - {*GRID_KEYS, "seed"}:
        if near := get_close_matches(key, GRID_KEYS, 1, cutoff=0.8):
            raise UserError(f"the experiment has a key {key!r}; did you mean {near[0]!r}?")


def override_lists(node: Any, key: str, things: str) -> dict[str, list[str]]:
    """Lists of overrides by name."""
    if not isinstance(node, dict) or not node:
        raise UserError(f"{key} must map names of {things} to lists of overrides, at least one, got {node!r}")
    for name, texts in node.items():
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise UserError(f"{key}.{name} must be a list of overrides such as [agent=uniform], got {texts!r}")
    return {str(name): texts for name, texts in node.items()}


def _scale(node: Any, rows: dict[str, list[str]]) -> tuple[str, str] | None:
    if node is None:
        return None
    if not isinstance(node, list) or len(node) != 2 or node[0] == node[1]:
        raise UserError(f"scale must name two different cells of the grid, those of score 0 and 1, as in [random,oracle], got {node!r}")
    for name in node:
        _check_row("scale", name, rows)
    return str(node[0]), str(node[1])


def _check_row(key: str, name: Any, rows: dict[str, list[str]]) -> None:
    if str(name) not in rows:
        raise UserError(f"{key}={name} is no cell of the grid; choose from {', '.join(rows)}")
