"""A whole trajectory in one parallel pass: one encoding, one decision for all positions, one decoding.

Letters: S sequences, K boundary samples of a sequence, B rows = sum of K, T bytes, D width.
"""

from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn import functional as F

from segment_env.batch import Batch, Samples
from segment_env.boundaries import BOS, effective, effective_gate, is_choice, recent_starts, since_start
from segment_env.scorer import Decision, Observation, Policy, Scorer, check_gate, is_causal


class Live(NamedTuple):
    """The tensors of an unrolled batch that carry the graph."""

    nll: Tensor  #: [B, T] nats, 0 in padding
    early_nll: Tensor  #: [S, T] nats, 0 in padding
    h: Tensor  #: [S, T+1, D]
    logits: Tensor | None  #: [B, T], after the soft cap if there was one; None where the actions are no random variables
    gate: Tensor | None = None  #: [B, T], 1 at t = 0 and 0 in padding; None where the policy gives none


def unroll(
    scorer: Scorer,
    policy: Policy,
    batch: Batch,
    samples: Samples,
    *,
    actions: Tensor | None = None,
    soft_cap: float | None = None,
    price: float | Tensor = 0.0,
    encoder_grad: bool = False,
) -> tuple[TensorDict, Live]:
    """Play ``batch`` with ``policy`` and score it.

    The joint update needs nothing more: the nll whose graph trains the language model is, detached, the reward.

    Args: ``samples`` says how many rows each sequence has; ``actions`` [B, T], replayed instead of sampled; ``soft_cap`` of the
    policy's logits; ``price`` in nats that a start costs at a choice; ``encoder_grad`` lets the gradient of the logits, and of the
    gate, reach h.

    Returns: the rollout, a detached tensordict [B, T] with the keys that ``SegmentEnv.rollout`` gives (see ``segment_env.env``);
    and its :class:`Live` tensors. Where ``valid`` is False the reward is 0 and ``done`` True. Raises ValueError where the batch,
    the samples and the actions are not of one size; UserError where the policy's gate and the scorer do not go together.
    """
    _check_sizes(batch, samples, actions)
    check_gate(scorer, policy)
    x, valid = samples.expand(batch.bytes), samples.expand(batch.valid)
    choice = is_choice(valid)
    h = scorer.encode(batch.bytes)
    early_log_p = scorer.early_log_p(h[:, :-1])
    early_nll = _masked(-early_log_p.gather(-1, batch.bytes[..., None]).squeeze(-1), batch.valid)
    rows = samples.expand(h)
    noise = samples.noise(batch, x.shape[1] + 1)

    seen = rows if encoder_grad else rows.detach()
    replayed = None if actions is None else effective(actions, choice, valid)
    read = samples.expand(early_log_p.detach()) if policy.reads_early_log_p else None
    del early_log_p  # S x T x 256: without a graph its memory is free for the decoder
    decision = decide(policy, seen[:, :-1], x, noise[:, :-1], read, valid, soft_cap, replayed)
    starts = effective(decision.action, choice, valid) if replayed is None else replayed
    gate = None if decision.gate is None else effective_gate(decision.gate, choice, valid)

    nll = _masked(scorer.nll(rows[:, :-1], starts, x, gate), valid)
    logits = None if decision.logits is None else _masked(decision.logits, choice)
    live = Live(nll, early_nll, h, logits, gate)
    return _rollout(live, rows, x, valid, starts, noise, batch, samples, policy.n_past, price), live


