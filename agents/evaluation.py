"""Held-out figures of a scorer under a policy, of one draw of boundaries or of many.

Letters: S sequences (windows of documents), K draws, B = S K rows, T bytes, N documents.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from agents.data import Source, reference_starts
from agents.windows import Windows
from segment_env.batch import Batch, Samples
from segment_env.metrics import Totals, bits_per_byte
from segment_env.scorer import Policy, Scorer, is_causal, note
from segment_env.unroll import unroll

ESTIMATOR = (
    "of a document logsumexp over the draws of its log-probability, minus log of their number: "
    "in expectation at most the log marginal likelihood, so in bits at least, and nearer with more draws"
)


class Thresholds(Samples):
    """Rows whose noise is 1/2 everywhere: a segment starts where its probability is above."""

    def noise(self, batch: Batch, length: int) -> Tensor:
        """[B, length], all 1/2."""
        return super().noise(batch, length).fill_(0.5)


@dataclass
class Tally:
    """What was counted of documents; all figures but those of :meth:`many_draws` are of the first draw."""

    totals: Totals
    nats: Tensor  #: [N, K] float64: -log p of each document under each draw
    num_bytes: Tensor  #: [N] int64, scored ones
    rates: list[float]  #: of each draw
    reward: float  #: mean of r[t] over bytes, in nats
    decoded: int  #: bytes that went through the decoder: more than were scored, where there is a stride
    tokens: int  #: segments of those, a window's first included
    num_windows: int
    sampled: bool  #: whether boundaries are random variables
    boundaries: str  #: how they were come by
    causal: bool
    seed: int | None

    def figures(self) -> dict[str, Any]:
        """Those of ``Totals.result``, the reward, and how boundaries were come by."""
        said = {"boundaries": self.boundaries, "causal": self.causal, "seed": self.seed}
        return {**self.totals.result(), "reward": self.reward, **said}

    def standard_error(self, nats: Tensor) -> float:
        """Of the bits per byte of ``nats`` [N] over documents, a ratio of sums; nan for a single document."""
        size = self.num_bytes.double()
        count, ratio = len(size), nats.sum() / size.sum()
        scatter = (nats - ratio * size).square().sum() / max(count - 1, 1) * count
        return bits_per_byte(scatter.sqrt(), size.sum()) if count > 1 else math.nan

    def many_draws(self) -> dict[str, Any]:
        """Bits per byte over all draws: their mean, with its standard error over draws, and that of the marginal, over documents."""
        count, total = self.nats.shape[1], int(self.num_bytes.sum())
        of_draws = self.nats.sum(0)
        marginal = math.log(count) - (-self.nats).logsumexp(1)
        return {
            "num_draws": count,
            "bits_per_byte": bits_per_byte(of_draws.mean(), total),
            "standard_error": bits_per_byte(of_draws.std() / math.sqrt(count), total) if count > 1 else math.nan,
            "rate": math.fsum(self.rates) / count,
            "marginal_bits_per_byte": bits_per_byte(marginal.sum(), total),
            "marginal_standard_error": self.standard_error(marginal),
            "marginal": ESTIMATOR,
        }


@torch.no_grad()
def tally(
    scorer: Scorer,
    policy: Policy,
    windows: Iterable[Windows],
    reference: Callable[[Tensor], Tensor | None],
    device: torch.device | str = "cpu",
    price: float = 0.0,
    draws: int = 1,
    thresholded: bool = False,
) -> Tally:
    """Score ``windows`` under K = ``draws`` seeded draws of boundaries, uncapped; the first is the one that a single draw would be.

    ``thresholded``: boundaries are no draw but stand where P(start) > 1/2; ``agents.calibration`` gives an offset of a certain rate.
    The first scored byte of a window begins a segment and is no choice. ``reference`` gives the starts [S, T] that boundaries are
    compared with, or None; ``price`` in nats that a start costs at a choice.
    """
    totals, seed, drawn, sampled = Totals(), None, "", True
    make = Thresholds if thresholded else Samples
    documents, nats, sizes = [], [], []
    cuts, num_windows = torch.zeros(draws, dtype=torch.int64, device=device), 0
    choices = decoded = tokens = torch.zeros_like(cuts[0])
    reward = torch.zeros((), dtype=torch.float64, device=device)
    for window in windows:
        batch, scored, seed = window.batch.to(device), window.scored.to(device), window.batch.seed
        samples = make([draws] * len(scored), device=device)
        rollout, live = unroll(scorer, policy, batch, samples, price=price)
        first = slice(None) if draws == 1 else samples.sample == 0
        starts = rollout["action"].bool()
        begins = scored & (scored.cumsum(1) == 1)
        choice = scored & ~begins
        totals.add(live.nll[first], (starts[first] | begins) & scored, scored, choice, reference(batch.bytes))
        sampled = live.logits is not None and not thresholded
        drawn = "thresholded" if thresholded or (live.logits is None and live.gate is not None) else "sampled, uncapped"

        counts = samples.expand(scored)
        documents.append(window.document)
        nats.append(torch.where(counts, live.nll, 0).double().sum(1).view(-1, draws).cpu())
        sizes.append(scored.sum(1).cpu())
        cuts += (starts & samples.expand(choice)).sum(1).view(-1, draws).sum(0)
        choices = choices + choice.sum()
        reward = reward + torch.where(scored, rollout["next", "reward"].squeeze(-1)[first], 0).double().sum()
        decoded = decoded + batch.valid.sum()
        tokens = tokens + starts[first].sum()
        num_windows += len(scored)
    per_document, per_size = _by_document(torch.cat(documents), torch.cat(nats), torch.cat(sizes))
    return Tally(
        totals,
        per_document,
        per_size,
        (cuts / choices).tolist(),
        float(reward) / int(per_size.sum()),
        int(decoded),
        int(tokens),
        num_windows,
        sampled,
        "; ".join(filter(None, (drawn, note(policy)))),
        is_causal(policy),
        seed,
    )


def evaluate(
    scorer: Scorer,
    policy: Policy,
    batches: Iterable[Batch],
    source: Source,
    device: torch.device | str = "cpu",
    price: float = 0.0,
) -> dict[str, Any]:
    """One seeded draw of boundaries, uncapped: bits per byte, and beside it the achieved rate and how it was come by.

    ``source`` gives the reference starts: whitespace for a corpus, the stream's own truth for a generator. Each byte is scored
    once, the first of a crop included, with a fresh BOS for every crop. See ``Totals.result`` for the figures; ``reward`` is the
    mean of r[t] over bytes, in nats, with ``price`` for every start at a choice; ``causal``: whether the policy is.
    """
    return tally(scorer, policy, map(whole, batches), partial(reference_starts, source), device, price).figures()


def whole(batch: Batch) -> Windows:
    """A batch of which every sequence is a document by itself, and every valid byte counts."""
    return Windows(batch, batch.valid, batch.sequence)


def _by_document(document: Tensor, nats: Tensor, num_bytes: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over the windows of each document: [S], [S, K], [S] -> [N, K], [N]."""
    known, place = document.unique(return_inverse=True)
    sums = nats.new_zeros(len(known), nats.shape[1]).index_add_(0, place, nats)
    return sums, num_bytes.new_zeros(len(known)).index_add_(0, place, num_bytes)
