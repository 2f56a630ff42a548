"""Agents that learn through a gate: their policies and rate losses by formula, both faces, causality, and where gradients go.

Letters: B rows, T bytes, D width.
"""

import math
from functools import partial

import pytest
import torch
from torch import Tensor, float32, float64
from torch.distributions import Binomial
from torch.utils.flop_counter import FlopCounterMode
from worlds import RaggedStream, Replayed, Stepped, make_env, tiny_unet

from agents.agent import Given
from agents.calibration import offset_for
from agents.evaluation import evaluate
from agents.gumbel import GumbelPolicy
from agents.learner import Learner
from agents.policies import WindowPolicy
from agents.rate_losses import binomial_prior, hinge_band, ratio_loss
from agents.rates import PI
from agents.routing import CosineRouting
from agents.rules import UniformStride
from agents.straight_through import StraightThrough
from models.mean_pooling import MeanAdd
from models.smoothing import SelectSmooth
from models.unet import ByteUNet
from segment_env.actor import Actor
from segment_env.batch import Batch, Samples, pack
from segment_env.closed_form import CountingStream, TableScorer
from segment_env.collector import SegmentCollector
from segment_env.errors import UserError
from segment_env.scorer import Observation
from segment_env.streams import moby_dick
from segment_env.unroll import unroll

WIDTH, LENGTH = 32, 13
RAGGED = RaggedStream(LENGTH, 1, 6, 12)
DOCUMENTS = ["Call me Ishmael — some years ago".encode(), b"a", b"\xff\x00", b"never mind how long"]


def routing(dtype: torch.dtype = float64, trained: bool = True) -> CosineRouting:
    policy = CosineRouting(WIDTH).to(dtype)
    if trained:  # untrained it starts hardly any segment in an untrained model
        with torch.no_grad():
            policy.query.normal_()
    return policy


def gumbel(dtype: torch.dtype = float64, trained: bool = True) -> GumbelPolicy:
    policy = GumbelPolicy(WIDTH, 0.3).to(dtype)
    if trained:
        torch.nn.init.normal_(policy.last.weight)
    return policy


PAIRS = {"hnet": (routing, SelectSmooth), "gumbel": (gumbel, MeanAdd)}
RATE_LOSSES = {"hnet": partial(ratio_loss, target=0.3), "gumbel": partial(binomial_prior, target=0.3)}


def unet_of(name: str, dtype: torch.dtype = float64) -> ByteUNet:
    unet = tiny_unet(dtype, PAIRS[name][1])
    if name == "hnet":
        with torch.no_grad():
            unet.pooling.residual.normal_(std=WIDTH**-0.5)
    return unet


@pytest.fixture(params=PAIRS)
def name(request) -> str:
    return request.param


def row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=float64)


# --- routing and relaxed samples, by formula ---


def test_routing_probabilities() -> None:
    """h at 0, 90, 0 and 180 degrees of the one before: cosines 0, 1, -1."""
    policy = CosineRouting(2).double()
    h = torch.tensor([[[3.0, 0], [0, 2], [0, 5], [0, -1]]], dtype=float64)
    decision = policy.parallel(h, torch.zeros(1, 4).long(), torch.rand(1, 4))
    torch.testing.assert_close(decision.gate, row(1, 0.5, 0, 1), rtol=0, atol=1e-15)
    assert decision.action.tolist() == [[True, True, False, True]] and decision.logits is None  # a tie starts a segment
    with torch.no_grad():  # W_q reads h[t], W_k h[t-1]: 90 degrees the one way, 45 the other
        policy.query.copy_(torch.tensor([[0.0, 1], [-1, 0]]))
        policy.key.copy_(torch.tensor([[1.0, 1], [0, 1]]))
    h = torch.tensor([[[0.0, 1], [1, 0]]], dtype=float64)  # q = (0, -1), k = (1, 1)
    torch.testing.assert_close(policy.parallel(h, None, None).gate[0, 1], torch.tensor((1 + math.sqrt(0.5)) / 2, dtype=float64))


