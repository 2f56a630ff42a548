"""Figures of gradients: norms against arithmetic, signal and power against a law that is known."""

import math
from statistics import fmean, stdev

import pytest
import torch
from torch import nn

from agents import config, training
from agents.gradient_figures import gradient_norms, policy_signal

SIZE, ROWS, BYTES = 3, 6, 4
SEQUENCE = torch.tensor([7, 7, 9, 4, 4, 8])


@pytest.mark.parametrize("sequence", [SEQUENCE, torch.tensor([0, 1, 2, 3, 4, 4])], ids=["even", "odd"])
def test_signal_and_power_are_unbiased(sequence):
    """Means over 1,000 batches, each within 4.5 standard errors: a false alarm under fewer than 1 of 30,000 seeds.

    Rows of one sequence share their noise, so that halves which tore them apart would take it for signal.
    """
    torch.manual_seed(0)
    policy = nn.Linear(SIZE, 1, bias=False, dtype=torch.float64)
    h = torch.ones(ROWS, BYTES, SIZE, dtype=torch.float64)
    logits, choice = policy(h).squeeze(-1), torch.ones(ROWS, BYTES, dtype=torch.bool)
    _, index, counts = sequence.unique(return_inverse=True, return_counts=True)
    mean, found = 0.6, []
    for _ in range(1000):
        noise = torch.randn(len(counts), dtype=torch.float64)
        g = (mean + noise)[index, None].expand(ROWS, BYTES) / counts[index, None]  # sequences of equal weight
        figures = policy_signal(g, logits, choice, sequence, policy)
        found.append({key: float(value) for key, value in figures.items()})
    signal = SIZE * (mean * len(counts) / ROWS) ** 2
    power = signal + SIZE * len(counts) / ROWS**2
    for key, expected in {"policy_signal": signal, "policy_power": power}.items():
        values = [each[key] for each in found]
        error = stdev(values) / math.sqrt(len(values))
        assert abs(fmean(values) - expected) < 4.5 * error and error < 0.2 * expected, key


def test_what_teaches_nothing_has_no_signal():
    g, choice = torch.ones(ROWS, BYTES), torch.ones(ROWS, BYTES, dtype=torch.bool)
    assert policy_signal(g, torch.zeros(ROWS, BYTES), choice, SEQUENCE, nn.Identity()) == {}
    policy = nn.Linear(SIZE, 1)
    assert policy_signal(g, torch.zeros(ROWS, BYTES), choice, SEQUENCE, policy) == {}
    alone = policy_signal(g, policy(torch.ones(ROWS, BYTES, SIZE)).squeeze(-1), choice, torch.zeros(ROWS, dtype=torch.int64), policy)
    assert alone == {"policy_signal": 0.0, "policy_power": 0.0}, "there is nothing to compare with"


def test_norms():
    model, policy = nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False)
    model.weight.grad, policy.weight.grad = torch.tensor([[1.0, 2.0], [2.0, 4.0]]), torch.tensor([[3.0, 4.0]])
    assert gradient_norms(model, policy) == {"model_grad_norm": 5.0, "policy_grad_norm": 5.0}
    assert gradient_norms(nn.Linear(2, 2), object()) == {}


@pytest.mark.parametrize(("agent", "signal"), [("default", True), ("ppo", True), ("grpo", True), ("hnet", False), ("uniform", False)])
def test_what_a_learner_logs(agent, signal):
    settings = config.load([f"agent={agent}", "data.length=32", "train.rows=8", "train.bytes=512", "train.optimiser.precision=float32"])
    run = training.Run(settings)
    learner = run.learner()
    metrics = learner.update(next(run.batches(learner)))
    assert {"grad_norm", "model_grad_norm"} <= metrics.keys()
    assert ("policy_signal" in metrics, "policy_power" in metrics) == (signal, signal)
    assert ("policy_grad_norm" in metrics) == (agent != "uniform")
    if agent == "default":  # nothing but model and policy has parameters
        parts = float(metrics["model_grad_norm"] ** 2 + metrics["policy_grad_norm"] ** 2)
        assert parts == pytest.approx(float(metrics["grad_norm"] ** 2), rel=1e-5)
