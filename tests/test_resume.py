"""A run that is killed or stopped, and resumed, ends as one that was not."""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

SETTINGS = ["data.length=32", "train.rows=4", "train.bytes=7680", "train.checkpoint_every=10", "train.validations=3"]
SETTINGS += ["train.validation_bytes=256", "train.optimiser.precision=float32", "train.log_every=7", "train.device=cpu"]
SETTINGS += ["model.size={_target_:models.Size,width:16,heads:2,encoder:1,mid:1,decoder:1,window:4}"]
UPDATES = 60


def _start(*arguments):
    command = [sys.executable, "-m", "agents.cli", "train", *map(str, arguments)]
    # a shell may have told what it runs in the background to ignore Ctrl-C
    listens = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, preexec_fn=listens)


def _finish(*arguments):
    process = _start(*arguments)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err.decode()


def _signal_after_checkpoint(number, run, beyond, *arguments):
    """Start, wait for a checkpoint after ``beyond`` updates, send a signal: -> exit status, and the last line on standard error."""
    process = _start(*arguments)
    while not (found := [n for n in _checkpoints(run) if n > beyond]):
        assert process.poll() is None, process.stderr.read().decode()
        time.sleep(0.005)
    process.send_signal(number)
    _, err = process.communicate()
    assert max(found) < UPDATES
    return process.returncode, err.decode().splitlines()[-1]


def _checkpoints(run):
    return [int(folder.name) for folder in run.glob("checkpoints/*") if not folder.suffix]


def _lines(run):
    """Of ``metrics.jsonl``, without the one figure that is of the clock."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def _check_same(run, whole):
    """Every number of the last checkpoint, the checkpoints that are kept, and every line of metrics."""
    for name in ("model", "agent", "optimiser", "log"):
        expected, got = (load_file(each / f"checkpoints/{UPDATES:08d}/{name}.safetensors") for each in (whole, run))
        assert expected.keys() == got.keys()
        assert all(expected[key].equal(got[key]) for key in expected), name
    expected, got = ((each / f"checkpoints/{UPDATES:08d}/random.json").read_text() for each in (whole, run))
    assert expected == got
    assert _lines(run) == _lines(whole)


def test_killed_twice_and_resumed_ends_bit_for_bit_the_same(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    _finish(*SETTINGS, "--run", whole)
    assert _signal_after_checkpoint(signal.SIGKILL, killed, 0, *SETTINGS, "--run", killed)[0] == -signal.SIGKILL
    assert _signal_after_checkpoint(signal.SIGKILL, killed, max(_checkpoints(killed)), "--resume", killed)[0] == -signal.SIGKILL
    _finish("--resume", killed)

    _check_same(killed, whole)
    lines = _lines(killed)
    assert [line["update"] for line in lines if "bits_per_byte" in line] == [*range(7, UPDATES, 7), UPDATES]
    assert [line["update"] for line in lines if "validation_bits_per_byte" in line] == [20, 40, 60]


def test_stopped_by_signals_it_says_how_to_go_on(tmp_path):
    whole, stopped = tmp_path / "whole", tmp_path / "stop ped"
    _finish(*SETTINGS, "--run", whole)
    arguments, beyond = (*SETTINGS, "--run", stopped), 0
    for number, status in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        returned, line = _signal_after_checkpoint(number, stopped, beyond, *arguments)
        assert returned == status, line
        beyond = max(_checkpoints(stopped))
        told = (
            f"segment-env: stopped by {number.name} after update {beyond} of {UPDATES}; go on with: segment-env train --resume '{stopped}'"
        )
        assert line == told
        arguments = ("--resume", stopped)
    _finish(*arguments)
    _check_same(stopped, whole)


# --- many runs, killed at random moments: minutes ---

RUNS = 20


def _train(arguments, log):
    """In a process of its own, in which the library is imported already."""
    from agents import cli

    with Path(log).open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.exit(cli.main(["train", *map(str, arguments)]))


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_killed_at_random_moments_and_resumed_until_done(tmp_path, capsys):
    """SIGKILL anywhere in the life of a process: before the folder is there, in an update, in the middle of a checkpoint."""
    context, chance = multiprocessing.get_context("forkserver"), random.Random(0)
    context.set_forkserver_preload(["agents.cli", "agents.training", "agents.interruption", "models"])
    log = tmp_path / "log"

    def live(arguments, seconds=None):
        """Run a process, kill it after some ``seconds`` if it lives that long: -> its exit status."""
        process = context.Process(target=_train, args=(arguments, log))
        process.start()
        process.join(seconds)
        if process.exitcode is None:
            process.kill()
        process.join()
        return process.exitcode

    (tmp_path / "text").write_text("Call me Ishmael. Some years ago, never mind how long. " * 200)  # little to evaluate at the end
    settings = [*SETTINGS, "data=files", f"data.source.path={tmp_path / 'text'}"]
    whole = tmp_path / "whole"
    live([*settings, "--run", tmp_path / "warm"])  # the first pays for imports
    began = time.monotonic()
    assert live([*settings, "--run", whole]) == 0, log.read_text()
    lasts, kills, again = time.monotonic() - began, [], 0
    for n in range(RUNS):
        run, in_training = tmp_path / f"killed{n}", 0
        while True:
            begun = (run / "config.yaml").is_file()
            status = live(["--resume", run] if begun else [*settings, "--run", run], chance.uniform(0, lasts))
            newest = max(_checkpoints(run), default=0)
            if status:
                assert status == -signal.SIGKILL, log.read_text()
                kills.append(newest)
                in_training += newest < UPDATES
            if newest == UPDATES and not in_training:  # it was trained before it was killed, and would show nothing
                again += 1
                run = tmp_path / f"killed{n}_{again}"
            elif not status:
                break
        _check_same(run, whole)
    moments = {f"after {n}": kills.count(n) for n in sorted({*kills})}
    with capsys.disabled():
        print(
            f"\n{RUNS} runs, killed {len(kills)} times, newest checkpoint and kills: {moments}; {again} begun again, as they were trained"
        )
        print(f"before their first kill; all ended bit for bit as the one that was not killed, which took {lasts:.1f} s")
