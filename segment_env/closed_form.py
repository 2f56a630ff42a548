"""Scorers in closed form: no parameters, known answers. For tests, diagnostics and a first look at the environment.

:class:`AlignedScorer` with :class:`CountingStream` has a known best policy and known costs of others. :class:`TableScorer` depends on
boundaries in so tangled a way that an estimator which is right for it by luck is unlikely. Both satisfy
:class:`segment_env.scorer.Scorer`, are causal, ignore ``gate``, and take any bytes, whatever stream they are of.

They are modules only so that ``.to(device)`` moves their tables.

Letters: S sequences, B rows, T bytes, D width, P period.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax, one_hot

from segment_env.boundaries import BOS, NUM_BYTES, since_start
from segment_env.noise import BYTES, hashed, uniform


class CountingStream:
    """Counting in a circle from a random phase: x[t] = (phase + t) mod P. Always full, never terminated.

    With probability ``noise`` a byte is replaced by a uniform one of P..255; counting goes on underneath. Noise is thus known for
    what it is, and the count is known exactly from the first clean byte on.

    Args: ``period`` P in 2..255; ``noise`` in [0, 1). Raises ValueError outside these.
    """

    unit, sample_rate = "byte", None

    def __init__(self, period: int = 8, noise: float = 0.05):
        _check_counting(period, noise)
        self.period, self.noise = period, noise

    def sequences(self, seed: int, index: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`segment_env.batch.ByteStream`."""
        column, time = index[:, None], torch.arange(length, device=index.device)
        count = (hashed(seed, BYTES, column) + time) % self.period
        other = self.period + hashed(seed, BYTES, column, time, torch.ones_like(time)) % (NUM_BYTES - self.period)
        x = torch.where(uniform(seed, BYTES, column, time) < self.noise, other, count)
        return x, torch.ones_like(x, dtype=torch.bool), torch.zeros_like(index, dtype=torch.bool)

    def reference(self, x: Tensor) -> Tensor:
        """Starts of cycles, as far as x[<t] tells: ``x`` [..., T] -> [..., T] bool, True at t = 0."""
        starts = count_before(x, self.period)[..., :-1] == 0
        starts[..., :1] = True
        return starts


def count_before(x: Tensor, period: int) -> Tensor:
    """The count due at t, from x[<t]: (x[l] + t - l) mod P with l the last clean byte (x[l] < P) before t; P where there is none.

    ``x`` [..., T] int64 -> [..., T+1] int64 in 0..P.
    """
    time = torch.arange(x.shape[-1], device=x.device)
    last = torch.where(x < period, time, -1).cummax(-1).values
    due = (x.gather(-1, last.clamp(min=0)) + time + 1 - last) % period
    unknown = torch.full_like(x[..., :1], period)
    return torch.cat([unknown, torch.where(last < 0, unknown, due)], -1)


