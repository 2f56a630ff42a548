"""Sums over all ranks, for losses and statistics that are to mean the same however the rows are dealt out to processes.

A statistic of a batch is a function of sums over its rows. Written with :func:`sum_over_ranks`, it is the same function of the rows of
all ranks, in value and in gradient; in a process by itself the sums are what they were. Sums are taken while :func:`over_ranks` is
entered, as the joint update does; elsewhere, as in evaluation, a rank is by itself.

Letters: R ranks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, distributed

_entered: ContextVar[bool] = ContextVar("over_ranks", default=False)


@contextmanager
def over_ranks(on: bool = True) -> Iterator[None]:
    """A context in which sums go over all ranks: every rank must enter it, and take the same sums of tensors of the same shapes."""
    token = _entered.set(on and distributed.is_initialized() and distributed.get_world_size() > 1)
    try:
        yield
    finally:
        _entered.reset(token)


def sum_over_ranks(*values: Tensor) -> tuple[Tensor, ...]:
    """Each of ``values`` summed over all ranks, in one exchange, in float64; as it is where a rank is by itself.

    The gradient that comes back to a rank's own part is R times that of the sum: all ranks hold the sum, in R losses, and
    data parallelism takes the mean of their gradients. So a loss that is a function of such sums has the gradient that one process
    with all rows would have, and one that knows nothing of ranks has the mean of theirs.
    """
    if not _entered.get():
        return values
    flat: Tensor = _Sum.apply(torch.cat([value.flatten().double() for value in values]))
    parts = flat.split([value.numel() for value in values])
    return tuple(part.view(value.shape).to(value.dtype) for part, value in zip(parts, values, strict=True))


def sum_of_others(*values: Tensor) -> tuple[Tensor, ...]:
    """Each of ``values`` summed over all ranks but this one: zeros where a rank is by itself."""
    if not _entered.get():
        return tuple(torch.zeros_like(value) for value in values)
    return tuple(total - value for total, value in zip(sum_over_ranks(*values), values, strict=True))


def mean_over_ranks(value: Tensor, weight: Tensor | float) -> Tensor:
    """The mean over all ranks of ``value`` (scalar), which is itself a mean over ``weight`` things of a rank; 0 of none at all."""
    if not _entered.get():
        return value
    total, things = sum_over_ranks(value * weight, torch.as_tensor(weight, dtype=torch.float64, device=value.device))
    return total / things.clamp(min=1).to(total.dtype)


class _Sum(torch.autograd.Function):
    """An all-reduce with a gradient, which ``accelerate.reduce`` and ``torch.distributed.all_reduce`` have not."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        total = value.clone()
        distributed.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Tensor:
        return gradients[0] * distributed.get_world_size()
