"""Boundary placement as a vectorised TorchRL environment.

One step is one byte. The bytes are fixed at reset and do not depend on the actions; only the reward does.

| key | shape, dtype | where | meaning |
|---|---|---|---|
| ``hidden`` | [B, D] float | root, next | h at t, detached |
| ``recent`` | [B, n_past] int64 | root, next | recent[:, j-1] = start[t-j], 0 before the sequence; absent when n_past = 0 |
| ``since`` | [B] int64 | root, next | bytes since the last start, 0 at t = 0 |
| ``byte`` | [B] int64 | root, next | x[t-1]; 256 at t = 0 |
| ``noise`` | [B] float32 | root, next | the uniform u[t]: our policies act by a = (u < p); no critic reads it |
| ``is_choice``, ``valid`` | [B] bool | root, next | valid and t > 0; a real byte |
| ``sequence`` | [B] int64 | root, next | id shared by the K rows of one sequence, unique under one seed |
| ``action`` | [B] int64 | root | 1: byte t starts a segment; ignored where ``is_choice`` is False |
| ``logits``, ``action_log_prob`` | [B] float | root | as sampled, after the soft cap if there was one |
| ``gate`` | [B] float | root | soft value of the action, from policies that give one to the scorer; ignored where the action is |
| ``reward``, ``nll``, ``early_nll`` | [B, 1] float | next | nats: reward = early_nll - nll - price * a |
| ``done``, ``terminated``, ``truncated`` | [B, 1] bool | next | end of a document: terminated; end of a crop: truncated |

Letters: S sequences, K boundary samples of a sequence, B rows = sum of K, T bytes, D width.
"""

from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torch.nn import functional as F
from torchrl.data import Bounded, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase

from segment_env.batch import Batch, Episodes, Samples
from segment_env.boundaries import BOS, NUM_BYTES, effective, effective_gate
from segment_env.errors import UserError
from segment_env.scorer import Scorer, reset_rows


