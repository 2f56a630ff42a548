"""The environment: TorchRL's specs, resets, seeds and data, on scorers in closed form and on the byte U-Net."""

from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict
from torch import float32, float64
from torch.utils._pytree import tree_leaves
from torchrl.envs.utils import check_env_specs
from worlds import SCORERS, RaggedStream, Surprised, make_env

from agents.policies import WindowPolicy
from agents.rules import IidRandom
from segment_env.actor import Actor
from segment_env.batch import Episodes, Samples
from segment_env.env import SegmentEnv
from segment_env.errors import UserError


@pytest.fixture(params=SCORERS)
def scorer(request):
    return SCORERS[request.param]()


def random_actions(rows, length, seed=0):
    return torch.randint(2, (rows, length), generator=torch.Generator().manual_seed(seed))


def play(env, actions, observation=None):
    """Step ``actions`` [B, T]: one tensordict for every step, from ``observation`` (default: of a reset) on."""
    steps, now = [], env.reset() if observation is None else observation
    for action in actions.unbind(1):
        step = env.step(now.set("action", action))
        steps.append(step.clone())
        now = env.step_mdp(step)
    return steps


def assert_equal(one, other, rows=slice(None)):
    assert set(one.keys(True, True)) == set(other.keys(True, True))
    for key in one.keys(True, True):
        assert torch.equal(one[key][rows], other[key][rows]), key


@pytest.mark.parametrize("n_past", [0, 3])
@pytest.mark.parametrize("dtype", [float32, float64])
def test_specs(n_past, dtype, device):
    for make in SCORERS.values():
        env = make_env(make(dtype).to(device), (2, 1, 1), 6, RaggedStream(6, 1, 4), n_past=n_past, device=device)
        check_env_specs(env, break_when_any_done="both")
        assert all(env.full_reward_spec[key].dtype == dtype for key in ("reward", "nll", "early_nll"))


def test_the_scorer_is_no_part_of_the_module():
    env = make_env(SCORERS["unet"]())
    assert not list(env.parameters()) and not env.state_dict()


def test_a_partial_reset(scorer):
    actions = random_actions(4, 8)
    env = make_env(scorer, (2, 1, 1), 8, n_past=2)
    whole = play(env, actions)
    second = play(env, actions)  # all play their second episodes

    env.set_seed(3)
    begun = play(env, actions[:, :3])
    mask = torch.tensor([False, False, True, False])
    now = env.reset(env.step_mdp(begun[-1]).set("_reset", mask[:, None]))
    assert_equal(now.exclude("_reset"), env.step_mdp(begun[-1]), ~mask)
    rest = play(env, torch.where(mask[:, None], actions.roll(3, 1), actions)[:, 3:], now.exclude("_reset"))
    for t in range(5):
        assert_equal(rest[t], whole[t + 3], ~mask)  # bit for bit
        for key in rest[t].keys(True, True):  # its token layers attend over more keys with zero weight: that may round otherwise
            torch.testing.assert_close(rest[t][key][mask], second[t][key][mask], rtol=0, atol=1e-12)
    assert env.position == [0, 1, 0]


def test_every_row_ends_alone_and_begins_the_next_episode_of_its_slot():
    stream = RaggedStream(5, 1, 4, 2, 3)
    episodes = Episodes(stream, 3, 5, seed=8, first=2, total=7)
    env = SegmentEnv(SCORERS["table"](), episodes, Samples([2, 1, 1]))
    played, now = [[] for _ in range(4)], env.reset()
    for _ in range(20):
        step, now = env.step_and_maybe_reset(now.set("action", random_actions(4, 1)[:, 0]))
        for b in range(4):
            if not step["is_choice"][b]:
                assert step["valid"][b] and step["byte"][b] == 256
                played[b].append([])
            played[b][-1].append(int(step["next", "byte"][b]))
    for b, slot in enumerate((0, 0, 1, 2)):
        assert len(played[b]) > 4
        for n, episode in enumerate(played[b][:-1]):
            x, valid, _ = stream.sequences(8, torch.tensor([n * 7 + 2 + slot]), 5)
            assert episode == x[valid].tolist()


def test_a_mask_that_splits_a_sequence_is_refused():
    env = make_env(SCORERS["table"](), (2, 1))
    now = env.reset()
    before = env.batch
    with pytest.raises(ValueError, match="all rows of a sequence or none"):
        env.reset(now.set("_reset", torch.tensor([True, False, True])[:, None]))
    assert env.batch is before and env.position == [0, 0]


