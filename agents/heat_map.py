"""Heat maps of boundary probabilities over a text: what is in their cells. ``pages`` and ``pictures`` draw them.

Letters: T bytes.
"""

import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

import torch

from agents.escaping import printable
from agents.segmenting import beginning
from segment_env.batch import Batch, Samples, pack
from segment_env.scorer import Policy, Scorer
from segment_env.unroll import unroll

MARKS = 4  #: that a character carries in its cell; a further one gets its own, escaped
_JOINED = ("Mn", "Me")  # categories of marks
_RIGHT = ("R", "AL")  # classes of letters that are read from right to left


@dataclass(frozen=True)
class Decided:
    """T bytes, with what a policy decided about each."""

    data: bytes
    probabilities: tuple[float, ...]  #: of a start; 1 at the first byte of a sequence, which is no choice
    starts: tuple[bool, ...]  #: as drawn

    def __getitem__(self, part: slice) -> "Decided":
        return Decided(self.data[part], self.probabilities[part], self.starts[part])


@dataclass(frozen=True)
class Cell:
    """A character with its marks, or a byte that belongs to none."""

    text: str  #: printable
    data: bytes  #: of it
    offset: int  #: of its first byte
    probabilities: tuple[float, ...]  #: of a start at every byte
    starts: tuple[bool, ...]
    escaped: bool  #: ``text`` stands for something that cannot be printed
    ends_line: bool  #: it is a newline
    right_to_left: bool = False  #: its first byte is on the right where it is read


@torch.no_grad()
def decide(scorer: Scorer, policy: Policy, data: bytes, seed: int = 0, device: torch.device | str = "cpu") -> Decided:
    """One seeded draw over ``data``, uncapped, with the probabilities it was drawn from; empty data has none."""
    return decide_batch(scorer, policy, pack([data], seed), device) if data else Decided(b"", (), ())


@torch.no_grad()
def decide_batch(scorer: Scorer, policy: Policy, batch: Batch, device: torch.device | str = "cpu") -> Decided:
    """The same for the first of the sequences of ``batch``, of its valid bytes.

    Where a policy gives no logits its gate stands for the probabilities, and where it has none either, 0 and 1: a rule leaves
    nothing to chance.
    """
    rollout, live = unroll(scorer, policy, batch.to(device), Samples([1] * len(batch.bytes), device=device))
    count, starts = int(batch.valid[0].sum()), rollout["action"][0]
    given = starts if live.gate is None else live.gate[0]
    probabilities = (given if live.logits is None else live.logits[0].sigmoid()).float().tolist()[:count]
    return Decided(bytes(batch.bytes[0, :count].tolist()), (1.0, *probabilities[1:]), tuple(starts.bool().tolist()[:count]))


def cells(decided: Decided, text: bool = True) -> list[Cell]:
    r"""A cell for each character, and for each byte that is no UTF-8; of data that is no ``text``, for each byte, as two hex digits.

    >>> [cell.text for cell in cells(Decided("é\n".encode() + b"\xff", (0.5,) * 4, (False,) * 4))]
    ['é', '\\n', '\\xff']
    """
    made, offset = [], 0
    for shown, data in _characters(decided.data) if text else ((f"{byte:02x}", bytes([byte])) for byte in decided.data):
        part = decided[offset : offset + len(data)]
        escaped = text and not _plain(shown, data)
        made.append(Cell(shown, data, offset, part.probabilities, part.starts, escaped, text and data == b"\n"))
        offset += len(data)
    return _directed(made) if text else made


def _directed(made: list[Cell]) -> list[Cell]:
    """With the direction that each cell is read in, as Unicode's bidirectional algorithm has it (UAX 9, N1 and N2, without its
    brackets): strong characters have their own; what stands between two of one direction has theirs, and else that of its
    line, which is that of the first strong one. Digits read from left to right, and stand with Hebrew and Arabic as their letters do.
    """
    directed: list[Cell] = []
    for ends, group in groupby(made, lambda cell: cell.ends_line):
        line = list(group)
        kinds = ["ON" if cell.escaped else unicodedata.bidirectional(cell.text[0]) for cell in line]
        base = next((kind != "L" for kind in kinds if kind in ("L", *_RIGHT)), False)
        sides = [True if kind in (*_RIGHT, "EN", "AN") else False if kind == "L" else None for kind in kinds]
        before = list(accumulate(sides, lambda last, side: last if side is None else side, initial=base))[:-1]
        after = list(accumulate(sides[::-1], lambda last, side: last if side is None else side, initial=base))[:-1][::-1]
        for cell, kind, side, left, right in zip(line, kinds, sides, before, after, strict=True):
            turned = kind in _RIGHT if side is not None else left if left == right else base
            directed.append(replace(cell, right_to_left=turned and not cell.escaped and not ends))
    return directed


def excerpt(data: bytes, length: int) -> slice:
    """Where to read in ``data``: from its first sentence on, else its first word, about ``length`` bytes to the end of a word.

    >>> data = b"of it. Call me Ishmael. Some years ago"
    >>> data[excerpt(data, 18)]
    b'Call me Ishmael. '
    """
    begin = beginning(data)
    end = min(begin + length, len(data))
    while begin < end < len(data) and data[end] & 0xC0 == 0x80:
        end -= 1  # not inside a character
    space = data.rfind(b" ", begin, end)
    return slice(begin, space + 1 if end < len(data) and space > begin + length // 2 else end)


def _characters(data: bytes) -> Iterator[tuple[str, bytes]]:
    """What is shown, and its bytes."""
    shown, raw = "", b""
    for character in data.decode("utf-8", "surrogateescape"):
        new = character.encode("utf-8", "surrogateescape")
        joins = unicodedata.category(character) in _JOINED and shown and _plain(shown, raw) and not shown.isspace()
        if joins and len(shown) <= MARKS:
            shown, raw = shown + character, raw + new
            continue
        if raw:
            yield shown, raw
        mark = unicodedata.category(character) in _JOINED  # with nothing to stand on
        shown = f"\\u{ord(character):04x}" if mark else printable(character) if len(new) > 1 or new < b"\x80" else f"\\x{new[0]:02x}"
        raw = new
    if raw:
        yield shown, raw


def _plain(shown: str, data: bytes) -> bool:
    """Whether what is shown is the text itself, not an escape of it."""
    return shown.encode("utf-8", "surrogateescape") == data


def width(cell: Cell) -> int:
    """How many places a cell takes up where all characters are of one width: two for those of East Asia, none for marks."""
    return sum(0 if unicodedata.category(c) in _JOINED else 1 + (unicodedata.east_asian_width(c) in "WF") for c in cell.text)
