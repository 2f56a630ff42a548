"""Diagnostic problems: both faces are held to the protocol in test_closed_form.py; here, the answers that are known of them."""

import itertools
import math

import pytest
import torch
from torch import float64

from segment_env import diagnostics
from segment_env.batch import Batch, Episodes, Samples
from segment_env.diagnostics import Deceptive, Delayed, Delimiter, Period, Silence, Words, oracle
from segment_env.diagnostics.base import geometric, spread
from segment_env.env import SegmentEnv
from segment_env.errors import UserError
from segment_env.noise import BYTES, uniform
from segment_env.streams import MadeUpLanguage
from segment_env.streams.made_up import parse
from segment_env.unroll import unroll
from tests.worlds import Stepped

PROBLEMS = {
    "period": lambda dtype=float64: Period(dtype=dtype),
    "delimiter": lambda dtype=float64: Delimiter(dtype=dtype),
    "words": lambda dtype=float64: Words(dtype=dtype),
    "delayed": lambda dtype=float64: Delayed(dtype=dtype),
    "deceptive": lambda dtype=float64: Deceptive(dtype=dtype),
    "silence": lambda dtype=float64: Silence(dtype=dtype),
}
OTHERS = {
    "period": lambda: Period(5, 0.2, float64),
    "delimiter": lambda: Delimiter(4, 1, 3, 0.2, float64),
    "words": lambda: Words(12, 1, 4, 0.5, 3, dtype=float64),
    "delayed": lambda: Delayed(1, 3, 0.5, dtype=float64),
    "deceptive": lambda: Deceptive(2, 0.5, -0.75, -0.2, 1.0, 1.0, 0.3, dtype=float64),
    "silence": lambda: Silence(3, 1, 2, 1.0, dtype=float64),
}


@pytest.fixture(params=PROBLEMS)
def problem(request):
    return PROBLEMS[request.param]()


def batch_of(x):
    return Batch(x, torch.ones_like(x, dtype=torch.bool), torch.zeros(len(x), dtype=torch.bool), torch.arange(len(x)), 0)


def rewards(problem, x, actions, price):
    """[S, T] nats; actions [S, T] are replayed, None: the oracle's own."""
    rollout, _ = unroll(problem, oracle(problem), batch_of(x), Samples([1] * len(x)), actions=actions, price=price)
    return rollout["next", "reward"].squeeze(-1)


# streams


def test_a_sequence_depends_on_seed_and_index_alone_and_a_crop_is_its_beginning(problem):
    index = torch.tensor([9, 0, 10**9, 4])
    x, valid, terminated = problem.sequences(3, index, 200)
    assert x.shape == (4, 200) and x.dtype == torch.int64 and x.min() >= 0 and x.max() <= 255 and valid.all() and not terminated.any()
    for s, length in itertools.product(range(4), (1, 2, 50, 200)):
        assert torch.equal(problem.sequences(3, index[s : s + 1], length)[0][0], x[s, :length])
    assert not torch.equal(problem.sequences(4, index, 200)[0], x) and len(x.unique(dim=0)) == 4


def test_the_reference_reads_the_past_alone(problem):
    x = problem.sequences(0, torch.arange(20), 60)[0]
    reference = problem.reference(x)
    assert reference.dtype == torch.bool and reference[:, 0].all()
    for t in (1, 7, 30):
        changed = x.clone()
        changed[:, t:] = 255 - changed[:, t:]
        assert torch.equal(problem.reference(changed)[:, : t + 1], reference[:, : t + 1])


def test_where_the_oracles_cut():
    x = Delimiter().sequences(0, torch.arange(5), 300)[0]
    assert torch.equal(Delimiter().reference(x)[:, 1:], x[:, :-1] == 32)
    x = Silence().sequences(0, torch.arange(5), 300)[0]
    assert torch.equal(Silence().reference(x)[:, 2:], (x[:, :-2] == 128) & (x[:, 1:-1] != 128))
    x = Delayed().sequences(0, torch.arange(5), 300)[0]
    assert torch.equal(Delayed().reference(x)[:, 1:], x[:, :-1] == ord("?"))
    x = Deceptive().sequences(0, torch.arange(5), 300)[0]
    assert torch.equal(Deceptive().reference(x)[:, 1:], x[:, :-1] == ord("!"))
    assert torch.equal(Words().reference(x), MadeUpLanguage(24, 2, 7).reference(x))
    assert torch.equal(Period().reference(x), Period().stream.reference(x))


