"""Updates that are not finite are skipped to the bit, counted, and stop the run where too many follow one another."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torchrl.objectives import ClipPPOLoss, KLPENPPOLoss

from agents import checkpoint, cli, config, training
from agents.advantages import batch_relative, discounted_return, gae, subtract_baseline
from agents.agent import Agent, Given, Reinforce
from agents.critics import Critic
from agents.hindsight import Hindsight
from agents.learner import Learner
from agents.loss_module import LossModuleAgent
from agents.policies import WindowPolicy
from agents.rates import PI, Lagrangian
from agents.rules import IidRandom
from models import ByteUNet, Size
from segment_env.batch import Episodes
from segment_env.closed_form import CountingStream

SMALL = ["data=made_up", "data.length=32", "train.rows=4", "train.bytes=2560", "train.validations=0", "train.device=cpu"]
SMALL += ["train.optimiser.precision=float32", "train.log_every=10", "train.checkpoint_every=4"]


def reinforce(rate=PI) -> Agent:
    steps = [partial(discounted_return, gamma=0.9), subtract_baseline, batch_relative]
    return Reinforce(WindowPolicy(16, 0.2), steps, rate(0.3), baseline=Hindsight(16, 0.9), encoder_grad=True)


def ppo(objective) -> Agent:
    steps = [partial(gae, gamma=0.9, lam=0.95)]
    return LossModuleAgent(WindowPolicy(16, 0.2), steps, objective, Lagrangian(0.3), Critic(16, 0), epochs=3)


AGENTS = {
    "reinforce": reinforce,
    "priced": partial(reinforce, Lagrangian),
    "ppo": partial(ppo, partial(ClipPPOLoss, normalize_advantage=False)),
    "ppo_kl": partial(ppo, partial(KLPENPPOLoss, normalize_advantage=False, dtarg=1e-9, increment=3.0)),
    "given": partial(Given, IidRandom(0.3)),
}


def made(name: str, device: torch.device) -> Learner:
    torch.manual_seed(0)
    model = ByteUNet(Size(width=16, heads=2, encoder=1, mid=1, decoder=1, window=4))
    return Learner(model, AGENTS[name](), 4, 40, lr=0.01, device=device)


def batch(n: int):
    return Episodes(CountingStream(4, 0.0), 4, 24, seed=5).batch(n)


def everything(learner: Learner) -> dict[str, Tensor]:
    """Buffers that no checkpoint holds among them."""
    parts = {"model": learner.model, "agent": learner.agent}
    moments = learner.optimiser.state_dict()["state"]
    return {
        **{f"{part}.{key}": value.detach().clone() for part, module in parts.items() for key, value in module.named_parameters()},
        **{f"{part}.{key}": value.clone() for part, module in parts.items() for key, value in module.named_buffers()},
        **{f"{i}.{key}": value.clone() for i, each in moments.items() for key, value in each.items()},
    }


def changed(one: dict[str, Tensor], other: dict[str, Tensor]) -> set[str]:
    assert one.keys() <= other.keys()
    return {key for key in one if not torch.equal(one[key], other[key])}


def poison(learner: Learner, how: str) -> None:
    """What goes wrong in the next update."""
    loss = learner.loss

    def spoiled(batch):
        total, metrics, rollout = loss(batch)
        if how == "loss":
            total = total * torch.nan
        elif how == "infinite":
            total = total + torch.inf  # its gradient is finite
        else:
            weight = learner.model.head.weight
            total = total + (weight[0, 0] - weight[0, 0].detach()).sqrt()  # 0, and its slope is infinite
        learner.loss = loss
        return total, metrics, rollout

    learner.loss = spoiled


@pytest.mark.parametrize("how", ["loss", "infinite", "gradient"])
@pytest.mark.parametrize("name", AGENTS)
def test_a_skipped_update_changes_nothing(name: str, how: str, device: torch.device) -> None:
    learner = made(name, device)
    start = everything(learner)
    metrics = learner.update(batch(0))
    before = everything(learner)
    assert metrics["skipped"] == 0 and changed(start, before) >= {"model.head.weight"}
    if name != "given":
        assert any("rate." in key for key in changed(start, before)), "the controller moves in an update that is made"
    poison(learner, how)
    metrics = learner.update(batch(1))
    assert metrics["skipped"] == 1 and metrics["skipped"].device.type == device.type
    assert not changed(before, everything(learner))
    assert learner.update(batch(2))["skipped"] == 0
    untouched = made(name, device)
    untouched.update(batch(0))
    untouched.schedule.step()  # the learning rate goes on
    untouched.update(batch(2))
    assert not changed(everything(untouched), everything(learner)), "as if the update had not been"


def test_a_loss_that_adapts_itself_is_set_back(device: torch.device) -> None:
    learner = made("ppo_kl", device)
    learner.update(batch(0))
    learner.update(batch(1))
    before = learner.agent.objective.beta.clone()
    learner.update(batch(2))
    assert learner.agent.objective.beta != before, "it adapts in an update that is made"
    before = everything(learner)
    poison(learner, "loss")
    learner.update(batch(3))
    assert not changed(before, everything(learner))


def test_later_epochs_are_skipped_with_the_one_that_is_not_finite(device: torch.device) -> None:
    learner = made("ppo", device)
    loss, made_, after_first = learner.agent.loss, [], {}

    def spoiled(rollout, live):
        made_.append(1)
        if len(made_) == 2:
            after_first.update(everything(learner))
        total, metrics = loss(rollout, live)
        return total * (torch.nan if len(made_) == 2 else 1), metrics

    learner.agent.loss = spoiled
    assert learner.update(batch(0))["skipped"] == 1
    assert len(made_) == 3 and not changed(after_first, everything(learner))


def test_updates_in_a_row_are_counted_on_the_device(device: torch.device) -> None:
    learner, counts = made("given", device), []
    for n, bad in enumerate([0, 1, 1, 0, 1, 0, 0]):
        if bad:
            poison(learner, "loss")
        learner.update(batch(n))
        counts.append((int(learner.skipped_in_a_row), int(learner.most_skipped)))
    assert counts == [(0, 0), (1, 1), (2, 2), (0, 2), (1, 2), (0, 2), (0, 2)]
    assert learner.skipped_in_a_row.device.type == device.type


@pytest.mark.gpu
def test_nothing_waits_for_the_device() -> None:
    """Given boundaries: of an update's reads of the device, those of the unroll alone are left, and they are none of ours."""
    learner = made("given", torch.device("cuda"))
    loss, _, rollout = learner.loss(batch(0))
    learner._step(loss, learner._buffers(), torch.zeros((), device="cuda"))
    loss, _, rollout = learner.loss(batch(1))
    torch.cuda.set_sync_debug_mode("error")
    try:
        learner._step(loss, learner._buffers(), torch.zeros((), device="cuda"))
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- in the trainer ---


