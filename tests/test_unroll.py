"""Stepwise = parallel: what `unroll` computes in one pass is what the environment gives byte by byte."""

import pytest
import torch
from torch import float32, float64
from worlds import SCORERS, RaggedStream, Replayed, Stepped, Surprised, make_env

from agents.policies import WindowPolicy
from agents.rules import IidRandom, UniformStride
from segment_env.actor import Actor
from segment_env.batch import Samples, pack
from segment_env.masking import mask_invalid
from segment_env.scorer import Decision
from segment_env.unroll import action_log_prob, unroll

LENGTH = 13  # no multiple of the byte U-Net's window
TOLERANCE = {float64: {"rtol": 0, "atol": 1e-12}, float32: {"rtol": 1e-5, "atol": 1e-5}}
RAGGED = RaggedStream(LENGTH, 1, 6, 12)


def window_policy(scorer, n_past, device="cpu"):
    """Random weights: its decisions depend on h and, with ``n_past``, on each other."""
    policy = WindowPolicy(scorer.width, 0.4, n_past)
    torch.nn.init.normal_(policy.weight, std=16.0)
    return policy.to(device)


class Confident:
    """A rule that reads the early head and hands on a gate: a parallel and a stepwise form of the same decision."""

    n_past, reads_early_log_p = 0, True

    def parallel(self, h, x, noise, early_log_p, *, soft_cap=None, actions=None):
        logits = early_log_p.max(-1).values + 2
        return Decision(noise < logits.sigmoid() if actions is None else actions, logits)

    def init(self, num_rows):
        return ()

    def step(self, state, observation, *, soft_cap=None):
        return state, self.parallel(None, None, observation.noise, observation.early_log_p)


def boundaries(kind, rows):
    """Actions to replay [B, T], or None to sample."""
    draw = torch.rand(rows, LENGTH, generator=torch.Generator().manual_seed(1))
    return {"none": draw < 0, "everywhere": draw < 2, "random": draw < 0.4, "sampled": None}[kind]


def both(scorer, policy, counts, kind="sampled", stream=RAGGED, soft_cap=None, price=0.0, device="cpu"):
    """The same trajectories from the environment, a byte at a time, and from unroll."""
    actions = boundaries(kind, sum(counts))
    actions = actions if actions is None else actions.to(device)
    env = make_env(scorer, counts, LENGTH, stream, n_past=policy.n_past, price=price, device=device)
    actor = Actor(policy if actions is None else Replayed(policy, actions), scorer, soft_cap)
    with torch.no_grad():
        stepped = env.rollout(LENGTH, actor, break_when_all_done=True, break_when_any_done=False)
    parallel, live = unroll(scorer, policy, env.batch, env.samples, actions=actions, soft_cap=soft_cap, price=price)
    return stepped, parallel, live


def assert_same(stepped, parallel, dtype, but=()):
    """Same keys, shapes, dtypes, names and device; where valid the same integers, and floats up to rounding."""
    assert set(parallel.keys(True, True)) == set(stepped.keys(True, True)) - {"_step"}
    assert parallel.names == stepped.names and parallel.device == stepped.device and parallel["next"].device == stepped["next"].device
    valid = parallel["valid"]
    assert valid[:, 0].all() and not valid.all()
    for key in parallel.keys(True, True):
        one, other = stepped[key], parallel[key]
        assert one.shape == other.shape and one.dtype == other.dtype and not other.requires_grad, key
        if one.is_floating_point():
            torch.testing.assert_close(other[valid], one[valid], **TOLERANCE[dtype], msg=lambda text, key=key: f"{key}: {text}")
        else:
            assert torch.equal(other[valid], one[valid]), key


@pytest.mark.parametrize("name", SCORERS)
@pytest.mark.parametrize("dtype", [float64, float32])
@pytest.mark.parametrize(
    ("kind", "counts", "n_past", "soft_cap"),
    [
        ("none", (1, 1, 1), 0, None),
        ("none", (2, 1, 1), 3, 6.0),
        ("everywhere", (3, 3), 0, 6.0),
        ("everywhere", (1, 1, 1, 1), 3, None),
        ("random", (2, 1, 1), 0, 6.0),
        ("random", (3, 3, 3, 3), 3, None),
    ],
)
def test_given_boundaries(name, dtype, kind, counts, n_past, soft_cap, device):
    scorer = SCORERS[name](dtype).to(device)
    policy = window_policy(scorer, n_past, device).to(dtype)
    stepped, parallel, _ = both(scorer, policy, counts, kind, soft_cap=soft_cap, price=0.2, device=device)
    assert_same(stepped, parallel, dtype)
    assert torch.equal(parallel["action"][:, 0], parallel["valid"][:, 0].long())
    assert torch.equal(parallel["action"].bool() & parallel["is_choice"], boundaries(kind, sum(counts)).to(device) & parallel["is_choice"])


