"""The two protocols between environment and learner: what scores bytes, and what places boundaries.

A *scorer* is a byte language model that is told where segments begin; a *policy* is anything that decides where they do. Each
has a parallel face (all T positions at once, for training) and a stepwise one (a position at a time, for the environment and for
generation), and both faces agree: log-probabilities to 1e-12 in float64, to rtol and atol 1e-5 in float32.

Letters: S sequences, B rows (K rows of a sequence are adjacent), T bytes, D width.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from segment_env.errors import UserError

State = Any  #: a pytree (dicts, tuples, lists) of tensors whose first dimension is B


@runtime_checkable
class Scorer(Protocol):
    """A byte language model whose predictions depend on boundaries. All log-probabilities are in nats, 256-way.

    One whose pooling reads a policy's gate says so with an attribute ``reads_gate = True``, and one that cannot do without it with
    ``needs_gate = True``; without the attribute it is False. One that can give the log-probabilities of all bytes in parallel has a
    method ``log_p(h, starts, gate=None) -> [B, T, 256]``, of which ``nll`` is the element at x; only evaluation by tasks asks for it. One
    whose h[t] depends on a number of last bytes alone, and past them not on BOS, may say so with an attribute ``encoder_reach``.
    """

    width: int  #: D of h
    dtype: torch.dtype  #: of its parameters

    def encode(self, x: Tensor) -> Tensor:
        """``x`` [S, T] int64 bytes -> h [S, T+1, D]; h[:, t] has read BOS, x[<t] and never sees a boundary."""
        ...

    def early_log_p(self, h: Tensor) -> Tensor:
        """Prediction without boundaries, log p_early(x[t] | x[<t]): h [..., D] -> [..., 256]."""
        ...

    def nll(self, h: Tensor, starts: Tensor, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """-log p(x[t] | x[<t], a[<=t]) of every position, in nats, float32 or wider.

        Args: ``h`` [B, T, D], the encoder's state of every row; ``starts`` [B, T] bool; ``x`` [B, T] int64; ``gate`` [B, T]
        float, what a differentiable pooling reads (1 at t = 0, 0 in padding), else None. Returns: [B, T].
        """
        ...

    def init_state(self, num_rows: int, length: int) -> tuple[State, Tensor]:
        """State of ``num_rows`` fresh rows that will read at most ``length`` bytes, and h [B, D] at t = 0."""
        ...

    def predict(self, state: State, action: Tensor, gate: Tensor | None = None) -> tuple[State, Tensor]:
        """Decide position t: ``action``, ``gate`` [B] -> state, log p(x[t] | x[<t], a[<=t]) [B, 256]. May reuse ``state``'s memory."""
        ...

    def observe(self, state: State, byte: Tensor) -> tuple[State, Tensor]:
        """Read x[t] = ``byte`` [B] int64 and move on: -> state, h [B, D] of position t + 1. May reuse ``state``'s memory."""
        ...


class Decision(NamedTuple):
    """What a policy answers."""

    action: Tensor  #: [B, T] or [B], bool; what stands where there is no choice is ignored
    logits: Tensor | None  #: of P(action = 1), float, after the soft cap if there was one; None: the action is no random variable
    #: Soft value in [0, 1] of the action, float, for poolings that differentiate through it: a forward pass cuts by the action, a
    #: backward pass takes the gate for it. Whatever is replayed, it stays that of the policy's own decision.
    gate: Tensor | None = None


class Observation(NamedTuple):
    """What a decision at t may read, for B rows. A policy without a parallel form is stepped on these."""

    hidden: Tensor  #: [B, D], h at t
    byte: Tensor  #: [B] int64, x[t-1]; 256 at t = 0
    since: Tensor  #: [B] int64, bytes since the last start; 0 at t = 0
    recent: Tensor | None  #: [B, n_past] int64, recent[:, j-1] = start[t-j]; None where n_past = 0
    noise: Tensor  #: [B] float in (0, 1), act by a = (noise < p)
    early_log_p: Tensor | None  #: [B, 256], the early head's prediction of x[t]; None unless the policy reads it


