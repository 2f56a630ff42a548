"""Boundary placement as Gymnasium environments: one row, or many rows at once, over the same core as the TorchRL environment.

Both classes are registered under one id when this module is imported (Gymnasium has had no plugins since its version 1.0)::

    import segment_env.gym
    env = gymnasium.make("segment_env/Boundaries-v0")
    envs = gymnasium.make_vec("segment_env/Boundaries-v0", num_envs=16)

or, without the import, ``gymnasium.make("segment_env.gym:segment_env/Boundaries-v0")``. One step is one byte. An observation is a
dictionary; B = ``num_envs`` rows of it are stacked in the vector environment:

| key | space | meaning |
|---|---|---|
| ``hidden`` | Box [D] float32 | h at t |
| ``since`` | Discrete(T + 1) | bytes since the last start, 0 at t = 0 |
| ``byte`` | Discrete(257) | x[t-1]; 256 at t = 0 |
| ``recent`` | MultiBinary(n_past) | recent[j-1] = start[t-j], 0 before the sequence; absent when n_past = 0 |

The action 1 says that byte t starts a segment. At t = 0 it is ignored: byte 0 always starts one. The reward is in nats,
``early_nll - nll``, less the price of a start where there was a choice. The end of a document is ``terminated``, the end of a crop
``truncated``. ``info`` of a step holds its ``nll`` and ``early_nll`` in nats. ``info["is_choice"]``, of a reset too, is about the
observation that it comes with: False where the next action will be ignored. The noise that policies of this library act by
is not shown: a foreign agent brings its own.

Letters: B rows, T bytes, D width.
"""

import math
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from tensordict import TensorDict, TensorDictBase

from segment_env.batch import ByteStream, Episodes
from segment_env.boundaries import NUM_BYTES
from segment_env.diagnostics import Delimiter
from segment_env.env import SegmentEnv
from segment_env.errors import UserError
from segment_env.scorer import Scorer

ID = "segment_env/Boundaries-v0"

Arrays = dict[str, np.ndarray]  #: a batched observation


class BoundaryEnv(gymnasium.Env[dict[str, Any], Any]):
    """One row: its episodes are the sequences 0, 1, 2, ... of a seed.

    ``reset(seed=s)`` begins with sequence 0 of the seed s, so that it replays bit for bit; ``reset()`` goes on to the next one.

    Args: ``stream`` of bytes and ``scorer``, where one object that is both need be given once, and none at all means the problem
    :class:`~segment_env.diagnostics.Delimiter`; ``length`` T of a crop; ``n_past``, length of ``recent``; ``price`` in nats of a
    start at a choice (None: the scorer's ``default_price``, 0.5 of a diagnostic problem, or 0 where it has none); ``seed`` of the
    bytes until a reset names another (None: a random one); ``device`` of the scorer. Raises UserError where these do not make an
    environment, and on a step before the first reset.
    """

    metadata = {"render_modes": []}

    def __init__(
        self,
        stream: ByteStream | None = None,
        scorer: Scorer | None = None,
        *,
        length: int = 128,
        n_past: int = 0,
        price: float | None = None,
        seed: int | None = None,
        device: torch.device | str = "cpu",
    ):
        self._rows = _Rows(1, stream, scorer, length, n_past, price, _seed(self, seed), device)
        self.core = self._rows.core  #: the SegmentEnv, of one row
        self.observation_space = self._rows.space
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin the next episode, or with a ``seed`` the first of that seed."""
        super().reset(seed=seed)
        observation, info = self._rows.reset(seed)
        return _row(observation), _scalars(info)

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Decide whether byte t starts a segment, and read it."""
        observation, reward, terminated, truncated, info = self._rows.step(action)
        return _row(observation), reward.item(), terminated.item(), truncated.item(), _scalars(info)


