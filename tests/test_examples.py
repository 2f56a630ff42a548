"""The shipped scripts run as they are, and learn."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from agents import config, training
from segment_env.diagnostics import Delimiter

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore:The '(post_loss|optimizer)' hook stage will be replaced:FutureWarning")  # TorchRL's own use of it
def test_torchrls_trainer_learns_on_our_collector() -> None:
    """100 batches of 16 x 128 bytes; the three seeds tried came to 0.98 or more of the way from random to the best policy."""
    torch.manual_seed(0)  # of the replay buffer
    script = EXAMPLES / "torchrl_trainer.py"
    assert len(script.read_text().splitlines()) <= 40
    problem = Delimiter()
    expected = problem.scores(problem.rate, problem.default_price)
    score = (load("torchrl_trainer").main() - expected["random"]) / (expected["oracle"] - expected["random"])
    assert 0.95 < score < 1.05


def test_segments_of_a_text(tmp_path: Path) -> None:
    """Of a run of one update: of the sentence that the script brings, and of a file of any bytes."""
    script = load("segment_text")
    run = training.Run(config.load(["data.length=32", "train.rows=4", "train.bytes=128", "train.validations=0", "train.device=cpu"]))
    training.train(run, training.begin(run.settings, tmp_path / "run"), progress=False)
    assert b"".join(script.main(tmp_path / "run")).startswith(b"Call me Ishmael.")
    (tmp_path / "data").write_bytes(bytes(range(256)))
    segments = script.main(str(tmp_path / "run"), str(tmp_path / "data"))
    assert b"".join(segments) == bytes(range(256)) and segments[1].start == len(segments[0])
