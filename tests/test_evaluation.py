"""Bits per byte of whole documents: each byte once, the training path's figures, marginals, thresholds, and a known entropy."""

import itertools
import math
from statistics import stdev

import pytest
import torch
from torch import Tensor, float64, nn
from worlds import tiny_unet

from agents.agent import Reinforce
from agents.calibration import offset_for, shifted_logits
from agents.evaluation import evaluate, tally, whole
from agents.learner import Learner
from agents.policies import WindowPolicy
from agents.rules import IidRandom, UniformStride
from agents.windows import windows
from segment_env.batch import Episodes, Samples, pack
from segment_env.closed_form import CountingStream, TableScorer
from segment_env.errors import UserError
from segment_env.metrics import bits_per_byte
from segment_env.streams import crops, whitespace_starts
from segment_env.unroll import unroll

SCORER = TableScorer(dtype=float64)
TEXTS = [b"Call me Ishmael. Some years ago", b"", b"never mind", b"x", b"how long precisely; having little or no money in my purse"]


def policy_of(width: int = 8, n_past: int = 0) -> WindowPolicy:
    torch.manual_seed(0)
    policy = WindowPolicy(width, 0.3, n_past).double()
    nn.init.normal_(policy.weight, std=20.0)
    return policy


def tallied(documents: list[bytes], length: int = 16, rows: int = 3, stride: int | None = None, policy=None, **how):
    return tally(SCORER, policy or policy_of(), windows(documents, length, rows, 5, stride), whitespace_starts, **how)


def numbers(counted) -> dict[str, float]:
    return {key: value for key, value in counted.figures().items() if not isinstance(value, str)}


@pytest.mark.parametrize("stride", [None, 1, 5, 16])
@pytest.mark.parametrize("rows", [1, 4])
def test_every_byte_is_scored_once(stride: int | None, rows: int) -> None:
    seen = [bytearray() for _ in TEXTS]
    number = itertools.count()
    for batch, scored, document in windows(TEXTS, 16, rows, 5, stride):
        assert len(scored) <= rows and batch.bytes.shape[1] <= 16 and not (scored & ~batch.valid).any() and batch.seed == 5
        for i, x, row, valid, end in zip(document.tolist(), batch.bytes, scored, batch.valid, batch.terminated, strict=True):
            context = bytes(x[valid & ~row].tolist())
            assert seen[i].endswith(context) and (len(context) == 16 - (stride or 16) if seen[i] else not context)
            seen[i] += bytes(x[row].tolist())
            assert bool(end) == (len(seen[i]) == len(TEXTS[i]))
        assert batch.sequence.tolist() == [next(number) for _ in document]
    assert [bytes(each) for each in seen] == TEXTS


def test_windows_of_one_document_are_the_crops_that_training_validates_on() -> None:
    data = b" ".join(TEXTS)
    for (batch, *_), crop in zip(windows([data], 16, 3, 5), crops(data, 16, 3, 5), strict=True):
        width = batch.bytes.shape[1]
        assert batch.bytes.equal(crop.bytes[:, :width]) and batch.valid.equal(crop.valid[:, :width])
        assert batch.sequence.equal(crop.sequence) and batch.terminated.equal(crop.terminated)


def test_what_cannot_be_windowed() -> None:
    with pytest.raises(UserError, match="no bytes to evaluate on"):
        next(windows([b"", b""], 16, 3))
    for stride in (0, 17):
        with pytest.raises(UserError, match="from 1 to the crop's 16"):
            next(windows(TEXTS, 16, 3, stride=stride))


def test_a_document_of_three_crops_is_three_crops() -> None:
    """Each byte's nats are those of its own crop, a sequence with a fresh BOS; figures do not depend on the batch."""
    data, policy = TEXTS[-1][:40], policy_of()
    nats = [
        unroll(SCORER, policy, pack([data[begin : begin + 16]], 5, n), Samples([1]))[1].nll.sum() for n, begin in enumerate((0, 16, 32))
    ]
    figures = [numbers(tallied([data], rows=rows)) for rows in (1, 2, 5)]
    assert figures[0]["num_bytes"] == 40
    assert figures[0]["bits_per_byte"] == pytest.approx(bits_per_byte(sum(nats), 40), rel=1e-12)
    for other in figures[1:]:
        assert other == pytest.approx(figures[0], rel=1e-12, nan_ok=True)


