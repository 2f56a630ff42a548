"""The joint update: what of it reaches which parameter, its schedule, and that it learns.

Letters: S sequences, K boundary samples of a sequence, B rows, T bytes.
"""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from agents import advantages
from agents.advantages import discounted_return, early_exit, leave_one_out
from agents.agent import Agent, Given, Reinforce
from agents.learner import Learner, _schedule
from agents.policies import WindowPolicy
from agents.rates import PI, LogitPressure
from agents.rules import IidRandom, UniformStride
from models import ByteUNet
from models.sizes import Size
from segment_env.batch import Batch, Episodes, Samples, pack
from segment_env.closed_form import AlignedScorer, CountingStream
from segment_env.errors import UserError
from segment_env.unroll import unroll

STEPS = [early_exit, partial(discounted_return, gamma=0.9), leave_one_out]
RAGGED = [b"Call me Ishmael.", b"Some", b"years ago-"]


def unet(seed: int = 0) -> ByteUNet:
    torch.manual_seed(seed)
    return ByteUNet(Size(width=16, heads=2, encoder=1, mid=1, decoder=1, window=4)).double()


def reinforce(width: int = 16, seed: int = 1, **settings) -> Reinforce:
    policy = WindowPolicy(width, 0.3).double()
    with torch.no_grad():
        policy.weight.normal_(std=5, generator=torch.Generator().manual_seed(seed))
    return Reinforce(policy, STEPS, PI(0.3), **{"samples": 2, "soft_cap": 6.0, **settings})


def counting(updates: int = 100, sequences: int = 2) -> list[Batch]:
    episodes = Episodes(CountingStream(4, 0.0), sequences, 24, seed=5)
    return [episodes.batch(n) for n in range(updates)]


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    """And none of them left."""
    found = {name: parameter.grad for name, parameter in module.named_parameters()}
    module.zero_grad()
    return found


