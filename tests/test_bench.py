import json
import multiprocessing
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from agents import bench
from agents.bench import MEASUREMENTS, Case
from agents.cli import main
from agents.timing import Goal, Row, interleaved, median_and_spread, stopwatch
from segment_env.errors import UserError

TINY = Case("nano", 2, 128, pairs=2, precision="float32")


def test_median_and_spread_on_a_literal() -> None:
    assert median_and_spread([1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9, 9.0]) == (1.5, 1.1, 1.9)
    assert median_and_spread([2.0]) == (2.0, 2.0, 2.0)


def test_pairs_swap_their_order_and_warm_up_does_not_count() -> None:
    order: list[str] = []
    readings = {"a": iter([100.0, 1.0, 2.0, 3.0]), "b": iter([100.0, 10.0, 20.0, 30.0])}

    def measure(name: str) -> float:
        order.append(name)
        return next(readings[name])

    pairs = interleaved(lambda: measure("a"), lambda: measure("b"), pairs=3)
    assert pairs == [(1.0, 10.0), (2.0, 20.0), (3.0, 30.0)]
    assert "".join(order) == "ab" + "ab" + "ba" + "ab"


def test_a_load_that_grows_does_not_move_the_ratio() -> None:
    slowness = iter([1.02**i for i in range(42)])
    pairs = interleaved(lambda: 3.0 * next(slowness), lambda: 2.0 * next(slowness), pairs=20)
    assert statistics.median(first / second for first, second in pairs) == pytest.approx(1.5, rel=0.001)


