"""Sampling decisions that depend on the last n decisions: exact, and mostly in a few passes over short blocks.

A decision compares a score that earlier decisions modulate with a threshold; decisions before the sequence are 0::

    a[t] = (s_0[t] + a[t-n] s_n[t] + ... + a[t-1] s_1[t] > threshold[t])

A position depends on earlier ones alone, so this has one fixed point, and that is the sequential sample. :func:`settle` cuts rows
into blocks and decides all blocks side by side, from a guess of what came before each; then again those whose past turned out to
be another, until none is left. A block mostly forgets its past before it ends, so that few passes do. Where none forgets, as under a
strict stride, a pass settles one block a row and no more: when the others have cost too much, :func:`walk` goes on from the first
position that has not settled. Sums are taken in the order above everywhere, and a product with 0 or 1 is exact: both functions
agree bit for bit in any dtype.

A threshold of -inf is always passed and one of inf never: so decisions are pinned, and so is a[0] = 1.

Letters: B rows, T bytes, n past decisions; L positions of a block, R blocks side by side, M blocks decided again.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 64  #: L, or n where that is more
STEP = 4000  #: what a step costs besides its decisions, counted in decisions
PASS = 16  #: what a pass costs besides its steps, counted in steps of the walk
BUDGET = 0.1  #: what passes may cost beyond what they settle, as a share of the whole walk


def modulated(scores: Sequence[Tensor], past: Sequence[Tensor]) -> Tensor:
    """s_0 + sum_j past_j s_j, from the oldest decision to the latest.

    ``scores``: s_0 .. s_n; ``past``: the decisions at t-1 .. t-n, 0 or 1. All [...] and of one dtype.
    """
    total = scores[0]
    for score, decision in zip(reversed(scores[1:]), reversed(past), strict=True):
        total = torch.addcmul(total, score, decision)
    return total


def shifted(starts: Tensor, n_past: int, dtype: torch.dtype) -> list[Tensor]:
    """The decisions at t-1 .. t-n for every t, 0 before the sequence: ``starts`` [B, T] -> n views [B, T] of one tensor."""
    padded = F.pad(starts.to(dtype), (n_past, 0))
    return [padded[:, n_past - j : padded.shape[1] - j] for j in range(1, n_past + 1)]


def pinned(threshold: Tensor, where: Tensor, decisions: Tensor) -> Tensor:
    """``threshold`` that forces ``decisions`` ``where`` that is True; all [B, T]."""
    return torch.where(where, torch.where(decisions, -torch.inf, torch.inf).to(threshold.dtype), threshold)


def walk(scores: Tensor, threshold: Tensor, past: Tensor | None = None) -> Tensor:
    """A position at a time: ``scores`` [B, T, 1+n], ``threshold`` [B, T] -> starts [B, T] bool.

    ``past`` [n, B]: the decisions before the first, the oldest first, 0 or 1; 0 if none is given.
    """
    rows, length, depth = scores.shape
    past = scores.new_zeros(depth - 1, rows) if past is None else past
    return _decide(*_side_by_side(scores, threshold, length), past).T > 0


def settle(scores: Tensor, threshold: Tensor, block: int = BLOCK) -> Tensor:
    """The same in passes over blocks: ``scores`` [B, T, 1+n], ``threshold`` [B, T] -> starts [B, T] bool.

    It waits for the device once a pass.
    """
    (rows, length, depth), block = scores.shape, max(block, scores.shape[2] - 1)
    if length <= 2 * block:
        return walk(scores, threshold)
    blocks, limits = _side_by_side(scores, threshold, block)
    num_blocks = limits.shape[1]
    past, stale = scores.new_zeros(depth - 1, num_blocks), torch.arange(num_blocks, device=scores.device)
    starts, credit = scores.new_empty(block, num_blocks), BUDGET * length
    while True:
        if 4 * len(stale) > num_blocks:
            starts = _decide(blocks, limits, past)
        else:
            starts[:, stale] = _decide(blocks[..., stale], limits[:, stale], past[:, stale])
        assumed, past = past, _before(starts[block + 1 - depth :], rows)
        credit -= PASS + block * max(len(stale) - rows, 0) / (STEP + rows)
        stale = (past != assumed).any(0).nonzero().squeeze(1)
        if not len(stale) or credit < 0:
            break
    decided = starts.T.reshape(rows, -1)[:, :length] > 0
    if not len(stale):
        return decided
    first = int((stale % (num_blocks // rows)).min())
    begin, past = first * block, past.unflatten(1, (rows, -1))[..., first]
    return torch.cat([decided[:, :begin], walk(scores[:, begin:], threshold[:, begin:], past)], 1)


def _side_by_side(scores: Tensor, threshold: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Cut rows into blocks of L: -> scores [L+n, 1+n, R], of which the last n are of no block, and thresholds [L, R]."""
    depth, missing = scores.shape[2], -scores.shape[1] % block
    if missing:
        scores, threshold = F.pad(scores, (0, 0, 0, missing)), F.pad(threshold, (0, missing), value=torch.inf)
    limits = threshold.reshape(-1, block).T.contiguous()
    blocks = scores.new_empty(block + depth - 1, depth, limits.shape[1])
    blocks[block:] = 0
    blocks[:block].flatten(0, 1).copy_(scores.reshape(-1, block * depth).T)  # a plain transposition: the fastest copy there is
    return blocks, limits


def _decide(blocks: Tensor, limits: Tensor, past: Tensor) -> Tensor:
    """Decide blocks side by side: scores [L+n, 1+n, R], ``limits`` [L, R], ``past`` [n, R] -> starts [L, R], 0 or 1.

    A step is one comparison, and one product that adds what a start there changes to the next n totals.
    """
    depth, (length, _) = blocks.shape[1], limits.shape
    totals, starts = blocks[:, 0].clone(), torch.empty_like(limits, dtype=blocks.dtype)
    for lag in range(depth - 1, 0, -1):  # the oldest decision first
        totals[: depth - lag].addcmul_(blocks[:depth].diagonal(lag).T, past[depth - 1 - lag])
    ahead = totals[1:].unfold(0, depth - 1, 1).mT  # [L, n, R]: the next n totals of every position
    change = blocks.unfold(0, depth, 1).diagonal(0, 1, 3).mT[:, 1:]  # [L, n, R]: s_j[t+j]
    columns = (tensor.unbind() for tensor in (starts, totals[:length], limits, ahead, change))
    for start, total, limit, later, difference in zip(*columns, strict=True):
        torch.gt(total, limit, out=start)
        later.addcmul_(difference, start)
    return starts


def _before(ends: Tensor, rows: int) -> Tensor:
    """What came before every block: the last n decisions of every block [n, R] -> those of the block before it, 0 where there is none."""
    return F.pad(ends.unflatten(1, (rows, -1))[..., :-1], (1, 0)).flatten(1)
