"""Compiled layers: the same numbers and the same names as without, one compilation for all lengths.

By default they are traced, to run torch's own kernels; the marked tests make kernels, which takes a C++ compiler, and minutes.
"""

import itertools
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch._dynamo.testing import CompileCounterWithBackend

from agents import cli, config, training
from agents.agent import Given
from agents.learner import Learner
from agents.rules import IidRandom
from models import ByteUNet, Size
from segment_env.batch import Batch, Episodes
from segment_env.streams import moby_dick

pytestmark = pytest.mark.filterwarnings("default")  # torch's tracing does several things that torch warns of

SIZE = Size(width=16, heads=2, encoder=1, mid=2, decoder=1, window=4)
TINY = ["model.size={_target_:models.Size,width:16,heads:2,encoder:1,mid:1,decoder:1,window:4}", "data.length=32", "train.rows=4"]
TINY += ["train.bytes=512", "train.validations=1", "train.validation_bytes=128", "train.device=cpu", "train.optimiser.precision=float32"]


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def batches(length: int, sequences: int = 3) -> list[Batch]:
    episodes = Episodes(moby_dick().stream("train"), sequences, length, seed=0)
    return [episodes.batch(n) for n in range(4)]


def learner(rows: int, precision: str = "float32", **compiled) -> Learner:
    torch.manual_seed(0)
    model = ByteUNet(SIZE)
    if compiled:
        model.compile(**compiled)
    return Learner(model, Given(IidRandom(0.3)), rows, 10, precision=precision)


def losses_and_gradients(learner: Learner, batch: Batch) -> list[torch.Tensor]:
    learner.model.zero_grad()
    loss, metrics, _ = learner.loss(batch)
    loss.backward()
    return [loss.detach(), metrics["nll"], *(parameter.grad for parameter in learner.model.parameters())]


def compare(backend, precision: str = "float32", tolerance: float = 1e-5) -> None:
    """Over several numbers of tokens, rows and bytes."""
    for rows, length in ((3, 40), (2, 90)):
        plain, compiled = learner(rows, precision), learner(rows, precision, backend=backend)
        for batch in batches(length, rows):
            for one, other in zip(losses_and_gradients(plain, batch), losses_and_gradients(compiled, batch), strict=True):
                torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_compiled_layers_compute_the_same_and_are_compiled_once() -> None:
    """Byte layers and token layers; torch may tell those of the encoder and of the decoder apart."""
    counter = CompileCounterWithBackend("aot_eager")
    compare(counter)
    assert 2 <= counter.frame_count <= 3


def test_a_compiled_run_is_the_same_run_with_the_same_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=(counter := CompileCounterWithBackend("eager"))))
    figures = {}
    for compiled in (False, True):
        run = training.Run(config.load([*TINY, f"train.compile={str(compiled).lower()}"]))
        run.evaluate("validation", 64)
        assert not counter.frame_count, "without a gradient nothing is compiled"
        run.rehearse()
        assert (counter.frame_count > 0) == compiled, "what cannot be compiled is found before anything is written"
        folder = training.begin(run.settings, tmp_path / str(compiled))
        training.train(run, folder, progress=False)
        figures[compiled] = load_file(folder / "checkpoints/00000004/model.safetensors")
    assert figures[True].keys() == figures[False].keys() == run.model.state_dict().keys()
    for name in figures[True]:
        torch.testing.assert_close(figures[True][name], figures[False][name], rtol=0, atol=1e-4, msg=name)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["train.compile=1"], "train.compile must be true or false, got 1"),
        (["train.compile=true", "diagnostic=delimiter", "rate=none"], "and Delimiter has none: leave it false"),
    ],
)
def test_mistakes(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


@pytest.mark.slow
def test_no_compiler_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import torch._inductor.config as inductor
    from torch._inductor.utils import fresh_cache

    monkeypatch.chdir(tmp_path)
    with fresh_cache(), inductor.patch({"cpp.cxx": ("no-such-compiler",)}):
        assert cli.main(["train", *TINY, "train.compile=true"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("segment-env: the configuration cannot be trained: ") and "compiler" in line.lower()
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-5), ("bf16", 0.02)])
def test_native_kernels_compute_the_same(precision: str, tolerance: float) -> None:
    compare("inductor", precision, tolerance)


@pytest.mark.slow
def test_many_lengths_stay_within_the_limit_of_recompilations() -> None:
    """Which torch would pass over in silence, to run everything else uncompiled."""
    counter = CompileCounterWithBackend("eager")
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        compiled = learner(2, backend=counter)
        for batch in itertools.chain.from_iterable(batches(length, 2) for length in (1, 2, 3, 9, 17, 33, 65, 129, 257, 300)):
            losses_and_gradients(compiled, batch)
    assert counter.frame_count <= 8
