"""What learned boundaries cost, as ratios of measurements that take turns within one run.

Nine measurements, each a list of cases:

- ``update``: an update with learned boundaries over one of the same byte U-Net with the same boundaries given;
- ``agents``: an update of another agent, all of its epochs, over one of REINFORCE;
- ``precision``: an update in bf16 over one in float32;
- ``compile``: an update of compiled layers over one of plain ones, and how often and how long it was compiled for that;
- ``data``: an update on batches that are read from Parquet as it goes on, over one on a batch that is there;
- ``unroll``: a rollout over the forward passes that it cannot do without;
- ``sampler``: sampling decisions that depend on past ones in passes over blocks, against a position at a time;
- ``flops``: the arithmetic of an update per second over that of large matrix products;
- ``memory``: how the peak memory of an update grows from one doubling of T to the next; 1 is linear.

Letters: S sequences, K boundary samples of a sequence, B rows, T bytes.
"""

import json
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

from agents import config
from agents.costs import update_flops
from agents.learner import Learner
from agents.sampling import settle, walk
from agents.timing import Goal, Row, interleaved, stopwatch, updates_in_turns
from agents.training import Run
from segment_env.batch import Batch
from segment_env.errors import UserError
from segment_env.streams import LocalDocuments, moby_dick
from segment_env.unroll import unroll

UPDATE, AGENTS, UNROLL, FLOPS, MEMORY = Goal(high=1.05), Goal(high=1.15), Goal(high=1.03), Goal(low=0.5), Goal(low=0.8, high=1.2)
DATA, PRECISION, COMPILED = Goal(high=1.02), Goal(high=1.0), Goal(high=1.0)
CONFIDENT, CHAINED = Goal(low=8), Goal(high=1.5)


@dataclass(frozen=True)
class Case:
    """One setting to measure. The learned agent is the configuration's; a rule that cuts where it does stands against it."""

    size: str
    rows: int  #: B
    length: int  #: T
    pairs: int
    precision: str = "bf16"
    agent: tuple[str, ...] = ("agent=paper",)  #: overrides that pick the learned agent

    def run(self, agent: Sequence[str] | None = None, *more: str) -> Run:
        """A run of this case, or of another agent in its setting, with a learning rate of 0: no work less, and no boundary moves.

        ``more`` are further overrides.
        """
        own = [f"model={self.size}", f"train.rows={self.rows}", f"data.length={self.length}", f"train.optimiser.precision={self.precision}"]
        return Run(config.load([*own, "train.optimiser.lr=0.0", *(agent or self.agent), *more]))

    def setting(self, learner: Learner) -> dict[str, Any]:
        """What the figures hold for."""
        agent = {"agent": " ".join(self.agent), "samples": max(learner.samples.counts), "device": learner.device.type}
        shape = {"B": self.rows, "S": learner.num_sequences, "T": self.length}
        return {"size": self.size, **shape, "precision": self.precision, **agent}


def run(quick: bool = False, only: str | None = None, json_path: Path | None = None) -> str:
    """Measure, write the figures to ``json_path`` if there is one: -> the table. Raises UserError on a measurement that is none."""
    if only is not None and only not in MEASUREMENTS:
        raise UserError(f"there is no measurement {only!r}; choose from {', '.join(MEASUREMENTS)}")
    machine = {"torch": torch.__version__, "threads": torch.get_num_threads(), "quick": quick}
    rows: list[dict[str, Any]] = []
    _write(json_path, machine, rows)
    for name in [only] if only else MEASUREMENTS:
        measure, few, full = MEASUREMENTS[name]
        for case in few if quick else full:
            print(f"measuring {name} of {case.size}, {case.rows} x {case.length}, {case.precision}", file=sys.stderr)
            rows += [row.result() for row in measure(case)]
            _write(json_path, machine, rows)
    return table(rows, machine)


