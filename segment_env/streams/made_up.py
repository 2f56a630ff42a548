"""A made-up language whose words are known for certain: written without spaces, yet every word start follows from the past.

No word of the lexicon begins another one (the code is prefix-free), so whoever has read a text from its first byte knows where
each word ends: whether byte t starts a word is a function of x[<t]. That makes it a ground truth for boundaries placed before the
byte is seen.

Letters: S sequences, T bytes, V words, W words of a sequence, L longest word.
"""

import math
import random
from string import ascii_lowercase

import torch
from torch import Tensor

from segment_env.boundaries import NUM_BYTES
from segment_env.errors import UserError
from segment_env.noise import BYTES, uniform

_ATTEMPTS = 1000  #: random words tried before a lexicon counts as full


def prefix_free_words(size: int, min_length: int, max_length: int, seed: int) -> list[bytes]:
    """``size`` words of random lowercase letters and uniform random lengths, none the beginning of another, in random order.

    Raises UserError where that many do not fit, or the lengths make no sense.
    """
    if size < 1 or not 1 <= min_length <= max_length:
        raise UserError(f"a lexicon needs lexicon_size >= 1 and 1 <= min_length <= max_length, got {size}, {min_length}, {max_length}")
    rng = random.Random(seed)
    words: dict[str, None] = {}
    # short words first: a new word can then only clash by beginning with an old one
    for length in sorted(rng.randint(min_length, max_length) for _ in range(size)):
        for _ in range(_ATTEMPTS):
            word = "".join(rng.choices(ascii_lowercase, k=length))
            if not any(word[:end] in words for end in range(min_length, length + 1)):
                words[word] = None
                break
        else:
            raise UserError(f"{size} words of {min_length} to {max_length} letters do not fit; use a larger min_length or fewer words")
    shuffled = list(words)
    rng.shuffle(shuffled)  # a word's frequency does not depend on its length
    return [word.encode() for word in shuffled]


class MadeUpLanguage:
    """Independent words of a seeded lexicon, one after the other without spaces; the word of rank r has weight r^-exponent.

    Sequences start at a word start and are cut off at T: always full, never terminated. A shorter crop of the same sequence is its
    beginning. ``seed`` fixes the lexicon alone; train and validation share it and differ in the seed given to ``sequences``.

    Args: ``lexicon_size`` V; ``min_length`` and ``max_length`` of words in bytes; ``exponent`` of Zipf's law, 0: all alike.
    Raises UserError where the lexicon cannot be (see :func:`prefix_free_words`).
    """

    unit: str = "byte"
    sample_rate: float | None = None

    def __init__(self, lexicon_size: int = 200, min_length: int = 2, max_length: int = 8, exponent: float = 1.0, seed: int = 0):
        self.words = prefix_free_words(lexicon_size, min_length, max_length, seed)  #: most frequent first
        weight = torch.arange(1, lexicon_size + 1, dtype=torch.float64) ** -exponent
        self.frequency = weight / weight.sum()  #: [V] float64
        self._cumulated = self.frequency.cumsum(0)
        self._lengths = torch.tensor([len(word) for word in self.words])
        self._spelling = torch.tensor([list(word.ljust(max_length, b"\0")) for word in self.words])  # [V, L]
        self.trie = _automaton(self.words)  #: [nodes, 256]: see :func:`parse`

    @property
    def entropy_per_byte(self) -> float:
        """What the best model of long sequences pays, in nats per byte: entropy of a word / mean length of a word."""
        return float(torch.special.entr(self.frequency).sum() / (self.frequency * self._lengths).sum())

    def sequences(self, seed: int, index: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`segment_env.batch.ByteStream`; results are on the CPU."""
        index = index.cpu()
        word_number = torch.arange(math.ceil(length / int(self._lengths.min())))
        draw = uniform(seed, BYTES, index[:, None], word_number).double()
        word = torch.searchsorted(self._cumulated, draw, right=True).clamp(max=len(self.words) - 1)  # [S, W]
        number, offset = locate(self._lengths[word], length)
        x = self._spelling[word.gather(1, number), offset]
        return x, torch.ones_like(x, dtype=torch.bool), torch.zeros(len(index), dtype=torch.bool)

    def reference(self, x: Tensor) -> Tensor:
        """Word starts of ``x`` [S, T], from x[<t] alone: [S, T] bool, True at t = 0.

        Any bytes will do: after a byte that continues no word the text is not of this language, and nothing starts any more.
        """
        return parse(self.trie.to(x.device), self._spelling.shape[1], x)[:, :-1] == 0


def locate(lengths: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Words laid one after the other: of each of T = ``length`` bytes the number of its word, and its place in it from 0 on.

    ``lengths`` [S, W] int64, at least T bytes a sequence -> [S, T] int64, twice.
    """
    ends = lengths.cumsum(-1)
    time = torch.arange(length, device=lengths.device).expand(len(lengths), -1).contiguous()
    number = torch.searchsorted(ends, time, right=True)
    return number, time - ends.gather(1, number) + lengths.gather(1, number)


def parse(trie: Tensor, longest: int, x: Tensor) -> Tensor:
    """The node of the trie at every position, from x[<t] alone: ``x`` [S, T] -> [S, T+1] int64; 0 where a word starts.

    ``trie`` [nodes, >= 256] is the next node after each byte, with words of at most ``longest`` = L bytes: 0 after the last byte of a
    word, 1 from a byte on that continues no word. All positions at once: a walk of L bytes from each says where the next
    word would start if one started there; the true starts are then found from 0 on, in log2(T) doublings.
    """
    size, time = x.shape[1], torch.arange(x.shape[1] + 1, device=x.device)
    after = torch.nn.functional.pad(x, (0, longest))
    node = torch.zeros_like(after[:, : size + 1])
    walks, jump = [node], torch.full_like(node, size + 1)  # position T+1 stands for "never"
    for read in range(1, longest + 1):
        node = trie[node, after[:, read - 1 : read + size]]
        jump = torch.where((node == 0) & (jump > size), time + read, jump)
        walks.append(node)
    starts = _orbit(torch.nn.functional.pad(jump, (0, 1), value=size + 1).clamp(max=size + 1))[:, :-1]
    last = torch.where(starts, time, 0).cummax(-1).values
    letters = time - last
    found = torch.stack(walks, -1).flatten(1).gather(1, last * (longest + 1) + letters.clamp(max=longest))
    return torch.where(letters > longest, 1, found)


def _orbit(jump: Tensor) -> Tensor:
    """Positions reached from 0 by jumps ahead, any number of them: ``jump`` [S, P] int64, last position fixed -> [S, P] bool."""
    reached = torch.zeros_like(jump, dtype=torch.bool)
    reached[:, 0] = True
    for _ in range(jump.shape[1].bit_length()):  # doubled each time: jump is 1, 2, 4 ... jumps in one
        reached = reached.scatter(1, torch.where(reached, jump, 0), True)
        jump = jump.gather(1, jump)
    return reached


def _automaton(words: list[bytes]) -> Tensor:
    """The trie of the words as a table [nodes, 256]: next node, 0 (the root) after the last letter of a word.

    Node 1 is where a byte leads that continues no word; it is never left.
    """
    rows = [[1] * NUM_BYTES, [1] * NUM_BYTES]
    for word in words:
        node = 0
        for letter in word[:-1]:
            if rows[node][letter] == 1:
                rows[node][letter] = len(rows)
                rows.append([1] * NUM_BYTES)
            node = rows[node][letter]
        rows[node][word[-1]] = 0
    return torch.tensor(rows)
