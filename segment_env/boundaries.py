"""Where segments begin: the one boundary convention of the project.

Position ``t`` has read ``BOS, x[0..t-1]`` and predicts ``x[t]``. ``a[t] = 1`` says that **byte t starts a segment**; it is
decided at position t, before ``x[t]`` is seen. ``a[0] = 1`` always, and is not a choice::

    t         0 1 2 3 4 5 6 7
    x         C a l l _ m e .
    a         1 0 0 0 0 1 0 1        segments  |Call_|me|.|
    segment   0 0 0 0 0 1 1 2        lengths    5     2  1

Observation, action and reward of a decision share the index t: nothing is shifted anywhere. No position but t = 0 is ever
forced. Masks are True where something counts: ``valid`` marks real bytes (a prefix of every row), ``is_choice`` the
positions where a decision is taken, ``starts`` the bytes that start a segment (never in padding).

Letters: B rows, T bytes, M segments.
"""

import torch
from torch import Tensor

BOS = 256  #: symbol that stands before the first byte; all 256 byte values are data
NUM_BYTES = 256


def is_choice(valid: Tensor) -> Tensor:
    """Positions where a decision is taken: valid and t > 0. ``valid`` [..., T] bool -> [..., T] bool."""
    choice = valid.clone()
    choice[..., :1] = False
    return choice


def effective(action: Tensor, choice: Tensor, valid: Tensor) -> Tensor:
    """Force what is not a choice: True at t = 0, False in padding, the action elsewhere. All [...], result bool.

    >>> effective(torch.tensor([0, 1, 0, 1]), *map(torch.tensor, ([False, True, True, False], [True, True, True, False])))
    tensor([ True,  True, False, False])
    """
    return torch.where(choice, action.bool(), valid)


def effective_gate(gate: Tensor, choice: Tensor, valid: Tensor) -> Tensor:
    """The soft companion of :func:`effective`: 1 at t = 0, 0 in padding, neither with a gradient, the gate elsewhere. All [...]."""
    return torch.where(choice, gate, valid.to(gate.dtype))


def segment_ids(starts: Tensor) -> Tensor:
    """Segment that every byte lies in. ``starts`` [..., T] bool with starts[..., 0] -> [..., T] int64 from 0.

    >>> segment_ids(torch.tensor([1, 0, 0, 0, 0, 1, 0, 1]).bool()).tolist()
    [0, 0, 0, 0, 0, 1, 1, 2]
    """
    return starts.long().cumsum(-1) - 1


def starts_of_ids(ids: Tensor) -> Tensor:
    """Inverse of :func:`segment_ids`: [..., T] int64 -> [..., T] bool."""
    starts = torch.ones_like(ids, dtype=torch.bool)
    starts[..., 1:] = ids[..., 1:] != ids[..., :-1]
    return starts


def lengths(starts: Tensor) -> Tensor:
    """Bytes of each segment of one row. ``starts`` [T] bool with starts[0] (or T = 0) -> [M] int64, summing to T.

    >>> lengths(torch.tensor([1, 0, 0, 0, 0, 1, 0, 1]).bool()).tolist()
    [5, 2, 1]
    """
    return torch.bincount(segment_ids(starts))


def starts_of_lengths(segment_lengths: Tensor) -> Tensor:
    """Inverse of :func:`lengths`: [M] int64, all positive -> [T] bool."""
    ends = segment_lengths.cumsum(0)
    starts = torch.zeros(int(ends[-1]) if len(ends) else 0, dtype=torch.bool, device=ends.device)
    starts[ends - segment_lengths] = True
    return starts


def split(data: bytes, starts: Tensor) -> list[bytes]:
    """Cut ``data`` of T bytes at ``starts`` [T]; joined again the segments are ``data``.

    >>> split(b"Call me.", torch.tensor([1, 0, 0, 0, 0, 1, 0, 1]).bool())
    [b'Call ', b'me', b'.']
    """
    ends = lengths(starts).cumsum(0).tolist()
    return [data[a:b] for a, b in zip([0, *ends], ends, strict=False)]


def since_start(starts: Tensor) -> Tensor:
    """Bytes since the last start before t: what a decision at t knows of the current segment.

    ``starts`` [..., T] bool -> [..., T+1] int64; 0 at t = 0, then t - max{s < t : a[s] = 1}.

    >>> since_start(torch.tensor([1, 0, 0, 1, 0]).bool()).tolist()
    [0, 1, 2, 3, 1, 2]
    """
    time = torch.arange(starts.shape[-1] + 1, device=starts.device)
    last = torch.where(starts, time[:-1], 0).cummax(-1).values
    return time - torch.cat([torch.zeros_like(last[..., :1]), last], -1)


def recent_starts(starts: Tensor, n_past: int) -> Tensor:
    """The last ``n_past`` decisions: out[..., t, j-1] = starts[..., t-j], 0 before the sequence.

    ``starts`` [..., T] bool -> [..., T+1, n_past] int64.

    >>> recent_starts(torch.tensor([1, 0, 1]).bool(), 2).tolist()
    [[0, 0], [1, 0], [0, 1], [1, 0]]
    """
    padded = torch.nn.functional.pad(starts.long(), (n_past, 0))
    return padded.unfold(-1, n_past, 1).flip(-1)
