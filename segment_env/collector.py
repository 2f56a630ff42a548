"""TorchRL's collector, with the whole trajectory computed in one parallel pass.

Letters: B rows, T bytes.
"""

from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.collectors import Collector
from torchrl.envs import ExplorationType

from segment_env.actor import Actor
from segment_env.env import SegmentEnv
from segment_env.errors import UserError
from segment_env.unroll import unroll

_STEPPING = ("init_random_frames", "reset_at_each_iter", "set_truncated", "compact_obs")  #: options that only stepping can honour


class SegmentCollector(Collector):
    """Collects batches of B rows x T bytes for outside trainers, replay buffers and losses; it runs without gradients.

    Its tensordicts have TorchRL's structure either way: ``fast`` computes them with :func:`unroll`; otherwise the environment is
    stepped. (Only stepping resets in the middle of a batch: with ``fast``, rows that end early are padded, ``valid`` False.)

    Args: ``env`` and ``actor``, whose policy is used; ``total_frames``, bytes to collect, -1: endless; ``fast``; other keywords as
    TorchRL's. Raises UserError where ``env`` is wrapped, or where ``fast`` would pass over an option or a key silently.
    """

    def __init__(self, env: SegmentEnv, actor: Actor, *, total_frames: int = -1, fast: bool = True, **kwargs: Any):
        if not isinstance(env, SegmentEnv):
            raise UserError(f"SegmentCollector takes a bare SegmentEnv, not {type(env).__name__}: put transforms into postproc=")
        if kwargs.get("max_frames_per_traj"):
            raise UserError("max_frames_per_traj would wrap the environment: set the length of its episodes instead")
        if fast and (options := [name for name in _STEPPING if kwargs.get(name)]):
            raise UserError(f"{', '.join(options)} needs an environment that is stepped: use fast=False")
        if env.n_past != (n_past := actor.policy.n_past):
            raise UserError(f"the policy reads {n_past} past decisions and the environment shows {env.n_past}: use the same n_past")
        self._fast = fast
        kwargs = {"device": env.device, "trust_policy": True} | kwargs  # an actor needs no wrapping; a rule has no parameters to move
        super().__init__(
            env,
            actor,
            frames_per_batch=env.batch_size.numel() * env.episodes.length,
            total_frames=total_frames,
            exploration_type=ExplorationType.RANDOM,
            auto_register_policy_transforms=False,
            **kwargs,
        )

    @torch.no_grad()
    def rollout(self) -> TensorDictBase:
        """Play the batch that the last reset loaded, then load the next."""
        if not self._fast:
            return super().rollout()
        if self.pre_collect_hook is not None:
            self.pre_collect_hook()
        env, actor = self.env, self.policy
        rollout, _ = unroll(env.scorer, actor.policy, env.batch, env.samples, soft_cap=actor.soft_cap, price=env.price)
        self._carrier.update(env.reset())
        if self.track_traj_ids:
            ids = self._carrier["collector", "traj_ids"]
            rollout["collector", "traj_ids"] = ids[:, None].expand(rollout.shape).clone()
            self._update_traj_ids(rollout[:, -1])
        if self.storing_device is not None:
            rollout = rollout.to(self.storing_device)
        # Collectors in worker processes demand the object they shared, filled anew.
        return self._final_rollout.update_(rollout) if self._use_buffers else rollout

    def state_dict(self) -> dict[str, Any]:
        """TorchRL's, and the position in the data."""
        return {**super().state_dict(), "position": self.env.position}

    def load_state_dict(self, state_dict: dict[str, Any], **kwargs: Any) -> None:
        """Restores the position too: the next batch is the one that the saved collector would have played."""
        state = dict(state_dict)
        self.env.position = [n - 1 for n in state.pop("position")]  # the batch at hand was loaded but not yet played
        super().load_state_dict(state, **kwargs)
        self._carrier.update(self.env.reset())

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the environment and load its first batch anew."""
        seed = super().set_seed(seed, static_seed)
        self._carrier.update(self.env.reset())
        return seed
