"""Delayed: a cut pays off many bytes later, or a far-sighted policy would not take it.

Letters: S sequences, T bytes, L lag, V keys, D contexts.
"""

import math

import torch
from torch import Tensor

from segment_env.boundaries import NUM_BYTES
from segment_env.diagnostics.base import FILLERS, Marked, check_gap, filler, full, geometric, laid_out, rows, whole
from segment_env.noise import BYTES, hashed, uniform

CUE, FIRST_KEY = ord("?"), ord("A")


class Delayed(Marked):
    """A cue announces a key, and L bytes after the key it comes again; only a segment that began at the key foresees it.

    A cycle is: a geometric number of fillers, the cue, one of V keys, L - 1 fillers, the key once more (the answer); M = gap + L + 2
    bytes on average. Everything is predicted as well as it can be, by scorer and early head alike, except the answer: it has
    probability 1 if byte t - L, the key's, was a start, whatever was cut since, and else, and at the early head always, 1 / V like
    every key. That start is decided right after the cue, before the key is seen. A cut there therefore gains log V, exactly, L bytes
    later, and no other cut gains anything::

        oracle: cut after every cue                (log V - c) / M                               nats per byte, c the price
        independent cuts at rate r                 r log V / M - c r
        never                                      0
        always                                     log V / M - c

    The oracle's rate is 1 / M; it is the one best policy while c < log V. With discount gamma the return of a cut after a cue is, on
    not cutting there::

        gamma^L log V - c                          which is positive above gamma = (c / log V)^(1 / L)

    With the defaults, at the default price of 0.5, that is gamma = 0.931: 0.9 makes -0.279 of it and learns never to cut, 0.99 makes
    1.678. Oracle 0.071, always -0.413; at the oracle's rate of 0.0312 random cuts give -0.013.

    ``h`` is one-hot in: 0 outside, 1 after the cue, 1 + j where j < L bytes were read from the key on, L + 1 + v where key v is due again.
    A cue begins anew wherever it is read.

    Args: ``lag`` L in 1..1000; ``keys`` V in 2..26; ``gap``, mean fillers before a cue, at least 0; ``leak`` in (0, 1), the probability of
    bytes that never come; ``dtype`` float32 or float64. Raises UserError outside these.
    """

    def __init__(self, lag: int = 24, keys: int = 16, gap: float = 6.0, leak: float = 0.01, dtype: torch.dtype = torch.float32):
        whole("lag", lag, 1, 1000)
        whole("keys", keys, 2, 26)
        check_gap(gap)
        step, context = _automaton(lag, keys)
        probability, row, early = _predictions(lag, keys, gap)
        contexts = torch.arange(len(row))
        super().__init__(
            step=step,
            context=context,
            row=row,
            early=early,
            probability=probability,
            leak=leak,
            oracle=contexts == 1,
            settled=lag + 2,  # as many bytes after a cue all is over
            back=torch.where(contexts > lag, lag, 0),
            marked=contexts == 1,
            dtype=dtype,
        )
        self.lag, self.keys, self.gap = lag, keys, gap
        self.gain = self.oracle_gain = math.log(keys)
        self.oracle_share, self.mean_length = 1.0, gap + lag + 2

    def sequences(self, seed: int, index: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`segment_env.batch.ByteStream`; always full, never terminated, and results are on the CPU."""
        column, number = index.cpu()[:, None], torch.arange(math.ceil(length / (self.lag + 2)))
        lead = geometric(uniform(seed, BYTES, column, number, torch.tensor(0)), self.gap)
        key = FIRST_KEY + hashed(seed, BYTES, column, number, torch.tensor(1)) % self.keys
        at, place = laid_out(lead, lead + self.lag + 2, length)
        x = torch.where(place == 0, CUE, filler(seed, column, length))
        return full(torch.where((place == 1) | (place == self.lag + 1), key.gather(1, at), x))


def _automaton(lag: int, keys: int) -> tuple[Tensor, Tensor]:
    """Next node after each byte, [N, 256], and the context of each node, [N].

    Nodes: 0 outside, 1 after the cue, then, key by key, 1 .. L bytes from the key on.
    """
    node = 2 + torch.arange(lag)[:, None] * keys + torch.arange(keys)  # [L, V]
    step = torch.zeros(2 + lag * keys, NUM_BYTES, dtype=torch.int64)
    step[1, FIRST_KEY : FIRST_KEY + keys] = node[0]
    step[node[:-1]] = node[1:, :, None].expand(-1, -1, NUM_BYTES)
    step[:, CUE] = 1
    waiting = torch.arange(2, lag + 1).repeat_interleave(keys)
    return step, torch.cat([torch.arange(2), waiting, lag + 1 + torch.arange(keys)])


def _predictions(lag: int, keys: int, gap: float) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of probabilities [R, 256], the row without and with a start at the key [D, 2], and the early head's row [D].

    Rows: outside, some key, some filler, then each key for sure.
    """
    key = FIRST_KEY + torch.arange(keys)
    probability = rows(3 + keys)
    probability[0, FILLERS] = gap / (1 + gap) / len(FILLERS)
    probability[0, CUE] = 1 / (1 + gap)
    probability[1, key] = 1 / keys
    probability[2, FILLERS] = 1 / len(FILLERS)
    probability[3 + torch.arange(keys), key] = 1
    early = torch.tensor([0, 1, *[2] * (lag - 1), *[1] * keys])
    row = early[:, None].repeat(1, 2)
    row[-keys:, 1] = 3 + torch.arange(keys)
    return probability, row, early