class AlignedScorer(nn.Module):
    """Predicts a :class:`CountingStream` sharply where the current segment began with the current cycle, else blurred.

    Let c be the count due at t (known from the first clean byte on) and s the last start at or before t. Where c is known and
    t - s = c, the count c has probability 1 - q and every other byte q / 255. Elsewhere, and at the early head always, each of the
    P counts has (1 - q) / P and every other byte q / (256 - P). ``h`` is one-hot in c, with a last element for "unknown", so that
    D = P + 1 and a linear policy can be the oracle.

    On a stream with noise e, past the first bytes (the count is unknown at t with probability e^t), a byte costs in nats::

        sharp     (1 - e) * -log(1 - q)       + e * -log(q / 255)
        blurred   (1 - e) * -log((1 - q) / P) + e * -log(q / (256 - P))

    and a policy that makes a fraction f of positions sharp costs f * sharp + (1 - f) * blurred. The fractions are::

        oracle: cut at every cycle start, nowhere else         1
        never cut, past the first cycle                        0
        always cut: t - s = 0, which is right where c = 0      1 / P
        independent cuts at rate r: at count c it takes a cut
        c positions ago and none since                         sum_{c<P} r (1 - r)^c / P = (1 - (1 - r)^P) / P

    A position cannot be sharp unless its cycle began with a cut and had none since, so the oracle, of rate 1 / P, is the one best
    policy, with or without a rate controller. It gains (1 - e) log P - e log(255 / (256 - P)) nats per byte on never cutting
    (positive for every P while e < 1/2).

    Args: ``period`` P in 2..255; ``noise`` q in (0, 1); ``dtype`` float32 or float64. Raises ValueError outside these.
    """

    table: Tensor

    def __init__(self, period: int = 8, noise: float = 0.05, dtype: torch.dtype = torch.float32):
        super().__init__()
        _check_counting(period, noise)
        _check_dtype(dtype)
        if not noise:
            raise ValueError("a scorer's noise must be positive, or some bytes would be impossible")
        self.period, self.noise, self.width = period, noise, period + 1
        blurred = torch.full((1, NUM_BYTES), noise / (NUM_BYTES - period), dtype=torch.float64)
        blurred[:, :period] = (1 - noise) / period
        sharp = torch.full((period, NUM_BYTES), noise / (NUM_BYTES - 1), dtype=torch.float64)
        sharp.fill_diagonal_(1 - noise)
        self.register_buffer("table", torch.cat([sharp, blurred]).log().to(dtype))  # [P+1, 256]: sharp at count c, or blurred

    @property
    def dtype(self) -> torch.dtype:
        """Of h and of all log-probabilities."""
        return self.table.dtype

    def encode(self, x: Tensor) -> Tensor:
        """See :class:`segment_env.scorer.Scorer`, as for all methods below that have no words of their own."""
        return self._hidden(count_before(x, self.period))

    def early_log_p(self, h: Tensor) -> Tensor:
        """The blurred prediction, whatever ``h``."""
        return self.table[-1].expand(*h.shape[:-1], NUM_BYTES)

    def nll(self, h: Tensor, starts: Tensor, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """-log p of every position: see Scorer."""
        return -self.table[self._row(h.argmax(-1), since_decided(starts)), x]

    def init_state(self, num_rows: int, length: int) -> tuple[dict[str, Tensor], Tensor]:
        """Fresh rows: count unknown."""
        count = torch.full((num_rows,), self.period, device=self.table.device)
        return {"count": count, "since": torch.zeros_like(count)}, self._hidden(count)

    def predict(self, state: dict[str, Tensor], action: Tensor, gate: Tensor | None = None) -> tuple[dict[str, Tensor], Tensor]:
        """Decide position t: see Scorer."""
        since = torch.where(action.bool(), 0, state["since"])
        return {**state, "since": since}, self.table[self._row(state["count"], since)]

    def observe(self, state: dict[str, Tensor], byte: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Read x[t] and move on: see Scorer."""
        count = torch.where(byte < self.period, byte, state["count"])  # x[t] itself, or the count that was due in its place
        count = torch.where(count < self.period, (count + 1) % self.period, self.period)
        return {"count": count, "since": state["since"] + 1}, self._hidden(count)

    def sharp_fraction(self, rate: float) -> float:
        """Fraction of positions that independent cuts at ``rate`` make sharp in the long run; 0 at rate 0, at most 1 / P."""
        return (1 - (1 - rate) ** self.period) / self.period

    def nats_per_byte(self, sharp_fraction: float, stream_noise: float) -> float:
        """Expected cost, in the long run, on a CountingStream of this period with noise e of a policy with that sharp fraction."""
        clean, other = self.table[-1, 0], self.table[-1, -1]
        blurred = -(1 - stream_noise) * clean - stream_noise * other
        sharp = -(1 - stream_noise) * self.table[0, 0] - stream_noise * self.table[0, -1]
        return float(sharp_fraction * sharp + (1 - sharp_fraction) * blurred)

    def _hidden(self, count: Tensor) -> Tensor:
        return one_hot(count, self.width).to(self.dtype)

    def _row(self, count: Tensor, since: Tensor) -> Tensor:
        """Row of the table: the count where the segment began with the cycle, else the blurred one, which an unknown count is too."""
        return torch.where(since == count, count, self.period)


class TableScorer(nn.Module):
    """Fixed random functions of bytes and boundaries, for tests of estimators and of stepwise = parallel.

    A byte is two nibbles, x = 16 * high + low, predicted apart: log p(x) = log p(high) + log p(low). The high nibble's
    probabilities are a softmax of tanh features of h, of the bytes since the last start, of the number of starts so far and of the
    current segment's first byte (BOS at the start itself, where it is not read yet). So the nll at t depends on all of
    a[<=t], and not additively. h[t] is a tanh embedding of x[t-1] and x[t-2]; the early head sees h alone.

    ``byte_noise`` scales the logits of the low nibble, a function of h alone; 0: it is uniform. This adds a term to log p that
    varies with the bytes and no boundary moves, and it is not in the early head, where the low nibble is always uniform: so
    reward minus early exit keeps it as noise, while the difference of two boundary samples of the same bytes is free of it.
    Neither the expected gradient nor the best policy depends on it.

    Args: ``width`` D >= 3; ``scale`` of the features, how much boundaries matter; ``byte_noise`` see above; ``seed`` of the
    tables; ``dtype`` float32 or float64. Raises ValueError on another width or dtype.
    """

    last_table: Tensor
    last_but_one_table: Tensor
    since_table: Tensor
    number_table: Tensor
    first_table: Tensor
    mix_table: Tensor
    high_table: Tensor
    low_table: Tensor
    early_table: Tensor

    TIMES = 61  #: distances and numbers of starts count modulo this; a prime, so that powers of two do not coincide

    def __init__(self, width: int = 8, scale: float = 1.0, byte_noise: float = 0.0, seed: int = 0, dtype: torch.dtype = torch.float32):
        super().__init__()
        _check_dtype(dtype)
        if width < 3:
            raise ValueError(f"width is at least 3, got {width}")
        self.width, self.scale, self.byte_noise = width, scale, byte_noise
        shapes = {
            "last": (NUM_BYTES + 1, width),
            "last_but_one": (NUM_BYTES + 1, width),
            "since": (self.TIMES, width),
            "number": (self.TIMES, width),
            "first": (NUM_BYTES + 1, width),
            "mix": (width, width),
            "high": (width, 16),
            "low": (width, 16),
            "early": (width, 16),
        }
        generator = torch.Generator().manual_seed(seed)
        for name, shape in shapes.items():  # drawn in float64, so that both dtypes hold the same tables
            self.register_buffer(f"{name}_table", torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))

    @property
    def dtype(self) -> torch.dtype:
        """Of h and of all log-probabilities."""
        return self.mix_table.dtype

    def encode(self, x: Tensor) -> Tensor:
        """See :class:`segment_env.scorer.Scorer`, as for all methods below that have no words of their own."""
        past = nn.functional.pad(x, (2, 0), value=BOS)  # past[t] = x[t-2]
        return self._hidden(past[:, 1:], past[:, :-1])

    def early_log_p(self, h: Tensor) -> Tensor:
        """High nibble from ``h`` alone, low nibble uniform."""
        high = log_softmax(h @ self.early_table, -1)
        return _joint(high, torch.full_like(high, -math.log(16)))

    def nll(self, h: Tensor, starts: Tensor, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """-log p of every position: see Scorer."""
        since = since_decided(starts)
        first = x.gather(-1, torch.arange(x.shape[-1], device=x.device) - since)
        high, low = self._nibbles(h, since, starts.long().cumsum(-1), torch.where(since == 0, BOS, first))
        return -(_pick(high, x // 16) + _pick(low, x % 16))

    def init_state(self, num_rows: int, length: int) -> tuple[dict[str, Tensor], Tensor]:
        """Fresh rows: nothing read, no start."""
        zero = torch.zeros(num_rows, dtype=torch.long, device=self.mix_table.device)
        bos = torch.full_like(zero, BOS)
        hidden = self._hidden(bos, bos)
        return {"last": bos, "since": zero, "number": zero, "first": bos, "hidden": hidden}, hidden

    def predict(self, state: dict[str, Tensor], action: Tensor, gate: Tensor | None = None) -> tuple[dict[str, Tensor], Tensor]:
        """Decide position t: see Scorer."""
        cut = action.bool()
        decided = {
            "since": torch.where(cut, 0, state["since"]),
            "number": state["number"] + cut.long(),
            "first": torch.where(cut, BOS, state["first"]),
        }
        return {**state, **decided}, _joint(*self._nibbles(state["hidden"], **decided))

    def observe(self, state: dict[str, Tensor], byte: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Read x[t] and move on: see Scorer."""
        hidden = self._hidden(byte, state["last"])
        first = torch.where(state["since"] == 0, byte, state["first"])
        return {"last": byte, "since": state["since"] + 1, "number": state["number"], "first": first, "hidden": hidden}, hidden

    def _hidden(self, last: Tensor, last_but_one: Tensor) -> Tensor:
        return torch.tanh(self.last_table[last] + self.last_but_one_table[last_but_one])

    def _nibbles(self, h: Tensor, since: Tensor, number: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of both nibbles, [..., 16] each, from h [..., D] and what boundaries make of the past [...]."""
        seen = self.since_table[since % self.TIMES] + self.number_table[number % self.TIMES] + self.first_table[first]
        high = torch.tanh(h @ self.mix_table + seen) @ self.high_table
        return log_softmax(self.scale * high, -1), log_softmax(self.byte_noise * (h @ self.low_table), -1)


def since_decided(starts: Tensor) -> Tensor:
    """Bytes since the last start at or before t: 0 where byte t starts a segment. ``starts`` [..., T] bool -> [..., T] int64."""
    return torch.where(starts, 0, since_start(starts)[..., :-1])


def _joint(high: Tensor, low: Tensor) -> Tensor:
    """Log-probabilities of bytes from those of their independent nibbles: [..., 16] twice -> [..., 256]."""
    return (high[..., :, None] + low[..., None, :]).flatten(-2)


def _pick(log_p: Tensor, symbol: Tensor) -> Tensor:
    return log_p.gather(-1, symbol[..., None]).squeeze(-1)


def _check_counting(period: int, noise: float) -> None:
    if not 2 <= period < NUM_BYTES or not 0 <= noise < 1:
        raise ValueError(f"a counting stream needs a period in 2..255 and noise in [0, 1), got {period} and {noise}")


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"a closed-form scorer computes in float32 or float64, got {dtype}")
