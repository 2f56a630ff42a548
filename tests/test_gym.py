"""The Gymnasium environments: what checkers, wrappers and foreign agents see, and that it is what TorchRL's environment plays."""

import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import stable_baselines3.common.env_checker
import torch
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import iterate
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from torch import bfloat16, float32, float64
from torchrl.envs import GymWrapper
from torchrl.envs.utils import check_env_specs
from worlds import SCORERS, RaggedStream

from agents.rules import IidRandom
from segment_env.batch import Samples
from segment_env.closed_form import AlignedScorer, CountingStream
from segment_env.diagnostics import Delimiter, Period
from segment_env.errors import UserError
from segment_env.gym import ID, BoundaryEnv, BoundaryVectorEnv
from segment_env.unroll import unroll

ROOT = Path(__file__).parents[1]
RAGGED = RaggedStream(7, 1, 4, 2, 3)


@pytest.fixture(params=SCORERS)
def scorer(request):
    return SCORERS[request.param](float64)


def random_actions(*shape, seed=0):
    return np.random.default_rng(seed).integers(2, size=shape)


def play(env, actions):
    """Every step of one episode, which lasts as long as ``actions`` or less."""
    steps = []
    for action in actions:
        steps.append(env.step(action))
        if steps[-1][2] or steps[-1][3]:
            break
    return steps


def assert_equal(one, other):
    """Nested dictionaries and arrays are the same, floats but for the last digits, which a batch may round otherwise."""
    if isinstance(one, dict):
        assert set(one) == set(other)
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, tuple) or (isinstance(one, np.ndarray) and one.dtype == object):
        for each in zip(one, other, strict=True):
            assert_equal(*each)
    elif one is None or other is None:
        assert one is other
    else:
        assert np.asarray(one).dtype == np.asarray(other).dtype
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6 if np.asarray(one).dtype == np.float32 else 1e-12)


# Gymnasium warns of every Box without bounds, and h has none
@pytest.mark.filterwarnings(r"ignore:.*A Box observation space (minimum|maximum) value is -?infinity:UserWarning")
@pytest.mark.parametrize("n_past", [0, 3])
def test_gymnasiums_checker(n_past):
    check_env(gymnasium.make(ID, n_past=n_past).unwrapped)


@pytest.mark.parametrize("n_past", [0, 3])
def test_the_checker_of_stable_baselines(n_past):
    stable_baselines3.common.env_checker.check_env(gymnasium.make(ID, n_past=n_past))