def test_a_step_of_some_rows_only_is_refused():
    env = make_env(SCORERS["table"]())
    now = env.reset().update({"action": torch.ones(3, dtype=torch.int64), "_step": torch.tensor([True, False, True])})
    with pytest.raises(ValueError, match="every row that has not ended"):
        env.step(now)


def test_a_seed_replays_bit_for_bit(scorer):
    env = make_env(scorer, (2, 1, 1), n_past=3)
    actor = Actor(IidRandom(0.4), scorer)
    env.set_seed(11)
    first = env.rollout(12, actor)
    env.rollout(5, actor)  # part of the next episode
    env.set_seed(11)
    again = env.rollout(12, actions=list(first["action"].unbind(1)))
    assert_equal(first.exclude("logits", "action_log_prob"), again)
    env.set_seed(12)
    other = env.rollout(12, actor)
    assert not torch.equal(other["byte"], first["byte"]) and not torch.equal(other["noise"], first["noise"])


def test_noise_of_samples_may_be_antithetic():
    env = make_env(SCORERS["table"](), (2, 1), antithetic=True)
    noise = env.rollout(12)["noise"]
    assert torch.equal(noise[0], 1 - noise[1])


def test_a_row_alone_is_the_row_of_a_batch(scorer):
    stream, actions = RaggedStream(9, 4, 7), random_actions(4, 9)
    episodes = Episodes(stream, 3, 9, seed=1)
    both = [SegmentEnv(scorer, episodes, Samples([2, 1, 1]), n_past=2)]
    both.append(SegmentEnv(scorer, replace(episodes, num_sequences=1, first=2, total=3), Samples([1]), n_past=2))
    for _ in range(2):  # episodes
        batch, alone = play(both[0], actions), play(both[1], actions[3:])
        for step, mine in zip(batch, alone, strict=True):
            for key in step.keys(True, True):
                torch.testing.assert_close(mine[key], step[key][3:], rtol=0, atol=1e-12)


def storages(leaves):
    return {leaf.untyped_storage().data_ptr() for leaf in leaves}


def kept(env):
    """All tensors that an environment holds."""
    return tree_leaves([env._now, env._valid, env._x, env._noise, *(getattr(env.batch, name) for name in ("bytes", "valid", "sequence"))])


@pytest.mark.parametrize("counts", [(2, 1), (1, 1, 1)], ids=str)
def test_outputs_share_no_storage(scorer, counts):
    env, actions = make_env(scorer, counts, n_past=2), random_actions(3, 6)
    clean = play(env, actions)
    env.set_seed(3)
    seen, now = [], env.reset()
    for t, action in enumerate(actions.unbind(1)):
        now = TensorDict({key: value.clone() for key, value in now.items()} | {"action": action}, [3])
        step = env._step(now)
        seen += step.values()  # kept, so that no memory is used again
        assert len(storages(seen)) == len(seen) and not storages(seen) & storages(kept(env))
        assert_equal(step, clean[t]["next"])
        now = step.exclude("reward", "nll", "early_nll").clone()
        for leaf in step.values():
            leaf.zero_()  # nothing of the environment is touched
    assert not storages(env.reset().values()) & storages(kept(env))


def test_actions_count_at_choices_only(scorer):
    env, actions = make_env(scorer, (2, 1, 1), 8, RaggedStream(8, 1, 5), n_past=2, price=0.3), random_actions(4, 8)
    steps = play(env, actions)
    for garbage in (1 - actions, torch.full_like(actions, 7), torch.zeros_like(actions)):
        env.set_seed(3)
        choice = torch.stack([step["is_choice"] for step in steps], 1)
        for step, other in zip(steps, play(env, torch.where(choice, actions, garbage)), strict=True):
            assert_equal(step.exclude("action"), other.exclude("action"))


def test_price(scorer):
    actions = random_actions(4, 8)
    free, priced = (play(make_env(scorer, (2, 1, 1), 8, RaggedStream(8, 1, 5), price=price), actions) for price in (0.0, 0.3))
    for one, other in zip(free, priced, strict=True):
        pays = (one["is_choice"] & one["action"].bool())[:, None]
        assert torch.equal(other["next", "reward"], torch.where(pays, one["next", "reward"] - 0.3, one["next", "reward"]))
        assert torch.equal(one["next", "reward"], one["next", "early_nll"] - one["next", "nll"])
        assert_equal(one.exclude(("next", "reward")), other.exclude(("next", "reward")))


