"""Sampling in passes over blocks is the sequential sample, bit for bit."""

import pytest
import torch
from torch import Tensor, float32, float64
from worlds import SCORERS, RaggedStream, make_env

from agents import sampling
from agents.policies import WindowPolicy
from agents.sampling import modulated, pinned, settle, shifted, walk
from segment_env.actor import Actor
from segment_env.scorer import Observation
from segment_env.unroll import unroll

KINDS = ["weak", "strong", "stride", "alternating", "copy", "chaotic", "ties"]


def problem(kind: str, seed: int, rows: int, length: int, n_past: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scores [B, T, 1+n] and thresholds [B, T], the first of which is always passed."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, length, 1 + n_past, generator=generator, dtype=float64)
    threshold = torch.rand(rows, length, generator=generator, dtype=float64).logit()
    if kind == "strong":
        scores = 8 * scores
    elif kind == "stride":
        scores = torch.tensor([30.0, *[-60.0] * n_past], dtype=float64).expand_as(scores)
    elif kind == "alternating":
        scores = torch.tensor([30.0, -60.0, *[0.0] * (n_past - 1)], dtype=float64).expand_as(scores)
    elif kind == "copy":  # of a[t-1], with a rare mistake
        scores = torch.tensor([-5.0, 10.0, *[0.0] * (n_past - 1)], dtype=float64).expand_as(scores)
    elif kind == "chaotic":  # every past decision may decide
        scores = 50 * scores.sign() * torch.arange(1, 2 + n_past)
    elif kind == "ties":
        scores, threshold = scores.round(), threshold.round()
    threshold[:, 0] = -torch.inf
    return scores.to(dtype), threshold.to(dtype)


def by_definition(scores: Tensor, threshold: Tensor) -> Tensor:
    """A plain loop."""
    rows, length, depth = scores.shape
    starts = torch.zeros(rows, length + depth - 1, dtype=scores.dtype)
    for t in range(length):
        past = starts[:, t : t + depth - 1].flip(-1).unbind(-1)
        starts[:, t + depth - 1] = modulated(scores[:, t].unbind(-1), past) > threshold[:, t]
    return starts[:, depth - 1 :] > 0


def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Shapes [T, B] that :func:`walk` is called with from now on, as they come."""
    shapes: list[tuple[int, int]] = []
    real = sampling.walk

    def counted(scores: Tensor, *rest: Tensor) -> Tensor:
        shapes.append((scores.shape[1], scores.shape[0]))
        return real(scores, *rest)

    monkeypatch.setattr(sampling, "walk", counted)
    return shapes


# --- settle ---


@pytest.mark.parametrize("dtype", [float32, float64])
@pytest.mark.parametrize("kind", KINDS)
def test_all_forms_agree_bit_for_bit(kind: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(KINDS.index(kind))
    for seed in range(25):
        rows, length, n_past, block = (int(torch.randint(1, top + 1, (), generator=generator)) for top in (5, 200, 9, 40))
        scores, threshold = problem(kind, seed, rows, length, n_past, dtype)
        expected = by_definition(scores, threshold)
        assert torch.equal(walk(scores, threshold), expected), (rows, length, n_past)
        assert torch.equal(settle(scores, threshold, block), expected), (rows, length, n_past, block)
        assert expected[:, 0].all()


@pytest.mark.parametrize("length", [1, 2, 7, 10])
def test_a_window_longer_than_the_sequence(length: int) -> None:
    scores, threshold = problem("strong", 0, 3, length, 9, float64)
    assert torch.equal(settle(scores, threshold), by_definition(scores, threshold))


def test_what_it_samples() -> None:
    scores, threshold = problem("stride", 0, 2, 400, 4, float32)
    assert settle(scores, threshold)[1].nonzero().squeeze(1).tolist() == list(range(0, 400, 5))
    scores, threshold = problem("alternating", 0, 1, 400, 3, float32)
    assert settle(scores, threshold)[0].nonzero().squeeze(1).tolist() == list(range(0, 400, 2))


def test_the_confident_are_not_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    scores, threshold = problem("weak", 0, 4, 4096, 7, float32)
    scores[..., 0] *= 4
    expected, walked = walk(scores, threshold), calls(monkeypatch)
    assert torch.equal(settle(scores, threshold), expected)
    assert not walked


def test_a_long_chain_is_walked_from_where_it_has_not_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """No block of 64 forgets where a stride of 5 began; the passes before have settled a block each."""
    scores, threshold = problem("stride", 0, 32, 4096, 4, float32)
    expected, walked = walk(scores, threshold), calls(monkeypatch)
    assert torch.equal(settle(scores, threshold), expected)
    ((length, rows),) = walked
    assert rows == 32 and 2048 < length < 4096 and length % sampling.BLOCK == 0


def test_a_row_that_does_not_settle_leaves_the_others_right(monkeypatch: pytest.MonkeyPatch) -> None:
    chain, mixed = (problem(kind, 0, rows, 3000, 4, float64) for kind, rows in (("stride", 1), ("weak", 3)))
    scores, threshold = (torch.cat([mixed[i][:2], chain[i], mixed[i][2:]]) for i in range(2))
    expected, walked = walk(scores, threshold), calls(monkeypatch)
    assert torch.equal(settle(scores, threshold), expected)
    assert len(walked) == 1


def test_pins() -> None:
    scores, threshold = problem("strong", 1, 3, 300, 3, float32)
    where, decisions = torch.rand(2, 3, 300) < 0.3
    starts = settle(scores, pinned(threshold, where, decisions), 32)
    assert torch.equal(starts[where], decisions[where])
    assert starts[~where].any() and not starts[~where].all()


def test_shifted_on_a_literal() -> None:
    assert [view.tolist() for view in shifted(torch.tensor([[True, False, True]]), 2, float32)] == [[[0, 1, 0]], [[0, 0, 1]]]


# --- the policy ---


def policy_and_inputs(n_past: int, dtype: torch.dtype, scale: float = 12.0, length: int = 300) -> tuple[WindowPolicy, Tensor, Tensor]:
    """A policy with random weights, h [B, T, D] and noise [B, T]."""
    generator = torch.Generator().manual_seed(n_past)
    policy = WindowPolicy(6, 0.3, n_past).to(dtype)
    with torch.no_grad():
        policy.weight.normal_(std=scale, generator=generator)
    h = torch.randn(4, length, 6, generator=generator, dtype=float64).to(dtype)
    return policy, h, torch.rand(4, length, generator=generator)


def stepped(policy: WindowPolicy, h: Tensor, noise: Tensor, soft_cap: float | None) -> Tensor:
    """Starts [B, T] of ``step``, a position at a time."""
    rows, length, _ = h.shape
    starts = torch.zeros(rows, length + policy.n_past, dtype=torch.bool)
    starts[:, policy.n_past] = True
    zero = torch.zeros(rows, dtype=torch.int64)
    for t in range(1, length):
        recent = starts[:, t : t + policy.n_past].flip(-1).long()
        _, decision = policy.step((), Observation(h[:, t], zero, zero, recent, noise[:, t], None), soft_cap=soft_cap)
        starts[:, t + policy.n_past] = decision.action
    return starts[:, policy.n_past :]


@pytest.mark.parametrize("soft_cap", [None, 6.0, 1.0])
@pytest.mark.parametrize("n_past", [1, 2, 7, 9])
def test_the_policy_samples_what_it_steps(n_past: int, soft_cap: float | None) -> None:
    policy, h, noise = policy_and_inputs(n_past, float64, scale=24.0)
    assert torch.equal(policy.parallel(h, None, noise, soft_cap=soft_cap).action, stepped(policy, h, noise, soft_cap))


@pytest.mark.parametrize("soft_cap", [None, 6.0])
@pytest.mark.parametrize("dtype", [float32, float64])
def test_it_acts_by_its_own_logits_bit_for_bit(dtype: torch.dtype, soft_cap: float | None) -> None:
    policy, h, noise = policy_and_inputs(7, dtype)
    decision = policy.parallel(h, None, noise, soft_cap=soft_cap)
    assert torch.equal(decision.action[:, 1:], (noise < decision.logits.sigmoid())[:, 1:])
    replayed = policy.parallel(h, None, noise, soft_cap=soft_cap, actions=decision.action)
    assert torch.equal(replayed.logits, decision.logits)


@pytest.mark.parametrize("soft_cap", [None, 6.0])
def test_a_threshold_that_rounds_otherwise_is_corrected(soft_cap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, h, noise = policy_and_inputs(7, float64)
    expected = policy.parallel(h, None, noise, soft_cap=soft_cap)
    exact, rough = WindowPolicy._threshold, torch.randn(noise.shape, dtype=float64, generator=torch.Generator().manual_seed(0))
    settled: list[Tensor] = []
    monkeypatch.setattr(WindowPolicy, "_threshold", lambda self, *given: exact(self, *given) + rough)
    monkeypatch.setattr("agents.policies.settle", lambda *given: (settled.append(settle(*given)), settled[-1])[1])
    corrected = policy.parallel(h, None, noise, soft_cap=soft_cap)
    assert torch.equal(corrected.action, expected.action) and torch.equal(corrected.logits, expected.logits)
    assert 2 < len(settled) < 50 and not torch.equal(settled[0], expected.action)


def test_logits_that_are_no_numbers_end() -> None:
    policy, h, noise = policy_and_inputs(3, float32)
    h[0, 100:], h[1, 50], h[2, 7] = torch.nan, torch.inf, -torch.inf
    assert policy.parallel(h, None, noise).action.shape == noise.shape


@pytest.mark.parametrize("name", ["table", "unet"])
@pytest.mark.parametrize("soft_cap", [None, 6.0])
def test_both_faces_agree_over_many_blocks(name: str, soft_cap: float | None) -> None:
    """Rows end at different places; what stands in their padding moves nothing."""
    scorer, length = SCORERS[name](), 150
    policy = WindowPolicy(scorer.width, 0.4, 5)
    torch.nn.init.normal_(policy.weight, std=16.0)
    env = make_env(scorer, (2, 1, 1), length, RaggedStream(length, 140, 70), n_past=5)
    with torch.no_grad():
        seen = env.rollout(length, Actor(policy, scorer, soft_cap), break_when_all_done=True, break_when_any_done=False)
    rollout, live = unroll(scorer, policy, env.batch, env.samples, soft_cap=soft_cap)
    valid = rollout["valid"]
    for key in ("action", "recent"):
        assert torch.equal(seen[key][valid], rollout[key][valid])
    torch.testing.assert_close(seen["logits"][valid], rollout["logits"][valid], rtol=1e-5, atol=1e-5)
    live.logits.sum().backward()
    assert policy.weight.grad.abs().amax(1).min() > 0
