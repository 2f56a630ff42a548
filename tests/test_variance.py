"""The variance laboratory end to end on a small run: what it draws, and what its table says.

Letters: N draws of bytes, P parameters.
"""

import csv
import json
import shlex
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from agents import cli, config, training, variance
from agents.gradient_noise import Draws, figures
from agents.laboratory import Laboratory
from segment_env.batch import Samples
from segment_env.errors import UserError

SMALL = [
    "train.rows=4",
    "data.length=48",
    "train.bytes=3072",
    "train.validations=0",
    "train.optimiser.precision=float32",
    "train.device=cpu",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 16 updates on a made-up language."""
    folder = tmp_path_factory.mktemp("run")
    settings = config.load(["data=made_up", *SMALL])
    training.train(training.Run(settings), training.begin(settings, folder / "run"), progress=False)
    return folder / "run"


@pytest.fixture
def lab(run: Path) -> Laboratory:
    return Laboratory(training.open_run(run), draws=3, fit_updates=2, pairs=1)


def test_the_table_of_the_shipped_estimators(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    less = ['truth=["agent=rloo","agent.samples=4"]', 'objective=["agent=rloo","agent.samples=4","gamma=1.0"]']
    more = ['+grid.four=["agent=rloo","agent.samples=4"]']
    arguments = ["variance", str(run), *less, *more, "--draws", "3", "--fit", "2", "--out", str(tmp_path / "out")]
    assert cli.main(arguments) == 0
    out, err = capsys.readouterr()
    assert out.count("Gradient of the ") == 2 and "gamma 0.9" in out
    names = list(config.load(["experiment=estimators"])["grid"]) + ["four"]
    record = json.loads((tmp_path / "out" / "variance.json").read_text())
    assert [row["estimator"] for row in record["rows"]] == 2 * names
    assert [row["part"] for row in record["rows"]] == len(names) * ["head"] + len(names) * ["encoder"]
    reference = next(row for row in record["rows"] if row["estimator"] == "paper")
    assert reference["variance_ratio_equal_rows"] == reference["variance_ratio_equal_time"] == reference["time_ratio"] == 1.0
    encodings = {row["estimator"]: row["encodings_per_row"] for row in record["rows"]}
    assert (encodings["paper"], encodings["leave_one_out_k2"], encodings["leave_one_out_on_half"]) == (1.0, 0.5, 0.75)
    credit = {line["estimator"]: line for line in record["credit"]}
    assert list(credit) == names and all(0 <= line["wrong_elsewhere"] <= 1 and line["noise"] > 0 for line in credit.values())
    assert credit["leave_one_out_k2"]["noise"] < credit["paper"]["noise"] < credit["score_function"]["noise"]
    lines = list(csv.DictReader((tmp_path / "out" / "variance.csv").read_text().splitlines()))
    assert len(lines) == len(record["rows"]) and float(lines[0]["variance"]) == record["rows"][0]["variance"]
    assert (tmp_path / "out" / "variance.md").read_text() == out
    assert (tmp_path / "out" / "variance.png").stat().st_size > 10_000 and err.splitlines()[-1].startswith("written: ")


def test_an_estimator_of_ones_own_is_seen_in_the_table(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the README has it."""
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    code = readme[readme.index("    from agents.estimators import score_function") : readme.index("Train with it, or see it")]
    (tmp_path / "my_estimator.py").write_text(textwrap.dedent(code))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    (line,) = (line for line in readme.splitlines() if line.startswith("segment-env variance") and "my_estimator" in line)
    names = [name for name in config.load(["experiment=estimators"])["grid"] if name != "paper"]
    less = ['truth=["agent=rloo"]', 'objective=["agent=rloo"]', *(f"~grid.{name}" for name in names)]
    table = variance.run(run, [*shlex.split(line)[3:], *less], tmp_path / "out", draws=3, fit_updates=0, pairs=1)
    assert [text.split()[1] for text in table.splitlines() if text.startswith(("| paper", "| clipped"))] == ["paper", "clipped"] * 3


def test_nothing_of_the_run_moves(run: Path, lab: Laboratory) -> None:
    before = {name: value.clone() for part in (lab.run.model, lab.run.agent) for name, value in part.state_dict().items()}
    estimator, critic = lab.estimator("default", ["data=made_up", "agent=default"]), lab.estimator("a2c", ["data=made_up", "agent=a2c"])
    lab.fit(critic)
    lab.gradients([critic, estimator], "estimator")
    lab.directions([critic, estimator], 2)
    lab.relative_time(critic, estimator)
    after = {name: value for part in (lab.run.model, lab.run.agent) for name, value in part.state_dict().items()}
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert any(parameter.any() for parameter in critic.agent.critic.last.parameters())  # it has been fitted


def test_draws_are_repeatable_and_share_their_bytes(lab: Laboratory) -> None:
    estimator = lab.estimator("rloo", ["data=made_up", "agent=rloo"])
    other = lab.estimator("plain", ["data=made_up", "agent=default"])
    (first,) = lab.gradients([estimator], "estimator")
    _, second = lab.gradients([other, estimator], "estimator")
    assert first.keys() == {"head", "encoder"} and first["head"].shape == (3, 2, 128)
    assert all(torch.equal(first[part], second[part]) for part in first)
    assert not torch.equal(first["head"][:, 0], first["head"][:, 1])
    one, other = (lab.batch(estimator.samples, 1, "estimator", noise) for noise in (2, 3))
    assert torch.equal(one.bytes, other.bytes) and not torch.equal(one.bytes, lab.batch(estimator.samples, 2, "estimator", 2).bytes)
    assert not torch.equal(one.bytes, lab.batch(estimator.samples, 1, "truth", 2).bytes)


def test_the_gradient_is_that_of_training(lab: Laboratory) -> None:
    """What is measured equals what the agent's own loss sends into the policy."""
    estimator = lab.estimator("default", ["data=made_up", "agent=default", "agent.rate_weight=0", "agent.policy_weight=1"])
    batch = lab.batch(estimator.samples, 0, "estimator", 0)
    got = lab.gradient(estimator, *lab.rollout(estimator, batch))["head"]
    agent, learner = estimator.agent, training.Run(lab.run.settings).learner()
    from segment_env.unroll import unroll

    rollout, live = unroll(lab.run.model, agent.policy, batch, Samples([1] * 4), soft_cap=agent.soft_cap)
    loss, _ = agent.loss(agent.prepare(rollout), live)
    (expected,) = torch.autograd.grad(loss, agent.policy.weight)
    torch.testing.assert_close(got, expected.flatten(), rtol=1e-5, atol=1e-8)
    assert learner.samples.counts == (1, 1, 1, 1)


def test_leave_one_out_is_quieter_and_agrees_with_the_score_function(run: Path) -> None:
    """24 draws: less than a third of the plain estimator's variance, from the bytes less too; the same expectation within the noise."""
    lab = Laboratory(training.open_run(run), draws=24, fit_updates=0, pairs=1)
    plain = lab.estimator("plain", ["agent.advantage.early_exit=null", "agent.advantage.batch_relative=null"])
    paired = lab.estimator("rloo", ["agent=rloo"])
    (truth,) = lab.gradients([lab.estimator("truth", ["agent=rloo", "agent.samples=4"])], "truth")
    drawn = lab.gradients([plain, paired], "estimator")
    noisy, quiet = (figures(Draws.of(each["head"], truth["head"])) for each in drawn)
    assert quiet.variance[0] < noisy.variance[0] / 3
    assert abs(quiet.bias[0]) < 0.5 or quiet.bias[0].isnan()


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["experiment=diagnostics"], "the experiment has no 'reference', it is not one of estimators; see experiment=estimators"),
        (["reference=mine"], "reference=mine is no estimator of the grid"),
        (['+grid.odd=["agent=rloo","agent.samples=3"]'], "estimator 'odd': agent.samples=3 boundary samples per sequence do not fill"),
        (
            ['+grid.alone=["agent=rloo","agent.samples=1"]'],
            "estimator 'alone': the advantage step leave_one_out needs agent.samples of 2 or more",
        ),
        (["--draws", "1"], "at least 2 draws, 0 fitting updates and 1 pair are needed, got 1"),
        (['+grid.rule=["agent=uniform"]'], "estimator 'rule': Given learns nothing: there is no gradient to measure"),
    ],
)
def test_a_mistake_gets_one_line(arguments: list[str], says: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["variance", str(run), *arguments]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert says in line and not (run / "variance").exists()


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no run folder"):
        variance.run(tmp_path, [])
