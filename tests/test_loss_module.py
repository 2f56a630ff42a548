"""TorchRL's losses as agents: what they reduce to, that padding is nothing to them, and what is refused.

Letters: S sequences, K boundary samples of a sequence, B rows, T bytes.
"""

import math
from functools import partial

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, float64, nn
from torch.nn import functional as F
from torchrl.objectives import A2CLoss, ClipPPOLoss, KLPENPPOLoss, PPOLoss, ReinforceLoss
from worlds import RaggedStream, Stepped, Surprised, make_env, tiny_unet

from agents import config, training
from agents.advantages import batch_relative, discounted_return, early_exit, gae, group_relative, leave_one_out, subtract_baseline
from agents.agent import Reinforce
from agents.critics import Critic
from agents.estimators import disarm, policy_loss
from agents.hindsight import Hindsight
from agents.learner import Learner
from agents.loss_module import LossModuleAgent
from agents.policies import WindowPolicy
from agents.rates import PI
from segment_env.actor import Start, replayed_logits
from segment_env.batch import Batch, Episodes, Samples, pack
from segment_env.closed_form import AlignedScorer, CountingStream, TableScorer
from segment_env.errors import UserError
from segment_env.unroll import Live, unroll

RAGGED = [b"Call me Ishmael.", b"Some years ago", b"s"]
CRITIC_FREE = [early_exit, partial(discounted_return, gamma=0.9), partial(batch_relative, own_sample=False)]
WITH_CRITIC = [early_exit, partial(gae, gamma=0.9, lam=0.8)]
GROUPED = [early_exit, partial(discounted_return, gamma=0.9), group_relative]
PPO = partial(ClipPPOLoss, entropy_coeff=0.01)
A2C = partial(A2CLoss, entropy_coeff=0.01, loss_critic_type="l2")
KL = partial(KLPENPPOLoss, entropy_coeff=0.01)


def policy_of(width: int, n_past: int = 0, seed: int = 1) -> WindowPolicy:
    policy = WindowPolicy(width, 0.3, n_past).double()
    with torch.no_grad():
        policy.weight.normal_(std=16, generator=torch.Generator().manual_seed(seed))
    return policy


def critic_of(width: int, n_past: int = 0) -> Critic:
    torch.manual_seed(7)
    critic = Critic(width, n_past, 4).double()
    with torch.no_grad():
        critic.last.weight.normal_()
    return critic


def hindsight_of(width: int) -> Hindsight:
    torch.manual_seed(8)
    baseline = Hindsight(width, 0.9, 4)
    with torch.no_grad():
        for layer in (baseline.of_byte, baseline.of_hidden):
            layer.weight.normal_()
    return baseline


def reinforce(steps, **settings) -> Reinforce:
    return Reinforce(policy_of(8), steps, PI(0.3), **{"samples": 2, "soft_cap": 6.0, **settings}).double()


def make(steps=CRITIC_FREE, objective=PPO, width=8, critic=False, n_past=0, **settings) -> LossModuleAgent:
    own = critic_of(width, n_past) if critic else None
    return LossModuleAgent(policy_of(width, n_past), steps, objective, PI(0.3), own, **{"soft_cap": 6.0, "samples": 2, **settings}).double()


AGENTS = {
    "a2c": lambda **s: make(WITH_CRITIC, A2C, critic=True, **s),
    "ppo": lambda **s: make(WITH_CRITIC, partial(PPO, loss_critic_type="l2"), critic=True, epochs=3, **s),
    "ppo_n_past": lambda **s: make(WITH_CRITIC, PPO, critic=True, epochs=3, n_past=2, **s),
    "ppo_asymmetric": lambda **s: make(CRITIC_FREE, partial(PPO, clip_epsilon=(0.2, 0.28)), epochs=3, **s),
    "ppo_kl": lambda **s: make(WITH_CRITIC, partial(KL, dtarg=1e-4), critic=True, epochs=3, **s),
    "grpo": lambda **s: make(GROUPED, PPO, epochs=3, **s),
    "grpo_divided": lambda **s: make([*GROUPED[:2], partial(group_relative, divide=True)], PPO, epochs=3, **s),
    "reinforce": lambda **s: reinforce(CRITIC_FREE, **s),
    "rloo": lambda **s: reinforce([*CRITIC_FREE[:2], leave_one_out], **s),
    "antithetic": lambda **s: reinforce(CRITIC_FREE, estimator=disarm, antithetic=True, **s),
    "hindsight": lambda **s: reinforce([*CRITIC_FREE, subtract_baseline], baseline=hindsight_of(8), **s),
}


