"""Exact expectations and variances of estimators: sums over all segmentations of short strings, in float64.

A string of T bytes has 2^(T-1) segmentations. All of them are scored by ``unroll``; the rollouts of several rows are assembled
from these, and every one of them goes through the estimator that trains, weighted by its probability. Nothing is sampled.

Letters: N segmentations of a string, J joint segmentations of all rows, B rows, T bytes.
"""

from collections.abc import Callable
from itertools import product

import torch
from tensordict import TensorDict
from torch import Tensor

from agents.estimators import score_function
from agents.policies import WindowPolicy
from segment_env.batch import Samples, pack
from segment_env.closed_form import TableScorer
from segment_env.unroll import unroll

DOCUMENTS = [b"Call me ", b"ab;\xff\x00 cd", b"aaaaaaaa", b"0.1, 2.3"]
PRICE = 1 / 16
EXACT = dict(rtol=0, atol=1e-10)


def random_policy(n_past: int = 0, target: float = 0.35, scale: float = 10.0) -> WindowPolicy:
    policy = WindowPolicy(8, target, n_past).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        policy.weight.copy_(scale * torch.randn(policy.weight.shape, generator=generator, dtype=torch.float64))
    return policy


def segmentations(length: int) -> Tensor:
    """All starts of ``length`` bytes: [2^(length-1), length] bool, True at t = 0."""
    return torch.tensor([(True, *rest) for rest in product([False, True], repeat=length - 1)])


def all_of(counts: list[int]) -> Tensor:
    """Every choice of one out of each of ``counts``: [product of counts, len(counts)]."""
    return torch.cartesian_prod(*map(torch.arange, counts)).view(-1, len(counts))


class Strings:
    """All segmentations of each of some strings, scored: what the rows of a batch are taken from."""

    def __init__(
        self,
        documents: list[bytes],
        byte_noise: float = 1.0,
        soft_cap: float | None = None,
        policy: WindowPolicy | None = None,
        price: float = PRICE,
    ):
        batch = pack(documents)
        counts = [2 ** (len(document) - 1) for document in documents]
        actions = torch.zeros(sum(counts), batch.bytes.shape[1], dtype=torch.bool)
        for document, rows in zip(documents, actions.split(counts), strict=True):
            rows[:, : len(document)] = segmentations(len(document))
        scorer = TableScorer(byte_noise=byte_noise, dtype=torch.float64)
        policy = random_policy() if policy is None else policy
        rollout, live = unroll(scorer, policy, batch, Samples(counts), actions=actions, soft_cap=soft_cap, price=price)
        #: [N, T] of each string, with their graph
        self.logits = live.logits.split(counts)
        #: of each string, its N rollouts [N, T]
        self.rollouts = rollout.split(counts)
        #: [N] probability of each segmentation
        self.probability = [each["action_log_prob"].sum(-1).exp() for each in self.rollouts]

    def joint(self, rows: list[int]) -> tuple[TensorDict, Tensor]:
        """All that can happen to a batch whose row b is string rows[b]: rollouts [J, B, T] and their probabilities [J]."""
        which = all_of([len(self.rollouts[s]) for s in rows])
        return self.rows(self.rollouts, rows, which), self.rows(self.probability, rows, which).prod(1)

    @staticmethod
    def rows(values: list, rows: list[int], which: Tensor):
        """Values of the segmentations which[:, b] of string rows[b]: [J, B, ...]."""
        return torch.stack([values[s][which[:, b]] for b, s in enumerate(rows)], 1)

    def gradient(self, string: int) -> Tensor:
        """[T] gradient of -E[sum_t r_t] in the logits of a string, by autograd of the enumerated expectation."""
        rollout = self.rollouts[string]
        logits = rollout["logits"][0].clone().requires_grad_()
        p = torch.where(rollout["action"].bool(), logits.sigmoid(), 1 - logits.sigmoid())
        p = torch.where(rollout["is_choice"], p, 1.0).prod(-1)
        (-(p * rollout["next", "reward"].sum((1, 2))).sum()).backward()
        return logits.grad

    def surrogate(self, string: int, gamma: float, weight: Tensor | None = None, horizon: int = 99) -> Tensor:
        """[T] E[-(a_t - p_t) sum_{k<horizon} gamma^k weight_{t+k} r_{t+k}] by plain loops: what discounting makes of the gradient."""
        rollout, probability = self.rollouts[string], self.probability[string]
        length = int(rollout["valid"][0].sum())
        p, reward = rollout["logits"].sigmoid(), rollout["next", "reward"].squeeze(-1)
        weight = torch.ones(length, dtype=p.dtype) if weight is None else weight
        expected = torch.zeros_like(p[0])
        for t in range(1, length):
            for k in range(min(length - t, horizon)):
                score = rollout["action"][:, t] - p[:, t]
                expected[t] -= (probability * score * reward[:, t + k]).sum() * gamma**k * weight[t + k]
        return expected


def estimates(rollouts: TensorDict, steps: list, estimator: Callable = score_function) -> Tensor:
    """The estimator of every joint rollout: [J, B, T]. It runs as it is, J batches side by side."""
    read = ["action", "logits", "is_choice", "valid", "sequence", "baseline", "state_value"]
    follows = ["reward", "early_nll", "done", "terminated", "state_value"]
    part: dict = {key: rollouts[key] for key in read if key in rollouts.keys()}
    part["next"] = {key: rollouts["next", key] for key in follows if key in rollouts["next"].keys()}
    part |= {("next", key): value for key, value in part["next"].items()}  # a plain dict knows no nested keys
    return torch.vmap(lambda rollout: estimator(rollout, steps))(part)


def expectation(rollouts: TensorDict, probability: Tensor, steps: list, estimator: Callable = score_function) -> Tensor:
    """[B, T] exact mean of the estimator."""
    return torch.einsum("j,jbt->bt", probability, estimates(rollouts, steps, estimator))


def variance(g: Tensor, probability: Tensor) -> float:
    """Total variance of g [J, ...]: that of all its entries, summed."""
    mean = torch.tensordot(probability, g, 1)
    return float((probability * (g - mean).square().flatten(1).sum(1)).sum())


def cut(*lengths: int) -> list[bytes]:
    return [document[:length] for document, length in zip(DOCUMENTS, lengths, strict=False)]
