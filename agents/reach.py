"""How many bytes it takes until held-out figures lie where an experiment wants them, and how steady they are from then on.

An experiment's ``reach`` maps validation figures to ranges, both ends included, as in ``{recall: [0.9, 1], rate: [0.18, 0.22]}``. A
run has reached them at its first validation where all hold; so the resolution is the distance between validations.
"""

import math
from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import Any

from agents.statistics import mean_interval
from segment_env.errors import UserError

Ranges = dict[str, tuple[float, float]]


def read_ranges(node: Any) -> Ranges:
    """The ranges of an experiment's ``reach``. Raises UserError on anything else."""
    known = ("bits_per_byte", "rate", "precision", "recall")
    whole = isinstance(node, dict) and node and all(isinstance(pair, list) and len(pair) == 2 for pair in node.values())
    if not whole or not all(type(end) in (int, float) for pair in node.values() for end in pair):
        raise UserError(f"reach must map validation figures to ranges, as in {{recall: [0.9, 1]}}, got {node!r}")
    for name, (low, high) in node.items():
        if name not in known or not low <= high:
            choices = ", ".join(known)
            raise UserError(f"reach.{name}=[{low}, {high}] is no range of a validation figure; choose from {choices}, lower end first")
    return {name: (float(low), float(high)) for name, (low, high) in node.items()}


def reached(curve: Sequence[dict[str, Any]], ranges: Ranges) -> int | None:
    """Index of the first validation of a learning curve where all ``ranges`` hold; None where there is none."""
    held = (i for i, line in enumerate(curve) if all(low <= line[f"validation_{name}"] <= high for name, (low, high) in ranges.items()))
    return next(held, None)


HEAD = ("reached", "bytes decoded until", "bytes read until", "then within", "then recall", "standard deviation over seeds")


def columns(cells: Sequence[dict[str, Any]], ranges: Ranges) -> list[str]:
    """Cells of a row, a cell's file for every seed -> the entries under HEAD.

    Bytes: the mean with its 95% t-interval where every seed got there, else a lower bound, those that did not counted with their
    whole budget. Then, over all later validations of the seeds that did: the share where the ranges hold, and the recall; and the
    mean over these validations of the standard deviation of recall over seeds.
    """
    at = [reached(cell["curve"], ranges) for cell in cells]
    found = [(cell["curve"], i) for cell, i in zip(cells, at, strict=True) if i is not None]
    entries = [f"{len(found)} of {len(cells)}"]
    for key in ("bytes_decoded", "bytes_read"):
        spent = [cell[key] if i is None else cell["curve"][i][key] for cell, i in zip(cells, at, strict=True)]
        mean, half_width = mean_interval(spent)
        sign = "" if len(found) == len(cells) else "> "
        entries.append(f"{sign}{mean:,.0f}" + (f" ± {half_width:,.0f}" if not sign and math.isfinite(half_width) else ""))
    if not found:
        return [*entries, "-", "-", "-"]
    later = [line for curve, i in found for line in curve[i:]]
    held = fmean(reached([line], ranges) is not None for line in later)
    first = max(i for _, i in found)
    together = zip(*([line["validation_recall"] for line in curve[first:]] for curve, _ in found), strict=True)
    spread = f"{fmean(pstdev(each) for each in together):.3f}" if len(found) > 1 else "-"
    return [*entries, f"{held:.0%}", f"{fmean(line['validation_recall'] for line in later):.3f}", spread]