class Spoiled(Reinforce):
    """Loses its way at some of its updates."""

    def __init__(self, *arguments, bad: list[int], **settings):
        super().__init__(*arguments, **settings)
        self.bad, self.count = bad, -1  # the rehearsal comes first

    def loss(self, rollout, live):
        total, metrics = super().loss(rollout, live)
        self.count += 1
        return total * (torch.nan if self.count in self.bad else 1), {**metrics, "count": torch.tensor(float(self.count))}


def spoiled(bad: list[int], *overrides: str) -> list[str]:
    return ["train", *SMALL, f"agent._target_={__name__}.Spoiled", f"+agent.bad={bad}", *overrides]


def lines_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_skipped_updates_are_counted_and_left_out_of_the_means(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert cli.main([*spoiled([3, 4, 12]), "--run", str(run)]) == 0
    first, second = lines_of(run)
    assert (first["skipped"], second["skipped"]) == (2, 1)
    assert first["count"] == pytest.approx(sum(n for n in range(1, 11) if n not in (3, 4)) / 8)
    assert second["count"] == pytest.approx(sum(n for n in range(11, 21) if n != 12) / 9)
    # 4 and 12 ended with an update that was skipped
    assert sorted(folder.name for folder in (run / "checkpoints").iterdir()) == ["00000008", "00000016", "00000020"]


@pytest.mark.parametrize("log_every, stops", [(10, 12), (100, 12), (1, 11)])
def test_too_many_in_a_row_stop_the_run(log_every: int, stops: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, bad = tmp_path / "run", [1, 2, 4, 9, 10, 11, 12]
    arguments = spoiled(bad, "train.max_skipped=3", f"train.log_every={log_every}", "--run", str(run))
    assert cli.main(arguments) == 2
    line = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("segment-env:"))
    assert f"stopped at update {stops}: " in line and "updates in a row were skipped" in line
    assert f"the last good checkpoint is '{run / 'checkpoints' / '00000008'}'" in line
    assert checkpoint.damage_of(run / "checkpoints" / "00000008") is None


def test_a_learning_rate_that_destroys_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert cli.main(["train", *SMALL, "train.optimiser.lr=1e30", "train.optimiser.warmup=0", "--run", str(run)]) == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err and "updates in a row were skipped" in err


def test_a_window_without_an_update_that_was_made(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert cli.main([*spoiled([1, 2, 5], "train.log_every=2"), "--run", str(run)]) == 0
    first, second, third = lines_of(run)[:3]
    assert first["skipped"] == 2 and first["update"] == 2 and "bits_per_byte" not in first
    assert second["skipped"] == 0 and third["skipped"] == 1 and third["count"] == 6


def test_the_count_outlives_a_stop(tmp_path: Path) -> None:
    """Two skipped before the stop and one after are three in a row."""
    settings = config.load([*spoiled([9, 10, 11], "train.max_skipped=3")[1:]])
    folder, run = training.begin(settings, tmp_path / "run"), training.Run(settings)
    run.rehearse()
    training.train(run, folder, progress=False, stop=lambda: run.agent.count == 10)
    again = training.Run(settings)
    again.agent.count = run.agent.count
    with pytest.raises(ValueError, match="stopped at update 12: 3 updates in a row .*last good checkpoint is .*00000008"):
        training.train(again, folder, checkpoint.find(folder), progress=False)
