"""Grids of training runs: every cell of an experiment is trained and measured once per seed, and compared seed by seed.

An experiment is a configuration with ``grid``, names of cells and the overrides that make each; ``seeds``; and ``reference``, the
cell that the others are paired with. The trainer knows nothing of these keys.

What a cell came to under a seed is one small JSON file: its configuration, test figures, learning curve, data and versions. Its name
is a hash of what the figures depend on: the configuration without the three keys; the name and SHA-256 of the data; all modules
of ``segment_env``, ``models`` and ``agents`` but the PROGRAMS; and the file of every ``_target_`` outside of them. Versions of Python
and torch and the device are recorded, not hashed. A file is written when its cell is done, so that a killed grid goes on.
"""

import hashlib
import inspect
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import hydra
import torch

import models
import segment_env
from agents import config, training
from agents.data import MAX_SEED, identity
from agents.statistics import paired_difference
from segment_env.errors import UserError

GRID_KEYS = ("grid", "reference", "seeds")
PROGRAMS = ("cli", "compare", "statistics", "segmenting", "generation", "variance", "report", "bench", "timing")  #: no cell depends on them
CONFIDENCE = 0.95

_PACKAGES = {
    "segment_env": Path(segment_env.__file__ or "").parent,
    "models": Path(models.__file__).parent,
    "agents": Path(__file__).parent,
}
_FIELDS = {"data", "figures", "bytes_read", "bytes_decoded", "versions"}  #: of a cell's file, what the table is made from
_FIGURES = {"bits_per_byte", "rate", "precision", "recall", "num_bytes", "boundaries", "seed"}


@dataclass(frozen=True)
class Grid:
    """What an experiment compares."""

    cells: dict[str, list[str]]  #: overrides by name
    seeds: list[int]
    reference: str


@dataclass(frozen=True)
class Cell:
    """One cell under one seed."""

    name: str
    seed: int
    settings: dict[str, Any]
    path: Path  #: of its file, be it written or not


