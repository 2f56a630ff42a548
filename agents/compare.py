"""Grids of training runs: every cell of an experiment is trained and measured once per seed, and compared seed by seed.

What an experiment says is read by ``agents.grid``; its table is made by ``agents.tables``, its figures by ``agents.plots``.

What a cell came to under a seed is one small JSON file: its configuration, test figures, learning curve, data and versions. Its name
is a hash of what the figures depend on: the configuration without the grid's keys; the name and SHA-256 of the data; all modules
of ``segment_env``, ``models`` and ``agents`` but the PROGRAMS; and the file of every ``_target_`` outside of them. Versions of Python
and torch and the device are recorded, not hashed. A file is written when its cell is done, so that a killed grid goes on.
"""

import hashlib
import inspect
import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import Any

import hydra
import torch

import models
import segment_env
from agents import config, costs, durable, training
from agents.data import identity
from agents.grid import GRID_KEYS, Grid, Results, read_grid
from agents.tables import Speeds, as_csv, table
from segment_env.errors import UserError
from segment_env.streams import SPLITS

#: No cell depends on them.
PROGRAMS = (
    *("cli", "compare", "grid", "reach", "tables", "plots", "statistics", "segmenting", "generation", "report", "bench", "timing"),
    *("heat_map", "anatomy", "curves", "pages", "pictures", "escaping", "estimate"),
    *("laboratory", "gradient_noise", "credit", "variance"),
)

_PACKAGES = {
    "segment_env": Path(segment_env.__file__ or "").parent,
    "models": Path(models.__file__).parent,
    "agents": Path(__file__).parent,
}
#: Of a cell's file, what tables and plots are made from.
_FIELDS = set("data figures calibrated validation update bytes_read bytes_decoded curve flops_per_byte sentence versions config".split())
_FIGURES = {"bits_per_byte", "rate", "precision", "recall", "reward", "num_bytes", "boundaries", "seed"}
_VERSIONS = {"python", "torch", "device"}


@dataclass(frozen=True)
class Cell:
    """One row in one column under one seed."""

    column: str
    name: str  #: of its row
    seed: int
    settings: dict[str, Any]
    path: Path  #: of its file, be it written or not


def run(overrides: Sequence[str], folder: Path) -> str:
    """Measure the cells of an experiment that ``folder`` does not hold yet: -> the table of all, as Markdown.

    The table, the figures of every cell and plots are written beside the cells, as ``EXPERIMENT.md``, ``.csv`` and ``_*.png``.
    Progress goes to standard error. Raises UserError on an experiment that is none, before anything is trained on a cell that cannot
    be, and on a cell file that cannot be read.
    """
    grid = read_grid(overrides)
    cells = list(compose(grid, overrides, folder))
    done = {cell.path: _read(cell.path) for cell in cells if cell.path.exists()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=folder):
            pass  # a first cell takes minutes: better known before
    except OSError as error:
        raise UserError(f"cannot write to the folder of cells '{folder}': {error.strerror}") from error
    for number, cell in enumerate(cells, 1):
        heading = f"cell {number} of {len(cells)}: {', '.join(filter(None, (cell.column, cell.name)))}, seed {cell.seed}"
        if cell.path in done:
            print(f"{heading}: done, skipped ({cell.path})", file=sys.stderr)
            continue
        print(heading, file=sys.stderr)
        done[cell.path] = measure(cell.settings)
        _write(cell.path, json.dumps(done[cell.path], indent=1) + "\n")
    results = {
        column: {row: [done[cell.path] for cell in cells if (cell.column, cell.name) == (column, row)] for row in grid.rows}
        for column in grid.columns
    }
    speeds = _speeds(grid, cells) if grid.costs else {}
    text = table(grid, results, speeds)
    written = [folder / f"{grid.name}.md", folder / f"{grid.name}.csv", *_draw(grid, results, folder)]
    _write(written[0], text + "\n")
    _write(written[1], as_csv(grid, results, speeds))
    print(f"written: {', '.join(map(str, written))}", file=sys.stderr)
    return text


def _speeds(grid: Grid, cells: Sequence[Cell]) -> Speeds:
    """Time the rows against the reference, once: what was measured is kept beside the cells of the first seed."""
    first = {(cell.column, cell.name): cell for cell in cells if cell.seed == grid.seeds[0]}
    speeds: Speeds = {}
    for (column, row), cell in first.items():
        reference = first[column, grid.basis]
        path = cell.path.with_name(f"{cell.path.stem}_against_{reference.path.stem}_{grid.costs}.json")
        if not path.exists():
            print(f"timing {', '.join(filter(None, (column, row)))}", file=sys.stderr)
            _write(path, json.dumps(costs.speed(cell.settings, reference.settings, grid.costs or 1)) + "\n")
        speeds[column, row] = _read_speed(path)
    return speeds


def _draw(grid: Grid, results: Results, folder: Path) -> list[Path]:
    """Write the figures: -> their files."""
    from agents import plots  # brings matplotlib, which nothing else needs

    drawn = {folder / f"{grid.name}_{name}.png": figure for name, figure in plots.draw(grid, results).items()}
    for path, figure in drawn.items():
        _write(path, plots.png(figure))
    return list(drawn)