class Policy(Protocol):
    """Anything that places boundaries. One without a parallel form leaves ``parallel`` out and is stepped over T.

    One that looks at what a decision at t has not read says so with ``causal = False``. It has a parallel form alone, is handed
    ``valid`` [B, T] as a further keyword, and cannot be stepped or generate.

    One whose decisions hold a gate says so with an attribute ``gives_gate = True``; without the attribute it is False.
    """

    n_past: int  #: how many past decisions ``recent`` holds for it; 0: none
    reads_early_log_p: bool  #: False: it is handed None for the early head's predictions, which spares their expansion to rows

    def parallel(
        self,
        h: Tensor,
        x: Tensor,
        noise: Tensor,
        early_log_p: Tensor | None,
        *,
        soft_cap: float | None = None,
        actions: Tensor | None = None,
    ) -> Decision:
        """Decide all positions at once.

        Args: ``h`` [B, T, D]; ``x`` [B, T] int64, of which position t may read x[<t] only; ``noise`` [B, T]; ``early_log_p``
        [B, T, 256] or None; ``soft_cap`` c: logits become c tanh(l / c); ``actions`` [B, T] bool: replay these (True at t = 0),
        and give their logits.
        """
        ...

    def init(self, num_rows: int) -> State:
        """The policy's own state of ``num_rows`` fresh rows: a pytree of [B, ...] tensors, empty where it needs none."""
        ...

    def step(self, state: State, observation: Observation, *, soft_cap: float | None = None) -> tuple[State, Decision]:
        """Decide one position: fields of the decision are [B]."""
        ...


def check_gate(scorer: Scorer, policy: Policy) -> None:
    """Raises UserError where ``policy`` gives a gate that ``scorer`` does not read, or gives none and the scorer needs one."""
    name, reader = type(policy).__name__, type(getattr(scorer, "pooling", scorer)).__name__
    if not gives_gate(policy):
        if getattr(scorer, "needs_gate", False):
            raise UserError(f"{reader} reads the gate of a policy, and {name} gives none: use another pooling, or another agent")
    elif not getattr(scorer, "reads_gate", False):
        raise UserError(f"{name} learns through its gate, which {reader} does not read: use another pooling, or another agent")


def gives_gate(policy: Policy) -> bool:
    """Whether the decisions of ``policy`` hold a gate."""
    return getattr(policy, "gives_gate", False)


def is_causal(policy: Policy) -> bool:
    """Whether a decision at t of ``policy`` depends on x[<t] and its noise alone; a policy that does not say so is taken to be."""
    return getattr(policy, "causal", True)


def note(policy: Policy) -> str:
    """What must stand beside all that a policy does: that it is not causal; nothing otherwise."""
    return "" if is_causal(policy) else "NOT CAUSAL: boundaries depend on what comes after them"


def check_causal(policy: Policy) -> None:
    """Raises UserError where ``policy`` cannot be stepped."""
    if not is_causal(policy):
        name = type(policy).__name__
        raise UserError(f"{name} is not causal: it cannot decide a byte at a time; use unroll, or a policy that reads the past alone")


def capped(logits: Tensor, soft_cap: float | None) -> Tensor:
    """Soft cap of logits, c tanh(l / c): keeps probabilities inside sigmoid(+-c). None leaves them as they are."""
    return logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)


def uncapped(logits: Tensor, soft_cap: float | None) -> Tensor:
    """Inverse of :func:`capped`; infinite where the cap has saturated in the dtype at hand."""
    return logits if soft_cap is None else soft_cap * torch.atanh(logits / soft_cap)


def reset_rows(state: State, fresh: State, rows: Tensor) -> State:
    """``state`` with the rows [B] bool taken from ``fresh``, both pytrees of [B, ...] tensors of the same shapes."""
    return tree_map(lambda old, new: torch.where(rows.view(-1, *[1] * (old.dim() - 1)), new, old), state, fresh)