def test_routing_begins_as_the_identity_and_learns_both_matrices() -> None:
    policy = CosineRouting(3)
    assert torch.equal(policy.query, torch.eye(3)) and torch.equal(policy.key, torch.eye(3))
    policy.parallel(torch.randn(2, 9, 3), None, None).gate.sum().backward()
    assert policy.query.grad.any() and policy.key.grad.any()


def test_relaxed_bernoulli_at_a_fixed_draw() -> None:
    """sigmoid((log(1/4) - logit(u)) / 0.5) = 1 / (1 + (4 u / (1 - u))^2)."""
    policy = GumbelPolicy(2, 0.2).double()
    noise = row(0.1, 0.19, 0.21, 0.5)
    decision = policy.parallel(torch.randn(1, 4, 2, dtype=float64), None, noise)
    expected = [1 / (1 + (4 * u / (1 - u)) ** 2) for u in noise[0].tolist()]
    torch.testing.assert_close(decision.gate, row(*expected), rtol=0, atol=1e-14)
    assert decision.action.tolist() == [[True, True, False, False]]
    torch.testing.assert_close(decision.logits.sigmoid(), row(0.2, 0.2, 0.2, 0.2))


def test_the_relaxed_sample_is_above_a_half_where_the_action_is_one() -> None:
    policy, h, noise = gumbel(), torch.randn(20, 50, WIDTH, dtype=float64), torch.rand(20, 50, dtype=float64)
    decision = policy.parallel(h, None, noise)
    assert torch.equal(decision.gate > 0.5, decision.action) and torch.equal(decision.action, noise < decision.logits.sigmoid())
    assert 0.1 < decision.action.double().mean() < 0.9
    (grad,) = torch.autograd.grad(decision.gate.sum(), policy.last.bias)
    s = decision.gate
    torch.testing.assert_close(grad, (s * (1 - s) / 0.5).sum().view(1))


# --- rate losses, by formula ---


def test_ratio_loss() -> None:
    """N = 5, three choices: F = 1/3, G = 0.5: 1.25 (4/6 + 2/6) = 1.25; dL/dG = 1.25 (4 F - (1 - F)) = 5/6, a third each."""
    gate, choice = row(9.0, 0.9, 0.4, 0.2).requires_grad_(), torch.tensor([[False, True, True, True]])
    loss = ratio_loss(gate, torch.tensor([[True, True, False, False]]), choice, 0.2)
    loss.backward()
    torch.testing.assert_close(loss, torch.tensor(1.25, dtype=float64))
    torch.testing.assert_close(gate.grad, row(0, 5 / 18, 5 / 18, 5 / 18))


def test_ratio_loss_at_the_target() -> None:
    gate, choice = torch.full((2, 5), 0.2, dtype=float64, requires_grad=True), torch.ones(2, 5, dtype=torch.bool)
    starts = torch.tensor([[1, 0, 0, 0, 0], [0, 0, 1, 0, 0]]).bool()
    loss = ratio_loss(gate, starts, choice, 0.2)
    loss.backward()
    torch.testing.assert_close(loss, torch.tensor(1.0, dtype=float64))
    assert gate.grad.abs().max() < 1e-15
    with torch.no_grad():
        assert ratio_loss(gate, starts & False, choice, 0.2).item() == pytest.approx(1.0)  # G at the target: whatever F is
        assert ratio_loss(gate + 0.2, starts & False, choice, 0.2).item() == pytest.approx(0.75)  # no start, and p above the target


def test_binomial_prior() -> None:
    """Rows of 4, 2 and 0 choices with 1, 2 and 0 starts; all of one length: their mean over N, as in Nawrot's code."""
    choice = torch.tensor([[0, 1, 1, 1, 1], [0, 1, 1, 0, 0], [0, 0, 0, 0, 0]]).bool()
    starts = torch.tensor([[1, 0, 1, 0, 0], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]]).bool()
    gate = torch.rand(3, 5, dtype=float64, requires_grad=True)
    loss = binomial_prior(gate, starts, choice, 0.2)
    loss.backward()
    one, two = 4 * 0.2 * 0.8**3, 0.2**2
    torch.testing.assert_close(loss, torch.tensor(-(math.log(one) + math.log(two)) / 6, dtype=float64))
    k, n, psi = torch.tensor([1.0, 2.0], dtype=float64), torch.tensor([4.0, 2.0], dtype=float64), torch.digamma
    slope = (psi(k + 1) - psi(n - k + 1) - math.log(0.2 / 0.8)) / 6
    torch.testing.assert_close(gate.grad, torch.where(choice, torch.cat([slope, slope.new_zeros(1)])[:, None], 0.0))
    whole, draws = torch.ones(7, 30, dtype=torch.bool), torch.rand(7, 30) < 0.3
    expected = -Binomial(30, torch.tensor(0.2, dtype=float64)).log_prob(draws.sum(-1).double()).mean() / 30
    torch.testing.assert_close(binomial_prior(torch.rand(7, 30, dtype=float64), draws, whole, 0.2), expected)