def test_bits_per_byte_are_the_mean_nll_of_training() -> None:
    """The learner's own loss, on the same crop with the same noise, of a policy that is not capped in training either."""
    unet = tiny_unet()
    agent = Reinforce(policy_of(unet.width), [])
    batch = pack([b"Call me Ishmael. Some years ago, never mind how long"], 3)
    _, metrics, _ = Learner(unet, agent, rows=1, updates=1, precision="float32").loss(batch)
    counted = tally(unet, agent.policy, [whole(batch)], whitespace_starts)
    assert counted.figures()["bits_per_byte"] * math.log(2) == pytest.approx(float(metrics["nll"]), rel=1e-12)
    assert counted.figures()["rate"] == pytest.approx(float(metrics["rate"]))


def test_more_context_with_a_stride() -> None:
    """A byte of the second window is predicted as at its place in that window, its context scored by the first alone."""
    data, policy = TEXTS[-1][:20], UniformStride(3)
    first, second = (unroll(SCORER, policy, pack([part]), Samples([1]))[1].nll[0] for part in (data[:16], data[4:]))
    counted = tallied([data], stride=4, policy=policy)
    assert counted.nats[0, 0] == pytest.approx(float(first.sum() + second[12:].sum()), rel=1e-12)
    assert (counted.decoded, counted.num_windows, int(counted.num_bytes)) == (32, 2, 20)


def test_the_first_of_many_draws_is_the_single_one() -> None:
    one, many = tallied(TEXTS), tallied(TEXTS, draws=4)
    assert numbers(many) == pytest.approx(numbers(one), rel=1e-12)
    assert many.nats[:, 0] == pytest.approx(one.nats[:, 0], rel=1e-12)
    rollout, live = unroll(SCORER, policy_of(), pack([TEXTS[2]], 5, 2), Samples([4]))  # the third window
    assert many.nats[1] == pytest.approx(live.nll.sum(1), rel=1e-12)
    assert one.many_draws()["bits_per_byte"] == one.many_draws()["marginal_bits_per_byte"] == one.figures()["bits_per_byte"]
    assert math.isnan(one.many_draws()["standard_error"])


def test_the_marginal_is_at_most_the_mean() -> None:
    counted = tallied(TEXTS, draws=7)
    found, log_p = counted.many_draws(), -counted.nats
    assert found["marginal_bits_per_byte"] < found["bits_per_byte"] - 1e-3
    means = [bits_per_byte(nats, 100) for nats in counted.nats.sum(0).tolist()]
    scale = 100 / sum(map(len, TEXTS))
    assert found["bits_per_byte"] == pytest.approx(scale * sum(means) / 7, rel=1e-12)
    assert found["standard_error"] == pytest.approx(scale * stdev(means) / 7**0.5, rel=1e-9)
    assert found["marginal_bits_per_byte"] == pytest.approx(
        bits_per_byte(-log_p.exp().mean(1).log().sum(), sum(map(len, TEXTS))), rel=1e-12
    )
    assert found["num_draws"] == 7 and found["rate"] == pytest.approx(sum(counted.rates) / 7)


def test_the_marginal_nears_the_true_one() -> None:
    """All 2^5 boundaries of six bytes enumerated; 20,000 draws come within 4 standard errors (a false failure: 6e-5; seed fixed)."""
    data, rate = b"Ishmae", 0.3
    actions = torch.tensor([(1, *rest) for rest in itertools.product((0, 1), repeat=5)]).bool()
    nll = unroll(SCORER, IidRandom(rate), pack([data]), Samples([32]), actions=actions)[1].nll.sum(1)
    weight = torch.where(actions[:, 1:], rate, 1 - rate).double().log().sum(1)
    true = float((weight - nll).logsumexp(0))
    counted = tallied([data], policy=IidRandom(rate), draws=20_000)
    p = (-counted.nats[0]).exp()
    error = float(p.std() / p.mean()) / math.sqrt(len(p))
    found = -counted.many_draws()["marginal_bits_per_byte"] * 6 * math.log(2)
    assert abs(found - true) < 4 * error < 0.1
    assert -float(counted.nats.mean()) < true - 5 * error


def test_the_standard_error_over_documents() -> None:
    """Of documents of one length it is that of the mean of their bits per byte; of a single one there is none."""
    counted = tallied([text[:10] for text in TEXTS if len(text) >= 10])
    each = counted.nats[:, 0] / (10 * math.log(2))
    assert counted.standard_error(counted.nats[:, 0]) == pytest.approx(float(each.std()) / 3**0.5, rel=1e-12)
    assert math.isnan(tallied(TEXTS[:1]).standard_error(torch.ones(1, dtype=float64)))


