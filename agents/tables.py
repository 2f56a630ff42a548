"""Markdown tables of an experiment's cells.

Letters: R mean reward.
"""

import csv
import io
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean
from typing import Any

from agents import reach
from agents.grid import Grid, Results
from agents.statistics import mean_interval, paired_difference, score

CONFIDENCE = 0.95

Cells = dict[str, list[dict[str, Any]]]  #: of one column: by row, seed by seed
Speeds = dict[tuple[str, str], dict[str, float]]  #: by column and row, what ``agents.costs.speed`` found


def table(grid: Grid, results: Results, speeds: Speeds | None = None) -> str:
    """Markdown of ``results``: scores where the grid has a scale, else for every column means and differences to the reference.

    Where rows were timed, ``speeds``, what they cost follows.
    """
    lines = _scores(grid, results) if grid.scale else []
    for column, cells in results.items():
        head = [f"### {column}", ""] if column else []
        lines += [] if grid.scale else [*head, *_ordinary(grid, cells)]
        if speeds:
            lines += [*(head if grid.scale else ()), *_costs(grid, cells, {row: speeds[column, row] for row in cells})]
    return "\n".join([*lines, *grid.notes]).strip("\n")


def as_csv(grid: Grid, results: Results, speeds: Speeds | None = None) -> str:
    """A line per cell: column, row, seed, budget, all test figures, and what the row costs where that was measured."""
    lines = [
        {"column": column, "row": row, "seed": seed, **{key: cell[key] for key in ("update", "bytes_read", "bytes_decoded")}}
        | {key: value for key, value in cell["figures"].items() if key != "seed"}
        | {f"calibrated_{key}": (cell["calibrated"] or {}).get(key) for key in ("bits_per_byte", "rate", "offset")}
        | ({"flops_per_byte": cell["flops_per_byte"], **speeds[column, row]} if speeds else {})
        for column, cells in results.items()
        for row, ones in cells.items()
        for seed, cell in zip(grid.seeds, ones, strict=True)
    ]
    return csv_of(lines)


def csv_of(lines: Sequence[dict[str, Any]]) -> str:
    """Records of the same keys, at least one, with a head."""
    file = io.StringIO()
    writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return file.getvalue()


def _ordinary(grid: Grid, cells: Cells) -> list[str]:
    """Means, differences to the reference, and how they were come by."""
    title = f"minus {grid.reference} ({CONFIDENCE:.0%} t-interval)"
    calibrated = any(one["calibrated"] for ones in cells.values() for one in ones)
    rows = [["cell", "bits per byte", "rate", "precision", "recall", title, *["calibrated bits", "rate"] * calibrated, *_BUDGET]]
    paired = [one["figures"]["bits_per_byte"] for one in cells[grid.basis]]
    for name, ones in cells.items():
        bits, *others = ([one["figures"][key] for one in ones] for key in ("bits_per_byte", "rate", "precision", "recall"))
        difference = paired_difference(bits, paired, CONFIDENCE)
        interval = f"{difference.mean:+.3f} ± {difference.half_width:.3f}" if len(bits) > 1 else f"{difference.mean:+.3f}, no interval"
        budget = (_joined(f"{one[key]:,}" for one in ones) for key in ("bytes_decoded", "bytes_read"))
        means = (_number(fmean(values)) for values in (bits, *others))
        same_rate = _calibrated(ones) if calibrated else ()
        rows.append([_labelled(name, ones), *means, "reference" if name == grid.reference else interval, *same_rate, *budget])
    every = [one for ones in cells.values() for one in ones]
    reference = "those after whitespace" if {"data_sha256", "data_revision"} & every[0].keys() else "the stream's own"
    return [
        *markdown(rows),
        "",
        f"Means over {_seeds(grid)}, paired by seed: same data, same initialisation of the model.",
        f"Measured on {_distinct(every, _test_bytes)} test bytes of {_distinct(every, _data)}; boundaries "
        f"{_distinct(every, _boundaries)}. Rate: starts per byte.",
        f"Precision and recall: of starts, against {reference}. {_distinct(every, _versions)}.",
        *["Calibrated: with one offset of all logits that brings validation bytes to the target rate."] * calibrated,
        "",
        *(_reached(cells, grid.reach) if grid.reach else ()),
    ]


def _costs(grid: Grid, cells: Cells, speeds: dict[str, dict[str, float]]) -> list[str]:
    """What the rows of a column cost, how long their segments are, and a sentence as the first seed's run cuts it."""
    rows = [["cell", "bytes a segment", "standard deviation", "MFLOPs a byte", f"update time / {grid.basis}", "bytes a second"]]
    for name, ones in cells.items():
        lengths = (_number(fmean(one["figures"][f"segment_length_{key}"] for one in ones)) for key in ("mean", "std"))
        flops = [one["flops_per_byte"] or math.nan for one in ones]
        speed = speeds[name]
        costs = (_number(fmean(flops) / 1e6), f"{speed['time_ratio']:.2f}", f"{speed['bytes_per_second']:,.0f}")
        rows.append([_labelled(name, ones), *lengths, *costs])
    longest = max(map(len, cells))
    return [
        *markdown(rows),
        "",
        "Segments of the test split. FLOPs: of training, forward and backward, per byte decoded, at the mean rate of the validations;",
        f"the read-out of a linear policy is not counted. Time: median of {grid.costs} pairs of updates in turns.",
        "",
        *(f"    {name.ljust(longest)}  {ones[0]['sentence']}" for name, ones in cells.items()),
        "",
    ]


