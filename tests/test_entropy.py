"""The entropy rule: a threshold that reaches its rate, moves with the head, and is kept."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from worlds import make_env

from agents import checkpoint, config, training
from agents.entropy import Entropy, entropy, threshold_for
from models import ByteUNet
from segment_env.actor import Actor
from segment_env.batch import Samples, pack
from segment_env.boundaries import is_choice
from segment_env.errors import UserError
from segment_env.streams import TextStream, crops, moby_dick
from segment_env.unroll import unroll

DATA = moby_dick().split("validation")[:4096]
SMALL = ["data.length=64", "train.rows=8", "train.bytes=8192", "train.validations=2", "train.validation_bytes=2048"]
SMALL += ["train.optimiser.precision=float32", "train.device=cpu", "train.log_every=1", "train.checkpoint_every=8"]


def known() -> list:
    return list(crops(DATA, 128, 16))


@pytest.fixture(scope="module")
def unet() -> ByteUNet:
    """An early head that is unsure in some places and not in others."""
    torch.manual_seed(3)
    model = ByteUNet("nano").double()
    nn.init.normal_(model.early_head.weight, std=0.5)
    return model


def rate_of(rule: Entropy, model: ByteUNet, batches: list) -> float:
    rollouts = [unroll(model, rule, batch, Samples([1] * len(batch.bytes)))[0] for batch in batches]
    return float(torch.cat([rollout["action"][rollout["is_choice"]] for rollout in rollouts]).double().mean())


def test_entropy_by_hand() -> None:
    p = torch.tensor([[0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0], [0.5, 0.25, 0.25, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(entropy(p.log()), torch.tensor([2.0, 0.0, 1.5], dtype=torch.float64) * math.log(2))


@pytest.mark.parametrize("monotonic", [False, True])
def test_what_starts_where(monotonic: bool) -> None:
    """H in bits 0 2 2 3 1 3, theta half a bit of them: 1 for the value, 0.5 for the rise; what stands at t = 0 is ignored."""
    log_p = torch.full((1, 6, 256), -math.inf, dtype=torch.float64)
    for t, bits in enumerate([0, 2, 2, 3, 1, 3]):
        log_p[0, t, : 1 << bits] = -bits * math.log(2)
    rule = Entropy(0.5, monotonic)
    rule.theta.fill_((0.5 if monotonic else 1.5) * math.log(2))
    action = rule.parallel(None, torch.zeros(1, 6), None, log_p).action
    assert action[0, 1:].tolist() == ([True, False, True, False, True] if monotonic else [True, True, True, False, True])


@pytest.mark.parametrize("monotonic", [False, True])
@pytest.mark.parametrize("rate", [0.05, 0.2, 0.7])
def test_it_reaches_its_rate_on_the_validation_bytes(unet: ByteUNet, monotonic: bool, rate: float) -> None:
    rule, batches = Entropy(rate, monotonic), known()
    assert rate_of(rule, unet, batches[:1]) == 0, "before calibration nothing starts"
    rule.calibrate(unet, batches)
    choices = int(sum(is_choice(batch.valid).sum() for batch in batches))
    assert rate_of(rule, unet, batches) == pytest.approx(rate, abs=2 / choices)
    assert 0.3 * rate < rate_of(rule, unet, list(crops(moby_dick().split("test")[:1024], 128, 16))) < min(1, 3 * rate)


def test_theta_follows_the_head(unet: ByteUNet) -> None:
    rule = Entropy(0.2)
    rule.calibrate(unet, known())
    before, weight = rule.theta.clone(), unet.early_head.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.mul_(2)  # surer
    stale = rate_of(rule, unet, known())
    rule.calibrate(unet, known())
    assert rule.theta < before and abs(stale - 0.2) > 0.05
    assert rate_of(rule, unet, known()) == pytest.approx(0.2, abs=1e-3)
    with torch.no_grad():
        weight.copy_(kept)
    assert rule.theta.requires_grad is False and not list(rule.parameters())


@pytest.mark.parametrize("monotonic", [False, True])
def test_inside_the_nano_unet_both_faces_agree_and_read_the_past(unet: ByteUNet, monotonic: bool) -> None:
    rule, length = Entropy(0.3, monotonic), 48
    rule.calibrate(unet, known())
    env = make_env(unet, (2, 1), length, TextStream(DATA), seed=1)
    with torch.no_grad():
        stepped = env.rollout(length, Actor(rule, unet))
    parallel, _ = unroll(unet, rule, env.batch, env.samples)
    assert torch.equal(stepped["action"], parallel["action"]) and 0.1 < parallel["action"].double().mean() < 0.6
    text = DATA[:60].numpy().tobytes()
    whole = unroll(unet, rule, pack([text]), Samples([1]))[0]["action"][0]
    for n in range(0, 59, 7):
        other = unroll(unet, rule, pack([text[:n] + bytes(30)]), Samples([1]))[0]["action"][0]
        assert torch.equal(whole[: n + 1], other[: n + 1])


# --- thresholds ---


def test_thresholds_by_hand() -> None:
    scores = torch.tensor([4.0, 1.0, 3.0, 2.0, 5.0])
    assert [float(threshold_for(scores, rate)) for rate in (0.2, 0.4, 0.8)] == [4.5, 3.5, 1.5]
    ties = torch.tensor([1.0, 1.0, 1.0, 2.0])
    assert float(threshold_for(ties, 0.9)) == 1.5, "the only rate that can be had is a quarter"
    assert threshold_for(ties, 0.1).dtype == torch.float64


@pytest.mark.parametrize(
    "scores, says",
    [
        (torch.tensor([]), "has no validation bytes to be calibrated on"),
        (torch.ones(9), "no threshold of agent.policy gives the rate 0.2: the early head is equally unsure everywhere"),
        (torch.tensor([1.0, math.nan]), "the early head's predictions are no numbers"),
    ],
)
def test_what_has_no_threshold(scores: Tensor, says: str) -> None:
    with pytest.raises(UserError, match=says):
        threshold_for(scores, 0.2)
    with pytest.raises(UserError, match="no validation bytes"):
        Entropy(0.2).calibrate(None, [])


# --- in the trainer ---


@pytest.mark.parametrize("name", ["entropy", "entropy_rise"])
def test_training_calibrates_and_a_checkpoint_keeps(name: str, tmp_path: Path) -> None:
    settings = config.load([f"agent={name}", *SMALL])
    run = training.Run(settings)
    untrained = float(run.agent.policy.theta)
    folder = training.begin(settings, tmp_path / "run")
    training.train(run, folder, progress=False)
    theta = float(run.agent.policy.theta)
    assert math.isfinite(untrained) and math.isfinite(theta) and theta != untrained
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    held_out = [line["validation_rate"] for line in lines if "validation_rate" in line]
    assert len(held_out) == 2 and held_out == pytest.approx([0.2, 0.2], abs=2e-3)
    *_, saved = sorted(folder.glob("checkpoints/*/agent.safetensors"))
    assert float(load_file(saved)["policy.theta"]) == theta
    opened = training.open_run(folder)
    assert float(opened.agent.policy.theta) == theta
    assert opened.evaluate("test", 2048) == run.evaluate("test", 2048)


def test_a_resumed_run_ends_as_one_that_was_not_stopped(tmp_path: Path) -> None:
    """Thetas of the updates in between are those of the checkpoint, not fitted anew."""
    settings = config.load(["agent=entropy", *SMALL])
    whole, stopped = training.begin(settings, tmp_path / "whole"), training.begin(settings, tmp_path / "stopped")
    training.train(training.Run(settings), whole, progress=False)

    class Stop(Exception):
        pass

    def stop(update: int) -> None:
        if update == 12:
            raise Stop

    run = training.Run(settings)
    learner = run.learner()
    run.learner = lambda: learner
    update, made = learner.update, []
    learner.update = lambda batch: (made.append(1), stop(len(made)), update(batch))[-1]
    with pytest.raises(Stop):
        training.train(run, stopped, progress=False)
    assert [folder.name for folder in (stopped / "checkpoints").iterdir()] == ["00000008"]
    training.train(training.Run(settings), stopped, checkpoint.find(stopped), progress=False)
    for name in ("model", "agent"):
        one, other = (load_file(folder / f"checkpoints/00000016/{name}.safetensors") for folder in (whole, stopped))
        assert all(torch.equal(one[key], other[key]) for key in one)