@pytest.mark.parametrize("name", SCORERS)  # in float64 alone: u < p may flip by rounding
@pytest.mark.parametrize("counts", [(1, 1, 1), (3, 3), (2, 1, 1)], ids=str)
@pytest.mark.parametrize("n_past", [0, 3])
@pytest.mark.parametrize("soft_cap", [None, 6.0])
def test_sampled_boundaries(name, counts, n_past, soft_cap, device):
    scorer = SCORERS[name]().to(device)
    policy = window_policy(scorer, n_past, device).double()
    stepped, parallel, _ = both(scorer, policy, counts, soft_cap=soft_cap, device=device)
    assert_same(stepped, parallel, float64)
    assert 0.1 < parallel["action"][parallel["is_choice"]].double().mean() < 0.9
    if soft_cap is not None:
        assert (parallel["logits"].abs() <= soft_cap).all()


@pytest.mark.parametrize("name", SCORERS)
@pytest.mark.parametrize("policy", [UniformStride(3), UniformStride(1), IidRandom(0.3), Confident()], ids=lambda rule: type(rule).__name__)
def test_rules(name, policy, device):
    assert_same(*both(SCORERS[name]().to(device), policy, (2, 1, 1), device=device)[:2], float64)


@pytest.mark.parametrize("name", SCORERS)
@pytest.mark.parametrize("kind", ["sampled", "random"])
def test_a_policy_without_a_parallel_form(name, kind):
    scorer = SCORERS[name]()
    assert_same(*both(scorer, Surprised(), (2, 1, 1), kind)[:2], float64)
    for policy in (window_policy(scorer, 3).double(), window_policy(scorer, 0).double(), IidRandom(0.3), UniformStride(3), Confident()):
        env = make_env(scorer, (2, 1, 1), LENGTH, RAGGED)
        env.reset()
        actions = boundaries(kind, 4)
        whole, live = unroll(scorer, policy, env.batch, env.samples, actions=actions, soft_cap=6.0)
        walked, other = unroll(scorer, Stepped(policy), env.batch, env.samples, actions=actions, soft_cap=6.0)
        assert_same(walked, whole, float64)
        assert (live.logits is None) == (other.logits is None)
        if isinstance(policy, WindowPolicy):
            gradients = [torch.autograd.grad(each.logits.square().sum(), policy.weight)[0] for each in (live, other)]
            torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("n_past", [0, 3])
def test_replaying_a_rollout_gives_it_again(n_past):
    scorer = SCORERS["unet"]()
    policy = window_policy(scorer, n_past).double()
    _, sampled, _ = both(scorer, policy, (2, 1, 1))
    env = make_env(scorer, (2, 1, 1), LENGTH, RAGGED)
    env.reset()
    garbage = torch.where(sampled["is_choice"], sampled["action"], 1 - sampled["action"])
    replayed, _ = unroll(scorer, policy, env.batch, env.samples, actions=garbage)
    for key in sampled.keys(True, True):
        torch.testing.assert_close(replayed[key], sampled[key], rtol=0, atol=1e-12)


def test_padding():
    _, rollout, live = both(SCORERS["unet"](), window_policy(SCORERS["unet"](), 2).double(), (2, 1, 1), price=0.2)
    padding = ~rollout["valid"]
    for key in ("action", "logits", "action_log_prob", ("next", "reward"), ("next", "nll"), ("next", "early_nll")):
        assert not rollout[key][padding].any()
    assert not rollout["is_choice"][padding].any() and rollout["next", "done"][padding].all()
    assert not live.nll[padding].any() and not live.logits[~rollout["is_choice"]].any()


def test_action_log_prob():
    logits = torch.linspace(-50, 50, 11, dtype=float64)
    bernoulli = torch.distributions.Bernoulli(logits=logits)
    for action in (torch.zeros(11), torch.ones(11)):
        torch.testing.assert_close(action_log_prob(logits, action), bernoulli.log_prob(action.double()), rtol=1e-12, atol=1e-14)


def test_price_is_paid_for_starts_at_choices():
    scorer, batch, samples = SCORERS["unet"](), pack([b"Call me Ishmael", b"Some"]), Samples([2, 1])
    (free, _), (priced, _) = (unroll(scorer, IidRandom(0.5), batch, samples, price=price) for price in (0.0, 0.3))
    pays = (free["is_choice"] & free["action"].bool())[..., None]
    reward = free["next", "reward"]
    assert pays.any() and torch.equal(priced["next", "reward"], torch.where(pays, reward - 0.3, reward))
    assert torch.equal(reward, free["next", "early_nll"] - free["next", "nll"])


def test_autocast_leaves_the_dtypes_alone():
    scorer = SCORERS["unet"](float32)
    batch, samples = pack([b"Call me Ishmael", b"Some"]), Samples([2, 1])
    exact, _ = unroll(scorer, window_policy(scorer, 0), batch, samples)
    with torch.autocast("cpu", torch.bfloat16):
        mixed, live = unroll(scorer, window_policy(scorer, 0), batch, samples)
    assert {key: leaf.dtype for key, leaf in mixed.items(True, True)} == {key: leaf.dtype for key, leaf in exact.items(True, True)}
    assert live.nll.dtype == live.early_nll.dtype == live.logits.dtype == float32
    torch.testing.assert_close(mixed["next", "early_nll"], exact["next", "early_nll"], rtol=0.05, atol=0.05)


