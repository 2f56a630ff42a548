"""Period: counting in a circle; a cut pays at the start of a cycle.

Letters: S sequences, T bytes, P period.
"""

import torch
from torch import Tensor

from segment_env.boundaries import NUM_BYTES
from segment_env.closed_form import AlignedScorer, CountingStream
from segment_env.diagnostics.base import score_table
from segment_env.errors import UserError


class Period(AlignedScorer):
    """A :class:`~segment_env.closed_form.CountingStream` and the :class:`~segment_env.closed_form.AlignedScorer` of its noise in one.

    With e the noise of both, a sharp position gains over the early head, on average::

        G = (1 - e) log P - e log(255 / (256 - P))                                               nats per byte

    and the fractions of sharp positions that AlignedScorer derives give the expected rewards, at price c per boundary::

        oracle: cut at every cycle start           G - c / P
        independent cuts at rate r                 G (1 - (1 - r)^P) / P - c r
        never                                      0
        always                                     G / P - c

    The oracle's rate is 1 / P. With the defaults, at the default price of 0.5: oracle 1.912, always -0.253; at the oracle's rate of
    0.125 random cuts give 0.099.

    Args: ``period`` P in 2..255; ``noise`` e in (0, 0.5); ``dtype`` float32 or float64. Raises UserError outside these.
    """

    unit: str = "byte"
    sample_rate: float | None = None
    default_price: float = 0.5  #: nats per boundary for which the figures above are given

    oracle_contexts: Tensor

    def __init__(self, period: int = 8, noise: float = 0.05, dtype: torch.dtype = torch.float32):
        if period % 1 or not 2 <= period < NUM_BYTES or not 0 < noise < 0.5 or dtype not in (torch.float32, torch.float64):
            raise UserError(
                f"a Period needs a whole period in 2..255, noise in (0, 0.5) and float32 or float64, got {period}, {noise} and {dtype}"
            )
        super().__init__(int(period), noise, dtype)
        self.stream = CountingStream(self.period, noise)
        self.register_buffer("oracle_contexts", torch.arange(self.width) == 0)

    def sequences(self, seed: int, index: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`segment_env.batch.ByteStream`; always full, never terminated."""
        return self.stream.sequences(seed, index, length)

    def reference(self, x: Tensor) -> Tensor:
        """The oracle's starts, from x[<t] alone: ``x`` [S, T] -> [S, T] bool, True at t = 0."""
        return self.stream.reference(x)

    @property
    def rate(self) -> float:
        """The oracle's boundaries per byte in the long run: 1 / P."""
        return 1 / self.period

    def scores(self, rate: float, price: float) -> dict[str, float]:
        """Expected rewards in nats per byte, in the long run: "oracle", "random" (independent cuts at ``rate``), "never", "always"."""
        gain = self.nats_per_byte(0, self.noise) - self.nats_per_byte(1, self.noise)
        return score_table(gain, self.rate, lambda r: gain * self.sharp_fraction(r), rate, price)