def play(agent, batch: Batch | None = None, scorer=None, rows: int = 6) -> tuple[TensorDict, Live]:
    batch = pack(RAGGED) if batch is None else batch
    scorer = TableScorer(byte_noise=1.0, dtype=float64) if scorer is None else scorer
    return unroll(scorer, agent.policy, batch, Samples(agent.sample_counts(rows), agent.antithetic), soft_cap=agent.soft_cap)


def gradients(module: nn.Module) -> dict[str, Tensor]:
    found = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}
    module.zero_grad()
    return found


def assert_close(got: dict, expected: dict, tolerance: float = 1e-10) -> None:
    assert got.keys() == expected.keys()
    for key in expected:
        torch.testing.assert_close(got[key], expected[key], rtol=0, atol=tolerance, msg=key)


# --- reductions ---


def policy_gradient(agent, rollout, live) -> Tensor:
    loss, _ = agent.loss(agent.prepare(rollout), live)
    return torch.autograd.grad(loss, agent.policy.weight, retain_graph=True)[0]


OFF = {"policy_weight": 1.0, "rate_weight": 0.0}


@pytest.mark.parametrize("steps", [CRITIC_FREE, GROUPED, WITH_CRITIC], ids=["batch_relative", "grouped", "gae"])
def test_the_first_epoch_of_every_objective_is_the_policy_gradient(steps) -> None:
    """PPO with and without clipping, with a KL penalty, and A2C: all equal REINFORCE for the same advantages."""
    critic = steps is WITH_CRITIC
    objectives = [partial(cls, entropy_bonus=False) for cls in (PPOLoss, ClipPPOLoss, KLPENPPOLoss)]
    objectives += [partial(A2CLoss, entropy_bonus=False, critic_coeff=0.0)] if critic else []
    agents = [make(steps, objective, critic=critic, **OFF) for objective in objectives]
    rollout, live = play(agents[0])
    found = [policy_gradient(agent, rollout, unroll_again(agent)[1]) for agent in agents]
    prepared = agents[0].prepare(rollout)
    reinforce = Reinforce(policy_of(8), [lambda values, _: prepared["advantage"].squeeze(-1)], soft_cap=6.0, samples=2, **OFF)
    expected = policy_gradient(reinforce, *unroll_again(reinforce))
    assert expected.abs().max() > 1e-3
    for gradient in found:
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)
    rollout, live = unroll_again(agents[0])
    rollout = agents[0].prepare(rollout)
    surrogate = policy_loss(agents[0].direction(rollout), live.logits, rollout["is_choice"].sum())
    torch.testing.assert_close(torch.autograd.grad(surrogate, agents[0].policy.weight)[0], expected, rtol=0, atol=1e-12)


def unroll_again(agent) -> tuple[TensorDict, Live]:
    return play(agent)


