"""Held-out figures of a scorer under a policy.

Letters: B rows, T bytes.
"""

from collections.abc import Iterable
from typing import Any

import torch

from agents.data import Source, reference_starts
from segment_env.batch import Batch, Samples
from segment_env.metrics import Totals
from segment_env.scorer import Policy, Scorer, is_causal, note
from segment_env.unroll import unroll


@torch.no_grad()
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
    totals, reward, count, seed, drawn = Totals(), 0.0, 0, None, "sampled, uncapped"
    for batch in batches:
        batch, seed = batch.to(device), batch.seed
        rollout, live = unroll(scorer, policy, batch, Samples([1] * len(batch.bytes), device=device), price=price)
        starts = rollout["action"].bool()
        drawn = "thresholded" if live.logits is None and live.gate is not None else "sampled, uncapped"
        totals.add(live.nll, starts, batch.valid, rollout["is_choice"], reference_starts(source, batch.bytes))
        reward, count = reward + float(rollout["next", "reward"].double().sum()), count + int(batch.valid.sum())
    boundaries = "; ".join(filter(None, (drawn, note(policy))))
    return {**totals.result(), "reward": reward / count, "boundaries": boundaries, "causal": is_causal(policy), "seed": seed}
