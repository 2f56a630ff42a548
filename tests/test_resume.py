"""A run that is killed and resumed ends as one that was not."""

import json
import signal
import subprocess
import sys
import time

from safetensors.torch import load_file

SETTINGS = ["data.length=32", "train.rows=4", "train.bytes=7680", "train.checkpoint_every=10", "train.validations=3"]
SETTINGS += ["train.validation_bytes=256", "train.optimiser.precision=float32", "train.log_every=5", "train.device=cpu"]
UPDATES = 60


def _start(*arguments):
    command = [sys.executable, "-m", "agents.cli", "train", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def _finish(*arguments):
    process = _start(*arguments)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err.decode()


def _kill_after_checkpoint(run, beyond, *arguments):
    """Start, wait for a checkpoint after ``beyond`` updates, SIGKILL: -> updates of the newest whole checkpoint."""
    process = _start(*arguments)
    while not (found := [n for n in _checkpoints(run) if n > beyond]):
        assert process.poll() is None, process.stderr.read().decode()
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL, "it ended before it was killed: nothing is shown"
    assert max(found) < UPDATES
    return max(_checkpoints(run))


def _checkpoints(run):
    return [int(folder.name) for folder in run.glob("checkpoints/*") if not folder.suffix]


def test_killed_twice_and_resumed_ends_bit_for_bit_the_same(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    _finish(*SETTINGS, "--run", whole)
    first = _kill_after_checkpoint(killed, 0, *SETTINGS, "--run", killed)
    _kill_after_checkpoint(killed, first, "--resume", killed)
    _finish("--resume", killed)

    for name in ("model", "agent", "optimiser"):
        expected, got = (load_file(run / f"checkpoints/{UPDATES:08d}/{name}.safetensors") for run in (whole, killed))
        assert expected.keys() == got.keys()
        assert all(expected[key].equal(got[key]) for key in expected), name
    lines = [json.loads(line) for line in (killed / "metrics.jsonl").read_text().splitlines()]
    trained = [line["update"] for line in lines if "bits_per_byte" in line]
    assert trained == list(range(5, UPDATES + 1, 5))