def test_clipping_that_never_bites_is_importance_weighted_reinforce() -> None:
    """L = -mean over choices of (p_new(a) / p_old(a)) A, differentiated by hand at a policy that has moved."""
    agent = make(CRITIC_FREE, partial(ClipPPOLoss, entropy_bonus=False, clip_epsilon=1e6 / (1e6 + 1)), **OFF, epochs=2)
    wide = make(CRITIC_FREE, partial(ClipPPOLoss, entropy_bonus=False, clip_epsilon=(0.999999, 1e9)), **OFF, epochs=2)
    rollout, _ = play(wide)
    prepared = wide.prepare(rollout)
    with torch.no_grad():
        for each in (agent, wide):
            each.policy.weight.add_(torch.linspace(-3, 5, 8, dtype=float64))
    loss, _ = wide.loss(prepared, None)
    (got,) = torch.autograd.grad(loss, wide.policy.weight)
    logits = 6 * torch.tanh((F.linear(rollout["hidden"], wide.policy.weight)[..., 0] / 16 + math.log(0.3 / 0.7)) / 6)
    log_p = torch.where(rollout["action"].bool(), F.logsigmoid(logits), F.logsigmoid(-logits))
    ratio = (log_p - rollout["action_log_prob"]).exp()
    choice = rollout["is_choice"]
    assert (ratio[choice] - 1).abs().max() > 0.3
    expected = -(ratio * prepared["advantage"].squeeze(-1))[choice].mean()
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(got, torch.autograd.grad(expected, wide.policy.weight)[0], rtol=0, atol=1e-12)
    clipped, metrics = agent.loss(agent.prepare(rollout), None)
    assert metrics["clip_fraction"] >= 0 and clipped.isfinite()