def check(got: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    assert got.keys() == expected.keys()
    for name in expected:
        assert got[name] is not None and expected[name] is not None, name
        torch.testing.assert_close(got[name], expected[name], rtol=0, atol=1e-12, msg=name)


def written_out(model: ByteUNet, batch: Batch, samples: Samples, starts: Tensor) -> Tensor:
    """Mean nll of all bytes decoded + .1 mean early nll of all bytes read, byte by byte."""
    h, length = model.encode(batch.bytes), batch.bytes.shape[1]
    nll = model.nll(samples.expand(h)[:, :-1], starts, samples.expand(batch.bytes))
    log_p = model.early_log_p(h)
    late = [nll[b, t] for b, s in enumerate(samples.row.tolist()) for t in range(length) if batch.valid[s, t]]
    early = [-log_p[s, t, batch.bytes[s, t]] for s in range(len(h)) for t in range(length) if batch.valid[s, t]]
    return torch.stack(late).mean() + 0.1 * torch.stack(early).mean()


# --- what reaches which parameter ---


@pytest.mark.parametrize("samples, rows", [(1, 3), (2, 4)])
def test_the_model_follows_its_own_loss(samples: int, rows: int) -> None:
    model, batch = unet(), pack(RAGGED)
    share = 0.5 if samples > 1 else 1.0
    learner = Learner(model, Given(UniformStride(3), samples=samples, samples_share=share), rows, 1)
    assert learner.num_sequences == 3 and learner.samples.counts == ((1, 1, 1) if samples == 1 else (2, 1, 1))
    loss, metrics, _ = learner.loss(batch)
    loss.backward()
    got = gradients(model)
    valid = learner.samples.expand(batch.valid)
    expected = written_out(model, batch, learner.samples, (torch.arange(16) % 3 == 0) & valid)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
    check(got, gradients(model))
    assert metrics["rate"] == ((torch.arange(16) % 3 == 0) & valid)[:, 1:].sum() / valid[:, 1:].sum()


def test_boundaries_that_learn_leave_the_model_its_own_gradient() -> None:
    """Without ``encoder_grad`` the policy's and the rate's loss reach the policy alone."""
    model, batch, agent = unet(), pack(RAGGED[:2]), reinforce(encoder_grad=False)
    learner = Learner(model, agent, 4, 1)
    rollout, live = unroll(model, agent.policy, batch, learner.samples, soft_cap=6.0)
    loss, _ = agent.loss(rollout, live)
    loss.backward(retain_graph=True)
    assert all(gradient is None for gradient in gradients(model).values())
    assert agent.policy.weight.grad.abs().min() > 0
    learner.loss(batch)[0].backward()
    got = gradients(model)
    written_out(model, batch, learner.samples, rollout["action"].bool()).backward()
    check(got, gradients(model))


def test_encoder_grad_reaches_the_encoder_and_nothing_behind_it() -> None:
    model, batch, agent = unet(), pack(RAGGED[:2]), reinforce(encoder_grad=True)
    rollout, live = unroll(model, agent.policy, batch, Samples([2, 2]), soft_cap=6.0, encoder_grad=agent.encoder_grad)
    agent.eval()  # so that the rate controller's sum stands still
    loss, _ = agent.loss(rollout, live)
    loss.backward()
    reached = {name for name, gradient in gradients(model).items() if gradient is not None and gradient.any()}
    before = {name for name, _ in model.named_parameters() if name.startswith(("embedding", "encoder"))}
    assert reached == before
    learner = Learner(model, agent, 4, 1)
    learner.loss(batch)[0].backward()
    got = gradients(model)
    rollout, live = unroll(model, agent.policy, batch, Samples([2, 2]), soft_cap=6.0, encoder_grad=True)
    (written_out(model, batch, Samples([2, 2]), rollout["action"].bool()) + agent.loss(rollout, live)[0]).backward()
    check(got, gradients(model))


def test_padding_reaches_no_parameter() -> None:
    """The same documents with 9 bytes more of padding, and other bytes in it."""
    model, agent, batch = unet(), reinforce(encoder_grad=True), pack(RAGGED[:2])
    agent.eval()
    more = torch.full((2, 9), 77)
    bytes_ = torch.where(batch.valid, batch.bytes, 200)
    longer = Batch(torch.cat([bytes_, more], 1), torch.cat([batch.valid, more < 0], 1), batch.terminated, batch.sequence, batch.seed)
    learner = Learner(model, agent, 4, 1)
    found = []
    for each in (batch, longer):
        learner.loss(each)[0].backward()
        found.append(gradients(model) | gradients(agent))
    check(*found)


def test_garbage_in_the_padding_of_a_rollout_reaches_no_loss() -> None:
    agent, found = reinforce(), []
    agent.eval()
    rollout, live = unroll(unet(), agent.policy, pack(RAGGED[:2]), Samples([2, 2]), soft_cap=6.0)
    for garbage in (0.0, float("nan")):
        dirty = rollout.clone()
        for key in ("logits", ("next", "reward"), ("next", "early_nll")):
            dirty[key][~rollout["valid"]] = garbage
        loss, metrics = agent.loss(agent.prepare(dirty), live)
        loss.backward(retain_graph=True)
        found.append(gradients(agent) | metrics)
    check(*found)


# --- the optimiser ---


def test_schedule() -> None:
    # 20 updates, a tenth of them warm-up, down to a tenth: cos(pi / 2) = 0 half way between 2 and 20, cos(pi / 3) = .5 a third of it
    factors = [_schedule(n, 20, 0.1, 0.1) for n in (0, 1, 2, 8, 11, 20, 30)]
    assert factors == pytest.approx([0.5, 1, 1, 0.1 + 0.9 * 0.75, 0.1 + 0.9 * 0.5, 0.1, 0.1])
    assert [_schedule(n, 100, 0.05, 0.0) for n in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert _schedule(0, 1, 0.05, 0.0) == 1  # one update is made in full
    assert [_schedule(n, 4, 1.0, 0.0) for n in range(5)] == pytest.approx([0.25, 0.5, 0.75, 1, 1])


def test_the_schedule_is_the_optimisers() -> None:
    learner = Learner(unet(), reinforce(lr_scale=8.0), 4, 4, lr=0.01, warmup=0.5, final=0.5)
    rates = []
    for batch in counting(4):
        rates.append([group["lr"] for group in learner.optimiser.param_groups])
        learner.update(batch)
    assert rates == [pytest.approx([lr, 8 * lr]) for lr in (0.005, 0.01, 0.01, 0.0075)]


def test_the_policy_has_its_own_learning_rate() -> None:
    """The first step of Adam moves every parameter by the learning rate, whatever its gradient."""
    model, agent = unet(), reinforce(lr_scale=8.0)
    before = {part: [p.detach().clone() for p in part.parameters()] for part in (model, agent)}
    Learner(model, agent, 4, 10, lr=1e-3, warmup=0.5, clip=1e9).update(counting()[0])
    for part, lr in ((model, 1e-3 / 5), (agent, 8e-3 / 5)):
        moved = [(p.detach() - old).abs().max() for p, old in zip(part.parameters(), before[part], strict=True)]
        torch.testing.assert_close(torch.stack(moved), torch.full((len(moved),), lr, dtype=torch.float64), rtol=1e-3, atol=0)


def test_gradients_are_clipped_to_a_norm() -> None:
    found = {}
    for clip in (0.05, 1e9):
        model, agent = unet(), reinforce()
        metrics = Learner(model, agent, 4, 10, clip=clip).update(counting()[0])
        parameters = [*model.parameters(), *agent.parameters()]
        found[clip] = metrics["grad_norm"], torch.cat([p.grad.flatten() for p in parameters])
    whole, clipped = found[1e9], found[0.05]
    assert whole[0] == clipped[0] > 0.05  # the norm before clipping is what is reported
    torch.testing.assert_close(whole[1].norm(), whole[0])
    torch.testing.assert_close(clipped[1], whole[1] * 0.05 / whole[0], rtol=1e-5, atol=0)


def test_the_same_seed_gives_the_same_bits() -> None:
    found = []
    for _ in range(2):
        model, agent = unet(), reinforce()
        learner = Learner(model, agent, 4, 3)
        for batch in counting(3):
            learner.update(batch)
        found.append({**model.state_dict(), **agent.state_dict()})
    assert "rate.integral" in found[0] and found[0]["rate.integral"] != 0
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name
    start = {**unet().state_dict(), **reinforce().state_dict()}
    assert not any(torch.equal(value, start[name]) for name, value in found[0].items())


def test_an_update_takes_the_rate_in_once_and_evaluation_never() -> None:
    agent = reinforce()
    learner = Learner(unet(), agent, 4, 10)
    agent.eval()
    learner.loss(counting()[0])
    assert agent.rate.integral == 0
    metrics = learner.update(counting()[0])
    torch.testing.assert_close(agent.rate.integral, (metrics["rate_uncapped"] - 0.3).float())


def test_bf16_leaves_log_probabilities_in_float32() -> None:
    batch, figures = pack(RAGGED[:2]), {}
    for precision in ("float32", "bf16"):
        model, agent = unet().float(), reinforce()
        agent.policy.float()
        loss, metrics, rollout = Learner(model, agent, 4, 1, precision=precision).loss(batch)
        loss.backward()
        floats = {key: value.dtype for key, value in rollout.items(True, True) if value.is_floating_point() and "hidden" not in key}
        assert {"logits", "action_log_prob", ("next", "reward"), ("next", "nll"), ("next", "early_nll")} <= floats.keys()
        returns = advantages.discounted_return(advantages.early_exit(rollout["next", "reward"].squeeze(-1), rollout), rollout, gamma=0.9)
        assert {*floats.values(), returns.dtype, agent.rate.integral.dtype} == {torch.float32}
        assert {value.dtype for value in metrics.values() if value.is_floating_point()} == {torch.float32}
        assert loss.dtype == metrics["nll"].dtype == metrics["g_rms"].dtype == model.head.weight.grad.dtype == torch.float32
        figures[precision] = metrics
    assert figures["bf16"]["nll"] != figures["float32"]["nll"]
    for name in ("nll", "early_nll"):
        torch.testing.assert_close(figures["bf16"][name], figures["float32"][name], rtol=0.01, atol=0)


# --- learning ---


def test_a_scorer_without_parameters_teaches_the_policy() -> None:
    """Cycles of four bytes, a scorer that is sharp where the segment began with the cycle: the policy finds their starts."""
    policy = WindowPolicy(5, target=0.25, logit_scale=1.0)
    agent = Reinforce(policy, STEPS, PI(0.25), policy_weight=1.0, rate_weight=0.3, samples=2)
    scorer = AlignedScorer(4, 0.05)
    learner = Learner(scorer, agent, 16, 80, lr=0.1)
    assert [len(group["params"]) for group in learner.optimiser.param_groups] == [1]
    batches = counting(81, 8)

    def hits() -> tuple[float, float]:
        """Recall and precision of the cycles' starts on a batch that is not trained on."""
        batch, stream = batches[-1], CountingStream(4, 0.0)
        rollout, _ = unroll(scorer, policy, batch, Samples([1] * 8))
        starts, true = rollout["action"].bool()[:, 1:], stream.reference(batch.bytes)[:, 1:]
        both = (starts & true).sum()
        return float(both / true.sum()), float(both / starts.sum())

    before = hits()
    for batch in batches[:-1]:
        metrics = learner.update(batch)
    recall, precision = hits()
    assert max(before) < 0.5 and recall > 0.95 and precision > 0.9, (before, recall, precision)
    assert 0.2 < metrics["rate"] < 0.3


def test_a_model_learns_beside_boundaries_that_do_not() -> None:
    model = ByteUNet(Size(width=16, heads=2, encoder=1, mid=1, decoder=1, window=4))
    learner = Learner(model, Given(IidRandom(0.3)), 2, 60, lr=0.02)
    assert [group["lr"] for group in learner.optimiser.param_groups] == pytest.approx([0.02 / 3])
    nll = [float(learner.update(batch)["nll"]) for batch in counting(60)]
    assert nll[0] > 5 and nll[-1] < 1.5  # log 256 = 5.5; the count is known from the first byte on


# --- mistakes ---


def test_nothing_to_train() -> None:
    with pytest.raises(UserError, match="there is nothing to train"):
        Learner(AlignedScorer(4), Given(IidRandom(0.25)), 2, 1)


def test_no_other_precision() -> None:
    with pytest.raises(UserError, match="no precision 'fp16'; use one of float32, bf16"):
        Learner(unet(), Given(IidRandom(0.25)), 2, 1, precision="fp16")


def test_a_rule_without_logits_has_nothing_to_learn() -> None:
    agent = Reinforce(UniformStride(3), STEPS[:2], LogitPressure(0.3))
    with pytest.raises(UserError, match="UniformStride has no logits to learn"):
        Learner(unet(), agent, 2, 1).loss(counting()[0])


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_one_update_on_every_device(device: torch.device, precision: str) -> None:
    torch.manual_seed(0)
    model = ByteUNet("nano")
    policy = WindowPolicy(model.width, 0.3)
    learner = Learner(model, Reinforce(policy, STEPS, PI(0.3), samples=2), 4, 1, precision=precision, device=device)
    parameters = [*model.parameters(), *policy.parameters()]
    before = [parameter.clone() for parameter in parameters]
    metrics = learner.update(Episodes(CountingStream(4, 0.0), learner.num_sequences, 50, seed=5).batch(0))
    assert {value.device.type for value in metrics.values()} == {device.type}
    assert all(value.isfinite() for value in metrics.values())
    assert metrics["nll"] == pytest.approx(5.6, abs=0.2)  # near ln 256 = 5.55: untrained
    moved = [not torch.equal(old, new) for old, new in zip(before, parameters, strict=True)]
    assert all(moved), "every parameter takes part in one update"


@pytest.mark.parametrize(
    "samples, share, rows, counts",
    [
        (1, 1.0, 3, [1, 1, 1]),
        (2, 1.0, 4, [2, 2]),
        (2, 0.5, 8, [2, 2, 1, 1, 1, 1]),
        (3, 0.75, 12, [3, 3, 3, 1, 1, 1]),
        (7, 0.28, 25, [7] + [1] * 18),  # in floating point 25 * .28 is a little over 7
        (2, 0.0, 2, [1, 1]),
    ],
)
def test_samples_fill_the_rows(samples: int, share: float, rows: int, counts: list[int]) -> None:
    agent = Agent(UniformStride(3), samples=samples, samples_share=share)
    assert agent.sample_counts(rows) == counts and sum(counts) == rows


@pytest.mark.parametrize("samples, share, rows", [(2, 1.0, 3), (2, 0.5, 6), (2, 1.5, 4), (2, -0.5, 4), (0, 1.0, 4), (3, 0.5, 1)])
def test_samples_that_do_not_fill_the_rows(samples: int, share: float, rows: int) -> None:
    with pytest.raises(UserError, match="do not fill"):
        Agent(UniformStride(3), samples=samples, samples_share=share).sample_counts(rows)
