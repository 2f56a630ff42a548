"""The report: one page about one run or several, that can be sent around.

What it is made of: figures on held-out bytes (``Run.evaluate``), the segments there (``anatomy``), decisions about the same held-out
text at several checkpoints (``heat_map``), and the curves of training (``curves``). A template puts it on a page.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from agents import checkpoint, config, curves, pages, training
from agents.anatomy import Anatomy, examine
from agents.data import held_out, identity, train_stream
from agents.escaping import printable
from agents.heat_map import Cell, cells, decide_batch, excerpt
from segment_env.errors import UserError
from segment_env.scorer import note

MAPS = 5  #: checkpoints of a run at most that have a heat map, besides the one before training
EXCERPT = 280  #: bytes of them
FREQUENT = 24  #: segments that are listed
LONGEST = 20  #: bytes of segments that have a bar of their own; longer ones share one


@dataclass(frozen=True)
class Story:
    """All that a page says of one run."""

    name: str
    folder: Path
    settings: dict[str, Any]
    command: str | None  #: that began it, where its configuration says so
    update: int  #: of the checkpoint that figures are of
    progress: dict[str, int]  #: updates and bytes up to it
    figures: dict[str, Any]
    data: dict[str, str]
    anatomy: Anatomy
    maps: list[tuple[dict[str, int], list[Cell]]]  #: progress before training and at checkpoints, and the held-out text there
    checkpoints: int  #: that there are, of which those are a choice
    notes: list[str]  #: what is missing or was left out
    metrics: list[dict[str, Any]]


def run(paths: Sequence[Path], out: Path | None, picture: Path | None, max_bytes: int, seed: int, command: str) -> Path:
    """Write the report of the runs, or checkpoints, at ``paths``: -> its file, by default ``report.html`` in the first run's folder.

    Figures and segments are of the first ``max_bytes`` of the test split, under one draw of boundaries by ``seed``; heat maps of
    validation text. With a ``picture`` the heat maps of the first run are drawn there too, as PNG. ``command`` is what asked for it.
    Raises UserError on what is no run, a run without a whole checkpoint, the same run twice, and a file that cannot be written.
    """
    folders = [checkpoint.run_of(path) for path in paths]
    if len({path.resolve() for path in paths}) < len(paths):
        raise UserError("the same run is given twice: a report compares different ones")
    out = out or folders[0] / "report.html"
    pages.check_writable(out, picture)
    stories = []
    for path, name in zip(paths, _names(paths, folders), strict=True):
        print(f"reading {name}", file=sys.stderr)
        stories.append(tell(path, name, max_bytes, seed))
    pages.write(out, page(stories, command))
    if picture:
        from agents import pictures, plots

        maps = [(_heading(progress), made) for progress, made in stories[0].maps]
        pages.write(picture, plots.png(pictures.draw(maps)))
    return out


def tell(path: Path, name: str, max_bytes: int, seed: int) -> Story:
    """Measure a run as it is at its newest checkpoint, or at the one that ``path`` is, and look at earlier ones."""
    folder = checkpoint.run_of(path)
    opened = training.open_run(path)
    text = train_stream(opened.source).unit == "byte"
    newest = path if path != folder else checkpoint.find(path)
    assert newest  # or there would have been nothing to open
    figures = opened.evaluate("test", max_bytes, seed)
    batches = held_out(opened.source, "test", opened.length, opened.train["rows"], max_bytes, seed)
    anatomy = examine(opened.model, opened.agent.policy, batches, text, opened.device)
    metrics, broken = curves.read_metrics(folder)
    metrics = [line for line in metrics if line["update"] <= int(newest.name)]
    found = [each for each in checkpoint.every(folder) if int(each.name) <= int(newest.name)]
    damaged = {each.name: damage for each in found if (damage := checkpoint.damage_of(each))}
    whole = [each for each in found if each.name not in damaged]
    notes = [f"checkpoint {int(each)} is passed over: {damage}" for each, damage in damaged.items()]
    if broken:
        notes.append(f"{broken} broken lines of metrics.jsonl are left out" if broken > 1 else "a broken line of metrics.jsonl is left out")
    if not metrics:
        notes.append("it has no metrics.jsonl to draw curves from")
    if remark := note(opened.agent.policy):
        notes.append(remark)
    return Story(
        name=name,
        folder=folder,
        settings=opened.settings,
        command=_command(folder),
        update=int(newest.name),
        progress=opened.counts(int(newest.name)),
        figures=figures,
        data=identity(opened.source),
        anatomy=anatomy,
        maps=_maps(opened, _spread(whole), text, seed),
        checkpoints=len(whole),
        notes=notes,
        metrics=metrics,
    )


def page(stories: Sequence[Story], command: str) -> str:
    """The report as HTML."""
    same_data = len({tuple(story.data.items()) for story in stories}) == 1
    return pages.render(
        "report.html",
        stories=stories,
        figures=_table(stories),
        same_data=same_data,
        charts=curves.charts([(story.name, story.metrics) for story in stories]),
        frame=curves,
        histograms=_histograms(stories),
        differing=_differing(stories),
        frequent=FREQUENT,
        heading=_heading,
        shown=_shown,
        rates=_rates,
        dump=lambda settings: yaml.safe_dump(settings, sort_keys=False, allow_unicode=True),
        command=command,
    )


def _names(paths: Sequence[Path], folders: Sequence[Path]) -> list[str]:
    """Of the folders, as short as tells them apart."""
    short = [folder.resolve().name for folder in folders]
    return [name if short.count(name) == 1 else str(path) for name, path in zip(short, paths, strict=True)]


def _command(folder: Path) -> str | None:
    first, *_ = (folder / "config.yaml").read_text(encoding="utf-8").split("\n", 1)
    return first.removeprefix("# ") if first.startswith("# ") else None


def _spread(found: Sequence[Path]) -> list[Path]:
    """At most MAPS checkpoints, the first and the last among them, and those between by the logarithm of their update: a run changes
    most when it is young.
    """
    if len(found) <= MAPS:
        return list(found)
    ends = math.log(int(found[0].name)), math.log(int(found[-1].name))
    left, chosen = list(found), []
    for n in range(MAPS):
        wanted = ends[0] + (ends[1] - ends[0]) * n / (MAPS - 1)
        chosen.append(min(left, key=lambda each: abs(math.log(int(each.name)) - wanted)))
        left.remove(chosen[-1])
    return sorted(chosen)


def _maps(opened: training.Run, chosen: Sequence[Path], text: bool, seed: int) -> list[tuple[dict[str, int], list[Cell]]]:
    """The same held-out text before training and at ``chosen`` checkpoints, decided as part of the crop that it stands in; where
    all are the same, as a rule's are, the last alone.
    """
    fresh = training.Run(opened.settings)
    batch = next(held_out(fresh.source, "validation", fresh.length, 1, seed=seed))
    maps = []
    for folder in (None, *chosen):
        if folder:
            checkpoint.load(folder, fresh.model, fresh.agent)
        fresh.agent.eval()
        decided = decide_batch(fresh.model, fresh.agent.policy, batch, fresh.device)
        part = excerpt(decided.data, EXCERPT) if text else slice(0, EXCERPT // 2)
        maps.append((fresh.counts(int(folder.name) if folder else 0), cells(decided[part], text)))
    return maps if any(made != maps[0][1] for _, made in maps) else maps[-1:]


def _heading(progress: dict[str, int]) -> str:
    if not progress["update"]:
        return "before training"
    return f"update {progress['update']:,}, {progress['bytes_decoded'] / 1e6:.3g} MB decoded"


def _table(stories: Sequence[Story]) -> list[tuple[str, str, list[str]]]:
    """Rows of the comparison: name, explanation, and a value for every run."""

    def number(key: str, form: str) -> list[str]:
        return ["–" if math.isnan(value := story.figures[key]) else format(value, form) for story in stories]

    lengths = [f"{story.figures['segment_length_mean']:.2f} ± {story.figures['segment_length_std']:.2f}" for story in stories]
    return [
        ("bits per byte", "on test bytes, at the rate below; low is good", number("bits_per_byte", ".3f")),
        ("rate", "segments that start, per byte", number("rate", ".3f")),
        (
            "boundaries",
            "how they were drawn, and the seed of that",
            [f"{s.figures['boundaries']}, seed {s.figures['seed']}" for s in stories],
        ),
        ("recall", "of the true starts (of text, those after whitespace)", number("recall", ".3f")),
        ("precision", "of the starts", number("precision", ".3f")),
        ("segment length", "bytes, mean ± standard deviation", lengths),
        ("test bytes", "", number("num_bytes", ",")),
        ("data", "", [_data(story) for story in stories]),
        ("trained on", "bytes decoded, in updates", [f"{s.progress['bytes_decoded']:,} in {s.progress['update']:,}" for s in stories]),
        ("seed", "of data, boundaries and initialisation", [str(story.settings["seed"]) for story in stories]),
    ]


def _data(story: Story) -> str:
    name, *rest = story.data.values()
    return " ".join([name, *(value[:12] for value in rest)])


def _histograms(stories: Sequence[Story]) -> list[tuple[Story, list[tuple[str, float, float]]]]:
    """For every run, bars: a length in bytes, the share of segments, and the height over that of the run's highest bar."""
    names = [*map(str, range(1, LONGEST + 1)), f">{LONGEST}"]
    drawn = []
    for story in stories:
        lengths = story.anatomy.lengths
        longer = sum(count for length, count in lengths.items() if length > LONGEST)
        counts = [lengths[length] for length in range(1, LONGEST + 1)] + [longer]
        drawn.append((story, [(name, n / sum(counts), n / max(counts)) for name, n in zip(names, counts, strict=True)]))
    return drawn


