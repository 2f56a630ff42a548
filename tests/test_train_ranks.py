"""The training program on two ranks: streamed documents, stops and resumes, mistakes, and as torchrun starts it."""

import io
import itertools
import json
import os
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path

import gloo
import pyarrow as pa
import pyarrow.parquet
import pytest
from safetensors.torch import load_file

from agents import checkpoint, cli, config, ranks, training
from segment_env.errors import UserError

SMALL = ["data.length=16", "train.rows=4", f"train.bytes={4 * 16 * 12}", "train.checkpoint_every=3", "train.validations=2"]
SMALL += ["train.validation_bytes=64", "train.device=cpu", "train.optimiser.precision=float32", "train.log_every=2", "train.keep=9"]


def write(folder: Path) -> None:
    """Three Parquet shards, and beside them a text."""
    folder.mkdir()
    (folder.parent / "text.txt").write_text("Some years ago, never mind how long precisely. " * 200)
    for i in range(3):
        text = [f"{i} {j} " + "Call me Ishmael. "[: 3 + j % 14] * (j % 5 + 1) for j in range(60)]
        pyarrow.parquet.write_table(pa.table({"text": text}), folder / f"{i}.parquet")


def _corpus(folder: Path) -> list[str]:
    return ["data=files", f"data.source.path={folder / 'text.txt'}", *SMALL]


def program(*arguments, signalled: tuple[int, int] | None = None, broken: int | None = None) -> tuple[int, str]:
    """The command on this rank: -> exit status, and what it says on standard error but for the progress bar.

    ``signalled``, at which update SIGTERM comes on which rank; ``broken``, on which rank the third batch cannot be read.
    """
    update, batches, made, said = training.Learner.update, training.Run.batches, itertools.count(1), io.StringIO()

    def noticed(learner, batch):
        if signalled == (next(made), ranks.index()):
            signal.raise_signal(signal.SIGTERM)
        return update(learner, batch)

    class Broken:
        def __init__(self, whole):
            self.whole, self.state_dict, self.taken = whole, whole.state_dict, 0

        def __next__(self):
            self.taken += 1
            if self.taken == 3:
                raise UserError("the third batch is lost")
            return next(self.whole)

    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)  # each world its own, as the ranks leave the last one one by one
    training.Learner.update = noticed
    if broken is not None and broken == int(os.environ["RANK"]):
        training.Run.batches = lambda run, learner: Broken(batches(run, learner))
    try:
        with redirect_stderr(said), redirect_stdout(io.StringIO()):
            status = cli.main([str(each) for each in arguments])
    finally:
        training.Learner.update, training.Run.batches = update, batches
    return status, "\n".join(line for line in said.getvalue().splitlines() if line.startswith("segment-env"))