@pytest.mark.parametrize("n_past", [0, 2])
def test_thresholded_boundaries_stand_where_the_logit_is_positive(n_past: int) -> None:
    policy = policy_of(n_past=n_past)
    known = [Episodes(CountingStream(6, 0.3), 4, 300, seed=1).batch(n) for n in range(3)]
    with shifted_logits(policy, offset_for(SCORER, policy, known, 0.2, thresholded=True)):
        counted = tally(SCORER, policy, map(whole, known), whitespace_starts, thresholded=True)
        sampled, _ = unroll(SCORER, policy, known[0], Samples([1] * 4))
        live = unroll(SCORER, policy, known[0], Samples([1] * 4), actions=sampled["action"])[1]
    assert counted.boundaries == "thresholded" and not counted.sampled
    assert counted.figures()["rate"] == pytest.approx(0.2, abs=0.02), "calibrated on these very bytes, in steps of tied logits"
    if not n_past:  # logits do not depend on decisions
        starts = (live.logits > 0) & sampled["is_choice"]
        starts[:, 0] = True
        nll = unroll(SCORER, policy, known[0], Samples([1] * 4), actions=starts)[1].nll.sum(1)
        assert counted.nats[:4, 0] == pytest.approx(nll, rel=1e-12)


class Markov:
    """A chain over four bytes, and the scorer that knows it: h is one-hot in x[t-1], or at t = 0 in none, where x is stationary."""

    width, dtype = 5, float64
    letters = torch.tensor(list(b"abcd"))

    def __init__(self) -> None:
        self.step = torch.tensor([[7.0, 1, 1, 1], [1, 1, 7, 1], [2, 2, 2, 4], [6, 1, 2, 1]], dtype=float64) / 10
        self.stationary = torch.linalg.matrix_power(self.step, 1000)[0]
        self.table = torch.full((5, 256), -torch.inf, dtype=float64)
        self.table[:4, self.letters] = self.step.log()
        self.table[4, self.letters] = self.stationary.log()

    def documents(self, count: int, length: int) -> list[bytes]:
        generator = torch.Generator().manual_seed(0)
        state = torch.multinomial(self.stationary, count, True, generator=generator)
        states = [state]
        for _ in range(length - 1):
            states.append(torch.multinomial(self.step[states[-1]], 1, generator=generator).squeeze(1))
        return [bytes(row) for row in self.letters[torch.stack(states, 1)].tolist()]

    def nats(self, length: int, crop: int) -> float:
        """Expected, of a document in crops: entropy of the stationary distribution at their first bytes, of the chain elsewhere."""
        first, later = torch.special.entr(self.stationary).sum(), (self.stationary[:, None] * torch.special.entr(self.step)).sum()
        num_crops = -(-length // crop)
        return float(num_crops * first + (length - num_crops) * later)

    def encode(self, x: Tensor) -> Tensor:
        before = nn.functional.pad((x - self.letters[0]).clamp(0, 3), (1, 0), value=4)
        return nn.functional.one_hot(before, 5).to(float64)

    def early_log_p(self, h: Tensor) -> Tensor:
        return self.table[h.argmax(-1)]

    def nll(self, h: Tensor, starts: Tensor, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return -self.early_log_p(h).gather(-1, x[..., None]).squeeze(-1)


def test_a_markov_source_is_scored_at_its_entropy() -> None:
    """300 documents of 200 bytes within 4 of evaluation's own standard errors (a false failure: 6e-5; the seed is fixed)."""
    source = Markov()
    counted = tally(source, IidRandom(0.2), windows(source.documents(300, 200), 64, 50), whitespace_starts)
    error = counted.standard_error(counted.nats[:, 0])
    expected = bits_per_byte(source.nats(200, 64), 200)
    assert counted.figures()["bits_per_byte"] == pytest.approx(expected, abs=4 * error)
    assert 0 < error < 0.01 and bits_per_byte(source.nats(200, 1), 200) > expected + 10 * error


def test_evaluation_of_batches_is_that_of_their_sequences() -> None:
    batches = [Episodes(CountingStream(6, 0.3), 4, 30, seed=1).batch(n) for n in range(2)]
    figures = evaluate(SCORER, policy_of(), iter(batches), CountingStream(6, 0.3), price=0.1)
    nll = torch.cat([unroll(SCORER, policy_of(), batch, Samples([1] * 4))[1].nll for batch in batches])
    assert figures["bits_per_byte"] == pytest.approx(bits_per_byte(nll.sum(), nll.numel()), rel=1e-12)
    rewards = torch.cat([unroll(SCORER, policy_of(), batch, Samples([1] * 4), price=0.1)[0]["next", "reward"] for batch in batches])
    assert figures["reward"] == pytest.approx(float(rewards.mean()), rel=1e-12)