def grads(loss, parameters):
    return [None if g is None else g.abs().sum() > 0 for g in torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)]


@pytest.mark.parametrize("encoder_grad", [False, True])
@pytest.mark.parametrize("wrap", [lambda policy: policy, Stepped], ids=["parallel", "stepped"])
def test_what_the_graph_reaches(encoder_grad, wrap):
    scorer = SCORERS["unet"]()
    policy = window_policy(scorer, 2).double()
    batch, samples = pack([b"Call me Ishmael", b"Some years ago"]), Samples([2, 1])
    rollout, live = unroll(scorer, wrap(policy), batch, samples, encoder_grad=encoder_grad)
    assert not any(leaf.requires_grad for leaf in rollout.values(True, True))
    encoder, mid = list(scorer.encoder.parameters()), list(scorer.mid.parameters())
    assert all(grads(live.logits.sum(), [policy.weight]))
    assert grads(live.logits.sum(), encoder) == ([True] * len(encoder) if encoder_grad else [None] * len(encoder))
    assert grads(live.logits.sum(), mid) == [None] * len(mid)
    assert all(grads(live.nll.sum(), encoder + mid + [scorer.head.weight]))
    assert grads(live.nll.sum(), [policy.weight, scorer.early_head.weight]) == [None, None]
    assert all(grads(live.early_nll.sum(), [*encoder, scorer.early_head.weight]))
    assert grads(live.early_nll.sum(), mid) == [None] * len(mid)
    assert all(grads(live.h.square().sum(), encoder))
    assert live.nll.shape == live.logits.shape == (3, 15) and live.early_nll.shape == (2, 15) and live.h.shape == (2, 16, 32)


def test_live_is_what_the_rollout_holds():
    _, rollout, live = both(SCORERS["unet"](), window_policy(SCORERS["unet"](), 0).double(), (2, 1, 1))
    row = torch.tensor([0, 0, 1, 2])
    assert torch.equal(rollout["next", "nll"].squeeze(-1), live.nll) and torch.equal(rollout["logits"], live.logits)
    assert torch.equal(rollout["next", "early_nll"].squeeze(-1), live.early_nll[row])
    assert torch.equal(rollout["hidden"], live.h[row, :-1]) and torch.equal(rollout["next", "hidden"], live.h[row, 1:])


def test_both_samples_of_a_sequence_see_the_same_bytes():
    _, rollout, _ = both(SCORERS["table"](), IidRandom(0.5), (3, 1))
    assert rollout["sequence"][:, 0].tolist() == [0, 0, 0, 1]
    assert torch.equal(rollout["byte"][0], rollout["byte"][2]) and torch.equal(rollout["hidden"][0], rollout["hidden"][2])
    assert not torch.equal(rollout["noise"][0], rollout["noise"][1])


@pytest.mark.parametrize("name", SCORERS)
def test_a_batch_is_its_rows(name):
    scorer = SCORERS[name]()
    documents = [b"Call me Ishmael.", b"Some", b"years ago"]
    whole, _ = unroll(scorer, IidRandom(0.4), pack(documents, seed=5), Samples([2, 1, 1]))
    for i, row in ((1, 2), (2, 3)):
        alone, _ = unroll(scorer, IidRandom(0.4), pack([documents[i]], seed=5, first=i), Samples([1]))
        for key in alone.keys(True, True):
            torch.testing.assert_close(alone[key][0], whole[key][row, : len(documents[i])], rtol=0, atol=1e-12)


@pytest.mark.parametrize("fast", [True, False])
def test_mask_invalid(fast):
    scorer = SCORERS["table"]()
    rollout = both(scorer, window_policy(scorer, 2).double(), (2, 1, 1))[fast]
    valid = rollout["valid"] = both(scorer, IidRandom(0.5), (2, 1, 1))[1]["valid"]  # stepping repeats the last step after the end
    spread = {2: valid, 3: valid[..., None]}
    poisoned = rollout.apply(lambda leaf: torch.where(spread[leaf.dim()], leaf, torch.nan) if leaf.is_floating_point() else leaf)
    masked = mask_invalid(poisoned)
    assert masked.names == rollout.names and set(masked.keys(True, True)) == set(rollout.keys(True, True))
    for key in rollout.keys(True, True):
        assert torch.equal(masked[key][valid], rollout[key][valid]) and masked[key].dtype == rollout[key].dtype
        if rollout[key].is_floating_point() or key == "action":
            assert not masked[key][~valid].any()
            assert poisoned[key].isnan().any() or key == "action"
        else:
            assert torch.equal(masked[key], rollout[key])
    assert masked["action"].data_ptr() != rollout["action"].data_ptr()
