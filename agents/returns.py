"""Returns: what a decision is credited with. Pure functions of [B, T] tensors.

Letters: B rows, T bytes.
"""

import math

import torch
from torch import Tensor


def discounted_return(reward: Tensor, done: Tensor, gamma: float) -> Tensor:
    """G[t] = r[t] + gamma (1 - done[t]) G[t+1], G[T] = 0: in log2(T) vector steps, without a loop over bytes.

    An affine map composes with the next one, and pairs of pairs with each other (Hillis and Steele, CACM 1986).

    Args: ``reward`` [B, T] r[0..T-1]; ``done`` [B, T] bool, True where an episode ends with this step; ``gamma`` in [0, 1].
    Returns: [B, T], the return from t on. Raises ValueError on another gamma.

    >>> discounted_return(torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[False, False, True]]), 0.5).tolist()
    [[3.0, 4.0, 4.0]]
    """
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma must lie in [0, 1], got {gamma}")
    value, carry = reward, gamma * (~done).to(reward.dtype)
    reach, length = 1, reward.shape[-1]
    while reach < length:
        head, tail = slice(None, -reach), slice(reach, None)
        value = torch.cat([value[..., head] + carry[..., head] * value[..., tail], value[..., -reach:]], -1)
        carry = torch.cat([carry[..., head] * carry[..., tail], torch.zeros_like(carry[..., -reach:])], -1)
        reach *= 2
    return value


def gamma_of_horizon(horizon: float, unit: str = "bytes", sample_rate: float | None = None) -> float:
    """The discount whose weights 1, gamma, gamma^2, ... sum to ``horizon``: gamma = 1 - 1 / horizon.

    Args: ``horizon`` in ``unit``, "bytes" or "ms"; ``sample_rate``, bytes per second, needed for milliseconds. inf gives 1.
    Raises ValueError on a horizon under one byte, another unit or a missing rate.

    >>> gamma_of_horizon(100), gamma_of_horizon(12.5, "ms", 8000)
    (0.99, 0.99)
    """
    if unit == "ms":
        if not sample_rate:
            raise ValueError("a horizon in milliseconds needs a stream with a sample rate; give it in bytes")
        horizon = horizon / 1000 * sample_rate
    elif unit != "bytes":
        raise ValueError(f'a horizon is given in "bytes" or "ms", not {unit!r}')
    if not horizon >= 1:
        raise ValueError(f"a horizon must be at least one byte, got {horizon}")
    return 1.0 if math.isinf(horizon) else 1 - 1 / horizon
