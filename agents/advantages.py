"""Advantages: a list of small named steps from rewards to what a decision is judged by.

A step is a function ``step(values, rollout) -> values``; an ablation is a line removed. Values begin as the reward without its
early-exit part, -nll[t] - price * a[t] in nats; where ``valid`` is False they are 0 before and after every step.

Two facts carry the baselines: the early head never sees a boundary, and the bytes do not depend on the actions. Whatever is
subtracted from the return of a row at t may therefore depend on all of its bytes, and on other rows' actions, at no bias; it may
not depend on the row's own action a[t].

Letters: S sequences, K boundary samples of a sequence, B rows, T bytes.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from tensordict import TensorDictBase
from torch import Tensor

from agents import returns
from agents.totals import sum_of_others, sum_over_ranks

Step = Callable[[Tensor, TensorDictBase], Tensor]
Steps = Sequence[Step] | Mapping[str, Step | None]  #: in their order; names are for configurations, and None is a step left out


def in_order(steps: Steps) -> list[Step]:
    """The steps that are there."""
    return [step for step in steps.values() if step is not None] if isinstance(steps, Mapping) else list(steps)


def function_of(step: Callable) -> Callable:
    """What a partial function is a part of; any other as it is."""
    return getattr(step, "func", step)


def name_of(step: Callable) -> str:
    """What to call a step in a message."""
    return getattr(function_of(step), "__name__", repr(step))


def advantage(rollout: TensorDictBase, steps: Sequence[Step]) -> Tensor:
    """Run ``steps`` over the rewards of ``rollout`` [B, T]: -> A [B, T], 0 where not valid."""
    valid = rollout["valid"]
    values = (rollout["next", "reward"] - rollout["next", "early_nll"]).squeeze(-1)
    values = torch.where(valid, values, 0.0)
    for step in steps:
        result = step(values, rollout)
        if result.shape != valid.shape:
            raise ValueError(
                f"the advantage step {name_of(step)} must return values of shape [B, T] = {list(valid.shape)}, not {list(result.shape)}"
            )
        values = torch.where(valid, result, 0.0)
    return values


def early_exit(values: Tensor, rollout: TensorDictBase) -> Tensor:
    """r[t] += -log p_early(x[t]): rewards become gains over a prediction that sees no boundary (arXiv 2602.13940). No bias."""
    return values + rollout["next", "early_nll"].squeeze(-1)


def discounted_return(values: Tensor, rollout: TensorDictBase, gamma: float) -> Tensor:
    """G[t] = sum_k gamma^k r[t+k] within the episode. With gamma < 1 the update is the gradient of no objective.

    A horizon in bytes or milliseconds becomes gamma by :func:`agents.returns.gamma_of_horizon`.
    """
    return returns.discounted_return(values, rollout["next", "done"].squeeze(-1), gamma)


def hard_horizon(values: Tensor, rollout: TensorDictBase, horizon: int) -> Tensor:
    """G[t] = sum of r[t+k] over k < ``horizon`` bytes within the episode, undiscounted. Biased by what comes later.

    As with gamma < 1 the update is the gradient of no objective: a decision is credited with its next ``horizon`` rewards in full and
    with nothing behind them.
    """
    return returns.hard_horizon(values, rollout["next", "done"].squeeze(-1), horizon)


def gae(values: Tensor, rollout: TensorDictBase, gamma: float, lam: float) -> Tensor:
    """A[t] = sum_k (gamma lam)^k delta[t+k], delta[t] = r[t] + gamma V[t+1] - V[t] within the episode (Schulman et al. 2016, eq. 16).

    V is the critic's ``state_value`` [B, T, 1], of the root and of ``next``. Where an episode is truncated V[t+1] is what would have
    come; where it is terminated, 0. Writes the critic's target A + V as ``value_target``, as TorchRL's estimators do. With
    ``lam`` = 1 it is the Monte-Carlo return less V[t], up to the value of what a crop cuts off; below 1 it is biased by the
    critic's error. On strings of 8 bytes (tests/test_bias.py) an untrained critic changes the expected gradient by 78%, 53%, 9% of its
    norm at ``lam`` = 0, 0.5, 0.95, the best function of all bytes that reads no decision by 65%, 47%, 8%.
    """
    returns.check_discount("gamma", gamma)
    returns.check_discount("lam", lam)
    following = rollout["next"]
    here, there = (each["state_value"].squeeze(-1) for each in (rollout, following))
    there = torch.where(following["terminated"].squeeze(-1), 0.0, there)
    deltas = torch.where(rollout["valid"], values + gamma * there - here, 0.0)
    result = returns.discounted_return(deltas, following["done"].squeeze(-1), gamma * lam)
    rollout["value_target"] = (result + here)[..., None]
    return result


def subtract_baseline(values: Tensor, rollout: TensorDictBase) -> Tensor:
    """Subtract ``baseline`` [B, T], which the agent has read before it was fitted on these rows, and keep what it is fitted to.

    Writes ``values`` as ``baseline_target`` [B, T]. No bias where the baseline of a row reads none of the row's actions.
    """
    rollout["baseline_target"] = values
    return values - rollout["baseline"]


def batch_relative(values: Tensor, rollout: TensorDictBase, own_sample: bool = True) -> Tensor:
    """Subtract the mean over the rows of all ranks that are valid at the same index t.

    With ``own_sample`` the mean holds the row itself, as in the paper: the expected gradient shrinks to (n-1)/n of itself for n
    valid rows of different sequences, and to 0 for n = 1. Without, it is the mean over the other *sequences'* rows (0 where there
    are none), and costs no bias, also before or after :func:`leave_one_out`.
    """
    mates = torch.ones_like(_same_sequence(rollout, values.dtype)) if own_sample else 1 - _same_sequence(rollout, values.dtype)
    there = torch.where(rollout["valid"], values, 0.0), rollout["valid"].to(values.dtype)
    elsewhere = sum_of_others(*(each.sum(0) for each in there))
    return values - _mean_over(mates, values, rollout["valid"], *elsewhere)


def leave_one_out(values: Tensor, rollout: TensorDictBase) -> Tensor:
    """Subtract the mean over the other K - 1 boundary samples of the same bytes (RLOO, Kool et al. 2019). No bias.

    All noise that comes from the bytes alone cancels. Rows without another sample keep their value.
    """
    same = _same_sequence(rollout, values.dtype)
    return values - _mean_over(same - torch.eye(len(same), dtype=same.dtype, device=same.device), values, rollout["valid"])


def group_relative(values: Tensor, rollout: TensorDictBase, divide: bool = False, epsilon: float = 1e-6) -> Tensor:
    """Subtract the mean over the K boundary samples of the same bytes, the row's own among them (GRPO, Shao et al. 2024).

    The expected gradient shrinks to (K-1)/K of itself. ``divide`` by the group's standard deviation at t, as GRPO does, biases it
    further: small differences then count as much as large ones. Rows without another sample become 0.
    """
    same = _same_sequence(rollout, values.dtype)
    centred = torch.where(rollout["valid"], values - _mean_over(same, values, rollout["valid"]), 0.0)
    if not divide:
        return centred
    return centred / (_mean_over(same, centred.square(), rollout["valid"]).sqrt() + epsilon)


def normalise(values: Tensor, rollout: TensorDictBase, epsilon: float = 1e-8) -> Tensor:
    """Divide by the standard deviation over all choices of all ranks. Biased: the deviation holds the row's own actions."""
    chosen = rollout["is_choice"].to(values.dtype)
    total, count = sum_over_ranks((values * chosen).sum(), chosen.sum())
    mean = total / count.clamp(min=1)
    (squares,) = sum_over_ranks(((values - mean).square() * chosen).sum())
    return values / (squares.div(count.clamp(min=1)).sqrt() + epsilon)


def _same_sequence(rollout: TensorDictBase, dtype: torch.dtype) -> Tensor:
    """[B, B]: 1 where two rows sample the same bytes, the diagonal included."""
    sequence = rollout["sequence"][:, 0]
    return (sequence[:, None] == sequence).to(dtype)


def _mean_over(mates: Tensor, values: Tensor, valid: Tensor, more: Tensor | float = 0.0, count: Tensor | float = 0.0) -> Tensor:
    """out[b, t] = mean of values[c, t] over the valid rows c with mates[b, c] = 1, and over ``count`` [T] others that sum to ``more``.

    0 where there is none.
    """
    return (mates @ values + more) / (mates @ valid.to(values.dtype) + count).clamp(min=1)
