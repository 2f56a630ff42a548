"""Deceptive: what a cut gains at once is the opposite of what it gains in the end.

Letters: S sequences, T bytes, D contexts, m bytes of the aftermath.
"""

import math

import torch
from torch import Tensor

from segment_env.boundaries import NUM_BYTES
from segment_env.diagnostics.base import FILLERS, Marked, check_gap, filler, full, geometric, laid_out, rows, whole
from segment_env.errors import UserError
from segment_env.noise import BYTES, hashed, uniform

LURE, INVEST, BODY = ord("$"), ord("!"), ord(".")


class Deceptive(Marked):
    """After a lure a cut is paid at once and costs more later; after the other mark, invest, it costs at once and pays more later.

    A cycle is: a geometric number of fillers, a mark, which is a lure or an invest with chance 1/2 each, and m + 1 body bytes, always the
    same byte; M = gap + m + 2 bytes on average. The early head gives every body byte the probability ``chance``. So does the
    scorer, unless the first body byte was a start, whatever was cut since: then it multiplies that probability by e^g at the body's
    k-th byte (0 <= k <= m), so that g, which depends on mark and k, is what the byte gains::

                        k = 0                 k = 1 .. m              sum G with the defaults
        lure            lure_now     (+1)     lure_later     (-1/2)   -3
        invest          invest_now   (-1)     invest_later   (+1/2)   +3

    That start is decided right after the mark. A second cut within the body changes nothing but the price paid, and so does a cut in
    the gap (were the effect to end with the segment, one could take what a lure pays and run). Hence, at price c per boundary::

        oracle: cut after every invest             (G_invest - c) / (2 M)                        nats per byte
        independent cuts at rate r                 r (G_lure + G_invest) / (2 M) - c r
        never                                      0
        always                                     (G_lure + G_invest) / (2 M) - c

    The oracle's rate is 1 / (2 M); it is the one best policy while G_lure < c < G_invest. With discount gamma the return of a cut
    after a mark is, on not cutting there::

        now + later (gamma + gamma^2 + ... + gamma^m) - c

    With the defaults, at the default price of 0.1, a lure is resisted above gamma = 0.650 and an invest taken above gamma = 0.700: at
    gamma = 0.5 both are wrong (0.402 and -0.602), at 0.9 both right (-1.663 and 1.463). Oracle 0.112, always -0.1; at the oracle's rate
    of 0.0385 random cuts give -0.004.

    ``h`` is one-hot in: 0 outside, 1 + k after a lure and m + 2 + k after an invest, k body bytes on. A mark begins anew wherever it is
    read.

    Args: ``after`` m in 1..1000; ``lure_now`` > 0, ``lure_later``, ``invest_now`` < 0, ``invest_later`` in nats, with
    G_lure < 0 < G_invest; ``gap``, mean fillers before a mark, at least 0; ``chance`` in (0, 1), with e^g chance < 1 for every g;
    ``leak`` in (0, 1), the probability of bytes that never come; ``dtype`` float32 or float64. Raises UserError outside these.
    """

    default_price = 0.1

    def __init__(
        self,
        after: int = 8,
        lure_now: float = 1.0,
        lure_later: float = -0.5,
        invest_now: float = -1.0,
        invest_later: float = 0.5,
        gap: float = 3.0,
        chance: float = 0.125,
        leak: float = 0.01,
        dtype: torch.dtype = torch.float32,
    ):
        whole("after", after, 1, 1000)
        check_gap(gap)
        lure, invest = lure_now + after * lure_later, invest_now + after * invest_later
        if not (lure_now > 0 > lure and invest_now < 0 < invest):
            raise UserError(f"a lure must pay at once and lose in all, an invest the reverse; in all they give {lure} and {invest}")
        gains = [0.0, lure_now, lure_later, invest_now, invest_later]
        if not 0 < chance * math.exp(max(gains)) < 1:
            raise UserError(f"chance must be positive and below e^-{max(gains)}, so that no gain makes it 1, got {chance}")
        size, place = after + 1, torch.arange(after + 1)
        early = torch.cat([torch.tensor([0]), torch.ones(2 * size, dtype=torch.int64)])
        later = (place > 0).long()
        marked = torch.cat([torch.tensor([False]), place == 0, place == 0])
        super().__init__(
            step=_automaton(size),
            context=torch.arange(1 + 2 * size),
            row=torch.stack([early, torch.cat([torch.tensor([0]), 2 + later, 4 + later])], -1),
            early=early,
            probability=_predictions(gains, gap, chance),
            leak=leak,
            oracle=marked & (torch.arange(1 + 2 * size) > size),
            settled=size + 1,  # as many bytes after a mark all is over
            back=torch.cat([torch.tensor([0]), place, place]),
            marked=marked,
            dtype=dtype,
        )
        self.after, self.gap = after, gap
        self.gain, self.oracle_gain = (lure + invest) / 2, invest / 2
        self.oracle_share, self.mean_length = 0.5, gap + after + 2

    def sequences(self, seed: int, index: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`segment_env.batch.ByteStream`; always full, never terminated, and results are on the CPU."""
        column, number = index.cpu()[:, None], torch.arange(math.ceil(length / (self.after + 2)))
        lead = geometric(uniform(seed, BYTES, column, number, torch.tensor(0)), self.gap)
        mark = torch.where(hashed(seed, BYTES, column, number, torch.tensor(1)) % 2 == 0, LURE, INVEST)
        at, place = laid_out(lead, lead + self.after + 2, length)
        x = torch.where(place == 0, mark.gather(1, at), filler(seed, column, length))
        return full(torch.where(place > 0, BODY, x))


def _automaton(size: int) -> Tensor:
    """Next node after each byte, [N, 256]; nodes are contexts, ``size`` of each mark's."""
    following = torch.arange(1, 2 + 2 * size)
    following[[0, size, 2 * size]] = 0  # outside it stays so, and the last body byte leads there
    step = following[:, None].repeat(1, NUM_BYTES)
    step[:, LURE], step[:, INVEST] = 1, 1 + size
    return step


def _predictions(gains: list[float], gap: float, chance: float) -> Tensor:
    """Rows of probabilities [1 + len(gains), 256]: outside, then a body byte that gains each of ``gains``."""
    probability = rows(1 + len(gains))
    probability[0, FILLERS] = gap / (1 + gap) / len(FILLERS)
    probability[0, LURE] = probability[0, INVEST] = 1 / (1 + gap) / 2
    body = chance * torch.tensor(gains, dtype=torch.float64).exp()
    probability[1:] = (1 - body[:, None]) / (NUM_BYTES - 1)
    probability[1:, BODY] = body
    return probability
