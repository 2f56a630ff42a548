"""The joint update: one forward of the byte U-Net trains the language model and, detached, rewards the policy.

Letters: S sequences, B rows, T bytes.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from agents.agent import Agent
from agents.gradient_figures import gradient_norms
from segment_env.batch import Batch, Samples
from segment_env.errors import UserError
from segment_env.metrics import rate
from segment_env.unroll import unroll

PRECISIONS = ("float32", "bf16")


class Learner:
    """A scorer, an agent and their optimiser.

    loss = mean nll + early_weight * mean early nll + agent.loss, then one AdamW step with gradients clipped to norm ``clip``. The
    learning rate warms up linearly over the first ``warmup`` of all updates, then falls as a cosine to ``final`` of itself.

    Args: ``model``, a scorer (one without parameters is scored, not trained); ``agent``; ``rows`` B of a batch; ``updates``, all
    that will be made; ``lr`` of the model, the policy's is ``agent.lr_scale`` times that; ``precision`` "float32" or "bf16"
    (autocast; log-probabilities, returns and statistics stay float32). Raises UserError where samples do not fill the rows,
    where nothing can learn, or on another precision.

    An optimiser step whose loss or gradient norm is not finite is skipped, with what remains of its update: parameters, moments and
    buffers, those of rate controllers and losses among them, stay as they were to the bit. Data and learning rate go on. All of
    this is decided on the device; ``skipped_in_a_row`` and ``most_skipped`` in a row (scalars there) are for the caller to read.
    """

    def __init__(
        self,
        model: Any,
        agent: Agent,
        rows: int,
        updates: int,
        *,
        lr: float = 3e-3,
        warmup: float = 0.05,
        final: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        clip: float = 1.0,
        early_weight: float = 0.1,
        precision: str = "float32",
        device: torch.device | str = "cpu",
    ):
        if precision not in PRECISIONS:
            raise UserError(f"no precision {precision!r}; use one of {', '.join(PRECISIONS)}")
        if not (lr >= 0 and clip > 0 and early_weight >= 0 and 0 <= warmup <= 1 and 0 <= final <= 1):
            got = f"got lr={lr}, clip={clip}, early_weight={early_weight}, warmup={warmup}, final={final}"
            raise UserError(f"lr and early_weight must not be negative, clip must be positive, warmup and final lie in [0, 1]; {got}")
        self.model, self.agent = model, agent.to(device)
        if isinstance(model, nn.Module):
            model.to(device)
        self.samples = Samples(agent.sample_counts(rows), agent.antithetic, device)
        self.clip, self.early_weight, self.precision, self.device = clip, early_weight, precision, torch.device(device)
        parts = [(list(model.parameters()) if isinstance(model, nn.Module) else [], 1.0), *agent.groups()]
        groups: list[dict[str, Any]] = [{"params": parameters, "lr": lr * scale} for parameters, scale in parts if parameters]
        if not groups:
            raise UserError("neither the scorer nor the agent has parameters: there is nothing to train")
        first, second = betas
        self.optimiser = torch.optim.AdamW(groups, lr=lr, betas=(first, second), weight_decay=weight_decay, fused=True)
        self.skipped_in_a_row, self.most_skipped = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimiser, lambda n: _schedule(n, updates, warmup, final))

    @property
    def num_sequences(self) -> int:
        """S: how many different sequences a batch needs."""
        return self.samples.num_sequences

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor], TensorDictBase]:
        """Unroll ``batch`` of S sequences: -> the joint loss with its graph, metrics (detached scalars, in nats), and the rollout."""
        agent, batch = self.agent, batch.to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            rollout, live = unroll(
                self.model,
                agent.policy,
                batch,
                self.samples,
                soft_cap=agent.soft_cap,
                price=agent.price + agent.rate.price,
                encoder_grad=agent.encoder_grad,
            )
        nll = live.nll.sum() / rollout["valid"].sum().clamp(min=1)
        early_nll = live.early_nll.sum() / batch.valid.sum().clamp(min=1)
        rollout = agent.prepare(rollout)
        decide, metrics = agent.loss(rollout, live)
        metrics["price"] = agent.price + agent.rate.price.detach().clone()  # it may move before it is logged
        metrics |= {"nll": nll.detach(), "early_nll": early_nll.detach(), "rate": rate(rollout["action"], rollout["is_choice"])}
        return nll + self.early_weight * early_nll + decide, metrics, rollout

    def update(self, batch: Batch) -> dict[str, Tensor]:
        """Learn from ``batch``: -> metrics, on the device, so that nothing waits for them; ``skipped`` is 1 where a step was.

        One optimiser step of model and agent, then the agent's further epochs on the same rollout, if it makes any: the model
        has no gradient in them and stays.
        """
        self.agent.train()
        before = self._buffers()
        loss, metrics, rollout = self.loss(batch)
        norms, skipped = self._step(loss, before, torch.zeros((), device=self.device))
        for _ in range(self.agent.epochs - 1):
            before = self._buffers()
            loss, later = self.agent.loss(rollout, None)
            _, skipped = self._step(loss, before, skipped)
            metrics |= later
        self.schedule.step()
        self.skipped_in_a_row.add_(1).mul_(skipped.long())
        self.most_skipped.copy_(torch.maximum(self.most_skipped, self.skipped_in_a_row))
        return metrics | norms | {"skipped": skipped}

    def _step(self, loss: Tensor, before: dict[str, Tensor], skipped: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """One optimiser step, unless ``skipped`` is 1: -> norms before clipping, ``grad_norm`` that of all gradients, and 1 where it
        was not made.

        In that case buffers are set to what they were ``before`` the loss. The flag is what a gradient scaler would give the fused
        optimiser as ``found_inf``: its kernels read it, so that the host need not.
        """
        self.optimiser.zero_grad()
        loss.backward()
        parameters = (parameter for group in self.optimiser.param_groups for parameter in group["params"])
        norms = gradient_norms(self.model, self.agent.policy)
        norms["grad_norm"] = norm = nn.utils.clip_grad_norm_(parameters, self.clip)
        finite = loss.detach().isfinite() & norm.isfinite()
        skipped = torch.maximum(skipped, (~finite).float())
        self.optimiser.found_inf = skipped  # type: ignore[attr-defined]
        self.optimiser.step()
        for name, buffer in self._modules_buffers():
            buffer.copy_(torch.where(skipped > 0, before[name], buffer))
        return norms, skipped

    def _buffers(self) -> dict[str, Tensor]:
        return {name: buffer.clone() for name, buffer in self._modules_buffers()}

    def _modules_buffers(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.agent.named_buffers("agent")
        if isinstance(self.model, nn.Module):
            yield from self.model.named_buffers("model")


def _schedule(update: int, updates: int, warmup: float, final: float) -> float:
    """Factor of the learning rate at an update, counted from 0."""
    begin = max(1, round(warmup * updates))
    if update < begin:
        return (update + 1) / begin
    progress = min(1.0, (update - begin) / max(1, updates - begin))
    return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2
