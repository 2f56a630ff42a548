"""One number added to every logit, so that a policy's rate on held-out bytes is its target.

A controller holds the rate on the training bytes; other bytes move it, and bits per byte at different rates cannot be compared.

Letters: B rows, T bytes.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from agents.rates import mean_over
from segment_env.batch import Batch, Samples
from segment_env.boundaries import is_choice
from segment_env.errors import UserError, check_rate
from segment_env.scorer import Policy, Scorer

LARGEST = 16.0  #: of an offset, to either side
STEPS = 24  #: of bisection: 2 * LARGEST / 2^STEPS is below 1e-5


@torch.no_grad()
def offset_for(
    scorer: Scorer,
    policy: Policy,
    batches: Iterable[Batch],
    target: float,
    device: torch.device | str = "cpu",
    thresholded: bool = False,
) -> float:
    """The offset at which the mean probability of a start over the choices of ``batches``, uncapped, is ``target``.

    With ``thresholded``: at which that share of the choices has a probability above 1/2, which is the policy on a noise of 1/2.

    ``policy`` has a parallel form, and an ``offset`` that is added to its logits, as WindowPolicy has, or to what it thresholds: then
    the rate is that of the starts themselves. Decisions are sampled anew at every trial, by the batches' own noise. Raises UserError
    on another policy, a rate that is none, or where no offset within +-LARGEST reaches it.
    """
    check_rate(target, "the target rate")
    if not hasattr(policy, "offset") or not hasattr(policy, "parallel") or policy.reads_early_log_p:
        raise UserError(f"{type(policy).__name__} has no offset of its logits to calibrate")
    sampled: Any = policy.parallel
    seen = list(_inputs(scorer, batches, device))

    def rate(offset: float) -> float:
        with shifted_logits(policy, offset):
            drawn = [sampled(h, x, torch.full_like(noise, 0.5) if thresholded else noise, None) for h, x, noise, _ in seen]
        decisions = [each.action.double() if thresholded or each.logits is None else each.logits.sigmoid() for each in drawn]
        p, choice = (torch.cat([each.flatten() for each in column]) for column in (decisions, [choice for *_, choice in seen]))
        return float(mean_over(p, choice))

    low, high = -LARGEST, LARGEST
    if not rate(low) <= target <= rate(high):
        raise UserError(f"no offset of the logits brings the rate to {target}")
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if rate(middle) < target else (low, middle)
    return (low + high) / 2


@contextmanager
def shifted_logits(policy: Any, offset: float) -> Iterator[None]:
    """``policy`` with ``offset`` added to its logits before any cap."""
    before = policy.offset
    policy.offset = before + offset
    try:
        yield
    finally:
        policy.offset = before


def _inputs(scorer: Scorer, batches: Iterable[Batch], device: torch.device | str) -> Iterator[tuple]:
    """What decides, batch by batch: h [B, T, D], x, noise and is_choice [B, T]."""
    for batch in batches:
        batch = batch.to(device)
        samples = Samples([1] * len(batch.bytes), device=device)
        yield scorer.encode(batch.bytes)[:, :-1], batch.bytes, samples.noise(batch, batch.bytes.shape[1]), is_choice(batch.valid)
