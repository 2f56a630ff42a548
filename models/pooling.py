"""From bytes to tokens and back: pooling pairs of the byte U-Net.

A pair says which vector stands for a segment (``down``), and what each byte receives of the token layers' answer (``up``). Both have
a stepwise face for one position. A pair that keeps something between positions holds it in ``init``'s pytree of [B, ...] tensors.
The paper's pair is here; the others have files of their own.

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

    reads_gate = needs_gate = False

    def down(self, h: Tensor, starts: Tensor, gate: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """h [B, T, D], starts [B, T] bool -> tokens [B, M, D] and their byte positions [B, M] int64; ``gate`` is not read.

        M is the one size read from the device. Beyond a row's own segments tokens are copies of h[:, 0]: causal attention keeps
        them from the others, and :meth:`up` hands them to no byte.
        """
        positions = at_starts(torch.arange(starts.shape[1], device=h.device).expand(starts.shape), starts, most_segments(starts))
        return take(h, positions), positions

    def up(self, h: Tensor, y: Tensor, starts: Tensor, gate: Tensor | None = None) -> Tensor:
        """h [B, T, D], answers y [B, M, D] -> h[t] + y[segment(t)], [B, T, D]."""
        return h + take(y, segment_ids(starts).clamp(min=0))

    def init(self, num_rows: int) -> Any:
        """Nothing is kept between positions."""
        return ()

    def down_step(self, state: Any, h: Tensor, starts: Tensor) -> tuple[Any, Tensor]:
        """h [B, D] at t, starts [B] bool -> a token [B, D]; it counts in the rows where a segment starts at t."""
        return state, h

    def up_step(self, state: Any, h: Tensor, y: Tensor, starts: Tensor, gate: Tensor | None = None) -> tuple[Any, Tensor]:
        """h [B, D] at t, the newest answer y [B, D], starts and gate [B] -> the decoder's input [B, D]."""
        return state, h + y

    def flops_per_byte(self) -> float:
        """Of matrix products: there are none."""
        return 0.0


def most_segments(starts: Tensor) -> int:
    """M of ``starts`` [B, T] bool, at least 1: the one size that is read from the device."""
    return max(int(starts.sum(-1).max()), 1)


def at_starts(values: Tensor, starts: Tensor, most: int) -> Tensor:
    """``values`` [B, T] at the starts of every row, in order: -> [B, M], 0 beyond a row's own segments."""
    slot = torch.where(starts, segment_ids(starts), most)
    return values.new_zeros(len(starts), most + 1).scatter(1, slot, values)[:, :most]


def take(table: Tensor, index: Tensor) -> Tensor:
    """out[b, i] = table[b, index[b, i]]: [B, M, D], [B, T] -> [B, T, D]; as an embedding, whose backward is the fastest on CPU."""
    rows, size, width = table.shape
    offset = torch.arange(0, rows * size, size, device=table.device)
    return F.embedding(index + offset[:, None], table.reshape(rows * size, width))
