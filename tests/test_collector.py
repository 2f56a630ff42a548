"""The collector: one parallel pass gives what stepping gives, and TorchRL's own parts take it unchanged."""

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import float32, float64, nn
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers import SamplerWithoutReplacement
from torchrl.envs import RewardSum, TransformedEnv
from torchrl.objectives import A2CLoss, ClipPPOLoss, KLPENPPOLoss
from worlds import SCORERS, RaggedStream, make_env

from agents.policies import WindowPolicy
from agents.rules import IidRandom, UniformStride
from segment_env.actor import Actor, Start, loss_actor, replayed_logits
from segment_env.collector import SegmentCollector
from segment_env.errors import UserError
from segment_env.masking import mask_invalid

COUNTS, ROWS, LENGTH = (2, 1, 1), 4, 9
FRAMES = ROWS * LENGTH
TOLERANCE = {float64: 1e-12, float32: 1e-5}


def make(fast=True, n_past=2, dtype=float64, device="cpu", counts=COUNTS, stream=None, soft_cap=6.0, policy=None, **kwargs):
    torch.manual_seed(1)
    scorer = SCORERS["unet"](dtype).to(device)
    if policy is None:
        policy = WindowPolicy(scorer.width, 0.4, n_past).to(device, dtype)
        nn.init.normal_(policy.weight, std=16.0)
    env = make_env(scorer, counts, LENGTH, stream, price=0.2, n_past=n_past, device=device)
    return SegmentCollector(env, Actor(policy, scorer, soft_cap), fast=fast, **kwargs)


def assert_same(one, other, tolerance=1e-12):
    assert type(one) is type(other) and one.shape == other.shape and one.names == other.names and one.device == other.device
    assert set(one.keys(True, True)) == set(other.keys(True, True))
    for key in one.keys(True):
        mine, theirs = one[key], other[key]
        assert type(mine) is type(theirs), key
        assert (mine.shape, mine.dtype, mine.device) == (theirs.shape, theirs.dtype, theirs.device), key
        if isinstance(mine, TensorDict):
            assert mine.names == theirs.names
        elif mine.is_floating_point():
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
        else:
            assert torch.equal(mine, theirs), key


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"n_past": 0, "counts": (1, 1, 1, 1), "soft_cap": None},
        {"n_past": 0, "policy": UniformStride(3)},
        {"n_past": 0, "policy": IidRandom(0.3), "dtype": float32},
        {"use_buffers": False},
        {"track_traj_ids": False},
        {"storing_device": "cpu"},
    ],
    ids=str,
)
def test_fast_is_stepping(kwargs, device):
    fast, stepping = (make(fast, device=device, total_frames=3 * FRAMES, **kwargs) for fast in (True, False))
    batches = list(zip(fast, stepping, strict=True))
    assert len(batches) == 3
    for n, (one, other) in enumerate(batches):
        assert_same(one, other, TOLERANCE[kwargs.get("dtype", float64)])
        assert one.shape == (ROWS, LENGTH) and one.names == [None, "time"] and not one.is_locked
        assert not any(leaf.requires_grad for leaf in one.values(True, True))
        samples = fast.env.samples
        sequence = samples.row + n * samples.num_sequences
        assert torch.equal(one["sequence"], sequence[:, None].expand(-1, LENGTH).to(one.device))


def test_rows_that_end_early_are_padded():
    collector = make(stream=RaggedStream(LENGTH, 1, 4))
    for _, batch in zip(range(2), collector, strict=False):
        assert batch["valid"].sum(1).tolist() == [9, 9, 1, 4]
        assert batch["next", "done"].squeeze(-1).logical_not().sum(1).tolist() == [8, 8, 0, 3]
        assert not batch["next", "reward"][~batch["valid"]].any()


def test_stepping_begins_new_episodes_in_the_middle_of_a_batch():
    batch = next(iter(make(fast=False, stream=RaggedStream(LENGTH, 1, 4))))
    assert batch["valid"].all()
    assert (batch["byte"] == 256).sum(1).tolist() == [1, 1, 9, 3]
    assert batch["sequence"][2].tolist() == [1 + 3 * n for n in range(9)]


@pytest.mark.parametrize("fast", [True, False])
def test_total_frames_ends_the_iteration(fast):
    collector = make(fast, total_frames=2 * FRAMES)
    assert [batch.numel() for batch in collector] == [FRAMES, FRAMES]


@pytest.mark.parametrize("fast", [True, False])
def test_a_state_resumes_at_the_next_batch(fast):
    whole = [batch for _, batch in zip(range(4), make(fast), strict=False)]
    begun = make(fast)
    assert_same(next(iter(begun)), whole[0])
    next(iter(begun))
    state = begun.state_dict()
    resumed = make(fast)
    next(iter(resumed))
    resumed.load_state_dict(state)
    for n, batch in zip((2, 3), resumed, strict=False):
        assert_same(batch.exclude(("collector", "traj_ids")), whole[n].exclude(("collector", "traj_ids")))  # TorchRL counts ids anew
    assert resumed.state_dict()["frames"] == 4 * FRAMES
    assert state["position"] == [2, 2, 2]  # the third episodes are loaded, not played