class SegmentEnv(EnvBase):
    """S slots play sequences of ``episodes``, each with its K rows; the scorer rewards the boundaries.

    Rows end at their own length; a reset may name some sequences only, each with all of its K rows. Seeds replay bit for bit.

    Args: ``scorer``, kept outside the environment's modules: it is not trained, saved or moved with it; ``episodes``; ``samples``
    (default: one row a sequence); ``n_past``, length of ``recent``; ``price`` in nats of a start at a choice, a
    number or a scalar tensor that somebody else may change; ``device`` of the scorer. Raises UserError where samples do not fit the slots.
    """

    def __init__(
        self,
        scorer: Scorer,
        episodes: Episodes,
        samples: Samples | None = None,
        n_past: int = 0,
        price: float | Tensor = 0.0,
        device: torch.device | str = "cpu",
    ):
        samples = samples or Samples([1] * episodes.num_sequences, device=device)
        if samples.num_sequences != episodes.num_sequences:
            raise UserError(f"samples are given for {samples.num_sequences} sequences, but the episodes have {episodes.num_sequences}")
        super().__init__(device=device, batch_size=[samples.num_rows])
        self.__dict__["scorer"] = scorer  # not self.scorer: an environment is a module, and would register it
        self.episodes, self.samples, self.n_past, self.price = episodes, samples, n_past, price
        self._episode = torch.full((samples.num_sequences,), -1)  # n of every slot
        self._batch: Batch | None = None
        self._now: dict[str, Any] = {}  # what the last step has left, for every row
        self._make_specs()

    def _make_specs(self) -> None:
        rows, length = self.samples.num_rows, self.episodes.length
        flag = Categorical(2, shape=(rows,), dtype=torch.bool)
        observation = {
            "hidden": Unbounded((rows, self.scorer.width), dtype=self.scorer.dtype),
            "since": Bounded(0, length, (rows,), dtype=torch.int64),
            "byte": Categorical(NUM_BYTES + 1, shape=(rows,), dtype=torch.int64),
            "noise": Bounded(0, 1, (rows,), dtype=torch.float32),
            "is_choice": flag,
            "valid": flag.clone(),
            "sequence": Unbounded((rows,), dtype=torch.int64),
        }
        if self.n_past:
            observation["recent"] = Bounded(0, 1, (rows, self.n_past), dtype=torch.int64)
        nats = Unbounded((rows, 1), dtype=torch.promote_types(self.scorer.dtype, torch.float32))
        done = Categorical(2, shape=(rows, 1), dtype=torch.bool)
        self.observation_spec = Composite(observation, shape=(rows,))
        self.action_spec = Categorical(2, shape=(rows,), dtype=torch.int64)
        self.reward_spec = Composite({key: nats.clone() for key in ("reward", "nll", "early_nll")}, shape=(rows,))
        self.done_spec = Composite({key: done.clone() for key in ("done", "terminated", "truncated")}, shape=(rows,))

    @property
    def batch(self) -> Batch:
        """The sequences being played. Raises RuntimeError before the first reset."""
        if self._batch is None:
            raise RuntimeError("the environment has not been reset yet")
        return self._batch

    @property
    def position(self) -> list[int]:
        """How many episodes every slot has begun, less one: with the seed, all that a checkpoint needs."""
        return self._episode.tolist()

    @position.setter
    def position(self, episode: list[int]) -> None:
        self._episode = torch.tensor(episode)
        self._batch = None  # the next reset begins the episodes after these

    def _set_seed(self, seed: int | None) -> None:
        self.episodes = replace(self.episodes, seed=0 if seed is None else seed)
        self._episode, self._batch = torch.full_like(self._episode, -1), None

    @torch.no_grad()
    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs) -> TensorDict:
        asked = None if tensordict is None or self._batch is None else tensordict.get("_reset", None)
        whole = asked is None
        rows = torch.ones(self.batch_size, dtype=torch.bool, device=self.device) if asked is None else asked.view(self.batch_size)
        self._episode = self._episode + self._whole_sequences(rows).cpu()
        self._batch = self.episodes.batch(self._episode).to(self.device)  # other slots find the sequences that they had
        self._valid = F.pad(self.samples.expand(self._batch.valid), (0, 1))
        self._x = self.samples.expand(self._batch.bytes)
        self._noise = self.samples.noise(self._batch, self.episodes.length + 1)
        state, h = self.scorer.init_state(self.samples.num_rows, self.episodes.length)
        begin = {
            "state": state,
            "h": h,
            "time": torch.zeros(self.batch_size, dtype=torch.int64, device=self.device),
            "byte": torch.full(self.batch_size, BOS, device=self.device),
            "since": torch.zeros(self.batch_size, dtype=torch.int64, device=self.device),
            "recent": torch.zeros(*self.batch_size, self.n_past, dtype=torch.int64, device=self.device),
        }
        self._now = begin if whole else reset_rows(self._now, begin, rows)
        return self._observation()

    def _whole_sequences(self, rows: Tensor) -> Tensor:
        """Rows [B] bool -> slots [S] bool. Raises ValueError where a mask covers a part of a sequence's rows."""
        named = torch.zeros(self.samples.num_sequences, dtype=torch.int64, device=rows.device).index_add(0, self.samples.row, rows.long())
        counts = torch.tensor(self.samples.counts, device=rows.device)
        if not ((named == 0) | (named == counts)).all():
            raise ValueError("a reset must name all rows of a sequence or none: its samples share one sequence of bytes")
        return named > 0

    @property
    def _time(self) -> Tensor:
        return self._now["time"]

    def _at_time(self, values: Tensor) -> Tensor:
        """values [B, T or T+1] at every row's own time; a row that has ended stays at the end."""
        return values.gather(1, self._time[:, None].clamp(max=values.shape[1] - 1)).squeeze(1)

    def _observation(self) -> TensorDict:
        """What is seen at every row's time, and whether the row has ended."""
        valid = self._at_time(self._valid)
        done = ~valid[:, None]
        terminated = done & self.samples.expand(self.batch.terminated)[:, None]
        observation = {
            "hidden": self._now["h"].clone(),
            "since": self._now["since"].clone(),
            "byte": self._now["byte"].clone(),
            "noise": self._at_time(self._noise),
            "is_choice": valid & (self._time > 0),
            "valid": valid,
            "sequence": self.samples.expand(self.batch.sequence).clone(),
            "done": done,
            "terminated": terminated,
            "truncated": done & ~terminated,
        }
        if self.n_past:
            observation["recent"] = self._now["recent"].clone()
        return TensorDict(observation, self.batch_size, device=self.device)

    def _gate(self, tensordict: TensorDictBase, choice: Tensor, valid: Tensor) -> Tensor | None:
        """What the scorer reads beside the actions [B]. Raises UserError where it needs that and nobody gave it."""
        gate = tensordict.get("gate", None)
        if gate is not None:
            return effective_gate(gate, choice, valid)
        if getattr(self.scorer, "needs_gate", False):
            raise UserError("this scorer reads a gate beside every action: step the environment with the Actor of a policy that gives one")
        return None

    @torch.no_grad()
    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        now, valid, byte = self._now, self._at_time(self._valid), self._at_time(self._x)
        asked = tensordict.get("_step", None)
        if asked is not None and (valid & ~asked.view(self.batch_size)).any():
            raise ValueError("a step must name every row that has not ended: rows move on together")
        choice = valid & (self._time > 0)
        start = effective(tensordict["action"], choice, valid)
        state, log_p = self.scorer.predict(now["state"], start, self._gate(tensordict, choice, valid))
        both = (log_p, self.scorer.early_log_p(now["h"]))
        nll, early_nll = (torch.where(valid[:, None], -each.gather(-1, byte[:, None]), 0.0) for each in both)
        state, h = self.scorer.observe(state, byte)
        self._now = {
            "state": state,
            "h": h,
            "time": self._time + valid,
            "byte": byte,
            "since": torch.where(start, 1, now["since"] + valid),
            "recent": torch.cat([start.long()[:, None], now["recent"]], 1)[:, : self.n_past],
        }
        reward = early_nll - nll
        reward = torch.where((start & choice)[:, None], reward - self.price, reward)
        return self._observation().update({"reward": reward, "nll": nll, "early_nll": early_nll})
