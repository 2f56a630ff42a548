"""The variance laboratory: how noisy, how far off and how dear every estimator of the boundary gradient is, on a frozen run.

The estimators are an experiment's ``grid``: names mapped to overrides that make agents. ``reference`` names the one that the others
are compared with, the paper's; ``truth`` is the one whose expectation bias is measured against, many boundary samples of the same
bytes with leave-one-out; ``objective`` the same without a discount, which the language-model loss itself asks for.

Letters: N draws of held-out bytes, B rows.
"""

import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from agents import checkpoint, config, training
from agents.gradient_noise import Draws, Figures, figures, interval
from agents.grid import override_lists
from agents.laboratory import FLIPS, PARTS, ROUNDS, Estimator, Laboratory
from agents.tables import csv_of, markdown
from segment_env.errors import UserError

ROLES = ("truth", "objective")
SEQUENCES = 4  #: whose single decisions are looked at, or as many as the estimator with the fewest has
Interval = tuple[float, float, float]  #: a figure, and the ends of its 95% bootstrap interval


def run(folder: Path, overrides: Sequence[str], out: Path | None = None, draws: int = 64, fit_updates: int = 200, pairs: int = 10) -> str:
    """Measure the estimators of an experiment on the run in ``folder``: -> the table, as Markdown.

    Table, figures and a plot are written to ``out``, by default ``FOLDER/variance``. Raises UserError where the run has no checkpoint,
    the experiment no estimators, or one of them does not fit the run.
    """
    if draws < 2 or fit_updates < 0 or pairs < 1:
        raise UserError(f"at least 2 draws, 0 fitting updates and 1 pair are needed, got {draws}, {fit_updates} and {pairs}")
    overrides = [*([] if any(text.startswith("experiment=") for text in overrides) else ["experiment=estimators"]), *overrides]
    settings = config.load(overrides)
    rows, reference = _rows(settings)
    lab = Laboratory(training.open_run(folder), draws, fit_updates, pairs)
    made = {name: lab.estimator(name, [*overrides, *texts]) for name, texts in rows.items()}
    out = out or checkpoint.run_of(folder) / "variance"
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder '{out}': {error.strerror}") from error
    print("drawing the truth", file=sys.stderr)
    known = [lab.estimator(role, [*overrides, *settings[role]]) for role in ROLES]
    others = dict(zip(ROLES, lab.gradients(known, "truth"), strict=True))
    for name, estimator in made.items():
        print(f"fitting and timing {name}", file=sys.stderr)
        lab.fit(estimator)
    times = {name: lab.relative_time(estimator, made[reference]) for name, estimator in made.items()}
    print("drawing the estimators", file=sys.stderr)
    results = {
        name: {
            "time": times[name],
            "encodings": made[name].samples.num_sequences / made[name].samples.num_rows,
            **{part: _measured(drawn[part], {role: other[part] for role, other in others.items()}) for part in PARTS if part in drawn},
        }
        for name, drawn in zip(made, lab.gradients(list(made.values()), "estimator"), strict=True)
    }
    lines = list(_lines(results, reference))
    credit = _credit(lab, made, reference, settings["gamma"])
    text = table(lines, credit, reference, settings["gamma"], lab)
    record = {"gamma": settings["gamma"], "draws": draws, "reference": reference, "torch": torch.__version__}
    _save(out, text, {**record, "rows": lines, "credit": credit})
    return text


def _credit(lab: Laboratory, made: dict[str, Estimator], reference: str, gamma: float) -> list[dict[str, Any]] | str:
    """A flat record per estimator: how wrongly it credits single decisions; or why that is not known."""
    print("flipping single boundaries", file=sys.stderr)
    count = min(SEQUENCES, *(each.samples.num_sequences for each in made.values()))
    try:
        truth = lab.truth(made[reference].agent.soft_cap, gamma, count)
    except UserError as error:
        return str(error)
    drawn = lab.directions(list(made.values()), count)
    return [
        {"estimator": name, **_flat({key: interval(value) for key, value in truth.errors(g).items()})}
        for name, g in zip(made, drawn, strict=True)
    ]


def _rows(settings: dict[str, Any]) -> tuple[dict[str, list[str]], str]:
    for key in ("grid", "reference", "truth", "objective"):
        if key not in settings:
            raise UserError(f"the experiment has no {key!r}, it is not one of estimators; see experiment=estimators")
    rows, reference = override_lists(settings["grid"], "grid", "estimators"), str(settings["reference"])
    if reference not in rows:
        raise UserError(f"reference={reference} is no estimator of the grid; choose from {', '.join(rows)}")
    return rows, reference


def _measured(drawn: torch.Tensor, others: dict[str, torch.Tensor]) -> dict[str, Figures]:
    return {role: figures(Draws.of(drawn, other)) for role, other in others.items()}


