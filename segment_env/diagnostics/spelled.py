"""Delimiter and Silence: words that their first byte gives away, set apart by a byte that is in no word.

Letters: S sequences, T bytes, W words of a sequence, V kinds of words, L bytes of the longest word, N nodes = D contexts.
"""

import math

import torch
from torch import Tensor

from segment_env.boundaries import NUM_BYTES
from segment_env.diagnostics.base import Aligned, full, geometric, laid_out, rows, whole
from segment_env.errors import UserError
from segment_env.noise import BYTES, hashed, uniform


class Spelled(Aligned):
    """Words of V kinds and random length, each set apart from the next by one ``mark`` byte or more.

    A word is the beginning, n bytes long, of the spelling of its kind, which the first byte gives away; kinds are equally likely and
    n is uniform in ``shortest`` .. ``longest`` = L. The mark ends a word for certain; after j bytes of a word it comes with chance::

        H(j) = P(n = j | n >= j)         0 below the shortest, 1 / (L - j + 1) from there on

    which early head and scorer both know. Beyond it the scorer knows the spelling where it is sharp (the byte that is due has
    1 - H(j)), while the early head, and the scorer where it is blurred, only know the kinds: each kind's j-th byte has (1 - H(j)) / V.
    So a sharp byte of a word gains log V, exactly, and a mark gains nothing; nothing gains at j = 0, where the kind is open.

    Sharp is the aligned rule: after j bytes of the word, the current segment began where ``late`` of them were read.
    G of :class:`Aligned` is therefore, k bytes on from there, with j = k + late::

        G[k] = P(n > j) log V for j >= 1, else 0                        sum_k G[k] = (mean n - 1) log V

    ``h`` is one-hot in the node: 0 where no byte of a word was read since the mark, 1 + (j - 1) V + v after j bytes of a word of kind v,
    and a last one, lost, once the bytes are no word, until the next mark.

    Args: ``spelling`` [V, L], bytes of each kind, distinct in every column and other than the mark; ``mark``; ``shortest``; ``late``;
    ``first``, the chance that a word starts after a mark, 1: always; see :class:`Diagnostic` for the others.
    """

    def __init__(self, spelling: Tensor, mark: int, shortest: int, late: int, first: float, leak: float, dtype: torch.dtype):
        kinds, longest = spelling.shape
        step = _automaton(spelling, mark)
        probability, row, early = _predictions(spelling, mark, shortest, late, first)
        node = torch.arange(len(step))
        super().__init__(
            step=step,
            context=node,
            row=row,
            early=early,
            probability=probability,
            leak=leak,
            oracle=(node > 0) & (node <= kinds) if late else node == 0,
            settled=longest + 1,  # as many bytes without a mark are no word, wherever they began
            dtype=dtype,
        )
        self.spelling, self.mark, self.shortest, self.longest = spelling, mark, shortest, longest
        self.gain = [_lasts(j, shortest, longest) * math.log(kinds) if j else 0.0 for j in range(late, longest)]
        self.mean_word = (shortest + longest) / 2

    def sequences(self, seed: int, index: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`segment_env.batch.ByteStream`; always full, never terminated, and results are on the CPU."""
        column = index.cpu()[:, None]
        number = torch.arange(math.ceil(length / (self.shortest + 1)))
        kind = hashed(seed, BYTES, column, number, torch.tensor(0)) % len(self.spelling)
        size = self.shortest + hashed(seed, BYTES, column, number, torch.tensor(1)) % (self.longest - self.shortest + 1)
        lead, trail = self._marks(uniform(seed, BYTES, column, number, torch.tensor(2)))
        at, place = laid_out(lead, lead + size + trail, length)
        letters = self.spelling[kind.gather(1, at), place.clamp(0, self.longest - 1)]
        return full(torch.where((place >= 0) & (place < size.gather(1, at)), letters, self.mark))

    def _marks(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """How many marks come before a word and after it, from uniform ``u`` [S, W]: [S, W] int64, twice, in all 1 at least."""
        raise NotImplementedError


class Delimiter(Spelled):
    """Words of random length, each ended by a space; a cut pays right after a space.

    A word of kind v is v + 1 letters into "abc..." and goes on from letter to letter in alphabetical order, back to "a" after the last
    of V letters. One space is the end of its word. See :class:`Spelled` for the predictions: sharp where the current segment began
    with the current word. With n the letters of a word, E n = (shortest + longest) / 2 and M = E n + 1 bytes a word::

        oracle: cut after every space              ((E n - 1) log V - c) / M                     nats per byte, c the price
        independent cuts at rate r                 log V sum_{k>=1} P(n > k) r (1 - r)^k / M - c r
        never                                      0
        always                                     -c       (nothing gains where the kind is open)

    The oracle's rate is 1 / M; it is the one best policy while c < (E n - 1) log V. With the defaults, at the default price of 0.5:
    oracle 1.232, always -0.5; at the oracle's rate of 0.182 random cuts give 0.056.

    Args: ``letters`` V in 2..26; ``shortest`` and ``longest`` word in letters, 1 <= shortest <= longest <= 64, longest >= 2; ``leak``
    in (0, 1), the probability of bytes that never come; ``dtype`` float32 or float64. Raises UserError outside these.
    """

    def __init__(self, letters: int = 8, shortest: int = 2, longest: int = 7, leak: float = 0.01, dtype: torch.dtype = torch.float32):
        whole("letters", letters, 2, 26)
        _check_lengths(shortest, longest)
        spelling = ord("a") + (torch.arange(letters)[:, None] + torch.arange(longest)) % letters
        super().__init__(spelling, ord(" "), shortest, 0, 1.0, leak, dtype)
        self.mean_length = self.mean_word + 1

    def _marks(self, u: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(u, dtype=torch.int64), torch.ones_like(u, dtype=torch.int64)


class Silence(Spelled):
    """Long silence, broken by short bursts; a cut pays right after the first sample of a burst, which nothing foretells.

    Samples are 8 bits, silence is 128. A burst of loudness v swings between 128 + a and 128 - a, with a = (v + 1) floor(127 / V). See
    :class:`Spelled` for the predictions: sharp where the current segment began at the second sample of the current burst. A stretch of
    silence is 1 + a geometric number of samples, so a burst begins with the same chance after each of its samples, and in silence no
    cut ever gains. With n the samples of a burst, E n = (shortest + longest) / 2 and M = E n + silence samples a cycle::

        oracle: cut after every burst's first      ((E n - 1) log V - c) / M                     nats per sample, c the price
        independent cuts at rate r                 log V sum_{k>=0} P(n > k + 1) r (1 - r)^k / M - c r
        never                                      0
        always                                     P(n > 1) log V / M - c

    The oracle's rate is 1 / M; it is the one best policy while c < (E n - 1) log V. With the defaults, at the default price of 0.5:
    oracle 0.242, always -0.464; at the oracle's rate of 0.0172 random cuts give -0.005.

    Args: ``loudnesses`` V in 2..127; ``shortest`` and ``longest`` burst in samples, 1 <= shortest <= longest <= 64, longest >= 2;
    ``silence``, mean samples between bursts, at least 1; ``sample_rate`` in samples per second; ``leak`` in (0, 1), the probability of
    bytes that never come; ``dtype`` float32 or float64. Raises UserError outside these.
    """

    unit = "sample"

    def __init__(
        self,
        loudnesses: int = 8,
        shortest: int = 4,
        longest: int = 12,
        silence: float = 50.0,
        sample_rate: float = 8000.0,
        leak: float = 0.01,
        dtype: torch.dtype = torch.float32,
    ):
        whole("loudnesses", loudnesses, 2, 127)
        _check_lengths(shortest, longest)
        if not 1 <= silence < math.inf or not sample_rate > 0:
            raise UserError(f"silence must be a mean of at least 1 sample and sample_rate positive, got {silence} and {sample_rate}")
        amplitude = (torch.arange(loudnesses)[:, None] + 1) * (127 // loudnesses)
        spelling = 128 + amplitude * (1 - torch.arange(longest) % 2 * 2)
        super().__init__(spelling, 128, shortest, 1, 1 / silence, leak, dtype)
        self.silence, self.sample_rate = silence, sample_rate
        self.mean_length = self.mean_word + silence

    def _marks(self, u: Tensor) -> tuple[Tensor, Tensor]:
        return 1 + geometric(u, self.silence - 1), torch.zeros_like(u, dtype=torch.int64)


def _automaton(spelling: Tensor, mark: int) -> Tensor:
    """Next node after each byte, [N, 256]; nodes are numbered as :class:`Spelled` says."""
    kinds, longest = spelling.shape
    lost = 1 + kinds * longest
    step = torch.full((lost + 1, NUM_BYTES), lost)
    node = 1 + torch.arange(longest)[:, None] * kinds + torch.arange(kinds)  # [L, V], after that many bytes and one
    step[0, spelling[:, 0]] = node[0]
    for read in range(1, longest):
        step[node[read - 1], spelling[:, read]] = node[read]
    step[:, mark] = 0
    return step


def _predictions(spelling: Tensor, mark: int, shortest: int, late: int, first: float) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of probabilities [R, 256], the row of (context, bytes since the last start) [D, L + 2], and the early head's row [D].

    Rows are the contexts' own where they are sharp; then the blurred ones, after 1 .. L bytes.
    """
    kinds, longest = spelling.shape
    lost = 1 + kinds * longest
    probability = rows(lost + 1 + longest)
    probability[0, mark] = 1 - first
    probability[0, spelling[:, 0]] = first / kinds
    probability[lost] = 1 / NUM_BYTES
    early = torch.cat([torch.zeros(1), lost + 1 + torch.arange(longest).repeat_interleave(kinds), torch.full((1,), lost)]).long()
    row = early[:, None].repeat(1, longest + 2)  # the last column stands for all longer segments
    for read in range(1, longest + 1):
        goes_on = _lasts(read, shortest, longest) / _lasts(read - 1, shortest, longest)
        sharp, blurred = torch.arange(kinds) + 1 + (read - 1) * kinds, lost + read
        probability[sharp, mark] = probability[blurred, mark] = 1 - goes_on
        if read < longest:
            probability[sharp, spelling[:, read]] = goes_on
            probability[blurred, spelling[:, read]] = goes_on / kinds
        row[sharp, read - late] = sharp
    return probability, row, early


def _lasts(read: int, shortest: int, longest: int) -> float:
    """P(n > read) of a length n uniform in shortest .. longest."""
    return min(1.0, max(0.0, (longest - read) / (longest - shortest + 1)))


def _check_lengths(shortest: int, longest: int) -> None:
    whole("longest", longest, 2, 64)
    whole("shortest", shortest, 1, longest)
