"""Rules of text: a start right after certain bytes.

A decision at t has read x[<t], so it can follow the byte x[t-1] and no later one: a segment starts after the space, not at it. BOS,
which stands before the first byte, belongs to no class.

Letters: B rows, T bytes.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

from agents.rules import Rule
from segment_env.boundaries import BOS, NUM_BYTES
from segment_env.scorer import Decision, Observation

WHITESPACE = frozenset(b" \t\n\v\f\r")
NEWLINE = frozenset(b"\n")
_ALPHANUMERIC = frozenset(b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
_CONTINUATION = frozenset(range(0x80, 0xC0))  # of a character of UTF-8: never its first byte
SPACELIKE = frozenset(range(NUM_BYTES)) - _ALPHANUMERIC - _CONTINUATION


def byte_class(members: Iterable[int]) -> Tensor:
    """Members of a class of bytes as a table: [257] bool, False at BOS.

    >>> byte_class(b" ")[torch.tensor([32, 65, 256])].tolist()
    [True, False, False]
    """
    table = torch.zeros(NUM_BYTES + 1, dtype=torch.bool)
    table[list(members)] = True
    return table


class AfterClass(Rule):
    """a[t] = x[t-1] is of the class; with ``first_only``, and x[t-2] is not: of a run of such bytes the first alone counts.

    Args: ``members``, byte values of the class.
    """

    needs_text = True
    rate_is = "given"

    table: Tensor

    def __init__(self, members: Iterable[int], first_only: bool):
        super().__init__()
        self.register_buffer("table", byte_class(members), persistent=False)
        self.first_only = first_only

    def parallel(self, h: Tensor, x: Tensor, noise: Tensor, early_log_p: Tensor | None = None, **_) -> Decision:
        """Decide all positions: x [B, T]."""
        before = self.table[F.pad(x, (2, 0), value=BOS)]  # before[:, t] is about x[t-2]
        return Decision(self._decide(before[:, 1:-1], before[:, :-2]), None)

    def init(self, num_rows: int) -> Tensor:
        """Whether x[t-2] is of the class: [B] bool."""
        return torch.zeros(num_rows, dtype=torch.bool, device=self.table.device)

    def step(self, state: Tensor, observation: Observation, **_) -> tuple[Tensor, Decision]:
        """Decide one position."""
        now = self.table[observation.byte]
        return now, Decision(self._decide(now, state), None)

    def _decide(self, last: Tensor, one_before: Tensor) -> Tensor:
        return last & ~one_before if self.first_only else last


class Whitespace(AfterClass):
    """A start after ASCII whitespace; with ``first_only`` after the first byte of a run of it."""

    def __init__(self, first_only: bool = False):
        super().__init__(WHITESPACE, first_only)


class SpaceByte(AfterClass):
    """A start after a spacelike byte that follows one that is not (SpaceByte, Slagle 2024, arXiv 2404.14408, section 3).

    Spacelike is what is neither an ASCII letter or digit nor a continuation byte of UTF-8: spaces and punctuation, and the first byte
    of every character outside ASCII.
    """

    def __init__(self) -> None:
        super().__init__(SPACELIKE, first_only=True)


class Lines(AfterClass):
    """A start after every newline."""

    def __init__(self) -> None:
        super().__init__(NEWLINE, first_only=False)
