"""The joint update: one forward of the byte U-Net trains the language model and, detached, rewards the policy.

Letters: S sequences, B rows, T bytes.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from agents import micro_batches as micro
from agents import ranks
from agents.agent import Agent
from agents.gradient_figures import gradient_norms
from agents.totals import over_ranks, sum_over_ranks
from models.block import Block
from segment_env.batch import Batch, Samples
from segment_env.errors import UserError
from segment_env.unroll import Live, decide_again, unroll

PRECISIONS = ("float32", "bf16")
STATISTICS = ("all", "rank")


class Learner:
    """A scorer, an agent and their optimiser.

    loss = mean nll + early_weight * mean early nll + agent.loss, then one AdamW step with gradients clipped to norm ``clip``. The
    learning rate warms up linearly over the first ``warmup`` of all updates, then falls as a cosine to ``final`` of itself.

    Args: ``model``, a scorer (one without parameters is scored, not trained); ``agent``; ``rows`` B of a batch, of this rank where
    there are several; ``updates``, all that will be made; ``lr`` of the model, the policy's is ``agent.lr_scale`` times that;
    ``precision`` "float32" or "bf16" (autocast; log-probabilities, returns and statistics stay float32); ``micro_batches`` that a
    batch is played in, one after the other, with the gradient of all at once (see ``agents.micro_batches``). Raises UserError where
    samples do not fill the rows, or micro-batches do not divide them, where nothing can learn, or on another precision.

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
        micro_batches: int = 1,
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
        self.parts = micro.parts(self.samples, micro_batches, device)
        self.clip, self.early_weight, self.precision, self.device = clip, early_weight, precision, torch.device(device)
        first, second = betas
        self._adamw = partial(torch.optim.AdamW, lr=lr, betas=(first, second), weight_decay=weight_decay, fused=True)
        self._factor = partial(_schedule, updates=updates, warmup=warmup, final=final)
        self.optimiser, self.schedule = self._optimiser()
        self.skipped_in_a_row, self.most_skipped = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))
        self._joint: nn.Module = Joint(model, agent)
        self._distributed = self._sums_over_ranks = False

    @property
    def num_sequences(self) -> int:
        """S: how many different sequences a batch needs."""
        return self.samples.num_sequences

    def _optimiser(self) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR]:
        """Fresh, of the parameters as they are now."""
        parts = [(list(self.model.parameters()) if isinstance(self.model, nn.Module) else [], 1.0), *self.agent.groups()]
        lr = self._adamw.keywords["lr"]
        groups: list[dict[str, Any]] = [{"params": parameters, "lr": lr * scale} for parameters, scale in parts if parameters]
        if not groups:
            raise UserError("neither the scorer nor the agent has parameters: there is nothing to train")
        optimiser = self._adamw(groups)
        return optimiser, torch.optim.lr_scheduler.LambdaLR(optimiser, self._factor)

    def distribute(self, statistics: str = "all", shard: bool = False) -> None:
        """Learn with all ranks from now on, each from its own batches: gradients are means over ranks, parameters the first rank's.

        With ``statistics`` "all" every mean of a loss, of an advantage and of what controllers are told is one over the rows of
        all ranks, so that they learn what one process with all rows would; with "rank" over a rank's own rows, as plain data
        parallelism has it, and controllers follow the first rank. Every rank must call it, before the first update.

        With ``shard`` each rank keeps a share of parameters, gradients and moments alone (FSDP2), block by block. What reads the
        model must then be done on all ranks: the training program, whose first rank validates and writes, does not use it. Raises
        UserError on another word, and on shards with micro-batches or with a loss of TorchRL.
        """
        if statistics not in STATISTICS:
            raise UserError(f"statistics must be one of {', '.join(STATISTICS)}, got {statistics!r}")
        self._distributed, self._sums_over_ranks = True, statistics == "all"
        if not shard:
            self._joint = ranks.data_parallel(self._joint)
            return
        if len(self.parts) > 1:
            raise UserError("sharded parameters are put together for one pass: they go without micro-batches")
        try:
            ranks.shard(self._joint, [module for module in self._joint.modules() if isinstance(module, Block)])
        except TypeError as error:  # TorchRL's losses list their parameters in a way of their own
            raise UserError(f"the parameters of {type(self.agent).__name__} cannot be sharded: {error}") from error
        self.optimiser, self.schedule = self._optimiser()  # the parameters are others now

    def loss(self, batch: Batch, samples: Samples | None = None) -> tuple[Tensor, dict[str, Tensor], TensorDictBase]:
        """Unroll ``batch`` of S sequences: -> the joint loss with its graph, metrics (detached scalars, in nats), and the rollout.

        ``samples`` of its sequences, where they are not those of a whole batch.
        """
        batch = batch.to(self.device)
        rollout, live = self._play(batch, samples or self.samples)
        nll, count, early_nll, read, starts, choices = sum_over_ranks(*_sums(batch, rollout, live))
        nll, early_nll = nll / count.clamp(min=1), early_nll / read.clamp(min=1)
        rollout = self.agent.prepare(rollout)
        decide, metrics = self.agent.loss(rollout, live)
        metrics |= {"price": self._price(), "nll": nll.detach(), "early_nll": early_nll.detach(), "rate": starts / choices}
        return nll + self.early_weight * early_nll + decide, metrics, rollout

    def _loss_in_parts(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor], TensorDictBase]:
        """As :meth:`loss`, with the gradients of all micro-batches but the last taken already: see ``agents.micro_batches``."""
        batch, rollouts, sums = batch.to(self.device), [], []
        count, read = sum_over_ranks(self.samples.expand(batch.valid).sum(), batch.valid.sum())
        for part in self.parts:
            some = micro.of(batch, part)
            rollout, live = self._play(some, part.samples)
            nll, _, early_nll, _, starts, choices = sum_over_ranks(*_sums(some, rollout, live))
            loss = nll / count.clamp(min=1) + self.early_weight * early_nll / read.clamp(min=1)
            rollouts.append(rollout)
            sums.append(torch.stack([each.detach().to(loss.dtype) for each in (nll, early_nll, starts, choices)]))
            if part is not self.parts[-1]:
                _backward(loss)
        rollout = self.agent.prepare(torch.cat(rollouts))
        leaves = micro.wanted(rollout, live)
        decide, metrics = self.agent.loss(rollout, leaves)
        _backward(decide)
        for part in self.parts[:-1]:
            _backward(micro.carry(self._decide_again(micro.of(batch, part), part, rollout), leaves, part.rows))
        loss = loss + micro.carry((live.logits, live.gate), leaves, self.parts[-1].rows)
        nll, early_nll, starts, choices = torch.stack(sums).sum(0)
        nll, early_nll = nll / count.clamp(min=1), early_nll / read.clamp(min=1)
        metrics |= {"price": self._price(), "nll": nll, "early_nll": early_nll, "rate": starts / choices}
        value = nll + self.early_weight * early_nll + decide.detach()
        return loss + (value - loss.detach()), metrics, rollout

    def update(self, batch: Batch) -> dict[str, Tensor]:
        """Learn from ``batch``: -> metrics, on the device, so that nothing waits for them; ``skipped`` is 1 where a step was.

        One optimiser step of model and agent, then the agent's further epochs on the same rollout, if it makes any: the model
        has no gradient in them and stays.
        """
        self.agent.train()
        with over_ranks(self._sums_over_ranks):
            before = self._buffers()
            self.optimiser.zero_grad()
            loss, metrics, rollout = self._joint(self.loss if len(self.parts) == 1 else self._loss_in_parts, batch)
            norms, skipped = self._step(loss, before, torch.zeros((), device=self.device))
            for _ in range(self.agent.epochs - 1):
                before = self._buffers()
                self.optimiser.zero_grad()
                loss, later = self._joint(self.agent.loss, rollout, None)
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
        loss.backward()
        parameters = (parameter for group in self.optimiser.param_groups for parameter in group["params"])
        norms = gradient_norms(self.model, self.agent.policy) | {"grad_norm": nn.utils.clip_grad_norm_(parameters, self.clip)}
        norms = {name: ranks.whole(norm) for name, norm in norms.items()}
        norm = norms["grad_norm"]
        finite = loss.detach().isfinite() & norm.isfinite()
        skipped = torch.maximum(skipped, (~finite).float())
        if self._distributed:
            skipped = ranks.anywhere(skipped)  # a loss of a rank's own may be no number where the sum of gradients is one
        self.optimiser.found_inf = skipped  # type: ignore[attr-defined]
        self.optimiser.step()
        for name, buffer in self._modules_buffers():
            buffer.copy_(torch.where(skipped > 0, before[name], buffer))
        return norms, skipped

    def _play(self, batch: Batch, samples: Samples) -> tuple[TensorDictBase, Live]:
        agent = self.agent
        with self._autocast():
            return unroll(
                self.model,
                agent.policy,
                batch,
                samples,
                soft_cap=agent.soft_cap,
                price=agent.price + agent.rate.price,
                encoder_grad=agent.encoder_grad,
            )

    def _decide_again(self, batch: Batch, part: micro.Part, rollout: TensorDictBase) -> tuple[Tensor | None, Tensor | None]:
        agent, actions = self.agent, rollout["action"][part.rows].bool()
        with self._autocast():
            return decide_again(
                self.model, agent.policy, batch, part.samples, actions, soft_cap=agent.soft_cap, encoder_grad=agent.encoder_grad
            )

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16")

    def _price(self) -> Tensor:
        """As it is now: it may move before it is logged."""
        return self.agent.price + self.agent.rate.price.detach().clone()

    def _buffers(self) -> dict[str, Tensor]:
        return {name: buffer.clone() for name, buffer in self._modules_buffers()}

    def _modules_buffers(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.agent.named_buffers("agent")
        if isinstance(self.model, nn.Module):
            yield from self.model.named_buffers("model")


class Joint(nn.Module):
    """All parts of an update that have parameters, as one module: data parallelism acts where a module is called.

    It is called once a step, with the function that computes the loss, and is nothing more.
    """

    def __init__(self, *parts: Any):
        super().__init__()
        self.parts = nn.ModuleList(part for part in parts if isinstance(part, nn.Module))

    def forward(self, loss: Callable, *arguments: Any) -> Any:
        """What ``loss`` says of ``arguments``."""
        return loss(*arguments)


def _sums(batch: Batch, rollout: TensorDictBase, live: Live) -> tuple[Tensor, ...]:
    """Of nll, bytes decoded, early nll, bytes read, starts among choices, and choices."""
    choice = rollout["is_choice"]
    starts = (rollout["action"].bool() & choice).sum()
    return live.nll.sum(), rollout["valid"].sum(), live.early_nll.sum(), batch.valid.sum(), starts, choice.sum()


def _backward(loss: Tensor) -> None:
    if loss.requires_grad:
        loss.backward()


def _schedule(update: int, updates: int, warmup: float, final: float) -> float:
    """Factor of the learning rate at an update, counted from 0."""
    begin = max(1, round(warmup * updates))
    if update < begin:
        return (update + 1) / begin
    progress = min(1.0, (update - begin) / max(1, updates - begin))
    return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2