def run(overrides: Sequence[str], folder: Path) -> str:
    """Measure the cells of an experiment that ``folder`` does not hold yet: -> the table of all, as Markdown.

    Progress goes to standard error. Raises UserError on an experiment that is none, before anything is trained on a cell that cannot
    be, and on a cell file that cannot be read.
    """
    grid = read_grid(overrides)
    cells = list(compose(grid, overrides, folder))
    done = {cell.path: _read(cell.path) for cell in cells if cell.path.exists()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder of cells '{folder}': {error.strerror}") from error
    for number, cell in enumerate(cells, 1):
        heading = f"cell {number} of {len(cells)}: {cell.name}, seed {cell.seed}"
        if cell.path in done:
            print(f"{heading}: done, skipped ({cell.path})", file=sys.stderr)
            continue
        print(heading, file=sys.stderr)
        done[cell.path] = measure(cell.settings)
        _write(cell.path, done[cell.path])
    return table(grid, {name: [done[cell.path] for cell in cells if cell.name == name] for name in grid.cells})


def read_grid(overrides: Sequence[str]) -> Grid:
    """The grid of the experiment that ``overrides`` choose. Raises UserError where there is none, or none that can be compared."""
    settings = config.load(overrides)
    if "grid" not in settings:
        chosen = next((text for text in reversed(overrides) if text.startswith("experiment=")), None)
        options = sorted(file.stem for file in (config.find_folder() / "experiment").glob("*.yaml"))
        wrong = f"{chosen} has no grid to compare" if chosen else "compare needs an experiment, as in experiment=NAME"
        raise UserError(f"{wrong}; choose from {', '.join(options)}")
    for key in GRID_KEYS[1:]:
        if key not in settings:
            raise UserError(f"the experiment has a grid but no {key!r}: give it one with +{key}=VALUE")
    cells, reference, seeds = (settings[key] for key in GRID_KEYS)
    if not isinstance(cells, dict) or not cells:
        raise UserError(f"grid must map names of cells to lists of overrides, at least one, got {cells!r}")
    cells = {str(name): texts for name, texts in cells.items()}
    for name, texts in cells.items():
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise UserError(f"grid.{name} must be a list of overrides such as [agent=uniform], got {texts!r}")
    if (
        not isinstance(seeds, list)
        or not seeds
        or not all(type(seed) is int and 0 <= seed <= MAX_SEED for seed in seeds)
        or len(set(seeds)) < len(seeds)
    ):
        raise UserError(f"seeds must be a list of different whole numbers, at least one, got {seeds!r}")
    if str(reference) not in cells:
        raise UserError(f"reference={reference} is no cell of the grid; choose from {', '.join(cells)}")
    for text in [*overrides, *(text for texts in cells.values() for text in texts)]:
        if text.lstrip("+").startswith("seed="):
            raise UserError(f"{text}: every cell is run with each of the experiment's seeds; choose them with seeds=[0,1,2]")
    return Grid(cells, seeds, str(reference))


def compose(grid: Grid, overrides: Sequence[str], folder: Path) -> Iterator[Cell]:
    """All cells seed by seed, so that a grid that is stopped early holds whole pairs.

    Each is tried first, up to the training: raises UserError where one cannot be built, or reads other data than the reference.
    """
    tried = {name: _try(name, _settings(grid, name, grid.seeds[0], overrides)) for name in grid.cells}
    for name, (data, _) in tried.items():
        if data != tried[grid.reference][0]:
            raise UserError(f"cell {name!r} reads other data than the reference {grid.reference!r}: they cannot be paired")
    for seed in grid.seeds:
        for name in grid.cells:
            settings = _settings(grid, name, seed, overrides)
            key = json.dumps([settings, *tried[name]], sort_keys=True, default=str)
            yield Cell(name, seed, settings, folder / f"{hashlib.sha256(key.encode()).hexdigest()[:20]}.json")


def _settings(grid: Grid, name: str, seed: int, overrides: Sequence[str]) -> dict[str, Any]:
    """The configuration of a cell, as the trainer would be given it."""
    try:
        settings = config.load([*overrides, *grid.cells[name], f"seed={seed}"])
    except UserError as error:
        raise UserError(f"cell {name!r}: {error}") from error
    return {key: value for key, value in settings.items() if key not in GRID_KEYS}


def _try(name: str, settings: dict[str, Any]) -> tuple[dict[str, str], str]:
    """Build all that a cell needs and let go of it: -> the identity of its data, the hash of its sources."""
    try:
        run = training.Run(settings)
        run.rehearse()
    except UserError as error:
        raise UserError(f"cell {name!r}: {error}") from error
    return identity(run.source), _hash_sources(settings)


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Train a configuration in a folder that is then removed, and evaluate it on the test split: -> what a cell's file holds."""
    run = training.Run(settings)
    with TemporaryDirectory(prefix="segment-env-") as folder:
        training.train(run, Path(folder), progress=sys.stderr.isatty())
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return {
        **identity(run.source),
        "figures": run.evaluate("test"),
        **{key: lines[-1][key] for key in ("update", "bytes_read", "bytes_decoded")},
        "curve": [line for line in lines if "validation_bits_per_byte" in line],
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "device": run.device.type},
        "config": settings,
    }


