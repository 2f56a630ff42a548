"""Bytes at hand as sequences: random crops to train on, and every byte once to evaluate on.

Bytes are never decoded, repaired or normalised: a crop may begin or end inside a character of UTF-8.

Letters: N bytes of data, S sequences, T bytes of a crop.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from segment_env.batch import Batch
from segment_env.errors import UserError
from segment_env.noise import BYTES, hashed


def as_tensor(data: bytes | Tensor) -> Tensor:
    """Raw bytes as a uint8 tensor [N]; a tensor is returned as it is, after a check of dtype and rank (ValueError)."""
    if isinstance(data, Tensor):
        if data.dtype != torch.uint8 or data.dim() != 1:
            raise ValueError(f"bytes are a uint8 tensor of one dimension, got {data.dtype} of {data.dim()}")
        return data
    # frombuffer refuses an empty buffer, and would warn of read-only memory without the copy
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def whitespace_starts(x: Tensor) -> Tensor:
    """Word starts of text: True at t = 0, and where x[t-1] is ASCII whitespace and x[t] is not.

    ``x`` [..., T] int bytes -> [..., T] bool. It looks at x[t], which a decision at t has not read: it is what alignment is
    measured against, not a rule that a policy could follow.

    >>> whitespace_starts(torch.tensor([list(b"Call  me.")])).long().tolist()
    [[1, 0, 0, 0, 0, 0, 1, 0, 0]]
    """
    white = (x == 32) | ((x >= 9) & (x <= 13))  # space, \t \n \v \f \r
    starts = torch.ones_like(white)
    starts[..., 1:] = white[..., :-1] & ~white[..., 1:]
    return starts


class TextStream:
    """Crops of T bytes at random positions of ``data``: always full, never terminated (the document goes on).

    Args: ``data`` bytes or uint8 [N]; ``name`` stands in error messages. Results are on the device of ``data``.
    """

    unit: str = "byte"
    sample_rate: float | None = None

    def __init__(self, data: bytes | Tensor, name: str = "text"):
        self.data, self.name = as_tensor(data), name

    def sequences(self, seed: int, index: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`segment_env.batch.ByteStream`. Raises UserError where the data is shorter than one crop."""
        size = len(self.data)
        if size < length:
            right = f"use data.length <= {size} or a larger file" if size else "use a larger file"
            raise UserError(f"{self.name} has {size} bytes, shorter than one crop of {length}; {right}")
        position = hashed(seed, BYTES, index.to(self.data.device)) % (size - length + 1)
        x = self.data.unfold(0, length, 1)[position].long()
        return x, torch.ones_like(x, dtype=torch.bool), torch.zeros_like(position, dtype=torch.bool)

    def reference(self, x: Tensor) -> Tensor:
        """Word starts by whitespace, see :func:`whitespace_starts`."""
        return whitespace_starts(x)


def crops(data: bytes | Tensor, length: int, rows: int, seed: int = 0) -> Iterator[Batch]:
    """Every byte of ``data`` exactly once, in crops of ``length`` bytes that do not overlap, at most ``rows`` to a batch.

    Each crop is a sequence of its own and so begins with a fresh BOS; ``Batch.sequence`` is its number. The last one may be
    shorter: it is padded with 0, valid False there, and alone is terminated. ``seed`` is that of the boundary noise.
    Raises UserError on empty data, ValueError unless ``length`` and ``rows`` are positive.
    """
    if length < 1 or rows < 1:
        raise ValueError(f"length and rows are at least 1, got {length} and {rows}")
    data = as_tensor(data)
    if not len(data):
        raise UserError("no bytes to evaluate on; use a larger file or another split")
    return _crops(data, length, rows, seed)


def _crops(data: Tensor, length: int, rows: int, seed: int) -> Iterator[Batch]:
    total = -(-len(data) // length)
    time = torch.arange(length, device=data.device)
    for first in range(0, total, rows):
        index = torch.arange(first, min(first + rows, total), device=data.device)
        chunk = data[first * length : (first + rows) * length]
        x = pad(chunk, (0, len(index) * length - len(chunk))).view(-1, length).long()
        yield Batch(x, index[:, None] * length + time < len(data), index == total - 1, index, seed)