def test_hinge_band() -> None:
    """Rates 1/4, 1/2 and 0 against [0.2, 0.3]: 0, 0.2 and 0.2, and a row without choices counts for nothing."""
    choice = torch.ones(4, 4, dtype=torch.bool)
    choice[3] = False
    starts = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]]).bool()
    gate = torch.rand(4, 4, dtype=float64, requires_grad=True)
    loss = hinge_band(gate, starts, choice, 0.3, 0.1)
    loss.backward()
    torch.testing.assert_close(loss, torch.tensor(0.4 / 3, dtype=float64))
    torch.testing.assert_close(gate.grad[:, 0], row(0, 1 / 12, -1 / 12, 0)[0])
    with pytest.raises(UserError, match="must be between 0 and 0.3 wide, got 0.4"):
        hinge_band(gate, starts, choice, 0.3, 0.4)


@pytest.mark.parametrize("loss", [ratio_loss, binomial_prior, partial(hinge_band, width=0.05)])
def test_a_rate_loss_ignores_what_is_no_choice(loss) -> None:
    choice, starts = torch.rand(5, 9) < 0.6, torch.rand(5, 9) < 0.4
    choice[3] = False
    gate = torch.rand(5, 9, dtype=float64)
    found = []
    for rubbish, other in ((gate, starts), (torch.where(choice, gate, torch.nan), torch.where(choice, starts, ~starts))):
        free = rubbish.clone().requires_grad_()
        value = loss(free, other, choice, target=0.2)
        found.append((value.detach(), torch.autograd.grad(value, free)[0]))
    assert all(torch.equal(one, two) and one.isfinite().all() for one, two in zip(*found, strict=True))
    nothing = loss(gate.requires_grad_(), starts, choice & False, target=0.2)
    assert nothing.isfinite() and not torch.autograd.grad(nothing, gate)[0].any()
    with pytest.raises(UserError, match="strictly between 0 and 1"):
        loss(gate, starts, choice, target=1.5)


# --- both faces, and nothing of the future ---


def play(name: str, dtype: torch.dtype = float64, stream=RAGGED, replay: bool = False):
    """The same trajectories from the environment, a byte at a time, and from unroll."""
    scorer, policy = unet_of(name, dtype), PAIRS[name][0](dtype)
    env = make_env(scorer, (2, 1, 1), LENGTH, stream)
    actions = torch.rand(4, LENGTH) < 0.4 if replay or dtype == float32 else None  # in float32 a threshold may flip by rounding
    actor = Actor(policy if actions is None else Replayed(policy, actions), scorer)
    with torch.no_grad():
        stepped = env.rollout(LENGTH, actor, break_when_all_done=True, break_when_any_done=False)
        parallel, live = unroll(scorer, policy, env.batch, env.samples, actions=actions)
    return stepped, parallel, live


@pytest.mark.parametrize("dtype", [float64, float32])
@pytest.mark.parametrize("replay", [False, True])
def test_stepwise_is_parallel(name: str, dtype: torch.dtype, replay: bool) -> None:
    stepped, parallel, live = play(name, dtype, replay=replay)
    assert set(parallel.keys(True, True)) == set(stepped.keys(True, True)) - {"_step"} and "gate" in parallel
    valid, tolerance = parallel["valid"], 1e-12 if dtype == float64 else 2e-5
    for key in parallel.keys(True, True):
        one, other = stepped[key], parallel[key]
        assert one.dtype == other.dtype and one.shape == other.shape, key
        torch.testing.assert_close(one[valid], other[valid], rtol=0, atol=tolerance, msg=lambda text, key=key: f"{key}: {text}")
    assert 0.1 < parallel["action"][parallel["is_choice"]].double().mean() < 0.9
    assert torch.equal(live.gate[:, 0], valid[:, 0].to(dtype)) and not live.gate[~valid].any()
    assert torch.equal(live.gate, parallel["gate"])