def table(grid: Grid, results: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown of ``results``, by cell those of all seeds in order: means, differences to the reference, and how they were come by."""
    title = f"minus {grid.reference} ({CONFIDENCE:.0%} t-interval)"
    rows = [["cell", "bits per byte", "rate", "precision", "recall", title, "bytes decoded", "bytes read"]]
    paired = [one["figures"]["bits_per_byte"] for one in results[grid.reference]]
    for name, ones in results.items():
        bits, *others = ([one["figures"][key] for one in ones] for key in ("bits_per_byte", "rate", "precision", "recall"))
        difference = paired_difference(bits, paired, CONFIDENCE)
        interval = f"{difference.mean:+.3f} ± {difference.half_width:.3f}" if len(bits) > 1 else f"{difference.mean:+.3f}, no interval"
        budget = (_joined(f"{one[key]:,}" for one in ones) for key in ("bytes_decoded", "bytes_read"))
        means = (f"{fmean(values):.3f}" for values in (bits, *others))
        rows.append([name, *means, "reference" if name == grid.reference else interval, *budget])

    every = [one for ones in results.values() for one in ones]

    def distinct(shown: Callable[[dict[str, Any]], str]) -> str:
        return _joined(map(shown, every))

    seeds = f"seeds {', '.join(map(str, grid.seeds))}" if len(grid.seeds) > 1 else f"seed {grid.seeds[0]} alone"
    data = distinct(lambda one: f"{one['data']} (SHA-256 {one['data_sha256'][:12]})" if "data_sha256" in one else one["data"])
    reference = "those after whitespace" if "data_sha256" in every[0] else "the stream's own"
    versions = distinct(lambda one: "Python {python}, torch {torch}, {device}".format(**one["versions"]))
    return "\n".join(
        [
            *_markdown(rows),
            "",
            f"Means over {seeds}, paired by seed: same data, same initialisation of the model.",
            f"Measured on {distinct(lambda one: format(one['figures']['num_bytes'], ','))} test bytes of {data}; boundaries "
            f"{distinct(lambda one: '{boundaries}, noise seed {seed}'.format(**one['figures']))}. Rate: starts per byte.",
            f"Precision and recall: of starts, against {reference}. {versions}.",
        ]
    )


def _markdown(rows: list[list[str]]) -> Iterator[str]:
    """Lines of a table: names to the left, figures to the right; the first row is the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True))]
        yield f"| {' | '.join(cells)} |"
        if row is rows[0]:
            yield f"| {'-' * widths[0]} | {' | '.join('-' * (width - 1) + ':' for width in widths[1:])} |"


def _joined(texts: Iterable[str]) -> str:
    """Different texts in order, joined."""
    return "; ".join(dict.fromkeys(texts))


def _hash_sources(settings: dict[str, Any]) -> str:
    """SHA-256 of the modules that a cell's figures depend on; what its targets name can be imported."""
    digest = hashlib.sha256()
    for name, file in sorted({**_own_modules(), **_foreign_modules(settings)}.items()):
        digest.update(f"{name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def _own_modules() -> dict[str, Path]:
    """By dotted name."""
    programs = {f"agents.{program}" for program in PROGRAMS}
    files = ((root.parent, file) for root in _PACKAGES.values() for file in root.rglob("*.py"))
    named = {".".join(file.relative_to(above).with_suffix("").parts): file for above, file in files}
    return {name: file for name, file in named.items() if name not in programs}


def _foreign_modules(settings: dict[str, Any]) -> dict[str, Path]:
    modules = (inspect.getmodule(hydra.utils.get_object(target)) for target in _targets(settings))
    files = {module.__name__: getattr(module, "__file__", None) for module in modules if module}
    return {name: Path(file) for name, file in files.items() if file and name.split(".")[0] not in _PACKAGES}


def _targets(node: Any) -> Iterator[str]:
    """Every ``_target_`` of a configuration."""
    if isinstance(node, dict):
        yield from [node["_target_"]] if "_target_" in node else []
    for inner in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _targets(inner)


def _write(path: Path, cell: dict[str, Any]) -> None:
    """Written beside, then renamed: a file that is there is whole."""
    beside = path.with_suffix(f".{os.getpid()}.partial")
    try:
        beside.write_text(json.dumps(cell, indent=1) + "\n")
        beside.replace(path)
    except OSError as error:
        raise UserError(f"cannot write the cell file '{path}': {error.strerror}") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        cell = json.loads(path.read_text())
        whole = cell.keys() >= _FIELDS and cell["figures"].keys() >= _FIGURES
    except (OSError, ValueError, AttributeError):
        whole = False
    if not whole:
        raise UserError(f"cell file '{path}' is damaged: remove it to run its cell anew")
    return cell
