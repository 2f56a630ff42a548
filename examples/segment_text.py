"""Cuts a text where a trained run's agent would: prints where each segment begins, and its bytes.

Run it with ``python examples/segment_text.py RUN [FILE]``; without a file it cuts a sentence.
"""

import sys
from pathlib import Path

from agents.segmenting import segment
from agents.training import open_run


def main(run_folder, file=None):
    """Returns the segments: bytes that know where they begin."""
    run = open_run(Path(run_folder))
    data = Path(file).read_bytes() if file else b"Call me Ishmael. Some years ago - never mind how long precisely."
    return segment(run.model, run.agent.policy, data, seed=0, device=run.device)


if __name__ == "__main__":
    for each in main(*sys.argv[1:]):
        print(each.start, bytes(each))