def programs(folder: Path):
    shards = ["data=parquet", f"data.source.path={folder / 'shards'}", "data.source.workers=2", "data.source.buffer=16"]
    streamed, corpus = [*shards, *SMALL], _corpus(folder)
    train = partial(program, "train")
    return {
        "whole": train(*streamed, "--run", folder / "whole"),
        "stopped": train(*streamed, "--run", folder / "stopped", signalled=(4, 1)),
        "again": train("--resume", folder / "stopped", signalled=(4, 0)),
        "to the end": train("--resume", folder / "stopped"),
        "corpus": train(*corpus, "--run", folder / "corpus"),
        "broken": train(*corpus, "--run", folder / "broken", broken=1),
        "odd rows": train(*corpus, "train.rows=3", "--run", folder / "odd"),
        "odd groups": train(*corpus, "agent=rloo", "train.rows=6", "--run", folder / "odd"),
        "other statistics": train(*corpus, "train.statistics=some", "--run", folder / "odd"),
        "no place": train(*corpus, "--run", folder / "shards" / "0.parquet"),
    }


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The folder, and what each command came to on each of two ranks."""
    folder = tmp_path_factory.mktemp("programs")
    write(folder / "shards")
    return folder, gloo.run(partial(programs, folder), folder, started=False)


def lines(run: Path) -> list[dict]:
    """Of its journal, without the time."""
    return [
        {key: value for key, value in json.loads(line).items() if key != "seconds"}
        for line in (run / "metrics.jsonl").read_text().splitlines()
    ]


def equal(one: Path, other: Path) -> bool:
    mine, theirs = (load_file(run / "checkpoints/00000012/model.safetensors") for run in (one, other))
    return all(mine[key].equal(theirs[key]) for key in mine)


def test_stopped_on_any_rank_and_resumed_twice_ends_as_undisturbed(two) -> None:
    """Streamed documents, two workers on each of two ranks; parameters to the bit, and every line of the journal once."""
    folder, found = two
    for index, rank in enumerate(found):
        assert rank["whole"] == (0, "") and rank["to the end"] == (0, "")
        for stopped, update in (("stopped", 4), ("again", 8)):
            status, said = rank[stopped]
            assert status == 128 + signal.SIGTERM
            assert said.startswith(f"segment-env: stopped by SIGTERM after update {update} of 12; go on with") if index == 0 else not said
    assert equal(folder / "whole", folder / "stopped") and lines(folder / "whole") == lines(folder / "stopped")
    assert [line["update"] for line in lines(folder / "whole") if "rate" in line] == [2, 4, 6, 8, 10, 12]


def test_ranks_read_documents_of_their_own(two) -> None:
    folder, _ = two
    state = json.loads((folder / "whole/checkpoints/00000012/state.json").read_bytes())["data"]
    other = json.loads((folder / "whole/checkpoints/00000012/rank1.json").read_bytes())["data"]
    assert state["share"] == [0, 2, 2] and other["share"] == [1, 2, 2] and state["batches"] == other["batches"] == 12


def test_two_ranks_make_the_run_of_one(two, tmp_path) -> None:
    """In float32: the same figures to rounding, with bytes that are functions of the index."""
    folder, found = two
    assert all(rank["corpus"] == (0, "") for rank in found)
    assert cli.main(["train", *_corpus(folder), "--run", str(tmp_path / "one")]) == 0
    for one, other in zip(lines(tmp_path / "one"), lines(folder / "corpus"), strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            if key in ("policy_signal", "policy_power"):
                continue  # of the rows of the first rank
            assert value == (pytest.approx(other[key], rel=1e-3, abs=1e-3) if isinstance(value, float) else other[key]), key


def test_another_number_of_ranks_goes_on_where_bytes_are_functions_of_the_index(two, tmp_path) -> None:
    folder, _ = two
    run = training.Run(config.read(folder / "corpus/config.yaml"))
    learner = run.learner()
    data = run.batches(learner)
    state = checkpoint.restore(folder / "corpus/checkpoints/00000006", learner, data, run.settings)
    assert state.update == 6 and data.state_dict() == {"batches": 6} and next(data).sequence.tolist() == [24, 25, 26, 27]


def test_another_number_of_ranks_is_refused_where_they_share_documents(two, capsys) -> None:
    folder, _ = two
    assert cli.main(["train", "--resume", str(folder / "whole/checkpoints/00000006")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "is that of rank 0 of 2 with 2 workers, not of rank 0 of 1 with 2: use as many ranks" in line


def test_a_mistake_on_one_rank_ends_all_with_one_line(two) -> None:
    folder, (first, second) = two
    says = {
        "broken": "the third batch is lost",
        "odd rows": "train.rows=3 do not divide over 2 ranks: choose a multiple of 2",
        "odd groups": "agent.samples=2 boundary samples per sequence do not fill a share agent.samples_share=1.0 of 3 rows",
        "other statistics": "train.statistics must be one of all, rank, got 'some'",
        "no place": "cannot write the run folder",
    }
    for name, text in says.items():
        assert first[name][0] == second[name][0] == 2
        assert first[name][1].startswith("segment-env: " + text) and "\n" not in first[name][1] and not second[name][1]
    assert not (folder / "odd").exists()


@pytest.mark.slow
def test_torchrun(tmp_path) -> None:
    """The real launcher: two processes train, go on from a checkpoint, and end as undisturbed; one line for a mistake."""
    torchrun = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "--"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}

    def run(*arguments) -> subprocess.CompletedProcess:
        return subprocess.run([*torchrun, "agents.cli", "train", *arguments], env=environment, capture_output=True, text=True, timeout=280)

    write(tmp_path / "shards")
    options = [*_corpus(tmp_path), "train.log_every=1"]
    for name in ("whole", "stopped"):
        done = run(*options, "--run", str(tmp_path / name))
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("held-out bits per byte") == 1 and "Warning" not in done.stderr
    checkpoint.forget_after(tmp_path / "stopped", 6)
    done = run("--resume", str(tmp_path / "stopped"))
    assert done.returncode == 0 and equal(tmp_path / "whole", tmp_path / "stopped")
    assert lines(tmp_path / "whole") == lines(tmp_path / "stopped")
    mistaken = run(*options, "train.rows=5", "--run", str(tmp_path / "odd"))
    assert mistaken.returncode == 1 and mistaken.stderr.count("segment-env: train.rows=5 do not divide over 2 ranks") == 1
