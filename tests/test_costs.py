"""What a row costs: by hand, and that a timing is kept."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from agents import compare, config, costs, timing, training
from models.sizes import SIZES, flops_per_byte
from segment_env.errors import UserError

SMALL = ["data.length=64", "train.rows=4", "train.device=cpu", "train.optimiser.precision=float32"]


def test_operations_of_training_by_hand() -> None:
    """Three forwards; a rate of choices of 0.2 and 0.4 on the way makes 1 + 0.3 * 63 tokens of a crop of 64 bytes."""
    run = training.Run(config.load([*SMALL, "agent=rloo"]))
    curve = [{"validation_rate": 0.2}, {"validation_rate": 0.4}]
    tokens = (1 + 0.3 * 63) / 64
    expected = 3 * flops_per_byte(SIZES["nano"], tokens, 64, samples=2)
    assert costs.training_flops(run, curve, 0.9) == pytest.approx(expected, rel=1e-12)
    alone = costs.training_flops(training.Run(config.load([*SMALL, "agent=every_byte"])), [], 1.0)
    assert alone == pytest.approx(3 * flops_per_byte(SIZES["nano"], 1.0, 64), rel=1e-12)
    closed = training.Run(config.load(["diagnostic=period", *SMALL]))
    assert costs.training_flops(closed, [], 0.2) is None


def test_a_ratio_is_of_time_a_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the rows in 3, 1 and 2 seconds against 4, 4 and 2: medians of 2 * 3/4, 2 * 1/4, 2 * 2/2, and of 2048 bytes in 2 seconds."""
    whole, half = (config.load([*SMALL, f"train.rows={rows}", "agent=uniform", "data.length=256"]) for rows in (16, 8))

    def taken(mine: Callable, theirs: Callable, pairs: int, warm_up: int) -> list[tuple[float, float]]:
        assert mine() > 0 and theirs() > 0 and pairs == 3
        return [(3.0, 4.0), (1.0, 4.0), (2.0, 2.0)]

    monkeypatch.setattr(timing, "interleaved", taken)
    assert costs.speed(half, whole, pairs=3) == {"time_ratio": 1.5, "bytes_per_second": 1024.0}


def test_a_grid_that_is_run_again_keeps_its_timings(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("call me ishmael some years ago never mind how long precisely " * 140)
    overrides = [
        "experiment=default_vs_uniform",
        "+costs=1",
        "seeds=[0]",
        "data=files",
        f"data.source.path={text}",
        *SMALL,
        "train.bytes=512",
    ]
    table = compare.run([*overrides, "train.validations=1"], tmp_path / "cells")
    assert "| update time / uniform |" in re.sub(" +", " ", table) and (tmp_path / "cells" / "default_vs_uniform_flops.png").exists()
    again = shutil.copytree(tmp_path / "cells", tmp_path / "again")
    assert compare.run([*overrides, "train.validations=1"], again) == table
    (timing, *_) = again.glob("*_against_*.json")
    timing.write_text("{}")
    with pytest.raises(UserError, match="is damaged: remove it to time its row anew"):
        compare.run([*overrides, "train.validations=1"], again)


@pytest.mark.parametrize("value", [0, True, 2.5, "many"])
def test_a_number_of_pairs_that_is_none(value: object) -> None:
    with pytest.raises(UserError, match="costs must be the number of timed pairs of updates a row, at least 1, got"):
        costs.check_pairs(value)