def test_ragged_rows(scorer):
    env = make_env(scorer, (2, 1, 1, 1), 8, RaggedStream(8, 1, 5, 3))
    length, terminates = torch.tensor([8, 8, 1, 5, 3]), torch.tensor([False, False, True, False, True])
    for t, step in enumerate(play(env, random_actions(5, 8))):
        assert torch.equal(step["valid"], t < length) and torch.equal(step["is_choice"], (t < length) & (t > 0))
        ended = t + 1 >= length
        done, terminated, truncated = (step["next", key].squeeze(-1) for key in ("done", "terminated", "truncated"))
        assert torch.equal(done, ended) and torch.equal(terminated, ended & terminates) and torch.equal(truncated, ended & ~terminates)
        for key in ("reward", "nll", "early_nll"):
            assert not step["next", key][~step["valid"]].any() and step["next", key].isfinite().all()
        assert (step["next", "nll"][step["valid"]] > 0).all()


def test_observations_are_what_the_docstring_says(scorer):
    env, actions = make_env(scorer, (2, 1), 10, n_past=3), random_actions(3, 10)
    x, noise = env.samples.expand(env.episodes.batch(0).bytes), env.samples.noise(env.episodes.batch(0), 11)
    h = env.samples.expand(scorer.encode(env.episodes.batch(0).bytes)).detach()
    starts = actions.clone()
    starts[:, 0] = 1
    steps = play(env, actions)
    for t in range(11):
        now = steps[t] if t < 10 else steps[-1]["next"]
        last = [max((s for s in range(t) if starts[b, s]), default=0) for b in range(3)]
        recent = [[int(starts[b, t - j]) if t >= j else 0 for j in (1, 2, 3)] for b in range(3)]
        assert now["since"].tolist() == [t - s for s in last]
        assert now["recent"].tolist() == recent
        assert now["byte"].tolist() == (x[:, t - 1].tolist() if t else [256] * 3)
        assert torch.equal(now["noise"], noise[:, t])
        assert now["sequence"].tolist() == [0, 0, 1]
        torch.testing.assert_close(now["hidden"], h[:, t], rtol=0, atol=1e-12)


def test_an_actor_begins_anew_with_each_row(device):
    scorer = SCORERS["table"]().to(device)
    policy = Surprised()
    policy.init = lambda num_rows: torch.zeros(num_rows, dtype=float64, device=device)
    env = make_env(scorer, (2, 1, 1), 6, RaggedStream(6, 1, 4), n_past=2, device=device)
    actor = Actor(policy, scorer)
    nonstop = env.rollout(12, actor, break_when_any_done=False)
    assert actor(make_env(scorer, (1,), 6, n_past=2, device=device).reset())["action"].tolist() == [1]  # another number of rows
    env.set_seed(3)
    for n in range(2):
        fresh = env.rollout(6, Actor(policy, scorer), break_when_any_done=False)
        for key in ("action", "logits", "action_log_prob"):  # of rows 0 and 1, which have six bytes in every episode
            assert torch.equal(fresh[key][:2], nonstop[key][:2, 6 * n : 6 * n + 6])


def test_an_actor_forces_what_is_no_choice():
    scorer = SCORERS["table"]()
    policy = WindowPolicy(scorer.width, target=0.5)
    env = make_env(scorer, (1, 1), 5, RaggedStream(5, 2))
    rollout = env.rollout(5, Actor(policy, scorer), break_when_all_done=True)
    ended = Actor(policy, scorer)(env.step_mdp(rollout[:, -1]))
    assert rollout["action"][:, 0].tolist() == [1, 1] and ended["action"].tolist() == [0, 0]
    assert not rollout["logits"][:, 0].any() and not rollout["action_log_prob"][:, 0].any()
    assert not ended["logits"].any() and not ended["action_log_prob"].any()


def test_samples_that_do_not_fit():
    with pytest.raises(UserError, match="2 sequences.*3"):
        SegmentEnv(SCORERS["table"](), Episodes(RaggedStream(4), 3, 4, 0), Samples([1, 2]))


def test_a_batch_before_the_first_reset():
    env = make_env(SCORERS["table"]())
    with pytest.raises(RuntimeError, match="not been reset"):
        _ = env.batch