@pytest.mark.parametrize("route", [f"import segment_env.gym; name = '{ID}'", f"name = 'segment_env.gym:{ID}'"])
def test_the_id_works_bare(route):
    program = (
        f"import gymnasium; {route}; print(gymnasium.make(name).reset(seed=0)[0]['byte'], gymnasium.make_vec(name, num_envs=2).num_envs)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.stdout == "256 2\n", done.stderr


@pytest.mark.parametrize("dtype", [float32, float64, bfloat16])
def test_spaces(dtype):
    env = BoundaryEnv(RAGGED, SCORERS["table"](float64), length=7, n_past=3)
    assert env.observation_space["hidden"].shape == (8,) and env.observation_space["hidden"].dtype == np.float32
    assert env.observation_space["since"].n == 8 and env.observation_space["byte"].n == 257 and env.observation_space["recent"].n == 3
    assert "recent" not in BoundaryEnv().observation_space.spaces and env.action_space.n == 2
    envs = BoundaryVectorEnv(2, RAGGED, SCORERS["aligned"]().to(dtype), length=7, n_past=3)
    for observation in (envs.reset()[0], envs.step(np.ones(2, dtype=int))[0]):
        assert observation in envs.observation_space
        assert all(each in envs.single_observation_space for each in iterate(envs.observation_space, observation))
    assert envs.action_space.nvec.tolist() == [2, 2]


@pytest.mark.parametrize(("mode", "kind"), [("sync", SyncVectorEnv), ("vector_entry_point", BoundaryVectorEnv), (None, BoundaryVectorEnv)])
def test_make_vec(mode, kind):
    envs = gymnasium.make_vec(ID, num_envs=3, vectorization_mode=mode, stream=RAGGED, scorer=SCORERS["table"](), length=7)
    assert isinstance(envs, kind) and envs.num_envs == 3
    observation, _ = envs.reset(seed=4)
    assert observation["byte"].tolist() == [256] * 3
    for _ in range(9):
        observation, reward, terminated, truncated, _ = envs.step(envs.action_space.sample())
        assert observation in envs.observation_space and reward.dtype == np.float64 and terminated.dtype == truncated.dtype == bool
    assert envs.spec.id == ID


def singles(scorer, num_envs, **kwargs):
    """One environment for every row of a vector environment: row s begins with sequence s, and goes on in steps of ``num_envs``."""
    for row in range(num_envs):
        env = BoundaryEnv(scorer=scorer, **kwargs)
        env.core.episodes = replace(env.core.episodes, first=row, total=num_envs)
        yield env


def test_vector_rows_are_single_environments(scorer):
    kwargs = {"stream": RAGGED, "length": 7, "n_past": 2, "price": 0.1, "seed": 5}
    envs = BoundaryVectorEnv(3, scorer=scorer, **kwargs)
    fns = [lambda env=env: env for env in singles(scorer, 3, **kwargs)]
    reference = SyncVectorEnv(fns, autoreset_mode=AutoresetMode.SAME_STEP)
    assert envs.metadata["autoreset_mode"] == envs.autoreset_mode == reference.metadata["autoreset_mode"]
    assert_equal(envs.reset(), reference.reset())
    nobody = {"nll": np.zeros(3), "_nll": np.zeros(3, bool), "early_nll": np.zeros(3), "_early_nll": np.zeros(3, bool)}  # all rows end
    kept, ended = [], np.zeros(3)
    for action in random_actions(40, 3):
        step, other = envs.step(action), reference.step(action)
        assert_equal(step, (*other[:4], nobody | other[4]))
        kept.append((step, other))
        ended += step[2] | step[3]
    assert (ended > 5).all()
    for step, other in kept:  # what was given out is not written to later
        assert_equal(step, (*other[:4], nobody | other[4]))


def test_a_step_in_which_all_rows_end():
    envs = BoundaryVectorEnv(2, CountingStream(), AlignedScorer(), length=1)
    envs.reset(seed=0)
    observation, reward, terminated, truncated, info = envs.step(np.zeros(2, dtype=int))
    assert observation["byte"].tolist() == [256, 256] and truncated.all() and not terminated.any() and not reward.any()
    assert info["_final_obs"].all() and [final["byte"] for final in info["final_obs"]] != [256, 256]
    assert (info["final_info"]["nll"] > 0).all() and not info["_nll"].any() and not info["nll"].any()
    assert envs.core.position == [1, 1]


def test_a_partial_end():
    envs = BoundaryVectorEnv(3, RaggedStream(3, 2, 3), AlignedScorer(), length=3)
    envs.reset(seed=0)
    assert "final_obs" not in envs.step(np.ones(3, dtype=int))[4]
    observation, _, terminated, truncated, info = envs.step(np.zeros(3, dtype=int))
    assert (
        terminated.tolist() == info["_final_obs"].tolist() == info["_final_info"].tolist() == [False, True, False] and not truncated.any()
    )
    final = info["final_obs"]
    assert final[0] is None and final[2] is None and final[1] in envs.single_observation_space
    x = envs.core.episodes.batch(0).bytes
    assert final[1]["byte"] == x[1, 1] and observation["byte"].tolist() == [x[0, 1], 256, x[2, 1]]
    assert final[1]["since"] == 2 and observation["since"].tolist() == [2, 0, 2]
    assert info["_nll"].tolist() == [True, False, True] and info["final_info"]["_nll"].tolist() == [False, True, False]
    assert info["is_choice"].tolist() == [True, False, True] and info["_is_choice"].all()


@pytest.mark.parametrize("make", [BoundaryEnv, lambda **kwargs: BoundaryVectorEnv(2, **kwargs)], ids=["one", "many"])
def test_seeds_replay(make):
    def record(env, seed, episodes=3):
        seen = [env.reset(seed=seed)]
        for n in range(episodes):
            seen += [env.step(action) for action in random_actions(7, *env.action_space.shape, seed=n)] + [env.reset()]
        return seen

    kwargs = {"stream": CountingStream(5, 0.3), "scorer": SCORERS["table"](), "length": 7, "n_past": 2}
    env = make(**kwargs)
    first, other, again, fresh = record(env, 11), record(env, 12), record(env, 11), record(make(**kwargs), 11)
    for one, two, three in zip(first, again, fresh, strict=True):
        assert repr(one) == repr(two) == repr(three)
    assert repr(first) != repr(other)
    assert repr(record(make(seed=11, **kwargs), None)) == repr(first)  # the seed of the constructor is that of a reset
    assert repr(record(make(**kwargs), None)) != repr(record(make(**kwargs), None))  # without one, no two play the same


def test_a_reset_goes_on_to_the_next_episode():
    env, envs = BoundaryEnv(seed=3, length=5), BoundaryVectorEnv(3, seed=3, length=5)
    for episode in range(4):
        env.reset()
        envs.reset()
        env.step(0)  # an episode may be left early
        assert env.core.batch.sequence.tolist() == [episode]
        assert envs.core.batch.sequence.tolist() == [3 * episode, 3 * episode + 1, 3 * episode + 2]


def test_a_seed_leaves_torchs_generator_alone():
    env, before = BoundaryEnv(), torch.get_rng_state()
    env.reset(seed=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_returns_are_those_of_a_rollout(scorer):
    """The same actions earn the same here, in TorchRL's environment and in one parallel pass; what ends how agrees too."""
    env, actions = BoundaryEnv(RAGGED, scorer, length=7, price=0.3, seed=2), random_actions(5, 7)
    for episode, action in enumerate(actions):
        _, info = env.reset()
        assert info == {"is_choice": False}
        steps = play(env, action)
        batch = env.core.episodes.batch(episode)
        parallel, _ = unroll(scorer, IidRandom(0.5), batch, Samples([1]), actions=torch.tensor(action)[None], price=0.3)
        core = BoundaryEnv(RAGGED, scorer, length=7, price=0.3, seed=2).core
        core.position = [episode - 1]
        rollout = core.rollout(7, actions=list(torch.tensor(action)[:, None]), break_when_all_done=True)
        for key, of_step in {"reward": 1, "terminated": 2, "truncated": 3}.items():
            mine = [step[of_step] for step in steps]
            for other in (parallel, rollout):
                valid = other["valid"][0]
                assert len(mine) == valid.sum()
                np.testing.assert_allclose(mine, other["next", key][0, valid, 0].numpy(), rtol=0, atol=1e-12)
        for key in ("nll", "early_nll"):
            np.testing.assert_allclose([step[4][key] for step in steps], rollout["next", key][0, :, 0].numpy(), rtol=0, atol=1e-12)
        assert [step[4]["is_choice"] for step in steps] == rollout["next", "is_choice"][0].tolist()
        assert steps[-1][2:4] == (bool(batch.terminated), not batch.terminated)
        assert all(type(value) is kind for step in steps for value, kind in zip(step[1:4], (float, bool, bool), strict=True))
        assert all(
            {key: type(value) for key, value in step[4].items()} == {"nll": float, "early_nll": float, "is_choice": bool} for step in steps
        )


def test_the_first_action_is_ignored():
    env, outcomes = BoundaryEnv(CountingStream(), AlignedScorer(), price=0.5, seed=1), []
    for first in (0, 1):
        env.reset(seed=1)
        outcomes.append((env.step(first), env.step(0)))
    assert repr(outcomes[0]) == repr(outcomes[1])


def test_the_wrapper_that_records_episodes():
    envs = RecordEpisodeStatistics(BoundaryVectorEnv(3, RAGGED, SCORERS["table"](), length=7))
    envs.reset(seed=0)
    earned, finished = np.zeros(3), []
    for action in random_actions(20, 3):
        _, reward, terminated, truncated, info = envs.step(action)
        earned += reward
        for row in (terminated | truncated).nonzero()[0]:
            finished.append(earned[row])
            assert info["episode"]["r"][row] == pytest.approx(earned[row]) and info["_episode"][row]
            earned[row] = 0
    assert len(finished) > 15 and list(envs.return_queue) == pytest.approx(finished)
    assert set(envs.length_queue) == {1, 2, 3, 4, 7}


@pytest.mark.parametrize(
    "kwargs", [{"num_envs": 3}, {"num_envs": 3, "vectorization_mode": "sync", "vector_kwargs": {"autoreset_mode": "SameStep"}}], ids=str
)
def test_the_way_back_into_torchrl(kwargs):
    env = GymWrapper(gymnasium.make_vec(ID, length=6, n_past=2, **kwargs), categorical_action_encoding=True)
    check_env_specs(env)
    env.set_seed(0)
    rollout = env.rollout(8, break_when_any_done=False)
    assert rollout["next", "truncated"].squeeze(-1)[:, 5].all() and (rollout["byte"][:, 6] == 256).all()


def test_one_object_may_be_both_stream_and_scorer():
    both = Period()
    for kwargs in ({"stream": both}, {"scorer": both}, {"stream": both, "scorer": both}):
        env = gymnasium.make(ID, **kwargs).unwrapped
        assert env.core.scorer is both and env.core.episodes.stream is both


def test_defaults():
    core = BoundaryEnv().core
    assert isinstance(core.scorer, Delimiter) and core.episodes.stream is core.scorer
    assert core.price == Delimiter.default_price == 0.5 and BoundaryEnv(price=0).core.price == 0
    assert BoundaryEnv(Delimiter(), AlignedScorer()).core.price == 0  # the price is the scorer's


@pytest.mark.gpu
def test_on_a_gpu():
    envs, others = (BoundaryVectorEnv(3, length=5, n_past=2, device=device) for device in ("cuda", "cpu"))
    assert_equal(envs.reset(seed=1), others.reset(seed=1))
    for action in random_actions(12, 3):
        for one, other in zip(envs.step(action), others.step(action), strict=True):
            assert repr(one) == repr(other)


def begun(env):
    env.reset(seed=0)
    return env


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BoundaryEnv(CountingStream()), "CountingStream does not score bytes: give scorer="),
        (lambda: BoundaryEnv(scorer=AlignedScorer()), "AlignedScorer is no stream of bytes: give stream="),
        (lambda: BoundaryVectorEnv(0), "num_envs and length must be whole numbers from 1 on"),
        (lambda: BoundaryVectorEnv(1.5), "num_envs and length must be whole numbers from 1 on"),
        (lambda: BoundaryEnv(length=0), "num_envs and length must be whole numbers from 1 on"),
        (lambda: BoundaryEnv(n_past=-1), "n_past one from 0 on"),
        (lambda: BoundaryEnv(price="x"), "price must be a number of nats, got 'x'"),
        (lambda: BoundaryVectorEnv(2).step([0, 1]), "reset the environment before"),
        (lambda: begun(BoundaryEnv()).step(0.7), "actions must be 1 whole numbers, 0 or 1, got 0.7"),
        (lambda: begun(BoundaryEnv()).step(2), "actions must be 1 whole numbers, 0 or 1, got 2"),
        (lambda: begun(BoundaryVectorEnv(3)).step([0, 1]), "actions must be 3 whole numbers, 0 or 1"),
        (lambda: [env.step(0) for env in [begun(BoundaryEnv(length=2))] for _ in range(3)], "the episode has ended: reset"),
    ],
)
def test_mistakes(make, message):
    with pytest.raises(UserError, match=message):
        make()


def example():
    return runpy.run_path(str(ROOT / "examples" / "stable_baselines3_ppo.py"))["main"]


def test_the_example_runs():
    assert example()(steps=1, episodes=1) < 0.9


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ppo_of_stable_baselines_learns_the_delimiter():
    assert example()(steps=50_000, seed=0) >= 0.9