def test_a_policy_stepped_inside_unroll(name: str) -> None:
    scorer, policy, batch, samples = unet_of(name), PAIRS[name][0](), pack(DOCUMENTS), Samples([2, 1, 1, 1])
    whole, walked = (unroll(scorer, each, batch, samples)[0] for each in (policy, Stepped(policy)))
    for key in whole.keys(True, True):
        torch.testing.assert_close(walked[key], whole[key], rtol=0, atol=1e-12)


@pytest.mark.parametrize("fast", [True, False])
def test_the_collector_hands_the_gate_on(name: str, fast: bool) -> None:
    scorer = unet_of(name)
    env = make_env(scorer, (2, 1), 12)
    collector = SegmentCollector(env, Actor(PAIRS[name][0](), scorer), total_frames=36, fast=fast)
    (rollout,) = collector
    assert rollout["gate"].shape == (3, 12) and not rollout["gate"].requires_grad
    collector.shutdown()


def test_boundaries_of_a_prefix(name: str) -> None:
    """boundaries(x[:n] + any bytes)[: n + 1] = boundaries(x)[: n + 1]."""
    scorer, policy = unet_of(name), PAIRS[name][0]()
    x = moby_dick().stream("train").sequences(0, torch.tensor([3]), 60)[0][0].tolist()
    starts = unroll(scorer, policy, pack([bytes(x)]), Samples([1]))[0]["action"][0].bool()
    for n in range(0, 59, 7):
        for later in ([(byte + 100) % 256 for byte in x[n:]], [0], [255] * 80):
            other = unroll(scorer, policy, pack([bytes(x[:n] + later)]), Samples([1]))[0]["action"][0].bool()
            assert torch.equal(other[: n + 1], starts[: n + 1][: len(other)])


def test_an_environment_without_an_actor_is_refused() -> None:
    env = make_env(unet_of("hnet"))
    with pytest.raises(UserError, match="reads a gate beside every action"):
        env.step(env.reset().set("action", torch.ones(3, dtype=torch.int64)))


@pytest.mark.parametrize(
    ("policy", "pooling", "says"),
    [
        (CosineRouting(WIDTH), None, "CosineRouting learns through its gate, which SelectAdd does not read"),
        (GumbelPolicy(WIDTH), None, "GumbelPolicy learns through its gate, which SelectAdd does not read"),
        (WindowPolicy(WIDTH), SelectSmooth, "SelectSmooth reads the gate of a policy, and WindowPolicy gives none"),
        (UniformStride(3), SelectSmooth, "SelectSmooth reads the gate of a policy, and UniformStride gives none"),
    ],
)
def test_a_gate_that_would_do_nothing_is_refused(policy, pooling, says: str) -> None:
    scorer = tiny_unet(float32, pooling)
    for attempt in (lambda: unroll(scorer, policy, pack([b"abc"]), Samples([1])), lambda: Actor(policy, scorer)):
        with pytest.raises(UserError, match=says) as error:
            attempt()
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="which TableScorer does not read"):
        unroll(TableScorer(), CosineRouting(8), pack([b"abc"]), Samples([1]))


def test_mean_pooling_goes_without_a_gate() -> None:
    rollout, live = unroll(tiny_unet(float32, MeanAdd), UniformStride(2), pack([b"abcdef"]), Samples([1]))
    assert live.gate is None and "gate" not in rollout and rollout["action"].tolist() == [[1, 0] * 3]


# --- runs of one byte ---