def test_clipping_stops_the_gradient_where_the_ratio_has_left() -> None:
    """A ratio above 1 + epsilon with a positive advantage, below 1 - epsilon with a negative one: no gradient, else the ratio's."""
    agent = make(CRITIC_FREE, partial(ClipPPOLoss, entropy_bonus=False, clip_epsilon=(0.1, 0.3)), **OFF, epochs=2)
    rollout, live = play(agent)
    prepared = agent.prepare(rollout)
    logits = (rollout["logits"] + torch.randn(rollout.shape, dtype=float64, generator=torch.Generator().manual_seed(3))).requires_grad_()
    loss, _ = agent.loss(prepared, live._replace(logits=logits))
    (got,) = torch.autograd.grad(loss, logits)
    start = Start(logits=logits)
    ratio = (start.log_prob(rollout["action"]) - rollout["action_log_prob"]).exp()
    value = prepared["advantage"].squeeze(-1)
    blocked = ((ratio > 1.3) & (value > 0)) | ((ratio < 0.9) & (value < 0))
    choice = rollout["is_choice"]
    assert 3 < (blocked & choice).sum() < choice.sum() - 3
    expected = torch.autograd.grad(-(ratio * value * ~blocked)[choice].sum() / choice.sum(), logits)[0]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def test_leave_one_out_of_two_is_its_closed_form() -> None:
    """K = 2: A_1 = G_1 - G_2, A_2 = -A_1, so g_1 = -(a_1 - p_1)(G_1 - G_2) and g_2 = (a_2 - p_2)(G_1 - G_2)."""
    agent = AGENTS["rloo"](**OFF)
    rollout, live = play(agent)
    got = policy_gradient(agent, rollout, live)
    reward = rollout["next", "reward"].squeeze(-1)
    g = torch.zeros_like(reward)
    for t in reversed(range(16)):
        g[:, t] = reward[:, t] + (0.9 * g[:, t + 1] if t < 15 else 0)
    difference = g[0::2] - g[1::2]
    residual = rollout["action"] - rollout["logits"].sigmoid()
    direction = torch.stack([-residual[0::2] * difference, residual[1::2] * difference], 1).flatten(0, 1)
    choice = rollout["is_choice"]
    surrogate = (direction * live.logits)[choice].sum() / choice.sum()
    torch.testing.assert_close(got, torch.autograd.grad(surrogate, agent.policy.weight)[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("n_past", [0, 2])
def test_the_first_ratio_is_exactly_one_under_the_cap(n_past: int) -> None:
    """The agent replays with the cap that it sampled with; without it the ratios are off."""
    agent = make(CRITIC_FREE, PPO, n_past=n_past, epochs=2)
    with torch.no_grad():
        agent.policy.weight.mul_(4)
    rollout, live = play(agent)
    prepared = agent.prepare(rollout)
    for given in (live, None):
        _, metrics = agent.loss(prepared, given)
        assert metrics["max_ratio"] == metrics["mean_ratio"] == 1 and metrics["clip_fraction"] == 0 and metrics["kl_approx"] == 0
    agent.soft_cap = None
    assert agent.loss(prepared, None)[1]["max_ratio"] > 1.01


# --- generalised advantage estimation ---


def with_values(rollout: TensorDict) -> TensorDict:
    """Random state values, continued from each step to the next."""
    values = torch.randn(rollout.shape[0], rollout.shape[1] + 1, 1, dtype=float64, generator=torch.Generator().manual_seed(5))
    rollout["state_value"], rollout["next", "state_value"] = values[:, :-1], values[:, 1:]
    return rollout


@pytest.mark.parametrize("terminated", [True, False])
def test_gae_is_torchrls(terminated: bool) -> None:
    from torchrl.objectives.value import GAE

    stream = RaggedStream(12, 7, 1)
    stream.sequences = lambda *args, own=stream.sequences: (*own(*args)[:2], torch.full((3,), terminated))
    env = make_env(TableScorer(byte_noise=1.0, dtype=float64), stream=stream)
    env.reset()
    rollout = with_values(unroll(env.scorer, policy_of(8), env.batch, env.samples)[0])
    got = gae(rollout["next", "reward"].squeeze(-1), rollout, 0.5, 0.75)
    theirs = GAE(gamma=0.5, lmbda=0.75, value_network=None, average_gae=False)(rollout.exclude("value_target"))
    valid = rollout["valid"]
    torch.testing.assert_close(got[valid], theirs["advantage"].squeeze(-1)[valid], rtol=0, atol=1e-12)
    torch.testing.assert_close(rollout["value_target"][valid], theirs["value_target"][valid], rtol=0, atol=1e-12)


def test_gae_by_hand() -> None:
    """r = 1, 2, 4; V = 1, -1, 2, then 8; gamma .5, lambda .5. deltas: 1 - .5 - 1, 2 + 1 + 1, 4 + (4 or 0) - 2."""
    values = torch.tensor([[1.0, 2.0, 4.0]])
    for terminated, last in ((False, 6.0), (True, 2.0)):
        done = torch.tensor([[[False], [False], [True]]])
        following = {"state_value": torch.tensor([[[-1.0], [2.0], [8.0]]]), "done": done, "terminated": done & terminated}
        rollout = TensorDict(
            {"valid": torch.ones(1, 3, dtype=torch.bool), "state_value": torch.tensor([[[1.0], [-1.0], [2.0]]]), "next": following}, [1, 3]
        )
        rollout["next"].batch_size = [1, 3]
        expected = [-0.5 + 0.25 * (4 + 0.25 * last), 4 + 0.25 * last, last]
        assert gae(values, rollout, 0.5, 0.5).tolist() == [expected]
        assert rollout["value_target"].flatten().tolist() == [expected[0] + 1, expected[1] - 1, expected[2] + 2]


def test_gae_of_one_and_one_without_a_critic_is_the_reward_to_go() -> None:
    rollout, _ = play(AGENTS["rloo"]())
    zero = torch.zeros_like(rollout["next", "reward"])
    rollout["state_value"] = rollout["next", "state_value"] = zero
    reward = rollout["next", "reward"].squeeze(-1)
    expected = reward.flip(1).cumsum(1).flip(1)
    torch.testing.assert_close(gae(reward, rollout, 1.0, 1.0), expected, rtol=0, atol=1e-12)


def test_a_critic_that_knows_the_mean_is_reinforce_with_a_baseline() -> None:
    """lambda = 1 on terminated rows: G[t] - V[t]."""
    rollout, _ = play(AGENTS["rloo"]())
    rollout = with_values(rollout)
    reward = rollout["next", "reward"].squeeze(-1)
    expected = discounted_return(reward, rollout, 0.9) - rollout["state_value"].squeeze(-1)
    valid = rollout["valid"]
    torch.testing.assert_close(gae(reward, rollout, 0.9, 1.0)[valid], expected[valid], rtol=0, atol=1e-12)


def test_group_relative() -> None:
    """K = 3, 1 and a row that has ended: minus the mean of the valid rows of the sequence, divided or not by their deviation."""
    valid = torch.tensor([[True, True], [True, True], [True, False], [True, True]])
    rollout = TensorDict({"valid": valid, "sequence": torch.tensor([[4], [4], [4], [9]]).expand(4, 2)}, [4, 2])
    values = torch.tensor([[1.0, 2.0], [4.0, 6.0], [7.0, 0.0], [5.0, 5.0]], dtype=float64)
    got = group_relative(values, rollout)
    assert got[valid].tolist() == [-3, -2, 0, 2, 3, 0, 0]
    divided = group_relative(values, rollout, divide=True, epsilon=0.5)
    root = 6**0.5 + 0.5  # of (9 + 0 + 9) / 3
    torch.testing.assert_close(divided[valid], torch.tensor([-3 / root, -2 / 2.5, 0, 2 / 2.5, 3 / root, 0, 0], dtype=float64))


# --- padding ---


@pytest.mark.parametrize("name", AGENTS)
def test_padding_is_nothing(name: str) -> None:
    """Nine columns and two rows that are nowhere valid, garbage in all of them: the same losses, statistics and gradients."""
    agent = AGENTS[name]()
    counts, batch = [2, 2, 2], pack(RAGGED)
    more = torch.full((3, 9), 77)
    longer = Batch(torch.cat([batch.bytes, more], 1), torch.cat([batch.valid, more < 0], 1), batch.terminated, batch.sequence, batch.seed)
    scorer, found = TableScorer(byte_noise=1.0, dtype=float64), []
    taller = Batch(
        torch.cat([longer.bytes, longer.bytes[:1]]),
        torch.cat([longer.valid, longer.valid[:1] & False]),
        torch.cat([longer.terminated, longer.terminated[:1]]),
        torch.cat([longer.sequence, longer.sequence[:1] + 9]),
        batch.seed,
    )
    for each, rows in ((batch, counts), (taller, [*counts, 2])):
        torch.manual_seed(0)
        agent = AGENTS[name]()
        rollout, live = unroll(scorer, agent.policy, each, Samples(rows, agent.antithetic), soft_cap=6.0)
        rollout = rollout.clone()  # the logits of the graph lie in the same memory
        outside = ~rollout["valid"]
        for key, leaf in rollout.items(True, True):
            if leaf.is_floating_point() and key != "noise":
                leaf[outside] = torch.nan
        rollout["action"] = torch.where(outside, 93, rollout["action"])
        results = []
        prepared = agent.prepare(rollout)
        for epoch in range(agent.epochs):
            loss, metrics = agent.loss(prepared, None if epoch else live)
            loss.backward()
            results.append({"loss": loss.detach(), **metrics, **gradients(agent)})
            with torch.no_grad():
                agent.policy.weight.add_(results[-1]["policy.weight"])
        found.append(results + [dict(agent.named_buffers())])
    for got, expected in zip(*found, strict=True):
        assert all(value.isfinite().all() for value in got.values())
        assert_close(got, expected)


@pytest.mark.parametrize("name", AGENTS)
def test_where_nothing_is_decided_nothing_is_learned(name: str) -> None:
    """Documents of one byte: no choice, and no 0/0."""
    agent = AGENTS[name]()
    rollout, live = play(agent, pack([b"a", b"b", b"c"]))
    loss, metrics = agent.loss(agent.prepare(rollout), live)
    loss.backward()
    assert loss == 0 and not agent.policy.weight.grad.any()
    assert all(value.isfinite() for value in metrics.values())


# --- epochs, and what learns in them ---


def test_the_model_makes_one_step_and_the_agent_all_epochs() -> None:
    model = tiny_unet()
    agent = make(WITH_CRITIC, PPO, 32, critic=True, epochs=4)
    learner = Learner(model, agent, 6, 5, warmup=0.0, lr=1e-3)
    learner.update(pack(RAGGED))
    steps = {name: float(learner.optimiser.state[parameter]["step"]) for name, parameter in model.named_parameters()}
    steps |= {name: float(learner.optimiser.state[parameter]["step"]) for name, parameter in agent.named_parameters()}
    assert {name: step for name, step in steps.items() if step == 4}.keys() == dict(agent.named_parameters()).keys()
    assert {step for name, step in steps.items() if name not in dict(agent.named_parameters())} == {1.0}


def test_the_critic_has_a_learning_rate_of_its_own() -> None:
    agent = make(WITH_CRITIC, PPO, 32, critic=True, lr_scale=8.0, critic_lr_scale=0.5)
    learner = Learner(tiny_unet(), agent, 6, 1, lr=1e-3, warmup=0.0)
    assert [group["initial_lr"] for group in learner.optimiser.param_groups] == [1e-3, 8e-3, 5e-4]
    assert sum(len(group["params"]) for group in learner.optimiser.param_groups[1:]) == len(list(agent.parameters()))


def test_a_critic_learns_the_values() -> None:
    """Under a policy that stands still: on a batch that it was not fitted on it is nearly as good as any function of what it reads."""
    torch.manual_seed(0)
    scorer, policy = AlignedScorer(5, 0.05), WindowPolicy(6, 0.3)
    objective = partial(A2CLoss, entropy_bonus=False, loss_critic_type="l2")
    steps = [early_exit, partial(gae, gamma=0.5, lam=1.0)]
    agent = LossModuleAgent(policy, steps, objective, critic=Critic(6), lr_scale=0.0)
    learner = Learner(scorer, agent, 16, 200, lr=1e-2)
    episodes = Episodes(CountingStream(5, 0.0), 16, 32, seed=1)
    for n in range(200):
        learner.update(episodes.batch(n))
    agent.eval()
    rollout = agent.prepare(unroll(scorer, policy, episodes.batch(300), learner.samples)[0])
    choice = rollout["is_choice"]
    target, value = (rollout[key].squeeze(-1)[choice] for key in ("value_target", "state_value"))
    assert not policy.weight.any()
    state = 64 * rollout["hidden"].argmax(-1)[choice] + rollout["since"][choice]
    group = state.unique(return_inverse=True)[1]
    best = (target.new_zeros(int(group.max()) + 1).index_add(0, group, target) / group.bincount())[group]  # knows this very batch
    assert (target - best).square().mean() < 0.9 * target.var()
    assert (target - value).square().mean() < 1.1 * (target - best).square().mean()


def test_encoder_grad_reaches_the_encoder_through_torchrls_loss() -> None:
    found = []
    for agent in (make(CRITIC_FREE, PPO, 32, encoder_grad=True, **OFF), make(CRITIC_FREE, PPO, 32, **OFF)):
        model = tiny_unet()
        rollout, live = unroll(model, agent.policy, pack(RAGGED[:2]), Samples([2, 2]), soft_cap=6.0, encoder_grad=agent.encoder_grad)
        agent.loss(agent.prepare(rollout), live)[0].backward()
        found.append({name for name, gradient in gradients(model).items() if gradient.any()})
    before = {name for name, _ in tiny_unet().named_parameters() if name.startswith(("embedding", "encoder"))}
    assert found == [before, set()]


def test_a_loss_that_adapts_itself_is_part_of_the_checkpoint_and_not_moved_by_a_rehearsal() -> None:
    settings = config.load(
        [
            "agent=ppo_kl",
            "agent.objective.decrement=0.5",
            "agent.objective.increment=2.0",
            "data=made_up",
            "train.bytes=2048",
            "train.rows=2",
        ]
    )
    run = training.Run(settings)
    run.rehearse()
    assert run.agent.state_dict()["objective.beta"] == 1.0
    learner = run.learner()
    learner.update(next(run.batches(learner)))
    assert run.agent.state_dict()["objective.beta"] != 1.0


# --- mistakes ---


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"steps": WITH_CRITIC}, "gae needs a critic, and agent.critic is missing"),
        ({"steps": [WITH_CRITIC[1], early_exit], "critic": True}, "early_exit is about rewards: it must come before gae"),
        ({"steps": [*CRITIC_FREE[:2], WITH_CRITIC[1]], "critic": True}, "returns of returns: discounted_return and gae; use one"),
        ({"objective": A2C}, "A2CLoss cannot be built.*agent.critic is missing"),
        ({"objective": partial(ClipPPOLoss, clip_epsilon=(0.2, -1.0))}, "ClipPPOLoss cannot be built"),
        ({"objective": lambda **_: nn.Identity()}, "must make a loss of TorchRL, got Identity"),
        ({"steps": GROUPED, "samples": 1}, "group_relative needs agent.samples of 2 or more"),
        ({"encoder_grad": True, "epochs": 2}, "agent.encoder_grad=true needs one epoch on live states, but agent.epochs=2"),
        ({"epochs": 0}, "agent.epochs must be a whole number of at least 1, got 0"),
        ({"epochs": 1.5}, "agent.epochs must be a whole number of at least 1, got 1.5"),
    ],
)
def test_a_mistake_is_named(settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make(**settings)


def test_a_critic_that_no_step_reads_is_named_with_the_first_batch() -> None:
    agent = make(critic=True)
    with pytest.raises(UserError, match="no step of agent.advantage reads it: add gae, or leave the critic out"):
        agent.prepare(play(agent)[0])


def test_a_weight_that_is_a_whole_number_can_adapt() -> None:
    agent = make(WITH_CRITIC, partial(KL, beta=2, dtarg=1e-4), critic=True)
    rollout, live = play(agent)
    agent.loss(agent.prepare(rollout), live)
    assert agent.objective.beta == 1.0


def test_the_rate_is_held_as_by_the_controller_alone() -> None:
    """Its loss is over choices, under the cap; in later epochs on the logits of that epoch."""
    agent = make(policy_weight=0.0, rate_weight=2.0, epochs=2)
    agent.rate.update(torch.tensor(0.9))
    rollout, live = play(agent)
    agent.eval()
    prepared = agent.prepare(rollout)
    for given in (live, None):
        logits = live.logits if given else replayed_logits(agent.policy, prepared, 6.0)
        expected = 2 * agent.rate(logits, rollout["is_choice"], 6.0)
        loss, _ = agent.loss(prepared, given)
        torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
        got, wanted = (torch.autograd.grad(each, agent.policy.weight, retain_graph=True)[0] for each in (loss, expected))
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)
        with torch.no_grad():
            agent.policy.weight.add_(1.0)


