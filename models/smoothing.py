"""The pooling pair of H-Net (Hwang et al. 2025, arXiv 2507.07955): tokens are selected, their answers smoothed over segments.

Letters: B rows, T bytes, M segments of the row that has most, D width, N blocks, C tokens of a block.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.pooling import SelectAdd, at_starts, take
from segment_env.boundaries import segment_ids

LEAST = 1e-4  #: P is clamped to [LEAST, 1 - LEAST]
BLOCK = 32  #: C: tokens whose answers are smoothed by one matrix product


class SelectSmooth(SelectAdd):
    """A segment's token is h at its start; a byte receives the answers so far, the newest weighted by how sure its start was.

    With the gate p of the policy, P_k = p at the start of segment k (their eq. 5 to 9)::

        zbar_k = P_k y_k + (1 - P_k) zbar_{k-1}, zbar_{-1} = 0         smoothing, over segments
        out[t] = c[t] zbar_{segment(t)} + R h[t]                       c[t] = p[t] where a[t], else 1 - p[t]

    c counts as 1 in the forward pass and as itself in the backward one (straight through), so that the loss reaches the gate of
    every byte, beside that of the starts, which it reaches through P. R, a linear residual that is 0 at the start, stands where
    the other pairs add h: as in H-Net, and in its place. ``residual`` times the identity is what R begins as instead.

    Args: ``width`` D; ``residual``.
    """

    reads_gate = needs_gate = True

    def __init__(self, width: int, residual: float = 0.0):
        super().__init__()
        self.residual = nn.Parameter(residual * torch.eye(width))

    def up(self, h: Tensor, y: Tensor, starts: Tensor, gate: Tensor | None = None) -> Tensor:
        """h [B, T, D], answers y [B, M, D], starts [B, T] bool, gate [B, T] -> [B, T, D]."""
        assert gate is not None
        smooth = smoothed(y, at_starts(gate, starts, y.shape[1]))
        confidence = torch.where(starts, gate, 1 - gate)
        passed = 1 + (confidence - confidence.detach())
        expanded = take(smooth, segment_ids(starts).clamp(min=0)) * passed[..., None]
        return expanded.to(h.dtype) + F.linear(h, self.residual)

    def init(self, num_rows: int) -> Tensor:
        """zbar [B, D] of rows that have no segment yet."""
        wide = torch.promote_types(self.residual.dtype, torch.float32)
        return torch.zeros(num_rows, len(self.residual), dtype=wide, device=self.residual.device)

    def up_step(self, state: Tensor, h: Tensor, y: Tensor, starts: Tensor, gate: Tensor | None = None) -> tuple[Any, Tensor]:
        """h [B, D] at t, the newest answer y [B, D], starts and gate [B] -> the decoder's input [B, D]."""
        assert gate is not None
        p = gate.to(state.dtype).clamp(LEAST, 1 - LEAST)[:, None]
        state = torch.where(starts[:, None], p * y + (1 - p) * state, state)
        return state, state.to(h.dtype) + F.linear(h, self.residual)

    def flops_per_byte(self) -> float:
        """Of the residual; smoothing takes some 4 D operations a token, as little as an addition of vectors, and is not counted."""
        return 2.0 * self.residual.numel()


def smoothed(y: Tensor, p: Tensor) -> Tensor:
    """zbar[k] = P[k] y[k] + (1 - P[k]) zbar[k-1], zbar[-1] = 0, with P = p clamped: y [B, M, D], p [B, M] -> [B, M, D].

    In float32 or wider, also under autocast. No loop over segments: blocks of C by a product with their C x C weights, and between
    blocks the same recurrence on their last values; time and memory are O(M C + M D) a row.
    """
    wide = torch.promote_types(y.dtype, torch.float32)
    with torch.autocast(y.device.type, enabled=False):
        p = p.to(wide).clamp(LEAST, 1 - LEAST)
        return _recurrence(torch.log1p(-p).double(), p[..., None] * y.to(wide))


def _recurrence(log_keep: Tensor, new: Tensor) -> Tensor:
    """out[k] = new[k] + exp(log_keep[k]) out[k-1] from 0: log_keep [..., M] <= 0 in float64, new [..., M, D] -> [..., M, D]."""
    count = new.shape[-2]
    if count <= BLOCK:
        return _weights(log_keep, new.dtype) @ new
    tail = -count % BLOCK
    log_keep = F.pad(log_keep, (0, tail)).unflatten(-1, (-1, BLOCK))
    new = F.pad(new, (0, 0, 0, tail)).unflatten(-2, (-1, BLOCK))
    within = _weights(log_keep, new.dtype) @ new  # [..., N, C, D]
    ends = _recurrence(log_keep.sum(-1), within[..., -1, :])
    before = F.pad(ends[..., :-1, :], (0, 0, 1, 0))[..., None, :]
    kept = log_keep.cumsum(-1).exp().to(new.dtype)[..., None]
    return (within + kept * before).flatten(-3, -2)[..., :count, :]


def _weights(log_keep: Tensor, dtype: torch.dtype) -> Tensor:
    """What out[k] holds of new[j], the product of keep over j+1 .. k: log_keep [..., C] -> [..., C, C], 0 for j > k.

    The difference of two sums of up to C log(1 / LEAST) loses digits: it is taken in float64.
    """
    total = log_keep.cumsum(-1)
    future = torch.ones(log_keep.shape[-1], log_keep.shape[-1], dtype=torch.bool, device=log_keep.device).triu(1)
    return (total[..., :, None] - total[..., None, :]).masked_fill(future, -torch.inf).exp().to(dtype)
