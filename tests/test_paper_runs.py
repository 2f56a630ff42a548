"""The runs of the paper on local files of the same format, with fewer rows and shorter crops."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from agents import cli
from segment_env.streams import moby_dick

SHORT = ["data.length=64", "train.rows=2", "train.bytes=256", "train.validations=1", "train.validation_bytes=128", "train.device=cpu"]
DOCUMENTS = [moby_dick().data[at : at + 5000].decode("utf-8", "replace") for at in range(0, 200_000, 5000)]
RUNS = {"paper_147m_fineweb": 146_930_688, "paper_90m_codeparrot": 90_289_152}


def write(folder: Path, name: str) -> list[str]:
    """Documents laid out as the data set of a run is on the hub: -> the overrides that open them."""
    if name == "paper_147m_fineweb":
        pyarrow.parquet.write_table(pa.table({"text": DOCUMENTS}), folder / "0.parquet")
        card = {"configs": [{"config_name": "sample-100BT", "data_files": "*.parquet"}]}
        (folder / "README.md").write_text(f"---\n{json.dumps(card)}\n---\n")
    else:
        with gzip.open(folder / "0.json.gz", "wt") as file:
            file.writelines(json.dumps({"content": document}) + "\n" for document in DOCUMENTS)
    return [f"data.source.path={folder}", "data.source.buffer=4", "data.source.held_out_bytes=128"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", RUNS)
def test_two_updates(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the whole model; its checkpoint is removed, it has gigabytes."""
    data, run = tmp_path / "data", tmp_path / "run"
    data.mkdir()
    # of these few documents a fifth is held out, so that there are some
    few = [*write(data, name), "data.source.fractions=[0.6,0.2,0.2]"]
    assert cli.main(["train", f"experiment={name}", *SHORT, *few, "--run", str(run)]) == 0
    assert "held-out bits per byte" in capsys.readouterr().out
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["update"] == 2 and lines[0]["skipped"] == 0 and 5 < lines[0]["bits_per_byte"] < 20
    for file in run.rglob("*.safetensors"):
        file.unlink()


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_dry_run_without_the_hub(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "--dry-run", f"experiment={name}", "train.device=cpu"]) == 0
    text = capsys.readouterr().out
    assert f"model {RUNS[name]:,} + agent 768" in text and "NOT THERE: cannot open the data set" in text
    assert "scaled by operations" in text and not list(tmp_path.iterdir())
