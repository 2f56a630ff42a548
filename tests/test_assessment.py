"""What ``segment-env eval`` prints: whole documents of a run's data or of other data, and mistakes in one line."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from agents import cli, config, training
from agents.assessment import assess, find_data
from segment_env.errors import UserError
from segment_env.streams import Corpus

SMALL = ["data.length=64", "train.rows=4", "train.validation_bytes=2000", "train.validations=0", "train.device=cpu"]
TEXTS = ["Call me Ishmael. Some years ago - never mind how long precisely - having little or no money", "in my purse", "née"]


def run_of(*overrides: str) -> training.Run:
    made = training.Run(config.load([*SMALL, *overrides]))
    torch.manual_seed(0)
    if hasattr(made.agent.policy, "weight"):
        nn.init.normal_(made.agent.policy.weight, std=0.3)
    return made


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """The same documents as text files, JSON lines, and one text."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "texts").mkdir()
    for i, text in enumerate(TEXTS):
        (folder / "texts" / f"{i}.txt").write_text(text)
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (folder / "one.txt").write_text("\n\n".join(TEXTS))
    return folder


def test_the_figures_of_a_run_are_those_of_its_validation() -> None:
    """Of a corpus evaluation by documents is what training validates by: the same crops, the same noise."""
    run = run_of("data=files", f"data.source.path={__file__}", "data.length=64")
    figures = assess(run, "validation", seed=3, draws=2)
    for key, value in run.evaluate("validation", seed=3).items():
        assert figures[key] == pytest.approx(value, rel=1e-5, nan_ok=True) if isinstance(value, float) else figures[key] == value
    assert figures["num_documents"] == 1 and math.isnan(figures["bits_per_byte_standard_error"])
    assert figures["draws"]["num_draws"] == 2 and figures["draws"]["marginal_bits_per_byte"] <= figures["draws"]["bits_per_byte"]
    assert list(figures["segment_length_quantiles"]) == ["0.05", "0.25", "0.5", "0.75", "0.95"]
    tokens = (1 + figures["rate"] * 63) / 64
    assert figures["flops_per_byte"] == pytest.approx(run.model.flops_per_byte(tokens, 64), rel=0.02)


@pytest.mark.parametrize("rate", [None, 0.4])
def test_the_threshold_gives_the_rate(rate: float | None) -> None:
    """On the bytes that it was calibrated on, which the draws too come to at the same rate, within 4 standard deviations."""
    run = run_of()
    run.source = Corpus("this file", Path(__file__).read_bytes(), (0.4, 0.3, 0.3))
    run.train["validation_bytes"] = 1 << 20
    figures = assess(run, "validation", rate=rate)
    target = 0.2 if rate is None else rate
    assert figures["thresholded"]["rate"] == pytest.approx(target, abs=0.01)
    assert figures["thresholded"]["boundaries"] == f"thresholded, calibrated to {target} on validation bytes"
    if rate:
        spread = math.sqrt(rate * (1 - rate) / figures["num_bytes"])
        assert figures["rate"] == pytest.approx(rate, abs=4 * spread)
        assert figures["boundaries"] == "sampled, uncapped, calibrated to 0.4 on validation bytes" and figures["offset"] > 0


def test_other_data_as_files_or_as_configuration(data: Path) -> None:
    run = run_of()
    folder, rows, one = (assess(run, data=[str(data / name)]) for name in ("texts", "rows.jsonl", "one.txt"))
    assert folder["num_bytes"] == rows["num_bytes"] == sum(len(text.encode()) for text in TEXTS)
    assert (folder["num_documents"], rows["num_documents"], one["num_documents"]) == (3, 3, 1)
    assert folder["bits_per_byte"] == pytest.approx(rows["bits_per_byte"], rel=1e-6) and folder["split"] is None
    assert folder["bits_per_byte_standard_error"] > 0 and one["num_bytes"] == folder["num_bytes"] + 4
    assert folder["data"] == "texts" and rows["data"] == "rows.jsonl"
    named = ["data=folder", f"data.source.path={data / 'texts'}", f"data.source.test={data / 'one.txt'}", "data.source.longer_than=0"]
    assert assess(run, data=named)["bits_per_byte"] == pytest.approx(one["bits_per_byte"], rel=1e-6)
    strided = assess(run, data=[str(data / "one.txt")], stride=16)
    assert strided["num_bytes"] == one["num_bytes"] and strided["flops_per_byte"] > one["flops_per_byte"]


def test_sequences_of_a_generator_are_documents() -> None:
    run = run_of("diagnostic=delimiter", "agent=oracle", "train.rows=256")
    figures = assess(run, draws=2)
    assert figures["num_documents"] == 2048 and figures["num_bytes"] == 1 << 17 and figures["flops_per_byte"] is None
    assert figures["recall"] == figures["precision"] == 1 and figures["thresholded"] is None
    assert figures["draws"]["standard_error"] == 0 and figures["draws"]["marginal_bits_per_byte"] == pytest.approx(figures["bits_per_byte"])
    with pytest.raises(UserError, match="they take no stride"):
        assess(run, stride=8)


def test_mistakes_of_data(data: Path) -> None:
    run = run_of()
    for given, split, says in (
        (["nowhere"], None, "no file or folder 'nowhere'"),
        ([str(data / "texts")], "test", "is read whole: leave out --split"),
        (["data=nothing"], None, "nothing"),
        (["data=files", "data.source.path=nowhere"], None, "no file or folder 'nowhere'"),
    ):
        with pytest.raises(UserError, match=says):
            find_data(run, given, split)
    with pytest.raises(UserError, match="draws must be at least 1, got 0"):
        assess(run, draws=0)
    with pytest.raises(UserError, match="from 1 to the crop's 64, got 65"):
        assess(run, data=[str(data / "texts")], stride=65)


def test_from_the_command_line(data: Path, tmp_path: Path, capsys) -> None:
    made = training.Run(config.load([*SMALL, "train.bytes=256"]))
    training.train(made, training.begin(made.settings, tmp_path / "run"), progress=False)
    command = ["eval", str(tmp_path / "run"), "--data", str(data / "one.txt"), "--draws", "2"]
    assert cli.main([*command, "--json", str(tmp_path / "out.json")]) == 0
    printed = capsys.readouterr().out
    assert (tmp_path / "out.json").read_text() == printed
    figures = json.loads(printed, parse_constant=pytest.fail)  # nan is no JSON
    assert figures["bits_per_byte_standard_error"] is None and figures["draws"]["num_draws"] == 2
    for path in (tmp_path, tmp_path / "nowhere" / "out.json"):
        assert cli.main([*command, "--json", str(path)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith(f"segment-env: cannot write '{path}': ") and err.count("\n") == 1
    assert cli.main([*command, "--json", str(tmp_path / "out.json"), "--stride", "0"]) == 2
    assert (tmp_path / "out.json").read_text() == printed, "what was there is not lost"