def test_stopwatch_times_one_call(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    clock = iter([5.0, 7.5])
    calls: list[int] = []
    monkeypatch.setattr("agents.timing.time.perf_counter", lambda: next(clock))
    assert stopwatch(lambda: calls.append(1), device)() == 2.5
    assert calls == [1]


@pytest.mark.parametrize(
    ("goal", "ratio", "met", "text"),
    [
        (Goal(high=1.05), 1.05, True, "at most 1.05"),
        (Goal(high=1.05), 1.0501, False, "at most 1.05"),
        (Goal(low=0.5), 0.5, True, "at least 0.5"),
        (Goal(low=0.5), 0.49, False, "at least 0.5"),
        (Goal(low=0.8, high=1.2), 1.0, True, "0.8 to 1.2"),
        (Goal(low=0.8, high=1.2), 0.79, False, "0.8 to 1.2"),
        (Goal(low=0.8, high=1.2), 1.21, False, "0.8 to 1.2"),
    ],
)
def test_goals(goal: Goal, ratio: float, met: bool, text: str) -> None:
    assert goal.met(ratio) is met
    assert str(goal) == text


@pytest.mark.parametrize("agent", [("agent=paper",), ("agent=paired", "agent.samples_share=1.0"), ("agent=default",), ("agent=paired",)])
def test_learned_and_given_updates_cut_at_the_same_places(agent: tuple[str, ...]) -> None:
    (row,) = bench.update_cost(Case("nano", 4, 128, pairs=1, agent=agent))  # raises where they do not
    assert len(row.ratios) == 1 and row.ratios[0] > 0
    assert row.setting["samples"] == (2 if "agent=paired" in agent else 1)


def test_boundaries_that_differ_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = iter([torch.zeros(2, 128, dtype=torch.bool), torch.ones(2, 128, dtype=torch.bool)])
    monkeypatch.setattr(bench, "_starts", lambda learner, batch: next(starts))
    with pytest.raises(RuntimeError, match="not the same"):
        next(bench.update_cost(TINY))


def test_memory_growth_compares_doublings(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = {128: 1000, 256: 1400, 512: 2600}  # 400 for the first 128 bytes, 1200 for the next 256

    class Pool:
        def __init__(self, *_, **__) -> None: ...

        def __enter__(self) -> "Pool":
            return self

        def __exit__(self, *_) -> None: ...

        def submit(self, function, case: Case) -> "Pool":
            self.case = case
            return self

        def result(self) -> int:
            return peaks[self.case.length]

    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1")  # restored afterwards
    monkeypatch.setattr(bench, "ProcessPoolExecutor", Pool)
    (row,) = bench.memory_growth(TINY)
    assert row.ratios == [1.5, 1.5]
    assert row.figures == {"peak_bytes_128": 1000, "peak_bytes_256": 1400, "peak_bytes_512": 2600}


def test_the_peak_of_a_longer_update_is_seen() -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:  # fresh: no other test has raised its peak
        peak = pool.submit(bench.peak_memory, Case("nano", 4, 1024, pairs=1)).result()
    assert peak > 4 * 1024 * 128 * 4  # one tensor of h at least


def test_precisions_are_measured_on_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(
        bench, "updates_in_turns", lambda learners, batches, pairs: seen.append((learners, batches)) or [(1.0, 2.0)] * pairs
    )
    (row,) = bench.precision_cost(TINY)
    (((bf16, float32), (one, other)),) = seen
    assert (bf16.precision, float32.precision) == ("bf16", "float32") and torch.equal(one.bytes, other.bytes)
    assert row.ratios == [0.5, 0.5] and row.figures == {"seconds": 1.0, "seconds_against": 2.0}


@pytest.mark.filterwarnings("default")  # torch's tracing does several things that torch warns of
def test_compilations_are_counted_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    (row,) = bench.compile_cost(replace(TINY, length=64))
    assert row.figures["compilations"] in (2, 3) and row.figures["compile_seconds"] > 0
    assert row.name.startswith(f"compiled / plain, {row.figures['compilations']} compilations in ")
    assert len(row.ratios) == 2 and min(row.ratios) > 0
    torch.compiler.reset()


def test_the_sampler_is_measured_both_ways() -> None:
    confident, chained = bench.sampler_cost(replace(TINY, length=256, agent=("agent=default", "agent.policy.n_past=5")))
    assert (confident.goal, chained.goal) == (Goal(low=8), Goal(high=1.5))
    assert len(confident.ratios) == len(chained.ratios) == 2 and min(*confident.ratios, *chained.ratios) > 0
    assert confident.figures["seconds"] > 0 and confident.setting["T"] == 256


def test_generation_is_measured_at_three_contexts() -> None:
    rows = list(bench.generation_cost(Case("nano", 1, 256, 1, "float32", ("agent=uniform",))))
    names = ["at 256 / at 16 bytes", "at 64 / at 16 bytes", *(f"anew / cached at {length} bytes" for length in (256, 64, 16))]
    assert [row.name for row in rows] == names
    assert [row.goal for row in rows] == [Goal(high=1.3), Goal(high=1.3), Goal(low=30), Goal(low=1), Goal(low=1)]
    assert all(len(row.ratios) == 1 and row.ratios[0] > 0 and row.figures["seconds"] > 0 for row in rows)


def test_every_measurement_is_paired_often_enough_to_quote() -> None:
    assert list(MEASUREMENTS) == ["update", "agents", "precision", "compile", "data", "unroll", "sampler", "generation", "flops", "memory"]
    for name in MEASUREMENTS.keys() - {"memory"}:
        assert all(case.pairs >= 20 for case in MEASUREMENTS[name][2])


def test_json_and_table_name_the_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = {name: (measure, [TINY], []) for name, (measure, _, _) in MEASUREMENTS.items() if name in ("update", "unroll")} | {
        "agents": (bench.agent_cost, [replace(TINY, agent=("agent=ppo",))], [])
    }

    def fake(case: Case) -> Iterator[Row]:
        yield Row("fake", "a / b", [1.0, 2.0, 3.0], Goal(low=4), case.setting(case.run().learner()), {"seconds": 7.0})

    monkeypatch.setattr(bench, "MEASUREMENTS", {**few, "fake": (fake, [TINY], [TINY])})
    assert main(["bench", "--quick", "--json", str(tmp_path / "bench.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert lines[0].split()[:3] == ["ratio", "10-90", "%"]
    assert lines[3].startswith("agents: ppo, 4 epochs / REINFORCE")
    assert lines[4].split() == "fake: a / b 2.000 1.200-2.800 3 at least 4 missed nano 2 x 128 1 float32".split() + [lines[4].split()[-1]]
    assert lines[5] == f"torch {torch.__version__}, {torch.get_num_threads()} CPU threads; few repetitions: not to be quoted"
    figures = json.loads((tmp_path / "bench.json").read_text())
    assert (figures["torch"], figures["threads"], figures["quick"]) == (torch.__version__, torch.get_num_threads(), True)
    assert [row["measurement"] for row in figures["rows"]] == ["update", "unroll", "agents", "fake"]
    for row in figures["rows"][:3]:
        assert row["pairs"] == len(row["ratios"]) == 2
        assert row["p10"] <= row["ratio"] <= row["p90"]
        assert row["seconds"] > 0 and row["seconds_against"] > 0
    told = {"ratio": 2.0, "p10": 1.2, "p90": 2.8, "goal": {"low": 4, "high": None}, "met": False, "seconds": 7.0}
    setting = {"size": "nano", "B": 2, "S": 2, "T": 128, "precision": "float32", "samples": 1, "agent": "agent=paper"}
    assert told.items() <= figures["rows"][3].items() and setting.items() <= figures["rows"][3].items()


def test_only_picks_one(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def fake(name: str):
        def measure(case: Case) -> Iterator[Row]:
            measured.append(name)
            return iter([])

        return measure

    monkeypatch.setattr(bench, "MEASUREMENTS", {name: (fake(name), [TINY], [TINY, TINY]) for name in MEASUREMENTS})
    bench.run(only="unroll")
    assert measured == ["unroll", "unroll"]
    bench.run(quick=True)
    assert measured[2:] == list(MEASUREMENTS)


def test_a_measurement_that_is_none_is_a_users_mistake() -> None:
    with pytest.raises(
        UserError,
        match="no measurement 'speed'; choose from update, agents, precision, compile, data, unroll, sampler, generation, flops, memory",
    ):
        bench.run(only="speed")


def test_a_file_that_cannot_be_written_is_a_users_mistake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench, "MEASUREMENTS", {})
    with pytest.raises(UserError, match="cannot write"):
        bench.run(json_path=tmp_path / "no" / "such" / "folder.json")