def _write(path: Path | None, machine: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Before anything is measured, and after every case: what an interrupted run has measured is not lost."""
    if path:
        try:
            path.write_text(json.dumps({**machine, "rows": rows}, indent=1) + "\n")
        except OSError as error:
            raise UserError(f"cannot write '{path}': {error.strerror}") from error


def table(rows: Sequence[dict[str, Any]], machine: dict[str, Any]) -> str:
    """The results as aligned text, a line each."""
    head = ("", "ratio", "10-90 %", "pairs", "goal", "", "size", "B x T", "K", "precision", "on")
    lines = [head]
    for row in rows:
        ratio = (f"{row['ratio']:.3f}", f"{row['p10']:.3f}-{row['p90']:.3f}", str(row["pairs"]))
        goal = (str(Goal(**row["goal"])), "met" if row["met"] else "missed")
        shape = (row["size"], f"{row['B']} x {row['T']}", str(row["samples"]), row["precision"], row["device"])
        lines.append((f"{row['measurement']}: {row['name']}", *ratio, *goal, *shape))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    ending = "; few repetitions: not to be quoted" if machine["quick"] else ""
    return "\n".join([*text, f"torch {machine['torch']}, {machine['threads']} CPU threads{ending}"])


def update_cost(case: Case) -> Iterator[Row]:
    """Learned over given boundaries: forward, backward and AdamW step on the same bytes, cut at the same places."""
    learned = case.run()
    first = learned.learner()
    batch = _batch(learned, first)
    rate = _rollout(first, batch)["logits"][0, 1].sigmoid().item()  # of an untrained policy: everywhere the same
    samples, share = first.agent.samples, first.agent.samples_share
    second = case.run(["agent=iid", f"+agent.samples={samples}", f"+agent.samples_share={share}", f"agent.policy.rate={rate!r}"]).learner()
    pairs = updates_in_turns((first, second), (batch, batch), case.pairs)
    if not torch.equal(_starts(first, batch), _starts(second, batch)):
        raise RuntimeError("the boundaries that were compared are not the same")
    yield Row("update", "learned / given boundaries", _ratios(pairs), UPDATE, case.setting(first), _seconds(pairs))


def agent_cost(case: Case) -> Iterator[Row]:
    """Another agent over REINFORCE, both as they are shipped: K samples of the same bytes need fewer encodings of them."""
    first, second = case.run().learner(), case.run(["agent=default"]).learner()
    batches = [_batch(case.run(), learner) for learner in (first, second)]
    pairs = updates_in_turns((first, second), batches, case.pairs)
    name = case.agent[0].partition("=")[2]
    yield Row("agents", f"{name}, {first.agent.epochs} epochs / REINFORCE", _ratios(pairs), AGENTS, case.setting(first), _seconds(pairs))


def precision_cost(case: Case) -> Iterator[Row]:
    """bf16 over float32, on the same bytes."""
    runs = [replace(case, precision=precision).run() for precision in ("bf16", "float32")]
    learners = [run.learner() for run in runs]
    batches = [_batch(run, learner) for run, learner in zip(runs, learners, strict=True)]
    pairs = updates_in_turns(learners, batches, case.pairs)
    yield Row("precision", "bf16 / float32", _ratios(pairs), PRECISION, case.setting(learners[0]), _seconds(pairs))


def compile_cost(case: Case) -> Iterator[Row]:
    """Compiled over plain layers, on the same bytes, after updates on several numbers of tokens; nothing is taken from a cache."""
    run = case.run(None, "train.compile=true")
    compiled, plain = run.learner(), case.run().learner()
    batches = run.batches(compiled)
    seconds = []
    torch.compiler.reset()
    with fresh_cache():
        before = counters["stats"]["unique_graphs"]
        for _ in range(_LENGTHS):
            batch = next(batches).to(run.device)
            seconds.append(stopwatch(partial(compiled.update, batch), run.device)())
        graphs = counters["stats"]["unique_graphs"] - before
        pairs = updates_in_turns((compiled, plain), (batch, batch), case.pairs)
    waited = sum(seconds) - _LENGTHS * statistics.median(first for first, _ in pairs)
    figures = {**_seconds(pairs), "compile_seconds": waited, "compilations": graphs, "first_update_seconds": seconds[0]}
    name = f"compiled / plain, {graphs} compilations in {waited:.0f} s"
    yield Row("compile", name, _ratios(pairs), COMPILED, case.setting(compiled), figures)


def data_cost(case: Case) -> Iterator[Row]:
    """Streamed over given bytes: cut, shuffled and packed by a thread that shares the cores, while the update runs."""
    run = case.run()
    learner = run.learner()
    given = _batch(run, learner)
    with tempfile.TemporaryDirectory() as folder:
        _write_shards(Path(folder))
        documents = LocalDocuments(folder, "parquet", fractions=(1.0, 0.0, 0.0))
        batches = documents.batches(learner.num_sequences, case.length, seed=0)
        pairs = interleaved(
            stopwatch(lambda: learner.update(next(batches)), learner.device),
            stopwatch(lambda: learner.update(given), learner.device),
            case.pairs,
            warm_up=3,
        )
        yield Row("data", "streamed / given bytes", _ratios(pairs), DATA, case.setting(learner), _seconds(pairs))


def _write_shards(folder: Path, count: int = 4) -> None:
    """The embedded text as Parquet shards, a paragraph a row."""
    import pyarrow as pa
    import pyarrow.parquet

    paragraphs = moby_dick().data.split(b"\n\n")
    for shard in range(count):
        table = pa.table({"text": pa.array(paragraphs[shard::count], pa.binary())})
        pyarrow.parquet.write_table(table, folder / f"{shard}.parquet")


@torch.no_grad()
def unroll_cost(case: Case) -> Iterator[Row]:
    """A rollout over encoding, early head and decoding of the same boundaries, without gradients."""
    run = case.run()
    model, learner = run.model, run.learner()
    batch, samples = _batch(run, learner), learner.samples
    starts = _starts(learner, batch)

    def bare() -> None:
        with _precision(learner):
            h = model.encode(batch.bytes)[:, :-1]
            model.early_log_p(h).gather(-1, batch.bytes[..., None])
            model.nll(samples.expand(h), starts, samples.expand(batch.bytes))

    pairs = interleaved(stopwatch(lambda: _rollout(learner, batch), run.device), stopwatch(bare, run.device), case.pairs, warm_up=3)
    yield Row("unroll", "unroll / bare forward", _ratios(pairs), UNROLL, case.setting(learner), _seconds(pairs))


@torch.no_grad()
def sampler_cost(case: Case) -> Iterator[Row]:
    """Sampling of confident decisions, of scores with a spread of 4 that a past one moves by 1; and of a stride of 5, one long chain."""
    run = case.run()
    learner = run.learner()
    h = run.model.encode(_batch(run, learner).bytes)[:, :-1].float()
    draw = torch.Generator().manual_seed(0)
    spread = torch.tensor([4.0, *[1.0] * learner.agent.policy.n_past], device=h.device)
    scores = h @ torch.randn(h.shape[-1], len(spread), generator=draw).to(h.device)
    scores = (scores - scores.mean((0, 1))) / scores.std((0, 1)) * spread
    threshold = torch.rand(h.shape[:2], generator=draw).to(h.device).logit() + 1.4  # a rate of about 0.2 if scores were 0
    chain = torch.zeros_like(scores)
    chain[..., 0], chain[..., 1:5] = 30.0, -60.0

    def pairs(given: torch.Tensor, times: int) -> list[tuple[float, float]]:  # times: so that both sides are measured about as long
        loop = stopwatch(lambda: walk(given, threshold), run.device)
        passes = stopwatch(lambda: [settle(given, threshold) for _ in range(times)], run.device)
        return interleaved(loop, lambda: passes() / times, case.pairs)

    setting = case.setting(learner)
    taken = pairs(scores, 8)
    yield Row("sampler", "confident, loop / passes", _ratios(taken), CONFIDENT, setting, _seconds(taken))
    taken = [(passes, loop) for loop, passes in pairs(chain, 1)]
    yield Row("sampler", "stride, passes / loop", _ratios(taken), CHAINED, setting, _seconds(taken))


def achieved_flops(case: Case) -> Iterator[Row]:
    """Operations of an update per second over those of a square matrix product of its dtype, the best of several."""
    run = case.run()
    learner = run.learner()
    batch = _batch(run, learner)
    starts = _starts(learner, batch)
    samples = learner.samples.num_rows / learner.num_sequences
    work = case.rows * case.length * update_flops(run, starts.float().mean().item(), samples)
    side = 8192 if run.device.type == "cuda" else 2048
    a, b = torch.randn(2, side, side, dtype=torch.bfloat16 if case.precision == "bf16" else torch.float32, device=run.device)
    update, product = stopwatch(lambda: learner.update(batch), run.device), stopwatch(lambda: a @ b, run.device)
    pairs = interleaved(lambda: work / update(), lambda: 2 * side**3 / min(product() for _ in range(8)), case.pairs)
    achieved, peak = (statistics.median(column) / 1e9 for column in zip(*pairs, strict=True))
    figures = {"achieved_gflops": achieved, "peak_gflops": peak}
    yield Row("flops", "achieved / matrix product", _ratios(pairs), FLOPS, case.setting(learner), figures)


def memory_growth(case: Case) -> Iterator[Row]:
    """Bytes of memory per byte of text between 2 T and 4 T over that between T and 2 T, each T in a process of its own."""
    # glibc gives tensors above this back when they are freed; by default it keeps and fragments them, which added a fifth at T = 8192
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(1 << 20))  # for the processes to come
    lengths = [case.length, 2 * case.length, 4 * case.length]
    ratios, peaks = [], []
    for _ in range(case.pairs):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
            peaks.append([pool.submit(peak_memory, replace(case, length=length)).result() for length in lengths])
        lower, upper = (more - less for less, more in pairwise(peaks[-1]))
        ratios.append(upper / 2 / lower)
    figures = {f"peak_bytes_{length}": statistics.median(column) for length, column in zip(lengths, zip(*peaks, strict=True), strict=True)}
    setting = case.setting(case.run().learner())
    yield Row("memory", f"growth from T = {lengths[1]} / from T = {lengths[0]}", ratios, MEMORY, setting, figures)


def peak_memory(case: Case) -> int:
    """Peak of an update over that of one on 64 bytes. The process has to be fresh: what it allocated before would count."""
    run = case.run()
    learner = run.learner()
    batch = _batch(run, learner)
    small = replace(batch, bytes=batch.bytes[:, :64], valid=batch.valid[:, :64])
    learner.update(small)
    before = _peak(run.device)
    learner.update(batch)
    return _peak(run.device) - before


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        status = Path("/proc/self/status").read_text()  # not getrusage: on Linux its peak is inherited from the parent process
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) << 10
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _batch(run: Run, learner: Learner) -> Batch:
    return next(run.batches(learner)).to(run.device)


def _precision(learner: Learner) -> torch.autocast:
    return torch.autocast(learner.device.type, torch.bfloat16, enabled=learner.precision == "bf16")


@torch.no_grad()
def _rollout(learner: Learner, batch: Batch) -> TensorDict:
    with _precision(learner):
        return unroll(learner.model, learner.agent.policy, batch, learner.samples, soft_cap=learner.agent.soft_cap)[0]


def _starts(learner: Learner, batch: Batch) -> torch.Tensor:
    return _rollout(learner, batch)["action"].bool()


def _ratios(pairs: Sequence[tuple[float, float]]) -> list[float]:
    return [first / second for first, second in pairs]


def _seconds(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    first, second = (statistics.median(column) for column in zip(*pairs, strict=True))
    return {"seconds": first, "seconds_against": second}


_DEFAULT = ("agent=default",)
_PAIRED = ("agent=paired", "agent.samples_share=1.0")  # K = 2 everywhere
_PAST = ("agent=default", "agent.policy.n_past=7")
_SMALL = Case("nano", 4, 256, pairs=3)
_LENGTHS = 6  #: batches that compiled layers see before they are timed

#: name -> how a case is measured, the cases of ``--quick``, all cases
MEASUREMENTS: dict[str, tuple[Callable[[Case], Iterator[Row]], list[Case], list[Case]]] = {
    "update": (
        update_cost,
        [_SMALL, replace(_SMALL, agent=_PAIRED)],
        [
            *(Case("nano", 16, 512, 40, precision, agent) for precision in ("bf16", "float32") for agent in (("agent=paper",), _PAIRED)),
            *(Case("18M", 4, 1024, 20, "bf16", agent) for agent in (("agent=paper",), _PAIRED)),
        ],
    ),
    "agents": (
        agent_cost,
        [replace(_SMALL, agent=("agent=ppo",))],
        [Case("nano", 16, 512, 40, agent=(f"agent={name}",)) for name in ("a2c", "ppo", "ppo_kl", "grpo", "rloo")],
    ),
    "precision": (precision_cost, [_SMALL], [Case("nano", 16, 512, 20, agent=_DEFAULT)]),
    "compile": (
        compile_cost,
        [replace(_SMALL, precision="float32")],
        [Case("nano", 16, 512, 20, precision, _DEFAULT) for precision in ("float32", "bf16")],
    ),
    "data": (data_cost, [_SMALL], [Case("nano", 16, 512, 40, precision) for precision in ("bf16", "float32")]),
    "unroll": (
        unroll_cost,
        [_SMALL, replace(_SMALL, agent=_PAIRED)],
        [
            *(Case("nano", 16, 512, 60, precision, agent) for precision in ("bf16", "float32") for agent in (("agent=paper",), _PAIRED)),
            Case("18M", 4, 1024, 20),
        ],
    ),
    "sampler": (sampler_cost, [replace(_SMALL, agent=_PAST)], [Case("nano", 32, 4096, 40, "float32", _PAST)]),
    "flops": (achieved_flops, [_SMALL], [Case("18M", 4, 2048, 20, precision) for precision in ("float32", "bf16")]),
    "memory": (memory_growth, [replace(_SMALL, pairs=1)], [Case("18M", 2, 2048, 2, "float32")]),
}