def decide_again(
    scorer: Scorer,
    policy: Policy,
    batch: Batch,
    samples: Samples,
    actions: Tensor,
    *,
    soft_cap: float | None = None,
    encoder_grad: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    """Logits and gate [B, T] of :func:`unroll` under its ``actions`` once more, with their graph: one encoding, and no decoder.

    With ``encoder_grad`` the graph reaches the encoder, else the policy alone.
    """
    x, valid = samples.expand(batch.bytes), samples.expand(batch.valid)
    choice = is_choice(valid)
    with torch.set_grad_enabled(encoder_grad and torch.is_grad_enabled()):
        h = scorer.encode(batch.bytes)
    read = samples.expand(scorer.early_log_p(h[:, :-1]).detach()) if policy.reads_early_log_p else None
    noise, replayed = samples.noise(batch, x.shape[1] + 1), effective(actions, choice, valid)
    decision = decide(policy, samples.expand(h)[:, :-1], x, noise[:, :-1], read, valid, soft_cap, replayed)
    logits = None if decision.logits is None else _masked(decision.logits, choice)
    return logits, None if decision.gate is None else effective_gate(decision.gate, choice, valid)


def _check_sizes(batch: Batch, samples: Samples, actions: Tensor | None) -> None:
    sequences, length = batch.bytes.shape
    if samples.num_sequences != sequences:
        raise ValueError(f"samples are given for {samples.num_sequences} sequences, but the batch has {sequences}")
    if actions is not None and actions.shape != (samples.num_rows, length):
        raise ValueError(f"actions must have shape [B, T] = {[samples.num_rows, length]}, got {list(actions.shape)}")


def _masked(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, 0.0)


def decide(
    policy: Policy,
    h: Tensor,
    x: Tensor,
    noise: Tensor,
    early_log_p: Tensor | None,
    valid: Tensor,
    soft_cap: float | None = None,
    actions: Tensor | None = None,
) -> Decision:
    """The decisions of ``policy`` at all positions, in parallel where it has that form, else one after the other.

    Args: as those of ``Policy.parallel``, and ``valid`` [B, T]. What the policy answers where there is no choice is left as it is.
    """
    if hasattr(policy, "parallel"):
        more: dict[str, Any] = {} if is_causal(policy) else {"valid": valid}
        return policy.parallel(h, x, noise, early_log_p, soft_cap=soft_cap, actions=actions, **more)
    state, before = policy.init(len(x)), F.pad(x, (1, 0), value=BOS)
    starts, since = torch.zeros_like(x, dtype=torch.bool), torch.zeros_like(x[:, 0])
    padded = F.pad(starts, (policy.n_past, 0))  # starts, with room for the decisions before the sequence
    decisions = []
    for t in range(x.shape[1]):
        recent = padded[:, t : t + policy.n_past].flip(-1).long() if policy.n_past else None
        early_t = None if early_log_p is None else early_log_p[:, t]
        state, decision = policy.step(state, Observation(h[:, t], before[:, t], since, recent, noise[:, t], early_t), soft_cap=soft_cap)
        taken = decision.action if actions is None else actions[:, t]
        choice = valid[:, t] if t else torch.zeros_like(valid[:, t])
        padded[:, policy.n_past + t] = effective(taken, choice, valid[:, t])
        since = torch.where(padded[:, policy.n_past + t], 1, since + 1)
        decisions.append(decision)
    logits, gates = ([getattr(decision, name) for decision in decisions] for name in ("logits", "gate"))
    stacked = (None if values[0] is None else torch.stack(values, 1) for values in (logits, gates))
    return Decision(padded[:, policy.n_past :], *stacked)


def action_log_prob(logits: Tensor, action: Tensor) -> Tensor:
    """log P(action) of a Bernoulli decision: logits [...] and action [...] (bool or 0/1) -> [...]."""
    return F.logsigmoid(torch.where(action.bool(), logits, -logits))


def _rollout(
    live: Live,
    rows: Tensor,
    x: Tensor,
    valid: Tensor,
    starts: Tensor,
    noise: Tensor,
    batch: Batch,
    samples: Samples,
    n_past: int,
    price: float | Tensor,
) -> TensorDict:
    size = list(x.shape)
    valid_later = F.pad(valid, (0, 1))  # [B, T+1]; root and next are two views of one tensor
    later = {
        "hidden": rows.detach(),
        "since": since_start(starts),
        "byte": F.pad(x, (1, 0), value=BOS),
        "noise": noise,
        "is_choice": is_choice(valid_later),
        "valid": valid_later,
        "sequence": samples.expand(batch.sequence)[:, None].expand(-1, size[1] + 1),
    }
    if n_past:
        later["recent"] = recent_starts(starts, n_past)
    nll, early_nll = live.nll.detach(), samples.expand(live.early_nll.detach())
    choice = later["is_choice"][:, :-1]
    done = ~valid_later[:, 1:]
    terminated = done & samples.expand(batch.terminated)[:, None]
    reward = early_nll - nll
    outcome = {
        "reward": torch.where(starts & choice, reward - price, reward),
        "nll": nll,
        "early_nll": early_nll,
        "done": done,
        "terminated": terminated,
        "truncated": done & ~terminated,
    }
    if live.logits is None:
        logits = log_prob = torch.zeros_like(nll)
    else:
        logits = live.logits.detach()
        log_prob = _masked(action_log_prob(logits, starts), choice)
    gate = {} if live.gate is None else {"gate": live.gate.detach()}
    never = torch.zeros_like(valid)[..., None]
    return TensorDict(
        {
            **{name: values[:, :-1] for name, values in later.items()},
            "action": starts.long(),
            "logits": logits,
            "action_log_prob": log_prob,
            **gate,
            **dict.fromkeys(("done", "terminated", "truncated"), never),
            "next": TensorDict(
                {name: values[:, 1:] for name, values in later.items()} | {name: values[..., None] for name, values in outcome.items()},
                size,
            ),
        },
        size,
        names=[None, "time"],
        device=x.device,
    )
