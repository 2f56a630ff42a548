"""A run as a model of EleutherAI's evaluation harness, registered as ``segment-env``. Needs lm-eval.

Bytes are scored as they are, the UTF-8 of the harness' strings, so nothing depends on where a context ends. All requests are played
with the boundary noise of one and the same sequence: continuations of one context are compared under the same boundaries as long as
they are the same bytes, and no result depends on the batch that it was computed in.

Letters: B rows, T bytes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from torch import Tensor

from agents.calibration import shifted_logits
from agents.evaluation import Thresholds
from agents.generation import generate
from agents.training import Run, open_run
from segment_env.batch import Samples, pack
from segment_env.errors import UserError
from segment_env.scorer import Scorer, note
from segment_env.unroll import unroll

MAX_GENERATED = 256  #: bytes, where a task does not say
_KNOWN = {"until", "max_gen_toks", "do_sample", "temperature", "top_p"}  #: what a task may ask of generation


class Piece(NamedTuple):
    """One crop of one request."""

    request: int
    number: int  #: of the crop among those of the request: it fixes the noise
    data: bytes
    context: int  #: bytes at its beginning that are not scored


def pieces(request: int, context: bytes, continuation: bytes, length: int) -> Iterator[Piece]:
    """The crops in which every byte of ``continuation`` is scored once; none of an empty one.

    ``context`` loses its beginning where both do not fit into ``length`` bytes. A continuation that leaves it no room is scored in
    crops that do not overlap, each with a fresh BOS, as documents are.

    >>> [(piece.data, piece.context) for piece in pieces(0, b"Call me ", b"Ishmael", 10)]
    [(b'me Ishmael', 3)]
    >>> [(piece.data, piece.context) for piece in pieces(0, b"Call me ", b"Ishmael", 4)]
    [(b'Ishm', 0), (b'ael', 0)]
    """
    if 0 < len(continuation) < length:
        data = (context + continuation)[-length:]
        yield Piece(request, 0, data, len(data) - len(continuation))
        return
    for number, begin in enumerate(range(0, len(continuation), length)):
        yield Piece(request, number, continuation[begin : begin + length], 0)


@register_model("segment-env")
class SegmentLM(LM):
    """Log-likelihoods and greedy text of a run, in nats and bytes.

    Args: ``run``, a :class:`agents.training.Run` or the folder of one or of a checkpoint; ``batch_size`` B (default: the rows that
    the run trained with); ``seed`` of the boundary noise; ``thresholded``: boundaries are no draw but stand where P(start) > 1/2;
    ``rate``: one offset of all logits, calibrated on validation bytes, gives it (thresholded: by default the run's target). What else
    the harness hands over is not needed. Raises UserError on a run that cannot be opened or calibrated, or whose model has no ``log_p``.
    """

    def __init__(
        self,
        run: Run | str | Path,
        batch_size: int | str | None = None,
        seed: int = 0,
        thresholded: bool = False,
        rate: float | None = None,
        **_: Any,
    ):
        super().__init__()
        self.run = run if isinstance(run, Run) else open_run(Path(run))
        self.run.agent.eval()
        self.policy: Any = self.run.agent.policy
        if not hasattr(self.run.model, "log_p"):
            raise UserError(f"{type(self.run.model).__name__} gives no probabilities of all bytes (log_p): tasks need a byte U-Net")
        self.batch_size = self.run.train["rows"] if batch_size is None or batch_size == "auto" else int(batch_size)
        self.seed, self.thresholded = seed, thresholded
        target = self.run.settings.get("target") if thresholded and rate is None else rate
        self.offset = None if target is None else self.run.offset(target, seed, thresholded)
        self._starts, self._choices = 0, 0

    @property
    def figures(self) -> dict[str, Any]:
        """How boundaries were come by, and the rate in starts per choice over all that was scored so far; None of nothing."""
        drawn = "thresholded" if self.thresholded else "sampled, uncapped"
        calibrated = None if self.offset is None else f"offset {self.offset:.4f} of the logits, calibrated on validation bytes"
        said = "; ".join(filter(None, (drawn, calibrated, note(self.policy))))
        return {"rate": self._starts / self._choices if self._choices else None, "boundaries": said, "seed": self.seed}

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Of each (context, continuation): log p(continuation | context), and whether each of its bytes is the likeliest."""
        return self.score([(_bytes(context), _bytes(continuation)) for context, continuation in (each.args[:2] for each in requests)])

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of each text, in crops that do not overlap, each with a fresh BOS: every byte is scored once."""
        return [log_p for log_p, _ in self.score([(b"", _bytes(request.args[0])) for request in requests])]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """What follows each context up to the first of ``until``, which is left out, or ``max_gen_toks`` bytes.

        The likeliest byte each time, unless ``do_sample`` or a ``temperature`` asks for draws. A context keeps its last bytes, as many
        as a crop has. Raises UserError on a setting of generation that is not known.
        """
        found: dict[int, str] = {}
        settings = [_settings(request.args[1]) for request in requests]
        order = sorted(range(len(requests)), key=lambda i: (settings[i][:3], len(requests[i].args[0])))
        for rows in _groups(order, self.batch_size, lambda i: settings[i][:3]):
            num_bytes, temperature, top_p, _ = settings[rows[0]]
            prompts = [_bytes(requests[i].args[0])[-self.run.length :] for i in rows]
            untils = [settings[i].until for i in rows]
            with self._calibrated():
                texts = generate(
                    self.run.model,
                    self.policy,
                    prompts,
                    num_bytes,
                    temperature=temperature,
                    top_p=top_p,
                    seed=self.seed,
                    thresholded=self.thresholded,
                    rows=rows,
                    stop=lambda row, text, untils=untils: text.endswith(untils[row]),  # type: ignore[misc]
                )
            for i, text, until in zip(rows, texts, untils, strict=True):
                found[i] = _ended(text.data[text.prompt_length :], until).decode("utf-8", "replace")
        return [found[i] for i in range(len(requests))]

    @torch.no_grad()
    def score(self, pairs: Sequence[tuple[bytes, bytes]]) -> list[tuple[float, bool]]:
        """Of each context and continuation the log-probability, and whether it is greedy: (0, True) of an empty continuation."""
        log_p, greedy = [0.0] * len(pairs), [True] * len(pairs)
        crops = (piece for i, pair in enumerate(pairs) for piece in pieces(i, *pair, self.run.length))
        ordered = sorted(crops, key=lambda piece: -len(piece.data))  # rows of like length together
        for first in range(0, len(ordered), self.batch_size):
            batch = ordered[first : first + self.batch_size]
            for piece, nats, likeliest in zip(batch, *self._score_batch(batch), strict=True):
                log_p[piece.request] -= nats
                greedy[piece.request] &= likeliest
        return list(zip(log_p, greedy, strict=True))

    def _score_batch(self, batch: Sequence[Piece]) -> tuple[list[float], list[bool]]:
        """Nats of what is scored of each piece, and whether each of those bytes is the likeliest."""
        packed = pack([piece.data for piece in batch], self.seed)
        packed = replace(packed, sequence=torch.tensor([piece.number for piece in batch])).to(self.run.device)
        scorer = _Likeliest(self.run.model)
        samples = (Thresholds if self.thresholded else Samples)([1] * len(batch), device=self.run.device)
        with self._calibrated():
            rollout, live = unroll(scorer, self.policy, packed, samples)
        context = torch.tensor([piece.context for piece in batch], device=self.run.device)
        scored = packed.valid & (torch.arange(packed.valid.shape[1], device=self.run.device) >= context[:, None])
        choice = rollout["is_choice"]
        self._starts += int((rollout["action"].bool() & choice).sum())
        self._choices += int(choice.sum())
        nats = torch.where(scored, live.nll, 0).double().sum(1)
        return nats.tolist(), (scorer.likeliest | ~scored).all(1).tolist()

    def _calibrated(self) -> Any:
        return nullcontext() if self.offset is None else shifted_logits(self.policy, self.offset)


class _Likeliest:
    """A scorer that notes, when it scores bytes, which of them are the likeliest."""

    likeliest: Tensor  # [B, T] bool

    def __init__(self, scorer: Scorer):
        self._scorer = scorer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scorer, name)

    def nll(self, h: Tensor, starts: Tensor, x: Tensor, gate: Tensor | None = None) -> Tensor:
        log_p = self._scorer.log_p(h, starts, gate)  # type: ignore[attr-defined]
        self.likeliest = log_p.argmax(-1) == x
        return -log_p.gather(-1, x[..., None]).squeeze(-1)


class _Settings(NamedTuple):
    num_bytes: int
    temperature: float
    top_p: float
    until: tuple[bytes, ...]


def _settings(asked: dict[str, Any]) -> _Settings:
    if unknown := asked.keys() - _KNOWN:
        raise UserError(f"generation has no setting {', '.join(sorted(unknown))}; a task may give {', '.join(sorted(_KNOWN))}")
    until = asked.get("until") or []
    samples = asked.get("do_sample", asked.get("temperature", 0.0) > 0)
    temperature = float(asked.get("temperature", 1.0)) if samples else 0.0
    ends = tuple(_bytes(each) for each in ([until] if isinstance(until, str) else until) if each)
    return _Settings(int(asked.get("max_gen_toks", MAX_GENERATED)), temperature, float(asked.get("top_p", 1.0)), ends)


def _ended(text: bytes, until: Sequence[bytes]) -> bytes:
    """``text`` up to the first of ``until``."""
    return text[: min((place for each in until if (place := text.find(each)) >= 0), default=len(text))]


def _groups(order: Sequence[int], size: int, key: Callable[[int], Any]) -> Iterator[list[int]]:
    """Neighbours of ``order`` with one ``key``, at most ``size`` together."""
    group: list[int] = []
    for i in order:
        if group and (len(group) == size or key(group[0]) != key(i)):
            yield group
            group = []
        group.append(i)
    if group:
        yield group


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


if __name__ == "__main__":  # the harness' own command line, which then knows this model
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