@pytest.mark.parametrize(("query", "expected"), [(1.0, 0.0), (-1.0, 1.0)])
def test_routing_in_a_run_of_one_byte(query: float, expected: float) -> None:
    """Once the windows hold nothing else h stands still: p is one number, and the whole run is one segment or all single bytes."""
    unet, policy = ByteUNet("nano").double(), CosineRouting(128).double()
    with torch.no_grad():
        policy.query.mul_(query)
    decision = policy.parallel(unet.encode(torch.full((1, 200), 32))[:, :-1], None, None)
    still = decision.gate[0, 1 + unet.size.window * unet.size.encoder :]
    torch.testing.assert_close(still, torch.full_like(still, expected), rtol=0, atol=1e-12)
    assert decision.action[0, -len(still) :].double().mean() == expected


# --- the agent ---


def agent_of(name: str, **settings) -> StraightThrough:
    return StraightThrough(PAIRS[name][0](), RATE_LOSSES[name], **{"rate_weight": 0.5, **settings})


def gradients(scorer, agent: StraightThrough, batch: Batch, counts: list[int], poison: bool = False) -> dict[str, Tensor]:
    """Of the joint loss, by name, and the loss."""
    rollout, live = unroll(scorer, agent.policy, batch, Samples(counts), encoder_grad=agent.encoder_grad)
    if poison:
        outside = ~rollout["valid"]
        rollout = rollout.clone()
        for leaf in rollout.values(True, True):
            if leaf.is_floating_point():
                leaf[outside] = torch.nan
        rollout["action"] = torch.where(outside, 93, rollout["action"])
    decide, metrics = agent.loss(agent.prepare(rollout), live)
    loss = live.nll.sum() / rollout["valid"].sum() + decide
    found = {f"{part}.{key}": value for part, module in (("m", scorer), ("a", agent)) for key, value in module.named_parameters()}
    grads = torch.autograd.grad(loss, list(found.values()), allow_unused=True)
    return {key: grad for key, grad in zip(found, grads, strict=True) if grad is not None} | {"loss": loss.detach(), **metrics}


def test_padding_is_nothing(name: str) -> None:
    """Nine columns and two rows that are nowhere valid, garbage in all of them: the same loss, statistics and gradients."""
    batch = pack(DOCUMENTS)
    more = torch.full((4, 9), 77)
    bytes_, valid = torch.cat([batch.bytes, more], 1), torch.cat([batch.valid, more < 0], 1)
    taller = Batch(
        torch.cat([bytes_, bytes_[:1]]),
        torch.cat([valid, valid[:1] & False]),
        torch.cat([batch.terminated, batch.terminated[:1]]),
        torch.cat([batch.sequence, batch.sequence[:1] + 9]),
        batch.seed,
    )
    scorer, agent = unet_of(name), agent_of(name)
    expected, got = gradients(scorer, agent, batch, [2, 1, 2, 1]), gradients(scorer, agent, taller, [2, 1, 2, 1, 2], poison=True)
    assert expected.keys() == got.keys() and len(expected) > 20
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value, rtol=1e-10, atol=1e-13, msg=lambda text, key=key: f"{key}: {text}")


def test_where_nothing_is_decided_nothing_is_learned(name: str) -> None:
    found = gradients(unet_of(name), agent_of(name), pack([b"a", b"b", b"\xc3"]), [1, 1, 1])
    assert all(value.isfinite().all() for value in found.values())
    assert not any(value.any() for key, value in found.items() if key.startswith("a."))


@pytest.mark.parametrize("encoder_grad", [True, False])
def test_the_language_models_loss_reaches_the_policy(name: str, encoder_grad: bool) -> None:
    scorer, batch = unet_of(name), pack(DOCUMENTS)
    with_gate = gradients(scorer, agent_of(name, rate_weight=0.0, encoder_grad=encoder_grad), batch, [1, 1, 1, 1])
    assert all(with_gate[f"a.policy.{key}"].any() for key, _ in PAIRS[name][0]().named_parameters())
    _, live = unroll(scorer, PAIRS[name][0](), batch, Samples([1, 1, 1, 1]), encoder_grad=encoder_grad)
    (through,) = torch.autograd.grad(live.gate.sum(), scorer.embedding.weight, allow_unused=True)
    assert (through is not None) == encoder_grad