def compose(grid: Grid, overrides: Sequence[str], folder: Path) -> Iterator[Cell]:
    """All cells seed by seed, so that a grid that is stopped early holds whole pairs.

    Each is tried first, up to the training: raises UserError where one cannot be built, or cannot be paired with the others of its
    column.
    """
    tried = {(column, row): _try(grid, column, row, overrides) for column in grid.columns for row in grid.rows}
    for column, row in tried:
        _check_pair(grid, column, row, tried[column, row], tried[column, grid.basis])
    for seed in grid.seeds:
        for (column, row), trial in tried.items():
            settings = trial.settings if seed == grid.seeds[0] else _settings(grid, column, row, seed, overrides)
            key = json.dumps([settings, trial.data, trial.sources], sort_keys=True, default=str)
            yield Cell(column, row, seed, settings, folder / f"{hashlib.sha256(key.encode()).hexdigest()[:20]}.json")


@dataclass(frozen=True)
class _Trial:
    """What is known of a row in a column before it is trained."""

    settings: dict[str, Any]  #: under the first seed
    data: dict[str, str]  #: identity
    sources: str  #: hash


def _settings(grid: Grid, column: str, row: str, seed: int, overrides: Sequence[str]) -> dict[str, Any]:
    """The configuration of a cell, as the trainer would be given it."""
    try:
        settings = config.load([*overrides, *grid.overrides(column, row, seed)])
    except UserError as error:
        raise UserError(f"{_named(column, row)}: {error}") from error
    return {key: value for key, value in settings.items() if key not in GRID_KEYS}


def _try(grid: Grid, column: str, row: str, overrides: Sequence[str]) -> _Trial:
    """Build all that a cell needs and let go of it."""
    settings = _settings(grid, column, row, grid.seeds[0], overrides)
    try:
        run = training.Run(settings)
        if run.learns:
            run.rehearse()
        else:
            for split in SPLITS[1:]:
                run.evaluate(split, run.length)
    except (UserError, ValueError) as error:
        raise UserError(f"{_named(column, row)}: {error}") from error
    return _Trial(settings, identity(run.source), _hash_sources(settings))


def _check_pair(grid: Grid, column: str, row: str, trial: _Trial, basis: _Trial) -> None:
    """Refuse a row that reads other data than that of its column or, where rewards are compared, pays another price."""
    if trial.data != basis.data or "data_sha256" not in trial.data and _source(trial) != _source(basis):
        what = f"reads other data than the reference {grid.basis!r}: they cannot be paired"
    elif grid.scale and _price(trial) != _price(basis):
        what = f"pays agent.price={_price(trial)} where {grid.basis!r} pays {_price(basis)}: their rewards are on no common scale"
    else:
        return
    raise UserError(f"{_named(column, row)} {what}")


def _source(trial: _Trial) -> Any:
    return trial.settings["data"]["source"]


def _price(trial: _Trial) -> Any:
    return trial.settings["agent"].get("price", 0.0)


def _named(column: str, row: str) -> str:
    return f"cell {row!r} of column {column!r}" if column else f"cell {row!r}"


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Train a configuration in a folder that is then removed, and evaluate it on the test split: -> what a cell's file holds.

    One that learns nothing is evaluated at once, after 0 updates.
    """
    run = training.Run(settings)
    lines = _train(run) if run.learns else [dict.fromkeys(("update", "bytes_read", "bytes_decoded"), 0)]
    curve = [line for line in lines if "validation_bits_per_byte" in line]
    figures = run.evaluate("test", run.train["test_bytes"])
    return {
        **identity(run.source),
        "figures": figures,
        "calibrated": _calibrated(run),
        "validation": run.evaluate("validation", run.train["validation_bytes"]),
        **{key: lines[-1][key] for key in ("update", "bytes_read", "bytes_decoded")},
        "curve": curve,
        "flops_per_byte": costs.training_flops(run, curve, figures["rate"]),
        "sentence": run.sentence(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "device": run.device.type},
        "config": settings,
    }


def _calibrated(run: training.Run) -> dict[str, Any] | None:
    """Test figures at one offset of the logits that brings validation bytes to the target rate; None where there is no such offset."""
    try:
        return run.evaluate("test", run.train["test_bytes"], rate=run.settings.get("target")) if run.learns else None
    except UserError:
        return None


def _train(run: training.Run) -> list[dict[str, Any]]:
    """Train to the end: -> the lines of ``metrics.jsonl``."""
    with TemporaryDirectory(prefix="segment-env-") as folder:
        training.train(run, Path(folder), progress=sys.stderr.isatty())
        return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


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


def _write(path: Path, content: str | bytes) -> None:
    """A file that is there is whole, also where several processes work on one grid."""
    try:
        durable.write(path, content, f".{os.getpid()}")
    except OSError as error:
        raise UserError(f"cannot write '{path}': {error.strerror}") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        cell = json.loads(path.read_text())
        whole = cell.keys() >= _FIELDS and cell["figures"].keys() >= _FIGURES and cell["versions"].keys() >= _VERSIONS
        held_out = [
            cell["figures"],
            cell["validation"],
            *({k.removeprefix("validation_"): v for k, v in line.items()} for line in cell["curve"]),
        ]
        whole = whole and all(isinstance(figures[key], float) for figures in held_out for key in ("bits_per_byte", "rate", "reward"))
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        whole = False
    if not whole:
        raise UserError(f"cell file '{path}' is damaged: remove it to run its cell anew")
    return cell


def _read_speed(path: Path) -> dict[str, float]:
    try:
        found = json.loads(path.read_text())
        if all(isinstance(found[key], float) for key in ("time_ratio", "bytes_per_second")):
            return found
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise UserError(f"file of a timing '{path}' is damaged: remove it to time its row anew")
