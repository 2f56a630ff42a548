"""A dry run counts what is there to count, scales what it measured, and writes nothing."""

from pathlib import Path

import pytest
from torch.utils.flop_counter import FlopCounterMode

from agents import cli, config, estimate, training
from agents.estimate import Trial
from segment_env.errors import UserError

SIZE = "model.size={_target_:models.Size,width:256,heads:4,encoder:1,mid:1,decoder:1,window:16}"
TINY = ["model.size={_target_:models.Size,width:16,heads:2,encoder:1,mid:1,decoder:1,window:4}", "train.optimiser.precision=float32"]
SMALL = [*TINY, "train.rows=4", "data.length=64", "train.device=cpu"]


def made(*overrides: str) -> training.Run:
    return training.Run(config.load(overrides))


def test_one_screen_that_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "--dry-run", *SMALL, "train.bytes=25600", "train.keep=2", "train.wandb=offline", "--run", "here"]) == 0
    text, err = capsys.readouterr()
    lines = text.splitlines()
    assert not err and not list(tmp_path.iterdir()) and len(lines) <= 24 and max(map(len, lines)) <= 140
    assert [line.split()[0] for line in lines if line[0] != " "] == [
        *("parameters", "data", "budget", "operations", "memory", "time", "writes", "a")
    ]
    run = made(*SMALL)
    count = sum(parameter.numel() for parameter in run.model.parameters())
    assert f"model {count:,} + agent 16 = {count + 16:,} (ByteUNet)" in text
    assert "100 updates, 25,600 bytes decoded, 25,600 of them different" in text
    assert "here/config.yaml, metrics.jsonl with 20 lines, wandb (offline)" in text
    checkpoint = 4 * 3 * (count + 16) + 4  # parameters, two moments of each, and the integral of the rate controller
    assert f"here/checkpoints of {checkpoint / 1e3:.0f} kB, one every 200 updates; at most 4 at once" in text
    assert "timed: an update of 4 x 64 bytes" in text and "scaled" not in text


def test_operations_are_those_that_torch_counts() -> None:
    """Within what a window's blocks compute beyond their window, which is not counted."""
    run = made(SIZE, "train.rows=4", "data.length=256", "agent=uniform", "train.optimiser.precision=float32")
    learner = run.learner()
    batch = next(run.batches(learner))
    with FlopCounterMode(display=False) as counter:
        loss, metrics, _ = learner.loss(batch)
        loss.backward()
    counted = estimate.flops(run, 4, 256, float(metrics["rate"]))
    assert counter.get_total_flops() == pytest.approx(counted, rel=0.05)
    assert counter.get_total_flops() > counted


def test_memory_grows_with_bytes_and_parameters_are_none_of_it() -> None:
    run = made(*SMALL, "agent=uniform")
    learner = run.learner()
    batch = next(run.batches(learner))
    kept = estimate.kept_for_backward(learner, batch)
    longer = made(*SMALL, "agent=uniform", "data.length=128")
    more = estimate.kept_for_backward(longer.learner(), next(longer.batches(longer.learner())))
    assert more == pytest.approx(2 * kept, rel=0.1)
    # at least h of every layer and 256 log-probabilities twice, in float32
    assert kept > 4 * 64 * 4 * (2 * 256 + 3 * 16)


def test_a_trial_is_a_part_of_what_cannot_be_afforded(monkeypatch: pytest.MonkeyPatch) -> None:
    run = made(*TINY, "train.rows=16", "data.length=1024", "train.device=cpu")
    assert estimate.affordable(run) == (16, 1024)
    whole = estimate.flops(run, 16, 1024)
    for limit, expected in ((whole / 2, (16, 512)), (whole / 5, (8, 256)), (0.0, (2, 256))):
        monkeypatch.setitem(estimate._AFFORDABLE, "cpu", limit)
        assert estimate.affordable(run) == expected
    paired = made(*TINY, "train.rows=16", "data.length=256", "agent=grpo", "train.device=cpu")  # four rows of a sequence at least
    assert estimate.affordable(paired) == (4, 256)


def test_what_was_measured_is_scaled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = config.load([*TINY, "train.rows=8", "data.length=512", "train.bytes=4096000", "train.device=cpu"])
    monkeypatch.setattr(estimate, "affordable", lambda run: (2, 256))
    monkeypatch.setattr(estimate, "measure", lambda run, rows, length: Trial(rows, length, 0.2, 3.0, 1000.0, 5e6))
    text = estimate.describe(settings, tmp_path / "run")
    run = training.Run(settings)
    scale = estimate.flops(run, 8, 512, 0.2) / estimate.flops(run, 2, 256, 0.2)
    assert scale == pytest.approx(8, rel=0.02)
    assert f"took 3 s; scaled by operations, {scale:,.0f} times as many" in text
    assert f"{3 * scale:.3g} s an update, {3000 * scale / 3600:.1f} hours in all" in text
    assert f"activations {(8 * 512 * 1000 + 5e6) / 1e6:.2f} MB" in text


def test_a_scorer_in_closed_form(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--dry-run", "diagnostic=delimiter", "rate=none", "train.rows=4", "data.length=32", "train.device=cpu"]) == 0
    text = capsys.readouterr().out
    assert "(Delimiter)" in text and "not counted: Delimiter does not say what it costs" in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--resume", "nowhere"], "--dry-run is of a run that is yet to begin: it takes no --resume"),
        (["--run", "old"], "'old' already holds a run"),
        (["target=1"], "strictly between 0 and 1"),
        (["data=files", "data.source.path=nowhere"], "no file or folder 'nowhere'"),
        (["train.optimiser.lr=-1"], "lr and early_weight must not be negative"),
    ],
)
def test_mistakes(arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.yaml").touch()
    assert cli.main(["train", "--dry-run", *SMALL, *arguments]) == 2
    out, err = capsys.readouterr()
    assert says in err and err.count("\n") == 1 and not out


def test_where_data_is_missing_for_another_reason_it_is_a_mistake() -> None:
    with pytest.raises(UserError, match="no cut 'page'"):
        estimate.describe(config.load(["data=folder", "data.source.path=.", "data.source.cut=page", *SMALL]))
