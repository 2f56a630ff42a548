"""What single decisions are worth, by flipping them.

The truth: all boundaries but one are drawn from the policy, the one at t is set to 1 and to 0, and the two returns are subtracted. The
expected descent direction at t is -p (1 - p) times the mean of that difference.

Letters: S sequences, T bytes, B rows, M flipped positions of a sequence, N draws of boundaries, Z resamplings.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from agents.gradient_noise import RESAMPLINGS, weights
from agents.returns import discounted_return
from segment_env.batch import Batch, Samples
from segment_env.scorer import Policy, Scorer
from segment_env.unroll import unroll


@torch.no_grad()
def true_direction(
    scorer: Scorer, policy: Policy, batch: Batch, positions: Tensor, gamma: float, soft_cap: float | None, rounds: int
) -> tuple[Tensor, Tensor]:
    """The expected direction g at ``positions`` [S, M] of ``batch``, from ``rounds`` draws of all other boundaries.

    Policies with ``n_past`` = 0 only: later decisions do not depend on the flipped one. Returns: mean and standard error [S, M].
    """
    if policy.n_past:
        raise ValueError(f"flipping one decision moves no other only where n_past = 0, got {policy.n_past}")
    drawn = torch.stack([_difference(scorer, policy, batch, positions, gamma, soft_cap, seed) for seed in range(rounds)])
    return drawn.mean(0), drawn.std(0) / rounds**0.5


def _difference(scorer: Scorer, policy: Policy, batch: Batch, positions: Tensor, gamma: float, soft_cap: float | None, seed: int) -> Tensor:
    sequences, flips = positions.shape
    single = Samples([1] * sequences, device=positions.device)
    noisy = Batch(batch.bytes, batch.valid, batch.terminated, batch.sequence, seed)
    drawn, _ = unroll(scorer, policy, noisy, single, soft_cap=soft_cap)
    both = Samples([2 * flips] * sequences, device=positions.device)  # rows: sequence, then position, then 1 and 0
    actions = both.expand(drawn["action"].bool()).clone()
    at = positions.flatten().repeat_interleave(2)
    row = torch.arange(len(at), device=at.device)
    actions[row, at] = row % 2 == 0
    rollout, _ = unroll(scorer, policy, batch, both, actions=actions, soft_cap=soft_cap)
    returns = discounted_return(rollout["next", "reward"].squeeze(-1), rollout["next", "done"].squeeze(-1), gamma)
    with_start, without = returns[row, at].view(sequences, flips, 2).unbind(-1)
    p = drawn["logits"].sigmoid().gather(1, positions)
    return -p * (1 - p) * (with_start - without)


@dataclass(frozen=True)
class Truth:
    """True directions, and where they were measured; all [S, M]."""

    positions: Tensor  #: t
    direction: Tensor  #: expected g, see :func:`true_direction`
    error: Tensor  #: its standard error
    is_start: Tensor  #: True at starts of the stream's reference

    def errors(self, directions: Tensor) -> dict[str, Tensor]:
        """How wrongly single rows credit these positions: ``directions`` g [N, S, T] -> figures [Z + 1], positions resampled.

        ``noise``: mean (g - truth)^2 over mean truth^2, free of the truth's own error. ``wrong_at_starts`` and ``wrong_elsewhere``: how
        often g points away from the truth, in draws where it points anywhere, every position weighted by |truth|; nan without such.
        """
        g = directions.gather(2, self.positions.expand(len(directions), -1, -1)).double().flatten(1)
        truth, error, is_start = self.direction.double().flatten(), self.error.double().flatten(), self.is_start.flatten()
        w = weights(len(truth), RESAMPLINGS, 0).to(truth.device)
        wrong, moved = (g * truth < 0).double().mean(0) * truth.abs(), (g != 0).double().mean(0) * truth.abs()
        shares = [w[:, where] @ wrong[where] / (w[:, where] @ moved[where]) for where in (is_start, ~is_start)]
        noise = (w @ ((g - truth).square().mean(0) - error.square())) / (w @ (truth.square() - error.square()))
        return {"noise": noise, "wrong_at_starts": shares[0], "wrong_elsewhere": shares[1]}
