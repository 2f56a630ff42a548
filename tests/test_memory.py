"""A training of days holds no more memory than one of minutes."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from agents import config, training
from agents.statistics import t_factor
from segment_env.streams import moby_dick

SMALL = ["model.size={_target_:models.Size,width:16,heads:2,encoder:1,mid:1,decoder:1,window:4}", "data.length=64", "train.rows=4"]
SMALL += [f"train.bytes={4 * 64 * 2500}", "train.device=cpu", "train.checkpoint_every=250", "train.validations=5"]
SMALL += ["train.validation_bytes=1024", "train.log_every=10", "data.source.buffer=64", "train.optimiser.precision=float32"]


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_memory_is_flat_over_updates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Over 2,000 updates after 500, with all that a training does besides: data read ahead, validations, metrics, checkpoints.

    Metrics of an update that were kept would be some 2,000 bytes each, its batch 10,000, its graph a million.
    """
    paragraphs = moby_dick().data[:400_000].split(b"\n\n")
    for shard in range(4):
        pyarrow.parquet.write_table(pa.table({"text": pa.array(paragraphs[shard::4], pa.binary())}), tmp_path / f"{shard}.parquet")
    run = training.Run(config.load(["data=parquet", f"data.source.path={tmp_path}", *SMALL]))
    folder, seen = training.begin(run.settings, tmp_path / "run"), []

    def sample() -> bool:
        seen.append(resident())
        return False

    training.train(run, folder, progress=False, stop=sample)
    y = np.array(seen[500:]).reshape(40, 50).mean(1)  # of fifty updates: neighbours are not independent
    x = 50.0 * np.arange(40)
    slope, intercept = np.polyfit(x, y, 1)
    error = np.sqrt(((y - intercept - slope * x) ** 2).sum() / 38 / ((x - x.mean()) ** 2).sum())
    width = t_factor(0.95, 38) * error
    with capsys.disabled():
        ends = f"from {y[0] / 2**20:.1f} to {y[-1] / 2**20:.1f} MiB"
        print(f"\nmemory over 2,000 updates: {slope:+.0f} +- {width:.0f} bytes an update (95% t-interval), {ends}")
    assert slope - width < 1000
