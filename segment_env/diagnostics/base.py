"""What the diagnostic problems share: each is a stream of bytes, the scorer of that stream, and its known best policy in one.

A problem is made of tables. A finite automaton reads the bytes; its node gives the context, which h is one-hot in, so that a linear
policy can be the oracle. What the decisions so far come to is one small number, the memory. Context and memory choose the row of
log-probabilities by which byte t is predicted; the early head's row depends on the context alone. So every problem is causal,
ignores ``gate``, has no parameters, and takes any bytes, whatever stream they are of.

Letters: S sequences, B rows, T bytes, N nodes of the automaton, D contexts, A values of the memory, R rows of log-probabilities.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from segment_env.boundaries import BOS, NUM_BYTES
from segment_env.closed_form import since_decided
from segment_env.errors import UserError, check_rate
from segment_env.noise import BYTES, hashed
from segment_env.streams.made_up import locate

State = dict[str, Tensor]
FILLERS = torch.arange(ord("a"), ord("i"))  #: eight letters that mean nothing
_FILLER = 1000  # a last counter that no other draw of a problem uses


class Diagnostic(nn.Module):
    """A problem made of tables: both faces of a scorer, and the reference of a stream.

    A subclass gives the tables, ``sequences``, ``rate`` and the two gains below. Node 0 is where a sequence begins.

    Args: ``step`` [N, 256], the node after each byte; ``context`` [N] of every node; ``row`` [D, A], which row predicts, given
    context and memory; ``early`` [D], the early head's row; ``probability`` [R, 256], rows that sum to 1; ``leak``, see
    :func:`spread`; ``oracle`` [D] bool, contexts at which the oracle cuts; ``settled``: the node is a function of that many last
    bytes, whatever came before; ``dtype`` float32 or float64. Raises UserError on another dtype or a leak outside (0, 1).
    """

    unit: str = "byte"
    sample_rate: float | None = None
    default_price: float = 0.5  #: nats per boundary for which the figures of the docstrings are given

    step: Tensor
    context: Tensor
    row: Tensor
    early: Tensor
    table: Tensor
    one_hot: Tensor
    oracle_contexts: Tensor

    def __init__(
        self,
        *,
        step: Tensor,
        context: Tensor,
        row: Tensor,
        early: Tensor,
        probability: Tensor,
        leak: float,
        oracle: Tensor,
        settled: int,
        dtype: torch.dtype,
    ):
        super().__init__()
        if dtype not in (torch.float32, torch.float64):
            raise UserError(f"a diagnostic problem computes in float32 or float64, got {dtype}")
        self.settled, self.width = settled, len(row)
        self.register_buffer("step", pad(step, (0, 1)))  # [N, 257]: BOS leads to node 0
        self.register_buffer("context", context)
        self.register_buffer("row", row)
        self.register_buffer("early", early)
        self.register_buffer("table", spread(probability, leak).log().to(dtype))  # [R, 256]
        self.register_buffer("one_hot", torch.eye(self.width, dtype=dtype))
        self.register_buffer("oracle_contexts", oracle)

    @property
    def dtype(self) -> torch.dtype:
        """Of h and of all log-probabilities."""
        return self.table.dtype

    # the stream

    def sequences(self, seed: int, index: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`segment_env.batch.ByteStream`; always full, never terminated, and results are on the CPU."""
        raise NotImplementedError

    def reference(self, x: Tensor) -> Tensor:
        """The oracle's starts, from x[<t] alone: ``x`` [S, T] -> [S, T] bool, True at t = 0."""
        nodes = self.nodes(x.to(self.step.device))[:, :-1]
        starts = self.oracle_contexts[self.context[nodes]].to(x.device)
        starts[:, :1] = True
        return starts

    # the scorer

    def nodes(self, x: Tensor) -> Tensor:
        """The automaton's node at every position, from x[<t]: ``x`` [S, T] -> [S, T+1] int64.

        All positions at once: each reads the ``settled`` bytes before it.
        """
        past = pad(x, (self.settled, 0), value=BOS)
        positions = x.shape[1] + 1
        node = torch.zeros_like(past[:, :positions])
        for first in range(self.settled):
            node = self.step[node, past[:, first : first + positions]]
        return node

    def encode(self, x: Tensor) -> Tensor:
        """See :class:`segment_env.scorer.Scorer`, as for all methods below that have no words of their own."""
        return self._hidden(self.nodes(x))

    def early_log_p(self, h: Tensor) -> Tensor:
        """The early head's row of the context."""
        return self.table[self.early[h.argmax(-1)]]

    def nll(self, h: Tensor, starts: Tensor, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """-log p of every position: see Scorer."""
        context = h.argmax(-1)
        return -self.table[self.row[context, self._memory(starts, context)], x]

    def init_state(self, num_rows: int, length: int) -> tuple[State, Tensor]:
        """Fresh rows: nothing read, nothing decided."""
        node = torch.zeros(num_rows, dtype=torch.int64, device=self.step.device)
        return {"node": node, "memory": node - 1}, self._hidden(node)

    def predict(self, state: State, action: Tensor, gate: Tensor | None = None) -> tuple[State, Tensor]:
        """Decide position t: see Scorer."""
        context = self.context[state["node"]]
        memory = self._decide(state["memory"], action.bool(), context)
        return {**state, "memory": memory}, self.table[self.row[context, memory]]

    def observe(self, state: State, byte: Tensor) -> tuple[State, Tensor]:
        """Read x[t] and move on: see Scorer."""
        node = self.step[state["node"], byte]
        return {**state, "node": node}, self._hidden(node)

    def _hidden(self, node: Tensor) -> Tensor:
        return self.one_hot[self.context[node]]

    def _memory(self, starts: Tensor, context: Tensor) -> Tensor:
        """What decisions come to, at every position: ``starts`` [B, T] bool and the context there [B, T] -> [B, T] in 0..A-1."""
        raise NotImplementedError

    def _decide(self, memory: Tensor, cut: Tensor, context: Tensor) -> Tensor:
        """The same, a position at a time: the memory of t - 1 (-1 at t = 0), the decision and the context at t, all [B] -> [B]."""
        raise NotImplementedError

    # the known answers

    @property
    def rate(self) -> float:
        """The oracle's boundaries per byte in the long run."""
        raise NotImplementedError

    def scores(self, rate: float, price: float) -> dict[str, float]:
        """Expected rewards in nats per byte, in the long run: "oracle", "random" (independent cuts at ``rate``), "never", "always"."""
        return score_table(self._oracle_gain(), self.rate, self._random_gain, rate, price)

    def _oracle_gain(self) -> float:
        """What the oracle gains on the early head, in nats per byte, before the price."""
        raise NotImplementedError

    def _random_gain(self, rate: float) -> float:
        """The same of independent cuts at ``rate`` in 0..1."""
        raise NotImplementedError


class Aligned(Diagnostic):
    """A problem in which only the segment that begins at the right place of a word gains, for as long as it lasts.

    Let G[k] be the expected gain on the early head at the k-th byte from the right place on (k = 0 there), per word: the chance that
    the word lasts that long times the gain there. Let M be the mean length of a word, from one right place to the next. Then::

        oracle: every segment begins at the right place         sum_k G[k] / M
        independent cuts at rate r: a cut there and none since  sum_k G[k] r (1 - r)^k / M
        never: rate 0                                           0
        always: rate 1                                          G[0] / M

    and every policy pays the price times its rate. The oracle's rate is 1 / M. Where no G[k] is negative and the price is below
    sum_k G[k], the oracle is the best policy: only a cut at the right place gains, and any cut after it ends the gain.

    The memory is the number of bytes since the last start at or before t; its last value stands for all larger ones.
    """

    gain: Sequence[float]  #: G
    mean_length: float  #: M, in bytes

    @property
    def rate(self) -> float:
        """The oracle's boundaries per byte in the long run: 1 / M."""
        return 1 / self.mean_length

    def _oracle_gain(self) -> float:
        return sum(self.gain) / self.mean_length

    def _random_gain(self, rate: float) -> float:
        return sum(g * rate * (1 - rate) ** k for k, g in enumerate(self.gain)) / self.mean_length

    def _memory(self, starts: Tensor, context: Tensor) -> Tensor:
        return since_decided(starts).clamp(max=self.row.shape[1] - 1)

    def _decide(self, memory: Tensor, cut: Tensor, context: Tensor) -> Tensor:
        return torch.where(cut, 0, memory + 1).clamp(max=self.row.shape[1] - 1)


class Marked(Diagnostic):
    """A problem in which a cut right after a mark has consequences later, whatever is cut in between, and no other cut has any.

    Let M be the mean length of a cycle, from one mark to the next, and g the mean, over marks, of all that a cut after one gains. Let
    the oracle cut after a fraction f of the marks, and let g* be what that gains a cycle. Then the expected rewards are::

        oracle                                          (g* - f c) / M                           nats per byte, c the price
        independent cuts at rate r                      r g / M - c r
        never                                           0
        always                                          g / M - c

    The oracle's rate is f / M; it is the best policy where it cuts after exactly the marks whose own gain exceeds the price.

    The memory is 1 if the byte after the last mark was a start, else 0.

    Args: ``back`` [D], how many bytes back that byte lies, in contexts where it matters; ``marked`` [D] bool, contexts of that byte.
    """

    gain: float  #: g
    oracle_gain: float  #: g*
    oracle_share: float  #: f
    mean_length: float  #: M, in bytes

    back: Tensor
    marked: Tensor

    def __init__(self, *, back: Tensor, marked: Tensor, **tables):
        super().__init__(**tables)
        self.register_buffer("back", back)
        self.register_buffer("marked", marked)

    @property
    def rate(self) -> float:
        """The oracle's boundaries per byte in the long run: f / M."""
        return self.oracle_share / self.mean_length

    def _oracle_gain(self) -> float:
        return self.oracle_gain / self.mean_length

    def _random_gain(self, rate: float) -> float:
        return rate * self.gain / self.mean_length

    def _memory(self, starts: Tensor, context: Tensor) -> Tensor:
        time = torch.arange(starts.shape[1], device=starts.device)
        return starts.gather(1, (time - self.back[context]).clamp(min=0)).long()

    def _decide(self, memory: Tensor, cut: Tensor, context: Tensor) -> Tensor:
        return torch.where(self.marked[context], cut.long(), memory.clamp(min=0))


def score_table(
    oracle_gain: float, oracle_rate: float, random_gain: Callable[[float], float], rate: float, price: float
) -> dict[str, float]:
    """Gains in nats per byte less price times rate, by policy; ``random_gain`` is a function of the rate, of which never is 0, always 1.

    Raises UserError on a rate outside (0, 1).
    """
    check_rate(rate, "the rate of random cuts")
    at = {"random": rate, "never": 0.0, "always": 1.0}
    return {"oracle": oracle_gain - price * oracle_rate, **{name: random_gain(r) - price * r for name, r in at.items()}}


def spread(probability: Tensor, leak: float) -> Tensor:
    """Make every byte possible: what is possible keeps 1 - leak of its probability, what is not shares ``leak`` evenly.

    ``probability`` [R, 256], rows that sum to 1 -> the same of all positive rows. A row without a zero stays as it is. The ratio of
    two rows is unchanged wherever both had zeros and the byte was possible, so that gains do not depend on the leak.
    Raises UserError on a leak outside (0, 1).
    """
    if not 0 < leak < 1:
        raise UserError(f"leak must lie strictly between 0 and 1 (the probability of bytes that never come), got {leak}")
    zero = probability == 0
    zeros = zero.sum(-1, keepdim=True)
    kept = torch.where(zeros > 0, (1 - leak) * probability, probability)
    return torch.where(zero, leak / zeros.clamp(min=1).double(), kept)


def rows(count: int) -> Tensor:
    """``count`` rows of probabilities to be filled in: zeros [count, 256] float64."""
    return torch.zeros(count, NUM_BYTES, dtype=torch.float64)


def geometric(u: Tensor, mean: float) -> Tensor:
    """Geometric numbers 0, 1, 2 ... of the given mean, from uniform ``u`` in (0, 1): int64. Each next one has odds mean : 1."""
    ratio = torch.tensor(mean / (1 + mean), dtype=torch.float64)
    return (u.double().log() / ratio.log()).floor().long()


def full(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What ``sequences`` answers of bytes ``x`` [S, T] that are all valid and not terminated."""
    return x, torch.ones_like(x, dtype=torch.bool), torch.zeros(len(x), dtype=torch.bool)


def filler(seed: int, column: Tensor, length: int) -> Tensor:
    """Independent uniform fillers: ``column`` [S, 1] global index -> bytes [S, T]."""
    draw = hashed(seed, BYTES, column, torch.arange(length), torch.full((), _FILLER))
    return FILLERS[draw % len(FILLERS)]


def laid_out(lead: Tensor, total: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Cycles one after the other, each ``total`` [S, W] bytes of which ``lead`` [S, W] come before its first mark.

    Returns, of each of T = ``length`` bytes: the number of its cycle, and its place in it counted from the first mark (negative in
    the lead), both [S, T].
    """
    number, offset = locate(total, length)
    return number, offset - lead.gather(1, number)


def whole(name: str, value: float, low: int, high: int) -> None:
    """Raises UserError unless ``value``, called ``name``, is a whole number in low..high."""
    if type(value) is not int or not low <= value <= high:
        raise UserError(f"{name} must be a whole number in {low}..{high}, got {value}")


def check_gap(gap: float) -> None:
    """Raises UserError unless ``gap`` is a mean number of fillers between marks."""
    if not 0 <= gap < math.inf:
        raise UserError(f"gap must be a mean number of fillers, at least 0, got {gap}")