class BoundaryVectorEnv(gymnasium.vector.VectorEnv[Arrays, np.ndarray, np.ndarray]):
    """``num_envs`` rows, stepped together; row s plays the sequences s, s + B, s + 2 B, ... of a seed, each for itself.

    A row that ends begins its next episode within the same step: the observation is of the new one, ``info["final_obs"]`` [B] holds
    the last observation of the old one and ``info["final_info"]`` the step's info, as Gymnasium's own vector environments give them.
    Every key of ``info`` has a mask ``_key`` [B] of the rows that it speaks of: ``nll`` of an ended row is in the ``final_info``.

    Args: ``num_envs`` B; the others, and what is raised, as of :class:`BoundaryEnv`. Here ``reset(seed=s)`` seeds all rows at once.
    """

    metadata = {"render_modes": [], "autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(
        self,
        num_envs: int = 1,
        stream: ByteStream | None = None,
        scorer: Scorer | None = None,
        *,
        length: int = 128,
        n_past: int = 0,
        price: float | None = None,
        seed: int | None = None,
        device: torch.device | str = "cpu",
    ):
        self._rows = _Rows(num_envs, stream, scorer, length, n_past, price, _seed(self, seed), device)
        self.core = self._rows.core  #: the SegmentEnv, of B rows
        self.num_envs = num_envs
        self.autoreset_mode = AutoresetMode.SAME_STEP  # TorchRL's wrapper looks for it here
        self.single_observation_space = self._rows.space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.single_action_space = spaces.Discrete(2)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Arrays, dict[str, Any]]:
        """Begin the next episode of every row, or with a ``seed`` its first of that seed."""
        super().reset(seed=seed)
        observation, info = self._rows.reset(seed)
        return observation, _masked(info, np.ones(self.num_envs, dtype=bool))

    def step(self, actions: np.ndarray) -> tuple[Arrays, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Decide for every row whether its byte t starts a segment, and read it. ``actions`` [B]."""
        observation, reward, terminated, truncated, values = self._rows.step(actions)
        ended = terminated | truncated
        if not ended.any():
            return observation, reward, terminated, truncated, _masked(values, ~ended)
        final_obs = np.full(self.num_envs, None, dtype=object)
        for row in ended.nonzero()[0]:
            final_obs[row] = _row(observation, row)
        observation, begun = self._rows.restart(ended)
        info = _masked(values, ~ended) | _masked(begun, np.ones_like(ended))
        info |= {"final_obs": final_obs, "_final_obs": ended, "final_info": _masked(values, ended), "_final_info": ended.copy()}
        return observation, reward, terminated, truncated, info


class _Rows:
    """The core, with NumPy arrays in and out; all of them are the caller's to keep."""

    def __init__(
        self,
        num_rows: int,
        stream: ByteStream | None,
        scorer: Scorer | None,
        length: int,
        n_past: int,
        price: float | None,
        seed: int,
        device: torch.device | str,
    ):
        if any(type(value) is not int or value < least for value, least in ((num_rows, 1), (length, 1), (n_past, 0))):
            got = f"got {num_rows!r}, {length!r} and {n_past!r}"
            raise UserError(f"num_envs and length must be whole numbers from 1 on, and n_past one from 0 on: {got}")
        if not (price is None or isinstance(price, int | float) and math.isfinite(price)):
            raise UserError(f"price must be a number of nats, got {price!r}")
        stream, scorer = _problem(stream, scorer, device)
        price = getattr(scorer, "default_price", 0.0) if price is None else price
        self.core = SegmentEnv(scorer, Episodes(stream, num_rows, length, seed), n_past=n_past, price=price, device=device)
        self.space = _space(scorer.width, length, n_past)

    def reset(self, seed: int | None) -> tuple[Arrays, Arrays]:
        """Every row's next episode, or with a ``seed`` its first: observation and info, [B, ...]."""
        if seed is not None:
            self.core.set_seed(seed)
        return self._seen(self.core.reset())

    def restart(self, rows: np.ndarray) -> tuple[Arrays, Arrays]:
        """The next episode of some ``rows`` [B] bool; the others are where they were. Observation and info of all."""
        mask = torch.as_tensor(rows, device=self.core.device)[:, None]
        return self._seen(self.core.reset(self._now.set("_reset", mask)))

    def step(self, actions: Any) -> tuple[Arrays, np.ndarray, np.ndarray, np.ndarray, Arrays]:
        """``actions`` [B] -> observation, reward, terminated, truncated, info: the last four and each value of info are [B]."""
        if self.core.position[0] < 0:
            raise UserError("reset the environment before its first step")
        rows, given = self.core.batch_size.numel(), np.asarray(actions)
        if given.size != rows or given.dtype.kind not in "iub" or not np.isin(given, (0, 1)).all():
            raise UserError(f"actions must be {rows} whole numbers, 0 or 1, got {actions!r}")
        if rows == 1 and not self._now["valid"].all():
            raise UserError("the episode has ended: reset the environment before its next step")
        action = torch.from_numpy(given.astype(np.int64).reshape(self.core.batch_size))
        step = self.core.step(TensorDict({"action": action}, self.core.batch_size, device=self.core.device))["next"]
        observation, info = self._seen(step)
        reward, nll, early_nll = (_numpy(step[key]).squeeze(1).astype(np.float64) for key in ("reward", "nll", "early_nll"))
        terminated, truncated = (_numpy(step[key]).squeeze(1) for key in ("terminated", "truncated"))
        return observation, reward, terminated, truncated, {"nll": nll, "early_nll": early_nll} | info

    def _seen(self, seen: TensorDictBase) -> tuple[Arrays, Arrays]:
        self._now = seen
        observation = {key: _numpy(seen[key]).astype(space.dtype, copy=False) for key, space in self.space.items()}
        return observation, {"is_choice": _numpy(seen["is_choice"])}


def _problem(stream: Any, scorer: Any, device: torch.device | str) -> tuple[Any, Any]:
    """Stream and scorer, where either may stand for both. Raises UserError where one of them is missing."""
    if stream is None and scorer is None:
        scorer = Delimiter().to(device)
    stream, scorer = (scorer if stream is None else stream), (stream if scorer is None else scorer)
    if not hasattr(stream, "sequences"):
        raise UserError(f"{type(stream).__name__} is no stream of bytes: give stream= too")
    if not hasattr(scorer, "predict"):
        raise UserError(f"{type(scorer).__name__} does not score bytes: give scorer= too")
    return stream, scorer


def _space(width: int, length: int, n_past: int) -> spaces.Dict:
    keys: dict[str, spaces.Space] = {
        "hidden": spaces.Box(-np.inf, np.inf, (width,), np.float32),
        "since": spaces.Discrete(length + 1),
        "byte": spaces.Discrete(NUM_BYTES + 1),
    }
    return spaces.Dict(keys | {"recent": spaces.MultiBinary(n_past)} if n_past else keys)


def _seed(env: gymnasium.Env | gymnasium.vector.VectorEnv, seed: int | None) -> int:
    """``seed``, or one from the environment's own generator: two environments without a seed do not play the same bytes."""
    return int(env.np_random.integers(1 << 31)) if seed is None else seed


def _numpy(values: torch.Tensor) -> np.ndarray:
    return (values.float() if values.dtype == torch.bfloat16 else values).cpu().numpy()  # NumPy has no bfloat16


def _row(arrays: Arrays, row: int = 0) -> dict[str, Any]:
    """One row of a batched observation."""
    return {key: value[row] for key, value in arrays.items()}


def _scalars(info: Arrays) -> dict[str, Any]:
    """Info of a single row, as Python's numbers."""
    return {key: value.item() for key, value in info.items()}


def _masked(values: Arrays, rows: np.ndarray) -> dict[str, Any]:
    """Values [B] of ``rows`` [B] bool, zero elsewhere, each with its mask."""
    return {key: np.where(rows, value, np.zeros_like(value)) for key, value in values.items()} | {f"_{key}": rows.copy() for key in values}


gymnasium.register(ID, entry_point="segment_env.gym:BoundaryEnv", vector_entry_point="segment_env.gym:BoundaryVectorEnv")