def test_what_cannot_be_replayed_makes_one_epoch() -> None:
    with pytest.raises(UserError, match="Stepped has no parallel form to replay a rollout with: agent.epochs must be 1"):
        LossModuleAgent(Stepped(policy_of(8)), CRITIC_FREE, PPO, epochs=2)
    with pytest.raises(UserError, match="agent.epochs must be 1"):
        LossModuleAgent(Surprised(), CRITIC_FREE, PPO, epochs=2)
    with pytest.raises(UserError, match="REINFORCE is on-policy, agent.epochs must be 1, got 4"):
        Reinforce(policy_of(8), CRITIC_FREE, epochs=4)


def test_a_reinforce_loss_of_torchrl_takes_a_critic_too() -> None:
    agent = make(WITH_CRITIC, partial(ReinforceLoss, loss_critic_type="l2"), critic=True, **OFF)
    rollout, live = play(agent)
    loss, _ = agent.loss(agent.prepare(rollout), live)
    assert loss.isfinite()


def test_a_critics_numbers() -> None:
    with pytest.raises(UserError, match="hidden_units must be a whole number from 0 on, got -1"):
        Critic(8, hidden_units=-1)
    assert Critic(8, hidden_units=0).last is None


def test_the_shipped_agents_build_and_learn() -> None:
    for name in ("a2c", "ppo", "ppo_asymmetric", "ppo_kl", "grpo", "rloo"):
        run = training.Run(config.load([f"agent={name}", "data=made_up", "data.length=64", "train.rows=4", "train.bytes=1024"]))
        run.rehearse()
        learner = run.learner()
        before = run.agent.policy.weight.clone()
        batches = run.batches(learner)
        learner.update(next(batches))
        metrics = learner.update(next(batches))
        assert all(value.isfinite().all() for value in metrics.values()), name
        assert not torch.equal(run.agent.policy.weight, before), name
