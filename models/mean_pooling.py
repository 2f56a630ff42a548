"""The pooling pair of dynamic token pooling (Nawrot et al. 2023, arXiv 2211.09761): a token is the mean of a whole segment.

Letters: B rows, T bytes, M segments of the row that has most, D width.
"""

from typing import Any

import torch
from torch import Tensor, nn

from models.block import RMSNorm
from models.pooling import SelectAdd, at_starts, most_segments
from segment_env.boundaries import segment_ids


class MeanAdd(SelectAdd):
    """A segment's token is the mean of its bytes' h, available once it has ended: its answer is added to h at the next segment's bytes.

    h[t] carries byte x[t-1], so the segment of bytes s .. e pools h[s+1 .. e+1]. Its token exists from position e+1 on, which is where
    the next segment starts, and its rotary position is e+1. The bytes of segment i read the token of segment i-1; those of the
    first read a learned null token at position 0, which stands where BOS does: h[0] is in no mean. The unfinished last
    segment gives no token. So tokens are as many, and stand at the same positions, as in the paper's pair::

        t         0 1 2 3 4 5 6 7
        x         C a l l _ m e .
        a         1 0 0 0 0 1 0 1
        token     null at 0; mean of h[1..5] at 5, read by bytes 5, 6; mean of h[6..7] at 7, read by byte 7

    **How the loss reaches the gate.** Nawrot's code builds B x T x M assignment weights w[t, k] = 1 - (k - n[t]) where k equals n[t] and
    0 elsewhere, with n the cumulative sum of straight-through starts, which numbers the segments; a token is the mean of the bytes
    under the weights of its column. All gradient there is flows through the weight of each byte in its own segment, dw/dn = +1: a
    byte's number rises by its gate and by every one before it. The same, linear in memory: byte t enters its mean with one scalar weight

        w[t] = 1 + n[t] - detach(n[t]),   n[t] = sum of gate[j] over starts up to the one of the segment that h[t] is pooled in, j < t

    whose value is 1, so that dtoken/dw[t] = (h[t] - token) / (bytes of the segment). Their un-pooling normalises each byte's single
    weight by itself plus 1e-9, which leaves a gradient of relative size 1e-9: here it has none. Sums are of whole numbers of
    vectors in float32 or wider, added up segment by segment: no difference of cumulative sums, which rounds, in bf16 fatally.

    Without a gate it works as well, for boundaries that are given or learned otherwise. As there, a norm follows the mean and h is
    added after the token layers.

    Args: ``width`` D.
    """

    reads_gate, needs_gate = True, False

    def __init__(self, width: int):
        super().__init__()
        self.null = nn.Parameter(torch.randn(width))
        self.norm = RMSNorm(width)

    def down(self, h: Tensor, starts: Tensor, gate: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """h [B, T, D], starts [B, T] bool, gate [B, T] -> tokens [B, M, D] and their byte positions [B, M] int64.

        Beyond a row's own segments stands what no byte is handed.
        """
        rows, length = starts.shape
        most = most_segments(starts)
        positions = at_starts(torch.arange(length, device=h.device).expand(rows, -1), starts, most)
        wide = torch.promote_types(h.dtype, torch.float32)
        weight = h.new_ones(rows, length - 1, dtype=wide)
        if gate is not None:
            number = gate.to(wide)[:, :-1].cumsum(-1)
            weight = weight + (number - number.detach())
        # the segment of byte t - 1 is the one that h[t] is pooled in; slot 0 is the null token's, slot M the unfinished segments'
        slot = segment_ids(starts)[:, :-1] + 1 + torch.arange(0, rows * (most + 1), most + 1, device=h.device)[:, None]
        weighted = torch.cat([h[:, 1:].to(wide) * weight[..., None], weight[..., None]], -1)
        sums = weighted.new_zeros(rows * (most + 1), weighted.shape[-1]).index_add(0, slot.flatten(), weighted.flatten(0, 1))
        total, count = sums.unflatten(0, (rows, -1))[:, 1:most].split([h.shape[-1], 1], -1)
        mean = total / torch.where(count > 0, count, 1.0)
        tokens = torch.cat([self.null.to(wide).expand(rows, 1, -1), mean], 1)
        return self.norm(tokens.to(h.dtype)), positions

    def init(self, num_rows: int) -> dict[str, Tensor]:
        """Sum [B, D] and count [B] of the open segment's h; the count is -1 before the sequence."""
        wide = torch.promote_types(self.null.dtype, torch.float32)
        total = torch.zeros(num_rows, len(self.null), dtype=wide, device=self.null.device)
        return {"total": total, "count": torch.full((num_rows,), -1, device=self.null.device)}

    def down_step(self, state: dict[str, Tensor], h: Tensor, starts: Tensor) -> tuple[Any, Tensor]:
        """h [B, D] at t, starts [B] bool -> the token [B, D] of the segment that ended at t - 1; the null token at t = 0."""
        first, count = (state["count"] < 0)[:, None], state["count"] + 1
        total = torch.where(first, 0.0, state["total"] + h)
        token = torch.where(first, self.null.to(total.dtype), total / count.clamp(min=1)[:, None])
        state = {"total": torch.where(starts[:, None], 0.0, total), "count": torch.where(starts, 0, count)}
        return state, self.norm(token.to(h.dtype))
