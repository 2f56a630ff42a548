"""Small scorers, streams and policies that the tests of environment, unroll and collector share."""

import torch
from torch import Tensor, float64

from models.sizes import Size
from models.unet import ByteUNet
from segment_env.batch import Episodes, Samples
from segment_env.closed_form import AlignedScorer, CountingStream, TableScorer
from segment_env.env import SegmentEnv
from segment_env.noise import BYTES, hashed
from segment_env.scorer import Decision, Observation, gives_gate


def tiny_unet(dtype: torch.dtype = float64, pooling=None) -> ByteUNet:
    """A byte U-Net whose boundaries matter although it is untrained."""
    unet = ByteUNet(Size(width=32, heads=4, encoder=1, mid=2, decoder=1, window=4), pooling).to(dtype)
    with torch.no_grad():
        unet.head.weight.mul_(10)
    return unet


def pooled_both_ways(pair, h: Tensor, starts: Tensor, gate: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """What bytes receive of a pooling pair whose token layers answer with a sine: all positions at once, and one after the other."""
    tokens, _ = pair.down(h, starts, gate)
    parallel = pair.up(h, tokens.sin(), starts, gate)
    state, y, stepped = pair.init(len(h)), torch.zeros_like(h[:, 0]), []
    for t in range(h.shape[1]):
        state, token = pair.down_step(state, h[:, t], starts[:, t])
        y = torch.where(starts[:, t, None], token.sin(), y)
        state, out = pair.up_step(state, h[:, t], y, starts[:, t], None if gate is None else gate[:, t])
        stepped.append(out)
    return parallel, torch.stack(stepped, 1)


SCORERS = {
    "aligned": lambda dtype=float64: AlignedScorer(5, 0.1, dtype),
    "table": lambda dtype=float64: TableScorer(byte_noise=2.0, dtype=dtype),
    "unet": tiny_unet,
}


class RaggedStream:
    """Documents of different lengths, in turn, with noise in their padding; every other one is terminated."""

    unit, sample_rate = "byte", None

    def __init__(self, *lengths: int):
        self.lengths = torch.tensor(lengths)

    def sequences(self, seed: int, index: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
        time = torch.arange(length)
        x = hashed(seed, BYTES, index[:, None], time) % 256
        return x, time < self.lengths[index % len(self.lengths), None], index % 2 == 1

    def reference(self, x: Tensor) -> None:
        return None


def make_env(scorer, counts=(1, 1, 1), length=12, stream=None, seed=3, antithetic=False, device="cpu", **kwargs) -> SegmentEnv:
    episodes = Episodes(stream or CountingStream(5, 0.3), len(counts), length, seed)
    return SegmentEnv(scorer, episodes, Samples(counts, antithetic, device), device=device, **kwargs)


class Replayed:
    """Logits of ``policy``, but given ``actions`` [B, T]; it has no parallel form, and its state counts the steps."""

    def __init__(self, policy, actions: Tensor):
        self.policy, self.actions = policy, actions
        self.n_past, self.reads_early_log_p, self.gives_gate = policy.n_past, policy.reads_early_log_p, gives_gate(policy)

    def init(self, num_rows: int) -> dict:
        return {"inner": self.policy.init(num_rows), "time": torch.zeros(num_rows, dtype=torch.int64, device=self.actions.device)}

    def step(self, state: dict, observation: Observation, *, soft_cap=None) -> tuple[dict, Decision]:
        inner, decision = self.policy.step(state["inner"], observation, soft_cap=soft_cap)
        time = state["time"].clamp(max=self.actions.shape[1] - 1)
        action = self.actions.gather(1, time[:, None]).squeeze(1)
        return {"inner": inner, "time": state["time"] + 1}, decision._replace(action=action)


class Stepped:
    """A policy without its parallel form."""

    def __init__(self, policy):
        self.n_past, self.reads_early_log_p, self.gives_gate = policy.n_past, policy.reads_early_log_p, gives_gate(policy)
        self.init, self.step = policy.init, policy.step


class Surprised:
    """Reads everything that a policy may read and keeps a state of its own: a mean of the early head's confidence."""

    n_past, reads_early_log_p = 2, True

    def init(self, num_rows: int) -> Tensor:
        return torch.zeros(num_rows, dtype=float64)

    def step(self, state: Tensor, observation: Observation, *, soft_cap=None) -> tuple[Tensor, Decision]:
        state = 0.5 * state + observation.early_log_p.max(-1).values + observation.byte % 3
        logits = state.sin() + observation.hidden.mean(-1) + 0.3 * observation.since - observation.recent.sum(-1)
        return state, Decision(observation.noise < logits.sigmoid(), logits)
