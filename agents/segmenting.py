"""Segments of given bytes, and how a terminal shows them.

Letters: B rows, T bytes, D width.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from agents.escaping import printable
from segment_env.batch import Samples, pack
from segment_env.boundaries import effective, is_choice, split
from segment_env.scorer import Policy, Scorer
from segment_env.unroll import decide

PIECE = 1 << 14  #: bytes that are encoded at once


class Segment(bytes):
    """A segment: bytes, and where in the data they begin.

    >>> segment = Segment(b"Call ", 5)
    >>> segment, segment.start, segment.end
    (b'Call ', 5, 10)
    """

    start: int

    def __new__(cls, data: bytes = b"", start: int = 0) -> "Segment":
        """``data``, of which the first byte is the ``start``-th of the whole, counted from 0."""
        made = super().__new__(cls, data)
        made.start = start
        return made

    @property
    def end(self) -> int:
        """Where the next segment begins."""
        return self.start + len(self)


@torch.no_grad()
def segment(scorer: Scorer, policy: Policy, data: bytes, seed: int = 0, device: torch.device | str = "cpu") -> list[Segment]:
    """One seeded draw of boundaries, uncapped: joined again the segments are ``data``. Empty data has no segments.

    The data is read as one sequence, whatever its length: nothing is decoded, so that there is no attention over all of it. A scorer
    with a finite ``encoder_reach`` is given long data in pieces that overlap by it, which changes h by rounding alone; what is kept is h
    [T, D], in float32 4 D bytes a byte of data, and for a policy that reads the early head 1,024 more.
    """
    if not data:
        return []
    batch, samples = pack([data], seed).to(device), Samples([1], device=device)
    h = _encoded(scorer, batch.bytes)
    early = scorer.early_log_p(h) if policy.reads_early_log_p else None
    action = decide(policy, h, batch.bytes, samples.noise(batch, len(data)), early, batch.valid).action
    starts = effective(action, is_choice(batch.valid), batch.valid)
    found, begin = [], 0
    for piece in split(data, starts[0].cpu()):
        found.append(Segment(piece, begin))
        begin += len(piece)
    return found


def _encoded(scorer: Scorer, x: Tensor) -> Tensor:
    """The encoder's states h [1, T, D] of all positions of x [1, T]."""
    reach, length = getattr(scorer, "encoder_reach", None), x.shape[1]
    if reach is None or length <= PIECE + reach:
        return scorer.encode(x)[:, :-1]
    h = torch.empty(1, length, scorer.width, dtype=scorer.dtype, device=x.device)
    for begin in range(0, length, PIECE):
        known = min(begin, reach)  # the BOS before them is out of reach of what is kept
        h[:, begin : begin + PIECE] = scorer.encode(x[:, begin - known : begin + PIECE])[:, known:-1]
    return h


def beginning(data: bytes) -> int:
    """Where to read from in a crop, that may have begun inside a sentence: after its first, else its first word, else at 0."""
    half = data[: len(data) // 2]
    return next((half.find(mark) + len(mark) for mark in (b". ", b" ") if mark in half), 0)


def shown(segments: Iterable[bytes], separator: str = "|") -> str:
    r"""Segments between separators on one line; what cannot be printed and bytes that are no UTF-8 are escaped, as Python does.

    A character that a boundary cuts in two is shown as its bytes.

    >>> shown([b"Call ", b"me", b"\n", "—".encode()[:1]])
    '|Call |me|\\n|\\xe2|'
    """
    texts = [printable(piece.decode("utf-8", "backslashreplace")) for piece in segments]
    return separator.join(["", *texts, ""]) if texts else ""
