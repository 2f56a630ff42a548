"""Returns: what a decision is credited with. Pure functions of [B, T] tensors.

Letters: B rows, T bytes.
"""

import math

import torch
from torch import Tensor


def check_discount(name: str, value: float) -> None:
    """Raises ValueError unless ``value``, called ``name``, is a number in [0, 1]."""
    if not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"{name} must lie in [0, 1], got {value}")


def discounted_return(reward: Tensor, done: Tensor, gamma: float) -> Tensor:
    """G[t] = r[t] + gamma (1 - done[t]) G[t+1], G[T] = 0: in log2(T) vector steps, without a loop over bytes.

    An affine map composes with the next one, and pairs of pairs with each other (Hillis and Steele, CACM 1986).

    Args: ``reward`` [B, T] r[0..T-1]; ``done`` [B, T] bool, True where an episode ends with this step; ``gamma`` in [0, 1].
    Returns: [B, T], the return from t on. Raises ValueError on another gamma.

    >>> discounted_return(torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[False, False, True]]), 0.5).tolist()
    [[3.0, 4.0, 4.0]]
    """
    check_discount("gamma", gamma)
    value, carry = reward, gamma * (~done).to(reward.dtype)
    reach, length = 1, reward.shape[-1]
    while reach < length:
        head, tail = slice(None, -reach), slice(reach, None)
        value = torch.cat([value[..., head] + carry[..., head] * value[..., tail], value[..., -reach:]], -1)
        carry = torch.cat([carry[..., head] * carry[..., tail], torch.zeros_like(carry[..., -reach:])], -1)
        reach *= 2
    return value


def hard_horizon(reward: Tensor, done: Tensor, horizon: int) -> Tensor:
    """G[t] = sum of r[t+k] over k < ``horizon`` within the episode, all weights 1: in log2(horizon) vector steps, by sums alone.

    Windows of 1, 2, 4, ... bytes are doubled, and those that make up the binary digits of the horizon are laid end to end. Nothing
    is subtracted, so that no digits cancel, as they would in differences of running sums.

    Args: ``reward`` [B, T]; ``done`` [B, T] bool, True where an episode ends with this step; ``horizon`` in bytes, >= 1.
    Returns: [B, T]. Raises ValueError on another horizon.

    >>> hard_horizon(torch.tensor([[1.0, 2.0, 4.0, 8.0]]), torch.tensor([[False, False, False, True]]), 2).tolist()
    [[3.0, 6.0, 12.0, 8.0]]
    """
    if type(horizon) is not int or horizon < 1:
        raise ValueError(f"a hard horizon must be a whole number of bytes, at least 1, got {horizon!r}")
    left = min(horizon, reward.shape[-1])
    window, carry, size = reward, (~done).to(reward.dtype), 1  # sums of the next ``size`` rewards; 1 where the episode outlasts them
    value, going, covered = torch.zeros_like(reward), torch.ones_like(carry), 0
    while left:
        if left & 1:
            value = value + going * _ahead(window, covered)
            going, covered = going * _ahead(carry, covered), covered + size
        window, carry = window + carry * _ahead(window, size), carry * _ahead(carry, size)
        left, size = left >> 1, 2 * size
    return value


def _ahead(values: Tensor, steps: int) -> Tensor:
    """out[..., t] = values[..., t + steps], 0 behind the end."""
    return torch.nn.functional.pad(values[..., steps:], (0, min(steps, values.shape[-1])))


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
