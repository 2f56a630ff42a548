"""Whole documents in windows of one length: every byte is scored once, the first included.

Letters: S sequences, T bytes.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from segment_env.batch import Batch, pack
from segment_env.errors import UserError


class Windows(NamedTuple):
    """A batch of windows of documents."""

    batch: Batch
    scored: Tensor  #: [S, T] bool: the bytes that count here; the other valid ones are context
    document: Tensor  #: [S] int64: which document a window is of


class _Window(NamedTuple):
    document: int
    data: bytes
    context: int  # bytes that an earlier window has scored
    last: bool


def windows(documents: Iterable[bytes], length: int, rows: int, seed: int = 0, stride: int | None = None) -> Iterator[Windows]:
    """Windows of at most ``length`` bytes, ``rows`` to a batch, each a sequence of its own with a fresh BOS; empty documents have none.

    Without a ``stride`` they are crops that do not overlap. With one, each begins ``stride`` bytes after the one before and scores
    what that one has not: a byte past the first window has at least ``length - stride`` bytes of context. ``Batch.sequence`` counts
    the windows; ``seed`` is that of the boundary noise. Raises UserError where there is no byte, or on a stride outside 1..length.
    """
    if stride is not None and not 1 <= stride <= length:
        raise UserError(f"a stride is a whole number of bytes from 1 to the crop's {length}, got {stride}")
    kept: list[_Window] = []
    first = 0
    for window in _cut(documents, length, stride or length):
        kept.append(window)
        if len(kept) == rows:
            yield _pack(kept, seed, first)
            kept, first = [], first + rows
    if kept:
        yield _pack(kept, seed, first)
    elif not first:
        raise UserError("no bytes to evaluate on; use a larger file or another split")


def _cut(documents: Iterable[bytes], length: int, step: int) -> Iterator[_Window]:
    for number, document in enumerate(documents):
        for begin in range(0, max(len(document) - length + step, 1) if document else 0, step):
            data = document[begin : begin + length]
            yield _Window(number, data, length - step if begin else 0, begin + length >= len(document))


def _pack(kept: list[_Window], seed: int, first: int) -> Windows:
    batch = pack([window.data for window in kept], seed, first)
    batch = replace(batch, terminated=torch.tensor([window.last for window in kept]))
    context = torch.tensor([window.context for window in kept])
    scored = batch.valid & (torch.arange(batch.valid.shape[1]) >= context[:, None])
    return Windows(batch, scored, torch.tensor([window.document for window in kept]))