@pytest.mark.parametrize("fast", [True, False])
def test_a_seed_takes_effect_at_once(fast):
    collector, other = make(fast), make(fast)
    first = next(iter(collector))
    collector.set_seed(3)  # the seed that it had
    assert torch.equal(next(iter(collector))["byte"], first["byte"])
    other.set_seed(4)
    assert not torch.equal(next(iter(other))["noise"], first["noise"])


def test_it_takes_a_bare_environment_alone():
    collector = make()
    with pytest.raises(UserError, match="not TransformedEnv: put transforms into postproc="):
        SegmentCollector(TransformedEnv(collector.env, RewardSum()), collector.policy)
    with pytest.raises(UserError, match="not int"):
        SegmentCollector(3, collector.policy)


@pytest.mark.parametrize("option", ["init_random_frames", "set_truncated", "compact_obs", "reset_at_each_iter"])
def test_what_fast_would_pass_over_is_refused(option):
    with pytest.raises(UserError, match=f"{option}.*fast=False"):
        make(**{option: True})


def test_other_refusals():
    with pytest.raises(UserError, match="max_frames_per_traj"):
        make(fast=False, max_frames_per_traj=3)
    with pytest.raises(UserError, match="0 past decisions.*shows 2.*same n_past"):
        make(policy=UniformStride(3))


def make_loss(policy, cls=ClipPPOLoss, **kwargs):
    loss = cls(loss_actor(policy, soft_cap=6.0), kwargs.pop("critic", None), entropy_coeff=0.01, **kwargs)
    loss.loss_mask_key = "is_choice"
    return loss


@pytest.mark.parametrize("fast", [True, False])
def test_torchrl_takes_it_unchanged(fast):
    collector = make(fast, n_past=0, dtype=float32, stream=RaggedStream(LENGTH, 1, 4))
    policy = collector.policy.policy
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(ROWS), sampler=SamplerWithoutReplacement(), batch_size=2)
    loss = make_loss(policy)
    for _, batch in zip(range(2), collector, strict=False):
        batch["advantage"] = batch["next", "reward"] - 1.0
        batch["hidden"][~batch["valid"]] = torch.nan
        buffer.extend(mask_invalid(batch))
        for part in buffer:
            assert part.shape == (2, LENGTH)
            losses = loss(part)
            assert losses["loss_objective"].isfinite()
            policy.zero_grad()
            (losses["loss_objective"] + losses["loss_entropy"]).backward()
            if part["is_choice"].any():
                assert policy.weight.grad.isfinite().all() and policy.weight.grad.any()


def test_the_first_pass_of_ppo_is_the_policy_gradient():
    collector = make(n_past=0, stream=RaggedStream(LENGTH, 1, 4))
    policy = collector.policy.policy
    batch = next(iter(collector))
    batch["advantage"] = batch["next", "reward"] - 1.0
    losses = make_loss(policy)(mask_invalid(batch))
    torch.testing.assert_close(losses["max_ratio"], torch.ones((), dtype=float64))
    losses["loss_objective"].backward()
    ours, policy.weight.grad = policy.weight.grad, None
    choice = batch["is_choice"]
    logits = replayed_logits(policy, batch, 6.0)
    log_p = Start(logits=logits).log_prob(batch["action"])
    (-(log_p * batch["advantage"].squeeze(-1))[choice].mean()).backward()
    torch.testing.assert_close(ours, policy.weight.grad, rtol=1e-10, atol=1e-12)


class Nothing(TensorDictModule):
    """A critic without parameters, for the loss that wants one."""

    def __init__(self):
        super().__init__(lambda hidden: torch.zeros_like(hidden[..., :1]), ["hidden"], ["state_value"])


LOSSES = {
    "ppo": lambda policy: make_loss(policy),
    "ppo_asymmetric": lambda policy: make_loss(policy, clip_epsilon=(0.2, 0.28)),
    "ppo_kl": lambda policy: make_loss(policy, KLPENPPOLoss),
    "a2c": lambda policy: make_loss(policy, A2CLoss, critic=Nothing(), critic_coeff=None),
}


@pytest.mark.parametrize("name", LOSSES)
def test_padding_is_nothing_to_an_outside_loss(name):
    """Rows and columns that are nowhere valid, NaN in their floats and garbage in their actions: the same losses and gradients."""
    collector = make(n_past=0, stream=RaggedStream(LENGTH, 1, 4))
    policy = collector.policy.policy
    whole = next(iter(collector)).exclude("collector")
    whole["advantage"] = whole["next", "reward"] - 1.0
    padded = torch.cat([torch.cat([whole, whole[:, :3]], 1), torch.cat([whole, whole[:, :3]], 1)[:2]], 0)
    outside = torch.ones(padded.shape, dtype=torch.bool)
    outside[:ROWS, :LENGTH] = False
    for key in ("valid", "is_choice"):
        padded[key] = padded[key] & ~outside
    for leaf in padded.values(True, True):
        if leaf.is_floating_point():
            leaf[outside] = torch.nan
    padded["action"] = torch.where(outside, 7, padded["action"])
    with torch.no_grad():
        policy.weight.add_(torch.randn(policy.weight.shape, dtype=float64, generator=torch.Generator().manual_seed(2)))
    found = []
    for batch in (whole, padded):
        losses = LOSSES[name](policy)(mask_invalid(batch))
        total = losses["loss_objective"] + losses["loss_entropy"]
        found.append((total.detach(), *torch.autograd.grad(total, policy.weight)))
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)
