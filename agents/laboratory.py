"""A frozen run to measure gradient estimators on: draws of the boundary gradient, and what an update costs.

An estimator is measured as the agent that trains with it, given the run's model and policy. Nothing learns, but for critics and
baselines, which are first fitted to the frozen policy on training bytes.

Letters: N draws of bytes, B rows, P parameters.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from agents import config, training
from agents.agent import Agent
from agents.credit import Truth, true_direction
from agents.data import MAX_SEED, held_out_stream, reference_starts, train_stream
from agents.estimators import policy_loss
from agents.learner import Learner
from agents.timing import updates_in_turns
from segment_env.batch import Batch, Episodes, Samples
from segment_env.boundaries import is_choice
from segment_env.errors import UserError
from segment_env.unroll import Live, unroll

FLIPS, ROUNDS = 32, 16  #: positions of a sequence whose true credit is measured, and draws of all other boundaries for it
PARTS = ("head", "encoder")  #: whose gradients are measured: the policy's own parameters, and what lies below it
#: Of bytes, so that what is compared was drawn apart, and no training run has seen it.
SEEDS = {role: MAX_SEED + 3 + n for n, role in enumerate(("estimator", "truth", "fit", "credit"))}


@dataclass(frozen=True)
class Estimator:
    """One row of the table."""

    name: str
    agent: Agent
    samples: Samples

    @property
    def plays(self) -> tuple:
        """What its rollouts depend on besides bytes and noise: estimators that agree here are measured on the same ones."""
        return self.samples.counts, self.samples.antithetic, self.agent.soft_cap, self.agent.price


@dataclass
class Laboratory:
    """A frozen run, and how much of it is drawn."""

    run: training.Run
    draws: int  #: N, each with two draws of boundaries
    fit_updates: int  #: for what has to be fitted first
    pairs: int  #: of timed updates

    def estimator(self, name: str, overrides: Sequence[str]) -> Estimator:
        """The agent that ``overrides`` make, with the run's policy in it. Raises UserError where it does not fit the run."""
        try:
            settings = config.load(overrides)
            agent = training.make_agent(settings["agent"], self.run.model.width, self.run.agent.policy).to(self.run.device)
            samples = Samples(agent.sample_counts(self.run.train["rows"]), agent.antithetic, self.run.device)
        except UserError as error:
            raise UserError(f"estimator {name!r}: {error}") from error
        if type(agent).direction is Agent.direction:
            raise UserError(f"estimator {name!r}: {type(agent).__name__} learns nothing: there is no gradient to measure")
        agent.eval()
        return Estimator(name, agent, samples)

    def batch(self, samples: Samples, index: int, role: str, noise: int) -> Batch:
        """Held-out bytes by ``index``, for training those of the train split; ``noise`` is the seed of their boundaries."""
        stream = train_stream(self.run.source) if role == "fit" else held_out_stream(self.run.source, "validation")
        batch = Episodes(stream, samples.num_sequences, self.run.length, SEEDS[role]).batch(index)
        return replace(batch, seed=noise).to(self.run.device)

    def rollout(self, estimator: Estimator, batch: Batch) -> tuple[TensorDict, Live]:
        """``batch`` played as the estimator's agent plays it; the graph of the logits reaches the encoder."""
        agent, policy = estimator.agent, self.run.agent.policy
        return unroll(self.run.model, policy, batch, estimator.samples, soft_cap=agent.soft_cap, price=agent.price, encoder_grad=True)

    def gradient(self, estimator: Estimator, rollout: TensorDict, live: Live) -> dict[str, Tensor]:
        """The boundary gradient of a rollout, the mean over choices, by part: [P] each. Raises UserError where there are no logits."""
        if live.logits is None:
            raise UserError(f"{type(self.run.agent.policy).__name__} has no logits: there is no gradient to measure")
        rollout = estimator.agent.prepare(rollout)
        loss = policy_loss(estimator.agent.direction(rollout), live.logits, rollout["is_choice"].sum().clamp(min=1))
        head, body = (list(part.parameters()) if isinstance(part, nn.Module) else [] for part in (self.run.agent.policy, self.run.model))
        found = torch.autograd.grad(loss, head + body, allow_unused=True, retain_graph=True)
        flat = [[each.flatten() for each in part if each is not None] for part in (found[: len(head)], found[len(head) :])]
        return {name: torch.cat(part) for name, part in zip(PARTS, flat, strict=True) if part}

    def gradients(self, estimators: Sequence[Estimator], role: str) -> list[dict[str, Tensor]]:
        """N draws of bytes, two of boundaries each: [N, 2, P] by part, of every estimator.

        Those that play alike share their rollouts, which saves time and pairs what is compared.
        """
        drawn: list[list[dict[str, Tensor]]] = [[] for _ in estimators]
        for alike in _alike(estimators):
            first = estimators[alike[0]]
            for n, noise in ((draw // 2, draw) for draw in range(2 * self.draws)):
                rollout, live = self.rollout(first, self.batch(first.samples, n, role, noise))
                for i in alike:
                    drawn[i].append(self.gradient(estimators[i], rollout, live))
        return [{part: torch.stack([each[part] for each in one]).unflatten(0, (-1, 2)) for part in one[0]} for one in drawn]

    @torch.no_grad()
    def directions(self, estimators: Sequence[Estimator], num_sequences: int) -> list[Tensor]:
        """g of the same held-out sequences, of the first row of each, in N draws of boundaries: [N, S, T] of every estimator."""
        drawn: list[list[Tensor]] = [[] for _ in estimators]
        for alike in _alike(estimators):
            samples = estimators[alike[0]].samples
            rows = (samples.sample == 0).nonzero().squeeze(1)[:num_sequences]
            for noise in range(self.draws):
                rollout, _ = self.rollout(estimators[alike[0]], self.batch(samples, 0, "credit", noise))
                for i in alike:
                    agent = estimators[i].agent
                    drawn[i].append(agent.direction(agent.prepare(rollout))[rows])
        return [torch.stack(one) for one in drawn]

    def truth(self, soft_cap: float | None, gamma: float, num_sequences: int) -> Truth:
        """What single decisions of those sequences are worth, at FLIPS positions of each, drawn evenly.

        Raises UserError where decisions depend on earlier ones, and where a sequence has fewer choices.
        """
        batch = self.batch(Samples([1] * num_sequences, device=self.run.device), 0, "credit", 0)
        choices = is_choice(batch.valid)
        if self.run.agent.policy.n_past or int(choices.sum(1).min()) < FLIPS:
            raise UserError(f"true credit needs n_past=0, and sequences of more than {FLIPS} bytes")
        positions = torch.multinomial(choices.float(), FLIPS, generator=torch.Generator(choices.device).manual_seed(0)).sort(1).values
        known = reference_starts(self.run.source, batch.bytes)
        if known is None:
            raise UserError("the stream knows no true starts to tell credit apart by")
        value, error = true_direction(self.run.model, self.run.agent.policy, batch, positions, gamma, soft_cap, ROUNDS)
        return Truth(positions, value, error, known.gather(1, positions))

    def fit(self, estimator: Estimator) -> None:
        """Fit the estimator's critic or baseline, if it has one, to the frozen policy."""
        agent = estimator.agent
        fitted = [parameter for name in ("critic", "baseline") if (part := getattr(agent, name, None)) for parameter in part.parameters()]
        if not fitted:
            return
        optimiser = torch.optim.Adam(fitted, lr=3e-3)
        for update in range(self.fit_updates):
            with torch.no_grad():
                rollout, live = self.rollout(estimator, self.batch(estimator.samples, update, "fit", update))
            loss, _ = agent.loss(agent.prepare(rollout), live)
            gradients = torch.autograd.grad(loss, fitted)
            for parameter, gradient in zip(fitted, gradients, strict=True):
                parameter.grad = gradient
            optimiser.step()

    def relative_time(self, estimator: Estimator, reference: Estimator) -> float:
        """Median ratio of a whole joint update to the reference's, measured in turns; nothing moves, the learning rate is 0."""
        if estimator is reference:
            return 1.0
        settings = {**self.run.train["optimiser"], "lr": 0.0}
        learners = [
            Learner(self.run.model, each.agent, self.run.train["rows"], 1, **settings, device=self.run.device)
            for each in (estimator, reference)
        ]
        batches = [self.batch(learner.samples, 0, "fit", 0) for learner in learners]
        ratios = [mine / theirs for mine, theirs in updates_in_turns(learners, batches, self.pairs)]
        for each in (estimator, reference):
            each.agent.eval()
        self.run.model.zero_grad(set_to_none=True)
        return median(ratios)


def _alike(estimators: Sequence[Estimator]) -> list[list[int]]:
    """Indices of estimators, those that play alike together."""
    groups: dict[tuple, list[int]] = {}
    for i, each in enumerate(estimators):
        groups.setdefault(each.plays, []).append(i)
    return list(groups.values())