def _lines(results: dict[str, dict[str, Any]], reference: str) -> Iterator[dict[str, Any]]:
    """A flat record per estimator and part: figures with their intervals, ratios to the reference's."""
    for part in PARTS:
        for name, result in results.items():
            if part not in result:
                continue
            mine, theirs = result[part]["truth"], results[reference][part]["truth"]
            ratio = mine.variance / theirs.variance
            shown: dict[str, Interval] = {
                "variance": interval(mine.variance),
                "variance_ratio_equal_rows": interval(ratio),
                "variance_ratio_equal_time": interval(ratio * result["time"]),
                "signal_to_noise": interval(mine.signal_to_noise),
                "from_bytes": interval(mine.from_bytes),
                "bias": interval(mine.bias),
                "cosine": interval(mine.cosine),
                "cosine_objective": interval(result[part]["objective"].cosine),
            }
            costs = {"time_ratio": result["time"], "encodings_per_row": result["encodings"]}
            yield {"part": part, "estimator": name, **costs, **_flat(shown)}


_ENDS = ("", "_low", "_high")


def _flat(shown: dict[str, Interval]) -> dict[str, float]:
    return {key + end: value for key, triple in shown.items() for end, value in zip(_ENDS, triple, strict=True)}


#: Head of a column -> the figure that it shows.
_COLUMNS = {
    "variance, equal rows": "variance_ratio_equal_rows",
    "variance, equal time": "variance_ratio_equal_time",
    "signal to noise": "signal_to_noise",
    "bias": "bias",
    "cosine": "cosine",
    "cosine, no discount": "cosine_objective",
    "from the bytes": "from_bytes",
}


def table(lines: Sequence[dict[str, Any]], credit: list[dict[str, Any]] | str, reference: str, gamma: float, lab: Laboratory) -> str:
    """Markdown of the records: a table per part, and one of credit."""
    text = []
    for part in PARTS:
        rows = [["estimator", *_COLUMNS, "time", "encodings"]]
        for line in (line for line in lines if line["part"] == part):
            rows.append([line["estimator"], *_figures(line, _COLUMNS), f"{line['time_ratio']:.2f}", f"{line['encodings_per_row']:.2f}"])
        if len(rows) > 1:
            text += [f"Gradient of the {_NAMES[part]}, gamma {gamma:g}:", "", *markdown(rows), ""]
    return "\n".join(
        [
            *text,
            f"Variance: trace of the covariance of an update's gradient, over that of {reference}: at equal decoded rows"
            f" ({lab.run.train['rows']} x {lab.run.length} bytes), and at equal time of a whole update ('time', {lab.pairs} pairs).",
            "Signal to noise: |expectation|^2 / variance, of one update. Bias: |expectation - truth| / |truth|; the truth is an average of",
            "leave-one-out over 8 boundary samples of the same bytes at the same discount, and without one in the last cosine. From the",
            "bytes: fraction of the variance that is left when boundaries are averaged out. All estimates are free of the bias of noise:",
            "where noise rules a signal may come out negative, a cosine outside [-1, 1].",
            f"{lab.draws} draws of held-out bytes, 2 of boundaries each; in brackets 95% bootstrap intervals; - where noise hides it.",
            "",
            *_credit_table(credit, lab, gamma),
        ]
    )


_NAMES = {"head": "policy's parameters", "encoder": "encoder"}


#: The same of the table of credit.
_CREDIT = {"noise": "noise", "wrong sign at starts": "wrong_at_starts", "wrong sign elsewhere": "wrong_elsewhere"}


def _credit_table(credit: list[dict[str, Any]] | str, lab: Laboratory, gamma: float) -> list[str]:
    if isinstance(credit, str):
        return [f"No credit of single decisions: {credit}."]
    rows = [["estimator", *_CREDIT], *([line["estimator"], *_figures(line, _CREDIT)] for line in credit)]
    return [
        f"Credit of single decisions, gamma {gamma:g}:",
        "",
        *markdown(rows),
        "",
        f"Of single rows, against the truth by flipping one boundary at a time under {ROUNDS} draws of the others. Noise: mean square of",
        "(g - truth) over that of the truth. Wrong sign: how often g points away from the truth, positions weighted by |truth|, at starts",
        f"of the reference and elsewhere. {lab.draws} draws of boundaries, {FLIPS} positions a sequence; intervals: over positions.",
    ]


def _figures(line: dict[str, Any], columns: dict[str, str]) -> Iterator[str]:
    return (_shown(*(line[key + end] for end in _ENDS)) for key in columns.values())


def _shown(value: float, low: float, high: float) -> str:
    if not math.isfinite(value):
        return "-"
    ends = f" ({low:.3g}, {high:.3g})" if math.isfinite(low) and math.isfinite(high) else ""
    return f"{value:.3g}{ends}"


def _save(out: Path, text: str, record: dict[str, Any]) -> None:
    """The table, its figures as JSON and CSV, and a plot."""
    from agents import plots  # brings matplotlib, which nothing else needs

    files = {
        "variance.md": (text + "\n").encode(),
        "variance.json": (json.dumps(record, indent=1) + "\n").encode(),
        "variance.csv": csv_of(record["rows"]).encode(),
        **({} if isinstance(record["credit"], str) else {"credit.csv": csv_of(record["credit"]).encode()}),
        "variance.png": plots.png(plots.draw_variances(record["rows"], record["reference"])),
    }
    try:
        for name, content in files.items():
            (out / name).write_bytes(content)
    except OSError as error:
        raise UserError(f"cannot write to '{out}': {error.strerror}") from error
    print(f"written: {', '.join(str(out / name) for name in files)}", file=sys.stderr)
