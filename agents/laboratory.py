"""A frozen run to measure gradient estimators on: draws of the boundary gradient, and what an update costs.

An estimator is measured as the agent that trains with it, given the run's model and policy. Nothing learns, but for critics and
baselines, which are first fitted to the frozen policy on training bytes.

Letters: N draws of bytes, B rows, P parameters.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn

from agents import config, training
from agents.agent import Agent
from agents.data import MAX_SEED, held_out_stream, train_stream
from agents.estimators import policy_loss
from agents.learner import Learner
from agents.timing import interleaved, stopwatch
from segment_env.batch import Batch, Episodes, Samples
from segment_env.errors import UserError
from segment_env.unroll import unroll

PARTS = ("head", "encoder")  #: whose gradients are measured: the policy's own parameters, and what lies below it
#: Of bytes, so that what is compared was drawn apart, and no training run has seen it.
SEEDS = {role: MAX_SEED + 3 + n for n, role in enumerate(("estimator", "truth", "objective", "fit"))}


@dataclass(frozen=True)
class Estimator:
    """One row of the table."""

    name: str
    agent: Agent
    samples: Samples


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

    def gradient(self, estimator: Estimator, batch: Batch) -> dict[str, Tensor]:
        """One draw of the boundary gradient, the mean over choices, by part: [P] each."""
        agent, model = estimator.agent, self.run.model
        rollout, live = unroll(model, agent.policy, batch, estimator.samples, soft_cap=agent.soft_cap, price=agent.price, encoder_grad=True)
        if live.logits is None:
            raise UserError(f"{type(agent.policy).__name__} has no logits: there is no gradient to measure")
        rollout = agent.prepare(rollout)
        loss = policy_loss(agent.direction(rollout), live.logits, rollout["is_choice"].sum().clamp(min=1))
        head, body = (list(part.parameters()) if isinstance(part, nn.Module) else [] for part in (agent.policy, model))
        found = torch.autograd.grad(loss, head + body, allow_unused=True)
        flat = [[each.flatten() for each in part if each is not None] for part in (found[: len(head)], found[len(head) :])]
        return {name: torch.cat(part) for name, part in zip(PARTS, flat, strict=True) if part}

    def gradients(self, estimator: Estimator, role: str) -> dict[str, Tensor]:
        """N draws of bytes, two of boundaries each: [N, 2, P] by part."""
        drawn = [
            [self.gradient(estimator, self.batch(estimator.samples, n, role, 2 * n + twin)) for twin in range(2)] for n in range(self.draws)
        ]
        return {part: torch.stack([torch.stack([each[part] for each in twins]) for twins in drawn]) for part in drawn[0][0]}

    def fit(self, estimator: Estimator) -> None:
        """Fit the estimator's critic or baseline, if it has one, to the frozen policy."""
        agent = estimator.agent
        fitted = [parameter for name in ("critic", "baseline") if (part := getattr(agent, name, None)) for parameter in part.parameters()]
        if not fitted:
            return
        optimiser = torch.optim.Adam(fitted, lr=3e-3)
        for update in range(self.fit_updates):
            with torch.no_grad():
                rollout, live = unroll(
                    self.run.model,
                    agent.policy,
                    self.batch(estimator.samples, update, "fit", update),
                    estimator.samples,
                    soft_cap=agent.soft_cap,
                    price=agent.price,
                )
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
        learners = [Learner(self.run.model, each.agent, self.run.train["rows"], 1, **settings) for each in (estimator, reference)]
        batches = [self.batch(learner.samples, 0, "fit", 0) for learner in learners]
        first, second = (
            stopwatch(partial(learner.update, batch), self.run.device) for learner, batch in zip(learners, batches, strict=True)
        )
        ratios = [mine / theirs for mine, theirs in interleaved(first, second, self.pairs)]
        for each in (estimator, reference):
            each.agent.eval()
        self.run.model.zero_grad(set_to_none=True)
        return median(ratios)
