"""Learners in float64 on ragged rows, for tests of what must not depend on how the rows of a batch are dealt out.

Letters: S sequences, K boundary samples of a sequence, B rows, T bytes.
"""

from functools import partial

import torch
from torch import Tensor
from torchrl.objectives import ClipPPOLoss
from worlds import RaggedStream

from agents.advantages import batch_relative, discounted_return, early_exit, gae, leave_one_out, normalise, subtract_baseline
from agents.agent import Agent, Reinforce
from agents.critics import Critic
from agents.estimators import disarm
from agents.gumbel import GumbelPolicy
from agents.hindsight import Hindsight
from agents.learner import Learner
from agents.loss_module import LossModuleAgent
from agents.policies import WindowPolicy
from agents.rate_losses import binomial_prior, ratio_loss
from agents.rates import PI, Lagrangian, LogitPressure, RatioLoss
from agents.routing import CosineRouting
from agents.straight_through import StraightThrough
from models import ByteUNet
from models.mean_pooling import MeanAdd
from models.sizes import Size
from models.smoothing import SelectSmooth
from segment_env.batch import Batch, Episodes

ROWS, LENGTH, UPDATES, WIDTH = 8, 24, 5, 16
RETURN = partial(discounted_return, gamma=0.9)
OTHERS = partial(batch_relative, own_sample=False)
STREAM = RaggedStream(24, 3, 17, 1, 9, 24, 5, 12, 2)  #: rows and ranks differ much in what counts


def reinforce(*steps, rate=PI, n_past: int = 0, **settings) -> Agent:
    policy = WindowPolicy(WIDTH, 0.3, n_past)
    with torch.no_grad():
        policy.weight.normal_(std=4, generator=torch.Generator().manual_seed(1))
    return Reinforce(policy, [early_exit, RETURN, *steps], rate(0.3), **{"soft_cap": 6.0, "lr_scale": 8.0, **settings})


def ppo(**settings) -> Agent:
    torch.manual_seed(2)
    objective = partial(ClipPPOLoss, entropy_coeff=0.01, loss_critic_type="l2")
    steps = [early_exit, partial(gae, gamma=0.9, lam=0.9), OTHERS]
    return LossModuleAgent(WindowPolicy(WIDTH, 0.3), steps, objective, PI(0.3), Critic(WIDTH, 0, 4), soft_cap=6.0, epochs=3, **settings)


def baseline() -> Hindsight:
    torch.manual_seed(3)
    return Hindsight(WIDTH, 0.9, 4)


AGENTS = {
    "batch_relative": partial(reinforce, OTHERS),
    "paper": partial(reinforce, batch_relative, rate=LogitPressure, encoder_grad=True, policy_weight=0.3),
    "leave_one_out": partial(reinforce, leave_one_out, samples=2),
    "ppo": ppo,
    "baseline": lambda: reinforce(subtract_baseline, normalise, rate=Lagrangian, baseline=baseline()),
    "mixed_ratio": partial(reinforce, leave_one_out, OTHERS, rate=RatioLoss, samples=2, samples_share=0.5, n_past=2),
    "disarm": partial(reinforce, samples=2, antithetic=True, estimator=disarm),
    "gumbel": lambda: StraightThrough(GumbelPolicy(WIDTH, 0.3), partial(binomial_prior, target=0.3), rate_weight=0.3),
    "routing": lambda: StraightThrough(CosineRouting(WIDTH), partial(ratio_loss, target=0.3), rate_weight=0.3),
}
POOLING = {"gumbel": MeanAdd, "routing": SelectSmooth}


def made(name: str, rows: int = ROWS, **settings) -> Learner:
    torch.manual_seed(0)
    model = ByteUNet(Size(width=WIDTH, heads=2, encoder=1, mid=1, decoder=1, window=4), POOLING.get(name))
    return Learner(model.double(), AGENTS[name]().double(), rows, UPDATES, lr=0.01, **settings)


def batch(learner: Learner, n: int, rank: int = 0, total: int = 1) -> Batch:
    """The ``n``-th of a rank of ``total``."""
    own = learner.num_sequences
    return Episodes(STREAM, own, LENGTH, 5, rank * own, total * own).batch(n)


def everything(learner: Learner) -> dict[str, Tensor]:
    """Parameters and buffers."""
    parts = {"model": learner.model, "agent": learner.agent}
    return {f"{part}.{key}": value.detach().clone() for part, module in parts.items() for key, value in module.state_dict().items()}


def far(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference of any number."""
    assert one.keys() == other.keys()
    return max(float((one[key].double() - other[key].double()).abs().max()) for key in one)
