"""From bytes to tokens and back: pooling pairs of the byte U-Net.

A pair says which vector stands for a segment (``down``), and what each byte receives of the token layers' answer (``up``). Both have
a stepwise face for one position. A pair that keeps something between positions holds it in ``init``'s pytree of [B, ...] tensors.

Letters: B rows, T bytes, M segments of the row that has most, D width.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from segment_env.boundaries import segment_ids


class SelectAdd(nn.Module):
    """The paper's pair: a segment's token is h at its start; its answer is added to h at every byte of the segment.

    The token of the segment that byte t lies in has read x[<= t-1] at the latest, so nothing leaks.
    """

    def down(self, h: Tensor, starts: Tensor, gate: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """h [B, T, D], starts [B, T] bool -> tokens [B, M, D] and their byte positions [B, M] int64; ``gate`` is not read.

        M is the one size read from the device. Beyond a row's own segments tokens are copies of h[:, 0]: causal attention keeps
        them from the others, and :meth:`up` hands them to no byte.
        """
        rows, length = starts.shape
        most = max(int(starts.sum(-1).max()), 1)
        slot = torch.where(starts, segment_ids(starts), most)
        time = torch.arange(length, device=h.device).expand(rows, -1)
        positions = time.new_zeros(rows, most + 1).scatter(1, slot, time)[:, :most]
        return _take(h, positions), positions

    def up(self, h: Tensor, y: Tensor, starts: Tensor, gate: Tensor | None = None) -> Tensor:
        """h [B, T, D], answers y [B, M, D] -> h[t] + y[segment(t)], [B, T, D]."""
        return h + _take(y, segment_ids(starts).clamp(min=0))

    def init(self, num_rows: int) -> Any:
        """Nothing is kept between positions."""
        return ()

    def down_step(self, state: Any, h: Tensor) -> tuple[Any, Tensor]:
        """h [B, D] at t -> the token [B, D] of a segment that starts at t."""
        return state, h

    def up_step(self, state: Any, h: Tensor, y: Tensor, gate: Tensor | None = None) -> tuple[Any, Tensor]:
        """h [B, D] at t and the newest answer y [B, D] -> the decoder's input [B, D]."""
        return state, h + y


POOLINGS: dict[str, type[nn.Module]] = {"SelectAdd": SelectAdd}  #: by the name that a saved model goes by


def _take(table: Tensor, index: Tensor) -> Tensor:
    """out[b, i] = table[b, index[b, i]]: [B, M, D], [B, T] -> [B, T, D]; as an embedding, whose backward is the fastest on CPU."""
    rows, size, width = table.shape
    offset = torch.arange(0, rows * size, size, device=table.device)
    return F.embedding(index + offset[:, None], table.reshape(rows * size, width))