def test_the_answer_is_the_key_and_cues_do_not_overlap():
    x = Delayed(lag=9).sequences(0, torch.arange(50), 200)[0]
    row, cue = (x[:, :190] == ord("?")).nonzero(as_tuple=True)
    assert torch.equal(x[row, cue + 1], x[row, cue + 10]) and len(x[row, cue + 1].unique()) == 16
    assert ((x[row[:, None], cue[:, None] + 2 + torch.arange(8)] - ord("a") < 8) & (x[row, cue + 1] < ord("a"))[:, None]).all()


def test_geometric_numbers_have_their_mean():
    """100,000 independent draws: within 4 standard errors but for a chance of 6e-5 each."""
    u = uniform(0, BYTES, torch.arange(100_000))
    for mean in (0.5, 6.0, 49.0):
        draws = geometric(u, mean).double()
        assert draws.min() == 0 and abs(draws.mean() - mean) < 4 * draws.std() / len(u) ** 0.5
    assert not geometric(u, 0.0).any()


# the parse of a made-up language


@pytest.mark.parametrize("arguments", [(40, 2, 8), (5, 1, 3), (3, 1, 1), (1, 4, 4)])
@pytest.mark.parametrize("length", [1, 2, 3, 17, 130])
def test_the_parse_is_the_automaton_stepped_over_time(arguments, length):
    language = MadeUpLanguage(*arguments, seed=2)
    x = language.sequences(0, torch.arange(40), length)[0]
    generator = torch.Generator().manual_seed(0)
    x[10:] = torch.where(torch.rand(30, length, generator=generator) < 0.02, x[:30].flip(1), x[10:])  # letters out of place
    x[38:] = torch.randint(0, 256, (2, length), generator=generator)
    nodes = [torch.zeros(40, dtype=torch.int64)]
    for t in range(length):
        nodes.append(language.trie[nodes[-1], x[:, t]])
    expected = torch.stack(nodes, 1)
    assert torch.equal(parse(language.trie, arguments[2], x), expected)
    assert torch.equal(language.reference(x), expected[:, :-1] == 0)


# the oracle and the scores


@pytest.mark.parametrize("dtype", [torch.float32, float64])
@pytest.mark.parametrize("name", PROBLEMS)
def test_the_oracle_cuts_where_the_reference_does(name, dtype):
    problem = PROBLEMS[name](dtype)
    batch = Episodes(problem, 20, 100, seed=1).batch(0)
    reference = problem.reference(batch.bytes)
    for policy in (oracle(problem), Stepped(oracle(problem))):
        rollout, live = unroll(problem, policy, batch, Samples([1] * 20))
        assert torch.equal(rollout["action"].bool(), reference) and live.logits is None
    assert reference[:, 1:].any()


def test_a_step_at_a_time_in_the_environment(problem):
    episodes, samples = Episodes(problem, 3, 40, seed=0), Samples([2, 1, 1])
    policy = oracle(problem)
    rollout, _ = unroll(problem, policy, episodes.batch(0), samples, price=0.3)
    env = SegmentEnv(problem, episodes, samples, price=0.3)
    stepped = env.rollout(40, lambda td: td.set("action", policy._decide(td["hidden"]).long()), break_when_all_done=True)
    torch.testing.assert_close(stepped["next", "reward"], rollout["next", "reward"], rtol=0, atol=1e-12)


