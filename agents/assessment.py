"""The evaluation program: figures of a run on whole documents, under one draw of boundaries, a threshold, and many draws."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from agents import config
from agents.calibration import shifted_logits
from agents.data import Source, held_out, reference_starts
from agents.evaluation import Tally, tally, whole
from agents.training import Run
from agents.windows import Windows, windows
from segment_env.errors import UserError
from segment_env.streams import Corpus, Documents, whitespace_starts
from segment_env.streams.shards import find, open_files

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_TABLES = {".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", ".gz": "jsonl"}  # a file of another suffix is one text


@dataclass(frozen=True)
class HeldOut:
    """What is evaluated on."""

    name: str
    split: str | None  #: None: all there is
    documents: Iterable[bytes] | None  #: None: sequences of a generator
    source: Source | None  #: None: files that were named
    reference: Callable[[Tensor], Tensor | None]  #: starts that boundaries are compared with

    def windows(self, run: Run, rows: int, seed: int, stride: int | None) -> Iterator[Windows]:
        """Windows of ``run.length`` bytes, ``rows`` to a batch; of a generator every sequence is a document."""
        if self.documents is not None:
            return windows(self.documents, run.length, rows, seed, stride)
        if stride is not None:
            raise UserError("sequences of a generator are single crops: they take no stride")
        assert self.source is not None and self.split is not None
        return map(whole, held_out(self.source, self.split, run.length, rows, seed=seed))


def find_data(run: Run, data: Sequence[str] = (), split: str | None = None) -> HeldOut:
    """What to evaluate ``run`` on: a split (default: test) of its own data, or of other ``data``.

    ``data`` is a path, or overrides of the configuration as in training (``data=jsonl data.source.path=...``). Of a path all is read:
    a text file is one document, a folder holds a text file a document, JSON lines and Parquet a row of the column "text" each.
    Raises UserError where there is nothing to read, and on a split of a path.
    """
    if len(data) == 1 and ("=" not in data[0] or Path(data[0]).exists()):
        if split is not None:
            raise UserError(f"'{data[0]}' is read whole: leave out --split, or give data=files data.source.path={data[0]}")
        return HeldOut(Path(data[0]).name, None, _Documents(Path(data[0])), None, whitespace_starts)
    source: Source = config.build(config.load(data)["data"]["source"]) if data else run.source
    split = split or "test"
    name = getattr(source, "name", type(source).__name__)
    documents: Iterable[bytes] | None = None
    if isinstance(source, Corpus):
        documents = [source.split(split).numpy().tobytes()]
    elif isinstance(source, Documents):
        documents = source.held_out_documents(split)
    return HeldOut(name, split, documents, source, partial(reference_starts, source))


class _Documents:
    """Documents of a file or a folder, read anew whenever they are gone through."""

    def __init__(self, path: Path):
        kind = _TABLES.get(path.suffix.lower(), "text") if path.is_file() else "text"
        self._shards = open_files(find(path, kind), kind, "text")

    def __iter__(self) -> Iterator[bytes]:
        return (document for shard in range(len(self._shards)) for document in self._shards.read(shard))


def assess(
    run: Run,
    split: str | None = None,
    data: Sequence[str] = (),
    seed: int = 0,
    rate: float | None = None,
    draws: int = 1,
    stride: int | None = None,
) -> dict[str, Any]:
    """Figures of a run on whole documents: see :func:`find_data` and ``agents.windows.windows`` for ``data``, ``split`` and ``stride``.

    At the top those of one draw of boundaries. ``thresholded``: the same where boundaries stand where P(start) is above a threshold,
    an offset of the logits calibrated on the run's validation bytes to ``rate``, by default the run's target; None where boundaries
    are no random variables. ``draws``, for more than one: see ``agents.evaluation.Tally.many_draws``. With a ``rate`` the drawn
    boundaries too are calibrated to it. Raises UserError on fewer draws than 1.
    """
    if draws < 1:
        raise UserError(f"the number of draws must be at least 1, got {draws}")
    run.agent.eval()
    found, policy = find_data(run, data, split), run.agent.policy

    def counted(offset: float | None, draws: int = 1, thresholded: bool = False) -> Tally:
        parts = found.windows(run, max(run.train["rows"] // draws, 1), seed, stride)
        with nullcontext() if offset is None else shifted_logits(policy, offset):
            return tally(run.model, policy, parts, found.reference, run.device, run.agent.price, draws, thresholded)

    offset = None if rate is None else run.offset(rate, seed)
    drawn = counted(offset, draws)
    figures = {"data": found.name, "split": found.split, **_figures(run, drawn, offset, rate)}
    figures["thresholded"] = None
    target = run.settings.get("target") if rate is None else rate
    if drawn.sampled and hasattr(policy, "offset") and target is not None:
        threshold = run.offset(target, seed, thresholded=True)
        figures["thresholded"] = _figures(run, counted(threshold, thresholded=True), threshold, target)
    if draws > 1:
        figures["draws"] = drawn.many_draws()
    return figures


def _figures(run: Run, counted: Tally, offset: float | None, rate: float | None) -> dict[str, Any]:
    figures = counted.figures()
    num_bytes = figures["num_bytes"]
    figures["bits_per_byte_standard_error"] = counted.standard_error(counted.nats[:, 0])
    figures["num_documents"] = len(counted.num_bytes)
    figures["segment_length_quantiles"] = dict(zip(map(str, QUANTILES), counted.totals.length_quantiles(*QUANTILES), strict=True))
    figures["flops_per_byte"] = None
    if hasattr(run.model, "flops_per_byte"):
        mean_length = max(round(counted.decoded / counted.num_windows), 1)
        flops = run.model.flops_per_byte(counted.tokens / counted.decoded, mean_length)
        figures["flops_per_byte"] = flops * counted.decoded / num_bytes
    if offset is not None:
        figures |= {"boundaries": f"{figures['boundaries']}, calibrated to {rate:g} on validation bytes", "offset": offset}
    return figures
