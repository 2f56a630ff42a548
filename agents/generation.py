"""Text from a byte language model that is told where segments begin, a byte at a time, with caches.

The loop is that of the stepwise environment: ask the policy, tell the scorer, and read a byte, which here is the prompt's or drawn.
Byte layers keep a window and token layers run at a boundary alone, so that a byte costs about the same after any number of others.

Letters: B rows, T bytes of the longest row, its prompt included.
"""

import codecs
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from agents import training
from agents.calibration import shifted_logits
from agents.escaping import printable
from segment_env.boundaries import BOS
from segment_env.errors import UserError, one_line
from segment_env.noise import BYTES, action_noise, uniform
from segment_env.scorer import Observation, Policy, Scorer, check_causal, check_gate

THRESHOLD = 0.5  #: the noise of thresholded boundaries: a segment starts where P(start) is above


@dataclass(frozen=True)
class Drawing:
    """How bytes and boundaries are drawn. Raises UserError on numbers that are none."""

    temperature: float = 1.0  #: log-probabilities are divided by it; 0 takes the likeliest byte
    top_p: float = 1.0  #: of the bytes, likeliest first, those that are needed to reach this probability may be drawn
    seed: int = 0  #: of the bytes
    boundary_seed: int | None = None  #: of the boundaries; None: the same
    thresholded: bool = False  #: boundaries are no draw: where P(start) > 1/2, after the policy's offset

    def __post_init__(self):
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"the temperature must be a number from 0 (the likeliest byte) on, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top-p must lie above 0 and be at most 1 (all bytes), got {self.top_p}")

    def noise(self, row: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """The uniforms of bytes and of boundaries, two of [B, T]: functions of the seeds, ``row`` [B] int64 and t alone."""
        time = torch.arange(length, device=row.device)
        seed = self.seed if self.boundary_seed is None else self.boundary_seed
        boundaries = action_noise(seed, row, torch.zeros_like(row), length)
        return uniform(self.seed, BYTES, row[:, None], time), boundaries.fill_(THRESHOLD) if self.thresholded else boundaries

    def byte(self, log_p: Tensor, noise: Tensor) -> Tensor:
        """One byte for every row, the inverse of the distribution function at ``noise`` [B]: log_p [B, 256] -> [B] int64."""
        if self.temperature == 0:
            return log_p.argmax(-1)
        log_p = log_p.double()
        p = ((log_p - log_p.amax(-1, keepdim=True)) / self.temperature).softmax(-1)
        if self.top_p < 1:
            falling, byte = p.sort(dim=-1, descending=True, stable=True)
            p = p.scatter(-1, byte, torch.where(falling.cumsum(-1) - falling < self.top_p, falling, 0.0))
        reached = p.cumsum(-1)
        return (reached <= noise.double()[:, None] * reached[:, -1:]).sum(-1)  # no byte of probability 0: it adds nothing to the sum


class Step(NamedTuple):
    """Position t of all rows, on the device of the scorer."""

    byte: Tensor  #: [B] int64, x[t]: the prompt's while t is inside it, then drawn
    start: Tensor  #: [B] bool, whether it starts a segment
    log_p: Tensor  #: [B] log p(x[t] | x[<t], a[<=t]) in nats, of the model as it is: whatever the temperature


class Text(NamedTuple):
    """One row, all T of its own bytes: the prompt and what follows it."""

    data: bytes
    prompt_length: int
    starts: Tensor  #: [T] bool
    log_p: Tensor  #: [T] nats, see :class:`Step`


Stop = Callable[[int, bytearray], bool]  #: index of a row, and what it has generated so far, the prompt left out


def generate(
    scorer: Scorer,
    policy: Policy,
    prompts: Sequence[bytes],
    num_bytes: int,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    boundary_seed: int | None = None,
    thresholded: bool = False,
    rows: Sequence[int] | None = None,
    stop: Stop | None = None,
) -> list[Text]:
    """Go on from every prompt for ``num_bytes`` bytes, all prompts in one batch: -> as many texts.

    Args: ``rows`` and the arguments between, see :func:`stream`; ``stop`` is asked for every row after every byte that it has
    generated, and a row of which it is True ends with that byte.
    """
    steps = stream(scorer, policy, prompts, num_bytes, Drawing(temperature, top_p, seed, boundary_seed, thresholded), rows)
    taken, generated, ends = [], [bytearray() for _ in prompts], [len(prompt) + num_bytes for prompt in prompts]
    for t, step in enumerate(steps):
        taken.append(step)
        if stop:
            for row, (byte, prompt) in enumerate(zip(step.byte.tolist(), prompts, strict=True)):
                if len(prompt) <= t < ends[row]:
                    generated[row].append(byte)
                    ends[row] = t + 1 if stop(row, generated[row]) else ends[row]
            if t + 1 >= max(ends):
                break
    byte, start, log_p = (torch.stack(column, 1).cpu() for column in zip(*taken, strict=True))
    texts = zip(prompts, ends, byte.tolist(), start, log_p, strict=True)
    return [Text(bytes(x[:end]), len(prompt), a[:end], each[:end]) for prompt, end, x, a, each in texts]


def stream(
    scorer: Scorer,
    policy: Policy,
    prompts: Sequence[bytes],
    num_bytes: int,
    drawing: Drawing | None = None,
    rows: Sequence[int] | None = None,
) -> Iterator[Step]:
    """All positions one after the other, those of the prompts included, until every row has ``num_bytes`` behind its prompt.

    Rows move on together: one with a short prompt draws bytes while another still reads. A prompt may be empty: BOS stands before
    it, and nowhere else. A text may grow longer than the crops that the model was trained on: nothing is cut off or begun anew,
    byte layers attend to their window as ever, and token layers at rotary positions that they have not met in training.

    Args: ``rows`` [B], what the noise of a row is drawn by beside the seeds and t (default: 0, 1, ...), so that a row alone is the
    row in a batch. Raises UserError without prompts, on fewer bytes than 1, on a policy that is not causal, and on one whose gate
    does not go with the scorer; and with the first step, where memory is short of so many bytes.
    """
    if not prompts:
        raise UserError("there is no prompt to go on from: give at least one, an empty one for the beginning of a document")
    if num_bytes < 1:
        raise UserError(f"the number of bytes to generate must be at least 1, got {num_bytes}")
    check_causal(policy)
    check_gate(scorer, policy)
    return _stream(scorer, policy, prompts, num_bytes, drawing or Drawing(), range(len(prompts)) if rows is None else rows)


def _stream(
    scorer: Scorer, policy: Policy, prompts: Sequence[bytes], num_bytes: int, drawing: Drawing, rows: Sequence[int]
) -> Iterator[Step]:
    longest = max(map(len, prompts))
    with torch.no_grad(), _room(len(prompts), longest + num_bytes):
        state, h = scorer.init_state(len(prompts), longest + num_bytes)
        inner, device = policy.init(len(prompts)), h.device
    given = torch.tensor([list(prompt.ljust(longest, b"\0")) for prompt in prompts], dtype=torch.int64, device=device)
    length = torch.tensor([len(prompt) for prompt in prompts], device=device)
    byte_noise, noise = drawing.noise(torch.tensor(rows, device=device), longest + num_bytes)
    byte, since, first = torch.full_like(length, BOS), torch.zeros_like(length), torch.ones_like(length, dtype=torch.bool)
    recent = torch.zeros(len(prompts), policy.n_past, dtype=torch.int64, device=device)
    for t in range(longest + num_bytes):
        with torch.no_grad():  # not around the yield: it is the caller's again there
            if t:
                state, h = scorer.observe(state, byte)
            early = scorer.early_log_p(h) if policy.reads_early_log_p else None
            observation = Observation(h, byte, since, recent if policy.n_past else None, noise[:, t], early)
            inner, decision = policy.step(inner, observation)
            start = decision.action if t else first
            gate = None if decision.gate is None else decision.gate if t else torch.ones_like(decision.gate)
            state, log_p = scorer.predict(state, start, gate)
            byte = drawing.byte(log_p, byte_noise[:, t])
            if t < longest:
                byte = torch.where(t < length, given[:, t], byte)
        yield Step(byte, start, log_p.gather(1, byte[:, None]).squeeze(1))
        since = torch.where(start, 1, since + 1)
        if policy.n_past:
            recent = torch.cat([start.long()[:, None], recent[:, :-1]], 1)


@contextmanager
def _room(num_rows: int, length: int) -> Iterator[None]:
    """Raises UserError where the caches of the rows cannot be had."""
    try:
        yield
    except (MemoryError, OverflowError, RuntimeError, TypeError) as error:  # TypeError: more than an int64 holds
        raise UserError(f"no room for {num_rows:,} x {length:,} bytes of text: ask for fewer ({one_line(error)})") from error


class Display:
    r"""Bytes as they come, as text for a terminal: never half a character.

    What is no UTF-8 is escaped, as Python does, and so is what cannot be printed, line ends and tabs apart. A character that a
    boundary cuts in two is shown as its bytes.

    >>> display = Display()
    >>> [display.add(bytes([byte])) for byte in "—".encode()], display.add(b"\xe2", end=True)
    (['', '', '—'], '\\xe2')
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")

    def add(self, data: bytes, end: bool = False) -> str:
        """What can be shown after ``data``; at the ``end``, all that is left."""
        return "".join(each if each in "\n\t" else printable(each) for each in self._decoder.decode(data, end))


def shown(data: bytes, starts: Sequence[bool], marked: bool, display: Display) -> str:
    """Bytes that go on on ``display``, with a ``|`` before every one that starts a segment where they are ``marked``."""
    if not marked:
        return display.add(data)
    return "".join(
        (display.add(b"", end=True) + "|" if start else "") + display.add(bytes([byte])) for byte, start in zip(data, starts, strict=True)
    )


def run(
    path: Path, prompt: bytes | None, num_bytes: int, num_samples: int, drawing: Drawing, rate: float | None = None, marked: bool = False
) -> Iterator[str]:
    """Text of a run's model as it comes: the prompt, and what goes on from it; several samples one after the other, when they are done.

    Args: ``prompt``, None for the beginning of a document; ``rate``: one offset is added to all logits, calibrated on validation
    bytes to this rate, which of thresholded boundaries is by default the target of the run; ``marked``: segments are shown.

    Raises UserError on a number of samples below 1, a prompt without bytes, and where :func:`stream` or the calibration does.
    """
    if num_samples < 1:
        raise UserError(f"the number of samples must be at least 1, got {num_samples}")
    if prompt == b"":
        raise UserError("the prompt has no bytes: leave it out, and the model begins a document")
    opened = training.open_run(path)
    opened.agent.eval()
    with _room(num_samples, len(prompt or b"") + num_bytes):
        prompts = [prompt or b""] * num_samples
    with _calibrated(opened, drawing, rate):
        steps = stream(opened.model, opened.agent.policy, prompts, num_bytes, drawing)
        if num_samples == 1:
            display = Display()
            for step in steps:
                yield shown(bytes(step.byte.tolist()), step.start.tolist(), marked, display)
            yield display.add(b"", end=True)
            return
        byte, start = (torch.stack(column, 1).tolist() for column in list(zip(*steps, strict=True))[:2])
    for number, (x, a) in enumerate(zip(byte, start, strict=True), 1):
        display = Display()
        ending = "\n" if number < num_samples else ""
        yield f"--- {number} of {num_samples}\n{shown(bytes(x), a, marked, display)}{display.add(b'', end=True)}{ending}"


def _calibrated(opened: training.Run, drawing: Drawing, rate: float | None) -> Any:
    """The policy of a run at ``rate``, while the context lasts."""
    if rate is None and not drawing.thresholded:
        return nullcontext()
    policy = opened.agent.policy
    check_causal(policy)
    target = opened.settings["target"] if rate is None else rate
    return shifted_logits(policy, opened.offset(target, thresholded=drawing.thresholded))