def test_a_learner_trains_it(name: str) -> None:
    scorer, agent = unet_of(name).float(), agent_of(name).float()
    learner = Learner(scorer, agent, 4, 5, lr=1e-3, precision="bf16")
    before = [parameter.clone() for parameter in agent.parameters()]
    metrics = learner.update(pack([b"Call me Ishmael", b"Some years ago", b"n", b"ever mind"]))
    assert all(value.isfinite() for value in metrics.values()) and {"rate_loss", "gate", "rate"} <= metrics.keys()
    assert not any(torch.equal(old, new) for old, new in zip(before, agent.parameters(), strict=True))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: StraightThrough(WindowPolicy(4), RATE_LOSSES["hnet"], rate_weight=1.0), "WindowPolicy gives no gate to learn through"),
        (lambda: agent_of("hnet", soft_cap=6.0), "agent.epochs must be 1 and agent.soft_cap null, got 1 and 6.0"),
        (lambda: agent_of("hnet", epochs=2, encoder_grad=False), "agent.epochs must be 1 and agent.soft_cap null, got 2 and None"),
        (lambda: agent_of("hnet", rate=PI(0.2)), "agent.rate_loss holds the rate of a gate"),
        (lambda: agent_of("hnet", rate_weight=-1), "agent.rate_weight must be a number and not negative, got -1"),
        (lambda: GumbelPolicy(4, hidden_units=0), "hidden_units of at least 1 and a positive temperature, got 0 and 0.5"),
        (lambda: GumbelPolicy(4, temperature=0), "hidden_units of at least 1 and a positive temperature, got None and 0"),
        (lambda: GumbelPolicy(4, target=0), "strictly between 0 and 1"),
    ],
)
def test_what_is_refused(make, says: str) -> None:
    with pytest.raises(UserError, match=says):
        make()


# --- held out ---


def batches_of(rows: int = 4) -> list[Batch]:
    x, valid, terminated = CountingStream(6, 0.3).sequences(1, torch.arange(rows), 200)
    return [Batch(x, valid, terminated, torch.arange(rows), 1)]


def test_a_threshold_is_calibrated_to_a_rate(name: str) -> None:
    scorer, policy = unet_of(name), PAIRS[name][0]()
    before = evaluate(scorer, policy, batches_of(), CountingStream(6, 0.3))
    offset = offset_for(scorer, policy, batches_of(), 0.1)
    policy.offset += offset
    after = evaluate(scorer, policy, batches_of(), CountingStream(6, 0.3))
    assert abs(after["rate"] - 0.1) < (0.02 if name == "hnet" else 0.05) < abs(before["rate"] - 0.1)
    assert after["boundaries"] == {"hnet": "thresholded", "gumbel": "sampled, uncapped"}[name]


def test_given_boundaries_may_be_those_of_a_gated_policy(name: str) -> None:
    """A policy that is not trained may still cut: the language model learns alone."""
    learner = Learner(unet_of(name).float(), Given(PAIRS[name][0](float32)), 2, 2)
    assert all(value.isfinite() for value in learner.update(pack([b"Call me", b"Ishmael"])).values())


@pytest.mark.parametrize("policy", [CosineRouting(WIDTH), GumbelPolicy(WIDTH), GumbelPolicy(WIDTH, hidden_units=7)])
def test_flops_are_those_that_torch_counts(policy) -> None:
    with FlopCounterMode(display=False) as counter:
        policy.parallel(torch.randn(2, 33, WIDTH), None, torch.rand(2, 33))
    positions = 64 if isinstance(policy, CosineRouting) else 66  # there is no pair at t = 0
    assert counter.get_total_flops() == policy.flops_per_byte() * positions


def test_steps_of_routing_remember_one_state() -> None:
    policy, h = routing(), torch.randn(2, 6, WIDTH, dtype=float64)
    whole, state, zero = policy.parallel(h, None, None), policy.init(2), torch.zeros(2, dtype=torch.int64)
    for t in range(6):
        byte = torch.full((2,), 256 if t == 0 else 65)
        state, decision = policy.step(state, Observation(h[:, t], byte, zero, None, torch.rand(2), None))
        torch.testing.assert_close(decision.gate, whole.gate[:, t], rtol=0, atol=1e-14)