@pytest.mark.parametrize("made", [PROBLEMS, OTHERS], ids=["defaults", "others"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_scores_are_as_derived(name, made):
    """Means over 150 sequences, each an independent sample, within 4 standard errors: each of the 12 x 6 comparisons fails falsely with
    chance 6e-5 at most, 0.5 % in all, and the seeds are fixed.

    The first 200 bytes are left out: by then the beginning is forgotten.
    """
    problem = made[name]()
    x = problem.sequences(1, torch.arange(150), 450)[0]
    generator, price = torch.Generator().manual_seed(0), problem.default_price
    low, high = problem.scores(problem.rate, price), problem.scores(0.4, price)
    draws = torch.rand(x.shape, generator=generator)
    runs = [
        (low["oracle"], rewards(problem, x, None, price)),
        (low["random"], rewards(problem, x, draws < problem.rate, price)),
        (high["random"], rewards(problem, x, draws < 0.4, price)),
        (low["never"], rewards(problem, x, torch.zeros_like(x, dtype=torch.bool), price)),
        (low["always"], rewards(problem, x, torch.ones_like(x, dtype=torch.bool), price)),
        (problem.rate, problem.reference(x).double()),
    ]
    for i, (expected, values) in enumerate(runs):
        means = values[:, 200:].mean(1)
        assert abs(means.mean() - expected) <= 4 * means.std() / math.sqrt(150) + 1e-9, i
    assert set(low) == {"oracle", "random", "never", "always"}


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_docstrings_figures(name):
    problem = PROBLEMS[name]()
    scores = problem.scores(problem.rate, problem.default_price)
    words = " ".join(type(problem).__doc__.split())
    assert f"default price of {problem.default_price}" in words
    assert f"racle {scores['oracle']:.3f}, always {scores['always']:.3g}" in words
    assert f"at the oracle's rate of {problem.rate:.3g} random cuts give {scores['random']:.3f}." in words
    assert scores["never"] == 0 and scores["oracle"] > max(scores["random"], scores["always"], 0)


def test_scores_by_hand():
    assert Delimiter(8, 2, 7).scores(0.3, 0.5)["oracle"] == pytest.approx((3.5 * math.log(8) - 0.5) / 5.5)
    lasts = [0, 1, *(5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6)]  # P(n > k)
    random = math.log(8) * sum(p * 0.3 * 0.7**k for k, p in enumerate(lasts)) / 5.5 - 0.5 * 0.3
    assert Delimiter(8, 2, 7).scores(0.3, 0.5)["random"] == pytest.approx(random)
    assert Silence(8, 4, 12).scores(0.3, 0.5)["oracle"] == pytest.approx((7 * math.log(8) - 0.5) / 58)
    assert Silence(8, 4, 12).scores(0.3, 0.5)["always"] == pytest.approx(math.log(8) / 58 - 0.5)
    assert Delayed().scores(0.3, 0.5)["random"] == pytest.approx(0.3 * math.log(16) / 32 - 0.15)
    assert Deceptive().scores(0.3, 0.1)["oracle"] == pytest.approx(2.9 / 26)


def test_words_with_equally_likely_words_of_one_letter():
    problem = Words(4, 1, 1, exponent=0.0, dtype=float64)
    assert problem.rate == 1 and problem.scores(0.5, 0.0) == pytest.approx(dict.fromkeys(("oracle", "random", "never", "always"), 0.0))


# the oracle is the best policy


def best_actions(problem, gamma, price):
    """Best decisions [N, A] of every node and memory, and which nodes the stream visits, by value iteration.

    The law of the bytes given the node is counted on 100,000 bytes; rewards are what the stepwise face says.
    """
    x = problem.sequences(5, torch.arange(100), 1000)[0]
    counts = torch.zeros(len(problem.step), 256, dtype=float64)
    nodes = problem.nodes(x)[:, :-1]
    counts.index_put_((nodes, x), torch.ones((), dtype=float64), accumulate=True)
    law = counts / counts.sum(-1, keepdim=True).clamp(min=1)
    size = len(law)
    moves = torch.zeros(size, size, dtype=float64).scatter_add(1, problem.step[:, :256], law)
    memories = problem.row.shape[1]
    node = torch.arange(size).repeat_interleave(memories)
    state = {"node": node, "memory": torch.arange(memories).repeat(size)}
    early = problem.early_log_p(problem.one_hot[problem.context[node]])
    outcomes = []
    for action in (False, True):
        after, log_p = problem.predict(state, torch.full_like(node, action, dtype=torch.bool))
        reward = (law[node] * (log_p - early)).sum(-1) - price * action
        outcomes.append((reward.view(size, -1), after["memory"].view(size, -1)))
    value = torch.zeros(size, memories, dtype=float64)
    for _ in range(int(7 / (1 - gamma))):  # gamma^n < e^-7
        ahead = moves @ value
        q = [reward + gamma * ahead.gather(1, memory) for reward, memory in outcomes]
        value = torch.maximum(*q)
    return q[1] > q[0], counts.sum(-1) > 0


@pytest.mark.parametrize("made", [PROBLEMS, OTHERS], ids=["defaults", "others"])
@pytest.mark.parametrize("name", [name for name in PROBLEMS if name != "period"])
def test_the_oracle_is_the_best_policy_far_sighted(name, made):
    problem = made[name]()
    cut, visited = best_actions(problem, 0.99, problem.default_price / 10)
    expected = problem.oracle_contexts[problem.context][:, None].expand_as(cut)
    assert torch.equal(cut[visited], expected[visited])
    assert expected[visited].any()


@pytest.mark.parametrize(
    ("problem", "price"),
    [
        (Period(4, 0.01, float64), 0.5),
        (Delimiter(5, 2, 3, dtype=float64), 0.5),
        (Silence(4, 2, 4, silence=2.0, dtype=float64), 0.5),
        (Delayed(3, 8, 1.0, dtype=float64), 0.5),
        (Deceptive(3, 1.0, -1.0, -1.0, 1.0, 1.0, dtype=float64), 0.1),
    ],
)
def test_no_way_to_cut_ten_bytes_is_better(problem, price):
    """All 2^(T-1) ways to cut the first T <= 12 bytes, up to where a word or cycle ends: the oracle's alone has the greatest return.

    On these problems the gain of a cut is the same for all bytes that may follow, so that hindsight has no advantage.
    """
    cuts = 0
    for x in problem.sequences(2, torch.arange(6), 12)[0]:
        h = problem.encode(x[None])
        length = int((h[0].argmax(-1) == 0).nonzero().max())  # context 0: nothing is pending
        if length < 2 or (isinstance(problem, Period) and (x >= 4).any()):
            continue
        actions = torch.tensor([[1, *bits] for bits in itertools.product((0, 1), repeat=length - 1)]).bool()
        rows = x[:length].expand(len(actions), -1)
        cost = problem.nll(h[:, :length].expand(len(actions), -1, -1), actions, rows).sum(1) + price * actions[:, 1:].sum(1)
        order = cost.argsort()
        assert cost[order[0]] < cost[order[1]] - 1e-9
        assert torch.equal(actions[order[0]], problem.reference(rows[:1])[0])
        cuts += int(actions[order[0]].sum()) - 1
    assert cuts


# discounts


def cut_return(problem, mark, gamma, price):
    """Discounted return of one cut right after the first ``mark``, on cutting nowhere; played."""
    x = problem.sequences(0, torch.arange(1), 200)[0]
    first = int((x[0] == mark).nonzero()[0]) + 1
    never = torch.zeros_like(x, dtype=torch.bool)
    once = never.clone()
    once[0, first] = True
    difference = (rewards(problem, x, once, price) - rewards(problem, x, never, price))[0, first:]
    return float((difference * gamma ** torch.arange(len(difference), dtype=float64)).sum())


def flip(value, low=0.01, high=1.0):
    """Where an ever rising or ever falling function of gamma changes its sign."""
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if (value(middle) > 0) == (value(low) > 0) else (low, middle)
    return low


def test_a_near_sighted_agent_does_not_learn_the_delayed_cut():
    problem, price = PROBLEMS["delayed"](), 0.5
    for gamma in (0.5, 0.9, 0.99, 1.0):
        played = cut_return(problem, ord("?"), gamma, price)
        assert played == pytest.approx(gamma**24 * math.log(16) - price)
        assert (played > 0) == (gamma >= 0.99)
    assert flip(lambda gamma: cut_return(problem, ord("?"), gamma, price)) == pytest.approx(0.931, abs=5e-4)
    for gamma, expected in ((0.9, torch.zeros(41).bool()), (0.99, problem.oracle_contexts)):
        cut, visited = best_actions(problem, gamma, price)
        assert torch.equal(cut[visited], expected[problem.context][:, None].expand_as(cut)[visited])
    assert [cut_return(problem, ord("?"), gamma, price) for gamma in (0.9, 0.99)] == pytest.approx([-0.279, 1.678], abs=6e-4)


def test_a_near_sighted_agent_gets_both_marks_wrong():
    problem, price = PROBLEMS["deceptive"](), 0.1
    lure, invest = ord("$"), ord("!")
    for gamma in (0.0, 0.5, 0.9, 1.0):
        later = sum(gamma**k for k in range(1, 9))
        returns = [cut_return(problem, mark, gamma, price) for mark in (lure, invest)]
        assert returns == pytest.approx([1 - later / 2 - price, -1 + later / 2 - price])
        assert [value > 0 for value in returns] == [gamma < 0.9, gamma >= 0.9]
    assert flip(lambda gamma: cut_return(problem, lure, gamma, price)) == pytest.approx(0.650, abs=5e-4)
    assert flip(lambda gamma: cut_return(problem, invest, gamma, price)) == pytest.approx(0.700, abs=5e-4)
    documented = [cut_return(problem, mark, gamma, price) for gamma in (0.5, 0.9) for mark in (lure, invest)]
    assert documented == pytest.approx([0.402, -0.602, -1.663, 1.463], abs=6e-4)
    lured = torch.arange(19) == 1
    for gamma, expected in ((0.5, lured), (0.9, problem.oracle_contexts)):
        cut, visited = best_actions(problem, gamma, price)
        assert torch.equal(cut[visited], expected[problem.context][:, None].expand_as(cut)[visited])


# tables and mistakes


def test_ratios_of_probabilities_do_not_depend_on_the_leak():
    probability = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.25, 0.75, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]], dtype=float64)
    some = spread(probability, 0.1)
    torch.testing.assert_close(some.sum(-1), torch.ones(3, dtype=float64))
    torch.testing.assert_close(some[0, :2] / some[1, :2], probability[0, :2] / probability[1, :2])
    assert (some > 0).all() and torch.equal(some[2], probability[2])


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Period(1),
        lambda: Period(8, 0.0),
        lambda: Delimiter(letters=1),
        lambda: Delimiter(shortest=3, longest=2),
        lambda: Delimiter(leak=0.0),
        lambda: Delimiter(dtype=torch.float16),
        lambda: Words(30, 1, 1),
        lambda: Delayed(lag=0),
        lambda: Delayed(lag=2.5),
        lambda: Delayed(keys=27),
        lambda: Delayed(gap=-1),
        lambda: Deceptive(after=0),
        lambda: Deceptive(lure_later=0.0),
        lambda: Deceptive(chance=0.5),
        lambda: Deceptive(gap=math.inf),
        lambda: Silence(loudnesses=128),
        lambda: Silence(silence=0.5),
        lambda: Silence(sample_rate=0),
        lambda: Delimiter().scores(0.0, 0.5),
    ],
)
def test_mistakes_have_one_line(wrong):
    with pytest.raises(UserError) as caught:
        wrong()
    assert "\n" not in str(caught.value)


def test_what_is_exported():
    assert {name.lower() for name in diagnostics.__all__} == {*PROBLEMS, "oracle"}
    assert Silence().unit == "sample" and Silence().sample_rate == 8000 and Words().unit == "byte"