def _reached(cells: Cells, ranges: reach.Ranges) -> Iterator[str]:
    """How many bytes it took to get there."""
    wanted = " and ".join(f"{name} in [{low:g}, {high:g}]" for name, (low, high) in ranges.items())
    yield from markdown([["cell", *reach.HEAD], *([name, *reach.columns(ones, ranges)] for name, ones in cells.items())])
    yield ""
    yield f"Reached: {wanted} on validation bytes, asked at every validation. Bytes: means with {CONFIDENCE:.0%} t-intervals, or bounds,"
    yield "seeds that did not get there counted with all their bytes. Then: of later validations, how many within, their mean recall, and"
    yield "how far seeds lie apart."
    yield ""


_BUDGET = ("bytes decoded", "bytes read")


def _calibrated(ones: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Mean bits per byte and rate at the offset that was calibrated on validation bytes; a dash where a seed has none."""
    for key in ("bits_per_byte", "rate"):
        yield _number(fmean(one["calibrated"][key] if one["calibrated"] else math.nan for one in ones))


def _scores(grid: Grid, results: Results) -> list[str]:
    """Scores and rates, row by column, and what every column's scores were made from."""
    zero, one = grid.scale or ("", "")
    every = [each for cells in results.values() for ones in cells.values() for each in ones]
    columns = [column or grid.name for column in results]
    score_rows, rate_rows = [["score", *columns]], [["starts per byte", *columns]]
    for row in grid.rows:
        label = _labelled(row, [each for cells in results.values() for each in cells[row]])
        score_rows.append([label, *(_score(grid, cells, row) for cells in results.values())])
        rate_rows.append([label, *(_number(fmean(each["figures"]["rate"] for each in cells[row])) for cells in results.values())])
    scale_rows = [["column", f"R of {zero}", f"R of {one}", "price", "updates", "bytes decoded", "bytes read", "test bytes", "data"]]
    scale_rows += [[column, *_basis(cells, zero, one)] for column, cells in zip(columns, results.values(), strict=True)]
    interval = f"mean ± half-width of the {CONFIDENCE:.0%} t-interval over " if len(grid.seeds) > 1 else "no interval, "
    return [
        *markdown(score_rows),
        "",
        *markdown(rate_rows),
        "",
        *markdown(scale_rows),
        "",
        f"Score: (R - R of {zero}) / (R of {one} - R of {zero}), seed by seed; {interval}{_seeds(grid)}.",
        f"R: mean reward in nats per byte of the test split, the price of starts paid; boundaries {_distinct(every, _boundaries)}.",
        f"Rates and R are means over {_seeds(grid)}. Updates and bytes: of what learns. {_distinct(every, _versions)}.",
        "",
    ]


def _score(grid: Grid, cells: Cells, row: str) -> str:
    if row in (grid.scale or ()):
        return str((grid.scale or ()).index(row))
    rewards = ([one["figures"]["reward"] for one in cells[name]] for name in (row, *(grid.scale or ())))
    mean, half_width = mean_interval([score(*each) for each in zip(*rewards, strict=True)], CONFIDENCE)
    return f"{mean:.3f} ± {half_width:.3f}" if math.isfinite(half_width) else _number(mean)


def _basis(cells: Cells, zero: str, one: str) -> list[str]:
    """What the scores of a column were made from."""
    every = [each for ones in cells.values() for each in ones]
    learnt = [each for each in every if each["update"]] or every
    budget = (sorted({each[key] for each in learnt}) for key in ("update", "bytes_decoded", "bytes_read"))
    return [
        *(f"{fmean(each['figures']['reward'] for each in cells[row]):.4f}" for row in (zero, one)),
        _distinct(every, lambda each: format(each["config"]["agent"].get("price", 0.0), "g")),
        *(_joined(format(value, ",") for value in values) for values in budget),
        _distinct(every, _test_bytes),
        _distinct(every, _data),
    ]


def _labelled(row: str, ones: Sequence[dict[str, Any]]) -> str:
    """The name of a row; what is not causal says so."""
    return row if all(one["figures"].get("causal", True) for one in ones) else f"{row} (not causal)"


def _seeds(grid: Grid) -> str:
    return f"seeds {', '.join(map(str, grid.seeds))}" if len(grid.seeds) > 1 else f"seed {grid.seeds[0]} alone"


def _test_bytes(cell: dict[str, Any]) -> str:
    return f"{cell['figures']['num_bytes']:,}"


def _data(cell: dict[str, Any]) -> str:
    for key, name in (("data_sha256", "SHA-256"), ("data_revision", "revision")):
        if key in cell:
            return f"{cell['data']} ({name} {cell[key][:12]})"
    return cell["data"]


def _boundaries(cell: dict[str, Any]) -> str:
    return "{boundaries}, noise seed {seed}".format(**cell["figures"])


def _versions(cell: dict[str, Any]) -> str:
    return "Python {python}, torch {torch}, {device}".format(**cell["versions"])


def _number(value: float) -> str:
    """A figure, or a dash where it is undefined."""
    return f"{value:.3f}" if math.isfinite(value) else "-"


def markdown(rows: list[list[str]]) -> Iterator[str]:
    """Lines of a table: names to the left, figures to the right; the first row is the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True))]
        yield f"| {' | '.join(cells)} |"
        if row is rows[0]:
            yield f"| {'-' * widths[0]} | {' | '.join('-' * (width - 1) + ':' for width in widths[1:])} |"


def _distinct(cells: Sequence[dict[str, Any]], shown: Callable[[dict[str, Any]], str]) -> str:
    return _joined(map(shown, cells))


def _joined(texts: Iterable[str]) -> str:
    """Different texts in order, joined."""
    return "; ".join(dict.fromkeys(texts))