def _differing(stories: Sequence[Story]) -> list[tuple[str, list[str]]]:
    """Keys of the configurations that are not the same in all runs, with their values."""
    every = [dict(config.leaves(story.settings)) for story in stories]
    keys = dict.fromkeys(key for each in every for key in each)
    values = [(key, [each.get(key, "–") for each in every]) for key in keys]
    return [(key, each) for key, each in values if len(set(each)) > 1]


def _shown(segment: bytes) -> str:
    """A segment in a table; its spaces show by the box around it."""
    return printable(segment.decode("utf-8", "backslashreplace"))


def _rates(anatomy: Anatomy) -> list[tuple[str, list[tuple[int, int] | None]]]:
    """Rows of the matrix of byte classes and, last, all bytes before: (starts, positions), None where there are none."""
    pairs = [
        [(int(cut), int(count)) if count else None for cut, count in zip(cuts, counts, strict=True)]
        for cuts, counts in zip(_with_sums(anatomy.cuts), _with_sums(anatomy.choices), strict=True)
    ]
    return list(zip([*anatomy.classes, "any"], pairs, strict=True))


def _with_sums(table: Any) -> list[list[int]]:
    rows = [[*row, sum(row)] for row in table.tolist()]
    return [*rows, [sum(column) for column in zip(*rows, strict=True)]]
